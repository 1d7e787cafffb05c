"""The server's memory of one update a client, where an estimator has one: its settings, its folder, its room.

With ``memory_path`` the rows are in a file (``estimators/memory.py``) in a folder of their own, which the saved state
names. Of a file and a state that do not belong together (a copy of one of them was put back) the server would count on
updates that nobody sent, so each says which round it is of::

    MEMORY_PATH/federation-XXXXXXXX/rows.bin     the rows
    MEMORY_PATH/federation-XXXXXXXX/round        the round whose state they belong to, once all of them are written

No Flower here.
"""

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import DeltaflError
from ..estimators.memory import DTYPES, RowFormat, note_round, noted_round
from ..scale.memory_budget import Cures, MemorySize, memory_size, memory_words, require_room

#: What to change where it does not fit, in ``DeltaStrategy``'s words.
CURES = Cures("a lower n", "state_path")


@dataclass(frozen=True)
class ServerMemory:
    """How and where the server keeps one update a client.

    Attributes:
        dtype: ``"float32"`` or ``"bfloat16"``: ``memory_dtype``.
        path: ``memory_path``: below it is the folder of the rows; None for RAM.
        state_path: Where the state is saved after every round; None if it is not. Needed with ``path``.
        folder: The folder of the rows, this federation's alone; None before there is one.
    """

    dtype: str = "float32"
    path: str | Path | None = None
    state_path: Path | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown types, and rows in a file without the state that they belong to."""
        RowFormat(self.dtype)
        if self.path is None:
            return
        if not isinstance(self.path, str | Path):
            raise DeltaflError(f"memory_path is {self.path!r}; write a folder on a disk, or None for RAM")
        if self.state_path is None:
            raise DeltaflError(
                f"memory_path is {str(self.path)!r} and there is no state_path: the file is a part of the saved state; "
                "write state_path=..., too, or leave memory_path out"
            )

    @property
    def is_default(self) -> bool:
        """Whether nothing was chosen."""
        return self.dtype == "float32" and self.path is None

    @property
    def rows(self) -> RowFormat:
        """How the rows are kept."""
        folder = self.folder or self.path
        return RowFormat(self.dtype, None if folder is None else str(folder))

    def placed(self) -> "ServerMemory":
        """With a new folder of its own, which is made when there are rows to write."""
        if self.path is None:
            return self
        return self.at(str(Path(self.path).absolute() / f"federation-{secrets.token_hex(4)}"))

    def at(self, folder: str) -> "ServerMemory":
        """With a folder that is known, from a saved state."""
        return replace(self, folder=folder)

    def size(self, num_clients: int, num_params: int, n: int) -> MemorySize:
        """What it takes at most, in bytes: the state is saved after every round of n clients."""
        return memory_size(self.rows, (num_clients, num_params), None if self.state_path is None else n)

    def words(self, num_clients: int, num_params: int, n: int) -> str:
        """The same as the end of a sentence."""
        size, place = self.size(num_clients, num_params, n), f"in {self.rows.folder or self.state_path}"
        return memory_words(self.rows, (num_clients, num_params), size, place)

    def require_room(self, num_clients: int, num_params: int, n: int, num_seen: int = 0) -> None:
        """Refuse it where it does not fit.

        Args:
            num_clients: m.
            num_params: d.
            n: Cohort size.
            num_seen: Clients whose updates are remembered already: in RAM these take some of it.

        Raises:
            DeltaflError: If more RAM, or more of the disk, is needed than is free.
        """
        size, rows = self.size(num_clients, num_params, n), self.rows
        held = 0 if rows.folder is not None else num_seen * num_params * DTYPES[rows.dtype].itemsize
        require_room(size, rows, self.state_path, CURES, held)

    def round(self) -> int | None:
        """The round of the state that the rows in the folder belong to; None if there are none."""
        return noted_round(Path(str(self.folder)))

    def settled(self, round: int) -> None:
        """Note that all rows of the state after so many rounds are in the file, if there is a file."""
        note_round(Path(str(self.folder)), round)
