"""One check that every sampler faces, the user's own of ``examples/own_sampler.py`` included;
and what it refuses.
"""

import runpy
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import LastState, LastUpdates, make_problem
from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    Cohort,
    ControlValue,
    ControlVariate,
    DeltaflError,
    KnownUpdates,
    Population,
    Reports,
    Sampler,
    close_round,
    draw_cohort,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.audit import check_control, check_sampler
from deltafl.estimators.table import find_estimator
from deltafl.moves import Moves
from deltafl.types import Oracle

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_sampler.py"
EQUAL_SCORES = {
    name for name, entry in SAMPLERS.items() if entry.scores == "equal" and entry.design is not None
}
#: Other designs than a sampler's own: one of each kind, and one that draws in neighbours.
OTHERS = ["local-pivotal", "simple-random", "poisson", "multinomial", "successive"]
TABLE = [
    name if design == entry.design else f"{name}@{design}"
    for name, entry in SAMPLERS.items()
    for design in ([None] if entry.design is None else [entry.design, *OTHERS])
    if design != "simple-random" or name in EQUAL_SCORES
]


def oracle_for(num_clients: int) -> KnownUpdates:
    return make_problem(np.arange(10, 10 + num_clients), seed=5).oracle


@pytest.mark.sampled(3)
@pytest.mark.parametrize("label", TABLE)
def test_every_sampler_conforms(label: str) -> None:
    """Few draws with another design than a sampler's own, whose probabilities tests/estimators
    enumerates.
    """
    check_sampler(make_sampler(label), oracle=oracle_for(12), draws=100 if "@" in label else 500)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("num_clients", "n"), [(1, 1), (3, 1), (4, 4), (30, 5)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_conforms_for_other_sizes(name: str, num_clients: int, n: int) -> None:
    draws = 200 if num_clients > 4 else 50
    check_sampler(
        make_sampler(name),
        num_clients=num_clients,
        n=n,
        oracle=oracle_for(num_clients),
        draws=draws,
    )


@pytest.mark.parametrize(
    "name", [n for n in SAMPLERS if SAMPLERS[n].design is not None and n not in EQUAL_SCORES]
)
def test_simple_random_sampling_refuses_unequal_scores(name: str) -> None:
    with pytest.raises(DeltaflError, match="simple-random needs equal expectations"):
        check_sampler(SAMPLERS[name].make({}, "simple-random"), oracle=oracle_for(12))
    with pytest.raises(DeltaflError, match=f"write {name}@systematic"):
        make_sampler(f"{name}@simple-random")


# --- the check must be able to fail: samplers with one fault each


class OneState(NamedTuple):
    score_m: Any


@dataclass(frozen=True)
class Faulty(Sampler):
    """A sound sampler by itself; subclasses break one thing."""

    unbiased: bool = True

    def init(self, population: Population) -> Any:
        return OneState(population.weight_m.copy())

    def open(
        self, state: Any, available_m: Any, n: int, rng: Any, oracle: Oracle | None = None
    ) -> Cohort:
        return draw_cohort(state.score_m, n, "systematic", rng, available_m)

    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        score_m = state.score_m.copy()
        score_m[cohort.client_n[reports.responded_n]] *= 1.1
        return OneState(score_m)


class ListState(Faulty):
    def init(self, population: Population) -> Any:
        return population.weight_m.tolist()


class ListInside(Faulty):
    def init(self, population: Population) -> Any:
        return OneState(population.weight_m.tolist())


class Unavailable(Faulty):
    def open(self, state: Any, available_m: Any, *rest: Any) -> Cohort:
        return super().open(state, np.ones_like(available_m), *rest)


class Repeated(Faulty):
    def open(self, *given: Any) -> Cohort:
        cohort = super().open(*given)
        return cohort._replace(client_n=cohort.client_n * 0 + cohort.client_n[0])


class OwnGenerator(Faulty):
    def open(self, state: Any, available_m: Any, n: int, *_: Any) -> Cohort:
        return super().open(state, available_m, n, np.random.default_rng())


class InPlace(Faulty):
    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        state.score_m[cohort.client_n] += 1
        return state


class HeedsTheSilent(Faulty):
    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        score_m = state.score_m.copy()
        score_m[cohort.client_n] = 1 + reports.squared_norm_n
        return OneState(score_m)


class CountsTheSilent(Faulty):
    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        score_m = state.score_m.copy()
        score_m[cohort.client_n] = reports.num_steps_n
        return OneState(score_m)


class Unrepeatable(Faulty):
    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        return OneState(state.score_m * np.random.default_rng().uniform(1, 2, 12))


@dataclass(frozen=True)
class HiddenField(Faulty):
    """Remembers in itself what belongs into the state."""

    rounds: list[int] = field(default_factory=list)

    def open(self, state: Any, available_m: Any, n: int, rng: Any, *_: Any) -> Cohort:
        score_m = state.score_m * (1 + np.arange(12) % (2 + len(self.rounds)))
        return draw_cohort(score_m, n, "systematic", rng, available_m)

    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        self.rounds.append(1)
        return super().update(state, cohort, reports)


class RandomInit(Faulty):
    def init(self, population: Population) -> Any:
        return OneState(np.random.default_rng().random(len(population.weight_m)))


class ThroughTorch(Faulty):
    """A tensor writes through a view that is read-only."""

    def init(self, population: Population) -> Any:
        torch = pytest.importorskip("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight_m = torch.from_numpy(population.weight_m)
        weight_m /= weight_m.max()
        return OneState(weight_m.numpy().copy())


class InADict(Faulty):
    """A dict with the same keys in all rounds is a state, too."""

    def init(self, population: Population) -> Any:
        return {"score_m": population.weight_m.copy()}

    def open(self, state: Any, *given: Any) -> Cohort:
        return super().open(OneState(**state), *given)

    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        return super().update(OneState(**state), cohort, reports)._asdict()


class IntoThePopulation(Faulty):
    def init(self, population: Population) -> Any:
        population.weight_m[:] = 1 / len(population.weight_m)
        return OneState(population.weight_m)


class IntoTheReports(Faulty):
    def update(self, state: Any, cohort: Cohort, reports: Reports) -> Any:
        reports.loss_n[:] = 0
        return state


class IntoTheMask(Faulty):
    def open(self, state: Any, available_m: Any, *rest: Any) -> Cohort:
        available_m[0] = False
        return super().open(state, available_m, *rest)


class WrongExpectations(Faulty):
    def open(self, *given: Any) -> Cohort:
        cohort = super().open(*given)
        return cohort._replace(expected_n=cohort.expected_n * 1.15)


class Starving(Faulty):
    def open(self, state: Any, *rest: Any) -> Cohort:
        return super().open(OneState(state.score_m * (np.arange(len(state.score_m)) != 5)), *rest)


class Successive(Faulty):
    def open(self, state: Any, available_m: Any, n: int, rng: Any, *_: Any) -> Cohort:
        return draw_cohort(state.score_m, n, "successive", rng, available_m)


class TooMany(Faulty):
    def open(self, state: Any, available_m: Any, n: int, *rest: Any) -> Cohort:
        return super().open(state, available_m, n + 1, *rest)


class NoCohort(Faulty):
    def open(self, *given: Any) -> Any:
        return super().open(*given).client_n


class OthersForNoMask(Faulty):
    accepts_no_mask = True

    def open(self, state: Any, available_m: Any, *rest: Any) -> Cohort:
        all_but_one = np.arange(len(state.score_m)) > 0
        return super().open(state, all_but_one if available_m is None else available_m, *rest)


def test_the_sound_ones_pass() -> None:
    check_sampler(Faulty())
    check_sampler(InADict())
    check_sampler(make_sampler("pracdelta@ordered-pivotal"))  # which accepts no mask
    check_sampler(replace(Successive(), unbiased=False))
    check_sampler(runpy.run_path(str(EXAMPLE))["ByLoss"]())


@pytest.mark.parametrize(
    ("sampler", "part"),
    [
        (ListState(), "the state is a list, not an array, nor a NamedTuple or a dict of arrays"),
        (ListInside(), "score_m in the state is a list, not an array"),
        (RandomInit(), "init gives another state for the same population"),
        (ThroughTorch(), "init changes the population in place"),
        (HiddenField(), "after later rounds open gives another cohort"),
        (Unrepeatable(), "update gives another state for the same state and reports"),
        (CountsTheSilent(), "clients that did not respond"),
        (Unavailable(), "not available"),
        (Repeated(), "sorted, without repetition"),
        (OwnGenerator(), "another cohort for the same state and generator"),
        (InPlace(), "update changes the state in place"),
        (HeedsTheSilent(), "clients that did not respond"),
        (WrongExpectations(), "has mean 0.8"),
        (Starving(), "client 5 was in none of 8000 draws"),
        (Successive(), "claims to be unbiased"),
        (TooMany(), "draws 5 clients in the mean where n = 4"),
        (TooMany(unbiased=False), "draws 5 clients in the mean where n = 4"),
        (NoCohort(), "open returns a ndarray, not a Cohort"),
        (OthersForNoMask(), "accepts_no_mask"),
        (object(), "a sampler is a subclass of deltafl.Sampler"),
        (make_sampler("fedis"), "needs an oracle"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_are_found(sampler: Any, part: str) -> None:
    with pytest.raises(AssertionError, match=part):
        check_sampler(sampler, draws=8000)


@pytest.mark.parametrize("name", ["num_clients", "n", "draws", "seed"])
@pytest.mark.parametrize("value", [-1, None, 2.0, float("nan"), "3", "\x1b[31m", [1], np.ones(2)])
def test_what_is_no_count_is_refused(name: str, value: Any) -> None:
    given: Any = {"draws": 20, name: value}
    with pytest.raises(DeltaflError, match=r"whole number|sample"):
        check_sampler(make_sampler("uniform"), **given)


@pytest.mark.parametrize("name", ["num_clients", "n", "draws"])
@pytest.mark.parametrize("value", [0, True, 10**12, 10**400])
def test_counts_have_limits(name: str, value: int) -> None:
    given: Any = {"draws": 20, name: value}
    with pytest.raises(DeltaflError, match=r"must be"):
        check_sampler(make_sampler("uniform"), **given)


@pytest.mark.parametrize("sampler", [IntoThePopulation(), IntoTheReports(), IntoTheMask()])
def test_nobody_writes_into_what_it_is_given(sampler: Sampler) -> None:
    """It would change the target, the record, or the caller's mask: in rounds, too, it raises."""
    with pytest.raises(ValueError, match="read-only"):
        check_sampler(sampler)
    population = Population.from_sizes([10, 10, 10, 300])
    available_m = np.ones(4, bool)
    with pytest.raises(ValueError, match="read-only"):
        plan = make_plan(sampler, population, n=2)
        state = init_round(plan, np.zeros(2))
        cohort = open_round(plan, state, available_m)
        close_round(plan, state, cohort, np.ones((2, 2)))
    assert available_m.all()
    assert population.weight_m[3] == pytest.approx(300 / 330)


class ForgetsWeights(LastUpdates):
    def value(self, state: LastState, client_n: Any) -> ControlValue:
        return ControlValue(state.control_md.mean(axis=0), state.control_md[client_n])


class SumOfDrawn(LastUpdates):
    def value(self, state: LastState, client_n: Any) -> ControlValue:
        weight_n = state.weight_m[client_n]
        total_d = weight_n @ state.control_md[client_n] / weight_n.sum()
        return ControlValue(total_d, state.control_md[client_n])


class RowsOfDraw(LastUpdates):
    def value(self, state: LastState, client_n: Any) -> ControlValue:
        control_nd = state.control_md[client_n]
        if len(control_nd) < len(state.weight_m):
            control_nd = control_nd - control_nd.mean(axis=0)
        return ControlValue(state.weight_m @ state.control_md, control_nd)


class WritesInPlace(LastUpdates):
    def update(self, state: Any, population: Any, replies: Any, update_nd: Any) -> LastState:
        state.control_md[replies.client_n] = update_nd
        return LastState(state.control_md, state.weight_m)


class Follows(LastUpdates):
    def resized(self, state: LastState, moves: Moves) -> LastState:
        return LastState(moves.rows(state.control_md, 0.0), moves.population.weight_m)


class KeepsItsWeights(LastUpdates):
    """Sound until somebody joins or leaves."""

    def resized(self, state: LastState, moves: Moves) -> LastState:
        weight_m = moves.rows(state.weight_m, 0.0)
        return LastState(moves.rows(state.control_md, 0.0), weight_m)


class OfLabels(LastUpdates):
    """Asks what else is known of clients."""

    def init(self, population: Population, num_params: int) -> LastState:
        assert population.aux_mq is not None and population.strata is not None
        assert population.cost_m is not None
        return super().init(population, num_params)


def test_sound_control_variates_pass() -> None:
    for sound in (LastUpdates(), Follows(), OfLabels()):
        check_control(sound)
    for name in ESTIMATORS:
        check_control(find_estimator(name).control)


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (ForgetsWeights(), "total_d is not the sum of w_j c_j"),
        (SumOfDrawn(), "total_d depends on which clients were drawn"),
        (RowsOfDraw(), "rows of clients depend on who else was drawn"),
        (WritesInPlace(), "update changes the state in place"),
        (KeepsItsWeights(), "total_d is not the sum of w_j c_j"),
    ],
)
def test_control_variates_that_bias_an_estimate_are_found(
    control: ControlVariate, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        check_control(control)
