"""FEMNIST, handwriting of 62 classes by writer, 28 x 28, dark ink on white paper, in the forms that people have.

In a folder that is searched (see ``sources.folders_of``) the first of these is read:

- LEAF's ``data/train/*.json`` and ``data/test/*.json``, see ``leaf.py``;
- ``fed_emnist_train.h5`` and ``fed_emnist_test.h5`` of TensorFlow Federated: ``/examples/WRITER/pixels`` (n, 28, 28)
  from 0 to 1 and ``/examples/WRITER/label`` (n,); needs h5py;
- ``*.parquet``, also in ``data/``, with the columns ``image`` (``{"bytes", "path"}``, PNG), ``writer_id`` and
  ``character`` (0 to 61), as the data set ``flwrlabs/femnist`` of Hugging Face has them; needs pyarrow. It has no test
  set: that is cut from each writer's own examples, see ``images.split_owners``.

Classes are 0-9, A-Z, a-z in all of them. Pixels that are 256 levels of grey are kept as bytes, others as float32.

Source: Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
"""

import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require
from ..types import IntArray
from .base import Dataset
from .images import cut_by_owner
from .leaf import PARTS, Owned, Share, dataset_by_user, find_leaf, labels_of, read_shares
from .sources import folders_of, not_found

CLASSES = 62
SIDE = 28
H5_FILES = {"train": "fed_emnist_train.h5", "test": "fed_emnist_test.h5"}


class Writing(NamedTuple):
    """What one writer wrote: images (n, 1, 28, 28) and labels int64 (n,)."""

    writer: str
    image: npt.NDArray[Any]
    label: IntArray


def load_femnist(data_dir: Path | None = None) -> Dataset:
    """Load FEMNIST from the first form that is found; the column of owners is ``writer``.

    Raises:
        DeltaflError: If there is none, or a file is broken; the sentence names file and writer or row.
        MissingExtraError: If a package is missing that the form needs.
    """
    folders = folders_of("femnist", data_dir)
    root = find_leaf("femnist", folders)
    if root is not None:
        train, test = (_gathered([_of_leaf(share) for share in read_shares(root, part)]) for part in PARTS)
        return dataset_by_user("FEMNIST (LEAF's JSON)", "writer", *_alike(train, test), CLASSES)
    for folder in folders:
        if all((folder / file).is_file() for file in H5_FILES.values()):
            train, test = (_gathered(list(_of_h5(folder / file))) for file in H5_FILES.values())
            return dataset_by_user("FEMNIST (TensorFlow Federated's h5)", "writer", *_alike(train, test), CLASSES)
        files = sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))
        if files:
            return _of_parquet(files)
    raise not_found("femnist", folders)


