"""The error of estimates for every n: formulas against every cohort."""

import numpy as np
import pytest

from deltafl import KnownUpdates, Population, init_round, make_plan
from deltafl.audit import estimate_error
from deltafl.audit.error_by_size import covariance, error_by_size
from deltafl.designs.exact import support

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
    """Several draws in a round have no formula here: all cohorts are enumerated."""
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
