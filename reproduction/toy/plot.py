"""The picture of the toy: client gradients, and each method's possible aggregates with their probabilities."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deltafl.analysis.plots import DPI, GREY, INK, PALE, WIDTH, small_png, styled
from deltafl.io import write_atomically

from .enumeration import GRADIENTS, IDEAL, SCORES, WAYS, Enumerated, hand_picked

#: The ways that are drawn, one column each.
SHOWN = ("hh", "ht", "plain-mean", "difference-ht")
_COLOURS = {"uniform": "#767676", "IS": "#0072B2", "DELTA": "#D55E00"}
_GAVE = {(1, 2): "uniform", (2, 3): "IS", (1, 3): "DELTA"}


def draw_toy(rows: Sequence[Enumerated], path: Path) -> None:
    """Left the client gradients with the paper's three pairs; right every aggregate, its area by its probability."""
    by_key = {(row.score, row.way): row for row in rows}
    with styled():
        figure = Figure(figsize=(WIDTH, 7.6), dpi=DPI, facecolor="white", layout="constrained")
        grid = figure.subplots(len(SCORES) + 1, len(SHOWN), sharex=True, sharey=True)
        for axes in [*grid[0][:2], *grid[1:].flat]:
            _ground(axes)
        _gradients(grid[0][0])
        _pairs(grid[0][1])
        for axes in grid[0][2:]:
            axes.set_axis_off()
        _legend(grid[0][2])
        for line, score in zip(grid[1:], SCORES, strict=True):
            for axes, way in zip(line, SHOWN, strict=True):
                _outcomes(axes, by_key[score, way])
        drawn = small_png(figure)
    write_atomically(path, drawn)


def _ground(axes: Axes) -> None:
    axes.set_xlim(-0.5, 10.5)
    axes.set_ylim(-5.5, 5.5)
    axes.axhline(0, color=PALE, linewidth=0.6, zorder=0)
    axes.set_aspect("equal")
    axes.plot(*IDEAL, marker="+", markersize=9, color=INK, zorder=5)


def _gradients(axes: Axes) -> None:
    for client, gradient in enumerate(GRADIENTS, 1):
        axes.annotate("", gradient, (0, 0), arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1.0})
        axes.annotate(f"F{client}", gradient, xytext=(3, 2), textcoords="offset points", fontsize=8)
    axes.annotate("", IDEAL, (0, 0), arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.4})
    axes.set_title("gradients, ideal", fontsize=8)


def _pairs(axes: Axes) -> None:
    for pair, mean_d in hand_picked().items():
        axes.plot(*mean_d, "o", markersize=6, color=_COLOURS[_GAVE[pair]])
        axes.annotate(f"{pair[0]}+{pair[1]}", mean_d, xytext=(5, 3), textcoords="offset points", fontsize=7)
    axes.set_title("pairs picked by hand", fontsize=8)


def _legend(axes: Axes) -> None:
    text = "+ ideal (4, 0)\n● a cohort's aggregate,\n   area by probability\n◇ mean of the aggregates"
    axes.text(-0.3, 0, text, fontsize=8, color=INK, va="center")


def _outcomes(axes: Axes, row: Enumerated) -> None:
    probability_k = np.array([outcome.probability for outcome in row.outcomes])
    aggregate_kd = np.array([outcome.aggregate for outcome in row.outcomes])
    x_k, y_k = aggregate_kd.T
    axes.scatter(x_k, y_k, s=220 * probability_k, color=_COLOURS[row.score], alpha=0.75, linewidths=0, zorder=3)
    for outcome in row.outcomes:
        name = "".join(str(client) for client in outcome.clients)
        axes.annotate(name, outcome.aggregate, xytext=(4, 3), textcoords="offset points", fontsize=6, color=GREY)
    axes.plot(*(probability_k @ aggregate_kd), marker="D", markersize=4.5, color=INK, fillstyle="none", zorder=4)
    short = WAYS[row.way].title.replace("difference from (4, 0), exact pi", "difference, exact pi")
    axes.set_title(f"{row.score}: {short}\nMSE {row.mse:.3f}", fontsize=6.5)
