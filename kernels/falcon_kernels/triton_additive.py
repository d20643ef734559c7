"""The additive rules with one decay a head, falcon_1a and falcon_3a: one kernel, whose write weights are a band.

In a chunk that starts at token a, with u the running log decay from there and w = eta / W,

    M_tj = sum_{d < W} [a <= j+d <= t] w_{j+d} exp(u_t - u_{j+d})        e_j = M_{C-1, j}
    O = exp(u) Q S + (Q X' o M) V                                        S' = exp(u_C) S + X' Diag(e) V,

for the chunk's own pairs j and the W - 1 before them (the lookback, a second, small tile). Reading before the write
takes the row t - 1 of M and u. All but W - 1 diagonals of M are exp(u_t - u_{j+W-1}) times a vector over j.

Forward: a program takes a part of a sequence, a head and a tile of value channels, keeps S in registers and reads q, k
and v once. One part is a whole sequence where the batch fills the card; else parts first sum up what they write (a
launch that reads k and v), a small carry hands the memory from part to part, and the same kernel runs from there.

Backward: the memories that chunks find are computed again, and the gradients of the memories that they leave, both
stored per chunk in the operands' dtype; then every chunk is on its own.

Floor of what is moved for a token and head, in numbers of the operands' dtype: forward 2K + 2V, backward 4K + 3V. As
built, backward adds 5 K V / C for the chunks' memories and reads q, k, v and dO once more. Products as built, in
multiply-adds a token and head: forward C (K + V) + 2 K V, backward C (4K + 3V) + 5 K V. A window adds LOOKBACK / C of
the terms in C, and C (C + LOOKBACK) backward for its sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .rule import Rule
from .triton_layout import NAMESPACE, NUMBERS, Layout, chunk_of, load_rows, span, store_rows, v_rows, x_rows


@triton.jit(do_not_specialize=NUMBERS)
def _prefix(
    weight, log_decay, w, u, bounds, first, owner, length, longest, heads, tokens,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Weights and the log decay since each chunk's start, both moved from [B, T, H] to [H, B T]."""
    _, low, count, start = chunk_of(tl.program_id(0).to(tl.int64), bounds, first, owner, length, longest, CHUNK, PACKED)
    place = start + tl.arange(0, CHUNK)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    there = (place < count)[:, None] & (head < heads)[None, :]
    read = (low + place)[:, None] * heads + head[None, :]
    write = head[None, :] * tokens + (low + place)[:, None]
    tl.store(w + write, tl.load(weight + read, mask=there, other=0.0), mask=there)
    tl.store(u + write, tl.cumsum(tl.load(log_decay + read, mask=there, other=0.0), 0), mask=there)


@triton.jit
def _log_decay_at(u, step, steps, end):
    """u at the steps [R] of a chunk of `steps` tokens: 0 before it and `end` after it."""
    value = tl.load(u + step, mask=(step >= 0) & (step < steps), other=0.0)
    return tl.where(step >= steps, end, value)


@triton.jit
def _weight_at(w, step, steps):
    return tl.load(w + step, mask=(step >= 0) & (step < steps), other=0.0)


@triton.jit
def _band(u, w, steps, end, pair, token, read_u, W: tl.constexpr, LAG: tl.constexpr, TRANSPOSED: tl.constexpr):
    """M [tokens, pairs] or its transpose, and e [pairs].

    Args:
        pair: [P] pairs, numbered from the chunk's start; token: [C]; read_u: [C] log decay up to what each token reads.
    """
    column = _weight_at(w, pair, steps)
    at = _log_decay_at(u, pair, steps, end)
    age = token[None, :] - LAG - pair[:, None] if TRANSPOSED else token[:, None] - LAG - pair[None, :]
    m = age.to(tl.float32) * 0.0
    for d in tl.static_range(1, W):
        m = tl.where(age == d - 1, column[:, None] if TRANSPOSED else column[None, :], m)
        after = _log_decay_at(u, pair + d, steps, end)
        column = column * tl.exp(after - at) + _weight_at(w, pair + d, steps)
        at = after
    if TRANSPOSED:
        exponent = tl.where(age >= W - 1, read_u[None, :] - at[:, None], float("-inf"))
        m = tl.where(age >= W - 1, tl.exp(exponent) * column[:, None], m)
    else:
        exponent = tl.where(age >= W - 1, read_u[:, None] - at[None, :], float("-inf"))
        m = tl.where(age >= W - 1, tl.exp(exponent) * column[None, :], m)
    return m, tl.exp(end - at) * column


