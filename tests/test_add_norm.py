"""A sum and its RMS norm beside the definition in float64; kernels in their interpreter."""

import falcon_kernels.norm as norm
import interpreter
import pytest
import torch
import torch.distributed as dist
from cases import assert_same
from falcon_kernels import launch
from falcon_kernels.norm import add_norm
from tiny_models import CASES, tiny_model, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

interpreter.require()

from falcon_kernels import triton_norm  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def small_launches():
    """Plans of one test are not those of another, which may have changed the sizes."""
    triton_norm.sum_plan_of.cache_clear()
    yield
    triton_norm.sum_plan_of.cache_clear()


@pytest.fixture
def fused(monkeypatch):
    """Lets the kernels run on this device wherever they would on a GPU; the calls are counted."""
    calls, run = [], triton_norm.add_norm
    monkeypatch.setattr(norm, "_best_step", lambda x: "triton")
    monkeypatch.setattr(triton_norm, "add_norm", lambda *given: calls.append(1) or run(*given))
    return calls


def inputs(*lead, D=24, dtype=torch.float32, narrow=None):
    """x, h in `narrow`, by default as x, and the weight."""
    generator = torch.Generator().manual_seed(0)
    x, h, weight = (torch.randn(*s, D, generator=generator) for s in (lead, lead, ()))
    found = x.to(dtype), h.to(narrow or dtype), weight.to(dtype)
    return [t.to(DEVICE).requires_grad_() for t in found]


def defined(x, h, weight, epsilon):
    total = x if h is None else x + h
    return total, total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def directions(outputs):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]


def gradients(outputs, tensors, along, which=(0, 1)):
    """Of those tensors that learn, along directions of the sum, the norm, or both."""
    tensors = [t for t in tensors if t is not None and t.requires_grad]
    along = [along[i].to(outputs[i].dtype) for i in which]
    return torch.autograd.grad([outputs[i] for i in which], tensors, along, allow_unused=True)


def check(x, h, weight, epsilon=0.1, dtype=None, which=(0, 1)):
    """Values and gradients; returns all of them."""
    dtype = dtype or x.dtype
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, h, weight)]
    have, want = triton_norm.add_norm(x, h, weight, epsilon, dtype), defined(*exact, epsilon)
    assert have[0].dtype == x.dtype
    assert have[1].dtype == dtype
    assert_same(have[0], want[0], BOUND[x.dtype], "sum")
    assert_same(have[1], want[1], BOUND[dtype], "norm")
    along = directions(have)
    found, expected = gradients(have, (x, h, weight), along, which), gradients(want, exact, along, which)
    given = [(what, t) for what, t in zip(("x", "h", "weight"), (x, h, weight), strict=True) if t is not None]
    given = [(what, t) for what, t in given if t.requires_grad]
    for (what, t), a, b in zip(given, found, expected, strict=True):
        assert a.dtype == t.dtype
        assert_same(a, torch.zeros_like(a) if b is None else b, 2 * BOUND[t.dtype], f"gradient of {what}")
    return *have, *found


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("D", [1, 24, 64, 96, 768, 1000, 2048, 8192])
def test_widths(D, summed):
    x, h, weight = inputs(2, 3, D=D)
    check(x, h if summed else None, weight)


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24, 25, 33, 150])
def test_tiles_that_are_not_full_and_many_of_them(rows, summed, monkeypatch):
    """Tiles of eight rows, in the backward in at most three programs."""
    monkeypatch.setattr(launch, "SUM_TILE", 256)
    monkeypatch.setattr(launch, "at_once", lambda device, warps: 3)
    x, h, weight = inputs(rows, 1)
    check(x, h if summed else None, weight)


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("which", [(0,), (1,)])
def test_gradients_of_one_output_alone(which, summed):
    x, h, weight = inputs(2, 5)
    check(x, h if summed else None, weight, which=which)


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float16),
                                               (torch.bfloat16, None), (torch.float16, None)])  # fmt: skip
