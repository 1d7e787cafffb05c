"""One update a client in a federation's server: bfloat16, in a file, over restarts and with clients who join and go."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord
from safetensors.numpy import load as load_tensors

from deltafl import DeltaflError, make_sampler
from deltafl.flower import DeltaStrategy
from deltafl.flower import saved as saved_module
from deltafl.flower.arrays import Layout
from deltafl.flower.clients import ClientInfo
from deltafl.flower.federation import Federation
from deltafl.flower.replies import ClientReply
from deltafl.flower.rules import Rules, ServerMemory
from deltafl.flower.saved import load, save
from deltafl.io import flatten
from deltafl.scale import memory_budget as budget_module
from deltafl.scale.rows import MappedRows, RowFormat

from .grid import FakeGrid, configs, linear_app, running

D = 5
MODEL = {"x": np.zeros(D, np.float32)}
FORMS = [("float32", True), ("bfloat16", False), ("bfloat16", True)]


class CrashError(Exception):
    """Stands for kill -9."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafl.flower.registration.time.sleep", lambda seconds: None)


def federation(root: Path, dtype: str = "float32", mapped: bool = False, n: int = 3) -> Federation:
    memory = ServerMemory(dtype, root / "disk" if mapped else None, root / "state")
    rules = Rules(make_sampler("innovation"), n, "innovation-damped", memory=memory)
    return Federation(rules, MODEL, Layout.of(MODEL))


def admit(fed: Federation, m: int, start: int = 0) -> None:
    fed.admit({f"client:{i}": ClientInfo(10 + 5 * i) for i in range(start, m)})


def play(fed: Federation, rounds: int, state: Path | None = None) -> None:
    """Rounds in which client i moves entry k by a number of its own and the round's."""
    for _ in range(rounds):
        cohort, sent, answers = fed.open(set(fed.clients.keys)), fed.arrays()["x"], {}
        for client in cohort.client_n.tolist():
            number = int(fed.clients.keys[client].removeprefix("client:"))
            answers[client] = ClientReply(
                {"x": sent + np.sin(number + fed.current.round + np.arange(D, dtype=np.float32))}
            )
        fed.close(cohort, answers)
        if state is not None:
            save(state, fed)


def restarted(fed: Federation, state: Path) -> Federation:
    memory = fed.rules.memory
    plain = ServerMemory(memory.dtype, memory.path, memory.state_path)
    again = Federation(Rules(fed.rules.sampler, fed.rules.n, fed.rules.estimator, memory=plain), MODEL, fed.layout)
    assert load(state, again)
    return again


def told(fed: Federation) -> list[bytes]:
    """Everything that the state says, its rows read one by one."""
    rows = fed.current.control.control.own.control_md
    others = [array.tobytes() for name, array in flatten(fed.current) if "control_md" not in name]
    return [*others, *(np.asarray(rows[client]).tobytes() for client in range(len(fed.clients.keys)))]


def file_of(fed: Federation) -> Path:
    rows = fed.current.control.control.own.control_md
    assert isinstance(rows, MappedRows)
    return rows.path


# --- the same rounds, wherever the rows are


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_gives_the_bits_of_ram_over_joins_departures_and_restarts(tmp_path: Path, dtype: str) -> None:
    seen = []
    for mapped, restarts in ((False, False), (True, False), (True, True), (False, True)):
        root = tmp_path / f"{mapped}-{restarts}"
        fed = federation(root, dtype, mapped)
        for change in (lambda f: admit(f, 6), lambda f: admit(f, 9, 6), lambda f: f.forget({"client:1", "client:4"})):
            if restarts and fed.state is not None:
                fed = restarted(fed, root / "state")
            change(fed)
            play(fed, 6, root / "state")
        admit(fed, 12, 9)
        play(fed, 5, root / "state")
        seen.append(told(fed))
        if mapped:
            size = 10 * D * (4 if dtype == "float32" else 2)
            assert file_of(fed).stat().st_size == size
            names = {path.name for path in file_of(fed).parent.iterdir()}
            assert names == {"rows-2.bin", "round"}  # the file of before clients were forgotten is gone
            saved = dict(flatten(fed.current))
            assert saved["state.control.control.own.control_md.row_kd"].size == 0
    assert all(other == seen[0] for other in seen[1:])


def test_the_saved_state_holds_the_rows_of_a_round_and_no_more(tmp_path: Path) -> None:
    sizes = []
    for m in (10, 1000):
        fed = federation(tmp_path / str(m), mapped=True)
        admit(fed, m)
        play(fed, 2, tmp_path / str(m) / "state")
        arrays = load_tensors((tmp_path / str(m) / "state" / "federation-2.safetensors").read_bytes())
        sizes.append(arrays["state.control.control.own.control_md.row_kd"].shape)
    assert sizes == [(3, D), (3, D)]


