"""The error of estimates for every n: formulas against every cohort."""

import numpy as np
import pytest

from deltafl import KnownUpdates, Population, close_round, init_round, make_plan, open_round
from deltafl.audit import estimate_error
from deltafl.audit.error_by_size import error_by_size
from deltafl.designs.covariance import covariance
from deltafl.designs.exact import support
from deltafl.designs.inclusion import inclusion_probabilities as first_order
from deltafl.designs.table import systematic

UPDATES = np.random.default_rng(3).normal(1.0, 2.0, (6, 4)).astype(np.float32)
SIZES = [5, 10, 10, 20, 25, 30]


@pytest.mark.parametrize(
    ("label", "exact"),
    [
        ("uniform", True),
        ("uniform@pivotal", True),
        ("uniform@poisson", True),
        ("fedis@poisson", True),
        ("fedis@multinomial", True),
        ("innovation@poisson", True),
        ("full", True),
    ],
)
def test_a_formula_gives_what_all_cohorts_give(label: str, exact: bool) -> None:
    plan = make_plan(label, SIZES, n=2)
    known = KnownUpdates(UPDATES, plan.population.weight_m)
    state = init_round(plan, np.zeros(4))
    for found in error_by_size(plan, state, known, UPDATES, [1, 2, 4]):
        sized = make_plan(label, SIZES, n=found.n)
        every = estimate_error(sized, state, known, UPDATES, draws=1)
        assert found.exact is exact
        assert every.exact or label == "full"
        assert found.mse == pytest.approx(every.mse, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("design", ["systematic", "pivotal", "simple-random", "cube"])
def test_equal_expectations_have_the_covariance_of_simple_random_sampling(design: str) -> None:
    expected_m = np.full(5, 0.4)
    cohorts = support(design, expected_m)
    count_km = np.array(list(cohorts), float)
    chance_k = np.array(list(cohorts.values()))
    centred_km = count_km - expected_m
    every_mm = np.einsum("k,ki,kj->ij", chance_k, centred_km, centred_km)
    found_mm = covariance(design, expected_m)
    assert found_mm is not None
    np.testing.assert_allclose(found_mm, every_mm, atol=1e-12)


def test_systematic_draws_of_unequal_chances_vary_as_all_cohorts_say() -> None:
    rng = np.random.default_rng(8)
    for m, n in [(4, 2), (5, 2), (6, 3), (6, 4), (7, 3)]:
        # One is certain, and one is never drawn.
        expected_m = first_order(rng.uniform(0.1, 1, m) * ([9] + [1] * (m - 2) + [0]), n)
        assert expected_m[0] == 1
        assert expected_m[-1] == 0
        cohorts = support("systematic", expected_m)
        centred_km = np.array(list(cohorts), float) - expected_m
        every_mm = (centred_km.T * list(cohorts.values())) @ centred_km
        found_mm = covariance("systematic", expected_m)
        assert found_mm is not None
        np.testing.assert_allclose(found_mm, every_mm, atol=1e-12)


def test_pairs_of_many_strata_are_as_frequent_as_they_are_drawn() -> None:
    expected_m = first_order(np.random.default_rng(5).uniform(0.1, 1, 14), 2)
    found_mm = covariance("systematic", expected_m)
    assert found_mm is not None
    np.testing.assert_allclose(found_mm.sum(axis=0), 0, atol=1e-12)  # two are drawn, always
    rng = np.random.default_rng(6)
    draws = 20_000
    count_rm = np.zeros((draws, 14))
    for row_m in count_rm:
        row_m[systematic(expected_m, rng)] = 1
    off_mm = np.cov(count_rm.T, bias=True) - found_mm
    # Counts of 0 and 1: no product of two varies by more than a half.
    assert np.abs(off_mm).max() < 5 * 0.5 / np.sqrt(draws)
    assert covariance("systematic", first_order(np.arange(1.0, 19.0), 2)) is None
    assert covariance("systematic", np.array([0.3, 0.4, 0.5])) is None


def test_two_stages_of_many_unequal_strata_have_an_exact_error() -> None:
    """Beside drawn cohorts."""
    rng = np.random.default_rng(2)
    population = Population.from_sizes(rng.integers(1, 30, 22), strata=[*range(11)] * 2)
    updates = rng.normal(1.0, 2.0, (22, 3)).astype(np.float32)
    known = KnownUpdates(updates, population.weight_m)
    plan = make_plan("md-fixed@systematic+stages=2", population, n=4)
    state = init_round(plan, np.zeros(3))
    (found,) = error_by_size(plan, state, known, updates, [4])
    assert found.exact
    drawn = estimate_error(plan, state, known, updates, draws=4000)
    assert found.mse == pytest.approx(drawn.mse, rel=0.05)


def test_there_is_no_formula_where_pairs_differ() -> None:
    assert covariance("ordered-pivotal", np.full(5, 0.4)) is None
    assert covariance("successive", np.full(5, 0.4)) is None
    assert covariance("pivotal", np.array([0.2, 0.4, 0.6, 0.8])) is None
    # More clients than can be enumerated, of unequal probabilities: cohorts are drawn.
    plan = make_plan("md@pivotal", [5, 10, 10, 20, 25, 30, 40, 50], n=3)
    updates = np.random.default_rng(3).normal(1.0, 2.0, (8, 4)).astype(np.float32)
    known = KnownUpdates(updates, plan.population.weight_m)
    (found,) = error_by_size(plan, init_round(plan, np.zeros(4)), known, updates, [3])
    assert not found.exact


def test_strata_have_the_error_of_their_own_draws() -> None:
    population = Population.from_sizes(SIZES, strata=["a", "a", "a", "b", "b", "b"])
    updates = np.repeat(UPDATES[[0, 5]], 3, axis=0)
    known = KnownUpdates(updates, population.weight_m)
    errors = {}
    for label in ("md-fixed", "md-fixed+at_least=1"):
        plan = make_plan(label, population, n=2)
        (found,) = error_by_size(plan, init_round(plan, np.zeros(4)), known, updates, [2])
        assert found.exact
        errors[label] = found.mse
    # Within a stratum all updates are equal, and one of each is drawn by weight.
    assert errors["md-fixed+at_least=1"] < 1e-12 < errors["md-fixed"]


@pytest.mark.parametrize("setting", ["at_least=1", "at_least=1+allocation=weight", "stages=2"])
@pytest.mark.parametrize("sampler", ["uniform", "md-fixed", "md@multinomial", "innovation"])
def test_the_covariance_in_strata_is_that_over_all_cohorts(sampler: str, setting: str) -> None:
    """By formula and parts, without ever having drawn a whole cohort, and by enumeration."""
    label = f"{sampler}+{setting}"
    # Three strata of unequal size and weight; none is in one piece.
    population = Population.from_sizes(SIZES, strata=["a", "b", "a", "c", "b", "a"])
    known = KnownUpdates(UPDATES, population.weight_m)
    plan = make_plan(label, population, n=4)
    state = init_round(plan, np.zeros(4))
    for _ in range(3):
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, UPDATES[cohort.client_n])
    for found in error_by_size(plan, state, known, UPDATES, [3, 4]):
        sized = make_plan(label, population, n=found.n)
        every = estimate_error(sized, state, known, UPDATES, draws=1)
        assert every.exact
        assert found.exact
        assert found.mse == pytest.approx(every.mse, rel=1e-6, abs=1e-12)


def test_two_stages_of_many_clients_are_exact_and_what_draws_give() -> None:
    rng = np.random.default_rng(0)
    code_m = np.arange(40) % 5
    population = Population.from_sizes(rng.integers(1, 9, 40), strata=code_m.tolist())
    updates = (rng.normal(size=(5, 3))[code_m] + rng.normal(size=(40, 3))).astype(np.float32)
    known = KnownUpdates(updates, population.weight_m)
    plan = make_plan("uniform+stages=3", population, n=12)
    state = init_round(plan, np.zeros(3))
    (found,) = error_by_size(plan, state, known, updates, [12])
    assert found.exact
    drawn = estimate_error(plan, state, known, updates, draws=300)
    assert not drawn.exact
    assert found.mse == pytest.approx(drawn.mse, rel=0.3)
