"""The schedule in one launch: from keys, gains and ridges to weights eta / W_t and log decays; and the way back.

A program takes a chunk of tokens of one head, reads their keys shifted in place, and ends with three numbers a token:
weight, log decay, and the energy E, kept for the backward. All of it in float32, E from the rounded keys that the
products use too. Energies lie by chunk, [chunks, H, TILE]. So do weights, [1, ...], 0 for what is no token, and for
windows, [2, ...], behind them sums over each window of w exp(u - u of the write). Log decays, to base 2, run from the
chunk's start, and from its last token on are those of its end: one sum, [1, ...], or with PARTS of 2, [2, ...],
the sum of the decays rounded down to multiples of 2^-12, which is exact while it is below 4,096, and that of the rest.

The backward is the end of each core's: `step_gradients`, of what it has in registers. falcon_1, whose inverse needs
the squared norms anyway, has no launch of its own for it: `_invert` fills the same tensors with `steps`.

Floor a token and head: K keys read, 8 bytes in and 12 out.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launcher
from .triton_layout import NUMBERS, Layout, Tables, chunk_of, exists, load_rows, moved, x_rows
from .triton_smoothness import SMOOTHNESS, smoothness

RIDGE = {"none": 0, "direct": 1, "scale_coupled": 2}
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def pair_exists(
    place, count, previous_valid, tail_valid, sequence, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr
):
    """Whether the pairs `place` [R] exist."""
    there = exists(place, (place >= 0) & (place < count), SHIFT, CARRIED)
    if SHIFT and CARRIED:
        there = there & ((place > 0) | (tl.load(previous_valid + sequence) != 0))
    if W > 1 and CARRIED:
        old = (place < 0) & (place >= 1 - W)
        there = there | (tl.load(tail_valid + sequence * (W - 1) + W - 1 + place, mask=old, other=0) != 0)
    return there


@triton.jit
def window_size(
    place, count, previous_valid, tail_valid, sequence, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr
):
    """Pairs in the windows of the tokens `place` [R], at least 1."""
    size = place * 0
    for d in tl.static_range(W):
        size += pair_exists(place - d, count, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED).to(tl.int32)
    return tl.maximum(size, 1).to(tl.float32)


@triton.jit
def _step_size(
    gain, ridge, energy, active, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, EPSILON: tl.constexpr
):
    """Step size, the ridge as the recurrence uses it, the denominator or 1, and whether it is above 0."""
    used = ridge
    if RIDGE == 2:
        used = ridge * energy
    denominator = energy + used + EPSILON
    possible = denominator > 0
    safe = tl.where(possible, denominator, 1.0)
    if not DIRECT:
        eta = gain / safe
    elif CAPPED:
        eta = tl.minimum(gain, 2.0 / safe)
    else:
        eta = gain
        possible = active
    return tl.where(active & possible, eta, 0.0), tl.where(active, used, 0.0), safe, possible


@triton.jit
def _log1p_negative(a):
    """log(1 - a) for a in [0, 1), to float32's accuracy also near 0: there as -2 artanh(a / (2 - a))."""
    s = a / (2.0 - a)
    square = s * s
    near = -2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(a < 0.25, near, tl.log(1.0 - a))


@triton.jit
def window_sum(numbers, row, SIGN: tl.constexpr, W: tl.constexpr, u=None):
    """[TILE] sums of W numbers, from each row's own on down, or with a SIGN of -1 up; from running log decays u [TILE],
    each number decayed from its own row to the sum's.
    """
    total = numbers
    for bit in tl.static_range(7):
        if W >> bit & 1:
            if W & ((1 << bit) - 1):
                total += _decayed(numbers, row, SIGN * (W & ((1 << bit) - 1)), u)
            else:
                total = numbers
        if W >> bit > 1:
            numbers += _decayed(numbers, row, SIGN * (1 << bit), u)
    return total


@triton.jit
def _decayed(numbers, row, by, u):
    found = moved(numbers, by, row)
    if u is not None:
        found *= tl.exp2(tl.minimum(u - moved(u, by, row), 0.0))
    return found


