"""``roles-lora``: what clients read, what is trained and sent, and that the base is the same every
time.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_archives import write

from deltafl.errors import DeltaflError
from deltafl.model.arrays import NamedArrays
from deltafl.model.vectors import flatten
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import make_task
from reproduction import reading, roles
from reproduction.data import ARCHIVES, TINY_ALPHABET

#: Of each layer 4 numbers an input and an output of three squares, 64 to 64, and of two matrices
#: between 64 and 256.
ADAPTERS = 2 * 4 * (3 * (64 + 64) + 2 * (64 + 256))


@pytest.fixture(scope="module")
def adapters() -> Any:
    """Not at the top: all workers would import peft, for ten seconds, and one plays these tests."""
    pytest.importorskip("peft")
    return import_module("reproduction.adapters")


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """99 roles of 200 characters."""
    monkeypatch.setitem(ARCHIVES, "tinyshakespeare", dict(ARCHIVES["tinyshakespeare"]))
    letters = np.frombuffer(TINY_ALPHABET.encode(), np.uint8)
    text = letters[np.random.default_rng(0).integers(0, len(letters), 99 * 200)]
    offsets = 200 * np.arange(100)
    write(tmp_path, "tinyshakespeare", {"text": text, "offsets": offsets, "role": np.arange(99)})
    return tmp_path


def test_clients_are_the_roles_that_the_base_has_not_read_each_in_its_hand(archive: Path) -> None:
    task = make_task("roles-lora", seed=0, data_dir=archive)
    data = task.dataset
    text = reading.texts(archive)[reading.READ + 1].upper()
    # 160 characters for training and 40 for the test: four sequences of 32, and one.
    token = reading.tokens_of(text)
    assert task.num_clients == 64
    assert task.client_rows[1].tolist() == [4, 5, 6, 7]
    np.testing.assert_array_equal(data.train_x[4:8].ravel(), token[:128])
    np.testing.assert_array_equal(data.train_y[4:8].ravel(), token[1:129])
    np.testing.assert_array_equal(data.test_y[1], token[161:193])
    assert task.test_clients is not None
    assert task.test_clients.tolist() == list(range(64))
    again = make_task("roles-lora", seed=1, data_dir=archive)
    assert again.data == task.data
    assert data.name.startswith("tiny Shakespeare by role in 8 hands, base ")


def test_hands_keep_the_length_and_the_alphabet() -> None:
    for number in range(len(roles.HANDS)):
        written = roles.in_hand(TINY_ALPHABET, number)
        assert len(written) == len(TINY_ALPHABET)
        assert set(written) <= set(TINY_ALPHABET)
    assert roles.in_hand("To be", 0) == "To be"
    assert roles.in_hand("To be", 6) == "Gb or"


def test_the_adapters_alone_are_trained_and_sent(archive: Path) -> None:
    pytest.importorskip("peft")
    task = make_task("roles-lora", seed=0, data_dir=archive)
    engine = Engine(task, LocalWork(lr=0.3, steps=2, batch_size=2), 0)
    assert (engine.route.path, engine.num_params) == ("loop", ADAPTERS)
    arrays = NamedArrays.of(roles.make_model()).arrays
    sent = engine.parts.sent(arrays)
    assert sum(array.size for array in sent.values()) == ADAPTERS
    assert all(".lora_" in name for name in sent)
    assert len(engine.parts.names("frozen")) == len(arrays) - len(sent)
    # The second matrices begin at 0, so that the first ones do not matter yet.
    token = torch.from_numpy(task.dataset.test_x).long()
    output = roles.make_model()(token)
    torch.testing.assert_close(output, roles.make_model()(token))
    right = (output.argmax(dim=1).numpy() == task.dataset.test_y).mean()
    assert engine.evaluate(engine.initial_params()).accuracy == pytest.approx(right)
    assert task.chance == np.unique(task.dataset.test_y, return_counts=True)[1].max() / (64 * 32)
    assert engine.train(engine.initial_params(), 0, np.arange(2)).update_nd.any(axis=1).all()


def test_a_base_is_the_same_every_time_and_written_in_half_precision(
    tmp_path: Path, adapters: Any
) -> None:
    text = "To be, or not to be: that is the question. " * 3
    one, two = (adapters.train_base(text, steps=2) for _ in range(2))
    assert torch.equal(*(torch.from_numpy(flatten(model)) for model in (one, two)))
    path = tmp_path / "base.npz"
    adapters.write_base(path, one)
    state = adapters.adapted(path).state_dict()
    np.testing.assert_allclose(state["head.weight"], one.head.weight.detach(), rtol=1e-3, atol=1e-6)


def test_without_a_base_the_cure_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "BASE", tmp_path / "none.npz")
    with pytest.raises(DeltaflError, match=r"python -m reproduction\.adapters makes it"):
        roles.load_roles(tmp_path)
