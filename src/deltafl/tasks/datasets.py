"""Reading data sets. ``digits`` is inside scikit-learn; the others are files that ``sources.py`` knows and finds.

Here are those of four IDX files, and the table of the others: ``images.py`` and ``text.py`` read those that are one
NumPy archive, ``cifar.py``, ``femnist.py``, ``celeba.py`` and ``text.py`` those in the forms of other projects.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError, unknown_name
from ..types import IntArray
from .base import Dataset
from .celeba import load_celeba
from .cifar import load_cifar10
from .femnist import load_femnist
from .idx import idx_header, read_idx
from .images import Found, load_celeba_subset, load_cifar10_jpeg, load_unipen62, open_archive, read_arrays
from .sources import (
    ARCHIVES,
    SOURCES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    WRITERS_FILE,
    find_file,
    get_source,
    search_folders,
    sha256_of,
)
from .text import load_shakespeare, load_tinyshakespeare

#: ``digits``: the first 1,500 examples, in scikit-learn's order, are for training and the last 297 for the
# test.
DIGITS_TRAIN = 1500
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"

#: The arrays of ``WRITERS_FILE`` that hold the content of MNIST's four files.
WRITERS_ARRAYS = {TRAIN_IMAGES: "train_x", TRAIN_LABELS: "train_y", TEST_IMAGES: "test_x", TEST_LABELS: "test_y"}

Bytes = npt.NDArray[np.uint8]

#: Readers of ``sources.ARCHIVES``.
ARCHIVE_LOADERS: dict[str, Callable[[Found], Dataset]] = {
    "unipen62": load_unipen62,
    "cifar10-jpeg": load_cifar10_jpeg,
    "celeba-subset": load_celeba_subset,
    "tinyshakespeare": load_tinyshakespeare,
}

#: Readers of ``sources.FORMS``.
FORM_LOADERS: dict[str, Callable[[Path | None], Dataset]] = {
    "cifar10": load_cifar10,
    "femnist": load_femnist,
    "celeba": load_celeba,
    "shakespeare": load_shakespeare,
}


class RawFiles(NamedTuple):
    """What was read: the four arrays by the name of their IDX file, the writers if known, and from where."""

    arrays: Mapping[str, Bytes]
    columns: Mapping[str, IntArray]
    origin: Path


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: ``digits`` (1,500 + 297 images of 8 x 8, values 0 to 16), ``mnist`` or ``fashion-mnist`` (60,000
            + 10,000 images of 28 x 28, values 0 to 255), or one of ``ARCHIVE_LOADERS`` and ``FORM_LOADERS``.
        data_dir: A folder to look in first; see ``sources.search_folders`` for the others.

    Returns:
        The data set: images uint8 or float32 (N, channels, height, width) or tokens uint8 (N, length), labels int64.
        ``mnist`` has the column ``writer`` if it was read from ``mnist_writers.npz``. Its name says so if the content
        is not the published one.

    Raises:
        DeltaflError: If the name is unknown, nothing is found, or a file is broken.
        MissingExtraError: If a package is missing that the data set needs.
    """
    if name == "digits":
        return _load_digits()
    if name in ARCHIVES:
        return ARCHIVE_LOADERS[name](open_archive(name, data_dir))
    if name in FORM_LOADERS:
        return FORM_LOADERS[name](data_dir)
    if name not in SOURCES:
        raise unknown_name("data set", name, ["digits", *SOURCES, *ARCHIVES, *FORM_LOADERS])
    raw = _find_raw(name, data_dir)
    _require_fitting(raw)
    train_x, test_x = raw.arrays[TRAIN_IMAGES], raw.arrays[TEST_IMAGES]
    return Dataset(
        name=_honest_name(name, raw),
        train_x=train_x[:, np.newaxis],
        train_y=raw.arrays[TRAIN_LABELS].astype(np.int64),
        test_x=test_x[:, np.newaxis],
        test_y=raw.arrays[TEST_LABELS].astype(np.int64),
        num_classes=10,
        columns=raw.columns,
    )


