"""Draws the recurrence of Falcon-1 with the numbers of one real step: `python docs/draw_recurrence.py`."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

K, V = 6, 5
GAMMA = 0.55
POSITIVE, NEGATIVE = "#e8761e", "#2f7fd6"
PALETTES = {"light": ("#24292f", "#8c959f", "#ffffff"), "dark": ("#e6edf3", "#6e7681", "#0d1117")}


def main() -> None:
    """Writes the picture for light and for dark pages beside this script."""
    matplotlib.rcParams.update({"mathtext.fontset": "cm", "svg.hashsalt": "falcon", "font.size": 11})
    here = Path(__file__).parent
    for name, (ink, line, paper) in PALETTES.items():
        figure = draw(ink, line)
        figure.savefig(here / f"recurrence-{name}.svg", transparent=True, metadata={"Date": None})
        figure.savefig(here / f"recurrence-{name}.png", facecolor=paper, dpi=160)


def draw(ink: str, line: str) -> Figure:
    """The step from left to right: memory, decay, correction, new memory and its read."""
    memory, x, v, q = _example()
    residual = v - memory.T @ x
    after = GAMMA * memory + np.outer(x, residual)
    read = after.T @ q

    figure = Figure(figsize=(11, 4.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 33), ylim=(-1.7, 10.9), aspect="equal")
    axes.axis("off")
    top = 8.1

    def cells(values: np.ndarray, left: float, upper: float) -> None:
        _cells(axes, np.atleast_2d(values), left, upper, line)

    def say(text: str, left: float, height: float, size: float = 12, align: str = "center") -> None:
        axes.text(left, height, text, color=ink, fontsize=size, ha=align, va="center")

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=ink, lw=1.3))

    middle = top - K / 2
    low = top - K - 0.8
    caption = -0.2
    # the memory as the token finds it
    cells(memory, 0.6, top)
    say("$S_{t-1}$", 3.1, low, 16)
    say("the memory", 3.1, caption)
    # decay
    arrow((5.9, middle), (7.9, middle))
    say(r"$\times\,\gamma_t$", 6.9, middle + 0.7, 15)
    cells(GAMMA * memory, 8.2, top)
    say(r"$\gamma_t\,S_{t-1}$", 10.7, low, 16)
    say("fades", 10.7, caption)
    # correction
    say("$+$", 14.0, middle, 20)
    cells(x[:, None], 15.0, top)
    cells(residual, 16.3, top + 1.3)
    cells(np.outer(x, residual), 16.3, top)
    say("$x_t = k_{t-1}$", 14.6, top + 0.75, 14)
    say(r"$v_t - S_{t-1}^{\top} x_t$", 18.8, top + 2.0, 15)
    say(r"$\eta_t\,x_t\,(v_t - S_{t-1}^{\top} x_t)^{\top}$", 18.6, low, 16)
    say("is corrected along the previous key", 18.0, caption)
    say("towards the present value", 18.0, caption - 0.9)
    # the new memory, and what is read from it
    say("$=$", 22.5, middle, 20)
    cells(after, 23.6, top)
    say("$S_t$", 26.1, top + 0.75, 16)
    cells(q[:, None], 30.2, top)
    say("$q_t$", 30.7, top + 0.75, 16)
    arrow((29.9, middle), (28.8, middle))
    arrow((26.1, top - K - 0.15), (26.1, top - K - 0.95))
    cells(read, 23.6, top - K - 1.1)
    say(r"$o_t = S_t^{\top} q_t$", 30.7, top - K - 1.6, 16)
    say("and is read with the query", 26.9, caption - 0.9)
    return figure


def _example() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Memory, previous key, value and query of a step that is easy to see."""
    random = np.random.default_rng(4)
    keys = random.normal(size=(3, K))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    memory = sum(np.outer(key, random.normal(size=V)) for key in keys[:2])
    x = keys[2]
    q = x + 0.25 * random.normal(size=K)
    return memory, x, 1.6 * np.sign(random.normal(size=V)) * random.uniform(0.3, 1, V), q


def _cells(axes: Axes, values: np.ndarray, left: float, upper: float, line: str) -> None:
    """One square a number: its sign as the colour, its size as the strength of the colour."""
    for (row, column), value in np.ndenumerate(values):
        corner = (left + column, upper - row - 1)
        colour = POSITIVE if value > 0 else NEGATIVE
        axes.add_patch(Rectangle(corner, 1, 1, fc=colour, alpha=min(1.0, abs(value) / 1.1), lw=0))
        axes.add_patch(Rectangle(corner, 1, 1, fc="none", ec=line, lw=0.8))


if __name__ == "__main__":
    main()
