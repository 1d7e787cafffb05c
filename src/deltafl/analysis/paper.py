"""The table of a comparison for a paper, as LaTeX and as CSV: means with intervals, the best in
bold.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable
from .numbers import SamplerSummary, Summary, value_of
from .statistics import Interval, mean_interval
from .summary import references
from .text import csv_text, decimals_of, goal_text, rounds_text

#: Letters that mean something else in LaTeX; "[" and "*" do at the beginning of a row.
_LATEX = {
    "[": "{[}",
    "*": "{*}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
#: Where a cell may begin as a formula for a spreadsheet, the wide signs too. Which mark separates
#: cells there, or quotes them, is a setting of whoever opens the file (OWASP, CSV injection).
_FORMULA = re.compile(r"""((?:^|[,;|"'])[ "']*)(?=[=+\-@＝＋－＠])""")


class _Column(NamedTuple):
    """A column of numbers.

    ``symmetric``: whether its interval is shown as half its width; ``otherwise``: what LaTeX shows
    of a sampler without a value, a dash where it is empty.
    """

    name: str
    heading: str
    sign: float  # 1 where higher is better, -1 where lower is
    value: Callable[[SamplerSummary], Interval | None]
    decimals: int = 2
    factor: float = 1.0
    symmetric: bool = True
    otherwise: Callable[[SamplerSummary], str] = lambda entry: ""

    def all(self, summary: Summary) -> list[Interval | None]:
        """Its values, sampler by sampler."""
        return [self.value(entry) for entry in summary.samplers]


def _columns(summary: Summary) -> list[_Column]:
    """The columns that the comparison has."""
    judge = summary.judge
    unit = r" (\%)" if judge.share else ""
    # The loss of a model that is lost may be of another size than all others.
    whole = [entry for entry in summary.samplers if not _mark(entry)] or summary.samplers
    decimals = 1 if judge.share else decimals_of(*(value_of(x, summary).mean for x in whole))
    columns = [
        _Column(
            summary.metric,
            f"{latex(judge.heading)}{unit}",
            judge.sign,
            lambda entry: _of_seeds([value_of(run, summary) for run in entry.seeds]),
            decimals,
            judge.factor,
        ),
        _Column("gap_closed", "gap closed", 1, _gap, symmetric=False),
        _Column(
            "worst_tenth",
            f"worst tenth{unit}",
            judge.sign,
            lambda entry: _of_seeds([run.worst_tenth for run in entry.seeds]),
            decimals,
            judge.factor,
        ),
        _Column(
            "rounds_to_threshold",
            f"rounds to {latex(goal_text(summary.judge, summary.threshold, named=False))}",
            -1,
            lambda entry: _of_seeds(
                [None if s.reach is None else float(s.reach.round) for s in entry.seeds]
            ),
            1,
            otherwise=_partly,
        ),
    ]
    return [
        column
        for column in columns
        if any(column.all(summary)) or any(map(column.otherwise, summary.samplers))
    ]


def _of_seeds(values: Sequence[Any]) -> Interval | None:
    """Mean and interval over seeds; None if one of them has no number."""
    if None in values:
        return None
    return mean_interval(np.array(values, np.float64))


def _gap(entry: SamplerSummary) -> Interval | None:
    gap = entry.gap_closed
    if gap is None:
        return None
    return Interval(gap.value, gap.low, gap.high)


def to_csv(summary: Summary) -> str:
    """One row a sampler: for each column its mean, and ``_low`` and ``_high`` of its interval; then
    how many of its seeds diverged, and how many were stopped by a rule before their last round.

    Numbers are in the units of ``summary.json``, and cells without one are empty. Names that a
    spreadsheet would take for formulas, as a whole or after a separator, get an apostrophe there.
    """
    columns = _columns(summary)
    ends = ("", "_low", "_high")
    names = [f"{column.name}{end}" for column in columns for end in ends]
    rows = []
    for entry in summary.samplers:
        numbers = [x for column in columns for x in column.value(entry) or (None,) * 3]
        ended = [entry.num_diverged, _num_stopped(entry)]
        rows.append([harmless(entry.sampler), len(entry.seeds), *numbers, *ended])
    return csv_text(map(harmless, ["sampler", "seeds", *names, "diverged", "stopped"]), rows)


def to_latex(summary: Summary) -> str:
    """A ``tabular`` with one row a sampler, without packages: a mean with half the width of its
    interval, or with the interval in brackets.

    Of each column the best mean is bold; ``full`` and ``uniform`` are no candidates beside others,
    nor is a sampler with a run that diverged or was stopped, which is marked.
    """
    columns = _columns(summary)
    best = [_best(column, summary) for column in columns]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\hline",
        " & ".join(["sampler", *(column.heading for column in columns)]) + r" \\",
        r"\hline",
    ]
    for entry in summary.samplers:
        cells = [_cell(column, entry, top) for column, top in zip(columns, best, strict=True)]
        lines.append(" & ".join([latex(entry.sampler) + _mark(entry), *cells]) + r" \\")
    note = "Means over seeds"
    if any(found and found.low is not None for column in columns for found in column.all(summary)):
        kinds = "Student's t"
        if any(column.name == "gap_closed" for column in columns):
            kinds += "; gaps: Fieller's"
        note += rf" with {100 * summary.confidence:g}\% intervals ({kinds})"
    note += "."
    if any(map(_partly, summary.samplers)):
        note += " In parentheses: seeds that got there."
    marks = {_mark(entry) for entry in summary.samplers}
    note += "".join(f" {mark}: {why}." for mark, why in _ENDED.items() if mark in marks)
    lines += [
        r"\hline",
        rf"\multicolumn{{{len(columns) + 1}}}{{l}}{{\footnotesize {note}}} \\",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


#: Marks of samplers whose means are not those of whole runs.
_ENDED = {r"$^\dagger$": "some runs diverged", r"$^\ddagger$": "some runs were stopped early"}


def _num_stopped(entry: SamplerSummary) -> int:
    return sum(run.stopped for run in entry.seeds)


def _mark(entry: SamplerSummary) -> str:
    diverged, stopped = _ENDED
    if entry.num_diverged:
        return diverged
    return stopped if _num_stopped(entry) else ""


def _best(column: _Column, summary: Summary) -> float:
    """The best mean as it is shown; NaN if there is none."""
    ends = references(summary)
    rivals = [entry for entry in summary.samplers if entry.sampler not in ends]
    whole = [entry for entry in rivals or summary.samplers if not _mark(entry)]
    found = [column.value(entry) for entry in whole]
    # A gap whose ends are not clearly apart has a number of several seeds without an interval.
    means = [
        column.sign * x.mean for x in found if x and (summary.has_one_seed or x.low is not None)
    ]
    return column.sign * max(means, default=np.nan)


def _cell(column: _Column, entry: SamplerSummary, best: float) -> str:
    found = column.value(entry)
    if found is None:
        return column.otherwise(entry) or "--"
    mean, low, high = (x if x is None else column.factor * x for x in found)
    digits = f".{column.decimals}f"
    shown = f"{mean:{digits}}"
    text = f"${shown}$"
    # Those that look the same are all the best.
    if shown == f"{column.factor * best:{digits}}" and not _mark(entry):
        text = rf"$\mathbf{{{shown}}}$"
    if low is None or high is None:
        return text
    if column.symmetric:
        return rf"{text} $\pm$ ${(high - low) / 2:{digits}}$"
    return f"{text} $[{low:{digits}}, {high:{digits}}]$"


def _partly(entry: SamplerSummary) -> str:
    """Mean rounds of the seeds that reached the threshold and how many these are; empty if all or
    none did.
    """
    reached = entry.to_threshold
    if reached is None or not reached.num_never or not reached.num_reached:
        return ""
    return f"${rounds_text(reached)}$ ({reached.num_reached}/{len(entry.seeds)})"


def latex(text: str) -> str:
    """Text of which LaTeX prints every letter."""
    return "".join(_LATEX.get(letter, letter) for letter in printable(text, limit=None))


def harmless(text: str) -> str:
    """Text that no spreadsheet takes for a formula, nor a part of it, whatever separates its
    cells.
    """
    return _FORMULA.sub(r"\1'", printable(text, limit=None))
