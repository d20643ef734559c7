"""The two functions through which everything goes: a whole sequence, and one token."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import chunked, reference
from .rule import Rule
from .state import FalconState


def _triton_attention(*args, **kwargs) -> tuple[Tensor, FalconState | None]:
    from . import triton_api  # so that nothing here needs triton

    return triton_api.attention(*args, **kwargs)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, FalconState | None]]] = {
    "reference": reference.attention,
    "torch": chunked.attention,
}
if find_spec("triton") is not None:
    IMPLEMENTATIONS["triton"] = _triton_attention


def _has_triton() -> bool:
    """Whether the Triton kernels can be imported; a Triton that is too old for them counts as none."""
    return _import_triton()


# What torch.compiler.assume_constant_result does, without importing the compiler.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _import_triton() -> bool:
    try:
        from . import triton_device  # noqa: F401
    except ImportError:
        return False
    return True


def _best_attention(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> str:
    """`triton` where its kernels take the call, else `torch`."""
    if q.device.type != "cuda" or not _has_triton():
        return "torch"
    from . import triton_api

    return "torch" if triton_api.refusal(q, k, v, rule) else "triton"


def _best_step(q: Tensor) -> str:
    """`triton` where its kernel runs, else `reference`."""
    if q.device.type != "cuda" or not _has_triton():
        return "reference"
    from . import triton_device

    return "reference" if triton_device.refusal(q.device) else "triton"


class FalconOutput(NamedTuple):
    output: Tensor  # [B, T, H, V]
    final_state: FalconState | None


def falcon_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    *,
    rule: Rule,
    initial_state: FalconState | None = None,
    output_final_state: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
) -> FalconOutput:
    """Fast-weight attention over whole sequences: at each token decay, write, then read (paper, section 4).

    Args:
        q, k: [B, T, H, K] queries and keys after their norm and feature map.
        v: [B, T, H, V] values.
        gain: [B, T, H], or [B, T, H, V] for `falcon_2` and `falcon_2a`: the gain in [0, 2], or the step size itself
            where `rule.step_size` is `direct`.
        ridge: [B, T, H], at least 0; None exactly where `rule.ridge` is `none`.
        rule: what is computed.
        initial_state: the state to go on from; fresh by default. With `cu_seqlens` its batch is the documents.
        output_final_state: whether to return the state after the last token.
        mask: [B, T] bool, False where there is no token. The result is that of the row without those places, with 0
            in them.
        cu_seqlens: [N + 1] integers from 0 to T, the bounds of N documents packed into one row (B = 1).
        impl: `reference` (a loop over tokens), `torch` (chunks) or `triton` (GPU kernels). By default `triton` where
            its kernels take the call: on NVIDIA GPUs with Triton, in float32, bfloat16 or float16 (kernels/README.md
            has the limits); elsewhere `torch`.

    Returns:
        `output` [B, T, H, V] in the dtype of v, and `final_state` or None.

    Raises:
        ValueError: for shapes, options or values that do not fit together. Values are read on the CPU only.
    """
    _check_shapes(q, k, v, gain, ridge, rule, ("B", "T"))
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens are both given; packed documents take cu_seqlens alone.")
    if mask is not None:
        _check_mask(mask, q.shape[:2], "[B, T]")
    rows = q.shape[0]
    if cu_seqlens is not None:
        _check_documents(cu_seqlens, q)
        rows = cu_seqlens.shape[0] - 1
    _check_values(gain, ridge, rule, mask)
    if initial_state is not None:
        check_state(initial_state, rule, rows, *k.shape[2:], v.shape[-1])
    if impl is None:
        impl = _best_attention(q, k, v, rule)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(IMPLEMENTATIONS)}.")
    options: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens}
    if impl == "triton":
        options["final_state"] = output_final_state
    elif initial_state is None:
        initial_state = FalconState.zeros(rule, rows, *k.shape[2:], v.shape[-1], dtype=v.dtype, device=v.device)
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        output, state = IMPLEMENTATIONS[impl](q, k, v, gain, ridge, initial_state, rule, **options)
    return FalconOutput(output, state if output_final_state else None)


@torch.no_grad()
def falcon_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    ridge: Tensor | None,
    state: FalconState,
    *,
    rule: Rule,
    mask: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, FalconState]:
    """One token: decay, write and read, with `state` updated in place. No gradients.

    Args:
        q, k: [B, H, K]; v: [B, H, V]; gain: [B, H] or [B, H, V]; ridge: [B, H] or None, as in `falcon_attention`.
        state: the state to update.
        mask: [B] bool, False where the row has no token.
        impl: `reference` or `triton` (one kernel launch, all six rules). By default `triton` on NVIDIA GPUs with
            Triton, elsewhere `reference`.

    Returns:
        output [B, H, V] in the dtype of v, and `state` itself.

    Raises:
        ValueError: for shapes, options or values that do not fit together. Values are read on the CPU only.
    """
    _check_shapes(q, k, v, gain, ridge, rule, ("B",))
    check_state(state, rule, q.shape[0], *k.shape[1:], v.shape[-1])
    if mask is not None:
        _check_mask(mask, q.shape[:1], "[B]")
    _check_values(gain, ridge, rule, mask)
    if impl is None:
        impl = _best_step(q)
    if impl not in ("reference", "triton"):
        raise ValueError(f"impl is {impl!r}; it must be one of reference, triton.")
    if impl == "triton":
        from . import triton_step

        return triton_step.step(q, k, v, gain, ridge, state, rule, mask), state
    with torch.autocast(q.device.type, enabled=False):
        output, after = reference.step(q, k, v, gain, ridge, state, rule, mask)
    return output, state.copy_(after)


def check_state(state: FalconState, rule: Rule, rows: int, heads: int, key_dim: int, value_dim: int) -> None:
    """Raises ValueError unless `state` is one of `rule` with these sizes."""
    expected = FalconState.shapes(rule, rows, heads, key_dim, value_dim)
    for field, have, want in zip(FalconState._fields, state, expected, strict=True):
        if have is None and want is None:
            continue
        if have is None or want is None:
            wanted = "None" if want is None else f"a tensor of shape {list(want)}"
            given = "None" if have is None else f"of shape {list(have.shape)}"
            raise ValueError(f"state.{field} is {given}; {rule.name} with these options needs {wanted}.")
        if have.shape != want:
            raise ValueError(f"state.{field} has shape {list(have.shape)}; it must be {list(want)}.")


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor, ridge: Tensor | None, rule: Rule, lead: tuple[str, ...]
) -> None:
    names = ", ".join(lead)
    if q.dim() != len(lead) + 2:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [{names}, H, K].")
    _check("k", k, q.shape, f"[{names}, H, K], that of q")
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"v has shape {list(v.shape)}; it must be {[*q.shape[:-1], 'V']}, [{names}, H, V].")
    if rule.per_channel:
        _check("gain", gain, v.shape, f"[{names}, H, V] for {rule.name}")
    else:
        _check("gain", gain, q.shape[:-1], f"[{names}, H] for {rule.name}")
    if (ridge is None) != (rule.ridge == "none"):
        given = "None" if ridge is None else "a tensor"
        raise ValueError(
            f"ridge is {given}, but the rule has ridge={rule.ridge!r}; it must be None exactly for 'none'."
        )
    if ridge is not None:
        _check("ridge", ridge, q.shape[:-1], f"[{names}, H]")


def _check(name: str, tensor: Tensor, shape: torch.Size, meaning: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}, {meaning}.")


def _check_documents(cu_seqlens: Tensor, q: Tensor) -> None:
    if q.shape[0] != 1:
        raise ValueError(
            f"q has batch size {q.shape[0]}; with cu_seqlens all documents lie in one row, so it must be 1."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "it must be [N + 1] of int32 or int64."
        )
    if _values_readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != q.shape[1] or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds}; it must rise from 0 to T = {q.shape[1]}.")


def _check_mask(mask: Tensor, shape: torch.Size, meaning: str) -> None:
    _check("mask", mask, shape, meaning)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be torch.bool.")


def _check_values(gain: Tensor, ridge: Tensor | None, rule: Rule, mask: Tensor | None) -> None:
    if not _values_readable(gain):
        return
    if mask is not None:
        gain, ridge = gain[mask], None if ridge is None else ridge[mask]
    if gain.numel() == 0:
        return
    low, high = (bound.item() for bound in gain.detach().aminmax())
    if rule.step_size == "gain" and not (low >= 0 and high <= 2):
        raise ValueError(f"gain lies between {low:.6g} and {high:.6g}; it must lie in [0, 2].")
    if rule.step_size == "direct" and not low >= 0:
        raise ValueError(f"gain, here the step size, is {low:.6g} at its smallest; it must be at least 0.")
    if ridge is not None and not (lowest := ridge.detach().min().item()) >= 0:
        raise ValueError(f"ridge is {lowest:.6g} at its smallest; it must be at least 0.")


def _values_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
