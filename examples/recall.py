"""What a model keeps of facts that change while it reads: a probe of continual learning, and in-context recall.

    python examples/recall.py train --size tiny                                   two models, in a minute on a CPU
    python examples/recall.py train --size small --output runs/recall \\
        --model transformer --model deltanet --model falcon-1.3 --seed 0 --minutes 25    again, until all are finished
    python examples/recall.py report runs/recall                                  the table and the figure

A row is a stream of facts, `key value key value …`, then questions, `? key ? key …`. A fact is about a new key, or,
with probability --rebind, gives a new value to a key of the stream, that of an earlier fact drawn at random. The
right answer is the value that the key was given last; it is predicted at the key and never shown, so that asking
refreshes nothing. With --rebind 0 every key has one value: multi-query associative recall (MQAR).

The memory has two things to do that pull in opposite directions. It has to give up a value as soon as a new one
comes, and to hold what was said once for as long as anything may be asked about it. A memory that only adds and
fades can buy the one with the other; one that corrects what it holds under a key can have both, as long as it has
room. So these are measured apart, over the number of facts in the stream, up to four times the most in training, and
over age, the number of facts read since the one that answers:

- kept: the part of right answers about keys that were given one value;
- rebound: the same about keys that were given several;
- stale: of the latter, the part of answers with a value that the key has had before.

All models see the same streams. A Transformer, whose memory grows with the stream, is the yardstick as long as that
is no longer than in training. side_by_side.py says how models are named and how a run goes on. Needs the folder of
this file for that, and `pip install "falcon-hf[plots]"` for the figure.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.monotonic()  # --minutes counts from here, because the imports below take a part of them

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import side_by_side
import tokenizers
import torch
import typer
from side_by_side import UNSCORED, Generated, RecipeError, largest, seed_of
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

app = typer.Typer(
    help="What a model keeps of facts that change while it reads.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Streams(NamedTuple):
    """Facts and questions of some rows. Facts from the number of a row on are drawn, but not part of it."""

    count: Tensor  # [B] facts in the row
    subject: Tensor  # [B, N] the first fact about the same key
    key: Tensor  # [B, N]
    value: Tensor  # [B, N]
    newest: Tensor  # [B, Q] the fact that answers a question
    times: Tensor  # [B, Q] how many values its key was given

    @property
    def answer(self) -> Tensor:
        return self.value.gather(1, self.newest)

    @property
    def age(self) -> Tensor:
        """[B, Q] facts read since."""
        return self.count[:, None] - 1 - self.newest


def streams(
    count: Tensor, facts: int, questions: int, keys: int, values: int, rebind: float, generator: torch.Generator
) -> Streams:
    """Draws rows of up to `facts` facts, [B] `count` of them; at most `keys` facts. Nothing waits for the device."""
    rows, device = len(count), count.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(rows, *shape, generator=generator, device=device)

    at = torch.arange(facts, device=device)
    subject = torch.where((uniform(facts) < rebind) & (at > 0), (uniform(facts) * at).long(), at)
    for _ in range((facts - 1).bit_length()):  # from an earlier fact about the key to the first one
        subject = subject.gather(1, subject)
    key = uniform(keys).argsort(1)[:, :facts].gather(1, subject)
    value = torch.randint(values, (rows, facts), generator=generator, device=device)

    read = at < count[:, None]
    newest = torch.zeros_like(subject).scatter_reduce(1, subject, torch.where(read, at, 0), "amax")
    times = torch.zeros_like(subject).scatter_add(1, subject, read.long())
    asked = subject.gather(1, (uniform(questions) * count[:, None]).long())
    return Streams(count, subject, key, value, newest.gather(1, asked), times.gather(1, asked))


@dataclass(frozen=True)
class Recall(Generated):
    """The task. Fields: most facts of a row in training; questions; numbers of keys and values there are; probability
    that a fact is about a key of the row; part of the run with a curriculum; rows of each length in the evaluation."""

    facts: int
    questions: int
    keys: int
    values: int
    rebind: float
    curriculum: float
    samples: int
    name: ClassVar[str] = "recall"
    end_token: ClassVar[None] = None

    def __post_init__(self):
        if self.keys < 4 * self.facts:
            raise RecipeError(f"--keys is {self.keys}: it may not be below {4 * self.facts}, four times --facts.")

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + 1

    @property
    def longest(self) -> int:
        return 2 * (4 * self.facts + self.questions)

    def batch(self, size: int, generator: torch.Generator, done: float) -> tuple[Tensor, Tensor]:
        most = largest(self.facts, done, self.curriculum)
        count = torch.randint(1, most + 1, (size,), generator=generator, device=generator.device)
        return self.write(self.draw(count, self.facts, generator))

    def draw(self, count: Tensor, facts: int, generator: torch.Generator) -> Streams:
        return streams(count, facts, self.questions, self.keys, self.values, self.rebind, generator)

    def write(self, drawn: Streams) -> tuple[Tensor, Tensor]:
        """[B, T] tokens of the rows, T = 2 (facts + questions), and [B, T] the answers at the keys that are asked for.

        A token is a key, `keys` plus a value, or the question mark, which also stands for padding.
        """
        facts, questions = drawn.key.shape[1], self.questions
        mark = torch.full_like(drawn.count[:, None], self.keys + self.values)
        asked = drawn.key.gather(1, drawn.newest)
        everything = torch.cat([drawn.key, drawn.value + self.keys, asked, mark], 1)
        at = torch.arange(2 * (facts + questions), device=mark.device)
        question = at - 2 * drawn.count[:, None]  # negative in the facts; then odd where a key is asked for
        is_key = (question % 2 == 1) & (question > 0) & (question < 2 * questions)
        number = (question // 2).clamp(0, questions - 1)
        source = torch.where(is_key, 2 * facts + number, 2 * facts + questions)
        source = torch.where(question < 0, at // 2 + facts * (at % 2), source)
        answers = drawn.answer.gather(1, number) + self.keys
        return everything.gather(1, source), torch.where(is_key, answers, UNSCORED)

    def evaluate(self, model: PreTrainedModel, progress: Callable[[Iterable, str], Iterable]) -> dict[str, Any]:
        """`kept`, `rebound` and `stale` over the number of facts, and over age at most and twice the facts in training.

        None where nothing was asked of that kind.
        """
        counts = [2**n for n in range(self.facts.bit_length() + 2) if 2**n <= 4 * self.facts]
        counts = sorted({*counts, self.facts, 2 * self.facts})
        by_count, by_age = {}, {}
        for count in progress(counts, "evaluating"):
            outcome = self.measure(model, count)
            by_count[count] = {kind: ratio(hits.sum(), asked.sum()) for kind, (hits, asked) in outcome.items()}
            if count in (self.facts, 2 * self.facts):
                by_age[count] = {kind: by_octave(hits, asked) for kind, (hits, asked) in outcome.items()}
        return {"samples": self.samples, "by_count": by_count, "by_age": by_age}

    def measure(self, model: PreTrainedModel, count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For each kind of answer, how many there were and of how many, [count] by age, in rows of `count` facts."""
        generator = torch.Generator(model.device).manual_seed(seed_of("evaluation", count))
        drawn = self.draw(torch.full((self.samples,), count, device=model.device), count, generator)
        ids, _ = self.write(drawn)
        rows = [model(input_ids=part, use_cache=False).logits.argmax(-1) for part in ids.split(64)]
        given = torch.cat(rows)[:, 2 * count + 1 :: 2] - self.keys  # [B, Q]
        right = given == drawn.answer

        about = drawn.subject[:, None] == drawn.subject.gather(1, drawn.newest)[..., None]  # [B, Q, count]
        stale = ((drawn.value[:, None] == given[..., None]) & about).any(-1) & ~right

        def by_age(which: Tensor) -> Tensor:
            return drawn.age[which].bincount(minlength=count)

        once, several = drawn.times == 1, drawn.times > 1
        return {
            "kept": (by_age(once & right), by_age(once)),
            "rebound": (by_age(several & right), by_age(several)),
            "stale": (by_age(several & stale), by_age(several)),
        }

    def save_tokenizer(self, folder: Path) -> None:
        """Words are k0, k1, … and v0, v1, … and ?."""
        words = [*(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values)), "?"]
        vocabulary = {word: number for number, word in enumerate(words)}
        split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
        split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=split, pad_token="?", padding_side="left").save_pretrained(folder)


