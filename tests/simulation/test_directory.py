"""Records: what is written can be read and survives being cut anywhere; one process plays in a
folder.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import deltafl
from deltafl import (
    DeltaflError,
    Plan,
    Population,
    PracDelta,
    RoundState,
    close_round,
    init_round,
    open_round,
)
from deltafl.scale.named_arrays import named_arrays
from deltafl.server.optimizers import make_server_optimizer
from deltafl.simulation.folder.checkpoint import change_checkpoint, read_checkpoint
from deltafl.simulation.folder.directory import (
    DivergedError,
    RunDirectory,
    locked,
    recorded_settings,
)
from deltafl.simulation.folder.record import read_run
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.store.lines import append_line
from tools.cli import deltafl_here
from tools.kills import kills
from tools.simulation import TINY, StopError, lines_of, run, stop_after

PLAN = Plan(
    Population.from_sizes([3, 1, 2, 5]),
    PracDelta(),
    2,
    "difference-own",
    (make_server_optimizer("yogi"),),
)
SETTINGS = make_settings(RunSettings, {"task": "toy", "noise": 3.0, "sampler": "pracdelta"})
START = init_round(PLAN, np.zeros(3))


def played(rounds: int) -> RoundState:
    state = START
    for _ in range(rounds):
        cohort = open_round(PLAN, state)
        updates = np.outer(cohort.client_n + 1.0, [1.0, -2.0, 0.3]) + state.round
        state, _ = close_round(PLAN, state, cohort, updates)
    return state


def same(a: RoundState, b: RoundState) -> bool:
    return all(
        name == other and np.array_equal(x, y) and x.dtype == y.dtype
        for (name, x), (other, y) in zip(named_arrays(a), named_arrays(b), strict=True)
    )


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.start(SETTINGS, {"data": "three quadratics"})
    return directory


def add(directory: RunDirectory, *rounds: int) -> None:
    for round in rounds:
        line = {
            "round": round,
            "cohort": [0, 1],
            "counts": [1, 1],
            "test": {"loss": 1.0, "accuracy": 0.5},
        }
        directory.append(
            line, {"round": round, "seconds": 0.1, "cpu_seconds": 0.1, "client_seconds": 0.1}
        )


def test_lines_after_the_checkpoint_are_cut_off_even_half_ones(directory: RunDirectory) -> None:
    add(directory, 1, 2)
    directory.save(played(2))
    add(directory, 3)
    with (directory.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "coh')
    assert same(directory.load(PLAN.sampler, START), played(2))
    for name in ("rounds.jsonl", "timings.jsonl"):
        assert [line["round"] for line in directory.lines(name)] == [1, 2]


@pytest.mark.parametrize("memory", [False, True])
def test_a_kill_between_any_two_calls_loses_no_checkpoint(
    directory: RunDirectory, tmp_path: Path, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> RunDirectory:
        again = RunDirectory(directory.path)
        if memory:
            again.memory_folder(str(tmp_path / "memory"))
        return again

    def two_rounds() -> None:
        run = begin()
        add(run, 1, 2)
        run.save(played(2))

    def prepare() -> Callable[[], object]:
        run = begin()
        run.load(PLAN.sampler, START)

        def play() -> None:
            add(run, 3)
            run.save(played(3))

        return play

    two_rounds()
    outcomes = []
    for _ in kills(prepare, monkeypatch):
        run = begin()
        state = run.load(PLAN.sampler, START)
        assert same(state, played(state.round))
        assert [line["round"] for line in run.lines("rounds.jsonl")] == [1, 2, 3][: state.round]
        outcomes.append(int(state.round))
        if state.round == 3:
            shutil.rmtree(directory.path)
            shutil.rmtree(tmp_path / "memory", ignore_errors=True)
            directory.start(SETTINGS)
            two_rounds()
    assert set(outcomes) == {2, 3}
    assert outcomes == sorted(outcomes)


def test_an_unfinished_checkpoint_does_not_count(directory: RunDirectory) -> None:
    directory.save(played(2))
    (directory.path / "checkpoint.safetensors.part").write_bytes(b"half")
    assert same(directory.load(PLAN.sampler, START), played(2))
    directory.save(played(3))
    assert same(directory.load(PLAN.sampler, START), played(3))
    assert not (directory.path / "checkpoint.safetensors.part").exists()


def test_a_copied_folder_does_not_go_on_from_a_memory_that_is_newer(
    directory: RunDirectory, tmp_path: Path
) -> None:
    """Both name one folder of rows, which are those of the last checkpoint that was written."""
    directory.memory_folder(str(tmp_path / "memory"))
    directory.save(played(2))
    shutil.copytree(directory.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    copy.memory_folder(str(tmp_path / "memory"))
    assert same(copy.load(PLAN.sampler, START), played(2))
    directory.save(played(3))
    with pytest.raises(
        DeltaflError,
        match=r"are of round 3 of .*, and the last checkpoint of .*copy is of round 2 of .*: put",
    ):
        copy.load(PLAN.sampler, START)
    assert same(directory.load(PLAN.sampler, START), played(3))


def test_rounds_are_not_erased_where_the_settings_are_missing(directory: RunDirectory) -> None:
    add(directory, 0)
    before = (directory.path / "rounds.jsonl").read_bytes()
    (directory.path / "config.toml").unlink()
    with pytest.raises(
        DeltaflError, match=r"rounds\.jsonl belongs to another run, whose config\.toml is missing"
    ):
        directory.start(SETTINGS)
    assert (directory.path / "rounds.jsonl").read_bytes() == before


def test_a_reader_can_tell_which_file_is_damaged(directory: RunDirectory, tmp_path: Path) -> None:
    """Every file of a record, cut or of other bytes: one sentence that names it, and nothing
    lost.
    """
    add(directory, 0, 1, 2)
    directory.save(played(2))
    readers: dict[str, Callable[[], object]] = {
        "checkpoint.safetensors": lambda: directory.load(PLAN.sampler, START),
        **dict.fromkeys(("rounds.jsonl", "timings.jsonl"), lambda: read_run(directory, SETTINGS)),
        "environment.json": directory.environment,
        "config.toml": lambda: recorded_settings(directory.path),
    }
    for name, read in readers.items():
        file = directory.path / name
        good = file.read_bytes()
        read()
        for bad in (
            good[:-1] + b"!",
            b"!" + good[2:],
            b"\xff\xfe{}",
            b"[" * 100_000,
            b'{"round": ',
        ):
            file.write_bytes(bad)
            before = {path.name: path.read_bytes() for path in directory.path.iterdir()}
            with pytest.raises(DeltaflError) as caught:
                read()
            assert name in str(caught.value)
            assert "\n" not in str(caught.value)
            assert {path.name: path.read_bytes() for path in directory.path.iterdir()} == before
        file.write_bytes(good)


def test_the_last_line_of_a_run_that_ended_is_checked(directory: RunDirectory) -> None:
    add(directory, 0, 1)
    directory.save(played(1))
    last = {"round": 2, "cohort": [0], "counts": [1], "diverged": {"kept": 1, "why": "x"}}
    directory.append(last, {"round": 2, "seconds": 1.0})
    file = directory.path / "rounds.jsonl"
    file.write_text(file.read_text().replace('"why"', '"whx"'))
    with pytest.raises(DeltaflError, match=r"rounds\.jsonl is not as it was written"):
        read_run(directory, SETTINGS)
    assert directory.ending() is None


def test_a_folder_in_use_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """``tests/store/test_folder.py`` kills the owner."""
    with locked(tmp_path / "out"):
        given = ("compare", "--task", "toy", "--rounds", "2", "--out", "out")
        done = deltafl_here(*given, cwd=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["out.lock"]
    assert (done.returncode, done.stdout) == (2, "")
    assert "another process is using out; wait for it" in done.stderr
    run(tmp_path / "out", task="toy", rounds=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


#: How a run may end: by its rounds, a rule, divergence, or with a model that looks wrong.
ENDS: dict[str, dict[str, object]] = {
    "whole": {},
    "stopped": {"patience": 1, "local_lr": 1e-30, "rounds": 9},
    "diverged": {"local_lr": 1e30},
    "suspect": {"local_lr": 50.0, "rounds": 4},
}


@pytest.fixture(scope="module", params=ENDS)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended; copy it before you change it."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    with suppress(DivergedError):
        run(folder, **{**TINY, **ENDS[request.param]})
    last = lines_of(folder)[-1]
    assert {"whole": "test"}.get(request.param, request.param) in last
    return folder


def added(folder: Path) -> None:
    """Another round, as if it had been played."""
    for name in ("rounds.jsonl", "timings.jsonl"):
        file = folder / name
        last = json.loads(file.read_text().splitlines()[-1])
        more = {**last, "round": last["round"] + 1}
        for why in ("stopped", "diverged", "suspect"):
            more.pop(why, None)
        append_line(file, more)


def edited(folder: Path) -> None:
    file = folder / "clients.json"
    known = json.loads(file.read_text())
    known["accuracy"][-1][0] = 0.123
    file.write_text(json.dumps(known) + "\n")


def foreign(folder: Path) -> None:
    other = folder.with_name("other")
    run(other, **TINY, seed=1)
    (other / "clients.json").replace(folder / "clients.json")


def gone(folder: Path) -> None:
    (folder / "clients.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (added, "rounds.jsonl has rounds up to"),
        (edited, "clients.json is not as it was written"),
        (foreign, "clients.json is not as it was written"),
        (gone, "clients.json is not there"),
    ],
)
def test_what_a_run_has_ended_with_is_read_as_it_was_written(
    ended: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    before = deltafl.load(folder)
    settings = make_settings(RunSettings, recorded_settings(folder) or {})
    change(folder)
    with pytest.raises(DeltaflError, match=words):
        read_run(RunDirectory(folder), settings)
    # Some that go on after their end are unfinished, and a resume cuts off what was added.
    with pytest.raises(DeltaflError, match=f"{words}|is not finished"):
        deltafl.load(folder)
    # As the versions before wrote it.
    mark = read_checkpoint(folder)
    assert mark is not None and "clients.json" in mark.ended
    if change is not added:
        lines = {name: seal for name, seal in mark.ended.items() if name != "clients.json"}
        change_checkpoint(folder, ended=lines)
        assert deltafl.load(folder).curves[0].round_r[-1] == before.curves[0].round_r[-1]


@pytest.mark.parametrize("ended", ["stopped", "diverged"], indirect=True)
def test_what_has_ended_for_good_stays_sealed_when_more_rounds_are_asked(
    ended: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    before = read_checkpoint(folder)
    given = recorded_settings(folder) or {}
    with suppress(DivergedError):
        run(folder, **{**given, "rounds": given["rounds"] + 3})
    after = read_checkpoint(folder)
    assert before is not None and after is not None
    assert after.settings["rounds"] == given["rounds"] + 3
    assert after.ended == before.ended != {}


def test_what_ended_goes_on_and_is_sealed_again(tmp_path: Path) -> None:
    """With another threshold, again, more rounds, and killed in between."""
    given = {**TINY, "checkpoint_every": 2}
    for more in ({}, {"threshold": 0.05}, {"threshold": 0.05}, {"rounds": 12}, {"rounds": 20}):
        given |= more
        if given["rounds"] == 12:
            with suppress(StopError):
                run_single(make_settings(RunSettings, given), tmp_path / "run", stop_after(9))
            settings = make_settings(RunSettings, given)
            assert len(read_run(RunDirectory(tmp_path / "run"), settings).round_r) > 6
        run(tmp_path / "run", **given)
        mark = read_checkpoint(tmp_path / "run")
        assert mark is not None and {*mark.ended} == {"clients.json"}
        assert deltafl.load(tmp_path / "run").curves[0].value_km is not None
        kept = (tmp_path / "run" / "clients.json").read_bytes()
    run(tmp_path / "at_once", **given)
    assert (tmp_path / "at_once" / "clients.json").read_bytes() == kept
