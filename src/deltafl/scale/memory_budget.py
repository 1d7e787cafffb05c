"""The memory that one update per client takes (``rows.py``), estimated before a run; what does
not fit is refused.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from ..errors import DeltaflError
from .rows import DTYPES, RowFormat

#: Copies of what a checkpoint holds while it is written: the rows, the tensor, its bytes, the
#: file's bytes.
COPIES = 4


class MemorySize(NamedTuple):
    """Bytes that a run's memory of one update per client takes at most."""

    ram: int
    disk: int


def memory_size(
    format: RowFormat, shape: tuple[int, int], rows_a_checkpoint: int | None
) -> MemorySize:
    """An estimate from above; ``shape`` is (m, d), and None rows a checkpoint: there are no
    checkpoints.
    """
    row = shape[1] * DTYPES[format.dtype].itemsize
    if format.folder is None:
        copies, files = (1, 0) if rows_a_checkpoint is None else (COPIES, 2)
        return MemorySize(ram=copies * shape[0] * row, disk=files * shape[0] * row)
    changed = min(shape[0], rows_a_checkpoint or shape[0])
    return MemorySize(ram=COPIES * changed * row, disk=(shape[0] + 2 * changed) * row)


def require_room(
    size: MemorySize,
    format: RowFormat,
    checkpoints: Path | None,
    fewer_rows: str = "a lower checkpoint_every",
    setting: str = "--out",
    held: int = 0,
) -> None:
    """Raise a ``DeltaflError`` if a memory needs more RAM, or more of the disk, than is free.

    ``fewer_rows`` and ``setting`` are the host's words: what makes fewer rows change between two
    checkpoints, and where checkpoints go. ``held`` bytes of the RAM are taken already.
    """
    start = "the memory of one update per client takes up to"
    cure = "an estimator that keeps one model: 'difference'"
    cure = (
        f"or {cure}" if format.dtype == "bfloat16" else f"memory_dtype bfloat16 (half), or {cure}"
    )
    ram = free_ram()
    if ram is not None and size.ram - held > ram:
        change = fewer_rows if format.folder else "memory_path (a folder on a disk)"
        raise DeltaflError(
            f"{start} {human(size.ram)} of RAM and {human(ram)} are free: set {change}, {cure}"
        )
    place = Path(format.folder) if format.folder else checkpoints
    if place is None:
        return
    there = next(
        folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir()
    )
    allocated = sum(
        512 * file.stat().st_blocks for file in place.glob("rows*.bin")
    )  # they may be sparse
    disk = shutil.disk_usage(there).free + allocated
    if size.disk > disk:
        change = f"choose another {'memory_path' if format.folder else setting}"
        raise DeltaflError(
            f"{start} {human(size.disk)} in {place} and {human(disk)} are free: {change}, {cure}"
        )


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping; None where the system has no answer."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None
    )


def human(number: int) -> str:
    """Bytes as a person writes them: 1.2 GB."""
    value = float(number)
    unit = 0
    while value >= 999.5 and unit < 4:
        value = value / 1000
        unit = unit + 1
    return f"{value:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
