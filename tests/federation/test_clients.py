"""Clients join, change and are forgotten: the registry, and states for another population."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    Cohort,
    DeltaflError,
    LearnedCoefficient,
    Population,
    Reports,
    Sampler,
    Twin,
    draw_cohort,
    init_round,
)
from deltafl.estimators.own import OwnControl
from deltafl.estimators.table import find_estimator
from deltafl.federation.federation import Federation
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save
from deltafl.moves import Moves
from deltafl.scale.named_arrays import named_arrays
from deltafl.types import BoolArray, FloatArray, Params

from .tools import admit, federation, play, rates_of, sizes_of

#: Their states describe all clients jointly: a tree of them, and experts' probabilities of them.
FIXED_SIZE = {"clustered-sampling-2", "osmd"}
PRACTICAL = [name for name, entry in SAMPLERS.items() if entry.needs not in {"oracle", "losses"}]


def test_clients_are_numbered_by_their_keys_and_keep_their_numbers() -> None:
    fed = federation()
    admit(fed, {f"partition:{i}": 7 for i in (10, 2, 11, 1)})
    admit(fed, {"partition:5": 7, "partition:2": 70})
    assert fed.keys[-1] == "partition:5"
    assert [info.num_examples for info in fed.clients.values()] == [7, 70, 7, 7, 7]
    assert fed.plan.population.weight_m[1] == pytest.approx(70 / 98)


def test_newcomers_get_the_mean_score_and_the_others_keep_theirs() -> None:
    fed = federation("pracdelta", m=6)
    play(fed, 4)
    before_m = fed.current.sampler.p_m
    assert np.ptp(before_m) > 0.01
    admit(fed, sizes_of(8, start=6))
    after_m = fed.current.sampler.p_m
    assert after_m.sum() == pytest.approx(1)
    assert after_m[6:] == pytest.approx([after_m.mean()] * 2)
    assert after_m[:6] / before_m == pytest.approx([6 / 8] * 6)
    assert fed.current.selected_m[6:].tolist() == [0, 0]
    play(fed, 2)


@pytest.mark.parametrize("label", ["k-vib", "vrb"])
def test_newcomers_get_the_mean_of_cumulative_scores(label: str) -> None:
    fed = federation(label, m=6)
    play(fed, 30)
    before_m = fed.current.sampler.total_m
    admit(fed, sizes_of(8, start=6))
    assert fed.current.sampler.total_m[6:] == pytest.approx([np.mean(before_m)] * 2)
    assert np.mean(before_m) > 0


def test_newcomers_count_as_away_as_often_as_the_others() -> None:
    fed = federation("uniform", m=6)
    for _ in range(10):
        fed.close(fed.open(fed.keys[:3]), {})
    admit(fed, sizes_of(8, start=6))
    assert fed.current.missed_m.tolist() == [0, 0, 0, 10, 10, 10, 5, 5]


def test_the_availability_of_a_newcomer_is_soon_its_own(tmp_path: Path) -> None:
    """However old the federation is; also once it is saved, loaded and others are forgotten."""

    def rounds(number: int, present: list[str]) -> None:
        for _ in range(number):
            cohort = fed.open(present)
            fed.close(cohort, {key: ClientReply(fed.arrays()) for key in fed.keys_of(cohort)})

    fed = federation("uniform", m=6, absent_after=None)
    rounds(200, fed.keys[:3])
    admit(fed, sizes_of(8, start=6))
    assert [*rates_of(fed).values()][6:] == pytest.approx([6 / 11] * 2)
    rounds(30, [*fed.keys[:3], "client:6"])
    assert [*rates_of(fed).values()] == pytest.approx([1] * 3 + [0.1] * 3 + [36 / 41, 6 / 41])
    save(tmp_path, fed)
    fed = federation("uniform", absent_after=None)
    assert load(tmp_path, fed)
    admit(fed, sizes_of(9, start=8))
    fed.forget(["client:0", "client:3"])
    assert [*rates_of(fed).values()] == pytest.approx(
        [1] * 2 + [0.1] * 2 + [36 / 41, 6 / 41, 6 / 11]
    )


@pytest.mark.parametrize(
    "label",
    [
        "pracdelta@systematic@difference-own",
        "innovation",
        "cluster-is",
        "balanced",
        "census@@regression-damped",
    ],
)
def test_joining_before_the_first_round_equals_starting_with_everybody(label: str) -> None:
    late = federation(label, m=4)
    early = federation(label, m=9)
    admit(late, sizes_of(9, start=4))
    assert late.keys == early.keys
    for (name, grown), (_, begun) in zip(
        named_arrays(late.current), named_arrays(early.current), strict=True
    ):
        assert np.allclose(grown, begun, rtol=1e-12, atol=0, equal_nan=grown.dtype.kind == "f"), (
            name
        )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_control_variates_are_summed_with_the_new_weights(estimator: str) -> None:
    """sum_j w_j c_j is what the difference estimators add: a wrong one after somebody joins
    would be a bias.
    """
    fed = federation("md-fixed", estimator=estimator, m=5)
    play(fed, 3)
    admit(fed, {"client:1": 99, **sizes_of(7, start=5)})
    control = find_estimator(estimator).control
    weight_m = fed.plan.population.weight_m
    guess = control.value(fed.current.control, np.arange(7))
    control_md = np.broadcast_to(guess.control_nd, (7, 3))
    assert np.allclose(guess.total_d, weight_m @ control_md)
    assert control_md.any() == (
        estimator not in {"horvitz-thompson", "hajek", "plain-mean", "weighted-mean"}
    )
    play(fed, 3)


def test_twins_of_newcomers_are_there_at_once() -> None:
    """The simulation is given the clients of the round, 5 and then 7; newcomers are simulated
    when they join.
    """

    def simulate(params_d: Params, population: Population, round: int) -> FloatArray:
        return np.outer(population.num_examples_m, np.ones(3)) / (1.0 + round)

    estimator = LearnedCoefficient(Twin(simulate, OwnControl()))
    fed = federation("md-fixed", estimator=estimator, m=5)
    play(fed, 3)
    admit(fed, sizes_of(7, start=5))
    value = estimator.control.value(fed.current.control.control, np.arange(7))
    twin_md = np.asarray(fed.current.control.control.twin.control_md)
    np.testing.assert_allclose(twin_md[:, 0], np.array([10, 15, 20, 25, 30, 35, 40]) / 4)
    np.testing.assert_allclose(value.total_d, fed.plan.population.weight_m @ value.control_nd)
    play(fed, 3)


class OwnState(NamedTuple):
    """Arrays of an own sampler, under names that the library gives to others."""

    weight_m: FloatArray
    score_m: FloatArray
    p_m: FloatArray
    total_m: FloatArray


@dataclass(frozen=True)
class Visited(Sampler):
    """An own sampler that counts visits."""

    def init(self, population: Population) -> OwnState:
        return OwnState(population.weight_m, *np.ones((3, population.num_clients)))

    def open(
        self, state: OwnState, available_m: BoolArray, n: int, rng: Any, oracle: Any = None
    ) -> Cohort:
        return draw_cohort(state.score_m, n, "pivotal", rng, available_m)

    def update(self, state: OwnState, cohort: Cohort, reports: Reports) -> OwnState:
        visit_m = np.isin(np.arange(len(state.score_m)), cohort.client_n).astype(float)
        return OwnState(state.weight_m, *(array_m + visit_m for array_m in state[1:]))


@dataclass(frozen=True)
class Followed(Visited):
    """The same, whose state follows where clients join and leave."""

    def resized(self, state: OwnState, moves: Moves) -> OwnState:
        weight_m = moves.population.weight_m
        return OwnState(weight_m, *(moves.rows(array_m, 1.0) for array_m in state[1:]))


def test_what_an_own_sampler_learned_is_kept_whatever_its_name() -> None:
    model = {"x": np.zeros(3, np.float32)}
    fed = Federation(make_rules(Followed(), n=3), model)
    admit(fed, sizes_of(5))
    play(fed, 4)
    before = fed.current.sampler
    assert before.score_m.sum() == 5 + 4 * 3
    fed.forget(["client:1"])
    admit(fed, sizes_of(7, start=5))
    after = fed.current.sampler
    assert np.array_equal(after.weight_m, fed.plan.population.weight_m)
    for before_m, after_m in zip(before[1:], after[1:], strict=True):
        assert after_m.tolist() == [*before_m[[0, 2, 3, 4]].tolist(), 1.0, 1.0]


def test_an_own_sampler_that_says_nothing_of_newcomers_gets_none() -> None:
    """No array is taken for one of clients by its name."""
    model = {"x": np.zeros(3, np.float32)}
    fed = Federation(make_rules(Visited(), n=3), model)
    admit(fed, sizes_of(5))
    play(fed, 4)
    before = fed.current.sampler
    admit(fed, sizes_of(7, start=5))
    assert len(fed.keys) == 5
    assert "Visited describes all clients jointly" in fed.warnings[0]
    assert fed.current.sampler is before


@pytest.mark.parametrize("label", [name for name in PRACTICAL if name not in FIXED_SIZE])
def test_every_other_practical_sampler_lets_clients_join(label: str) -> None:
    fed = federation(label, {"x": np.zeros(12, np.float32)}, m=5)
    play(fed, 3)
    admit(fed, {"client:1": 99, **sizes_of(8, start=5)})
    fresh = init_round(fed.plan, np.zeros(12))
    for (name, grown), (_, begun) in zip(
        named_arrays(fed.current), named_arrays(fresh), strict=True
    ):
        assert grown.shape == ((8,) if name == "state.joined_m" else begun.shape), name
        if name.endswith((".weight_m", ".size_m")):
            assert np.array_equal(grown, begun), name
    play(fed, 4)


@pytest.mark.parametrize("label", sorted(FIXED_SIZE))
def test_samplers_that_cannot_be_resized_leave_newcomers_out_and_forget_nobody(label: str) -> None:
    fed = federation(label, m=4)
    admit(fed, sizes_of(5, start=4))  # before the first round is closed anybody can join
    play(fed, 1)
    admit(fed, {"client:1": 60, **sizes_of(8, start=5)})
    assert [info.num_examples for info in fed.clients.values()] == [10, 60, 20, 25, 30]
    assert "client:5, client:6, client:7 cannot join" in fed.warnings[0]
    assert "set min_nodes to the number of all clients" in fed.warnings[0]
    admit(fed, sizes_of(8, start=5))
    assert len(fed.warnings) == 1
    play(fed, 2)
    with pytest.raises(
        DeltaflError, match=r"nobody can join, be forgotten or take another place: .* choose"
    ):
        fed.forget(["client:4", "client:2", "client:77"])
    fed.forget(["client:77"])
    assert len(fed.keys) == 5


@pytest.mark.parametrize(
    "label",
    ["pracdelta", "innovation@systematic@innovation", "fedavg", "cluster-is", "k-vib", "census"],
)
def test_a_forgotten_client_leaves_nothing_behind(label: str, tmp_path: Path) -> None:
    targets = {i: float(i) for i in range(5)}
    fed = federation(label, weights="uniform", m=6)
    play(fed, 20, targets={**targets, 5: 1e6})
    kept = fed.current.selected_m[:5]
    fed.forget(["client:5", "client:77"])
    assert fed.keys == [f"client:{i}" for i in range(5)]
    assert np.array_equal(fed.current.selected_m, kept)
    assert fed.plan.population.weight_m.tolist() == [0.2] * 5
    save(tmp_path, fed)
    again = Federation(fed.rules, {"x": np.zeros(3, np.float32)})
    load(tmp_path, again)
    play(again, 40, targets=targets)
    assert np.all(np.abs(again.params_d) < 10)


def test_forgetting_leaves_somebody() -> None:
    fed = federation("uniform", m=3)
    fed.forget(["client:1"])
    with pytest.raises(DeltaflError, match="every known client"):
        fed.forget(["client:0", "client:2"])
    assert len(fed.keys) == 2
