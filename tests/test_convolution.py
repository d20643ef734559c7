"""Short convolution, SiLU and norm of each head beside a loop over tokens in float64; kernels in their interpreter."""

import falcon_kernels.convolution as convolution
import interpreter
import pytest
import torch
from cases import assert_same
from falcon_kernels import launch, short_convolution
from tiny_models import CASES, tiny_model, tokens
from torch.utils.checkpoint import checkpoint

interpreter.require()

from falcon_kernels import triton_convolution  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
IMPLEMENTATIONS = ("torch", "triton")
NORMS = ("none", "rms", "l2")


@pytest.fixture
def short_walks(monkeypatch):
    """Programs of two walks of four tokens and of one, so that few tokens have many of them."""
    small = (launch.Walk(32, 4, 1), launch.Walk(16, 4, 1))
    monkeypatch.setattr(launch, "CONVOLUTION", {2: small, 4: small})
    triton_convolution.plan_of.cache_clear()
    yield
    triton_convolution.plan_of.cache_clear()


def defined(x, weight, head_dim, norm="none", epsilon=1e-6, age=None):
    """From the definition, token by token."""
    taps, length = weight.shape[1], x.shape[1]
    outputs = []
    for t in range(length):
        oldest = t if age is None else int(age[t])
        u = sum(weight[:, -1 - i] * x[:, t - i] for i in range(min(taps, oldest + 1)))
        s = (u * torch.sigmoid(u)).unflatten(-1, (-1, head_dim))
        if norm != "none":
            size = s.square().sum(-1, keepdim=True) / (head_dim if norm == "rms" else 1)
            s = s / (size + epsilon).sqrt()
        outputs.append(s)
    return torch.stack(outputs, 1)


def inputs(B=2, T=17, H=2, K=16, taps=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(B, T, H * K, generator=generator), torch.randn(H * K, taps, generator=generator)
    return (t.to(DEVICE, dtype).requires_grad_() for t in (x, weight))


def ages(*lengths):
    return torch.cat([torch.arange(n, device=DEVICE) for n in lengths])


def gradients(y, tensors):
    generator = torch.Generator().manual_seed(1)
    along = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    return torch.autograd.grad(y, tensors, along)


def check(x, weight, head_dim, impl, bound=None, **options):
    """Values and gradients beside the definition; returns them."""
    bound = BOUND[x.dtype] if bound is None else bound
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    have, want = (
        short_convolution(x, weight, head_dim, impl=impl, **options),
        defined(*exact, head_dim, **options),
    )
    assert have.dtype == x.dtype
    assert_same(have, want, bound, "output")
    found = gradients(have, (x, weight))
    for what, tensor, a, b in zip(("x", "weight"), (x, weight), found, gradients(want, exact), strict=True):
        assert a.dtype == tensor.dtype
        assert_same(a, b, 4 * bound, f"gradient of {what}")
    return have, *found


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 21])
def test_lengths(length, norm, impl):
    """Shorter than the taps, and longer."""
    check(*inputs(T=length), 16, impl, norm=norm)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 13, 25])
@pytest.mark.parametrize("packed", [False, True])
def test_walks_that_are_not_full_and_many_of_them(length, packed, short_walks):
    age = ages(*(1,) * (length // 2), length - length // 2) if packed else None
    check(*inputs(T=length, H=1), 16, "triton", norm="rms", age=age)


def test_a_walk_of_the_shipped_length_and_the_next():
    """Four walks of 32 tokens a program, of which the second has few."""
    check(*inputs(B=1, T=4 * 32 + 33, H=1, K=128), 128, "triton", norm="rms")


def test_walks_are_cut_shorter_to_fill_a_card(monkeypatch):
    monkeypatch.setattr(launch, "card", lambda device: ("large", 132))
    x, weight = inputs(B=1, T=500)
    plan = triton_convolution.plan_of.__wrapped__(
        x.shape, x.stride()[:2], 16, 4, (x.dtype, weight.dtype, None), x.device, False, 1, 1e-6, False
    )
    assert plan.forward_numbers[3] == triton_convolution.FEWEST_STEPS
    monkeypatch.setattr(triton_convolution, "plan_of", lambda *_: plan)
    check(x, weight, 16, "triton", norm="rms")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("taps", range(1, 9))
def test_taps(taps, impl):
    check(*inputs(taps=taps), 16, impl, norm="rms")


@pytest.mark.parametrize("K", [3, 24, 64, 96, 256])
@pytest.mark.parametrize("norm", NORMS)
def test_head_dimensions(K, norm):
    check(*inputs(B=1, K=K, T=6, H=3), K, "triton", norm=norm)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1, 9, 2, 5)])
