"""One round from outside: what is refused, what is left alone, what a person is shown."""

import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from conftest import Recorder, all_cohorts, estimate, make_problem, play, reports_of, same_tree
from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    Census,
    Cohort,
    DeltaflError,
    Fixed,
    Full,
    Momentum,
    Plan,
    Population,
    PracDelta,
    Reports,
    RoundInfo,
    RoundState,
    Sgd,
    broadcast,
    close_round,
    close_round_from_sum,
    init_round,
    load_state,
    make_plan,
    make_sampler,
    make_server_optimizer,
    open_round,
    recommend,
    resize_state,
    save_state,
    unflatten,
)
from deltafl.accumulate import Accumulator
from deltafl.estimators.control_variates import ControlVariate
from deltafl.estimators.own import CommonControlState
from deltafl.scale.numerics import inner
from deltafl.screening import screen_replies
from deltafl.server.ghbm import Ghbm
from deltafl.server.norms import measure
from deltafl.server.optimizers import SERVER_OPTIMIZERS
from deltafl.server.size import Budget, RelativeError
from deltafl.server.table import SETTINGS
from tools.samplers import cohort_of

PROBLEM = make_problem([10, 15, 20, 25, 30, 35])
POPULATION = PROBLEM.population
THREE = Population.from_sizes([1, 1, 2])
#: For arguments of a wrong type.
ANY_PLAN: Any = Plan
ANY_MAKE: Any = make_plan
START_D = np.array([1.0, 2.0, 3.0], dtype=np.float32)


def opened(plan: Plan) -> tuple[RoundState, Cohort]:
    state = play(plan, init_round(plan, START_D), [PROBLEM])
    return state, open_round(plan, state, oracle=PROBLEM.oracle)


def label_of(name: str) -> str:
    """A sampler that fits a model of three parameters."""
    return "hics-fl(classes=3)" if name == "hics-fl" else name


def closed(updates: Any, label: str = "uniform", reports: Any = None) -> RoundInfo:
    """One round of three clients, all selected, and a model of two parameters."""
    plan = make_plan(label, Population.from_sizes([1, 2, 3]), 3)
    state = init_round(plan, np.zeros(2))
    return close_round(plan, state, open_round(plan, state), updates, reports)[1]


class Tensor:
    """Torch hands over no tensor that requires a gradient."""

    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


class Liar:
    """It says that it has another shape than its numbers."""

    def __init__(self, numbers: Any) -> None:
        self.shape = (3,)
        self.numbers = numbers

    def __array__(self, *_: object, **__: object) -> Any:
        return np.asarray(self.numbers, float)


BAD_UPDATES = {
    "longer than it says": Liar(np.ones(5)),
    "a matrix, not as it says": Liar(np.ones((3, 1))),
    "a number, not as it says": Liar(1.0),
    "nan": np.array([1, np.nan, 1]),
    "infinite": np.array([1, -np.inf, 1]),
    "too short": np.zeros(2),
    "matrix": np.zeros((3, 1)),
    "scalar": 7.0,
    "huge": np.array([0, 2e18, 0]),
    "beyond float32": np.array([0, 1e300, 0]),
    "beyond float64": [0, 10**400, 0],
    "words": ["a", "b", "c"],
    "ragged": [[1, 2], [3]],
    "mapping": {"weights": 1},
    "tensor": Tensor(),
    "masked": np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]),
    "complex": np.array([1 + 2j, 1, 1]),
}


@pytest.mark.parametrize("label", ["md", "pracdelta@pivotal@difference", "cluster-is"])
@pytest.mark.parametrize("fault", BAD_UPDATES)
def test_a_bad_update_counts_as_no_reply(fault: str, label: str) -> None:
    """The model and every memory equal those of the run in which that client stayed silent."""
    plan = make_plan(label, POPULATION, 4)
    state, cohort = opened(plan)
    reports = reports_of(PROBLEM, cohort)
    updates = list(PROBLEM.update_md[cohort.client_n])
    bad, info = close_round(
        plan, state, cohort, [updates[0], BAD_UPDATES[fault], *updates[2:]], reports
    )
    silent = reports._replace(responded_n=np.arange(len(updates)) != 1)
    quiet, quiet_info = close_round(plan, state, cohort, [updates[0], None, *updates[2:]], silent)
    assert same_tree(bad, quiet)
    assert [(reply.client, "update" in reply.reason) for reply in info.rejected] == [
        (cohort.client_n[1], True)
    ]
    assert quiet_info.rejected == []
    assert info.num_responded == info.num_selected - 1 == len(updates) - 1
    assert same_tree(info._replace(rejected=[]), quiet_info)


def test_a_masked_table_is_refused_row_by_row() -> None:
    rejected = closed(np.ma.array(np.ones((3, 2)), mask=[[False, True]] * 3)).rejected
    assert ["masked numbers" in reply.reason for reply in rejected] == [True] * 3


@pytest.mark.parametrize(
    "held",
    [
        list,
        iter,
        lambda rows: dict(enumerate(rows)).values(),
        lambda rows: pd.Series([*rows], index=[2, 1, 0]),
        # Of as many clients as parameters: its columns would fit, too.
        pd.DataFrame,
    ],
)
def test_updates_count_in_their_order_whatever_holds_them(held: Callable[[Any], Any]) -> None:
    plan = make_plan("uniform", [1, 2, 3], n=3)
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    rows = np.arange(9.0).reshape(3, 3)
    following, _ = close_round(plan, state, cohort, held(rows))
    np.testing.assert_allclose(following.params_d, [1, 2, 3] @ rows / 6, rtol=1e-6)


