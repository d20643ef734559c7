"""Laying sequences out in chunks: padding, masks and packed documents become one picture, rows of whole chunks."""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from .compaction import Compaction, compaction
from .state import FalconState


class Grid(NamedTuple):
    """R rows of N chunks of C places. Every sequence starts at a chunk of its own, its tokens first, padding last.

    Without packing there is a sequence to a row. Packed documents share one row, as many chunks as any bounds can need,
    so that no shape depends on values.
    """

    chunk: int  # C
    valid: Tensor  # [R, N, C] bool, where there is a token
    start: Tensor  # [S] place in its row at which each sequence starts
    length: Tensor  # [S] tokens of each sequence
    compact: Compaction | None = None
    sequence: Tensor | None = None  # [1, N] sequence of each chunk; None where the row is one sequence
    first: Tensor | None = None  # [1, N] bool, whether the chunk is its sequence's first
    place: Tensor | None = None  # [T] place of each packed token

    @classmethod
    def of(cls, tokens: Tensor, chunk: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> Self:
        """The grid for tensors shaped like `tokens` [B, T, ...] under a mask or with packed documents."""
        rows, length, device = tokens.shape[0], tokens.shape[1], tokens.device
        if cu_seqlens is not None:
            return cls._packed(length, chunk, cu_seqlens.to(device).long())
        chunks = -(-length // chunk)
        compact = None if mask is None else compaction(mask)
        real = torch.ones(rows, length, dtype=torch.bool, device=device) if compact is None else compact.mask
        return cls(
            chunk=chunk,
            valid=pad(real, (0, chunks * chunk - length)).view(rows, chunks, chunk),
            start=torch.zeros(rows, dtype=torch.long, device=device),
            length=real.sum(1),
            compact=compact,
        )

    @classmethod
    def _packed(cls, length: int, chunk: int, bounds: Tensor) -> Self:
        lengths = bounds.diff()
        chunk_bounds = pad(((lengths + chunk - 1) // chunk).cumsum(0), (1, 0))
        chunks = length // chunk + len(lengths)
        number = torch.arange(chunks, device=bounds.device)
        sequence = (torch.searchsorted(chunk_bounds, number, right=True) - 1).clamp_max(len(lengths) - 1)
        token = torch.arange(length, device=bounds.device)
        owner = torch.searchsorted(bounds, token, right=True) - 1
        position = (number - chunk_bounds[sequence])[:, None] * chunk + torch.arange(chunk, device=bounds.device)
        return cls(
            chunk=chunk,
            valid=(position < lengths[sequence][:, None])[None],
            start=chunk_bounds[:-1] * chunk,
            length=lengths,
            sequence=sequence[None],
            first=(number == chunk_bounds[sequence])[None],
            place=chunk_bounds[owner] * chunk + token - bounds[owner],
        )

    def spread(self, tensor: Tensor) -> Tensor:
        """[B, T, ...] laid out as [R, N, C, ...], 0 where there is no token."""
        rows, chunks, chunk = self.valid.shape
        if self.place is not None:
            laid = tensor.new_zeros(1, chunks * chunk, *tensor.shape[2:]).index_copy(1, self.place, tensor)
        else:
            laid = tensor if self.compact is None else self.compact.gather(tensor)
            missing = chunks * chunk - laid.shape[1]
            laid = pad(laid, (0, 0) * (laid.dim() - 2) + (0, missing)) if missing else laid
        return laid.reshape(rows, chunks, chunk, *tensor.shape[2:])

    def collect(self, laid: Tensor, length: int) -> Tensor:
        """The inverse of `spread`: [R, N, C, ...] back to [B, T, ...], 0 where the mask has no token."""
        flat = laid.flatten(1, 2)
        if self.place is not None:
            return flat[:, self.place]
        flat = flat[:, :length]
        return flat if self.compact is None else self.compact.scatter(flat)

    def found(self, left: Tensor, initial: Tensor) -> Tensor:
        """What each chunk finds [R, N, ...]: what the one before it left, or what its sequence began with [S, ...]."""
        if self.sequence is None:
            return torch.cat([initial[:, None], left[:, :-1]], 1)
        before = torch.cat([torch.zeros_like(left[:, :1]), left[:, :-1]], 1)
        return torch.where(self.first.view(*self.first.shape, *(1,) * (left.dim() - 2)), initial[self.sequence], before)

    def enter(self, number: int, left: Tensor, initial: Tensor) -> Tensor:
        """What chunk `number` finds [R, ...], of what the chunk before it left and what its sequence began with."""
        if self.sequence is None:
            return left
        if number == 0:
            left = torch.zeros_like(initial[:1])
        return torch.where(
            self.first[:, number].view(-1, *(1,) * (left.dim() - 1)), initial[self.sequence[:, number]], left
        )

    def final(self, after: Tensor, initial: Tensor) -> Tensor:
        """[S, ...] what each sequence ends with, from what follows every chunk [R, N, ...]."""
        chunks = (self.length + self.chunk - 1) // self.chunk
        row, last = self._row(), self.start // self.chunk + (chunks - 1).clamp_min(0)
        empty = (self.length == 0).view(-1, *(1,) * (after.dim() - 2))
        return torch.where(empty, initial, after[row, last])

    def final_state(self, k: Tensor | None, x: Tensor, v: Tensor, pair: Tensor, initial: FalconState) -> FalconState:
        """`initial` with previous key and tail moved to the end of each sequence; from [R, N, C, ...] tensors."""
        state = initial
        row = self._row()[:, None]
        if initial.previous_key is not None:
            key = self._last(k, row, initial.previous_key[:, None])[:, 0]
            state = state._replace(previous_key=key, previous_valid=initial.previous_valid | (self.length > 0))
        if initial.tail_x is not None:
            state = state._replace(
                tail_x=self._last(x, row, initial.tail_x),
                tail_v=self._last(v, row, initial.tail_v),
                tail_valid=self._last(pair, row, initial.tail_valid),
            )
        return state

    def _row(self) -> Tensor:
        """[S] row of each sequence."""
        numbers = torch.arange(len(self.start), device=self.start.device)
        return numbers if self.sequence is None else torch.zeros_like(numbers)

    def _last(self, laid: Tensor, row: Tensor, before: Tensor) -> Tensor:
        """The last n places [S, n, ...] of each sequence preceded by `before` [S, n, ...]."""
        n = before.shape[1]
        position = self.length[:, None] - n + torch.arange(n, device=self.length.device)
        trailing = (1,) * (before.dim() - 2)
        kept = torch.arange(n, device=row.device) + self.length[:, None]  # place in `before` while that still reaches
        old = before.gather(1, kept.clamp_max(n - 1).view(-1, n, *trailing).expand_as(before))
        new = laid.flatten(1, 2)[row, self.start[:, None] + position.clamp_min(0)]
        return torch.where((position < 0).view(-1, n, *trailing), old, new.to(before.dtype))
