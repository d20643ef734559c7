"""The recurrence as it is written: one token at a time, any dtype, differentiable. All else is tested against it."""

from itertools import pairwise

import torch
from torch import Tensor

from .rule import Rule
from .schedule import energy, step_and_log_decay
from .state import FalconState, accumulation_dtype, like


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    state: FalconState,
    rule: Rule,
    mask: Tensor | None = None,
) -> tuple[Tensor, FalconState]:
    """One token of the recurrence: decay, write, read.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        gain: [B, H], or [B, H, V] for the per-channel rules.
        ridge: [B, H] or None.
        mask: [B] bool, False where the row has no token here: its state stays and its output is 0.

    Returns:
        output [B, H, V] in the dtype of v, and the state after the token (new tensors).
    """
    wide = accumulation_dtype(v.dtype)
    dtype = v.dtype
    token = torch.ones(q.shape[0], dtype=torch.bool, device=q.device) if mask is None else mask
    if mask is not None:
        q, k, v, gain, ridge = (None if t is None else torch.where(like(mask, t), t, 0) for t in (q, k, v, gain, ridge))

    x, valid = (state.previous_key, token & state.previous_valid) if rule.shifted else (k, token)
    pair_x, pair_v = torch.where(like(valid, x), x, 0), torch.where(like(valid, v), v, 0)
    window_x, window_v, window_valid = pair_x[:, None], pair_v[:, None], valid[:, None]
    if rule.window > 1:
        window_x = torch.cat([state.tail_x, window_x], 1)
        window_v = torch.cat([state.tail_v, window_v], 1)
        window_valid = torch.cat([state.tail_valid, window_valid], 1)
    window_x = torch.where(like(window_valid, window_x), window_x, 0).to(wide).transpose(1, 2)  # [B, H, W, K]
    window_v = torch.where(like(window_valid, window_v), window_v, 0).to(wide).transpose(1, 2)  # [B, H, W, V]
    count = window_valid.sum(1).clamp_min(1)[:, None, None].to(wide)  # [B, 1, 1]

    eta, log_decay = step_and_log_decay(
        energy(window_x, count, rule)[..., 0],
        gain.to(wide),
        None if ridge is None else ridge.to(wide),
        valid[:, None].expand(gain.shape[:2]),
        rule,
    )
    if not rule.per_channel:
        eta, log_decay = eta[..., None], log_decay[..., None]
    decay, weight = log_decay.exp()[:, :, None], (eta / count)[:, :, None]  # [B, H, 1, V or 1]

    memory = state.memory
    target = window_v - window_x @ memory if rule.residual else window_v
    written = decay * memory + window_x.transpose(-1, -2) @ (weight * target)
    before_write = rule.timing == "read_before_write"
    wide_q = q.to(wide)[:, :, None]
    output = (wide_q @ (memory if before_write else written))[:, :, 0]

    normalizer = state.normalizer
    if rule.normalized_read:
        z = normalizer if rule.per_channel else normalizer[..., None]
        z_written = decay * z + window_x.transpose(-1, -2) @ weight.expand(-1, -1, rule.window, -1)
        output = output / ((wide_q @ (z if before_write else z_written))[:, :, 0] + rule.read_epsilon)
        normalizer = z_written if rule.per_channel else z_written[..., 0]

    after = FalconState(
        memory=written,
        previous_key=k.to(state.previous_key.dtype) if rule.shifted else None,
        previous_valid=torch.ones_like(token) if rule.shifted else None,
        normalizer=normalizer,
    )
    if rule.window > 1:
        after = after._replace(
            tail_x=torch.cat([state.tail_x[:, 1:], pair_x[:, None].to(state.tail_x.dtype)], 1),
            tail_v=torch.cat([state.tail_v[:, 1:], pair_v[:, None].to(state.tail_v.dtype)], 1),
            tail_valid=torch.cat([state.tail_valid[:, 1:], valid[:, None]], 1),
        )
    if mask is not None:
        pairs = zip(after, state, strict=True)
        after = FalconState(*(None if new is None else torch.where(like(token, new), new, old) for new, old in pairs))
        output = torch.where(like(token, output), output, 0)
    return output.to(dtype), after


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
) -> tuple[Tensor, FalconState]:
    """The loop over `step`; arguments and results as in `falcon_attention`, the state always given and returned."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        outputs, states = [], []
        for n, (start, end) in enumerate(pairwise(bounds)):
            document = [None if t is None else t[:, start:end] for t in (q, k, v, gain, ridge)]
            output, after = attention(*document, state.map(lambda t, n=n: t[n : n + 1]), rule)
            outputs.append(output)
            states.append(after)
        joined = (None if parts[0] is None else torch.cat(parts) for parts in zip(*states, strict=True))
        return torch.cat(outputs, 1), FalconState(*joined)

    nothing = [None] * q.shape[1]
    columns = (nothing if t is None else t.unbind(1) for t in (q, k, v, gain, ridge, mask))
    outputs = []
    for *token, present in zip(*columns, strict=True):
        output, state = step(*token, state, rule, present)
        outputs.append(output)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state
