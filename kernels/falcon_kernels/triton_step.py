"""One token of any rule in one Triton launch, with the state updated in place.

One program per row and head. It holds a tile of the memory [K, BV] in registers, reads it once and writes it once, and
goes through the value channels tile by tile, the next of them on its way. All else (window, energy, step size) is small
and computed while the first tile is on its way.

Every location of the state that a program writes is read by that program alone, with a barrier in between, except for
the flags `previous_valid` and `tail_valid`, which the heads of a row share: see `_update_flags`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference, triton_device
from .launcher import Launcher, are_aligned, dtypes_of
from .rule import RULES, Rule
from .state import FalconState
from .triton_layout import NAMESPACE, is_plain

LARGEST_HEADS = 127  # what fits into seven bits, see _update_flags


class Launch(NamedTuple):
    """How the work is cut. No choice here needs more than a few KiB of shared memory."""

    tile: int  # largest number of memory elements that a program holds at once
    per_warp: int  # of them for each warp
    most_warps: int
    registers: int | None  # most per thread; above what the compiler would take, it decides how many programs fit


DEFAULT_LAUNCH = Launch(tile=8192, per_warp=1024, most_warps=8, registers=None)
LAUNCHES = {(9, 0): Launch(tile=4096, per_warp=1024, most_warps=4, registers=128)}  # by compute capability


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    state: FalconState,
    rule: Rule,
    mask: Tensor | None = None,
) -> Tensor:
    """Output [B, H, V] of one token, with `state` updated in place; arguments as in `reference.step`.

    What the kernel does not take (float64, a state with gaps between its elements, more than 127 heads) goes through
    the reference.
    """
    if (sentence := triton_device.refusal(q.device)) is not None:
        raise ValueError(sentence)
    if not _supported((q, k, v, gain, ridge), state):
        output, after = reference.step(q, k, v, gain, ridge, state, rule, mask)
        state.copy_(after)
        return output
    run = operator if torch.compiler.is_compiling() or not is_plain(q) else _launch
    return run(
        q, k, v, gain, ridge, mask, *state,
        rule.name, rule.window, rule.alignment, rule.timing, rule.step_size, rule.ridge, rule.smoothness or "trace",
        rule.normalized_read, rule.epsilon, rule.decay_floor, rule.read_epsilon,
    )  # fmt: skip


def _supported(inputs: tuple[Tensor | None, ...], state: FalconState) -> bool:
    return (
        inputs[0].shape[1] <= LARGEST_HEADS
        and all(t is None or t.dtype != torch.float64 for t in inputs)
        and all(t is None or (t.is_contiguous() and t.dtype != torch.float64) for t in state)
    )


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
LIBRARY.define(
    "step(Tensor q, Tensor k, Tensor v, Tensor gain, Tensor? ridge, Tensor? mask, Tensor(a!) memory, "
    "Tensor(b!)? previous_key, Tensor(c!)? previous_valid, Tensor(d!)? tail_x, Tensor(e!)? tail_v, "
    "Tensor(f!)? tail_valid, Tensor(g!)? normalizer, str name, int window, str alignment, str timing, str step_size, "
    "str ridge_kind, str smoothness, bool normalized_read, float epsilon, float decay_floor, float read_epsilon) "
    "-> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


operator = getattr(torch.ops, NAMESPACE).step.default


@torch.library.register_fake(f"{NAMESPACE}::step", lib=LIBRARY)
def _fake(q, k, v, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _launch(
    q, k, v, gain, ridge, mask, memory, previous_key, previous_valid, tail_x, tail_v, tail_valid, normalizer,
    name, window, alignment, timing, step_size, ridge_kind, smoothness, normalized_read,
    epsilon, decay_floor, read_epsilon,
):  # fmt: skip
    H, V = v.shape[1:]
    output = torch.empty_like(v, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    q, k, v, gain, ridge, mask = (None if t is None else t.contiguous() for t in (q, k, v, gain, ridge, mask))
    tensors = q, k, v, gain, ridge, mask, memory, previous_key, previous_valid, tail_x, tail_v, tail_valid, normalizer
    rule = (name, window, alignment, timing, step_size, ridge_kind, smoothness, normalized_read)
    with triton_device.current(q.device):
        launcher(q.shape, V, dtypes_of(tensors), q.device, rule, are_aligned(tensors))(
            *tensors, output, H, epsilon, 1 - decay_floor, read_epsilon
        )
    return output


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("step", _launch, _device)


@lru_cache(maxsize=1024)
def launcher(shape: torch.Size, V: int, dtypes: tuple, device: torch.device, rule: tuple, aligned: bool) -> Launcher:
    """The kernel for tensors of these shapes and dtypes; `rule` is what `constants` takes."""
    B, H, K = shape
    window = rule[1]
    columns, warps, registers = cut(K, V, launch(device))
    sizes = {
        "K": K, "V": V, "MASKED": dtypes[5] is not None, "BK": triton.next_power_of_2(K), "BV": columns,
        "COPIES": copies(window, warps), "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip
    return Launcher(step_kernel, (B * H,), sizes | constants(*rule), aligned=aligned)


@lru_cache
def constants(name, window, alignment, timing, step_size, ridge_kind, smoothness, normalized_read):
    """A rule as the kernel's constants."""
    residual, per_channel, _ = RULES[name]
    return {
        "W": window,
        "BW": triton.next_power_of_2(window),
        "RESIDUAL": residual,
        "PER_CHANNEL": per_channel,
        "SHIFT": alignment == "next_latent",
        "BEFORE": timing == "read_before_write",
        "DIRECT_STEP": step_size == "direct",
        "RIDGE": ridge_kind,
        "ENERGY": smoothness if name == "falcon_3" and window > 1 else "trace",
        "NORMALIZED": normalized_read,
    }


