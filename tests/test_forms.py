"""Recurrent, masked-parallel and chunked forms are one function: values, gradients, boundaries, error budgets."""

import pytest
import torch
from cases import (
    INPUTS,
    VARIANTS,
    assert_same,
    assert_same_state,
    attend,
    cut,
    error,
    gradients,
    leaves,
    make_inputs,
    make_state,
    rows,
)
from falcon_kernels import RULES, FalconState, Rule, chunked, parallel
from falcon_kernels.api import FalconOutput
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
EXACT = 1e-9  # float64


def chunks(inputs, rule, state, chunk, **options):
    return FalconOutput(*chunked.attention(*(inputs[n] for n in INPUTS), state, rule, chunk=chunk, **options))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_is_the_recurrence(name, length):
    """Outputs, final state, and gradients of inputs and of the carried state, a partly filled tail included."""
    rule = VARIANTS[name]
    inputs = make_inputs(rule, B=2, T=length, H=1, requires_grad=True)
    state = make_state(rule, H=1, tail=2 if rule.window > 3 else None, requires_grad=True)
    tensors = leaves(inputs, state)
    want = attend(inputs, rule, initial_state=state, impl="reference")
    want_gradients = gradients(want, list(tensors.values()))
    for chunk in (16, 64):
        have = chunks(inputs, rule, state, chunk)
        assert_same(have.output, want.output, EXACT, f"output, chunk {chunk}")
        assert_same_state(have.final_state, want.final_state, EXACT)
        for what, a, b in zip(tensors, gradients(have, list(tensors.values())), want_gradients, strict=True):
            assert_same(a, b, EXACT, f"gradient of {what}, chunk {chunk}")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_masked_parallel_is_the_recurrence(name, length):
    rule = VARIANTS[name]
    inputs = make_inputs(rule, T=length)
    for state in (FalconState.zeros(rule, 2, 2, 4, 3, dtype=torch.float64), make_state(rule)):
        want = attend(inputs, rule, initial_state=state, impl="reference")
        output, memory = parallel.attention(*(inputs[n] for n in INPUTS), state, rule)
        assert_same(output, want.output, EXACT)
        assert_same(memory, want.final_state.memory, EXACT)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_any_split_with_the_carried_state_is_one_pass(name, impl):
    """Every tail length is met: the split runs over the first tokens. Gradients flow through the carried state."""
    rule = VARIANTS[name]
    length = 7 if rule.window < 7 else 13
    inputs = make_inputs(rule, T=length, requires_grad=True)
    tensors = list(leaves(inputs).values())
    whole = attend(inputs, rule, impl=impl)
    whole_gradients = gradients(whole, tensors)
    for split in range(length + 1):
        state, outputs = None, []
        for part in (cut(inputs, 0, split), cut(inputs, split, length)):
            result = attend(part, rule, initial_state=state, impl=impl)
            state = result.final_state
            outputs.append(result.output)
        joined = FalconOutput(torch.cat(outputs, 1), state)
        assert_same(joined.output, whole.output, EXACT, f"split at {split}")
        assert_same_state(joined.final_state, whole.final_state, EXACT)
        for a, b in zip(gradients(joined, tensors), whole_gradients, strict=True):
            assert_same(a, b, EXACT, f"gradient, split at {split}")


