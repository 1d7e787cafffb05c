"""Optimal client sampling by hand, by an optimiser, by enumeration; and all unbiased rivals together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from conftest import Problem, make_problem
from deltafl import FedIS, KnownUpdates, Plan, Population, close_round, init_round
from deltafl import make_sampler as make
from deltafl.samplers.ocs import ApproximateOCS, rescaled_probabilities
from deltafl.streams import stream
from deltafl.types import FloatArray
from tools.samplers import SIX, counts, known, mean_counts, norms

# --- optimal client sampling ------------------------------------------------------------------------------------------


def test_ocs_is_fedis_with_independent_draws() -> None:
    assert make("ocs") == make("fedis@poisson") == FedIS("poisson", 0.0)


def test_ocs_by_the_papers_closed_form() -> None:
    """Norms 1, 2, 3, 10 and n = 2: l = 3 is the largest that works, p = (n - m + l) s / (1 + 2 + 3) below it, and 1."""
    population, oracle = known(1, 2, 3, 10)
    expected_m = mean_counts(make("ocs"), make("ocs").init(population), 2, 4, oracle)
    np.testing.assert_allclose(expected_m, [1 / 6, 2 / 6, 3 / 6, 1])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ocs_has_the_least_variance_of_all_independent_draws(n: int) -> None:
    """Against a general optimiser of sum (1 / p - 1) s^2 over sum p <= n, p <= 1."""
    norm_m = np.array([1.0, 1.5, 2.0, 4.0, 9.0])
    population, oracle = known(*norm_m)
    expected_m = mean_counts(make("ocs"), make("ocs").init(population), n, 5, oracle)

    def variance(p_m: FloatArray) -> float:
        return float(np.sum((1 / p_m - 1) * norm_m**2))

    found = minimize(
        variance,
        np.full(5, n / 5),
        bounds=[(1e-6, 1)] * 5,
        constraints={"type": "ineq", "fun": lambda p_m: n - p_m.sum()},
        method="SLSQP",
        options={"ftol": 1e-10, "maxiter": 500},
    )
    np.testing.assert_allclose(expected_m, found.x, atol=2e-4)
    assert variance(expected_m) <= found.fun * (1 + 1e-6)


@pytest.mark.parametrize(
    ("score", "rescalings", "expected"),
    [
        ([1, 2, 3, 14], 0, [0.15, 0.3, 0.45, 1]),
        ([1, 2, 3, 14], 1, [1 / 3, 2 / 3, 1, 1]),  # C = (3 - 4 + 3) / 0.9 caps the third; then C = 1 ends it
        ([1, 2, 3, 14], 9, [1 / 3, 2 / 3, 1, 1]),
        ([1, 2, 7, 30], 0, [0.075, 0.15, 0.525, 1]),
        ([1, 2, 7, 30], 1, [0.2, 0.4, 1, 1]),  # C = 2 / 0.75
        ([1, 2, 7, 30], 2, [1 / 3, 2 / 3, 1, 1]),  # C = 1 / 0.6
        ([0, 0, 0, 0], 4, [0.75] * 4),
        ([0, 0, 1, 2], 4, [0, 0, 1, 1]),
    ],
)
def test_approximate_ocs_by_hand(score: list[float], rescalings: int, expected: list[float]) -> None:
    """n = 3: p = min(1, 3 s / sum), then p <- min(1, C p) for those below 1."""
    np.testing.assert_allclose(rescaled_probabilities(np.array(score, dtype=np.float64), 3, rescalings), expected)


@given(arrays(np.float64, 8, elements=st.floats(0.01, 100)), st.integers(1, 8))
def test_approximate_ocs_ends_at_the_optimum(score_m: FloatArray, n: int) -> None:
    oracle = KnownUpdates(np.diag(score_m), np.full(8, 1 / 8))
    exact = FedIS("poisson", 0.0)
    state = exact.init(Population.from_sizes([1] * 8))
    expected_m = np.ones(8)
    cohort = exact.open(state, np.ones(8, dtype=bool), n, _Everybody(), oracle)
    expected_m[cohort.client_n] = cohort.expected_n
    np.testing.assert_allclose(rescaled_probabilities(score_m, n, 8), expected_m, rtol=1e-5)
    for rescalings in (0, 1, 4):
        less_m = rescaled_probabilities(score_m, n, rescalings)
        assert less_m.sum() <= n + 1e-9
        assert np.all((less_m > 0) & (less_m <= 1))


class _Everybody(np.random.Generator):
    """Draws of 0: independent draws ask everybody, and so tell all expectations."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def random(self, size: int) -> FloatArray:  # type: ignore[override]
        return np.zeros(size)


def test_approximate_ocs_is_weighed_with_what_it_used() -> None:
    """Its probabilities sum to less than n, and E[count] is exactly what the cohorts say (see ``mean_counts``)."""
    population, oracle = known(1, 2, 3, 14)
    sampler = ApproximateOCS(0)
    expected_m = mean_counts(sampler, sampler.init(population), 3, 4, oracle)
    np.testing.assert_allclose(expected_m, [0.15, 0.3, 0.45, 1])


# --- settings, and all of them together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ocs", "aocs", "clustered-sampling-1", "clustered-sampling-2", "osmd", "k-vib", "vrb"]
)
def test_the_estimate_is_exactly_unbiased_after_rounds_of_its_own(name: str) -> None:
    """E[D] = ubar by enumeration, in a state that the sampler reached itself."""
    problem: Problem = make_problem([3, 5, 8, 13, 21], d=3, seed=2)
    plan = Plan(problem.population, make(name), 2, seed=4)
    state = init_round(plan, np.zeros(3))
    everyone = np.ones(5, dtype=np.bool_)
    for round in range(6):
        cohort = plan.sampler.open(state.sampler, everyone, 2, stream(4, "draw", round), problem.oracle)
        state, _ = close_round(plan, state, cohort, (1 + round) * problem.update_md[cohort.client_n])
    mean_d = np.zeros(3)
    for probability, _, cohort in counts(plan.sampler, state.sampler, 2, 5, problem.oracle):
        coef_n = plan.collect_replies(state, cohort).coef_n
        mean_d += probability * (coef_n @ problem.update_md[cohort.client_n].astype(np.float64))
    np.testing.assert_allclose(mean_d, problem.ubar_d, rtol=1e-9)


@pytest.mark.parametrize("name", ["clustered-sampling-2", "osmd", "k-vib"])
def test_states_keep_their_shapes_and_types(name: str) -> None:
    """What a checkpoint needs: a state many rounds old fits into the first one."""
    sampler = make(name)
    first = sampler.init(SIX)
    state = first
    for round in range(9):
        cohort = sampler.open(state, np.ones(6, dtype=bool), 3, stream(0, "draw", round))
        n = len(cohort.client_n)
        reports = norms(*([1.0 + round] * n))._replace(sketch_nq=np.ones((n, sampler.sketch_size)))
        state = sampler.update(state, cohort, reports)
    for before, after in zip(first, state, strict=True):
        assert (np.shape(before), before.dtype) == (np.shape(after), after.dtype)
