"""Checkpoints of flash-linear-attention: DeltaNet as Falcon-1 and linear attention as Falcon-1A, and back.

DeltaNet writes S_t = S_{t-1} + β_t k_t (v_t − S_{t-1}ᵀ k_t)ᵀ and reads K^(−1/2) S_tᵀ q_t, with ℓ2-normalized keys and
queries: Falcon-1 with `alignment="same_step"`, `step_size="direct"`, no ridge, ℓ2 norms and `read_scale` K^(−1/2).
Linear attention writes k_t v_tᵀ: Falcon-1A with a step size of 1. RetNet and Gated DeltaNet are other functions; what
they lose on the way is said, and they are taken as a start for training only where `nearest` asks for it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from falcon_hf import FalconFastWeightConfig

from .falcon import KIND, TIED, TIED_WHY, TOKEN_IDS, complete, config_json, falcon_config, falcon_shapes
from .plan import ConversionError, Piece, Plan, check_source, filled

ALWAYS_ONE = 40.0  # its sigmoid is exactly 1 in every dtype
L2_EPSILON = 1e-6  # of flash-linear-attention's norm of queries and keys, whatever the config says
FEATURE_MAPS = {"identity": "identity", "relu": "relu", "elu": "elu_plus_one"}
REASONS = {
    "gla": "its decay is one number per key channel, and a Falcon memory has one per head or per value channel.",
    "mamba2": "its blocks have no MLP, and its output has a term that skips the memory.",
    "rwkv7": "its decay is one number per key channel, and its removal key is another than its write key.",
    "kda": "its decay is one number per key channel, and a Falcon memory has one per head or per value channel.",
    "gated_deltaproduct": "it takes several steps at each token, each with a key of its own.",
}


@dataclass(frozen=True)
class Row:
    """One tensor of a layer: its name and shape there, its name here, and how the one becomes the other."""

    theirs: str
    shape: tuple[int, ...]
    ours: str
    forward: Callable[[Tensor], Tensor] = lambda tensor: tensor
    backward: Callable[[Tensor], Tensor] = lambda tensor: tensor
    how: str = "as it is"


class Constant(NamedTuple):
    """A tensor that is one number everywhere."""

    shape: tuple[int, ...]
    value: float


class Computed(NamedTuple):
    """A tensor that is made from others of its layer, or from none."""

    sources: tuple[str, ...]
    make: Callable[..., Tensor]
    how: str


@dataclass
class Layers:
    """The mixers of one kind of model.

    Args:
        rows: the tensors of a mixer that are taken.
        fields: of the Falcon config.
        made: tensors of a Falcon mixer that none of theirs becomes.
        left: shape of each tensor that no row takes, and why.
        other: why this is another function that no option makes the same, a sentence each.
        lost: the same, where the rest is of use as a start for training.
    """

    rows: list[Row]
    fields: dict[str, Any]
    made: dict[str, Constant | Computed]
    left: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def to_falcon(config: Mapping[str, Any], tensors: Mapping[str, Tensor], nearest: bool = False) -> Plan:
    """A model of flash-linear-attention as a Falcon model.

    Args:
        config: its config.json.
        tensors: name, shape and dtype of its tensors.
        nearest: whether to take as a start for training what is another function.

    Raises:
        ConversionError: where it is another function, and why; where its tensors are not those of its config.
    """
    kind = config["model_type"]
    if kind not in KINDS:
        raise ConversionError([f"model_type is {kind}: {REASONS[kind]}"])
    model = {**DEFAULTS, **KIND_DEFAULTS[kind], **config}
    layers = KINDS[kind](model)
    attention, problems = _attention_layers(model, layers.fields)
    problems += layers.other
    if model["hidden_act"] != "swish":
        problems.append(f"hidden_act is {model['hidden_act']}; the MLP of a converted model must have swish.")
    if model["attnres_block_size"] is not None:
        problems.append("attnres_block_size is set: its layers see the outputs of all earlier blocks.")
    if layers.lost and not nearest:
        problems += [f"{sentence} With nearest it is taken as a start for training." for sentence in layers.lost]
    if problems:
        raise ConversionError(problems)

    types = ["full_attention" if i in attention else "linear_attention" for i in range(model["num_hidden_layers"])]
    attention_rows = _attention_rows(model, attention)
    needed, pieces, left = {}, [], {}
    for i, layer_type in enumerate(types):
        rows = layers.rows if layer_type == "linear_attention" else attention_rows
        for row in [*rows, *_block_rows(model)]:
            theirs, ours = f"model.layers.{i}.{row.theirs}", f"model.layers.{i}.{row.ours}"
            needed[theirs] = row.shape
            pieces.append(Piece(ours, (theirs,), row.forward, row.how))
        if layer_type == "linear_attention":
            for name, (shape, why) in layers.left.items():
                needed[f"model.layers.{i}.{name}"] = shape
                left[f"model.layers.{i}.{name}"] = why
    for row in _outer_rows(model):
        needed[row.theirs] = row.shape
        pieces.append(Piece(row.ours, (row.theirs,), row.forward, row.how))
    tied = bool(model["tie_word_embeddings"])
    check_source(tensors, needed, kind, known=[TIED] if tied else [])
    if tied and TIED in tensors:
        left[TIED] = TIED_WHY

    dtype = tensors["model.embeddings.weight"].dtype
    for i, layer_type in enumerate(types):
        if layer_type == "linear_attention":
            pieces += [_made(f"model.layers.{i}.", name, made, dtype) for name, made in layers.made.items()]
    fields = {
        "vocab_size": model["vocab_size"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": _intermediate_size(model),
        "num_hidden_layers": model["num_hidden_layers"],
        "num_attention_heads": model["num_heads"],
        "rms_norm_eps": model["norm_eps"],
        "layer_types": types,
        "max_position_embeddings": model["max_position_embeddings"],
        "initializer_range": model["initializer_range"],
        "tie_word_embeddings": tied,
        "epsilon": 0.0,
        **{name: model[name] for name in TOKEN_IDS},
        **layers.fields,
    }
    if attention:
        fields["num_key_value_heads"] = attention_rows[1].shape[0] // fields["head_dim"]
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": next(iter(attention.values()))["rope_theta"]}
    made_config = falcon_config(fields)
    plan = Plan(config_json(made_config, dtype), pieces, left, layers.lost)
    return complete(plan, made_config, tensors)


def from_falcon(config: FalconFastWeightConfig, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor]) -> Plan:
    """A Falcon-1 model that is a DeltaNet, or a Falcon-1A model that is linear attention, in FLA's layout.

    Args:
        config: its config.
        tensors: name, shape and dtype of its tensors.
        load: gives a tensor by its name; biases of the gain and convolutions of one token are looked at.

    Raises:
        ConversionError: where it is another function, a sentence for each option or tensor.
    """
    kind = {"falcon_1": "delta_net", "falcon_1a": "linear_attn"}.get(config.rule)
    if kind is None:
        raise ConversionError([f"rule is {config.rule}; flash-linear-attention has falcon_1 and falcon_1a only."])
    check_source(tensors, falcon_shapes(config), KIND, [TIED] if config.tie_word_embeddings else [])
    model = _fla_config(config, kind, tensors, load)
    layers = KINDS[kind](model)
    attention, problems = _attention_layers(model, layers.fields)
    problems += layers.other + layers.lost
    wanted = {**layers.fields, "timing": "read_after_write", "value_norm": "none", "normalized_read": False}
    for name, value in wanted.items():
        have = getattr(config, name)
        if have != value and not (name == "read_scale" and math.isclose(have, value)):
            problems.append(f"{name} is {have}; a {kind} model with these heads has {value}.")
    if kind == "delta_net" and config.epsilon > (0 if config.step_size_max == 2 else 0.5):
        problems.append(f"epsilon is {config.epsilon}; it must be 0, so that no step size is cut.")
    if attention and config.attention_qk_norm:
        problems.append("attention_qk_norm is True; it must be False for flash-linear-attention.")
    if config.hidden_act not in ("silu", "swish"):
        problems.append(f"hidden_act is {config.hidden_act}; it must be silu.")
    if attention and config.rope_parameters["rope_type"] != "default":
        problems.append("rope_parameters are not the default ones, which are all that flash-linear-attention has.")
    if problems:
        raise ConversionError(problems)

    plan = Plan({**model, "dtype": str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")}, [])
    attention_rows = _attention_rows(model, attention)
    for i, layer_type in enumerate(config.layer_types):
        rows = layers.rows if layer_type == "linear_attention" else attention_rows
        for row in [*rows, *_block_rows(model)]:
            theirs, ours = f"model.layers.{i}.{row.theirs}", f"model.layers.{i}.{row.ours}"
            plan.pieces.append(Piece(theirs, (ours,), row.backward, row.how))
        if layer_type == "linear_attention":
            for name, (_, value) in layers.made.items():
                ours = f"model.layers.{i}.{name}"
                plan.left[ours] = f"{value:g} everywhere, as in every {kind} model"
                plan.conditions[ours] = (
                    f"{value:g} everywhere for a {kind} model",
                    lambda tensor, value=value: bool((tensor == value).all()),
                )
    plan.pieces += [Piece(row.theirs, (row.ours,), row.backward, row.how) for row in _outer_rows(model)]
    if TIED in tensors and config.tie_word_embeddings:
        plan.left[TIED] = TIED_WHY
    return plan


def _fla_config(
    config: FalconFastWeightConfig, kind: str, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor]
) -> dict[str, Any]:
    """The config.json of flash-linear-attention that is nearest to a Falcon config."""
    fast = [i for i, layer_type in enumerate(config.layer_types) if layer_type == "linear_attention"]
    attention = [i for i in range(config.num_hidden_layers) if i not in fast]

    def everywhere(name: str, value: float) -> bool:
        names = [f"model.layers.{i}.linear_attn.{name}" for i in fast]
        return bool(names) and all(name in tensors and bool((load(name) == value).all()) for name in names)

    model = {
        **DEFAULTS,
        **KIND_DEFAULTS[kind],
        "architectures": ["DeltaNetForCausalLM" if kind == "delta_net" else "LinearAttentionForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "expand_k": config.num_attention_heads * config.head_dim / config.hidden_size,
        "expand_v": config.num_attention_heads * config.value_head_dim / config.hidden_size,
        "norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKEN_IDS},
    }
    if attention:
        model["attn"] = {
            "layers": attention,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "qkv_bias": config.attention_bias,
            "rope_theta": config.rope_parameters["rope_theta"],
        }
    if kind == "delta_net":
        silu_alone = config.conv_size == 1 and everywhere("q_conv.weight", 1)
        model |= {
            "use_gate": config.output_gate,
            "use_beta": not everywhere("gain_bias", ALWAYS_ONE),
            "use_short_conv": not silu_alone,
            "conv_size": 4 if silu_alone or not config.conv_size else config.conv_size,
            "allow_neg_eigval": config.step_size_max == 2,
        }
    else:
        maps = {ours: theirs for theirs, ours in FEATURE_MAPS.items()}
        model["feature_map"] = maps.get(config.feature_map, config.feature_map)
    return model


def _delta_net(model: Mapping[str, Any]) -> Layers:
    heads, size = model["num_heads"], model["hidden_size"]
    key, value = round(size * model["expand_k"]) // heads, round(size * model["expand_v"]) // heads
    layers = _projections(size, heads, heads, key, value)
    layers.fields |= {
        "rule": "falcon_1",
        "ridge": "none",
        "qk_norm": "l2",
        "step_size_max": 2.0 if model["allow_neg_eigval"] else 1.0,
        "output_gate": bool(model["use_gate"]),
    }
    _norm(layers, "attn.o_norm.weight", value)
    _convolutions(layers, model)
    if model["use_gate"]:
        layers.rows.append(Row("attn.g_proj.weight", (heads * value, size), "linear_attn.g_proj.weight"))
    if model["use_beta"]:
        layers.rows.append(Row("attn.b_proj.weight", (heads, size), "linear_attn.gain_proj.weight"))
        layers.made["linear_attn.gain_bias"] = Constant((heads,), 0.0)
    else:
        _constant_step(layers, heads, size)
    if model["qk_activation"] != "silu":
        layers.other.append(
            f"qk_activation is {model['qk_activation']}: it stands before the norm, and convolutions here have SiLU."
        )
    if model["qk_norm"] != "l2":
        layers.other.append(f"qk_norm is {model['qk_norm']}; here it is l2.")
    _same_epsilon(layers, model)
    return layers


def _linear_attention(model: Mapping[str, Any]) -> Layers:
    heads, size = model["num_heads"], model["hidden_size"]
    key, value = round(size * model["expand_k"]) // heads, round(size * model["expand_v"]) // heads
    layers = _projections(size, heads, model["num_kv_heads"] or heads, key, value)
    layers.fields |= {
        "rule": "falcon_1a",
        "ridge": "none",
        "qk_norm": "none",
        "feature_map": FEATURE_MAPS.get(model["feature_map"], "identity"),
        "step_size_max": 1.0,
        "conv_size": 0,
        "output_gate": False,
    }
    _constant_step(layers, heads, size)
    if model["elementwise_affine"]:
        _norm(layers, "attn.norm.weight", value)
    else:
        layers.made["linear_attn.o_norm.weight"] = Constant((value,), 1.0)
    if model["feature_map"] not in FEATURE_MAPS:
        layers.other.append(f"feature_map is {model['feature_map']}; it must be {', '.join(FEATURE_MAPS)}.")
    for name in ("norm_q", "norm_k", "norm_feature_map"):
        if model[name]:
            layers.other.append(f"{name} is True: it divides by a sum with an ε that is not ours.")
    return layers


def _retnet(model: Mapping[str, Any]) -> Layers:
    heads, size = model["num_heads"], model["hidden_size"]
    key, value = round(size * model["expand_k"]) // heads, round(size * model["expand_v"]) // heads
    layers = _projections(size, heads, model["num_kv_heads"] or heads, key, value)
    gated = model["use_output_gate"]
    layers.fields |= {
        "rule": "falcon_1a",
        "ridge": "direct",
        "qk_norm": "none",
        "step_size_max": 1.0,
        "conv_size": 0,
        "output_gate": gated,
    }
    if gated:
        layers.rows.append(Row("attn.g_proj.weight", (heads * value, size), "linear_attn.g_proj.weight"))
    _norm(layers, f"attn.g_norm{'_swish_gate' if gated and model['fuse_norm'] else ''}.weight", value)
    _constant_step(layers, heads, size)
    layers.made["linear_attn.ridge_proj.weight"] = Constant((heads, size), 0.0)
    fading = 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64, device="cpu"))
    layers.made["linear_attn.ridge_bias"] = Computed((), lambda: torch.logit(fading), "the fixed decays of its heads")
    if model["feature_map"] is not None:
        layers.other.append(f"feature_map is {model['feature_map']}; it must be null.")
    layers.lost.append("RetNet rotates queries and keys by their positions, which no Falcon rule does.")
    return layers


def _gated_delta_net(model: Mapping[str, Any]) -> Layers:
    heads, size, key = model["num_heads"], model["hidden_size"], model["head_dim"]
    value, gated = int(key * model["expand_v"]), model["use_gate"]
    layers = _projections(size, heads, heads, key, value)
    largest = 2.0 if model["allow_neg_eigval"] else 1.0
    layers.fields |= {
        "rule": "falcon_1",
        "ridge": "direct",
        "ridge_scale": 2 / largest,
        "qk_norm": "l2",
        "step_size_max": largest,
        "output_gate": gated,
    }
    _norm(layers, "attn.o_norm.weight", value)
    _convolutions(layers, model)
    if gated:
        layers.rows.append(Row("attn.g_proj.weight", (heads * value, size), "linear_attn.g_proj.weight"))
    layers.rows.append(Row("attn.b_proj.weight", (heads, size), "linear_attn.gain_proj.weight"))
    layers.made["linear_attn.gain_bias"] = Constant((heads,), 0.0)
    layers.made["linear_attn.ridge_proj.weight"] = Constant((heads, size), 0.0)
    layers.made["linear_attn.ridge_bias"] = Computed(
        ("attn.A_log", "attn.dt_bias"),
        _ridge_of_gate,
        "the decay of its gate where the input is 0",
    )
    layers.left["attn.a_proj.weight"] = ((heads, size), "the gate follows the input, a ridge follows the step size")
    layers.left |= {name: ((heads,), "") for name in ("attn.A_log", "attn.dt_bias")}
    if model["num_v_heads"] not in (None, heads):
        layers.other.append(f"num_v_heads is {model['num_v_heads']}; it must be num_heads, {heads}.")
    if model["output_gate_activation"] not in ("swish", "silu"):
        layers.other.append(f"output_gate_activation is {model['output_gate_activation']}; it must be swish.")
    layers.lost.append(
        "Gated DeltaNet decays its memory by a gate of its own before each step, where Falcon-1 ties the decay to the "
        "step size and takes the residual before it."
    )
    _same_epsilon(layers, model)
    return layers


KINDS: dict[str, Callable[[Mapping[str, Any]], Layers]] = {
    "delta_net": _delta_net,
    "linear_attn": _linear_attention,
    "retnet": _retnet,
    "gated_deltanet": _gated_delta_net,
}

DEFAULTS: dict[str, Any] = {  # of flash-linear-attention 0.6, for what a config.json leaves out
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "attn": None,
    "attnres_block_size": None,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "vocab_size": 32000,
}
KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "delta_net": {
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_gate": False,
        "use_beta": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "qk_norm": "l2",
        "qk_activation": "silu",
    },
    "linear_attn": {
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "feature_map": "elementwise_product",
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
        "elementwise_affine": True,
    },
    "retnet": {
        "num_heads": 8,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "hidden_ratio": 2,
        "feature_map": None,
        "use_output_gate": True,
        "fuse_norm": True,
    },
    "gated_deltanet": {
        "num_heads": 6,
        "num_v_heads": None,
        "head_dim": 256,
        "expand_v": 2.0,
        "use_gate": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "num_hidden_layers": 21,
        "output_gate_activation": "swish",
    },
}


def _projections(size: int, heads: int, kv_heads: int, key: int, value: int) -> Layers:
    def repeated(width: int) -> dict[str, Any]:
        if kv_heads == heads:
            return {}
        times = heads // kv_heads
        return {
            "forward": lambda weight: weight.unflatten(0, (kv_heads, width)).repeat_interleave(times, 0).flatten(0, 1),
            "how": f"each head {times} times",
        }

    rows = [
        Row("attn.q_proj.weight", (heads * key, size), "linear_attn.q_proj.weight"),
        Row("attn.k_proj.weight", (kv_heads * key, size), "linear_attn.k_proj.weight", **repeated(key)),
        Row("attn.v_proj.weight", (kv_heads * value, size), "linear_attn.v_proj.weight", **repeated(value)),
        Row("attn.o_proj.weight", (size, heads * value), "linear_attn.o_proj.weight"),
    ]
    fields = {
        "alignment": "same_step",
        "step_size": "direct",
        "feature_map": "identity",
        "head_dim": key,
        "value_head_dim": value,
        "read_scale": key**-0.5,
    }
    return Layers(rows, fields, {})


def _norm(layers: Layers, name: str, value: int) -> None:
    layers.rows.append(Row(name, (value,), "linear_attn.o_norm.weight"))


def _convolutions(layers: Layers, model: Mapping[str, Any]) -> None:
    """Short convolutions with SiLU, or SiLU alone, which is a convolution of one token with weight 1."""
    layers.fields["conv_size"] = model["conv_size"] if model["use_short_conv"] else 1
    for part, row in zip("qkv", layers.rows[:3], strict=True):
        channels = row.shape[0]
        if model["use_short_conv"]:
            shape = (channels, 1, model["conv_size"])
            layers.rows.append(
                Row(
                    f"attn.{part}_conv1d.weight",
                    shape,
                    f"linear_attn.{part}_conv.weight",
                    forward=lambda weight: weight.squeeze(1),
                    backward=lambda weight: weight.unsqueeze(1),
                    how="without the dimension of size 1",
                )
            )
        else:
            layers.made[f"linear_attn.{part}_conv.weight"] = Constant((channels, 1), 1.0)


def _constant_step(layers: Layers, heads: int, size: int) -> None:
    layers.made["linear_attn.gain_proj.weight"] = Constant((heads, size), 0.0)
    layers.made["linear_attn.gain_bias"] = Constant((heads,), ALWAYS_ONE)


def _same_epsilon(layers: Layers, model: Mapping[str, Any]) -> None:
    if model["norm_eps"] != L2_EPSILON:
        layers.lost.append(
            f"norm_eps is {model['norm_eps']}, but the l2 norm of queries and keys has {L2_EPSILON} there and norm_eps "
            "here."
        )


def _ridge_of_gate(a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Logits of a ridge that fades, with a step size in the middle of its range, as the gate does at input 0."""
    log_decay = -a_log.double().exp() * F.softplus(dt_bias.double())
    return torch.logit(-torch.expm1(log_decay), eps=1e-6)


