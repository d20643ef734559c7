"""Speed of the rules beside their nearest peers, forward and backward in bfloat16.

    python benchmarks/rules.py scalar_rules [--wait SECONDS]    falcon_1, 1A and 3A
    python benchmarks/rules.py channel_and_window               falcon_2, 2A and 3, and falcon_1 to compare
    python benchmarks/rules.py scalar_rules --table             of results/scalar_rules.json, as in kernels/README.md

Every measurement has a process of its own. All warm up side by side, each compiling what it needs; then they are timed
one at a time, alone on the device. Two figures each: time as called (medians of synchronised calls, host included) and
GPU time (sum of the kernels in a profile). Peers need the package flash-linear-attention; what fails is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from report import RESULTS, report, wait_for_turn


class Shape(NamedTuple):
    """Inputs [batch, length, heads, width], or one row of that many tokens packed from `documents` documents."""

    batch: int
    length: int
    heads: int
    width: int
    documents: int = 0

    def bounds(self) -> torch.Tensor | None:
        """Document bounds of uneven lengths, int64 [documents + 1]."""
        if not self.documents:
            return None
        generator = torch.Generator().manual_seed(0)
        tokens = self.batch * self.length
        cuts = torch.randperm(tokens - 1, generator=generator)[: self.documents - 1].sort().values + 1
        return torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).cuda()


SHAPES = {
    "32x1024x12x64": Shape(32, 1024, 12, 64),
    "8x4096x16x128": Shape(8, 4096, 16, 128),
    "1x32768x16x128": Shape(1, 32768, 16, 128),
    "4x2048x4x256": Shape(4, 2048, 4, 256),
    "16x2048x16x64 in 64 documents": Shape(16, 2048, 16, 64, 64),
}
COPY_BYTES_PER_SECOND = 4.3e12  # device-to-device copy on an H200, bytes read and written
OURS = ("falcon_1", "falcon_1a", "falcon_3a")
BESIDE = {
    "falcon_1": "chunk_delta_rule",
    "falcon_1a": "chunk_simple_gla",
    "falcon_3a": "falcon_1a",
    "falcon_2": "chunk_kda",
    "falcon_2a": "chunk_gla",
    "falcon_3": "chunk_gated_delta_product",
}
WORK = {
    "scalar_rules": (*OURS, "chunk_delta_rule", "chunk_simple_gla", "sdpa"),
    "channel_and_window": (
        "falcon_1",
        *(peer for rule in ("falcon_2", "falcon_2a", "falcon_3") for peer in (rule, BESIDE[rule])),
    ),
}


def compile_variants_side_by_side() -> None:
    """Has Triton's autotuner compile all variants of a kernel at once before it times them one after another."""
    from falcon_kernels.launcher import compiling
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench

    def compile_then_bench(self, *args, config, **options):
        if getattr(self, "compiled_for", None) is not self.nargs:
            self.compiled_for = self.nargs
            with compiling():
                for variant in self.prune_configs(options):
                    self.fn.run(*args, **options | {"warmup": True} | variant.all_kwargs())
        return bench(self, *args, config=config, **options)

    Autotuner._bench = compile_then_bench


def build(work: str, shape: Shape):
    """A function of no arguments and its differentiable inputs."""
    B, T, H, K, documents = shape
    bounds = shape.bounds()
    if documents:
        B, T = 1, B * T
    torch.manual_seed(0)

    def normal(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device="cuda", dtype=torch.float32).to(dtype)

    q, k, v = (normal(B, T, H, K).requires_grad_() for _ in range(3))
    rates = (B, T, H, K) if work in ("falcon_2", "falcon_2a") else (B, T, H)
    rate = torch.sigmoid(normal(*rates, dtype=torch.float32)).requires_grad_()
    if work.startswith("falcon"):
        from falcon_kernels import Rule, falcon_attention

        ridge = (0.02 * torch.rand(B, T, H, device="cuda")).requires_grad_()
        options = {"rule": Rule(work), "impl": "triton", "cu_seqlens": bounds}
        return lambda: falcon_attention(q, k, v, rate, ridge, **options).output, [q, k, v, rate, ridge]
    if work == "sdpa":
        if documents:
            raise ValueError("no causal attention over packed documents is measured")
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]
    if work == "chunk_delta_rule":
        from fla.ops.delta_rule import chunk_delta_rule

        k = torch.nn.functional.normalize(k.detach().float(), dim=-1).bfloat16().requires_grad_()
        rate = rate.detach().bfloat16().requires_grad_()
        return lambda: chunk_delta_rule(q, k, v, rate, scale=1.0, cu_seqlens=bounds)[0], [q, k, v, rate]
    compile_variants_side_by_side()
    import fla.ops.common.chunk_o

    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True  # its backward refuses this Triton on Hopper: times only
    options = {"scale": 1.0, "cu_seqlens": bounds}
    channels = (K,) if work in ("chunk_gla", "chunk_kda") else ()  # the decays of both are per channel of the keys
    decay = torch.nn.functional.logsigmoid(normal(B, T, H, *channels, dtype=torch.float32) + 4).requires_grad_()
    if work == "chunk_simple_gla":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda: chunk_simple_gla(q, k, v, decay, **options)[0], [q, k, v, decay]
    if work == "chunk_gla":
        from fla.ops.gla import chunk_gla

        return lambda: chunk_gla(q, k, v, decay, **options)[0], [q, k, v, decay]
    rate = rate.detach().bfloat16().requires_grad_()
    if work == "chunk_kda":
        from fla.ops.kda import chunk_kda

        k = torch.nn.functional.normalize(k.detach().float(), dim=-1).bfloat16().requires_grad_()
        return lambda: chunk_kda(q, k, v, decay, rate, **options)[0], [q, k, v, decay, rate]
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    k = torch.nn.functional.normalize(normal(B, 4 * T, H, K, dtype=torch.float32), dim=-1).bfloat16().requires_grad_()
    v = normal(B, 4 * T, H, K).requires_grad_()  # four steps a token, which is the rank of falcon_3's window
    rate = torch.sigmoid(normal(B, 4 * T, H, dtype=torch.float32)).bfloat16().requires_grad_()
    leaves = [q, k, v, decay, rate]
    return lambda: chunk_gated_delta_product(q, k, v, decay, rate, num_householder=4, **options)[0], leaves