def test_dtypes(dtype, narrow):
    """As under autocast, and as in a model of 16 bits."""
    x, h, weight = inputs(2, 50, dtype=dtype, narrow=narrow)
    total, y, of_x, of_h, _ = check(x, h, weight, dtype=narrow or dtype)
    assert torch.equal(total, x + h)
    assert torch.equal(of_h, of_x.to(h.dtype))
    wide = total.detach().double()
    rounded = (wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()).to(y.dtype)
    assert (y != rounded).float().mean() < 0.01  # rounded once


@pytest.mark.parametrize("summed", [True, False])
def test_a_frozen_weight_has_no_gradient(summed):
    x, h, weight = inputs(2, 9)
    weight.requires_grad_(False)
    check(x, h if summed else None, weight)


@pytest.mark.parametrize("summed", [True, False])
def test_what_is_before_need_not_learn(summed):
    x, h, weight = inputs(2, 9)
    x.requires_grad_(False)
    check(x, h if summed else None, weight, which=(1,))


def test_zero_rows_and_inputs_that_are_not_contiguous_and_no_tokens_at_all():
    x, h, weight = inputs(2, 12)
    with torch.no_grad():
        x[:, :4], h[:, :2] = 0, 0
    parts = x.detach()[:, ::2].requires_grad_(), h.detach()[:, :6].requires_grad_()
    for branch in (parts[1], None):
        _, y, *found = check(parts[0], branch, weight)
        assert not y[:, 0].any()
        assert all(g.isfinite().all() for g in found)
    x, h, weight = inputs(2, 0)
    total, y = triton_norm.add_norm(x, h, weight, 1e-6, x.dtype)
    found = torch.autograd.grad(total.sum() + y.sum(), (x, h, weight))
    assert [g.shape for g in found] == [t.shape for t in (x, h, weight)]
    assert not found[2].any()


@pytest.mark.parametrize("summed", [True, False])
def test_the_same_bits_again_without_gradients_and_under_checkpointing(summed):
    x, h, weight = inputs(2, 40)
    tensors = x, h if summed else None, weight

    def run(*tensors):
        return triton_norm.add_norm(*tensors, 1e-6, torch.float32)

    with torch.no_grad():
        values = run(*tensors)
    outputs = run(*tensors), run(*tensors), checkpoint(run, *tensors, use_reentrant=False)
    for again in outputs:
        assert all(torch.equal(a, b) for a, b in zip(again, values, strict=True))
    first, second, recomputed = (gradients(outs, tensors, directions(outs)) for outs in outputs)
    for a, b, c in zip(first, second, recomputed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("summed", [True, False])
def test_it_keeps_the_sum_and_the_weight_alone(summed):
    x, h, weight = inputs(2, 40)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        total, _ = triton_norm.add_norm(x, h if summed else None, weight, 1e-6, torch.float32)
    assert [t.data_ptr() for t in kept] == [total.data_ptr(), weight.data_ptr()]
    assert (total.data_ptr() == x.data_ptr()) is not summed


def test_second_derivatives_are_refused():
    x, h, weight = inputs(2, 3)
    _, y = triton_norm.add_norm(x, h, weight, 1e-6, torch.float32)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Marked(torch.Tensor):
    """A tensor of which PyTorch's operations may do anything."""


def plain_norm(D=24):
    return nn.RMSNorm(D, eps=1e-6).to(DEVICE)


def test_what_is_fused(fused):
    x, h, _ = inputs(2, 3)
    module = plain_norm()

    def fuses(x=x, h=h, module=module):
        return norm._fuses_sum(x, h, module)

    assert fuses()
    assert fuses(h=None)
    assert fuses(module=plain_norm().requires_grad_(False))
    assert fuses(h=h.bfloat16())
    assert not fuses(x=x.bfloat16())  # the weight is float32
    assert fuses(x=x.bfloat16(), h=h.bfloat16(), module=plain_norm().bfloat16())
    assert not fuses(x=x.bfloat16(), module=plain_norm().bfloat16())  # the sum is wider than x
    assert not fuses(x=x.double(), h=h.double(), module=plain_norm().double())
    assert not fuses(module=nn.LayerNorm(24).to(DEVICE))
    assert not fuses(module=nn.RMSNorm(24, elementwise_affine=False))
    assert not fuses(x=x[..., :1], h=h[..., :1])
    assert not fuses(h=h[:, :1])
    assert not fuses(x=x[..., None], h=None)
    assert not fuses(h=h.as_subclass(Marked))
    assert not fuses(x=x.as_subclass(Marked), h=None)
    wide = torch.empty(1, 2, launch.WIDEST_SUM + 1, device=DEVICE)
    assert not fuses(x=wide, h=None, module=plain_norm(wide.shape[-1]))
    for register in (module.register_forward_hook, module.register_forward_pre_hook,
                     module.register_full_backward_hook, module.register_full_backward_pre_hook):  # fmt: skip
        handle = register(lambda *given: None)
        assert not fuses()
        handle.remove()
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    assert not fuses()


def test_traced_and_transformed_tensors_go_through_pytorch(fused):
    x, h, _ = inputs(2, 3)
    module = plain_norm()
    with FlopCounterMode(display=False):
        add_norm(x, h, module)
    assert_same(torch.func.vmap(lambda a: add_norm(a, None, module)[1])(x), module(x), 1e-6)
    assert_same(torch.func.vmap(lambda b: add_norm(x[0], b, module)[1])(h), module(x[0] + h), 1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: add_norm(a, b, module)[1], fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, h), module(x + h), 1e-6)
    assert not fused


