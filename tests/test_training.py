"""Trainer: accumulation, precision, recomputation, resuming, perplexity, compilation, label smoothing, first NaNs."""

import math

import pytest
import torch
from tiny_models import CASES, RULES, tiny_config, tiny_model, tokens
from transformers import Trainer, TrainingArguments

from falcon_hf import FalconFastWeightForCausalLM
from falcon_hf.finite import StopAtNonFinite

ALL = [*RULES, "3a-hybrid"]


def rows(count, lengths=(11, 5, 8, 3)):
    """Token rows padded with -100 labels, of unequal lengths: a mean of their means is not their mean."""
    examples = []
    for i in range(count):
        length = lengths[i % len(lengths)]
        ids = tokens(12, seed=i)
        present = (torch.arange(12) < length).long()
        examples.append(
            {"input_ids": ids * present, "attention_mask": present, "labels": ids.masked_fill(present == 0, -100)}
        )
    return examples


def trainer(folder, case="falcon_3a", *, dtype=torch.float64, data=None, model=None, **options):
    """A Trainer that logs each of its two steps of four rows, with what options say otherwise."""
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    model = tiny_model(dtype, **CASES[case]) if model is None else model
    data = rows(16) if data is None else data
    extra = {name: options.pop(name) for name in ("callbacks", "data_collator") if name in options}
    arguments = TrainingArguments(output_dir=str(folder), **(defaults | options))
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, **extra)


def curve(trained):
    """[steps, 2] losses and gradient norms."""
    logs = [entry for entry in trained.state.log_history if "loss" in entry]
    return torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in logs])


def train(folder, *args, resume=None, **options):
    run = trainer(folder, *args, **options)
    run.train(resume_from_checkpoint=resume)
    return curve(run)


@pytest.mark.parametrize("case", ALL)
def test_a_batch_in_parts_and_recomputed_trains_as_in_one_pass(case, tmp_path):
    whole = train(tmp_path, case)
    parts = train(tmp_path, case, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=0)  # losses are float32
    recomputed = train(tmp_path, case, gradient_checkpointing=True)
    torch.testing.assert_close(recomputed, whole, rtol=1e-5, atol=0)
    assert len(whole) == 2


@pytest.mark.parametrize("case", ALL)
def test_bfloat16_autocast_trains_near_float32(case, tmp_path):
    curves = []
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = FalconFastWeightForCausalLM(tiny_config(**CASES[case]))
        curves.append(train(tmp_path, model=model, bf16=bf16, max_steps=3, learning_rate=1e-3))
    exact, rounded = curves
    assert not torch.equal(rounded, exact)
    # Steps of Adam take rounded signs of gradients near zero for full ones: only the first norms can be compared.
    torch.testing.assert_close(rounded[:, 0], exact[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(rounded[0, 1], exact[0, 1], rtol=0.05, atol=0)


@pytest.mark.parametrize("case", ["falcon_1", "3a-hybrid"])
def test_a_resumed_run_goes_on_with_the_same_losses(case, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 1, "dtype": torch.float32}
    options["train_sampling_strategy"] = "random"
    whole = train(tmp_path, case, **options)
    resumed = train(tmp_path, case, resume=str(tmp_path / "checkpoint-2"), **options)
    assert torch.equal(resumed, whole)


def test_evaluation_gives_the_perplexity(tmp_path):
    data = [{"input_ids": (ids := tokens(9, seed=i)), "labels": ids} for i in range(5)]
    run = trainer(tmp_path, data=data, per_device_eval_batch_size=2)
    loss = run.evaluate()["eval_loss"]
    with torch.no_grad():
        ids = torch.stack([example["input_ids"] for example in data])
        logits = run.model.eval()(ids).logits[:, :-1].log_softmax(-1)
    by_hand = -logits.gather(-1, ids[:, 1:, None]).mean()
    assert math.exp(loss) == pytest.approx(math.exp(by_hand), rel=1e-5)


@pytest.mark.parametrize("case", ["falcon_1", "3a-hybrid"])
def test_a_compiled_model_trains_alike(case, tmp_path):
    data = [{"input_ids": (ids := tokens(9, seed=i)), "labels": ids} for i in range(8)]
    plain = train(tmp_path, case, data=data)
    torch.compiler.reset()
    compiled = train(tmp_path, case, data=data, torch_compile=True, torch_compile_backend="aot_eager")
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)


def test_smoothed_labels_are_those_of_the_next_tokens(tmp_path):
    data = rows(4)
    labels = torch.stack([example["labels"] for example in data])[:, 1:]
    batch = {name: torch.stack([example[name] for example in data]) for name in ("input_ids", "attention_mask")}
    model = tiny_model()
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].log_softmax(-1)
    learnt = labels != -100
    nll = -logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    smoothed = (0.9 * nll - 0.1 * logits.mean(-1))[learnt].sum()
    run = train(tmp_path, data=data, model=model, label_smoothing_factor=0.1, max_steps=1)
    assert run[0, 0].item() == pytest.approx((smoothed / learnt.sum()).item(), rel=1e-5)
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
    in_parts = train(tmp_path, data=data, label_smoothing_factor=0.1, **parts)
    torch.testing.assert_close(in_parts, run, rtol=1e-5, atol=0)


class NonFiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


@pytest.mark.parametrize("recompute", [False, True])
def test_the_module_with_the_first_nan_is_named(recompute, tmp_path):
    options = {"callbacks": [StopAtNonFinite()], "gradient_checkpointing": recompute}
    healthy = train(tmp_path, **options)
    assert torch.equal(healthy, train(tmp_path, gradient_checkpointing=recompute))

    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].linear_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"output of model\.layers\.1\.linear_attn\.v_proj is not .* step 1"):
        train(tmp_path, model=model, **options)

    model = tiny_model()
    mlp = model.model.layers[1].mlp
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: NonFiniteGradient.apply(*inputs))
    with pytest.raises(FloatingPointError, match=r"gradient at the output of model\.layers\.1\.mlp\.up_proj is not"):
        train(tmp_path, model=model, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_first_nan_of_a_step_on_a_gpu_is_named_before_the_weights_change(accumulated, tmp_path):
    options = {"callbacks": [StopAtNonFinite()], "use_cpu": False, "dtype": torch.float32}
    options |= {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    assert train(tmp_path, **options).isfinite().all()
    model = tiny_model(torch.float32)
    with torch.no_grad():
        model.model.layers[1].linear_attn.v_proj.weight[0, 0] = float("nan")
    other = model.model.layers[1].mlp.up_proj.weight.clone()
    with pytest.raises(FloatingPointError, match=r"output of model\.layers\.1\.linear_attn\.v_proj is not .* step 1"):
        train(tmp_path, model=model, **options)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight.cpu(), other)


@pytest.mark.parametrize("option", ["torch_compile", "fp16"])
def test_the_watch_for_nans_refuses_what_it_cannot_work_with(option, tmp_path):
    run = trainer(tmp_path)
    setattr(run.args, option, True)
    with pytest.raises(ValueError, match=f"{option} is True, but StopAtNonFinite works without it"):
        StopAtNonFinite().on_train_begin(run.args, run.state, run.control, run.model)
