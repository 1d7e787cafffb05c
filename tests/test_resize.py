"""Own loops in which clients join, leave or change: the next estimate is that of who is here now."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import LastUpdates, Problem, Recorder, make_problem, mean_estimate, play
from deltafl import (
    DeltaflError,
    Plan,
    Population,
    close_round,
    init_round,
    make_plan,
    open_round,
    resize_state,
)
from deltafl.moves import CannotResizeError
from deltafl.scale.rows import RowFormat

LABELS = [
    *("uniform", "pracdelta", "fedvarp", "innovation@local-pivotal", "balanced"),
    *("uniform@@regression", "uniform@@difference-own", "uniform@@two-phase", "fedstale"),
]
BEFORE = make_problem([10, 15, 20, 25, 30, 35])
#: One with other weights, and one of which 1 and 4 have left and two have joined.
CHANGED = make_problem([90, 15, 2, 25, 60, 35], seed=1)
OTHERS = make_problem([10, 20, 25, 35, 70, 5], seed=2)


def plan_of(label: str, problem: Problem, n: int = 2) -> Plan:
    """As ``make_plan``, with an optimizer that remembers the estimate."""
    planned = make_plan(label, problem.population, n=n)
    others = (part for part in planned.parts if part.name != Recorder.name)
    return replace(planned, parts=(*others, Recorder()))


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("problem", "kept"), [(CHANGED, None), (OTHERS, [0, 2, 3, 5])])
def test_the_next_estimate_is_unbiased(label: str, problem: Problem, kept: Any) -> None:
    before = plan_of(label, BEFORE)
    state = play(before, init_round(before, np.zeros(3)), [BEFORE] * 4)
    now = plan_of(label, problem)
    with pytest.raises(DeltaflError, match=r"other weights than the state's.*resize_state"):
        open_round(now, state)
    following = resize_state(now, state, kept)
    mean_d = mean_estimate(now, following, problem)
    np.testing.assert_allclose(mean_d, problem.ubar_d, atol=1e-6)
    assert following.round == state.round
    # The state of before is as it was.
    np.testing.assert_allclose(mean_estimate(before, state, BEFORE), BEFORE.ubar_d, atol=1e-6)


REVERSED = make_problem([35, 30, 25, 20, 15, 10], seed=3)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("label", ["innovation", "fedvarp", "pracdelta"])
def test_clients_that_change_places_keep_what_is_known_of_them(
    label: str, in_file: bool, tmp_path: Path
) -> None:
    memory = RowFormat(folder=str(tmp_path)) if in_file else RowFormat()
    before = replace(plan_of(label, BEFORE), memory=memory)
    state = play(before, init_round(before, np.zeros(3)), [BEFORE] * 4)
    kept = [5, 4, 3, 2, 1, 0]
    now = replace(plan_of(label, REVERSED), memory=memory)
    following = resize_state(now, state, kept)
    mean_d = mean_estimate(now, following, REVERSED)
    np.testing.assert_allclose(mean_d, REVERSED.ubar_d, atol=1e-6)
    assert following.responded_m[0] == state.responded_m[5]


def test_who_is_described_jointly_keeps_its_place() -> None:
    before = plan_of("clustered-sampling-2", BEFORE)
    state = play(before, init_round(before, np.zeros(3)), [BEFORE] * 4)
    with pytest.raises(CannotResizeError, match="or take another place"):
        resize_state(plan_of("clustered-sampling-2", REVERSED), state, [5, 4, 3, 2, 1, 0])


def test_a_control_variate_that_says_nothing_of_other_weights_is_refused() -> None:
    before = make_plan("uniform", BEFORE.population, n=2, estimator=LastUpdates())
    state = play(before, init_round(before, np.zeros(3)), [BEFORE] * 2)
    resize_state(before, state)
    changed = make_plan("uniform", CHANGED.population, n=2, estimator=LastUpdates())
    with pytest.raises(CannotResizeError, match=r"LastUpdates does not say .*define resized"):
        resize_state(changed, state)


@pytest.mark.parametrize("label", ["uniform", "innovation", "delta-centred"])
def test_other_costs_of_a_plan_are_told(label: str) -> None:
    """A state's sampler knows those that it began with; ``resize_state`` tells it."""

    def priced(cost: list[float]) -> Plan:
        population = Population.from_sizes([10, 20, 30, 40, 50, 60], cost=cost)
        return make_plan(f"{label}(per_cost=True)", population, n=2)

    plan = priced([1, 1, 1, 9, 9, 9])
    state = init_round(plan, np.zeros(3))
    now = priced([9, 9, 9, 1, 1, 1])
    with pytest.raises(DeltaflError, match=r"or other costs, .*resize_state\(plan, state\)"):
        open_round(now, state)
    found = open_round(now, resize_state(now, state))
    of_round = open_round(plan, state, cost_m=now.population.cost_m)
    np.testing.assert_array_equal(found.expected_n, of_round.expected_n)


