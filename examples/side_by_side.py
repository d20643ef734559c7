"""What addition.py, recall.py and language.py share: models of equal size, trained side by side on the same data.

A script of this kind defines a task (see `Task`) and two commands: `train` ends in this file's `train`, `report`
draws and tabulates what its results say. A run is a folder, OUTPUT/MODEL-seedN, of which every call of the same
command goes on with what is not finished:

    plan.json        what determines the run; a folder whose plan differs is refused
    log.jsonl        loss and accuracy on the batches of the last steps, before they were learnt from
    checkpoint.pt    where the run stands: weights, moments of the optimizer, step
    model/           the trained model in bfloat16, which AutoModelForCausalLM loads
    result.json      plan, log and evaluation of the finished run, with versions, device and command

Models are named as in `MODELS`, Falcon's by the paper: `falcon-3a.3` is rule 3A, variant .3. Fields of the config
follow after colons, as in `falcon-3a.3:window_size=8:alignment=same_step` or `deltanet:allow_neg_eigval=true`.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import math
import platform
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import torch
import transformers
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, PreTrainedConfig, PreTrainedModel

from falcon_hf import FalconFastWeightConfig
from falcon_hf.generation_falcon_fast_weight import without_collection
from falcon_hf.memory_falcon_fast_weight import write_atomically

UNSCORED = -100  # a target that is none
EAGER_STEPS = 3  # before a step is captured, in which kernels are compiled and memory is laid out


class RecipeError(Exception):
    """Something that the caller gave is wrong; the message says what, and what is allowed."""


class Task(Protocol):
    """What there is to learn. A frozen dataclass: its fields are part of the plan of a run, if they compare."""

    name: str
    sizes: dict[str, Size]  # what --size may be
    measures: tuple[str, ...]  # what `loss` returns and the log holds

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the evaluation."""
        ...

    def batches(self, plan: Plan, device: torch.device) -> Callable[[int], tuple[Tensor, Tensor]]:
        """The batch of each step of a run, as a function of seed and step alone.

        It is tokens [B, T] and what is to be predicted at each of them, [B, T], `UNSCORED` where nothing is, on the
        device and without waiting for it, of one T in all steps. Padding stands on the right, where no scored token
        sees it.
        """
        ...

    def loss(self, hidden: Tensor, head: torch.nn.Linear, targets: Tensor) -> tuple[Tensor, ...]:
        """Scalars of a batch, the first of them to be lowered, from what the head reads, [B, T, hidden_size]."""
        ...

    def evaluate(self, model: PreTrainedModel, progress: Callable[[Iterable, str], Iterable]) -> dict[str, Any]:
        """What is reported of a trained model."""
        ...

    @property
    def end_token(self) -> int | None:
        """At which a saved model stops to generate, if there is one."""
        ...

    def save_tokenizer(self, folder: Path) -> None: ...


class Generated:
    """The part of a task whose rows are drawn on the device, each seen once, and whose answers are right or wrong.

    It has a method `batch(size, generator, done)`, which draws as many rows on the device of the generator; `done` is
    the part of the run that lies behind.
    """

    measures: ClassVar = ("loss", "tokens", "answers")

    @property
    def sizes(self) -> dict[str, Size]:
        return SIZES

    def batches(self, plan: Plan, device: torch.device) -> Callable[[int], tuple[Tensor, Tensor]]:
        generator = torch.Generator(device)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            generator.manual_seed(seed_of(plan.seed, step))
            return self.batch(plan.batch_size, generator, step / plan.steps)

        return batch

    def loss(self, hidden: Tensor, head: torch.nn.Linear, targets: Tensor) -> tuple[Tensor, ...]:
        """The mean over the targets; the parts of them, and of the rows as a whole, that are right."""
        logits = head(hidden).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNSCORED)
        return loss, *accuracies(logits.detach(), targets)


def described(task: Task) -> dict[str, Any]:
    return {"name": task.name, **{f.name: getattr(task, f.name) for f in fields(task) if f.compare}}


# ------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Size:
    """A shape of the Transformer, and what suits a model of that many parameters."""

    hidden_size: int
    layers: int
    heads: int
    batch_size: int
    steps: int
    learning_rate: float


