"""``checkpoint.safetensors``: the last good state of a run, and what belongs to it.

Its header has the settings, the seals of the files beside it, and a random name of the run, which
the note in the memory's folder has too. So a file that is damaged, edited or of another run is
refused.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ...errors import DeltaflError
from ...store.folder import Note
from ...store.lines import Seal, seal_of
from ...store.sealed import read_header, read_sealed, write_sealed
from ...store.values import checked
from ...types import Array, Json

FILE = "checkpoint.safetensors"
#: What to do about a damaged file.
CURE = "delete this run's folder, or choose another one, to run it again"


class Checkpoint(NamedTuple):
    """The header."""

    round: Annotated[int, Field(ge=0, le=10**9)]
    run: str  #: the random name
    settings: Json
    files: dict[str, Seal]  #: of the files beside it, without which none is whole
    #: of ``clients.json``, if the run has ended, and of all lines, if that was without another
    #: checkpoint
    ended: dict[str, Seal]
    memory: str | None = None  #: the folder of the clients' updates
    #: the one in that folder when this was written; the next one is of this round
    note: Note | None = None

    def is_whole(self, file: Path) -> bool:
        """Whether a file is as it was when this was written, or the run ended; what was added is
        not looked at.
        """
        # ``ended`` wins where both have a file: it is of more of its lines.
        known = (self.files | self.ended).get(file.name)
        if known is None:
            return True
        return file.exists() and seal_of(file, end=known.length) == known

    def require(self, file: Path) -> None:
        """Refuse a file that is not whole."""
        if not self.is_whole(file):
            if not file.exists():
                raise DeltaflError(f"{file} is not there: {CURE}")
            raise DeltaflError(f"{file} is not as it was written, its checksum differs: {CURE}")


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """What the last checkpoint of a folder says; None if there is none."""
    file = folder / FILE
    if not file.exists():
        return None
    return checked(Checkpoint, read_header(file, CURE), str(file), CURE)


def checkpoint_arrays(folder: Path) -> dict[str, Array]:
    """The state of the last checkpoint, as named arrays."""
    return read_sealed(folder / FILE, CURE)[0]


def change_checkpoint(folder: Path, **changes: Any) -> None:
    """Write other entries into the last checkpoint, whose state stays."""
    # Read and written as a whole: one checksum is of the whole header.
    arrays, header = read_sealed(folder / FILE, CURE)
    write_sealed(folder / FILE, arrays, header | changes)