def test_packed_documents_equal_each_alone(lengths, taps, impl):
    x, weight = inputs(B=1, T=sum(lengths), taps=taps)
    have, *_ = check(x, weight, 16, impl, norm="rms", age=ages(*lengths))
    outputs = [short_convolution(part, weight, 16, norm="rms", impl=impl) for part in x.split(lengths, 1)]
    assert_same(have, torch.cat(outputs, 1), 1e-7)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_document_does_not_see_another_s_infinities(impl):
    x, weight = inputs(B=1, T=8)
    with torch.no_grad():
        x[:, :3] = torch.nan
    y = short_convolution(x, weight, 16, norm="l2", age=ages(3, 5), impl=impl)[:, 3:]
    alone = x[:, 3:].detach().requires_grad_()
    expected = short_convolution(alone, weight, 16, norm="l2", impl=impl)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(o.sum(), t)[0][:, -5:] for o, t in ((y, x), (expected, alone))))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", ["part", "later", "transposed", "repeated", "weight"])
def test_inputs_that_are_not_contiguous(how, impl):
    wide, weight = inputs(H=6)
    _, weight = inputs(H=2, seed=1)
    views = {
        "part": lambda: wide[..., 32:64],
        "later": lambda: wide[:, 5:, :32],
        "transposed": lambda: wide[..., :32].transpose(0, 1).contiguous().transpose(0, 1),
        "repeated": lambda: wide[:1, :, :32].expand(3, -1, -1),
        "weight": lambda: wide[..., :32],
    }
    x = views[how]().detach()
    assert how == "weight" or not x.is_contiguous()
    if how == "weight":
        weight = weight.detach().T.contiguous().T
    check(x.requires_grad_(), weight.requires_grad_(), 16, impl, norm="rms")


def test_channels_that_lie_apart():
    x, weight = inputs()
    x = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    check(x, weight, 16, "triton", norm="rms")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_zero_vectors_stay_zero_with_finite_gradients(norm, impl):
    x, weight = inputs(T=12)
    with torch.no_grad():
        x[:, 4:9] = 0
        x[..., :16] = 0
    y, of_x, _ = check(x, weight, 16, impl, norm=norm)
    assert not y[:, 7:9].any()
    assert not y[:, :, 0].any()
    assert of_x.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_narrow_inputs(norm, wide_weight, dtype):
    """Rounded once, at the end; the weights may be float32, as they are under autocast."""
    x, weight = inputs(T=40, dtype=dtype)
    if wide_weight:
        weight = weight.detach().float().requires_grad_()
    check(x, weight, 16, "triton", norm=norm)


def test_large_arguments_of_the_sigmoid():
    x, weight = inputs()
    with torch.no_grad():
        x *= 100
    check(x, weight, 16, "triton", norm="rms")


def test_gradients_of_one_of_the_two():
    x, weight = inputs()
    both = torch.autograd.grad(short_convolution(x, weight, 16, impl="triton").sum(), (x, weight))
    for i, leaves in enumerate([(x, weight.detach()), (x.detach(), weight)]):
        (alone,) = torch.autograd.grad(short_convolution(*leaves, 16, impl="triton").sum(), leaves[i])
        assert torch.equal(alone, both[i])


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_nothing_to_do(B, T):
    x, weight = inputs(B=B, T=T)
    y = short_convolution(x, weight, 16, norm="rms", impl="triton")
    of_x, of_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == (B, T, 2, 16)
    assert of_x.shape == x.shape
    assert not of_weight.any()


