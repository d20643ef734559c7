"""Time on the GPU of a sum of hidden states and its norm, forward and backward, beside their bytes.

    python benchmarks/add_norm.py                             # the table, written to results/add_norm.json
    python benchmarks/add_norm.py --tune [--shapes 32768x768] # other launches, printed only

As under bfloat16 autocast: x and weight are float32, h and the norm bfloat16. `norm` is without h. GPU time is the sum
of the kernels in a profile, the backward's with the reduction of the weight's gradient; time as called is the median of
synchronised calls. `torch` are the plain operations.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch
from falcon_kernels import launch, norm, triton_norm
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from report import report
from rules import COPY_BYTES_PER_SECOND, as_called, kernel_milliseconds

SHAPES = {  # rows, width
    "32768x768": (32768, 768),
    "32768x1024": (32768, 1024),
    "32768x2048": (32768, 2048),
    "8192x4096": (8192, 4096),
    "8192x8192": (8192, 8192),
}
BYTES = {"sum and norm": (12, 16), "norm": (6, 14)}  # of a number: forward, backward
TILES, WARPS = (1024, 2048, 4096), (8, 16, 24, 32, 48)  # numbers of a program, and warps of a multiprocessor


def works(name: str):
    """What is computed, its forward, and the same with the backward, as functions of no arguments."""
    rows, width = SHAPES[name]
    torch.manual_seed(0)
    x = torch.randn(1, rows, width, device="cuda").requires_grad_()
    h = torch.randn_like(x, dtype=torch.bfloat16).requires_grad_()
    module = nn.RMSNorm(width, eps=1e-6).cuda()
    along = torch.randn_like(x), torch.randn_like(h)

    def pair(branch: Tensor | None):
        def forward():
            with torch.autocast("cuda", torch.bfloat16):
                return norm.add_norm(x, branch, module, torch.bfloat16)

        def both():
            leaves = [t for t in (x, branch, module.weight) if t is not None]
            return torch.autograd.grad(forward(), leaves, along)

        return forward, both

    return {"sum and norm": pair(h), "norm": pair(None)}


def milliseconds(forward, both) -> tuple[float, float]:
    """Of the forward, and of the backward alone."""
    with torch.no_grad():
        ahead = sum(kernel_milliseconds(forward).values())
    return ahead, sum(kernel_milliseconds(both).values()) - ahead


def floors(name: str, what: str) -> tuple[float, float]:
    rows, width = SHAPES[name]
    return tuple(count * rows * width / COPY_BYTES_PER_SECOND * 1e3 for count in BYTES[what])


def measure(name: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    fuses = norm._fuses_sum
    for form in ("triton", "torch"):
        norm._fuses_sum = fuses if form == "triton" else lambda *given: False
        for what, (forward, both) in works(name).items():
            row: dict[str, object] = {"rows x width": name, "": what, "form": form}
            row["forward floor, ms"], row["backward floor, ms"] = floors(name, what)
            row["forward GPU, ms"], row["backward GPU, ms"] = milliseconds(forward, both)
            row["both called, ms"], row["both extra MiB"] = as_called(both)
            rows.append(row)
    norm._fuses_sum = fuses
    return rows


def tune(name: str) -> None:
    """Prints the GPU time of each launch; all compute the same."""
    shipped = launch.SUM_TILE, launch.at_once
    for tile, resident in product(TILES, WARPS):
        launch.SUM_TILE = tile
        launch.at_once = lambda device, warps, most=resident: launch.card(device)[1] * max(1, most // warps)
        triton_norm.sum_plan_of.cache_clear()
        for what, pair in works(name).items():
            times = ", ".join(f"{1e3 * time:.1f}" for time in milliseconds(*pair))
            floor = ", ".join(f"{1e3 * time:.1f}" for time in floors(name, what))
            print(f"{name} {what}: tile {tile}, {resident} warps at once: {times} us, floor {floor} us", flush=True)
    launch.SUM_TILE, launch.at_once = shipped
    triton_norm.sum_plan_of.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tune", action="store_true", help="time other launches")
    options = parser.parse_args()
    if options.tune:
        for name in options.shapes:
            tune(name)
        return
    rows = [row for name in options.shapes for row in measure(name)]
    report("add_norm", "sums and norms of hidden states under autocast; floor: bytes at 4.3 TB/s", rows)


if __name__ == "__main__":
    main()
