"""Every place where files change: a disk that fails, or a process that is killed, at the k-th of
them.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from deltafl.store import files

#: What a disk says that is full, read-only, over its quota, or broken.
FAULTS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)


class KilledError(BaseException):
    """The process is dead: nothing that follows has an effect."""


class Disk:
    """Counts what changes files; from the ``last`` change on each one fails."""

    def __init__(self, last: int, code: int | None) -> None:
        self.last = last
        self.code = code
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count >= self.last:
            if self.code is None:
                raise KilledError
            raise OSError(self.code, os.strerror(self.code))


class _File:
    """A file that is written, each time through the disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file = file
        self._disk = disk

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        # Half of it is there when a disk is full.
        try:
            self._disk.step()
        except OSError:
            half = bytes(content)
            self._file.write(half[: len(half) // 2])
            raise
        return int(self._file.write(content))

    def truncate(self, size: int | None = None) -> int:
        self._disk.step()
        return int(self._file.truncate(size))


@contextmanager
def failing(last: int, code: int | None = None) -> Iterator[Disk]:
    """Let the ``last`` change of a file, and those after it, fail with a code of the system, or
    with the death of the process.
    """
    disk = Disk(last, code)

    def opened(path: Any, mode: str, **more: Any) -> Any:
        file = open(path, mode, **more)  # noqa: SIM115, PTH123
        return file if mode == "rb" else _File(file, disk)

    def stepped(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            disk.step()
            return function(*given, **more)

        return call

    changes = ["mkdir", "replace"]
    # On a full disk things can be deleted.
    if code in (None, errno.EROFS, errno.EIO):
        changes += ["unlink", "rmdir"]
    paths = {name: stepped(vars(Path)[name]) for name in changes}
    with (
        mock.patch.object(files, "open", opened, create=True),
        mock.patch.object(os, "fsync", stepped(os.fsync)),
        mock.patch.object(os, "link", stepped(os.link)),
        mock.patch.multiple(Path, **paths),
    ):
        yield disk
