"""Image data sets in their authors' files: digits, MNIST and FashionMNIST (IDX), CIFAR-10 (binary)."""

import hashlib
import lzma
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

#: An IDX file of unsigned bytes begins with two zero bytes, this type, and the number of axes.
_UNSIGNED_BYTE = 8
#: More bytes than any of these data sets has.
_LARGEST = 1 << 30

#: The files of CIFAR-10; the last one is the test set. An image is a label and 3,072 bytes: red, green, blue planes.
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-bin"
IMAGE_BYTES = 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]


def load_digits(data_dir: Path | None = None) -> Dataset:
    """scikit-learn's digits, 1,500 + 297 images of 8 x 8 with values 0 to 16; nothing is looked for in ``data_dir``.

    They are read from scikit-learn's file: importing it takes longer than a round.

    Raises:
        MissingExtraError: Without scikit-learn.
    """
    try:
        path = Path(str(distribution("scikit-learn").locate_file(DIGITS_FILE)))
    except PackageNotFoundError:
        raise MissingExtraError("scikit-learn", "sim") from None
    table = np.loadtxt(path, delimiter=",")
    image = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    label = table[:, -1].astype(np.int64)
    return Dataset(
        name="digits",
        train_x=image[:DIGITS_TRAIN],
        train_y=label[:DIGITS_TRAIN],
        test_x=image[DIGITS_TRAIN:],
        test_y=label[DIGITS_TRAIN:],
        num_classes=10,
    )


def load_idx(name: str, data_dir: Path | None = None) -> Dataset:
    """``mnist`` or ``fashion-mnist``, 60,000 + 10,000 images of 28 x 28, from the first folder with all four files.

    Raises:
        DeltaflError: If no folder has them, or a file is broken or of another data set.
    """
    looked = []
    for folder in data_folders(name, data_dir):
        found = {file: find_file(folder, file) for file in SOURCES[name].checksums}
        paths = {file: path for file, path in found.items() if path is not None}
        if len(paths) == len(found):
            arrays = {file: read_idx(path, num_axes=3 if "idx3" in file else 1) for file, path in paths.items()}
            return idx_dataset(name, arrays, folder)
        looked.append(f"{folder} ({len(paths)} of {len(found)} files)")
    raise DeltaflError(
        f"{name} was not found; looked in {', '.join(looked)}. Write 'deltafl data fetch {name}', "
        f"or give the folder that holds {TRAIN_IMAGES}.gz and the other three as data_dir"
    )


def idx_dataset(
    name: str, arrays: Mapping[str, Bytes], origin: Path, columns: Mapping[str, IntArray] | None = None
) -> Dataset:
    """A data set of the arrays of four IDX files, by the names of the files, checked.

    Its name is ``name`` if the content is the published one, else it says so.

    Args:
        name: ``mnist`` or ``fashion-mnist``.
        arrays: Images (N, 28, 28) and labels (N,), uint8.
        origin: Where they come from, for messages.
        columns: Owners of the training examples; see ``Dataset.columns``.

    Raises:
        DeltaflError: If they do not fit together, or are those of another data set.
    """
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        image, label = arrays[images], arrays[labels]
        if len(image) != len(label):
            raise DeltaflError(f"{origin}: {images} has {len(image)} images but {labels} has {len(label)} labels")
        if image.shape[1:] != (28, 28):
            raise DeltaflError(f"{origin}: {images} has images of shape {image.shape[1:]}, needs (28, 28)")
        if len(label) == 0 or label.max() > 9:
            raise DeltaflError(f"{origin}: {labels} must hold labels from 0 to 9, at least one")
    checksums = {file: idx_sha256(array) for file, array in arrays.items()}
    other = next((known for known in SOURCES if known != name and checksums == SOURCES[known].checksums), None)
    if other is not None:
        raise DeltaflError(f"{origin} holds {other}, not {name}: give another data_dir")
    is_published = checksums == SOURCES[name].checksums
    return Dataset(
        name=name if is_published else f"{name} (other content than published: {origin})",
        train_x=arrays[TRAIN_IMAGES][:, np.newaxis],
        train_y=arrays[TRAIN_LABELS].astype(np.int64),
        test_x=arrays[TEST_IMAGES][:, np.newaxis],
        test_y=arrays[TEST_LABELS].astype(np.int64),
        num_classes=10,
        columns=columns or {},
    )


