"""Context parallelism: one sequence over several processes, each with a contiguous part of its tokens.

```python
from torch.nn.parallel import DistributedDataParallel
from falcon_hf.context_parallel import context_parallel, own_part

torch.distributed.init_process_group()
model = DistributedDataParallel(model)  # or fully_shard(model): what averages gradients over the processes
with context_parallel(model):
    ids = own_part(whole_ids)  # [B, T] tokens, the same on every rank, to this rank's part of them
    model(input_ids=ids, labels=ids).loss.backward()
```

Layers exchange the inputs of their convolutions, keys and values at the edges, and memories, as
`falcon_kernels.ranks.falcon_attention_over_ranks` says; all else is local. Gradient checkpointing repeats the exchange
with the rest. torch.compile is not supported.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from falcon_kernels import FalconOutput, FalconState, Rule
from falcon_kernels.ranks import falcon_attention_over_ranks, from_left
from torch import Tensor, nn
from transformers import PreTrainedModel

from .modeling_falcon_fast_weight import (
    FalconFastWeightAttention,
    FalconFastWeightDecoderLayer,
    FalconFastWeightForCausalLM,
    FalconFastWeightModel,
    ShortConvolution,
)

IGNORED = -100  # labels that are not learnt


def own_part(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part [B, T / N, ...] of a [B, T, ...] tensor; where T needs it, the first have one token more."""
    return tensor.tensor_split(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


@contextmanager
def context_parallel(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, scan: bool | None = None
) -> Iterator[None]:
    """Within it, `model` reads one sequence over the ranks of `group`: each passes its contiguous part, in their order.

    Hidden states, logits and gradients are those of one process. The loss is that of the whole sequence on every rank;
    labels are this rank's part and are shifted across the parts (or give `shift_labels`, shifted beforehand). Gradients
    of the weights, averaged over the ranks as DDP and FSDP do, are those of one process. Where `num_items_in_batch` is
    given, the loss is this rank's share of the sum over that number.

    Args:
        model: a FalconFastWeightForCausalLM, FalconFastWeightModel or layers of it, wrapped or not, all of whose layers
            are fast-weight layers. Put it in the mode and the wrappers that it has within before.
        group: the ranks, all by default; of a device mesh `mesh["cp"].get_group()`. All have parts of one batch.
        scan: whether all ranks work at the same time, see `falcon_attention_over_ranks`.

    Raises:
        ValueError: for a model that is not as above, and, within, for padding, packed documents and caches.
    """
    modules = list(model.modules())
    _check_model(modules)
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, FalconFastWeightAttention):
                stack.callback(setattr, module, "recurrence", module.recurrence)
                module.recurrence = _AttentionOverRanks(group, scan)  # type: ignore[assignment]
            elif isinstance(module, ShortConvolution):
                stack.enter_context(_hook(module.register_forward_pre_hook(partial(_reach_left, group))))
            elif isinstance(module, FalconFastWeightModel):
                hook = partial(_check_inputs, group)
                stack.enter_context(_hook(module.register_forward_pre_hook(hook, with_kwargs=True)))
            elif isinstance(module, FalconFastWeightForCausalLM):
                replaced = vars(module).get("_loss_function")
                module.loss_function = partial(_loss, module.loss_function, group)
                stack.callback(_restore_loss, module, replaced)
                if module.fused_loss is not None:
                    stack.callback(setattr, module, "fused_loss", module.fused_loss)
                    module.fused_loss = partial(_loss, module.fused_loss, group)
        yield


