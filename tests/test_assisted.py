"""Tokens can be taken back from a cache, so that assisted decoding gives the text of plain decoding."""

import copy

import pytest
import torch
from tiny_models import CASES, HYBRID, RULES, cache_of, tiny_model, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer

from falcon_hf import MemoryStore, falcon_cache
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME
from falcon_hf.cli import bundled

EXACT = {"atol": 1e-11, "rtol": 0}  # as in test_generation
MAIN_CASES = [*RULES, "3-before", "3a-normalized", "3a-hybrid", "2-attention-first"]


def greedy(model, ids, count=12, **kwargs):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **kwargs)


def llama(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, pad_token_id=0, bos_token_id=None, eos_token_id=None, **sizes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.to(dtype).eval()


class Passes:
    """Counts the tokens of each pass of a model."""

    def __init__(self, model):
        self.tokens = []
        model.register_forward_pre_hook(lambda module, args, kwargs: self._count(kwargs), with_kwargs=True)

    def _count(self, kwargs):
        self.tokens.append(kwargs["input_ids"].shape[1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", [0, 5])
@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_it_had_never_read_the_tokens(case, start):
    model, ids, other = tiny_model(**CASES[case]), tokens(2, start + 10), tokens(2, 4, seed=5)
    cache = falcon_cache(model.config)
    if start:
        model(ids[:, :start], cache=cache)
    cache.activate_past_recording()
    for a, b in ((0, 6), (6, 7), (7, 10)):
        model(ids[:, start + a : start + b], cache=cache)
    pointers = [tensor.data_ptr() for layer in cache.layers if hasattr(layer, "state") for tensor in layer.state[:1]]
    for removed in range(10 if start == 0 else 11):
        cropped = copy.deepcopy(cache) if removed < 9 else cache
        kept = start + 10 - removed
        cropped.crop(-removed)
        assert cropped.get_seq_length() == kept
        if kept:
            expected = model(torch.cat([ids[:, :kept], other], 1)).logits[:, kept:]
            steps = [model(other[:, t : t + 1], cache=cropped).logits for t in range(4)]
            torch.testing.assert_close(torch.cat(steps, 1), expected, **EXACT)
        if removed >= 9:
            break
    assert pointers == [x.data_ptr() for layer in cache.layers if hasattr(layer, "state") for x in layer.state[:1]]


@pytest.mark.parametrize("case", [name for name in CASES if "layer_types" not in CASES[name]])
@torch.no_grad()
def test_padded_rows_are_cropped_by_places(case):
    model, ids, other = tiny_model(**CASES[case]), tokens(3, 9), tokens(3, 2, seed=5)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1, 1]])
    cache = falcon_cache(model.config)
    cache.activate_past_recording()
    model(ids[:, :3], attention_mask=mask[:, :3], cache=cache)
    model(ids[:, 3:], attention_mask=mask, cache=cache)
    for removed in range(1, 9):
        cropped, kept = copy.deepcopy(cache), 9 - removed
        cropped.crop(-removed)
        ones = torch.ones_like(other)
        going_on = torch.cat([mask[:, :kept], ones], 1)
        logits = model(other, attention_mask=going_on, cache=cropped).logits
        expected = model(torch.cat([ids[:, :kept], other], 1), attention_mask=going_on).logits[:, kept:]
        torch.testing.assert_close(logits, expected, **EXACT)


@torch.no_grad()
def test_single_tokens_are_taken_back_bit_for_bit():
    model, ids = tiny_model(torch.bfloat16, rule="falcon_3"), tokens(2, 9)
    cache = cache_of(model(ids[:, :5], use_cache=True))
    before = copy.deepcopy(cache)
    cache.activate_past_recording()
    for t in range(5, 9):
        model(ids[:, t : t + 1], cache=cache)
    cache.crop(-4)
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(layer.state, old.state, strict=True) if x is not None)
        assert torch.equal(layer.conv_window, old.conv_window)


@torch.no_grad()
def test_recorded_rows_follow_their_cache():
    model, ids, other = tiny_model(rule="falcon_3a"), tokens(2, 6), tokens(2, 2, seed=5)
    cache = falcon_cache(model.config)
    cache.activate_past_recording()
    model(ids, cache=cache, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]))
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.crop(-2)
    expected = model(torch.cat([ids[[1, 1], :4], other], 1)).logits[:, 4:]
    torch.testing.assert_close(model(other, cache=cache).logits, expected, **EXACT)
    cache.reset()
    assert not any(layer.passes for layer in cache.layers)


