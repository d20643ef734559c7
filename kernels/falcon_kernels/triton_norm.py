"""`falcon_kernels::gated_norm` and its backward: RMS norm of each head and a gate in one pass.

A program takes `steps` tiles of R rows, the rows [V] of all tokens and heads in their order. With n = r x,
r = (mean x^2 + epsilon)^(-1/2), and y = n w g sigmoid(g):

    dg = dy n w (sigmoid(g) + g sigmoid(g) (1 - sigmoid(g)))      dw = sum dy g sigmoid(g) n
    dn = dy g sigmoid(g) w                                        dx = r (dn - n mean(n dn))

Weight gradients are summed in each program, then over programs by one reduction: the same bits at every run.

Floor a row, in V numbers: forward x, y and the gate; backward x, dy, dx, the gate and its gradient.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_device
from .launcher import Launcher, are_aligned, dtypes_of
from .triton_convolution import LARGEST_WIDTH, factor
from .triton_layout import NAMESPACE, load_rows, store_rows
from .triton_op import Op


@triton.jit
def _gate(gate, row, there, columns, K: tl.constexpr):
    """[R, BK] SiLU of the gate, and its derivative."""
    g = load_rows(gate + row * K, there, columns, K).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    opened = g * sigmoid
    return opened, sigmoid + opened * (1.0 - sigmoid)


@triton.jit(do_not_specialize=["rows", "steps"])
def _forward(
    x, weight, gate, y, rows, steps,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BK)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * (R * steps) + tl.arange(0, R)
    for step in range(steps):
        row = first + step * R
        n = load_rows(x + row * K, row < rows, columns, K).to(tl.float32)
        n *= factor(n, K, True, EPSILON)[:, None] * w[None, :]
        if GATED:
            opened, _ = _gate(gate, row, row < rows, columns, K)
            n *= opened
        store_rows(y + row * K, n, row < rows, columns, K)


@triton.jit(do_not_specialize=["rows", "steps"])
def _backward(
    grad_y, x, weight, gate, grad_x, grad_gate, grad_weight, rows, steps,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """`grad_weight` [programs, K] float32."""
    columns = tl.arange(0, BK)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * (R * steps) + tl.arange(0, R)
    sums = tl.zeros([R, BK], tl.float32)
    for step in range(steps):
        row = first + step * R
        there = row < rows
        n = load_rows(x + row * K, there, columns, K).to(tl.float32)
        dy = load_rows(grad_y + row * K, there, columns, K).to(tl.float32)
        r = factor(n, K, True, EPSILON)[:, None]
        n *= r
        if GATED:
            opened, slope = _gate(gate, row, there, columns, K)
            store_rows(grad_gate + row * K, dy * n * w[None, :] * slope, there, columns, K)
            dy *= opened
        sums += dy * n
        dn = dy * w[None, :]
        mean = tl.sum(n * dn, 1) * (1.0 / K)
        store_rows(grad_x + row * K, r * (dn - n * mean[:, None]), there, columns, K)
    tl.store(grad_weight + tl.program_id(0).to(tl.int64) * K + columns, tl.sum(sums, 0), mask=columns < K)


class Plan:
    """The two launches for inputs of one shape."""

    def __init__(self, rows, head_dim, dtypes, epsilon, aligned):
        tile = max(16, triton.next_power_of_2(head_dim))
        constants = {"K": head_dim, "BK": tile, "GATED": dtypes[2] is not None, "EPSILON": epsilon}
        launchers, numbers = [], []
        for kernel, config in zip((_forward, _backward), launch.NORM[dtypes[0].itemsize], strict=True):
            together = max(1, config.tile // tile)
            steps = min(config.steps, -(-rows // together))
            options = {"R": together, "num_warps": config.warps}
            launchers.append(Launcher(kernel, (-(-rows // (together * steps)),), constants | options, aligned=aligned))
            numbers.append((rows, steps))
        self.forward, self.backward = launchers
        self.forward_numbers, self.backward_numbers = numbers
        self.partial = (self.backward.grid[0], head_dim)


plan_of = lru_cache(maxsize=1024)(Plan)


def _planned(tensors, epsilon: float) -> Plan:
    """The plan for x, weight and gate, and perhaps the output's gradient, all contiguous."""
    x = tensors[0]
    return plan_of(x.numel() // x.shape[-1], x.shape[-1], dtypes_of(tensors[:3]), epsilon, are_aligned(tensors))


def _contiguous(tensors) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _run(tensors, epsilon: float) -> Tensor:
    tensors = _contiguous(tensors)
    y = torch.empty_like(tensors[0])
    if y.numel():
        plan = _planned(tensors, epsilon)
        plan.forward(*tensors, y, *plan.forward_numbers)
    return y


def _run_backward(tensors, grad_y: Tensor, epsilon: float) -> list[Tensor]:
    """Gradients of x, weight and, where there is one, the gate."""
    tensors = x, weight, gate = _contiguous(tensors)
    grad_x, grad_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    grad_weight = torch.zeros_like(weight)
    if x.numel():
        grad_y = grad_y.to(x.dtype).contiguous()
        plan = _planned((*tensors, grad_y), epsilon)
        partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
        plan.backward(grad_y, *tensors, grad_x, grad_gate, partial, *plan.backward_numbers)
        grad_weight = partial.sum(0).to(weight.dtype)
    return [t for t in (grad_x, grad_weight, grad_gate) if t is not None]


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OP = Op(
    LIBRARY,
    "gated_norm",
    "Tensor x, Tensor weight, Tensor? gate",
    "float epsilon",
    _run,
    _run_backward,
    lambda tensors, _: tensors[0].shape,
)


def norm(x: Tensor, weight: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """As x; arguments as in `gated_norm`."""
    if (sentence := refusal(x, weight, gate)) is not None:
        raise ValueError(sentence)
    return OP(x, weight, gate, epsilon)


def refusal(x: Tensor, weight: Tensor, gate: Tensor | None) -> str | None:
    """Why the kernels do not take a call, in one sentence, or None where they do."""
    if x.shape[-1] > LARGEST_WIDTH:
        return f"x has {x.shape[-1]} channels; with impl='triton' at most {LARGEST_WIDTH} are taken."
    return triton_device.refusal_of(x=x, weight=weight, gate=gate)
