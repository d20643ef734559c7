"""Our classes as the common model tests of transformers want them; test_upstream.py runs this file."""

import unittest

from transformers.models.auto import modeling_auto
from upstream import test_modeling_common
from upstream.test_modeling_common import ModelTesterMixin, ids_tensor

from falcon_hf import (
    FalconFastWeightConfig,
    FalconFastWeightForCausalLM,
    FalconFastWeightForSequenceClassification,
    FalconFastWeightForTokenClassification,
    FalconFastWeightModel,
)

NAME = FalconFastWeightConfig.model_type
modeling_auto.MODEL_MAPPING_NAMES[NAME] = "FalconFastWeightModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NAME] = "FalconFastWeightForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[NAME] = "FalconFastWeightForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[NAME] = "FalconFastWeightForTokenClassification"

# That of transformers sets fields which our config does not have, and refuses when it is loaded.
test_modeling_common.set_config_for_less_flaky_test = lambda config: setattr(config, "rms_norm_eps", 1.0)


class Tester:
    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 2, 99

    def __init__(self, **options):
        self.options = options

    def get_config(self):
        return FalconFastWeightConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=40,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            pad_token_id=0,
            **self.options,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(1)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": input_ids.ne(0).long()}


class CommonTests(ModelTesterMixin):
    all_model_classes = (
        FalconFastWeightModel,
        FalconFastWeightForCausalLM,
        FalconFastWeightForSequenceClassification,
        FalconFastWeightForTokenClassification,
    )

    def setUp(self):
        self.model_tester = Tester(**self.options)


# Common tests that ask for what our models do not want, and why.
NOT_FOR_US = {
    "test_generation_tester_mixin_inheritance": "the generation tests of transformers are not in its sdist",
    "test_bc_cache_name_forward": "all names of the cache are as good as one another, none warns",
    "test_model_weights_reload_no_missing_tied_weights": "missing weights are an error",
    "test_attention_outputs": "only full_attention layers have attention maps",
}
NOT_WITHOUT_ATTENTION = {
    "test_model_rope_scaling_from_config": "only full_attention layers have rotary positions",
}


def of_rule(name, **options):
    hybrid = "layer_types" in options
    members = {"options": options, "has_attentions": hybrid}
    for prefix, reason in {**NOT_FOR_US, **({} if hybrid else NOT_WITHOUT_ATTENTION)}.items():
        for test in dir(CommonTests):
            if test.startswith(prefix):
                members[test] = unittest.skip(reason)(getattr(CommonTests, test))
    return type(name, (CommonTests, unittest.TestCase), members)


Falcon1Test = of_rule("Falcon1Test", rule="falcon_1")
Falcon2ATest = of_rule("Falcon2ATest", rule="falcon_2a")
Falcon3ATest = of_rule("Falcon3ATest", rule="falcon_3a")
HybridTest = of_rule("HybridTest", rule="falcon_3", layer_types=["linear_attention", "full_attention"])
