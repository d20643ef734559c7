"""Addition of numbers longer than any seen in training (the paper's Table 3), by models trained side by side.

    python examples/addition.py train --size tiny                                 two models, in a minute on a CPU
    python examples/addition.py train --size small --output runs/addition \\
        --model transformer --model falcon-3a.3 --seed 0 --seed 1 --minutes 25    again, until all runs are finished
    python examples/addition.py report runs/addition                              the table and the figure

A row is `a+b=s`: two operands of n digits each, the first of which may be 0, and the n + 1 digits of their sum in
reverse, so that a carry goes the way that the tokens go. n is uniform from 1 to --width. The loss is on the digits
of the sum alone, and no two steps see the same sums. What a trained model knows is measured on fresh sums of each
width from 1 to twice the longest in training:

- tokens: the part of the digits that are likeliest where the true digits stand before them (teacher forcing);
- answers: the part of the sums in which every digit is, which are the sums that greedy decoding gets right;
- generated: the part of the sums that `generate` returns, from the cache, digit by digit.

side_by_side.py says how models are named and how a run goes on. Needs the folder of this file for that, and
`pip install "falcon-hf[plots]"` for the figure.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.monotonic()  # --minutes counts from here, because the imports below take a part of them

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import side_by_side
import tokenizers
import torch
import typer
from rich.progress import track
from side_by_side import UNSCORED, Generated, accuracies, largest, seed_of
from tokenizers import Regex
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SYMBOLS = [*"0123456789+=", "<end>"]  # a digit is its own token id
PLUS, EQUALS, END = 10, 11, 12
KINDS = ("tokens", "answers", "generated")

# Table 3 of the paper, in percent: validation, mean of 33 to 48 digits, 33 digits, 48 digits.
PAPER = {
    "transformer": (100.0, 65.8, 97, 49),
    "retnet": (99.7, 82.9, 99, 63),
    "mamba-2": (100.0, 75.2, 100, 51),
    "falcon-1a.1": (100.0, 80.6, 100, 59),
    "falcon-1a.2": (100.0, 85.2, 100, 63),
    "falcon-1a.3": (99.8, 85.9, 100, 69),
    "falcon-3a.3": (99.9, 87.2, 100, 69),
}

app = typer.Typer(
    help="Addition of numbers longer than any seen in training.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def sums(widths: Tensor, longest: int, generator: torch.Generator, end: bool = False) -> tuple[Tensor, Tensor]:
    """Rows `a+b=s`, one for each width, as tokens and targets; `<end>` stands after them.

    Args:
        widths: [B] digits of the operands, each from 1 to `longest`.
        longest: decides the length of the rows, T = 3 longest + 2, or one more with `end`.
        generator: on the device of `widths`.
        end: whether the `<end>` after a sum is a target too.

    Returns:
        [B, T] tokens, and [B, T] the digit of the sum that follows each of them, `UNSCORED` elsewhere.
    """
    device, width = widths.device, widths[:, None]
    place = torch.arange(longest, device=device)  # of a digit, from the last one on
    shape = (2, len(widths), longest)
    a, b = torch.randint(10, shape, generator=generator, device=device) * (place < width)
    column = a + b
    decides = torch.where(column == 9, -1, place).cummax(1).values  # the last column up to here that is not 9
    carry = (decides >= 0) & (column.gather(1, decides.clamp(min=0)) > 9)
    total = (F.pad(column, (0, 1)) + F.pad(carry.long(), (1, 0))) % 10
    symbols = [torch.full_like(width, symbol) for symbol in (PLUS, EQUALS, END)]
    everything = torch.cat([a, b, total, *symbols], 1)  # [B, 3 longest + 4], from which the rows are taken

    at = torch.arange(3 * longest + 3 + end, device=device)
    answer = at - 2 * width - 2
    source = torch.where(answer <= width, 2 * longest + answer, 3 * longest + 3)
    source = torch.where(answer == -1, 3 * longest + 2, source)
    source = torch.where(answer < -1, longest + 2 * width - at, source)
    source = torch.where(at == width, 3 * longest + 1, source)
    source = torch.where(at < width, width - 1 - at, source)
    row = everything.gather(1, source)
    targets = torch.where((answer >= 0) & (answer <= width + end), row, UNSCORED)
    return row[:, :-1], targets[:, 1:]


@dataclass(frozen=True)
class Addition(Generated):
    """The task. Fields: longest operands in training; whether `<end>` is learnt; part of the run with a curriculum;
    sums of each width in the evaluation, and whether they are generated too."""

    width: int
    end: bool
    curriculum: float
    samples: int
    generate: bool
    name: ClassVar[str] = "addition"
    vocab_size: ClassVar[int] = len(SYMBOLS)

    @property
    def longest(self) -> int:
        return 3 * 2 * self.width + 4

    def batch(self, size: int, generator: torch.Generator, done: float) -> tuple[Tensor, Tensor]:
        widest = largest(self.width, done, self.curriculum)
        widths = torch.randint(1, widest + 1, (size,), generator=generator, device=generator.device)
        return sums(widths, self.width, generator, self.end)

    def evaluate(self, model: PreTrainedModel, progress: Callable[[Iterable, str], Iterable]) -> dict[str, Any]:
        """Accuracies by width, and their means over the trained widths and over those half as long again."""
        curve = {"tokens": [], "answers": [], **({"generated": []} if self.generate else {})}
        for width in progress(range(1, 2 * self.width + 1), "evaluating"):
            for name, accuracy in self.measure(model, width).items():
                curve[name].append(accuracy)
        inside, beyond = slice(0, self.width), slice(self.width, 3 * self.width // 2)
        return {
            "samples": self.samples,
            "widths": list(range(1, 2 * self.width + 1)),
            **curve,
            "validation": {name: mean(values[inside]) for name, values in curve.items()},
            "beyond": {name: mean(values[beyond]) for name, values in curve.items()},
        }

    def measure(self, model: PreTrainedModel, width: int) -> dict[str, float]:
        """Accuracies on `samples` sums of one width, the same ones for every model."""
        generator = torch.Generator(model.device).manual_seed(seed_of("evaluation", width))
        widths = torch.full((self.samples,), width, device=model.device)
        ids, targets = sums(widths, width, generator)
        logits = model(input_ids=ids, use_cache=False).logits
        tokens, answers = accuracies(logits, targets)
        result = {"tokens": tokens.item(), "answers": answers.item()}
        if self.generate:
            prompt, answer = ids[:, : 2 * width + 2], targets[:, -width - 1 :]
            written = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=width + 1,
                do_sample=False,
                pad_token_id=END,
            )
            written = F.pad(written, (0, ids.shape[1] + 1 - written.shape[1]), value=END)  # where all rows ended early
            result["generated"] = (written[:, prompt.shape[1] :] == answer).all(1).double().mean().item()
        return result

    @property
    def end_token(self) -> int | None:
        return END if self.end else None

    def save_tokenizer(self, folder: Path) -> None:
        tokenizer().save_pretrained(folder)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tokenizer() -> PreTrainedTokenizerFast:
    """Each character is a token; others than digits, + and = are left out."""
    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    characters.normalizer = tokenizers.normalizers.Replace(Regex("[^0-9+=]"), "")
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<end>",
        pad_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@app.command()
def train(
    model: side_by_side.Models = ["transformer", "falcon-3a.3"],  # noqa: B006
    size: side_by_side.SizeName = "small",
    seed: side_by_side.Seeds = [0],  # noqa: B006
    width: Annotated[int | None, typer.Option(min=2, help="Longest operands; 32, or 4 with --size tiny.")] = None,
    end: Annotated[bool, typer.Option("--end", help="Learn to stop after the sum, too.")] = False,
    curriculum: side_by_side.Curriculum = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Sums of each width to evaluate on.")] = 100,
    generate: Annotated[bool, typer.Option(help="Whether the evaluation generates sums, too.")] = True,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/addition"),
    steps: side_by_side.Steps = None,
    batch_size: side_by_side.BatchSize = None,
    learning_rate: side_by_side.LearningRate = None,
    warmup: side_by_side.Warmup = 0.05,
    weight_decay: side_by_side.WeightDecay = 0.1,
    minutes: side_by_side.Minutes = side_by_side.NO_END,
    together: side_by_side.Together = 8,
    log_every: side_by_side.LogEvery = 20,
    capture: side_by_side.Capture = True,
    compile: side_by_side.Compile = False,
) -> None:
    """Train and evaluate each model with each seed; the same command again goes on with what is not finished."""
    task = Addition(width or (4 if size == "tiny" else 32), end, curriculum, samples, generate)
    results = side_by_side.train(
        task,
        side_by_side.plans(model, size, seed, steps, batch_size, learning_rate, warmup, weight_decay),
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
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a model, such as runs/addition/RUN/model.")],
    width: Annotated[int, typer.Option(min=2, help="Widths up to twice this are measured.")] = 32,
    samples: Annotated[int, typer.Option(min=1, help="Sums of each width.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Measure a saved model, in the precision in which it was saved."""
    device = side_by_side.best_device()
    loaded = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    with torch.no_grad():
        figures = Addition(width, False, 0.0, samples, True).evaluate(loaded, track)
    for i, digits in enumerate(figures["widths"]):
        print(f"{digits:3} digits:", *(f"{figures[kind][i]:.2%} of {kind}" for kind in KINDS))
    if output is not None:
        side_by_side.write_json(output, {**figures, "environment": side_by_side.environment(device)})


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    output: Annotated[Path | None, typer.Option(help="Folder for table.md, curve.svg and curve.png.")] = None,
) -> None:
    """Print the table of all finished runs beside the paper's, and draw accuracy over width."""
    side_by_side.report(folder, output, table, draw)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, in percent: the mean over seeds of each model, and its standard deviation where there are several."""
    rows = []
    for model, runs in side_by_side.by_model(results).items():
        width = runs[0]["task"]["width"]
        evaluations = [run["evaluation"] for run in runs]

        def both(pick: Callable[[dict[str, Any], str], float], evaluations=evaluations) -> str:
            return " / ".join(
                side_by_side.percent([pick(evaluation, kind) for evaluation in evaluations])
                for kind in KINDS
                if kind in evaluations[0]
            )

        paper = PAPER.get(model) if width == 32 else None
        cells = [f"{model}, {len(runs)} × {runs[0]['parameters'] / 1e6:.1f}M"]
        cells.append(both(lambda evaluation, kind: evaluation["validation"][kind]))
        cells.append(both(lambda evaluation, kind: evaluation["beyond"][kind]))
        for digits in (width + 1, 3 * width // 2):
            cells.append(both(lambda evaluation, kind, digits=digits: evaluation[kind][digits - 1]))
        cells.append(", ".join(map(str, paper)) if paper else "")
        rows.append("| " + " | ".join(cells) + " |")
    longest = 3 * width // 2
    head = [f"tokens / answers / generated, %, trained on 1–{width} digits", f"1–{width}", f"{width + 1}–{longest}"]
    head += [f"{width + 1}", f"{longest}", "the paper's" if width == 32 else ""]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def draw(results: list[dict[str, Any]], folder: Path) -> None:
    """Accuracy over width, per token and per answer: the mean over seeds, and their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for ax, kind, title in zip(axes, ("tokens", "answers"), ("digits of the sum", "whole sums"), strict=True):
        for (model, runs), style in zip(side_by_side.by_model(results).items(), side_by_side.STYLES, strict=False):
            curves = [[100 * value for value in run["evaluation"][kind]] for run in runs]
            side_by_side.draw_band(ax, runs[0]["evaluation"]["widths"], curves, model, style)
        trained = results[0]["task"]["width"]
        ax.axvline(trained + 0.5, color=side_by_side.INK, linewidth=0.8, linestyle=":")
        ax.text(trained + 0.5, 2, " longer than trained", color=side_by_side.INK, fontsize=9)
        ax.set(xlabel="digits of each operand", ylabel="right, teacher-forced (%)", title=title, ylim=(0, 101))
    side_by_side.name_lines(figure, axes[0])
    side_by_side.save_figure(figure, folder / "curve")


if __name__ == "__main__":
    side_by_side.run_app(app, "addition.py")
