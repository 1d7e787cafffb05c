"""The recommendation follows the benchmark's table, and what the federation allows."""

import csv
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import mean
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import deltafl
from deltafl.analysis import recommendation
from deltafl.analysis.recommendation import SUITED, Evidence, read_evidence, recommend
from deltafl.errors import DeltaflError
from deltafl.samplers import is_unbiased, parse_label
from deltafl.server.average import Average
from reproduction.evidence import EVIDENCE, evidence_text


def test_the_evidence_is_the_benchmarks_table() -> None:
    assert EVIDENCE.read_text(encoding="utf-8") == evidence_text()
    assert all(is_unbiased(row.label) and row.low <= row.gap <= row.high for row in read_evidence())


@pytest.mark.parametrize(
    ("unequal", "labels", "census", "memory", "reachable"),
    [*itertools.product((None, True, False), *[(True, False)] * 4)],
)
def test_what_is_recommended_is_possible_and_the_best(
    unequal: bool | None, labels: bool, census: bool, memory: bool, reachable: bool
) -> None:
    found = recommend(
        unequal_sizes=unequal, labels=labels, census=census, memory=memory, reachable=reachable
    )
    plan = deltafl.make_plan(
        found.label, deltafl.Population.from_sizes([3, 1, 2], aux=[[1.0], [2.0], [4.0]]), n=2
    )
    assert census or plan.census is None
    assert labels or plan.census is not None or not plan.rule.control.uses_aux
    assert memory or not plan.rule.control.remembers
    assert {row.label for row in found.evidence} == {found.label}
    assert all(unequal in (None, row.unequal) for row in found.evidence)
    assert parse_label(found.label).name in str(found)
    # What it advises to add for a model, it can be given.
    advised = re.findall(r"add (\+[^ ;]+)", " ".join(found.caveats))
    assert advised
    for settings in advised:
        deltafl.make_plan(found.label + found.settings + settings, plan.population, n=2)


def test_the_known_answers() -> None:
    assert recommend().label == "census"
    assert recommend(labels=True, census=False).label == "balanced"
    assert recommend(census=False).label == "innovation@local-pivotal"
    counted: Any = np.int64(1000)  # as whoever counts with NumPy gives it
    assert "4 GB" in recommend(census=False, clients=counted, parameters=10**6).cost
    # 129 numbers of 8 bytes, and 11 for each of 3907 blocks.
    assert "(345 GB)" in recommend(clients=10**6, parameters=10**6).cost
    assert any("available" in sentence for sentence in recommend(reachable=False).caveats)
    only = recommend(census=False, memory=False, model="cnn")
    assert only.label == "uniform" and "No other" in only.why
    with pytest.raises(DeltaflError, match="clients is 0; write a whole number >= 1"):
        recommend(clients=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("unequal", "labels", "census", "memory", "reachable"),
    [*itertools.product((None, True, False), *[(True, False)] * 4)],
)
def test_what_is_recommended_for_very_many_clients_can_do_as_many(
    unequal: bool | None, labels: bool, census: bool, memory: bool, reachable: bool
) -> None:
    found = recommend(
        unequal_sizes=unequal,
        labels=labels,
        census=census,
        memory=memory,
        reachable=reachable,
        clients=100_000,
    )
    assert deltafl.make_sampler(found.label).most_clients is None
    assert found.evidence
    few = recommend(
        unequal_sizes=unequal, labels=labels, census=census, memory=memory, reachable=reachable
    )
    assert few.label in (found.label, "clustered-sampling-2")


def test_absence_rules_no_method_out() -> None:
    table = EVIDENCE.parents[3] / "results" / "benchmark" / "table.csv"
    with table.open(encoding="utf-8") as file:
        gaps = {
            row["method"]: float(row["gap_mean_accuracy"])
            for row in csv.DictReader(file)
            if row["part"] == "digits-away" and row["unbiased"] == "True"
        }
    fitting = [row.label for row in read_evidence() if not row.settings and row.label in gaps]
    # Where clients were away the same method was best.
    assert recommend(reachable=False).label == max(fitting, key=lambda label: gaps[label])
    for labels, census, memory in itertools.product([True, False], repeat=3):
        found, beside = (
            recommend(labels=labels, census=census, memory=memory, reachable=reachable)
            for reachable in (True, False)
        )
        assert (beside.label, beside.why) == (found.label, found.why)


