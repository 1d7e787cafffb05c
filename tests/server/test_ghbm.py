"""Generalized heavy-ball momentum: against the paper's program, its relatives, its expectation."""

from collections import deque

import numpy as np
import pytest

from conftest import Recorder, make_problem, mean_estimate, play
from deltafl import (
    DeltaflError,
    Full,
    Plan,
    Population,
    RoundState,
    broadcast,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.server.table import make_parts

SIZES = [10, 15, 20, 25, 30]
CENTRES = [-1.0, 2.0, 4.0]
POPULATION = Population.from_sizes([1, 2, 5])
LR = 0.1
STEPS = 3


def heavy_ball(beta: float, tau: int, rounds: int) -> list[float]:
    """The authors' program with everybody asked, on F_i(x) = (x - centre)^2 / 2: the server keeps
    a queue of models, the clients add beta m / (lr K) to each gradient.
    """
    x = 5.0
    queue = deque[float](maxlen=tau)
    momentum = 0.0
    path = []
    for _ in range(rounds):
        ends = []
        for centre in CENTRES:
            local = x
            for _ in range(STEPS):
                local -= LR * ((local - centre) + beta / (LR * STEPS) * momentum)
            ends.append(local)
        queue.append(x)
        x = float(POPULATION.weight_m @ np.array(ends))
        if len(queue) == tau:
            momentum = (queue[0] - x) / tau
        path.append(x)
    return path


def played(settings: dict[str, float], lr: float, rounds: int) -> list[float]:
    """The same by the library, with clients as a host trains them."""
    plan = Plan(POPULATION, Full(), 3, parts=make_parts(settings))
    state = init_round(plan, np.array([5.0]))
    path = []
    for _ in range(rounds):
        sent = broadcast(plan, state)
        assert sent.drift_d is not None
        updates = []
        for centre in CENTRES:
            x = float(sent.params_d[0])
            for _ in range(STEPS):
                x += -plan.step_factor * lr * (x - centre) + float(sent.drift_d[0]) / STEPS
            updates.append(np.array([x - sent.params_d[0]]))
        state, _ = close_round(plan, state, open_round(plan, state), updates)
        path.append(float(state.params_d[0]))
    return path


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_it_is_the_authors_program(tau: int) -> None:
    path = played({"ghbm": 0.8, "ghbm_tau": tau}, LR, 14)
    np.testing.assert_allclose(path, heavy_ball(0.8, tau, 14), rtol=1e-5, atol=1e-5)
    without = played({"ghbm": 0.8, "ghbm_tau": 15}, LR, 14)
    np.testing.assert_array_equal(path[:tau], without[:tau])
    assert abs(path[tau] - without[tau]) > 0.01


def test_with_a_tau_of_1_it_is_fedcm_at_a_larger_rate() -> None:
    """FedCM's gradient steps are 1 - beta times as long."""
    path = played({"ghbm": 0.8, "ghbm_tau": 1}, LR, 12)
    np.testing.assert_allclose(path, played({"mime": 0.8}, LR / (1 - 0.8), 12), rtol=1e-4)


def test_the_momentum_by_hand() -> None:
    """Steps 1, 2, 3, ... without the momentum, tau = 2, beta = 0.5: nothing in rounds 0 and 1;
    then half the mean of the last two steps, (1 + 2) / 4, and (2 + 3.75) / 4.
    """
    plan = make_plan("full+ghbm=0.5+ghbm_tau=2", [1], n=1)
    state = init_round(plan, np.zeros(1))
    sent = []
    for length in (1, 2, 3, 4):
        drift_d = plan.drifts(state, None)
        assert drift_d is not None
        sent.append(float(drift_d[0]))
        state, _ = close_round(plan, state, open_round(plan, state), [drift_d + np.float32(length)])
    assert sent == [0, 0, 0.75, 1.4375]
    assert state.params_d[0] == 1 + 2 + 3.75 + 5.4375


@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference-own"])
@pytest.mark.parametrize("name", ["uniform", "md", "pracdelta", "fedstas"])
def test_the_estimate_stays_unbiased(name: str, estimator: str) -> None:
    """In a state reached by four rounds, over all cohorts, with a drift that is not 0."""
    plan = Plan(
        Population.from_sizes(SIZES),
        make_sampler(name),
        2,
        estimator,
        parts=make_parts({"server_optimizer": Recorder(), "ghbm": 0.9, "ghbm_tau": 2}),
    )
    state: RoundState = init_round(plan, np.zeros(3))
    state = play(plan, state, [make_problem(SIZES, seed=s) for s in range(4)])
    # The recorder takes no step, and without steps there is no momentum.
    state = state._replace(params_d=np.array([4.0, -4.0, 8.0], dtype=np.float32))
    drift_d = broadcast(plan, state).drift_d
    assert drift_d is not None and np.all(drift_d)
    problem = make_problem(SIZES, seed=9)
    np.testing.assert_allclose(
        mean_estimate(plan, state, problem), problem.ubar_d, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("ghbm=1.0", r"ghbm is 1.0; it must be in \[0, 1\)"),
        ("ghbm=0.9+ghbm_tau=0", "ghbm_tau is 0; it must be in"),
        ("ghbm=0.9+ghbm_tau=2.5", "ghbm_tau is 2.5; it must be a whole number"),
        ("ghbm_tau=5", "ghbm is not set"),
        ("ghbm=0.9+mime=0.5", "two momenta"),
    ],
)
def test_what_it_refuses(settings: str, sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        make_plan(f"uniform+{settings}", [1, 2, 3], n=2)
