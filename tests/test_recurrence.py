"""The recurrence itself: against the formulas written out by hand, and against what the rules reduce to."""

import numpy as np
import pytest
import torch
from cases import (
    INPUTS,
    VARIANTS,
    assert_same,
    assert_same_state,
    attend,
    cut,
    leaves,
    make_inputs,
    make_state,
)
from falcon_kernels import RULES, FalconState, Rule, falcon_step
from falcon_kernels.schedule import energy


def by_hand(inputs, rule):
    """One head of one fresh row, in numpy, straight from the definition: windows as index sets, sums as loops."""
    q, k, v, gain = (inputs[n][0, :, 0].numpy() for n in ("q", "k", "v", "gain"))
    ridge = np.zeros(len(q)) if inputs["ridge"] is None else inputs["ridge"][0, :, 0].numpy()
    length, K, V = len(q), q.shape[1], v.shape[1]
    first = 1 if rule.alignment == "next_latent" else 0
    x = np.vstack([np.zeros((1, K)), k[:-1]]) if first else k
    S, z = np.zeros((K, V)), np.zeros((K, V))
    outputs = []
    for t in range(length):
        S_before, z_before = S, z
        window = [j for j in range(max(first, t - rule.window + 1), t + 1)]
        if window:
            mean = sum(np.outer(x[j], x[j]) for j in window) / len(window)
            if rule.name == "falcon_3":
                eigenvalues = np.clip(np.linalg.eigvalsh(mean), 0, None)
                E = {
                    "exact": eigenvalues[-1],
                    "bound": (eigenvalues**16).sum() ** (1 / 16),
                    "trace": eigenvalues.sum(),
                }[rule.smoothness]
            else:
                E = np.trace(mean)
            lam = {"scale_coupled": ridge[t] * E, "direct": ridge[t], "none": 0.0}[rule.ridge]
            eta = gain[t] / (E + lam + rule.epsilon)
            if rule.step_size == "direct":
                eta = np.minimum(gain[t], 2 / (E + lam + rule.epsilon)) if rule.residual else gain[t]
            gamma = 1 - np.minimum(eta * lam, 1 - rule.decay_floor)
            update, z_update = np.zeros((K, V)), np.zeros((K, V))
            for j in window:
                target = v[j] - S.T @ x[j] if rule.residual else v[j]
                update += np.outer(x[j], eta / len(window) * target)
                z_update += np.outer(x[j], eta / len(window) * np.ones(V))
            S, z = gamma * S + update, gamma * z + z_update
        read, normalizer = (S_before, z_before) if rule.timing == "read_before_write" else (S, z)
        out = read.T @ q[t]
        outputs.append(out / (normalizer.T @ q[t] + rule.read_epsilon) if rule.normalized_read else out)
    return torch.tensor(np.array(outputs))[None, :, None], torch.tensor(S)[None, None]


@pytest.mark.parametrize("name", VARIANTS)
def test_recurrence_is_the_definition(name):
    rule = VARIANTS[name]
    inputs = make_inputs(rule, B=1, T=13, H=1, K=5, V=4)
    result = attend(inputs, rule, impl="reference")
    output, memory = by_hand(inputs, rule)
    assert_same(result.output, output, 1e-12, "output")
    assert_same(result.final_state.memory, memory, 1e-12, "memory")


