"""What is said of the memories of a model, and the picture of it."""

import math
import struct
import sys

import pytest
import torch
from test_cli import fails
from tiny_models import CASES, tiny_model, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from falcon_hf import (
    FalconFastWeightAttention,
    FalconFastWeightForTokenClassification,
    FalconFastWeightModel,
    cli,
    inspect_memory,
)

TEXT = "A pointer is an address. An address is $1 or\nmore."


def plain_loop(mixer, hidden):
    """Step size, decay, local loss and agreement [H, T], one number at a time, as the tables of SPEC section 2 say."""
    _, k, v, gain, ridge, _ = (x if x is None else x[0] for x in mixer.recurrence_inputs(hidden))
    rule = mixer.rule
    length, heads, key_dim = k.shape
    results = torch.full((4, heads, length), math.nan, dtype=k.dtype)
    for head in range(heads):
        memory, ones = torch.zeros(2, key_dim, v.shape[-1], dtype=k.dtype)
        pairs = []
        for t in range(length):
            if rule.shifted and t == 0:
                results[:2, head, 0] = torch.tensor([0.0, 1.0])
                continue
            x, y = k[t - 1 if rule.shifted else t, head], v[t, head]
            pairs = [*pairs, (x, y)][-rule.window :]
            answer = memory.T @ x
            if rule.normalized_read:
                answer = answer / (ones.T @ x + rule.read_epsilon)
            results[2, head, t] = (answer - y).square().sum() / y.square().sum()
            size = answer.norm() * y.norm()
            results[3, head, t] = answer @ y / size if size > 0 else 0.0
            xs = torch.stack([x for x, _ in pairs])
            size = torch.linalg.matrix_norm(xs, 2) ** 2 if rule.smoothness == "exact" else xs.square().sum()
            size = size / len(pairs)
            forget = (
                torch.zeros(()) if ridge is None else ridge[t, head] * (size if rule.ridge == "scale_coupled" else 1)
            )
            eta = gain[t, head]
            if rule.step_size == "gain":
                eta = eta / (size + forget + rule.epsilon)
            elif rule.residual:
                eta = torch.minimum(eta, 2 / (size + forget + rule.epsilon))
            gamma = (1 - eta * forget).clamp_min(rule.decay_floor)
            results[0, head, t], results[1, head, t] = eta.mean(), gamma.log().mean().exp()
            write = sum(torch.outer(x, eta * (y - memory.T @ x if rule.residual else y)) for x, y in pairs)
            memory = memory * gamma + write / len(pairs)
            ones = ones * gamma + sum(torch.outer(x, eta * torch.ones_like(y)) for x, y in pairs) / len(pairs)
    return results


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_is_what_a_plain_loop_finds(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 11)
    trace = inspect_memory(model, ids)
    mixers = [module for module in model.modules() if isinstance(module, FalconFastWeightAttention)]
    read = []
    for mixer in mixers:
        mixer.register_forward_pre_hook(lambda mixer, arguments: read.append(plain_loop(mixer, arguments[0])))
    logits = model(input_ids=ids).logits[0, :-1]
    assert trace.layers == tuple(mixer.layer_idx for mixer in mixers)
    found = torch.stack([trace.step_size, trace.decay, trace.local_loss, trace.agreement], 1)
    torch.testing.assert_close(found, torch.stack(read), rtol=1e-6, atol=1e-9, equal_nan=True)
    assert trace.token_loss[0].isnan()
    torch.testing.assert_close(trace.token_loss[1:], nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))


def test_half_life_is_where_the_decays_leave_half():
    trace = inspect_memory(tiny_model(), tokens(1, 30))
    assert trace.half_life.shape == (3, 2)
    kept = trace.decay[:, :, 1:].prod(-1)
    torch.testing.assert_close(0.5 ** (29 / trace.half_life), kept)
    assert inspect_memory(tiny_model(ridge="none"), tokens(1, 5)).half_life.isinf().all()