def test_the_same_bits_again_and_under_checkpointing():
    x, weight = inputs(T=60)

    def run(x, weight):
        return short_convolution(x, weight, 16, norm="rms", impl="triton")

    first, again = ((run(x, weight), *gradients(run(x, weight), (x, weight))) for _ in range(2))
    recomputed = gradients(checkpoint(run, x, weight, use_reentrant=False), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[1:], recomputed, strict=True))


@pytest.mark.parametrize("age", [None, ages(4, 13)])
def test_custom_ops_keep_their_contract(age):
    x, weight = inputs()
    options = 16, 1, 1e-6
    torch.library.opcheck(triton_convolution.OP.op, (x, weight, age, *options))
    y = triton_convolution.OP.op(x.detach(), weight.detach(), age, *options)
    arguments = (y, x.detach(), weight.detach(), age, *options)
    torch.library.opcheck(triton_convolution.OP.backward_op, arguments)


def test_one_graph_under_compile_and_autocast():
    x, weight = inputs()
    projection = torch.randn(32, 32, device=DEVICE) / 6

    def run(x, weight):
        with torch.autocast(DEVICE, torch.bfloat16):
            return short_convolution(x @ projection, weight, 16, norm="rms", impl="triton")

    torch._dynamo.reset()
    compiled, called = torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight), run(x, weight)
    assert called.dtype == torch.bfloat16
    assert torch.equal(compiled, called)
    for a, b in zip(gradients(compiled, (x, weight)), gradients(called, (x, weight)), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_no_second_derivatives():
    x, weight = inputs()
    y = short_convolution(x, weight, 16, impl="triton")
    with pytest.raises(RuntimeError, match="no second derivatives; use impl='torch'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(("case", "padded"), [("falcon_1", True), ("1-deltanet-like", False)])
def test_a_model_with_the_kernels_equals_one_without(case, padded, monkeypatch):
    """Logits, gradients, and what a prompt leaves to the tokens after it."""
    model = tiny_model(torch.float32, **CASES[case]).to(DEVICE)
    ids = tokens(2, 9).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, : 4 if padded else 0] = 0
    found = []
    for impl in IMPLEMENTATIONS:
        monkeypatch.setattr(convolution, "_best", lambda *_, impl=impl: impl)
        model.zero_grad()
        outputs = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        outputs.loss.backward()
        written = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append(({"logits": outputs.logits[mask.bool()], **grads}, written))
    (plain, expected), (fused, written) = found
    assert torch.equal(written, expected)
    for name, want in plain.items():
        assert_same(fused[name], want, 1e-4, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 5}, r"x has shape \[2, 17, 32\]; it must be \[B, T, channels\], heads of head_dim = 5\."),
        ({"weight": torch.ones(31, 4)}, r"weight has shape \[31, 4\]; it must be \[32, taps\], a row a channel\."),
        ({"norm": "batch"}, r"norm is 'batch'; it must be one of none, rms, l2\."),
        ({"age": torch.ones(4)}, r"age has shape \[4\]; it must be \[17\], one for each token\."),
        ({"impl": "cuda"}, r"impl is 'cuda'; it must be one of torch, triton\."),
        ({"weight": torch.ones(32, 9)}, r"weight has 9 taps; with impl='triton' at most 256 and 8 are taken\."),
        ({"weight": torch.ones(32, 4).double()}, r"weight has dtype torch.float64; with impl='triton' it must be"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options, message):
    x, weight = inputs()
    given = {"weight": weight, "head_dim": 16, "impl": "triton", **options}
    with pytest.raises(ValueError, match=message):
        short_convolution(x, **given)
