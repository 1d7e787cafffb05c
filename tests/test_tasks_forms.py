"""Data sets in the forms that other projects leave: LEAF's JSON, h5, Parquet; made here and tiny."""

import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks.datasets import ARCHIVE_LOADERS, FORM_LOADERS, load_dataset
from deltafl.tasks.download import check
from deltafl.tasks.registry import make_task
from deltafl.tasks.sources import ARCHIVES, FORMS


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


def test_every_data_set_has_a_reader() -> None:
    assert set(ARCHIVES) == set(ARCHIVE_LOADERS)
    assert set(FORMS) == set(FORM_LOADERS)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="none of it is in") as caught:
        load_dataset(name, tmp_path)
    assert FORMS[name] in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(DeltaflError, match=f"{name} is not fetched"):
        check(name)


# LEAF

Users = dict[str, tuple[list[Any], list[Any]]]


def write_leaf(root: Path, part: str, shares: Users, file: str = "all_data_0_keep_0.json", **changed: Any) -> Path:
    content = {
        "users": list(shares),
        "num_samples": [len(y) for _, y in shares.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in shares.items()},
    }
    path = root / part / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changed))
    return path


def pixels(level: int) -> list[float]:
    """One image: all of it paper but for its first pixel."""
    return [level / 255, *[1.0] * 783]


TRAIN: Users = {"f2": ([pixels(3), pixels(4)], [61, 0]), "f1": ([pixels(5)], [7])}
TEST: Users = {"f1": ([pixels(6)], [8]), "f9": ([pixels(7)], [9])}


