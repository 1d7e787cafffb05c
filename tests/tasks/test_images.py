"""Image data sets in their authors' files: real ones where they are installed, tiny and broken
ones made here.
"""

import gzip
import hashlib
import io
import struct
import tarfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.tasks import check, make_task
from deltafl.tasks.data import images
from deltafl.tasks.data.files import (
    CIFAR_ARCHIVE,
    SOURCES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Source,
)
from deltafl.tasks.data.images import (
    CIFAR_FILES,
    idx_sha256,
    load_cifar10,
    load_digits,
    load_idx,
    read_idx,
)

Bytes = npt.NDArray[np.uint8]
FASHION = SOURCES["fashion-mnist"].system_folders[0]


def idx(array: Bytes) -> bytes:
    """The IDX format, written from its description."""
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + b"".join(struct.pack(">I", n) for n in array.shape)
        + array.tobytes()
    )


def tiny_arrays() -> dict[str, Bytes]:
    rng = np.random.default_rng(0)
    return {
        TRAIN_IMAGES: rng.integers(0, 256, (30, 28, 28), dtype=np.uint8),
        TRAIN_LABELS: np.arange(30, dtype=np.uint8) % 10,
        TEST_IMAGES: rng.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        TEST_LABELS: np.arange(20, dtype=np.uint8) % 10,
    }


def write_tiny(folder: Path, zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in tiny_arrays().items():
        content = idx(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(content) if zipped else content
        )


def test_digits_are_scikit_learns_1500_and_297() -> None:
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    digits = load_digits()
    assert (digits.train_x.shape, digits.test_x.shape) == ((1500, 1, 8, 8), (297, 1, 8, 8))
    assert (digits.name, digits.num_classes, str(digits.train_x.dtype)) == ("digits", 10, "uint8")
    np.testing.assert_array_equal(
        np.concatenate([digits.train_x, digits.test_x])[:, 0], theirs.images
    )
    np.testing.assert_array_equal(np.concatenate([digits.train_y, digits.test_y]), theirs.target)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "distribution", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(MissingExtraError, match=r"pip install 'deltafl\[sim\]'"):
        load_digits()


@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's data set is not installed")
def test_the_published_fashion_mnist() -> None:
    task = make_task("split-fashion-mnist", seed=0)
    fashion = task.dataset
    assert fashion.name == "fashion-mnist"
    assert (fashion.train_x.shape, fashion.test_x.shape) == (
        (60_000, 1, 28, 28),
        (10_000, 1, 28, 28),
    )
    assert set(np.bincount(fashion.train_y)) == {6000}
    assert {status.state for status in check("fashion-mnist")} == {"ok"}
    assert [len(rows) for rows in task.client_rows] == [6000] * 9 + [60] * 100


@pytest.mark.parametrize(
    "place", ["data", "data/mnist", "environment", "environment/mnist", "cache/deltafl/mnist"]
)
def test_files_are_found_in_every_place(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / place, zipped=place.endswith("/mnist"))
    if place.startswith("environment"):
        monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "environment"))
    loaded = load_idx("mnist", tmp_path / "data" if place.startswith("data") else None)
    arrays = tiny_arrays()
    assert np.array_equal(loaded.train_x[:, 0], arrays[TRAIN_IMAGES])
    assert np.array_equal(loaded.test_y, arrays[TEST_LABELS])
    assert [str(loaded.train_x.dtype), str(loaded.train_y.dtype)] == ["uint8", "int64"]
    # These are not the published images, and the name does not hide it.
    assert loaded.name == f"mnist (other content than published: {tmp_path / place})"


def test_nothing_found_lists_the_folders_and_the_command(tmp_path: Path) -> None:
    write_tiny(tmp_path / "half")
    (tmp_path / "half" / f"{TEST_LABELS}.gz").unlink()
    with pytest.raises(
        DeltaflError, match=r"'deltafl data fetch mnist' gets; not found in .*half.*cache"
    ):
        load_idx("mnist", tmp_path / "half")
    with pytest.raises(
        DeltaflError, match=r"'deltafl data fetch cifar10' gets; not found in .*cifar10"
    ):
        load_cifar10()


