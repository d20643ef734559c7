"""Generation with its loop on the device writes what generate writes, and its steps never ask the host.

CUDA graphs are replaced by tapes here: the operations of the captured steps with the very tensors they were given,
which a replay runs again. What the host decides in a step, and tensors that are replaced, show as they would on a GPU.
"""

import copy
import gc
import json
import shutil
import time

import pytest
import torch
from tiny_models import CASES, RULES, cache_of, tiny_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoTokenizer,
    CompileConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from falcon_hf import FalconFastWeightForCausalLM, NotOnDevice, generate_on_device
from falcon_hf import generation_falcon_fast_weight as generation
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

PURE = [case for case, options in CASES.items() if "layer_types" not in options]
WAYS = (
    {"custom_generate": GenerationMixin._sample},
    {"custom_generate": generate_on_device, "tokens_per_replay": 4},
)
ENDS = {"eos_token_id": [3, 5, 7], "pad_token_id": 0}
SAMPLING = {
    "plain": {},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.8},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "repetition_penalty": {"repetition_penalty": 3.0, "renormalize_logits": True},
    "min_length": {"min_length": 15, "suppress_tokens": [4, 9], **ENDS},
    "min_new_tokens": {"min_new_tokens": 13, "repetition_penalty": 0.5, **ENDS},
}


