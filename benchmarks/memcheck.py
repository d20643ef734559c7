"""No Triton kernel reads or writes memory that is not its own: every launch configuration under compute-sanitizer.

    python benchmarks/memcheck.py [--jobs 16] [--only WORDS ...] [--wait SECONDS]

Needs a GPU, or several that share the work, and compute-sanitizer of CUDA on the path. Each rule runs forward and
backward with the configurations of both classes of cards (`falcon_kernels/launch.py`), K = V = 64, 128 and 256,
operands of 2 and 4 bytes: few tokens, a mask, packed documents, and, where falcon_1 has one, its single pass. Then the
kernels of one token and those around the recurrence, in steps, in a model's training step and in its generation. Every
tensor is an allocation of its own, so that an access past its end is seen. Flags of a state are changed in words of 4
bytes, which allocations on a GPU are rounded up to: steps have them in whole words, and a model rows by the four.
Exits with 1 where anything is wrong. `--only` takes what has all the words, and writes to a file of their names.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from falcon_kernels import FalconState, Rule, falcon_step, launch

sys.path.insert(0, str(Path(__file__).parent))
import triton_check
from report import report
from triton_check import Call, Case, Group, normal

CARDS, DTYPES = ("large", "safe"), ("fp32", "bf16")
WIDTHS = {"few": (64, 128, 256), "step": (16, 32, 64, 96, 128, 192, 256)}


def works() -> list[str]:
    """What is run, those that compile longest first."""
    found = [
        f"{rule} {card} {dtype} {width}"
        for width in reversed(WIDTHS["few"])
        for rule in triton_check.RULES
        for dtype in DTYPES
        for card in (CARDS if dtype == "bf16" else CARDS[:1])  # those of 4 bytes are the same on any card
    ]
    found += [f"{what} {rule} {dtype}" for what in AROUND for rule in triton_check.RULES for dtype in DTYPES]
    return found


def run(work: str) -> None:
    words = work.split()
    if words[0] in AROUND:
        AROUND[words[0]](words[1], triton_check.DTYPES[words[2]])
    else:
        rule, card, dtype, width = words
        run_rule(rule, card, dtype, int(width))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_rule(rule: str, card: str, dtype: str, width: int) -> None:
    processors = launch.card(triton_check.DEVICE)[1]
    launch.card = lambda device: (card, processors)
    for timing, state, layout in (("after", "carried", "rows"), ("before", "fresh", "documents")):
        group = Group(rule, dtype, width, width, timing, state, layout)
        cases = [Case("documents", 1, sum(triton_check.DOCUMENTS), 2)]
        if layout == "rows":
            cases = [Case("T=1", 2, 1, 2), Case("T=65", 2, 65, 2), Case("holes", 5, 130, 2, holes=True)]
            if rule == "falcon_1":
                cases.append(Case("one pass", 12, 70, 12))
        for case in cases:
            Call.of(group, case).results("triton")


def run_steps(name: str, dtype: torch.dtype) -> None:
    rule, device = Rule(name), triton_check.DEVICE
    for width in WIDTHS["step"]:
        for rows in (1, 3):
            state = FalconState.zeros(rule, rows, 2, width, width, dtype=dtype, device=device).map(in_whole_words)
            rates = (rows, 2, width) if rule.per_channel else (rows, 2)
            for step in range(3):
                q, k, v = (normal(rows, 2, width, seed=3 * step + i).to(dtype) for i in range(3))
                gain, ridge = normal(*rates, seed=10 + step).sigmoid(), normal(rows, 2, seed=20 + step).sigmoid()
                falcon_step(q, k, v, gain, ridge, state, rule=rule, impl="triton")


def in_whole_words(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape; of bytes, with memory up to a multiple of four."""
    return tensor.new_zeros(-(-tensor.numel() // 4) * 4)[: tensor.numel()].view(tensor.shape)


def run_model(rule: str, dtype: torch.dtype) -> None:
    from falcon_hf import FalconFastWeightConfig, FalconFastWeightForCausalLM

    config = FalconFastWeightConfig(
        vocab_size=101, hidden_size=144, intermediate_size=200, num_hidden_layers=1, num_attention_heads=3,
        head_dim=48, rule=rule,
    )  # fmt: skip
    model = FalconFastWeightForCausalLM(config).to(triton_check.DEVICE, dtype)
    ids = torch.arange(4 * 37, device=triton_check.DEVICE).remainder(101).view(4, 37)
    model(input_ids=ids, labels=ids).loss.backward()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)


AROUND = {"model": run_model, "step": run_steps}


def checked(work: str, gpu: int, deadline: float) -> dict[str, object]:
    """One work in a process of its own under memcheck; -1 errors where it did not come to its end."""
    begun = time.perf_counter()
    if begun > deadline:
        return {"work": work, "errors": -1, "s": 0.0, "note": "not begun for lack of time"}
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, __file__, "--work", work]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": str(gpu)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline - begun)
        said = done.stdout + done.stderr
        summary = re.search(r"ERROR SUMMARY: (\d+) error", said)
        errors = int(summary[1]) if summary and "all launches done" in said else -1
        note = "" if errors == 0 else f"{said[:1000]} … {said[-500:]}"
    except subprocess.TimeoutExpired:
        errors, note = -1, "did not come to its end in time"
    return {"work": work, "errors": errors, "s": time.perf_counter() - begun, "note": note}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=[], help="words that the names of works must have")
    parser.add_argument("--wait", type=float, default=500, help="seconds after which what still runs has failed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        run(arguments.work)
        print("all launches done")
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the path; it comes with the CUDA toolkit.")
    chosen = [work for work in works() if set(arguments.only) <= set(work.split())]
    if not chosen:
        parser.error(f"no work has all of {' '.join(arguments.only)}.")
    deadline = time.perf_counter() + arguments.wait
    with ThreadPoolExecutor(arguments.jobs) as pool:
        gpus = itertools.cycle(range(torch.cuda.device_count()))
        rows = list(pool.map(checked, chosen, gpus, itertools.repeat(deadline)))
    report("_".join(["memcheck", *arguments.only]), "errors that compute-sanitizer's memcheck found", rows)
    wrong = [row for row in rows if row["errors"]]
    for row in wrong:
        print(f"WRONG {row['work']}: {row['note']}")
    print(f"{len(wrong)} of {len(rows)} works wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
