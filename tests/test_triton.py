"""The Triton kernels are the recurrence: values, states, gradients, and the custom ops around them.

Without a GPU they run in Triton's interpreter, in float32 and small.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

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
    leaves,
    make_inputs,
    make_state,
)
from falcon_kernels import RULES as EVERY_RULE
from falcon_kernels import Rule
from falcon_kernels.schedule import energy, step_and_log_decay

interpreter.require()

from falcon_kernels import launch, launcher, triton_attention, triton_schedule  # noqa: E402
from falcon_kernels.triton_layout import NO_TABLES, Layout  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {name: rule for name, rule in VARIANTS.items() if rule.name in ("falcon_1", "falcon_1a", "falcon_3a")}
FORWARD, GRADIENT = 1e-5, 5e-5  # float32


@pytest.fixture(autouse=True)
def _poisoned():
    """Memory that a kernel has to fill holds NaN before it does."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills what torch.empty and its like return
    triton_attention.plan_of.cache_clear()
    yield
    triton_attention.plan_of.cache_clear()
    torch.use_deterministic_algorithms(False)


def test_memory_is_poisoned():
    t = torch.zeros(3, device=DEVICE)
    assert all(empty.isnan().all() for empty in (torch.empty(3, device=DEVICE), torch.empty_like(t), t.new_empty(3)))


def compare(rule, inputs, state=None, forward=FORWARD, gradient=GRADIENT, **options):
    """`impl="triton"` in float32 beside the recurrence in float64; returns the former's result and gradients."""
    inputs, state = (None if t is None else _on_device(t) for t in (inputs, state))
    exact = {n: None if t is None else t.detach().double().requires_grad_() for n, t in inputs.items()}
    wide = (lambda t: t.detach().double().requires_grad_()) if state is not None else None
    exact_state = None if state is None else state.map(lambda t: wide(t) if t.is_floating_point() else t)
    have = attend(inputs, rule, initial_state=state, impl="triton", **options)
    want = attend(exact, rule, initial_state=exact_state, impl="reference", **options)
    tensors, exact_tensors = leaves(inputs, state), leaves(exact, exact_state)
    return have, assert_same_results(have, want, tensors, exact_tensors, forward, gradient)


def _on_device(tensors):
    """Inputs or a state as leaves on the device under test."""

    def move(t):
        t = None if t is None else t.detach().to(DEVICE)
        return t.requires_grad_() if t is not None and t.is_floating_point() else t

    return {n: move(t) for n, t in tensors.items()} if isinstance(tensors, dict) else tensors.map(move)


def inputs_of(rule, T, B=1, H=2, K=16, V=16, **options):
    return make_inputs(rule, B=B, T=T, H=H, K=K, V=V, dtype=torch.float32, **options)


def state_of(rule, B=1, H=2, K=16, V=16, **options):
    return make_state(rule, B=B, H=H, K=K, V=V, dtype=torch.float32, **options)


@pytest.mark.parametrize("length", [1, 15, 17, 58, 64, 65])
@pytest.mark.parametrize("name", RULES)
def test_the_recurrence_from_a_carried_state(name, length):
    compare(RULES[name], inputs_of(RULES[name], length, H=1), state_of(RULES[name], H=1))


@pytest.mark.parametrize("name", RULES)
def test_the_recurrence_from_the_start(name):
    compare(RULES[name], inputs_of(RULES[name], 34, B=2, H=1))


@pytest.mark.parametrize("alignment", ["next_latent", "same_step"])
@pytest.mark.parametrize("timing", ["read_after_write", "read_before_write"])
@pytest.mark.parametrize("tail", range(4))
def test_every_length_of_the_tail(alignment, timing, tail):
    rule = Rule("falcon_3a", alignment=alignment, timing=timing)
    for length in (1, 2, 5):
        compare(rule, inputs_of(rule, length, H=1), state_of(rule, H=1, tail=tail))


