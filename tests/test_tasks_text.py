"""Text by role: windows of 80 characters, tokens that stay whole numbers, an LSTM on both paths."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deltafl.errors import DeltaflError
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.local import LocalWork, train_serial
from deltafl.simulation.training.refusal import refusal
from deltafl.streams import stream
from deltafl.tasks.datasets import load_dataset
from deltafl.tasks.fitting import require_fitting
from deltafl.tasks.models import cross_entropy, next_token_lstm
from deltafl.tasks.registry import make_task
from deltafl.tasks.text import LEAF_ALPHABET, TINY_ALPHABET, encode, windows
from test_tasks_forms import write_leaf

REAL = os.environ.get("DELTAFL_DATA")
FILE = "tinyshakespeare_roles.npz"


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


def write_roles(folder: Path, **changed: npt.NDArray[Any]) -> Path:
    """Roles with 1,000, 999 and 1,200 characters; the letters count up, so every window tells where it starts."""
    length = [1000, 999, 1200]
    letters = np.frombuffer(TINY_ALPHABET[12:].encode(), np.uint8)
    arrays = {
        "text": np.concatenate([letters[(k + np.arange(n)) % 53] for k, n in enumerate(length)]),
        "offsets": np.concatenate([[0], np.cumsum(length)]),
        "role": np.array(["ROMEO", "NURSE", "JULIET"]),
    }
    np.savez(folder / FILE, **(arrays | changed))  # type: ignore[arg-type]
    return folder / FILE


def test_alphabets_have_their_sizes_and_each_character_once() -> None:
    assert [len(set(alphabet)) for alphabet in (TINY_ALPHABET, LEAF_ALPHABET)] == [65, 80]
    code = np.array([ord(letter) for letter in "az\n\u00e9\u4e2d"])
    assert encode(code, LEAF_ALPHABET).tolist() == [53, 78, 0, 1, 1]


def test_windows_against_a_slow_reference() -> None:
    token = np.arange(137, dtype=np.uint8)
    x, y = windows(token)
    starts = range(0, 137 - 80, 10)
    assert x.tolist() == [token[start : start + 80].tolist() for start in starts]
    assert y.tolist() == [start + 80 for start in starts]
    assert [len(windows(token[:length])[1]) for length in (80, 81, 90, 91)] == [0, 1, 1, 2]


def test_a_role_is_cut_in_time_and_short_roles_are_left_out(tmp_path: Path) -> None:
    path = write_roles(tmp_path)
    task = make_task("tinyshakespeare", seed=0, data_dir=tmp_path, partition="natural")
    data = task.dataset
    assert (str(data.train_x.dtype), data.train_x.shape[1], data.num_classes) == ("uint8", 80, 65)
    # 800 and 960 characters for training, 200 and 240 for the test.
    assert [len(rows) for rows in task.client_rows] == [72, 88]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [0] * 12 + [1] * 16
    first = 12 + np.arange(160) % 53  # letters go around 53 characters
    assert data.train_x[0].tolist() == first[:80].tolist()
    assert data.train_x[1].tolist() == first[10:90].tolist()
    assert data.train_y[:2].tolist() == [first[80], first[90]]
    assert data.test_x[0, 0] == 12 + 800 % 53
    assert data.name == f"tiny Shakespeare by role (other content than known: {path})"


def test_broken_roles_are_named(tmp_path: Path) -> None:
    offset = np.array([0, 1000, 1999, 3199])
    for key, array, words in (
        ("text", np.zeros(3199), "needs text uint8"),
        ("offsets", offset[:-1], "a whole offset before and after each role"),
        ("offsets", offset * 1.0, "a whole offset"),
        ("offsets", offset - 1, "offsets must rise from 0 to 3199"),
        ("offsets", offset[[0, 2, 1, 3]], "offsets must rise"),
        ("offsets", np.array([0, 0, 0, 3199]), ""),
    ):
        write_roles(tmp_path, **{key: array})
        if words:
            with pytest.raises(DeltaflError, match=words):
                load_dataset("tinyshakespeare", tmp_path)
    assert len(load_dataset("tinyshakespeare", tmp_path).columns["role"]) == 248  # one role of 3,199: (2559 - 80) / 10
    write_roles(tmp_path, text=np.zeros(900, np.uint8), offsets=np.array([0, 300, 600, 900]))
    with pytest.raises(DeltaflError, match="no role has 1000 characters"):
        load_dataset("tinyshakespeare", tmp_path)


def test_shakespeare_in_leafs_json(tmp_path: Path) -> None:
    line = "Now is the winter of our discontent, made glorious summer by this sun of York; and"
    said = [line[k : k + 80] for k in range(2)]
    users = {"HENRY": (said, [line[80], line[81]]), "ANNE": ([" " * 79 + "\u00e6"], ["}"])}
    path = write_leaf(tmp_path / "data", "train", users)
    write_leaf(tmp_path / "data", "test", {"HENRY": (said[:1], [line[80]])})
    task = make_task("shakespeare", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert "".join(LEAF_ALPHABET[token] for token in data.train_x[1]) == said[1]
    assert [LEAF_ALPHABET[token] for token in data.train_y] == [line[80], line[81], "}"]
    assert (data.train_x[2] == 1).all()  # a character that the alphabet lacks is a space
    assert [rows.tolist() for rows in task.client_rows] == [[2], [0, 1]]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [1]
    for x, y, words in (
        (said[0][:79], "a", "user 'HENRY', row 2: x must be a string of 80"),
        (3, "a", "row 2: x must be"),
        (said[0], "ab", "row 2: y must be one character"),
    ):
        write_leaf(tmp_path / "data", "train", {"HENRY": ([said[0], x], ["a", y])})
        with pytest.raises(DeltaflError, match=words) as caught:
            load_dataset("shakespeare", tmp_path)
        assert str(path) in str(caught.value)


def test_the_engine_gives_tokens_to_the_lstm_on_the_fast_path(tmp_path: Path) -> None:
    write_roles(tmp_path)
    task = make_task("tinyshakespeare", seed=0, data_dir=tmp_path, partition="natural")
    require_fitting(task, "tinyshakespeare", 0)
    assert refusal(task.make_model()) is None
    work = LocalWork(lr=0.5, steps=3, batch_size=8)
    engine = Engine(task, work, 3)
    params_d = engine.initial_params()
    assert engine.num_params == 8 * 65 + 4 * 128 * (8 + 128 + 2) + 129 * 65 == 79_561
    own = engine.train(params_d, 2, np.array([1]))
    rows = task.client_rows[1]
    x, y = torch.from_numpy(task.dataset.train_x[rows]).long(), torch.from_numpy(task.dataset.train_y[rows])
    twin = train_serial(task.make_model(), cross_entropy, x, y, params_d, work, stream(3, "batches", 2, 1))
    np.testing.assert_allclose(own.update_nd[0], twin.update_d, atol=1e-6)
    found = engine.evaluate(params_d)
    assert 0 <= found.client_accuracy <= 1


def test_the_lstm_learns_what_the_first_of_two_tokens_says() -> None:
    torch.manual_seed(0)
    model = next_token_lstm(5, hidden=16)
    x = torch.tensor([[a, b] for a in range(5) for b in range(5)])
    y = (2 * x[:, 0] + 1) % 5
    start_d = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    work = LocalWork(lr=1.0, steps=300, batch_size=None)
    result = train_serial(model, cross_entropy, x, y, start_d, work, np.random.default_rng(0))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(start_d + result.update_d), model.parameters())
    assert torch.equal(model(x).argmax(1), y)


@pytest.mark.skipif(REAL is None or not (Path(REAL) / FILE).is_file(), reason=f"DELTAFL_DATA holds no {FILE}")
def test_the_real_roles() -> None:
    assert REAL is not None
    task = make_task("tinyshakespeare", seed=0, data_dir=Path(REAL))
    assert task.dataset.name == "tiny Shakespeare by role"
    assert task.num_clients == 141
    assert set(np.unique(task.dataset.train_y)) <= set(range(65))
    assert task.test_clients is not None
    assert set(task.test_clients.tolist()) == set(range(141))
