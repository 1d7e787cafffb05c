"""One process at a time: a lock of the operating system, which is gone with its process, even with a killed one."""

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from ..errors import DeltaflError

_log = logging.getLogger(__name__)

#: The lock of a run's or a comparison's folder, in it; gone at the end, and of no meaning if a killed process left it.
NAME = "playing.lock"
#: What file systems say that have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
#: Folders that this process has claimed.
_ours: set[Path] = set()


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from playing in the folder of a run or a comparison, for the length of the block.

    The folder is made; at the end it goes again, with those above it that were made, if nothing was written there. A
    folder that this process has claimed already may be claimed again.

    Raises:
        DeltaflError: If another process has claimed it, or it cannot be made.
    """
    place = folder.resolve()
    if place in _ours:
        yield
        return
    with ExitStack() as stack:
        stack.callback(_remove_empty, _absent(folder))
        try:
            ours = stack.enter_context(only_one(folder / NAME, keep_folder=True))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s is on a file system without locks: let no other process play the run there", folder)
            ours = True
        if not ours:
            raise DeltaflError(f"another process is playing the run in {folder}; wait for it, or choose another --out")
        _ours.add(place)
        stack.callback(_ours.discard, place)
        yield


@contextmanager
def claimed_new(folder: Path) -> Iterator[Path]:
    """Make and claim a folder that was not there: this one, or with -2, -3, ... at the end of its name."""
    absent = _absent(folder.parent)
    make_folder(folder.parent)
    for number in count(1):
        own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            own.mkdir(parents=True)  # another process may tidy the parent away
            break
    with ExitStack() as stack:
        stack.callback(_remove_empty, [own, *absent])
        stack.enter_context(claimed(own))
        yield own


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeltaflError(f"the folder {folder} cannot be made: {error.strerror}; choose another place") from None


def _absent(folder: Path) -> list[Path]:
    """Which of a folder and those above it are not there, the lowest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    for path in folders:
        with suppress(OSError):  # something was written there
            path.rmdir()


@contextmanager
def only_one(path: Path, keep_folder: bool = False) -> Iterator[bool]:
    """Hold the lock ``path`` for the length of the block, unless somebody else holds it: then do not wait.

    The file is made, and removed at the end, with its folder if that is empty and ``keep_folder`` is False; one that a
    killed process left locks nothing.

    Yields:
        Whether the lock is held here.
    """
    descriptor = _hold(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):  # Windows removes no open file: it stays
                path.unlink()
            os.close(descriptor)
            if not keep_folder:
                _remove_empty([path.parent])


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold the lock ``path`` for the length of the block, and wait for it first: for blocks of a moment."""
    while True:
        with only_one(path) as ours:
            if ours:
                yield
                return
        time.sleep(0.02)


def _hold(path: Path) -> int | None:
    """An open, locked file at the path; None if somebody else has it."""
    while True:
        make_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process removed the folder just now
            continue
        try:
            locked = _lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not locked:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its holder removed it between our open and our lock: the name is another file's


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