@torch.no_grad()
def test_only_what_is_recorded_can_be_taken_back():
    model, ids = tiny_model(layer_types=HYBRID), tokens(1, 6)
    cache = cache_of(model(ids[:, :4], use_cache=True))
    assert cache.is_croppable
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"asked to take back 2 tokens, but 0 are recorded; call cache\.act"):
        cache.crop(-2)
    cache.activate_past_recording()
    assert not cache.layers[0].is_compileable
    model(ids[:, 4:], cache=cache)
    with pytest.raises(RuntimeError, match="asked to take back 3 tokens, but 2 are recorded"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="crop is given 5; it must be minus the number of tokens to take back"):
        cache.layers[0].crop(5)
    cache.layers[0].reset()
    with pytest.raises(RuntimeError, match="asked to take back 1 tokens, but 0 are recorded"):
        cache.crop(-1)


@pytest.mark.parametrize("case", ["falcon_3a", "3a-hybrid"])
@torch.no_grad()
def test_the_end_of_a_long_pass_is_recorded(case):
    model, ids, other = tiny_model(**CASES[case]), tokens(2, 700), tokens(2, 2, seed=5)
    cache = falcon_cache(model.config)
    cache.activate_past_recording()
    model(ids[:, :20], cache=cache)
    torch.testing.assert_close(model(ids[:, 20:], cache=cache).logits, model(ids).logits[:, 20:], **EXACT)
    with pytest.raises(RuntimeError, match="asked to take back 257 tokens, but 256 are recorded"):
        copy.deepcopy(cache).crop(-257)
    cache.crop(-30)
    expected = model(torch.cat([ids[:, :670], other], 1)).logits[:, 670:]
    torch.testing.assert_close(model(other, cache=cache).logits, expected, **EXACT)


@pytest.mark.parametrize("case", ["falcon_2", "falcon_3", "3a-hybrid"])
@torch.no_grad()
def test_tokens_can_be_taken_back_in_several_crops(case):
    model, ids, other = tiny_model(**CASES[case]), tokens(2, 80), tokens(2, 2, seed=5)
    cache = falcon_cache(model.config)
    cache.activate_past_recording()
    kept = 0
    for read, removed in ((20, 3), (1, 1), (30, 5), (10, 0), (6, 4), (0, 2), (0, 20), (3, 9), (0, 1)):
        if read:
            model(ids[:, kept : kept + read], cache=cache)
        kept += read - removed
        cache.crop(-removed)
        assert cache.get_seq_length() == kept
        expected = model(torch.cat([ids[:, :kept], other], 1)).logits[:, kept:]
        torch.testing.assert_close(model(other, cache=copy.deepcopy(cache)).logits, expected, **EXACT)
    for layer in cache.layers:
        assert sum(part.places for part in getattr(layer, "passes", [])) < 64


@torch.no_grad()
def test_what_is_read_unrecorded_cannot_be_taken_back():
    model, ids = tiny_model(), tokens(1, 6)
    cache = falcon_cache(model.config)
    cache.activate_past_recording()
    model(ids, cache=cache)
    for layer in cache.layers:
        layer.record_past = False
    model(ids, cache=cache)
    with pytest.raises(RuntimeError, match="asked to take back 1 tokens, but 0 are recorded"):
        cache.crop(-1)


