"""The comparison as a table for the terminal, with remarks below: what the numbers show and what
they do not show.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .narrow import NarrowTable, plain
from .numbers import Summary
from .text import cells_of, cost_rows, goal_text, has_clock, verdict_of
from .verdict import remarks

#: Columns by importance, the least important first.
_LEAST_FIRST = ("speedup", "spread", "bytes", "tail", "rounds", "gap")
_STYLES = {"better": "green", "worse": "red", "open": ""}


def comparison_table(summary: Summary) -> RenderableType:
    """One line a sampler, and remarks below them; a narrow terminal gets fewer columns.

    Bytes are those to the threshold; without a threshold, those of the whole run.
    """
    headings = {
        "value": f"{summary.judge.heading}\n{summary.judge.unit.strip()}".rstrip(),
        "tail": "worst\ntenth",
        "spread": "sd over\nclients",
        "gap": "gap closed\n[95 %]",
        "rounds": f"rounds to\n{goal_text(summary.judge, summary.threshold, named=False)}",
        "speedup": "speed-up\n[95 %]",
        "bytes": "bytes",
    }
    if has_clock(summary):
        headings["bytes"] = "bytes\nand time"
    shown = [name for name in headings if name in cells_of(summary.samplers[0], summary)]
    rows = []
    for entry in summary.samplers:
        cells = cells_of(entry, summary)
        texts = [plain(cells[x].line, _STYLES[verdict_of(cells[x].difference)]) for x in shown]
        rows.append([plain(_foldable(entry.sampler)), *texts])
    # The metric's column stays.
    leaves = [1 + shown.index(name) for name in _LEAST_FIRST if name in shown]
    table = _table(["sampler", *(headings[name] for name in shown)], rows, leaves)
    notes = Table.grid(padding=(0, 1))
    for sentence in remarks(summary):
        notes.add_row(plain("·", "dim"), plain(sentence))
    parts: list[RenderableType] = [table, Text(), notes]
    if costs := cost_rows(summary):
        (corner, *paid), *others = costs
        broken = [heading.replace(" ", "\n", 1) for heading in paid]
        folded = [[_foldable(label), *cells] for label, *cells in others]
        parts += [Text(), _table([corner, *broken], folded)]
    return Group(*parts)


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    leaves: Sequence[int] | None = None,
) -> NarrowTable:
    """A table with the labels in its first column."""
    return NarrowTable(
        headings,
        rows,
        folding=[0],
        right=range(1, len(headings)),
        leaves=leaves,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )


def _foldable(label: str) -> str:
    """A label that folds before its settings and, if it is long, its options; with the blanks it
    is the same label.
    """
    folded = label.replace("+", " +")
    if len(label) > 20:
        return folded.replace("(", " (")
    return folded
