"""Reading data sets: real ones where they are installed, tiny and broken ones made here."""

import gzip
import struct
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.tasks import datasets
from deltafl.tasks.datasets import content_sha256, load_dataset
from deltafl.tasks.download import check
from deltafl.tasks.idx import read_idx
from deltafl.tasks.sources import SOURCES, TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, sha256_of

Bytes = npt.NDArray[np.uint8]


def idx(array: Bytes) -> bytes:
    """The IDX format, written from its description."""
    return struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


def tiny_arrays() -> dict[str, Bytes]:
    rng = np.random.default_rng(0)
    return {
        TRAIN_IMAGES: rng.integers(0, 256, (30, 28, 28), dtype=np.uint8),
        TRAIN_LABELS: np.arange(30, dtype=np.uint8) % 10,
        TEST_IMAGES: rng.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        TEST_LABELS: np.arange(20, dtype=np.uint8) % 10,
    }


def write_tiny(folder: Path, zipped: bool = True, **replaced: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in tiny_arrays().items():
        content = replaced.get(name.replace("-", "_"), idx(array))
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache and no environment of the person who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


def test_digits_are_1500_and_297() -> None:
    pytest.importorskip("sklearn")
    digits = load_dataset("digits")
    assert digits.train_x.shape == (1500, 1, 8, 8)
    assert digits.test_x.shape == (297, 1, 8, 8)
    assert digits.train_x.dtype == np.uint8
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 16)
    assert np.bincount(digits.train_y).tolist() == [151, 151, 150, 153, 148, 152, 151, 149, 146, 149]
    assert (digits.name, digits.num_classes, str(digits.train_y.dtype)) == ("digits", 10, "int64")


