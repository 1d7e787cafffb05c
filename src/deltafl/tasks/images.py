"""Image data sets in their authors' files: digits, MNIST and FashionMNIST (IDX), CIFAR-10 (binary)."""

import hashlib
import struct
import tarfile
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError
from ..types import IntArray
from .base import Dataset
from .files import (
    SOURCES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    data_folders,
    find_file,
    matches,
    not_found,
    unpacked,
)

#: ``digits``: the first 1,500 examples, in scikit-learn's order, are for training and the last 297 for the test.
DIGITS_TRAIN = 1500
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"

#: The files of CIFAR-10; the last one is the test set. An image is a label and 3,072 bytes: red, green, blue planes.
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_ROW = 1 + 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]


def load_digits(data_dir: Path | None = None) -> Dataset:
    """scikit-learn's digits, 1,500 + 297 images of 8 x 8 with values 0 to 16; nothing is looked for in ``data_dir``.

    They are read from scikit-learn's file: importing it takes longer than a round.
    """
    try:
        path = Path(str(distribution("scikit-learn").locate_file(DIGITS_FILE)))
    except PackageNotFoundError:
        raise MissingExtraError("scikit-learn", "sim") from None
    table = np.loadtxt(path, delimiter=",")
    x, y = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8), table[:, -1].astype(np.int64)
    return Dataset("digits", x[:DIGITS_TRAIN], y[:DIGITS_TRAIN], x[DIGITS_TRAIN:], y[DIGITS_TRAIN:], num_classes=10)


def load_idx(name: str, data_dir: Path | None = None) -> Dataset:
    """``mnist`` or ``fashion-mnist``, 60,000 + 10,000 images of 28 x 28, from the first folder with all four files.

    Raises:
        DeltaflError: If no folder has them, or a file is broken or of another data set.
    """
    folders = data_folders(name, data_dir)
    for folder in folders:
        paths = {file: find_file(folder, file) for file in SOURCES[name].checksums}
        if None not in paths.values():
            return idx_dataset(name, {file: read_idx(path) for file, path in paths.items() if path}, folder)
    needed = f"{TRAIN_IMAGES}.gz and the other three files, which 'deltafl data fetch {name}' gets"
    raise not_found(name, needed, folders)


def idx_dataset(
    name: str, arrays: Mapping[str, Bytes], origin: Path, columns: Mapping[str, IntArray] | None = None
) -> Dataset:
    """``mnist`` or ``fashion-mnist`` of the arrays of its four IDX files, by the names of the files, from ``origin``.

    The data set's name says so if the content is not the published one.

    Raises:
        DeltaflError: If they do not fit together, or are those of another data set.
    """
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        image, label = arrays[images], arrays[labels]
        if image.shape != (label.size, 28, 28) or label.ndim != 1 or label.size == 0 or label.max() > 9:
            raise DeltaflError(
                f"{origin}: {images} has shape {image.shape} and {labels} {label.shape}; needs (N, 28, 28) and N "
                "labels from 0 to 9"
            )
    checksums = {file: idx_sha256(array) for file, array in arrays.items()}
    other = next((known for known in SOURCES if known != name and checksums == SOURCES[known].checksums), None)
    if other is not None:
        raise DeltaflError(f"{origin} holds {other}, not {name}: give another data_dir")
    return Dataset(
        name=name if checksums == SOURCES[name].checksums else f"{name} (other content than published: {origin})",
        train_x=arrays[TRAIN_IMAGES][:, np.newaxis],
        train_y=arrays[TRAIN_LABELS].astype(np.int64),
        test_x=arrays[TEST_IMAGES][:, np.newaxis],
        test_y=arrays[TEST_LABELS].astype(np.int64),
        num_classes=10,
        columns=columns or {},
    )


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes, gzipped or not."""
    try:
        with unpacked(path) as file:
            content = file.read()
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        array = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, struct.error, ValueError) as error:
        raise DeltaflError(f"{path} is no whole IDX file of bytes: {error}; remove it and fetch it again") from error
    if content[:4] != _idx_header(array)[:4]:
        raise DeltaflError(f"{path} is no IDX file of bytes: it starts with {content[:4].hex()!r}")
    return array


def _idx_header(array: Bytes) -> bytes:
    """Two zero bytes, 8 for unsigned bytes, the number of axes, and their lengths."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)


def idx_sha256(array: Bytes) -> str:
    """The SHA-256 of the unpacked IDX file that holds the array."""
    digest = hashlib.sha256(_idx_header(array))
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009), 50,000 + 10,000 images of 32 x 32 in colour, from its ``.tar.gz``.

    Its name says so if the content is not the published one.

    Raises:
        DeltaflError: If it is not found, or is broken.
    """
    folders = data_folders("cifar10", data_dir)
    path = next((folder / CIFAR_ARCHIVE for folder in folders if (folder / CIFAR_ARCHIVE).is_file()), None)
    if path is None:
        raise not_found("cifar10", f"{CIFAR_ARCHIVE}, which 'deltafl data fetch cifar10' gets", folders)
    files = _read_tar(path)
    batches = []
    for name in CIFAR_FILES:
        content = np.frombuffer(files.get(name, b""), np.uint8)
        if content.size == 0 or content.size % CIFAR_ROW or content[::CIFAR_ROW].max() > 9:
            raise DeltaflError(f"{path}: {name} is missing or broken; an image has {CIFAR_ROW} bytes, a label 0 to 9")
        batches.append(content.reshape(-1, CIFAR_ROW))
    (train_x, train_y), (test_x, test_y) = (
        (np.ascontiguousarray(part[:, 1:]).reshape(-1, 3, 32, 32), part[:, 0].astype(np.int64))
        for part in (np.concatenate(batches[:-1]), batches[-1])
    )
    is_published = matches(path, SOURCES["cifar10"].checksums[CIFAR_ARCHIVE])
    title = "CIFAR-10" if is_published else f"CIFAR-10 (other content than published: {path})"
    return Dataset(title, train_x, train_y, test_x, test_y, num_classes=10)


def _read_tar(path: Path) -> dict[str, bytes]:
    """The files of a tar archive by their last name; nothing is written."""
    found = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    found[Path(member.name).name] = content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DeltaflError(f"{path} is not a whole tar archive: {error}") from error
    return found