@triton.jit(do_not_specialize=NUMBERS)
def _pass(
    q, k, v, u, w, previous, tail_x, tail_v, initial, output, states, final, part_decay,
    bounds, first, length, heads, tokens, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOOKBACK: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, READ: tl.constexpr,
    STORE: tl.constexpr, FROM_ZERO: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a sequence in order. READ writes outputs, STORE the memory that each chunk finds.

    FROM_ZERO: what the part writes to an empty memory, and its log decay; else from `initial` [sequence, part, ...],
    and the last part writes `final`.
    """
    tiles = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles % heads
    part = program // (tiles * heads) % parts
    sequence = program // (tiles * heads * parts)
    low, count = span(sequence, bounds, length, PACKED)
    columns, channels = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    u += head * tokens + low
    w += head * tokens + low

    inside = (columns < K)[:, None] & (channels < V)[None, :]
    matrix = columns[:, None] * V + channels[None, :]
    place_of_part = ((sequence * parts + part) * heads + head) * K * V
    s = tl.zeros([BK, BV], tl.float32)
    if not FROM_ZERO:
        s = tl.load(initial + place_of_part + matrix, mask=inside, other=0.0).to(tl.float32)
    total = 0.0

    step = tl.arange(0, C)
    chunks = (count + C - 1) // C
    begin = (part * part_chunks).to(tl.int32)
    for n in range(begin, tl.minimum(begin + part_chunks, chunks)):
        start = n * C
        steps = tl.minimum(count - start, C)
        end = tl.load(u + start + steps - 1)
        place = start + step
        there = place < count
        x = x_rows(k, previous, tail_x, sequence, low, place, head, heads, K, W, SHIFT)
        x = load_rows(x, there, columns, K).to(OPERAND)
        y = v_rows(v, tail_v, sequence, low, place, head, heads, V, W)
        y = load_rows(y, there, channels, V).to(OPERAND)
        read_u = _log_decay_at(u + start, step - LAG, steps, end)
        m, e = _band(u + start, w + start, steps, end, step, step, read_u, W, LAG, False)
        if STORE:
            tl.store(states + ((number + n) * heads + head) * K * V + matrix, s, mask=inside)
        if W > 1:
            pair = tl.arange(0, LOOKBACK) - LOOKBACK
            before = pair >= 1 - W
            old_x = x_rows(k, previous, tail_x, sequence, low, start + pair, head, heads, K, W, SHIFT)
            old_x = load_rows(old_x, before, columns, K).to(OPERAND)
            old_y = v_rows(v, tail_v, sequence, low, start + pair, head, heads, V, W)
            old_y = load_rows(old_y, before, channels, V).to(OPERAND)
            old_m, old_e = _band(u + start, w + start, steps, end, pair, step, read_u, W, LAG, False)
        if READ:
            token = (low + place) * heads + head
            rows = load_rows(q + token * K, there, columns, K).to(OPERAND)
            scores = tl.dot(rows, tl.trans(x), input_precision=PRECISION) * m
            o = tl.dot(rows, s.to(OPERAND), input_precision=PRECISION) * tl.exp(read_u)[:, None]
            o = tl.dot(scores.to(OPERAND), y, o, input_precision=PRECISION)
            if W > 1:
                scores = tl.dot(rows, tl.trans(old_x), input_precision=PRECISION) * old_m
                o = tl.dot(scores.to(OPERAND), old_y, o, input_precision=PRECISION)
            store_rows(output + token * V, o, there, channels, V)
        s = tl.dot(tl.trans(x), (e[:, None] * y).to(OPERAND), s * tl.exp(end), input_precision=PRECISION)
        if W > 1:
            s = tl.dot(tl.trans(old_x), (old_e[:, None] * old_y).to(OPERAND), s, input_precision=PRECISION)
        total += end

    if FROM_ZERO:
        tl.store(final + place_of_part + matrix, s, mask=inside)
        tl.store(part_decay + (sequence * parts + part) * heads + head, total)
    elif READ and part == parts - 1:
        tl.store(final + (sequence * heads + head) * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _reverse_pass(
    q, u, grad_output, initial, states, final, part_decay,
    bounds, first, length, heads, tokens, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LAG: tl.constexpr,
    PACKED: tl.constexpr, STORE: tl.constexpr, FROM_ZERO: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient G of the memory, backwards through a part: G = exp(u_C) G' + Q' Diag(exp(u)) dO.

    STORE writes G' of each chunk. FROM_ZERO as in `_pass`; else the first part writes the initial memory's to `final`.
    """
    tiles = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles % heads
    part = program // (tiles * heads) % parts
    sequence = program // (tiles * heads * parts)
    low, count = span(sequence, bounds, length, PACKED)
    columns, channels = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    u += head * tokens + low

    inside = (columns < K)[:, None] & (channels < V)[None, :]
    matrix = columns[:, None] * V + channels[None, :]
    place_of_part = ((sequence * parts + part) * heads + head) * K * V
    g = tl.zeros([BK, BV], tl.float32)
    if not FROM_ZERO:
        g = tl.load(initial + place_of_part + matrix, mask=inside, other=0.0).to(tl.float32)
    total = 0.0

    step = tl.arange(0, C)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    for i in range(0, last - begin):
        n = last - 1 - i
        start = n * C
        steps = tl.minimum(count - start, C)
        end = tl.load(u + start + steps - 1)
        there = step < steps
        token = (low + start + step) * heads + head
        rows = load_rows(q + token * K, there, columns, K).to(OPERAND)
        out = load_rows(grad_output + token * V, there, channels, V)
        read_u = _log_decay_at(u + start, step - LAG, steps, end)
        if STORE:
            tl.store(states + ((number + n) * heads + head) * K * V + matrix, g, mask=inside)
        out = (tl.exp(read_u)[:, None] * out).to(OPERAND)
        g = tl.dot(tl.trans(rows), out, g * tl.exp(end), input_precision=PRECISION)
        total += end

    if FROM_ZERO:
        tl.store(final + place_of_part + matrix, g, mask=inside)
        tl.store(part_decay + (sequence * parts + part) * heads + head, total)
    elif part == 0:
        tl.store(final + (sequence * heads + head) * K * V + matrix, g, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _carry(written, part_decay, initial, parts, heads, SIZE: tl.constexpr, BLOCK: tl.constexpr, REVERSED: tl.constexpr):
    """Replaces what each part writes [S, parts, H, K V] by the memory that it finds, from `initial` [S, H, K V] on."""
    blocks = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    head, sequence = program // blocks % heads, program // (blocks * heads)
    entry = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = entry < SIZE
    s = tl.load(initial + (sequence * heads + head) * SIZE + entry, mask=inside, other=0.0)
    for i in range(parts):
        part = parts - 1 - i if REVERSED else i
        place = (sequence * parts + part) * heads + head
        own = tl.load(written + place * SIZE + entry, mask=inside, other=0.0)
        tl.store(written + place * SIZE + entry, s, mask=inside)
        s = s * tl.exp(tl.load(part_decay + place)) + own


@triton.jit
def _pair_gradients(
    pair, there, x_at, y_at, into_x, into_y, q_at, out_at, grad_states, u, w, step, steps, end, read_u,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr, LAG: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the pairs [P] of one chunk that its own steps give them; returns x_j' G v_j [P]."""
    columns = tl.arange(0, BK)
    x = load_rows(x_at, there, columns, K).to(OPERAND)
    rows = load_rows(q_at, step < steps, columns, K).to(OPERAND)
    m, e = _band(u, w, steps, end, pair, step, read_u, W, LAG, True)
    scores = (tl.dot(x, tl.trans(rows), input_precision=PRECISION) * m).to(OPERAND)
    n = tl.zeros([pair.shape[0], step.shape[0]], tl.float32)
    write_g = tl.zeros([pair.shape[0], BK], tl.float32)  # V G'
    for begin in range(0, V, BV):
        channels = begin + tl.arange(0, BV)
        y = load_rows(y_at, there, channels, V).to(OPERAND)
        out = load_rows(out_at, step < steps, channels, V).to(OPERAND)
        g = load_rows(grad_states + columns * V, columns < K, channels, V).to(OPERAND)
        n = tl.dot(y, tl.trans(out), n, input_precision=PRECISION)
        write_g = tl.dot(y, tl.trans(g), write_g, input_precision=PRECISION)
        of_y = tl.dot(x, g, input_precision=PRECISION) * e[:, None]
        of_y = tl.dot(scores, out, of_y, input_precision=PRECISION)
        store_rows(into_y, of_y, there, channels, V)
    of_x = tl.dot((n * m).to(OPERAND), rows, write_g * e[:, None], input_precision=PRECISION)
    store_rows(into_x, of_x, there, columns, K)
    return tl.sum(x.to(tl.float32) * write_g, 1)


@triton.jit(do_not_specialize=NUMBERS)
def _chunk_backward(
    q, k, v, u, w, previous, tail_x, tail_v, grad_output, states, grad_states,
    grad_q, grad_k, grad_v, grad_weight, grad_log_decay, grad_previous, old_grad_x, old_grad_v,
    bounds, first, owner, length, longest, heads, tokens,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOOKBACK: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BAND_PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one head, from the memory S that it finds and the gradient G of what it leaves.

    With A = Q X', N = dO V' and P = A o N:

        dX = (N o M)' Q + e V G'      dV = (A o M)' dO + e X G      dQ = (N o M) X + exp(u) dO S'

    and for the step s, z_s its window's sum of x_j' G v_j, B_ts = exp(u_t - u_s) sum of P_tj over its window,
    dw_s = sum_t B_ts + exp(u_C - u_s) z_s. A log decay's gradient is the sum of everything that passes over it,
    taken as the suffix sums of rows less columns of w B without its diagonal, so that nothing large cancels.

    One after another, for the registers' sake: pairs, the lookback's pairs (to scratch), queries. Transposed products
    are computed again, never transposed.
    """
    program = tl.program_id(0).to(tl.int64)
    head, number = program % heads, program // heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    columns = tl.arange(0, BK)
    step = tl.arange(0, C)
    steps = tl.minimum(count - start, C)
    u += head * tokens + low + start
    w += head * tokens + low + start
    end = tl.load(u + steps - 1)
    there = step < steps
    token = (low + start + step) * heads + head
    read_u = _log_decay_at(u, step - LAG, steps, end)
    states += (number * heads + head) * K * V
    grad_states += (number * heads + head) * K * V
    q_at, out_at = q + token * K, grad_output + token * V

    x_at = x_rows(k, previous, tail_x, sequence, low, start + step, head, heads, K, W, SHIFT)
    y_at = v_rows(v, tail_v, sequence, low, start + step, head, heads, V, W)
    into_x = x_rows(grad_k, grad_previous, grad_k, sequence, low, start + step, head, heads, K, 1, SHIFT)
    z = _pair_gradients(
        step, there, x_at, y_at, into_x, grad_v + token * V, q_at, out_at, grad_states, u, w, step, steps, end, read_u,
        K, V, BK, BV, W, LAG, OPERAND, PRECISION,
    )  # fmt: skip
    if SHIFT and start + C >= count:  # the last key is nobody's write feature here
        last = grad_k + ((low + count - 1) * heads + head) * K + columns
        tl.store(last, tl.zeros([BK], tl.float32), mask=columns < K)
    if W > 1:
        pair = tl.arange(0, LOOKBACK) - LOOKBACK
        before = pair >= 1 - W
        old_x_at = x_rows(k, previous, tail_x, sequence, low, start + pair, head, heads, K, W, SHIFT)
        old_y_at = v_rows(v, tail_v, sequence, low, start + pair, head, heads, V, W)
        scratch = (number * heads + head) * LOOKBACK + LOOKBACK + pair
        old_z = _pair_gradients(
            pair, before, old_x_at, old_y_at, old_grad_x + scratch * K, old_grad_v + scratch * V, q_at, out_at,
            grad_states, u, w, step, steps, end, read_u, K, V, BK, BV, W, LAG, OPERAND, PRECISION,
        )  # fmt: skip

    n = tl.zeros([C, C], tl.float32)
    read_s = tl.zeros([C, BK], tl.float32)  # dO S'
    product = 0.0
    if W > 1:
        old_n = tl.zeros([C, LOOKBACK], tl.float32)
    for begin in range(0, V, BV):
        channels = begin + tl.arange(0, BV)
        out = load_rows(out_at, there, channels, V).to(OPERAND)
        y = load_rows(y_at, there, channels, V).to(OPERAND)
        s = load_rows(states + columns * V, columns < K, channels, V)
        g = load_rows(grad_states + columns * V, columns < K, channels, V)
        product += tl.sum(tl.sum(s.to(tl.float32) * g.to(tl.float32), 1), 0)
        n = tl.dot(out, tl.trans(y), n, input_precision=PRECISION)
        read_s = tl.dot(out, tl.trans(s.to(OPERAND)), read_s, input_precision=PRECISION)
        if W > 1:
            old_y = load_rows(old_y_at, before, channels, V).to(OPERAND)
            old_n = tl.dot(out, tl.trans(old_y), old_n, input_precision=PRECISION)

    rows = load_rows(q_at, there, columns, K).to(OPERAND)
    x = load_rows(x_at, there, columns, K).to(OPERAND)
    read_s = read_s * tl.exp(read_u)[:, None]
    passing = tl.sum(rows.to(tl.float32) * read_s, 1)  # what o_t . dO_t has from S
    m, _ = _band(u, w, steps, end, step, step, read_u, W, LAG, False)
    of_q = tl.dot((n * m).to(OPERAND), x, read_s, input_precision=PRECISION)
    windows = tl.dot(rows, tl.trans(x), input_precision=PRECISION) * n
    if W > 1:
        old_x = load_rows(old_x_at, before, columns, K).to(OPERAND)
        old_m, _ = _band(u, w, steps, end, pair, step, read_u, W, LAG, False)
        of_q = tl.dot((old_n * old_m).to(OPERAND), old_x, of_q, input_precision=PRECISION)
        apart = step[None, :] - step[:, None]
        in_window = ((apart >= 0) & (apart < W)).to(tl.float32)
        old_in_window = (step[None, :] - pair[:, None] < W).to(tl.float32)
        z = tl.sum(in_window * z[:, None], 0) + tl.sum(old_in_window * old_z[:, None], 0)
        old_windows = tl.dot(rows, tl.trans(old_x), input_precision=PRECISION) * old_n
        windows = tl.dot(windows, in_window, input_precision=BAND_PRECISION)
        windows = tl.dot(old_windows, old_in_window, windows, input_precision=BAND_PRECISION)
    store_rows(grad_q + token * K, of_q, there, columns, K)

    own_u = _log_decay_at(u, step, steps, end)
    own_w = _weight_at(w, step, steps)
    age = step[:, None] - LAG - step[None, :]
    b = tl.exp(tl.where(age >= 0, read_u[:, None] - own_u[None, :], float("-inf"))) * windows
    z = z * tl.exp(end - own_u)
    tl.store(grad_weight + token, tl.sum(b, 0) + z, mask=there)
    b = tl.where(age > 0, b * own_w[None, :], 0.0)
    passing += tl.sum(b, 1)
    after = tl.sum(tl.where(age >= 0, passing[:, None], 0.0), 0)
    after -= tl.sum(tl.where(step[:, None] >= step[None, :], tl.sum(b, 0)[:, None], 0.0), 0)
    after += tl.sum(tl.where(step[:, None] < step[None, :], (own_w * z)[:, None], 0.0), 0)
    tl.store(grad_log_decay + token, after + product * tl.exp(end), mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def _add_lookback(
    old_grad_x, old_grad_v, grad_k, grad_v, grad_previous, grad_tail_x, grad_tail_v,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOOKBACK: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds each chunk's gradients of the W - 1 pairs before it to those from the pairs' own chunk, or to the tail's."""
    program = tl.program_id(0).to(tl.int64)
    head, number = program % heads, program // heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, LOOKBACK)
    place = start + row - LOOKBACK
    there = row >= LOOKBACK - W + 1
    source = (number * heads + head) * LOOKBACK + row
    columns, channels = tl.arange(0, BK), tl.arange(0, BV)
    into = x_rows(grad_k, grad_previous, grad_tail_x, sequence, low, place, head, heads, K, W, SHIFT)
    own = load_rows(into, there & (place >= 0), columns, K).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_x + source * K, there, columns, K), there, columns, K)
    into = v_rows(grad_v, grad_tail_v, sequence, low, place, head, heads, V, W)
    own = load_rows(into, there & (place >= 0), channels, V).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_v + source * V, there, channels, V), there, channels, V)


