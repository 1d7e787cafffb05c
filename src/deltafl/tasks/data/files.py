"""The files of data sets: found, fetched, checked, and decoded once.

Files are looked for in ``data_dir/NAME`` and ``data_dir``, in the same two folders of the
environment variable ``DELTAFL_DATA``, where operating systems install them, and in the user's
cache, which ``deltafl data fetch`` fills.
"""

import gzip
import hashlib
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...errors import DeltaflError, explained, log, require
from ...store.files import make_folder, no_empty_folder, opened, remove, with_home
from ...store.room import free_ram, human, require_ram
from ...types import Array

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"

Bytes = npt.NDArray[np.uint8]

#: Names a folder with data sets, as ``data_dir`` does.
DATA_VARIABLE = "DELTAFL_DATA"

RETRIES = 3

T = TypeVar("T")

#: Bytes of a gzipped file that are unpacked at a time.
_UNPACKED_AT_ONCE = 2**18
#: The largest header of a NumPy file of bytes.
_NPY_HEADER = 4096


@dataclass(frozen=True)
class Source:
    """Where a data set is published."""

    url: str  #: address of the folder with its files; ends with a slash
    checksums: Mapping[str, str]  #: the SHA-256 of each file in hexadecimal, or ``md5:...``
    #: whether the server has NAME.gz for each file; the checksum is that of the unpacked content
    gzipped: bool = True
    system_folders: tuple[Path, ...] = ()  #: where operating systems install it


