"""What a model does to one token around the step, in one Triton launch each; products with matrices for one row only.

All is computed in float32 and rounded once, where it is written.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_device
from .launcher import Launcher, are_aligned, dtypes_of
from .triton_layout import NAMESPACE, is_plain
from .triton_norm import launch_sum

TILE = 1024  # hidden channels at a time, in the products of the gates
ROWS, COLUMNS = 4, 512  # of a weight at a time, in the products of one row
PARTS = 4  # queries, keys, values, and the gates


def token_inputs(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Tensor | None,
    weights: Sequence[Tensor | None],
    gain: Tensor,
    gain_bias: Tensor,
    ridge: Tensor | None,
    ridge_bias: Tensor | None,
    mask: Tensor | None,
    length: Tensor,
    *,
    head_dim: int,
    per_channel: bool,
    norm: str,
    value_norm: str,
    feature_map: str,
    epsilon: float,
    largest_gain: float,
    ridge_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What `falcon_step` takes of one token: convolution, SiLU, norm and feature map, and both gates.

    Args:
        x: [B, D] hidden states.
        q, k: [B, H K], v: [B, H V], projected from x.
        window: [B, S - 1, H (2 K + V)] tokens before for the convolution of q, k and v, moved on by one in place;
            None where there is no convolution.
        weights: [H K, S], [H K, S] and [H V, S] of the convolution, the last column the token's own.
        gain: [H, D], the weight of the gain's projection; [B, H V], what that gives, where `per_channel`.
        gain_bias: [H] or [H V].
        ridge, ridge_bias: [H, D] weight and [H] bias of the ridge's projection, or None.
        mask: [B] bool, False where the row has no token: its window stays.
        length: [] int64, places read so far, counted on in place.
        norm, value_norm: `rms`, `l2` or `none`, of each head of q and k, and of v.
        feature_map: `identity`, `relu`, `elu_plus_one` or `softplus`, of q and k.
        epsilon: of the norms.

    Returns:
        q and k [B, H, K], v [B, H, V] in their own dtypes; in float32 gain, [B, H] or [B, H, V], in [0, largest_gain],
        and ridge [B, H] in [0, ridge_scale], or None.
    """
    run = inputs_operator if torch.compiler.is_compiling() or not is_plain(q) else _inputs
    *found, ridges = run(
        x, q, k, v, window, *weights, gain, gain_bias, ridge, ridge_bias, mask, length,
        head_dim, per_channel, norm, value_norm, feature_map, epsilon, largest_gain, ridge_scale,
    )  # fmt: skip
    return *found, None if ridge is None else ridges


