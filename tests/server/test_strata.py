"""Cohorts by strata: exact probabilities and variances, the clients of each, what is refused."""

from dataclasses import dataclass
from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import (
    Recorder,
    all_cohorts,
    estimate,
    make_problem,
    mean_estimate,
    mean_square,
    play,
    same_tree,
)
from deltafl import (
    Cohort,
    DeltaflError,
    Plan,
    Population,
    RoundInfo,
    RoundState,
    Sampler,
    close_round,
    draw_cohort,
    init_round,
    make_plan,
    open_round,
)
from deltafl.designs.strata import allocate
from deltafl.samplers.base import Scored
from deltafl.types import FloatArray

SIZES = [4, 1, 2, 3, 1, 5]
REGIONS = ["north", "south", "north", "south", "east", "north"]
CODES = np.array([1, 2, 1, 2, 0, 1])

ONE_STAGE = [
    "uniform+at_least=1",
    "uniform+at_least=1+allocation=weight",
    "md@multinomial+at_least=1",
    "md-fixed@pivotal+allocation=neyman",
    "innovation@local-pivotal+at_least=1",
    "census@anticluster+at_least=1",
    "pracdelta+allocation=weight",
    "fedis+at_least=1",
    "cluster-is+at_least=1",
    "fedstas+at_least=1",
    "uniform@ordered-pivotal+at_least=1",
]
TWO_STAGES = ["uniform+stages=2", "md@multinomial+stages=2", "innovation+stages=1"]


def plan_of(label: str, n: int = 4, sizes: list[int] = SIZES, strata: list[str] = REGIONS) -> Plan:
    """A plan whose model does not move."""
    population = make_problem(sizes).population
    strata_only = Population.from_sizes(sizes, strata=strata)
    population = population._replace(strata=strata_only.strata)
    plan = make_plan(label, population, n, parts=(Recorder(),))
    if plan.census is None:
        return plan
    return plan.with_census([plan.census.answer(u) for u in make_problem(sizes, seed=5).update_md])


def warm(plan: Plan, d: int = 3) -> RoundState:
    problems = [make_problem(SIZES, d=d, seed=seed) for seed in range(3)]
    return play(plan, init_round(plan, np.zeros(d)), problems)


def info_of(plan: Plan, state: RoundState, cohort: Any, update_md: Any) -> RoundInfo:
    return close_round(plan, state, cohort, update_md[cohort.client_n])[1]


@pytest.mark.parametrize("label", [*ONE_STAGE, *TWO_STAGES])
def test_estimates_are_unbiased(label: str) -> None:
    plan = plan_of(label)
    problem = make_problem(SIZES, seed=9)
    np.testing.assert_allclose(mean_estimate(plan, warm(plan), problem), problem.ubar_d, atol=1e-6)


@pytest.mark.parametrize("label", [*ONE_STAGE, *TWO_STAGES])
@pytest.mark.parametrize("away", [[], [4], [0, 2], [1, 3, 4], [0, 1, 2, 3, 4]])
def test_expectations_are_the_mean_counts_whoever_is_there(label: str, away: list[int]) -> None:
    plan = plan_of(label)
    state = warm(plan)
    here_m = ~np.isin(np.arange(6), away)
    mean_m = np.zeros(6)
    claimed_m = np.full(6, np.nan)
    oracle = make_problem(SIZES, seed=9).oracle
    for probability, cohort in all_cohorts(plan, state, oracle, here_m.astype(float)):
        mean_m[cohort.client_n] += probability * cohort.count_n
        claimed_m[cohort.client_n] = cohort.expected_n
        assert here_m[cohort.client_n].all()
        assert np.array_equal(cohort.stratum_n, CODES[cohort.client_n])
        # Clusters inside a stratum are drawn one by one, too: there the draw is one of several.
        if "stages" not in label:
            # Of each stratum one, if somebody is there.
            assert {*CODES[here_m]} == {*CODES[cohort.client_n]}
            assert cohort.count_n.sum() == min(4, here_m.sum())
        else:
            assert len({*CODES[cohort.client_n]}) == min(
                plan.parts[0].stages,  # type: ignore[attr-defined]
                len({*CODES[here_m]}),
            )
    np.testing.assert_allclose(mean_m[here_m], claimed_m[here_m])


