"""Every wrong argument is refused in one sentence that names it, what it was and what it may be."""

import pytest
import torch
from cases import INPUTS, make_inputs, make_state
from falcon_kernels import Rule, falcon_attention, falcon_step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "falcon_4"}, r"rule is 'falcon_4'; it must be one of falcon_1, .*falcon_3a\."),
        (
            {"name": "falcon_1", "alignment": "shifted"},
            r"alignment is 'shifted'; it must be one of next_latent, same_step\.",
        ),
        ({"name": "falcon_1", "timing": "raw"}, "timing is 'raw'"),
        ({"name": "falcon_1", "step_size": "eta"}, "step_size is 'eta'"),
        ({"name": "falcon_1", "ridge": "auto"}, "ridge is 'auto'"),
        ({"name": "falcon_3", "smoothness": "power"}, "smoothness is 'power'"),
        ({"name": "falcon_3a", "smoothness": "exact"}, "only falcon_3 has one"),
        ({"name": "falcon_1", "window": 4}, "window is 4, but falcon_1 writes one pair at a time"),
        ({"name": "falcon_3", "window": 0}, "window is 0; it must be a whole number of at least 1"),
        ({"name": "falcon_3", "window": 2.5}, "window is 2.5"),
        (
            {"name": "falcon_2", "normalized_read": True},
            "normalized_read is True, but falcon_2 is a regression rule",
        ),
        ({"name": "falcon_1", "epsilon": -1e-6}, "epsilon is -1e-06; it must be at least 0"),
        ({"name": "falcon_1", "epsilon": float("nan")}, "epsilon is nan"),
        (
            {"name": "falcon_1a", "normalized_read": True, "read_epsilon": 0.0},
            "read_epsilon is 0.0; it must be above 0",
        ),
        ({"name": "falcon_1", "decay_floor": 1.0}, "decay_floor is 1.0; it must lie between 0 and 1"),
        (
            {"name": "falcon_2", "decay_floor": 0.005},
            r"decay_floor is 0.005; for falcon_2 it must be at least exp\(-5\)",
        ),
    ],
)
def test_rule(options, message):
    with pytest.raises(ValueError, match=message):
        Rule(**options)


def test_scalar_rules_take_a_lower_floor():
    assert Rule("falcon_1", decay_floor=1e-4).decay_floor == 1e-4


def with_(name, change):
    def apply(inputs):
        inputs[name] = change(inputs[name])

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_("q", lambda t: t[0]), r"q has shape \[17, 2, 4\]; it must be \[B, T, H, K\]"),
        (with_("k", lambda t: t[:, :5]), r"k has shape \[2, 5, 2, 4\]; it must be \[2, 17, 2, 4\]"),
        (with_("v", lambda t: t[:, :, :1]), r"v has shape \[2, 17, 1, 3\]; it must be \[2, 17, 2, 'V'\]"),
        (with_("gain", lambda t: t[..., None]), r"gain has shape \[2, 17, 2, 1\]; it must be \[2, 17, 2\]"),
        (with_("ridge", lambda t: None), "ridge is None, but the rule has ridge='scale_coupled'"),
        (with_("ridge", lambda t: t[:1]), r"ridge has shape \[1, 17, 2\]"),
        (with_("gain", lambda t: t - 3), r"gain lies between -.* it must lie in \[0, 2\]"),
        (with_("gain", lambda t: t * float("nan")), "gain lies between nan and nan"),
        (with_("ridge", lambda t: t - 1), "ridge is -.* at its smallest; it must be at least 0"),
    ],
)
def test_inputs(change, message):
    rule = Rule("falcon_1")
    inputs = make_inputs(rule)
    change(inputs)
    with pytest.raises(ValueError, match=message):
        falcon_attention(*(inputs[n] for n in INPUTS), rule=rule)


def test_gain_of_a_per_channel_rule():
    inputs = make_inputs(Rule("falcon_1"))
    with pytest.raises(
        ValueError,
        match=r"gain has shape \[2, 17, 2\]; it must be \[2, 17, 2, 3\], \[B, T, H, V\] for falcon_2",
    ):
        falcon_attention(*(inputs[n] for n in INPUTS), rule=Rule("falcon_2"))


