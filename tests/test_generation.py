"""A cached model is the full model: token by token, in chunks, padded, in beams, and continued."""

import copy

import pytest
import torch
from tiny_models import CASES, HYBRID, RULES, cache_of, tiny_model, tokens
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from falcon_hf import cache_nbytes
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

EXACT = {"atol": 1e-11, "rtol": 0}  # float64 logits of order 1 to 10; errors of 1e-13 were measured


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


@pytest.mark.parametrize("case", [*RULES, "3a-hybrid", "3a-normalized"])
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


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3", "falcon_3a", "3a-hybrid"])
@torch.no_grad()
def test_generation_from_embeddings_and_in_prefill_chunks(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = greedy(model, ids, attention_mask=mask)
    embeddings = model.get_input_embeddings()(ids)
    from_embeddings = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert from_embeddings.tolist() == expected[:, 8:].tolist()
    assert greedy(model, ids, attention_mask=mask, prefill_chunk_size=3).tolist() == expected.tolist()


@pytest.mark.parametrize("case", ["falcon_3", "3a-hybrid", "2-attention-first"])
@torch.no_grad()
def test_static_caches_give_the_same_text_and_quantized_ones_are_refused(case):
    model, ids = tiny_model(**CASES[case]), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    static = greedy(model, ids, attention_mask=mask, cache_implementation="static")
    assert static.tolist() == greedy(model, ids, attention_mask=mask).tolist()
    with pytest.raises(ValueError, match="linear_attention"):
        greedy(model, ids, cache_implementation="quantized")
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        greedy(model, ids[:1], prompt_lookup_num_tokens=2)


@torch.no_grad()
def test_the_cache_answers_to_both_of_its_names():
    model, ids = tiny_model(), tokens(1, 6)
    full = model(ids).logits
    for name in ("cache", "past_key_values"):
        cache = cache_of(model(ids[:, :4], use_cache=True))
        rest = model(ids[:, 4:], **{name: cache})
        torch.testing.assert_close(rest.logits, full[:, 4:], **EXACT)
        assert cache_of(rest) is cache
        again = greedy(model, ids, 3, **{name: cache_of(model(ids[:, :4], use_cache=True))})
        assert again.tolist() == greedy(model, ids, 3).tolist()
    with pytest.raises(ValueError, match="cache and past_key_values are both given and differ"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache())


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
