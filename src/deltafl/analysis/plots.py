"""Pictures: curves with bands over seeds, and how often each client was selected. Needs Matplotlib.

Figures are made with the object-oriented interface and the Agg canvas, so no window, no global
figure and no ``matplotlibrc`` of the user plays a part: the same runs give the same bytes.
"""

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require
from ..samplers import base_name
from ..types import FloatArray
from .looks import GREY, INK, MOST_STRONG, PALE, WEAK, Look, looks
from .runs import Run, by_sampler
from .summary import Summary, ranked, references

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Dots an inch, and the width of a figure in inches.
DPI = 150
WIDTH = 7.2
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.0,
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
}
METRICS = {"accuracy": "test accuracy, %", "loss": "test loss"}
#: What curves are drawn over.
OVER = {
    "round": "rounds",
    "bytes": "megabytes sent and received",
    "seconds": "seconds of training",
    "clock": "seconds of the virtual clock",
}
#: The axis of clients in ``selections``.
SELECTED_FIRST = "clients, the most often selected first"
#: What ``draw_plots`` writes.
PICTURES = ("accuracy.png", "loss.png", "selections.png")
#: What lines and bands are.
CAPTION = "Line: mean over seeds. Band: from the lowest to the highest seed."


class Band(NamedTuple):
    """One method's curve over seeds at the rounds that all its seeds evaluated: (r,) each."""

    round_r: npt.NDArray[Any]
    mean_r: FloatArray
    low_r: FloatArray
    high_r: FloatArray


class Line(NamedTuple):
    """One curve of a panel."""

    name: str
    look: Look
    band: Band


class Panel(NamedTuple):
    """Lines in one pair of axes, below a caption, perhaps with a dashed goal."""

    caption: str
    lines: Sequence[Line]
    x_label: str = "rounds"
    y_label: str = ""
    goal: float | None = None


def draw_plots(runs: Sequence[Run], summary: Summary, directory: Path | str) -> list[Path]:
    """Draw the pictures of a comparison.

    ``accuracy.png`` (left out for a task without accuracy) and ``loss.png``: mean over seeds with a
    band from the least to the greatest seed and, for the metric of the comparison, the threshold;
    over rounds, and over the virtual clock if there is one. ``selections.png``: how often each
    client was drawn, clients sorted by that.

    Returns the files written into ``directory``, which is made if it does not exist.
    """
    paths = [Path(directory) / name for name in PICTURES]
    drawn = [
        draw_curves(runs, summary, "accuracy", paths[0]),
        draw_curves(runs, summary, "loss", paths[1]),
    ]
    drawn += [_draw_selections(_first_in_colour(runs, summary), paths[2])]
    return [path for path, figure in zip(paths, drawn, strict=True) if figure is not None]


def draw_curves(
    runs: Sequence[Run], summary: Summary, metric: str, path: Path | None = None
) -> "Figure | None":
    """Draw the curves of a metric, as ``draw_panels`` does; None if no run has an accuracy."""
    groups = _first_in_colour(runs, summary)
    look_of = looks(list(groups))
    lines = [
        Line(label, look_of[label], curve_band(group, metric)) for label, group in groups.items()
    ]
    drawn = [line for line in lines if np.isfinite(line.band.mean_r).any()]
    if not drawn and metric == "accuracy":
        return None
    missing = [line.name for line in lines if line not in drawn]
    note = CAPTION + (f" Never finite: {', '.join(missing)}." if missing else "")
    goal = goal_of(summary) if metric == summary.metric else None
    note += (
        "" if goal is None else f" Dashed: {goal:g}{' %' * (metric == 'accuracy')}, the threshold."
    )
    panels = [Panel(panel_title("", runs), drawn, OVER["round"], METRICS[metric], goal)]
    if runs[0].clock_r is not None:
        by_clock = [
            line._replace(band=line.band._replace(round_r=mean_clock(groups[line.name])))
            for line in drawn
        ]
        panels.append(Panel("", by_clock, OVER["clock"], METRICS[metric], goal))
    return draw_panels(panels, len(panels), note, path, log_y=metric == "loss")


def goal_of(summary: Summary) -> float | None:
    """Where the threshold lies on the axis of the metric, accuracy in percent."""
    goal = summary.threshold
    return 100 * goal if goal is not None and summary.metric == "accuracy" else goal


def mean_clock(runs: Sequence[Run]) -> FloatArray:
    """Mean over seeds of the virtual clock at the rounds of ``curve_band``."""
    return band_of([(run.round_r, run.clock_r) for run in runs if run.clock_r is not None]).mean_r


def _first_in_colour(runs: Sequence[Run], summary: Summary) -> dict[str, list[Run]]:
    """The runs by sampler: full participation and uniform sampling, then the best."""
    groups = by_sampler(runs)
    ends = references(summary)
    order = sorted(
        (entry.sampler for entry in ranked(summary)), key=lambda label: label not in ends
    )
    return {label: groups[label] for label in order}


