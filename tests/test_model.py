"""The model and its mixer: losses, gradients, padding, packed documents, initialization, the layer alone."""

import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from falcon_kernels import falcon_attention, layers, reference
from tiny_models import CASES, HYBRID, RULES, cache_of, tiny_config, tiny_model, tokens
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from falcon_hf import (
    FalconFastWeightAttention,
    FalconFastWeightForCausalLM,
    FalconFastWeightModel,
    falcon_cache,
)
from falcon_hf import modeling_falcon_fast_weight as modeling
from falcon_hf.modeling_falcon_fast_weight import LONGEST_MEMORY, SHORTEST_MEMORY

EXACT = {"atol": 1e-11, "rtol": 0}  # float64 logits of order 1 to 10; errors of 1e-13 were measured


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_gradients(ours, theirs, atol=1e-11):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=0, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("case", ["falcon_3a", "3a-hybrid"])
def test_the_loss_is_the_mean_cross_entropy_of_the_next_tokens(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4], labels[1, 7] = -100, -100
    outputs = model(ids, labels=labels)
    logits = outputs.logits[:, :-1].log_softmax(-1)
    chosen = [(row, t) for row in range(2) for t in range(8) if labels[row, t + 1] != -100]
    by_hand = [-logits[row, t, labels[row, t + 1]] for row, t in chosen]
    # transformers computes losses in float32
    torch.testing.assert_close(outputs.loss.double(), torch.stack(by_hand).mean(), atol=1e-6, rtol=0)
    scaled = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    torch.testing.assert_close(scaled.double(), torch.stack(by_hand).sum() / 50, atol=1e-6, rtol=0)


def test_accumulated_losses_add_up_to_that_of_the_whole_batch():
    model, ids = tiny_model(), tokens(3, 9)
    labels = ids.clone()
    labels[0, 3:] = -100
    count = (labels[:, 1:] != -100).sum()
    model(ids, labels=labels, num_items_in_batch=count).loss.backward()
    whole = gradients(model)
    model.zero_grad()
    for row in range(3):
        model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=count).loss.backward()
    assert_same_gradients(gradients(model), whole, atol=1e-6)  # the loss is float32


@pytest.mark.parametrize("case", CASES)
def test_every_weight_learns(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 1e-7, name


@pytest.mark.parametrize("case", ["falcon_2", "falcon_3", "3a-hybrid"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(case, reentrant):
    model, ids = tiny_model(**CASES[case]).train(), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    plain = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    outputs = model(ids, attention_mask=mask, labels=ids, use_cache=True)
    assert cache_of(outputs) is None
    outputs.loss.backward()
    assert_same_gradients(gradients(model), plain)
    with pytest.raises(ValueError, match="cache is given, but gradient checkpointing is on"):
        model(ids, cache=falcon_cache(model.config))


def test_training_keeps_no_cache_unless_asked_and_then_still_has_its_gradients():
    model, ids = tiny_model(rule="falcon_3"), tokens(2, 7)
    assert cache_of(model.train()(ids)) is None
    assert cache_of(model.eval()(ids)) is not None
    model.train()(ids, labels=ids).loss.backward()
    plain = gradients(model)
    model.zero_grad()
    model(ids, labels=ids, use_cache=True).loss.backward()
    assert_same_gradients(gradients(model), plain)
    cache = cache_of(model(ids, use_cache=True))
    model(ids[:, :1], labels=ids[:, :1].repeat(1, 1), cache=cache).logits.sum().backward()  # one token, with gradients
    model(ids, labels=ids, cache=cache).loss.backward()


@torch.no_grad()
def test_embeddings_stand_for_ids_and_one_of_them_is_needed():
    model, ids = tiny_model(), tokens(2, 6)
    embeddings = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, model(ids).logits, **EXACT)
    for both in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="input_ids and inputs_embeds are both given or both missing"):
            model(**both)


@torch.no_grad()
def test_logits_are_kept_where_asked():
    model, ids = tiny_model(), tokens(2, 6)
    full = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, full[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=0).logits, full)
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, full[:, [0, 3]])
    places = torch.tensor([[0, 1], [4, 2]])
    assert torch.equal(model(ids, logits_to_keep=places).logits, full.take_along_dim(places[..., None], 1))
    mask = ids > 20
    torch.testing.assert_close(model(ids, logits_to_keep=mask).logits, full[mask], **EXACT)


