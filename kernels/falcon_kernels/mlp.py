"""The end of a gated MLP, which for its gradient keeps what goes in, and not what stands between."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api import _has_triton
from .single_token import as_made


def silu_projection(x: Tensor, y: Tensor, linear: nn.Module) -> Tensor:
    """`linear` of SiLU(x) * y.

    On NVIDIA GPUs with Triton the product is one launch, rounded once, and is made again in the backward, so that
    training keeps x and y alone: half of what PyTorch's operations keep. Not where `linear` is something other than a
    plain nn.Linear without a bias (wrapped, quantized, distributed, hooked or frozen), nor under torch.compile, which
    fuses these operations itself.

    Args:
        x, y: [..., D].
        linear: a module of D inputs.

    Returns:
        [..., linear's outputs].
    """
    if not _fuses(x, y, linear):
        return linear(F.silu(x) * y)
    from . import triton_mlp  # so that nothing here needs triton

    return triton_mlp.OP(x, y, linear.weight.to(x.dtype))


def _fuses(x: Tensor, y: Tensor, linear: nn.Module) -> bool:
    if x.device.type != "cuda" or torch.compiler.is_compiling() or x.dtype != y.dtype or not _has_triton():
        return False
    from . import triton_device

    dtypes = {x.dtype}
    if torch.is_autocast_enabled("cuda"):  # the layer casts its weight to what x and y have been cast to
        if x.dtype != torch.get_autocast_dtype("cuda"):
            return False
        dtypes.add(torch.float32)
    if not any(as_made(linear, dtype, x.device) for dtype in dtypes) or triton_device.refusal_of(x) is not None:
        return False
    learns = any(weight.requires_grad for weight in linear.parameters())
    return learns or not torch.is_grad_enabled()  # the gradient of a frozen weight costs a product
