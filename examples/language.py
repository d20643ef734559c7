"""Language models of equal size on the same tokens of real text, trained side by side (the paper's Tables 1 and 2).

From Debian packages, or from texts of your own as in pretrain.py, to the table and the figure:

    python examples/corpus.py bash-doc debian-policy debian-handbook --output data/corpus
    python examples/pretrain.py tokenizer data/corpus/train.txt --output data/tokenizer
    python examples/pretrain.py tokenize data/corpus/train.txt --tokenizer data/tokenizer --output data/train.bin
    python examples/pretrain.py tokenize data/corpus/val.txt --tokenizer data/tokenizer --output data/val.bin
    python examples/language.py train data/train.bin --tokenizer data/tokenizer --evaluate data/val.bin \\
        --size tiny --output runs/tiny                           two models, in a minute on a CPU
    python examples/language.py train data/train.bin --tokenizer data/tokenizer --evaluate data/val.bin \\
        --model transformer --model deltanet --model falcon-3a.3 --learning-rate 1e-3 --learning-rate 2e-3 \\
        --seed 0 --seed 1 --output runs/language --minutes 25    again, until all runs are finished
    python examples/language.py report runs/language

Any tokenizer with an eos token and at most 65,536 entries will do, such as GPT-2's; sizes count its embeddings.

Each model is trained with each seed at each learning rate, on the blocks of `pretrain.py train`, in an order that
follows from the seed; the logits of a batch never exist as a whole. With a GPU all is computed in bfloat16 autocast,
but the head of the evaluation. A finished run is measured on each --evaluate file:

- perplexity per token and bits per byte of its documents, in windows of the training length (bits_per_byte.py);
- perplexity by position, up to eight times the training length: documents of that length are cut into windows of it,
  what is left is not read, and a window begins with an empty memory. So a token at position p is predicted from p
  tokens of its own document, and there are as many tokens of the same documents at each position.

`report` shows of each model the learning rate with the lowest loss on the first --evaluate file. Tokens per second are
the median over a run's log, by the clock of the wall: those of runs that are --together on the device disturb each
other. side_by_side.py says how models are named and how a run goes on; its folder is OUTPUT/MODEL-seedN-lrRATE here.
Needs side_by_side.py, pretrain.py and its files beside this one, and `pip install "falcon-hf[train,plots]"`.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.monotonic()  # --minutes counts from here, because the imports below take a part of them

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import numpy as np
import side_by_side
import token_files
import torch
import typer
from bits_per_byte import bits_per_byte
from pretrain import Blocks, parse_count
from side_by_side import UNSCORED, Plan, RecipeError, Size, spread
from token_files import description_path, load_tokenizer, read_tokens
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from falcon_hf.modeling_falcon_fast_weight import for_products

SIZES = {
    "tiny": Size(64, 2, 2, batch_size=8, steps=200, learning_rate=5e-3),
    "small": Size(128, 3, 2, batch_size=16, steps=300, learning_rate=2e-3),
    "base": Size(384, 6, 6, batch_size=64, steps=718, learning_rate=2e-3),  # 30 million, 19 of them GPT-2's vocabulary
}
LONGER = 8  # times the training length, up to which positions are measured
LOGITS = 2**28  # of a part of a batch

app = typer.Typer(
    help="Language models of equal size on the same tokens of real text.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# -------------------------------------------------------------------------------------------------- loss


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of head and softmax, the logits of a part of the tokens at a time.

    The gradient of the logits, softmax minus target over the number of targets, is at hand as soon as they are. So each
    part is done with in the forward pass: its share of the gradients is added up in float32, its logits are dropped.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Of hidden [N, D], the head's weight [V, D] and targets [N], some of them `UNSCORED`."""
        entries = len(weight)
        weight = F.pad(weight, (0, 0, 0, -entries % 8))  # rows of logits then begin where products want them to
        scored = targets != UNSCORED
        share = scored / scored.sum()
        targets = targets.where(scored, 0)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros((), device=hidden.device)
        parts = (tensor.split(max(1, LOGITS // entries)) for tensor in (hidden, targets, share, hidden_gradient))
        for x, target, part, x_gradient in zip(*parts, strict=True):
            target, part = target[:, None], part[:, None]
            logits = x @ weight.T
            logs = logits[:, :entries].float().log_softmax(-1)
            loss -= (logs.gather(1, target) * part).sum()
            error = logs.exp_().scatter_add_(1, target, torch.full_like(part, -1.0))
            torch.mul(error, part, out=logits[:, :entries])  # beyond the entries logits are 0, and so are gradients
            torch.mm(logits, weight, out=x_gradient)
            weight_gradient += logits.T @ x
        ctx.save_for_backward(hidden_gradient, weight_gradient[:entries].to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * gradient, weight_gradient * gradient, None


# -------------------------------------------------------------------------------------------- evaluation


class Float32Head(torch.nn.Module):
    """A model whose body computes as autocast has it and whose logits are exact: in bfloat16 they have two digits."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.model.base_model(input_ids=input_ids, use_cache=use_cache)[0]
        with torch.autocast(hidden.device.type, enabled=False):
            return SimpleNamespace(logits=F.linear(hidden.float(), self.model.get_output_embeddings().weight))


def loss_by_position(
    model: torch.nn.Module, tokens: np.ndarray, end: int, longest: int, progress: Callable[[Iterable, str], Iterable]
) -> dict[str, Any] | None:
    """Mean losses between `edges`, in tokens read before; None where no document has `longest` tokens.

    The windows are of one document each, from its beginning on, one after the other. Two ranges to an octave, and one
    from 0 on.
    """
    stops = (np.flatnonzero(tokens == end) + 1).tolist()
    firsts = [
        first
        for begin, stop in zip([0, *stops], stops, strict=False)
        for first in range(begin, stop - longest + 1, longest)
    ]
    if not firsts:
        return None
    stream = np.concatenate([[end], tokens])  # stream[i] comes before tokens[i]
    nats = torch.zeros(longest, dtype=torch.float64)
    for first in progress(firsts, "evaluating by position"):
        ids, targets = (
            torch.from_numpy(of[first : first + longest].astype(np.int64)).to(next(model.parameters()).device)
            for of in (stream, tokens)
        )
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        nats += F.cross_entropy(logits, targets, reduction="none").double().cpu()
    edges = sorted({0, *(longest >> n for n in range(9)), *(3 * longest >> n for n in range(2, 10))})
    losses = [nats[a:b].mean().item() / len(firsts) for a, b in itertools.pairwise(edges)]
    return {"windows": len(firsts), "edges": edges, "loss": losses}


# -------------------------------------------------------------------------------------------------- task


@dataclass(frozen=True)
class Language:
    """The task. Fields: tokens in a block; hash of the vocabulary; texts of the training, and of each file of the
    evaluation; then what these stand for."""

    length: int
    vocabulary: str
    training: list[dict[str, str]]
    evaluation: dict[str, list[dict[str, str]]]
    tokenizer: PreTrainedTokenizerFast = field(compare=False, repr=False)
    files: list[np.ndarray] = field(compare=False, repr=False)
    held_out: dict[str, tuple[np.ndarray, dict[str, Any]]] = field(compare=False, repr=False)
    name: ClassVar[str] = "language"
    sizes: ClassVar[dict[str, Size]] = SIZES
    measures: ClassVar[tuple[str, ...]] = ("loss",)

    @classmethod
    def load(cls, data: list[Path], tokenizer_folder: Path, evaluate: list[Path], length: int) -> Language:
        tokenizer = load_tokenizer(tokenizer_folder)
        files, facts = zip(*(read_tokens(path, tokenizer) for path in data), strict=True)
        Blocks(list(files), length, 1, 0)  # which says what is too short
        names = [description_path(path).stem for path in evaluate]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"--evaluate has several files named {name}: results are kept by name, rename one.")
        held_out = {name: read_tokens(path, tokenizer) for name, path in zip(names, evaluate, strict=True)}
        return cls(
            length,
            facts[0]["tokenizer"],
            [source for of in facts for source in of["sources"]],
            {name: of["sources"] for name, (_, of) in held_out.items()},
            tokenizer,
            list(files),
            held_out,
        )

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def longest(self) -> int:
        return LONGER * self.length

    def batches(self, plan: Plan, device: torch.device) -> Callable[[int], tuple[Tensor, Tensor]]:
        blocks = Blocks(self.files, self.length, plan.steps * plan.batch_size, plan.seed)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            numbers = range(step * plan.batch_size, (step + 1) * plan.batch_size)
            ids = blocks.__getitems__(list(numbers))["input_ids"]
            if device.type == "cuda":
                ids = ids.pin_memory().to(device, non_blocking=True)
            return ids, F.pad(ids[:, 1:], (0, 1), value=UNSCORED)

        return batch

    def loss(self, hidden: Tensor, head: torch.nn.Linear, targets: Tensor) -> tuple[Tensor, ...]:
        hidden, weight = for_products(hidden), for_products(head.weight)
        return (HeadLoss.apply(hidden.flatten(0, 1), weight, targets.flatten()),)

    def evaluate(self, model: PreTrainedModel, progress: Callable[[Iterable, str], Iterable]) -> dict[str, Any]:
        """What `bits_per_byte` and `loss_by_position` say of each file, by its name."""
        exact, figures = Float32Head(model), {}
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        for name, (tokens, facts) in self.held_out.items():
            figures[name] = bits_per_byte(exact, tokens, facts, self.length, progress=progress)
            del figures[name]["sources"]
            figures[name]["by_position"] = loss_by_position(exact, tokens, facts["end"], self.longest, progress)
        torch.set_float32_matmul_precision(precision)
        return figures

    @property
    def end_token(self) -> int:
        return self.tokenizer.eos_token_id

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


class SweptPlan(Plan):
    """One of a sweep of learning rates, which its folder names too."""

    @property
    def name(self) -> str:
        return f"{super().name}-lr{self.learning_rate:g}"


# ---------------------------------------------------------------------------------------------- commands


@app.command()
def train(
    data: Annotated[list[Path], typer.Argument(help="Token files to train on.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made them.")],
    evaluate: Annotated[list[Path], typer.Option(help="Token file to measure on, the first decides; repeatable.")],
    model: side_by_side.Models = ["transformer", "falcon-3a.3"],  # noqa: B006
    size: Annotated[str, typer.Option(help=f"Of the models: {', '.join(SIZES)}.")] = "base",
    seed: side_by_side.Seeds = [0],  # noqa: B006
    tokens: Annotated[
        int | None, typer.Option(parser=parse_count, help="To train on, epochs repeat; 47M if not given, tiny less.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a block; 1024, 256 with --size small, 128 with tiny.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/language"),
    batch_size: Annotated[int | None, typer.Option(min=1, help="Blocks in a step; by --size if not given.")] = None,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="Peak, falls to a tenth; by --size if not given; repeatable.")
    ] = None,
    warmup: side_by_side.Warmup = 0.05,
    weight_decay: side_by_side.WeightDecay = 0.1,
    minutes: side_by_side.Minutes = side_by_side.NO_END,
    together: side_by_side.Together = 1,
    log_every: side_by_side.LogEvery = 20,
    capture: side_by_side.Capture = True,
    compile: side_by_side.Compile = False,
) -> None:
    """Train and evaluate each model with each seed at each learning rate; the same command again goes on."""
    batch_size = batch_size or side_by_side.size_of(size, SIZES).batch_size
    length = sequence_length or {"tiny": 128, "small": 256}.get(size, 1024)
    steps = None if tokens is None else math.ceil(tokens / (batch_size * length))
    results = side_by_side.train(
        Language.load(data, tokenizer, evaluate, length),
        [
            plan
            for one in seed
            for rate in learning_rate or [None]
            for plan in side_by_side.plans(
                model, size, [one], steps, batch_size, rate, warmup, weight_decay, SIZES, SweptPlan
            )
        ],
        output,
        started=STARTED,
        minutes=minutes,
        together=together,
        log_every=log_every,
        capture=capture,
        compile=compile,
    )
    if results:
        print(table(results))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    output: Annotated[Path | None, typer.Option(help="Folder for table.md, curve.svg and curve.png.")] = None,
) -> None:
    """Print the tables of all finished runs, and draw loss over tokens and perplexity over position."""
    side_by_side.report(folder, output, table, draw)


def best(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each model, the runs at the learning rate with the lowest loss on the first file of the evaluation.

    It is the mean over the seeds that there are at all of the model's learning rates, if there are such seeds.

    Raises:
        RecipeError: for runs that cannot be compared.
    """
    for name in ("size", "steps", "batch_size", "warmup", "weight_decay"):
        if len({run[name] for run in results}) > 1:
            raise RecipeError(f"The runs differ in {name}: models are compared at one budget, keep others apart.")
    chosen = {}
    for model, runs in side_by_side.by_model(results).items():
        by_rate: dict[float, dict[int, dict[str, Any]]] = {}
        for run in runs:
            by_rate.setdefault(run["learning_rate"], {})[run["seed"]] = run
        common = set.intersection(*(set(seeds) for seeds in by_rate.values()))

        def loss(rate: float, by_rate=by_rate, common=common) -> float:
            evaluations = [by_rate[rate][seed]["evaluation"] for seed in common or by_rate[rate]]
            return statistics.mean(next(iter(evaluation.values()))["loss"] for evaluation in evaluations)

        chosen[model] = list(by_rate[min(by_rate, key=loss)].values())
    return chosen


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, the mean over seeds and its standard deviation: all files; then by position, where that is known."""
    chosen, length = best(results), results[0]["task"]["length"]
    files = results[0]["evaluation"]
    head = ["perplexity / bits per byte", "learning rate", *files, "tokens/s", "peak GiB"]
    rows = []
    for model, runs in chosen.items():
        rates = sorted({run["learning_rate"] for run in results if run["model"] == model})
        cells = [f"{model}, {len(runs)} × {runs[0]['parameters'] / 1e6:.1f}M"]
        cells.append(f"{runs[0]['learning_rate']:g} of {', '.join(f'{rate:g}' for rate in rates)}")
        for name in files:
            measured = [run["evaluation"][name] for run in runs]
            both = (("perplexity", 2), ("bits_per_byte", 4))
            cells.append(" / ".join(spread([one[unit] for one in measured], digits) for unit, digits in both))
        speeds = [run["steps_per_second"] * run["batch_size"] * length for run in runs if run["steps_per_second"]]
        together = max(run["together"] for run in runs)
        beside = f", {together} together" if together > 1 else ""
        cells.append(f"{statistics.mean(speeds):,.0f}{beside}" if speeds else "–")
        peaks = [run["peak_memory"] for run in runs if run["peak_memory"]]
        cells.append(f"{max(peaks) / 2**30:.1f}{beside}" if peaks else "–")
        rows.append(cells)
    tables = [markdown(head, rows)]
    octaves = [(LONGER * length >> n, LONGER * length >> n - 1) for n in (4, 3, 2, 1)]
    for name, measured in files.items():
        if measured["by_position"] is not None:
            windows = measured["by_position"]["windows"]
            head = [f"{name}, perplexity by tokens read before, {windows} windows"]
            head += [f"{first:,}–{last - 1:,}" for first, last in octaves]
            rows = [
                [model, *(spread([perplexity(run, name, *octave) for run in runs], 2) for octave in octaves)]
                for model, runs in chosen.items()
            ]
            tables.append(markdown(head, rows))
    return "\n\n".join(tables)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def perplexity(run: dict[str, Any], name: str, first: int, last: int) -> float:
    """On a file, at the positions from `first` to before `last`, both of them edges."""
    measured = run["evaluation"][name]["by_position"]
    ranges = zip(itertools.pairwise(measured["edges"]), measured["loss"], strict=True)
    nats = sum((b - a) * loss for (a, b), loss in ranges if first <= a and b <= last)
    return math.exp(nats / (last - first))


def draw(results: list[dict[str, Any]], folder: Path) -> None:
    """Loss over tokens after a tenth of them, and perplexity over position on each file; ranges are of the seeds.

    Perplexities above those at trained positions are out of the picture.
    """
    from matplotlib.figure import Figure

    length = results[0]["task"]["length"]
    files = [name for name, of in results[0]["evaluation"].items() if of["by_position"] is not None]
    count = 1 + len(files)
    figure = Figure(figsize=(12, 4.5 * math.ceil(count / 2)), layout="constrained")
    axes = [figure.add_subplot(math.ceil(count / 2), 2, 1 + i) for i in range(count)]
    highest = dict.fromkeys(files, 0.0)
    for (model, runs), style in zip(best(results).items(), side_by_side.STYLES, strict=False):
        logs = [{e["step"]: e["loss"] for e in run["log"] if e["step"] >= run["steps"] / 10} for run in runs]
        steps = sorted(set.intersection(*map(set, logs)))
        seen = [step * runs[0]["batch_size"] * length / 1e6 for step in steps]
        side_by_side.draw_band(axes[0], seen, [[log[step] for step in steps] for log in logs], model, style)
        for ax, name in zip(axes[1:], files, strict=True):
            ranges = list(itertools.pairwise(runs[0]["evaluation"][name]["by_position"]["edges"]))
            curves = [[perplexity(run, name, *between) for between in ranges] for run in runs]
            side_by_side.draw_band(ax, [sum(between) / 2 for between in ranges], curves, model, style)
            trained = [value for curve in curves for value, (_, b) in zip(curve, ranges, strict=True) if b <= length]
            highest[name] = max(highest[name], *trained)
    axes[0].set(xlabel="tokens seen (millions)", ylabel="loss of the batches (nats per token)", title="training")
    for ax, name in zip(axes[1:], files, strict=True):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set(xlabel="tokens of the document read before", ylabel="perplexity", title=name)
        ax.set_ylim(top=1.1 * highest[name])
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_minor_formatter("{x:,.0f}")
        ax.axvline(length, color=side_by_side.INK, linewidth=0.8, linestyle=":")
        ax.text(length, 0.97, " longer than trained", transform=ax.get_xaxis_transform(), va="top", fontsize=9)
    side_by_side.name_lines(figure, axes[0])
    side_by_side.save_figure(figure, folder / "curve")


if __name__ == "__main__":
    side_by_side.run_app(app, "language.py", token_files.RecipeError)
