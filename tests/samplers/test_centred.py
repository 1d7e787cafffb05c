"""delta-centred and innovation: scores by hand, and what a memory is worth where clients stand
still.
"""

import numpy as np
import pytest

from deltafl import (
    Centred,
    Cohort,
    Plan,
    Population,
    Reports,
    close_round,
    inclusion_probabilities,
    init_round,
    make_sampler,
    open_round,
)
from tools.samplers import cohort_of, mean_counts

POPULATION = Population.from_sizes([1, 2, 3, 4])


def report(residual: list[float]) -> Reports:
    return Reports.make(len(residual))._replace(squared_residual_n=np.array(residual))


def cohort(*clients: int) -> Cohort:
    return cohort_of(list(clients), [1] * len(clients), [0.5] * len(clients), "fixed-size")


def test_delta_centred_by_hand() -> None:
    """a^2 = (16, 4 then the mean of 4 and 12, unseen, unseen); forgetting a half; shrunk by a
    fifth; no floor.
    """
    sampler = Centred(floor=0.0)
    state = sampler.update(sampler.init(POPULATION), cohort(0, 1), report([16.0, 4.0]))
    state = sampler.update(state, cohort(1), report([12.0]))
    square_m = np.array([16.0, 8.0])
    residual_m = np.sqrt(0.8 * square_m + 0.2 * 12)
    unseen = np.sqrt(square_m.mean())  # as if they were like those seen
    score_m = POPULATION.weight_m * np.array([*residual_m, unseen, unseen])
    np.testing.assert_allclose(mean_counts(sampler, state, 2, 4), 2 * score_m / score_m.sum())


@pytest.mark.parametrize("ageing", [0.0, 1.0, 3.0])
def test_innovation_by_hand(ageing: float) -> None:
    """Client 0 was seen twice, client 1 once, 2 and 3 never; n / m = 1/2 at both visits."""
    sampler = Centred(own_memory=True, ageing=ageing, floor=0.0, shrink=0.0)
    state = sampler.update(sampler.init(POPULATION), cohort(0, 1), report([16.0, 4.0]))
    state = sampler.update(state, cohort(0, 2), report([3.0, 10.0]))
    one, two = ((1 + ageing * rounds * 0.5) / (1 + ageing) for rounds in (1, 2))
    again = 3.0 / one
    first = (16 + 4 + 10) / 3
    remaining = (again + 5 * first / 2) / (16 + 5 * first)
    square_m = np.array([again * one, 4 * remaining * two, 10 * remaining * one, first])
    score_m = POPULATION.weight_m * np.sqrt(square_m)
    np.testing.assert_allclose(
        mean_counts(sampler, state, 2, 4), inclusion_probabilities(score_m, 2)
    )


def test_clients_that_stand_still_are_estimated_exactly_once_all_were_seen() -> None:
    """u_i does not change: after everybody's first visit innovation has no error at all;
    importance sampling has.
    """
    rng = np.random.default_rng(0)
    m = 12
    d = 30
    population = Population.from_sizes(np.full(m, 7))
    update_md = rng.standard_normal((m, d)).astype(np.float32) * rng.exponential(
        size=(m, 1)
    ).astype(np.float32)
    ubar_d = population.weight_m @ update_md.astype(np.float64)
    plan = Plan(population, make_sampler("innovation"), 3, estimator="innovation")
    state = init_round(plan, np.zeros(d))
    seen: set[int] = set()
    while len(seen) < m:
        drawn = open_round(plan, state)
        state, info = close_round(plan, state, drawn, update_md[drawn.client_n])
        seen |= set(drawn.client_n.tolist())
    assert state.round <= 8, (
        "clients never seen are selected early: blind draws need 12 rounds on average"
    )
    drawn = open_round(plan, state)
    after, info = close_round(plan, state, drawn, update_md[drawn.client_n])
    np.testing.assert_allclose(after.params_d - state.params_d, ubar_d, atol=1e-5)
    assert info.variance < 1e-10


@pytest.mark.parametrize("shrink", [0.2, 1.0])
def test_who_repeated_an_update_is_still_drawn_while_others_are_unseen(shrink: float) -> None:
    """All residuals of second visits were 0; without a floor shrinkage keeps every inclusion
    probability above 0.
    """
    sampler = Centred(own_memory=True, floor=0.0, shrink=shrink, forgetting=1.0)
    assert sampler.unbiased
    state = sampler.init(POPULATION)
    for residual in (1.0, 0.0):
        state = sampler.update(state, cohort(0), report([residual]))
    assert np.all(mean_counts(sampler, state, 2, 4) > 0)