def test_a_single_token_without_gradients_has_its_own_kernels(fused, monkeypatch):
    from falcon_kernels import single_token

    monkeypatch.setattr(single_token, "_best_step", lambda x: "triton")
    x, h, _ = inputs(2, 1)
    module = plain_norm()
    with torch.no_grad():
        assert add_norm(x, None, module)[0] is x
        total, y = add_norm(x, h, module)
    assert not fused
    assert torch.equal(total, x + h)
    assert_same(y, module(total), 1e-6)
    add_norm(x, h, module)
    assert len(fused) == 1


def test_on_a_cpu_the_module_itself_is_called():
    x, h, _ = (t.cpu() for t in inputs(2, 3))
    called, module = [], nn.RMSNorm(24, eps=1e-6)
    module.register_forward_hook(lambda *given: called.append(1))
    total, y = add_norm(x, h, module)
    assert torch.equal(total, x + h)
    assert torch.equal(y, module(total))
    assert len(called) == 2
    with torch.autocast("cpu", torch.bfloat16):
        total, y = add_norm(x, h.bfloat16(), module, torch.bfloat16)
    assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(y, module(x + h.bfloat16()).bfloat16())


def outcome(model, ids, autocast):
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        outputs = model(ids, labels=ids, use_cache=False, output_hidden_states=True)
    outputs.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": outputs.logits, **dict(enumerate(outputs.hidden_states)), **gradients}


@pytest.mark.parametrize("way", ["", "frozen", "autocast", "checkpointing"])
@pytest.mark.parametrize("case", ["falcon_1", "3a-hybrid"])
def test_a_model_with_the_kernels_equals_one_without(case, way, fused, monkeypatch):
    model, ids = tiny_model(torch.float32, **CASES[case]).to(DEVICE).train(), tokens(2, 9).to(DEVICE)
    if way == "checkpointing":
        model.gradient_checkpointing_enable()
    if way == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
    found = outcome(model, ids, way == "autocast")
    norms = 2 * model.config.num_hidden_layers
    assert len(fused) == 1 + norms * (2 if way == "checkpointing" else 1)
    monkeypatch.setattr(norm, "_best_step", lambda x: "reference")
    expected = outcome(model, ids, way == "autocast")
    assert found.keys() == expected.keys()
    assert all(found[i].dtype == torch.float32 for i in range(model.config.num_hidden_layers + 1))
    for name, want in expected.items():
        assert found[name].dtype == want.dtype
        assert_same(found[name], want, 5e-2 if way == "autocast" else 1e-4, name)