@lru_cache
def launch(device: torch.device) -> Launch:
    """The launch for a device."""
    if device.type == "cuda":
        return LAUNCHES.get(torch.cuda.get_device_capability(device), DEFAULT_LAUNCH)
    return DEFAULT_LAUNCH


@lru_cache
def cut(K: int, V: int, launch: Launch) -> tuple[int, int, int | None]:
    """Value channels per tile, warps per program and registers per thread."""
    rows = triton.next_power_of_2(K)
    columns = min(triton.next_power_of_2(V), max(16, launch.tile // rows))
    return columns, min(launch.most_warps, max(1, rows * columns // launch.per_warp)), launch.registers


def copies(window: int, warps: int) -> int:
    """Of the window's Gram matrix, see _square."""
    return 32 * warps if window <= 4 else 1


@triton.jit
def step_kernel(
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, H, V]
    gain,  # [B, H], or [B, H, V] where PER_CHANNEL
    ridge,  # [B, H]
    mask,  # [B]
    memory,  # [B, H, K, V]
    previous_key,  # [B, H, K]
    previous_valid,  # [B]
    tail_x,  # [B, W - 1, H, K]
    tail_v,  # [B, W - 1, H, V]
    tail_valid,  # [B, W - 1]
    normalizer,  # [B, H, K], or [B, H, K, V] where PER_CHANNEL
    output,  # [B, H, V]
    H,
    epsilon,
    largest_alpha,
    read_epsilon,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SHIFT: tl.constexpr,
    BEFORE: tl.constexpr,
    DIRECT_STEP: tl.constexpr,
    RIDGE: tl.constexpr,
    ENERGY: tl.constexpr,
    NORMALIZED: tl.constexpr,
    MASKED: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BW: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Grid (B H). A row without a token has all its loads and stores masked off, but for an output of 0."""
    TAIL: tl.constexpr = W - 1
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0).to(tl.int64)  # among the B H
    token = row >= 0
    if MASKED:
        token = tl.load(mask + row) != 0

    row_k = tl.arange(0, BK)
    in_k = (row_k < K) & token
    columns = tl.arange(0, BV)
    tile = memory + head * K * V + (row_k[:, None] * V + columns[None, :])
    s = tl.load(tile, mask=in_k[:, None] & (columns < V)[None, :], other=0.0)  # [BK, BV], the first tile

    # The newest pair, and the W - 1 before it.
    pair = token
    newest_x = k + head * K
    if SHIFT:
        was_begun = tl.load(_bytes(previous_valid) + row) & 1
        pair = token & (was_begun != 0)
        newest_x = previous_key + head * K
    newest_v = v + head * V
    pairs = pair.to(tl.int32)
    flags, old_x, old_v = newest_x, newest_x, newest_v
    if TAIL > 0:
        flags = _bytes(tail_valid) + row * TAIL
        old_x = tail_x + (row * (TAIL - 1) * H + head) * K
        old_v = tail_v + (row * (TAIL - 1) * H + head) * V
        w = tl.arange(0, BW)
        was_valid = tl.load(flags + w, mask=(w < TAIL) & token, other=0) & 1
        pairs += tl.sum(was_valid.to(tl.int32), 0)
    count = tl.maximum(pairs, 1).to(tl.float32)
    x = tl.where(pair, tl.load(newest_x + row_k, mask=in_k, other=0.0), 0.0).to(tl.float32)

    # Energy, step size and decay.
    sum_x = x
    if TAIL == 0:
        energy = tl.sum(x * x, 0)
    else:
        at_tail_x = old_x + w[:, None] * (H * K) + row_k[None, :]
        window = tl.load(at_tail_x, mask=(w < TAIL)[:, None] & in_k[None, :], other=0.0)
        window = tl.where((was_valid != 0)[:, None], window, 0.0).to(tl.float32)
        window = tl.where((w == TAIL)[:, None], x[None, :], window)  # [BW, BK]
        if NORMALIZED:
            sum_x = tl.sum(window, 0)
        if ENERGY == "trace":
            energy = tl.sum(tl.sum(window * window, 1), 0)
        else:
            gram = tl.where((w == TAIL)[None, :], tl.sum(window * x[None, :], 1)[:, None], 0.0)
            for j in tl.static_range(TAIL):
                x_j = _tail_row(old_x, H * K, flags, row_k, in_k, j)
                gram += tl.where((w == j)[None, :], tl.sum(window * x_j[None, :], 1)[:, None], 0.0)
            gram = gram[:, :, None] + tl.zeros((BW, BW, COPIES), tl.float32)
            energy = _largest_eigenvalue(gram, w) if ENERGY == "exact" else _eigenvalue_bound(gram, w)
    energy /= count
    lam = 0.0
    if RIDGE != "none":
        lam = tl.load(ridge + head, mask=token, other=0.0).to(tl.float32)
        if RIDGE == "scale_coupled":
            lam *= energy
    if not PER_CHANNEL:
        rate = tl.load(gain + head, mask=token, other=0.0).to(tl.float32)
        eta, decay = _step_and_decay(rate, energy, lam, pair, epsilon, largest_alpha, DIRECT_STEP, RESIDUAL)
    query = tl.load(q + head * K + row_k, mask=in_k, other=0.0).to(tl.float32)
    if NORMALIZED and not PER_CHANNEL:
        z = tl.load(normalizer + head * K + row_k, mask=in_k, other=0.0)
        written_z = decay * z + (eta / count) * sum_x
        mass = tl.sum(query * (z if BEFORE else written_z), 0)

    for start in range(0, V, BV):
        channel = start + columns
        in_v = (channel < V) & token
        in_next = in_k[:, None] & (channel + BV < V)[None, :]
        ahead = tl.load(tile + start + BV, mask=in_next, other=0.0)
        in_tile = in_k[:, None] & in_v[None, :]
        if PER_CHANNEL:
            rate = tl.load(gain + head * V + channel, mask=in_v, other=0.0).to(tl.float32)
            eta, decay = _step_and_decay(rate, energy, lam, pair, epsilon, largest_alpha, DIRECT_STEP, RESIDUAL)
            if NORMALIZED:
                tile_z = normalizer + head * K * V + row_k[:, None] * V + channel[None, :]
                z = tl.load(tile_z, mask=in_tile, other=0.0)
                written_z = decay[None, :] * z + x[:, None] * eta[None, :]
                mass = tl.sum(query[:, None] * (z if BEFORE else written_z), 0)
        if BEFORE:
            read = tl.sum(query[:, None] * s, 0)

        target = tl.where(pair, tl.load(newest_v + channel, mask=in_v, other=0.0), 0.0).to(tl.float32)
        if RESIDUAL:
            target -= tl.sum(x[:, None] * s, 0)
        weight = eta / count
        writes = ()
        for j in tl.static_range(TAIL):
            target_j = _tail_row(old_v, H * V, flags, channel, in_v, j)
            if RESIDUAL:
                x_j = _tail_row(old_x, H * K, flags, row_k, in_k, j)
                target_j -= tl.sum(x_j[:, None] * s, 0)
            writes += (weight * target_j,)  # type: ignore[assignment]
        if PER_CHANNEL:
            s *= decay[None, :]
        else:
            s *= decay
        s += x[:, None] * (weight * target)[None, :]
        for j in tl.static_range(TAIL):
            s += _tail_row(old_x, H * K, flags, row_k, in_k, j)[:, None] * writes[j][None, :]

        if not BEFORE:
            read = tl.sum(query[:, None] * s, 0)
        if NORMALIZED:
            read /= mass + read_epsilon
        if TAIL > 0:
            shifted_v = _shifted_tail(old_v, H * V, newest_v, pair, channel, in_v, w, TAIL)
        tl.debug_barrier()
        tl.store(tile + start, s, mask=in_tile)
        tl.store(output + head * V + channel, read, mask=channel < V)
        if NORMALIZED and PER_CHANNEL:
            tl.store(tile_z, written_z, mask=in_tile)
        if TAIL > 0:
            at_tail_v = old_v + w[:, None] * (H * V) + channel[None, :]
            tl.store(at_tail_v, shifted_v, mask=(w < TAIL)[:, None] & in_v[None, :])
        s = ahead

    # The rest of the state: all is read, then all is written.
    if TAIL > 0:
        shifted_x = _shifted_tail(old_x, H * K, newest_x, pair, row_k, in_k, w, TAIL)
        is_valid = tl.load(flags + w + 1, mask=(w + 1 < TAIL) & token, other=0) & 1
        is_valid = tl.where(w == TAIL - 1, pair.to(tl.uint8), is_valid)
    if SHIFT:
        key = tl.load(k + head * K + row_k, mask=in_k, other=0.0)
    tl.debug_barrier()
    if NORMALIZED and not PER_CHANNEL:
        tl.store(normalizer + head * K + row_k, written_z, mask=in_k)
    if SHIFT:
        tl.store(previous_key + head * K + row_k, key, mask=in_k)
    if TAIL > 0:
        tl.store(at_tail_x, shifted_x, mask=(w < TAIL)[:, None] & in_k[None, :])

    if TAIL > 0:
        change = tl.where((w < TAIL) & token, is_valid.to(tl.int32) - was_valid.to(tl.int32), 0)
        if SHIFT:
            begun = tl.where(token, 1 - was_begun.to(tl.int32), 0)
            _update_flags(_bytes(previous_valid) + row, was_begun, begun, flags + w, change, H, TAIL)
        else:
            first = tl.sum(tl.where(w == 0, change, 0), 0)
            was_first = tl.sum(tl.where(w == 0, was_valid, 0), 0)
            _update_flags(flags, was_first, first, flags + w, tl.where(w == 0, 0, change), H, TAIL)
    elif SHIFT:
        begun = tl.where(token, 1 - was_begun.to(tl.int32), 0)
        _update_flags(_bytes(previous_valid) + row, was_begun, begun, None, begun, H, TAIL)


@triton.jit
def _bytes(flags):
    """A pointer to bool as one to bytes, of which bit 0 is the flag."""
    return flags.to(tl.pointer_type(tl.uint8))


@triton.jit
def _tail_row(tail, stride, flags, offsets, inside, j):
    """Feature or value j of the tail as float32, 0 where it is not valid."""
    valid = (tl.load(flags + j) & 1) != 0
    return tl.where(valid, tl.load(tail + j * stride + offsets, mask=inside, other=0.0), 0.0).to(tl.float32)


@triton.jit
def _shifted_tail(tail, stride, newest, pair, offsets, inside, w, TAIL: tl.constexpr):
    """The tail [BW, .] after this token, as it is stored."""
    in_tail = (w + 1 < TAIL)[:, None] & inside[None, :]
    value = tl.load(tail + (w + 1)[:, None] * stride + offsets[None, :], mask=in_tail, other=0.0)
    newest_value = tl.where(pair, tl.load(newest + offsets, mask=inside, other=0.0), 0.0).to(value.dtype)
    return tl.where((w == TAIL - 1)[:, None], newest_value[None, :], value)


@triton.jit
def _step_and_decay(
    rate,
    energy,
    lam,
    pair,
    epsilon,
    largest_alpha,
    DIRECT_STEP: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """eta and gamma of the token, in the shape of its gain; 0 and 1 where there is no pair."""
    denominator = energy + lam + epsilon
    possible = denominator > 0
    safe = tl.where(possible, denominator, 1.0)
    if not DIRECT_STEP:
        eta = tl.where(pair & possible, rate / safe, 0.0)
    elif RESIDUAL:
        eta = tl.where(pair & possible, tl.minimum(rate, 2.0 / safe), 0.0)
    else:
        eta = tl.where(pair, rate, 0.0)
    return eta, 1.0 - tl.minimum(eta * tl.where(pair, lam, 0.0), largest_alpha)


# The products of matrices as small as a window's would be all waiting of one warp for another. So they come in as many
# copies as there are threads, [BW, BW, N], of which each thread works on its own; larger ones in one copy.


@triton.jit
def _trace(matrix, w):
    return tl.sum(tl.sum(tl.where((w[:, None] == w[None, :])[:, :, None], matrix, 0.0), 0), 0)


@triton.jit
def _unit_trace(matrix, w):
    trace = _trace(matrix, w)
    return matrix / tl.where(trace > 0, trace, 1.0)[None, None, :]


@triton.jit
def _square(matrix):
    """The square of a symmetric matrix."""
    return tl.sum(matrix[:, None, :, :] * matrix[None, :, :, :], 2)


@triton.jit
def _largest_eigenvalue(gram, w):
    """Largest eigenvalue of a positive semidefinite matrix.

    Squared over and over at trace 1, it tends to a projector onto the top eigenspace, whatever its dimension; the mean
    of the matrix under that is the eigenvalue, to 2^-20 / e where two of them nearly meet. Between normalizations the
    trace falls to 8^-15 at the lowest.
    """
    power = _unit_trace(gram, w)
    for _ in range(5):
        for _ in tl.static_range(4):
            power = _square(power)
        power = _unit_trace(power, w)
    return tl.max(tl.sum(tl.sum(power * gram, 0), 0), 0)


@triton.jit
def _eigenvalue_bound(gram, w):
    """(tr G^16)^(1/16); the trace of G^16 is the sum of the squares of G^8."""
    power = _square(_square(_square(_unit_trace(gram, w))))
    total = tl.sum(tl.sum(power * power, 0), 0)
    return tl.max(tl.sqrt(tl.sqrt(tl.sqrt(tl.sqrt(total)))) * _trace(gram, w), 0)


@triton.jit
def _update_flags(flag, was, change, others, other_changes, H, TAIL: tl.constexpr):
    """Changes flags of a row, which its heads share, once all H programs of the row have come here.

    `flag` points to one of them, which was `was` and is to change by `change`; `others` to the rest.

    All programs of the row must have read the flags before any is changed. Nothing in the state but the flags
    themselves has room for counting who has, so they count in the upper seven bits of `flag`: each program adds 2 to
    that byte, and the one that finds 2 (H - 1) in it is the last: it takes the count away and makes the changes. Bit 0
    keeps the old flag until then and is all that anyone reads. No sum carries into the next byte.
    """
    changes = tl.abs(change)
    if TAIL > 0:
        changes += tl.sum(tl.abs(other_changes), 0)
    if changes > 0:  # or not, but alike in all programs of the row
        found = _add_to_bytes(flag, 2)
        if found == was.to(tl.int32) + 2 * (H - 1):
            _add_to_bytes(flag, change - 2 * H)
            if TAIL > 0:
                _add_to_bytes(others, other_changes, other_changes != 0)


@triton.jit
def _add_to_bytes(address, amount, where=None):
    """Adds to bytes atomically, and returns what they were.

    The word around a byte may reach past the end of a tensor, not past what an allocation on a GPU is rounded up to.
    """
    number = address.to(tl.int64)
    word = (number & -4).to(tl.pointer_type(tl.int32))
    shift = ((number & 3) * 8).to(tl.int32)
    return (tl.atomic_add(word, amount << shift, mask=where) >> shift) & 255
