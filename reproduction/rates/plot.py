"""The picture of table 1: the squared gradient norm against T, one panel a problem and a measure. Needs Matplotlib."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deltafl.analysis.plots import DPI, GREY, PALE, WIDTH, Look, looks, small_png, styled
from deltafl.io import write_atomically
from deltafl.types import FloatArray

from .runs import RatesSettings

#: (problem, label) -> (2, t, s): least and mean, by horizon and seed.
Values = dict[tuple[str, str], FloatArray]
_MEASURES = ("min over t", "mean over t")


def draw_rates(settings: RatesSettings, values: Values, path: Path) -> None:
    """Draw means over seeds with bars from the least to the greatest seed, and lines of the slopes -1/2 and -1."""
    with styled():
        rows = len(settings.problems)
        figure = Figure(figsize=(WIDTH, 0.7 + 2.3 * rows), dpi=DPI, facecolor="white", layout="constrained")
        grid = figure.subplots(rows, 2, squeeze=False, sharex=True)
        look_of = looks(settings.methods)
        for line, problem in zip(grid, settings.problems, strict=True):
            for axes, measure in zip(line, range(2), strict=True):
                for label in settings.methods:
                    _curve(axes, settings, values[problem, label][measure], label, look_of)
                _finish(axes, settings, f"{problem}: {_MEASURES[measure]}")
        for axes in grid[-1]:
            axes.set_xlabel("rounds T, a run each")
        handles, names = grid[0][1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
        drawn = small_png(figure)
    write_atomically(path, drawn)


def _curve(axes: Axes, settings: RatesSettings, value_ts: FloatArray, label: str, look_of: dict[str, Look]) -> None:
    look = look_of[label]
    mean_t = value_ts.mean(axis=1)
    if mean_t.max() < 1e-12:  # a run that starts at the minimum: nothing but rounding
        return
    spread = np.abs(np.array([value_ts.min(axis=1), value_ts.max(axis=1)]) - mean_t)
    axes.errorbar(
        settings.horizons,
        mean_t,
        yerr=spread,
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.2,
        elinewidth=0.5,
        zorder=look.zorder,
        label=label,
    )


def _finish(axes: Axes, settings: RatesSettings, title: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(settings.horizons, [str(horizon) for horizon in settings.horizons])
    axes.set_xticks([], minor=True)
    axes.tick_params(which="both", labelsize=7.5)
    axes.set_title(title)
    axes.grid(color=PALE, linewidth=0.6)
    if not axes.has_data():
        axes.text(0.5, 0.5, "0: the run starts there", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ends = np.array([settings.horizons[0], settings.horizons[-1]], dtype=np.float64)
    for order, name in ((-0.5, "$T^{-1/2}$"), (-1.0, "$T^{-1}$")):
        line = high * (ends / ends[0]) ** order
        axes.plot(ends, line, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        if line[1] > low:
            axes.annotate(name, (ends[1], line[1]), fontsize=7, color=GREY, ha="right", va="bottom")
    axes.set_ylim(low, high)
