"""The Triton kernels of the rules with a rate per value channel, against the recurrence in float64.

Without a GPU they run in Triton's interpreter.
"""

import interpreter
import pytest
import torch
from cases import (
    VARIANTS,
    assert_same,
    assert_same_results,
    assert_same_state,
    attend,
    cut,
    gradients,
    leaves,
    make_inputs,
    make_state,
)
from falcon_kernels import Rule, launch

interpreter.require()

from falcon_kernels import triton_attention, triton_schedule  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {name: rule for name, rule in VARIANTS.items() if rule.per_channel}
NAMES = sorted({rule.name for rule in RULES.values()})
FORWARD, GRADIENT = 1e-5, 5e-5  # float32
NARROW = ("q", "k", "v", "previous_key")  # what may be given in 16 bits


@pytest.fixture(autouse=True)
def _poisoned():
    """Memory that a kernel has to fill holds NaN before it does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    triton_attention.plan_of.cache_clear()
    assert torch.empty(1, device=DEVICE).isnan()
    yield
    triton_attention.plan_of.cache_clear()
    torch.use_deterministic_algorithms(False)


def case(rule, T, B=1, H=1, K=16, V=16, S=None, carried=True):
    """Inputs, and a state for S sequences where carried, in float32 and without gradients."""
    inputs = make_inputs(rule, B=B, T=T, H=H, K=K, V=V, dtype=torch.float32)
    state = make_state(rule, B=S or B, H=H, K=K, V=V, dtype=torch.float32) if carried else None
    return inputs, state


def as_leaves(inputs, state, dtype=torch.float32, wide=False):
    """The same on the device under test, with gradients, q, k and v in `dtype`; or, `wide`, all in float64."""

    def leaf(name, t):
        if t is None or t.dtype == torch.bool:
            return None if t is None else t.to(DEVICE)
        t = t.detach().to(DEVICE, dtype if name in NARROW else torch.float32)
        return (t.double() if wide else t).clone().requires_grad_()

    inputs = {n: leaf(n, t) for n, t in inputs.items()}
    return inputs, None if state is None else state._replace(**{n: leaf(n, t) for n, t in state._asdict().items()})


def compare(rule, inputs, state=None, dtype=torch.float32, forward=FORWARD, gradient=GRADIENT, **options):
    """Values, and gradients of all inputs and of the carried state; returns the kernels'."""
    have_inputs, have_state = as_leaves(inputs, state, dtype)
    exact, exact_state = as_leaves(inputs, state, dtype, wide=True)
    have = attend(have_inputs, rule, initial_state=have_state, impl="triton", **options)
    want = attend(exact, rule, initial_state=exact_state, impl="reference", **options)
    tensors = leaves(have_inputs, have_state)
    return have, assert_same_results(have, want, tensors, leaves(exact, exact_state), forward, gradient)


@pytest.mark.parametrize("length", [1, 17, 34])
@pytest.mark.parametrize("name", RULES)
def test_every_option_from_a_carried_state(name, length):
    compare(RULES[name], *case(RULES[name], length))


@pytest.mark.parametrize("name", RULES)
def test_every_option_from_the_start(name):
    compare(RULES[name], *case(RULES[name], 18, B=2, carried=False))


@pytest.mark.parametrize("length", [15, 16, 32, 33, 70])
@pytest.mark.parametrize("name", NAMES)
def test_lengths_beside_blocks_and_chunks(name, length):
    compare(Rule(name), *case(Rule(name), length))


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents(name, carried):
    """Documents of one token and of none, and over several chunks; one of those that carry a state is fresh."""
    lengths = [1, 34, 1, 0, 32, 0]
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    rule = Rule(name, timing="read_before_write")
    inputs, state = case(rule, sum(lengths), S=len(lengths), carried=carried)
    if carried:
        state.previous_valid[1] = False
    compare(rule, inputs, state, cu_seqlens=bounds)


@pytest.mark.parametrize("name", NAMES)
def test_masks_with_holes(name):
    masks = torch.ones(3, 37, dtype=torch.bool)
    masks[0, 1::3] = False
    masks[1, :] = False
    masks[2, 20:] = False
    inputs, state = case(Rule(name), 37, B=3)
    for t in inputs.values():
        t[~masks] = torch.nan
    have, grads = compare(Rule(name), inputs, state, mask=masks.to(DEVICE))
    assert not have.output[~masks].any()
    assert not any(grads[n][~masks].any() for n in inputs)