def _load_digits() -> Dataset:
    table = _digits_table()
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


def _digits_table() -> npt.NDArray[np.float64]:
    """scikit-learn's digits (1797, 64 pixels and the label), from its file: importing it takes longer than a round."""
    try:
        path = Path(str(distribution("scikit-learn").locate_file(DIGITS_FILE)))
    except PackageNotFoundError:
        raise MissingExtraError("scikit-learn", "sim") from None
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # an installation of another layout

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])


def _find_raw(name: str, data_dir: Path | None) -> RawFiles:
    """Read the first folder that has everything."""
    looked = []
    for folder in search_folders(name, data_dir):
        if name == "mnist" and (folder / WRITERS_FILE).is_file():
            return read_writers(folder / WRITERS_FILE)
        found = {file: find_file(folder, file) for file in get_source(name).sha256}
        paths = {file: path for file, path in found.items() if path is not None}
        if len(paths) == len(found):
            arrays = {file: read_idx(path, num_axes=_num_axes(file)) for file, path in paths.items()}
            return RawFiles(arrays, {}, folder)
        looked.append(f"{folder} ({len(paths)} of {len(found)} files)")
    raise DeltaflError(
        f"{name} was not found; looked in {', '.join(looked)}. Write 'deltafl data fetch {name}', "
        f"or give the folder that holds {TRAIN_IMAGES}.gz and the other three as data_dir"
    )


def read_writers(path: Path) -> RawFiles:
    """Read MNIST with its writers from one NumPy archive.

    Raises:
        DeltaflError: If it is no such archive or an array is missing.
    """
    found = read_arrays(path, (*WRITERS_ARRAYS.values(), "train_writer"))
    arrays: dict[str, Bytes] = {file: found[key] for file, key in WRITERS_ARRAYS.items()}
    writer = found["train_writer"]
    for file, array in arrays.items():
        if array.dtype != np.uint8 or array.ndim != _num_axes(file):
            raise DeltaflError(f"{path}: {WRITERS_ARRAYS[file]} is {array.dtype} with {array.ndim} axes, needs uint8")
    if writer.shape != arrays[TRAIN_LABELS].shape or writer.dtype.kind not in "iu":
        raise DeltaflError(
            f"{path}: train_writer is {writer.dtype} {writer.shape}, needs a whole number for each of "
            f"{len(arrays[TRAIN_LABELS])} labels"
        )
    return RawFiles(arrays, {"writer": writer.astype(np.int64)}, path)


def content_sha256(array: Bytes) -> str:
    """The SHA-256 of the uncompressed IDX file that holds the array."""
    return sha256_of(idx_header(array), np.ascontiguousarray(array).data.cast("B"))


def _num_axes(file: str) -> int:
    return 3 if "idx3" in file else 1


def _require_fitting(raw: RawFiles) -> None:
    """Refuse images that do not fit their labels, or labels that are not 0 to 9."""
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        image, label = raw.arrays[images], raw.arrays[labels]
        if len(image) != len(label):
            raise DeltaflError(f"{raw.origin}: {images} has {len(image)} images but {labels} has {len(label)} labels")
        if image.shape[1:] != (28, 28):
            raise DeltaflError(f"{raw.origin}: {images} has images of shape {image.shape[1:]}, needs (28, 28)")
        if len(label) == 0 or label.max() > 9:
            raise DeltaflError(f"{raw.origin}: {labels} must hold labels from 0 to 9, at least one")


def _honest_name(name: str, raw: RawFiles) -> str:
    """The name of what was read: another one where the content is not that of the published files."""
    found = {file: content_sha256(array) for file, array in raw.arrays.items()}
    for known, source in SOURCES.items():
        if found == dict(source.sha256) and known != name:
            raise DeltaflError(f"{raw.origin} holds {known}, not {name}: give another data_dir")
    return name if found == dict(SOURCES[name].sha256) else f"{name} (other content than published: {raw.origin})"
