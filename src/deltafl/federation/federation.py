"""Rounds over clients who come and go, without messages: a host sends the model and hands over what
comes back.

A client is a *key*, a string that outlives connections and restarts.
"""

import secrets
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import compress
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..accumulate import Accumulator
from ..errors import DeltaflError, counted, printable
from ..estimators.two_bits import code_length, read_codes
from ..model.arrays import LARGEST_ENTRY, Arrays, listed
from ..model.parts import parts_of_copies, patterns_of, split
from ..model.vectors import mean_rest
from ..moves import CannotResizeError
from ..plan import Plan, RoundState
from ..round import init_round, open_round
from ..scale.memory_budget import memory_size, require_room
from ..scale.rows import DTYPES
from ..types import EVERYONE, Cohort, Params, RejectedReply, RoundInfo
from .clients import ClientInfo, resize_state
from .exchange import CODE, STEP_FACTOR, TRAINED, Question
from .replies import NOT_CORRECTED, ClientReply, read_numbers, reports_of
from .rules import Rules
from .scales import Scales

#: States that are kept to go back to.
KEPT = 3


class Kept(NamedTuple):
    """What a federation goes back to where its model is lost."""

    clients: dict[str, ClientInfo]
    plan: Plan
    state: RoundState
    rest: Arrays


