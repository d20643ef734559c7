"""Pretrain a small language model from text files, from the tokenizer to the measured checkpoint.

Four steps, each a command (`python examples/pretrain.py STEP --help` has every option):

    tokenizer   text files  -> a byte-level BPE tokenizer that AutoTokenizer loads
    tokenize    text files  -> a file of token ids, and beside it what was counted on the way
    train       token files -> a folder that AutoModelForCausalLM loads, with metrics.json
    evaluate    bits per byte of any such folder on any such token file

For example, with texts of your own in train.txt and val.txt:

    python examples/pretrain.py tokenizer train.txt --output data/tokenizer
    python examples/pretrain.py tokenize train.txt --tokenizer data/tokenizer --output data/train.bin
    python examples/pretrain.py tokenize val.txt --tokenizer data/tokenizer --output data/val.bin
    python examples/pretrain.py train data/train.bin --tokenizer data/tokenizer --evaluate data/val.bin \\
        --output runs/tiny --tokens 300M --minutes 60 --resume

Texts are UTF-8, .txt or .txt.xz. A line that holds nothing but U+001E, the record separator, ends a
document; a file without such a line is one document. The newline that closes a document belongs to the
separation, not to the document.

Needs what `pip install "falcon-hf[train]"` brings, and uses one device.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.monotonic()  # --minutes counts from here, because the imports below take a part of them

import datetime
import hashlib
import json
import lzma
import math
import platform
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import tokenizers
import torch
import transformers
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.progress import Progress, track
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import is_tensorboard_available

from falcon_hf import FalconFastWeightConfig

END = "<|endoftext|>"
SEPARATOR = b"\x1e"
# What merges may not cross: contractions, words and marks with at most one space before them, single
# digits, line ends. A digit is always a token by itself: numbers of any length then look alike to the
# model, and a vocabulary of a few thousand entries spends none of them on frequent years.
PIECES = r"'(?:[sdmt]|ll|re|ve)| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s*\n|\s+(?!\S)|\s+"

BATCH_BYTES = 4_000_000  # of text, encoded at a time
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]  # for two-byte symbols

app = typer.Typer(
    help="Pretrain a small language model from text files. The top of this file shows a whole run.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


# ------------------------------------------------------------------------------------------------- texts


def read_documents(path: Path, progress: Progress, digest=None) -> Iterator[str]:
    """Yield the documents of a .txt or .txt.xz file; `digest` takes in the text as it passes.

    The bar moves with the bytes of the file as it lies on the disk.
    """
    if not path.is_file():
        raise RecipeError(f"{path} is not a file: give a .txt or .txt.xz file.")
    if not path.name.endswith((".txt", ".txt.xz")):
        raise RecipeError(f"{path} has an unknown ending: texts end in .txt or .txt.xz.")
    with progress.open(path, "rb", description=path.name) as raw:
        lines: list[bytes] = []
        try:
            with lzma.open(raw) if path.suffix == ".xz" else raw as file:
                for line in file:
                    if digest is not None:
                        digest.update(line)
                    if line.rstrip(b"\r\n") == SEPARATOR:
                        yield from decode(lines)
                        lines = []
                    else:
                        lines.append(line)
            yield from decode(lines)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path} is not UTF-8 ({error.reason}): convert it first.") from error
        except (lzma.LZMAError, EOFError) as error:
            raise RecipeError(f"{path} is damaged ({error}): it has to be a whole .xz file.") from error


def decode(lines: list[bytes]) -> Iterator[str]:
    """The document that these lines make, unless it is empty."""
    text = b"".join(lines).removesuffix(b"\n").decode()
    if text:
        yield text


def train_bpe(texts: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: every text survives encoding and decoding unchanged, byte for byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not len(alphabet) < vocab_size <= 65536:
        raise RecipeError(f"--vocab-size is {vocab_size}: it may be {len(alphabet) + 1} to 65536.")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    with Progress() as progress:
        documents = (document for path in texts for document in read_documents(path, progress))
        bpe.train_from_iterator(documents, trainer)
    if bpe.get_vocab_size() < vocab_size:
        raise RecipeError(
            f"--vocab-size is {vocab_size} and the texts are too short for more than {bpe.get_vocab_size()}: "
            f"give more text or a smaller number."
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, if token files can be made with it."""
    if not (folder / "tokenizer.json").is_file():
        raise RecipeError(f"{folder} holds no tokenizer.json: give the folder that `tokenizer` wrote.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # how it was loaded would be saved with it
        tokenizer.init_kwargs.pop(name, None)
    if tokenizer.eos_token_id is None or len(tokenizer) > 65536:
        raise RecipeError(f"{folder}: the tokenizer needs an eos token and at most 65536 entries.")
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of the vocabulary: token files say with it which tokenizer made them."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


# ------------------------------------------------------------------------------------------- token files


def write_tokens(texts: list[Path], tokenizer: PreTrainedTokenizerFast, output: Path) -> dict:
    """Write the ids of all documents, each followed by <|endoftext|>, as little-endian uint16.

    Beside `name.bin` or `name.bin.xz` goes `name.json`: documents, their bytes in UTF-8, tokens (the closing
    <|endoftext|> of each document included), the fingerprint of the tokenizer, and for each source the
    SHA-256 of its (unpacked) text.
    """
    description = description_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # a document that speaks of <|endoftext|> does not end there
    end = [tokenizer.eos_token_id]
    counts = {"documents": 0, "bytes": 0, "tokens": 0}
    sources = []
    partial = output.with_name(output.name + ".partial")
    with lzma.open(partial, "wb", filters=XZ_FILTERS) if output.suffix == ".xz" else partial.open("wb") as file:

        def flush(batch: list[str]) -> None:
            for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoding.ids + end
                file.write(np.array(ids, dtype="<u2").tobytes())
                counts["tokens"] += len(ids)

        with Progress() as progress:
            for path in texts:
                digest = hashlib.sha256()
                batch, size = [], 0
                for document in read_documents(path, progress, digest):
                    batch.append(document)
                    size += len(document.encode())
                    counts["documents"] += 1
                    if size > BATCH_BYTES:  # the tokenizer encodes the documents of a batch in parallel
                        flush(batch)
                        counts["bytes"] += size
                        batch, size = [], 0
                flush(batch)
                counts["bytes"] += size
                sources.append({"name": path.name, "sha256": digest.hexdigest()})
    if not counts["documents"]:
        partial.unlink()
        raise RecipeError(f"{', '.join(map(str, texts))}: no document with any text in it.")
    facts = {**counts, "tokenizer": fingerprint(tokenizer), "end": end[0], "sources": sources}
    description.write_text(json.dumps(facts, indent=2) + "\n")
    partial.replace(output)
    return facts


def description_path(path: Path) -> Path:
    """Where the counts of a token file stand."""
    name = path.name.removesuffix(".xz")
    if not name.endswith(".bin"):
        raise RecipeError(f"{path} has an unknown ending: token files end in .bin or .bin.xz.")
    return path.with_name(name.removesuffix(".bin") + ".json")


def read_tokens(path: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, dict]:
    """The ids of a token file, mapped from the disk or, from .xz, unpacked into memory; and its counts."""
    description = description_path(path)
    for file in (path, description):
        if not file.is_file():
            raise RecipeError(f"{file} is missing: give a token file that `tokenize` wrote, its .json beside it.")
    facts = json.loads(description.read_text())
    if facts["tokenizer"] != fingerprint(tokenizer):
        raise RecipeError(f"{path} was made with another tokenizer than the one given: tokenize the texts anew.")
    if path.suffix == ".xz":
        try:
            tokens = np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")
        except lzma.LZMAError as error:
            raise RecipeError(f"{path} is damaged ({error}): it has to be a whole .xz file.") from error
    else:
        tokens = np.memmap(path, dtype="<u2", mode="r")
    if len(tokens) != facts["tokens"]:
        raise RecipeError(f"{path} holds {len(tokens)} tokens and {description.name} says {facts['tokens']}.")
    return tokens, facts


# -------------------------------------------------------------------------------------------- evaluation


def scored_windows(tokens: np.ndarray, end: int, context: int) -> list[tuple[int, int, int]]:
    """Cut a split into windows of at most `context` predictions, each as (first, scored, last).

    Positions count predictions: prediction i is of tokens[i] from what stands before it in its document,
    which begins with an <|endoftext|>. A window sees the predictions from `first` up to `last`, and scores
    those from `scored` on. A document's first window scores all of its predictions, each later one starts
    half a window further and scores its second half, so that every token is scored once.
    """
    windows = []
    begin = 0
    for stop in (np.flatnonzero(tokens == end) + 1).tolist():
        first = scored = begin
        while scored < stop:
            last = min(first + context, stop)
            windows.append((first, scored, last))
            first, scored = first + context // 2, last
        begin = stop
    return windows


@torch.no_grad()
def bits_per_byte(model, tokens: np.ndarray, facts: dict, context: int, batch_size: int = 16) -> dict:
    """The length in bits of the split's documents under the model, per byte of their UTF-8 text.

    Defined for every architecture alike, in float32:

    - Scored is each token of each document, and the <|endoftext|> that ends it. The first token is predicted
      from an <|endoftext|>; nothing is carried over from one document to the next.
    - The model sees windows of `context` tokens. In documents that are longer, windows overlap by half: a
      token of the first window is predicted from all of the document before it, any other from at least
      `context / 2` tokens. A recurrent model starts each window with an empty state, so that it has exactly
      the text that a Transformer has.
    - bits per byte = sum over all scored tokens of -log2 p(token), divided by the bytes of the documents.
    """
    end = facts["end"]
    device = next(model.parameters()).device
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model.eval()
    stream = np.concatenate([[end], tokens])  # stream[i] comes before tokens[i]
    windows = sorted(scored_windows(tokens, end, context), key=lambda window: window[0] - window[2])
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for at in track(range(0, len(windows), batch_size), description="evaluating"):
        batch = windows[at : at + batch_size]
        width = batch[0][2] - batch[0][0]
        inputs = np.full((len(batch), width), end)  # padded on the right, where no scored token looks
        targets = np.full((len(batch), width), -100)
        for row, (first, scored, last) in enumerate(batch):
            inputs[row, : last - first] = stream[first:last]
            targets[row, scored - first : last - first] = tokens[scored:last]
        logits = model(input_ids=torch.from_numpy(inputs).to(device), use_cache=False).logits
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), torch.from_numpy(targets).flatten().to(device), reduction="none"
        )
        nats += losses.double().sum()
    torch.set_float32_matmul_precision(precision)
    loss = nats.item() / len(tokens)
    return {
        "bits_per_byte": nats.item() / math.log(2) / facts["bytes"],
        "loss": loss,
        "perplexity": math.exp(loss),
        "tokens": len(tokens),
        "bytes": facts["bytes"],
        "documents": facts["documents"],
        "context": context,
        "sources": facts["sources"],
    }


