"""Time of the one-token kernel beside the bytes that it must move, on the GPU.

    python benchmarks/step.py            # the table, written to results/step.json
    python benchmarks/step.py --sweep    # other ways to cut the work, to results/step_sweep.json

Inputs and state are bfloat16 with a float32 memory. Each time goes over many states in turn, more than the cache holds.
GPU time is that of a captured graph of such steps; time as called is that of a Python loop over them.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from falcon_kernels import RULES, FalconState, Rule, falcon_step, reference, triton_step

sys.path.insert(0, str(Path(__file__).parent))
from report import report

SHAPES = ((64, 16, 128), (1, 16, 128), (1, 12, 64))  # B, H, K = V
ROTATED_BYTES = 512 << 20
SWEEP = [
    triton_step.Launch(tile, tile // warps, warps, registers)
    for tile, warps, registers in (
        (16384, 8, 128),
        (16384, 16, 64),
        (8192, 8, 128),
        (8192, 8, 96),
        (8192, 4, 168),
        (4096, 8, 64),
        (4096, 4, 128),
        (4096, 4, 96),
        (4096, 2, 168),
        (2048, 2, 128),
        (2048, 2, 96),
    )
]


def token(rule: Rule, B: int, H: int, K: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    q, k = (torch.nn.functional.rms_norm(torch.randn(B, H, K, device="cuda"), (K,)) for _ in range(2))
    v = torch.randn(B, H, K, device="cuda")
    gain = 2 * torch.sigmoid(torch.randn(B, H, *([K] if rule.per_channel else []), device="cuda"))
    ridge = torch.sigmoid(torch.randn(B, H, device="cuda") - 3)
    return [q.to(dtype), k.to(dtype), v.to(dtype), gain, ridge]


def full_state(rule: Rule, B: int, H: int, K: int) -> FalconState:
    """The state of rows in mid-sequence."""
    empty = FalconState.zeros(rule, B, H, K, K, dtype=torch.bfloat16, device="cuda")
    return empty.map(lambda t: torch.ones_like(t) if t.dtype == torch.bool else torch.randn_like(t))


def median_on_gpu(run, repeats: int = 20) -> float:
    """Median seconds of `run`, from events around it."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / median_on_gpu(lambda: target.copy_(source))


def worst_error(rule: Rule, B: int, H: int, K: int, steps: int = 8) -> float:
    """Relative RMS error of outputs and memory in bfloat16 from the first token on, against float64."""
    mine = FalconState.zeros(rule, B, H, K, K, dtype=torch.bfloat16, device="cuda")
    truth = FalconState.zeros(rule, B, H, K, K, dtype=torch.float64, device="cuda")
    worst = 0.0
    for _ in range(steps):
        inputs = token(rule, B, H, K)
        have, _ = falcon_step(*inputs, mine, rule=rule, impl="triton")
        want, truth = reference.step(*(t.double() for t in inputs), truth, rule)
        for a, b in ((have, want), (mine.memory, truth.memory)):
            if b.any():
                worst = max(worst, ((a.double() - b).norm() / b.norm()).item())
            elif not torch.equal(a.double(), b):
                return float("inf")
        if not have.isfinite().all():
            return float("inf")
    return worst


def times(rule: Rule, B: int, H: int, K: int) -> tuple[float, float]:
    """Seconds of one step: as replayed from a graph, and as called."""
    inputs = token(rule, B, H, K)
    states = [full_state(rule, B, H, K)]
    states += [full_state(rule, B, H, K) for _ in range(min(1023, ROTATED_BYTES // states[0].nbytes()))]

    def steps() -> None:
        for state in states:
            falcon_step(*inputs, state, rule=rule, impl="triton")

    steps()
    torch.cuda.synchronize()
    called = []
    for _ in range(7):
        start = time.perf_counter()
        steps()
        torch.cuda.synchronize()
        called.append((time.perf_counter() - start) / len(states))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    graph.replay()
    return median_on_gpu(graph.replay) / len(states), statistics.median(called)


def launches(rule: Rule) -> int:
    """Kernels that one call launches."""
    inputs, state = token(rule, 1, 16, 128), full_state(rule, 1, 16, 128)
    falcon_step(*inputs, state, rule=rule, impl="triton")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        falcon_step(*inputs, state, rule=rule, impl="triton")
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def sweep(copy: float) -> list[dict[str, object]]:
    """The GPU time of every way to cut the work, correct ones only."""
    rows: list[dict[str, object]] = []
    for launch in SWEEP:
        triton_step.LAUNCHES[torch.cuda.get_device_capability()] = launch
        triton_step.launch.cache_clear()
        triton_step.launcher.cache_clear()
        for name in ("falcon_1", "falcon_2a", "falcon_3", "falcon_3a"):
            rule = Rule(name)
            if (off := worst_error(rule, 3, 16, 128)) > 5e-3:
                print(f"{launch} {name}: WRONG, error {off:.2g}", flush=True)
                continue
            for B, H, K in SHAPES:
                seconds = times(rule, B, H, K)[0]
                cut = {"tile": launch.tile, "warps": launch.most_warps, "registers": launch.registers}
                what = {"rule": name, "B, H, K = V": f"{B}, {H}, {K}"}
                share = 8 * B * H * K * K / seconds / copy
                rows.append(cut | what | {"GPU, us": seconds * 1e6, "share of copy": share})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="time other launch configurations")
    only_sweep = parser.parse_args().sweep
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    if only_sweep:
        report("step_sweep", "one token, other ways to cut the work", sweep(copy), copy_TB_per_s=copy / 1e12)
        return
    rows = []
    for B, H, K in SHAPES:
        for name in RULES:
            rule = Rule(name)
            off = worst_error(rule, min(B, 5), H, K)
            replayed, called = times(rule, B, H, K)
            moved = 2 * 4 * K * K * B * H
            rows.append(
                {
                    "rule": name,
                    "B, H, K = V": f"{B}, {H}, {K}",
                    "error in bf16": off,
                    "state, MB": moved / 1e6,
                    "floor, us": moved / copy * 1e6,
                    "GPU, us": replayed * 1e6,
                    "as called, us": called * 1e6,
                    "share of copy": moved / replayed / copy,
                    "launches": launches(rule),
                }
            )
            if not off <= 5e-3:
                raise SystemExit(f"{name} at {B}, {H}, {K}: relative RMS error {off:.2g} against float64")
    report("step", "one token, bfloat16, state in place", rows, copy_TB_per_s=copy / 1e12)


if __name__ == "__main__":
    main()
