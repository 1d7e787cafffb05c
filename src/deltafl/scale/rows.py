"""The memory of one update per client: m rows of d numbers, in RAM (a tuple of rows) or in a file,
float32 or bfloat16.

Rows that change are kept in RAM, and a checkpoint holds them. Only when it is valid are they
written into the file (``settled``), which ends the life of older states. So after kill -9 at any
moment, loading the checkpoint and writing its rows again gives the state bit for bit. The note
beside the rows (``store/folder.py``) shows whether they belong to a checkpoint.
"""

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..store.files import make_folder, opened, remove, sync_folder
from ..types import LARGEST_STEP, Array, FloatArray, IntArray, Params
from .numerics import largest, largest_entry, weighted_sum
from .used_again import new_like

#: float32 (d,), or uint16 (d,): the bits of bfloat16.
Row = npt.NDArray[Any]
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
}

#: A new file is begun where clients leave.
_MOST_FILES = 10**9
#: A running sum is lost where rounding may be more than this share of its largest entry.
LOST = 2.0**-20


@dataclass(frozen=True)
class RowFormat:
    """How rows are kept."""

    dtype: str = "float32"  #: or "bfloat16"
    folder: str | None = None  #: where the file goes, a folder of this run alone; None for RAM
    is_bits: bool = False  #: whether rows are bits of anything, not numbers

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DeltaflError(f"memory_dtype is {self.dtype!r}; write 'float32' or 'bfloat16'")

    def zeros(self, num_clients: int, num_params: int) -> "Rows":
        """Rows of zeros; they take no memory until they change."""
        zero_d = np.zeros(num_params, DTYPES[self.dtype])
        if self.folder is None:
            return (zero_d,) * num_clients
        crc_m = np.full(num_clients, zlib.crc32(zero_d.data), np.uint32)
        return MappedRows(self, (num_clients, num_params), crc_m)


def to_bfloat16(value_d: Params) -> npt.NDArray[np.uint16]:
    """float32 without its lower 16 bits, rounded to nearest, ties to even; values below 3.38e38
    stay finite.
    """
    bits_d = np.ascontiguousarray(value_d, np.float32).view(np.uint32)
    # 0x7FFF and the lowest bit that stays: what lies half-way goes to the even neighbour.
    rounding_d = 0x7FFF + ((bits_d >> 16) & 1)
    return (bits_d + rounding_d >> 16).astype(np.uint16)


