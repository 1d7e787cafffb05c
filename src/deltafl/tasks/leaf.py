"""LEAF's data sets: FEMNIST's and CelebA's images and Shakespeare's lines, by writer, celebrity and role.

LEAF's ``preprocess.sh`` leaves ``data/train/*.json`` and ``data/test/*.json``, each of them
``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. An x is a list of 784 numbers
from 0 (ink) to 1 (paper) in FEMNIST, the name of a picture in ``data/raw/img_align_celeba/`` in CelebA, and a string of
80 characters in Shakespeare, whose y is the next one. A folder fits if it is the one with ``train`` and ``test``, the
one above (LEAF's ``data/femnist``), or the whole repository.

FEMNIST is also read from TensorFlow Federated's ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, which hold
``/examples/WRITER/pixels`` (n, 28, 28) from 0 to 1 and ``/examples/WRITER/label`` (n,). For Hugging Face's
``flwrlabs/femnist`` use ``from_huggingface(..., label="character", column="writer_id", inputs="image")``.

Source: Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from ..errors import DeltaflError, require
from ..io import checked, read_json
from ..types import IntArray
from .base import Dataset
from .files import cache_folder, cached_images, data_folders, not_found

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
    y: list[Any]


class LeafFile(BaseModel):
    """What a file of LEAF must hold."""

    users: list[str]
    user_data: dict[str, UserData]


class Share(NamedTuple):
    """One user's examples in one file; x and y have the same length, at least 1."""

    path: Path
    user: str
    x: list[Any]
    y: list[Any]

    def error(self, row: int, problem: str) -> DeltaflError:
        """A mistake in one of the user's rows, which count from 1."""
        return DeltaflError(f"{self.path}: user {self.user!r}, row {row + 1}: {problem}")


class Owned(NamedTuple):
    """Examples with their owners: inputs, labels int64, owners' names, all of the same length."""

    x: npt.NDArray[Any]
    y: IntArray
    owner: list[str]