def additive_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor,
    previous_key: Tensor | None,
    tail_x: Tensor | None,
    tail_v: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] in the dtype of v, and the final memory, float32 [S, H, K, V].

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; float32, bfloat16 or float16, the same for all.
        weight, log_decay: float32 [B, T, H], 0 for what is no token and for a first token without a pair.
        memory: float32 [S, H, K, V]; S is B, or the number of documents.
        previous_key: [S, H, K], 0 where a sequence begins; None where the keys are not shifted.
        tail_x, tail_v: [S, W - 1, H, .] pairs before the call, 0 where there is none; None for W = 1.
        cu_seqlens: [S + 1] bounds of documents packed into one row, or None.
    """
    nothing = k.new_empty(0)
    return additive(
        q, k, v, weight, log_decay, memory,
        *(nothing if t is None else t for t in (previous_key, tail_x, tail_v)),
        torch.empty(0, dtype=torch.int64, device=k.device) if cu_seqlens is None else cu_seqlens,
        rule.window, rule.shifted, rule.timing == "read_before_write",
    )  # fmt: skip


class _Call:
    """What every launch of one call shares."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, shifted: bool, before: bool):
        self.heads, self.key_dim, self.value_dim = q.shape[2], q.shape[3], v.shape[3]
        self.operand = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        operand_bytes = self.operand.itemsize
        self.tokens = q.shape[0] * q.shape[1]
        self.key_tile = max(16, triton.next_power_of_2(self.key_dim))
        chunk = launch.chunk_length(operand_bytes, self.key_tile, window)
        self.layout = layout = Layout.of(q, cu_seqlens, chunk)
        self.forward_config, self.reverse_config, self.backward_config = launch.configs(
            q.device, operand_bytes, self.key_tile
        )
        self.lookback = max(16, triton.next_power_of_2(window - 1)) if window > 1 else 16
        programs = layout.sequences * self.heads * triton.cdiv(self.value_dim, self._tile(self.forward_config))
        self.part_chunks = triton.cdiv(layout.longest, launch.segments(q.device, programs, layout.longest))
        self.parts = triton.cdiv(layout.longest, self.part_chunks)
        self.rule = {"W": window, "SHIFT": int(shifted)}
        self.sizes = {
            "K": self.key_dim,
            "V": self.value_dim,
            "BK": self.key_tile,
            "C": chunk,
            "PACKED": layout.packed,
        }
        self.numbers = {
            "OPERAND": tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            "PRECISION": "tf32" if q.dtype == torch.float16 else "ieee",
            "LAG": int(before),
        }

    def value_tile(self, config: launch.Config) -> int:
        return min(config.value_tile, max(16, triton.next_power_of_2(self.value_dim)))

    def launch_options(self, config: launch.Config) -> dict:
        return {"BV": self.value_tile(config), "num_warps": config.warps, "num_stages": config.stages}

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, log_decay: Tensor, *before: Tensor) -> "_Inputs":
        """What kernels read: whole rows, and weights and running log decays moved to [H, B T]."""
        q, k, v, weight, log_decay = (t.contiguous() for t in (q, k, v, weight, log_decay))
        w, u = (weight.new_empty(self.heads, self.tokens) for _ in range(2))
        layout, block = self.layout, min(16, triton.next_power_of_2(self.heads))
        _prefix[layout.chunks, triton.cdiv(self.heads, block)](
            weight, log_decay, w, u, layout.bounds, layout.first, layout.owner, layout.length, layout.longest,
            self.heads, self.tokens, CHUNK=layout.chunk, HEADS=block, PACKED=layout.packed, num_warps=4,
        )  # fmt: skip
        return _Inputs(q, k, v, w, u, *(t.contiguous() for t in before))

    def chunk_states(self, memory: Tensor) -> Tensor:
        return memory.new_empty(self.layout.chunks, self.heads, self.key_dim, self.value_dim, dtype=self.operand)

    def forward(self, inputs: "_Inputs", memory: Tensor, output: Tensor, states: Tensor, final: Tensor) -> None:
        """From `memory` to `output` and `final`, or to the memories that chunks find, whichever is not empty."""
        mode = {"READ": output.numel() > 0, "STORE": states.numel() > 0, "LOOKBACK": self.lookback}

        def run(initial, output, states, final, part_decay, **mode):
            _pass[self._grid(self.forward_config)](
                inputs.q, inputs.k, inputs.v, inputs.u, inputs.w, inputs.previous_key, inputs.tail_x, inputs.tail_v,
                initial, output, states, final, part_decay, *self._where(), **mode, **self.rule, **self.sizes,
                **self.numbers, **self._options(self.forward_config),
            )  # fmt: skip

        def sum_up(found, decay):
            run(found, output, states, found, decay, **mode | {"READ": False, "STORE": False}, FROM_ZERO=True)

        initial = self._in_parts(sum_up, memory, reverse=False)
        run(initial, output, states, final, memory, **mode, FROM_ZERO=False)

    def reverse(self, inputs: "_Inputs", grad_output: Tensor, grad_final: Tensor, states: Tensor, grad: Tensor) -> None:
        """From the final memory's gradient to those of the memories that chunks leave and of the initial one."""

        def run(initial, final, part_decay, **mode):
            _reverse_pass[self._grid(self.reverse_config)](
                inputs.q, inputs.u, grad_output, initial, states, final, part_decay, *self._where(), **mode,
                **self.sizes, **self.numbers, **self._options(self.reverse_config),
            )  # fmt: skip

        initial = self._in_parts(lambda f, decay: run(f, f, decay, STORE=False, FROM_ZERO=True), grad_final, True)
        run(initial, grad, grad_final, STORE=True, FROM_ZERO=False)

    def backward(self, inputs: "_Inputs", grad_output: Tensor, states: Tensor, grad_states: Tensor, into: dict) -> None:
        """Everything else, one program per chunk and head."""
        layout = self.layout
        where = (layout.bounds, layout.first, layout.owner, layout.length, layout.longest, self.heads)
        rows = layout.chunks * self.heads * self.lookback if self.rule["W"] > 1 else 0
        old_x, old_v = (inputs.u.new_empty(rows * width) for width in (self.key_dim, self.value_dim))
        _chunk_backward[(layout.chunks * self.heads,)](
            inputs.q, inputs.k, inputs.v, inputs.u, inputs.w, inputs.previous_key, inputs.tail_x, inputs.tail_v,
            grad_output, states, grad_states, into["q"], into["k"], into["v"], into["weight"], into["log_decay"],
            into["previous_key"], old_x, old_v, *where, self.tokens, LOOKBACK=self.lookback,
            BAND_PRECISION="tf32" if self.operand == torch.bfloat16 else "ieee",
            **self.rule, **self.sizes, **self.numbers, **self._options(self.backward_config),
        )  # fmt: skip
        if rows:
            _add_lookback[(layout.chunks * self.heads,)](
                old_x, old_v, into["k"], into["v"], into["previous_key"], into["tail_x"], into["tail_v"], *where,
                LOOKBACK=self.lookback, BV=max(16, triton.next_power_of_2(self.value_dim)), num_warps=4,
                **self.rule, **self.sizes,
            )  # fmt: skip

    def _in_parts(self, run, memory: Tensor, reverse: bool) -> Tensor:
        """What each part of each sequence begins with, [S, parts, H, K, V]; `memory` itself where there is one part."""
        if self.parts == 1:
            return memory
        found = memory.new_empty(memory.shape[0], self.parts, *memory.shape[1:])
        decay = memory.new_empty(found.shape[:3])
        run(found, decay)
        size, block = self.key_dim * self.value_dim, 1024
        _carry[(memory.shape[0] * self.heads * triton.cdiv(size, block),)](
            found, decay, memory, self.parts, self.heads, SIZE=size, BLOCK=block, REVERSED=reverse, num_warps=4
        )
        return found

    def _tile(self, config: launch.Config) -> int:
        return min(config.value_tile, max(16, triton.next_power_of_2(self.value_dim)))

    def _options(self, config: launch.Config) -> dict:
        return {"BV": self._tile(config), "num_warps": config.warps, "num_stages": config.stages}

    def _grid(self, config: launch.Config) -> tuple[int]:
        tiles = triton.cdiv(self.value_dim, self._tile(config))
        return (self.layout.sequences * self.parts * self.heads * tiles,)

    def _where(self) -> tuple:
        layout = self.layout
        return (
            layout.bounds, layout.first, layout.length, self.heads, self.tokens, layout.longest, self.parts,
            self.part_chunks,
        )  # fmt: skip


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor  # [H, B T]
    u: Tensor  # [H, B T]
    previous_key: Tensor
    tail_x: Tensor
    tail_v: Tensor