@pytest.fixture
def one_process():
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_gathered_weights_are_fused_and_norms_sharded_alone_are_not(fused, one_process):
    ids, found = tokens(2, 9).to(DEVICE), []
    for way in ("whole", "layers", "norms"):
        model = tiny_model(torch.float32).to(DEVICE).train()
        if way == "norms":
            for layer in model.model.layers:
                fully_shard(layer.input_layernorm, mesh=one_process)
        if way != "whole":
            for layer in model.model.layers:
                fully_shard(layer, mesh=one_process)
            fully_shard(model, mesh=one_process)
        fused.clear()
        outputs = model(ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        assert len(fused) == 1 + (1 if way == "norms" else 2) * model.config.num_hidden_layers
        grads = {name: p.grad if way == "whole" else p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append({"logits": outputs.logits, **grads})
    for name, want in found[0].items():
        assert_same(found[1][name], want, 1e-6, name)
        assert_same(found[2][name], want, 1e-4, name)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("D", [64, 768, 1000, 2048, 8192])
@pytest.mark.parametrize("summed", [True, False])
def test_many_rows_under_autocast_s_dtypes(D, summed):
    """In more tiles than there are programs in the backward."""
    x, h, weight = inputs(3, 2001, D=D, narrow=torch.bfloat16)
    check(x, h if summed else None, weight, dtype=torch.bfloat16)
    check(*(t.detach().bfloat16().requires_grad_() for t in (x, h, weight)))


@pytest.mark.gpu
@gpu
def test_it_runs_under_autocast_on_a_gpu():
    x, h, _ = inputs(2, 30)
    module = plain_norm()
    with torch.autocast("cuda", torch.bfloat16):
        assert norm._fuses_sum(x, h.bfloat16(), module)
        total, y = add_norm(x, h.bfloat16(), module, torch.bfloat16)
        assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert add_norm(x, None, module)[1].dtype == torch.float32
        narrow = plain_norm().bfloat16()
        assert add_norm(x.bfloat16(), None, narrow)[1].dtype == narrow(x.bfloat16()).dtype
    (gradient,) = torch.autograd.grad(y.float().sum(), [module.weight])
    assert gradient.dtype == torch.float32


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_training_and_evaluation_are_the_same_bits(autocast):
    model, ids = tiny_model(torch.float32).cuda().train(), tokens(2, 40).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        trained = model(ids, use_cache=False).logits
        with torch.no_grad():
            assert torch.equal(model(ids, use_cache=False).logits, trained)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("summed", [True, False])
def test_a_captured_training_step_replays(summed):
    x, h, weight = inputs(4, 300, D=768, narrow=torch.bfloat16)
    tensors = x, h if summed else None, weight

    def step():
        outputs = triton_norm.add_norm(*tensors, 1e-6, torch.bfloat16)
        along = [torch.ones_like(out) for out in outputs]
        return *outputs, *torch.autograd.grad(outputs, [t for t in tensors if t is not None], along)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(replayed, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@gpu
def test_it_takes_less_memory_than_pytorch_s_operations(monkeypatch):
    x, h, _ = inputs(16, 1024, D=1024, narrow=torch.bfloat16)
    module, numbers = plain_norm(1024), x.numel()
    torch.use_deterministic_algorithms(False)

    def bytes_per_number():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            total, y = add_norm(x, h, module, torch.bfloat16)
        kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        assert total.shape == y.shape
        return kept / numbers, peak / numbers

    fused = bytes_per_number()
    assert fused == pytest.approx((6, 6), abs=0.01)
    monkeypatch.setattr(norm, "_fuses_sum", lambda *given: False)
    kept, peak = bytes_per_number()
    assert kept > 6
    assert peak > 9


@pytest.mark.gpu
@gpu
def test_rows_beyond_the_reach_of_32_bits():
    x = torch.empty((1 << 21) + 10, 1024, device="cuda").normal_().requires_grad_()
    h = torch.empty_like(x, dtype=torch.bfloat16).normal_().requires_grad_()
    weight = torch.randn(1024, device="cuda")

    def run(x, h):
        outputs = triton_norm.add_norm(x, h, weight, 1e-6, torch.bfloat16)
        return *outputs, *torch.autograd.grad(outputs, (x, h), [torch.ones_like(out) for out in outputs])

    torch.use_deterministic_algorithms(False)
    expected = run(*(t[-20:].detach().requires_grad_() for t in (x, h)))
    for a, b in zip(run(x, h), expected, strict=True):
        assert torch.equal(a[-20:], b)
