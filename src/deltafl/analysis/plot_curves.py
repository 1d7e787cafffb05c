"""The curves of a comparison: mean over seeds with a band, threshold, names at the ends of the lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..types import FloatArray, IntArray
from .curves import Metric, Run
from .plot_style import DPI, GREY, PALE, WIDTH, Look
from .remarks import threshold_text
from .schema import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Band(NamedTuple):
    """One sampler's curve over seeds at the rounds that all its seeds evaluated: (r,) each."""

    round_r: IntArray
    mean_r: FloatArray
    low_r: FloatArray
    high_r: FloatArray


def mean_band(runs: Sequence[Run], metric: Metric) -> Band:
    """Mean, least and greatest value of one sampler's seeds at the rounds that all of them evaluated.

    A value that is not finite in one seed makes a hole there: the mean of the others would look better than it was.
    """
    shared = runs[0].round_r
    for run in runs[1:]:
        shared = np.intersect1d(shared, run.round_r)
    rows = []
    for run in runs:
        value_r = run.accuracy_r if metric == "accuracy" else run.loss_r
        rows.append(value_r[np.isin(run.round_r, shared)])
    value_sr = np.array(rows, dtype=np.float64)
    value_sr[:, ~np.isfinite(value_sr).all(axis=0)] = np.nan
    return Band(shared, value_sr.mean(axis=0), value_sr.min(axis=0), value_sr.max(axis=0))


def curves_figure(groups: dict[str, list[Run]], look_of: dict[str, Look], summary: Summary, metric: Metric) -> "Figure":
    """Test accuracy in percent, or test loss, over rounds; loss on a log axis if it spans more than a factor of 10."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.3), dpi=DPI, facecolor="white")
    # The names stand right of the curves, so the longest one decides how much room the curves have.
    right = min((36 + 4.9 * max(len(label) for label in groups)) / (72 * WIDTH), 0.4)
    axes = figure.add_axes((0.075, 0.165, 0.925 - right, 0.75))
    scale = 100.0 if metric == "accuracy" else 1.0
    bands = {label: mean_band(group, metric) for label, group in groups.items()}
    bands = {label: band for label, band in bands.items() if np.isfinite(band.mean_r).any()}
    for label, band in bands.items():
        _draw_band(axes, band, look_of[label], scale)
    if metric == "loss" and _wants_log(list(bands.values())):
        axes.set_yscale("log")
    if metric == summary.metric and summary.threshold is not None:
        _draw_threshold(axes, scale * summary.threshold, f"threshold {threshold_text(summary).removeprefix('loss ')}")
    axes.set_xlim(0, max(run.num_rounds for group in groups.values() for run in group))
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("rounds")
    axes.set_title("Test accuracy, %" if metric == "accuracy" else "Test loss", pad=8)
    _label_ends(axes, bands, look_of, scale)
    figure.text(0.012, 0.02, _seeds_caption(groups, bands), fontsize=7, color=GREY)
    return figure


def _draw_band(axes: "Axes", band: Band, look: Look, scale: float) -> None:
    # Many noisy evaluations would melt into a thick ribbon.
    width = 1.4 if len(band.round_r) <= 400 else 0.8
    low_r, mean_r, high_r = scale * band.low_r, scale * band.mean_r, scale * band.high_r
    axes.fill_between(band.round_r, low_r, high_r, color=look.colour, alpha=0.13, linewidth=0, zorder=1.5)
    axes.plot(
        band.round_r,
        mean_r,
        color=look.colour,
        linestyle=look.dash,
        linewidth=width,
        marker="o" if len(band.round_r) == 1 else "",
        zorder=look.zorder,
    )


def _wants_log(bands: Sequence[Band]) -> bool:
    """Whether the mean losses are positive and span more than a factor of 10."""
    means = [band.mean_r[np.isfinite(band.mean_r)] for band in bands]
    lows = [band.low_r[np.isfinite(band.low_r)] for band in bands]
    if not means or min(float(low.min()) for low in lows) <= 0:
        return False
    return max(float(mean.max()) for mean in means) > 10 * min(float(mean.min()) for mean in means)


def _draw_threshold(axes: "Axes", value: float, text: str) -> None:
    from matplotlib.patheffects import withStroke

    axes.axhline(value, color=GREY, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1.5)
    axes.annotate(
        text,
        xy=(0, value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color=GREY,
        zorder=3,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _label_ends(axes: "Axes", bands: dict[str, Band], look_of: dict[str, Look], scale: float) -> None:
    """Write each name right of the end of its curve, moved up or down so that no two overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends: list[tuple[float, float]] = []
    for band in bands.values():
        last = int(np.flatnonzero(np.isfinite(band.mean_r))[-1])
        x, y = to_axes.transform((band.round_r[last], scale * band.mean_r[last]))
        ends.append((float(x), float(y)))
    places = spread([y for _, y in ends], gap=0.044, low=0.0, high=1.0)
    for label, (x, y), place in zip(bands, ends, places, strict=True):
        colour, dash, _ = look_of[label]
        # A pale line leads from the curve to its key, so that crossing lines stay quiet.
        lead, key = ([x, 1.03], [y, place]), ([1.03, 1.07], [place, place])
        axes.plot(*lead, transform=axes.transAxes, color=colour, linewidth=0.6, alpha=0.6, clip_on=False)
        axes.plot(*key, transform=axes.transAxes, color=colour, linestyle=dash, linewidth=1.6, clip_on=False)
        axes.text(1.08, place, label, transform=axes.transAxes, fontsize=8, va="center")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as simple pushing gets to the given ones, at least ``gap`` apart, in their order.

    Places that cannot all keep the gap between ``low`` and ``high`` share the room evenly.
    """
    order = np.argsort(places, kind="stable")
    gap = min(gap, (high - low) / max(len(places) - 1, 1))
    step_k = gap * np.arange(len(places))
    # Without the gaps the order alone matters: isotonic regression puts each group that collides at its mean.
    blocks: list[tuple[float, int]] = []
    for wanted in np.asarray(places, dtype=np.float64)[order] - step_k:
        mean, size = float(wanted), 1
        while blocks and blocks[-1][0] > mean:
            other, other_size = blocks.pop()
            mean, size = (mean * size + other * other_size) / (size + other_size), size + other_size
        blocks.append((mean, size))
    moved = np.concatenate([np.full(size, mean) for mean, size in blocks]) if blocks else np.empty(0)
    moved = np.clip(moved, low, high - gap * max(len(places) - 1, 0)) + step_k
    result = np.empty(len(places))
    result[order] = moved
    return [float(place) for place in result]


def _seeds_caption(groups: dict[str, list[Run]], bands: dict[str, Band]) -> str:
    counts = [len(group) for group in groups.values()]
    if max(counts) == 1:
        text = "One seed."
    else:
        number = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        text = f"Line: mean over {number} seeds. Band: from the lowest to the highest seed."
    missing = [label for label in groups if label not in bands]
    ended = [label for label in bands if any(run.diverged for run in groups[label])]
    text += f" Ends where a seed diverged: {', '.join(ended)}." if ended else ""
    return f"{text} Never finite: {', '.join(missing)}." if missing else text
