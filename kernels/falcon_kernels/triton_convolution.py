"""`falcon_kernels::short_convolution` and its backward: causal convolution, SiLU and norm of each head in one pass.

A program walks along tokens of one head: its tile is [R, K], R walks of `steps` tokens side by side, one after another
in the sequence. A step takes one token of each walk; `UNROLLED` steps are written out, while as many tokens after them
are copied into shared memory. The last TAPS inputs of a walk stay in registers, so that an input is read once, but for
the TAPS - 1 before each walk. The backward computes the forward again and walks TAPS - 1 tokens further, as an input's
gradient is complete once that many tokens after it are read. Weight gradients are summed along walks, then over the
walks of a program, then over programs by one reduction: the same bits at every run. A program has one warp, in which
nothing that a step sums over a head waits for another.

With u the convolution, s = u sigmoid(u), and y = r s where r = (mean or sum of s^2, + epsilon)^(-1/2), or r = 1:

    ds = r dy - r^3 s sum(s dy) (/ K for the mean)      du = ds (sigmoid(u) + s (1 - sigmoid(u)))
    dx_t = sum_i w_i du_{t+i}                           dw_i = sum_t du_t x_{t-i}

Floor a token and head, in K numbers: forward one read and one written, backward two and one.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_device
from .launcher import Launcher, are_aligned, dtypes_of
from .triton_layout import NAMESPACE, load_tile, store_tile
from .triton_op import Op

LARGEST_WIDTH, MOST_TAPS = 256, 8
FEWEST_STEPS, WARPS = 8, 8  # of a walk, where it is cut shorter so that a multiprocessor has so many warps
NUMBERS = ["length", "heads", "blocks", "steps"]  # no recompilation when these change


@triton.jit
def silu(x):
    """x sigmoid(x) and its derivative; exp2 and rsqrt are one instruction each, exp and a division more."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    sigmoid = root * root
    s = x * sigmoid
    return s, sigmoid + s * (1.0 - sigmoid)


@triton.jit
def _weights(weight, head, columns, K: tl.constexpr, TAPS: tl.constexpr):
    """Of a head's channels, a tuple of [BK] with that of the oldest token first."""
    found = ()
    for i in tl.static_range(TAPS):
        one = tl.load(weight + (head * K + columns) * TAPS + i, mask=columns < K, other=0.0)
        found += (one.to(tl.float32),)
    return found


@triton.jit
def _index(age, place, there, PACKED: tl.constexpr):
    """[R] indices of the tokens `place` in their documents."""
    return tl.load(age + place, mask=there, other=0).to(tl.int32) if PACKED else place


