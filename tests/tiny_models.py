"""Small models of every rule, and of variants chosen so that each option meets most others."""

import torch

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

RULES = ("falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a")
HYBRID = ["linear_attention", "full_attention", "linear_attention"]

CASES = {
    **{rule: {"rule": rule} for rule in RULES},
    "1-same-step-direct": {"rule": "falcon_1", "alignment": "same_step", "step_size": "direct"},
    "1-deltanet-like": {
        "rule": "falcon_1",
        "ridge": "none",
        "qk_norm": "l2",
        "step_size": "direct",
        "conv_size": 2,
    },
    "2-gate-values": {"rule": "falcon_2", "output_gate": True, "value_norm": "l2", "value_head_dim": 5},
    "3-same-step": {"rule": "falcon_3", "alignment": "same_step", "window_size": 3, "smoothness": "trace"},
    "3-before": {"rule": "falcon_3", "timing": "read_before_write", "ridge": "direct", "conv_size": 0},
    "1a-normalized": {
        "rule": "falcon_1a",
        "normalized_read": True,
        "feature_map": "elu_plus_one",
        "read_scale": 2.0,
    },
    "2a-normalized": {
        "rule": "falcon_2a",
        "normalized_read": True,
        "feature_map": "softplus",
        "conv_size": 1,
    },
    "3a-normalized": {"rule": "falcon_3a", "normalized_read": True, "feature_map": "relu", "qk_norm": "none"},
    "3a-hybrid": {"rule": "falcon_3a", "layer_types": HYBRID, "num_key_value_heads": 1, "window_size": 2},
    "2-attention-first": {
        "rule": "falcon_2",
        "layer_types": ["full_attention", *HYBRID[1:]],
        "alignment": "same_step",
    },
}


def tiny_config(**options) -> FalconFastWeightConfig:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    return FalconFastWeightConfig(**{**sizes, "num_hidden_layers": 3, "pad_token_id": 0, **options})


def tiny_model(dtype=torch.float64, seed=0, model_class=FalconFastWeightForCausalLM, **options):
    """A model whose weights are far enough from zero that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = model_class(tiny_config(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("o_norm.weight"):
                parameter.fill_(1.0)
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def tokens(*shape, seed=1) -> torch.Tensor:
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(seed))


def cache_of(outputs):
    """The cache of a model's output, under the name that the installed transformers gives it."""
    return getattr(outputs, CACHE_NAME)
