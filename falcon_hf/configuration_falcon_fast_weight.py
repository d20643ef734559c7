"""What a Falcon fast-weight model computes, and the models of the paper by name."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from falcon_kernels import RULES, Rule
from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

NORMS = ("rms", "l2", "none")
POSITIVE_FEATURE_MAPS = ("relu", "elu_plus_one", "softplus")
FEATURE_MAPS = ("identity", *POSITIVE_FEATURE_MAPS)
LAYER_TYPES = ("linear_attention", "full_attention")

# Names that are no fields of ours and that transformers writes into a config.json or takes at construction.
TRANSFORMERS_NAMES = {
    *GenerationConfig()._get_default_generation_params(),
    *("model_type", "auto_map", "custom_pipelines", "quantization_config", "distributed_config"),
    *("torch_dtype", "num_labels", "name_or_path", "output_attentions", "attn_implementation"),
    *("experts_implementation", "per_layer_config", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    *(
        "tokenizer_class",
        "task_specific_params",
        "is_decoder",
        "classifier_dropout",
        "tie_last_hidden_states",
    ),
}

# Names that reach a config on its way from the Hub, or with what else a model is loaded with.
LOADING_NAMES = (
    *("trust_remote_code", "code_revision", "token", "revision", "cache_dir", "local_files_only", "gguf_file"),
    *("device_map", "max_memory", "tqdm_class", "use_safetensors", "variant"),
)

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
    "30m": {"vocab_size": 50257, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
    "130m": {"vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
GPT2_END_OF_TEXT = 50256
VARIANTS: dict[str, dict[str, Any]] = {
    "1": {"qk_norm": "l2", "step_size": "gain"},
    "2": {"qk_norm": "l2", "step_size": "direct"},
    "3": {"qk_norm": "rms", "step_size": "direct"},
}


@strict
class FalconFastWeightConfig(PreTrainedConfig):
    r"""Configuration of a Falcon fast-weight language model.

    The defaults are those of the paper at 130 million parameters. Options that contradict one another, and
    names that do not exist, are refused with a ValueError.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes of the model.
        num_attention_heads: heads of every layer, of whichever type.
        head_dim: width of queries and keys of a head; hidden_size / num_attention_heads by default.
        value_head_dim: width of values of a head; head_dim by default.
        rule: the update rule: `falcon_1`, `falcon_2`, `falcon_3`, `falcon_1a`, `falcon_2a` or `falcon_3a`.
        window_size: pairs that a sliding rule writes at each token; 4 by default, 1 for the others.
        alignment: `next_latent` (a token's value is written under the previous token's key) or `same_step`.
        timing: `read_after_write` or `read_before_write`.
        qk_norm: norm of queries and keys, without weight: `rms`, `l2` or `none`.
        value_norm: the same for values.
        feature_map: map of queries and keys after their norm: `identity`, `relu`, `elu_plus_one`, `softplus`.
        step_size: `gain` (a gain in [0, 2], without dimension, over the energy of the keys) or `direct` (the
            step size itself, in [0, step_size_max]).
        step_size_max: largest direct step size; by default 2 for `l2` keys and 2 / head_dim for `rms` keys
            without feature map. Elsewhere it must be given.
        ridge: `scale_coupled` (ridge times the energy of the keys), `direct`, or `none` (no decay).
        ridge_scale: largest ridge.
        detach_energy: no gradient through the energy in a scale-coupled ridge; by default for sliding rules.
        smoothness: energy of `falcon_3`: `exact`, `bound` or `trace`; exact for windows up to 8 by default.
        normalized_read: divides each read by the sum of its weights; for inner-product rules, positive maps.
        read_scale: factor of each read.
        epsilon: added to the denominator of the step size.
        decay_floor: smallest decay of the memory at one token.
        conv_size: tokens that the short causal convolutions on q, k and v see; 0 for none.
        output_gate: whether a SiLU gate multiplies the output of the heads.
        layer_types: `linear_attention` (fast weights, the default) or `full_attention` for each layer.
        num_key_value_heads, rope_parameters, attention_bias, max_position_embeddings: full_attention's.
        attention_qk_norm: whether queries and keys of full_attention have an RMS norm with a weight, as in Qwen3.
        hidden_act, rms_norm_eps, initializer_range, tie_word_embeddings, use_cache, token ids: as usual.
    """

    model_type = "falcon_fast_weight"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attention_dropout: ClassVar[float] = 0.0
    mlp_bias: ClassVar[bool] = False
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    value_head_dim: int | None = None
    rule: str = "falcon_3a"
    window_size: int | None = None
    alignment: str = "next_latent"
    timing: str = "read_after_write"
    qk_norm: str = "rms"
    value_norm: str = "none"
    feature_map: str = "identity"
    step_size: str = "gain"
    step_size_max: float | int | None = None
    ridge: str = "scale_coupled"
    ridge_scale: float | int = 1.0
    detach_energy: bool | None = None
    smoothness: str | None = None
    normalized_read: bool = False
    read_scale: float | int = 1.0
    epsilon: float | int = 1e-6
    decay_floor: float | int = 0.01
    conv_size: int = 4
    output_gate: bool = False
    layer_types: list[str] | None = None
    num_key_value_heads: int | None = None
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_qk_norm: bool = False
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"head_dim is not given and hidden_size {self.hidden_size} is no multiple of "
                    f"num_attention_heads {self.num_attention_heads}; give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * self.num_hidden_layers
        rule = self.rule_object
        self.window_size, self.detach_energy, self.smoothness = (
            rule.window,
            rule.detach_energy,
            rule.smoothness,
        )
        if self.step_size == "direct" and self.step_size_max is None and self.feature_map == "identity":
            self.step_size_max = {"l2": 2.0, "rms": 2 / self.head_dim}.get(self.qk_norm)
        self.validate_architecture()
        self.base_model_tp_plan = self._tp_plan()
        super().__post_init__(**kwargs)

    def _tp_plan(self) -> dict[str, str]:
        """How transformers shards the layers: whole heads to each process. `o_norm` is the same for all heads."""
        mixer, attention, mlp = "layers.*.linear_attn", "layers.*.self_attn", "layers.*.mlp"
        plan = {f"{mlp}.gate_proj": "colwise", f"{mlp}.up_proj": "colwise", f"{mlp}.down_proj": "rowwise"}
        if "linear_attention" in self.layer_types:
            sharded = ["q_proj", "k_proj", "v_proj", "gain_proj", "gain_bias"]
            sharded += ["ridge_proj", "ridge_bias"] if self.ridge != "none" else []
            sharded += ["g_proj"] if self.output_gate else []
            sharded += ["q_conv.weight", "k_conv.weight", "v_conv.weight"] if self.conv_size else []
            plan |= {f"{mixer}.{name}": "colwise" for name in sharded} | {f"{mixer}.o_proj": "rowwise"}
        if "full_attention" in self.layer_types:
            sharded = ["q_proj", "k_proj", "v_proj"]
            plan |= {f"{attention}.{name}": "colwise" for name in sharded} | {f"{attention}.o_proj": "rowwise"}
            norms = ["q_norm", "k_norm"] if self.attention_qk_norm else []
            plan |= {f"{attention}.{name}": "replicated_with_grad_allreduce" for name in norms}
        return plan

    @property
    def rule_object(self) -> Rule:
        """The update rule with its options, as falcon_kernels takes it."""
        try:
            return Rule(
                self.rule,
                window=self.window_size,
                alignment=self.alignment,
                timing=self.timing,
                step_size=self.step_size,
                ridge=self.ridge,
                detach_energy=self.detach_energy,
                smoothness=self.smoothness,
                normalized_read=self.normalized_read,
                epsilon=self.epsilon,
                decay_floor=self.decay_floor,
            )
        except ValueError as error:
            message = str(error)
            raise ValueError(
                message.replace("window", "window_size", 1) if message.startswith("window ") else message
            ) from None

    def validate_architecture(self):
        """Raises ValueError unless the fields fit together."""
        self.rule_object  # noqa: B018 - refuses what the rule refuses
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("head_dim", "value_head_dim", "num_key_value_heads"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("qk_norm", self.qk_norm in NORMS, f"one of {', '.join(NORMS)}")
        self._check("value_norm", self.value_norm in NORMS, f"one of {', '.join(NORMS)}")
        self._check("feature_map", self.feature_map in FEATURE_MAPS, f"one of {', '.join(FEATURE_MAPS)}")
        self._check("conv_size", self.conv_size >= 0, "at least 0")
        self._check("ridge_scale", self.ridge_scale > 0, "above 0")
        self._check(
            "layer_types",
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
            f"{self.num_hidden_layers} (num_hidden_layers) entries, each {' or '.join(LAYER_TYPES)}",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must divide num_attention_heads, "
                f"{self.num_attention_heads}."
            )
        if self.normalized_read and self.feature_map not in POSITIVE_FEATURE_MAPS:
            raise ValueError(
                f"normalized_read is True, but feature_map is {self.feature_map!r}, which can be negative; "
                f"it needs one of {', '.join(POSITIVE_FEATURE_MAPS)}."
            )
        if self.step_size == "gain" and self.step_size_max is not None:
            raise ValueError(f"step_size_max is {self.step_size_max}, but step_size is 'gain'; it belongs to 'direct'.")
        if self.step_size == "direct":
            if self.step_size_max is None:
                raise ValueError(
                    f"step_size_max is not given; step_size 'direct' has a default only for qk_norm 'rms' or "
                    f"'l2' with feature_map 'identity', not for {self.qk_norm!r} with {self.feature_map!r}."
                )
            self._check("step_size_max", self.step_size_max > 0, "above 0")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}.")

    @classmethod
    def _refuse_unknown(cls, names) -> None:
        known = {field.name for field in fields(cls)}
        for name in names:
            if name not in TRANSFORMERS_NAMES and not name.startswith("_"):
                close = get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(known))}."
                raise ValueError(f"{name} is no field of {cls.__name__}; {hint}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, with overrides checked together with the rest and unknown ones refused."""
        base = {field.name for field in fields(PreTrainedConfig)}
        ours = {field.name for field in fields(cls)} - base
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in ours}
        if not kwargs.get("return_unused_kwargs"):
            cls._refuse_unknown(kwargs.keys() - base - {"return_unused_kwargs", *LOADING_NAMES})
        return super().from_dict({**config_dict, **overrides}, **kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> Self:
        """A model of the paper by name: `falcon-3a.3-130m` is rule 3A, variant .3, 130 million parameters.

        Variants: `.1` has l2 keys and gains, `.2` l2 keys and direct steps, `.3` rms keys and direct steps.

        Args:
            name: `falcon-RULE.VARIANT-SIZE`.
            overrides: fields that differ from the preset.
        """
        presets = {
            f"{rule.replace('falcon_', 'falcon-')}.{variant}-{size}": {"rule": rule, **options, **sizes}
            for size, sizes in SIZES.items()
            for rule in RULES
            for variant, options in VARIANTS.items()
        }
        if name not in presets:
            raise ValueError(f"preset is {name!r}; it must be one of {', '.join(presets)}.")
        chosen = presets[name]
        chosen["num_attention_heads"] = chosen["hidden_size"] // 64
        chosen["head_dim"] = 64
        if chosen["vocab_size"] > GPT2_END_OF_TEXT:
            chosen["bos_token_id"] = chosen["eos_token_id"] = GPT2_END_OF_TEXT
        return cls(**{**chosen, **overrides})


__all__ = ["FalconFastWeightConfig"]
