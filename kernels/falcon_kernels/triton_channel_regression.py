"""The regression write with one rate a value channel, falcon_2: the solves that it needs beside triton_channel.py.

What a token writes is z_i = eta_i o r_i with the residual r_i = v_i - S'x_i of the memory that it finds. In a block of
16 tokens that finds the memory S, with u the running log decay within it, channel by channel

    r_i = v_i - exp(u_{i-1}) o (x_i S) - sum_{s < i} (x_i x_s') exp(u_{i-1} - u_s) o z_s.

The system has a matrix per channel, but its products x_i x_s' are all channels'. With decays taken apart around u_m of
the block's middle token, a_i = exp(u_{i-1} - u_m), b_s = exp(u_m - u_s) and y = b o z, it is

    r_i = v_i - a_i o h_i,      h_i = exp(u_m) o (x_i S) + sum_{s < i} (x_i x_s') y_s,      y_i = b_i o eta_i o r_i,

16 steps of a multiplication per pair and channel. The memory moves from block to block, by products:

    S_out = S Diag(exp(u_16)) + X' (exp(u_16 - u_m) o y).

With G the cotangent of what a block leaves, dO that of the reads, and Y that of z, backwards

    dZ_s = sum of what the block's tokens read of z_s
    Y_s  = dZ_s + b_s o (exp(u_16 - u_m) o (x_s G) - sum_{i > s} (x_i x_s') w_i),      w_i = a_i o eta_i o Y_i
    G_in = G Diag(exp(u_16)) + Q' (exp(u) o dO) - X' (exp(u_m) o w).

What remains is each chunk's on its own: reads as in falcon_2a, of residuals instead of values, and the gradients
dv = eta o Y, deta = Y o r, and that of x_i x_s', which is -exp(u_{i-1} - u_s) o eta_i o Y_i o z_s summed over channels.

    forward    rates      also X X' within blocks    one program per (chunk, head)
               solve      r, S                       one per (sequence, head, V tile), over its blocks
               read       O
    backward   within     what blocks read of dO     one per (chunk, head, V tile)
               unsolve    Y, G                       as solve, backwards
               gradients

Both solves hold S' and G', [V, K], whose products with x have them as left operands, in registers, and take each token
of a block as a vector over channels: a thread then has all 16 tokens of a channel, and the substitution waits for none.
A warp has some channels of a sequence to itself, and hardly ever waits for others; what products take and give crosses
over between its threads once a block. A token's number is added to the sums h of all that are left as soon as it is
known. A warp may have a part of a multiprocessor to itself, and would then wait for every load: so what a block needs
is copied to shared memory while blocks before it are solved. That is done to loads of one number a thread or more that
lead to a product of their own block. Long sequences are not cut into parts here.

Elements moved per token and head: solve K + 2V + gain + u + KV/C, unsolve 2K + 3V + gain + u + KV/C, within
2K + 2V + u; gains in float32 and u count twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, triton_channel
from .triton_channel import (
    BLOCK,
    BLOCK_BITS,
    MIDDLE,
    beyond,
    chunk_length,
    load_all,
    middles,
    paired,
    place_of,
    read_decays,
    shapes,
    step_of,
)
from .triton_layout import (
    NUMBERS,
    Layout,
    chunk_of,
    exists,
    load_rows,
    load_tile,
    operand_dtype,
    span,
    store_tile,
    token_rows,
    x_rows,
)
from .triton_schedule import Call, Gradients, Kept, Shape

__all__ = ["Plan", "backward", "chunk_length", "forward", "shapes"]


# A block's tokens, each on its own


@triton.jit
def _quarter(tile):
    """The 4 columns [R] of a tile [R, 4]."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _apart(tile):
    """The 16 columns [R] of a tile [R, 16]."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 8, 2)))
    zero, two = tl.split(tl.reshape(even, (tile.shape[0], 4, 2)))
    one, three = tl.split(tl.reshape(odd, (tile.shape[0], 4, 2)))
    parts = _quarter(zero), _quarter(one), _quarter(two), _quarter(three)  # by number modulo 4
    columns = ()
    for j in tl.static_range(BLOCK):
        columns += (parts[j % 4][j // 4],)
    return columns


@triton.jit
def _together(columns, LAST: tl.constexpr = 0):
    """The tile [R, 16] of 16 columns [R]; with LAST of 15 the last of them comes first."""
    rows: tl.constexpr = columns[0].shape[0]
    parts = ()
    for j in tl.static_range(4):
        even = tl.join(columns[j ^ LAST], columns[j + 8 ^ LAST])
        odd = tl.join(columns[j + 4 ^ LAST], columns[j + 12 ^ LAST])
        parts += (tl.reshape(tl.join(even, odd), (rows, 4)),)
    even = tl.reshape(tl.join(parts[0], parts[2]), (rows, 8))
    odd = tl.reshape(tl.join(parts[1], parts[3]), (rows, 8))
    return tl.reshape(tl.join(even, odd), (rows, 16))


@triton.jit
def _rows(base, stride, there, channels, V: tl.constexpr):
    """16 rows [BV] of V numbers, `stride` apart, in float32; 0 where not `there`."""
    return _apart(tl.trans(load_tile((base, tl.arange(0, BLOCK) * stride), there, channels, V).to(tl.float32)))


@triton.jit
def _store_rows(base, stride, channels, count, rows, LAST: tl.constexpr, V: tl.constexpr):
    for j in tl.static_range(BLOCK):
        tl.store(base + j * stride + channels, rows[j ^ LAST], mask=(channels < V) & (j < count))


@triton.jit
def _numbers(base, COUNT: tl.constexpr):
    """16 or 32 numbers [1], each for all channels. A thread loads one: of fewer, one thread would load all."""
    i = tl.arange(0, 32)
    even, odd = tl.split(tl.reshape(tl.load(base + i, mask=i < COUNT, other=0.0), (1, 16, 2)))
    even, odd, numbers = _apart(even), _apart(odd), ()
    for j in tl.static_range(COUNT):
        numbers += ((odd if j % 2 else even)[j // 2],)
    return numbers


@triton.jit
def _features(of, start, columns, K: tl.constexpr, SHIFT: tl.constexpr, CARRIED: tl.constexpr, OPERAND: tl.constexpr):
    """[16, BK] write features `of` a sequence and head from a place on, 0 where there is none."""
    k, previous, sequence, low, count, head, heads = of
    i = tl.arange(0, BLOCK)
    x = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
    there = (i < count - start) & (start >= 0)  # which it is; but so masks of loads ahead take fewer registers
    return load_rows(x, exists(start + i, there, SHIFT, CARRIED), columns, K).to(OPERAND)


@triton.jit(do_not_specialize=NUMBERS)
def _solve(
    k, v, gain, scale, log_decay, gram, previous, memory, states, residuals, final,
    bounds, first, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    PACKED: tl.constexpr, CARRIED: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, FINAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Residuals, and the memory that each chunk finds, of one sequence, head and tile of channels."""
    program, head, channels = place_of(heads, V, BV)
    sequence = program // heads
    low, count = span(sequence, bounds, length, PACKED)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    columns = tl.arange(0, BK)
    inside = (channels < V)[:, None] & (columns < K)[None, :]
    matrix = channels[:, None] + (columns * V)[None, :]
    s = tl.zeros([BV, BK], tl.float32)
    if CARRIED:
        s = tl.load(memory + program * K * V + matrix, mask=inside, other=0.0)

    tl.store(states + (number * heads + head) * K * V + matrix, s, mask=inside & (count > 0))
    of, token = (k, previous, sequence, low, count, head, heads), tl.arange(0, BLOCK)
    begin = tl.zeros([BV], tl.float32)  # u where the block begins
    for start in range(0, count, BLOCK):
        row = ((number + start // C) * heads + head) * C + start % C
        wide = ((low + start) * heads + head).to(tl.int64) * V
        u = log_decay + row * V
        there = token < count - start
        x = _features(of, start, columns, K, SHIFT, CARRIED, OPERAND)
        at = _rows(u, V, token >= 0, channels, V)
        rates = _rows(gain + wide, heads * V, there, channels, V)
        values = _rows(v + wide, heads * V, there, channels, V)
        scales, of_block = _numbers(scale + row, 16), gram + row * BLOCK
        middle, end = at[MIDDLE], at[BLOCK - 1]
        to_middle, to_end = tl.exp2(middle - begin), tl.exp2(end - middle)
        found = _apart(tl.dot(s.to(OPERAND), tl.trans(x), input_precision=PRECISION))
        h = ()  # of the tokens that are left
        for j in tl.static_range(BLOCK):
            h += (to_middle * found[j],)
        before, r, z = begin, (), ()
        for i in tl.static_range(BLOCK):
            r += (values[i] - tl.exp2(before - middle) * h[0],)
            y = tl.exp2(middle - at[i]) * step_of(rates[i], scales[i], DIRECT, CAPPED) * r[i]
            z += (to_end * y,)
            if i % 2 == 0:
                products = _numbers(of_block + i * BLOCK, 32)  # of this token and the next
            left = ()
            for j in tl.static_range(i + 1, BLOCK):
                left += (h[j - i] + products[i % 2 * BLOCK + j] * y,)
            h, before = left, at[i]
        begin = tl.where((start + BLOCK) % C == 0, 0.0, end)
        _store_rows(residuals + wide, heads * V, channels, count - start, r, 0, V)
        s = tl.dot(_together(z).to(OPERAND), x, s * (to_middle * to_end)[:, None], input_precision=PRECISION)
        if ((start + BLOCK) % C == 0) & (start + BLOCK < count):
            chunk = (number + (start + BLOCK) // C) * heads + head
            tl.store(states + chunk * K * V + matrix, s, mask=inside)
    if FINAL:
        tl.store(final + program * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _within(
    q, k, log_decay, previous, grad_output, grad_z, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What reads of a block's writes in the block ask of them, of one chunk, head and tile of channels."""
    program, head, channels = place_of(heads, V, BV)
    sequence, low, count, start = chunk_of(program // heads, bounds, first, owner, length, longest, C, PACKED)
    if start >= count:
        return
    row = tl.arange(0, C)
    there = row < count - start
    u = log_decay + program * C * V
    q_at = token_rows(q, low + start, row, head, heads, K)
    x_at = x_rows(k, previous, previous, sequence, low, start, row, head, heads, K, 1, SHIFT, CARRIED)
    readable = exists(start + row, there, SHIFT, CARRIED)
    scores = tl.zeros([C, C], tl.float32)
    for begin in range(0, K, BK):
        queries = load_rows(q_at, there, begin + tl.arange(0, BK), K).to(OPERAND)
        x = load_rows(x_at, readable, begin + tl.arange(0, BK), K).to(OPERAND)
        scores = tl.dot(x, tl.trans(queries), scores, input_precision=PRECISION)
    wide, below = ((low + start) * heads + head) * V, row * (heads * V)
    middle = middles(u, tl.arange(0, C // BLOCK) * BLOCK, channels, V)
    decays = beyond(load_all((u, row * V), channels, V), middle)
    read = decays
    if LAG > 0:
        read = beyond(read_decays(u, row, 0, channels, LAG, V), middle)
    out = load_tile((grad_output + wide, below), there, channels, V).to(tl.float32)
    seen = tl.where(paired(row[None, :], row[:, None], BLOCK_BITS, LAG), scores, 0.0).to(OPERAND)
    of_z = tl.exp2(-decays) * tl.dot(seen, (tl.exp2(read) * out).to(OPERAND), input_precision=PRECISION)
    store_tile((grad_z + wide, below), of_z, there, channels, V)


@triton.jit(do_not_specialize=NUMBERS)
def _unsolve(
    q, k, gain, scale, log_decay, gram, previous, grad_output, grad_final, grad_z, grad_states, grad_memory,
    bounds, first, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr,
    FINAL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y, in the place of what `_within` left, and G of what each chunk leaves, backwards through one sequence and head,
    for a tile of channels."""
    program, head, channels = place_of(heads, V, BV)
    sequence = program // heads
    low, count = span(sequence, bounds, length, PACKED)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    columns = tl.arange(0, BK)
    inside = (channels < V)[:, None] & (columns < K)[None, :]
    matrix = channels[:, None] + (columns * V)[None, :]
    g = tl.zeros([BV, BK], tl.float32)
    if FINAL:
        g = tl.load(grad_final + program * K * V + matrix, mask=inside, other=0.0)

    blocks = (count + BLOCK - 1) // BLOCK
    last = (number + (count - 1) // C) * heads + head
    tl.store(grad_states + last * K * V + matrix, g, mask=inside & (count > 0))
    of, of_q = (k, previous, sequence, low, count, head, heads), (q, q, sequence, low, count, head, heads)
    both, token = tl.arange(0, 2), tl.arange(0, BLOCK)
    for back in range(0, blocks):
        start = (blocks - 1 - back) * BLOCK
        chunk = (number + start // C) * heads + head
        row = chunk * C + start % C
        wide = ((low + start) * heads + head).to(tl.int64) * V
        u = log_decay + row * V
        there = token < count - start
        x = _features(of, start, columns, K, SHIFT, CARRIED, OPERAND)
        found = _apart(tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION))
        begin = load_tile((u - V, both * V), (both > 0) | (start % C > 0), channels, V)
        begin, _ = tl.split(tl.trans(begin))  # of two rows: so each thread loads a number
        at = _rows(u, V, token >= 0, channels, V)
        rates = _rows(gain + wide, heads * V, there, channels, V)
        asked = _rows(grad_z + wide, heads * V, there, channels, V)
        scales, of_block = _numbers(scale + row, 16), gram + row * BLOCK
        read = load_tile((u - LAG * V, token * V), (token >= LAG) | (start % C > 0), channels, V)
        out = load_tile((grad_output + wide, token * (heads * V)), there, channels, V).to(tl.float32)
        out = (tl.exp2(read - begin[None, :]) * out).to(OPERAND)
        middle, end = at[MIDDLE], at[BLOCK - 1]
        to_middle, to_end = tl.exp2(middle - begin), tl.exp2(end - middle)
        h = ()  # of the tokens that are left
        for j in tl.static_range(BLOCK):
            h += (to_end * found[j],)
        of_z, w = (), ()  # from the last token on
        for i in tl.static_range(BLOCK - 1, -1, -1):
            before = tl.exp2((at[i - 1] if i > 0 else begin) - middle)
            now = asked[i] + tl.exp2(middle - at[i]) * h[i]
            of_z += (now,)
            now = before * step_of(rates[i], scales[i], DIRECT, CAPPED) * now
            w += (-to_middle * now,)
            if i % 2 == 1:
                products = _numbers(of_block + (i - 1) * BLOCK, 32)  # of this token and the one before
            left = ()
            for j in tl.static_range(i):
                left += (h[j] - products[i % 2 * BLOCK + j] * now,)
            h = left
        _store_rows(grad_z + wide, heads * V, channels, count - start, of_z, 15, V)
        queries = _features(of_q, start, columns, K, 0, True, OPERAND)
        g = tl.dot(tl.trans(out), queries, g * (to_middle * to_end)[:, None], input_precision=PRECISION)
        g = tl.dot(_together(w, 15).to(OPERAND), x, g, input_precision=PRECISION)
        if (start % C == 0) & (start > 0):
            tl.store(grad_states + (chunk - heads) * K * V + matrix, g, mask=inside)
    if CARRIED:
        tl.store(grad_memory + program * K * V + matrix, g, mask=inside)


def kept(layout: Layout, shape: tuple[int, ...], value_dim: int, window: int, dtype: torch.dtype) -> list[Shape | None]:
    """Shapes of `Kept`, of q of `shape`; its inverse are products of keys in blocks."""
    *rows, heads, _ = shape
    *numbers, _, states, _ = triton_channel.kept(layout, shape, value_dim, window, dtype)
    gram = ((layout.chunks, heads, layout.chunk, BLOCK.value), torch.float32)
    return [*numbers, gram, states, ((*rows, heads, value_dim), operand_dtype(dtype))]


class Plan(triton_channel.Plan):
    """All of the launches of a call that follows from shapes and options."""

    def __init__(self, layout, shape, value_dim, dtype, device, *options, sizes: launch.Channel | None = None):
        super().__init__(layout, shape, value_dim, dtype, device, *options, sizes=sizes)
        rows = self.rows
        solve, unsolve = (launch.alone(device, c, rows, value_dim) for c in (self.sizes.solve, self.sizes.unsolve))
        self.gram = (layout.chunks, self.heads, layout.chunk, BLOCK.value)

        within = self.sizes.within
        self.solve = self.launcher(_solve, rows * self._tiles(solve), solve, "FINAL")
        self.unsolve = self.launcher(_unsolve, rows * self._tiles(unsolve), unsolve, "FINAL")
        self.within = self.launcher(_within, self.all_chunks * self._tiles(within), within)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, gain, tables, previous = call.q, call.k, call.v, call.gain, call.tables, call.before.previous_key
    gram = torch.empty(plan.gram, dtype=torch.float32, device=q.device)
    states = torch.empty(plan.states, dtype=plan.operand, device=q.device)
    residuals = torch.empty(v.shape, dtype=plan.operand, device=q.device)
    scale, log_decay, energy = triton_channel.rates(plan, call, gram)
    plan.solve(
        k, v, gain, scale, log_decay, gram, previous, call.memory, states, residuals, final, *tables[:2],
        *plan.numbers, flags=(final is not None,),
    )  # fmt: skip
    plan.read(q, k, residuals, gain, scale, log_decay, previous, states, output, *tables, *plan.numbers)
    return Kept(scale, log_decay, energy, gram, states, residuals)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, tables, previous = call.q, call.k, call.tables, call.before.previous_key
    scale, log_decay, _, gram, states, residuals, *_ = kept
    assert states is not None
    assert residuals is not None
    grad_states, grad_z = torch.empty_like(states), torch.empty_like(residuals)
    plan.within(q, k, log_decay, previous, grad_output, grad_z, *tables, *plan.numbers)
    plan.unsolve(
        q, k, call.gain, scale, log_decay, gram, previous, grad_output, grad_final, grad_z, grad_states, into.memory,
        *tables[:2], *plan.numbers, flags=(grad_final is not None,),
    )  # fmt: skip
    triton_channel.gradients(plan, call, kept, grad_output, grad_z, grad_states, grad_final, into)
