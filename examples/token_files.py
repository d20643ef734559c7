"""Text files -> a byte-level BPE tokenizer, and files of token ids; two commands of pretrain.py, beside it.

Texts are UTF-8, .txt or .txt.xz. A line that holds nothing but U+001E, the record separator, ends a document; a file
without such a line is one document. The newline that closes a document belongs to the separation, not to the document.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import tokenizers
import typer
from rich.progress import Progress
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END = "<|endoftext|>"
SEPARATOR = b"\x1e"
# What merges may not cross: contractions, words and marks with at most one space before them, single
# digits, line ends. A digit is always a token by itself: numbers of any length then look alike to the
# model, and a vocabulary of a few thousand entries spends none of them on frequent years.
PIECES = r"'(?:[sdmt]|ll|re|ve)| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s*\n|\s+(?!\S)|\s+"

BATCH_CHARACTERS = 4_000_000  # encoded at a time
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]  # for two-byte symbols

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


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
    facts = {"documents": 0, "bytes": 0, "tokens": 0}
    facts |= {"tokenizer": fingerprint(tokenizer), "end": tokenizer.eos_token_id, "sources": []}
    partial = output.with_name(output.name + ".partial")
    try:
        packed = output.suffix == ".xz"
        with (
            lzma.open(partial, "wb", filters=XZ_FILTERS) if packed else partial.open("wb") as file,
            Progress() as progress,
        ):
            for path in texts:
                digest = hashlib.sha256()
                for batch in in_batches(read_documents(path, progress, digest)):
                    for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
                        ids = [*encoding.ids, facts["end"]]
                        file.write(np.array(ids, dtype="<u2").tobytes())
                        facts["tokens"] += len(ids)
                    facts["documents"] += len(batch)
                    facts["bytes"] += sum(len(document.encode()) for document in batch)
                facts["sources"].append({"name": path.name, "sha256": digest.hexdigest()})
        if not facts["documents"]:
            raise RecipeError(f"{', '.join(map(str, texts))}: no document with any text in it.")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    description.write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def in_batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents that are worth encoding in parallel, all of them in order."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


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
        tokens = np.memmap(path, dtype="<u2", mode="r")  # never in memory as a whole
    if len(tokens) != facts["tokens"]:
        raise RecipeError(f"{path} holds {len(tokens)} tokens and {description.name} says {facts['tokens']}.")
    return tokens, facts


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
