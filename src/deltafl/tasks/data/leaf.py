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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from ...errors import DeltaflError, counted, explained, require
from ...store import checked, read_json
from ...store.files import opened
from ...store.room import require_ram
from ...types import Array, IntArray
from ..dataset import Dataset
from .files import Bytes, cache_folder, cached_images, data_folders, find

PARTS = ("train", "test")
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


def find_leaf(name: str, data_dir: Path | None, beside: str = "") -> Path:
    """The folder with ``train`` and ``test`` of a data set of LEAF."""

    def look(folder: Path) -> Path | None:
        for root in (folder / "data", folder, folder / "data" / name / "data"):
            if all(any((root / part).glob("*.json")) for part in PARTS):
                return root
        return None

    needed = f"LEAF's data/train/*.json and data/test/*.json{beside}"
    return find(name, data_dir, needed, look)


def read_shares(root: Path, part: str) -> Iterator[Share]:
    """The users of all files of a part, file after file; one file is in memory at a time."""
    # Sorted: folders list their files in any order, and minibatches go by numbers of rows.
    for path in sorted((root / part).glob("*.json")):
        content = checked(
            LeafFile,
            read_json(path, users=True),
            f"{path} is not a file of LEAF",
            "run its preprocess.sh again",
        )
        # LEAF's scripts write some users twice.
        for user in dict.fromkeys(content.users):
            data = content.user_data.get(user)
            if data is None or len(data.x) != len(data.y):
                raise DeltaflError(
                    f"{path}: user {user!r} needs lists x and y of the same length in user_data"
                )
            if data.y:
                yield Share(path, user, data.x, data.y)


def _both_parts(root: Path) -> dict[str, Iterator[Share]]:
    return {part: read_shares(root, part) for part in PARTS}


def _dataset(
    shares: Mapping[str, Iterator[Share]],
    title: str,
    column: str,
    num_classes: int,
    arrays_of: Callable[[Share], tuple[Array, Array]],
) -> Dataset:
    """A data set of a training and a test part.

    Owners are numbered in the order of their names, over both parts.

    Users of the test part who hold no training examples are no clients; their examples are in the
    pooled test set only.
    """
    arrays = []
    owners = []
    for part, found in shares.items():
        x = []
        y = []
        users = []
        for share in found:
            share_x, share_y = arrays_of(share)
            x.append(share_x)
            y.append(share_y)
            users += [share.user] * len(share_y)
        if not users:
            raise DeltaflError(f"{title}: there is no {part} example")
        arrays.append((np.concatenate(x), np.concatenate(y).astype(np.int64)))
        owners.append(users)
    number = np.unique(np.concatenate(owners), return_inverse=True)[1].astype(np.int64)
    owner_e, test_owner_e = np.split(number, [len(owners[0])])
    title = f"{title}, {counted(len(np.unique(owner_e)), 'client')}"
    return Dataset(
        title,
        *arrays[0],
        *arrays[1],
        num_classes=num_classes,
        columns={column: owner_e},
        test_columns={column: test_owner_e},
    )


def _labels(share: Share, num_classes: int) -> IntArray:
    """The user's y as class labels; LEAF's CelebA has numbers such as 1.0."""
    label_n = np.asarray(share.y)
    is_number = label_n.dtype.kind in "iuf"
    # By membership, which refuses fractions and NaN, too.
    if not (is_number and np.isin(label_n, np.arange(num_classes)).all()):
        raise share.error(f"every y must be a whole number from 0 to {num_classes - 1}")
    return label_n.astype(np.int64)


def load_femnist(data_dir: Path | None) -> Dataset:
    """FEMNIST, 62 classes (0-9, A-Z, a-z), dark ink on white paper; the column of owners is
    ``writer``.
    """
    for folder in data_folders("femnist", data_dir):
        files = [folder / file for file in H5_FILES]
        if all(map(Path.is_file, files)):
            shares = {part: _h5_shares(file) for part, file in zip(PARTS, files, strict=True)}
            title = "FEMNIST (TensorFlow Federated's h5)"
            return _dataset(shares, title, "writer", FEMNIST_CLASSES, _handwriting)
    root = find_leaf("femnist", data_dir, f", or {' with '.join(H5_FILES)}")
    title = "FEMNIST (LEAF's JSON)"
    return _dataset(_both_parts(root), title, "writer", FEMNIST_CLASSES, _handwriting)


def _h5_shares(path: Path) -> Iterator[Share]:
    require("h5py", "data")
    import h5py

    # A damaged file raises a dozen kinds.
    with (
        explained(f"{path} is not TensorFlow Federated's FEMNIST in HDF5"),
        opened(path, users=True) as content,
        h5py.File(content, "r") as file,
    ):
        for writer, group in file["examples"].items():
            # Before they are read: a small file can say that it unpacks to any size.
            require_ram(group["pixels"].nbytes + group["label"].nbytes)
            label = group["label"][()]
            yield Share(path, writer, group["pixels"][()].reshape(len(label), -1), label)


