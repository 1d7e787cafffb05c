"""A memory that the clients keep: the same models as one that the server keeps, whatever gets lost."""

from collections.abc import Callable

import numpy as np
import pytest

from conftest import Recorder
from deltafl import (
    Broadcast,
    DeltaflError,
    Fixed,
    Plan,
    Population,
    RoundState,
    Sgd,
    broadcast,
    close_round,
    init_round,
    open_round,
    stream,
)
from deltafl.estimators.remote import ClientMemory, RemoteControl
from deltafl.estimators.table import find_estimator
from deltafl.settings import RunSettings, make_settings
from deltafl.simulation.setup import plan_of
from deltafl.types import FloatArray, Params

M, N, D = 9, 3, 4
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
    """What becomes of a reply: one in six is not sent, one in six is lost on its way, one in six arrives broken."""
    return ("silent", "lost", "broken", "taken", "taken", "taken")[int(stream(5, "audit", round, client).integers(6))]


class Clients:
    """A host's clients with their memories."""

    def __init__(self, keep: int = 2) -> None:
        self.memories = [ClientMemory(D, keep) for _ in range(M)]

    def play(self, plan: Plan, state: RoundState, update: Update, failing: bool = True) -> RoundState:
        """One round in which replies may fail."""
        sent, cohort, replies = broadcast(plan, state), open_round(plan, state), list[Params | None]()
        for client in cohort.client_n.tolist():
            what = fate(state.round, client) if failing else "taken"
            update_d = update(sent, state.round, client)
            if what != "silent" and plan.estimator.endswith("-remote"):
                taken = int(state.control.taken_m[client])
                update_d = self.memories[client].reply(update_d, state.round, taken, sent.drift_d)
            broken_d = np.full(D, np.nan, dtype=np.float32)
            replies.append({"taken": update_d, "broken": broken_d}.get(what))
        return close_round(plan, state, cohort, replies)[0]


FORMS = ("difference-own", "innovation")


def both(form: str, update: Update, mime: float = 0.0) -> list[tuple[Params, Params]]:
    """Models of both forms after each of 40 rounds."""
    plans = [Plan(POPULATION, Fixed(), N, name, Sgd(), mime=mime) for name in (form, f"{form}-remote")]
    states, models, clients = [init_round(plan, np.zeros(D)) for plan in plans], [], Clients()
    for _ in range(40):
        states = [clients.play(plan, state, update) for plan, state in zip(plans, states, strict=True)]
        models.append((states[0].params_d, states[1].params_d))
    own = states[0].control.own if form == "innovation" else states[0].control
    np.testing.assert_allclose(own.total_d, states[1].control.total_d, rtol=1e-5, atol=1e-6)
    return models


def test_both_forms_give_the_same_models_bit_for_bit_where_differences_are_exact() -> None:
    assert all(np.array_equal(kept, sent) for kept, sent in both("difference-own", dyadic))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mime", [0.0, 0.5])
def test_both_forms_give_the_same_models_up_to_the_rounding_of_what_is_sent(form: str, mime: float) -> None:
    for kept, sent in both(form, smooth, mime):
        np.testing.assert_allclose(kept, sent, rtol=2e-6, atol=2e-6)


def test_the_sum_is_that_of_the_clients_memories() -> None:
    """After any number of lost and broken replies, once every client has heard what became of its last one."""
    plan = Plan(POPULATION, Fixed(), N, "innovation-remote", Recorder())
    state, clients = init_round(plan, np.zeros(D)), Clients()
    for _ in range(60):
        state = clients.play(plan, state, smooth)
    for client, memory in enumerate(clients.memories):
        memory.reply(np.zeros(D, dtype=np.float32), state.round, int(state.control.taken_m[client]))
    control_md = np.array([memory.control_d for memory in clients.memories])
    np.testing.assert_allclose(state.control.total_d, POPULATION.weight_m @ control_md, rtol=1e-10)