@pytest.mark.parametrize("at_least", [1, 2, 3])
def test_no_stratum_has_fewer_than_at_least_unless_fewer_are_there(at_least: int) -> None:
    rng = np.random.default_rng(at_least)
    codes = np.arange(30) % 4
    population = Population.from_sizes(rng.integers(1, 50, 30), strata=codes.tolist())
    plan = make_plan(f"md-fixed+at_least={at_least}", population, 13)
    state = init_round(plan, np.zeros(2))
    for _ in range(40):
        here_m = rng.random(30) < 0.4
        here_m[0] = True
        cohort = open_round(plan, state, here_m)
        there = np.bincount(codes[here_m], minlength=4)
        drawn = np.bincount(codes[cohort.client_n], minlength=4)
        assert np.all(drawn >= np.minimum(at_least, there))
        state, _ = close_round(plan, state, cohort, rng.normal(size=(len(cohort.client_n), 2)))


@pytest.mark.parametrize("label", ["uniform", "innovation@cube", "oort", "full", "divfl"])
def test_one_stratum_is_none(label: str) -> None:
    if label == "full":
        with pytest.raises(DeltaflError, match="asks everyone"):
            plan_of("full+at_least=1")
        return
    alone = plan_of(label)
    whole = plan_of(f"{label}+at_least=1", strata=["all"] * 6)
    state = warm(alone)
    beside = state._replace(parts={**state.parts, "at_least": ()})
    one = open_round(alone, state)
    assert same_tree(open_round(whole, beside)[:4], one[:4])


def test_a_cohort_is_divided_by_scores_or_by_weight() -> None:
    weights = [40, 10, 20, 30, 10, 50]
    by_weight = open_round(*started("md-fixed+allocation=weight", weights))
    by_score = open_round(*started("md-fixed+allocation=neyman", weights))
    assert np.bincount(by_weight.stratum_n).tolist() == [1, 2, 1]
    assert same_tree(by_weight, by_score)
    # Equal scores: as many as there are clients.
    equal = open_round(*started("uniform+at_least=1", weights))
    assert np.bincount(equal.stratum_n).tolist() == [1, 2, 1]
    plan = plan_of("innovation+allocation=neyman", n=5)
    state = warm(plan)
    assert isinstance(plan.sampler, Scored)
    score_m = np.asarray(plan.sampler.scores(state.sampler, np.ones(6, bool), 5, None))
    mass_h = np.array([score_m[code == CODES].sum() for code in range(3)])
    drawn_h = np.bincount(open_round(plan, state).stratum_n)
    assert np.array_equal(drawn_h, allocate(5, np.bincount(CODES), mass_h))


def started(label: str, sizes: list[int]) -> tuple[Plan, RoundState]:
    plan = plan_of(label, sizes=sizes)
    return plan, init_round(plan, np.zeros(3))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
)
def test_allocations_are_whole_and_nearly_proportional(
    sizes: list[int], least: int, more: int, seed: int
) -> None:
    size_h = np.array(sizes)
    n = min(int(np.minimum(least, size_h).sum()) + more, int(size_h.sum()))
    mass_h = np.random.default_rng(seed).exponential(size=len(sizes))
    share_h = allocate(n, size_h, mass_h, least)
    assert share_h.sum() == n
    assert np.all(share_h >= np.minimum(least, size_h))
    assert np.all(share_h <= size_h)
    # Who has more than its share has it because of ``least``, or because others are full.
    exact_h = n * mass_h / mass_h.sum()
    if not np.any(share_h == size_h):
        assert np.all(share_h <= np.maximum(least, np.ceil(exact_h)))


# --- variances by formula


def spread(value_kd: FloatArray) -> float:
    """S^2, with k - 1."""
    return float(np.sum((value_kd - value_kd.mean(axis=0)) ** 2)) / (len(value_kd) - 1)


def test_the_variance_of_strata_is_the_textbook_one() -> None:
    """sum_h N_h^2 (1 - n_h / N_h) S_h^2 / n_h of the z_i = w_i u_i (Cochran 1977, 5.3), exactly;
    and what ``info`` estimates of it has this mean.
    """
    sizes = [3, 1, 2, 2, 1, 4, 2]
    strata = ["a"] * 4 + ["b"] * 3
    code_m = np.array([0, 0, 0, 0, 1, 1, 1])
    plan = plan_of("uniform+at_least=2", 4, sizes, strata)
    problem = make_problem(sizes, seed=3)
    state = init_round(plan, np.zeros(3))
    quota_h = np.bincount(open_round(plan, state).stratum_n)
    value_md = problem.population.weight_m[:, None] * problem.update_md.astype(float)
    wanted = 0.0
    for h, (size, n_h) in enumerate(zip(np.bincount(code_m), quota_h, strict=True)):
        wanted += size**2 * (1 - n_h / size) * spread(value_md[code_m == h]) / n_h
    assert mean_square(plan, state, problem) == pytest.approx(wanted)
    mean = 0.0
    for probability, cohort in all_cohorts(plan, state, None):
        mean += probability * info_of(plan, state, cohort, problem.update_md).variance
    assert mean == pytest.approx(wanted)


