"""The Triton kernels of falcon_1 against the recurrence in float64; without a GPU, in Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    def _patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)  # NumPy 2.4 no longer turns the interpreter's scalars, arrays of one element, into int
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor

from cases import assert_same, attend, gradients, leaves, make_inputs, make_state
from falcon_kernels import FalconState, Rule
from falcon_kernels import triton_regression as kernels
from falcon_kernels.api import FalconOutput
from falcon_kernels.schedule import energy, step_and_log_decay

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
        previous = torch.zeros_like(k).index_put((row, place), previous_key[sequence])
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
    weight, log_decay = schedule(
        k.float(), gain, ridge, state.previous_key, state.previous_valid, cu_seqlens, rule
    )
    tensors = [t if t is None else t.to(DEVICE) for t in (q, k, v, weight, log_decay, state.memory, previous, cu_seqlens)]
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
