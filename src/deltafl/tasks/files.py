"""The files of data sets: found, fetched, checked; and the readers of digits, MNIST, FashionMNIST
and CIFAR-10.

Files are looked for in ``data_dir/NAME`` and ``data_dir``, in the same two folders of the
environment variable ``DELTAFL_DATA``, where operating systems install them, and in the user's
cache, which ``deltafl data fetch`` fills.
"""

import gzip
import hashlib
import logging
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError, require
from ..scale.memory_budget import free_ram, human
from ..types import IntArray
from .base import Dataset

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

#: ``digits``: the first 1,500 examples, in scikit-learn's order, are for training and the last 297
#: for the test.
DIGITS_TRAIN = 1500
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"

#: An IDX file of unsigned bytes starts with these, the number of its axes and their lengths.
IDX_BYTES = bytes([0, 0, 8])

#: The files of CIFAR-10; the last one is the test set. An image is a label and 3,072 bytes: red,
#: green, blue planes.
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_ROW = 1 + 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]

RETRIES = 3

T = TypeVar("T")


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
        checksums={"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        gzipped=False,
    ),
}


class FileStatus(NamedTuple):
    """The result of ``check`` for one file: its name without ``.gz``, where it is, and whether
    its content is right.
    """

    file: str
    path: Path | None
    state: Literal["ok", "corrupt", "missing"]


def cache_folder() -> Path:
    """The user's cache, ``$XDG_CACHE_HOME/deltafl`` or ``~/.cache/deltafl``: where
    ``deltafl data fetch`` writes.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltafl"


def data_folders(name: str, data_dir: Path | None) -> list[Path]:
    """The folders where a data set is looked for, best first; a given one that is not there is a
    ``DeltaflError``.
    """
    folders: list[Path] = []
    for label, path in {
        "data_dir": data_dir,
        "DELTAFL_DATA": os.environ.get("DELTAFL_DATA"),
    }.items():
        if path:
            folder = Path(path).expanduser()
            if not folder.is_dir():
                raise DeltaflError(
                    f"{label} is {folder}, which is not a folder: give one with data sets"
                )
            folders += [folder / name, folder]
    system_folders = SOURCES[name].system_folders if name in SOURCES else ()
    return [*folders, *system_folders, cache_folder() / name]


def find_file(folder: Path, name: str) -> Path | None:
    """The file, or its gzipped form, in a folder; None if there is neither."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def find(name: str, data_dir: Path | None, needed: str, look: Callable[[Path], T | None]) -> T:
    """What ``look(folder)`` finds in the first of a data set's folders where it is not None;
    else an error.
    """
    folders = data_folders(name, data_dir)
    for folder in folders:
        found = look(folder)
        if found is not None:
            return found
    looked = ", ".join(map(str, folders))
    raise DeltaflError(
        f"{name} needs {needed}; not found in {looked}: give its folder as data_dir or DELTAFL_DATA"
    )


def fetch(name: str, directory: Path | None = None, *, progress: bool = True) -> list[Path]:
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

    folder = (directory or cache_folder()).expanduser() / name
    # The checksums are those of the unpacked content, and compared here.
    published = {file: f"{file}.gz" if source.gzipped else file for file in source.checksums}
    registry = dict.fromkeys(published.values())
    server = pooch.create(folder, source.url, registry=registry, retry_if_failed=RETRIES)
    download = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16)
    paths = []
    for file, checksum in source.checksums.items():
        path = find_file(folder, file)
        url = source.url + published[file]
        if path is None or not matches(path, checksum):
            try:
                if path is not None:
                    path.unlink()
                path = Path(server.fetch(published[file], downloader=download))
            except RequestException as error:
                raise DeltaflError(
                    f"{url} cannot be downloaded ({error}); try again later"
                ) from error
            except OSError as error:
                raise DeltaflError(
                    f"cannot write to {folder}: {error}; make room, or give another folder"
                ) from error
            if not matches(path, checksum):
                path.unlink()
                raise DeltaflError(f"{url} does not have the published content; nothing was kept")
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
    best = max(found, key=lambda paths: sum(path is not None for path in paths.values()))
    return [_status(file, path, checksums[file]) for file, path in best.items()]