@pytest.mark.parametrize("window", [2, 18])
def test_windows_up_to_a_chunk(window):
    rule = Rule("falcon_3a", window=window)
    compare(rule, inputs_of(rule, 40, H=1), state_of(rule, H=1, tail=window // 2))


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_packed_documents(name, carried):
    """Documents of one token and of none, one that ends with its chunk, and one over several chunks."""
    rule = RULES[name]
    lengths = [1, 34, 1, 0, 32, 0]
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    state = state_of(rule, B=len(lengths), H=1) if carried else None
    compare(rule, inputs_of(rule, sum(lengths), H=1), state, cu_seqlens=bounds)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_masks_with_holes(name, carried):
    rule, length = RULES[name], 37
    masks = torch.ones(4, length, dtype=torch.bool)
    masks[0, :20] = False
    masks[1, 1::3] = False
    masks[2, :] = False
    masks[3, 30:] = False
    inputs = inputs_of(rule, length, B=4, H=1)
    for t in inputs.values():
        if t is not None:
            t[~masks] = torch.nan
    have, grads = compare(rule, inputs, state_of(rule, B=4, H=1) if carried else None, mask=masks.to(DEVICE))
    assert not have.output[~masks].any()
    assert not any(grads[n][~masks].any() for n, t in inputs.items() if t is not None)


@pytest.mark.parametrize("name", RULES)
def test_sequences_cut_into_parts(name, monkeypatch):
    """Long sequences in a small batch: parts of them at once, rounding apart the same; also where parts are empty."""
    rule = RULES[name]
    monkeypatch.setattr(launch, "segments", lambda *_: 3)
    compare(rule, inputs_of(rule, 165, H=1), state_of(rule, H=1))
    bounds = torch.tensor([0, 5, 105, 105, 138], device=DEVICE)
    compare(rule, inputs_of(rule, 138, H=1), state_of(rule, B=4, H=1), cu_seqlens=bounds)


@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if rule.name == "falcon_1"])
def test_falcon_1_where_sequences_do_not_fill_the_card(name, monkeypatch):
    monkeypatch.setattr(launch, "fused", lambda *_: False)
    for length in (1, 65):
        test_the_recurrence_from_a_carried_state(name, length)
    for carried in (False, True):
        test_packed_documents(name, carried)
        test_masks_with_holes(name, carried)


@pytest.mark.parametrize(("K", "V"), [(96, 32), (32, 96), (128, 64), (192, 16), (16, 256)])
def test_head_dimensions(K, V):
    rule = Rule("falcon_3a")
    compare(rule, inputs_of(rule, 36, H=1, K=K, V=V), state_of(rule, H=1, K=K, V=V))


@pytest.mark.parametrize(("K", "V"), [(32, 32), (24, 20), (16, 24)])
@pytest.mark.parametrize("name", ["falcon_1a", "falcon_3a"])
def test_tiles_read_once(name, K, V, monkeypatch):
    """The backward of a chunk that keeps its tiles, of which there are up to two each way."""
    configs = launch.WIDE[launch.padded(K, 4)]
    backward = configs[2]._replace(value_tile=16, key_tile=16, once=True)
    monkeypatch.setitem(launch.WIDE, launch.padded(K, 4), (*configs[:2], backward))
    rule = RULES[name]
    for state in (None, state_of(rule, H=1, K=K, V=V)):
        compare(rule, inputs_of(rule, 36, H=1, K=K, V=V), state)


@pytest.mark.parametrize("name", ["falcon_1a", "falcon_3a"])
def test_decay_at_its_floor(name):
    """exp(-u) would overflow here."""
    rule = Rule(name, ridge="direct", decay_floor=0.01)
    inputs = inputs_of(rule, 70, H=1)
    inputs["gain"] = 1.5 + inputs["gain"] / 4.1
    inputs["ridge"] = torch.full_like(inputs["ridge"], 1e5)
    inputs["ridge"][:, 30:40] = 0.1
    inputs["v"] = inputs["v"] * 1e3
    compare(rule, inputs, state_of(rule, H=1))


@pytest.mark.parametrize("ridge", ["scale_coupled", "direct", "none"])
@pytest.mark.parametrize("name", ["falcon_1a", "falcon_3a"])
def test_zero_keys(name, ridge):
    """No energy and no epsilon: no step, and no NaN."""
    rule = Rule(name, ridge=ridge, epsilon=0.0)
    inputs = inputs_of(rule, 20, H=1)
    inputs["k"][:, 5:12] = 0
    compare(rule, inputs, state_of(rule, H=1))


