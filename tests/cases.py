"""One input factory, one error measure and one list of rules for all tests of the kernels."""

import torch
from falcon_kernels import RULES, FalconState, Rule, falcon_attention

INPUTS = ("q", "k", "v", "gain", "ridge")

# Every option of a rule in at least one place, combined pairwise rather than all with all.
VARIANTS = {
    "falcon_1": Rule("falcon_1"),
    "falcon_2": Rule("falcon_2"),
    "falcon_3": Rule("falcon_3"),
    "falcon_1a": Rule("falcon_1a"),
    "falcon_2a": Rule("falcon_2a"),
    "falcon_3a": Rule("falcon_3a"),
    "1-same-before-direct": Rule(
        "falcon_1", alignment="same_step", timing="read_before_write", step_size="direct", ridge="direct"
    ),
    "2-same-direct-none": Rule("falcon_2", alignment="same_step", step_size="direct", ridge="none"),
    "2-before-direct-detached": Rule(
        "falcon_2", timing="read_before_write", step_size="direct", ridge="direct", detach_energy=True
    ),
    "3-same-bound-direct": Rule("falcon_3", window=3, alignment="same_step", smoothness="bound", step_size="direct"),
    "3-before-trace-ridge": Rule(
        "falcon_3",
        window=2,
        timing="read_before_write",
        smoothness="trace",
        ridge="direct",
        detach_energy=False,
    ),
    "3-wide-live": Rule("falcon_3", window=10, detach_energy=False),
    "1a-same-normalized-direct": Rule("falcon_1a", alignment="same_step", normalized_read=True, step_size="direct"),
    "1a-before-none": Rule("falcon_1a", timing="read_before_write", ridge="none"),
    "2a-normalized-before": Rule("falcon_2a", normalized_read=True, timing="read_before_write"),
    "2a-same-direct-ridge": Rule("falcon_2a", alignment="same_step", step_size="direct", ridge="direct"),
    "3a-normalized-live-ridge": Rule("falcon_3a", window=5, normalized_read=True, detach_energy=False, ridge="direct"),
    "3a-same-before-direct": Rule(
        "falcon_3a", window=3, alignment="same_step", timing="read_before_write", step_size="direct"
    ),
}


def make_inputs(rule, B=2, T=17, H=2, K=4, V=3, *, seed=0, dtype=torch.float64, decay=1.0, requires_grad=False):
    """Random q, k, v, gain, ridge as a dict, RMS-normalized keys; `decay` scales the ridge."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def features():
        raw = normal(B, T, H, K)
        raw = raw.abs() if rule.normalized_read else raw
        return raw / raw.square().mean(-1, keepdim=True).sqrt()

    inputs = {
        "q": features(),
        "k": features(),
        "v": normal(B, T, H, V),
        "gain": 2 * torch.sigmoid(normal(B, T, H, *([V] if rule.per_channel else []))),
        "ridge": decay * torch.sigmoid(normal(B, T, H) - 1),
    }
    if rule.step_size == "direct":
        inputs["gain"] = inputs["gain"] * 1.2 / K  # some of it above the cap 2 / (K + ...)
    if rule.ridge == "direct":
        inputs["ridge"] = inputs["ridge"] * K
    if rule.ridge == "none":
        inputs["ridge"] = None
    return {name: None if t is None else t.to(dtype).requires_grad_(requires_grad) for name, t in inputs.items()}


def make_state(rule, B=2, H=2, K=4, V=3, *, tail=None, seed=1, dtype=torch.float64, requires_grad=False):
    """A random state whose last `tail` pairs are valid (all of them by default)."""
    generator = torch.Generator().manual_seed(seed)

    def fill(t):
        if t.dtype == torch.bool:
            return torch.ones_like(t)
        raw = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        return (raw.abs() if rule.normalized_read else raw).requires_grad_(requires_grad)

    state = FalconState.zeros(rule, B, H, K, V, dtype=dtype).map(fill)
    if tail is not None and state.tail_valid is not None:
        state.tail_valid[:, : rule.window - 1 - tail] = False
    return state


def attend(inputs, rule, **options):
    return falcon_attention(*(inputs[name] for name in INPUTS), rule=rule, output_final_state=True, **options)


def cut(inputs, start, end):
    return {name: None if t is None else t[:, start:end] for name, t in inputs.items()}


def rows(inputs, index):
    return {name: None if t is None else t[index] for name, t in inputs.items()}


def error(have, want):
    """Relative RMS error; infinite where anything is not finite."""
    have, want = have.detach().double(), want.detach().double()
    if not torch.isfinite(have).all():
        return float("inf")
    scale = want.square().mean().sqrt().clamp_min(1e-300) if want.numel() else torch.tensor(1.0)
    if want.abs().sum() == 0:
        scale = torch.tensor(1.0, dtype=torch.float64)
    return ((have - want).square().mean().sqrt() / scale).item() if want.numel() else 0.0


def assert_same(have, want, bound, what=""):
    assert have.shape == want.shape, f"{what}: shape {list(have.shape)} instead of {list(want.shape)}"
    off = error(have, want)
    assert off <= bound, f"{what}: relative RMS error {off:.3g} above {bound:.3g}"


def assert_same_state(have, want, bound):
    for field, a, b in zip(FalconState._fields, have, want, strict=True):
        assert (a is None) == (b is None), field
        if a is not None and a.dtype == torch.bool:
            assert torch.equal(a, b), field
        elif a is not None:
            assert_same(a, b, bound, field)


def gradients(result, leaves, seed=2):
    """Gradients of a fixed random projection of output and final state with respect to `leaves`."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for t in (result.output, *(result.final_state or ())):
        if t is not None and t.requires_grad:
            total = total + (t * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def assert_same_results(have, want, tensors, exact, forward, gradient):
    """Output, state and gradients of `tensors`, by name, beside those of `exact`; returns the gradients."""
    assert_same(have.output, want.output, forward, "output")
    assert_same_state(have.final_state, want.final_state, forward)
    have_gradients = gradients(have, list(tensors.values()))
    want_gradients = gradients(want, list(exact.values()))
    for what, a, b in zip(tensors, have_gradients, want_gradients, strict=True):
        assert_same(a, b, gradient, f"gradient of {what}")
    return dict(zip(tensors, have_gradients, strict=True))


def leaves(inputs, state=None):
    found = {name: t for name, t in inputs.items() if t is not None}
    if state is not None:
        found |= {
            f: t for f, t in zip(FalconState._fields, state, strict=True) if t is not None and t.is_floating_point()
        }
    return found


def names():
    return list(RULES)
