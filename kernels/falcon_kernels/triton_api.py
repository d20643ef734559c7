"""`impl="triton"`: compaction, schedule, core and final state, each a custom op or plain PyTorch on small tensors.

Cores take what the schedule made, `core(q, k, v, weight, log_decay, memory, previous_key, tail_x, tail_v, cu_seqlens,
rule) -> (output, final_memory)`, and know nothing of gains, ridges, masks or flags. Write features are never copied:
kernels read the key one token earlier.
"""

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from . import launch
from .compaction import compaction
from .rule import Rule
from .state import FalconState
from .triton_additive import additive_core
from .triton_regression import regression_core
from .triton_schedule import RIDGE, schedule

RULES = ("falcon_1", "falcon_1a", "falcon_3a")
INTERPRETED = triton.knobs.runtime.interpret
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    final_state: bool = True,
) -> tuple[Tensor, FalconState]:
    """Arguments and results as in `falcon_attention`, with the state always given and returned.

    Without `final_state` only the memory of what is returned has moved: a dozen small launches fewer.
    """
    _check(q, k, v, rule)
    if q.shape[1] == 0:
        return v, state
    lengths = compact = None
    if mask is not None:
        compact = compaction(mask)
        lengths = compact.lengths
        q, k, v, gain, ridge = (None if t is None else compact.gather(t) for t in (q, k, v, gain, ridge))
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device, torch.int64)
    q, k, v, gain, ridge = (None if t is None else t.contiguous() for t in (q, k, v, gain, ridge))

    previous_key = tail_x = tail_v = None
    if rule.shifted:
        previous_key = torch.where(state.previous_valid[:, None, None], state.previous_key, 0).to(k.dtype).contiguous()
    if rule.window > 1:
        tail_x, tail_v = (
            torch.where(state.tail_valid[..., None, None], t, 0).to(k.dtype).contiguous()
            for t in (state.tail_x, state.tail_v)
        )
    nothing = k.new_empty(0)
    flags, places = (torch.empty(0, dtype=dtype, device=k.device) for dtype in (torch.bool, torch.int64))
    weight, log_decay, _ = schedule(
        k,
        gain,
        nothing if ridge is None else ridge,
        nothing if previous_key is None else previous_key,
        flags if previous_key is None else state.previous_valid.contiguous(),
        nothing if tail_x is None else tail_x,
        flags if tail_x is None else state.tail_valid.contiguous(),
        places if lengths is None else lengths,
        places if cu_seqlens is None else cu_seqlens,
        rule.window,
        rule.shifted,
        RIDGE[rule.ridge],
        rule.step_size == "direct",
        rule.residual,
        rule.detach_energy,
        rule.epsilon,
        rule.decay_floor,
    )

    after = _after(k, v, state, rule, lengths, cu_seqlens) if final_state else state
    memory = state.memory.float()
    if rule.normalized_read:
        v, memory = pad(v, (0, 1), value=1), torch.cat([memory, state.normalizer.float()[..., None]], -1)
        tail_v = None if tail_v is None else pad(tail_v, (0, 1), value=1)
    if rule.residual:
        output, memory = regression_core(
            q, k, v, weight, log_decay, memory.contiguous(), previous_key, cu_seqlens, rule
        )
    else:
        output, memory = additive_core(
            q, k, v, weight, log_decay, memory.contiguous(), previous_key, tail_x, tail_v, cu_seqlens, rule
        )
    if rule.normalized_read:
        output = (output[..., :-1].float() / (output[..., -1:].float() + rule.read_epsilon)).to(v.dtype)
        after = after._replace(normalizer=memory[..., -1])
        memory = memory[..., :-1]
    output = output if compact is None else compact.scatter(output)
    return output, after._replace(memory=memory)


def _after(
    k: Tensor, v: Tensor, state: FalconState, rule: Rule, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> FalconState:
    """`state` with previous key and tail moved to the end of each sequence."""
    batch, length = k.shape[:2]
    if lengths is None and cu_seqlens is None and length >= rule.window:  # all that is kept is new, and is a pair
        begin = length - rule.window + 1
        new: dict[str, Tensor] = {}
        if rule.shifted:
            new = {"previous_key": k[:, -1], "previous_valid": torch.ones_like(state.previous_valid)}
        if rule.window > 1:
            x = k[:, begin - 1 : -1] if rule.shifted else k[:, begin:]
            new |= {"tail_x": x, "tail_v": v[:, begin:]}
            new |= {"tail_valid": torch.ones_like(state.tail_valid)}
        return state._replace(**{name: t.to(getattr(state, name).dtype, copy=True) for name, t in new.items()})
    if cu_seqlens is not None:
        start, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    else:
        start = torch.arange(batch, device=k.device) * length
        lengths = torch.full_like(start, length) if lengths is None else lengths

    def last(tokens: Tensor, before: Tensor) -> Tensor:
        """The last n places [S, n, H, .] of each sequence preceded by `before`, of n places."""
        n = before.shape[1]
        place = lengths[:, None] - n + torch.arange(n, device=k.device)
        old = (place + n).clamp_max(n - 1)[..., None, None].expand_as(before)
        new = tokens.flatten(0, 1)[(start[:, None] + place).clamp(min=0, max=batch * length - 1)]
        return torch.where((place < 0)[..., None, None], before.gather(1, old), new.to(before.dtype))

    after = state
    if rule.shifted:
        after = after._replace(
            previous_key=last(k, state.previous_key[:, None])[:, 0],
            previous_valid=state.previous_valid | (lengths > 0),
        )
    if rule.window > 1:
        tail = rule.window - 1
        place = lengths[:, None] - tail + torch.arange(tail, device=k.device)
        old = state.tail_valid.gather(1, (place + tail).clamp_max(tail - 1))
        pair, keys = place >= 0, state.tail_x
        if rule.shifted:
            pair = (place > 0) | ((place == 0) & state.previous_valid[:, None])
            keys = torch.cat([state.tail_x, state.previous_key[:, None].to(state.tail_x.dtype)], 1)
        new_x, new_v = last(k, keys)[:, :tail], last(v, state.tail_v)
        none = ((place >= 0) & ~pair)[..., None, None]
        after = after._replace(
            tail_x=torch.where(none, 0, new_x),
            tail_v=torch.where(none, 0, new_v),
            tail_valid=torch.where(place < 0, old, pair),
        )
    return after


def _check(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> None:
    if rule.name not in RULES:
        raise ValueError(f"rule is {rule.name}; with impl='triton' it must be one of {', '.join(RULES)}.")
    if rule.window > launch.LARGEST_WINDOW:
        raise ValueError(
            f"rule.window is {rule.window}; with impl='triton' it must be at most {launch.LARGEST_WINDOW}."
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; with impl='triton' q, k and v must all be "
                "float32, bfloat16 or float16."
            )
    if q.device.type == "cpu" and not INTERPRETED:
        raise ValueError("q is on the CPU; with impl='triton' it must be on a GPU, or Triton's interpreter must be on.")
