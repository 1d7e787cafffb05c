"""FEMNIST, handwriting of 62 classes by writer, 28 x 28, dark ink on white paper, in the forms that people have.

In a folder that is searched (see ``files.py``) the first of these is read:

- LEAF's ``data/train/*.json`` and ``data/test/*.json``, see ``leaf.py``;
- ``fed_emnist_train.h5`` and ``fed_emnist_test.h5`` of TensorFlow Federated: ``/examples/WRITER/pixels`` (n, 28, 28)
  from 0 to 1 and ``/examples/WRITER/label`` (n,); needs h5py;
- ``*.parquet``, also in ``data/``, with the columns ``image`` (``{"bytes", "path"}``, PNG), ``writer_id`` and
  ``character`` (0 to 61), as the data set ``flwrlabs/femnist`` of Hugging Face has them; needs pyarrow. It has no test
  set, which is cut from each writer's own examples, see ``partitions.hold_out_by_owner``.

Classes are 0-9, A-Z, a-z in all of them.

Source: Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
"""

import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require
from .base import Dataset
from .files import data_folders, not_found
from .leaf import FEMNIST_CLASSES as CLASSES
from .leaf import FEMNIST_SIDE as SIDE
from .leaf import NEEDED, Owned, dataset_by_user, find_leaf, grey_bytes, read_femnist
from .partitions import hold_out_by_owner

H5_FILES = ("fed_emnist_train.h5", "fed_emnist_test.h5")


def load_femnist(data_dir: Path | None = None) -> Dataset:
    """Load FEMNIST from the first form that is found; the column of owners is ``writer``.

    Raises:
        DeltaflError: If there is none, or a file is broken; the sentence names file and writer or row.
        MissingExtraError: If a package is missing that the form needs.
    """
    folders = data_folders("femnist", data_dir)
    root = find_leaf("femnist", folders)
    if root is not None:
        return read_femnist(root)
    for folder in folders:
        if all((folder / file).is_file() for file in H5_FILES):
            train, test = (_read_h5(folder / file) for file in H5_FILES)
            return dataset_by_user("FEMNIST (TensorFlow Federated's h5)", "writer", train, test, CLASSES)
        files = sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))
        if files:
            return _read_parquet(files)
    needed = f"{NEEDED}, {' with '.join(H5_FILES)}, or *.parquet with the columns image, writer_id and character"
    raise not_found("femnist", needed, folders)


def _read_h5(path: Path) -> Owned:
    require("h5py", "data")
    h5py = importlib.import_module("h5py")
    images, labels, owner = [np.zeros((0, 1, SIDE, SIDE), np.uint8)], [np.zeros(0, np.int64)], []
    try:
        with h5py.File(path, "r") as file:
            for writer, group in file["examples"].items():
                level, label = np.asarray(group["pixels"][()]), np.asarray(group["label"][()])
                shape = (len(label), SIDE, SIDE)
                if level.shape != shape or level.dtype.kind not in "fiu" or label.dtype.kind not in "iu":
                    raise DeltaflError(
                        f"{path}: writer {writer!r} has pixels {level.shape} ({level.dtype}) and labels {label.shape} "
                        f"({label.dtype}); needs numbers (n, {SIDE}, {SIDE}) and whole numbers (n,)"
                    )
                good_n = ((level >= 0) & (level <= 1)).all(axis=(1, 2)) & (label >= 0) & (label < CLASSES)
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


def _read_parquet(files: Sequence[Path]) -> Dataset:
    require("pyarrow", "data")
    require("PIL", "sim")
    images, labels, writers = [], [], []
    for path in files:
        for row, (image, label, writer) in enumerate(_rows(path), start=1):
            where = f"{path}: row {row}"
            if not isinstance(label, int) or not 0 <= label < CLASSES:
                raise DeltaflError(f"{where}: character is {label!r}; it must be a whole number from 0 to 61")
            if writer is None:
                raise DeltaflError(f"{where}: writer_id is missing")
            images.append(_png(where, image))
            labels.append(label)
            writers.append(writer)
    if not labels:
        raise DeltaflError(f"{files[0]} and the Parquet files beside it hold no rows")
    names, owner = np.unique(np.array(writers, dtype=np.str_), return_inverse=True)
    image_e, label_e = np.stack(images)[:, np.newaxis], np.array(labels, dtype=np.int64)
    title = f"FEMNIST (Parquet), {len(names)} clients"
    whole = Dataset(title, image_e, label_e, image_e[:0], label_e[:0], num_classes=CLASSES)
    return hold_out_by_owner(whole, "writer", owner.astype(np.int64))


def _rows(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Image, label and writer of each row, read some thousand rows at a time."""
    parquet = importlib.import_module("pyarrow.parquet")
    names = ["image", "character", "writer_id"]
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise DeltaflError(f"{path} has no column {missing[0]!r}; needs image, writer_id and character")
            for batch in file.iter_batches(columns=names):
                columns = batch.to_pydict()
                yield from zip(*(columns[name] for name in names), strict=True)
    except DeltaflError:
        raise
    except (ValueError, OSError) as error:
        raise DeltaflError(f"{path} is not a whole Parquet file: {error}") from error


def _png(where: str, image: Any) -> npt.NDArray[np.uint8]:
    from PIL import Image

    content = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(content, bytes):
        raise DeltaflError(f"{where}: image must hold the bytes of a picture")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as opened:  # for other formats Pillow runs Ghostscript
            size = opened.size
            if size == (SIDE, SIDE):  # known before the pixels are decoded
                return np.asarray(opened.convert("L"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DeltaflError(f"{where}: image cannot be decoded: {error}") from error
    raise DeltaflError(f"{where}: image has {size[0]} x {size[1]} pixels, needs {SIDE} x {SIDE}")
