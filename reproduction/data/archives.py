"""Readers of the archives that ``reproduction/data/__init__.py`` describes."""

import hashlib
import io
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltafl import DeltaflError
from deltafl.errors import require
from deltafl.tasks import (
    Dataset,
    cache_folder,
    cached_images,
    data_folders,
    encode_text,
    hold_out_by_owner,
    idx_dataset,
    read_arrays,
)
from deltafl.types import IntArray

#: ``unipen62``: writers with fewer examples are left out, and of one with more only the first ones are used.
FEWEST_OF_WRITER, MOST_OF_WRITER = 50, 500

#: ``celeba-subset``: people with fewer images are left out, as LEAF does.
FEWEST_OF_CELEBRITY = 5

#: The characters of ``tinyshakespeare``, in the order of their codes.
TINY_ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

#: Characters that the model sees, and how far apart windows of ``tinyshakespeare`` start.
WINDOW, STRIDE = 80, 10

#: ``tinyshakespeare``: roles with fewer characters are left out; of the others this share is for training.
FEWEST_OF_ROLE, TRAIN_SHARE = 1000, 0.8

#: The arrays of ``mnist_writers.npz``, by the names of MNIST's four files.
MNIST_ARRAYS = {
    "train-images-idx3-ubyte": "train_x",
    "train-labels-idx1-ubyte": "train_y",
    "t10k-images-idx3-ubyte": "test_x",
    "t10k-labels-idx1-ubyte": "test_y",
}


#: Windows of a role, the token after each, the role of each.
Piece = tuple[npt.NDArray[np.uint8], IntArray, IntArray]


class Archive(NamedTuple):
    """A data set in one archive: its file, its title in reports, the SHA-256 of the one that recorded runs read."""

    file: str
    title: str
    sha256: str


ARCHIVES: dict[str, Archive] = {
    "tinyshakespeare": Archive(
        "tinyshakespeare_roles.npz",
        "tiny Shakespeare by role",
        "97caf919c2a2333011dffc7a41531a7416869333aafbcee81d44d936f6db6c3a",
    ),
    "unipen62": Archive(
        "unipen62_writers.npz",
        "UNIPEN-62 by writer",
        "b968e5e2c291aa0230d3ea7fd8214f6d65d41e4640bb0dbc3a3287baf2b99818",
    ),
    "cifar10-jpeg": Archive(
        "cifar10_jpeg.npz",
        "CIFAR-10 recompressed as JPEG",
        "5807fcc6606286c85a04b70371a321db6d71a725399b9c318e1c4eadf6f1d09b",
    ),
    "celeba-subset": Archive(
        "celeba_smiling_84.npz",
        "subset of CelebA by celebrity",
        "57ccb92a5a88b2337bfb147e69585fa88432554d1df312070e7c57b89cc330c6",
    ),
}


class Found(NamedTuple):
    """An archive that was found: its data set's name, where it is, its SHA-256, and its title in reports."""

    name: str
    path: Path
    sha256: str
    title: str


