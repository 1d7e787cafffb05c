"""Fetching data sets from their public homes, and checking what is on the disk. Standard library only.

A file comes as ``NAME.gz.part``, is continued from where it was cut (HTTP Range), is compared with the
SHA-256 of ``sources.py`` and only then gets its name. So a file without ``.part`` is a whole and right one. Of a file
that is larger than it can be, packed or unpacked, the rest is not read.
"""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import DeltaflError
from .datasets import content_sha256, read_writers
from .idx import read_pieces
from .images import file_sha256
from .sources import (
    ARCHIVES,
    SOURCES,
    WRITERS_FILE,
    Source,
    cache_folder,
    find_file,
    get_source,
    locate_archive,
    search_folders,
)

_CHUNK = 1 << 16
_SLACK = 1 << 20  # bytes: gzip's own, by which a packed file can be longer than its content

#: Called with the bytes on the disk and the total, which is None if the server does not tell.
Report = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Patience:
    """How long to try.

    Attributes:
        attempts: Connections a file, >= 1.
        wait_s: Seconds before the second attempt; doubles with each further one.
        timeout_s: Seconds without a byte after which a connection counts as cut.
    """

    attempts: int = 5
    wait_s: float = 1.0
    timeout_s: float = 30.0


PATIENCE = Patience()


class FileStatus(NamedTuple):
    """What ``check`` says of one file: its name without ``.gz``, where it is, and whether its content is right."""

    file: str
    path: Path | None
    state: Literal["ok", "corrupt", "missing"]


class _CutError(Exception):
    """The connection ended before the file did; another attempt may continue."""


def fetch(
    name: str,
    directory: Path | None = None,
    *,
    progress: bool = True,
    sources: Mapping[str, Source] = SOURCES,
    patience: Patience = PATIENCE,
) -> list[Path]:
    """Download what is missing of a data set.

    Args:
        name: A name of ``sources``.
        directory: The files go to its subfolder NAME; None for the user's cache, where they are always found.
        progress: Whether to show a bar on the terminal.
        sources: Where data sets come from.
        patience: Attempts and timeouts.

    Returns:
        The files, those included that were there already.

    Raises:
        DeltaflError: If the name is unknown, a file cannot be had or written, or its content is not the published one
            (it is then removed). After a cut connection the same call continues.
    """
    source = get_source(name, sources)
    folder = (directory or cache_folder()).expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeltaflError(f"cannot make the folder {folder}: {error.strerror}; give another directory") from error
    try:
        return _fetch_files(source, folder, progress, patience)
    except OSError as error:  # of this machine, for those of the network are told by _download
        raise DeltaflError(
            f"cannot write {error.filename or folder}: {error.strerror or error}; make room, or give another directory"
        ) from error


def _fetch_files(source: Source, folder: Path, progress: bool, patience: Patience) -> list[Path]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns) if progress else None
    with bars or nullcontext():
        return [_fetch_file(source, folder, file, bars, patience) for file in source.sha256]


def _fetch_file(source: Source, folder: Path, file: str, bars: Progress | None, patience: Patience) -> Path:
    """Make sure that one file is there and right."""
    present = find_file(folder, file)
    if present is not None and _is_right(present, source, file):
        return present
    target = folder / f"{file}.gz"
    part = folder / f"{file}.gz.part"
    url = source.url + target.name
    bar = bars.add_task(target.name, total=None) if bars else None

    def report(done: int, total: int | None) -> None:
        if bars and bar is not None:
            bars.update(bar, completed=done, total=total)

    _download(url, part, source.limit(file) + _SLACK, report, patience)
    if not _is_right(part, source, file):
        part.unlink()
        raise DeltaflError(f"{url} does not have the published content (SHA-256 differs); what came was removed")
    if present is not None:
        present.unlink()  # its content was wrong, and an unpacked file would go before the new one
    part.replace(target)
    return target


def _is_right(path: Path, source: Source, file: str) -> bool:
    digest = hashlib.sha256()
    try:
        for piece in read_pieces(path, source.limit(file)):
            digest.update(piece)
    except DeltaflError:
        return False
    return digest.hexdigest() == source.sha256[file]


