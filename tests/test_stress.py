"""Long streams stay finite and repeat exactly from a snapshot; threads that share a model do not disturb each other."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from tiny_models import CASES, RULES, cache_of, tiny_model, tokens

from falcon_hf import cache_nbytes, falcon_cache


def state(cache):
    return [tensor for layer in cache.layers for tensor in (*layer.state, layer.conv_window) if tensor is not None]


def largest_gains(model):
    """Sets every gain to 2, the largest step there is."""
    for layer in model.model.layers:
        layer.linear_attn.gain_bias.data.fill_(50)


@torch.no_grad()
def stream(model, ids, bounds, cache):
    """Reads ids from bound to bound; returns the last logits."""
    for start, end in pairwise(bounds):
        logits = model(ids[:, start:end], cache=cache, logits_to_keep=1).logits
        assert logits.isfinite().all()
    return logits


def check_stream(rule, length, size, hard=False):
    """Reads a stream in passes of `size` tokens, then its second half again from a snapshot."""
    model = tiny_model(torch.bfloat16, rule=rule, num_hidden_layers=1)
    ids = tokens(2, length)
    ids[0, length // 4 : length // 2] = 7  # one key over and over
    if hard:
        largest_gains(model)
    bounds, half = [*range(0, length, size), length], length // size // 2 + 1
    cache = falcon_cache(model.config)
    stream(model, ids, bounds[:half], cache)
    snapshot, nbytes = copy.deepcopy(cache), cache_nbytes(cache)
    end = stream(model, ids, bounds[half - 1 :], cache)
    assert all(tensor.isfinite().all() for tensor in state(cache))
    assert cache_nbytes(cache) == nbytes
    assert cache.get_seq_length() == length
    assert torch.equal(stream(model, ids, bounds[half - 1 :], snapshot), end)
    assert all(torch.equal(x, y) for x, y in zip(state(cache), state(snapshot), strict=True))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("rule", RULES)
def test_a_stream_stays_finite_and_repeats_from_a_snapshot(rule, size, hard):
    check_stream(rule, 200 if size == 1 else 2000, size, hard)


@pytest.mark.long
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("size", [1, 64, 1024])
@pytest.mark.parametrize("rule", RULES)
def test_a_very_long_stream_stays_finite_and_repeats_from_a_snapshot(rule, size, hard):
    check_stream(rule, {1: 10_000, 64: 100_000, 1024: 200_000}[size], size, hard)


def check_threads(case, threads, turns):
    model = tiny_model(torch.float32, **CASES[case])
    helper = tiny_model(torch.float32, seed=2, **CASES[case])
    kinds = [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": helper},
        {"prefill_chunk_size": 4},
    ]

    def write(turn):
        ids = tokens(1, 6 + turn % 5, seed=turn)
        options = kinds[turn % len(kinds)]
        output = model.generate(
            ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, pad_token_id=0, **options
        )
        return output.sequences.tolist(), cache_of(output).get_seq_length()

    expected = [write(turn) for turn in range(turns)]
    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(write, range(turns))) == expected


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3a", "3a-hybrid"])
def test_threads_share_a_model(case):
    check_threads(case, 4, 12)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_many_threads_share_a_model(case):
    check_threads(case, 16, 120)
