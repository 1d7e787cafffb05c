"""Numbers of a comparison as a person reads them, in the terminal and in the report."""

import csv
import io
from collections.abc import Iterable
from math import floor, isfinite, isnan, log10
from typing import Any, NamedTuple

from rich.filesize import decimal

from ..types import Judge
from .numbers import (
    Difference,
    MeanSd,
    SamplerFairness,
    SamplerSummary,
    Summary,
    ToThreshold,
    value_of,
)
from .statistics import side_of

#: Stands for a number that does not exist.
DASH = "—"
#: Marks a ratio from which pairs were left out because a run never reached the threshold.
MARK = "*"
#: Marks a value that rests on a run that diverged.
DIVERGED = "†"
#: The columns of the table of costs; the last one only where clients have costs.
_COSTS = (
    "clients' seconds",
    "server's seconds",
    "bytes down",
    "bytes up",
    "server's memory",
    "clients' cost",
)


class Cell(NamedTuple):
    """What a table shows of a sampler in one column."""

    text: str
    more: str = ""  #: beside or below the text: its interval, or the share of seeds
    number: float | None = None  #: by which the column is sorted
    difference: Difference | None = None  #: by which the cell is judged

    @property
    def line(self) -> str:
        """Both, side by side."""
        return f"{self.text} {self.more}".rstrip()


def cells_of(entry: SamplerSummary, summary: Summary) -> dict[str, Cell]:
    """The cells of a sampler by column: those that the comparison has."""
    area = Cell(plus_minus(entry.area, summary.judge), number=entry.area.mean)
    value = Cell(value_text(entry, summary), number=value_of(entry, summary).mean)
    cells = {"value": value, "area": area, "gap": _difference_cell(entry.gap_closed)}
    if has_fairness(summary):
        cells |= _fairness_cells(entry.fairness, summary.judge)
    reached = entry.to_threshold
    if reached is None:
        return cells | {"bytes": _bytes_cell(entry.total_bytes, entry.total_clock)}
    cells["rounds"] = _rounds_cell(reached)
    cells["speedup"] = _difference_cell(reached.speedup)
    if entry.sampler == summary.baseline:
        cells["speedup"] = Cell("baseline")
    return cells | {"bytes": _bytes_cell(reached.bytes, reached.clock)}


def _difference_cell(found: Difference | None) -> Cell:
    if found is None:
        return Cell(DASH)
    text = number_text(found.value) + MARK * bool(found.num_left_out)
    return Cell(text, interval_text(found), found.value, found)


def _fairness_cells(found: SamplerFairness | None, judge: Judge) -> dict[str, Cell]:
    """The worst tenth of the clients, and how much clients differ."""
    if found is None or found.sd.mean is None:
        return {"tail": Cell(DASH), "spread": Cell(DASH)}
    tail = found.worst_tenth
    spread = found.sd.mean
    return {
        "tail": Cell(plus_minus(tail, judge), number=tail.mean, difference=found.gain),
        "spread": Cell(metric_text(spread, judge), number=spread),
    }


def _rounds_cell(reached: ToThreshold) -> Cell:
    share = ""
    if reached.num_never:
        share = f"({reached.num_reached}/{reached.num_seeds} seeds)"
    if reached.rounds is None:
        return Cell(DASH, share)
    return Cell(rounds_text(reached), share, reached.rounds.mean)


def _bytes_cell(number: float | None, clock: float | None) -> Cell:
    more = ""
    if clock is not None:
        more = f"{human_amount(clock)} s"
    return Cell(human_bytes(number), more, number)


def cost_rows(summary: Summary) -> list[list[str]]:
    """The table of what a run of each sampler costs, with its headings; empty if no sampler's costs
    were recorded.
    """
    if not any(entry.costs for entry in summary.samplers):
        return []
    rows = [["costs of a run", *_COSTS]]
    for entry in summary.samplers:
        found = entry.costs
        cells = [DASH] * len(_COSTS)
        if found is not None:
            seconds = [f"{human_amount(x)} s" for x in (found.client_seconds, found.server_seconds)]
            sizes = [found.bytes_down, found.bytes_up, found.server_bytes]
            cells = [*seconds, *map(human_bytes, sizes), human_amount(found.asked)]
        rows.append([entry.sampler, *cells])
    # Clients without costs of their own need no column of them.
    if all(row[-1] == DASH for row in rows[1:]):
        return [row[:-1] for row in rows]
    return rows


