"""Bits per byte of a language model on token files: the `evaluate` command of pretrain.py, beside it."""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import track
from token_files import RecipeError, app, description_path, load_tokenizer, read_tokens
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import falcon_hf  # noqa: F401 - registers its models


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
def bits_per_byte(model, tokens: np.ndarray, facts: dict, context: int, batch_size: int = 16, progress=track) -> dict:
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
    for at in progress(range(0, len(windows), batch_size), "evaluating"):
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
