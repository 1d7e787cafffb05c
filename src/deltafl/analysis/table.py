"""The comparison as a table for the terminal, with remarks below: what the numbers show and what
they do not show.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .numbers import Summary
from .text import COSTS, cells_of, cost_cells, has_clock, threshold_text, verdict_of
from .verdict import remarks

_STYLES = {"better": "green", "worse": "red", "open": ""}


def comparison_table(summary: Summary) -> RenderableType:
    """One row a sampler, and remarks below it; it fits into 80 columns.

    Bytes are those to the threshold; without a threshold, those of the whole run.
    """
    headings = {
        "value": f"{summary.metric}\n{summary.judge.unit.strip()}".rstrip(),
        "tail": "worst\ntenth",
        "gap": "gap closed\n[95 %]",
        "rounds": f"rounds to\n{threshold_text(summary, named=False)}",
        "speedup": "speed-up\n[95 %]",
        "bytes": "bytes",
    }
    if has_clock(summary):
        headings["bytes"] = "bytes\ntime"
    shown = [name for name in headings if name in cells_of(summary.samplers[0], summary)]
    table = _table(["sampler", *(headings[name] for name in shown)])
    costs = _table(
        [
            "costs of a run",
            # In two lines, or the table would be wider than 80 columns.
            *(heading.replace(" ", "\n", 1) for heading in COSTS),
        ]
    )
    for entry in summary.samplers:
        label = Text(_foldable(entry.sampler))
        cells = cells_of(entry, summary)
        table.add_row(
            label,
            *(
                Text(
                    cells[x].lines,
                    _STYLES[verdict_of(cells[x].difference)],
                )
                for x in shown
            ),
        )
        costs.add_row(label, *cost_cells(entry))
    notes = Table.grid(padding=(0, 1))
    for sentence in remarks(summary):
        notes.add_row(Text("·", style="dim"), Text(sentence))
    if any(entry.costs for entry in summary.samplers):
        return Group(table, Text(), costs, Text(), notes)
    return Group(table, Text(), notes)


def _table(headings: Sequence[str]) -> Table:
    """A table without rows, its first column for labels."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        # As Text, or the brackets of an interval would be markup.
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def _foldable(label: str) -> str:
    """A label that folds before its settings and, if it is long, its options; with the blanks it
    is the same label.
    """
    folded = label.replace("+", " +")
    if len(label) > 20:
        return folded.replace("(", " (")
    return folded