@pytest.mark.parametrize(
    ("column", "entry", "reason"),
    [
        *(("loss", entry, "loss is nan") for entry in (np.nan, "much", 10**400, [1.0], np.ones(2))),
        ("loss", -1e30, "loss is -1e"),
        ("step_variance", -1e-9, "step variance is -1e-09"),
        *(
            ("step_variance", entry, "step variance is nan")
            for entry in (np.nan, "much", None, [1.0])
        ),
        ("step_variance", 1e300, "step variance is 1e"),
        *(
            ("num_steps", entry, "number of local steps is 0")
            for entry in (0, 10**30, "many", [1, 2])
        ),
        ("num_steps", None, "number of local steps is"),
        ("square_loss", np.inf, "mean squared loss is inf"),
        *(("square_loss", entry, "mean squared loss is -1.0") for entry in (-1, "much")),
        ("square_loss", 0.0, "mean squared loss is 0.0, expected"),
    ],
)
def test_a_bad_report_counts_as_no_reply(column: str, entry: object, reason: str) -> None:
    plan = Plan(POPULATION, PracDelta(), 4)
    state, cohort = opened(plan)
    columns: dict[str, Any] = {"loss": [1.0] * 4, "step_variance": [0.5, 1.0, 2.0, 3.0]}
    columns[column] = [1, 1, entry, 1]
    updates = PROBLEM.update_md[cohort.client_n]
    reports = Reports.make(4, **columns)
    bad, info = close_round(plan, state, cohort, updates, reports)
    quiet, _ = close_round(plan, state, cohort, [*updates[:2], None, updates[3]], reports)
    assert same_tree(bad, quiet)
    assert [(reply.client, reply.reason[: len(reason)]) for reply in info.rejected] == [
        (cohort.client_n[2], reason)
    ]
    assert np.isfinite(info.loss)


def test_a_mean_square_is_no_less_than_the_square_of_the_mean() -> None:
    """By Jensen's inequality; 1 % and 1e-7 are for rounding, and a loss that was not reported
    bounds nothing.
    """
    loss = [2.0, 2.0, -2.0, 2e-4, 1e18, None, 1.0]
    square = [3.97, 3.95, 3.95, 0.0, 1.1e36, 0.0, None]
    cohort = Cohort(np.arange(7), np.ones(7, dtype=np.int64), np.ones(7))
    replies = screen_replies(
        cohort, np.ones((7, 2)), Reports.make(7, loss=loss, square_loss=square), 2
    )
    assert [reply.client for reply in replies.rejected] == [1, 2]
    assert "is 3.95, expected 3.96 to 1e+72" in replies.rejected[0].reason
    np.testing.assert_array_equal(
        replies.reports.square_loss_n, [3.97, 0.0, 0.0, 0.0, 1.1e36, 0.0, np.nan]
    )


def test_the_largest_values_that_pass_do_no_harm() -> None:
    """At the limits nothing overflows: not the model, not a memory, not what is shown."""
    plan = Plan(POPULATION, PracDelta(), 4)
    state, cohort = opened(plan)
    reports = Reports.make(
        4, loss=[1e18] * 4, square_loss=[1e72] * 4, step_variance=[1e36] * 4, num_steps=[2**62] * 4
    )
    following, info = close_round(plan, state, cohort, np.full((4, 3), 1e18), reports)
    assert np.all(np.isfinite(following.params_d))
    assert following.sampler.p_m.sum() == pytest.approx(1)
    assert all(np.isfinite(value) for value in (info.loss, info.variance, info.estimate_norm))


@pytest.mark.parametrize(
    "label", ["md", "full", "fedis", "pracdelta", "cluster-is", "power-of-choice"]
)
def test_all_replies_missing(label: str) -> None:
    """The model stays where it is, the sampler has learned nothing, the counts go on."""
    plan = make_plan(label, POPULATION, 3)
    state, cohort = opened(plan)
    following, info = close_round(plan, state, cohort, [None] * len(cohort.client_n))
    assert np.array_equal(following.params_d, state.params_d)
    assert same_tree(following.sampler, state.sampler)
    assert following.round == state.round + 1
    assert following.responded_m.sum() == state.responded_m.sum()
    assert following.selected_m.sum() == state.selected_m.sum() + len(cohort.client_n)
    assert {reply.reason for reply in info.rejected} == {"no reply"}
    assert (
        info.sum_of_weights
        == info.largest_weight
        == info.effective_sample_size
        == info.estimate_norm
        == 0
    )
    assert np.isnan(info.loss)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_empty_poisson_cohort(estimator: str) -> None:
    """Nobody is selected: a round like any other. Nothing is redrawn."""
    plan = Plan(POPULATION, Fixed(design="poisson"), 1, estimator)
    state = init_round(plan, START_D)
    empty = next(
        r for r in range(100) if len(open_round(plan, state._replace(round=r)).client_n) == 0
    )
    state = state._replace(round=empty)
    following, info = close_round(plan, state, open_round(plan, state), [])
    assert np.array_equal(following.params_d, START_D)
    assert (following.round, info.num_selected, info.variance) == (empty + 1, 0, 0)


