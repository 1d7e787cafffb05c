"""Control coefficients: the learnt beta is the one that minimises the variance, and never biases."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Problem, Recorder, all_replies, make_problem, mean_estimate, replies_of
from deltafl import DeltaflError, Fixed, Plan, Population, close_round, init_round, open_round, stream
from deltafl.designs.exact import every_cohort
from deltafl.estimators.control_variates import CommonControl, InnovationControl, OwnControl, OwnControlState
from deltafl.estimators.learned_coefficient import FixedCoefficient, LearnedCoefficient, LearnedCoefficientState
from deltafl.estimators.table import find_estimator
from deltafl.types import Cohort, FloatArray, Params

SIZES = [10, 15, 20, 25, 30, 12, 9]


def remembered(problem: Problem, control_md: FloatArray, cross: float, square: float) -> LearnedCoefficientState:
    """A state of ``difference-own-damped`` that remembers these rows and sums."""
    total_d = problem.population.weight_m @ control_md.astype(np.float32).astype(np.float64)
    own = OwnControlState(control_md.astype(np.float32), total_d)
    return LearnedCoefficientState(own, np.asarray(cross), np.asarray(square))


def variance(problem: Problem, residual_md: FloatArray, pi_m: FloatArray) -> float:
    """sum_i w_i^2 (1 - pi_i) / pi_i norm(residual_i)^2: independent draws."""
    g_m = problem.population.weight_m**2 * (1 - pi_m) / pi_m
    return float(g_m @ np.sum(residual_md**2, axis=1))


@pytest.mark.parametrize("usefulness", [0.0, 0.4, 1.0])
def test_poisson_draws_learn_the_beta_of_least_variance(usefulness: float) -> None:
    """The expectation of A / B's parts over all cohorts gives the minimum of V(beta), found here by a grid."""
    problem = make_problem(SIZES, seed=3)
    rng = np.random.default_rng(1)
    control_md = 2 * (usefulness * problem.update_md + (1 - usefulness) * rng.normal(size=(7, 3)))
    control = LearnedCoefficient(OwnControl(), memory=0.0)
    state = remembered(problem, control_md, 0.0, 0.0)
    cross = square = 0.0
    sampler = Fixed("poisson", by_weight=True)
    everyone = np.ones(7, dtype=np.bool_)
    for chance, cohort in every_cohort(lambda rng: sampler.open(sampler.init(problem.population), everyone, 3, rng)):
        coef_n = problem.population.weight_m[cohort.client_n] / cohort.expected_n
        update_nd = problem.update_md[cohort.client_n]
        after = control.update(state, problem.population, all_replies(cohort, coef_n), update_nd)
        cross, square = cross + chance * float(after.cross), square + chance * float(after.square)
    pi_m = 3 * problem.population.weight_m
    grid = np.linspace(0, 1, 1001)
    costs = [variance(problem, problem.update_md - beta * state.control.control_md, pi_m) for beta in grid]
    learnt = control.coefficient(remembered(problem, control_md, cross, square))
    assert learnt == pytest.approx(grid[int(np.argmin(costs))], abs=1e-3)


def test_draws_with_replacement_learn_the_beta_of_least_variance() -> None:
    """n V(beta) = sum_i norm(w_i l_i)^2 / p_i - norm(sum_i w_i l_i)^2, l = u - beta c: nobody is certain."""
    problem = make_problem([50, 9, 12, 14], seed=5)
    weight_m = problem.population.weight_m
    control_md = 0.7 * problem.update_md + np.random.default_rng(2).normal(size=(4, 3))
    control, state = LearnedCoefficient(OwnControl(), memory=0.0), remembered(problem, control_md, 0.0, 0.0)
    control_md = state.control.control_md.astype(np.float64)  # as it is remembered, in float32
    p_m, n = weight_m, 3
    assert n * p_m[0] > 1
    cross = square = 0.0
    for draws in product(range(4), repeat=n):
        client_n, count_n = np.unique(draws, return_counts=True)
        cohort = Cohort(client_n, count_n, n * p_m[client_n], "replacement")
        coef_n = count_n * weight_m[client_n] / (n * p_m[client_n])
        after = control.update(state, problem.population, all_replies(cohort, coef_n), problem.update_md[client_n])
        chance = float(np.prod(p_m[list(draws)]))
        cross, square = cross + chance * float(after.cross), square + chance * float(after.square)

    def part(one_md: FloatArray, other_md: FloatArray) -> float:
        one_md, other_md = weight_m[:, None] * one_md, weight_m[:, None] * other_md
        return float((one_md * other_md).sum(axis=1) @ (1 / p_m) - one_md.sum(axis=0) @ other_md.sum(axis=0))

    best = part(problem.update_md.astype(np.float64), control_md) / part(control_md, control_md)
    assert 0.1 < best < 0.9
    assert cross / square == pytest.approx(best, rel=1e-6)


