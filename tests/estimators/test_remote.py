"""A memory that the clients keep: the same models as one that the server keeps, whatever gets
lost.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import Recorder
from deltafl import (
    Broadcast,
    ClientMemory,
    DeltaflError,
    Fixed,
    Plan,
    Population,
    RemoteReply,
    RoundState,
    Sampler,
    Sgd,
    broadcast,
    close_round,
    init_round,
    make_sampler,
    open_round,
    stream,
)
from deltafl.estimators.remote import NOTHING, begin_anew
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import plan_of
from deltafl.types import FloatArray, Params

M = 9
N = 3
D = 4
POPULATION = Population.from_sizes(list(range(1, M + 1)))
#: update(what the client was sent, round, client)
Update = Callable[[Broadcast, int, int], Params]


def smooth(sent: Broadcast, round: int, client: int) -> Params:
    """An update that depends on the model, the client and the round."""
    noise_d = stream(3, "audit", round, client).normal(size=D)
    update_d = -0.1 * (sent.params_d - client) + 0.1 * noise_d
    return (update_d if sent.drift_d is None else update_d + sent.drift_d).astype(np.float32)


def dyadic(sent: Broadcast, round: int, client: int) -> Params:
    """An update on a grid of 2^-6: differences are float32 numbers."""
    return (np.round(64 * stream(3, "audit", round, client).normal(size=D)) / 64).astype(np.float32)


def fate(round: int, client: int) -> str:
    """What becomes of a reply: one in six is not sent, one in six is lost on its way, one in six
    arrives broken.
    """
    return ("silent", "lost", "broken", "taken", "taken", "taken")[
        int(stream(5, "audit", round, client).integers(6))
    ]


class Clients:
    """A host's clients with their memories."""

    def __init__(self) -> None:
        self.memories = [ClientMemory(D) for _ in range(M)]

    def play(
        self, plan: Plan, state: RoundState, update: Update, failing: bool = True
    ) -> RoundState:
        """One round in which replies may fail."""
        sent = broadcast(plan, state)
        cohort = open_round(plan, state)
        replies = list[Any]()
        for client in cohort.client_n.tolist():
            what = fate(state.round, client) if failing else "taken"
            reply: Any = update(sent, state.round, client)
            broken: Any = np.full(D, np.nan, dtype=np.float32)
            if plan.rule.name.endswith("-remote"):
                taken = int(state.control.taken_m[client])
                reply = (
                    self.memories[client].reply(reply, taken, sent.drift_d)
                    if what != "silent"
                    else None
                )
                broken = RemoteReply(broken, taken)
            replies.append({"taken": reply, "broken": broken}.get(what))
        return close_round(plan, state, cohort, replies)[0]

    def settle(self, state: RoundState) -> FloatArray:
        """All c_i, once every client has heard what became of its last reply."""
        for memory, taken in zip(self.memories, state.control.taken_m.tolist(), strict=True):
            memory.reply(np.zeros(D, dtype=np.float32), taken)
        return np.array([memory.control_d for memory in self.memories])


FORMS = ("difference-own", "innovation")


def both(
    form: str, update: Update, mime: float = 0.0, sampler: Sampler | None = None
) -> list[tuple[Params, Params]]:
    """Models of both forms after each of 40 rounds."""
    sampler = sampler or Fixed()
    plans = [
        Plan(POPULATION, sampler, N, name, Sgd(), mime=mime) for name in (form, f"{form}-remote")
    ]
    states = [init_round(plan, np.zeros(D)) for plan in plans]
    models = []
    clients = Clients()
    for _ in range(40):
        states = [
            clients.play(plan, state, update) for plan, state in zip(plans, states, strict=True)
        ]
        models.append((states[0].params_d, states[1].params_d))
    own = states[0].control.own if form == "innovation" else states[0].control
    np.testing.assert_allclose(own.total_d, states[1].control.total_d, rtol=1e-5, atol=1e-6)
    return models


