"""Verdicts: statements from intervals with known ends, and the rules that sum them up."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from deltafl.simulation.record import RunRecord
from reproduction.pages.groups import Group, Row, split_ties
from reproduction.pages.measures import (
    Measure,
    Statement,
    Status,
    accuracy,
    best_within,
    compare,
    late_loss,
    late_probe,
    rounds_to,
)
from reproduction.pages.verdict import NO_ORDER, by_chance, headline, ordered_pairs, paragraph, sum_up


def record(
    sampler: str, seed: int, accuracy_r: Any = None, loss_r: Any = None, round_r: Any = None, **more: Any
) -> RunRecord:
    """A run with the given curve; the other columns are of the right length and count rounds."""
    curve = accuracy_r if accuracy_r is not None else loss_r
    number = len(curve)
    rounds = list(round_r if round_r is not None else range(1, number + 1))
    given = {
        "part": "one",
        "settings": {"sampler": sampler, "seed": seed, "task": "digits", "local_epochs": 1},
        "data": "digits",
        "metric": "accuracy" if accuracy_r is not None else "loss",
        "environment": {},
        "round": rounds,
        "accuracy": list(accuracy_r) if accuracy_r is not None else [None] * number,
        "loss": list(loss_r) if loss_r is not None else [1.0] * number,
        "seconds": [float(r) for r in rounds],
        "cpu_seconds": [2.0 * r for r in rounds],
        "bytes": [float(r) for r in rounds],
        "draws": [1, 1, 1],
    }
    return RunRecord.model_validate({**given, **more})


def constant(value: float | None) -> RunRecord:
    """A run whose number is ``value`` by the measure below."""
    return record("fedavg", 0, accuracy_r=[0.0 if value is None else value])


GOOD = Measure("number", "difference", True, lambda run: run.accuracy[0] or None)
FEW = Measure("count", "ratio", False, lambda run: run.accuracy[0] or None)


def against(measure: Measure, first: list[float | None], second: list[float | None]) -> Statement:
    sides = [{seed: constant(value) for seed, value in enumerate(side)} for side in (first, second)]
    return compare("here", measure, ("A", sides[0]), ("B", sides[1]))


def climbs(sampler: str, reaches: dict[int, int | None], rounds: int = 60, top: float = 0.9) -> Row:
    """A row whose seeds first have accuracy 0.7 or more at the given round, and ``top`` from there on."""
    records = {}
    for seed, at in reaches.items():
        curve = [0.1 if at is None or r < at else top + 0.001 * seed for r in range(1, rounds + 1)]
        records[seed] = record(sampler, seed, accuracy_r=curve)
    return Row(sampler, sampler.upper(), records)


def group(rows: list[Row], order: tuple[str, ...], baseline: str = "fedavg", threshold: float | None = 0.7) -> Group:
    return Group("one", "One", tuple(rows), baseline, order, threshold, {})


def test_paired_difference_is_that_of_scipy() -> None:
    a, b = [0.31, 0.35, 0.42, 0.38], [0.30, 0.33, 0.36, 0.37]
    found = against(GOOD, list(a), list(b))
    test = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.estimate == pytest.approx(np.mean(a) - np.mean(b))
    assert (found.low, found.high) == pytest.approx((test.low, test.high))
    assert found.pairs == 4
    assert found.status == "open"


def test_statements_follow_the_direction_of_the_measure() -> None:
    high, low = [0.80, 0.81, 0.82], [0.50, 0.52, 0.51]
    assert against(GOOD, list(high), list(low)).status == "shown"
    assert against(GOOD, list(low), list(high)).status == "contradicted"
    assert against(FEW, list(low), list(high)).status == "shown"
    worse = against(FEW, list(high), list(low))
    assert worse.status == "contradicted"
    assert worse.estimate == pytest.approx(sum(low) / sum(high))


@pytest.mark.parametrize(
    ("first", "second", "status", "pairs"),
    [
        ([0.8], [0.5], "no interval", 1),
        ([], [0.5, 0.6], "no interval", 0),
        ([0.8, 0.7, 0.9], [0.7, 0.6, 0.8], "open", 3),  # 0.1 each, up to rounding: an interval without width
        ([0.9, 0.2, 0.5], [0.5, 0.5, 0.4], "open", 3),
    ],
)
def test_few_pairs_and_equal_pairs_prove_nothing(
    first: list[float | None], second: list[float | None], status: str, pairs: int
) -> None:
    found = against(GOOD, first, second)
    assert (found.status, found.pairs) == (status, pairs)


def test_a_method_that_fails_where_the_other_does_not_is_not_called_better() -> None:
    fast, slow = [10.0, 11.0, 12.0, None], [30.0, 31.0, 33.0, 35.0]
    found = against(FEW, list(fast), list(slow))
    assert found.low is not None
    assert found.low > 1
    assert (found.status, found.pairs, found.only_first, found.only_second) == ("open", 3, 0, 1)
    # The other way round the failure is on the side that the statement already calls worse.
    assert against(FEW, list(slow), list(fast)).status == "open"
    failing_slow = against(FEW, [10.0, 11.0, 12.0, 12.0], [30.0, 31.0, 33.0, None])
    assert (failing_slow.status, failing_slow.only_first) == ("shown", 1)


def statement(status: Status) -> Statement:
    return Statement("here", GOOD, "A", "B", 0.1, 0.0, 0.2, 3, 0, 0, status)


@pytest.mark.parametrize(
    ("statuses", "result"),
    [
        ((), NO_ORDER),
        (("shown", "shown"), "holds"),
        (("shown", "open"), "holds in part"),
        (("shown", "no interval"), "holds in part"),
        (("shown", "contradicted"), "holds in part and is contradicted in part"),
        (("shown", "contradicted", "contradicted"), "is contradicted"),  # one of three is chance
        (("shown", "shown", "contradicted", "contradicted"), "holds in part and is contradicted in part"),
        (("contradicted", "open"), "is contradicted"),
        (("open", "no interval"), "is not decided"),
        (("shown", "open", "open"), "is not decided"),
        (("shown",) * 3 + ("open",) * 21, "holds in part"),
        (("shown",) * 2 + ("open",) * 22, "is not decided"),
    ],
)
def test_rules_of_the_sum(statuses: tuple[Status, ...], result: str) -> None:
    assert sum_up([statement(status) for status in statuses]) == result


def test_what_chance_gives_is_the_binomial_quantile() -> None:
    assert [by_chance(number) for number in range(40)] == [int(stats.binom.ppf(0.95, n, 0.025)) for n in range(40)]


def test_noise_alone_is_seldom_called_anything() -> None:
    """Four methods that do not differ, three seeds, two independent parts: 19 of 20 verdicts should be undecided."""
    rng = np.random.default_rng(11)
    order = ("pracdelta", "fedpracis", "cluster-is", "fedavg")
    results = []
    for _ in range(120):
        rows = [
            Row(name, name, {seed: record(name, seed, accuracy_r=[rng.uniform(0.6, 0.8)]) for seed in range(3)})
            for name in order
        ]
        results.append(sum_up(ordered_pairs(group(rows, order), [GOOD])))
    decided = sum(result != "is not decided" for result in results)
    # Two directions at 5 % each, more for pairs that share runs: the bound is wide, and 0 would be a fault too.
    assert 0 < decided < 30


def test_every_pair_that_the_paper_orders_is_stated_once_for_each_measure() -> None:
    rows = [climbs(name, {0: 20, 1: 22}) for name in ("fedavg", "fedpracis", "pracdelta", "uniform")]
    order = ("pracdelta", "fedpracis", "fedavg")
    found = ordered_pairs(group(rows, order), [rounds_to(0.7, "accuracy"), accuracy(5)])
    pairs = {(s.first, s.second) for s in found}
    assert len(found) == 6
    assert pairs == {("PRACDELTA", "FEDPRACIS"), ("PRACDELTA", "FEDAVG"), ("FEDPRACIS", "FEDAVG")}


def test_paragraph_names_what_is_shown_and_what_failed() -> None:
    rows = [
        climbs("fedavg", {0: 40, 1: 43, 2: None}),
        climbs("fedpracis", {0: 41, 1: 40, 2: 44}),
        climbs("pracdelta", {0: 20, 1: 21, 2: 22}),
        climbs("pracdelta@successive@plain-mean", {0: 50, 1: 51, 2: 53}),
    ]
    shown = group(rows, ("pracdelta", "fedpracis", "fedavg"))
    text = paragraph([shown], {"one": [rounds_to(0.7, "accuracy")]}, 12, 12)
    assert text.startswith("**The paper's ordering holds in part.** It is PRACDELTA before FEDPRACIS before FEDAVG.")
    assert "3 statements" in text
    assert "2 shown, 1 open" in text
    assert "FEDAVG never reached 70 % in 1 seed in which PRACDELTA did not fail" in text
    assert "95 % by itself" in text
    # A variant outside the order is held against the baseline and against the form that the paper orders.
    assert "One, PRACDELTA@SUCCESSIVE@PLAIN-MEAN: against FEDAVG rounds to 70 % speed-up ×0.82" in text
    assert "against PRACDELTA rounds to 70 % speed-up ×0.41" in text
    assert "are done" not in text
    assert "Only 7 of 12 runs are done" in paragraph([shown], {"one": [rounds_to(0.7, "accuracy")]}, 7, 12)


def test_without_an_order_none_is_judged() -> None:
    rows = [climbs("fedavg", {0: 40, 1: 42}), climbs("pracdelta", {0: 20, 1: 22})]
    text = paragraph([group(rows, ())], {"one": [rounds_to(0.7, "accuracy")]}, 4, 4)
    assert NO_ORDER in text
    assert "One, PRACDELTA: against FEDAVG rounds to 70 % speed-up ×1.95" in text
    line = headline([group(rows, ())], {"one": [rounds_to(0.7, "accuracy")]})
    assert line.startswith("PRACDELTA against FEDAVG: rounds to 70 % speed-up ×1.95 [")


def test_a_lower_loss_is_said_to_be_lower() -> None:
    losses = {"fedavg": (1.0, 1.1, 1.2), "delta": (0.1, 0.11, 0.13)}
    rows = [
        Row(name, name, {seed: record(name, seed, loss_r=[level] * 10) for seed, level in enumerate(levels)})
        for name, levels in losses.items()
    ]
    text = paragraph([group(rows, ("delta", "fedavg"), threshold=None)], {"one": [late_loss(True)]}, 6, 6)
    assert text.startswith("**The paper's ordering holds.**")
    assert "delta before fedavg (log10 loss lower by 0.98" in text
    turned = paragraph([group(rows, ("fedavg", "delta"), threshold=None)], {"one": [late_loss(True)]}, 6, 6)
    assert turned.startswith("**The paper's ordering is contradicted.**")
    assert "fedavg before delta (log10 loss higher by 0.98" in turned


def test_measures_by_hand() -> None:
    curve = [0.1, 0.5, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6, 0.65]
    run = record("fedavg", 0, accuracy_r=curve)
    assert accuracy(5).value(run) == pytest.approx(np.mean([0.8, 0.65, 0.6, 0.4, 0.2]))
    assert accuracy(2).value(run) == pytest.approx(0.625)
    assert best_within(5, 2).value(run) == pytest.approx(0.8)
    assert best_within(10, 3).value(run) == pytest.approx(0.8)
    assert rounds_to(0.7, "accuracy").value(run) == 3
    assert rounds_to(0.52, "accuracy", smoothed=True).value(run) == 6  # (0.5 + 0.9 + 0.3 + 0.7 + 0.2) / 5
    assert rounds_to(0.95, "accuracy").value(run) is None


def test_losses_and_probes_by_hand() -> None:
    loss = [10.0] * 195 + [1.0, 10.0, 100.0, 10.0, 1.0]
    run = record("fedavg", 0, loss_r=loss)
    assert late_loss(True).value(run) == pytest.approx((3 + 0 + 1 + 2 + 1 + 0) / 8)  # the last 8 of 200 rounds
    assert late_loss(False).value(record("fedavg", 0, loss_r=[1.0] * 9 + [math.inf])) is None
    probes = {"round": [0, 10, 20, 30, 40], "norm": [9.0, 9.0, 1.0, None, 4.0]}
    probed = record("fedavg", 0, loss_r=[1.0], probes=probes)
    assert late_probe("norm", "norm", True).value(probed) == pytest.approx(2.0)


def test_larger_probes_are_shown_and_said_as_such() -> None:
    def rows(levels: dict[str, float]) -> list[Row]:
        return [
            Row(
                name,
                name,
                {
                    seed: record(
                        name, seed, loss_r=[1.0], probes={"round": [1, 2], "norm": [level, level + 0.1 * seed]}
                    )
                    for seed in range(3)
                },
            )
            for name, level in levels.items()
        ]

    shown = group(rows({"cluster-is": 1.0, "fedis": 3.0}), ("fedis", "cluster-is"), "cluster-is", None)
    text = paragraph([shown], {"one": [late_probe("mean norm", "norm", True)]}, 6, 6)
    assert "fedis before cluster-is (mean norm larger ×2.8" in text
    turned = paragraph([shown], {"one": [late_probe("mean norm", "norm", False)]}, 6, 6)
    assert turned.startswith("**The paper's ordering is contradicted.**")


def test_more_pairs_give_a_narrower_interval() -> None:
    rng = np.random.default_rng(3)
    base = 0.5 + 0.02 * rng.standard_normal(20)
    gain = 0.03 + 0.02 * rng.standard_normal(20)
    widths = []
    for number in (3, 6, 20):
        found = against(GOOD, [float(x) for x in (base + gain)[:number]], [float(x) for x in base[:number]])
        assert found.low is not None
        assert found.high is not None
        widths.append(found.high - found.low)
    assert all(wide > narrow for wide, narrow in pairwise(widths))


def test_methods_that_the_paper_does_not_order_among_themselves_make_no_statement() -> None:
    assert split_ties(["a", "b = c", "d"]) == [("a",), ("b", "c"), ("d",)]
    rows = tuple(Row(label, label.upper(), {}) for label in "abcd")
    group = Group("p", "P", rows, "d", ("a", "b", "c", "d"), None, {}, (("a",), ("b", "c"), ("d",)))
    pairs = [(s.first, s.second) for s in ordered_pairs(group, [accuracy(5)])]
    assert pairs == [("A", "B"), ("A", "C"), ("A", "D"), ("B", "D"), ("C", "D")]
