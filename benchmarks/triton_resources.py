"""What each launch configuration of the Triton kernels takes: compiled for a card, without one.

    python benchmarks/triton_resources.py [--card safe] [--key-dims 64 128] [--windows 1 4] [--dtypes bfloat16]

falcon_1 is the window of 0.

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
from falcon_kernels import launch, triton_additive, triton_regression, triton_schedule
from falcon_kernels.triton_layout import NUMBERS, Layout
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"large": GPUTarget("cuda", 90, 32), "safe": GPUTarget("cuda", 86, 32)}
SHARED = {"large": 227 * 1024, "safe": 99 * 1024}
FLOATS = {"weight", "log_decay", "w", "u", "initial", "final", "part_decay", "gain", "ridge", "energy", "grad_weight"}
FLOATS |= {"grad_log_decay", "grad_gain", "grad_ridge", "old_grad_x", "old_grad_v", "written"}
FLOATS |= {"memory", "grad_memory", "grad_final"}
OTHERS = {"bounds": "i64", "first": "i64", "owner": "i64", "lengths": "i64", "previous_valid": "i1", "tail_valid": "i1"}


def resources(kernel, card: str, dtype: torch.dtype, config: launch.Config, constants: dict) -> dict:
    """Compiles `kernel` and reads off shared memory, registers, stack and the seconds that it took."""
    letters = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    names, signature, attributes = kernel.arg_names, {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            floats = FLOATS - {"w"} if kernel.__module__ == triton_regression.__name__ else FLOATS
            signature[name] = "*" + ("fp32" if name in floats else OTHERS.get(name, letters))
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    begun = time.perf_counter()
    compiled = triton.compile(
        source, target=TARGETS[card], options={"num_warps": config.warps, "num_stages": config.stages}
    )
    seconds = time.perf_counter() - begun
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {"shared": compiled.metadata.shared, "registers": registers, "stack": stack, "seconds": seconds}


def launches(card: str, dtype: torch.dtype, key_dim: int, window: int):
    """Every kernel of a forward and backward with its configuration and constants."""
    size = dtype.itemsize
    tile = max(16, triton.next_power_of_2(key_dim))
    forward, reverse, backward = launch.WIDE[tile] if size == 4 else launch.TABLE[card, size, tile]
    row = {"K": key_dim, "V": key_dim, "BK": tile, "C": launch.chunk_length(size, tile, window), "PACKED": False}
    rule = {"W": window, "SHIFT": 1, "CARRIED": True}
    rule["LOOKBACK"] = max(16, triton.next_power_of_2(max(window - 1, 1)))
    numbers = {"OPERAND": tl.bfloat16 if size == 2 else tl.float32, "PRECISION": "ieee", "LAG": 0}
    band = {"BAND_PRECISION": "tf32" if size == 2 else "ieee"}

    def channels(config):
        return {"BV": min(config.value_tile, tile)}

    for name, mode in (("read", {"READ": True, "STORE": False}), ("states", {"READ": False, "STORE": True})):
        yield (
            name,
            triton_additive._pass,
            forward,
            row
            | rule
            | numbers
            | mode
            | channels(forward)
            | {"FINAL": mode["READ"], "INITIAL": True, "FROM_ZERO": False},
        )
    mode = {"STORE": True, "FINAL": True, "INITIAL": True, "FROM_ZERO": False}
    yield "reverse", triton_additive._reverse_pass, reverse, row | numbers | mode | channels(reverse)
    yield "gradients", triton_additive._chunk_backward, backward, row | rule | numbers | band | channels(backward)
    plain = launch.Config(0, 4, 3)
    if window > 1:
        yield "lookback", triton_additive._add_lookback, plain, row | rule | {"BV": tile}
    most, warps = (64, 8) if window > 1 else (128, 4)
    plain = launch.Config(0, warps, 3)
    schedule = {
        "K": key_dim, "BK": min(tile, most), "W": window, "SHIFT": 1, "C": row["C"], "MASKED": True, "PACKED": False,
        "LOOKBACK": triton.next_power_of_2(max(window - 1, 1)), "CARRIED": True, "RUNNING": True, "RIDGE": 2,
        "DIRECT": False, "CAPPED": False, "EPSILON": 1e-6, "FLOOR": 0.01, "PARTS": 0,
    }  # fmt: skip
    yield "schedule", triton_schedule._forward, plain, schedule
    schedule |= {"DETACH": False, "BEFORE": triton.next_power_of_2(window)}
    yield "its backward", triton_schedule._backward, plain, schedule


def regression(card: str, dtype: torch.dtype, key_dim: int):
    """The same of falcon_1, which has no window."""
    tile = max(64, triton.next_power_of_2(key_dim))
    sizes = launch.WIDE_REGRESSION[tile] if dtype.itemsize == 4 else launch.REGRESSION[card, dtype.itemsize, tile]
    options = triton_schedule.Options(1, True, triton_schedule.RIDGE["scale_coupled"], False, True, False, 1e-6, 0.01)
    layout = Layout.of(1, 1024, 0, triton_regression.CHUNK)
    plan = triton_regression.Plan(
        layout, (1, 1024, 1, key_dim), key_dim, dtype, torch.device("cpu"), options, False, True, True, sizes=sizes
    )
    flags = {"carry": (True,), "reverse": (True,), "prepare": (False,)}
    for name, config in sizes._asdict().items():
        launcher = getattr(plan, name)
        constants = launcher.constants | dict(zip(launcher.flags, flags.get(name, ()), strict=True))
        yield name, launcher.kernel, config, constants
        if name == "prepare":
            yield "its adjoint", launcher.kernel, config, constants | {"ADJOINT": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=list(TARGETS), default="large")
    parser.add_argument("--key-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    fits = True
    for dtype in options.dtypes:
        for key_dim in options.key_dims:
            kind = getattr(torch, dtype)
            for window in (0, *options.windows):
                these = launches(options.card, kind, key_dim, window) if window else None
                for name, kernel, config, constants in these or regression(options.card, kind, key_dim):
                    used = resources(kernel, options.card, kind, config, constants)
                    fits &= used["shared"] <= SHARED[options.card]
                    print(
                        f"{dtype:9s} K {key_dim:3d} W {window:2d} {name:12s} tile {config.value_tile:3d} "
                        f"warps {config.warps} stages {config.stages} shared {used['shared']:6d} "
                        f"registers {used['registers']:3d} stack {used['stack']:5d} {used['seconds']:.1f} s",
                        flush=True,
                    )
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
