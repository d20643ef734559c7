"""The command: what it prints, where, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from falcon_hf import FalconFastWeightForCausalLM, cli

PROMPT = "A pointer is"
STATUS = r"3 tokens read in [\d.]+ s, (\d+) written at [\d,.]+ tokens/s, ([\d,]+) bytes of state\n"


@pytest.fixture
def broken(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint to break."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def fails(result: tuple[int, str, str], *words: str) -> None:
    """Asserts one line on standard error with these words, nothing else, and code 2."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"falcon-hf: [^\n]+\n", err), err
    assert all(word in err for word in words), err


def test_writes_the_prompt_and_its_continuation(call, checkpoint):
    code, out, err = call("generate", PROMPT, "--model", checkpoint, "--greedy", "-n", 12)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    assert code == 0
    assert out == PROMPT + tokenizer.decode(wanted, skip_special_tokens=True) + "\n"
    assert re.fullmatch(STATUS, err)[1] == str(len(wanted))


def test_state_has_the_same_size_at_any_length(call, checkpoint):
    sizes = set()
    for count in (1, 40):
        _, _, err = call("generate", PROMPT, "-m", checkpoint, "-n", count)
        sizes.add(re.fullmatch(STATUS, err)[2])
    assert len(sizes) == 1
    memories = 2 * 2 * 16 * 16 * 4
    assert memories < int(sizes.pop().replace(",", "")) < 3 * memories


def test_reads_the_prompt_from_standard_input(call, checkpoint):
    _, given, _ = call("generate", PROMPT, "-m", checkpoint, "--greedy", "-n", 5)
    _, piped, _ = call("generate", "-m", checkpoint, "--greedy", "-n", 5, stdin=f"{PROMPT}\n".encode())
    assert piped == given


def test_seed_draws_the_same_text_again(call, checkpoint):
    first, again, other = (
        call("generate", PROMPT, "-m", checkpoint, "--sample", "-n", 20, "--seed", seed)[1] for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("narrow", [("--top-k", 1), ("--top-p", 1e-6), ("--temperature", 1e-4)])
def test_sampling_options_narrow_the_draw(call, checkpoint, narrow):
    _, greedy, _ = call("generate", PROMPT, "-m", checkpoint, "--greedy", "-n", 8)
    assert call("generate", PROMPT, "-m", checkpoint, "-n", 8, *narrow)[1] == greedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_runs_in_other_dtypes(call, checkpoint, dtype):
    code, out, _ = call("generate", PROMPT, "-m", checkpoint, "-n", 3, "--dtype", dtype, "--device", "cpu")
    assert code == 0
    assert out.startswith(PROMPT)


def test_writer_holds_a_character_back_until_it_is_whole(checkpoint, capsys):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "one é 🙂 end"
    ids = torch.tensor(tokenizer(text).input_ids)
    writer = cli.Writer(tokenizer, "one", before_text=lambda: None)
    length = len(tokenizer("one").input_ids)
    writer.put(ids[None, :length])
    pieces = []
    for token in ids[length:]:
        writer.put(token[None])
        pieces.append(capsys.readouterr().out)
    writer.end()
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert capsys.readouterr().out == "\n"


def test_info_says_what_a_checkpoint_is(call, checkpoint):
    code, out, err = call("info", "-m", checkpoint)
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert facts["rule"] == "falcon_3a"
    assert facts["equation"] == cli.EQUATIONS["falcon_3a"]
    weights = FalconFastWeightForCausalLM.from_pretrained(checkpoint).num_parameters()
    assert facts["weights"] == f"{weights:,} in float32"
    assert facts["at 1,024 tokens"].split()[0] == facts["at 32,768 tokens"].split()[0]
    assert facts["at 1,024 tokens"].endswith(f" {1024 * 2 * 2 * 32 * 4:,}")
    assert facts["memory, layer 1"] == "8, 1,024 tokens, by head"


def test_every_rule_has_an_equation():
    from falcon_kernels import RULES

    assert list(cli.EQUATIONS) == list(RULES)


def test_help_and_version(call):
    code, out, _ = call("generate", "--help")
    assert code == 0
    assert 'falcon-hf generate "A pointer is"' in out
    assert "--repetition-penalty" in out
    assert call("--version")[:2] == (0, f"falcon-hf {metadata.version('falcon-hf')}\n")
    code, out, _ = call()
    assert code == 2
    assert "generate" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "0"], ["--max-new-tokens is 0", "at least 1"]),
        (["-n", "many"], ["--max-new-tokens"]),
        (["--temperature", "0"], ["--temperature is 0", "above 0"]),
        (["--temperature", "nan"], ["--temperature is nan"]),
        (["--top-k", "-1"], ["--top-k is -1"]),
        (["--top-p", "1.5"], ["--top-p is 1.5", "at most 1"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty is 0"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--greedy", "--top-k", "5"], ["--top-k", "--greedy"]),
        (["--dtype", "int8"], ["--dtype is 'int8'", "bfloat16"]),
        (["--device", "abacus"], ["--device is 'abacus'", "cpu"]),
        (["--device", "cuda:99"], ["--device is 'cuda:99'", "cpu"]),
        (["--colour", "red"], ["--colour"]),
    ],
)
def test_wrong_options_are_one_sentence(call, checkpoint, options, words):
    fails(call("generate", PROMPT, "-m", checkpoint, *options), *words)


