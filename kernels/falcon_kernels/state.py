"""The constant-size state of a sequence."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from .rule import Rule

Shape = tuple[int, ...]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of memory and statistics for inputs of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def like(flag: Tensor, tensor: Tensor) -> Tensor:
    """`flag` with trailing axes added, to broadcast against `tensor`."""
    return flag.reshape(flag.shape + (1,) * (tensor.dim() - flag.dim()))


class FalconState(NamedTuple):
    """All that a Falcon layer keeps of the tokens read so far.

    Fields that a rule does not need are None: the previous key under same-step alignment, the tail where the window is
    one pair, the normalizer where the read is not normalized. Tails end at the newest pair.
    """

    memory: Tensor  # [B, H, K, V], float32 (float64 for float64 inputs)
    previous_key: Tensor | None = None  # [B, H, K]
    previous_valid: Tensor | None = None  # [B] bool; False where the sequence has not begun
    tail_x: Tensor | None = None  # [B, W - 1, H, K] write features
    tail_v: Tensor | None = None  # [B, W - 1, H, V] their values
    tail_valid: Tensor | None = None  # [B, W - 1] bool
    normalizer: Tensor | None = None  # [B, H, K], or [B, H, K, V] for falcon_2a

    @classmethod
    def zeros(
        cls,
        rule: Rule,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Self:
        """The state before any token. `dtype` is that of keys and values; memory and normalizer are wider."""
        wide = {"dtype": accumulation_dtype(dtype), "device": device}
        narrow = {"dtype": dtype, "device": device}
        flag = {"dtype": torch.bool, "device": device}
        kinds = (wide, narrow, flag, narrow, narrow, flag, wide)
        shapes = cls.shapes(rule, batch, heads, key_dim, value_dim)
        return cls(*(None if s is None else torch.zeros(s, **kind) for s, kind in zip(shapes, kinds, strict=True)))

    @classmethod
    def shapes(cls, rule: Rule, batch: int, heads: int, key_dim: int, value_dim: int) -> tuple[Shape | None, ...]:
        """The shape of each field, None where the rule does not need it."""
        key, tail = (heads, key_dim), (batch, rule.window - 1)
        sliding = rule.window > 1
        matrix = (batch, heads, key_dim, value_dim)
        return (
            matrix,
            (batch, *key) if rule.shifted else None,
            (batch,) if rule.shifted else None,
            (*tail, *key) if sliding else None,
            (*tail, heads, value_dim) if sliding else None,
            tail if sliding else None,
            (matrix if rule.per_channel else matrix[:3]) if rule.normalized_read else None,
        )

    def map(self, function) -> Self:
        """The state with `function` applied to every tensor of it."""
        return type(self)(*(None if tensor is None else function(tensor) for tensor in self))

    def copy_(self, other: Self) -> Self:
        """Writes `other` into this state's own storage."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None:
                mine.copy_(theirs)
        return self

    def nbytes(self) -> int:
        """Bytes that the state occupies."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)
