"""The Triton kernels of falcon_3 against the recurrence in float64; without a GPU, in Triton's interpreter."""

import interpreter
import pytest
import torch
from cases import assert_same, assert_same_results, assert_same_state, attend, cut, leaves, make_inputs, make_state
from falcon_kernels import Rule, launch
from falcon_kernels.schedule import energy

interpreter.require()

from falcon_kernels import triton_attention, triton_schedule, triton_window  # noqa: E402
from falcon_kernels.triton_layout import NO_TABLES, Layout  # noqa: E402
from falcon_kernels.triton_smoothness import SMOOTHNESS  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, BACKWARD = 1e-5, 5e-5  # float32
RULES = {
    "default": Rule("falcon_3"),
    "2-before-trace-direct-live": Rule(
        "falcon_3", window=2, timing="read_before_write", smoothness="trace", ridge="direct", detach_energy=False
    ),
    "3-same-bound-direct": Rule("falcon_3", window=3, alignment="same_step", smoothness="bound", step_size="direct"),
    "5-same-before-live": Rule(
        "falcon_3", window=5, alignment="same_step", timing="read_before_write", detach_energy=False
    ),
    "7-none": Rule("falcon_3", window=7, ridge="none", smoothness="trace"),
    "16-live": Rule("falcon_3", window=16, detach_energy=False),
}


