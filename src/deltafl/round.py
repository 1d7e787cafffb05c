"""One round of federated learning with sampled clients: read this file first.

A *host* (the simulator, Flower, your own loop) owns the training; deltafl owns who is asked and what replies count::

    state = init_round(plan, params)
    while not done:
        cohort = open_round(plan, state)                                    # who is asked
        updates, reports = host.train(state.params_d, cohort.client_n)      # local work, wherever it happens
        state, info = close_round(plan, state, cohort, updates, reports)    # the estimate, the step, what was learnt

``broadcast(plan, state)`` is all that clients are sent; without ``plan.mime`` it is ``state.params_d`` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .designs.inclusion import check_anyone, check_cohort_size
from .errors import DeltaflError, require_method
from .estimators.controls import residuals, with_memory
from .estimators.damping import trust
from .estimators.heard import Heard
from .estimators.memory import RowFormat
from .estimators.remote import RemoteControl, RemoteReply, differences
from .estimators.running_sum import weighted_sum
from .estimators.table import find_estimator
from .estimators.variance import estimate_variance
from .params import checked_params
from .replies import Updates, measure_output_bias, measure_residuals, screen_replies
from .round_info import describe
from .scale.persistent_array import PersistentArray
from .server.mime import drift, init_mime, remember
from .server.norm_guard import init_guard, shorten
from .server.optimizers import ServerOptimizer, Sgd
from .streams import stream
from .types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Params, Population, Reports, RoundInfo, Sampler


@dataclass(frozen=True)
class Plan:
    """Everything about the rounds that does not change.

    Attributes:
        population: Who there is, and how much each client counts in the target.
        sampler: Who is asked.
        n: Cohort size, 1 <= n <= m.
        estimator: A name in ``deltafl.ESTIMATORS``: what each reply counts. With ``innovation-remote`` or
            ``difference-own-remote`` clients reply with what their ``ClientMemory`` makes of their update.
        server_optimizer: How the model moves along the estimate.
        seed: Seed of the draws.
        response_floor: Least response rate q assumed of a client, in (0, 1]: no reply counts more than 1 / floor times.
        mime: beta in [0, 1) of the momentum that the server sends to all clients, see ``mime.py``; 0 for none.
        memory: How an estimator that remembers one update a client keeps them, see ``memory.py``.
        norm_guard: No estimate is longer than so many times the median before it (``guard.py``). **Biased**; or None.
    """

    population: Population
    sampler: Sampler
    n: int
    estimator: str = "horvitz-thompson"
    server_optimizer: ServerOptimizer = field(default_factory=Sgd)
    seed: int = 0
    response_floor: float = 0.1
    mime: float = 0.0
    norm_guard: float | None = None
    memory: RowFormat = field(default_factory=RowFormat)

    def __post_init__(self) -> None:
        """Refuse impossible plans at once."""
        require_method(self.sampler, "open", "sampler", "give a sampler, or write make_plan(label, population, n)")
        require_method(self.server_optimizer, "step", "server_optimizer", "write make_server_optimizer(name, lr)")
        check_cohort_size(self.n, self.population.num_clients)
        self.population.check()
        control = find_estimator(self.estimator).control
        if isinstance(control, RemoteControl) and getattr(self.sampler, "output_bias_size", 0) > 0:
            raise DeltaflError(
                f"{type(self.sampler).__name__} looks at the last entries of updates, which clients that keep their "
                "memory do not send; write the estimator without '-remote'"
            )
        if not 0 < self.response_floor <= 1:
            raise DeltaflError(f"response_floor is {self.response_floor}; it must be above 0 and at most 1")
        init_mime(self.mime, 0)
        init_guard(self.norm_guard)


class RoundState(NamedTuple):
    """What the next round needs, and nothing else; nested NamedTuples of arrays.

    Attributes:
        round: Index of the next round, from 0.
        params_d: float32 (d,), the global model.
        optimizer: The server optimizer's memory.
        sampler: The sampler's memory.
        control: The estimator's controls.
        selected_m: int16 (m,), how often each client was asked so far; wider once a count needs it. States of several
            rounds share the memory, and none is seen to change (``versions.py``).
        responded_m: The same for how often it answered.
        mime: The momentum that is sent to the clients, see ``mime.py``.
        guard: The norms that the norm guard goes by, see ``guard.py``.
    """

    round: int
    params_d: Params
    optimizer: Any
    sampler: Any
    control: Any
    selected_m: PersistentArray
    responded_m: PersistentArray
    mime: Any
    guard: Any


class Broadcast(NamedTuple):
    """What the server sends to every client it asks.

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
    control = with_memory(find_estimator(plan.estimator).control, plan.memory)
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
    """Decide who is asked in this round.

    Args:
        plan: The plan.
        state: The state; it is not changed, so a round may be opened again with the same result.
        available_m: bool (m,), who can be asked; None for everyone. The estimate then targets the sum over available
            clients; with a difference estimator the others count with their controls.
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
    """A mask of who can be asked; None for everyone where the sampler takes that for an answer: m numbers saved."""
    m = plan.population.num_clients
    if available_m is None:
        return None if getattr(plan.sampler, "accepts_no_mask", False) else np.ones(m, dtype=np.bool_)
    available_m = np.asarray(available_m)
    if available_m.shape != (m,) or available_m.dtype != np.bool_:
        raise DeltaflError(f"available_m is {available_m!r:.60}; it must say True or False of each of {m} clients")
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
        reports: What the clients said of their work; None if nothing.

    Returns:
        The next state, and what a person wants to see. A reply that is missing, not finite, out of range or of the
        wrong length counts as non-response and is named in ``info.rejected``.

    Raises:
        DeltaflError: If the numbers of updates or report rows differ from the cohort's, or updates come where the
            estimator needs ``RemoteReply``, or the other way round.
    """
    estimator = find_estimator(plan.estimator)
    drift_d = broadcast(plan, state).drift_d
    rows, refused = differences(estimator.control, state.control, cohort.client_n, updates)
    replies = screen_replies(cohort, rows, reports, len(state.params_d), known_d=drift_d, sampler=plan.sampler)
    rejected = [reply._replace(reason=refused.get(reply.client, reply.reason)) for reply in replies.rejected]
    here = np.flatnonzero(replies.reports.responded_n)
    update_nd = replies.update_nd if len(here) == len(cohort.client_n) else replies.update_nd[here]

    heard = hear(plan, state, cohort, here)
    total_d, residual_nd = residuals(estimator.control, state.control, heard.client_n, update_nd)
    reports = measure_residuals(replies.reports, residual_nd, getattr(plan.sampler, "sketch_size", 0), plan.seed)
    reports = measure_output_bias(reports, update_nd, getattr(plan.sampler, "output_bias_size", 0))
    delta_d = total_d + weighted_sum(heard.coef_n, residual_nd, len(state.params_d))
    if estimator.ratio:
        residual_nd -= delta_d  # in place: it is as large as all updates, twice
    variance = estimate_variance(heard, residual_nd)
    del residual_nd
    control = estimator.control.update(state.control, plan.population, heard, update_nd)
    following, delta_d, clip_factor = advance(plan, state, cohort, reports, delta_d, control)
    info = describe(state.round, heard, reports, variance, delta_d)
    beta = trust(estimator.control, state.control)
    return following, info._replace(rejected=rejected, clip_factor=clip_factor, control_coefficient=beta)


