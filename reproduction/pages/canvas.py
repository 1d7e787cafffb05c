"""The canvas of a page's pictures: panels of lines with one legend below, saved as a small PNG."""

import io
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltafl.analysis import plot_style
from deltafl.analysis.plot_curves import Band
from deltafl.analysis.plot_style import DPI, GREY, PALE, WIDTH, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Points of one curve in a picture; more would only make the file larger.
_MOST_POINTS = 500


class Line(NamedTuple):
    """One curve: its name, its look, its values over seeds."""

    name: str
    look: Look
    band: Band


def draw_panels(
    panels: Sequence[Sequence[Line]],
    captions: Sequence[str],
    columns: int,
    note: str,
    path: Path,
    *,
    log: bool = False,
    goals: Sequence[float | None] = (),
) -> None:
    """Draw panels of lines, with captions, a note, perhaps a dashed goal in each, and save them."""
    with styled():
        figure, all_axes = grid(len(panels), columns, legend_rows([line.name for lines in panels for line in lines]))
        for i, (axes, lines, caption) in enumerate(zip(all_axes, panels, captions, strict=True)):
            for line in lines:
                _draw_line(axes, line)
            if log:
                _log_axis(axes, lines)
            if goals and (goal := goals[i]) is not None:
                axes.axhline(100 * goal, color=GREY, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1.5)
            axes.set_title(caption, fontsize=8)
            axes.set_xlim(left=0)
            axes.locator_params(axis="x", integer=True)
        for axes in all_axes[-columns:]:
            axes.set_xlabel("rounds")
        finish(figure, all_axes, note, path)


def _log_axis(axes: "Axes", lines: Sequence[Line]) -> None:
    """A logarithmic axis, unless the numbers are not positive or span less than a factor of 3."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    means = np.concatenate([line.band.mean_r for line in lines])
    means = means[np.isfinite(means)]
    if len(means) and means.min() > 0 and means.max() >= 3 * means.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))


def _draw_line(axes: "Axes", line: Line) -> None:
    round_r, mean_r, low_r, high_r = (_thin(column) for column in line.band)
    look = line.look
    axes.fill_between(round_r, low_r, high_r, color=look.colour, alpha=0.13, linewidth=0, zorder=1.5)
    marker = "o" if len(round_r) == 1 else ""
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.dash, "zorder": look.zorder, "marker": marker}
    axes.plot(round_r, mean_r, linewidth=1.2 if len(round_r) <= 150 else 0.8, label=line.name, **style)


def grid(number: int, columns: int, legend_rows: int) -> tuple["Figure", "list[Axes]"]:
    """A figure of panels in rows, with room for the legend below."""
    from matplotlib.figure import Figure

    rows = math.ceil(number / columns)
    below = 0.62 + 0.2 * legend_rows
    height = (2.0 if columns > 1 else 3.0) * rows + 0.35 * (rows - 1) + 0.3 + below
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    figure.subplots_adjust(
        left=0.075, right=0.985, top=1 - 0.3 / height, bottom=below / height, wspace=0.16 + 0.05 * columns, hspace=0.35
    )
    for unused in axes[number:]:
        unused.set_visible(False)
    return figure, axes[:number]


def legend_rows(names: Sequence[str]) -> int:
    """Rows that a legend of these names needs."""
    return math.ceil(len(set(names)) / _legend_columns(names))


def _legend_columns(names: Sequence[str]) -> int:
    # A letter of the legend is about 0.065 inches wide, its key 0.45.
    widest = 0.5 + 0.063 * max(len(name) for name in names)
    return max(1, min(len(set(names)), int((WIDTH - 0.2) / widest)))


def finish(figure: "Figure", panels: "Sequence[Axes]", note: str, path: Path) -> None:
    """One legend for all panels, the note below, the file."""
    handles: dict[str, Any] = {}
    for axes in panels:
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(name), handle)
    height = figure.get_figheight()
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="lower left",
        bbox_to_anchor=(0.005, 0.2 / height),
        ncol=_legend_columns(list(handles)),
        frameon=False,
        fontsize=7.5,
        columnspacing=1.2,
        handlelength=2.4,
    )
    for key in legend.get_lines():
        key.set_linewidth(1.6)
    figure.text(0.012, 0.06 / height, note, fontsize=7, color=GREY)
    path.write_bytes(small_png(figure))


def small_png(figure: "Figure") -> bytes:
    """The figure in a palette of 256 colours: a third of the bytes, and no difference that is seen."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    # Nothing of Matplotlib's or Pillow's versions is in the file, so that a rebuild elsewhere differs in pixels only.
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def styled() -> AbstractContextManager[None]:
    """The style of all pictures, in the size that fits a page's panels."""
    return plot_style.styled({"font.size": 8.0})


def _thin(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """At most so many points as can be seen; the last one stays."""
    step = math.ceil(len(column) / _MOST_POINTS)
    return column[(len(column) - 1) % step :: step]
