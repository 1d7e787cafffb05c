"""LEAF's JSON files, made here and tiny: FEMNIST's images, CelebA's pictures, Shakespeare's
lines.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.tasks import encode_text, make_task
from deltafl.tasks.data.leaf import LEAF_ALPHABET, load_celeba, load_femnist, load_shakespeare
from tools.pictures import png

Users = dict[str, tuple[list[Any], list[Any]]]


def write_leaf(
    root: Path, part: str, shares: Users, file: str = "all_data_0_keep_0.json", **changed: Any
) -> Path:
    content = {
        "users": list(shares),
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


@pytest.mark.parametrize("load", [load_femnist, load_celeba, load_shakespeare])
def test_missing_files_are_named(load: Any, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="needs LEAF's data/train") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


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
    np.testing.assert_equal(task.test_clients, [1, -1])
    assert data.name == "FEMNIST (LEAF's JSON), 3 clients"
    assert (
        make_task("femnist", seed=0, data_dir=tmp_path, partition="iid", num_clients=2).test_clients
        is None
    )


GOOD = pixels(1)
BROKEN: list[tuple[Users, dict[str, Any], str]] = [
    ({}, {}, "there is no train example"),
    ({"f1": ([GOOD, GOOD[1:]], [1, 2])}, {}, "user 'f1': every x must be 784 numbers"),
    ({"f1": ([[*GOOD[1:], float("nan")]], [1])}, {}, "user 'f1': every x"),
    ({"f1": ([GOOD, [10**400, *GOOD[1:]]], [1, 2])}, {}, "user 'f1': every x"),
    ({"f1": ([GOOD, GOOD], [1, 62])}, {}, "user 'f1': every y must be a whole number from 0 to 61"),
    ({"f1": ([GOOD], [1, 2])}, {}, "user 'f1' needs lists x and y of the same length"),
    ({"f1": ([GOOD], [1])}, {"users": ["f7"]}, "user 'f7' needs lists x and y"),
    (
        {"f1": ([GOOD], [1])},
        {"user_data": {"f1": {"x": []}}},
        r"of LEAF: user_data\.f1\.y: a value is missing",
    ),
]


@pytest.mark.parametrize(("users", "changed", "words"), BROKEN)
def test_broken_files_are_named(
    users: Users, changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_leaf(tmp_path, "test", TEST)
    path = write_leaf(tmp_path, "train", users, **changed)
    with pytest.raises(DeltaflError, match=words) as caught:
        load_femnist(tmp_path)
    assert users == {} or str(path) in str(caught.value)


def write_faces(root: Path, levels: dict[str, int]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    folder = root / "raw" / "img_align_celeba"
    folder.mkdir(parents=True, exist_ok=True)
    for name, level in levels.items():
        image_module.fromarray(np.full((218, 178, 3), level, np.uint8)).save(folder / name)


def test_celeba_in_leafs_json(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_leaf(
        root,
        "train",
        {"40": (["000001.jpg", "000002.jpg"], [1.0, 0.0]), "7": (["000003.jpg"], [1])},
    )
    write_leaf(root, "test", {"40": (["000004.jpg"], [0.0])})
    write_faces(root, {"000001.jpg": 10, "000002.jpg": 20, "000003.jpg": 30, "000004.jpg": 40})
    task = make_task("celeba", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert data.train_x.shape == (3, 3, 84, 84)
    assert np.abs(data.train_x[:, :, 40, 40] - np.array([[10], [20], [30]])).max() <= 2
    assert data.train_y.tolist() == [1, 0, 1]
    assert [rows.tolist() for rows in task.client_rows] == [[0, 1], [2]]
    np.testing.assert_equal(task.test_clients, [0])
    assert data.name == "CelebA (LEAF's JSON), 2 clients"
    # Another picture under the same name is decoded anew, not taken from the cache.
    write_faces(root, {"000003.jpg": 200})
    assert abs(int(load_celeba(tmp_path).train_x[2, 0, 40, 40]) - 200) <= 2


def test_broken_celeba_is_named(tmp_path: Path) -> None:
    write_leaf(tmp_path, "test", {"7": (["a.jpg"], [0])})
    write_faces(tmp_path, {"a.jpg": 10})
    pictures = tmp_path / "raw" / "img_align_celeba"
    (pictures / "b.jpg").write_bytes(b"no")
    (pictures / "eps.jpg").write_bytes(png(1, 84, "EPS"))
    for name, label, words in (
        ("c.jpg", 1, "user '7': x is 'c.jpg', which is not the name of a picture"),
        ("../../train/x.jpg", 1, "user '7': x is '../../train/x.jpg'"),
        ("b.jpg", 1, r"the picture .*b\.jpg cannot be decoded"),
        ("eps.jpg", 1, r"the picture .*eps\.jpg cannot be decoded: cannot identify"),
        ("a.jpg", 0.5, "user '7': every y must be a whole number from 0 to 1"),
    ):
        write_leaf(tmp_path, "train", {"7": (["a.jpg", name], [1, label])})
        with pytest.raises(DeltaflError, match=words):
            load_celeba(tmp_path)


def test_encode_text_maps_unknown_characters_to_spaces() -> None:
    assert len(set(LEAF_ALPHABET)) == 80
    code = np.array([ord(letter) for letter in "az\n\u00e9\u4e2d"])
    assert encode_text(code, LEAF_ALPHABET).tolist() == [53, 78, 0, 1, 1]


def test_shakespeare_in_leafs_json(tmp_path: Path) -> None:
    line = "Now is the winter of our discontent, made glorious summer by this sun of York; and"
    windows = [line[k : k + 80] for k in range(2)]
    users = {"HENRY": (windows, [line[80], line[81]]), "ANNE": ([" " * 79 + "\u00e6"], ["}"])}
    write_leaf(tmp_path / "data", "train", users)
    write_leaf(tmp_path / "data", "test", {"HENRY": (windows[:1], [line[80]])})
    task = make_task("shakespeare", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert "".join(LEAF_ALPHABET[token] for token in data.train_x[1]) == windows[1]
    assert [LEAF_ALPHABET[token] for token in data.train_y] == [line[80], line[81], "}"]
    assert (data.train_x[2] == 1).all()  # a character that the alphabet lacks is a space
    assert [rows.tolist() for rows in task.client_rows] == [[2], [0, 1]]
    np.testing.assert_equal(task.test_clients, [1])
    for x, y, words in (
        (windows[0][:79], "a", "x must be a string of length 80"),
        (windows[0], "ab", "y must be"),
    ):
        write_leaf(tmp_path / "data", "train", {"HENRY": ([windows[0], x], ["a", y])})
        with pytest.raises(DeltaflError, match=f"user 'HENRY': every {words}"):
            load_shakespeare(tmp_path)


def write_h5(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """A file of arrays named WRITER_pixels and WRITER_label."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(f"examples/{name.replace('_', '/')}", data=array)


