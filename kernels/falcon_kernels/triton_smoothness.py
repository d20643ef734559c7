"""Largest eigenvalue of the sum of x x' over each token's window (falcon_3), or its bound, and its gradient.

A chunk's tokens are the lanes of vectors: row r of a tile stands for the pair r - (W - 1) of the chunk and for the
token r, whose oldest pair that is. With B_l[r] = x_r . x_{r+l} the window of the token r has the Gram matrix

    G[a, b] = B_{b-a}[r + a]      0 <= a <= b < W,

kept as W (W + 1) / 2 vectors: diagonals of the one product X X'. Exactly, G / tr G is squared 24 times and divided by
its trace every fourth time, before which the top eigenvalue, at least 1 / W, is 8^-16 at least: it ends as a projector
onto the top eigenspace, of which a column v of the largest diagonal element is an eigenvector whether or not
eigenvalues meet. Taken as constant it gives lambda = v' G v and
D = d lambda / d G = v v'. Back: with c the gradient of what is summed over a token's window, x_a gets
2 c sum_b D[a, b] x_b. Summed over windows that is a band again, D_l[r] = sum_a (c D[a, a + l])[r - a], so that
dx_r = 2 sum_l D_l[r] x_{r+l} + D_l[r-l] x_{r-l}.

The bound, (tr G^16)^(1/16), with D = (tr G^16)^(-15/16) G^15, is for large windows, whose matrices a thread cannot
hold, and takes few products: there the windows of some tokens are the diagonal blocks of one tile of 64 rows (token,
pair), and all of them are squared by one matrix product.
"""

import triton
import triton.language as tl

from .triton_layout import exists, load_rows, moved, x_rows

