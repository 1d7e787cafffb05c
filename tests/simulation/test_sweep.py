"""Experiments as data and sweeps of runs: what a file means, and that nothing is run twice, lost
or mixed up.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

import deltafl
from deltafl.errors import DeltaflError
from deltafl.simulation.callbacks.callback import RoundDone
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.folder.record import (
    UNFINISHED,
    Job,
    RunRecord,
    RunStore,
    read_record,
    record_line,
    record_of,
    write_record,
)
from deltafl.simulation.parallel.player import Player
from deltafl.simulation.parallel.processes import ONE_THREAD, Processes
from deltafl.simulation.parallel.sweep import count_processes, play_jobs, rounds_played
from deltafl.simulation.run import run_experiment
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, task_of
from deltafl.simulation.view.progress import Progress
from reproduction.records import PackedRuns
from reproduction.spec import Experiment, parse_experiment
from reproduction.sweeps import make_sweep, records_of, run_sweep
from tools.simulation import StopError, lines_of, quiet, reseal, run_job, stop_after

SETTINGS = {"task": "digits", "clients": 6, "sample": 2, "rounds": 3, "local_epochs": 1}
SETTINGS |= {"seeds": 2, "threshold": 0.3}


def experiment(**changes: Any) -> Experiment:
    content = {
        "title": "a table",
        "claim": "something",
        "kind": "table",
        "settings": {**SETTINGS, "samplers": ["uniform", "pracdelta"]},
        "parts": {"a": {}, "b": {"alpha": 1.0, "rounds": 2}},
        "smoke": {},
        "cpu": {"rounds": 5, "parts": ["b"], "change": {"b": {"sample": 3}}},
        "paper": {},
    }
    return parse_experiment("table-99", {**content, **changes})


def test_later_settings_win_from_the_common_ones_to_the_scales_change_of_a_part() -> None:
    table = experiment()
    assert [table.comparison(part, "smoke").rounds for part in ("a", "b")] == [3, 2]
    changed = table.comparison("b", "cpu")
    assert (changed.rounds, changed.sample, changed.alpha) == (5, 3, 1.0)
    assert table.comparison("b", "cpu", rounds=7).rounds == 7
    assert table.part_names("cpu") == ("b",)


@pytest.fixture
def job() -> Job:
    return next(make_sweep(experiment(), "smoke", ["a"]).jobs())


def run_in(folder: Path, job: Job) -> RunDirectory:
    """The unfinished run of a job, played to its end but not recorded."""
    directory = RunDirectory(folder)
    engine = engine_of(job.settings)
    directory.start(job.settings, engine.task.data)
    run_experiment(job.settings, engine, directory, quiet)
    return directory


def test_a_sweep_in_two_processes_records_what_single_runs_give_and_skips_it_the_next_time(
    tmp_path: Path,
) -> None:
    sweep = make_sweep(experiment(), "smoke", ["a"])
    seen: list[Progress] = []
    assert run_sweep(sweep, tmp_path, 2, seen.append) == {}
    assert seen[-1] == Progress(12, 12, 4, 4, ())
    records = records_of(sweep, tmp_path)
    fairness = records[0].fairness
    assert fairness is not None
    assert records[0].run().fairness == fairness
    assert 0 < fairness.worst_tenth < fairness.mean
    # As it was before fairness was measured.
    old = json.loads(records[0].model_dump_json(exclude={"fairness"}))
    assert RunRecord.model_validate(old).run().fairness is None
    names = [f"{record.sampler} {record.seed}" for record in records]
    assert names == ["uniform 0", "pracdelta 0", "uniform 1", "pracdelta 1"]
    assert not (tmp_path / UNFINISHED).exists()
    run_in(tmp_path / "alone", list(sweep.jobs())[3])
    losses = [line["test"]["loss"] for line in lines_of(tmp_path / "alone")[1:]]
    np.testing.assert_allclose(records[3].run().loss_r, losses, rtol=1e-5)
    assert records[3].data == "digits"
    assert sum(records[3].draws) == 6
    # Of machine and versions, nothing of a seed's data.
    assert records[0].environment == records[2].environment

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("runs/*/*.json")}

    before = written()
    run_sweep(sweep, tmp_path, 2, quiet)
    assert written() == before


def test_an_interrupted_run_goes_on_and_ends_in_the_same_record(job: Job, tmp_path: Path) -> None:
    job = job._replace(settings=job.settings.model_copy(update={"checkpoint_every": 1}))
    run_job(job, tmp_path / "whole")
    directory = RunDirectory(tmp_path / "cut" / UNFINISHED / job.key)
    directory.start(job.settings)
    with pytest.raises(StopError):
        run_experiment(job.settings, engine_of(job.settings), directory, stop_after(2))
    assert rounds_played(directory.path) == 2
    run_job(job, tmp_path / "cut")
    whole, cut = (read_record(RunStore(tmp_path / name).path(job)) for name in ("whole", "cut"))
    # Measured, so never the same.
    clock = {"seconds", "cpu_seconds", "client_seconds", "server_bytes", "environment"}
    assert whole.model_dump(exclude=clock) == cut.model_dump(exclude=clock)
    assert len(cut.cpu_seconds) == 3
    assert cut.trainings == [2 * r for r in cut.round]
    assert not directory.path.exists()


def change(path: Path, **settings: object) -> None:
    """Write other settings into a record; None takes one out."""
    content = json.loads(path.read_text())
    content.pop("crc32", None)  # as older ones are
    content["settings"] = {
        k: v for k, v in (content["settings"] | settings).items() if v is not None
    }
    path.write_text(json.dumps(content))


def test_a_record_counts_for_the_same_settings_alone(job: Job, tmp_path: Path) -> None:
    """On whatever device it was made, and if it is older than a setting; others are refused and
    left as they are.
    """
    run_job(job, tmp_path)
    store = RunStore(tmp_path)
    path = RunStore(tmp_path).path(job)

    def get(**changes: object) -> RunRecord | None:
        return store.get(job._replace(settings=job.settings.model_copy(update=changes)))

    assert "device" not in read_record(path).settings
    assert get(device="auto") is not None
    with pytest.raises(DeltaflError, match=r"was run with rounds = 3, not 4: choose another --out"):
        get(rounds=4)
    change(path, proximal=None)
    assert get() is not None
    for wrong, words in (
        ({"proximal": 0.1}, r"proximal = 0\.1, not 0\.0"),
        (
            {"rounds": "many"},
            f"{path.name} has impossible settings: rounds: it must be.*delete it to run",
        ),
        ({"rounds": 3, "no_such": 1}, "no_such: Extra inputs"),
    ):
        change(path, **wrong)
        before = path.read_bytes()
        with pytest.raises(DeltaflError, match=words):
            get()
        assert path.read_bytes() == before


def test_parts_without_data_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "empty"))
    parts = {"a": {}, "b": {"task": "unipen62", "clients": None}}
    sweep = make_sweep(
        experiment(parts=parts, settings={**SETTINGS, "seeds": 1, "samplers": ["uniform"]}), "smoke"
    )
    not_run = run_sweep(sweep, tmp_path / "out", 1, quiet)
    assert list(not_run) == ["b"]
    assert "unipen62_writers.npz" in not_run["b"]
    assert [record.part for record in records_of(sweep, tmp_path / "out")] == ["a"]


def test_a_record_survives_its_file_and_a_broken_one_is_named(tmp_path: Path) -> None:
    settings = make_settings(RunSettings, {"task": "toy"}).model_dump(
        mode="json", exclude_none=True
    )
    curves = {
        "round": [1, 2],
        "accuracy": [float("nan"), float("nan")],
        "loss": [1.23456789, float("inf")],
        **{"seconds": [0.1, 0.2], "cpu_seconds": [0.1, 0.2], "bytes": [8.0, 16.0]},
    }
    rest = {
        "metric": "loss",
        "environment": {},
        "draws": [2, 1, 1],
        "probes": {"round": [2.0], "norm_max": [3.14159265]},
    }
    record = RunRecord.model_validate(
        {"part": "a", "settings": settings, "data": "toy", **curves, **rest}
    )
    path = tmp_path / "runs" / "a" / "x.json"
    write_record(record, path)
    back = read_record(path)
    assert back.accuracy == [None, None]
    assert back.loss == [1.23457, None]
    assert back.run().probes["norm_max"] == [3.1416]
    whole = path.read_text()
    for old, new in (
        ('"loss":[1.23', '"loss":[9.23'),
        ('"seed":', '"seed": '),
        ('"crc32":"', '"crc32":"0'),
        ('"crc32":"', '"crc32": null, "x":"'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(DeltaflError, match=r"x\.json is not as it was written"):
            read_record(path)
    # As versions before wrote it, and as records are packed.
    path.write_text(record_line(record))
    assert "crc32" not in path.read_text() and read_record(path) == back
    path.write_text('{"part": 1}')
    with pytest.raises(
        DeltaflError, match=r"is not the record of a run: part: .* delete it to run again"
    ):
        read_record(path)


def wait_for(reached: Callable[[], bool], pause: float = 0.05) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(pause)


@pytest.mark.thorough
def test_runs_end_when_the_sweep_is_killed(tmp_path: Path) -> None:
    run = tmp_path / UNFINISHED / "nu-20" / "fedavg-seed0"
    words = [
        "-m",
        "reproduction",
        "figure-11",
        "--part",
        "nu-20",
        "--processes",
        "1",
        "--scale",
        "cpu",
        "--out",
    ]
    command = [sys.executable, *words, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: rounds_played(run) > 20)
        process.kill()
    seen = [-1]

    def stands_still() -> bool:
        seen.append(rounds_played(run))
        return seen[-1] == seen[-2]

    wait_for(stands_still, pause=1)
    assert seen[-1] < 2000


def test_runs_go_on_when_their_process_is_killed(job: Job, tmp_path: Path) -> None:
    """Both runs, although one process is killed: an executor gives up all calls then."""
    # So many that none is over when the signal comes.
    changes = {"rounds": 200, "checkpoint_every": 10}
    jobs = [
        job._replace(settings=job.settings.model_copy(update=changes | {"seed": seed}))
        for seed in (0, 1)
    ]
    jobs = [each._replace(part=f"seed{each.settings.seed}") for each in jobs]
    player = Player(tmp_path, keep_folders=True)
    seen = list[tuple[int, int]]()
    killed = list[int]()

    def on_round(done: RoundDone) -> None:
        seen.append((done.seed, done.round))
        if not killed:
            killed.extend(pool._pool._processes)
            os.kill(killed[0], signal.SIGKILL)

    with Processes(2) as pool:
        play_jobs(jobs, player, pool, quiet, on_round)
        assert not set(killed) & set(pool._pool._processes)
    assert sorted(set(seen)) == [(seed, round) for seed in (0, 1) for round in range(1, 201)]
    for each in jobs:
        run_in(tmp_path / "alone" / each.part, each)
        whole, cut = (
            (place / "rounds.jsonl").read_bytes()
            for place in (tmp_path / "alone" / each.part, player.place(each))
        )
        assert whole == cut


def test_processes_have_one_thread_each_and_this_one_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with Processes(1) as pool:
        found = {name: pool.submit(os.getenv, name).result() for name in ONE_THREAD}
    assert found == ONE_THREAD
    # Else what a notebook loads afterwards, such as torch, would have one thread.
    assert os.environ == before


@pytest.mark.skipif(sys.platform != "linux", reason="others have no sockets by name here")
def test_processes_start_where_the_name_of_the_temporary_folder_is_long(tmp_path: Path) -> None:
    """As on clusters: a socket's name has 108 bytes at most."""
    place = tmp_path / ("x" * 100)
    place.mkdir()
    code = (
        "import os, tempfile; from deltafl.simulation.parallel.processes import Processes\n"
        "with Processes(1) as pool: print(pool.submit(os.getppid).result() > 0)\n"
        "print(tempfile.gettempdir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=True,
    )
    # What else is temporary stays where the user wants it.
    assert done.stdout.split() == ["True", str(place)]


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError("path too long")])
def test_where_no_process_can_be_started_a_sentence_says_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """A broken pipe would else end a command without a word, as one of its output does."""

    def fails(*_: object) -> None:
        raise error

    with (
        monkeypatch.context() as patched,
        pytest.raises(DeltaflError, match=r"cannot be started here: .*; .* processes=1"),
    ):
        patched.setattr("multiprocessing.get_context", fails)
        Processes(1)
    with (
        Processes(1) as pool,
        monkeypatch.context() as patched,
        pytest.raises(DeltaflError, match=r"cannot be started here: .*; .* processes=1"),
    ):
        patched.setattr(pool._pool, "submit", fails)
        pool.submit(os.getpid)