def test_by_hand() -> None:
    """Two of four equal clients: coef = 1/2, masses 1/2; y = (1, 2), z = (1, 0) about their means 1.5 and .5."""
    population = Population.from_sizes([1] * 4)
    control = LearnedCoefficient(OwnControl(), memory=0.5)
    own = OwnControlState(np.array([[2.0], [0.0], [0.0], [0.0]], dtype=np.float32), np.array([0.5]))
    state = LearnedCoefficientState(own, np.asarray(4.0), np.asarray(8.0))
    assert control.coefficient(state) == 0.5
    guess = control.value(state, np.array([0, 1]))
    assert guess.total_d.tolist() == [0.25]
    assert guess.control_nd.tolist() == [[1.0], [0.0]]
    update_nd = np.array([[2.0], [4.0]], dtype=np.float32)
    after = control.update(state, population, replies_of([0, 1], [0.5, 0.5]), update_nd)
    # masses 1/2: cross = (1 - 1.5)(1 - .5)/2 + (2 - 1.5)(0 - .5)/2 = -.25, square = .25
    assert (float(after.cross), float(after.square)) == (2.0 - 0.25, 4.0 + 0.25)
    assert after.control.control_md[1].tolist() == [4.0]
    after = control.update(state, population, replies_of([0, 1], [0.5, 0.5], "poisson"), update_nd)
    assert (float(after.cross), float(after.square)) == (2.0 + 0.5, 4.0 + 0.5)


def test_who_is_always_asked_has_no_say() -> None:
    population = Population.from_sizes([1, 1])
    control = LearnedCoefficient(OwnControl())
    for kind in ("fixed-size", "poisson"):
        state = control.init(population, 2)
        for _ in range(3):
            heard = replies_of([0, 1], [0.5, 0.5], kind)
            state = control.update(state, population, heard, np.ones((2, 2), dtype=np.float32))
        assert control.coefficient(state) == 1.0
        assert float(state.square) == 0.0


