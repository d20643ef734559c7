"""Short convolution and gated norm as they are used on a GPU: picked, compiled, captured, at large offsets."""

import pytest
import torch
from cases import assert_same
from falcon_kernels import gated_norm, short_convolution
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = (torch.float32, torch.bfloat16)


def inputs(B=2, T=300, H=3, K=64, taps=4, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(B, T, H * K, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(H * K, taps, generator=generator, device="cuda")
    return x.requires_grad_(), weight.requires_grad_()


def run(x, weight, K=64, **options):
    return short_convolution(x, weight, K, **{"norm": "rms", **options})


def with_gradients(function, x, weight):
    y = function(x, weight)
    return [y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))]


def assert_same_bits(have, want):
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_is_picked_and_gives_the_same_bits_again(dtype):
    x, weight = inputs(dtype=dtype, T=1000)
    first = with_gradients(run, x, weight)
    for _ in range(10):
        assert_same_bits(with_gradients(lambda *t: run(*t, impl="triton"), x, weight), first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", ["none", "rms", "l2"])
@pytest.mark.parametrize("sizes", [{}, {"K": 128, "taps": 2}, {"K": 96, "taps": 7}, {"K": 24}, {"K": 256, "T": 33}])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_beside_float64(dtype, sizes, norm, packed):
    x, weight = inputs(dtype=dtype, **sizes)
    K, length = sizes.get("K", 64), x.shape[1]
    age = torch.arange(length, device="cuda") % 7 if packed else None
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    have = with_gradients(lambda *t: run(*t, K, norm=norm, age=age), x, weight)
    want = with_gradients(lambda *t: run(*t, K, norm=norm, age=age), *exact)
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    for what, a, b in zip(("output", "x", "weight"), have, want, strict=True):
        assert_same(a, b, 4 * bound, what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_forward_and_backward_are_the_same_bits(dtype):
    x, weight = inputs(dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    assert_same_bits(with_gradients(compiled, x, weight), with_gradients(run, x, weight))


def test_compiled_with_a_projection_under_autocast():
    x, weight = inputs(dtype=torch.float32)
    projection = torch.randn(192, 192, device="cuda") / 14

    def projected(x, weight):
        with torch.autocast("cuda", torch.bfloat16):
            return run(x @ projection, weight)

    torch._dynamo.reset()
    have, want = (with_gradients(f, x, weight) for f in (torch.compile(projected, fullgraph=True), projected))
    assert want[0].dtype == torch.bfloat16
    for a, b in zip(have, want, strict=True):
        assert_same(a, b, 2e-2)


def test_the_plain_form_keeps_its_dtype_under_autocast():
    """Where PyTorch's RMS norm gives float32."""
    x, weight = inputs()
    with torch.autocast("cuda", torch.bfloat16):
        plain, fused = (run(x, weight, impl=impl) for impl in ("torch", "triton"))
    assert plain.dtype == fused.dtype == torch.bfloat16
    assert_same(fused, plain, 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_training_step_replays(dtype):
    x, weight = inputs(dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with_gradients(run, x, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = with_gradients(run, x, weight)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same_bits([t.clone() for t in replayed], with_gradients(run, x, weight))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit_of_a_gradient(reentrant):
    x, weight = inputs()
    found = []
    for y in (run(x, weight), checkpoint(run, x, weight, use_reentrant=reentrant)):
        y.float().square().sum().backward()
        found.append([x.grad, weight.grad])
        x.grad = weight.grad = None
    assert_same_bits(*found)


def test_tokens_beyond_the_reach_of_32_bits():
    """Rows of the batch, and tokens of a row, that lie more than 2^31 numbers apart; and an output that long."""
    storage = torch.empty((1 << 31) + (1 << 20), dtype=torch.bfloat16, device="cuda").normal_()
    _, weight = inputs(H=1)
    apart, far = storage.as_strided((2, 50, 64), (1 << 31, 64, 1)), storage.as_strided((1, 50, 64), (0, 43_846_992, 1))
    for x in (apart, far):
        near = x.clone().requires_grad_()
        have, want = with_gradients(run, x.detach().requires_grad_(), weight), with_gradients(run, near, weight)
        assert_same_bits(have, want)
    x = storage.view(-1, 64)[None].requires_grad_()
    y = run(x, weight)
    assert torch.equal(y[:, -40:], run(x[:, -43:], weight)[:, 3:])
    (of_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
    last = x[:, -43:].detach().requires_grad_()
    (of_last,) = torch.autograd.grad(run(last, weight), last, torch.ones_like(y[:, -43:]))
    assert torch.equal(of_x[:, -40:], of_last[:, -40:])


def norm_inputs(dtype, *lead, V=64):
    x, gate = (torch.randn(*lead, V, device="cuda", dtype=dtype).requires_grad_() for _ in range(2))
    return [x, torch.randn(V, device="cuda").requires_grad_(), gate]


def norm_with_gradients(function, tensors):
    y = function(*tensors)
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


@pytest.mark.parametrize("V", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_the_norm_beside_float64_again_and_compiled(dtype, V):
    tensors = norm_inputs(dtype, 2, 300, 3, V=V)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    have, again, want = (
        norm_with_gradients(gated_norm, tensors),
        norm_with_gradients(lambda *t: gated_norm(*t, impl="triton"), tensors),
        norm_with_gradients(gated_norm, exact),
    )
    torch._dynamo.reset()
    assert_same_bits(again, have)
    assert_same_bits(norm_with_gradients(torch.compile(gated_norm, fullgraph=True), tensors), have)
    for a, b in zip(have, want, strict=True):
        assert_same(a, b, {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2.4e-3}[dtype])


def test_a_captured_norm_replays():
    tensors = norm_inputs(torch.bfloat16, 2, 300, 3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        norm_with_gradients(gated_norm, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = norm_with_gradients(gated_norm, tensors)
    with torch.no_grad():
        tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert_same_bits([t.clone() for t in replayed], norm_with_gradients(gated_norm, tensors))


def test_rows_of_the_norm_beyond_the_reach_of_32_bits():
    x = torch.empty((1 << 25) + 10, 64, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    weight = torch.randn(64, device="cuda")
    y = gated_norm(x, weight)
    (of_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
    last = x[-20:].detach().requires_grad_()
    expected = gated_norm(last, weight)
    (of_last,) = torch.autograd.grad(expected, last, torch.ones_like(expected))
    assert torch.equal(y[-20:], expected)
    assert torch.equal(of_x[-20:], of_last)
