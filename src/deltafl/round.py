"""One round of federated learning with sampled clients: read this file first.

A *host* (the simulator, Flower, your own loop) owns the training; deltafl owns which clients are
selected and what their replies count::

    state = init_round(plan, params)
    while not done:
        cohort = open_round(plan, state)                               # which clients train
        updates, reports = train(state.params_d, cohort.client_n)      # local work, by the host
        state, info = close_round(plan, state, cohort, updates, reports)

``close_round`` makes the estimate of what full participation would have given, moves the model, and
lets sampler, control variate and the server's parts learn. ``broadcast(plan, state)`` is what
clients are sent: ``state.params_d``, and with ``mime`` or ``scaffold`` a drift.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .accumulate import Accumulator, check_round
from .designs.inclusion import check_anyone, check_cohort, mask_of
from .errors import DeltaflError, check_types, log
from .model.arrays import as_reals
from .model.vectors import initial_model
from .plan import Plan, RoundState, check_state
from .scale.persistent_array import PersistentArray
from .screening import Updates
from .server.part import Step
from .streams import stream
from .types import (
    NOBODY,
    BoolArray,
    Broadcast,
    Cohort,
    Oracle,
    Params,
    Reports,
    RoundInfo,
    locked,
    read_only,
)


def init_round(plan: Plan, params: Any) -> RoundState:
    """The state before the first draw. ``params`` is a 1-d array of finite numbers, kept as
    float32, or a model.

    A census with first updates is round 0: the model moves by their mean, and the next round is
    round 1.
    """
    check_types("init_round(plan, params)", plan=(plan, Plan))
    state = blank_state(plan, initial_model(params))
    control = plan.rule.control
    mean_d = control.first_mean(state.control)
    if mean_d is not None:  # the first round has been played
        length = prod(part.first_step for part in plan.parts)
        state = plan.move(state, Step(state.round, state.params_d, length * mean_d))
    known = control.at_model(
        state.control,
        plan.population,
        state.params_d,
        state.round,
    )
    return state._replace(control=known)


def blank_state(plan: Plan, params_d: Params) -> RoundState:
    """The initial state before the control variate has seen the model: the template that saved
    states are read into.
    """
    m = plan.population.num_clients
    control = plan.rule.control.with_rows(plan.memory)

    # Two bytes a client; ``plus_one`` takes a wider type once a count needs it.
    def never() -> PersistentArray:
        return PersistentArray(np.zeros(m, np.int16))

    return RoundState(
        round=0,
        # Local training in place would else be the model's next step, and its update 0.
        params_d=read_only(params_d),
        parts={part.name: part.init(plan, params_d) for part in plan.parts},
        sampler=plan.sampler.init(plan.population),
        control=control.init(plan.population, len(params_d)),
        selected_m=never(),
        responded_m=never(),
        missed_m=never(),
        weights_crc=plan.weights_crc,
        method_crc=plan.method_crc,
    )


def broadcast(plan: Plan, state: RoundState) -> Broadcast:
    """What the clients of this round are sent; without ``mime`` and ``scaffold`` that is
    ``state.params_d`` alone.
    """
    check_state(plan, state)
    return Broadcast(state.params_d, plan.drifts(state, None))


def open_round(
    plan: Plan,
    state: RoundState,
    available_m: BoolArray | None = None,
    oracle: Oracle | None = None,
    cost_m: npt.ArrayLike | None = None,
) -> Cohort:
    """Select the clients of this round. The state is not changed: opening it again gives the same
    cohort.

    ``available_m``, bool (m,): who can be selected; the estimate still targets all clients
    (``Plan.response_rates``). ``cost_m``, (m,) numbers > 0: what a round of each client costs now,
    where that changes, for ``per_cost`` and ``budget``; ``Population.cost_m`` is then what it costs
    in the mean. The ``oracle`` is for simulators alone. A ``DeltaflError`` if it is missing, if the
    mask is wrong or empty, or a cost is no number above 0.
    """
    check_state(plan, state)
    m = plan.population.num_clients
    if plan.sampler.needs_oracle:
        plan.sampler.require_oracle(oracle, plan.method)
    mask_m: Any = None
    absent = NOBODY
    if available_m is not None:
        mask_m = mask_of("available_m", available_m, m)
        check_anyone(int(np.count_nonzero(mask_m)))
        absent = np.flatnonzero(~mask_m)
    elif not plan.sampler.accepts_no_mask:  # else m numbers are saved
        mask_m = np.ones(m, bool)
    if cost_m is not None:
        now = plan.population.priced(cost_m)
        state = plan.priced(state, now)
    # A stream of its own for each round: one that is opened again, or after a restart, has the same
    # draws.
    rng = stream(plan.seed, "draw", state.round)
    cohort = plan.select(state.counted, mask_m)
    if cohort is None:
        cohort = plan.draw(state, mask_m, rng, oracle)
    check_cohort(cohort, m)
    # An estimator that needs what the sampler does not know fails here, before anybody trains.
    plan.collect_replies(state, cohort)
    cohort = cohort._replace(absent=absent, round=state.round)
    if cost_m is not None:
        cohort = cohort._replace(cost_n=now.costs(cohort))
    return locked(cohort)


def close_round(
    plan: Plan,
    state: RoundState,
    cohort: Cohort,
    updates: Updates | Sequence[Params | None],
    reports: Reports | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Turn the replies into an estimate of the full-participation update, move the model, let the
    sampler learn.

    ``updates`` has one update u_i = x_K - x_0 a client in the cohort's order, (n, d) or a list with
    None where no reply came. For models of torch or lists of arrays, u_i is
    ``flatten(local) - state.params_d``. One that is not finite, out of range or of the wrong length
    counts as no reply and is named in ``info.rejected``; if none is left, ``info.warning`` says so
    and is logged.

    Raises:
        DeltaflError: If the numbers of updates or report rows differ from the cohort's.
    """
    accumulator = Accumulator(plan, state, cohort)
    accumulator.add_rows(updates, reports)
    following, info = accumulator.close()
    if info.warning is not None:
        log.warning("%s", info.warning)
    return following, info


