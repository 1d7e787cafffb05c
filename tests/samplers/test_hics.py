"""HiCS-FL against its paper's equations (7), (9) and (10), and the column of reports that it
needs.
"""

from math import exp, log

import numpy as np
import pytest

from conftest import assert_frequencies, frequencies, make_problem
from deltafl import DeltaflError, Plan, close_round, init_round, open_round
from deltafl.samplers.base import NewFirstState
from deltafl.samplers.hics import HicsFL, entropies
from deltafl.samplers.ward import ward
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import plan_of, task_of


def test_entropies_by_hand() -> None:
    """Even: ln C. Softmax of (ln 3, 0) T / T is (3/4, 1/4). One class far ahead: 0, without
    overflow.
    """
    bias_kc = np.array([[0.2, 0.2], [log(3) * 0.01, 0.0], [1e6, 0.0]])
    expected_k = np.array([log(2), -(0.75 * log(0.75) + 0.25 * log(0.25)), 0.0])
    np.testing.assert_allclose(entropies(bias_kc, 0.01), expected_k, atol=1e-12)


#: Two balanced clients and three of one class, T = 1: entropies ln 2 and H(e / (e + 1)).
BIASES = [[0.1, 0.1], [2.0, 2.0], [0.0, 1.0], [1.0, 2.0], [3.0, 4.0]]
WEIGHTS = [0.1, 0.3, 0.1, 0.2, 0.3]


def seen(
    bias: list[list[float]], rounds: int = 0, weight: list[float] | None = None
) -> NewFirstState:
    """Clients that have all replied."""
    m = len(bias)
    everyone_m = np.ones(m, dtype=np.bool_)
    weight_m = np.array(weight or [1 / m] * m)
    return NewFirstState(weight_m, everyone_m, everyone_m, np.array(bias), np.array(rounds))


def test_hics_probabilities_by_hand() -> None:
    """Groups {0, 1} and {2, 3, 4}, for lambda = 100; exp(gamma H) over their sum, then by weight
    inside the group.
    """
    sampler = HicsFL(classes=2, temperature=1.0, entropy_weight=100.0, gamma=4.0, rounds=10)
    most = exp(1) / (1 + exp(1))
    entropy = -(most * log(most) + (1 - most) * log(1 - most))
    for rounds, left in ((0, 0.9), (5, 0.4), (9, 0.0), (30, 0.0)):
        first = exp(4 * left * log(2)) / (exp(4 * left * log(2)) + exp(4 * left * entropy))
        expected_m = np.array(
            [first / 4, first * 3 / 4, *((1 - first) * share / 6 for share in (1, 2, 3))]
        )
        state = seen(BIASES, rounds=rounds, weight=WEIGHTS)
        np.testing.assert_allclose(
            sampler.probabilities(state, np.arange(5), 2), expected_m, rtol=1e-12
        )


def test_hics_draws_groups_and_clients_until_there_are_enough() -> None:
    """The printed loop draws until two are distinct: i is the first, or follows j with p_i / (1
    - p_j).
    """
    sampler = HicsFL(classes=2, temperature=1.0, entropy_weight=100.0, rounds=10)
    state = seen(BIASES, rounds=3, weight=WEIGHTS)
    p_m = sampler.probabilities(state, np.arange(5), 2)
    expected_m = [
        p + sum(q * p / (1 - q) for j, q in enumerate(p_m) if j != i) for i, p in enumerate(p_m)
    ]
    assert_frequencies(frequencies(sampler, state, 5, 2, 800), np.array(expected_m), 800)


def test_groups_of_weight_zero_and_of_one_client() -> None:
    state = seen(BIASES, weight=[0.0, 0.0, 0.2, 0.3, 0.5])
    p_m = HicsFL(2, 1.0, 100.0).probabilities(state, np.arange(5), 2)
    assert p_m[0] == p_m[1] > 0
    assert p_m.sum() == pytest.approx(1)
    assert ward(np.zeros((1, 1)), 1).tolist() == [0]


def test_the_last_entries_of_updates_are_remembered() -> None:
    """Of the updates themselves, not of what the control leaves; nothing of those who did not
    reply.
    """
    problem = make_problem([1, 1, 1, 1], d=6)
    plan = Plan(problem.population, HicsFL(classes=2), 3, "fedvarp", seed=2)
    state = init_round(plan, np.zeros(6))
    for _ in range(3):
        before = state.sampler.last_mq
        cohort = open_round(plan, state)
        updates = [None if k == 1 else problem.update_md[i] for k, i in enumerate(cohort.client_n)]
        state, _ = close_round(plan, state, cohort, updates)
        here = cohort.client_n[[0, 2]]
        np.testing.assert_array_equal(
            state.sampler.last_mq[here], problem.update_md[here, -2:].astype(np.float64)
        )
        others = np.setdiff1d(np.arange(4), here)
        np.testing.assert_array_equal(state.sampler.last_mq[others], before[others])


def test_a_model_without_so_many_parameters_is_refused() -> None:
    problem = make_problem([1, 1, 1], d=3)
    plan = Plan(problem.population, HicsFL(classes=10), 2, "plain-mean")
    state = init_round(plan, np.zeros(3))
    with pytest.raises(DeltaflError, match="last 10 parameters of a model of 3; lower its number"):
        open_round(plan, state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sampler": "hics-fl(classes=5)"},
            "output layer of 5 classes, but the last parameters of the model",
        ),
        ({"sampler": "hics-fl", "task": "synthetic"}, "looks at labels, but classes is 0"),
    ],
)
def test_tasks_without_a_fitting_output_layer_are_refused(
    given: dict[str, object], message: str
) -> None:
    settings = make_settings(RunSettings, {"clients": 6, "sample": 2, **given})
    task = task_of(settings)
    with pytest.raises(DeltaflError, match=message):
        plan_of(settings, task.population("data"), task)