def _made(prefix: str, name: str, made: Constant | Computed, dtype: torch.dtype) -> Piece:
    if isinstance(made, Constant):
        return filled(prefix + name, made.shape, made.value, dtype)
    sources = tuple(prefix + source for source in made.sources)
    return Piece(prefix + name, sources, lambda *tensors: made.make(*tensors).to(dtype), made.how)


def _block_rows(model: Mapping[str, Any]) -> list[Row]:
    size, wide = model["hidden_size"], _intermediate_size(model)
    return [
        Row("attn_norm.weight", (size,), "input_layernorm.weight"),
        Row("mlp_norm.weight", (size,), "post_attention_layernorm.weight"),
        Row("mlp.gate_proj.weight", (wide, size), "mlp.gate_proj.weight"),
        Row("mlp.up_proj.weight", (wide, size), "mlp.up_proj.weight"),
        Row("mlp.down_proj.weight", (size, wide), "mlp.down_proj.weight"),
    ]


def _outer_rows(model: Mapping[str, Any]) -> list[Row]:
    size, words = model["hidden_size"], model["vocab_size"]
    rows = [
        Row("model.embeddings.weight", (words, size), "model.embed_tokens.weight"),
        Row("model.norm.weight", (size,), "model.norm.weight"),
    ]
    return rows if model["tie_word_embeddings"] else [*rows, Row(TIED, (words, size), TIED)]


