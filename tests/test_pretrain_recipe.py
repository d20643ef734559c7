"""The pretraining recipe: texts, token files, bits per byte, training, and going on after an interruption."""

import json
import lzma
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "pretrain.py"
sys.path.insert(0, str(EXAMPLES))
import pretrain  # noqa: E402
from bits_per_byte import bits_per_byte  # noqa: E402
from token_files import write_tokens  # noqa: E402

SHAPE = {
    "hidden-size": 16,
    "layers": 2,
    "heads": 2,
    "head-dim": 8,
    "intermediate-size": 32,
    "sequence-length": 16,
}
WORDS = [
    "the",
    "red",
    "fox",
    "sees",
    "a",
    "dog",
    "and",
    "small",
    "birds",
    "under",
    "old",
    "trees",
    "at",
    "12",
]
HARD_TEXTS = [
    "Hello  world, it's 12345 and 3.14\n\n\tindented\r\nfour    spaces ",
    " leading space",
    "\n",
    "日本語 \U0001f600 e\u0301 \u0000 \x1e \ufeff \u200b नमस्ते",
    "this is not the end: <|endoftext|> is only a word",
]


def call(*arguments):
    """Run a command of the recipe in this process."""
    pretrain.app([str(argument) for argument in arguments], standalone_mode=False)


def documents(count, seed):
    """Texts with something to learn in them."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + "." for _ in range(count)]


def write_texts(path, texts):
    data = "".join(text + "\n\x1e\n" for text in texts).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a tokenizer and two token files, one of them packed."""
    folder = tmp_path_factory.mktemp("data")
    train = write_texts(folder / "train.txt.xz", documents(300, seed=1))
    held = write_texts(folder / "held.txt", documents(10, seed=2))
    call("tokenizer", train, "--output", folder / "tokenizer", "--vocab-size", 300)
    call("tokenize", train, "--tokenizer", folder / "tokenizer", "--output", folder / "train.bin")
    call("tokenize", held, "--tokenizer", folder / "tokenizer", "--output", folder / "held.bin.xz")
    return folder


def command(data, run, *more, model="transformer", tokens=16 * 8 * 12):
    return [
        *("train", data / "train.bin", "--tokenizer", data / "tokenizer", "--evaluate", data / "held.bin.xz"),
        *("--output", run, "--model", model, "--tokens", tokens, "--batch-size", 8, "--log-every", 1),
        *("--learning-rate", 1e-2, *(f"--{name}={value}" for name, value in SHAPE.items()), *more),
    ]


def train(data, run, *more, **options):
    call(*command(data, run, *more, **options))
    return json.loads((run / "model" / "metrics.json").read_text())


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run):
    return [entry["loss"] for entry in log(run)]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_tokenizer_returns_every_text_unchanged(data, text):
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"


def test_digits_stand_alone(data):
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("12 12 1212").input_ids)
    assert all(sum(c.isdigit() for c in piece) <= 1 for piece in pieces)


@pytest.mark.parametrize("name", ["hard.bin", "hard.bin.xz"])
def test_token_file_holds_the_documents_and_their_counts(data, tmp_path, name):
    """Documents come back whole, also one that mentions the end of text, and empty ones do not count."""
    texts = [text for text in HARD_TEXTS if text != "\n"]
    source = write_texts(tmp_path / "hard.txt", [*texts, ""])
    call("tokenize", source, "--tokenizer", data / "tokenizer", "--output", tmp_path / name)
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    tokens, facts = pretrain.read_tokens(tmp_path / name, tokenizer)
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    pieces = np.split(tokens, ends + 1)[:-1]
    assert [tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == texts
    assert facts["documents"] == len(texts)
    assert facts["bytes"] == sum(len(text.encode()) for text in texts)
    assert facts["tokens"] == len(tokens) == ends[-1] + 1


def test_file_without_separator_is_one_document(data, tmp_path):
    (tmp_path / "one.txt").write_text("first line\nsecond line\n")
    (tmp_path / "two.txt").write_text("another")
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    facts = write_tokens(texts, tokenizer, tmp_path / "out.bin")
    assert facts["documents"] == 2
    assert facts["bytes"] == len("first line\nsecond line") + len("another")


def test_bits_per_byte_is_what_the_definition_says(data):
    """Token by token by hand: each from its document so far, or from its window in a long document."""
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    tokens, facts = pretrain.read_tokens(data / "held.bin.xz", tokenizer)
    torch.manual_seed(0)
    config = pretrain.LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = AutoModelForCausalLM.from_config(config)
    context, nats, longest = 16, 0.0, 0
    for document in np.split(tokens, np.flatnonzero(tokens == facts["end"]) + 1)[:-1]:
        ids = [facts["end"], *document.tolist()]
        longest = max(longest, len(ids))
        for i in range(1, len(ids)):
            window = 0 if i <= context else ((i - 1 - context) // (context // 2) + 1) * (context // 2)
            assert i - window > context // 2 or window == 0
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids[window:i]])).logits
            nats -= logits[0, -1].log_softmax(-1)[ids[i]].item()
    assert longest > 3 * context
    result = bits_per_byte(model, tokens, facts, context, batch_size=3)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / facts["bytes"], rel=1e-5)
    assert result["loss"] == pytest.approx(nats / len(tokens), rel=1e-5)
    assert result["tokens"] == len(tokens)


