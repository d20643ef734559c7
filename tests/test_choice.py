"""Which implementation runs where none is named."""

import sys

import pytest
import torch
from cases import VARIANTS, attend, make_inputs, make_state
from falcon_kernels import FalconState, Rule, api, convolution, falcon_step, norm


@pytest.fixture
def called(monkeypatch):
    """Names of the implementations that were called, in turn; each stands in for itself by the PyTorch form."""
    names = []

    def stand_in(name):
        def attention(q, k, v, gain, ridge, state, rule, mask=None, cu_seqlens=None, **_):
            names.append(name)
            return v, state

        return attention

    for name in ("reference", "torch", "triton"):
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, stand_in(name))
    return names


@pytest.fixture
def on_cards(monkeypatch):
    """Tensors without values on a GPU of this capability, and no real GPU needed."""
    pytest.importorskip("triton")
    from falcon_kernels import triton_device
    from torch._subclasses.fake_tensor import FakeTensorMode

    def cards(capability=(9, 0), hip=None):
        triton_device._asked_once.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        return FakeTensorMode(allow_non_fake_inputs=True)

    yield cards
    triton_device._asked_once.cache_clear()


def cuda(rule, dtype=torch.float32, **sizes):
    inputs = make_inputs(rule, **{"T": 3, "K": 16, "V": 16, **sizes})
    return {n: None if t is None else torch.empty(t.shape, dtype=dtype, device="cuda") for n, t in inputs.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_on_the_cpu_whatever_is_installed(name, called):
    attend(make_inputs(VARIANTS[name]), VARIANTS[name])
    assert called == ["torch"]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_triton_on_a_gpu_for_the_rules_that_it_has(name, grad, called, on_cards):

    with on_cards(), torch.set_grad_enabled(grad):
        attend(cuda(VARIANTS[name]), VARIANTS[name])
    assert called == ["triton"]


@pytest.mark.parametrize(
    ("rule", "options", "card"),
    [
        (Rule("falcon_1a"), {"dtype": torch.float64}, {}),
        (Rule("falcon_1a"), {"K": 512}, {}),
        (Rule("falcon_1a"), {"V": 512}, {}),
        (Rule("falcon_1"), {"K": 512}, {}),
        (Rule("falcon_3a", window=200), {}, {}),
        (Rule("falcon_1a"), {}, {"capability": (7, 5)}),
        (Rule("falcon_1a"), {}, {"hip": "7.0"}),
    ],
)
def test_what_triton_refuses_goes_to_torch(rule, options, card, called, on_cards):
    from falcon_kernels import triton_api

    with on_cards(**card):
        inputs = cuda(rule, **options)
        assert triton_api.refusal(inputs["q"], inputs["k"], inputs["v"], rule) is not None
        attend(inputs, rule)
        with pytest.raises(ValueError, match="with impl='triton'"):
            triton_api.attention(*inputs.values(), None, rule)
    assert called == ["torch"]


@pytest.mark.parametrize("how", ["none", "old"])
def test_torch_where_triton_cannot_be_imported(how, called, on_cards, monkeypatch):
    import triton
    from falcon_kernels import triton_device  # noqa: F401

    monkeypatch.delitem(sys.modules, "falcon_kernels.triton_device")
    monkeypatch.delattr("falcon_kernels.triton_device")
    if how == "none":
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.delattr(triton, "knobs")
    api._import_triton.cache_clear()
    with on_cards():
        attend(cuda(Rule("falcon_1a")), Rule("falcon_1a"))
    assert called == ["torch"]
    assert not api._has_triton()
    api._import_triton.cache_clear()


@pytest.mark.parametrize(("card", "expected"), [({}, ["triton"]), ({"capability": (7, 5)}, ["reference"])])
@pytest.mark.parametrize("name", ["falcon_1", "falcon_2", "falcon_3a"])
def test_one_token_takes_triton_on_a_gpu(name, card, expected, on_cards, monkeypatch):
    from falcon_kernels import triton_step

    names, rule = [], Rule(name)
    monkeypatch.setattr(triton_step, "step", lambda q, k, v, *_: names.append("triton") or v)
    monkeypatch.setattr(api.reference, "step", lambda *a: names.append("reference") or (a[2], a[5]))
    monkeypatch.setattr(FalconState, "copy_", lambda state, _: state)
    with on_cards(**card):
        inputs = {n: torch.empty(t[:, 0].shape, device="cuda") for n, t in make_inputs(rule, K=16, V=16).items()}
        state = make_state(rule, K=16, V=16, dtype=torch.float32).map(lambda t: torch.empty_like(t, device="cuda"))
        falcon_step(*inputs.values(), state, rule=rule)
    assert names == expected


def test_one_token_takes_the_recurrence_on_the_cpu(monkeypatch):
    names, rule = [], Rule("falcon_1")
    monkeypatch.setattr(api.reference, "step", lambda *a: names.append("reference") or (a[2], a[5]))
    falcon_step(*(t[:, 0] for t in make_inputs(rule).values()), make_state(rule), rule=rule)
    assert names == ["reference"]


@pytest.mark.parametrize(
    ("card", "dtype", "taps", "head_dim", "expected"),
    [
        ({}, torch.float32, 4, 16, "triton"),
        ({}, torch.bfloat16, 8, 256, "triton"),
        ({}, torch.float16, 1, 5, "triton"),
        ({}, torch.float64, 4, 16, "torch"),
        ({}, torch.float32, 9, 16, "torch"),
        ({}, torch.float32, 4, 257, "torch"),
        ({"capability": (7, 5)}, torch.float32, 4, 16, "torch"),
        ({"hip": "6.0"}, torch.float32, 4, 16, "torch"),
    ],
)
def test_convolution_and_norm_take_triton_on_a_gpu(card, dtype, taps, head_dim, expected, on_cards):
    with on_cards(**card):
        x = torch.empty(2, 3, 2 * head_dim, dtype=dtype, device="cuda")
        weight = torch.empty(2 * head_dim, taps, device="cuda")
        assert convolution._best(x, weight, head_dim) == expected
        if taps <= 8:
            of_heads = torch.empty(head_dim, device="cuda")
            assert norm._best(x.unflatten(-1, (2, head_dim)), of_heads, x) == expected
    assert convolution._best(torch.empty(2, 3, 32), torch.empty(32, 4), 16) == "torch"


def test_the_choice_breaks_no_graph(on_cards, monkeypatch):
    """Traced on the CPU, which passes for a GPU."""
    from falcon_kernels import triton_api, triton_device

    on_cards()
    monkeypatch.setattr(triton_api.triton_device, "refusal", lambda _: triton_device._refusal_of_card(0))
    rule = Rule("falcon_1a")
    inputs = make_inputs(rule, T=3, K=16, V=16, dtype=torch.float32)

    def run(inputs):
        chosen = triton_api.refusal(inputs["q"], inputs["k"], inputs["v"], rule) is None and api._has_triton()
        return inputs["q"] * 2 if chosen else inputs["q"] * 3

    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(inputs), inputs["q"] * 2)
