"""The curves of a sweep; where they lie on one another, their differences to the baseline."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from deltafl import analysis
from deltafl.analysis.bands import shown_curve
from deltafl.analysis.look import MOST_STRONG
from deltafl.types import FloatArray, IntArray

from .groups import Group, Row
from .spec import TEXTS, is_ours

_TITLES = {
    "accuracy": "test accuracy, %",
    "loss": "test loss",
    "log10-loss": "log10 of the test loss",
}
_ABOVE = {
    "accuracy": "accuracy, points above",
    "loss": "loss above",
    "log10-loss": "log10 loss above",
}
Looks = dict[str, analysis.Look]


def looks_of(groups: Sequence[Group]) -> Looks:
    return analysis.looks(list(dict.fromkeys(label for group in groups for label in group.labels)))


def lines_of(
    rows: Sequence[Row], looks: Looks, bands: Sequence[analysis.Band]
) -> list[analysis.Line]:
    return [
        analysis.Line(row.name, looks[row.label], band)
        for row, band in zip(rows, bands, strict=True)
    ]


def curve_band(runs: Sequence[analysis.Run], y: str, smoothing: int = 1) -> analysis.Band:
    """Mean and range over seeds of a metric (shares in percent), or of ``log10-loss``, as a moving
    average.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return analysis.band_of([(run.round_r, _smooth(_curve(run, y), smoothing)) for run in runs])


def _curve(run: analysis.Run, y: str) -> FloatArray:
    if y == "log10-loss":
        return np.log10(run.loss_r)
    return shown_curve(run, y)


def _smooth(value_r: FloatArray, window: int) -> FloatArray:
    """Moving average of each evaluation and those before it; shorter at the beginning."""
    # Only the start of the convolution: its end has sums without the latest values.
    sum_r = np.convolve(value_r, np.ones(window))[: len(value_r)]
    count_r = np.minimum(np.arange(1, len(value_r) + 1), window)
    smooth_r: FloatArray = sum_r / count_r
    return smooth_r


def draw_curves(groups: Sequence[Group], ys: Sequence[str], columns: int, path: Path) -> None:
    """Curves; where they lie on one another, their differences to the baseline."""
    looks = looks_of(groups)
    panels = []
    for y, group in product(ys, groups):
        rows = _drawn(group)
        label = _TITLES[y]
        bands = [curve_band(list(row.runs.values()), y) for row in rows]
        goal = (
            100 * group.threshold
            if group.threshold is not None and y == group.metric == "accuracy"
            else None
        )
        others = [row for row in rows if row.label != group.baseline]
        apart = differences(group, others, y)
        if len(apart) == len(others) and lie_together(bands, apart):
            rows = others
            bands = apart
            goal = 0.0
            label = f"{_ABOVE[y]} {group.row(group.baseline).name}"
        caption = analysis.panel_title(group.title, group.runs)
        panels.append(
            analysis.Panel(caption, lines_of(rows, looks, bands), y_label=label, goal=goal)
        )
    goals = [panel.goal for panel in panels]
    note = (
        analysis.CAPTION
        + " Dashed: the threshold." * any(goals)
        + TEXTS["pages"]["differences"] * (0.0 in goals)
    )
    analysis.draw_panels(panels, columns, note, path)


def _drawn(group: Group) -> list[Row]:
    """The rows of a picture, as many as have a colour: those that the paper orders, ours,
    others, then variants.
    """
    first = {*group.order, group.baseline}
    known = {analysis.base_name(label) for label in first}

    def rank(label: str) -> tuple[bool, bool, bool]:
        name = analysis.base_name(label)
        return label not in first, name in known, not is_ours(name)

    ranked = sorted(group.labels, key=rank)
    return [row for row in group.rows if row.label in ranked[:MOST_STRONG]]


def differences(group: Group, rows: Sequence[Row], y: str) -> list[analysis.Band]:
    """Bands of what each row is above the baseline, paired by seed: moving averages over a tenth
    of the evaluations.
    """
    base = group.row(group.baseline).runs

    def above(run: analysis.Run) -> tuple[IntArray, FloatArray]:
        pair = run, base[run.seed]
        own, other = (curve_band([each], y, max(1, len(each.round_r) // 10)) for each in pair)
        shared_r, i, j = np.intersect1d(own.round_r, other.round_r, return_indices=True)
        return shared_r, own.mean_r[i] - other.mean_r[j]

    paired = [[above(run) for seed, run in row.runs.items() if seed in base] for row in rows]
    return [analysis.band_of(curves) for curves in paired if curves]


def lie_together(bands: Sequence[analysis.Band], apart: Sequence[analysis.Band]) -> bool:
    """Whether each difference is, in half of the rounds, below a line's width: a twenty-fifth of
    the panel's height.
    """
    if not all(np.isfinite(band.mean_r).any() for band in (*bands, *apart)):
        return False
    means = np.concatenate([band.mean_r for band in bands])
    widest = max((float(np.nanmedian(np.abs(band.mean_r))) for band in apart), default=np.inf)
    return bool(widest < (np.nanmax(means) - np.nanmin(means)) / 25)
