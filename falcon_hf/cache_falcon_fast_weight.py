"""The state of Falcon layers inside transformers' own Cache, of one size at any length of the sequence."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from falcon_kernels import FalconState, Rule, falcon_attention
from falcon_kernels.compaction import Compaction
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

# transformers calls the cache of a model `cache` from 5.24 on and `past_key_values` before.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


RECORDED = 256  # tokens of a longer pass that are recorded, its last ones: more than are ever taken back
KEPT = 32  # tokens at least that stay recorded after a crop: assistants of another tokenizer take back some more


class Pass(NamedTuple):
    """What one layer read in one pass, and the state that it found: all that taking part of it back needs."""

    before: FalconState
    context: Tensor | None  # [B, conv_size - 1 + T, channels], inputs of the convolution, those before the pass first
    k: Tensor  # [B, T, H, K]; this and what follows as in `falcon_attention`
    v: Tensor
    gain: Tensor
    ridge: Tensor | None
    rows: Compaction | None  # how padding was closed up

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pass":
        """The pass with `function` applied to every tensor of it."""
        before, *tensors, rows = self
        mapped = (None if tensor is None else function(tensor) for tensor in tensors)
        return Pass(before.map(function), *mapped, None if rows is None else Compaction(*map(function, rows)))

    @property
    def places(self) -> int:
        return self.k.shape[1]

    def first(self, places: int) -> "Pass":
        """The pass as if it had been of so many places only."""
        _, context, k, v, gain, ridge, rows = self
        if context is not None:
            context = context[:, : context.shape[1] - self.places + places]
        if rows is not None:
            rows = Compaction(rows.order[:, :places], (rows.mask & (rows.order < places))[:, :places])
        k, v, gain, ridge = (None if x is None else x[:, :places] for x in (k, v, gain, ridge))
        return Pass(self.before, context, k, v, gain, ridge, rows)

    def after(self, rule: Rule) -> tuple[FalconState, Tensor | None]:
        """The state and the convolution window after the pass."""
        before, context, k, v, gain, ridge, rows = self
        mask, window = None if rows is None else rows.mask, None
        if context is not None:
            lengths = None if rows is None else rows.lengths
            window = last_tokens(context, context.shape[1] - self.places, lengths)
        if self.places == 0:
            return before, window
        options = {"rule": rule, "initial_state": before, "output_final_state": True, "mask": mask}
        return falcon_attention(k, k, v, gain, ridge, **options).final_state, window


class FalconFastWeightCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """What one Falcon layer keeps of the tokens read so far. Tensors keep their addresses once they exist.

    After `activate_past_recording()` each pass is recorded, and `crop` can take back any number of the recorded tokens:
    the state is copied before each pass, and the kept tokens of the pass that `crop` cuts are read again, by the
    recurrence alone. The last 32 tokens and all that is read after stay recorded beyond a `crop`; of a pass without
    padding that is longer than 512 tokens, 256 are recorded.
    """

    is_croppable = True
    is_sliding = True  # of one size, thus never offloaded
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.is_initialized = False
        self.state: FalconState | None = None
        self.conv_window: Tensor | None = None  # [B, conv_size - 1, channels of q, k and v], the newest tokens
        self.cumulative_length: Any = None  # [] int64, places read so far, padding included
        self.passes: list[Pass] = []
        self.rule: Rule | None = None  # that of the recorded passes

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return not self.record_past

    def lazy_initialization(self, state: FalconState, conv_window: Tensor | None) -> None:  # type: ignore[override]
        """Takes the state before any token as storage."""
        self.state, self.conv_window = state, conv_window
        self.cumulative_length = torch.zeros((), dtype=torch.int64, device=state.memory.device)
        self.device = state.memory.device  # type: ignore[assignment]
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for tensor in (*state, conv_window, self.cumulative_length):
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)

    @torch.no_grad()
    def update(self, state: FalconState, conv_window: Tensor | None, places: int) -> None:  # type: ignore[override]
        """Writes the state after `places` more places, tokens or padding, into the storage, and counts them."""
        if state is not self.state:
            self.state.copy_(state)
        if conv_window is not None:
            self.conv_window.copy_(conv_window)
        if places:
            self.cumulative_length.add_(places)
        self.has_previous_state[0] = True
        if not self.record_past:
            self.passes.clear()

    @torch.no_grad()
    def record(self, rule: Rule, context: Tensor | None, k: Tensor, v: Tensor, gain: Tensor, ridge, rows) -> None:
        """Notes what the next `update` is about to read; arguments as in `Pass`."""
        self.rule = rule
        tensors = (None if tensor is None else tensor.detach() for tensor in (context, k, v, gain, ridge))
        self.passes.append(Pass(self.state.map(torch.clone), *tensors, rows))

    def get_seq_length(self) -> int:
        return 0 if self.cumulative_length is None else int(self.cumulative_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def nbytes(self) -> int:
        """Bytes of state, the same at any length."""
        window = 0 if self.conv_window is None else self.conv_window.nbytes
        return 0 if self.state is None else self.state.nbytes() + window

    def reset(self) -> None:
        self.passes.clear()
        self._each(lambda tensor: tensor.zero_())
        self.has_previous_state[0] = False
        if self.cumulative_length is not None:
            self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda tensor: tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device))))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._each(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._each(lambda tensor: tensor.to(self.device, non_blocking=True))

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest places, tokens or padding, and forgets all but the newest records.

        Args:
            tokens_to_remove: minus their number.

        Raises:
            ValueError: if it is above 0.
            RuntimeError: if fewer places are recorded.
        """
        count, recorded = -int(tokens_to_remove), sum(part.places for part in self.passes)
        if count < 0:
            raise ValueError(f"crop is given {-count}; it must be minus the number of tokens to take back.")
        if not self.is_initialized:
            return
        if count > recorded:
            raise RuntimeError(
                f"crop is asked to take back {count} tokens, but {recorded} are recorded; call "
                "cache.activate_past_recording() before reading what may be taken back."
            )
        passes, left = self.passes, count
        while left > 0:
            part = passes.pop()
            left -= part.places
        if count > 0:
            part = part.first(-left)
            self.update(*part.after(self.rule), -count)
            if part.places > 0:
                passes.append(part)
        recorded -= count
        while passes and recorded - passes[0].places >= KEPT:
            recorded -= passes.pop(0).places

    def _each(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(function)
        if self.conv_window is not None:
            self.conv_window = function(self.conv_window)
        self.passes = [part.map(function) for part in self.passes]


def last_tokens(tokens: Tensor, count: int, lengths: Tensor | None) -> Tensor:
    """[B, count, C], the last tokens of [B, count + T, C], of which the first `count` are older ones.

    Args:
        lengths: [B], how many of the T are tokens, where not all are; they come first.
    """
    if lengths is None:
        return tokens[:, tokens.shape[1] - count :]
    places = lengths[:, None] + torch.arange(count, device=tokens.device)
    return tokens.take_along_dim(places[..., None], 1)


def falcon_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache for a model or a mixer of `config`."""
    return fit_cache(DynamicCache(config=config), config)


def fit_cache(cache: Cache, config: PreTrainedConfig) -> Cache:
    """Gives each fast-weight layer of `config` its place in `cache`, which must hold no other model's state.

    Raises:
        ValueError: if a layer of the cache is in use for another kind of layer.
    """
    for index, kind in enumerate(config.layer_types):
        if index == len(cache.layers):
            cache.layers.append(FalconFastWeightCacheLayer() if kind == "linear_attention" else DynamicLayer())
        layer = cache.layers[index]
        if kind == "linear_attention" and not isinstance(layer, FalconFastWeightCacheLayer):
            if getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values()):
                raise ValueError(
                    f"cache holds the state of a {type(layer).__name__} at layer {index}; it must be a new "
                    f"cache or one that a model of type {config.model_type} returned."
                )
            cache.layers[index] = new = FalconFastWeightCacheLayer()
            new.record_past = getattr(layer, "record_past", False)
    if getattr(cache, "offloading", False):
        cache.only_non_sliding = True
    return cache


def layer_state(cache: Cache, index: int, config: PreTrainedConfig) -> FalconFastWeightCacheLayer:
    """The place of layer `index` in `cache`, which is made where the cache is new."""
    if index >= len(cache.layers) or not isinstance(cache.layers[index], FalconFastWeightCacheLayer):
        fit_cache(cache, config)
    layer: Any = cache.layers[index]
    return layer


def cache_nbytes(cache: Cache) -> int:
    """Bytes of all that `cache` holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, FalconFastWeightCacheLayer):
            total += layer.nbytes()
        else:
            total += sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))
    return total


__all__ = [
    "CACHE_NAME",
    "RECORDED",
    "FalconFastWeightCacheLayer",
    "cache_nbytes",
    "falcon_cache",
    "fit_cache",
    "last_tokens",
    "layer_state",
]