@pytest.mark.parametrize("case", MAIN_CASES)
@pytest.mark.parametrize("assistant", ["itself", "another", "llama"])
def test_assisted_text_is_the_plain_text(case, assistant):
    model, ids = tiny_model(**CASES[case]), tokens(1, 7)
    plain = greedy(model, ids)
    helper = {
        "itself": lambda: copy.deepcopy(model),
        "another": lambda: tiny_model(seed=2, **CASES[case]),
        "llama": llama,
    }[assistant]()
    helper.generation_config.assistant_confidence_threshold = 0  # four candidates, however unsure the assistant is
    helper.generation_config.num_assistant_tokens = 4
    passes = Passes(model)
    output = greedy(model, ids, assistant_model=helper, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    if assistant == "itself":
        assert passes.tokens[:2] == [11, 5]  # all candidates are right
    assert max(passes.tokens[1:]) == 5
    assert cache_of(output).get_seq_length() == 18
    question = torch.cat([plain, tokens(1, 3, seed=9)], 1)
    mask = torch.ones_like(question)  # without one, a token 0 would be taken for padding
    going_on = greedy(model, question, 4, attention_mask=mask, **{CACHE_NAME: cache_of(output)})
    assert going_on.tolist() == greedy(model, question, 4, attention_mask=mask, use_cache=False).tolist()


@pytest.mark.parametrize("case", MAIN_CASES)
def test_prompt_lookup_gives_the_plain_text(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 4).repeat(1, 4)
    plain = greedy(model, ids, 20)
    passes = Passes(model)
    assert greedy(model, ids, 20, prompt_lookup_num_tokens=3).tolist() == plain.tolist()
    assert passes.tokens[0] > 16  # the prompt is read with its first candidates
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = ids.masked_fill(mask == 0, 0)
    looked_up = greedy(model, padded, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert looked_up.tolist() == greedy(model, padded, attention_mask=mask).tolist()


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3a", "3a-hybrid"])
def test_assisted_samples_narrowed_to_the_likeliest_token_are_the_plain_text(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 7)
    options = {"do_sample": True, "top_k": 1, "max_new_tokens": 12}
    for extra in ({"assistant_model": tiny_model(seed=2, **CASES[case])}, {"prompt_lookup_num_tokens": 2}):
        assert model.generate(ids, **options, **extra).tolist() == greedy(model, ids).tolist()


@pytest.mark.parametrize("case", ["falcon_2", "falcon_3", "3a-hybrid"])
def test_the_first_layers_assist_the_whole_model(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 7)
    plain = greedy(model, ids)
    assert greedy(model, ids, assistant_early_exit=2).tolist() == plain.tolist()
    assert greedy(model, ids).tolist() == plain.tolist()


@pytest.mark.parametrize("case", ["falcon_1", "3a-hybrid"])
def test_a_falcon_model_assists_another_kind(case):
    model, ids = llama(), tokens(1, 7)
    plain = greedy(model, ids)
    assert greedy(model, ids, assistant_model=tiny_model(**CASES[case])).tolist() == plain.tolist()


@pytest.mark.parametrize("case", ["falcon_3", "3a-hybrid"])
def test_assisted_decoding_goes_on_from_a_returned_cache(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 9)
    plain = greedy(model, ids)
    for extra in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny_model(seed=2, **CASES[case])}):
        with torch.no_grad():
            cache = cache_of(model(ids[:, :6], use_cache=True))
        assert greedy(model, ids, **{CACHE_NAME: cache}, **extra).tolist() == plain.tolist()
    with torch.no_grad():
        extra[CACHE_NAME] = cache_of(model(ids[:, :6], use_cache=True))
    with pytest.raises(ValueError, match="input_ids has 3 of 9 tokens; assisted decoding from a cache takes all of"):
        greedy(model, ids[:, 6:], attention_mask=torch.ones_like(ids), **extra)
    store = MemoryStore(model, 10**9)
    store.read(ids[:, :6])
    assert greedy(store, ids, prompt_lookup_num_tokens=2).tolist() == plain.tolist()
    assert store.longest_prefix(ids)[1] == 9


def test_an_assistant_may_have_another_tokenizer(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(bundled()["falcon-3a.3-tiny"])
    model = AutoModelForCausalLM.from_pretrained(bundled()["falcon-3a.3-tiny"], dtype=torch.float32)
    helper, helpers_tokenizer = (auto.from_pretrained(checkpoint) for auto in (AutoModelForCausalLM, AutoTokenizer))
    helper.generation_config.assistant_confidence_threshold = 0
    helper.generation_config.num_assistant_tokens = 5
    ids = tokenizer("A pointer is an address of", return_tensors="pt").input_ids
    options = {"assistant_model": helper, "tokenizer": tokenizer, "assistant_tokenizer": helpers_tokenizer}
    assert greedy(model, ids, 20, **options).tolist() == greedy(model, ids, 20).tolist()


def test_assisted_text_is_streamed_and_stopped(checkpoint, capsys):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer("A pointer is an address. A pointer", return_tensors="pt").input_ids
    plain = greedy(model, ids, 16)
    new = plain[0, ids.shape[1] :]
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    greedy(model, ids, 16, prompt_lookup_num_tokens=3, streamer=streamer)
    assert capsys.readouterr().out.strip() == tokenizer.decode(new, skip_special_tokens=True).strip()
    end = new[5].item()
    stopped = greedy(model, ids, 16, prompt_lookup_num_tokens=3, eos_token_id=end)
    assert stopped.tolist() == greedy(model, ids, 16, eos_token_id=end).tolist()


def test_many_rows_are_refused_by_transformers():
    model, ids = tiny_model(), tokens(2, 7)
    with pytest.raises(ValueError, match="batch_size = 1"):
        greedy(model, ids, prompt_lookup_num_tokens=2)
