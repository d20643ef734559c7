"""The rules with one rate a value channel: falcon_2a, and what falcon_2 has in common with it.

In a chunk of C tokens that finds the memory S, with u [C, V] the running log decay from its start, z = eta o v [C, V]
(falcon_2: eta o residual) and A = Q X', channel by channel

    O_t = exp(u_t) o (q_t S) + sum_{s <= t} A_ts exp(u_t - u_s) o z_s
    S'  = S Diag(exp(u_C)) + X' (exp(u_C - u) o z).

Reading before the write takes u_{t-1} for u_t, and s < t. A is of all channels, the decays are not: no C x C mask holds
them. They are taken apart around a reference row r of u, on either side of a product,

    sum_s A_ts exp(u_t - u_s) o z_s = exp(u_t - u_r) o (A (exp(u_r - u) o z))_t.

Pairs of a token t and an earlier one s are sorted by the span of C, C / 2, ..., 32 tokens that holds them in different
halves: r is then the last token of the first half, and no exponent is positive. What is left are blocks of 16 tokens,
with r in their middle: 8 steps on either side, of at most 5 each. So A counts log2(C / 16) + 1 times, each time masked
to the pairs of one span, and whole; no mask has a channel.

Of a token exp is taken twice: exp(u_m - u_s) gives and exp(u_t - u_m) reads as of the middle m of its block. From there
to a span's reference, and on to the next, all tokens of a block go by one factor a channel, exp of what is never
positive, of which a chunk has C / 16 rows. `through_chunk` brings what a token finds nearer, from the chunk's start to
that of each half that the token lies in and to the middle of its block, and adds at each stop the product with what
the others give, taken from their middles to that stop. Backward it is the same from the chunk's end.

Backward, with dO the cotangent of O and G that of what the chunk leaves,

    G_in  = G Diag(exp(u_C)) + Q' (exp(u) o dO)
    dZ_s  = sum_{t >= s} A_ts exp(u_t - u_s) o dO_t + exp(u_C - u_s) o (x_s G)
    dA_ts = sum of dO_t o exp(u_t - u_s) o z_s over channels
    dQ    = dA X + (exp(u) o dO) S'
    dX    = dA' Q + (exp(u_C - u) o z) G',

each sum over s or t taken apart as above, and deta = v o dZ, dv = eta o dZ. dZ is read as O is: by keys, of dO and G.

A log decay's gradient D_t, in its channel, is what of the memory before it is asked for after it, S o G summed over
keys. It loses what a token reads and gains what it writes,

    D_{t+1} = D_t - o_t o dO_t + z_t o dZ_t,

so that it is known wherever S and G are, at both ends of a chunk, and in between takes a sum of products of what the
forward has returned, and nothing has to be read again. O and dZ are rounded, and where decays are fast D is much less
than what is summed: by how much the sum from one end misses the other is spread over the tokens as the squares of
their products, by which most of the rounding is taken out again. falcon_2 has v for the residual in z there: its
residuals ask of S too.

    forward    rates      u, energies, what gains are multiplied by    one program per (chunk, head)
               pass       S                                            one per (sequence, part, head, V tile)
               read       O                                            one per (chunk, head, V tile)
    backward   reverse    G                                            as pass, backwards
               ask        dZ                                           as read
               across     S o G between chunks                         one per (chunk, head, V tile)
               channels   dv and gain's, sums for ridge and energy,    one per (chunk, head, V tile)
                          z and dO as of the middles of their blocks
               keys       dQ, dX, ridge's                              one per (chunk, head)

Parts, of long sequences in small batches, are those of triton_additive.py, with a decay per channel.

Elements moved per token and head, u and gains in float32 counting twice beside operands of 2 bytes: rates K + gain + u,
pass K + V + gain + u + KV/C, read 2K + 2V + gain + u + KV/C, reverse K + V + u + KV/C, ask 2K + 2V + u + KV/C, across
2KV/C, channels 7V + 2 gain + u, keys 4K + 2V + 2KV/C. Kept for the backward are u, S and what the call returns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launcher import Launcher
from .triton_additive import carry_launcher, in_parts, program_of_part, reverse_passes
from .triton_layout import (
    NUMBERS,
    OPERANDS,
    Layout,
    chunk_of,
    exists,
    load_rows,
    load_tile,
    operand_dtype,
    store_rows,
    store_tile,
    token_rows,
    x_rows,
)
from .triton_schedule import (
    LOG2_E,
    Call,
    Gradients,
    Kept,
    Options,
    Shape,
    _log1p_negative,
    _step_size,
    pair_exists,
)

BLOCK = tl.constexpr(16)  # tokens over which decays are multiplied up around the middle one
BLOCK_BITS = tl.constexpr(4)
MIDDLE = tl.constexpr(7)

# The schedule


@triton.jit
def step_of(gain, scale, DIRECT: tl.constexpr, CAPPED: tl.constexpr):
    """Step sizes of gains, and of the numbers of their tokens that `_rates` leaves, 0 where nothing is done."""
    if DIRECT and CAPPED:
        return tl.where(scale > 0.0, tl.minimum(gain, scale), 0.0)
    else:
        return gain * scale


@triton.jit(do_not_specialize=NUMBERS)
def _rates(
    k, gain, ridge, previous, previous_valid, lengths, scale, log_decay, energy, gram,
    bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr,
    CAPPED: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr, OPERAND: tl.constexpr, GRAM: tl.constexpr,
):  # fmt: skip
    """Of a chunk: what its gains are scaled or capped by and its energies, [C], and u [C, V], to base 2.

    GRAM: also x_i x_s' of the tokens of each block of 16, [C, 16].
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, C)
    there = start + row < count
    if MASKED:
        count = tl.load(lengths + sequence).to(tl.int32)
    active = there & pair_exists(start + row, count, previous_valid, previous_valid, sequence, 1, SHIFT, CARRIED)
    x_at = x_rows(k, previous, previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
    statistic = tl.zeros([C], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for begin in range(0, K, BK):
        x = load_rows(x_at, active, begin + tl.arange(0, BK), K)
        statistic += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        if GRAM:
            products = tl.dot(x.to(OPERAND), tl.trans(x.to(OPERAND)), products, input_precision="ieee")
    number = program * C + row
    tl.store(energy + number, statistic)
    if GRAM:
        same = row[:, None] // BLOCK == row[None, :] // BLOCK
        tl.store(gram + (number * BLOCK)[:, None] + (row % BLOCK)[None, :], products, mask=same)

    token = ((low + start) * heads + head).to(tl.int64) + row * heads
    base = tl.zeros([C], tl.float32)
    if RIDGE > 0:
        base = tl.load(ridge + token, mask=active, other=0.0).to(tl.float32)
    _, used, safe, possible = _step_size(base, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)
    if DIRECT and not CAPPED:
        scaled = tl.where(active, 1.0, 0.0)
    else:
        scaled = tl.where(active & possible, (2.0 if DIRECT else 1.0) / safe, 0.0)
    tl.store(scale + number, scaled)
    for begin in range(0, V, BV):
        channels = begin + tl.arange(0, BV)
        beta = load_rows(token_rows(gain, low + start, row, head, heads, V), active, channels, V).to(tl.float32)
        eta = step_of(beta, scaled[:, None], DIRECT, CAPPED)
        decay = LOG2_E * _log1p_negative(tl.minimum(eta * used[:, None], 1.0 - FLOOR))
        store_rows(log_decay + number * V, tl.cumsum(decay, 0), row >= 0, channels, V)


# Decays taken apart


@triton.jit
def row_of(u, channels, AT: tl.constexpr, V: tl.constexpr):
    """[1, BV] row AT of u."""
    return tl.load(u + AT * V + channels, mask=channels < V, other=0.0)[None, :]


@triton.jit
def paired(late, early, bits, LAG: tl.constexpr):
    """Which tokens `late` have `early` in the first half of their span of 2 ** bits and are in the second; in a block
    all that come LAG after it or later. Both shaped to broadcast."""
    half = late >> bits - 1 << bits - 1
    end = tl.where(bits == BLOCK_BITS, late - LAG, half - 1)
    return (early >= late >> bits << bits) & (early <= end)


@triton.jit
def load_all(at, channels, V: tl.constexpr):
    """`load_tile` of rows that all exist."""
    if (channels.shape[0] * 0 + V) % channels.shape[0] == 0:  # an int beside a constexpr in the interpreter
        return tl.load(at[0] + (at[1][:, None] + channels[None, :]))
    else:
        return tl.load(at[0] + (at[1][:, None] + channels[None, :]), mask=(channels < V)[None, :], other=0.0)


@triton.jit
def edge(u, token, channels, bits, AFTER: tl.constexpr, V: tl.constexpr):
    """[N, BV] u before, or AFTER, the span of 2 ** bits tokens that each `token` [N] lies in."""
    last = ((token >> bits) + AFTER << bits) - 1
    return load_tile((u, last * V), last >= 0, channels, V)


@triton.jit
def read_decays(u, row, nothing, channels, LAG: tl.constexpr, V: tl.constexpr):
    """[C, BV] u of what tokens read: their own, or LAG before. nothing: 0, but to the compiler any number."""
    if LAG == 0:
        return load_all((u, row * V + nothing), channels, V)
    else:
        return load_tile((u - V, row * V), row > 0, channels, V)


@triton.jit
def middles(u, first, channels, V: tl.constexpr):
    """[N, BV] u in the middle of each block."""
    return load_all((u, (first + MIDDLE) * V), channels, V)


@triton.jit
def by_block(tile, factors):
    """tile [C, BV] times its blocks' factors [N, BV]."""
    blocks: tl.constexpr = factors.shape[0]
    rows: tl.constexpr = tile.shape[0]
    width: tl.constexpr = tile.shape[1]
    same = tl.broadcast_to(tl.arange(0, blocks)[:, None], (blocks, width))
    factors = tl.gather(factors, same, 0)  # by way of shared memory: else every thread would compute its own
    parts = tl.reshape(tile, (blocks, rows // blocks, width))
    return tl.reshape(parts * factors[:, None, :], (rows, width))


@triton.jit
def beyond(tile, references):
    """tile [C, BV] less its blocks' references [N, BV]."""
    blocks: tl.constexpr = references.shape[0]
    rows: tl.constexpr = tile.shape[0]
    width: tl.constexpr = tile.shape[1]
    parts = tl.reshape(tile, (blocks, rows // blocks, width))
    return tl.reshape(parts - references[:, None, :], (rows, width))


@triton.jit
def through_chunk(
    found, scores, given, u, row, channels, nothing, BACK: tl.constexpr, LAG: tl.constexpr, SPANS: tl.constexpr,
    V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, BV] what tokens have `found` and what earlier ones have `given`, as of the middles of the tokens' blocks.

    found: as of the chunk's start, with BACK its end, and then later tokens give. given: as of the middles of the
    givers' blocks. scores: [C, C] of who is given to and who gives. nothing: 0, but to the compiler any number: it
    unrolls no loop, with all of its loads.
    """
    first = tl.arange(0, row.shape[0] // BLOCK) * BLOCK
    finding, giving = first + BLOCK // 2 * (1 - BACK), first + BLOCK // 2 * BACK  # tokens of the halves that do
    middle = middles(u, first, channels, V)
    late, early = (row[None, :], row[:, None]) if BACK else (row[:, None], row[None, :])
    for i in range(SPANS + nothing):
        bits = BLOCK_BITS + SPANS - 1 - i
        nearer = edge(u, finding, channels, bits - 1, BACK, V) - edge(u, finding, channels, bits, BACK, V)
        passing = edge(u, giving, channels, bits - 1, 1 - BACK, V) - middle  # 0 in a block
        if BACK:
            nearer, passing = -nearer, -passing
        seen = tl.where(paired(late, early, bits, LAG), scores, 0.0)
        passing = by_block(given, tl.exp2(passing)).to(OPERAND)
        found = tl.dot(seen, passing, by_block(found, tl.exp2(nearer)), input_precision=PRECISION)
    return found


# Passes over chunks


@triton.jit(do_not_specialize=NUMBERS)
def _pass(
    k, v, gain, scale, log_decay, previous, initial, states, final, part_decay,
    bounds, first, length, heads, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    PACKED: tl.constexpr, CARRIED: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, STORE: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, FROM_ZERO: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The memory S through a part of a sequence. STORE writes what each chunk finds.

    INITIAL starts from `initial` [sequence, part, ...], else from zero; FINAL has the last part write `final`.
    FROM_ZERO: what the part writes to an empty memory, to `final` [sequence, part, ...], and its log decays.
    """
    sequence, part, head, low, count, number, columns, channels, matrix, inside = program_of_part(
        bounds, first, length, heads, longest, parts, K, V, BK, BV, PACKED
    )
    part_number = (sequence * parts + part) * heads + head
    s = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        s = tl.load(initial + part_number * K * V + matrix, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([1, BV], tl.float32)

    row = tl.arange(0, C)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    following = tl.maximum(number + tl.minimum(begin, last - 1), 0) * heads + head
    end = row_of(log_decay + following * C * V, channels, C - 1, V)
    for n in range(begin, last):
        start = n * C
        there = row < count - start
        chunk = (number + n) * heads + head
        u = log_decay + chunk * C * V
        x = x_rows(k, previous, previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x, exists(start + row, there, SHIFT, CARRIED), columns, K).to(OPERAND)
        y = load_rows(token_rows(v, low + start, row, head, heads, V), there, channels, V).to(tl.float32)
        beta = load_rows(token_rows(gain, low + start, row, head, heads, V), there, channels, V).to(tl.float32)
        decays = load_rows(u + row * V, row >= 0, channels, V)
        z = step_of(beta, tl.load(scale + chunk * C + row)[:, None], DIRECT, CAPPED) * y
        if STORE:
            tl.store(states + chunk * K * V + matrix, s, mask=inside)
        z = (tl.exp2(end - decays) * z).to(OPERAND)
        s = tl.dot(tl.trans(x), z, s * tl.exp2(end), input_precision=PRECISION)
        total += end
        following = (number + tl.minimum(n + 1, last - 1)) * heads + head
        end = row_of(log_decay + following * C * V, channels, C - 1, V)

    if FROM_ZERO:
        tl.store(final + part_number * K * V + matrix, s, mask=inside)
        tl.store(part_decay + part_number * V + channels[None, :], total, mask=(channels < V)[None, :])
    elif FINAL and part == parts - 1:
        tl.store(final + (sequence * heads + head) * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _reverse_pass(
    q, log_decay, grad_output, initial, states, final, part_decay,
    bounds, first, length, heads, longest, parts, part_chunks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LAG: tl.constexpr,
    PACKED: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, FROM_ZERO: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient G of the memory, backwards through a part.

    STORE writes that of what each chunk leaves; FINAL has the first part write the initial memory's to `final`; the
    rest as in `_pass`.
    """
    sequence, part, head, low, count, number, columns, channels, matrix, inside = program_of_part(
        bounds, first, length, heads, longest, parts, K, V, BK, BV, PACKED
    )
    part_number = (sequence * parts + part) * heads + head
    g = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        g = tl.load(initial + part_number * K * V + matrix, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([1, BV], tl.float32)

    row = tl.arange(0, C)
    begin = (part * part_chunks).to(tl.int32)
    last = tl.minimum(begin + part_chunks, (count + C - 1) // C)
    following = tl.maximum(number + last - 1, 0) * heads + head
    end = row_of(log_decay + following * C * V, channels, C - 1, V)
    for i in range(0, last - begin):
        n = last - 1 - i
        start = n * C
        there = row < count - start
        chunk = (number + n) * heads + head
        u = log_decay + chunk * C * V
        queries = load_rows(token_rows(q, low + start, row, head, heads, K), there, columns, K).to(OPERAND)
        out = load_rows(token_rows(grad_output, low + start, row, head, heads, V), there, channels, V)
        read = load_rows(u + (row - LAG) * V, row >= LAG, channels, V)
        if STORE:
            tl.store(states + chunk * K * V + matrix, g, mask=inside)
        out = (tl.exp2(read) * out.to(tl.float32)).to(OPERAND)
        g = tl.dot(tl.trans(queries), out, g * tl.exp2(end), input_precision=PRECISION)
        total += end
        following = (number + tl.maximum(n - 1, begin)) * heads + head
        end = row_of(log_decay + following * C * V, channels, C - 1, V)

    if FROM_ZERO:
        tl.store(final + part_number * K * V + matrix, g, mask=inside)
        tl.store(part_decay + part_number * V + channels[None, :], total, mask=(channels < V)[None, :])
    elif FINAL and part == 0:
        tl.store(final + (sequence * heads + head) * K * V + matrix, g, mask=inside)


# Chunks on their own


@triton.jit
def _block(matrix, columns, channels, K: tl.constexpr, V: tl.constexpr):
    """[BK, BV] of a matrix [K, V]."""
    return load_rows(matrix + columns * V, columns < K, channels, V)


@triton.jit
def place_of(heads, V: tl.constexpr, BV: tl.constexpr):
    """A program's number without its tile of channels, the head, and these channels [BV]."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    return program // tiles, program // tiles % heads, (program % tiles).to(tl.int32) * BV + tl.arange(0, BV)


@triton.jit(do_not_specialize=NUMBERS)
def _read(
    q, k, given, gain, scale, log_decay, previous, states, output, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SPANS: tl.constexpr,
    SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, DIRECT: tl.constexpr,
    CAPPED: tl.constexpr, BACK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O of one chunk, head and tile of channels, of what is written: steps of values or residuals, `given`.

    BACK: dZ, which is to keys, dO and G what O is to queries, z and S; dO is `given`, and no gain.
    """
    program, head, channels = place_of(heads, V, BV)
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, C)
    there = row < count - start
    zero = tl.minimum(count - start, 0) * 64  # to the compiler any number, as in `through_chunk`
    u = log_decay + program * C * V
    q_at = token_rows(q, low + start, row, head, heads, K)
    x_at = x_rows(k, previous, previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
    readable = exists(start + row, there, SHIFT, CARRIED)
    wide = ((low + start) * heads + head) * V
    below = row * (heads * V)
    scores = tl.zeros([C, C], tl.float32)
    found = tl.zeros([C, BV], tl.float32)
    for begin in range(0, K + zero, BK):
        columns = begin + tl.arange(0, BK)
        finding = load_rows(q_at, there, columns, K).to(OPERAND)
        giving = load_rows(x_at, readable, columns, K).to(OPERAND)
        if BACK:
            finding, giving = giving, finding
        s = _block(states + program * K * V, columns, channels, K, V).to(OPERAND)
        scores = tl.dot(finding, tl.trans(giving), scores, input_precision=PRECISION)
        found = tl.dot(finding, s, found, input_precision=PRECISION)

    middle = middles(u, tl.arange(0, C // BLOCK) * BLOCK, channels, V)
    if BACK:
        z = tl.exp2(beyond(read_decays(u, row, 0, channels, LAG, V), middle))
    else:
        z = load_tile((gain + wide, below), there, channels, V).to(tl.float32)
        z = step_of(z, tl.load(scale + program * C + row)[:, None], DIRECT, CAPPED)
        z *= tl.exp2(-beyond(load_all((u, row * V), channels, V), middle))
    z = (z * load_tile((given + wide, below), there, channels, V).to(tl.float32)).to(OPERAND)
    scores = scores.to(OPERAND)
    found = through_chunk(found, scores, z, u, row, channels, zero, BACK, LAG, SPANS, V, OPERAND, PRECISION)
    if BACK:
        found *= tl.exp2(-beyond(load_all((u, row * V + zero), channels, V), middle))
    else:
        found *= tl.exp2(beyond(read_decays(u, row, zero, channels, LAG, V), middle))
    store_tile((output + wide, below), found, there, channels, V)


@triton.jit
def _asked_of(total, states, grad_states, columns, there, channels, K: tl.constexpr, V: tl.constexpr):
    """`total` [BK, BV] and S o G, where there is such a memory."""
    there = there & (columns < K)
    s = load_tile((states, columns * V), there, channels, V).to(tl.float32)
    return total + s * load_tile((grad_states, columns * V), there, channels, V).to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def _across(
    states, grad_states, grad_memory, final, grad_final, across, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    CARRIED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """[V] of one chunk and head what all that comes asks of the memory that it finds, and behind those of all chunks
    of that which it leaves, where it is a sequence's last: sums of S o G over keys."""
    chunks = tl.num_programs(0).to(tl.int64) // ((V + BV - 1) // BV)  # of all heads
    program, head, channels = place_of(heads, V, BV)
    sequence, _, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    matrix, outer = program * K * V, (sequence * heads + head) * K * V
    found, left = tl.zeros([BK, BV], tl.float32), tl.zeros([BK, BV], tl.float32)
    for begin in tl.static_range(0, K, BK):
        columns = begin + tl.arange(0, BK)
        found = _asked_of(
            found, states + matrix, grad_states + matrix - heads * K * V, columns, start > 0, channels, K, V
        )
        if CARRIED:
            found = _asked_of(found, states + matrix, grad_memory + outer, columns, start == 0, channels, K, V)
        if FINAL:
            left = _asked_of(left, final + outer, grad_final + outer, columns, start + C >= count, channels, K, V)
    tl.store(across + program * V + channels, tl.sum(found, 0), mask=channels < V)
    tl.store(across + (chunks + program) * V + channels, tl.sum(left, 0), mask=(channels < V) & (start + C >= count))


@triton.jit
def _rate_gradients(
    beta, eta, base, statistic, of_eta, of_decay, active, RIDGE: tl.constexpr, DIRECT: tl.constexpr,
    CAPPED: tl.constexpr, DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """`step_gradients` of channels: of gains [C, BV], and summed over the channels those of ridge and energy [C]."""
    _, used, safe, possible = _step_size(base, base, statistic, active, RIDGE, DIRECT, CAPPED, EPSILON)
    inverse = tl.where(active & possible, 1.0 / safe, 0.0)
    alpha = eta * used[:, None]
    of_rate = tl.where(alpha <= 1.0 - FLOOR, of_decay / (1.0 - alpha), 0.0)  # none through the clamp
    of_eta -= of_rate * used[:, None]
    of_energy = tl.zeros(statistic.shape, tl.float32)
    if not DIRECT:
        of_gain = of_eta * inverse[:, None]
        of_energy -= tl.sum(of_eta * eta, 1) * inverse
    elif CAPPED:
        cap = 2.0 * inverse[:, None]
        share = tl.where(beta < cap, 1.0, tl.where(beta == cap, 0.5, 0.0))
        of_gain = of_eta * share
        of_energy -= tl.sum(of_eta * (1.0 - share), 1) * 2.0 * inverse * inverse
    else:
        of_gain = tl.where(active[:, None], of_eta, 0.0)
    of_ridge = of_energy - tl.where(active, tl.sum(of_rate * eta, 1), 0.0)
    if RIDGE == 2:
        if not DETACH:
            of_energy += of_ridge * base
        of_ridge *= statistic
    return of_gain, of_ridge, of_energy


@triton.jit(do_not_specialize=NUMBERS)
def _channel_gradients(
    v, gain, ridge, previous_valid, lengths, scale, log_decay, energy, residuals, output, grad_z, grad_output, across,
    grad_v, grad_gain, sums, given, reading, asking, bounds, first, owner, length, longest, heads,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, LAG: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, CARRIED: tl.constexpr, RIDGE: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    DETACH: tl.constexpr, EPSILON: tl.constexpr, FLOOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Gradients of v and gain of one chunk, head and tile of channels, and what these channels ask of ridge and energy:
    `sums` [2, tiles, chunks, H, C].

    For `_key_gradients` also z, dO, and RESIDUAL eta o dZ, decayed from or to the middles of their blocks: `given`,
    `reading` and `asking` [B, T, H, V]; `asking`, or where there is none `given`, may lie where grad_z does.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    chunks = tl.num_programs(0).to(tl.int64) // tiles  # of all heads
    program, head, channels = place_of(heads, V, BV)
    tile = tl.program_id(0) % tiles
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, C)
    there = row < count - start
    u = log_decay + program * C * V
    wide = ((low + start) * heads + head) * V
    below = row * (heads * V)
    scaled = tl.load(scale + program * C + row)[:, None]
    beta = load_tile((gain + wide, below), there, channels, V).to(tl.float32)
    y = load_tile((v + wide, below), there, channels, V).to(tl.float32)
    of_z = load_tile((grad_z + wide, below), there, channels, V).to(tl.float32)
    out = load_tile((grad_output + wide, below), there, channels, V).to(tl.float32)
    middle = load_all((u, (row // BLOCK * BLOCK + MIDDLE) * V), channels, V)
    decays = load_all((u, row * V), channels, V) - middle
    eta = step_of(beta, scaled, DIRECT, CAPPED)
    asked = eta * of_z
    written = y
    if RESIDUAL:
        written = load_tile((residuals + wide, below), there, channels, V).to(tl.float32)
    store_tile((given + wide, below), tl.exp2(-decays) * eta * written, there, channels, V)
    if RESIDUAL or LAG > 0:
        earlier = read_decays(u, row, 0, channels, 1, V) - middle
        if RESIDUAL:
            store_tile((asking + wide, below), tl.exp2(earlier) * asked, there, channels, V)
        if LAG > 0:
            decays = earlier
    store_tile((reading + wide, below), tl.exp2(decays) * out, there, channels, V)
    store_tile((grad_v + wide, below), asked, there, channels, V)

    read = out * load_tile((output + wide, below), there, channels, V).to(tl.float32)
    writes = asked * y
    doubt = read * read + writes * writes + 1e-30
    begin = tl.load(across + program * V + channels, mask=channels < V, other=0.0)
    following = program + tl.where(start + C < count, heads, chunks)
    end = tl.load(across + following * V + channels, mask=channels < V, other=0.0)
    missing = (begin - end - tl.sum(read - writes, 0)) / tl.sum(doubt, 0)
    passing = read - writes + doubt * missing[None, :]
    of_decay = begin[None, :] + passing - tl.cumsum(passing, 0)
    if LAG > 0:
        of_decay -= read
    if RESIDUAL:
        of_decay += asked * (y - written)

    valid = count
    if MASKED:
        valid = tl.load(lengths + sequence).to(tl.int32)
    active = there & pair_exists(start + row, valid, previous_valid, previous_valid, sequence, 1, SHIFT, CARRIED)
    token = ((low + start) * heads + head).to(tl.int64) + row * heads
    base = tl.zeros([C], tl.float32)
    if RIDGE > 0:
        base = tl.load(ridge + token, mask=active, other=0.0).to(tl.float32)
    statistic = tl.load(energy + program * C + row)
    of_gain, of_ridge, of_energy = _rate_gradients(
        beta, eta, base, statistic, of_z * written, of_decay, active, RIDGE, DIRECT, CAPPED, DETACH, EPSILON, FLOOR
    )
    store_tile((grad_gain + wide, below), of_gain, there, channels, V)
    sums += (tile * chunks + program) * C + row
    tl.store(sums, of_ridge)
    tl.store(sums + tiles * chunks * C, of_energy)


@triton.jit(do_not_specialize=NUMBERS)
def _key_gradients(
    q, k, previous, log_decay, given, reading, asking, states, grad_states, sums,
    grad_q, grad_k, grad_ridge, grad_previous, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SPANS: tl.constexpr,
    SHIFT: tl.constexpr, LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, RIDGE: tl.constexpr,
    TILES: tl.constexpr, RESIDUAL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q and the write features, where their keys lie, of one chunk and head; and of ridge.

    dA is held transposed, [written, reading]: so it is a left operand of dX, and a right one of dQ'. RESIDUAL: so is
    that of X X', which counts both ways round.
    """
    program = tl.program_id(0).to(tl.int64)
    behind = tl.num_programs(0).to(tl.int64) * C
    head = program % heads
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, C)
    there = row < count - start
    zero = tl.minimum(count - start, 0) * 64  # to the compiler any number, as in `through_chunk`
    u = log_decay + program * C * V
    wide = ((low + start) * heads + head) * V
    below = row * (heads * V)
    given += wide
    reading += wide
    if RESIDUAL:
        asking += wide
    first = tl.arange(0, C // BLOCK) * BLOCK

    of_scores = tl.zeros([C, C], tl.float32)
    of_gram = tl.zeros([C, C], tl.float32)
    late, early = row[None, :], row[:, None]
    for begin in range(0, V + zero, BV):
        channels = begin + tl.arange(0, BV)
        middle = middles(u, first, channels, V)
        for i in range(SPANS + zero):
            z = load_tile((given, below + i * zero), there, channels, V)  # each time: else kept, and spilled
            out = load_tile((reading, below + i * zero), there, channels, V)
            if RESIDUAL:
                asked = load_tile((asking, below + i * zero), there, channels, V)
            bits = BLOCK_BITS + SPANS - 1 - i
            passing = tl.exp2(edge(u, first, channels, bits - 1, 1, V) - middle)
            nearer = tl.exp2(middle - edge(u, first + BLOCK // 2, channels, bits - 1, 0, V))
            z = by_block(z, passing).to(OPERAND)
            out = by_block(out, nearer).to(OPERAND)
            product = tl.dot(z, tl.trans(out), input_precision=PRECISION)
            of_scores += tl.where(paired(late, early, bits, LAG), product, 0.0)
            if RESIDUAL:
                asked = by_block(asked, nearer).to(OPERAND)
                product = tl.dot(z, tl.trans(asked), input_precision=PRECISION)
                of_gram -= tl.where(paired(late, early, bits, 1), product, 0.0)
    left = of_scores.to(OPERAND)
    if RESIDUAL:
        system = (of_gram + tl.trans(of_gram)).to(OPERAND)

    of_energy = tl.zeros([C], tl.float32)
    of_ridge = tl.zeros([C], tl.float32)
    for i in tl.static_range(TILES):
        of_ridge += tl.load(sums + i * behind + program * C + row)
        of_energy += tl.load(sums + (TILES + i) * behind + program * C + row)
    if RIDGE > 0:
        token = ((low + start) * heads + head).to(tl.int64) + row * heads
        tl.store(grad_ridge + token, of_ridge, mask=there)

    narrow, along = ((low + start) * heads + head) * K, row * (heads * K)
    x_at = x_rows(k, previous, previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
    into = x_rows(grad_k, grad_previous, grad_previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
    readable = exists(start + row, there, SHIFT, CARRIED)
    for key_begin in range(0, K + zero, BK):
        columns = key_begin + tl.arange(0, BK)
        of_q = tl.zeros([BK, C], tl.float32)
        of_x = tl.zeros([C, BK], tl.float32)
        for begin in range(0, V + zero, BV):
            channels = begin + tl.arange(0, BV)
            z = load_tile((given, below), there, channels, V)
            out = load_tile((reading, below), there, channels, V)
            if RESIDUAL:
                asked = load_tile((asking, below), there, channels, V)
            s = load_tile((states + program * K * V, columns * V), columns < K, channels, V).to(OPERAND)
            g = load_tile((grad_states + program * K * V, columns * V), columns < K, channels, V).to(OPERAND)
            middle = middles(u, first, channels, V)
            z = by_block(z, tl.exp2(row_of(u, channels, C - 1, V) - middle)).to(OPERAND)
            out = by_block(out, tl.exp2(middle)).to(OPERAND)
            of_q = tl.dot(s, tl.trans(out), of_q, input_precision=PRECISION)
            of_x = tl.dot(z, tl.trans(g), of_x, input_precision=PRECISION)
            if RESIDUAL:
                asked = by_block(asked, -tl.exp2(middle)).to(OPERAND)
                of_x = tl.dot(asked, tl.trans(s), of_x, input_precision=PRECISION)
        x = load_rows(x_at, readable, columns, K)
        queries = load_tile((q + narrow, along), there, columns, K).to(OPERAND)
        of_q = tl.dot(tl.trans(x.to(OPERAND)), left, of_q, input_precision=PRECISION)
        of_q = tl.trans(of_q.to(grad_q.dtype.element_ty))
        store_tile((grad_q + narrow, along), of_q, there, columns, K)
        of_x = tl.dot(left, queries, of_x, input_precision=PRECISION)
        if RESIDUAL:
            of_x = tl.dot(system, x.to(OPERAND), of_x, input_precision=PRECISION)
        of_x += 2.0 * of_energy[:, None] * x.to(tl.float32)
        store_rows(into, of_x, readable, columns, K)
        if SHIFT:  # the last key is nobody's write feature here
            last = grad_k + ((low + count - 1) * heads + head) * K
            none = tl.zeros([BK], grad_k.dtype.element_ty)
            tl.store(last + columns, none, mask=(columns < K) & (start + C >= count))


# Launches


def chunk_length(dtype: torch.dtype, key_dim: int, window: int) -> int:
    operand_bytes = operand_dtype(dtype).itemsize
    return launch.chunk_length(operand_bytes, launch.padded(key_dim, operand_bytes), 1)


def shapes(layout: Layout, heads: int, value_dim: int) -> tuple[tuple[int, ...], ...]:
    """Of scale, log decays and energies."""
    one = (layout.chunks, heads, layout.chunk)
    return one, (*one, value_dim), one


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`."""
    *_, heads, key_dim = shape
    numbers: list[Shape | None] = [(n, torch.float32) for n in shapes(layout, heads, value_dim)]
    return [*numbers, None, ((layout.chunks, heads, key_dim, value_dim), operand_dtype(dtype)), None]


class Plan:
    """All of the launches of a call that follows from shapes and options."""

    def __init__(
        self, layout: Layout, shape: torch.Size, value_dim: int, dtype: torch.dtype, device: torch.device,
        options: Options, before: bool, masked: bool, carried: bool, aligned: bool = False,
        sizes: launch.Channel | None = None,
    ):  # fmt: skip
        _, _, self.heads, key_dim = shape
        self.operand = operand_dtype(dtype)
        self.memory = (layout.sequences, self.heads, key_dim, value_dim)
        self.decays = (value_dim,)  # of a part
        self.device = device
        self.states = (layout.chunks, self.heads, key_dim, value_dim)
        self.shapes = shapes(layout, self.heads, value_dim)
        size = self.operand.itemsize
        self.key_tile, self.value_width = (launch.padded(d, size) for d in (key_dim, value_dim))
        self.sizes = sizes = sizes or launch.channel(device, size, self.key_tile)
        self.rows, self.all_chunks = layout.sequences * self.heads, layout.chunks * self.heads
        self.aligned = aligned
        residual = options.capped
        self.constants = {
            "K": key_dim, "V": value_dim, "C": layout.chunk, "SPANS": (layout.chunk // 16).bit_length(),
            "SHIFT": int(options.shifted), "LAG": int(before), "MASKED": masked, "PACKED": layout.packed,
            "CARRIED": carried, "RESIDUAL": residual, "OPERAND": OPERANDS[self.operand],
            "PRECISION": "tf32" if dtype == torch.float16 else "ieee",
        } | options.constants()  # fmt: skip

        programs = self.rows * self._tiles(sizes.forward)
        segments = 1 if residual else launch.segments(device, programs, layout.longest)
        part_chunks = -(-layout.longest // segments)
        self.parts = -(-layout.longest // part_chunks)
        self.along = (layout.length, self.heads, layout.longest, self.parts, part_chunks)
        self.numbers = (layout.length, layout.longest, self.heads)

        tiles = self._tiles(sizes.channels)
        self.sums = (2, tiles, layout.chunks, self.heads, layout.chunk)
        self.ends = (2, layout.chunks, self.heads, value_dim)
        self.rates = self.launcher(_rates, self.all_chunks, sizes.rates, GRAM=residual)
        self.read = self.launcher(_read, self.all_chunks * self._tiles(sizes.read), sizes.read, BACK=0)
        self.ask = self.launcher(_read, self.all_chunks * self._tiles(sizes.ask), sizes.ask, BACK=1)
        self.across = self.launcher(_across, self.all_chunks * self._tiles(sizes.across), sizes.across, "FINAL")
        self.channels = self.launcher(_channel_gradients, self.all_chunks * tiles, sizes.channels)
        self.keys = self.launcher(_key_gradients, self.all_chunks, sizes.keys, TILES=tiles)
        modes = ("STORE", "FINAL", "INITIAL", "FROM_ZERO")
        programs = self.rows * self.parts
        self.forward = self.launcher(_pass, programs * self._tiles(sizes.forward), sizes.forward, *modes)
        self.reverse = self.launcher(_reverse_pass, programs * self._tiles(sizes.reverse), sizes.reverse, *modes)
        self.carry = carry_launcher(self.rows, (key_dim, value_dim), value_dim, aligned)

    def _tiles(self, config: launch.Config) -> int:
        return -(-self.memory[-1] // min(config.value_tile, self.value_width))

    def launcher(self, kernel, programs: int, config: launch.Config, *flags: str, **more) -> Launcher:
        tiles = {"BK": min(config.key_tile, self.key_tile), "BV": min(config.value_tile, self.value_width)}
        constants = {n: c for n, c in (self.constants | tiles | more).items() if n in kernel.arg_names}
        return Launcher(kernel, (programs,), constants | config.options(), flags, self.aligned)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, gain, tables, previous = call.q, call.k, call.v, call.gain, call.tables, call.before.previous_key
    scale, log_decay, energy = rates(plan, call, None)

    def run(initial, states, final, part_decay, from_zero):
        last = final is not None and not from_zero
        plan.forward(
            k, v, gain, scale, log_decay, previous, initial, states, final, part_decay, *tables[:2], *plan.along,
            flags=(states is not None, last, initial is not None, from_zero),
        )  # fmt: skip

    states = torch.empty(plan.states, dtype=plan.operand, device=q.device)
    initial = in_parts(plan, lambda found, decay: run(None, None, found, decay, True), call.memory, False)
    run(initial, states, final, None, False)
    plan.read(q, k, v, gain, scale, log_decay, previous, states, output, *tables, *plan.numbers)
    return Kept(scale, log_decay, energy, states=states)


def rates(plan: Plan, call: Call, gram: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What gains are multiplied by, running log decays, and energies; fills `gram` where it is given."""
    before = call.before
    scale, log_decay, energy = (torch.empty(shape, dtype=torch.float32, device=call.k.device) for shape in plan.shapes)
    plan.rates(
        call.k, call.gain, call.ridge, before.previous_key, before.previous_valid, call.lengths, scale, log_decay,
        energy, gram, *call.tables, *plan.numbers,
    )  # fmt: skip
    return scale, log_decay, energy


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    grad_states = reverse_passes(plan, call, kept, grad_output, grad_final, into)
    grad_z = torch.empty(call.v.shape, dtype=plan.operand, device=call.q.device)
    plan.ask(
        call.q, call.k, grad_output, None, None, kept.log_decay, call.before.previous_key, grad_states, grad_z,
        *call.tables, *plan.numbers,
    )  # fmt: skip
    gradients(plan, call, kept, grad_output, grad_z, grad_states, grad_final, into)


def gradients(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_z: Tensor, grad_states: Tensor,
    grad_final: Tensor | None, into: Gradients,
) -> None:  # fmt: skip
    """All but the memory's, of chunks on their own; `grad_z` [B, T, H, V]."""
    q, k, v, gain, ridge, _, before, lengths, tables = call
    scale, log_decay, energy, _, states, residuals, output, final = kept
    sums = torch.empty(plan.sums, dtype=torch.float32, device=q.device)
    across = torch.empty(plan.ends, dtype=torch.float32, device=q.device)
    reading = torch.empty_like(grad_z)
    given = grad_z if residuals is None else torch.empty_like(grad_z)
    plan.across(
        states, grad_states, into.memory, final, grad_final, across, *tables, *plan.numbers,
        flags=(grad_final is not None,),
    )  # fmt: skip
    plan.channels(
        v, gain, ridge, before.previous_valid, lengths, scale, log_decay, energy, residuals, output, grad_z,
        grad_output, across, into.v, into.gain, sums, given, reading, grad_z, *tables, *plan.numbers,
    )  # fmt: skip
    plan.keys(
        q, k, before.previous_key, log_decay, given, reading, grad_z, states, grad_states, sums, into.q, into.k,
        into.ridge, into.before.previous_key, *tables, *plan.numbers,
    )  # fmt: skip
