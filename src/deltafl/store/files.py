"""Files: the one function that opens them, and text that is never seen half written.

Whoever can write in a folder can put there a link to a file of somebody else, or a pipe that never
ends. So a file is looked at before it is opened, and once more when it is open.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from ..errors import DeltaflError, printable
from .room import require_ram

#: So many times its bytes a text takes in memory, once it is read as JSON for instance.
_TIMES = 4

#: The system's numbers for a disk, a share of it or a file that is full.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

if sys.platform == "win32":
    _SAFELY = os.O_BINARY
    _NO_LINK = 0
else:
    # A pipe that is put there at the last moment would wait for its writer.
    _SAFELY = os.O_NONBLOCK
    _NO_LINK = os.O_NOFOLLOW


@contextmanager
def opened(
    path: Path,
    mode: str = "rb",
    *,
    users: bool = False,
    private: bool = False,
    largest: int = sys.maxsize,
) -> Iterator[IO[bytes]]:
    """Open a regular file; what goes wrong as long as it is open is a ``DeltaflError``.

    Args:
        path: The file.
        mode: That of ``open``, with a ``b``.
        users: It is the user's own input, which may be a link and may have several names.
        private: If it is made, its owner alone can read it.
        largest: A longer file is refused.
    """
    _require_name(path)
    opener = partial(_open, users=users, private=private, largest=largest)
    named = reading if mode == "rb" else writing
    with named(path), open(path, mode, opener=opener) as file:
        yield file


def _open(name: str, flags: int, users: bool, private: bool, largest: int) -> int:
    # Opening a device or a pipe has effects already.
    if os.path.lexists(name):
        _require_plain(name, Path(name).stat(follow_symlinks=users), users, largest)
    # Emptied below, when it is known what it is.
    flags_here = (flags & ~os.O_TRUNC) | _SAFELY
    if not users:
        flags_here |= _NO_LINK
    descriptor = os.open(name, flags_here, 0o600 if private else 0o666)
    try:
        _require_plain(name, os.fstat(descriptor), users, largest)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_name(path: Path) -> None:
    """Refuse text that no system takes as a name."""
    try:
        with suppress(OSError):
            Path(path).lstat()  # also of the text that a command gives
    except ValueError:
        raise DeltaflError(
            f"{path} has a character that no name of a file can have; write another name"
        ) from None


def _require_plain(
    name: str,
    found: os.stat_result,
    users: bool,
    largest: int,
) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise DeltaflError(f"{name} is a link, which may lead anywhere; put the file itself there")
    if not stat.S_ISREG(found.st_mode):
        raise DeltaflError(f"{name} is no file but a folder, a pipe or a device; name a file")
    if found.st_nlink > 1 and not users:
        raise DeltaflError(
            f"{name} is a file with {found.st_nlink} names, and what is written under one of them "
            "changes all; put a copy there"
        )
    if found.st_size > largest:
        raise DeltaflError(
            f"{name} has {found.st_size} bytes, which is more than the {largest} that are read; "
            "name another file"
        )


def require_alone(path: Path) -> None:
    """Refuse what is in the place of a file that another library opens for us: a link, a folder, or
    a file with another name, which the library would empty, too.
    """
    with suppress(FileNotFoundError):
        _require_plain(str(path), path.lstat(), users=False, largest=sys.maxsize)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make an error of the system a sentence that names the file that is read."""
    try:
        yield
    except MemoryError as error:
        why = f"it does not fit into memory ({error})" if str(error) else "memory has run out"
        raise DeltaflError(f"cannot read {path}: {why}") from None
    except OSError as error:
        # Of what is packed an error has no number of the system.
        raise DeltaflError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make an error of the system, such as a full disk, a sentence that names what is written."""
    try:
        yield
    except OSError as error:
        cure = "choose a folder in which you can write"
        if error.errno in _FULL:
            cure = f"make room, or {cure}"
        raise DeltaflError(f"cannot write {path}: {error.strerror}; {cure}") from error


def read_bytes(path: Path, *, users: bool = False, largest: int = sys.maxsize) -> bytes:
    """The content of a file, which is looked at as a whole."""
    with opened(path, users=users, largest=largest) as file:
        require_ram(_TIMES * os.fstat(file.fileno()).st_size)
        return file.read()


def read_text(path: Path, *, users: bool = False, largest: int = sys.maxsize) -> str:
    """The text of a file, which must be in UTF-8; a byte order mark, as some editors write, is none
    of it.
    """
    try:
        return read_bytes(path, users=users, largest=largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DeltaflError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}"
        ) from None


def write_atomically(
    path: Path,
    *parts: Any,
    private: bool = False,
    users: bool = False,
) -> None:
    """Write texts or bytes so that a reader (or a restart) sees the old file or the new one, never
    a part.

    Args:
        path: The file. Another name of it keeps what it had.
        parts: What is written.
        private: Its owner alone can read it, as what is known of single clients.
        users: The user names it: a link is followed, and what is no file is refused. Else it is in
            a folder that may come from others, and whatever they put there is replaced.
    """
    _require_name(path)
    if users:
        # What is renamed below would take the place of the link.
        path = Path(os.path.realpath(path))
        with writing(path):
            if os.path.lexists(path):
                _require_plain(str(path), path.lstat(), users, sys.maxsize)
    beside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            # Left by a process that was killed, or a link that somebody put there.
            beside.unlink(missing_ok=True)
            opener = partial(_open, users=False, private=private, largest=sys.maxsize)
            # Not ``opened``: what goes wrong is of the file that is asked for, not of this one.
            with open(beside, "xb", opener=opener) as file:
                for part in parts:
                    file.write(part.encode() if isinstance(part, str) else part)
                # The content before the name: after a power loss the name must not stand for an
                # empty file.
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # what went wrong before says more
            beside.unlink(missing_ok=True)


def write_with_folder(path: Path, *parts: Any, private: bool = False) -> None:
    """The same of a file whose folder may not be there yet."""
    make_folder(path.parent)
    write_atomically(path, *parts, private=private)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a file that is made or renamed is there after a
    power loss.
    """
    if os.name == "posix":  # Windows opens no folders
        with writing(folder):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def no_empty_folder(folder: Path) -> Iterator[None]:
    """Work that may make a folder: if it fails, what it made and left empty is removed."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in made:
            remove_empty(place)
        raise


def remove_empty(folder: Path) -> None:
    """Remove a folder; one that is not there, or holds something, stays as it is."""
    with suppress(OSError):
        folder.rmdir()


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder, and those above it, unless it is there; a ``private`` one is for its owner
    alone.
    """
    with writing(folder):
        try:
            folder.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
        except FileExistsError:
            # "File exists" would not say what is wrong with it.
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def make_new_folder(folders: Iterable[Path]) -> Path:
    """Make the first of these folders that nobody has, and return it: two processes never get the
    same one.
    """
    for folder in folders:
        with writing(folder), suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise DeltaflError("all names of new folders are taken")


def name_for_file(text: str, limit: int = 200) -> str:
    """What others wrote, as the name of a file: it may have any letters, and any number of them."""
    return re.sub(r"[^-+.\w]", "_", printable(text, limit))


def with_home(path: str | os.PathLike[str]) -> Path:
    """A path with the folder that ``~`` stands for, where it is known: in a container nobody may
    have one, and pathlib would raise an error.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def below(folder: Path, *names: str) -> Path:
    """A place below a folder that is reached through no link: a folder from elsewhere may have one
    that leads out of it.
    """
    place = folder
    with reading(folder):
        for part in Path(*names).parts:
            place = place / part
            if place.is_symlink():
                raise DeltaflError(
                    f"{place} is a link, which may lead anywhere; put the folder itself there"
                )
    return place


def remove(file: Path) -> None:
    """Delete a file, or a link to one, if it is there."""
    with writing(file):
        file.unlink(missing_ok=True)
