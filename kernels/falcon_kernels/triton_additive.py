"""The additive rules with one decay a head, falcon_1a and falcon_3a: one kernel, whose write weights are a band.

In a chunk that starts at token a, with u the running log decay from there and w = eta / W,

    M_tj = sum_{d < W} [a <= j+d <= t] w_{j+d} exp(u_t - u_{j+d})        e_j = M_{C-1, j}
    O = exp(u) Q S + (Q X' o M) V                                        S' = exp(u_C) S + X' Diag(e) V,

for the chunk's own pairs j and the W - 1 before them. Reading before the write takes the row t - 1 of M and u. All but
W - 1 diagonals of M are exp(u_t - u_{j+W-1}) times a vector over j.

The pairs are the TILE rows of one tile, row r holding the pair r - (W - 1) of the chunk, whose last write is thus at
step r: in that numbering M is triangular with W - 1 diagonals more. A chunk has the TILE - (W - 1) tokens that remain.

Forward: a program takes a part of a sequence, a head and a tile of value channels, keeps S in registers and reads q, k
and v once; where gradients are wanted it leaves the memory that each chunk finds, in the operands' dtype. One part is a
whole sequence where the batch fills the card; else parts first sum up what they write (a launch that reads k and v), a
small carry hands the memory from part to part, and the same kernel runs from there.

Backward: the gradients of the memories that chunks leave, stored per chunk too; then every chunk is on its own and ends
with the gradients of the schedule's inputs.

Floor of what is moved for a token and head, in numbers of the operands' dtype: forward 2K + 2V, backward 4K + 3V. As
built, forward adds K V / C and backward 3 K V / C for the chunks' memories, and backward reads q and dO once more, and
some again from cache. Products as built, in multiply-adds a token and head: forward C (K + V) + 2 K V, backward
C (3K + 2V) + 4 K V, or about 6 K V where a chunk's tiles are read once, C being TILE here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_schedule
from .launcher import Launcher
from .triton_layout import (
    NUMBERS,
    OPERANDS,
    Layout,
    chunk_of,
    exists,
    load_rows,
    load_tile,
    load_tile_again,
    moved,
    operand_dtype,
    span,
    store_rows,
    store_tile,
    token_rows,
    v_rows,
    x_rows,
)
from .triton_schedule import (
    Call,
    Gradients,
    Kept,
    Options,
    Shape,
    pair_exists,
    step_gradients,
    window_size,
    window_sum,
)

UNROLLED = tl.constexpr(8)  # largest window whose diagonals are not a loop


@triton.jit
def _number_at(numbers, step):
    """Of a chunk's running log decays or weights, at the steps [R]: 0 before it."""
    return tl.load(numbers + step, mask=step >= 0, other=0.0)


@triton.jit
def _diagonal(m, written, d, age, u, w, step, read_u, W: tl.constexpr):
    """M with the diagonal of pairs read d steps after their first write, and what is written of them."""
    written += _number_at(w, step - d) * tl.exp2(read_u - _number_at(u, step - d))
    return tl.where(age == d - W + 1, written[:, None], m), written


