"""The benchmark's runs: tuning results, finalists, what is played, skipped and checked."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_benchmark import MADE_UP, curve, made_up, part_of, record, shown, tiny, write_runs

from deltafl.errors import DeltaflError
from deltafl.simulation import Job, Progress, RunRecord, RunStore, Score, mean_score, run_job, write_record
from reproduction.benchmark import runs as benchmark
from reproduction.benchmark.page import reproduce_benchmark
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.runs import Store, gather, play, tuning_jobs, tuning_result
from reproduction.benchmark.tables import edge_text
from reproduction.reproduce import Request
from reproduction.spec import Experiment


def test_a_rate_that_never_reaches_counts_twice_its_rounds_and_ties_go_to_accuracy() -> None:
    part = part_of()
    job = part.tuning_job("uniform", 0.1, 1000)
    fast, slow = record(job, [0.6, 0.7, 0.7, 0.7]), record(job, [0.1, 0.2, 0.3, 0.4])

    def scored(*runs: RunRecord) -> Score:
        return mean_score([tuning_result(run.run(), part).score for run in runs])

    assert scored(fast, slow).rounds == (1 + 2 * 4) / 2
    assert scored(record(job, [0.6, 0.6], diverged=2)).rounds == 8
    assert scored(slow) < scored(record(job, [0.1, 0.2, 0.3, 0.3]))
    assert scored(fast) < scored(slow)


def edges(folder: Path, reached: dict[float, list[int]]) -> str:
    """The table of edges where uniform sampling has these rounds on two tuning seeds, by rate."""
    tiers = {"all": {"methods": ["full", "uniform"], "rates": list(reached), "extensions": 0}}
    part = part_of(tiers=tiers, tuning_seeds=[1000, 1001], rounds=12)
    jobs = {part.tuning_job("uniform", rate, 1000 + i): at for rate, ats in reached.items() for i, at in enumerate(ats)}
    best = min(reached, key=lambda rate: sum(reached[rate]))
    jobs[part.test_job("uniform", best, 0)] = 5
    for job, at in jobs.items():
        write_record(record(job, curve(12, at, 12)), RunStore(folder).path(job))
    result = gather(part, Store(folder))
    assert result is not None
    return edge_text([result], Store(folder))


@pytest.mark.parametrize(
    ("reached", "text"),
    [
        # Differences -1 and 0: mean -0.5, and t = 12.706 with one degree of freedom makes +- 6.35.
        ({0.1: [9, 9], 0.2: [7, 8], 0.4: [4, 3], 0.8: [3, 3]}, "| 0.8 | 3.0 | 0.4 | 3.5 | -0.5 [-6.9, 5.9] |"),
        ({0.1: [9, 9], 0.2: [8, 9], 0.4: [3, 4]}, "| 0.4 | 3.5 | 0.2 | 8.5 | -5.0 [-5.0, -5.0] |"),
        ({0.1: [3, 3], 0.2: [4, 99], 0.4: [99, 99]}, "| 0.1 | 3.0 | 0.2 | 14.0 | -11.0 ["),  # never: twice 12 rounds
        ({0.1: [9, 9], 0.2: [3, 3], 0.4: [4, 4]}, "No chosen rate is at an edge of its grid."),
        ({0.1: [3, 3], 0.2: [4, 4]}, "| 0.1 | 3.0 | – | – | – |"),
    ],
)
def test_an_edge_is_compared_with_the_best_rate_inside(
    tmp_path: Path, reached: dict[float, list[int]], text: str
) -> None:
    assert text in edges(tmp_path, reached)


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
    with pytest.raises(DeltaflError, match=r"digits.jsonl.gz was run with threshold = 0.5, not 0.55"):
        shown(tmp_path, made_up(threshold=0.55))
    with pytest.raises(DeltaflError, match="has means over 40 rounds, not 30"):
        shown(tmp_path, made_up(tuning_rounds=30))
    path = tmp_path / "tuning" / "digits.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).replace(b'"reached":30.0', b'"reached":"soon"')
    path.write_bytes(gzip.compress(lines))
    with pytest.raises(DeltaflError, match=r"digits.jsonl.gz, line \d+,: reached: .*delete it to run them again"):
        shown(tmp_path, made_up())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that are run, in this process instead of a pool."""
    done: list[str] = []

    def serial(jobs: Sequence[Job], folder: Path, _: int, on_progress: Callable[[Progress], None], *__: object) -> None:
        for job in jobs:
            if not RunStore(folder).get(job):
                run_job(job, folder)
                done.append(job.key)

    monkeypatch.setattr(benchmark, "run_jobs", serial)
    return done


