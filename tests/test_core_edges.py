"""Edges of the core: weights and scores of zero, empty rounds, states and models that are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import same_tree
from deltafl import (
    Accumulator,
    Cohort,
    DeltaflError,
    Fixed,
    Plan,
    Population,
    PowerOfChoice,
    close_round,
    init_round,
    make_sampler,
    make_server_optimizer,
    open_round,
    stream,
)
from deltafl.audit import check_sampler, lower_bound
from deltafl.designs.exact import every_cohort
from deltafl.designs.table import systematic
from deltafl.io import load_state, save_state
from deltafl.samplers.power_of_choice import _candidates
from deltafl.server.optimizers import Adaptive, Momentum, Sgd
from deltafl.types import BoolArray, Oracle


@pytest.mark.parametrize("design", ["poisson", "multinomial", "systematic"])
def test_no_cohort_of_probability_0_is_enumerated(design: str) -> None:
    weight_m = np.array([0.0, 0.5, 0.3, 0.2])
    sampler = Fixed(design, by_weight=True)
    state = sampler.init(Population(weight_m, np.ones(4, dtype=np.int64)))
    everyone = np.ones(4, dtype=np.bool_)
    cohorts = list(every_cohort(lambda rng: sampler.open(state, everyone, 2, rng)))
    assert sum(probability for probability, _ in cohorts) == pytest.approx(1)
    assert all(probability > 0 for probability, _ in cohorts)
    assert all(0 not in cohort.client_n for _, cohort in cohorts)


@pytest.mark.parametrize("name", ["fed-cbs", "balanced"])
def test_states_of_samplers_that_know_the_labels_are_loaded(name: str, tmp_path: Path) -> None:
    population = Population.from_sizes([3, 4, 5, 6], known=np.eye(4)[:, :3] + 0.1)
    plan = Plan(population, make_sampler(name), 2, "weighted-mean")
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    state, _ = close_round(plan, state, cohort, np.ones((len(cohort.client_n), 3), dtype=np.float32))
    save_state(tmp_path / "state", state, plan)
    assert same_tree(load_state(tmp_path / "state", plan), state)


def test_a_round_in_which_nobody_is_asked_is_the_same_one_update_at_a_time() -> None:
    plan = Plan(Population.from_sizes([1] * 5), Fixed("poisson", by_weight=True), 1, "innovation-damped")
    state = init_round(plan, np.zeros(4))
    empty = 0
    for round in range(12):
        cohort = open_round(plan, state)
        updates = stream(3, "audit", round).normal(size=(5, 4)).astype(np.float32)[cohort.client_n]
        closing = Accumulator(plan, state, cohort)
        for client, update_d in zip(cohort.client_n.tolist(), updates, strict=True):
            closing.add(client, update_d)
        streamed, _ = closing.close()
        state, _ = close_round(plan, state, cohort, updates)
        assert same_tree(streamed.control, state.control)
        empty += len(cohort.client_n) == 0
    assert empty > 0


def test_a_client_without_weight_adds_nothing_to_the_least_error() -> None:
    update_md = np.random.default_rng(0).normal(size=(8, 20))
    gram_mm, weight_m = update_md @ update_md.T, np.full(8, 1 / 7)
    weight_m[0] = 0.0
    others = lower_bound(gram_mm[1:, 1:], weight_m[1:], 3)
    assert others > 1
    assert lower_bound(gram_mm, weight_m, 3) == pytest.approx(others)
    assert lower_bound(gram_mm, weight_m, 7) == 0.0
    still_md = update_md * (np.arange(8) > 0)[:, None]  # an update of zero has nothing to add either
    assert lower_bound(still_md @ still_md.T, np.full(8, 1 / 7), 3) == pytest.approx(others)


def test_power_of_choice_asks_clients_without_weight_only_if_there_are_no_others() -> None:
    sampler = PowerOfChoice()
    state = sampler.init(Population(np.array([1.0, 0, 0, 0]), np.ones(4, dtype=np.int64)))

    everyone = np.ones(4, dtype=np.bool_)
    drawn = [_candidates(state.weight_m, everyone, 6, 3, stream(seed, "draw")).tolist() for seed in range(30)]
    assert all(len(set(client_k)) == 3 and 0 in client_k for client_k in drawn)
    assert {client for client_k in drawn for client in client_k} == {0, 1, 2, 3}


def test_a_systematic_draw_cannot_run_beyond_the_last_client() -> None:
    class Late(np.random.Generator):
        def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 1 - 2**-53

    drawn = systematic(np.full(20, 0.5), Late(np.random.PCG64(0)))
    assert len(set(drawn.tolist())) == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(float("nan")),
        lambda: Sgd(-1.0),
        lambda: Momentum(float("inf")),
        lambda: Adaptive("adam", beta1=1.5),
        lambda: Adaptive("adam", beta2=-1.0),
        lambda: Adaptive("yogi", tau=0.0),
        lambda: make_server_optimizer("adagrad", lr=-0.1),
    ],
)
def test_server_optimizers_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(DeltaflError, match="of the server optimizer is"):
        make()  # type: ignore[operator]


def test_models_and_populations_that_are_none_are_refused() -> None:
    plan = Plan(Population.from_sizes([1, 1]), Fixed(), 1)
    with pytest.raises(DeltaflError, match="NaN or infinite"):
        init_round(plan, [1.0, float("nan")])
    with pytest.raises(DeltaflError, match="array of numbers"):
        init_round(plan, ["a"])
    with pytest.raises(DeltaflError, match="2 weights and 3 sizes"):
        Plan(Population(np.full(2, 0.5), np.ones(3, dtype=np.int64)), Fixed(), 1)


def test_a_sampler_that_takes_everyone_must_give_the_same_cohort_for_none() -> None:
    class Forgetful(Fixed):
        accepts_no_mask = True

        def open(
            self,
            state: Any,
            available_m: BoolArray | None,
            n: int,
            rng: np.random.Generator,
            oracle: Oracle | None = None,
        ) -> Cohort:
            all_but_one = np.arange(len(state.score_m)) > 0
            return super().open(state, all_but_one if available_m is None else available_m, n, rng, oracle)

    check_sampler(make_sampler("pracdelta@ordered-pivotal"))
    with pytest.raises(AssertionError, match="accepts_no_mask"):
        check_sampler(Forgetful())
