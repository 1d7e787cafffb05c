"""One round of federated learning with sampled clients: read this file first.

A *host* (the simulator, Flower, your own loop) owns the training; deltafl owns which clients are selected and what
their replies count::

    state = init_round(plan, params)
    while not done:
        cohort = open_round(plan, state)                                    # which clients train
        updates, reports = host.train(state.params_d, cohort.client_n)      # local work, wherever it happens
        state, info = close_round(plan, state, cohort, updates, reports)    # the estimate, the step, what is learned

``broadcast(plan, state)`` is all that clients are sent; without ``plan.mime`` it is ``state.params_d`` alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .accumulate import Accumulator
from .designs.inclusion import check_anyone
from .errors import DeltaflError
from .estimators.remote import RemoteReply
from .plan import Plan, RoundState, coefficients, response_rates
from .scale.persistent_array import PersistentArray
from .server.mime import drift, init_mime
from .server.norm_guard import init_guard
from .server.screening import Updates
from .streams import stream
from .types import BoolArray, Cohort, Oracle, Params, Reports, RoundInfo, checked_params

__all__ = [
    "Broadcast",
    "Plan",
    "RoundState",
    "broadcast",
    "close_round",
    "coefficients",
    "init_round",
    "open_round",
    "response_rates",
]


class Broadcast(NamedTuple):
    """What the server sends to every selected client.

    Attributes:
        params_d: float32 (d,), the global model x_0.
        drift_d: float32 (d,), beta S of ``mime.py``: each client adds drift_d / K_i in each of its K_i local steps, and
            takes (1 - beta) times its usual steps. None without such a momentum.
    """

    params_d: Params
    drift_d: Params | None


def init_round(plan: Plan, params: npt.ArrayLike) -> RoundState:
    """The state before the first round, from the initial model (any 1-d array; kept as float32)."""
    params_d = checked_params(params)
    m, d = plan.population.num_clients, len(params_d)
    control = plan.rule.control.with_rows(plan.memory)
    return RoundState(
        round=0,
        params_d=params_d,
        optimizer=plan.server_optimizer.init(d),
        sampler=plan.sampler.init(plan.population),
        control=control.init(plan.population, d),
        selected_m=PersistentArray(np.zeros(m, dtype=np.int16)),
        responded_m=PersistentArray(np.zeros(m, dtype=np.int16)),
        mime=init_mime(plan.mime, d),
        guard=init_guard(plan.norm_guard),
    )


def broadcast(plan: Plan, state: RoundState) -> Broadcast:
    """What the clients of this round are sent; with ``plan.mime`` = 0 that is ``state.params_d`` alone."""
    return Broadcast(state.params_d, drift(plan.mime, state.mime))


def open_round(
    plan: Plan, state: RoundState, available_m: BoolArray | None = None, oracle: Oracle | None = None
) -> Cohort:
    """Select the clients of this round.

    Args:
        plan: The plan.
        state: The state; it is not changed, so a round may be opened again with the same result.
        available_m: bool (m,), which clients can be selected; None for all. The estimate then targets the sum over
            available clients; with a control variate the others count with their c_i.
        oracle: Every client's update of this round, for the theoretical samplers; only simulators have one.

    Raises:
        DeltaflError: If the sampler needs an oracle and there is none, if nobody is available, or if ``available_m``
            has another length than the population.
    """
    if plan.sampler.needs_oracle and oracle is None:
        raise DeltaflError(
            f"{type(plan.sampler).__name__} needs every client's update or loss before the draw, which only a "
            "simulation has; choose a practical sampler such as 'pracdelta'"
        )
    rng = stream(plan.seed, "draw", state.round)
    return plan.sampler.open(state.sampler, _present(plan, available_m), plan.n, rng, oracle)


def _present(plan: Plan, available_m: BoolArray | None) -> Any:
    """A mask of the available clients; None for all of them where the sampler accepts that: m numbers saved."""
    m = plan.population.num_clients
    if available_m is None:
        return None if plan.sampler.accepts_no_mask else np.ones(m, dtype=np.bool_)
    available_m = np.asarray(available_m)
    if available_m.shape != (m,) or available_m.dtype != np.bool_:
        raise DeltaflError(f"available_m is {available_m!r:.60}; it must hold True or False for each of {m} clients")
    check_anyone(int(np.count_nonzero(available_m)))
    return available_m


def close_round(
    plan: Plan,
    state: RoundState,
    cohort: Cohort,
    updates: Updates | Sequence[Params | RemoteReply | None],
    reports: Reports | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Turn the replies into an estimate of the full-participation update, move the model, let the sampler learn.

    Args:
        plan: The plan.
        state: The state the round was opened with.
        cohort: What ``open_round`` returned.
        updates: One update u_i = x_K - x_0 a client, in the cohort's order; None where no reply came. (n, d) or a list;
            with a ``-remote`` estimator a list of ``RemoteReply``.
        reports: What the clients reported of their work; None for nothing.

    Returns:
        The next state, and what a person wants to see. A reply that is missing, not finite, out of range or of the
        wrong length counts as non-response and is named in ``info.rejected``.

    Raises:
        DeltaflError: If the numbers of updates or report rows differ from the cohort's, or updates come where the
            estimator needs ``RemoteReply``, or the other way round.
    """
    accumulator = Accumulator(plan, state, cohort)
    accumulator.add_rows(updates, reports)
    return accumulator.close()
