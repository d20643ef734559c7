"""Draws docs/distillation.svg and .png, the curves of benchmarks/results/distillation.json.

python docs/draw_distillation.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from distill import draw  # noqa: E402

STAGES = [("align", 150), ("match", 300), ("tune", 150)]

if __name__ == "__main__":
    measured = json.loads((ROOT / "benchmarks" / "results" / "distillation.json").read_text())
    draw({name: run["curve"] for name, run in measured["runs"].items()}, STAGES, ROOT / "docs" / "distillation")