@contextmanager
def _hook(handle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _restore_loss(module: FalconFastWeightForCausalLM, replaced: Callable | None) -> None:
    if replaced is None:
        del module._loss_function
    else:
        module.loss_function = replaced


def _check_model(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, FalconFastWeightDecoderLayer) and module.layer_type == "full_attention":
            raise ValueError(
                "model has full_attention layers; context_parallel takes models whose layers are all linear_attention."
            )
        if isinstance(module, PreTrainedModel) and not isinstance(
            module, (FalconFastWeightForCausalLM, FalconFastWeightModel)
        ):
            raise ValueError(
                f"model is a {type(module).__name__}; context_parallel takes FalconFastWeightForCausalLM, "
                "FalconFastWeightModel and their layers."
            )
    if not any(isinstance(module, FalconFastWeightAttention) for module in modules):
        raise ValueError(f"model is a {type(modules[0]).__name__} without any FalconFastWeightAttention.")


class _AttentionOverRanks(nn.Module):
    """Stands in for the layer FalconAttention."""

    def __init__(self, group: dist.ProcessGroup | None, scan: bool | None):
        super().__init__()
        self.group, self.scan = group, scan

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gain: Tensor,
        ridge: Tensor | None,
        rule: Rule,
        state: FalconState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> FalconOutput:
        for given, name in ((state, "cache"), (mask, "attention_mask"), (cu_seqlens, "cu_seqlens")):
            _refuse(name, given is not None)
        return falcon_attention_over_ranks(q, k, v, gain, ridge, rule=rule, group=self.group, scan=self.scan)


def _reach_left(group, convolution: ShortConvolution, args: tuple) -> tuple:
    """The inputs of a convolution, with the last tokens of the left neighbour before this rank's."""
    x, _, *rest = args
    reach = convolution.weight.shape[1] - 1
    if not reach:
        return args
    if x.shape[1] < reach:
        raise ValueError(f"the part of this rank has {x.shape[1]} tokens; every rank must have at least {reach}.")
    return (x, *from_left(group, x[:, -reach:]), *rest)


def _check_inputs(group, model: FalconFastWeightModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """What the layers are given, without a mask that masks nothing; reads values of masks and position_ids."""
    kwargs = dict(zip(("input_ids", "attention_mask", "position_ids", "cache"), args, strict=False)) | kwargs
    mask = kwargs.get("attention_mask")
    _refuse("attention_mask with padding", mask is not None and not bool(mask.all()))
    position_ids = kwargs.get("position_ids")
    if position_ids is not None:
        (last,) = from_left(group, position_ids[:, -1:])
        before = torch.cat([last if dist.get_rank(group) else position_ids[:, :1] - 1, position_ids], 1)
        _refuse("position_ids that do not go on", bool((before.diff(dim=1) != 1).any()))
    for name in ("cache", "past_key_values", "cache_params", "cu_seq_lens_q", "seq_idx"):
        _refuse(name, kwargs.get(name) is not None)
    return (), kwargs | {"attention_mask": None, "position_ids": None, "use_cache": False}


def _refuse(name: str, given: bool) -> None:
    if given:
        raise ValueError(
            f"{name} given within context_parallel, which takes whole rows of one document each; put padding at the "
            f"end, with {IGNORED} as its labels."
        )


def _loss(
    whole_loss: Callable[..., Tensor],
    group: dist.ProcessGroup | None,
    *places,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **options,
) -> Tensor:
    """The loss of the whole sequence; its gradient is N times that of this rank's tokens, to be averaged over ranks.

    `places` and `options` go to `whole_loss` as they are: logits, or hidden states and the head of a fused loss.
    """
    if shift_labels is None:
        shift_labels = torch.cat([labels[:, 1:], _first_of_right(labels, group)], 1)
    here = partial(whole_loss, *places, labels=labels, shift_labels=shift_labels, **options)
    if num_items_in_batch is not None:
        return here(num_items_in_batch=num_items_in_batch)
    learnt = (shift_labels != IGNORED).sum()
    dist.all_reduce(learnt, group=group)
    loss = here(num_items_in_batch=learnt / dist.get_world_size(group))
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=group)
    return loss + (whole / dist.get_world_size(group) - loss.detach())


def _first_of_right(labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[B, 1] first label of the right neighbour, none on the last rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = [torch.empty_like(labels[:, :1]) for _ in range(size)]
    dist.all_gather(first, labels[:, :1].contiguous(), group=group)
    return first[rank + 1] if rank + 1 < size else torch.full_like(labels[:, :1], IGNORED)


__all__ = ["context_parallel", "own_part"]
