"""Compiles the kernels of single tokens for compute capability 9.0, which needs no GPU, and prints what they take.

python tests/compile_token.py
"""

import triton
from falcon_kernels.triton_norm import add_forward
from falcon_kernels.triton_token import gated_kernel, inputs_kernel, products_kernel, silu_product_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FIXED = {"D": 768, "K": 64, "V": 64, "BK": 64, "BV": 64, "BD": 1024}
CASES = {
    "default": {},
    "per channel, masked": {"PER_CHANNEL": True, "MASKED": True, "VALUE_NORM": "l2", "MAP": "softplus"},
    "no convolution": {"S": 0, "NORM": "none", "MAP": "elu_plus_one"},
    "own token only": {"S": 1, "NORM": "l2", "MAP": "relu", "RIDGE": False},
    "sizes": {"S": 8, "K": 192, "BK": 256, "V": 20, "BV": 32, "D": 2500},
}
DEFAULT = {"S": 4, "PER_CHANNEL": False, "NORM": "rms", "VALUE_NORM": "none", "MAP": "identity", "RIDGE": True}


def compiled(kernel, types: dict, constants: dict, warps: int):
    """The compiled kernel, its pointers aligned to 16 bytes."""
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    constants |= {name: None for name in kernel.arg_names if name not in constants and types.get(name) is None}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def main() -> None:
    for dtype in ("bf16", "fp32"):
        for name, case in CASES.items():
            constants = FIXED | DEFAULT | {"MASKED": False} | case
            types = {n: f"*{dtype}" for n in ("x", "q", "k", "v", "gain", "gain_bias", "q_out", "k_out", "v_out")}
            types |= {n: "fp32" for n in ("epsilon", "largest_gain", "ridge_scale")}
            types |= {"gain_out": "*fp32", "ridge_out": "*fp32", "length": "*i64", "H": "i32"}
            types |= {n: f"*{dtype}" for n in ("window", "q_weight", "k_weight", "v_weight") if constants["S"]}
            types |= {n: f"*{dtype}" for n in ("ridge", "ridge_bias") if constants["RIDGE"]}
            types |= {"mask": "*i1"} if constants["MASKED"] else {}
            kernel = compiled(inputs_kernel, types, constants, 2)
            print(f"inputs, {dtype}, {name}: {kernel.metadata.shared} B shared")
        types = {
            n: f"*{dtype}"
            for n in ("x", "y", "weight", "residual", "h", "total", "product", "gate", "up", "a", "b", "of_a", "of_b")
        }
        types |= {"rows": "i32"}
        compiled(add_forward, types, {"K": 768, "BK": 1024, "R": 1, "EPSILON": 1e-6}, 4)
        compiled(silu_product_kernel, types, {"N": 2048, "BLOCK": 256}, 2)
        for sizes in ({"D": 768, "BN": 4, "BD": 512}, {"D": 20, "BN": 4, "BD": 512}):
            kernel = compiled(products_kernel, types, {"NA": 768, "NB": 768, "NC": 0, "of_c": None, **sizes}, 4)
            print(f"products, {dtype}: {kernel.metadata.shared} B shared")
            compiled(gated_kernel, types, {"N": 2048, **sizes}, 4)


if __name__ == "__main__":
    main()
