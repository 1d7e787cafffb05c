"""Cells of tables: numbers as text, rows as Markdown and as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deltafl.analysis.statistics import mean_and_sd
from deltafl.simulation.record import RunRecord
from deltafl.types import FloatArray

from .groups import Group, Row
from .measures import Measure

DASH = "–"
#: Rows of table.csv.
Cells = list[dict[str, Any]]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, its first ``left`` columns to the left and the others to the right."""
    lines = [heads, ["---" if i < left else "---:" for i in range(len(heads))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_text(cells: Cells) -> str:
    """Rows as CSV; the columns are those of all rows, in order of appearance."""
    names = list(dict.fromkeys(name for row in cells for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in cells)
    return file.getvalue()


def head(group: Group, row: Row) -> dict[str, Any]:
    """What every row of table.csv begins with."""
    return {"part": group.part, "sampler": row.label, "method": row.name, "seeds": len(row.records)}


def numbers_of(measure: Measure, records: dict[int, RunRecord]) -> FloatArray:
    """The numbers of the seeds that have one, (s,)."""
    numbers = (measure.value(record) for record in records.values())
    return np.array([number for number in numbers if number is not None], dtype=np.float64)


def over_seeds(measure: Measure, records: dict[int, RunRecord]) -> tuple[float | None, float | None, int]:
    """Mean and sd of the seeds with a number (None where there is none), and how many have none."""
    number_s = numbers_of(measure, records)
    mean, sd = (None if np.isnan(number) else number for number in mean_and_sd(number_s))
    return mean, sd, len(records) - len(number_s)


def scaled(number: float | None, measure: Measure) -> float | None:
    """A number as people see it, in percent where it is a share."""
    return None if number is None else measure.scale * number


def fixed(value: float | None, digits: int) -> str:
    """A number with its digits behind the point; a dash for None."""
    return DASH if value is None else f"{value:.{digits}f}"


def plus_minus(mean: float | None, sd: float | None, digits: int) -> str:
    """Mean ± sd with their digits behind the point."""
    return fixed(mean, digits) + ("" if mean is None or sd is None else f" ± {sd:.{digits}f}")


def short(value: float | None) -> str:
    """A number with four significant digits; a dash for None."""
    return DASH if value is None else f"{value:.4g}"


def plus_minus_short(mean: float | None, sd: float | None) -> str:
    """Mean with four, sd with two significant digits."""
    return short(mean) + ("" if mean is None or sd is None else f" ± {sd:.2g}")


def _plain(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