def has_fairness(summary: Summary) -> bool:
    """Whether the metric per client was measured in all runs of some sampler."""
    return any(entry.fairness for entry in summary.samplers)


def has_clock(summary: Summary) -> bool:
    """Whether the runs have a virtual clock."""
    return summary.settings.get("speeds") is not None


def human_bytes(number: float | None) -> str:
    """With a decimal unit (1 kB = 1000 bytes); a dash for None."""
    if number is None:
        return DASH
    return decimal(round(number))


def human_amount(number: float | None) -> str:
    """Seconds, or costs, with three digits, whole from 100 on; a dash for None."""
    if number is None:
        return DASH
    # Else 99.96 would be 100 in one form and 1e+02 in the other.
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def number_text(number: float) -> str:
    """Two decimals, or three digits of a large number."""
    if abs(number) < 99.995:
        return f"{number:.2f}"
    return three_digits(number)


def three_digits(number: float) -> str:
    """Three digits, whole where that needs more of them."""
    # Else 48,213 would be 4.82e+04.
    if 999.5 <= abs(number) < 1e7:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def decimals_of(*numbers: float | None) -> int:
    """Decimals with which numbers of any size can be told apart: 3, more if all are small, fewer if
    one is large.
    """
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    if not (isfinite(largest) and largest):
        return 3
    power = floor(log10(largest))
    if power < -1:
        return min(2 - power, 15)
    return 3 if power < 2 else max(3 - power, 0)


def plus_minus(found: MeanSd, judge: Judge) -> str:
    """A mean with its spread, if there are several seeds; a dash without a mean."""
    if found.mean is None:
        return DASH
    numbers = (found.mean, found.sd)
    return "±".join(metric_text(number, judge) for number in numbers if number is not None)


def metric_text(number: float, judge: Judge) -> str:
    """A value of the metric without its unit; a dash for NaN."""
    if isnan(number):
        return DASH
    if judge.share:
        return f"{judge.factor * number:.1f}"
    return three_digits(number)


def value_text(entry: SamplerSummary, summary: Summary) -> str:
    """The metric as tables show it, with its spread."""
    text = plus_minus(value_of(entry, summary), summary.judge)
    if entry.num_diverged and text != DASH:
        return text + DIVERGED
    return text


def goal_text(judge: Judge, goal: float | None, named: bool = True) -> str:
    """A goal as a person writes it, for example ``70 %`` or ``loss 0.1``, or ``0.1`` where it is
    not ``named``.
    """
    if goal is None:
        return "none"
    number = f"{judge.factor * goal:g}{judge.unit}"
    if judge.share or not named:
        return number
    return f"{judge.heading} {number}"


def capital(text: str) -> str:
    """The text with a capital letter at its start; a name of the user's code stays as it is."""
    return text if "_" in text else text[:1].upper() + text[1:]


def rounds_text(reached: ToThreshold) -> str:
    """Mean rounds to the threshold; of several seeds with a decimal."""
    if reached.rounds is None:
        return DASH
    # One seed has a whole number of rounds.
    decimals = min(reached.num_seeds - 1, 1)
    return f"{reached.rounds.mean:,.{decimals}f}"


def interval_text(found: Difference) -> str:
    """The interval of a difference in brackets; empty where it has none, or no width."""
    if found.low is None or found.high is None or found.low == found.high:
        return ""
    return f"[{number_text(found.low)}, {number_text(found.high)}]"


def difference_text(found: Difference) -> str:
    """A difference with its interval in one line."""
    return f"{number_text(found.value)} {interval_text(found)}".rstrip()


def verdict_of(found: Difference | None) -> str:
    """``"better"`` or ``"worse"`` if the interval shows it, else ``"open"``.

    A sampler that never got there with a seed with which the other did is not called better: other
    seeds flatter it.
    """
    if found is None or found.low is None or found.high is None:
        return "open"
    side = side_of(found.low, found.high, found.no_difference)
    if side > 0 and not found.num_lost:
        return "better"
    if side < 0 and not found.num_won:
        return "worse"
    return "open"


def csv_text(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return file.getvalue()