@pytest.mark.parametrize("name", VARIANTS)
def test_step_updates_the_state_in_place(name):
    rule = VARIANTS[name]
    inputs = make_inputs(rule, T=9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    whole = attend(inputs, rule, mask=mask, initial_state=make_state(rule), impl="reference")
    state = make_state(rule)
    addresses = [t.data_ptr() for t in state if t is not None]
    outputs = []
    for t in range(9):
        token = [None if a is None else a[:, t] for a in (inputs[n] for n in INPUTS)]
        output, returned = falcon_step(*token, state, rule=rule, mask=mask[:, t])
        assert returned is state
        outputs.append(output)
    assert [t.data_ptr() for t in state if t is not None] == addresses
    assert_same(torch.stack(outputs, 1), whole.output, 1e-14)
    assert_same_state(state, whole.final_state, 1e-14)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", RULES)
def test_first_token_of_a_fresh_row_only_reads(name, impl):
    """Next-latent: no pair yet, so the memory is neither written nor decayed, whatever it holds."""
    rule = Rule(name)
    inputs = make_inputs(rule, T=1, requires_grad=True)
    state = make_state(rule, requires_grad=True)
    state.previous_valid.fill_(False)
    result = attend(inputs, rule, initial_state=state, impl=impl)
    assert_same(result.output[:, 0], torch.einsum("bhkv,bhk->bhv", state.memory, inputs["q"][:, 0]), 1e-14)
    assert torch.equal(result.final_state.memory, state.memory)
    assert result.final_state.previous_valid.all()
    grads = torch.autograd.grad(
        result.output.sum() + result.final_state.memory.square().sum(), [inputs[n] for n in ("v", "gain", "ridge")],
        allow_unused=True,
    )  # fmt: skip
    assert all(g is None or not g.any() for g in grads)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", RULES)
def test_an_invalid_previous_key_is_never_seen(name, impl):
    """Not in the first step and not in later windows, whatever stands in its place."""
    rule = Rule(name)
    inputs = make_inputs(rule, T=9)
    states = [make_state(rule), make_state(rule)]
    for state, content in zip(states, (0.0, torch.nan), strict=True):
        state.previous_valid.fill_(False)
        state.previous_key.fill_(content)
    want, have = (attend(inputs, rule, initial_state=state, impl=impl) for state in states)
    assert_same(have.output, want.output, 1e-14)
    assert_same_state(have.final_state, want.final_state, 1e-14)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_2", "falcon_3", "falcon_1a", "falcon_2a", "falcon_3a"])
def test_detached_energy(name):
    """Detached, a scale-coupled ridge is a direct one that happens to equal ridge times energy."""
    coupled = Rule(name, alignment="same_step", detach_energy=True)
    direct = Rule(name, alignment="same_step", ridge="direct")
    inputs = make_inputs(coupled, requires_grad=True)
    x = inputs["k"].detach().transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, 0, coupled.window - 1, 0))
    count = torch.arange(1, x.shape[2] + 1).clamp_max(coupled.window).double()[: inputs["k"].shape[1]]
    E = energy(x, count, coupled).transpose(1, 2)
    want = attend(inputs | {"ridge": inputs["ridge"] * E}, direct).output
    have = attend(inputs, coupled).output
    assert_same(have, want, 1e-13)
    compare_gradients(have, want, inputs)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_first_token_after_a_carried_state_writes(impl):
    rule = Rule("falcon_1")
    inputs, state = make_inputs(rule, T=1), make_state(rule)
    result = attend(inputs, rule, initial_state=state, impl=impl)
    assert not torch.allclose(result.final_state.memory, state.memory)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a"])
@pytest.mark.parametrize("alignment", ["next_latent", "same_step"])
def test_window_of_one_pair(name, alignment):
    """falcon_3 and falcon_3a with W = 1 are falcon_1 and falcon_1a, gradients included under equal detach rules."""
    sliding = name.replace("1", "3")
    one = Rule(name, alignment=alignment, detach_energy=False)
    inputs = make_inputs(one, requires_grad=True)
    want = attend(inputs, one, impl="torch")
    have = attend(inputs, Rule(sliding, window=1, alignment=alignment, detach_energy=False), impl="torch")
    assert_same(have.output, want.output, 1e-13)
    compare_gradients(have.output, want.output, inputs)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_1a"])
def test_tied_gains(name):
    """falcon_2 and falcon_2a with the same gain in every channel are falcon_1 and falcon_1a."""
    one, two = Rule(name), Rule(name.replace("1", "2"))
    inputs = make_inputs(one, requires_grad=True)
    want = attend(inputs, one, impl="torch")
    tied = inputs | {"gain": inputs["gain"][..., None].expand_as(inputs["v"])}
    have = attend(tied, two, impl="torch")
    assert_same(have.output, want.output, 1e-13)
    compare_gradients(have.output, want.output, inputs)


def compare_gradients(have, want, inputs):
    weights = torch.randn_like(want)
    tensors = list(leaves(inputs).values())
    for a, b in zip(
        torch.autograd.grad(have, tensors, weights), torch.autograd.grad(want, tensors, weights), strict=True
    ):
        assert_same(a, b, 1e-11)


def test_falcon_1_is_a_gated_delta_rule():
    rule = Rule("falcon_1", alignment="same_step")
    inputs = make_inputs(rule, B=1, H=1, T=30)
    q, k, v, gain, ridge = (inputs[n][0, :, 0] for n in INPUTS)
    E = k.square().sum(-1)
    eta = gain / (E + ridge * E + rule.epsilon)
    gamma = 1 - eta * ridge * E
    S, outputs = torch.zeros(4, 3, dtype=torch.float64), []
    for t in range(30):
        transition = torch.eye(4, dtype=torch.float64) - eta[t] / gamma[t] * torch.outer(k[t], k[t])
        S = gamma[t] * transition @ S + eta[t] / gamma[t] * torch.outer(k[t], gamma[t] * v[t])
        outputs.append(S.T @ q[t])
    assert_same(attend(inputs, rule).output[0, :, 0], torch.stack(outputs), 1e-13)


