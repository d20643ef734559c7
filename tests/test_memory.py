"""A memory goes on exactly as the cache it was made from, for its own model only; a store finds it by its tokens."""

import copy
import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CASES, HYBRID, RULES, cache_of, tiny_model, tokens
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor, StaticCache

from falcon_hf import MemoryStore, cache_nbytes, falcon_cache, load_memory, memory_falcon_fast_weight, save_memory
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME
from falcon_hf.cli import bundled
from falcon_hf.memory_falcon_fast_weight import model_hash, pack, weights_hash

PLENTY = 10**9


def small(**options):
    return tiny_model(torch.float32, **options)


def read(model, ids):
    with torch.no_grad():
        return cache_of(model(ids, use_cache=True))


def greedy(model, ids, count=5, **kwargs):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **kwargs)


def state(cache):
    """All tensors of a cache, in order."""
    tensors = []
    for layer in cache.layers:
        own = (*layer.state, layer.conv_window) if hasattr(layer, "state") else (layer.keys, layer.values)
        tensors += [tensor for tensor in own if tensor is not None]
    return tensors


def assert_same_state(cache, other):
    assert cache.get_seq_length() == other.get_seq_length()
    pairs = list(zip(state(cache), state(other), strict=True))
    assert pairs
    for left, right in pairs:
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


class Counter:
    """Counts the tokens that a model reads."""

    def __init__(self, model):
        self.tokens = []
        model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.tokens.append(kwargs["input_ids"].shape[1])

    def prompt(self):
        """Tokens of the passes since the last call, without the single ones of generation after them."""
        first, self.tokens = self.tokens[0] if self.tokens else 0, []
        return first


# One memory in a file


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_loaded_memory_goes_on_exactly(case, rows, tmp_path):
    model, ids, following = small(**CASES[case]), tokens(rows, 9), tokens(rows, 4, seed=5)
    cache = read(model, ids)
    save_memory(cache, tmp_path / "m.safetensors", model, ids)
    loaded = load_memory(tmp_path / "m.safetensors", model)
    assert_same_state(loaded, cache)
    assert cache_nbytes(loaded) == cache_nbytes(cache)
    for part in (following[:, :3], following[:, 3:]):  # by whole sequences and by the step
        expected = model(part, cache=cache).logits
        assert torch.equal(model(part, cache=loaded).logits, expected)
    assert_same_state(loaded, cache)


@pytest.mark.parametrize("case", [*RULES, "3-before", "3a-hybrid", "2-attention-first"])
def test_generation_from_a_loaded_memory(case, tmp_path):
    model, ids = small(**CASES[case]), tokens(2, 8)
    question = torch.cat([ids, tokens(2, 3, seed=5)], 1)
    cache = read(model, ids)
    save_memory(cache, tmp_path / "m", model)
    expected = greedy(model, question, **{CACHE_NAME: cache})
    assert expected.tolist() == greedy(model, question).tolist()
    everything = greedy(model, question, **{CACHE_NAME: load_memory(tmp_path / "m", model)})
    assert everything.tolist() == expected.tolist()
    only_new = greedy(
        model,
        question[:, 8:],
        attention_mask=torch.ones_like(question),
        **{CACHE_NAME: load_memory(tmp_path / "m", model)},
    )
    assert only_new[:, 3:].tolist() == expected[:, 11:].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memories_of_other_dtypes_return_exactly(dtype, tmp_path):
    model = tiny_model(dtype, rule="falcon_3")
    cache = read(model, tokens(1, 7))
    save_memory(cache, tmp_path / "m", model)
    assert_same_state(load_memory(tmp_path / "m", model), cache)


