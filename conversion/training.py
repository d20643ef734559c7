"""Checkpoints of training code ↔ the layout of transformers.

Training code in the style of nanoGPT or torchtitan names the same tensors otherwise and joins some of them. Each is one
row of the tables below. Joined tensors hold their parts one after another along dimension 0, whole q, then k, then v.
Rows of queries and keys stand in the order of transformers, which rotates halves. What wraps a model leaves its name in
the middle of others (`_orig_mod.` of torch.compile, `module.` of DDP, and those of FSDP and activation checkpointing);
it is taken out wherever it stands.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from falcon_hf import FalconFastWeightConfig

from .falcon import KIND, TIED, TIED_WHY, complete, config_json, falcon_shapes
from .plan import ConversionError, Piece, Plan, check_source, copied

WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
BUFFERS = re.compile(r"(.*\.)?(freqs_cis|inv_freq|rope\.cache|attn\.bias|attn\.masked_bias)")


class Names(NamedTuple):
    """What one tensor, or several joined, are called."""

    ours: tuple[str, ...]
    nanogpt: str
    torchtitan: str


OUTER = (
    Names(("model.embed_tokens.weight",), "transformer.wte.weight", "tok_embeddings.weight"),
    Names(("model.norm.weight",), "transformer.ln_f.weight", "norm.weight"),
    Names(("lm_head.weight",), "lm_head.weight", "output.weight"),
)
LAYER = {"ours": "model.layers.{}.", "nanogpt": "transformer.h.{}.", "torchtitan": "layers.{}."}
IN_LAYER = (
    Names(("input_layernorm.weight",), "ln_1.weight", "attention_norm.weight"),
    Names(("post_attention_layernorm.weight",), "ln_2.weight", "ffn_norm.weight"),
    Names(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.c_fc.weight", "feed_forward.w13.weight"),
    Names(("mlp.gate_proj.weight",), "mlp.gate_proj.weight", "feed_forward.w1.weight"),
    Names(("mlp.up_proj.weight",), "mlp.up_proj.weight", "feed_forward.w3.weight"),
    Names(("mlp.down_proj.weight",), "mlp.c_proj.weight", "feed_forward.w2.weight"),
)
IN_MIXER = tuple(
    Names(tuple(f"{part}_proj.{what}" for part in parts), f"{nanogpt}.{what}", f"{torchtitan}.{what}")
    for what in ("weight", "bias")
    for parts, nanogpt, torchtitan in (
        ("qkv", "c_attn", "wqkv"),
        ("q", "q_proj", "wq"),
        ("k", "k_proj", "wk"),
        ("v", "v_proj", "wv"),
        ("o", "c_proj", "wo"),
    )
)
MIXER = {"nanogpt": "attn.", "torchtitan": "attention."}
LAYOUTS = tuple(MIXER)


def to_falcon(config: FalconFastWeightConfig, tensors: Mapping[str, Tensor]) -> Plan:
    """A checkpoint of training code in the layout of transformers.

    Args:
        config: of the model.
        tensors: name, shape and dtype of its tensors, named as nanoGPT, torchtitan or transformers would, joined or
            not, with the names of wrappers in between or not.

    Raises:
        ConversionError: with a sentence for each tensor that is missing, unknown, there twice, or of another shape.
    """
    needed = falcon_shapes(config)
    tied = [TIED] if config.tie_word_embeddings else []
    called = _called(config, [*needed, *tied])
    plan, problems = Plan({}, []), []
    doubled: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    makers: dict[str, str] = {}
    for name in tensors:
        bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if bare in called:
            ours = called[bare]
            if ours == (TIED,) and tied:
                plan.left[name] = TIED_WHY
                continue
            twice = [makers[part] for part in ours if part in makers]
            if twice:
                doubled.add(name)
                problems.append(f"{name} and {twice[0]} are both there and are the same tensor.")
                continue
            makers.update(dict.fromkeys(ours, name))
            lengths = [needed[part][0] for part in ours]
            shapes[name] = (sum(lengths), *needed[ours[0]][1:])
            plan.pieces += [_part(part, name, lengths, place) for place, part in enumerate(ours)]
        elif BUFFERS.fullmatch(bare):
            plan.left[name] = "a buffer that the model computes itself"
    problems += [f"{name} is missing, under whatever name." for name in needed if name not in makers]
    try:
        check_source(tensors, shapes, KIND, plan.left.keys() | doubled)
    except ConversionError as error:
        problems += error.problems
    if problems:
        raise ConversionError(problems)
    plan.config = config_json(config, tensors[makers["model.embed_tokens.weight"]].dtype)
    return complete(plan, config, tensors)


def from_falcon(config: FalconFastWeightConfig, tensors: Mapping[str, Tensor], layout: str) -> Plan:
    """The way back: a saved Falcon model in the layout `nanogpt` (joined) or `torchtitan` (not joined)."""
    needed = falcon_shapes(config)
    check_source(tensors, needed, KIND, [TIED] if config.tie_word_embeddings else [])
    plan = Plan(config_json(config, tensors["model.embed_tokens.weight"].dtype), [])
    done: set[str] = set()
    for ours, theirs in _pairs(config, needed, layout):
        wanted = layout == "nanogpt" or len(ours) == 1
        if wanted and not done & set(ours) and set(ours) <= needed.keys():
            done |= set(ours)
            if len(ours) == 1:
                plan.pieces.append(copied(theirs, ours[0]))
            else:
                plan.pieces.append(Piece(theirs, ours, lambda *parts: torch.cat(parts), "joined"))
    if config.tie_word_embeddings and TIED in tensors:
        plan.left[TIED] = TIED_WHY
    return plan


def _part(target: str, source: str, lengths: list[int], place: int) -> Piece:
    if len(lengths) == 1:
        return copied(target, source)
    start = sum(lengths[:place])
    return Piece(target, (source,), lambda joined: joined[start : start + lengths[place]].clone(), "its part")


def _called(config: FalconFastWeightConfig, needed: list[str]) -> dict[str, tuple[str, ...]]:
    """For each name that a tensor may have, the names of ours that it holds."""
    called: dict[str, tuple[str, ...]] = {name: (name,) for name in needed}
    for layout in LAYOUTS:
        called |= {theirs: ours for ours, theirs in _pairs(config, needed, layout) if set(ours) <= set(needed)}
    return called


def _pairs(config: FalconFastWeightConfig, needed: Mapping[str, object] | list[str], layout: str):
    """Ours and theirs for each tensor or joined tensors of the model, joined ones first."""
    for row in OUTER:
        yield row.ours, getattr(row, layout)
    for i, layer_type in enumerate(config.layer_types):
        here, there = LAYER["ours"].format(i), LAYER[layout].format(i)
        mixer = here + ("linear_attn." if layer_type == "linear_attention" else "self_attn.")
        for row in IN_LAYER:
            yield tuple(here + name for name in row.ours), there + getattr(row, layout)
        for row in IN_MIXER:
            yield tuple(mixer + name for name in row.ours), there + MIXER[layout] + getattr(row, layout)
        tabled = {mixer + name for row in IN_MIXER for name in row.ours}
        for name in needed:
            if name.startswith(mixer) and name not in tabled:
                yield (name,), there + MIXER[layout] + name.removeprefix(mixer)