@pytest.mark.parametrize("place", ["data", "", "data/femnist/data", "femnist/data"])
def test_femnist_in_leafs_json(place: str, tmp_path: Path) -> None:
    write_leaf(tmp_path / place, "train", TRAIN)
    write_leaf(tmp_path / place, "train", {"f0": ([pixels(1)], [2])}, file="all_data_1_keep_0.json")
    write_leaf(tmp_path / place, "test", TEST)
    task = make_task("femnist", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert data.train_x.dtype == np.uint8
    assert data.train_x[:, 0, 0, 0].tolist() == [3, 4, 5, 1]
    assert (data.train_x[:, 0, 1:] == 255).all()
    assert data.train_y.tolist() == [61, 0, 7, 2]
    assert data.test_y.tolist() == [8, 9]
    # Clients in the order of their names: f0, f1, f2; f9 holds no training examples.
    assert [rows.tolist() for rows in task.client_rows] == [[3], [2], [0, 1]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [1, -1]
    assert data.name == "FEMNIST (LEAF's JSON), 3 clients"
    assert make_task("femnist", seed=0, data_dir=tmp_path, partition="iid", num_clients=2).test_clients is None


def test_pixels_that_are_no_bytes_stay_floats(tmp_path: Path) -> None:
    write_leaf(tmp_path, "train", TRAIN | {"f3": ([[0.501] * 784], [1])})
    write_leaf(tmp_path, "test", TEST)
    data = load_dataset("femnist", tmp_path)
    assert [str(x.dtype) for x in (data.train_x, data.test_x)] == ["float32", "float32"]
    assert data.train_x[:, 0, 0, 0] == pytest.approx([3 / 255, 4 / 255, 5 / 255, 0.501])
    assert data.test_x[:, 0, 0, 0] == pytest.approx([6 / 255, 7 / 255])


def test_broken_json_of_femnist_is_named(tmp_path: Path) -> None:
    write_leaf(tmp_path, "test", TEST)
    good = pixels(1)
    changes: list[tuple[Users, dict[str, Any], str]] = [
        ({"f1": ([good, good[1:]], [1, 2])}, {}, "user 'f1', row 2: x must be a list of 784"),
        ({"f1": ([good, [*good[1:], 1.1]], [1, 2])}, {}, "user 'f1', row 2: x must hold numbers from 0"),
        ({"f1": ([[*good[1:], float("nan")]], [1])}, {}, "user 'f1', row 1: x must hold numbers from 0"),
        ({"f1": ([[*good[1:], "a"]], [1])}, {}, "user 'f1', row 1: x must hold numbers only"),
        ({"f1": ([good, good], [1, 62])}, {}, "user 'f1', row 2: y is 62"),
        ({"f1": ([good], ["A"])}, {}, "user 'f1', row 1: y is 'A'"),
        ({"f1": ([good], [1, 2])}, {}, "user 'f1' has 1 x and 2 y"),
        ({"f1": ([good], [1])}, {"num_samples": [4]}, "num_samples says 4"),
        ({"f1": ([good], [1])}, {"num_samples": [1, 1]}, "1 users but 2 num_samples"),
        ({"f1": ([good], [1])}, {"users": ["f7"]}, "user 'f7' has no lists x and y"),
        ({"f1": ([good, [10**400, *good[1:]]], [1, 2])}, {}, "user 'f1', row 2: x must hold numbers only, from 0"),
        ({"f1": ([good], [10**400])}, {}, r"user 'f1', row 1: y is 10+\.\.\.0+; it must be a whole"),
        ({"f1": ([good], [1])}, {"users": 3}, "users and num_samples must be lists, got 3 and"),
        ({"f1": ([good], [1])}, {"users": {"f1": 1}}, "users and num_samples must be lists"),
        ({"f1": ([good], [1])}, {"num_samples": {"f1": 1}}, "users and num_samples must be lists"),
        ({"f1": ([good], [1])}, {"num_samples": [[1]]}, r"user 'f1' with \[1\] samples: needs a name and a whole"),
        ({"f1": ([good], [1])}, {"num_samples": [{}]}, r"user 'f1' with \{\} samples"),
        ({"f1": ([good], [1])}, {"users": [["f1"]]}, r"user \['f1'\] with 1 samples: needs a name"),
        ({"f1": ([good], [1])}, {"users": ["f1"] * 4, "num_samples": [1] * 4}, "user 'f1' is there twice"),
        ({"f1": ([good], [1])}, {"user_data": 3}, "user 'f1' has no lists x and y"),
    ]
    for users, changed, words in changes:
        path = write_leaf(tmp_path, "train", users, **changed)
        with pytest.raises(DeltaflError, match=words) as caught:
            load_dataset("femnist", tmp_path)
        assert str(path) in str(caught.value)
    path.write_text("{")
    with pytest.raises(DeltaflError, match="is not valid JSON"):
        load_dataset("femnist", tmp_path)
    path.write_text('{"users": ' + "[" * 100_000)
    with pytest.raises(DeltaflError, match="is not valid JSON: it has too many brackets"):
        load_dataset("femnist", tmp_path)
    path.write_bytes(b'{"users": ["\xff"]}')
    with pytest.raises(DeltaflError, match="is not text in UTF-8"):
        load_dataset("femnist", tmp_path)
    path.write_text("[]")
    with pytest.raises(DeltaflError, match="is not a file of LEAF"):
        load_dataset("femnist", tmp_path)
    write_leaf(tmp_path, "train", {})
    with pytest.raises(DeltaflError, match="there is no train example"):
        load_dataset("femnist", tmp_path)


def write_h5(path: Path, writers: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for writer, (image, label) in writers.items():
            file.create_dataset(f"examples/{writer}/pixels", data=image)
            file.create_dataset(f"examples/{writer}/label", data=label)


def test_femnist_in_the_h5_of_tensorflow_federated(tmp_path: Path) -> None:
    image = np.ones((3, 28, 28), np.float32)
    image[:, 0, 0] = [0.25, 0.5, 0.75]
    label = np.array([1, 2, 61], np.int32)
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image[:2], label[:2]), "f1_2": (image[2:], label[2:])})
    write_h5(tmp_path / "fed_emnist_test.h5", {"f1_2": (image[:1], label[:1])})
    task = make_task("femnist", seed=0, data_dir=tmp_path)
    assert task.dataset.train_x[:, 0, 0, 0].tolist() == [0.25, 0.5, 0.75]
    assert task.dataset.train_y.tolist() == [1, 2, 61]
    assert [rows.tolist() for rows in task.client_rows] == [[0, 1], [2]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [1]
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image + np.array([0, 1, 0])[:, None, None], label)})
    with pytest.raises(DeltaflError, match=r"fed_emnist_train\.h5: writer 'f0_1', row 2: needs pixels 0 to 1"):
        load_dataset("femnist", tmp_path)
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image, label[:2])})
    with pytest.raises(DeltaflError, match=r"writer 'f0_1' has pixels \(3, 28, 28\) \(float32\) and labels \(2,\)"):
        load_dataset("femnist", tmp_path)
    h5py = pytest.importorskip("h5py")
    for content, words in (
        ({"examples": label}, "has no group 'examples'"),
        ({"examples/f0_1": label}, "writer 'f0_1' lacks the arrays pixels and label"),
        ({"examples/f0_1/pixels": image}, "writer 'f0_1' lacks the arrays pixels and label"),
        ({"examples/f0_1/pixels": image, "examples/f0_1/label/a": label}, "writer 'f0_1' lacks the arrays"),
        ({"examples/f0_1/pixels": image, "examples/f0_1/label": 1}, r"and labels \(\) \(int64\); needs"),
        ({"examples/f0_1/pixels": image.astype("S3"), "examples/f0_1/label": label}, r"pixels \(3, 28, 28\) \(\|S3\)"),
    ):
        with h5py.File(tmp_path / "fed_emnist_train.h5", "w") as file:
            for name, values in content.items():
                file.create_dataset(name, data=values)
        with pytest.raises(DeltaflError, match=rf"fed_emnist_train\.h5.* {words}"):
            load_dataset("femnist", tmp_path)
    (tmp_path / "fed_emnist_train.h5").write_bytes(b"no")
    with pytest.raises(DeltaflError, match="is not a whole HDF5 file"):
        load_dataset("femnist", tmp_path)


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / f"fed_emnist_{part}.h5").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'h5py': pip install 'deltafl\[data\]'"):
        load_dataset("femnist", tmp_path)