def test_a_direct_step_may_exceed_two_and_not_be_negative():
    rule = Rule("falcon_1", step_size="direct")
    inputs = make_inputs(rule)
    falcon_attention(*(inputs[n] for n in INPUTS[:3]), inputs["gain"] + 5, inputs["ridge"], rule=rule)
    with pytest.raises(ValueError, match="gain, here the step size, is -"):
        falcon_attention(*(inputs[n] for n in INPUTS[:3]), inputs["gain"] - 5, inputs["ridge"], rule=rule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "cuda"}, "impl is 'cuda'; it must be one of reference, torch"),
        ({"mask": torch.ones(2, 17)}, "mask has dtype torch.float32; it must be torch.bool"),
        ({"mask": torch.ones(2, 16, dtype=torch.bool)}, r"mask has shape \[2, 16\]; it must be \[2, 17\]"),
        (
            {"mask": torch.ones(2, 17, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 17])},
            "mask and cu_seqlens are both given",
        ),
        ({"cu_seqlens": torch.tensor([0, 17])}, "q has batch size 2; with cu_seqlens"),
    ],
)
def test_options(options, message):
    rule = Rule("falcon_3a")
    inputs = make_inputs(rule)
    with pytest.raises(ValueError, match=message):
        falcon_attention(*(inputs[n] for n in INPUTS), rule=rule, **options)


@pytest.mark.parametrize("bounds", [[0, 16], [1, 17], [0, 9, 5, 17], [0.0, 17.0], [17]])
def test_documents(bounds):
    rule = Rule("falcon_1")
    inputs = make_inputs(rule, B=1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        falcon_attention(*(inputs[n] for n in INPUTS), rule=rule, cu_seqlens=torch.tensor(bounds))


def test_states_of_another_rule_or_size():
    rule = Rule("falcon_3a")
    inputs = make_inputs(rule)
    arguments = [inputs[n] for n in INPUTS]
    with pytest.raises(ValueError, match=r"state.memory has shape \[3, 2, 4, 3\]; it must be \[2, 2, 4, 3\]"):
        falcon_attention(*arguments, rule=rule, initial_state=make_state(rule, B=3))
    with pytest.raises(ValueError, match=r"state.tail_x is None; falcon_3a with these options needs a tensor"):
        falcon_attention(*arguments, rule=rule, initial_state=make_state(Rule("falcon_1a")))
    one = Rule("falcon_1", alignment="same_step")
    with pytest.raises(ValueError, match=r"state.previous_key is of shape .* falcon_1 with these options needs None"):
        falcon_attention(*arguments, rule=one, initial_state=make_state(Rule("falcon_1")))
    token, state = [t[:, 0] for t in arguments], make_state(rule)
    with pytest.raises(ValueError, match=r"state.tail_valid has shape \[2, 4\]; it must be \[2, 3\]"):
        falcon_step(*token, state._replace(tail_valid=torch.ones(2, 4, dtype=torch.bool)), rule=rule)


def test_step_shapes():
    rule = Rule("falcon_1")
    token = [t[:, 0] for t in (make_inputs(rule)[n] for n in INPUTS)]
    state = make_state(rule)
    with pytest.raises(ValueError, match=r"q has shape \[2, 1, 2, 4\]; it must be \[B, H, K\]"):
        falcon_step(token[0][:, None], *token[1:], state, rule=rule)
    with pytest.raises(ValueError, match=r"mask has shape \[3\]; it must be \[2\]"):
        falcon_step(*token, state, rule=rule, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64; it must be torch.bool"):
        falcon_step(*token, state, rule=rule, mask=torch.ones(2, dtype=torch.int64))


def test_nan_passes_through_and_does_not_raise():
    """A diverged model shows NaN; it does not fail inside an eigenvalue routine."""
    rule = Rule("falcon_3")
    inputs = make_inputs(rule)
    inputs["k"][0, 3] = torch.nan
    output = falcon_attention(*(inputs[n] for n in INPUTS), rule=rule).output
    assert output[0, 4:].isnan().any()
    assert output[1].isfinite().all()


def test_what_the_triton_kernels_do_not_take():
    pytest.importorskip("triton")
    wide = make_inputs(Rule("falcon_1"), B=1, T=2, H=1, K=320, V=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="q and v are 320 and 8 wide; with impl='triton' at most 256 is taken"):
        falcon_attention(*(wide[n] for n in INPUTS), rule=Rule("falcon_1"), impl="triton")
    rule = Rule("falcon_3", window=17, smoothness="bound")
    inputs = make_inputs(rule, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"rule\.window is 17; with impl='triton' it must be at most 16"):
        falcon_attention(*(inputs[n] for n in INPUTS), rule=rule, impl="triton")