@pytest.mark.parametrize(
    ("name", "estimator", "optimizer"),
    [
        *product(SAMPLERS, ["horvitz-thompson", "difference", "difference-own"], ["sgd"]),
        *product(["uniform", "innovation"], ["difference-own"], SERVER_OPTIMIZERS),
    ],
)
def test_rounds_are_opened_and_closed_again_with_the_same_bits(
    name: str, estimator: str, optimizer: str
) -> None:
    estimator = "plain-mean" if SAMPLERS[name].scores == "unknown" else estimator
    plan = Plan(
        POPULATION, make_sampler(label_of(name)), 3, estimator, (make_server_optimizer(optimizer),)
    )
    state, cohort = opened(plan)
    reports = reports_of(PROBLEM, cohort)
    update_nd = PROBLEM.update_md[cohort.client_n]
    before = deepcopy((state, cohort, reports, update_nd))
    following, _ = close_round(plan, state, cohort, update_nd, reports)
    again, _ = close_round(
        plan, state, open_round(plan, state, oracle=PROBLEM.oracle), update_nd, reports
    )
    assert same_tree(before, (state, cohort, reports, update_nd))
    assert same_tree(following, again)
    assert following.params_d.dtype == np.float32
    assert not np.array_equal(following.params_d, state.params_d)


@pytest.mark.parametrize("label", ["uniform", "uniform+average=0.5", "uniform+mime=0.5"])
def test_training_in_place_cannot_change_a_state_or_a_cohort(tmp_path: Path, label: str) -> None:
    # Else the update is 0, and what one client did is the model of the next.
    plan = make_plan(label, [1] * 4, n=2)
    state = init_round(plan, np.zeros(3))
    state, _ = close_round(plan, state, open_round(plan, state), np.ones((2, 3)))
    save_state(tmp_path / "state", state, plan)
    states = [
        init_round(plan, np.zeros(3)),
        state,
        load_state(tmp_path / "state", plan),
        resize_state(make_plan(label, [1] * 5, n=2), state, kept=range(4)),
    ]
    for one in states:
        with pytest.raises(ValueError, match="read-only"):
            one.params_d[:] -= 1.0
    for array in (plan.model(state), open_round(plan, state).client_n):
        with pytest.raises(ValueError, match="read-only"):
            array[:] -= 1


def test_draws_depend_on_seed_and_round() -> None:
    plans = [Plan(POPULATION, Fixed(), 3, seed=seed) for seed in range(6)]
    states = [init_round(plans[0], START_D)._replace(round=round) for round in range(6)]
    assert (
        len({tuple(open_round(plan, state).client_n) for plan in plans for state in states}) > 10
    )  # of 20


def test_the_simplest_round_by_hand() -> None:
    """Sizes (1, 2, 5), all selected, server rate 1: x + (1 * 8 + 2 * 4 + 5 * 1.6) / 8 = x + 3."""
    plan = Plan(Population.from_sizes([1, 2, 5]), Full(), 3)
    params_d = np.array([10.0], dtype=np.float32)
    state = init_round(plan, params_d)
    params_d += 1  # the model is a copy
    state, info = close_round(
        plan, state, open_round(plan, state), [np.array([8.0]), np.array([4.0]), np.array([1.6])]
    )
    assert state.params_d[0] == pytest.approx(13)
    assert (info.round, state.round, info.num_selected, info.num_responded) == (0, 1, 3, 3)
    assert info.estimate_norm == pytest.approx(3)
    assert state.selected_m.tolist() == state.responded_m.tolist() == [1, 1, 1]


def test_loss_and_diversity_by_hand() -> None:
    """Loss: weighted by the coefficients. Diversity: about the plain mean of the replies, 3, 3
    and 0 from it.
    """
    plan = Plan(THREE, Full(), 3)
    state = init_round(plan, np.zeros(1))
    updates = [np.array([1.0]), np.array([7.0]), np.array([4.0])]
    reports = Reports.make(3, loss=[1.0, 2.0, 4.0])
    _, info = close_round(plan, state, open_round(plan, state), updates, reports)
    assert info.loss == pytest.approx(0.25 + 0.5 + 2)
    assert info.mean_over_diversity == pytest.approx(4 / 2)


def test_the_loss_is_that_of_the_replies_that_have_one() -> None:
    plan = Plan(THREE, Full(), 3)
    state = init_round(plan, np.zeros(1))
    updates = np.ones((3, 1))
    cohort = open_round(plan, state)
    assert Reports.make(3, loss=np.ones(3)).has_loss_n.all()
    for reports in (None, Reports.make(3), Reports.make(3, loss=[None] * 3)):
        following, info = close_round(plan, state, cohort, updates, reports)
        assert np.isnan(info.loss)
        assert (info.num_responded, info.rejected, following.params_d.tolist()) == (3, [], [1.0])
    _, info = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0, None, 4.0]))
    assert info.loss == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)
    _, info = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0, None, np.nan]))
    assert info.loss == 1
    assert [(reply.client, reply.reason[:11]) for reply in info.rejected] == [(2, "loss is nan")]


@pytest.mark.parametrize("label", ["oort", "active-fl"])
def test_replies_without_a_loss_are_refused_where_it_is_learned_from(label: str) -> None:
    plan = make_plan(label, POPULATION, 3)
    state, cohort = opened(plan)
    updates = PROBLEM.update_md[cohort.client_n]
    reports = Reports.make(3, loss=[2.0, None, 3.0])
    following, info = close_round(plan, state, cohort, updates, reports)
    quiet, _ = close_round(plan, state, cohort, [updates[0], None, updates[2]], reports)
    assert same_tree(following, quiet)
    assert [(reply.client, "has no loss" in reply.reason) for reply in info.rejected] == [
        (cohort.client_n[1], True)
    ]


