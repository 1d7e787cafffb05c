"""FEMNIST in h5 and in Parquet, made here and tiny."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks import make_task
from deltafl.tasks.femnist import load_femnist
from tools.pictures import png


def write_h5(path: Path, writers: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for writer, (image, label) in writers.items():
            file.create_dataset(f"examples/{writer}/pixels", data=image)
            file.create_dataset(f"examples/{writer}/label", data=label)


def test_femnist_in_the_h5_of_tensorflow_federated(tmp_path: Path) -> None:
    image = np.ones((3, 28, 28), np.float32)
    image[:, 0, 0] = np.array([51, 102, 153]) / 255
    label = np.array([1, 2, 61], np.int32)
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image[:2], label[:2]), "f1_2": (image[2:], label[2:])})
    write_h5(tmp_path / "fed_emnist_test.h5", {"f1_2": (image[:1], label[:1])})
    task = make_task("femnist", seed=0, data_dir=tmp_path)
    assert task.dataset.train_x[:, 0, 0, 0].tolist() == [51, 102, 153]
    assert task.dataset.train_y.tolist() == [1, 2, 61]
    assert [rows.tolist() for rows in task.client_rows] == [[0, 1], [2]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [1]
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image + np.array([0, 1, 0])[:, None, None], label)})
    with pytest.raises(DeltaflError, match=r"fed_emnist_train\.h5: writer 'f0_1', row 2: needs pixels 0 to 1"):
        load_femnist(tmp_path)
    write_h5(tmp_path / "fed_emnist_train.h5", {"f0_1": (image, label[:2])})
    with pytest.raises(DeltaflError, match=r"writer 'f0_1' has pixels \(3, 28, 28\) \(float32\) and labels \(2,\)"):
        load_femnist(tmp_path)
    h5py = pytest.importorskip("h5py")
    for content, words in (
        ({"examples": label}, "is not TensorFlow Federated's FEMNIST"),
        ({"examples/f0_1": label}, "is not TensorFlow Federated's FEMNIST"),
        ({"examples/f0_1/pixels": image}, "is not TensorFlow Federated's FEMNIST"),
        ({"examples/f0_1/pixels": image, "examples/f0_1/label/a": label}, "is not TensorFlow Federated's FEMNIST"),
        ({"examples/f0_1/pixels": image, "examples/f0_1/label": 1}, "is not TensorFlow Federated's FEMNIST"),
        ({"examples/f0_1/pixels": image.astype("S3"), "examples/f0_1/label": label}, r"pixels \(3, 28, 28\) \(\|S3\)"),
    ):
        with h5py.File(tmp_path / "fed_emnist_train.h5", "w") as file:
            for name, values in content.items():
                file.create_dataset(name, data=values)
        with pytest.raises(DeltaflError, match=rf"fed_emnist_train\.h5.* {words}"):
            load_femnist(tmp_path)
    (tmp_path / "fed_emnist_train.h5").write_bytes(b"no")
    with pytest.raises(DeltaflError, match="is not TensorFlow Federated's FEMNIST"):
        load_femnist(tmp_path)


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / f"fed_emnist_{part}.h5").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'h5py': pip install 'deltafl\[data\]'"):
        load_femnist(tmp_path)


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
        *(
            ({"bytes": png(1, kind=kind)}, "a", 1, "row 6: image cannot be decoded: cannot identify")
            for kind in ("EPS", "BMP")
        ),
        (None, "a", 1, "row 6: image must hold the bytes"),
        (good, None, 1, "row 6: writer_id is missing"),
    ]
    for image, writer, label, words in changes:
        write_parquet(tmp_path / "t.parquet", [good] * 5 + [image], ["a"] * 5 + [writer], [1] * 5 + [label])
        with pytest.raises(DeltaflError, match=words):
            load_femnist(tmp_path)
    parquet, arrow = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow")
    parquet.write_table(arrow.table({"image": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DeltaflError, match=r"t\.parquet has no column 'character'"):
        load_femnist(tmp_path)
    (tmp_path / "t.parquet").write_bytes(b"no")
    with pytest.raises(DeltaflError, match="is not a whole Parquet file"):
        load_femnist(tmp_path)


def test_the_task_takes_all_owners_unless_a_number_is_set() -> None:
    assert make_settings(RunSettings, {"task": "femnist"}).clients is None
    assert make_settings(RunSettings, {"task": "femnist", "clients": 50}).clients == 50
    assert make_settings(RunSettings, {"task": "femnist", "partition": "iid"}).clients == 177
