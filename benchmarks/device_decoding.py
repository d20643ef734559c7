"""Decoding on a GPU: generate, the loop on the device, and Transformers and DeltaNet of the same size, in one run.

    python benchmarks/device_decoding.py
    python benchmarks/device_decoding.py --tiny

Models of 124 million parameters, random weights, bfloat16, prompts of 128 tokens, greedy. The speed is that of the
tokens after the first. The second table has the time of a token after a short and after a long context, which take
turns, and the bytes of what is kept: for the Transformer those of a token times the context. DeltaNet is that of
flash-linear-attention, where it is installed. What fails is reported as it failed. With --tiny models of the bundled
size show that all of it runs, on a CPU too.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import report
from rich.progress import Progress
from transformers import CompileConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM, cache_nbytes, generate_on_device
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

PROMPT, REPEATS = 128, 3
CONTEXTS, PIECE = (128, 131_072), 4_096
LOOP = {"custom_generate": generate_on_device}
Row = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="Small models, few tokens and a short context.")
    parser.add_argument("--rules", nargs="+", default=["falcon-3a.3", "falcon-1.3"], help="Presets without their size.")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64], help="Rows of a batch.")
    parser.add_argument("--tokens", type=int, default=256, help="New tokens of each row.")
    return parser.parse_args()


def llama(config: FalconFastWeightConfig, length: int) -> PreTrainedModel:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(config, name) for name in (*names, "tie_word_embeddings")}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length))


def delta_net(config: FalconFastWeightConfig) -> PreTrainedModel:
    from fla.models import DeltaNetConfig, DeltaNetForCausalLM

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
    sizes = {name: getattr(config, name) for name in names}
    return DeltaNetForCausalLM(DeltaNetConfig(**sizes, num_heads=config.num_attention_heads))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speed(model: PreTrainedModel, rows: int, tokens: int, options: dict[str, Any]) -> Row:
    """Tokens a second after the first token, of all rows together."""
    prompt = torch.randint(model.config.vocab_size, (rows, PROMPT), device=model.device)
    mask = torch.ones_like(prompt)

    def timed(count: int) -> float:
        options_of_all = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": count}
        return seconds(lambda: model.generate(prompt, **options_of_all, **options), model.device)

    first = timed(tokens)
    timed(1)
    every = [timed(tokens) for _ in range(REPEATS)]
    one = statistics.median(timed(1) for _ in range(REPEATS))
    taken = statistics.median(every) - one
    return {"tokens/s": rows * (tokens - 1) / taken, "first call, s": first, "failure": ""}


def attempt(measure: Callable[[], Row], empty: Row) -> Row:
    try:
        return measure()
    except Exception as error:  # of others' code too: what it says is the result
        return {**empty, "failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def context_rows(models: dict[str, PreTrainedModel], tokens: int, contexts: tuple[int, ...]) -> list[Row]:
    """Time of a token, and bytes kept, after each context."""
    rows = []
    for name, model in models.items():
        text = torch.randint(model.config.vocab_size, (1, max(contexts)), device=model.device)
        caches = {}
        with torch.inference_mode():
            for context in contexts:
                cache = None
                for at in range(0, context - 1, PIECE):
                    part = text[:, at : min(at + PIECE, context - 1)]
                    passed = {CACHE_NAME: cache} if cache is not None else {}
                    cache = model(input_ids=part, use_cache=True, logits_to_keep=1, **passed)[CACHE_NAME]
                caches[context] = cache
        for way, options in {"generate": {}, "loop on the device": LOOP}.items():
            times: dict[int, list[float]] = {context: [] for context in contexts}
            for _ in range(REPEATS + 1):
                for context in contexts:
                    given = {CACHE_NAME: copy.deepcopy(caches[context]), **options}
                    mask = torch.ones(1, context, dtype=torch.int64, device=model.device)
                    given |= {"attention_mask": mask, "do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
                    run = partial(model.generate, text[:, context - 1 : context], **given)
                    times[context].append(seconds(run, model.device) / tokens)
            for context in contexts:
                milliseconds = statistics.median(times[context][1:]) * 1e3
                state = cache_nbytes(caches[context])
                rows.append(
                    {"model": name, "way": way, "context": context, "ms per token": milliseconds, "bytes": state}
                )
    return rows


def main() -> None:
    arguments = parse()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = "tiny" if arguments.tiny else "130m"
    tokens, contexts = (20, (128, 1_024)) if arguments.tiny else (arguments.tokens, CONTEXTS)
    compiling = CompileConfig(mode="default", fullgraph=True, backend="eager" if arguments.tiny else "inductor")
    without = {"custom_generate": GenerationMixin._sample}  # transformers' own loop
    ours = {
        "generate": {},
        "generate, without graphs": without,
        "loop on the device": LOOP,
        "the same, compiled": {**LOOP, "compile_config": compiling},
    }
    theirs = {"generate": {}, "generate, static cache, compiled": {"cache_implementation": "static"}}

    configs = {rule: FalconFastWeightConfig.from_preset(f"{rule}-{size}") for rule in arguments.rules}
    like = next(iter(configs.values()))
    makers: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, dict[str, Any]]]] = {
        **{name: (lambda config=config: FalconFastWeightForCausalLM(config), ours) for name, config in configs.items()},
        "llama, SDPA": (lambda: llama(like, max(contexts) + tokens), theirs),
        "DeltaNet, flash-linear-attention": (lambda: delta_net(like), {"generate": {}}),
    }
    rows, kept, a_token = [], {}, None
    empty: Row = {"tokens/s": None, "first call, s": None, "failure": ""}
    with Progress() as progress:
        runs = progress.add_task("speed", total=len(arguments.batches) * sum(len(ways) for _, ways in makers.values()))
        for name, (make, ways) in makers.items():
            model: PreTrainedModel | None = None
            try:
                model = make().to(device, dtype).eval()
                model.generation_config.eos_token_id = None
                millions = sum(p.numel() for p in model.parameters()) / 1e6
                failed = ""
            except Exception as error:
                millions, failed = 0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            for way, options in ways.items():
                for batch in arguments.batches:
                    row: Row = {"model": name, "parameters, M": millions, "way": way, "rows": batch}
                    if model is None:
                        rows.append({**row, **empty, "failure": failed})
                    else:
                        rows.append({**row, **attempt(partial(speed, model, batch, tokens, options), empty)})
                    progress.console.print(rows[-1])
                    progress.advance(runs)
            if name in configs:
                kept[name] = model
            elif model is not None and name.startswith("llama"):
                cache = model(torch.zeros(1, PROMPT, dtype=torch.int64, device=device), use_cache=True)[CACHE_NAME]
                a_token = cache_nbytes(cache) // PROMPT
            model = None
            gc.collect()
    title = f"{size} models, {str(dtype).removeprefix('torch.')}, prompts of {PROMPT} tokens, {tokens} new ones"
    suffix = "_tiny" if arguments.tiny else ""
    report(f"device_decoding{suffix}", title, rows)
    after = context_rows(kept, tokens, contexts)
    if a_token is not None:
        after = [{**row, "bytes of the Transformer's": a_token * row["context"]} for row in after]
    report(f"device_decoding_contexts{suffix}", f"{size} models, one row", after)


if __name__ == "__main__":
    main()