def close_round_from_sum(
    plan: Plan,
    state: RoundState,
    cohort: Cohort,
    responded_n: npt.ArrayLike,
    sum_d: npt.ArrayLike,
) -> tuple[RoundState, RoundInfo]:
    """Close a round of whose updates the server knows the weighted sum alone, as with secure
    aggregation.

    The next state is that of ``close_round`` with the updates, up to rounding; what ``info`` says
    of single ones is NaN. ``examples/secure_sum.py`` uses it.

    Args:
        plan: One that needs no single updates; see docs/how-to/secure-aggregation.md.
        state: The current state.
        cohort: What ``open_round`` returned.
        responded_n: bool (n,), whose updates are in the sum; the others did not reply.
        sum_d: float64 (d,), the sum of coef_i u_i with ``plan.collect_replies(state,
            cohort).coef_n``.

    Raises:
        DeltaflError: If the sampler, the estimator or a part needs single updates, with the reason,
            or if ``responded_n`` or ``sum_d`` is no such array, or they do not go together.
    """
    check_round(plan, state, cohort)
    reason = plan.needs_single_updates
    if reason:
        raise DeltaflError(
            f"a sum of updates is not enough: {reason}; write 'uniform', or use close_round"
        )
    whole_d = as_reals("sum_d", sum_d, "the sum of coef_i u_i", state.params_d.shape)
    here_n = mask_of("responded_n", responded_n, len(cohort.client_n))
    if not here_n.any() and whole_d.any():
        raise DeltaflError(
            "sum_d is not 0, and responded_n names nobody whose updates are in it; say who replied"
        )
    total = plan.collect_replies(state, cohort).coef_n[here_n].sum()
    # As if all of them had sent their mean: the same sum.
    mean_d = whole_d / (total or 1.0)
    updates: list[Any] = [None] * len(here_n)
    for place in np.flatnonzero(here_n):
        updates[place] = mean_d
    following, info = close_round(plan, state, cohort, updates)
    nan = float("nan")  # what single updates would show
    return following, info._replace(
        variance=nan,
        mean_over_diversity=nan,
        residual=nan,
    )