def test_falcon_1a_is_decayed_linear_attention():
    rule = Rule("falcon_1a", alignment="same_step")
    inputs = make_inputs(rule, B=1, H=1, T=30)
    q, k, v, gain, ridge = (inputs[n][0, :, 0] for n in INPUTS)
    E = k.square().sum(-1)
    eta = gain / (E + ridge * E + rule.epsilon)
    S, outputs = torch.zeros(4, 3, dtype=torch.float64), []
    for t in range(30):
        S = (1 - eta[t] * ridge[t] * E[t]) * S + torch.outer(eta[t] * k[t], v[t])
        outputs.append(S.T @ q[t])
    assert_same(attend(inputs, rule).output[0, :, 0], torch.stack(outputs), 1e-13)


def test_falcon_1_without_ridge_is_deltanet():
    rule = Rule("falcon_1", alignment="same_step", step_size="direct", ridge="none")
    inputs = make_inputs(rule, B=1, H=1, T=30)
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs["gain"] = torch.sigmoid(4 * inputs["gain"] - 2) * 1.99
    q, k, v, beta, _ = (None if inputs[n] is None else inputs[n][0, :, 0] for n in INPUTS)
    S, outputs = torch.zeros(4, 3, dtype=torch.float64), []
    for t in range(30):
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        outputs.append(S.T @ q[t])
    assert_same(attend(inputs, rule).output[0, :, 0], torch.stack(outputs), 1e-13)


def test_falcon_1a_with_a_constant_step_is_linear_attention():
    rule = Rule("falcon_1a", alignment="same_step", step_size="direct", ridge="none")
    inputs = make_inputs(rule, T=30)
    inputs["gain"] = torch.full_like(inputs["gain"], 0.25)
    scores = torch.einsum("bthk,bshk->bhts", inputs["q"], inputs["k"]).tril() * 0.25
    assert_same(attend(inputs, rule).output, torch.einsum("bhts,bshv->bthv", scores, inputs["v"]), 1e-13)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_2", "falcon_3"])
def test_every_step_lowers_its_own_objective(name):
    """Regularized squared error over the window, for gains inside (0, 2) and no clamp (paper, section 3.2)."""
    rule = Rule(name, alignment="same_step")
    inputs = make_inputs(rule, B=1, H=1, T=40)
    inputs["gain"] = inputs["gain"].clamp(0.05, 1.95)
    lowered = 0
    for t in range(1, 40):
        before = attend(cut(inputs, 0, t), rule, impl="reference").final_state.memory[0, 0]
        after = attend(cut(inputs, 0, t + 1), rule, impl="reference").final_state.memory[0, 0]
        x, v = (inputs[n][0, max(0, t - rule.window + 1) : t + 1, 0] for n in ("k", "v"))
        E = torch.linalg.eigvalsh(x.T @ x / len(x))[-1]
        lam = inputs["ridge"][0, t, 0] * E

        def objective(S, x=x, v=v, lam=lam):
            return (v - x @ S).square().sum() / len(x) / 2 + lam * S.square().sum() / 2

        assert objective(after) <= objective(before) + 1e-12
        lowered += bool(objective(after) < objective(before) - 1e-6)
    assert lowered > 20


@pytest.mark.parametrize("name", RULES)
def test_rescaling_all_features_leaves_what_is_recalled(name):
    """epsilon = 0 and a scale-coupled ridge: x times c divides the memory by c, and decays stay."""
    rule = Rule(name, epsilon=0.0)
    inputs = make_inputs(rule)
    scaled = inputs | {"k": inputs["k"] * 7.0, "q": inputs["q"] * 7.0}
    assert_same(attend(scaled, rule).output, attend(inputs, rule).output, 1e-12)


@pytest.mark.parametrize("name", RULES)
def test_zero_features_do_nothing(name):
    """With epsilon = 0 the denominator vanishes and the step is 0, not NaN; gradients stay finite."""
    rule = Rule(name, epsilon=0.0, ridge="none")
    inputs = make_inputs(rule, requires_grad=True)
    inputs["k"] = torch.zeros_like(inputs["k"], requires_grad=True)
    state = make_state(rule)
    if state.tail_valid is not None:
        state.tail_valid.fill_(False)
    state.previous_key.zero_()
    result = attend(inputs, rule, initial_state=state)
    assert_same(result.final_state.memory, state.memory, 1e-15)
    for grad in torch.autograd.grad(result.output.sum(), list(leaves(inputs).values()), allow_unused=True):
        assert grad is None or grad.isfinite().all()


