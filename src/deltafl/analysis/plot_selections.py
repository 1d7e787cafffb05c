"""How often each client was drawn: one small panel a sampler."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..types import FloatArray
from .curves import Run
from .plot_style import DPI, GREY, WIDTH, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def selections_figure(groups: dict[str, list[Run]], look_of: dict[str, Look]) -> "Figure":
    """Counts of each client, sorted within a run and averaged over seeds; the panels share their axes.

    A sampler that drew every client in every round has no panel: it would only stretch the axis.
    """
    from matplotlib.figure import Figure

    sorted_draws = {
        label: np.mean([np.sort(run.draws_m)[::-1] for run in group], axis=0) for label, group in groups.items()
    }
    everyone = [label for label, group in groups.items() if all(_draws_everyone(run) for run in group)]
    shown = {k: v for k, v in sorted_draws.items() if k not in everyone} or sorted_draws
    num_columns = min(len(shown), 4)
    num_rows = math.ceil(len(shown) / num_columns)
    height = 1.45 * num_rows + 0.85
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.075, right=0.985, top=1 - 0.27 / height, bottom=0.72 / height, wspace=0.2, hspace=0.38
    )
    _set_range(panels.flat[0], list(shown.values()))
    for i, (label, draws_m) in enumerate(shown.items()):
        axes = panels.flat[i]
        never = float(np.mean([run.draws_m == 0 for run in groups[label]]))
        _draw_panel(axes, draws_m, label, look_of[label].colour, never)
        axes.tick_params(labelbottom=i + num_columns >= len(shown), labelleft=i % num_columns == 0)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    left_out = [label for label in everyone if label not in shown]
    figure.text(0.012, 0.09 / height, _selections_caption(groups, left_out), fontsize=7, color=GREY)
    return figure


def _draws_everyone(run: Run) -> bool:
    return bool(np.all(run.draws_m == run.draws_m[0])) and int(run.draws_m[0]) >= run.num_rounds


def _set_range(axes: "Axes", draws: Sequence[FloatArray]) -> None:
    """One range for all panels (they share their axes): from 0, or on a log axis if one client stands far out."""
    highest = max(float(draws_m.max()) for draws_m in draws)
    if highest <= 8 * max(float(draws_m.mean()) for draws_m in draws):
        axes.set_ylim(0, 1.05 * max(highest, 1.0))
        return
    axes.set_yscale("log")
    # Clients never drawn fall below the axis; the panel says how many they are.
    axes.set_ylim(0.7, 1.5 * highest)
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_panel(axes: "Axes", draws_m: FloatArray, label: str, colour: str, never: float) -> None:
    m = len(draws_m)
    edges = np.arange(m + 1)
    if axes.get_yscale() == "linear":  # an area from an arbitrary floor would say nothing
        axes.stairs(draws_m, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
    axes.stairs(draws_m, edges, color=colour, linewidth=1.2, baseline=None)
    axes.axhline(float(draws_m.mean()), color=GREY, linewidth=0.7, linestyle=(0, (2, 2)))
    axes.set_title(label, fontsize=8, pad=4)
    axes.set_xlim(0, m)
    axes.set_xticks([0, m])
    axes.tick_params(labelsize=7, length=2.5)
    if never > 0:
        text = f"{100 * never:.0f} % never" if never >= 0.005 else "< 1 % never"
        axes.text(0.98, 0.94, text, transform=axes.transAxes, ha="right", va="top", fontsize=7, color=GREY)


def _selections_caption(groups: dict[str, list[Run]], left_out: Sequence[str]) -> str:
    seeds = ", mean over seeds" if max(len(group) for group in groups.values()) > 1 else ""
    text = f"How often each client was drawn, the most drawn one at the left{seeds}. Dashed: the mean client."
    return f"{text}\nNot shown: {', '.join(left_out)} (every client, every round)." if left_out else text
