"""The Triton kernels of falcon_1 against the recurrence in float64; without a GPU, in Triton's interpreter."""

import interpreter
import pytest
import torch
from cases import assert_same, attend, gradients, leaves, make_inputs, make_state
from falcon_kernels import FalconState, Rule
from falcon_kernels.api import FalconOutput
from falcon_kernels.schedule import energy, step_and_log_decay

interpreter.require()

from falcon_kernels import triton_regression as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, BACKWARD = 1e-5, 5e-5  # float32
RULES = {
    "next": Rule("falcon_1"),
    "next-before": Rule("falcon_1", timing="read_before_write"),
    "same": Rule("falcon_1", alignment="same_step"),
    "same-before-direct": Rule(
        "falcon_1", alignment="same_step", timing="read_before_write", step_size="direct", ridge="direct"
    ),
}


def schedule(k, gain, ridge, previous_key, previous_valid, cu_seqlens, rule):
    """eta and log gamma [B, T, H], 0 for a first token without a pair."""
    length = k.shape[1]
    active = torch.ones(k.shape[:2], dtype=torch.bool)
    x = k
    if rule.shifted:
        x = torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1)
        row, place = torch.arange(k.shape[0]), torch.zeros(k.shape[0], dtype=torch.long)
        sequence = row
        if cu_seqlens is not None:
            sequence = (cu_seqlens.diff() > 0).nonzero()[:, 0]
            row, place = torch.zeros_like(sequence), cu_seqlens[:-1][sequence].long()
        first = torch.zeros(k.shape[0], length, dtype=torch.bool).index_put((row, place), torch.tensor(True))
        previous = torch.zeros_like(k).index_put((row, place), previous_key[sequence].to(k.dtype))
        x = torch.where(first[..., None, None], previous, x)
        valid = torch.zeros_like(first).index_put((row, place), previous_valid[sequence])
        active = valid | ~first
        x = torch.where(active[..., None, None], x, 0)
    return step_and_log_decay(energy(x, 1, rule), gain, ridge, active[..., None], rule)


def run(inputs, rule, state, cu_seqlens=None):
    """The whole rule from the core: the schedule in PyTorch, all else in the kernels."""
    q, k, v, gain, ridge = (inputs[name] for name in ("q", "k", "v", "gain", "ridge"))
    previous = None
    if rule.shifted:
        previous = torch.where(state.previous_valid[:, None, None], state.previous_key, 0)
    weight, log_decay = schedule(k.float(), gain, ridge, state.previous_key, state.previous_valid, cu_seqlens, rule)
    tensors = [
        t if t is None else t.to(DEVICE) for t in (q, k, v, weight, log_decay, state.memory, previous, cu_seqlens)
    ]
    output, memory = kernels.regression_core(*tensors, rule)
    return FalconOutput(output.cpu(), FalconState(memory=memory.cpu()))


def check(inputs, rule, state, cu_seqlens=None, forward=FORWARD, backward=BACKWARD):
    """Values, and gradients of all inputs and of the carried state, against float64."""
    inputs = {n: t.detach().float().requires_grad_() for n, t in inputs.items()}
    state = state.map(lambda t: t if t.dtype == torch.bool else t.detach().float().requires_grad_())
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    exact_state = state.map(lambda t: t if t.dtype == torch.bool else t.detach().double().requires_grad_())
    have = run(inputs, rule, state, cu_seqlens)
    want = attend(exact, rule, initial_state=exact_state, cu_seqlens=cu_seqlens, impl="reference")
    want = FalconOutput(want.output, FalconState(memory=want.final_state.memory))
    assert_same(have.output, want.output, forward, "output")
    assert_same(have.final_state.memory, want.final_state.memory, forward, "final memory")
    tensors = leaves(inputs, state)
    have_gradients = gradients(have, list(tensors.values()))
    want_gradients = gradients(want, list(leaves(exact, exact_state).values()))
    for what, a, b in zip(tensors, have_gradients, want_gradients, strict=True):
        assert_same(a, b, backward, f"gradient of {what}")


