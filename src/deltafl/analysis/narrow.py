"""Tables for terminals of any width: where it is narrow, columns are left out, the least important
first and said below; names and numbers stay whole.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..errors import printable

#: A column that folds may become so narrow, even in the middle of a word.
_LEAST_FOLDED = 20


def plain(text: str, style: str = "") -> Text:
    """Text for Rich in which nothing is markup, and whatever cannot be seen, but for line breaks,
    is made visible.
    """
    return Text("\n".join(printable(line, limit=None) for line in text.split("\n")), style)


def console(**options: Any) -> Console:
    """A console for tables, where brackets and colons are brackets and colons."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def show(*parts: RenderableType) -> None:
    """Print tables on the terminal."""
    console().print(*parts)


class NarrowTable:
    """A table that fits.

    Args:
        headings: Of the columns; the first has the names of the rows, and is never left out.
        rows: A cell for each column.
        folding: The places of columns whose text may go on in the next line.
        right: The places of columns of numbers, at the right of their columns.
        leaves: The places of columns in the order in which they are left out; from the last one to
            the second if None.
        least: The least widths of the columns.
        title: A line above the table.
        looks: Arguments of ``rich.table.Table``.
    """

    def __init__(
        self,
        headings: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        *,
        folding: Sequence[int] = (),
        right: Sequence[int] = (),
        leaves: Sequence[int] | None = None,
        least: Sequence[int] | None = None,
        title: str = "",
        **looks: Any,
    ) -> None:
        self._headings = [plain(heading) for heading in headings]
        self._rows = [
            [cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows
        ]
        self._title = plain(title, "bold") if title else None
        self._folding = folding
        self._right = right
        self._leaves = range(len(headings) - 1, 0, -1) if leaves is None else leaves
        self._least = least or [0] * len(headings)
        self._looks = looks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [*range(len(self._headings))]
        # A copy: Rich may ask for the same table again, on a wider terminal.
        leaves = [*self._leaves]
        # In the present width Rich would squeeze columns, and every table would seem to fit.
        any_width = options.update(width=10_000)
        widths = [self._width(place, console, any_width) for place in shown]
        while True:
            # Without rows, whose longest words may be folded.
            needed = Measurement.get(console, any_width, self._table(shown, [], widths)).minimum
            if needed <= options.max_width or not leaves:
                break
            shown.remove(leaves.pop(0))
        yield self._table(shown, self._rows, widths)
        left_out = []
        for place, heading in enumerate(self._headings):
            if place not in shown:
                left_out.append(heading.plain.replace("\n", " "))
        if left_out:
            yield Text(f"Too narrow for: {', '.join(left_out)}.", style="dim")

    def _table(
        self,
        shown: Sequence[int],
        rows: Sequence[Sequence[Text]],
        widths: Sequence[int],
    ) -> Table:
        table = Table(title=self._title, title_justify="left", **self._looks)
        for place in shown:
            table.add_column(
                self._headings[place],
                justify="right" if place in self._right else "left",
                no_wrap=place not in self._folding,
                overflow="fold",
                min_width=widths[place],
            )
        for row in rows:
            table.add_row(*(row[place] for place in shown))
        return table

    def _width(self, place: int, console: Console, options: ConsoleOptions) -> int:
        """The least width of a column: of its longest line, or of its longest word if it folds."""
        texts = [row[place] for row in (self._headings, *self._rows)]
        heading, *cells = (Measurement.get(console, options, text) for text in texts)
        least = max(heading.maximum, self._least[place])
        if place in self._folding:
            longest = max((cell.minimum for cell in cells), default=0)
            return max(least, min(longest, _LEAST_FOLDED))
        return max([least, *(cell.maximum for cell in cells)])
