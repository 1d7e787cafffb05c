"""Finished runs of the benchmark played again: records that are not what the code gives today are noticed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltafl.cli.main import app
from deltafl.errors import DeltaflError
from deltafl.simulation.record import RunStore, read_record, write_record
from deltafl.simulation.sweep import Job, run_job
from reproduction import reproduce, spec
from reproduction.benchmark import results
from reproduction.benchmark.check import check_runs, choose, finished
from reproduction.benchmark.parts import Part, parts_of
from reproduction.benchmark.results import Store
from reproduction.request import Request
from reproduction.spec import Experiment, parse_experiment
from small_benchmark import small_benchmark

CONTENT = small_benchmark(rounds=3, threshold=0.2, seeds=2)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of the smoke scale."""
    folder = tmp_path_factory.mktemp("benchmark")
    part = parts_of(experiment(), "smoke")[0]
    for job in results.tuning(part, part.methods, Store(folder)):
        run_job(job, folder)
    for job in results.tests(part, part.methods, Store(folder)):
        run_job(job, folder)
    return folder


def experiment() -> Experiment:
    return parse_experiment("benchmark", CONTENT)


def part_and_jobs(folder: Path) -> tuple[Part, list[list[Job]]]:
    part = parts_of(experiment(), "smoke")[0]
    return part, finished(part, Store(folder))


def test_methods_are_spread_and_seeds_differ(ran: Path) -> None:
    _, by_method = part_and_jobs(ran)
    assert [job.key for job in choose([by_method], 2)] == ["digits/full-seed0", "digits/uniform-seed1"]
    assert [job.key for job in choose([by_method, by_method], 2)] == ["digits/full-seed0"] * 2
    every = [job.key for job in choose([by_method], 9)]
    assert every[:2] == ["digits/full-seed0", "digits/uniform-seed1"]
    assert sorted(every) == sorted({job.key for jobs in by_method for job in jobs})
    assert choose([], 3) == []


def test_records_of_other_code_are_named(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record in whose second round the model was better, as a method that was corrected since would have made it."""
    for module in (spec, reproduce):  # the second is imported by the command, and would keep what is put in here
        monkeypatch.setattr(module, "load_experiment", lambda _: experiment())

    def told() -> tuple[int, list[str]]:
        done = CliRunner().invoke(
            app, ["reproduce", "benchmark", "--check", "2", "--processes", "1", "--out", str(ran)]
        )
        return done.exit_code, done.stdout.splitlines()

    same = ["digits/full-seed0: the same", "digits/uniform-seed1: the same", "0 of 2 runs differ from their records"]
    assert told() == (0, same)
    path = RunStore(ran).path(part_and_jobs(ran)[1][1][1])
    before, record = path.read_bytes(), read_record(path)
    assert record.accuracy[1] is not None
    accuracy = [record.accuracy[0], record.accuracy[1] + 0.01, *record.accuracy[2:]]
    write_record(record.model_copy(update={"accuracy": accuracy}), path)
    changed = path.read_bytes()
    code, lines = told()
    assert code == 1
    assert lines[0] == same[0]
    assert lines[1].startswith("digits/uniform-seed1: from round ")
    assert "on accuracies differ by up to 0.01; threshold reached in round " in lines[1]
    assert lines[2] == "1 of 2 runs differ from their records"
    assert path.read_bytes() == changed
    path.write_bytes(before)


def test_without_finished_runs_there_is_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="has no finished test run to check"):
        check_runs(experiment(), Request("benchmark", "smoke", tmp_path / "none"), 2, lambda _: None)
    done = CliRunner().invoke(app, ["reproduce", "toy", "--check", "2", "--out", str(tmp_path / "none")])
    assert isinstance(done.exception, DeltaflError)
    assert "--check is for the benchmark, not for toy" in str(done.exception)
    assert not (tmp_path / "none").exists()
