"""How long the first forward and backward of a new shape takes: with nothing compiled, and in a second process.

    python benchmarks/first_call.py

Needs a GPU. Each measurement is a process of its own that begins with inputs on the device; `process` counts its start
and imports too. The rules are measured side by side, each on a core of its own if there are so many.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from falcon_kernels import RULES
from report import report

SHAPE = (32, 1024, 12, 64)
WORK = """
import sys, time, torch
from falcon_kernels import RULES, Rule, falcon_attention
B, T, H, K = map(int, sys.argv[2:])
q, k, v = (torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
name = sys.argv[1]
gain = torch.rand(B, T, H, *[K][: RULES[name].per_channel], device="cuda", requires_grad=True)
ridge = torch.rand(B, T, H, device="cuda", requires_grad=True)
torch.cuda.synchronize()
start = time.perf_counter()
out = falcon_attention(q, k, v, gain, ridge, rule=Rule(name), impl="triton").output
torch.autograd.grad(out, [q, k, v, gain, ridge], out.detach())
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def seconds(rule: str, cache: str) -> tuple[float, float]:
    """Of the call, and of the whole process."""
    start = time.perf_counter()
    command = [sys.executable, "-c", WORK, rule, *map(str, SHAPE)]
    done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout), time.perf_counter() - start


def measured(rule: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        for what in ("nothing compiled", "second process"):
            call, process = seconds(rule, cache)
            rows.append({"rule": rule, "case": what, "call, s": call, "process, s": process})
    return rows


def main() -> None:
    with ThreadPoolExecutor(len(RULES)) as pool:
        rows = [row for found in pool.map(measured, RULES) for row in found]
    report("first_call", f"first forward and backward at {SHAPE}, bfloat16", rows)


if __name__ == "__main__":
    main()
