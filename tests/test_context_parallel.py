"""One sequence over several processes gives what one process gives, forwards and backwards."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import INPUTS, VARIANTS, assert_same, assert_same_state, make_inputs
from falcon_kernels import Rule, falcon_attention
from falcon_kernels.layers import FalconAttention
from falcon_kernels.ranks import falcon_attention_over_ranks, from_left
from processes import failures, on_ranks
from tiny_models import CASES, tiny_model, tokens
from torch.nn.parallel import DistributedDataParallel

from falcon_hf import (
    FalconFastWeightAttention,
    FalconFastWeightForSequenceClassification,
    FalconFastWeightForTokenClassification,
    falcon_cache,
)
from falcon_hf.context_parallel import context_parallel, own_part

RANKS = 3
LENGTHS = {"even": (21, 21, 21), "uneven": (70, 11, 16)}
WAYS = {"hand-over": False, "scan": True}


def kernel_cases():
    """Each variant of a rule both ways; parts of equal lengths for the six rules themselves too."""
    return [
        f"{variant} {way} {lengths}"
        for variant, rule in VARIANTS.items()
        for way in WAYS
        for lengths in LENGTHS
        if not (way == "scan" and rule.name == "falcon_2") and (lengths == "uneven" or variant == rule.name)
    ]


def same_attention(case, dtype, forward, gradient):
    """Output, state and gradients of this rank beside those of its part of the whole."""
    variant, way, lengths = case.split()
    rule, parts = VARIANTS[variant], LENGTHS[lengths]
    rank = dist.get_rank()
    start, end = sum(parts[:rank]), sum(parts[: rank + 1])
    whole = make_inputs(rule, T=sum(parts), decay=0.3, requires_grad=True)
    mine = {n: None if t is None else t.detach()[:, start:end].to(dtype).requires_grad_() for n, t in whole.items()}
    cotangent = torch.randn(whole["v"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    want = falcon_attention(*(whole[n] for n in INPUTS), rule=rule, output_final_state=True)
    want.output.backward(cotangent)
    before = falcon_attention(
        *(None if t is None else t[:, :end] for t in whole.values()), rule=rule, output_final_state=True
    ).final_state
    have = falcon_attention_over_ranks(*(mine[n] for n in INPUTS), rule=rule, scan=WAYS[way], output_final_state=True)
    have.output.backward(cotangent[:, start:end].to(dtype))
    assert_same(have.output, want.output[:, start:end], forward, "output")
    assert_same_state(have.final_state, before, forward)
    for name, t in mine.items():
        if t is not None:
            assert_same(t.grad, whole[name].grad[:, start:end], gradient, f"gradient of {name}")


def refused(message, function, *args, **options):
    with pytest.raises(ValueError, match=message):
        function(*args, **options)


def check_kernels():
    checks = {case: partial(same_attention, case, torch.float64, 1e-12, 1e-11) for case in kernel_cases()}
    for case in (f"{rule} {way} uneven" for rule in ("falcon_1", "falcon_3a") for way in WAYS):
        checks[f"float32 {case}"] = partial(same_attention, case, torch.float32, 3e-6, 2e-5)
    short = make_inputs(Rule("falcon_3"), T=3)
    checks["too short"] = partial(
        refused, "k has 3 tokens on this rank; it must have at least 4", falcon_attention_over_ranks,
        *short.values(), rule=Rule("falcon_3"),
    )  # fmt: skip
    rule = Rule("falcon_2")
    checks["no scan"] = partial(
        refused, "scan is True, but falcon_2 has one map", falcon_attention_over_ranks,
        *make_inputs(rule).values(), rule=rule, scan=True,
    )  # fmt: skip
    return failures(checks)


MODELS = [case for case in CASES if case not in ("3a-hybrid", "2-attention-first")]


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same_model(case, way=None, recompute=False, wrapped=False):
    """Logits, loss and gradients over ranks beside those of one process, of rows with places that are not learnt."""
    ids = tokens(2, 50)
    labels = ids.clone()
    labels[0, :20] = labels[1, 45:] = -100  # as many on no two ranks
    model = tiny_model(**CASES[case])
    want = model(input_ids=ids, labels=labels)
    want.loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    if recompute:
        model.gradient_checkpointing_enable()
        model.train()
    outer = DistributedDataParallel(model) if wrapped else model
    with context_parallel(outer, scan=way):
        have = outer(input_ids=own_part(ids), labels=own_part(labels), attention_mask=own_part(torch.ones_like(ids)))
        have.loss.backward()
    assert_same(have.logits, own_part(want.logits), 1e-11, "logits")
    assert_same(have.loss, want.loss, 1e-6, "loss")  # a float32
    for name, parameter in model.named_parameters():
        if not wrapped:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        assert_same(parameter.grad, expected[name], 2e-6, f"gradient of {name}")  # from a float32


def same_with_what_a_trainer_gives():
    """shift_labels and position_ids as parts of the whole, and the number of learnt tokens: this rank's share."""
    ids, model = tokens(2, 50), tiny_model()
    whole = model(input_ids=ids, labels=ids).loss
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    given = {"input_ids": ids, "labels": ids, "shift_labels": shifted, "position_ids": torch.arange(50).expand(2, -1)}
    parts = {name: own_part(t) for name, t in given.items()}
    with context_parallel(model):
        mean = model(**parts).loss
        share = model(**parts, num_items_in_batch=98).loss
    assert_same(mean, whole, 1e-6)
    dist.all_reduce(share.data)
    assert_same(share, whole, 1e-6)