def test_strata_with_one_client_each_count_as_one() -> None:
    """Collapsed strata: no less than the truth in the mean, for independent strata that differ."""
    plan = plan_of("uniform+at_least=1", 3)
    problem = make_problem(SIZES, seed=3)
    state = init_round(plan, np.zeros(3))
    mean = sum(
        probability * info_of(plan, state, cohort, problem.update_md).variance
        for probability, cohort in all_cohorts(plan, state, None)
    )
    assert mean >= mean_square(plan, state, problem)


def test_the_variance_of_two_stages_is_the_textbook_one() -> None:
    """H^2 (1 - R / H) S_T^2 / R + H / R sum_h V_h, of equal strata (Cochran 1977, 10.3).
    With one client of each an estimate has no part within, and takes 1 for 1 - R / H.
    """
    sizes = [3, 1, 2, 2, 1, 4]
    code_m = np.array([0, 0, 1, 1, 2, 2])
    strata = ["a", "a", "b", "b", "c", "c"]
    plan = plan_of("uniform+stages=2", 2, sizes, strata)
    problem = make_problem(sizes, seed=3)
    state = init_round(plan, np.zeros(3))
    value_md = problem.population.weight_m[:, None] * problem.update_md.astype(float)
    total_hd = np.array([value_md[code_m == h].sum(axis=0) for h in range(3)])
    within = sum(4 * (1 - 1 / 2) * spread(value_md[code_m == h]) for h in range(3))
    wanted = 9 * (1 - 2 / 3) * spread(total_hd) / 2 + 3 / 2 * within
    assert mean_square(plan, state, problem) == pytest.approx(wanted)
    cohorts = all_cohorts(plan, state, None)
    assert len({tuple(cohort.client_n) for _, cohort in cohorts}) == comb(3, 2) * 4
    variances = [p * info_of(plan, state, c, problem.update_md).variance for p, c in cohorts]
    assert wanted < sum(variances) < wanted / (1 - 2 / 3)


def mean_variance(plan: Plan, state: RoundState, problem: Any) -> float:
    """E ``info.variance`` over all cohorts."""
    return sum(
        probability * info_of(plan, state, cohort, problem.update_md).variance
        for probability, cohort in all_cohorts(plan, state, problem.oracle)
    )


def two_stages(label: str, n: int, strata: str) -> tuple[Plan, RoundState, Any]:
    sizes = [3, 1, 2, 2, 1, 4, 2][: len(strata)]
    plan = plan_of(label, n, sizes, list(strata))
    return plan, init_round(plan, np.zeros(3)), make_problem(sizes, seed=3)


@pytest.mark.parametrize(
    ("label", "n", "strata"),
    [
        # Two of two: nothing is left to chance within.
        ("uniform+stages=2+allocation=weight", 4, "aabbcc"),
        ("uniform+stages=2", 4, "aabbcc"),
        # Draws with replacement inside, of equal strata.
        ("uniform@multinomial+stages=2", 4, "aabbcc"),
        # Both strata are sure: two stages are one.
        ("uniform+stages=2", 4, "aaabbbb"),
        # The only stratum is sure.
        ("uniform+stages=1", 3, "aaaaa"),
    ],
)
def test_the_variance_of_two_stages_is_estimated(label: str, n: int, strata: str) -> None:
    plan, state, problem = two_stages(label, n, strata)
    wanted = mean_square(plan, state, problem)
    if "weight" in label:
        # Unequal probabilities of strata: close, as of any draw of fixed size.
        assert 0.6 * wanted < mean_variance(plan, state, problem) < 1.6 * wanted
    else:
        assert mean_variance(plan, state, problem) == pytest.approx(wanted, rel=1e-5)


def test_one_stratum_of_several_does_not_tell_the_variance() -> None:
    plan, state, problem = two_stages("uniform+stages=1", 2, "aabbcc")
    cohort = open_round(plan, state)
    assert np.isnan(info_of(plan, state, cohort, problem.update_md).variance)


