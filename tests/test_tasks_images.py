"""Tasks on images: clothes split by kind, and archives with writers or packed JPEG, made here and tiny."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError
from deltafl.tasks.datasets import load_dataset
from deltafl.tasks.download import check
from deltafl.tasks.images import split_owners
from deltafl.tasks.registry import make_task
from deltafl.tasks.sources import ARCHIVES, SOURCES

Arrays = dict[str, npt.NDArray[Any]]

#: Where a developer keeps the real archives; read before the fixture hides it.
REAL = os.environ.get("DELTAFL_DATA")


def real(name: str) -> pytest.MarkDecorator:
    there = REAL is not None and (Path(REAL) / ARCHIVES[name].file).is_file()
    return pytest.mark.skipif(not there, reason=f"DELTAFL_DATA holds no {ARCHIVES[name].file}")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache and no environment of the person who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


def write(folder: Path, name: str, arrays: Arrays, **changed: npt.NDArray[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ARCHIVES[name].file
    np.savez(path, **(arrays | changed))  # type: ignore[arg-type]
    return path


def tiny_writers() -> Arrays:
    """Writers 3 (600 examples), 9 (60) and 5 (49); the top left pixel is the label, the next two the row."""
    writer = np.repeat(np.array([3, 9, 5], np.int16), [600, 60, 49])
    y = (np.arange(len(writer)) % 62).astype(np.uint8)
    x = np.zeros((len(writer), 28, 28), np.uint8)
    x[:, 0, 0] = y
    x[:, 0, 1], x[:, 0, 2] = np.arange(len(writer)) // 256, np.arange(len(writer)) % 256
    return {"x": x, "y": y, "writer": writer}


@pytest.mark.skipif(
    not SOURCES["fashion-mnist"].system_folders[0].is_dir(), reason="Debian's data set is not installed"
)
def test_split_fashion_mnist_has_the_papers_clients() -> None:
    task = make_task("split-fashion-mnist", seed=0)
    assert [len(rows) for rows in task.client_rows] == [6000] * 9 + [60] * 100
    assert {len(np.unique(task.dataset.train_y[rows])) for rows in task.client_rows} == {1}
    assert len({int(task.dataset.train_y[rows[0]]) for rows in task.client_rows[8:]}) == 2
    assert (task.name, task.dataset.name) == ("split-fashion-mnist", "fashion-mnist")


def test_split_fashion_mnist_asks_for_the_files_of_fashion_mnist() -> None:
    if not SOURCES["fashion-mnist"].system_folders[0].is_dir():
        with pytest.raises(DeltaflError, match="'deltafl data fetch fashion-mnist'"):
            make_task("split-fashion-mnist", seed=0)
    with pytest.raises(DeltaflError, match="did you mean 'fashion-mnist'"):
        load_dataset("split-fashion-mnist")


def test_unipen62_keeps_writers_of_50_and_the_first_500_of_each(tmp_path: Path) -> None:
    path = write(tmp_path, "unipen62", tiny_writers())
    task = make_task("unipen62", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert [len(rows) for rows in task.client_rows] == [450, 54]
    assert np.bincount(data.columns["writer"])[[3, 9]].tolist() == [450, 54]
    assert data.test_x.shape == (56, 1, 28, 28)
    assert [str(data.train_x.dtype), str(data.train_y.dtype), data.num_classes] == ["uint8", "int64", 62]
    # Images stay with their labels, and the test has rows 4, 14, ... of each writer's first 500.
    assert np.array_equal(data.train_x[:, 0, 0, 0], data.train_y)
    row = data.test_x[:, 0, 0, 1].astype(int) * 256 + data.test_x[:, 0, 0, 2]
    assert row.tolist() == [*range(4, 500, 10), *range(604, 660, 10)]
    assert np.array_equal(data.test_y, row % 62)
    assert data.name == f"UNIPEN-62 by writer (other content than known: {path})"
    assert "FEMNIST" not in data.name


@given(st.lists(st.integers(0, 6), max_size=120), st.integers(1, 8), st.none() | st.integers(1, 30))
def test_split_owners_against_a_slow_reference(owners: list[int], fewest: int, most: int | None) -> None:
    train, test = split_owners(np.array(owners, np.int64), fewest, most)
    seen = dict.fromkeys(owners, 0)
    expected: dict[bool, list[int]] = {False: [], True: []}
    for row, owner in enumerate(owners):
        if owners.count(owner) >= fewest and (most is None or seen[owner] < most):
            expected[seen[owner] % 10 == 4].append(row)
        seen[owner] += 1
    assert train.tolist() == expected[False]
    assert test.tolist() == expected[True]


@real("unipen62")
def test_the_real_unipen62() -> None:
    assert REAL is not None
    task = make_task("unipen62", seed=0, data_dir=Path(REAL))
    assert task.dataset.name == "UNIPEN-62 by writer"
    assert task.num_clients == 278
    sizes = [len(rows) for rows in task.client_rows]
    assert (min(sizes) >= 45, max(sizes)) == (True, 450)
    assert set(np.unique(task.dataset.test_y)) == set(range(62))


def test_a_missing_archive_says_which_file_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, environment = tmp_path / "data", tmp_path / "environment"
    data.mkdir()
    environment.mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(environment))
    for name, archive in ARCHIVES.items():
        with pytest.raises(DeltaflError) as caught:
            make_task(name, seed=0, data_dir=data)
        message = str(caught.value)
        for words in (archive.file, str(data), str(environment), str(tmp_path / "cache"), "DELTAFL_DATA"):
            assert words in message
        with pytest.raises(DeltaflError, match=f"{archive.file}, that is published nowhere"):
            check(name)
    with pytest.raises(DeltaflError, match="nowhere, which is not a folder"):
        load_dataset("unipen62", tmp_path / "nowhere")
    with pytest.raises(DeltaflError, match="did you mean 'unipen62'"):
        load_dataset("unipen")


@pytest.mark.parametrize("place", ["data/unipen62", "environment", "cache/deltafl/unipen62"])
def test_an_archive_is_found_in_every_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("data", "environment"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "environment"))
    path = write(tmp_path / place, "unipen62", tiny_writers())
    assert str(path) in load_dataset("unipen62", tmp_path / "data").name


def test_broken_writers_are_named(tmp_path: Path) -> None:
    whole = tiny_writers()
    changes: list[tuple[str, npt.NDArray[Any], str]] = [
        ("x", whole["x"].astype(np.float32), r"x is float32 \(709, 28, 28\)"),
        ("x", whole["x"][:, :20], r"needs uint8 \(N, 28, 28\)"),
        ("x", whole["x"][:700], "needs uint8 for 700 images"),
        ("y", whole["y"] + np.uint8(1), "labels from 0 to 61"),
        ("writer", whole["writer"][:3], "needs 709 whole numbers"),
        ("writer", whole["writer"] * 0.5, "needs 709 whole numbers"),
        ("writer", np.arange(709), "no writer has 50 examples or more"),
        ("y", np.array([None]), "is not an archive with the arrays x, y, writer"),
    ]
    for key, array, words in changes:
        write(tmp_path, "unipen62", whole, **{key: array})
        with pytest.raises(DeltaflError, match=rf"unipen62_writers\.npz.*{words}"):
            load_dataset("unipen62", tmp_path)
    path = tmp_path / ARCHIVES["unipen62"].file
    np.savez(path, x=whole["x"])
    with pytest.raises(DeltaflError, match="is not an archive with the arrays"):
        load_dataset("unipen62", tmp_path)
    np.save(tmp_path / "x.npy", whole["x"])
    for content in (b"", b"PK not a zip", path.read_bytes()[:-100], (tmp_path / "x.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(DeltaflError, match="is not an archive with the arrays"):
            load_dataset("unipen62", tmp_path)
