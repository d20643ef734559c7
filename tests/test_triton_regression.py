"""The Triton kernels of falcon_1 against the recurrence in float64; without a GPU, in Triton's interpreter."""

import interpreter
import pytest
import torch
from cases import (
    assert_same,
    assert_same_results,
    attend,
    gradients,
    leaves,
    make_inputs,
    make_state,
)
from falcon_kernels import Rule, launch

interpreter.require()

from falcon_kernels import triton_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, BACKWARD = 1e-5, 5e-5  # float32
RULES = {
    "next": Rule("falcon_1"),
    "next-before": Rule("falcon_1", timing="read_before_write"),
    "same": Rule("falcon_1", alignment="same_step"),
    "same-before-direct": Rule(
        "falcon_1", alignment="same_step", timing="read_before_write", step_size="direct", ridge="direct"
    ),
    "next-none-detached": Rule("falcon_1", ridge="none", detach_energy=True),
}


@pytest.fixture(autouse=True)
def _poison():
    """Memory that is not initialized is NaN, so that what no kernel has written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1, device=DEVICE).isnan()
    triton_attention.plan_of.cache_clear()
    yield
    triton_attention.plan_of.cache_clear()
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["one pass", "split"])
def regime(request, monkeypatch):
    """Both regimes, whatever the shape; the pass also over the wide features that ship without one."""
    fused = request.param == "one pass"
    monkeypatch.setattr(launch, "fused", lambda *_: fused)
    for key_tile in (128, 256):
        sizes = launch.WIDE_REGRESSION[key_tile]
        wide = sizes._replace(whole=sizes.carry, reverse_whole=sizes.reverse)
        monkeypatch.setitem(launch.WIDE_REGRESSION, key_tile, wide)
    return request.param


both_regimes = pytest.mark.usefixtures("regime")


def case(rule, **sizes):
    """Inputs and a state as float32 leaves on the device under test."""
    rows = sizes.pop("S", sizes.get("B", 1))
    state = make_state(rule, B=rows, **{name: sizes[name] for name in ("H", "K", "V")})
    inputs = make_inputs(rule, **sizes)
    return {n: t if t is None else leaf(t) for n, t in inputs.items()}, state.map(leaf)


def leaf(t, dtype=torch.float32):
    return t.to(DEVICE) if t.dtype == torch.bool else t.detach().to(DEVICE, dtype).requires_grad_()


def exactly(inputs, state):
    return {n: t if t is None else leaf(t, torch.float64) for n, t in inputs.items()}, state.map(
        lambda t: leaf(t, torch.float64)
    )


def check(inputs, rule, state, cu_seqlens=None, forward=FORWARD, backward=BACKWARD):
    """Values, and gradients of all inputs and of the carried state, against float64."""
    exact, exact_state = exactly(inputs, state)
    have = attend(inputs, rule, initial_state=state, cu_seqlens=cu_seqlens, impl="triton")
    want = attend(exact, rule, initial_state=exact_state, cu_seqlens=cu_seqlens, impl="reference")
    assert_same_results(have, want, leaves(inputs, state), leaves(exact, exact_state), forward, backward)


@both_regimes
@pytest.mark.parametrize("length", [1, 15, 17, 64, 65, 130])
@pytest.mark.parametrize("name", RULES)
def test_lengths(length, name):
    inputs, state = case(RULES[name], B=1, T=length, H=1, K=16, V=16)
    check(inputs, RULES[name], state)


@both_regimes
@pytest.mark.parametrize("name", ["next", "same-before-direct"])
def test_rows_heads_and_a_fresh_row(name):
    rule = RULES[name]
    inputs, state = case(rule, B=3, T=20, H=2, K=16, V=32)
    if rule.shifted:
        state.previous_valid[1] = False
    check(inputs, rule, state)


@both_regimes
@pytest.mark.parametrize(("K", "V"), [(16, 192), (96, 16), (96, 96), (128, 32), (24, 20), (5, 3)])
def test_head_dimensions(K, V):
    """Several tiles of value channels, of key channels, and dimensions that are no power of two."""
    inputs, state = case(RULES["next"], B=1, T=18, H=1, K=K, V=V)
    check(inputs, RULES["next"], state)


@both_regimes
@pytest.mark.parametrize("name", RULES)
def test_several_tiles_of_keys_and_values(name):
    inputs, state = case(RULES[name], B=2, T=70, H=1, K=20, V=40)
    check(inputs, RULES[name], state)


@both_regimes
@pytest.mark.slow
@pytest.mark.parametrize("size", [192, 256])
def test_large_head_dimensions(size):
    inputs, state = case(RULES["next"], B=1, T=18, H=1, K=size, V=size)
    check(inputs, RULES["next"], state)


@both_regimes
@pytest.mark.parametrize("name", ["next-before", "same"])
@pytest.mark.parametrize("lengths", [(1, 66, 0, 20), (0, 64, 1, 0)])
def test_packed_documents(name, lengths):
    """Documents of no and of one token among others; one fresh, the others with carried states."""
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    inputs, state = case(RULES[name], B=1, S=len(lengths), T=sum(lengths), H=2, K=16, V=16)
    if state.previous_valid is not None:
        state.previous_valid[1] = False
    check(inputs, RULES[name], state, bounds)


@both_regimes
@pytest.mark.parametrize("cosine", [1.0, 0.99, 0.9, 0.5])
def test_correlated_keys(cosine):
    """Gains near 2 on keys that repeat or nearly do, where an inverse by squaring explodes.

    Where keys all but repeat, the sums of the inverse cancel, and a rounding in them counts as often as a chunk has
    steps: numpy's order of summation, which the interpreter has, leaves ten times the error of a running sum.
    """
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=130, H=1, K=32, V=16)
    with torch.no_grad():
        inputs["k"].copy_(cosine**0.5 * inputs["k"][:, :1] + (1 - cosine) ** 0.5 * inputs["k"])
        inputs["gain"].fill_(1.99)
        inputs["ridge"] *= 1e-2
    check(inputs, rule, state, **({"forward": 8e-5, "backward": 2e-4} if cosine > 0.5 else {}))


@both_regimes
def test_correlated_keys_in_bfloat16():
    """Where the inverse is rounded to bfloat16 anywhere that chunks depend on, the gradient of v is off by a half."""
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=256, H=1, K=64, V=64)
    with torch.no_grad():
        inputs["k"].copy_(0.999**0.5 * inputs["k"][:, :1] + 0.001**0.5 * inputs["k"])
        inputs["gain"].fill_(1.99)
        inputs["ridge"] *= 1e-2
    half = {n: leaf(t, torch.bfloat16 if n in "qkv" else torch.float32) for n, t in inputs.items()}
    exact, exact_state = exactly(half, state)
    have = attend(half, rule, initial_state=state, impl="triton")
    want = attend(exact, rule, initial_state=exact_state, impl="torch")
    assert_same(have.output, want.output, 5e-2)
    grads = (gradients(o, [i[n] for n in "qkv"]) for o, i in ((have, half), (want, exact)))
    for a, b in zip(*grads, strict=True):
        assert_same(a, b, 5e-2)


@both_regimes
@pytest.mark.parametrize(("cosine", "bounds"), [(0.0, (4.5e-3, 2.5e-3)), (0.9, (1.8e-2, 7e-3))])
def test_gradients_of_steps_and_decays_in_bfloat16(cosine, bounds):
    """Sums over pairs of tokens cancel. Where a pair is added with one rounding and taken away with another, errors on
    any keys are twice as large; where it is rounded before it is summed, errors on keys that are alike."""
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=130, H=2, K=64, V=64)
    with torch.no_grad():
        inputs["k"].copy_(cosine**0.5 * inputs["k"][:, :1] + (1 - cosine) ** 0.5 * inputs["k"])
        if cosine:
            inputs["gain"].fill_(1.99)
            inputs["ridge"] *= 1e-2
    half = {n: leaf(t, torch.bfloat16 if n in "qkv" else torch.float32) for n, t in inputs.items()}
    exact, exact_state = exactly(half, state)
    have = attend(half, rule, initial_state=state, impl="triton")
    want = attend(exact, rule, initial_state=exact_state, impl="torch")
    grads = (gradients(o, [i["gain"], i["ridge"]]) for o, i in ((have, half), (want, exact)))
    for a, b, bound in zip(*grads, bounds, strict=True):
        assert_same(a, b, bound)


@both_regimes
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", ["next", "same-before-direct"])
def test_decay_at_its_floor(name, every):
    """log gamma is log 0.01 in every step of whole chunks, or in some: exp(-u) would overflow."""
    rule = RULES[name]
    inputs, state = case(rule, B=1, T=130, H=1, K=16, V=16)
    with torch.no_grad():
        inputs["ridge"][:, ::every] = 1e5
    check(inputs, rule, state)


@both_regimes
@pytest.mark.parametrize("every", [False, True])
def test_zero_keys_and_gains(every):
    """Nothing is divided by an energy or a gain of zero; a gain of zero still has its gradient."""
    rule = RULES["next"]
    inputs, state = case(rule, B=1, T=70, H=1, K=16, V=16)
    with torch.no_grad():
        inputs["k"][:, 3:20] = 0
        inputs["gain"][:, 30:40] = 0
        if every:
            inputs["k"].zero_()
    check(inputs, rule, state)


@both_regimes
def test_no_matter_whether_gradients_are_wanted_or_what_the_neighbours_are():
    """The same bits with and without gradients, and for a row alone."""
    rule = RULES["next"]
    inputs, state = case(rule, B=2, T=70, H=2, K=16, V=16)
    trained = attend(inputs, rule, initial_state=state, impl="triton")
    with torch.no_grad():
        evaluated = attend(inputs, rule, initial_state=state, impl="triton")
        inputs = {n: t[1:] for n, t in inputs.items()}
        alone = attend(inputs, rule, initial_state=state.map(lambda t: t[1:]), impl="triton")
    assert torch.equal(evaluated.output, trained.output)
    assert torch.equal(evaluated.final_state.memory, trained.final_state.memory)
    assert torch.equal(evaluated.output[1:], alone.output)


@both_regimes
def test_half_precision_inputs():
    """float16 inputs: memory, decays and what comes from them stay float32, outputs and gradients are rounded once."""
    rule = RULES["next"]
    wide, state = case(rule, B=1, T=66, H=1, K=16, V=16)
    half = {n: leaf(t, torch.float16) for n, t in wide.items()}
    wide = {n: leaf(t) for n, t in half.items()}
    have, want = (attend(i, rule, initial_state=state, impl="triton") for i in (half, wide))
    assert have.output.dtype == torch.float16
    assert have.final_state.memory.dtype == torch.float32
    assert_same(have.output, want.output, 1e-3)
    grads = (gradients(o, list(i.values())) for o, i in ((have, half), (want, wide)))
    for t, a, b in zip(half.values(), *grads, strict=True):
        assert a.dtype == t.dtype
        assert_same(a, b, 2e-3)


def test_few_sequences_take_narrow_tiles(monkeypatch):
    """Nothing but the shape decides, so that training and evaluation agree."""
    monkeypatch.setattr(launch, "card", lambda device: ("large", 132))
    config = launch.Config(128, 8, 2)
    tiles = [launch.narrower(DEVICE, config, rows, 128, 128).value_tile for rows in (1, 16, 32, 64, 128)]
    assert tiles == [16, 16, 32, 64, 128]


@both_regimes
@pytest.mark.parametrize("name", ["next", "same-before-direct"])
def test_gradients_of_output_or_of_memory_alone(name):
    inputs, state = case(RULES[name], B=1, T=70, H=1, K=16, V=16)
    exact, exact_state = exactly(inputs, state)
    have = attend(inputs, RULES[name], initial_state=state, impl="triton")
    want = attend(exact, RULES[name], initial_state=exact_state, impl="reference")
    tensors, exact_tensors = leaves(inputs, state), leaves(exact, exact_state)
    for a, b in ((have.output, want.output), (have.final_state.memory, want.final_state.memory)):
        options = {"retain_graph": True, "materialize_grads": True}
        grads = torch.autograd.grad(a.square().sum(), list(tensors.values()), **options)
        exact_grads = torch.autograd.grad(b.square().sum(), list(exact_tensors.values()), **options)
        for what, g, e in zip(tensors, grads, exact_grads, strict=True):
            assert_same(g, e, BACKWARD, what)


def test_what_no_gradient_needs_is_not_kept(monkeypatch):
    """In one pass, neither memories of chunks nor residuals."""
    from falcon_kernels import triton_regression

    made = []
    forward = triton_regression.forward
    monkeypatch.setattr(launch, "fused", lambda *_: True)
    monkeypatch.setattr(triton_regression, "forward", lambda *a: made.append(forward(*a)) or made[-1])
    inputs, state = case(RULES["next"], B=1, T=70, H=1, K=16, V=16)
    with torch.no_grad():
        attend(inputs, RULES["next"], initial_state=state, impl="triton")
    attend(inputs, RULES["next"], initial_state=state, impl="triton")
    evaluated, trained = made
    assert (evaluated.states, evaluated.residuals) == (None, None)
    assert trained.states.isfinite().all()
    assert trained.residuals.isfinite().all()


def test_one_pass_where_rows_and_tiles_fill_the_card(monkeypatch):
    """Rows x value tiles and the card decide, but never for documents or without a configuration of a pass."""
    monkeypatch.setattr(launch, "card", lambda device: ("large", 132))
    config = launch.Config(64, 4, 1)
    found = [launch.fused(DEVICE, config, rows, 64, packed=False) for rows in (1, 115, 116, 384)]
    assert found == [False, False, True, True]
    assert [launch.fused(DEVICE, config, rows, 128, packed=False) for rows in (57, 58)] == [False, True]
    assert not launch.fused(DEVICE, None, 384, 64, packed=False)
    assert not launch.fused(DEVICE, config, 384, 64, packed=True)
    assert launch.REGRESSION["large", 2, 64].whole is not None


@both_regimes
def test_documents_read_nothing_of_each_other(monkeypatch):
    """NaN in a document stays there, though a chunk's values are loaded before the last one's end."""
    monkeypatch.setattr("falcon_kernels.api._check_values", lambda *_: None)
    rule = RULES["next"]
    inputs, state = case(rule, B=1, S=3, T=190, H=1, K=16, V=16)
    bounds = torch.tensor([0, 70, 130, 190], device=DEVICE)
    with torch.no_grad():
        for t in inputs.values():
            t[:, 70:130] = torch.nan
    output = attend(inputs, rule, initial_state=state, cu_seqlens=bounds, impl="triton").output
    mine = torch.cat([output[:, :70], output[:, 130:]], 1)
    assert mine.isfinite().all()
    for grad in torch.autograd.grad(mine.sum(), list(inputs.values())):
        assert grad[:, :70].isfinite().all()
        assert grad[:, 130:].isfinite().all()
