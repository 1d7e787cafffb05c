"""A folder with one owner: one process writes in it, and what is beside a state belongs to it.

Rows that are too many for a state file are in a folder of their own. The state names it, and a note
in it says of which round and of which owner the rows are. A process that was killed leaves a note
of the state's round, or of the one before, and can go on from both; another note comes from a copy
that was put back.
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import DeltaflError
from .files import make_folder, remove_empty, require_alone, write_atomically, writing
from .values import read_json

#: How often a folder may be taken away before a lock is made in it.
_TRIES = 100


@contextmanager
def owned(folder: Path, lock: Path, option: str, seconds: float = 0) -> Iterator[None]:
    """Wait some seconds for other processes, then keep them out; one that is killed lets go.

    ``option`` is what names the folder, for the error.
    """
    from filelock import FileLock, Timeout  # the core does without it

    is_new = not lock.parent.exists()
    held = FileLock(lock)
    with writing(lock):
        for tries_left in reversed(range(_TRIES)):
            try:
                lock.parent.mkdir(parents=True, exist_ok=True)
                require_alone(lock)
                held.acquire(timeout=seconds)
                break
            except Timeout:
                if lock.exists():
                    raise DeltaflError(
                        f"another process is using {folder}; wait for it, stop it, or choose "
                        f"another {option}"
                    ) from None
                # It has just been let go, or such a file cannot be made at all.
                if seconds or not tries_left:
                    raise DeltaflError(
                        f"{lock} cannot be made, and it is to keep other processes out; choose "
                        f"another {option}"
                    ) from None
            except (FileNotFoundError, FileExistsError):
                # Another process may have taken away the folder around it, which was empty.
                if not tries_left:
                    raise
    try:
        yield
    finally:
        # Before it is released: afterwards the name may be that of another process's lock.
        with suppress(OSError):  # Windows deletes no open file: it stays and locks nothing
            lock.unlink()
        held.release()
        if is_new:  # and not in use by now
            remove_empty(lock.parent)


class Note(NamedTuple):
    """Of which round's state the rows in a folder are, and of which owner."""

    round: int
    owner: str


def write_note(folder: Path, note: Note) -> None:
    """Note of which state the rows in a folder are, once all of them are there."""
    make_folder(folder, private=True)
    write_atomically(folder / "round", json.dumps(note) + "\n", private=True)


def read_note(folder: Path) -> Note | None:
    """The note that was written last; None if none was."""
    file = folder / "round"
    if not file.exists():
        return None
    match read_json(file):
        case [int(round), str(owner)]:
            return Note(round, owner)
    raise DeltaflError(
        f"{file} does not say of which round the rows beside it are: put a copy back"
    )


def require_note(folder: Path, before: Note | None, now: Note, state: str) -> None:
    """Refuse rows of another state than that of ``now``: they would count as updates that nobody
    sent. A process that was killed before it wrote them leaves the note that was there ``before``.
    """
    found = read_note(folder)
    if found in (before, now):
        return
    where = "not there"
    if found is not None:
        where = f"of round {found.round} of {found.owner}"
    raise DeltaflError(
        f"the clients' updates in {folder} are {where}, and {state} is of round {now.round} of "
        f"{now.owner}: put copies of both back that were made at once, or begin anew elsewhere"
    )


def new_name(owner: str) -> str:
    """A name for a folder of rows that no other has."""
    return f"{owner}-{secrets.token_hex(4)}"


def require_own(folder: Path, within: Path) -> None:
    """Refuse a folder without such a name: what a file names is followed nowhere else."""
    named = folder.parent == within and re.fullmatch(r".+-[0-9a-f]{8}", folder.name)
    if not named or folder.is_symlink():
        raise DeltaflError(
            f"the clients' updates are said to be in {folder}, which is no folder of a run in "
            f"{within}; start where it began, or begin anew in another folder"
        )
