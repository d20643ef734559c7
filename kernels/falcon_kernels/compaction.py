"""Masked tokens are no tokens: moving the real ones of each row to its front, and results back."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Compaction(NamedTuple):
    """A stable reordering of each row that puts its real tokens first."""

    order: Tensor  # [B, T] place that each token of the compact row came from
    place: Tensor  # [B, T] place in the compact row of each token
    mask: Tensor  # [B, T] bool, the mask of the compact row: True, then False
    source: Tensor  # [B, T] bool, the mask of the row as it came

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The compaction of a [B, T] bool mask, without reading its values on the host."""
        order = torch.argsort(~mask, dim=1, stable=True)
        place = torch.argsort(order, dim=1)
        length = mask.sum(1, keepdim=True)
        return cls(order, place, torch.arange(mask.shape[1], device=mask.device) < length, mask)

    def gather(self, tensor: Tensor) -> Tensor:
        """[B, T, ...] with the real tokens first and 0 in what remains."""
        return _take(tensor, self.order, self.mask)

    def scatter(self, tensor: Tensor) -> Tensor:
        """The inverse of `gather`: every token at its own place, 0 where there is none."""
        return _take(tensor, self.place, self.source)


def _take(tensor: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    trailing = (1,) * (tensor.dim() - 2)
    taken = tensor.gather(1, index.reshape(*index.shape, *trailing).expand(*index.shape, *tensor.shape[2:]))
    return torch.where(keep.reshape(*keep.shape, *trailing), taken, 0)
