"""Speed of the scalar-rate rules beside their nearest peers, forward and backward in bfloat16.

    python benchmarks/scalar_rules.py [--wait SECONDS]

Every measurement has a process of its own. All warm up side by side, each compiling what it needs; then they are timed
one at a time, alone on the device. Two figures each: time as called (medians of synchronised calls, host included) and
GPU time (sum of the kernels in a profile). Peers need the package flash-linear-attention; what fails is left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from report import report

SHAPES = {
    "32x1024x12x64": (32, 1024, 12, 64),
    "8x4096x16x128": (8, 4096, 16, 128),
    "1x32768x16x128": (1, 32768, 16, 128),
}
COPY_BYTES_PER_SECOND = 4.3e12  # device-to-device copy on an H200, bytes read and written
OURS = ("falcon_1", "falcon_1a", "falcon_3a")
PEERS = ("chunk_delta_rule", "chunk_simple_gla", "sdpa")


def build(work: str, shape: tuple[int, int, int, int]):
    """A function of no arguments and its differentiable inputs."""
    B, T, H, K = shape
    torch.manual_seed(0)

    def normal(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device="cuda", dtype=torch.float32).to(dtype)

    q, k, v = (normal(B, T, H, K).requires_grad_() for _ in range(3))
    rate = torch.sigmoid(normal(B, T, H, dtype=torch.float32)).requires_grad_()
    if work in OURS:
        from falcon_kernels import Rule, falcon_attention

        ridge = (0.02 * torch.rand(B, T, H, device="cuda")).requires_grad_()
        rule = Rule(work)
        return lambda: falcon_attention(q, k, v, rate, ridge, rule=rule, impl="triton").output, [q, k, v, rate, ridge]
    if work == "sdpa":
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]
    if work == "chunk_delta_rule":
        from fla.ops.delta_rule import chunk_delta_rule

        k = torch.nn.functional.normalize(k.detach().float(), dim=-1).bfloat16().requires_grad_()
        return lambda: chunk_delta_rule(q, k, v, rate, scale=1.0)[0], [q, k, v, rate]
    from fla.ops.simple_gla import chunk_simple_gla

    decay = torch.nn.functional.logsigmoid(normal(B, T, H, dtype=torch.float32) + 4).requires_grad_()
    return lambda: chunk_simple_gla(q, k, v, decay, scale=1.0)[0], [q, k, v, decay]


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
    name = f"{work}@{shape_name}"
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.05)
    result = {"first call, s": first}
    for what, run in (("forward", forward), ("both", both)):
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = []
        for _ in range(30):
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        result[f"{what}, ms"] = statistics.median(times) * 1e3
        result[f"{what}, MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                run()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        result[f"{what}, GPU ms"] = sum(e.self_device_time_total for e in kernels) / 5e3
    (folder / f"{name}.json").write_text(json.dumps(result))


def floor_ms(shape: tuple[int, int, int, int]) -> float:
    """Time to read q, k, v, gain and ridge and to write the output once, forward."""
    B, T, H, K = shape
    return B * T * H * (4 * 2 * K + 8) / COPY_BYTES_PER_SECOND * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wait", type=float, default=300, help="seconds to wait for a process to warm up")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--work", nargs="*", default=[*OURS, *PEERS])
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker[:2], Path(arguments.worker[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = {
            f"{work}@{shape}": subprocess.Popen(
                [sys.executable, __file__, "--worker", work, shape, name],
                stderr=(folder / f"{work}@{shape}.log").open("w"),
            )
            for shape in arguments.shapes
            for work in arguments.work
        }
        deadline = time.monotonic() + arguments.wait
        waiting = set(running)
        while waiting and time.monotonic() < deadline:
            waiting = {n for n in waiting if not (folder / f"{n}.ready").exists() and running[n].poll() is None}
            time.sleep(0.2)
        for item, process in running.items():
            work, shape = item.split("@")
            if (folder / f"{item}.ready").exists():
                (folder / f"{item}.go").touch()
                process.wait()
            process.kill()
            result = folder / f"{item}.json"
            if result.exists():
                rows.append(
                    {
                        "shape": shape,
                        "work": work,
                        "floor, ms": floor_ms(SHAPES[shape]),
                        **json.loads(result.read_text()),
                    }
                )
            else:
                print(f"{item} was not measured: {(folder / f'{item}.log').read_text()[-600:]}")
    report("scalar_rules", "B x T x H x K, bfloat16; floor: bytes of the forward at 4.3 TB/s", rows)


if __name__ == "__main__":
    main()
