"""Times of the Triton kernels on a GPU beside the PyTorch form and the bytes' floor.

    python benchmarks/triton_times.py [--rules falcon_1a falcon_3a] [--tune]

Two times are given: of the GPU alone (replay of a CUDA graph) and as called, with the host's part. The floor is every
input read and every result written once at the bandwidth of a large copy.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from falcon_kernels import Rule, falcon_attention, launch, triton_api, triton_attention
from falcon_kernels.launch import Config

RESULT = Path(__file__).parent / "results" / "triton_scalar_rules.json"
BYTES_PER_SECOND = 4.3e12
TIMED = ((32, 1024, 12, 64), (8, 4096, 16, 128), (1, 32768, 16, 128))
CANDIDATES = [Config(tile, warps, stages) for tile in (32, 64, 128) for warps in (4, 8) for stages in (1, 2, 3)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, gain, ridge: RMS-normalized features, decays of a few to a few hundred tokens."""
    B, T, H, K = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, device="cuda")

    q, k = (torch.nn.functional.rms_norm(normal(B, T, H, K), (K,)).to(dtype) for _ in range(2))
    gain, ridge = 2 * torch.sigmoid(normal(B, T, H)), torch.sigmoid(normal(B, T, H) - 3)
    return [t.requires_grad_() for t in (q, k, normal(B, T, H, K).to(dtype), gain, ridge)]


def milliseconds(run, repeats: int = 20) -> float:
    """Median time as called."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_milliseconds(run) -> float | None:
    """Median time of the GPU alone, or None where the work cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return milliseconds(graph.replay)
    except RuntimeError as problem:
        print(f"  no graph: {str(problem).splitlines()[0][:120]}")
        torch.cuda.synchronize()
        return None


def kernel_times(run) -> dict[str, float]:
    """Milliseconds of each kernel in one call."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times = {e.key[:60]: e.device_time_total / 1e3 for e in profile.key_averages() if e.device_time_total > 0}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:14])


def time_shape(rule: Rule, shape: tuple[int, ...], with_torch: bool) -> dict:
    B, T, H, K = shape
    given = inputs(shape, torch.bfloat16)
    cotangent = torch.randn(B, T, H, K, device="cuda").bfloat16()

    def forward(impl):
        with torch.no_grad():
            return falcon_attention(*given, rule=rule, impl=impl).output

    def both(impl):
        return torch.autograd.grad(falcon_attention(*given, rule=rule, impl=impl).output, given, cotangent)

    start = time.perf_counter()
    both("triton")
    torch.cuda.synchronize()
    row = {"rule": rule.name, "shape": shape, "first call, s": time.perf_counter() - start}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both("triton")
    torch.cuda.synchronize()
    row["peak extra, MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    number = B * T * H * K * 2
    for name, run, tensors in (("forward", forward, 4), ("both", both, 11)):
        floor = (tensors * number + B * T * H * 8 * (1 if name == "forward" else 3)) / BYTES_PER_SECOND * 1e3
        as_called, alone = (measure(partial(run, "triton")) for measure in (milliseconds, graph_milliseconds))
        row |= {f"{name}, ms": alone, f"{name} as called, ms": as_called, f"{name} floor, ms": floor}
        row[f"{name} over floor"] = (alone or as_called) / floor
        if with_torch:
            try:
                theirs = milliseconds(partial(run, "torch"), repeats=5)
                row |= {f"{name} torch, ms": theirs, f"{name} torch over ours": theirs / as_called}
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                row[f"{name} torch, ms"] = None
    row["kernels"] = kernel_times(lambda: both("triton"))
    return row


def tune(name: str) -> list[dict]:
    """GPU times of other launch configurations, each checked against the shipped one; the table is left as it was."""
    rows = []
    for shape in TIMED:
        key = ("large", 2, shape[3])
        shipped = launch.TABLE[key]
        given = inputs(shape, torch.bfloat16)
        cotangent = torch.randn(*shape, device="cuda").bfloat16()

        def both(given=given, cotangent=cotangent):
            return torch.autograd.grad(
                falcon_attention(*given, rule=Rule(name), impl="triton").output, given, cotangent
            )

        want = both()
        for index, kernel in enumerate(("_pass", "_reverse_pass", "_chunk_backward")):
            for config in CANDIDATES:
                if config.value_tile > shape[3]:
                    continue
                launch.TABLE[key] = (*shipped[:index], config, *shipped[index + 1 :])
                triton_attention.plan_of.cache_clear()
                try:
                    off = max(((a - b).norm() / b.norm()).item() for a, b in zip(both(), want, strict=True))
                    times = kernel_times(both)
                    spent = sum(t for n, t in times.items() if n == kernel)
                    row = {"shape": shape, "kernel": kernel, **config._asdict(), "ms": spent, "off": off}
                    row["shipped"] = config == shipped[index]
                except Exception as problem:
                    row = {"shape": shape, "kernel": kernel, **config._asdict(), "failed": str(problem)[:80]}
                rows.append({"rule": name, **row})
                print(rows[-1], flush=True)
        launch.TABLE[key] = shipped
        triton_attention.plan_of.cache_clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=list(triton_api.RULES))
    parser.add_argument("--tune", action="store_true", help="also time other launch configurations")
    options = parser.parse_args()
    begun = time.perf_counter()

    times = []
    for name in options.rules:
        for shape in TIMED:
            row = time_shape(Rule(name), shape, with_torch=time.perf_counter() - begun < 150)
            times.append(row)
            print("; ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            torch.cuda.empty_cache()

    tuned = [row for name in options.rules if options.tune for row in tune(name)]

    RESULT.parent.mkdir(exist_ok=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes per second": BYTES_PER_SECOND}
    RESULT.write_text(json.dumps({"environment": facts, "times": times, "tuning": tuned}, indent=1) + "\n")
    print(f"written to {RESULT} after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