@pytest.mark.parametrize("step_size", ["gain", "direct"])
@pytest.mark.parametrize("ridge", ["scale_coupled", "direct", "none"])
def test_the_schedule_of_a_regression_rule(step_size, ridge):
    """Its numbers, and the gradients of all that goes into it; the cap of a direct step size among them."""
    rule = Rule("falcon_1", step_size=step_size, ridge=ridge)
    inputs, state = _on_device(inputs_of(rule, 70, H=1)), _on_device(state_of(rule, H=1))
    exact = {n: t.detach().double() for n, t in inputs.items() if t is not None}
    x = torch.cat([state.previous_key.double()[:, None], exact["k"][:, :-1]], 1)
    count = torch.ones_like(exact["gain"])
    eta, decay = step_and_log_decay(energy(x, count, rule), exact["gain"], exact.get("ridge"), count > 0, rule)
    running = torch.cat([part.cumsum(1) for part in decay.split(32, 1)], 1) / math.log(2)

    options = triton_schedule.Options(
        1, True, triton_schedule.RIDGE[ridge], step_size == "direct", True, False, rule.epsilon, rule.decay_floor
    )
    plan = triton_schedule.Plan(Layout.of(1, 70, 0, 32), 1, 16, options, masked=False, carried=True)
    before = triton_schedule.Before(state.previous_key, state.previous_valid)
    with torch.no_grad():
        given = (inputs.get(name) for name in ("q", "k", "v", "gain", "ridge"))
        call = triton_schedule.Call(*given, None, before, None, NO_TABLES)
        weight, log_decay, _ = triton_schedule.forward(plan, call)
    for have, want in ((weight, eta), (log_decay, running)):
        assert_same(have.flatten()[:70].cpu(), want.flatten().cpu(), 1e-6)
    assert torch.equal(weight.flatten()[70:], torch.zeros(26, device=DEVICE))
    assert torch.equal(log_decay.flatten()[70:], log_decay.flatten()[69].expand(26))
    compare(rule, inputs, state)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a", "falcon_3a"])
def test_any_split_with_the_carried_state_is_one_pass(name):
    rule = Rule(name)
    inputs = _on_device(inputs_of(rule, 8, H=1))
    whole = attend(inputs, rule, impl="triton")
    for split in range(9):
        state, outputs = None, []
        for part in (cut(inputs, 0, split), cut(inputs, split, 8)):
            result = attend(part, rule, initial_state=state, impl="triton")
            state = result.final_state
            outputs.append(result.output)
        assert_same(torch.cat(outputs, 1), whole.output, 1e-6, f"split at {split}")
        assert_same_state(state, whole.final_state, 1e-6)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a", "falcon_3a"])
def test_the_same_bits_every_time_and_in_every_batch(name):
    rule = Rule(name)
    inputs = inputs_of(rule, 34, B=3, H=1)
    runs = []
    for rows in (slice(None), slice(None), slice(1, 2)):
        own = _on_device({n: t[rows] for n, t in inputs.items()})
        result = attend(own, rule, impl="triton")
        runs.append([result.output, *torch.autograd.grad(result.output.square().sum(), list(own.values()))])
    for a, b, alone in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:2], alone)


def op_arguments(rule, carried, packed=False, T=20):
    """Arguments of the op for a row, or for three documents, with or without a carried state."""
    inputs = _on_device(inputs_of(rule, T, H=1))
    bounds = torch.tensor([0, 1, 9, T], device=DEVICE) if packed else None
    state = _on_device(state_of(rule, B=3 if packed else 1, H=1)) if carried else [None] * 6
    return (
        *inputs.values(), *state[:6], None, bounds, rule.window, True, triton_schedule.RIDGE[rule.ridge], False,
        rule.residual, rule.detach_energy, 1e-6, 0.01, 0, False, True, False,
    )  # fmt: skip