SOURCES: dict[str, Source] = {
    "mnist": Source(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        checksums={
            TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": Source(
        url="https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        checksums={
            TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            TEST_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            TEST_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
    "cifar10": Source(
        url="https://www.cs.toronto.edu/~kriz/",
        checksums={CIFAR_ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        gzipped=False,
    ),
}


State = Literal["ok", "corrupt", "missing"]


class FileStatus(NamedTuple):
    """The result of ``check`` for one file: its name without ``.gz``, where it is, and whether
    its content is right.
    """

    file: str
    path: Path | None
    state: State


def cache_folder() -> Path:
    """The user's cache, ``$XDG_CACHE_HOME/deltafl`` or ``~/.cache/deltafl``: where
    ``deltafl data fetch`` writes.
    """
    return with_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deltafl"


def data_folders(name: str, data_dir: Path | None) -> list[Path]:
    """The folders where a data set is looked for, best first; a given one that is not there is a
    ``DeltaflError``.
    """
    folders = []
    given = {"data_dir": data_dir, DATA_VARIABLE: os.environ.get(DATA_VARIABLE)}
    for label, path in given.items():
        if path:
            folder = with_home(path)
            if not folder.is_dir():
                raise DeltaflError(
                    f"{label} is {folder}, which is not a folder: give one with data sets"
                )
            folders += [folder / name, folder]
    if name in SOURCES:
        folders += SOURCES[name].system_folders
    return [*folders, cache_folder() / name]


def find_file(folder: Path, name: str) -> Path | None:
    """The file, or its gzipped form, in a folder; None if there is neither."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def find(
    name: str,
    data_dir: Path | None,
    needed: str,
    look: Callable[[Path], T | None],
) -> T:
    """What ``look(folder)`` finds in the first of a data set's folders where it is not None;
    else an error.
    """
    folders = data_folders(name, data_dir)
    for folder in folders:
        found = look(folder)
        if found is not None:
            return found
    raise DeltaflError(
        f"{name} needs {needed}; not found in {', '.join(map(str, folders))}: give its folder as "
        "data_dir or DELTAFL_DATA"
    )


def fetch(
    name: str,
    directory: Path | None = None,
    *,
    progress: bool = True,
) -> list[Path]:
    """Download the files of a data set that are missing or wrong, to ``directory/NAME`` or the
    user's cache; all files.

    Raises:
        DeltaflError: If the name is unknown, a file cannot be downloaded or written, or is not the
            published one.
        MissingExtraError: Without pooch.
    """
    source = _source_of(name)
    require("pooch", "sim")
    import pooch
    from requests.exceptions import RequestException

    folder = with_home(directory or cache_folder()) / name
    ending = ".gz" if source.gzipped else ""
    # pooch is told no checksums: those published are of the unpacked content, and compared here.
    registry = dict.fromkeys(file + ending for file in source.checksums)
    server = pooch.create(
        folder,
        source.url,
        registry=registry,
        retry_if_failed=RETRIES,
    )
    download = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16)
    paths = []
    with no_empty_folder(folder):
        for file, checksum in source.checksums.items():
            path = find_file(folder, file)
            if path is not None and matches(path, checksum):
                paths.append(path)
                continue
            try:
                # pooch, which is told no checksum, would keep the wrong file.
                if path is not None:
                    remove(path)
                path = Path(server.fetch(file + ending, downloader=download))
            except RequestException as error:
                raise DeltaflError(
                    f"{source.url}{file}{ending} cannot be downloaded ({error}); try again later"
                ) from error
            except OSError as error:
                raise DeltaflError(
                    f"cannot write to {folder}: {error}; make room, or give another folder"
                ) from error
            if not matches(path, checksum):
                remove(path)
                raise DeltaflError(
                    f"{source.url}{file}{ending} does not have the published content; nothing was "
                    "kept"
                )
            paths.append(path)
    return paths


def check(name: str, data_dir: Path | None = None) -> list[FileStatus]:
    """Compare the files that a task would read, those of the fullest folder, with the published
    content.
    """
    checksums = _source_of(name).checksums
    found = (
        {file: find_file(folder, file) for file in checksums}
        for folder in data_folders(name, data_dir)
    )
    best = max(
        found,
        key=lambda paths: sum(path is not None for path in paths.values()),
    )
    statuses = []
    for file, path in best.items():
        state: State = "missing"
        if path is not None:
            state = "ok" if matches(path, checksums[file]) else "corrupt"
        statuses.append(FileStatus(file, path, state))
    return statuses


def _source_of(name: str) -> Source:
    if name not in SOURCES:
        raise DeltaflError(
            f"{name!r} is no data set that deltafl can fetch or check; these are "
            f"{', '.join(SOURCES)} (digits comes with scikit-learn; femnist, celeba and "
            "shakespeare you bring)"
        )
    return SOURCES[name]


def matches(path: Path, checksum: str) -> bool:
    """Whether the content of a file is right: unpacked for a SHA-256, as it is for ``md5:...``."""
    algorithm, _, digest = checksum.rpartition(":")
    try:
        with opened(path, users=True) if algorithm else unpacked(path) as content:
            found = hashlib.file_digest(cast(Any, content), algorithm or "sha256")
    # What a file that is cut or damaged raises, or one that says that it is larger than memory.
    except (OSError, EOFError, zlib.error, MemoryError, DeltaflError):
        return False
    return found.hexdigest() == digest


@contextmanager
def unpacked(path: Path, largest: int | None = None) -> Iterator[IO[bytes]]:
    """A file opened for reading, unpacked if its first two bytes are those of gzip, whatever its
    name.

    A file that unpacks to more than free memory, or than ``largest`` bytes, ends in a
    ``DeltaflError``: a few kilobytes may unpack to any size.
    """
    with opened(path, users=True, largest=largest or sys.maxsize) as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not is_gzipped:
            require_ram(os.fstat(file.fileno()).st_size)
            yield file
            return
        limits = [limit for limit in (largest, free_ram()) if limit is not None]
        content = _Limited(file, min(limits, default=2**63))
        try:
            yield cast(IO[bytes], io.BufferedReader(content, _UNPACKED_AT_ONCE))
        # A parser may have made another error of it.
        except Exception:
            content.require_room()
            raise


class _Limited(io.RawIOBase):
    """A gzipped file that unpacks to at most so many bytes."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self.content = gzip.GzipFile(fileobj=file)
        self.limit = limit
        self.left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self.content.readinto(buffer)
        self.left -= size
        self.require_room()
        return size

    def require_room(self) -> None:
        if self.left < 0:
            raise MemoryError(f"it unpacks to more than {human(self.limit)}") from None


def read_arrays(
    path: Path,
    keys: tuple[str, ...] | None = None,
) -> dict[str, Array]:
    """Read some arrays of a NumPy archive (NPZ), or all of them; pickles and missing ones are a
    ``DeltaflError``.
    """
    wanted = ", ".join(keys or ("plain arrays",))
    # NumPy and zipfile raise a dozen kinds, MemoryError and RuntimeError among them. Opened here,
    # for NumPy leaves its own file open if the archive is broken.
    with (
        explained(f"{path} is not an NPZ archive of {wanted}"),
        opened(path, users=True) as file,
    ):
        archive = np.load(file, allow_pickle=False)
        require_ram(sum(entry.file_size for entry in archive.zip.infolist()))
        return {key: np.asarray(archive[key]) for key in keys or archive.files}


def cached_images(
    file: Path,
    shape: tuple[int, ...],
    decode: Callable[[], Bytes],
) -> Bytes:
    """Decoded images, uint8, from a file in the cache, which appears whole or not at all; else
    by ``decode``.
    """
    try:
        # A header of any other size would be believed.
        with opened(file, largest=prod(shape) + _NPY_HEADER) as content:
            images: Bytes = np.load(content, allow_pickle=False)
        if images.shape == shape and images.dtype == np.uint8:
            return images
    except (DeltaflError, ValueError, EOFError):
        pass  # decoded below
    images = decode()
    try:
        make_folder(file.parent)
        # Of a name of its own, for several runs may decode at a time.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder) / "images.npy"
            np.save(part, images)
            part.replace(file)  # atomic
    except (OSError, DeltaflError) as error:
        # A cache that is full or read-only makes the next run slower, not this one wrong.
        log.warning("decoded images cannot be kept in %s: %s", file, error)
    return images