@pytest.fixture(autouse=True)
def _poison():
    """Memory that is not initialized is NaN, so that what no kernel has written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["fused", "split"])
def regime(request, monkeypatch):
    monkeypatch.setattr(kernels, "FULL_CARD", 0 if request.param == "fused" else 10**9)
    return request.param


def case(rule, **sizes):
    rows = sizes.pop("S", sizes.get("B", 1))
    state = {name: sizes[name] for name in ("H", "K", "V")}
    return make_inputs(rule, **sizes), make_state(rule, B=rows, **state)


@pytest.mark.parametrize("length", [1, 15, 17, 64, 65, 130])
@pytest.mark.parametrize("same", [False, True])
def test_lengths(length, same, regime):
    """Either alignment with either timing, one of the two in each regime."""
    name = ("same" if same else "next") + ("-before" if same == (regime == "fused") else "")
    rule = RULES.get(name, RULES["same-before-direct"])
    inputs, state = case(rule, B=1, T=length, H=1, K=16, V=16)
    check(inputs, rule, state)


@pytest.mark.parametrize("name", ["next", "same-before-direct"])
def test_rows_heads_and_a_fresh_row(name, regime):
    rule = RULES[name]
    inputs, state = case(rule, B=3, T=20, H=2, K=16, V=32)
    if rule.shifted:
        state.previous_valid[1] = False
    check(inputs, rule, state)


@pytest.mark.parametrize(("K", "V"), [(16, 192), (96, 16), (96, 96), (128, 32), (24, 20), (5, 3)])
def test_head_dimensions(K, V, regime):
    """Several tiles of value channels, of key channels, and dimensions that are no power of two."""
    inputs, state = case(RULES["next"], B=1, T=18, H=1, K=K, V=V)
    check(inputs, RULES["next"], state)


@pytest.mark.slow
@pytest.mark.parametrize("size", [192, 256])
def test_large_head_dimensions(size):
    inputs, state = case(RULES["next"], B=1, T=18, H=1, K=size, V=size)
    check(inputs, RULES["next"], state)


@pytest.mark.parametrize("name", ["next-before", "same"])
@pytest.mark.parametrize("lengths", [(1, 66, 0, 20), (0, 64, 1, 0)])
def test_packed_documents(name, lengths, regime):
    """Documents of no and of one token among others; one fresh, the others with carried states."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs, state = case(RULES[name], B=1, S=len(lengths), T=sum(lengths), H=2, K=16, V=16)
    if state.previous_valid is not None:
        state.previous_valid[1] = False
    check(inputs, RULES[name], state, bounds.int() if regime == "fused" else bounds)


@pytest.mark.parametrize("cosine", [1.0, 0.99, 0.9, 0.5])
def test_correlated_keys(cosine, regime):
    """Gains near 2 on keys that repeat or nearly do, where an inverse by squaring explodes.

    One rounding of eta x'x in float32 counts as often as a chunk has steps where keys all but repeat.
    """
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=130, H=1, K=32, V=16)
    inputs["k"] = cosine**0.5 * inputs["k"][:, :1] + (1 - cosine) ** 0.5 * inputs["k"]
    inputs["gain"] = torch.full_like(inputs["gain"], 1.99)
    inputs["ridge"] = inputs["ridge"] * 1e-2
    check(inputs, rule, state, **({"forward": 5e-5, "backward": 2e-4} if cosine > 0.9 else {}))


@pytest.mark.parametrize("name", ["next", "same-before-direct"])
def test_decay_at_its_floor(name, regime):
    """log gamma is log 0.01 in every step of whole chunks, or in some: exp(-u) would overflow."""
    rule = RULES[name]
    for every in (1, 7):
        inputs, state = case(rule, B=1, T=130, H=1, K=16, V=16)
        inputs["ridge"][:, ::every] = 1e5
        check(inputs, rule, state)


def test_zero_keys_and_gains(regime):
    """Nothing is divided by an energy or a gain of zero; a gain of zero still has its gradient."""
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=70, H=1, K=16, V=16)
    inputs["k"][:, 3:20] = 0
    inputs["gain"][:, 30:40] = 0
    check(inputs, rule, state)
    inputs["k"][:] = 0
    check(inputs, rule, state)


