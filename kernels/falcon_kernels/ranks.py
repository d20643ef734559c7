"""One sequence over the ranks of a process group: each has a contiguous part of its tokens, the first rank the first.

What a part needs of the tokens before it is little: the last keys and values of its left neighbour, and the memory that
its first token finds. The keys and values go one rank to the right, all at once. The memory takes one of two ways:

    hand over   each rank waits for the memory, runs, and passes it on
    scan        every rank runs from an empty memory at once and finds its map of the memory, S' = A S + B; the maps are
                gathered, each rank applies those of the ranks before it to zero, and adds what this memory gives

Every send has its receive in the same order on both ranks, forwards to the right and in the backward pass to the left,
so that nothing waits for itself; a part that is recomputed in the backward pass is recomputed on every rank.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from .api import FalconOutput, falcon_attention
from .chunked import _with_ones, _without_ones
from .rule import Rule
from .schedule import energy, step_and_log_decay
from .state import FalconState, accumulation_dtype


def falcon_attention_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    *,
    rule: Rule,
    group: dist.ProcessGroup | None = None,
    output_final_state: bool = False,
    scan: bool | None = None,
    impl: str | None = None,
) -> FalconOutput:
    """`falcon_attention` of a sequence whose tokens lie on the ranks of `group`, in their order. All ranks call it.

    Gradients are those of one process: a loss on any rank reaches the inputs on all ranks before it, and the backward
    pass runs on all ranks, each from a loss that its own output is part of.

    With the scan all ranks work at the same time; it takes extra work, for `falcon_1` and `falcon_3` that of K further
    value channels in the recurrence, for the inner-product rules one product of the queries with the memory. Without it
    a rank waits for its left neighbour, but is free for its next layer while that runs: of L layers on N ranks the time
    is that of L + N - 1, where nothing else makes the ranks wait for each other at every layer, as FSDP does.

    Args:
        q, k, v, gain, ridge: this rank's part, as in `falcon_attention`; as many rows as on the other ranks, and at
            least W tokens.
        rule: what is computed.
        group: the ranks; all by default.
        output_final_state: whether to return the state after this rank's last token.
        scan: whether to scan; by default for all rules but `falcon_2`, whose maps differ from value channel to channel.
        impl: as in `falcon_attention`.

    Raises:
        ValueError: as `falcon_attention`, for parts that are too short, and for a scan of `falcon_2`.
    """
    if scan is None:
        scan = not (rule.residual and rule.per_channel)
    elif scan and rule.residual and rule.per_channel:
        raise ValueError(f"scan is True, but {rule.name} has one map of the memory per value channel; leave it out.")
    shape = (k.shape[0], *k.shape[2:], v.shape[-1])
    state = FalconState.zeros(rule, *shape, dtype=v.dtype, device=v.device)
    state = _after_left_neighbour(state, k, v, rule, group)
    way = _scan if scan else _hand_over
    with torch.autocast(q.device.type, enabled=False):
        if not (scan and rule.normalized_read):
            output, state = way(q, k, v, gain, ridge, state, rule, group, impl)
        else:  # the quotient of two reads is no map of the memory, but each of them is
            v, gain, state = _with_ones(v, gain, state, rule)
            state, plain = state._replace(normalizer=None), replace(rule, normalized_read=False)
            output, state = way(q, k, v, gain, ridge, state, plain, group, impl)
            output, state = _without_ones(output, state, rule)
    if state.tail_v is not None:
        state = state._replace(tail_v=state.tail_v[..., : shape[-1]])
    return FalconOutput(output, state if output_final_state else None)


def from_left(group: dist.ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors that the left neighbour gives, of equal shapes; zeros on the first rank. Differentiable.

    What comes must go into the loss of every rank, the first one's zeros included.
    """
    return _FromLeft.apply(group, *tensors)