@pytest.mark.parametrize(
    "label", ["uniform", "md", "md-fixed", "fedis", "cluster-is", "uniform@poisson"]
)
@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference"])
def test_with_a_mask_the_estimate_targets_who_is_available(label: str, estimator: str) -> None:
    available_m = np.array([True, False, True, True, False, True])
    target_d = POPULATION.weight_m[available_m] @ PROBLEM.update_md[available_m].astype(np.float64)
    plan = Plan(POPULATION, make_sampler(label), 2, estimator, (Recorder(),))
    state = init_round(plan, START_D)
    if estimator == "difference":
        state = state._replace(control=CommonControlState(np.array([5.0, 6, 7])))
        target_d += POPULATION.weight_m[~available_m].sum() * np.array([5.0, 6, 7])
    mean_d = np.zeros(3)
    for probability, cohort in all_cohorts(
        plan, state, PROBLEM.oracle, available_m.astype(np.float64)
    ):
        assert np.all(available_m[cohort.client_n])
        mean_d += probability * estimate(
            plan, state, cohort, list(PROBLEM.update_md[cohort.client_n])
        )
    np.testing.assert_allclose(mean_d, target_d, rtol=1e-12)


# --- mistakes of the host


@pytest.mark.parametrize("name", [name for name in SAMPLERS if make_sampler(name).needs_oracle])
def test_theoretical_samplers_need_an_oracle(name: str) -> None:
    plan = make_plan(name, POPULATION, 3)
    with pytest.raises(DeltaflError, match="choose a practical sampler such as 'pracdelta'"):
        open_round(plan, init_round(plan, START_D))


@pytest.mark.parametrize("name", SAMPLERS)
def test_somebody_must_be_available(name: str) -> None:
    # It has to find the output layer.
    plan = make_plan(name.replace("hics-fl", "hics-fl(classes=3)"), POPULATION, 3)
    state = init_round(plan, START_D)
    with pytest.raises(DeltaflError, match="no client is available"):
        open_round(plan, state, np.zeros(6, dtype=bool), PROBLEM.oracle)
    for wrong in (np.ones(5, dtype=bool), np.arange(6), [np.nan] * 6, ["a"] * 6):
        with pytest.raises(
            DeltaflError,
            match=r"available_m is .*; it must hold True or False for each of 6",
        ):
            open_round(plan, state, wrong, PROBLEM.oracle)  # type: ignore[arg-type]


def changed(cohort: Cohort, name: str, value: Any) -> Cohort:
    return cohort._replace(**{name: value})


@pytest.mark.parametrize(
    ("cohort", "words"),
    [
        (
            cohort_of([0, 6], [1, 1], [0.5, 0.5]),
            r"client_n is .*; it must hold different clients from 0 to 5",
        ),
        (cohort_of([-1, 0], [1, 1], [0.5, 0.5]), r"different clients from 0 to 5"),
        (cohort_of([3, 1, 3], [1, 1, 1], [0.5, 0.5, 0.5]), "count_n how often each was drawn"),
        (
            cohort_of([0], [1], [0.5])._replace(client_n=np.array([0.0])),
            "different clients from 0 to 5",
        ),
        (Cohort(*cast(Any, ([0], [1], [0.5]))), "give NumPy arrays"),
        (cohort_of([0, 1], [1, 0], [0.5, 0.5]), "count_n is .* was drawn once or more"),
        (cohort_of([0, 1], [1, 1], [0.5, 0.0]), "its expectation is above 0"),
        (cohort_of([0, 1], [1, 1], [np.nan, -0.5]), "its expectation is above 0"),
        *(
            (changed(cohort_of([0, 1], [1, 1], [0.5, 0.5]), name, [1, 1]), "give NumPy arrays")
            for name in ("absent", "stratum_n", "stage_n", "cost_n")
        ),
        *(
            (changed(cohort_of([0], [1], [0.5]), name, np.ones(2)), "kind and round are")
            for name in ("kind", "round")
        ),
    ],
)
def test_a_sampler_that_returns_clients_twice_or_unknown_ones_is_refused(
    cohort: Cohort, words: str
) -> None:
    @dataclass(frozen=True)
    class Wrong(Fixed):
        def open(self, *_: object) -> Cohort:
            return cohort

    plan = Plan(POPULATION, Wrong(), 2)
    with pytest.raises(DeltaflError, match=words):
        open_round(plan, init_round(plan, [0.0]))


def test_a_cohort_may_come_from_a_file_with_its_round_as_numpy_has_it() -> None:
    plan = plan_of()
    state = init_round(plan, [0.0])
    cohort = open_round(plan, state)
    kept = changed(cohort, "round", np.int64(0))
    replies = [[0.5], [0.25]]
    assert close_round(plan, state, kept, replies)[0].params_d == (
        close_round(plan, state, cohort, replies)[0].params_d
    )


def plan_of(population: Population = POPULATION, n: int = 2, **options: Any) -> Plan:
    return Plan(population, Fixed(), n, **options)


sizes: Any = Population.from_sizes
asked: Any = Census(2, 4)
planned: Any = make_plan


STRANGER = cohort_of([6], [1], [1.0])
DRAWN_BEFORE = STRANGER._replace(client_n=np.array([0]), round=6)


