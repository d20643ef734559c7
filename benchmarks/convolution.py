"""Time on the GPU of the short convolution and of the gated norm, forward and backward, beside their bytes.

    python benchmarks/convolution.py                          # the table, written to results/convolution.json
    python benchmarks/convolution.py --tune [--shapes 4x8192x12x64]    # other launches of the convolution, printed only

Inputs are bfloat16 and weights float32, as under autocast. A layer calls the convolution, with SiLU and norm, for each
of queries, keys and values, and the norm once; here it has no gate. GPU time is the sum of the kernels in a profile;
time as called is the median of synchronised calls. `torch` are the plain operations. Those of the package
flash-linear-attention, a convolution with SiLU and an l2 norm, need it installed.
"""

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch
from falcon_kernels import gated_norm, launch, short_convolution, triton_convolution

sys.path.insert(0, str(Path(__file__).parent))
from report import report
from rules import COPY_BYTES_PER_SECOND, as_called, kernel_milliseconds

SHAPES = {  # batch, length, heads, width
    "32x1024x12x64": (32, 1024, 12, 64),
    "4x8192x12x64": (4, 8192, 12, 64),
    "1x65536x12x64": (1, 65536, 12, 64),
    "8x4096x16x128": (8, 4096, 16, 128),
}
TAPS = 4
MOST_ERROR = 1e-2  # relative, of bfloat16 results beside the plain operations in float32
TILES, STEPS, WARPS = (128, 256, 512, 1024), (8, 16, 32, 64, 128), (1, 2, 4)
REGISTERS = {4: (None, 112), 8: (None, 80, 168), 16: (None,)}  # by numbers of a thread


def leaves(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, H, K = shape
    torch.manual_seed(0)
    x = torch.randn(B, T, H * K, device="cuda", dtype=torch.bfloat16).requires_grad_()
    return x, (torch.randn(H * K, TAPS, device="cuda") / 2).requires_grad_()


def forms(x: torch.Tensor, weight: torch.Tensor, K: int):
    """What is computed, by which form, and the function of no arguments that does."""
    heads, of_heads = x.unflatten(-1, (-1, K)), weight[:K, 0]
    found = []
    for impl in ("triton", "torch"):
        found.append(("norm", impl, partial(gated_norm, heads, of_heads, impl=impl)))
        found.append(("convolution", impl, partial(short_convolution, x, weight, K, norm="rms", impl=impl)))
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.l2norm import l2norm
    except ImportError as error:
        print(f"flash-linear-attention is left out: {error}")
        return found

    narrow = weight.detach().to(x.dtype).requires_grad_()

    def theirs():
        return l2norm(causal_conv1d(x, narrow, activation="silu")[0].unflatten(-1, (-1, K)))

    return [*found, ("convolution", "fla", theirs)]


def both_ways(forward, tensors: list[torch.Tensor]):
    """A function that runs `forward` and its backward."""
    cotangent = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), tensors, cotangent, allow_unused=True)


def worst_error(x: torch.Tensor, weight: torch.Tensor, K: int) -> float:
    """Relative RMS error of output and gradients beside the plain operations in float32."""
    cotangent = torch.randn(*x.shape[:2], x.shape[2] // K, K, device="cuda").bfloat16()
    results = []
    for impl, dtype in (("triton", x.dtype), ("torch", torch.float32)):
        given = [x.detach().to(dtype).requires_grad_(), weight]
        y = short_convolution(*given, K, norm="rms", impl=impl)
        results.append([y, *torch.autograd.grad(y, given, cotangent.to(dtype))])
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def floors(shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """Milliseconds to move x and y, and x, dy and dx."""
    B, T, H, K = shape
    return tuple(count * 2 * B * T * H * K / COPY_BYTES_PER_SECOND * 1e3 for count in (2, 3))


def tune(name: str) -> None:
    """Prints the GPU time of each launch of the forward and of the backward, correct ones only, and the best."""
    shape = SHAPES[name]
    x, weight = leaves(shape)
    both = both_ways(lambda: short_convolution(x, weight, shape[-1], norm="rms", impl="triton"), [x, weight])
    shipped = launch.CONVOLUTION[2]
    for place, kernel in enumerate(("_forward", "_backward")):
        times = {}
        sizes = product(TILES, STEPS, WARPS)
        others = (launch.Walk(*s, r) for s in sizes for r in REGISTERS.get(s[0] // (32 * s[2]), ()))
        for config in dict.fromkeys((shipped[place], *others)):
            launch.CONVOLUTION[2] = (*shipped[:place], config, *shipped[place + 1 :])
            triton_convolution.plan_of.cache_clear()
            if (off := worst_error(x, weight, shape[-1])) > MOST_ERROR:
                print(f"{name} {kernel} {config}: WRONG, error {off:.2g}", flush=True)
                continue
            times[config] = kernel_milliseconds(both)[kernel]
        launch.CONVOLUTION[2] = shipped
        floor = floors(shape)[place]
        ranked = sorted(times, key=times.get)
        for config in dict.fromkeys((shipped[place], *ranked[:6])):
            print(f"{name} {kernel} {config}: {times[config] * 1e3:.1f} us, floor {floor * 1e3:.1f} us", flush=True)
        print(f"{name} {kernel} best: {ranked[0]}", flush=True)
    triton_convolution.plan_of.cache_clear()


def measure(name: str) -> list[dict[str, object]]:
    shape = SHAPES[name]
    x, weight = leaves(shape)
    if (off := worst_error(x, weight, shape[-1])) > MOST_ERROR:
        raise SystemExit(f"{name}: relative RMS error {off:.2g}")
    forward_floor, backward_floor = floors(shape)
    rows: list[dict[str, object]] = []
    for what, form, forward in sorted(forms(x, weight, shape[-1]), key=lambda found: found[0]):
        both = both_ways(forward, [x, weight])
        row: dict[str, object] = {"B x T x H x K": name, "": what, "form": form, "forward floor, ms": forward_floor}
        with torch.no_grad():
            row["forward GPU, ms"] = sum(kernel_milliseconds(forward).values())
        row["both floor, ms"] = forward_floor + backward_floor
        row["both GPU, ms"] = sum(kernel_milliseconds(both).values())
        row["both called, ms"], row["both extra MiB"] = as_called(both)
        rows.append(row)
    return rows


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
    report("convolution", "around the recurrence, bfloat16; floor: bytes at 4.3 TB/s", rows)


if __name__ == "__main__":
    main()
