"""The state on disk: resuming to the same bits, crashes, other settings, damage."""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from conftest import same_tree
from deltafl import DeltaflError, DifferentialPrivacy
from deltafl.federation.federation import Federation
from deltafl.federation.saved import FILES, load, save
from deltafl.store.sealed import write_sealed
from test_arrays import MODEL

from .tools import admit, federation, play, sizes_of


@pytest.mark.parametrize(
    "label",
    [
        "pracdelta",
        "innovation@local-pivotal",
        "cluster-is",
        "balanced",
        "census",
        "pracdelta@pivotal@difference-own",
    ],
)
def test_a_resumed_federation_has_the_same_bits(label: str, tmp_path: Path) -> None:
    def fresh() -> Federation:
        return federation(label, {**MODEL, "x": np.zeros(3, np.float32)}, seed=5)

    through = fresh()
    stopped = fresh()
    again = fresh()
    for fed in (through, stopped):
        admit(fed, sizes_of(7))
        play(fed, 3)
    save(tmp_path, stopped)
    assert load(tmp_path, again)
    assert again.keys == through.keys
    for fed in (through, again):
        admit(fed, sizes_of(9, start=7))
        play(fed, 3)
    assert again.current.round == 6 + (label == "census")
    assert same_tree(again.current, through.current)
    assert again.arrays().keys() == through.arrays().keys()
    assert all(
        np.array_equal(again.arrays()[name], array) for name, array in through.arrays().items()
    )


def test_a_half_written_state_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation(n=2, m=4)
    play(fed, 1)
    save(tmp_path, fed)
    kept = fed.current
    play(fed, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        save(tmp_path, fed)
    again = federation(n=2)
    assert load(tmp_path, again)
    assert same_tree(again.current, kept)
    save(tmp_path, fed)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "was saved with another seed; write it as it was"),
        ({"estimator": "hajek"}, "estimator"),
        ({"weights": "uniform"}, "weights"),
        ({"identity": "config"}, "identity = auto, now it is config"),
        ({"aux": 4}, "aux = 0, now it is 4"),
        ({"average": 0.5}, "average = 0.0, now it is 0.5"),
        ({"model": {"x": np.zeros(4, np.float32)}}, "other arrays"),
    ],
)
def test_a_state_of_other_settings_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fed = federation(n=2, m=4)
    play(fed, 1)
    save(tmp_path, fed)
    with pytest.raises(DeltaflError, match=message):
        load(tmp_path, federation(**{"n": 2, **change}))
    assert load(tmp_path, federation(n=3))  # the cohort size may change


def test_a_state_with_privacy_keeps_its_rate(tmp_path: Path) -> None:
    """Else a restart would compute epsilon with a rate that the rounds before did not have."""
    private: Any = {
        "label": "uniform@poisson",
        "dp": DifferentialPrivacy(1.0, 1.0, 1e-5),
        "n": 2,
        "min_clients": 4,
        "seed": 2**60 + 7,
    }
    fed = federation(m=4, **private)
    play(fed, 1)
    save(tmp_path, fed)
    assert load(tmp_path, federation(**private))
    with pytest.raises(DeltaflError, match=r"n / min_clients = 0\.5, now it is 0\.25"):
        load(tmp_path, federation(**{**private, "n": 1}))


def test_a_missing_state_is_no_new_beginning(tmp_path: Path) -> None:
    play(federation(m=4), 2, save_to=tmp_path)
    (tmp_path / "federation.safetensors").unlink()
    with pytest.raises(
        DeltaflError, match=r"has no federation\.safetensors; rename federation-1\.safetensors"
    ):
        load(tmp_path, federation())


@pytest.mark.parametrize("size", [0, 4, 40, -1])
def test_a_damaged_state_is_one_sentence(size: int, tmp_path: Path) -> None:
    play(federation(m=10), 2, save_to=tmp_path)
    file = tmp_path / "federation.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DeltaflError, match=r"put federation-1\.safetensors in its place"):
        load(tmp_path, federation())


def test_no_damage_is_used_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 40 places of each kind of file; the command takes any number."""
    pytest.importorskip("flwr")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import_module("flower_damage").main(40)
    assert "refused" in capsys.readouterr().out


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "federation.safetensors", {"state.params_d": np.zeros(3)})
    with pytest.raises(DeltaflError, match="is of another version of deltafl"):
        load(tmp_path, federation())
