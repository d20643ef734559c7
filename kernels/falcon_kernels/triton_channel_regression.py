"""The regression write with one rate a value channel, falcon_2: the solves that it needs beside triton_channel.py.

What a token writes is z_i = eta_i o r_i with the residual r_i = v_i - S'x_i of the memory that it finds. In a block of
16 tokens that finds the memory S, with u the running log decay within it, channel by channel

    r_i = v_i - exp(u_{i-1}) o (x_i S) - sum_{s < i} (x_i x_s') exp(u_{i-1} - u_s) o z_s.

The system has a matrix per channel, but its products x_i x_s' are all channels'. With decays taken apart around u_m of
the block's middle token, a_i = exp(u_{i-1} - u_m) and b_s = exp(u_m - u_s), and y = b o z, it is

    y_i = b_i eta_i o (v_i - exp(u_{i-1}) o (x_i S)) - (a_i b_i eta_i) o h_i,      h_i = sum_{s < i} (x_i x_s') y_s,

16 steps of a multiplication per pair and channel. The memory moves from block to block, by products:

    S_out = S Diag(exp(u_16)) + X' (exp(u_16 - u) o z).

With G the cotangent of what a block leaves, dO that of the reads, and w_i = a_i eta_i o Y_i, backwards

    dZ_s = sum of what the block's tokens read of z_s + exp(u_16 - u_s) o (x_s G)
    Y_s  = dZ_s - b_s o sum_{i > s} (x_i x_s') w_i                                 all of the cotangent of z_s
    G_in = G Diag(exp(u_16)) + Q' (exp(u) o dO) - X' (exp(u_{i-1}) o eta o Y).

What remains is each chunk's on its own: reads as in falcon_2a, of residuals instead of values, and the gradients
dv = eta o Y, deta = Y o r, and that of x_i x_s', which is -exp(u_{i-1} - u_s) o eta_i o Y_i o z_s summed over channels.

    forward    rates      also X X' within blocks    one program per (chunk, head)
               solve      r, S                       one per (sequence, head, V tile), over its blocks
               read       O
    backward   within     what blocks read of dO     one per (chunk, head, V tile)
               unsolve    Y, G                       as solve, backwards
               gradients

Both solves hold S' and G', [V, K], whose products with x have them as left operands, in registers, and give tiles
[V, 16] of which a channel's 16 tokens lie in four neighbouring threads, as long as a warp has 16 channels: the
substitution then waits for no other warp. Narrower tiles would make no step of it shorter. Long sequences are not cut
into parts here.

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
    as_product,
    beyond,
    chunk_length,
    load_all,
    middles,
    paired,
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


@triton.jit
def _load(base, stride, i, channels, there, V: tl.constexpr):
    """[BV, R] of rows of V numbers, `stride` apart, in float32."""
    pointers = base + (i * stride)[None, :] + channels[:, None]
    return tl.load(pointers, mask=there[None, :] & (channels < V)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _decays(u, inside, i, channels, V: tl.constexpr):
    """Running log decays [BV, 16] from a block's start, those of the tokens before, and at its middle and end [BV, 1].

    u: points to the block's first row, which is `inside` rows into its chunk.
    """
    start = tl.load(u - V + channels, mask=(channels < V) & (inside > 0), other=0.0)[:, None]
    at = _load(u, V, i, channels, i >= 0, V) - start
    before = _load(u - V, V, i, channels, i + inside > 0, V) - start
    middle = tl.load(u + MIDDLE * V + channels, mask=channels < V, other=0.0)[:, None] - start
    end = tl.load(u + (BLOCK - 1) * V + channels, mask=channels < V, other=0.0)[:, None] - start
    return at, before, middle, end


@triton.jit(do_not_specialize=NUMBERS)
def _solve(
    k, v, gain, scale, log_decay, gram, previous, memory, states, residuals, final,
    bounds, first, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    PACKED: tl.constexpr, CARRIED: tl.constexpr, DIRECT: tl.constexpr, CAPPED: tl.constexpr, FINAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Residuals, and the memory that each chunk finds, of one sequence, head and tile of channels."""
    tiles = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    channels = (program % tiles).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tiles
    sequence, head = program // heads, program % heads
    low, count = span(sequence, bounds, length, PACKED)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    columns, i = tl.arange(0, BK), tl.arange(0, BLOCK)
    inside = (channels < V)[:, None] & (columns < K)[None, :]
    matrix = channels[:, None] + (columns * V)[None, :]
    s = tl.zeros([BV, BK], tl.float32)
    if CARRIED:
        s = tl.load(memory + program * K * V + matrix, mask=inside, other=0.0)

    tl.store(states + (number * heads + head) * K * V + matrix, s, mask=inside & (count > 0))
    for start in range(0, count, BLOCK):
        there = i < count - start
        chunk = (number + start // C) * heads + head
        row = chunk * C + start % C
        at, before, middle, end = _decays(log_decay + row * V, start % C, i, channels, V)
        token = ((low + start) * heads + head).to(tl.int64) * V
        eta = _load(gain + token, heads * V, i, channels, there, V)
        eta = step_of(eta, tl.load(scale + row + i)[None, :], DIRECT, CAPPED)
        r = _load(v + token, heads * V, i, channels, there, V)
        x = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x, exists(start + i, there, SHIFT, CARRIED), columns, K).to(OPERAND)
        r -= tl.exp2(before) * tl.dot(s.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        y = tl.exp2(middle - at) * eta * r
        coupling = tl.exp2(before - at) * eta
        h = tl.zeros([BV, BLOCK], tl.float32)
        for j in tl.static_range(BLOCK):
            now = tl.sum(tl.where((i == j)[None, :], y - coupling * h, 0.0), 1)
            h += now[:, None] * tl.load(gram + (row + j) * BLOCK + i, mask=i > j, other=0.0)[None, :]
        r -= tl.exp2(before - middle) * h
        pointers = residuals + token + (i * (heads * V))[None, :] + channels[:, None]
        tl.store(pointers, r, mask=there[None, :] & (channels < V)[:, None])
        z = (tl.exp2(end - at) * eta * r).to(OPERAND)
        s = tl.dot(z, x, s * tl.exp2(end), input_precision=PRECISION)
        following = start + BLOCK
        if (following % C == 0) & (following < count):
            tl.store(states + ((number + following // C) * heads + head) * K * V + matrix, s, mask=inside)
    if FINAL:
        tl.store(final + program * K * V + matrix, s, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def _within(
    q, k, log_decay, previous, grad_output, grad_z, bounds, first, owner, length, longest, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr,
    LAG: tl.constexpr, PACKED: tl.constexpr, CARRIED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What reads of a block's writes in the block ask of them, of one chunk, head and tile of channels."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    channels = (program % tiles).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tiles
    head = program % heads
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
    decays = beyond(as_product(load_all((u, row * V), channels, V)), middle)
    read = decays
    if LAG > 0:
        read = beyond(as_product(load_tile((u - V, row * V), row > 0, channels, V)), middle)
    out = as_product(load_tile((grad_output + wide, below), there, channels, V))
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
    tiles = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    channels = (program % tiles).to(tl.int32) * BV + tl.arange(0, BV)
    program = program // tiles
    sequence, head = program // heads, program % heads
    low, count = span(sequence, bounds, length, PACKED)
    number = sequence * longest
    if PACKED:
        number = tl.load(first + sequence)
    columns, i = tl.arange(0, BK), tl.arange(0, BLOCK)
    inside = (channels < V)[:, None] & (columns < K)[None, :]
    matrix = channels[:, None] + (columns * V)[None, :]
    g = tl.zeros([BV, BK], tl.float32)
    if FINAL:
        g = tl.load(grad_final + program * K * V + matrix, mask=inside, other=0.0)

    blocks = (count + BLOCK - 1) // BLOCK
    last = (number + (count - 1) // C) * heads + head
    tl.store(grad_states + last * K * V + matrix, g, mask=inside & (count > 0))
    for back in range(0, blocks):
        start = (blocks - 1 - back) * BLOCK
        there = i < count - start
        chunk = (number + start // C) * heads + head
        row = chunk * C + start % C
        at, before, middle, end = _decays(log_decay + row * V, start % C, i, channels, V)
        token = ((low + start) * heads + head).to(tl.int64) * V
        eta = _load(gain + token, heads * V, i, channels, there, V)
        eta = step_of(eta, tl.load(scale + row + i)[None, :], DIRECT, CAPPED)
        out = _load(grad_output + token, heads * V, i, channels, there, V)
        of_z = _load(grad_z + token, heads * V, i, channels, there, V)
        x = x_rows(k, previous, previous, sequence, low, start, i, head, heads, K, 1, SHIFT, CARRIED)
        x = load_rows(x, exists(start + i, there, SHIFT, CARRIED), columns, K).to(OPERAND)
        queries = load_rows(token_rows(q, low + start, i, head, heads, K), there, columns, K).to(OPERAND)
        of_z += tl.exp2(end - at) * tl.dot(g.to(OPERAND), tl.trans(x), input_precision=PRECISION)
        w = tl.exp2(before - middle) * eta * of_z
        coupling = tl.exp2(before - at) * eta
        h = tl.zeros([BV, BLOCK], tl.float32)
        for j in tl.static_range(BLOCK - 1, -1, -1):
            now = tl.sum(tl.where((i == j)[None, :], w - coupling * h, 0.0), 1)
            h += now[:, None] * tl.load(gram + (row + j) * BLOCK + i, mask=i < j, other=0.0)[None, :]
        of_z -= tl.exp2(middle - at) * h
        pointers = grad_z + token + (i * (heads * V))[None, :] + channels[:, None]
        tl.store(pointers, of_z, mask=there[None, :] & (channels < V)[:, None])
        if LAG == 0:
            out *= tl.exp2(at)
        else:
            out *= tl.exp2(before)
        g = tl.dot(out.to(OPERAND), queries, g * tl.exp2(end), input_precision=PRECISION)
        g = tl.dot((-tl.exp2(before) * eta * of_z).to(OPERAND), x, g, input_precision=PRECISION)
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
        sizes = self.sizes
        self.gram = (layout.chunks, self.heads, layout.chunk, BLOCK.value)

        self.solve = self.launcher(_solve, self.rows * self._tiles(sizes.solve), sizes.solve, "FINAL")
        self.unsolve = self.launcher(_unsolve, self.rows * self._tiles(sizes.unsolve), sizes.unsolve, "FINAL")
        self.within = self.launcher(_within, self.all_chunks * self._tiles(sizes.within), sizes.within)


def forward(plan: Plan, call: Call, output: Tensor, final: Tensor | None, keep: bool) -> Kept:
    """Fills `output` [B, T, H, V] and, where given, `final` [S, H, K, V]."""
    q, k, v, gain, tables, previous = call.q, call.k, call.v, call.gain, call.tables, call.before.previous_key
    gram = torch.empty(plan.gram, dtype=torch.float32, device=q.device)
    states = torch.empty(plan.states, dtype=plan.operand, device=q.device)
    residuals = torch.empty(v.shape, dtype=plan.operand, device=q.device)
    scale, log_decay, energy = triton_channel.rates(plan, call, gram)
    plan.solve(
        k, v, gain, scale, log_decay, gram, previous, call.memory, states, residuals, final, *tables[:2],
        *plan.across, flags=(final is not None,),
    )  # fmt: skip
    plan.read(q, k, residuals, gain, scale, log_decay, previous, states, output, *tables, *plan.across)
    return Kept(scale, log_decay, energy, gram, states, residuals)


def backward(
    plan: Plan, call: Call, kept: Kept, grad_output: Tensor, grad_final: Tensor | None, into: Gradients
) -> None:
    q, k, tables, previous = call.q, call.k, call.tables, call.before.previous_key
    scale, log_decay, _, gram, states, residuals = kept
    assert states is not None
    assert residuals is not None
    grad_states, grad_z = torch.empty_like(states), torch.empty_like(residuals)
    plan.within(q, k, log_decay, previous, grad_output, grad_z, *tables, *plan.across)
    plan.unsolve(
        q, k, call.gain, scale, log_decay, gram, previous, grad_output, grad_final, grad_z, grad_states, into.memory,
        *tables[:2], *plan.across, flags=(grad_final is not None,),
    )  # fmt: skip
    triton_channel.gradients(plan, call, kept, grad_output, grad_z, grad_states, into)
