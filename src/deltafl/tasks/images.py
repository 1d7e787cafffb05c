"""Data sets that are one NumPy archive: ``unipen62``.

What each archive holds, by the names of its arrays (N examples; everything is uint8 unless said otherwise):

- ``unipen62_writers.npz``: ``x`` (N, 28, 28), ink 255 on 0; ``y`` (N,), labels 0 to 61 for 0-9, A-Z, a-z; ``writer``
  (N,), whole numbers. Handwriting from pen trajectories (Guyon et al., UNIPEN, ICPR 1994) in the classes of FEMNIST,
  for which it stands in; reports must not call it FEMNIST.

Where examples have owners, the test set is cut from the owners' own examples, see ``split_owners``.
"""

import hashlib
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import IntArray
from .base import Dataset
from .sources import ARCHIVES, find_archive

#: ``unipen62``: writers with fewer examples are left out, and of one with more only the first ones are used.
FEWEST_OF_WRITER, MOST_OF_WRITER = 50, 500

#: Of each owner's examples the 5th, 15th, 25th, ... are for the test: 10 %, and one of 5 to 14.
TEST_EVERY, TEST_FIRST = 10, 4


def load_archive(name: str, data_dir: Path | None = None) -> Dataset:
    """Load a data set of ``sources.ARCHIVES``.

    Args:
        name: One of ``ARCHIVES``.
        data_dir: A folder to look in first; see ``sources.find_archive``.

    Returns:
        The data set: images uint8 (N, channels, height, width), labels int64. Its name is the archive's title, and
        says so if the content is not that of this project's archive.

    Raises:
        DeltaflError: If the archive is not found or broken.
    """
    path = find_archive(name, data_dir)
    digest = file_sha256(path)
    known = ARCHIVES[name]
    title = known.title if digest == known.sha256 else f"{known.title} (other content than known: {path})"
    return _load_unipen62(path, title)


def _load_unipen62(path: Path, title: str) -> Dataset:
    arrays = read_arrays(path, ("x", "y", "writer"))
    image = arrays["x"]
    if image.dtype != np.uint8 or image.shape[1:] != (28, 28):
        raise DeltaflError(f"{path}: x is {image.dtype} {image.shape}, needs uint8 (N, 28, 28)")
    label, writer = _labels(path, arrays["y"], len(image), 62), _owners(path, arrays["writer"], len(image))
    image = image[:, np.newaxis]
    whole = Dataset(title, image, label, image[:0], label[:0], num_classes=62)
    return _cut_by_owner(whole, "writer", writer, FEWEST_OF_WRITER, MOST_OF_WRITER)


def split_owners(owner_e: IntArray, fewest: int = 1, most: int | None = None) -> tuple[IntArray, IntArray]:
    """Choose owners and cut a test set from the examples of each; no randomness, hence the same for every seed.

    Owners with fewer than ``fewest`` examples are left out; of the others the first ``most`` examples are used, in the
    order in which they are stored. Of these the 5th, 15th, 25th, ... are for the test, the rest for training.

    Args:
        owner_e: (N,) the owner of each example.
        fewest: >= 1.
        most: >= 1, or None for all.

    Returns:
        Rows for training and rows for the test, both sorted. An owner with fewer than 5 examples has none in the test.
    """
    train: list[IntArray] = [np.arange(0)]
    test: list[IntArray] = [np.arange(0)]
    order = np.argsort(owner_e, kind="stable")
    _, start = np.unique(owner_e[order], return_index=True)
    for rows in np.split(order, start[1:]):
        if len(rows) >= fewest:
            used = rows[:most]
            is_test = np.arange(len(used)) % TEST_EVERY == TEST_FIRST
            train.append(used[~is_test])
            test.append(used[is_test])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def read_arrays(path: Path, keys: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    """Read some arrays of a NumPy archive.

    Raises:
        DeltaflError: If it is no such archive or lacks one of them.
    """
    try:
        # A file opened here is closed whatever happens; NumPy leaves its own open if the archive is broken.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys}
    except (OSError, KeyError, ValueError, EOFError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise DeltaflError(f"{path} is not an archive with the arrays {', '.join(keys)}: {error}") from error


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal.

    Raises:
        DeltaflError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DeltaflError(f"cannot read {path}: {error.strerror}") from error


def _labels(path: Path, label: npt.NDArray[Any], num_examples: int, classes: int) -> IntArray:
    """Labels that fit their images, as int64."""
    if label.dtype != np.uint8 or label.shape != (num_examples,):
        raise DeltaflError(f"{path}: labels are {label.dtype} {label.shape}, needs uint8 for {num_examples} images")
    if num_examples == 0 or label.max() >= classes:
        raise DeltaflError(f"{path} must hold labels from 0 to {classes - 1}, at least one")
    return label.astype(np.int64)


def _owners(path: Path, owner: npt.NDArray[Any], num_examples: int) -> IntArray:
    """Owners that fit their images, as int64."""
    if owner.dtype.kind not in "iu" or owner.shape != (num_examples,):
        raise DeltaflError(f"{path}: owners are {owner.dtype} {owner.shape}, needs {num_examples} whole numbers")
    return owner.astype(np.int64)


def _cut_by_owner(whole: Dataset, column: str, owner_e: IntArray, fewest: int = 1, most: int | None = None) -> Dataset:
    """A data set that has all its examples for training so far, with the owners' column and their test set."""
    train, test = split_owners(owner_e, fewest, most)
    if len(test) == 0:
        raise DeltaflError(f"{whole.name}: no {column} has {max(fewest, TEST_FIRST + 1)} examples or more")
    return replace(
        whole,
        train_x=whole.train_x[train],
        train_y=whole.train_y[train],
        test_x=whole.train_x[test],
        test_y=whole.train_y[test],
        columns={column: owner_e[train]},
    )
