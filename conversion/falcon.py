"""What all conversions to a Falcon checkpoint share: its config, its tensors by name and shape."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.modeling_falcon_fast_weight import initial_ridge_bias

from .plan import ConversionError, Piece, Plan

KIND = FalconFastWeightConfig.model_type
TIED = "lm_head.weight"
TIED_WHY = "the embeddings stand in its place"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def falcon_config(fields: Mapping[str, Any]) -> FalconFastWeightConfig:
    """The config of these fields, or of a config.json. ConversionError where they contradict one another."""
    return read_config(FalconFastWeightConfig, fields)


def read_config(config_class: type[PreTrainedConfig], fields: Mapping[str, Any]) -> Any:
    """The config of a class from its fields. ConversionError where they contradict one another."""
    try:
        return config_class.from_dict(dict(fields))
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError([" ".join(str(error.__cause__ or error).split())]) from None


def config_json(config: FalconFastWeightConfig, dtype: torch.dtype) -> dict[str, Any]:
    config.architectures = [FalconFastWeightForCausalLM.__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    return json.loads(config.to_json_string())


def own_fields(config: FalconFastWeightConfig) -> dict[str, Any]:
    """The fields that a Falcon config has beyond those of every config, and the token ids."""
    names = {field.name for field in dataclass_fields(FalconFastWeightConfig)}
    return {name: value for name, value in config.to_dict().items() if name in names}


def falcon_shapes(config: FalconFastWeightConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a saved Falcon language model, in its order."""
    with torch.device("meta"):
        model = FalconFastWeightForCausalLM(config)
    tied = config.tie_word_embeddings
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items() if not (tied and name == TIED)}


def complete(plan: Plan, config: FalconFastWeightConfig, tensors: Mapping[str, Tensor]) -> Plan:
    """The plan in the order of the model, once it is seen that it makes each tensor of it, in its shape."""
    needed = falcon_shapes(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in plan.shapes(tensors).items()}
    problems = [f"{name} is needed by the new config, and nothing makes it." for name in needed.keys() - shapes.keys()]
    problems += [f"{name} has no place under the new config." for name in shapes.keys() - needed.keys()]
    problems += [
        f"{name} would have shape {list(shape)}; the new config needs {list(needed[name])}."
        for name, shape in shapes.items()
        if name in needed and shape != needed[name]
    ]
    if problems:
        raise ConversionError(sorted(problems))
    order = {name: place for place, name in enumerate(needed)}
    plan.pieces.sort(key=lambda piece: order[piece.target])
    return plan


def rates(config: FalconFastWeightConfig, prefix: str, dtype: torch.dtype, seed: int) -> list[Piece]:
    """Gain and ridge of a layer as the model itself begins: projections drawn at random, gains in the middle of their
    range, ridges that spread the memory lengths of the heads."""
    heads = config.num_attention_heads
    gains = heads * config.value_head_dim if config.rule_object.per_channel else heads
    std = config.initializer_range
    pieces = [
        _drawn(f"{prefix}.gain_proj.weight", (gains, config.hidden_size), std, dtype, seed),
        Piece(f"{prefix}.gain_bias", (), lambda: torch.zeros(gains, dtype=dtype), "0 everywhere"),
    ]
    if config.ridge != "none":
        pieces += [
            _drawn(f"{prefix}.ridge_proj.weight", (heads, config.hidden_size), std, dtype, seed),
            Piece(
                f"{prefix}.ridge_bias",
                (),
                lambda: initial_ridge_bias(config).to(dtype),
                "memory lengths spread by head",
            ),
        ]
    return pieces


def _drawn(name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype, seed: int) -> Piece:
    def draw() -> Tensor:
        if torch.get_default_device().type == "meta":  # only the shape is asked for
            return torch.empty(shape, dtype=dtype)
        generator = torch.Generator("cpu").manual_seed(seed + zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device="cpu").mul(std).to(dtype)

    return Piece(name, (), draw, f"drawn with standard deviation {std:g}")
