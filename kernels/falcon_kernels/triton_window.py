"""Triton kernels of the regression write of a whole window (falcon_3, W > 1), forward and backward.

A step t writes W pairs at once, all with residuals of the memory that it found. A row r = (t, j) is one such write: in
a chunk of C tokens that finds S there are C W rows, at most 64, in the order of their tokens. With x_r and v_r their
pairs, t(r) their tokens, w the weights eta / W_t, and u the running log decay within the chunk,

    N = [t(s) < t(r)] exp(u_{t(r)-1} - u_{t(s)}) x_r . x_s        A = I + Diag(w) N
    Z = A^-1 Diag(w) (V - Diag(exp(u_{t-1})) X S)                 what is written of the rows' pairs
    O = Diag(exp(u)) Q S + P Z        P = [t(r) <= t] exp(u_t - u_{t(r)}) q_t . x_r
    S' = exp(u_C) S + X' Diag(exp(u_C - u)) Z.

Rows of one token do not act on one another: N is strictly lower triangular in blocks of W. Reading before the write
takes u_{t-1} for u_t and a strict mask in P. But a chunk's windows hold only E = C + W - 1 different pairs, X_E, and
with J the 0/1 matrix of which pair a row is, X = J X_E. So a chunk is a map of S with C + E rows, no more than 64:

    O = M_o - L_o S                       [M_o; M_d] = H Diag(w) V
    S' = exp(u_C) S + X_E' (M_d - L_d S)  [L_o; L_d] = H Diag(w exp(u_{t-1})) X - [Diag(exp(u)) Q; 0]

with H = [P; J' Diag(exp(u_C - u))] A^-1. L (`lost`) and M (`made`) depend on no other chunk. A pass over chunks is left
with two products, and so is the pass back: with G the cotangent of S', that of S is exp(u_C) G - L' [dO; X_E G].

Then each chunk is on its own. With dZ = P' dO + Diag(exp(u_C - u)) X G and Y = A^-T dZ

    dV = J' Diag(w) Y        dP = [t(r) <= t] exp(u_t - u_{t(r)}) dO Z'
    dQ = dP X + Diag(exp(u)) dO S'        dN = -Diag(w) [t(s) < t(r)] exp(u_{t(r)-1} - u_{t(s)}) Y Z'
    dX = J' (dP' Q + dN X + dN' X - Diag(w exp(u_{t-1})) Y S' + Diag(exp(u_C - u)) Z G'),

and that of w_t is the sum of Y * (V - Diag(exp(u_{t-1})) X S - N Z) over the rows of t. A pair is in windows of several
chunks: each leaves its own part, and the last kernel adds them up, and to them what the windows' energies ask for.

    forward    local       L, M                one program per (chunk, head)
               carry       O, S                one program per (sequence, head, V tile), over the chunks
    backward   local       L, A^-1             as before
               reverse     G                   one program per (sequence, head, V tile), backwards over the chunks
               adjoint     Z, Y, parts of dV   one program per (chunk, head)
               gradients   all others          one program per (chunk, head), parts of dX among them
               add_bound   to parts of dX      where the energies are bounds, one program per (chunk, head)
               collect     dX, dV              one program per (chunk, head)

Tiles have 64 rows whatever W: the rows (t, j); or tokens in the first 32 and pairs in the last, where C + E fit. A^-1
is built up from blocks of one token, twice as large each time, two products a time. Elements moved a token and head,
for W = 4 and thus C = 16 and E = 19: local reads 2K + V and writes (C + E) (K + V) / C, which the carry reads, to write
V and, for the backward, the states, K V / C. Only states are kept.

Decays enter as exp(u_t - u_s), s <= t only, summed in two parts but for bfloat16 inputs as in triton_regression.py.
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
    moved,
    operand_dtype,
    span,
    store_rows,
    token_rows,
    v_rows,
    x_rows,
)
from .triton_regression import (
    _at_end,
    _gram,
    _halves,
    _load_state,
    _negative,
    _pairwise,
    _product,
    _running,
    _settled,
    _turned,
    _wide_dot,
)
from .triton_schedule import Call, Gradients, Kept, Options, Shape, pair_exists, step_gradients, window_size
from .triton_smoothness import ROWS, SMOOTHNESS, bound_gradients, window_gradients, window_rows

HALF = tl.constexpr(32)
LARGEST_WINDOW = 16


def chunk_length(dtype: torch.dtype, key_dim: int, window: int) -> int:
    """C: C W rows are at most 64, C + 2 (W - 1) pairs at most 34, and 32 for small windows."""
    return min(ROWS.value // window, 30)


@triton.jit
def _rows_of(base, program, i, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the rows i of a tile [COUNT, WIDTH] of a chunk and head."""
    return base + program * (COUNT * WIDTH) + i * WIDTH