@triton.jit
def gain_and_ridge(gain, ridge, token, active, RIDGE: tl.constexpr):
    """[R] gains and ridges of the tokens that are `active`, else 0; ridges are 0 where the rule has none."""
    beta = tl.load(gain + token, mask=active, other=0.0).to(tl.float32)
    base = tl.zeros(token.shape, tl.float32)
    if RIDGE > 0:
        base = tl.load(ridge + token, mask=active, other=0.0).to(tl.float32)
    return beta, base


@triton.jit
def steps(
    beta, base, statistic, active, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Step sizes and log decays, to base 2, of gains, ridges and energies; 0 where not `active`."""
    eta, used, _, _ = _step_size(beta, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)
    return eta, _log1p_negative(tl.minimum(eta * used, 1.0 - FLOOR)) * LOG2_E


@triton.jit
def store_running(at, behind, decay, PARTS: tl.constexpr):
    """Stores the running sum of a chunk's log decays, of PARTS of 2 the second `behind` the first, which it returns."""
    if PARTS == 2:
        coarse = tl.floor(decay * 4096.0) * (1.0 / 4096.0)
        tl.store(at + behind, tl.cumsum(decay - coarse, 0))
        decay = coarse
    decay = tl.cumsum(decay, 0)
    tl.store(at, decay)
    return decay


@triton.jit
def u_after(log_decay, places, token, OPERAND: tl.constexpr):
    """u after the tokens, 0 before the first, in two parts."""
    coarse = tl.load(log_decay + token, mask=token >= 0, other=0.0)
    if tl.bfloat16 == OPERAND:
        return coarse, tl.zeros(token.shape, tl.float32)
    else:
        return coarse, tl.load(log_decay + places + token, mask=token >= 0, other=0.0)


@triton.jit
def u_around(log_decay, places, begin, M: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """u that a block finds, and that it leaves, each in two parts."""
    before, last = tl.maximum(begin - 1, 0), tl.minimum(begin + M, TILE) - 1
    bc, bf = tl.where(begin > 0, tl.load(log_decay + before), 0.0), 0.0
    ec, ef = tl.load(log_decay + last), 0.0
    if tl.bfloat16 != OPERAND:
        bf = tl.where(begin > 0, tl.load(log_decay + places + before), 0.0)
        ef = tl.load(log_decay + places + last)
    return bc, bf, ec, ef


@triton.jit
def u_at_end(log_decay, places, C: tl.constexpr, OPERAND: tl.constexpr):
    """u_C in two parts."""
    if tl.bfloat16 == OPERAND:
        return tl.load(log_decay + C - 1), 0.0
    else:
        return tl.load(log_decay + C - 1), tl.load(log_decay + places + C - 1)


@triton.jit
def between(to_coarse, to_fine, from_coarse, from_fine, mask):
    """exp(to - from) where `mask`, 0 elsewhere; both given in two parts, already shaped to broadcast."""
    return tl.exp2(tl.where(mask, (to_coarse - from_coarse) + (to_fine - from_fine), float("-inf")))


@triton.jit
def _norms(rows, there, ROWS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[R] squared norms."""
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, K, BK):
        x = load_rows(rows, there, start + tl.arange(0, BK), K).to(tl.float32)
        total += tl.sum(x * x, 1)
    return total


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    k, gain, ridge, previous, previous_valid, tail, tail_valid, lengths, weight, log_decay, energy, top,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, PARTS: tl.constexpr, RIDGE: tl.constexpr,
    DIRECT: tl.constexpr, CAPPED: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr,
    SMOOTHNESS: tl.constexpr,
):  # fmt: skip
    """The W - 1 pairs before a chunk and its own C, at most, are the TILE rows of one tile."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    step = tl.arange(0, TILE)
    place = start + step
    stored = (place < count) & (step < C)
    if MASKED:
        count = tl.load(lengths + sequence).to(tl.int32)
    there = pair_exists(place, count, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    if SMOOTHNESS > 0:
        statistic, unit = smoothness(
            k, previous, tail, sequence, low, count, start, step, head, heads, K, BK, C, W, SHIFT, CARRIED, SMOOTHNESS
        )
    else:
        pair = place - (W - 1)
        readable = there
        if W > 1:
            readable = pair_exists(pair, count, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
        x = x_rows(k, previous, tail, sequence, low, start, step - (W - 1), head, heads, K, W, SHIFT, CARRIED)
        statistic = window_sum(_norms(x, readable, TILE, K, BK), step, 1, W)
    size = window_size(place, count, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    statistic = statistic / size
    token = (low + place) * heads + head
    active = there & stored
    beta, base = gain_and_ridge(gain, ridge, token, active, RIDGE)
    eta, decay = steps(beta, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON, FLOOR)
    eta = eta / size
    number = program * TILE + step
    behind = tl.num_programs(0).to(tl.int64) * TILE
    decay = store_running(log_decay + number, behind, decay, PARTS)
    tl.store(weight + number, eta)
    tl.store(energy + number, statistic)
    if SMOOTHNESS == 1 and top is not None:
        for a in tl.static_range(W):
            tl.store(top + a * behind + number, unit[a])
    if W > 1:
        tl.store(weight + behind + number, window_sum(eta, step, -1, W, decay))


@triton.jit
def step_gradients(
    beta, base, statistic, grad_eta, grad_decay, active, RIDGE: tl.constexpr, DIRECT: tl.constexpr,
    CAPPED: tl.constexpr, DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Gradients of gain, ridge and energy from those of step size and natural log decay, 0 where not `active`."""
    eta, used, safe, possible = _step_size(beta, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)
    alpha = eta * used
    grad_alpha = -grad_decay / (1.0 - tl.minimum(alpha, 1.0 - FLOOR))
    grad_alpha = tl.where(alpha <= 1.0 - FLOOR, grad_alpha, 0.0)  # none through the clamp
    grad_used = grad_alpha * eta
    grad_eta = tl.where(active & possible, grad_eta + grad_alpha * used, 0.0)
    grad_energy = beta * 0.0
    if not DIRECT:
        grad_gain = grad_eta / safe
        grad_energy = -grad_eta * eta / safe
    elif CAPPED:
        cap = 2.0 / safe
        share = tl.where(beta < cap, 1.0, tl.where(beta == cap, 0.5, 0.0))
        grad_gain = grad_eta * share
        grad_energy = -grad_eta * (1.0 - share) * cap / safe
    else:
        grad_gain = grad_eta
    grad_used += grad_energy
    grad_ridge = grad_used
    if RIDGE == 2:
        grad_ridge = grad_used * statistic
        if not DETACH:
            grad_energy += grad_used * base
    return tl.where(active, grad_gain, 0.0), tl.where(active, grad_ridge, 0.0), tl.where(active, grad_energy, 0.0)


class Options(NamedTuple):
    """What a rule asks of its schedule; the names are those of `Rule`."""

    window: int
    shifted: bool
    ridge: int  # a value of `RIDGE`
    direct: bool  # gain is the step size
    capped: bool  # by 2 / denominator
    detach_energy: bool
    epsilon: float
    decay_floor: float
    smoothness: int = 0  # a value of `SMOOTHNESS`; 0 is the mean squared norm

    def constants(self) -> dict[str, object]:
        """As the kernels name them, those of the way back included."""
        return {
            "RIDGE": self.ridge, "DIRECT": self.direct, "CAPPED": self.capped, "DETACH": self.detach_energy,
            "EPSILON": self.epsilon, "FLOOR": self.decay_floor,
        }  # fmt: skip


class Before(NamedTuple):
    """Pairs from before the call; all None in a call that carries no state, and each where a rule has none."""

    previous_key: Tensor | None = None  # [S, H, K]
    previous_valid: Tensor | None = None  # [S] bool
    tail_x: Tensor | None = None  # [S, W - 1, H, K]
    tail_v: Tensor | None = None  # [S, W - 1, H, V]
    tail_valid: Tensor | None = None  # [S, W - 1] bool


class Call(NamedTuple):
    """What kernels are given, contiguous."""

    q: Tensor  # [B, T, H, K]; float32, bfloat16 or float16, the same for q, k and v
    k: Tensor
    v: Tensor  # [B, T, H, V]
    gain: Tensor  # [B, T, H], or per channel [B, T, H, V]
    ridge: Tensor | None  # [B, T, H]
    memory: Tensor | None  # [S, H, K, V] float32; S is B, or the number of documents; None for zero
    before: Before  # 0 where it is not valid
    lengths: Tensor | None  # [B] int64 tokens of each row, the rest of which does nothing
    tables: Tables


class Kept(NamedTuple):
    """What a forward leaves to the backward; None where a rule has none."""

    weight: Tensor  # of steps; per channel what gains are multiplied by
    log_decay: Tensor  # running, of each chunk, to base 2
    energy: Tensor
    inverse: Tensor | None = None  # of falcon_1; of falcon_3 the top eigenvectors of windows
    states: Tensor | None = None  # what chunks find
    residuals: Tensor | None = None  # what is written; of falcon_3 what of the memory a chunk takes away
    output: Tensor | None = None  # the op's, and the final memory, where rates are per channel
    final: Tensor | None = None


class Gradients(NamedTuple):
    """Where a backward writes: everything that is given; and adds, in `before`, which is zero."""

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor
    ridge: Tensor | None
    memory: Tensor | None
    before: Before


Shape = tuple[tuple[int, ...], torch.dtype]  # of one of `Kept`


def parts(dtype: torch.dtype) -> int:
    """The sums in which the regression rules take log decays."""
    return 1 if dtype == torch.bfloat16 else 2


def shapes(layout: Layout, heads: int, window: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Of weight, log decay and energy."""
    one = (layout.chunks, heads, triton.next_power_of_2(layout.chunk + window - 1))
    return (min(window, 2), *one), (parts, *one), one


class Plan:
    """All of a launch that follows from shapes and options; `parts` are the sums that log decays come in."""

    def __init__(self, layout: Layout, heads: int, key_dim: int, options: Options, masked: bool, carried: bool,
                 parts: int = 1, aligned: bool = False):  # fmt: skip
        self.numbers = (layout.length, layout.longest, heads)
        self.shapes = shapes(layout, heads, options.window, parts)
        least, most, warps = 1, 128, 4  # channels at a time
        if options.smoothness == SMOOTHNESS["exact"]:
            least, most, warps = 16, 64, 1
        elif options.smoothness:
            least, most = 16, 32
        constants = {
            "K": key_dim, "BK": min(max(least, triton.next_power_of_2(key_dim)), most), "W": options.window,
            "SHIFT": int(options.shifted), "C": layout.chunk, "TILE": self.shapes[2][2], "MASKED": masked,
            "PACKED": layout.packed, "CARRIED": carried, "PARTS": parts, "SMOOTHNESS": options.smoothness,
            "num_warps": warps,
        } | options.constants()  # fmt: skip
        del constants["DETACH"]  # asks nothing of the forward
        self.forward = Launcher(_forward, (layout.chunks * heads,), constants, aligned=aligned)


def forward(plan: Plan, call: Call, top: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """weight, log decay and energy, float32 in the shapes of the first lines of this file.

    Fills `top`, given only where smoothness is exact, with the eigenvectors of windows [W, chunks, H, TILE].
    """
    before = call.before
    weight, log_decay, energy = (torch.empty(shape, dtype=torch.float32, device=call.k.device) for shape in plan.shapes)
    plan.forward(
        call.k, call.gain, call.ridge, before.previous_key, before.previous_valid, before.tail_x, before.tail_valid,
        call.lengths, weight, log_decay, energy, top, *call.tables, *plan.numbers,
    )  # fmt: skip
    return weight, log_decay, energy
