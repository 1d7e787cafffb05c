"""Files of what changes over time: who is available, how much carbon a kilowatt-hour costs.

A CSV file with three columns, one row for each value and the time from which it holds::

    hour,region,value        # or second; client, its number from 0, or region, its stratum
    0,north,120
    6,north,310
    0,south,80

A value holds until the next time of the same client or region. The file begins anew one step after
its last time; a step is the least distance between two of its times, 1 if there is one time alone.
Before its first time a client has its last value.
"""

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
#: What an error says that a file must have.
FORM = "the columns hour or second, client or region, and value"


class Timeline(NamedTuple):
    """Values of all clients over one turn of a file."""

    second_t: FloatArray  #: from when on, in increasing order
    value_tm: FloatArray
    length: float  #: seconds of a turn

    def row(self, clock: float) -> int:
        """The place of the values that hold at a moment of the virtual clock."""
        # Before the first time the last values hold: -1 is their place.
        return int(np.searchsorted(self.second_t, clock % self.length, side="right")) - 1

    def mean_m(self) -> FloatArray:
        """The mean of each client's values over a turn, float64 (m,)."""
        # The last value holds into the next turn.
        end_t = np.append(self.second_t[1:], self.length + self.second_t[0])
        total_m = (end_t - self.second_t) @ self.value_tm
        return np.asarray(total_m / self.length)


def has_values(path: str) -> bool:
    """Whether a file is of this form, by its header."""
    header = read_bytes(Path(path), users=True).partition(b"\n")[0]
    return VALUE in header.decode("utf-8-sig", errors="replace").strip().split(",")


def read_trace(path: str, population: Population) -> Timeline:
    """The values of a file for each client; a ``DeltaflError`` if one has none, or a row is bad."""
    require("pandas", "sim")
    import pandas as pd

    content = read_bytes(Path(path), users=True)
    try:
        # Names as they are written: of numbers "007" would be 7.
        table = pd.read_csv(BytesIO(content), dtype=dict.fromkeys(OWNERS, str))
        units = [name for name in UNITS if name in table]
        owners = [name for name in OWNERS if name in table]
        if len(units) != 1 or len(owners) != 1 or VALUE not in table or table.empty:
            raise ValueError("it has other columns, or no rows")
        unit = units[0]
        owner = owners[0]
        second_k = table[unit].to_numpy(np.float64) * UNITS[unit]
        value_k = table[VALUE].to_numpy(np.float64)
        numbers = np.concatenate([second_k, value_k])
        if not np.isfinite(numbers).all() or numbers.min() < 0:
            raise ValueError("a time or a value is missing or below 0")
    except ValueError as error:
        raise DeltaflError(
            f"{path} must be a CSV file with {FORM}, times and values >= 0: {in_one_line(error)}"
        ) from None
    names, code_m = _owners(path, owner, population)
    of_k = table[owner].fillna("").str.strip().to_numpy()
    second_t, time_k = np.unique(second_k, return_inverse=True)
    value_th = np.full((len(second_t), len(names)), np.nan)
    place = {name: index for index, name in enumerate(names)}
    for row, (name, time, value) in enumerate(zip(of_k, time_k, value_k, strict=True), start=1):
        index = place.get(name)
        if index is None:
            # A file may be of more regions than there are clients of.
            if owner == "region":
                continue
            raise DeltaflError(
                f"{path}: row {row} is of client {printable(name, limit=60)!r}; clients are "
                f"numbers from 0 to {len(names) - 1}"
            )
        if not np.isnan(value_th[time, index]):
            raise DeltaflError(
                f"{path}: row {row} has a second value of {owner} "
                f"{printable(name, limit=60)!r} for one time; keep one"
            )
        value_th[time, index] = value
    _hold(path, owner, names, value_th)
    step = 1.0
    if len(second_t) > 1:
        step = float(np.diff(second_t).min())
    return Timeline(second_t, value_th[:, code_m], float(second_t[-1]) + step)


def _owners(path: str, owner: str, population: Population) -> tuple[list[str], IntArray]:
    """The names in a file, and the place of each client's among them."""
    if owner == "client":
        every_m = np.arange(population.num_clients)
        return [str(client) for client in every_m], every_m
    if population.strata is None:
        raise DeltaflError(
            f"{path} is by region, and nobody said of which region a client is: write --strata "
            "COLUMN with a table, or use the column client"
        )
    return list(population.strata.names), population.strata.code_m


def _hold(path: str, owner: str, names: list[str], value_th: FloatArray) -> None:
    """Let each value hold until the next one, and the last ones until the first."""
    for name, value_t in zip(names, value_th.T, strict=True):
        known = np.flatnonzero(~np.isnan(value_t))
        if len(known) == 0:
            raise DeltaflError(
                f"{path} has no value for {owner} {printable(name, limit=60)!r}; give it one row "
                "at least"
            )
        # -1, the last one, before the first.
        place_t = np.searchsorted(known, np.arange(len(value_t)), "right") - 1
        value_t[:] = value_t[known[place_t]]
