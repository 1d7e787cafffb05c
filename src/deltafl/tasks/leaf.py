"""LEAF's data sets: FEMNIST's and CelebA's images and Shakespeare's lines, by writer, celebrity and
role.

LEAF's ``preprocess.sh`` leaves ``data/train/*.json`` and ``data/test/*.json``, each of them
``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. An x is a
list of 784 numbers from 0 (ink) to 1 (paper) in FEMNIST, the name of a picture in
``data/raw/img_align_celeba/`` in CelebA, and a string of 80 characters in Shakespeare, whose y is
the next one. A folder fits if it is the one with ``train`` and ``test``, the one above (LEAF's
``data/femnist``), or the whole repository.

FEMNIST is also read from TensorFlow Federated's ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``,
which hold ``/examples/WRITER/pixels`` (n, 28, 28) from 0 to 1 and ``/examples/WRITER/label`` (n,).
For Hugging Face's ``flwrlabs/femnist`` use
``from_huggingface(..., label="character", column="writer_id", inputs="image")``.

Source: Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from ..errors import DeltaflError, require
from ..store import checked, read_json
from ..types import Array, IntArray
from .base import Dataset
from .files import cache_folder, cached_images, data_folders, find, require_ram

PARTS = ("train", "test")
NEEDED = "LEAF's data/train/*.json and data/test/*.json"
H5_FILES = ("fed_emnist_train.h5", "fed_emnist_test.h5")

FEMNIST_CLASSES = 62
FEMNIST_SIDE = 28
CELEBA_SIDE = 84

#: Characters that the model sees, and LEAF's alphabet in the order of the codes.
WINDOW = 80
LEAF_ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


class UserData(BaseModel):
    """The examples of a user in a file of LEAF."""

    x: list[Any]
    y: list[int | float | str]


class LeafFile(BaseModel):
    """What a file of LEAF must hold."""

    user_data: dict[str, UserData]
    users: list[str]


class Share(NamedTuple):
    """One user's examples in one file; x and y have the same length, at least 1."""

    path: Path
    user: str
    x: list[Any] | Array
    y: list[Any] | Array

    def error(self, problem: str) -> DeltaflError:
        """A mistake in the user's examples."""
        return DeltaflError(f"{self.path}: user {self.user!r}: {problem}")


def find_leaf(name: str, needed: str, data_dir: Path | None) -> Path:
    """The folder with ``train`` and ``test`` of a data set of LEAF."""

    def look(folder: Path) -> Path | None:
        roots = (folder / "data", folder, folder / "data" / name / "data")
        return next(
            (root for root in roots if all(any((root / part).glob("*.json")) for part in PARTS)),
            None,
        )

    return find(name, data_dir, needed, look)


def read_shares(root: Path, part: str) -> Iterator[Share]:
    """The users of all files of a part, file after file; one file is in memory at a time."""
    for path in sorted((root / part).glob("*.json")):
        content = checked(
            LeafFile,
            read_json(path, users=True),
            f"{path} is not a file of LEAF",
            "run its preprocess.sh again",
        )
        for user in dict.fromkeys(content.users):
            data = content.user_data.get(user)
            if data is None or len(data.x) != len(data.y):
                raise DeltaflError(
                    f"{path}: user {user!r} needs lists x and y of the same length in user_data"
                )
            if data.y:
                yield Share(path, user, data.x, data.y)


def _labels(share: Share, classes: int) -> IntArray:
    """The user's y as class labels; LEAF's CelebA has numbers such as 1.0."""
    label = np.asarray(share.y)
    is_number = label.dtype.kind in "iuf" and label.ndim == 1
    if not (is_number and ((label == np.floor(label)) & (label >= 0) & (label < classes)).all()):
        raise share.error(f"every y must be a whole number from 0 to {classes - 1}")
    return label.astype(np.int64)


def _dataset(
    title: str,
    column: str,
    parts: Iterable[Iterable[Share]],
    inputs_of: Callable[[Share], Array],
    classes: int,
) -> Dataset:
    """A data set of the shares of its two parts; owners are numbered in the order of their names,
    over both parts.

    Users of the test part who hold no training examples are no clients; their examples are in the
    pooled test set only.
    """
    arrays = []
    owners = []
    for part, shares in zip(PARTS, parts, strict=True):
        found = [(inputs_of(share), _labels(share, classes), share.user) for share in shares]
        if not found:
            raise DeltaflError(f"{title}: there is no {part} example")
        x, y, users = zip(*found, strict=True)
        arrays.append((np.concatenate(x), np.concatenate(y)))
        owners.append(np.repeat(users, [len(label) for label in y]))
    number = np.unique(np.concatenate(owners), return_inverse=True)[1].astype(np.int64)
    owner, test_owner = np.split(number, [len(owners[0])])
    title = f"{title}, {len(np.unique(owner))} clients"
    (train_x, train_y), (test_x, test_y) = arrays
    columns = {column: owner}
    test_columns = {column: test_owner}
    return Dataset(title, train_x, train_y, test_x, test_y, classes, columns, test_columns)


def load_femnist(data_dir: Path | None = None) -> Dataset:
    """FEMNIST, 62 classes (0-9, A-Z, a-z), dark ink on white paper; the column of owners is
    ``writer``.
    """
    folders = data_folders("femnist", data_dir)
    h5_folder = next(
        (folder for folder in folders if all((folder / file).is_file() for file in H5_FILES)), None
    )
    if h5_folder is not None:
        title = "FEMNIST (TensorFlow Federated's h5)"
        parts = [_read_h5(h5_folder / file) for file in H5_FILES]
    else:
        root = find_leaf("femnist", f"{NEEDED}, or {' with '.join(H5_FILES)}", data_dir)
        title = "FEMNIST (LEAF's JSON)"
        parts = [read_shares(root, part) for part in PARTS]
    return _dataset(title, "writer", parts, _handwriting, FEMNIST_CLASSES)


