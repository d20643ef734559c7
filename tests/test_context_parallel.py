"""One sequence over several processes gives what one process gives, forwards and backwards."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import INPUTS, VARIANTS, assert_same, assert_same_state, make_inputs
from falcon_kernels import falcon_attention
from falcon_kernels.ranks import falcon_attention_over_ranks
from processes import failures, on_ranks

RANKS = 3
LENGTHS = {"even": (21, 21, 21), "uneven": (70, 11, 16)}
WAYS = {"hand-over": False, "scan": True}


def kernel_cases():
    return [
        f"{variant} {way} {lengths}"
        for variant, rule in VARIANTS.items()
        for way in WAYS
        for lengths in LENGTHS
        if not (way == "scan" and rule.name == "falcon_2")
    ]


def same_attention(case, dtype, forward, gradient):
    """Output, state and gradients of this rank beside those of its part of the whole."""
    variant, way, lengths = case.split()
    rule, parts = VARIANTS[variant], LENGTHS[lengths]
    rank = dist.get_rank()
    start, end = sum(parts[:rank]), sum(parts[: rank + 1])
    whole = make_inputs(rule, T=sum(parts), decay=0.3, requires_grad=True)
    mine = {n: None if t is None else t.detach()[:, start:end].to(dtype).requires_grad_() for n, t in whole.items()}
    cotangent = torch.randn(whole["v"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    want = falcon_attention(*(whole[n] for n in INPUTS), rule=rule, output_final_state=True)
    want.output.backward(cotangent)
    before = falcon_attention(
        *(None if t is None else t[:, :end] for t in whole.values()), rule=rule, output_final_state=True
    ).final_state
    have = falcon_attention_over_ranks(
        *(mine[n] for n in INPUTS), rule=rule, scan=WAYS[way], output_final_state=True
    )
    have.output.backward(cotangent[:, start:end].to(dtype))
    assert_same(have.output, want.output[:, start:end], forward, "output")
    assert_same_state(have.final_state, before, forward)
    for name, t in mine.items():
        if t is not None:
            assert_same(t.grad, whole[name].grad[:, start:end], gradient, f"gradient of {name}")


def check_kernels():
    checks = {case: partial(same_attention, case, torch.float64, 1e-12, 1e-11) for case in kernel_cases()}
    return failures(checks)


@pytest.fixture(scope="module")
def kernel_failures(tmp_path_factory):
    return on_ranks(RANKS, check_kernels, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", kernel_cases())
def test_attention_over_ranks_is_that_of_one_process(case, kernel_failures):
    assert [found[case] for found in kernel_failures] == [""] * RANKS
