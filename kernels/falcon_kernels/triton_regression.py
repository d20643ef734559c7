"""Triton kernels of the regression write with a scalar rate and one pair per step (falcon_1), forward and backward.

In a chunk of C = 64 tokens that finds the memory S, with u the running log decay within the chunk and

    A = I + Diag(eta) tril(exp(u_{i-1} - u_s) * X X', -1)      W = A^-1 Diag(eta exp(u_{i-1})) X
    P = tril(exp(u_t - u_s) * Q X')                            U = A^-1 Diag(eta) V,

the residuals that are written are Z = U - W S, the output is O = Diag(exp(u)) Q S + P Z, and the memory that the chunk
leaves is exp(u_C) S + X' Diag(exp(u_C - u)) Z. Reading before the write takes u_{t-1} for u_t and a strict mask in P.

    forward    local     W, U                     one program per (chunk, head); no dependence on S
               carry     Z, S, and O where fused  one program per (sequence, head, V tile), over the chunks
               read      O                        one program per (chunk, head, V tile), split regime only
    backward   local     W, A^-1                  as before
               read      P' dO                    split regime only
               reverse   dZ, dS                   one program per (sequence, head, V tile), backwards over the chunks
               solve     Y = A^-T dZ, dV, and the C x C adjoints of Q X' and X X'
               gradients dQ, dX, d eta, d log gamma   one program per (chunk, head, K tile)

Two products depend on one another from chunk to chunk, X dS and W' dZ backward, W S and X' Z forward. The fused regime
has the reads in the pass over the chunks, and is for shapes whose (sequences, heads, V tiles) fill the card. The split
regime leaves the pass those two products and little else, and is for few long sequences.

Elements moved per token and head, with b bytes each (2 for bfloat16, otherwise 4), the forward of training:
    local 2K + 2V (k, v; W, U)
    fused carry 3K + 3V + KV/C (W, x, q, U; Z, O; S), or split carry 2K + 2V + KV/C and read 2K + 2V + KV/C
Inference in the fused regime stores neither Z nor S. Kept for the backward are S and Z; the rest is formed again there:
    local 2K + 4C/b (k; W; A^-1 in float32), reverse 3K + V + 4V/b + KV/C (x, W, q, dO; dZ in float32; dS),
    solve 4V + 2C + 4C/b + 8V/b, gradients 4K + 2V + 2C + 4V/b + 2KV/C
Multiply-adds per token and head: forward C (K + V) / 2 for Gram and scores, C (K + V) / 2 for W and U, 2KV for Z and S,
KV + C V / 2 for O; backward about 2.5 times that.

Decays enter as exp(u_t - u_s), s <= t only. u is summed in two parts, one rounded to 2^-12 so that its sums and
differences are exact while |u| < 4,096, so that a difference is as accurate as if no other step were in it.

Every sequence begins a chunk of its own. Packed documents take chunk slots start // C + n onwards, which never meet
those of document n + 1, so that no table of chunks is made and no shape depends on values: T // C + N slots.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launcher
from .rule import Rule

CHUNK = 64
FULL_CARD = 256  # programs of the pass over chunks from which it also reads


class Launch(NamedTuple):
    """How the pass over chunks is launched: value channels per program, warps, pipeline stages, and whether it may
    also read (the registers do not hold all operands of the larger ones)."""

    tile: int
    warps: int
    stages: int
    reads: bool


# By bytes per element of the products' operands and by K, padded to a power of two. The first fits the 99 KB of shared
# memory that the smallest supported cards give a program; the second needs the 227 KB of Hopper.
SMALL = {
    (2, 16): Launch(64, 4, 2, True),
    (2, 32): Launch(64, 4, 2, True),
    (2, 64): Launch(64, 4, 2, True),
    (2, 128): Launch(32, 4, 1, True),
    (2, 256): Launch(16, 8, 1, False),
    (4, 16): Launch(16, 4, 1, True),
    (4, 32): Launch(16, 4, 1, True),
    (4, 64): Launch(16, 4, 1, True),
    (4, 128): Launch(16, 4, 1, False),
    (4, 256): Launch(16, 8, 1, False),
}
LARGE = SMALL | {
    (2, 64): Launch(64, 4, 3, True),
    (2, 128): Launch(64, 4, 2, True),
    (2, 256): Launch(32, 8, 1, False),
}
LARGE_SHARED_MEMORY = 200 * 1024


# What the kernels share


@triton.jit
def _sequence_of(slot, bounds, length, sequences, PACKED: tl.constexpr, C: tl.constexpr):
    """Chunk slot -> its sequence, the first token of that (int64), its length, and the place of the slot in it."""
    if PACKED:
        low = slot * 0
        high = low + sequences
        while high - low > 1:
            middle = (low + high) // 2
            below = (tl.load(bounds + middle) // C).to(tl.int32) + middle <= slot
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        start = tl.load(bounds + low).to(tl.int64)
        tokens = (tl.load(bounds + low + 1) - start).to(tl.int32)
        place = (slot - low - (start // C).to(tl.int32)) * C
    else:
        chunks = tl.cdiv(length, C)
        low = slot // chunks
        start = low.to(tl.int64) * length
        tokens = low * 0 + length
        place = (slot % chunks) * C
    return low, start, tokens, place


@triton.jit
def _slots_of(sequence, bounds, length, PACKED: tl.constexpr, C: tl.constexpr):
    """Sequence -> its first token (int64), its length, its first chunk slot, and the first slot of the next one."""
    if PACKED:
        start = tl.load(bounds + sequence).to(tl.int64)
        end = tl.load(bounds + sequence + 1).to(tl.int64)
        tokens = (end - start).to(tl.int32)
        first = (start // C).to(tl.int32) + sequence
        last = (end // C).to(tl.int32) + sequence + 1
    else:
        start = sequence.to(tl.int64) * length
        tokens = sequence * 0 + length
        first = sequence * tl.cdiv(length, C)
        last = first + tl.cdiv(length, C)
    return start, tokens, first, last


@triton.jit
def _features(k, previous, start, t, sequence, head, H, K: tl.constexpr, SHIFTED: tl.constexpr, CARRIED: tl.constexpr):
    """Pointers to the write features x_t of tokens t of a sequence: to k_{t-1}, and to the previous key for t = 0."""
    if SHIFTED and CARRIED:
        before = previous + (sequence.to(tl.int64) * H + head) * K
        return tl.where(t == 0, before, k + ((start + tl.maximum(t - 1, 0)) * H + head) * K)
    elif SHIFTED:
        return k + ((start + tl.maximum(t - 1, 0)) * H + head) * K
    else:
        return k + ((start + t) * H + head) * K


@triton.jit
def _readable(t, here, SHIFTED: tl.constexpr, CARRIED: tl.constexpr):
    """Which of the tokens t that are `here` have a write feature: without a carried state not the first."""
    if SHIFTED and not CARRIED:
        return here & (t > 0)
    else:
        return here


@triton.jit
def _tile(rows, columns, valid, size, DT: tl.constexpr):
    """Loads [rows, columns] at row pointers, 0 where a row is not valid or a column not below `size`."""
    mask = valid[:, None] & (columns < size)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(DT)


@triton.jit
def _store(rows, columns, valid, size, values):
    mask = valid[:, None] & (columns < size)[None, :]
    tl.store(rows[:, None] + columns[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _parts(log_decay):
    """A log decay as a multiple of 2^-12 and the rest."""
    coarse = tl.floor(log_decay * 4096.0) * (1.0 / 4096.0)
    return coarse, log_decay - coarse


@triton.jit
def _pairwise(to_coarse, to_fine, from_coarse, from_fine, mask):
    """exp(to - from) where `mask`, 0 elsewhere; both given in two parts, already shaped to broadcast."""
    return tl.exp(tl.where(mask, (to_coarse - from_coarse) + (to_fine - from_fine), float("-inf")))


@triton.jit
def _eliminate(inverse, n, i, j):
    """Step j of the substitution: subtracts column j of n times row j of the inverse so far."""
    column = tl.sum(tl.where(i[None, :] == j, n, 0.0), 1)
    row = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), 0)
    return inverse - column[:, None] * row[None, :]


@triton.jit
def _invert16(n0, n1, n2, n3):
    """(I + n)^-1 by substitution, for four strictly lower triangular matrices n [16, 16] at once."""
    i = tl.arange(0, 16)
    a0 = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    a1, a2, a3 = a0, a0, a0
    for j in range(15):
        a0, a1 = _eliminate(a0, n0, i, j), _eliminate(a1, n1, i, j)
        a2, a3 = _eliminate(a2, n2, i, j), _eliminate(a3, n3, i, j)
    return a0, a1, a2, a3


@triton.jit
def _dot16(a, b):
    """Products that the inverse is merged with: float32 or its equal, whatever the inputs are."""
    return tl.dot(a, b, input_precision="tf32x3")


# Local phase


@triton.jit
def _gram(a, b, total):
    """total + a b'. Where keys repeat and gains are near 2, a rounding of x'x counts as often as the chunk has steps:
    float32 is rounded here, not truncated as by tensor cores."""
    return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit
def _store_block(base, i, row, column, block, C: tl.constexpr):
    tl.store(base + (row * 16 + i)[:, None] * C + (column * 16 + i)[None, :], block)


@triton.jit(do_not_specialize=["length", "sequences"])
def _local(
    k, v, previous, weight, log_decay, bounds, w, u, inverse, length, sequences, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr, VALUES: tl.constexpr, DT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """W, and U where VALUES, otherwise A^-1 [slots, H, C, C]; of one chunk of one head, in blocks of 16 tokens."""
    C: tl.constexpr = 64
    program = tl.program_id(0)
    slot, head = program // H, program % H
    sequence, start, tokens, place = _sequence_of(slot, bounds, length, sequences, PACKED, C)
    if place >= tokens:
        return

    i = tl.arange(0, 16)
    t0 = place + i
    t1, t2, t3 = t0 + 16, t0 + 32, t0 + 48
    in0, in1, in2, in3 = t0 < tokens, t1 < tokens, t2 < tokens, t3 < tokens
    read0 = _readable(t0, in0, SHIFTED, CARRIED)
    x0 = _features(k, previous, start, t0, sequence, head, H, K, SHIFTED, CARRIED)
    x1 = _features(k, previous, start, t1, sequence, head, H, K, SHIFTED, CARRIED)
    x2 = _features(k, previous, start, t2, sequence, head, H, K, SHIFTED, CARRIED)
    x3 = _features(k, previous, start, t3, sequence, head, H, K, SHIFTED, CARRIED)
    s0 = (start + t0) * H + head
    s1, s2, s3 = s0 + 16 * H, s0 + 32 * H, s0 + 48 * H

    g00 = tl.zeros([16, 16], tl.float32)
    g10, g11, g20, g21, g22, g30, g31, g32, g33 = g00, g00, g00, g00, g00, g00, g00, g00, g00
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        a0, a1 = _tile(x0, columns, read0, K, DT), _tile(x1, columns, in1, K, DT)
        a2, a3 = _tile(x2, columns, in2, K, DT), _tile(x3, columns, in3, K, DT)
        g00, g11 = _gram(a0, a0, g00), _gram(a1, a1, g11)
        g22, g33 = _gram(a2, a2, g22), _gram(a3, a3, g33)
        g10, g32 = _gram(a1, a0, g10), _gram(a3, a2, g32)
        g20, g21 = _gram(a2, a0, g20), _gram(a2, a1, g21)
        g30, g31 = _gram(a3, a0, g30), _gram(a3, a1, g31)

    # u at and before each token, in two parts
    c0, f0 = _parts(tl.load(log_decay + s0, mask=in0, other=0.0))
    c1, f1 = _parts(tl.load(log_decay + s1, mask=in1, other=0.0))
    c2, f2 = _parts(tl.load(log_decay + s2, mask=in2, other=0.0))
    c3, f3 = _parts(tl.load(log_decay + s3, mask=in3, other=0.0))
    uc0, uf0 = tl.cumsum(c0, 0), tl.cumsum(f0, 0)
    uc1, uf1 = tl.cumsum(c1, 0) + tl.sum(c0), tl.cumsum(f1, 0) + tl.sum(f0)
    uc2, uf2 = tl.cumsum(c2, 0) + tl.sum(c0 + c1), tl.cumsum(f2, 0) + tl.sum(f0 + f1)
    uc3, uf3 = tl.cumsum(c3, 0) + tl.sum(c0 + c1 + c2), tl.cumsum(f3, 0) + tl.sum(f0 + f1 + f2)
    pc0, pf0, pc1, pf1 = uc0 - c0, uf0 - f0, uc1 - c1, uf1 - f1
    pc2, pf2, pc3, pf3 = uc2 - c2, uf2 - f2, uc3 - c3, uf3 - f3
    e0, e1 = tl.load(weight + s0, mask=in0, other=0.0), tl.load(weight + s1, mask=in1, other=0.0)
    e2, e3 = tl.load(weight + s2, mask=in2, other=0.0), tl.load(weight + s3, mask=in3, other=0.0)

    # A below its diagonal, negated off the diagonal blocks
    strict = i[:, None] > i[None, :]
    every = i[:, None] >= 0
    n00 = e0[:, None] * g00 * _pairwise(pc0[:, None], pf0[:, None], uc0[None, :], uf0[None, :], strict)
    n11 = e1[:, None] * g11 * _pairwise(pc1[:, None], pf1[:, None], uc1[None, :], uf1[None, :], strict)
    n22 = e2[:, None] * g22 * _pairwise(pc2[:, None], pf2[:, None], uc2[None, :], uf2[None, :], strict)
    n33 = e3[:, None] * g33 * _pairwise(pc3[:, None], pf3[:, None], uc3[None, :], uf3[None, :], strict)
    n10 = -e1[:, None] * g10 * _pairwise(pc1[:, None], pf1[:, None], uc0[None, :], uf0[None, :], every)
    n20 = -e2[:, None] * g20 * _pairwise(pc2[:, None], pf2[:, None], uc0[None, :], uf0[None, :], every)
    n21 = -e2[:, None] * g21 * _pairwise(pc2[:, None], pf2[:, None], uc1[None, :], uf1[None, :], every)
    n30 = -e3[:, None] * g30 * _pairwise(pc3[:, None], pf3[:, None], uc0[None, :], uf0[None, :], every)
    n31 = -e3[:, None] * g31 * _pairwise(pc3[:, None], pf3[:, None], uc1[None, :], uf1[None, :], every)
    n32 = -e3[:, None] * g32 * _pairwise(pc3[:, None], pf3[:, None], uc2[None, :], uf2[None, :], every)

    a00, a11, a22, a33 = _invert16(n00, n11, n22, n33)
    b10, b21, b32 = _dot16(a11, n10), _dot16(a22, n21), _dot16(a33, n32)
    b20, b31, b30 = _dot16(a22, n20), _dot16(a33, n31), _dot16(a33, n30)
    a10, a21, a32 = _dot16(b10, a00), _dot16(b21, a11), _dot16(b32, a22)
    a20 = _dot16(b20, a00) + _dot16(b21, a10)
    a31 = _dot16(b31, a11) + _dot16(b32, a21)
    a30 = _dot16(b30, a00) + _dot16(b31, a10) + _dot16(b32, a20)

    h0 = e0 * tl.exp(pc0 + pf0)
    h1 = e1 * tl.exp(pc1 + pf1)
    h2 = e2 * tl.exp(pc2 + pf2)
    h3 = e3 * tl.exp(pc3 + pf3)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        r0 = h0[:, None] * _tile(x0, columns, read0, K, tl.float32)
        y = tl.dot(a00, r0, input_precision=PREC)
        _store(w + s0 * K, columns, in0, K, y)
        r1 = h1[:, None] * _tile(x1, columns, in1, K, tl.float32)
        y = tl.dot(a10, r0, input_precision=PREC)
        y = tl.dot(a11, r1, y, input_precision=PREC)
        _store(w + s1 * K, columns, in1, K, y)
        r2 = h2[:, None] * _tile(x2, columns, in2, K, tl.float32)
        y = tl.dot(a20, r0, input_precision=PREC)
        y = tl.dot(a21, r1, y, input_precision=PREC)
        y = tl.dot(a22, r2, y, input_precision=PREC)
        _store(w + s2 * K, columns, in2, K, y)
        r3 = h3[:, None] * _tile(x3, columns, in3, K, tl.float32)
        y = tl.dot(a30, r0, input_precision=PREC)
        y = tl.dot(a31, r1, y, input_precision=PREC)
        y = tl.dot(a32, r2, y, input_precision=PREC)
        y = tl.dot(a33, r3, y, input_precision=PREC)
        _store(w + s3 * K, columns, in3, K, y)

    if VALUES:
        for first in range(0, V, BV):
            columns = first + tl.arange(0, BV)
            r0 = e0[:, None] * _tile(v + s0 * V, columns, in0, V, tl.float32)
            y = tl.dot(a00, r0, input_precision=PREC)
            _store(u + s0 * V, columns, in0, V, y)
            r1 = e1[:, None] * _tile(v + s1 * V, columns, in1, V, tl.float32)
            y = tl.dot(a10, r0, input_precision=PREC)
            y = tl.dot(a11, r1, y, input_precision=PREC)
            _store(u + s1 * V, columns, in1, V, y)
            r2 = e2[:, None] * _tile(v + s2 * V, columns, in2, V, tl.float32)
            y = tl.dot(a20, r0, input_precision=PREC)
            y = tl.dot(a21, r1, y, input_precision=PREC)
            y = tl.dot(a22, r2, y, input_precision=PREC)
            _store(u + s2 * V, columns, in2, V, y)
            r3 = e3[:, None] * _tile(v + s3 * V, columns, in3, V, tl.float32)
            y = tl.dot(a30, r0, input_precision=PREC)
            y = tl.dot(a31, r1, y, input_precision=PREC)
            y = tl.dot(a32, r2, y, input_precision=PREC)
            y = tl.dot(a33, r3, y, input_precision=PREC)
            _store(u + s3 * V, columns, in3, V, y)
    else:
        base = inverse + program.to(tl.int64) * C * C
        zero = tl.zeros([16, 16], tl.float32)
        _store_block(base, i, 0, 0, a00, C)
        _store_block(base, i, 0, 1, zero, C)
        _store_block(base, i, 0, 2, zero, C)
        _store_block(base, i, 0, 3, zero, C)
        _store_block(base, i, 1, 0, a10, C)
        _store_block(base, i, 1, 1, a11, C)
        _store_block(base, i, 1, 2, zero, C)
        _store_block(base, i, 1, 3, zero, C)
        _store_block(base, i, 2, 0, a20, C)
        _store_block(base, i, 2, 1, a21, C)
        _store_block(base, i, 2, 2, a22, C)
        _store_block(base, i, 2, 3, zero, C)
        _store_block(base, i, 3, 0, a30, C)
        _store_block(base, i, 3, 1, a31, C)
        _store_block(base, i, 3, 2, a32, C)
        _store_block(base, i, 3, 3, a33, C)


# Forward over the chunks, and the read


@triton.jit(do_not_specialize=["length"])
def _carry(
    q, k, previous, log_decay, memory, bounds, w, u, output, final, states, z, length, H,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, CARRIED: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, READ: tl.constexpr,
    KEEP: tl.constexpr, FINAL: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The memory of one sequence and head, a tile of its value channels, in registers over all chunks.

    KEEP stores what each chunk finds (states [slots, H, K, V]) and Z [B, T, H, V], which may be the storage of U.
    READ computes the output.
    """
    C: tl.constexpr = 64
    program = tl.program_id(0)
    sequence, head = program // H, program % H
    start, tokens, slot, next_slot = _slots_of(sequence, bounds, length, PACKED, C)
    kk = tl.arange(0, KP)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)

    own = program.to(tl.int64) * K * V + kk * V
    s = _tile(memory + own, columns, kk < K, V, tl.float32) if CARRIED else tl.zeros([KP, BV], tl.float32)
    for first in range(0, tokens, C):
        if KEEP:
            _store(states + (slot.to(tl.int64) * H + head) * K * V + kk * V, columns, kk < K, V, s)
        t = first + i
        here = t < tokens
        row = (start + t) * H + head
        coarse, fine = _parts(tl.load(log_decay + row, mask=here, other=0.0))
        uc, uf = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
        end_c, end_f = tl.sum(coarse), tl.sum(fine)
        narrow = s.to(DT)
        s *= tl.exp(end_c + end_f)
        features = _features(k, previous, start, t, sequence, head, H, K, SHIFTED, CARRIED)
        x = _tile(features, kk, _readable(t, here, SHIFTED, CARRIED), K, DT)
        residual = _tile(u + row * V, columns, here, V, tl.float32)
        residual -= tl.dot(_tile(w + row * K, kk, here, K, DT), narrow, input_precision=PREC)
        if READ:
            queries = _tile(q + row * K, kk, here, K, DT)
            scores = tl.dot(queries, tl.trans(x), input_precision=PREC)
            rc, rf = uc - coarse * BEFORE, uf - fine * BEFORE
            seen = i[:, None] >= i[None, :] + BEFORE
            scores *= _pairwise(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
            out = tl.dot(queries, narrow, input_precision=PREC) * tl.exp(rc + rf)[:, None]
            out = tl.dot(scores.to(DT), residual.to(DT), out, input_precision=PREC)
            _store(output + row * V, columns, here, V, out)
        if KEEP:
            _store(z + row * V, columns, here, V, residual)
        residual *= tl.exp((end_c - uc) + (end_f - uf))[:, None]
        s = tl.dot(tl.trans(x), residual.to(DT), s, input_precision=PREC)
        slot += 1
    if FINAL:
        _store(final + own, columns, kk < K, V, s)
    if PACKED and KEEP:  # slots that no chunk of this sequence takes
        while slot < next_slot:
            _store(states + (slot.to(tl.int64) * H + head) * K * V + kk * V, columns, kk < K, V, s * 0.0)
            slot += 1


@triton.jit(do_not_specialize=["length", "sequences"])
def _read(
    q, k, previous, log_decay, bounds, states, z, output, length, sequences, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFTED: tl.constexpr, CARRIED: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, ADJOINT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """O = Diag(exp(u)) Q S + P Z of one chunk, head and tile of value channels; P' z where ADJOINT, with z = dO."""
    C: tl.constexpr = 64
    program = tl.program_id(0)
    slot, head = program // H, program % H
    sequence, start, tokens, place = _sequence_of(slot, bounds, length, sequences, PACKED, C)
    if place >= tokens:
        return
    i = tl.arange(0, C)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    t = place + i
    here = t < tokens
    row = (start + t) * H + head
    features = _features(k, previous, start, t, sequence, head, H, K, SHIFTED, CARRIED)
    coarse, fine = _parts(tl.load(log_decay + row, mask=here, other=0.0))
    uc, uf = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    rc, rf = uc - coarse * BEFORE, uf - fine * BEFORE

    scores = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    for first in range(0, K, BK):
        kk = first + tl.arange(0, BK)
        x = _tile(features, kk, _readable(t, here, SHIFTED, CARRIED), K, DT)
        queries = _tile(q + row * K, kk, here, K, DT)
        if ADJOINT:
            scores = tl.dot(x, tl.trans(queries), scores, input_precision=PREC)
        else:
            scores = tl.dot(queries, tl.trans(x), scores, input_precision=PREC)
            s = _tile(states + program.to(tl.int64) * K * V + kk * V, columns, kk < K, V, DT)
            out = tl.dot(queries, s, out, input_precision=PREC)
    if ADJOINT:
        seen = i[None, :] >= i[:, None] + BEFORE
        scores *= _pairwise(rc[None, :], rf[None, :], uc[:, None], uf[:, None], seen)
    else:
        seen = i[:, None] >= i[None, :] + BEFORE
        scores *= _pairwise(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
        out *= tl.exp(rc + rf)[:, None]
    out = tl.dot(scores.to(DT), _tile(z + row * V, columns, here, V, DT), out, input_precision=PREC)
    _store(output + row * V, columns, here, V, out)


# Backward


@triton.jit(do_not_specialize=["length"])
def _reverse(
    q, k, previous, log_decay, bounds, w, grad_output, grad_final, grad_z, grad_states, grad_memory, length, H,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, CARRIED: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, READ: tl.constexpr,
    FINAL: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The memory's cotangent of one sequence and head, a tile of value channels, backwards over the chunks.

    Stores the cotangents of what each chunk leaves (grad_states [slots, H, K, V]) and of Z [B, T, H, V]. Without READ,
    grad_z comes in as P' dO.
    """
    C: tl.constexpr = 64
    program = tl.program_id(0)
    sequence, head = program // H, program % H
    start, tokens, slot, _ = _slots_of(sequence, bounds, length, PACKED, C)
    kk = tl.arange(0, KP)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)

    own = program.to(tl.int64) * K * V + kk * V
    ds = _tile(grad_final + own, columns, kk < K, V, tl.float32) if FINAL else tl.zeros([KP, BV], tl.float32)
    chunks = tl.cdiv(tokens, C)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        first = chunk * C
        _store(grad_states + ((slot + chunk).to(tl.int64) * H + head) * K * V + kk * V, columns, kk < K, V, ds)
        t = first + i
        here = t < tokens
        row = (start + t) * H + head
        coarse, fine = _parts(tl.load(log_decay + row, mask=here, other=0.0))
        uc, uf = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
        end_c, end_f = tl.sum(coarse), tl.sum(fine)
        narrow = ds.to(DT)
        ds *= tl.exp(end_c + end_f)
        rc, rf = uc - coarse * BEFORE, uf - fine * BEFORE
        features = _features(k, previous, start, t, sequence, head, H, K, SHIFTED, CARRIED)
        x = _tile(features, kk, _readable(t, here, SHIFTED, CARRIED), K, DT)
        queries = _tile(q + row * K, kk, here, K, DT)
        given = _tile(grad_output + row * V, columns, here, V, DT)
        dz = tl.dot(x, narrow, input_precision=PREC) * tl.exp((end_c - uc) + (end_f - uf))[:, None]
        if READ:
            scores = tl.dot(x, tl.trans(queries), input_precision=PREC)
            seen = i[None, :] >= i[:, None] + BEFORE
            scores *= _pairwise(rc[None, :], rf[None, :], uc[:, None], uf[:, None], seen)
            dz = tl.dot(scores.to(DT), given, dz, input_precision=PREC)
        else:
            dz += _tile(grad_z + row * V, columns, here, V, tl.float32)
        _store(grad_z + row * V, columns, here, V, dz)
        decayed = given.to(tl.float32) * tl.exp(rc + rf)[:, None]
        ds = tl.dot(tl.trans(queries), decayed.to(DT), ds, input_precision=PREC)
        ds = tl.dot(tl.trans(_tile(w + row * K, kk, here, K, DT)), (-dz).to(DT), ds, input_precision=PREC)
    if CARRIED:
        _store(grad_memory + own, columns, kk < K, V, ds)


@triton.jit(do_not_specialize=["length", "sequences"])
def _solve(
    v, weight, log_decay, bounds, inverse, z, grad_output, grad_z, grad_v, grad_weight, products, length, sequences, H,
    V: tl.constexpr, BV: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The transposed solve of one chunk and head: Y = A^-T dZ in the place of dZ, dV = Diag(eta) Y, and
    products [slots, H, 2, C, C]: the cotangent of Q X', and that of X X' below its diagonal, without eta.

    grad_weight gets the part of d eta that comes through V.
    """
    C: tl.constexpr = 64
    program = tl.program_id(0)
    slot, head = program // H, program % H
    _, start, tokens, place = _sequence_of(slot, bounds, length, sequences, PACKED, C)
    if place >= tokens:
        return
    i = tl.arange(0, C)
    here = place + i < tokens
    row = (start + place + i) * H + head
    eta = tl.load(weight + row, mask=here, other=0.0)
    transposed = tl.load(inverse + program.to(tl.int64) * C * C + i[None, :] * C + i[:, None])

    grad_eta = tl.zeros([C], tl.float32)
    grad_scores = tl.zeros([C, C], tl.float32)
    grad_system = tl.zeros([C, C], tl.float32)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        y = tl.dot(transposed, _tile(grad_z + row * V, columns, here, V, tl.float32), input_precision=PREC)
        _store(grad_z + row * V, columns, here, V, y)
        _store(grad_v + row * V, columns, here, V, eta[:, None] * y)
        grad_eta += tl.sum(y * _tile(v + row * V, columns, here, V, tl.float32), 1)
        residual = tl.trans(_tile(z + row * V, columns, here, V, DT))
        given = _tile(grad_output + row * V, columns, here, V, DT)
        grad_scores = tl.dot(given, residual, grad_scores, input_precision=PREC)
        grad_system = tl.dot(y.to(DT), residual, grad_system, input_precision=PREC)

    coarse, fine = _parts(tl.load(log_decay + row, mask=here, other=0.0))
    uc, uf = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    rc, rf = uc - coarse * BEFORE, uf - fine * BEFORE
    seen = i[:, None] >= i[None, :] + BEFORE
    grad_scores *= _pairwise(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
    strict = i[:, None] > i[None, :]
    grad_system *= -_pairwise((uc - coarse)[:, None], (uf - fine)[:, None], uc[None, :], uf[None, :], strict)
    both = products + program.to(tl.int64) * 2 * C * C + i[:, None] * C + i[None, :]
    tl.store(both, grad_scores.to(products.dtype.element_ty))
    tl.store(both + C * C, grad_system.to(products.dtype.element_ty))
    tl.store(grad_weight + row, grad_eta, mask=here)


@triton.jit(do_not_specialize=["length", "sequences", "size"])
def _gradients(
    q, k, previous, weight, log_decay, bounds, states, z, y, grad_output, grad_states, products,
    grad_q, grad_k, grad_previous, grad_weight, grad_log_decay, length, sequences, H, size,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFTED: tl.constexpr, CARRIED: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk, head and tile of key channels: dQ, dX where its key lies, d eta and d log gamma.

    The last two are sums over key channels: each tile has a part of its own, [K tiles, B, T, H], of `size` elements.
    The first tile's d eta has the part that `_solve` left there.
    """
    C: tl.constexpr = 64
    program = tl.program_id(0)
    slot, head = program // H, program % H
    sequence, start, tokens, place = _sequence_of(slot, bounds, length, sequences, PACKED, C)
    if place >= tokens:
        return
    i = tl.arange(0, C)
    t = place + i
    here = t < tokens
    row = (start + t) * H + head
    kk = tl.program_id(1) * BK + tl.arange(0, BK)
    memory = program.to(tl.int64) * K * V + kk * V
    eta = tl.load(weight + row, mask=here, other=0.0)
    coarse, fine = _parts(tl.load(log_decay + row, mask=here, other=0.0))
    uc, uf = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    end_c, end_f = tl.sum(coarse), tl.sum(fine)
    to_end = tl.exp((end_c - uc) + (end_f - uf))

    dq = tl.zeros([C, BK], tl.float32)
    found = tl.zeros([C, BK], tl.float32)
    left = tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK, BV], tl.float32)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        s = _tile(states + memory, columns, kk < K, V, DT)
        ds = _tile(grad_states + memory, columns, kk < K, V, DT)
        kept += s.to(tl.float32) * ds.to(tl.float32)
        given = _tile(grad_output + row * V, columns, here, V, DT)
        dq = tl.dot(given, tl.trans(s), dq, input_precision=PREC)
        found = tl.dot(_tile(y + row * V, columns, here, V, DT), tl.trans(s), found, input_precision=PREC)
        left = tl.dot(_tile(z + row * V, columns, here, V, DT), tl.trans(ds), left, input_precision=PREC)

    both = products + program.to(tl.int64) * 2 * C * C
    square, across = i[:, None] * C + i[None, :], i[None, :] * C + i[:, None]
    readable = _readable(t, here, SHIFTED, CARRIED)
    x = _tile(_features(k, previous, start, t, sequence, head, H, K, SHIFTED, CARRIED), kk, readable, K, DT)
    queries = _tile(q + row * K, kk, here, K, DT)
    wide_x = x.to(tl.float32)

    dq *= tl.exp((uc - coarse * BEFORE) + (uf - fine * BEFORE))[:, None]
    dq = tl.dot(tl.load(both + square).to(DT), x, dq, input_precision=PREC)
    _store(grad_q + row * K, kk, here, K, dq)

    found *= -tl.exp((uc - coarse) + (uf - fine))[:, None]
    found = tl.dot(tl.load(both + C * C + square).to(DT), x, found, input_precision=PREC)
    left *= to_end[:, None]
    carried = tl.sum(wide_x * left, 1)
    left = tl.dot(tl.load(both + across).to(DT), queries, left, input_precision=PREC)
    weighted = tl.load(both + C * C + across).to(tl.float32) * eta[None, :]
    left = tl.dot(weighted.to(DT), x, left, input_precision=PREC)

    dx = eta[:, None] * found + left
    if SHIFTED:
        last = t == tokens - 1  # this token's key is a write feature of the next call, through the state
        _store(grad_k + row * K, kk, last, K, tl.zeros([C, BK], tl.float32))
        keys = _features(grad_k, grad_previous, start, t, sequence, head, H, K, SHIFTED, CARRIED)
        _store(keys, kk, readable, K, dx)
    else:
        _store(grad_k + row * K, kk, here, K, dx)

    # Cotangents of u: `at` of u_t, `before` of u_{t-1}; those of u_C are in `carried` and `end`.
    read = tl.sum(queries.to(tl.float32) * dq, 1)
    grad_eta = tl.sum(wide_x * found, 1)
    at = carried - tl.sum(wide_x * left, 1) + read * (1 - BEFORE)
    ahead = eta * grad_eta + read * BEFORE
    end = tl.sum(kept) * tl.exp(end_c + end_f)
    later = i[:, None] > i[None, :]
    total = tl.where(later, (at + ahead)[:, None], carried[:, None])
    total = tl.where(i[:, None] == i[None, :], at[:, None], total)
    part = tl.program_id(1).to(tl.int64) * size
    tl.store(grad_log_decay + part + row, tl.sum(total, 0) + end, mask=here)
    if tl.program_id(1) == 0:
        grad_eta += tl.load(grad_weight + row, mask=here, other=0.0)
    tl.store(grad_weight + part + row, grad_eta, mask=here)


# Operators


def regression_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor,
    previous_key: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """falcon_1 from given step sizes and decays.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; of one dtype, float32, bfloat16 or float16.
        weight, log_decay: [B, T, H] eta and log gamma, float32; 0 for padding, which comes after all tokens of a row
            and has k and v zero, and for a first token without a pair.
        memory: [S, H, K, V] float32 that each sequence begins with; S = B, or the number of documents.
        previous_key: [S, H, K] in the dtype of k, the write feature of each first token; None for same-step rules.
        cu_seqlens: [S + 1] bounds of packed documents (B = 1), or None.
        rule: its alignment and timing.

    Returns:
        output [B, T, H, V] in the dtype of v, and the final memory [S, H, K, V] float32.
    """
    q, k, v, weight, log_decay, memory = (t.contiguous() for t in (q, k, v, weight, log_decay, memory))
    previous = k.new_empty(0) if previous_key is None else previous_key.to(k.dtype).contiguous()
    bounds = torch.empty(0, dtype=torch.int32, device=q.device) if cu_seqlens is None else cu_seqlens.contiguous()
    tensors = (q, k, v, weight, log_decay, memory, previous)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    before = rule.timing == "read_before_write"
    output, final, _, _ = torch.ops.falcon_kernels.regression(*tensors, bounds, rule.shifted, before, keep)
    return output, final


torch.library.define(
    "falcon_kernels::regression",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, Tensor log_decay, Tensor memory, Tensor previous, Tensor bounds, "
    "bool shifted, bool before, bool keep) -> (Tensor output, Tensor final, Tensor states, Tensor residuals)",
)
torch.library.define(
    "falcon_kernels::regression_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor weight, Tensor log_decay, Tensor previous, Tensor bounds, Tensor states, "
    "Tensor residuals, Tensor grad_output, Tensor grad_final, bool shifted, bool before) -> "
    "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_weight, Tensor grad_log_decay, Tensor grad_memory, "
    "Tensor grad_previous)",
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor,
    previous: Tensor,
    bounds: Tensor,
    shifted: bool,
    before: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, final, *kept = _outputs(q, k, v, weight, log_decay, memory, previous, bounds, shifted, before, keep)
    if q.shape[1] == 0:
        return output, final.copy_(memory), *kept
    plan = _plan_of(q, v, bounds, shifted, before)
    found = forward(plan, q, k, v, weight, log_decay, memory, previous, bounds, output, final, keep)
    return output, final, *(found if keep else kept)


def forward(
    plan: "Plan",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    memory: Tensor | None,
    previous: Tensor | None,
    bounds: Tensor | None,
    output: Tensor,
    final: Tensor | None,
    keep: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Fills `output` and, where it is given, `final`; returns chunk states and residuals where `keep`, else None."""
    w = torch.empty(q.shape, dtype=plan.wide, device=q.device)
    z = torch.empty(v.shape, dtype=plan.wide, device=q.device)  # U, then the residuals
    stored = keep or not plan.reads
    states = torch.empty(plan.states, dtype=plan.wide, device=q.device) if stored else None
    plan.local(k, v, previous, weight, log_decay, bounds, w, z, None, *plan.sizes, flags=(True,))
    plan.carry(
        q, k, previous, log_decay, memory, bounds, w, z, output, final, states, z, *plan.along,
        flags=(stored, final is not None),
    )  # fmt: skip
    if not plan.reads:
        plan.read(q, k, previous, log_decay, bounds, states, z, output, *plan.sizes, flags=(False,))
    return (states, z) if keep else (None, None)


def _outputs(q, k, v, weight, log_decay, memory, previous, bounds, shifted, before, keep):
    """Empty outputs of the forward operator: also what it returns where only shapes are wanted."""
    wide = _operand_dtype(q.dtype)
    shape = states_shape(q, v, bounds) if keep else (0,)
    return (
        torch.empty_like(v),
        torch.empty_like(memory),
        memory.new_empty(shape, dtype=wide),
        torch.empty_like(v, dtype=wide) if keep else v.new_empty(0, dtype=wide),
    )


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    previous: Tensor,
    bounds: Tensor,
    states: Tensor,
    residuals: Tensor,
    grad_output: Tensor,
    grad_final: Tensor,
    shifted: bool,
    before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    into = _gradient_outputs(
        q, k, v, weight, log_decay, previous, bounds, states, residuals, grad_output, grad_final, shifted, before
    )
    given = grad_final if grad_final.numel() else None
    if q.shape[1] == 0:
        into[5].zero_() if given is None else into[5].copy_(given)
        into[6].zero_()
        return into
    plan = _plan_of(q, v, bounds, shifted, before)
    kept = (states, residuals, grad_output, given)
    backward(plan, q, k, v, weight, log_decay, previous, bounds, *kept, into)
    return into


def backward(
    plan: "Plan",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    previous: Tensor | None,
    bounds: Tensor | None,
    states: Tensor,
    residuals: Tensor,
    grad_output: Tensor,
    grad_final: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
) -> None:
    """Fills the gradients of q, k, v, weight, log decay, and of memory and previous keys where those are given."""
    dq, dk, dv, d_weight, d_log_decay, d_memory, d_previous = into
    if plan.packed and d_previous is not None:
        d_previous.zero_()  # of documents without tokens
    w = torch.empty(q.shape, dtype=plan.wide, device=q.device)
    square = (plan.slots, plan.heads, CHUNK, CHUNK)
    inverse = torch.empty(square, dtype=torch.float32, device=q.device)
    plan.local(k, v, previous, weight, log_decay, bounds, w, None, inverse, *plan.sizes, flags=(False,))
    grad_z = torch.empty(v.shape, dtype=torch.float32, device=q.device)
    grad_states = torch.empty_like(states)
    if not plan.reads:
        plan.read(q, k, previous, log_decay, bounds, states, grad_output, grad_z, *plan.sizes, flags=(True,))
    plan.reverse(
        q, k, previous, log_decay, bounds, w, grad_output, grad_final, grad_z, grad_states, d_memory, *plan.along,
        flags=(grad_final is not None,),
    )  # fmt: skip
    del w
    parts = [d_weight, d_log_decay]
    if plan.key_tiles > 1:
        parts = [torch.empty((plan.key_tiles, *weight.shape), dtype=torch.float32, device=q.device) for _ in parts]
    products = torch.empty((plan.slots, plan.heads, 2, CHUNK, CHUNK), dtype=plan.wide, device=q.device)
    plan.solve(
        v, weight, log_decay, bounds, inverse, residuals, grad_output, grad_z, dv, parts[0], products, *plan.sizes
    )
    del inverse
    plan.gradients(
        q, k, previous, weight, log_decay, bounds, states, residuals, grad_z, grad_output, grad_states, products,
        dq, dk, d_previous, *parts, *plan.sizes, plan.numbers,
    )  # fmt: skip
    if plan.key_tiles > 1:
        for part, total in zip(parts, (d_weight, d_log_decay), strict=True):
            torch.sum(part, 0, out=total)


def _gradient_outputs(
    q, k, v, weight, log_decay, previous, bounds, states, residuals, grad_output, grad_final, shifted, before
):
    """Empty outputs of the backward operator: also what it returns where only shapes are wanted."""
    sequences = q.shape[0] if bounds.shape[0] == 0 else bounds.shape[0] - 1
    memory = weight.new_empty((sequences, q.shape[2], q.shape[3], v.shape[3]))
    return tuple(torch.empty_like(t) for t in (q, k, v, weight, log_decay, memory, previous))


def _save(ctx, inputs, output):
    q, k, v, weight, log_decay, _, previous, bounds, shifted, before, _ = inputs
    ctx.save_for_backward(q, k, v, weight, log_decay, previous, bounds, *output[2:])
    ctx.options = (shifted, before)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_output, grad_final, *_):
    saved = ctx.saved_tensors
    grad_output = torch.zeros_like(saved[2]) if grad_output is None else grad_output.contiguous()
    grad_final = saved[3].new_empty(0) if grad_final is None else grad_final.contiguous()
    grads = torch.ops.falcon_kernels.regression_backward(*saved, grad_output, grad_final, *ctx.options)
    return *grads, None, None, None, None


def _on_its_device(run: Callable) -> Callable:
    """`run` with the device of its first tensor current, which is where Triton launches."""

    @wraps(run)
    def guarded(q: Tensor, *rest):
        with torch.cuda.device_of(q):
            return run(q, *rest)

    return guarded


for _name, _run, _shapes in (("regression", _forward, _outputs), ("regression_backward", _backward, _gradient_outputs)):
    torch.library.impl(f"falcon_kernels::{_name}", "default")(_on_its_device(_run))
    torch.library.register_fake(f"falcon_kernels::{_name}")(_shapes)
torch.library.register_autograd("falcon_kernels::regression", _differentiate, setup_context=_save)


# Launches


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device, documents: int,
        shifted: bool, before: bool, carried: bool, aligned: bool = False,
    ):  # fmt: skip
        batch, length, self.heads, key_dim = shape
        sequences, self.packed = documents or batch, documents > 0
        self.slots = length // CHUNK + documents if self.packed else batch * -(-length // CHUNK)
        self.states = (self.slots, self.heads, key_dim, value_dim)
        self.wide = _operand_dtype(dtype)
        most = 64 if self.wide == torch.bfloat16 else 32
        key_tile, value_tile = _divisor_tile(key_dim, most), _divisor_tile(value_dim, most)
        padded = max(16, triton.next_power_of_2(key_dim))
        launch = _table(device)[self.wide.itemsize, padded]
        rows, width = sequences * self.heads, max(16, triton.next_power_of_2(value_dim))
        tile = min(launch.tile, width)
        self.reads = launch.reads and rows * -(-value_dim // tile) >= FULL_CARD
        while not self.reads and tile > 16 and rows * -(-value_dim // tile) < FULL_CARD // 2:
            tile //= 2  # more programs, each with less to wait for
        self.key_tiles = -(-key_dim // key_tile)
        self.sizes, self.along = (length, sequences, self.heads), (length, self.heads)
        self.numbers = batch * length * self.heads

        shared = {
            "PACKED": self.packed,
            "DT": tl.bfloat16 if self.wide == torch.bfloat16 else tl.float32,
            # float16 inputs are multiplied as tf32: as precise, without the overflow of what comes from the memory
            "PREC": "tf32x3" if dtype == torch.float32 else "tf32",
        }
        features = {"SHIFTED": shifted, "CARRIED": carried, "K": key_dim}
        channels = {"V": value_dim, "BEFORE": int(before)} | shared
        four = {"num_warps": 4, "num_stages": 2}
        most = 32 if self.wide == torch.bfloat16 else 16  # channels at a time: one warp holds all blocks of them
        local = features | shared | {"V": value_dim, "num_warps": 1, "num_stages": 1}
        local |= {"BK": min(key_tile, most), "BV": min(value_tile, most)}
        along = features | channels | {"KP": padded, "BV": tile, "READ": self.reads}
        along |= {"num_warps": launch.warps, "num_stages": launch.stages}
        tiles = features | channels | {"BK": key_tile, "BV": value_tile} | four
        chunks, sequences_grid = self.slots * self.heads, (rows, -(-value_dim // tile))

        def launcher(kernel, grid, constants, *flags):
            return Launcher(kernel, grid, constants, flags, aligned)

        self.local = launcher(_local, (chunks,), local, "VALUES")
        self.carry = launcher(_carry, sequences_grid, along, "KEEP", "FINAL")
        self.reverse = launcher(_reverse, sequences_grid, along, "FINAL")
        self.read = launcher(_read, (chunks, -(-value_dim // value_tile)), tiles, "ADJOINT")
        self.solve = launcher(_solve, (chunks,), channels | {"BV": value_tile} | four)
        self.gradients = launcher(_gradients, (chunks, self.key_tiles), tiles)


def _plan_of(q: Tensor, v: Tensor, bounds: Tensor, shifted: bool, before: bool) -> Plan:
    return Plan(q.shape, v.shape[-1], q.dtype, q.device, max(0, bounds.shape[0] - 1), shifted, before, True)


def states_shape(q: Tensor, v: Tensor, bounds: Tensor | None) -> tuple[int, ...]:
    rows, length, heads, key_dim = q.shape
    packed = bounds is not None and bounds.shape[0] > 0
    slots = length // CHUNK + bounds.shape[0] - 1 if packed else rows * ((length + CHUNK - 1) // CHUNK)
    return slots, heads, key_dim, v.shape[-1]


def _operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products, and the chunk states that are stored, are rounded to."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _divisor_tile(size: int, most: int) -> int:
    """The tile that a loop over `size` channels takes: the largest power of two from 16 to `most` that divides it."""
    return next((tile for tile in (64, 32) if tile <= most and size % tile == 0), 16)


@lru_cache
def _table(device: torch.device) -> dict[tuple[int, int], Launch]:
    if device.type != "cuda":
        return SMALL
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return LARGE if properties["max_shared_mem"] >= LARGE_SHARED_MEMORY else SMALL