def find_leaf(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder with ``train`` and ``test`` of a data set of LEAF; None if there is none."""
    for folder in folders:
        for root in (folder / "data", folder, folder / "data" / name / "data"):
            if all(any((root / part).glob("*.json")) for part in PARTS):
                return root
    return None


def read_shares(root: Path, part: str) -> Iterator[Share]:
    """The users of all files of a part, file after file; one file is in memory at a time.

    Raises:
        DeltaflError: If a file is not as described above; the sentence names file and user.
    """
    for path in sorted((root / part).glob("*.json")):
        content = checked(LeafFile, read_json(path), f"{path} is not a file of LEAF", "run its preprocess.sh again")
        for user in dict.fromkeys(content.users):
            if user not in content.user_data:
                raise DeltaflError(f"{path}: user {user!r} has no lists x and y in user_data")
            data = content.user_data[user]
            if len(data.x) != len(data.y):
                raise DeltaflError(f"{path}: user {user!r} has {len(data.x)} x and {len(data.y)} y")
            if data.y:
                yield Share(path, user, data.x, data.y)


def labels_of(share: Share, classes: int) -> IntArray:
    """The user's y as class labels; numbers such as 1.0 are accepted, for LEAF's CelebA has them."""
    for row, label in enumerate(share.y):
        is_whole = isinstance(label, int | float) and label == label // 1
        if not is_whole or not 0 <= label < classes:
            raise share.error(row, f"y is {shown(label)}; it must be a whole number from 0 to {classes - 1}")
    return np.array(share.y, dtype=np.int64)


def dataset_by_user(title: str, column: str, train: Owned, test: Owned, classes: int) -> Dataset:
    """A data set from two parts; owners are numbered in the order of their names, over both parts.

    Users of the test part who hold no training examples are no clients; their examples are in the pooled test set only.

    Raises:
        DeltaflError: If a part is empty.
    """
    for part, owned in zip(PARTS, (train, test), strict=True):
        if len(owned.y) == 0:
            raise DeltaflError(f"{title}: there is no {part} example")
    number = {user: index for index, user in enumerate(sorted({*train.owner, *test.owner}))}
    owner, test_owner = (np.array([number[user] for user in part.owner]) for part in (train, test))
    return Dataset(
        f"{title}, {len(set(train.owner))} clients",
        train.x,
        train.y,
        test.x,
        test.y,
        classes,
        columns={column: owner},
        test_columns={column: test_owner},
    )


def load_femnist(data_dir: Path | None = None) -> Dataset:
    """FEMNIST, 62 classes (0-9, A-Z, a-z), dark ink on white paper; the column of owners is ``writer``.

    Raises:
        DeltaflError: If it is not found, or a file is broken; the sentence names file and writer or user, and row.
        MissingExtraError: For h5 files without h5py.
    """
    folders = data_folders("femnist", data_dir)
    root = find_leaf("femnist", folders)
    h5_folder = next((folder for folder in folders if all((folder / file).is_file() for file in H5_FILES)), None)
    if root is not None:
        title = "FEMNIST (LEAF's JSON)"
        train, test = (_owned(read_shares(root, part), _handwriting, FEMNIST_CLASSES) for part in PARTS)
    elif h5_folder is not None:
        title = "FEMNIST (TensorFlow Federated's h5)"
        train, test = (_read_h5(h5_folder / file) for file in H5_FILES)
    else:
        raise not_found("femnist", f"{NEEDED}, or {' with '.join(H5_FILES)}", folders)
    return dataset_by_user(title, "writer", train, test, FEMNIST_CLASSES)


def _read_h5(path: Path) -> Owned:
    require("h5py", "data")
    h5py = importlib.import_module("h5py")
    images, labels, owner = [np.zeros((0, 1, FEMNIST_SIDE, FEMNIST_SIDE), np.uint8)], [np.zeros(0, np.int64)], []
    try:
        with h5py.File(path, "r") as file:
            for writer, group in file["examples"].items():
                level, label = np.asarray(group["pixels"][()]), np.asarray(group["label"][()])
                shape = (len(label), FEMNIST_SIDE, FEMNIST_SIDE)
                if level.shape != shape or level.dtype.kind not in "fiu" or label.dtype.kind not in "iu":
                    raise DeltaflError(
                        f"{path}: writer {writer!r} has pixels {level.shape} ({level.dtype}) and labels {label.shape} "
                        f"({label.dtype}); needs numbers (n, {FEMNIST_SIDE}, {FEMNIST_SIDE}) and whole numbers (n,)"
                    )
                good_n = ((level >= 0) & (level <= 1)).all(axis=(1, 2)) & (label >= 0) & (label < FEMNIST_CLASSES)
                if not good_n.all():
                    row = int(np.argmin(good_n)) + 1
                    raise DeltaflError(f"{path}: writer {writer!r}, row {row}: needs pixels 0 to 1 and a label 0 to 61")
                images.append(grey_bytes(level.astype(np.float64)))
                labels.append(label.astype(np.int64))
                owner += [str(writer)] * len(label)
    except DeltaflError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeltaflError(f"{path} is not TensorFlow Federated's FEMNIST in HDF5: {error}") from error
    return Owned(np.concatenate(images), np.concatenate(labels), owner)


def grey_bytes(level_nd: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Numbers from 0 to 1, whole 255ths in all published files, as images uint8 (n, 1, 28, 28)."""
    image: npt.NDArray[np.uint8] = np.rint(level_nd * 255).astype(np.uint8)
    return image.reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE)


def _handwriting(share: Share) -> npt.NDArray[np.uint8]:
    size = FEMNIST_SIDE**2
    try:
        level_nd = np.array(share.x, dtype=np.float64)
        if level_nd.shape == (len(share.x), size) and ((level_nd >= 0) & (level_nd <= 1)).all():
            return grey_bytes(level_nd)
    except (TypeError, ValueError, OverflowError):  # the last for whole numbers of hundreds of digits
        pass
    bad = next(row for row, pixels in enumerate(share.x) if not _is_image(pixels, size))
    raise share.error(bad, f"x must be a list of {size} numbers from 0 (ink) to 1 (paper)")


def _is_image(pixels: object, size: int) -> bool:
    numbers = pixels if isinstance(pixels, list) else []
    return len(numbers) == size and all(isinstance(level, int | float) and 0 <= level <= 1 for level in numbers)


def _owned(shares: Iterator[Share], make_x: Callable[[Share], npt.NDArray[Any]], classes: int) -> Owned:
    parts = [(make_x(share), labels_of(share, classes), share.user) for share in shares]
    if not parts:
        return Owned(np.arange(0), np.arange(0), [])
    x, y, _ = zip(*parts, strict=True)
    return Owned(np.concatenate(x), np.concatenate(y), [user for _, label, user in parts for _ in label])


def load_celeba(data_dir: Path | None = None) -> Dataset:
    """CelebA from LEAF's folder: smiling or not, 84 x 84 in colour; the column of owners is ``celebrity``.

    As in LEAF, each picture is reduced to 84 x 84; that takes minutes for all of CelebA, so the result is kept in the
    user's cache.

    Raises:
        DeltaflError: If it is not found, or a file or picture is broken; the sentence names file, user and row.
        MissingExtraError: Without Pillow.

    Source: Liu et al., "Deep learning face attributes in the wild", ICCV 2015.
    """
    root = _root("celeba", f"{NEEDED}, with the pictures in data/raw/img_align_celeba/", data_dir)
    pictures = root / "raw" / "img_align_celeba"
    if not pictures.is_dir():
        raise DeltaflError(f"celeba needs the folder {pictures} with the pictures that the JSON files name")
    require("PIL", "sim")
    train, test = (_faces(root, part, pictures) for part in PARTS)
    return dataset_by_user("CelebA (LEAF's JSON)", "celebrity", train, test, classes=2)