class Federation:
    """Clients, the model and the state of the rounds, which is None before anybody was admitted."""

    def __init__(self, rules: Rules, arrays: Arrays) -> None:
        self.rules = rules
        self.plan = rules.plan
        self.layout = parts_of_copies(
            arrays,
            rules.tied,
            buffers=tuple(rules.buffers),
            local=tuple(rules.local),
            trainable=patterns_of(rules.trainable),
        )
        #: The clients of the target, in the order of the population.
        self.clients: dict[str, ClientInfo] = {}
        #: Of each the last round in which it was there.
        self.seen: dict[str, int] = {}
        #: Of the arrays that are not trained those that are sent, and those that never are.
        self.rest: Arrays = self.layout.rest(self.layout.sent(arrays))
        self.unsent: Arrays = {name: arrays[name] for name in self.layout.names("frozen", "local")}
        #: Of the last round's replies the ones that were used, by key: their coefficients.
        self.used: dict[str, float] = {}
        self.state: RoundState | None = None
        #: Sentences for the log; whoever logs them empties the list.
        self.warnings: list[str] = []
        #: A random name, by which its files know each other.
        self.owner = secrets.token_hex(8)
        self.scales = Scales()
        #: States before the last rounds in which the model looked sound, the oldest first.
        self.kept: deque[Kept] = deque(maxlen=KEPT)
        self._left_out: set[str] = set()
        self._initial_d = self.layout.flatten(arrays)
        for name in self.layout.trained:
            if not np.isfinite(arrays[name]).all():
                raise DeltaflError(
                    f"array {name!r} of the model has entries that are not finite; write "
                    f"buffers=[{name!r}] if it is no parameter, such as the mask of an attention"
                )
        if self.plan.part("dp") is not None:
            self.layout.require_no_means(", or keep it at the clients by local=[...]")

    @property
    def keys(self) -> list[str]:
        """The clients' keys, by index."""
        return list(self.clients)

    @property
    def current(self) -> RoundState:
        """The state of the rounds, once there are clients."""
        assert self.state is not None
        return self.state

    @property
    def round(self) -> int:
        """How many rounds were closed."""
        return 0 if self.state is None else self.state.round

    @property
    def params_d(self) -> Params:
        """The global model as a flat vector."""
        return self._initial_d if self.state is None else self.state.params_d

    @cached_property
    def frozen_digest(self) -> str:
        """What the trained arrays were trained beside, which no saved state holds."""
        digest = sha256()
        for name in self.layout.names("frozen"):
            digest.update(np.ascontiguousarray(self.unsent[name]).data)
        return digest.hexdigest()

    def arrays(self) -> Arrays:
        """The global model as named arrays, as it is sent."""
        return self.layout.sent(self.layout.rebuild(self.params_d, self.rest))

    def model(self) -> Arrays:
        """The model to use, ``Plan.model``, with all arrays of the initial model."""
        params_d = self.params_d if self.state is None else self.plan.model(self.state)
        return self.layout.rebuild(params_d, {**self.rest, **self.unsent})

    def admit(self, infos: Mapping[str, ClientInfo]) -> None:
        """Let clients join, or change what they report.

        Newcomers that do not fit into memory, or into the sampler's state, are left out.
        """
        known = dict(self.clients)
        for key in infos.keys() & known.keys():
            # An answer to the census stays: then nothing else is reported.
            known[key] = infos[key]._replace(aux=infos[key].aux or known[key].aux)
        # Nodes connect in any order: sort newcomers, partition 10 after partition 9.
        newcomers = sorted(
            infos.keys() - known.keys(),
            key=lambda key: (len(key), key),
        )
        try:
            self._set_clients({**known, **{key: infos[key] for key in newcomers}})
            self.seen.update(dict.fromkeys(newcomers, self.round))
        except CannotResizeError as error:
            left_out = [key for key in newcomers if key not in self._left_out]
            if left_out:  # said once: they ask again in every round
                self.warnings.append(f"{', '.join(left_out)} cannot join: {error}")
            self._left_out = set(newcomers)
            self._reweigh(known)

    def _reweigh(self, known: dict[str, ClientInfo]) -> None:
        """Let the clients that are there already change; where the state cannot follow, they count
        as before.
        """
        try:
            self._set_clients(known)
        except CannotResizeError as error:
            self.warnings.append(f"clients that report other sizes count as before: {error}")

    def unanswered(self) -> list[str]:
        """Clients that have not answered the census; nobody where there is none."""
        census = self.plan.census
        if census is None:
            return []
        length = census.length(self.layout.num_params)
        return [key for key, info in self.clients.items() if len(info.aux) != length]

    def answer(self, answers: Mapping[str, tuple[float, ...]]) -> None:
        """Take clients' answers to the census; auxiliary variables are made anew of all of them."""
        answered = {key: self.clients[key]._replace(aux=answer) for key, answer in answers.items()}
        self._set_clients({**self.clients, **answered})

    def forget(self, keys: Collection[str]) -> None:
        """Drop clients for good: their weight, their scores and all that is remembered of them."""
        left = {key: info for key, info in self.clients.items() if key not in keys}
        if not left:
            raise DeltaflError(
                "every known client is to be forgotten; start with a new state_path instead"
            )
        self._keep(left)
        self.kept.clear()  # they know these clients
        self.scales.begin_anew()  # their part of the model is still in it

    def let_go(self, present: Collection[str]) -> None:
        """Take clients out of the target that are away for more than ``absent_after`` rounds."""
        self.seen.update({key: self.round for key in present if key in self.clients})
        after = self.rules.absent_after
        most = inf if after is None else after
        # A state that is put back may know clients that have left since.
        left = {
            key: info
            for key, info in self.clients.items()
            if self.round - self.seen.get(key, -inf) <= most
        }
        gone = [key for key in self.clients if key not in left]
        if not gone or not left:
            return
        # Some samplers describe all clients jointly: theirs keep their weights.
        with suppress(CannotResizeError):
            self._keep(left)
            self.warnings.append(
                f"{counted(len(gone), 'client was', 'clients were')} not there for "
                f"{counted(after, 'round')}; not counted until they return: {listed(gone)}"
            )

    def _keep(self, left: dict[str, ClientInfo]) -> None:
        """Continue with some of the clients, and nothing that is known of the others."""
        gone = self.clients.keys() - left.keys()
        self._set_clients(
            left,
            [k for k, key in enumerate(self.clients) if key in left],
        )
        for key in gone:
            self.scales.known.pop(key, None)
            self.seen.pop(key, None)

    def questions(self, cohort: Cohort) -> list[Question]:
        """What the clients of a cohort are asked, one question for all whose drift is the same."""
        keys = self.keys_of(cohort)
        drift = self.plan.drifts(self.current, cohort.client_n)
        trained = self.layout.trained
        asked = dict[str, Any]()
        if self.plan.codes(cohort):
            asked = {CODE: True, TRAINED: list(trained)}
        if drift is None:
            return [Question(keys, asked, {})]
        asked[STEP_FACTOR] = self.plan.step_factor
        # The same for all, as with ``mime`` alone: one message serves everybody.
        if drift.ndim == 1:
            return [Question(keys, asked, split(drift, trained))]
        return [
            Question([key], asked, split(drift_d, trained))
            for key, drift_d in zip(keys, drift, strict=True)
        ]

    def keys_of(self, cohort: Cohort) -> list[str]:
        """The keys of a cohort's clients, in its order."""
        keys = self.keys
        return [keys[client] for client in cohort.client_n]

    def open(self, present: Collection[str]) -> Cohort:
        """Select from the clients that are present, once those who are away for long have left;
        the same cohort until the round is closed.
        """
        self.let_go(present)
        available_m = np.array([key in present for key in self.clients], np.bool_)
        return open_round(self.plan, self.current, available_m)

    def close(self, cohort: Cohort, replies: Mapping[str, ClientReply]) -> RoundInfo:
        """Close the round with the replies by key; those that are missing did not reply.

        Where the model is lost, the oldest of the last good states takes its place.
        """
        plan = self.plan
        state = self.current
        sent = self.arrays()
        client_n = cohort.client_n.tolist()
        keys = self.keys_of(cohort)
        # Whether an update is refused, a model put back or a round left out would show without
        # noise what clients sent.
        private = plan.part("dp") is not None
        self.keep()
        trained = {name: sent[name] for name in self.layout.trained}
        reply_n = [replies.get(key, ClientReply()) for key in keys]
        if plan.codes(cohort):
            reply_n = [self._decoded(reply) for reply in reply_n]
        reply_n = [self._judged(reply) for reply in reply_n]
        updates = [reply.update(trained) for reply in reply_n]
        far = dict[int, str]()
        if not private:
            far = self.scales.too_far(keys, updates, state.params_d)
        for place, fault in far.items():
            updates[place] = None
            reply_n[place] = reply_n[place]._replace(fault=fault)

        round = Accumulator(plan, state, cohort)
        round.add_rows(
            updates,
            reports_of(reply_n, [update is not None for update in updates]),
        )
        self.state, info = round.close()
        used_n = round.reports.responded_n
        self.used = dict(zip(compress(keys, used_n), round.coef_n.tolist(), strict=True))
        if self.rest:
            received = [reply.arrays or {} for reply in compress(reply_n, used_n)]
            # A mean of buffers is moved by one client alone, a median is not.
            robust = plan.part("clip") is not None
            self.rest = mean_rest(self.layout, sent, received, round.coef_n, median=robust)
        if not private and not used_n.any() and looks_like_outage(state, cohort):
            # The round did not happen, but who was away, was away.
            missed_m = self.state.missed_m
            self.state = self._going_on_from(state)._replace(missed_m=missed_m)
            self.warnings.append(
                "no reply could be used, which looks like an outage: the round changes nothing"
            )

        faults = [
            RejectedReply(client, printable(reply.fault, 400))
            for client, reply in zip(client_n, reply_n, strict=True)
            if reply.fault is not None
        ]
        if not private:
            reported_k = np.flatnonzero(used_n & round.reports.has_loss_n)
            losses = {keys[place]: float(round.reports.loss_n[place]) for place in reported_k}
            # An update far away says more of the model than replies that are faulty anyway.
            seen = info._replace(rejected=faults) if far else info
            self._go_back_if(self.scales.see(seen, losses, self.params_d))
        named = [
            RejectedReply(client, reason + self._where(updates[client_n.index(client)]))
            for client, reason in info.rejected
        ]
        return info._replace(rejected=sorted([*named, *faults]))

    def keep(self) -> None:
        """Keep the present state, to go back to it. One that looks lost is none to return to; the
        first one is kept in any case.
        """
        if self.scales.sound or not self.kept:
            self.kept.append(Kept(self.clients, self.plan, self.current, self.rest))

    def _where(self, update_d: Params | None) -> str:
        """In which array an update has an entry that nothing accepts, for a message."""
        if update_d is None:
            return ""
        parts = split(update_d, self.layout.trained)
        found = [name for name, part in parts.items() if not np.all(np.abs(part) <= LARGEST_ENTRY)]
        return f", in {listed(found)}" if found else ""

    def _go_back_if(self, symptom: str | None) -> None:
        """Where the model is lost, take the oldest state that is kept, with its clients.

        Later rounds draw as they would have drawn.
        """
        if symptom is None:
            return
        # The oldest, for the cause may lie some rounds before the symptom.
        self.clients, self.plan, state, self.rest = self.kept[0]
        self.warnings.append(f"{symptom}: the model of round {state.round} is put back")
        if self.plan.memory.folder is not None:  # its rows are gone from the file
            state = state._replace(control=init_round(self.plan, state.params_d).control)
        self.state = self._going_on_from(state)
        self.kept.clear()

    def _going_on_from(self, before: RoundState) -> RoundState:
        """An earlier state in the place of the present one: the rounds since then are left out."""
        now = self.current
        parts = {
            part.name: part.left_out(before.parts[part.name], now.parts[part.name])
            for part in self.plan.parts
        }
        return before._replace(
            round=now.round,
            left_out=before.left_out + now.round - before.round,
            parts=parts,
        )

    def _set_clients(
        self,
        clients: dict[str, ClientInfo],
        kept_k: list[int] | None = None,
    ) -> None:
        """Continue with these clients; all or nothing. Once rounds were played, what cannot be done
        is a ``CannotResizeError``.
        """
        # A state is made anew in all its arrays: not in every round in which nothing has changed.
        if clients == self.clients:
            return
        try:
            plan = self.rules.plan_for(clients)
            if len(clients) > len(self.clients):
                self.require_room(len(clients))
            if self.state is None or self.round == 0:  # a census sets what rounds begin with
                self.state = init_round(plan, self._initial_d)
            else:
                self.state = resize_state(plan, self.state, kept_k)
        except DeltaflError as error:
            # Later on, such as where more clients come than a sampler can do, the rounds go on
            # with those who are there.
            if self.round == 0:
                raise
            raise CannotResizeError(str(error)) from None
        self.clients = clients
        self.plan = plan

    def require_room(self, num_clients: int) -> None:
        """Refuse more clients than one update of each fits in for."""
        plan = self.rules.plan
        folder = self.rules.state_path
        rows = plan.memory
        if not plan.rule.control.remembers:
            return
        changed = None if folder is None else self.rules.cohort_size(num_clients)
        size = memory_size(rows, (num_clients, self.layout.num_params), changed)
        # What clients that have replied take is in use already, and no more is asked for it.
        held = 0
        if rows.folder is None:  # the disk has each state that is kept, and one being written
            size = size._replace(disk=size.disk // 2 * (KEPT + 1))
            if self.state is not None:
                held = int(np.count_nonzero(self.state.responded_m))
        held *= self.layout.num_params * DTYPES[rows.dtype].itemsize
        require_room(size, rows, folder, "a lower n", "state_path", held)

    def _decoded(self, reply: ClientReply) -> ClientReply:
        """A reply whose trained arrays are those that its code stands for; one without a code, of a
        client that cannot make it, has them itself.
        """
        if reply.arrays is None or reply.code is None:
            return reply
        try:
            code_c = read_numbers(reply.code, code_length(self.layout.num_params), "the code")
        except DeltaflError as error:
            return reply._replace(fault=str(error))
        with np.errstate(over="ignore"):  # what is infinite is refused, as in any reply
            params_d = self.params_d + read_codes(np.array([code_c]), self.layout.num_params)[0]
        whole = self.layout.rebuild(params_d, reply.arrays)
        return reply._replace(arrays=self.layout.sent(whole))

    def _judged(self, reply: ClientReply) -> ClientReply:
        """The reply with its fault, if it has one; the core checks its numbers and its update."""
        if reply.arrays is None or reply.fault is not None:
            return reply
        if self.plan.drifting and reply.corrected != self.plan.step_factor:
            return reply._replace(fault=NOT_CORRECTED)
        return reply._replace(fault=self.layout.fault(reply.arrays))


def looks_like_outage(state: RoundState, cohort: Cohort) -> bool:
    """Whether these clients are unlikely to have failed independently: prod_i (1 - r_i) < 0.001.

    An outage of the server's network, counted as a failure of each client, would inflate their
    weights for long. r_i = (responded_i + 2 r) / (selected_i + 2), with r = (responded + 1) /
    (selected + 2) over all clients: the mean of a beta distribution, so that rarely selected
    clients count like the others. One silent client proves nothing.
    """
    client_n = cohort.client_n
    if cohort.kind == EVERYONE:  # a full first round, which no later one makes up for
        return True
    if len(client_n) < 2:
        return False
    responded_m = np.asarray(state.responded_m, float)
    selected_m = np.asarray(state.selected_m, float)
    overall = (responded_m.sum() + 1) / (selected_m.sum() + 2)
    rate_n = (responded_m[client_n] + 2 * overall) / (selected_m[client_n] + 2)
    return bool(np.prod(1 - rate_n) < 1e-3)