def evaluate_folder(folder: Path, files: list[Path], context: int) -> dict[str, dict]:
    """Load a model folder as any user would, and measure it on token files; keyed by the files' names."""
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{folder} holds no config.json: give a folder that `train` wrote (its `model`).")
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.vocab_size < len(tokenizer):
        raise RecipeError(
            f"{folder}: the model has {model.config.vocab_size} tokens and its tokenizer {len(tokenizer)}."
        )
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    for file in files:
        name = description_path(file).stem
        results[name] = bits_per_byte(model, *read_tokens(file, tokenizer), context)
        print(
            f"{name}: {results[name]['bits_per_byte']:.4f} bits per byte, loss {results[name]['loss']:.4f}, "
            f"perplexity {results[name]['perplexity']:.2f} per token, {results[name]['tokens']:,} tokens"
        )
    return results


# ------------------------------------------------------------------------------------------------- model


class Architecture(StrEnum):
    falcon = "falcon"
    transformer = "transformer"


class Rule(StrEnum):
    falcon_1 = "falcon_1"
    falcon_2 = "falcon_2"
    falcon_3 = "falcon_3"
    falcon_1a = "falcon_1a"
    falcon_2a = "falcon_2a"
    falcon_3a = "falcon_3a"


class Variant(StrEnum):
    """The paper's names for how queries and keys are normalized, and what the network emits as step size."""

    l2_gain = "1"
    l2_direct = "2"
    rms_direct = "3"


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    architecture: Architecture,
    rule: Rule,
    variant: Variant,
    window: int | None,
    sequence_length: int,
    **shape: int,
):
    """A freshly initialized model.

    Both architectures share the shape: width, layers, heads, SwiGLU, tied embeddings, no biases around them.
    They differ in what mixes the tokens, and by less than 2 % in parameters.
    """
    shared = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | shape
    try:
        if architecture is Architecture.transformer:
            config = LlamaConfig(max_position_embeddings=sequence_length, **shared)
        else:
            name = f"{rule.replace('_', '-')}.{variant}-tiny"
            config = FalconFastWeightConfig.from_preset(name, window_size=window, **shared)
    except (ValueError, StrictDataclassError) as error:
        raise RecipeError(str(error.__cause__ or error)) from error
    return AutoModelForCausalLM.from_config(config)


