"""Optimal client sampling by hand and by an optimiser."""

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, minimize

from deltafl import FedIS
from deltafl import make_sampler as make
from deltafl.samplers.ocs import ApproximateOCS, rescaled_probabilities
from tools.samplers import known, mean_counts


def test_ocs_is_fedis_with_independent_draws() -> None:
    assert make("ocs") == make("fedis@poisson") == FedIS("poisson", 0.0)


def test_ocs_by_the_papers_closed_form() -> None:
    """Norms 1, 2, 3, 10 and n = 2: l = 3 is the largest that works, p = (n - m + l) s / (1 + 2 +
    3) below it, and 1.
    """
    population, oracle = known(1, 2, 3, 10)
    expected_m = mean_counts(make("ocs"), make("ocs").init(population), 2, 4, oracle)
    np.testing.assert_allclose(expected_m, [1 / 6, 2 / 6, 3 / 6, 1])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ocs_has_the_least_variance_of_all_independent_draws(n: int) -> None:
    """Against a general optimiser of sum (1 / p - 1) s^2 over sum p <= n, p <= 1."""
    norm_m = np.array([1.0, 1.5, 2.0, 4.0, 9.0])
    population, oracle = known(*norm_m)
    expected_m = mean_counts(make("ocs"), make("ocs").init(population), n, 5, oracle)
    found = minimize(
        lambda p_m: np.sum((1 / p_m - 1) * norm_m**2),
        np.full(5, n / 5),
        method="SLSQP",
        bounds=[(1e-6, 1)] * 5,
        constraints=LinearConstraint(np.ones(5), ub=n),
        options={"ftol": 1e-10, "maxiter": 500},
    )
    np.testing.assert_allclose(expected_m, found.x, atol=2e-4)
    assert np.sum((1 / expected_m - 1) * norm_m**2) <= found.fun * (1 + 1e-6)


@pytest.mark.parametrize(
    ("score", "rescalings", "expected"),
    [
        ([1, 2, 3, 14], 0, [0.15, 0.3, 0.45, 1]),
        (
            [1, 2, 3, 14],
            1,
            [1 / 3, 2 / 3, 1, 1],
        ),  # C = (3 - 4 + 3) / 0.9 caps the third; then C = 1 ends it
        ([1, 2, 3, 14], 9, [1 / 3, 2 / 3, 1, 1]),
        ([1, 2, 7, 30], 0, [0.075, 0.15, 0.525, 1]),
        ([1, 2, 7, 30], 1, [0.2, 0.4, 1, 1]),  # C = 2 / 0.75
        ([1, 2, 7, 30], 2, [1 / 3, 2 / 3, 1, 1]),  # C = 1 / 0.6
        ([0, 0, 0, 0], 4, [0.75] * 4),
        ([0, 0, 1, 2], 4, [0, 0, 1, 1]),
    ],
)
def test_approximate_ocs_by_hand(
    score: list[float], rescalings: int, expected: list[float]
) -> None:
    """n = 3: p = min(1, 3 s / sum), then p <- min(1, C p) for those below 1."""
    np.testing.assert_allclose(
        rescaled_probabilities(np.array(score, dtype=np.float64), 3, rescalings), expected
    )


def test_approximate_ocs_is_weighed_with_what_it_used() -> None:
    """Its probabilities sum to less than n, and E[count] is exactly what the cohorts say (see
    ``mean_counts``).
    """
    population, oracle = known(1, 2, 3, 14)
    sampler = ApproximateOCS(0)
    expected_m = mean_counts(sampler, sampler.init(population), 3, 4, oracle)
    np.testing.assert_allclose(expected_m, [0.15, 0.3, 0.45, 1])