@pytest.mark.parametrize(("carried", "packed"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(
    ("name", "fused"), [("falcon_1", True), ("falcon_1", False), ("falcon_1a", True), ("falcon_3a", True)]
)
def test_custom_ops_keep_their_contract(name, fused, carried, packed, monkeypatch):
    monkeypatch.setattr(launch, "fused", lambda *_: fused)
    arguments = op_arguments(Rule(name), carried, packed)
    torch.library.opcheck(triton_attention.attention_op, arguments)
    tensors = [None if t is None else t.detach() for t in arguments[: triton_attention.TENSORS]]
    options = arguments[triton_attention.TENSORS :]
    output, final, *kept = triton_attention.attention_op(*tensors, *options[:-1], True)
    torch.library.opcheck(
        triton_attention.attention_backward_op, (output, final, *tensors, *kept, None, None, *options[:-2])
    )


@pytest.mark.skipif(not hasattr(launcher.triton, "AsyncCompileMode"), reason="this Triton compiles one after another")
@pytest.mark.parametrize("name", EVERY_RULE)
def test_the_first_call_compiles_what_it_and_its_backward_launch(name, monkeypatch):
    asked, launched = [], []
    run = launcher.Launcher.__call__

    def noted(self, *arguments, flags=()):
        absent = tuple(argument is None for argument in arguments)
        (asked if launcher._compiling.get() else launched).append((self.kernel.__name__, flags, absent))
        run(self, *arguments, flags=flags)

    monkeypatch.setattr(launcher.Launcher, "__call__", noted)
    monkeypatch.setattr(triton_attention, "compiles", lambda device: True)
    rule = Rule(name)
    inputs = _on_device(inputs_of(rule, 20, H=1))
    for first in (True, False):
        output = attend(inputs, rule, impl="triton").output
        torch.autograd.grad(output.square().sum(), list(inputs.values()))
        assert asked == (launched if first else [])
        asked.clear()
        launched.clear()


def test_no_second_derivatives():
    rule = Rule("falcon_1a")
    inputs = _on_device(inputs_of(rule, 3, H=1))
    output = attend(inputs, rule, impl="triton").output
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(output.sum(), list(inputs.values()), create_graph=True)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a", "falcon_3a"])
def test_gradients_of_output_or_of_memory_alone(name):
    rule = Rule(name)
    inputs = _on_device(inputs_of(rule, 20, H=1))
    exact = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    have, want = attend(inputs, rule, impl="triton"), attend(exact, rule, impl="reference")
    for a, b in ((have.output, want.output), (have.final_state.memory, want.final_state.memory)):
        grads, exact_grads = (
            torch.autograd.grad(t.square().sum(), list(i.values()), retain_graph=True, materialize_grads=True)
            for t, i in ((a, inputs), (b, exact))
        )
        for what, g, e in zip(inputs, grads, exact_grads, strict=True):
            assert_same(g, e, GRADIENT, what)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a", "falcon_3a"])
def test_one_graph_under_compile(name):
    rule = Rule(name)
    inputs, state = _on_device(inputs_of(rule, 20, H=1)), _on_device(state_of(rule, H=1))
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[0, 3] = False

    def run(inputs):
        result = attend(inputs, rule, initial_state=state, mask=mask, impl="triton")
        return result.output, result.final_state.memory

    torch._dynamo.reset()
    for a, b in zip(torch.compile(run, fullgraph=True, backend="eager")(inputs), run(inputs), strict=True):
        assert torch.equal(a, b)


def test_one_graph_with_gradients_from_a_fresh_state_under_autocast():
    rule = Rule("falcon_1a")
    inputs = _on_device(inputs_of(rule, 5, H=1))

    def run(inputs):
        with torch.autocast(DEVICE, torch.bfloat16):
            return attend(inputs, rule, impl="triton").output.square().sum()

    torch._dynamo.reset()
    totals = (torch.compile(run, fullgraph=True, backend="aot_eager")(inputs), run(inputs))
    for a, b in zip(*(torch.autograd.grad(t, list(inputs.values())) for t in totals), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("card", ["large", "safe"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 96)])
@pytest.mark.parametrize(
    ("name", "processors"), [("falcon_1", 1), ("falcon_1", 1000), ("falcon_1a", 1), ("falcon_3a", 1)]
)
def test_bfloat16_inputs(name, processors, K, V, card, monkeypatch):
    """With the tiles and configurations of either kind of card, where there is none; falcon_1 in one pass and split."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "card", lambda device: (card, processors))
    rule = Rule(name)
    inputs, state = inputs_of(rule, 70, H=1, K=K, V=V), state_of(rule, H=1, K=K, V=V)

    def half(name, t):
        return (
            t.detach().bfloat16().requires_grad_() if name in ("q", "k", "v", "previous_key", "tail_x", "tail_v") else t
        )

    inputs = {n: half(n, t) for n, t in inputs.items()}
    state = state._replace(**{n: half(n, t) for n, t in state._asdict().items() if t is not None})
    have, grads = compare(rule, inputs, state, forward=5e-3, gradient=1e-2)
    assert have.output.dtype == grads["q"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("rule", "dtype", "message"),
    [
        (Rule("falcon_1a"), torch.float64, "q has dtype torch.float64; with impl='triton'"),
        (Rule("falcon_3a", window=200), torch.float32, "rule.window is 200; with impl='triton' it must be at most 65"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(rule, dtype, message):
    with pytest.raises(ValueError, match=message):
        attend(_on_device(make_inputs(rule, T=5, dtype=dtype)), rule, impl="triton")


def test_kernels_compile_for_a_small_card():
    """The interpreter forgives what the compiler does not; and configurations have to fit in 100 KB."""
    script = Path(__file__).parents[1] / "benchmarks" / "triton_resources.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, script, "--card", "safe", "--key-dims", "128", "--windows", "3", "--dtypes", "bfloat16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