LABELS = idx(tiny_arrays()[TRAIN_LABELS])
IMAGES = idx(tiny_arrays()[TRAIN_IMAGES])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (TRAIN_LABELS, b"<html>no such page</html>", "is no whole IDX file"),
        (TRAIN_LABELS, b"\0\0\x0d" + LABELS[3:], "starts with '00000d'"),
        (TRAIN_LABELS, gzip.compress(LABELS, mtime=0)[:-6], "is no whole IDX file"),
        (TRAIN_LABELS, idx(np.zeros(29, np.uint8)), r"shape \(30, 28, 28\) and .* \(29,\)"),
        (TRAIN_LABELS, idx(np.full(30, 10, np.uint8)), "labels from 0 to 9"),
        (TRAIN_IMAGES, idx(np.zeros((30, 14, 28), np.uint8)), r"shape \(30, 14, 28\)"),
    ],
)
def test_a_broken_file_is_named(file: str, content: bytes, words: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, zipped=False)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DeltaflError, match=words) as caught:
        load_idx("mnist", tmp_path)
    assert file in str(caught.value)


def test_an_unpacked_file_that_kept_its_ending_is_read(tmp_path: Path) -> None:
    (tmp_path / "labels.gz").write_bytes(LABELS)
    assert np.array_equal(read_idx(tmp_path / "labels.gz"), tiny_arrays()[TRAIN_LABELS])


def test_the_checksum_of_an_array_is_that_of_its_file() -> None:
    for array in tiny_arrays().values():
        assert idx_sha256(array) == hashlib.sha256(idx(array)).hexdigest()


def cifar_files() -> dict[str, bytes]:
    """Two images a file, all different; file k has the labels k and 9 - k."""
    image = np.random.default_rng(0).integers(0, 256, (len(CIFAR_FILES), 2, 3073), dtype=np.uint8)
    image[:, :, 0] = [[k, 9 - k] for k in range(len(CIFAR_FILES))]
    return {name: rows.tobytes() for name, rows in zip(CIFAR_FILES, image, strict=True)}


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_cifar10_is_read_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / CIFAR_ARCHIVE
    path.write_bytes(tar(cifar_files()))
    task = make_task("cifar10", seed=0, num_clients=3, data_dir=tmp_path)
    data = task.dataset
    row = np.frombuffer(b"".join(cifar_files().values()), np.uint8).reshape(12, 3073)
    assert np.array_equal(data.train_x, row[:10, 1:].reshape(-1, 3, 32, 32))
    assert np.array_equal(data.test_x, row[10:, 1:].reshape(-1, 3, 32, 32))
    assert data.train_y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.test_y.tolist() == [5, 4]
    assert data.name == f"CIFAR-10 (other content than published: {path})"
    assert (task.augment is not None, task.num_clients, data.num_classes) == (True, 3, 10)
    checksums = {CIFAR_ARCHIVE: f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}"}
    monkeypatch.setitem(SOURCES, "cifar10", Source("", checksums))
    assert load_cifar10(tmp_path).name == "CIFAR-10"


WHOLE = tar(cifar_files())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            tar({**cifar_files(), "data_batch_3.bin": b"\x0a" * 3073}),
            r"data_batch_3\.bin is missing or broken",
        ),
        (tar({"data_batch_1.bin": bytes(3073)}), r"data_batch_2\.bin is missing or broken"),
        (b"no archive", "is not a whole tar archive"),
        (WHOLE[: len(WHOLE) // 2], "is not a whole tar archive"),
    ],
)
def test_broken_archives_of_cifar10_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / CIFAR_ARCHIVE).write_bytes(content)
    with pytest.raises(DeltaflError, match=words):
        load_cifar10(tmp_path)
