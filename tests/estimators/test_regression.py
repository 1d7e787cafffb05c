"""The control variate that is a regression of the updates on auxiliary variables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conftest import Recorder, make_problem, mean_estimate, play, replies_of
from deltafl import (
    Plan,
    Population,
    close_round,
    init_round,
    load_state,
    make_sampler,
    open_round,
    resize_state,
    save_state,
)
from deltafl.estimators.own import CommonControl
from deltafl.estimators.regression import RegressionControl, RegressionControlState
from deltafl.moves import Moves
from deltafl.types import FloatArray


def learnt(
    aux_mq: Any, rounds: list[tuple[list[int], FloatArray, FloatArray]], **own: Any
) -> RegressionControlState:
    control = RegressionControl(**own)
    population = Population.from_sizes([1, 2, 3, 4, 5], aux=aux_mq)
    state = control.init(population, 2)
    for client_n, update_nd, coef_n in rounds:
        state = control.update(
            state, population, replies_of(client_n, coef_n.tolist()), update_nd.astype(np.float32)
        )
    return state


KNOWN = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, -1.0], [0.5, 0.0], [3.0, 2.0]])
ROUNDS = [
    ([0, 2, 4], np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]]), np.array([0.2, 0.5, 0.4])),
    ([1, 3], np.array([[2.0, 2.0], [-1.0, 0.25]]), np.array([0.6, 0.3])),
]


def test_it_minimises_what_it_says() -> None:
    """Against least squares on the rows of both sums, stacked; two rounds, so that the second
    begins at a slope.
    """
    memory = 0.3
    weight_m = np.arange(1, 6) / 15
    x_mq = np.column_stack([np.ones(5), KNOWN])
    slope_qd = np.zeros((3, 2))
    for client_n, update_nd, coef_n in ROUNDS:
        here = np.sqrt((1 - memory) * coef_n / coef_n.sum())[:, None]
        everyone = np.sqrt(memory * weight_m)[:, None]
        rows = np.vstack([here * x_mq[client_n], everyone * x_mq])
        goals = np.vstack([here * update_nd, everyone * (x_mq @ slope_qd)])
        slope_qd = np.linalg.lstsq(rows, goals, rcond=None)[0]
    np.testing.assert_allclose(
        learnt(KNOWN, ROUNDS, memory=memory).slope_qd, slope_qd, rtol=1e-5, atol=1e-7
    )


@given(st.integers(0, 10**6))
def test_the_guesses_do_not_depend_on_the_units_of_what_is_known(seed: int) -> None:
    """Nor on columns that say nothing new."""
    rng = np.random.default_rng(seed)
    mix_qq = rng.normal(size=(2, 2))
    assume(
        np.linalg.cond(mix_qq) < 100
    )  # else the columns are one, by the tolerance for their rank
    mixed = KNOWN @ mix_qq * 10 ** rng.uniform(-2, 2) + rng.normal(size=2)
    first, second, third = (
        learnt(known, ROUNDS) for known in (KNOWN, mixed, np.column_stack([KNOWN, mixed]))
    )
    values = [RegressionControl().value(state, np.arange(5)) for state in (first, second, third)]
    np.testing.assert_allclose(
        values[0].total_d, np.arange(1, 6) / 15 @ values[0].control_nd, rtol=1e-12, atol=1e-12
    )
    guesses = [value.control_nd for value in values]
    np.testing.assert_allclose(guesses[1], guesses[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(guesses[2], guesses[0], rtol=1e-4, atol=1e-5)


def test_with_nothing_known_it_is_the_common_control() -> None:
    common = CommonControl(memory=0.5)
    population = Population.from_sizes([1, 2, 3, 4, 5])
    state = common.init(population, 2)
    for client_n, update_nd, coef_n in ROUNDS:
        state = common.update(
            state, population, replies_of(client_n, coef_n.tolist()), update_nd.astype(np.float32)
        )
    np.testing.assert_allclose(learnt(None, ROUNDS).slope_qd, state.control_d[None], rtol=1e-12)


def test_it_learns_what_is_linear_and_leaves_nothing_of_it() -> None:
    """With draws that ignore what is known: after 40 rounds the estimate of updates B x_i has no
    error left.
    """
    population = Population.from_sizes([1, 2, 3, 4, 5], aux=KNOWN)
    update_md = (
        np.column_stack([np.ones(5), KNOWN]) @ np.array([[1.0, 0], [2, -1], [0.5, 3]])
    ).astype(np.float32)
    errors = {}
    for estimator in ("regression", "difference"):
        plan = Plan(population, make_sampler("uniform"), 2, estimator, (Recorder(),))
        state = init_round(plan, np.zeros(2))
        for _ in range(40):
            cohort = open_round(plan, state)
            state, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
        errors[estimator] = np.abs(
            state.parts["server_optimizer"].delta_d - population.weight_m @ update_md
        ).max()
    assert errors["regression"] < 1e-4
    assert errors["difference"] > 0.1


@pytest.mark.parametrize("size", [1e-6, 1e5, 1e9])
def test_a_column_in_other_units_hides_no_other(size: float) -> None:
    first = learnt(KNOWN, ROUNDS)
    second = learnt(KNOWN * [1, size], ROUNDS)
    np.testing.assert_allclose(second.slope_qd * [[1], [1], [size]], first.slope_qd, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["regression", "two-phase"])
@pytest.mark.parametrize(("size", "shift"), [(1.0, 0.0), (1.0, 2000.0), (1e7, 2e9), (1e60, 0.0)])
def test_large_models_are_unbiased_in_any_units(
    size: float, shift: float, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where float32 would round away how clients differ, as by their years, or cannot hold it."""
    monkeypatch.setattr("deltafl.scale.stretches.LARGE", 0)
    problem = make_problem([1, 2, 3, 4, 5])
    update_md = problem.update_md + KNOWN @ [[4, 1, 2], [1, 3, 1]]
    problem = problem._replace(
        population=Population.from_sizes([1, 2, 3, 4, 5], aux=size * KNOWN + shift),
        update_md=update_md.astype(np.float32),
    )
    plan = Plan(problem.population, make_sampler("uniform"), 2, estimator, (Recorder(),))
    state = play(plan, init_round(plan, np.zeros(3)), [problem] * 4)
    mean_d = mean_estimate(plan, state, problem)
    np.testing.assert_allclose(mean_d, problem.ubar_d, rtol=0, atol=2e-7 * np.abs(update_md).max())


