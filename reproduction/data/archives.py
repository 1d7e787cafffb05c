"""Readers of the archives that ``reproduction/data/__init__.py`` describes."""

import hashlib
import io
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltafl import DeltaflError, tasks
from deltafl.errors import require
from deltafl.io import read_toml
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
ARCHIVES: dict[str, dict[str, str]] = read_toml(Path(__file__).with_name("archives.toml"))
Bytes = npt.NDArray[np.uint8]


class _Found(NamedTuple):
    """An archive that was found; the title says so if its content is not the known one."""

    name: str
    path: Path
    sha256: str
    title: str

    def arrays(self, *keys: str) -> list[npt.NDArray[Any]]:
        arrays = tasks.read_arrays(self.path, keys)
        return [arrays[key] for key in keys]


def _find(name: str, data_dir: Path | None) -> _Found:
    file, title, known = ARCHIVES[name].values()
    folders = tasks.data_folders(name, data_dir)
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is None:
        raise DeltaflError(
            f"{name} needs the file {file}, which is published nowhere and not in {', '.join(map(str, folders))}: give "
            "the folder that holds it as data_dir or DELTAFL_DATA"
        )
    with path.open("rb") as archive:
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
    return _Found(name, path, digest, title if digest == known else f"{title} (other content than known: {path})")


def load_unipen62(data_dir: Path | None = None) -> tasks.Dataset:
    """Handwriting by writer; the column of owners is ``writer``."""
    found = _find("unipen62", data_dir)
    image, label, writer = found.arrays("x", "y", "writer")
    if image.dtype != np.uint8 or image.shape[1:] != (28, 28):
        raise DeltaflError(f"{found.path}: x is {image.dtype} {image.shape}, needs uint8 (N, 28, 28)")
    owner = _owners(found.path, writer, len(image))
    return _by_owner(found, image[:, np.newaxis], label, 62, "writer", owner, FEWEST_OF_WRITER, MOST_OF_WRITER)


def load_celeba_subset(data_dir: Path | None = None) -> tasks.Dataset:
    """Faces by celebrity; the column of owners is ``celeb``, and Pillow decodes them."""
    found = _find("celeba-subset", data_dir)
    label, celeb = found.arrays("y", "celeb")
    owner, image = _owners(found.path, celeb, label.size), _unpack(found, "", label.size, 84)
    return _by_owner(found, image, label, 2, "celeb", owner, FEWEST_OF_CELEBRITY)


def _by_owner(
    found: _Found, image: Bytes, label: npt.NDArray[Any], classes: int, column: str, owner: IntArray, *limits: int
) -> tasks.Dataset:
    label = _labels(found.path, label, len(image), classes)
    whole = tasks.Dataset(found.title, image, label, image[:0], label[:0], num_classes=classes)
    return tasks.hold_out_by_owner(whole, column, owner, *limits)


def load_cifar10_jpeg(data_dir: Path | None = None) -> tasks.Dataset:
    found = _find("cifar10-jpeg", data_dir)
    train_y, test_y = (_labels(found.path, label, label.size, 10) for label in found.arrays("train_y", "test_y"))
    train_x, test_x = _unpack(found, "train_", len(train_y), 32), _unpack(found, "test_", len(test_y), 32)
    return tasks.Dataset(found.title, train_x, train_y, test_x, test_y, num_classes=10)


def _unpack(found: _Found, prefix: str, num_images: int, side: int) -> Bytes:
    shape = (num_images, 3, side, side)

    def unpack() -> Bytes:
        return _decode(found.path, shape, *found.arrays("header", f"{prefix}scan", f"{prefix}offsets"))

    # The checksum in the name: images of another archive are never taken for these.
    return tasks.cached_images(tasks.cache_folder() / found.name / f"{prefix}{found.sha256[:16]}.npy", shape, unpack)


def _decode(
    path: Path, shape: tuple[int, ...], header: npt.NDArray[Any], scan: npt.NDArray[Any], offset_e: npt.NDArray[Any]
) -> Bytes:
    """Decode JPEG images of one size whose identical headers are stored once, the rest of each in ``scan``."""
    require("PIL", "sim")
    from PIL import Image

    if header.dtype != np.uint8 or scan.dtype != np.uint8:
        raise DeltaflError(f"{path}: header and packed images must be uint8")
    _check_offsets(path, offset_e, shape[0], len(scan))
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