def test_without_a_memory_sums_of_other_weights_would_be_wrong() -> None:
    """What the guard is for: with the checksum alone put right, the estimate is biased."""
    before = plan_of("innovation@local-pivotal", BEFORE)
    state = play(before, init_round(before, np.zeros(3)), [BEFORE] * 4)
    now = plan_of("innovation@local-pivotal", CHANGED)
    forged = state._replace(weights_crc=now.weights_crc)
    error_d = mean_estimate(now, forged, CHANGED) - CHANGED.ubar_d
    assert np.abs(error_d).max() > 0.05


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([0, 0, 1], r"kept is \[0, 0, 1\]; give each client that stays once, from 0 to 5"),
        ([6], r"kept is \[6\]"),
        ([0.5], r"kept is \[0.5\]"),
        ([[0, 1]], r"kept is \[\[0, 1\]\]"),
        ("all", "kept is not one list of numbers"),
        ([[0, 1], [2]], "kept is not one list of numbers"),
        (None, "6 clients stay, and the plan has 4"),
    ],
)
def test_who_stays_is_looked_at(kept: Any, words: str) -> None:
    state = init_round(make_plan("uniform", [1] * 6, n=2), np.zeros(3))
    with pytest.raises(DeltaflError, match=words):
        resize_state(make_plan("uniform", [1] * 4, n=2), state, kept)


def test_a_state_of_others_is_one_sentence_wherever_it_is_given() -> None:
    state = init_round(make_plan("uniform", [1] * 6, n=2), np.zeros(3))
    more = make_plan("uniform", [1] * 7, n=2)
    average = make_plan("uniform", [1] * 6, n=2, average=0.5)
    asks: list[Callable[[Plan], object]] = [
        lambda plan: plan.model(state),
        lambda plan: plan.drifts(state, None),
    ]
    for ask in asks:
        with pytest.raises(DeltaflError, match=r"of 6 clients and the plan of 7.*resize_state"):
            ask(more)
        with pytest.raises(DeltaflError, match="average, of which the state knows nothing"):
            ask(average)


@pytest.mark.parametrize(
    "other", ["innovation", "pracdelta@ordered-pivotal", "uniform+average=0.5"]
)
@pytest.mark.parametrize("label", ["uniform", "pracdelta", "uniform@@regression", "fedvarp"])
def test_a_state_of_another_method_is_one_sentence(label: str, other: str) -> None:
    plan = plan_of(label, BEFORE)
    state = init_round(plan, np.zeros(3))
    another = plan_of(other, BEFORE)
    cohort = open_round(plan, state)
    words = "of which the state knows nothing: give the state's own plan"
    with pytest.raises(DeltaflError, match=words):
        open_round(another, state)
    with pytest.raises(DeltaflError, match=words):
        close_round(another, state, cohort, list(BEFORE.update_md[cohort.client_n]))
    with pytest.raises(DeltaflError, match=words):
        resize_state(another, state)


def test_options_may_change_between_two_rounds() -> None:
    """Such as the server's rate, of which a schedule makes a plan for each round."""
    state = init_round(make_plan("innovation", BEFORE.population, n=2), np.zeros(3))
    for lr, floor, size in ((1.0, 0.2, 2), (0.5, 0.1, 3), (0.25, 0.3, 1)):
        plan = make_plan(f"innovation(floor={floor})", BEFORE.population, n=size, server_lr=lr)
        state = play(plan, state, [BEFORE])
    assert state.round == 3