@pytest.mark.parametrize("crash", ["mark", "settle", "stamp", "join", "forget"])
def test_killed_anywhere_it_goes_on_to_the_same_bits(
    tmp_path: Path, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state is valid, its rows are in the file or the note of it is there; or after the clients changed."""
    state = tmp_path / "state"

    def changed(fed: Federation) -> None:
        if crash == "forget":
            fed.forget({"client:2"})
        else:
            admit(fed, 8, 6)

    def stop(*_: Any) -> Any:
        raise CrashError

    through, fed = federation(tmp_path / "through", mapped=True), federation(tmp_path, mapped=True)
    for one, folder in ((through, tmp_path / "through" / "state"), (fed, state)):
        admit(one, 6)
        play(one, 4, folder)
        changed(one)
        play(one, 0 if one is fed and crash in ("join", "forget") else 1)
    with monkeypatch.context() as patch, pytest.raises(CrashError):
        if crash == "mark":
            patch.setattr(saved_module, "write_atomically", stop)
        elif crash == "settle":
            patch.setattr(saved_module, "settled", stop)
        elif crash == "stamp":
            patch.setattr(saved_module, "note_round", stop)
        else:
            raise CrashError
        save(state, fed)
    again = restarted(fed, state)
    if again.current.round == 4:
        changed(again)
        play(again, 1)
    assert again.current.round == 5
    for one in (through, again):
        play(one, 4, one.rules.memory.state_path)
    assert told(again) == told(through)


def test_a_state_and_a_file_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A copy of one of them is put back: the server would count on updates that nobody sent."""
    fed = federation(tmp_path, mapped=True)
    admit(fed, 6)
    play(fed, 2, tmp_path / "state")
    for name in ("state", "disk"):
        shutil.copytree(tmp_path / name, tmp_path / f"old-{name}")
    play(fed, 3, tmp_path / "state")
    for name in ("state", "disk"):
        shutil.copytree(tmp_path / name, tmp_path / f"new-{name}")
    for state, disk in (("old", "new"), ("new", "old")):
        for name, age in (("state", state), ("disk", disk)):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(tmp_path / f"{age}-{name}", tmp_path / name)
        with pytest.raises(DeltaflError, match=r"do not belong to the state in .* put back copies of both"):
            restarted(fed, tmp_path / "state")
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(DeltaflError, match="do not belong to the state"):
        restarted(fed, tmp_path / "state")
    for name in ("state", "disk"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(tmp_path / f"old-{name}", tmp_path / name)
    assert restarted(fed, tmp_path / "state").current.round == 2


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (("float32", False), ("bfloat16", False), "memory_dtype = float32, now it is bfloat16; write it as it was"),
        (("bfloat16", True), ("float32", True), "memory_dtype = bfloat16, now it is float32"),
        (("float32", False), ("float32", True), r"memory_path = None, now it is .*disk"),
        (("float32", True), ("float32", False), r"memory_path = .*disk, now it is None"),
    ],
)
def test_a_state_of_another_memory_is_refused(
    tmp_path: Path, before: tuple[str, bool], now: tuple[str, bool], message: str
) -> None:
    fed = federation(tmp_path, *before)
    admit(fed, 4)
    play(fed, 1, tmp_path / "state")
    with pytest.raises(DeltaflError, match=message):
        load(tmp_path / "state", federation(tmp_path, *now))


def test_no_room_for_a_second_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(tmp_path, mapped=True)
    admit(fed, 4)
    play(fed, 1, tmp_path / "state")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DeltaflError, match=r"cannot write .*rows-2.bin \(No space"):
        patch.setattr("os.fsync", full)
        fed.forget({"client:1"})
    assert len(fed.clients.keys) == 4
    assert told(restarted(fed, tmp_path / "state")) == told(fed)


# --- does it fit?


