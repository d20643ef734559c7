"""One token in few launches: where Triton runs, what stands between matrix products is one launch each."""

from typing import Any

import torch
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
    return all(module is None or as_made(module, x.dtype, x.device) for module in modules)


def as_made(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a call of `module` is what its weight says: nn.Linear without a bias or nn.RMSNorm, and nothing around.

    dtype, device: what its weight must have.
    """
    weight: Any = getattr(module, "weight", None)
    known = type(module) in (nn.Linear, nn.RMSNorm) and type(weight) is nn.Parameter
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    changed = any(hooks) or "forward" in module.__dict__
    return (
        known
        and not changed
        and getattr(module, "bias", None) is None
        and weight.dtype == dtype
        and weight.device == device
    )


def project(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Each of at most three `linears` of [B, T, D] x; one launch for all of them where there is one row."""
    if x.shape[0] == 1 and fuses(x, *linears):
        from . import triton_token  # so that nothing here needs triton

        return triton_token.row_products(x, *(linear.weight for linear in linears))
    return [linear(x) for linear in linears]


def gated_product(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """SiLU(gate(x)) * up(x) for [B, 1, D] x that `fuses` takes."""
    from . import triton_token

    if x.shape[0] == 1 and fuses(x, gate, up):
        return triton_token.gated_product(x, gate.weight, up.weight)
    return triton_token.silu_product(gate(x), up(x))
