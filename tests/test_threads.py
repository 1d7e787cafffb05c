"""The same bits however many threads the matrix library has: on a laptop, on a busy server, and
where it has one.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from conftest import make_problem, play, same_tree
from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    Census,
    Population,
    Reports,
    RoundState,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.designs import balanced
from deltafl.designs.table import draw_cohort
from deltafl.simulation.census import Asked
from deltafl.simulation.conditions import find_availability

#: More than 10,000 parameters, of which OpenBLAS gives each product to all threads.
PROBLEMS = [
    make_problem([10, 15, 20, 25, 30, 35, 40, 45], d=20_001, seed=seed) for seed in range(3)
]
LABELS = [
    *SAMPLERS,
    *(f"uniform@@{name}" for name in ESTIMATORS),
    "innovation+clip=median",
    "uniform+norm_guard=1.1",
    "uniform+relative_error=0.5",
    "uniform+average=0.5+server_optimizer=adam+server_lr=0.1",
    "uniform+server_optimizer=fedexp",
    "innovation+mime=0.7",
    "fedvarp+ghbm=0.7",
]


def same_bits(work: Callable[[], object]) -> bool:
    with threadpool_limits(1):
        alone = work()
    with threadpool_limits(2):
        return same_tree(alone, work())


@pytest.mark.parametrize("label", LABELS)
def test_rounds(label: str) -> None:
    def last_state() -> RoundState:
        plan = make_plan(label, PROBLEMS[0].population, 3)
        if plan.census is not None:
            answers = [plan.census.answer(update_d, seed=0) for update_d in PROBLEMS[0].update_md]
            plan = plan.with_census(answers)
        return play(plan, init_round(plan, np.zeros(20_001)), PROBLEMS)

    assert same_bits(last_state)


@pytest.mark.parametrize("m", [1000, 20_000])
def test_the_auxiliary_variables_of_a_census(m: int) -> None:
    population = Population.from_sizes(1 + np.arange(m) % 7)
    answer_mk = np.random.default_rng(m).normal(size=(m, 65))

    def auxiliary() -> object:
        return Census(10, 64).population(population, answer_mk).aux_mq

    assert same_bits(auxiliary)


def test_the_line_of_a_census_in_a_simulation() -> None:
    problem = PROBLEMS[1]
    plan = make_plan("census", problem.population, 3)
    assert plan.census is not None
    answers = [plan.census.answer(update_d, seed=0) for update_d in problem.update_md]
    asked = Asked(plan.with_census(answers), {}, {})
    opened = init_round(plan, np.zeros(20_001))
    step_d = problem.update_md.mean(axis=0).astype(np.float32)

    def line() -> object:
        run: Any = SimpleNamespace(state=opened, clock=0.0)
        info = asked.round(run, opened._replace(params_d=step_d)).info
        assert info.estimate_norm == pytest.approx(float(np.linalg.norm(step_d)), rel=1e-6)
        return np.array(info.estimate_norm)

    assert same_bits(line)


@pytest.mark.parametrize(("k", "q"), [(300, 40), (1000, 40)])
def test_the_axes_that_a_cohort_is_balanced_on(k: int, q: int) -> None:
    """Of more columns, OpenBLAS from 0.3.34 on gives eigenvectors with other last bits."""
    place_kq = np.random.default_rng(k).normal(size=(k, q))
    assert same_bits(lambda: balanced._balance(place_kq))


@pytest.mark.parametrize("design", ["cube", "anticluster", "local-pivotal"])
def test_cohorts_that_are_balanced_on_many_columns(design: str) -> None:
    """They do not hang on the last bits of the axes."""
    place_kq = np.random.default_rng(1).dirichlet(np.full(100, 0.1), 300)
    score_m = np.arange(300) % 7 + np.ones(300)

    def cohorts() -> object:
        return tuple(
            draw_cohort(score_m, 20, design, np.random.default_rng(seed), value_mq=place_kq)
            for seed in range(10)
        )

    assert same_bits(cohorts)


def test_the_clients_of_labels_that_are_there() -> None:
    share_mc = np.random.default_rng(1).dirichlet(np.ones(62), 20_001)
    population = Population.from_sizes(np.ones(20_001, int), "data", share_mc)
    assert same_bits(lambda: cast(Any, find_availability("labels")).rates(population))


@pytest.mark.parametrize("label", ["full", "uniform", "md", "uniform+server_optimizer=fedexp"])
def test_the_report_of_a_round_of_many_clients(label: str) -> None:
    """More of them than one thread multiplies."""
    problem = make_problem([1 + client % 9 for client in range(25_000)], d=3, seed=0)

    def report() -> object:
        plan = make_plan(label, problem.population, 12_000)
        state = init_round(plan, np.zeros(3))
        cohort = open_round(plan, state)
        size = len(cohort.client_n)
        reports = Reports.make(size, loss=np.linspace(0, 1, size))
        _, info = close_round(plan, state, cohort, problem.update_md[cohort.client_n], reports)
        return tuple(
            np.array(part) for part in (info.estimate_norm, info.variance, info.loss, *info[6:10])
        )

    assert same_bits(report)
