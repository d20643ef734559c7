"""Triton kernels on the CPU: its interpreter, made to run beside a numpy that no longer turns [3] into the number 3."""

import os
from importlib import metadata
from importlib.util import find_spec

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


def require() -> None:
    """Skips the module where kernels can run neither on a GPU nor in the interpreter."""
    pytest.importorskip("triton")
    if not (torch.cuda.is_available() or USABLE):
        pytest.skip("without a GPU the kernels run in the interpreter of Triton 3.6", allow_module_level=True)
