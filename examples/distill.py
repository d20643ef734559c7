"""Make a Falcon model do what a Transformer does: convert it, then train the result on texts in three stages.

    python examples/distill.py SmolLM2-135M train.txt --output runs/student --keep-attention 0,15 --minutes 60

1. align: each fast-weight layer learns to give what the attention in its place gives, from the same input (MSE over
   the mean square of the teacher's output, so that all layers weigh the same); only these layers change.
2. match: the student learns the teacher's distribution of the next token (KL divergence); everything changes.
3. tune: the student learns the next token itself (cross-entropy).

The teacher is a folder or a Hub name that `falcon-hf convert` takes: Llama, Mistral, Qwen or SmolLM. Texts are UTF-8,
.txt or .txt.xz, in which a line that holds nothing but U+001E, the record separator, ends a document. The output is a
folder that AutoModelForCausalLM and `falcon-hf generate` load, with metrics.json: the perplexity of held-out text under
teacher and student, after each stage and along the way, and with --scratch that of the same model trained from random
weights on the same tokens. Where matplotlib is installed, curve.svg and curve.png show it. What is interrupted, by
--minutes too, goes on with --resume.

Needs what `pip install "falcon-hf[train]"` brings, and uses one device.
"""

# ruff: noqa: E402
import time

STARTED = time.monotonic()  # --minutes counts from here

import json
import lzma
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from falcon_hf import FalconFastWeightAttention, FalconFastWeightForCausalLM
from falcon_hf.cli import UserError, keep_layers, parse_field
from falcon_hf.conversion import ConversionError, convert
from falcon_hf.finite import StopAtNonFinite

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


def read_rows(texts: list[Path], tokenizer, length: int) -> Tensor:
    """[N, length] token ids: all documents one after another, each ended by the tokenizer's eos, cut into rows."""
    documents: list[str] = []
    for path in texts:
        if not path.is_file():
            raise RecipeError(f"{path} is not a file; give texts.")
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            parts = re.split(r"(?m)^\x1e\n?", file.read())
        documents += [part.removesuffix("\n") for part in parts if part.strip()]
    if tokenizer.eos_token_id is None:
        raise RecipeError("The teacher's tokenizer has no eos token, which ends a document.")
    ids = [torch.empty(0, dtype=torch.int32)]
    for start in track(range(0, len(documents), 64), description="tokenizing"):
        for encoded in tokenizer(documents[start : start + 64], add_special_tokens=False).input_ids:
            ids.append(torch.tensor([*encoded, tokenizer.eos_token_id], dtype=torch.int32))
    joined = torch.cat(ids)
    rows = len(joined) // length
    if rows < 2:
        raise RecipeError(f"The texts have {len(joined):,} tokens; they must fill two rows of {length:,} (--length).")
    return joined[: rows * length].view(rows, length)


class AttentionTrace:
    """Input and output of the teacher's attention in each layer, as its forward passes by."""

    def __init__(self, teacher: nn.Module, layers: list[int]):
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        for i in layers:
            teacher.model.layers[i].self_attn.register_forward_hook(self._hook(i), with_kwargs=True)

    def _hook(self, layer: int) -> Callable:
        def hook(module, arguments, named, output):
            self.seen[layer] = named["hidden_states"], output[0]

        return hook


def fast_layers(student: FalconFastWeightForCausalLM) -> dict[int, FalconFastWeightAttention]:
    return {
        i: layer.linear_attn for i, layer in enumerate(student.model.layers) if layer.layer_type == "linear_attention"
    }


def align(student, teacher, trace: AttentionTrace, ids: Tensor) -> Tensor:
    """Mean over the fast-weight layers of the error of their output, 1 where they give nothing."""
    with torch.no_grad():
        teacher.model(ids, use_cache=False)
    losses = []
    for i, mixer in fast_layers(student).items():
        given, wanted = (part.to(mixer.q_proj.weight.dtype) for part in trace.seen[i])
        losses.append((mixer(given) - wanted).float().square().mean() / wanted.float().square().mean())
    return torch.stack(losses).mean()