@torch.library.custom_op(f"{NAMESPACE}::additive", mutates_args=())
def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor,
    previous_key: Tensor,
    tail_x: Tensor,
    tail_v: Tensor,
    cu_seqlens: Tensor,
    window: int,
    shifted: bool,
    read_before_write: bool,
) -> tuple[Tensor, Tensor]:
    """`additive_core` with absent tensors empty."""
    call = _Call(q, v, cu_seqlens, window, shifted, read_before_write)
    inputs = call.inputs(q, k, v, weight, log_decay, previous_key, tail_x, tail_v)
    memory = memory.contiguous()
    output, final = v.new_empty(v.shape), memory.new_empty(memory.shape)
    call.forward(inputs, memory, output, memory.new_empty(0), final)
    return output, final


@additive.register_fake
def _(q, k, v, weight, log_decay, memory, *_):
    return v.new_empty(v.shape), memory.new_empty(memory.shape)


@torch.library.custom_op(f"{NAMESPACE}::additive_backward", mutates_args=())
def additive_backward(
    grad_output: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor,
    previous_key: Tensor,
    tail_x: Tensor,
    tail_v: Tensor,
    cu_seqlens: Tensor,
    window: int,
    shifted: bool,
    read_before_write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all but cu_seqlens, in the order of the arguments."""
    call = _Call(q, v, cu_seqlens, window, shifted, read_before_write)
    inputs = call.inputs(q, k, v, weight, log_decay, previous_key, tail_x, tail_v)
    memory = memory.contiguous()
    grad_output, grad_final = grad_output.to(v.dtype).contiguous(), grad_final.float().contiguous()
    into = {
        name: t.new_empty(t.shape)
        for name, t in (("q", q), ("k", k), ("v", v), ("weight", weight), ("log_decay", log_decay), ("memory", memory))
    }
    before = {"previous_key": previous_key, "tail_x": tail_x, "tail_v": tail_v}
    into |= {name: t.new_zeros(t.shape) for name, t in before.items()}  # documents without tokens are not visited
    states, grad_states = call.chunk_states(memory), call.chunk_states(memory)
    call.forward(inputs, memory, memory.new_empty(0), states, memory.new_empty(0))
    call.reverse(inputs, grad_output, grad_final, grad_states, into["memory"])
    call.backward(inputs, grad_output, states, grad_states, into)
    return tuple(into.values())  # type: ignore[return-value]


@additive_backward.register_fake
def _(grad_output, grad_final, *inputs):
    return tuple(t.new_empty(t.shape) for t in inputs[:9])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:10])
    ctx.options = inputs[10:]


def _differentiate(ctx, grad_output, grad_final):
    grads = additive_backward(grad_output, grad_final, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None


additive.register_autograd(_differentiate, setup_context=_save)
