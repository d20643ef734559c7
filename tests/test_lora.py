"""LoRA through peft: which layers it adapts, a trained adapter merged, saved, loaded and generated with."""

import pytest
import torch
from test_training import rows, trainer
from tiny_models import CASES, HYBRID, RULES, tiny_model, tokens
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

peft = pytest.importorskip("peft", reason="peft is not installed")

FAST_WEIGHTS = {"q_proj", "k_proj", "v_proj", "gain_proj", "ridge_proj", "g_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LORA_CASES = {**{rule: CASES[rule] for rule in RULES}, "hybrid": {"layer_types": HYBRID, "output_gate": True}}


def lora(model, **options):
    options = {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def test_all_linear_means_every_projection_and_not_the_head():
    options = {"layer_types": HYBRID, "output_gate": True}
    adapted = lora(tiny_model(**options)).targeted_module_names
    assert {name.split(".")[-1] for name in adapted if "linear_attn" in name} == FAST_WEIGHTS
    assert {name.split(".")[-1] for name in adapted if "mlp" in name} == MLP
    assert {name.split(".")[-1] for name in adapted if "self_attn" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(adapted) == 2 * len(FAST_WEIGHTS) + 4 + 3 * len(MLP)
    by_name = lora(tiny_model(**options), target_modules=[*FAST_WEIGHTS, *MLP]).targeted_module_names
    assert set(by_name) == set(adapted)


@pytest.mark.parametrize("case", LORA_CASES)
def test_an_adapter_is_trained_merged_saved_loaded_and_generated_with(case, tmp_path):
    base = tmp_path / "base"
    tiny_model(torch.float32, **LORA_CASES[case]).save_pretrained(base)
    model = lora(AutoModelForCausalLM.from_pretrained(base))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    run = trainer(tmp_path, model=model, data=rows(4), max_steps=3, gradient_checkpointing=True)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) == ("lora_" not in name), name

    ids = tokens(2, 7)
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        text = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        loaded = [
            peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"),
            peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        ]
        for again in loaded:
            assert torch.equal(again.eval()(input_ids=ids).logits, adapted)
            assert torch.equal(again.generate(input_ids=ids, max_new_tokens=5, do_sample=False), text)

        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=0, atol=2e-4)  # 3e-5 was measured
        merged.save_pretrained(tmp_path / "merged")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(whole(ids).logits, merged(ids).logits)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, adapted, atol=1e-2)


def test_an_adapter_is_trained_on_weights_of_four_bits(tmp_path):
    """QLoRA, as examples/README.md says it."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    base = tmp_path / "base"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}
    tiny_model(torch.float32, **sizes).save_pretrained(base)
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "gain_proj", "ridge_proj"],
    )
    options = {"quantization_config": quantized, "device_map": DEVICE, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE)
    narrow = {name: part for name, part in model.named_modules() if isinstance(part, bnb.nn.Linear4bit)}
    assert {name.split(".")[-1] for name in narrow} == FAST_WEIGHTS - {"gain_proj", "ridge_proj", "g_proj"} | MLP
    for name, part in narrow.items():
        weight = bnb.functional.dequantize_4bit(part.weight.data, part.weight.quant_state)
        plain.get_submodule(name).weight.data.copy_(weight)

    ids = tokens(2, 7).to(DEVICE)
    have, want = (each.train()(ids).logits for each in (model, plain))  # in evaluation, bitsandbytes rounds on the CPU
    torch.testing.assert_close(have, want, rtol=0, atol=2e-4)
    model = lora(peft.prepare_model_for_kbit_training(model))
    run = trainer(
        tmp_path, model=model, data=rows(4), max_steps=4, gradient_checkpointing=True, use_cpu=DEVICE == "cpu"
    )
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        again = AutoModelForCausalLM.from_pretrained(base, **options)
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
        torch.testing.assert_close(again.eval()(input_ids=ids).logits, adapted, rtol=0, atol=1e-5)
        again.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
