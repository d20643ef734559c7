"""The schedule in one launch: from keys, gains and ridges to weights eta / W_t and log decays, and back.

A program takes a block of tokens of one head, reads their keys shifted in place, and ends with three numbers a token:
weight, log decay, and the energy E, kept for the backward. All of it in float32, E from the rounded keys that the
products use too. Floor a token and head: K keys read, 8 bytes in and 12 out; backward K read and K written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_layout import NAMESPACE, NUMBERS, Layout, chunk_of, load_rows, store_rows, x_rows

BLOCK = 64  # rows of keys that a program reads; its tokens are W - 1 fewer

RIDGE = {"none": 0, "direct": 1, "scale_coupled": 2}


@triton.jit
def _there(place, count, previous_valid, tail_valid, sequence, W: tl.constexpr, SHIFT: tl.constexpr):
    """Whether the pairs `place` [R] exist."""
    there = (place >= 0) & (place < count)
    if SHIFT:
        there = there & ((place > 0) | (tl.load(previous_valid + sequence) != 0))
    if W > 1:
        old = (place < 0) & (place >= 1 - W)
        there = there | (tl.load(tail_valid + sequence * (W - 1) + W - 1 + place, mask=old, other=0) != 0)
    return there


@triton.jit
def _window_size(place, count, previous_valid, tail_valid, sequence, W: tl.constexpr, SHIFT: tl.constexpr):
    """Pairs in the windows of the tokens `place` [R], at least 1."""
    size = place * 0
    for d in tl.static_range(W):
        size += _there(place - d, count, previous_valid, tail_valid, sequence, W, SHIFT).to(tl.int32)
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
def _norms(rows, there, ROWS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[R] squared norms."""
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, K, BK):
        x = load_rows(rows, there, start + tl.arange(0, BK), K).to(tl.float32)
        total += tl.sum(x * x, 1)
    return total


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    k, gain, ridge, previous, previous_valid, tail, tail_valid, lengths, weight, log_decay, energy,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    sequence, low, count, start = chunk_of(
        program // heads, bounds, first, owner, length, longest, ROWS - W + 1, PACKED
    )
    rows = tl.arange(0, ROWS)
    place = start - (W - 1) + rows
    stored = (rows >= W - 1) & (place < count)
    if MASKED:
        count = tl.load(lengths + sequence).to(tl.int32)
    there = _there(place, count, previous_valid, tail_valid, sequence, W, SHIFT)
    statistic = _norms(x_rows(k, previous, tail, sequence, low, place, head, heads, K, W, SHIFT), there, ROWS, K, BK)
    if W > 1:
        apart = rows[:, None] - rows[None, :]
        statistic = tl.sum(tl.where((apart >= 0) & (apart < W), statistic[None, :], 0.0), 1)
    size = _window_size(place, count, previous_valid, tail_valid, sequence, W, SHIFT)
    statistic = statistic / size
    token = (low + place) * heads + head
    active = there & stored
    beta = tl.load(gain + token, mask=active, other=0.0).to(tl.float32)
    base = tl.zeros([ROWS], tl.float32)
    if RIDGE > 0:
        base = tl.load(ridge + token, mask=active, other=0.0).to(tl.float32)
    eta, used, _, _ = _step_size(beta, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)
    tl.store(weight + token, eta / size, mask=stored)
    tl.store(log_decay + token, _log1p_negative(tl.minimum(eta * used, 1.0 - FLOOR)), mask=stored)
    tl.store(energy + token, statistic, mask=stored)


