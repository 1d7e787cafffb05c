"""The benchmark's search for each method's rate: the grid that grows, finalists, tuning runs and their scores."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deltafl.simulation.record import RunRecord, RunStore, write_record
from deltafl.simulation.sweep import Job
from made_up_benchmark import curve, part_of, record, tiny
from reproduction.benchmark import run as benchmark
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.results import Store, tuning
from reproduction.benchmark.tried import read_tried, tried_of
from reproduction.benchmark.tuning import Score, Screen, score, search
from reproduction.request import Request


def best_at(**optimum: float) -> Callable[[str, float], Score]:
    return lambda label, rate: Score(abs(math.log2(rate / optimum[label])), 0.0)


@pytest.mark.parametrize(
    ("optimum", "rates", "best", "edge"),
    [
        (0.2, (0.1, 0.2, 0.4), 0.2, ""),
        (0.4, (0.1, 0.2, 0.4, 0.8), 0.4, ""),
        (1.6, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), 1.6, ""),
        (6.4, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), 3.2, "high"),
        (0.05, (0.025, 0.05, 0.1, 0.2, 0.4), 0.05, ""),
        (0.001, (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4), 0.0125, "low"),
    ],
)
def test_the_grid_grows_where_the_best_rate_is_at_its_edge(
    optimum: float, rates: tuple[float, ...], best: float, edge: str
) -> None:
    found = search((0.1, 0.2, 0.4), 3, ("one",), best_at(one=optimum))["one"]
    assert found.rates == pytest.approx(rates)
    assert found.best == pytest.approx(best)
    assert found.edge == edge


def test_no_rate_is_chosen_while_runs_of_the_grid_are_missing() -> None:
    found = search((0.1, 0.2), 3, ("one",), lambda _, rate: Score(-rate, 0.0) if rate < 0.3 else None)
    assert found == {"one": ((0.1, 0.2, 0.4), (0.1, 0.2, 0.4), None, "", None)}


def test_all_methods_search_the_same_grid() -> None:
    """One method wants a higher rate, another a lower one: the third has all of them to choose from."""
    found = search((0.1, 0.2, 0.4), 3, ("a", "b", "c"), best_at(a=0.4, b=0.05, c=0.2))
    assert {search.rates for search in found.values()} == {(0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
    assert [found[label].best for label in "abc"] == [0.4, 0.05, 0.2]
    assert {search.edge for search in found.values()} == {""}


def test_a_method_whose_runs_are_missing_does_not_hold_up_the_others() -> None:
    best = best_at(a=0.8, b=0.2)
    found = search((0.1, 0.2, 0.4), 3, ("a", "b"), lambda label, rate: best(label, rate) if label == "a" else None)
    assert found["a"].best == 0.8
    assert found["b"].best is None
    assert found["b"].rates == found["a"].rates


def test_only_the_best_rates_of_the_first_seed_are_finalists() -> None:
    """0.4 wins on the first seed and loses on all; 0.8, best on all, was third on the first, so nobody tried it."""
    first = {0.1: 50.0, 0.2: 31.0, 0.4: 29.0, 0.8: 40.0}
    both = {0.1: 10.0, 0.2: 30.0, 0.4: 60.0, 0.8: 10.0}
    screen = Screen(2, lambda _, rate: Score(first[rate], 0.0))
    found = search(tuple(first), 3, ("one",), lambda _, rate: Score(both[rate], 0.0), screen)["one"]
    assert (found.finalists, found.best, found.edge) == ((0.2, 0.4), 0.2, "")
    waiting = search(tuple(first), 3, ("one",), lambda _, rate: None if rate == 0.4 else Score(both[rate], 0), screen)
    assert (waiting["one"].finalists, waiting["one"].best) == ((0.2, 0.4), None)
    missing = Screen(2, lambda _, rate: Score(first[rate], 0.0) if rate < 0.8 else None)
    nobody = search(tuple(first), 3, ("one",), lambda _, rate: Score(both[rate], 0.0), missing)["one"]
    assert (nobody.finalists, nobody.best) == ((), None)


def test_the_grid_grows_where_the_best_finalist_is_at_its_edge() -> None:
    screen = Screen(2, best_at(one=0.4))
    found = search((0.1, 0.2, 0.4), 3, ("one",), best_at(one=0.8), screen)["one"]
    assert (found.rates, found.finalists, found.best, found.edge) == ((0.1, 0.2, 0.4, 0.8), (0.2, 0.4), 0.4, "")


def test_who_was_a_finalist_before_the_grid_grew_stays_one() -> None:
    """The other method makes it grow; on the first seed 0.8 and 0.4 are then the best of this one, 0.2 on all."""
    first = {"one": {0.1: 50.0, 0.2: 31.0, 0.4: 29.0, 0.8: 28.0}, "other": {0.1: 50.0, 0.2: 40.0, 0.4: 30.0, 0.8: 35.0}}
    every = {"one": {0.2: 30.0, 0.4: 32.0, 0.8: 60.0}, "other": {0.2: 40.0, 0.4: 30.0, 0.8: 35.0}}
    screen = Screen(2, lambda label, rate: Score(first[label][rate], 0.0))
    found = search((0.1, 0.2, 0.4), 1, ("one", "other"), lambda label, rate: Score(every[label][rate], 0.0), screen)
    assert (found["one"].rates, found["one"].finalists, found["one"].best) == (
        (0.1, 0.2, 0.4, 0.8),
        (0.2, 0.4, 0.8),
        0.2,
    )
    assert (found["other"].finalists, found["other"].best, found["other"].edge) == ((0.2, 0.4, 0.8), 0.4, "")


def test_later_tuning_seeds_play_only_the_finalists(tmp_path: Path) -> None:
    tiers = {"all": {"methods": ["full", "uniform"], "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    part = part_of(tiers=tiers, tuning_seeds=[1000, 1001], finalists=2)

    def planned() -> list[tuple[int, float]]:
        jobs = tuning(part, ("uniform",), Store(tmp_path))
        return [(job.settings.seed, job.settings.local_lr or 0) for job in jobs]

    first = [(1000, 0.1), (1000, 0.2), (1000, 0.4)]
    assert planned() == first
    for rate, accuracy_r in ((0.1, [0, 0, 0, 0.9]), (0.2, [0.9] * 4), (0.4, [0, 0.9, 0.9, 0.9])):
        job = part.tuning_job("uniform", rate, 1000)
        write_record(record(job, accuracy_r), RunStore(tmp_path).path(job))
    assert planned() == [*first, (1001, 0.2), (1001, 0.4)]


def test_runs_of_rates_that_are_finalists_no_more_leave_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid grows to 0.8, and 0.2 was a finalist before: its run of the second seed is a line, too."""
    tiers = {"all": {"methods": ["uniform"], "rates": [0.1, 0.2, 0.4], "extensions": 1}}
    experiment = tiny(tiers=tiers, tuning_seeds=[1000, 1001], finalists=2, seeds=1, rounds=12)
    at = {0.1: 11, 0.2: 4, 0.4: 3, 0.8: 2}

    def play(jobs: Sequence[Job], folder: Path, *_: object) -> None:
        for job in jobs:
            write_record(record(job, curve(12, at[job.settings.local_lr or 0], 12)), RunStore(folder).path(job))

    monkeypatch.setattr(benchmark, "run_jobs", play)
    parts = parts_of(experiment, "smoke")
    benchmark.run_parts(experiment, parts, parts, Request("benchmark", "smoke", tmp_path), lambda _: None)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-tuning.jsonl", "digits.jsonl.gz"]
    kept = {key[1:] for key in read_tried(parts[0], tmp_path)}
    assert kept == {(rate, 1000) for rate in at} | {(rate, 1001) for rate in (0.2, 0.4, 0.8)}


def test_tuning_runs_can_be_shorter() -> None:
    part = part_of(tuning_rounds=3, rounds_of={"full": 2})
    rounds = [part.tuning_job(label, 0.1, 1000).settings.rounds for label in ("uniform", "full")]
    assert rounds == [3, 2]
    assert (part.tuning_horizon, part.horizon, part.test_job("uniform", 0.1, 0).settings.rounds) == (2, 2, 4)


def test_a_rate_that_never_reaches_counts_twice_its_rounds_and_ties_go_to_accuracy() -> None:
    part = part_of()
    job = part.tuning_job("uniform", 0.1, 1000)
    fast, slow = record(job, [0.6, 0.7, 0.7, 0.7]), record(job, [0.1, 0.2, 0.3, 0.4])
    lost = record(job, [0.6, 0.6], diverged=2)

    def scored(*runs: RunRecord) -> Score:
        return score([tried_of(run, part) for run in runs])

    assert scored(fast, slow).rounds == (1 + 2 * 4) / 2
    assert scored(lost).rounds == 8
    assert scored(slow) < scored(record(job, [0.1, 0.2, 0.3, 0.3]))
    assert scored(fast) < scored(slow)
