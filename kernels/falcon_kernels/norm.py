"""What stands after the recurrence: an RMS norm of each head, and a gate."""

import torch.nn.functional as F
from torch import Tensor

from .api import _has_triton
from .convolution import IMPLEMENTATIONS


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