def test_both_forms_give_the_same_models() -> None:
    """Bit for bit where differences are exact, else up to the rounding of what is sent."""
    assert all(np.array_equal(kept, sent) for kept, sent in both("difference-own", dyadic))
    for form in FORMS:
        for mime in (0.0, 0.5):
            for kept, sent in both(form, smooth, mime):
                np.testing.assert_allclose(kept, sent, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "label", ["innovation", "innovation@local-pivotal", "spread", "delta-centred"]
)
def test_both_forms_draw_the_same_cohorts_where_scores_are_learnt(form: str, label: str) -> None:
    """Scores and sketches of u_i - c_i are those of what was sent."""
    for kept, sent in both(form, smooth, sampler=make_sampler(label)):
        np.testing.assert_allclose(kept, sent, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_sum_is_that_of_the_clients_memories(form: str) -> None:
    """After lost and broken replies, and after a new start of the server, which is one of all
    clients.
    """
    plan = Plan(POPULATION, Fixed(), N, f"{form}-remote", Recorder())
    state = init_round(plan, np.zeros(D))
    clients = Clients()
    for _ in range(2):
        for _ in range(40):
            state = clients.play(plan, state, smooth)
        np.testing.assert_allclose(
            state.control.total_d, POPULATION.weight_m @ clients.settle(state), rtol=1e-10
        )
        state = state._replace(control=begin_anew(state.control), round=0)


def test_a_client_that_lost_its_memory_is_refused_until_the_server_begins_anew() -> None:
    plan = Plan(POPULATION, Fixed(), N, "innovation-remote", Recorder())
    state = init_round(plan, np.zeros(D))
    clients = Clients()
    for _ in range(6):
        state = clients.play(plan, state, smooth, failing=False)
    ids = open_round(plan, state).client_n.tolist()
    taken_m = state.control.taken_m
    client = next(i for i in ids if taken_m[i] != NOTHING)
    clients.memories[client] = ClientMemory(D)
    update_d = np.ones(D, dtype=np.float32)
    replies = [
        clients.memories[i].reply(update_d, -1 if i == client else int(taken_m[i])) for i in ids
    ]
    after, info = close_round(plan, state, open_round(plan, state), replies)
    assert [(reply.client, "lost its memory" in reply.reason) for reply in info.rejected] == [
        (client, True)
    ]
    assert info.num_responded == len(ids) - 1
    state = after._replace(control=begin_anew(after.control))
    for _ in range(30):
        state = clients.play(plan, state, smooth)
    np.testing.assert_allclose(
        state.control.total_d, POPULATION.weight_m @ clients.settle(state), rtol=1e-10
    )


class Server:
    """The names that a server gives to the memory of one client, whose replies it sees as they
    are sent.
    """

    def __init__(self) -> None:
        self.plan = Plan(
            Population.from_sizes([1]), Fixed(), 1, "difference-own-remote", Recorder()
        )
        self.state = init_round(self.plan, np.zeros(1))

    @property
    def taken(self) -> int:
        return int(self.state.control.taken_m[0])

    def take(self, reply: RemoteReply) -> float:
        self.state, _ = close_round(
            self.plan, self.state, open_round(self.plan, self.state), [reply]
        )
        return float(reply.difference_d[0])


def one(number: float) -> Params:
    return np.array([number], dtype=np.float32)


def test_clients_follow_a_server_that_goes_back() -> None:
    """To the last c_i but one; further back it needs a new start, which -1 is."""
    memory = ClientMemory(1)
    server = Server()
    names = []
    for number in (1.0, 2.0, 3.0, 4.0):
        server.take(memory.reply(one(number), server.taken))
        names.append(server.taken)
    assert memory.control_d.tolist() == [3.0]
    assert (
        memory.reply(one(9.0), names[1]).difference_d == 7.0
    )  # the server restarted from before the third reply
    assert not memory.follows(names[0])
    with pytest.raises(
        DeltaflError, match="a c_i that this client does not have: begin the server's memory anew"
    ):
        memory.reply(one(9.0), names[0])
    assert memory.reply(one(9.0), -1).difference_d == 9.0


def test_sides_that_disagree_notice_it() -> None:
    """A reply that changed on its way, and one of another client's memory, have other names than
    the client knows.
    """
    memory = ClientMemory(1)
    server = Server()
    reply = memory.reply(one(2.0), server.taken)
    server.take(reply._replace(difference_d=one(2.5)))
    assert not memory.follows(server.taken)
    other = ClientMemory(1)
    stranger = Server()
    stranger.take(other.reply(one(2.0), stranger.taken))
    assert memory.follows(stranger.taken)  # the same history is the same c_i
    stranger.take(other.reply(one(2.0), stranger.taken))
    assert not memory.follows(stranger.taken)  # c_i = 2 as well, but after two replies


def test_what_arrived_otherwise_than_sent_can_be_put_right() -> None:
    memory = ClientMemory(1)
    server = Server()
    reply = memory.reply(one(2.0), server.taken)
    memory.sent_as(one(2.5))
    server.take(reply._replace(difference_d=one(2.5)))
    assert memory.reply(one(4.0), server.taken).difference_d == 1.5


@pytest.mark.parametrize("size", [1, 2])
def test_a_memory_goes_on_from_its_arrays(size: int) -> None:
    memory = ClientMemory(1)
    server = Server()
    for number in (1.0, 2.0):
        server.take(memory.reply(one(number), server.taken))
    again = ClientMemory(size)
    again.restore(memory.arrays())
    assert again.follows(server.taken) == (size == 1)
    if size == 1:
        assert again.reply(one(5.0), server.taken).difference_d == 3.0


def test_replies_of_the_wrong_kind_are_an_error_of_the_host() -> None:
    """Plain updates under a remote estimator would be an estimate that grows without bound,
    under a flag 'unbiased'.
    """
    update_nd = np.ones((N, D), dtype=np.float32)
    replies = [RemoteReply(update_d, -1) for update_d in update_nd]
    for estimator, given, message in (
        (
            "innovation-remote",
            update_nd,
            "client 0 is no RemoteReply; .* deltafl.ClientMemory.reply",
        ),
        ("innovation", replies, "is a RemoteReply; .* with any other the update itself"),
        ("horvitz-thompson", [update_nd[0], None, replies[0]], "is a RemoteReply"),
        ("innovation-remote", replies[:2], "must have 3 rows"),
    ):
        plan = Plan(POPULATION, Fixed(), N, estimator, Recorder())
        state = init_round(plan, np.zeros(D))
        with pytest.raises(DeltaflError, match=message):
            close_round(plan, state, open_round(plan, state), given)


def test_samplers_that_look_at_the_updates_own_entries_and_simulations_are_refused() -> None:
    with pytest.raises(DeltaflError, match="HicsFL looks at the last entries of updates"):
        Plan(POPULATION, make_sampler("hics-fl"), N, "innovation-remote")
    settings = make_settings(
        RunSettings, {"task": "toy", "sampler": "uniform@systematic@innovation-remote"}
    )
    with pytest.raises(DeltaflError, match="which simulated ones do not: write 'innovation'"):
        plan_of(settings, POPULATION)
