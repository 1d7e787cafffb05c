"""The benchmark's pictures: curves over rounds and bytes, gaps closed, one-round errors beside the least possible."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltafl.analysis.plots import DPI, GREY, INK, PALE, WIDTH, Look, looks
from deltafl.analysis.statistics import WINDOW
from deltafl.samplers import is_unbiased
from deltafl.types import FloatArray

from ..pages.canvas import finish, grid, legend_rows, small_png, styled
from ..pages.figures import curve_band
from .gap import Gap
from .judge import gap_of, is_ours, measures, needs
from .numbers import MB
from .parts import BASELINE, FULL
from .results import Method, Result
from .tables import by_rounds, probed
from .target import GOAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _RIGHT = -0.5, 1.25  # what is seen of G
_HOLLOW = "white"
_KEY = "Line: 95 % interval. Hollow: biased. Square: knows the labels. Triangle: beyond the axis, or a bound."


def draw_curves(result: Result, labels: Sequence[str], path: Path) -> None:
    """Mean test accuracy over rounds and over bytes, with a band from the least to the greatest seed."""
    methods = [method for method in result.shown if method.label in labels]
    ours_first = sorted((method.label for method in methods), key=lambda label: not is_ours(label))
    look_of = looks(ours_first)
    with styled():
        figure, (left, right) = grid(2, 2, legend_rows([method.label for method in methods]))
        most, smooth = 0.0, WINDOW if result.part.horizon >= 10 * WINDOW else 1
        for method in methods:
            band = curve_band(list(method.runs.values()), "accuracy", smooth)
            byte_r = _bytes_at(method, band.round_r) / MB
            most = max(most, 0.0 if method.label == FULL else float(byte_r[-1]))
            for axes, x_r in ((left, band.round_r), (right, byte_r)):
                _curve(axes, x_r, (band.mean_r, band.low_r, band.high_r), method.label, look_of)
        for axes in (left, right):
            axes.axhline(100 * result.part.threshold, color=GREY, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1.5)
        left.set_xlim(0)
        right.set_xlim(0, 1.05 * most or None)
        left.set_title("test accuracy, %, over rounds", fontsize=8)
        right.set_title("over megabytes, both ways", fontsize=8)
        note = f"{result.part.title}. Line: mean over seeds. Band: lowest to highest seed. Dashed: the threshold."
        note += f" Moving average over {smooth} evaluations." if smooth > 1 else ""
        finish(figure, [left, right], note, path)


def _curve(axes: "Axes", x_r: Any, columns: tuple[Any, Any, Any], label: str, look_of: dict[str, Look]) -> None:
    mean_r, low_r, high_r = columns
    look = look_of[label]
    axes.fill_between(x_r, low_r, high_r, color=look.colour, alpha=0.08, linewidth=0, zorder=1.5)
    axes.plot(x_r, mean_r, color=look.colour, linestyle=look.dash, linewidth=1.1, zorder=look.zorder, label=label)


def _bytes_at(method: Method, round_r: Any) -> FloatArray:
    """Mean bytes over seeds at rounds that all of them evaluated."""
    rows = []
    for record in method.runs.values():
        run = record.run()
        rows.append(run.bytes_r[np.isin(run.round_r, round_r)])
    mean_r: FloatArray = np.mean(rows, axis=0)
    return mean_r


def draw_methods(result: Result, path: Path) -> None:
    """All methods of a part, best first: G with its interval, and the error beside a lower bound without a control."""
    from matplotlib.figure import Figure

    methods = by_rounds(result)
    rounds = measures(result.part)[0]
    gaps = [gap_of(result, method.label, rounds) for method in methods]
    errors = [(probed(method, "error"), probed(method, "least_error")) for method in methods]
    with styled():
        height = 1.1 + 0.17 * len(methods)
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
        left, right = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(left=0.24, right=0.985, top=1 - 0.3 / height, bottom=0.65 / height, wspace=0.08)
        _gap_axis(left, gaps, [method.label for method in methods])
        _error_axis(right, errors)
        left.set_yticks(range(len(methods)), [method.label for method in methods], fontsize=7)
        left.set_ylim(len(methods) - 0.4, -0.6)
        left.set_title(f"{result.part.title}: gap closed, G", fontsize=8)
        right.set_title("one-round error", fontsize=8)
        note = f"{_KEY}\nDashed: the target. Bar beside an error: a lower bound for it, without a control."
        figure.text(0.012, 0.06 / height, note, fontsize=7, color=GREY)
        path.write_bytes(small_png(figure))


def draw_gaps(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    """G of the core methods, a panel for each part."""
    from matplotlib.figure import Figure

    shown = [label for label in labels if label not in (BASELINE, FULL) and any(r.find(label) for r in results)]
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    with styled():
        height = rows * (0.45 + 0.19 * max(len(shown), 1)) + 0.6
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        figure.subplots_adjust(
            left=0.2, right=0.985, top=1 - 0.3 / height, bottom=0.6 / height, wspace=0.1, hspace=0.35
        )
        for axes, result in zip(panels, results, strict=False):
            rounds = measures(result.part)[0]
            gaps = [gap_of(result, label, rounds) for label in shown]
            _gap_axis(axes, gaps, shown)
            axes.set_title(result.part.title, fontsize=6.5)
        for unused in panels[len(results) :]:
            unused.set_visible(False)
        for first in panels[::columns]:
            first.set_yticks(range(len(shown)), shown, fontsize=7)
        panels[0].set_ylim(len(shown) - 0.4, -0.6)
        note = f"Gap closed G: 0 is uniform sampling, 1 full participation. Dashed: the target.\n{_KEY}"
        figure.text(0.012, 0.06 / height, note, fontsize=7, color=GREY)
        path.write_bytes(small_png(figure))


def _gap_axis(axes: "Axes", gaps: Sequence[Gap], labels: Sequence[str]) -> None:
    """Dots with intervals; what lies outside the axis is drawn at its edge."""
    for place, (gap, label) in enumerate(zip(gaps, labels, strict=True)):
        if gap.value is None:
            continue
        x = min(max(gap.value, _LEFT), _RIGHT)
        if gap.low is not None and gap.high is not None:
            ends = [min(max(end, _LEFT), _RIGHT) for end in (gap.low, gap.high)]
            axes.plot(ends, [place, place], color=GREY, linewidth=1.0, zorder=2)
        inside = "s" if needs(label) == "known" else "o"
        marker = "<" if gap.bound == "≤" else inside if gap.value == x else "<" if x == _LEFT else ">"
        axes.plot([x], [place], marker, markersize=4, mfc=INK if is_unbiased(label) else _HOLLOW, mec=INK, zorder=3)
    for x, dash in ((0.0, "-"), (1.0, "-"), (GOAL, (0, (5, 3)))):
        axes.axvline(x, color=GREY if x == GOAL else PALE, linewidth=0.8, linestyle=dash, zorder=1)
    if not any(gap.value is not None for gap in gaps):
        axes.text(0.5, 0.5, "no gap", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_xlim(_LEFT - 0.05, _RIGHT + 0.05)
    axes.grid(axis="y", color=PALE, linewidth=0.4)


def _error_axis(axes: "Axes", errors: Sequence[tuple[float | None, float | None]]) -> None:
    """Dots for the error, bars for the lower bound without a control, on a log axis; errors of 0 are left out."""
    known = [value for pair in errors for value in pair if value is not None and value > 0]
    for place, (error, least) in enumerate(errors):
        if error is not None and error > 0:
            axes.plot([error], [place], "o", color=INK, markersize=4, zorder=3)
        if least is not None and least > 0:
            axes.plot([least], [place], "|", color=INK, markersize=7, zorder=3)
    if known:
        axes.set_xscale("log")
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
    axes.grid(color=PALE, linewidth=0.4)
