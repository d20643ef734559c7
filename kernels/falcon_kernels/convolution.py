"""What stands before the recurrence: a short causal convolution of each channel, SiLU, and a norm of each head."""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from .api import _has_triton

NORMS = ("none", "rms", "l2")
IMPLEMENTATIONS = ("torch", "triton") if find_spec("triton") is not None else ("torch",)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    head_dim: int,
    *,
    norm: str = "none",
    epsilon: float = 1e-6,
    age: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Causal convolution of each channel with itself, SiLU, then a norm of each head, without weights.

    At each token u = sum over i of weight[:, -1 - i] * x of i tokens before, s = u * sigmoid(u), and
    s / sqrt(mean(s^2) + epsilon) for `rms`, s / sqrt(sum(s^2) + epsilon) for `l2`, over the channels of a head.

    Args:
        x: [B, T, H * head_dim], tokens before the first are 0. Tokens may lie apart, as in a part of a wider tensor.
        weight: [H * head_dim, taps], the last one for the token itself.
        head_dim: channels of a head.
        norm: `none`, `rms` or `l2`.
        epsilon: of the norm.
        age: [T] integers, for packed documents the index of each token in its own, beyond which it sees nothing.
        impl: `torch` (plain operations, rounded after each to what PyTorch promotes x and weight to) or `triton` (one
            launch, in float32 inside). By default `triton` on NVIDIA GPUs with Triton, for x and weight of float32,
            bfloat16 or float16, at most 8 taps and 256 channels of a head; elsewhere `torch`.

    Returns:
        [B, T, H, head_dim] in the dtype of x.

    Raises:
        ValueError: for shapes or options that do not fit together.
    """
    if x.dim() != 3 or head_dim < 1 or x.shape[-1] % head_dim:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [B, T, channels], heads of head_dim = {head_dim}.")
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{x.shape[-1]}, taps], a row a channel.")
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(NORMS)}.")
    if age is not None and age.shape != x.shape[1:2]:
        raise ValueError(f"age has shape {list(age.shape)}; it must be [{x.shape[1]}], one for each token.")
    if impl is None:
        impl = _best(x, weight, head_dim)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(IMPLEMENTATIONS)}.")
    if impl == "triton":
        from . import triton_convolution  # so that nothing here needs triton

        return triton_convolution.convolution(x, weight, age, head_dim, NORMS.index(norm), epsilon)
    return normalize(_activated(x, weight, age).unflatten(-1, (-1, head_dim)), norm, epsilon)


def normalize(x: Tensor, norm: str, epsilon: float) -> Tensor:
    """x [..., K] over its size by `norm`, as in `short_convolution`, in the dtype of x."""
    if norm == "none":
        return x
    if norm == "rms":
        return F.rms_norm(x, x.shape[-1:], eps=epsilon).to(x.dtype)  # autocast has it give float32
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + epsilon)).to(x.dtype)


def _activated(x: Tensor, weight: Tensor, age: Tensor | None) -> Tensor:
    taps, length = weight.shape[1], x.shape[1]
    context = F.pad(x, (0, 0, taps - 1, 0))
    total = x * weight[:, -1]
    for back in range(1, taps):
        earlier = context[:, taps - 1 - back : taps - 1 - back + length]
        if age is not None:
            earlier = torch.where((age >= back)[:, None], earlier, 0)
        total = total + earlier * weight[:, -1 - back]
    return F.silu(total).to(x.dtype)


def _best(x: Tensor, weight: Tensor, head_dim: int) -> str:
    """`triton` where its kernels take the call, else `torch`."""
    if x.device.type != "cuda" or not _has_triton():
        return "torch"
    from . import triton_convolution

    return "torch" if triton_convolution.refusal(x, weight, head_dim) else "triton"