@triton.jit
def _rows_of_map(base, program, i, C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """The same of L and M, of which only the rows of C tokens and of C + W - 1 pairs are there."""
    return _rows_of(base, program, tl.where(i < HALF, i, i - HALF + C), 2 * C + W - 1, WIDTH)


@triton.jit
def _pairs_of_half(i, start, count, C: tl.constexpr, W: tl.constexpr):
    """Which pair, counted from the chunk's start, each row of the tile's last half is, and which rows are one."""
    pair = i - HALF - (W - 1)
    return pair, (i >= HALF) & (pair < C) & (start + pair < count)


@triton.jit
def _exact(a, b, OPERAND: tl.constexpr):
    """a b of float32, of 16 bits of them where operands are bfloat16."""
    if tl.bfloat16 == OPERAND:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(n, i, W: tl.constexpr, OPERAND: tl.constexpr):
    """(I + n)^-1 of n [ROWS, ROWS], strictly lower triangular in blocks of W: from blocks to blocks twice as large."""
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(6):
        if W % (2 << level) != 0:
            new = (i[:, None] >> (level + 1) == i[None, :] >> (level + 1)) & (
                i[:, None] >> level != i[None, :] >> level
            )
            change = tl.where(new, n, 0.0)
            if W % (1 << level) != 0:
                change = _exact(_exact(inverse, change, OPERAND), inverse, OPERAND)
            inverse -= change
    return inverse


@triton.jit
def _between(step, log_decay, places, OPERAND: tl.constexpr):
    """exp(u_{t-1} - u_s) of rows of steps t after s, 0 elsewhere."""
    uc, uf = _running(log_decay, places, step, 0, OPERAND)
    before_c, before_f = _running(log_decay, places, step, 1, OPERAND)
    return _pairwise(before_c[:, None], before_f[:, None], uc[None, :], uf[None, :], step[:, None] > step[None, :])


@triton.jit(do_not_specialize=NUMBERS)
def _local(
    q, k, v, previous, tail_x, tail_v, weight, log_decay, lost, made, inverse,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr,
    AGAIN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """L and M; or with AGAIN L and A^-1, for the backward."""
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, ROWS)
    step = i // W
    pair = step + i % W - (W - 1)
    own = (step < C) & (start + step < count)
    token = tl.minimum(i, C - 1)
    here = (i < C) & (start + i < count)
    x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    there = exists(start + pair, own, SHIFT, CARRIED)
    q_at = token_rows(q, low + start, i, head, heads, K)

    gram = tl.zeros([ROWS, ROWS], tl.float32)
    for begin in range(0, K, BK):
        x = load_rows(x_at, there, begin + tl.arange(0, BK), K).to(OPERAND)
        gram = _gram(x, x, gram)
    eta = tl.load(weight + step)
    n = eta[:, None] * gram * _between(step, log_decay, places, OPERAND)
    solved = _inverse(n, i, W, OPERAND)
    if AGAIN:
        tl.store(inverse + program * (ROWS * ROWS) + i[:, None] * ROWS + i[None, :], solved)

    scores = tl.zeros([ROWS, ROWS], tl.float32)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        queries = load_rows(q_at, here, kk, K).to(OPERAND)
        scores = tl.dot(queries, tl.trans(x), scores, input_precision=PRECISION)
    uc, uf = _running(log_decay, places, step, 0, OPERAND)
    before_c, before_f = _running(log_decay, places, step, 1, OPERAND)
    rc, rf = _running(log_decay, places, token, LAG, OPERAND)
    end_c, end_f = _at_end(log_decay, places, C, OPERAND)
    seen = here[:, None] & (i[:, None] >= step[None, :] + LAG)
    read = scores * _pairwise(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
    same = i[:, None] - HALF == pair[None, :] + (W - 1)
    left = _exact(read + tl.where(same, tl.exp2((end_c - uc) + (end_f - uf))[None, :], 0.0), solved, OPERAND)
    used = here | ((i >= HALF) & (i < HALF + C + W - 1))
    by_s = left * (eta * tl.exp2(before_c + before_f))[None, :]
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        queries = load_rows(q_at, here, kk, K).to(tl.float32)
        tile = _wide_dot(by_s, x, OPERAND, PRECISION) - tl.exp2(rc + rf)[:, None] * queries
        store_rows(_rows_of_map(lost, program, i, C, W, K), tile, used, kk, K)
    if not AGAIN:
        left *= eta[None, :]
        v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
        valued = exists(start + pair, own, 0, CARRIED)
        for begin in range(0, V, BV):
            columns = begin + tl.arange(0, BV)
            y = load_rows(v_at, valued, columns, V).to(OPERAND)
            at = _rows_of_map(made, program, i, C, W, V)
            store_rows(at, _wide_dot(left, y, OPERAND, PRECISION), used, columns, V)


@triton.jit(do_not_specialize=NUMBERS)
def _carry(
    k, previous, tail_x, log_decay, memory, lost, made, output, states, final,
    bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr, STORE: tl.constexpr,
    FINAL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S' of one sequence and head, a tile of its value channels, in registers over all chunks; what is read of it.

    STORE leaves what each chunk finds, states [chunks, H, V, K].
    """
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tl.cdiv(V, BV)).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tl.cdiv(V, BV)
    sequence, head = program // heads, program % heads
    low, count = span(sequence, bounds, length, PACKED)
    number = tl.load(first + sequence) if PACKED else sequence * longest
    kk, i = tl.arange(0, BK), tl.arange(0, ROWS)
    own, inside = _turned(program * K * V + kk * V, columns, kk < K, V)
    s = tl.load(memory + own, mask=inside, other=0.0) if CARRIED else tl.zeros([BV, BK], tl.float32)
    for start in range(0, count, C):
        chunk = (number + start // C) * heads + head
        if STORE:
            store_rows(states + chunk * (V * K) + columns * K, s, columns < V, kk, K)
        end_c, end_f = _at_end(log_decay + chunk * TILE, places, C, OPERAND)
        here = (i < C) & (start + i < count)
        pair, paired = _pairs_of_half(i, start, count, C, W)
        x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x_at, exists(start + pair, paired, SHIFT, CARRIED), kk, K).to(OPERAND)
        minus = load_rows(_rows_of_map(lost, chunk, i, C, W, K), here | paired, kk, K)
        at, mask = _turned(_rows_of_map(made, chunk, i, C, W, V), columns, here | paired, V)
        change = -_negative(at, mask, ROWS, OPERAND)
        change -= tl.dot(s.to(OPERAND), tl.trans(minus), input_precision=PRECISION)
        at, mask = _turned(token_rows(output, low + start, i, head, heads, V), columns, here, V)
        tl.store(at, change, mask=mask)
        s = tl.dot(change.to(OPERAND), x, s * tl.exp2(end_c + end_f), input_precision=PRECISION)
    if FINAL:
        tl.store(final + own, s, mask=inside)


# Backward


@triton.jit(do_not_specialize=NUMBERS)
def _reverse(
    k, previous, tail_x, log_decay, lost, grad_output, grad_final, grad_states, grad_memory,
    bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G' of one sequence and head, a tile of value channels, backwards over the chunks.

    Stores it, grad_states [chunks, H, V, K].
    """
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tl.cdiv(V, BV)).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tl.cdiv(V, BV)
    sequence, head = program // heads, program % heads
    low, count = span(sequence, bounds, length, PACKED)
    number = tl.load(first + sequence) if PACKED else sequence * longest
    kk, i = tl.arange(0, BK), tl.arange(0, ROWS)
    own, inside = _turned(program * K * V + kk * V, columns, kk < K, V)
    g = tl.load(grad_final + own, mask=inside, other=0.0) if FINAL else tl.zeros([BV, BK], tl.float32)
    chunks = tl.cdiv(count, C)
    for back in range(0, chunks):
        start = (chunks - 1 - back) * C
        chunk = (number + chunks - 1 - back) * heads + head
        store_rows(grad_states + chunk * (V * K) + columns * K, g, columns < V, kk, K)
        end_c, end_f = _at_end(log_decay + chunk * TILE, places, C, OPERAND)
        here = (i < C) & (start + i < count)
        pair, paired = _pairs_of_half(i, start, count, C, W)
        x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x_at, exists(start + pair, paired, SHIFT, CARRIED), kk, K).to(OPERAND)
        minus = load_rows(_rows_of_map(lost, chunk, i, C, W, K), here | paired, kk, K)
        at, mask = _turned(token_rows(grad_output, low + start, i, head, heads, V), columns, here, V)
        given = _negative(at, mask, ROWS, OPERAND)
        given -= tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        g = tl.dot(given.to(OPERAND), minus, g * tl.exp2(end_c + end_f), input_precision=PRECISION)
    if CARRIED:
        tl.store(grad_memory + own, g, mask=inside)


@triton.jit
def _fold(i, pair, tile, W: tl.constexpr, OPERAND: tl.constexpr):
    """J' tile: rows (t, j) summed by pair, the oldest of the chunk's first."""
    same = tl.where(i[:, None] == pair[None, :] + (W - 1), 1.0, 0.0)
    if tl.bfloat16 == OPERAND:
        high, low = _halves(tile)
        return tl.dot(same.to(OPERAND), high, tl.dot(same.to(OPERAND), low))
    else:
        return tl.dot(same, tile, input_precision="tf32x3")


@triton.jit(do_not_specialize=NUMBERS)
def _adjoint(
    q, k, v, previous, tail_x, tail_v, weight, log_decay, inverse, states, grad_output, grad_states, z, y, part_v,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Z and Y [chunks, H, ROWS, V], and the chunk's part of dV, [chunks, H, E, V]."""
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    states, grad_states = states + program * V * K, grad_states + program * V * K
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, ROWS)
    step = i // W
    pair = step + i % W - (W - 1)
    own = (step < C) & (start + step < count)
    token = tl.minimum(i, C - 1)
    here = (i < C) & (start + i < count)
    x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    there = exists(start + pair, own, SHIFT, CARRIED)
    v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    valued = exists(start + pair, own, 0, CARRIED)
    q_at = token_rows(q, low + start, i, head, heads, K)
    given_at = token_rows(grad_output, low + start, i, head, heads, V)

    scores = tl.zeros([ROWS, ROWS], tl.float32)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        queries = load_rows(q_at, here, kk, K).to(OPERAND)
        scores = tl.dot(x, tl.trans(queries), scores, input_precision=PRECISION)
    eta = tl.load(weight + step)
    uc, uf = _running(log_decay, places, step, 0, OPERAND)
    before_c, before_f = _running(log_decay, places, step, 1, OPERAND)
    rc, rf = _running(log_decay, places, token, LAG, OPERAND)
    end_c, end_f = _at_end(log_decay, places, C, OPERAND)
    seen = here[None, :] & (i[None, :] >= step[:, None] + LAG)
    scores *= _pairwise(rc[None, :], rf[None, :], uc[:, None], uf[:, None], seen)
    read = scores.to(OPERAND)
    to_end = tl.exp2((end_c - uc) + (end_f - uf))
    inverse += program * (ROWS * ROWS)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        found = tl.zeros([ROWS, BV], tl.float32)
        dz = tl.zeros([ROWS, BV], tl.float32)
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            x = load_rows(x_at, there, kk, K).to(OPERAND)
            s = _load_state(states, columns, kk, V, K)
            found = tl.dot(x, tl.trans(s), found, input_precision=PRECISION)
            g = _load_state(grad_states, columns, kk, V, K)
            dz = tl.dot(x, tl.trans(g), dz, input_precision=PRECISION)
        given = load_rows(given_at, here, columns, V).to(OPERAND)
        dz = tl.dot(read, given, dz * to_end[:, None], input_precision=PRECISION)
        values = load_rows(v_at, valued, columns, V).to(tl.float32)
        residual = eta[:, None] * (values - tl.exp2(before_c + before_f)[:, None] * found)
        solved = tl.load(inverse + i[:, None] * ROWS + i[None, :])
        store_rows(_rows_of(z, program, i, ROWS, V), _exact(solved, residual, OPERAND), i >= 0, columns, V)
        turned = tl.load(inverse + i[None, :] * ROWS + i[:, None])
        solution = _exact(turned, dz, OPERAND)
        store_rows(_rows_of(y, program, i, ROWS, V), solution, i >= 0, columns, V)
        part = _fold(i, pair, eta[:, None] * solution, W, OPERAND)
        store_rows(_rows_of(part_v, program, i, C + W - 1, V), part, i < C + W - 1, columns, V)


@triton.jit
def _by_token(numbers, step, i):
    """[ROWS] sums over the rows of each token i."""
    return tl.sum(tl.where(step[None, :] == i[:, None], numbers[None, :], 0.0), 1)


@triton.jit(do_not_specialize=NUMBERS)
def _gradients(
    q, k, v, gain, ridge, previous, previous_valid, tail_x, tail_v, tail_valid, lengths, weight, log_decay, energy,
    states, grad_output, grad_states, z, y, grad_q, grad_gain, grad_ridge, grad_energy, part_x,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr,
    MASKED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, DETACH: tl.constexpr, EPSILON: tl.constexpr,
    FLOOR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one head: of q, gain and ridge, of the windows' sums behind the energies, [chunks, H,
    TILE], and the chunk's part of dX but for these, [chunks, H, E, K].

    Products [ROWS, ROWS] that are left operands both ways round are formed twice, not transposed.
    """
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    states, grad_states = states + program * V * K, grad_states + program * V * K
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, ROWS)
    step = i // W
    pair = step + i % W - (W - 1)
    own = (step < C) & (start + step < count)
    token = tl.minimum(i, C - 1)
    here = (i < C) & (start + i < count)
    x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    there = exists(start + pair, own, SHIFT, CARRIED)
    v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    valued = exists(start + pair, own, 0, CARRIED)
    q_at = token_rows(q, low + start, i, head, heads, K)
    given_at = token_rows(grad_output, low + start, i, head, heads, V)
    z_at, y_at = _rows_of(z, program, i, ROWS, V), _rows_of(y, program, i, ROWS, V)

    eta = tl.load(weight + step)
    uc, uf = _running(log_decay, places, step, 0, OPERAND)
    before_c, before_f = _running(log_decay, places, step, 1, OPERAND)
    rc, rf = _running(log_decay, places, token, LAG, OPERAND)
    end_c, end_f = _at_end(log_decay, places, C, OPERAND)
    at_end = tl.exp2(end_c + end_f)

    scores = tl.zeros([ROWS, ROWS], tl.float32)
    system = tl.zeros([ROWS, ROWS], tl.float32)
    gained = tl.zeros([ROWS], tl.float32)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        given = load_rows(given_at, here, columns, V).to(OPERAND)
        residual = load_rows(z_at, i >= 0, columns, V)
        solution = load_rows(y_at, i >= 0, columns, V)
        values = load_rows(v_at, valued, columns, V).to(tl.float32)
        gained += tl.sum(solution.to(tl.float32) * values, 1)
        scores = tl.dot(given, tl.trans(residual), scores, input_precision=PRECISION)
        system = tl.dot(solution, tl.trans(residual), system, input_precision=PRECISION)
    gained = _settled(gained, i)
    seen = here[:, None] & (i[:, None] >= step[None, :] + LAG)
    scores_left = (scores * _pairwise(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)).to(OPERAND)
    system_left = (-system * _between(step, log_decay, places, OPERAND)).to(OPERAND)

    read = tl.zeros([ROWS], tl.float32)
    for beginning in range(0, K, BK):
        kk = beginning + tl.arange(0, BK)
        dq = tl.zeros([ROWS, BK], tl.float32)
        for begin in range(0, V, BV):
            columns = begin + tl.arange(0, BV)
            given = load_rows(given_at, here, columns, V).to(OPERAND)
            dq = tl.dot(given, _load_state(states, columns, kk, V, K), dq, input_precision=PRECISION)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        dq = tl.dot(scores_left, x, dq * tl.exp2(rc + rf)[:, None], input_precision=PRECISION)
        store_rows(token_rows(grad_q, low + start, i, head, heads, K), dq, here, kk, K)
        read += tl.sum(load_rows(q_at, here, kk, K).to(tl.float32) * dq, 1)
    read = _settled(read, i)

    scores = tl.zeros([ROWS, ROWS], tl.float32)
    system = tl.zeros([ROWS, ROWS], tl.float32)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        given = load_rows(given_at, here, columns, V).to(OPERAND)
        residual = load_rows(z_at, i >= 0, columns, V)
        solution = load_rows(y_at, i >= 0, columns, V)
        scores = tl.dot(residual, tl.trans(given), scores, input_precision=PRECISION)
        system = tl.dot(residual, tl.trans(solution), system, input_precision=PRECISION)
    seen = here[None, :] & (i[None, :] >= step[:, None] + LAG)
    scores_turned = (scores * _pairwise(rc[None, :], rf[None, :], uc[:, None], uf[:, None], seen)).to(OPERAND)
    earlier = step[None, :] > step[:, None]
    decay = _pairwise(before_c[None, :], before_f[None, :], uc[:, None], uf[:, None], earlier)
    system_turned = (-system * decay * eta[None, :]).to(OPERAND)

    decayed = tl.zeros([ROWS], tl.float32)
    written = tl.zeros([ROWS], tl.float32)
    kept = 0.0
    for beginning in range(0, K, BK):
        kk = beginning + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        queries = load_rows(q_at, here, kk, K).to(OPERAND)
        dx = tl.zeros([ROWS, BK], tl.float32)
        left = tl.zeros([ROWS, BK], tl.float32)
        for begin in range(0, V, BV):
            columns = begin + tl.arange(0, BV)
            residual = load_rows(z_at, i >= 0, columns, V)
            solution = load_rows(y_at, i >= 0, columns, V)
            s = _load_state(states, columns, kk, V, K)
            g = _load_state(grad_states, columns, kk, V, K)
            kept += _product(s, g) * at_end
            dx = tl.dot(solution, s, dx, input_precision=PRECISION)
            left = tl.dot(residual, g, left, input_precision=PRECISION)
        dx = tl.dot(system_left, x, dx * -tl.exp2(before_c + before_f)[:, None], input_precision=PRECISION)
        left *= tl.exp2((end_c - uc) + (end_f - uf))[:, None]
        kept += _product(x, left)
        left = tl.dot(scores_turned, queries, left, input_precision=PRECISION)
        left = tl.dot(system_turned, x, left, input_precision=PRECISION)
        decayed += tl.sum(x.to(tl.float32) * dx, 1)
        written += tl.sum(x.to(tl.float32) * left, 1)
        part = _fold(i, pair, left + eta[:, None] * dx, W, OPERAND)
        store_rows(_rows_of(part_x, program, i, C + W - 1, K), part, i < C + W - 1, kk, K)

    # As in triton_regression.py: cotangents of u_C `kept`, of u_t -`written`, of u_{t-1} `owed`, `read` of the one that
    # is read; summed over tokens as they are, so that what a pair of tokens has in two of them cancels.
    owed = _by_token(eta * decayed, step, i)
    written = _by_token(written, step, i)
    grad_decay = tl.cumsum(read + owed - written, 0, reverse=True) - owed - read * LAG + kept

    real = count
    if MASKED:
        real = tl.load(lengths + sequence).to(tl.int32)
    place = start + i
    row = (low + place) * heads + head
    active = pair_exists(place, real, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED) & here
    size = window_size(place, real, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    beta = tl.load(gain + row, mask=active, other=0.0).to(tl.float32)
    coefficient = tl.zeros([ROWS], tl.float32)
    if RIDGE > 0:
        coefficient = tl.load(ridge + row, mask=active, other=0.0).to(tl.float32)
    statistic = tl.load(energy + program * TILE + token)
    of_weight = _by_token(gained + decayed, step, i)
    of_gain, of_ridge, of_energy = step_gradients(
        beta, coefficient, statistic, of_weight / size, grad_decay, active, RIDGE, DIRECT, True, DETACH, EPSILON, FLOOR
    )
    tl.store(grad_gain + row, of_gain, mask=here)
    if RIDGE > 0:
        tl.store(grad_ridge + row, of_ridge, mask=here)
    tl.store(grad_energy + program * TILE + i, of_energy / size, mask=here)


@triton.jit(do_not_specialize=NUMBERS)
def _add_bound(
    k, previous, tail_x, grad_energy, part_x, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Adds to a chunk's part of dX what the energies of its windows ask for, where they are the bound."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, ROWS)
    step = i // W
    pair = step + i % W - (W - 1)
    own = (step < C) & (start + step < count)
    given = tl.load(grad_energy + program * TILE + step, mask=own, other=0.0)
    left = bound_gradients(
        k, previous, tail_x, sequence, low, count, start, i, head, heads, given, K, BK, W, SHIFT, CARRIED
    )
    at = _rows_of(part_x, program, i, C + W - 1, K)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = window_rows(k, previous, tail_x, sequence, low, count, start, pair, head, heads, kk, K, W, SHIFT, CARRIED)
        part = _fold(i, pair, tl.dot(left, x, input_precision="tf32x3"), W, OPERAND)
        part += load_rows(at, i < C + W - 1, kk, K).to(tl.float32)
        store_rows(at, part, i < C + W - 1, kk, K)


@triton.jit(do_not_specialize=NUMBERS)
def _collect(
    k, previous, tail_x, grad_energy, part_x, part_v, grad_k, grad_v, grad_previous, grad_tail_x, grad_tail_v,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr, SMOOTHNESS: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """Gradients of the write features, where their keys lie, and values of a chunk: the parts of all chunks whose
    windows hold them, and what the windows' energies ask for where these are no bounds. The first chunk has the tail's.

    REACH: rows of a tile, the pair r - (W - 1) in the row r, with all windows that hold one of the chunk's own.
    """
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    sequence, low, count, start = chunk_of(number, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, REACH)
    pair = row - (W - 1)
    own = (pair < C) & (start + pair < count)
    own = own & ((pair >= 0) | (start == 0)) if CARRIED else own & (pair >= 0)

    if SMOOTHNESS < 2:
        windowed = (row < C + W - 1) & (start + row < count)
        at = ((number + row // C) * heads + head) * TILE + row % C
        band = window_gradients(
            k, previous, tail_x, sequence, low, count, start, row, head, heads,
            tl.load(grad_energy + at, mask=windowed, other=0.0), K, BK, W, SHIFT, CARRIED, SMOOTHNESS,
        )  # fmt: skip
    into = x_rows(grad_k, grad_previous, grad_tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    there = exists(start + pair, own, SHIFT, CARRIED)
    for begin in range(0, K, BK):
        columns = begin + tl.arange(0, BK)
        total = tl.zeros([REACH, BK], tl.float32)
        if SMOOTHNESS < 2:
            x = window_rows(
                k, previous, tail_x, sequence, low, count, start, pair, head, heads, columns, K, W, SHIFT, CARRIED
            )
            total += band[0][:, None] * x
        if SMOOTHNESS == 1:
            for lag in tl.static_range(1, W):
                later = window_rows(
                    k, previous, tail_x, sequence, low, count, start, pair + lag, head, heads, columns, K, W, SHIFT,
                    CARRIED,
                )  # fmt: skip
                earlier = window_rows(
                    k, previous, tail_x, sequence, low, count, start, pair - lag, head, heads, columns, K, W, SHIFT,
                    CARRIED,
                )  # fmt: skip
                total += band[lag][:, None] * later + moved(band[lag], -lag, row)[:, None] * earlier
        total *= 2.0
        for after in tl.static_range((C + W - 2) // C + 1):
            inside = there & (row >= after * C) & (start + after * C < count)
            part = _rows_of(part_x, program + after * heads, row - after * C, C + W - 1, K)
            total += load_rows(part, inside, columns, K).to(tl.float32)
        store_rows(into, total, there, columns, K)
        if SHIFT:  # the last key is a write feature of the next call, through the state
            last = grad_k + ((low + count - 1) * heads + head) * K
            tl.store(last + columns, tl.zeros([BK], grad_k.dtype.element_ty), mask=(columns < K) & (start + C >= count))
    into = v_rows(grad_v, grad_tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        total = tl.zeros([REACH, BV], tl.float32)
        for after in tl.static_range((C + W - 2) // C + 1):
            inside = own & (row >= after * C) & (start + after * C < count)
            part = _rows_of(part_v, program + after * heads, row - after * C, C + W - 1, V)
            total += load_rows(part, inside, columns, V).to(tl.float32)
        store_rows(into, total, own, columns, V)


# Launches


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`."""
    *_, heads, key_dim = shape
    shapes = triton_schedule.shapes(layout, heads, window, triton_schedule.parts(dtype))
    numbers: list[Shape | None] = [(n, torch.float32) for n in shapes]
    return [*numbers, None, ((layout.chunks, heads, value_dim, key_dim), operand_dtype(dtype)), None]


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device,
        options: Options, before: bool, masked: bool, carried: bool, aligned: bool = False,
        sizes: launch.Window | None = None,
    ):  # fmt: skip
        *_, heads, key_dim = shape
        window, chunks = options.window, layout.chunks * heads
        rows, tile = ROWS.value, triton.next_power_of_2(layout.chunk + window - 1)
        self.operand = operand_dtype(dtype)
        self.states = (layout.chunks, heads, value_dim, key_dim)
        self.schedule = triton_schedule.Plan(
            layout, heads, key_dim, options, masked, carried, triton_schedule.parts(dtype), aligned
        )
        self.inverse = (chunks, rows, rows)
        self.solved = (chunks, rows, value_dim)
        self.lost, self.made = ((chunks, 2 * layout.chunk + window - 1, width) for width in (key_dim, value_dim))
        self.parts = tuple((chunks, layout.chunk + window - 1, width) for width in (key_dim, value_dim))
        self.energies = (chunks, tile)
        self.across = (layout.length, layout.longest, heads)
        self.numbers = (*self.across, chunks * tile)
        size = self.operand.itemsize
        key_tile, value_width = (launch.padded(d, size) for d in (key_dim, value_dim))
        sizes = sizes or launch.window(device, size, key_tile)

        base = {
            "K": key_dim, "V": value_dim, "C": layout.chunk, "TILE": tile, "W": window, "SHIFT": int(options.shifted),
            "CARRIED": carried, "PACKED": layout.packed, "OPERAND": OPERANDS[self.operand], "LAG": int(before),
            # float16 inputs are multiplied as tf32: as precise, without the overflow of what comes from the memory
            "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
            "MASKED": masked, "SMOOTHNESS": options.smoothness,
            "REACH": triton.next_power_of_2(layout.chunk + 2 * (window - 1)),
        } | options.constants()  # fmt: skip

        def launcher(kernel, programs, config, tiles, *flags):
            constants = {n: c for n, c in (base | tiles).items() if n in kernel.arg_names}
            return Launcher(kernel, (programs,), constants | config.options(), flags, aligned)

        def across(kernel, config, *flags):
            tiles = {"BK": min(key_tile, config.value_tile), "BV": min(value_width, config.value_tile)}
            return launcher(kernel, chunks, config, tiles, *flags)

        def along(kernel, config, *flags):
            if value_width < config.value_tile:
                config = config._replace(value_tile=value_width, warps=4)
            if size == 2:
                config = launch.narrower(device, config, layout.sequences * heads, value_dim, key_tile)
            programs = layout.sequences * heads * -(-value_dim // config.value_tile)
            return launcher(kernel, programs, config, {"BK": key_tile, "BV": config.value_tile}, *flags)

        self.local = across(_local, sizes.local, "AGAIN")
        self.carry = along(_carry, sizes.carry, "STORE", "FINAL")
        self.reverse = along(_reverse, sizes.reverse, "FINAL")
        self.adjoint = across(_adjoint, sizes.adjoint)
        self.gradients = across(_gradients, sizes.gradients)
        self.add_bound = across(_add_bound, sizes.add_bound) if options.smoothness == SMOOTHNESS["bound"] else None
        self.collect = across(_collect, sizes.collect)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, tables = call.q, call.k, call.v, call.tables
    previous, _, tail_x, tail_v, _ = call.before
    weight, log_decay, energy = triton_schedule.forward(plan.schedule, call)
    states = torch.empty(plan.states, dtype=plan.operand, device=q.device) if keep else None
    lost, made = (torch.empty(s, dtype=plan.operand, device=q.device) for s in (plan.lost, plan.made))
    plan.local(
        q, k, v, previous, tail_x, tail_v, weight, log_decay, lost, made, None, *tables, *plan.numbers, flags=(False,)
    )
    plan.carry(
        k, previous, tail_x, log_decay, call.memory, lost, made, output, states, final, *tables[:2], *plan.numbers,
        flags=(states is not None, final is not None),
    )  # fmt: skip
    return Kept(weight, log_decay, energy, states=states)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, v, tables = call.q, call.k, call.v, call.tables
    previous, previous_valid, tail_x, tail_v, tail_valid = call.before
    weight, log_decay, energy, _, states, _ = kept

    def empty(shape, dtype=plan.operand):
        return torch.empty(shape, dtype=dtype, device=q.device)

    lost, inverse, grad_states = empty(plan.lost), empty(plan.inverse, torch.float32), empty(plan.states)
    plan.local(
        q, k, v, previous, tail_x, tail_v, weight, log_decay, lost, None, inverse, *tables, *plan.numbers,
        flags=(True,),
    )  # fmt: skip
    plan.reverse(
        k, previous, tail_x, log_decay, lost, grad_output, grad_final, grad_states, into.memory, *tables[:2],
        *plan.numbers, flags=(grad_final is not None,),
    )  # fmt: skip
    del lost
    z, y, (part_x, part_v) = empty(plan.solved), empty(plan.solved), (empty(s) for s in plan.parts)
    plan.adjoint(
        q, k, v, previous, tail_x, tail_v, weight, log_decay, inverse, states, grad_output, grad_states, z, y, part_v,
        *tables, *plan.numbers,
    )  # fmt: skip
    del inverse
    grad_energy = empty(plan.energies, torch.float32)
    plan.gradients(
        q, k, v, call.gain, call.ridge, previous, previous_valid, tail_x, tail_v, tail_valid, call.lengths, weight,
        log_decay, energy, states, grad_output, grad_states, z, y, into.q, into.gain, into.ridge, grad_energy, part_x,
        *tables, *plan.numbers,
    )  # fmt: skip
    del z, y
    if plan.add_bound is not None:
        plan.add_bound(k, previous, tail_x, grad_energy, part_x, *tables, *plan.across)
    plan.collect(
        k, previous, tail_x, grad_energy, part_x, part_v, into.k, into.v, into.before.previous_key, into.before.tail_x,
        into.before.tail_v, *tables, *plan.across,
    )  # fmt: skip
