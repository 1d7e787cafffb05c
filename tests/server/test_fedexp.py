"""FedExP in whole rounds: its step size by the paper's formula, with the norms that the server
measures.
"""

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Problem, all_cohorts, make_problem, play
from deltafl import (
    DeltaflError,
    DifferentialPrivacy,
    Plan,
    RoundState,
    close_round,
    close_round_from_sum,
    init_round,
    make_plan,
    open_round,
)
from deltafl.plan import saved_model
from deltafl.scale.named_arrays import named_arrays
from deltafl.server.optimizers import FedExP, Sgd
from deltafl.server.part import Step
from deltafl.server.table import make_parts
from deltafl.types import FloatArray

SIZES = [10, 15, 20, 25, 30]


def moved(plan: Plan, state: RoundState, updates: Any) -> FloatArray:
    """By how much a round moves the model."""
    following, _ = close_round(plan, state, open_round(plan, state), updates)
    change_d: FloatArray = following.params_d.astype(np.float64) - state.params_d
    return change_d


@given(st.integers(2, 7), st.integers(1, 5), st.floats(0.0, 3.0), st.integers(0, 10**6))
def test_the_step_is_the_papers(n: int, d: int, shift: float, seed: int) -> None:
    """eta = max(1, sum_S norm(u_i)^2 / (2 n (norm(mean)^2 + epsilon))) for the plain mean of a
    cohort.
    """
    rng = np.random.default_rng(seed)
    update_nd = (rng.normal(size=(n, d)) + shift).astype(np.float32)
    plan = make_plan(
        "fedavg@@plain-mean", [3] * 9, n, server_optimizer=FedExP(lr=0.5, epsilon=0.01), seed=seed
    )
    total = 0.0
    mean = [0.0] * d
    for row in update_nd.tolist():
        total += sum(value * value for value in row)
        mean = [old + value / n for old, value in zip(mean, row, strict=True)]
    eta = max(1.0, total / (2 * n * (sum(value * value for value in mean) + 0.01)))
    change_d = moved(plan, init_round(plan, np.zeros(d)), update_nd)
    np.testing.assert_allclose(
        change_d, [0.5 * eta * value for value in mean], rtol=2e-5, atol=1e-6
    )


def test_two_updates_by_hand() -> None:
    """(3, 0) and (0, 1): the mean (1.5, 0.5) has square 2.5, N = 5, epsilon 0.5: eta = 5 / 6 counts
    as 1.

    (3, 0) and (-2, 0): the mean (0.5, 0) has square 0.25, N = 6.5: eta = 6.5 / 1.5.
    """
    plan = make_plan("full", [1, 1], 2, server_optimizer=FedExP(epsilon=0.5))
    state = init_round(plan, np.zeros(2))
    np.testing.assert_allclose(
        moved(plan, state, np.array([[3.0, 0], [0, 1]])), [1.5, 0.5], rtol=1e-6
    )
    np.testing.assert_allclose(
        moved(plan, state, np.array([[3.0, 0], [-2, 0]])), [0.5 * 6.5 / 1.5, 0], rtol=1e-6
    )
    np.testing.assert_array_equal(moved(plan, state, [None, None]), [0, 0])


def test_the_model_to_judge_is_the_mean_of_the_last_two() -> None:
    """From 1: D = 0.5 and eta = 6.5 / 1.5 lead to 3.1667; clients go on from there, and 2.0833
    is judged.
    """
    plan = make_plan("full", [1, 1], 2, server_optimizer=FedExP(epsilon=0.5))
    state = init_round(plan, np.ones(1))
    assert plan.model(state).tolist() == [1]
    state, _ = close_round(plan, state, open_round(plan, state), np.array([[3.0], [-2.0]]))
    np.testing.assert_allclose(
        [state.params_d, plan.model(state)], [[3.1666667], [2.0833333]], rtol=1e-6
    )
    plain = replace(plan, parts=make_parts({"server_optimizer": Sgd()}))
    state = init_round(plain, np.ones(1))
    after, _ = close_round(plain, state, open_round(plain, state), np.array([[3.0], [-2.0]]))
    assert plain.model(after) is after.params_d


