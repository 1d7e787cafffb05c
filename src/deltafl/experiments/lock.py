"""One process at a time: a lock of the operating system, which is gone with its process, even with a killed one."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def only_one(path: Path) -> Iterator[bool]:
    """Hold the lock ``path`` for the length of the block, unless somebody else holds it: then do not wait.

    The file is made, and removed at the end, with its folder if that is empty; one that a killed process left locks
    nothing.

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
            with suppress(OSError):  # the folder is not empty
                path.parent.rmdir()


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
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process removed the folder just now
            continue
        if not _lock(descriptor):
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
