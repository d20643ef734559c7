"""The loss without all logits: the same losses, gradients and training as with them, and what it refuses."""

import sys

import interpreter
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.fused_loss import fuse_loss

interpreter.require()
pytest.importorskip("liger_kernel")


def pair(**options):
    """Two models with the same weights, the second with the fused loss."""
    models = [tiny_model(torch.float32, **options).train() for _ in range(2)]
    fuse_loss(models[1])
    return models


def loss_and_gradients(model, **inputs):
    loss = model(**inputs).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, {}),
        ({"tie_word_embeddings": False}, {}),
        ({}, {"num_items_in_batch": torch.tensor(7)}),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 5, 13])}),
        ({}, {"shift_labels": tokens(1, 13, seed=5)}),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_loss(options, inputs):
    ids = tokens(1, 13)
    labels = ids.clone()
    labels[:, ::4] = -100
    plain, fused = (loss_and_gradients(m, input_ids=ids, labels=labels, **inputs) for m in pair(**options))
    for ours, theirs in zip(fused, plain, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert fused[0] > 0


def test_a_vocabulary_made_up_to_whole_16_bytes_changes_nothing(monkeypatch):
    ids, found = tokens(1, 13), []
    for missing in (0, 5):
        monkeypatch.setattr("falcon_hf.fused_loss.missing_rows", lambda weight, x, missing=missing: missing)
        found.append(loss_and_gradients(pair()[1], input_ids=ids, labels=ids))
    for made_up, usual in zip(*found, strict=True):
        assert (made_up - usual).norm() <= 1e-5 * usual.norm()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 4}, {"label_smoothing_factor": 0.1}])
def test_it_trains_as_the_plain_loss_does(options, tmp_path):
    """Also with batches in parts of unequal numbers of tokens, and with smoothed labels."""
    data = []
    for i in range(8):
        ids = tokens(12, seed=i)
        data.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) > 3 + 2 * (i % 4), -100)})
    curves = []
    for model in pair():
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4 // options.get("gradient_accumulation_steps", 1),
            max_steps=2,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        curves.append(torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in logs]))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-5, atol=0)
    assert len(curves[0]) == 2


def test_logits_are_left_out_where_the_loss_is_asked_for_in_training_only():
    ids = tokens(2, 9)
    plain, fused = pair()
    assert fused(input_ids=ids, labels=ids).logits is None
    assert torch.equal(fused(input_ids=ids).logits, plain(input_ids=ids).logits)
    plain.eval(), fused.eval()
    out = fused(input_ids=ids, labels=ids)
    assert torch.equal(out.logits, plain(input_ids=ids).logits)
    assert torch.equal(out.loss, plain(input_ids=ids, labels=ids).loss)


def test_what_it_cannot_work_with_is_refused(monkeypatch):
    ids = tokens(1, 9)
    model = tiny_model(torch.float32, tie_word_embeddings=False).train()
    fuse_loss(model)
    with pytest.raises(ValueError, match="logits are kept of"):
        model(input_ids=ids, labels=ids, logits_to_keep=3)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="needs a linear layer whose weight is whole"):
        adapted(input_ids=ids, labels=ids)
    with pytest.raises(TypeError, match="model is a PeftModel; it must be"):
        fuse_loss(adapted)
    with pytest.raises(TypeError, match="model is a LlamaForCausalLM; it must be"):
        fuse_loss(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=8)))
    monkeypatch.setattr("falcon_kernels.triton_device.INTERPRETED", False)
    with pytest.raises(ValueError, match="the fused loss needs a GPU"):
        model(input_ids=ids, labels=ids)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match="pip install"):
        fuse_loss(tiny_model())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_vocabulary_on_a_gpu():
    """bfloat16 autocast, 50,257 entries: near the plain loss, and in less memory than the logits alone take."""
    config = FalconFastWeightConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=1, intermediate_size=128)
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (8, 1024), device="cuda")
    weights, results, peaks = None, [], []
    for fused in (False, True):
        model = FalconFastWeightForCausalLM(config).cuda().train()
        weights = model.state_dict() if weights is None else weights
        model.load_state_dict(weights)
        if fused:
            fuse_loss(model)
        for _ in range(2):  # the second time with everything compiled
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            peak = torch.cuda.max_memory_allocated() - before
        results.append((loss, gradients))
        peaks.append(peak)
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=0)
    for name, plain, ours in zip(dict(model.named_parameters()), results[0][1], results[1][1], strict=True):
        assert (ours - plain).norm() < 0.02 * plain.norm(), name
    assert peaks[1] < ids.numel() * config.vocab_size * 4 < peaks[0]
