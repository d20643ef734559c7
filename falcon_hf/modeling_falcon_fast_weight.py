"""Falcon fast-weight language models: the mixer, usable alone, and the model around it."""

import inspect
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from falcon_kernels import FalconState, gated_norm, short_convolution
from falcon_kernels.compaction import Compaction, compaction
from falcon_kernels.convolution import normalize
from falcon_kernels.layers import FalconAttention
from falcon_kernels.mlp import silu_projection
from falcon_kernels.norm import add_norm
from falcon_kernels.single_token import fuses, gated_product, project
from huggingface_hub import create_repo
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.integrations import use_kernel_forward_from_hub
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.generic import can_return_tuple
from transformers.utils.hub import create_and_tag_model_card
from transformers.utils.output_capturing import capture_outputs

from .cache_falcon_fast_weight import (
    CACHE_NAME,
    RECORDED,
    FalconFastWeightCacheLayer,
    falcon_cache,
    fit_cache,
    last_tokens,
    layer_state,
)
from .code_falcon_fast_weight import carry_code
from .configuration_falcon_fast_weight import FalconFastWeightConfig
from .generation_falcon_fast_weight import generate_on_device, refusal, worth_a_graph

SHORTEST_MEMORY, LONGEST_MEMORY = 8, 1024
FIRST_SHARE = 0.1  # of what the embeddings hold that a layer adds when training begins; with all of it they drown

use_kernel_forward_from_hub("FalconAttention")(FalconAttention)


class ShortConvolution(nn.Module):
    """Causal convolution of each channel with itself, SiLU, and a norm of each head, see `short_convolution`."""

    def __init__(self, channels: int, size: int, head_dim: int, norm: str, epsilon: float):
        super().__init__()
        self.head_dim, self.norm, self.epsilon = head_dim, norm, epsilon
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, window: Tensor | None = None, age: Tensor | None = None) -> Tensor:
        """[B, T, channels] to [B, T, H, head_dim].

        Args:
            x: [B, T, channels].
            window: [B, size - 1, channels], the tokens before x; by default there were none.
            age: [T], for packed documents the index of each token in its own, beyond which it sees nothing.
        """
        if window is not None:
            x = torch.cat([window.to(x.dtype), x], 1)
        weight, options = _own_shard(self.weight), {"norm": self.norm, "epsilon": self.epsilon, "age": age}
        heads = short_convolution(x, weight, self.head_dim, **options)
        return heads if window is None else heads[:, window.shape[1] :]


class GatedRMSNorm(nn.RMSNorm):
    """RMS norm of each head with one weight for all of them, and a gate, see `gated_norm`."""

    def forward(self, x: Tensor, gate: Tensor | None = None, sharded: Any = None) -> Tensor:
        """[B, T, H, V] to the same shape.

        Args:
            gate: [B, T, H * V].
            sharded: a parameter that lies on several processes where the heads do.
        """
        weight: Tensor = self.weight
        if hasattr(sharded, "to_local"):
            from torch.distributed.tensor import DTensor, Partial, Replicate  # not every torch has it

            shared = DTensor.from_local(weight, sharded.device_mesh, [Replicate()], run_check=False)
            weight = shared.to_local(grad_placements=[Partial()])  # the gradients of all processes are summed
        return gated_norm(x, weight, gate, epsilon=self.eps)


