"""Rounds over clients who come and go: what a federation needs beside ``open_round`` and ``close_round``.

Knows no Flower, so that all of it can be tested without messages. A client is a *key*, a string that outlives
connections and restarts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..accumulate import Accumulator
from ..errors import DeltaflError
from ..estimators.remote import NOTHING, RemoteControlState, RemoteReply, begin_anew
from ..estimators.sketch import count_sketch
from ..round import Plan, RoundState, init_round, open_round
from ..server.optimizers import ServerOptimizer
from ..server.screening import LARGEST_ENTRY, measure
from ..streams import stream
from ..types import Cohort, FloatArray, IntArray, Params, RejectedReply, Reports, RoundInfo
from .arrays import Arrays, Layout, mean_rest, update_of
from .clients import CannotResizeError, ClientInfo, ClientRegistry, resize_state
from .rules import Rules

#: A whole cohort that stays silent with a smaller probability than this points to an outage.
_OUTAGE_PROBABILITY = 1e-3


class ClientReply(NamedTuple):
    """A client's reply to a train message.

    Attributes:
        arrays: Its model after training; None if there is none.
        fault: Why the reply cannot be used, if that is already known; it then counts as non-response.
        loss: Mean training loss; None if not reported.
        square_loss: Mean squared loss of single examples; None if not reported.
        step_variance: Variance of one local step, see ``types.Reports``.
        num_steps: Local steps.
        sketch: The update's sketch, if the client sent one.
        since: From a client that keeps its own memory: the name of the c_i that it subtracted.
    """

    arrays: Arrays | None
    fault: str | None = None
    loss: float | None = None
    square_loss: float | None = None
    step_variance: float = 0.0
    num_steps: float = 1
    sketch: Sequence[float] | None = None
    since: int | None = None


class Federation:
    """Clients, the model and the state of the rounds.

    Attributes:
        rules: The settings.
        clients: Who was admitted.
        layout: The model's arrays.
        rest: Its buffers and counters.
        state: The state of the rounds; None before anybody was admitted.
        warnings: Sentences for the log; whoever logs them empties the list.
    """

    def __init__(self, rules: Rules, arrays: Arrays, layout: Layout) -> None:
        self.rules, self.layout = rules, layout
        self.clients = ClientRegistry()
        self.rest: Arrays = layout.rest(arrays)
        self.state: RoundState | None = None
        self.warnings: list[str] = []
        self._left_out: set[str] = set()
        self._plan: Plan | None = None
        self._initial_d = layout.flatten(arrays)

    @property
    def plan(self) -> Plan:
        """The plan for the clients registered now."""
        if self._plan is None:
            raise DeltaflError("no client has been admitted yet")
        return self._plan

    @property
    def current(self) -> RoundState:
        """The state of the rounds, once there are clients."""
        if self.state is None:
            raise DeltaflError("no client has been admitted yet")
        return self.state

    @property
    def params_d(self) -> Params:
        """The global model as a flat vector."""
        return self._initial_d if self.state is None else self.state.params_d

    def arrays(self) -> Arrays:
        """The global model as named arrays, as it is sent."""
        return self.layout.rebuild(self.params_d, self.rest)

    def admit(self, infos: Mapping[str, ClientInfo]) -> None:
        """Let clients join, or change what they report; the weights follow.

        Newcomers are left out, with one warning each, if the sampler's state cannot be resized, or if after the first
        round there is no room to remember an update of each.

        Raises:
            DeltaflError: If before the first round one update per client does not fit.
        """
        clients = self.clients.updated(infos)
        try:
            self._set_clients(clients)
        except CannotResizeError as error:
            left_out = [key for key in clients.keys[len(self.clients.keys) :] if key not in self._left_out]
            if left_out:
                self._left_out.update(left_out)
                self.warnings.append(f"{', '.join(left_out)} cannot join: {error}")
            self._set_clients(
                self.clients.updated({key: info for key, info in infos.items() if key in self.clients.index})
            )

    def forget(self, keys: Collection[str]) -> None:
        """Drop clients for good: their weight, their scores and everything remembered about them.

        Raises:
            DeltaflError: If no client would be left, or the sampler's state cannot be resized.
        """
        clients = self.clients.without(keys)
        if not clients.keys and self.clients.keys:
            raise DeltaflError("every known client is to be forgotten; start with a new state_path instead")
        self._set_clients(clients, [self.clients.index[key] for key in clients.keys])

    def restore(self, clients: ClientRegistry, state: RoundState, rest: Arrays) -> None:
        """Resume from a saved state."""
        self.clients, self.state, self.rest = clients, state, rest
        self._plan = self.rules.plan_for(clients)

    def expected_memory(self, client: int) -> int | None:
        """The name of the c_i that a client is asked to subtract; None if clients keep no memory."""
        control = self.current.control
        return int(control.taken_m[client]) if isinstance(control, RemoteControlState) else None

    def open(self, present: Collection[str]) -> Cohort:
        """Select from the clients that are present; the same cohort until the round is closed."""
        available_m = np.array([key in present for key in self.clients.keys], dtype=np.bool_)
        return open_round(self.plan, self.current, available_m)

    def close(self, cohort: Cohort, replies: Mapping[int, ClientReply]) -> RoundInfo:
        """Close the round.

        Args:
            cohort: What ``open`` returned.
            replies: Client index -> its reply; clients that are missing did not reply.

        Returns:
            The round's statistics; ``rejected`` names the replies that were not used.
        """
        plan, state, sent, client_n = self.plan, self.current, self.arrays(), cohort.client_n.tolist()
        checked = [self._checked(replies.get(client), client) for client in client_n]
        updates = [self._update(reply, sent) for reply in checked]
        round = Accumulator(self._with_noise(plan, state, cohort), state, cohort)
        round.add_rows(updates, _reports_of(checked, updates))
        following, info = round.close()
        if self.rules.sketch:
            reports = self._measured_on_sketches(round.reports, cohort, checked)
            following = following._replace(sampler=plan.sampler.update(state.sampler, cohort, reports))
        used_n = (following.responded_m - state.responded_m)[cohort.client_n] > 0
        if self.rest:
            used = cohort.part(used_n)
            received = [replies[client].arrays or {} for client in used.client_n.tolist()]
            self.rest = mean_rest(self.layout, sent, received, plan.collect_replies(state, used).coef_n)
        self.state = self._without_shared_failures(following, cohort, checked, any_used=bool(used_n.any()))
        faults = [
            RejectedReply(client, reply.fault)
            for client, reply in zip(client_n, checked, strict=True)
            if reply is not None and reply.fault is not None
        ]
        return info._replace(rejected=sorted([*info.rejected, *faults]))

    def _set_clients(self, clients: ClientRegistry, kept_k: list[int] | None = None) -> None:
        """Continue with these clients; all or nothing."""
        if clients is self.clients:
            return
        plan = self.rules.plan_for(clients)
        if len(clients.keys) > len(self.clients.keys):
            self._require_room(len(clients.keys))
        if self.state is None:
            state = init_round(plan, self._initial_d)
        else:
            state = resize_state(plan, self.state, self.plan.population.weight_m, kept_k)
            if _num_remembering(self.state.control) > 0 == _num_remembering(state.control):
                self.warnings.append("the weights of known clients changed: the memories of all clients are reset")
        self.clients, self.state, self._plan = clients, state, plan

    def _require_room(self, num_clients: int) -> None:
        """Refuse more clients than fit into memory; once rounds were played, only newcomers are refused."""
        seen = 0 if self.state is None else int(np.count_nonzero(self.state.responded_m))
        try:
            self.rules.require_room(num_clients, self.layout.num_params, seen)
        except DeltaflError as error:
            if self.state is None or self.state.round == 0:
                raise
            raise CannotResizeError(str(error)) from None

    def _without_shared_failures(
        self, following: RoundState, cohort: Cohort, replies: Sequence[ClientReply | None], any_used: bool
    ) -> RoundState:
        """The state after a round, without what was not a client's own failure.

        A client that lost its part of a memory is not to blame, and all memories are reset. If nobody answered for that
        reason, or in an outage, the round did not happen: no step, nothing learnt.
        """
        before = self.current
        lost_n = np.array(
            [self._lost_memory(reply, client) for client, reply in zip(cohort.client_n.tolist(), replies, strict=True)],
            dtype=np.bool_,
        )
        if not any_used and (lost_n.any() or looks_like_outage(before, cohort.client_n)):
            if not lost_n.any():
                self.warnings.append("nobody answered, which looks like an outage: the round changes nothing")
            following = before._replace(round=following.round)
        elif lost_n.any():
            following = following._replace(selected_m=before.selected_m.plus_one(cohort.client_n[~lost_n]))
        if not lost_n.any():
            return following
        lost = ", ".join(self.clients.keys[client] for client in cohort.client_n[lost_n].tolist())
        self.warnings.append(f"{lost} lost the memory that the server counts on: the memories of all clients are reset")
        return following._replace(control=begin_anew(following.control))

    def _checked(self, reply: ClientReply | None, client: int) -> ClientReply | None:
        """The reply with its fault filled in, if it has one; the core checks its numbers and its update."""
        if reply is None:
            return None
        fault, size, sketch_q = reply.fault, self.rules.sketch, np.asarray(reply.sketch, dtype=np.float64)
        if self._lost_memory(reply, client):
            fault = "the client does not have the memory that the server counts on"
        elif fault is None and self.expected_memory(client) is not None and reply.since is None:
            fault = "the reply does not name the memory that it subtracts; add delta_mod to the ClientApp's mods"
        elif fault is None and size and reply.sketch is None:
            fault = "the reply has no sketch of the update; add delta_mod to the ClientApp's mods"
        elif fault is None and size and not (sketch_q.shape == (size,) and np.all(np.abs(sketch_q) <= LARGEST_ENTRY)):
            fault = f"the sketch must be {size} finite numbers"
        elif fault is None:
            fault = self.layout.fault(reply.arrays or {})
        return reply._replace(fault=fault)

    def _lost_memory(self, reply: ClientReply | None, client: int) -> bool:
        """Whether a client no longer has the c_i that the server counts on."""
        expected = self.expected_memory(client)
        return reply is not None and reply.since not in (None, expected) and expected not in (None, NOTHING)

    def _update(self, reply: ClientReply | None, sent: Arrays) -> Params | RemoteReply | None:
        if reply is None or reply.fault is not None or reply.arrays is None:
            return None
        update_d = update_of({entry.name: sent[entry.name] for entry in self.layout.trained}, reply.arrays)
        if isinstance(self.current.control, RemoteControlState) and reply.since is not None:
            return RemoteReply(update_d, reply.since)
        return self.rules.clipping.clip(update_d) if self.rules.clipping else update_d

    def _with_noise(self, plan: Plan, state: RoundState, cohort: Cohort) -> Plan:
        """This round's plan, with noise if there is to be any."""
        if self.rules.clipping is None:
            return plan
        largest = float(plan.collect_replies(state, cohort).coef_n.max(initial=0.0))
        noise_d = self.rules.clipping.noise(largest, self.layout.num_params)
        return replace(plan, server_optimizer=_NoisyOptimizer(plan.server_optimizer, noise_d))

    def _measured_on_sketches(self, reports: Reports, cohort: Cohort, replies: Sequence[ClientReply | None]) -> Reports:
        """The reports with norms of the clients' sketches s(u_i) in place of norms measured on the server.

        norm(u_i - c)^2 is estimated by norm(s(u_i) - s(c))^2, with the linear count-sketch s: unbiased, with a standard
        deviation of at most sqrt(2 / q) of it. The sketch reveals only q random sums of the update, but it is the
        client's claim: a client can raise its own score, where norms measured on the server cannot be forged.
        """
        plan, size = self.plan, self.rules.sketch
        sketch_nq = np.zeros((len(replies), size))
        for place in np.flatnonzero(reports.responded_n).tolist():
            reply = replies[place]
            sketch_nq[place] = reply.sketch if reply and reply.sketch is not None else 0.0
        control_nd = plan.rule.control.value(self.current.control, cohort.client_n).control_nd
        residual_nq = sketch_nq - count_sketch(control_nd, size, sketch_seed(plan.seed))
        residual_n = np.where(reports.responded_n, np.sum(residual_nq**2, axis=1), 0.0)
        return measure(sketch_nq, reports)._replace(squared_residual_n=residual_n)