def test_gradients_of_output_or_of_final_memory_alone(regime):
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=20, H=1, K=16, V=16)
    inputs = {n: t.float().requires_grad_() for n, t in inputs.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    have = run(inputs, rule, state.map(lambda t: t if t.dtype == torch.bool else t.float()))
    want = attend(exact, rule, initial_state=state, impl="reference")
    for a, b in ((have.output, want.output), (have.final_state.memory, want.final_state.memory)):
        grads = [
            torch.autograd.grad(t.square().sum(), list(leaves(i).values()), retain_graph=True, allow_unused=True)
            for t, i in ((a, inputs), (b, exact))
        ]
        for what, g, e in zip(leaves(inputs), *grads, strict=True):
            e = torch.zeros_like(exact[what]) if e is None else e
            assert_same(torch.zeros_like(inputs[what]) if g is None else g, e, BACKWARD, what)


def test_evaluation_is_training(regime):
    """The same bits with and without gradients, on every run, and for a row whatever its neighbours."""
    rule = RULES["next"]
    inputs, state = case(rule, B=2, T=70, H=2, K=16, V=16)
    inputs = {n: t.float() for n, t in inputs.items()}
    state = state.map(lambda t: t if t.dtype == torch.bool else t.float())
    with torch.no_grad():
        evaluated = run(inputs, rule, state)
    trained = run({n: t.clone().requires_grad_() for n, t in inputs.items()}, rule, state)
    alone = run({n: t[1:] for n, t in inputs.items()}, rule, state.map(lambda t: t[1:]))
    assert torch.equal(evaluated.output, trained.output)
    assert torch.equal(evaluated.final_state.memory, trained.final_state.memory)
    assert torch.equal(evaluated.output[1:], alone.output)


def test_no_tokens():
    rule = RULES["next"]
    inputs, state = case(rule, B=2, T=1, H=2, K=16, V=16)
    empty = {n: t[:, :0].float().requires_grad_() for n, t in inputs.items()}
    state = state.map(lambda t: t if t.dtype == torch.bool else t.float().requires_grad_())
    weight = torch.zeros(2, 0, 2, device=DEVICE)
    q, k, v, memory, previous = (
        t.to(DEVICE) for t in (empty["q"], empty["k"], empty["v"], state.memory, state.previous_key)
    )
    output, final = kernels.regression_core(q, k, v, weight, weight, memory, previous, None, rule)
    assert output.shape == v.shape
    assert torch.equal(final, memory)
    grad_memory, grad_previous = torch.autograd.grad(final.sum(), [state.memory, state.previous_key])
    assert torch.equal(grad_memory, torch.ones_like(grad_memory))
    assert not grad_previous.any()


def operands(packed=False, dtype=torch.float32, T=66, requires_grad=True):
    rule = RULES["next"]
    inputs, state = case(rule, B=1, S=3 if packed else 1, T=T, H=1, K=16, V=16)
    bounds = torch.tensor([0, 1, 40, T], dtype=torch.int32) if packed else torch.empty(0, dtype=torch.int32)
    weight, log_decay = 0.05 * inputs["gain"], -inputs["ridge"]
    tensors = [inputs["q"], inputs["k"], inputs["v"]]
    tensors = [t.to(dtype) for t in tensors] + [t.float() for t in (weight, log_decay, state.memory)]
    tensors = [t.to(DEVICE).requires_grad_(requires_grad) for t in (*tensors, state.previous_key.to(dtype))]
    return *tensors, bounds.to(DEVICE)


@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_well_formed(packed):
    tensors = operands(packed)
    op = torch.ops.falcon_kernels.regression.default
    torch.library.opcheck(op, (*tensors, True, False, True))
    same_step = (*tensors[:6], torch.empty(0, device=DEVICE), tensors[7])
    torch.library.opcheck(op, (*same_step, False, True, True), test_utils="test_aot_dispatch_dynamic")
    q, k, v, weight, log_decay, memory, previous, bounds = (t.detach() for t in tensors)
    output, final, states, z = op(q, k, v, weight, log_decay, memory, previous, bounds, True, False, True)
    backward = torch.ops.falcon_kernels.regression_backward.default
    arguments = (q, k, v, weight, log_decay, previous, bounds, states, z, output, final, True, False)
    torch.library.opcheck(backward, arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_no_graph_break(packed):
    *tensors, bounds = operands(packed)
    bounds = bounds if packed else None

    def loss(*tensors):
        output, final = kernels.regression_core(*tensors, bounds, RULES["next"])
        return output.square().sum() + final.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    have, want = compiled(*tensors), loss(*tensors)
    assert torch.equal(have, want)
    for a, b in zip(torch.autograd.grad(have, tensors), torch.autograd.grad(want, tensors), strict=True):
        assert torch.equal(a, b)


def test_half_precision_inputs(regime):
    """float16 inputs: memory, decays and what comes from them stay float32, outputs and gradients are rounded once."""
    *tensors, _ = operands(dtype=torch.float16)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    have = kernels.regression_core(*tensors, None, RULES["next"])
    want = kernels.regression_core(*wide, None, RULES["next"])
    assert have[0].dtype == torch.float16
    assert have[1].dtype == torch.float32
    assert torch.equal(have[0], want[0].half())
    grads = [torch.autograd.grad(o.square().sum(), i) for (o, _), i in ((have, tensors), (want, wide))]
    for t, a, b in zip(tensors, *grads, strict=True):
        assert a.dtype == t.dtype
        assert_same(a, b, 1e-3)
