"""The benchmark's runs: tuning results, finalists, what is played, skipped and checked."""

import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_benchmark import MADE_UP, curve, made_up, part_of, record, shown, tiny, write_runs

from deltafl.errors import DeltaflError
from deltafl.simulation import Job, Progress, RunRecord, Score, mean_score, write_record
from reproduction.benchmark import runs as benchmark
from reproduction.benchmark.page import reproduce_benchmark
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.runs import Store, play, tuning_jobs, tuning_result
from reproduction.records import PackedRuns
from reproduction.running import Request
from reproduction.spec import Experiment
from tools.simulation import run_job


def test_rates_are_chosen_by_mean_accuracy_and_never_one_that_diverged() -> None:
    part = part_of()
    job = part.tuning_job("uniform", 0.1, 1000)
    assert job.settings.validation == 0.2
    assert part.test_job("uniform", 0.1, 0).settings.validation is None

    def scored(*runs: RunRecord) -> Score:
        return mean_score([tuning_result(run.run(), part).score for run in runs])

    fast = record(job, [0.6, 0.6, 0.6, 0.6])
    slow = record(job, [0.1, 0.9, 0.9, 0.9])  # the first reaches 0.5 first
    assert scored(slow) < scored(fast)
    assert scored(slow, fast).area == pytest.approx(-(0.7 + 0.6) / 2)
    diverged = record(job, [0.9, 0.95], diverged=2)
    assert scored(fast) < scored(diverged)
    assert scored(slow, diverged) < scored(diverged, diverged)
    assert scored(record(job, [0.1, 0.1, 0.1, 0.1])) < scored(slow, diverged)


def test_lines_of_tuning_runs_hold_what_their_records_did(tmp_path: Path) -> None:
    write_runs(tmp_path, made_up(), MADE_UP)
    page = shown(tmp_path, made_up())
    part = parts_of(made_up(), "smoke")[0]
    store = Store(tmp_path)
    jobs = tuning_jobs(part, part.methods, store)
    before = [store.tuned(part, job) for job in jobs]
    store.keep(part, jobs)
    for packed in (tmp_path / "runs").glob("*-tuning-*.gz"):
        packed.unlink()  # the records need not be kept
    assert [Store(tmp_path).tuned(part, job) for job in jobs] == before
    assert shown(tmp_path, made_up()) == page
    with pytest.raises(
        DeltaflError, match=r"digits.jsonl.gz was run with threshold = 0.5, not 0.55"
    ):
        shown(tmp_path, made_up(threshold=0.55))
    with pytest.raises(DeltaflError, match="was run with rounds = 40, not 30"):
        shown(tmp_path, made_up(horizon=30))
    path = tmp_path / "tuning" / "digits.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).replace(b'"reached":30.0', b'"reached":"soon"')
    path.write_bytes(gzip.compress(lines))
    with pytest.raises(
        DeltaflError, match=r"digits.jsonl.gz, line \d+,: reached: .*delete it to run them again"
    ):
        shown(tmp_path, made_up())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that are run, in this process instead of a pool."""
    done: list[str] = []

    def serial(
        jobs: Sequence[Job],
        folder: Path,
        _: int,
        on_progress: Callable[[Progress], None],
        *__: object,
    ) -> None:
        for job in jobs:
            if not PackedRuns(folder).get(job):
                run_job(job, folder)
                done.append(job.key)

    monkeypatch.setattr(benchmark, "run_jobs", serial)
    return done


def reproduced(folder: Path, experiment: Experiment, **more: Any) -> str:
    return reproduce_benchmark(
        experiment, Request("benchmark", "smoke", folder, **more), lambda _: None
    )


def test_it_tunes_then_measures_and_goes_on_where_it_was(tmp_path: Path, ran: list[str]) -> None:
    small: dict[str, Any] = {"methods": ["full", "uniform"], "rates": [0.1, 0.2], "extensions": 1}
    experiment = tiny(tiers={"all": small}, horizon=3, probe_every=2)
    page = reproduced(tmp_path, experiment, seeds=1)
    tuning = [key for key in ran if "tuning" in key]
    assert ran[: len(tuning)] == tuning
    assert {f"digits-tuning-0.1/{label}-seed1000" for label in small["methods"]} <= set(tuning)
    assert [key for key in ran if key not in tuning] == [
        f"digits/{label}-seed0" for label in small["methods"]
    ]
    assert "python -m reproduction benchmark --scale smoke --seeds 1" in page
    first = list(ran)
    reproduced(tmp_path, experiment, seeds=2)
    assert ran[len(first) :] == [f"digits/{label}-seed1" for label in small["methods"]]
    assert (tmp_path / "runs" / "digits.jsonl.gz").exists()
    assert reproduced(tmp_path, experiment, seeds=2) == reproduced(
        tmp_path, experiment, seeds=2, only_page=True
    )
    assert len(ran) == len(first) + 2


def test_later_tuning_seeds_play_only_the_finalists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid grows to 0.8, and 0.2 was a finalist before: its run of the second seed stays."""
    tiers = {"all": {"methods": ["uniform"], "rates": [0.1, 0.2, 0.4], "extensions": 1}}
    experiment = tiny(tiers=tiers, tuning_seeds=[1000, 1001], finalists=2, seeds=1, horizon=12)
    at = {0.1: 11, 0.2: 4, 0.4: 3, 0.8: 2}
    played = []

    def made(jobs: Sequence[Job], folder: Path, *_: object) -> None:
        for job in jobs:
            played.append((job.settings.local_lr, job.settings.seed))
            write_record(
                record(job, curve(12, at[job.settings.local_lr or 0], 12)),
                PackedRuns(folder).path(job),
            )

    monkeypatch.setattr(benchmark, "run_jobs", made)
    play(parts_of(experiment, "smoke"), Request("benchmark", "smoke", tmp_path), lambda _: None)
    assert {key for key in played if key[1] == 1000} == {(rate, 1000) for rate in at}
    assert {key for key in played if key[1] == 1001} == {(rate, 1001) for rate in (0.2, 0.4, 0.8)}


