"""Like beside like: every method is given what the others are given, in groups; and the ladder from
uniform draws to full participation, with one thing more at each step.

Three shares of a gap stand in each row: G between plain ``uniform`` and plain ``full``; G_B between
``uniform`` and ``full`` of the same group; C between plain ``uniform`` and ``full`` of the group,
its ceiling.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltafl import analysis
from deltafl.analysis import Interval, mean_interval

from ..measures import Measure
from ..spec import TEXTS
from ..text import DASH, Cells, ends, formatted, interval_cells, markdown
from .judge import Gap, against, gap_of, measures, paired
from .parts import BASELINE, FULL
from .runs import Method, Result
from .tables import name_of

_TEXTS = TEXTS["benchmark"]
_COLUMNS = 2  # of the ladder's panels
_HEADS = ("method", "mean accuracy, %", "G", "G_B", "C", "recommended ahead by, points")


class Row(NamedTuple):
    """One method in one group."""

    group: str
    method: Method
    base: str  #: uniform of its group
    top: str  #: full of its group

    @property
    def label(self) -> str:
        return self.method.label


def rows_of(result: Result) -> Iterator[Row]:
    """The rows with a finished run, group by group."""
    like = result.part.like
    if like is None:
        return
    for group in like.groups:
        base = like.label(BASELINE, group)
        top = like.label(FULL, group)
        # Uniform draws with a memory are FedVARP: one row for both.
        for label in dict.fromkeys(like.label(method, group) for method in like.methods):
            method = result.find(label)
            if method is not None:
                yield Row(group, method, base, top)


def like_block(result: Result, recommended: str) -> str:
    """The groups of a part, as tables; empty without any."""
    if result.part.like is None:
        return ""
    area = measures(result.part)[0]
    lines: dict[str, list[list[str]]] = {}
    for row in rows_of(result):
        mean, *_ = area.over_seeds(row.method.runs)
        line = [name_of(row.label), formatted(mean, ".2f")]
        line += [str(gap) for gap in shares(result, row)]
        line.append(_behind(result, area, recommended, row.label))
        lines.setdefault(row.group, []).append(line)
    tables = []
    for group, rows in lines.items():
        tables += [f"**{result.part.like.words[group]}**", markdown(_HEADS, rows)]
    return "\n\n".join(tables)


def shares(result: Result, row: Row) -> tuple[Gap, Gap, Gap]:
    """G, G_B and C."""
    area = measures(result.part)[0]
    return (
        gap_of(result, row.label, area),
        gap_of(result, row.label, area, row.top, row.base),
        gap_of(result, row.label, area, row.top),
    )


def _behind(result: Result, area: Measure, recommended: str, label: str) -> str:
    pair = against(result, area, recommended, label)
    if label == recommended or pair is None or pair.estimate is None:
        return DASH
    return f"{100 * pair.estimate:.2f}{ends(pair.low, pair.high, '.2f', 100)}"


def like_cells(results: Sequence[Result]) -> Cells:
    """Every row as numbers."""
    cells = []
    for result in results:
        area = measures(result.part)[0]
        for row in rows_of(result):
            cell: dict[str, Any] = {"part": result.part.name, "group": row.group}
            cell |= {"method": row.label, "seeds": len(row.method.runs)}
            cell |= interval_cells("mean_accuracy", mean_interval(area.numbers(row.method.runs)))
            for name, gap in zip(("g", "g_b", "c"), shares(result, row), strict=True):
                cell |= interval_cells(name, gap[:3])
            cells.append(cell)
    return cells


def ladder_of(result: Result) -> Mapping[str, Interval]:
    """Step -> points of mean accuracy above plain uniform draws, with an interval over seeds; empty
    while a step has no finished run.
    """
    like = result.part.like
    steps: dict[str, Interval] = {}
    area = measures(result.part)[0]
    for words, label in (like.ladder if like else {}).items():
        sides = paired(result, (BASELINE, label), area)
        if sides is None:  # a ladder that lacks a step is none
            return {}
        steps[words] = mean_interval(100 * (sides[1] - sides[0]))
    return steps


def draw_ladder(results: Sequence[Result], path: Path) -> None:
    """What brings what: one panel a task, one line a step."""
    from matplotlib.figure import Figure

    shown = [(result, steps) for result in results if (steps := ladder_of(result))]
    if not shown:
        return
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    with analysis.styled():
        figure = Figure(
            figsize=(analysis.WIDTH, 1.35 * rows + 0.4),
            dpi=analysis.DPI,
            facecolor="white",
            layout="constrained",
        )
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (result, steps) in zip(panels, shown, strict=False):
            _draw_steps(axes, steps)
            axes.set_title(result.part.title, fontsize=7)
        for unused in panels[len(shown) :]:
            unused.set_visible(False)
        figure.supxlabel(_TEXTS["ladder"], x=0.01, ha="left", fontsize=7)
        path.write_bytes(analysis.small_png(figure))


def _draw_steps(axes: Any, steps: Mapping[str, Interval]) -> None:
    before = 0.0
    for place, (mean, low, high) in enumerate(steps.values()):
        # What this step adds, from where the last one ended.
        axes.barh(place, mean - before, left=before, color=analysis.PALE, height=0.7)
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=analysis.GREY, linewidth=1.4)
        axes.plot([mean], [place], "o", color=analysis.GREY, markersize=3)
        axes.annotate(
            f"{mean:+.1f}",
            (max(mean, high or mean), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
        )
        before = mean
    axes.set_yticks(range(len(steps)), list(steps), fontsize=6)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("points above uniform draws", fontsize=6)
