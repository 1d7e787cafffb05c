"""States with values that no round leaves, of every method: one sentence, or rounds that stay
finite.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from deltafl import (
    DeltaflError,
    RoundState,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
    stream,
)
from deltafl.audit.methods import KnownUpdates
from deltafl.errors import is_in
from deltafl.estimators.table import ESTIMATORS
from deltafl.plan import Plan
from deltafl.round import blank_state
from deltafl.samplers import SAMPLERS
from deltafl.scale.named_arrays import named_arrays
from deltafl.scale.sound import restored_state
from deltafl.server.optimizers import SERVER_OPTIMIZERS
from deltafl.server.table import ROWS, Row
from deltafl.types import Population, Reports

M, N, D = 12, 4, 40
#: One that ``dp`` takes, too.
SEED = 2**40


def inside(interval: str) -> float:
    return next(number for number in (0.5, 3) if is_in(number, interval))


def values_of(row: Row) -> list[Any]:
    """What switches a part on: its words, names or the like, one after the other."""
    values = row.settings[row.kind.name].values
    if values is bool:
        return [True]
    if values is str:
        return [*SERVER_OPTIMIZERS]
    if values is row.kind:
        return [row.kind(**{name: inside(each) for name, each in row.kind.ranges.items()})]
    if type(row.settings[row.kind.name].default) is int:
        return [1]
    return [inside(values)] if isinstance(values, str) else [*values]


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part of the server's table, with the first method that it goes together with."""
    somebody = Population.from_sizes([3, 1, 2], strata=["a", "b", "b"])
    for row in ROWS:
        numbers = {
            name: inside(setting.values)
            for name, setting in row.settings.items()
            if name != row.kind.name and setting.default
        }
        for value in values_of(row):
            given = {**numbers, row.kind.name: value}
            for method in ("uniform", "uniform@poisson", "uniform@@difference-own"):
                with suppress(DeltaflError):
                    make_plan(method, somebody, 2, seed=SEED, **given)
                    yield f"{method}+{row.kind.name}={value}", given
                    break


METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in SAMPLERS},
    **{f"uniform@@{name}": {} for name in ESTIMATORS},
    **dict(parts()),
    "uniform+budget=900": {"budget": 900.0, "budget_rounds": 90},
    "pracdelta@ordered-pivotal": {},
    "balanced@cube@regression-damped": {},
    "innovation@local-pivotal": {},
}


def plan_of(label: str, **more: Any) -> Plan:
    """A small plan whose clients' labels, and answers to a census, are known."""
    name = label.partition("+")[0]
    aux_mc = None
    if make_sampler(name).census is None:
        aux_mc = stream(0, "data").dirichlet(np.ones(3), size=M)
    names = ["b", *"a" * (M - 1)]
    population = Population.from_sizes(5 + np.arange(M) * 3, aux=aux_mc, strata=names)
    population = population._replace(seconds_m=np.arange(1.0, M + 1))
    plan = make_plan(name, population, N, seed=SEED, **{**METHODS[label], **more})
    if plan.census is not None:
        answers = [plan.census.answer(update(client, 0)) for client in range(M)]
        plan = plan.with_census(answers)
    return plan


def update(client: int, round: int) -> Any:
    rng = stream(1, "data", round, client)
    return (rng.normal(size=D) + 0.3 * client - 0.1 * round).astype(np.float32)


def play(plan: Plan, state: RoundState, rounds: int) -> RoundState:
    """Rounds in which one client is away and another one silent; all numbers stay finite."""
    for _ in range(rounds):
        round = state.round
        everyone = np.array([update(client, round % 100) for client in range(M)])
        weight_m = plan.population.weight_m
        oracle = None
        if plan.sampler.needs_oracle:
            oracle = KnownUpdates(everyone, weight_m, np.ones(M), np.arange(1.0, M + 1))
        cohort = open_round(plan, state, np.arange(M) != round % 3, oracle)
        client_n = cohort.client_n
        updates: list[Any] = [everyone[client] for client in client_n]
        updates[0] = None if round % 2 and len(updates) > 1 else updates[0]
        reports = Reports.make(
            len(client_n),
            loss=1.0 + client_n,
            square_loss=2.0 * (1.0 + client_n) ** 2,
            step_variance=0.1 + client_n,
            responded=[one is not None for one in updates],
        )
        state, info = close_round(plan, state, cohort, updates, reports)
        assert np.isfinite(plan.model(state)).all() and np.isfinite(state.params_d).all()
        assert np.isfinite(info.estimate_norm)
    return state


