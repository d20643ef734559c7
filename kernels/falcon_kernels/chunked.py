"""The chunked form in plain PyTorch: what a CPU trains and prefills with, differentiable by autograd.

schedule -> local -> carry -> read. The local phase turns each chunk into a map of the memory S that the chunk finds,

    S' = exp(u_C) S + X' (F_v - F_s S)        output = A_v + A_s S,

with u the running log decay within the chunk; the carry runs those maps one after another; the read is parallel again.
Decays enter only as exp(u_t - u_s) with s <= t, never as exp(-u) over a chunk (kernels/README.md, "Decay").
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .grid import Grid
from .rule import Rule
from .schedule import energy, step_and_log_decay
from .state import FalconState, accumulation_dtype, like

CHUNK = 64
SUBCHUNK = 16  # per-channel decays, and the C W unknowns of a sliding regression


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    state: FalconState,
    rule: Rule,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, FalconState]:
    """Arguments and results as in `falcon_attention`, with the state always given and returned.

    `chunk` is the chunk length C, a multiple of 16 and at least W - 1. For the per-channel rules it is also the length
    over which decays are multiplied up around a middle token, which float32 bears up to 16.
    """
    length, dtype = q.shape[1], v.dtype
    if length == 0:
        return v, state
    wide = accumulation_dtype(dtype)
    grid = Grid.of(q, chunk or _chunk_length(rule, length), mask, cu_seqlens)
    q, k, v, gain, ridge = (None if t is None else grid.spread(t) for t in (q, k, v, gain, ridge))

    x, pair = _write_features(k, state, grid, rule)
    v = torch.where(like(pair, v), v, 0)
    after = grid.final_state(k, x, v, pair, state)
    if rule.normalized_read:
        v, gain, state = _with_ones(v, gain, state, rule)

    x, v, pairs = _with_lookback(x, v, pair, state, grid, rule)  # [R, N, H, W - 1 + C, .]
    count = pairs.to(wide)[:, :, None].unfold(-1, rule.window, 1).sum(-1).clamp_min(1)  # [R, N, 1, C]
    q, x, v, gain, ridge = (None if t is None else t.to(wide).transpose(2, 3) for t in (q, x, v, gain, ridge))
    eta, log_decay = step_and_log_decay(energy(x, count, rule), gain, ridge, pair[:, :, None], rule)
    if rule.per_channel:
        output, memory = _per_channel(q, x, v, eta, log_decay, state.memory, grid, rule)
    else:
        output, memory = _scalar(q, x, v, eta / count, log_decay, state.memory, grid, rule)
    output = output.transpose(2, 3)
    after = after._replace(memory=memory)
    if rule.normalized_read:
        output, after = _without_ones(output, after, rule)
    return grid.collect(output, length).to(dtype), after


def _scalar(
    q: Tensor, x: Tensor, v: Tensor, weight: Tensor, log_decay: Tensor, memory: Tensor, grid: Grid, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Rules with one decay per head: falcon_1, falcon_3, falcon_1a and falcon_3a.

    A chunk's C windows hold only E = W - 1 + C pairs, so that all products with S, Q and into S are with those.
    """
    u = log_decay.cumsum(-1)
    u_before = pad(u[..., :-1], (1, 0))
    end = u[..., -1:]
    read_u, diagonal = (u_before, -1) if rule.timing == "read_before_write" else (u, 0)
    read_decay = _pairwise_decay(read_u, u, diagonal)  # [R, N, H, C, C]
    x_t = x.transpose(-1, -2)
    scores = q @ x_t  # [R, N, H, C, E]

    if rule.residual:
        in_window = (torch.arange(grid.chunk)[:, None] + torch.arange(rule.window)).flatten().to(q.device)  # [C W]
        row_weight, row_end = (_repeat(t, rule.window, -1) for t in (weight, (end - u).exp()))
        row_x, row_v = x[..., in_window, :], v[..., in_window, :]
        gram = (x @ x_t)[..., in_window[:, None], in_window]
        solve_decay = _repeat(_repeat(_pairwise_decay(u_before, u, -1), rule.window, -1), rule.window, -2)
        found = _repeat(u_before.exp(), rule.window, -1)[..., None] * row_x
        system = row_weight[..., None] * solve_decay * gram
        right = row_weight[..., None] * torch.cat([row_v, found], -1)
        z = _UnitLowerInverse.apply(system) @ right  # [R, N, H, C W, V + K]
        into_pair = torch.arange(x.shape[-2], device=q.device)[:, None] == in_window  # [E, C W]
        widths = (v.shape[-1], q.shape[-1])
        write_v, write_s = ((into_pair * row_end[..., None, :]) @ z).split(widths, -1)
        read_v, read_s = ((_repeat(read_decay, rule.window, -1) * scores[..., in_window]) @ z).split(widths, -1)
        read_s = read_u.exp()[..., None] * q - read_s
    else:
        read_mask, end_mask = (
            _repeat_into_window(decay, weight, rule.window) for decay in (read_decay, (end - u).exp()[..., None, :])
        )  # [.., C, E], [.., 1, E]
        read_v, read_s = (scores * read_mask) @ v, read_u.exp()[..., None] * q
        write_v, write_s = end_mask.transpose(-1, -2) * v, None

    decay = end.exp()[..., None]
    if write_s is None:

        def advance(s: Tensor, decay: Tensor, written: Tensor) -> Tensor:
            return decay * s + written

        found, final = _carry(advance, (decay, x_t @ write_v), memory, grid)
    else:

        def advance(s: Tensor, decay: Tensor, x_t: Tensor, write_v: Tensor, write_s: Tensor) -> Tensor:
            return decay * s + x_t @ (write_v - write_s @ s)

        found, final = _carry(advance, (decay, x_t, write_v, write_s), memory, grid)
    return read_v + read_s @ found, final