def find_archive(name: str, data_dir: Path | None = None) -> Found:
    """Find the archive of a data set of ``ARCHIVES``; the title says so if its content is another one.

    Raises:
        DeltaflError: If the archive is not found.
    """
    known = ARCHIVES[name]
    folders = data_folders(name, data_dir)
    path = next((folder / known.file for folder in folders if (folder / known.file).is_file()), None)
    if path is None:
        raise DeltaflError(
            f"{name} needs the file {known.file}, which is published nowhere and not in "
            f"{', '.join(map(str, folders))}: give the folder that holds it as data_dir or DELTAFL_DATA"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    title = known.title if digest == known.sha256 else f"{known.title} (other content than known: {path})"
    return Found(name, path, digest, title)


def load_unipen62(data_dir: Path | None = None) -> Dataset:
    """Handwriting by writer; the column of owners is ``writer``."""
    found = find_archive("unipen62", data_dir)
    arrays = read_arrays(found.path, ("x", "y", "writer"))
    image = arrays["x"]
    if image.dtype != np.uint8 or image.shape[1:] != (28, 28):
        raise DeltaflError(f"{found.path}: x is {image.dtype} {image.shape}, needs uint8 (N, 28, 28)")
    label, writer = _labels(found.path, arrays["y"], len(image), 62), _owners(found.path, arrays["writer"], len(image))
    image = image[:, np.newaxis]
    whole = Dataset(found.title, image, label, image[:0], label[:0], num_classes=62)
    return hold_out_by_owner(whole, "writer", writer, FEWEST_OF_WRITER, MOST_OF_WRITER)


def load_cifar10_jpeg(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10 recompressed; Pillow decodes it."""
    found = find_archive("cifar10-jpeg", data_dir)
    arrays = read_arrays(found.path, ("train_y", "test_y"))
    train_y, test_y = (_labels(found.path, arrays[key], arrays[key].size, 10) for key in ("train_y", "test_y"))
    train_x = _unpack(found, "train_", len(train_y), 32)
    test_x = _unpack(found, "test_", len(test_y), 32)
    return Dataset(found.title, train_x, train_y, test_x, test_y, num_classes=10)


def load_celeba_subset(data_dir: Path | None = None) -> Dataset:
    """Faces by celebrity; the column of owners is ``celeb``, and Pillow decodes them."""
    found = find_archive("celeba-subset", data_dir)
    arrays = read_arrays(found.path, ("y", "celeb"))
    label = _labels(found.path, arrays["y"], arrays["y"].size, 2)
    celeb = _owners(found.path, arrays["celeb"], len(label))
    image = _unpack(found, "", len(label), 84)
    whole = Dataset(found.title, image, label, image[:0], label[:0], num_classes=2)
    return hold_out_by_owner(whole, "celeb", celeb, FEWEST_OF_CELEBRITY)


def _unpack(found: Found, prefix: str, num_images: int, side: int) -> npt.NDArray[np.uint8]:
    """The packed images whose arrays' names begin with the prefix, (N, 3, side, side), from the cache if possible."""
    shape = (num_images, 3, side, side)

    def unpack() -> npt.NDArray[np.uint8]:
        keys = ("header", f"{prefix}scan", f"{prefix}offsets")
        arrays = read_arrays(found.path, keys)
        header, scan, offset = (arrays[key] for key in keys)
        if header.dtype != np.uint8 or scan.dtype != np.uint8:
            raise DeltaflError(f"{found.path}: header and {prefix}scan must be uint8")
        return decode_packed(found.path, header, scan, offset, shape)

    # The checksum in the name: images of another archive are never taken for these.
    return cached_images(cache_folder() / found.name / f"{prefix}{found.sha256[:16]}.npy", shape, unpack)


def decode_packed(
    path: Path,
    header: npt.NDArray[np.uint8],
    scan: npt.NDArray[np.uint8],
    offset_e: npt.NDArray[Any],
    shape: tuple[int, ...],
) -> npt.NDArray[np.uint8]:
    """Decode JPEG images of one size whose identical headers are stored once.

    Args:
        path: Where they come from, for messages.
        header: The bytes with which every file begins.
        scan: The rest of each file, end to end.
        offset_e: (N + 1,) whole numbers: where each piece of ``scan`` starts, and its length.
        shape: (N, 3, height, width).

    Returns:
        uint8 images of that shape, red, green, blue.

    Raises:
        DeltaflError: If the offsets do not fit, or an image is broken or of another size.
        MissingExtraError: Without Pillow.
    """
    require("PIL", "sim")
    from PIL import Image

    if offset_e.dtype.kind not in "iu" or offset_e.shape != (shape[0] + 1,):
        raise DeltaflError(
            f"{path}: offsets are {offset_e.dtype} {offset_e.shape}, needs {shape[0] + 1} whole numbers "
            f"for {shape[0]} labels"
        )
    if offset_e[0] != 0 or offset_e[-1] != len(scan) or (offset_e[1:] < offset_e[:-1]).any():
        raise DeltaflError(f"{path}: offsets must rise from 0 to {len(scan)}, the length of the packed images")
    images = np.empty(shape, np.uint8)
    start, content = header.tobytes(), scan.tobytes()
    for number, (first, last) in enumerate(pairwise(offset_e.tolist())):
        try:
            with Image.open(io.BytesIO(start + content[first:last]), formats=["JPEG"]) as image:
                if image.size != (shape[3], shape[2]):
                    raise OSError(f"it is {image.size[0]} x {image.size[1]} pixels, needs {shape[3]} x {shape[2]}")
                images[number] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DeltaflError(f"{path}: image {number} cannot be decoded: {error}") from error
    return images


def _labels(path: Path, label: npt.NDArray[Any], num_examples: int, classes: int) -> IntArray:
    """Labels of the images, as int64."""
    if label.dtype != np.uint8 or label.shape != (num_examples,):
        raise DeltaflError(f"{path}: labels are {label.dtype} {label.shape}, needs uint8 for {num_examples} images")
    if num_examples == 0 or label.max() >= classes:
        raise DeltaflError(f"{path} must hold labels from 0 to {classes - 1}, at least one")
    return label.astype(np.int64)


def _owners(path: Path, owner: npt.NDArray[Any], num_examples: int) -> IntArray:
    """Owners of the images, as int64."""
    if owner.dtype.kind not in "iu" or owner.shape != (num_examples,):
        raise DeltaflError(f"{path}: owners are {owner.dtype} {owner.shape}, needs {num_examples} whole numbers")
    return owner.astype(np.int64)


def load_tinyshakespeare(data_dir: Path | None = None) -> Dataset:
    """Roles cut in time: 80 % for training, the rest for the test, both in windows of 80 characters, 10 apart.

    The column of owners is ``role``, the number of the role in the archive.
    """
    found = find_archive("tinyshakespeare", data_dir)
    arrays = read_arrays(found.path, ("text", "offsets", "role"))
    text, offset = arrays["text"], arrays["offsets"]
    whole = offset.ndim == 1 and offset.dtype.kind in "iu" and len(offset) == len(arrays["role"]) + 1
    if text.dtype != np.uint8 or text.ndim != 1 or not whole:
        raise DeltaflError(
            f"{found.path}: needs text uint8 (characters,) and a whole offset before and after each role"
        )
    if offset[0] != 0 or offset[-1] != len(text) or (offset[1:] < offset[:-1]).any():
        raise DeltaflError(f"{found.path}: offsets must rise from 0 to {len(text)}, the length of the text")
    tokens = encode_text(text, TINY_ALPHABET)
    train: list[Piece] = []
    test: list[Piece] = []
    for role, (first, last) in enumerate(pairwise(offset)):
        if last - first >= FEWEST_OF_ROLE:
            cut = first + int(TRAIN_SHARE * (last - first))
            for part, piece in ((train, tokens[first:cut]), (test, tokens[cut:last])):
                x, y = windows(piece)
                part.append((x, y, np.full(len(y), role)))
    if not train:
        raise DeltaflError(f"{found.path}: no role has {FEWEST_OF_ROLE} characters or more")
    train_x, train_y, role_e = (np.concatenate(pieces) for pieces in zip(*train, strict=True))
    test_x, test_y, test_role_e = (np.concatenate(pieces) for pieces in zip(*test, strict=True))
    columns, test_columns = {"role": role_e}, {"role": test_role_e}
    classes = len(TINY_ALPHABET)
    return Dataset(found.title, train_x, train_y, test_x, test_y, classes, columns=columns, test_columns=test_columns)


def windows(token_k: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Windows of ``WINDOW`` tokens, ``STRIDE`` apart, and the token after each: uint8 (N, 80) and int64 (N,)."""
    if len(token_k) <= WINDOW:
        return np.zeros((0, WINDOW), np.uint8), np.zeros(0, np.int64)
    piece = np.lib.stride_tricks.sliding_window_view(token_k, WINDOW + 1)[::STRIDE]
    return piece[:, :WINDOW].copy(), piece[:, WINDOW].astype(np.int64)


def load_mnist_writers(data_dir: Path | None = None) -> Dataset | None:
    """MNIST with the column ``writer``; None if no folder holds ``mnist_writers.npz``."""
    paths = (folder / "mnist_writers.npz" for folder in data_folders("mnist", data_dir))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    found = read_arrays(path, (*MNIST_ARRAYS.values(), "train_writer"))
    for key in MNIST_ARRAYS.values():
        axes = 3 if key.endswith("x") else 1
        if found[key].dtype != np.uint8 or found[key].ndim != axes:
            raise DeltaflError(
                f"{path}: {key} is {found[key].dtype} with {found[key].ndim} axes, needs uint8 with {axes}"
            )
    writer = _owners(path, found["train_writer"], len(found["train_y"]))
    return idx_dataset("mnist", {file: found[key] for file, key in MNIST_ARRAYS.items()}, path, {"writer": writer})
