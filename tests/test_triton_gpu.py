"""The Triton kernels as they are used on a GPU: picked, compiled, captured, checkpointed, in a model."""

import pytest
import torch
from cases import VARIANTS, assert_same, assert_same_state, attend, leaves, make_inputs, make_state
from falcon_kernels import RULES, FalconState, Rule, falcon_attention, falcon_step
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KERNELS = ("falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a")
MODELS = (*RULES, "1-same-step-direct", "1a-normalized", "3a-hybrid")
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"B": 2, "T": 100, "H": 2, "K": 64, "V": 64}


def on_gpu(tensors, dtype=torch.float32, requires_grad=False):
    """Inputs or a state in this dtype; gain, ridge, memory and normalizer in float32 at least."""
    wide = ("gain", "ridge", "memory", "normalizer")

    def move(name, t):
        if t is None or t.dtype == torch.bool:
            return None if t is None else t.cuda()
        kind = torch.promote_types(dtype, torch.float32) if name in wide else dtype
        return t.detach().to("cuda", kind).requires_grad_(requires_grad)

    if isinstance(tensors, dict):
        return {n: move(n, t) for n, t in tensors.items()}
    return FalconState(*(move(n, t) for n, t in zip(FalconState._fields, tensors, strict=True)))


def call_of(rule, dtype, requires_grad=False, **sizes):
    sizes = {**SIZES, **sizes}
    state = {n: sizes[n] for n in ("B", "H", "K", "V")}
    inputs, state = make_inputs(rule, **sizes), make_state(rule, **state)
    return on_gpu(inputs, dtype, requires_grad), on_gpu(state, dtype, requires_grad)