SMOOTHNESS = {"trace": 0, "exact": 1, "bound": 2}
SQUARINGS = tl.constexpr(24)
UNSCALED = tl.constexpr(4)  # of them in a row, a power of 16
ROWS = tl.constexpr(64)  # (token, pair)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def window_rows(
    k, previous, tail, sequence, low, count, start, pair, head, heads, columns,
    K: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """[R, columns] float32 write features of the pairs start + pair [R], 0 past both ends of the sequence."""
    place = start + pair
    rows = x_rows(k, previous, tail, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    there = exists(place, (place < count) & (place > -W), SHIFT, CARRIED)
    return load_rows(rows, there, columns, K).to(tl.float32)


@triton.jit
def _windows(
    k, previous, tail, sequence, low, count, start, row, head, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """The Gram matrix of each token's window: a tuple of [R], upper triangles row by row."""
    pair = row - (W - 1)
    there = exists(start + pair, start + pair < count, SHIFT, CARRIED)
    at = x_rows(k, previous, tail, sequence, low, start, pair, head, heads, K, W, SHIFT, CARRIED)
    products = tl.zeros([row.shape[0], row.shape[0]], tl.float32)
    for begin in tl.static_range(0, K, BK):
        x = load_rows(at, there, begin + tl.arange(0, BK), K)
        products = tl.dot(x, tl.trans(x), products, input_precision="ieee")
    band = ()
    for lag in tl.static_range(W):
        diagonal = tl.sum(tl.where(row[None, :] == row[:, None] + lag, products, 0.0), 1)
        band += (moved(diagonal, 0, row),)
    gram = ()
    for a in tl.static_range(W):
        for b in tl.static_range(a, W):
            if a > 0:
                gram += (moved(band[b - a], a, row),)
            else:
                gram += (band[b],)
    return gram


@triton.jit
def _trace(m, W: tl.constexpr):
    total = m[0]
    for a in tl.static_range(1, W):
        total += m[a * W - a * (a - 1) // 2]
    return total


@triton.jit
def _over_trace(m, W: tl.constexpr):
    """m over its trace; zero stays zero."""
    trace = _trace(m, W)
    factor = tl.where(trace > 0, 1.0 / tl.where(trace > 0, trace, 1.0), 0.0)
    scaled = ()
    for i in tl.static_range(W * (W + 1) // 2):
        scaled += (m[i] * factor,)
    return scaled


@triton.jit
def _product(m, n, W: tl.constexpr):
    """Upper triangle of m n, of symmetric matrices that commute."""
    product = ()
    for a in tl.static_range(W):
        for b in tl.static_range(a, W):
            total = m[0] * 0.0
            for c in tl.static_range(W):
                if c < a:
                    total += m[c * W - c * (c - 1) // 2 + a - c] * n[c * W - c * (c - 1) // 2 + b - c]
                elif c < b:
                    total += m[a * W - a * (a - 1) // 2 + c - a] * n[c * W - c * (c - 1) // 2 + b - c]
                else:
                    total += m[a * W - a * (a - 1) // 2 + c - a] * n[b * W - b * (b - 1) // 2 + c - b]
            product += (total,)
    return product


@triton.jit
def _top(gram, W: tl.constexpr):
    power = _over_trace(gram, W)
    for _ in range(SQUARINGS // UNSCALED):
        for _ in tl.static_range(UNSCALED):
            power = _product(power, power, W)
        power = _over_trace(power, W)
    most = power[0]
    vector = ()
    for b in tl.static_range(W):
        vector += (power[b],)
    for a in tl.static_range(1, W):
        diagonal = power[a * W - a * (a - 1) // 2]
        better = diagonal > most
        most = tl.where(better, diagonal, most)
        chosen = ()
        for b in tl.static_range(W):
            if b < a:
                chosen += (tl.where(better, power[b * W - b * (b - 1) // 2 + a - b], vector[b]),)
            else:
                chosen += (tl.where(better, power[a * W - a * (a - 1) // 2 + b - a], vector[b]),)
        vector = chosen
    square = most * 0.0
    for a in tl.static_range(W):
        square += vector[a] * vector[a]
    factor = 1.0 / tl.maximum(tl.sqrt(square), TINY)
    value = most * 0.0
    unit = ()
    for a in tl.static_range(W):
        unit += (vector[a] * factor,)
    for a in tl.static_range(W):
        for b in tl.static_range(a, W):
            share = gram[a * W - a * (a - 1) // 2 + b - a] * (unit[a] * unit[b])
            if a == b:
                value += share
            else:
                value += 2.0 * share
    return value, unit


# In one tile


@triton.jit
def _trace_of_block(m, i, step):
    """[ROWS] of each row the trace of its token's block."""
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], m, 0.0), 1)
    return tl.sum(tl.where(step[:, None] == step[None, :], diagonal[None, :], 0.0), 1)


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _powers(
    k, previous, tail, sequence, low, count, start, i, head, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """G / tr G, its second, fourth and eighth power; [ROWS] the traces of G and of the sixteenth power."""
    step = i // W
    gram = tl.zeros([i.shape[0], i.shape[0]], tl.float32)
    for begin in range(0, K, BK):
        x = window_rows(
            k, previous, tail, sequence, low, count, start, step + i % W - (W - 1), head, heads,
            begin + tl.arange(0, BK), K, W, SHIFT, CARRIED,
        )  # fmt: skip
        gram = tl.dot(x, tl.trans(x), gram, input_precision="tf32x3")
    gram = tl.where(step[:, None] == step[None, :], gram, 0.0)
    trace = _trace_of_block(gram, i, step)
    one = gram * tl.where(trace > 0, 1.0 / tl.where(trace > 0, trace, 1.0), 0.0)[:, None]
    two = _times(one, one)
    four = _times(two, two)
    eight = _times(four, four)
    squares = tl.sum(eight * eight, 1)
    return one, two, four, eight, trace, tl.sum(tl.where(step[:, None] == step[None, :], squares[None, :], 0.0), 1)


@triton.jit
def _root(total, power):
    """total^power, 0 of 0."""
    return tl.where(total > 0, tl.exp2(tl.log2(tl.where(total > 0, total, 1.0)) * power), 0.0)


@triton.jit
def bound_gradients(
    k, previous, tail, sequence, low, count, start, i, head, heads, grad_energy,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """[ROWS, ROWS] what, times the features of the rows, is their gradient; grad_energy [ROWS] as above, by row."""
    one, two, four, eight, _, total = _powers(
        k, previous, tail, sequence, low, count, start, i, head, heads, K, BK, W, SHIFT, CARRIED
    )
    return _times(_times(eight, four), _times(two, one)) * (2.0 * grad_energy * _root(total, -15 / 16))[:, None]


# Forward


@triton.jit
def smoothness(
    k, previous, tail, sequence, low, count, start, row, head, heads,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
    SMOOTHNESS: tl.constexpr,
):  # fmt: skip
    """[R] by token, the eigenvalue or bound of the sum of x x' of its window, the bound of the first C
    only; and where exact a tuple of W components [R] of the eigenvector."""
    if SMOOTHNESS == 1:
        gram = _windows(k, previous, tail, sequence, low, count, start, row, head, heads, K, BK, W, SHIFT, CARRIED)
        return _top(gram, W)
    else:
        result = tl.zeros(row.shape, tl.float32)
        for begin in range(0, C, ROWS // W):
            _, _, _, _, trace, total = _powers(
                k, previous, tail, sequence, low, count, start + begin, tl.arange(0, ROWS), head, heads, K, BK, W,
                SHIFT, CARRIED,
            )  # fmt: skip
            inside = (row >= begin) & (row < begin + ROWS // W)
            found = tl.gather(_root(total, 1 / 16) * trace, tl.where(inside, (row - begin) * W, 0), 0)
            result = tl.where(inside, found, result)
        return result, (result,)


@triton.jit
def units(top, places, e, windowed, W: tl.constexpr):
    """[R, R] by token and pair the top eigenvectors of windows, those of a chunk being at `top`."""
    place = e[None, :] - e[:, None]
    there = (place >= 0) & (place < W) & windowed[:, None]
    return tl.load(top + place.to(tl.int64) * places + e[:, None], mask=there, other=0.0)
