"""Control coefficients: the learned beta is the one that minimises the variance, and never
biases.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from conftest import (
    Problem,
    Recorder,
    all_cohorts,
    all_replies,
    make_problem,
    mean_square,
    replies_of,
)
from deltafl import Fixed, Plan, Population, close_round, init_round, open_round, stream
from deltafl.estimators.learned_coefficient import FixedCoefficient, LearnedCoefficient, ScaledState
from deltafl.estimators.own import InnovationControl, OwnControl, OwnControlState
from deltafl.types import Cohort, FloatArray, Params


def remembered(
    problem: Problem, control_md: FloatArray, cross: float, square: float
) -> ScaledState:
    """A state of ``difference-own-damped`` that remembers these rows and sums."""
    total_d = problem.population.weight_m @ control_md.astype(np.float32).astype(np.float64)
    own = OwnControlState(control_md.astype(np.float32), total_d)
    return ScaledState(own, np.asarray(cross), np.asarray(square))


@pytest.mark.parametrize(
    ("design", "by_weight"),
    [("poisson", True), ("multinomial", True), ("simple-random", False), ("poisson", False)],
)
def test_the_expected_sums_give_the_beta_of_least_variance(design: str, by_weight: bool) -> None:
    """Over all cohorts: A / B is the minimum of the mean square, a parabola through beta = 0,
    1/2 and 1.
    """
    problem = make_problem([12, 9, 12, 14, 10] if by_weight else [1] * 5, seed=5)
    control_md = 0.7 * problem.update_md + np.random.default_rng(2).normal(size=(5, 3))
    sampler = Fixed(design, by_weight=by_weight)
    plan = Plan(problem.population, sampler, 3, "difference-own-damped", (Recorder(),))
    start = init_round(plan, np.zeros(3))
    control = LearnedCoefficient(OwnControl(), memory=0.0)
    cross = 0.0
    square = 0.0
    for chance, cohort in all_cohorts(plan, start, None):
        replies = all_replies(cohort, plan.collect_replies(start, cohort).coef_n)
        state = remembered(problem, control_md, 0.0, 0.0)
        update_nd = problem.update_md[cohort.client_n]
        after = control.update(state, problem.population, replies, update_nd)
        cross = cross + chance * float(after.cross)
        square = square + chance * float(after.square)
    none, half, whole = (
        mean_square(
            plan, start._replace(control=remembered(problem, control_md, beta, 1.0)), problem
        )
        for beta in (0.0, 0.5, 1.0)
    )
    best = (3 * none - 4 * half + whole) / (4 * (none - 2 * half + whole))
    assert 0.1 < best < 0.95
    assert cross / square == pytest.approx(best, rel=1e-5)


def test_by_hand() -> None:
    """Two of four equal clients: coef = 1/2, masses 1/2; y = (1, 2), z = (1, 0) about their
    means 1.5 and .5.
    """
    population = Population.from_sizes([1] * 4)
    control = LearnedCoefficient(OwnControl(), memory=0.5)
    own = OwnControlState(np.array([[2.0], [0.0], [0.0], [0.0]], dtype=np.float32), np.array([0.5]))
    state = ScaledState(own, np.asarray(4.0), np.asarray(8.0))
    assert control.coefficient(state) == 0.5
    value = control.value(state, np.array([0, 1]))
    assert (value.total_d.tolist(), value.control_nd.tolist()) == ([0.25], [[1.0], [0.0]])
    update_nd = np.array([[2.0], [4.0]], dtype=np.float32)
    after = control.update(state, population, replies_of([0, 1], [0.5, 0.5]), update_nd)
    # masses 1/2: cross = (1 - 1.5)(1 - .5)/2 + (2 - 1.5)(0 - .5)/2 = -.25, square = .25
    assert (float(after.cross), float(after.square)) == (2.0 - 0.25, 4.0 + 0.25)
    assert after.control.control_md[1].tolist() == [4.0]
    after = control.update(state, population, replies_of([0, 1], [0.5, 0.5], "poisson"), update_nd)
    assert (float(after.cross), float(after.square)) == (2.0 + 0.5, 4.0 + 0.5)


@pytest.mark.parametrize("kind", ["fixed-size", "poisson"])
def test_clients_that_are_always_selected_and_empty_rounds_say_nothing(kind: str) -> None:
    population = Population.from_sizes([1, 1])
    control = LearnedCoefficient(OwnControl())
    state = control.init(population, 2)
    for clients in ([0, 1], [0, 1], [], [0, 1]):
        update_nd = np.ones((len(clients), 2), dtype=np.float32)
        state = control.update(
            state, population, replies_of(clients, [0.5] * len(clients), kind), update_nd
        )
    assert (control.coefficient(state), float(state.square)) == (1.0, 0.0)


def rounds(
    estimator: str,
    updates: Callable[[int], Params],
    n: int = 6,
    design: str = "systematic",
    rate: float = 1.0,
) -> tuple[float, float]:
    """Mean squared error and mean beta over the later half of 120 rounds in which clients reply
    with a rate.
    """
    m = len(updates(0))
    plan = Plan(
        Population.from_sizes([1] * m), Fixed(design, by_weight=True), n, estimator, (Recorder(),)
    )
    state = init_round(plan, np.zeros(20))
    errors = []
    betas = []
    for round in range(120):
        update_md = updates(round)
        cohort = open_round(plan, state)
        responded_n = stream(6, "audit", round).random(len(cohort.client_n)) < rate
        replies = [
            update_md[i] if here else None
            for i, here in zip(cohort.client_n, responded_n, strict=True)
        ]
        state, info = close_round(plan, state, cohort, replies)
        errors.append(
            np.sum((state.parts["server_optimizer"].delta_d - update_md.mean(axis=0)) ** 2)
        )
        betas.append(info.control_coefficient)
    return float(np.mean(errors[60:])), float(np.mean(betas[60:]))


def noisy(
    round: int, m: int = 30, shift: float = 3.0, spread: float = 1.0, lasting: float = 0.0
) -> Params:
    """Updates with a common part, a part of each client that lasts, and noise."""
    own_md = lasting * np.random.default_rng(0).normal(size=(m, 20))
    return (shift + own_md + spread * stream(1, "audit", round).normal(size=(m, 20))).astype(
        np.float32
    )


@pytest.mark.parametrize(
    ("design", "rate", "beta"),
    [
        ("systematic", 1.0, (0.0, 0.15)),
        ("systematic", 0.9, (0.8, 1.0)),
        ("poisson", 1.0, (0.9, 1.0)),
    ],
)
def test_what_is_common_is_worth_a_memory_where_it_does_not_cancel(
    design: str, rate: float, beta: tuple[float, float]
) -> None:
    """Updates v + noise that no memory knows: v cancels in draws of fixed size, not where
    clients fail or n varies.
    """
    updates = partial(noisy, spread=0.3)
    error, mean_beta = rounds("difference-own-damped", updates, design=design, rate=rate)
    assert beta[0] <= mean_beta <= beta[1]
    assert error < 1.1 * rounds("difference-own", updates, design=design, rate=rate)[0]


def test_useless_memory_falls_back_to_horvitz_thompson_and_a_good_one_is_kept() -> None:
    """Updates without memory: beta near 0, error that of Horvitz-Thompson, half that of beta =
    1. With one: kept.
    """
    plain = rounds("horvitz-thompson", noisy)[0]
    damped, beta = rounds("innovation-damped", noisy)
    assert beta < 0.2
    assert damped < 1.15 * plain
    assert rounds("difference-own", noisy)[0] > 1.6 * plain
    lasting = partial(noisy, shift=0.0, spread=0.1, lasting=1.0)
    kept, beta = rounds("difference-own-damped", lasting)
    assert beta > 0.9
    assert kept < 0.1 * rounds("horvitz-thompson", lasting)[0]


@pytest.mark.parametrize("design", ["systematic", "multinomial"])
def test_one_reply_a_round_is_enough_to_distrust_a_useless_memory(design: str) -> None:
    """n = 1: nothing to be centred about. Beta stayed 1 there, and the error twice that of
    Horvitz-Thompson.
    """
    updates = partial(noisy, m=20, shift=0.0)
    plain = rounds("horvitz-thompson", updates, 1, design)[0]
    damped, beta = rounds("innovation-damped", updates, 1, design)
    assert beta < 0.3
    assert damped < 1.15 * plain
    assert rounds("difference-own", updates, 1, design)[0] > 1.5 * plain


def test_of_a_cohort_with_one_open_place_the_certain_have_no_say() -> None:
    """Clients 0 and 1 are certain, 2 is not: beta is that of 2 alone, uncentred."""
    control = LearnedCoefficient(OwnControl(), memory=0.0)
    memory = OwnControlState(np.array([[9.0], [9.0], [2.0], [0.0]], dtype=np.float32), np.zeros(1))
    cohort = Cohort(
        np.array([0, 1, 2]), np.ones(3, dtype=np.int64), np.array([1.0, 1.0, 0.5]), "fixed-size"
    )
    state = ScaledState(memory, np.zeros(()), np.zeros(()))
    update_nd = np.array([[-5.0], [7.0], [1.0]], dtype=np.float32)
    replies = all_replies(cohort, 0.25 / cohort.expected_n)
    after = control.update(state, Population.from_sizes([1] * 4), replies, update_nd)
    assert (float(after.cross), float(after.square)) == pytest.approx(
        (0.5 * 0.5 * 1, 0.5 * 0.5 * 2 * 1)
    )
    assert control.coefficient(after) == pytest.approx(0.5)


def test_a_fixed_beta() -> None:
    population = Population.from_sizes([1, 3])
    control = FixedCoefficient(InnovationControl(), 0.25)
    state = control.init(population, 1)
    state = control.update(
        state, population, replies_of([0], [1.0]), np.array([[8.0]], dtype=np.float32)
    )
    value = control.value(state, np.array([0]))
    assert value.control_nd.tolist() == [[2.0]]
    np.testing.assert_array_equal(
        value.total_d, 0.25 * InnovationControl().value(state.control, np.array([0])).total_d
    )
