"""One token in few launches against its PyTorch operations and float64, through Triton's interpreter without a GPU."""

import copy
from contextlib import contextmanager
from pathlib import Path

import interpreter
import pytest
import test_device_generation
import torch
import torch.nn.functional as F
from cases import assert_same
from tiny_models import CASES, RULES, cache_of, tiny_config, tiny_model, tokens
from torch import nn
from transformers import GenerationMixin

interpreter.require()

from falcon_kernels import single_token, triton_token  # noqa: E402

from falcon_hf import (  # noqa: E402
    FalconFastWeightAttention,
    FalconFastWeightConfig,
    FalconFastWeightForCausalLM,
    generate_on_device,
)
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME, falcon_cache  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAPS = {"identity": lambda x: x, "relu": F.relu, "elu_plus_one": lambda x: F.elu(x) + 1, "softplus": F.softplus}
BUDGETS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture
def fused(monkeypatch):
    """Lets these kernels run on this device, with NaN where they are to write; their calls are counted by name."""
    calls = dict.fromkeys(("token_inputs", "add_norm", "silu_product", "row_products", "gated_product"), 0)

    def counted(name):
        original = getattr(triton_token, name)

        def call(*arguments, **options):
            calls[name] += 1
            return original(*arguments, **options)

        return call

    def poisoned(original):
        def empty(*arguments):
            found = original(*arguments)
            for tensor in (found,) if isinstance(found, torch.Tensor) else found:
                tensor.fill_(torch.nan)
            return found

        return empty

    for name in calls:
        monkeypatch.setattr(triton_token, name, counted(name))
    for name in ("_empty_inputs", "_empty_sum", "_empty_product", "_empty_products", "_empty_gated"):
        monkeypatch.setattr(triton_token, name, poisoned(getattr(triton_token, name)))
    monkeypatch.setattr(single_token, "_best_step", lambda q: "triton")
    return calls


tapes = test_device_generation.tapes


@contextmanager
def pytorch_operations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_token, "_best_step", lambda q: "reference")
        yield