def from_bfloat16(bits_d: npt.NDArray[np.uint16]) -> Params:
    """The float32 values of bfloat16 bits."""
    return (bits_d.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Rows in a file, and those that changed since it was written. Immutable, but for the file."""

    format: RowFormat
    shape: tuple[int, int]
    crc_m: Row  #: the CRC-32 of the rows in the file
    changed: Mapping[int, Row] = field(default_factory=dict)
    #: which file holds the others, counted from 1; 0 if none does: then they are zero
    written: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the stored numbers."""
        return DTYPES[self.format.dtype]

    @property
    def num_bytes(self) -> int:
        """The size of a file with all rows."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def path(self) -> Path:
        """The file."""
        name = "rows.bin"
        if self.written >= 2:
            name = f"rows-{self.written}.bin"
        return Path(str(self.format.folder)) / name

    @cached_property
    def _file(self) -> "np.memmap[Any, Any]":
        # When it is first read: in a run, most of these objects are replaced before.
        with opened(self.path) as file:
            return np.memmap(file, self.dtype, "r", shape=self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Row:
        if client in self.changed:
            return self.changed[client]
        if not self.written:
            return np.zeros(self.shape[1], self.dtype)
        # Looked at in each read: the mapping shows what is on the disk now.
        stored_d: Row = self._file[client]
        is_whole = zlib.crc32(stored_d.data) == self.crc_m[client]
        # A forged file may have the right checksums.
        if not is_whole or not (self.format.is_bits or is_step(stored_d)):
            raise DeltaflError(
                f"the update of client {client} in {self.path} is not as it was written: put "
                "copies of this file and of the run's folder back that were made at the same "
                "time, or start anew"
            )
        return stored_d

    def __iter__(self) -> Iterator[Row]:
        return (self[client] for client in range(len(self)))

    def replaced(self, rows: Mapping[int, Row]) -> "MappedRows":
        """The same with other rows of some clients."""
        return replace(self, changed={**self.changed, **rows})

    def lengthened(self, num_clients: int) -> "MappedRows":
        """With rows of zeros for clients who join."""
        # What a file that is made longer has in its new rows.
        zero_crc = zlib.crc32(bytes(self.shape[1] * self.dtype.itemsize))
        joined_k = np.full(num_clients - len(self), zero_crc, np.uint32)
        rows = replace(
            self,
            shape=(num_clients, self.shape[1]),
            crc_m=np.append(self.crc_m, joined_k),
        )
        if self.written:
            # The last checkpoint does not look at the file beyond its own rows. Never shorter:
            # it may have more of them.
            with opened(self.path, "r+b") as file:
                file.truncate(max(rows.num_bytes, file.seek(0, os.SEEK_END)))
        return rows

    def kept(self, kept_k: IntArray) -> "MappedRows":
        """The rows of some clients alone, in this order."""
        clients = kept_k.tolist()
        # Read twice, for the checksums and to be written: all rows may not fit into RAM.
        crc_k = np.array([zlib.crc32(self[client].data) for client in clients], np.uint32)
        # In a new file: the last checkpoint needs the old one.
        shape = (len(clients), self.shape[1])
        rows = MappedRows(self.format, shape, crc_k, written=self.written + 1)
        rows._write(enumerate(self[client] for client in clients), new=True)
        return rows

    def _write(self, rows: Iterable[tuple[int, Row]], new: bool) -> None:
        """Write rows into the file."""
        folder = self.path.parent
        make_folder(folder, private=True)
        mode = "r+b"
        if new:
            mode = "wb"
        # Not through the mapping: there, a full disk would end the process.
        with opened(self.path, mode, private=True) as file:
            if new:
                # Zeros that take no space yet.
                file.truncate(self.num_bytes)
            for client, row_d in rows:
                file.seek(client * row_d.nbytes)
                file.write(row_d.tobytes())
            # On the disk before the next checkpoint, which does not hold these rows any more.
            file.flush()
            os.fsync(file.fileno())
        # And the name of a new file, which is an entry of its folder.
        sync_folder(folder)

    def journal(self) -> dict[str, Array]:
        """What a checkpoint holds: the changed rows, and which file holds the others."""
        # In order, so that one state is always the same file.
        clients = sorted(self.changed)
        row_kd = np.zeros((len(clients), self.shape[1]), self.dtype)
        for place, client in enumerate(clients):
            row_kd[place] = self.changed[client]
        return {
            "client_k": np.array(clients, np.int64),
            "row_kd": row_kd,
            "written": np.array(self.written, np.int64),
            "crc_m": self.crc_m,
        }

    def restored(self, journal: Mapping[str, Array]) -> "MappedRows":
        """The rows of a checkpoint, if the file that they go with is there."""
        client_k, row_kd, number, crc_m = (journal[name] for name in self.journal())
        first_k = np.append(-1, client_k)
        fits = (
            crc_m.shape == self.crc_m.shape
            and crc_m.dtype == self.crc_m.dtype
            and row_kd.shape == (len(client_k), self.shape[1])
            and row_kd.dtype == self.dtype
            and number.shape == ()
            # In order, each once.
            and np.all(np.diff(first_k) > 0)
            and first_k[-1] < len(self)
            and {client_k.dtype, number.dtype} == {np.dtype(np.int64)}
            and 0 <= number < _MOST_FILES
        )
        if not fits:
            raise DeltaflError(
                "the clients' updates in the saved state are not as rounds leave them; put a copy "
                "back, or start anew elsewhere"
            )
        changed = dict(zip(client_k.tolist(), row_kd, strict=True))
        written = int(number)
        rows = replace(self, changed=changed, written=written, crc_m=crc_m)
        path = rows.path
        # It may be longer: of clients who joined after the checkpoint.
        if written and (not path.is_file() or path.stat().st_size < rows.num_bytes):
            raise DeltaflError(
                f"the clients' updates are not in {path}, or not all of them; put the file "
                "back, or start anew"
            )
        return rows

    def settled(self) -> "MappedRows":
        """The same with the changed rows in the file, and older files deleted.

        Only once a checkpoint holds these rows: older states end with it.
        """
        if self.written:
            for other in set(row_files(self.path.parent)) - {self.path}:
                remove(other)
        if not self.changed:
            return self
        self._write(sorted(self.changed.items()), new=not self.written)
        crc_m = self.crc_m.copy()
        for client, row_d in self.changed.items():
            crc_m[client] = zlib.crc32(row_d.data)
        return MappedRows(self.format, self.shape, crc_m, written=max(self.written, 1))


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, which only their owner makes there."""
    return [
        path for path in folder.glob("rows*.bin") if re.fullmatch(r"rows(-\d+)?\.bin", path.name)
    ]


#: A tuple, one (m, d) array, as it is after a resume, or a file.
Rows = tuple[Row, ...] | Row | MappedRows


def together(rows: Sequence[Params]) -> Sequence[Params] | Params:
    """The float32 array (n, d) whose rows these are, in order, or else the rows: what is one array
    is read, and handed on, at once.
    """
    whole: Any = rows[0].base if rows else None
    # That of an array from another process is a text of bytes.
    if not isinstance(whole, np.ndarray) or whole.dtype != np.float32:
        return rows
    places = [row_d.ctypes.data - whole.ctypes.data for row_d in rows]
    if whole.shape != (len(rows), len(rows[0])) or whole.strides[1] != rows[0].strides[0]:
        return rows
    if places != [whole.strides[0] * place for place in range(len(rows))]:
        return rows
    return whole


def read_rows(
    rows: Sequence[Row] | Row,
    part: slice,
    num_params: int,
    dtype: type[np.floating[Any]],
) -> Any:
    """A stretch of some rows that has so many parameters, (n, b) of a type of floats."""
    if isinstance(rows, np.ndarray) and rows.dtype == np.float32:
        return rows[:, part].astype(dtype, order="C")
    row_nb = np.empty((len(rows), num_params), dtype)
    for wide_b, row_d in zip(row_nb, rows, strict=True):
        wide_b[:] = row_values(row_d[part])
    return row_nb


def is_step(stored_d: Row) -> bool:
    """Whether a row holds numbers that an update may have."""
    return bool(np.all(np.abs(row_values(stored_d)) <= LARGEST_STEP))


def row_type(rows: Rows) -> np.dtype[Any]:
    """The type of the stored numbers."""
    # Not that of the first row of a file, which would be read for it.
    return rows.dtype if isinstance(rows, MappedRows) else rows[0].dtype


def row_values(stored_d: Row) -> Params:
    """The values of a stored row, float32 (d,)."""
    if stored_d.dtype == np.uint16:
        return from_bfloat16(stored_d)
    return stored_d


def put_rows(rows: Rows, client_n: IntArray, row_nd: Sequence[Row]) -> Rows:
    """The rows with new ones of some clients, which belong to them from now on."""
    replaced = dict(zip(client_n.tolist(), row_nd, strict=True))
    if isinstance(rows, MappedRows):
        return rows.replaced(replaced)
    listed = list(rows)
    for client, row_d in replaced.items():
        listed[client] = row_d
    return tuple(listed)


def stored(update_d: Params, dtype: np.dtype[Any]) -> Row:
    """Values as rows of this type hold them."""
    if dtype == np.uint16:
        return to_bfloat16(update_d)
    return update_d


class RunningSum(NamedTuple):
    """sum_j w_j c_j, followed by differences (n d operations a round, not m d), and a bound of its
    rounding errors.

    To replace c_i by c_i', add w_i (c_i' - c_i). Where one c_i was enormous for a while, such as
    1e18 from a broken client, the other clients' part is rounded away, and without the bound the
    estimate would keep that bias for ever.
    """

    total_d: FloatArray
    rounding: FloatArray  # of every entry of the sum, >= 0

    def is_lost(self, share: float = LOST) -> bool:
        """Whether it must be recomputed."""
        return bool(self.rounding > share * largest_entry(self.total_d))


class Following:
    """A running sum to which sum_i coef_i row_i is added, one stretch after the other. ``dtype`` is
    what the rows were computed in.
    """

    def __init__(
        self,
        before: RunningSum,
        coef_n: FloatArray,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        self._before = before
        self._coef_n = coef_n
        self._epsilon = float(np.finfo(np.dtype(dtype)).eps)
        self._total_d = new_like(before.total_d)

    def add(self, part: slice, row_nb: FloatArray) -> FloatArray:
        """Add a stretch of the rows, (n, b); the largest entries, (1 + n,), of sum and rows."""
        added_b = weighted_sum(self._coef_n, row_nb, row_nb.shape[1])
        return self.add_sum(part, added_b, largest(row_nb))

    def add_sum(self, part: slice, added_b: FloatArray, most_n: Array) -> FloatArray:
        """The same, given the sum and bounds of the rows' entries."""
        before_b = self._before.total_d[part]
        np.add(before_b, added_b, out=self._total_d[part])
        return np.append(largest(before_b[None]), most_n)

    def sum(self, largest_of: Sequence[FloatArray]) -> RunningSum:
        """The sum, given what ``add`` has returned for all stretches."""
        most_1n = np.max(largest_of, axis=0)
        size = float(most_1n @ np.append(1.0, np.abs(self._coef_n)))
        # A difference and a product for each row, then the sums.
        operations = len(self._coef_n) + 2
        rounding = self._before.rounding + operations * self._epsilon * size
        return RunningSum(self._total_d, np.asarray(rounding))


def settled(state: Any) -> Any:
    """The state with its changed rows in their files (``rows.py``): for states that a checkpoint
    holds.
    """
    if hasattr(state, "_fields"):
        return type(state)(*(settled(part) for part in state))
    if isinstance(state, MappedRows):
        return state.settled()
    return state