def _per_channel(
    q: Tensor, x: Tensor, v: Tensor, eta: Tensor, log_decay: Tensor, memory: Tensor, grid: Grid, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Rules with one decay per value channel: falcon_2 and falcon_2a.

    Decays multiply values on either side of a product, measured from the chunk's middle token.
    """
    u = log_decay.cumsum(-2)
    u_before = pad(u[..., :-1, :], (0, 0, 1, 0))
    end, middle = u[..., -1:, :], u[..., grid.chunk // 2 : grid.chunk // 2 + 1, :]
    decay, to_end, from_middle = end.exp(), (end - u).exp(), (middle - u).exp()
    x_t = x.transpose(-1, -2)

    if rule.residual:
        solved = []

        def advance(s: Tensor, decay, x, v, found_decay, to_end, *system: Tensor) -> Tensor:
            z = _PerChannelSolve.apply(v - found_decay * (x @ s), *system)
            solved.append(z)
            return decay * s + x.transpose(-1, -2) @ (to_end * z)

        system = (x @ x_t, eta, (u_before - middle).exp(), from_middle)
        found, final = _carry(advance, (decay, x, v, u_before.exp(), to_end, *system), memory, grid)
        z = torch.stack(solved, 1)
    else:
        z = eta * v
        found, final = _carry(lambda s, decay, written: decay * s + written, (decay, x_t @ (to_end * z)), memory, grid)

    read_u, diagonal = (u_before, -1) if rule.timing == "read_before_write" else (u, 0)
    inside = (q @ x_t).tril(diagonal) @ (from_middle * z)
    return read_u.exp() * (q @ found) + (read_u - middle).exp() * inside, final


class _UnitLowerInverse(torch.autograd.Function):
    """(I + N)^-1 for N [..., M, M], of which only what lies below the diagonal is read; M a multiple of 16.

    Substitution within blocks of 16 rows, then from block to block: stable where keys repeat, unlike powers of N.
    """

    @staticmethod
    def forward(ctx, n: Tensor) -> Tensor:
        size, block = n.shape[-1], SUBCHUNK
        inverse = torch.zeros_like(n)
        inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
        n_blocks, blocks = (_diagonal_blocks(t, block) for t in (n, inverse))
        for i in range(1, block):
            blocks[..., i, :i] = -(n_blocks[..., i : i + 1, :i] @ blocks[..., :i, :i])[..., 0, :]
        for start in range(0, size, block):
            rows = slice(start, start + block)
            own = blocks[..., start // block, :, :]
            inverse[..., rows, rows] = own
            inverse[..., rows, :start] = -own @ (n[..., rows, :start] @ inverse[..., :start, :start])
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ (grad @ transposed)).tril(-1)


def _diagonal_blocks(matrix: Tensor, block: int) -> Tensor:
    """[..., M / block, block, block], a copy of the blocks on the diagonal."""
    return torch.stack([matrix[..., i : i + block, i : i + block] for i in range(0, matrix.shape[-1], block)], -3)


class _PerChannelSolve(torch.autograd.Function):
    """z_i = eta_i (r_i - a_i sum_{s<i} G_is b_s z_s) down the rows, elementwise in the channel (paper, F.2).

    The adjoint is the transposed substitution: with h_i the sum, its cotangent is -eta_i a_i times that of z_i, and
    flows to earlier rows through G'.
    """

    @staticmethod
    def forward(ctx, right: Tensor, gram: Tensor, eta: Tensor, a: Tensor, b: Tensor) -> Tensor:
        z, scaled = torch.empty_like(right), torch.empty_like(right)
        for i in range(right.shape[-2]):
            history = (gram[..., i : i + 1, :i] @ scaled[..., :i, :])[..., 0, :]
            z[..., i, :] = eta[..., i, :] * (right[..., i, :] - a[..., i, :] * history)
            scaled[..., i, :] = b[..., i, :] * z[..., i, :]
        ctx.save_for_backward(right, gram, eta, a, b, z)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_z: Tensor) -> tuple[Tensor, ...]:
        right, gram, eta, a, b, z = ctx.saved_tensors
        scaled = b * z
        history = gram.tril(-1) @ scaled
        grad_z, grad_history, grad_scaled = grad_z.clone(), torch.empty_like(z), torch.empty_like(z)
        for i in reversed(range(z.shape[-2])):
            below = gram[..., i + 1 :, i, None].transpose(-1, -2)
            grad_scaled[..., i, :] = (below @ grad_history[..., i + 1 :, :])[..., 0, :]
            grad_z[..., i, :] += b[..., i, :] * grad_scaled[..., i, :]
            grad_history[..., i, :] = -eta[..., i, :] * a[..., i, :] * grad_z[..., i, :]
        return (
            grad_z * eta,
            (grad_history @ scaled.transpose(-1, -2)).tril(-1),
            grad_z * (right - a * history),
            -eta * grad_z * history,
            grad_scaled * z,
        )


def _carry(
    advance: Callable[..., Tensor], chunks: tuple[Tensor, ...], memory: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Runs `advance(memory, *chunk)` over the chunks, tensors [R, N, ...], one after another.

    Returns the memories that each finds [R, N, H, K, V], and the final ones [S, H, K, V].
    """
    found, left, s = [], [], memory
    for n, chunk in enumerate(zip(*(t.unbind(1) for t in chunks), strict=True)):
        s = grid.enter(n, s, memory)
        found.append(s)
        s = advance(s, *chunk)
        left.append(s)
    return torch.stack(found, 1), s if grid.sequence is None else grid.final(torch.stack(left, 1), memory)


def _pairwise_decay(to: Tensor, start: Tensor, diagonal: int) -> Tensor:
    """[..., C, C] exp(to_t - start_s) on and below the diagonal, 0 above; no positive exponent is ever taken."""
    above = torch.ones(to.shape[-1], to.shape[-1], dtype=torch.bool, device=to.device).triu(diagonal + 1)
    return (to[..., :, None] - start[..., None, :]).masked_fill(above, -torch.inf).exp()


def _repeat(tensor: Tensor, window: int, dim: int) -> Tensor:
    return tensor if window == 1 else tensor.repeat_interleave(window, dim)


def _repeat_into_window(decay: Tensor, weight: Tensor, window: int) -> Tensor:
    """[..., C] over steps to [..., E] over pairs: the weighted decays of all the steps whose window holds the pair."""
    weighted = decay * weight[..., None, :]
    return torch.stack([pad(weighted, (r, window - 1 - r)) for r in range(window)]).sum(0) if window > 1 else weighted


def _write_features(k: Tensor, state: FalconState, grid: Grid, rule: Rule) -> tuple[Tensor, Tensor]:
    """Write features x [R, N, C, H, K], 0 where there is none, and where there is a pair [R, N, C]."""
    if not rule.shifted:
        return k, grid.valid
    previous = grid.found(k[:, :, -1:], state.previous_key[:, None].to(k.dtype))
    x = torch.cat([previous, k[:, :, :-1]], 2)
    begun = grid.found(torch.ones_like(grid.valid[:, :, :1]), state.previous_valid[:, None])
    pair = torch.cat([grid.valid[:, :, :1] & begun, grid.valid[:, :, 1:]], 2)
    return torch.where(like(pair, x), x, 0), pair


def _with_lookback(
    x: Tensor, v: Tensor, pair: Tensor, state: FalconState, grid: Grid, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """x, v and pair with the W - 1 places before each chunk in front."""
    if rule.window == 1:
        return x, v, pair

    def extend(laid: Tensor, tail: Tensor) -> Tensor:
        tail = torch.where(like(state.tail_valid, tail), tail, 0).to(laid.dtype)
        return torch.cat([grid.found(laid[:, :, grid.chunk - rule.window + 1 :], tail), laid], 2)

    return extend(x, state.tail_x), extend(v, state.tail_v), extend(pair, state.tail_valid)


def _with_ones(v: Tensor, gain: Tensor, state: FalconState, rule: Rule) -> tuple[Tensor, Tensor, FalconState]:
    """Values, gains and state with the normalizer as further value channels: its value is 1 throughout (paper, C.1)."""
    if rule.per_channel:
        memory = torch.cat([state.memory, state.normalizer], -1)
        return (
            torch.cat([v, torch.ones_like(v)], -1),
            torch.cat([gain, gain], -1),
            state._replace(memory=memory),
        )
    state = state._replace(memory=torch.cat([state.memory, state.normalizer[..., None]], -1))
    if state.tail_v is not None:
        state = state._replace(tail_v=pad(state.tail_v, (0, 1), value=1))
    return pad(v, (0, 1), value=1), gain, state


def _without_ones(output: Tensor, state: FalconState, rule: Rule) -> tuple[Tensor, FalconState]:
    channels = output.shape[-1] // 2 if rule.per_channel else output.shape[-1] - 1
    output = output[..., :channels] / (output[..., channels:] + rule.read_epsilon)
    memory, normalizer = state.memory[..., :channels], state.memory[..., channels:]
    normalizer = normalizer if rule.per_channel else normalizer[..., 0]
    return output, state._replace(memory=memory.contiguous(), normalizer=normalizer.contiguous())


def _chunk_length(rule: Rule, length: int) -> int:
    """C for a sequence: at least W - 1, and no longer than the sequence needs."""
    longest = SUBCHUNK if rule.per_channel or (rule.residual and rule.window > 1) else CHUNK
    return -(-max(min(longest, length), rule.window - 1) // SUBCHUNK) * SUBCHUNK