def test_where_intervals_overlap_all_tasks_decide_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = "clustered-sampling-1"
    best = "fedstas"
    fitting = (leader, best, "cluster-is")
    measured = [row for row in read_evidence() if row.label in fitting]
    monkeypatch.setattr(recommendation, "read_evidence", lambda: measured)
    gaps = {
        sizes: mean_gaps(row for row in measured if sizes in (None, row.unequal))
        for sizes in (None, True)
    }
    found = recommend(unequal_sizes=True)
    assert gaps[True][leader] > gaps[True][best]
    assert gaps[None].get(leader, 0) < gaps[None][best]
    assert found.label == best
    assert f"{leader} leads there with {gaps[True][leader]:.2f}, but" in found.why
    assert f"{gaps[None][best]:.2f}, on all 5 tasks" in found.why
    assert found.caveats[0].startswith(f"Not clearly behind: {leader}")
    monkeypatch.undo()
    assert not any("Not clearly behind" in sentence for sentence in recommend().caveats)


def mean_gaps(rows: Iterable[Evidence]) -> dict[str, float]:
    """The mean over data sets of the means over tasks, of methods that have all tasks."""
    by_task: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        by_task[row.data, row.task][row.label] = row.gap
    data = {name for name, _ in by_task}
    return {
        label: mean(
            mean(gaps[label] for (name, _), gaps in by_task.items() if name == each)
            for each in data
        )
        for label in set.intersection(*(set(gaps) for gaps in by_task.values()))
    }


@pytest.mark.parametrize(("labels", "census"), [(True, False), (False, False), (False, True)])
def test_the_printed_lines_for_python_and_flower_run(labels: bool, census: bool) -> None:
    clientapp = pytest.importorskip("flwr.clientapp")
    flower = pytest.importorskip("deltafl.flower")
    found = recommend(labels=labels, census=census)
    lines = dict(re.findall(r"^(\w.*):\n((?:  .*\n?)+)", found.usage, re.MULTILINE))
    assert str(found).endswith(found.usage)
    assert f"--samplers 'full,uniform,{found.label}+average=0.5'" in lines["Command line"]
    names = {
        "deltafl": deltafl,
        "sizes": range(10, 30),
        "label_shares": np.eye(20),
        "answers": [None] * 20,
        **vars(flower),
        **vars(clientapp),
    }
    exec(dedent(lines["Python"]) + dedent(lines["Flower"]), names)
    assert names["plan"].sampler == names["strategy"].rules.plan.sampler
    parts = names["plan"].parts
    assert parts == names["strategy"].rules.plan.parts
    assert Average(0.5) in parts


def test_a_model_brings_its_settings_and_their_numbers() -> None:
    found = recommend(model="linear")
    assert found.label == "census"
    assert {row.settings for row in found.evidence} == {found.settings}
    assert found.settings in SUITED["linear"]
    assert f"'full,uniform,census{found.settings}'" in found.usage
    # Tasks of CNNs are not among them.
    assert {row.data for row in found.evidence} <= {"digits", "mnist"}
    cnn = recommend(model="cnn")
    assert {row.data for row in cnn.evidence} == {"fashion-mnist"}
    assert "mime=0.7" in str(cnn)
    assert not any("without +average" in sentence for sentence in found.caveats)
    with pytest.raises(DeltaflError, match="write 'linear' or 'cnn'"):
        recommend(model="lstm")  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [False, True])
def test_a_full_first_round_is_named_only_where_every_client_can_take_one(labels: bool) -> None:
    rows = [row for row in read_evidence() if row.settings in SUITED["linear"]]
    assert any("first_round" in row.settings for row in rows)
    without = recommend(model="linear", census=False, labels=labels)
    assert "first_round" not in without.settings and without.label != "census"
    # The next best names have it where they may.
    assert "first_round" not in without.why
    assert "first_round" in recommend(model="linear", labels=labels).why
