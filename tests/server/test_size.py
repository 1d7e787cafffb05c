"""Cohorts that size themselves: by the error of the estimate, and by a budget."""

from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Recorder, make_problem, mean_estimate, play
from deltafl import (
    DeltaflError,
    Plan,
    Population,
    RoundState,
    RunFacts,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.federation.clients import ClientInfo
from deltafl.federation.rules import make_rules
from deltafl.server.part import Step
from deltafl.server.size import MEMORY, ErrorState, RelativeError
from deltafl.types import Cohort, FloatArray

SIZES = [4, 1, 2, 3, 1, 5]


def recorded(label: str, n: int = 3, sizes: list[int] = SIZES) -> Plan:
    """A plan whose model does not move."""
    facts = RunFacts(rounds=30)
    return make_plan(label, sizes, n, facts, parts=(Recorder(),))


def step_of(asked: int, square: float, variance: float) -> Step:
    cohort = Cohort(np.arange(asked), np.ones(asked, np.int64), np.full(asked, 0.5))
    return Step(0, np.zeros(1, np.float32), np.array([sqrt(square)]), 0.0, 1.0, cohort, variance)


def test_n_is_the_formula_of_the_means() -> None:
    m = 40
    part = RelativeError(0.4)
    plan = make_plan("uniform", [1] * m, n=10)
    own = part.init(plan, None)
    spread = signal = 0.0
    for asked, square, variance in [(10, 9.0, 2.0), (12, 8.0, 1.0), (15, 11.0, 0.5)]:
        _, own = part.direction(plan, own, step_of(asked, square, variance))
        spread = MEMORY * spread + (1 - MEMORY) * variance / (1 / asked - 1 / m)
        signal = MEMORY * signal + (1 - MEMORY) * (square - variance)
        n = ceil(spread / (0.4**2 * signal + spread / m))
        assert ceil(asked / 2) < n < 2 * asked
        assert part.size(plan, own, 1, 10) == n


@pytest.mark.parametrize(
    ("asked", "square", "variance", "n"),
    [
        (10, 100.0, 1e-9, 5),  # at most half of before
        (10, 1e-9, 100.0, 20),  # at most twice
        (3, 100.0, 0.0, 2),  # no variance: the fewest by which it would show
        (30, 1.0, 5.0, 40),  # all there are; V alone is longer than D
        (40, 1.0, 0.0, 7),  # all were asked: nothing is learnt
        (10, 1.0, np.nan, 7),  # nor of a cohort whose variance is not known
    ],
)
def test_n_at_the_borders(asked: int, square: float, variance: float, n: int) -> None:
    part = RelativeError(0.5)
    plan = make_plan("uniform", [1] * 40, n=10)
    own = ErrorState(np.zeros(()), np.zeros(()), np.asarray(7.0))
    _, own = part.direction(plan, own, step_of(asked, square, variance))
    assert part.size(plan, own, 1, 10) == n


def sizes_of(plan: Plan, spread: list[float], seed: int = 0) -> list[int]:
    """n while updates are so far from one mean, round by round."""
    m = plan.population.num_clients
    rng = np.random.default_rng(seed)
    state = init_round(plan, np.zeros(4))
    sizes = []
    for size in spread:
        # Anew: of updates that stay, memories would leave nothing.
        apart_md = rng.normal(size=(m, 4))
        cohort = open_round(plan, state)
        sizes.append(plan.cohort_size(state))
        updates = 1 + size * apart_md[cohort.client_n]
        state, _ = close_round(plan, state, cohort, updates)
    return sizes


@pytest.mark.parametrize("sampler", ["uniform", "uniform@poisson", "innovation", "fedvarp"])
@pytest.mark.parametrize("m", [2, 8, 10, 40])
def test_no_n_is_kept_for_ever(sampler: str, m: int) -> None:
    """Nor is that of one client, who shows no variance, or of all, who have none."""
    plan = make_plan(sampler, [1] * m, "auto", parts=(Recorder(),))
    # From few rounds the estimate of n varies.
    assert max(sizes_of(plan, [9.0] * 40)[20:]) > m / 2
    assert sizes_of(plan, [9.0] * 30 + [0.0] * 60)[-1] == 2
    alone = make_plan(f"{sampler}+relative_error=1.0", [1] * m, 1, parts=(Recorder(),))
    assert max(sizes_of(alone, [9.0] * 40)[20:]) > m / 2
    assert sizes_of(plan, [0.0] * 20)[-1] == 2


def test_after_a_full_first_round_n_is_that_of_the_plan() -> None:
    plan = make_plan("uniform+relative_error=1.0+first_round=exact", [1] * 40, n=5)
    assert sizes_of(plan, [9.0] * 3)[1] == 5


@pytest.mark.parametrize("sampler", ["uniform", "uniform@poisson", "innovation", "md", "fedvarp"])
@pytest.mark.parametrize("setting", ["relative_error=0.3", "budget=60"])
def test_estimates_stay_unbiased(sampler: str, setting: str) -> None:
    plan = recorded(f"{sampler}+{setting}")
    problems = [make_problem(SIZES, seed=seed) for seed in range(4)]
    state = play(plan, init_round(plan, np.zeros(3)), problems)
    assert plan.cohort_size(state) != plan.n
    problem = make_problem(SIZES, seed=9)
    np.testing.assert_allclose(mean_estimate(plan, state, problem), problem.ubar_d, atol=1e-6)


def test_the_error_is_the_one_that_was_asked_for() -> None:
    """With updates that stay, n settles where the exact variance of a sample is r^2 of the square."""
    m = 60
    problem = make_problem([1] * m, d=5, seed=1)
    plan = make_plan("uniform+relative_error=0.25", [1] * m, n=5, parts=(Recorder(),))
    state = init_round(plan, np.zeros(5))
    sizes = []
    for _ in range(150):
        cohort = open_round(plan, state)
        sizes.append(len(cohort.client_n))
        state, _ = close_round(plan, state, cohort, problem.update_md[cohort.client_n])
    away_md = problem.update_md - problem.ubar_d
    spread = float(np.sum(away_md**2)) / (m - 1)
    exact = spread / (0.25**2 * float(problem.ubar_d @ problem.ubar_d) + spread / m)
    assert 10 < exact < 40
    assert np.mean(sizes[20:]) == pytest.approx(exact, rel=0.1)


@given(
    st.integers(1, 400),
    st.lists(st.integers(1, 25), min_size=1, max_size=30),
    st.sampled_from(["uniform", "md", "uniform+first_round=exact", "uniform+relative_error=0.2"]),
)
def test_a_budget_is_kept(budget: int, here: list[int], label: str) -> None:
    """Whoever is there in each round; and spent, where all are and nothing else sizes cohorts."""
    m = 25
    rounds = len(here)
    try:
        plan = make_plan(f"{label}+budget={budget}+budget_rounds={rounds}", [1] * m, n=3)
    except DeltaflError as error:
        assert budget < rounds + m
        assert "budget" in str(error)
        return
    state = init_round(plan, np.zeros(2))
    spent = 0
    rng = np.random.default_rng(budget)
    for present in here:
        available_m = np.arange(m) < present
        cohort = open_round(plan, state, available_m)
        spent += len(cohort.client_n)
        update_nd = rng.normal(size=(len(cohort.client_n), 2))
        state, _ = close_round(plan, state, cohort, update_nd)
    assert spent <= budget
    if label == "uniform" and min(here) == m:
        assert spent == min(budget, rounds * m)


def spent_by(plan: Plan, rounds: int, cost_m: FloatArray) -> float:
    """What all rounds cost together, where everybody is there and replies."""
    state = init_round(plan, np.zeros(2))
    spent = 0.0
    for _ in range(rounds):
        cohort = open_round(plan, state)
        spent += float(cost_m[cohort.client_n].sum())
        state, _ = close_round(plan, state, cohort, np.ones((len(cohort.client_n), 2)))
    return spent


def test_a_budget_is_in_the_unit_of_the_costs() -> None:
    cost_m = np.array([1.0, 9.0] * 10)
    population = Population.from_sizes([1] * 20, cost=cost_m)
    plan = make_plan("uniform(per_cost=True)+budget=600+budget_rounds=30", population, n=3)
    assert spent_by(plan, 30, cost_m) == pytest.approx(600, rel=0.05)
    with pytest.raises(DeltaflError, match="one client each cost 30"):
        make_plan("uniform+budget=29+budget_rounds=30", population, n=3)


def test_a_census_counts() -> None:
    sizes = [3] * 20
    with pytest.raises(DeltaflError, match="cost 50, a first one"):
        make_plan("census+budget=49", sizes, n=4, facts=RunFacts(rounds=30))
    plan = make_plan("census+budget=80", sizes, n=4, facts=RunFacts(rounds=31))
    part = plan.part("budget")
    assert part is not None
    assert part.size(plan, part.init(plan, np.zeros(1, np.float32)), 1, 4) == 2  # 60 in 30 rounds


def test_a_budget_counts_what_clients_cost() -> None:
    """With seed 0 and dear clients for half of a budget, to the last draw's luck."""
    cost_m = np.repeat([1.0, 5.0], 20)
    population = Population.from_sizes([2] * 40)._replace(cost_m=cost_m)
    plan = make_plan("uniform+budget=600", population, n=4, facts=RunFacts(rounds=25))
    assert 560 <= spent_by(plan, 25, cost_m) <= 615


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("full+relative_error=0.5", "asks everyone"),
        ("full+budget=900", "asks everyone"),
        ("fedavg+relative_error=0.5", None),
        ("oort+relative_error=0.5", "no exact probabilities"),
        ("uniform+relative_error=0.0", "must be in"),
        ("uniform+budget=5", "10 rounds with one client each"),
        ("uniform+budget_rounds=5", "budget is not set"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(label: str, said: str | None) -> None:
    facts = RunFacts(rounds=10)
    if said is None:
        make_plan(label, SIZES, n=3, facts=facts)
        return
    with pytest.raises(DeltaflError, match=said):
        make_plan(label, SIZES, n=3, facts=facts)


def test_a_budget_without_rounds_is_refused() -> None:
    with pytest.raises(DeltaflError, match="budget_rounds"):
        make_plan("uniform+budget=100", SIZES, n=3)


def test_auto_is_a_usual_error_and_a_tenth_of_all() -> None:
    plan = make_plan("uniform", [1] * 40, n="auto")
    assert (plan.n, plan.parts[0]) == (4, RelativeError(1.0))
    own = make_plan("uniform+relative_error=0.3", [1] * 40, n="auto")
    assert own.parts[0] == RelativeError(0.3)
    with pytest.raises(DeltaflError, match="cannot sample"):
        make_plan("uniform", [1] * 40, n="automatic")  # type: ignore[arg-type]


def test_rules_of_federations_take_it() -> None:
    rules = make_rules("uniform", n="auto")
    assert (rules.plan.n, rules.min_clients) == (10, 2)
    assert rules.plan.part("relative_error") == RelativeError(1.0)
    few = rules.plan_for({name: ClientInfo(3) for name in "abcd"})
    assert few.cohort_size(init_round(few, np.zeros(2))) == 4
    # A census of few clients is affordable, whoever the rules were made with.
    cheap = make_rules("census", n="auto", budget=40, budget_rounds=10)
    assert cheap.plan.part("relative_error") is None
    with pytest.raises(DeltaflError, match="n is 'all'"):
        make_rules("uniform", n="all")  # type: ignore[arg-type]


def test_clipping_counts_with_the_cohort_that_there_is() -> None:
    """One liar of a large cohort moves the model no further than one of a plan with that n."""
    m = 30
    rng = np.random.default_rng(0)
    plan = make_plan("uniform+clip=median+relative_error=0.5", [1] * m, n=3)
    state: RoundState = init_round(plan, np.zeros(4))
    for _ in range(4):
        cohort = open_round(plan, state)
        update_nd = rng.normal(size=(len(cohort.client_n), 4))
        state, _ = close_round(plan, state, cohort, update_nd)
    n = plan.cohort_size(state)
    assert n > plan.n
    cohort = open_round(plan, state)
    update_nd = rng.normal(size=(len(cohort.client_n), 4))
    update_nd[0] *= 1e6
    fixed = make_plan("uniform+clip=median", [1] * m, n=n)
    beside = state._replace(
        parts={name: state.parts[name] for name in ("clip", "server_optimizer")}
    )
    moved, _ = close_round(plan, state, cohort, update_nd)
    wanted, _ = close_round(fixed, beside, cohort, update_nd)
    np.testing.assert_array_equal(moved.params_d, wanted.params_d)
