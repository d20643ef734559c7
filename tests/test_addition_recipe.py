"""Addition by models trained side by side: the sums, the loss on them, going on, and what is measured and shown."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import recipes
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

side_by_side = recipes.load("side_by_side")
addition = recipes.load("addition")

FALCON, TRANSFORMER = "falcon-3a.3", "transformer"
TINY = ("--size", "tiny", "--width", 2, "--samples", 5, "--steps", 6, "--batch-size", 4, "--log-every", 1)


def call(*arguments):
    addition.app([str(argument) for argument in arguments], standalone_mode=False)


def train(output, *more, models=(FALCON,)):
    call("train", "--output", output, *TINY, *(part for model in models for part in ("--model", model)), *more)


def run(output, model=FALCON, seed=0):
    return output / f"{model}-seed{seed}"


def log(folder):
    """Its entries without what the clock says."""
    return [{**entry, "seconds": None} for entry in side_by_side.read_log(folder / "log.jsonl")]


def text(ids):
    return "".join(addition.SYMBOLS[i] for i in ids)


@pytest.mark.parametrize("end", [False, True])
def test_rows_are_right_sums_and_only_their_digits_are_targets(end):
    longest, widths = 7, torch.arange(1, 8).repeat(60)
    ids, targets = addition.sums(widths, longest, torch.Generator().manual_seed(0), end)
    assert ids.shape == targets.shape == (420, 3 * longest + 2 + end)
    for width, row, target in zip(widths.tolist(), ids.tolist(), targets.tolist(), strict=True):
        a, b, s, padding = re.fullmatch(r"(\d+)\+(\d+)=(\d+)((?:<end>)*)", text(row) + "<end>" * (not end)).groups()
        assert len(a) == len(b) == width
        answer = f"{int(a) + int(b):0{width + 1}}"[::-1]
        assert answer.startswith(s)  # the last target is not shown where the row is full
        scored = [i for i, symbol in enumerate(target) if symbol != side_by_side.UNSCORED]
        assert text(target[i] for i in scored) == answer + "<end>" * end
        assert scored == list(range(2 * width + 1, 3 * width + 2 + end))  # from the = on
        assert padding or width == longest


def test_digits_and_widths_are_uniform():
    task = addition.Addition(width=8, end=False, curriculum=0.0, samples=1, generate=False)
    ids, targets = task.batch(4000, torch.Generator().manual_seed(1), 0.0)
    widths = (targets != side_by_side.UNSCORED).sum(1) - 1
    assert widths.bincount(minlength=9)[1:].tolist() == pytest.approx([500] * 8, abs=120)
    digits = ids[:, 0]
    assert digits.bincount(minlength=10)[:10].tolist() == pytest.approx([400] * 10, abs=100)


def test_carries_run_through_nines():
    """Chains of nines are rare among uniform digits: these are not drawn."""
    place = torch.arange(5)
    for a, b in ((99999, 1), (99999, 0), (99989, 11), (50505, 49495), (0, 0), (90909, 9091)):
        drawn = torch.stack([(torch.tensor(n) // 10**place) % 10 for n in (a, b)])[:, None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", lambda *args, drawn=drawn, **kwargs: drawn)
            _, targets = addition.sums(torch.tensor([5]), 5, torch.Generator())
        assert text(targets[0, 11:].tolist()) == f"{a + b:06}"[::-1]


def test_curriculum_grows_to_the_whole_task():
    widest = [side_by_side.largest(8, step / 100, 0.5) for step in range(101)]
    assert widest == sorted(widest)
    assert set(widest) == set(range(1, 9))
    assert widest[0] == 1
    assert widest[50] == 8
    assert widest.index(8) < 50
    assert {side_by_side.largest(8, done, 0.0) for done in (0.0, 0.5)} == {8}


def test_batches_follow_from_seed_and_step_alone():
    task = addition.Addition(width=2, end=False, curriculum=0.0, samples=1, generate=False)

    def batch(seed, step):
        generator = torch.Generator().manual_seed(side_by_side.seed_of(seed, step))
        return task.batch(16, generator, 0.0)[0]

    torch.manual_seed(5)
    torch.testing.assert_close(batch(0, 3), batch(0, 3), rtol=0, atol=0)
    assert not torch.equal(batch(0, 3), batch(0, 4))
    assert not torch.equal(batch(0, 3), batch(1, 3))


def test_accuracies_by_hand():
    targets = torch.tensor([[-100, 1, 2], [-100, 0, -100], [3, 3, -100]])
    answers = torch.tensor([[3, 1, 2], [0, 1, 0], [3, 0, 1]])
    logits = torch.nn.functional.one_hot(answers, 4).float()
    tokens, rows = side_by_side.accuracies(logits, targets)
    assert tokens.item() == pytest.approx(3 / 5)
    assert rows.item() == pytest.approx(1 / 3)


def test_the_loss_is_that_of_the_targets(tmp_path):
    """In the log: the mean over the digits of the sums, before each update."""
    train(tmp_path, "--steps", 1)
    task = addition.Addition(width=2, end=False, curriculum=0.0, samples=5, generate=True)
    plan = side_by_side.plans([FALCON], "tiny", [0], 1, 4, None, 0.05, 0.1)[0]
    (tmp_path / "fresh").mkdir()
    fresh = side_by_side.Run(task, plan, tmp_path / "fresh", torch.device("cpu"), capture=False, compile=False)
    ids, targets = task.batch(4, torch.Generator().manual_seed(side_by_side.seed_of(0, 0)), 0.0)
    with torch.no_grad():
        chances = fresh.model(input_ids=ids).logits.double().log_softmax(-1)
    losses = [-chances[i, j, targets[i, j]] for i, j in (targets != -100).nonzero().tolist()]
    assert log(run(tmp_path))[0]["loss"] == pytest.approx(sum(losses).item() / len(losses), rel=1e-5)


def test_a_run_that_was_cut_goes_on_to_the_bit(tmp_path):
    """Also if it was saved between two entries of the log, or died with entries not saved, beside another model."""
    entries = ("--log-every", 4)
    train(tmp_path / "whole", *entries)
    models = (FALCON, TRANSFORMER)
    train(tmp_path / "parts", *entries, "--minutes", 0, models=models)
    assert not run(tmp_path / "parts").joinpath("checkpoint.pt").exists()
    for step in (2, 5):
        stop_at(step, tmp_path / "parts", models, *entries)
        saved = torch.load(run(tmp_path / "parts") / "checkpoint.pt", weights_only=True)
        assert saved["step"] == step
        with (run(tmp_path / "parts") / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": 6, "loss": 0.0}) + '\n{"step": 6, "lo')
    train(tmp_path / "parts", *entries, models=models)
    assert log(run(tmp_path / "parts")) == log(run(tmp_path / "whole"))
    assert [entry["step"] for entry in log(run(tmp_path / "whole"))] == [4, 6]
    results = [json.loads((run(tmp_path / name) / "result.json").read_text()) for name in ("parts", "whole")]
    assert results[0]["evaluation"] == results[1]["evaluation"]
    weights = [
        AutoModelForCausalLM.from_pretrained(run(tmp_path / n) / "model").state_dict() for n in ("parts", "whole")
    ]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=0)
    before = (run(tmp_path / "whole") / "result.json").read_bytes()
    train(tmp_path / "whole", *entries)
    assert (run(tmp_path / "whole") / "result.json").read_bytes() == before


def stop_at(step, output, models, *options):
    """Trains until all runs have taken so many steps, as if the time were over then."""
    with pytest.MonkeyPatch.context() as patch:
        advance = side_by_side.Run.advance
        clock = side_by_side.time.monotonic
        late = []

        def counted(run):
            advance(run)
            if run.step == step and run.plan.model == models[-1]:
                late.append(True)

        patch.setattr(side_by_side.Run, "advance", counted)
        patch.setattr(side_by_side.time, "monotonic", lambda: clock() + (1e9 if late else 0))
        train(output, "--minutes", 1e6, *options, models=models)


def test_a_captured_step_is_an_eager_one(tmp_path, monkeypatch):
    """With a graph that computes what was recorded, from the tensors that were recorded, whenever it is replayed."""
    task = addition.Addition(width=2, end=False, curriculum=0.0, samples=1, generate=False)
    plan = side_by_side.plans([FALCON], "tiny", [0], 7, 4, None, 0.5, 0.1)[0]
    compute = side_by_side.Run.compute

    class Graph:
        def replay(self):
            compute(*self.recorded)

    @contextmanager
    def graph(recorder, stream):
        def record(*arguments):
            recorder.recorded = arguments

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side_by_side.Run, "compute", record)
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    weights = []
    for capture in (False, True):
        (tmp_path / str(capture)).mkdir()
        stepped = side_by_side.Run(task, plan, tmp_path / str(capture), torch.device("cpu"), False, False)
        stepped.capture = capture
        for _ in range(plan.steps):
            stepped.advance()
        assert (stepped.graph is not None) == capture
        weights.append([*stepped.model.state_dict().values(), stepped.sums])
    for eager, captured in zip(*weights, strict=True):
        torch.testing.assert_close(captured, eager, rtol=0, atol=0)


def test_side_by_side_is_as_one_after_another(tmp_path):
    models = (FALCON, TRANSFORMER)
    train(tmp_path / "together", models=models)
    train(tmp_path / "apart", "--together", 1, models=models)
    for model in models:
        assert log(run(tmp_path / "together", model)) == log(run(tmp_path / "apart", model))


def test_tiny_learns_to_add_one_digit(tmp_path):
    train(tmp_path, "--steps", 120, "--batch-size", 64, "--log-every", 10, "--seed", 3)
    losses = [entry["loss"] for entry in log(run(tmp_path, seed=3))]
    assert losses[0] > 2.2  # ln 13 = 2.56 at first
    assert losses[-1] < 1.7
    result = json.loads((run(tmp_path, seed=3) / "result.json").read_text())
    evaluation = result["evaluation"]
    assert evaluation["tokens"][0] > 0.3
    assert evaluation["answers"] == evaluation["generated"]  # greedy decoding, with teacher and without
    assert evaluation["validation"]["tokens"] == pytest.approx(sum(evaluation["tokens"][:2]) / 2)
    assert evaluation["beyond"]["tokens"] == pytest.approx(evaluation["tokens"][2])
    assert evaluation["widths"] == [1, 2, 3, 4]


def test_a_model_that_learns_to_end_stops_there(tmp_path):
    train(tmp_path, "--end")
    folder = run(tmp_path) / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == addition.END
    call("evaluate", folder, "--width", 2, "--samples", 3, "--output", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["widths"] == [1, 2, 3, 4]


def test_evaluation_of_a_model_that_adds():
    """Every figure is 1 for it, and what it gets wrong counts where it belongs."""

    class Adder(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, wrong_last):
            super().__init__()
            self.wrong_last = wrong_last

        def answer(self, row):
            a, b, shown = re.fullmatch(r"(\d+)\+(\d+)=?(\d*)(?:<end>)*", text(row)).groups()
            s = f"{int(a) + int(b):0{len(a) + 1}}"[::-1]
            if self.wrong_last:
                s = s[:-1] + str((int(s[-1]) + 1) % 10)
            return s[len(shown)] if len(shown) < len(s) else "0"

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 13)
            for i, row in enumerate(input_ids.tolist()):
                for j in range(row.index(addition.EQUALS), len(row)):
                    logits[i, j, int(self.answer(row[: j + 1]))] = 1
            return type("Output", (), {"logits": logits})

        def generate(self, prompt, max_new_tokens, **_):
            for _ in range(max_new_tokens):
                prompt = torch.cat([prompt, self(prompt, False).logits[:, -1:].argmax(-1)], 1)
            return prompt

    task = addition.Addition(width=2, end=False, curriculum=0.0, samples=20, generate=True)
    assert task.evaluate(Adder(False), lambda x, _: x)["tokens"] == [1.0] * 4
    assert task.measure(Adder(False), 3) == {"tokens": 1.0, "answers": 1.0, "generated": 1.0}
    early = Adder(False)
    early.generate = lambda prompt, **_: torch.nn.functional.pad(prompt, (0, 1), value=addition.END)  # all rows ended
    assert task.measure(early, 3)["generated"] == 0.0
    assert task.measure(Adder(True), 3) == {"tokens": 0.75, "answers": 0.0, "generated": 0.0}


def test_tokenizer_is_the_alphabet(tmp_path):
    addition.tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("12+90=201").input_ids == [1, 2, 10, 9, 0, 11, 2, 0, 1]
    assert tokenizer(" 1 + 2 =\n").input_ids == [1, 10, 2, 11]
    assert tokenizer.decode([1, 2, 10, 9, 0, 11, 2, 0, 1, 12], skip_special_tokens=True) == "12+90=201"
    assert tokenizer.eos_token_id == addition.END


def test_models_have_one_size():
    size = side_by_side.SIZES["small"]
    models = ["transformer", "falcon-1.3", "falcon-2.3", "falcon-3a.3:output_gate=true"]
    counts = {m: side_by_side.parameters(side_by_side.model_config(m, size, 13, 200)) for m in models}
    assert max(counts.values()) < 1.01 * min(counts.values())
    mamba = side_by_side.parameters(side_by_side.model_config("mamba-2", size, 13, 200))
    assert mamba == pytest.approx(counts["transformer"], rel=0.07)  # whole layers


def test_fields_after_colons_reach_the_config():
    size = side_by_side.SIZES["tiny"]
    config = side_by_side.model_config("falcon-3a.3:window_size=8:alignment=same_step:step_size_max=0.125", size, 13, 9)
    assert (config.window_size, config.alignment, config.step_size_max) == (8, "same_step", 0.125)
    assert (config.rule, config.step_size, config.qk_norm) == ("falcon_3a", "direct", "rms")
    assert side_by_side.model_config("transformer:intermediate_size=40", size, 13, 9).intermediate_size == 40


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--model", "gpt"], "it may be transformer"),
        (["--model", "falcon-3a.3:window=3"], "did you mean window_size"),
        (["--model", "falcon-3a.3:window_size"], "FIELD=VALUE"),
        (["--model", "falcon-1.3:window_size=4"], "window_size"),
        (["--model", "transformer:heads=3"], "no field of LlamaConfig"),
        (["--size", "huge"], "it may be tiny"),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_nothing(tmp_path, more, sentence):
    with pytest.raises(side_by_side.RecipeError, match=sentence):
        call("train", "--output", tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_plan_is_refused(tmp_path):
    train(tmp_path, "--minutes", 0)
    with pytest.raises(side_by_side.RecipeError, match="steps 6 and not 7"):
        train(tmp_path, "--steps", 7)
    with pytest.raises(side_by_side.RecipeError, match="task"):
        train(tmp_path, "--end")
    with pytest.raises(side_by_side.RecipeError, match="no finished run"):
        call("report", tmp_path)


def test_divergence_ends_one_run_and_no_other(tmp_path, monkeypatch, capsys):
    advance = side_by_side.Run.advance

    def broken(run):
        advance(run)
        if run.plan.model == TRANSFORMER and run.step == 2:
            run.sums.fill_(float("nan"))

    monkeypatch.setattr(side_by_side.Run, "advance", broken)
    train(tmp_path, models=(FALCON, TRANSFORMER))
    ended = json.loads((run(tmp_path, TRANSFORMER) / "result.json").read_text())
    assert (ended["evaluation"], ended["step"]) == (None, 2)
    assert TRANSFORMER not in capsys.readouterr().out.split("|---")[1]
    call("report", tmp_path)
    assert (run(tmp_path) / "model" / "config.json").exists()


def result(model, seed, shift, width=32):
    curve = [max(0.0, 1 - abs(w - 20) / 100 - shift) for w in range(1, 2 * width + 1)]
    evaluation = {"widths": list(range(1, 2 * width + 1)), "tokens": curve, "answers": [c / 2 for c in curve]}
    for name, part in (("validation", slice(0, width)), ("beyond", slice(width, 3 * width // 2))):
        evaluation[name] = {kind: addition.mean(evaluation[kind][part]) for kind in ("tokens", "answers")}
    task = {"name": "addition", "width": width}
    return {"model": model, "seed": seed, "parameters": 3e6, "task": task, "evaluation": evaluation}


def test_report_is_the_mean_of_the_seeds_beside_the_paper(tmp_path):
    pytest.importorskip("matplotlib")
    for model, seed, shift in ((FALCON, 0, 0.0), (FALCON, 1, 0.02), (TRANSFORMER, 0, 0.1)):
        side_by_side.write_json(tmp_path / f"{model}-{seed}" / "result.json", result(model, seed, shift))
    call("report", tmp_path)
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[2:]] == ["| transformer", f"| {FALCON}"]
    assert "| 86.0 ± 1.4 / 43.0 ± 0.7 |" in rows[3]  # at 33 digits: 1 - 0.13 and 1 - 0.15
    assert rows[3].endswith("| 99.9, 87.2, 100, 69 |")
    assert (tmp_path / "curve.svg").read_text().count("</svg>") == 1
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_the_script_runs_from_the_shell(tmp_path):
    command = [
        sys.executable,
        recipes.EXAMPLES / "addition.py",
        "train",
        "--model",
        "nothing",
        "--output",
        tmp_path / "o",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"addition.py: --model is 'nothing': it may be .*\n", done.stderr)
