"""Pretrain a language model from text files, from the tokenizer to the measured checkpoint.

Four steps, each a command (`python examples/pretrain.py STEP --help` has every option):

    tokenizer   text files  -> a byte-level BPE tokenizer that AutoTokenizer loads
    tokenize    text files  -> a file of token ids, and beside it what was counted on the way
    train       token files -> a folder that AutoModelForCausalLM loads, with metrics.json
    evaluate    bits per byte of any such folder on any such token file

token_files.py and bits_per_byte.py belong to this file and say what the first two and the last of them do. For example,
with texts of your own in train.txt and val.txt:

    python examples/pretrain.py tokenizer train.txt --output data/tokenizer
    python examples/pretrain.py tokenize train.txt --tokenizer data/tokenizer --output data/train.bin
    python examples/pretrain.py tokenize val.txt --tokenizer data/tokenizer --output data/val.bin
    python examples/pretrain.py train data/train.bin --tokenizer data/tokenizer --evaluate data/val.bin \\
        --output runs/tiny --tokens 300M --minutes 60 --resume

The paper's language models, on eight GPUs, from any number of token files, which are read where they lie:

    torchrun --nproc_per_node 8 examples/pretrain.py train data/*.bin --tokenizer data/tokenizer --paper \\
        --accumulate 2 --compile --output runs/130m --resume

Needs what `pip install "falcon-hf[train]"` brings; writes TensorBoard logs where tensorboard is installed.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

STARTED = time.monotonic()  # --minutes counts from here, because the imports below take a part of them

import datetime
import hashlib
import json
import math
import platform
import re
import shlex
import shutil
import statistics
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import tokenizers
import torch
import transformers
import typer
from accelerate.utils import broadcast_object_list
from bits_per_byte import evaluate_folder
from huggingface_hub.errors import StrictDataclassError
from token_files import RecipeError, app, load_tokenizer, read_tokens
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import is_tensorboard_available
from transformers.models.llama.modeling_llama import LlamaAttention

from falcon_hf import FalconFastWeightAttention, FalconFastWeightConfig
from falcon_hf.fused_loss import fuse_loss

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

    The documents of a file lie end to end and are cut into blocks of `length`, from an offset and in an order that
    are drawn anew for each epoch; the blocks of all files are mixed. Block number i is the same in every run with the
    same seed, in however many processes: a run that resumes at step n simply goes on at block n * batch size. Nothing
    is held in memory but the batch.
    """

    def __init__(self, files: list[np.ndarray], length: int, total: int, seed: int):
        for tokens in files:
            if len(tokens) < 2 * length:
                raise RecipeError(
                    f"A file of training data has {len(tokens):,} tokens: it takes at least {2 * length:,}, two "
                    f"blocks of --sequence-length."
                )
        self.files, self.length, self.total, self.seed = files, length, total, seed
        counts = [len(tokens) // length - 1 for tokens in files]  # whichever the offset
        self.firsts = np.cumsum([0, *counts])  # number of the first block of each file
        self.per_epoch = int(self.firsts[-1])

    def __len__(self) -> int:
        return self.total

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """One batch."""
        ids = torch.from_numpy(np.stack([self.block(i) for i in indices]).astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def block(self, i: int) -> np.ndarray:
        epoch, place = divmod(i, self.per_epoch)
        number = shuffled(place, self.per_epoch, self.seed, epoch)
        file = int(np.searchsorted(self.firsts, number, side="right")) - 1
        start = drawn(self.seed, epoch) % self.length + int(number - self.firsts[file]) * self.length
        return self.files[file][start : start + self.length]


def shuffled(place: int, count: int, *seed: int) -> int:
    """What stands at a place of range(count) in random order, without the others.

    A Feistel network of four rounds permutes the numbers below the next power of four; steps that lead out of the range
    are followed until they lead back into it.
    """
    bits = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> bits, place & ((1 << bits) - 1)
        for turn in range(4):
            left, right = right, left ^ (drawn(*seed, turn, right) & ((1 << bits) - 1))
        place = left << bits | right
        if place < count:
            return place


def drawn(*numbers: int) -> int:
    """64 random bits that depend on these numbers alone."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def flops_per_token(model, length: int) -> int:
    """What a training step computes per token of a sequence, as the mathematics needs it.

    Multiplications and additions of the matrix products: each weight of a linear layer (the head among them) once; per
    head, products of K x V for each of what a fast-weight layer predicts, writes and reads, or the scores and sums of
    causal attention over half the sequence on average. The backward pass takes twice the forward pass. What a kernel
    computes beyond that, or anew, does not count.
    """
    config = model.config
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    for module in model.modules():
        if isinstance(module, FalconFastWeightAttention):
            written = module.rule.window * (2 if module.rule.residual else 1)
            products += (written + 1) * module.num_heads * module.head_dim * module.value_dim
        elif isinstance(module, LlamaAttention):
            products += config.num_attention_heads * module.head_dim * length
    return 6 * products


# Dense bfloat16 products with float32 sums, in 1e12 operations a second, from the makers' data sheets.
PEAKS = {"A100": 312, "H100 PCIe": 756, "H100 80GB HBM3": 989, "H200$": 989, "B200$": 2250, "L40S": 362, "L4$": 121}


def peak_flops(card: str) -> float | None:
    """Of a card by the name that torch gives it, where it is known."""
    return next((1e12 * peak for name, peak in PEAKS.items() if re.search(rf"\b{name}", card)), None)


class PretrainTrainer(Trainer):
    """transformers' Trainer with decay and rates by kind of weight, and logs in the units of language modelling.

    Args:
        matrix_rate: factor of the learning rate of matrices.
        tokens_per_step: of all processes.
        bytes_per_token: of the training text.
        flops_per_token: see `flops_per_token`.
        peak: operations a second of all devices, None where unknown.
    """

    def __init__(self, *args, matrix_rate, tokens_per_step, bytes_per_token, flops_per_token, peak, **kwargs):
        self.matrix_rate = matrix_rate
        self.tokens_per_step, self.bytes_per_token = tokens_per_step, bytes_per_token
        self.flops_per_token, self.peak = flops_per_token, peak
        self.clock: tuple[float, int, float] | None = None  # time, step, seconds trained before that
        super().__init__(*args, **kwargs)

    def get_decay_parameter_names(self, model) -> list[str]:
        """The weights of linear layers; not embeddings (which are tied to the head), convolutions, norms."""
        head = model.get_output_embeddings()
        return [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]

    def create_optimizer(self, *args) -> torch.optim.Optimizer:
        new = self.optimizer is None
        optimizer = super().create_optimizer(*args)
        if new:
            optimizer.param_groups[0]["lr"] *= self.matrix_rate  # the group that decays
        return optimizer

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
            speed = (step - then_step) * self.tokens_per_step / (now - then)
            logs["bits_per_byte"] = logs["loss"] / math.log(2) / self.bytes_per_token
            logs["tokens"] = step * self.tokens_per_step
            logs["tokens_per_second"] = round(speed)
            if self.peak is not None:
                logs["mfu"] = speed * self.flops_per_token / self.peak
            logs["seconds"] = round(seconds, 3)
            self.clock = now, step, seconds
        super().log(logs, start_time)

    def summary(self) -> dict:
        """Of the whole run so far; the curve of the loss has at most 200 points."""
        history, step = self.history(), self.state.global_step
        points = history[:: -math.ceil(len(history) / 200)][::-1]
        seconds = history[-1]["seconds"]
        columns = ("step", "tokens", "loss", "bits_per_byte", "learning_rate")
        return {
            "finished": step == self.state.max_steps,
            "steps": step,
            "planned_steps": self.state.max_steps,
            "tokens_seen": step * self.tokens_per_step,
            "seconds": seconds,
            "tokens_per_second": round(step * self.tokens_per_step / seconds),
            "tokens_per_second_median": statistics.median(entry["tokens_per_second"] for entry in history),
            "flops_per_token": self.flops_per_token,
            "curve": [{name: entry[name] for name in columns} for entry in points],
        }


class RunCallback(TrainerCallback):
    """Stops in time, and keeps log.jsonl the story of one uninterrupted run."""

    def __init__(self, trainer: PretrainTrainer, deadline: float, log: Path):
        self.trainer, self.deadline, self.path = trainer, deadline, log

    def on_train_begin(self, args, state, control, **kwargs):
        state.logging_steps = args.logging_steps  # and not those that a checkpoint has
        self.trainer.start_clock()
        if state.is_world_process_zero:
            self.path.write_text("".join(json.dumps(entry) + "\n" for entry in self.trainer.history()))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "seconds" in logs and state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({**logs, "step": state.global_step}) + "\n")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            control.should_log = True
        if control.should_log:
            late = broadcast_object_list([time.monotonic() >= self.deadline])  # the first process speaks for all
            control.should_save = control.should_save or late[0]
            control.should_training_stop = control.should_training_stop or late[0]


class ProgressLine(ProgressCallback):
    """Trainer's bar, with loss and speed at its end instead of a dictionary above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "seconds" in logs:
            line = f"loss {logs['loss']:.4f}, {logs['tokens_per_second']:,} tokens/s"
            self.training_bar.set_postfix_str(line + (f", MFU {logs['mfu']:.1%}" if "mfu" in logs else ""))


# Options of `train` that a run may be resumed with other values of. The data is compared by its contents.
MAY_CHANGE = {"data", "tokenizer", "output", "evaluate", "paper", "accumulate", "compile", "fused_loss", "cpu"}
MAY_CHANGE |= {"log_every", "minutes", "reserve", "resume"}

# Of the paper's language models (B.1): 100,000 steps of 480 sequences of 1,024 tokens. Ours, where it is silent: the
# end of the cosine, a tenth of the peak, and what its "µP-style width scaling" is: here the rates of matrices fall with
# the width, from the paper's own width, at which all weights have the same rate; initialization does not change.
PAPER = {
    "hidden_size": 768,
    "layers": 12,
    "heads": 12,
    "intermediate_size": 2048,
    "sequence_length": 1024,
    "batch_size": 480,
    "tokens": "49.152B",
    "learning_rate": 1e-3,
    "base_width": 768,
    "warmup": 2000,
    "weight_decay": 0.1,
}


def take_defaults_of_the_paper(context: typer.Context, value: bool) -> bool:
    if value:
        context.default_map = PAPER
    return value


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


@app.command()
def train(
    context: typer.Context,
    data: Annotated[list[Path], typer.Argument(help="Token files to train on.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made them.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; the finished model lies in its `model`.")],
    evaluate: Annotated[list[Path], typer.Option(help="Token file to evaluate at the end; repeatable.")] = [],  # noqa: B006
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="Sizes and rates of the paper where nothing else is given.",
            is_eager=True,
            callback=take_defaults_of_the_paper,
        ),
    ] = False,
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
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks in a step, of all processes together.")] = 64,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts in which a process computes its blocks.")] = 1,
    tokens: Annotated[int, typer.Option(parser=parse_count, help="Tokens to train on, epochs repeat.")] = "300M",
    learning_rate: Annotated[float, typer.Option(help="Peak; falls to a tenth of it on a cosine.")] = 2e-3,
    base_width: Annotated[
        int | None,
        typer.Option(min=1, help="Where given, matrices get --learning-rate times this over --hidden-size."),
    ] = None,
    warmup: Annotated[float, typer.Option(min=0, help="Steps that warm up, or below 1 their part of all.")] = 0.02,
    weight_decay: Annotated[float, typer.Option(min=0, help="On the weights of linear layers.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the initialization and of the order of the data.")] = 0,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    fused_loss: Annotated[
        bool, typer.Option("--fused-loss", help="Falcon's loss without all logits; needs Liger Kernel and a GPU.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU only, in one or several processes.")] = False,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between two entries of the log.")] = 50,
    minutes: Annotated[
        float, typer.Option(help="Stop, at an entry of the log, to be done this many minutes after the start.")
    ] = math.inf,
    reserve: Annotated[float, typer.Option(help="Minutes kept back for saving and evaluating.")] = 0.75,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")] = False,
) -> None:
    """Train a model; again with --resume, until the plan of --tokens is done.

    The plan fixes the blocks and the learning rate of every step, so that a run cut short by --minutes, or in
    another way, goes on as if it had not been. Each call ends with a saved and evaluated model; its metrics.json says
    whether the plan was finished. torchrun or `accelerate launch` start several processes, one for each GPU.
    """
    deadline = STARTED + 60 * (minutes - reserve)
    text_tokenizer = load_tokenizer(tokenizer)
    files, facts = zip(*(read_tokens(file, text_tokenizer) for file in data), strict=True)
    training_data = {name: sum(f[name] for f in facts) for name in ("documents", "bytes", "tokens")}
    training_data |= {name: facts[0][name] for name in ("tokenizer", "end")}
    training_data["sources"] = [source for f in facts for source in f["sources"]]
    for file in evaluate:
        read_tokens(file, text_tokenizer)  # a wrong path is better found now than at the end
    tokens_per_step = batch_size * sequence_length
    steps = math.ceil(tokens / tokens_per_step)
    blocks = Blocks(files, sequence_length, steps * batch_size, seed)

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
    if fused_loss:
        try:
            fuse_loss(network)
        except (ImportError, TypeError) as error:
            raise RecipeError(str(error)) from error
    on_cuda = torch.cuda.is_available() and not cpu
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        train_sampling_strategy="sequential",  # Blocks has shuffled already
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=round(warmup if warmup >= 1 else warmup * steps),
        weight_decay=weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=on_cuda,
        use_cpu=cpu,
        torch_compile=compile,
        seed=seed,
        logging_steps=log_every,
        logging_nan_inf_filter=False,  # it would wait for the device at every step
        save_steps=min(max(1, steps // 10), 1000),
        save_total_limit=2,
        report_to=["tensorboard"] if is_tensorboard_available() else [],
        remove_unused_columns=False,
        dataloader_pin_memory=on_cuda,
        accelerator_config={"non_blocking": on_cuda},
        ddp_find_unused_parameters=False,
        ddp_timeout=7200,  # the first process evaluates, the others wait
    )
    processes = arguments.world_size
    if arguments.n_gpu > 1:
        raise RecipeError(
            f"This process sees {arguments.n_gpu} GPUs and uses one: start one for each with "
            f"torchrun --nproc_per_node {arguments.n_gpu}, or choose one with CUDA_VISIBLE_DEVICES."
        )
    if batch_size % (accumulate * processes):
        raise RecipeError(
            f"--accumulate is {accumulate} in each of {processes} processes: together they have to divide "
            f"--batch-size, {batch_size}."
        )
    arguments.per_device_train_batch_size = batch_size // (accumulate * processes)
    torch.set_float32_matmul_precision("high")

    first = arguments.process_index == 0
    plan = {name: value for name, value in context.params.items() if name not in MAY_CHANGE}
    plan |= {"sources": training_data["sources"], "vocabulary": training_data["tokenizer"]}
    with arguments.main_process_first():  # which begins the run that the others then find
        checkpoint = check_resume(output, plan, resume or not first)
    parameters = network.num_parameters()
    if first:
        print(
            f"{parameters:,} parameters, {2 * parameters:,} bytes in bfloat16; {steps:,} steps of "
            f"{tokens_per_step:,} tokens, {len(blocks) / blocks.per_epoch:.2f} epochs of "
            f"{training_data['tokens']:,} tokens" + (f"; going on from {checkpoint}" if checkpoint else "")
        )

    device = torch.cuda.get_device_name() if on_cuda else f"CPU, {platform.machine()}"
    peak = peak_flops(device)
    trainer = PretrainTrainer(
        network,
        arguments,
        train_dataset=blocks,
        data_collator=lambda batch: batch,
        matrix_rate=1.0 if base_width is None else base_width / hidden_size,
        tokens_per_step=tokens_per_step,
        bytes_per_token=training_data["bytes"] / training_data["tokens"],
        flops_per_token=flops_per_token(network, sequence_length),
        peak=None if peak is None else processes * peak,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressLine)
    trainer.add_callback(RunCallback(trainer, deadline, output / "log.jsonl"))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    if first:
        folder = output / "model"
        export(network, text_tokenizer, folder)
        metrics = trainer.summary() | {
            "parameters": parameters,
            "weight_bytes": (folder / "model.safetensors").stat().st_size,
            "epochs": trainer.state.global_step * batch_size / blocks.per_epoch,
            "evaluation": evaluate_folder(folder, evaluate, sequence_length),
            "training_data": training_data,
            "plan": plan,
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device,
            "processes": processes,
            "versions": {"python": platform.python_version()}
            | {module.__name__: module.__version__ for module in (torch, transformers, tokenizers, np)},
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        where = "the plan is finished" if metrics["finished"] else "go on with --resume"
        print(f"{folder}: step {metrics['steps']} of {steps}, {where}")
    accelerator = trainer.accelerator
    del trainer  # with a model of several processes alive, closing their group can abort or hang (torch 2.13, gloo)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    try:
        app()
    except RecipeError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
