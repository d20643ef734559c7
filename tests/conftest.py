"""Threads and the kernels' interpreter, before anything else; and what tests of the command share."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import interpreter
import pytest
import torch

torch.set_num_threads(1)
interpreter.switch_on()


def pytest_collection_modifyitems(config, items):
    if "long" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; pytest -m long runs it"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that a kernel has to fill holds NaN before it does."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty and its like return
    assert torch.empty(1, device="cuda" if torch.cuda.is_available() else "cpu").isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A saved model with random weights, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator(["A pointer is an address."] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = FalconFastWeightConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    FalconFastWeightForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command in this process: exit code, standard output, standard error."""
    from falcon_hf import cli

    def run(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> tuple[int, str, str]:
        standard_input = io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(standard_input, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdin", standard_input)
        monkeypatch.setattr(sys, "argv", ["falcon-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        written = capsys.readouterr()
        return end.value.code or 0, written.out, written.err

    return run
