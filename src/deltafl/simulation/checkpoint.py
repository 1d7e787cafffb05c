"""``checkpoint.json``: which files make up a checkpoint of a run, and what shows that they belong
together.

It holds the settings, the lengths and CRC-32 of the files beside it and a random name of the run,
which the note in the memory's folder has too. So a file that is damaged, edited or of another run
is refused.
"""

import json
import os
import secrets
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DeltaflError
from ..io import checked, read_json, read_tensors, reading, write_atomically
from ..scale.rows import Note, is_own_folder, noted
from ..types import Array

FILE = "checkpoint.json"
#: What to do about a damaged file.
CURE = (
    "it is damaged, or of an older version: delete this run's folder, or choose another one, "
    "to "
    "run it again"
)


class Checkpoint(NamedTuple):
    """What the file holds."""

    round: int
    crc32: int  # of the tensors
    files: dict[str, tuple[int, int]]  # lengths and CRC-32 of the files beside it
    run: str  # the random name
    settings: dict[str, Any]
    memory: (
        Note | None
    )  # the note in the memory's folder when this was written; the next one is of this round
    ended: dict[
        str, tuple[int, int]
    ]  # of all lines, if the run has ended without another checkpoint
    seal: int = 0  # CRC-32 of the entries above

    @property
    def tensors(self) -> str:
        """The name of the file of the tensors."""
        return f"checkpoint-{self.round}.safetensors"

    def sealed(self) -> "Checkpoint":
        """With the seal that belongs to it."""
        return self._replace(seal=zlib.crc32(json.dumps(self[:-1]).encode()))

    def write(self, folder: Path) -> None:
        """Make it the last checkpoint of a folder."""
        write_atomically(folder / FILE, json.dumps(self.sealed()._asdict(), indent=1) + "\n")

    def is_whole(self, file: Path) -> bool:
        """Whether a file is as it was when this was written, or the run ended; what was added is
        not looked at.
        """
        known = (self.files | self.ended).get(file.name)
        return known is None or measured(file, end=known[0]) == known

    def require(self, file: Path) -> None:
        """Refuse a file that is not whole."""
        if not self.is_whole(file):
            raise DeltaflError(f"{file} is not as it was written, its checksum differs: {CURE}")

    def arrays(self, folder: Path) -> dict[str, Array]:
        """The tensors."""
        return read_tensors(folder / self.tensors, CURE, self.crc32)[0]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint of a folder; None if there is none."""
    file = folder / FILE
    if not file.exists():
        return None
    mark = checked(Checkpoint, read_json(file), str(file), CURE)
    if mark.seal != mark.sealed().seal:
        raise DeltaflError(f"{file} is not as it was written: {CURE}")
    return mark


def measured(
    file: Path, known: tuple[int, int] = (0, 0), end: int | None = None, sync: bool = False
) -> tuple[int, int]:
    """Length and CRC-32 of a file up to ``end``, from those of its beginning that are ``known``.

    With ``sync`` they are on the disk then: a power loss does not shorten the file.
    """
    size, checksum = known
    with reading(file), file.open("r+b" if sync else "rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        opened.seek(size)
        while part := opened.read(2**20 if end is None else min(2**20, end - size)):
            size = size + len(part)
            checksum = zlib.crc32(part, checksum)
    return size, checksum


def memory_folder(run: Path, memory_path: str) -> Path:
    """The folder that ``memory.json`` names, or a new one; followed nowhere but into
    ``memory_path``.
    """
    note = run / "memory.json"
    within = Path(memory_path).absolute()
    if not note.exists():
        own = within / f"{run.name}-{secrets.token_hex(4)}"
        write_atomically(note, json.dumps({"folder": str(own)}) + "\n")
    folder = Path(checked(dict[str, str], read_json(note), str(note), CURE).get("folder", ""))
    if not is_own_folder(folder, within):
        raise DeltaflError(
            f"{note} names {folder}, which is no folder of a run in {within}: start where the run "
            f"began, or {CURE}"
        )
    return folder


def require_memory(folder: Path, run: Path, mark: Checkpoint | None) -> None:
    """Refuse a memory that is not of the last checkpoint, nor of the one before if that one was
    just written.
    """
    note = noted(folder)
    round, name = (mark.round, mark.run) if mark else (0, "")
    if note in ((mark.memory, Note(round, name)) if mark else (None,)):
        return
    of = (
        "not there"
        if note is None
        else f"of round {note.round}" + ("" if note.owner == name else " of another run")
    )
    raise DeltaflError(
        f"the memory in {folder} is {of}, and the last checkpoint of {run} is of round {round}: "
        "put copies of both "
        "back that were made at once, continue a copy that has gone on, or run this one again in "
        "another folder"
    )