class FalconFastWeightAttention(nn.Module):
    """Fast-weight attention as a layer: [B, T, hidden_size] to the same shape, causal, its state of one size.

    It needs no other part of the model around it:

    ```python
    config = FalconFastWeightConfig(hidden_size=256, num_attention_heads=4, rule="falcon_1")
    mixer = FalconFastWeightAttention(config)
    y = mixer(x)  # whole sequences, [B, T, 256]

    cache = falcon_cache(config)  # or token by token
    for t in range(x.shape[1]):
        y_t = mixer(x[:, t : t + 1], cache=cache)
    ```

    Args:
        config: sizes and rule.
        layer_idx: the layer's place in a cache.
    """

    def __init__(self, config: FalconFastWeightConfig, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.rule = config.rule_object
        self.num_heads, self.head_dim, self.value_dim = (
            config.num_attention_heads,
            config.head_dim,
            config.value_head_dim,
        )
        # Read here once, since transformers makes reading a field of a config slow.
        self.largest_gain = 2.0 if self.rule.step_size == "gain" else config.step_size_max
        self.ridge_scale, self.read_scale = config.ridge_scale, config.read_scale
        self.qk_norm, self.value_norm, self.norm_epsilon = config.qk_norm, config.value_norm, config.rms_norm_eps
        self.feature_map, self.conv_size = config.feature_map, config.conv_size
        key_channels, value_channels = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        self.q_proj = nn.Linear(config.hidden_size, key_channels, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_channels, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, value_channels, bias=False)
        # Biases apart from their projections, so that they are added in fp32 whatever the model's dtype.
        gains = value_channels if self.rule.per_channel else self.num_heads
        self.gain_proj = nn.Linear(config.hidden_size, gains, bias=False)
        self.gain_bias = nn.Parameter(torch.empty(gains))
        self.ridge_proj, self.ridge_bias = None, None
        if self.rule.ridge != "none":
            self.ridge_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
            self.ridge_bias = nn.Parameter(torch.empty(self.num_heads))
        self.g_proj = nn.Linear(config.hidden_size, value_channels, bias=False) if config.output_gate else None
        self.q_conv, self.k_conv, self.v_conv = None, None, None
        if config.conv_size:
            of_keys = key_channels, config.conv_size, self.head_dim, self.qk_norm, self.norm_epsilon
            of_values = value_channels, config.conv_size, self.value_dim, self.value_norm, self.norm_epsilon
            self.q_conv, self.k_conv = ShortConvolution(*of_keys), ShortConvolution(*of_keys)
            self.v_conv = ShortConvolution(*of_values)
        self.recurrence = FalconAttention()
        self.o_norm = GatedRMSNorm(self.value_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(value_channels, config.hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets gains to the middle of their range and spreads the memory lengths of the heads."""
        init.zeros_(self.gain_bias)
        if self.ridge_bias is not None:
            init.copy_(self.ridge_bias, initial_ridge_bias(self.config))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Compaction | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """[B, T, hidden_size] to the same shape, 0 at padding.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, T], 0 or False where there is no token, or the compaction made from it.
            cache: from `falcon_cache` or transformers; read and updated. No gradient passes through it.
            cu_seqlens: [N + 1] bounds of documents packed into the B * T places, from 0 to B * T.
        """
        shape = hidden_states.shape
        rows = compaction(attention_mask) if isinstance(attention_mask, Tensor) else attention_mask
        age = None
        if cu_seqlens is not None:
            if rows is not None or cache is not None:
                raise ValueError("cu_seqlens is given with attention_mask or cache; packed documents have neither.")
            hidden_states = hidden_states.reshape(1, -1, shape[-1])
            age = _index_in_document(cu_seqlens, hidden_states.shape[1])
        if rows is not None:
            hidden_states = rows.gather(hidden_states)
        slot = None if cache is None else layer_state(cache, self.layer_idx, self.config)
        if slot is not None and slot.record_past and rows is None and shape[1] > 2 * RECORDED:
            slot.record_past = False  # for all but the last tokens
            older = self.forward(hidden_states[:, :-RECORDED], cache=cache)
            slot.record_past = True
            return torch.cat([older, self.forward(hidden_states[:, -RECORDED:], cache=cache)], 1)
        fused = self._fuses(hidden_states, slot)
        inputs = self._token_inputs if fused else self.recurrence_inputs
        q, k, v, gain, ridge, context = inputs(hidden_states, slot, rows, age)
        if slot is not None and slot.record_past:
            slot.record(self.rule, context, k, v, gain, ridge, rows)

        out, state = self.recurrence(
            q,
            k,
            v,
            gain,
            ridge,
            self.rule,
            None if slot is None else slot.state,
            None if rows is None else rows.mask,
            cu_seqlens,
        )
        if slot is not None:
            lengths = None if rows is None else rows.lengths
            window = None if context is None else last_tokens(context, self.conv_size - 1, lengths)
            slot.update(state, window, 0 if fused else q.shape[1])

        if self.read_scale != 1:
            out = out * self.read_scale
        gate = None if self.g_proj is None else self.g_proj(hidden_states)
        (out,) = project(self.o_norm(out, gate, self.gain_bias).flatten(-2), self.o_proj)
        if rows is not None:
            out = rows.scatter(out)
        return out.view(shape)

    def recurrence_inputs(
        self,
        hidden_states: Tensor,
        slot: FalconFastWeightCacheLayer | None = None,
        rows: Compaction | None = None,
        age: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the recurrence is given: queries, keys and values after convolution, norm and features, and its rates.

        Args:
            hidden_states: [B, T, hidden_size].
            slot: the layer's place in a cache, made ready where it is new; its convolution window is read.
            rows: how padding was closed up, where there was any.
            age: [T], for packed documents the index of each token in its own.

        Returns:
            q and k [B, T, H, K], v [B, T, H, V], gain and ridge as in `falcon_attention`, and the inputs of the
            convolution [B, conv_size - 1 + T, channels], those before the first token included; None without a cache.
        """
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        gain, ridge = self._gain(hidden_states), self._ridge(hidden_states)
        if slot is not None and not slot.is_initialized:
            slot.lazy_initialization(*self._empty(v))
        if slot is not None and slot.state.memory.shape[0] != q.shape[0]:
            raise ValueError(
                f"cache has {slot.state.memory.shape[0]} rows, but the input has {q.shape[0]}; they must be as many, "
                "which cache.batch_repeat_interleave can bring about."
            )
        q, k, v, context = self._convolve(q, k, v, slot, age)
        feature_map = FEATURE_MAPS[self.feature_map]
        return feature_map(q), feature_map(k), v, gain, ridge, context

    def _fuses(self, hidden_states: Tensor, slot: FalconFastWeightCacheLayer | None) -> bool:
        """Whether `_token_inputs` does what `recurrence_inputs` does, and moves the window on and counts the token."""
        if slot is None or not slot.is_initialized or slot.record_past:
            return False
        convolutions = [part for part in (self.q_conv, self.k_conv, self.v_conv) if part is not None]
        return (
            slot.state.memory.shape[0] == hidden_states.shape[0]
            and (slot.conv_window is None or slot.conv_window.is_contiguous())
            and all(type(part.weight) is nn.Parameter for part in convolutions)
            and fuses(hidden_states, self.gain_proj, self.ridge_proj)
        )

    def _token_inputs(
        self, hidden_states: Tensor, slot: FalconFastWeightCacheLayer, rows: Compaction | None, age: None
    ) -> tuple[Tensor | None, ...]:
        """`recurrence_inputs` of one token, in one launch beside the projections."""
        from falcon_kernels.triton_token import token_inputs  # so that nothing here needs triton

        x = hidden_states[:, 0]
        q, k, v = (part[:, 0] for part in project(hidden_states, self.q_proj, self.k_proj, self.v_proj))
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        found = token_inputs(
            x,
            q,
            k,
            v,
            slot.conv_window,
            [None if part is None else part.weight for part in convolutions],
            self.gain_proj(x) if self.rule.per_channel else self.gain_proj.weight,
            self.gain_bias,
            None if self.ridge_proj is None else self.ridge_proj.weight,
            self.ridge_bias,
            None if rows is None else rows.mask[:, 0],
            slot.cumulative_length,
            head_dim=self.head_dim,
            per_channel=self.rule.per_channel,
            norm=self.qk_norm,
            value_norm=self.value_norm,
            feature_map=self.feature_map,
            epsilon=self.norm_epsilon,
            largest_gain=self.largest_gain,
            ridge_scale=self.ridge_scale,
        )
        return *(None if part is None else part[:, None] for part in found), None

    def _gain(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H] or [B, T, H, V] gain in [0, 2], or step size in [0, step_size_max], at least in fp32."""
        gain = self.largest_gain * torch.sigmoid(_wide(self.gain_proj(hidden_states)) + _own_shard(self.gain_bias))
        return gain.unflatten(-1, (-1, self.value_dim)) if self.rule.per_channel else gain

    def _ridge(self, hidden_states: Tensor) -> Tensor | None:
        """[B, T, H] ridge in [0, ridge_scale], at least in fp32."""
        if self.ridge_proj is None:
            return None
        ridge = torch.sigmoid(_wide(self.ridge_proj(hidden_states)) + _own_shard(self.ridge_bias))
        return ridge if self.ridge_scale == 1 else self.ridge_scale * ridge

    def _convolve(
        self, q: Tensor, k: Tensor, v: Tensor, slot, age: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v by head, after their convolutions and norms, and what these read where there is a cache."""
        if self.q_conv is None:
            return *self._norms(q, k, v), None
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        windows, context = [None, None, None], None
        if slot is not None:
            widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
            context = torch.cat([slot.conv_window.to(v.dtype), torch.cat([q, k, v], -1)], 1)
            if q.shape[1] == 1:  # all channels at once, which is fewer operations
                weight = torch.cat([_own_shard(convolution.weight) for convolution in convolutions])
                qkv = F.silu((context * weight.T).sum(1, keepdim=True)).to(v.dtype)
                return *self._norms(*qkv.split(widths, -1)), context
            windows = slot.conv_window.split(widths, -1)
        convolved = (
            convolution(x, window, age) for convolution, x, window in zip(convolutions, (q, k, v), windows, strict=True)
        )
        return *convolved, context

    def _norms(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by head, after their norms."""
        q, k = (normalize(x.unflatten(-1, (-1, self.head_dim)), self.qk_norm, self.norm_epsilon) for x in (q, k))
        return q, k, normalize(v.unflatten(-1, (-1, self.value_dim)), self.value_norm, self.norm_epsilon)

    def _empty(self, v: Tensor) -> tuple[FalconState, Tensor | None]:
        """State and convolution window before any token, for values [B, T, H V]: of the heads that are here."""
        heads = v.shape[-1] // self.value_dim
        state = FalconState.zeros(
            self.rule,
            v.shape[0],
            heads,
            self.head_dim,
            self.value_dim,
            dtype=v.dtype,
            device=v.device,
        )
        return state, self._empty_window(v) if self.conv_size else None

    def _empty_window(self, v: Tensor) -> Tensor:
        channels = v.shape[-1] // self.value_dim * (2 * self.head_dim + self.value_dim)
        return v.new_zeros(v.shape[0], self.conv_size - 1, channels)


def initial_ridge_bias(config: FalconFastWeightConfig) -> Tensor:
    """[H] biases under which the heads forget over geometrically spaced lengths when training begins.

    A memory of n tokens forgets the fraction alpha = 1 / n at each token. With a gain of 1 (its middle) and a
    ridge lambda, alpha = lambda / (E + lambda); with a direct step size eta, alpha = eta lambda. A ridge that
    is scale-coupled is lambda / E. Where a ridge cannot grow enough for the shortest memory, lengths start at
    what it can.
    """
    energy = expected_energy(config)
    unit = energy if config.ridge == "scale_coupled" else 1.0
    largest = 0.9 * config.ridge_scale * unit
    if config.step_size == "gain":
        shortest = max(SHORTEST_MEMORY, (energy + largest) / largest)
    else:
        shortest = max(SHORTEST_MEMORY, 2 / (config.step_size_max * largest))
    longest = max(LONGEST_MEMORY, shortest)
    steps = torch.linspace(0, 1, config.num_attention_heads, dtype=torch.float64, device="cpu")
    alpha = 1 / (shortest * (longest / shortest) ** steps)
    ridge = energy * alpha / (1 - alpha) if config.step_size == "gain" else 2 * alpha / config.step_size_max
    return torch.logit(ridge / (unit * config.ridge_scale)).float()


def expected_energy(config: FalconFastWeightConfig) -> float:
    """Energy of the keys of a head when they are independent and normal before the feature map."""
    size = config.head_dim
    quantiles = (torch.arange(1024, dtype=torch.float64, device="cpu") + 0.5) / 1024
    normal = torch.special.ndtri(quantiles) * (size**-0.5 if config.qk_norm == "l2" else 1.0)
    feature = FEATURE_MAPS[config.feature_map](normal)
    common, varying = size * feature.mean().item() ** 2, size * feature.var(correction=0).item()
    if config.rule == "falcon_3":
        varying *= min(1.0, (1 + math.sqrt(config.window_size / size)) ** 2 / config.window_size)
    return common + varying


FEATURE_MAPS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "elu_plus_one": lambda x: F.elu(x) + 1,
    "softplus": F.softplus,
}


def _own_shard(parameter: Tensor) -> Tensor:
    """The part that is here of a parameter that may be sharded over processes."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of x are made in."""
    kind = x.device.type
    narrowed = x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype


def for_products(x: Tensor) -> Tensor:
    """x as autocast would else cast it for each of several products."""
    return x.to(_product_dtype(x))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _index_in_document(cu_seqlens: Tensor, length: int) -> Tensor:
    """[T] index of each token in its own document."""
    places = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, places, right=True) - 1
    return places - cu_seqlens[document]


class GatedMLP(LlamaMLP):
    """transformers' own, in few launches for a single token, and with less kept for the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.act_fn, SiLUActivation):
            return super().forward(x)
        if not fuses(x):
            return silu_projection(self.gate_proj(x), self.up_proj(x), self.down_proj)
        (y,) = project(gated_product(x, self.gate_proj, self.up_proj), self.down_proj)
        return y


class FalconFastWeightDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: FalconFastWeightConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        if self.layer_type == "linear_attention":
            self.linear_attn = FalconFastWeightAttention(config, layer_idx)
        else:
            attention = Qwen3Attention if config.attention_qk_norm else LlamaAttention
            self.self_attn = attention(config, layer_idx)  # type: ignore[arg-type]
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, attention_mask=None, cu_seqlens: Tensor | None = None, **kwargs) -> Tensor:
        dtype = _product_dtype(hidden_states)
        residual, hidden_states = add_norm(hidden_states, None, self.input_layernorm, dtype)
        if self.layer_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states, attention_mask, kwargs.get(CACHE_NAME), cu_seqlens)
        else:
            hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states, normed = add_norm(residual, hidden_states, self.post_attention_layernorm, dtype)
        return hidden_states + self.mlp(normed)


class FalconFastWeightPreTrainedModel(PreTrainedModel):
    config: FalconFastWeightConfig
    config_class = FalconFastWeightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FalconFastWeightDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values", "cache_params"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": FalconFastWeightDecoderLayer,
        "attentions": [LlamaAttention, Qwen3Attention],
    }

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """As in transformers, but heads that cannot be shared out evenly over the processes are an error."""
        size = 1 if distributed_config is None else distributed_config.tp_size or 1
        names = ["num_attention_heads"]
        names += ["num_key_value_heads"] if "full_attention" in model.config.layer_types else []
        for name in names:
            if (heads := getattr(model.config, name)) % size:
                raise ValueError(f"{name} is {heads}, which {size} processes cannot share; tp_size must divide it.")
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (FalconFastWeightAttention, ShortConvolution)):
            module.reset_parameters()
        if isinstance(module, FalconFastWeightAttention):
            channels = module.config.num_attention_heads * module.value_dim
            init.constant_(module.o_norm.weight, FIRST_SHARE * channels**-0.5)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers guesses from the source, and wrongly here

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """As in transformers, but weights that are missing or that nothing takes are an error.

        Only the head may be new, or be dropped, where the checkpoint is that of a model with another head. Weights are
        taken from safetensors, not from pickles, which can run code.
        """
        kwargs.setdefault("use_safetensors", True)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        same_head = cls.__name__ in (model.config.architectures or [cls.__name__])
        for names, what in ((info["missing_keys"], "lacks"), (info["unexpected_keys"], "has")):
            wrong = sorted(name for name in names if same_head or not _in_head(name))
            if wrong:
                shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
                needed = "needs" if what == "lacks" else "does not know"
                raise ValueError(
                    f"checkpoint {str(pretrained_model_name_or_path)!r} {what} {shown}, which "
                    f"{cls.__name__} with this config {needed}."
                )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, **kwargs) -> None:
        """As in transformers, but an interrupted save leaves an older checkpoint in the folder as it was.

        The code of the model lies beside its weights, see `code_falcon_fast_weight.py`. All files are written beside
        the folder and moved into it when they are complete. With push_to_hub they are published in one commit, with the
        card of the folder where it has one; they are in the folder even if that fails.
        """
        target = Path(save_directory)
        if kwargs.get("distributed_checkpoint"):
            return super().save_pretrained(save_directory, *args, **kwargs)
        target.mkdir(parents=True, exist_ok=True)
        publish = kwargs.pop("push_to_hub", False)
        names = ("repo_id", "private", "commit_message", "create_pr") if publish else ()
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        with tempfile.TemporaryDirectory(prefix=f".{target.resolve().name}-", dir=target.resolve().parent) as written:
            super().save_pretrained(written, *args, **kwargs)
            whole = (Path(written) / "config.json").exists()  # not where another process saves
            if whole:
                carry_code(Path(written))
            try:
                if publish and whole:
                    if (target / "README.md").exists():
                        shutil.copy(target / "README.md", written)
                    self._publish(Path(written), hub.pop("repo_id", target.resolve().name), kwargs.get("token"), **hub)
            finally:
                _move_checkpoint(Path(written), target, kwargs.get("variant"))

    def _publish(self, folder: Path, repo_id: str, token: str | bool | None, private: bool | None = None, **commit):
        repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if not (folder / "README.md").exists():
            create_and_tag_model_card(repo_id, self.model_tags, token=token).save(folder / "README.md")
        self._upload_modified_files(folder, repo_id, {}, token=token, **commit)


def _in_head(name: str) -> bool:
    return name.split(".")[0] in ("lm_head", "score")


def _move_checkpoint(written: Path, target: Path, variant: str | None) -> None:
    """Moves the files of a complete checkpoint into `target` and drops the weights there that it replaces."""
    infix = f".{re.escape(variant)}" if variant else ""
    weights = re.compile(rf"model{infix}(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index{infix}\.json")
    names = {path.name for path in written.iterdir()}
    stale = [path for path in target.iterdir() if weights.fullmatch(path.name) and path.name not in names]
    for name in sorted(names, key=lambda name: (not weights.fullmatch(name), name)):
        if (written / name).is_dir():
            shutil.copytree(written / name, target / name, dirs_exist_ok=True)
        else:
            os.replace(written / name, target / name)
    if any(weights.fullmatch(name) for name in names):
        for path in stale:
            path.unlink()


class FalconFastWeightModel(FalconFastWeightPreTrainedModel):
    """The layers of the language model, from tokens to hidden states."""

    def __init__(self, config: FalconFastWeightConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            FalconFastWeightDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = None
        if "full_attention" in config.layer_types:
            self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        cache_params: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states of each token.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, hidden_size].
            attention_mask: [B, T], or [B, past + T] with a cache: 0 where there is no token, anywhere.
            position_ids: [B, T], for full_attention layers; without mask and cache, one that is not one more than the
                position before it begins a document.
            cache: state to go on from, updated in place; `past_key_values` and `cache_params` are other names for it.
            use_cache: whether to return a cache; by default config.use_cache outside training.
            cu_seq_lens_q: [N + 1] bounds of documents packed into one row.
            seq_idx: [B, T] number of the document that a token belongs to; what marks documents, in this order of
                precedence: cu_seq_lens_q, seq_idx, position_ids.
        """
        cache = _one_cache(cache=cache, past_key_values=past_key_values, cache_params=cache_params)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds are both given or both missing; give one of them.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        length = inputs_embeds.shape[1]
        checkpointing = self.gradient_checkpointing and self.training
        if cache is not None and checkpointing and (torch.is_grad_enabled() or CACHE_NAME != "cache"):
            raise ValueError("cache is given, but gradient checkpointing is on; call model.eval() or turn it off.")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training

        given = (kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"), position_ids)
        cu_seqlens = _document_bounds(*given, attention_mask, cache, inputs_embeds)
        if cu_seqlens is not None:
            use_cache = False
            if position_ids is None:
                position_ids = _index_in_document(cu_seqlens, inputs_embeds.shape[0] * length).view(-1, length)
        if use_cache and cache is None and not checkpointing:
            cache = falcon_cache(self.config)
        if cache is not None:
            fit_cache(cache, self.config)
        position_embeddings = None
        if self.rotary_emb is not None:
            if position_ids is None:
                past = 0 if cache is None else cache.get_seq_length()
                position_ids = torch.arange(length, device=inputs_embeds.device)[None] + past
            position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        masks = attention_mask
        if not isinstance(masks, dict):
            masks = _masks_by_layer_type(self.config, inputs_embeds, attention_mask, cache, position_ids)
        rows = _padding(masks.get("linear_attention"), inputs_embeds)
        if rows is not None:
            tokens = masks["linear_attention"].bool()[..., None]
            inputs_embeds = torch.where(tokens, inputs_embeds, 0)

        hidden_states = inputs_embeds
        for layer in islice(self.layers, self.config.num_hidden_layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=rows if layer.layer_type == "linear_attention" else masks["full_attention"],
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                **{CACHE_NAME: cache},
                **kwargs,
            )
        state: dict[str, Any] = {CACHE_NAME: cache}
        _, hidden_states = add_norm(hidden_states, None, self.norm)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **state)


CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def _one_cache(**named: Cache | None) -> Cache | None:
    """The cache among its names, of which several may be given if they give the same one."""
    given = [(name, cache) for name, cache in named.items() if cache is not None]
    for name, cache in given[1:]:
        if cache is not given[0][1]:
            raise ValueError(f"{given[0][0]} and {name} are both given and differ; they are names of one argument.")
    return given[0][1] if given else None


def _masks_by_layer_type(config, inputs_embeds, attention_mask, cache, position_ids) -> dict[str, Tensor | None]:
    """[B, T] mask of the present tokens for fast-weight layers, a causal mask for attention layers."""
    length = inputs_embeds.shape[1]
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] < length):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [B, T], or "
            f"[B, past + T] with a cache, for T = {length}."
        )
    masks = {"linear_attention": None if attention_mask is None else attention_mask[:, -length:]}
    if "full_attention" in config.layer_types:
        masks["full_attention"] = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            layer_idx=config.layer_types.index("full_attention"),
            **{CACHE_NAME: cache},
        )
    return masks