@pytest.fixture(autouse=True)
def _poisoned():
    """Memory that a kernel has to fill holds NaN before it does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1, device=DEVICE).isnan()
    triton_attention.plan_of.cache_clear()
    yield
    triton_attention.plan_of.cache_clear()
    torch.use_deterministic_algorithms(False)


def leaf(t, dtype=torch.float32):
    return t.to(DEVICE) if t.dtype == torch.bool else t.detach().to(DEVICE, dtype).requires_grad_()


def case(rule, T, B=1, H=1, K=16, V=16, S=None, tail=None):
    """Inputs and a state as float32 leaves on the device under test."""
    state = make_state(rule, B=S or B, H=H, K=K, V=V, tail=tail)
    inputs = make_inputs(rule, B=B, T=T, H=H, K=K, V=V)
    return {n: None if t is None else leaf(t) for n, t in inputs.items()}, state.map(leaf)


def check(rule, inputs, state=None, forward=FORWARD, backward=BACKWARD, **options):
    """Values, and gradients of all inputs and of the carried state, against float64; returns the result."""
    exact = {n: None if t is None else leaf(t, torch.float64) for n, t in inputs.items()}
    exact_state = None if state is None else state.map(lambda t: leaf(t, torch.float64))
    have = attend(inputs, rule, initial_state=state, impl="triton", **options)
    want = attend(exact, rule, initial_state=exact_state, impl="reference", **options)
    tensors, exact_tensors = leaves(inputs, state), leaves(exact, exact_state)
    return have, assert_same_results(have, want, tensors, exact_tensors, forward, backward)


@pytest.mark.parametrize("length", [1, 3, 34])
@pytest.mark.parametrize("name", RULES)
def test_lengths(name, length):
    """Shorter than a window, and a second chunk that is not full."""
    check(RULES[name], *case(RULES[name], length))


@pytest.mark.parametrize("length", [28, 29, 59])
def test_lengths_about_whole_chunks(length):
    assert triton_window.chunk_length(torch.float32, 16, 4) == 29
    check(RULES["default"], *case(RULES["default"], length))


@pytest.mark.parametrize("window", range(2, triton_window.LARGEST_WINDOW + 1))
def test_tiles_hold_their_rows(window):
    rows, tokens = triton_window.block(window)
    assert rows >= tokens * (window + 1) >= window + 1
    assert triton_window.chunk_length(torch.float32, 16, window) + window - 1 == 32


@pytest.mark.parametrize("sizes", [*launch.WINDOW.values(), *launch.WIDE_WINDOW.values()])
def test_narrow_tiles_are_for_two_warps_at_most(sizes):
    """With four, they would be right operands of instructions that read 64 columns."""
    assert all(getattr(sizes, name).warps <= 2 for name in ("local", "solutions", "gradients"))


@pytest.mark.parametrize("name", RULES)
def test_from_the_start(name):
    inputs, _ = case(RULES[name], 5, B=2)
    check(RULES[name], inputs)


@pytest.mark.parametrize("alignment", ["next_latent", "same_step"])
@pytest.mark.parametrize("timing", ["read_after_write", "read_before_write"])
@pytest.mark.parametrize("tail", range(4))
def test_every_length_of_the_tail(alignment, timing, tail):
    rule = Rule("falcon_3", alignment=alignment, timing=timing)
    check(rule, *case(rule, 5, tail=tail))


@pytest.mark.parametrize("window", [6, 8, 9, 11, 13, 16])
def test_windows(window):
    """Also where a window is longer than a chunk: with 16 pairs, four tokens."""
    rule = Rule("falcon_3", window=window, smoothness="bound")
    check(rule, *case(rule, 11, tail=window // 2))


@pytest.mark.parametrize("smoothness", ["exact", "bound", "trace"])
def test_a_window_of_one_pair_is_falcon_1(smoothness):
    inputs, state = case(Rule("falcon_1"), 10)
    one, sliding = (
        check(rule, inputs, state)
        for rule in (Rule("falcon_1", detach_energy=True), Rule("falcon_3", window=1, smoothness=smoothness))
    )
    assert torch.equal(one[0].output, sliding[0].output)
    assert all(torch.equal(a, b) for a, b in zip(one[1].values(), sliding[1].values(), strict=True))


@pytest.mark.parametrize(("name", "carried"), [("default", True), ("default", False), ("16-live", True)])
def test_packed_documents(name, carried):
    """Documents of one token and of none, and one over several chunks; one that is fresh among carried ones."""
    rule, lengths = RULES[name], (1, 33, 0, 2, 0)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    inputs, state = case(rule, sum(lengths), S=len(lengths))
    if rule.shifted:
        state.previous_valid[1] = False
    state.tail_valid[1] = False
    check(rule, inputs, state if carried else None, cu_seqlens=bounds)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_the_chunks_are_the_whole(packed, monkeypatch):
    """A backward part by part, the last not full, is the one in one, bit by bit: with parts of all sequences, which go
    on from one to another, and with parts of some."""
    lengths = (60, 60) if not packed else (61, 0, 1, 58)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0) if packed else None
    inputs, state = case(RULES["default"], 120 if packed else 60, B=1 if packed else 2, S=len(lengths))
    runs = []
    for parts in (1, 2, 5):
        monkeypatch.setattr(launch, "parts", lambda device, programs, parts=parts: parts)
        triton_attention.plan_of.cache_clear()
        runs.append(check(RULES["default"], inputs, state, cu_seqlens=bounds)[1])
    assert all(torch.equal(run[n], runs[0][n]) for run in runs[1:] for n in run)


@pytest.mark.parametrize(("name", "carried"), [("default", False), ("5-same-before-live", True)])
def test_masks_with_holes(name, carried):
    rule, length = RULES[name], 9
    masks = torch.ones(3, length, dtype=torch.bool)
    masks[0, :6] = False
    masks[1, 1::3] = False
    masks[2, :] = False
    inputs, state = case(rule, length, B=3)
    with torch.no_grad():
        for t in inputs.values():
            t[~masks] = torch.nan
        with torch.enable_grad():
            have, grads = check(rule, inputs, state if carried else None, mask=masks.to(DEVICE))
    assert not have.output[~masks].any()
    assert not any(grads[n][~masks].any() for n in inputs)


@pytest.mark.parametrize(("K", "V"), [(24, 20), (5, 3), (96, 16), (16, 192)])
def test_head_dimensions(K, V):
    """Several tiles of value channels, of key channels, and dimensions that are no power of two."""
    check(RULES["default"], *case(RULES["default"], 18, K=K, V=V))


@pytest.mark.slow
def test_large_head_dimensions():
    check(RULES["default"], *case(RULES["default"], 18, K=256, V=256))


@pytest.mark.parametrize(
    ("window", "kind"),
    [(4, "same"), (4, "opposite"), (4, "0.99"), (4, "0.5"), (4, "orthogonal"), (2, "same"), (2, "orthogonal")],
)
def test_hard_keys_at_gains_near_2(window, kind):
    """An inverse by squaring would explode; windows of rank one; and top eigenvalues that repeat."""
    rule = Rule("falcon_3", window=window)
    length = 35
    inputs, state = case(rule, length)
    first = inputs["k"].detach()[:, :1]
    with torch.no_grad():
        inputs["gain"].fill_(1.99)
        inputs["ridge"] *= 1e-2
        if kind == "orthogonal":
            inputs["k"].copy_(4 * torch.eye(16, device=DEVICE)[torch.arange(length) % 16][None, :, None])
        elif kind == "opposite":
            inputs["k"].copy_(first * (1 - 2 * (torch.arange(length, device=DEVICE) % 2))[None, :, None, None])
        else:
            cosine = 1.0 if kind == "same" else float(kind)
            inputs["k"].copy_(cosine**0.5 * first + (1 - cosine) ** 0.5 * inputs["k"])
    check(rule, inputs, state)


@pytest.mark.parametrize("smoothness", ["exact", "bound"])
@pytest.mark.parametrize("window", [2, 4, 8])
def test_the_gradient_of_the_smoothness(window, smoothness):
    """E is homogeneous of degree 2 in the window's keys: their gradients times them are 2 E, repeated or not; the rank
    of a window is at most two here, its eigenvalues being the same."""
    rule = Rule("falcon_3", window=window, smoothness=smoothness, alignment="same_step", ridge="none")
    inputs, _ = case(rule, window)
    with torch.no_grad():
        inputs["k"].copy_(torch.eye(16, device=DEVICE)[torch.arange(window) % 2][None, :, None])
    _, grads = check(rule, inputs, forward=1e-4, backward=float("inf"))
    assert all(t.isfinite().all() for t in grads.values())
    x = inputs["k"].detach().double()[0, :, 0].requires_grad_()
    padded = torch.cat([x.new_zeros(window - 1, 16), x])
    count = torch.arange(1, window + 1, dtype=torch.float64)
    exact = energy(padded, count, rule)
    slope = (torch.autograd.grad(exact[-1], x)[0] * x).sum()
    assert_same(slope, 2 * exact[-1], 1e-9)

    options = triton_schedule.Options(
        window, False, 0, False, True, True, rule.epsilon, rule.decay_floor, SMOOTHNESS[smoothness]
    )
    plan = triton_schedule.Plan(
        Layout.of(1, window, 0, triton_window.chunk_length(torch.float32, 16, window)), 1, 16, options, False, False
    )
    before = triton_schedule.Before()
    with torch.no_grad():
        given = (inputs[name] for name in ("q", "k", "v", "gain"))
        *_, found = triton_schedule.forward(plan, triton_schedule.Call(*given, None, None, before, None, NO_TABLES))
    assert_same(found.flatten()[:window].cpu(), exact.detach().cpu(), 1e-6)


@pytest.mark.parametrize("every", [1, 7])
def test_decay_at_its_floor(every):
    """log gamma is log 0.01 in every step of whole chunks, or in some: exp(-u) would overflow."""
    for name in ("default", "5-same-before-live"):
        inputs, state = case(RULES[name], 20)
        with torch.no_grad():
            inputs["gain"][:, ::every] = 1.5
            inputs["ridge"][:, ::every] = 1e5
        check(RULES[name], inputs, state)


@pytest.mark.parametrize("smoothness", ["exact", "bound", "trace"])
@pytest.mark.parametrize("ridge", ["scale_coupled", "direct", "none"])
def test_zero_keys_and_gains(ridge, smoothness):
    """No energy and no epsilon: no step, and no NaN; a gain of zero still has its gradient."""
    rule = Rule("falcon_3", ridge=ridge, smoothness=smoothness, epsilon=0.0)
    inputs, state = case(rule, 20)
    with torch.no_grad():
        inputs["k"][:, 3:12] = 0
        inputs["gain"][:, 14:17] = 0
    check(rule, inputs, state)


def test_any_split_with_the_carried_state_is_one_pass():
    rule = RULES["default"]
    inputs, _ = case(rule, 6)
    whole = attend(inputs, rule, impl="triton")
    for split in range(7):
        state, outputs = None, []
        for part in (cut(inputs, 0, split), cut(inputs, split, 6)):
            result = attend(part, rule, initial_state=state, impl="triton")
            state = result.final_state
            outputs.append(result.output)
        assert_same(torch.cat(outputs, 1), whole.output, 1e-6, f"split at {split}")
        assert_same_state(state, whole.final_state, 1e-6)


@pytest.mark.parametrize("name", ["default", "16-live"])
def test_the_same_bits_every_time_and_in_every_batch(name):
    rule = RULES[name]
    inputs, _ = case(rule, 6, B=2)
    runs = []
    for rows in (slice(None), slice(None), slice(1, 2)):
        own = {n: leaf(t[rows]) for n, t in inputs.items()}
        result = attend(own, rule, impl="triton")
        runs.append([result.output, *torch.autograd.grad(result.output.square().sum(), list(own.values()))])
    with torch.no_grad():
        assert torch.equal(attend(inputs, rule, impl="triton").output, runs[0][0])
    for a, b, alone in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:2], alone)


def test_gradients_of_output_or_of_memory_alone():
    rule = RULES["default"]
    inputs, _ = case(rule, 20)
    exact = {n: leaf(t, torch.float64) for n, t in inputs.items()}
    have, want = attend(inputs, rule, impl="triton"), attend(exact, rule, impl="reference")
    for a, b in ((have.output, want.output), (have.final_state.memory, want.final_state.memory)):
        grads, exact_grads = (
            torch.autograd.grad(t.square().sum(), list(i.values()), retain_graph=True, materialize_grads=True)
            for t, i in ((a, inputs), (b, exact))
        )
        for what, g, e in zip(inputs, grads, exact_grads, strict=True):
            assert_same(g, e, BACKWARD, what)


def test_custom_ops_keep_their_contract():
    rule = RULES["default"]
    inputs, state = case(rule, 3)
    ridge, smoothness = triton_schedule.RIDGE[rule.ridge], SMOOTHNESS[rule.smoothness]
    options = (
        rule.window, True, ridge, False, True, rule.detach_energy, rule.epsilon, rule.decay_floor, smoothness, False
    )  # fmt: skip
    arguments = (*inputs.values(), *state[:6], None, None, *options, True, False)
    torch.library.opcheck(triton_attention.attention_op, arguments)
    tensors = [None if t is None else t.detach() for t in arguments[: triton_attention.TENSORS]]
    output, final, *kept = triton_attention.attention_op(*tensors, *options, True, True)
    torch.library.opcheck(
        triton_attention.attention_backward_op, (output, final, *tensors, *kept, None, None, *options)
    )


def test_one_graph_under_compile():
    rule = RULES["default"]
    inputs, state = case(rule, 9)

    def run(inputs):
        result = attend(inputs, rule, initial_state=state, impl="triton")
        return result.output, result.final_state.memory

    torch._dynamo.reset()
    for a, b in zip(torch.compile(run, fullgraph=True, backend="eager")(inputs), run(inputs), strict=True):
        assert torch.equal(a, b)


def narrow(inputs, state, dtype):
    names = ("q", "k", "v", "previous_key", "tail_x", "tail_v")
    inputs = {n: leaf(t, dtype) if n in names else t for n, t in inputs.items()}
    return inputs, state._replace(**{n: leaf(getattr(state, n), dtype) for n in names[3:]})


@pytest.mark.parametrize("card", ["large", "safe"])
@pytest.mark.parametrize(("window", "K", "V"), [(4, 64, 64), (16, 64, 64), (4, 128, 96)])
def test_bfloat16_inputs(window, K, V, card, monkeypatch):
    """With the tiles and configurations of either kind of card, where there is none."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "card", lambda device: (card, 1))
    rule = Rule("falcon_3", window=window)
    inputs, state = narrow(*case(rule, 33, K=K, V=V), torch.bfloat16)
    have, grads = check(rule, inputs, state, forward=4e-3, backward=8e-3)
    assert have.output.dtype == grads["q"].dtype == torch.bfloat16


def test_float16_inputs():
    """Memory, decays and what comes from them stay float32, outputs and gradients are rounded once."""
    inputs, state = narrow(*case(RULES["default"], 20), torch.float16)
    have, grads = check(RULES["default"], inputs, state, forward=1e-3, backward=2e-3)
    assert have.output.dtype == grads["q"].dtype == torch.float16
    assert have.final_state.memory.dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("falcon_3", window=17), "rule.window is 17; with impl='triton' it must be at most 16"),
        (Rule("falcon_3", window=9, smoothness="exact"), "rule.smoothness is 'exact' and rule.window 9; with impl="),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(rule, message):
    inputs, _ = case(rule, 3)
    with pytest.raises(ValueError, match=message):
        attend(inputs, rule, impl="triton")
