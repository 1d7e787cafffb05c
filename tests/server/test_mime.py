"""FedMIME-style momentum: against FedCM as it is printed, its expectation, and what samplers see
of it.
"""

from dataclasses import replace

import numpy as np
import pytest

from conftest import Recorder, all_cohorts, estimate, make_problem, mean_estimate, play
from deltafl import (
    DeltaflError,
    Fixed,
    Full,
    Plan,
    Population,
    broadcast,
    close_round,
    init_round,
    make_sampler,
    open_round,
)
from deltafl.server.mime import MimeState
from deltafl.server.table import make_parts
from deltafl.types import FloatArray

SIZES = [10, 15, 20, 25, 30]
LR = 0.1
BETA = 0.8


def local_update(x: float, drift: float, centre: float, num_steps: int) -> float:
    """A client of F_i(x) = (x - centre)^2 / 2, as a host of deltafl trains it."""
    start = x
    for _ in range(num_steps):
        x = x - (1 - BETA) * LR * (x - centre) + drift / num_steps
    return x - start


def fedcm(centre_m: list[float], weight_m: FloatArray, num_steps: int, rounds: int) -> list[float]:
    """FedCM, algorithm 2 of Xu et al. 2021, alpha = 1 - beta, with weights and everybody asked."""
    x = 5.0
    momentum = 0.0
    path = []
    for _ in range(rounds):
        ends = []
        for centre in centre_m:
            local = x
            for _ in range(num_steps):
                local -= LR * ((1 - BETA) * (local - centre) + BETA * momentum)
            ends.append(local - x)
        mean = float(weight_m @ np.array(ends))
        momentum = -mean / (LR * num_steps)
        x += mean
        path.append(x)
    return path


def test_with_equal_steps_it_is_fedcm() -> None:
    centre_m = [-1.0, 2.0, 4.0]
    num_steps = 3
    plan = Plan(Population.from_sizes([1, 2, 5]), Full(), 3, parts=make_parts({"mime": BETA}))
    state = init_round(plan, np.array([5.0]))
    path = []
    for _ in range(12):
        sent = broadcast(plan, state)
        assert sent.drift_d is not None
        x = float(sent.params_d[0])
        drift = float(sent.drift_d[0])
        updates = [np.array([local_update(x, drift, centre, num_steps)]) for centre in centre_m]
        state, _ = close_round(plan, state, open_round(plan, state), updates)
        path.append(float(state.params_d[0]))
    np.testing.assert_allclose(
        path, fedcm(centre_m, plan.population.weight_m, num_steps, 12), rtol=1e-5
    )
    assert abs(path[-1] - 4.0) > 0.1  # the path is compared while it moves


def test_a_client_with_more_steps_has_no_more_of_a_say_in_the_drift() -> None:
    """Clients without a gradient move by the drift alone, however many steps they take; so D is
    the drift.
    """
    plan = Plan(Population.from_sizes([1, 1, 1]), Full(), 3, parts=make_parts({"mime": BETA}))
    state = init_round(plan, np.zeros(1))._replace(
        parts={"server_optimizer": (), "mime": MimeState(np.array([2.0], dtype=np.float32))}
    )
    drift = float(np.float32(BETA) * np.float32(2.0))
    updates = [np.full(1, sum([drift / num_steps] * num_steps)) for num_steps in (1, 3, 10)]
    following, info = close_round(plan, state, open_round(plan, state), updates)
    assert following.params_d[0] == pytest.approx(drift, rel=1e-6)
    assert following.parts["mime"].momentum_d[0] == pytest.approx(drift, rel=1e-6)
    assert info.estimate_norm == pytest.approx(drift, rel=1e-6)


@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference", "difference-own"])
@pytest.mark.parametrize(
    "name", ["uniform", "md", "md-fixed", "fedis", "delta", "pracdelta", "cluster-is"]
)
def test_the_estimate_stays_unbiased(name: str, estimator: str) -> None:
    """In a state reached by four rounds, over all cohorts; to the rounding of the float32
    residuals.
    """
    plan = Plan(
        Population.from_sizes(SIZES),
        make_sampler(name),
        2,
        estimator,
        parts=make_parts({"server_optimizer": Recorder(), "mime": BETA}),
    )
    problem = make_problem(SIZES, seed=9)
    state = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(4)]
    )
    assert np.all(broadcast(plan, state).drift_d)
    np.testing.assert_allclose(
        mean_estimate(plan, state, problem), problem.ubar_d, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "estimator", ["horvitz-thompson", "difference-own", "hajek", "plain-mean", "fedvarp"]
)
def test_what_is_known_is_not_estimated(estimator: str) -> None:
    """The sum of the weights is 0.4 or 2.8 here; a momentum multiplied by it would have a
    growing mean square.
    """
    plan = Plan(
        Population.from_sizes([1, 1, 1, 7]),
        Fixed(),
        1,
        estimator,
        parts=make_parts({"server_optimizer": Recorder(), "mime": 0.9}),
    )
    state = init_round(plan, np.zeros(1))._replace(
        parts={
            "server_optimizer": (),
            "mime": MimeState(np.array([100.0], dtype=np.float32)),
        }
    )
    drift_d = broadcast(plan, state).drift_d
    for _, cohort in all_cohorts(plan, state, None):
        assert estimate(plan, state, cohort, [drift_d]) == pytest.approx([90.0], rel=1e-6)


def test_samplers_and_controls_see_the_updates_without_the_drift() -> None:
    problem = make_problem(SIZES)
    plan = Plan(
        problem.population,
        make_sampler("fedpracis"),
        3,
        "difference-own",
        parts=make_parts({"server_optimizer": Recorder(), "mime": BETA}),
    )
    state = init_round(plan, np.zeros(3))._replace(
        parts={
            "server_optimizer": (),
            "mime": MimeState(np.array([8.0, -8.0, 8.0], dtype=np.float32)),
        }
    )
    drift_d = broadcast(plan, state).drift_d
    assert drift_d is not None
    cohort = open_round(plan, state)
    residual_nd = problem.update_md[cohort.client_n]
    with_drift, _ = close_round(plan, state, cohort, residual_nd + drift_d)
    plain = replace(plan, parts=(Recorder(),))
    without, _ = close_round(plain, init_round(plain, np.zeros(3)), cohort, residual_nd)
    for one, two in ((with_drift.sampler, without.sampler), (with_drift.control, without.control)):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        with_drift.parts["server_optimizer"].delta_d,
        drift_d + without.parts["server_optimizer"].delta_d,
        atol=1e-5,
    )


def test_without_it_nothing_is_sent_and_nothing_is_kept() -> None:
    plan = Plan(Population.from_sizes(SIZES), Full(), 5)
    state = init_round(plan, np.zeros(3))
    assert broadcast(plan, state) == (state.params_d, None)
    assert state.parts == {"server_optimizer": ()}
    for beta in (1.0, -0.1, float("nan")):
        with pytest.raises(DeltaflError, match=r"mime is .*; it must be in"):
            make_parts({"mime": beta})