def _check_offsets(path: Path, offset_e: npt.NDArray[Any], number: int, length: int) -> None:
    if offset_e.dtype.kind not in "iu" or offset_e.shape != (number + 1,):
        raise DeltaflError(f"{path}: offsets are {offset_e.dtype} {offset_e.shape}, needs {number + 1} whole numbers")
    if offset_e[0] != 0 or offset_e[-1] != length or (offset_e[1:] < offset_e[:-1]).any():
        raise DeltaflError(f"{path}: offsets must rise from 0 to {length}, the length of what they cut")


def _labels(path: Path, label: npt.NDArray[Any], num_examples: int, classes: int) -> IntArray:
    if label.dtype != np.uint8 or label.shape != (num_examples,):
        raise DeltaflError(f"{path}: labels are {label.dtype} {label.shape}, needs uint8 for {num_examples} images")
    if num_examples == 0 or label.max() >= classes:
        raise DeltaflError(f"{path} must hold labels from 0 to {classes - 1}, at least one")
    return label.astype(np.int64)


def _owners(path: Path, owner: npt.NDArray[Any], num_examples: int) -> IntArray:
    if owner.dtype.kind not in "iu" or owner.shape != (num_examples,):
        raise DeltaflError(f"{path}: owners are {owner.dtype} {owner.shape}, needs {num_examples} whole numbers")
    return owner.astype(np.int64)


def load_tinyshakespeare(data_dir: Path | None = None) -> tasks.Dataset:
    """Roles cut in time: 80 % for training, the rest for the test, both in windows of 80 characters, 10 apart.

    The column of owners is ``role``, the number of the role in the archive.
    """
    found = _find("tinyshakespeare", data_dir)
    text, offset, name = found.arrays("text", "offsets", "role")
    if text.dtype != np.uint8 or text.ndim != 1:
        raise DeltaflError(f"{found.path}: needs text uint8 (characters,)")
    _check_offsets(found.path, offset, len(name), len(text))
    tokens = tasks.encode_text(text, TINY_ALPHABET)
    pieces: list[list[Any]] = [[], [], [], [], [], []]
    for role, (first, last) in enumerate(pairwise(offset)):
        if last - first >= FEWEST_OF_ROLE:
            cut = first + int(TRAIN_SHARE * (last - first))
            train, test = windows(tokens[first:cut]), windows(tokens[cut:last])
            roles = [np.full(len(y), role) for _, y in (train, test)]
            for column, piece in zip(pieces, (*train, *test, *roles), strict=True):
                column.append(piece)
    if not pieces[0]:
        raise DeltaflError(f"{found.path}: no role has {FEWEST_OF_ROLE} characters or more")
    train_x, train_y, test_x, test_y, role_e, test_role_e = map(np.concatenate, pieces)
    owners, test_owners = {"role": role_e}, {"role": test_role_e}
    parts = (train_x, train_y, test_x, test_y, len(TINY_ALPHABET))
    return tasks.Dataset(found.title, *parts, columns=owners, test_columns=test_owners)


def windows(token_k: Bytes) -> tuple[Bytes, IntArray]:
    """Windows of ``WINDOW`` tokens, ``STRIDE`` apart, and the token after each: uint8 (N, 80) and int64 (N,)."""
    if len(token_k) <= WINDOW:
        return np.zeros((0, WINDOW), np.uint8), np.zeros(0, np.int64)
    piece = np.lib.stride_tricks.sliding_window_view(token_k, WINDOW + 1)[::STRIDE]
    return piece[:, :WINDOW].copy(), piece[:, WINDOW].astype(np.int64)


def load_mnist_writers(data_dir: Path | None = None) -> tasks.Dataset | None:
    """MNIST with the column ``writer``; None if no folder holds ``mnist_writers.npz``."""
    paths = (folder / "mnist_writers.npz" for folder in tasks.data_folders("mnist", data_dir))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    found = tasks.read_arrays(path, (*MNIST_ARRAYS.values(), "train_writer"))
    for key in MNIST_ARRAYS.values():
        axes = 3 if key.endswith("x") else 1
        if found[key].dtype != np.uint8 or found[key].ndim != axes:
            raise DeltaflError(
                f"{path}: {key} is {found[key].dtype} with {found[key].ndim} axes, needs uint8 with {axes}"
            )
    writer = _owners(path, found["train_writer"], len(found["train_y"]))
    return tasks.idx_dataset(
        "mnist", {file: found[key] for file, key in MNIST_ARRAYS.items()}, path, {"writer": writer}
    )