def reproduced(folder: Path, experiment: Experiment, **more: Any) -> str:
    return reproduce_benchmark(experiment, Request("benchmark", "smoke", folder, **more), lambda _: None)


def test_it_tunes_then_measures_and_goes_on_where_it_was(tmp_path: Path, ran: list[str]) -> None:
    small: dict[str, Any] = {"methods": ["full", "uniform"], "rates": [0.1, 0.2], "extensions": 1}
    experiment = tiny(tiers={"all": small}, rounds=3, probe_every=2)
    page = reproduced(tmp_path, experiment, seeds=1)
    tuning = [key for key in ran if "tuning" in key]
    assert ran[: len(tuning)] == tuning
    assert {f"digits-tuning-0.1/{label}-seed1000" for label in small["methods"]} <= set(tuning)
    assert [key for key in ran if key not in tuning] == [f"digits/{label}-seed0" for label in small["methods"]]
    assert "python -m reproduction benchmark --scale smoke --seeds 1" in page
    first = list(ran)
    reproduced(tmp_path, experiment, seeds=2)
    assert ran[len(first) :] == [f"digits/{label}-seed1" for label in small["methods"]]
    assert (tmp_path / "runs" / "digits.jsonl.gz").exists()
    assert reproduced(tmp_path, experiment, seeds=2) == reproduced(tmp_path, experiment, seeds=2, only_page=True)
    assert len(ran) == len(first) + 2


def test_later_tuning_seeds_play_only_the_finalists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid grows to 0.8, and 0.2 was a finalist before: its run of the second seed stays."""
    tiers = {"all": {"methods": ["uniform"], "rates": [0.1, 0.2, 0.4], "extensions": 1}}
    experiment = tiny(tiers=tiers, tuning_seeds=[1000, 1001], finalists=2, seeds=1, rounds=12)
    at = {0.1: 11, 0.2: 4, 0.4: 3, 0.8: 2}
    played = []

    def made(jobs: Sequence[Job], folder: Path, *_: object) -> None:
        for job in jobs:
            played.append((job.settings.local_lr, job.settings.seed))
            write_record(record(job, curve(12, at[job.settings.local_lr or 0], 12)), RunStore(folder).path(job))

    monkeypatch.setattr(benchmark, "run_jobs", made)
    play(parts_of(experiment, "smoke"), Request("benchmark", "smoke", tmp_path), lambda _: None)
    assert {key for key in played if key[1] == 1000} == {(rate, 1000) for rate in at}
    assert {key for key in played if key[1] == 1001} == {(rate, 1001) for rate in (0.2, 0.4, 0.8)}


def test_a_method_that_cannot_run_is_named_and_the_others_run(tmp_path: Path, ran: list[str]) -> None:
    small = {"methods": ["full", "uniform", "hics-fl(classes=7)"], "rates": [0.1], "extensions": 0}
    page = reproduced(tmp_path, tiny(tiers={"all": small}, rounds=2, seeds=1))
    assert "- digits, `hics-fl(classes=7)`: 0 of 1 test runs (hics-fl" in page
    assert "digits/uniform-seed0" in ran


def test_a_part_without_its_data_is_left_out(tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    lost = {"tier": "all", "task": "unipen62", "partition": "writer", "seeds": 1}
    small = {"methods": ["uniform"], "rates": [0.1], "extensions": 0}
    experiment = tiny({"digits": {"tier": "all", "seeds": 1}, "letters": lost}, rounds=2, tiers={"all": small})
    assert "- letters: no test run is done (" in reproduced(tmp_path, experiment, data_dir=str(tmp_path))
    assert not any(key.startswith("letters") for key in ran)
    with pytest.raises(DeltaflError, match="unknown part 'letter'"):
        reproduced(tmp_path, experiment, parts=("letter",))
