"""The Triton kernels on a GPU: errors against float64, then times beside the PyTorch form and the bytes' floor.

    python benchmarks/triton_check.py [--rules falcon_1a falcon_3a] [--errors-only] [--tune]

Two times are given: of the GPU alone (replay of a CUDA graph) and as called, with the host's part. The floor is every
input read and every result written once at the bandwidth of a large copy. Exits with 1 where an error is too large.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from falcon_kernels import FalconState, Rule, falcon_attention, launch, triton_api, triton_attention
from falcon_kernels.launch import Config

RESULT = Path(__file__).parent / "results" / "triton_scalar_rules.json"
BYTES_PER_SECOND = 4.3e12
CHECKED = ((2, 1000, 4, 64), (1, 4096, 2, 128), (2, 65, 2, 256), (2, 130, 3, 96))
TIMED = ((32, 1024, 12, 64), (8, 4096, 16, 128), (1, 32768, 16, 128), (4, 2048, 4, 256))
BOUNDS = {torch.bfloat16: (5e-3, 1e-2), torch.float32: (1e-5, 5e-5)}  # output, gradients
BOUNDED = ((4, None), (4, 168), (4, 128), (8, None), (8, 128))  # warps, and registers of a thread
CANDIDATES = {
    "_pass": [Config(v, w, s, registers=r) for v in (32, 64, 128) for w, r in BOUNDED for s in (1, 2, 3)],
    "_reverse_pass": [Config(v, w, s) for v in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4)],
    "_chunk_backward": [
        Config(v, w, s, k, r) for v in (32, 64, 128) for k in (64, 128) for w, r in BOUNDED for s in (1, 2)
    ],
}
COMPILERS = 12  # processes
NAMES = ("q", "k", "v", "gain", "ridge")


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, gain, ridge: RMS-normalized features, decays of a few to a few hundred tokens."""
    B, T, H, K = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, device="cuda")

    q, k = (torch.nn.functional.rms_norm(normal(B, T, H, K), (K,)).to(dtype) for _ in range(2))
    gain, ridge = 2 * torch.sigmoid(normal(B, T, H)), torch.sigmoid(normal(B, T, H) - 3)
    return [t.requires_grad_() for t in (q, k, normal(B, T, H, K).to(dtype), gain, ridge)]


