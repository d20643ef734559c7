"""`falcon_kernels::silu_projection` and its backward: p = SiLU(x) * y, and p Wᵀ.

With s = sigmoid(x) and dp = do W,

    dx = dp y (s + x s (1 - s)),      dy = dp x s,      dW = doᵀ p,

where p is made again. A program takes `BLOCK` numbers, a thread 16 bytes of them at a time where Triton knows that all
numbers are a multiple of 16. Floor a number: forward x, y and p; backward x, y, dp, dx, dy and p.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launcher, are_aligned
from .triton_convolution import silu
from .triton_layout import NAMESPACE
from .triton_op import Op

BLOCK, WARPS = 1024, 4


@triton.jit
def _forward(x, y, product, numbers, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numbers
    a = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    b = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
    opened, _ = silu(a)
    tl.store(product + place, (opened * b).to(product.dtype.element_ty), mask=there)


@triton.jit
def _backward(x, y, grad_product, grad_x, grad_y, product, numbers, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numbers
    a = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    b = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
    dp = tl.load(grad_product + place, mask=there, other=0.0).to(tl.float32)
    opened, slope = silu(a)
    tl.store(grad_x + place, (dp * b * slope).to(grad_x.dtype.element_ty), mask=there)
    tl.store(grad_y + place, (dp * opened).to(grad_y.dtype.element_ty), mask=there)
    tl.store(product + place, (opened * b).to(product.dtype.element_ty), mask=there)


@lru_cache(maxsize=1024)
def _launcher(kernel, numbers: int, dtype: torch.dtype, device: torch.device, aligned: bool) -> Launcher:
    constants = {"BLOCK": BLOCK, "num_warps": WARPS}
    return Launcher(kernel, (triton.cdiv(numbers, BLOCK),), constants, aligned=aligned)


def _launch(kernel, *tensors: Tensor) -> None:
    """Tensors of one shape and dtype, contiguous."""
    x = tensors[0]
    if x.numel():
        _launcher(kernel, x.numel(), x.dtype, x.device, are_aligned(tensors))(*tensors, x.numel())


def _run(tensors) -> Tensor:
    x, y, weight = tensors
    x, y = x.contiguous(), y.contiguous()
    product = torch.empty_like(x)
    _launch(_forward, x, y, product)
    return product @ weight.t()


def _run_backward(tensors, grad: Tensor) -> list[Tensor]:
    """Gradients of x, y and weight."""
    x, y, weight = tensors
    x, y, grad_product = x.contiguous(), y.contiguous(), (grad @ weight).contiguous()
    grad_x, grad_y, product = (torch.empty_like(x) for _ in range(3))
    _launch(_backward, x, y, grad_product, grad_x, grad_y, product)
    return [grad_x, grad_y, grad.flatten(0, -2).t() @ product.flatten(0, -2)]


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OP = Op(
    LIBRARY,
    "silu_projection",
    "Tensor x, Tensor y, Tensor weight",
    "",
    _run,
    _run_backward,
    lambda tensors: (*tensors[0].shape[:-1], tensors[2].shape[0]),
)
