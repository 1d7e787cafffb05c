"""Clients that are away, late or slow: where the estimate stays unbiased, how far off it is
where it cannot be.
"""

from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest

from conftest import Problem, Recorder, all_cohorts, estimate, make_problem, play
from deltafl import (
    ESTIMATORS,
    Plan,
    RoundState,
    close_round,
    init_round,
    make_sampler,
    open_round,
    stream,
)
from deltafl.samplers.intervals import FedAU, FedAWE
from deltafl.scale.persistent_array import PersistentArray
from deltafl.types import BoolArray, FloatArray

SIZES = [10, 15, 20, 25, 30]
#: Who is there in ten equally likely rounds: client 0 in 2, client 4 in 9, and never independently.
THERE_TM = np.array([[t % 5 == 0, t < 4, t % 2 == 0, t not in {3, 8}, t != 6] for t in range(10)])
RATE_M = THERE_TM.mean(axis=0)
UNBIASED = [name for name, estimator in ESTIMATORS.items() if estimator.unbiased]


def plan_of(label: str, estimator: str, problem: Problem, n: int = 2) -> Plan:
    return Plan(problem.population, make_sampler(label), n, estimator, (Recorder(),), seed=1)


def played(plan: Plan) -> RoundState:
    """A state of nine rounds in which the rates of availability are those of the ten, and
    everybody replied.
    """
    state = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(3)]
    )
    known = PersistentArray(np.full(5, 9))
    missed = PersistentArray(np.rint(10 * (1 - RATE_M)).astype(np.int16))
    return state._replace(round=9, selected_m=known, responded_m=known, missed_m=missed)


def mean_over_worlds(plan: Plan, state: RoundState, problem: Problem) -> FloatArray:
    """E[D] over the ten worlds and all cohorts in each."""
    mean_d = np.zeros(3)
    for there_m in THERE_TM:
        for probability, cohort in all_cohorts(plan, state, problem.oracle, there_m):
            delta_d = estimate(plan, state, cohort, list(problem.update_md[cohort.client_n]))
            mean_d += probability / len(THERE_TM) * delta_d
    return mean_d


def bias(mean_d: FloatArray, problem: Problem) -> float:
    return float(np.abs(mean_d - problem.ubar_d).max() / np.abs(problem.ubar_d).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("estimator", UNBIASED)
@pytest.mark.parametrize(
    "label", ["full", "uniform", "md-fixed", "fedis", "pracdelta", "innovation", "uniform@poisson"]
)
def test_absence_of_known_rate_leaves_no_bias(label: str, estimator: str) -> None:
    """All worlds times all cohorts, with clients whose absences depend on one another."""
    problem = make_problem(SIZES, seed=9)
    plan = plan_of(label, estimator, problem)
    state = played(plan)
    np.testing.assert_allclose(plan.response_rates(state), RATE_M)
    assert bias(mean_over_worlds(plan, state, problem), problem) < 1e-12


def test_the_naive_means_are_biased_and_how_far() -> None:
    problem = make_problem(SIZES, seed=9)
    found = {}
    for label, estimator in [
        ("uniform", "weighted-mean"),
        ("uniform", "plain-mean"),
        ("fedavg", "hajek"),
    ]:
        plan = plan_of(label, estimator, problem)
        found[estimator] = bias(mean_over_worlds(plan, played(plan), problem), problem)
    # Hajek's ratio knows the rates, and keeps the bias of a ratio of few.
    assert found["weighted-mean"] > 0.2 and found["plain-mean"] > 0.1
    assert 0.01 < found["hajek"] < found["weighted-mean"]


def test_rates_are_learned_and_the_bias_vanishes() -> None:
    problem = make_problem(SIZES, seed=9)
    plan = plan_of("uniform", "horvitz-thompson", problem)
    state = init_round(plan, np.zeros(3))
    late = []
    for round in range(1500):
        there_m = THERE_TM[stream(0, "audit", round).integers(10)]
        cohort = open_round(plan, state, there_m)
        assert there_m[cohort.client_n].all()
        state, _ = close_round(plan, state, cohort, problem.update_md[cohort.client_n])
        late.append(state.parts["server_optimizer"].delta_d)
    np.testing.assert_allclose(plan.response_rates(state), RATE_M, atol=4 * 0.5 / np.sqrt(1500))
    error_d = np.std(late[500:], axis=0) / np.sqrt(1000)
    assert np.all(
        np.abs(np.mean(late[500:], axis=0) - problem.ubar_d)
        < 4 * error_d + 0.03 * np.abs(problem.ubar_d)
    )


def test_nobody_absent_changes_no_bit() -> None:
    problem = make_problem(SIZES, seed=9)
    plan = plan_of("uniform", "horvitz-thompson", problem)
    state = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(3)]
    )
    assert len(open_round(plan, state, np.ones(5, bool)).absent) == 0
    assert (plan.response_rates(state) == 1).all()


def test_the_floor_bounds_what_a_rare_client_counts() -> None:
    problem = make_problem(SIZES, seed=9)
    plan = plan_of("uniform", "horvitz-thompson", problem)
    rare = played(plan)._replace(round=999, missed_m=PersistentArray(np.array([999, 0, 0, 0, 0])))
    np.testing.assert_allclose(plan.response_rates(rare), [0.1, 1, 1, 1, 1])
    np.testing.assert_allclose(
        replace(plan, response_floor=1e-4).response_rates(rare), [0.001, 1, 1, 1, 1]
    )


# --- over-selection: the first of the cohort to reply are kept

SECONDS_M = np.array([5.0, 1.0, 4.0, 2.0, 3.0])  # client 0 is the slowest