def as_called(run, repeats: int = 30) -> tuple[float, float]:
    """Median milliseconds of synchronised calls, and the most MiB that they take beyond what is there."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, (torch.cuda.max_memory_allocated() - before) / 2**20


def kernel_milliseconds(run, repeats: int = 5) -> dict[str, float]:
    """Time on the GPU of each kernel in one call, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return {e.key: e.self_device_time_total / repeats / 1e3 for e in events if e.self_device_time_total > 0}


def worker(work: str, shape_name: str, folder: Path) -> None:
    """Warms up, waits for its turn, measures, and writes a JSON file."""
    start = time.perf_counter()
    forward, leaves = build(work, SHAPES[shape_name])
    cotangent = torch.randn_like(forward())

    def both():
        torch.autograd.grad(forward(), leaves, cotangent)

    both()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        both()
    torch.cuda.synchronize()
    output = folder / f"{work}@{shape_name}.json"
    wait_for_turn(output)
    result = {"first call, s": first}
    for what, run in (("forward", forward), ("both", both)):
        result[f"{what}, ms"], result[f"{what}, MiB"] = as_called(run)
        kernels = kernel_milliseconds(run)
        result[f"{what}, GPU ms"], result[f"{what}, kernels"] = sum(kernels.values()), kernels
    output.write_text(json.dumps(result))


# What a kernel reads and writes at least, forward and backward: tensors [B, T, H, K] and a memory [K, V] for each
# chunk of 64 tokens, in bfloat16, and inverses [64, 64] in float32, of which blocks above the diagonal are not stored.
# Gains and running log decays of channels are in float32 and count as two tensors each; falcon_2's products of keys in
# blocks of 16 tokens are a quarter of an inverse. falcon_3's chunks have 29 tokens and 32 pairs, with a row of each in
# what `_local` makes, and 29 x 4 rows are solved; three of the pairs are of two chunks.
PAIRS, MEMORIES, EDGES = 32 / 29, 64 / 29, 3 / 29
ADDITIVE = {"_forward": (1, 0, 0), "_pass": (4, 1, 0), "_reverse_pass": (2, 1, 0), "_chunk_backward": (7, 2, 0)}
CHANNEL = {"_rates": (5, 0, 0), "_read": (8, 1, 0), "_across": (0, 2, 0), "_key_gradients": (6, 2, 0)}
MOVED: dict[str, dict[str, tuple[float, float, float]]] = {
    "falcon_1a": ADDITIVE,
    "falcon_3a": ADDITIVE,
    "falcon_1": {
        "_invert": (1, 0, 10 / 16),
        "_pass": (5, 1, 10 / 16),  # where sequences fill the card
        "_reverse_pass": (4, 1, 10 / 16),
        "_prepare": (9, 0, 2 * 10 / 16),  # elsewhere: W and U, and again W and P' dO
        "_carry": (4, 1, 0),
        "_read": (4, 1, 0),
        "_reverse": (6, 1, 0),
        "_gradients": (8, 2, 0),  # elsewhere the inverses too
    },
    "falcon_2a": CHANNEL
    | {"_pass": (6, 1, 0), "_reverse_pass": (4, 1, 0), "_read": (14, 2, 0), "_channel_gradients": (13, 0, 0)},
    "falcon_2": CHANNEL
    | {
        "_rates": (5, 0, 1 / 4),
        "_solve": (7, 1, 1 / 4),
        "_within": (6, 0, 0),
        "_unsolve": (9, 1, 1 / 4),
        "_channel_gradients": (15, 0, 0),
        "_key_gradients": (7, 2, 0),
    },
    "falcon_3": {
        "_forward": (1, 0, 0),
        "_local": (3 + 2 * (1 + PAIRS), 0, 0),
        "_carry": (2 + 2 * (1 + PAIRS), MEMORIES, 0),
        "_reverse": (3 + PAIRS, MEMORIES, 0),
        "_solutions": (14, 2 * MEMORIES, 0),
        "_gradients": (14 + 2 * EDGES, 2 * MEMORIES, 0),
        "_collect": (6 * EDGES, 0, 0),
    },
}


