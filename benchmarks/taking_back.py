"""What it costs to take tokens back from a cache, as assisted decoding does.

    python benchmarks/taking_back.py

The bundled checkpoint on one core goes on by a pass of six tokens: plainly, recorded, and recorded with three of them
taken back. The three take turns, so that a slow spell of the machine falls on all alike.
"""

import copy
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from falcon_hf.cache_falcon_fast_weight import CACHE_NAME
from falcon_hf.cli import bundled

sys.path.insert(0, str(Path(__file__).parent))
from report import report

CONTEXT, PASS, BACK, REPEATS = 128, 6, 3, 200


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = "falcon-3a.3-tiny"
    model = AutoModelForCausalLM.from_pretrained(bundled()[name], dtype=torch.float32).eval()
    text = torch.randint(model.config.vocab_size, (1, CONTEXT + PASS))
    read = model(input_ids=text[:, :CONTEXT], use_cache=True)[CACHE_NAME]
    times: dict[str, list[float]] = {"plain": [], "recorded": [], f"{BACK} of {PASS} taken back": []}
    for _ in range(REPEATS):
        for what, spent in times.items():
            cache = copy.deepcopy(read)
            if what != "plain":
                cache.activate_past_recording()
            start = time.perf_counter()
            model(input_ids=text[:, CONTEXT:], past_key_values=cache, use_cache=True)
            if "taken" in what:
                cache.crop(-BACK)
            spent.append(time.perf_counter() - start)
    middle = {what: statistics.median(spent) * 1e3 for what, spent in times.items()}
    rows = [{"pass": what, "ms": ms, "times plain": ms / middle["plain"]} for what, ms in middle.items()]
    report("taking_back", f"{name}, a pass of {PASS} tokens after {CONTEXT}, float32", rows)


if __name__ == "__main__":
    main()
