"""Where the Triton kernels run."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
from torch import Tensor

if not hasattr(triton, "knobs"):
    raise ImportError(f"triton is {triton.__version__}; the kernels need at least 3.4.")
INTERPRETED = triton.knobs.runtime.interpret
OLDEST_CARD = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def current(device: torch.device) -> AbstractContextManager:
    """With `device` current, which is where Triton launches."""
    away = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
    return torch.cuda.device(device) if away else nullcontext()


def refusal(device: torch.device) -> str | None:
    """Why the kernels do not run on a device, in one sentence, or None where they do."""
    if device.type == "cuda":
        return _refusal_of_card(-1 if device.index is None else device.index)
    if device.type == "cpu" and INTERPRETED:
        return None
    return f"q is on {device}; with impl='triton' it must be on an NVIDIA GPU, or Triton's interpreter must be on."


def refusal_of(x: Tensor, **others: Tensor | None) -> str | None:
    """Why kernels that take each of `DTYPES` for every tensor do not take these, or None where they do."""
    for name, tensor in {"x": x, **others}.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{name} has dtype {tensor.dtype}; with impl='triton' it must be float32, bfloat16 or float16."
    return refusal(x.device)


def _refusal_of_card(index: int) -> str | None:
    return _asked_once(index)


# What torch.compiler.assume_constant_result does, without importing the compiler.
_refusal_of_card._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _asked_once(index: int) -> str | None:
    if torch.version.hip:
        return "q is on an AMD GPU; with impl='triton' it must be on an NVIDIA one."
    found = torch.cuda.get_device_capability(None if index < 0 else index)
    if found >= OLDEST_CARD:
        return None
    have, least = (".".join(map(str, version)) for version in (found, OLDEST_CARD))
    return f"q is on a GPU of compute capability {have}; with impl='triton' it must be at least {least}."
