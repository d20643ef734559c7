"""Compiles the one-token kernel for compute capability 9.0, which needs no GPU, and prints what it takes.

python tests/compile_step.py
"""

import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))
from cases import VARIANTS
from falcon_kernels import Rule
from falcon_kernels.triton_step import LAUNCHES, constants, copies, cut, step_kernel

CAPABILITY = (9, 0)


def compiled(rule: Rule, K: int, V: int, heads: int = 16, masked: bool = True, dtype: str = "bf16"):
    """The compiled kernel, its pointers aligned to 16 bytes."""
    columns, warps, registers = cut(K, V, LAUNCHES[CAPABILITY])
    shift, tail = rule.shifted, rule.window > 1
    types = {name: f"*{dtype}" for name in ("q", "k", "v", "gain", "output")}
    types |= {"ridge": f"*{dtype}" if rule.ridge != "none" else None, "mask": "*i1" if masked else None}
    types |= {"memory": "*fp32", "normalizer": "*fp32" if rule.normalized_read else None}
    types |= {"previous_key": f"*{dtype}" if shift else None, "previous_valid": "*i1" if shift else None}
    types |= {"tail_x": f"*{dtype}", "tail_v": f"*{dtype}", "tail_valid": "*i1"} if tail else {}
    types |= {"H": "i32" if heads > 1 else None}
    types |= {name: "fp32" for name in ("epsilon", "largest_alpha", "read_epsilon")}
    fixed = {name: None for name in step_kernel.arg_names if types.get(name) is None}
    fixed |= {"H": 1} if heads == 1 else {}
    options = (rule.name, rule.window, rule.alignment, rule.timing, rule.step_size, rule.ridge, rule.smoothness)
    fixed |= constants(*options, rule.normalized_read) | {"K": K, "V": V, "MASKED": masked, "BV": columns}
    fixed |= {"BK": triton.next_power_of_2(K), "COPIES": copies(rule.window, warps)}
    signature = {name: "constexpr" if name in fixed else types[name] for name in step_kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")}
    source = ASTSource(step_kernel, signature, fixed, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32),
        options={"num_warps": warps, "maxnreg": registers},
    )  # fmt: skip


def main() -> None:
    for name, rule in VARIANTS.items():
        for K, V, heads, masked in ((128, 128, 16, True), (192, 96, 1, False)):
            kernel = compiled(rule, K, V, heads, masked)
            print(f"{name:28} K={K} V={V}: {kernel.metadata.num_warps} warps, {kernel.metadata.shared} B shared")


if __name__ == "__main__":
    main()