@triton.jit
def _before(x, age, begin, walk, left, columns, stride, K: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """Inputs of the TAPS tokens before each walk, without the oldest, which no later token sees, as the walk's first
    token sees them: a tuple."""
    place = begin + walk
    index = _index(age, place, left > 0, PACKED)
    found = (tl.zeros([walk.shape[0], columns.shape[0]], tl.float32),)
    for i in tl.static_range(1, TAPS):
        back = TAPS - i
        there = (place >= back) & (index >= back) & (left > -back)
        found += (load_tile((x - back * stride, walk * stride), there, columns, K).to(tl.float32),)
    return found


@triton.jit
def _seen(window, inputs, index, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """The inputs that tokens see, theirs last, of what those before them saw; `index` [R] in their documents."""
    found = ()
    for i in tl.static_range(1, TAPS):
        found += (tl.where((index > 0)[:, None], window[i], 0.0) if PACKED else window[i],)
    found += (inputs.to(tl.float32),)
    return found


@triton.jit
def _activation(seen, weights, TAPS: tl.constexpr):
    """[R, BK] SiLU of the convolution, and its derivative."""
    u = seen[TAPS - 1] * weights[TAPS - 1][None, :]
    for back in tl.static_range(1, TAPS):
        u += seen[TAPS - 1 - back] * weights[TAPS - 1 - back][None, :]
    return silu(u)


@triton.jit
def factor(s, K: tl.constexpr, MEAN: tl.constexpr, EPSILON: tl.constexpr):
    """[R] what the norm multiplies the rows of s by."""
    square = tl.sum(s * s, 1)
    if MEAN:
        square = square * (1.0 / K)
    return tl.rsqrt(square + EPSILON)


@triton.jit
def _walks(length, heads, blocks, steps, R: tl.constexpr):
    """Row of the batch, head, and first token of this program; how far from this its walks [R] begin, all int64; and
    how many tokens are left from there on."""
    program = tl.program_id(0).to(tl.int64)
    block = program // heads
    begin = (block % blocks) * (R * steps)
    walk = tl.arange(0, R).to(tl.int64) * steps
    return block // blocks, program % heads, begin, walk, (length - begin - walk).to(tl.int32)


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    x, weight, age, y, length, heads, blocks, steps, batch_stride, stride,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, TAPS: tl.constexpr, NORM: tl.constexpr, MEAN: tl.constexpr,
    EPSILON: tl.constexpr, PACKED: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    row, head, begin, walk, left = _walks(length, heads, blocks, steps, R)
    columns = tl.arange(0, BK)
    weights = _weights(weight, head, columns, K, TAPS)
    width = heads * K
    x += row * batch_stride + begin * stride + head * K
    y += (row * length + begin) * width + head * K
    window = _before(x, age, begin, walk, left, columns, stride, K, TAPS, PACKED)
    for start in tl.range(0, steps, UNROLLED, num_stages=2):
        for turn in tl.static_range(UNROLLED):
            step = start + turn
            there = step < left
            inputs = load_tile((x + step * stride, walk * stride), there, columns, K)
            window = _seen(window, inputs, _index(age, begin + walk + step, there, PACKED), TAPS, PACKED)
            s, _ = _activation(window, weights, TAPS)
            if NORM:
                s *= factor(s, K, MEAN, EPSILON)[:, None]
            store_tile((y + step * width, walk * width), s, there, columns, K)


@triton.jit
def _read(
    grad_y, x, age, step, begin, walk, left, columns, width, stride, K: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Of a step, the inputs and the output's gradients, [R, BK], and the indices of their tokens."""
    there = step < left
    inputs = load_tile((x + step * stride, walk * stride), there, columns, K)
    gradients = load_tile((grad_y + step * width, walk * width), there, columns, K)
    return inputs, gradients, _index(age, begin + walk + step, there, PACKED)


@triton.jit
def _step_back(
    grad_x, weights, state, read, step, walk, left, columns, width,
    K: tl.constexpr, TAPS: tl.constexpr, NORM: tl.constexpr, MEAN: tl.constexpr, EPSILON: tl.constexpr,
    PACKED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """The state after a step: inputs and input gradients of the last TAPS tokens, and weight gradients, which tokens
    add to that are a walk's OWN."""
    window, pending, sums = state
    inputs, gradients, index = read
    window = _seen(window, inputs, index, TAPS, PACKED)
    dy = gradients.to(tl.float32)
    s, slope = _activation(window, weights, TAPS)
    if NORM:
        r = factor(s, K, MEAN, EPSILON)
        along = r * r * r * tl.sum(s * dy, 1)
        if MEAN:
            along = along * (1.0 / K)
        dy = r[:, None] * dy - along[:, None] * s
    du = dy * slope
    added = ()
    reached = ()
    for i in tl.static_range(TAPS):
        added += (sums[i] + du * window[i] if OWN else sums[i],)
        share = du * weights[i][None, :]
        if PACKED and i < TAPS - 1:
            share = tl.where((index >= TAPS - 1 - i)[:, None], share, 0.0)
        if i < TAPS - 1:
            share += pending[i + 1]
        reached += (share,)
    done = step - (TAPS - 1)
    store_tile((grad_x + done * width, walk * width), reached[0], (done >= 0) & (done < left), columns, K)
    return window, reached, added


@triton.jit(do_not_specialize=NUMBERS)
def _backward(
    grad_y, x, weight, age, grad_x, grad_weight, length, heads, blocks, steps, batch_stride, stride,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, TAPS: tl.constexpr, NORM: tl.constexpr, MEAN: tl.constexpr,
    EPSILON: tl.constexpr, PACKED: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """`grad_weight` [programs / heads, heads * K, TAPS] float32."""
    row, head, begin, walk, left = _walks(length, heads, blocks, steps, R)
    columns = tl.arange(0, BK)
    weights = _weights(weight, head, columns, K, TAPS)
    width = heads * K
    x += row * batch_stride + begin * stride + head * K
    grad_y += (row * length + begin) * width + head * K
    grad_x += (row * length + begin) * width + head * K
    zeros = ()  # input gradients of the last TAPS tokens; weight gradients
    for _ in tl.static_range(TAPS):
        zeros += (tl.zeros([R, BK], tl.float32),)
    state = _before(x, age, begin, walk, left, columns, stride, K, TAPS, PACKED), zeros, zeros
    for start in tl.range(0, steps, UNROLLED, num_stages=2):
        for turn in tl.static_range(UNROLLED):
            step = start + turn
            read = _read(grad_y, x, age, step, begin, walk, left, columns, width, stride, K, PACKED)
            state = _step_back(
                grad_x, weights, state, read, step, walk, left, columns, width,
                K, TAPS, NORM, MEAN, EPSILON, PACKED, True,
            )  # fmt: skip
    after = ()
    for i in tl.static_range(TAPS - 1):
        after += (_read(grad_y, x, age, steps + i, begin, walk, left, columns, width, stride, K, PACKED),)
    for i in tl.static_range(TAPS - 1):
        state = _step_back(
            grad_x, weights, state, after[i], steps + i, walk, left, columns, width,
            K, TAPS, NORM, MEAN, EPSILON, PACKED, False,
        )  # fmt: skip
    block = row * blocks + (tl.program_id(0) // heads) % blocks
    into = grad_weight + ((block * heads + head) * K + columns) * TAPS
    for i in tl.static_range(TAPS):
        tl.store(into + i, tl.sum(state[2][i], 0), mask=columns < K)


class Plan:
    """The two launches for inputs of one shape."""

    def __init__(self, shape, strides, head_dim, taps, dtypes, device, packed, norm, epsilon, aligned):
        batch, length, channels = shape
        heads, tile = channels // head_dim, max(16, triton.next_power_of_2(head_dim))
        unrolled = max(4, taps - 1)  # with fewer, Triton loads nothing ahead, as inputs are seen for longer
        constants = {
            "K": head_dim, "BK": tile, "TAPS": taps, "NORM": norm != 0, "MEAN": norm == 1, "EPSILON": epsilon,
            "PACKED": packed, "UNROLLED": unrolled,
        }  # fmt: skip
        launchers, numbers = [], []
        for kernel, config in zip((_forward, _backward), launch.CONVOLUTION[dtypes[0].itemsize], strict=True):
            walks = max(1, config.tile // tile)
            steps = max(1, min(config.steps, -(-length // walks)))
            if taps > 4:  # a thread has as much for half as many numbers
                config = config._replace(warps=2 * config.warps)
            rows, warps = batch * heads * config.warps, WARPS * launch.card(device)[1]
            while steps > FEWEST_STEPS and rows * -(-length // (walks * steps)) < warps:
                steps //= 2
            steps = -(-steps // unrolled) * unrolled
            blocks = -(-length // (walks * steps))
            options = {"R": walks} | config.options()
            launchers.append(Launcher(kernel, (batch * blocks * heads,), constants | options, aligned=aligned))
            numbers.append((length, heads, blocks, steps, *strides))
        self.forward, self.backward = launchers
        self.forward_numbers, self.backward_numbers = numbers
        self.output = (batch, length, heads, head_dim)
        self.partial = (batch * numbers[1][2], channels, taps)


plan_of = lru_cache(maxsize=1024)(Plan)


def _planned(tensors, head_dim: int, norm: int, epsilon: float) -> Plan:
    """The plan for x, weight and age, and perhaps the output's gradient, as the kernels take them."""
    x, weight, age, *_ = tensors
    sizes = x.shape, x.stride()[:2], head_dim, weight.shape[1]
    options = age is not None, norm, epsilon
    return plan_of(*sizes, dtypes_of(tensors[:3]), x.device, *options, are_aligned(tensors))


def _in_rows(x: Tensor, weight: Tensor, age: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors as the kernels take them, the channels of a token in a row."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, weight.contiguous(), None if age is None else age.contiguous()


def _run(tensors, *options) -> Tensor:
    tensors = _in_rows(*tensors)
    plan = _planned(tensors, *options)
    y = tensors[0].new_empty(plan.output)
    if y.numel():
        plan.forward(*tensors, y, *plan.forward_numbers)
    return y


def _run_backward(tensors, grad_y: Tensor, *options) -> list[Tensor]:
    """Gradients of x and of weight."""
    tensors = x, weight, _ = _in_rows(*tensors)
    grad_y = grad_y.to(x.dtype).contiguous()
    plan = _planned((*tensors, grad_y), *options)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return [grad_x, torch.zeros_like(weight)]
    partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
    plan.backward(grad_y, *tensors, grad_x, partial, *plan.backward_numbers)
    return [grad_x, partial.sum(0).to(weight.dtype)]


def _shape(tensors, head_dim: int, *_) -> tuple[int, ...]:
    batch, length, channels = tensors[0].shape
    return batch, length, channels // head_dim, head_dim


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OP = Op(
    LIBRARY,
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? age",
    "int head_dim, int norm, float epsilon",
    _run,
    _run_backward,
    _shape,
)


def convolution(x: Tensor, weight: Tensor, age: Tensor | None, head_dim: int, norm: int, epsilon: float) -> Tensor:
    """[B, T, H, K], arguments as in `short_convolution`; norm is 0 for none, 1 for RMS, 2 for l2."""
    if (sentence := refusal(x, weight, head_dim)) is not None:
        raise ValueError(sentence)
    return OP(x, weight, age, head_dim, norm, epsilon)


def refusal(x: Tensor, weight: Tensor, head_dim: int) -> str | None:
    """Why the kernels do not take a call, in one sentence, or None where they do."""
    if head_dim > LARGEST_WIDTH or weight.shape[1] > MOST_TAPS:
        return (
            f"head_dim is {head_dim} and weight has {weight.shape[1]} taps; with impl='triton' at most {LARGEST_WIDTH} "
            f"and {MOST_TAPS} are taken."
        )
    return triton_device.refusal_of(x=x, weight=weight)