def test_innovation_against_a_twin_with_a_dictionary() -> None:
    """c_i its last update; for clients never seen, c <- .7 c + .3 D."""
    plan = Plan(POPULATION, Fixed(), N, "innovation-remote", Recorder())
    state, clients = init_round(plan, np.zeros(D)), Clients()
    last: dict[int, FloatArray] = {}
    common_d, weight_m = np.zeros(D), POPULATION.weight_m
    for round in range(20):
        cohort = open_round(plan, state)
        base_md = np.array([last.get(client, common_d) for client in range(M)])
        expected_d = weight_m @ base_md
        for client, pi in zip(cohort.client_n.tolist(), cohort.expected_n, strict=True):
            update_d = smooth(broadcast(plan, state), round, client).astype(np.float64)
            expected_d += weight_m[client] / pi * (update_d - base_md[client])
            last[client] = update_d
        common_d = 0.7 * common_d + 0.3 * expected_d
        state = clients.play(plan, state, smooth, failing=False)
        np.testing.assert_allclose(state.optimizer.delta_d, expected_d, rtol=1e-5, atol=1e-6)


def test_a_reply_that_was_lost_moves_nothing() -> None:
    memory = ClientMemory(1)

    def reply(update: float, round: int, taken: int) -> float:
        return float(memory.reply(np.array([update], dtype=np.float32), round, taken)[0])

    assert reply(2.0, 0, -1) == 2.0  # taken
    assert reply(5.0, 4, 0) == 3.0  # lost
    assert memory.control_d.tolist() == [2.0]
    assert reply(6.0, 7, 0) == 4.0  # taken
    assert reply(6.5, 9, 7) == 0.5
    assert memory.control_d.tolist() == [6.0]


def test_clients_follow_a_server_that_goes_back() -> None:
    """To the last c_i but one; further back it needs a new start, which -1 is."""
    memory = ClientMemory(1, keep=2)
    one_d = np.ones(1, dtype=np.float32)
    for round, taken in ((0, -1), (1, 0), (2, 1), (3, 2)):
        memory.reply((round + 1) * one_d, round, taken)
    assert memory.control_d.tolist() == [3.0]
    assert memory.reply(9 * one_d, 2, 1).tolist() == [7.0]  # the server restarted from before round 2
    with pytest.raises(DeltaflError, match=r"took this client's reply of round 0, .* rounds 1, 2 only"):
        memory.reply(9 * one_d, 3, 0)
    assert memory.reply(9 * one_d, 0, -1).tolist() == [9.0]
    with pytest.raises(DeltaflError, match="keep is 0"):
        ClientMemory(1, keep=0)


def test_a_new_start_of_the_server_is_one_of_all_clients() -> None:
    plan = Plan(POPULATION, Fixed(), N, "difference-own-remote", Recorder())
    state, clients = init_round(plan, np.zeros(D)), Clients()
    for _ in range(10):
        state = clients.play(plan, state, dyadic)
    state = state._replace(control=RemoteControl().init(POPULATION, D), round=0)
    for _ in range(40):
        state = clients.play(plan, state, dyadic)
    for client, memory in enumerate(clients.memories):
        memory.reply(np.zeros(D, dtype=np.float32), state.round, int(state.control.taken_m[client]))
    control_md = np.array([memory.control_d for memory in clients.memories])
    np.testing.assert_allclose(state.control.total_d, POPULATION.weight_m @ control_md, rtol=1e-10)


def test_the_server_keeps_one_sum() -> None:
    state = find_estimator("difference-own-remote").control.init(POPULATION, 1000)
    assert (
        sum(part.size for part in state if part.size >= 1000) == 2000
    )  # the sum, and the guess for clients never seen


def test_a_simulation_refuses_it() -> None:
    settings = make_settings(RunSettings, {"task": "toy", "sampler": "uniform@systematic@innovation-remote"})
    with pytest.raises(DeltaflError, match="which simulated ones do not: write 'innovation'"):
        plan_of(settings, POPULATION)
