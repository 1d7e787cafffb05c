"""Files of what changes over time: who is available, how much carbon a kilowatt-hour costs.

A CSV file with three columns, one row for each value and the time from which it holds::

    hour,region,value        # or second; client, by its name or number, or region, its stratum
    0,north,120
    6,north,310
    0,south,80

A value holds until the next time of the same client or region. The file begins anew one step after
its last time; a step is the least distance between two of its times, 1 if there is one time alone.
Before its first time a client has its last value.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError, in_one_line, printable, require
from ..store.files import read_bytes
from ..types import FloatArray, IntArray, Population

#: Columns of time, in seconds.
UNITS = {"second": 1.0, "hour": 3600.0}
OWNERS = ("client", "region")
VALUE = "value"
#: The largest number in a file: clocks and costs are sums of them.
_MOST = 1e15
#: What an error says that a file must have.
FORM = "the columns hour or second, client or region, and value"


class Timeline(NamedTuple):
    """Values of all clients over one turn of a file, as its rows have them: each time with a value
    of each client could be more than fits into memory.
    """

    second_t: FloatArray  #: from when on some value holds, in increasing order
    length: float  #: seconds of a turn
    #: the values, those of one client or region after the other; each has one from time 0 on
    value_k: FloatArray
    from_k: IntArray  #: the place of the time from which on a value holds
    until_k: IntArray  #: and that of the next value, or the number of times
    owner_m: IntArray  #: whose values a client has

    def row(self, clock: float) -> int:
        """The place of the time from which on the values at a moment of the virtual clock hold."""
        # Before the first time the last values hold: -1 is their place.
        return int(np.searchsorted(self.second_t, clock % self.length, side="right")) - 1

    def value_m(self, row: int) -> FloatArray:
        """The values that hold from a time on, float64 (m,)."""
        place = row % len(self.second_t)
        # One of each client or region.
        value_h = self.value_k[(self.from_k <= place) & (place < self.until_k)]
        return np.asarray(value_h[self.owner_m])

    def least_m(self) -> FloatArray:
        """The least of each client's values, float64 (m,)."""
        return self._of_each(np.minimum, self.value_k)

    def mean_m(self) -> FloatArray:
        """The mean of each client's values over a turn, float64 (m,)."""
        # The last values hold into the next turn.
        edge_t = np.append(self.second_t, self.length + self.second_t[0])
        second_k = edge_t[self.until_k] - edge_t[self.from_k]
        return self._of_each(np.add, second_k * self.value_k) / self.length

    def times_of_any(self) -> IntArray:
        """The places of the times from which on some client has a value above 0."""
        here_k = self.value_k > 0
        change_t = np.zeros(len(self.second_t) + 1)
        np.add.at(change_t, self.from_k[here_k], 1)
        np.add.at(change_t, self.until_k[here_k], -1)
        return np.flatnonzero(np.cumsum(change_t)[:-1])

    def _of_each(self, combine: np.ufunc, number_k: FloatArray) -> FloatArray:
        found_h = combine.reduceat(number_k, np.flatnonzero(self.from_k == 0))
        return np.asarray(found_h[self.owner_m])


class Columns:
    """The columns of a file of text, by the names in its first line."""

    def __init__(self, path: str) -> None:
        require("pandas", "sim")
        import pandas as pd

        content = read_bytes(Path(path), users=True)
        # Where a comma is in numbers, spreadsheets put something else between them.
        header = content.lstrip().partition(b"\n")[0]
        sep = max(",;\t", key=lambda mark: header.count(mark.encode()))
        self.path = path
        try:
            with warnings.catch_warnings():
                # Else the last cells of longer rows would be left out, as of 0,5 for a half.
                warnings.simplefilter("error", pd.errors.ParserWarning)
                # As they are written: "007" is no 7, and the region "NA" is not missing.
                table = pd.read_csv(
                    BytesIO(content),
                    sep=sep,
                    # The names, too, as they are written: of two pandas would rename one.
                    header=None,
                    dtype=str,
                    keep_default_na=False,
                    index_col=False,
                    skipinitialspace=True,
                )
        except (ValueError, pd.errors.ParserWarning) as error:
            raise DeltaflError(
                f"{path} must be text in UTF-8, with a line of names and rows of as many cells: "
                f"{in_one_line(error)}"
            ) from None
        self.texts = dict[str, list[str]]()
        for column in table:
            name, *texts = table[column].str.strip()
            # Spreadsheets leave empty columns behind.
            if name and name in self.texts:
                raise DeltaflError(
                    f"{path} has two columns {printable(name, limit=60)}; name each once"
                )
            self.texts[name] = texts
        self._has_rows = len(table) > 1

    def require(self, has_columns: bool, form: str) -> None:
        """Refuse a file that has not the columns of its form, or no rows."""
        if not has_columns or not self._has_rows:
            found = printable(", ".join(self.texts), limit=100)
            raise DeltaflError(
                f"{self.path} must have {form}, and a row at least; it has the columns {found}"
            )

    def numbers(self, name: str) -> FloatArray:
        """A column of numbers, 0 to ``_MOST``."""
        number_k = np.empty(len(self.texts[name]))
        for row, text in enumerate(self.texts[name]):
            with suppress(ValueError):
                number_k[row] = float(text)
                # Python reads 1_0 as 10, which may be 1.0 with a slip.
                if 0 <= number_k[row] <= _MOST and "_" not in text:
                    continue
            raise self.bad_row(
                row,
                f"has {text!r:.60} as {name}; write a number from 0 to {_MOST:g}, such as 0.5",
            )
        return number_k

    def bad_row(self, row: int, why: str) -> DeltaflError:
        """The error for a row, which a person counts from 1."""
        return DeltaflError(f"{self.path}: row {row + 1} {why}")