@pytest.mark.parametrize("estimator", ["regression", "two-phase"])
def test_the_type_of_slopes_follows_who_joins(
    estimator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A saved state is read as one of the present clients."""
    monkeypatch.setattr("deltafl.scale.stretches.LARGE", 0)
    far_mq = np.vstack([KNOWN, [1e13, 0]])
    types = []
    state: Any = None
    for aux_mq in (KNOWN, far_mq, KNOWN):
        population = Population.from_sizes([1] * len(aux_mq), aux=aux_mq)
        plan = Plan(population, make_sampler("uniform"), 2, estimator)
        if state is None:
            state = init_round(plan, np.zeros(300))
        kept = np.arange(min(len(aux_mq), len(state.selected_m)))
        state = resize_state(plan, state, kept.tolist())
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, np.ones((2, 300)))
        save_state(tmp_path / "state", state, plan)
        state = load_state(tmp_path / "state", plan)
        regression = getattr(state.control, "regression", state)
        types.append(regression.control.slope_qd.dtype.name)
    assert types == ["float32", "float64", "float32"]


def test_predictions_follow_when_the_variables_are_turned() -> None:
    """As the components of a census are by a newcomer; those of clients known before stay what
    they were.
    """
    rng = np.random.default_rng(4)
    before_mq = np.hstack([np.ones((6, 1)), rng.normal(size=(6, 3))])
    slope_qd = rng.normal(size=(4, 5))
    turn_qq = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    # ``design_mq`` has a column of ones, so only the other columns can turn.
    turned_mq = np.hstack([before_mq[:, :1], before_mq[:, 1:] @ turn_qq])
    after_mq = np.vstack([turned_mq, [1, *rng.normal(size=3)]])
    weight_m = rng.dirichlet(np.ones(7))
    sizes = [1] * 7
    joined = Population.from_sizes(sizes, aux=after_mq[:, 1:])._replace(weight_m=weight_m)
    old = RegressionControlState(before_mq, weight_m[:6], slope_qd)
    state = RegressionControl().resized(old, Moves(joined, np.arange(6), 6))
    np.testing.assert_allclose(turned_mq @ state.slope_qd, before_mq @ slope_qd, atol=1e-12)
    same = Population.from_sizes(sizes, aux=before_mq[[*range(6), 0], 1:])
    grown = RegressionControl().resized(old, Moves(same, np.arange(6), 6))
    assert grown.slope_qd is slope_qd