@triton.jit
def _token_gradients(
    place, gain, ridge, energy, grad_weight, grad_log_decay, previous_valid, tail_valid, sequence, low, count, head,
    heads, W: tl.constexpr, SHIFT: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Gradients of gain, of ridge, and of the window's sum of squared norms, for the tokens `place` [R]; else 0."""
    active = (place >= 0) & _there(place, count, previous_valid, tail_valid, sequence, W, SHIFT)
    token = (low + place) * heads + head
    size = _window_size(place, count, previous_valid, tail_valid, sequence, W, SHIFT)
    beta = tl.load(gain + token, mask=active, other=0.0).to(tl.float32)
    base = beta * 0.0
    if RIDGE > 0:
        base = tl.load(ridge + token, mask=active, other=0.0).to(tl.float32)
    statistic = tl.load(energy + token, mask=active, other=0.0)
    eta, used, safe, possible = _step_size(beta, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)

    grad_eta = tl.load(grad_weight + token, mask=active, other=0.0) / size
    alpha = eta * used
    grad_alpha = -tl.load(grad_log_decay + token, mask=active, other=0.0) / (1.0 - tl.minimum(alpha, 1.0 - FLOOR))
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
    return grad_gain, tl.where(active, grad_ridge, 0.0), tl.where(active, grad_energy / size, 0.0)


@triton.jit
def _key_gradients(
    pair, there, keys, into, gain, ridge, energy, grad_weight, grad_log_decay, previous_valid, tail_valid, sequence,
    low, count, head, heads, K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr,
    RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, DETACH: tl.constexpr, EPSILON: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """Writes 2 x times the sum of what the windows of a pair, at its own token and after it, ask of their energy."""
    scale = tl.zeros([pair.shape[0]], tl.float32)
    for d in tl.static_range(W):
        _, _, of_sum = _token_gradients(
            pair + d, gain, ridge, energy, grad_weight, grad_log_decay, previous_valid, tail_valid, sequence, low,
            count, head, heads, W, SHIFT, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR,
        )  # fmt: skip
        scale += of_sum
    for start in tl.static_range(0, K, BK):
        columns = start + tl.arange(0, BK)
        key = load_rows(keys, there, columns, K).to(tl.float32)
        store_rows(into, 2.0 * scale[:, None] * key, there, columns, K)


@triton.jit(do_not_specialize=NUMBERS)
def _backward(
    k, gain, ridge, previous, previous_valid, tail, tail_valid, lengths, energy, grad_weight, grad_log_decay,
    grad_k, grad_gain, grad_ridge, grad_previous, grad_tail, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, BEFORE: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens of a block; a sequence's first block adds those of the pairs from before the call."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    sequence, low, tokens, start = chunk_of(program // heads, bounds, first, owner, length, longest, ROWS, PACKED)
    count = tokens
    if MASKED:
        count = tl.load(lengths + sequence).to(tl.int32)
    place = start + tl.arange(0, ROWS)
    stored = place < tokens
    token = (low + place) * heads + head
    of_gain, of_ridge, _ = _token_gradients(
        place, gain, ridge, energy, grad_weight, grad_log_decay, previous_valid, tail_valid, sequence, low, count,
        head, heads, W, SHIFT, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR,
    )  # fmt: skip
    tl.store(grad_gain + token, of_gain, mask=stored)
    if RIDGE > 0:
        tl.store(grad_ridge + token, of_ridge, mask=stored)
    _key_gradients(
        place + SHIFT, stored, k + token * K, grad_k + token * K, gain, ridge, energy, grad_weight, grad_log_decay,
        previous_valid, tail_valid, sequence, low, count, head, heads, K, BK, W, SHIFT, RIDGE, DIRECT, CAPPED, DETACH,
        EPSILON, FLOOR,
    )  # fmt: skip
    if W - 1 + SHIFT > 0:
        row = tl.arange(0, BEFORE)
        pair = row - (W - 1)
        there = (row < W - 1 + SHIFT) & (start == 0) & (tokens > 0)
        _key_gradients(
            pair, there, x_rows(k, previous, tail, sequence, low, pair, head, heads, K, W, SHIFT),
            x_rows(grad_k, grad_previous, grad_tail, sequence, low, pair, head, heads, K, W, SHIFT),
            gain, ridge, energy, grad_weight, grad_log_decay, previous_valid, tail_valid, sequence, low, count, head,
            heads, K, BK, W, SHIFT, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR,
        )  # fmt: skip


def _options(k: Tensor, ridge_mode: int, direct: bool, capped: bool, epsilon: float, decay_floor: float) -> dict:
    width = k.shape[-1]
    return {
        "K": width,
        "BK": min(triton.next_power_of_2(width), 128),
        "RIDGE": ridge_mode,
        "DIRECT": direct,
        "CAPPED": capped,
        "EPSILON": epsilon,
        "FLOOR": decay_floor,
        "num_warps": 4,
    }


def _grid(layout: Layout, k: Tensor) -> tuple[tuple[int], tuple]:
    return (layout.chunks * k.shape[2],), (
        layout.bounds, layout.first, layout.owner, layout.length, layout.longest, k.shape[2]
    )  # fmt: skip


@torch.library.custom_op(f"{NAMESPACE}::schedule", mutates_args=())
def schedule(
    k: Tensor,
    gain: Tensor,
    ridge: Tensor,
    previous_key: Tensor,
    previous_valid: Tensor,
    tail_x: Tensor,
    tail_valid: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor,
    window: int,
    shifted: bool,
    ridge_mode: int,
    direct: bool,
    capped: bool,
    detach: bool,
    epsilon: float,
    decay_floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """weight, log decay and energy, float32 [B, T, H].

    Args:
        k: [B, T, H, K]; gain: [B, T, H]; ridge: [B, T, H].
        previous_key: [S, H, K]; tail_x: [S, W - 1, H, K]; previous_valid: [S], tail_valid: [S, W - 1], bool.
        lengths: [B] int64 tokens of each row, the rest of which does nothing; cu_seqlens: [S + 1].
        ridge_mode: a value of `RIDGE`; direct: gain is the step size; capped: by 2 / denominator.

    Tensors that a rule or call does not have are empty.
    """
    rows = max(BLOCK, triton.next_power_of_2(2 * window))
    grid, where = _grid(Layout.of(k, cu_seqlens, rows - window + 1), k)
    k, gain, ridge, previous_key, tail_x = (t.contiguous() for t in (k, gain, ridge, previous_key, tail_x))
    weight, log_decay, energy = (torch.empty(k.shape[:3], dtype=torch.float32, device=k.device) for _ in range(3))
    _forward[grid](
        k, gain, ridge, previous_key, previous_valid, tail_x, tail_valid, lengths, weight, log_decay, energy, *where,
        W=window, SHIFT=int(shifted), ROWS=rows, MASKED=lengths.numel() > 0, PACKED=cu_seqlens.numel() > 0,
        **_options(k, ridge_mode, direct, capped, epsilon, decay_floor),
    )  # fmt: skip
    return weight, log_decay, energy


@schedule.register_fake
def _(k, *_):
    return tuple(k.new_empty(k.shape[:3], dtype=torch.float32) for _ in range(3))


@torch.library.custom_op(f"{NAMESPACE}::schedule_backward", mutates_args=())
def schedule_backward(
    grad_weight: Tensor,
    grad_log_decay: Tensor,
    energy: Tensor,
    k: Tensor,
    gain: Tensor,
    ridge: Tensor,
    previous_key: Tensor,
    previous_valid: Tensor,
    tail_x: Tensor,
    tail_valid: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor,
    window: int,
    shifted: bool,
    ridge_mode: int,
    direct: bool,
    capped: bool,
    detach: bool,
    epsilon: float,
    decay_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, gain, ridge, previous_key and tail_x. The energy has none: it is a by-product."""
    grid, where = _grid(Layout.of(k, cu_seqlens, BLOCK), k)
    k, gain, ridge, previous_key, tail_x = (t.contiguous() for t in (k, gain, ridge, previous_key, tail_x))
    into = [torch.empty_like(t) for t in (k, gain, ridge)]
    into += [torch.zeros_like(t) for t in (previous_key, tail_x)]  # documents without tokens are not visited
    _backward[grid](
        k, gain, ridge, previous_key, previous_valid, tail_x, tail_valid, lengths, energy,
        grad_weight.contiguous(), grad_log_decay.contiguous(), *into, *where,
        W=window, SHIFT=int(shifted), ROWS=BLOCK, BEFORE=triton.next_power_of_2(max(window - 1 + shifted, 1)),
        MASKED=lengths.numel() > 0, PACKED=cu_seqlens.numel() > 0, DETACH=detach,
        **_options(k, ridge_mode, direct, capped, epsilon, decay_floor),
    )  # fmt: skip
    return tuple(into)  # type: ignore[return-value]


@schedule_backward.register_fake
def _(grad_weight, grad_log_decay, energy, k, gain, ridge, previous_key, previous_valid, tail_x, *_):
    return tuple(t.new_empty(t.shape) for t in (k, gain, ridge, previous_key, tail_x))


def _save(ctx, inputs, output):
    ctx.save_for_backward(output[2], *inputs[:9])
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(True)


def _differentiate(ctx, grad_weight, grad_log_decay, grad_energy):
    grad_k, grad_gain, grad_ridge, grad_previous, grad_tail = schedule_backward(
        grad_weight, grad_log_decay, *ctx.saved_tensors, *ctx.options
    )
    return grad_k, grad_gain, grad_ridge, grad_previous, None, grad_tail, *[None] * (3 + len(ctx.options))


schedule.register_autograd(_differentiate, setup_context=_save)