def state_of(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype) -> FalconState:
    B, _, H, K = shape
    state = FalconState.zeros(rule, B, H, K, K, dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def fill(t):
        if t.dtype == torch.bool:
            return torch.ones_like(t)
        return torch.randn(t.shape, generator=generator, device="cuda").to(t.dtype).requires_grad_()

    return state.map(fill)


def results(rule: Rule, impl: str, given: list, state: FalconState, dtype: torch.dtype | None = None) -> dict:
    """Output, memory and all gradients, by name; everything converted to `dtype` first."""

    def convert(t):
        t = t.detach()
        return t.to(dtype or t.dtype).requires_grad_() if t.is_floating_point() else t

    given, state = [convert(t) for t in given], state.map(convert)
    carried = {f: t for f, t in zip(FalconState._fields, state, strict=True) if t is not None and t.is_floating_point()}
    out = falcon_attention(*given, rule=rule, initial_state=state, output_final_state=True, impl=impl)
    generator = torch.Generator("cuda").manual_seed(2)
    cotangents = [
        torch.randn(t.shape, generator=generator, device="cuda").bfloat16().to(t.dtype)
        for t in (out.output, out.final_state.memory)
    ]
    leaves = dict(zip(NAMES, given, strict=True)) | carried
    grads = torch.autograd.grad((out.output, out.final_state.memory), list(leaves.values()), cotangents)
    grads = {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {"output": out.output.detach(), "memory": out.final_state.memory.detach()} | grads


def errors(have: dict, want: dict) -> dict[str, float]:
    found = {}
    for name, truth in want.items():
        off = (have[name].double() - truth).norm() / truth.norm().clamp_min(1e-300)
        found[name] = off.item() if torch.isfinite(have[name]).all() else float("inf")
    return found


def check(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, impl: str = "triton") -> dict:
    given, state = inputs(shape, dtype), state_of(rule, shape, dtype)
    want = results(rule, "torch", given, state, torch.float64)
    first, second = (results(rule, impl, given, state) for _ in range(2))
    ours, torchs = errors(first, want), errors(results(rule, "torch", given, state), want)
    forward, gradient = BOUNDS[dtype]
    bad = [n for n, e in ours.items() if not e <= (gradient if n.startswith("d") else forward)]
    return {
        "rule": rule.name,
        "timing": rule.timing,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "output": ours["output"],
        "memory": ours["memory"],
        "worst gradient": max(((e, n) for n, e in ours.items() if n.startswith("d")), key=lambda p: p[0]),
        "over torch": max(ours[n] / torchs[n] for n in ("output", "dq", "dk", "dv")),
        "same bits again": all(torch.equal(first[n], second[n]) for n in first),
        "too large": bad,
        "errors": ours,
    }


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


def called_with(name: str, shape: tuple[int, ...], index: int, config: Config | None) -> tuple:
    """A forward and backward under another configuration of one kernel, and what takes that back."""
    key = ("large", 2, triton.next_power_of_2(shape[3]))
    shipped = launch.TABLE[key]
    if config is not None:
        launch.TABLE[key] = (*shipped[:index], config, *shipped[index + 1 :])
    triton_attention.plan_of.cache_clear()
    given = inputs(shape, torch.bfloat16)
    cotangent = torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16()

    def both():
        return torch.autograd.grad(falcon_attention(*given, rule=Rule(name), impl="triton").output, given, cotangent)

    def take_back():
        launch.TABLE[key] = shipped
        triton_attention.plan_of.cache_clear()

    return both, take_back


def compile_candidate(name: str, shape: tuple[int, ...], index: int, config: Config) -> None:
    """Leaves the kernel in Triton's cache on disk."""
    both, take_back = called_with(name, shape, index, config)
    try:
        both()
        torch.cuda.synchronize()
    except Exception as problem:
        print(f"  {config}: {str(problem)[:80]}", flush=True)
    take_back()


def tune(name: str) -> list[dict]:
    """GPU times of other launch configurations, each checked against the shipped one; the table is left as it was."""
    rows = []
    for shape in TIMED:
        candidates = [
            (index, kernel, config)
            for index, (kernel, configs) in enumerate(CANDIDATES.items())
            for config in configs
            if config.value_tile <= shape[3] and (config.key_tile <= shape[3] or config.key_tile == 256)
        ]
        with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
            jobs = [pool.submit(compile_candidate, name, shape, index, config) for index, _, config in candidates]
            broken = sum(job.exception() is not None for job in jobs)
        print(f"{name} {shape}: {len(jobs)} candidates compiled, {broken} processes failed", flush=True)
        both, take_back = called_with(name, shape, 0, None)
        want = both()
        take_back()
        for index, kernel, config in candidates:
            both, take_back = called_with(name, shape, index, config)
            row = {"rule": name, "shape": shape, "kernel": kernel, **config._asdict()}
            try:
                row["off"] = max(((a - b).norm() / b.norm()).item() for a, b in zip(both(), want, strict=True))
                row["ms"] = kernel_times(both)[kernel]
            except Exception as problem:
                row["failed"] = str(problem)[:80]
            take_back()
            rows.append(row)
            found = f"{row['ms']:.4f} ms off {row['off']:.1e}" if "ms" in row else row["failed"]
            print(f"{name} {shape} {kernel} {tuple(config)} {found}", flush=True)
        for kernel in CANDIDATES:
            timed = sorted((r["ms"], str([r[f] for f in Config._fields])) for r in rows
                           if "ms" in r and r["kernel"] == kernel and r["shape"] == shape)  # fmt: skip
            print(f"best of {name} {shape} {kernel}: {timed[:3]}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=list(triton_api.RULES))
    parser.add_argument("--errors-only", action="store_true")
    parser.add_argument("--tune", action="store_true", help="also time other launch configurations")
    options = parser.parse_args()
    begun = time.perf_counter()

    checks = []
    for name in options.rules:
        for shape in CHECKED:
            if name == "falcon_1" and shape[3] > triton_api.LARGEST_RESIDUAL_WIDTH:
                continue
            for dtype in BOUNDS:
                for timing in ("read_after_write", "read_before_write") if shape[1] == 65 else ("read_after_write",):
                    checks.append(check(Rule(name, timing=timing), shape, dtype))
                    c = checks[-1]
                    verdict = f"TOO LARGE: {c['too large']}" if c["too large"] else "ok"
                    print(
                        f"{name:10s} {shape!s:20s} {c['dtype']:9s} output {c['output']:.1e} memory {c['memory']:.1e} "
                        f"{c['worst gradient'][1]} {c['worst gradient'][0]:.1e} over torch {c['over torch']:.2f} "
                        f"bits {'same' if c['same bits again'] else 'DIFFER'} {verdict}",
                        flush=True,
                    )
    print(f"errors done after {time.perf_counter() - begun:.0f} s")

    times = []
    for name in () if options.errors_only else options.rules:
        for shape in TIMED:
            row = time_shape(Rule(name), shape, with_torch=time.perf_counter() - begun < 150)
            times.append(row)
            print("; ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            torch.cuda.empty_cache()

    tuned = [row for name in options.rules if options.tune for row in tune(name)]

    RESULT.parent.mkdir(exist_ok=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes per second": BYTES_PER_SECOND}
    RESULT.write_text(
        json.dumps({"environment": facts, "errors": checks, "times": times, "tuning": tuned}, indent=1) + "\n"
    )
    print(f"written to {RESULT} after {time.perf_counter() - begun:.0f} s")
    return int(any(c["too large"] or not c["same bits again"] for c in checks))


if __name__ == "__main__":
    sys.exit(main())
