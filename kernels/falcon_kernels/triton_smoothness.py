"""Largest eigenvalue of the mean x x' of each token's window (falcon_3), or its bound, and how its gradient comes back.

A chunk's tokens are the lanes of vectors: row r of a tile stands for the pair r - (W - 1) of the chunk and for the token
r, whose oldest pair that is. With B_l[r] = x_r . x_{r+l} the window of the token r has the Gram matrix

    G[a, b] = B_{b-a}[r + a]      0 <= a <= b < W,

kept as W (W + 1) / 2 vectors, so that W products a pair make all windows. Exactly, G / tr G is squared 24 times and
divided by its trace each time: it ends as a projector onto the top eigenspace, of which a column v of the largest
diagonal element is an eigenvector whether or not eigenvalues meet. Taken as constant it gives lambda = v' G v and
D = d lambda / d G = v v'. The bound is (tr G^16)^(1/16), with D = (tr G^16)^(-15/16) G^15.

Back: with c the gradient of what is summed over a token's window, x_a gets 2 c sum_b D[a, b] x_b. Summed over windows
that is a band again, D_l[r] = sum_a c[r - a] D[a, a + l] at the row r - a, so that dx_r = 2 sum_l D_l[r] x_{r+l} +
D_l[r-l] x_{r-l}.
"""

import triton
import triton.language as tl

from .triton_layout import exists, load_rows, x_rows

SMOOTHNESS = {"trace": 0, "exact": 1, "bound": 2}
SQUARINGS = tl.constexpr(24)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def moved(numbers, by, row):
    """[R] of the numbers `by` rows further down, 0 where there are none."""
    place = row + by
    inside = (place >= 0) & (place < row.shape[0])
    return tl.where(inside, tl.gather(numbers, tl.where(inside, place, row), 0), 0.0)


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
def windows(
    k, previous, tail, sequence, low, count, start, row, head, heads,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """The Gram matrix of each token's window: a tuple of [R], upper triangles row by row."""
    pair = row - (W - 1)
    band = ()
    for lag in tl.static_range(W):
        total = tl.zeros(row.shape, tl.float32)
        for begin in range(0, K, BK):
            columns = begin + tl.arange(0, BK)
            x = window_rows(
                k, previous, tail, sequence, low, count, start, pair, head, heads, columns, K, W, SHIFT, CARRIED
            )
            if lag > 0:
                later = window_rows(
                    k, previous, tail, sequence, low, count, start, pair + lag, head, heads, columns, K, W, SHIFT,
                    CARRIED,
                )  # fmt: skip
                total += tl.sum(x * later, 1)
            else:
                total += tl.sum(x * x, 1)
        band += (total,)
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
    """m over its trace, and 1 over that; zero stays zero."""
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
    for _ in range(SQUARINGS):
        power = _over_trace(_product(power, power, W), W)
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
    slope = ()
    for a in tl.static_range(W):
        for b in tl.static_range(a, W):
            one = (vector[a] * factor) * (vector[b] * factor)
            slope += (one,)
            share = gram[a * W - a * (a - 1) // 2 + b - a] * one
            if a == b:
                value += share
            else:
                value += 2.0 * share
    return value, slope


@triton.jit
def _bound(gram, W: tl.constexpr):
    one = _over_trace(gram, W)
    two = _product(one, one, W)
    four = _product(two, two, W)
    eight = _product(four, four, W)
    total = _trace(_product(eight, eight, W), W)
    positive = total > 0
    logarithm = tl.log2(tl.where(positive, total, 1.0))
    value = tl.where(positive, tl.exp2(logarithm / 16), 0.0) * _trace(gram, W)
    factor = tl.where(positive, tl.exp2(logarithm * (-15 / 16)), 0.0)
    power = _product(_product(eight, four, W), _product(two, one, W), W)
    slope = ()
    for i in tl.static_range(W * (W + 1) // 2):
        slope += (power[i] * factor,)
    return value, slope


@triton.jit
def smoothness(gram, W: tl.constexpr, SMOOTHNESS: tl.constexpr):
    """[R] what is divided by the window's size, and its derivative by the Gram matrix, a tuple like `gram`."""
    if SMOOTHNESS == 1:
        return _top(gram, W)
    else:
        return _bound(gram, W)


@triton.jit
def window_gradients(
    k, previous, tail, sequence, low, count, start, row, head, heads, grad_energy,
    K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr,
    SMOOTHNESS: tl.constexpr,
):  # fmt: skip
    """D_l, a tuple of W vectors [R]; of the trace only D_0.

    grad_energy: [R] by token, of what is summed over its window, 0 where none; all windows that hold a row's pair lie
    in the tile.
    """
    if SMOOTHNESS == 0:
        total = grad_energy
        for a in tl.static_range(1, W):
            total += moved(grad_energy, -a, row)
        return (total,)
    else:
        gram = windows(
            k, previous, tail, sequence, low, count, start, row, head, heads, K, BK, W, SHIFT, CARRIED
        )
        _, slope = smoothness(gram, W, SMOOTHNESS)
        band = ()
        for lag in tl.static_range(W):
            total = grad_energy * slope[lag]
            for a in tl.static_range(1, W - lag):
                total += moved(grad_energy * slope[a * W - a * (a - 1) // 2 + lag], -a, row)
            band += (total,)
        return band