def test_blocks_cover_every_file_once_an_epoch_and_depend_on_the_seed_alone():
    files = [np.arange(1000, dtype="<u2"), np.arange(2000, 2035, dtype="<u2")]

    def batch(seed, first, last):
        blocks = pretrain.Blocks(files, length=10, total=500, seed=seed)
        return blocks.__getitems__(list(range(first, last)))["input_ids"]

    epochs = batch(3, 0, 101), batch(3, 101, 202)
    for epoch in epochs:
        assert len(epoch.unique()) == epoch.numel() == 990 + 20
        assert (epoch.diff(dim=1) == 1).all()  # no block reaches from one file into the other
        assert (epoch[:, 0].diff() == 10).sum() < 10
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(batch(3, 150, 160), batch(3, 101, 202)[49:59])
    assert not torch.equal(batch(4, 150, 160), batch(3, 150, 160))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 65, 1000])
def test_an_order_without_a_table_is_a_permutation(count):
    orders = [[pretrain.shuffled(place, count, seed, 0) for place in range(count)] for seed in range(2)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert orders[0] != orders[1] or count < 4


def test_floating_point_operations_of_a_step():
    """A Transformer's by torch's own count, which knows nothing of causality; a Falcon's by hand."""
    length, shape = 32, {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 40}
    llama = AutoModelForCausalLM.from_config(
        pretrain.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1), attn_implementation="eager"
    )
    ids = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        llama(input_ids=ids, labels=ids).loss.backward()
    attention = 6 * 3 * 24 * length
    counted = counter.get_total_flops() - length * (pretrain.flops_per_token(llama, length) + attention)
    assert counted in (0, 2 * 6 * length)  # rotary angles, which are a product in some releases

    shape |= {"num_attention_heads": 2, "head_dim": 12, "value_head_dim": 6}
    for rule, window, products in (("falcon_1", None, 3), ("falcon_2a", None, 2), ("falcon_3", 5, 11)):
        config = pretrain.FalconFastWeightConfig(rule=rule, window_size=window, **shape)
        model = AutoModelForCausalLM.from_config(config)
        gains = 12 if rule == "falcon_2a" else 2
        mixer = 24 * (24 + 24 + 12 + gains + 2) + 12 * 24
        weights = 3 * (mixer + 3 * 24 * 40) + 24 * 50
        assert pretrain.flops_per_token(model, length) == 6 * (weights + 3 * products * 2 * 12 * 6)


