"""CIFAR-10 as its authors publish it, 50,000 + 10,000 images of 32 x 32 in colour, in the forms that people have.

In a folder that is searched (see ``sources.folders_of``) the first of these is read:

- ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``: pickles. They are read without running what a pickle can ask
  for: only lists, dicts, strings and plain arrays of bytes come out of them.
- ``cifar-10-batches-bin/`` or ``cifar-10-binary.tar.gz``: 3,073 bytes an image, the label first.
- ``cifar10.npz``: ``x_train``, ``y_train``, ``x_test``, ``y_test``, images (N, 32, 32, 3) or (N, 3, 32, 32), uint8.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

import hashlib
import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import IntArray
from .base import Dataset
from .images import read_arrays
from .sources import folders_of, not_found

Bytes = npt.NDArray[np.uint8]

#: The files of the Python form, and their published MD5; the last one is the test set.
PYTHON_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

NPZ_FILE = "cifar10.npz"
IMAGE_BYTES = 3 * 32 * 32


class Batch(NamedTuple):
    """Images uint8 (N, 3, 32, 32) and labels int64 (N,) of one file."""

    image: Bytes
    label: IntArray


def load_cifar10(data_dir: Path | None = None) -> Dataset:
    """Load CIFAR-10 from the first form that is found.

    Args:
        data_dir: A folder to look in first; see ``sources.folders_of`` for the others.

    Returns:
        The data set. Its name says so if the content was not, or could not be, compared with the published files.

    Raises:
        DeltaflError: If none of the forms is found, or one is broken.
    """
    folders = folders_of("cifar10", data_dir)
    for folder in folders:
        for suffix, archive, read in (
            ("py", "cifar-10-python.tar.gz", _read_pickles),
            ("bin", "cifar-10-binary.tar.gz", _read_binary),
        ):
            place = folder / f"cifar-10-batches-{suffix}"
            if place.is_dir():
                return read(place, lambda name, place=place: _read_file(place / name))  # type: ignore[misc]
            if (folder / archive).is_file():
                return read(folder / archive, _members(folder / archive).__getitem__)
        if (folder / NPZ_FILE).is_file():
            return _read_npz(folder / NPZ_FILE)
    raise not_found("cifar10", folders)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DeltaflError(f"cannot read {path}: {error.strerror}") from error


class _Members(dict[str, bytes]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __missing__(self, name: str) -> bytes:
        raise DeltaflError(f"{self.path} holds no file {name}")


def _members(path: Path) -> Mapping[str, bytes]:
    """The files of a tar archive by their last name; nothing is written."""
    found = _Members(path)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    found[Path(member.name).name] = content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DeltaflError(f"{path} is not a whole tar archive: {error}") from error
    return found


def _read_pickles(place: Path, read: Callable[[str], bytes]) -> Dataset:
    content = {name: read(name) for name in PYTHON_MD5}
    published = all(
        hashlib.md5(data, usedforsecurity=False).hexdigest() == PYTHON_MD5[name] for name, data in content.items()
    )
    title = "CIFAR-10" if published else f"CIFAR-10 (other content than published: {place})"
    batches = [_unpickled(f"{place.name}/{name}", data) for name, data in content.items()]
    return _joined(title, batches[:-1], batches[-1])


def _read_binary(place: Path, read: Callable[[str], bytes]) -> Dataset:
    batches = []
    for name in PYTHON_MD5:
        content = np.frombuffer(read(f"{name}.bin"), np.uint8)
        if len(content) == 0 or len(content) % (IMAGE_BYTES + 1):
            raise DeltaflError(f"{place}: {name}.bin has {len(content)} bytes; needs {IMAGE_BYTES + 1} an image")
        row = content.reshape(-1, IMAGE_BYTES + 1)
        batches.append(_batch(f"{place.name}/{name}.bin", row[:, 1:], row[:, 0]))
    return _joined(f"CIFAR-10 (from {place.name}, not compared with what is published)", batches[:-1], batches[-1])


def _read_npz(path: Path) -> Dataset:
    arrays = read_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    parts = []
    for part in ("train", "test"):
        image = arrays[f"x_{part}"]
        if image.dtype != np.uint8 or image.shape[1:] not in {(32, 32, 3), (3, 32, 32)}:
            raise DeltaflError(f"{path}: x_{part} is {image.dtype} {image.shape}, needs uint8 (N, 32, 32, 3)")
        if image.shape[3] == 3:
            image = image.transpose(0, 3, 1, 2)
        parts.append(_batch(f"{path}: {part}", image.reshape(len(image), -1), arrays[f"y_{part}"].reshape(-1)))
    return _joined(f"CIFAR-10 (from {path.name}, not compared with what is published)", parts[:1], parts[1])


def _joined(title: str, train: list[Batch], test: Batch) -> Dataset:
    image = np.concatenate([batch.image for batch in train])
    label = np.concatenate([batch.label for batch in train])
    return Dataset(title, image, label, test.image, test.label, num_classes=10)


def _batch(where: str, row: npt.NDArray[Any], label: npt.NDArray[Any]) -> Batch:
    """Rows of red, green, blue planes with their labels, checked."""
    if row.dtype != np.uint8 or row.shape != (len(label), IMAGE_BYTES):
        raise DeltaflError(f"{where}: images are {row.dtype} {row.shape}, needs uint8 ({len(label)}, {IMAGE_BYTES})")
    if len(label) == 0 or label.dtype.kind not in "iu" or label.min() < 0 or label.max() > 9:
        raise DeltaflError(f"{where}: labels must be whole numbers from 0 to 9, at least one")
    return Batch(np.ascontiguousarray(row).reshape(-1, 3, 32, 32), label.astype(np.int64))


class _PlainArray:
    """Stands for a NumPy array in a pickle: keeps what the pickle says of it, and does nothing."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _PlainType:
    """Stands for a NumPy data type in a pickle."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


_STAND_INS = {"_reconstruct": _PlainArray, "ndarray": _PlainArray, "dtype": _PlainType}


class _PlainUnpickler(pickle.Unpickler):
    """Makes nothing but lists, dicts, strings, numbers and the two classes above: no pickle can run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a class of NumPy."""
        if module.partition(".")[0] == "numpy" and name in _STAND_INS:
            return _STAND_INS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which these files have no need of")


def _unpickled(where: str, content: bytes) -> Batch:
    """One file of the Python form: a dict with ``data``, uint8 (N, 3072), and ``labels``, a list."""
    try:
        found = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, label = found[b"data"].state, found[b"labels"]
        _, shape, kind, by_columns, data = pixels
        if kind.code not in {b"u1", "u1"} or by_columns:
            raise TypeError("data is not an array of bytes by rows")
        row = np.frombuffer(data, np.uint8).reshape(shape)
        return _batch(where, row, np.asarray(label))
    except DeltaflError:
        raise
    except Exception as error:  # whatever a broken pickle raises: it is a program of its own
        raise DeltaflError(f"{where} is not a file of CIFAR-10: {' '.join(str(error).split())}") from error
