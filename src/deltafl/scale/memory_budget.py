"""The memory budget of one update a client (``rows.py``): estimated before a run, which is refused if it is short."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from ..errors import DeltaflError
from .rows import DTYPES, RowFormat

#: Copies of what a checkpoint holds while it is written: the rows, the tensor, its bytes, the file's bytes.
COPIES = 4


class MemorySize(NamedTuple):
    """Bytes that a run's memory of one update a client takes at most."""

    ram: int
    disk: int


def memory_size(format: RowFormat, shape: tuple[int, int], rows_a_checkpoint: int | None) -> MemorySize:
    """An estimate from above, checkpoints included.

    Args:
        format: How rows are kept.
        shape: (m, d).
        rows_a_checkpoint: Rows that change between two checkpoints, at most n times the rounds between them; None where
            there are no checkpoints.
    """
    row = shape[1] * DTYPES[format.dtype].itemsize
    if format.folder is None:
        copies = (1, 0) if rows_a_checkpoint is None else (COPIES, 2)
        return MemorySize(ram=copies[0] * shape[0] * row, disk=copies[1] * shape[0] * row)
    changed = min(shape[0], rows_a_checkpoint or shape[0])
    return MemorySize(ram=COPIES * changed * row, disk=(shape[0] + 2 * changed) * row)


def memory_words(format: RowFormat, shape: tuple[int, int], size: MemorySize, place: str) -> str:
    """What such a memory is and takes, as the end of a sentence; ``place`` is where on the disk, as in "in DIR"."""
    text = (
        f"remembers one update a client, {shape[0]:,} x {shape[1]:,} numbers ({format.dtype}): "
        f"at most {human(size.ram)} of RAM"
    )
    return text if size.disk == 0 else f"{text}, checkpoints included, and {human(size.disk)} {place}"


class Cures(NamedTuple):
    """What to change where a memory does not fit, by the names that a host's settings have.

    Attributes:
        fewer_rows: What makes fewer rows change between two checkpoints.
        checkpoints: The setting for where checkpoints go.
    """

    fewer_rows: str = "a lower checkpoint_every"
    checkpoints: str = "--out"


def require_room(
    size: MemorySize, format: RowFormat, checkpoints: Path | None, cures: Cures | None = None, held: int = 0
) -> None:
    """Refuse a memory that does not fit.

    Args:
        size: What it needs.
        format: Its folder is where most of the disk is needed; without one, ``checkpoints`` is.
        checkpoints: Where checkpoints go; None if there are none.
        cures: The host's words; None for the simulator's.
        held: Bytes of RAM that its rows take already, of those that it needs.

    Raises:
        DeltaflError: If more RAM, or more of the disk, is needed than is free.
    """
    ram, words = free_ram(), cures or Cures()
    cure = "memory_dtype bfloat16 (half), or an estimator that keeps one model, such as 'difference'"
    if format.dtype == "bfloat16":
        cure = "or an estimator that keeps one model, such as 'difference'"
    if ram is not None and size.ram - held > ram:
        folder = "memory_path (a folder on a disk)" if format.folder is None else words.fewer_rows
        raise DeltaflError(
            f"the memory of one update a client takes up to {human(size.ram)} of RAM and {human(ram)} are free: "
            f"set {folder}, {cure}"
        )
    place = checkpoints if format.folder is None else Path(format.folder)
    if place is None:
        return
    disk = shutil.disk_usage(_existing(place)).free + sum(map(_allocated, place.glob("rows*.bin")))
    if size.disk > disk:
        raise DeltaflError(
            f"the memory of one update a client takes up to {human(size.disk)} in {place} and {human(disk)} are free: "
            f"choose another {words.checkpoints if format.folder is None else 'memory_path'}, {cure}"
        )


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping; None where the system has no answer."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        available = []
    if available:
        return available[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def human(number: int) -> str:
    """Bytes as a person writes them: 1.2 GB."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < 4:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def _existing(path: Path) -> Path:
    """The nearest folder above that is there already."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _allocated(path: Path) -> int:
    """Bytes on the disk that a file has already; it may be sparse."""
    return path.stat().st_blocks * 512