@pytest.mark.parametrize("name", NAMES)
def test_rows_heads_and_a_fresh_row(name):
    inputs, state = case(Rule(name), 18, B=2, H=2)
    state.previous_valid[1] = False
    compare(Rule(name), inputs, state)


@pytest.mark.parametrize(("K", "V"), [(5, 3), (32, 48), (96, 16), (160, 20), (16, 256)])
@pytest.mark.parametrize("name", NAMES)
def test_head_dimensions(name, K, V):
    compare(Rule(name), *case(Rule(name), 18, K=K, V=V))


def test_sequences_cut_into_parts(monkeypatch):
    """Which falcon_2, whose chunks are no affine maps that would be quick to put together, is not."""
    monkeypatch.setattr(launch, "segments", lambda *_: 3)
    rule = Rule("falcon_2a")
    compare(rule, *case(rule, 165))
    bounds = torch.tensor([0, 5, 75, 75, 108], device=DEVICE)
    compare(rule, *case(rule, 108, S=4), cu_seqlens=bounds)


@pytest.mark.parametrize("timing", ["read_before_write", "read_after_write"])
@pytest.mark.parametrize("name", NAMES)
def test_decay_at_its_floor(name, timing):
    """In most tokens, or in some channels of all: exp(-u) would overflow."""
    rule = Rule(name, ridge="direct", timing=timing)
    inputs, state = case(rule, 70)
    inputs["gain"] = 1.5 + inputs["gain"] / 4.1
    inputs["gain"][..., ::3] = 1e-4
    inputs["ridge"] = torch.full_like(inputs["ridge"], 1e5)
    inputs["ridge"][:, 30:40] = 0.1
    compare(rule, inputs, state)


@pytest.mark.parametrize("length", [47, 64, 82])
@pytest.mark.parametrize("timing", ["read_before_write", "read_after_write"])
@pytest.mark.parametrize("name", NAMES)
def test_spans_of_64_tokens(name, timing, length, monkeypatch):
    """In float32 chunks are shorter; those of 16-bit operands have spans of 64, 32 and 16 tokens. At the floor within
    some of them, and across their middles."""
    monkeypatch.setattr(launch, "chunk_length", lambda *_: 64)
    rule = Rule(name, timing=timing, ridge="direct")
    inputs, state = case(rule, length)
    inputs["gain"] = 1.5 + inputs["gain"] / 4.1
    inputs["gain"][..., ::3] = 1e-4
    inputs["ridge"][:, 12:20] = 1e5
    inputs["ridge"][:, 30:33] = 1e5
    compare(rule, inputs, state)


