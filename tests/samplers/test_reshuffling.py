"""Client reshuffling: passes without replacement, in an order that is uniform and new each time."""

from collections import Counter
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import (
    Moves,
    Population,
    Reports,
    close_round,
    init_round,
    make_plan,
    open_round,
    stream,
)
from deltafl.samplers.reshuffling import ClientReshuffling, PassState
from deltafl.types import BoolArray
from tools.samplers import cohort_of


def cohorts(m: int, n: int, rounds: int, seed: int = 0) -> list[list[int]]:
    plan = make_plan("client-reshuffling", [1] * m, n=n, seed=seed)
    state = init_round(plan, np.zeros(1))
    found = []
    for _ in range(rounds):
        cohort = open_round(plan, state)
        assert open_round(plan, state).client_n.tolist() == cohort.client_n.tolist()
        found.append(cohort.client_n.tolist())
        state, _ = close_round(plan, state, cohort, np.ones((len(cohort.client_n), 1)))
    return found


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_every_client_has_one_turn_a_pass(m: int, n: int, seed: int) -> None:
    """Also where n does not divide m: one after the other, the turns are passes, but for the order
    within a cohort.
    """
    n = min(m, n)
    found = cohorts(m, n, 3 * m, seed)
    assert all(len(set(cohort)) == n for cohort in found)
    turns = Counter[int]()
    for cohort in found:
        turns.update(cohort)
        assert max(turns.values()) - min(turns[i] for i in range(m)) <= 1


def test_the_partition_is_uniform_and_new_in_each_pass() -> None:
    """Four clients in pairs: three partitions in two orders, each in a sixth of the passes, and
    two passes after one another have the same one in a sixth.
    """
    draws = 400
    passes = [tuple(map(tuple, cohorts(4, 2, 4, seed))) for seed in range(draws)]
    for count in (*Counter(one[:2] for one in passes).values(),):
        assert abs(count / draws - 1 / 6) < 4 * sqrt(5 / 36 / draws)
    same = sum(one[:2] == one[2:] for one in passes)
    assert abs(same / draws - 1 / 6) < 4 * sqrt(5 / 36 / draws)
    assert len({one[:2] for one in passes}) == 6


def opened(state: PassState, available: list[int], n: int) -> list[int]:
    available_m: BoolArray = np.array(available, dtype=bool)
    cohort = ClientReshuffling().open(state, available_m, n, stream(0, "draw"))
    assert np.isnan(cohort.expected_n).all()
    return list(map(int, cohort.client_n))


def test_those_left_come_first_and_others_fill_the_cohort() -> None:
    """Of six, 0 to 3 had their turn; 4 is away. 5 comes, and one of 0 to 3, who begins the next
    pass; 4 has missed this one. Whoever is selected has had its turn, whether it replies or not.
    """
    state = PassState(np.arange(6) < 4)
    chosen = opened(state, [1, 1, 1, 1, 0, 1], 2)
    assert 5 in chosen and chosen[0] < 4
    after = ClientReshuffling().update(
        state, cohort_of(chosen, [1, 1], [np.nan] * 2), Reports.make(2)
    )
    assert np.flatnonzero(after.had_m).tolist() == chosen[:1]
    assert opened(state, [1, 1, 1, 1, 1, 1], 2) == [4, 5]
    after = ClientReshuffling().update(
        state, cohort_of([4, 5], [1, 1], [np.nan] * 2), Reports.make(2)
    )
    assert after.had_m.all()


def test_the_cohort_moves_the_model_by_its_weighted_mean() -> None:
    plan = make_plan("client-reshuffling", [1, 3, 6, 10], n=2)
    state = init_round(plan, np.zeros(1))
    update_m = np.array([1.0, 2.0, 4.0, 8.0])
    cohort = open_round(plan, state)
    weight_n = plan.population.weight_m[cohort.client_n]
    state, _ = close_round(plan, state, cohort, update_m[cohort.client_n][:, None])
    assert state.params_d[0] == pytest.approx(np.average(update_m[cohort.client_n], None, weight_n))


def test_a_newcomer_has_one_turn_in_the_pass_it_joins() -> None:
    moves = Moves(Population.from_sizes([1] * 4), np.array([2, 0, 1]), 3)
    state = ClientReshuffling().resized(PassState(np.array([True, False, True])), moves)
    assert state.had_m.tolist() == [True, True, False, False]