def test_femnist_in_the_h5_of_tensorflow_federated(tmp_path: Path) -> None:
    train, test = (tmp_path / f"fed_emnist_{part}.h5" for part in ("train", "test"))
    image = np.ones((3, 28, 28), np.float32)
    image[:, 0, 0] = np.array([51, 102, 153]) / 255
    label = np.array([1, 2, 61], np.int32)
    write_h5(
        train, f0_pixels=image[:2], f0_label=label[:2], f1_pixels=image[2:], f1_label=label[2:]
    )
    write_h5(test, f1_pixels=image[:1], f1_label=label[:1])
    task = make_task("femnist", seed=0, data_dir=tmp_path)
    assert task.dataset.train_x[:, 0, 0, 0].tolist() == [51, 102, 153]
    assert task.dataset.train_y.tolist() == [1, 2, 61]
    assert [rows.tolist() for rows in task.client_rows] == [[0, 1], [2]]
    np.testing.assert_equal(task.test_clients, [1])
    for x, y in ((image + 1, label), (image, label[:2])):
        write_h5(train, f0_pixels=x, f0_label=y)
        with pytest.raises(
            DeltaflError,
            match=r"fed_emnist_train\.h5: user 'f0': every x must be 784 numbers from 0",
        ):
            load_femnist(tmp_path)
    write_h5(train, f0_pixels=image)
    with pytest.raises(
        DeltaflError, match=r"fed_emnist_train\.h5 is not TensorFlow Federated's FEMNIST in HDF5"
    ):
        load_femnist(tmp_path)


def test_without_h5py_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("train", "test"):
        (tmp_path / f"fed_emnist_{part}.h5").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'h5py': pip install 'deltafl\[data\]'"):
        load_femnist(tmp_path)


def test_the_task_takes_all_owners_unless_a_number_is_set() -> None:
    assert make_settings(RunSettings, {"task": "femnist"}).clients is None
    assert make_settings(RunSettings, {"task": "femnist", "clients": 50}).clients == 50
    assert make_settings(RunSettings, {"task": "femnist", "partition": "iid"}).clients == 177


@pytest.mark.parametrize(
    ("sampler", "sample", "refused"),
    [
        ("uniform", 3, False),
        ("uniform", 4, True),
        ("uniform+sample=4", 3, True),
        # It only begins with the task's own n, which is larger.
        ("uniform+relative_error=0.5", None, False),
    ],
)
def test_no_more_clients_are_selected_than_the_files_have(
    sampler: str, sample: int | None, refused: bool, tmp_path: Path
) -> None:
    owners = {f"f{number}": ([pixels(number)], [number]) for number in range(3)}
    for part in ("train", "test"):
        write_leaf(tmp_path, part, owners)
    given: Any = {"task": "femnist", "data_dir": str(tmp_path), "rounds": 1, "sampler": sampler}
    if sample is not None:
        given["sample"] = sample
    settings = make_settings(RunSettings, given)
    with ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(DeltaflError, match="cannot sample 4 of 3 clients"))
        run_single(settings, tmp_path / "run", lambda _: None)
    assert (tmp_path / "run").exists() != refused