def png(level: int, side: int = 28, kind: str = "PNG", **details: Any) -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image_module.fromarray(np.full((side, side), level, np.uint8)).save(file, kind, **details)
    return file.getvalue()


def long_text() -> Any:
    """A text of a PNG that is longer than Pillow unpacks."""
    info = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
    info.add_text("k", "x" * 3_000_000, zip=True)
    return info


def write_parquet(path: Path, image: list[Any], writer: list[Any], character: list[Any]) -> None:
    pytest.importorskip("pyarrow")
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": image, "writer_id": writer, "hsf_id": [0] * len(image), "character": character}
    parquet.write_table(arrow.table(columns), path)


@pytest.mark.parametrize("place", ["", "data"])
def test_femnist_in_parquet(place: str, tmp_path: Path) -> None:
    image = [{"bytes": png(level), "path": f"{level}.png"} for level in range(9)]
    write_parquet(tmp_path / place / "train-0.parquet", image[:3], ["b", "a", "b"], [0, 1, 61])
    write_parquet(tmp_path / place / "train-1.parquet", image[3:], ["b", "b", "b", "b", "a", "b"], [2, 3, 4, 5, 6, 7])
    task = make_task("femnist", seed=0, data_dir=tmp_path)
    data = task.dataset
    # Writer a wrote images 1 and 7, b the others: its fifth, image 5, is for the test.
    assert data.train_x[:, 0, 9, 9].tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert data.test_x[:, 0, 9, 9].tolist() == [5]
    assert [rows.tolist() for rows in task.client_rows] == [[1, 6], [0, 2, 3, 4, 5, 7]]
    assert data.test_y.tolist() == [4]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [1]
    assert data.name == "FEMNIST (Parquet), 2 clients"