def same_mixer():
    mixer = next(m for m in tiny_model().modules() if isinstance(m, FalconFastWeightAttention))
    x = torch.randn(2, 50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with context_parallel(mixer):
        have = mixer(own_part(x))
    assert_same(have, own_part(mixer(x)), 1e-11)


def head_and_loss(hidden_states, head, labels, num_items_in_batch, shift_labels):
    """As the fused loss is called, which needs a GPU."""
    assert labels.shape == shift_labels.shape
    logits = head(hidden_states).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / num_items_in_batch


def same_with_a_fused_loss():
    ids, model = tokens(2, 50), tiny_model()
    want = model(input_ids=ids, labels=ids).loss
    want.backward()
    expected = gradients_of(model)
    model.zero_grad()
    model.fused_loss = head_and_loss
    with context_parallel(model.train()):
        have = model(input_ids=own_part(ids), labels=own_part(ids))
        have.loss.backward()
    assert have.logits is None
    assert_same(have.loss, want, 1e-6)
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert_same(parameter.grad / RANKS, expected[name], 2e-6, f"gradient of {name}")
    assert model.fused_loss is head_and_loss


def nothing_stays():
    model, ids = tiny_model(), tokens(1, 20)
    modules, names = list(model.modules()), set(vars(model))
    before = model(input_ids=ids, labels=ids).loss
    with context_parallel(model):
        assert not any(isinstance(module, FalconAttention) for module in model.modules())
    with pytest.raises(ZeroDivisionError), context_parallel(model):
        raise ZeroDivisionError
    assert list(map(id, model.modules())) == list(map(id, modules))
    assert set(vars(model)) == names
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)


def check_models():
    checks = {f"{case}": partial(same_model, case) for case in MODELS}
    for case in ("falcon_1", "falcon_3a"):
        checks[f"{case} handed over"] = partial(same_model, case, way=False)
        for way in WAYS.values():
            checks[f"{case} recomputed, scan {way}"] = partial(same_model, case, way=way, recompute=True)
            checks[f"{case} wrapped, scan {way}"] = partial(same_model, case, way=way, recompute=True, wrapped=True)
    checks |= {"trainer": same_with_what_a_trainer_gives, "fused loss": same_with_a_fused_loss}
    checks |= {"mixer": same_mixer, "nothing stays": nothing_stays}
    return failures(checks)


def check_refusals():
    """Every rank refuses, but for a document that begins where a part does: its first rank cannot know."""
    model, ids = tiny_model(), tokens(1, 20)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    restarting = torch.arange(20)[None] % 10
    several = {"cu_seq_lens_q": torch.tensor([0, 7, 20])}, {"seq_idx": restarting}, {"position_ids": restarting}
    checks = {}
    with context_parallel(model):
        for options in ({"attention_mask": mask}, {"cache": falcon_cache(model.config)}, *several):
            name = next(iter(options))
            checks[name] = partial(refused, f"{name}.* given within context_parallel", model, ids, **options)
        checks["short"] = partial(refused, "has 2 tokens; every rank must have at least 3", model, ids[:, :2])
        if dist.get_rank() > 0:
            options = {"input_ids": ids, "position_ids": torch.arange(20)[None]}
            checks["begins"] = partial(refused, "position_ids that do not go on given", model.model, **options)
        else:
            checks["begins"] = partial(from_left, None, torch.arange(20)[None, -1:])
        return failures(checks)


def check_all():
    return {"attention": check_kernels(), "model": check_models(), "refusals": check_refusals()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What three processes found, which take longer to start than to check."""
    return on_ranks(RANKS, check_all, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "model", "refusals"])
def test_ranks_give_together_what_one_process_gives(kind, found):
    for rank in found:
        assert len(rank[kind]) >= 7
        assert not "".join(rank[kind].values())


@pytest.mark.parametrize("case", ["3a-hybrid", "2-attention-first"])
def test_full_attention_layers_are_refused(case):
    with pytest.raises(ValueError, match="model has full_attention layers"):
        context_parallel(tiny_model(**CASES[case])).__enter__()


@pytest.mark.parametrize(
    "model_class", [FalconFastWeightForSequenceClassification, FalconFastWeightForTokenClassification]
)
def test_other_heads_and_other_models_are_refused(model_class):
    model = tiny_model(model_class=model_class)
    with pytest.raises(ValueError, match=f"model is a {model_class.__name__}; context_parallel takes"):
        context_parallel(model).__enter__()
    with pytest.raises(ValueError, match="model is a Linear without any FalconFastWeightAttention"):
        context_parallel(torch.nn.Linear(2, 2)).__enter__()
