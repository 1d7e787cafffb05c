"""Draws by auxiliary variables of the clients: `balanced`, and the rival `fed-cbs`."""

from math import log
from typing import Any

import numpy as np
import pytest

from conftest import Recorder, assert_frequencies, frequencies
from deltafl import (
    Cohort,
    DeltaflError,
    Plan,
    Population,
    Reports,
    close_round,
    init_round,
    make_sampler,
    open_round,
)
from deltafl.designs.exact import every_cohort
from deltafl.samplers.centred import Balanced
from deltafl.samplers.pooled_labels import FedCBS, imbalance
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import plan_of, task_of
from deltafl.types import FloatArray

#: Three clients of one label, three of the other.
TWO_KINDS = Population.from_sizes([5] * 6, aux=[[1, 0]] * 3 + [[0, 1]] * 3)


def cohorts_of(sampler: Balanced, population: Population, n: int) -> list[tuple[float, Cohort]]:
    state = sampler.init(population)
    everyone_m = np.ones(population.num_clients, dtype=np.bool_)
    cohorts = every_cohort(lambda rng: sampler.open(state, everyone_m, n, rng))
    return [
        (chance, cohort) for chance, cohort in cohorts if chance > 1e-12
    ]  # rounding makes branches of 1e-17


@pytest.mark.parametrize("design", ["cube", "anticluster", "local-pivotal"])
def test_every_cohort_has_as_many_of_each_kind(design: str) -> None:
    cohorts = cohorts_of(Balanced(design), TWO_KINDS, 4)
    assert len(cohorts) > 1
    assert all(int((cohort.client_n < 3).sum()) == 2 for _, cohort in cohorts)
    assert all(cohort.expected_n == pytest.approx(2 / 3) for _, cohort in cohorts)
    unbalanced = cohorts_of(Balanced("pivotal"), TWO_KINDS, 4)
    assert not all(int((cohort.client_n < 3).sum()) == 2 for _, cohort in unbalanced)


def test_what_is_linear_in_what_is_known_is_estimated_without_error() -> None:
    update_md = np.array([[1.0, -2.0]] * 3 + [[4.0, 0.5]] * 3, dtype=np.float32)
    plan = Plan(TWO_KINDS, Balanced(), 2, "horvitz-thompson", (Recorder(),))
    for round in range(20):
        state = init_round(plan, np.zeros(2))._replace(round=round)
        cohort = open_round(plan, state)
        following, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
        np.testing.assert_allclose(
            following.parts["server_optimizer"].delta_d, update_md.mean(axis=0), rtol=1e-12
        )


def test_columns_that_others_determine_cost_no_balance() -> None:
    """Shares that sum to 1 vary in one direction fewer, and a column twice is one column."""
    share_mc = np.random.default_rng(1).dirichlet(np.ones(4), size=9)
    for aux_mq, axes in (
        (share_mc, 3),
        (np.hstack([share_mc, share_mc]), 3),
        (np.full((9, 2), 0.1), 0),
    ):
        state = Balanced().init(Population.from_sizes(range(1, 10), aux=aux_mq))
        assert state.about_mq.shape == (9, axes)
        np.testing.assert_allclose(Balanced().values(state).sum(axis=0), 0, atol=1e-12)


# What is known


def test_tasks_provide_the_shares_of_the_labels() -> None:
    settings = make_settings(
        RunSettings, {"sampler": "balanced", "task": "digits", "clients": 7, "sample": 2}
    )
    task = task_of(settings)
    aux_mq = plan_of(settings, task.population("data"), task).population.aux_mq
    assert aux_mq is not None
    rows = task.client_rows[3]
    assert aux_mq[3].tolist() == [
        float(np.mean(task.dataset.train_y[rows] == label)) for label in range(10)
    ]
    for label in ("balanced", "uniform@systematic@regression-damped", "fed-cbs"):
        settings = make_settings(RunSettings, {"sampler": label, "task": "toy"})
        toy = task_of(settings)
        assert toy.population("data").aux_mq is None
        with pytest.raises(DeltaflError, match="this task has no labels"):
            plan_of(settings, toy.population("data"), toy)


# Fed-CBS


def test_imbalance_by_hand() -> None:
    count_kc = np.array([[3.0, 3.0], [4.0, 0.0], [3.0, 1.0]])
    np.testing.assert_allclose(imbalance(count_kc), [1e-12, 0.5, 0.125], rtol=1e-12)


def cbs_chances(count_mc: FloatArray, bonus_m: FloatArray) -> FloatArray:
    """The paper's products for cohorts of two, written out: P(first) P(second | first) for each
    ordered pair.
    """
    m = len(count_mc)
    quality = np.array([1 / imbalance(count_mc[i : i + 1])[0] + bonus_m[i] for i in range(m)])
    chance = np.zeros((m, m))
    for i in range(m):
        others = [j for j in range(m) if j != i]
        second = np.array([imbalance((count_mc[i] + count_mc[j])[None])[0] ** -2.0 for j in others])
        chance[i, others] = quality[i] / quality.sum() * second / second.sum()
    return chance


def test_fed_cbs_draws_with_the_papers_probabilities() -> None:
    """In the first round without a bonus (ln 1 = 0), later with one by how often each was
    selected.
    """
    count_mc = np.array([[6.0, 1.0], [2.0, 3.0], [1.0, 4.0], [5.0, 2.0]])
    population = Population.from_sizes(count_mc.sum(axis=1).astype(int), aux=count_mc)
    sampler = FedCBS(exploration=10.0)
    selected = np.array([0, 1, 4, 9])
    for rounds in (0, 6):
        state = sampler.init(population)._replace(selected_m=selected, rounds=np.array(rounds))
        chance = cbs_chances(
            count_mc, 10 * np.sqrt(1.5 * log(rounds + 1) / np.maximum(selected, 1))
        )
        assert_frequencies(
            frequencies(sampler, state, 4, 2), chance.sum(axis=0) + chance.sum(axis=1)
        )


def test_fed_cbs_counts_who_was_selected_and_selects_those_that_are_there() -> None:
    population = Population.from_sizes([4] * 6, aux=np.eye(6)[:, :3] + 0.1)
    sampler = FedCBS()
    state = sampler.init(population)
    available_m = np.array([True, False, True, True, False, True])
    cohort = sampler.open(state, available_m, 3, np.random.default_rng(0))
    assert len(cohort.client_n) == 3
    assert available_m[cohort.client_n].all()
    following = sampler.update(state, cohort, Reports.make(3, responded=[True, False, True]))
    assert following.selected_m.sum() == 3
    assert int(following.rounds) == 1


@pytest.mark.parametrize("name", ["fed-cbs", "fedentopt", "fedgs", "fedlecc"])
@pytest.mark.parametrize(
    ("known", "words"),
    [
        (None, "give Population"),
        (np.zeros((4, 0)), "give Population"),
        ([[-1.0, 2.0]] * 4, "give Population"),
        # Its labels may all be ignored, or its examples have none.
        ([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], "client 1 has no label"),
    ],
)
def test_samplers_of_labels_need_those_of_every_client(name: str, known: Any, words: str) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_sampler(name).init(Population.from_sizes([1, 2, 3, 4], aux=known))