def test_a_label_may_have_settings_of_its_own(tmp_path: Path, ran: list[str]) -> None:
    small = {
        "methods": ["full", "uniform", "uniform+server_lr=0.01"],
        "rates": [0.1],
        "extensions": 0,
    }
    experiment = tiny(tiers={"all": small}, horizon=3, seeds=1)
    page = reproduced(tmp_path, experiment)
    assert {"digits/uniform-seed0", "digits/uniform+server_lr=0.01-seed0"} < set(ran)
    assert "digits-tuning-0.1/uniform+server_lr=0.01-seed1000" in ran
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        area = {row["method"]: float(row["mean_accuracy"]) for row in csv.DictReader(file)}
    assert area["uniform+server_lr=0.01"] < area["uniform"]
    assert "| `uniform+server_lr=0.01` |" in page
    assert page == reproduced(tmp_path, experiment, only_page=True)


def test_a_method_that_cannot_run_is_named_and_the_others_run(
    tmp_path: Path, ran: list[str]
) -> None:
    small = {"methods": ["full", "uniform", "hics-fl(classes=7)"], "rates": [0.1], "extensions": 0}
    page = reproduced(tmp_path, tiny(tiers={"all": small}, horizon=2, seeds=1))
    assert "- digits, `hics-fl(classes=7)`: 0 of 1 test runs (hics-fl" in page
    assert "digits/uniform-seed0" in ran


def test_a_part_that_is_owed_is_played_only_by_name(tmp_path: Path, ran: list[str]) -> None:
    small = {"methods": ["uniform"], "rates": [0.1], "extensions": 0}
    parts = {"digits": {"tier": "all"}, "later": {"tier": "all", "needs": "a week"}}
    experiment = tiny(parts, horizon=2, seeds=1, tiers={"all": small})
    assert "- later: no test run is done (a week)" in reproduced(tmp_path, experiment)
    assert not any(key.startswith("later") for key in ran)
    reproduced(tmp_path, experiment, parts=("later",))
    assert "later/uniform-seed0" in ran


def test_a_part_without_its_data_is_left_out(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    lost = {"tier": "all", "task": "unipen62", "partition": "writer", "seeds": 1}
    small = {"methods": ["uniform"], "rates": [0.1], "extensions": 0}
    experiment = tiny(
        {"digits": {"tier": "all", "seeds": 1}, "letters": lost}, horizon=2, tiers={"all": small}
    )
    assert "- letters: no test run is done (" in reproduced(
        tmp_path, experiment, data_dir=str(tmp_path)
    )
    assert not any(key.startswith("letters") for key in ran)
    with pytest.raises(DeltaflError, match="unknown part 'letter'"):
        reproduced(tmp_path, experiment, parts=("letter",))