def arguments(B=3, H=2, K=16, V=16, D=24, S=4, *, per_channel=False, ridge=True, masked=False, dtype=torch.float32):
    """Those of `token_inputs`, rounded to `dtype`; and again in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = [normal(H * n, S) if S else None for n in (K, K, V)]
    gain, bias = (normal(B, H * V), normal(H * V)) if per_channel else (normal(H, D) / D**0.5, normal(H))
    given = [
        *(normal(B, D), normal(B, H * K), normal(B, H * K), normal(B, H * V)),
        *(normal(B, S - 1, H * (2 * K + V)) if S else None, weights, gain, bias),
        *(normal(H, D) / D**0.5 if ridge else None, normal(H) if ridge else None),
        torch.arange(B) % 2 == 0 if masked else None,
        torch.tensor(5),
    ]
    wide = [[None if w is None else w.double() for w in t] if isinstance(t, list) else t for t in given]
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in wide]
    move = lambda t: t.to(DEVICE) if isinstance(t, torch.Tensor) else t  # noqa: E731
    return [[move(w) for w in t] if isinstance(t, list) else move(t) for t in given], wide


def in_float64(given, *, head_dim, per_channel, norm, value_norm, feature_map, epsilon, largest_gain, ridge_scale):
    """`token_inputs` by its definition, and the window after it."""
    x, q, k, v, window, weights, gain, gain_bias, ridge, ridge_bias, mask, _ = given
    raw, heads = torch.cat([q, k, v], 1), q.shape[1] // head_dim
    mixed, after = raw, window
    if window is not None:
        context = torch.cat([window, raw[:, None]], 1)
        mixed = F.silu(torch.einsum("bsc,cs->bc", context, torch.cat(weights)))
        after = context[:, 1:]
        if mask is not None:
            after = torch.where(mask[:, None, None], after, window)
    found = []
    for part, kind, function in zip(
        mixed.split([t.shape[1] for t in (q, k, v)], 1),
        (norm, norm, value_norm),
        (MAPS[feature_map], MAPS[feature_map], MAPS["identity"]),
        strict=True,
    ):
        part = part.unflatten(1, (heads, -1))
        square = part.square()
        if kind != "none":
            size = square.mean(-1, keepdim=True) if kind == "rms" else square.sum(-1, keepdim=True)
            part = part / (size + epsilon).sqrt()
        found.append(function(part))
    rate = largest_gain * torch.sigmoid((gain if per_channel else x @ gain.T) + gain_bias)
    rate = rate.unflatten(1, (heads, -1)) if per_channel else rate
    ridges = None if ridge is None else ridge_scale * torch.sigmoid(x @ ridge.T + ridge_bias)
    return [*found, rate, ridges], after


OPTIONS = {
    "norm": "rms",
    "value_norm": "none",
    "feature_map": "identity",
    "epsilon": 1e-6,
    "largest_gain": 2.0,
    "ridge_scale": 1.0,
}


def compare(dtype=torch.float32, options=None, **sizes):
    given, wide = arguments(dtype=dtype, **sizes)
    options = {**OPTIONS, "head_dim": sizes.get("K", 16), "per_channel": sizes.get("per_channel", False)} | (
        options or {}
    )
    window, length = given[4], given[-1]
    have = triton_token.token_inputs(*given, **options)
    want, after = in_float64(wide, **options)
    mask = wide[-2]
    for what, a, b in zip(("q", "k", "v", "gain", "ridge"), have, want, strict=True):
        assert (a is None) == (b is None), what
        if a is None:
            continue
        assert a.dtype == (torch.float32 if what in ("gain", "ridge") else dtype)
        assert a.isfinite().all(), what
        rows = slice(None) if mask is None else mask
        bound = BUDGETS[torch.float32 if what in ("gain", "ridge") else dtype]
        assert_same(a.cpu()[rows], b[rows], bound, what)
    assert length.item() == 6
    if window is not None:
        assert torch.equal(window.cpu().double(), after)


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("S", [0, 1, 2, 3, 4, 8])
def test_each_size_of_the_convolution(S, dtype, fused):
    compare(dtype, S=S)
    compare(dtype, S=S, masked=True)


@pytest.mark.parametrize("B", [1, 2, 5])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (20, 12), (96, 40), (256, 256)])
def test_sizes(B, K, V, fused):
    compare(B=B, K=K, V=V, H=3)


@pytest.mark.parametrize("D", [1, 24, 1024, 2500])
def test_hidden_sizes(D, fused):
    compare(D=D, options={"largest_gain": 0.03, "ridge_scale": 3.0})


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("norm", ["rms", "l2", "none"])
def test_norms_and_feature_maps(norm, feature_map, fused):
    compare(options={"norm": norm, "value_norm": norm, "feature_map": feature_map, "epsilon": 0.1})


@pytest.mark.parametrize("S", [0, 4])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("ridge", [True, False])
def test_gates(per_channel, ridge, S, fused):
    compare(per_channel=per_channel, ridge=ridge, K=8, V=20, S=S, masked=True)


def test_softplus_of_small_numbers(fused):
    """Which 1 + exp rounds away."""
    given, wide = arguments(S=0)
    for t in (given[1], wide[1]):
        t[:, :8] = torch.tensor([-40.0, -20.0, -17.0, -10.0, 0.0, 10.0, 25.0, 90.0])
    options = {**OPTIONS, "norm": "none", "feature_map": "softplus", "head_dim": 16, "per_channel": False}
    have, want = triton_token.token_inputs(*given, **options)[0], in_float64(wide, **options)[0][0]
    torch.testing.assert_close(have.cpu().double(), want, atol=0, rtol=2e-6)


def test_another_model_s_window_is_refused(fused):
    given, _ = arguments()
    for wrong in (given[4][:, :, :-1].contiguous(), given[4][:2], given[4].transpose(1, 2).contiguous().mT):
        given[4] = wrong
        with pytest.raises(ValueError, match=r"it must be \[3, 3, 96\], contiguous"):
            triton_token.token_inputs(*given, **OPTIONS, head_dim=16, per_channel=False)
    assert given[-1].item() == 5


def test_nothing_is_read_of_a_row_without_a_token(fused):
    given, _ = arguments(masked=True)
    for t in given[1:5]:
        t[1] = torch.nan
    found = triton_token.token_inputs(*given, **OPTIONS, head_dim=16, per_channel=False)
    assert all(t.isfinite().all() for t in found)
    assert given[4][1].isnan().all()


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize(("rows", "D"), [(1, 24), (3, 768), (5, 1000)])
def test_sum_and_product(rows, D, dtype, fused):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 1, D), (rows, 1, D), (D,))
    x, y, weight = (torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes)
    total, normed = triton_token.add_norm(x, y, weight, 0.1)
    assert torch.equal(total, x + y)
    want = F.rms_norm(total.double(), (D,), weight.double(), 0.1)
    assert_same(normed.double(), want, BUDGETS[dtype], "norm")
    product = triton_token.silu_product(x, y)
    assert_same(product.double(), F.silu(x.double()) * y.double(), BUDGETS[dtype], "product")


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize(("sizes", "D"), [((48,), 24), ((5, 3), 512), ((64, 64, 20), 1000), ((1, 7, 2), 1500)])
def test_products_of_one_row(sizes, D, dtype, fused):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1, D), *((n, D) for n in sizes), (sizes[0], D))
    x, *weights, gate = (torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes)
    weights, gate = [w / D**0.5 for w in weights], gate / D**0.5
    products = triton_token.row_products(x, *weights)
    assert [p.shape for p in products] == [(1, 1, n) for n in sizes]
    for have, weight in zip(products, weights, strict=True):
        assert_same(have.double(), x.double() @ weight.double().T, 2 * BUDGETS[dtype], "product")
    want = F.silu(x.double() @ gate.double().T) * (x.double() @ weights[0].double().T)
    assert_same(triton_token.gated_product(x, gate, weights[0]).double(), want, 2 * BUDGETS[dtype], "gated product")


def test_operators():
    given, _ = arguments(masked=True)
    flat = [t for part in given for t in (part if isinstance(part, list) else [part])]
    torch.library.opcheck(triton_token.inputs_operator, (*flat, 16, False, *OPTIONS.values()))
    x = torch.randn(2, 1, 24, device=DEVICE)
    torch.library.opcheck(triton_token.add_norm_operator, (x, x + 1, x[0, 0], 1e-6))
    torch.library.opcheck(triton_token.silu_product_operator, (x, x + 1))
    weight = torch.randn(5, 24, device=DEVICE)
    torch.library.opcheck(triton_token.products_operator, (x[:1], weight, weight + 1, None))
    torch.library.opcheck(triton_token.gated_operator, (x[:1], weight, weight + 1))


LINEAR = {case: options for case, options in CASES.items() if "layer_types" not in options}
LINEAR["numbers"] = {"ridge_scale": 3.0, "rms_norm_eps": 0.1, "ridge": "direct"}


@pytest.mark.parametrize(("case", "masked"), [*((case, True) for case in LINEAR), ("falcon_3a", False)])
@torch.no_grad()
def test_mixer_from_token_to_token(case, masked, fused):
    """The layer with its launches, with PyTorch operations, and in float64, with holes in its rows."""
    torch.manual_seed(0)
    config = tiny_config(**LINEAR[case])
    mixer = FalconFastWeightAttention(config).to(DEVICE)
    for parameter in mixer.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    exact = copy.deepcopy(mixer).double()
    x = torch.randn(3, 4, config.hidden_size, device=DEVICE)
    mask = torch.rand(3, 4, device=DEVICE) > 0.3 if masked else torch.ones(3, 4, dtype=torch.bool, device=DEVICE)
    caches = [falcon_cache(config) for _ in range(3)]
    for t in range(4):
        present = mask[:, t : t + 1] if masked else None
        have = mixer(x[:, t : t + 1], present, caches[0])
        with pytorch_operations():
            other = mixer(x[:, t : t + 1], present, caches[1])
        want = exact(x[:, t : t + 1].double(), present, caches[2])
        assert_same(have, want, 2e-5, "output")
        assert_same(other, want, 2e-5, "output of PyTorch operations")
        for a, b in zip(*(cache.layers[0].state for cache in (caches[0], caches[2])), strict=True):
            if a is not None:
                assert_same(a.double(), b.double(), 2e-5, "state")
        if config.conv_size:
            assert_same(caches[0].layers[0].conv_window, caches[2].layers[0].conv_window, 2e-6, "window")
    assert fused["token_inputs"] == 3  # the first one makes the tensors of the cache
    assert [cache.get_seq_length() for cache in caches] == [4, 4, 4]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", ["falcon_1", "2-gate-values", "3-before", "3a-hybrid"])
def test_text_of_a_padded_batch(case, rows, fused):
    """With left padding, also in hybrid models, whose masks go on; the kernels are what made it."""
    layers = 2 + ("layer_types" in CASES[case])
    model, ids = (
        tiny_model(torch.float32, **CASES[case], num_hidden_layers=layers).to(DEVICE),
        tokens(rows, 6).to(DEVICE),
    )
    mask = torch.ones_like(ids)
    mask[0, :4], mask[-1, :2] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "use_cache": True}
    have = model.generate(ids, **options)
    linear = model.config.layer_types.count("linear_attention")
    made = {"token_inputs": 4 * linear, "add_norm": 4 * layers}
    if rows == 1:
        made |= {"row_products": 4 * (2 * linear + layers), "gated_product": 4 * layers, "silu_product": 0}
    else:
        made |= {"row_products": 0, "gated_product": 0, "silu_product": 4 * layers}
    assert fused == made
    with pytorch_operations():
        assert model.generate(ids, **options).tolist() == have.tolist()
    assert fused == made


@torch.no_grad()
def test_tensors_of_the_cache_stay_where_they_are(fused):
    model, ids = tiny_model(torch.float32).to(DEVICE), tokens(2, 4).to(DEVICE)
    cache = cache_of(model(ids, use_cache=True))
    every = lambda: [t for s in cache.layers for t in (*s.state, s.conv_window, s.cumulative_length) if t is not None]  # noqa: E731
    before = [t.data_ptr() for t in every()]
    model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
    assert [t.data_ptr() for t in every()] == before
    assert cache.get_seq_length() == 5
    assert fused["token_inputs"] == 3


def _hooked(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: None)


def _wrapped(model):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in model.model.layers:
        old = layer.linear_attn.gain_proj
        layer.linear_attn.gain_proj = new = Doubled(
            old.in_features, old.out_features, bias=False, dtype=old.weight.dtype
        )
        new.weight = old.weight


def _biased(model):
    for layer in model.model.layers:
        for name in ("gain_proj", "ridge_proj", "o_proj"):
            old = getattr(layer.linear_attn, name)
            new = nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype)
            setattr(layer.linear_attn, name, new)


def _replaced(model):
    for layer in model.model.layers:
        gate = layer.linear_attn.gain_proj
        gate.forward = lambda x, gate=gate: 2 * nn.Linear.forward(gate, x)


@pytest.mark.parametrize("change", [_hooked, _wrapped, _biased, _replaced])
@torch.no_grad()
def test_modules_that_do_more_are_called(change, fused):
    model, ids = tiny_model(torch.float32), tokens(2, 5)
    change(model)
    model.to(DEVICE)
    ids = ids.to(DEVICE)
    cache = cache_of(model(ids[:, :-1], use_cache=True))
    have = model(ids[:, -1:], use_cache=True, **{CACHE_NAME: cache}).logits
    assert fused["token_inputs"] == 0
    assert_same(have, model(ids).logits[:, -1:], 1e-5)


@pytest.mark.parametrize("how", ["gradients", "autocast", "float64", "recorded", "several tokens"])
def test_what_is_left_to_pytorch(how, fused):
    model, ids = tiny_model(torch.float64 if how == "float64" else torch.float32).to(DEVICE), tokens(2, 5).to(DEVICE)
    cache = falcon_cache(model.config)
    if how == "recorded":
        for layer in cache.layers:
            layer.record_past = True
    with torch.no_grad():
        model(ids[:, :-2], use_cache=True, **{CACHE_NAME: cache})
    new = ids[:, -2:] if how == "several tokens" else ids[:, -2:-1]
    with torch.set_grad_enabled(how == "gradients"), torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
        model(new, use_cache=True, **{CACHE_NAME: cache})
    assert fused["token_inputs"] == 0
    assert how == "recorded" or not any(fused.values())
    if how == "recorded":
        cache.layers[0].crop(-1)


@torch.no_grad()
def test_another_activation_is_kept(fused):
    model, ids = tiny_model(torch.float32, hidden_act="gelu").to(DEVICE), tokens(2, 5).to(DEVICE)
    cache = cache_of(model(ids[:, :-1], use_cache=True))
    have = model(ids[:, -1:], use_cache=True, **{CACHE_NAME: cache}).logits
    assert fused["silu_product"] == 0
    assert_same(have, model(ids).logits[:, -1:], 1e-5)


@pytest.mark.parametrize("case", ["falcon_3a", "2-gate-values"])
@torch.no_grad()
def test_compiles_without_a_graph_break(case, fused):
    model, ids = tiny_model(torch.float32, **CASES[case], num_hidden_layers=1).to(DEVICE), tokens(2, 4).to(DEVICE)
    cache = cache_of(model(ids, use_cache=True))
    other = copy.deepcopy(cache)
    want = model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache}).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    have = compiled(ids[:, :1], use_cache=True, **{CACHE_NAME: other}).logits
    assert_same(have, want, 1e-6)
    for a, b in zip(
        (*cache.layers[0].state, cache.layers[0].conv_window),
        (*other.layers[0].state, other.layers[0].conv_window),
        strict=True,
    ):
        if a is not None:
            assert torch.equal(a, b) if a.dtype == torch.bool else torch.allclose(a, b, atol=1e-6)
    assert other.get_seq_length() == 5


@pytest.mark.skipif(DEVICE == "cuda", reason="stands in for what a GPU does")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", ["falcon_3a", "2-gate-values"])
def test_text_of_a_recorded_graph(case, rows, fused, tapes):
    """What is replayed are the operators on the tensors of the state, as in a CUDA graph."""
    model, ids = tiny_model(torch.float32, **CASES[case], num_hidden_layers=2), tokens(rows, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    have = model.generate(ids, custom_generate=generate_on_device, tokens_per_replay=3, **options)
    names = {function.name() for function, *_ in tapes[0].calls}
    operators = {"token_inputs", "add_norm", *(("row_products", "gated_product") if rows == 1 else ("silu_product",))}
    assert names >= {f"falcon_kernels::{name}" for name in operators}
    with pytorch_operations():
        assert model.generate(ids, custom_generate=GenerationMixin._sample, **options).tolist() == have.tolist()


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize(
    ("B", "H", "K", "V", "D"), [(1, 12, 64, 64, 768), (64, 12, 64, 64, 768), (7, 3, 192, 100, 2500)]
)
def test_on_the_card(B, H, K, V, D, dtype, fused):
    for S in (0, 1, 4, 8):
        compare(dtype, B=B, H=H, K=K, V=V, D=D, S=S, masked=S == 4)
        compare(dtype, B=B, H=H, K=K, V=V, D=D, S=S, per_channel=True)
    for scale in (1, 3.0, 2):  # of one compilation
        compare(dtype, B=B, H=H, K=K, V=V, D=D, options={"ridge_scale": scale, "epsilon": scale})


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_graph_replays(rule, rows):
    """A captured token is the same bits as one that is called."""
    config = FalconFastWeightConfig(
        rule=rule, hidden_size=256, num_attention_heads=4, num_hidden_layers=3, vocab_size=500
    )
    model = FalconFastWeightForCausalLM(config).bfloat16().cuda().eval()
    ids = torch.randint(500, (12, rows, 1), device="cuda")
    caches = [falcon_cache(config) for _ in range(2)]
    for cache in caches:
        for token in ids[:2]:
            model(token, use_cache=True, **{CACHE_NAME: cache})
    slot = ids[2].clone()
    model(slot, use_cache=True, **{CACHE_NAME: copy.deepcopy(caches[1])})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(slot, use_cache=True, **{CACHE_NAME: caches[1]}).logits
    for token in ids[2:]:
        want = model(token, use_cache=True, **{CACHE_NAME: caches[0]}).logits
        slot.copy_(token)
        graph.replay()
        assert torch.equal(logits, want)
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        pairs = zip((*mine.state, mine.conv_window), (*theirs.state, theirs.conv_window), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a is not None)
        assert mine.get_seq_length() == theirs.get_seq_length() == 12


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_texts_on_the_card(case, rows, fused):
    model, ids = tiny_model(torch.float32, **CASES[case]).cuda(), tokens(rows, 7).cuda()
    options = {"max_new_tokens": 40, "do_sample": False}
    with pytorch_operations():
        want = model.generate(ids, custom_generate=GenerationMixin._sample, **options).tolist()
    assert fused["token_inputs"] == 0
    ways = [{"custom_generate": GenerationMixin._sample}, {}]
    ways += [{"custom_generate": generate_on_device}] if "layer_types" not in CASES[case] else []
    for way in ways:
        assert model.generate(ids, **options, **way).tolist() == want
    assert fused["token_inputs"] > 0


@pytest.mark.slow
def test_compiles_for_the_card():
    """The compiler refuses some of what the interpreter takes."""
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("a Triton that cannot compile for NVIDIA cards")
    from test_triton_step import without_interpreter

    without_interpreter(str(Path(__file__).parent / "compile_token.py"))