def _compared(folder: str, **more: Any) -> str:
    given = {"rounds": 1, "clients": 12, "progress": False, "report": False}
    try:
        found = deltafl.compare("digits", ["uniform"], 2, out=folder, **(given | more))
    except DeltaflError as error:
        return str(error)
    return found.to_csv()


def test_a_process_of_a_pool_compares_by_itself(tmp_path: Path) -> None:
    """Python lets it start no others: as many runs as there are cores would end in an error."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_compared, [str(tmp_path / "a")])
        said = pool.apply(_compared, [str(tmp_path / "b")], {"processes": 2})
    assert found == _compared(str(tmp_path / "c"), processes=1)
    assert "other processes cannot be started here: AssertionError: daemonic" in said


def test_threads_may_start_processes_at_the_same_time() -> None:
    main = sys.modules["__main__"]
    before = dict(os.environ)

    def started(_: int) -> int:
        with Processes(1) as pool:
            return int(pool.submit(len, "ab").result())

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(started, range(8))] == [2] * 8
    assert sys.modules["__main__"] is main and os.environ == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say")
def test_as_many_runs_as_the_process_may_use_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 5, 7})
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("deltafl.store.room._CONTAINER", tmp_path)
    counts = [count_processes(*asked) for asked in ((None, "cpu"), (None, "cuda"), (9, "cpu"))]
    assert counts == [3, 1, 9]
    for text, count in (("max 100000", 3), ("150000 100000", 2), ("900000 100000", 3)):
        quota.write_text(f"{text}\n")
        assert count_processes(None, "cpu") == count


def test_a_run_that_kills_its_process_again_and_again_is_an_error(job: Job, tmp_path: Path) -> None:
    with Processes(2) as pool, pytest.raises(DeltaflError, match="died; if it was killed"):
        play_jobs([job], Deadly(tmp_path), pool, quiet)


class Deadly(Player):
    def play(self, job: Job, on_round: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_waits_for_a_process_that_outlives_its_killed_sweep(job: Job, tmp_path: Path) -> None:
    place = tmp_path / UNFINISHED / job.key
    writing = threading.Event()
    untouched = []

    def orphan() -> None:
        with FileLock(f"{place}.lock"):
            writing.set()
            time.sleep(2)
            untouched.append(RunStore(tmp_path).get(job) is None)

    place.parent.mkdir(parents=True)
    thread = threading.Thread(target=orphan)
    thread.start()
    writing.wait()
    run_job(job, tmp_path)
    thread.join()
    assert untouched == [True]
    assert RunStore(tmp_path).get(job) is not None


def test_a_run_that_two_processes_played_never_becomes_a_record(job: Job, tmp_path: Path) -> None:
    directory = run_in(tmp_path, job)
    for name in ("rounds.jsonl", "timings.jsonl"):
        lines = (directory.path / name).read_text().splitlines(keepends=True)
        (directory.path / name).write_text("".join([*lines[:3], *lines[2:]]))
    with pytest.raises(DeltaflError, match="is not as it was written, its checksum differs"):
        record_of(job, directory, task_of(job.settings))
    reseal(directory.path)
    with pytest.raises(DeltaflError, match="does not hold every round once and in order"):
        record_of(job, directory, task_of(job.settings))
    (directory.path / "timings.jsonl").unlink()
    with pytest.raises(DeltaflError, match=r"timings.jsonl is not there: delete this run's folder"):
        record_of(job, directory, task_of(job.settings))


def test_packed_records_are_found_and_a_loose_one_wins(tmp_path: Path) -> None:
    jobs = list(make_sweep(experiment(), "smoke", ["a"], seeds=1).jobs())
    for job in jobs:
        run_job(job, tmp_path)
    store = PackedRuns(tmp_path)
    before = store.records("a")
    store.pack("a")
    packed = tmp_path / "runs" / "a.jsonl.gz"
    content = packed.read_bytes()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a.jsonl.gz"]
    assert store.records("a") == before
    assert store.get(jobs[0]) == next(
        record for record in before if record.sampler == jobs[0].settings.sampler
    )
    write_record(before[0].model_copy(update={"refused": 1}), store.path(jobs[1]))
    assert store.get(jobs[1]) == before[0].model_copy(update={"refused": 1})
    write_record(before[0], store.path(jobs[1]))
    store.pack("a")
    assert packed.read_bytes() == content
    packed.write_bytes(content[:-20])
    with pytest.raises(DeltaflError, match=r"a\.jsonl\.gz cannot be read: .*restore it"):
        store.get(jobs[0])