def band_of(curves: Sequence[tuple[npt.NDArray[Any], FloatArray]]) -> Band:
    """The band of several curves, each its rounds and its values, at the rounds that all of them
    have.
    """
    shared = curves[0][0]
    for round_r, _ in curves[1:]:
        shared = np.intersect1d(shared, round_r)
    value_sr = np.array(
        [value_r[np.isin(round_r, shared)] for round_r, value_r in curves], dtype=np.float64
    )
    value_sr[:, ~np.isfinite(value_sr).all(axis=0)] = np.nan
    return Band(shared, value_sr.mean(axis=0), value_sr.min(axis=0), value_sr.max(axis=0))


def curve_band(runs: Sequence[Run], y: str, smoothing: int = 1) -> Band:
    """Mean and range over seeds of ``accuracy`` (in percent), ``loss`` or ``log10-loss``, as a
    moving average.
    """
    curve_of: dict[str, Callable[[Run], FloatArray]] = {
        "accuracy": lambda run: 100 * run.accuracy_r,
        "loss": lambda run: run.loss_r,
        "log10-loss": lambda run: np.log10(run.loss_r),
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        return band_of([(run.round_r, _smooth(curve_of[y](run), smoothing)) for run in runs])


def _smooth(value_r: FloatArray, window: int) -> FloatArray:
    """Moving average of each evaluation and those before it; shorter at the beginning."""
    if window == 1:
        return value_r
    sums = np.cumsum(np.concatenate([[0.0], value_r]))
    end_r = np.arange(1, len(value_r) + 1)
    begin_r = np.maximum(end_r - window, 0)
    smooth_r: FloatArray = (sums[end_r] - sums[begin_r]) / (end_r - begin_r)
    return smooth_r


def draw_panels(
    panels: Sequence[Panel],
    columns: int,
    note: str,
    path: Path | None = None,
    *,
    log_y: bool = False,
    log_x: bool = False,
) -> "Figure":
    """Draw panels with a legend and a note below them, and save them if there is a path.

    The first 6 lines of a panel are in colour; a name that is beyond that in one panel is grey in
    all.

    ``log_y`` makes an axis logarithmic unless its numbers are not positive or span less than a
    factor of 3.
    """
    weak = {line.name for panel in panels for line in panel.lines[MOST_STRONG:]}
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    # A letter of the legend is about 0.063 inches wide, its key 0.5.
    names_a_row = max(1, int((WIDTH - 0.2) / (0.5 + 0.063 * max(map(len, names), default=0))))
    rows = math.ceil(len(panels) / columns)
    height = (
        (2.35 if columns > 1 else 3.35) * rows + 0.2 * math.ceil(len(names) / names_a_row) + 0.4
    )
    with styled():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white", layout="constrained")
        all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[Any, Any] = {}
        for axes, panel in zip(all_axes, panels, strict=False):
            for line in panel.lines:
                look = line.look.weak if line.name in weak else line.look
                handles.setdefault(line.name, _draw_line(axes, line.band, look))
            if log_y:
                _log_axis(axes, panel.lines)
            if panel.goal is not None:
                axes.axhline(
                    panel.goal, color=GREY, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1.5
                )
            axes.set_title(_filled(panel.caption, WIDTH / columns / 0.07))
            axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
            axes.grid(axis="y", color=PALE, linewidth=0.6)
            if log_x:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            else:
                axes.set_xlim(left=0)
                axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        for unused in all_axes[len(panels) :]:
            unused.set_visible(False)
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower left",
            ncols=names_a_row,
            title=_filled(note, WIDTH / 0.0525),
            title_fontsize=7,
            alignment="left",
            frameon=False,
            fontsize=7.5,
            columnspacing=1.2,
            handlelength=2.4,
        )
        if path is not None:
            save(figure, path)
    return figure


def _filled(text: str, letters: float) -> str:
    """Lines that are not longer: a letter of a title is about 0.07 inches wide, one of a note
    0.0525.
    """
    return "\n".join(textwrap.fill(line, int(letters)) for line in text.split("\n"))


