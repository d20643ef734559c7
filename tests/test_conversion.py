"""Checkpoints of other models become Falcon checkpoints and come back: the same function, and where not, said so."""

import json
import math
import pickle
import re
import shutil
import weakref
from pathlib import Path

import fla_reference
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, RULES, tiny_model, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.card import write_card
from falcon_hf.conversion import TARGETS, Checkpoint, ConversionError, convert, folders, make_plan
from falcon_hf.modeling_falcon_fast_weight import initial_ridge_bias
from falcon_hf.publish import check_checkpoint

SIZES = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_NET = {
    **SIZES,
    **{"model_type": "delta_net", "num_heads": 2, "expand_k": 1.0, "expand_v": 1.0, "conv_size": 4, "norm_eps": 1e-6},
    **{"use_gate": False, "use_beta": True, "use_short_conv": True, "allow_neg_eigval": False, "hidden_act": "swish"},
    **{"qk_norm": "l2", "qk_activation": "silu", "tie_word_embeddings": False, "attn": None},
}
LINEAR = {**SIZES, "model_type": "linear_attn", "num_heads": 2, "num_kv_heads": None, "feature_map": "identity"}
LINEAR |= {"norm_eps": 1e-5, "expand_k": 1.0, "expand_v": 1.0}
RETNET = {**SIZES, "model_type": "retnet", "num_heads": 2, "num_kv_heads": None, "expand_v": 2.0, "norm_eps": 1e-6}
GATED = {**SIZES, "model_type": "gated_deltanet", "num_heads": 2, "head_dim": 8, "expand_v": 2.0, "norm_eps": 1e-6}
ATTENTION = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "qkv_bias": False, "rope_theta": 5000.0}
DELTA_NETS = {
    "plain": {},
    "gate": {"use_gate": True},
    "negative-eigenvalues": {"allow_neg_eigval": True, "tie_word_embeddings": True},
    "constant-step": {"use_beta": False},
    "silu-alone": {"use_short_conv": False},
    "other-widths": {"expand_k": 0.5, "expand_v": 2.0, "conv_size": 2},
    "hybrid": {"attn": ATTENTION},
}
LINEARS = {
    "identity": {},
    "elu": {"feature_map": "elu", "expand_v": 2.0},
    "relu": {"feature_map": "relu", "num_heads": 4, "num_kv_heads": 2},
}


