"""RMS norm of each head and its gate beside the definition in float64; kernels in their interpreter."""

import falcon_kernels.norm as norm
import interpreter
import pytest
import torch
from cases import assert_same
from falcon_kernels import gated_norm, launch
from tiny_models import CASES, tiny_model, tokens
from torch.utils.checkpoint import checkpoint

interpreter.require()

from falcon_kernels import triton_norm  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
IMPLEMENTATIONS = ("torch", "triton")


def inputs(*lead, V=16, gated=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, weight, gate = (torch.randn(*s, V, generator=generator).to(DEVICE, dtype) for s in (lead, (), lead))
    found = [x, weight, *([gate.flatten(-2)] if gated else [])]
    return [t.requires_grad_() for t in found]


def defined(x, weight, gate=None, epsilon=1e-6):
    y = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return y if gate is None else y * (gate * torch.sigmoid(gate)).view(x.shape)


def gradients(y, tensors):
    along = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return torch.autograd.grad(y, tensors, along)


def check(tensors, impl, **options):
    bound = BOUND[tensors[0].dtype]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    have, want = gated_norm(*tensors, impl=impl, **options), defined(*exact, **options)
    assert have.dtype == tensors[0].dtype
    assert_same(have, want, bound, "output")
    found = gradients(have, tensors)
    for what, t, a, b in zip(("x", "weight", "gate"), tensors, found, gradients(want, exact), strict=False):
        assert a.dtype == t.dtype
        assert_same(a, b, 4 * bound, f"gradient of {what}")
    return have, *found


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lead", [(1, 1, 1), (2, 3, 2), (1, 7, 5), (2, 50, 3)])
def test_lengths(lead, gated, impl):
    check(inputs(*lead, gated=gated), impl, epsilon=0.1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 12, 13, 40])
def test_tiles_that_are_not_full_and_many_of_them(rows, gated, monkeypatch):
    """Programs of three tiles of two rows, and of two of one."""
    monkeypatch.setattr(launch, "NORM", {4: (launch.Walk(32, 3, 1), launch.Walk(16, 2, 1))})
    triton_norm.plan_of.cache_clear()
    check(inputs(1, rows, 1, gated=gated), "triton")
    triton_norm.plan_of.cache_clear()


@pytest.mark.parametrize("V", [3, 24, 64, 96, 256])
@pytest.mark.parametrize("gated", [False, True])
def test_head_dimensions(V, gated):
    check(inputs(1, 6, 3, V=V, gated=gated), "triton")


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype, wide_weight):
    x, weight, gate = inputs(2, 20, 2, dtype=dtype)
    check([x, weight.detach().to(torch.float32 if wide_weight else dtype).requires_grad_(), gate], "triton")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_zero_vectors_and_inputs_that_are_not_contiguous(impl):
    x, weight, gate = inputs(2, 6, 4)
    with torch.no_grad():
        x[:, :3] = 0
    parts = [x.detach()[:, :, ::2].requires_grad_(), weight, gate.detach()[..., :32].requires_grad_()]
    y, *found = check(parts, "triton" if impl == "triton" else "torch")
    assert not y[:, :3].any()
    assert all(g.isfinite().all() for g in found)


def test_nothing_to_do():
    tensors = inputs(2, 0, 3)
    y = gated_norm(*tensors, impl="triton")
    grads = torch.autograd.grad(y.sum(), tensors)
    assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert not grads[1].any()


def test_the_same_bits_again_and_under_checkpointing():
    tensors = inputs(2, 40, 3)

    def run(*tensors):
        return gated_norm(*tensors, impl="triton")

    first, again, recomputed = (
        gradients(y, tensors) for y in (run(*tensors), run(*tensors), checkpoint(run, *tensors, use_reentrant=False))
    )
    for a, b, c in zip(first, again, recomputed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("gated", [False, True])
def test_custom_ops_keep_their_contract(gated):
    x, weight, gate = (*inputs(2, 3, 2, gated=gated), None)[:3]
    torch.library.opcheck(triton_norm.OP.op, (x, weight, gate, 1e-6))
    tensors = [None if t is None else t.detach() for t in (x, weight, gate)]
    torch.library.opcheck(triton_norm.OP.backward_op, (torch.ones_like(x), *tensors, 1e-6))


def test_one_graph_under_compile_and_autocast():
    x, weight, gate = inputs(2, 3, 2)
    projection = torch.randn(16, 16, device=DEVICE) / 4

    def run(x, weight, gate):
        with torch.autocast(DEVICE, torch.bfloat16):
            return gated_norm(x @ projection, weight, gate.bfloat16(), impl="triton")

    torch._dynamo.reset()
    have, want = torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight, gate), run(x, weight, gate)
    assert want.dtype == torch.bfloat16
    assert torch.equal(have, want)
    for a, b in zip(gradients(have, [x, weight, gate]), gradients(want, [x, weight, gate]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["2-gate-values", "1a-normalized"])
def test_a_model_with_the_kernels_equals_one_without(case, monkeypatch):
    model, ids, found = tiny_model(torch.float32, **CASES[case]).to(DEVICE), tokens(2, 9).to(DEVICE), []
    for impl in IMPLEMENTATIONS:
        monkeypatch.setattr(norm, "_best", lambda *_, impl=impl: impl)
        model.zero_grad()
        outputs = model(ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        found.append({"logits": outputs.logits, **{name: p.grad.clone() for name, p in model.named_parameters()}})
    for name, want in found[0].items():
        assert_same(found[1][name], want, 1e-4, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.ones(15)}, r"weight has shape \[15\]; it must be \[16\], one for each channel\."),
        ({"gate": torch.ones(2, 3, 31)}, r"gate has shape \[2, 3, 31\]; it must be as many numbers as x, \[2, 3, 2,"),
        ({"impl": "cuda"}, r"impl is 'cuda'; it must be one of torch, triton\."),
        ({"weight": torch.ones(16).double()}, r"weight has dtype torch.float64; with impl='triton' it must be"),
        ({"x": torch.ones(1, 257), "weight": torch.ones(257)}, r"x has 257 channels; with impl='triton' at most 256"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options, message):
    x, weight = inputs(2, 3, 2, gated=False)
    with pytest.raises(ValueError, match=message):
        gated_norm(**{"x": x, "weight": weight, "impl": "triton", **options})