@pytest.mark.parametrize(("stages", "strata"), [(2, "abbbbbb"), (3, "abccccc"), (2, "aaabbbb")])
def test_a_stratum_that_alone_is_left_to_chance_has_a_variance(stages: int, strata: str) -> None:
    """One client of each: too large, and never 0, by which cohorts would stay small."""
    plan, state, problem = two_stages(f"uniform+stages={stages}", stages, strata)
    true = mean_square(plan, state, problem)
    assert true < mean_variance(plan, state, problem) < 10 * true
    for _, cohort in all_cohorts(plan, state, None):
        assert info_of(plan, state, cohort, problem.update_md).variance > 0


def test_large_strata_in_two_stages_by_monte_carlo() -> None:
    """Strata of unequal size: the mean estimate is the truth."""
    rng = np.random.default_rng(1)
    code_m = np.repeat(np.arange(6), [8, 8, 9, 9, 10, 10])
    update_md = rng.normal(size=(6, 4))[code_m] + rng.normal(size=(54, 4))
    update_md = update_md.astype(np.float32)
    population = Population.from_sizes([1] * 54, strata=code_m.tolist())
    plan = make_plan("uniform+stages=3", population, 12, parts=(Recorder(),))
    state = init_round(plan, np.zeros(4))
    errors, variances = [], []
    for _ in range(400):
        cohort = open_round(plan, state)
        following, info = close_round(plan, state, cohort, update_md[cohort.client_n])
        delta_d = following.parts["server_optimizer"].delta_d
        errors.append(float(np.sum((delta_d - update_md.mean(axis=0)) ** 2)))
        variances.append(info.variance)
        state = state._replace(round=state.round + 1)
    assert 0.85 < np.mean(variances) / np.mean(errors) < 1.18


@pytest.mark.parametrize("label", ["uniform+at_least=1", *TWO_STAGES])
def test_silent_clients_leave_strata_unbiased(label: str) -> None:
    plan = plan_of(label, 4)
    state = warm(plan)
    # As if two clients had replied rarely.
    rare_m = np.array([2, 0, 0, 1, 0, 0])
    selected_m = state.selected_m.plus_one(np.flatnonzero(rare_m)).plus_one(np.array([0]))
    state = state._replace(selected_m=selected_m)
    problem = make_problem(SIZES, seed=9)
    mean_d = mean_estimate(plan, state, problem, failures=True)
    np.testing.assert_allclose(mean_d, problem.ubar_d, atol=1e-6)


def test_strata_that_explain_updates_lower_the_variance() -> None:
    """The reason to have them: between regions that differ nothing is left to chance."""
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(5), 8)
    update_md = (rng.normal(size=(5, 4))[codes] + 0.1 * rng.normal(size=(40, 4))).astype(np.float32)
    population = Population.from_sizes([1] * 40, strata=codes.tolist())
    errors = {}
    for label in ("uniform", "uniform+at_least=2"):
        plan = make_plan(label, population, 10, parts=(Recorder(),))
        state = init_round(plan, np.zeros(4))
        total = 0.0
        for _ in range(60):
            cohort = open_round(plan, state)
            delta_d = estimate(plan, state, cohort, list(update_md[cohort.client_n]))
            total += float(np.sum((delta_d - update_md.mean(axis=0)) ** 2))
            state = state._replace(round=state.round + 1)
        errors[label] = total / 60
    assert errors["uniform+at_least=2"] < errors["uniform"] / 10


# --- who comes and goes, and what is refused


def test_cohorts_that_size_themselves_keep_one_of_each() -> None:
    names = [str(k % 5) for k in range(20)]
    plan = make_plan(
        "uniform+at_least=1+budget=120+budget_rounds=30",
        Population.from_sizes([1] * 20, strata=names),
        "auto",
    )
    state = init_round(plan, np.zeros(2))
    for _ in range(6):
        cohort = open_round(plan, state)
        assert np.bincount(cohort.stratum_n, minlength=5).min() == 1
        state, _ = close_round(plan, state, cohort, np.ones((len(cohort.client_n), 2)))


