"""Checkpoints return what was saved, survive an interrupted save, and are refused when they do not fit."""

import json

import pytest
import torch
import transformers.modeling_utils
from safetensors.torch import load_file, save_file
from tiny_models import CASES, tiny_model, tokens
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from falcon_hf import (
    FalconFastWeightForCausalLM,
    FalconFastWeightForSequenceClassification,
    FalconFastWeightForTokenClassification,
    FalconFastWeightModel,
)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_logits_return_exactly(case, dtype, tmp_path):
    model, ids = tiny_model(dtype, **CASES[case]), tokens(1, 5)
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is FalconFastWeightForCausalLM
    assert read.dtype == dtype
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, read.state_dict()[name]), name
    if dtype == torch.float32 or "layer_types" not in CASES[case]:  # Module.to rounds rotary frequencies to bfloat16
        with torch.no_grad():
            assert torch.equal(model(ids).logits, read.eval()(ids).logits)
    assert read.lm_head.weight is read.model.embed_tokens.weight


def test_sharded_and_whole_checkpoints_replace_one_another(tmp_path):
    first, second, third = (tiny_model(torch.float32, seed=seed) for seed in range(3))
    first.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    second.save_pretrained(tmp_path, max_shard_size="8KB")
    assert "model.safetensors" not in files(tmp_path)
    assert "model.safetensors.index.json" in files(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read.model.embed_tokens.weight, second.model.embed_tokens.weight)
    third.save_pretrained(tmp_path)
    others = [name for name in files(tmp_path) if not name.endswith(".py")]
    assert others == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read.model.embed_tokens.weight, third.model.embed_tokens.weight)


def test_a_variant_is_saved_beside_the_main_weights(tmp_path):
    main, variant = tiny_model(torch.float32, seed=0), tiny_model(torch.float32, seed=1)
    main.save_pretrained(tmp_path)
    variant.save_pretrained(tmp_path, variant="ema")
    for model, name in ((main, None), (variant, "ema")):
        read = AutoModelForCausalLM.from_pretrained(tmp_path, variant=name)
        assert torch.equal(read.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("shards_written", [0, 2])
def test_an_interrupted_save_leaves_the_old_checkpoint(shards_written, tmp_path, monkeypatch):
    old = tiny_model(torch.float32, seed=0)
    old.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    written = []

    def full_disk(tensors, path, *args, **kwargs):
        if len(written) == shards_written:
            raise OSError("No space left on device")
        written.append(path)
        save_file(tensors, path, *args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        tiny_model(torch.float32, seed=1, rule="falcon_1").save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert len(written) == shards_written
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert files(tmp_path) == ["model"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(read.model.embed_tokens.weight, old.model.embed_tokens.weight)


def test_missing_weights_are_an_error(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.linear_attn.ridge_bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for auto in (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=r"lacks (model\.)?layers\.1\.linear_attn\.ridge_bias, which Falcon"):
            auto.from_pretrained(tmp_path)


def test_unexpected_weights_are_an_error(tmp_path):
    tiny_model(torch.float32, rule="falcon_1").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.linear_attn\.ridge_bias, .* and 3 more, which Falcon"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ridge="none")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.extra": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has model\.extra, which FalconFastWeightForCausalLM with this config does"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loading_information_is_still_returned_on_request(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    model, info = FalconFastWeightForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, FalconFastWeightForCausalLM)
    assert not info["missing_keys"]


@pytest.mark.parametrize("model_class", [FalconFastWeightModel, FalconFastWeightForCausalLM])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_takes_a_new_head(model_class, tied, tmp_path):
    base = tiny_model(torch.float32, model_class=model_class, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    trunk = getattr(base, "model", base)
    for head_class in (FalconFastWeightForSequenceClassification, FalconFastWeightForTokenClassification):
        model = head_class.from_pretrained(tmp_path / "base", num_labels=3)
        assert model.score.weight.shape == (3, 24)
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, trunk.layers[0].mlp.up_proj.weight)
        assert model(tokens(1, 4)).logits.shape[-1] == 3
        model.save_pretrained(tmp_path / "head")
        again = head_class.from_pretrained(tmp_path / "head")
        assert torch.equal(again.score.weight, model.score.weight)
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "head").norm.weight, trunk.norm.weight)


def test_a_checkpoint_that_claims_a_head_must_have_it(tmp_path):
    tiny_model(torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    architectures = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architectures == ["FalconFastWeightForCausalLM"]


def test_a_pickle_is_refused(tmp_path):
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
