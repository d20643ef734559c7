"""Draws docs/distillation.svg and .png, the curves of benchmarks/results/distillation.json.

python docs/draw_distillation.py
"""

import json
import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
STAGES = {"align": 150, "match": 300, "tune": 150}
COLOURS = ("#0969da", "#1a7f37")


def main() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "distillation.json").read_text())
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, run), colour in zip(measured["runs"].items(), COLOURS, strict=True):
        curve, begun = run["curve"], 0
        points = [(0, curve["converted"]["0"])]
        for stage, steps in STAGES.items():
            points += [(begun + int(step), loss) for step, loss in curve[stage].items()]
            begun += steps
        draw(axes, points, f"converted, {name}", color=colour)
        if "scratch" in curve:
            points = [(int(step), loss) for step, loss in curve["scratch"].items()]
            draw(axes, points, "random weights", color="#cf222e")
    axes.axhline(math.exp(curve["teacher"]["0"]), color="0.3", linestyle=":", label="teacher")
    begun = 0
    for stage, steps in STAGES.items():
        begun += steps
        axes.axvline(begun, color="0.85", linewidth=0.8)
        axes.text(begun, 1, f"{stage} ", ha="right", va="top", color="0.4", transform=axes.get_xaxis_transform())
    axes.set(xlabel="steps of 32,768 tokens", ylabel="perplexity of held-out text", yscale="log", xlim=(0, begun))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    matplotlib.rcParams["svg.hashsalt"] = "falcon"
    figure.savefig(ROOT / "docs" / "distillation.svg", metadata={"Date": None})
    figure.savefig(ROOT / "docs" / "distillation.png", dpi=130)


def draw(axes, points: list[tuple[int, float]], label: str, color: str) -> None:
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, [math.exp(loss) for loss in losses], label=label, color=color)


if __name__ == "__main__":
    main()
