"""What each launch configuration of the Triton kernels takes: compiled for a card, without one.

    python benchmarks/triton_resources.py [--card safe] [--fresh] [--key-dims 64] [--windows 1 4] [--sliding 4]
        [--dtypes bfloat16]

falcon_1 is the window of 0, falcon_2a that of -1, falcon_2 of -2; falcon_3 has the windows of `--sliding`. The short
convolution, the gated norm, and the sum with its norm of 12 and 32 heads are that of -3.

Exits with 1 where a `safe` configuration takes more shared memory than 100 KB. Registers and stack (spilled registers
live there) are the assembler's.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from falcon_kernels import (
    launch,
    triton_additive,
    triton_channel,
    triton_channel_regression,
    triton_convolution,
    triton_norm,
    triton_regression,
    triton_schedule,
    triton_smoothness,
    triton_window,
)
from falcon_kernels.triton_layout import NUMBERS, Layout
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"large": GPUTarget("cuda", 90, 32), "safe": GPUTarget("cuda", 86, 32)}
SHARED = {"large": 227 * 1024, "safe": 99 * 1024}
FLOATS = {"weight", "log_decay", "w", "u", "c", "initial", "final", "part_decay", "gain", "ridge", "energy"}
FLOATS |= {"grad_gain", "grad_ridge", "grad_weight", "written"}
FLOATS |= {"residual", "total", "grad_total", "grad_residual", "across", "found", "left"}
FLOATS |= {"memory", "grad_memory", "grad_final", "inverse", "scale", "gram", "sums", "scales", "grad_energy", "top"}
OTHERS = {"bounds": "i64", "first": "i64", "owner": "i64", "lengths": "i64", "previous_valid": "i1", "tail_valid": "i1"}
OTHERS |= {"age": "i64"}
INTEGERS = {*NUMBERS, *triton_convolution.NUMBERS, "batch_stride", "stride", "rows"}


def resources(kernel, card: str, dtype: torch.dtype, config: launch.Config, constants: dict) -> dict:
    """Compiles `kernel` and reads off shared memory, registers, stack and the seconds that it took."""
    letters = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    names, signature, attributes = kernel.arg_names, {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
            if name in ("batch_stride", "stride"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            floats = FLOATS - {"w", "inverse"} if kernel.__module__ == triton_regression.__name__ else FLOATS
            signature[name] = "*" + ("fp32" if name in floats else OTHERS.get(name, letters))
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    begun = time.perf_counter()
    compiled = triton.compile(source, target=TARGETS[card], options=config.options())
    seconds = time.perf_counter() - begun
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {"shared": compiled.metadata.shared, "registers": registers, "stack": stack, "seconds": seconds}


def launches(card: str, dtype: torch.dtype, key_dim: int, window: int, carried: bool):
    """Every kernel of a forward and backward with its configuration and constants."""
    size = dtype.itemsize
    tile = launch.padded(key_dim, size)
    chunk = launch.chunk_length(size, tile, window)
    forward, reverse, backward = launch.configs(card, size, tile, chunk + window - 1)
    row = {"K": key_dim, "V": key_dim, "BK": tile, "C": chunk, "TILE": chunk + window - 1, "PACKED": False}
    rule = {"W": window, "SHIFT": 1, "CARRIED": carried}
    numbers = {"OPERAND": tl.bfloat16 if size == 2 else tl.float32, "PRECISION": "ieee", "LAG": 0}
    step = {"MASKED": carried, "RIDGE": 2, "DIRECT": False, "CAPPED": False, "EPSILON": 1e-6, "FLOOR": 0.01}

    def channels(config):
        return {"BV": min(config.value_tile, tile)}

    begin = {"INITIAL": carried, "FROM_ZERO": False}
    for name, mode in (("read", {"STORE": False, "FINAL": True}), ("read + keep", {"STORE": True, "FINAL": False})):
        found = row | rule | numbers | begin | mode | channels(forward) | {"READ": True}
        yield name, triton_additive._pass, forward, found
    mode = {"STORE": True, "FINAL": carried}
    yield "reverse", triton_additive._reverse_pass, reverse, row | numbers | begin | mode | channels(reverse)
    part = {"DETACH": False, "BK": min(backward.key_tile, tile), "ONCE": backward.once}
    found = row | rule | numbers | step | channels(backward) | part
    yield "gradients", triton_additive._chunk_backward, backward, found
    lookback = {"LOOKBACK": triton.next_power_of_2(max(window - 1, 1))}
    if window > 1:
        yield "lookback", triton_additive._add_lookback, launch.Config(0, 4, 3), row | rule | lookback | {"BV": tile}
    schedule = row | rule | step | {"BK": min(tile, 128), "PARTS": 1, "SMOOTHNESS": 0}
    yield "schedule", triton_schedule._forward, launch.Config(0, 4, 3), schedule


def regression(card: str, dtype: torch.dtype, key_dim: int):
    """The same of falcon_1, which has no window, in one pass and split."""
    tile = max(64, launch.padded(key_dim, dtype.itemsize))
    sizes = launch.WIDE_REGRESSION[tile] if dtype.itemsize == 4 else launch.REGRESSION[card, dtype.itemsize, tile]
    options = triton_schedule.Options(1, True, triton_schedule.RIDGE["scale_coupled"], False, True, False, 1e-6, 0.01)
    layout = Layout.of(1, 1024, 0, triton_regression.CHUNK)
    flags = {"carry": (True,), "reverse": (True,), "prepare": (False,), "whole": (True, True), "reverse_whole": (True,)}
    for these in dict.fromkeys((sizes, sizes._replace(whole=None))):
        plan = triton_regression.Plan(
            layout, (1, 1024, 1, key_dim), key_dim, dtype, torch.device("cpu"), options, False, True, True, sizes=these
        )
        yield from planned(plan, these, flags, {"prepare": {"ADJOINT": True}})


def sliding(card: str, dtype: torch.dtype, key_dim: int, window: int):
    """The same of falcon_3."""
    tile = max(64, launch.padded(key_dim, dtype.itemsize))
    sizes = launch.WIDE_WINDOW[tile] if dtype.itemsize == 4 else launch.WINDOW[card, dtype.itemsize, tile]
    smoothness = triton_smoothness.SMOOTHNESS["exact" if window <= 8 else "bound"]
    options = triton_schedule.Options(
        window, True, triton_schedule.RIDGE["scale_coupled"], False, True, False, 1e-6, 0.01, smoothness
    )
    layout = Layout.of(1, 1024, 0, triton_window.chunk_length(dtype, key_dim, window))
    plan = triton_window.Plan(
        layout, (1, 1024, 1, key_dim), key_dim, dtype, torch.device("cpu"), options, False, True, True, sizes=sizes
    )
    flags = {"carry": (True, True), "reverse": (True,)}
    yield from planned(plan, sizes, flags, {})
    schedule = triton_schedule.Plan(layout, 1, key_dim, options, True, True, 1 if dtype.itemsize == 2 else 2).forward
    config = launch.Config(0, schedule.constants["num_warps"], 3)
    yield "schedule", schedule.kernel, config, {n: c for n, c in schedule.constants.items() if n != "num_warps"}


def planned(plan, sizes: tuple, flags: dict, again: dict):
    """Each launch of a plan with the configuration of its name; those in `again` also with other flags."""
    for name, config in sizes._asdict().items():
        launcher = getattr(plan, name, None)
        if launcher is None:  # nothing that these options need
            continue
        constants = launcher.constants | dict(zip(launcher.flags, flags.get(name, ()), strict=True))
        yield name, launcher.kernel, config, constants
        if name in again:
            yield f"{name} again", launcher.kernel, config, constants | again[name]


def channel(card: str, dtype: torch.dtype, key_dim: int, residual: bool = False):
    """The same of falcon_2a, or where `residual` of falcon_2."""
    tile = max(64, launch.padded(key_dim, dtype.itemsize))
    sizes = launch.WIDE_CHANNEL[tile] if dtype.itemsize == 4 else launch.CHANNEL[card, dtype.itemsize, tile]
    options = triton_schedule.Options(
        1, True, triton_schedule.RIDGE["scale_coupled"], False, residual, False, 1e-6, 0.01
    )
    layout = Layout.of(1, 1024, 0, triton_channel.chunk_length(dtype, key_dim, 1))
    core = triton_channel_regression if residual else triton_channel
    heads = 64  # else solves would be alone, with narrower tiles
    plan = core.Plan(
        layout, (1, 1024, heads, key_dim), key_dim, dtype, torch.device("cpu"), options, False, True, True, True,
        sizes=sizes,
    )  # fmt: skip
    modes = dict.fromkeys(("forward", "reverse"), (True, True, True, False))
    flags = modes | dict.fromkeys(("solve", "unsolve", "across"), (True,))
    for name, config in sizes._asdict().items():
        if name not in ("forward", "reverse", "ask") if residual else hasattr(plan, name):
            launcher = getattr(plan, name)
            constants = launcher.constants | dict(zip(launcher.flags, flags.get(name, ()), strict=True))
            yield name, launcher.kernel, config, constants


def channel_regression(card: str, dtype: torch.dtype, key_dim: int):
    return channel(card, dtype, key_dim, True)


def around(dtype: torch.dtype, head_dim: int):
    """The same of the short convolution, of four taps with a norm in packed documents, and of the norms."""
    device, wide = torch.device("cpu"), torch.float32
    convolution = triton_convolution.Plan(
        (1, 65536, head_dim), (0, 0), head_dim, 4, (dtype, wide, torch.int64), device, True, 1, 1e-6, True
    )
    plans = [("convolve", convolution), ("norm", triton_norm.Plan(65536, head_dim, (dtype,) * 3, 1e-6, True))]
    for heads in (12, 32):
        width = heads * head_dim
        plans.append((f"sum {width}", triton_norm.SumPlan(65536, width, (dtype,) * 5, device, 1e-6, True)))
    for what, plan in plans:
        for name, launcher in ((what, plan.forward), (f"{what} back", plan.backward)):
            constants = dict(launcher.constants)
            warps, registers = constants.pop("num_warps"), constants.pop("maxnreg", None)
            config = launch.Config(constants["R"] * constants["BK"], warps, 3, registers=registers)
            yield name, launcher.kernel, config, constants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=list(TARGETS), default="large")
    parser.add_argument("--key-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--sliding", nargs="*", type=int, default=[4], help="windows of falcon_3")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--fresh", action="store_true", help="without a carried state")
    options = parser.parse_args()
    fits = True
    for dtype in options.dtypes:
        for key_dim in options.key_dims:
            kind = getattr(torch, dtype)
            every = [(0, regression), (-1, channel), (-2, channel_regression)]
            every = [(w, of(options.card, kind, key_dim)) for w, of in every]
            every += [(-3, around(kind, key_dim))]
            every += [(w, launches(options.card, kind, key_dim, w, not options.fresh)) for w in options.windows]
            every += [(w, sliding(options.card, kind, key_dim, w)) for w in options.sliding]
            for window, these in every:
                for name, kernel, config, constants in these:
                    used = resources(kernel, options.card, kind, config, constants)
                    fits &= used["shared"] <= SHARED[options.card]
                    print(
                        f"{dtype:9s} K {key_dim:3d} W {window:2d} {name:13s} tile {config.value_tile:3d} "
                        f"warps {config.warps} stages {config.stages} shared {used['shared']:6d} "
                        f"registers {used['registers']:3d} stack {used['stack']:5d} {used['seconds']:.1f} s",
                        flush=True,
                    )
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
