"""`impl="triton"`: checks, compaction, one op (triton_attention.py), and the state's previous key and tail.

Write features are never copied: kernels read the key one token earlier.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import launch, triton_attention, triton_device, triton_window
from .compaction import compaction
from .rule import LARGEST_EXACT_WINDOW, Rule
from .state import FalconState
from .triton_schedule import RIDGE
from .triton_smoothness import SMOOTHNESS

LARGEST_WIDTH = 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    state: FalconState | None,
    rule: Rule,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    final_state: bool = True,
) -> tuple[Tensor, FalconState | None]:
    """Arguments and results as in `falcon_attention`; a fresh state is None and costs nothing."""
    if (sentence := refusal(q, k, v, rule)) is not None:
        raise ValueError(sentence)
    if 0 in q.shape[:3]:
        return v, _fresh(k, v, rule, cu_seqlens) if state is None and final_state else state
    lengths = compact = None
    if mask is not None:
        compact = compaction(mask)
        lengths = compact.lengths
        q, k, v, gain, ridge = (None if t is None else compact.gather(t) for t in (q, k, v, gain, ridge))
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device, torch.int64)

    memory = previous_key = previous_valid = tail_x = tail_v = tail_valid = None
    if state is not None:
        memory = state.memory.float()
        if rule.shifted:
            previous_valid = state.previous_valid
            previous_key = torch.where(previous_valid[:, None, None], state.previous_key, 0).to(k.dtype)
        if rule.window > 1:
            tail_valid = state.tail_valid
            tail_x, tail_v = (
                torch.where(tail_valid[..., None, None], t, 0).to(k.dtype) for t in (state.tail_x, state.tail_v)
            )
    values, ones = v, 1
    if rule.normalized_read:
        if rule.per_channel:
            ones, gain = v.shape[-1], torch.cat([gain, gain], -1)
        values = pad(v, (0, ones), value=1)
        if state is not None:
            normalizer = state.normalizer if rule.per_channel else state.normalizer[..., None]
            memory = torch.cat([memory, normalizer.float()], -1)
            tail_v = None if tail_v is None else pad(tail_v, (0, 1), value=1)
    smoothness = SMOOTHNESS["trace" if rule.smoothness is None or rule.window == 1 else rule.smoothness]
    output, memory = triton_attention.attention(
        q, k, values, gain, ridge, memory, previous_key, previous_valid, tail_x, tail_v, tail_valid, lengths,
        cu_seqlens, rule.window, rule.shifted, RIDGE[rule.ridge], rule.step_size == "direct", rule.residual,
        rule.detach_energy, rule.epsilon, rule.decay_floor, smoothness,
        rule.timing == "read_before_write", final_state,
    )  # fmt: skip
    if rule.normalized_read:
        output = (output[..., :-ones].float() / (output[..., -ones:].float() + rule.read_epsilon)).to(v.dtype)
    if compact is not None:
        output = compact.scatter(output)
    if not final_state:
        return output, None
    after = _after(k, v, state, rule, lengths, cu_seqlens)
    if rule.normalized_read:
        normalizer = memory[..., -ones:] if rule.per_channel else memory[..., -1]
        after = after._replace(normalizer=normalizer.contiguous())
        memory = memory[..., :-ones].contiguous()  # as one token's kernel takes it
    return output, after._replace(memory=memory)


def _fresh(k: Tensor, v: Tensor, rule: Rule, cu_seqlens: Tensor | None) -> FalconState:
    rows = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return FalconState.zeros(rule, rows, *k.shape[2:], v.shape[-1], dtype=v.dtype, device=v.device)


def _after(
    k: Tensor, v: Tensor, state: FalconState | None, rule: Rule, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> FalconState:
    """`state` with previous key and tail moved to the end of each sequence."""
    batch, length = k.shape[:2]
    if lengths is None and cu_seqlens is None and length >= rule.window:  # all that is kept is new, and is a pair
        begin, tail = length - rule.window + 1, rule.window - 1
        new: dict[str, Tensor] = {}
        if rule.shifted:
            new |= {"previous_key": k[:, -1], "previous_valid": k.new_ones(batch, dtype=torch.bool)}
        if tail:
            x = k[:, begin - 1 : -1] if rule.shifted else k[:, begin:]
            new |= {"tail_x": x, "tail_v": v[:, begin:], "tail_valid": k.new_ones(batch, tail, dtype=torch.bool)}
        if state is None:
            return FalconState(None, **{name: t if name.endswith("valid") else t.clone() for name, t in new.items()})
        return state._replace(**{name: t.to(getattr(state, name).dtype, copy=True) for name, t in new.items()})
    if state is None:
        state = _fresh(k, v, rule, cu_seqlens)
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


def refusal(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> str | None:
    """Why the kernels do not take a call, in one sentence, or None where they do."""
    if max(q.shape[-1], v.shape[-1]) > LARGEST_WIDTH:
        return f"q and v are {q.shape[-1]} and {v.shape[-1]} wide; with impl='triton' at most {LARGEST_WIDTH} is taken."
    largest = triton_window.LARGEST_WINDOW if rule.residual else launch.LARGEST_WINDOW
    if rule.window > largest:
        return f"rule.window is {rule.window}; with impl='triton' it must be at most {largest}."
    if rule.smoothness == "exact" and rule.window > LARGEST_EXACT_WINDOW:
        return (
            f"rule.smoothness is 'exact' and rule.window {rule.window}; with impl='triton' windows of more than "
            f"{LARGEST_EXACT_WINDOW} pairs take 'bound' or 'trace'."
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in triton_device.DTYPES or tensor.dtype != q.dtype:
            return (
                f"{name} has dtype {tensor.dtype}; with impl='triton' q, k and v must all be "
                "float32, bfloat16 or float16."
            )
    return triton_device.refusal(q.device)