def _reports_of(replies: Sequence[ClientReply | None], updates: Sequence[object | None]) -> Reports:
    """The columns of ``Reports``; replies without a usable update leave their row neutral."""
    neutral = ClientReply(None)
    used = [reply if reply and update is not None else neutral for reply, update in zip(replies, updates, strict=True)]
    return Reports.make(
        len(used),
        responded=[update is not None for update in updates],
        loss=[reply.loss for reply in used],
        square_loss=[reply.square_loss for reply in used],
        step_variance=[reply.step_variance for reply in used],
        num_steps=[reply.num_steps for reply in used],
    )


def _num_remembering(control: Any) -> int:
    """How many clients have a memory of their own that the server counts on."""
    return int(np.sum(control.taken_m != NOTHING)) if isinstance(control, RemoteControlState) else 0


@dataclass(frozen=True)
class _NoisyOptimizer:
    """One round's server optimizer, which sees D with noise added."""

    inner: ServerOptimizer
    noise_d: FloatArray

    def init(self, num_params: int) -> Any:
        return self.inner.init(num_params)

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        return self.inner.step(params_d, delta_d + self.noise_d, state)


def sketch_seed(seed: int) -> int:
    """The seed of the sketches, which clients are sent; it reveals nothing about the draws."""
    return int(stream(seed, "sketch", round=1).integers(2**62))


def looks_like_outage(state: RoundState, client_n: IntArray) -> bool:
    """Whether these clients are unlikely to have failed independently: prod_i (1 - r_i) < 0.001.

    Response rates describe clients that fail on their own. An outage of the server's network, counted as a failure of
    each client, would inflate their weights for as long again as it lasted.

    r_i = (responded_i + 2 r) / (selected_i + 2), with r = (responded + 1) / (selected + 2) over all clients: the mean
    of a beta distribution, so that rarely selected clients count like the others. A single silent client proves
    nothing. Likely silence remains non-response: if the rates are right, at most 0.1 % of the estimate is lost.

    Args:
        state: The state before the round.
        client_n: The clients selected.
    """
    if len(client_n) < 2:
        return False
    responded_m, selected_m = np.asarray(state.responded_m, dtype=float), np.asarray(state.selected_m, dtype=float)
    overall = (responded_m.sum() + 1) / (selected_m.sum() + 2)
    rate_n = (responded_m[client_n] + 2 * overall) / (selected_m[client_n] + 2)
    return bool(np.prod(1 - rate_n) < _OUTAGE_PROBABILITY)
