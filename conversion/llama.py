"""Llama, Mistral, Qwen and SmolLM as Falcon models, all layers or some of them.

The fast-weight layers take the projections of the attention that stood in their place, which makes them a start for
training and not the same function. Layers that are kept as attention compute what they did, so that a model with all of
its layers kept has the logits of its source.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from falcon_hf import FalconFastWeightConfig

from .falcon import TIED, TIED_WHY, TOKEN_IDS, complete, config_json, falcon_config, rates, read_config
from .plan import ConversionError, Piece, Plan, check_source, copied, filled

KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def to_falcon(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    keep_attention: Collection[int] | Callable[[int], Collection[int]] = (),
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Plan:
    """A Transformer as a Falcon model.

    Queries, keys, values and outputs keep their projections, key and value heads that several query heads share are
    repeated, rotations fall away. Gain and ridge begin as in a new model, the norm of the output with weight 1. There
    are no short convolutions, since the SiLU behind them is not the identity; with `conv_size` in `fields` they begin
    with weight 1 at the token itself.

    Args:
        config: its config.json.
        tensors: name, shape and dtype of its tensors.
        keep_attention: numbers of the layers that stay attention, from 0, or a function from their count to those.
        fields: of the Falcon config, beyond what follows from the source: `rule` and its options.
        seed: of what is drawn at random.

    Raises:
        ConversionError: where its tensors are not those of its config, or where kept layers would be another function.
    """
    kind = config["model_type"]
    source = read_config(CONFIG_MAPPING[kind], config)
    kept = set(keep_attention(source.num_hidden_layers) if callable(keep_attention) else keep_attention)
    beyond = sorted(kept - set(range(source.num_hidden_layers)))
    problems = [f"layer {i} is to be kept, but there are {source.num_hidden_layers}." for i in beyond]
    if getattr(source, "mlp_bias", False):
        problems.append("mlp_bias is True; the MLP of a converted model has no bias.")
    if not problems:
        problems = _why_not_kept(source, kept)
    if problems:
        raise ConversionError(problems)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source)
    tied = bool(source.tie_word_embeddings)
    needed = {n: tuple(w.shape) for n, w in model.state_dict().items() if not (tied and n == TIED)}
    check_source(tensors, needed, kind, known=[TIED] if tied else [])

    heads, kv_heads = source.num_attention_heads, source.num_key_value_heads or source.num_attention_heads
    size = getattr(source, "head_dim", None) or source.hidden_size // heads
    biased = "model.layers.0.self_attn.q_proj.bias" in needed
    follows: dict[str, Any] = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": source.hidden_act,
        "rms_norm_eps": source.rms_norm_eps,
        "initializer_range": source.initializer_range,
        "max_position_embeddings": source.max_position_embeddings,
        "rope_parameters": dict(source.rope_parameters),
        "attention_bias": biased and bool(kept),
        "attention_qk_norm": kind == "qwen3" and bool(kept),
        "tie_word_embeddings": tied,
        "layer_types": ["full_attention" if i in kept else "linear_attention" for i in range(source.num_hidden_layers)],
        **{name: getattr(source, name) for name in TOKEN_IDS},
    }
    problems = [f"{name} follows from the source and cannot be set." for name in follows.keys() & (fields or {}).keys()]
    if problems:
        raise ConversionError(sorted(problems))
    new = falcon_config({**follows, "conv_size": 0, **(fields or {})})
    dtype = tensors["model.embed_tokens.weight"].dtype
    plan = Plan(config_json(new, dtype), [])
    for name in needed:
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if ".self_attn." not in name or layer in kept:
            plan.pieces.append(copied(name, name))
        elif name.endswith(("_norm.weight", ".bias")):
            plan.left[name] = "a fast-weight layer has none"
        else:
            plan.pieces.append(_projection(name, heads // kv_heads, size))
    if tied and TIED in tensors:
        plan.left[TIED] = TIED_WHY
    for i in range(source.num_hidden_layers):
        if i not in kept:
            prefix = f"model.layers.{i}.linear_attn"
            plan.pieces += rates(new, prefix, dtype, seed)
            plan.pieces.append(filled(f"{prefix}.o_norm.weight", (new.value_head_dim,), 1.0, dtype))
            plan.pieces += _convolutions(new, prefix, dtype)
        elif new.attention_bias and f"model.layers.{i}.self_attn.o_proj.bias" not in needed:
            plan.pieces.append(filled(f"model.layers.{i}.self_attn.o_proj.bias", (source.hidden_size,), 0.0, dtype))
    if len(kept) < source.num_hidden_layers:
        count = source.num_hidden_layers - len(kept)
        plan.lost.append(
            f"{count} of {source.num_hidden_layers} layers of attention are fast weights, not yet trained."
        )
        if new.conv_size:
            plan.lost.append("The SiLU behind the short convolutions changes queries, keys and values.")
        if any(why == "a fast-weight layer has none" for why in plan.left.values()):
            plan.lost.append("Biases, or norms with a weight, of queries, keys and values are left in those layers.")
    return complete(plan, new, tensors)


def _why_not_kept(source, kept: set[int]) -> list[str]:
    """Why layers that are to stay attention would not be the same in a Falcon model, a sentence each."""
    problems = []
    types = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
    if source.model_type == "mistral" and source.sliding_window is not None:
        types = ["sliding_attention"] * source.num_hidden_layers
    for i in sorted(kept):
        if types[i] != "full_attention":
            problems.append(f"layer {i} is {types[i]}; only full_attention can be kept.")
        if source.model_type == "smollm3" and not source.no_rope_layers[i]:
            problems.append(f"layer {i} does not rotate queries and keys, as attention layers of Falcon do.")
    return problems


def _projection(name: str, times: int, size: int) -> Piece:
    target = name.replace(".self_attn.", ".linear_attn.")
    if times == 1 or ".q_proj." in name or ".o_proj." in name:
        return copied(target, name)

    def repeat(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, size)).repeat_interleave(times, 0).flatten(0, 1)

    return Piece(target, (name,), repeat, f"each head {times} times")


def _convolutions(config: FalconFastWeightConfig, prefix: str, dtype: torch.dtype) -> list[Piece]:
    """Convolutions that begin as the identity, but for the SiLU behind them."""

    def make(part: str, width: int) -> Piece:
        def identity() -> Tensor:
            weight = torch.zeros(config.num_attention_heads * width, config.conv_size, dtype=dtype)
            weight[:, -1] = 1
            return weight

        return Piece(f"{prefix}.{part}_conv.weight", (), identity, "1 at the token itself, 0 before")

    widths = {"q": config.head_dim, "k": config.head_dim, "v": config.value_head_dim}
    return [make(part, width) for part, width in widths.items()] if config.conv_size else []
