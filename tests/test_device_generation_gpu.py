"""Generation with its loop in a CUDA graph: the text of generate, its distribution, no waiting, no growth."""

import copy
import gc

import pytest
import torch
from tiny_models import CASES, RULES, cache_of, tiny_model, tokens
from transformers import CompileConfig, GenerationMixin

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM, generate_on_device
from falcon_hf import generation_falcon_fast_weight as generation
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PURE = [case for case, options in CASES.items() if "layer_types" not in options]
PLAIN = {"custom_generate": GenerationMixin._sample}  # transformers' own loop, without graphs
ON_DEVICE = {"custom_generate": generate_on_device}


def on_gpu(**options):
    return tiny_model(torch.float32, **options).cuda()


@pytest.mark.parametrize("case", PURE)
def test_greedy_text_of_a_padded_batch(case):
    model, ids = on_gpu(**CASES[case]), tokens(3, 7).cuda()
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :2] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 50, "do_sample": False}
    want = model.generate(ids, **options, **PLAIN)
    assert model.generate(ids, **options, **ON_DEVICE).tolist() == want.tolist()
    assert model.generate(ids, **options).tolist() == want.tolist()
    assert generation.KEPT[model].settings.steps == 1
    options |= {"eos_token_id": [want[0, 9].item(), want[1, 30].item()], "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "repetition_penalty": 1.2}
    want, have = model.generate(ids, **options, **PLAIN), model.generate(ids, **options, **ON_DEVICE)
    assert have.sequences.tolist() == want.sequences.tolist()
    for a, b in zip(*(generation._tensors(cache_of(found)) for found in (have, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    new = have.sequences[:, -1:]
    mask = torch.cat([mask, mask.new_ones(3, have.sequences.shape[1] - 7)], 1)
    again = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    texts = [
        model.generate(new, **again, **way, **{CACHE_NAME: copy.deepcopy(cache_of(have))}).tolist()
        for way in (PLAIN, ON_DEVICE)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", [{}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.8, "repetition_penalty": 1.3}])
def test_tokens_are_drawn_as_generate_draws_them(options):
    """The counts of the third and the last token against those of generate, by a chi-square test of homogeneity."""
    model, ids, draws = on_gpu(vocab_size=7), tokens(1, 5).cuda().clamp(max=6), 4096
    options |= {"do_sample": True, "max_new_tokens": 20, "num_return_sequences": draws, "eos_token_id": None}
    torch.manual_seed(1)
    want = model.generate(ids, **options, **PLAIN)
    for seed, way in ((2, ON_DEVICE), (3, {})):
        torch.manual_seed(seed)
        have = model.generate(ids, **options, **way)
        for place in (7, 24):
            a, b = (torch.bincount(text[:, place], minlength=7).double() for text in (want, have))
            seen = a + b > 0
            chi_square = ((a - b).square() / (a + b))[seen].sum().item()
            assert chi_square < 28  # 6 degrees of freedom: less than 1 in 10,000


def test_seeds_decide():
    model, ids = on_gpu(), tokens(2, 5).cuda()
    texts = []
    for seed in (1, 1, 2, 3):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, do_sample=True, max_new_tokens=40, eos_token_id=None, **ON_DEVICE).tolist())
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts}) == 3
    rows = texts[0]
    assert rows[0][20:] != rows[1][20:]
    assert model.generate(ids, do_sample=True, max_new_tokens=40, eos_token_id=None, **ON_DEVICE).tolist() != texts[3]


@pytest.mark.slow
def test_a_compiled_pass():
    model, ids = on_gpu(), tokens(2, 5).cuda()
    options = {"max_new_tokens": 40, "do_sample": False, **ON_DEVICE}
    want = model.generate(ids, **options)
    compiling = CompileConfig(mode="default", fullgraph=True)
    assert model.generate(ids, compile_config=compiling, **options).tolist() == want.tolist()
    assert model.generate(ids, **options).tolist() == want.tolist()


def test_runs_wait_for_nothing_and_take_no_memory():
    config = FalconFastWeightConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000)
    model, ids = FalconFastWeightForCausalLM(config).cuda().bfloat16().eval(), tokens(2, 30).cuda()
    options = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": [7, 8], "pad_token_id": 0}
    model.generate(ids, max_new_tokens=40, min_new_tokens=40, **options, **ON_DEVICE)
    loop = generation.KEPT[model]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            loop.length.fill_(31)  # back to the first new token: the text has room for so many
            loop.run(model, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    model.generate(ids, max_new_tokens=41, min_new_tokens=20, **options, **ON_DEVICE)
    assert generation.KEPT[model] is loop
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_step_waits_for_nothing(rule):
    model, ids = on_gpu(rule=rule), tokens(2, 5).cuda()
    with torch.no_grad():
        cache = cache_of(model(ids, use_cache=True))
        model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_garbage_with_a_graph_of_its_own_does_not_end_a_capture():
    x, calls, kept = torch.zeros(1, device="cuda"), [], []
    older = torch.cuda.CUDAGraph()
    with torch.cuda.graph(older):
        kept.append([older, torch.zeros(1 << 25, device="cuda")])
    kept[0].append(kept[0])
    del older

    def step(place):
        calls.append(place)
        if len(calls) == 3:  # after two that are not recorded
            kept.clear()
            cycles = [[] for _ in range(100)]
            for cycle in cycles:
                cycle.append(cycle)
        x.add_(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        graph = generation.capture(step, 4, x.device)
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert x.item() == 2 + 4