def test_a_saved_models_average_is_the_one_that_the_plan_uses_whatever_the_files_order() -> None:
    """With an average of its own, FedExP's mean of two is not the model to use."""
    plan = make_plan("full", [1, 1], 2, server_optimizer=FedExP(), average=0.9)
    state = init_round(plan, np.ones(1))
    for _ in range(3):
        state, _ = close_round(plan, state, open_round(plan, state), np.array([[3.0], [-2.0]]))
    arrays = dict(named_arrays(state))
    for names in (sorted(arrays), sorted(arrays, reverse=True)):
        saved = saved_model({name: arrays[name] for name in names})
        np.testing.assert_array_equal(arrays[saved], plan.model(state))
    assert not np.array_equal(plan.model(state), state.parts["server_optimizer"].model_d)


class Recording(FedExP):
    """Remembers N."""

    def move(self, own: Any, step: Step) -> Any:
        SEEN.append(step.mean_square)
        return super().move(own, step)


SEEN: list[float] = []


def played(label: str, n: int = 3) -> tuple[Plan, RoundState, Problem]:
    problem = make_problem(SIZES, seed=9)
    plan = make_plan(label, problem.population, n, server_optimizer=Recording(), seed=1)
    return (
        plan,
        play(plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(3)]),
        problem,
    )


@pytest.mark.parametrize(
    "label", ["md-fixed", "uniform@poisson", "pracdelta@multinomial", "innovation", "balanced"]
)
def test_the_mean_square_is_unbiased(label: str) -> None:
    """E[N] = sum_i w_i norm(u_i)^2 over all cohorts: of whole updates, whatever the control
    variate subtracts.
    """
    plan, state, problem = played(label)
    mean = 0.0
    for chance, cohort in all_cohorts(plan, state, problem.oracle):
        close_round(plan, state, cohort, problem.update_md[cohort.client_n])
        mean += chance * SEEN[-1]
    squared_m = np.sum(problem.update_md.astype(np.float64) ** 2, axis=1)
    assert mean == pytest.approx(problem.population.weight_m @ squared_m, rel=1e-9)


def test_the_guard_shortens_the_step_and_not_the_step_size() -> None:
    """A step that the guard makes 10 times as short: eta is that of the whole one."""
    guarded = make_plan("full", [1, 1], 2, norm_guard=2.0, server_optimizer=FedExP(epsilon=1e-12))
    state = init_round(guarded, np.zeros(1))
    for _ in range(6):
        state, _ = close_round(
            guarded, state, open_round(guarded, state), np.array([[3.0], [-1.0]])
        )  # norms 1
    change_d = moved(guarded, state, np.array([[60.0], [-20.0]]))
    np.testing.assert_allclose(change_d, 2 * 2000 / (2 * 400), rtol=1e-5)


def test_it_is_refused_where_the_server_does_not_see_whole_updates() -> None:
    for label, options in (
        ("uniform", {"mime": 0.5}),
        ("uniform@@difference-own", {"scaffold": True}),
        ("uniform@poisson", {"dp": DifferentialPrivacy(1, 1, 1e-5), "seed": secrets.randbits(63)}),
    ):
        with pytest.raises(
            DeltaflError, match=r"whole update; leave out (mime|scaffold|dp), or choose 'sgd'"
        ):
            make_plan(label, SIZES, 2, server_optimizer=FedExP(), **options)
        make_plan(label, SIZES, 2, **options)
    plan = make_plan("uniform", SIZES, 2, server_optimizer=FedExP())
    state = init_round(plan, np.zeros(3))
    with pytest.raises(DeltaflError, match="fedexp needs the norm of each update"):
        close_round_from_sum(plan, state, open_round(plan, state), [True, True], np.ones(3))
    plain = replace(plan, parts=make_parts({"server_optimizer": Sgd()}))
    close_round_from_sum(plain, state, open_round(plain, state), [True, True], np.ones(3))


def test_huge_updates_that_cancel_leave_the_model_finite() -> None:
    update_nd = np.zeros((4, 9), np.float32)
    update_nd[:, 0] = 0.1
    update_nd[0, 1:] = 1e18
    update_nd[1, 1:] = -1e18
    plan = make_plan("full", [1] * 4, 4, server_optimizer="fedexp")
    # By the paper's formula, and by the longest step.
    for scale, wanted in ((1e-18, 0.1 * 4.01 / 2 / 0.011), (1.0, 1e17)):
        state = init_round(plan, np.zeros(9))
        scaled_nd = update_nd * np.append(1, np.full(8, scale)).astype(np.float32)
        state, info = close_round(plan, state, open_round(plan, state), scaled_nd)
        assert info.num_responded == 4
        assert state.params_d[0] == pytest.approx(wanted, rel=1e-4)
