"""A config says what is computed, refuses what contradicts itself, and survives being written and read."""

import json

import pytest
import torch
from tiny_models import CASES, tiny_config
from transformers import AutoConfig

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM

REFUSED = {
    "windw_size is no field of FalconFastWeightConfig; did you mean window_size?": {"windw_size": 3},
    "xyzzy is no field of FalconFastWeightConfig; the fields are": {"xyzzy": 3},
    "rule is 'falcon_9'; it must be one of falcon_1, falcon_2,": {"rule": "falcon_9"},
    "window_size is 3, but falcon_1 writes one pair at a time": {"rule": "falcon_1", "window_size": 3},
    "window_size is 0; it must be a whole number of at least 1.": {"window_size": 0},
    "smoothness is 'exact', but only falcon_3 has one": {"rule": "falcon_1", "smoothness": "exact"},
    "alignment is 'next'; it must be one of next_latent, same_step.": {"alignment": "next"},
    "decay_floor is 0.001; for falcon_2 it must be at least exp(-5)": {
        "rule": "falcon_2",
        "decay_floor": 0.001,
    },
    "normalized_read is True, but falcon_1 is a regression rule": {
        "rule": "falcon_1",
        "normalized_read": True,
    },
    "normalized_read is True, but feature_map is 'identity', which can be negative": {"normalized_read": True},
    "qk_norm is 'layer'; it must be one of rms, l2, none.": {"qk_norm": "layer"},
    "value_norm is 'layer'; it must be one of rms, l2, none.": {"value_norm": "layer"},
    "feature_map is 'gelu'; it must be one of identity, relu,": {"feature_map": "gelu"},
    "step_size_max is not given; step_size 'direct' has a default only": {
        "step_size": "direct",
        "qk_norm": "none",
    },
    "not for 'rms' with 'relu'.": {"step_size": "direct", "feature_map": "relu"},
    "step_size_max is 1.0, but step_size is 'gain'; it belongs to 'direct'.": {"step_size_max": 1.0},
    "step_size_max is -1.0; it must be above 0.": {"step_size": "direct", "step_size_max": -1.0},
    "ridge_scale is 0.0; it must be above 0.": {"ridge_scale": 0.0},
    "conv_size is -1; it must be at least 0.": {"conv_size": -1},
    "head_dim is not given and hidden_size 24 is no multiple of": {
        "head_dim": None,
        "num_attention_heads": 5,
    },
    "num_key_value_heads is 3; it must divide num_attention_heads, 2.": {"num_key_value_heads": 3},
    "num_hidden_layers is 0; it must be at least 1.": {"num_hidden_layers": 0},
    "it must be 3 (num_hidden_layers) entries, each linear_attention or": {"layer_types": ["linear_attention"]},
    "'sliding_attention']; it must be 3": {"layer_types": ["linear_attention"] * 2 + ["sliding_attention"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_contradictions_are_refused_in_one_sentence(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        tiny_config(**REFUSED[message])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_type_is_refused_with_its_field():
    with pytest.raises(Exception, match="hidden_size"):
        tiny_config(hidden_size="wide")


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_being_written_and_read(case, tmp_path):
    config = tiny_config(**CASES[case], eos_token_id=[1, 2], id2label={0: "no", 1: "yes", 2: "maybe"}, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is FalconFastWeightConfig
    assert {**read.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert read.rule_object == config.rule_object
    assert read.num_labels == 3


def test_what_transformers_writes_and_reads_is_accepted():
    extras = {
        "architectures": ["FalconFastWeightForCausalLM"],
        "transformers_version": "5.17.0",
        "model_type": "falcon_fast_weight",
        "auto_map": {"AutoConfig": "configuration_falcon_fast_weight.FalconFastWeightConfig"},
        "torch_dtype": "float32",
        "_name_or_path": "somewhere",
        "_attn_implementation_autoset": True,
        "quantization_config": {"quant_method": "none"},
        "output_hidden_states": False,
        "problem_type": "regression",
        "rope_theta": 500.0,
        "num_labels": 1,
        "temperature": 0.7,
    }
    config = tiny_config(**extras)
    assert config.dtype == torch.float32
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.num_labels == 1


def test_a_saved_config_names_the_computation_and_no_implementation():
    written = json.loads(tiny_config(rule="falcon_3").to_json_string())
    assert written["window_size"] == 4
    assert written["smoothness"] == "exact"
    assert written["detach_energy"] is True
    for name in written:
        assert not any(word in name for word in ("impl", "kernel", "chunk", "triton"))


def test_overrides_at_loading_are_checked_with_the_rest(tmp_path):
    tiny_config(rule="falcon_3a").save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, window_size=2).rule_object.window == 2
    loaded = AutoConfig.from_pretrained(tmp_path, device_map="cpu", tqdm_class=None)  # as transformers serve does
    # as lm_eval does
    assert AutoConfig.from_pretrained(tmp_path, revision="main", gguf_file=None, subfolder="").window_size == 4
    assert not hasattr(loaded, "device_map")
    with pytest.raises(ValueError, match="window_size is 4, but falcon_1 writes one pair"):
        AutoConfig.from_pretrained(tmp_path, rule="falcon_1")
    with pytest.raises(ValueError, match="windw is no field of FalconFastWeightConfig; did you mean window_size"):
        AutoConfig.from_pretrained(tmp_path, windw=2)
    assert AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).window_size == 4


@pytest.mark.parametrize(
    ("name", "rule", "qk_norm", "step_size", "step_size_max"),
    [
        ("falcon-1.1-130m", "falcon_1", "l2", "gain", None),
        ("falcon-2.2-130m", "falcon_2", "l2", "direct", 2.0),
        ("falcon-3a.3-130m", "falcon_3a", "rms", "direct", 2 / 64),
        ("falcon-1a.3-130m", "falcon_1a", "rms", "direct", 2 / 64),
    ],
)
def test_presets_are_the_models_of_the_paper(name, rule, qk_norm, step_size, step_size_max):
    config = FalconFastWeightConfig.from_preset(name)
    assert (config.rule, config.qk_norm, config.step_size) == (rule, qk_norm, step_size)
    assert config.step_size_max == step_size_max
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (12, 768, 64)
    with torch.device("meta"):
        model = FalconFastWeightForCausalLM(config)
    assert 123e6 < sum(parameter.numel() for parameter in model.parameters()) < 131e6


def test_presets_take_overrides_and_unknown_ones_list_what_exists():
    config = FalconFastWeightConfig.from_preset("falcon-3.1-tiny", window_size=2, vocab_size=99)
    assert (config.window_size, config.vocab_size, config.rule) == (2, 99, "falcon_3")
    with pytest.raises(ValueError, match=r"preset is 'falcon-4'; it must be one of .*falcon-3a\.3-130m"):
        FalconFastWeightConfig.from_preset("falcon-4")


def test_defaults_follow_the_paper():
    config = FalconFastWeightConfig()
    rule = config.rule_object
    assert (rule.alignment, rule.timing, rule.step_size, rule.ridge) == (
        "next_latent",
        "read_after_write",
        "gain",
        "scale_coupled",
    )
    assert (config.qk_norm, config.value_norm, config.feature_map, config.conv_size) == (
        "rms",
        "none",
        "identity",
        4,
    )
    assert (rule.window, rule.epsilon, rule.decay_floor, config.read_scale) == (4, 1e-6, 0.01, 1)
    assert config.tie_word_embeddings
    assert config.layer_types == ["linear_attention"] * 12
