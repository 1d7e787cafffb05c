"""What decides the benchmark's verdict: each rule has a case in which the opposite rule would
say something else.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_benchmark import MADE_UP, VIEW, made_up, write_runs

from deltafl.simulation import RunRecord, Score
from reproduction.benchmark.judge import (
    Judgement,
    gap_of,
    headline,
    judge,
    measures,
    no_task,
    sentence,
)
from reproduction.benchmark.parts import parts_of
from reproduction.benchmark.runs import Result, Store, gather
from reproduction.records import PackedRuns
from reproduction.spec import View

BENCHMARK = Path(__file__).parents[2] / "results" / "benchmark"
SEEN = View(**VIEW)


def result_of(folder: Path, table: dict[str, list[int]], **changes: Any) -> Result:
    """A part of made-up runs; tuning runs at the best rate are as the run of seed 0."""
    tiers = {"all": {"methods": list(table), "rates": [0.1, 0.2, 0.4], "extensions": 0}}
    experiment = made_up(tiers=tiers, **changes)
    write_runs(folder, experiment, table)
    result = gather(parts_of(experiment, "smoke")[0], Store(folder))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("ours", "status"),
    [
        ([8, 9, 7, 9, 8], "reached"),
        ([20, 22, 21, 23, 22], "missed"),  # 0.32 [0.26, 0.37]
        ([10, 14, 9, 7, 11], "open"),  # 0.79 [0.64, 0.96]
        ([4, 4, 4, 4, 20], "open"),  # 0.95 [0.58, 1.36]: not surely above 0.7
    ],
)
def test_the_verdict_is_that_of_the_interval(tmp_path: Path, ours: list[int], status: str) -> None:
    judgement = judge(result_of(tmp_path, MADE_UP | {"delta-centred": ours}), SEEN)
    assert judgement.status == status


def test_open_is_said_only_after_all_seeds(tmp_path: Path) -> None:
    result = result_of(tmp_path, MADE_UP | {"delta-centred": [10, 14, 9, 7, 11]})
    few = [
        method._replace(runs={s: r for s, r in method.runs.items() if s < 3})
        for method in result.methods
    ]
    judgement = judge(result._replace(methods=tuple(few)), SEEN)
    assert judgement.status == "running"
    assert "not decided after 3 of 5 seeds, `delta-centred` closes 0." in sentence(judgement)
    assert headline([judgement]) == "is not decided"


@pytest.mark.parametrize(
    ("other", "rival"),
    [
        ("md-fixed", True),
        ("divfl", True),
        ("fed-cbs", True),
        ("fedis", False),
        ("ocs", False),
        ("balanced", False),
    ],
)
def test_rivals_are_methods_of_others_biased_or_told_labels(
    tmp_path: Path, other: str, rival: bool
) -> None:
    judgement = judge(result_of(tmp_path, MADE_UP | {other: [5, 6, 5, 7, 6]}), SEEN)
    assert [pair.second for pair in judgement.ahead()] == [other] * rival
    assert judgement.status == ("missed" if rival else "reached")
    more = {"divfl": " (biased)", "fed-cbs": " (biased, needs labels)"}.get(other, "")
    assert (f"ahead of it: `{other}`{more} by " in sentence(judgement)) is rival


def test_a_better_method_of_ours_is_said_but_does_not_decide(tmp_path: Path) -> None:
    for label, more in (
        ("spread", ""),
        ("balanced", " (needs labels)"),
        ("balanced+public=2", " (needs labels, public data)"),
    ):
        folder = tmp_path / label
        judgement = judge(result_of(folder, MADE_UP | {label: [5, 6, 5, 7, 6]}), SEEN)
        assert judgement.status == "reached"
        assert (
            f"; ahead of it: none of 2 methods of others; of ours `{label}`{more} by "
            in sentence(judgement)
        )
    judgement = judge(result_of(tmp_path / "b", MADE_UP | {"spread": [9, 9, 8, 10, 9]}), SEEN)
    assert sentence(judgement).endswith("; ahead of it: none of 2 methods of others.")


def test_a_narrow_gap_is_no_task_on_test_or_tuning_seeds(tmp_path: Path) -> None:
    """One round of 40 between 0.6 and 0.4 is half a point at most."""
    narrow = judge(result_of(tmp_path, MADE_UP | {"uniform": [6, 7, 6, 8, 7]}), SEEN)
    assert narrow.status == "no task"
    assert "no task to judge by: full participation is only 1." in sentence(narrow)
    assert headline([narrow]) == "is not decided"
    result = result_of(tmp_path / "wide", MADE_UP)
    assert no_task(result) == ""
    uniform = result.methods[1]
    scored = uniform._replace(search=uniform.search._replace(score=Score(0.0, -0.55)))
    text = no_task(result._replace(methods=(result.methods[0], scored, *result.methods[2:])))
    assert text.endswith("points on the tuning seeds above uniform")


def test_an_unmeasured_method_is_named(tmp_path: Path) -> None:
    table = {label: at for label, at in MADE_UP.items() if label != "delta-centred"}
    assert "no G yet (needs more seeds of full, uniform and `delta-centred`)" in sentence(
        judge(result_of(tmp_path, table), SEEN)
    )


def committed_runs(part: str, method: str) -> list[RunRecord]:
    return [run for run in PackedRuns(BENCHMARK).records(part) if run.sampler == method]


@pytest.mark.parametrize(
    "part",
    sorted(
        {
            path.name.split(".")[0].split("+")[0]
            for path in BENCHMARK.glob("runs/*")
            if "-tuning-" not in path.name
        }
    ),
)
def test_committed_gaps_are_those_of_the_committed_runs(part: str) -> None:
    """G and both ends of its interval, each end by the paired t that it is just not refuted by."""
    with (BENCHMARK / "table.csv").open(encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["part"] == part}
    checked = 0

    def mean_s(method: str) -> Any:
        return np.array(
            [
                np.mean([value or 0.0 for value in run.accuracy])
                for run in committed_runs(part, method)
            ]
        )

    base_s = mean_s("uniform")
    full_s = mean_s("full")
    for method in {
        "innovation",
        "pracdelta",
        "fedvarp",
        "balanced",
        "census",
        "fedentopt",
    } & rows.keys():
        cell = rows[method]
        gained_s = mean_s(method) - base_s
        assert float(cell["gap_mean_accuracy"]) == pytest.approx(
            gained_s.mean() / (full_s - base_s).mean(), abs=1e-4
        )
        for end in ("low", "high"):
            rest_s = gained_s - float(cell[f"gap_mean_accuracy_{end}"]) * (full_s - base_s)
            t = rest_s.mean() / (rest_s.std(ddof=1) / len(rest_s) ** 0.5)
            assert abs(t) == pytest.approx(
                {20: 2.093024, 10: 2.262157, 6: 2.570582}[len(rest_s)], rel=2e-3
            )
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["reached", "reached"], "is reached"),
        (["missed", "missed", "no task"], "is missed"),
        (["open", "open"], "is not decided"),
        (["missed", "open"], "is missed on 1 and open on 1 of 2 tasks"),
        (
            ["reached", "missed", "open", "open", "no task"],
            "is reached on 1, missed on 1 and open on 2 of 4 tasks",
        ),
        (["running"], "is not decided"),
    ],
)
def test_the_headline_claims_no_more_than_the_parts(
    tmp_path: Path, statuses: list[Any], verdict: str
) -> None:
    result = result_of(tmp_path, MADE_UP)
    assert headline([Judgement(result, "innovation", status) for status in statuses]) == verdict


def test_the_headline_says_how_many_tasks_are_judged(tmp_path: Path) -> None:
    result = result_of(tmp_path, MADE_UP)
    found = [Judgement(result, "innovation", status) for status in ("no task", "reached")]
    assert headline(found, 5) == "is reached on 1 of 5 tasks so far"
    assert headline(found, 2) == "is reached"


def test_gaps_are_paired(tmp_path: Path) -> None:
    """The seeds of a method that has fewer runs are compared with the same seeds of the others."""
    result = result_of(tmp_path, MADE_UP)
    methods = {method.label: method for method in result.methods}
    one = methods["pracdelta"]._replace(runs={2: methods["pracdelta"].runs[2]})
    gap = gap_of(
        result._replace(methods=(methods["full"], methods["uniform"], one)),
        "pracdelta",
        measures(result.part)[0],
    )
    assert gap.seeds == 1
    value = measures(result.part)[0].value
    base, own, full = (
        value(methods[label].runs[2]) or 0 for label in ("uniform", "pracdelta", "full")
    )
    assert gap.value == pytest.approx((own - base) / (full - base))
