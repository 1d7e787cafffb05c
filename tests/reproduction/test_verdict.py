"""Verdicts: statements from intervals with known ends, and the rule that sums them up."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats

from deltafl.analysis import Run
from deltafl.errors import DeltaflError
from reproduction.groups import Group, Row
from reproduction.measures import (
    Measure,
    Statement,
    Status,
    accuracy,
    best_within,
    compare,
    late_loss,
    late_probe,
    moving_average,
    probed,
    reach,
    rounds_to,
)
from reproduction.verdict import NO_ORDER, judge, ordered, pairs_table, sum_up, verdict_text
from tools.runs import make_run

Numbers = list[float | None]
GOOD = Measure("number", "difference", True, lambda run: float(run.accuracy_r[0]) or math.nan)
FEW = GOOD._replace(name="count", form="ratio", higher=False)


def run_of(sampler: str, seed: int, accuracy_r: Any = None, loss_r: Any = None) -> Run:
    """A run with the given curve."""
    metric: Literal["accuracy", "loss"] = "loss" if accuracy_r is None else "accuracy"
    curve = np.array(loss_r if accuracy_r is None else accuracy_r, dtype=np.float64)
    column: dict[str, Any] = {f"{metric}_r": curve}
    return make_run(sampler, seed, 1, metric, len(curve))._replace(**column)


def against(measure: Measure, first: Numbers, second: Numbers) -> Statement:
    sides = [
        {seed: run_of("a", seed, [value or 0.0]) for seed, value in enumerate(side)}
        for side in (first, second)
    ]
    return compare("here", measure, ("A", sides[0]), ("B", sides[1]))


def climbs(sampler: str, reaches: dict[int, int | None], top: float = 0.9) -> Row:
    """A row whose seeds first have accuracy 0.7 or more at the given round, and ``top`` from
    there on.
    """
    curves = {
        seed: [0.1 if at is None or r < at else top + 0.001 * seed for r in range(1, 61)]
        for seed, at in reaches.items()
    }
    return Row(
        sampler,
        sampler.upper(),
        {seed: run_of(sampler, seed, curve) for seed, curve in curves.items()},
    )


def group(
    rows: list[Row], order: tuple[str, ...], baseline: str = "fedavg", threshold: float | None = 0.7
) -> Group:
    return Group(
        "one", "One", tuple(rows), baseline, tuple((label,) for label in order), threshold, {}
    )


def test_a_paired_difference_is_that_of_scipy() -> None:
    a = [0.31, 0.35, 0.42, 0.38]
    b = [0.30, 0.33, 0.36, 0.37]
    found = against(GOOD, list(a), list(b))
    test = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.estimate == pytest.approx(np.mean(a) - np.mean(b))
    assert (found.low, found.high) == pytest.approx((test.low, test.high))
    assert (found.pairs, found.status) == (4, "open")


@pytest.mark.parametrize(
    ("first", "second", "status", "pairs"),
    [
        ([0.8], [0.5], "no interval", 1),
        ([], [0.5, 0.6], "no interval", 0),
        ([0.8, 0.9], [0.5, 0.61], "no interval", 2),
        ([0.8, 0.9, 0.7], [0.5, 0.61, 0.42], "shown", 3),
        (
            [0.8, 0.7, 0.9],
            [0.7, 0.6, 0.8],
            "open",
            3,
        ),  # 0.1 each, up to rounding: an interval without width
        ([0.9, 0.2, 0.5], [0.5, 0.5, 0.4], "open", 3),
    ],
)
def test_few_pairs_and_equal_pairs_prove_nothing(
    first: Numbers, second: Numbers, status: str, pairs: int
) -> None:
    found = against(GOOD, first, second)
    assert (found.status, found.pairs) == (status, pairs)


def test_a_method_that_fails_where_the_other_does_not_is_not_called_better() -> None:
    fast: Numbers = [10.0, 11.0, 12.0, None]
    slow: Numbers = [30.0, 31.0, 33.0, 35.0]
    found = against(FEW, fast, slow)
    assert found.low is not None
    assert found.low > 1
    assert (found.status, found.pairs, found.only_first, found.only_second) == ("open", 3, 0, 1)
    assert against(FEW, slow, fast).status == "open"
    failing_slow = against(FEW, [10.0, 11.0, 12.0, 12.0], [30.0, 31.0, 33.0, None])
    assert (failing_slow.status, failing_slow.only_first) == ("shown", 1)


@pytest.mark.parametrize(
    ("statuses", "result"),
    [
        ((), NO_ORDER),
        (("shown", "shown"), "holds"),
        (("shown", "open"), "holds in part"),
        (("shown", "no interval"), "holds in part"),
        (("shown", "contradicted"), "holds in part and is contradicted in part"),
        (("shown", "contradicted", "contradicted"), "is contradicted"),  # one of three is chance
        (("contradicted", "open"), "is contradicted"),
        (("open", "no interval"), "is not decided"),
        (("shown", "open", "open"), "is not decided"),
        (("shown",) * 3 + ("open",) * 21, "holds in part"),
        (("shown",) * 2 + ("open",) * 22, "is not decided"),
    ],
)
def test_the_rule(statuses: tuple[Status, ...], result: str) -> None:
    assert (
        sum_up([Statement("here", GOOD, "A", "B", 0.1, 0.0, 0.2, 3, 0, 0, s) for s in statuses])
        == result
    )


@pytest.mark.parametrize(
    ("measure", "ends", "why"),
    [
        (accuracy(), [(-0.009, 0.01), (-0.005, 0.002), (-0.2, 0.3)], "most differences are small"),
        (accuracy(), [(-0.009, 0.01), (-0.011, 0.002), (-0.2, 0.3)], "3 seeds are too few"),
        (FEW, [(0.91, 1.09)], "most differences are small"),
        (FEW, [(0.89, 1.09)], "3 seeds are too few"),
    ],
)
def test_what_is_not_decided_says_why(
    measure: Measure, ends: list[tuple[float, float]], why: str
) -> None:
    found = [Statement("here", measure, "A", "B", 0.0, *pair, 3, 0, 0, "open") for pair in ends]
    assert verdict_text(found) == f"is not decided: {why}"
    assert verdict_text(
        [found[0]._replace(low=None, high=None, status="no interval", pairs=2)]
    ).endswith("2 seeds are too few")


def test_noise_alone_is_seldom_called_anything() -> None:
    """Four methods that do not differ, three seeds: 19 of 20 verdicts should be undecided."""
    rng = np.random.default_rng(11)
    order = ("pracdelta", "fedpracis", "cluster-is", "fedavg")
    results = []
    for _ in range(120):
        rows = [
            Row(n, n, {seed: run_of(n, seed, [rng.uniform(0.6, 0.8)]) for seed in range(3)})
            for n in order
        ]
        results.append(sum_up(ordered([group(rows, order)], {"one": [GOOD]})))
    decided = sum(result != "is not decided" for result in results)
    # Two directions at 5 % each, more for pairs that share runs: the bound is wide, and 0 would be
    # a fault too.
    assert 0 < decided < 30


def test_every_pair_that_the_paper_orders_is_stated_once_for_each_measure() -> None:
    rows = [
        climbs(name, {0: 20, 1: 22}) for name in ("fedavg", "fedpracis", "pracdelta", "uniform")
    ]
    measures = {"one": [rounds_to(0.7, "accuracy"), accuracy(5)]}
    found = ordered([group(rows, ("pracdelta", "fedpracis", "fedavg"))], measures)
    pairs = [("PRACDELTA", "FEDPRACIS"), ("PRACDELTA", "FEDAVG"), ("FEDPRACIS", "FEDAVG")]
    assert [(s.first, s.second) for s in found[::2]] == pairs
    assert [(s.first, s.second) for s in found[1::2]] == pairs
    tied = group(rows, ())._replace(ranks=(("pracdelta",), ("fedpracis", "fedavg")))
    assert [s.second for s in ordered([tied], measures)[::2]] == ["FEDPRACIS", "FEDAVG"]


def test_the_verdict_states_the_result_and_what_failed() -> None:
    rows = [
        climbs("fedavg", {0: 40, 1: 43, 2: None, 3: 44}),
        climbs("fedpracis", {0: 41, 1: 40, 2: 44, 3: 43}),
        climbs("pracdelta", {0: 20, 1: 21, 2: 22, 3: 22}),
    ]
    measures = {"one": [rounds_to(0.7, "accuracy")]}
    shown = group(rows, ("pracdelta", "fedpracis", "fedavg"))
    found = judge([shown], measures)
    assert (found.verdict, found.sentence) == (
        "holds in part",
        "The paper's ordering holds in part.",
    )
    assert found.reasons.startswith("It is PRACDELTA before FEDPRACIS before FEDAVG.")
    assert "Of 3 statements on pairs of methods, the runs leave 2 shown, 1 open." in found.reasons
    assert "Of these, 2 leave out seeds with which one method failed" in found.reasons
    assert "| PRACDELTA before FEDAVG | rounds to 70 % |" in pairs_table([shown], measures)
    none = judge([group(rows[1:], (), "fedpracis")], measures)
    assert (none.sentence, none.reasons) == ("No ordering is claimed.", "")
    assert none.number.startswith("PRACDELTA against FEDPRACIS: rounds to 70 %")


def losses(levels: Mapping[str, tuple[float, ...]]) -> list[Row]:
    """Rows whose seeds have these losses, the same in all rounds."""
    rows = []
    for name, level_s in levels.items():
        runs = {seed: run_of(name, seed, loss_r=[x] * 10) for seed, x in enumerate(level_s)}
        rows.append(Row(name, name, runs))
    return rows


@pytest.mark.parametrize(
    ("low", "verdict"),
    [(-0.009, "is contradicted, by small differences"), (-0.2, "is contradicted")],
)
def test_a_contradiction_says_whether_it_is_small(low: float, verdict: str) -> None:
    found = [Statement("here", accuracy(), "A", "B", low / 2, low, -0.001, 3, 0, 0, "contradicted")]
    assert verdict_text(found) == verdict


def test_the_number_is_of_a_pair_that_decides() -> None:
    levels = {
        "fedavg": (1.0, 1.1, 1.2),
        "uniform": (1.3, 1.3, 1.4),
        "delta": (1.02, 1.08, 1.21),
        "fedis": (0.9, 0.98, 1.09),
    }
    rows = losses(levels)
    found = judge(
        [group(rows, ("delta", "fedis", "uniform"), threshold=None)],
        {"one": [late_loss("log10-loss")]},
    )
    assert found.verdict.startswith("holds in part")
    assert found.number.startswith("delta against uniform: ")


def test_a_lower_number_is_called_lower() -> None:
    levels = {"fedavg": (1.0, 1.1, 1.2), "delta": (0.1, 0.11, 0.13)}
    rows = losses(levels)
    measures = {"one": [late_loss("log10-loss")]}
    shown, turned = (
        group(rows, order, threshold=None) for order in (("delta", "fedavg"), ("fedavg", "delta"))
    )
    assert judge([shown], measures).verdict == "holds"
    assert "| delta before fedavg | log10 loss | lower by 0.98" in pairs_table([shown], measures)
    assert judge([turned], measures).verdict == "is contradicted"


def test_measures_by_hand() -> None:
    run = run_of("fedavg", 0, [0.1, 0.5, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6, 0.65])
    assert accuracy(5).value(run) == pytest.approx(np.mean([0.8, 0.65, 0.6, 0.4, 0.2]))
    assert accuracy(2).value(run) == pytest.approx(0.625)
    assert best_within(5, 2).value(run) == pytest.approx(0.8)
    assert rounds_to(0.7, "accuracy").value(run) == 3
    assert (
        rounds_to(0.52, "accuracy", smoothed=True).value(run) == 6
    )  # (0.5 + 0.9 + 0.3 + 0.7 + 0.2) / 5
    assert math.isnan(rounds_to(0.95, "accuracy").value(run))
    ended = run._replace(diverged=10)
    assert accuracy(5).value(ended) == 0.65
    assert math.isnan(late_loss("loss").value(ended))


def test_losses_and_probes_by_hand() -> None:
    run = run_of("fedavg", 0, loss_r=[10.0] * 195 + [1.0, 10.0, 100.0, 10.0, 1.0])
    assert late_loss("log10-loss").value(run) == pytest.approx(
        (3 + 0 + 1 + 2 + 1 + 0) / 8
    )  # the last 8 of 200 rounds
    lost = run_of("fedavg", 0, loss_r=[1.0] * 9 + [math.inf])
    assert not math.isfinite(late_loss("loss").value(lost))
    probes = {"round": np.arange(0.0, 50, 10), "norm": np.array([9.0, 9.0, 1.0, np.nan, 4.0])}
    assert late_probe("norm", "norm").value(run._replace(probes=probes)) == pytest.approx(2.0)


def test_moving_average_by_hand() -> None:
    average_r = moving_average(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 11.0]))
    assert np.isnan(average_r[:4]).all()
    assert average_r[4:].tolist() == [3.0, 5.0]
    assert np.isnan(moving_average(np.ones(4))).all()


def test_reach_of_a_run_by_one_evaluation_and_by_the_mean_of_five() -> None:
    run = make_run(
        "a", 0, 1, accuracy_r=np.array([0.2, 0.9, 0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 0.8, 0.8])
    )
    assert (reach(run, 0.7), reach(run, 0.7, smoothed=True)) == (
        1,
        9,
    )  # windows ending there have means .68 and .8
    assert reach(run, 0.95) is None


def test_a_column_that_was_not_measured_is_named() -> None:
    run = make_run("a", 0, 1)
    with pytest.raises(DeltaflError, match="no column 'norm_min'"):
        probed(run, "norm_min")
