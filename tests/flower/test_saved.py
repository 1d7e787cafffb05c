"""The state on disk: resuming to the same bits, crashes, other settings, damage."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from conftest import same_tree
from deltafl import DeltaflError
from deltafl.flower.federation import Federation
from deltafl.flower.saved import load, save

from .hosts import admit, federation, play, sizes_of
from .test_arrays import MODEL


@pytest.mark.parametrize(
    "label", ["pracdelta", "innovation", "cluster-is", "balanced", "pracdelta@pivotal@difference-own"]
)
def test_a_resumed_federation_has_the_same_bits(label: str, tmp_path: Path) -> None:
    def fresh() -> Federation:
        return federation(label, {**MODEL, "x": np.zeros(3, np.float32)}, seed=5)

    through, stopped, again = fresh(), fresh(), fresh()
    for fed in (through, stopped):
        admit(fed, sizes_of(7))
        play(fed, 3)
    save(tmp_path, stopped)
    assert load(tmp_path, again)
    assert again.clients.keys == through.clients.keys
    for fed in (through, again):
        admit(fed, sizes_of(9, start=7))
        play(fed, 3)
    assert again.current.round == 6
    assert same_tree(again.current, through.current)
    for name, array in through.arrays().items():
        assert np.array_equal(again.arrays()[name], array)
        assert again.arrays()[name].dtype == array.dtype


def test_a_norm_guard_bounds_a_step_after_a_restart_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"norm_guard": 2.0, "weights": "uniform"}
    fed = federation("uniform", **settings, m=6)
    play(fed, 6)
    save(tmp_path, fed)
    fed = federation("uniform", **settings)
    assert load(tmp_path, fed)
    before_d = fed.params_d.copy()
    (info,) = play(fed, 1, targets=dict.fromkeys(range(6), 1e4))
    assert info.clip_factor < 0.01
    assert np.linalg.norm(fed.params_d - before_d) < 2 * np.sqrt(3) * 5
    with pytest.raises(DeltaflError, match=r"norm_guard = 2\.0, now it is None"):
        load(tmp_path, federation("uniform", weights="uniform"))


def test_a_half_written_state_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(n=2, m=4)
    play(fed, 1)
    save(tmp_path, fed)
    kept = fed.current
    play(fed, 1)
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == "federation.json":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        save(tmp_path, fed)
    again = federation(n=2)
    assert load(tmp_path, again)
    assert same_tree(again.current, kept)
    save(tmp_path, fed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["federation-2.safetensors", "federation.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed = 0, now it is 1"),
        ({"estimator": "hajek"}, "estimator"),
        ({"weights": "uniform"}, "weights"),
        ({"aux": 4}, "aux = 0, now it is 4"),
        ({"model": {"x": np.zeros(4, np.float32)}}, "other arrays"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    fed = federation(n=2, m=4)
    play(fed, 1)
    save(tmp_path, fed)
    with pytest.raises(DeltaflError, match=message):
        load(tmp_path, federation(**{"n": 2, **change}))
    assert load(tmp_path, federation(n=3))  # the cohort size may change
    mark = json.loads((tmp_path / "federation.json").read_text())
    assert [client["key"] for client in mark["clients"]] == list(fed.clients.keys)


@pytest.mark.parametrize("damage", ["cut", "empty", "{}", "no tensors", "cut tensors"])
def test_a_damaged_state_is_one_sentence(damage: str, tmp_path: Path) -> None:
    fed = federation(m=10)
    play(fed, 2, save_to=tmp_path)
    mark, tensors = tmp_path / "federation.json", tmp_path / "federation-2.safetensors"
    if damage == "no tensors":
        tensors.unlink()
    elif damage == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:40])
    else:
        mark.write_text({"cut": mark.read_text()[:50], "empty": "", "{}": json.dumps({})}[damage])
    with pytest.raises(DeltaflError, match=r"put a copy of the folder|is not valid JSON"):
        load(tmp_path, federation())