def test_the_same_checkpoint_loaded_again_takes_the_memory(tmp_path):
    model, ids = small(rule="falcon_2"), tokens(1, 6)
    cache = read(model, ids)
    save_memory(cache, tmp_path / "m", model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_same_state(load_memory(tmp_path / "m", again), cache)
    assert_same_state(load_memory(tmp_path / "m", copy.deepcopy(model)), cache)


@pytest.mark.parametrize("case", [*RULES, "3a-hybrid"])
def test_one_memory_serves_rows_and_beams(case, tmp_path):
    model, ids = small(**CASES[case]), tokens(1, 8)
    save_memory(read(model, ids), tmp_path / "m", model)
    questions = torch.cat([ids.repeat(3, 1), tokens(3, 2, seed=5)], 1)
    cache = load_memory(tmp_path / "m", model)
    cache.batch_repeat_interleave(3)
    assert greedy(model, questions, **{CACHE_NAME: copy.deepcopy(cache)}).tolist() == greedy(model, questions).tolist()
    beams = greedy(model, questions[:1], num_beams=3, **{CACHE_NAME: cache})
    assert beams.tolist() == greedy(model, questions[:1], num_beams=3).tolist()


def test_a_copy_is_not_written_on():
    model, ids = small(), tokens(1, 6)
    cache = read(model, ids)
    kept = copy.deepcopy(cache)
    before = [tensor.clone() for tensor in state(kept)]
    model(tokens(1, 3, seed=5), cache=cache)
    assert kept.get_seq_length() == 6
    assert all(torch.equal(left, right) for left, right in zip(state(kept), before, strict=True))
    assert not torch.equal(state(cache)[0], before[0])


def test_the_bundled_memory_has_one_size(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(bundled()["falcon-3a.3-tiny"], dtype=torch.float32)
    sizes = []
    for length in (16, 1024):
        cache = read(model, torch.randint(4096, (1, length), generator=torch.Generator().manual_seed(0)))
        save_memory(cache, tmp_path / "m", model)
        sizes.append((cache_nbytes(cache), os.path.getsize(tmp_path / "m")))
        assert 0 < sizes[-1][1] - sizes[-1][0] < 8192  # the header
    assert sizes[0][0] == sizes[1][0]
    assert abs(sizes[0][1] - sizes[1][1]) <= 8  # digits of the number of tokens, in a header of whole eight bytes


# Whose memory it is


def change_in_place(weight):
    with torch.no_grad():
        weight.view(-1)[-1] += 1e-3


def change_behind_autograd(weight):
    weight.data += 1e-3  # as PEFT merges adapters; no version counter moves


def change_storage(weight):
    weight.data = weight.data.clone()
    weight.data.view(-1)[-1] += 1e-3


@pytest.mark.parametrize("change", [change_in_place, change_behind_autograd, change_storage])
def test_a_changed_weight_changes_the_hash(change):
    model = small()
    before = weights_hash(model)
    changed = set()
    for weight in model.parameters():
        change(weight)
        changed.add(weights_hash(model))
    assert before not in changed
    assert len(changed) == len(list(model.parameters()))
    assert weights_hash(model) == weights_hash(copy.deepcopy(model))


def test_weights_are_hashed_once(monkeypatch):
    model, whole = small(), []
    original = memory_falcon_fast_weight._hash
    size = sum(weight.numel() for weight in model.parameters())

    def counted(tensors):
        tensors = list(tensors)
        whole.append(sum(tensor.numel() for _, tensor in tensors) == size)
        return original(tensors)

    monkeypatch.setattr(memory_falcon_fast_weight, "_hash", counted)
    first = weights_hash(model)
    assert [weights_hash(model) for _ in range(3)] == [first] * 3
    assert sum(whole) == 1
    change_in_place(model.lm_head.weight)
    weights_hash(model)
    assert sum(whole) == 2


def test_weights_made_in_inference_mode_are_hashed_anew():
    with torch.inference_mode():
        model = small()
        before = weights_hash(model)
        model.model.norm.weight[0] += 1
        assert weights_hash(model) != before


def test_a_memory_of_another_model_is_refused(tmp_path):
    model, path = small(rule="falcon_1", eos_token_id=3), tmp_path / "m"
    save_memory(read(model, tokens(1, 5)), path, model)
    load_memory(path, small(rule="falcon_1"))  # where generation ends is not part of a state
    with pytest.raises(ValueError, match=r"m' is the memory of a model with rule 'falcon_1'; this one has 'falcon_1a'"):
        load_memory(path, small(rule="falcon_1a"))
    with pytest.raises(ValueError, match=r"of a model with epsilon 1e-06; this one has 1e-05\.$"):
        load_memory(path, small(rule="falcon_1", epsilon=1e-5))
    with pytest.raises(ValueError, match=r"m' is the memory of a model in float32; this one is in bfloat16\.$"):
        load_memory(path, small(rule="falcon_1").to(torch.bfloat16))
    other = r"m' is the memory of a model with other weights; it must be loaded into its own\.$"
    with pytest.raises(ValueError, match=other):
        load_memory(path, tiny_model(torch.float32, seed=7, rule="falcon_1"))
    for name, _ in model.named_parameters():
        sibling = copy.deepcopy(model)
        change_in_place(sibling.get_parameter(name))
        with pytest.raises(ValueError, match=other):
            load_memory(path, sibling)
    change_in_place(model.model.norm.weight)  # the very object that wrote it
    with pytest.raises(ValueError, match=other):
        load_memory(path, model)


def test_tokens_are_checked_where_they_are_known(tmp_path):
    model, ids = small(), tokens(2, 5)
    cache = read(model, ids)
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 4\]; it must be \[2, 5\], the rows and tokens"):
        save_memory(cache, tmp_path / "m", model, ids[:, :4])
    with pytest.raises(ValueError, match=r"input_ids has shape \[1, 5\]; it must be \[2, 5\]"):
        save_memory(cache, tmp_path / "m", model, ids[:1])
    save_memory(cache, tmp_path / "m", model, ids.int())
    load_memory(tmp_path / "m", model, torch.cat([ids, ids], 1))
    other = ids.clone()
    other[1, 2] += 1
    for wrong in (other, ids[:, :4], ids[:1]):
        with pytest.raises(ValueError, match=r"input_ids must begin with the 5 tokens that '.*m' has read, but"):
            load_memory(tmp_path / "m", model, wrong)
    save_memory(cache, tmp_path / "m", model)
    with pytest.raises(ValueError, match=r"input_ids is given, but '.*m' was saved without its tokens; load it"):
        load_memory(tmp_path / "m", model, ids)


def test_a_cache_that_is_no_memory_of_the_model_is_refused(tmp_path):
    model, path = small(rule="falcon_3"), tmp_path / "m"
    wrong = [
        (DynamicCache(), r"cache has 0 layers; a memory of this model has 3\."),
        (falcon_cache(model.config), r"cache has read no tokens at layer 0; a memory needs at least one\."),
        (DynamicCache(config=small(layer_types=["full_attention"] * 3).config), "has a DynamicLayer at layer 0; a mem"),
        (
            read(small(rule="falcon_3", window_size=2), tokens(1, 5)),
            r"'tail_x': \(1, 1, 2, 8\).* at layer 0; a memory",
        ),
        (read(small(rule="falcon_3", conv_size=0), tokens(1, 5)), r"; a memory .*'conv_window': \(1, 3, 48\)\}\."),
    ]
    for cache, message in wrong:
        with pytest.raises(ValueError, match=message):
            save_memory(cache, path, model)
    hybrid = small(layer_types=HYBRID)
    static = StaticCache(config=hybrid.config, max_cache_len=8)
    with torch.no_grad():
        hybrid(tokens(1, 5), cache=static)
    with pytest.raises(ValueError, match="cache has a StaticLayer at layer 1; a memory needs a DynamicLayer there"):
        save_memory(static, path, hybrid)
    assert not list(tmp_path.iterdir())


# Files that are damaged, foreign or half-written


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    model, path = small(), tmp_path / "m"
    save_memory(read(model, tokens(1, 5)), path, model)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"m' is truncated or no safetensors file \(.*\); it must be a memory\.$"):
        load_memory(path, model)