def read_idx(path: Path, num_axes: int) -> Bytes:
    """Read an IDX file of unsigned bytes, gzipped or not: 1 axis for labels, 3 for images.

    Raises:
        DeltaflError: If it cannot be read, is of another kind, or is shorter or longer than its header announces.
    """
    offset = 4 + 4 * num_axes
    try:
        with unpacked(path) as file:
            header = file.read(offset)
            if len(header) < offset or header[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_axes]):
                raise DeltaflError(
                    f"{path} is no IDX file of bytes with {num_axes} axes: it starts with {header[:4].hex()!r}"
                )
            shape = struct.unpack(f">{num_axes}I", header[4:])
            size = int(np.prod(shape, dtype=object))
            content = file.read(min(size, _LARGEST) + 1)  # no more, for gzip can hold a thousand times its own size
    except (OSError, EOFError, zlib.error) as error:
        raise DeltaflError(f"cannot read {path}: {error}; remove it and fetch it again") from error
    if len(content) != size:
        raise DeltaflError(f"{path} has {len(content)} bytes of content, its header announces {size}: fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def idx_sha256(array: Bytes) -> str:
    """The SHA-256 of the unpacked IDX file that holds the array."""
    header = bytes([0, 0, _UNSIGNED_BYTE, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    digest = hashlib.sha256(header)
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10, 50,000 + 10,000 images of 32 x 32 in colour, from ``cifar-10-batches-bin/`` or its ``.tar.gz``.

    Its name says so if the content was not, or could not be, compared with the published archive.

    Raises:
        DeltaflError: If neither is found, or one is broken.

    Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    folders = data_folders("cifar10", data_dir)
    for folder in folders:
        archive, unpacked_folder = folder / CIFAR_ARCHIVE, folder / CIFAR_FOLDER
        if archive.is_file():
            is_published = matches(archive, SOURCES["cifar10"].checksums[CIFAR_ARCHIVE])
            title = "CIFAR-10" if is_published else f"CIFAR-10 (other content than published: {archive})"
            return _cifar_dataset(title, _read_tar(archive), archive)
        if unpacked_folder.is_dir():
            paths = (unpacked_folder / file for file in CIFAR_FILES)
            files = {path.name: path.read_bytes() for path in paths if path.is_file()}
            return _cifar_dataset("CIFAR-10 (from a folder, not compared with the archive)", files, unpacked_folder)
    needed = f"{CIFAR_ARCHIVE} or the folder {CIFAR_FOLDER}, which 'deltafl data fetch cifar10' gets"
    raise not_found("cifar10", needed, folders)


def _read_tar(path: Path) -> dict[str, bytes]:
    """The files of a tar archive by their last name; nothing is written."""
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    found[Path(member.name).name] = content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DeltaflError(f"{path} is not a whole tar archive: {error}") from error
    return found


def _cifar_dataset(title: str, files: Mapping[str, bytes], origin: Path) -> Dataset:
    batches = []
    for name in CIFAR_FILES:
        if name not in files:
            raise DeltaflError(f"{origin} holds no file {name}")
        row = np.frombuffer(files[name], np.uint8)
        if len(row) == 0 or len(row) % (IMAGE_BYTES + 1):
            raise DeltaflError(f"{origin}: {name} has {len(row)} bytes; needs {IMAGE_BYTES + 1} an image")
        batch = row.reshape(-1, IMAGE_BYTES + 1)
        if batch[:, 0].max() > 9:
            raise DeltaflError(f"{origin}: {name} holds a label above 9")
        batches.append(batch)
    train, test = np.concatenate(batches[:-1]), batches[-1]
    (train_x, train_y), (test_x, test_y) = (
        (np.ascontiguousarray(part[:, 1:]).reshape(-1, 3, 32, 32), part[:, 0].astype(np.int64))
        for part in (train, test)
    )
    return Dataset(title, train_x, train_y, test_x, test_y, num_classes=10)