def fla_tensors(config: dict, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Random weights of a model of flash-linear-attention, by the names and shapes that it saves."""
    size, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_heads"]
    kind = config["model_type"]
    key = config.get("head_dim", round(size * config.get("expand_k", 1.0)) // heads)
    value = round(size * config["expand_v"]) // heads if kind != "gated_deltanet" else round(key * config["expand_v"])
    groups = config.get("num_kv_heads") or heads
    shapes = {"model.embeddings.weight": (config["vocab_size"], size), "model.norm.weight": (size,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], size)
    for i in range(config["num_hidden_layers"]):
        mixer = {
            "q_proj.weight": (heads * key, size),
            "k_proj.weight": (groups * key, size),
            "v_proj.weight": (groups * value, size),
            "o_proj.weight": (size, heads * value),
        }
        if config.get("attn") and i in config["attn"]["layers"]:
            narrow = size // heads * config["attn"]["num_kv_heads"]
            mixer |= dict.fromkeys(("k_proj.weight", "v_proj.weight"), (narrow, size))
        elif kind in ("delta_net", "gated_deltanet"):
            if config.get("use_beta", True):
                mixer["b_proj.weight"] = (heads, size)
            if config.get("use_short_conv", True):
                for part, width in (("q", key), ("k", key), ("v", value)):
                    mixer[f"{part}_conv1d.weight"] = (heads * width, 1, config.get("conv_size", 4))
            mixer["o_norm.weight"] = (value,)
            if config.get("use_gate", kind == "gated_deltanet"):
                mixer["g_proj.weight"] = (heads * value, size)
            if kind == "gated_deltanet":
                mixer |= {"a_proj.weight": (heads, size), "A_log": (heads,), "dt_bias": (heads,)}
        elif kind == "linear_attn":
            mixer["norm.weight"] = (value,)
        else:
            mixer |= {"g_proj.weight": (heads * value, size), "g_norm_swish_gate.weight": (value,)}
        layer = {f"attn.{name}": shape for name, shape in mixer.items()}
        layer |= {"attn_norm.weight": (size,), "mlp_norm.weight": (size,), "mlp.down_proj.weight": (size, wide)}
        layer |= {"mlp.gate_proj.weight": (wide, size), "mlp.up_proj.weight": (wide, size)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    torch.manual_seed(0)
    return {
        name: ((1.0 if len(shape) == 1 else 0.0) + 0.4 * torch.randn(shape, dtype=torch.float64)).to(dtype)
        for name, shape in shapes.items()
    }


def converted(config: dict, tensors: dict, **options) -> tuple[dict, dict, object]:
    """Config, tensors and plan of a conversion in memory; every tensor is accounted for, once."""
    plan = make_plan(Checkpoint.of(config, tensors), **options)
    result = plan.apply(tensors)
    account = plan.account()
    assert account.taken.keys() | account.left.keys() == tensors.keys()
    assert not account.taken.keys() & account.left.keys()
    came = {target for targets in account.taken.values() for target in targets}
    assert came | account.made.keys() == result.keys()
    assert not came & account.made.keys()
    assert sum(count for *_, count in account.rows()) == sum(map(len, account.taken.values())) + len(
        account.made
    ) + len(account.left)
    return plan.config, result, plan


def model_of(config: dict, tensors: dict) -> FalconFastWeightForCausalLM:
    """The model with these weights, in their dtype."""
    model = FalconFastWeightForCausalLM(FalconFastWeightConfig.from_dict(config))
    if model.config.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.to(tensors["model.embed_tokens.weight"].dtype).load_state_dict(tensors)
    return model.eval()


def same(ours: dict, theirs: dict) -> bool:
    """Whether the names are the same, and each tensor bit for bit."""
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def problems_of(config: dict, tensors: dict, **options) -> list[str]:
    with pytest.raises(ConversionError) as error:
        make_plan(Checkpoint.of(config, tensors), **options).apply(tensors)
    assert str(error.value).splitlines() == error.value.problems
    assert all(problem.endswith((".", "?")) for problem in error.value.problems)
    return error.value.problems


@pytest.mark.parametrize("case", [*DELTA_NETS, *LINEARS])
@pytest.mark.parametrize("length", [1, 9])
def test_models_of_flash_linear_attention_are_the_same_function(case, length):
    config = {**DELTA_NET, **DELTA_NETS[case]} if case in DELTA_NETS else {**LINEAR, **LINEARS[case]}
    tensors = fla_tensors(config)
    new, result, plan = converted(config, tensors)
    ids = tokens(2, length)
    with torch.no_grad():
        ours = model_of(new, result)(ids).logits
    theirs = fla_reference.logits(config, tensors, ids)
    accurate = 1e-6 if config.get("attn") else 1e-11  # transformers rotates by angles in float32
    assert (ours - theirs).abs().max() < accurate * theirs.abs().max()
    assert plan.lost == []
    back, again, plan = converted(new, result, to="fla")
    assert (fla_reference.logits(back, again, ids) - theirs).abs().max() < 1e-11 * theirs.abs().max()
    if config.get("num_kv_heads") is None:
        assert same(again, tensors)
        assert {name: value for name, value in config.items() if back.get(name) != value} == {}


def test_bits_and_dtypes_survive_the_way_there_and_back():
    config = {**DELTA_NET, "use_gate": True}
    tensors = fla_tensors(config, torch.bfloat16)
    tensors |= {name: value.float() for name, value in tensors.items() if "o_norm" in name}
    new, result, _ = converted(config, tensors)
    assert new["dtype"] == "bfloat16"
    assert same(converted(new, result, to="fla")[1], tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"use_gate": True}, {"allow_neg_eigval": True}])
def test_logits_of_flash_linear_attention_itself(options, tmp_path):
    delta_net = pytest.importorskip("fla.models.delta_net")
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_heads": 2}
    theirs = delta_net.DeltaNetForCausalLM(delta_net.DeltaNetConfig(**sizes, **options))
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").cuda().eval()
    ids = torch.randint(100, (2, 60), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        expected, got = theirs.cuda().eval()(ids).logits, ours(ids).logits
    assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**DELTA_NET, "qk_activation": "elu"}, ["qk_activation is elu"]),
        ({**DELTA_NET, "qk_activation": "identity"}, ["qk_activation is identity"]),
        ({**DELTA_NET, "qk_norm": "sum"}, ["qk_norm is sum"]),
        ({**DELTA_NET, "norm_eps": 1e-5}, ["norm_eps is 1e-05", "nearest"]),
        ({**DELTA_NET, "hidden_act": "powlu"}, ["hidden_act is powlu"]),
        ({**DELTA_NET, "attnres_block_size": 2}, ["attnres_block_size"]),
        ({**DELTA_NET, "attn": {**ATTENTION, "num_heads": 4}}, ["4 heads of 6", "2 of 12"]),
        ({**DELTA_NET, "attn": {**ATTENTION, "window_size": 64}}, ["window_size 64"]),
        ({**DELTA_NET, "attn": {**ATTENTION, "qkv_bias": True}}, ["qkv_bias"]),
        ({**LINEAR, "feature_map": "hedgehog"}, ["feature_map is hedgehog", "elu"]),
        ({**LINEAR, "norm_q": True}, ["norm_q is True"]),
        ({**LINEAR, "norm_feature_map": True}, ["norm_feature_map is True"]),
        (RETNET, ["rotates queries and keys", "nearest"]),
        (GATED, ["gate of its own", "nearest"]),
        ({"model_type": "mamba2"}, ["mamba2", "no MLP"]),
        ({"model_type": "gla"}, ["gla", "per key channel"]),
        ({"model_type": "t5"}, ["t5", "delta_net", "llama", "falcon_fast_weight"]),
        ({**DELTA_NET, "quantization_config": {"bits": 4}}, ["quantized"]),
    ],
)
def test_other_functions_are_refused_with_the_reason(config, words):
    problems = problems_of(config, {})
    assert len(problems) == 1
    assert all(word in problems[0] for word in words), problems


def test_several_reasons_are_all_said():
    assert len(problems_of({**DELTA_NET, "qk_norm": "sum", "hidden_act": "powlu", "attnres_block_size": 2}, {})) == 3


def test_retnet_is_the_nearest_start_but_for_its_rotation():
    tensors = fla_tensors(RETNET)
    new, result, plan = converted(RETNET, tensors, nearest=True)
    assert len(plan.lost) == 1
    ids = tokens(2, 30)
    with torch.no_grad():
        ours = model_of(new, result)(ids).logits
    theirs = fla_reference.logits(RETNET, tensors, ids)
    assert (ours - theirs).abs().max() < 1e-11 * theirs.abs().max()


def test_gated_deltanet_begins_with_the_decay_of_its_gate():
    tensors = fla_tensors(GATED)
    new, result, plan = converted(GATED, tensors, nearest=True)
    mixer = model_of(new, result).model.layers[1].linear_attn
    nothing = torch.zeros(1, 1, 24, dtype=torch.float64)
    decay = 1 - mixer._gain(nothing) * mixer._ridge(nothing)
    gate = tensors["model.layers.1.attn.A_log"].exp()
    gate = torch.exp(-gate * torch.nn.functional.softplus(tensors["model.layers.1.attn.dt_bias"]))
    torch.testing.assert_close(decay[0, 0], gate)
    assert {name.split(".")[-2] for name in plan.account().left} == {"a_proj"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rule": "falcon_3"}, "rule"),
        ({"alignment": "next_latent"}, "alignment"),
        ({"ridge": "direct"}, "ridge"),
        ({"qk_norm": "rms"}, "qk_norm"),
        ({"read_scale": 1.0}, "read_scale"),
        ({"step_size_max": 1.5}, "step_size_max"),
        ({"value_norm": "l2"}, "value_norm"),
        ({"timing": "read_before_write"}, "timing"),
        ({"conv_size": 0}, "conv_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"step_size_max": 2.0, "epsilon": 1e-6}, "epsilon"),
        ({"rms_norm_eps": 1e-5}, "norm_eps"),
    ],
)
def test_falcon_models_that_are_no_delta_net_are_refused(options, word):
    exact = {"rule": "falcon_1", "alignment": "same_step", "step_size": "direct", "step_size_max": 1.0}
    exact |= {"ridge": "none", "qk_norm": "l2", "read_scale": 8**-0.5, "epsilon": 0.0}
    model = tiny_model(**{**exact, **options})
    problems = problems_of(model.config.to_dict(), saved(model), to="fla")
    assert any(word in problem for problem in problems)


def test_a_gain_with_a_bias_is_no_delta_net():
    config, tensors, _ = converted(DELTA_NET, fla_tensors(DELTA_NET))
    tensors["model.layers.1.linear_attn.gain_bias"][0] = 0.1
    problems = problems_of(config, tensors, to="fla")
    assert problems == [
        "model.layers.1.linear_attn.gain_bias must be 0 everywhere for a delta_net model, which it is not."
    ]


TRANSFORMERS = {
    "llama": (LlamaConfig, {}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 8, "rms_norm_eps": 1e-5}),
    "biased": (LlamaConfig, {"attention_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "scaled": (
        LlamaConfig,
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 1], "pad_token_id": 0}),
}


def transformer(case: str, dtype=torch.float64):
    config_class, options = TRANSFORMERS[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**HEADS, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def saved(model) -> dict[str, torch.Tensor]:
    """What save_pretrained would write."""
    tied = model.config.tie_word_embeddings
    return {n: w.detach() for n, w in model.state_dict().items() if not (tied and n == "lm_head.weight")}


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_with_all_layers_kept_the_logits_are_those_of_the_source(case, tmp_path):
    source = transformer(case, torch.float32)
    source.save_pretrained(tmp_path / "source")
    account = convert(tmp_path / "source", tmp_path / "kept", keep_attention=range)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "kept").eval()
    ids = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source(ids).logits)
        assert torch.equal(
            model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None),
            source.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None),
        )
    assert account.lost == []
    assert set(account.made) <= {f"model.layers.{i}.self_attn.o_proj.bias" for i in range(2)}


@pytest.mark.parametrize("case", ["llama", "biased", "qwen2", "qwen3"])
def test_fast_weight_layers_take_the_projections_of_attention(case):
    source = transformer(case)
    tensors = saved(source)
    config, result, plan = converted(source.config.to_dict(), tensors, fields={"rule": "falcon_2"}, seed=3)
    model = model_of(config, result)
    assert model.config.rule == "falcon_2"
    assert model.config.conv_size == 0
    attention, mixer = source.model.layers[1].self_attn, model.model.layers[1].linear_attn
    shared = 4 // source.config.num_key_value_heads
    for head in range(4):
        size = mixer.head_dim
        rows, group = (slice(size * place, size * place + size) for place in (head, head // shared))
        assert torch.equal(mixer.q_proj.weight[rows], attention.q_proj.weight[rows])
        assert torch.equal(mixer.k_proj.weight[rows], attention.k_proj.weight[group])
        assert torch.equal(mixer.v_proj.weight[rows], attention.v_proj.weight[group])
    assert torch.equal(mixer.o_proj.weight, attention.o_proj.weight)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, source.model.layers[1].mlp.down_proj.weight)
    assert (mixer.o_norm.weight == 1).all()
    assert (mixer.gain_bias == 0).all()
    assert torch.equal(mixer.ridge_bias, initial_ridge_bias(model.config).double())
    assert mixer.gain_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert model(tokens(2, 9)).logits.isfinite().all()
    assert len(plan.lost) == (1 if case == "llama" else 2)
    again = converted(source.config.to_dict(), tensors, fields={"rule": "falcon_2"}, seed=3)[1]
    other = converted(source.config.to_dict(), tensors, fields={"rule": "falcon_2"}, seed=4)[1]
    assert same(again, result)
    assert not torch.equal(mixer.gain_proj.weight, model.model.layers[0].linear_attn.gain_proj.weight)
    differing = {name.split(".")[-2] for name in result if not torch.equal(other[name], result[name])}
    assert differing == {"gain_proj", "ridge_proj"}


def test_convolutions_begin_at_the_token_itself():
    source = transformer("llama")
    config, result, plan = converted(source.config.to_dict(), saved(source), fields={"conv_size": 3})
    mixer = model_of(config, result).model.layers[0].linear_attn
    x, window = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 2, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer.v_conv(x, window).flatten(2), torch.nn.functional.silu(x))
    assert any("SiLU" in sentence for sentence in plan.lost)


def test_a_hybrid_keeps_the_layers_that_were_chosen():
    source = transformer("qwen2")
    config, result, _ = converted(source.config.to_dict(), saved(source), keep_attention=[1])
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    layer = model_of(config, result).model.layers[1]
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    angles = source.model.rotary_emb(x, torch.arange(7)[None])
    kept = layer.self_attn(hidden_states=x, position_embeddings=angles, attention_mask=None)[0]
    assert torch.equal(kept, source.model.layers[1].self_attn(x, position_embeddings=angles, attention_mask=None)[0])


@pytest.mark.parametrize(
    ("kind", "options", "kept", "words"),
    [
        ("llama", {}, [0, 7], ["layer 7", "there are 2"]),
        ("llama", {"mlp_bias": True}, [], ["mlp_bias"]),
        ("mistral", {"sliding_window": 8}, [1], ["layer 1 is sliding_attention"]),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, [0, 1], ["layer 1 is sliding_attention"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, [0, 1], ["layer 1 does not rotate"]),
        ("llama", {"hidden_size": 25}, [], ["The hidden size (25)"]),
        ("llama", {"hidden_size": 32}, [], ["embed_tokens.weight has shape [40, 24]; its config needs [40, 32]"]),
    ],
)
def test_layers_that_cannot_be_kept_are_refused(kind, options, kept, words):
    tensors = saved(transformer("llama"))
    config = {**HEADS, "model_type": kind, **options}
    assert all(any(word in problem for problem in problems_of(config, tensors, keep_attention=kept)) for word in words)


def test_fields_that_do_not_fit_are_refused():
    source = transformer("llama")
    config, tensors = source.config.to_dict(), saved(source)
    assert "did you mean rule" in problems_of(config, tensors, fields={"rules": "falcon_1"})[0]
    assert "value_head_dim is 0" in problems_of(config, tensors, fields={"value_head_dim": 0})[0]
    wrong = problems_of(config, tensors, fields={"value_head_dim": 8})
    assert "model.layers.0.linear_attn.v_proj.weight would have shape [24, 24]; the new config needs [32, 24]." in wrong
    assert problems_of(config, tensors, fields={"hidden_act": "relu", "vocab_size": 7}) == [
        "hidden_act follows from the source and cannot be set.",
        "vocab_size follows from the source and cannot be set.",
    ]


@pytest.mark.parametrize("layout", ["nanogpt", "torchtitan"])
@pytest.mark.parametrize("case", ["falcon_1", "2-gate-values", "3a-hybrid", "biased", "tied"])
def test_layouts_of_training_code_there_and_back(layout, case):
    options = CASES.get(case, {"attention_bias": True, "layer_types": CASES["3a-hybrid"]["layer_types"]})
    model = tiny_model(**options, tie_word_embeddings=case == "tied")
    config, tensors = model.config.to_dict(), saved(model)
    theirs_config, theirs, plan = converted(config, tensors, to=layout)
    assert not theirs.keys() & {*tensors} - {"lm_head.weight"}
    joined = sum(len(piece.sources) > 1 for piece in plan.pieces)
    fast = model.config.layer_types.count("linear_attention")
    biases = 3 - fast if model.config.attention_bias else 0
    assert joined == (3 + 3 + biases if layout == "nanogpt" else 0)
    if layout == "nanogpt":
        parts = [tensors[f"model.layers.0.linear_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(theirs["transformer.h.0.attn.c_attn.weight"], torch.cat(parts))
    wrapped = {f"_orig_mod.module.{name.replace('layers.1.', 'layers.1._orig_mod.')}": w for name, w in theirs.items()}
    wrapped["module.freqs_cis"] = torch.zeros(3, dtype=torch.complex64)
    ours_config, ours, plan = converted(theirs_config, wrapped)
    assert same({name: ours[name] for name in tensors}, tensors)
    assert set(plan.left.values()) == {"a buffer that the model computes itself"}
    assert torch.equal(model_of(ours_config, ours)(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_our_own_names_with_those_of_wrappers_are_a_layout_too():
    model = tiny_model(rule="falcon_3", tie_word_embeddings=True)
    wrapped = {f"module._orig_mod.{name}": weight.detach() for name, weight in model.state_dict().items()}
    _, ours, plan = converted(model.config.to_dict(), wrapped)
    assert same(ours, saved(model))
    assert set(plan.left) == {"module._orig_mod.lm_head.weight"}


def test_wrong_names_in_training_code_are_one_sentence_each():
    model = tiny_model(rule="falcon_1")
    config, theirs, _ = converted(model.config.to_dict(), saved(model), to="nanogpt")
    theirs["transformer.h.0.attn.q_proj.weight"] = torch.zeros(16, 24, dtype=torch.float64)
    theirs["transformer.h.1.attn.wonder"] = torch.zeros(3)
    theirs["transformer.h.2.attn.c_attn.weight"] = torch.zeros(47, 24, dtype=torch.float64)
    del theirs["transformer.h.2.mlp.c_fc.weight"]
    problems = problems_of(config, theirs)
    assert sorted(problems) == [
        "model.layers.2.mlp.gate_proj.weight is missing, under whatever name.",
        "model.layers.2.mlp.up_proj.weight is missing, under whatever name.",
        "transformer.h.0.attn.q_proj.weight and transformer.h.0.attn.c_attn.weight are both there and are the same "
        "tensor.",
        "transformer.h.1.attn.wonder is no tensor of a falcon_fast_weight model with this config.",
        "transformer.h.2.attn.c_attn.weight has shape [47, 24]; its config needs [48, 24].",
    ]


class Trap:
    """A pickle that does something when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_files_of_training_code(tmp_path):
    model = tiny_model(torch.float32, rule="falcon_1")
    tensors = saved(model)
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    prefixed = {f"module.{name}": weight for name, weight in tensors.items()}
    save_file(prefixed, tmp_path / "one.safetensors")
    torch.save({"model": prefixed, "iter_num": 7, "optimizer": {"state": {}}}, tmp_path / "two.pt")
    torch.save(prefixed, tmp_path / "three.ckpt")
    for name in ("one.safetensors", "two.pt", "three.ckpt"):
        target = tmp_path / f"of {name}"
        convert(tmp_path / name, target)
        assert same(load_file(target / "model.safetensors"), tensors)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "two.pt", tmp_path / "elsewhere" / "two.pt")
    convert(tmp_path / "elsewhere" / "two.pt", tmp_path / "given", config=tmp_path / "config.json")
    with pytest.raises(ConversionError, match=r"config\.json does not exist"):
        convert(tmp_path / "elsewhere" / "two.pt", tmp_path / "not")


