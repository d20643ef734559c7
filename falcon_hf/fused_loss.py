"""The training loss without the logits of all tokens, by Liger Kernel: `pip install "falcon-hf[liger]"`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_falcon_fast_weight import for_products, missing_rows

# Tokens at a time: as many as there can be for their logits to be about so many times as large as all inputs.
LOGITS_OVER_INPUTS = 8
NEVER = -1e4  # logit of a row that makes up a weight; its exponential is 0
MORE = 8  # columns that give it, as many as keep rows at whole 16 bytes


def fuse_loss(model: nn.Module) -> None:
    """From now on, training steps of `model` compute head and loss together, a part of the tokens at a time.

    ```python
    fuse_loss(model)  # before PEFT, DDP or FSDP wrap it
    loss = model.train()(input_ids=ids, labels=ids).loss  # its logits are None
    ```

    The [B, T, vocab_size] logits and their gradient, the largest tensors of a training step with a large vocabulary,
    never exist as a whole. Loss and gradients are those of the plain loss to rounding. Without labels, or in `eval()`,
    the model gives its logits as before; where a trainer takes the loss from them (label smoothing, a loss of one's
    own), it asks without labels and nothing is saved.

    Args:
        model: a FalconFastWeightForCausalLM with its own, unadapted head, on a GPU when it trains.

    Raises:
        ImportError: without Liger Kernel.
        TypeError: for another model.
    """
    if not hasattr(type(model), "fused_loss"):
        raise TypeError(f"model is a {type(model).__name__}; it must be an unwrapped FalconFastWeightForCausalLM.")
    try:
        import liger_kernel  # noqa: F401
    except ImportError as error:
        raise ImportError('fuse_loss needs Liger Kernel: pip install "falcon-hf[liger]".') from error
    model.fused_loss = next_token_loss


@torch.compiler.disable
def next_token_loss(
    hidden_states: Tensor,
    head: nn.Module,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Cross-entropy of the next tokens, as transformers' loss for causal models has it.

    Args:
        hidden_states: [B, T, hidden_size], the inputs of the head.
        head: the linear layer to logits.
        labels: [B, T], the tokens themselves.
        num_items_in_batch: what the sum of losses is divided by; by default the number of tokens that are learnt.
        ignore_index: the label of a token that is not learnt.
        shift_labels: [B, T], the next tokens, where they are known; instead of labels.
    """
    from falcon_kernels.triton_device import INTERPRETED
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if hidden_states.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the model is on the CPU; the fused loss needs a GPU.")
    if not isinstance(head, nn.Linear) or hasattr(head.weight, "device_mesh"):
        raise ValueError(
            f"the head is a {type(head).__name__}; the fused loss needs a linear layer whose weight is whole, so leave "
            "lm_head out of adapters and of shards of its own."
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    if shift_labels.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"labels are for {list(shift_labels.shape)} tokens and logits are kept of {list(hidden_states.shape[:2])}; "
            "with the fused loss keep all of them."
        )
    x, weight = for_products(hidden_states.flatten(0, 1)), for_products(head.weight)
    if missing := missing_rows(head.weight, x):  # a bias would cost two more passes over all logits
        x = F.pad(x, (0, MORE), value=1.0)
        weight = torch.cat([F.pad(weight, (0, MORE)), _never(missing, weight)])
    total = liger_fused_linear_cross_entropy(
        x,
        weight,
        shift_labels.flatten().to(x.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        accum_dtype=torch.float32,
        chunk_mem_const=LOGITS_OVER_INPUTS,
    )
    return total if num_items_in_batch is None else total / num_items_in_batch


def _never(rows: int, weight: Tensor) -> Tensor:
    """[rows, D + MORE] in place of rows of a [., D] weight, for inputs with MORE ones."""
    return F.pad(weight.new_zeros(rows, weight.shape[1]), (0, MORE), value=NEVER / MORE)
