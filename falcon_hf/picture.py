"""Draws what the memories of a model do while it reads a text; needs matplotlib, the extra `plots`."""

from pathlib import Path
from textwrap import fill

import numpy as np
from falcon_kernels import Rule
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .inspection_falcon_fast_weight import MemoryTrace

READABLE = 120  # tokens that can be named on one page
INK, SURPRISE, GRID = "#24292f", "#2f7fd6", "#d0d7de"
COLOURS = "RdBu_r"


def draw(trace: MemoryTrace, tokens: list[str], path: Path, name: str, rule: Rule) -> None:
    """Writes one page as PNG: the surprise of each token, the local loss of each head, and how long each head keeps.

    The regression rules have the local loss |S'x - v|² / |v|². The inner-product rules, whose answers have no scale,
    have 1 - cos(S'x, v).

    Args:
        trace: from `inspect_memory`, of at least two tokens.
        tokens: [T] the text of each token; more than 120 are numbered instead.
        path: the file; an older one is replaced.
        name: of the model, for the title.
        rule: of the model.

    Raises:
        OSError: if the file cannot be written.
    """
    layers, heads, length = trace.local_loss.shape
    shown, colours, label = _shown(trace, rule)
    limits = _limits(trace.half_life.numpy())
    few = heads <= 6 and layers <= 12

    figure = Figure(figsize=(15, min(10.5, 4.2 + 0.75 * layers)), dpi=130, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.03, hspace=0.01, wspace=0.01)  # type: ignore[union-attr, call-arg]
    figure.suptitle(
        f"What {name} ({rule.name}) expects of {length:,} tokens, and how long its memories keep them",
        fontsize=14,
        color=INK,
        parse_math=False,
    )
    grid = figure.add_gridspec(
        1 + layers, 2, width_ratios=[6, 1], height_ratios=[max(2.4, 0.27 * layers)] + [1] * layers
    )
    top = figure.add_subplot(grid[0, 0])
    top.bar(range(length), np.nan_to_num(trace.token_loss.numpy()), color=SURPRISE, width=0.8)
    top.set(xlim=(-0.5, length - 0.5), ylabel="surprise of the token\n−log p (nats)")
    top.grid(axis="y", color=GRID, linewidth=0.6)
    top.tick_params(bottom=False, labelbottom=False)
    top.set_axisbelow(True)
    _key(figure.add_subplot(grid[0, 1]), ScalarMappable(colours, COLOURS), label, rule)

    for row, layer in enumerate(trace.layers):
        last = row == layers - 1
        cells = figure.add_subplot(grid[1 + row, 0], sharex=top, facecolor=GRID)
        cells.imshow(shown[row], aspect="auto", interpolation="nearest", cmap=COLOURS, norm=colours)
        cells.set_ylabel(
            f"layer {layer}" + ("\nhead" if few else ""), rotation=0, ha="right", va="center", fontsize=10 if few else 8
        )
        cells.set_yticks(range(heads) if few else sorted({0, heads - 1}))
        cells.tick_params(axis="y", labelsize=7 if few else 5, length=2)
        cells.tick_params(axis="x", bottom=last, labelbottom=last)
        keeps = figure.add_subplot(grid[1 + row, 1], sharey=cells)
        _half_lives(keeps, trace.half_life[row].numpy(), limits, few)
        keeps.tick_params(left=False, labelleft=False, bottom=last, labelbottom=last)
    if length <= READABLE:
        cells.set_xticks(range(length), tokens, rotation=90, fontsize=7 if length > 60 else 9, parse_math=False)
        for mark in cells.get_xticklabels():
            if not any(map(str.isalnum, mark.get_text())):
                mark.set(fontsize=11, fontweight="bold")  # a full stop is small
    cells.set_xlabel("tokens of the text, in order" if length <= READABLE else "number of the token in the text")
    keeps.set_xlabel("half-life (tokens)")
    figure.supxlabel(fill(_caption(rule), 190), fontsize=10, color=INK, x=0.01, ha="left", linespacing=1.4)
    figure.savefig(path, format="png")


def _shown(trace: MemoryTrace, rule: Rule) -> tuple[np.ndarray, Normalize, str]:
    """[L, H, T] what the cells show, its colours, white where the memory expects nothing, and its name."""
    if not rule.residual:
        return 1 - trace.agreement.numpy(), Normalize(0, 2), "local loss  1 − cos(Sᵀx, v)"
    losses = trace.local_loss.numpy()
    ratios = np.abs(np.log(np.clip(losses[np.isfinite(losses)], 1e-6, 1e6)))
    largest = float(np.exp(np.quantile(ratios, 0.98))) if ratios.size else 1.0
    largest = min(max(largest, 2.0), 100.0)
    return losses, LogNorm(1 / largest, largest), "local loss  |Sᵀx − v|² / |v|²"


def _key(axes: Axes, image: ScalarMappable, label: str, rule: Rule) -> None:
    """The colour bar, and what its colours say."""
    axes.axis("off")
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((0.03, 0.36, 0.94, 0.12)), orientation="horizontal")
    if isinstance(image.norm, LogNorm):
        ends = float(image.norm.vmin), float(image.norm.vmax)
        bar.set_ticks([ends[0], 1, ends[1]], labels=[f"{ends[0]:.2g}", "1", f"{ends[1]:.2g}"])
        bar.ax.minorticks_off()
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    known, wrong = ("near v", "worse than none") if rule.residual else ("towards v", "away from v")
    words = f"Answer before the write:\nblue: {known} (expected)\nwhite: none (new)\nred: {wrong}"
    axes.text(0.03, 1, words, transform=axes.transAxes, fontsize=9, color=INK, va="top", linespacing=1.4)


def _limits(half_lives: np.ndarray) -> tuple[float, float]:
    """Powers of ten around the half-lives that are finite."""
    finite = half_lives[np.isfinite(half_lives)]
    lowest, highest = min(finite.min(initial=1), 1), max(finite.max(initial=10), 10)
    return 10 ** np.floor(np.log10(max(lowest, 1e-2))), 10 ** np.ceil(np.log10(min(highest, 1e6)))


def _half_lives(axes: Axes, half_lives: np.ndarray, limits: tuple[float, float], named: bool) -> None:
    """One bar for each head on a logarithmic axis, with its number where there is room; full where nothing decays."""
    lowest, highest = limits
    axes.barh(
        range(len(half_lives)),
        np.clip(half_lives, *limits) - lowest,
        left=lowest,
        color=INK,
        height=0.7 if named else 1,
    )
    axes.set(xscale="log", xlim=limits)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    if not named:
        return
    for head, tokens in enumerate(half_lives):
        text = "no decay" if np.isinf(tokens) else f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.1f}"
        end = np.log(max(tokens, lowest) / lowest) / np.log(highest / lowest)  # of the bar, as a part of the axis
        inside = end > 0.4
        place, colour = (0.03, "white") if inside else (end + 0.03, INK)
        across = axes.get_yaxis_transform()
        axes.text(place, head, text, transform=across, color=colour, fontsize=7, va="center")


def _caption(rule: Rule) -> str:
    key = "the previous token's key" if rule.shifted else "its own key"
    how = "which its rule descends"
    if not rule.residual:
        how = "by direction alone, since this rule never looks at its answer and the answer's length is free"
    return (
        f"Top: how little the model expected each token. Cells: one head's memory S at one token; asked with {key} x "
        "just before the write, it answers Sᵀx, and the local loss says how far that is from the token's value v, "
        f"{how}. Grey: nothing to write yet. Bars: after how many tokens decay alone (mean log γ over this text) "
        "leaves half of a write."
    )
