"""A cached model is the full model: token by token, in chunks, padded, in beams, and continued."""

import copy
from contextlib import nullcontext
from threading import Thread

import pytest
import torch
from tiny_models import CASES, HYBRID, RULES, cache_of, tiny_model, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.cache_utils import DynamicLayer

from falcon_hf import cache_nbytes, falcon_cache
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

EXACT = {"atol": 1e-11, "rtol": 0}  # float64 logits of order 1 to 10; errors of 1e-13 were measured
MAIN_CASES = [*RULES, "3a-normalized", "3a-hybrid", "2-attention-first"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def in_chunks(model, ids, sizes, attention_mask=None):
    cache, logits, start = None, [], 0
    for size in sizes:
        end = start + size
        mask = None if attention_mask is None else attention_mask[:, :end]
        outputs = model(ids[:, start:end], attention_mask=mask, cache=cache, use_cache=True)
        cache, start = cache_of(outputs), end
        logits.append(outputs.logits)
    return torch.cat(logits, 1)


def greedy(model, ids, count=6, **kwargs):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **kwargs)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_cached_passes_equal_one_full_pass(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 11)
    full = model(ids).logits
    for sizes in ([1] * 11, [6, 1, 1, 1, 1, 1], [1, 2, 3, 5]):
        torch.testing.assert_close(in_chunks(model, ids, sizes), full, **EXACT)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_padding_anywhere_equals_the_row_without_it(case):
    model, ids = tiny_model(**CASES[case]), tokens(4, 9)
    mask = torch.ones(4, 9, dtype=torch.int64)
    mask[0, :4] = 0  # left
    mask[1, 6:] = 0  # right
    mask[2, :1] = 0
    if "layer_types" not in CASES[case]:  # attention would need positions that skip the holes
        mask[2, [3, 4, 7]] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    chunks = in_chunks(model, ids, [3, 1, 1, 4], mask) if "layer_types" not in CASES[case] else padded
    for row in range(4):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real]).logits[0]
        single = model(ids[row : row + 1], attention_mask=mask[row : row + 1], position_ids=positions[row : row + 1])
        torch.testing.assert_close(padded[row, real], alone, **EXACT)
        torch.testing.assert_close(single.logits[0, real], alone, **EXACT)
        torch.testing.assert_close(chunks[row, real], alone, **EXACT)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_generation_of_a_padded_batch_equals_each_prompt_alone(case):
    model, ids = tiny_model(**CASES[case]), tokens(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    together = greedy(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    for row in range(3):
        prompt = ids[row : row + 1, mask[row].bool()]
        assert together[row, 7:].tolist() == greedy(model, prompt)[0, prompt.shape[1] :].tolist()
        assert together[row, 7:].tolist() == greedy(model, prompt, use_cache=False)[0, prompt.shape[1] :].tolist()
        padded = greedy(model, ids[row : row + 1].masked_fill(mask[row] == 0, 0), attention_mask=mask[row : row + 1])
        assert together[row, 7:].tolist() == padded[0, 7:].tolist()


@pytest.mark.parametrize("case", MAIN_CASES)
@torch.no_grad()
def test_beams_and_samples_with_a_cache_equal_those_without(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    samples = {"do_sample": True, "num_return_sequences": 3, "top_k": 10}
    for options in (beams, samples):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            results.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **options))
        assert results[0].shape[0] == 2 * options["num_return_sequences"]
        assert results[0].tolist() == results[1].tolist()


@pytest.mark.parametrize("case", [*RULES, "3a-hybrid", "2-attention-first"])
@torch.no_grad()
def test_a_returned_cache_is_continued_with_new_ids_or_with_all_ids(case):
    model, ids = tiny_model(**CASES[case]), tokens(1, 6)
    first = greedy(model, ids, 4, return_dict_in_generate=True)
    cache = cache_of(first)
    assert cache.get_seq_length() == 9  # the last token is not read yet
    question = torch.cat([first.sequences, tokens(1, 3, seed=9)], 1)
    expected = greedy(model, question, 5, use_cache=False)
    everything = greedy(model, question, 5, **{CACHE_NAME: copy.deepcopy(cache)})
    assert everything.tolist() == expected.tolist()
    unread = question[:, 9:]
    mask = torch.ones(1, question.shape[1], dtype=torch.int64)
    only_new = greedy(model, unread, 5, attention_mask=mask, **{CACHE_NAME: copy.deepcopy(cache)})
    assert only_new[0, unread.shape[1] :].tolist() == expected[0, question.shape[1] :].tolist()


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3", "3a-hybrid"])
@torch.no_grad()
def test_a_padded_batch_is_continued(case):
    model, ids = tiny_model(**CASES[case]), tokens(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    first = greedy(model, ids, 4, attention_mask=mask, return_dict_in_generate=True)
    question = torch.cat([first.sequences, tokens(3, 2, seed=9)], 1)
    longer = torch.cat([mask, torch.ones(3, 6, dtype=torch.int64)], 1)
    expected = greedy(model, question, 5, attention_mask=longer, use_cache=False)[:, 13:].tolist()
    cache = cache_of(first)
    everything = greedy(model, question, 5, attention_mask=longer, **{CACHE_NAME: copy.deepcopy(cache)})
    assert everything[:, 13:].tolist() == expected
    only_new = greedy(model, question[:, 10:], 5, attention_mask=longer, **{CACHE_NAME: cache})
    assert only_new[:, 3:].tolist() == expected


@pytest.mark.parametrize("case", MAIN_CASES)
@torch.no_grad()
def test_generation_from_embeddings_and_in_prefill_chunks(case):
    model, ids = tiny_model(torch.float32, **CASES[case]), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = greedy(model, ids, attention_mask=mask, use_cache=False)
    embeddings = model.get_input_embeddings()(ids)
    from_embeddings = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert from_embeddings.tolist() == expected[:, 8:].tolist()
    for size in (1, 3, 5, 8, 100):
        assert greedy(model, ids, attention_mask=mask, prefill_chunk_size=size).tolist() == expected.tolist()


@pytest.mark.parametrize("case", MAIN_CASES)
@torch.no_grad()
def test_static_caches_give_the_same_text(case):
    model, ids = tiny_model(torch.float32, **CASES[case]), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for rows in (slice(0, 2), slice(0, 1)):
        plain = greedy(model, ids[rows], attention_mask=mask[rows], use_cache=False)
        for options in ({}, {"prefill_chunk_size": 3}):
            static = greedy(model, ids[rows], attention_mask=mask[rows], cache_implementation="static", **options)
            assert static.tolist() == plain.tolist()
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=20)
        model(ids[1:, :4], cache=cache)
        assert greedy(model, ids[1:], **{CACHE_NAME: cache}).tolist() == greedy(model, ids[1:]).tolist()


class Stream(nullcontext):
    def wait_stream(self, other):
        pass


def fake_two_devices(monkeypatch):
    """Lets offloading run without a GPU; attention layers refuse to be updated while they are offloaded."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    update = DynamicLayer.update

    def checked(layer, *args, **kwargs):
        assert not getattr(layer, "away", False)
        return update(layer, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", checked)
    monkeypatch.setattr(DynamicLayer, "offload", lambda layer: setattr(layer, "away", True))
    monkeypatch.setattr(DynamicLayer, "prefetch", lambda layer: setattr(layer, "away", False))


@pytest.mark.parametrize("layer_types", [None, HYBRID, [HYBRID[1], *HYBRID[:2]], [*HYBRID, *HYBRID[:2]]])
@torch.no_grad()
def test_offloaded_caches_give_the_same_text(layer_types, monkeypatch):
    depth = len(layer_types or HYBRID)
    model, ids = tiny_model(layer_types=layer_types, num_hidden_layers=depth), tokens(2, 7)
    plain = greedy(model, ids)
    fake_two_devices(monkeypatch)
    output = greedy(model, ids, cache_implementation="offloaded", return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    for layer, kind in zip(cache_of(output).layers, model.config.layer_types, strict=True):
        if kind == "full_attention":
            assert hasattr(layer, "away")


def test_what_cannot_work_says_so():
    model, ids = tiny_model(layer_types=HYBRID), tokens(2, 7)
    with pytest.raises(ValueError, match=r"cache_implementation is 'quantized', but .* it must be 'dynamic', 'sta"):
        greedy(model, ids, cache_implementation="quantized")
    continuous = "FalconFastWeightForCausalLM has memories of one size and no pages of keys and values, as continuous b"
    with pytest.raises(ValueError, match=continuous):
        model.generate_batch(ids.tolist())
    with pytest.raises(ValueError, match=continuous):
        greedy(model, ids, cache_implementation="paged")


@torch.no_grad()
def test_the_cache_answers_to_all_of_its_names():
    model, ids = tiny_model(), tokens(1, 6)
    full = model(ids).logits
    for name in ("cache", "past_key_values", "cache_params"):
        cache = cache_of(model(ids[:, :4], use_cache=True))
        rest = model(ids[:, 4:], **{name: cache})
        torch.testing.assert_close(rest.logits, full[:, 4:], **EXACT)
        assert cache_of(rest) is cache
        again = greedy(model, ids, 3, **{name: cache_of(model(ids[:, :4], use_cache=True))})
        assert again.tolist() == greedy(model, ids, 3).tolist()
        trunk_cache = falcon_cache(model.config)
        model.model(ids[:, :4], **{name: trunk_cache})
        hidden = model.model(ids[:, 4:], **{name: trunk_cache}).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), full[:, 4:], **EXACT)
    with pytest.raises(ValueError, match="cache and past_key_values are both given and differ"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="past_key_values and cache_params are both given and differ"):
        model(ids, cache_params=DynamicCache(), past_key_values=DynamicCache())


@pytest.mark.parametrize("layer_types", [None, HYBRID, ["full_attention", *HYBRID[1:]]])
@torch.no_grad()
def test_a_new_cache_of_transformers_is_taken_over(layer_types):
    model, ids = tiny_model(layer_types=layer_types), tokens(1, 6)
    full = model(ids).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(ids[:, :4], cache=cache)
        torch.testing.assert_close(model(ids[:, 4:], cache=cache).logits, full[:, 4:], **EXACT)
        assert cache.get_seq_length() == 6


def test_a_cache_in_use_by_another_model_is_refused():
    cache = DynamicCache()
    cache.layers.append(DynamicLayer())
    cache.layers[0].update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(ValueError, match="cache holds the state of a DynamicLayer at layer 0"):
        tiny_model()(tokens(1, 4), cache=cache)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_state_keeps_its_size_and_its_addresses(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 30)
    cache = cache_of(model(ids[:, :2], use_cache=True))
    falcon = [layer for layer in cache.layers if hasattr(layer, "state")]
    attention_bytes = 2 * (30 - 2) * 2 * model.config.num_key_value_heads * 8 * 8  # K and V, tokens, rows, heads
    before = cache_nbytes(cache)
    pointers = [tensor.data_ptr() for layer in falcon for tensor in layer.state if tensor is not None]
    model(ids[:, 2:-3], cache=cache)
    for t in range(27, 30):
        model(ids[:, t : t + 1], cache=cache)
    grown = (len(cache.layers) - len(falcon)) * attention_bytes
    assert cache_nbytes(cache) == before + grown
    assert pointers == [tensor.data_ptr() for layer in falcon for tensor in layer.state if tensor is not None]
    heads, width = 2, model.config.value_head_dim
    assert before > len(falcon) * 2 * heads * 8 * width * 8  # two rows of float64 memories at the very least


@pytest.mark.parametrize("case", ["falcon_3", "1a-normalized", "3-before", "3a-hybrid"])
@torch.no_grad()
def test_rows_of_a_cache_are_chosen_repeated_and_reset(case):
    model, ids, following = tiny_model(**CASES[case]), tokens(3, 6), tokens(3, 2, seed=5)
    filled = cache_of(model(ids, use_cache=True))

    def continued(rows, change):
        cache = copy.deepcopy(filled)
        change(cache)
        expected = model(torch.cat([ids[rows], following[: len(rows)]], 1)).logits[:, 6:]
        torch.testing.assert_close(model(following[: len(rows)], cache=cache).logits, expected, **EXACT)

    continued([2, 0, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    continued([2, 1], lambda cache: cache.batch_select_indices(torch.tensor([2, 1])))
    cache = cache_of(model(ids[:1], use_cache=True))
    cache.batch_repeat_interleave(2)
    expected = model(torch.cat([ids[[0, 0]], following[:2]], 1)).logits[:, 6:]
    torch.testing.assert_close(model(following[:2], cache=cache).logits, expected, **EXACT)
    for layer in (cache := copy.deepcopy(filled)).layers:
        layer.offload()
        layer.prefetch()
    torch.testing.assert_close(model(following, cache=cache).logits, model(following, cache=filled).logits, **EXACT)
    if "layer_types" not in CASES[case]:
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(following, cache=cache).logits, model(following).logits, **EXACT)


@pytest.mark.parametrize("case", ["falcon_2", "falcon_3", "falcon_3a"])
@torch.no_grad()
def test_bfloat16_decoding_stays_near_the_full_pass(case):
    model, ids = tiny_model(torch.bfloat16, **CASES[case]), tokens(1, 24)
    exact = tiny_model(torch.float64, **CASES[case])
    exact.load_state_dict(model.state_dict())
    truth = exact(ids).logits
    full_error = (model(ids).logits - truth).square().mean().sqrt()
    step_error = (in_chunks(model, ids, [1] * 24) - truth).square().mean().sqrt()
    assert step_error < 1.5 * full_error  # both read the same memory in fp32
    assert full_error < 0.05 * truth.square().mean().sqrt()


def test_a_mask_that_does_not_fit_is_refused():
    model, ids = tiny_model(), tokens(2, 5)
    for mask in (torch.ones(2, 4), torch.ones(2, 1, 5, 5)):
        with pytest.raises(ValueError, match=r"attention_mask has shape \[2, .*it must be \[B, T\]"):
            model(ids, attention_mask=mask)


def check_compiled_steps(cache_class, backend, **options):
    torch._dynamo.reset()
    model, ids = tiny_model(torch.float32, **options), tokens(2, 9)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    full = model(ids, attention_mask=mask[:, :9]).logits
    step = torch.compile(model, fullgraph=True, backend=backend)
    cache = StaticCache(config=model.config, max_cache_len=12) if cache_class is StaticCache else DynamicCache()
    model(ids[:, :5], attention_mask=mask[:, :5], cache=cache)
    for t in range(5, 9):
        logits = step(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache).logits
        torch.testing.assert_close(logits[:, 0], full[:, t], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_a_decode_step_compiles_into_one_graph(rule):
    check_compiled_steps(DynamicCache, "eager", rule=rule, num_hidden_layers=1)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_hybrid_decode_step_compiles_into_one_graph(cache_class):
    check_compiled_steps(cache_class, "eager", layer_types=HYBRID[:2], num_hidden_layers=2)


@pytest.mark.long
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("case", MAIN_CASES)
@torch.no_grad()
def test_a_decode_step_runs_compiled(case, cache_class):
    check_compiled_steps(cache_class, "inductor", **CASES[case])


@pytest.mark.parametrize("rule", ["falcon_1", "falcon_3a"])
def test_text_streams_and_stops(rule, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = tiny_model(torch.float32, rule=rule, vocab_size=len(tokenizer))
    ids = tokenizer("A pointer is", return_tensors="pt").input_ids
    plain = greedy(model, ids, 20)
    new = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    thread = Thread(target=greedy, args=(model, ids, 20), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer) == new
    thread.join()

    class Enough(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= ids.shape[1] + 7)

    assert greedy(model, ids, 20, stopping_criteria=StoppingCriteriaList([Enough()])).shape[1] == ids.shape[1] + 7
    pieces = [tokenizer.decode(token) for token in plain[0, ids.shape[1] :]]
    place = next(place for place, piece in enumerate(pieces) if piece.isascii())
    word = pieces[place]
    stopped = greedy(model, ids, 20, stop_strings=[word], tokenizer=tokenizer)
    assert (
        stopped.tolist() == greedy(model, ids, 20, stop_strings=[word], tokenizer=tokenizer, use_cache=False).tolist()
    )
    assert stopped.shape[1] == ids.shape[1] + place + 1
    end = plain[0, ids.shape[1] + 3].item()
    rows = torch.cat([ids, ids.roll(1, 1)])
    ended = greedy(model, rows, 20, eos_token_id=end, pad_token_id=1)
    assert ended.tolist() == greedy(model, rows, 20, eos_token_id=end, pad_token_id=1, use_cache=False).tolist()


def test_processors_see_every_token():
    model, ids, seen = tiny_model(), tokens(2, 4), []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            return scores

    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "logits_processor": [Watch()]}
    text = greedy(model, ids, **options)
    assert seen == [4, 5, 6, 7, 8, 9]
    assert text.tolist() == greedy(model, ids, use_cache=False, **options).tolist()


def test_the_pipeline_writes_text_batches_and_answers(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template, tokenizer.pad_token, tokenizer.padding_side = CHAT_TEMPLATE, tokenizer.eos_token, "left"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, do_sample=False, max_new_tokens=8)
    prompts = ["A pointer is", "An address", "A"]

    def written(ids):
        text = greedy(model, ids, 8, pad_token_id=tokenizer.pad_token_id)
        return tokenizer.decode(text[0], skip_special_tokens=True)

    alone = [written(tokenizer(prompt, return_tensors="pt").input_ids) for prompt in prompts]
    assert [write(prompt)[0]["generated_text"] for prompt in prompts] == alone
    assert [output[0]["generated_text"] for output in write(prompts, batch_size=3)] == alone
    messages = [{"role": "user", "content": "What is a pointer?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "user: What is a pointer?\nA:"
    answer = write(messages)[0]["generated_text"]
    assert answer[:-1] == messages
    assert answer[-1]["role"] == "assistant"
    assert tokenizer.decode(ids[0]) + answer[-1]["content"] == written(ids)


def test_a_chat_goes_on_from_its_cache(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    cache, ids = falcon_cache(model.config), torch.zeros(1, 0, dtype=torch.int64)
    for question in ("What is a pointer?", "What is an address?", "Why?"):
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        ids = torch.cat([ids, turn["input_ids"]], 1)
        plain = greedy(model, ids, 8, use_cache=False)
        ids = greedy(model, ids, 8, **{CACHE_NAME: cache})
        assert ids.tolist() == plain.tolist()
        assert cache.get_seq_length() == ids.shape[1] - 1
