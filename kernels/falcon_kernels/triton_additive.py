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
tiles again from cache. Products as built, in multiply-adds a token and head: forward C (K + V) + 2 K V, backward
C (3K + 2V) + 4 K V, C being TILE here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launcher import Launcher
from .triton_layout import (
    NUMBERS,
    OPERANDS,
    Layout,
    Tables,
    chunk_of,
    exists,
    load_rows,
    load_rows_again,
    operand_dtype,
    span,
    store_rows,
    token_rows,
    v_rows,
    x_rows,
)
from .triton_schedule import Before, Options, pair_exists, token_gradients

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
    place_of_part = ((sequence * parts + part) * heads + head) * K * V
    s = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        s = tl.load(initial + place_of_part + matrix, mask=inside, other=0.0).to(tl.float32)
    total = 0.0

    row = tl.arange(0, TILE)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    place_of_numbers = ((number + begin) * heads + head) * TILE + row
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
        tl.store(part_decay + (sequence * parts + part) * heads + head, total)
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
    place_of_part = ((sequence * parts + part) * heads + head) * K * V
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
        s = s * tl.exp2(tl.load(part_decay + place)) + own


@triton.jit
def _row_diagonal(tile, written, h, d, age, u, w, row, WRITTEN: tl.constexpr, W: tl.constexpr):
    """A tile of pairs and tokens with the diagonal of d steps since the first write: h times what is written by then.

    written: [TILE] by the step before; without WRITTEN the diagonal leaves out the write at its own step.
    """
    first = row - W + 1
    written = written * tl.exp2(_number_at(u, first + d) - _number_at(u, first + d - 1))
    own = _number_at(w, first + d)
    factor = written + own if WRITTEN else written
    return tl.where(age == d - W + 1, h * factor[:, None], tile), written + own


@triton.jit
def _one_step(past, after, at, i, gap, h, u, row, LAG: tl.constexpr):
    """Of `_by_step`, the step i before each row's own, and what reads after the one before that."""
    own = tl.sum(tl.where(gap - LAG == -i, h, 0.0), 1)
    after = tl.where(gap == -i, past[:, None], after)
    if LAG > 0:
        at = tl.where(gap == -i, own[:, None], at)
    return (past + own) * tl.exp2(_number_at(u, row - i) - _number_at(u, row - i - 1)), after, at


@triton.jit
def _by_step(past, h, u, row, LAG: tl.constexpr, W: tl.constexpr):
    """What reads after each step and at it of the pairs in its window, decayed from the step on: [TILE] each.

    past: [TILE] what reads after the last write of each row's pair; h: [pairs, tokens] all that is read, decayed.
    """
    gap = row[None, :] - row[:, None]
    if W == 1:
        return past, tl.sum(tl.where(gap == LAG, h, 0.0), 1)
    else:
        after = gap.to(tl.float32) * 0.0
        at = after
        if W <= UNROLLED:
            for i in tl.static_range(W):
                past, after, at = _one_step(past, after, at, i, gap, h, u, row, LAG)
        else:
            for i in range(W):
                past, after, at = _one_step(past, after, at, i, gap, h, u, row, LAG)
        if LAG == 0:
            at = tl.where((gap <= 0) & (gap > -W), h, 0.0)
        return tl.sum(after, 0), tl.sum(at, 0)


@triton.jit
def _add_to(sums, tile, before, AXIS: tl.constexpr):
    """Leaves the sums of a tile at `sums` [R], added to those of the tiles `before`, if any."""
    found = tl.sum(tile, AXIS)
    if before > 0:
        tl.debug_barrier()
        found += tl.load(sums)
        tl.debug_barrier()
    tl.store(sums, found)


