"""The memory of one update a client: m rows of d numbers, in RAM or in a file, float32 or bfloat16.

========== ==================== ============================================ ======================================
format     where the rows are   a checkpoint holds                           RAM
========== ==================== ============================================ ======================================
no folder  a tuple of m arrays  all rows                                     m rows; four times that while it is
                                                                             written
folder     a file, memory-      the rows that changed since the checkpoint   rows of the rounds since the last
           mapped               before (a journal)                           checkpoint; the file's pages come and go
========== ==================== ============================================ ======================================

bfloat16 is float32 without its lower 16 bits, rounded to nearest, ties to even; 8 bits of precision, which costs a
control variate nothing but 2^-9 of its length in residuals: c is what was stored, so that the estimate stays unbiased.

**The file and the checkpoints.** A row that changes is kept in RAM; the file is not touched. A checkpoint holds these
changed rows. Only when it is valid are they written into the file (``settled``) and forgotten. So the file is never
ahead of the last valid checkpoint by anything but rows that this checkpoint holds, and after kill -9 at any moment
loading it and writing its rows again gives the state bit for bit. Rounds never change the rows of a state that they
were given; settling does, for states *older* than the checkpoint. A file and a checkpoint that do not belong together
(one of them was copied back) differ in a note beside the rows: the round of their checkpoint (``note_round``).
Clients who join make the file longer, by zeros that the checkpoint before does not look at; where clients are
forgotten, the others' rows go into a new file. What such a memory takes, and whether it fits: ``memory_budget.py``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import FloatArray, IntArray, Params

#: float32 (d,), or uint16 (d,): the bits of bfloat16.
Row = npt.NDArray[Any]
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}

#: A running sum is lost where rounding may be more than this share of its largest entry.
LOST = 2.0**-20


@dataclass(frozen=True)
class RowFormat:
    """How rows are kept.

    Attributes:
        dtype: ``"float32"`` or ``"bfloat16"``.
        folder: Where the file goes, a folder of this run alone; None for RAM.
    """

    dtype: str = "float32"
    folder: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        given: object = self.dtype
        if not isinstance(given, str) or given not in DTYPES:
            raise DeltaflError(f"memory_dtype is {self.dtype!r}; write 'float32' or 'bfloat16'")

    def zeros(self, num_clients: int, num_params: int) -> "Rows":
        """Rows of zeros; they take no room until they change."""
        if self.folder is not None:
            return MappedRows(self, (num_clients, num_params))
        return (np.zeros(num_params, dtype=DTYPES[self.dtype]),) * num_clients


def to_bfloat16(value_d: Params) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each float32, ties to even; finite values below 3.38e38 stay finite."""
    bits_d = np.ascontiguousarray(value_d, dtype=np.float32).view(np.uint32)
    rounded_d: npt.NDArray[np.uint16] = ((bits_d + (0x7FFF + ((bits_d >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded_d


def from_bfloat16(bits_d: npt.NDArray[np.uint16]) -> Params:
    """The float32 values of bfloat16 bits."""
    return (bits_d.astype(np.uint32) << 16).view(np.float32)


class MappedRows:
    """Rows in a file, and those that changed since it was written. Immutable, but for the file.

    Args:
        format: With a folder.
        shape: (m, d).
        changed: Rows by client that the file does not have yet.
        written: Which file holds the other rows, counted from 1; 0 if none does: then they are zero.
    """

    def __init__(
        self,
        format: RowFormat,
        shape: tuple[int, int],
        changed: Mapping[int, Row] | None = None,
        written: int = 0,
    ) -> None:
        self.format, self.shape, self.written = format, shape, written
        self.changed = dict(changed or {})
        self._file: np.memmap[Any, Any] | None = None

    @property
    def path(self) -> Path:
        """The file of the rows; another one once clients were forgotten."""
        return Path(str(self.format.folder)) / ("rows.bin" if self.written < 2 else f"rows-{self.written}.bin")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Row:
        """The row of a client."""
        row_d = self.changed.get(int(client))
        if row_d is not None:
            return row_d
        if not self.written:
            return np.zeros(self.shape[1], dtype=DTYPES[self.format.dtype])
        stored_d: Row = self._mapped()[client]
        return stored_d

    def __iter__(self) -> Iterator[Row]:
        return (self[client] for client in range(len(self)))

    def replaced(self, rows: Mapping[int, Row]) -> "MappedRows":
        """The same with other rows of some clients."""
        return self._with({**self.changed, **rows}, self.written)

    def resized(self, num_clients: int) -> "MappedRows":
        """With rows of zeros for clients who join.

        The file is made longer at once, by zeros that take no room: the checkpoint before does not look at them.
        """
        rows = MappedRows(self.format, (num_clients, self.shape[1]), self.changed, self.written)
        if self.written:
            os.truncate(self.path, max(rows._num_bytes(), self.path.stat().st_size))
        return rows

    def kept(self, kept_k: IntArray) -> "MappedRows":
        """The rows of some clients alone, in this order.

        They go into a new file, for the last checkpoint needs the old one until the next is there.

        Raises:
            DeltaflError: If the new file cannot be written.
        """
        shape, clients = (len(kept_k), self.shape[1]), kept_k.tolist()
        if not self.written:
            changed = {place: self.changed[client] for place, client in enumerate(clients) if client in self.changed}
            return MappedRows(self.format, shape, changed)
        rows = MappedRows(self.format, shape, written=self.written + 1)
        try:
            with rows.path.open("wb") as file:
                for client in clients:
                    file.write(self[client].tobytes())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DeltaflError(
                f"cannot write {rows.path} ({error.strerror}): when clients are forgotten, the others' updates go into "
                "a file of their own, beside the first one until the next checkpoint; make room for it"
            ) from None
        return rows

    def journal(self) -> dict[str, npt.NDArray[Any]]:
        """What a checkpoint holds: the changed rows with their clients, and which file holds the others."""
        clients = sorted(self.changed)
        row_kd = np.zeros((len(clients), self.shape[1]), dtype=DTYPES[self.format.dtype])
        for place, client in enumerate(clients):
            row_kd[place] = self.changed[client]
        return {
            "client_k": np.array(clients, dtype=np.int64),
            "row_kd": row_kd,
            "written": np.array(self.written, dtype=np.int64),
        }

    def restored(self, journal: Mapping[str, npt.NDArray[Any]]) -> "MappedRows":
        """The rows of a checkpoint.

        Raises:
            DeltaflError: If the file that the checkpoint goes with is not there, or is too short.
        """
        clients, row_kd = journal["client_k"].tolist(), journal["row_kd"]
        if row_kd.shape[1] != self.shape[1] or row_kd.dtype != DTYPES[self.format.dtype]:
            raise DeltaflError("the memory of the clients' updates has another form than these settings; start anew")
        rows = self._with(dict(zip(clients, row_kd, strict=True)), int(journal["written"]))
        if rows.written and (not rows.path.is_file() or rows.path.stat().st_size < rows._num_bytes()):
            raise DeltaflError(
                f"the clients' updates are not in {rows.path}, or not all of them; put the file back, or start anew"
            )
        return rows

    def settled(self) -> "MappedRows":
        """Write the changed rows into the file: to be called when a checkpoint that holds them is valid.

        Files of earlier or broken off changes of the clients are deleted then.
        """
        if self.written:
            for other in set(self.path.parent.glob("rows*.bin")) - {self.path}:
                other.unlink()
        if not self.changed:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.written:
            with self.path.open("wb") as file:
                file.truncate(self._num_bytes())  # zeros that take no room yet
        mapped = self._mapped()
        for client, row_d in self.changed.items():
            mapped[client] = row_d
        mapped.flush()
        return self._with({}, max(self.written, 1))

    def _with(self, changed: Mapping[int, Row], written: int) -> "MappedRows":
        rows = MappedRows(self.format, self.shape, changed, written)
        rows._file = self._file if self.written else None
        return rows

    def _mapped(self) -> "np.memmap[Any, Any]":
        if self._file is None:
            self._file = np.memmap(self.path, DTYPES[self.format.dtype], "r+", shape=self.shape)
        return self._file

    def _num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * DTYPES[self.format.dtype].itemsize


Rows = tuple[Row, ...] | Row | MappedRows


def read_rows(rows: Rows, client_n: IntArray, num_params: int) -> FloatArray:
    """The rows of some clients, float64 (n, d)."""
    row_nd = np.zeros((len(client_n), num_params))
    for wide_d, client in zip(row_nd, client_n, strict=True):
        wide_d[:] = wide_row(rows[client])
    return row_nd


def wide_row(stored_d: Row) -> FloatArray:
    """The values of a stored row, float64 (d,)."""
    narrow_d = from_bfloat16(stored_d) if stored_d.dtype == np.uint16 else stored_d
    return narrow_d.astype(np.float64)


def replace_rows(rows: Rows, client_n: IntArray, update_nd: Params) -> Rows:
    """The rows with those of some clients replaced, in the format that they have; the others are shared."""
    narrow = DTYPES[rows.format.dtype] if isinstance(rows, MappedRows) else rows[0].dtype
    new = {
        int(client): to_bfloat16(update_d) if narrow == np.uint16 else update_d.copy()
        for client, update_d in zip(client_n, update_nd, strict=True)
    }
    if isinstance(rows, MappedRows):
        return rows.replaced(new)
    listed = list(rows)
    for client, row_d in new.items():
        listed[client] = row_d
    return tuple(listed)


class RunningSum(NamedTuple):
    """sum_j w_j c_j, followed by differences (n d operations a round, not m d), and a bound of its rounding errors.

    To replace c_i by c_i', add w_i (c_i' - c_i). Where one c_i was enormous for a while, such as 1e18 from a broken
    client, the other clients' part of the sum is rounded away; once that c_i is replaced, what is left is no longer
    the sum, and the estimate would keep that bias for ever. Where the bound is no longer small beside the sum, the sum
    has to be formed anew; in ordinary runs it never is.

    Attributes:
        total_d: float64 (d,).
        rounding: float64 (), a bound of the error of every entry, >= 0.
    """

    total_d: FloatArray
    rounding: FloatArray

    @property
    def is_lost(self) -> bool:
        """Whether the error may be more than a millionth of the sum's largest entry."""
        return float(self.rounding) > LOST * _largest(self.total_d)

    def plus(self, coef_n: FloatArray, rows: Iterable[np.ndarray[Any, Any]]) -> "RunningSum":
        """With sum_i coef_i row_i added."""
        size = _largest(self.total_d)

        def noted() -> Iterator[np.ndarray[Any, Any]]:
            nonlocal size
            for coef, row_d in zip(coef_n, rows, strict=True):
                size += abs(float(coef)) * _largest(row_d)
                yield row_d

        total_d = self.total_d + weighted_sum(coef_n, noted(), len(self.total_d))
        operations = len(coef_n) + 2  # a difference and a product for each row, then the sums
        return RunningSum(total_d, np.asarray(self.rounding + operations * np.finfo(np.float64).eps * size))


def weighted_sum(coef_n: FloatArray, rows: Iterable[np.ndarray[Any, Any]], num_params: int) -> FloatArray:
    """sum_i coef_i row_i in float64, one row after the other: the same bits whatever BLAS or thread count."""
    total_d = np.zeros(num_params)
    for coef, row_d in zip(coef_n, rows, strict=True):
        total_d += coef * row_d.astype(np.float64, copy=False)
    return total_d


def _largest(value_d: np.ndarray[Any, Any]) -> float:
    """The largest absolute value; 0 if there is none."""
    return max(float(value_d.max(initial=0)), -float(value_d.min(initial=0)))