def test_peaks_are_those_of_the_card_that_torch_names():
    names = {"NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}
    names |= {"NVIDIA GH200 480GB": None, "NVIDIA H200 NVL": None, "CPU, x86_64": None}
    assert {name: pretrain.peak_flops(name) for name in names} == names


@pytest.mark.parametrize("model", ["transformer", "falcon"])
def test_training_learns_and_its_folder_loads(data, tmp_path, model, capsys):
    metrics = train(data, tmp_path / "run", model=model, tokens=16 * 8 * 40)
    assert np.mean(losses(tmp_path / "run")[-5:]) < losses(tmp_path / "run")[0] - 1
    folder = tmp_path / "run" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.use_cache
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    assert metrics["finished"]
    assert metrics["tokens_seen"] == 16 * 8 * 40
    assert metrics["parameters"] == loaded.num_parameters()
    assert metrics["evaluation"]["held"]["documents"] == 10
    call("evaluate", folder, data / "held.bin.xz", "--context", 16, "--output", tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == metrics["evaluation"]


def test_interrupted_run_goes_on_as_if_it_had_not_been(data, tmp_path):
    """Also when the process dies after a log entry and before the next checkpoint."""
    options = ("--base-width", 32, "--resume")
    whole = train(data, tmp_path / "whole", *options, model="falcon")
    for _ in range(3):
        part = train(data, tmp_path / "parts", *options, "--minutes", 0, model="falcon")
    assert (part["finished"], part["steps"]) == (False, 3)
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"loss": 0.0, "step": 4}) + "\n")
    done = train(data, tmp_path / "parts", *options, model="falcon")
    assert done["finished"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == whole["planned_steps"] == 12
    assert done["evaluation"] == whole["evaluation"]
    for name, load in (("model.safetensors", load_file), ("optimizer.pt", torch.load)):
        parts, at_once = (load(tmp_path / run / "checkpoint-12" / name) for run in ("parts", "whole"))
        torch.testing.assert_close(parts, at_once, rtol=0, atol=0)
    assert train(data, tmp_path / "parts", *options, model="falcon")["evaluation"] == done["evaluation"]


def test_blocks_are_trained_on_in_order_and_once_each(data, tmp_path, monkeypatch):
    """The first call is stopped after a step, for which a batch more may have been read."""
    read, block = [], pretrain.Blocks.block
    monkeypatch.setattr(pretrain.Blocks, "block", lambda blocks, i: read.append(i) or block(blocks, i))
    train(data, tmp_path / "run", "--minutes", 0)
    assert read == list(range(len(read)))
    read.clear()
    train(data, tmp_path / "run", "--resume")
    assert read == list(range(8, 12 * 8))


@pytest.mark.slow
def test_two_processes_train_as_one_and_a_single_one_goes_on(data, tmp_path):
    """Stopped together for lack of time at their first entry of the log, after three steps."""
    train(data, tmp_path / "one")
    options = ("--cpu", "--minutes", 0, "--log-every", 3, "--accumulate", 2)
    launch = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2, SCRIPT)
    arguments = [sys.executable, "-m", *map(str, (*launch, *command(data, tmp_path / "two", *options)))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3 of 12, go on with --resume") == 1
    assert json.loads((tmp_path / "two" / "model" / "metrics.json").read_text())["processes"] == 2
    train(data, tmp_path / "two", "--resume")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx([np.mean(one[:3]), *one[3:]], rel=1e-4)


def test_matrices_have_rates_by_width(data, tmp_path):
    train(data, tmp_path / "run", "--base-width", 64, tokens=1)
    groups = torch.load(tmp_path / "run" / "checkpoint-1" / "optimizer.pt")["param_groups"]
    decays, rates = [[group[name] for group in groups] for name in ("weight_decay", "initial_lr")]
    assert decays == [0.1, 0]
    assert rates == [1e-2 * 64 / 16, 1e-2]


def test_the_paper_gives_what_is_not_given(data, tmp_path):
    train(data, tmp_path / "run", "--paper", tokens=1)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    given = {"tokens": 1, "batch_size": 8, "learning_rate": 1e-2} | {k.replace("-", "_"): v for k, v in SHAPE.items()}
    del given["head_dim"]
    assert {name: plan[name] for name in pretrain.PAPER} == pretrain.PAPER | given
    steps = pretrain.parse_count(pretrain.PAPER["tokens"]) / (pretrain.PAPER["batch_size"] * 1024)
    assert steps == 100_000


def test_speed_is_shown_as_part_of_what_the_device_can_do(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrain, "peak_flops", lambda card: 1e12)
    metrics = train(data, tmp_path / "run", tokens=16 * 8 * 2)
    for entry in log(tmp_path / "run"):
        speed = entry["mfu"] * 1e12 / metrics["flops_per_token"]
        assert speed == pytest.approx(entry["tokens_per_second"], abs=1)
    line = f"loss {entry['loss']:.4f}, {entry['tokens_per_second']:,} tokens/s, MFU {entry['mfu']:.1%}"
    assert line in capsys.readouterr().err


def test_the_log_is_in_tensorboard_too(data, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(data, tmp_path / "run", tokens=16 * 8 * 2)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    shown = accumulator.EventAccumulator(str(events)).Reload()
    for name in ("loss", "tokens_per_second", "learning_rate"):
        values = [event.value for event in shown.Scalars(f"train/{name}")]
        assert values == pytest.approx([entry[name] for entry in log(tmp_path / "run")])


def test_the_two_architectures_have_equal_size(data):
    """At the default shape and vocabulary, in 16 MB of bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    tokenizer.add_tokens([f"<{i}>" for i in range(4096 - len(tokenizer))])
    shape = {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 64,
        "intermediate_size": 768,
    }
    with torch.device("meta"):
        sizes = [
            pretrain.build_model(
                tokenizer,
                architecture,
                pretrain.Rule.falcon_3a,
                pretrain.Variant.rms_direct,
                4,
                1024,
                **shape,
            ).num_parameters()
            for architecture in pretrain.Architecture
        ]
    assert max(sizes) < 1.02 * min(sizes)
    assert 2 * max(sizes) < 15_980_000


def bad_calls(data, folder):
    """Each with a part of the sentence that it must end in."""
    (folder / "empty.txt").write_text("")
    (folder / "text.md").write_text("text")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "damaged.txt.xz").write_bytes(b"no xz")
    write_texts(folder / "other.txt", documents(50, seed=5)[::-1] + ["zebra zoo zigzag buzz jazz quartz"] * 40)
    call("tokenizer", folder / "other.txt", "--output", folder / "tokenizer", "--vocab-size", 290)
    (folder / "cut.bin.xz").write_bytes((data / "held.bin.xz").read_bytes()[:-20])
    (folder / "cut.json").write_bytes((data / "held.json").read_bytes())
    run = folder / "run"
    tokenize = ["--tokenizer", data / "tokenizer", "--output", folder / "out.bin"]
    fit = ["train", data / "train.bin", "--output", run, "--tokenizer"]
    return [
        (["tokenize", folder / "absent.txt", *tokenize], "is not a file"),
        (["tokenize", folder / "text.md", *tokenize], "unknown ending"),
        (["tokenize", folder / "empty.txt", *tokenize], "no document"),
        (["tokenize", folder / "latin.txt", *tokenize], "not UTF-8"),
        (["tokenize", folder / "damaged.txt.xz", *tokenize], "damaged"),
        (["tokenize", folder / "other.txt", *tokenize[:3], folder / "out.npy"], "unknown ending"),
        (["tokenizer", folder / "empty.txt", "--output", run], "too short"),
        (["tokenizer", folder / "other.txt", "--output", run, "--vocab-size", 100], "257 to 65536"),
        ([*fit, folder / "tokenizer"], "another tokenizer"),
        ([*fit, folder], "no tokenizer.json"),
        ([*fit, data / "tokenizer", "--evaluate", folder / "absent.bin"], "is missing"),
        ([*fit, data / "tokenizer", "--sequence-length", 100000], "two blocks"),
        (["train", data / "train.bin", data / "absent.bin", *fit[2:], data / "tokenizer"], "is missing"),
        ([*fit, data / "tokenizer", "--accumulate", 3], "divide"),
        ([*fit, data / "tokenizer", "--model", "transformer", "--fused-loss"], "must be an unwrapped Falcon"),
        ([*fit, data / "tokenizer", "--rule", "falcon_1", "--window", 4], "window"),
        ([*fit, data / "tokenizer", "--model", "transformer", "--heads", 3], "3"),
        ([*fit, data / "tokenizer", "--evaluate", folder / "cut.bin.xz"], "damaged"),
        (["evaluate", folder, data / "held.bin.xz"], "no config.json"),
    ]


def test_bad_input_gets_one_sentence(data, tmp_path):
    for arguments, sentence in bad_calls(data, tmp_path):
        with pytest.raises(pretrain.RecipeError, match=sentence) as error:
            call(*arguments)
        assert "\n" not in str(error.value)
        assert str(error.value).endswith(".")
    assert not list(tmp_path.glob("out.*"))


def test_divergence_stops_the_run(data, tmp_path):
    with pytest.raises(pretrain.RecipeError, match="lower --learning-rate"):
        train(data, tmp_path / "run", "--learning-rate", 1e30)


@pytest.mark.parametrize(("text", "count"), [("50", 50), ("1.5k", 1500), ("300M", 300_000_000), ("2B", 2 * 10**9)])
def test_counts(text, count):
    assert pretrain.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3", "0", "inf", "many"])
def test_bad_counts(text):
    with pytest.raises(pretrain.typer.BadParameter, match="is not a count"):
        pretrain.parse_count(text)


def test_a_run_is_not_overwritten_nor_resumed_as_another(data, tmp_path):
    train(data, tmp_path / "run", "--minutes", 0)
    with pytest.raises(pretrain.RecipeError, match="add --resume"):
        train(data, tmp_path / "run")
    with pytest.raises(pretrain.RecipeError, match="seed 0 and not 1"):
        train(data, tmp_path / "run", "--resume", "--seed", 1)


@pytest.mark.parametrize("command", [[], ["tokenizer"], ["tokenize"], ["train"], ["evaluate"]])
def test_help(command):
    result = CliRunner().invoke(pretrain.app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_errors_reach_the_shell_without_a_traceback():
    arguments = ["tokenizer", "absent.txt", "--output", "nowhere"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "pretrain.py: absent.txt is not a file: give a .txt or .txt.xz file.\n"