def _read_h5(path: Path) -> Iterator[Share]:
    require("h5py", "data")
    h5py = importlib.import_module("h5py")
    try:
        with h5py.File(path, "r") as file:
            for writer, group in file["examples"].items():
                require_ram(group["pixels"].nbytes + group["label"].nbytes)
                image = group["pixels"][()]
                label = group["label"][()]
                yield Share(path, writer, image.reshape(len(label), -1), label)
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise DeltaflError(
            f"{path} is not TensorFlow Federated's FEMNIST in HDF5: {error}"
        ) from error


def _handwriting(share: Share) -> npt.NDArray[np.uint8]:
    """The images, uint8 (n, 1, 28, 28); levels are whole 255ths in all published files."""
    try:
        level_nd = np.asarray(share.x, dtype=np.float64)
        good = level_nd.shape[1:] == (FEMNIST_SIDE**2,) and bool(
            ((level_nd >= 0) & (level_nd <= 1)).all()
        )
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # the last for whole numbers of hundreds of digits
        good = False
    if not good:
        raise share.error(f"every x must be {FEMNIST_SIDE**2} numbers from 0 (ink) to 1 (paper)")
    return np.rint(level_nd * 255).astype(np.uint8).reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE)


def load_celeba(data_dir: Path | None = None) -> Dataset:
    """CelebA (Liu et al., ICCV 2015): smiling or not, in colour; the column of owners is
    ``celebrity``.

    As in LEAF, each picture is reduced to 84 x 84; that takes minutes for all of CelebA, so the
    result is kept in the user's cache.
    """
    root = find_leaf(
        "celeba", f"{NEEDED}, with the pictures in data/raw/img_align_celeba/", data_dir
    )
    require("PIL", "sim")
    folder = root / "raw" / "img_align_celeba"
    shares = (read_shares(root, part) for part in PARTS)
    data = _dataset(
        "CelebA (LEAF's JSON)", "celebrity", shares, lambda share: _names(share, folder), 2
    )
    train_x = _faces(folder, "train", data.train_x)
    test_x = _faces(folder, "test", data.test_x)
    return replace(data, train_x=train_x, test_x=test_x)


def _names(share: Share, folder: Path) -> Array:
    for name in share.x:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise share.error(f"x is {name!r}, which is not the name of a picture in {folder}")
    return np.array(share.x)


def _faces(folder: Path, part: str, name_e: Array) -> npt.NDArray[np.uint8]:
    shape = (len(name_e), 3, CELEBA_SIDE, CELEBA_SIDE)
    digest = hashlib.sha256()
    for name in name_e:
        found = (folder / name).stat()
        digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())

    def decode() -> npt.NDArray[np.uint8]:
        from PIL import Image

        image = np.empty(shape, np.uint8)
        for number, name in enumerate(name_e):
            try:
                # For other formats Pillow runs Ghostscript.
                with Image.open(folder / name, formats=["JPEG", "PNG"]) as opened:
                    face = opened.resize((CELEBA_SIDE, CELEBA_SIDE)).convert("RGB")
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise DeltaflError(
                    f"the picture {folder / name} cannot be decoded: {error}"
                ) from error
            image[number] = np.asarray(face).transpose(2, 0, 1)
        return image

    return cached_images(
        cache_folder() / "celeba" / f"{part}_{digest.hexdigest()[:16]}.npy", shape, decode
    )


def load_shakespeare(data_dir: Path | None = None) -> Dataset:
    """Shakespeare from LEAF's folder, tokens uint8 (N, 80) and the next one; the column of owners
    is ``role``.

    LEAF's windows start 1 character apart, and lines are padded with spaces in front.
    """
    root = find_leaf("shakespeare", NEEDED, data_dir)
    shares = (map(_encoded, read_shares(root, part)) for part in PARTS)
    return _dataset(
        "Shakespeare (LEAF's JSON)",
        "role",
        shares,
        lambda share: np.asarray(share.x),
        len(LEAF_ALPHABET),
    )


def _encoded(share: Share) -> Share:
    """The user's windows (n, 80) and following characters as tokens."""
    for texts, length, name in ((share.x, WINDOW, "x"), (share.y, 1, "y")):
        if not all(isinstance(text, str) and len(text) == length for text in texts):
            raise share.error(f"every {name} must be a string of length {length}")
    # surrogatepass: JSON may hold half of a pair, which is in no alphabet either
    window, following = (
        encode_text(
            np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32),
            LEAF_ALPHABET,
        )
        for texts in (share.x, share.y)
    )
    return share._replace(x=window.reshape(-1, WINDOW), y=following)


def encode_text(code_k: Array, alphabet: str) -> npt.NDArray[np.uint8]:
    """Positions in the alphabet of characters given by their codes; a space for those that are
    not in it.
    """
    table = np.full(256, alphabet.index(" "), np.uint8)
    table[[ord(letter) for letter in alphabet]] = np.arange(len(alphabet))
    encoded: npt.NDArray[np.uint8] = table[np.where(code_k < 256, code_k, ord(" "))]
    return encoded
