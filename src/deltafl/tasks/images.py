"""Data sets that are one NumPy archive: ``unipen62``, ``cifar10-jpeg``, ``celeba-subset``; ``text.py`` has another.

What each archive holds, by the names of its arrays (N examples; everything is uint8 unless said otherwise):

- ``unipen62_writers.npz``: ``x`` (N, 28, 28), ink 255 on 0; ``y`` (N,), labels 0 to 61 for 0-9, A-Z, a-z; ``writer``
  (N,), whole numbers. Handwriting from pen trajectories (Guyon et al., UNIPEN, ICPR 1994) in the classes of FEMNIST,
  for which it stands in; reports must not call it FEMNIST.
- ``cifar10_jpeg.npz``: CIFAR-10, recompressed as JPEG, hence not its pixels. ``header``, ``train_scan`` and
  ``train_offsets`` are 32 x 32 images as ``packed.py`` says, ``train_y`` (N,) their labels 0 to 9; the same with
  ``test_``.
- ``celeba_smiling_84.npz``: some of CelebA's faces. ``header``, ``scan`` and ``offsets`` are 84 x 84 images, ``y``
  (N,) is 1 for a smile and 0 for none, ``celeb`` (N,) the person, whole numbers.

Where examples have owners, the test set is cut from the owners' own examples, see ``split_owners``.
"""

import hashlib
import lzma
import tokenize
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import IntArray
from .base import Dataset
from .packed import decode, kept
from .sources import ARCHIVES, cache_folder, find_archive

#: ``unipen62``: writers with fewer examples are left out, and of one with more only the first ones are used.
FEWEST_OF_WRITER, MOST_OF_WRITER = 50, 500

#: ``celeba-subset``: people with fewer images are left out, as LEAF does.
FEWEST_OF_CELEBRITY = 5

#: What a broken archive, or one of an unknown kind, ends with in NumPy and zipfile: a header that announces more than
#: there is memory for (MemoryError), encryption (RuntimeError), an unknown compression (NotImplementedError), ...
_BROKEN = (
    *(OSError, EOFError, KeyError, ValueError, TypeError, OverflowError, MemoryError, RuntimeError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile, tokenize.TokenError),
)

#: Of each owner's examples the 5th, 15th, 25th, ... are for the test: 10 %, and one of 5 to 14.
TEST_EVERY, TEST_FIRST = 10, 4


class Found(NamedTuple):
    """An archive that was found: its data set's name, where it is, its SHA-256, and how a report calls it."""

    name: str
    path: Path
    sha256: str
    title: str


def open_archive(name: str, data_dir: Path | None = None) -> Found:
    """Find the archive of a data set of ``sources.ARCHIVES``.

    Args:
        name: One of ``ARCHIVES``.
        data_dir: A folder to look in first; see ``sources.find_archive``.

    Returns:
        What was found. Its title says so if the content is not that of this project's archive.

    Raises:
        DeltaflError: If the archive is not found or cannot be read.
    """
    path = find_archive(name, data_dir)
    digest = file_sha256(path)
    known = ARCHIVES[name]
    title = known.title if digest == known.sha256 else f"{known.title} (other content than known: {path})"
    return Found(name, path, digest, title)


def load_unipen62(found: Found) -> Dataset:
    """Handwriting by writer; the column of owners is ``writer``."""
    path = found.path
    arrays = read_arrays(path, ("x", "y", "writer"))
    image = arrays["x"]
    if image.dtype != np.uint8 or image.shape[1:] != (28, 28):
        raise DeltaflError(f"{path}: x is {image.dtype} {image.shape}, needs uint8 (N, 28, 28)")
    label, writer = _labels(path, arrays["y"], len(image), 62), _owners(path, arrays["writer"], len(image))
    image = image[:, np.newaxis]
    whole = Dataset(found.title, image, label, image[:0], label[:0], num_classes=62)
    return cut_by_owner(whole, "writer", writer, FEWEST_OF_WRITER, MOST_OF_WRITER)


def load_cifar10_jpeg(found: Found) -> Dataset:
    """CIFAR-10 recompressed; Pillow decodes it."""
    arrays = read_arrays(found.path, ("train_y", "test_y"))
    train_y, test_y = (_labels(found.path, arrays[key], arrays[key].size, 10) for key in ("train_y", "test_y"))
    train_x = _unpack(found, "train_", len(train_y), 32)
    test_x = _unpack(found, "test_", len(test_y), 32)
    return Dataset(found.title, train_x, train_y, test_x, test_y, num_classes=10)


def load_celeba_subset(found: Found) -> Dataset:
    """Faces by celebrity; the column of owners is ``celeb``, and Pillow decodes them."""
    arrays = read_arrays(found.path, ("y", "celeb"))
    label = _labels(found.path, arrays["y"], arrays["y"].size, 2)
    celeb = _owners(found.path, arrays["celeb"], len(label))
    image = _unpack(found, "", len(label), 84)
    whole = Dataset(found.title, image, label, image[:0], label[:0], num_classes=2)
    return cut_by_owner(whole, "celeb", celeb, FEWEST_OF_CELEBRITY)


def _unpack(found: Found, prefix: str, num_images: int, side: int) -> npt.NDArray[np.uint8]:
    """The packed images whose arrays' names begin with the prefix, (N, 3, side, side), from the cache if possible."""
    shape = (num_images, 3, side, side)

    def unpack() -> npt.NDArray[np.uint8]:
        keys = ("header", f"{prefix}scan", f"{prefix}offsets")
        arrays = read_arrays(found.path, keys)
        header, scan, offset = (arrays[key] for key in keys)
        if header.dtype != np.uint8 or scan.dtype != np.uint8:
            raise DeltaflError(f"{found.path}: header and {prefix}scan must be uint8")
        return decode(found.path, header, scan, offset, shape)

    # The checksum in the name: images of another archive are never taken for these.
    return kept(cache_folder() / found.name / f"{prefix}{found.sha256[:16]}.npy", shape, unpack)


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


def read_arrays(path: Path, keys: tuple[str, ...] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Read some arrays of a NumPy archive, or all of them.

    Raises:
        DeltaflError: If it is no such archive or lacks one of them.
    """
    try:
        # A file opened here is closed whatever happens; NumPy leaves its own open if the archive is broken.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array, as .npy files are")
            arrays = {key: archive[key] for key in keys or archive.files}
        other = next((key for key, array in arrays.items() if not isinstance(array, np.ndarray)), None)
        if other is not None:
            raise ValueError(f"{other!r} in it is no array")
    except _BROKEN as error:
        what = "an NPZ file of plain arrays" if keys is None else f"an archive with the arrays {', '.join(keys)}"
        raise DeltaflError(f"{path} is not {what}: {str(error) or type(error).__name__}") from error
    return arrays


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


def cut_by_owner(whole: Dataset, column: str, owner_e: IntArray, fewest: int = 1, most: int | None = None) -> Dataset:
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
        test_columns={column: owner_e[test]},
    )
