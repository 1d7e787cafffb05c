"""Pictures: curves with bands over seeds, and how often each client was selected. Needs Matplotlib.

Figures are made with the object-oriented interface and the Agg canvas, so no window, no global
figure and no ``matplotlibrc`` of the user plays a part: the same runs give the same bytes.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError, counted, printable, require, unknown_name
from ..server.table import sized_by
from ..store.files import name_for_file, write_with_folder
from ..types import FloatArray, judge_of
from .bands import Band, band_of, curve_band, selections
from .look import GREY, INK, MOST_STRONG, PALE, WEAK, Look, looks
from .numbers import Summary
from .runs import PICTURES, Run, by_sampler
from .summary import ranked, references
from .text import goal_text

#: Matplotlib's classes, which is an optional package and is imported where something is drawn.
Figure = Any
Axes = Any
#: Dots an inch, and the width of a figure in inches.
DPI = 150
#: Letters of a name in a legend or a title.
_LONGEST_NAME = 60
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
    "text.parse_math": False,  # a dollar in a name is a dollar
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
}


class Abscissa(NamedTuple):
    """What curves are drawn over: its label, and the numbers of a run, None if they were not
    recorded.
    """

    label: str
    of: Callable[[Run], Any]

    def mean(self, runs: Sequence[Run]) -> FloatArray:
        """Mean over seeds at the rounds of ``curve_band``."""
        return band_of([(run.round_r, self.of(run)) for run in runs]).mean_r


#: By the names that users type.
ABSCISSAE = {
    "rounds": Abscissa("rounds", lambda run: run.round_r),
    "trainings": Abscissa("trainings of clients", lambda run: run.trainings_r),
    "bytes": Abscissa("megabytes sent and received", lambda run: 1e-6 * run.bytes_r),
    "seconds": Abscissa("seconds of training", lambda run: run.seconds_r),
    "clock": Abscissa("seconds of the virtual clock", lambda run: run.clock_r),
    "cost": Abscissa("cost of the clients asked", lambda run: run.cost_r),
}
#: The axis of clients in ``selections``.
SELECTED_FIRST = "clients, the most often selected first"
#: What lines and bands are.
CAPTION = "Line: mean over seeds. Band: from the lowest to the highest seed."


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


def draw_plots(
    runs: Sequence[Run],
    summary: Summary,
    directory: Path | str,
) -> list[Path]:
    """Draw the pictures of a comparison.

    ``accuracy.png`` (left out for a task without accuracy), ``loss.png`` and those of other
    metrics, such as ``roc_auc.png``: mean over seeds with a band from the least to the greatest
    seed and, for the metric of the comparison, the threshold; over rounds, and over the virtual
    clock if there is one. ``selections.png``: how often each client was drawn, clients sorted by
    that.

    Returns the files written into ``directory``, which is made if it does not exist.
    """
    folder = Path(directory)
    drawn = dict[Path, Figure | None]()
    for metric in metrics_of(runs):
        path = folder / f"{name_for_file(metric)}.png"
        drawn[path] = draw_curves(runs, summary, metric, path)
    selected = folder / PICTURES[-1]
    drawn[selected] = _draw_selections(runs, summary, selected)
    return [path for path, figure in drawn.items() if figure is not None]


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """The names of the metrics that runs may know."""
    return list(dict.fromkeys(["accuracy", "loss", *runs[0].others_r]))


def draw_curves(
    runs: Sequence[Run],
    summary: Summary,
    metric: str,
    path: Path | None = None,
    over: str | None = None,
) -> Figure | None:
    """Draw the curves of a metric, as ``draw_panels`` does; None if no run has a number of it, but
    for the loss.

    ``over`` is one of ``ABSCISSAE``; if left out, it is rounds, and the clock beside them where
    there is one.
    """
    shown = [over or "rounds"]
    if over is None and runs[0].clock_r is not None:
        shown.append("clock")
    for name in shown:
        if name not in ABSCISSAE:
            raise unknown_name("x", name, ABSCISSAE)
        if any(ABSCISSAE[name].of(run) is None for run in runs):
            raise DeltaflError(f"x is {name!r}, which was not recorded; draw over 'rounds'")
    judge = judge_of(metric, summary.judges)
    groups = by_sampler(runs)
    drawn = []
    missing = []
    for label, look in looks(first_in_colour(summary)).items():
        band = curve_band(groups[label], metric)
        if np.isfinite(band.mean_r).any():
            drawn.append(Line(label, look, band))
        else:
            missing.append(label)
    # A task may have no accuracy; a loss that is never finite is said below the picture.
    if not drawn and metric != "loss":
        return None
    note = CAPTION
    if missing:
        note += f" Never finite: {', '.join(missing)}."
    goal = None
    # A threshold is one of the comparison's own metric.
    if metric == summary.metric:
        goal = goal_of(summary)
    if goal is not None:
        note += (
            f" Dashed: {goal_text(summary.judge, summary.threshold, named=False)}, the threshold."
        )
    panels = list[Panel]()
    for name in shown:
        # Over something else than rounds too: the mean over seeds, round by round.
        lines = [
            line._replace(band=line.band._replace(round_r=ABSCISSAE[name].mean(groups[line.name])))
            for line in drawn
        ]
        caption = "" if panels else panel_title("", runs)
        panels.append(Panel(caption, lines, ABSCISSAE[name].label, judge.title, goal))
    # Shares have the same axis whichever direction is better.
    log_y = not (judge.higher or judge.share)
    return draw_panels(panels, len(panels), note, path, log_y=log_y)


def goal_of(summary: Summary) -> float | None:
    """Where the threshold lies on the axis of the metric, shares in percent."""
    if summary.threshold is None:
        return None
    return summary.judge.factor * summary.threshold


def first_in_colour(summary: Summary) -> list[str]:
    """The samplers in the order in which they get colours: those that a gap lies between, then
    the best.
    """
    ends = references(summary)
    order = [entry.sampler for entry in ranked(summary)]
    # Stable: behind the ends of the gap the best stay first.
    return sorted(order, key=lambda label: label not in ends)


def draw_panels(
    panels: Sequence[Panel],
    columns: int,
    note: str,
    path: Path | None = None,
    *,
    log_y: bool = False,
    log_x: bool = False,
) -> Figure:
    """Draw panels with a legend and a note below them, and save them if there is a path.

    The first 6 lines of a panel are in colour; a name that is beyond that in one panel is grey in
    all.

    ``log_y`` makes an axis logarithmic unless its numbers are not positive or span less than a
    factor of 3.
    """
    weak = {_named(line) for panel in panels for line in panel.lines[MOST_STRONG:]}
    names = list(dict.fromkeys(_named(line) for panel in panels for line in panel.lines))
    # A letter of the legend is about 0.063 inches wide, its key 0.5.
    names_a_row = max(
        1,
        int((WIDTH - 0.2) / (0.5 + 0.063 * max(map(len, names), default=0))),
    )
    rows = math.ceil(len(panels) / columns)
    panel_height = 2.35
    if columns == 1:
        panel_height = 3.35
    height = panel_height * rows + 0.2 * math.ceil(len(names) / names_a_row) + 0.4
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(
            figsize=(WIDTH, height),
            dpi=DPI,
            facecolor="white",
            layout="constrained",
        )
        all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, panel in zip(all_axes, panels, strict=False):
            for line in panel.lines:
                look = line.look
                name = _named(line)
                if name in weak:
                    look = look.weak
                handles.setdefault(name, _draw_line(axes, line.band, look))
            _dress(axes, panel, WIDTH / columns, log_y, log_x)
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


def _named(line: Line) -> str:
    """The name of a line in the legend."""
    # Matplotlib leaves out what begins with a line.
    return re.sub("^_", " _", printable(line.name, _LONGEST_NAME))


def _draw_line(axes: Axes, band: Band, look: Look) -> Any:
    x_r, mean_r, low_r, high_r = band
    if look.colour != WEAK:
        axes.fill_between(
            x_r,
            low_r,
            high_r,
            color=look.colour,
            alpha=0.13,
            linewidth=0,
            zorder=1.5,
        )
    # Thinner where a curve has many points, or it hides what lies behind.
    width = 1.2
    if len(x_r) > 150:
        width = 0.8
    (drawn,) = axes.plot(
        x_r,
        mean_r,
        color=look.colour,
        linestyle=look.dash,
        linewidth=width,
        marker=look.marker,
        markersize=3.2,
        markevery=max(1, len(x_r) // 8),
        zorder=look.zorder,
    )
    return drawn


def _dress(axes: Axes, panel: Panel, width: float, log_y: bool, log_x: bool) -> None:
    """Scales, labels, goal and grid of a panel."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    if log_y:
        _log_axis(axes, panel.lines)
    if panel.goal is not None:
        axes.axhline(
            panel.goal,
            color=GREY,
            linewidth=0.8,
            linestyle=(0, (5, 3)),
            zorder=1.5,
        )
    axes.set_title(_filled(panel.caption, width / 0.07))
    axes.set(xlabel=printable(panel.x_label), ylabel=printable(panel.y_label))
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(
            MaxNLocator(
                "auto",
                integer=True,
                steps=[1, 2, 5, 10],
            )
        )


