"""Training on several devices beside one: tokens per second, memory and losses, for rows and for one long sequence.

    python benchmarks/scaling.py                     all GPUs of this machine beside one of them
    python benchmarks/scaling.py --devices 2 --tiny  two processes on the CPU: tries the script, and writes nothing

Models of 124 million parameters, bfloat16 autocast, AdamW. DDP and FSDP2 give every device rows of its own; one device
reads the same rows, those of one device after those of another, and steps as often. Under context parallelism every
device has its part of one sequence, which one device reads whole. So all learn from the same tokens, and their losses
should differ by rounding alone.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.context_parallel import context_parallel, own_part

sys.path.insert(0, str(Path(__file__).parent))
from report import report

RULES = ("1.3", "1a.3", "3a.3")


class Size(NamedTuple):
    name: str
    layers: int
    rows: int  # of each device, under DDP and FSDP2
    length: int
    long: int  # tokens of the sequence that all devices share
    warm_up: int  # steps
    steps: int


FULL, TINY = Size("130m", 12, 32, 1024, 65_536, 5, 30), Size("tiny", 1, 1, 24, 48, 1, 2)


class Run(NamedTuple):
    """One way to train: how the model is wrapped, and how the sequence goes from device to device where it is split."""

    name: str
    wrap: str = ""
    scan: bool | None = None


ROWS_ALONE, LONG_ALONE = Run("rows, one device"), Run("sequence, one device", scan=False)
TOGETHER = (
    Run("DDP", "ddp"),
    Run("FSDP2", "fsdp"),
    Run("sequence, handed over", "ddp", scan=False),
    Run("sequence, scanned", "ddp", scan=True),
    Run("sequence, scanned, FSDP2", "fsdp", scan=True),
)


def wrapped(model: FalconFastWeightForCausalLM, how: str, device: torch.device) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if how == "fsdp":
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = bf16 if device.type == "cuda" else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    return model


def batches(run: Run, size: Size, vocabulary: int, all_devices: int) -> Tensor:
    """[steps, parts, B, T] tokens; data parallel devices take a part each, one device takes them one after another."""
    parts, rows, length = (1, 1, size.long) if run.scan is not None else (all_devices, size.rows, size.length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (size.warm_up + size.steps, parts, rows, length), generator=generator)


def train(run: Run, rule: str, size: Size, all_devices: int, device: torch.device) -> dict:
    """Tokens per second, peak memory in GiB, and losses, the same on all ranks. The host waits for no timed step."""
    on_cuda = device.type == "cuda"
    torch.manual_seed(0)
    config = FalconFastWeightConfig.from_preset(f"falcon-{rule}-{size.name}", num_hidden_layers=size.layers)
    plain = FalconFastWeightForCausalLM(config).to(device).train()
    model = wrapped(plain, run.wrap, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_cuda)
    split = run.scan is not None and run.wrap
    inside = partial(context_parallel, model, scan=run.scan) if split else nullcontext
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], 0.0
    for number, step in enumerate(batches(run, size, config.vocab_size, all_devices).to(device)):
        if number == size.warm_up:
            _wait(device)
            start = time.perf_counter()
        mine = own_part(step[0])[None] if split else step[dist.get_rank()][None] if run.wrap else step
        total = torch.zeros((), device=device)
        with inside():
            for part in mine:
                with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
                    loss = model(input_ids=part, labels=part).loss / len(mine)
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    _wait(device)
    seconds = (time.perf_counter() - start) / size.steps
    together = torch.stack(losses)
    if run.wrap:
        dist.all_reduce(together)
        together /= dist.get_world_size()
    return {
        "speed": step.numel() / seconds,
        "memory": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else float("nan"),
        "losses": together.tolist(),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def on_rank(rank: int, devices: int, all_devices: int, rules: list[str], tiny: bool, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(devices)}
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    backend, store = "gloo" if tiny else "nccl", f"file://{folder}/store-{devices}"
    options = {} if tiny else {"device_id": device}
    dist.init_process_group(backend, store, rank=rank, world_size=devices, **options)
    found = {}
    for rule in rules:
        for run in TOGETHER if devices > 1 else (ROWS_ALONE, LONG_ALONE):
            found[rule, run] = train(run, rule, TINY if tiny else FULL, all_devices, device)
            if rank == 0:
                print(f"falcon-{rule}, {run.name}: {found[rule, run]['speed']:,.0f} tokens/s", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if rank == 0:
        torch.save(found, Path(folder) / f"{devices}.pt")
    gc.collect()  # with a model of several processes alive, closing their group can abort or hang (torch 2.13, gloo)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count(), help="all GPUs by default")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES, help="presets without their size")
    parser.add_argument("--tiny", action="store_true", help="small models in processes on the CPU; writes nothing")
    options = parser.parse_args()
    if options.devices < 2 or not (options.tiny or options.devices <= torch.cuda.device_count()):
        parser.error(f"--devices is {options.devices}; it takes 2 or more GPUs, or --tiny.")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for devices in (1, options.devices):
            given = devices, options.devices, options.rules, options.tiny, folder
            mp.spawn(on_rank, given, nprocs=devices)
            found |= torch.load(Path(folder) / f"{devices}.pt", weights_only=False)
    rows: list[dict[str, object]] = []
    for rule in options.rules:
        for run in TOGETHER:
            have, one = found[rule, run], found[rule, ROWS_ALONE if run.scan is None else LONG_ALONE]
            differences = (abs(a / b - 1) for a, b in zip(have["losses"], one["losses"], strict=True))
            rows.append(
                {
                    "rule": f"falcon-{rule}",
                    "on all": run.name,
                    "tokens/s, one": one["speed"],
                    "tokens/s, all": have["speed"],
                    "times as fast": have["speed"] / one["speed"],
                    "GiB, one": one["memory"],
                    "GiB, each": have["memory"],
                    "losses differ by": max(differences),
                }
            )
    size = (TINY if options.tiny else FULL)._asdict()
    title = f"training on {options.devices} devices beside one"
    report(None if options.tiny else "scaling", title, rows, devices=options.devices, size=size)


if __name__ == "__main__":
    main()