def test_every_flipped_bit_is_noticed(tmp_path):
    model, ids, path = small(), tokens(1, 5), tmp_path / "m"
    data = pack(read(model, ids), model, ids)
    header = 8 + int.from_bytes(data[:8], "little")
    for place in [*range(0, header, 7), *range(header, len(data), 501), len(data) - 1]:
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="m' is "):
            load_memory(path, model)
    path.write_bytes(data[:header] + bytes(len(data) - header))  # the length is there, the content never arrived
    with pytest.raises(ValueError, match=r"m' is damaged: its content is not what was saved\.$"):
        load_memory(path, model)


def test_foreign_files_are_refused(tmp_path, monkeypatch):
    model, path = small(), tmp_path / "m"
    with pytest.raises(FileNotFoundError):
        load_memory(path, model)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(3)}, path, metadata)
        with pytest.raises(ValueError, match=r"m' is a safetensors file, but not one that save_memory wrote\.$"):
            load_memory(path, model)
    path.write_text("Dear diary, " * 50)
    with pytest.raises(ValueError, match="is truncated or no safetensors file"):
        load_memory(path, model)
    monkeypatch.setattr(memory_falcon_fast_weight, "VERSION", "2")
    save_memory(read(model, tokens(1, 5)), path, model)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"m' is a memory of format 2; this release reads 1\.$"):
        load_memory(path, model)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("older", [True, False])