def forged(array: Any, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Arrays in the place of one of a state: values, types and shapes."""
    values: list[float] = [0, -1, 1, 2**63 - 1, -(2**63), 10**6]
    if array.dtype.kind == "f":
        values = [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e300, -1e300, 5e-324, 1e-310, 3e38, 1.0]
    if array.dtype.kind == "b":
        values = [False, True]
    with np.errstate(over="ignore"):
        if array.dtype.kind in "iu":
            info = np.iinfo(array.dtype)
            values = [max(info.min, min(info.max, int(value))) for value in values]
        for value in values:
            yield f"all {value}", np.full_like(array, value)
            if array.size > 1:
                one = array.copy()
                one.flat[int(rng.integers(array.size))] = value
                yield f"one {value}", one
    if array.ndim:
        yield "permuted", array[rng.permutation(len(array))]
        yield "reversed", array[::-1].copy()
        yield "doubled", array[np.zeros(len(array), int)]
        yield "short", array[:-1]
        yield "long", np.concatenate([array, array[-1:]])
    yield "another axis", array[None]
    for kind in ("f8", "f4", "i8", "u1", "?"):
        if array.dtype != kind:
            with np.errstate(invalid="ignore", over="ignore"):
                yield f"as {kind}", array.astype(kind)


def outcome(plan: Plan, template: RoundState, arrays: dict[str, Any]) -> str:
    """``refused``, or ``finite``; anything else is raised."""
    try:
        # The arrays are the state's from then on.
        state = restored_state(
            plan.sampler, template, {name: a.copy() for name, a in arrays.items()}
        )
    except DeltaflError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return "refused"
    with np.errstate(over="raise", invalid="raise"):
        play(plan, state, 3)
    return "finite"


def test_every_part_is_tried() -> None:
    tried = {name for given in METHODS.values() for name in given}
    assert {row.kind.name for row in ROWS} <= tried


@pytest.mark.parametrize("more", [{}, {"first_round": "exact"}])
def test_each_of_the_first_states_is_one_to_go_on_from(more: dict[str, Any]) -> None:
    plans = []
    for label in METHODS:
        with suppress(DeltaflError):  # some have a first round of their own, or take none
            plans.append(plan_of(label, **more))
    assert len(plans) > len(METHODS) - 20
    for plan in plans:
        template = blank_state(plan, np.zeros(D, np.float32))
        state = init_round(plan, np.zeros(D))
        for _ in range(3):
            state = play(plan, state, 1)
            arrays = {name: np.array(array) for name, array in named_arrays(state)}
            restored_state(plan.sampler, template, arrays)


@pytest.mark.sampled(12)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("label", METHODS)
def test_a_forged_state_is_refused_or_stays_finite(label: str) -> None:
    plan = plan_of(label)
    state = play(plan, init_round(plan, np.zeros(D)), 5)
    arrays = {name: np.array(array) for name, array in named_arrays(state)}
    template = blank_state(plan, np.zeros(D, np.float32))
    back = restored_state(plan.sampler, template, {name: a.copy() for name, a in arrays.items()})
    assert all(np.array_equal(a, arrays[name], equal_nan=True) for name, a in named_arrays(back))
    rng = np.random.default_rng(0)
    wrong = []
    for name, array in arrays.items():
        for how, other in forged(array, rng):
            try:
                found = outcome(plan, template, arrays | {name: other})
            except (Exception, AssertionError) as error:
                found = f"{type(error).__name__}: {error}"
            if found not in ("refused", "finite"):
                wrong.append(f"{name} {how}: {found}"[:160])
    assert not wrong, f"{len(wrong)} of {label}:\n" + "\n".join(wrong)
