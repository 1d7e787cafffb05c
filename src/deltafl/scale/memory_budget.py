"""The memory that one update per client takes (``rows.py``), estimated before a run; what does
not fit is refused.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from ..errors import DeltaflError
from ..store.room import free_ram, human
from .rows import DTYPES, RowFormat, row_files

#: Copies of what a checkpoint holds while it is written: the rows, the tensor, its bytes, the
#: file's bytes.
COPIES = 4


class MemorySize(NamedTuple):
    """Bytes that a run's memory of one update per client takes at most."""

    ram: int
    disk: int


def memory_size(
    format: RowFormat,
    shape: tuple[int, int],
    rows_a_checkpoint: int | None,
) -> MemorySize:
    """An estimate from above; ``shape`` is (m, d), and None rows a checkpoint: there are no
    checkpoints.
    """
    num_clients, num_params = shape
    row = num_params * DTYPES[format.dtype].itemsize
    rows = num_clients * row
    if format.folder is None and rows_a_checkpoint is None:
        return MemorySize(ram=rows, disk=0)
    # The last checkpoint stays until the next one is whole: there are two of them.
    if format.folder is None:
        return MemorySize(ram=COPIES * rows, disk=2 * rows)
    # Rows that changed since a checkpoint are in RAM until the next one.
    changed = min(num_clients, rows_a_checkpoint or num_clients) * row
    return MemorySize(ram=COPIES * changed, disk=rows + 2 * changed)


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
    less = "or an estimator that keeps one model: 'difference'"
    if format.dtype != "bfloat16":
        less = f"memory_dtype bfloat16 (half), {less}"
    ram = free_ram()
    if ram is not None and size.ram - held > ram:
        change = "memory_path (a folder on a disk)"
        if format.folder:
            change = fewer_rows
        raise DeltaflError(
            f"the memory of one update per client takes up to {human(size.ram)} of RAM and "
            f"{human(ram)} are free: set {change}, {less}"
        )
    place = checkpoints
    if format.folder:
        place = Path(format.folder)
        setting = "memory_path"
    if place is None:
        return
    folders = (place.absolute(), *place.absolute().parents)
    # The folder may be made later: what counts is the disk of the first one above it that is there.
    there = next(folder for folder in folders if folder.is_dir())
    # The rows that are there already, by what they take: their files may be sparse, or be links.
    allocated = sum(512 * file.lstat().st_blocks for file in row_files(place))
    disk = shutil.disk_usage(there).free + allocated
    if size.disk > disk:
        raise DeltaflError(
            f"the memory of one update per client takes up to {human(size.disk)} in {place} and "
            f"{human(disk)} are free: choose another {setting}, {less}"
        )