@pytest.mark.parametrize("ridge", ["scale_coupled", "direct", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_zero_keys_and_gains(name, ridge):
    """No energy and no epsilon: no step, and no NaN; a gain of 0 still has its gradient."""
    rule = Rule(name, ridge=ridge, epsilon=0.0)
    inputs, state = case(rule, 20)
    inputs["k"][:, 5:12] = 0
    inputs["gain"][:, 14:16, :, ::2] = 0
    compare(rule, inputs, state)


@pytest.mark.parametrize("cosine", [1.0, 0.99, 0.5])
def test_correlated_keys(cosine):
    """Gains near 2 on keys that repeat or nearly do."""
    inputs, state = case(Rule("falcon_2"), 130, K=32)
    inputs["k"] = cosine**0.5 * inputs["k"][:, :1] + (1 - cosine) ** 0.5 * inputs["k"]
    inputs["gain"].fill_(1.99)
    inputs["ridge"] *= 1e-2
    compare(Rule("falcon_2"), inputs, state)


@pytest.mark.parametrize(("card", "K", "V"), [("large", 64, 64), ("safe", 128, 96)])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inputs(name, K, V, card, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "card", lambda device: (card, 1))
    inputs, state = case(Rule(name), 70, K=K, V=V)
    have, grads = compare(Rule(name), inputs, state, torch.bfloat16, forward=5e-3, gradient=1e-2)
    assert have.output.dtype == grads["q"].dtype == torch.bfloat16


def test_gradient_of_ridge_in_bfloat16():
    """It sums what tokens read, less what they write, over a chunk: all roundings of it add up. Where what the sum then
    misses is not spread over the tokens by how much is rounded in each, they reach 2.15e-2."""
    rule = Rule("falcon_2")
    inputs, state = case(rule, 64, H=2)
    have_inputs, have_state = as_leaves(inputs, state, torch.bfloat16)
    exact, exact_state = as_leaves(inputs, state, torch.bfloat16, wide=True)
    have = attend(have_inputs, rule, initial_state=have_state, impl="triton")
    want = attend(exact, rule, initial_state=exact_state, impl="reference")
    assert_same(*(gradients(o, [i["ridge"]])[0] for o, i in ((have, have_inputs), (want, exact))), 8.5e-3)


def test_solves_that_have_the_card_to_themselves_take_narrow_tiles(monkeypatch):
    """Which changes nothing else."""
    rule = Rule("falcon_2")
    inputs, state = as_leaves(*case(rule, 40, K=64, V=64), torch.bfloat16)
    runs = []
    for processors in (132, 1 / 4):
        monkeypatch.setattr(launch, "card", lambda device, processors=processors: ("large", processors))
        triton_attention.plan_of.cache_clear()
        result = attend(inputs, rule, initial_state=state, impl="triton")
        runs.append([result.output, *gradients(result, list(inputs.values()))])
    for narrow, wide in zip(*runs, strict=True):
        assert_same(narrow, wide, 1e-6)
    monkeypatch.setattr(launch, "card", lambda device: ("large", 132))
    config = launch.Config(32, 1, 3)
    assert [launch.alone(DEVICE, config, rows, 64).value_tile for rows in (1, 132, 133)] == [16, 16, 32]
    assert launch.alone(DEVICE, config._replace(warps=4), 1, 64).value_tile == 32


@pytest.mark.parametrize("name", NAMES)
def test_float16_inputs(name):
    """Nothing but outputs and gradients is rounded to them."""
    compare(Rule(name), *case(Rule(name), 40), torch.float16, forward=1e-3, gradient=2e-3)


@pytest.mark.parametrize(
    ("name", "scalar"), [(name, {"falcon_2": "falcon_1", "falcon_2a": "falcon_1a"}[name]) for name in NAMES]
)
def test_tied_rates_are_those_of_one_head(name, scalar):
    inputs, _ = case(Rule(scalar), 40)
    tied = inputs | {"gain": inputs["gain"][..., None].expand(1, 40, 1, 16)}
    (have, _), (want, _) = as_leaves(tied, None), as_leaves(inputs, None)
    runs = []
    for given, rule in ((have, name), (want, scalar)):
        result = attend(given, Rule(rule), impl="triton")
        runs.append((result, gradients(result, list(given.values()))))
    assert_same(runs[0][0].output, runs[1][0].output, 1e-6)
    for what, a, b in zip(have, runs[0][1], runs[1][1], strict=True):
        assert_same(a.sum(-1) if what == "gain" else a, b, 2e-5, what)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time_and_in_every_batch(name):
    inputs, _ = case(Rule(name), 34, B=3)
    runs = []
    for rows in (slice(None), slice(None), slice(1, 2)):
        own, _ = as_leaves({n: t[rows] for n, t in inputs.items()}, None)
        result = attend(own, Rule(name), impl="triton")
        runs.append([result.output, *torch.autograd.grad(result.output.square().sum(), list(own.values()))])
    for a, b, alone in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:2], alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_split_with_the_carried_state_is_one_pass(name):
    inputs, _ = as_leaves(*case(Rule(name), 40, carried=False))
    inputs = {n: t.detach() for n, t in inputs.items()}
    whole = attend(inputs, Rule(name), impl="triton")
    for split in (1, 16, 33):
        begun = attend(cut(inputs, 0, split), Rule(name), impl="triton")
        ended = attend(cut(inputs, split, 40), Rule(name), initial_state=begun.final_state, impl="triton")
        assert_same(torch.cat([begun.output, ended.output], 1), whole.output, 1e-6, f"split at {split}")
        assert_same_state(ended.final_state, whole.final_state, 1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_custom_ops_keep_their_contract(name, packed):
    rule = Rule(name)
    inputs, state = as_leaves(*case(rule, 9, S=3 if packed else 1))
    bounds = torch.tensor([0, 1, 6, 9], device=DEVICE) if packed else None
    arguments = (
        *inputs.values(), *state[:6], None, bounds, 1, True, triton_schedule.RIDGE[rule.ridge], False, rule.residual,
        rule.detach_energy, 1e-6, 0.01, 0, False, True, False,
    )  # fmt: skip
    torch.library.opcheck(triton_attention.attention_op, arguments)
    tensors = [None if t is None else t.detach() for t in arguments[: triton_attention.TENSORS]]
    options = arguments[triton_attention.TENSORS :]
    output, final, *kept = triton_attention.attention_op(*tensors, *options[:-1], True)
    torch.library.opcheck(
        triton_attention.attention_backward_op, (output, final, *tensors, *kept, output, final, *options[:-2])
    )
