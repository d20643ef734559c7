"""A Falcon model under another rule that is the same function.

Falcon-1 is Falcon-2 with the same gain for all value channels of a head, and Falcon-3 with a window of one pair; so are
Falcon-1A, Falcon-2A and Falcon-3A. From there channels can learn gains of their own, and `window_size` can be raised.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from falcon_hf import FalconFastWeightConfig

from .falcon import KIND, TIED, TIED_WHY, complete, config_json, falcon_config, falcon_shapes, own_fields
from .plan import ConversionError, Piece, Plan, check_source, copied

FAMILIES = (("falcon_1", "falcon_2", "falcon_3"), ("falcon_1a", "falcon_2a", "falcon_3a"))


def to_rule(config: FalconFastWeightConfig, tensors: Mapping[str, Tensor], rule: str) -> Plan:
    """The same function under another rule of its family.

    Args:
        config: of the source.
        tensors: name, shape and dtype of its tensors.
        rule: of the result.

    Raises:
        ConversionError: where the rules are of different families, or the window has more than one pair, or, when
            values are read, where the gains of a head differ and the new rule has one for all its channels.
    """
    check_source(tensors, falcon_shapes(config), KIND, [TIED] if config.tie_word_embeddings else [])
    family = next(family for family in FAMILIES if config.rule in family)
    if rule not in family:
        others = [other for other in family if other != config.rule]
        raise ConversionError([f"rule is {config.rule}; as the same function it can be {' or '.join(others)} only."])
    if config.window_size > 1 and rule != config.rule:
        raise ConversionError([f"window_size is {config.window_size}; only with 1 is {config.rule} also {rule}."])
    fields = own_fields(config)
    new = falcon_config({**fields, "rule": rule, "window_size": 1, "smoothness": None})
    before, after = config.rule_object.per_channel, new.rule_object.per_channel
    heads, channels = config.num_attention_heads, config.value_head_dim
    plan = Plan(config_json(new, tensors["model.embed_tokens.weight"].dtype), [])
    for name in tensors:
        if name == TIED and config.tie_word_embeddings:
            plan.left[name] = TIED_WHY
        elif before == after or not name.split("linear_attn.")[-1].startswith("gain_"):
            plan.pieces.append(copied(name, name))
        elif after:
            plan.pieces.append(
                Piece(name, (name,), lambda gain: gain.repeat_interleave(channels, 0), f"each row {channels} times")
            )
        else:
            plan.pieces.append(Piece(name, (name,), lambda gain: gain[::channels], "one row of each head"))
            plan.conditions[name] = ("the same for all channels of a head", lambda gain: _tied(gain, heads))
    return complete(plan, new, tensors)


def _tied(gain: Tensor, heads: int) -> bool:
    by_head = gain.unflatten(0, (heads, -1))
    return torch.equal(by_head, by_head[:, :1].expand_as(by_head))