def test_memory_alone_is_not_enough():
    """Dropping the previous key or the tail changes what follows (paper, C.7): the state is as small as it can be."""
    for rule, field in ((Rule("falcon_1"), "previous_valid"), (Rule("falcon_3a"), "tail_valid")):
        inputs = make_inputs(rule, T=8)
        state = attend(cut(inputs, 0, 5), rule).final_state
        full = attend(cut(inputs, 5, 8), rule, initial_state=state).output
        poorer = state._replace(**{field: torch.zeros_like(getattr(state, field))})
        assert error(attend(cut(inputs, 5, 8), rule, initial_state=poorer).output, full) > 1e-3


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_masked_tokens_are_no_tokens(name, carried, impl):
    """A row under a mask is the row without those places; NaN there is never seen, and gradients there are 0."""
    rule = VARIANTS[name]
    length = 37
    masks = torch.ones(4, length, dtype=torch.bool)
    masks[0, :20] = False  # left padding
    masks[1, 1::3] = False  # holes
    masks[2, :] = False  # no token at all
    masks[3, 30:] = False  # right padding
    inputs = make_inputs(rule, B=4, T=length, H=1)
    with torch.no_grad():
        for t in inputs.values():
            if t is not None:
                t[~masks] = torch.nan
    for t in inputs.values():
        if t is not None:
            t.requires_grad_()
    state = make_state(rule, B=4, H=1) if carried else None
    have = attend(inputs, rule, mask=masks, initial_state=state, impl=impl)
    have_gradients = dict(zip(leaves(inputs), gradients(have, list(leaves(inputs).values())), strict=True))
    assert not have.output[~masks].any()
    assert all(not g[~masks].any() and g.isfinite().all() for g in have_gradients.values())
    for row in range(4):
        keep = masks[row].nonzero()[:, 0]
        alone = {n: None if t is None else t[row : row + 1, keep].detach() for n, t in inputs.items()}
        own = None if state is None else state.map(lambda t, row=row: t[row : row + 1])
        want = attend(alone, rule, initial_state=own, impl="reference")
        assert_same(have.output[row, keep], want.output[0], EXACT, f"row {row}")
        assert_same_state(have.final_state.map(lambda t, row=row: t[row : row + 1]), want.final_state, EXACT)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_are_each_alone(name, carried, impl):
    rule = VARIANTS[name]
    lengths = [1, 40, 1, 0, 16, 3, 64, 0]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(rule, B=1, T=sum(lengths), H=1, requires_grad=True)
    state = make_state(rule, B=len(lengths), H=1, requires_grad=True) if carried else None
    tensors = leaves(inputs, state)
    have = attend(inputs, rule, cu_seqlens=bounds, initial_state=state, impl=impl)
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        own = None if state is None else state.map(lambda t, n=n: t[n : n + 1])
        want = attend(cut(inputs, start, end), rule, initial_state=own, impl="reference")
        outputs.append(want.output)
        states.append(want.final_state)
    joined = FalconState(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*states, strict=True)))
    want = FalconOutput(torch.cat(outputs, 1), joined)
    assert_same(have.output, want.output, EXACT)
    assert_same_state(have.final_state, want.final_state, EXACT)
    have_gradients, want_gradients = (gradients(r, list(tensors.values())) for r in (have, want))
    for what, a, b in zip(tensors, have_gradients, want_gradients, strict=True):
        assert_same(a, b, EXACT, f"gradient of {what}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_mask_and_split(data):
    """Chunked in two calls under any mask = the recurrence in one, for any variant and sizes."""
    rule = VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)), "variant")]
    B, T, H = (data.draw(st.integers(1, high), what) for high, what in ((3, "B"), (80, "T"), (2, "H")))
    K, V = (data.draw(st.integers(1, 6), what) for what in ("K", "V"))
    split = data.draw(st.integers(0, T), "split")
    chunk = data.draw(st.sampled_from([16, 32, 48, 64]), "chunk")
    seed = data.draw(st.integers(0, 10**6), "seed")
    density = data.draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]), "density")
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) <= density
    inputs = make_inputs(rule, B, T, H, K, V, seed=seed)
    want = attend(inputs, rule, mask=mask, impl="reference")
    state, outputs = FalconState.zeros(rule, B, H, K, V, dtype=torch.float64), []
    for start, end in ((0, split), (split, T)):
        result = chunks(cut(inputs, start, end), rule, state, chunk, mask=mask[:, start:end])
        state = result.final_state
        outputs.append(result.output)
    assert_same(torch.cat(outputs, 1), want.output, EXACT)
    assert_same_state(state, want.final_state, EXACT)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_packing(data):
    rule = VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)), "variant")]
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), "lengths")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = make_inputs(rule, B=1, T=sum(lengths), H=1, seed=data.draw(st.integers(0, 10**6), "seed"))
    have, want = (attend(inputs, rule, cu_seqlens=bounds, impl=impl) for impl in ("torch", "reference"))
    assert_same(have.output, want.output, EXACT)
    assert_same_state(have.final_state, want.final_state, EXACT)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_finite_differences(name, clamped):
    """The first token of a fresh row, padding, a carried state and clamped steps are all in it."""
    rule = Rule(
        name,
        detach_energy=False,
        ridge="direct" if clamped else "scale_coupled",
        window=2 if name[7] == "3" else None,
    )
    inputs = make_inputs(rule, B=2, T=5, H=1, K=3, V=2, seed=3)
    if clamped:
        inputs["gain"] = 1.2 + 0.2 * inputs["gain"]
        inputs["ridge"][:, ::2] = 1e4
    state = make_state(rule, B=2, H=1, K=3, V=2)
    state.previous_valid[0] = False
    if state.tail_valid is not None:
        state.tail_valid[0] = False
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2] = False
    tensors = leaves(inputs, state)
    tensors = {n: t.clone().requires_grad_() for n, t in tensors.items()}

    def run(*values):
        given = dict(zip(tensors, values, strict=True))
        carried = state._replace(**{n: t for n, t in given.items() if n not in INPUTS})
        result = chunks({n: given[n] for n in INPUTS}, rule, carried, 16, mask=mask)
        return result.output, result.final_state.memory

    assert torch.autograd.gradcheck(run, list(tensors.values()), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("floor", [0.01, 0.0067380])
@pytest.mark.parametrize("name", RULES)
def test_decay_at_its_floor_for_whole_chunks(name, floor):
    """exp(-u) over a chunk would overflow here; float32 stays finite and right, gradients included."""
    rule = Rule(name, ridge="direct", decay_floor=floor)
    inputs = make_inputs(rule, B=1, T=200, K=16, V=16, dtype=torch.float32)
    inputs["gain"] = 1.5 + inputs["gain"] / 4.1
    inputs["ridge"] = torch.full_like(inputs["ridge"], 1e5)
    inputs["v"] = inputs["v"] * 1e12
    for t in inputs.values():
        t.requires_grad_()
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    have, want = attend(inputs, rule, impl="torch"), attend(exact, rule, impl="reference")
    assert_same(have.output, want.output, 2e-5)
    assert_same(have.final_state.memory, want.final_state.memory, 2e-5)
    names = ["q", "k", "v", "gain"]  # the clamp leaves no gradient to the ridge but through the step size
    for what, a, b in zip(
        names,
        torch.autograd.grad(have.output.sum(), [inputs[n] for n in names]),
        torch.autograd.grad(want.output.sum(), [exact[n] for n in names]),
        strict=True,
    ):
        assert_same(a, b, 1e-4, what)


@pytest.mark.parametrize("size", [16, 64, 160])
def test_triangular_inverse(size):
    """Only what lies below the diagonal counts, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    n = 0.5 * torch.randn(2, size, size, generator=generator, dtype=torch.float64) / size**0.5
    n.requires_grad_()
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + n.tril(-1))
    have = chunked._UnitLowerInverse.apply(n)
    assert_same(have, want, 1e-13)
    weights = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    assert_same(*(torch.autograd.grad((t * weights).sum(), n)[0] for t in (have, want)), 1e-12)


@pytest.mark.parametrize("keys", ["random", "repeated", "cosine 0.5", "cosine 0.99"])
@pytest.mark.parametrize("name", RULES)
def test_float32_error_budget(name, keys):
    """Within 2e-5 of float64 over 4,096 tokens, also for gains near 2 on keys that repeat or nearly do."""
    rule = Rule(name)
    inputs = make_inputs(rule, B=1, T=4096, H=1, K=32, V=16, dtype=torch.float32)
    if keys != "random":
        cosine = {"repeated": 1.0, "cosine 0.5": 0.5, "cosine 0.99": 0.99}[keys]
        common = inputs["k"][:, :1]
        inputs["k"] = cosine**0.5 * common + (1 - cosine) ** 0.5 * inputs["k"]
        inputs["gain"] = torch.full_like(inputs["gain"], 1.99)
        inputs["ridge"] = inputs["ridge"] * 1e-2
    exact = {n: t.double() for n, t in inputs.items()}
    have, want = attend(inputs, rule, impl="torch"), attend(exact, rule, impl="torch")
    assert_same(have.output, want.output, 2e-5, "output")
    assert_same(have.final_state.memory, want.final_state.memory, 2e-5, "memory")


@pytest.mark.parametrize("name", RULES)
def test_narrow_inputs_are_widened_once(name):
    """bfloat16 inputs give what float32 gives on the same values, rounded at the end; memory stays float32."""
    rule = Rule(name)
    inputs = {n: t.bfloat16() for n, t in make_inputs(rule, T=70, dtype=torch.float32).items()}
    inputs["gain"] = inputs["gain"].float()
    wide = {n: t.float() for n, t in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = attend(inputs, rule)
    want = attend(wide, rule)
    assert have.output.dtype == torch.bfloat16
    assert have.final_state.memory.dtype == torch.float32
    assert torch.equal(have.output, want.output.bfloat16())
    assert torch.equal(have.final_state.memory, want.final_state.memory)


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_see_one_another(name):
    rule = Rule(name)
    inputs = make_inputs(rule, B=3, T=50, dtype=torch.float32)
    whole = attend(inputs, rule).output
    for row in range(3):
        assert_same(attend(rows(inputs, slice(row, row + 1)), rule).output[0], whole[row], 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_gradients_of_some_inputs_only(name):
    rule = Rule(name)
    for wanted in INPUTS:
        inputs = make_inputs(rule, T=20)
        inputs[wanted].requires_grad_()
        have, want = (
            torch.autograd.grad(attend(inputs, rule, impl=impl).output.square().sum(), inputs[wanted])[0]
            for impl in ("torch", "reference")
        )
        assert_same(have, want, EXACT, wanted)