def _root(name: str, needed: str, data_dir: Path | None) -> Path:
    folders = data_folders(name, data_dir)
    root = find_leaf(name, folders)
    if root is None:
        raise not_found(name, needed, folders)
    return root


def _faces(root: Path, part: str, pictures: Path) -> Owned:
    shares = list(read_shares(root, part))
    label = [labels_of(share, 2) for share in shares]
    rows = [(share, row) for share in shares for row in range(len(share.x))]
    shape = (len(rows), 3, CELEBA_SIDE, CELEBA_SIDE)
    digest = hashlib.sha256()
    for share, row in rows:
        found = _picture(share, row, pictures).stat()
        digest.update(f"{share.x[row]} {found.st_size} {found.st_mtime_ns}\n".encode())

    def decode() -> npt.NDArray[np.uint8]:
        image = np.empty(shape, np.uint8)
        for number, (share, row) in enumerate(rows):
            image[number] = _decoded(share, row, pictures)
        return image

    image = cached_images(cache_folder() / "celeba" / f"{part}_{digest.hexdigest()[:16]}.npy", shape, decode)
    return Owned(image, np.concatenate([np.zeros(0, np.int64), *label]), [share.user for share, _ in rows])


def _picture(share: Share, row: int, pictures: Path) -> Path:
    """The picture that a row names; a name with folders in it is an error."""
    name = share.x[row]
    if not isinstance(name, str) or Path(name).name != name:
        raise share.error(row, f"x is {name!r}; it must be the name of a picture")
    if not (pictures / name).is_file():
        raise share.error(row, f"there is no picture {pictures / name}")
    return pictures / name


def _decoded(share: Share, row: int, pictures: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        # For other formats Pillow runs Ghostscript.
        with Image.open(_picture(share, row, pictures), formats=["JPEG", "PNG"]) as opened:
            image = opened.resize((CELEBA_SIDE, CELEBA_SIDE)).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DeltaflError):
            raise
        raise share.error(row, f"the picture {share.x[row]} cannot be decoded: {error}") from error
    return np.asarray(image).transpose(2, 0, 1)


def load_shakespeare(data_dir: Path | None = None) -> Dataset:
    """Shakespeare from LEAF's folder, tokens uint8 (N, 80) and the next one; the column of owners is ``role``.

    LEAF's windows start 1 character apart, and lines are padded with spaces in front.

    Raises:
        DeltaflError: If it is not found, or a file is broken; the sentence names file, user and row.
    """
    root = _root("shakespeare", NEEDED, data_dir)
    train, test = (_lines(read_shares(root, part)) for part in PARTS)
    return dataset_by_user("Shakespeare (LEAF's JSON)", "role", train, test, len(LEAF_ALPHABET))


def _lines(shares: Iterator[Share]) -> Owned:
    x, y, owner = [np.zeros((0, WINDOW), np.uint8)], [np.zeros(0, np.uint8)], []
    for share in shares:
        for row, (window, following) in enumerate(zip(share.x, share.y, strict=True)):
            if not isinstance(window, str) or len(window) != WINDOW:
                raise share.error(row, f"x must be a string of {WINDOW} characters")
            if not isinstance(following, str) or len(following) != 1:
                raise share.error(row, "y must be one character")
        x.append(encode_text(_codes("".join(share.x)), LEAF_ALPHABET).reshape(-1, WINDOW))
        y.append(encode_text(_codes("".join(share.y)), LEAF_ALPHABET))
        owner += [share.user] * len(share.y)
    return Owned(np.concatenate(x), np.concatenate(y).astype(np.int64), owner)


def encode_text(code_k: npt.NDArray[Any], alphabet: str) -> npt.NDArray[np.uint8]:
    """Positions in the alphabet of characters given by their codes; a space for those that are not in it."""
    table = np.full(256, alphabet.index(" "), np.uint8)
    table[[ord(letter) for letter in alphabet]] = np.arange(len(alphabet))
    encoded: npt.NDArray[np.uint8] = table[np.where(code_k < 256, code_k, ord(" "))]
    return encoded


def _codes(text: str) -> npt.NDArray[np.uint32]:
    # surrogatepass: JSON may hold half of a pair, which is in no alphabet either
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