def test_unknown_command_is_one_sentence(call):
    fails(call("ponder"), "ponder")


@pytest.mark.parametrize("name", ["falcon-9", "./falcon-9", "no/such/folder"])
def test_unknown_model_is_one_sentence(call, name):
    fails(call("generate", PROMPT, "--model", name), repr(name), *cli.bundled(), "owner/model")


def test_missing_prompt_is_one_sentence(call, checkpoint):
    fails(call("generate", "", "-m", checkpoint), "empty")
    fails(call("generate", "-m", checkpoint, stdin=b"\n"), "empty")
    fails(call("generate", "-m", checkpoint, terminal=True), "pipe")
    fails(call("generate", "-m", checkpoint, stdin=b"caf\xe9"), "UTF-8")


def test_folder_without_a_checkpoint_is_one_sentence(call, tmp_path):
    fails(call("generate", PROMPT, "-m", tmp_path), "config.json")


def test_broken_checkpoint_is_one_sentence(call, broken):
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    fails(call("generate", PROMPT, "-m", broken), "cannot load")
    weights.unlink()
    fails(call("generate", PROMPT, "-m", broken), "cannot load", "model.safetensors")
    weights.write_bytes(whole)
    (broken / "config.json").write_text("{")
    fails(call("generate", PROMPT, "-m", broken), "cannot load")


def test_checkpoint_with_other_weights_is_one_sentence(call, broken):
    weights = load_file(broken / "model.safetensors")
    name = next(iter(weights))
    kept = weights.pop(name)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    fails(call("generate", PROMPT, "-m", broken), "cannot load", name)
    save_file(
        {**weights, name: kept, "extra": kept.clone()},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    fails(call("generate", PROMPT, "-m", broken), "cannot load", "extra")


def test_wrong_config_is_one_sentence(call, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "rule": "falcon_9"}))
    fails(call("generate", PROMPT, "-m", broken), "falcon_9", "falcon_3a")


def test_error_of_the_library_is_one_sentence(call, checkpoint, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("gain is 3; it must lie in [0, 2].")

    monkeypatch.setattr(FalconFastWeightForCausalLM, "generate", refuse)
    fails(call("generate", PROMPT, "-m", checkpoint), "gain is 3")


def test_info_is_for_this_kind_of_model(call, broken):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(broken)
    fails(call("info", "-m", broken), "llama", "falcon_fast_weight")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_interrupt_ends_quietly(checkpoint):
    command = [sys.executable, "-m", "falcon_hf.cli", "generate", PROMPT, "-m", checkpoint, "-n", "1000000"]
    # What runs in the background, as tests may, has interrupts ignored, and so have its children.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **heard)
    process.stdout.read(len(PROMPT) + 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"\n"


def test_bundled_checkpoint_continues_a_sentence(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("generate", PROMPT, "-n", 32, "--seed", 0)
    assert code == 0, err
    assert out.startswith(PROMPT)
    words = re.findall(r"[a-z]+", out.removeprefix(PROMPT).lower())
    assert len(words) >= 6
    assert {"a", "an", "and", "is", "of", "that", "the", "to"} & set(words)
    assert call("info")[0] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_writes_on_a_gpu_what_it_writes_on_the_cpu(call):
    options = (PROMPT, "--greedy", "-n", 24, "--dtype", "float32")
    on_gpu, on_cpu = (call("generate", *options, "--device", device) for device in ("cuda", "cpu"))
    assert on_gpu[0] == 0, on_gpu[2]
    assert on_gpu[1] == on_cpu[1]