SIZES = {
    "tiny": Size(64, 2, 2, batch_size=32, steps=150, learning_rate=5e-3),
    "small": Size(256, 4, 4, batch_size=480, steps=4000, learning_rate=2e-3),  # 3 million
    "base": Size(384, 4, 6, batch_size=480, steps=4000, learning_rate=2e-3),  # 7 million
    "medium": Size(512, 8, 8, batch_size=480, steps=3000, learning_rate=1e-3),  # 25 million
    "paper": Size(768, 12, 12, batch_size=480, steps=2000, learning_rate=1e-3),  # 85 million beside the embeddings
}


def transformer(size: Size, width: int, **fields: Any) -> PreTrainedConfig:
    shape = {"num_attention_heads": size.heads, "num_hidden_layers": size.layers, "intermediate_size": 8 * width}
    return LlamaConfig(**{**shape, **fields})


def mamba2(size: Size, width: int, **fields: Any) -> PreTrainedConfig:
    """Its blocks have no MLP: `width` is the number of layers."""
    head_dim = size.hidden_size // size.heads
    shape = {"num_heads": 2 * size.heads, "head_dim": head_dim, "state_size": head_dim, "n_groups": 1, "chunk_size": 64}
    del fields["max_position_embeddings"]
    return Mamba2Config(**{**shape, "num_hidden_layers": width, **fields})


def fla(config_name: str, size: Size, width: int, **fields: Any) -> PreTrainedConfig:
    if find_spec("fla") is None:
        raise RecipeError(f"{config_name} is of flash-linear-attention: pip install flash-linear-attention.")
    import fla.models

    shape = {"num_heads": size.heads, "num_hidden_layers": size.layers, "intermediate_size": 8 * width}
    shape["head_dim"] = size.hidden_size // size.heads  # read by those whose heads are of another width by default
    return getattr(fla.models, config_name)(**{**shape, **fields})


def falcon(name: str, size: Size, width: int, **fields: Any) -> PreTrainedConfig:
    shape = {"num_attention_heads": size.heads, "num_hidden_layers": size.layers, "intermediate_size": 8 * width}
    shape["head_dim"] = size.hidden_size // size.heads
    return FalconFastWeightConfig.from_preset(f"{name}-tiny", **{**shape, **fields})


FALCONS = [f"falcon-{rule}.{variant}" for rule in ("1", "2", "3", "1a", "2a", "3a") for variant in "123"]

MODELS: dict[str, Callable[..., PreTrainedConfig]] = {
    "transformer": transformer,
    "mamba-2": mamba2,
    "deltanet": partial(fla, "DeltaNetConfig"),
    "gated-deltanet": partial(fla, "GatedDeltaNetConfig", expand_v=1),
    "retnet": partial(fla, "RetNetConfig", expand_v=1),
    **{name: partial(falcon, name) for name in FALCONS},
}


def model_config(spec: str, size: Size, vocab_size: int, longest: int) -> PreTrainedConfig:
    """The config of a model by its name and overrides, with as many parameters as the Transformer of that size.

    What mixes the tokens has parameters in number of its own; the width of the MLPs makes up for the difference, in
    Mamba-2, which has none, the number of layers. Heads are as many and as wide, 2 to 1 in Mamba-2.

    Raises:
        RecipeError: for a name, a field or a value that is none.
    """
    name, *overrides = spec.split(":")
    if name not in MODELS:
        raise RecipeError(f"--model is {name!r}: it may be {', '.join(MODELS)}.")
    given = {}
    for override in overrides:
        field, equals, text = override.partition("=")
        if not equals:
            raise RecipeError(f"--model has {override!r} after a colon: it takes FIELD=VALUE there.")
        try:
            given[field] = json.loads(text)
        except ValueError:
            given[field] = text
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden_size,
        "tie_word_embeddings": True,
        "max_position_embeddings": longest,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    try:
        narrow, wider = (MODELS[name](size, width, **{**shared, **given}) for width in (1, 2))
        known = type(narrow)()
        for field in given:
            if not hasattr(known, field):
                raise RecipeError(f"--model has {field} after a colon, which is no field of {type(narrow).__name__}.")
        target = parameters(transformer(size, round(size.hidden_size / 3), **shared))
        step = parameters(wider) - parameters(narrow)
        if not step:  # the width was given
            return narrow
        width = max(1, 1 + round((target - parameters(narrow)) / step))
        return MODELS[name](size, width, **{**shared, **given})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise RecipeError(f"--model {spec}: {error.__cause__ or error}") from error


def parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


# ---------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Plan:
    """What determines a run, beside its task."""

    model: str
    size: str
    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    warmup: float
    weight_decay: float

    @property
    def name(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', self.model)}-seed{self.seed}"

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to a tenth of the peak."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def seed_of(*what: object) -> int:
    """A seed that depends on `what` alone; of 32 bits, since generators on the CPU take no more."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big")


class Run:
    """One model on its way through its plan.

    The batch of a step is a function of seed and step, so that all models with one seed learn from the same data in the
    same order, and a run that goes on needs no more than weights, moments and step. On the CPU it goes on to the bit.

    Args:
        capture: record the step as a CUDA graph once its first steps are done, so that each further one is one launch.
        compile: compile the model with torch.compile.
    """

    def __init__(self, task: Task, plan: Plan, folder: Path, device: torch.device, capture: bool, compile: bool):
        self.task, self.plan, self.folder, self.device = task, plan, folder, device
        self.on_cuda = device.type == "cuda"
        self.capture = capture and self.on_cuda
        config = model_config(plan.model, task.sizes[plan.size], task.vocab_size, task.longest)
        torch.manual_seed(plan.seed)
        self.model = AutoModelForCausalLM.from_config(config).to(device)
        self.body = torch.compile(self.model.base_model) if compile else self.model.base_model
        self.head = self.model.get_output_embeddings()
        decayed = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m is not self.head}
        others = [p for p in self.model.parameters() if p not in decayed]
        decayed = [p for p in self.model.parameters() if p in decayed]  # in an order that does not change
        self.rate = torch.zeros((), device=device)  # read by the optimizer on the device: a graph keeps no number
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
            fused=True,
            capturable=self.on_cuda,
        )
        self.batch = task.batches(plan, device)
        self.sums = torch.zeros(len(task.measures), dtype=torch.float64, device=device)  # since the last log
        self.step, self.logged, self.seconds = 0, 0, 0.0
        self.together, self.peak_memory = 1, 0  # the most runs at a time, and bytes on the device while they trained
        self.stream = torch.cuda.Stream(device) if self.on_cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager_steps, self.tokens, self.clock = 0, 0, time.monotonic()
        self.load()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def load(self) -> None:
        """Goes on from the checkpoint, if there is one, and makes the log end there."""
        path = self.folder / "checkpoint.pt"
        log = self.folder / "log.jsonl"
        if path.is_file():
            saved = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.sums.copy_(saved["sums"])
            self.step, self.logged, self.seconds = saved["step"], saved["logged"], saved["seconds"]
            self.together, self.peak_memory = saved.get("together", 1), saved.get("peak_memory", 0)
            for group in self.optimizer.param_groups:
                group.update(lr=self.rate, capturable=self.on_cuda)
        kept = [line for line in read_log(log) if line["step"] <= self.step]
        log.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def save(self) -> None:
        self.wait()
        if self.on_cuda:
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated(self.device))
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sums": self.sums,
            "step": self.step,
            "logged": self.logged,
            "seconds": self.seconds,
            "together": self.together,
            "peak_memory": self.peak_memory,
        }
        written = self.folder / "checkpoint.pt.partial"
        torch.save(state, written)
        written.replace(self.folder / "checkpoint.pt")

    def advance(self) -> None:
        """Takes one step; on a GPU it is only queued."""
        with torch.cuda.stream(self.stream):
            ids, targets = self.batch(self.step)
            self.rate.fill_(self.plan.rate(self.step))
            if self.graph is not None:
                self.ids.copy_(ids)
                self.targets.copy_(targets)
                self.graph.replay()
            elif self.capture and self.eager_steps == EAGER_STEPS:
                self.ids, self.targets = ids, targets  # a graph reads the tensors that it has recorded
                self.graph = torch.cuda.CUDAGraph()
                self.optimizer.zero_grad(set_to_none=True)
                with without_collection(), torch.cuda.graph(self.graph, stream=self.stream):
                    self.compute(ids, targets)
                self.graph.replay()  # recording computes nothing
            else:
                self.compute(ids, targets)
                self.eager_steps += 1
        self.step += 1
        self.tokens += ids.numel()

    def compute(self, ids: Tensor, targets: Tensor) -> None:
        """Forward, backward and update on one batch; no value of a tensor is read by the host."""
        self.optimizer.zero_grad(set_to_none=True)
        with precision(self.device):
            measures = self.task.loss(self.body(input_ids=ids, use_cache=False)[0], self.head, targets)
        measures[0].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.sums += torch.stack([measure.detach().double() for measure in measures])

    def wait(self) -> None:
        """Until the device is done, and takes the time."""
        if self.stream is not None:
            self.stream.synchronize()
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now

    def log(self) -> dict[str, Any]:
        """The means since the last call, as an entry of the log; waits for the device."""
        self.wait()
        with torch.cuda.stream(self.stream):
            means = (self.sums / max(1, self.step - self.logged)).tolist()
            self.sums.zero_()
        self.logged = self.step
        entry = {"step": self.step, **dict(zip(self.task.measures, means, strict=True))}
        entry["loss"] = entry["loss"] if math.isfinite(entry["loss"]) else None
        entry |= {"learning_rate": self.plan.rate(self.step - 1), "seconds": round(self.seconds, 3)}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def finish(self, progress: Callable[[Iterable, str], Iterable]) -> dict[str, Any]:
        """Evaluates and saves the trained model, and writes result.json."""
        self.model.eval()
        with precision(self.device), torch.no_grad():
            evaluation = self.task.evaluate(self.model, progress)
        result = self.write_result(evaluation=evaluation)
        self.write_model()
        return result

    def write_model(self) -> None:
        """In bfloat16, whole or not at all."""
        written = self.folder / "model.partial"
        shutil.rmtree(written, ignore_errors=True)
        weights = {name: value.to(torch.bfloat16) for name, value in self.model.state_dict().items()}
        copy = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        copy.load_state_dict(weights)
        for config in (copy.config, copy.generation_config):
            config.eos_token_id = config.pad_token_id = self.task.end_token
        copy.save_pretrained(written)
        self.task.save_tokenizer(written)
        shutil.rmtree(self.folder / "model", ignore_errors=True)
        written.rename(self.folder / "model")

    def write_result(self, **facts: Any) -> dict[str, Any]:
        log = read_log(self.folder / "log.jsonl")
        result = {
            "task": described(self.task),
            **asdict(self.plan),
            "parameters": self.model.num_parameters(),
            "config": {name: value for name, value in self.model.config.to_diff_dict().items() if name != "id2label"},
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "steps_per_second": steps_per_second(log),
            "together": self.together,
            "peak_memory": self.peak_memory or None,
            **facts,
            "log": log,
            "environment": environment(self.device),
        }
        write_json(self.folder / "result.json", result)
        return result


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, as it is on a CPU. Without a cache of cast weights, which a graph could not keep."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def accuracies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of the scored tokens, and of the rows as a whole, whose likeliest token is the target; float64 scalars."""
    scored = targets != UNSCORED
    right = (logits.argmax(-1) == targets) & scored
    return right.sum().double() / scored.sum(), (right == scored).all(1).double().mean()


def largest(longest: int, done: float, curriculum: float) -> int:
    """What a curriculum allows: from 1 to `longest` in equal parts of the first `curriculum` of the run."""
    return longest if done >= curriculum else 1 + int(longest * done / curriculum)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; its last line may have been cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def steps_per_second(log: list[dict[str, Any]]) -> float | None:
    """Between two entries of a log, the median: what compiled at first or took a pause counts little.

    The clock of a run is that of the wall: of runs that took their steps in turn, each has what was left by the others.
    """
    stops = [(0, 0.0), *((entry["step"], entry["seconds"]) for entry in log)]
    speeds = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(stops) if b[1] > a[1]]
    return statistics.median(speeds) if speeds else None


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, date and command of a result."""
    import falcon_hf

    modules = (torch, transformers, falcon_hf)
    versions = {module.__name__: getattr(module, "__version__", None) for module in modules}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}",
        "versions": {"python": platform.python_version(), **{k: v for k, v in versions.items() if v}},
        "command": shlex.join(["python", *sys.argv]),
    }


def open_run(folder: Path, task: Task, plan: Plan) -> bool:
    """Makes the folder of a run, or looks whether it is of this plan; whether the run has still to be finished."""
    said = {"task": described(task), **asdict(plan)}
    file = folder / "plan.json"
    if file.is_file():
        before = json.loads(file.read_text())
        for name in before.keys() | said.keys():
            if before.get(name) != said.get(name):
                raise RecipeError(
                    f"{folder} was started with {name} {before.get(name)} and not {said.get(name)}: a run goes on only "
                    "as it was started; give another --output."
                )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, said)
    return not (folder / "result.json").is_file()


class Note(ProgressColumn):
    """What a run has to say about itself."""

    def render(self, task: Any) -> Text:
        return Text(task.fields.get("note", ""))


def train(
    task: Task,
    plans: list[Plan],
    output: Path,
    *,
    started: float,
    minutes: float,
    together: int,
    log_every: int,
    capture: bool,
    compile: bool,
) -> list[dict[str, Any]]:
    """Trains the runs that are not finished, `together` at a time, and evaluates each at its end.

    Runs at one time take their steps in turn, each on a stream of its own, so that small kernels of several models
    overlap on a GPU. A run whose loss is no longer finite ends there, and its result says so.

    Args:
        minutes: after which, from `started` on (time.monotonic), no step is taken; the runs are saved then.

    Returns:
        The results of all runs that are finished, without those that ended early.
    """
    torch.set_float32_matmul_precision("high")
    transformers.logging.disable_progress_bar()
    for plan in plans:  # a wrong name is better found now than after the first run
        model_config(plan.model, task.sizes[plan.size], task.vocab_size, task.longest)
    unfinished = [plan for plan in plans if open_run(output / plan.name, task, plan)]
    with Progress("{task.description}", BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), Note()) as bars:
        while unfinished and time.monotonic() < started + 60 * minutes:
            group, unfinished = unfinished[:together], unfinished[together:]
            train_group(
                [Run(task, plan, output / plan.name, best_device(), capture, compile) for plan in group],
                bars,
                started + 60 * minutes,
                log_every,
            )
    paths = (output / plan.name / "result.json" for plan in plans)
    results = [json.loads(path.read_text()) for path in paths if path.is_file()]
    return [result for result in results if result["evaluation"] is not None]


def train_group(runs: list[Run], bars: Progress, deadline: float, log_every: int) -> None:
    """Takes the steps of some runs in turn until they are done or the time is over."""
    bar = {run: bars.add_task(run.plan.name, total=run.plan.steps, completed=run.step, note="") for run in runs}
    active, start = [run for run in runs if run.step < run.plan.steps], time.monotonic()
    for run in runs:
        run.clock, run.together = start, max(run.together, len(runs))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    while active and time.monotonic() < deadline:
        for run in list(active):
            run.advance()
            done = run.step == run.plan.steps
            if done or run.step % log_every == 0:
                entry = run.log()
                speed = sum(run.tokens for run in runs) / (time.monotonic() - start)
                if entry["loss"] is None:
                    run.write_result(evaluation=None)
                    bars.update(bar[run], completed=run.step, note="ended: its loss is not finite")
                    active.remove(run)
                    continue
                parts = [f"{name} {entry[name]:.1%}" for name in run.task.measures[1:]]
                note = ", ".join([f"loss {entry['loss']:.3f}", *parts, f"{speed:,.0f} tokens/s in all"])
                bars.update(bar[run], completed=run.step, note=note)
            if done:
                active.remove(run)
            if done or run.step % max(1, run.plan.steps // 10) == 0:
                run.save()
    for run in active:
        run.save()
    for run in runs:
        if run.step == run.plan.steps and not (run.folder / "result.json").is_file():
            run.finish(lambda items, what, run=run: bars.track(items, description=f"{run.plan.name}: {what}"))


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(facts, indent=1) + "\n").encode())


# ----------------------------------------------------------------------------------------------- options

NO_END = math.inf

Models = Annotated[list[str], typer.Option("--model", help="Name, then :FIELD=VALUE of its config; repeatable.")]
SizeName = Annotated[str, typer.Option(help=f"Of the models: {', '.join(SIZES)}.")]
Seeds = Annotated[list[int], typer.Option("--seed", help="Of initialization and data; repeatable.")]
Curriculum = Annotated[float, typer.Option(min=0, max=1, help="Part of the steps in which the task grows to its size.")]
Steps = Annotated[int | None, typer.Option(min=1, help="By --size if not given.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows in a step; by --size if not given.")]
LearningRate = Annotated[float | None, typer.Option(help="Peak, falls to a tenth; by --size if not given.")]
Warmup = Annotated[float, typer.Option(min=0, max=1, help="Part of the steps that warm up.")]
WeightDecay = Annotated[float, typer.Option(min=0, help="On matrices other than the embedding.")]
Minutes = Annotated[float, typer.Option(help="Take no step later than this many minutes after the start, and save.")]
Together = Annotated[int, typer.Option(min=1, help="Runs that take their steps in turn on the device.")]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between two entries of the log.")]
Capture = Annotated[bool, typer.Option(help="On a GPU, record steps as CUDA graphs.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the models with torch.compile.")]


def size_of(name: str, sizes: dict[str, Size]) -> Size:
    if name not in sizes:
        raise RecipeError(f"--size is {name!r}: it may be {', '.join(sizes)}.")
    return sizes[name]


def plans(
    models: list[str],
    size: str,
    seeds: list[int],
    steps: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    warmup: float,
    weight_decay: float,
    sizes: dict[str, Size] = SIZES,
    kind: type[Plan] = Plan,
) -> list[Plan]:
    """One for each seed and model, those of one seed together."""
    suits = size_of(size, sizes)
    rest = (steps or suits.steps, batch_size or suits.batch_size, learning_rate or suits.learning_rate)
    return [kind(model, size, seed, *rest, warmup, weight_decay) for seed in seeds for model in models]


def run_app(app: typer.Typer, script: str, *errors: type[Exception]) -> None:
    """Runs a script; of a RecipeError, and of `errors`, it shows the sentence alone."""
    try:
        app()
    except (RecipeError, *errors) as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(2)


# --------------------------------------------------------------------------------------- tables and figures

INK, GRID = "#24292f", "#d0d7de"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#1b7c83", "#57606a")
STYLES = [(colour, line) for line in ("-", "--", ":", "-.") for colour in COLOURS]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of the runs in a folder, without those that diverged; all of one task."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    results = [result for result in results if result["evaluation"] is not None]
    if not results:
        raise RecipeError(f"{folder} holds no finished run: give a folder that `train` wrote.")
    for result in results[1:]:
        if result["task"] != results[0]["task"]:
            raise RecipeError(f"{folder} holds runs of several tasks, or of one with other options: keep them apart.")
    return results


def report(
    folder: Path,
    output: Path | None,
    table: Callable[[list[dict[str, Any]]], str],
    draw: Callable[[list[dict[str, Any]], Path], None],
) -> None:
    """Prints the table of the results in a folder, and writes it and a figure into `output`, or beside them."""
    results = read_results(folder)
    output = output or folder
    output.mkdir(parents=True, exist_ok=True)
    text = table(results)
    (output / "table.md").write_text(text + "\n")
    draw(results, output)
    print(text)


def by_model(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Results of one model, with whichever seed, together; in the order of `MODELS`."""
    order = sorted(results, key=lambda result: (list(MODELS).index(result["model"].split(":")[0]), result["model"]))
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in order:
        groups.setdefault(result["model"], []).append(result)
    return groups


def percent(values: list[float]) -> str:
    return spread([100 * value for value in values], 1)


def spread(values: list[float], digits: int) -> str:
    """Mean and, of several, standard deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def draw_band(axes: Any, x: list[float], curves: list[list[float]], label: str, style: tuple[str, str]) -> None:
    """The mean of some curves as a line, and their range as a band."""
    colour, line = style
    columns = list(zip(*curves, strict=True))
    axes.plot(x, [statistics.mean(column) for column in columns], line, color=colour, label=label, linewidth=1.8)
    if len(curves) > 1:
        low, high = ([pick(column) for column in columns] for pick in (min, max))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def name_lines(figure: Any, axes: Any) -> None:
    """One legend for all axes of a figure, below them."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def save_figure(figure: Any, path: Path) -> None:
    """As SVG and as PNG."""
    figure.savefig(path.with_suffix(".svg"))
    figure.savefig(path.with_suffix(".png"), dpi=130)
