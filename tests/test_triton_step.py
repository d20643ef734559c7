"""The one-token Triton kernel against the recurrence: through Triton's interpreter in float32 where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
import torch
from cases import INPUTS, VARIANTS, assert_same, assert_same_state, make_inputs, make_state
from falcon_kernels import RULES, FalconState, Rule, falcon_step, reference

interpreter.require()

from falcon_kernels import triton_step  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 1e-5


def tokens(inputs, dtype=None, device=None):
    """The arguments of one step after another, as [B, H, .]."""
    for t in range(inputs["q"].shape[1]):
        yield [None if inputs[n] is None else inputs[n][:, t].to(device=device, dtype=dtype) for n in INPUTS]


def compare(inputs, rule, state, mask=None, dtype=torch.float32, bound=BUDGET):
    """Steps through `inputs` [B, T, ...], given in float64, beside the recurrence in float64; returns both states."""
    rounded = {name: None if t is None else t.to(dtype) for name, t in inputs.items()}
    truth = state.map(lambda t: t if t.dtype == torch.bool else t.to(dtype).double())
    narrow = FalconState._fields[1:6]  # the rest, memory and normalizer, is float32 at least
    wide = torch.promote_types(dtype, torch.float32)
    mine = FalconState(
        *(
            None if t is None else t.to(DEVICE, t.dtype if t.dtype == torch.bool else dtype if f in narrow else wide)
            for f, t in zip(FalconState._fields, truth, strict=True)
        )
    ).map(torch.clone)
    addresses = [t.data_ptr() for t in mine if t is not None]
    have, want = [], []
    for t, (token, true_token) in enumerate(
        zip(tokens(rounded, device=DEVICE), tokens(rounded, torch.float64), strict=True)
    ):
        present = None if mask is None else mask[:, t]
        output, truth = reference.step(*true_token, truth, rule, present)
        want.append(output)
        present = None if present is None else present.to(DEVICE)
        output, returned = falcon_step(*token, mine, rule=rule, mask=present, impl="triton")
        assert returned is mine
        assert output.dtype == dtype
        have.append(output.cpu())
    assert [t.data_ptr() for t in mine if t is not None] == addresses
    mine = mine.map(torch.Tensor.cpu)
    assert_same(torch.stack(have, 1), torch.stack(want, 1), bound, "output")
    assert_same_state(mine, truth, bound)
    return mine, truth


def mixed_state(rule, **sizes):
    """Rows that go on with a full window, that have not begun, and that have begun with one pair in the tail."""
    state = make_state(rule, B=3, **sizes)
    if state.previous_valid is not None:
        state.previous_valid[1] = False
    if state.tail_valid is not None:
        state.tail_valid[1] = False
        state.tail_valid[2, :-1] = False
    return state


@pytest.mark.parametrize("name", VARIANTS)
def test_sequence(name):
    rule = VARIANTS[name]
    inputs = make_inputs(rule, B=3, T=5, H=2, K=16, V=32)
    compare(inputs, rule, mixed_state(rule, H=2, K=16, V=32))


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_rows_are_left_alone(name):
    """Whatever stands in them: NaN neither gets out nor into the state."""
    rule = VARIANTS[name]
    inputs = make_inputs(rule, B=3, T=5, H=2, K=16, V=16)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, 0], mask[1, 0] = False, True
    for n in INPUTS if DEVICE == "cuda" else ("q", "k", "v"):  # values of gain and ridge are checked on the CPU
        if inputs[n] is not None:
            inputs[n][~mask] = torch.nan
    compare(inputs, rule, mixed_state(rule, H=2, K=16, V=16), mask)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_not_valid_is_not_used(name):
    """NaN in a previous key and in a tail that do not count."""
    rule = VARIANTS[name]
    inputs = {n: None if t is None else t.float().to(DEVICE) for n, t in make_inputs(rule, T=1, K=16, V=16).items()}
    (token,) = tokens(inputs)
    states = [make_state(rule, K=16, V=16, dtype=torch.float32).map(lambda t: t.to(DEVICE)) for _ in range(2)]
    for state, filler in zip(states, (torch.nan, 0.0), strict=True):
        if state.previous_key is not None:
            state.previous_valid[0] = False
            state.previous_key[0] = filler
        if state.tail_x is not None:
            state.tail_valid[:, 0] = False
            state.tail_x[:, 0], state.tail_v[:, 0] = filler, filler
    have, want = (falcon_step(*token, state, rule=rule, impl="triton") for state in states)
    assert torch.equal(have[0], want[0])
    assert torch.equal(have[1].memory, want[1].memory)


@pytest.mark.parametrize("alignment", ["next_latent", "same_step"])
@pytest.mark.parametrize("name", ["falcon_3", "falcon_3a"])
@pytest.mark.parametrize("tail", range(4))
def test_each_filling_of_the_tail(name, alignment, tail):
    rule = Rule(name, alignment=alignment)
    state = make_state(rule, B=1, H=3, K=16, V=16, tail=tail)
    compare(make_inputs(rule, B=1, T=2, H=3, K=16, V=16), rule, state)


@pytest.mark.parametrize("name", ["falcon_3", "falcon_3a"])
def test_window_of_one_pair(name):
    rule = Rule(name, window=1)
    compare(make_inputs(rule, T=3, K=16, V=16), rule, make_state(rule, K=16, V=16))


@pytest.mark.parametrize("name", RULES)
def test_from_the_first_token(name):
    """The flags as they fill, heads of several rows in the same word."""
    rule = Rule(name)
    state = FalconState.zeros(rule, 5, 3, 16, 16, dtype=torch.float64)
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.2
    compare(make_inputs(rule, B=5, T=5, H=3, K=16, V=16), rule, state, mask)


@pytest.mark.parametrize(("K", "V"), [(96, 16), (16, 96), (192, 64), (128, 192), (256, 256), (20, 12)])
@pytest.mark.parametrize("name", RULES)
def test_sizes(name, K, V):
    """Several tiles of channels, and dimensions that are no power of two; one row and one head."""
    rule = Rule(name, window=3) if RULES[name].sliding else Rule(name, timing="read_before_write")
    compare(make_inputs(rule, B=1, T=2, H=1, K=K, V=V), rule, make_state(rule, B=1, H=1, K=K, V=V))


@pytest.mark.parametrize("name", ["1a-same-normalized-direct", "2a-normalized-before", "3a-normalized-live-ridge"])
def test_normalizer_over_several_tiles(name):
    rule = VARIANTS[name]
    compare(make_inputs(rule, B=1, T=2, H=2, K=192, V=96), rule, make_state(rule, B=1, H=2, K=192, V=96))


@pytest.mark.parametrize("ridge", ["none", "direct", "scale_coupled"])
@pytest.mark.parametrize("name", RULES)
def test_zero_keys(name, ridge):
    rule = Rule(name, epsilon=0.0, ridge=ridge)
    inputs = make_inputs(rule, B=2, T=3, H=1, K=16, V=16)
    inputs["k"][:, :2] = 0
    state = make_state(rule, H=1, K=16, V=16)
    state.previous_key.zero_()
    if state.tail_valid is not None:
        state.tail_x.zero_()
    compare(inputs, rule, state)


@pytest.mark.parametrize("smoothness", ["exact", "bound"])
@pytest.mark.parametrize("window", [2, 4, 8])
def test_repeated_keys(window, smoothness):
    """Windows of rank one, of equal eigenvalues, and near both."""
    rule = Rule("falcon_3", window=window, smoothness=smoothness, alignment="same_step")
    inputs = make_inputs(rule, B=5, T=window + 1, H=1, K=16, V=16)
    k = inputs["k"]
    k[0] = k[0, :1]
    k[1] = k[1, :1] * torch.tensor([1.0, -1.0]).repeat(window)[: window + 1, None, None]
    k[2] = 4 * torch.eye(16)[: window + 1, None]
    k[3] = 4 * torch.eye(16)[: window + 1, None] + 1e-3 * k[3]
    k[4] = 4 * torch.eye(16)[: window + 1, None] * (1 + 1e-5 * torch.arange(window + 1)[:, None, None])
    compare(inputs, rule, FalconState.zeros(rule, 5, 1, 16, 16, dtype=torch.float64))


@pytest.mark.parametrize("name", ["falcon_1", "falcon_2", "falcon_3"])
def test_largest_gain_and_the_decay_floor(name):
    rule = Rule(name, ridge="direct")
    inputs = make_inputs(rule, B=2, T=6, H=1, K=16, V=16, decay=50.0)
    inputs["gain"].fill_(2.0)
    compare(inputs, rule, make_state(rule, H=1, K=16, V=16))


@pytest.mark.parametrize("case", ["float64", "heads", "state"])
def test_what_goes_through_the_reference(case):
    rule = Rule("falcon_3")
    H, dtype = (128 if case == "heads" else 2), (torch.float64 if case == "float64" else torch.float32)
    inputs = {n: t.to(DEVICE, dtype) for n, t in make_inputs(rule, T=1, H=H).items()}
    (token,) = tokens(inputs)
    mine, other = (make_state(rule, H=H, dtype=dtype).map(lambda t: t.to(DEVICE)) for _ in range(2))
    if case == "state":
        mine = mine._replace(memory=mine.memory.transpose(-1, -2).contiguous().transpose(-1, -2))
    address = mine.memory.data_ptr()
    have, mine = falcon_step(*token, mine, rule=rule, impl="triton")
    want, other = falcon_step(*token, other, rule=rule, impl="reference")
    assert torch.equal(have, want)
    assert_same_state(mine, other, 1e-7)
    assert mine.memory.data_ptr() == address


def test_inputs_with_gaps():
    rule = Rule("falcon_2")
    inputs = {n: t.float().to(DEVICE) for n, t in make_inputs(rule, T=3, H=2, K=16, V=16).items()}
    have, want = (make_state(rule, K=16, V=16, dtype=torch.float32).map(lambda t: t.to(DEVICE)) for _ in range(2))
    for token in tokens(inputs):
        assert not token[0].is_contiguous()
        a, _ = falcon_step(*token, have, rule=rule, impl="triton")
        b, _ = falcon_step(*(t.contiguous() for t in token), want, rule=rule, impl="triton")
        assert torch.equal(a, b)
    assert torch.equal(have.memory, want.memory)


@pytest.mark.parametrize("name", ["falcon_1", "3-wide-live", "2a-normalized-before", "1-same-before-direct"])
def test_operator(name):
    rule = VARIANTS[name]
    inputs = {n: None if t is None else t.float().to(DEVICE) for n, t in make_inputs(rule, T=1, K=16, V=16).items()}
    (token,) = tokens(inputs)
    state = make_state(rule, K=16, V=16, dtype=torch.float32).map(lambda t: t.to(DEVICE))
    mask = torch.tensor([True, False], device=DEVICE)
    arguments = (
        *token, mask, *state, rule.name, rule.window, rule.alignment, rule.timing, rule.step_size, rule.ridge,
        rule.smoothness or "trace", rule.normalized_read, rule.epsilon, rule.decay_floor, rule.read_epsilon,
    )  # fmt: skip
    torch.library.opcheck(triton_step.operator, arguments)


@pytest.mark.parametrize("name", ["falcon_1", "falcon_3", "2a-normalized-before"])
def test_compiles_without_a_graph_break(name):
    rule = VARIANTS[name]
    inputs = {n: None if t is None else t.float().to(DEVICE) for n, t in make_inputs(rule, T=2, K=16, V=16).items()}
    have, want = (make_state(rule, K=16, V=16, dtype=torch.float32).map(lambda t: t.to(DEVICE)) for _ in range(2))

    def run(token, state):
        return falcon_step(*token, state, rule=rule, impl="triton")[0] * 2

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for token in tokens(inputs):
        assert torch.equal(compiled(token, have), run(token, want))
    assert_same_state(have, want, 0)


def test_bad_impl():
    rule = Rule("falcon_1")
    (token,) = tokens(make_inputs(rule, T=1))
    with pytest.raises(ValueError, match="impl is 'fast'; it must be one of reference, triton"):
        falcon_step(*token, make_state(rule), rule=rule, impl="fast")


def without_interpreter(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_is_imported_when_asked_for():
    without_interpreter("-c", "import sys, falcon_kernels; assert 'triton' not in sys.modules")


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_without_a_gpu():
    code = (
        "from cases import make_inputs, make_state; from falcon_kernels import Rule, falcon_step\n"
        "rule = Rule('falcon_1', ridge='none'); i = make_inputs(rule, T=1)\n"
        "try: falcon_step(*(i[n][:, 0] for n in ('q', 'k', 'v', 'gain')), None, make_state(rule), rule=rule, "
        "impl='triton')\n"
        "except ValueError as error: print(error)"
    )
    done = without_interpreter("-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{code}")
    assert done.strip() == (
        "q is on cpu; with impl='triton' it must be on an NVIDIA GPU, or Triton's interpreter must be on."
    )


@pytest.mark.slow
def test_compiles_for_the_card():
    """The compiler refuses some of what the interpreter takes."""
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("a Triton that cannot compile for NVIDIA cards")
    without_interpreter(str(Path(__file__).parent / "compile_step.py"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("dtype", "K", "V"),
    [
        (torch.bfloat16, 64, 64),
        (torch.bfloat16, 128, 128),
        (torch.bfloat16, 256, 256),
        (torch.float16, 96, 192),
        (torch.float32, 16, 32),
        (torch.float32, 128, 128),
    ],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_on_the_card(name, dtype, K, V):
    """Many heads at once, from rows that begin, with the tail flags changing while others read."""
    rule = VARIANTS[name]
    state = FalconState.zeros(rule, 9, 12, K, V, dtype=torch.float64)
    mask = torch.rand(9, 12, generator=torch.Generator().manual_seed(1)) > 0.2
    bound = BUDGET if dtype == torch.float32 else 5e-3
    compare(make_inputs(rule, B=9, T=12, H=12, K=K, V=V), rule, state, mask, dtype, bound)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("name", RULES)
def test_graph_replays(name):
    """A captured step is the same bits as one that is called, from the first token on."""
    rule = Rule(name)
    inputs = {n: t.bfloat16().cuda() for n, t in make_inputs(rule, B=4, T=8, H=16, K=128, V=128).items()}
    called, replayed = (FalconState.zeros(rule, 4, 16, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    every = list(tokens(inputs))
    slots = [t.clone().contiguous() for t in every[0]]
    falcon_step(*slots, replayed.map(torch.clone), rule=rule, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = falcon_step(*slots, replayed, rule=rule, impl="triton")
    for token in every:
        want, _ = falcon_step(*token, called, rule=rule, impl="triton")
        for slot, t in zip(slots, token, strict=True):
            slot.copy_(t)
        graph.replay()
        assert torch.equal(output, want)
    assert all(torch.equal(a, b) for a, b in zip(called, replayed, strict=True) if a is not None)
