"""A memory that clients keep: the same models as with one on the server, and no silent
disagreement.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from deltafl import ClientMemory, stream
from deltafl.federation.clients import ClientInfo
from deltafl.federation.local_work import subtract_memory
from deltafl.federation.replies import ClientReply
from deltafl.federation.saved import load, save
from deltafl.flower import DeltaStrategy, delta_mod
from federation.tools import federation, play_once

from .grid import FakeGrid, configs, linear_app, played

D = 3
REMOTE = "innovation@systematic@innovation-remote"
RESET = "the memories of all clients are reset"


class Members:
    """A federation and its clients, some of whose replies fail."""

    def __init__(self, estimator: str = "innovation-remote", dtype: str = "float32") -> None:
        self.fed = federation("innovation", {"x": np.zeros(D, dtype)}, estimator=estimator, m=7)
        self.memories: dict[int, ClientMemory] = {}

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            number = self.fed.current.round
            sent = self.fed.arrays()
            play_once(self.fed, lambda client, s=sent, n=number: self.reply(client, s, n))  # type: ignore[misc]

    def reply(self, client: int, sent: dict[str, Any], number: int) -> ClientReply | None:
        """An update that depends on the model, the client and the round; half of them get lost,
        late or broken.
        """
        rng = stream(2, "data", number, client)
        what = int(rng.integers(6))
        noise_d = rng.normal(size=D)
        received = {"x": (0.9 * sent["x"] + 0.1 * client + 0.1 * noise_d).astype(sent["x"].dtype)}
        expected = self.fed.expected_memory(client)
        if what == 0:
            return None  # nothing was done
        if expected is not None:
            memory = self.memories.setdefault(client, ClientMemory(D))
            if not memory.follows(expected):
                return ClientReply(None, "the reply has 0 array records, expected one", since=-1)
            received = subtract_memory(memory, expected, sent, received)
        if what == 1:
            return None  # lost, or late
        return ClientReply(
            {"x": np.full(D, np.nan, np.float32)} if what == 2 else received, since=expected
        )

    def check(self) -> None:
        """The server's sum is sum_j w_j c_j of what clients hold, once they know what became of
        their last replies.
        """
        total_d = np.zeros(D)
        for client, memory in self.memories.items():
            memory.reply(np.zeros(D, np.float32), self.fed.expected_memory(client) or 0)
            total_d += self.fed.plan.population.weight_m[client] * memory.control_d
        np.testing.assert_allclose(self.fed.current.control.total_d, total_d, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["innovation", "difference-own"])
def test_both_forms_give_the_same_models_while_clients_join(form: str) -> None:
    """Newcomers change all weights by one factor, which a sum can follow."""
    kept = Members(form)
    sent = Members(f"{form}-remote")
    for members in (kept, sent):
        members.play(12)
        members.fed.admit({"client:7": ClientInfo(100), "client:8": ClientInfo(1)})
        members.play(12)
    np.testing.assert_allclose(kept.fed.params_d, sent.fed.params_d, rtol=1e-5, atol=1e-6)
    assert sent.fed.warnings == []
    sent.check()


def test_sums_stay_exact_if_messages_round_coarsely() -> None:
    members = Members(dtype="float16")
    members.play(40)
    assert members.fed.current.control.total_d.any()
    members.check()


def test_new_sizes_of_known_clients_reset_the_memory() -> None:
    members = Members()
    members.play(10)
    members.fed.admit({"client:1": ClientInfo(99)})
    assert members.fed.warnings == [f"the weights of known clients changed: {RESET}"]
    assert (members.fed.current.control.taken_m == -1).all()
    members.play(10)
    assert len(members.fed.warnings) == 1
    members.check()


def test_a_client_that_lost_its_memory_resets_all() -> None:
    members = Members()
    members.play(10)
    lost = int(np.flatnonzero(members.fed.current.control.taken_m != -1)[0])
    members.memories[lost] = ClientMemory(D)
    while not members.fed.warnings:
        members.play(1)
    members.play(10)
    assert members.fed.warnings == [
        f"client:{lost} lost the memory that the server counts on: {RESET}"
    ]
    members.check()


def test_clients_go_back_one_round_with_the_server(tmp_path: Path) -> None:
    """The state of the last round but one is restored; clients have replied in the round that
    nobody remembers.
    """
    members = Members()
    members.play(8)
    save(tmp_path, members.fed)
    members.play(1)
    once = members.fed
    members.fed = Members().fed
    assert load(tmp_path, members.fed)
    members.play(1)
    assert np.array_equal(members.fed.params_d, once.params_d)
    members.play(8)
    assert members.fed.warnings == []
    members.check()


# Over messages.


def rejected(strategy: DeltaStrategy) -> list[list[str]]:
    return [[reason for _, reason in info.rejected] for info in strategy.history]


def test_the_mod_gives_the_models_of_a_memory_on_the_server() -> None:
    """And keeps one record in the client's context, where the server asks for it."""
    local = FakeGrid(linear_app(), configs(7))
    remote = FakeGrid(linear_app(), configs(7))
    local_d = played(
        DeltaStrategy("innovation@systematic@innovation", n=3, seed=4), local, 12
    ).params_d
    remote_d = played(DeltaStrategy(REMOTE, n=3, seed=4), remote, 12).params_d
    assert local_d.any()
    np.testing.assert_allclose(local_d, remote_d, rtol=1e-5, atol=1e-6)
    assert not any(local.states.values())
    kept = [dict(state.array_records) for state in remote.states.values() if state]
    assert all(list(records) == ["deltafl-memory"] for records in kept)
    assert {
        sum(a.numpy().nbytes for a in records["deltafl-memory"].values()) for records in kept
    } == {20 * D + 16}


