"""SiLU(x) * y and its projection beside the definition in float64; kernels in their interpreter."""

from pathlib import Path

import falcon_kernels.mlp as mlp
import interpreter
import pytest
import torch
import torch.nn.functional as F
from cases import assert_same
from tiny_models import tiny_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

interpreter.require()

from falcon_kernels import triton_mlp  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(*lead, D=24, out=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = (*lead, D), (*lead, D), (out, D)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in sizes]


def defined(x, y, weight):
    return F.linear(x * torch.sigmoid(x) * y, weight)


def gradients(out, tensors):
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return torch.autograd.grad(out, tensors, along)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("lead", [(1, 1), (3, 7), (43,), (2, 5, 13)])  # 24 to 3,120 numbers, in tiles of 1,024
def test_values_and_gradients(lead, dtype):
    tensors = inputs(*lead, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    have, want = triton_mlp.OP(*tensors), defined(*exact)
    assert have.dtype == dtype
    assert_same(have, want, BOUND[dtype], "output")
    for what, t, a, b in zip("xyw", tensors, gradients(have, tensors), gradients(want, exact), strict=True):
        assert a.dtype == t.dtype
        assert_same(a, b, 2 * BOUND[dtype], f"gradient of {what}")


def test_large_numbers_of_either_sign():
    x, y, weight = inputs(2, 3)
    with torch.no_grad():
        x[0], x[1] = 200.0, -200.0
    found = triton_mlp.OP(x, y, weight)
    assert_same(found[0], F.linear(200 * y[0], weight), 1e-6)
    assert not found[1].any()
    assert all(g.isfinite().all() for g in gradients(found, [x, y, weight]))


def test_inputs_that_are_not_contiguous_and_no_tokens_at_all():
    x, y, weight = inputs(2, 6)
    parts = [x.detach()[:, ::2].requires_grad_(), y.detach()[:, :3].requires_grad_(), weight]
    found, want = triton_mlp.OP(*parts), defined(*parts)
    assert_same(found, want, 2e-6)
    for a, b in zip(gradients(found, parts), gradients(want, parts), strict=True):
        assert_same(a, b, 4e-6)
    none = inputs(2, 0)
    found = torch.autograd.grad(triton_mlp.OP(*none).sum(), none)
    assert [g.shape for g in found] == [t.shape for t in none]
    assert not found[2].any()


def test_the_same_bits_again_and_under_checkpointing():
    tensors = inputs(2, 40)
    outs = triton_mlp.OP(*tensors), triton_mlp.OP(*tensors), checkpoint(triton_mlp.OP, *tensors, use_reentrant=False)
    first, again, recomputed = (gradients(out, tensors) for out in outs)
    for a, b, c in zip(first, again, recomputed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_it_keeps_its_inputs_alone():
    tensors, kept = inputs(2, 40), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        triton_mlp.OP(*tensors)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in tensors]


def test_custom_ops_keep_their_contract():
    tensors = inputs(2, 3)
    torch.library.opcheck(triton_mlp.OP.op, tuple(tensors))
    grad = torch.ones(2, 3, 16, device=DEVICE)
    torch.library.opcheck(triton_mlp.OP.backward_op, (grad, *(t.detach() for t in tensors)))


def test_a_model_with_the_kernels_equals_one_without(monkeypatch):
    model, ids, found = tiny_model(torch.float32).to(DEVICE).train(), tokens(2, 9).to(DEVICE), []
    calls = []
    run = triton_mlp.OP._forward
    monkeypatch.setattr(triton_mlp.OP, "_forward", lambda *given: calls.append(1) or run(*given))
    for fuses in (False, True):
        monkeypatch.setattr(mlp, "_fuses", lambda x, y, linear, fuses=fuses: fuses)
        out = model(ids, labels=ids)
        found.append([out.logits, *torch.autograd.grad(out.loss, list(model.parameters()))])
    assert len(calls) == model.config.num_hidden_layers
    for a, b in zip(*found, strict=True):
        assert_same(a, b, 1e-5)


def test_on_a_cpu_the_module_itself_is_called():
    x, y, _ = inputs(2, 3)
    called, linear = [], nn.Linear(24, 16, bias=False)
    linear.register_forward_hook(lambda *given: called.append(1))
    assert torch.equal(mlp.silu_projection(x.cpu(), y.cpu(), linear), linear(F.silu(x.cpu()) * y.cpu()))
    assert len(called) == 2


@pytest.mark.gpu
@gpu
def test_what_is_fused_on_a_gpu():
    x, y, _ = inputs(2, 3)
    linear = nn.Linear(24, 16, bias=False).cuda()
    assert mlp._fuses(x, y, linear)
    assert not mlp._fuses(x, y, nn.Linear(24, 16).cuda())
    assert not mlp._fuses(x.bfloat16(), y.bfloat16(), linear)
    assert not mlp._fuses(x, y, linear.requires_grad_(False))
    with torch.no_grad():
        assert mlp._fuses(x, y, linear)
    linear.requires_grad_(True)
    with torch.autocast("cuda", torch.bfloat16):
        assert not mlp._fuses(x, y, linear)
        assert mlp._fuses(x.bfloat16(), y.bfloat16(), linear)
        out = mlp.silu_projection(x.bfloat16(), y.bfloat16(), linear)
        assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.float().sum(), [linear.weight])
    assert gradient.dtype == torch.float32
    handle = linear.register_forward_hook(lambda *given: None)
    assert not mlp._fuses(x, y, linear)
    handle.remove()
    assert mlp._fuses(x, y, linear)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_evaluation_are_the_same_bits(dtype):
    model, ids = tiny_model(dtype).cuda().train(), tokens(2, 40).cuda()
    trained = model(ids).logits
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained)


def test_elementwise_kernels_take_sixteen_bytes_at_a_time():
    """Compiled for a GPU as they are launched; numbers that are no multiple of 16 go one by one."""
    from test_triton_step import without_interpreter

    printed = without_interpreter(str(Path(__file__).parent / "access_widths.py"))
    widths = [tuple(line.split()) for line in printed.splitlines()]
    assert widths[:4] == [("mlp", way, bits) for bits in ("128", "16") for way in ("_forward", "_backward")]
    assert len(widths) == 10
    for kernel, way, *bits in widths[4:]:  # weights and sums for their gradients are float32, and few
        assert "128" in bits, f"{kernel} {way}"
        assert set(bits) <= {"32", "128"}, f"{kernel} {way}"