@triton.jit
def program_of_part(
    bounds, first, length, heads, longest, parts,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of a program that takes a part of a sequence: its sequence, part and head, the sequence's first token and
    length, the number of its first chunk, and columns [BK] and channels [BV] of a tile of the memory,
    where the tile's elements lie, and which are in the memory."""
    tiles = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles % heads
    part = program // (tiles * heads) % parts
    sequence = program // (tiles * heads * parts)
    low, count = span(sequence, bounds, length, PACKED)
    columns, channels = tl.arange(0, BK), tile.to(tl.int32) * BV + tl.arange(0, BV)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    inside = (columns < K)[:, None] & (channels < V)[None, :]
    matrix = columns[:, None] * V + channels[None, :]
    return sequence, part, head, low, count, number, columns, channels, matrix, inside


@triton.jit(do_not_specialize=NUMBERS)
def _pass(
    q, k, v, u, w, c, previous, tail_x, tail_v, initial, output, states, final, part_decay,
    bounds, first, length, heads, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr,
    READ: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, FROM_ZERO: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a sequence in order. READ writes outputs, STORE the memory that each chunk finds.

    INITIAL starts from `initial` [sequence, part, ...], else from zero; FINAL has the last part write `final`.
    FROM_ZERO: what the part writes to an empty memory, to `final` [sequence, part, ...], and its log decay.
    c: sums of w exp(u_r - u) over each row's window, w itself where W is 1.
    """
    sequence, part, head, low, count, number, columns, channels, matrix, inside = program_of_part(
        bounds, first, length, heads, longest, parts, K, V, BK, BV, PACKED
    )
    part_number = (sequence * parts + part) * heads + head
    place_of_part = part_number * K * V
    s = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        s = tl.load(initial + place_of_part + matrix, mask=inside, other=0.0).to(tl.float32)
    total = 0.0

    row = tl.arange(0, TILE)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    place_of_numbers = (tl.maximum(number + tl.minimum(begin, last - 1), 0) * heads + head) * TILE + row
    at = tl.load(u + place_of_numbers)
    column = tl.load(c + place_of_numbers)
    for n in range(begin, last):
        start = n * C
        steps = tl.minimum(count - start, C)
        numbers = ((number + n) * heads + head) * TILE
        end = tl.load(u + numbers + TILE - 1)
        there = row < steps
        pair = row - (W - 1)
        own = row < steps + W - 1
        x = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x, exists(start + pair, own, SHIFT, CARRIED), columns, K).to(OPERAND)
        y = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
        y = load_rows(y, exists(start + pair, own, 0, CARRIED), channels, V).to(OPERAND)
        if STORE:
            tl.store(states + ((number + n) * heads + head) * K * V + matrix, s, mask=inside)
        found = s.to(OPERAND)
        e = tl.exp2(end - at) * column
        s = tl.dot(tl.trans(x), (e[:, None] * y).to(OPERAND), s * tl.exp2(end), input_precision=PRECISION)
        if READ:
            rows = load_rows(token_rows(q, low + start, row, head, heads, K), there, columns, K).to(OPERAND)
            scores = tl.dot(rows, tl.trans(x), input_precision=PRECISION)
            read_u = at
            if LAG > 0:
                read_u = _number_at(u + numbers, row - LAG)
            late = row + tl.minimum(steps, 0)  # the rows, though the compiler, not knowing, keeps no mask of them
            age = late[:, None] - LAG - late[None, :]
            m = tl.exp2(tl.where(age >= 0, read_u[:, None] - at[None, :], float("-inf"))) * column[None, :]
            if W > 1:
                written = at * 0.0
                if W <= UNROLLED:
                    for d in tl.static_range(W - 1):
                        m, written = _diagonal(m, written, d, age, u + numbers, w + numbers, row - LAG, read_u, W)
                else:
                    for d in range(W - 1):
                        m, written = _diagonal(m, written, d, age, u + numbers, w + numbers, row - LAG, read_u, W)
            scores *= m
            o = tl.dot(rows, found, input_precision=PRECISION) * tl.exp2(read_u)[:, None]
            o = tl.dot(scores.to(OPERAND), y, o, input_precision=PRECISION)
            store_rows(token_rows(output, low + start, row, head, heads, V), o, there, channels, V)
        total += end
        place_of_numbers = ((number + tl.minimum(n + 1, last - 1)) * heads + head) * TILE + row
        at = tl.load(u + place_of_numbers)
        column = tl.load(c + place_of_numbers)

    if FROM_ZERO:
        tl.store(final + place_of_part + matrix, s, mask=inside)
        tl.store(part_decay + part_number, total)
    elif FINAL and part == parts - 1:
        tl.store(final + (sequence * heads + head) * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _reverse_pass(
    q, u, grad_output, initial, states, final, part_decay,
    bounds, first, length, heads, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    FROM_ZERO: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient G of the memory, backwards through a part: G = exp(u_C) G' + Q' Diag(exp(u)) dO.

    STORE writes G' of each chunk; FINAL has the first part write the initial memory's to `final`; the rest as in
    `_pass`.
    """
    sequence, part, head, low, count, number, columns, channels, matrix, inside = program_of_part(
        bounds, first, length, heads, longest, parts, K, V, BK, BV, PACKED
    )
    part_number = (sequence * parts + part) * heads + head
    place_of_part = part_number * K * V
    g = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        g = tl.load(initial + place_of_part + matrix, mask=inside, other=0.0).to(tl.float32)
    total = 0.0

    step = tl.arange(0, TILE)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    for i in range(0, last - begin):
        n = last - 1 - i
        start = n * C
        steps = tl.minimum(count - start, C)
        numbers = u + ((number + n) * heads + head) * TILE
        end = tl.load(numbers + TILE - 1)
        there = step < steps
        rows = load_rows(token_rows(q, low + start, step, head, heads, K), there, columns, K).to(OPERAND)
        out = load_rows(token_rows(grad_output, low + start, step, head, heads, V), there, channels, V)
        read_u = _number_at(numbers, step - LAG)
        if STORE:
            tl.store(states + ((number + n) * heads + head) * K * V + matrix, g, mask=inside)
        out = (tl.exp2(read_u)[:, None] * out).to(OPERAND)
        g = tl.dot(tl.trans(rows), out, g * tl.exp2(end), input_precision=PRECISION)
        total += end

    if FROM_ZERO:
        tl.store(final + place_of_part + matrix, g, mask=inside)
        tl.store(part_decay + part_number, total)
    elif FINAL and part == 0:
        tl.store(final + (sequence * heads + head) * K * V + matrix, g, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def carry_parts(
    written, part_decay, initial, parts, heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DECAYS: tl.constexpr, INITIAL: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Replaces what each part writes [S, parts, H, K V] by the memory that it finds, from `initial` [S, H, K V] on.

    DECAYS: of a part, 1 or one per value channel.
    """
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
        decay = part_decay + place * DECAYS
        if DECAYS > 1:
            decay += entry % DECAYS
        s = s * tl.exp2(tl.load(decay)) + own


@triton.jit
def _apart(row, by):
    """Which columns are `by` further than their row."""
    return row[None, :] - row[:, None] == by


@triton.jit
def _one_decay(u, row, i):
    """Log decay of the step i before each row's own."""
    return _number_at(u, row - i) - _number_at(u, row - i - 1)


@triton.jit
def _write(tile, written, i, u, w, row, LAG: tl.constexpr):
    """Of `_weights`, the diagonal of pairs read i steps before their last write."""
    written = written * tl.exp2(_one_decay(u, row, i)) + _number_at(w, row - i)
    return tl.where(_apart(row, LAG - i), written[:, None], tile), written


@triton.jit
def _weights(column, u, w, row, LAG: tl.constexpr, W: tl.constexpr):
    """M of pairs by tokens, but for what decays after a pair's last write."""
    factor = tl.where(row[None, :] >= (row + LAG)[:, None], column[:, None], 0.0)
    written = column * 0.0
    if W <= UNROLLED:
        for d in tl.static_range(W - 1):
            factor, written = _write(factor, written, W - 1 - d, u, w, row, LAG)
    else:
        for d in range(W - 1):
            factor, written = _write(factor, written, W - 1 - d, u, w, row, LAG)
    return factor


@triton.jit
def _diagonal_sum(h, row, by):
    """[TILE] the diagonal of h that is `by` right of the main one, by row."""
    return tl.sum(tl.where(_apart(row, by), h, 0.0), 1)


@triton.jit
def _reads_at(weights, decays, past, got, now, i, u, w, row):
    """Adds to the sums of `_by_step` what is read of pairs with i writes to come; and what is read before those."""
    weights += moved(past + now, i, row)
    decays += moved(now * got - past * _number_at(w, row - i), i, row)
    return weights, decays, (past + now) * tl.exp2(_one_decay(u, row, i))


@triton.jit
def _by_step(past, h, u, w, row, LAG: tl.constexpr, W: tl.constexpr):
    """Sums over the pairs that each step s writes: what reads them at s or later, decayed from s on; and of what reads
    them at s times what they got before, less w_s times what reads them later: [TILE] each.

    past: [TILE] what reads after the last write of each row's pair; h: [pairs, tokens] all that is read, decayed from
    the last write on.
    """
    now = _diagonal_sum(h, row, LAG)
    if W <= UNROLLED:
        every = (past * 0.0,)  # what pairs got before the i-th write from their last, the first write first
        for d in tl.static_range(W - 1):
            got = every[d] * tl.exp2(_one_decay(u, row, W - 1 - d)) + _number_at(w, row - (W - 1 - d))
            every += (got,)
        got = every[W - 1] * tl.exp2(_one_decay(u, row, 0))
        weights, decays = past + now, now * got - past * _number_at(w, row)
        past = weights * tl.exp2(_one_decay(u, row, 0))
        for i in tl.static_range(1, W):
            got = every[W - 1 - i] * tl.exp2(_one_decay(u, row, i))
            now = _diagonal_sum(h, row, LAG - i)
            weights, decays, past = _reads_at(weights, decays, past, got, now, i, u, w, row)
    else:
        weights = past * 0.0
        decays, got = weights, weights
        for d in range(W):
            i = W - 1 - d
            got *= tl.exp2(_one_decay(u, row, i))
            decays += moved(_diagonal_sum(h, row, LAG - i) * got, i, row)
            got += _number_at(w, row - i)
        for i in range(W):
            now = _diagonal_sum(h, row, LAG - i)
            weights, decays, past = _reads_at(weights, decays, past, got * 0.0, now, i, u, w, row)
    return weights, decays


@triton.jit
def _tiles(rows, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr):
    """All columns of rows, in tiles of BLOCK."""
    tiles = ()
    for begin in tl.static_range(0, WIDTH, BLOCK):
        tiles += (load_tile(rows, there, begin + tl.arange(0, BLOCK), WIDTH).to(OPERAND),)
    return tiles


@triton.jit
def _block(matrix, begin, channel, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """[BK, BV] of a matrix [K, V]."""
    columns, channels = begin + tl.arange(0, BK), channel + tl.arange(0, BV)
    if (BK * 0 + K) % BK == 0 and (BV * 0 + V) % BV == 0:
        return tl.load(matrix + columns[:, None] * V + channels[None, :])
    else:
        return load_rows(matrix + columns * V, columns < K, channels, V)


@triton.jit(do_not_specialize=NUMBERS)
def _chunk_backward(
    q, k, v, u, w, c, previous, tail_x, tail_v, gain, ridge, energy, previous_valid, tail_valid, lengths,
    grad_output, states, grad_states,
    grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_previous, old_grad_x, old_grad_v,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    CARRIED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, DETACH: tl.constexpr,
    EPSILON: tl.constexpr, FLOOR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one head, from the memory S that it finds and the gradient G of what it leaves.

    With A = X Q', N = V dO' and H = A o N, all [pairs, tokens], and M transposed:

        dX = (N o M) Q + e V G'      dV = (A o M) dO + e X G      dQ' = X' (N o M) + exp(u) S dO'

    and for the step s, z_s its window's sum of x_j' G v_j, B_st = exp(u_t - u_s) sum of H_jt over its window,
    dw_s = sum_t B_st + exp(u_C - u_s) z_s. A log decay's gradient is the sum of everything that passes over it,
    taken as the suffix sums of what tokens read less what steps write of w B without its diagonal, so that nothing
    large cancels. From both follow those of gain, ridge and of the windows' energy, which adds to dX.

    ONCE reads all tiles of q, x, v, dO and G at the beginning, for all products from shared memory, and those of S as
    they are needed; q, x and v once more from cache where their numbers are needed themselves, and v where its place
    has been taken by S. Else tiles are read for each product. What tokens read of S is with ONCE the row sums of
    q o (dO S'), and <S, G> the trace of S' G, products more but no tile in another layout; else the column sums of
    q' o (S dO'), and a sum over both tiles. The pairs from before the chunk go to `old_grad_x` and `old_grad_v`.
    """
    program = tl.program_id(0).to(tl.int64)
    head, number = program % heads, program // heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, TILE)
    steps = tl.minimum(count - start, C)
    zero = tl.minimum(steps, 0) * 64
    ACROSS: tl.constexpr = (V + BV - 1) // BV
    ALONE: tl.constexpr = K <= BK and V <= BV
    u += (number * heads + head) * TILE
    w += (number * heads + head) * TILE
    states += (number * heads + head) * K * V
    grad_states += (number * heads + head) * K * V

    there = row < steps
    key_offset, value_offset = row * (heads * K), row * (heads * V)
    token = ((low + start) * heads + head).to(tl.int64)
    lookback = (W - 1) * heads
    q_at, grad_q_at = (q + token * K, key_offset), (grad_q + token * K, key_offset)
    out_at = (grad_output + token * V, value_offset)
    grad_v_at = (grad_v + (token - lookback) * V, value_offset)
    pair = row - (W - 1)
    own = (row >= W - 1) & (row < steps + W - 1)
    readable = exists(start + pair, row < steps + W - 1, SHIFT, CARRIED)
    has_value = exists(start + pair, row < steps + W - 1, 0, CARRIED)
    if CARRIED:
        x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        y_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
        into_x = x_rows(grad_k, grad_previous, grad_k, sequence, low, start, pair, head, heads, K, 1, SHIFT, CARRIED)
        x_at, y_at, grad_x_at = (x_at[:, None], row * 0), (y_at[:, None], row * 0), (into_x[:, None], row * 0)
    else:
        x_at = (k + (token - lookback - SHIFT * heads) * K, key_offset)
        y_at = (v + (token - lookback) * V, value_offset)
        grad_x_at = (grad_k + (token - lookback - SHIFT * heads) * K, key_offset)
    old = (number * heads + head) * (W - 1)

    valid = count
    if MASKED:
        valid = tl.load(lengths + sequence).to(tl.int32)
    place = start + row
    number_at = (low + place) * heads + head
    active = there & pair_exists(place, valid, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    size = window_size(place, valid, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    statistic = tl.load(energy + (number * heads + head) * TILE + row)
    beta = tl.load(gain + number_at, mask=active, other=0.0).to(tl.float32)
    base = beta * 0.0
    if RIDGE > 0:
        base = tl.load(ridge + number_at, mask=active, other=0.0).to(tl.float32)

    if ONCE:
        y = _tiles(y_at, has_value, V, BV, OPERAND)
        out = _tiles(out_at, there, V, BV, OPERAND)
        x = _tiles(x_at, readable, K, BK, OPERAND)
        rows = _tiles(q_at, there, K, BK, OPERAND)
        g = ()
        for key_begin in tl.static_range(0, K, BK):
            for begin in tl.static_range(0, V, BV):
                g += (_block(grad_states, key_begin, begin, K, V, BK, BV).to(OPERAND),)

    end = tl.load(u + TILE - 1)
    at = tl.load(u + row)
    column = tl.load(c + (number * heads + head) * TILE + row)
    weight = tl.load(w + row)
    read_u = at
    if LAG > 0:
        read_u = _number_at(u, row - LAG)

    n = tl.zeros([TILE, TILE], tl.float32)
    a = tl.zeros([TILE, TILE], tl.float32)
    if ONCE:
        for begin in tl.static_range(0, V, BV):
            n = tl.dot(y[begin // BV], tl.trans(out[begin // BV]), n, input_precision=PRECISION)
        for begin in tl.static_range(0, K, BK):
            a = tl.dot(x[begin // BK], tl.trans(rows[begin // BK]), a, input_precision=PRECISION)
    else:
        for begin in range(0, V, BV):
            channels = begin + tl.arange(0, BV)
            y = load_tile(y_at, has_value, channels, V).to(OPERAND)
            out = load_tile(out_at, there, channels, V).to(OPERAND)
            n = tl.dot(y, tl.trans(out), n, input_precision=PRECISION)
        for begin in range(0, K, BK):
            columns = begin + tl.arange(0, BK)
            x = load_tile(x_at, readable, columns, K).to(OPERAND)
            rows = load_tile(q_at, there, columns, K).to(OPERAND)
            a = tl.dot(x, tl.trans(rows), a, input_precision=PRECISION)

    since = (row + LAG)[:, None]  # the first token that reads all of a pair
    reach = read_u[None, :] - at[:, None]
    if W == 1:
        reach = tl.exp2(tl.where(row[None, :] >= since, reach, float("-inf")))
        factor = column[:, None]
    else:  # log decays of pairs that are not yet written are those of later tokens less theirs, at least 0
        reach = tl.exp2(tl.minimum(reach, 0.0))
        factor = _weights(column, u, w, row, LAG, W)
    n *= reach
    n_m = (n * factor).to(OPERAND)
    a_m = (a * reach * factor).to(OPERAND)
    h = n * a
    by_weight, by_decay = _by_step(tl.sum(tl.where(row[None, :] > since, h, 0.0), 1), h, u, w, row, LAG, W)
    h = tl.where(row[None, :] > since, h, 0.0)
    reading = tl.sum(h * column[:, None], 0)  # by the token that reads
    e = tl.exp2(end - at) * column

    z = row.to(tl.float32) * 0.0
    from_memory = z
    if ONCE:
        if ALONE:
            s = (_block(states, 0, 0, K, V, BK, BV).to(OPERAND),)
        for begin in tl.static_range(0, V, BV):
            channels = begin + tl.arange(0, BV)
            again = load_tile_again(y_at, zero, has_value, channels, V)
            of_y = tl.zeros([TILE, BV], tl.float32)
            for key_begin in tl.static_range(0, K, BK):
                block = g[key_begin // BK * ACROSS + begin // BV]
                of_y = tl.dot(x[key_begin // BK], block, of_y, input_precision=PRECISION)
            z += tl.sum(of_y * again.to(tl.float32), 1)
            of_y = tl.dot(a_m, out[begin // BV], of_y * e[:, None], input_precision=PRECISION)
            of_y = of_y.to(grad_v.dtype.element_ty)
            store_tile(grad_v_at, of_y, own, channels, V)
            if W > 1:
                store_tile((old_grad_v + old * V, row * V), of_y, has_value & (row < W - 1), channels, V)
        products = tl.zeros([BV, BV], tl.float32)
        for key_begin in tl.static_range(0, K, BK):
            columns = key_begin + tl.arange(0, BK)
            if not ALONE:
                s = ()
                for begin in tl.static_range(0, V, BV):
                    s += (_block(states, key_begin, begin, K, V, BK, BV).to(OPERAND),)
            again = load_tile_again(q_at, zero, there, columns, K)
            of_q = tl.zeros([BK, TILE], tl.float32)
            found = tl.zeros([TILE, BK], tl.float32)
            for begin in tl.static_range(0, V, BV):
                this = s[begin // BV]
                block = g[key_begin // BK * ACROSS + begin // BV]
                products = tl.dot(tl.trans(this), block, products, input_precision=PRECISION)
                if key_begin + BK >= K and begin + BV >= V:
                    product = tl.sum(_diagonal_sum(products, tl.arange(0, BV), 0), 0)
                found = tl.dot(out[begin // BV], tl.trans(this), found, input_precision=PRECISION)
                if begin + BV >= V:
                    from_memory += tl.sum(found * again.to(tl.float32), 1)
                of_q = tl.dot(this, tl.trans(out[begin // BV]), of_q, input_precision=PRECISION)
            of_q *= tl.gather(tl.exp2(read_u), row, 0)[None, :]
            of_q = tl.dot(tl.trans(x[key_begin // BK]), n_m, of_q, input_precision=PRECISION)
            store_tile(grad_q_at, tl.trans(of_q.to(grad_q.dtype.element_ty)), there, columns, K)
        if not ALONE:
            y = ()  # again, their place having held tiles of S
            for begin in tl.static_range(0, V, BV):
                y += (load_tile_again(y_at, zero, has_value, begin + tl.arange(0, BV), V).to(OPERAND),)
        from_memory *= tl.exp2(read_u)
    else:
        product = 0.0
        for begin in range(0, V, BV):
            channels = begin + tl.arange(0, BV)
            of_y = tl.zeros([TILE, BV], tl.float32)
            for key_begin in range(0, K, BK):
                columns = key_begin + tl.arange(0, BK)
                x = load_tile(x_at, readable, columns, K).to(OPERAND)
                g = _block(grad_states, key_begin, begin, K, V, BK, BV).to(OPERAND)
                of_y = tl.dot(x, g, of_y, input_precision=PRECISION)
            z += tl.sum(of_y * load_tile_again(y_at, zero, has_value, channels, V).to(tl.float32), 1)
            out = load_tile(out_at, there, channels, V).to(OPERAND)
            of_y = tl.dot(a_m, out, of_y * e[:, None], input_precision=PRECISION)
            of_y = of_y.to(grad_v.dtype.element_ty)
            store_tile(grad_v_at, of_y, own, channels, V)
            if W > 1:
                store_tile((old_grad_v + old * V, row * V), of_y, has_value & (row < W - 1), channels, V)
        for key_begin in range(0, K, BK):
            columns = key_begin + tl.arange(0, BK)
            of_q = tl.zeros([BK, TILE], tl.float32)
            for begin in range(0, V, BV):
                channels = begin + tl.arange(0, BV)
                s = _block(states, key_begin, begin, K, V, BK, BV)
                g = _block(grad_states, key_begin, begin, K, V, BK, BV)
                product += tl.sum(tl.sum(s.to(tl.float32) * g.to(tl.float32), 1), 0)
                out = load_tile(out_at, there, channels, V).to(OPERAND)
                of_q = tl.dot(s.to(OPERAND), tl.trans(out), of_q, input_precision=PRECISION)
            of_q = of_q * tl.exp2(read_u)[None, :]
            from_memory += tl.sum(of_q * tl.trans(load_tile_again(q_at, zero, there, columns, K)).to(tl.float32), 0)
            x = load_tile(x_at, readable, columns, K).to(OPERAND)
            of_q = tl.dot(tl.trans(x), n_m, of_q, input_precision=PRECISION)
            of_q = tl.trans(of_q.to(grad_q.dtype.element_ty))
            store_tile(grad_q_at, of_q, there, columns, K)

    if ONCE:
        again = ()
        for key_begin in tl.static_range(0, K, BK):
            again += (load_tile_again(x_at, zero, readable, key_begin + tl.arange(0, BK), K),)
    reading += from_memory
    if LAG > 0:
        reading = moved(reading, LAG, row)  # by the step after which it is read
    of_end = tl.exp2(end - at) * window_sum(z, row, 1, W)
    of_weight = by_weight + of_end
    passed = weight * of_end
    of_decay = tl.cumsum(reading + by_decay, 0, reverse=True) + tl.cumsum(passed, 0) - passed
    of_decay += product * tl.exp2(end)
    of_gain, of_ridge, of_norm = step_gradients(
        beta, base, statistic, of_weight / size, of_decay, active, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR
    )
    tl.store(grad_gain + number_at, of_gain, mask=there)
    if RIDGE > 0:
        tl.store(grad_ridge + number_at, of_ridge, mask=there)
    of_norm = 2.0 * window_sum(of_norm / size, row, -1, W)

    if ONCE:
        for key_begin in tl.static_range(0, K, BK):
            columns = key_begin + tl.arange(0, BK)
            of_x = tl.zeros([TILE, BK], tl.float32)
            for begin in tl.static_range(0, V, BV):
                block = g[key_begin // BK * ACROSS + begin // BV]
                of_x = tl.dot(y[begin // BV], tl.trans(block), of_x, input_precision=PRECISION)
            of_x = tl.dot(n_m, rows[key_begin // BK], of_x * e[:, None], input_precision=PRECISION)
            of_x += of_norm[:, None] * again[key_begin // BK].to(tl.float32)
            of_x = of_x.to(grad_k.dtype.element_ty)
            store_tile(grad_x_at, of_x, own & readable, columns, K)
            if W > 1:
                store_tile((old_grad_x + old * K, row * K), of_x, readable & (row < W - 1), columns, K)
    else:
        for key_begin in range(0, K, BK):
            columns = key_begin + tl.arange(0, BK)
            of_x = tl.zeros([TILE, BK], tl.float32)
            for begin in range(0, V, BV):
                channels = begin + tl.arange(0, BV)
                y = load_tile(y_at, has_value, channels, V).to(OPERAND)
                g = _block(grad_states, key_begin, begin, K, V, BK, BV).to(OPERAND)
                of_x = tl.dot(y, tl.trans(g), of_x, input_precision=PRECISION)
            rows = load_tile(q_at, there, columns, K).to(OPERAND)
            of_x = tl.dot(n_m, rows, of_x * e[:, None], input_precision=PRECISION)
            of_x += of_norm[:, None] * load_tile_again(x_at, zero, readable, columns, K).to(tl.float32)
            of_x = of_x.to(grad_k.dtype.element_ty)
            store_tile(grad_x_at, of_x, own & readable, columns, K)
            if W > 1:
                store_tile((old_grad_x + old * K, row * K), of_x, readable & (row < W - 1), columns, K)
    if SHIFT and start + C >= count:  # the last key is nobody's write feature here
        last = grad_k + ((low + start + steps - 1) * heads + head) * K
        for of_last in tl.static_range(0, K, BK):
            columns = of_last + tl.arange(0, BK)
            tl.store(last + columns, tl.zeros([BK], tl.float32), mask=columns < K)


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
    place = start + row - (W - 1)
    there = exists(place, row < W - 1, SHIFT, CARRIED)
    source = (number * heads + head) * (W - 1) + row
    columns, channels = tl.arange(0, BK), tl.arange(0, BV)
    into = x_rows(
        grad_k, grad_previous, grad_tail_x, sequence, low, start, row - (W - 1), head, heads, K, W, SHIFT, CARRIED
    )
    own = load_rows(into, there & (place >= 0), columns, K).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_x + source * K, there, columns, K), there, columns, K)
    into = v_rows(grad_v, grad_tail_v, sequence, low, start, row - (W - 1), head, heads, V, W, CARRIED)
    there = exists(place, row < W - 1, 0, CARRIED)
    own = load_rows(into, there & (place >= 0), channels, V).to(tl.float32)
    store_rows(into, own + load_rows(old_grad_v + source * V, there, channels, V), there, channels, V)


def chunk_length(dtype: torch.dtype, key_dim: int, window: int) -> int:
    operand_bytes = operand_dtype(dtype).itemsize
    return launch.chunk_length(operand_bytes, launch.padded(key_dim, operand_bytes), window)


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`."""
    *_, heads, key_dim = shape
    numbers: list[Shape | None] = [(n, torch.float32) for n in triton_schedule.shapes(layout, heads, window, 1)]
    return [*numbers, None, ((layout.chunks, heads, key_dim, value_dim), operand_dtype(dtype)), None]


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device,
        schedule: Options, before: bool, masked: bool, carried: bool, aligned: bool = False,
    ):  # fmt: skip
        _, _, self.heads, key_dim = shape
        window = schedule.window
        self.operand = operand_dtype(dtype)
        self.memory = (layout.sequences, self.heads, key_dim, value_dim)
        self.decays: tuple[int, ...] = ()  # of a part
        self.device = device
        self.states = (layout.chunks, self.heads, key_dim, value_dim)
        key_tile, value_width = (launch.padded(d, self.operand.itemsize) for d in (key_dim, value_dim))
        forward, reverse, backward = launch.configs(device, self.operand.itemsize, key_tile, layout.chunk + window - 1)
        rows = layout.sequences * self.heads

        def tiles(config):
            return -(-value_dim // min(config.value_tile, value_width))

        segments = launch.segments(device, rows * tiles(forward), layout.longest)
        part_chunks = -(-layout.longest // segments)
        self.parts = -(-layout.longest // part_chunks)
        self.along = (layout.length, self.heads, layout.longest, self.parts, part_chunks)
        self.across = (layout.length, layout.longest, self.heads)
        self.schedule = triton_schedule.Plan(layout, self.heads, key_dim, schedule, masked, carried, 1, aligned)

        base = {
            "K": key_dim, "V": value_dim, "BK": key_tile, "C": layout.chunk, "TILE": layout.chunk + window - 1,
            "W": window, "LOOKBACK": triton.next_power_of_2(max(window - 1, 1)), "SHIFT": int(schedule.shifted),
            "LAG": int(before), "MASKED": masked, "PACKED": layout.packed, "CARRIED": carried,
            "OPERAND": OPERANDS[self.operand], "PRECISION": "tf32" if dtype == torch.float16 else "ieee",
        } | schedule.constants()  # fmt: skip

        def launcher(kernel, programs, config, *flags, **more):
            more["BV"] = min(config.value_tile, value_width)
            constants = {n: c for n, c in (base | more).items() if n in kernel.arg_names}
            return Launcher(kernel, (programs,), constants | config.options(), flags, aligned)

        programs, chunks = rows * self.parts, layout.chunks * self.heads
        modes = ("STORE", "FINAL", "INITIAL", "FROM_ZERO")
        self.forward = launcher(_pass, programs * tiles(forward), forward, "READ", *modes)
        self.reverse = launcher(_reverse_pass, programs * tiles(reverse), reverse, *modes)
        once = backward.once and value_dim <= 2 * backward.value_tile
        self.backward = launcher(_chunk_backward, chunks, backward, BK=min(backward.key_tile, key_tile), ONCE=once)
        self.lookback_rows = chunks * (window - 1)
        self.lookback = launcher(_add_lookback, chunks, launch.Config(value_width, 4, 3))
        self.carry = carry_launcher(rows, (key_dim, value_dim), 1, aligned)


def in_parts(plan, run, memory: Tensor | None, reverse: bool) -> Tensor | None:
    """What each part of each sequence begins with, [S, parts, H, K, V]; `memory` itself where there is one part.

    run: fills what parts write to an empty memory, and their log decays.
    """
    if plan.parts == 1:
        return memory
    sequences, heads, *matrix = plan.memory
    found = torch.empty((sequences, plan.parts, heads, *matrix), dtype=torch.float32, device=plan.device)
    decay = torch.empty((sequences, plan.parts, heads, *plan.decays), dtype=torch.float32, device=plan.device)
    run(found, decay)
    plan.carry(found, decay, memory, plan.parts, heads, flags=(memory is not None, reverse))
    return found


def reverse_passes(
    plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> Tensor:
    """The gradients of the memories that chunks leave; fills that of the initial one."""
    assert kept.states is not None
    grad_states = torch.empty_like(kept.states)

    def reverse(initial, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.reverse(
            call.q, kept.log_decay, grad_output, initial, states, final, part_decay, *call.tables[:2], *plan.along,
            flags=(states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    initial = in_parts(plan, lambda found, decay: reverse(None, None, found, decay, True), grad_final, True)
    reverse(initial, grad_states, into.memory, None, False)
    return grad_states


def carry_launcher(rows: int, matrix: tuple[int, int], decays: int, aligned: bool) -> Launcher:
    """Of `carry_parts`, for so many sequences and heads."""
    size = matrix[0] * matrix[1]
    constants = {"SIZE": size, "BLOCK": 1024, "DECAYS": decays, "num_warps": 4}
    return Launcher(carry_parts, (rows * -(-size // 1024),), constants, ("INITIAL", "REVERSED"), aligned)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, before, tables = call.q, call.k, call.v, call.before, call.tables
    weight, log_decay, energy = triton_schedule.forward(plan.schedule, call)

    def run(initial, output, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.forward(
            q, k, v, log_decay, weight[0], weight[-1], before.previous_key, before.tail_x, before.tail_v, initial,
            output, states, final, part_decay, tables.bounds, tables.first, *plan.along,
            flags=(output is not None, states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    states = torch.empty(plan.states, dtype=plan.operand, device=q.device) if keep else None
    initial = in_parts(plan, lambda found, decay: run(None, None, None, found, decay, True), call.memory, False)
    run(initial, output, states, final, None, False)
    return Kept(weight, log_decay, energy, states=states)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, v, before, tables = call.q, call.k, call.v, call.before, call.tables
    weight, log_decay, energy, _, states, *_ = kept
    grad_states = reverse_passes(plan, call, kept, grad_output, grad_final, into)
    old_x = old_v = None
    if plan.lookback_rows:
        old_x, old_v = (t.new_empty(plan.lookback_rows * t.shape[-1]) for t in (k, v))
    plan.backward(
        q, k, v, log_decay, weight[0], weight[-1], before.previous_key, before.tail_x, before.tail_v, call.gain,
        call.ridge, energy, before.previous_valid, before.tail_valid, call.lengths, grad_output, states, grad_states,
        *into[:5], into.before.previous_key, old_x, old_v, *tables, *plan.across,
    )  # fmt: skip
    if plan.lookback_rows:
        plan.lookback(
            old_x, old_v, into.k, into.v, into.before.previous_key, into.before.tail_x, into.before.tail_v, *tables,
            *plan.across,
        )  # fmt: skip
