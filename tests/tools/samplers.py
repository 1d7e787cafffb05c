"""What the tests of samplers share: expectations of a sampler's own code, small cohorts."""

import numpy as np

from deltafl import Cohort, KnownUpdates, Population, Reports, Sampler
from deltafl.designs.exact import every_cohort, support
from deltafl.samplers.base import State
from deltafl.types import FloatArray

FOUR = Population.from_sizes([1, 1, 1, 2])
SIX = Population.from_sizes([6, 10, 14, 20, 20, 30])


def counts(
    sampler: Sampler, state: State, n: int, m: int, oracle: KnownUpdates | None = None
) -> list[tuple[float, FloatArray, Cohort]]:
    """Every cohort of the sampler's own code: probability, counts (m,), cohort."""
    rows = []
    for probability, cohort in every_cohort(
        lambda rng: sampler.open(state, np.ones(m, dtype=np.bool_), n, rng, oracle)
    ):
        count_m = np.zeros(m)
        count_m[cohort.client_n] = cohort.count_n
        rows.append((probability, count_m, cohort))
    return rows


def mean_counts(
    sampler: Sampler, state: State, n: int, m: int, oracle: KnownUpdates | None = None
) -> FloatArray:
    """E[count], (m,), checked to be what every cohort says of its clients."""
    rows = counts(sampler, state, n, m, oracle)
    mean_m = np.asarray(sum(probability * count_m for probability, count_m, _ in rows))
    for probability, _, cohort in rows:
        if probability > 0:
            np.testing.assert_allclose(cohort.expected_n, mean_m[cohort.client_n], rtol=1e-9)
    return mean_m


def norms(*norm: float, responded: list[bool] | None = None) -> Reports:
    made = Reports.make(len(norm), responded=responded)
    return made._replace(squared_norm_n=np.square(norm))


def cohort_of(
    clients: list[int], count: list[int], expected: list[float], kind: str = "replacement"
) -> Cohort:
    return Cohort(np.array(clients), np.array(count), np.array(expected), kind)


def known(*norm: float) -> tuple[Population, KnownUpdates]:
    """Clients of equal weight with updates of the given norms."""
    population = Population.from_sizes([1] * len(norm))
    return population, KnownUpdates(np.diag(norm), population.weight_m)


def joint_expectations(
    design: str, expected_m: FloatArray, value_mq: FloatArray | None = None
) -> FloatArray:
    """E[count_i count_j], float64 (m, m), by enumeration; the diagonal is E[count_i^2]."""
    joint_mm = np.zeros((len(expected_m), len(expected_m)))
    for count_m, probability in support(design, expected_m, value_mq).items():
        joint_mm += probability * np.outer(count_m, count_m)
    return joint_mm