def test_what_all_guesses_have_in_common_says_nothing_where_the_size_is_fixed() -> None:
    """Equal weights, simple random draws: a common guess cancels, so B stays 0 and beta 1."""
    control = LearnedCoefficient(CommonControl())
    population = Population.from_sizes([1] * 6)
    state = control.init(population, 3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        update_nd = rng.normal(size=(3, 3)).astype(np.float32) + 5
        state = control.update(state, population, replies_of([0, 2, 3], [1 / 3] * 3), update_nd)
    assert state.control.control_d.any()
    assert control.coefficient(state) == 1.0


@given(st.integers(0, 10**6), st.floats(-3, 3), st.sampled_from(["uniform", "md-fixed"]))
def test_any_beta_is_unbiased(seed: int, ratio: float, name: str) -> None:
    problem = make_problem(SIZES[:5], seed=seed)
    control_md = 10 * np.random.default_rng(seed).normal(size=(5, 3))
    plan = Plan(problem.population, Fixed(by_weight=name == "md-fixed"), 2, "difference-own-damped", Recorder(), seed)
    state = init_round(plan, np.zeros(3))._replace(control=remembered(problem, control_md, ratio, 1.0))
    assert np.abs(mean_estimate(plan, state, problem) - problem.ubar_d).max() < 1e-12 * 100


def rounds(
    estimator: str, updates: Callable[[int], Params], m: int, n: int, design: str = "systematic"
) -> tuple[float, float]:
    """Mean squared error over the later of 60 rounds, and the last beta (1 if there is none)."""
    plan = Plan(Population.from_sizes([1] * m), Fixed(design=design), n, estimator, Recorder())
    state, errors = init_round(plan, np.zeros(20)), []
    for round in range(60):
        update_md = updates(round)
        cohort = open_round(plan, state)
        state, info = close_round(plan, state, cohort, update_md[cohort.client_n])
        errors.append(np.sum((state.optimizer.delta_d - update_md.mean(axis=0)) ** 2))
    return float(np.mean(errors[20:])), info.control_coefficient


@pytest.mark.parametrize(
    ("name", "rate", "beta"),
    [
        ("fixed-size", 1.0, (0.0, 0.1)),
        ("fixed-size", 0.9, (0.8, 1.0)),
        ("poisson", 1.0, (0.9, 1.0)),
        ("poisson", 0.8, (0.9, 1.0)),
    ],
)
def test_what_is_common_is_worth_a_memory_where_it_does_not_cancel(
    name: str, rate: float, beta: tuple[float, float]
) -> None:
    """Updates v + noise that no memory knows: v cancels in draws of fixed size, not where clients fail or n varies."""
    rng = np.random.default_rng(0)
    v_d = 3 * rng.normal(size=20)
    plan = Plan(
        Population.from_sizes([1] * 60), Fixed("poisson" if name == "poisson" else "systematic", by_weight=True), 6
    )
    errors = {}
    for estimator in ("difference-own", "difference-own-damped"):
        own = replace(plan, estimator=estimator, server_optimizer=Recorder())
        state, squares, betas = init_round(own, np.zeros(20)), [], []
        for round in range(300):
            noise = stream(5, "audit", round)
            update_md = (v_d + 0.3 * noise.normal(size=(60, 20))).astype(np.float32)
            cohort = open_round(own, state)
            answers_n = noise.random(len(cohort.client_n)) < rate
            updates = [update_md[i] if here else None for i, here in zip(cohort.client_n, answers_n, strict=True)]
            state, info = close_round(own, state, cohort, updates)
            squares.append(np.sum((state.optimizer.delta_d - update_md.mean(axis=0)) ** 2))
            betas.append(info.control_coefficient)
        errors[estimator] = np.mean(squares[150:])
    assert beta[0] <= np.mean(betas[150:]) <= beta[1]
    assert errors["difference-own-damped"] < 1.1 * errors["difference-own"]


def test_useless_memory_falls_back_to_horvitz_thompson_and_a_good_one_is_kept() -> None:
    """Updates without memory: beta near 0, error that of Horvitz-Thompson, half that of beta = 1. With one: kept."""
    fixed_md = np.random.default_rng(0).normal(size=(30, 20))

    def fresh(round: int) -> Params:
        return (stream(1, "audit", round).normal(size=(30, 20)) + 3).astype(np.float32)

    def lasting(round: int) -> Params:
        return (fixed_md + 0.1 * stream(1, "audit", round).normal(size=(30, 20))).astype(np.float32)

    plain, _ = rounds("horvitz-thompson", fresh, 30, 6)
    full, _ = rounds("difference-own", fresh, 30, 6)
    damped, beta = rounds("innovation-damped", fresh, 30, 6)
    assert beta < 0.2
    assert damped < 1.15 * plain
    assert full > 1.6 * plain
    kept, beta = rounds("difference-own-damped", lasting, 30, 6)
    assert beta > 0.9
    assert kept < 0.1 * rounds("horvitz-thompson", lasting, 30, 6)[0]


@pytest.mark.parametrize("design", ["systematic", "multinomial"])
def test_one_reply_a_round_is_enough_to_distrust_a_useless_memory(design: str) -> None:
    """n = 1: nothing to be centred about. Beta stayed 1 there, and the error twice that of Horvitz-Thompson."""

    def fresh(round: int) -> Params:
        return stream(1, "audit", round).normal(size=(20, 20)).astype(np.float32)

    plain, _ = rounds("horvitz-thompson", fresh, 20, 1, design)
    full, _ = rounds("difference-own", fresh, 20, 1, design)
    damped, beta = rounds("innovation-damped", fresh, 20, 1, design)
    assert beta < 0.3
    assert damped < 1.15 * plain
    assert full > 1.5 * plain


def test_of_a_cohort_with_one_open_place_the_certain_have_no_say() -> None:
    """Clients 0 and 1 are certain, 2 is not: beta is that of 2 alone, uncentred."""
    population = Population.from_sizes([1, 1, 1, 1])
    control = LearnedCoefficient(OwnControl(), memory=0.0)
    memory = OwnControlState(np.array([[9.0], [9.0], [2.0], [0.0]], dtype=np.float32), np.zeros(1))
    cohort = Cohort(np.array([0, 1, 2]), np.ones(3, dtype=np.int64), np.array([1.0, 1.0, 0.5]), "fixed-size")
    heard = all_replies(cohort, 0.25 / cohort.expected_n)
    state = LearnedCoefficientState(memory, np.zeros(()), np.zeros(()))
    after = control.update(state, population, heard, np.array([[-5.0], [7.0], [1.0]], dtype=np.float32))
    assert (float(after.cross), float(after.square)) == pytest.approx((0.5 * 0.5 * 1, 0.5 * 0.5 * 2 * 1))
    assert control.coefficient(after) == pytest.approx(0.5)


def test_a_fixed_beta() -> None:
    population = Population.from_sizes([1, 3])
    control = FixedCoefficient(InnovationControl(), 0.25)
    state = control.init(population, 1)
    state = control.update(state, population, replies_of([0], [1.0]), np.array([[8.0]], dtype=np.float32))
    guess = control.value(state, np.array([0]))
    plain = InnovationControl().value(state, np.array([0]))
    assert guess.control_nd.tolist() == [[2.0]]
    np.testing.assert_array_equal(guess.total_d, 0.25 * plain.total_d)


def test_refusals_and_names() -> None:
    with pytest.raises(DeltaflError, match=r"beta is 1\.5"):
        FixedCoefficient(OwnControl(), 1.5)
    with pytest.raises(DeltaflError, match="memory is 1"):
        LearnedCoefficient(OwnControl(), memory=1.0)
    assert find_estimator("difference-damped").unbiased
    control = LearnedCoefficient(OwnControl())
    state = control.init(Population.from_sizes([1, 1]), 2)
    nobody = replies_of([], [], "poisson")
    after = control.update(state, Population.from_sizes([1, 1]), nobody, np.zeros((0, 2), dtype=np.float32))
    assert control.coefficient(after) == 1.0
