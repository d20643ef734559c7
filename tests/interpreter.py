"""Triton kernels on the CPU: its interpreter, mended where it is wrong.

Numpy no longer turns [3] into the number 3. And bfloat16, which numpy does not know, is kept as 16-bit integers, which
the interpreter multiplies as such, and is truncated instead of rounded.
"""

import os
from importlib import metadata
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# Later interpreters refuse masks that the compiler takes.
USABLE = find_spec("triton") is not None and metadata.version("triton").startswith("3.6.")


def switch_on() -> None:
    """Before anything imports Triton. Does nothing where there is a GPU, or no Triton whose interpreter runs these."""
    if torch.cuda.is_available() or not USABLE:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
    convert, tl = interpreter._convert_float, interpreter.tl

    def rounded(numbers, source, target, mode):
        if source != tl.float32 or target != tl.bfloat16:
            return convert(numbers, source, target, mode)
        bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
        to_even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(numbers), 0x7FC0, to_even).astype(np.uint16)

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def product(self, a, b, total, *_):
        return interpreter.TensorHandle(np.matmul(wide(a), wide(b), dtype=np.float32) + total.data, total.dtype.scalar)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = product


def require() -> None:
    """Skips the module where kernels can run neither on a GPU nor in the interpreter."""
    pytest.importorskip("triton")
    if not (torch.cuda.is_available() or USABLE):
        pytest.skip("without a GPU the kernels run in the interpreter of Triton 3.6", allow_module_level=True)
