"""RMS norms and their backward, each in one pass: `falcon_kernels::gated_norm` of each head, and `add_norm` of sums.

Of `gated_norm`, a program takes `steps` tiles of R rows, the rows [V] of all tokens and heads in their order. With
n = r x, r = (mean x^2 + epsilon)^(-1/2), and y = n w g sigmoid(g):

    dg = dy n w (sigmoid(g) + g sigmoid(g) (1 - sigmoid(g)))      dw = sum dy g sigmoid(g) n
    dn = dy g sigmoid(g) w                                        dx = r (dn - n mean(n dn))

Floor a row, in V numbers: forward x, y and the gate; backward x, dy, dx, the gate and its gradient.

`add_norm` is s = x + h and y = n w over whole hidden states, n and r those of s, made again in the backward. A program
takes a tile of R rows, or in the backward `steps` of them, so many that all programs run at a time, each copied into
shared memory a step ahead. With dn = dy w:

    dx = dh = ds + r (dn - n mean(n dn))      dw = sum dy n

Floor a row, in D numbers: forward x, h, s and y; backward s, ds, dy, dx and dh. Where there is no h, s is x, and dh
is dx where they have one dtype.

Weight gradients are summed in each program, then over programs by one reduction: the same bits at every run.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_device
from .launcher import Launcher, are_aligned, dtypes_of
from .triton_convolution import LARGEST_WIDTH, factor, silu
from .triton_layout import NAMESPACE, is_plain, load_rows, store_rows
from .triton_op import Op


@triton.jit
def _gate(gate, row, there, columns, K: tl.constexpr):
    """[R, BK] SiLU of the gate, and its derivative."""
    return silu(load_rows(gate + row * K, there, columns, K).to(tl.float32))


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


@triton.jit(do_not_specialize=["rows"])
def add_forward(
    residual, h, weight, total, y, rows,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """`h` and `total` are None together."""
    columns = tl.arange(0, BK)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < rows
    s = load_rows(residual + row * K, there, columns, K).to(tl.float32)
    if h is not None:
        s += load_rows(h + row * K, there, columns, K).to(tl.float32)
        stored = s.to(total.dtype.element_ty)
        store_rows(total + row * K, stored, there, columns, K)
        s = stored.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    store_rows(y + row * K, s * (factor(s, K, True, EPSILON)[:, None] * w[None, :]), there, columns, K)


@triton.jit(do_not_specialize=["rows", "steps"])
def add_backward(
    grad_total, grad_y, total, weight, grad_residual, grad_h, grad_weight, rows, steps,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """`grad_weight` [programs, K] float32, or None where it is frozen; `grad_total` and `grad_h` can be None too."""
    columns = tl.arange(0, BK)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * (R * steps) + tl.arange(0, R)
    sums = tl.zeros([R, BK], tl.float32)
    for step in tl.range(0, steps, num_stages=2):
        row = first + step * R
        there = row < rows
        n = load_rows(total + row * K, there, columns, K).to(tl.float32)
        dy = load_rows(grad_y + row * K, there, columns, K).to(tl.float32)
        dx = tl.zeros([R, BK], tl.float32)
        if grad_total is not None:
            dx = load_rows(grad_total + row * K, there, columns, K).to(tl.float32)
        r = factor(n, K, True, EPSILON)[:, None]
        n *= r
        sums += dy * n
        dn = dy * w[None, :]
        mean = tl.sum(n * dn, 1) * (1.0 / K)
        dx += r * (dn - n * mean[:, None])
        store_rows(grad_residual + row * K, dx, there, columns, K)
        if grad_h is not None:
            store_rows(grad_h + row * K, dx, there, columns, K)
    if grad_weight is not None:
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


class SumPlan:
    """The two launches of `add_norm` for inputs of one shape."""

    def __init__(self, rows, width, dtypes, device, epsilon, aligned):
        tile = max(16, triton.next_power_of_2(width))
        together = max(1, launch.SUM_TILE // tile)
        warps = min(16, together * tile // 256)
        constants = {"K": width, "BK": tile, "R": together, "EPSILON": epsilon, "num_warps": warps}
        tiles = -(-rows // together)
        self.steps = -(-tiles // launch.at_once(device, warps))
        self.forward = Launcher(add_forward, (tiles,), constants, aligned=aligned)
        self.backward = Launcher(add_backward, (-(-tiles // self.steps),), constants, aligned=aligned)
        self.partial = (self.backward.grid[0], width)


sum_plan_of = lru_cache(maxsize=1024)(SumPlan)


def _sum_plan(total: Tensor, dtypes, epsilon: float, tensors) -> tuple[int, SumPlan]:
    """Rows of `total`, and the plan for them; `dtypes` are of all that is launched, `tensors` what others have made."""
    width = total.shape[-1]
    rows = total.numel() // width
    return rows, sum_plan_of(rows, width, dtypes, total.device, epsilon, are_aligned(tensors))


def launch_sum(x: Tensor, h: Tensor | None, weight: Tensor, total: Tensor | None, y: Tensor, epsilon: float) -> None:
    """Fills `total` and `y`, all contiguous, with x + h and its norm; without h there is no `total`."""
    if x.numel():
        tensors = x, h, weight, total, y
        with triton_device.current(x.device):
            rows, plan = _sum_plan(x, dtypes_of(tensors), epsilon, tensors)
            plan.forward(*tensors, rows)


def _sum(x, h, weight, epsilon, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and the weight, contiguous."""
    x, h, weight = _contiguous((x, h, weight))
    total = None if h is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    launch_sum(x, h, weight, total, y, epsilon)
    return x if total is None else total, y, weight