def _log_axis(axes: "Axes", lines: Sequence[Line]) -> None:
    from matplotlib.ticker import LogFormatter

    class PlainFormatter(LogFormatter):
        """Labels the same ticks, 0.00006 as 0.00006."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return (
                np.format_float_positional(x, 3, fractional=False, trim="-")
                if super().__call__(x, pos)
                else ""
            )

    means = np.concatenate([line.band.mean_r for line in lines] or [np.empty(0)])
    means = means[np.isfinite(means)]
    if len(means) and means.min() > 0 and means.max() >= 3 * means.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PlainFormatter())
        axes.yaxis.set_minor_formatter(PlainFormatter(minor_thresholds=(2, 0.4)))


def _draw_line(axes: "Axes", band: Band, look: Look) -> Any:
    x_r, mean_r, low_r, high_r = band
    if look.colour != WEAK:
        axes.fill_between(
            x_r, low_r, high_r, color=look.colour, alpha=0.13, linewidth=0, zorder=1.5
        )
    (drawn,) = axes.plot(
        x_r,
        mean_r,
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.2 if len(x_r) <= 150 else 0.8,
        marker=look.marker,
        markersize=3.2,
        markevery=max(1, len(x_r) // 8),
        zorder=look.zorder,
    )
    return drawn


def selections(groups: dict[str, list[Run]]) -> dict[str, Band]:
    """How often clients were selected, sorted within a run; without ``full``, which selects
    everyone, every time.
    """
    bands = {}
    for label, group in groups.items():
        if base_name(label) != "full":
            client_m = np.arange(1, len(group[0].draws_m) + 1)
            bands[label] = band_of(
                [(client_m, np.sort(run.draws_m)[::-1].astype(np.float64)) for run in group]
            )
    return bands


def selections_by_size(runs: Sequence[Run], groups: int = 10) -> Band | None:
    """How often clients were selected by their size: tenths of the clients of all seeds, with their
    middle 80 %.

    None if sizes were not recorded, or are all the same.
    """
    sizes = [run.num_examples_m for run in runs if run.num_examples_m is not None]
    if len(sizes) < len(runs) or np.ptp(size_c := np.concatenate(sizes)) == 0:
        return None
    draws_c = np.concatenate([run.draws_m for run in runs]).astype(np.float64)
    tenths = [
        part for part in np.array_split(np.argsort(size_c, kind="stable"), groups) if len(part)
    ]
    ends = np.array([np.quantile(draws_c[part], [0.1, 0.9]) for part in tenths])
    means = [np.array([column[part].mean() for part in tenths]) for column in (size_c, draws_c)]
    return Band(means[0], means[1], ends[:, 0], ends[:, 1])


def client_accuracies(runs: Sequence[Run]) -> Band | None:
    """Accuracy of the worst q percent of the clients' best, q = 0 to 100, over seeds; None if it
    was not recorded.
    """
    known = [
        run.accuracy_km for run in runs if run.accuracy_km is not None and run.fairness is not None
    ]
    if len(known) < len(runs):
        return None
    percent = np.linspace(0, 100, 101)
    return band_of(
        [
            (percent, 100 * np.nanpercentile(row_km, percent, axis=1).mean(axis=1))
            for row_km in known
        ]
    )


def panel_title(title: str, runs: Sequence[Run]) -> str:
    """A title, and below it the task of the runs, its m clients, and the n of a round."""
    task = str(runs[0].settings.get("task", ""))
    is_named = task.replace("-", "") in title.lower().replace("-", "")
    setting = ["" if is_named else task, f"m = {len(runs[0].draws_m):,}"]
    setting += [f"n = {n}"] if (n := _samples(runs)) else []
    return "\n".join(filter(None, [title, ", ".join(filter(None, setting))]))


def setting_text(runs: Sequence[Run]) -> str:
    """How many clients there are, how many of them are asked, and the seeds, for a title."""
    seeds = len({run.seed for run in runs})
    asked = f", {n} selected a round" if (n := _samples(runs)) else ""
    return f"{len(runs[0].draws_m):,} clients{asked}, {seeds} {'seed' if seeds == 1 else 'seeds'}"


def _samples(runs: Sequence[Run]) -> str:
    """How many clients are selected a round; several numbers where runs differ in it."""
    return ", ".join(
        str(n) for n in dict.fromkeys(run.settings.get("sample") for run in runs) if n is not None
    )


def _draw_selections(groups: dict[str, list[Run]], path: Path) -> "Figure | None":
    """Counts of each client, sorted within a run and averaged over seeds, one line a sampler;
    None for full alone.
    """
    bands = selections(groups)
    look_of = looks(list(groups))
    if not bands:
        return None
    lines = [Line(label, look_of[label], band) for label, band in bands.items()]
    never = {label: float(np.mean([run.draws_m == 0 for run in groups[label]])) for label in bands}
    shares = ", ".join(
        f"{label} {100 * share:.0f} %" for label, share in never.items() if share > 0
    )
    note = CAPTION + (f" Clients never selected: {shares}." if shares else "")
    title = panel_title("", next(iter(groups.values())))
    return draw_panels(
        [Panel(title, lines, SELECTED_FIRST, "times selected")], 1, note, path, log_y=True
    )


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as the kind of picture that the file's name ends in."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise DeltaflError(
            f"{path.name} names no kind of picture; end it in "
            f"{', '.join('.' + name for name in known)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        path.write_bytes(small_png(figure))
    else:
        figure.savefig(path)


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's defaults with the style of these pictures, whatever the user's own settings
    are.
    """
    require("matplotlib", "plot")
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def small_png(figure: "Figure") -> bytes:
    """The figure in a palette of 256 colours: a third of the bytes, and no difference that is
    seen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    small = io.BytesIO()
    canvas.draw()  # type: ignore[no-untyped-call]  # once; savefig draws to find the layout, and again
    drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(drawn).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    # Nothing of Matplotlib's or Pillow's versions is in the file, so that a rebuild elsewhere
    # differs in pixels only.
    image.save(small, format="png", optimize=True)
    return small.getvalue()