def clients_of(columns: Columns, m: int, names: Sequence[str] = ()) -> IntArray:
    """Of each row the client that it is of: by the names of the task's clients, else by their
    numbers from 0.
    """
    text_k = columns.texts["client"]
    if names:
        # What a table calls them are no numbers of clients, even where they are digits.
        place = {name: client for client, name in enumerate(names)}
        client_k = np.array([place.get(text, -1) for text in text_k])
        known = f"the {m} of the task, such as {printable(', '.join(names[:3]), limit=100)}"
    else:
        number_k = columns.numbers("client")
        client_k = np.where(np.isin(number_k, np.arange(m)), number_k, -1).astype(np.int64)
        known = f"numbers from 0 to {m - 1}"
    bad_k = np.flatnonzero(client_k < 0)
    if len(bad_k):
        row = int(bad_k[0])
        raise columns.bad_row(row, f"is of client {text_k[row]!r:.60}; clients are {known}")
    return client_k


def client_called(client: int, names: Sequence[str] = ()) -> str:
    """A client in a sentence: by its name in quotes, or its number."""
    return repr(printable(names[client], limit=60)) if names else str(client)


def read_trace(
    columns: Columns,
    population: Population,
    names: Sequence[str] = (),
) -> Timeline:
    """The values of a file for each client; a ``DeltaflError`` if one has none, or a row is bad.
    ``names`` are those of the clients, where they have some.
    """
    units = [name for name in UNITS if name in columns.texts]
    owners = [name for name in OWNERS if name in columns.texts]
    columns.require(len(units) == len(owners) == 1 and VALUE in columns.texts, FORM)
    unit = units[0]
    owner = owners[0]
    second_k = columns.numbers(unit) * UNITS[unit]
    value_k = columns.numbers(VALUE)
    second_t, time_k = np.unique(second_k, return_inverse=True)
    if owner == "client":
        code_m = np.arange(population.num_clients)
        index_k = clients_of(columns, len(code_m), names)
        names = names or [str(client) for client in code_m]
    else:
        names, code_m = _regions(columns.path, population)
        place = {name: index for index, name in enumerate(names)}
        index_k = np.array([place.get(name, -1) for name in columns.texts[owner]])
    # A file may be of more regions than there are clients of.
    row_k = np.flatnonzero(index_k >= 0)
    row_k = row_k[np.lexsort((time_k[row_k], index_k[row_k]))]
    owner_k = index_k[row_k]
    from_k = time_k[row_k]
    kept_k = value_k[row_k]
    is_second_k = (np.diff(owner_k) == 0) & (np.diff(from_k) == 0)
    if is_second_k.any():
        row = int(row_k[1:][is_second_k].min())
        raise columns.bad_row(
            row, f"has a second value of {owner} {names[index_k[row]]!r:.60} for one time; keep one"
        )
    count_h = np.bincount(owner_k, minlength=len(names))
    if not count_h.all():
        lacking = printable(names[int(count_h.argmin())], limit=60)
        raise DeltaflError(
            f"{columns.path} has no value for {owner} {lacking!r}; give it one row at least"
        )
    end_h = np.cumsum(count_h)
    first_h = end_h - count_h
    # The last value of a turn holds until the first one of the next.
    late_h = from_k[first_h] > 0
    from_k = np.insert(from_k, first_h[late_h], 0)
    kept_k = np.insert(kept_k, first_h[late_h], kept_k[end_h[late_h] - 1])
    until_k = np.append(from_k[1:], 0)
    # There another client or region begins.
    until_k[until_k == 0] = len(second_t)
    step = 1.0
    if len(second_t) > 1:
        step = float(np.diff(second_t).min())
    length = float(second_t[-1]) + step
    return Timeline(
        second_t,
        length,
        value_k=kept_k,
        from_k=from_k,
        until_k=until_k,
        owner_m=code_m,
    )


def _regions(path: str, population: Population) -> tuple[list[str], IntArray]:
    """The names of regions, and the place of each client's among them."""
    if population.strata is None:
        raise DeltaflError(
            f"{path} is by region, and nobody said of which region a client is: write --strata "
            "COLUMN with a table, or use the column client"
        )
    return list(population.strata.names), population.strata.code_m