def test_reads_a_model_in_bfloat16_and_leaves_it_as_it_was():
    model, ids = tiny_model(torch.bfloat16), tokens(1, 9)
    before = model(input_ids=ids).logits
    trace = inspect_memory(model, ids)
    assert trace.local_loss.dtype == trace.token_loss.dtype == torch.float32
    assert not trace.local_loss.requires_grad
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_refuses_what_is_not_one_text_or_has_no_memory():
    for shape in ((2, 5), (1, 0), (5,)):
        with pytest.raises(ValueError, match=r"input_ids has shape .* \[1, T\]"):
            inspect_memory(tiny_model(), tokens(*shape))
    for model_class in (FalconFastWeightModel, FalconFastWeightForTokenClassification):
        with pytest.raises(ValueError, match=f"{model_class.__name__}; it must be a causal language model"):
            inspect_memory(tiny_model(model_class=model_class), tokens(1, 5))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="LlamaForCausalLM without fast-weight layers"):
        inspect_memory(LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)), tokens(1, 5))


def test_draws_a_picture_and_prints_a_table(call, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    code, out, err = call("inspect", TEXT, "-m", checkpoint, "-o", picture)
    assert code == 0, err
    assert err.endswith(f" tokens drawn in {picture}\n")
    width, height = opened(picture)
    assert width > 1000
    assert height > 500
    assert "half-life (tokens)" in out
    assert out.count("\n  0  ") + out.count("\n  1  ") >= 4
    piped = tmp_path / "piped.PNG"
    assert call("inspect", "-m", checkpoint, "-o", piped, stdin=TEXT.encode())[:2] == (0, out)
    assert piped.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(
    "options", [{"rule": "falcon_2"}, {"rule": "falcon_3", "ridge": "none"}, {"rule": "falcon_1a"}]
)
def test_draws_other_rules_and_more_tokens_than_can_be_named(tmp_path, options):
    pytest.importorskip("matplotlib")
    from falcon_hf.picture import draw

    model, ids = tiny_model(torch.float32, **options), tokens(1, 130)
    draw(inspect_memory(model, ids), [str(i) for i in ids[0]], tmp_path / "a.png", "tiny", model.config.rule_object)
    opened(tmp_path / "a.png")


def opened(picture) -> tuple[int, int]:
    """Width and height of a PNG that can be read."""
    import matplotlib.image

    data = picture.read_bytes()
    assert matplotlib.image.imread(picture).std() > 0
    return struct.unpack(">II", data[16:24])


def test_wrong_text_or_output_is_one_sentence(call, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    rest = ("-m", checkpoint, "-o", tmp_path / "a.png")
    fails(call("inspect", "", *rest), "text is empty")
    fails(call("inspect", *rest, terminal=True), "no text", "falcon-hf inspect")
    fails(call("inspect", "A", *rest), "shorter than two tokens")
    fails(call("inspect", *rest, stdin=b"1 " * 2001), "4,002 tokens", "at most 2,000")
    fails(call("inspect", TEXT, "-m", checkpoint, "-o", tmp_path / "a.pdf"), "a.pdf", ".png")
    fails(call("inspect", TEXT, "-m", checkpoint, "-o", tmp_path / "no" / "a.png"), "no folder")
    (tmp_path / "taken.png").mkdir()
    fails(call("inspect", TEXT, "-m", checkpoint, "-o", tmp_path / "taken.png"), "cannot write", "taken.png")
    assert not (tmp_path / "a.png").exists()


def test_missing_matplotlib_is_one_sentence(call, checkpoint, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "falcon_hf.picture", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fails(call("inspect", TEXT, "-m", checkpoint, "-o", tmp_path / "a.png"), "matplotlib", "falcon-hf[plots]")


def test_labels_of_tokens_are_short_and_never_blank():
    labels = {" pointer": "pointer", "  ": "␣␣", "\n\n": "\\n\\n", "": "<empty>", "a" * 40: "a" * 15 + "…"}
    assert {token: cli._label(token) for token in labels} == labels