def _log_axis(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import LogFormatter

    class PlainFormatter(LogFormatter):
        """Labels the same ticks, 0.00006 as 0.00006."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            if not super().__call__(x, pos):
                return ""
            return np.format_float_positional(x, 3, fractional=False, trim="-")

    means = np.concatenate([line.band.mean_r for line in lines] or [np.empty(0)])
    means = means[np.isfinite(means)]
    if len(means) and means.min() > 0 and means.max() >= 3 * means.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PlainFormatter())
        axes.yaxis.set_minor_formatter(PlainFormatter(minor_thresholds=(2, 0.4)))


def _filled(text: str, letters: float) -> str:
    """Lines that are not longer: a letter of a title is about 0.07 inches wide, one of a note
    0.0525.
    """
    lines = [printable(line, limit=2000) for line in text.split("\n")]
    return "\n".join(textwrap.fill(line, int(letters)) for line in lines)


def _draw_selections(
    runs: Sequence[Run],
    summary: Summary,
    path: Path,
) -> Figure | None:
    """Counts of each client, sorted within a run and averaged over seeds, one line a sampler;
    None for full alone.
    """
    groups = by_sampler(runs)
    look_of = looks(first_in_colour(summary))
    bands = selections({label: groups[label] for label in look_of})
    if not bands:
        return None
    shares = []
    for label in bands:
        never = float(np.mean([run.draws_m == 0 for run in groups[label]]))
        if never:
            shares.append(f"{label} {100 * never:.0f} %")
    note = CAPTION
    if shares:
        note += f" Clients never selected: {', '.join(shares)}."
    lines = [Line(label, look_of[label], band) for label, band in bands.items()]
    panel = Panel(panel_title("", runs), lines, SELECTED_FIRST, "times selected")
    return draw_panels([panel], 1, note, path, log_y=True)


def panel_title(title: str, runs: Sequence[Run]) -> str:
    """A title, and below it the task of the runs, its m clients, and the n of a round."""
    task = printable(runs[0].settings.get("task", ""), _LONGEST_NAME)
    setting = [f"m = {len(runs[0].draws_m):,}"]
    # A title that names the data set says so once.
    if task and task.replace("-", "") not in title.lower().replace("-", ""):
        setting.insert(0, task)
    if n := _samples(runs):
        setting.append(f"n = {n}")
    return f"{title}\n{', '.join(setting)}".lstrip()


def setting_text(runs: Sequence[Run]) -> str:
    """How many clients there are, how many of them are asked, and the seeds, for a title."""
    seeds = len({run.seed for run in runs})
    texts = [counted(f"{len(runs[0].draws_m):,}", "client")]
    if n := _samples(runs):
        texts.append(f"{n} selected a round")
    return ", ".join([*texts, counted(seeds, "seed")])


def _samples(runs: Sequence[Run]) -> str:
    """How many clients are selected a round; several numbers where runs differ in it, and
    ``by budget`` or the like where rounds do.
    """
    numbers = dict[Any, None]()
    for run in runs:
        sizing = sized_by(run.settings)
        numbers[f"by {sizing}" if sizing else run.settings.get("sample")] = None
    return ", ".join(str(n) for n in numbers if n is not None)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the kind of picture that the file's name ends in."""
    kind = path.suffix.lower().removeprefix(".")
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise DeltaflError(
            f"{path.name} names no kind of picture; end it in "
            f"{', '.join('.' + name for name in known)}"
        )
    content = io.BytesIO()
    if kind == "png":
        content.write(small_png(figure))
    else:
        with _boxes_for_letters():
            figure.savefig(content, format=kind)
    write_with_folder(path, content.getbuffer())


@contextmanager
def _boxes_for_letters() -> Iterator[None]:
    """Draw a box for a letter that the font lacks; Matplotlib would also print lines of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


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


def small_png(figure: Figure) -> bytes:
    """The figure in a palette of 256 colours: a third of the bytes, and no difference that is
    seen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    with _boxes_for_letters():
        # Drawn once: savefig draws to find the layout, and again.
        canvas.draw()  # type: ignore[no-untyped-call]
    drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(drawn).convert("RGB")
    image = image.quantize(
        256,
        method=Image.Quantize.MAXCOVERAGE,
        dither=Image.Dither.NONE,
    )
    # Nothing of Matplotlib's or Pillow's versions is in the file, so that a rebuild elsewhere
    # differs in pixels only.
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue()