def first_two_of_three(estimator: str) -> tuple[FloatArray, Problem, FloatArray]:
    """E[D] if three of five are selected and the first two count, with the rates that follow
    from that.
    """
    problem = make_problem(SIZES, seed=9)
    plan = plan_of("uniform", estimator, problem, n=3)
    cohorts = [np.array(cohort) for cohort in combinations(range(5), 3)]
    kept_m = np.zeros(5)
    for client_n in cohorts:
        kept_m[client_n[np.argsort(SECONDS_M[client_n])[:2]]] += 1
    selected_m = np.full(5, comb(4, 2))
    state = init_round(plan, np.zeros(3))._replace(
        selected_m=PersistentArray(1000 * selected_m - 1),
        responded_m=PersistentArray(1000 * kept_m.astype(int) - 1),
    )
    mean_d = np.zeros(3)
    for client_n in cohorts:
        cohort = open_round(plan, state)._replace(client_n=client_n)
        slowest = client_n[np.argmax(SECONDS_M[client_n])]
        updates = [None if client == slowest else problem.update_md[client] for client in client_n]
        mean_d += estimate(plan, state, cohort, updates) / len(cohorts)
    return mean_d, problem, kept_m / selected_m


def test_first_replies_are_unbiased_once_their_rates_are_known_and_naive_means_are_not() -> None:
    """Who is kept depends on who else is selected: only the rate of each client matters to a
    Horvitz-Thompson sum.

    The slowest client never counts: its whole part is missing, which is all of the bias that is
    left.
    """
    mean_d, problem, rate_m = first_two_of_three("horvitz-thompson")
    np.testing.assert_allclose(rate_m, [0, 1, 0.5, 1, 5 / 6])
    part_d = problem.population.weight_m[0] * problem.update_md[0]
    np.testing.assert_allclose(mean_d, problem.ubar_d - part_d, rtol=1e-6)
    naive_d, _, _ = first_two_of_three("weighted-mean")
    assert np.linalg.norm(naive_d - problem.ubar_d) > 1.5 * np.linalg.norm(mean_d - problem.ubar_d)


# --- FedAU


def slow_omega(came: list[bool], cutoff: int) -> float:
    """Algorithm 2 of the paper, literally, for one client."""
    omega = 1.0
    ended = 0
    length = 0
    for here in came:
        length += 1
        if here or length == cutoff:
            omega = length if ended == 0 else (ended * omega + length) / (ended + 1)
            ended = ended + 1
            length = 0
    return omega


def test_fedau_has_the_intervals_of_its_paper() -> None:
    problem = make_problem(SIZES, seed=9)
    cutoff = 4
    plan = Plan(
        problem.population, FedAU(cutoff=cutoff), 2, "horvitz-thompson", (Recorder(),), seed=3
    )
    state = init_round(plan, np.zeros(3))
    came_tm = list[BoolArray]()
    for round in range(40):
        cohort = open_round(plan, state, THERE_TM[round % 10])
        assert (plan.response_rates(state) == 1).all()
        omega_m = [slow_omega([bool(came_m[i]) for came_m in came_tm], cutoff) for i in range(5)]
        replied_n = stream(5, "audit", round).random(len(cohort.client_n)) < 0.8
        updates = [
            problem.update_md[i] if here else None
            for i, here in zip(cohort.client_n, replied_n, strict=True)
        ]
        state, _ = close_round(plan, state, cohort, updates)
        weight_m = problem.population.weight_m
        here = cohort.client_n[replied_n]
        expected_d = (weight_m[here] * np.array(omega_m)[here]) @ problem.update_md[here].astype(
            float
        )
        np.testing.assert_allclose(
            state.parts["server_optimizer"].delta_d, expected_d, rtol=1e-12, atol=1e-15
        )
        came_tm.append(np.isin(np.arange(5), here))


# --- FedAWE


def test_fedawe_moves_the_mean_of_the_papers_models() -> None:
    """The paper's m models, mixed by those who took part, with updates that do not depend on
    where they begin: the server's model is their mean in every round.
    """
    problem = make_problem([7] * 5, seed=9)
    update_md = problem.update_md.astype(float)
    plan = Plan(problem.population, FedAWE(), 2, seed=3)
    state = init_round(plan, np.zeros(3))
    model_md = np.zeros((5, 3))
    last_m = np.full(5, -1)
    for round in range(40):
        cohort = open_round(plan, state, THERE_TM[round % 10])
        replied_n = stream(5, "audit", round).random(len(cohort.client_n)) < 0.8
        updates = [
            problem.update_md[i] if here else None
            for i, here in zip(cohort.client_n, replied_n, strict=True)
        ]
        state, _ = close_round(plan, state, cohort, updates)
        here = cohort.client_n[replied_n]
        if len(here):
            echo_md = (round - last_m[here])[:, None] * update_md[here]
            model_md[here] = (model_md[here] + echo_md).mean(axis=0)
        last_m[here] = round
        np.testing.assert_allclose(state.params_d, model_md.mean(axis=0), rtol=1e-4)
    # All replies of a client together have counted for the rounds up to its last one.
    total_d = (last_m + 1) @ update_md / 5
    np.testing.assert_allclose(state.params_d, total_d, rtol=1e-4)


def test_fedawe_with_everybody_in_every_round_is_full_participation() -> None:
    problem = make_problem(SIZES, seed=9)
    plan = Plan(problem.population, FedAWE(), 5, "horvitz-thompson", (Recorder(),))
    state = init_round(plan, np.zeros(3))
    for _ in range(3):
        state, _ = close_round(plan, state, open_round(plan, state), problem.update_md)
        np.testing.assert_allclose(
            state.parts["server_optimizer"].delta_d, problem.ubar_d, rtol=1e-6
        )