def floor_ms(shape: Shape, moved: tuple[float, float, float]) -> float:
    """Milliseconds to move so many tensors, memories of all chunks, and inverses."""
    B, T, H, K, _ = shape
    tensors, memories, inverses = moved
    return B * T * H * (tensors * 2 * K + memories * 2 * K * K / 64 + inverses * 4 * 64) / COPY_BYTES_PER_SECOND * 1e3


def whole_floor(work: str, shape: Shape, kernels: dict[str, float]) -> float:
    """Of all those `kernels` of one of ours that ran; else 0."""
    return sum(floor_ms(shape, moved) for kernel, moved in MOVED.get(work, {}).items() if kernel in kernels)


def table(results: dict) -> str:
    """Markdown: times of a forward and backward with ratios, and of each kernel of ours beside its floor."""
    rows = {(row["shape"], row["work"]): row for row in results["rows"]}
    lines = ["| B x T x H x K | | GPU, ms | as called, ms | extra MiB | beside |", "|---|---|---|---|---|---|"]
    for (shape, work), row in rows.items():
        beside = ""
        if (shape, BESIDE.get(work)) in rows:
            peer = rows[shape, BESIDE[work]]
            gpu, called, extra = (peer[f"both, {n}"] / row[f"both, {n}"] for n in ("GPU ms", "ms", "MiB"))
            beside = f"{gpu:.2f} and {called:.2f} times as fast as `{peer['work']}`, {1 / extra:.2f} of its memory"
        name = work if work.startswith("falcon") else f"`{work}`"
        line = f"| {shape} | {name} | {row['both, GPU ms']:.2f} | {row['both, ms']:.2f} | {row['both, MiB']:.0f} "
        lines.append(line + f"| {beside} |")
    lines += ["", "| kernel, ms: floor, came | " + " | ".join(SHAPES) + " |", "|---" * (len(SHAPES) + 1) + "|"]
    for work, kernels in MOVED.items():
        for kernel, moved in kernels.items():
            runs = [results["kernels"].get(f"{work}@{shape}", {}).get("both", {}).get(kernel) for shape in SHAPES]
            if not any(runs):
                continue
            cells = (
                "" if came is None else f"{floor_ms(SHAPES[shape], moved):.3f}, {came:.3f}"
                for shape, came in zip(SHAPES, runs, strict=True)
            )
            lines.append(f"| {work} `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="scalar_rules", choices=WORK, help="what to measure")
    parser.add_argument("--wait", type=float, default=300, help="seconds to wait for a process to warm up")
    parser.add_argument("--after", type=int, nargs="*", default=[], help="processes that may run while these warm up")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--work", nargs="*", help="rules and peers, if not all")
    parser.add_argument("--table", action="store_true", help="prints that of the last results")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads((RESULTS / f"{arguments.name}.json").read_text())))
        return
    if arguments.worker:
        worker(*arguments.worker[:2], Path(arguments.worker[2]))
        return
    rows, kernels = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = {
            f"{work}@{shape}": subprocess.Popen(
                [sys.executable, __file__, "--worker", work, shape, name],
                stderr=(folder / f"{work}@{shape}.log").open("w"),
            )
            for shape in arguments.shapes
            for work in arguments.work or WORK[arguments.name]
        }
        deadline = time.monotonic() + arguments.wait
        waiting = set(running)
        while (waiting or any(alive(n) for n in arguments.after)) and time.monotonic() < deadline:
            waiting = {n for n in waiting if not (folder / f"{n}.ready").exists() and running[n].poll() is None}
            time.sleep(0.2)
        for item in waiting:  # nothing else may use the device from here on
            running[item].kill()
        for item, process in running.items():
            work, shape = item.split("@")
            if item not in waiting and (folder / f"{item}.ready").exists():
                (folder / f"{item}.go").touch()
                process.wait()
            process.kill()
            result = folder / f"{item}.json"
            if result.exists():
                found = json.loads(result.read_text())
                floor = whole_floor(work, SHAPES[shape], found["both, kernels"])
                row = {"shape": shape, "work": work, "both, floor ms": floor} | found
                kernels[item] = {what: row.pop(f"{what}, kernels") for what in ("forward", "both")}
                rows.append(row)
            else:
                print(f"{item} was not measured: {(folder / f'{item}.log').read_text()[-600:]}")
    report(arguments.name, "B x T x H x K, bfloat16; floor: bytes of our kernels at 4.3 TB/s", rows, kernels=kernels)


if __name__ == "__main__":
    main()