def test_names_are_sorted_and_may_be_numbers() -> None:
    strata = Population.from_sizes([1] * 4, strata=[7, "b", np.int64(7), "a"]).strata
    assert strata is not None
    assert strata.names == ("7", "a", "b")
    assert strata.code_m.tolist() == [0, 2, 0, 1]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "b"], "2 names for 3 clients"),
        ("abc", "strata is 'abc'; give a list"),
        ([], "0 names"),
        (["a", "", "b"], "stratum of client 1 is ''"),
        (["a", " ", "b"], "client 1"),
        (["a", None, "b"], "client 1 is None"),
        (["a", 1.5, "b"], "client 1 is 1.5"),
        (["a", float("nan"), "b"], "client 1 is nan"),
        (["a", ("x",), "b"], "client 1"),
        ([1, "1", 2], "strata holds 1 and the text '1', which may be one name or two"),
        (["a", True, "True"], "True and the text 'True'"),
        (["a", "b", "a "], "the text 'a' and the text 'a '"),
    ],
)
def test_bad_names_are_one_sentence(names: Any, said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        Population.from_sizes([1, 2, 3], strata=names)


@pytest.mark.parametrize(
    ("label", "n", "said"),
    [
        ("uniform+at_least=2", 6, "stratum 'east' has 1 clients and at_least is 2"),
        ("uniform+at_least=1", 2, "more than the 2 clients of a cohort: ask 3 clients or more"),
        ("uniform+at_least=-1", 4, "at_least"),
        ("uniform+at_least=1.5", 4, "at_least is 1.5; it must be a whole number"),
        ("uniform+stages=1.5", 4, "stages is 1.5; it must be a whole number"),
        ("uniform+budget=9+budget_rounds=2.5", 4, "budget_rounds is 2.5; it must be a whole"),
        ("uniform+stages=4", 4, "stages is 4, with 3 strata"),
        ("uniform+stages=3", 2, "it must be at most 2"),
        ("uniform+stages=2+at_least=2", 4, "leave out one of them"),
        ("uniform+allocation=size", 4, "write 'neyman'"),
        ("oort+allocation=neyman", 4, "has no scores"),
        ("full+allocation=weight", 4, "asks everyone: leave out allocation = 'weight'"),
        ("uniform@poisson+at_least=1", 4, "poisson draws a random number.* write @systematic"),
        ("aocs+stages=1", 4, "poisson draws a random number.* aocs has no other"),
        ("full+stages=1", 4, "asks everyone"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(label: str, n: int, said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        plan_of(label, n)


@pytest.mark.parametrize("sizing", ["relative_error=1.0", "budget=6+budget_rounds=6"])
def test_two_stages_ask_a_client_of_each_stratum_whatever_sizes_cohorts(sizing: str) -> None:
    plan = plan_of(f"uniform+stages=2+{sizing}", 1)
    state = init_round(plan, np.zeros(1))
    cohort = open_round(plan, state)
    strata = plan.population.strata
    assert strata is not None
    assert len({*strata.code_m[cohort.client_n]}) == 2
    # Of one client of each of two strata, as with a fixed n.
    fixed = plan_of("uniform+stages=2", 2)
    drawn = open_round(fixed, init_round(fixed, np.zeros(1)))
    np.testing.assert_array_equal(cohort.expected_n, drawn.expected_n)


@pytest.mark.parametrize("setting", ["at_least=1", "stages=2", "allocation=weight"])
def test_without_strata_there_is_nothing_to_divide(setting: str) -> None:
    with pytest.raises(DeltaflError, match="needs a stratum for each client"):
        make_plan(f"uniform+{setting}", SIZES, 4)


def test_every_sampler_draws_in_strata() -> None:
    """Any sampler inside a stratum: with the settings of one stage and of two."""
    for label, setting in product(
        ["power-of-choice", "mifa", "client-reshuffling", "clustered-sampling-1", "osmd", "fedgs"],
        ["at_least=1", "stages=2"],
    ):
        plan = plan_of(f"{label}+{setting}")
        state = init_round(plan, np.zeros(3))
        cohort = open_round(plan, state, oracle=make_problem(SIZES).oracle)
        assert len({*cohort.stratum_n}) == (3 if setting == "at_least=1" else 2)


@dataclass(frozen=True)
class Coins(Sampler):
    """A user's sampler that throws a coin for each client."""

    unbiased: bool = True

    def open(self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None) -> Cohort:
        score_m = np.ones(len(available_m))
        return draw_cohort(score_m, n, "poisson", rng, available_m)


@pytest.mark.parametrize("options", [{"at_least": 1}, {"stages": 2}])
def test_a_sampler_of_random_size_keeps_no_number_of_each_stratum(options: dict[str, Any]) -> None:
    population = Population.from_sizes([3] * 8, strata=["a", "b"] * 4)
    plan = make_plan(Coins(), population, n=4, **options)
    state = init_round(plan, np.zeros(2))
    with pytest.raises(DeltaflError, match="Coins draws a random number of clients"):
        open_round(plan, state)