def test_before_the_first_round_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five numbers a client in float32, four times over while they are saved: 80 bytes."""
    monkeypatch.setattr(budget_module, "free_ram", lambda: 800)
    fed = federation(tmp_path)
    admit(fed, 10)
    with pytest.raises(DeltaflError, match=r"up to 880 B of RAM and 800 B are free: set memory_path .*, memory_dtype"):
        admit(fed, 11)
    half = federation(tmp_path, "bfloat16")
    admit(half, 20)
    with pytest.raises(DeltaflError, match=r"set memory_path \(a folder on a disk\), or an estimator that keeps one"):
        admit(half, 21)
    mapped = federation(tmp_path, mapped=True, n=10)
    admit(mapped, 5000)
    with pytest.raises(DeltaflError, match="880 B of RAM and 800 B are free: set a lower n, memory_dtype"):
        admit(federation(tmp_path, mapped=True, n=11), 5000)
    unsaved = Federation(Rules(make_sampler("innovation"), 3, "innovation"), MODEL, Layout.of(MODEL))
    admit(unsaved, 40)
    with pytest.raises(DeltaflError, match="up to 820 B of RAM"):
        admit(unsaved, 41)


def test_later_on_newcomers_alone_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(tmp_path)
    admit(fed, 10)
    play(fed, 1)
    monkeypatch.setattr(budget_module, "free_ram", lambda: 11 * 80 - 3 * 20)  # three rows of 20 bytes are there already
    admit(fed, 11)
    monkeypatch.setattr(budget_module, "free_ram", lambda: 12 * 80 - 3 * 20 - 1)
    admit(fed, 12)
    assert len(fed.clients.keys) == 11
    assert re.fullmatch(
        r"client:11 cannot join: the memory of one update a client takes up to 960 B .*", fed.warnings[0]
    )
    play(fed, 3)
    admit(fed, 12)
    assert len(fed.clients.keys) == 12  # by then more rows are there, and nothing more is needed for them


def test_after_a_restart_the_whole_memory_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(tmp_path)
    admit(fed, 10)
    play(fed, 1, tmp_path / "state")
    monkeypatch.setattr(budget_module, "free_ram", lambda: 799)
    with pytest.raises(DeltaflError, match="takes up to 800 B of RAM and 799 B are free"):
        restarted(fed, tmp_path / "state")


def test_other_estimators_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "free_ram", lambda: 0)
    for estimator in ("horvitz-thompson", "difference", "innovation-remote"):
        fed = Federation(Rules(make_sampler("uniform"), 3, estimator), MODEL, Layout.of(MODEL))
        admit(fed, 5)
        assert len(fed.clients.keys) == 5


# --- the strategy


def start(strategy: DeltaStrategy, m: int, rounds: int) -> Federation:
    arrays = ArrayRecord({"x": Array(np.zeros(D, np.float32))})
    with running():
        strategy.start(FakeGrid(linear_app(), configs(m)), arrays, num_rounds=rounds, timeout=30)
    assert strategy.federation is not None
    return strategy.federation


def test_the_strategy_gives_the_models_of_ram_over_restarts(tmp_path: Path) -> None:
    params = {}
    for dtype, mapped in [("float32", False), *FORMS]:
        given: dict[str, Any] = {"memory_dtype": dtype, "state_path": tmp_path / f"{dtype}-{mapped}"}
        given |= {"memory_path": tmp_path / "disk"} if mapped else {}
        for rounds, m in ((4, 7), (8, 9)):
            fed = start(DeltaStrategy("innovation", 3, seed=4, **given), m, rounds)
        params[dtype, mapped] = fed.params_d
    assert params["float32", False].any()
    assert np.array_equal(params["float32", False], params["float32", True])
    assert np.array_equal(params["bfloat16", False], params["bfloat16", True])
    np.testing.assert_allclose(params["bfloat16", True], params["float32", True], atol=0.05)
    assert len(list((tmp_path / "disk").iterdir())) == 2  # a folder for each state


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"state_path": "state"},
            r"\(float32\): at most 560 B of RAM, checkpoints included, and 280 B in {root}/state",
        ),
        ({"memory_dtype": "bfloat16"}, r"\(bfloat16\): at most 70 B of RAM"),
        (
            {"memory_path": "disk", "state_path": "state"},
            r"\(float32\): at most 240 B of RAM, .* included, and 260 B in {root}/disk/federation-[0-9a-f]{{8}}",
        ),
    ],
)
def test_the_log_says_what_the_memory_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], words: str
) -> None:
    """7 rows of 20 bytes are 140 in float32: four times that in RAM, twice on disk; without a saved state just that.

    In a file: the rows once, and those of 3 clients, 60 bytes, four times in RAM, twice on disk.
    """
    given = {key: value if key == "memory_dtype" else str(tmp_path / value) for key, value in given.items()}
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO, logger="flwr"):
        start(DeltaStrategy("innovation", 3, **given), 7, 3)
    said = [message for message in caplog.messages if "remembers one update" in message]
    assert len(said) == 1
    begins = "innovation remembers one update a client, 7 x 5 numbers "
    assert re.fullmatch(begins + words.format(root=re.escape(str(tmp_path))), said[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_dtype": "float16"}, "memory_dtype is 'float16'; write 'float32' or 'bfloat16'"),
        ({"memory_dtype": ["float32"]}, "write 'float32' or 'bfloat16'"),
        ({"memory_path": "rows"}, r"memory_path is 'rows' and there is no state_path: .*write state_path=..., too"),
        ({"memory_path": 3, "state_path": "state"}, "memory_path is 3; write a folder on a disk, or None for RAM"),
        (
            {"memory_dtype": "bfloat16", "sampler": "pracdelta"},
            "memory_dtype is set, but with 'horvitz-thompson' the server remembers no update of a client; leave it out",
        ),
        (
            {"memory_path": "rows", "state_path": "state", "estimator": "innovation-remote"},
            "memory_path is set, but with 'innovation-remote'",
        ),
    ],
)
def test_memories_that_cannot_be_are_refused_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DeltaflError, match=message):
        DeltaStrategy(**{"sampler": "innovation", **given})


def test_rows_of_nobody_yet_are_resized_and_kept_without_a_file(tmp_path: Path) -> None:
    rows = MappedRows(RowFormat("float32", str(tmp_path / "none")), (4, 2)).replaced({3: np.ones(2, np.float32)})
    fewer = rows.resized(6).kept(np.array([5, 3, 0]))
    assert [row.tolist() for row in fewer] == [[0, 0], [1, 1], [0, 0]]
    assert not (tmp_path / "none").exists()
