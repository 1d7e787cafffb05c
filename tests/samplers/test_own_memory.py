"""Rivals that remember one update a client: MIFA, FedVARP and FedStale, against their papers'
formulas.
"""

import numpy as np
import pytest

from conftest import Recorder, make_problem
from deltafl import ESTIMATORS, Plan, Population, close_round, init_round, make_sampler, open_round
from deltafl.estimators.table import find_estimator
from deltafl.samplers import parse_label
from deltafl.samplers.base import NewFirst


def test_mifas_first_steps_are_as_short_as_it_says() -> None:
    """n / m, 2 n / m, ... of a whole step if all updates are equal."""
    plan = Plan(Population.from_sizes([1] * 6), NewFirst(), 2, "mifa", (Recorder(),))
    state = init_round(plan, np.zeros(1))
    steps = []
    for _ in range(5):
        state, _ = close_round(plan, state, open_round(plan, state), np.ones((2, 1)))
        steps.append(state.parts["server_optimizer"].delta_d[0])
    assert steps == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


#: Data of 1, 2, 3, 4 and 15 examples: the clients' weights, and the probabilities of two draws by
#: weight, capped at 1.
SIZES = [1, 2, 3, 4, 15]
WEIGHT_M = np.array([0.04, 0.08, 0.12, 0.16, 0.6])
BY_WEIGHT_M = [0.1, 0.2, 0.3, 0.4, 1]


@pytest.mark.parametrize(
    ("label", "beta", "pi_m"),
    [
        ("fedvarp", 1.0, [0.4] * 5),
        ("fedstale", 0.5, [0.4] * 5),
        ("md-fixed@@difference-own", 1.0, BY_WEIGHT_M),
        ("md-fixed@@fedstale(beta=0.2)", 0.2, BY_WEIGHT_M),
    ],
)
def test_fedvarp_and_fedstale_with_unequal_weights_by_hand(
    label: str, beta: float, pi_m: list[float]
) -> None:
    """sum_S (w_i / pi_i) (u_i - beta y_i) + beta sum_j w_j y_j; beta = 1 is FedVARP."""
    plan = Plan(
        Population.from_sizes(SIZES),
        make_sampler(label),
        2,
        parse_label(label).estimator,
        (Recorder(),),
        seed=4,
    )
    state = init_round(plan, np.zeros(3))
    last_md = np.zeros((5, 3))
    asked = set[int]()
    for seed in range(6):
        problem = make_problem(SIZES, seed=seed)
        cohort = open_round(plan, state)
        expected_d = sum(beta * WEIGHT_M[j] * last_md[j] for j in range(5))
        for i in cohort.client_n:
            expected_d += (
                WEIGHT_M[i]
                / pi_m[i]
                * (problem.update_md[i].astype(np.float64) - beta * last_md[i])
            )
        state, _ = close_round(plan, state, cohort, problem.update_md[cohort.client_n])
        np.testing.assert_allclose(state.parts["server_optimizer"].delta_d, expected_d, rtol=1e-12)
        last_md[cohort.client_n] = problem.update_md[cohort.client_n]
        asked |= set(cohort.client_n.tolist())
    assert len(asked) >= 3  # the memory holds more than one cohort


def test_mifa_is_the_average_of_latest_updates() -> None:
    """The loop of the paper: the weighted sum of everybody's newest update, 0 for clients that
    were never selected.
    """
    plan = Plan(Population.from_sizes(SIZES), NewFirst(), 2, "mifa", (Recorder(),), seed=1)
    state = init_round(plan, np.zeros(3))
    newest_md = np.zeros((5, 3))
    for seed in range(5):
        problem = make_problem(SIZES, seed=seed)
        cohort = open_round(plan, state)
        newest_md[cohort.client_n] = problem.update_md[cohort.client_n]
        state, _ = close_round(plan, state, cohort, problem.update_md[cohort.client_n])
        expected_d = sum(WEIGHT_M[j] * newest_md[j] for j in range(5))
        np.testing.assert_allclose(state.parts["server_optimizer"].delta_d, expected_d, rtol=1e-12)
    assert newest_md.all()
    assert find_estimator("mifa") is ESTIMATORS["fedvarp"]
