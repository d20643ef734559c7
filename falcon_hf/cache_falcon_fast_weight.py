"""The state of Falcon layers inside transformers' own Cache, of one size at any length of the sequence."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from falcon_kernels import FalconState
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

# transformers calls the cache of a model `cache` from 5.24 on and `past_key_values` before.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


class FalconFastWeightCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """What one Falcon layer keeps of the tokens read so far. Tensors keep their addresses once they exist."""

    is_compileable = True
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.is_initialized = False
        self.state: FalconState | None = None
        self.conv_window: Tensor | None = None  # [B, conv_size - 1, channels of q, k and v], the newest tokens
        self.cumulative_length: Any = None  # [] int64, places read so far, padding included

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
        """Writes the state after `places` more places, tokens or padding, into the storage."""
        if state is not self.state:
            self.state.copy_(state)
        if conv_window is not None:
            self.conv_window.copy_(conv_window)
        self.cumulative_length.add_(places)
        self.has_previous_state[0] = True

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

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove == 0:
            return
        raise RuntimeError(
            f"crop is asked to remove {abs(tokens_to_remove)} tokens, but a fast-weight memory cannot forget "
            "single tokens; keep a copy of the cache from before them (copy.deepcopy) instead."
        )

    def _each(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(function)
        if self.conv_window is not None:
            self.conv_window = function(self.conv_window)


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
            cache.layers[index] = FalconFastWeightCacheLayer()
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
    "FalconFastWeightCacheLayer",
    "cache_nbytes",
    "falcon_cache",
    "fit_cache",
    "layer_state",
]