def test_broken_parquet_of_femnist_is_named(tmp_path: Path) -> None:
    good = {"bytes": png(1), "path": "x.png"}
    changes: list[tuple[Any, Any, Any, str]] = [
        (good, "a", 62, r"t\.parquet: row 6: character is 62"),
        ({"bytes": b"no", "path": "x.png"}, "a", 1, r"t\.parquet: row 6: image cannot be decoded"),
        ({"bytes": png(1, 20), "path": "x.png"}, "a", 1, "row 6: image has 20 x 20 pixels"),
        ({"bytes": png(1, 20)[:60], "path": "x.png"}, "a", 1, "row 6: image has 20 x 20 pixels"),  # none is decoded
        ({"bytes": png(1, pnginfo=long_text())}, "a", 1, "row 6: image cannot be decoded: Decompressed data too large"),
        *(({"bytes": png(1, kind=kind)}, "a", 1, "cannot be decoded: it is not a PNG") for kind in ("EPS", "BMP")),
        (None, "a", 1, "row 6: image must hold the bytes"),
        (good, None, 1, "example 6 of the Parquet files has no writer_id"),
    ]
    for image, writer, label, words in changes:
        write_parquet(tmp_path / "t.parquet", [good] * 5 + [image], ["a"] * 5 + [writer], [1] * 5 + [label])
        with pytest.raises(DeltaflError, match=words):
            load_dataset("femnist", tmp_path)
    parquet, arrow = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow")
    parquet.write_table(arrow.table({"image": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match=r"t\.parquet has no column 'writer_id'"):
        load_dataset("femnist", tmp_path)
    (tmp_path / "t.parquet").write_bytes(b"no")
    with pytest.raises(DeltaflError, match="is not a whole Parquet file"):
        load_dataset("femnist", tmp_path)


def write_faces(root: Path, levels: dict[str, int]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    folder = root / "raw" / "img_align_celeba"
    folder.mkdir(parents=True, exist_ok=True)
    for name, level in levels.items():
        image_module.fromarray(np.full((218, 178, 3), level, np.uint8)).save(folder / name)


def test_celeba_in_leafs_json(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_leaf(root, "train", {"40": (["000001.jpg", "000002.jpg"], [1.0, 0.0]), "7": (["000003.jpg"], [1])})
    write_leaf(root, "test", {"40": (["000004.jpg"], [0.0])})
    with pytest.raises(DeltaflError, match=r"needs the folder .*img_align_celeba"):
        load_dataset("celeba", tmp_path)
    write_faces(root, {"000001.jpg": 10, "000002.jpg": 20, "000003.jpg": 30, "000004.jpg": 40})
    task = make_task("celeba", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert data.train_x.shape == (3, 3, 84, 84)
    assert np.abs(data.train_x[:, :, 40, 40] - np.array([[10], [20], [30]])).max() <= 2
    assert data.train_y.tolist() == [1, 0, 1]
    assert [rows.tolist() for rows in task.client_rows] == [[0, 1], [2]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [0]
    assert data.name == "CelebA (LEAF's JSON), 2 clients"
    # Another picture under the same name is decoded anew, not taken from the cache.
    write_faces(root, {"000003.jpg": 200})
    assert abs(int(load_dataset("celeba", tmp_path).train_x[2, 0, 40, 40]) - 200) <= 2


def test_broken_celeba_is_named(tmp_path: Path) -> None:
    write_leaf(tmp_path, "test", {"7": (["a.jpg"], [0])})
    write_faces(tmp_path, {"a.jpg": 10})
    pictures = tmp_path / "raw" / "img_align_celeba"
    (pictures / "b.jpg").write_bytes(b"no")
    (pictures / "eps.jpg").write_bytes(png(1, 84, "EPS"))
    (pictures / "text.jpg").write_bytes(png(1, 84, pnginfo=long_text()))
    for name, label, words in (
        ("c.jpg", 1, "user '7', row 2: there is no picture"),
        ("b.jpg", 1, r"user '7', row 2: the picture b\.jpg cannot be decoded"),
        ("eps.jpg", 1, r"user '7', row 2: the picture eps\.jpg cannot be decoded: cannot identify"),
        ("text.jpg", 1, r"row 2: the picture text\.jpg cannot be decoded: Decompressed data too large"),
        ("../../train/x.jpg", 1, "row 2: x is '../../train/x.jpg'; it must be the name of a picture"),
        (3, 1, "row 2: x is 3; it must be the name"),
        ("a.jpg", 2, "user '7', row 2: y is 2"),
        ("a.jpg", 0.5, "user '7', row 2: y is 0.5"),
    ):
        write_leaf(tmp_path, "train", {"7": (["a.jpg", name], [1, label])})
        with pytest.raises(DeltaflError, match=words):
            load_dataset("celeba", tmp_path)


# How many clients: the files say


def test_leaf_tasks_take_all_owners_and_own_settings_win(tmp_path: Path) -> None:
    assert make_settings(RunSettings, {"task": "femnist"}).clients is None
    assert make_settings(RunSettings, {"task": "femnist", "clients": 50}).clients == 50
    assert make_settings(RunSettings, {"task": "unipen62"}).clients == 278
    assert make_settings(RunSettings, {"task": "unipen62", "partition": "writer"}).clients is None
    assert make_settings(RunSettings, {"task": "femnist", "partition": "iid"}).clients == 177
