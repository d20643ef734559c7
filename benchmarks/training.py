"""Training steps of whole models of 124 million parameters: tokens per second, memory, and a profile by kernel.

    python benchmarks/training.py --name training
    python benchmarks/training.py --models falcon_1a llama --shapes 32x1024 --compile no --name training_1024
    python benchmarks/training.py --models falcon_1a --shapes 32x1024 --gpus 2 --name training_two
    python benchmarks/training.py --models falcon_1 falcon_2 --compile yes --together 2 --name training_compiled
    python benchmarks/training.py --tiny                 # small models on the CPU: does it run

Every measurement is a process of its own; one that fails or takes too long leaves its reason in the table. With
`--together` so many compile and warm up side by side, for which there must be memory, and are then timed one after
another. All make the same step: float32 weights under bfloat16 autocast, next-token loss, backward, gradients clipped
at 1, fused AdamW. The loss is `plain` (from the logits of all tokens, as each model does by default) or `fused`
(without them: Liger Kernel's for ours and Llama, FLA's own for DeltaNet). DeltaNet is that of the package
flash-linear-attention; Llama has SDPA. A shape is rows of so many tokens, on each GPU.
"""

import argparse
import gc
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from report import report, wait_for_turn

MODELS = ("falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a", "fla_deltanet", "llama")
SHAPES = ("32x1024", "4x8192", "1x65536")
WARM_UP, REPEATS = 4, 3
KERNELS = 20  # longest ones of a profile


def sizes(tiny: bool) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return dict(zip(names, (300, 64, 96, 2) if tiny else (50257, 768, 2048, 12), strict=True))


def build(name: str, loss: str, tiny: bool, length: int) -> nn.Module:
    """A model with heads of 64 and tied embeddings, and its loss."""
    shape = sizes(tiny)
    heads = shape["hidden_size"] // 64
    if name == "fla_deltanet":
        from fla.models import DeltaNetConfig, DeltaNetForCausalLM

        fused = {"fuse_cross_entropy": loss == "plain", "fuse_linear_cross_entropy": loss == "fused"}
        return DeltaNetForCausalLM(DeltaNetConfig(num_heads=heads, tie_word_embeddings=True, **shape, **fused))
    if name == "llama":
        from transformers import AutoModelForCausalLM, LlamaConfig

        shape |= {"num_attention_heads": heads, "max_position_embeddings": length, "tie_word_embeddings": True}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="sdpa")
        if loss == "fused":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, model=model)
        return model
    from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
    from falcon_hf.fused_loss import fuse_loss

    preset = f"falcon-{name.removeprefix('falcon_')}.3-130m"
    model = FalconFastWeightForCausalLM(FalconFastWeightConfig.from_preset(preset, **shape, num_attention_heads=heads))
    if loss == "fused":
        fuse_loss(model)
    return model


