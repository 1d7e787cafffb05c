"""Two sweeps of the benchmark on one folder: what one packs, the other finds, and neither plays it again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation import record, sweep
from deltafl.simulation.directory import RunDirectory
from deltafl.simulation.record import UNFINISHED, RunRecord, RunStore, read_record
from deltafl.simulation.sweep import Job, OnProgress, run_job
from reproduction.benchmark import run as benchmark
from reproduction.benchmark.parts import Part, parts_of
from reproduction.benchmark.results import Store, tuning
from reproduction.request import Request
from reproduction.spec import parse_experiment
from small_benchmark import small_benchmark

EXPERIMENT = parse_experiment("benchmark", small_benchmark(rounds=2, threshold=0.5, seeds=1))


def part_and_jobs(folder: Path) -> tuple[Part, list[Job]]:
    part = parts_of(EXPERIMENT, "smoke")[0]
    return part, tuning(part, part.methods, Store(folder))


def test_runs_that_another_process_packed_are_found(tmp_path: Path) -> None:
    part, jobs = part_and_jobs(tmp_path)
    ours, theirs = Store(tmp_path), Store(tmp_path)
    assert [ours.tried(part, job) for job in jobs] == [None, None]
    for job in jobs:
        run_job(job, tmp_path)
    theirs.pack(part, jobs)
    assert not any(RunStore(tmp_path).get(job) for job in jobs)
    found = [ours.tried(part, job) for job in jobs]
    assert None not in found
    assert found == [theirs.tried(part, job) for job in jobs]


def test_a_line_that_is_written_between_the_two_looks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, jobs = part_and_jobs(tmp_path)
    run_job(jobs[0], tmp_path)
    ours, get = Store(tmp_path), Store.get

    def get_late(store: Store, job: Job) -> RunRecord | None:
        if store is ours:
            Store(tmp_path).pack(part, jobs)
        return get(store, job)

    monkeypatch.setattr(Store, "get", get_late)
    assert ours.tried(part, jobs[0]) is not None


def test_a_sweep_that_lags_behind_plays_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sweep plays and packs all tuning runs while this one has them on its list."""
    played: list[str] = []
    run_alone = sweep._Player._play_alone

    def run_counted(player: sweep._Player, job: Job, *rest: Any) -> None:
        played.append(job.key)
        run_alone(player, job, *rest)

    def behind(
        jobs: Sequence[Job], folder: Path, _: int, on_progress: OnProgress, is_packed: sweep.IsPacked | None = None
    ) -> None:
        if is_packed:
            for job in jobs:
                run_job(job, folder)
            Store(folder).pack(parts_of(EXPERIMENT, "smoke")[0], jobs)
        for job in jobs:
            assert run_job(job, folder, is_packed)

    monkeypatch.setattr(sweep._Player, "_play_alone", run_counted)
    monkeypatch.setattr(benchmark, "run_jobs", behind)
    benchmark.reproduce_benchmark(EXPERIMENT, Request("benchmark", "smoke", tmp_path), lambda _: None)
    assert len(played) == len(set(played)) == 4


def test_a_record_that_goes_while_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (job, _) = part_and_jobs(tmp_path)
    run_job(job, tmp_path)

    def read_late(path: Path) -> RunRecord:
        path.unlink(missing_ok=True)
        return read_record(path)

    monkeypatch.setattr(record, "read_record", read_late)
    assert not RunStore(tmp_path).get(job)


def test_an_unfinished_run_that_ends_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (job, _) = part_and_jobs(tmp_path)
    RunDirectory(tmp_path / UNFINISHED / job.key).start(job.settings)
    exists = Path.exists

    def exists_then_goes(path: Path) -> bool:
        found = exists(path)
        if path.name == "config.toml":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", exists_then_goes)
    assert not RunStore(tmp_path).get(job)


def test_a_damaged_record_is_still_refused(tmp_path: Path) -> None:
    _, (job, _) = part_and_jobs(tmp_path)
    path = RunStore(tmp_path).path(job)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(DeltaflError, match="is not the record of a run"):
        RunStore(tmp_path).get(job)
