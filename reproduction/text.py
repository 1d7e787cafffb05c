"""Writing pages: cells and tables in Markdown, rows of CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

DASH = "–"
MOST_ROWS = 12  # of a table that are not folded
#: Rows of a CSV file.
Cells = list[dict[str, Any]]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, its first ``left`` columns to the left and the others to the right."""
    rule = (["---"] * left + ["---:"] * len(heads))[: len(heads)]
    lines = [heads, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cut(table: str, most: int = MOST_ROWS) -> str:
    """A page's table with its first rows, the others folded; the text below the table stays."""
    rows, gap, note = table.partition("\n\n")
    head, rule, *lines = rows.splitlines()
    if len(lines) <= most:
        return table
    rest = folded(f"{len(lines) - most} more", "\n".join([head, rule, *lines[most:]]))
    return "\n".join([head, rule, *lines[:most]]) + f"\n\n{rest}{gap}{note}"


def folded(summary: str, text: str) -> str:
    """A text that a reader unfolds, with one line that stays visible."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def csv_text(cells: Cells) -> str:
    """Rows as CSV; the columns are those of all rows, in order of appearance; numbers have six
    digits.
    """
    names = list(dict.fromkeys(name for row in cells for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for row in cells:
        numbers = {name: it for name, it in row.items() if isinstance(it, float)}
        writer.writerow(row | {name: float(f"{it:.6g}") for name, it in numbers.items()})
    return file.getvalue()


def formatted(value: float | None, form: str, missing: str = DASH) -> str:
    """A number in a format such as ``.2f``; a dash for None."""
    if value is None:
        return missing
    return f"{value:{form}}"


def plus_minus(mean: float | None, sd: float | None, form: str, sd_form: str = "") -> str:
    """Mean ± sd, the sd in a format of its own or that of the mean."""
    text = formatted(mean, form)
    if mean is None or sd is None:
        return text
    return f"{text} ± {sd:{sd_form or form}}"


def ends(low: float | None, high: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    """The ends of an interval in brackets after a blank; nothing where there is none."""
    if low is None or high is None:
        return ""
    return f" [{scale * low:{form}}, {scale * high:{form}}]"


def interval_cells(name: str, interval: Sequence[float | None]) -> dict[str, float | None]:
    """The cells of an estimate with its interval: ``name``, ``name_low`` and ``name_high``."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def sentence_case(text: str) -> str:
    """The text with a capital first letter; ``str.capitalize`` lowers the others."""
    return text[:1].upper() + text[1:]


def counted(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