def weighted(weights: list[float]) -> Plan:
    return plan_of(Population(np.array(weights), np.ones(2, dtype=np.int64)), 1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *((lambda n=n: plan_of(n=n), f"cannot sample {n} of 6") for n in (0, 7)),
        (lambda: plan_of(estimator="best"), "unknown estimator"),
        *((lambda q=q: plan_of(response_floor=q), "response_floor") for q in (0.0, 1.5, np.nan)),
        (lambda: weighted([0.5, 0.6]), "sum 1"),
        (lambda: weighted([np.nan, 1]), "sum 1"),
        (lambda: weighted([0.2, 0.3, 0.5]), "3 weights and 2 sizes"),
        (
            lambda: init_round(plan_of(), np.zeros((2, 2))),
            r"params of shape \(2, 2\), 0 not finite; give a flat",
        ),
        (lambda: init_round(plan_of(), [1.0, np.nan]), "finite numbers"),
        (lambda: init_round(plan_of(), ["a"]), "list of numbers: write deltafl.flatten"),
        (lambda: sizes([]), "at least one size"),
        (lambda: sizes([1.5, 2.0]), "whole numbers, 1 to"),
        (lambda: sizes([2**62] * 3), r"whole numbers, 1 to 2\^53"),
        (lambda: sizes([1, 2], "size"), "weights is 'size'"),
        (lambda: sizes([1, 2], aux=[[1], [1, 2]]), "one row of numbers"),
        (
            lambda: sizes([1, 2], aux=[[1.0], [1e160]]),
            "of client 1 holds a number that is not finite, or",
        ),
        (
            lambda: plan_of(THREE._replace(aux_mq=np.array([[1], [np.nan], [2]]))),
            "client 1 holds a number that is not",
        ),
        (lambda: ANY_MAKE("uniform", [120.5, 40.0], 1), "whole numbers, 1 to"),
        (lambda: ANY_MAKE("uniform", [120, 40], "1"), "cannot sample '1' of 2 clients"),
        (lambda: ANY_MAKE(Fixed, THREE, 1), "a label is text such as 'innovation', not <class"),
        (lambda: ANY_MAKE(recommend(), THREE, 1), r"recommendation has it as .label \+ .settings"),
        (lambda: ANY_PLAN([120, 40], Fixed(), 1), "population is .*; write Population.from_sizes"),
        (lambda: ANY_PLAN(THREE, Fixed, 1), "sampler is <class .*; write make_sampler"),
        (lambda: ANY_PLAN(THREE, Fixed(), 1, parts=(Sgd,)), "parts has <class"),
        (lambda: ANY_PLAN(THREE, Fixed(), 1, seed=1.5), "seed is 1.5; write a whole number"),
        (
            lambda: ANY_PLAN(THREE, Fixed(), 1, memory="bfloat16"),
            r"memory is 'bfloat16'; write RowFormat",
        ),
        (lambda: ANY_PLAN(THREE, Fixed(), True), "cannot sample True of 3"),
        (
            lambda: ANY_MAKE("uniform@@difference", [1, 2], 1, estimator="hajek"),
            "has an estimator, and .* leave out",
        ),
        (
            lambda: ANY_MAKE("fedvarp+scaffold=no", [1, 2], 1),
            "scaffold is 'no'; write True or False",
        ),
        (
            lambda: ANY_MAKE("uniform+average=nan", [1, 2], 1),
            r"average is 'nan'; it must be in \[0, 1\)",
        ),
        (
            lambda: ANY_MAKE("innovation(sketch=-1)@cube", [1, 2], 1),
            r"sketch is -1; it must be in \[0, 128\]",
        ),
        (lambda: ANY_MAKE("pracdelta(alpha=(1e308, 1e308))", [1, 2], 1), "write a number above 0"),
        (
            lambda: ANY_MAKE("pracdelta(alpha=inf)", [1, 2], 1),
            "alpha is 'inf'; write a number above 0",
        ),
        (
            lambda: ANY_PLAN(sizes([1, 1])._replace(weight_m=[0.5] * 2), Fixed(), 1),
            "an array of numbers >= 0 with sum 1",
        ),
        (lambda: sizes([[1], [1, 2]]), r"num_examples_m is \[\[1\], \[1, 2\]\]; write a list"),
        (lambda: sizes([1, 2], weights=[0.5, 0.5]), r"weights is \[0.5, 0.5\]"),
        (lambda: sizes([1, 2], max_ratio="2"), "max_ratio is '2'"),
        (
            lambda: make_plan("census", [1, 2], 1).with_census(np.zeros(2)),
            r"not an array of shape \(2,\)",
        ),
        (
            lambda: close_round(plan_of(), init_round(plan_of(), [0.0]), STRANGER, [[1.0]]),
            "the cohort's client_n is",
        ),
        (
            lambda: open_round(plan_of(THREE), init_round(plan_of(), [0.0])),
            "state is of 6 clients and the plan of 3",
        ),
        (
            lambda: close_round(plan_of(THREE), init_round(plan_of(), [0.0]), STRANGER, [[1.0]]),
            "state is of 6 clients and the plan of 3; give its own plan",
        ),
        (
            lambda: close_round(
                plan_of(), init_round(plan_of(), [0.0])._replace(round=7), DRAWN_BEFORE, [[1.0]]
            ),
            "drawn in round 6 and the state is that of round 7",
        ),
        (
            lambda: ANY_PLAN(THREE, Fixed(), 1, estimator=ControlVariate),
            "estimator is <class .*; write its name",
        ),
        (
            lambda: Reports.make(3, loss=[1.0, 2.0]),
            "loss must have one number for each of 3 clients",
        ),
        (lambda: Reports.make(1, loss=0.5), "loss must have one number for each of 1 clients"),
        (lambda: Reports.make(2, responded=[4, 1]), r"responded is \[4, 1\]; it must hold True"),
        (
            lambda: Reports.make(2, responded=["True", "False"]),
            "responded is .*; it must hold True",
        ),
        (lambda: Reports.make(2, responded=[True, None]), "responded is .*; it must hold True"),
        (lambda: unflatten([1j], like=[np.zeros(1)]), "the vector has complex or masked"),
        (lambda: unflatten(["a"], like=[np.zeros(1)]), "the vector is not one list of numbers"),
        (lambda: closed(np.ones((2, 2))), "3 clients"),
        (lambda: closed(np.ones((3, 2)), reports=Reports.make(4)), "3 clients"),
        (
            lambda: closed({0: np.ones(2)}),
            "updates are a dict; give a list or an array, in the order of cohort",
        ),
        (lambda: init_round(plan_of(), np.array([1j])), "the model has complex or masked"),
        (lambda: init_round(plan_of(), np.ma.array([1.0], mask=[True])), "the model has complex"),
        (lambda: init_round(plan_of(), []), "numbers, one at least"),
        (lambda: sizes([1.0, 2.0]), "is of type float64; write"),
        (lambda: sizes([3, 0]), "client 1 has 0 examples; give whole numbers"),
        (lambda: sizes([1], strata={"a": "north"}), "strata is {'a': 'north'}; give a list"),
        (lambda: sizes([1], aux=[Tensor()]), "aux must hold one row of numbers"),
        (lambda: closed(None), "updates are a NoneType; give a list"),
        *(
            (partial(planned, "uniform", [1] * 4, 2, **{name: np.ones(2)}), f"{name} is array")
            for name in SETTINGS
        ),
        (partial(make_plan, "uniform", [1] * 4, 2, budget=10**400), "budget is 1000"),
        (lambda: sizes([1, 2], max_ratio=10**400), "max_ratio is 1000"),
        (lambda: asked.answer({"a": 1}), "the update is not one list of numbers"),
        (lambda: asked.answer("words"), "the update is not one list of numbers"),
        (lambda: asked.population(sizes([1, 2]), np.array(3)), "not an array of shape"),
        (
            lambda: closed(np.ones((3, 2)), reports=[0.5, 1.0, 2.0]),
            r"reports are a list; write Reports.make\(3, loss=losses\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        make()


def test_populations_by_hand() -> None:
    assert sizes([1, 3]).weight_m.tolist() == [0.25, 0.75]
    uniform = sizes([1, 3], "uniform")
    assert [uniform.weight_m.tolist(), uniform.num_examples_m.tolist()] == [[0.5, 0.5], [1, 3]]
    large = sizes([2**53] * 3000)
    assert large.weight_m.min() > 0
    assert large.weight_m.sum() == pytest.approx(1)


# --- screening


def test_rows_of_missing_clients_are_neutral_for_samplers() -> None:
    """A sampler that forgot to look at ``responded_n`` must still not meet NaN, or numbers of a
    refused reply.
    """
    cohort = Cohort(np.array([0, 1, 2]), np.ones(3, dtype=np.int64), np.full(3, 0.5))
    columns = {
        "loss": [1.0, np.nan, 3.0],
        "square_loss": [2.0, np.nan, np.inf],
        "step_variance": [1.0, 2.0, np.inf],
    }
    bad = Reports.make(3, num_steps=[4, 5, 6], **columns)
    replies = screen_replies(cohort, [np.array([1.0, 2.0]), np.array([9.0, 9.0]), None], bad, 2)
    measured = measure(replies.update_nd, replies.reports)
    rows = [measured.responded_n, measured.loss_n, measured.square_loss_n, measured.step_variance_n]
    assert np.array_equal(rows, [[1, 0, 0], [1, 0, 0], [2, 0, 0], [1, 0, 0]])
    rows = [measured.num_steps_n, measured.squared_norm_n, measured.squared_deviation_n]
    assert np.array_equal(rows, [[4, 1, 1], [5, 0, 0], [0, 0, 0]])
    assert replies.update_nd.tolist() == [[1, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize("d", [1, 127, 129, 4097, 70001])
def test_norms_have_the_same_bits_however_many_are_measured_at_once(d: int) -> None:
    rng = np.random.default_rng(d)
    update_nd = (rng.normal(size=(9, d)) * 10 ** rng.uniform(-3, 3, size=(9, 1))).astype(np.float32)
    reports = measure(update_nd, Reports.make(9))
    wide_nd = update_nd.astype(np.float64)
    mean_d = np.average(update_nd, axis=0)
    assert reports.squared_norm_n.tolist() == [inner(row_d, row_d) for row_d in wide_nd]
    np.testing.assert_allclose(
        reports.squared_norm_n, [row_d @ row_d for row_d in wide_nd], rtol=1e-13
    )
    deviation_n = [np.sum((row_d - mean_d) ** 2) for row_d in wide_nd]
    np.testing.assert_allclose(reports.squared_deviation_n, deviation_n, rtol=1e-13)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_closing_a_round_takes_at_most_four_times_the_memory_of_its_updates(estimator: str) -> None:
    """What is made anew: the model, its step, and a table of new rows or slopes; and what malloc is
    given back.
    """
    m = 20
    n = 10
    d = 50_000
    population = Population.from_sizes(range(1, m + 1), aux=np.eye(4)[np.arange(m) % 4])
    plan = Plan(population, PracDelta(), n=n, estimator=estimator)
    state = init_round(plan, np.zeros(d))
    rng = np.random.default_rng(0)
    for _ in range(
        4
    ):  # some are known by then, some are not, and the learned coefficient is below 1
        cohort = open_round(plan, state)
        updates = [rng.normal(size=d).astype(np.float32) for _ in cohort.client_n]
        tracemalloc.start()
        state, _ = close_round(plan, state, cohort, updates)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert 1 < peak / (n * d * 4) < 4


#: What takes the place of an update of five numbers: models of the same size, and other things.
NO_UPDATES: tuple[Any, ...] = (
    [np.ones((2, 2)), np.zeros(1)],
    (np.ones((2, 2)), np.zeros(1)),
    [np.ones((1, 1))] * 5,
    [{"weight": np.ones(5)}] * 5,
    [[[1.0]]] * 5,
    [np.ones(2), np.ones(3)],
    {"weight": np.ones(5)},
    dict(enumerate(np.ones(5))),
    {},
    [],
    [None] * 5,
    ["1"] * 5,
    "11111",
    b"11111",
    range(4),
    5.0,
    object(),
    lambda: np.ones(5),
    np.ones(5, object),
    np.zeros(5, [("a", "f4")]),
)


def test_a_model_begins_and_is_no_update() -> None:
    plan = make_plan("uniform", THREE, n=2)
    layers = NO_UPDATES[0]
    state = init_round(plan, dict(enumerate(layers)))
    assert same_tree(state, init_round(plan, layers))
    assert state.params_d.tolist() == [1, 1, 1, 1, 0]
    _, info = close_round(plan, state, open_round(plan, state), [layers, None])
    assert "write deltafl.flatten(local_model) - state.params_d" in str(info.warning)


@pytest.mark.parametrize("first", range(len(NO_UPDATES)))
@pytest.mark.parametrize("label", ["innovation+average=0.5", "pracdelta+clip=median", "full"])
def test_a_round_without_any_update_is_one_in_which_nobody_answers(label: str, first: int) -> None:
    """Whatever all clients send, with their reasons; one that is honest counts as if alone."""
    plan = make_plan(label, [3, 1, 2, 2], n=3)
    state = init_round(plan, np.zeros(5))
    cohort = open_round(plan, state)
    n = len(cohort.client_n)
    rest = [NO_UPDATES[(first + place) % len(NO_UPDATES)] for place in range(n)]
    for bad in ([NO_UPDATES[first]] * n, rest):
        for honest in ([], [np.ones(5)]):
            given = [*honest, *bad[len(honest) :]]
            following, info = close_round(plan, state, cohort, given)
            silent = [*honest, *[None] * (n - len(honest))]
            expected, _ = close_round(plan, state, cohort, silent)
            assert same_tree(following, expected)
            assert len(info.rejected) == n - len(honest)
            assert all(reply.reason.startswith("update ") for reply in info.rejected)


def test_tensors_are_updates_and_models() -> None:
    torch = pytest.importorskip("torch")
    plan = make_plan("full", THREE, n=3)
    state = init_round(plan, torch.ones(2, requires_grad=True))
    rows = [torch.full((2,), 0.5, requires_grad=True), torch.ones(2).bfloat16(), torch.zeros(2)]
    following, info = close_round(plan, state, open_round(plan, state), rows)
    assert (info.rejected, following.params_d.tolist()) == ([], [1.375, 1.375])


def test_a_round_of_which_all_replies_are_refused_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = closed([None, np.zeros(5), np.full(2, np.nan)])
    assert info.warning == (
        "all replies were refused and nothing was learnt; the first of 2, of client 1: update has "
        "shape (5,), "
        "expected (2,)"
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", info.warning)
    ]
    caplog.clear()
    for updates in (
        [None] * 3,
        [None, np.zeros(5), np.zeros(2)],
    ):  # nobody replied; one reply was used
        assert closed(updates).warning is None
    assert caplog.records == []


def test_what_a_mask_hides_is_not_counted() -> None:
    with pytest.raises(DeltaflError, match=r"loss is masked.*; give a list with None"):
        Reports.make(2, loss=np.ma.masked_array([1.0, 50.0], [False, True]))


def test_arguments_that_changed_places_are_named(tmp_path: Path) -> None:
    plan = Plan(POPULATION, make_sampler("uniform"), 2)
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    update_nd = np.zeros((2, 3), np.float32)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: init_round(np.zeros(3), plan), "plan is of type ndarray, not Plan"),  # type: ignore[arg-type]
        (lambda: open_round(state, plan), "plan is of type RoundState, not Plan"),  # type: ignore[arg-type]
        (lambda: broadcast(state, plan), "plan is of type RoundState, not Plan"),  # type: ignore[arg-type]
        (lambda: close_round(plan, cohort, state, update_nd), "state is of type Cohort"),  # type: ignore[arg-type]
        (lambda: close_round(plan, state, update_nd, cohort), "cohort is of type ndarray"),  # type: ignore[arg-type]
        (lambda: save_state(tmp_path / "x", plan, state), "state is of type Plan"),  # type: ignore[arg-type]
        (lambda: save_state(None, state, plan), "path is of type NoneType, not str or PathLike"),  # type: ignore[arg-type]
        (lambda: load_state(None, plan), "path is of type NoneType"),  # type: ignore[arg-type]
        (lambda: load_state(tmp_path / "x", state), "plan is of type RoundState"),  # type: ignore[arg-type]
    ]
    for call, sentence in wrong:
        with pytest.raises(DeltaflError, match=sentence):
            call()
    assert not list(tmp_path.iterdir())


TWO = np.array([0, 1])
ONES = np.array([1, 1])
HALVES = np.array([0.5, 0.5])


@pytest.mark.parametrize(
    "cohort",
    [
        Cohort(np.array([0, 0]), ONES, HALVES),
        Cohort(np.array([-1, 0]), ONES, HALVES),
        Cohort(np.array([0.0, 1.0]), ONES, HALVES),
        Cohort(np.array(0), np.array(1), np.array(0.5)),
        Cohort(TWO, np.array([0, 1]), HALVES),
        Cohort(TWO, ONES[:1], HALVES),
        Cohort(TWO, ONES, np.array([0, 0.5])),
        Cohort(TWO, ONES, HALVES, absent=np.array([9])),
        Cohort(TWO, ONES, HALVES, stage_n=HALVES[:1]),
        Cohort([0, 1], [1, 1], [0.5, 0.5]),  # type: ignore[arg-type]
    ],
)
def test_cohorts_that_a_host_has_made_are_checked(cohort: Cohort) -> None:
    plan = plan_of()
    with pytest.raises(DeltaflError, match="the cohort's"):
        close_round(plan, init_round(plan, np.zeros(2)), cohort, np.ones((2, 2)))


def test_replies_that_would_make_the_model_infinite_are_left_out() -> None:
    """Each of them is finite, and so is their mean: the server's rate is too large."""
    plan = make_plan("full", [1, 1], 2, server_lr=1e30, mime=0.5)
    state = init_round(plan, np.zeros(2))
    following, info = close_round(plan, state, open_round(plan, state), np.full((2, 2), 1e18))
    assert following.params_d.tolist() == [0, 0]
    assert following.parts["mime"].momentum_d.tolist() == [0, 0]
    assert following.round == 1
    assert info.num_responded == 0
    assert info.warning is not None
    assert "the model would have an entry that is not finite" in info.warning


@pytest.mark.parametrize(
    ("label", "more"),
    [
        ("uniform", {"server_optimizer": Momentum(1.0, 0.5), "server_lr": 0.1}),
        ("uniform+server_lr=0.1", {"parts": [Sgd(2.0)]}),
        ("uniform", {"ghbm": Ghbm(0.9, 2), "ghbm_tau": 7}),
        ("uniform", {"budget": Budget(100, 5), "budget_rounds": 3}),
        ("uniform@@hajek", {"estimator": ESTIMATORS["difference-own"]}),
        ("uniform", {"parts": Sgd()}),
        ("uniform", {"parts": None}),
        ("uniform", {"n": np.array([2, 2])}),
    ],
)
def test_nothing_that_is_set_twice_is_ignored(label: str, more: dict[str, Any]) -> None:
    with pytest.raises(DeltaflError):
        make_plan(label, [1] * 8, **{"n": 4, **more})


def test_cohorts_size_themselves_by_a_part_that_is_given() -> None:
    plan = make_plan("uniform", [1] * 8, "auto", parts=[RelativeError(0.1)])
    assert plan.part("relative_error") == RelativeError(0.1)


def test_calls_with_what_they_cannot_take_are_sentences() -> None:
    plan = make_plan("fedvarp+scaffold", [1] * 8, 4)
    state = init_round(plan, np.zeros(2))
    cohort = open_round(plan, state)
    by_sum = make_plan("uniform", [1] * 8, 4)
    larger = make_plan("uniform", [1] * 99, 9)
    others = open_round(larger, init_round(larger, np.zeros(2)))
    census = make_plan("census", [1] * 8, 4)
    closed = Accumulator(plan, state, cohort)
    closed.add_rows(np.ones((4, 2)))
    closed.close()
    first = init_round(by_sum, np.zeros(2))
    here_n = np.ones(4, bool)
    unlike: Any = [None, 5, iter([1]), np.ones((8, 150)) * 1j]
    sums: Any = [["a", "b"], [[1], [1, 2]], np.ones(2) * 1j]
    calls: list[Callable[[], object]] = [
        closed.close,
        Accumulator(plan, state, cohort).close,
        lambda: open_round(plan, state, [[True], [True, False], True]),  # type: ignore[arg-type]
        lambda: close_round_from_sum(by_sum, first, others, here_n, np.ones(2)),
        lambda: Reports.make(-1),
        lambda: Reports.make(2.0),  # type: ignore[arg-type]
        *(partial(census.with_census, answers) for answers in unlike),
        *(partial(close_round_from_sum, by_sum, first, cohort, here_n, given) for given in sums),
        *(partial(plan.drifts, state, np.array(given)) for given in ([99], [-1], [0.5])),
    ]
    for call in calls:
        with pytest.raises(DeltaflError):
            call()
    drifts: Any = plan.drifts(state, [0, 1])  # type: ignore[arg-type]
    assert drifts.shape == (2, 2)
