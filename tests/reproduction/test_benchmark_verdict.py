"""What decides the benchmark's verdict: each rule has a case in which the opposite rule would say something else."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_benchmark import MADE_UP, made_up, record, shown, tiny, write_runs

from deltafl.simulation import RunRecord, RunStore, Search
from reproduction.benchmark.judge import (
    Gap,
    Judgement,
    elsewhere_text,
    gap_of,
    headline,
    judge,
    judge_all,
    measures,
    rounds_at,
    sentence,
)
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.runs import Method, Result, Store, gather

BENCHMARK = Path(__file__).parents[2] / "results" / "benchmark"


def result_of(folder: Path, table: dict[str, list[int]], **changes: Any) -> Result:
    """A part of made-up runs; tuning runs at the best rate are as the run of seed 0."""
    tiers = {"all": {"methods": list(table), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    experiment = made_up(tiers=tiers, **changes)
    write_runs(folder, experiment, table)
    result = gather(parts_of(experiment, "smoke")[0], Store(folder))
    assert result is not None
    return result


def test_our_best_is_that_of_the_tuning_seeds_not_of_the_test_seeds(tmp_path: Path) -> None:
    """`spread` needs 12 rounds on the tuning seed and fewer than `delta-centred` on the others."""
    result = result_of(tmp_path, MADE_UP | {"spread": [12, 6, 5, 6, 6]})
    spread, centred = (gap_of(result, label, measures(result.part)[0]).value for label in ("spread", "delta-centred"))
    assert (spread or 0) > (centred or 0)
    assert judge(result).best == "delta-centred"


@pytest.mark.parametrize(("other", "rival"), [("md-fixed", True), ("divfl", True), ("fedis", False), ("ocs", False)])
def test_rivals_know_no_more_than_a_server(tmp_path: Path, other: str, rival: bool) -> None:
    judgement = judge(result_of(tmp_path, MADE_UP | {other: [6, 7, 5, 7, 6]}))
    assert [pair.second for pair in judgement.ahead] == [other] * rival
    assert headline([judgement]) == ("is missed" if rival else "is reached")


LATE = [20, 22, 21, 23, 22]
LATER = [30, 34, 28, 32, 99]
NEVER = [99] * 4


def test_a_miss_beside_uniform_runs_that_were_cut_short_is_open(tmp_path: Path) -> None:
    """The gap is wider than it looks, so that G is more than 0.4."""
    judgement = judge(result_of(tmp_path / "all", MADE_UP | {"delta-centred": LATE}))
    assert (judgement.status, judgement.gap.bound) == ("missed", "")
    judgement = judge(result_of(tmp_path / "cut", MADE_UP | {"delta-centred": LATE, "uniform": LATER}))
    assert (judgement.gap.high or 1) < 0.7
    assert (judgement.status, judgement.gap.bound) == ("open", "≥")


def test_a_g_of_runs_that_were_cut_short_is_marked_as_a_bound(tmp_path: Path) -> None:
    """Own runs: at most; those of uniform sampling: at least below 1, and at most above."""
    cut, best = [8, 9, 7, 9, 99], [4, 4, 3, 4, 4]
    found = {}
    for name, changes in (
        ("own", {"delta-centred": cut}),
        ("uniform", {"uniform": LATER}),
        ("both", {"delta-centred": cut, "uniform": LATER}),
        ("above", {"delta-centred": best, "uniform": LATER}),
    ):
        result = result_of(tmp_path / name, MADE_UP | changes)
        found[name] = gap_of(result, "delta-centred", measures(result.part)[0]).bound
        assert gap_of(result, "full", measures(result.part)[0]).bound == ""
    assert found == {"own": "≤", "uniform": "≥", "both": "≥≤", "above": "≤"}
    page = shown(tmp_path / "own", made_up())
    assert "| ≤ 0." in page.split("## digits")[1]


def test_full_participation_that_was_cut_short_makes_no_gap(tmp_path: Path) -> None:
    """In 10 rounds of 40 four runs are not there: nobody knows when it would have been."""
    judgement = judge(result_of(tmp_path / "10", MADE_UP | {"full": [9, *NEVER]}, rounds_of={"full": 10}))
    assert (judgement.status, judgement.gap.value) == ("open", None)
    assert "4 runs of full never reached the threshold" in sentence(judgement)
    assert headline([judgement]) == "is not decided"
    judgement = judge(result_of(tmp_path / "40", MADE_UP | {"full": [20, *NEVER], "uniform": [21, *NEVER]}))
    assert "never reached the threshold" in sentence(judgement)
    assert "no gap to close" not in sentence(judgement)


@pytest.mark.parametrize(("clients", "counts"), [(40, True), (42, False)])
def test_the_target_is_about_twenty_clients_for_each_that_is_selected(
    tmp_path: Path, clients: int, counts: bool
) -> None:
    result = result_of(tmp_path, MADE_UP)
    methods = [
        m._replace(runs={s: r._replace(draws_m=np.ones(clients, dtype=np.int64)) for s, r in m.runs.items()})
        for m in result.methods
    ]
    judgement = judge(result._replace(methods=tuple(methods)))  # 2 are selected
    assert ("beyond the range of the target" in sentence(judgement)) is not counts
    assert headline([judgement]) == ("is reached" if counts else "is not decided")


def test_a_task_counts_as_one_with_labels_only_if_our_best_uses_them(tmp_path: Path) -> None:
    """`balanced` is run and is behind `delta-centred`: that the labels are known is no merit of the result."""
    judgements = judge_all([result_of(tmp_path / "no", MADE_UP | {"balanced": [12, 13, 12, 14, 12]})])
    assert [j.best for j in judgements] == ["delta-centred", "delta-centred"]
    assert sentence(judgements[1]).startswith("digits, labels known beforehand but not used: ")
    assert headline(judgements) == "is reached"
    judgements = judge_all([result_of(tmp_path / "yes", MADE_UP | {"balanced": [6, 7, 6, 7, 6]})])
    assert sentence(judgements[1]).startswith("digits, labels known beforehand: ")
    assert headline(judgements).startswith("is reached where our method uses every client's labels, and is reached")


def test_other_thresholds_are_shown_beside_the_chosen_one() -> None:
    """Curves that rise by a hundredth a round, twice as fast, and in between: G is the same at each of them."""
    part = parts_of(tiny(rounds=100), "smoke")[0]
    search = Search((0.1,), (0.1,), 0.1, "", None)
    steps = {"uniform": 1.0, "delta-centred": 1.5, "full": 2.0}

    def method(label: str) -> Method:
        runs = {}
        for seed in range(3):
            job = part.test_job(label, 0.1, seed)
            runs[seed] = record(job, [(i + 1 + seed) * steps[label] / 100 for i in range(100)]).run()
        return Method(label, search, runs)

    result = Result(part, tuple(map(method, steps)))
    judgement = judge(result)._replace(best="delta-centred", gap=Gap(0.7, 0.6, 0.8, 3))
    text = elsewhere_text(judgement)
    for threshold in (0.45, 0.48, 0.52):
        gap = gap_of(result, "delta-centred", rounds_at(threshold))
        assert f"{100 * threshold:g} %: {gap.value:.2f} [" in text


def committed_runs(part: str, method: str) -> list[RunRecord]:
    return [run for run in RunStore(BENCHMARK).records(part) if run.sampler == method]


def first_at(run: RunRecord, threshold: float) -> float:
    there = [at for at, value in zip(run.round, run.accuracy, strict=True) if (value or 0.0) >= threshold]
    return there[0] if there and run.diverged is None else run.settings["rounds"]


@pytest.mark.parametrize("part", ["digits-unequal", "fashion-mnist", "fashion-quantity"])
def test_committed_gaps_are_those_of_the_committed_runs(part: str) -> None:
    """G and both ends of its interval, each end by the paired t that it is just not refuted by."""
    with (BENCHMARK / "table.csv").open(encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["part"] == part}
    threshold, checked = committed_runs(part, "uniform")[0].settings["threshold"], 0

    def rounds_s(method: str) -> Any:
        return np.array([first_at(run, threshold) for run in committed_runs(part, method)])

    base_s, full_s = rounds_s("uniform"), rounds_s("full")
    for method in ("innovation", "pracdelta", "fedvarp", "balanced", "md-fixed"):
        cell, gained_s = rows[method], base_s - rounds_s(method)
        assert float(cell["gap_rounds"]) == pytest.approx(gained_s.mean() / (base_s - full_s).mean(), abs=1e-4)
        for end in ("low", "high"):
            rest_s = gained_s - float(cell[f"gap_rounds_{end}"]) * (base_s - full_s)
            if gained_s.any():
                t = rest_s.mean() / (rest_s.std(ddof=1) / len(rest_s) ** 0.5)
                assert abs(t) == pytest.approx({10: 2.262157, 5: 2.776445}[len(rest_s)], rel=2e-3)
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["reached", "reached"], "is reached"),
        (["missed", "missed"], "is missed"),
        (["open", "open"], "is not decided"),
        (["missed", "open"], "is missed on 1 and open on 1 of 2 tasks"),
        (["reached", "missed", "open", "open"], "is reached on 1, missed on 1 and open on 2 of 4 tasks"),
        (["no gap"], "is not decided"),
    ],
)
def test_the_headline_claims_no_more_than_the_parts(tmp_path: Path, statuses: list[Any], verdict: str) -> None:
    result = result_of(tmp_path, MADE_UP)
    assert headline([Judgement(result, False, "innovation", status) for status in statuses]) == verdict