def test_an_interrupted_save_leaves_the_old_file(step, older, tmp_path, monkeypatch):
    model, path = small(), tmp_path / "m"
    cache = read(model, tokens(1, 5))
    if older:
        save_memory(cache, path, model)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        save_memory(read(model, tokens(1, 6)), path, model)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["m"] * older
    if older:
        assert_same_state(load_memory(path, model), cache)


# What generate makes of a cache that does not fit its prompt


def test_a_prompt_with_nothing_to_read_is_refused():
    model, ids = small(), tokens(1, 6)
    for prompt in (ids, ids[:, :2]):
        message = rf"is for {prompt.shape[1]} tokens, but cache has read 6; it must be for those and at least one more"
        with pytest.raises(ValueError, match=message):
            greedy(model, prompt, **{CACHE_NAME: read(model, ids)})


@pytest.mark.parametrize("conv_size", [0, 4])
def test_a_cache_of_other_rows_is_refused(conv_size):
    model, ids = small(conv_size=conv_size), tokens(1, 6)
    with pytest.raises(ValueError, match="cache has 1 rows, but the input has 3; they must be as many, which cache"):
        model(tokens(3, 2), cache=read(model, ids))


# Many memories


@pytest.fixture(params=["ram", "folder"])
def folder(request, tmp_path):
    return None if request.param == "ram" else tmp_path / "store"


def test_the_longest_stored_prefix_is_found(folder):
    model, ids = small(), tokens(1, 12)
    store = MemoryStore(model, PLENTY, folder)
    other = ids.clone()
    other[0, 4] += 1
    assert store.longest_prefix(ids) == (None, 0)
    for prompt in (ids[:, :3], ids[:, :8], ids[:, :5], other[:, :7], other[:, :10], tokens(1, 4, seed=9)):
        assert store.put(prompt, read(model, prompt))
    expected = {2: 0, 3: 3, 4: 3, 5: 5, 6: 5, 7: 5, 8: 8, 9: 8, 12: 8}
    for length, found in expected.items():
        cache, count = store.longest_prefix(ids[:, :length])
        assert count == found
        assert (cache is None) == (found == 0)
        if cache is not None:
            assert_same_state(cache, read(model, ids[:, :found]))
    assert store.longest_prefix(other)[1] == 10
    assert store.longest_prefix(other[:, :9])[1] == 7
    assert store.longest_prefix(other[:, :6].int())[1] == 3
    assert len(store) == 6