def _grey(level_nd: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers from 0 to 1 as images (n, 1, 28, 28): bytes if they are 256 levels of grey, else float32."""
    byte_nd = np.rint(level_nd * 255)
    exact = np.abs(byte_nd - level_nd * 255).max(initial=0.0) < 1e-3
    image = byte_nd.astype(np.uint8) if exact else level_nd.astype(np.float32)
    return image.reshape(-1, 1, SIDE, SIDE)


def _is_level(pixel: object) -> bool:
    return isinstance(pixel, int | float) and 0 <= pixel <= 1


def _in_range(level_nd: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows hold numbers from 0 to 1 only; NaN is not one."""
    row_nk = level_nd.reshape(len(level_nd), -1)
    return np.asarray(((row_nk >= 0) & (row_nk <= 1)).all(axis=1))


def _of_leaf(share: Share) -> Writing:
    for row, pixels in enumerate(share.x):
        if not isinstance(pixels, list) or len(pixels) != SIDE * SIDE:
            raise share.error(row, f"x must be a list of {SIDE * SIDE} numbers from 0 to 1")
    try:
        level_nd = np.array(share.x, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # the last for whole numbers of hundreds of digits
        bad = next(row for row, pixels in enumerate(share.x) if not all(map(_is_level, pixels)))
        raise share.error(bad, "x must hold numbers only, from 0 (ink) to 1 (paper)") from None
    good_n = _in_range(level_nd)
    if not good_n.all():
        raise share.error(int(np.argmin(good_n)), "x must hold numbers from 0 (ink) to 1 (paper)")
    return Writing(share.user, _grey(level_nd), labels_of(share, CLASSES))


def _of_h5(path: Path) -> Iterator[Writing]:
    require("h5py", "data")
    h5py = importlib.import_module("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DeltaflError(f"{path} is not a whole HDF5 file: {error}") from error
    with file:
        examples = file.get("examples")
        if not isinstance(examples, h5py.Group):
            raise DeltaflError(f"{path} has no group 'examples': it is not TensorFlow Federated's FEMNIST")
        for writer in examples:
            yield _writing(h5py, f"{path}: writer {writer!r}", str(writer), examples.get(writer))


def _writing(h5py: ModuleType, where: str, writer: str, group: Any) -> Writing:
    """What the group of one writer holds."""
    found: list[Any] = [group.get(name) if isinstance(group, h5py.Group) else None for name in ("pixels", "label")]
    if not all(isinstance(part, h5py.Dataset) for part in found):
        raise DeltaflError(f"{where} lacks the arrays pixels and label")
    try:
        level, label = (np.asarray(part[()]) for part in found)
    except (OSError, TypeError, ValueError) as error:
        raise DeltaflError(f"{where}: pixels or label cannot be read: {error}") from error
    kinds = level.dtype.kind in "fiu" and label.dtype.kind in "iu"
    if label.ndim != 1 or level.shape != (len(label), SIDE, SIDE) or not kinds:
        raise DeltaflError(
            f"{where} has pixels {level.shape} ({level.dtype}) and labels {label.shape} ({label.dtype}); "
            f"needs numbers (n, {SIDE}, {SIDE}) and whole numbers (n,)"
        )
    good_n = _in_range(level) & (label >= 0) & (label < CLASSES)
    if not good_n.all():
        raise DeltaflError(f"{where}, row {int(np.argmin(good_n)) + 1}: needs pixels 0 to 1 and a label 0 to 61")
    return Writing(writer, _grey(level.astype(np.float64)), label.astype(np.int64))


def _gathered(writings: Sequence[Writing]) -> Owned:
    """All writings end to end; bytes become float32 where others are float32 already."""
    if not writings:
        return Owned(np.zeros((0, 1, SIDE, SIDE), np.uint8), np.zeros(0, np.int64), [])
    whole = all(one.image.dtype == np.uint8 for one in writings)
    images = [one.image if whole else _as_float(one.image) for one in writings]
    owner = [one.writer for one in writings for _ in range(len(one.label))]
    return Owned(np.concatenate(images), np.concatenate([one.label for one in writings]), owner)


def _as_float(image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (image / np.float32(255)).astype(np.float32) if image.dtype == np.uint8 else image


def _alike(train: Owned, test: Owned) -> tuple[Owned, Owned]:
    """Both parts in one type."""
    if train.x.dtype == test.x.dtype:
        return train, test
    return train._replace(x=_as_float(train.x)), test._replace(x=_as_float(test.x))


def _of_parquet(files: Sequence[Path]) -> Dataset:
    require("pyarrow", "data")
    require("PIL", "sim")
    images, labels, writers = [], [], []
    for path in files:
        first = 0
        for columns in _row_groups(path):
            for row, (image, label) in enumerate(zip(columns["image"], columns["character"], strict=True), first + 1):
                where = f"{path}: row {row}"
                if not isinstance(label, int) or not 0 <= label < CLASSES:
                    raise DeltaflError(f"{where}: character is {label!r}; it must be a whole number from 0 to 61")
                images.append(_png(where, image))
                labels.append(label)
            writers += columns["writer_id"]
            first += len(columns["image"])
    if not labels:
        raise DeltaflError(f"{files[0]} and the Parquet files beside it hold no rows")
    if None in writers:
        raise DeltaflError(
            f"{files[0].parent}: example {writers.index(None) + 1} of the Parquet files has no writer_id"
        )
    names, owner = np.unique(np.array(writers, dtype=np.str_), return_inverse=True)
    image, label_e = np.stack(images)[:, np.newaxis], np.array(labels, dtype=np.int64)
    title = f"FEMNIST (Parquet), {len(names)} clients"
    whole = Dataset(title, image, label_e, image[:0], label_e[:0], num_classes=CLASSES)
    return cut_by_owner(whole, "writer", owner.astype(np.int64))


def _row_groups(path: Path) -> Iterator[dict[str, list[Any]]]:
    """The three columns of a Parquet file, some thousand rows at a time."""
    parquet = importlib.import_module("pyarrow.parquet")
    names = ["image", "writer_id", "character"]
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DeltaflError(f"{path} has no column {missing[0]!r}; needs image, writer_id and character")
            for batch in file.iter_batches(columns=names):
                yield batch.to_pydict()
    except (ValueError, OSError) as error:
        if isinstance(error, DeltaflError):
            raise
        raise DeltaflError(f"{path} is not a whole Parquet file: {error}") from error


def _png(where: str, image: Any) -> npt.NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    content = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(content, bytes):
        raise DeltaflError(f"{where}: image must hold the bytes of a picture")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as opened:  # for another format Pillow runs Ghostscript
            if opened.size != (SIDE, SIDE):  # before a large one is decoded
                raise DeltaflError(
                    f"{where}: image has {opened.size[0]} x {opened.size[1]} pixels, needs {SIDE} x {SIDE}"
                )
            return np.asarray(opened.convert("L"))
    except DeltaflError:
        raise
    except UnidentifiedImageError:
        raise DeltaflError(f"{where}: image cannot be decoded: it is not a PNG") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DeltaflError(f"{where}: image cannot be decoded: {error}") from error
