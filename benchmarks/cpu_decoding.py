"""Decoding on one CPU core: time per token beside that of the model's linear layers alone.

    python benchmarks/cpu_decoding.py

Models of 124 million parameters and of the bundled size, random weights, float32, one row after 128 tokens: three rules
and a Llama of equal width and depth. A token and the linear layers alone take turns.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME

sys.path.insert(0, str(Path(__file__).parent))
from report import report

CONTEXT, TOKENS = 128, 40


def models():
    """Names, and the models, one after another."""
    for size in ("130m", "tiny"):
        config = None
        for rule in ("falcon-1.3", "falcon-1a.3", "falcon-3a.3"):
            config = FalconFastWeightConfig.from_preset(f"{rule}-{size}")
            yield f"{rule}-{size}", FalconFastWeightForCausalLM(config)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(config, name) for name in (*names, "tie_word_embeddings")}
        yield f"llama-{size}", LlamaForCausalLM(LlamaConfig(**sizes))


@torch.inference_mode()
def measured(model) -> tuple[float, float]:
    """Medians in milliseconds: of a token, and of its linear layers alone."""
    text = torch.randint(model.config.vocab_size, (1, CONTEXT + TOKENS))
    found = model(input_ids=text[:, :CONTEXT], use_cache=True)
    cache = {name: found[name] for name in (CACHE_NAME, "past_key_values") if name in found}
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.randn(1, 1, module.in_features) for module in linear]
    tokens, products = [], []
    for i in range(CONTEXT, CONTEXT + TOKENS):
        start = time.perf_counter()
        model(input_ids=text[:, i : i + 1], use_cache=True, **cache)
        middle = time.perf_counter()
        for module, x in zip(linear, inputs, strict=True):
            module(x)
        tokens.append(middle - start)
        products.append(time.perf_counter() - middle)
    return statistics.median(tokens) * 1e3, statistics.median(products) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, model in models():
        token, products = measured(model.eval())
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        row = {"model": name, "parameters, M": millions, "ms per token": token, "linear layers alone, ms": products}
        rows.append(row | {"ratio": token / products})
    report("cpu_decoding", "one row on one CPU core, float32, random weights", rows)


if __name__ == "__main__":
    main()