@pytest.mark.parametrize("layer_types", [None, HYBRID])
@torch.no_grad()
def test_hidden_states_and_attentions_are_returned_on_request(layer_types):
    model, ids = tiny_model(layer_types=layer_types, attn_implementation="eager"), tokens(2, 6)
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 4
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(ids))
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits, **EXACT)
    assert len(outputs.attentions or ()) == (0 if layer_types is None else 1)
    as_tuple = model(ids, return_dict=False)
    assert torch.equal(as_tuple[0], outputs.logits)


@torch.no_grad()
def test_attention_implementations_agree():
    model, ids = tiny_model(layer_types=HYBRID), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    logits = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        logits[implementation] = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits["eager"], logits["sdpa"], atol=1e-5, rtol=0)  # eager takes softmax in float32


@pytest.mark.parametrize("case", RULES)
def test_what_stands_in_padding_cannot_leak(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, [2, 5, 7]] = 0, 0
    clean = model.get_input_embeddings()(ids).detach()
    results = []
    for filling in (0.0, float("nan")):
        model.zero_grad()
        embeddings = clean.masked_fill(mask[..., None] == 0, filling).requires_grad_()
        outputs = model(inputs_embeds=embeddings, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        outputs.loss.backward()
        results.append((outputs.logits, embeddings.grad, gradients(model)))
    (zeros, zeros_grad, zeros_grads), (nans, nans_grad, nans_grads) = results
    assert nans.isfinite().all()
    assert torch.equal(zeros, nans)
    assert torch.equal(zeros_grad, nans_grad)
    assert_same_gradients(nans_grads, zeros_grads, atol=0)
    assert (zeros_grad[mask == 0] == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["cu_seq_lens_q", "both", "position_ids", "rows"])
def test_packed_documents_equal_each_document_alone(case, how):
    model, ids = tiny_model(**CASES[case]).train(), tokens(1, 12)
    bounds = [0, 3, 4, 6, 12]
    documents = [ids[:, a:b] for a, b in pairwise(bounds)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    extra = {"position_ids": positions}
    if how in ("cu_seq_lens_q", "both"):
        extra["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32)
    if how == "cu_seq_lens_q":
        del extra["position_ids"]
    if how == "rows":
        ids, extra = ids.view(2, 6), {"position_ids": positions.view(2, 6)}
    packed = model(ids, **extra).logits
    packed.square().mean().backward()
    packed_gradients = gradients(model)
    model.zero_grad()
    alone = torch.cat([model(document).logits for document in documents], 1)
    alone.square().mean().backward()
    torch.testing.assert_close(packed.view(alone.shape), alone, **EXACT)
    assert_same_gradients(packed_gradients, gradients(model))


@torch.no_grad()
def test_a_row_may_begin_inside_a_document():
    model, ids = tiny_model(), tokens(2, 6)
    positions = torch.tensor([[3, 4, 0, 1, 2, 3], [4, 5, 6, 7, 0, 1]])
    packed = model(ids, position_ids=positions).logits
    for row, start, end in ((0, 0, 2), (0, 2, 6), (1, 0, 4), (1, 4, 6)):
        alone = model(ids[row : row + 1, start:end]).logits[0]
        torch.testing.assert_close(packed[row, start:end], alone, **EXACT)


def test_packing_leaves_no_cache_and_refuses_a_mask_or_a_cache():
    model, ids, bounds = tiny_model(), tokens(1, 6), torch.tensor([0, 2, 6])
    assert cache_of(model(ids, cu_seq_lens_q=bounds)) is None
    for extra in ({"attention_mask": torch.ones_like(ids)}, {"cache": falcon_cache(model.config)}):
        with pytest.raises(
            ValueError, match="cu_seq_lens_q is given for batch size 1, or with attention_mask or cache"
        ):
            model(ids, cu_seq_lens_q=bounds, **extra)
    mixer = FalconFastWeightAttention(tiny_config())
    with pytest.raises(ValueError, match="cu_seqlens is given with attention_mask or cache"):
        mixer(torch.randn(1, 6, 24), attention_mask=torch.ones(1, 6), cu_seqlens=bounds)


@pytest.mark.parametrize(
    "options",
    [
        *({"rule": rule, "step_size": step} for rule in RULES for step in ("gain", "direct")),
        {"rule": "falcon_1", "qk_norm": "l2", "step_size": "direct"},
        {"rule": "falcon_3", "qk_norm": "l2", "step_size": "direct"},
        {"rule": "falcon_3a", "ridge_scale": 0.5},
        {"rule": "falcon_1a", "feature_map": "softplus", "step_size": "direct", "step_size_max": 1 / 32},
        {"rule": "falcon_1", "ridge": "direct"},
    ],
    ids=str,
)
@pytest.mark.parametrize("alone", [True, False])
@torch.no_grad()
def test_heads_begin_with_memories_of_many_lengths(options, alone, monkeypatch):
    decays = []
    original = reference.step_and_log_decay

    def recorded(*args):
        eta, log_decay = original(*args)
        decays.append(log_decay if log_decay.dim() == 2 else log_decay.mean(-1))
        return eta, log_decay

    monkeypatch.setattr(reference, "step_and_log_decay", recorded)
    monkeypatch.setattr(layers, "falcon_attention", partial(falcon_attention, impl="reference"))
    torch.manual_seed(0)
    config = tiny_config(hidden_size=256, num_attention_heads=8, head_dim=64, num_hidden_layers=1, **options)
    mixer = FalconFastWeightAttention(config) if alone else FalconFastWeightModel(config).layers[0].linear_attn
    mixer(torch.randn(4, 40, 256))
    lengths = -1 / torch.stack(decays[8:]).mean((0, 1))
    # A direct ridge below 0.9 under keys of energy 64 decays by 0.9 / 64.9 at most.
    shortest = 64.9 / 0.9 if options.get("ridge") == "direct" else SHORTEST_MEMORY
    steps = torch.linspace(0, 1, 8)
    wanted = shortest * (LONGEST_MEMORY / shortest) ** steps
    # Measured 0.6 to 1.1: the mean over tokens of a decay that varies lies above the decay of the mean.
    assert ((lengths / wanted > 0.5) & (lengths / wanted < 1.3)).all(), lengths / wanted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layers", [{}, {"output_gate": True, "hidden_size": 96}])
def test_a_layer_begins_by_adding_a_tenth_of_what_the_embeddings_hold(rule, layers):
    torch.manual_seed(0)
    options = {"hidden_size": 192, "num_attention_heads": 3, "head_dim": 32, "num_hidden_layers": 1} | layers
    model = FalconFastWeightModel(tiny_config(rule=rule, **options))
    added = model.layers[0].linear_attn(torch.randn(2, 40, options["hidden_size"]))[:, 1:]  # the first reads nothing
    gate = 0.1 if options.get("output_gate") else 1.0  # SiLU of small numbers is small
    held = model.embed_tokens.weight[1:].std().item()
    assert 0.03 * gate < added.std().item() / held < 0.15


def test_a_model_made_without_memory_is_initialized_later():
    with torch.device("meta"):
        model = FalconFastWeightForCausalLM(tiny_config())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    model.init_weights()
    mixer, alone = model.model.layers[1].linear_attn, FalconFastWeightAttention(tiny_config())
    assert torch.equal(mixer.ridge_bias, alone.ridge_bias)
    assert torch.equal(mixer.gain_bias, torch.zeros(2))
    assert model(tokens(1, 4)).logits.isfinite().all()


def test_initialization_does_not_touch_loaded_weights(tmp_path):
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    read = FalconFastWeightForCausalLM.from_pretrained(tmp_path)
    read.init_weights()
    assert torch.equal(read.model.layers[0].linear_attn.ridge_bias, model.model.layers[0].linear_attn.ridge_bias)
    assert torch.equal(read.model.layers[0].linear_attn.q_conv.weight, model.model.layers[0].linear_attn.q_conv.weight)


@pytest.mark.parametrize("rule", ["falcon_1", "falcon_2a"])
def test_step_sizes_stay_fp32_under_autocast_and_in_bfloat16(rule, monkeypatch):
    seen = []
    original = layers.falcon_attention

    def spy(q, k, v, gain, ridge, **kwargs):
        seen.append((q.dtype, gain.dtype, ridge.dtype))
        return original(q, k, v, gain, ridge, **kwargs)

    monkeypatch.setattr(layers, "falcon_attention", spy)
    ids = tokens(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiny_model(torch.float32, rule=rule)(ids, labels=ids).loss
    loss.backward()
    tiny_model(torch.bfloat16, rule=rule)(ids, labels=ids).loss.backward()
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


@pytest.mark.parametrize("case", [name for name in CASES if "layer_types" not in CASES[name]])
@torch.no_grad()
def test_the_mixer_works_without_a_model(case):
    torch.manual_seed(0)
    config = tiny_config(**CASES[case])
    mixer = FalconFastWeightAttention(config).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    y = mixer(x)
    cache = falcon_cache(config)
    steps = torch.cat([mixer(x[:, t : t + 1], cache=cache) for t in range(9)], 1)
    torch.testing.assert_close(steps, y, **EXACT)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9])
    masked = mixer(x, attention_mask=mask)
    torch.testing.assert_close(masked[:1, mask[0].bool()], mixer(x[:1, mask[0].bool()]), **EXACT)
    assert (masked[mask == 0] == 0).all()
    packed = mixer(x, cu_seqlens=torch.tensor([0, 4, 9, 18]))
    torch.testing.assert_close(packed[0, :4], mixer(x[:1, :4])[0], **EXACT)
    torch.testing.assert_close(packed[0, 4:], mixer(x[:1, 4:])[0], **EXACT)
    torch.testing.assert_close(packed[1], y[1], **EXACT)


@torch.no_grad()
def test_reads_are_scaled_before_their_norm():
    def output(**options):
        torch.manual_seed(0)
        return FalconFastWeightAttention(tiny_config(qk_norm="none", **options)).double()(x)

    x = torch.randn(2, 7, 24, dtype=torch.float64)
    plain = output(rms_norm_eps=0.01)
    torch.testing.assert_close(output(read_scale=2.0, rms_norm_eps=0.04), plain, **EXACT)
    assert not torch.allclose(output(read_scale=2.0, rms_norm_eps=0.01), plain, rtol=0.01)


@torch.no_grad()
def test_the_short_convolution_is_a_causal_convolution():
    mixer = FalconFastWeightAttention(tiny_config(conv_size=4)).double()
    x, window = torch.randn(2, 7, 16, dtype=torch.float64), torch.randn(2, 3, 16, dtype=torch.float64)
    weight = mixer.v_conv.weight[:, None]
    for before, given in ((window, (window,)), (torch.zeros_like(window), ())):
        expected = F.silu(F.conv1d(torch.cat([before, x], 1).transpose(1, 2), weight, groups=16).transpose(1, 2))
        torch.testing.assert_close(mixer.v_conv(x, *given).flatten(2), expected, **EXACT)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_classification_heads_train(auto):
    model = auto.from_config(tiny_config(num_labels=3)).train()
    ids = tokens(2, 6)
    labels = torch.tensor([0, 2]) if auto is AutoModelForSequenceClassification else ids % 3
    outputs = model(ids, attention_mask=torch.ones_like(ids), labels=labels)
    outputs.loss.backward()
    assert outputs.logits.shape == ((2, 3) if auto is AutoModelForSequenceClassification else (2, 6, 3))
    assert model.score.weight.grad.abs().max() > 0


def test_importing_registers_the_model_twice_without_triton_or_output():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import falcon_hf, importlib; importlib.reload(falcon_hf)\n"
        "from transformers import AutoConfig, AutoModel\n"
        "config = AutoConfig.for_model('falcon_fast_weight', num_hidden_layers=1, vocab_size=9)\n"
        "assert type(AutoModel.from_config(config)) is falcon_hf.FalconFastWeightModel\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("vocab_size", [40, 41, 47])
def test_a_weight_made_up_to_whole_16_bytes_changes_nothing(vocab_size, monkeypatch):
    """Neither logits nor gradients; and a loss may look at the logits as one long row."""
    ids, found = tokens(2, 9).clamp(max=39), []
    for missing in (0, -vocab_size % 8):
        monkeypatch.setattr(modeling, "missing_rows", lambda weight, x, missing=missing: missing)
        model = tiny_model(vocab_size=vocab_size).train()
        out = model(ids, labels=ids)
        assert out.logits.is_contiguous()
        out.loss.backward()
        found.append([out.logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [False, True])
def test_an_odd_vocabulary_on_a_gpu(autocast):
    torch.manual_seed(0)
    head = modeling.Head(64, 1001, bias=False).cuda()
    x = torch.randn(1, modeling.FEWEST_TOKENS, 64, device="cuda")
    if not autocast:
        head, x = head.bfloat16(), x.bfloat16()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert modeling.missing_rows(head.weight, x) == 7
        assert modeling.missing_rows(head.weight, x[:, 1:]) == 0
        found, expected = head(x), torch.nn.functional.linear(x, head.weight)
    assert found.shape == expected.shape
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_autocast_narrows_the_inputs_of_products_once(monkeypatch):
    """What a linear layer is given under autocast is bfloat16 already; float32 and float64 stay what they are."""
    seen = []
    given = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: seen.append(x.dtype) or given(self, x))
    model, ids = tiny_model(torch.float32), tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)
    of_layers = [dtype for dtype in seen[:-1] if dtype != torch.bfloat16]  # the last is the head's, which is one
    assert not of_layers
    seen.clear()
    model(ids)
    model.double()(ids)
    assert set(seen) == {torch.float32, torch.float64}