class _AddNorm(torch.autograd.Function):
    """Keeps the sum, which is x itself where there is no h, and the weight."""

    @staticmethod
    def forward(ctx, x, h, weight, epsilon, dtype):
        total, y, weight = _sum(x, h, weight, epsilon, dtype)
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)
        ctx.of_h, ctx.epsilon, ctx.dtype = None if h is None else h.dtype, epsilon, dtype
        return total, y

    @staticmethod
    def backward(ctx, grad_total, grad_y):
        if torch.is_grad_enabled():
            raise RuntimeError("add_norm has no second derivatives on a GPU.")
        total, weight = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(total, dtype=ctx.dtype)
        grad_total, grad_y = _contiguous((grad_total, grad_y))
        grad_x = torch.empty_like(total)
        own = ctx.of_h not in (None, total.dtype)
        grad_h = torch.empty_like(total, dtype=ctx.of_h) if own else None
        partial = None
        if total.numel():
            given = grad_total, grad_y, total, weight
            dtypes = dtypes_of((*given, grad_x, grad_h))
            with triton_device.current(total.device):
                rows, plan = _sum_plan(total, dtypes, ctx.epsilon, given)
                if ctx.needs_input_grad[2]:
                    partial = torch.empty(plan.partial, dtype=torch.float32, device=total.device)
                plan.backward(*given, grad_x, grad_h, partial, rows, plan.steps)
        grad_weight = torch.zeros_like(weight) if partial is None else partial.sum(0).to(weight.dtype)
        if ctx.of_h == total.dtype:
            grad_h = grad_x
        return grad_x, grad_h, grad_weight if ctx.needs_input_grad[2] else None, None, None


def add_norm(x: Tensor, h: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + h in the dtype of x, [..., D], and its norm over D times `weight` [D] in `dtype`, for what `takes_sum` takes.

    Without h the sum is x, whose gradient comes through here all the same, so that it is added in the same launch.
    """
    if torch.is_grad_enabled() and torch._C._any_requires_grad(x, h, weight):
        return _AddNorm.apply(x, h, weight, epsilon, dtype)
    return _sum(x, h, weight, epsilon, dtype)[:2]


def takes_sum(x: Tensor, h: Tensor | None, weight: Tensor) -> bool:
    """Whether `add_norm` takes these. It is no op: traced or transformed tensors go through PyTorch's operations."""
    if not is_plain(x) or weight.shape != x.shape[-1:] or x.shape[-1] > launch.WIDEST_SUM:
        return False
    if h is not None and not (
        is_plain(h) and h.shape == x.shape and h.device == x.device and torch.promote_types(x.dtype, h.dtype) == x.dtype
    ):
        return False
    return triton_device.refusal_of(x, h=h, weight=weight) is None
