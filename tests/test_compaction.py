"""Padding leaves and returns without a trace."""

import torch
from falcon_kernels.compaction import compaction

MASK = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])


def test_tokens_move_left_in_order_and_return():
    rows = compaction(MASK)
    batch = torch.arange(20.0).view(4, 5, 1) + 1
    compact = rows.gather(batch)
    assert compact[..., 0].tolist() == [[2, 4, 5, 0, 0], [6, 7, 8, 9, 10], [0] * 5, [16, 0, 0, 0, 0]]
    assert rows.mask.tolist() == (compact[..., 0] > 0).tolist()
    assert rows.lengths.tolist() == [3, 5, 0, 1]
    assert rows.scatter(compact).tolist() == (batch * MASK[..., None]).tolist()


def test_boolean_and_integer_masks_agree_and_further_axes_follow():
    batch = torch.randn(4, 5, 2, 3)
    for mask in (MASK, MASK.bool(), MASK.float()):
        rows = compaction(mask)
        assert torch.equal(rows.gather(batch)[0, :3], batch[0, [1, 3, 4]])


def test_what_stands_in_padding_reaches_neither_values_nor_gradients():
    rows = compaction(MASK)
    padding = MASK[..., None] == 0
    batch = torch.randn(4, 5, 2).masked_fill(padding, float("nan")).requires_grad_()
    compact = rows.gather(batch)
    assert compact.isfinite().all()
    spoiled = torch.where(rows.mask[..., None], compact.square(), float("nan"))
    back = rows.scatter(spoiled)
    assert back.isfinite().all()
    back.sum().backward()
    expected = torch.where(padding, 0, 2 * batch.detach())
    assert torch.equal(batch.grad, expected)