@pytest.mark.parametrize("kind", ["trap", "list", "cut", "name", "distributed"])
def test_files_that_are_not_tensors_are_refused(kind, tmp_path):
    (tmp_path / "config.json").write_text(tiny_model().config.to_json_string())
    path = tmp_path / "model.pt"
    if kind == "trap":
        torch.save({"model": Trap(tmp_path / "sprung")}, path)
    elif kind == "list":
        torch.save({"model": {"weight": [1, 2]}}, path)
    elif kind == "cut":
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"\x00" * 5)
    elif kind == "name":
        path = tmp_path / "model.bin"
        path.write_bytes(pickle.dumps({}))
    else:
        (tmp_path / ".metadata").write_bytes(b"")
        path = tmp_path
    with pytest.raises(ConversionError) as error:
        convert(path, tmp_path.parent / f"{tmp_path.name}-result")
    assert len(error.value.problems) == 1
    assert str(path) in str(error.value)
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path.parent / f"{tmp_path.name}-result").exists()


FAMILIES = [("falcon_1", "falcon_2"), ("falcon_1", "falcon_3"), ("falcon_1a", "falcon_2a"), ("falcon_1a", "falcon_3a")]
OPTIONS = {
    "default": {"value_head_dim": 5},
    "direct": {"step_size": "direct", "qk_norm": "l2", "ridge": "direct", "alignment": "same_step"},
    "hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "output_gate": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("before", "after"), FAMILIES)
def test_rules_of_a_family_are_the_same_function(before, after, options):
    model = tiny_model(rule=before, **OPTIONS[options])
    config, result, plan = converted(model.config.to_dict(), saved(model), to=after)
    other = model_of(config, result)
    assert other.config.rule == after
    ids, logits, losses = tokens(2, 20), [], []
    for one in (model, other):
        outputs = one(ids, labels=ids)
        outputs.loss.backward()
        logits.append(outputs.logits)
        losses.append(one.model.layers[0].linear_attn.k_proj.weight.grad)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
    assert plan.lost == []
    back, again, _ = converted(config, result, to=before)
    assert same(again, saved(model))
    original = FalconFastWeightConfig.from_dict(json.loads(model.config.to_json_string()))
    assert FalconFastWeightConfig.from_dict(back).rule_object == original.rule_object


def test_a_window_grows_from_one_pair(tmp_path):
    model = tiny_model(torch.float32, rule="falcon_1")
    model.save_pretrained(tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "three", "falcon_3")
    grown = FalconFastWeightForCausalLM.from_pretrained(tmp_path / "three", window_size=4)
    assert grown.config.rule_object.window == 4
    assert not torch.allclose(grown(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_rules_that_are_another_function_are_refused():
    model = tiny_model(rule="falcon_1")
    config, tensors = model.config.to_dict(), saved(model)
    assert "falcon_2 or falcon_3" in problems_of(config, tensors, to="falcon_1a")[0]
    window = tiny_model(rule="falcon_3", window_size=2)
    assert "window_size is 2" in problems_of(window.config.to_dict(), saved(window), to="falcon_1")[0]
    deep = tiny_model(rule="falcon_1", decay_floor=1e-3)
    assert "decay_floor" in problems_of(deep.config.to_dict(), saved(deep), to="falcon_2")[0]
    config, tied, _ = converted(config, tensors, to="falcon_2")
    tied["model.layers.2.linear_attn.gain_proj.weight"][0, 0] += 1
    problems = problems_of(config, tied, to="falcon_1")
    assert problems == [
        "model.layers.2.linear_attn.gain_proj.weight must be the same for all channels of a head, which it is not."
    ]
    assert all(target in TARGETS for target in RULES)
    assert "falcon_9" in problems_of(config, tied, to="falcon_9")[0]
    assert "goes a falcon_fast_weight" in problems_of(DELTA_NET, {}, to="falcon_3")[0]


def sources() -> dict[str, tuple[dict, dict, dict]]:
    """A checkpoint for every kind of conversion: config, tensors, options."""
    falcon = tiny_model(torch.float32, rule="falcon_1")
    delta_net = converted(DELTA_NET, fla_tensors(DELTA_NET, torch.float32))
    config = falcon.config.to_dict()
    llama = transformer("llama", torch.float32)
    return {
        "fla": (DELTA_NET, fla_tensors(DELTA_NET, torch.float32), {}),
        "to-fla": (*delta_net[:2], {"to": "fla"}),
        "llama": (llama.config.to_dict(), saved(llama), {"keep_attention": [0]}),
        "training": (config, converted(config, saved(falcon), to="nanogpt")[1], {}),
        "to-training": (config, saved(falcon), {"to": "torchtitan"}),
        "rule": (config, saved(falcon), {"to": "falcon_2"}),
    }


def write(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", sources())
def test_every_wrong_tensor_is_one_sentence_and_nothing_is_written(kind, tmp_path):
    config, tensors, options = sources()[kind]
    names = sorted(name for name in tensors if tensors[name].dim() == 2 and re.search(r"(layers|h)\.1", name))
    broken = dict(tensors)
    del broken[names[0]]
    broken["of.another"] = torch.zeros(2)
    broken[names[1]] = broken[names[1]][:-1]
    broken[names[2]] = broken[names[2]].to(torch.int8)
    with pytest.raises(ConversionError) as error:
        convert(write(tmp_path / "a", config, broken), tmp_path / "result", **options)
    problems = error.value.problems
    for name in ("of.another", *names[1:3]):
        assert len([problem for problem in problems if problem.startswith(name)]) == 1, problems
    if kind != "training":  # where what is missing has several names
        assert f"{names[0]} is missing." in problems
        assert len(problems) == 4
    for value in (math.nan, math.inf):
        broken = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in names[:2]:
            broken[name].view(-1)[-1] = value
        with pytest.raises(ConversionError) as error:
            convert(write(tmp_path / f"b{value}", config, broken), tmp_path / "result", **options, max_shard_bytes=4000)
        assert error.value.problems == [f"{name} has values that are not finite." for name in names[:2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "binf", "bnan"]


@pytest.mark.parametrize("kind", sources())
def test_shards_in_and_out(kind, tmp_path):
    config, tensors, options = sources()[kind]
    whole = write(tmp_path / "whole", config, tensors)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shutil.copy(whole / "config.json", sharded)
    names = sorted(tensors)
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    seen = []
    convert(whole, tmp_path / "one", **options)
    convert(sharded, tmp_path / "many", **options, max_shard_bytes=6000, progress=lambda *step: seen.append(step))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {file.name for file in files}
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(parts, load_file(tmp_path / "one" / "model.safetensors"))
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.element_size() for tensor in parts.values())
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 6000
    assert [name for name, _, _ in seen] == list(index["weight_map"]) or len(seen) == len(parts)
    assert seen[-1][1] == seen[-1][2] == index["metadata"]["total_size"]


@pytest.mark.parametrize("kind", sources())
def test_no_more_than_a_shard_lies_in_memory(kind, tmp_path, monkeypatch):
    """Bytes of the tensors that were read or made and are still alive, whenever another is read."""
    config, tensors, options = sources()[kind]
    alive: dict[int, int] = {}
    most = [0]

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = id(storage)
        alive[key] = storage.nbytes()
        weakref.finalize(storage, alive.pop, key)
        tensor._storage_kept = storage  # the finalizer is that of the wrapper, which lives as long as its tensor
        most[0] = max(most[0], sum(alive.values()))
        return tensor

    real = folders.Checkpoint.__init__

    def watched(self, config, meta, load):
        real(self, config, meta, lambda name: watch(load(name)))

    monkeypatch.setattr(folders.Checkpoint, "__init__", watched)
    shard = 6000
    convert(write(tmp_path / "a", config, tensors), tmp_path / "b", **options, max_shard_bytes=shard)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    largest = max(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert 0 < most[0] <= shard + 3 * largest < total


def test_a_result_is_a_whole_checkpoint(checkpoint, tmp_path):
    """With tokenizer and code, which loads by the Auto classes and can be published; the source stays as it was."""
    model = transformer("llama", torch.float32)
    source = tmp_path / "source"
    model.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, source / name)
    (source / "optimizer.pt").write_bytes(b"large")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert(source, tmp_path / "deep" / "result")
    result = tmp_path / "deep" / "result"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not (result / "optimizer.pt").exists()
    assert {"generation_config.json", "modeling_falcon_fast_weight.py"} <= {path.name for path in result.iterdir()}
    assert json.loads((result / "config.json").read_text())["auto_map"]
    assert AutoTokenizer.from_pretrained(result)("A pointer").input_ids
    (result / "README.md").write_text(write_card(result, "me/model", "mit"))
    check_checkpoint(result)
    loaded = AutoModelForCausalLM.from_pretrained(result)
    assert loaded.dtype == torch.float32
    assert loaded.generate(tokens(1, 5), max_new_tokens=3).shape[1] > 5


def test_nothing_stays_behind_when_the_disk_is_full(tmp_path, monkeypatch):
    config, tensors, options = sources()["fla"]
    source = write(tmp_path / "source", config, tensors)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "new" / "folders" / "result", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_plan_alone_writes_nothing(tmp_path):
    config, tensors, options = sources()["llama"]
    source = write(tmp_path / "source", config, tensors)
    account = convert(source, None, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert account == convert(source, tmp_path / "result", **options)


def fails(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert re.match(r"falcon-hf: ", err), err
    assert all(word in err for word in words), err


def test_the_command(call, tmp_path):
    config, tensors, _ = sources()["llama"]
    source = write(tmp_path / "source", config, tensors)
    code, out, err = call(
        *("convert", source, tmp_path / "result", "--keep-attention", "every:2", "--set", "rule=falcon_1"),
        *("--set", "conv_size=2", "--max-shard-size", "10KB", "--account", tmp_path / "account.json", "--seed", 5),
    )
    assert (code, err) == (0, f"29 tensors written in {tmp_path / 'result'}\n"), err
    assert "1 of 2 layers of attention are fast weights" in out
    assert "each head 2 times" in out
    account = json.loads((tmp_path / "account.json").read_text())
    assert set(account["taken"]) == tensors.keys()
    made = FalconFastWeightConfig.from_pretrained(tmp_path / "result")
    assert (made.rule, made.conv_size, made.layer_types) == ("falcon_1", 2, ["full_attention", "linear_attention"])
    assert len(list((tmp_path / "result").glob("*.safetensors"))) > 1
    code, out, err = call("convert", tmp_path / "result", "--to", "falcon_2")
    assert (code, err) == (0, "")
    assert "The same function as its source." in out


def test_wrong_options_of_the_command(call, tmp_path):
    config, tensors, _ = sources()["llama"]
    source = write(tmp_path / "source", config, tensors)
    fails(call("convert", source, tmp_path), "OUTPUT", "there already")
    fails(call("convert", tmp_path / "none", tmp_path / "b"), "does not exist")
    fails(call("convert", source, tmp_path / "b", "--to", "gpt"), "'gpt'", "falcon_2", "torchtitan")
    fails(call("convert", source, tmp_path / "b", "--keep-attention", "some"), "--keep-attention is 'some'", "every:4")
    fails(call("convert", source, tmp_path / "b", "--keep-attention", "0,9"), "layer 9")
    fails(call("convert", source, tmp_path / "b", "--set", "rule"), "--set is 'rule'", "FIELD=VALUE")
    fails(call("convert", source, tmp_path / "b", "--set", "rule=falcon_9"), "falcon_9", "falcon_3a")
    fails(call("convert", source, tmp_path / "b", "--max-shard-size", "big"), "--max-shard-size is 'big'", "5GB")
    fails(call("convert", source, tmp_path / "b", "--account", source / "config.json"), "--account", "there already")
    tensors["of.another"], tensors["and.another"] = torch.zeros(1), torch.zeros(1)
    broken = write(tmp_path / "broken", config, tensors)
    result = call("convert", broken, tmp_path / "b")
    fails(result, "of.another is no tensor", "and.another is no tensor", "nothing was written")
    assert len(result[2].splitlines()) == 3
    (source / "config.json").write_text("{")
    fails(call("convert", source, tmp_path / "b"), "config.json is no config")
    assert not (tmp_path / "b").exists()