def _padding(mask: Tensor | None, inputs_embeds: Tensor) -> Compaction | None:
    """How to close up the padding; None where there is known to be none. The host reads CPU tensors only."""
    if mask is None or (mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())):
        return None
    return compaction(mask.to(inputs_embeds.device))


def _document_bounds(cu_seq_lens, seq_idx, position_ids, attention_mask, cache, inputs_embeds) -> Tensor | None:
    """[N + 1] bounds of packed documents, as the collators of transformers and TRL send them, or None."""
    batch, length = inputs_embeds.shape[:2]
    if cu_seq_lens is not None:
        if batch != 1 or attention_mask is not None or cache is not None:
            raise ValueError(
                f"cu_seq_lens_q is given for batch size {batch}, or with attention_mask or cache; packed "
                "documents lie in one row without either."
            )
        return cu_seq_lens
    if seq_idx is not None and (attention_mask is not None or cache is not None):
        raise ValueError("seq_idx is given with attention_mask or cache; packed documents have neither.")
    if seq_idx is None and (position_ids is None or attention_mask is not None or cache is not None):
        return None
    numbers, step = (position_ids, 1) if seq_idx is None else (seq_idx, 0)
    first = F.pad(numbers.diff(dim=-1) != step, (1, 0), value=True).expand(batch, -1)
    starts = first.flatten().nonzero()[:, 0]
    if starts.shape[0] == batch:
        return None
    return torch.cat([starts, starts.new_tensor([batch * length])])