def _download(url: str, part: Path, most: int, report: Report, patience: Patience) -> None:
    """Bring a whole file of ``most`` bytes at most to ``part``, in several connections if need be."""
    reason: Exception = _CutError("no attempt")
    for attempt in range(patience.attempts):
        if attempt:
            time.sleep(patience.wait_s * 2 ** (attempt - 1))
        try:
            _continue(url, part, most, report, patience.timeout_s)
        except urllib.error.HTTPError as error:
            error.close()  # it is the response itself, and holds the connection
            if error.code < 500 and error.code not in {408, 416, 429}:
                raise DeltaflError(f"{url} cannot be had: the server answers {error.code} {error.reason}") from error
            if error.code == 416:
                part.unlink(missing_ok=True)  # longer than the server's file: begin anew
            reason = error
        except _CutError as error:
            reason = error
        else:
            return
    raise DeltaflError(f"{url} cannot be had after {patience.attempts} attempts ({reason}); try again to continue")


def _continue(url: str, part: Path, most: int, report: Report, timeout_s: float) -> None:
    """One connection: ask for what is missing and append it, or begin anew if the server sends the whole file."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with _network():
        response = urllib.request.urlopen(request, timeout=timeout_s)
    with response:
        continues = response.status == 206
        if continues and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()
            raise _CutError("the server sent another range than it was asked for")
        done = have if continues else 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length is not None and length.isdecimal() else None
        with part.open("ab" if continues else "wb") as file:
            while chunk := _received(response):
                done += len(chunk)
                if done > most:
                    break
                file.write(chunk)
                report(done, total)
    if done > most:
        part.unlink()
        raise DeltaflError(f"{url} sends more than {most} bytes, more than its file can have; what came was removed")
    if total is not None and done != total:
        raise _CutError(f"the connection ended after {done} of {total} bytes")


def _received(response: http.client.HTTPResponse) -> bytes:
    with _network():
        return response.read(_CHUNK)


@contextmanager
def _network() -> Iterator[None]:
    """Errors of a connection, which another attempt may cure; those of the disk are not among them."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(str(error) or type(error).__name__) from error


def check(name: str, data_dir: Path | None = None, *, sources: Mapping[str, Source] = SOURCES) -> list[FileStatus]:
    """Compare the files that ``load_dataset`` would read with the published content.

    Args:
        name: A name of ``sources``, or of ``ARCHIVES``: other content than this project's counts as corrupt.
        data_dir: A folder to look in first.
        sources: What the files must contain.

    Returns:
        One status a file, of the first folder with all files; if there is none, of the folder with most of
        them.

    Raises:
        DeltaflError: If the name is unknown, or ``data_dir`` is no folder.
    """
    if name in ARCHIVES:
        return [_check_archive(name, data_dir)]
    source = get_source(name, sources)
    best: dict[str, Path] = {}
    for folder in search_folders(name, data_dir, sources):
        if name == "mnist" and (folder / WRITERS_FILE).is_file():
            return _check_writers(folder / WRITERS_FILE, source)
        found = {file: path for file in source.sha256 if (path := find_file(folder, file))}
        if len(found) > len(best):
            best = found
        if len(best) == len(source.sha256):
            break
    return [_status(source, file, best.get(file)) for file in source.sha256]


def _status(source: Source, file: str, path: Path | None) -> FileStatus:
    if path is None:
        return FileStatus(file, None, "missing")
    return FileStatus(file, path, "ok" if _is_right(path, source, file) else "corrupt")


def _check_archive(name: str, data_dir: Path | None) -> FileStatus:
    """The status of a data set that is one file."""
    known = ARCHIVES[name]
    path = locate_archive(name, data_dir)
    if path is None:
        return FileStatus(known.file, None, "missing")
    return FileStatus(known.file, path, "ok" if file_sha256(path) == known.sha256 else "corrupt")


def _check_writers(path: Path, source: Source) -> list[FileStatus]:
    """The statuses of MNIST's four contents inside the file with writers."""
    try:
        arrays = read_writers(path).arrays
    except DeltaflError:
        return [FileStatus(file, path, "corrupt") for file in source.sha256]
    return [
        FileStatus(file, path, "ok" if content_sha256(arrays[file]) == sha256 else "corrupt")
        for file, sha256 in source.sha256.items()
    ]
