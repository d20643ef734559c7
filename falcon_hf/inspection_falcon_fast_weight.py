"""What the memories of a model do at each token of a text: how much they change, keep, and were wrong."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from falcon_kernels import FalconState, Rule
from falcon_kernels.reference import step
from falcon_kernels.schedule import energy, step_and_log_decay
from torch import Tensor
from transformers import PreTrainedModel

from .modeling_falcon_fast_weight import FalconFastWeightAttention


@dataclass(frozen=True)
class MemoryTrace:
    """The work of L fast-weight layers of H heads on a text of T tokens, on the CPU.

    Where there is no pair to write, at the first token under next-latent alignment, the step size is 0, the decay 1,
    and local loss and agreement NaN. Tensors are float32, or float64 for a model in float64.
    """

    layers: tuple[int, ...]  # [L] place of each fast-weight layer in the model
    step_size: Tensor  # [L, H, T] eta; for falcon_2 and falcon_2a its mean over the value channels
    log_decay: Tensor  # [L, H, T] log gamma, in nats a token, at most 0; for falcon_2 and 2a its mean over channels
    local_loss: Tensor  # [L, H, T] |S'x - v|^2 / |v|^2 before the write, without unit
    agreement: Tensor  # [L, H, T] cosine between the memory's answer S'x and v before the write; 0 where either is 0
    token_loss: Tensor  # [T] -log p of each token given those before it, in nats; NaN for the first

    @property
    def decay(self) -> Tensor:
        """[L, H, T] gamma, the part of the memory that is kept from the token before, in [0, 1]."""
        return self.log_decay.exp()

    @property
    def half_life(self) -> Tensor:
        """[L, H] tokens after which decay alone leaves half of what was written, at the text's mean log gamma.

        Infinite where nothing decays. Writes of the regression rules replace older ones besides.
        """
        written = ~self.local_loss[0, 0].isnan()
        return math.log(2) / self.log_decay[..., written].mean(-1).abs()


@torch.no_grad()
def inspect_memory(model: PreTrainedModel, input_ids: Tensor) -> MemoryTrace:
    """Reads one text with `model` and says what each of its fast-weight memories does at each token.

    The model runs once; the recurrence of `falcon_kernels.reference` (SPEC section 2; paper, sections 3.1 and 4) then
    runs again on the inputs of its layers.

    The local loss is the squared residual S'x - v of the newest pair, for sliding rules too, with the memory as the
    token finds it and over the squared norm of v: 0 where the memory knew the value, 1 where its answer is 0. It is
    what the regression rules descend (falcon_3: together with the older pairs of its window, which have been written
    before). The inner-product rules descend -v'S'x instead; there it still is the surprise: how far the memory's
    answer to the key is from the value that came. As they never look at their answer, its length is free and the loss
    may lie far above 1; the agreement, a cosine, is without that length, as is the layer's output, which is normed
    after each read. With a normalized read the answer is the normalized one.

    Args:
        model: a causal language model with fast-weight layers, on any device.
        input_ids: [1, T], without padding.

    Raises:
        ValueError: if input_ids are not one text of at least one token, or the model is no causal language
            model or has no fast-weight layer.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; it must be [1, T] for one text of T >= 1 tokens."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model is a {type(model).__name__}; it must be a causal language model, with logits of tokens."
        )
    mixers = [module for module in model.modules() if isinstance(module, FalconFastWeightAttention)]
    if not mixers:
        raise ValueError(f"model is a {type(model).__name__} without fast-weight layers; it must have at least one.")

    caught: list[tuple[Tensor | None, ...]] = []

    def catch(mixer, arguments):
        inputs = mixer.recurrence_inputs(arguments[0])[1:5]
        caught.append(
            tuple(None if x is None else x.to("cpu", torch.promote_types(x.dtype, torch.float32)) for x in inputs)
        )

    hooks = [mixer.register_forward_pre_hook(catch) for mixer in mixers]
    try:
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits[0].cpu()
    finally:
        for hook in hooks:
            hook.remove()

    # The layers are independent given their inputs, so that they run as rows of one batch.
    k, v, gain, ridge = (None if parts[0] is None else torch.cat(parts) for parts in zip(*caught, strict=True))
    rule = mixers[0].rule
    x, valid = _write_features(k, rule)
    eta, log_decay = _rates(x, valid, gain, ridge, rule)
    local_loss, agreement = (torch.where(valid, y, math.nan) for y in _answers(x, k, v, gain, ridge, rule))
    log_p = logits.to(local_loss.dtype).log_softmax(-1)[:-1]
    token_loss = -log_p.gather(-1, input_ids[0, 1:, None].cpu())[:, 0]
    return MemoryTrace(
        layers=tuple(mixer.layer_idx for mixer in mixers),
        step_size=eta,
        log_decay=log_decay,
        local_loss=local_loss,
        agreement=agreement,
        token_loss=F.pad(token_loss, (1, 0), value=math.nan),
    )


def _write_features(k: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """[L, T, H, K] write feature of each token, 0 where it has no pair, and [T] whether it has one."""
    valid = torch.ones(k.shape[1], dtype=torch.bool)
    if rule.shifted:
        k = F.pad(k[:, :-1], (0, 0, 0, 0, 1, 0))
        valid[0] = False
    return k, valid


def _rates(x: Tensor, valid: Tensor, gain: Tensor, ridge: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """[L, H, T] step size and log decay, those of channels as their mean."""
    before = rule.window - 1
    count = F.pad(valid.to(x.dtype), (before, 0)).unfold(0, rule.window, 1).sum(-1).clamp_min(1)
    window_x = F.pad(x.transpose(1, 2), (0, 0, before, 0))  # [L, H, W - 1 + T, K]
    rates = step_and_log_decay(
        energy(window_x, count, rule),
        gain.transpose(1, 2),
        None if ridge is None else ridge.transpose(1, 2),
        valid.expand(x.shape[0], x.shape[2], -1),
        rule,
    )
    eta, log_decay = (rate.mean(-1) if rule.per_channel else rate for rate in rates)
    return eta, log_decay


def _answers(x: Tensor, k: Tensor, v: Tensor, gain: Tensor, ridge: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Local loss and agreement, both [L, H, T], of the memory's answer to x before each write."""
    layers, length, heads, key_dim = k.shape
    state = FalconState.zeros(rule, layers, heads, key_dim, v.shape[-1], dtype=k.dtype)
    answers = []
    for t in range(length):
        asked = x[:, t, :, None]  # [L, H, 1, K]
        answer = (asked @ state.memory)[..., 0, :]
        if rule.normalized_read:
            z = state.normalizer if rule.per_channel else state.normalizer[..., None]
            answer = answer / ((asked @ z)[..., 0, :] + rule.read_epsilon)
        answers.append(answer)
        _, state = step(k[:, t], k[:, t], v[:, t], gain[:, t], None if ridge is None else ridge[:, t], state, rule)
    answer, v = torch.stack(answers, 2), v.transpose(1, 2)  # [L, H, T, V]
    squared = v.square().sum(-1).clamp_min(torch.finfo(v.dtype).tiny)
    return (answer - v).square().sum(-1) / squared, F.cosine_similarity(answer, v, -1)


__all__ = ["MemoryTrace", "inspect_memory"]
