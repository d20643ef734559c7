"""Language models side by side: the loss in parts, blocks, going on, what is measured by hand, and what is shown."""

import itertools
import json
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import recipes
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

token_files, _, pretrain, side_by_side, language = map(
    recipes.load, ("token_files", "bits_per_byte", "pretrain", "side_by_side", "language")
)

FALCON, TRANSFORMER = "falcon-3a.3", "transformer"
LENGTH, BATCH = 16, 4
WORDS = ["the", "red", "fox", "sees", "a", "dog", "and", "small", "birds", "under", "old", "trees", "at", "12"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a tokenizer and the token files train, short and long; strange and its file other."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    counts = {"train": [40] * 60, "short": range(2, 9), "long": [200, 9, 500, 70], "other": [60] * 3}
    for name, words in counts.items():
        documents = [" ".join(rng.choices(WORDS, k=count)) + "." for count in words]
        (folder / f"{name}.txt").write_text("".join(document + "\n\x1e\n" for document in documents))
    for tokenizer, names in (("tokenizer", ("train", "short", "long")), ("strange", ("other",))):
        token_files.train_bpe([folder / f"{names[0]}.txt"], 290).save_pretrained(folder / tokenizer)
        for name in names:
            loaded = token_files.load_tokenizer(folder / tokenizer)
            token_files.write_tokens([folder / f"{name}.txt"], loaded, folder / f"{name}.bin")
    return folder


def call(*arguments):
    language.app([str(argument) for argument in arguments], standalone_mode=False)


def train(data, output, *more, models=(FALCON,), evaluate=("short",), steps=6):
    arguments = ["train", data / "train.bin", "--tokenizer", data / "tokenizer", "--output", output, "--size", "tiny"]
    arguments += ["--sequence-length", LENGTH, "--batch-size", BATCH, "--tokens", steps * BATCH * LENGTH]
    arguments += [part for name in evaluate for part in ("--evaluate", data / f"{name}.bin")]
    arguments += [part for model in models for part in ("--model", model)]
    call(*arguments, "--log-every", 1, *more)


def run(output, model=FALCON, seed=0, rate="0.005"):
    return output / f"{model}-seed{seed}-lr{rate}"


def log(folder):
    """Its entries without what the clock says."""
    return [{**entry, "seconds": None} for entry in side_by_side.read_log(folder / "log.jsonl")]


def task(data, length=LENGTH, evaluate=("short",)):
    files = [data / f"{name}.bin" for name in evaluate]
    return language.Language.load([data / "train.bin"], data / "tokenizer", files, length)


def plan(steps, seed=0, model=FALCON):
    return language.SweptPlan(model, "tiny", seed, steps, BATCH, 5e-3, 0.05, 0.1)


def started(of, plan, folder):
    folder.mkdir()
    return side_by_side.Run(of, plan, folder, torch.device("cpu"), capture=False, compile=False)


@pytest.mark.parametrize("parts", [1, 3, 40])
@pytest.mark.parametrize("entries", [16, 21])
def test_the_loss_in_parts_is_the_loss_of_all_logits(monkeypatch, parts, entries):
    """Value and gradients, with rows that are no whole number of parts and targets that are none."""
    torch.manual_seed(0)
    monkeypatch.setattr(language, "LOGITS", math.ceil(40 / parts) * entries)
    hidden, weight = torch.randn(40, 6, requires_grad=True), torch.randn(entries, 6, requires_grad=True)
    targets = torch.randint(entries, (40,))
    targets[::7] = side_by_side.UNSCORED
    plain = F.cross_entropy(hidden @ weight.T, targets)
    loss = language.HeadLoss.apply(hidden, weight, targets)
    torch.testing.assert_close(loss, plain)
    expected = torch.autograd.grad(2.5 * plain, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(2.5 * loss, (hidden, weight)), expected)


def test_the_loss_in_bfloat16_is_as_near_as_that_of_all_logits(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(language, "LOGITS", 7 * 101)
    hidden, weight = torch.randn(60, 32).bfloat16(), (torch.randn(101, 32) / 3).bfloat16()
    targets = torch.randint(101, (60,))

    def plain(hidden, weight, targets):
        logits = hidden @ weight.T
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)

    def value_and_gradients(loss, dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        value = loss(*inputs, targets)
        return value, *torch.autograd.grad(value, inputs)

    exact = value_and_gradients(plain, torch.float64)
    ours, theirs = (value_and_gradients(loss, torch.bfloat16) for loss in (language.HeadLoss.apply, plain))
    for true, one, other in zip(exact, ours, theirs, strict=True):
        assert (one - true).norm() <= 1.2 * (other - true).norm() + 1e-6 * true.norm()


def test_batches_are_the_blocks_of_pretraining_in_order(data):
    """Over more than an epoch, to the last one; whatever the model, and with targets one token ahead in the block."""
    of = task(data)
    tokens = np.fromfile(data / "train.bin", dtype="<u2")
    per_epoch = len(tokens) // LENGTH - 1
    steps = per_epoch // BATCH + 2
    blocks = pretrain.Blocks([tokens], LENGTH, steps * BATCH, seed=3)
    batch = of.batches(plan(steps, seed=3, model=TRANSFORMER), torch.device("cpu"))
    other = of.batches(plan(steps, seed=3), torch.device("cpu"))
    seen = []
    for step in range(steps):
        ids, targets = batch(step)
        assert ids.tolist() == [blocks.block(step * BATCH + i).tolist() for i in range(BATCH)]
        assert targets[:, :-1].tolist() == ids[:, 1:].tolist()
        assert targets[:, -1].tolist() == [side_by_side.UNSCORED] * BATCH
        assert torch.equal(other(step)[0], ids)
        seen += [tuple(row) for row in ids.tolist()]
    starts = [seen[:per_epoch].count(row) for row in set(seen[:per_epoch])]
    assert sum(starts) == per_epoch
    assert not torch.equal(of.batches(plan(steps, seed=4), torch.device("cpu"))(0)[0], batch(0)[0])


@pytest.mark.parametrize("model", [FALCON, TRANSFORMER, "mamba-2"])
def test_the_logged_loss_is_the_plain_one(data, tmp_path, model):
    """That of transformers on the blocks of the batch, before each update."""
    of = task(data)
    ids, _ = of.batches(plan(1, model=model), torch.device("cpu"))(0)
    fresh = started(of, plan(1, model=model), tmp_path / "fresh").model
    with torch.no_grad():
        expected = fresh(input_ids=ids, labels=ids).loss.item()
    train(data, tmp_path, models=(model,), steps=1)
    (entry,) = log(run(tmp_path, model))
    assert entry["loss"] == pytest.approx(expected, rel=1e-5)
    assert set(entry) == {"step", "loss", "learning_rate", "seconds"}


def test_a_run_that_was_cut_goes_on_to_the_bit(data, tmp_path, monkeypatch):
    """Beside another model and with entries of the log that were not saved; the rest of --tokens makes a whole step."""
    models, entries = (FALCON, TRANSFORMER), ("--log-every", 4, "--together", 2)
    train(data, tmp_path / "whole", *entries[:2], steps=5.5)
    train(data, tmp_path / "parts", *entries, "--minutes", 0, models=models, steps=5.5)
    advance, clock = side_by_side.Run.advance, side_by_side.time.monotonic
    for stop in (2, 5):
        late = []

        def counted(one, stop=stop, late=late):
            advance(one)
            if one.step == stop and one.plan.model == TRANSFORMER:
                late.append(True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side_by_side.Run, "advance", counted)
            patch.setattr(side_by_side.time, "monotonic", lambda late=late: clock() + (1e9 if late else 0))
            train(data, tmp_path / "parts", *entries, "--minutes", 1e6, models=models, steps=5.5)
        saved = torch.load(run(tmp_path / "parts") / "checkpoint.pt", weights_only=True)
        assert (saved["step"], saved["together"]) == (stop, 2)
        with (run(tmp_path / "parts") / "log.jsonl").open("a") as file:
            file.write('{"step": 6, "loss": 0.0}\n{"step": 6, "lo')
    train(data, tmp_path / "parts", *entries, models=models, steps=5.5)
    assert [entry["step"] for entry in log(run(tmp_path / "whole"))] == [4, 6]
    assert log(run(tmp_path / "parts")) == log(run(tmp_path / "whole"))
    parts, whole = (json.loads((run(tmp_path / name) / "result.json").read_text()) for name in ("parts", "whole"))
    assert parts["evaluation"] == whole["evaluation"]
    assert (parts["together"], whole["together"], whole["peak_memory"]) == (2, 1, None)
    weights = [torch.load(run(tmp_path / name) / "checkpoint.pt")["model"] for name in ("parts", "whole")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def trained(data, folder):
    """The model as it was evaluated, which is not yet rounded to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.load_state_dict(torch.load(folder / "checkpoint.pt")["model"])
    return model.eval()


def plain_loss(model, ids, scored):
    """transformers' loss on one row, of the predictions [first, last) of what follows its first token."""
    labels = torch.tensor([ids])
    labels[:, : scored[0] + 1] = labels[:, scored[1] + 1 :] = -100
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), labels=labels).loss.item()


@pytest.mark.parametrize("model", [FALCON, TRANSFORMER])
def test_figures_by_hand(data, tmp_path, model):
    """By transformers' plain loss: document by document where they are short, window by window by position."""
    train(data, tmp_path, models=(model,), evaluate=("short", "long"))
    evaluation = json.loads((run(tmp_path, model) / "result.json").read_text())["evaluation"]
    loaded = trained(data, run(tmp_path, model))
    documents = {}
    for name in ("short", "long"):
        tokens = np.fromfile(data / f"{name}.bin", dtype="<u2")
        end = tokens[-1]
        documents[name] = np.split(tokens, np.flatnonzero(tokens == end)[:-1] + 1)

    assert max(map(len, documents["short"])) == LENGTH  # in one window
    nats = [len(d) * plain_loss(loaded, [int(end), *d.tolist()], (0, len(d))) for d in documents["short"]]
    assert evaluation["short"]["perplexity"] == pytest.approx(math.exp(sum(nats) / sum(map(len, documents["short"]))))
    size = sum(len(line.encode()) for line in (data / "short.txt").read_text().split("\n\x1e\n"))
    assert evaluation["short"]["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / size)
    assert evaluation["short"]["by_position"] is None

    longest = 8 * LENGTH
    windows = []
    for document in documents["long"]:
        stream = [int(end), *document.tolist()]
        windows += [stream[at : at + longest + 1] for at in range(0, len(document) - longest + 1, longest)]
    by_position = evaluation["long"]["by_position"]
    assert by_position["windows"] == len(windows) == sum(len(d) // longest for d in documents["long"]) > 3
    edges = by_position["edges"]
    assert edges == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    for between, loss in zip(itertools.pairwise(edges), by_position["loss"], strict=True):
        expected = sum(plain_loss(loaded, window, between) for window in windows) / len(windows)
        assert loss == pytest.approx(expected, rel=1e-4)


def test_a_document_of_exactly_the_longest_length_is_one_window():
    class Uniform(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, use_cache):
            assert input_ids.shape == (1, 8)
            assert input_ids[0, 0] == 4  # the end before the document
            return type("Output", (), {"logits": torch.zeros(1, 8, 5)})

    tokens = np.array([0, 4, *[1] * 7, 4, *[2] * 6, 4], dtype="<u2")  # of 2, 8 and 7 tokens
    figures = language.loss_by_position(Uniform(), tokens, 4, 8, lambda items, _: items)
    assert figures["windows"] == 1
    assert figures["loss"] == pytest.approx([math.log(5)] * len(figures["loss"]))
    assert language.loss_by_position(Uniform(), tokens[:2], 4, 8, lambda items, _: items) is None


def test_tiny_learns_and_its_folder_loads(data, tmp_path):
    train(data, tmp_path, steps=50)
    losses = [entry["loss"] for entry in log(run(tmp_path))]
    assert losses[0] > 5.4  # ln 290 = 5.7 at first
    assert losses[-1] < losses[0] - 2
    folder = run(tmp_path) / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id is not None
    assert tokenizer.decode(tokenizer("the red fox").input_ids) == "the red fox"
    result = json.loads((run(tmp_path) / "result.json").read_text())
    assert result["steps_per_second"] == pytest.approx(side_by_side.steps_per_second(result["log"]))


def test_models_have_one_size_of_about_30_million():
    size = language.SIZES["base"]
    models = ["transformer", "falcon-1.3", "falcon-2.3", "falcon-3.3", "falcon-1a.3", "falcon-3a.3"]
    counts = {m: side_by_side.parameters(side_by_side.model_config(m, size, 50257, 8192)) for m in models}
    assert max(counts.values()) < 1.005 * min(counts.values())
    assert counts["transformer"] == pytest.approx(30e6, rel=0.02)


def test_speed_is_the_median_between_entries():
    entries = [(2, 10.0), (4, 10.5), (6, 11.0), (8, 11.0), (9, 21.0)]
    assert side_by_side.steps_per_second([{"step": s, "seconds": t} for s, t in entries]) == 2.1
    assert side_by_side.steps_per_second([]) is None


def result(model, rate, seed, loss, together=1):
    edges = [0, 64, 128, 256, 512, 1024]
    by_position = {"windows": 9, "edges": edges, "loss": [loss, loss - 0.5, loss - 1, loss - 1, loss - 2]}
    figures = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 4, "by_position": by_position}
    evaluation = {"val": figures, "novel": {**figures, "loss": 10 - loss, "by_position": None}}
    run = {"model": model, "learning_rate": rate, "seed": seed, "parameters": 30e6, "evaluation": evaluation}
    run |= {"task": {"name": "language", "length": 128}, "batch_size": 4, "steps": 20, "steps_per_second": 2.0}
    run |= {"size": "base", "warmup": 0.05, "weight_decay": 0.1}
    run |= {"together": together, "peak_memory": 3 * 2**30}
    return run | {"log": [{"step": step, "loss": loss + 1 / step} for step in range(1, 21)]}


RESULTS = [
    result(FALCON, 1e-3, 0, 3.0),
    result(FALCON, 1e-3, 1, 3.2),
    result(FALCON, 2e-3, 0, 3.1),
    result(TRANSFORMER, 1e-3, 0, 4.0, together=2),
    result(TRANSFORMER, 2e-3, 1, 3.9, together=2),
]


def test_report_is_of_the_best_learning_rate_of_each_model(tmp_path):
    pytest.importorskip("matplotlib")
    for i, one in enumerate(RESULTS):
        side_by_side.write_json(tmp_path / str(i) / "result.json", one)
    call("report", tmp_path)
    tables = (tmp_path / "table.md").read_text().split("\n\n")
    first, second = ([line.split(" | ") for line in table.splitlines()] for table in tables)
    assert first[0][2:4] == ["val", "novel"]
    assert [row[:2] for row in first[2:]] == [
        ["| transformer, 1 × 30.0M", "0.002 of 0.001, 0.002"],  # no seed in common
        [f"| {FALCON}, 2 × 30.0M", "0.001 of 0.001, 0.002"],  # by seed 0
    ]
    assert first[3][2] == "22.31 ± 3.14 / 0.7750 ± 0.0354"  # exp 3 and exp 3.2
    assert first[2][4:] == ["1,024, 2 together", "3.0, 2 together |"]
    assert first[3][4:] == ["1,024", "3.0 |"]
    assert second[0] == [
        "| val, perplexity by tokens read before, 9 windows",
        "64–127",
        "128–255",
        "256–511",
        "512–1,023 |",
    ]
    assert second[2][1:] == [f"{math.exp(3.9 - less):.2f}" for less in (0.5, 1, 1)] + [f"{math.exp(1.9):.2f} |"]
    assert (tmp_path / "curve.svg").read_text().count("</svg>") == 1
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_seed_that_one_rate_alone_has_does_not_decide():
    worse = [result(FALCON, 1e-3, 0, 3.0), result(FALCON, 1e-3, 1, 9.0), result(FALCON, 2e-3, 0, 3.1)]
    assert [run["learning_rate"] for run in language.best(worse)[FALCON]] == [1e-3, 1e-3]


@pytest.mark.parametrize("name", ["size", "steps", "batch_size", "warmup", "weight_decay"])
def test_runs_of_different_budgets_are_not_compared(name):
    with pytest.raises(side_by_side.RecipeError, match=f"differ in {name}"):
        language.best([RESULTS[0], {**RESULTS[3], name: 0.5}])


def test_a_sweep_has_a_folder_for_each_rate_and_shows_one(data, tmp_path, capsys):
    rates = ("--learning-rate", 1e-2, "--learning-rate", 1e-6)
    train(data, tmp_path, *rates)
    assert {path.name for path in tmp_path.iterdir()} == {f"{FALCON}-seed0-lr{rate}" for rate in ("0.01", "1e-06")}
    assert f"| {FALCON}, 1 × 0.1M | 0.01 of 1e-06, 0.01 | " in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    train(data, tmp_path, *rates)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == before
    with pytest.raises(side_by_side.RecipeError, match="task"):
        train(data, tmp_path, *rates, evaluate=("short", "long"))
    with pytest.raises(side_by_side.RecipeError, match="steps 6 and not 7"):
        train(data, tmp_path, *rates, steps=7)


def bad_calls(data, folder):
    """Each with a part of the sentence that it must end in."""
    (folder / "short.bin").write_bytes((data / "short.bin").read_bytes())
    (folder / "short.json").write_bytes((data / "short.json").read_bytes())
    (folder / "cut.bin").write_bytes((data / "short.bin").read_bytes()[:-2])
    (folder / "cut.json").write_bytes((data / "short.json").read_bytes())
    tokenizer, evaluate = ("--tokenizer", data / "tokenizer"), ("--evaluate", data / "short.bin")
    fits = (data / "train.bin", *tokenizer, *evaluate)
    return [
        ((data / "train.bin", "--tokenizer", folder, *evaluate), "no tokenizer.json"),
        ((data / "train.bin", "--tokenizer", data / "strange", *evaluate), "another tokenizer"),
        ((data / "train.bin", *tokenizer, "--evaluate", data / "other.bin"), "another tokenizer"),
        ((data / "absent.bin", *tokenizer, *evaluate), "is missing"),
        ((data / "train.txt", *tokenizer, *evaluate), "unknown ending"),
        ((folder / "cut.bin", *tokenizer, *evaluate), "tokens and"),
        ((*fits, "--evaluate", folder / "short.bin"), "several files named short"),
        ((*fits, "--sequence-length", 2000), "at least 4,000"),
        ((*fits, "--size", "huge"), "it may be tiny, small, base"),
        ((*fits, "--model", "gpt"), "it may be transformer"),
        ((*fits, "--model", "falcon-3a.3:window=3"), "did you mean window_size"),
    ]


def test_bad_input_gets_one_sentence_and_leaves_nothing(data, tmp_path):
    for arguments, sentence in bad_calls(data, tmp_path):
        with pytest.raises((side_by_side.RecipeError, token_files.RecipeError), match=sentence) as error:
            call("train", "--size", "tiny", "--output", tmp_path / "out", *arguments)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_errors_reach_the_shell_without_a_traceback(data, tmp_path):
    arguments = [data / "train.bin", "--tokenizer", tmp_path, "--evaluate", data / "short.bin"]
    command = [sys.executable, recipes.EXAMPLES / "language.py", "train", *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"language.py: .* holds no tokenizer.json: .*\n", done.stderr)
