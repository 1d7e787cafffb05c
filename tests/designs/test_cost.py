"""Clients that differ in seconds or costs: the best probabilities for a given total."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Recorder, all_cohorts, make_problem, mean_estimate, mean_square, same_tree
from deltafl import (
    Cohort,
    DeltaflError,
    Plan,
    Population,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.designs.inclusion import draw_probabilities, probabilities_for_budget
from deltafl.types import FloatArray


def variance_of(score_m: FloatArray, pi_m: FloatArray) -> float:
    """Of independent draws."""
    return float(np.sum(score_m**2 * (1 / pi_m - 1)))


def test_scores_by_the_second_are_the_best_for_a_budget_of_time() -> None:
    """Independent draws with sum pi T = B: no direction along the budget improves on w a /
    sqrt(T).
    """
    rng = np.random.default_rng(4)
    score_m = rng.uniform(1, 3, 6)
    seconds_m = rng.uniform(1, 9, 6)
    pi_m = probabilities_for_budget(score_m, seconds_m, 4.0)
    assert pi_m.max() < 1
    np.testing.assert_allclose(pi_m / pi_m.sum(), draw_probabilities(score_m / np.sqrt(seconds_m)))
    for _ in range(50):
        step_m = rng.normal(size=6)
        step_m -= step_m @ seconds_m / (seconds_m @ seconds_m) * seconds_m  # the budget stays
        beside_m = pi_m + 1e-3 * step_m / np.abs(step_m).max() * pi_m.min()
        assert variance_of(score_m, beside_m) > variance_of(score_m, pi_m)
    assert variance_of(score_m, pi_m) < variance_of(score_m, 4.0 * score_m / (score_m @ seconds_m))


@pytest.mark.parametrize("budget", [0.5, 2.0, 5.0, 9.0])
def test_probabilities_for_a_budget_are_the_best_of_a_grid(budget: float) -> None:
    """Brute force, also where some are capped at 1: of all pi on a fine grid that cost no more."""
    score_m = np.array([1.0, 2.0, 6.0])
    cost_m = np.array([1.0, 4.0, 5.0])
    pi_m = probabilities_for_budget(score_m, cost_m, budget)
    assert pi_m @ cost_m == pytest.approx(min(budget, 10.0))
    grid = np.linspace(0.005, 1, 200)
    first_k, second_k = (values.ravel() for values in np.meshgrid(grid, grid))
    last_k = np.minimum(1, (budget - first_k - 4 * second_k) / 5)
    possible_k = last_k > 0
    grid_k3 = np.stack([first_k, second_k, last_k], axis=1)[possible_k]
    best = min(np.sum(score_m**2 * (1 / grid_k3 - 1), axis=1))
    assert best * 0.99 <= variance_of(score_m, pi_m) <= best * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.just(0.0) | st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
        min_size=1,
        max_size=20,
    ),
    st.floats(1e-3, 1e4),
)
def test_a_budget_is_spent_or_pays_for_all(
    clients: list[tuple[float, float]], budget: float
) -> None:
    score_m, cost_m = np.array(clients).T
    pi_m = probabilities_for_budget(score_m, cost_m, budget)
    assert np.all((pi_m >= 0) & (pi_m <= 1))
    # All scores 0 are equal ones.
    paid_m = (score_m > 0) | ~score_m.any()
    wanted = min(budget, float(cost_m[paid_m].sum()))
    assert float(pi_m @ cost_m) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("score", "cost", "budget", "said"),
    [
        ([1, 1], [1], 1.0, "for each of 2 clients"),
        ([1, 1], [1, 0], 1.0, "above 0"),
        ([1, 1], [1, np.nan], 1.0, "above 0"),
        ([1, -1], [1, 1], 1.0, "score of client 1"),
        ([1, 1], [1, 1], 0.0, "budget is 0.0"),
        ([1, 1], [1, 1], "much", "budget is 'much'"),
    ],
)
def test_impossible_budgets_are_refused(score: Any, cost: Any, budget: Any, said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        probabilities_for_budget(score, cost, budget)


@pytest.mark.parametrize("name", ["uniform", "md-fixed@multinomial", "innovation", "balanced"])
def test_draws_by_cost_are_unbiased_and_as_those_by_the_second(name: str) -> None:
    cost_m = np.array([4.0, 1.0, 2.0, 1.0, 9.0])
    problem = make_problem([5, 1, 4, 2, 3])
    method, _, design = name.partition("@")
    plans = []
    by_cost = problem.population._replace(cost_m=cost_m)
    by_second = problem.population._replace(seconds_m=cost_m)
    for option, population in (("per_cost", by_cost), ("per_second", by_second)):
        sampler = make_sampler(f"{method}({option}=True)@{design}")
        plan = Plan(population, sampler, 2, parts=(Recorder(),))
        state = init_round(plan, np.zeros(3))
        np.testing.assert_allclose(mean_estimate(plan, state, problem), problem.ubar_d, atol=1e-6)
        plans.append((plan, state))
    assert same_tree(open_round(*plans[0]), open_round(*plans[1]))


@pytest.mark.parametrize(
    "name", ["uniform", "uniform@ordered-pivotal", "innovation", "balanced", "census"]
)
def test_what_clients_cost_now_decides_and_leaves_estimates_unbiased(name: str) -> None:
    """As a plan that begins with these costs, and with exact expectations, after a round."""
    problem = make_problem([5, 1, 4, 2, 3])
    before_m, now_m = np.array([[4.0, 1.0, 2.0, 1.0, 9.0], [1.0, 8.0, 1.0, 3.0, 1.0]])
    method, _, design = name.partition("@")
    label = f"{method}(per_cost=True)" + f"@{design}" * bool(design)
    drawn = []
    for cost_m in (before_m, now_m):
        population = problem.population._replace(cost_m=cost_m)
        plan = Plan(population, make_sampler(label), 2, parts=(Recorder(),))
        if plan.census is not None:
            plan = plan.with_census([plan.census.answer(u) for u in problem.update_md])
        state = init_round(plan, np.zeros(3))
        cohort = Cohort(np.arange(2), np.ones(2, np.int64), np.full(2, 0.4))
        state, _ = close_round(plan, state, cohort, list(problem.update_md[:2]))
        drawn.append((plan, state))
    (plan, state), (other, as_now) = drawn
    priced = plan.priced(state, plan.population.priced(now_m))
    assert same_tree(priced.sampler, as_now.sampler)
    assert not same_tree(state.sampler, priced.sampler)
    np.testing.assert_allclose(mean_estimate(plan, priced, problem), problem.ubar_d, atol=1e-6)
    cohort = open_round(plan, state, cost_m=now_m)
    assert same_tree(cohort._replace(cost_n=now_m[:0]), open_round(other, as_now))
    assert cohort.cost_n.tolist() == now_m[cohort.client_n].tolist()
    assert cohort.part([1]).cost_n.tolist() == now_m[cohort.client_n][1:].tolist()


def test_a_budget_pays_what_a_round_costs_when_it_is_drawn() -> None:
    """At 4 a training half as many are asked as at 2, and the sum is kept."""
    population = Population.from_sizes([5] * 40, cost=np.full(40, 3.0))
    plan = make_plan("uniform+budget=480+budget_rounds=20", population, n=4)
    state = init_round(plan, np.zeros(1))
    asked = []
    for price in [4.0] * 10 + [2.0] * 10:
        cohort = open_round(plan, state, cost_m=np.full(40, price))
        state, _ = close_round(plan, state, cohort, np.ones((len(cohort.client_n), 1)))
        asked.append(len(cohort.client_n))
    spent = 4 * sum(asked[:10]) + 2 * sum(asked[10:])
    assert 440 <= spent <= 480
    assert asked[5] < asked[-1]
    with pytest.raises(DeltaflError, match="above 0 for each of the 40"):
        open_round(plan, state, cost_m=np.zeros(40))
    with pytest.raises(DeltaflError, match="write a number for each"):
        open_round(plan, state, cost_m=["a"] * 40)


@pytest.mark.parametrize("design", ["systematic", "pivotal"])
def test_draws_by_cost_are_cheaper_and_better_where_costs_differ(design: str) -> None:
    """Of six clients three cost 25 times as much. Asking two by cost is both cheaper and nearer to
    the mean, over all cohorts, than asking one equally; sums of 1 / pi - 1 are 26.4 and 30.
    """
    problem = make_problem([5] * 6, d=40, shift=0.0)
    cost_m = np.repeat([1.0, 25.0], 3)
    found = []
    for label, n in (("uniform", 1), ("uniform(per_cost=True)", 2)):
        population = problem.population._replace(cost_m=cost_m)
        plan = Plan(population, make_sampler(f"{label}@{design}"), n, parts=(Recorder(),))
        state = init_round(plan, np.zeros(40))
        cohorts = all_cohorts(plan, state, None)
        cost = sum(chance * cost_m[cohort.client_n].sum() for chance, cohort in cohorts)
        found.append((cost, mean_square(plan, state, problem)))
    (usual, error), (by_cost, less) = found
    assert (usual, by_cost) == (pytest.approx(13), pytest.approx(10))
    assert less < 0.95 * error


def test_costs_that_are_missing_or_given_twice_are_one_sentence() -> None:
    population = Population.from_sizes([5] * 3)
    for label, said in [
        ("uniform(per_cost=True)", "per_cost needs what a round of each client costs"),
        ("innovation(per_cost=True,per_second=True)", "leave out one"),
    ]:
        plan = Plan(population, make_sampler(label), 2)
        with pytest.raises(DeltaflError, match=said):
            init_round(plan, np.zeros(3))
    bad: list[Any] = [[1, 2], [1, 0, 1], [1, -1, 1], [1, np.nan, 1], [1, np.inf, 1], ["a", 1, 1]]
    for cost in bad:
        with pytest.raises(DeltaflError, match=r"cost.* number"):
            Population.from_sizes([5] * 3, cost=cost)


@pytest.mark.parametrize("name", ["uniform", "md-fixed", "innovation", "delta-centred"])
def test_samplers_by_the_second_favour_fast_clients(name: str) -> None:
    seconds_m = np.array([4.0, 1.0, 1.0, 1.0, 1.0])
    population = Population.from_sizes([5] * 5)._replace(seconds_m=seconds_m)
    plan = Plan(population, make_sampler(f"{name}(per_second=True)@systematic"), 2, seed=1)
    expected_m = np.zeros(5)
    for probability, cohort in all_cohorts(plan, init_round(plan, np.zeros(3)), None):
        expected_m[cohort.client_n] += probability
    floor = 0.2 if name in {"innovation", "delta-centred"} else 0.0
    share_m = (1 - floor) * np.array([0.5, 1, 1, 1, 1]) / 4.5 + floor / 5
    np.testing.assert_allclose(expected_m, 2 * share_m)
    with pytest.raises(ValueError, match=r"speeds='lognormal'"):
        init_round(replace(plan, population=Population.from_sizes([5] * 5)), np.zeros(3))


@pytest.mark.parametrize("label", ["uniform(per_second=True)", "oort"])
@pytest.mark.parametrize(
    "seconds", [[1.0, 2.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, np.nan, 1.0], [1, np.inf, 1]]
)
def test_impossible_seconds_are_refused(label: str, seconds: list[float]) -> None:
    population = Population.from_sizes([5] * 3)._replace(seconds_m=np.array(seconds))
    with pytest.raises(DeltaflError, match="above 0 for each of the 3 clients"):
        Plan(population, make_sampler(label), 2, "plain-mean")
