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

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launcher import Launcher
from .triton_layout import NUMBERS, Layout, Tables, chunk_of, exists, load_rows, span, store_rows, v_rows, x_rows
from .triton_schedule import Before


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
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr,
    READ: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, FROM_ZERO: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a sequence in order. READ writes outputs, STORE the memory that each chunk finds.

    INITIAL starts from `initial` [sequence, part, ...], else from zero; FINAL has the last part write `final`.
    FROM_ZERO: what the part writes to an empty memory, to `final` [sequence, part, ...], and its log decay.
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
    if INITIAL:
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
        x = x_rows(k, previous, tail_x, sequence, low, place, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x, exists(place, there, SHIFT, CARRIED), columns, K).to(OPERAND)
        y = v_rows(v, tail_v, sequence, low, place, head, heads, V, W, CARRIED)
        y = load_rows(y, there, channels, V).to(OPERAND)
        read_u = _log_decay_at(u + start, step - LAG, steps, end)
        m, e = _band(u + start, w + start, steps, end, step, step, read_u, W, LAG, False)
        if STORE:
            tl.store(states + ((number + n) * heads + head) * K * V + matrix, s, mask=inside)
        if W > 1:
            pair = tl.arange(0, LOOKBACK) - LOOKBACK
            before = exists(start + pair, pair >= 1 - W, SHIFT, CARRIED)
            old_x = x_rows(k, previous, tail_x, sequence, low, start + pair, head, heads, K, W, SHIFT, CARRIED)
            old_x = load_rows(old_x, before, columns, K).to(OPERAND)
            old_y = v_rows(v, tail_v, sequence, low, start + pair, head, heads, V, W, CARRIED)
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
    elif FINAL and part == parts - 1:
        tl.store(final + (sequence * heads + head) * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _reverse_pass(
    q, u, grad_output, initial, states, final, part_decay,
    bounds, first, length, heads, tokens, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LAG: tl.constexpr,
    PACKED: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, FROM_ZERO: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient G of the memory, backwards through a part: G = exp(u_C) G' + Q' Diag(exp(u)) dO.

    STORE writes G' of each chunk; FINAL has the first part write the initial memory's to `final`; the rest as in
    `_pass`.
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
    if INITIAL:
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
    elif FINAL and part == 0:
        tl.store(final + (sequence * heads + head) * K * V + matrix, g, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _carry(
    written, part_decay, initial, parts, heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, INITIAL: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Replaces what each part writes [S, parts, H, K V] by the memory that it finds, from `initial` [S, H, K V] on."""
    blocks = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    head, sequence = program // blocks % heads, program // (blocks * heads)
    entry = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = entry < SIZE
    s = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        s = tl.load(initial + (sequence * heads + head) * SIZE + entry, mask=inside, other=0.0)
    for i in range(parts):
        part = parts - 1 - i if REVERSED else i
        place = (sequence * parts + part) * heads + head
        own = tl.load(written + place * SIZE + entry, mask=inside, other=0.0)
        tl.store(written + place * SIZE + entry, s, mask=inside)
        s = s * tl.exp(tl.load(part_decay + place)) + own


@triton.jit
def _pair_gradients(
    pair, there, readable, x_at, y_at, into_x, into_y, q_at, out_at, grad_states, u, w, step, steps, end, read_u,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr, LAG: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the pairs [P] of one chunk that its own steps give them; returns x_j' G v_j [P].

    readable: [P] which pairs have a write feature.
    """
    columns = tl.arange(0, BK)
    x = load_rows(x_at, readable, columns, K).to(OPERAND)
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
    store_rows(into_x, of_x, readable, columns, K)
    return tl.sum(x.to(tl.float32) * write_g, 1)


@triton.jit(do_not_specialize=NUMBERS)
def _chunk_backward(
    q, k, v, u, w, previous, tail_x, tail_v, grad_output, states, grad_states,
    grad_q, grad_k, grad_v, grad_weight, grad_log_decay, grad_previous, old_grad_x, old_grad_v,
    bounds, first, owner, length, longest, heads, tokens,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOOKBACK: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BAND_PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one head, from the memory S that it finds and the gradient G of what it leaves.

    With A = Q X', N = dO V' and P = A o N:

        dX = (N o M)' Q + e V G'      dV = (A o M)' dO + e X G      dQ = (N o M) X + exp(u) dO S'

    and for the step s, z_s its window's sum of x_j' G v_j, B_ts = exp(u_t - u_s) sum of P_tj over its window,
    dw_s = sum_t B_ts + exp(u_C - u_s) z_s. A log decay's gradient is the sum of everything that passes over it,
    taken as the suffix sums of rows less columns of w B without its diagonal, so that nothing large cancels. Both lie
    as w does, [H, B T].

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
    first_number = head * tokens + low + start
    u += first_number
    w += first_number
    grad_weight += first_number
    grad_log_decay += first_number
    end = tl.load(u + steps - 1)
    there = step < steps
    token = (low + start + step) * heads + head
    read_u = _log_decay_at(u, step - LAG, steps, end)
    states += (number * heads + head) * K * V
    grad_states += (number * heads + head) * K * V
    q_at, out_at = q + token * K, grad_output + token * V

    readable = exists(start + step, there, SHIFT, CARRIED)
    x_at = x_rows(k, previous, tail_x, sequence, low, start + step, head, heads, K, W, SHIFT, CARRIED)
    y_at = v_rows(v, tail_v, sequence, low, start + step, head, heads, V, W, CARRIED)
    into_x = x_rows(grad_k, grad_previous, grad_k, sequence, low, start + step, head, heads, K, 1, SHIFT, CARRIED)
    z = _pair_gradients(
        step, there, readable, x_at, y_at, into_x, grad_v + token * V, q_at, out_at, grad_states, u, w, step, steps,
        end, read_u, K, V, BK, BV, W, LAG, OPERAND, PRECISION,
    )  # fmt: skip
    if SHIFT and start + C >= count:  # the last key is nobody's write feature here
        last = grad_k + ((low + count - 1) * heads + head) * K + columns
        tl.store(last, tl.zeros([BK], tl.float32), mask=columns < K)
    if W > 1:
        pair = tl.arange(0, LOOKBACK) - LOOKBACK
        before = exists(start + pair, pair >= 1 - W, SHIFT, CARRIED)
        old_x_at = x_rows(k, previous, tail_x, sequence, low, start + pair, head, heads, K, W, SHIFT, CARRIED)
        old_y_at = v_rows(v, tail_v, sequence, low, start + pair, head, heads, V, W, CARRIED)
        scratch = (number * heads + head) * LOOKBACK + LOOKBACK + pair
        old_z = _pair_gradients(
            pair, before, before, old_x_at, old_y_at, old_grad_x + scratch * K, old_grad_v + scratch * V, q_at,
            out_at, grad_states, u, w, step, steps, end, read_u, K, V, BK, BV, W, LAG, OPERAND, PRECISION,
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
    x = load_rows(x_at, readable, columns, K).to(OPERAND)
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
    tl.store(grad_weight + step, tl.sum(b, 0) + z, mask=there)
    b = tl.where(age > 0, b * own_w[None, :], 0.0)
    passing += tl.sum(b, 1)
    after = tl.sum(tl.where(age >= 0, passing[:, None], 0.0), 0)
    after -= tl.sum(tl.where(step[:, None] >= step[None, :], tl.sum(b, 0)[:, None], 0.0), 0)
    after += tl.sum(tl.where(step[:, None] < step[None, :], (own_w * z)[:, None], 0.0), 0)
    tl.store(grad_log_decay + step, after + product * tl.exp(end), mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def _add_lookback(
    old_grad_x, old_grad_v, grad_k, grad_v, grad_previous, grad_tail_x, grad_tail_v,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOOKBACK: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Adds each chunk's gradients of the W - 1 pairs before it to those from the pairs' own chunk, or to the tail's."""
    program = tl.program_id(0).to(tl.int64)
    head, number = program % heads, program // heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, LOOKBACK)
    place = start + row - LOOKBACK
    there = exists(place, row >= LOOKBACK - W + 1, SHIFT, CARRIED)
    source = (number * heads + head) * LOOKBACK + row
    columns, channels = tl.arange(0, BK), tl.arange(0, BV)
    into = x_rows(grad_k, grad_previous, grad_tail_x, sequence, low, place, head, heads, K, W, SHIFT, CARRIED)
    own = load_rows(into, there & (place >= 0), columns, K).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_x + source * K, there, columns, K), there, columns, K)
    into = v_rows(grad_v, grad_tail_v, sequence, low, place, head, heads, V, W, CARRIED)
    own = load_rows(into, there & (place >= 0), channels, V).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_v + source * V, there, channels, V), there, channels, V)


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device, window: int,
        shifted: bool, before: bool, carried: bool, aligned: bool = False,
    ):  # fmt: skip
        self.layout = layout
        batch, length, self.heads, key_dim = shape
        self.operand = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.memory = (layout.sequences, self.heads, key_dim, value_dim)
        self.states = (layout.chunks, self.heads, key_dim, value_dim)
        key_tile, tokens = max(16, triton.next_power_of_2(key_dim)), batch * length
        value_width = max(16, triton.next_power_of_2(value_dim))
        forward, reverse, backward = launch.configs(device, self.operand.itemsize, key_tile)
        lookback = max(16, triton.next_power_of_2(window - 1)) if window > 1 else 16
        rows = layout.sequences * self.heads

        def tiles(config):
            return -(-value_dim // min(config.value_tile, value_width))

        segments = launch.segments(device, rows * tiles(forward), layout.longest)
        part_chunks = -(-layout.longest // segments)
        self.parts = -(-layout.longest // part_chunks)
        self.along = (layout.length, self.heads, tokens, layout.longest, self.parts, part_chunks)
        self.across = (layout.length, layout.longest, self.heads)
        self.tokens = tokens

        sizes = {"K": key_dim, "V": value_dim, "BK": key_tile, "C": layout.chunk, "PACKED": layout.packed}
        rule = {"W": window, "SHIFT": int(shifted), "CARRIED": carried, "LOOKBACK": lookback}
        numbers = {
            "OPERAND": tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            "PRECISION": "tf32" if dtype == torch.float16 else "ieee",
            "LAG": int(before),
        }

        def options(config, *more):
            found = {"BV": min(config.value_tile, value_width), "num_warps": config.warps, "num_stages": config.stages}
            for each in more:
                found |= each
            return found

        def launcher(kernel, programs, constants, *flags):
            return Launcher(kernel, (programs,), constants, flags, aligned)

        chunks, size = layout.chunks * self.heads, key_dim * value_dim
        band = {"BAND_PRECISION": "tf32" if self.operand == torch.bfloat16 else "ieee"}
        self.forward = launcher(
            _pass, rows * self.parts * tiles(forward), options(forward, sizes, rule, numbers),
            "READ", "STORE", "FINAL", "INITIAL", "FROM_ZERO",
        )  # fmt: skip
        self.reverse = launcher(
            _reverse_pass, rows * self.parts * tiles(reverse), options(reverse, sizes, numbers),
            "STORE", "FINAL", "INITIAL", "FROM_ZERO",
        )  # fmt: skip
        self.backward = launcher(_chunk_backward, chunks, options(backward, sizes, rule, numbers, band))
        self.lookback = launcher(_add_lookback, chunks, sizes | rule | {"BV": value_width, "num_warps": 4})
        self.lookback_rows = chunks * lookback if window > 1 else 0
        self.carry = launcher(
            _carry, rows * -(-size // 1024), {"SIZE": size, "BLOCK": 1024, "num_warps": 4}, "INITIAL", "REVERSED"
        )

    def in_parts(self, run, memory: Tensor | None, like: Tensor, reverse: bool) -> Tensor | None:
        """What each part of each sequence begins with, [S, parts, H, K, V]; `memory` itself where there is one part."""
        if self.parts == 1:
            return memory
        sequences, heads, *matrix = self.memory
        found = torch.empty((sequences, self.parts, heads, *matrix), dtype=torch.float32, device=like.device)
        decay = torch.empty((sequences, self.parts, heads), dtype=torch.float32, device=like.device)
        run(found, decay)
        self.carry(found, decay, memory, self.parts, heads, flags=(memory is not None, reverse))
        return found


def _run_pass(
    plan: Plan, tables: Tables, inputs: tuple, memory: Tensor | None, output: Tensor | None, states: Tensor | None,
    final: Tensor | None,
) -> None:  # fmt: skip
    """From `memory` to whichever is given: outputs, memories that chunks find, and the memory at the end."""

    def run(initial, output, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.forward(
            *inputs, initial, output, states, final, part_decay, tables.bounds, tables.first, *plan.along,
            flags=(output is not None, states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    initial = plan.in_parts(lambda found, decay: run(None, None, None, found, decay, True), memory, inputs[0], False)
    run(initial, output, states, final, None, False)


def forward(
    plan: Plan,
    tables: Tables,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor | None,
    before: Before,
    output: Tensor,
    final: Tensor | None,
) -> None:
    """Fills `output` [B, T, H, V] and, where it is given, the final memory, float32 [S, H, K, V].

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; float32, bfloat16 or float16, the same for all.
        weight: float32 [H, B T], 0 for what is no token and for a first token without a pair.
        log_decay: float32 [H, B T], running from each chunk's start.
        memory: float32 [S, H, K, V]; S is B, or the number of documents; None for zero.
        before: previous keys, and pairs of the tails, 0 where there is none.
    """
    inputs = (q, k, v, log_decay, weight, before.previous_key, before.tail_x, before.tail_v)
    _run_pass(plan, tables, inputs, memory, output, None, final)


def backward(
    plan: Plan,
    tables: Tables,
    grad_output: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor | None,
    before: Before,
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    grad_before: Before,
) -> None:
    """Fills the gradients of q, k, v, weight, log decay (each token's own) and memory, and adds to `grad_before`."""
    grad_q, grad_k, grad_v, grad_weight, grad_log_decay, grad_memory = into
    inputs = (q, k, v, log_decay, weight, before.previous_key, before.tail_x, before.tail_v)
    states, grad_states = (torch.empty(plan.states, dtype=plan.operand, device=q.device) for _ in range(2))
    _run_pass(plan, tables, inputs, memory, None, states, None)

    def reverse(initial, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.reverse(
            q, log_decay, grad_output, initial, states, final, part_decay, tables.bounds, tables.first, *plan.along,
            flags=(states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    initial = plan.in_parts(lambda found, decay: reverse(None, None, found, decay, True), grad_final, q, True)
    reverse(initial, grad_states, grad_memory, None, False)

    old_x = old_v = None
    if plan.lookback_rows:
        old_x, old_v = (weight.new_empty(plan.lookback_rows * t.shape[-1]) for t in (k, v))
    plan.backward(
        *inputs, grad_output, states, grad_states, grad_q, grad_k, grad_v, grad_weight, grad_log_decay,
        grad_before.previous_key, old_x, old_v, *tables, *plan.across, plan.tokens,
    )  # fmt: skip
    if plan.lookback_rows:
        plan.lookback(
            old_x, old_v, grad_k, grad_v, grad_before.previous_key, grad_before.tail_x, grad_before.tail_v, *tables,
            *plan.across,
        )  # fmt: skip
