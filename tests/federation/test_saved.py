"""The state on disk: resuming to the same bits, crashes, other settings, damage."""

import logging
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import same_tree
from deltafl import DeltaflError, DifferentialPrivacy
from deltafl.federation.federation import Federation
from deltafl.federation.saved import FILE, FILES, load, only_copy, save
from deltafl.store.sealed import read_sealed, write_sealed
from model.test_vectors import MODEL
from tools.kills import kills

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


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_have_their_types_after_a_restart(order: Any, tmp_path: Path) -> None:
    """The first round ended in an error where a counter had its bytes in the other order."""
    types = {"x": "f4", "half": "f2", "count": "i8", "small": "i2", "mask": "?"}
    model = {name: np.ones(3, np.dtype(type).newbyteorder(order)) for name, type in types.items()}
    fed = federation("uniform", model)
    admit(fed, sizes_of(4))
    for _ in range(2):
        play(fed, 1)
        save(tmp_path, fed)
        before = fed.arrays()
        fed = federation("uniform", model)
        assert load(tmp_path, fed)
        for name, array in fed.arrays().items():
            assert array.dtype == model[name].dtype and np.array_equal(array, before[name])


def test_a_kill_between_any_two_calls_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {}
    fed = federation(n=2, m=4)
    for _ in range(4):
        play(fed, 1)
        states[fed.current.round] = fed.current
        if fed.current.round < 4:
            save(tmp_path / "before", fed)

    def prepare() -> Callable[[], object]:
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "now")
        return lambda: save(tmp_path / "now", fed)

    outcomes = []
    for _ in kills(prepare, monkeypatch):
        again = federation(n=2)
        assert load(tmp_path / "now", again)
        assert same_tree(again.current, states[again.current.round])
        kept = [int(each.state.round) for each in again.kept]
        assert kept == sorted({*kept} - {again.current.round})
        outcomes.append(int(again.current.round))
        save(tmp_path / "now", again)  # over what the killed server left
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {3, 4}
    assert {path.name for path in (tmp_path / "now").iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "was saved with another seed; write it as it was"),
        ({"label": "pracdelta@pivotal"}, "the sampler pracdelta, now it is pracdelta@pivotal"),
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


@pytest.mark.skipif(sys.platform != "linux", reason="names that end with their process")
def test_two_servers_of_one_machine_do_not_go_on_from_copies(tmp_path: Path) -> None:
    with only_copy(tmp_path / "state", "0" * 16):
        with (
            pytest.raises(DeltaflError, match="another server of this machine goes on with a copy"),
            only_copy(tmp_path / "copy", "0" * 16),
        ):
            pass
        with only_copy(tmp_path / "another", "1" * 16):
            pass
    with only_copy(tmp_path / "copy", "0" * 16):
        pass


def test_a_state_of_another_numpy_goes_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = federation(n=2, m=4)
    play(fed, 2)
    save(tmp_path, fed)
    again = federation(n=2)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, again)
        assert not caplog.messages
        arrays, header = read_sealed(tmp_path / FILE, "")
        write_sealed(tmp_path / FILE, arrays, header | {"made_with": {"numpy": "1.0.0"}})
        assert load(tmp_path, federation(n=2))
    (text,) = caplog.messages
    assert "was made with numpy 1.0.0" in text and "last bits" in text


#: What stands in the place of an entry of a header.
WRONG: tuple[Any, ...] = (None, -1, 2**63 - 1, [], {}, "x", float("nan"), {"client:0": -1})


@pytest.mark.parametrize(
    "change",
    [
        {name: value}
        for name in ("round", "owner", "settings", "layout", "frozen", "clients", "scales", "note")
        for value in WRONG
    ]
    + [
        {"clients": {"client:0": 2**63}},
        {"clients": {f"client:{i}": 10 for i in range(3)}},
        {"scales": {"client:0": [float("nan"), 0.0]}},
        {"scales": {"client:0": [-1.0, 0.0]}},
        {"owner": "../../../../tmp/x"},
        {"made_with": 3},
    ],
)
def test_a_forged_header_is_refused_or_harmless(change: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(n=2, m=4)
    play(fed, 2)
    save(tmp_path, fed)
    arrays, header = read_sealed(tmp_path / FILE, "")
    write_sealed(tmp_path / FILE, arrays, header | change)
    again = federation(n=2)
    try:
        load(tmp_path, again)
    except DeltaflError as error:
        assert "\n" not in str(error)
        return
    play(again, 2)
    assert np.isfinite(again.params_d).all()