FEWEST_TOKENS = 128  # for which a head's weight is worth a copy


class Head(nn.Linear):
    """To logits.

    On a GPU, kernels are slow for rows of 16-bit numbers that do not end at a whole 16 bytes. The weight of such a
    vocabulary is made up with rows of zeros, where there are enough tokens to be worth its copy.
    """

    def forward(self, x: Tensor) -> Tensor:
        missing = missing_rows(self.weight, x)
        if not missing:
            return super().forward(x)
        return F.linear(x, F.pad(self.weight, (0, 0, 0, missing)))[..., :-missing].contiguous()


def missing_rows(weight: Tensor, x: Tensor) -> int:
    """How many rows a head's weight should have in addition for inputs x."""
    slow = x.device.type == "cuda" and _product_dtype(x).itemsize == 2 and type(weight) is nn.Parameter
    return -weight.shape[0] % 8 if slow and x.shape[:-1].numel() >= FEWEST_TOKENS else 0


class FalconFastWeightForCausalLM(FalconFastWeightPreTrainedModel, GenerationMixin):
    """The language model: hidden states and a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    fused_loss: Callable[..., Tensor] | None = None  # head and loss together, see falcon_hf.fused_loss
    generate_on_device = staticmethod(generate_on_device)

    def __init__(self, config: FalconFastWeightConfig):
        super().__init__(config)
        self.model = FalconFastWeightModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        cache_params: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at each place, and the loss where labels are given.

        Args:
            labels: [B, T], the tokens themselves (shifted in here), -100 where there is nothing to learn.
            logits_to_keep: places to compute logits for: the last so many, indices [P] or [B, P], or a mask.
            others: as in `FalconFastWeightModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_cache(cache=cache, past_key_values=past_key_values, cache_params=cache_params),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = _kept(outputs.last_hidden_state, logits_to_keep)
        logits, loss = None, None
        if self.fused_loss is not None and self.training and labels is not None:
            loss = self.fused_loss(kept, self.lm_head, labels=labels, **kwargs)
        else:
            logits = self.lm_head(kept)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        given = _one_cache(**{name: model_kwargs.pop(name, None) for name in CACHE_NAMES})
        if given is not None:
            model_kwargs[CACHE_NAME] = given
        if generation_config.cache_implementation == "quantized":
            raise ValueError(
                "cache_implementation is 'quantized', but a fast-weight memory is kept as it is; it must be 'dynamic', "
                "'static', 'offloaded' or 'offloaded_static'."
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if isinstance(model_kwargs.get(CACHE_NAME), Cache):
            fit_cache(model_kwargs[CACHE_NAME], self.config)
        if isinstance(given, Cache):
            mask = model_kwargs.get("attention_mask")  # 5.24 drops one without padding and notes its length
            length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
            read = given.get_seq_length()
            if length is not None and length <= read:
                raise ValueError(
                    f"attention_mask, by default that of input_ids, is for {length} tokens, but cache has read {read}; "
                    "it must be for those and at least one more."
                )

    def _extract_generation_mode_kwargs(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        """As in transformers, which keeps these from a callable custom_generate, even from one that takes them."""
        given = {"assistant_model": assistant_model, "streamer": streamer, "tokenizer": kwargs.get("tokenizer")}
        options = (custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        found = super()._extract_generation_mode_kwargs(*options)  # type: ignore[misc]
        if callable(custom_generate):
            taken = inspect.signature(custom_generate).parameters
            found |= {name: value for name, value in given.items() if name in taken and value is not None}
        return found

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **kwargs,
    ):
        """As in transformers; on CUDA each token is one replay of a graph, where `generate_on_device` does the call."""
        options = (logits_processor, stopping_criteria, generation_config)
        on_device = not synced_gpus and worth_a_graph(self, input_ids, stopping_criteria)
        if on_device and refusal(self, *options, None, kwargs) is None:
            return generate_on_device(self, input_ids, *options, streamer=streamer, tokens_per_replay=1, **kwargs)
        return super()._sample(input_ids, *options, synced_gpus=synced_gpus, streamer=streamer, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, input_ids, *args, **kwargs):
        """As in transformers, which reads all of input_ids at first, but without what a given cache has read."""
        cache = kwargs.get(CACHE_NAME)
        read = 0 if cache is None else cache.get_seq_length()
        if read > 0:
            mask = kwargs.get("attention_mask")
            length = getattr(kwargs["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
            if length not in (None, input_ids.shape[1]):
                raise ValueError(
                    f"input_ids has {input_ids.shape[1]} of {length} tokens; assisted decoding from a cache takes all "
                    "of them, those that the cache has read included."
                )
            cache.tokens_to_skip = read
        return super()._assisted_decoding(input_ids, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, is_first_iteration=False, inputs_embeds=None, **kwargs
    ):
        """As in transformers, for a first pass of assisted decoding too that goes on from a given cache.

        After the first pass of a text all tokens are real, so that fast-weight layers need no mask.
        """
        cache = kwargs.get(CACHE_NAME)
        only_fast_weights = "full_attention" not in self.config.layer_types
        if only_fast_weights and cache is not None and next_sequence_length is not None and not is_first_iteration:
            for name in ("attention_mask", "position_ids", "labels"):
                kwargs.pop(name, None)
            return {"input_ids": input_ids[:, -next_sequence_length:].contiguous(), **kwargs}
        if is_first_iteration and getattr(cache, "tokens_to_skip", 0):
            next_sequence_length = input_ids.shape[1] - cache.tokens_to_skip
            cache.tokens_to_skip = 0
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            is_first_iteration=is_first_iteration,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: continuous batching keeps pages of keys and values."""
        raise ValueError(
            f"{type(self).__name__} has memories of one size and no pages of keys and values, as continuous batching "
            "needs; use generate, with prompts of unequal length padded on the left."
        )

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, cache=None, past_key_values=None, position_ids=None, **kwargs
    ):
        """The masks of a forward pass by layer type; unlike in transformers, a single token keeps its own."""
        cache = _one_cache(cache=cache, past_key_values=past_key_values)
        return _masks_by_layer_type(config, inputs_embeds, attention_mask, cache, position_ids)


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], 1)


class _Classifier(FalconFastWeightPreTrainedModel):
    """What transformers' classifiers are built on: they ask AutoModel for the layers."""

    def __init__(self, config: FalconFastWeightConfig):
        AutoModel.register(type(config), FalconFastWeightModel, exist_ok=True)
        super().__init__(config)


class FalconFastWeightForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """The layers with a linear classifier on the last token."""


class FalconFastWeightForTokenClassification(GenericForTokenClassification, _Classifier):
    """The layers with a linear classifier on every token."""


# By these names Trainer knows whose labels it has to shift when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FalconFastWeightConfig.model_type] = FalconFastWeightForCausalLM.__name__

__all__ = [
    "FalconFastWeightAttention",
    "FalconFastWeightForCausalLM",
    "FalconFastWeightForSequenceClassification",
    "FalconFastWeightForTokenClassification",
    "FalconFastWeightModel",
    "FalconFastWeightPreTrainedModel",
]
