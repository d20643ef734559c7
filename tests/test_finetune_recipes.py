"""The fine-tuning recipes, on a small checkpoint and on two processes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import steps_logged
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

for extra in ("datasets", "peft", "trl"):
    pytest.importorskip(extra, reason=f"{extra} is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPTS = [{"prompt": f"{i} {i + 1}", "completion": f" {i + 2}."} for i in range(20)]
TEXTS = [{"text": f"A pointer {i} is an address."} for i in range(20)]
PAIRS = [{"prompt": f"{i}", "chosen": " is an address.", "rejected": " is a duck."} for i in range(20)]


def call(name, *arguments):
    """Exit code and output of a recipe run in this process."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    result = CliRunner().invoke(recipe.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"{type(result.exception).__name__}: {result.exception}"
    return result.exit_code, result.output


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(folder):
    return [entry["loss"] for entry in steps_logged(folder)]


def loads(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("A pointer", return_tensors="pt").input_ids
    return model.generate(ids, min_new_tokens=3, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", ["texts", "prompts", "documents"])
def test_sft_lowers_the_perplexity_and_leaves_a_model(checkpoint, tmp_path, kind, lora):
    if kind == "documents":
        data = tmp_path / "data.txt"
        data.write_text("\n\x1e\n".join(row["text"] for row in TEXTS) + "\n\x1e\n")
    else:
        data = write_lines(tmp_path / "data.jsonl", TEXTS if kind == "texts" else PROMPTS)
    options = ("--steps", 12, "--length", 32, "--learning-rate", 1e-2, "--lora", lora, "--output", tmp_path / "out")
    code, output = call("sft", data, "--model", checkpoint, *options)
    assert code == 0, output
    words = output.split("perplexity ")[1].split()
    assert float(words[2]) < float(words[0])  # "perplexity 12.3 before, 4.5 after"
    assert len(losses(tmp_path / "out")) == 12
    assert (tmp_path / "out" / "adapter").exists() == bool(lora)
    assert loads(tmp_path / "out")


@pytest.mark.parametrize("lora", [0, 4])
def test_dpo_raises_the_margin_and_leaves_a_model(checkpoint, tmp_path, lora):
    data = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    options = ("--steps", 4, "--learning-rate", 1e-2, "--lora", lora, "--output", tmp_path / "out")
    code, output = call("dpo", data, "--model", checkpoint, *options)
    assert code == 0, output
    assert "100% of held-out pairs gained" in output
    curve = losses(tmp_path / "out")
    assert curve[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: nothing is preferred yet
    assert curve[-1] < curve[0]
    assert loads(tmp_path / "out")


def test_sft_without_data_takes_sums(checkpoint, tmp_path):
    code, output = call("sft", "--model", checkpoint, "--steps", 1, "--output", tmp_path)
    assert code == 0, output
    assert loads(tmp_path)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_recipes_say_what_is_wrong_with_the_data(name, tmp_path):
    def message(data):
        code, output = call(name, data, "--output", tmp_path / "out")
        assert code == 1
        return output

    assert "is not a file that ends in" in message(tmp_path / "missing.jsonl")
    (tmp_path / "broken.jsonl").write_text("{}x")
    assert "broken.jsonl, line 1 is not JSON" in message(tmp_path / "broken.jsonl")
    rows = {"sft": [TEXTS[0], PROMPTS[0]], "dpo": [PAIRS[0], PROMPTS[0]]}[name]
    assert "mixed.jsonl, line 2: all lines have" in message(write_lines(tmp_path / "mixed.jsonl", rows))
    one = {"sft": TEXTS, "dpo": PAIRS}[name][:1]
    assert "it takes two, one of them to evaluate on" in message(write_lines(tmp_path / "one.jsonl", one))


@pytest.mark.slow
def test_two_processes_train_as_one(checkpoint, tmp_path):
    texts = [{"text": "A pointer is an address." * (1 + i % 2)} for i in range(20)]  # of two lengths
    data = write_lines(tmp_path / "data.jsonl", texts)
    curves = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        launch = ("torch.distributed.run", "--standalone", "--nproc_per_node", processes, EXAMPLES / "sft.py", data)
        options = ("--steps", 3, "--batch-size", 2 // processes, "--length", 32, "--learning-rate", 1e-2, "--cpu")
        command = (*launch, "--model", checkpoint, "--output", output, *options)
        run = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("perplexity") == 1
        curves.append(losses(output))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert loads(tmp_path / "2")