def test_entries_are_isolated(folder):
    model, ids = small(layer_types=HYBRID), tokens(1, 6)
    store, cache = MemoryStore(model, PLENTY, folder), read(model, ids)
    expected = copy.deepcopy(cache)
    store.put(ids, cache)
    for _ in range(2):
        for tensor in state(cache):
            tensor.zero_()
        cache, count = store.longest_prefix(ids)
        assert count == 6
        assert_same_state(cache, expected)
        model(tokens(1, 2), cache=cache)


def test_the_least_recently_used_make_room(folder):
    model = small()
    prompts = [tokens(1, 6, seed=seed) for seed in range(5)]
    size = len(pack(read(model, prompts[0]), model, prompts[0]))
    store = MemoryStore(model, 3 * size, folder)

    def kept():
        """Indices of what is in the store; put back in the order that they had."""
        return [i for i, prompt in enumerate(prompts) if store.longest_prefix(prompt)[1]]

    for prompt in prompts[:3]:
        assert store.put(prompt, read(model, prompt))
    assert store.nbytes == 3 * size
    assert store.longest_prefix(prompts[0])[1] == 6  # now the newest
    assert store.put(prompts[3], read(model, prompts[3]))
    assert kept() == [0, 2, 3]
    for i in (3, 0):  # they replace themselves and nothing else, and are the newest again
        assert store.put(prompts[i], read(model, prompts[i]))
        assert len(store) == 3
    assert store.put(prompts[4], read(model, prompts[4]))
    assert kept() == [0, 3, 4]
    assert store.nbytes == 3 * size


def test_bytes_are_counted_exactly(folder):
    model = small()
    prompts = [tokens(1, 6, seed=seed) for seed in range(3)]
    size = len(pack(read(model, prompts[0]), model, prompts[0]))
    store = MemoryStore(model, 3 * size - 1, folder)
    for prompt, expected in zip(prompts, (1, 2, 2), strict=True):
        assert store.put(prompt, read(model, prompt))
        assert len(store) == expected
    store.max_bytes = size - 1
    assert not store.put(prompts[0], read(model, prompts[0]))
    assert len(store) == 2


def test_a_store_keeps_to_its_bytes_when_sizes_differ(folder):
    model = small(layer_types=HYBRID)  # keys and values grow with the tokens
    prompts = [tokens(1, length, seed=length) for length in (4, 6, 300, 5)]
    sizes = [len(pack(read(model, prompt), model, prompt)) for prompt in prompts]
    store = MemoryStore(model, sizes[2] + sizes[1], folder)
    for prompt, expected in zip(prompts, (1, 2, 2, 2), strict=True):
        assert store.put(prompt, read(model, prompt))
        assert len(store) == expected
        assert store.nbytes <= store.max_bytes


def test_what_changed_weights_stored_is_not_found(folder):
    model, ids = small(), tokens(1, 6)
    store = MemoryStore(model, PLENTY, folder)
    store.put(ids, read(model, ids))
    change_in_place(model.model.layers[1].mlp.up_proj.weight)
    assert store.longest_prefix(ids) == (None, 0)
    store.put(ids, read(model, ids))
    assert_same_state(store.longest_prefix(ids)[0], read(model, ids))


def test_a_folder_survives_its_store(tmp_path):
    model, ids = small(rule="falcon_3"), tokens(1, 9)
    MemoryStore(model, PLENTY, tmp_path).put(ids[:, :6], read(model, ids[:, :6]))
    other = tiny_model(torch.float32, seed=5, rule="falcon_3")
    assert MemoryStore(other, PLENTY, tmp_path).longest_prefix(ids) == (None, 0)
    cache, count = MemoryStore(copy.deepcopy(model), PLENTY, tmp_path).longest_prefix(ids)
    assert count == 6
    assert_same_state(cache, read(model, ids[:, :6]))
    [file] = tmp_path.iterdir()
    assert file.name.startswith(model_hash(model)[:16])
    assert_same_state(load_memory(file, model, ids), cache)


