"""The pictures of a page, made with Matplotlib's Agg canvas: panels of curves, bars, probe columns.

A sampler of the paper has the same colour on every page; its variants differ by their dashes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltafl.analysis import plots
from deltafl.analysis.plots import GREY, Band, Look, looks, mean_band
from deltafl.analysis.statistics import mean_and_sd
from deltafl.simulation.record import RunRecord

from .canvas import Line, draw_panels, finish, grid, legend_rows, styled
from .groups import Group
from .measures import best_within
from .tables_of_figures import horizons_of
from .views import BestView, CurvesView, ProbesView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", (0.0, (4.0, 1.5)), (0.0, (1.0, 1.2)), (0.0, (5.0, 1.2, 1.0, 1.2)))
_HATCHES = ("", "///", "...", "xxx")
_TITLES = {"accuracy": "test accuracy, %", "loss": "test loss", "log10-loss": "log10 of the test loss"}


def _looks(groups: Sequence[Group]) -> dict[str, Look]:
    """One look for each label of a picture, in whichever panels it is."""
    return looks(list(dict.fromkeys(label for group in groups for label in group.labels)))


def draw_curves(groups: Sequence[Group], view: CurvesView, path: Path) -> None:
    """Panels of curves: a row of panels for each ``y``, a panel for each part."""
    panels, captions = [], []
    look_of = _looks(groups)
    for y in view.y:
        for group in groups:
            lines = [
                Line(row.name, look_of[row.label], curve_band(list(row.records.values()), y, view.smoothing))
                for row in group.rows
            ]
            panels.append(lines)
            captions.append(f"{group.title}: {_TITLES[y]}" if group.title else _TITLES[y])
    goals = [
        100 * group.threshold if y == group.metric == "accuracy" and group.threshold is not None else None
        for y in view.y
        for group in groups
    ]
    smooth = f" Moving average over {view.smoothing} evaluations." if view.smoothing > 1 else ""
    note = f"Line: mean over seeds. Band: from the lowest to the highest seed.{smooth}"
    draw_panels(panels, captions, min(view.columns, max(len(groups), 1)), note, path, goals=goals)


def curve_band(records: Sequence[RunRecord], y: str, smoothing: int = 1) -> Band:
    """Mean and range over seeds of what is drawn: percent, loss, or log10 loss."""
    return plots.curve_band([record.run() for record in records], y, smoothing)


def draw_probes(groups: Sequence[Group], view: ProbesView, path: Path) -> None:
    """Panels of probe columns, one for each part and column, or one for each part."""
    panels, captions = [], []
    look_of = _looks(groups)
    for group in groups:
        lines_of = {
            title: [
                Line(row.name, look_of[row.label], probe_band(list(row.records.values()), column)) for row in group.rows
            ]
            for title, column in view.columns.items()
        }
        several = len(groups) > 1
        if view.panels == "column":
            panels += list(lines_of.values())
            captions += [f"{group.title}: {title}" if several else title for title in lines_of]
        else:
            panels.append(_by_column(lines_of, len(group.rows) > 1))
            captions.append(group.title)
    note = "Line: mean over seeds. Band: from the lowest to the highest seed."
    draw_panels(panels, captions, min(2, len(panels)), note, path, log_y=view.log)


def _by_column(lines_of: dict[str, list[Line]], several: bool) -> list[Line]:
    look_of = looks(list(lines_of))
    return [
        Line(f"{title}, {line.name}" if several else title, line.look if several else look_of[title], line.band)
        for title, lines in lines_of.items()
        for line in lines
    ]


def probe_band(records: Sequence[RunRecord], column: str) -> Band:
    """Mean and range over seeds of a probe column, at the rounds that all seeds measured."""
    runs = []
    for record in records:
        value_r = record.probe(column)
        round_r = record.probe("round").astype(np.int64) if "round" in record.probes else np.arange(1, len(value_r) + 1)
        runs.append(record.run()._replace(round_r=round_r, loss_r=value_r))
    return mean_band(runs, "loss")


def draw_bars(groups: Sequence[Group], view: BestView, path: Path) -> None:
    """Bars of the mean of the best accuracies, a cluster for each number of rounds; whiskers are one sd over seeds."""
    look_of = _looks(groups)

    def draw(axes: "Axes", group: Group) -> None:
        horizons = horizons_of(group, view)
        width = 0.8 / len(group.rows)
        lowest = math.inf
        for i, row in enumerate(group.rows):
            values = [[best_within(h, view.best).value(record) for record in row.records.values()] for h in horizons]
            means, sds = np.array([mean_and_sd(np.array(v, dtype=np.float64)) for v in values]).T * 100
            place_h = np.arange(len(horizons)) + (i - (len(group.rows) - 1) / 2) * width
            hatch = _HATCHES[_DASHES.index(dash)] if (dash := look_of[row.label].dash) in _DASHES else ""
            style: dict[str, Any] = {
                "color": look_of[row.label].colour,
                "hatch": hatch,
                "edgecolor": "white",
                "linewidth": 0.5,
            }
            axes.bar(place_h, means, 0.92 * width, label=row.name, zorder=2, **style)
            axes.errorbar(place_h, means, np.nan_to_num(sds), fmt="none", ecolor=GREY, elinewidth=0.9, zorder=3)
            lowest = min(lowest, float(np.min(means - np.nan_to_num(sds))))
        axes.set_ylim(bottom=max(0.0, 5 * math.floor((lowest - 3) / 5)))
        axes.set_xticks(np.arange(len(horizons)), [f"first {horizon} rounds" for horizon in horizons])
        axes.set_title(f"{group.title}: mean of the {view.best} best accuracies, %")

    with styled():
        figure, panels = grid(len(groups), 1, legend_rows([row.name for g in groups for row in g.rows]))
        for axes, group in zip(panels, groups, strict=True):
            draw(axes, group)
        finish(figure, panels, "Whisker: one standard deviation over seeds. The axis does not begin at 0.", path)
