"""One token in few launches: where Triton runs, what stands between matrix products is one launch each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api import _best_step


def fuses(x: Tensor, *modules: nn.Module | None) -> bool:
    """Whether Triton kernels take [B, 1, D] x in place of PyTorch operations, and of `modules` that they go around.

    They have no gradients, and run where `falcon_step` is Triton's. A module must be what it was made as: a wrapped,
    quantized, distributed or hooked one does what only a call of it does.
    """
    if x.dim() != 3 or x.shape[1] != 1 or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    if x.dtype == torch.float64 or _best_step(x) != "triton":
        return False
    return all(module is None or _as_made(module, x) for module in modules)


def _as_made(module: nn.Module, x: Tensor) -> bool:
    weight = module.weight
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    known = type(module).__module__.startswith("torch.nn.modules.") and type(weight) is nn.Parameter
    return known and not changed and weight.dtype == x.dtype and weight.device == x.device


def add_norm(x: Tensor, y: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y, [B, T, D], and `norm` of it."""
    if fuses(x, norm) and y.dtype == x.dtype:
        from . import triton_token  # so that nothing here needs triton

        return triton_token.add_norm(x, y, norm.weight, norm.eps)
    total = x + y
    return total, norm(total)


def silu_product(x: Tensor, y: Tensor) -> Tensor:
    """SiLU(x) * y, [B, T, D]."""
    if fuses(x) and y.dtype == x.dtype:
        from . import triton_token

        return triton_token.silu_product(x, y)
    return F.silu(x) * y