def advance(
    plan: Plan, state: RoundState, cohort: Cohort, reports: Reports, delta_d: FloatArray, control: Any
) -> tuple[RoundState, FloatArray, float]:
    """The rest of closing a round, once the updates are summed up: the model moves, the sampler learns, counts go up.

    From the estimate without the drift of ``mime.py`` and the controls after the round to the next state, the estimate
    as it was used, and the norm guard's factor.
    """
    drift_d = broadcast(plan, state).drift_d
    if drift_d is not None:
        delta_d = drift_d + delta_d
    delta_d, clip_factor, guard = shorten(plan.norm_guard, state.guard, delta_d)
    params_d, optimizer = plan.server_optimizer.step(state.params_d, delta_d, state.optimizer)
    following = RoundState(
        round=state.round + 1,
        params_d=params_d,
        optimizer=optimizer,
        sampler=plan.sampler.update(state.sampler, cohort, reports),
        control=control,
        selected_m=state.selected_m.plus_one(cohort.client_n),
        responded_m=state.responded_m.plus_one(cohort.client_n[reports.responded_n]),
        mime=remember(state.mime, delta_d),
        guard=guard,
    )
    return following, delta_d, clip_factor


def hear(plan: Plan, state: RoundState, asked: Cohort, which_n: Any) -> Heard:
    """What was heard of a cohort, if the rows that an index or a mask names replied."""
    cohort = asked.part(which_n)
    response_n = response_rates(plan, state, cohort.client_n)
    return Heard(cohort, asked, coefficients(plan, state, cohort), response_n)


def coefficients(plan: Plan, state: RoundState, heard: Cohort) -> FloatArray:
    """What each reply counts in the estimate, float64 (n,), for the clients of a cohort that replied."""
    weight_n = plan.population.weight_m[heard.client_n]
    response_n = response_rates(plan, state, heard.client_n)
    return find_estimator(plan.estimator).coefficients(heard, weight_n, response_n)


def response_rates(plan: Plan, state: RoundState, client_k: IntArray | None = None) -> FloatArray:
    """q_i = max(floor, (answered_i + 1) / (asked_i + 1)): exactly 1 for who always answered.

    Float64 (k,) of the clients ``client_k``; without, (m,) of everyone. From earlier rounds only, hence known before
    the draw; dividing by q_i instead of by the number of replies keeps the estimate right when failures depend on the
    client.
    """
    which = slice(None) if client_k is None else client_k
    responded_k, selected_k = (count_m[which].astype(np.float64) for count_m in (state.responded_m, state.selected_m))
    rate_k: FloatArray = np.maximum(plan.response_floor, (responded_k + 1) / (selected_k + 1))
    return rate_k
