"""RMS norms: of each head after the recurrence, with a gate; and of the hidden states, with the sum before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api import _best_step, _has_triton
from .convolution import IMPLEMENTATIONS
from .single_token import as_made, fuses


def gated_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None = None, *, epsilon: float = 1e-6, impl: str | None = None
) -> Tensor:
    """RMS norm of each head with one weight for all of them, then times SiLU of the gate.

    Args:
        x: [..., H, V].
        weight: [V].
        gate: of as many numbers as x, [..., H * V] or [..., H, V]; None for 1.
        epsilon: added to the mean square.
        impl: `torch` (plain operations, the norm in the dtype of the weight) or `triton` (one launch, in float32
            inside). By default `triton` on NVIDIA GPUs with Triton, for float32, bfloat16 or float16 and at most 256
            channels; elsewhere `torch`.

    Returns:
        As x in shape and dtype.

    Raises:
        ValueError: for shapes or options that do not fit together.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; it must be {list(x.shape[-1:])}, one for each channel."
        )
    if gate is not None and gate.numel() != x.numel():
        raise ValueError(f"gate has shape {list(gate.shape)}; it must be as many numbers as x, {list(x.shape)}.")
    if impl is None:
        impl = _best(x, weight, gate)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(IMPLEMENTATIONS)}.")
    if impl == "triton":
        from . import triton_norm  # so that nothing here needs triton

        return triton_norm.norm(x, weight, gate, epsilon)
    y = F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)
    return y if gate is None else (y * F.silu(gate.view(x.shape))).to(x.dtype)


def _best(x: Tensor, weight: Tensor, gate: Tensor | None) -> str:
    """`triton` where its kernels take the call, else `torch`."""
    if x.device.type != "cuda" or not _has_triton():
        return "torch"
    from . import triton_norm

    return "torch" if triton_norm.refusal(x, weight, gate) else "triton"


def add_norm(x: Tensor, y: Tensor | None, norm: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """x + y, and `norm` of it.

    On NVIDIA GPUs with Triton both are one launch, and so are their gradients, rounded once each. Not where `norm` is
    something other than a plain nn.RMSNorm (wrapped, quantized, distributed or hooked), nor under torch.compile, which
    fuses these operations itself.

    Args:
        x: [..., D].
        y: of the same shape, or None for 0.
        norm: a module from [..., D] to the same shape.
        dtype: of the norm; by default as the module gives it.

    Returns:
        The sum in the wider of the dtypes of x and y, and its norm.
    """
    if y is not None and y.dtype == x.dtype and fuses(x, norm):
        from . import triton_token  # so that nothing here needs triton

        total, normed = triton_token.add_norm(x, y, norm.weight, norm.eps)
    elif _fuses_sum(x, y, norm, dtype):
        from . import triton_norm

        return triton_norm.add_norm(x, y, norm.weight, norm.eps, dtype or x.dtype)
    else:
        total = x if y is None else x + y
        normed = norm(total)
    return total, normed if dtype is None else normed.to(dtype)


def _fuses_sum(x: Tensor, y: Tensor | None, norm: nn.Module, dtype: torch.dtype | None = None) -> bool:
    if torch.compiler.is_compiling() or _best_step(x) != "triton":
        return False
    if dtype is None and x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False  # what the norm then gives depends on the version of PyTorch
    if y is None and fuses(x):  # of a single token PyTorch's norm is one launch too
        return False
    from . import triton_norm

    return as_made(norm, x.dtype, x.device) and triton_norm.takes_sum(x, y, norm.weight)