def match(student, teacher, trace: AttentionTrace, ids: Tensor) -> Tensor:
    """KL divergence of the student from the teacher, in nats a token."""
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
    given = student(ids, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
    return F.kl_div(given, wanted, reduction="batchmean", log_target=True)


def tune(student, teacher, trace: AttentionTrace, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token, in nats."""
    return student(ids, labels=ids, use_cache=False).loss


STAGES = {"align": align, "match": match, "tune": tune}


class Distillation(Trainer):
    """A Trainer with the loss of one stage."""

    def __init__(self, *args, teacher, trace, stage: str, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.trace, self.stage = teacher, trace, stage
        self.model_accepts_loss_kwargs = False  # the losses are means over rows of one length

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return STAGES[self.stage](model, self.teacher, self.trace, inputs["input_ids"])


@torch.no_grad()
def loss_of(model, rows: Tensor, batch_size: int) -> float:
    """Cross-entropy of the rows, in nats a token, in the dtype of the model."""
    was_training = model.training
    model.eval()
    losses = [
        model(batch, labels=batch, use_cache=False).loss.float() * len(batch)
        for batch in rows.long().to(model.device).split(batch_size)
    ]
    model.train(was_training)
    return torch.stack(losses).sum().item() / len(rows)


class Measure(TrainerCallback):
    """Notes the loss of held-out rows every so many steps, and ends the run when its time is over."""

    def __init__(self, curve: Path, name: str, rows: Tensor, batch_size: int, every: int, minutes: float | None):
        self.curve, self.name, self.rows, self.batch_size, self.every = curve, name, rows, batch_size, every
        self.minutes, self.out_of_time = minutes, False

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            note(self.curve, self.name, state.global_step, loss_of(model, self.rows, self.batch_size))
        if self.minutes is not None and time.monotonic() - STARTED > 60 * self.minutes:
            self.out_of_time = state.global_step < state.max_steps
            control.should_training_stop = control.should_save = True


def note(curve: Path, name: str, step: int, loss: float) -> None:
    """Enters a point; what was measured there before an interruption is replaced."""
    points = json.loads(curve.read_text()) if curve.exists() else {}
    points.setdefault(name, {})[str(step)] = loss
    partial = curve.with_suffix(".partial")
    partial.write_text(json.dumps(points, indent=1))
    partial.replace(curve)


@app.command()
def main(
    teacher: Annotated[str, typer.Argument(help="Folder or Hub name of a Transformer.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/student"),
    keep_attention: Annotated[str, typer.Option(help="Layers that stay attention: 0,15, or every:8.")] = "",
    set_fields: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE of the student's config, rule=falcon_1 say; repeat.")
    ] = None,
    align_steps: Annotated[int, typer.Option("--align", min=0, help="Steps of the first stage.")] = 500,
    match_steps: Annotated[int, typer.Option("--match", min=0, help="Steps of the second stage.")] = 1000,
    tune_steps: Annotated[int, typer.Option("--tune", min=0, help="Steps of the third stage.")] = 500,
    align_rate: Annotated[float, typer.Option(help="Peak learning rate of the first stage.")] = 1e-3,
    rate: Annotated[float, typer.Option(help="Peak learning rate of the others.")] = 3e-4,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="Also train it from random weights, equally long.")
    ] = False,
    scratch_rate: Annotated[float, typer.Option(help="Peak learning rate of that.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a step.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts of which a step's rows are computed.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a row.")] = 1024,
    held_out: Annotated[int, typer.Option(min=1, help="Rows, the last ones, to measure on.")] = 32,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 100,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    minutes: Annotated[float | None, typer.Option(help="Stop, to be resumed, after so long.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was interrupted.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU.")] = False,
    seed: int = 0,
) -> None:
    """Convert a Transformer and train the result to do what it did."""
    stages = {"align": (align_steps, align_rate), "match": (match_steps, rate), "tune": (tune_steps, rate)}
    plan = {
        **{"teacher": teacher, "texts": [str(path) for path in texts], "keep_attention": keep_attention},
        **{"fields": dict(map(parse_field, set_fields or [])), "stages": {n: list(s) for n, s in stages.items()}},
        **{"scratch": scratch_rate if scratch else None, "batch_size": batch_size, "accumulate": accumulate},
        **{"sequence_length": length, "held_out": held_out, "seed": seed},
    }
    kept = keep_layers(keep_attention)
    if batch_size % accumulate:
        raise RecipeError(f"--batch-size is {batch_size}; it must be a multiple of --accumulate, {accumulate}.")
    if sum(steps for steps, _ in stages.values()) == 0:
        raise RecipeError("There are no steps; give --align, --match or --tune.")
    state = output / "distillation"
    if resume:
        if not (state / "plan.json").is_file():
            raise RecipeError(f"{output} holds no run to go on with; leave out --resume.")
        if json.loads((state / "plan.json").read_text()) != plan:
            raise RecipeError(f"{output} was begun with other options; give the same ones with --resume.")
    elif output.exists():
        raise RecipeError(f"{output} is there already; --resume goes on with it.")
    set_seed(seed)

    folder = Path(teacher)
    if not folder.is_dir():
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        folder = Path(snapshot_download(teacher, allow_patterns=wanted))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = read_rows(texts, tokenizer, length)
    if len(rows) <= held_out:
        raise RecipeError(f"--held-out is {held_out}, and the texts make {len(rows)} rows of {length}.")
    training, measured = rows[:-held_out], rows[-held_out:]
    if not resume:
        start = convert(folder, state / "start", keep_attention=kept, fields=plan["fields"], seed=seed)
        print("\n".join(start.lost))
        (state / "plan.json").write_text(json.dumps(plan, indent=2))
    student = FalconFastWeightForCausalLM.from_pretrained(state / "start", dtype=torch.float32)
    on_cpu = cpu or not torch.cuda.is_available()
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if on_cpu else torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    source.to("cpu" if on_cpu else "cuda").requires_grad_(False).eval()
    trace = AttentionTrace(source, list(fast_layers(student)))
    curve = state / "curve.json"
    data = [{"input_ids": row.long()} for row in training]

    def train(model: nn.Module, name: str, stage: str, steps: int, peak: float) -> None:
        last = get_last_checkpoint(str(state / name)) if (state / name).is_dir() else None
        if last == str(state / name / f"checkpoint-{steps}"):
            model.load_state_dict(FalconFastWeightForCausalLM.from_pretrained(last).state_dict())
            return
        arguments = TrainingArguments(
            output_dir=str(state / name),
            max_steps=steps,
            per_device_train_batch_size=batch_size // accumulate,
            gradient_accumulation_steps=accumulate,
            learning_rate=peak,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 20),
            weight_decay=0.0 if stage == "align" else 0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            seed=seed,
            logging_steps=max(1, steps // 20),
            save_steps=save_every,
            save_total_limit=1,
            report_to=[],
            label_names=[],
        )
        if arguments.n_gpu > 1 or arguments.world_size > 1:
            raise RecipeError("This recipe trains on one device: choose one with CUDA_VISIBLE_DEVICES.")
        measure = Measure(curve, name, measured, batch_size // accumulate, measure_every, minutes)
        trainer = Distillation(
            model,
            arguments,
            train_dataset=data,
            callbacks=[measure] if on_cpu else [measure, StopAtNonFinite()],
            teacher=source,
            trace=trace,
            stage=stage,
        )
        trainer.train(resume_from_checkpoint=last)
        if measure.out_of_time:
            print(f"{minutes:g} minutes are over in stage {name}; --resume goes on.")
            raise typer.Exit(0)

    student.to(source.device)
    if not resume:
        note(curve, "teacher", 0, loss_of(source, measured, batch_size // accumulate))
        note(curve, "converted", 0, loss_of(student, measured, batch_size // accumulate))
    for name, (steps, peak) in stages.items():
        if steps and (name != "align" or fast_layers(student)):
            train(student, name, name, steps, peak)
    total = sum(steps for steps, _ in stages.values())
    if scratch:
        set_seed(seed)
        new = FalconFastWeightForCausalLM(student.config).to(source.device)
        train(new, "scratch", "tune", total, scratch_rate)
    write(output, student, tokenizer, json.loads(curve.read_text()), plan, total, measured)


def write(output: Path, student, tokenizer, curve: dict[str, dict[str, float]], plan, total: int, measured) -> None:
    """The checkpoint and metrics.json, and a table of the perplexities."""
    student.save_pretrained(output)
    tokenizer.save_pretrained(output)
    tokens = measured.numel() - len(measured)  # the first of a row is not predicted
    last = {name: list(points.values())[-1] for name, points in curve.items()}
    loss = [loss for name, loss in last.items() if name not in ("teacher", "scratch")][-1]
    results = {
        "evaluation": {"held-out": {"perplexity": math.exp(loss), "loss": loss, "tokens": tokens}},
        "curve": curve,
        "plan": plan,
        "steps": total,
        "tokens_seen": total * plan["batch_size"] * plan["sequence_length"],
        "seconds": time.monotonic() - STARTED,
    }
    (output / "metrics.json").write_text(json.dumps(results, indent=2) + "\n")
    draw({"student": curve}, [(name, steps) for name, (steps, _) in plan["stages"].items()], output / "curve")
    table = Table("", "perplexity", title=f"{tokens:,} held-out tokens")
    for name, loss in last.items():
        label = f"after {name}" if name in STAGES else "from random weights" if name == "scratch" else name
        table.add_row(label, f"{math.exp(loss):.2f}" if loss < 50 else f"e^{loss:.1f}")
    Console().print(table)


def draw(curves: dict[str, dict[str, dict[str, float]]], stages: list[tuple[str, int]], path: Path) -> None:
    """The perplexity of held-out text over the steps of all stages, as SVG and PNG, where matplotlib is installed.

    Args:
        curves: of students of one teacher, by their names, each as in curve.json.
        stages: name and steps of each.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return
    matplotlib.rcParams["svg.hashsalt"] = "falcon"  # the same file from the same figures
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        points, begun = [(0, curve["converted"]["0"])], 0
        for stage, count in stages:
            points += [(begun + int(step), loss) for step, loss in curve.get(stage, {}).items()]
            begun += count
        scratch = [(int(step), loss) for step, loss in curve.get("scratch", {}).items()]
        lines = {name: points, "from random weights": scratch}
        for label, line in lines.items():
            if line:
                axes.plot([step for step, _ in line], [math.exp(loss) for _, loss in line], label=label)
    begun = 0
    for stage, count in stages:
        begun += count
        if count:
            axes.axvline(begun, color="0.85", linewidth=0.8)
            axes.text(begun, 1, f"{stage} ", ha="right", va="top", color="0.4", transform=axes.get_xaxis_transform())
    axes.axhline(math.exp(curve["teacher"]["0"]), color="0.3", linestyle=":", label="teacher")
    axes.set(xlabel="steps", ylabel="perplexity of held-out text", yscale="log", xlim=(0, begun))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    try:
        app()
    except (RecipeError, ConversionError, UserError) as error:
        sys.exit(f"distill.py: {error}")