def _after_left_neighbour(
    state: FalconState, k: Tensor, v: Tensor, rule: Rule, group: dist.ProcessGroup | None
) -> FalconState:
    """`state` with previous key and tail as the left neighbour leaves them; on the first rank as they are."""
    begun = dist.get_rank(group) > 0
    pairs = rule.window - 1
    keys = pairs + rule.shifted  # under next-latent alignment the pairs' keys are those of the tokens before
    if k.shape[1] < max(keys, 1):
        raise ValueError(f"k has {k.shape[1]} tokens on this rank; it must have at least {max(keys, 1)} on every rank.")
    if not keys:
        return state
    left_keys, *left_values = from_left(group, k[:, -keys:], *([v[:, -pairs:]] if pairs else []))
    if rule.shifted:
        state = state._replace(
            previous_key=left_keys[:, -1], previous_valid=torch.full_like(state.previous_valid, begun)
        )
    if pairs:
        state = state._replace(
            tail_x=left_keys[:, :pairs], tail_v=left_values[0], tail_valid=torch.full_like(state.tail_valid, begun)
        )
    return state


def _hand_over(q, k, v, gain, ridge, state: FalconState, rule: Rule, group, impl) -> tuple[Tensor, FalconState]:
    """One rank after another."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank > 0:
        memory, *normalizer = _Received.apply(group, _memories(state), k, v, gain)
        state = state._replace(memory=memory, normalizer=normalizer[0] if normalizer else None)
    options = {"rule": rule, "initial_state": state, "output_final_state": True, "impl": impl}
    output, after = falcon_attention(q, k, v, gain, ridge, **options)
    if rank < last:
        output = _Sent.apply(group, output, *_memories(after))
    return output, after


def _scan(q, k, v, gain, ridge, state: FalconState, rule: Rule, group, impl) -> tuple[Tensor, FalconState]:
    """All ranks at once: output and memory are affine in the memory that a part finds, which is added afterwards."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    options = {"rule": rule, "output_final_state": True, "impl": impl}
    decay: Tensor | float = 1.0
    if rule.residual:
        # The linear part is the map of the identity, as further channels that have 0 as their values.
        identity = torch.eye(key_dim, dtype=state.memory.dtype, device=v.device).expand(*state.memory.shape[:2], -1, -1)
        wider = state._replace(memory=torch.cat([state.memory, identity], -1))
        if wider.tail_v is not None:
            wider = wider._replace(tail_v=pad(wider.tail_v, (0, key_dim)))
        output, after = falcon_attention(q, k, pad(v, (0, key_dim)), gain, ridge, initial_state=wider, **options)
        output, reads = output.split([value_dim, key_dim], -1)
        written, kept = after.memory.split([value_dim, key_dim], -1)
        found = _memory_found(kept, written, group, torch.matmul)
        to_end = kept @ found
    else:
        output, after = falcon_attention(q, k, v, gain, ridge, initial_state=state, **options)
        written, reads = after.memory, q
        # Recomputed in the backward pass, so that nothing of the keys' size is kept for it.
        u = checkpoint(_log_decays, k, gain, ridge, state, rule, use_reentrant=False)  # [B, T, H, V or 1]
        # Along the last dimension, where a GPU sums the tokens of a head in parallel.
        u = u.movedim(1, -1).contiguous().cumsum(-1).movedim(-1, 1)
        kept = u[:, -1, :, None].exp()
        found = _memory_found(kept, written, group, torch.mul)
        read_u = u if rule.timing == "read_after_write" else pad(u[:, :-1], (0, 0, 0, 0, 1, 0))
        decay, to_end = read_u.exp(), kept * found
    read = torch.einsum("bthk,bhkv->bthv", reads, found.to(reads.dtype))
    return output + (decay * read).to(output.dtype), after._replace(memory=written + to_end)


