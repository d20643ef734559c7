"""Triton kernels on the CPU: its interpreter, made to run beside a numpy that no longer turns [3] into the number 3."""

import os
from importlib import metadata
from importlib.util import find_spec

import pytest
import torch


def switch_on() -> None:
    """Before the first import of Triton. Does nothing where there is a GPU, or no Triton."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    if not metadata.version("triton").startswith("3.6."):  # later interpreters refuse masks that the compiler takes
        pytest.skip("the interpreter of this Triton is another one than 3.6's", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    if getattr(interpreter, "falcon_patched", False):
        return
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
    interpreter.falcon_patched = True