def worker(model: str, shape: str, compiled: bool, loss: str, gpus: int, tiny: bool, output: str) -> None:
    """Measures one configuration and writes a JSON file."""
    rows, length = map(int, shape.split("x"))
    on_gpu = torch.cuda.is_available() and not tiny
    place = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", place) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    trained = build(model, loss, tiny, length).to(device).train()
    weights = list(trained.parameters())
    if gpus > 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
        trained = nn.parallel.DistributedDataParallel(trained, device_ids=[place] if on_gpu else None)
    if compiled:
        trained = torch.compile(trained)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(sizes(tiny)["vocab_size"], (rows, length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            value = trained(input_ids=ids, labels=ids, use_cache=False).loss
        value.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def seconds(steps: int) -> float:
        synchronize = torch.cuda.synchronize if on_gpu else nullcontext
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return (time.perf_counter() - start) / steps

    first = seconds(1)
    warm = [seconds(1) for _ in range(WARM_UP)]
    if on_gpu:
        torch.cuda.empty_cache()  # others may need the memory meanwhile
    wait_for_turn(Path(output))
    seconds(1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = 1 if tiny else max(3, round(1 / warm[-1]))
    times = [seconds(steps) for _ in range(REPEATS)]
    per_step = statistics.median(times)
    result = {
        "parameters, M": sum(weight.numel() for weight in weights) / 1e6,
        "tokens/s": round(gpus * rows * length / per_step),
        "ms a step": per_step * 1e3,
        "spread": (max(times) - min(times)) / per_step,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "first step, s": first,
        "profile": profile(step, on_gpu),
    }
    if place == 0:
        Path(output).write_text(json.dumps(result))
    if gpus > 1:
        del trained, optimizer, step, seconds  # with a model of several processes alive, closing their group can abort
        gc.collect()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def profile(step, on_gpu: bool) -> dict:
    """Of one step: time on the GPU, or in operators of the CPU, in all, and that of the longest kernels."""
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    times = {
        event.key: (event.count, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3)
        for event in profiler.key_averages()
    }
    times = {name: (count, time) for name, (count, time) in times.items() if time > 0}
    total = sum(time for _, time in times.values())
    longest = sorted(times, key=lambda name: -times[name][1])[:KERNELS]
    return {
        "ms": total,
        "launches": sum(count for count, _ in times.values()),
        "kernels": [
            {"kernel": name, "launches": times[name][0], "ms": times[name][1], "share": times[name][1] / total}
            for name in longest
        ],
    }


def measure(configurations: list[dict], tiny: bool, limit: float) -> list[tuple[dict, dict | None]]:
    """What each configuration gives, or why it does not, and its profile. They warm up side by side."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{place}.json" for place in range(len(configurations))]
        processes = [
            start(configuration | {"tiny": tiny, "output": str(output)})
            for configuration, output in zip(configurations, outputs, strict=True)
        ]
        deadline = time.monotonic() + limit
        for output, process in zip(outputs, processes, strict=True):
            ready = output.with_suffix(".ready")
            while process.poll() is None and not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            if process.poll() is None and not ready.exists():
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        return [outcome(output, process, limit) for output, process in zip(outputs, processes, strict=True)]


def start(work: dict) -> subprocess.Popen:
    """The process of one measurement, which leads a group of its own; what it says is in a file beside its output."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={work['gpus']}"]
    command = [sys.executable, *(launch if work["gpus"] > 1 else []), __file__, "--worker", json.dumps(work)]
    with Path(work["output"]).with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def outcome(output: Path, process: subprocess.Popen, limit: float) -> tuple[dict, dict | None]:
    """Gives one process its turn."""
    failed = dict.fromkeys(("parameters, M", "tokens/s", "ms a step", "spread", "peak GiB", "first step, s"))
    output.with_suffix(".go").touch()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == -signal.SIGKILL:
        return failed | {"failure": f"was killed, after {limit:.0f} s or for want of memory"}, None
    if process.returncode or not output.exists():
        return failed | {"failure": reason(output.with_suffix(".log").read_text())}, None
    result = json.loads(output.read_text())
    return {name: result[name] for name in failed} | {"failure": ""}, result["profile"]


def reason(errors: str) -> str:
    """The last line of a traceback that names an exception, or simply the last line."""
    lines = [line for line in errors.splitlines() if line.strip()] or ["it ended without a word"]
    named = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1].strip()[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="ROWSxTOKENS")
    parser.add_argument("--compile", nargs="*", default=["no", "yes"], choices=("no", "yes"))
    parser.add_argument("--loss", nargs="*", default=["plain", "fused"], choices=("plain", "fused"))
    parser.add_argument("--gpus", type=int, default=1, help="processes that train one model, each on its own rows")
    parser.add_argument("--together", type=int, default=1, help="configurations that warm up side by side")
    parser.add_argument("--limit", type=float, default=180, help="seconds to warm up, and again to be measured")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no configuration after so many")
    parser.add_argument("--tiny", action="store_true", help="two small layers on the CPU; writes nothing")
    parser.add_argument("--name", default="training", help="of the file in results/")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(**options.worker)
        return
    shapes = ["2x64", "1x256"] if options.tiny else options.shapes
    rows: list[dict] = []
    profiles = {}
    begun = time.monotonic()
    waiting = [
        {"model": model, "shape": shape, "compiled": compiled == "yes", "loss": loss, "gpus": options.gpus}
        for shape, model, loss, compiled in itertools.product(shapes, options.models, options.loss, options.compile)
    ]
    while waiting:
        if time.monotonic() - begun > 60 * options.minutes:
            print("not begun for lack of time:", *waiting, sep="\n")
            break
        group, waiting = waiting[: options.together], waiting[options.together :]
        for done, (result, kernels) in zip(group, measure(group, options.tiny, options.limit), strict=True):
            rows.append(done | result)
            if kernels is not None:
                compiled = " compiled" if done["compiled"] else ""
                profiles[f"{done['model']} {done['shape']} {done['loss']}{compiled}"] = kernels
            print(json.dumps(rows[-1]), flush=True)
    if options.tiny:
        print(json.dumps(profiles, indent=1))
    else:
        report(options.name, "training steps, float32 weights, bfloat16 autocast", rows, profiles=profiles)


if __name__ == "__main__":
    main()