class Tape(TorchDispatchMode):
    """What a step does to tensors, which `replay` does again. Reading a value is an error, as in a capture."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host waits for a value")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, old in self.calls:
            new = function(*args, **kwargs)
            for have, want in zip(tree_leaves(old), tree_leaves(new), strict=True):
                if isinstance(have, torch.Tensor) and have.data_ptr() != want.data_ptr():
                    have.copy_(want)


@pytest.fixture
def tapes(monkeypatch):
    """Those made so far, in place of CUDA graphs."""
    made = []

    def capture(step, count, device):
        made.append(Tape())
        with torch.random.fork_rng([]):
            step(0)
            with made[-1]:
                for place in range(count):
                    step(place)
        return made[-1]

    monkeypatch.setattr("falcon_kernels.api._values_readable", lambda tensor: False)  # as on CUDA
    monkeypatch.setitem(generation.GRAPHS, "cpu", capture)
    return made


@pytest.fixture(params=["steps", "graph"])
def way(request):
    """With the steps one by one, and with them in a graph."""
    if request.param == "graph":
        request.getfixturevalue("tapes")
    return request.param


def both(model, ids, seed=3, per_replay=4, **options):
    """What generate gives, and what it gives with the loop on the device."""
    results = []
    for on_device in (False, True):
        torch.manual_seed(seed)
        kwargs = copy.deepcopy(options)
        if on_device:
            kwargs |= {"custom_generate": generate_on_device, "tokens_per_replay": per_replay}
        else:
            kwargs |= {"custom_generate": GenerationMixin._sample}
        results.append(model.generate(ids, **kwargs))
    return results


def assert_same_cache(have, want):
    assert have.get_seq_length() == want.get_seq_length()
    for mine, theirs in zip(have.layers, want.layers, strict=True):
        for a, b in zip((*mine.state, mine.conv_window), (*theirs.state, theirs.conv_window), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("case", PURE)
def test_greedy_text_of_a_padded_batch(case, tapes):
    model, ids = tiny_model(**CASES[case], num_hidden_layers=2), tokens(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    want, have = both(model, ids, **options)
    assert have.tolist() == want.tolist()
    ends = {"eos_token_id": [want[0, 9].item(), want[1, 11].item()], "pad_token_id": 0}
    want, have = both(model, ids, **options | ends)
    assert have.tolist() == want.tolist()


@pytest.mark.parametrize("name", SAMPLING)
def test_a_seed_draws_the_text_that_generate_draws(name, way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"do_sample": True, "max_new_tokens": 17, "num_return_sequences": 2, "attention_mask": mask}
    want, have = both(model, ids, per_replay=5, **options, **SAMPLING[name])
    assert have.tolist() == want.tolist()
    other = both(model, ids, seed=4, per_replay=5, **options, **SAMPLING[name])[1]
    assert other.tolist() != have.tolist()


def test_padding_is_penalized_as_a_repetition_where_generate_does_so(way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 4)
    options = {"do_sample": False, "max_new_tokens": 12}
    text = model.generate(ids, repetition_penalty=5.0, **options)
    padded = torch.cat([text[:, -12:], ids], 1)  # what it would have written
    mask = torch.tensor([[0] * 12 + [1] * 4, [0] * 9 + [1] * 7])
    want, have = both(model, padded, attention_mask=mask, repetition_penalty=5.0, **options)
    assert have.tolist() == want.tolist()


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_lengths_around_those_of_a_replay(count, way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 6)
    want, have = both(model, ids, max_new_tokens=count, do_sample=False, return_dict_in_generate=True)
    assert have.sequences.tolist() == want.sequences.tolist()
    assert_same_cache(cache_of(have), cache_of(want))


@pytest.mark.parametrize("case", [*RULES, "3-before", "2-gate-values"])
def test_a_returned_cache_has_read_the_text_and_is_continued(case, tapes):
    model, ids = tiny_model(**CASES[case], num_hidden_layers=2), tokens(2, 6)
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    options = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    ends = {"eos_token_id": sorted({*text[0, 9:].tolist(), *text[1, 9:].tolist()}), "min_new_tokens": 3}
    want, have = both(model, ids, max_new_tokens=12, **ends, **options)
    assert have.sequences.tolist() == want.sequences.tolist()
    assert have.sequences.shape[1] < 18  # ended within a replay
    assert_same_cache(cache_of(have), cache_of(want))
    question = torch.cat([have.sequences, tokens(2, 3, seed=9)], 1)
    for new in (question, question[:, -4:]):
        mask = torch.ones_like(question)
        caches = {CACHE_NAME: cache_of(have)}
        again = both(model, new, max_new_tokens=9, attention_mask=mask, **options, **caches)
        assert again[1].sequences.tolist() == again[0].sequences.tolist()
        assert_same_cache(cache_of(again[1]), cache_of(again[0]))
    given = copy.deepcopy(cache_of(have))
    options["return_dict_in_generate"] = False
    options |= {"custom_generate": generate_on_device, "attention_mask": mask, CACHE_NAME: given}
    model.generate(question, max_new_tokens=9, **options)
    assert_same_cache(given, cache_of(again[0]))


def test_inputs_embeds_and_a_prompt_in_chunks(way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 9)
    options = {"max_new_tokens": 9, "do_sample": False}
    want, have = both(model, None, inputs_embeds=model.get_input_embeddings()(ids).detach(), **options)
    assert have.tolist() == want.tolist()
    assert have.tolist() == both(model, ids, prefill_chunk_size=4, **options)[1][:, 9:].tolist()


def test_a_compiled_pass():
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 5)
    compiling = CompileConfig(backend="eager", mode="default", fullgraph=True)
    want, have = both(model, ids, max_new_tokens=9, do_sample=True, compile_config=compiling)
    assert have.tolist() == want.tolist()
    assert model._last_compile_config == compiling


class Recorder:
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def test_streamers_get_the_tokens_that_are_in_the_text(way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(1, 6)
    text = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 6:].tolist()
    end = next(token for token in text if text.index(token) == 5)
    calls = []
    for options in WAYS:
        streamer = Recorder()
        model.generate(ids, streamer=streamer, max_new_tokens=12, do_sample=False, eos_token_id=end, **options)
        calls.append(streamer.calls)
    assert calls[0] == calls[1]
    assert len(calls[1]) == 1 + 6 + 1


class EndsWith(StoppingCriteria):
    """True in the rows whose last tokens are these; notes how long the texts were that it was asked about."""

    def __init__(self, *wanted):
        self.wanted, self.lengths = wanted, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.stack([(input_ids[:, -1:] == token).all(-1) for token in self.wanted]).any(0)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 39, "pad_token_id": 0}])
def test_criteria_of_the_caller_end_the_text_at_the_very_token(ends, way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 6)
    text = model.generate(ids, max_new_tokens=20, do_sample=False)[:, 6:]
    wanted = text[0, 4].item(), text[1, 10].item()
    results, lengths = [], []
    for options in WAYS:
        criterion = EndsWith(*wanted)
        criteria = StoppingCriteriaList([criterion])
        result = model.generate(ids, max_new_tokens=20, do_sample=False, stopping_criteria=criteria, **ends, **options)
        results.append(result.tolist())
        lengths.append(criterion.lengths)
    assert results[0] == results[1]
    assert lengths[0] == lengths[1] == list(range(7, len(results[0][0]) + 1))
    assert len(results[0][0]) < 26


def test_stop_strings_with_the_tokenizer(checkpoint, way):
    model = FalconFastWeightForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("A pointer", return_tensors="pt").input_ids
    torch.manual_seed(3)
    drawn = model.generate(ids, max_new_tokens=30, do_sample=True)[0, ids.shape[1] :].tolist()
    place = next(place for place in range(5, 30) if tokenizer.decode(drawn[place]).isalnum())
    stop = tokenizer.decode(drawn[place])
    options = {"max_new_tokens": 30, "do_sample": True, "stop_strings": [stop], "tokenizer": tokenizer}
    texts = []
    for way in ({}, {"custom_generate": generate_on_device, "tokens_per_replay": 4}):
        torch.manual_seed(3)
        texts.append(model.generate(ids, **options, **way))
    want, have = texts
    assert have.tolist() == want.tolist()
    assert have.shape[1] <= ids.shape[1] + place + 1


def test_max_time_ends_the_text_after_a_replay(monkeypatch, way):
    model, ids = tiny_model(num_hidden_layers=2), tokens(1, 6)
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "time", lambda: next(ticks))
    options = {"custom_generate": generate_on_device, "tokens_per_replay": 4, "max_time": 2.5}
    assert model.generate(ids, max_new_tokens=100, do_sample=False, **options).shape[1] == 6 + 1 + 4 + 4


class Constant(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "generation by beam search"),
        ({"prompt_lookup_num_tokens": 2}, "generation by assisted generation"),
        ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor"),
        ({"logits_processor": LogitsProcessorList([Constant()])}, "the logits processor Constant"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"use_cache": False}, "use_cache=False"),
        ({"compile_config": CompileConfig()}, "compile_config with mode 'reduce-overhead'"),
    ],
)
def test_what_it_does_not_do_is_refused_before_anything_is_read(options, named):
    with pytest.raises(NotOnDevice, match=rf"^generate_on_device does not do {named}; leave out custom_generate\.$"):
        tiny_model(num_hidden_layers=1).generate(tokens(1, 4), custom_generate=generate_on_device, **options)


def test_models_assistants_and_caches_that_it_does_not_take():
    ids, options = tokens(1, 4), {"custom_generate": generate_on_device}
    model = tiny_model()
    with pytest.raises(NotOnDevice, match="does not do generation by assisted generation; leave out"):
        model.generate(ids, assistant_model=tiny_model(), **options)
    with pytest.raises(NotOnDevice, match="does not do layer_types with full_attention, whose keys and values grow"):
        tiny_model(**CASES["3a-hybrid"]).generate(ids, **options)
    cache = cache_of(model.generate(ids, max_new_tokens=2, return_dict_in_generate=True))
    cache.activate_past_recording()
    with pytest.raises(NotOnDevice, match="does not do a cache that records what it reads"):
        model.generate(tokens(1, 9), **options, **{CACHE_NAME: cache})
    with pytest.raises(NotOnDevice, match="does not do autocast"), torch.autocast("cpu", torch.bfloat16):
        tiny_model(torch.float32).generate(ids, **options)
    with pytest.raises(ValueError, match=r"tokens_per_replay is 0; it must be a whole number of at least 1\."):
        model.generate(ids, tokens_per_replay=0, **options)
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    other = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1))
    with pytest.raises(NotOnDevice, match="model of type llama; it must be falcon_fast_weight"):
        other.generate(ids, **options)


def test_the_hook_gives_a_callable_what_it_asks_for():
    seen = {}

    def ours(
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, tokenizer=None, **rest
    ):
        seen.update(streamer=streamer, tokenizer=tokenizer, rest=rest)
        return input_ids

    streamer, ids = Recorder(), tokens(1, 4)
    tiny_model().generate(ids, custom_generate=ours, streamer=streamer, tokenizer="any", assistant_model=None)
    assert seen["streamer"] is streamer
    assert seen["tokenizer"] == "any"
    assert "assistant_model" not in seen["rest"]


def test_a_graph_serves_the_calls_that_are_like_its_own(tapes):
    model, ids = tiny_model(torch.float32), tokens(2, 6)

    def calls(**options):
        options = {"max_new_tokens": 11, "do_sample": True, "min_new_tokens": 2, **options}
        want, have = both(models[0], ids, **options)
        assert have.tolist() == want.tolist()
        return len(tapes)

    models = [model]
    assert calls() == 1
    assert calls(seed=5, max_new_tokens=9, min_new_tokens=6, return_dict_in_generate=False) == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert calls() == 1
    assert calls(temperature=0.5) == 2
    assert calls(per_replay=3) == 3
    assert calls(num_return_sequences=2) == 4
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.5)
    assert calls(num_return_sequences=2) == 5
    handle = model.model.norm.register_forward_hook(lambda module, args, output: -output)
    assert calls(num_return_sequences=2) == 6
    assert calls(num_return_sequences=2) == 7
    handle.remove()
    assert calls(num_return_sequences=2) == 8
    with torch.inference_mode():
        assert calls(num_return_sequences=2) == 9
    assert calls(num_return_sequences=2) == 10
    del model, handle
    models.clear()
    tapes.clear()
    gc.collect()
    assert not generation.KEPT


def test_generate_itself_replays_a_graph_for_each_token_where_that_pays(tapes):
    model, ids = tiny_model(torch.float32, num_hidden_layers=2), tokens(2, 6)

    def calls(**options):
        options = {"max_new_tokens": 16, "do_sample": True, **options}
        results = []
        for way in ({"custom_generate": GenerationMixin._sample}, {}):
            torch.manual_seed(3)
            streamer = Recorder()
            results.append((model.generate(ids, streamer=streamer, **options, **way).tolist(), streamer.calls))
            results[-1] += (torch.rand(1).item(),)  # what is drawn afterwards
        assert results[0] == results[1]
        return len(tapes)

    assert calls() == calls() == 1
    assert calls(eos_token_id=[3, 4, 5], pad_token_id=0) == 2
    assert calls(max_new_tokens=15) == 2
    assert calls(no_repeat_ngram_size=2) == 2
    model.model.norm.register_forward_hook(lambda module, args, output: output)
    assert calls() == 2


def test_a_failed_capture_leaves_the_cache_with_the_prompt(monkeypatch):
    model, ids = tiny_model(num_hidden_layers=2), tokens(2, 6)

    def capture(step, count, device):
        step(0)
        raise RuntimeError("no memory")

    monkeypatch.setitem(generation.GRAPHS, "cpu", capture)
    cache = cache_of(model(ids[:, :3], use_cache=True))
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"^the loop cannot be captured \(no memory\); leave out custom_generate\.$"):
        model.generate(ids, custom_generate=generate_on_device, do_sample=False, **{CACHE_NAME: cache})
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_cache(cache, cache_of(model(ids, use_cache=True)))


@pytest.mark.parametrize("case", PURE)
def test_a_step_changes_no_address_and_allocates_nothing_that_stays(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 5)
    with torch.no_grad():
        cache = cache_of(model(ids, use_cache=True))
        before = [tensor.data_ptr() for tensor in generation._tensors(cache)]
        for _ in range(3):
            model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
    assert [tensor.data_ptr() for tensor in generation._tensors(cache)] == before
    assert not any(layer.passes for layer in cache.layers)


def test_a_step_that_reads_a_value_is_not_captured(tapes):
    model = tiny_model()
    model.model.norm.register_forward_hook(lambda module, args, output: output / output.max().item())
    with pytest.raises(RuntimeError, match=r"^the loop cannot be captured \(the host waits for a value\)"):
        model.generate(tokens(1, 4), custom_generate=generate_on_device)


def test_the_command_uses_it_where_there_are_graphs_and_it_can(call, checkpoint, tapes, tmp_path):
    command = ("generate", "A pointer", "--model", checkpoint, "--seed", 1, "-n", 20)
    code, text, errors = call(*command, "--temperature", 0.9)
    assert code == 0, errors
    assert len(tapes) == 1
    shutil.copytree(checkpoint, tmp_path / "other")
    path = tmp_path / "other" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "no_repeat_ngram_size": 30}))
    command = ("generate", "A pointer", "--model", tmp_path / "other", "--seed", 1, "-n", 20)
    code, again, errors = call(*command, "--temperature", 0.9)
    assert code == 0, errors
    assert len(tapes) == 1
    assert again == text


def test_collection_goes_on_after_a_capture_as_before():
    seen = []

    def capture():
        with generation.without_collection():
            seen.append(gc.isenabled())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        capture()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with generation.without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