def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, [..., D], and its RMS norm over D times `weight` [D], both in the dtype of x."""
    run = add_norm_operator if torch.compiler.is_compiling() or not is_plain(x) else _add_norm
    return run(x, y, weight, epsilon)


def silu_product(x: Tensor, y: Tensor) -> Tensor:
    """SiLU(x) * y, of one shape."""
    run = silu_product_operator if torch.compiler.is_compiling() or not is_plain(x) else _silu_product
    return run(x, y)


def row_products(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """x W^T for [1, 1, D] x and each of at most three weights [N, D], [1, 1, N]."""
    weights = (*weights, None, None)[:3]
    run = products_operator if torch.compiler.is_compiling() or not is_plain(x) else _row_products
    return [product for product, weight in zip(run(x, *weights), weights, strict=True) if weight is not None]


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(x gate^T) * (x up^T), [1, 1, N], for [1, 1, D] x and weights [N, D]."""
    run = gated_operator if torch.compiler.is_compiling() or not is_plain(x) else _gated_product
    return run(x, gate, up)


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(
    "token_inputs(Tensor x, Tensor q, Tensor k, Tensor v, Tensor(a!)? window, Tensor? q_weight, Tensor? k_weight, "
    "Tensor? v_weight, Tensor gain, Tensor gain_bias, Tensor? ridge, Tensor? ridge_bias, Tensor? mask, "
    "Tensor(b!) length, int head_dim, bool per_channel, str norm, str value_norm, str feature_map, float epsilon, "
    "float largest_gain, float ridge_scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "add_norm(Tensor x, Tensor y, Tensor weight, float epsilon) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
LIBRARY.define("silu_product(Tensor x, Tensor y) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    "row_products(Tensor x, Tensor a, Tensor? b, Tensor? c) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define("gated_product(Tensor x, Tensor gate, Tensor up) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
inputs_operator = getattr(torch.ops, NAMESPACE).token_inputs.default
add_norm_operator = getattr(torch.ops, NAMESPACE).add_norm.default
silu_product_operator = getattr(torch.ops, NAMESPACE).silu_product.default
products_operator = getattr(torch.ops, NAMESPACE).row_products.default
gated_operator = getattr(torch.ops, NAMESPACE).gated_product.default


@torch.library.register_fake(f"{NAMESPACE}::token_inputs", lib=LIBRARY)
def _empty_inputs(
    x, q, k, v, window, q_weight, k_weight, v_weight, gain, gain_bias, ridge, ridge_bias, mask, length,
    head_dim, per_channel, *rest,
):  # fmt: skip
    rows, heads = q.shape[0], q.shape[1] // head_dim
    found = [t.new_empty(rows, heads, t.shape[1] // heads) for t in (q, k, v)]
    rates = x.new_empty((rows, *found[2].shape[1:]) if per_channel else (rows, heads), dtype=torch.float32)
    ridges = x.new_empty(0 if ridge is None else (rows, heads), dtype=torch.float32)
    return *found, rates, ridges


@torch.library.register_fake(f"{NAMESPACE}::add_norm", lib=LIBRARY)
def _empty_sum(x, y, weight, epsilon):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


@torch.library.register_fake(f"{NAMESPACE}::silu_product", lib=LIBRARY)
def _empty_product(x, y):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{NAMESPACE}::row_products", lib=LIBRARY)
def _empty_products(x, *weights):
    return tuple(x.new_empty(0 if w is None else (*x.shape[:-1], w.shape[0])) for w in weights)


@torch.library.register_fake(f"{NAMESPACE}::gated_product", lib=LIBRARY)
def _empty_gated(x, gate, up):
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def _inputs(
    x, q, k, v, window, q_weight, k_weight, v_weight, gain, gain_bias, ridge, ridge_bias, mask, length,
    head_dim, per_channel, norm, value_norm, feature_map, epsilon, largest_gain, ridge_scale,
):  # fmt: skip
    if window is not None:
        expected = [q.shape[0], q_weight.shape[1] - 1, q.shape[1] + k.shape[1] + v.shape[1]]
        if [*window.shape] != expected or not window.is_contiguous():
            raise ValueError(
                f"window has shape {[*window.shape]} and strides {window.stride()}; it must be {expected}, contiguous."
            )
    read = (q_weight, k_weight, v_weight, gain, gain_bias, ridge, ridge_bias, mask)
    x, q, k, v, *rest = (None if t is None else t.contiguous() for t in (x, q, k, v, *read))
    given = x, q, k, v, window, *rest, length
    found = _empty_inputs(*given, head_dim, per_channel)
    if q.numel() == 0:
        length.add_(1)
        return found
    heads = q.shape[1] // head_dim
    shapes = tuple(None if t is None else t.shape for t in given)
    options = (per_channel, norm, value_norm, feature_map)
    with triton_device.current(q.device):
        _inputs_launcher(shapes, dtypes_of(given), q.device, heads, options, are_aligned((*given, *found)))(
            *given, *found, heads, float(epsilon), float(largest_gain), float(ridge_scale)
        )
    return found


def _add_norm(x, y, weight, epsilon):
    x, y, weight = x.contiguous(), y.contiguous(), weight.contiguous()
    total, normed = _empty_sum(x, y, weight, epsilon)
    launch_sum(x, y, weight, total, normed, float(epsilon))
    return total, normed


def _silu_product(x, y):
    x, y = x.contiguous(), y.contiguous()
    product = _empty_product(x, y)
    if x.numel() > 0:
        tensors = x, y, product
        with triton_device.current(x.device):
            _product_launcher(x.numel(), dtypes_of(tensors), x.device, are_aligned(tensors))(*tensors)
    return product


def _row_products(x, a, b, c):
    x, a, b, c = (None if t is None else t.contiguous() for t in (x, a, b, c))
    products = _empty_products(x, a, b, c)
    tensors = x, a, b, c, *products
    sizes = tuple(0 if weight is None else weight.shape[0] for weight in (a, b, c))
    with triton_device.current(x.device):
        _products_launcher(x.shape[-1], sizes, dtypes_of(tensors), x.device, are_aligned(tensors))(*tensors)
    return products


def _gated_product(x, gate, up):
    x, gate, up = x.contiguous(), gate.contiguous(), up.contiguous()
    product = _empty_gated(x, gate, up)
    tensors = x, gate, up, product
    with triton_device.current(x.device):
        _gated_launcher(x.shape[-1], gate.shape[0], dtypes_of(tensors), x.device, are_aligned(tensors))(*tensors)
    return product


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("token_inputs", _inputs, _device)
    LIBRARY.impl("add_norm", _add_norm, _device)
    LIBRARY.impl("silu_product", _silu_product, _device)
    LIBRARY.impl("row_products", _row_products, _device)
    LIBRARY.impl("gated_product", _gated_product, _device)


@lru_cache(maxsize=1024)
def _inputs_launcher(shapes, dtypes, device, heads, options, aligned):
    """The kernel for tensors of these shapes and dtypes."""
    per_channel, norm, value_norm, feature_map = options
    (rows, D), (_, keys), _, (_, values) = shapes[:4]
    K, V = keys // heads, values // heads
    constants = {
        "D": D, "K": K, "V": V, "S": 0 if shapes[5] is None else shapes[5][1], "PER_CHANNEL": per_channel,
        "NORM": norm, "VALUE_NORM": value_norm, "MAP": feature_map, "RIDGE": shapes[10] is not None,
        "MASKED": shapes[12] is not None, "BK": triton.next_power_of_2(K), "BV": triton.next_power_of_2(V),
        "BD": min(TILE, triton.next_power_of_2(D)), "num_warps": 2,
    }  # fmt: skip
    return Launcher(inputs_kernel, (rows * heads, PARTS), constants, aligned=aligned)


@lru_cache(maxsize=1024)
def _product_launcher(numel, dtypes, device, aligned):
    constants = {"N": numel, "BLOCK": 256, "num_warps": 2}
    return Launcher(silu_product_kernel, (triton.cdiv(numel, 256),), constants, aligned=aligned)


@lru_cache(maxsize=1024)
def _products_launcher(D, sizes, dtypes, device, aligned):
    constants = {"D": D, **dict(zip(("NA", "NB", "NC"), sizes, strict=True)), "BN": ROWS, "BD": COLUMNS, "num_warps": 4}
    return Launcher(products_kernel, (sum(triton.cdiv(n, ROWS) for n in sizes),), constants, aligned=aligned)


@lru_cache(maxsize=1024)
def _gated_launcher(D, N, dtypes, device, aligned):
    constants = {"D": D, "N": N, "BN": ROWS, "BD": COLUMNS, "num_warps": 4}
    return Launcher(gated_kernel, (triton.cdiv(N, ROWS),), constants, aligned=aligned)


@triton.jit
def inputs_kernel(
    x,  # [B, D]
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, H, V]
    window,  # [B, S - 1, H (2 K + V)]
    q_weight,  # [H, K, S]
    k_weight,  # [H, K, S]
    v_weight,  # [H, V, S]
    gain,  # [H, D], or [B, H, V] where PER_CHANNEL
    gain_bias,  # [H], or [H, V] where PER_CHANNEL
    ridge,  # [H, D]
    ridge_bias,  # [H]
    mask,  # [B]
    length,  # []
    q_out,  # [B, H, K]
    k_out,  # [B, H, K]
    v_out,  # [B, H, V]
    gain_out,  # [B, H], or [B, H, V] where PER_CHANNEL
    ridge_out,  # [B, H]
    H,
    epsilon,
    largest_gain,
    ridge_scale,
    D: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    MAP: tl.constexpr,
    RIDGE: tl.constexpr,
    MASKED: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (B H, 4): queries, keys, values and gates of a head. A row without a token is read as zeros."""
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    place = row * H + head
    token = row >= 0
    if MASKED:
        token = tl.load(mask + row) != 0
    channels = H * (2 * K + V)
    begin = row * (S - 1) * channels
    part = tl.program_id(1)
    if part == 0:
        at = begin + head * K
        _head(q, window, q_weight, q_out, place, head, at, channels, token, epsilon, K, S, NORM, MAP, BK)
        if tl.program_id(0) == 0:
            tl.store(length, tl.load(length) + 1)
    elif part == 1:
        at = begin + (H + head) * K
        _head(k, window, k_weight, k_out, place, head, at, channels, token, epsilon, K, S, NORM, MAP, BK)
    elif part == 2:
        at = begin + 2 * H * K + head * V
        _head(v, window, v_weight, v_out, place, head, at, channels, token, epsilon, V, S, VALUE_NORM, "identity", BV)
    else:
        if RIDGE:
            ridges = _product(x + row * D, ridge + head * D, token, D, BD)
        if PER_CHANNEL:
            i = tl.arange(0, BV)
            projected = tl.load(gain + place * V + i, mask=(i < V) & token, other=0.0).to(tl.float32)
            bias = tl.load(gain_bias + head * V + i, mask=i < V, other=0.0).to(tl.float32)
            tl.store(gain_out + place * V + i, largest_gain * tl.sigmoid(projected + bias), mask=i < V)
        else:
            projected = tl.sum(_product(x + row * D, gain + head * D, token, D, BD), 0)
            bias = tl.load(gain_bias + head).to(tl.float32)
            tl.store(gain_out + place, largest_gain * tl.sigmoid(projected + bias))
        if RIDGE:
            projected = tl.sum(ridges, 0)
            bias = tl.load(ridge_bias + head).to(tl.float32)
            tl.store(ridge_out + place, ridge_scale * tl.sigmoid(projected + bias))


@triton.jit
def _head(
    x,  # [B H, WIDTH]
    window,
    weight,  # [H, WIDTH, S]
    output,  # [B H, WIDTH]
    place,  # in the B H
    head,
    at,  # in the window, of the row's oldest token
    channels,
    there,
    epsilon,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    NORM: tl.constexpr,
    MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolution, SiLU, norm and feature map of one head, and its window moved on."""
    i = tl.arange(0, BLOCK)
    inside = (i < WIDTH) & there
    newest = tl.load(x + place * WIDTH + i, mask=inside, other=0.0)
    y = newest.to(tl.float32)
    if S > 0:
        taps = weight + (head * WIDTH + i) * S
        y *= tl.load(taps + (S - 1), mask=inside, other=0.0).to(tl.float32)
        older = ()
        for j in tl.static_range(S - 1):
            older += (tl.load(window + at + j * channels + i, mask=inside, other=0.0),)  # type: ignore[assignment]
            y += older[j].to(tl.float32) * tl.load(taps + j, mask=inside, other=0.0).to(tl.float32)
        y *= tl.sigmoid(y)
        if S > 1:
            tl.debug_barrier()  # all is read before any is written
            for j in tl.static_range(S - 2):
                tl.store(window + at + j * channels + i, older[j + 1], mask=inside)
            tl.store(window + at + (S - 2) * channels + i, newest, mask=inside)
    if NORM == "rms":
        y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + epsilon)
    elif NORM == "l2":
        y *= tl.rsqrt(tl.sum(y * y, 0) + epsilon)
    if MAP == "relu":
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif MAP == "elu_plus_one":
        y = tl.where(y > 0, y + 1.0, tl.exp(y))
    elif MAP == "softplus":
        small = tl.exp(-tl.abs(y))
        above = 1.0 + small
        log1p = tl.log(above) - (above - 1.0 - small) / above  # the second term is what 1 + small rounds away
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p
    tl.store(output + place * WIDTH + i, y, mask=i < WIDTH)


@triton.jit
def _product(x, weight, there, D: tl.constexpr, BD: tl.constexpr):
    """The product of two rows of D numbers as [BD] terms of a sum, so that loads need not wait for another sum."""
    i = tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    for start in range(0, D, BD):
        inside = (start + i < D) & there
        a = tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32)
        total += a * tl.load(weight + start + i, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def silu_product_kernel(x, y, product, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N / BLOCK)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(y + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(product + i, a * tl.sigmoid(a) * b, mask=i < N)


@triton.jit
def products_kernel(
    x,  # [D]
    a,  # [NA, D]
    b,  # [NB, D]
    c,  # [NC, D]
    of_a,
    of_b,
    of_c,
    D: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    NC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (rows of a, of b and of c, BN at a time)."""
    begin_b: tl.constexpr = (NA + BN - 1) // BN
    begin_c: tl.constexpr = begin_b + (NB + BN - 1) // BN
    tile = tl.program_id(0)
    n = tl.arange(0, BN)
    if tile < begin_b:
        rows = tile * BN + n
        tl.store(of_a + rows, tl.sum(_rows_product(x, a, rows, NA, D, BN, BD), 1), mask=rows < NA)
    if NB > 0:  # noqa: SIM102 - known to the compiler
        if (tile >= begin_b) & (tile < begin_c):
            rows = (tile - begin_b) * BN + n
            tl.store(of_b + rows, tl.sum(_rows_product(x, b, rows, NB, D, BN, BD), 1), mask=rows < NB)
    if NC > 0:  # noqa: SIM102
        if tile >= begin_c:
            rows = (tile - begin_c) * BN + n
            tl.store(of_c + rows, tl.sum(_rows_product(x, c, rows, NC, D, BN, BD), 1), mask=rows < NC)


@triton.jit
def gated_kernel(x, gate, up, product, D: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Grid (N / BN)."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    a = _rows_product(x, gate, rows, N, D, BN, BD)
    b = _rows_product(x, up, rows, N, D, BN, BD)
    a, b = tl.sum(a, 1), tl.sum(b, 1)
    tl.store(product + rows, a * tl.sigmoid(a) * b, mask=rows < N)


@triton.jit
def _rows_product(x, weight, rows, N: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """The products of x [D] with rows of [N, D] weight, as [BN, BD] terms of sums."""
    i = tl.arange(0, BD)
    first = weight + rows.to(tl.int64)[:, None] * D
    total = tl.zeros([BN, BD], tl.float32)
    for start in tl.static_range(0, D, BD):
        inside = start + i < D
        w = tl.load(first + (start + i)[None, :], mask=(rows < N)[:, None] & inside[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total
