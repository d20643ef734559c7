"""Triton kernels of the regression write of a whole window (falcon_3, W > 1), forward and backward.

A step t writes W pairs at once, all with residuals of the memory that it found. A chunk of C = 33 - W tokens that finds
S there has windows of E = C + W - 1 = 32 different pairs, X and V, whatever W is. With u the running log decay within
the chunk, w the weights eta / W_t, and D_t the diagonal 0/1 matrix of the pairs in t's window,

    S_t = exp(u_t) S + X' M_t          o_t = exp(u_t) S' q_t + M_t' X q_t
    M_t = exp(u_t - u_{t-1}) M_{t-1} + w_t D_t (V - exp(u_{t-1}) X S - X X' M_{t-1}),

reading before the write with M_{t-1} and u_{t-1}. M_t = A_t V - B_t X S, and A_t and B_t, 32 x 32, depend on no other
chunk. So a chunk is a map of S with C + E rows, no more than 64,

    O = M_o - L_o S                    M_o = [q_t' X' A_t] V      L_o = [q_t' X' B_t] X - Diag(exp(u)) Q
    S' = exp(u_C) S + X' (M_d - L_d S)          M_d = A_C V               L_d = B_C X,

and L (`lost`) and M (`made`) are all that a pass over chunks needs: two products a chunk, as in the pass back: with G
the cotangent of S', that of S is exp(u_C) G - L' [dO; X G].

A few tokens are one block: its rows R are, token by token, the W pairs of the window and the query, so that reading is
the row of a pair that is not written. With f = 1 for queries and -1 for pairs, U what the row is told (exp(u) S' q, or
v - exp(u_{t-1}) S' x), J the 0/1 matrix of which pair of the chunk a row writes (none for queries), and M what the
block finds, from u_b on,

    N = f [t(s) < t(r)] exp(u_{t(r)-1} - u_s) R_r . R_s       (u_t and t(s) <= t(r) for queries; 0 for queries s)
    rho = (I - N Diag(w))^-1 (U + Diag(f exp(u_{t-1} - u_b)) R X' M)
    M <- exp(u_end - u_b) M + J' Diag(w exp(u_end - u)) rho:

rho are residuals of pairs and what queries read. At most three tokens are a block, so that N^4 = 0 and the inverse is
(I + N)(I + N^2), with no power above 3. States are kept with their rows as columns: what one product leaves is the left
operand of the next, in registers, or the right one once it is turned. Such products have fewer than 64 columns, and so
kernels with them have at most
two warps, which keeps them off the instructions that read past shared memory (launch.py).

Back, rows of a block are pairs alone, of four tokens: again N^4 = 0. With F = X S, which is what residuals are told of
the memory, starting from F of what the chunk finds, and H the cotangent of M, starting from X G,

    A = [t(s) < t(r)] exp(u_{t(r)-1} - u_s) R_r . R_s       B = [t(r) <= t] exp(u_t - u_r) q_t . R_r       (C rows)
    rho = (I + A Diag(w))^-1 (J V - Diag(exp(u_{t-1} - u_b)) J F)
    F <- exp(u_end - u_b) F + X R' Diag(w exp(u_end - u)) rho                    (`residuals`)
    Y = (I + A' Diag(w))^-1 (Diag(exp(u_end - u)) J H + B' dO)
    H <- exp(u_end - u_b) H - X R' Diag(w exp(u_{t-1} - u_b)) Y                  (`adjoint`, from the last block on).

Y is what a row's write is asked for. Both are kept by place j in the window and pair p, of the token t = p - j, the way
products take them, with m_p = u of the token p - W / 2, at most half a window away, and w_t at least 2^-50:

    y_j = w_t exp(u_{t-1} - m_p) Y_j          r_j = w_t exp(m_p - u_t) rho_j.

What is left (`gradients`) are products of such tiles: cotangents of Q X', dP, of X X' by pair, dF, and others,

    dP = sum_i [p' - i <= t] exp(u_t - m_p') dO r_i'       dQ = dP X + Diag(exp(u)) dO S'
    dF = -sum_{j,i} [p' - i < p - j] exp(m_p - m_p') y_j r_i'
    dX = dP' Q + (dF + dF') X + M_C G' - exp(m_p) sum_j y_j S'
    dV = sum_j exp(m_p - u_{p-j-1}) y_j       M_C = exp(u_C - m_p) sum_i r_i
    dw_t = exp(u_t - u_{t-1}) / w_t^2 times the sum of y * r over the rows of t.

All products of dF' are one sum, those of the largest j - i first: each next has a wider mask, p - p' > j - i. Of y and
r four places, in float32 two, are at hand at a time.

What the energies of windows ask for is 2 D X, D = sum_t c_t v_t v_t' over the chunk's own windows, of which c is the
gradient and v, by pair, the top eigenvector. A pair is in windows of two chunks at most. The chunk whose token it is
leaves its part where the gradient of the key or value lies, the next one that of the first W - 1 at its edge, and the
last kernel adds these up.

    forward    local       L, M                one program per (chunk, head)
               carry       O, S                one program per (sequence, head, V tile), over the chunks
    backward   reverse     G                   one program per (sequence, head, V tile), backwards over a part's chunks
               solutions   y and r             two programs per (chunk, head), for y backwards over its blocks
               gradients   all others          one program per (chunk, head)
               add_bound   to parts of dX      where the energies are bounds, one program per (chunk, head)
               collect     dX, dV              one program per (chunk, head), of the edges

G, as large as S, and y and r, W times as large as V, are held of a part of the chunks at a time, where there are enough
to fill the card with a part: the first three launches are made for each part, from the last to the first. A part has as
many chunks of every sequence, or where they are packed or short, chunks that follow each other.

Elements moved per token and head, with E / C of 32 / 29 and C = 29 for W = 4:
    local 2K + V + (1 + E/C)(K + V), carry K + V + (1 + E/C)(K + V) + KV/C
    reverse 2K + V + K E/C + KV/C, solutions 3K + 3V + 2WV + 2KV/C, gradients 4K + 2V + 2WV + 2KV/C
L and S are kept for the backward: (C + E) K / C and K V / C elements a token and head, for W = 4 and thus C = 29 less
than 2.2 K and K V / 29.

Elsewhere decays enter as exp(u_t - u_s), s <= t only. They are summed in two parts but for bfloat16 inputs as in
triton_regression.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_schedule
from .launcher import Launcher
from .rule import LARGEST_EXACT_WINDOW
from .triton_layout import (
    NUMBERS,
    OPERANDS,
    Layout,
    chunk_of,
    exists,
    load_rows,
    moved,
    of_part,
    operand_dtype,
    span,
    store_rows,
    token_rows,
    v_rows,
    x_rows,
)
from .triton_regression import (
    _exact,
    _gram,
    _left_wide,
    _load_state,
    _load_turned,
    _negative,
    _product,
    _right_wide,
    _turned,
)
from .triton_schedule import (
    Call,
    Gradients,
    Kept,
    Options,
    Shape,
    between,
    gain_and_ridge,
    pair_exists,
    step_gradients,
    u_after,
    u_around,
    u_at_end,
    window_size,
)
from .triton_smoothness import ROWS, SMOOTHNESS, bound_gradients, units, window_rows

HALF = tl.constexpr(32)
LARGEST_WINDOW = 16
LONGEST_BLOCK = 3  # tokens: their inverse has no power above this
LONGEST_SOLVE = 4  # the same of tokens whose queries are no rows
LEAST_WEIGHT = tl.constexpr(2.0**-50)
SLOTS_BYTES = 8  # of the operands of so many places in the window at hand at a time


def chunk_length(dtype: torch.dtype, key_dim: int, window: int) -> int:
    """C: windows of a chunk hold 32 pairs."""
    return HALF.value - (window - 1)


def block(window: int) -> tuple[int, int]:
    """Rows of a block's tile and tokens of a block; each has the rows of a window and a query."""
    rows = 16 if window < 16 else 32
    return rows, min(LONGEST_BLOCK, rows // (window + 1))


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
def _inverse(n, turned, M: tl.constexpr, OPERAND: tl.constexpr):
    """(I - n)^-1 of n and n', n of the rows of M tokens: n^(M + 1) = 0, of pairs alone n^M = 0."""
    i = tl.arange(0, n.shape[0])
    inverse = n + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    if M == 2:
        inverse = _exact(n, tl.trans(turned), inverse, OPERAND)
    elif M >= 3:
        square = _exact(turned, tl.trans(n), tl.zeros(n.shape, tl.float32), OPERAND)
        inverse = _exact(inverse, tl.trans(square), inverse, OPERAND)
    return inverse


@triton.jit
def _block(
    q, k, previous, tail_x, sequence, low, count, start, begin, head, heads,
    K: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, CARRIED: tl.constexpr, LAG: tl.constexpr,
):  # fmt: skip
    """The rows of the block that begins at a chunk's token `begin`: pointers to keys and queries, and which of them are
    there; their tokens, places in the window, and last tokens whose writes they find; which write and which read.

    Rows that are not there have zeros for keys and queries and write with a weight of 0. Their tokens are below TILE.
    """
    i = tl.arange(0, BLOCK)
    step, slot = i // (W + 1), i % (W + 1)
    live = step < tl.minimum(tl.minimum(count - start, C) - begin, M)
    reads, writes = live & (slot == W), live & (slot < W)
    token = tl.minimum(begin + step, TILE - 1)
    pair = token + slot - (W - 1)
    x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    at = tl.where(slot == W, token_rows(q, low + start, token, head, heads, K), x_at)
    last = token - 1
    if LAG == 0:
        last = tl.where(slot == W, token, last)
    return at, reads | exists(start + pair, writes, SHIFT, CARRIED), token, slot, last, writes, reads


@triton.jit
def _after(W: tl.constexpr, BLOCK: tl.constexpr, LAG: tl.constexpr, TURNED: tl.constexpr):
    """[BLOCK, BLOCK] which rows find what the columns write; TURNED which columns find what the rows write."""
    i = tl.arange(0, BLOCK)
    step, slot = i // (W + 1), i % (W + 1)
    source = tl.where(slot < W, step, BLOCK)
    last = step - 1
    if LAG == 0:
        last = tl.where(slot == W, step, last)
    if TURNED:
        return source[:, None] <= last[None, :]
    else:
        return source[None, :] <= last[:, None]


@triton.jit
def _chunk_pairs(
    k, previous, tail_x, sequence, low, count, start, head, heads,
    K: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Pointers to the write features of a chunk's pairs, the oldest first, and which there are."""
    pair = tl.arange(0, HALF) - (W - 1)
    at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    return at, exists(start + pair, start + pair < count, SHIFT, CARRIED)


@triton.jit
def _places(place, e, there, OPERAND: tl.constexpr):
    """[R, HALF] 0/1: where in a chunk each row is."""
    return tl.where(tl.where(there, place, -1)[:, None] == e[None, :], 1.0, 0.0).to(OPERAND)


@triton.jit(do_not_specialize=NUMBERS)
def _local(
    q, k, v, previous, tail_x, tail_v, weight, log_decay, lost, made,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """L and M."""
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    e = tl.arange(0, HALF)
    x_at, there = _chunk_pairs(k, previous, tail_x, sequence, low, count, start, head, heads, K, W, SHIFT, CARRIED)
    a = tl.zeros([HALF, HALF], tl.float32)
    b, read_a, read_b = a, a, a
    for begin in range(0, C, M):
        at, present, token, slot, last, writes, reads = _block(
            q, k, previous, tail_x, sequence, low, count, start, begin, head, heads, K, C, TILE, W, M, BLOCK, SHIFT,
            CARRIED, LAG,
        )  # fmt: skip
        gram = tl.zeros([HALF, BLOCK], tl.float32)
        own = tl.zeros([BLOCK, BLOCK], tl.float32)
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            rows = load_rows(at, present, kk, K).to(OPERAND)
            gram = _gram(load_rows(x_at, there, kk, K).to(OPERAND), rows, gram)
            own = _gram(rows, rows, own)
        eta = tl.load(weight + token, mask=writes, other=0.0)
        uc, uf = u_after(log_decay, places, token, OPERAND)
        tc, tf = u_after(log_decay, places, last, OPERAND)
        bc, bf, ec, ef = u_around(log_decay, places, begin, M, TILE, OPERAND)
        sign = tl.where(slot == W, 1.0, -1.0)
        after, found = _after(W, BLOCK, LAG, True), _after(W, BLOCK, LAG, False)
        n = own * between(tc[None, :], tf[None, :], uc[:, None], uf[:, None], after) * sign[None, :] * eta[:, None]
        m = own * between(tc[:, None], tf[:, None], uc[None, :], uf[None, :], found) * sign[:, None] * eta[None, :]
        scale = tl.where(slot == W, 1.0, eta * tl.exp2((ec - uc) + (ef - uf)))  # of what is written
        solved = _inverse(m, n, M, OPERAND) * scale[:, None]
        none = tl.zeros([BLOCK, HALF], tl.float32)
        of_state = _exact(solved, tl.trans(gram * (sign * tl.exp2((tc - bc) + (tf - bf)))[None, :]), none, OPERAND)
        fold, look = _places(token + slot, e, slot < W, OPERAND), _places(token, e, reads, OPERAND)
        told = _places(e, tl.where(slot < W, token + slot, -1), e >= 0, OPERAND)  # the same, turned
        none = tl.zeros([HALF, BLOCK], tl.float32)
        of_value = _right_wide(told, tl.trans(solved), none, OPERAND, "tf32x3")
        of_found = _right_wide(told, tl.trans(solved * tl.exp2(tc + tf)[None, :]), none, OPERAND, "tf32x3")
        rho_a = _exact(a, tl.trans(of_state), of_value, OPERAND)
        rho_b = _exact(b, tl.trans(of_state), of_found, OPERAND)
        read_a = _left_wide(rho_a, look, read_a, OPERAND, PRECISION)
        read_b = _left_wide(rho_b, look, read_b, OPERAND, PRECISION)
        keep = tl.exp2((ec - bc) + (ef - bf))
        a = _left_wide(rho_a, fold, a * keep, OPERAND, PRECISION)
        b = _left_wide(rho_b, fold, b * keep, OPERAND, PRECISION)

    here = (e < C) & (start + e < count)
    rc, rf = u_after(log_decay, places, e - LAG, OPERAND)
    q_at = token_rows(q, low + start, e, head, heads, K)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = _load_turned(x_at, kk, there, K).to(OPERAND)
        tile = -_load_turned(q_at, kk, here, K).to(tl.float32) * tl.exp2(rc + rf)[None, :]
        at, mask = _turned(_rows_of_map(lost, program, e, C, W, K), kk, e < C, K)
        tl.store(at, _right_wide(x, read_b, tile, OPERAND, PRECISION), mask=mask)
        at, mask = _turned(_rows_of_map(lost, program, HALF + e, C, W, K), kk, e >= 0, K)
        tl.store(at, _right_wide(x, b, tl.zeros([BK, HALF], tl.float32), OPERAND, PRECISION), mask=mask)
    pair = e - (W - 1)
    v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    valued = exists(start + pair, start + pair < count, 0, CARRIED)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        none = tl.zeros([BV, HALF], tl.float32)
        y = _load_turned(v_at, columns, valued, V).to(OPERAND)
        at, mask = _turned(_rows_of_map(made, program, e, C, W, V), columns, here, V)
        tl.store(at, _right_wide(y, read_a, none, OPERAND, PRECISION), mask=mask)
        at, mask = _turned(_rows_of_map(made, program, HALF + e, C, W, V), columns, e >= 0, V)
        tl.store(at, _right_wide(y, a, none, OPERAND, PRECISION), mask=mask)


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
    kk, i = tl.arange(0, BK), tl.arange(0, 2 * HALF)
    own, inside = _turned(program * K * V + kk * V, columns, kk < K, V)
    s = tl.load(memory + own, mask=inside, other=0.0) if CARRIED else tl.zeros([BV, BK], tl.float32)
    for start in range(0, count, C):
        chunk = (number + start // C) * heads + head
        if STORE:
            store_rows(states + chunk * (V * K) + columns * K, s, columns < V, kk, K)
        end_c, end_f = u_at_end(log_decay + chunk * TILE, places, C, OPERAND)
        here = (i < C) & (start + i < count)
        pair, paired = _pairs_of_half(i, start, count, C, W)
        x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x_at, exists(start + pair, paired, SHIFT, CARRIED), kk, K).to(OPERAND)
        minus = load_rows(_rows_of_map(lost, chunk, i, C, W, K), here | paired, kk, K)
        at, mask = _turned(_rows_of_map(made, chunk, i, C, W, V), columns, here | paired, V)
        change = -_negative(at, mask, 2 * HALF, OPERAND)
        change -= tl.dot(s.to(OPERAND), tl.trans(minus), input_precision=PRECISION)
        at, mask = _turned(token_rows(output, low + start, i, head, heads, V), columns, here, V)
        tl.store(at, change, mask=mask)
        s = tl.dot(change.to(OPERAND), x, s * tl.exp2(end_c + end_f), input_precision=PRECISION)
    if FINAL:
        tl.store(final + own, s, mask=inside)


# Backward


@triton.jit(do_not_specialize=NUMBERS)
def _reverse(
    k, previous, tail_x, log_decay, lost, grad_output, grad_final, found, left, grad_states, grad_memory,
    bounds, first, length, longest, heads, places, group_chunks, part_chunks, offset,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G' of one sequence and head, a tile of value channels, backwards over the chunks of a part.

    Stores it, grad_states [part, H, V, K]; `found` and `left`, [groups, H, K, V], are those of the parts beside.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tl.cdiv(V, BV)).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tl.cdiv(V, BV)
    sequence, head = program // heads, program % heads
    low, count = span(sequence, bounds, length, PACKED)
    number = tl.load(first + sequence) if PACKED else sequence * longest
    kk, i = tl.arange(0, BK), tl.arange(0, 2 * HALF)
    own, inside = _turned(program * K * V + kk * V, columns, kk < K, V)
    chunks = tl.cdiv(count, C)
    group = number // group_chunks
    begin = (offset - (number - group * group_chunks)).to(tl.int32)  # counted from the sequence's first chunk
    local = group * part_chunks - begin
    end = tl.maximum(tl.minimum(begin + part_chunks, chunks), 0)
    begin = tl.maximum(begin, 0)
    if (end <= begin) & (chunks > 0):
        return
    between, _ = _turned((group * heads + head) * K * V + kk * V, columns, kk < K, V)
    g = tl.load(found + between, mask=inside & (end < chunks), other=0.0)
    if FINAL:
        g += tl.load(grad_final + own, mask=inside & (end == chunks), other=0.0)
    for back in range(0, end - begin):
        place = end - 1 - back
        start = place * C
        chunk = (number + place) * heads + head
        store_rows(grad_states + ((local + place) * heads + head) * (V * K) + columns * K, g, columns < V, kk, K)
        end_c, end_f = u_at_end(log_decay + chunk * TILE, places, C, OPERAND)
        here = (i < C) & (start + i < count)
        pair, paired = _pairs_of_half(i, start, count, C, W)
        x_at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
        x = load_rows(x_at, exists(start + pair, paired, SHIFT, CARRIED), kk, K).to(OPERAND)
        minus = load_rows(_rows_of_map(lost, chunk, i, C, W, K), here | paired, kk, K)
        at, mask = _turned(token_rows(grad_output, low + start, i, head, heads, V), columns, here, V)
        given = _negative(at, mask, 2 * HALF, OPERAND)
        given -= tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        g = tl.dot(given.to(OPERAND), minus, g * tl.exp2(end_c + end_f), input_precision=PRECISION)
    tl.store(left + between, g, mask=inside & (begin > 0))
    if CARRIED:
        tl.store(grad_memory + own, g, mask=inside & (begin == 0))


@triton.jit
def _pair_rows(
    k, previous, tail_x, sequence, low, count, start, begin, head, heads,
    K: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """The pairs that the M tokens from a chunk's `begin` on write: pointers to their keys, and which are there; their
    tokens, places in the window, and which there would be without a start of the sequence."""
    i = tl.arange(0, BLOCK)
    step, slot = i // W, i % W
    live = step < tl.minimum(tl.minimum(count - start, C) - begin, M)
    token = tl.minimum(begin + step, TILE - 1)
    pair = token + slot - (W - 1)
    at = x_rows(k, previous, tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    return at, exists(start + pair, live, SHIFT, CARRIED), token, slot, live


@triton.jit
def _earlier(W: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """[BLOCK, BLOCK] which columns are of earlier tokens than the row; TURNED which rows than the column."""
    step = tl.arange(0, BLOCK) // W
    if TURNED:
        return step[:, None] < step[None, :]
    else:
        return step[None, :] < step[:, None]


@triton.jit
def _slot_rows(base, program, slot, token, C: tl.constexpr, SPACE: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to what is kept of the pairs at a place of the windows of tokens."""
    return _rows_of(base, program, slot * C + token, SPACE, WIDTH)


@triton.jit
def _middle(log_decay, places, pair, C: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr):
    """u around which decays are taken apart for the chunk's pairs, the oldest of which is 0."""
    return u_after(log_decay, places, tl.minimum(pair - W // 2, C - 1), OPERAND)


@triton.jit
def _not_zero(w):
    """w, or what is nothing beside other weights but can be divided by."""
    return tl.where(tl.abs(w) < LEAST_WEIGHT, LEAST_WEIGHT, w)


@triton.jit
def _writers(e, slot, start, count, C: tl.constexpr):
    """The tokens that write the chunk's pairs from one place of their windows, and which there are."""
    token = e - slot
    return token, (token >= 0) & (token < C) & (start + token < count)


@triton.jit
def _adjoint(
    q, k, v, previous, tail_x, tail_v, weight, log_decay, grad_output, grad_states, y, sums, number,
    sequence, low, count, start, head, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, SPACE: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y, by place in the window and token, [chunks, H, SPACE, V], and sums of Y * V, [chunks, H, W, TILE]."""
    grad_states += number * V * K
    e = tl.arange(0, HALF)
    x_at, there = _chunk_pairs(k, previous, tail_x, sequence, low, count, start, head, heads, K, W, SHIFT, CARRIED)
    here = (e < C) & (start + e < count)
    q_at = token_rows(q, low + start, e, head, heads, K)
    rc, rf = u_after(log_decay, places, e - LAG, OPERAND)
    if K <= BK:
        x = load_rows(x_at, there, tl.arange(0, BK), K).to(OPERAND)
        query = load_rows(q_at, here, tl.arange(0, BK), K).to(OPERAND)
    for tile in range(0, (V + BV - 1) // BV):
        columns = tile * BV + tl.arange(0, BV)
        given = _load_turned(token_rows(grad_output, low + start, e, head, heads, V), columns, here, V).to(OPERAND)
        h = tl.zeros([BV, HALF], tl.float32)
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            if K > BK:
                x = load_rows(x_at, there, kk, K).to(OPERAND)
            h = tl.dot(_load_state(grad_states, columns, kk, V, K), tl.trans(x), h, input_precision=PRECISION)
        for back in range(0, (C + PAIRED - 1) // PAIRED):
            begin = ((C + PAIRED - 1) // PAIRED - 1 - back) * PAIRED
            at, present, token, slot, live = _pair_rows(
                k, previous, tail_x, sequence, low, count, start, begin, head, heads, K, C, TILE, W, PAIRED, ROWS,
                SHIFT, CARRIED,
            )  # fmt: skip
            gram = tl.zeros([HALF, ROWS], tl.float32)
            own = tl.zeros([ROWS, ROWS], tl.float32)
            read = tl.zeros([HALF, ROWS], tl.float32)
            for beginning in range(0, K, BK):
                kk = beginning + tl.arange(0, BK)
                rows = load_rows(at, present, kk, K).to(OPERAND)
                if K > BK:
                    x = load_rows(x_at, there, kk, K).to(OPERAND)
                    query = load_rows(q_at, here, kk, K).to(OPERAND)
                gram, own, read = _gram(x, rows, gram), _gram(rows, rows, own), _gram(query, rows, read)
            eta = tl.load(weight + token, mask=live, other=0.0)
            uc, uf = u_after(log_decay, places, token, OPERAND)
            tc, tf = u_after(log_decay, places, token - 1, OPERAND)
            bc, bf, ec, ef = u_around(log_decay, places, begin, PAIRED, TILE, OPERAND)
            before = between(tc[:, None], tf[:, None], uc[None, :], uf[None, :], _earlier(W, ROWS, False))
            after = between(tc[None, :], tf[None, :], uc[:, None], uf[:, None], _earlier(W, ROWS, True))
            solved = _inverse(own * after * -eta[None, :], own * before * -eta[:, None], PAIRED, OPERAND)
            read *= between(rc[:, None], rf[:, None], uc[None, :], uf[None, :], e[:, None] - LAG >= token[None, :])
            none = tl.zeros([ROWS, HALF], tl.float32)
            of_given = _exact(solved, tl.trans(read), none, OPERAND)
            solved *= tl.exp2((ec - uc) + (ef - uf))[None, :]
            of_h = _left_wide(solved, _places(token + slot, e, live, OPERAND), none, OPERAND, "tf32x3")
            gram *= (-eta * tl.exp2((tc - bc) + (tf - bf)))[None, :]
            solution = _right_wide(given, tl.trans(of_given), tl.zeros([BV, ROWS], tl.float32), OPERAND, "tf32x3")
            solution = _exact(h, tl.trans(of_h), solution, OPERAND)
            mc, mf = _middle(log_decay, places, token + slot, C, W, OPERAND)
            scaled = solution * (_not_zero(eta) * tl.exp2((tc - mc) + (tf - mf)))[None, :]
            into, mask = _turned(_slot_rows(y, number, slot, token, C, SPACE, V), columns, live, V)
            tl.store(into, scaled, mask=mask)
            pair = token + slot - (W - 1)
            v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
            value = _load_turned(v_at, columns, exists(start + pair, live, 0, CARRIED), V).to(tl.float32)
            products = tl.sum(solution * value, 0)
            into = sums + (number * W + slot) * TILE + token
            tl.store(into, products + tl.load(into, mask=live & (tile > 0), other=0.0), mask=live)
            h = _exact(solution, tl.trans(gram), h * tl.exp2((ec - bc) + (ef - bf)), OPERAND)


@triton.jit
def _residuals(
    k, v, previous, tail_x, tail_v, weight, log_decay, states, rho, number, program, sequence, low, count, start, head,
    heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, SPACE: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """r, [chunks, H, SPACE, V] as y."""
    states += program * V * K
    e = tl.arange(0, HALF)
    x_at, there = _chunk_pairs(k, previous, tail_x, sequence, low, count, start, head, heads, K, W, SHIFT, CARRIED)
    pair = e - (W - 1)
    v_at = v_rows(v, tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
    valued = exists(start + pair, start + pair < count, 0, CARRIED)
    if K <= BK:
        x = load_rows(x_at, there, tl.arange(0, BK), K).to(OPERAND)
    for tile in range(0, (V + BV - 1) // BV):
        columns = tile * BV + tl.arange(0, BV)
        value = _load_turned(v_at, columns, valued, V).to(OPERAND)
        found = tl.zeros([BV, HALF], tl.float32)
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            if K > BK:
                x = load_rows(x_at, there, kk, K).to(OPERAND)
            found = tl.dot(_load_state(states, columns, kk, V, K), tl.trans(x), found, input_precision=PRECISION)
        for begin in range(0, C, PAIRED):
            at, present, token, slot, live = _pair_rows(
                k, previous, tail_x, sequence, low, count, start, begin, head, heads, K, C, TILE, W, PAIRED, ROWS,
                SHIFT, CARRIED,
            )  # fmt: skip
            gram = tl.zeros([HALF, ROWS], tl.float32)
            own = tl.zeros([ROWS, ROWS], tl.float32)
            for beginning in range(0, K, BK):
                kk = beginning + tl.arange(0, BK)
                rows = load_rows(at, present, kk, K).to(OPERAND)
                if K > BK:
                    x = load_rows(x_at, there, kk, K).to(OPERAND)
                gram, own = _gram(x, rows, gram), _gram(rows, rows, own)
            w = tl.load(weight + token, mask=live, other=0.0)
            uc, uf = u_after(log_decay, places, token, OPERAND)
            tc, tf = u_after(log_decay, places, token - 1, OPERAND)
            bc, bf, ec, ef = u_around(log_decay, places, begin, PAIRED, TILE, OPERAND)
            before = between(tc[:, None], tf[:, None], uc[None, :], uf[None, :], _earlier(W, ROWS, False))
            after = between(tc[None, :], tf[None, :], uc[:, None], uf[:, None], _earlier(W, ROWS, True))
            solved = _inverse(own * before * -w[None, :], own * after * -w[:, None], PAIRED, OPERAND)
            none = tl.zeros([ROWS, HALF], tl.float32)
            fold = _places(token + slot, e, live, OPERAND)
            of_value = _left_wide(solved, fold, none, OPERAND, "tf32x3")
            of_found = _left_wide(solved * -tl.exp2((tc - bc) + (tf - bf))[None, :], fold, none, OPERAND, "tf32x3")
            gram *= (w * tl.exp2((ec - uc) + (ef - uf)))[None, :]
            residual = _right_wide(value, tl.trans(of_value), tl.zeros([BV, ROWS], tl.float32), OPERAND, "tf32x3")
            residual = _exact(found, tl.trans(of_found), residual, OPERAND)
            mc, mf = _middle(log_decay, places, token + slot, C, W, OPERAND)
            scaled = residual * (_not_zero(w) * tl.exp2((mc - uc) + (mf - uf)))[None, :]
            into, mask = _turned(_slot_rows(rho, number, slot, token, C, SPACE, V), columns, live, V)
            tl.store(into, scaled, mask=mask)
            found = _exact(residual, tl.trans(gram), found * tl.exp2((ec - bc) + (ef - bf)), OPERAND)


@triton.jit(do_not_specialize=NUMBERS)
def _solutions(
    q, k, v, previous, tail_x, tail_v, weight, log_decay, states, grad_output, grad_states, y, rho, sums,
    bounds, first, owner, length, longest, heads, places, group_chunks, part_chunks, offset,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, SPACE: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y of a part's chunk and head, or, by the second half of the programs, rho: the longer first."""
    half = tl.num_programs(0) // 2
    number = (tl.program_id(0) % half).to(tl.int64)
    program, inside = of_part(number, heads, group_chunks, part_chunks, offset)
    if not inside:
        return
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    if tl.program_id(0) < half:
        _adjoint(
            q, k, v, previous, tail_x, tail_v, weight, log_decay, grad_output, grad_states, y, sums, number,
            sequence, low, count, start, head, heads, places, K, V, BK, BV, C, TILE, W, PAIRED, ROWS, SPACE, SHIFT,
            CARRIED, LAG, OPERAND, PRECISION,
        )  # fmt: skip
    else:
        _residuals(
            k, v, previous, tail_x, tail_v, weight, log_decay, states, rho, number, program, sequence, low, count,
            start, head, heads, places, K, V, BK, BV, C, TILE, W, PAIRED, ROWS, SPACE, SHIFT, CARRIED, OPERAND,
            PRECISION,
        )  # fmt: skip


@triton.jit
def _or_edge(rows, edge, program, start, e, W: tl.constexpr, WIDTH: tl.constexpr):
    """`rows`, or for pairs of the chunk before pointers to what is left for `_collect` to add to them."""
    return tl.where((start > 0) & (e < W - 1), _rows_of(edge, program, e, W - 1, WIDTH), rows)


@triton.jit
def _part_rows(
    grad_k, grad_previous, grad_tail_x, edge_x, program, sequence, low, start, head, heads, e,
    K: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Pointers to a chunk's parts of dX: where the keys lie, or the edge."""
    pair = e - (W - 1)
    rows = x_rows(grad_k, grad_previous, grad_tail_x, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    return _or_edge(rows, edge_x, program, start, e, W, K)


@triton.jit
def _of_energies(unit, e, given, SMOOTHNESS: tl.constexpr, OPERAND: tl.constexpr):
    """[HALF, HALF] by pair D, where windows with the gradients `given` [HALF] of the eigenvalues, or traces, of their
    sums ask for 2 D X."""
    if SMOOTHNESS == 0:
        return tl.where(e[:, None] == e[None, :], tl.sum(unit * given[:, None], 0)[None, :], 0.0)
    else:
        return _exact(tl.trans(unit * given[:, None]), unit, tl.zeros(unit.shape, tl.float32), OPERAND)


@triton.jit
def _tiles(
    base, number, first, start, count, columns,
    C: tl.constexpr, SPACE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """[HALF, columns] by pair of what is kept at each of SLOTS places of the windows, from the `first` on."""
    tiles = ()
    for slot in tl.static_range(SLOTS):
        token, writes = _writers(tl.arange(0, HALF), first + slot, start, count, C)
        at = _slot_rows(base, number, first + slot, token, C, SPACE, WIDTH)
        tiles += (load_rows(at, writes & (first + slot < W), columns, WIDTH),)
    return tiles


@triton.jit(do_not_specialize=NUMBERS)
def _gradients(
    q, k, gain, ridge, previous, previous_valid, tail_x, tail_valid, lengths, weight, log_decay, energy, states,
    top, grad_output, grad_states, y, rho, sums, grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_energy,
    grad_previous, grad_tail_x, grad_tail_v, edge_x, edge_v,
    bounds, first, owner, length, longest, heads, places, group_chunks, part_chunks, offset,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
    W: tl.constexpr, SLOTS: tl.constexpr, SPACE: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr,
    DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr, SMOOTHNESS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one head: of q, gain and ridge, and the chunk's parts of dX, where their keys lie, and
    of dV. Those of the W - 1 pairs of the chunk before go to edges [chunks, H, W - 1, .]. Where energies are bounds,
    the gradients of windows' sums, [chunks, H, TILE], are left for `_add_bound`.

    With several tiles of values, -exp(m_p) sum_j y_j is left in rows of y, and M_C in those of r.
    """
    number = tl.program_id(0).to(tl.int64)
    program, inside = of_part(number, heads, group_chunks, part_chunks, offset)
    if not inside:
        return
    weight, log_decay = weight + program * TILE, log_decay + program * TILE
    states, grad_states = states + program * V * K, grad_states + number * V * K
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    e = tl.arange(0, HALF)
    here = (e < C) & (start + e < count)
    given_at = token_rows(grad_output, low + start, e, head, heads, V)
    end_c, end_f = u_at_end(log_decay, places, C, OPERAND)
    mc, mf = _middle(log_decay, places, e, C, W, OPERAND)
    dp = tl.zeros([HALF, HALF], tl.float32)
    df = tl.zeros([HALF, HALF], tl.float32)
    of_values = tl.zeros([HALF], tl.float32)
    of_weight = tl.zeros([HALF], tl.float32)
    ahead = e[None, :] - e[:, None]
    made = tl.zeros([HALF, BV], OPERAND)
    lost = tl.zeros([HALF, BV], OPERAND)
    for tile in range(0, (V + BV - 1) // BV):
        columns = tile * BV + tl.arange(0, BV)
        given = load_rows(given_at, here, columns, V).to(OPERAND)
        for i in range(0, W, SLOTS):
            residuals = _tiles(rho, number, i, start, count, columns, C, SPACE, V, W, SLOTS)
            read = tl.zeros([HALF, HALF], tl.float32)
            for slot in tl.static_range(SLOTS):
                read = tl.dot(residuals[slot], tl.trans(given), read, input_precision=PRECISION)
                read = tl.where(ahead >= LAG - i - slot, read, 0.0)
            dp += read
            for j in tl.range(0, W, SLOTS, num_stages=3):  # nothing in it is written here
                solutions = _tiles(y, number, j, start, count, columns, C, SPACE, V, W, SLOTS)
                coupled = tl.zeros([HALF, HALF], tl.float32)
                for by in tl.static_range(1 - SLOTS, SLOTS):
                    for slot in tl.static_range(max(-by, 0), min(SLOTS - by, SLOTS)):
                        residual, solution = residuals[slot + by], solutions[slot]
                        coupled = tl.dot(residual, tl.trans(solution), coupled, input_precision=PRECISION)
                    coupled = tl.where(ahead > j - i - by, coupled, 0.0)
                df -= coupled
        of_end = tl.zeros([HALF, BV], tl.float32)
        of_value = tl.zeros([HALF, BV], tl.float32)
        of_found = tl.zeros([HALF, BV], tl.float32)
        for slot in tl.range(W, loop_unroll_factor=2):
            token, writes = _writers(e, slot, start, count, C)
            solution = load_rows(_slot_rows(y, number, slot, token, C, SPACE, V), writes, columns, V).to(tl.float32)
            residual = load_rows(_slot_rows(rho, number, slot, token, C, SPACE, V), writes, columns, V).to(tl.float32)
            tc, tf = u_after(log_decay, places, token - 1, OPERAND)
            of_weight += moved(tl.sum(solution * residual, 1), slot, e)
            of_end += residual
            of_value += solution * tl.exp2(tl.where(writes, (mc - tc) + (mf - tf), 0.0))[:, None]
            of_found -= solution
        pair = e - (W - 1)
        v_into = v_rows(grad_v, grad_tail_v, sequence, low, start, pair, head, heads, V, W, CARRIED)
        v_into = _or_edge(v_into, edge_v, program, start, e, W, V)
        store_rows(v_into, of_value, exists(start + pair, start + pair < count, 0, CARRIED), columns, V)
        made = (of_end * tl.exp2((end_c - mc) + (end_f - mf))[:, None]).to(OPERAND)
        lost = (of_found * tl.exp2(mc + mf)[:, None]).to(OPERAND)
        if V > BV:
            tl.debug_barrier()
            store_rows(_rows_of(y, number, e, SPACE, V), lost, e >= 0, columns, V)
            store_rows(_rows_of(rho, number, e, SPACE, V), made, e >= 0, columns, V)
    if V > BV:
        tl.debug_barrier()

    # All that is loaded from here on, but for tiles of K and V, is asked for at once.
    for slot in tl.static_range(W):
        of_values += tl.load(sums + (number * W + slot) * TILE + e, mask=here, other=0.0)
    real = count
    if MASKED:
        real = tl.load(lengths + sequence).to(tl.int32)
    place = start + e
    row = (low + place) * heads + head
    active = pair_exists(place, real, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED) & here
    size = window_size(place, real, previous_valid, tail_valid, sequence, W, SHIFT, CARRIED)
    beta, coefficient = gain_and_ridge(gain, ridge, row, active, RIDGE)
    statistic = tl.load(energy + program * TILE + e)
    eta = tl.load(weight + e, mask=here, other=0.0)
    if SMOOTHNESS == 1:
        unit = units(top + program * TILE, places, e, here, W)
    else:
        unit = tl.where((e[None, :] >= e[:, None]) & (e[None, :] < e[:, None] + W), 1.0, 0.0)
    rc, rf = u_after(log_decay, places, e - LAG, OPERAND)
    tc, tf = u_after(log_decay, places, e - 1, OPERAND)
    uc, uf = u_after(log_decay, places, e, OPERAND)
    of_weight *= tl.exp2((uc - tc) + (uf - tf)) / (_not_zero(eta) * _not_zero(eta))
    df *= between(mc[None, :], mf[None, :], mc[:, None], mf[:, None], ahead > -W)
    dp *= between(rc[None, :], rf[None, :], mc[:, None], mf[:, None], ahead > LAG - W)
    at_end = tl.exp2(end_c + end_f)
    x_at, there = _chunk_pairs(k, previous, tail_x, sequence, low, count, start, head, heads, K, W, SHIFT, CARRIED)
    q_at = token_rows(q, low + start, e, head, heads, K)
    of_read = dp.to(OPERAND)
    into = _part_rows(
        grad_k, grad_previous, grad_tail_x, edge_x, program, sequence, low, start, head, heads, e, K, W, SHIFT, CARRIED
    )
    kept = 0.0
    read = tl.zeros([HALF], tl.float32)
    alike = tl.zeros([HALF, HALF], tl.float32)
    dx = tl.zeros([HALF, BK], tl.float32)
    x = tl.zeros([HALF, BK], OPERAND)
    for beginning in range(0, K, BK):
        kk = beginning + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        query = load_rows(q_at, here, kk, K).to(OPERAND)
        dq = tl.zeros([HALF, BK], tl.float32)
        dx = tl.zeros([HALF, BK], tl.float32)
        left = tl.zeros([HALF, BK], tl.float32)
        for tile in range(0, (V + BV - 1) // BV):
            columns = tile * BV + tl.arange(0, BV)
            s = _load_state(states, columns, kk, V, K)
            g = _load_state(grad_states, columns, kk, V, K)
            given = load_rows(given_at, here, columns, V).to(OPERAND)
            kept += _product(s, g) * at_end
            dq = tl.dot(given, s, dq, input_precision=PRECISION)
            if V > BV:
                made = load_rows(_rows_of(rho, number, e, SPACE, V), e >= 0, columns, V)
                lost = load_rows(_rows_of(y, number, e, SPACE, V), e >= 0, columns, V)
            left = tl.dot(made, g, left, input_precision=PRECISION)
            dx = tl.dot(lost, s, dx, input_precision=PRECISION)
        kept += _product(x, left)
        dq *= tl.exp2(rc + rf)[:, None]
        read += tl.sum(dq * query.to(tl.float32), 1)
        alike = _gram(x, query, alike)
        dq = tl.dot(tl.trans(of_read), x, dq, input_precision=PRECISION)
        store_rows(token_rows(grad_q, low + start, e, head, heads, K), dq, here, kk, K)
        dx = tl.dot(of_read, query, dx + left, input_precision=PRECISION)
        if K > BK:  # until what the energies ask for is known
            store_rows(into, dx, there, kk, K)
    read += tl.sum(dp * alike, 0)

    # Cotangents: of u_C `kept`, of u_t -w dw, of u_{t-1} `owed`, `read` of the one that is read. In owed - w dw, of
    # which sums run over tokens, only the values are left.
    owed = eta * (of_weight - of_values)
    grad_decay = tl.cumsum(read - eta * of_values, 0, reverse=True) - owed - read * LAG + kept

    of_gain, of_ridge, of_energy = step_gradients(
        beta, coefficient, statistic, of_weight / size, grad_decay, active, RIDGE, DIRECT, True, DETACH, EPSILON, FLOOR
    )
    tl.store(grad_gain + row, of_gain, mask=here)
    if RIDGE > 0:
        tl.store(grad_ridge + row, of_ridge, mask=here)
    of_written = df + tl.trans(df)
    if SMOOTHNESS == 2:
        tl.store(grad_energy + program * TILE + e, of_energy / size, mask=here)
    else:
        given = tl.where(here, of_energy / size, 0.0)
        of_written += 2.0 * _of_energies(unit, e, given, SMOOTHNESS, OPERAND)
    of_written = of_written.to(OPERAND)
    if K > BK:
        tl.debug_barrier()
    for beginning in range(0, K, BK):
        kk = beginning + tl.arange(0, BK)
        if K > BK:
            dx = load_rows(into, there, kk, K).to(tl.float32)
            x = load_rows(x_at, there, kk, K).to(OPERAND)
        store_rows(into, tl.dot(of_written, x, dx, input_precision=PRECISION), there, kk, K)
        if SHIFT:  # the last key is a write feature of the next call, through the state
            last = grad_k + ((low + count - 1) * heads + head) * K
            tl.store(last + kk, tl.zeros([BK], grad_k.dtype.element_ty), mask=(kk < K) & (start + C >= count))


@triton.jit(do_not_specialize=NUMBERS)
def _add_bound(
    k, previous, tail_x, grad_energy, grad_k, grad_previous, grad_tail_x, edge_x,
    bounds, first, owner, length, longest, heads,
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
    at = _part_rows(
        grad_k, grad_previous, grad_tail_x, edge_x, program, sequence, low, start, head, heads, i, K, W, SHIFT, CARRIED
    )
    place = start + i - (W - 1)
    there = exists(place, (i < HALF) & (place < count), SHIFT, CARRIED)
    for begin in range(0, C, ROWS // W):
        step = begin + i // W
        pair = step + i % W - (W - 1)
        fold = tl.where(i[:, None] == pair[None, :] + (W - 1), 1.0, 0.0).to(OPERAND)
        own = (i // W < ROWS // W) & (step < C) & (start + step < count)
        given = tl.load(grad_energy + program * TILE + step, mask=own, other=0.0)
        left = bound_gradients(
            k, previous, tail_x, sequence, low, count, start + begin, i, head, heads, given, K, BK, W, SHIFT, CARRIED
        )
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            x = window_rows(
                k, previous, tail_x, sequence, low, count, start, pair, head, heads, kk, K, W, SHIFT, CARRIED
            )
            part = tl.dot(left, x, input_precision="tf32x3")
            part = _right_wide(fold, part, tl.zeros(part.shape, tl.float32), OPERAND, "tf32x3")
            part += load_rows(at, there, kk, K).to(tl.float32)
            tl.debug_barrier()
            store_rows(at, part, there, kk, K)
        tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def _collect(
    grad_k, grad_v, edge_x, edge_v, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    REACH: tl.constexpr, SHIFT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds to dX and dV of the last W - 1 pairs before a chunk the chunk's parts of them: a pair is in the windows of
    two chunks at most, W - 1 being less than C.

    REACH: rows of a tile.
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    _, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if (start == 0) | (start >= count):
        return
    e = tl.arange(0, REACH)
    pair = e - (W - 1)
    there = e < W - 1
    into = token_rows(grad_k, low + start - SHIFT, pair, head, heads, K)
    for begin in range(0, K, BK):
        columns = begin + tl.arange(0, BK)
        total = load_rows(into, there, columns, K).to(tl.float32)
        total += load_rows(_rows_of(edge_x, program, e, W - 1, K), there, columns, K).to(tl.float32)
        store_rows(into, total, there, columns, K)
    into = token_rows(grad_v, low + start, pair, head, heads, V)
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        total = load_rows(into, there, columns, V).to(tl.float32)
        total += load_rows(_rows_of(edge_v, program, e, W - 1, V), there, columns, V).to(tl.float32)
        store_rows(into, total, there, columns, V)


# Launches


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`."""
    *_, heads, key_dim = shape
    shapes = triton_schedule.shapes(layout, heads, window, triton_schedule.parts(dtype))
    numbers: list[Shape | None] = [(n, torch.float32) for n in shapes]
    wide = operand_dtype(dtype)
    lost = (layout.chunks, heads, layout.chunk + HALF.value, key_dim)
    top = ((window, *shapes[2]), torch.float32) if window <= LARGEST_EXACT_WINDOW else None
    return [*numbers, top, ((layout.chunks, heads, value_dim, key_dim), wide), (lost, wide)]


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device,
        options: Options, before: bool, masked: bool, carried: bool, aligned: bool = False,
        sizes: launch.Window | None = None,
    ):  # fmt: skip
        *_, heads, key_dim = shape
        window, chunks = options.window, layout.chunks * heads
        pairs = HALF.value
        rows, tokens = block(window)
        self.operand = operand_dtype(dtype)
        self.states = (layout.chunks, heads, value_dim, key_dim)
        self.schedule = triton_schedule.Plan(
            layout, heads, key_dim, options, masked, carried, triton_schedule.parts(dtype), aligned
        )
        space = max(layout.chunk * window, 2 * pairs)
        parts = launch.parts(device, chunks)
        groups = layout.sequences if not layout.packed and layout.longest >= parts else 1
        group_chunks = max(1, layout.chunks // groups)
        part_chunks = -(-group_chunks // parts)
        part = groups * part_chunks * heads
        self.parts = [(group_chunks, part_chunks, o) for o in range(0, group_chunks, part_chunks)][::-1]
        self.grad_states = (part, value_dim, key_dim)
        self.between = (groups * (len(self.parts) > 1), heads, key_dim, value_dim)
        self.solved = (part, space, value_dim)
        self.lost, self.made = ((layout.chunks, heads, layout.chunk + pairs, width) for width in (key_dim, value_dim))
        self.edge_x, self.edge_v = ((chunks, window - 1, width) for width in (key_dim, value_dim))
        self.by_token = (chunks, pairs)
        self.by_place = (part, window, pairs)
        self.exact = options.smoothness == SMOOTHNESS["exact"]
        self.top = (window, *self.schedule.shapes[2]) if window <= LARGEST_EXACT_WINDOW else None
        self.across = (layout.length, layout.longest, heads)
        self.numbers = (*self.across, chunks * pairs)
        size = self.operand.itemsize
        key_tile, value_width = (launch.padded(d, size) for d in (key_dim, value_dim))
        sizes = sizes or launch.window(device, size, key_tile)

        base = {
            "K": key_dim, "V": value_dim, "C": layout.chunk, "TILE": pairs, "W": window, "M": tokens, "BLOCK": rows,
            "PAIRED": min(LONGEST_SOLVE, 16 // window), "ROWS": 16, "SPACE": space,
            "SLOTS": min(SLOTS_BYTES // size, triton.next_power_of_2(window)), "SHIFT": int(options.shifted),
            "CARRIED": carried, "PACKED": layout.packed, "OPERAND": OPERANDS[self.operand], "LAG": int(before),
            "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",  # as in triton_regression.py
            "MASKED": masked, "SMOOTHNESS": options.smoothness,
            "REACH": triton.next_power_of_2(window - 1),
        } | options.constants()  # fmt: skip

        def launcher(kernel, programs, config, tiles, *flags):
            constants = {n: c for n, c in (base | tiles).items() if n in kernel.arg_names}
            return Launcher(kernel, (programs,), constants | config.options(), flags, aligned)

        def across(kernel, config, programs=chunks):
            key_width = min(key_tile, config.value_tile, config.key_tile)
            tiles = {"BK": key_width, "BV": min(value_width, config.value_tile)}
            return launcher(kernel, programs, config, tiles)

        def along(kernel, config, *flags):
            if value_width < config.value_tile:
                config = config._replace(value_tile=value_width, warps=4)
            if size == 2:
                config = launch.narrower(device, config, layout.sequences * heads, value_dim, key_tile)
            programs = layout.sequences * heads * -(-value_dim // config.value_tile)
            return launcher(kernel, programs, config, {"BK": key_tile, "BV": config.value_tile}, *flags)

        self.local = across(_local, sizes.local)
        self.carry = along(_carry, sizes.carry, "STORE", "FINAL")
        self.reverse = along(_reverse, sizes.reverse, "FINAL")
        self.solutions = across(_solutions, sizes.solutions, 2 * part)
        self.gradients = across(_gradients, sizes.gradients, part)
        self.add_bound = across(_add_bound, sizes.add_bound) if options.smoothness == SMOOTHNESS["bound"] else None
        self.collect = across(_collect, sizes.collect)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, tables = call.q, call.k, call.v, call.tables
    previous, _, tail_x, tail_v, _ = call.before
    top = torch.empty(plan.top, dtype=torch.float32, device=q.device) if keep and plan.top is not None else None
    weight, log_decay, energy = triton_schedule.forward(plan.schedule, call, top if plan.exact else None)
    states = torch.empty(plan.states, dtype=plan.operand, device=q.device) if keep else None
    lost, made = (torch.empty(s, dtype=plan.operand, device=q.device) for s in (plan.lost, plan.made))
    plan.local(q, k, v, previous, tail_x, tail_v, weight, log_decay, lost, made, *tables, *plan.numbers)
    plan.carry(
        k, previous, tail_x, log_decay, call.memory, lost, made, output, states, final, *tables[:2], *plan.numbers,
        flags=(states is not None, final is not None),
    )  # fmt: skip
    return Kept(weight, log_decay, energy, top, states, lost)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, v, tables = call.q, call.k, call.v, call.tables
    previous, previous_valid, tail_x, tail_v, tail_valid = call.before
    weight, log_decay, energy, top, states, lost, *_ = kept

    def empty(shape, dtype=plan.operand):
        return torch.empty(shape, dtype=dtype, device=q.device)

    found, left = (empty(plan.between, torch.float32) for _ in range(2))
    grad_states = empty(plan.grad_states)
    y, rho = empty(plan.solved), empty(plan.solved)
    edge_x, edge_v = empty(plan.edge_x, k.dtype), empty(plan.edge_v, v.dtype)
    sums = empty(plan.by_place, torch.float32)
    grad_energy = empty(plan.by_token, torch.float32) if plan.add_bound is not None else None
    keys = into.before.previous_key, into.before.tail_x
    for part in plan.parts:
        plan.reverse(
            k, previous, tail_x, log_decay, lost, grad_output, grad_final, found, left, grad_states, into.memory,
            *tables[:2], *plan.numbers, *part, flags=(grad_final is not None,),
        )  # fmt: skip
        found, left = left, found
        plan.solutions(
            q, k, v, previous, tail_x, tail_v, weight, log_decay, states, grad_output, grad_states, y, rho, sums,
            *tables, *plan.numbers, *part,
        )  # fmt: skip
        plan.gradients(
            q, k, call.gain, call.ridge, previous, previous_valid, tail_x, tail_valid, call.lengths, weight, log_decay,
            energy, states, top, grad_output, grad_states, y, rho, sums, into.q, into.k, into.v, into.gain,
            into.ridge, grad_energy, *keys, into.before.tail_v, edge_x, edge_v, *tables, *plan.numbers, *part,
        )  # fmt: skip
    if plan.add_bound is not None:
        plan.add_bound(k, previous, tail_x, grad_energy, into.k, *keys, edge_x, *tables, *plan.across)
    plan.collect(into.k, into.v, edge_x, edge_v, *tables, *plan.across)