def _handwriting(share: Share) -> tuple[Bytes, IntArray]:
    """The images, uint8 (n, 1, 28, 28); levels are whole 255ths in all published files."""
    try:
        level_nd = np.asarray(share.x, np.float64)
    # The last one for whole numbers of hundreds of digits.
    except (TypeError, ValueError, OverflowError):
        level_nd = np.zeros(0)
    is_level = (level_nd >= 0) & (level_nd <= 1)
    if level_nd.shape[1:] != (FEMNIST_SIDE**2,) or not is_level.all():
        raise share.error(f"every x must be {FEMNIST_SIDE**2} numbers from 0 (ink) to 1 (paper)")
    pixel_nd = np.rint(level_nd * 255).astype(np.uint8)
    image_n = pixel_nd.reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE)
    return image_n, _labels(share, FEMNIST_CLASSES)


def load_celeba(data_dir: Path | None) -> Dataset:
    """CelebA (Liu et al., ICCV 2015): smiling or not, in colour; the column of owners is
    ``celebrity``.

    As in LEAF, each picture is reduced to 84 x 84; that takes minutes for all of CelebA, so the
    result is kept in the user's cache.
    """
    root = find_leaf(
        "celeba",
        data_dir,
        ", with the pictures in data/raw/img_align_celeba/",
    )
    require("PIL", "sim")
    folder = root / "raw" / "img_align_celeba"

    def names(share: Share) -> tuple[Array, IntArray]:
        for name in share.x:
            # A name with a folder in it could be of any file.
            is_name = isinstance(name, str) and Path(name).name == name
            if not is_name or not (folder / name).is_file():
                raise share.error(f"x is {name!r}, which is not the name of a picture in {folder}")
        return np.array(share.x), _labels(share, 2)

    named = _dataset(_both_parts(root), "CelebA (LEAF's JSON)", "celebrity", 2, names)
    train_x = _faces(folder, "train", named.train_x)
    return replace(named, train_x=train_x, test_x=_faces(folder, "test", named.test_x))


def _faces(folder: Path, part: str, name_e: Array) -> Bytes:
    shape = (len(name_e), 3, CELEBA_SIDE, CELEBA_SIDE)
    # By names, sizes and dates: reading all pictures would take as long as decoding them.
    digest = hashlib.sha256()
    for name in name_e:
        found = (folder / name).stat()
        digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())

    def decode() -> Bytes:
        image = np.empty(shape, np.uint8)
        for number, name in enumerate(name_e):
            image[number] = _face(folder / name)
        return image

    file = cache_folder() / "celeba" / f"{part}_{digest.hexdigest()[:16]}.npy"
    return cached_images(file, shape, decode)


def _face(path: Path) -> Bytes:
    """One picture (3, 84, 84)."""
    from PIL import Image

    with opened(path, users=True) as file:
        try:
            # For other formats Pillow runs Ghostscript.
            picture = Image.open(file, formats=["JPEG", "PNG"])
            face = picture.resize((CELEBA_SIDE, CELEBA_SIDE)).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DeltaflError(f"the picture {path} cannot be decoded: {error}") from error
    return np.asarray(face).transpose(2, 0, 1)


def load_shakespeare(data_dir: Path | None) -> Dataset:
    """Shakespeare from LEAF's folder, tokens uint8 (N, 80) and the next one; the column of owners
    is ``role``.

    LEAF's windows start 1 character apart, and lines are padded with spaces in front.
    """
    root = find_leaf("shakespeare", data_dir)
    title = "Shakespeare (LEAF's JSON)"
    return _dataset(_both_parts(root), title, "role", len(LEAF_ALPHABET), _tokens)


def _tokens(share: Share) -> tuple[Bytes, Bytes]:
    """The user's windows (n, 80) and the characters that follow."""
    tokens = []
    for texts, length, name in ((share.x, WINDOW, "x"), (share.y, 1, "y")):
        if not all(isinstance(text, str) and len(text) == length for text in texts):
            raise share.error(f"every {name} must be a string of length {length}")
        # surrogatepass: JSON may hold half of a pair, which is in no alphabet either
        code = "".join(texts).encode("utf-32-le", "surrogatepass")
        tokens.append(encode_text(np.frombuffer(code, np.uint32), LEAF_ALPHABET))
    return tokens[0].reshape(-1, WINDOW), tokens[1]


def encode_text(code_k: Array, alphabet: str) -> Bytes:
    """Positions in the alphabet of characters given by their codes; a space for those that are
    not in it.
    """
    # Larger codes are in none of the alphabets.
    table = np.full(256, alphabet.index(" "), np.uint8)
    table[[ord(letter) for letter in alphabet]] = np.arange(len(alphabet))
    encoded: Bytes = table[np.where(code_k < 256, code_k, ord(" "))]
    return encoded