def test_digits_are_scikit_learns_with_and_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from its file, which is far quicker than importing it; without the file through its loader."""
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    for place in (datasets.DIGITS_FILE, "elsewhere.csv.gz"):
        monkeypatch.setattr(datasets, "DIGITS_FILE", place)
        digits = load_dataset("digits")
        np.testing.assert_array_equal(np.concatenate([digits.train_x, digits.test_x])[:, 0], theirs.images)
        np.testing.assert_array_equal(np.concatenate([digits.train_y, digits.test_y]), theirs.target)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(datasets, "distribution", nothing)
    with pytest.raises(MissingExtraError, match=r"pip install 'deltafl\[sim\]'"):
        load_dataset("digits")


@pytest.mark.skipif(
    not SOURCES["fashion-mnist"].system_folders[0].is_dir(), reason="Debian's data set is not installed"
)
def test_the_published_fashion_mnist() -> None:
    fashion = load_dataset("fashion-mnist")
    assert fashion.name == "fashion-mnist"
    assert fashion.train_x.shape == (60_000, 1, 28, 28)
    assert fashion.test_x.shape == (10_000, 1, 28, 28)
    assert set(np.bincount(fashion.train_y)) == {6000}
    assert {status.state for status in check("fashion-mnist")} == {"ok"}
    with pytest.raises(DeltaflError, match="holds fashion-mnist, not mnist"):
        load_dataset("mnist", SOURCES["fashion-mnist"].system_folders[0])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["data_dir", "data_dir/mnist", "environment", "environment/mnist", "cache"])
def test_files_are_found_in_every_place(
    place: str, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {
        "data_dir": tmp_path / "data",
        "data_dir/mnist": tmp_path / "data" / "mnist",
        "environment": tmp_path / "environment",
        "environment/mnist": tmp_path / "environment" / "mnist",
        "cache": tmp_path / "cache" / "deltafl" / "mnist",
    }[place]
    write_tiny(folder, zipped)
    if place.startswith("environment"):
        monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "environment"))
    loaded = load_dataset("mnist", tmp_path / "data" if place.startswith("data_dir") else None)
    arrays = tiny_arrays()
    assert np.array_equal(loaded.train_x[:, 0], arrays[TRAIN_IMAGES])
    assert np.array_equal(loaded.test_y, arrays[TEST_LABELS])
    assert [str(loaded.train_x.dtype), str(loaded.train_y.dtype)] == ["uint8", "int64"]
    # These are not the published images, and the name does not hide it.
    assert loaded.name == f"mnist (other content than published: {folder})"


def test_data_dir_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "first")
    write_tiny(tmp_path / "second")
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "second"))
    assert str(tmp_path / "first") in load_dataset("mnist", tmp_path / "first").name


def write_writers(path: Path, changed: dict[str, npt.NDArray[Any]]) -> None:
    arrays = tiny_arrays()
    columns: dict[str, npt.NDArray[Any]] = {
        "train_x": arrays[TRAIN_IMAGES],
        "train_y": arrays[TRAIN_LABELS],
        "test_x": arrays[TEST_IMAGES],
        "test_y": arrays[TEST_LABELS],
        "train_writer": np.repeat(np.array([2100, 7, 5], np.int16), 10),
    }
    columns |= changed
    np.savez(path, **columns)  # type: ignore[arg-type]


def test_mnist_with_writers(tmp_path: Path) -> None:
    write_writers(tmp_path / "mnist_writers.npz", {})
    loaded = load_dataset("mnist", tmp_path)
    assert loaded.train_x.shape == (30, 1, 28, 28)
    assert loaded.columns["writer"].dtype == np.int64
    assert np.bincount(loaded.columns["writer"])[[5, 7, 2100]].tolist() == [10, 10, 10]
    assert "mnist_writers.npz" in loaded.name
    assert {status.state for status in check("mnist", tmp_path)} == {"corrupt"}


def test_broken_files_with_writers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mnist_writers.npz"
    changes: list[tuple[dict[str, npt.NDArray[Any]], str]] = [
        ({"train_writer": np.zeros(29, np.int16)}, "needs a whole number for each of 30 labels"),
        ({"test_x": np.zeros((20, 28, 28))}, "test_x is float64"),
        ({"test_x": np.array([None])}, "is not an archive with the arrays"),
    ]
    for changed, words in changes:
        write_writers(path, changed)
        with pytest.raises(DeltaflError, match=rf"mnist_writers\.npz.*{words}"):
            load_dataset("mnist", tmp_path)
    path.write_bytes(b"PK not a zip")
    with pytest.raises(DeltaflError, match="is not an archive with the arrays"):
        load_dataset("mnist", tmp_path)


def test_nothing_found_says_where_it_looked_and_what_to_write(tmp_path: Path) -> None:
    write_tiny(tmp_path / "half")
    (tmp_path / "half" / f"{TEST_LABELS}.gz").unlink()
    with pytest.raises(DeltaflError, match=r"half \(3 of 4 files\).*cache.*'deltafl data fetch mnist'"):
        load_dataset("mnist", tmp_path / "half")
    with pytest.raises(DeltaflError, match="nowhere, which is not a folder"):
        load_dataset("mnist", tmp_path / "nowhere")
    with pytest.raises(DeltaflError, match="did you mean 'fashion-mnist'"):
        load_dataset("fashionmnist")


LABELS, IMAGES = idx(tiny_arrays()[TRAIN_LABELS]), idx(tiny_arrays()[TRAIN_IMAGES])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (TRAIN_LABELS, b"", "is no IDX file"),
        (TRAIN_LABELS, LABELS[:6], "is no IDX file"),
        (TRAIN_LABELS, b"<html>no such page</html>", "starts with '3c68746d'"),
        (TRAIN_LABELS, IMAGES, "with 1 axes"),
        (TRAIN_LABELS, LABELS[:-1], "37 bytes, its header announces 38"),
        (TRAIN_LABELS, LABELS + b"0", "39 bytes, its header announces 38"),
        (TRAIN_IMAGES, IMAGES[:-1], "its header announces 23536"),
        (TRAIN_IMAGES, b"\x00\x00\x08\x03" + b"\xff" * 12, "announces 79228162458924105385300197391"),
        (TRAIN_LABELS, idx(np.zeros(29, np.uint8)), "30 images but .* 29 labels"),
        (TRAIN_LABELS, idx(np.full(30, 10, np.uint8)), "labels from 0 to 9"),
        (TRAIN_IMAGES, idx(np.zeros((30, 14, 28), np.uint8)), r"shape \(14, 28\)"),
        (TRAIN_LABELS, gzip.compress(LABELS, mtime=0)[:-6], "cannot read .*train-labels"),
    ],
)
def test_a_broken_file_is_named(file: str, content: bytes, words: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, zipped=False)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DeltaflError, match=words) as caught:
        load_dataset("mnist", tmp_path)
    assert file in str(caught.value)


def test_an_unpacked_file_that_kept_its_ending_is_read(tmp_path: Path) -> None:
    (tmp_path / "labels.gz").write_bytes(LABELS)
    assert np.array_equal(read_idx(tmp_path / "labels.gz", 1), tiny_arrays()[TRAIN_LABELS])


def test_the_checksum_of_an_array_is_that_of_its_file() -> None:
    for array in tiny_arrays().values():
        assert content_sha256(array) == sha256_of(idx(array))
