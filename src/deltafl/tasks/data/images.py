"""Image data sets as their authors publish them: digits, MNIST, FashionMNIST and CIFAR-10."""

import hashlib
import struct
import tarfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

from ...errors import DeltaflError, MissingExtraError, explained
from ..dataset import Dataset
from .files import (
    CIFAR_ARCHIVE,
    SOURCES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Bytes,
    find,
    find_file,
    matches,
    unpacked,
)

#: ``digits``: the first 1,500 examples, in scikit-learn's order, are for training and the last 297
#: for the test.
DIGITS_TRAIN = 1500
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"

#: An IDX file of unsigned bytes starts with these, the number of its axes and their lengths.
IDX_BYTES = bytes([0, 0, 8])

#: The files of CIFAR-10; the last one is the test set. An image is a label and 3,072 bytes: red,
#: green, blue planes.
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ROW = 1 + 3 * 32 * 32

#: What the published files unpack to has at most 185 MB.
LARGEST = 2**30


def load_digits(data_dir: Path | None = None) -> Dataset:
    """scikit-learn's digits, 1,500 + 297 images of 8 x 8 with values 0 to 16; nothing is looked for
    in ``data_dir``.
    """
    # scikit-learn's file alone: importing it takes longer than a round.
    try:
        path = Path(str(distribution("scikit-learn").locate_file(DIGITS_FILE)))
    except PackageNotFoundError:
        raise MissingExtraError("scikit-learn", "sim") from None
    table = np.loadtxt(path, delimiter=",")
    x = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    whole = Dataset.whole("digits", x, y, num_classes=10)
    return whole.split(slice(DIGITS_TRAIN), slice(DIGITS_TRAIN, None))


def load_idx(name: str, data_dir: Path | None = None) -> Dataset:
    """``mnist`` or ``fashion-mnist``, 60,000 + 10,000 images of 28 x 28, from the first folder
    with all four files.
    """

    def look(folder: Path) -> dict[str, Path] | None:
        # All four from one folder: MNIST's files and FashionMNIST's have the same names.
        found = {}
        for file in SOURCES[name].checksums:
            path = find_file(folder, file)
            if path is None:
                return None
            found[file] = path
        return found

    needed = f"{TRAIN_IMAGES}.gz and the other three files, which 'deltafl data fetch {name}' gets"
    paths = find(name, data_dir, needed, look)
    arrays = {file: read_idx(path) for file, path in paths.items()}
    return idx_dataset(name, arrays, paths[TRAIN_IMAGES].parent)


def idx_dataset(
    name: str,
    arrays: Mapping[str, Bytes],
    origin: Path,
) -> Dataset:
    """``mnist`` or ``fashion-mnist`` of the arrays of its four IDX files, by the names of the
    files, from ``origin``.

    The data set's name says so if the content is not the published one.
    """
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        image = arrays[images]
        label = arrays[labels]
        fits = label.shape == image.shape[:1] and image.shape[1:] == (28, 28) and label.size > 0
        if not fits or label.max() > 9:
            raise DeltaflError(
                f"{origin}: {images} has shape {image.shape} and {labels} {label.shape}; needs (N, "
                "28, 28) and N labels from 0 to 9"
            )
    # Of the unpacked content: files that were gzipped again have other bytes.
    if {file: idx_sha256(array) for file, array in arrays.items()} != SOURCES[name].checksums:
        title = f"{name} (other content than published: {origin})"
    else:
        title = name
    return Dataset(
        name=title,
        train_x=arrays[TRAIN_IMAGES][:, np.newaxis],
        train_y=arrays[TRAIN_LABELS].astype(np.int64),
        test_x=arrays[TEST_IMAGES][:, np.newaxis],
        test_y=arrays[TEST_LABELS].astype(np.int64),
        num_classes=10,
    )


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes, gzipped or not."""
    cure = "; remove it and fetch it again"
    with (
        explained(f"{path} is no whole IDX file of bytes", cure=cure),
        unpacked(path, LARGEST) as file,
    ):
        content = file.read()
        if content[:3] != IDX_BYTES:
            raise ValueError(f"it starts with {content[:3].hex()!r}")
        # IDX is big-endian.
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        return np.frombuffer(
            content,
            np.uint8,
            offset=4 + 4 * len(shape),
        ).reshape(shape)


def idx_sha256(array: Bytes) -> str:
    """The SHA-256 of the unpacked IDX file that holds the array."""
    digest = hashlib.sha256(
        IDX_BYTES
        + struct.pack(
            f">B{array.ndim}I",
            array.ndim,
            *array.shape,
        )
    )
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009), 50,000 + 10,000 images of 32 x 32 in colour, from its
    ``.tar.gz``.

    Its name says so if the content is not the published one.
    """
    needed = f"{CIFAR_ARCHIVE}, which 'deltafl data fetch cifar10' gets"
    path = find(
        "cifar10",
        data_dir,
        needed,
        lambda folder: find_file(folder, CIFAR_ARCHIVE),
    )
    files = {}
    with (
        explained(f"{path} is not a whole tar archive"),
        unpacked(path, LARGEST) as file,
        tarfile.open(fileobj=file, mode="r|") as archive,
    ):
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:  # a folder has none
                # By its last name, in whatever folder of the archive it is.
                files[Path(member.name).name] = np.frombuffer(content.read(), np.uint8)
    batches = []
    for name in CIFAR_FILES:
        batch = files.get(name, np.zeros(0, np.uint8))
        # Every ``CIFAR_ROW``-th byte is a label.
        if batch.size == 0 or batch.size % CIFAR_ROW or batch[::CIFAR_ROW].max() > 9:
            raise DeltaflError(
                f"{path}: {name} is missing or broken; an image has {CIFAR_ROW} bytes, a label 0 "
                "to 9"
            )
        batches.append(batch.reshape(-1, CIFAR_ROW))
    title = "CIFAR-10"
    if not matches(path, SOURCES["cifar10"].checksums[CIFAR_ARCHIVE]):
        title = f"CIFAR-10 (other content than published: {path})"
    row_e = np.concatenate(batches)
    x = row_e[:, 1:].reshape(-1, 3, 32, 32)
    y = row_e[:, 0].astype(np.int64)
    num_train = len(row_e) - len(batches[-1])
    whole = Dataset.whole(title, x, y, num_classes=10)
    return whole.split(slice(num_train), slice(num_train, None))
