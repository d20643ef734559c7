"""Times of the Triton kernels on a GPU, kernel by kernel, and of other ways to launch them.

    python benchmarks/triton_times.py [--rules falcon_1a falcon_3a] [--shapes 8x4096x16x128] [--tune] [--jobs 16]

Everything is compiled first, in many processes; then one call after another is timed, alone on the device: as called
(medians of synchronised calls, the host's part included) and on the GPU (sum of the kernels in a profile). `--tune`
times each launch of a forward and backward again under other options, and compares what it writes with what the shipped
options write; it changes nothing, launch.py is edited by hand.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from falcon_kernels import RULES
from falcon_kernels.launcher import Launcher
from report import report
from rules import OURS, SHAPES, as_called, build, kernel_milliseconds

WITH_TILES = (
    "_pass",
    "_reverse_pass",
    "_carry",
    "_reverse",
    "_read",
    "_solve",
    "_unsolve",
    "_within",
)  # kernels with a tile of V a program
WARPS, STAGES, REGISTERS = ("num_warps", (4, 8)), ("num_stages", (1, 2, 3)), ("maxnreg", (None, 168, 128))
COMMON = dict((WARPS, STAGES, REGISTERS))
# With more stages _chunk_backward writes wrong gradients where it does not read its tiles once (Triton 3.6).
SPACE = {  # bfloat16 tiles of less than 64 columns read past their shared memory where they are right operands
    "_pass": {"BV": (64, 128)} | COMMON,  # of falcon_1 too
    "_reverse_pass": {"BV": (64, 128)} | COMMON,
    "_carry": {"BV": (16, 32, 64, 128)} | COMMON,
    "_reverse": {"BV": (16, 32, 64, 128)} | COMMON,
    "_prepare": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_read": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_gradients": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_chunk_backward": {"BK": (64, 128), "BV": (64, 128), "ONCE": (True, False)} | COMMON | {"num_stages": (1,)},
    "_rates": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_channel_gradients": {"BK": (64, 128)} | COMMON | {"num_stages": (1,)},
    "_key_gradients": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_solve": {"BV": (16, 32), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3)},
    "_unsolve": {"BV": (16, 32), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3)},
    "_within": {"BK": (64, 128), "BV": (64, 128)} | COMMON,
    "_invert": {"BK": (32, 64, 128), "num_warps": (1, 2), "num_stages": (1, 2, 3), "maxnreg": (None, 168, 128)},
    "_add_bound": {"BK": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2), "maxnreg": (None, 128)},
    "_collect": {"BK": (64, 128), "BV": (64, 128), "num_warps": (1, 2), "num_stages": (1,)},
}
# falcon_3's kernels along the blocks of a chunk: with more warps, their narrow tiles would be such right operands. They
# read what they have written, and so have one stage.
BLOCKS = {"BK": (64, 128), "BV": (32, 64, 128), "num_warps": (1, 2), "num_stages": (1,), "maxnreg": (None, 168, 128)}
SPACE_OF_BLOCKS = {
    "_local": BLOCKS,
    "_solutions": BLOCKS,
    "_gradients": BLOCKS | {"num_warps": (2, 4)},
}
KERNELS = list(SPACE | SPACE_OF_BLOCKS)


def calls(rule: str, shape: str):
    """Functions of no arguments: the forward alone, and forward and backward."""
    forward, leaves = build(rule, SHAPES[shape])
    cotangent = torch.randn_like(forward())

    def alone():
        with torch.no_grad():
            forward()

    return alone, lambda: torch.autograd.grad(forward(), leaves, cotangent)


def time_one(rule: str, shape: str) -> tuple[dict[str, object], dict[str, dict[str, float]]]:
    forward, both = calls(rule, shape)
    row: dict[str, object] = {"rule": rule, "shape": shape}
    kernels = {}
    for what, run in (("forward", forward), ("both", both)):
        row[f"{what} called, ms"], row[f"{what} extra MiB"] = as_called(run)
        kernels[what] = kernel_milliseconds(run)
        row[f"{what} GPU, ms"] = sum(kernels[what].values())
    return row, kernels


def launches(both) -> list[tuple]:
    """Kernel, grid, arguments and constants of every launch in one call."""
    found = []
    usual = Launcher.__call__

    def noted(self, *arguments, flags=()):
        found.append((self.kernel, self.grid, arguments, self.constants | dict(zip(self.flags, flags, strict=True))))
        usual(self, *arguments, flags=flags)

    both()
    Launcher.__call__ = noted
    try:
        both()
    finally:
        Launcher.__call__ = usual
    torch.cuda.synchronize()
    return found


def candidates(kernel, grid: tuple[int, ...], constants: dict) -> list[tuple[dict, tuple[int, ...]]]:
    """Other options, and the grid that goes with them; the shipped ones first."""
    name = kernel.__name__
    space = SPACE_OF_BLOCKS[name] if "TILE" in constants and name in SPACE_OF_BLOCKS else SPACE[name]
    found: list[tuple[dict, tuple[int, ...]]] = [({}, grid)]
    for values in product(*space.values()):
        options = dict(zip(space, values, strict=True))
        options |= {n: constants[n] for n in ("BK", "BV") if n in options and options[n] > constants[n[1]]}
        cut = grid
        if options["num_warps"] == 8 and options.get("maxnreg") == 168:  # one program a multiprocessor, as without
            continue
        if "BV" in options and name in WITH_TILES:
            width = constants["V"]
            programs = grid[0] // -(-width // constants["BV"])
            cut = (programs * -(-width // options["BV"]), 1, 1)
        if (options, cut) not in found:
            found.append((options, cut))
    return found


def tune(rule: str, shape: str, names: list[str], part: tuple[int, int] | None) -> None:
    """Prints the best options of every kernel of these names; or compiles a part of the candidates."""
    number, seen = 0, []
    for kernel, grid, arguments, constants in launches(calls(rule, shape)[1]):
        if kernel.fn.__name__ not in names or (kernel, constants) in seen:  # the first of a kernel's parts
            continue
        seen.append((kernel, constants))
        before = [t.clone() if isinstance(t, torch.Tensor) else t for t in arguments]
        shipped, rows = None, []
        for options, cut in candidates(kernel.fn, grid, constants):
            number += 1
            these = {n: c for n, c in (constants | options).items() if c is not None}
            if part:
                if number % part[1] == part[0]:
                    with suppress(Exception):  # said where it is timed
                        kernel.warmup(*arguments, grid=cut, **these)
                continue
            try:
                spent, written = timed(kernel, cut, arguments, before, these)
            except Exception as problem:  # too much shared memory, or what a compiler cannot do
                print(f"{rule} {shape} {kernel.fn.__name__} {options}: {str(problem).splitlines()[0][:80]}")
                continue
            shipped = shipped or written
            off = max((difference(a, b) for a, b in zip(written, shipped, strict=True)), default=0.0)
            rows.append((spent, off, options))
        if rows:
            fastest = sorted(rows, key=lambda row: row[0])[:12]
            best = "; ".join(f"{spent:.3f} ms, off {off:.0e} {options}" for spent, off, options in fastest)
            print(f"{rule} {shape} {kernel.fn.__name__}: shipped {rows[0][0]:.3f} ms; {best}", flush=True)


@torch.no_grad()
def timed(kernel, grid, arguments, before, constants) -> tuple[float, list[torch.Tensor]]:
    """Milliseconds of one launch, and its tensors after the first."""

    def run():
        kernel[grid](*arguments, **constants)

    for t, old in zip(arguments, before, strict=True):
        if isinstance(t, torch.Tensor):
            t.copy_(old)
    run()
    written = [t.clone() for t in arguments if isinstance(t, torch.Tensor)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(4):
        start.record()
        for _ in range(3):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return min(times), written


def difference(have: torch.Tensor, want: torch.Tensor) -> float:
    """Relative RMS difference of what both have filled."""
    if not have.is_floating_point():
        return float(not torch.equal(have, want))
    filled = want.isfinite()
    off = torch.where(filled, have.double() - want.double(), 0.0).norm()
    return (off / torch.where(filled, want.double(), 0.0).norm().clamp_min(1e-30)).item()


def side_by_side(commands: list[list[str]], jobs: int) -> None:
    """This script with each of the arguments, so many at a time and all silent: compilers print what they refuse."""
    running: list[subprocess.Popen] = []
    for command in commands:
        while sum(process.poll() is None for process in running) >= jobs:
            time.sleep(0.1)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running.append(subprocess.Popen([sys.executable, __file__, *command], **quiet))
    for process in running:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", default=list(OURS), choices=RULES)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS, help="to tune")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    pairs = [(rule, shape) for shape in arguments.shapes for rule in arguments.rules]
    if arguments.part:
        if arguments.tune:
            tune(*pairs[0], arguments.kernels, tuple(arguments.part))
        else:
            for run in calls(*pairs[0]):
                run()
        return
    one = [["--rules", rule, "--shapes", shape] for rule, shape in pairs]
    side_by_side([[*command, "--part", "0", "1"] for command in one], arguments.jobs)
    rows, kernels = [], {}
    for rule, shape in pairs:
        row, kernels[f"{rule}@{shape}"] = time_one(rule, shape)
        rows.append(row)
        ours = [f"{n} {t:.3f}" for n, t in kernels[f"{rule}@{shape}"]["both"].items() if n.isidentifier()]
        print(f"{rule} {shape}: " + ", ".join(ours))
        torch.cuda.empty_cache()
    report("triton_times", "bfloat16; the GPU's times are sums over kernels", rows, kernels=kernels)
    if arguments.tune:
        tuned = [[*command, "--tune", "--kernels", *arguments.kernels] for command in one]
        parts = [["--part", str(i), str(arguments.jobs)] for i in range(arguments.jobs)]
        side_by_side([command + part for command in tuned for part in parts], arguments.jobs)
        for rule, shape in pairs:
            tune(rule, shape, arguments.kernels, None)


if __name__ == "__main__":
    main()
