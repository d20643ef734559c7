"""The constant-size state of a sequence."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from .rule import Rule


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
        tail = rule.window - 1
        normalizer = None
        if rule.normalized_read:
            normalizer = torch.zeros(batch, heads, key_dim, *([value_dim] if rule.per_channel else []), **wide)
        return cls(
            memory=torch.zeros(batch, heads, key_dim, value_dim, **wide),
            previous_key=torch.zeros(batch, heads, key_dim, **narrow) if rule.shifted else None,
            previous_valid=torch.zeros(batch, **flag) if rule.shifted else None,
            tail_x=torch.zeros(batch, tail, heads, key_dim, **narrow) if tail else None,
            tail_v=torch.zeros(batch, tail, heads, value_dim, **narrow) if tail else None,
            tail_valid=torch.zeros(batch, tail, **flag) if tail else None,
            normalizer=normalizer,
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
