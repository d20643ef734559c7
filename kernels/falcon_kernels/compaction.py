"""Padding as absence: rows moved to their left end, computed without their padding, and moved back."""

from typing import NamedTuple

import torch
from torch import Tensor


class Compaction(NamedTuple):
    """Where the tokens of a padded batch go when every row is moved to its left end; made by `compaction`."""

    order: Tensor  # [B, T] int64: for each place of the compact rows, the place in the batch that it takes
    mask: Tensor  # [B, T] bool: the tokens of the compact rows, which come before all else

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens in each row."""
        return self.mask.sum(1)

    def gather(self, batch: Tensor) -> Tensor:
        """[B, T, ...] batch to compact rows, 0 after the last token whatever stood in the padding."""
        moved = batch.flatten(0, 1).index_select(0, self._places()).view(batch.shape)
        return torch.where(self._like(moved), moved, 0)

    def scatter(self, rows: Tensor) -> Tensor:
        """[B, T, ...] compact rows back to the batch, 0 at its padding whatever stood past the tokens."""
        chosen = torch.where(self._like(rows), rows, 0).flatten(0, 1)
        return torch.zeros_like(chosen).index_copy(0, self._places(), chosen).view(rows.shape)

    def _like(self, rows: Tensor) -> Tensor:
        return self.mask.reshape(self.mask.shape + (1,) * (rows.dim() - 2))

    def _places(self) -> Tensor:
        batch, length = self.order.shape
        starts = torch.arange(batch, device=self.order.device)[:, None] * length
        return (self.order + starts).flatten()


def compaction(mask: Tensor) -> Compaction:
    """The compaction of a padded batch. Shapes are static and no value is read by the host.

    Args:
        mask: [B, T], False or 0 where there is no token. Tokens keep their order, holes close up.
    """
    mask = mask.bool()
    order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)
    return Compaction(order, mask.gather(1, order))