def _intermediate_size(model: Mapping[str, Any]) -> int:
    if model["intermediate_size"] is not None:
        return model["intermediate_size"]
    wide = int(model["hidden_size"] * (model["hidden_ratio"] or 4) * 2 / 3)
    return 256 * -(-wide // 256)


def _attention_layers(model: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[dict[int, dict], list[str]]:
    """For each layer of softmax attention its options; and why they are not those that a Falcon model can have."""
    given = model["attn"] or []
    specs = [{"rope_theta": 10000.0, **spec} for spec in ([given] if isinstance(given, dict) else given)]
    heads, head_dim, problems = model["num_heads"], fields["head_dim"], []
    for spec in specs:
        if spec["num_heads"] != heads or model["hidden_size"] != heads * head_dim:
            problems.append(
                f"attn has {spec['num_heads']} heads of {model['hidden_size'] // spec['num_heads']}; they must be as "
                f"those of the other layers, {heads} of {head_dim}."
            )
        for name in ("window_size", "qkv_bias", "qk_norm"):
            if spec.get(name):
                problems.append(f"attn has {name} {spec[name]}; full_attention layers here have none.")
    for name in ("num_kv_heads", "rope_theta"):
        if len({spec.get(name) for spec in specs}) > 1:
            problems.append(f"attn has several {name}; it must have one.")
    return {layer: spec for spec in specs for layer in spec["layers"]}, problems


def _attention_rows(model: Mapping[str, Any], attention: Mapping[int, Mapping[str, Any]]) -> list[Row]:
    if not attention:
        return []
    size, spec = model["hidden_size"], next(iter(attention.values()))
    narrow = size // spec["num_heads"] * (spec.get("num_kv_heads") or spec["num_heads"])
    shapes = {"q": (size, size), "k": (narrow, size), "v": (narrow, size), "o": (size, size)}
    return [Row(f"attn.{part}_proj.weight", shape, f"self_attn.{part}_proj.weight") for part, shape in shapes.items()]