def test_damaged_files_are_dropped_with_a_warning(tmp_path):
    model, ids = small(), tokens(1, 9)
    store = MemoryStore(model, PLENTY, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for length in (3, 5, 7):
        store.put(ids[:, :length], read(model, ids[:, :length]))
    by_length = {int(path.name.split("-")[1]): path for path in tmp_path.glob("*.safetensors")}
    by_length[7].write_bytes(by_length[7].read_bytes()[:-1])
    by_length[5].write_bytes(by_length[3].read_bytes())
    with pytest.warns(UserWarning, match="A memory is dropped from the store: ") as caught:
        cache, count = store.longest_prefix(ids)
    assert count == 3
    assert len(caught) == 2
    assert_same_state(cache, read(model, ids[:, :3]))
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "notes.txt", by_length[3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.longest_prefix(ids)[1] == 3
    by_length[3].unlink()
    assert store.longest_prefix(ids) == (None, 0)


def test_threads_share_a_store(folder):
    model = small()
    prompts = [tokens(1, 6, seed=seed) for seed in range(6)]
    caches = [read(model, prompt) for prompt in prompts]
    size = len(pack(caches[0], model, prompts[0]))
    store = MemoryStore(model, 3 * size, folder)
    together = threading.Barrier(4)

    def work(thread):
        together.wait()
        found = 0
        for turn in range(25):
            i = (thread + turn) % len(prompts)
            store.put(prompts[i], caches[i])
            assert store.nbytes <= store.max_bytes
            cache, count = store.longest_prefix(prompts[(i + turn) % len(prompts)])
            if count:
                assert_same_state(cache, caches[(i + turn) % len(prompts)])
                found += 1
        return found

    with ThreadPoolExecutor(4) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min(pool.map(work, range(4))) > 0
    assert len(store) == 3


# Generation


@pytest.mark.parametrize("case", [*RULES, "3-before", "3a-hybrid", "2-attention-first"])
def test_a_second_question_reads_its_own_tokens_only(case, folder):
    model, document = small(**CASES[case]), tokens(1, 10)
    first, second = (torch.cat([document, tokens(1, length, seed=length)], 1) for length in (4, 3))
    expected = [greedy(model, ids).tolist() for ids in (document, first, second)]
    store, counter = MemoryStore(model, PLENTY, folder), Counter(model)
    assert greedy(store, document).tolist() == expected[0]
    assert counter.prompt() == 10
    assert greedy(store, first).tolist() == expected[1]
    assert counter.prompt() == 4
    assert greedy(store, second, attention_mask=torch.ones_like(second)).tolist() == expected[2]
    assert counter.prompt() == 3
    assert sum(counter.tokens) == 0
    longer = torch.cat([first, tokens(1, 2, seed=8)], 1)
    assert greedy(store, longer).tolist() == greedy(model, longer, use_cache=False).tolist()
    counter.tokens.clear()
    assert greedy(store, longer).tolist() == greedy(model, longer, use_cache=False).tolist()
    assert counter.prompt() == 2  # the whole prompt is stored, and the longest shorter one is gone on from
    assert_close_to_reading(store, model, longer)


def assert_close_to_reading(store, model, ids):
    """The stored state is that after the prompt, up to the rounding of reading it in parts."""
    cache, count = store.longest_prefix(ids)
    assert count == ids.shape[1]
    for left, right in zip(state(cache), state(read(model, ids)), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_reading_ahead(folder):
    model, ids = small(), tokens(1, 9)
    store, counter = MemoryStore(model, PLENTY, folder), Counter(model)
    assert store.read(ids[:, :6]).get_seq_length() == 6
    cache = store.read(ids)
    assert counter.tokens == [6, 3]
    assert cache.get_seq_length() == 9
    assert_same_state(store.read(ids), cache)
    assert counter.tokens == [6, 3]
    assert len(store) == 2
    assert_close_to_reading(store, model, ids)


@pytest.mark.parametrize("case", ["falcon_1", "falcon_3a", "3a-hybrid"])
def test_samples_and_beams_start_from_one_memory(case):
    model, document = small(**CASES[case]), tokens(1, 8)
    ids = torch.cat([document, tokens(1, 3, seed=5)], 1)
    store = MemoryStore(model, PLENTY)
    store.read(document)
    counter = Counter(model)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 10},
        {"generation_config": GenerationConfig(num_beams=2, do_sample=False, pad_token_id=0)},
    ):
        torch.manual_seed(3)
        expected = model.generate(ids, max_new_tokens=5, **options)
        counter.tokens.clear()
        torch.manual_seed(3)
        assert store.generate(ids, max_new_tokens=5, **options).tolist() == expected.tolist()
        assert counter.prompt() == 3
        assert store.longest_prefix(ids)[0].get_seq_length() == 11
        assert_close_to_reading(store, model, ids)


def test_threads_generate_from_one_document(folder):
    model, document = small(), tokens(1, 8)
    prompts = [torch.cat([document, tokens(1, 3, seed=seed)], 1) for seed in range(8)]
    expected = [greedy(model, prompt).tolist() for prompt in prompts]
    store = MemoryStore(model, PLENTY, folder)
    store.read(document)
    with ThreadPoolExecutor(4) as pool:
        assert [text.tolist() for text in pool.map(lambda prompt: greedy(store, prompt), prompts)] == expected
    assert len(store) == 9


def test_generate_hands_its_options_on():
    model, ids = small(), tokens(1, 6)
    store, seen = MemoryStore(model, PLENTY), []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            return scores

    output = greedy(store, ids, 4, return_dict_in_generate=True, logits_processor=[Watch()])
    assert seen == [6, 7, 8, 9]
    assert output.sequences.tolist() == greedy(model, ids, 4).tolist()
    answered = output.sequences[:, :-1]  # all but the last token are read
    assert store.put(answered, cache_of(output))
    assert store.longest_prefix(output.sequences)[1] == 9


def test_what_a_store_cannot_take_is_refused():
    model, ids = small(), tokens(2, 6)
    with pytest.raises(ValueError, match=r"max_bytes is 0; it must be at least 1\."):
        MemoryStore(model, 0)
    store = MemoryStore(model, PLENTY)
    for call in (store.read, store.generate, store.longest_prefix, lambda ids: store.put(ids, read(model, ids))):
        with pytest.raises(ValueError, match=r"input_ids has shape \[2, 6\]; a MemoryStore takes one prompt, \[1, T"):
            call(ids)
    with pytest.raises(ValueError, match=r"input_ids has shape \[1, 5\]; it must be \[1, 6\]"):
        store.put(ids[:1, :5], read(model, ids[:1]))
    for name, value in (("past_key_values", falcon_cache(model.config)), ("use_cache", False)):
        with pytest.raises(ValueError, match=f"{name} is given, but a MemoryStore generates from input_ids and"):
            store.generate(ids[:1], **{name: value})
    with pytest.raises(ValueError, match="attention_mask has zeros; a MemoryStore takes prompts without padding"):
        store.generate(ids[:1], attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    assert len(store) == 0


def test_text_is_not_lost_where_its_memory_cannot_be_stored(tmp_path, monkeypatch):
    model, ids = small(), tokens(1, 6)
    store = MemoryStore(model, PLENTY, tmp_path)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="A memory is not stored: No space left on device"):
        text = greedy(store, ids)
    assert text.tolist() == greedy(model, ids).tolist()
    assert not list(tmp_path.iterdir())


def test_the_header_says_whose_memory_it_is(tmp_path):
    model, ids = small(), tokens(1, 5)
    save_memory(read(model, ids), tmp_path / "m", model, ids)
    data = (tmp_path / "m").read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert set(metadata) == {"format", "version", "config", "dtype", "weights", "tokens", "input_ids", "hash"}
    assert (metadata["tokens"], metadata["dtype"]) == ("5", "float32")
    assert json.loads(metadata["config"])["rule"] == model.config.rule