# ---------------------------------------------------------------------------------------------- training


class Blocks(torch.utils.data.Dataset):
    """The blocks of a whole training run in the order in which they are trained on.

    The documents lie end to end and are cut into blocks of `length`, from an offset and in an order that
    are drawn anew for each epoch. Block number i is the same in every run with the same seed: a run that
    resumes at step n simply goes on at block n * batch size.
    """

    def __init__(self, tokens: np.ndarray, length: int, total: int, seed: int):
        self.tokens, self.length, self.total, self.seed = tokens, length, total, seed
        self.per_epoch = len(tokens) // length - 1  # whichever the offset
        if self.per_epoch < 1:
            raise RecipeError(
                f"The training data has {len(tokens):,} tokens: it takes at least {2 * length:,}, two blocks "
                f"of --sequence-length."
            )
        self.epochs: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.total

    def starts(self, epoch: int) -> np.ndarray:
        """Where the blocks of an epoch start, in training order."""
        if epoch not in self.epochs:
            rng = np.random.default_rng((self.seed, epoch))
            self.epochs = {epoch: rng.integers(self.length) + self.length * rng.permutation(self.per_epoch)}
        return self.epochs[epoch]

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """One batch, with a single gather."""
        starts = np.array([self.starts(i // self.per_epoch)[i % self.per_epoch] for i in indices])
        block = self.tokens[starts[:, None] + np.arange(self.length)]
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class PretrainTrainer(Trainer):
    """transformers' Trainer with decay on matrices only, and logs in the units of language modelling."""

    def __init__(self, *args, tokens_per_step: int, bytes_per_token: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens_per_step, self.bytes_per_token = tokens_per_step, bytes_per_token
        self.clock: tuple[float, int, float] | None = None  # time, step, seconds trained before that

    def get_decay_parameter_names(self, model) -> list[str]:
        """The weights of linear layers; not embeddings (which are tied to the head), convolutions, norms."""
        head = model.get_output_embeddings()
        return [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]

    def start_clock(self) -> None:
        history = self.history()
        self.clock = time.monotonic(), self.state.global_step, history[-1]["seconds"] if history else 0.0

    def history(self) -> list[dict]:
        """What was logged of the run up to here, whether in this process or before it was resumed."""
        return [entry for entry in self.state.log_history if "seconds" in entry]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, step = time.monotonic(), self.state.global_step
            if not math.isfinite(logs["loss"]):
                raise RecipeError(
                    f"The loss at step {step} is {logs['loss']}: give a lower --learning-rate and another --output."
                )
            then, then_step, seconds = self.clock
            seconds += now - then
            logs["bits_per_byte"] = logs["loss"] / math.log(2) / self.bytes_per_token
            logs["tokens"] = step * self.tokens_per_step
            logs["tokens_per_second"] = round((step - then_step) * self.tokens_per_step / (now - then))
            logs["seconds"] = round(seconds, 3)
            self.clock = now, step, seconds
        super().log(logs, start_time)


class RunCallback(TrainerCallback):
    """Stops in time, and keeps log.jsonl the story of one uninterrupted run."""

    def __init__(self, trainer: PretrainTrainer, deadline: float, log: Path):
        self.trainer, self.deadline, self.path = trainer, deadline, log

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.start_clock()
        self.path.write_text("".join(json.dumps(entry) + "\n" for entry in self.trainer.history()))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "seconds" in logs:
            with self.path.open("a") as file:
                file.write(json.dumps({**logs, "step": state.global_step}) + "\n")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            control.should_log = True
        if time.monotonic() >= self.deadline:
            control.should_log = control.should_save = control.should_training_stop = True


# Options of `train` that a run may be resumed with other values of. The data is compared by its contents.
MAY_CHANGE = {"data", "tokenizer", "output", "evaluate", "accumulate", "compile", "log_every"}
MAY_CHANGE |= {"minutes", "reserve", "resume"}


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run: trainer_state.json is what Trainer writes last."""
    states = run.glob("checkpoint-*/trainer_state.json")
    return max((s.parent for s in states), key=lambda c: int(c.name.partition("-")[2]), default=None)


def check_resume(run: Path, plan: dict, resume: bool) -> Path | None:
    """The checkpoint to go on from, after a look at whether the run in the folder is the one asked for."""
    file = run / "plan.json"
    if not file.is_file():
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(plan, indent=2) + "\n")
        return None
    if not resume:
        raise RecipeError(f"{run} already holds a run: add --resume to go on with it, or give another --output.")
    before = json.loads(file.read_text())
    for name in before.keys() | plan.keys():
        if before.get(name) != plan.get(name):
            raise RecipeError(
                f"{run} was started with {name} {before.get(name)} and not {plan.get(name)}: a run resumes "
                f"only as it was started."
            )
    return last_checkpoint(run)


def export(model, tokenizer, folder: Path) -> None:
    """Write the model in bfloat16 with all that it takes to generate; whole, or not at all."""
    model.to(torch.bfloat16)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        max_new_tokens=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def parse_count(text: str) -> int:
    """'300M' -> 300000000; k, M and B are thousands, millions and billions."""
    scale = {"k": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:], 1)
    try:
        count = round(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise typer.BadParameter(f"{text!r} is not a count such as 50000, 300M or 1.5B.")
    return count


# ---------------------------------------------------------------------------------------------- commands


@app.command("tokenizer")
def tokenizer_command(
    texts: Annotated[list[Path], typer.Argument(help="Text files to learn from.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, <|endoftext|> included.")] = 4096,
) -> None:
    """Train a byte-level BPE tokenizer."""
    tokenizer = train_bpe(texts, vocab_size)
    tokenizer.save_pretrained(output)
    print(f"{output}: {len(tokenizer):,} tokens")


@app.command("tokenize")
def tokenize_command(
    texts: Annotated[list[Path], typer.Argument(help="Text files of one split.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    output: Annotated[Path, typer.Option(help="File to write: .bin, or .bin.xz to save two thirds of the space.")],
) -> None:
    """Turn texts into a file of token ids."""
    facts = write_tokens(texts, load_tokenizer(tokenizer), output)
    print(
        f"{output}: {facts['documents']:,} documents, {facts['bytes']:,} bytes, {facts['tokens']:,} tokens, "
        f"{facts['bytes'] / facts['tokens']:.3f} bytes per token"
    )


@app.command()
def train(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="Token file to train on.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made it.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; the finished model lies in its `model`.")],
    evaluate: Annotated[list[Path], typer.Option(help="Token file to evaluate at the end; repeatable.")] = [],  # noqa: B006
    model: Annotated[Architecture, typer.Option(help="Falcon, or a Transformer as its yardstick.")] = "falcon",
    rule: Annotated[Rule, typer.Option(help="Falcon's rule of writing.")] = "falcon_3a",
    variant: Annotated[Variant, typer.Option(help="1: l2, gain; 2: l2, direct; 3: RMS, direct step.")] = "3",
    window: Annotated[int | None, typer.Option(min=1, help="Window of falcon_3 and falcon_3a, 4 if not given.")] = None,
    hidden_size: Annotated[int, typer.Option(min=1)] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 768,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens in a training block.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks in a step.")] = 64,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts in which a step is computed.")] = 1,
    tokens: Annotated[int, typer.Option(parser=parse_count, help="Tokens to train on, epochs repeat.")] = "300M",
    learning_rate: Annotated[float, typer.Option(help="Peak; falls to a tenth of it on a cosine.")] = 2e-3,
    warmup: Annotated[float, typer.Option(min=0, max=1, help="Part of the steps that warm up.")] = 0.02,
    weight_decay: Annotated[float, typer.Option(min=0, help="On the weights of linear layers.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the initialization and of the order of the data.")] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between two entries of the log.")] = 50,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    minutes: Annotated[
        float, typer.Option(help="Stop training in time to be done this many minutes after the start.")
    ] = math.inf,
    reserve: Annotated[float, typer.Option(help="Minutes kept back for saving and evaluating.")] = 0.75,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")] = False,
) -> None:
    """Train a model; again with --resume, until the plan of --tokens is done.

    The plan fixes the learning rate of every step, so that a run cut short by --minutes goes on as if it
    had not been. Each call ends with a saved and evaluated model; its metrics.json says whether the plan
    was finished.
    """
    deadline = STARTED + 60 * (minutes - reserve)
    text_tokenizer = load_tokenizer(tokenizer)
    ids, facts = read_tokens(data, text_tokenizer)
    for file in evaluate:
        read_tokens(file, text_tokenizer)  # a wrong path is better found now than at the end
    if batch_size % accumulate:
        raise RecipeError(f"--accumulate is {accumulate}: it has to divide --batch-size, {batch_size}.")
    tokens_per_step = batch_size * sequence_length
    steps = math.ceil(tokens / tokens_per_step)
    blocks = Blocks(ids, sequence_length, steps * batch_size, seed)

    set_seed(seed)
    network = build_model(
        text_tokenizer,
        model,
        rule,
        variant,
        window,
        sequence_length,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    on_cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=batch_size // accumulate,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="sequential",  # Blocks has shuffled already
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=round(warmup * steps),
        weight_decay=weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=on_cuda,
        torch_compile=compile,
        seed=seed,
        logging_steps=log_every,
        logging_nan_inf_filter=False,  # it would wait for the device at every step
        save_steps=max(1, steps // 10),
        save_total_limit=2,
        report_to=["tensorboard"] if is_tensorboard_available() else [],
        remove_unused_columns=False,
        dataloader_pin_memory=on_cuda,
        accelerator_config={"non_blocking": on_cuda},
    )
    if arguments.n_gpu > 1 or arguments.world_size > 1:
        raise RecipeError("This recipe trains on one device: choose one with CUDA_VISIBLE_DEVICES.")
    torch.set_float32_matmul_precision("high")

    plan = {name: value for name, value in context.params.items() if name not in MAY_CHANGE}
    plan |= {"sources": facts["sources"], "vocabulary": facts["tokenizer"]}
    checkpoint = check_resume(output, plan, resume)
    parameters = network.num_parameters()
    print(
        f"{parameters:,} parameters, {2 * parameters:,} bytes in bfloat16; {steps:,} steps of "
        f"{tokens_per_step:,} tokens, {len(blocks) / blocks.per_epoch:.2f} epochs of {len(ids):,} tokens"
        + (f"; going on from {checkpoint}" if checkpoint else "")
    )

    trainer = PretrainTrainer(
        network,
        arguments,
        train_dataset=blocks,
        data_collator=lambda batch: batch,
        tokens_per_step=tokens_per_step,
        bytes_per_token=facts["bytes"] / facts["tokens"],
    )
    trainer.add_callback(RunCallback(trainer, deadline, output / "log.jsonl"))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    folder = output / "model"
    export(network, text_tokenizer, folder)
    history = trainer.history()
    step, seconds = trainer.state.global_step, history[-1]["seconds"]
    every = math.ceil(len(history) / 200)
    metrics = {
        "finished": step == steps,
        "parameters": parameters,
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
        "steps": step,
        "planned_steps": steps,
        "tokens_seen": step * tokens_per_step,
        "epochs": step * batch_size / blocks.per_epoch,
        "seconds": seconds,
        "tokens_per_second": round(step * tokens_per_step / seconds),
        "tokens_per_second_median": statistics.median(entry["tokens_per_second"] for entry in history),
        "evaluation": evaluate_folder(folder, evaluate, sequence_length),
        "training_data": facts,
        "plan": plan,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_cuda else f"CPU, {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {module.__name__: module.__version__ for module in (torch, transformers, tokenizers, np)},
        "curve": [
            {key: entry[key] for key in ("step", "tokens", "loss", "bits_per_byte", "learning_rate")}
            for entry in history[::-1][::every][::-1]
        ],
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    state = "the plan is finished" if step == steps else f"stopped at step {step} of {steps}, go on with --resume"
    print(f"{folder}: {state}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    data: Annotated[list[Path], typer.Argument(help="Token files.")],
    context: Annotated[int, typer.Option(min=2, help="Tokens in a window: the training length.")] = 1024,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Measure bits per byte (`bits_per_byte` in this file defines it)."""
    results = evaluate_folder(model, data, context)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    try:
        app()
    except RecipeError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