def _log_decays(k: Tensor, gain: Tensor, ridge: Tensor | None, state: FalconState, rule: Rule) -> Tensor:
    """[B, T, H, V or 1] log of each token's decay, at least in fp32."""
    wide = accumulation_dtype(k.dtype)
    x, pair = k, k.new_ones(k.shape[:2], dtype=torch.bool)
    if rule.shifted:
        x = torch.cat([state.previous_key[:, None], k[:, :-1]], 1)
        pair = torch.cat([state.previous_valid[:, None], pair[:, 1:]], 1)
    active = pair
    if rule.window > 1:
        x, pair = torch.cat([state.tail_x, x], 1), torch.cat([state.tail_valid, pair], 1)
    x = torch.where(pair[..., None, None], x, 0).to(wide).transpose(1, 2)  # [B, H, W - 1 + T, K]
    count = pair.to(wide)[:, None].unfold(-1, rule.window, 1).sum(-1).clamp_min(1)
    ridge = None if ridge is None else ridge.to(wide)
    statistic = energy(x, count, rule).transpose(1, 2)
    _, log_decay = step_and_log_decay(statistic, gain.to(wide), ridge, active[..., None], rule)
    return log_decay if rule.per_channel else log_decay[..., None]


def _memory_found(kept: Tensor, written: Tensor, group: dist.ProcessGroup | None, times) -> Tensor:
    """[B, H, K, V] what the maps S' = kept S + written of the ranks before this one make of zero."""
    rank = dist.get_rank(group)
    kept, written = _Gathered.apply(group, kept, written)
    found = written[:0].sum(0)  # zero, with a gradient, so that the first rank's backward pass gathers too
    for a, b in zip(kept[:rank], written[:rank], strict=True):
        found = times(a, found) + b
    return found


def _memories(state: FalconState) -> list[Tensor]:
    return [state.memory] if state.normalizer is None else [state.memory, state.normalizer]


def _exchange(group: dist.ProcessGroup | None, send: list[Tensor], receive: list[Tensor], step: int) -> None:
    """Sends `step` ranks on and fills `receive` from as far on the other side, where there are such ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    work = []
    if 0 <= rank + step < size:
        work += [dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=rank + step) for t in send]
    if 0 <= rank - step < size:
        work += [dist.P2POp(dist.irecv, t, group=group, group_peer=rank - step) for t in receive]
    for request in dist.batch_isend_irecv(work) if work else []:
        request.wait()


class _FromLeft(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        received = [t.new_zeros(t.shape) for t in tensors]
        _exchange(group, tensors, received, 1)
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        received = [g.new_zeros(g.shape) for g in grads]
        _exchange(ctx.group, grads, received, -1)
        return None, *received


class _Received(torch.autograd.Function):
    """Tensors like `templates` from the left neighbour; what requires gradients there does so here in `anchors`."""

    @staticmethod
    def forward(ctx, group, templates, *anchors):
        ctx.group, ctx.anchors = group, len(anchors)
        received = [t.new_empty(t.shape) for t in templates]
        _exchange(group, [], received, 1)
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        _exchange(ctx.group, grads, [], -1)
        return (None,) * (2 + ctx.anchors)


class _Sent(torch.autograd.Function):
    """`output`, with `tensors` sent to the right neighbour: their gradients come from there."""

    @staticmethod
    def forward(ctx, group, output, *tensors):
        ctx.group = group
        ctx.like = [torch.empty_like(t, device="meta") for t in tensors]
        _exchange(group, tensors, [], 1)
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if not any(ctx.needs_input_grad[2:]):
            return None, grad, *(None for _ in ctx.like)
        received = [torch.empty_like(t, device=grad.device) for t in ctx.like]
        _exchange(ctx.group, [], received, -1)
        return None, grad, *received


class _Gathered(torch.autograd.Function):
    """[N, ...] for each tensor, those of all ranks. One node, so that no rank's backward pass leaves one out."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        gathered = []
        for tensor in tensors:
            parts = [tensor.new_empty(tensor.shape) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            gathered.append(torch.stack(parts))
        return tuple(gathered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        sums = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
        for total in sums:
            dist.all_reduce(total, group=ctx.group)
        return None, *(total[dist.get_rank(ctx.group)] for total in sums)