def test_a_null_feature_under_direct_ridge_wipes_the_memory():
    """Documented behaviour: energy far below a direct ridge drives the decay to its floor where the gain is above 1."""
    rule = Rule("falcon_1", alignment="same_step", ridge="direct")
    inputs = make_inputs(rule, B=1, H=1, T=1)
    inputs["k"].zero_()
    inputs["gain"].fill_(1.5)
    inputs["ridge"].fill_(1.0)
    state = make_state(rule, B=1, H=1)
    memory = state.memory.clone()
    after = attend(inputs, rule, initial_state=state).final_state.memory
    assert_same(after, memory * rule.decay_floor, 1e-12)


def test_falcon_1_approaches_recursive_least_squares():
    """On a stationary linear stream the exact ridge solution is the better memory, and Falcon-1 comes close to it."""
    rule = Rule("falcon_1", alignment="same_step", ridge="none")
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 400, 1, 8, generator=generator, dtype=torch.float64)
    v = x @ truth + 0.05 * torch.randn(1, 400, 1, 3, generator=generator, dtype=torch.float64)
    gain = torch.full((1, 400, 1), 0.5, dtype=torch.float64)
    S = attend({"q": x, "k": x, "v": v, "gain": gain, "ridge": None}, rule).final_state.memory[0, 0]
    X = x[0, :, 0]
    exact = torch.linalg.solve(X.T @ X + 1e-3 * torch.eye(8, dtype=torch.float64), X.T @ v[0, :, 0])
    off, off_exact = (torch.linalg.norm(m - truth) / torch.linalg.norm(truth) for m in (S, exact))
    assert off_exact < off < 0.05


@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smoothness_is_the_largest_eigenvalue(window, dtype):
    generator = torch.Generator().manual_seed(window)
    x = torch.randn(3, 40 + window - 1, 6, generator=generator, dtype=torch.float64).to(dtype)
    x[:, 10:14] = x[:, 9:10]  # identical
    x[:, 20:24] = -x[:, 19:20]  # opposite
    x[:, 30:34] = 0
    count = torch.ones(3, 40, dtype=dtype)
    windows = x.double().unfold(1, window, 1)  # [3, 40, 6, W]
    truth = torch.linalg.eigvalsh(windows.transpose(-1, -2) @ windows)[..., -1]
    exact = energy(x, count, Rule("falcon_3", window=window, smoothness="exact"))
    bound = energy(x, count, Rule("falcon_3", window=window, smoothness="bound"))
    trace = energy(x, count, Rule("falcon_3", window=window, smoothness="trace"))
    assert_same(exact, truth, 5e-7 if dtype == torch.float32 else 1e-14)
    slack = 1e-5 * truth
    assert (bound >= truth - slack).all()
    assert (bound <= truth * window ** (1 / 16) + slack).all()
    assert (trace >= bound - slack).all()


@pytest.mark.parametrize("smoothness", ["exact", "bound", "trace"])
@pytest.mark.parametrize("kind", ["orthogonal", "identical", "opposite", "zero", "near"])
def test_smoothness_gradient_where_eigenvalues_meet(smoothness, kind):
    """Any valid subgradient g has <x, g> = 2 E; it must also be finite."""
    window = 4
    x = torch.zeros(window, 6, dtype=torch.float64)
    if kind in ("orthogonal", "near"):
        x[:, :window] = 2 * torch.eye(window, dtype=torch.float64)
    if kind == "near":
        x = x + 1e-9 * torch.randn(window, 6, dtype=torch.float64)
    if kind in ("identical", "opposite"):
        x[:] = torch.arange(1.0, 7.0, dtype=torch.float64)
    if kind == "opposite":
        x[1::2] *= -1
    x.requires_grad_()
    E = energy(x, torch.full((1,), float(window), dtype=torch.float64), Rule("falcon_3", smoothness=smoothness))
    (grad,) = torch.autograd.grad(E.sum(), x)
    assert grad.isfinite().all()
    assert_same((x * grad).sum(), 2 * E.sum(), 1e-12)


def test_state_is_constant_in_the_sequence():
    rule = Rule("falcon_3a")
    sizes = {attend(make_inputs(rule, T=T), rule).final_state.nbytes() for T in (1, 3, 64, 300)}
    assert sizes == {FalconState.zeros(rule, 2, 2, 4, 3, dtype=torch.float64).nbytes()}