@triton.jit(do_not_specialize=NUMBERS)
def _chunk_backward(
    q, k, v, u, w, c, previous, tail_x, tail_v, gain, ridge, energy, previous_valid, tail_valid, lengths,
    grad_output, states, grad_states,
    grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_previous, old_grad_x, old_grad_v, scratch,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    CARRIED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, DETACH: tl.constexpr,
    EPSILON: tl.constexpr, FLOOR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one head, from the memory S that it finds and the gradient G of what it leaves.

    With A = X Q', N = V dO' and H = A o N, all [pairs, tokens], and M transposed:

        dX = (N o M) Q + e V G'      dV = (A o M) dO + e X G      dQ' = X' (N o M) + exp(u) S dO'

    and for the step s, z_s its window's sum of x_j' G v_j, B_st = exp(u_t - u_s) sum of H_jt over its window,
    dw_s = sum_t B_st + exp(u_C - u_s) z_s. A log decay's gradient is the sum of everything that passes over it,
    taken as the suffix sums of what tokens read less what steps write of w B without its diagonal, so that nothing
    large cancels. From both follow those of gain, ridge and of the windows' energy, which adds to dX.

    For the registers' sake few results of products live at a time, and tiles of q, k, v and dO are read again.
    The pairs from before the chunk go to `old_grad_x` and `old_grad_v`. Sums of rows and columns of tiles go through
    `scratch`, [6, TILE] a program: the compiler would else make them anew in every layout in which they are needed.
    """
    program = tl.program_id(0).to(tl.int64)
    head, number = program % heads, program // heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, TILE)
    steps = tl.minimum(count - start, C)
    key_end, value_end = K + tl.minimum(steps, 0), V + tl.minimum(steps, 0)  # K and V, but loops of one turn stay loops
    u += (number * heads + head) * TILE
    w += (number * heads + head) * TILE
    states += (number * heads + head) * K * V
    grad_states += (number * heads + head) * K * V

    there = row < steps
    q_at = token_rows(q, low + start, row, head, heads, K)
    out_at = token_rows(grad_output, low + start, row, head, heads, V)
    pair = row - (W - 1)
    own = (row >= W - 1) & (row < steps + W - 1)
    readable = exists(start + pair, row < steps + W - 1, SHIFT, CARRIED)
    has_value = exists(start + pair, row < steps + W - 1, 0, CARRIED)
    x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    y_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    old = (number * heads + head) * (W - 1) + row
    scratch += (number * heads + head) * 6 * TILE

    n = tl.zeros([TILE, TILE], tl.float32)
    for begin in range(0, value_end, BV):
        channels = begin + tl.arange(0, BV)
        y = load_rows(y_at, has_value, channels, V).to(OPERAND)
        out = load_rows(out_at, there, channels, V).to(OPERAND)
        n = tl.dot(y, tl.trans(out), n, input_precision=PRECISION)
    a = tl.zeros([TILE, TILE], tl.float32)
    for begin in range(0, key_end, BK):
        columns = begin + tl.arange(0, BK)
        x = load_rows(x_at, readable, columns, K).to(OPERAND)
        rows = load_rows(q_at, there, columns, K).to(OPERAND)
        a = tl.dot(x, tl.trans(rows), a, input_precision=PRECISION)

    end = tl.load(u + TILE - 1)
    at = tl.load(u + row)
    column = tl.load(c + (number * heads + head) * TILE + row)
    read_u = at
    if LAG > 0:
        read_u = _number_at(u, row - LAG)
    age = row[None, :] - LAG - row[:, None]
    reach = tl.where(age >= 0, read_u[None, :] - at[:, None], tl.where(age > -W, 0.0, float("-inf")))
    reach = tl.exp2(reach)
    if W == 1:
        factor = column[:, None]
    elif W <= UNROLLED:
        factor = tl.where(age >= 0, column[:, None], 0.0)
        written = at * 0.0
        for d in tl.static_range(W - 1):
            factor, written = _row_diagonal(factor, written, 1.0, d, age, u, w, row, True, W)
    else:
        factor = tl.where(age >= 0, column[:, None], 0.0)
        written = at * 0.0
        for d in range(W - 1):
            factor, written = _row_diagonal(factor, written, 1.0, d, age, u, w, row, True, W)
    n = n * reach
    a_m = (a * reach * factor).to(OPERAND)
    n_m = (n * factor).to(OPERAND)
    h = n * a
    later = tl.where(age > 0, h, 0.0)
    past = tl.sum(later, 1)
    later = later * column[:, None]
    if W > 1:
        written = at * 0.0
        if W <= UNROLLED:
            for d in tl.static_range(W):
                later, written = _row_diagonal(later, written, h, d, age, u, w, row, False, W)
        else:
            for d in range(W):
                later, written = _row_diagonal(later, written, h, d, age, u, w, row, False, W)
    tl.store(scratch + row, tl.sum(later, 0))  # by the token that reads
    e = tl.exp2(end - at) * column
    written, at_once = _by_step(past, h, u, row, LAG, W)
    tl.store(scratch + TILE + row, written)
    tl.store(scratch + 2 * TILE + row, at_once)

    for begin in range(0, value_end, BV):
        channels = begin + tl.arange(0, BV)
        of_y = tl.zeros([TILE, BV], tl.float32)
        for key_begin in range(0, key_end, BK):
            columns = key_begin + tl.arange(0, BK)
            x = load_rows(x_at, readable, columns, K).to(OPERAND)
            g = load_rows(grad_states + columns * V, columns < K, channels, V).to(OPERAND)
            of_y = tl.dot(x, g, of_y, input_precision=PRECISION)
        _add_to(scratch + 3 * TILE + row, of_y * load_rows_again(y_at, has_value, channels, V).to(tl.float32), begin, 1)
        out = load_rows(out_at, there, channels, V).to(OPERAND)
        of_y = tl.dot(a_m, out, of_y * e[:, None], input_precision=PRECISION)
        store_rows(token_rows(grad_v, low + start, pair, head, heads, V), of_y, own, channels, V)
        if W > 1:
            store_rows(old_grad_v + old * V, of_y, has_value & (row < W - 1), channels, V)

    product = tl.zeros([BK], tl.float32)
    for key_begin in range(0, key_end, BK):
        columns = key_begin + tl.arange(0, BK)
        of_q = tl.zeros([BK, TILE], tl.float32)
        for begin in range(0, value_end, BV):
            channels = begin + tl.arange(0, BV)
            s = load_rows(states + columns * V, columns < K, channels, V)
            g = load_rows(grad_states + columns * V, columns < K, channels, V)
            product += tl.sum(s.to(tl.float32) * g.to(tl.float32), 1)
            out = load_rows(out_at, there, channels, V).to(OPERAND)
            of_q = tl.dot(s.to(OPERAND), tl.trans(out), of_q, input_precision=PRECISION)
        of_q = of_q * tl.exp2(read_u)[None, :]
        rows = load_rows_again(q_at, there, columns, K)
        _add_to(scratch + 4 * TILE + row, of_q * tl.trans(rows).to(tl.float32), key_begin, 0)
        x = load_rows(x_at, readable, columns, K).to(OPERAND)
        of_q = tl.dot(tl.trans(x), n_m, of_q, input_precision=PRECISION)
        store_rows(
            token_rows(grad_q, low + start, row, head, heads, K),
            tl.trans(of_q.to(grad_q.dtype.element_ty)),
            there,
            columns,
            K,
        )

    product = tl.sum(product, 0) * tl.exp2(end)

    tl.debug_barrier()
    passing = tl.load(scratch + row) + tl.load(scratch + 4 * TILE + row)
    written = tl.load(scratch + TILE + row)
    weight = tl.load(w + row)
    z = tl.load(scratch + 3 * TILE + row)
    gap = row[None, :] - row[:, None]
    in_window = (gap <= 0) & (gap > -W)  # of pairs by rows, and of steps
    if W > 1:
        z = tl.sum(tl.where(in_window, z[:, None], 0.0), 0)
    of_end = tl.exp2(end - tl.load(u + row)) * z
    of_weight = written + tl.load(scratch + 2 * TILE + row) + of_end
    if LAG == 0:
        passed = tl.where(gap <= 0, (passing - weight * written)[:, None], (weight * of_end)[:, None])
    else:
        passed = tl.where(gap <= 0, (-weight * written)[:, None], (weight * of_end)[:, None])
        passed += tl.where(gap <= -LAG, passing[:, None], 0.0)
    of_decay = tl.sum(passed, 0) + product
    if MASKED:
        count = tl.load(lengths + sequence).to(tl.int32)
    place = start + row
    token = (low + place) * heads + head
    active = there & pair_exists(place, count, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    statistic = tl.load(energy + (number * heads + head) * TILE + row)
    of_gain, of_ridge, of_norm = token_gradients(
        place, token, active, gain, ridge, statistic, of_weight, of_decay, previous_valid, tail_valid, sequence, count,
        W, SHIFT, CARRIED, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR,
    )  # fmt: skip
    tl.store(grad_gain + token, of_gain, mask=there)
    if RIDGE > 0:
        tl.store(grad_ridge + token, of_ridge, mask=there)
    tl.store(scratch + 5 * TILE + row, of_norm)
    tl.debug_barrier()
    of_norm = tl.load(scratch + 5 * TILE + row)
    if W > 1:
        of_norm = tl.sum(tl.where(in_window, of_norm[None, :], 0.0), 1)

    into_x = x_rows(grad_k, grad_previous, grad_k, sequence, low, start, pair, head, heads, K, 1, SHIFT, CARRIED)
    for key_begin in range(0, key_end, BK):
        columns = key_begin + tl.arange(0, BK)
        of_x = tl.zeros([TILE, BK], tl.float32)
        for begin in range(0, value_end, BV):
            channels = begin + tl.arange(0, BV)
            y = load_rows(y_at, has_value, channels, V).to(OPERAND)
            g = load_rows(grad_states + columns * V, columns < K, channels, V).to(OPERAND)
            of_x = tl.dot(y, tl.trans(g), of_x, input_precision=PRECISION)
        rows = load_rows(q_at, there, columns, K).to(OPERAND)
        of_x = tl.dot(n_m, rows, of_x * e[:, None], input_precision=PRECISION)
        x = load_rows_again(x_at, readable, columns, K).to(tl.float32)
        of_x += 2.0 * of_norm[:, None] * x
        store_rows(into_x, of_x, own & readable, columns, K)
        if W > 1:
            store_rows(old_grad_x + old * K, of_x, readable & (row < W - 1), columns, K)
        if SHIFT and start + C >= count:  # the last key is nobody's write feature here
            last = grad_k + ((low + start + steps - 1) * heads + head) * K + columns
            tl.store(last, tl.zeros([BK], tl.float32), mask=columns < K)


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

        chunk = {"C": layout.chunk, "PACKED": layout.packed}
        sizes = {"K": key_dim, "V": value_dim, "BK": key_tile} | chunk
        tile = {"TILE": layout.chunk + window - 1}
        rule = {"W": window, "SHIFT": int(schedule.shifted), "CARRIED": carried}
        numbers = {
            "OPERAND": OPERANDS[self.operand],
            "PRECISION": "tf32" if dtype == torch.float16 else "ieee",
            "LAG": int(before),
        }

        def options(config, *more):
            found = {"BV": min(config.value_tile, value_width)} | config.options()
            for each in more:
                found |= each
            return found

        def launcher(kernel, programs, constants, *flags):
            return Launcher(kernel, (programs,), constants, flags, aligned)

        chunks, size = layout.chunks * self.heads, key_dim * value_dim
        self.forward = launcher(
            _pass, rows * self.parts * tiles(forward), options(forward, sizes, tile, rule, numbers),
            "READ", "STORE", "FINAL", "INITIAL", "FROM_ZERO",
        )  # fmt: skip
        self.reverse = launcher(
            _reverse_pass, rows * self.parts * tiles(reverse), options(reverse, sizes, tile, numbers),
            "STORE", "FINAL", "INITIAL", "FROM_ZERO",
        )  # fmt: skip
        step = {"MASKED": masked} | schedule.constants()
        part = {"BK": min(backward.key_tile, key_tile)}
        self.backward = launcher(_chunk_backward, chunks, options(backward, sizes, tile, rule, numbers, step, part))
        self.lookback_rows = chunks * (window - 1)
        lookback = {"BV": value_width, "LOOKBACK": triton.next_power_of_2(max(window - 1, 1)), "num_warps": 4}
        self.lookback = launcher(_add_lookback, chunks, sizes | rule | lookback)
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
    states: Tensor | None,
    final: Tensor | None,
) -> None:
    """Fills `output` [B, T, H, V] and, where given, what chunks find, `plan.states`, and the last, [S, H, K, V].

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; float32, bfloat16 or float16, the same for all.
        weight, log_decay: as the schedule leaves them, [1 or 2, chunks, H, TILE] and [chunks, H, TILE].
        memory: float32 [S, H, K, V]; S is B, or the number of documents; None for zero.
        before: previous keys, and pairs of the tails, 0 where there is none.
    """

    def run(initial, output, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.forward(
            q, k, v, log_decay, weight[0], weight[-1], before.previous_key, before.tail_x, before.tail_v, initial,
            output, states, final, part_decay, tables.bounds, tables.first, *plan.along,
            flags=(output is not None, states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    initial = plan.in_parts(lambda found, decay: run(None, None, None, found, decay, True), memory, q, False)
    run(initial, output, states, final, None, False)


def backward(
    plan: Plan,
    tables: Tables,
    grad_output: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    before: Before,
    lengths: Tensor | None,
    weight: Tensor,
    log_decay: Tensor,
    energy: Tensor,
    states: Tensor,
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    grad_before: Before,
) -> None:
    """Fills the gradients of q, k, v, gain, ridge and memory, and adds to `grad_before`.

    gain, ridge, lengths and energy are the schedule's, `states` what the forward has left.
    """
    grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_memory = into
    grad_states = torch.empty_like(states)

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
    scratch = weight.new_empty(6 * energy.numel())
    plan.backward(
        q, k, v, log_decay, weight[0], weight[-1], before.previous_key, before.tail_x, before.tail_v, gain, ridge,
        energy, before.previous_valid, before.tail_valid, lengths, grad_output, states, grad_states, grad_q, grad_k,
        grad_v, grad_gain, grad_ridge, grad_before.previous_key, old_x, old_v, scratch, *tables, *plan.across,
    )  # fmt: skip
    if plan.lookback_rows:
        plan.lookback(
            old_x, old_v, grad_k, grad_v, grad_before.previous_key, grad_before.tail_x, grad_before.tail_v, *tables,
            *plan.across,
        )  # fmt: skip
