"""Time and state per generated token after a short and after a long context.

    python benchmarks/decoding.py [MODEL]

The model (the bundled one by default) reads 128 tokens, and 65,536, and goes on one token at a time. The two caches
take turns, so that a slow spell of the machine falls on both alike.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from falcon_hf import cache_nbytes
from falcon_hf.cache_falcon_fast_weight import CACHE_NAME
from falcon_hf.cli import bundled

sys.path.insert(0, str(Path(__file__).parent))
from report import report

CONTEXTS = (128, 65_536)
PREFILL = 4_096  # tokens read at a time
TOKENS = 200


@torch.inference_mode()
def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "falcon-3a.3-tiny"
    model = AutoModelForCausalLM.from_pretrained(bundled().get(name, name), dtype=torch.float32).eval()
    torch.manual_seed(0)
    text = torch.randint(model.config.vocab_size, (1, max(CONTEXTS)))
    caches, prefill = {}, {}
    for context in CONTEXTS:
        cache, start = None, time.perf_counter()
        for at in range(0, context, PREFILL):
            part = text[:, at : min(at + PREFILL, context)]
            cache = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)[CACHE_NAME]
        caches[context], prefill[context] = cache, time.perf_counter() - start

    times: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    for i in range(TOKENS):
        for context, cache in caches.items():
            start = time.perf_counter()
            model(input_ids=text[:, i : i + 1], past_key_values=cache, use_cache=True)
            times[context].append(time.perf_counter() - start)
    rows = [
        {
            "context": context,
            "ms per token": statistics.median(times[context]) * 1e3,
            "state, bytes": cache_nbytes(caches[context]),
            "prefill, tokens/s": context / prefill[context],
        }
        for context in CONTEXTS
    ]
    ratio = rows[1]["ms per token"] / rows[0]["ms per token"]
    report("decoding", f"{name}, one row, float32", rows, model=name, ratio=ratio)


if __name__ == "__main__":
    main()
