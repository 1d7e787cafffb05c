"""Sums that are followed by differences: what an enormous reply leaves behind; ordinary rounds
change no bit.
"""

import numpy as np
import pytest

from conftest import replies_of
from deltafl import Plan, Population, close_round, init_round, make_sampler, open_round
from deltafl.estimators.own import OwnControl, OwnControlState
from deltafl.scale.numerics import weighted_sum
from deltafl.scale.rows import LOST, Following, RowFormat, RunningSum, row_values
from deltafl.server.table import make_parts

POPULATION = Population.from_sizes([1, 2, 3, 4])
UPDATE_MD = np.arange(12, dtype=np.float32).reshape(4, 3) / 7 + 1


def learned(
    control: OwnControl, state: OwnControlState, *replies: tuple[int, float]
) -> OwnControlState:
    """The memory after one round of replies: each client's update times a factor."""
    clients, factor_n = zip(*replies, strict=True)
    update_nd = (UPDATE_MD[list(clients)] * np.array(factor_n)[:, None]).astype(np.float32)
    following: OwnControlState = control.update(
        state, POPULATION, replies_of(list(clients), [1.0] * len(clients)), update_nd
    )
    return following


def off(state: OwnControlState) -> float:
    """How far the sum is from that of the rows."""
    right_d = weighted_sum(
        POPULATION.weight_m, map(row_values, state.control_md), len(state.total_d)
    )
    return float(np.abs(state.total_d - right_d).max())


ROUNDS = {
    "back in steps": [[(0, 1e18)], [(0, 1e13)], [(0, 1e8)], [(0, 1e3)], [(0, 1.0)]],
    "two that cancel": [[(0, 4e18), (3, -1e18)], [(0, 1.0), (3, 1.0)]],
    "within one round": [[(0, 1e16)], [(0, 1.0), (1, 1.0)]],
    "to nothing": [[(0, 1e18)], [(0, 0.0)]],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
def test_an_enormous_reply_leaves_nothing_behind(
    rounds: list[list[tuple[int, float]]], dtype: str
) -> None:
    control = OwnControl(RowFormat(dtype))
    state = learned(control, control.init(POPULATION, 3), (0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0))
    for replies in rounds:
        state = learned(control, state, *replies)
    assert off(state) < 1e-5 * np.abs(state.total_d).max()
    assert float(state.rounding) <= LOST * np.abs(state.total_d).max()


def test_the_bound_holds_for_any_numbers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        found = RunningSum(np.zeros(4), np.zeros(()))
        exact_d = np.zeros(4, dtype=np.longdouble)
        for _ in range(10):
            coef_n = rng.random(3)
            row_nd = rng.normal(size=(3, 4)) * 10.0 ** rng.integers(-18, 18, size=(3, 1))
            following = Following(found, coef_n)
            found = following.sum([following.add(slice(None), row_nd)])
            exact_d += (coef_n[:, None].astype(np.longdouble) * row_nd).sum(axis=0)
        assert np.abs(found.total_d - exact_d).max() <= float(found.rounding)


def test_ordinary_rounds_never_form_the_sum_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of rounds, updates that shrink and turn: the bits are those of the differences
    added up.
    """

    def anew(*_: object) -> OwnControlState:
        raise AssertionError("the sum was formed anew")

    monkeypatch.setattr("deltafl.estimators.own.summed_anew", anew)
    rng = np.random.default_rng(1)
    control = OwnControl()
    state = control.init(POPULATION, 3)
    plain_d = np.zeros(3)
    for t in range(3000):
        client_n = np.sort(rng.choice(4, size=2, replace=False))
        update_nd = (rng.normal(size=(2, 3)) * 0.999**t).astype(np.float32)
        changes = [
            update_d - state.control_md[i].astype(np.float64)
            for i, update_d in zip(client_n, update_nd, strict=True)
        ]
        plain_d = plain_d + weighted_sum(POPULATION.weight_m[client_n], changes, 3)
        state = control.update(
            state, POPULATION, replies_of(client_n.tolist(), [1.0, 1.0]), update_nd
        )
    np.testing.assert_array_equal(state.total_d, plain_d)


@pytest.mark.parametrize("estimator", ["difference-own", "innovation"])
def test_rounds_are_unbiased_again_after_a_broken_client(estimator: str) -> None:
    plan = Plan(
        POPULATION, make_sampler("uniform"), 2, estimator, parts=make_parts({"norm_guard": 3.0})
    )
    state = init_round(plan, np.zeros(3))
    for t in range(300):
        cohort = open_round(plan, state)
        update_nd = UPDATE_MD[cohort.client_n].copy()
        if t == 30:
            update_nd[0] = 1e18
        state, _ = close_round(plan, state, cohort, update_nd)
    own = getattr(state.control, "own", state.control)
    np.testing.assert_allclose(own.total_d, POPULATION.weight_m @ UPDATE_MD, rtol=1e-5)