def assert_same_bits(have, want):
    for a, b in zip(have, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_what_is_picked(name, dtype):
    rule = Rule(name)
    inputs, state = call_of(rule, dtype, T=20)
    named = "triton" if name in KERNELS else "torch"
    have, want = (attend(inputs, rule, initial_state=state, impl=impl) for impl in (None, named))
    assert_same_bits((have.output, *have.final_state), (want.output, *want.final_state))
    token = [t[:, 0] for t in inputs.values()]
    states = [state.map(torch.clone) for _ in range(2)]
    outputs = [falcon_step(*token, s, rule=rule, impl=i)[0] for s, i in zip(states, (None, "triton"), strict=True)]
    assert_same_bits((outputs[0], *states[0]), (outputs[1], *states[1]))


@pytest.mark.parametrize(
    ("rule", "dtype", "sizes"),
    [
        (Rule("falcon_1a"), torch.float64, {}),
        (Rule("falcon_1a"), torch.float32, {"K": 288, "V": 16}),
        (Rule("falcon_3a", window=66), torch.float32, {"T": 80}),
    ],
)
def test_what_the_kernels_refuse_still_runs(rule, dtype, sizes):
    inputs, state = call_of(rule, dtype, **{"T": 20, **sizes})
    with pytest.raises(ValueError, match="with impl='triton'"):
        attend(inputs, rule, initial_state=state, impl="triton")
    have, want = (attend(inputs, rule, initial_state=state, impl=impl) for impl in (None, "torch"))
    assert_same_bits((have.output, *have.final_state), (want.output, *want.final_state))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_nothing_to_do(name, B, T):
    inputs, _ = call_of(Rule(name), torch.float32, requires_grad=True, B=B, T=T)
    found = attend(inputs, Rule(name))
    assert found.output.shape == (B, T, 2, 64)
    assert not found.final_state.memory.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_forward_and_backward_are_the_same_bits(name, dtype):
    rule = Rule(name)
    inputs, state = call_of(rule, dtype, requires_grad=True)
    mask = torch.ones(2, 100, dtype=torch.bool, device="cuda")
    mask[0, 3] = False

    def run(inputs, state):
        result = attend(inputs, rule, initial_state=state, mask=mask)
        return result.output, result.final_state.memory

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    tensors = list(leaves(inputs, state).values())
    found = []
    for function in (compiled, run):
        values = function(inputs, state)
        found.append([*values, *torch.autograd.grad(values, tensors, [torch.ones_like(t) for t in values])])
    assert_same_bits(*found)


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_with_projections_under_autocast(name):
    rule, generator = Rule(name), torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    gains = 128 if rule.per_channel else 2
    x, weights = normal(2, 100, 128), [normal(128, n) / 12 for n in (128, 128, 128, gains, 2)]
    leaves = [x, *weights]

    def run(x, *weights):
        with torch.autocast("cuda", torch.bfloat16):
            q, k, v = ((x @ w).unflatten(-1, (2, 64)) for w in weights[:3])
            gain, ridge = (torch.sigmoid((x @ w).float()) for w in weights[3:])
            gain = gain.unflatten(-1, (2, 64)) if rule.per_channel else gain
            return falcon_attention(q, k, v, gain, ridge, rule=rule).output

    torch._dynamo.reset()
    values, grads = [], []
    for function in (torch.compile(run, fullgraph=True), run):
        given = [t.detach().requires_grad_() for t in leaves]
        values.append(function(*given))
        grads.append(torch.autograd.grad(values[-1].float().square().sum(), given))
    assert values[0].dtype == torch.bfloat16
    assert_same(*values, 2e-2, "output")
    for a, b in zip(*grads, strict=True):
        assert_same(a, b, 3e-2, "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_op_keeps_its_contract(name, dtype, monkeypatch):
    from falcon_kernels import triton_attention

    arguments, attention = [], triton_attention.attention
    monkeypatch.setattr(triton_attention, "attention", lambda *a: arguments.append(a) or attention(*a))
    inputs, state = call_of(Rule(name), dtype, requires_grad=True)
    attend(inputs, Rule(name), initial_state=state, impl="triton")

    def leaf(t):
        return t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    torch.library.opcheck(triton_attention.attention_op, (*(leaf(t) for t in arguments[0]), False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_captured_training_step_replays(name, dtype):
    rule = Rule(name)
    inputs, state = call_of(rule, dtype, requires_grad=True)
    tensors = list(leaves(inputs, state).values())

    def run():
        result = attend(inputs, rule, initial_state=state)
        values = (result.output, result.final_state.memory)
        return [*values, *torch.autograd.grad(values, tensors, [torch.ones_like(t) for t in values])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for seed in (0, 5):
        fresh = on_gpu(make_inputs(rule, **SIZES, seed=seed), dtype)
        with torch.no_grad():
            for name, t in inputs.items():
                t.copy_(fresh[name])
        graph.replay()
        assert_same_bits([t.clone() for t in replayed], run())


@pytest.mark.parametrize("name", RULES)
def test_a_captured_token_replays_and_updates_its_state_in_place(name):
    rule = Rule(name)
    inputs, state = call_of(rule, torch.bfloat16, T=4)
    slots = [t[:, 0].clone() for t in inputs.values()]
    called, replayed = state.map(torch.clone), state.map(torch.clone)
    falcon_step(*slots, state.map(torch.clone), rule=rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = falcon_step(*slots, replayed, rule=rule)
    for t in range(4):
        for slot, tokens in zip(slots, inputs.values(), strict=True):
            slot.copy_(tokens[:, t])
        graph.replay()
        want, _ = falcon_step(*slots, called, rule=rule)
        assert_same_bits((output, *replayed), (want, *called))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_checkpointing_changes_no_bit_of_a_gradient(name, reentrant):
    rule = Rule(name)
    inputs, _ = call_of(rule, torch.bfloat16, requires_grad=True)
    tensors = list(inputs.values())

    def run(*given):
        return falcon_attention(*given, rule=rule).output

    found = []
    for output in (run(*tensors), checkpoint(run, *tensors, use_reentrant=reentrant)):
        output.float().square().sum().backward()
        found.append([t.grad for t in tensors])
        for t in tensors:
            t.grad = None
    assert_same_bits(*found)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_then_tokens_is_the_recurrence(name):
    """Prefill by what is picked, then one token at a time, beside float64."""
    rule = VARIANTS[name]
    exact = make_inputs(rule, **SIZES)
    inputs = on_gpu(exact)
    wide = {n: None if t is None else inputs[n].double() for n, t in exact.items()}
    want = attend(wide, rule, impl="torch")
    found = attend({n: None if t is None else t[:, :90] for n, t in inputs.items()}, rule)
    outputs, state = [found.output], found.final_state
    assert all(t is None or t.is_contiguous() for t in state), "one token's kernel needs whole tensors"
    for t in range(90, 100):
        token = [None if x is None else x[:, t] for x in inputs.values()]
        outputs.append(falcon_step(*token, state, rule=rule)[0][:, None])
    assert_same(torch.cat(outputs, 1), want.output, 2e-5, "output")
    assert_same_state(state, want.final_state, 2e-5)


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def models(case):
    """A tiny model on the CPU and the same on the GPU, both in float32."""
    import tiny_models

    options = tiny_models.CASES[case]
    return tiny_models, *(tiny_models.tiny_model(torch.float32, **options).to(d) for d in ("cpu", "cuda"))


@pytest.mark.parametrize("case", MODELS)
def test_a_model_and_its_gradients_equal_those_of_the_cpu(case):
    tiny, here, there = models(case)
    ids = tiny.tokens(3, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found = []
    for model, device in ((here, "cpu"), (there, "cuda")):
        outputs = model(ids.to(device), attention_mask=mask.to(device), labels=ids.to(device))
        outputs.loss.backward()
        found.append({"logits": outputs.logits[mask.bool()]} | gradients(model))
    for name, want in found[0].items():
        assert_same(found[1][name].cpu(), want, 1e-3, name)


@pytest.mark.parametrize("case", MODELS)
def test_a_model_writes_what_it_writes_on_the_cpu(case):
    tiny, here, there = models(case)
    ids = tiny.tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"max_new_tokens": 20, "do_sample": False}
    want = here.generate(ids, attention_mask=mask, **options)
    assert torch.equal(there.generate(ids.cuda(), attention_mask=mask.cuda(), **options).cpu(), want)


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3a"])
def test_a_model_compiles_without_a_graph_break(case):
    _, _, model = models(case)
    ids = torch.randint(1, 40, (2, 33), device="cuda")
    torch._dynamo.reset()
    found = []
    for network in (torch.compile(model, fullgraph=True), model):
        model.zero_grad()
        outputs = network(ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        found.append([outputs.logits.detach(), *gradients(model).values()])
    for a, b in zip(*found, strict=True):  # each gradient of the rule alone is within 5e-5 of float64
        assert_same(a, b, 3e-4)
