"""The distillation recipe, from a small random teacher to a student that comes nearer to it in each stage."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from recipes import steps_logged
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.conversion import Checkpoint, make_plan

for extra in ("accelerate", "datasets"):
    pytest.importorskip(extra, reason=f"{extra} is not installed")

RECIPE = Path(__file__).parents[1] / "examples" / "distill.py"


def load():
    spec = importlib.util.spec_from_file_location("distill", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def call(*arguments):
    """Exit code and output of the recipe run in this process; a wrong input is its exception."""
    result = CliRunner().invoke(load().app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"{type(result.exception).__name__}: {result.exception}"
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def teacher(checkpoint, tmp_path_factory):
    """A folder with a random Llama whose predictions are far from uniform, and a text file."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "\n\x1e\n".join(f"A pointer {i} is an address of {i * 7}." for i in range(100))
    (folder / "texts.txt").write_text(text)
    return folder


OPTIONS = ("--length", 24, "--batch-size", 4, "--held-out", 6, "--measure-every", 5, "--cpu", "--keep-attention", "1")


def losses(run, stage):
    """What was logged of a stage, its loss at each step."""
    folder = max((run / "distillation" / stage).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return [entry["loss"] for entry in steps_logged(folder)]


def test_each_stage_brings_the_student_nearer(teacher, tmp_path):
    run = tmp_path / "run"
    rates = ("--align-rate", 1e-2, "--rate", 1e-2, "--scratch-rate", 1e-2, "--scratch", "--accumulate", 2)
    steps = ("--align", 20, "--match", 20, "--tune", 10)
    code, output = call(
        teacher, teacher / "texts.txt", "--output", run, *OPTIONS, *rates, *steps, "--set", "rule=falcon_1"
    )
    assert code == 0, output
    for stage, falls_to in (("align", 0.9), ("match", 0.5), ("tune", 0.7), ("scratch", 0.7)):
        logged = losses(run, stage)
        assert logged[-1] < falls_to * logged[0], (stage, logged)
    start = AutoModelForCausalLM.from_pretrained(run / "distillation" / "start").state_dict()
    aligned = AutoModelForCausalLM.from_pretrained(run / "distillation" / "align" / "checkpoint-20").state_dict()
    changed = {name.split(".")[3] for name in start if not torch.equal(start[name], aligned[name])}
    assert changed == {"linear_attn"}
    results = json.loads((run / "metrics.json").read_text())
    curve = results["curve"]
    assert set(curve) == {"teacher", "converted", "align", "match", "tune", "scratch"}
    assert list(curve["match"]) == ["5", "10", "15", "20"]
    assert list(curve["scratch"])[-1] == "50"
    student = AutoModelForCausalLM.from_pretrained(run).eval()
    assert student.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert student.config.rule == "falcon_1"
    tokenizer = AutoTokenizer.from_pretrained(run)
    rows = load().read_rows([teacher / "texts.txt"], tokenizer, 24)[-6:].long()
    with torch.no_grad():
        loss = student(rows, labels=rows).loss.item()
    assert loss == pytest.approx(results["evaluation"]["held-out"]["loss"], rel=1e-4)
    assert f"{math.exp(loss):.2f}" in output
    assert results["evaluation"]["held-out"]["tokens"] == 6 * 23
    picture = (run / "curve.svg").read_text("utf-8")
    assert (run / "curve.png").stat().st_size > 5000
    assert picture.count('id="line2d_') > 4


def test_alignment_is_to_the_attention_of_the_same_layer_and_input(teacher):
    recipe = load()
    source = LlamaForCausalLM.from_pretrained(teacher).double().eval()
    plan = make_plan(Checkpoint.of(source.config.to_dict(), source.state_dict()), keep_attention=[1])
    student = FalconFastWeightForCausalLM(FalconFastWeightConfig.from_dict(plan.config)).double()
    student.load_state_dict(plan.apply(source.state_dict()))
    ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = recipe.align(student, source, recipe.AttentionTrace(source, [0, 2]), ids)
        hidden = source.model(ids, output_hidden_states=True).hidden_states
        angles = source.model.rotary_emb(hidden[0], torch.arange(12)[None])
        expected = []
        for i in (0, 2):
            given = source.model.layers[i].input_layernorm(hidden[i])
            attend = source.model.layers[i].self_attn
            attention = attend(hidden_states=given, position_embeddings=angles, attention_mask=None)[0]
            error = student.model.layers[i].linear_attn(given) - attention
            expected.append((error.square().mean() / attention.square().mean()).item())
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_interrupted_and_resumed_it_ends_the_same(teacher, tmp_path):
    steps = ("--align", 2, "--match", 2, "--tune", 1, "--scratch")
    given = (teacher, teacher / "texts.txt", *OPTIONS, *steps, "--output")
    assert call(*given, tmp_path / "whole")[0] == 0
    code, output = call(*given, tmp_path / "parts", "--minutes", 0)
    assert "--resume goes on" in output
    times = 1
    while not (tmp_path / "parts" / "metrics.json").exists():
        code, output = call(*given, tmp_path / "parts", "--minutes", 0, "--resume")
        assert code == 0, output
        times += 1
        assert times < 12
    assert times > 4
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    curves = [json.loads((tmp_path / name / "metrics.json").read_text())["curve"] for name in ("whole", "parts")]
    assert curves[0] == curves[1]


def test_wrong_input_is_one_sentence(teacher, tmp_path):
    text = teacher / "texts.txt"
    assert "is there already" in call(teacher, text, "--output", tmp_path)[1]
    assert "no run to go on with" in call(teacher, text, "--output", tmp_path / "a", "--resume")[1]
    assert "no-such" in call(teacher, tmp_path / "no-such.txt", "--output", tmp_path / "a")[1]
    assert (
        "--held-out is 1000" in call(teacher, text, "--output", tmp_path / "a", "--length", 24, "--held-out", 1000)[1]
    )
    assert "two rows of 100,000" in call(teacher, text, "--output", tmp_path / "a", "--length", 100000)[1]
    assert "layer 9" in call(teacher, text, "--output", tmp_path / "a", *OPTIONS, "--keep-attention", "9")[1]
    assert "falcon_9" in call(teacher, text, "--output", tmp_path / "a", *OPTIONS, "--set", "rule=falcon_9")[1]
    assert "multiple of --accumulate" in call(teacher, text, "--output", tmp_path / "a", "--accumulate", 3)[1]
    nothing = ("--align", 0, "--match", 0, "--tune", 0)
    assert "no steps" in call(teacher, text, "--output", tmp_path / "a", *nothing)[1]
    steps = ("--align", 1, "--match", 0, "--tune", 0, "--output", tmp_path / "run")
    assert call(teacher, text, *OPTIONS, *steps)[0] == 0
    assert "other options" in call(teacher, text, *OPTIONS, *steps, "--seed", 1, "--resume")[1]