def test_a_new_run_finds_no_memory_in_flowers_contexts(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    """One round is lost; nobody trains in it; then all memories are reset."""
    played(DeltaStrategy(REMOTE, 3, state_path=tmp_path), FakeGrid(linear_app(), configs(3)), 3)
    again = DeltaStrategy(REMOTE, 3, state_path=tmp_path)
    fed = played(again, FakeGrid(linear_app(), configs(3)), 6)
    assert rejected(again) == [
        ["the client does not have the memory that the server counts on"] * 3,
        [],
        [],
    ]
    assert f"lost the memory that the server counts on: {RESET}" in flower_log.text
    assert (fed.current.control.taken_m != -1).all()


def test_a_memory_in_a_file_outlives_the_run_but_not_its_own_damage(tmp_path: Path) -> None:
    nodes = configs(3)
    for node_id, config in nodes.items():
        config["memory-file"] = str(tmp_path / "nodes" / f"{node_id}.npz")
    params = []
    for folder, stops in (("through", (6,)), ("stopped", (3, 6))):
        shutil.rmtree(tmp_path / "nodes", ignore_errors=True)
        for stop in stops:
            strategy = DeltaStrategy(REMOTE, 3, state_path=tmp_path / folder)
            fed = played(strategy, FakeGrid(linear_app(), nodes), stop)
            assert not any(rejected(strategy))
        params.append(fed.params_d)
    assert np.array_equal(params[0], params[1])
    (tmp_path / "nodes" / "999.npz").write_bytes(b"damaged")
    strategy = DeltaStrategy(REMOTE, 3, state_path=tmp_path / "stopped")
    played(strategy, FakeGrid(linear_app(), nodes), 8)
    assert [len(reasons) for reasons in rejected(strategy)] == [1, 0]


def test_a_mod_that_changes_what_was_remembered_is_noticed() -> None:
    """In the wrong order: noise is added after the client has remembered what it sends."""

    def noise(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        for name, record in reply.content.array_records.items():
            arrays = dict(record.items()) | {"x": Array(record["x"].numpy() + np.float32(0.5))}
            reply.content[name] = ArrayRecord(arrays)
        return reply

    wrong = DeltaStrategy(REMOTE, n=3)
    right = DeltaStrategy(REMOTE, n=3)
    played(wrong, FakeGrid(linear_app(mods=[noise, delta_mod]), configs(3)), 4)
    played(right, FakeGrid(linear_app(mods=[delta_mod, noise]), configs(3)), 4)
    assert [len(reasons) for reasons in rejected(wrong)] == [0, 3, 0, 3]
    assert not any(rejected(right))