def _status(file: str, path: Path | None, checksum: str) -> FileStatus:
    if path is None:
        return FileStatus(file, None, "missing")
    if matches(path, checksum):
        return FileStatus(file, path, "ok")
    return FileStatus(file, path, "corrupt")


def _source_of(name: str) -> Source:
    if name not in SOURCES:
        raise DeltaflError(
            f"{name!r} is no data set that deltafl can fetch or check; these are "
            f"{', '.join(SOURCES)} (digits comes "
            "with scikit-learn; femnist, celeba and shakespeare you bring)"
        )
    return SOURCES[name]


def matches(path: Path, checksum: str) -> bool:
    """Whether the content of a file is right: unpacked for a SHA-256, as it is for ``md5:...``."""
    algorithm, _, digest = checksum.rpartition(":")
    try:
        with path.open("rb") if algorithm else unpacked(path) as content:
            return (
                hashlib.file_digest(cast(Any, content), algorithm or "sha256").hexdigest() == digest
            )
    except (OSError, EOFError, zlib.error):
        return False


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """A file opened for reading, unpacked if its first two bytes are those of gzip, whatever its
    name.
    """
    with path.open("rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzipped else file


def read_arrays(path: Path, keys: tuple[str, ...] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Read some arrays of a NumPy archive (NPZ), or all of them; pickles and missing ones are a
    ``DeltaflError``.
    """
    try:
        # A file opened here is closed whatever happens; NumPy leaves its own open if the archive is
        # broken.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array, as .npy files are")
            require_ram(sum(entry.file_size for entry in archive.zip.infolist()))
            return {key: np.asarray(archive[key]) for key in keys or archive.files}
    # NumPy and zipfile raise a dozen kinds, MemoryError and RuntimeError among them.
    except Exception as error:
        why = str(error) or type(error).__name__
        if keys is None:
            raise DeltaflError(f"{path} is not an NPZ file of plain arrays: {why}") from error
        raise DeltaflError(
            f"{path} is not an archive with the arrays {', '.join(keys)}: {why}"
        ) from error


def require_ram(size: int) -> None:
    """Raise a ``MemoryError`` if so many bytes, which a file says that it unpacks to, do not fit
    into free memory.
    """
    free = free_ram()
    if free is not None and size > free:
        raise MemoryError(f"it unpacks to {human(size)}, and {human(free)} of memory are free")


def cached_images(
    file: Path, shape: tuple[int, ...], decode: Callable[[], npt.NDArray[np.uint8]]
) -> npt.NDArray[np.uint8]:
    """Decoded images, uint8, from a file in the cache, which appears whole or not at all; else
    by ``decode``.
    """
    try:
        images: npt.NDArray[Any] = np.load(file, allow_pickle=False)
        if images.shape == shape and images.dtype == np.uint8:
            return images
    except (OSError, ValueError, EOFError):
        pass  # decoded below
    images = decode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder) / "images.npy"
            np.save(part, images)
            part.replace(file)  # atomic
    except OSError as error:
        logging.getLogger("deltafl").warning(
            "decoded images cannot be kept in %s: %s", file, error.strerror
        )
    return images


def load_digits(data_dir: Path | None = None) -> Dataset:
    """scikit-learn's digits, 1,500 + 297 images of 8 x 8 with values 0 to 16; nothing is looked for
    in ``data_dir``.

    They are read from scikit-learn's file: importing it takes longer than a round.
    """
    try:
        path = Path(str(distribution("scikit-learn").locate_file(DIGITS_FILE)))
    except PackageNotFoundError:
        raise MissingExtraError("scikit-learn", "sim") from None
    table = np.loadtxt(path, delimiter=",")
    x = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    return Dataset(
        "digits",
        x[:DIGITS_TRAIN],
        y[:DIGITS_TRAIN],
        x[DIGITS_TRAIN:],
        y[DIGITS_TRAIN:],
        num_classes=10,
    )


def load_idx(name: str, data_dir: Path | None = None) -> Dataset:
    """``mnist`` or ``fashion-mnist``, 60,000 + 10,000 images of 28 x 28, from the first folder
    with all four files.
    """
    needed = f"{TRAIN_IMAGES}.gz and the other three files, which 'deltafl data fetch {name}' gets"

    def look(folder: Path) -> dict[str, Path] | None:
        found = {
            file: path
            for file in SOURCES[name].checksums
            if (path := find_file(folder, file)) is not None
        }
        return found if len(found) == len(SOURCES[name].checksums) else None

    paths = find(name, data_dir, needed, look)
    return idx_dataset(
        name, {file: read_idx(path) for file, path in paths.items()}, paths[TRAIN_IMAGES].parent
    )


def idx_dataset(
    name: str,
    arrays: Mapping[str, Bytes],
    origin: Path,
    columns: Mapping[str, IntArray] | None = None,
) -> Dataset:
    """``mnist`` or ``fashion-mnist`` of the arrays of its four IDX files, by the names of the
    files, from ``origin``.

    The data set's name says so if the content is not the published one.
    """
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        image = arrays[images]
        label = arrays[labels]
        if (
            image.shape != (label.size, 28, 28)
            or label.ndim != 1
            or label.size == 0
            or label.max() > 9
        ):
            raise DeltaflError(
                f"{origin}: {images} has shape {image.shape} and {labels} {label.shape}; needs (N, "
                "28, 28) and N labels from 0 to 9"
            )
    checksums = {file: idx_sha256(array) for file, array in arrays.items()}
    title = name
    if checksums != SOURCES[name].checksums:
        title = f"{name} (other content than published: {origin})"
    return Dataset(
        name=title,
        train_x=arrays[TRAIN_IMAGES][:, np.newaxis],
        train_y=arrays[TRAIN_LABELS].astype(np.int64),
        test_x=arrays[TEST_IMAGES][:, np.newaxis],
        test_y=arrays[TEST_LABELS].astype(np.int64),
        num_classes=10,
        columns=columns or {},
    )


#: The published ones have 47 MB; the bytes that a small gzipped file unpacks to may be without end.
IDX_LARGEST = 2**30


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes, gzipped or not."""
    try:
        with unpacked(path) as file:
            content = file.read(IDX_LARGEST)
        if content[:3] != IDX_BYTES:
            raise ValueError(f"it starts with {content[:3].hex()!r}")
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, struct.error, ValueError) as error:
        raise DeltaflError(
            f"{path} is no whole IDX file of bytes: {error}; remove it and fetch it again"
        ) from error


def idx_sha256(array: Bytes) -> str:
    """The SHA-256 of the unpacked IDX file that holds the array."""
    digest = hashlib.sha256(IDX_BYTES + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape))
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009), 50,000 + 10,000 images of 32 x 32 in colour, from its
    ``.tar.gz``.

    Its name says so if the content is not the published one.
    """
    needed = f"{CIFAR_ARCHIVE}, which 'deltafl data fetch cifar10' gets"
    path = find("cifar10", data_dir, needed, lambda folder: find_file(folder, CIFAR_ARCHIVE))
    try:
        with tarfile.open(path, "r:gz") as archive:
            members = [
                member
                for member in archive
                if member.isfile() and Path(member.name).name in CIFAR_FILES
            ]
            require_ram(sum(member.size for member in members))
            files = {
                Path(member.name).name: cast(IO[bytes], archive.extractfile(member)).read()
                for member in members
            }
    except (tarfile.TarError, OSError, EOFError, zlib.error, MemoryError) as error:
        raise DeltaflError(f"{path} is not a whole tar archive: {error}") from error
    batches = []
    for name in CIFAR_FILES:
        content = np.frombuffer(files.get(name, b""), np.uint8)
        if content.size == 0 or content.size % CIFAR_ROW or content[::CIFAR_ROW].max() > 9:
            raise DeltaflError(
                f"{path}: {name} is missing or broken; an image has {CIFAR_ROW} bytes, a label 0 "
                "to 9"
            )
        batches.append(content.reshape(-1, CIFAR_ROW))
    row_e = np.concatenate(batches)
    num_tests = len(batches[-1])
    x = row_e[:, 1:].reshape(-1, 3, 32, 32)
    y = row_e[:, 0].astype(np.int64)
    title = "CIFAR-10"
    if not matches(path, SOURCES["cifar10"].checksums[CIFAR_ARCHIVE]):
        title = f"CIFAR-10 (other content than published: {path})"
    return Dataset(
        title, x[:-num_tests], y[:-num_tests], x[-num_tests:], y[-num_tests:], num_classes=10
    )
