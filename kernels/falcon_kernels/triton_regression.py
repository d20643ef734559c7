"""Triton kernels of the regression write with a scalar rate and one pair per step (falcon_1), forward and backward.

In a chunk of C = 64 tokens that finds the memory S, with u the running log decay within the chunk and

    A = I + Diag(eta) tril(exp(u_{i-1} - u_s) * X X', -1)      W = A^-1 Diag(eta exp(u_{i-1})) X
    P = tril(exp(u_t - u_s) * Q X')                            U = A^-1 Diag(eta) V,

the residuals that are written are Z = U - W S, the output is O = Diag(exp(u)) Q S + P Z, and the memory that the chunk
leaves is exp(u_C) S + X' Diag(exp(u_C - u)) Z. Reading before the write takes u_{t-1} for u_t and a strict mask in P.
With G the cotangent of what the chunk leaves, dZ = P' dO + Diag(exp(u_C - u)) X G, that of what it finds is
exp(u_C) G + Q' Diag(exp(u)) dO - W' dZ. With Y = A^-T dZ, dP = tril(exp(u_t - u_s) * dO Z') and
dA = -tril(exp(u_{i-1} - u_s) * Y Z', -1), the gradients are dV = Diag(eta) Y, dQ = dP X + Diag(exp(u)) dO S' and

    dX = Diag(eta) F + dP' Q + dA' Diag(eta) X + Diag(exp(u_C - u)) Z G'     F = dA X - Diag(exp(u_{i-1})) A^-T dZ S',

The gradient of eta is the row sum of Y * Z / eta. That of a step's decay is a sum over the pairs of tokens that it lies
between, of dA * (A - I) and dP * P: their row sums from its token on, where pairs are compared and read, less their
column sums, where they are written, with what depends on S and G in both. Pairs on one side of it have to cancel, so
both are of the same numbers: of Diag(eta) dA * X X' before it is rounded to an operand, since where keys are alike the
pairs between cancel too, and of dP as the operand that it is, the same either way round. Sums without pairs, as
Y * (Z - eta V) for a row of dA and Z * dZ for columns of both, would keep the rounding of every pair behind a decay.

Where rows, heads and tiles of value channels fill the card (`launch.fused`), a pass over chunks does all that
follows from A^-1, in turn R = Diag(eta) (V - Diag(exp(u_{t-1})) X S), Z = A^-1 R, S, O; and back, dZ, Y, G:

    forward    invert         eta, u, A^-1     one program per (chunk, head), of one warp
               whole          Z, S, O          one program per (sequence, head, V tile), over the chunks
    backward   reverse_whole  Y, G             one program per (sequence, head, V tile), backwards over the chunks
               gradients      all others       one program per (chunk, head)

With few sequences a chain of four or five dependent products a chunk would be all of the time. There, everything that
does not depend from chunk to chunk is left out of the passes, which leaves two:

    forward    invert         eta, u, A^-1     as above
               prepare        W, U             one program per (chunk, head)
               carry          Z, S             one program per (sequence, head, V tile), over the chunks
               read           O                one program per (chunk, head, V tile)
    backward   prepare        W, P' dO         one program per (chunk, head)
               reverse        dZ, G            one program per (sequence, head, V tile), backwards over the chunks
               gradients      Y, all others    as above

All passes hold S' and G', [V, K], so that products have what the last one left as a left operand, in registers. Chunk
states are stored that way round too. The last kernel ends with the gradients of the schedule: each pair is of one token
here, so that what its energy asks for is known where its gradient is.

A^-1 has 4 bytes an element, of bfloat16 in two parts, and ten of its sixteen blocks are stored. Kept for the backward
are A^-1, S and Z.
W, where it is needed, is formed again as fast as it is read, and would be a sixth of what is kept. The backward has it
where the gradient of q will be, and Y or dZ where that of v will be if all value channels are one tile: beside
gradients it needs room for G alone.

Decays enter as exp(u_t - u_s), s <= t only. The schedule sums u, for other than bfloat16 inputs in two parts
(triton_schedule.py), so that a difference is as accurate as if no other step were in it.
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
    load_rows_again,
    load_tile,
    operand_dtype,
    span,
    store_rows,
    store_tile,
    token_rows,
    x_rows,
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
    steps,
    store_running,
    u_at_end,
)

CHUNK = 64
LEAST = tl.constexpr(1e-30)  # a smaller step size of a pair is taken as this: eta's gradient needs Z / eta
STORED = tl.constexpr(10 * 16 * 16)  # of each part of A^-1: the blocks of 16 tokens on and below the diagonal


@triton.jit
def _tile_at(base, token, head, heads, i, WIDTH: tl.constexpr):
    """`token_rows` for `load_tile`."""
    return base + (token * heads + head) * WIDTH, i * (heads * WIDTH)


@triton.jit
def _turned(rows, columns, there, WIDTH: tl.constexpr):
    """[columns, R] pointers and mask of rows of WIDTH numbers."""
    if (columns.shape[0] * 0 + WIDTH) % columns.shape[0] == 0:  # an int beside a constexpr in the interpreter
        return rows[None, :] + columns[:, None], there[None, :]
    else:
        return rows[None, :] + columns[:, None], there[None, :] & (columns < WIDTH)[:, None]


@triton.jit
def _load_turned(rows, columns, there, WIDTH: tl.constexpr):
    """[columns, R] of rows of WIDTH numbers, 0 past the width and where not `there`."""
    at, mask = _turned(rows, columns, there, WIDTH)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _along(bounds, first, length, longest, heads, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr):
    """Of a program that goes along a sequence: its value channels, its sequence and head, the sequence's first token
    and length, and the number of its first chunk."""
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tl.cdiv(V, BV)).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tl.cdiv(V, BV)
    sequence = program // heads
    low, count = span(sequence, bounds, length, PACKED)
    number = tl.load(first + sequence) if PACKED else sequence * longest
    return columns, sequence, program % heads, low, count, number


@triton.jit
def _load_state(state, columns, kk, V: tl.constexpr, K: tl.constexpr):
    """[columns, kk] of a chunk state, 0 past its V rows and K columns."""
    if (columns.shape[0] * 0 + V) % columns.shape[0] == 0 and (kk.shape[0] * 0 + K) % kk.shape[0] == 0:
        return tl.load(state + (columns * K)[:, None] + kk[None, :])
    else:
        return load_rows(state + columns * K, columns < V, kk, K)


@triton.jit
def _running(log_decay, places, i, LAG: tl.constexpr, OPERAND: tl.constexpr):
    """u of the places i of the chunk that `log_decay` points to, or of those LAG before, in two parts."""
    there = i >= LAG
    coarse = tl.load(log_decay + i - LAG, mask=there, other=0.0) if LAG else tl.load(log_decay + i)
    if tl.bfloat16 == OPERAND:
        return coarse, tl.zeros(i.shape, tl.float32)
    elif LAG:
        return coarse, tl.load(log_decay + places + i - LAG, mask=there, other=0.0)
    else:
        return coarse, tl.load(log_decay + places + i)


@triton.jit
def _settled(sums, i):
    """The same numbers by way of shared memory. The compiler puts off other sums, and keeps what they are of, until it
    runs out of registers; and numbers of a chunk that rows are multiplied by it would else compute in every thread."""
    return tl.gather(sums, i, 0)


# The inverse


@triton.jit
def _halves(a):
    """Two bfloat16 whose sum has 16 bits of a, cut off, not rounded: no instructions but to pack them."""
    bits = a.to(tl.uint32, bitcast=True)
    low = (a - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)
    high, low = (bits >> 16).to(tl.uint16), (low >> 16).to(tl.uint16)
    return high.to(tl.bfloat16, bitcast=True), low.to(tl.bfloat16, bitcast=True)


@triton.jit
def _exact(a, b, total, OPERAND: tl.constexpr):
    """total + a b of float32, of 16 bits of them where operands are bfloat16."""
    if tl.bfloat16 == OPERAND:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high, total)))
    else:
        return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _left_wide(a, b, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b with a in float32 or, where b is bfloat16, in 16 bits of it: with less, W and U of keys that repeat
    at gains near 2 lose another two bits."""
    if tl.bfloat16 == OPERAND:
        high, low = _halves(a)
        return tl.dot(high, b, tl.dot(low, b, total))
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _right_wide(a, b, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b with b in float32 or, where a is bfloat16, in 16 bits of it."""
    if tl.bfloat16 == OPERAND:
        high, low = _halves(b)
        return tl.dot(a, high, tl.dot(a, low, total))
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _dot16(a, b, OPERAND: tl.constexpr):
    """a b, wider than what the inverse is stored in. For bfloat16, b is given transposed: an accumulator [16, 16] of
    bfloat16 is a left operand as it lies, and a right operand once it is turned."""
    if tl.bfloat16 == OPERAND:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(tl.trans(b))
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _right16(a, b, b_right, OPERAND: tl.constexpr):
    """a b as a right operand of `_dot16`; `b_right` is b as one."""
    if tl.bfloat16 == OPERAND:
        return _dot16(b_right, a, OPERAND)
    else:
        return _dot16(a, b, OPERAND)


@triton.jit
def _both16(a, b_right, OPERAND: tl.constexpr):
    """a b, and that as a right operand of `_dot16`."""
    product = _dot16(a, b_right, OPERAND)
    if tl.bfloat16 == OPERAND:
        return product, _dot16(b_right, a, OPERAND)
    else:
        return product, product


@triton.jit
def _invert16(n, right, i, OPERAND: tl.constexpr):
    """(I + n)^-1 and that as a right operand, of a strictly lower triangular n [16, 16] and that as a right operand,
    from blocks of 4 to 8 to 16: no power of n above 3."""
    eight = i[:, None] // 8 == i[None, :] // 8
    four = i[:, None] // 4 == i[None, :] // 4
    apart = eight & (i[:, None] // 4 != i[None, :] // 4)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    d, d_right = tl.where(four, n, 0.0), tl.where(four, right, 0.0)
    square, square_right = _both16(d, d_right, OPERAND)
    cube, cube_right = _both16(d, square_right, OPERAND)
    a, a_right = one - d + (square - cube), one - d_right + (square_right - cube_right)
    change, change_right = _both16(_dot16(a, tl.where(apart, right, 0.0), OPERAND), a_right, OPERAND)
    a, a_right = a - change, a_right - change_right
    change, change_right = _both16(_dot16(a, tl.where(eight, 0.0, right), OPERAND), a_right, OPERAND)
    return a - change, a_right - change_right


@triton.jit
def _gram(a, b, total):
    """total + a b'. Where keys repeat and gains are near 2, a rounding of x'x counts as often as the chunk has steps:
    float32 is rounded here, not truncated as by tensor cores."""
    return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit
def _diagonal_of(gram, i):
    return tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), 1)


@triton.jit
def _coupling(eta, gram, before_c, before_f, uc, uf):
    """A block of -A below its diagonal blocks."""
    every = eta[:, None] == eta[:, None]
    return -eta[:, None] * gram * between(before_c[:, None], before_f[:, None], uc[None, :], uf[None, :], every)


@triton.jit
def _diagonal(eta, gram, before_c, before_f, uc, uf, i, OPERAND: tl.constexpr):
    """The inverse of a diagonal block of A, and that as a right operand."""
    strict = i[:, None] > i[None, :]
    n = eta[:, None] * gram * between(before_c[:, None], before_f[:, None], uc[None, :], uf[None, :], strict)
    right = n
    if tl.bfloat16 == OPERAND:
        strict = i[None, :] > i[:, None]
        decay = between(before_c[None, :], before_f[None, :], uc[:, None], uf[:, None], strict)
        right = eta[None, :] * gram * decay
    return _invert16(n, right, i, OPERAND)


@triton.jit
def _store_block(base, i, number: tl.constexpr, block, OPERAND: tl.constexpr):
    at = base + number * 256 + i[:, None] * 16 + i[None, :]
    if tl.bfloat16 == OPERAND:
        rounded = block.to(tl.bfloat16)
        tl.store(at, rounded)
        tl.store(at + STORED, (block - rounded.to(tl.float32)).to(tl.bfloat16))
    else:
        tl.store(at, block)


@triton.jit
def _inverse_of(inverse, chunk, row, column, part: tl.constexpr, OPERAND: tl.constexpr):
    """A^-1 of a chunk and head, of bfloat16 the part 0 that is rounded to it, or 1, the rest. The blocks of 16 x 16
    lie row by row of blocks, without those above the diagonal, which are zero."""
    parts: tl.constexpr = 2 if tl.bfloat16 == OPERAND else 1
    r, c = row // 16, column // 16
    within = row % 16 * 16 + column % 16
    at = inverse + (chunk * parts + part) * STORED + (r * (r + 1) // 2 + c) * 256 + within
    return tl.load(at, mask=r >= c, other=0.0)


@triton.jit(do_not_specialize=NUMBERS)
def _invert(
    k, gain, ridge, previous, previous_valid, lengths, weight, log_decay, energy, inverse,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, EPSILON: tl.constexpr,
    FLOOR: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The schedule and A^-1 of one chunk of one head, in blocks of 16 tokens. Energies are the diagonal of X X'."""
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * C, log_decay + program * C
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    step = tl.arange(0, C)
    real = count
    if MASKED:
        real = tl.load(lengths + sequence).to(tl.int32)
    active = pair_exists(start + step, real, previous_valid, previous_valid, sequence, 1, SHIFT, CARRIED)
    token = (low + start + step) * heads + head
    beta, base = gain_and_ridge(gain, ridge, token, active, RIDGE)
    i = tl.arange(0, 16)
    p0 = start + i
    p1, p2, p3 = p0 + 16, p0 + 32, p0 + 48
    in0, in1, in2, in3 = p0 < count, p1 < count, p2 < count, p3 < count
    x0 = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    x1 = x_rows(k, previous, previous, sequence, low, start, i + 16, head, heads, K, 1, SHIFT, CARRIED)
    x2 = x_rows(k, previous, previous, sequence, low, start, i + 32, head, heads, K, 1, SHIFT, CARRIED)
    x3 = x_rows(k, previous, previous, sequence, low, start, i + 48, head, heads, K, 1, SHIFT, CARRIED)
    there0 = exists(p0, in0, SHIFT, CARRIED)

    none = tl.zeros([16, 16], tl.float32)
    g00, g11, g22, g33 = none, none, none, none
    g10, g20, g21, g30, g31, g32 = none, none, none, none, none, none
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        a0, a1 = load_rows(x0, there0, kk, K).to(OPERAND), load_rows(x1, in1, kk, K).to(OPERAND)
        a2, a3 = load_rows(x2, in2, kk, K).to(OPERAND), load_rows(x3, in3, kk, K).to(OPERAND)
        g00, g11 = _gram(a0, a0, g00), _gram(a1, a1, g11)
        g22, g33 = _gram(a2, a2, g22), _gram(a3, a3, g33)
        g10, g32 = _gram(a1, a0, g10), _gram(a3, a2, g32)
        g20, g21 = _gram(a2, a0, g20), _gram(a2, a1, g21)
        g30, g31 = _gram(a3, a0, g30), _gram(a3, a1, g31)

    statistic = tl.join(
        tl.join(_diagonal_of(g00, i), _diagonal_of(g22, i)), tl.join(_diagonal_of(g11, i), _diagonal_of(g33, i))
    )
    statistic = _settled(tl.reshape(tl.permute(statistic, (1, 2, 0)), [C]), step)
    eta, decay = steps(beta, base, statistic, active, RIDGE, DIRECT, True, EPSILON, FLOOR)
    eta = tl.where(active & (tl.abs(eta) < LEAST), LEAST, eta)
    tl.store(weight + step, eta)
    tl.store(energy + program * C + step, statistic)
    store_running(log_decay + step, places, decay, 1 if tl.bfloat16 == OPERAND else 2)
    tl.debug_barrier()

    e0 = tl.load(weight + i)
    e1 = tl.load(weight + i + 16)
    e2 = tl.load(weight + i + 32)
    e3 = tl.load(weight + i + 48)
    c0, f0 = _running(log_decay, places, i, 0, OPERAND)
    c1, f1 = _running(log_decay, places, i + 16, 0, OPERAND)
    c2, f2 = _running(log_decay, places, i + 32, 0, OPERAND)
    c3, f3 = _running(log_decay, places, i + 48, 0, OPERAND)
    bc0, bf0 = _running(log_decay, places, i, 1, OPERAND)
    bc1, bf1 = _running(log_decay, places, i + 16, 1, OPERAND)
    bc2, bf2 = _running(log_decay, places, i + 32, 1, OPERAND)
    bc3, bf3 = _running(log_decay, places, i + 48, 1, OPERAND)

    # Regions of their own, though the condition is always met: the compiler takes time with the square and more of the
    # products in one.
    a00, a11, a22, a33, r00, r11, r22 = none, none, none, none, none, none, none
    if start < count:
        a00, r00 = _diagonal(e0, g00, bc0, bf0, c0, f0, i, OPERAND)
        a11, r11 = _diagonal(e1, g11, bc1, bf1, c1, f1, i, OPERAND)
    if start < count:
        a22, r22 = _diagonal(e2, g22, bc2, bf2, c2, f2, i, OPERAND)
        a33, _ = _diagonal(e3, g33, bc3, bf3, c3, f3, i, OPERAND)

    n10 = _coupling(e1, g10, bc1, bf1, c0, f0)
    n20, n21 = _coupling(e2, g20, bc2, bf2, c0, f0), _coupling(e2, g21, bc2, bf2, c1, f1)
    n30, n31 = _coupling(e3, g30, bc3, bf3, c0, f0), _coupling(e3, g31, bc3, bf3, c1, f1)
    n32 = _coupling(e3, g32, bc3, bf3, c2, f2)
    a10, r10 = _both16(a11, _right16(n10, a00, r00, OPERAND), OPERAND)
    a21, r21 = _both16(a22, _right16(n21, a11, r11, OPERAND), OPERAND)
    a32 = _dot16(a33, _right16(n32, a22, r22, OPERAND), OPERAND)
    sums = _right16(n20, a00, r00, OPERAND) + _right16(n21, a10, r10, OPERAND)
    a20, r20 = _both16(a22, sums, OPERAND)
    sums = _right16(n31, a11, r11, OPERAND) + _right16(n32, a21, r21, OPERAND)
    a31 = _dot16(a33, sums, OPERAND)
    sums = _right16(n30, a00, r00, OPERAND) + _right16(n31, a10, r10, OPERAND) + _right16(n32, a20, r20, OPERAND)
    a30 = _dot16(a33, sums, OPERAND)

    into = inverse + program * (2 if tl.bfloat16 == OPERAND else 1) * STORED
    _store_block(into, i, 0, a00, OPERAND)
    _store_block(into, i, 1, a10, OPERAND)
    _store_block(into, i, 2, a11, OPERAND)
    _store_block(into, i, 3, a20, OPERAND)
    _store_block(into, i, 4, a21, OPERAND)
    _store_block(into, i, 5, a22, OPERAND)
    _store_block(into, i, 6, a30, OPERAND)
    _store_block(into, i, 7, a31, OPERAND)
    _store_block(into, i, 8, a32, OPERAND)
    _store_block(into, i, 9, a33, OPERAND)


# What does not depend on other chunks


@triton.jit(do_not_specialize=NUMBERS)
def _prepare(
    q, k, values, previous, weight, log_decay, inverse, w, out, bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, ADJOINT: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """W, and from `values` U; or P' dO where ADJOINT, with values = dO."""
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * C, log_decay + program * C
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, C)
    place = start + i
    here = place < count
    eta = tl.load(weight + i)
    before_c, before_f = _running(log_decay, places, i, 1, OPERAND)
    x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    there = exists(place, here, SHIFT, CARRIED)

    solved = _inverse_of(inverse, program, i[:, None], i[None, :], 0, OPERAND).to(tl.float32)
    if tl.bfloat16 == OPERAND:
        solved += _inverse_of(inverse, program, i[:, None], i[None, :], 1, OPERAND).to(tl.float32)
    left = solved * (eta * tl.exp2(before_c + before_f))[None, :]
    scores = tl.zeros([C, C], tl.float32)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        w_at = token_rows(w, low + start, i, head, heads, K)
        store_rows(w_at, _left_wide(left, x, tl.zeros(x.shape, tl.float32), OPERAND, PRECISION), here, kk, K)
        if ADJOINT:
            queries = load_rows(token_rows(q, low + start, i, head, heads, K), here, kk, K).to(OPERAND)
            scores = tl.dot(x, tl.trans(queries), scores, input_precision=PRECISION)
    if ADJOINT:
        uc, uf = _running(log_decay, places, i, 0, OPERAND)
        rc, rf = _running(log_decay, places, i, LAG, OPERAND)
        seen = i[None, :] >= i[:, None] + LAG
        scores *= between(rc[None, :], rf[None, :], uc[:, None], uf[:, None], seen)
        left = scores
    else:
        left = solved * eta[None, :]
    for begin in range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        y = load_rows(token_rows(values, low + start, i, head, heads, V), here, columns, V).to(OPERAND)
        if ADJOINT:
            y = tl.dot(left.to(OPERAND), y, input_precision=PRECISION)
        else:
            y = _left_wide(left, y, tl.zeros(y.shape, tl.float32), OPERAND, PRECISION)
        store_rows(token_rows(out, low + start, i, head, heads, V), y, here, columns, V)


# Forward over the chunks, and the read


@triton.jit
def _negative(at, mask, C: tl.constexpr, OPERAND: tl.constexpr):
    """What `at` points to in float32, times -1; of bfloat16 as a product. Only operands of products are loaded ahead
    through shared memory: what else is loaded for the next chunk is waited for as soon as it is asked for."""
    tile = (-tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(OPERAND)
    if tl.bfloat16 == OPERAND:
        i = tl.arange(0, C)
        return tl.dot(tile, tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(OPERAND))
    else:
        return tile


@triton.jit(do_not_specialize=NUMBERS)
def _carry(
    k, previous, log_decay, memory, w, z, states, final, bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S' of one sequence and head, a tile of its value channels, in registers over all chunks.

    Stores what each chunk finds (states [chunks, H, V, K]) and Z in the place of U.
    """
    columns, sequence, head, low, count, number = _along(bounds, first, length, longest, heads, V, BV, PACKED)
    kk, i = tl.arange(0, BK), tl.arange(0, C)
    own, inside = _turned((sequence * heads + head) * K * V + kk * V, columns, kk < K, V)
    s = tl.load(memory + own, mask=inside, other=0.0) if CARRIED else tl.zeros([BV, BK], tl.float32)
    for start in range(0, count, C):
        chunk = (number + start // C) * heads + head
        decays = log_decay + chunk * C
        store_rows(states + chunk * (V * K) + columns * K, s, columns < V, kk, K)
        place = start + i
        here = place < count
        uc, uf = _running(decays, places, i, 0, OPERAND)
        end_c, end_f = u_at_end(decays, places, C, OPERAND)
        x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x_at, exists(place, here, SHIFT, CARRIED), kk, K).to(OPERAND)
        lost = load_rows(token_rows(w, low + start, i, head, heads, K), here, kk, K)
        at, mask = _turned(token_rows(z, low + start, i, head, heads, V), columns, here, V)
        residual = -_negative(at, mask, C, OPERAND)
        residual -= tl.dot(s.to(OPERAND), tl.trans(lost), input_precision=PRECISION)
        tl.store(at, residual, mask=mask)
        residual *= tl.exp2((end_c - uc) + (end_f - uf))[None, :]
        s = tl.dot(residual.to(OPERAND), x, s * tl.exp2(end_c + end_f), input_precision=PRECISION)
    if FINAL:
        tl.store(final + own, s, mask=inside)


@triton.jit
def _halves_of(inverse, chunk, i, C: tl.constexpr, OPERAND: tl.constexpr):
    """A^-1 of a chunk and head as two operands whose sum it is; the second is not used but for bfloat16."""
    row, column = i[:, None], i[None, :]
    high = _inverse_of(inverse, chunk, row, column, 0, OPERAND)
    return high, _inverse_of(inverse, chunk, row, column, 1, OPERAND) if tl.bfloat16 == OPERAND else high


@triton.jit
def _times_halves(a, rounded, rest, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a times the sum of both: with one alone nothing is right where keys repeat at gains near 2."""
    if tl.bfloat16 == OPERAND:
        return tl.dot(a, rounded, tl.dot(a, rest))
    else:
        return tl.dot(a, rounded, input_precision=PRECISION)


@triton.jit(do_not_specialize=NUMBERS)
def _pass(
    q, k, v, previous, weight, log_decay, inverse, memory, output, states, z, final,
    bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, KEEP: tl.constexpr, FINAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O' and S' of one sequence and head, a tile of value channels, S' in registers over all chunks.

    Stores what each chunk finds (states [chunks, H, V, K]) and Z where KEEP.
    """
    columns, sequence, head, low, count, number = _along(bounds, first, length, longest, heads, V, BV, PACKED)
    kk, i = tl.arange(0, BK), tl.arange(0, C)
    own, inside = _turned((sequence * heads + head) * K * V + kk * V, columns, kk < K, V)
    s = tl.load(memory + own, mask=inside, other=0.0) if CARRIED else tl.zeros([BV, BK], tl.float32)
    values = _load_turned(token_rows(v, low, i, head, heads, V), columns, i < count, V).to(OPERAND)
    for start in range(0, count, C):
        chunk = (number + start // C) * heads + head
        decays = log_decay + chunk * C
        place = start + i
        here = place < count
        x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x_at, exists(place, here, SHIFT, CARRIED), kk, K).to(OPERAND)
        queries = load_rows(token_rows(q, low + start, i, head, heads, K), here, kk, K).to(OPERAND)
        rounded, rest = _halves_of(inverse, chunk, i, C, OPERAND)
        v_at = token_rows(v, low + start + C, i, head, heads, V)
        next_values = _load_turned(v_at, columns, place + C < count, V).to(OPERAND)
        eta = tl.load(weight + chunk * C + i)
        uc, uf = _running(decays, places, i, 0, OPERAND)
        rc, rf = _running(decays, places, i, LAG, OPERAND)
        before_c, before_f = _running(decays, places, i, 1, OPERAND)
        end_c, end_f = u_at_end(decays, places, C, OPERAND)

        found = s.to(OPERAND)
        if KEEP:
            store_rows(states + chunk * (V * K) + columns * K, found, columns < V, kk, K)
        known = tl.dot(found, tl.trans(x), input_precision=PRECISION)
        known *= _settled(eta * tl.exp2(before_c + before_f), i)[None, :]
        residual = (_settled(eta, i)[None, :] * values.to(tl.float32) - known).to(OPERAND)
        residual = _times_halves(residual, tl.trans(rounded), tl.trans(rest), OPERAND, PRECISION)
        if KEEP:
            into, mask = _turned(token_rows(z, low + start, i, head, heads, V), columns, here, V)
            tl.store(into, residual, mask=mask)
        left = (residual * _settled(tl.exp2((end_c - uc) + (end_f - uf)), i)[None, :]).to(OPERAND)
        s = tl.dot(left, x, s * tl.exp2(end_c + end_f), input_precision=PRECISION)

        scores = tl.dot(x, tl.trans(queries), input_precision=PRECISION)
        seen = i[None, :] >= i[:, None] + LAG
        scores *= between(_settled(rc, i)[None, :], rf[None, :], uc[:, None], uf[:, None], seen)
        out = tl.dot(found, tl.trans(queries), input_precision=PRECISION) * _settled(tl.exp2(rc + rf), i)[None, :]
        out = tl.dot(residual.to(OPERAND), scores.to(OPERAND), out, input_precision=PRECISION)
        into, mask = _turned(token_rows(output, low + start, i, head, heads, V), columns, here, V)
        tl.store(into, out, mask=mask)
        values = next_values
    if FINAL:
        tl.store(final + own, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _read(
    q, k, previous, log_decay, states, z, output, bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = Diag(exp(u)) Q S + P Z of one chunk, head and tile of value channels."""
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tl.cdiv(V, BV)).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tl.cdiv(V, BV)
    log_decay += program * C
    states += program * V * K
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, C)
    place = start + i
    here = place < count
    x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    there = exists(place, here, SHIFT, CARRIED)

    scores = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    for begin in range(0, K, BK):
        kk = begin + tl.arange(0, BK)
        queries = load_rows(token_rows(q, low + start, i, head, heads, K), here, kk, K).to(OPERAND)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        s = _load_state(states, columns, kk, V, K)
        scores = tl.dot(queries, tl.trans(x), scores, input_precision=PRECISION)
        out = tl.dot(queries, tl.trans(s), out, input_precision=PRECISION)
    uc, uf = _running(log_decay, places, i, 0, OPERAND)
    rc, rf = _running(log_decay, places, i, LAG, OPERAND)
    seen = i[:, None] >= i[None, :] + LAG
    scores *= between(rc[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
    out *= tl.exp2(rc + rf)[:, None]
    residual = load_rows(token_rows(z, low + start, i, head, heads, V), here, columns, V)
    out = tl.dot(scores.to(OPERAND), residual, out, input_precision=PRECISION)
    store_rows(token_rows(output, low + start, i, head, heads, V), out, here, columns, V)


# Backward


@triton.jit(do_not_specialize=NUMBERS)
def _reverse(
    q, k, previous, log_decay, w, grad_output, grad_final, grad_z, grad_states, grad_memory,
    bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """G' of one sequence and head, a tile of value channels, backwards over the chunks.

    Stores it (grad_states [chunks, H, V, K]), and dZ in the place of P' dO.
    """
    columns, sequence, head, low, count, number = _along(bounds, first, length, longest, heads, V, BV, PACKED)
    kk, i = tl.arange(0, BK), tl.arange(0, C)
    own, inside = _turned((sequence * heads + head) * K * V + kk * V, columns, kk < K, V)
    g = tl.load(grad_final + own, mask=inside, other=0.0) if FINAL else tl.zeros([BV, BK], tl.float32)
    chunks = tl.cdiv(count, C)
    for back in range(0, chunks):
        start = (chunks - 1 - back) * C
        chunk = (number + chunks - 1 - back) * heads + head
        decays = log_decay + chunk * C
        store_rows(grad_states + chunk * (V * K) + columns * K, g, columns < V, kk, K)
        place = start + i
        here = place < count
        uc, uf = _running(decays, places, i, 0, OPERAND)
        rc, rf = _running(decays, places, i, LAG, OPERAND)
        end_c, end_f = u_at_end(decays, places, C, OPERAND)
        x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x_at, exists(place, here, SHIFT, CARRIED), kk, K).to(OPERAND)
        queries = load_rows(token_rows(q, low + start, i, head, heads, K), here, kk, K).to(OPERAND)
        lost = load_rows(token_rows(w, low + start, i, head, heads, K), here, kk, K)
        given = _load_turned(token_rows(grad_output, low + start, i, head, heads, V), columns, here, V)
        given = given.to(tl.float32) * tl.exp2(rc + rf)[None, :]
        at, mask = _turned(token_rows(grad_z, low + start, i, head, heads, V), columns, here, V)
        dz = tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        dz = dz * tl.exp2((end_c - uc) + (end_f - uf))[None, :] - _negative(at, mask, C, OPERAND)
        tl.store(at, dz, mask=mask)
        g = tl.dot(given.to(OPERAND), queries, g * tl.exp2(end_c + end_f), input_precision=PRECISION)
        g = tl.dot((-dz).to(OPERAND), lost, g, input_precision=PRECISION)
    if CARRIED:
        tl.store(grad_memory + own, g, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _reverse_pass(
    q, k, previous, weight, log_decay, inverse, grad_output, grad_final, y, grad_states, grad_memory,
    bounds, first, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """G' of one sequence and head, a tile of value channels, in registers backwards over all chunks.

    Stores it (grad_states [chunks, H, V, K]) and Y.
    """
    columns, sequence, head, low, count, number = _along(bounds, first, length, longest, heads, V, BV, PACKED)
    kk, i = tl.arange(0, BK), tl.arange(0, C)
    own, inside = _turned((sequence * heads + head) * K * V + kk * V, columns, kk < K, V)
    g = tl.load(grad_final + own, mask=inside, other=0.0) if FINAL else tl.zeros([BV, BK], tl.float32)
    chunks = tl.cdiv(count, C)
    for back in range(0, chunks):
        start = (chunks - 1 - back) * C
        chunk = (number + chunks - 1 - back) * heads + head
        decays = log_decay + chunk * C
        store_rows(grad_states + chunk * (V * K) + columns * K, g, columns < V, kk, K)
        place = start + i
        here = place < count
        x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x_at, exists(place, here, SHIFT, CARRIED), kk, K).to(OPERAND)
        queries = load_rows(token_rows(q, low + start, i, head, heads, K), here, kk, K).to(OPERAND)
        given = _load_turned(token_rows(grad_output, low + start, i, head, heads, V), columns, here, V).to(OPERAND)
        rounded, rest = _halves_of(inverse, chunk, i, C, OPERAND)
        eta = tl.load(weight + chunk * C + i)
        uc, uf = _running(decays, places, i, 0, OPERAND)
        rc, rf = _running(decays, places, i, LAG, OPERAND)
        before_c, before_f = _running(decays, places, i, 1, OPERAND)
        end_c, end_f = u_at_end(decays, places, C, OPERAND)

        scores = tl.dot(queries, tl.trans(x), input_precision=PRECISION)
        seen = i[:, None] >= i[None, :] + LAG
        scores *= between(rc[:, None], rf[:, None], _settled(uc, i)[None, :], uf[None, :], seen)
        dz = tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        dz *= _settled(tl.exp2((end_c - uc) + (end_f - uf)), i)[None, :]
        dz = tl.dot(given, scores.to(OPERAND), dz, input_precision=PRECISION)
        solved = _times_halves(dz.to(OPERAND), rounded, rest, OPERAND, PRECISION)
        into, mask = _turned(token_rows(y, low + start, i, head, heads, V), columns, here, V)
        tl.store(into, solved, mask=mask)
        given = (given.to(tl.float32) * _settled(tl.exp2(rc + rf), i)[None, :]).to(OPERAND)
        g = tl.dot(given, queries, g * tl.exp2(end_c + end_f), input_precision=PRECISION)
        solved *= _settled(-eta * tl.exp2(before_c + before_f), i)[None, :]
        g = tl.dot(solved.to(OPERAND), x, g, input_precision=PRECISION)
    if CARRIED:
        tl.store(grad_memory + own, g, mask=inside)


@triton.jit
def _product(a, b):
    """Sum of a * b over all elements."""
    return tl.sum(a.to(tl.float32) * b.to(tl.float32))


@triton.jit
def _solved(rounded, rest, y_or_dz, SOLVED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Y in float32; `rounded` and `rest` are those of A^-1."""
    if SOLVED:
        return y_or_dz.to(tl.float32)
    elif tl.bfloat16 == OPERAND:
        return tl.dot(tl.trans(rounded), y_or_dz, tl.dot(tl.trans(rest), y_or_dz))
    else:
        return tl.dot(tl.trans(rounded), y_or_dz, input_precision=PRECISION)


@triton.jit(do_not_specialize=NUMBERS)
def _gradients(
    q, k, gain, ridge, previous, previous_valid, lengths, weight, log_decay, energy, inverse, states, z,
    grad_output, y_or_dz, grad_states, grad_q, grad_k, grad_v, grad_gain, grad_ridge, grad_previous,
    bounds, first, owner, length, longest, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    CARRIED: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, RIDGE: tl.constexpr,
    DIRECT: tl.constexpr, DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr, SOLVED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one head: of q, v and the write features where their keys lie, of gain and ridge.
    From Y where SOLVED, else from dZ.

    Products [C, C] that are left operands both ways round are formed twice, not transposed. Where all value channels
    are one tile, operands of products are loaded once, before all products, and the gradient of v may lie where Y or dZ
    does. Else a pass over the value channels forms these products, with Y in the place of dZ, and one for each tile of
    keys what is of S and G: loops of loads and products alone, so that loads are far ahead.
    """
    program = tl.program_id(0).to(tl.int64)
    weight, log_decay = weight + program * C, log_decay + program * C
    states, grad_states = states + program * V * K, grad_states + program * V * K
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    i = tl.arange(0, C)
    place = start + i
    here = place < count
    there = exists(place, here, SHIFT, CARRIED)
    real = count
    if MASKED:
        real = tl.load(lengths + sequence).to(tl.int32)
    row = (low + place) * heads + head
    active = pair_exists(place, real, previous_valid, previous_valid, sequence, 1, SHIFT, CARRIED)
    beta, coefficient = gain_and_ridge(gain, ridge, row, active, RIDGE)
    statistic = tl.load(energy + program * C + i)
    given_at = token_rows(grad_output, low + start, i, head, heads, V)
    y_at = token_rows(y_or_dz, low + start, i, head, heads, V)
    z_at = token_rows(z, low + start, i, head, heads, V)
    q_at = token_rows(q, low + start, i, head, heads, K)
    x_at = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    kk, columns = tl.arange(0, BK), tl.arange(0, BV)
    eta = tl.load(weight + i)
    uc, uf = _running(log_decay, places, i, 0, OPERAND)
    rc, rf = _running(log_decay, places, i, LAG, OPERAND)
    before_c, before_f = _running(log_decay, places, i, 1, OPERAND)
    end_c, end_f = u_at_end(log_decay, places, C, OPERAND)
    minus = _settled(-eta * tl.exp2((before_c - rc) + (before_f - rf)), i)
    into = x_rows(grad_k, grad_previous, grad_previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    read, gram, dx = tl.zeros([C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    if V > BV:
        given_at = _tile_at(grad_output, low + start, head, heads, i, V)
        y_at = _tile_at(y_or_dz, low + start, head, heads, i, V)
        z_at = _tile_at(z, low + start, head, heads, i, V)
        rounded, rest = eta, eta
        if not SOLVED:
            rounded, rest = _halves_of(inverse, program, i, C, OPERAND)
        scores, system, scores_turned, system_turned, gained = gram, gram, gram, gram, read
        for begin in range(0, V, BV):
            columns = begin + tl.arange(0, BV)
            given = load_tile(given_at, here, columns, V).to(OPERAND)
            residual = load_tile(z_at, here, columns, V)
            y = _solved(rounded, rest, load_tile(y_at, here, columns, V), SOLVED, OPERAND, PRECISION)
            found = y.to(OPERAND)
            if not SOLVED:
                store_tile(y_at, found, here, columns, V)
            gained += tl.sum(y * residual.to(tl.float32), 1)
            store_tile(_tile_at(grad_v, low + start, head, heads, i, V), eta[:, None] * y, here, columns, V)
            scores = tl.dot(given, tl.trans(residual), scores, input_precision=PRECISION)
            system = tl.dot(found, tl.trans(residual), system, input_precision=PRECISION)
            scores_turned = tl.dot(residual, tl.trans(given), scores_turned, input_precision=PRECISION)
            system_turned = tl.dot(residual, tl.trans(found), system_turned, input_precision=PRECISION)
        for begin in range(0, K, BK):
            x = load_rows(x_at, there, begin + tl.arange(0, BK), K).to(OPERAND)
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        seen, later = i[:, None] >= i[None, :] + LAG, i[:, None] > i[None, :]
        decay = between(_settled(rc, i)[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
        scores_left = (scores * decay).to(OPERAND)
        system *= tl.where(later, decay, 0.0) * minus[:, None]
        owed = tl.sum(system * gram, 1)
        system_left = system.to(OPERAND)
        seen, later = i[None, :] >= i[:, None] + LAG, i[None, :] > i[:, None]
        decay = between(rc[None, :], rf[None, :], _settled(uc, i)[:, None], uf[:, None], seen)
        scores_right = (scores_turned * decay).to(OPERAND)
        system_turned *= tl.where(later, decay, 0.0) * minus[None, :]
        written = tl.sum(system_turned * gram, 1)
        system_right = system_turned.to(OPERAND)
        tl.debug_barrier()  # Y has been stored

        kept, both = 0.0, tl.zeros([BV, BK // 8], tl.float32)
        none = dx
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            dq, dx, left = none, none, none
            for begin in range(0, V, BV):
                columns = begin + tl.arange(0, BV)
                given = load_tile(given_at, here, columns, V).to(OPERAND)
                found = load_tile(y_at, here, columns, V).to(OPERAND)
                residual = load_tile(z_at, here, columns, V)
                s = _load_state(states, columns, kk, V, K)
                g = _load_state(grad_states, columns, kk, V, K)
                both += tl.sum(tl.reshape(s.to(tl.float32) * g.to(tl.float32), (BV, BK // 8, 8)), 2)
                dq = tl.dot(given, s, dq, input_precision=PRECISION)
                dx = tl.dot(found, s, dx, input_precision=PRECISION)
                left = tl.dot(residual, g, left, input_precision=PRECISION)
            x = load_rows(x_at, there, kk, K).to(OPERAND)
            queries = load_rows(q_at, here, kk, K).to(OPERAND)
            dq = tl.dot(scores_left, x, dq * tl.exp2(rc + rf)[:, None], input_precision=PRECISION)
            store_rows(token_rows(grad_q, low + start, i, head, heads, K), dq, here, kk, K)
            read += tl.sum(queries.to(tl.float32) * dq, 1)
            dx *= (minus * tl.exp2(rc + rf))[:, None]
            owed += tl.sum(x.to(tl.float32) * dx, 1)
            dx = tl.dot(system_left, x, dx, input_precision=PRECISION)
            left *= tl.exp2((end_c - uc) + (end_f - uf))[:, None]
            kept += _product(x, left)
            left = tl.dot(scores_right, queries, left, input_precision=PRECISION)
            written += tl.sum(x.to(tl.float32) * left, 1)
            dx = tl.dot(system_right, x, left + dx, input_precision=PRECISION)
            store_rows(into, dx, there, kk, K)
        kept += tl.sum(both) * tl.exp2(end_c + end_f)
    else:
        given = load_rows(given_at, here, columns, V).to(OPERAND)
        residual = load_rows(z_at, here, columns, V)
        s = _load_state(states, columns, kk, V, K)
        x = load_rows(x_at, there, kk, K).to(OPERAND)
        queries = load_rows(q_at, here, kk, K).to(OPERAND)
        g = _load_state(grad_states, columns, kk, V, K)
        y = load_rows(y_at, here, columns, V)  # last: it goes through shared memory first, and others would wait
        rounded, rest = y, y
        if not SOLVED:
            rounded, rest = _halves_of(inverse, program, i, C, OPERAND)
        kept = _product(s, g) * tl.exp2(end_c + end_f)

        # dP, and Diag(eta) dA without exp(u_{i-1} - r_i), which Y has already
        y = _solved(rounded, rest, y, SOLVED, OPERAND, PRECISION)
        found = (minus[:, None] * y).to(OPERAND)
        gained = _settled(tl.sum(y * residual.to(tl.float32), 1), i)
        store_rows(token_rows(grad_v, low + start, i, head, heads, V), eta[:, None] * y, here, columns, V)
        scores = tl.dot(given, tl.trans(residual), input_precision=PRECISION)
        seen = i[:, None] >= i[None, :] + LAG
        decay = between(_settled(rc, i)[:, None], rf[:, None], uc[None, :], uf[None, :], seen)
        scores_left = (scores * decay).to(OPERAND)
        if LAG == 0:
            decay = tl.where(i[:, None] == i[None, :], 0.0, decay)
        system = tl.dot(found, tl.trans(residual), input_precision=PRECISION) * decay
        for begin in range(0, K, BK):
            if K > BK:
                x = load_rows(x_at, there, begin + tl.arange(0, BK), K).to(OPERAND)
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        owed = _settled(tl.sum(system * gram, 1), i)
        system_left = system.to(OPERAND)

        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            if K > BK:
                x = load_rows(x_at, there, kk, K).to(OPERAND)
                s = _load_state(states, columns, kk, V, K)
            q_again = load_rows_again(q_at, here, kk, K)
            dq = tl.dot(given, s, input_precision=PRECISION) * tl.exp2(rc + rf)[:, None]
            dq = tl.dot(scores_left, x, dq, input_precision=PRECISION)
            store_rows(token_rows(grad_q, low + start, i, head, heads, K), dq, here, kk, K)
            read += tl.sum(q_again.to(tl.float32) * dq, 1)
        read = _settled(read, i)

        scores = tl.dot(residual, tl.trans(given), input_precision=PRECISION)
        seen = i[None, :] >= i[:, None] + LAG
        decay = between(rc[None, :], rf[None, :], _settled(uc, i)[:, None], uf[:, None], seen)
        scores_right = (scores * decay).to(OPERAND)
        if LAG == 0:
            decay = tl.where(i[:, None] == i[None, :], 0.0, decay)
        system = tl.dot(residual, tl.trans(found), input_precision=PRECISION) * decay
        written = _settled(tl.sum(system * gram, 1), i)
        system_right = system.to(OPERAND)

        if K > BK:
            kept = 0.0
        x_again = load_rows_again(x_at, there, tl.arange(0, BK), K)
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            if K > BK:
                x = load_rows(x_at, there, kk, K).to(OPERAND)
                queries = load_rows(q_at, here, kk, K).to(OPERAND)
                s = _load_state(states, columns, kk, V, K)
            x_again = load_rows_again(x_at, there, kk, K)
            dx = tl.dot(found, s, input_precision=PRECISION) * tl.exp2(rc + rf)[:, None]
            owed = _settled(owed + tl.sum(x_again.to(tl.float32) * dx, 1), i)
            dx = tl.dot(system_left, x, dx, input_precision=PRECISION)

            if K > BK:
                g = _load_state(grad_states, columns, kk, V, K)
                kept += _product(s, g) * tl.exp2(end_c + end_f)
            left = tl.dot(residual, g, input_precision=PRECISION)
            left *= tl.exp2((end_c - uc) + (end_f - uf))[:, None]
            kept += _product(x_again, left)
            left = tl.dot(scores_right, queries, left, input_precision=PRECISION)
            written = _settled(written + tl.sum(x_again.to(tl.float32) * left, 1), i)
            dx = tl.dot(system_right, x, left + dx, input_precision=PRECISION)
            if K > BK:  # until what the energy asks for is known
                store_rows(into, dx, there, kk, K)
    if SHIFT:  # the last key is a write feature of the next call, through the state
        last = grad_k + ((low + count - 1) * heads + head) * K
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            tl.store(last + kk, tl.zeros([BK], grad_k.dtype.element_ty), mask=(kk < K) & (start + C >= count))

    # Cotangents: of u_C `kept`, of u_t -`written`, of u_{t-1} `owed`, `read` of the one that is read. A step's decay is
    # in u_t from its own token on, in u_{t-1} from the next.
    grad_eta = gained / tl.where(active, eta, 1.0)
    grad_decay = tl.cumsum(read + owed - written, 0, reverse=True) - owed - read * LAG + kept

    of_gain, of_ridge, of_energy = step_gradients(
        beta, coefficient, statistic, grad_eta, grad_decay, active, RIDGE, DIRECT, True, DETACH, EPSILON, FLOOR
    )
    tl.store(grad_gain + row, of_gain, mask=here)
    if RIDGE > 0:
        tl.store(grad_ridge + row, of_ridge, mask=here)
    if V > BV or K > BK:
        tl.debug_barrier()
        for beginning in range(0, K, BK):
            kk = beginning + tl.arange(0, BK)
            wide = load_rows(x_at, there, kk, K).to(tl.float32)
            own = load_rows(into, there, kk, K).to(tl.float32)
            store_rows(into, own + 2.0 * of_energy[:, None] * wide, there, kk, K)
    else:
        store_rows(into, dx + 2.0 * of_energy[:, None] * x_again.to(tl.float32), there, kk, K)


# Launches


def chunk_length(dtype: torch.dtype, key_dim: int, window: int) -> int:
    return CHUNK


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`."""
    *rows, heads, key_dim = shape
    shapes = triton_schedule.shapes(layout, heads, window, triton_schedule.parts(dtype))
    numbers = [(n, torch.float32) for n in shapes]
    wide = operand_dtype(dtype)
    states = (layout.chunks, heads, value_dim, key_dim)
    return [*numbers, *((n, wide) for n in (inverses(layout, heads, dtype), states, (*rows, heads, value_dim)))]


def inverses(layout: Layout, heads: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of A^-1 for inputs of `dtype`: in bfloat16 what is rounded to it, and the rest."""
    return layout.chunks, heads, 2 if dtype == torch.bfloat16 else 1, STORED.value


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device,
        options: Options, before: bool, masked: bool, carried: bool, aligned: bool = False,
        sizes: launch.Regression | None = None,
    ):  # fmt: skip
        *_, heads, key_dim = shape
        self.operand = operand_dtype(dtype)
        self.states = (layout.chunks, heads, value_dim, key_dim)
        self.inverse = inverses(layout, heads, dtype)
        self.schedule = triton_schedule.shapes(layout, heads, 1, triton_schedule.parts(dtype))
        self.numbers = (layout.length, layout.longest, heads, layout.chunks * heads * CHUNK)
        size = self.operand.itemsize
        key_tile, value_width = (launch.padded(d, size) for d in (key_dim, value_dim))
        sizes = sizes or launch.regression(device, size, key_tile)

        base = {
            "K": key_dim, "C": CHUNK, "SHIFT": int(options.shifted), "CARRIED": carried, "PACKED": layout.packed,
            "OPERAND": OPERANDS[self.operand],
        }  # fmt: skip
        # float16 inputs are multiplied as tf32: as precise, without the overflow of what comes from the memory
        more = {"V": value_dim, "LAG": int(before), "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32"}
        schedule = {"MASKED": masked} | options.constants()

        def launcher(kernel, programs, config, constants, *flags):
            constants = {n: c for n, c in (base | constants).items() if n in kernel.arg_names}
            return Launcher(kernel, (programs,), constants | config.options(), flags, aligned)

        def across(kernel, config, constants, *flags):
            key_width = min(key_tile, config.value_tile, config.key_tile)
            tiles = {"BK": key_width, "BV": min(value_width, config.value_tile)}
            return launcher(kernel, layout.chunks * heads, config, more | constants | tiles, *flags)

        def fitted(config):
            if value_width >= config.value_tile:
                return config
            return config._replace(value_tile=value_width, warps=4)

        rows = layout.sequences * heads

        def along(kernel, config, *flags):
            programs = rows * -(-value_dim // config.value_tile)
            return launcher(kernel, programs, config, more | {"BK": key_tile, "BV": config.value_tile}, *flags)

        def narrow(config):
            config = fitted(config)
            return launch.narrower(device, config, rows, value_dim, key_tile) if size == 2 else config

        self.invert = across(_invert, sizes.invert, schedule)
        self.fused = launch.fused(device, sizes.whole, rows, value_dim, layout.packed)
        self.gradients = across(_gradients, sizes.gradients, schedule | {"SOLVED": self.fused})
        self.in_place = dtype == self.operand and self.gradients.constants["BV"] >= value_dim  # then Y is read once
        if self.fused:
            self.whole = along(_pass, fitted(sizes.whole), "KEEP", "FINAL")
            self.reverse_whole = along(_reverse_pass, fitted(sizes.reverse_whole), "FINAL")
            return
        reading = fitted(sizes.read)
        self.prepare = across(_prepare, sizes.prepare, {}, "ADJOINT")
        self.carry = along(_carry, narrow(sizes.carry), "FINAL")
        self.read = launcher(
            _read, layout.chunks * heads * -(-value_dim // reading.value_tile), reading,
            more | {"BK": min(key_tile, 64, reading.value_tile), "BV": reading.value_tile},
        )  # fmt: skip
        self.reverse = along(_reverse, narrow(sizes.reverse), "FINAL")


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, tables, previous = call.q, call.k, call.v, call.tables, call.before.previous_key
    weight, log_decay, energy = (torch.empty(n, dtype=torch.float32, device=q.device) for n in plan.schedule)
    inverse = torch.empty(plan.inverse, dtype=plan.operand, device=q.device)
    plan.invert(
        k, call.gain, call.ridge, previous, call.before.previous_valid, call.lengths, weight, log_decay, energy,
        inverse, *tables, *plan.numbers,
    )  # fmt: skip
    states, z = None, None
    if keep or not plan.fused:
        states = torch.empty(plan.states, dtype=plan.operand, device=q.device)
        z = torch.empty(v.shape, dtype=plan.operand, device=q.device)
    if plan.fused:
        plan.whole(
            q, k, v, previous, weight, log_decay, inverse, call.memory, output, states, z, final, *tables[:2],
            *plan.numbers, flags=(keep, final is not None),
        )  # fmt: skip
        return Kept(weight, log_decay, energy, inverse, states, z)
    w = torch.empty(q.shape, dtype=plan.operand, device=q.device)
    plan.prepare(q, k, v, previous, weight, log_decay, inverse, w, z, *tables, *plan.numbers, flags=(False,))
    plan.carry(
        k, previous, log_decay, call.memory, w, z, states, final, *tables[:2], *plan.numbers,
        flags=(final is not None,),
    )  # fmt: skip
    plan.read(q, k, previous, log_decay, states, z, output, *tables, *plan.numbers)
    return Kept(weight, log_decay, energy, inverse, states, z)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, before, tables = call.q, call.k, call.before, call.tables
    weight, log_decay, energy, inverse, states, z, *_ = kept
    assert states is not None
    assert z is not None
    previous, final = before.previous_key, (grad_final is not None,)
    y_or_dz = into.v if plan.in_place else torch.empty_like(z)
    grad_states = torch.empty_like(states)
    if plan.fused:
        plan.reverse_whole(
            q, k, previous, weight, log_decay, inverse, grad_output, grad_final, y_or_dz, grad_states, into.memory,
            *tables[:2], *plan.numbers, flags=final,
        )  # fmt: skip
    else:
        w = into.q if q.dtype == plan.operand else torch.empty(q.shape, dtype=plan.operand, device=q.device)
        plan.prepare(
            q, k, grad_output, previous, weight, log_decay, inverse, w, y_or_dz, *tables, *plan.numbers, flags=(True,)
        )
        plan.reverse(
            q, k, previous, log_decay, w, grad_output, grad_final, y_or_dz, grad_states, into.memory, *tables[:2],
            *plan.numbers, flags=final,
        )  # fmt: skip
    plan.gradients(
        q, k, call.gain, call.ridge, previous, before.previous_valid, call.lengths, weight, log_decay, energy,
        inverse, states, z, grad_output, y_or_dz, grad_states, *into[:5], into.before.previous_key, *tables,
        *plan.numbers,
    )  # fmt: skip