def ratio(hits: Tensor, asked: Tensor) -> float | None:
    return hits.item() / asked.item() if asked.item() else None


def by_octave(hits: Tensor, asked: Tensor) -> list[tuple[int, float | None]]:
    """Ratios over the ages 0, 1–2, 3–6, 7–14 and so on, each with the first age of its range."""
    edges = [2**n - 1 for n in range(len(asked).bit_length())]
    return [(age, ratio(hits[age : 2 * age + 1].sum(), asked[age : 2 * age + 1].sum())) for age in edges]


@app.command()
def train(
    model: side_by_side.Models = ["transformer", "falcon-1.3"],  # noqa: B006
    size: side_by_side.SizeName = "small",
    seed: side_by_side.Seeds = [0],  # noqa: B006
    facts: Annotated[int | None, typer.Option(min=2, help="Most facts of a row; 64, or 4 with --size tiny.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions after the facts of a row.")] = 16,
    keys: Annotated[int | None, typer.Option(help="Keys there are; four times --facts if not given.")] = None,
    values: Annotated[int | None, typer.Option(min=2, help="Values there are; as many as --facts.")] = None,
    rebind: Annotated[float, typer.Option(min=0, max=1, help="How often a fact is about a key of the row.")] = 0.5,
    curriculum: side_by_side.Curriculum = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Rows of each number of facts to evaluate on.")] = 512,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/recall"),
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
    facts = facts or (4 if size == "tiny" else 64)
    task = Recall(facts, questions, keys or 4 * facts, values or facts, rebind, curriculum, samples)
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
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    output: Annotated[Path | None, typer.Option(help="Folder for table.md, curve.svg and curve.png.")] = None,
) -> None:
    """Print the table of all finished runs, and draw what they keep over the number of facts and over age."""
    side_by_side.report(folder, output, table, draw)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, in percent: the mean over seeds of each model, and its standard deviation where there are several."""
    facts = results[0]["task"]["facts"]
    counts = [facts // 2, facts, 2 * facts, 4 * facts]
    counts = [count for count in counts if str(count) in results[0]["evaluation"]["by_count"]]
    head = [f"kept / rebound / stale, %, trained on 1–{facts} facts", *(f"{count} facts" for count in counts)]
    rows = []
    for model, runs in side_by_side.by_model(results).items():
        cells = [f"{model}, {len(runs)} × {runs[0]['parameters'] / 1e6:.1f}M"]
        for count in counts:
            outcomes = [run["evaluation"]["by_count"][str(count)] for run in runs]
            kinds = [[outcome[kind] for outcome in outcomes] for kind in ("kept", "rebound", "stale")]
            cells.append(" / ".join("–" if None in values else side_by_side.percent(values) for values in kinds))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def draw(results: list[dict[str, Any]], folder: Path) -> None:
    """Kept, rebound and stale, over the number of facts above, over age below: the mean over seeds, and their range."""
    from matplotlib.figure import Figure

    facts = results[0]["task"]["facts"]
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True)
    titles = {
        "kept": "kept: facts said once",
        "rebound": "rebound: the newest of several values",
        "stale": "stale: a value that was replaced",
    }
    counts = [int(count) for count in results[0]["evaluation"]["by_count"]]
    ages = [age for age, _ in results[0]["evaluation"]["by_age"][str(facts)]["kept"]]
    spans = [f"{age}–{2 * age}" if 0 < 2 * age < facts else f"{age}" for age in ages]
    for (model, runs), style in zip(side_by_side.by_model(results).items(), side_by_side.STYLES, strict=False):
        for column, kind in enumerate(titles):
            by_count = [[outcome[kind] for outcome in run["evaluation"]["by_count"].values()] for run in runs]
            by_age = [[part for _, part in run["evaluation"]["by_age"][str(facts)][kind]] for run in runs]
            for ax, curves in zip(axes[:, column], (by_count, by_age), strict=True):
                known = [i for i, values in enumerate(zip(*curves, strict=True)) if None not in values]
                side_by_side.draw_band(ax, known, [[100 * curve[i] for i in known] for curve in curves], model, style)
    for column, title in enumerate(titles.values()):
        axes[0, column].set(title=title, xlabel="facts in the stream", ylim=(0, 101))
        axes[0, column].set_xticks(range(len(counts)), counts)
        axes[0, column].axvline(counts.index(facts), color=side_by_side.INK, linewidth=0.8, linestyle=":")
        axes[1, column].set(xlabel=f"facts read since, of {facts} in the stream")
        axes[1, column].set_xticks(range(len(ages)), spans)
    for row in (0, 1):
        axes[row, 0].set_ylabel("of the answers (%)")
    axes[0, 0].text(counts.index(facts), 2, " more than trained", color=side_by_side.INK, fontsize=9)
    side_by_side.name_lines(figure, axes[0, 0])
    side_by_side.save_figure(figure, folder / "curve")


if __name__ == "__main__":
    side_by_side.run_app(app, "recall.py")
