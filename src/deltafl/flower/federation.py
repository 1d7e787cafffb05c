"""Rounds over clients who come and go: what a federation needs beside ``open_round`` and ``close_round``.

No Flower here, so that all of it can be tested and reasoned about without messages. A client is a *key*, a string that
outlives connections and restarts; its index in the population is the order in which keys were admitted.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from ..errors import DeltaflError
from ..estimators.remote import RemoteReply, begin_anew
from ..round import Plan, RoundState, close_round, coefficients, init_round, open_round, response_rates
from ..types import Cohort, Params, RejectedReply, RoundInfo
from .answers import Answer, reports_of, screen
from .arrays import Arrays, Layout, mean_rest
from .clipping import WithNoise
from .growth import CannotGrowError, grow_state
from .outage import looks_like_outage
from .remembering import expected_of, forgot, lost_memory
from .roster import Roster, Said
from .rules import Rules
from .sketched import by_sketch


class Federation:
    """Clients, the model and the state of the rounds.

    Attributes:
        rules: What does not change; with a folder for the clients' updates, if these are to be in a file.
        roster: Who was admitted; a client's index is its place there.
        layout: The model's arrays.
        rest: Its buffers and counters.
        state: The state of the rounds; None before anybody was admitted.
        news: Sentences for the log; who writes them there empties the list.
    """

    def __init__(self, rules: Rules, arrays: Arrays, layout: Layout) -> None:
        self.rules, self.layout = replace(rules, memory=rules.memory.placed()), layout
        self.roster = Roster()
        self.rest: Arrays = layout.rest(arrays)
        self.state: RoundState | None = None
        self.news: list[str] = []
        self._left_out: set[str] = set()
        self._plan: Plan | None = None
        self._initial_d = layout.flatten(arrays)

    @property
    def plan(self) -> Plan:
        """The plan for the clients known now."""
        if self._plan is None:
            raise DeltaflError("no client has been admitted yet")
        return self._plan

    @property
    def current(self) -> RoundState:
        """The state of the rounds."""
        if self.state is None:
            raise DeltaflError("no client has been admitted yet")
        return self.state

    @property
    def params_d(self) -> Params:
        """The global model as a flat vector."""
        return self._initial_d if self.state is None else self.state.params_d

    def arrays(self) -> Arrays:
        """The global model: what is sent."""
        return self.layout.rebuild(self.params_d, self.rest)

    def admit(self, said: Mapping[str, Said]) -> None:
        """Let clients join, or change what they say of themselves; the weights follow.

        Newcomers are left out, and named once in the news, where the sampler's memory is about all clients at once, or
        after the first round where there is no room to remember an update of each.

        Args:
            said: Key -> what a client says of itself, with ``rules.known`` numbers that are known of it.

        Raises:
            DeltaflError: If a size is not a number from 1 to 2^40, or one update a client does not fit before the first
                round.
        """
        roster = self.roster.told(said)
        try:
            self._enroll(roster)
        except CannotGrowError as error:
            left_out = [key for key in roster.keys[len(self.roster.keys) :] if key not in self._left_out]
            if left_out:
                self._left_out.update(left_out)
                self.news.append(f"{', '.join(left_out)} cannot join: {error}")
            self._enroll(self.roster.told({key: now for key, now in said.items() if key in self.roster.place}))

    def forget(self, keys: Collection[str]) -> None:
        """Drop clients for good: their weight, their scores, what is remembered of them.

        Raises:
            DeltaflError: If nobody would be left, or the sampler's memory is about all clients at once.
        """
        roster = self.roster.without(keys)
        if not roster.keys and self.roster.keys:
            raise DeltaflError("every known client is to be forgotten; start with a new state_path instead")
        try:
            self._enroll(roster, [self.roster.place[key] for key in roster.keys])
        except CannotGrowError:
            gone = ", ".join(key for key in self.roster.keys if key not in roster.place)
            raise DeltaflError(
                f"{gone} cannot be forgotten: {type(self.rules.sampler).__name__} remembers all clients at once; "
                "choose a new state_path to begin without, or leave forget out"
            ) from None

    def _enroll(self, roster: Roster, kept_k: list[int] | None = None) -> None:
        """Go on with these clients; all or nothing."""
        if roster is self.roster:
            return
        plan = self.rules.plan(roster.sizes, roster.known)
        if len(roster.keys) > len(self.roster.keys):
            self._require_room(len(roster.keys))
        if self.state is None:
            state = init_round(plan, self._initial_d)
        else:
            state = grow_state(plan, self.state, self.plan.population.weight_m, kept_k)
            if forgot(self.state.control, state.control):
                self.news.append("the weights of known clients changed: the memories that all clients keep begin anew")
        self.news += _heavy(self.roster, roster, plan)
        self.roster, self.state, self._plan = roster, state, plan

    def _require_room(self, num_clients: int) -> None:
        """Refuse more clients than there is room to remember; newcomers alone once there were rounds."""
        if not self.rules.remembers:
            return
        seen = 0 if self.state is None else int(np.count_nonzero(self.state.responded_m))
        try:
            self.rules.memory.require_room(num_clients, self.layout.num_params, self.rules.n, seen)
        except DeltaflError as error:
            if self.state is None or self.state.round == 0:
                raise
            raise CannotGrowError(str(error)) from None

    def restore(self, roster: Roster, state: RoundState, rest: Arrays) -> None:
        """Go on from a saved state."""
        self.roster, self.state, self.rest = roster, state, rest
        self._plan = self.rules.plan(roster.sizes, roster.known)

    def expected(self, client: int) -> int | None:
        """The memory of its own that a client is asked to subtract; None if the estimator needs none."""
        return expected_of(self.current.control, client)

    def open(self, present: Collection[str]) -> Cohort:
        """Decide who of the clients that are present is asked; the same answer until the round is closed."""
        available_m = np.array([key in present for key in self.roster.keys], dtype=np.bool_)
        return open_round(self.plan, self.current, available_m)

    def close(self, cohort: Cohort, answers: Mapping[int, Answer], rng: np.random.Generator | None = None) -> RoundInfo:
        """Take the replies in.

        Args:
            cohort: What ``open`` returned.
            answers: Client index -> its answer; who is missing did not reply.
            rng: Source of the noise, for tests.

        Returns:
            What a person wants to see; refused replies are named in ``rejected``.
        """
        plan, state, sent = self.plan, self.current, self.arrays()
        screened = [
            screen(answers.get(client), self.layout, self.rules.sketch, self.expected(client), self.rules.loss_of)
            for client in cohort.client_n.tolist()
        ]
        update_n = [self._update(answer, sent) for answer in screened]
        largest = float(coefficients(plan, state, cohort).max(initial=0.0)) if self.rules.clipping else 0.0
        closing = self._sketched(self._noisy(plan, largest, rng), state, cohort, screened)
        following, info = close_round(closing, state, cohort, update_n, reports_of(screened, update_n))
        used = set(np.flatnonzero(following.responded_m - state.responded_m).tolist())
        self.rest = self._mean_rest(plan, state, cohort, used, answers, sent)
        self.state = self._following(following, cohort, screened, anybody=bool(used))
        faults = [
            RejectedReply(client, answer.fault)
            for client, answer in zip(cohort.client_n.tolist(), screened, strict=True)
            if answer is not None and answer.fault is not None
        ]
        return info._replace(rejected=sorted([*info.rejected, *faults]))

    def response_rates(self) -> dict[str, float]:
        """Each client's share of answers, as the next round will assume it."""
        return dict(zip(self.roster.keys, response_rates(self.plan, self.current).tolist(), strict=True))

    def _following(
        self, following: RoundState, cohort: Cohort, answers: list[Answer | None], anybody: bool
    ) -> RoundState:
        """The state after a round, with what is not any client's own failure left out of it.

        A client that lost its part of a memory was not to blame, and everybody's begins anew. If nobody answered for
        such a reason, or in an outage, the round did not happen: no step, nothing learnt.
        """
        before = self.current
        lost_n = np.array(
            [
                answer is not None and lost_memory(answer.since, self.expected(client))
                for client, answer in zip(cohort.client_n.tolist(), answers, strict=True)
            ],
            dtype=np.bool_,
        )
        if not anybody and (lost_n.any() or looks_like_outage(before, cohort.client_n)):
            if not lost_n.any():
                self.news.append("nobody answered, which is no chance failure of so many: the round changes nothing")
            following = before._replace(round=following.round)
        elif lost_n.any():
            following = following._replace(selected_m=before.selected_m.plus_one(cohort.client_n[~lost_n]))
        if not lost_n.any():
            return following
        lost = [self.roster.keys[client] for client in cohort.client_n[lost_n].tolist()]
        self.news.append(
            f"{', '.join(lost)} lost the memory that the server counts on: those of all clients begin anew"
        )
        return following._replace(control=begin_anew(following.control))

    def _update(self, answer: Answer | None, sent: Arrays) -> Params | RemoteReply | None:
        if answer is None or answer.fault is not None or answer.arrays is None:
            return None
        update_d = self.layout.update(answer.arrays, sent)
        if answer.since is not None:
            return RemoteReply(update_d, answer.since)
        return self.rules.clipping.clip(update_d) if self.rules.clipping else update_d

    def _noisy(self, plan: Plan, largest_coef: float, rng: np.random.Generator | None) -> Plan:
        """The plan of this round, with noise if there is to be any."""
        if self.rules.clipping is None:
            return plan
        noise_d = self.rules.clipping.noise(largest_coef, self.layout.num_params, rng)
        return replace(plan, server_optimizer=WithNoise(plan.server_optimizer, noise_d))

    def _sketched(self, plan: Plan, state: RoundState, cohort: Cohort, answers: list[Answer | None]) -> Plan:
        """The plan of this round, with a sampler that learns from the clients' sketches if there are to be any."""
        if self.rules.sketch == 0:
            return plan
        sketch_nq = np.zeros((len(answers), self.rules.sketch))
        for row_q, answer in zip(sketch_nq, answers, strict=True):
            if answer is not None and answer.fault is None and answer.sketch is not None:
                row_q[:] = answer.sketch
        return replace(plan, sampler=by_sketch(plan, state, cohort, sketch_nq))

    def _mean_rest(
        self,
        plan: Plan,
        state: RoundState,
        cohort: Cohort,
        used: set[int],
        answers: Mapping[int, Answer],
        sent: Arrays,
    ) -> Arrays:
        """Buffers and counters after the round."""
        if not self.rest:
            return self.rest
        here = np.array([client in used for client in cohort.client_n.tolist()], dtype=np.bool_)
        heard = Cohort(cohort.client_n[here], cohort.count_n[here], cohort.expected_n[here], cohort.kind)
        received = [answers[client].arrays or {} for client in heard.client_n.tolist()]
        return mean_rest(self.layout, sent, received, coefficients(plan, state, heard))


def _heavy(old: Roster, new: Roster, plan: Plan) -> list[str]:
    """What to say of a client that joins, or grows, to more than half of the weight of three clients or more."""
    weight_m = plan.population.weight_m
    place = int(weight_m.argmax())
    key, said = new.keys[place], new.said[place]
    if len(weight_m) < 3 or weight_m[place] <= 0.5 or (key in old.place and old.said[old.place[key]] == said):
        return []
    return [
        f"{key} says it holds {said.num_examples} examples, {weight_m[place]:.0%} of the weight of all clients; if "
        "that is not true, name it in forget=[...]"
    ]
