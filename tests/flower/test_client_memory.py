"""A memory that clients keep, in Flower: the same models as one of the server's, and no silent disagreement."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from deltafl import ClientMemory, DeltaflError, make_sampler, stream
from deltafl.estimators.sketch import count_sketch
from deltafl.flower import DeltaStrategy, WeightedClipping, delta_mod
from deltafl.flower.arrays import Layout
from deltafl.flower.client import MEMORY_SINCE, subtract_memory
from deltafl.flower.clients import ClientInfo
from deltafl.flower.federation import Federation, sketch_seed
from deltafl.flower.replies import ClientReply
from deltafl.flower.rules import Rules
from deltafl.flower.saved import load, save

from .grid import FakeGrid, configs, linear_app, running

D = 3
SIZES = {f"client:{i}": 10 + 5 * i for i in range(7)}
REMOTE = "innovation@systematic@innovation-remote"


class Members:
    """A federation and its clients, some of whose replies fail."""

    def __init__(self, estimator: str = "innovation-remote", dtype: str = "float32") -> None:
        model = {"x": np.zeros(D, dtype)}
        self.layout = Layout.of(model)
        self.fed = Federation(Rules(make_sampler("innovation"), 3, estimator), model, self.layout)
        self.fed.admit({key: ClientInfo(size) for key, size in SIZES.items()})
        self.memories: dict[int, ClientMemory] = {}

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            number, cohort, sent = self.fed.current.round, self.fed.open(set(self.fed.clients.keys)), self.fed.arrays()
            replies = {client: self.reply(client, sent, number) for client in cohort.client_n.tolist()}
            self.fed.close(cohort, {client: answer for client, answer in replies.items() if answer is not None})

    def reply(self, client: int, sent: dict[str, Any], number: int) -> ClientReply | None:
        """An update that depends on the model, the client and the round; half of them get lost, late or broken."""
        rng = stream(2, "data", number, client)
        what, noise_d = int(rng.integers(6)), rng.normal(size=D)
        received = {"x": (0.9 * sent["x"] + 0.1 * client + 0.1 * noise_d).astype(sent["x"].dtype)}
        taken = self.fed.expected_memory(client)
        if what == 0:
            return None  # nothing was done
        if taken is not None:
            memory = self.memories.setdefault(client, ClientMemory(D))
            if not memory.follows(taken):
                return ClientReply(None, "the reply has 0 array records, expected one", since=-1)
            received = subtract_memory(memory, taken, sent, received)
        if what == 1:
            return None  # lost, or late
        return ClientReply({"x": np.full(D, np.nan, np.float32)} if what == 2 else received, since=taken)

    def sum_of_memories(self) -> Any:
        """sum_j w_j c_j of what clients hold, once they have heard what became of their last replies."""
        total_d = np.zeros(D)
        for client, memory in self.memories.items():
            memory.reply(np.zeros(D, np.float32), self.fed.expected_memory(client) or 0)
            total_d += self.fed.plan.population.weight_m[client] * memory.control_d
        return total_d

    def check(self) -> None:
        np.testing.assert_allclose(self.fed.current.control.total_d, self.sum_of_memories(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["innovation", "difference-own"])
def test_both_forms_give_the_same_models_while_clients_join(form: str) -> None:
    """Newcomers change all weights by one factor, which a sum can follow."""
    kept, sent = Members(form), Members(f"{form}-remote")
    for members in (kept, sent):
        members.play(12)
        members.fed.admit({"client:7": ClientInfo(100), "client:8": ClientInfo(1)})
        members.play(12)
    np.testing.assert_allclose(kept.fed.params_d, sent.fed.params_d, rtol=1e-5, atol=1e-6)
    assert sent.fed.warnings == []
    sent.check()


def test_sums_stay_exact_where_messages_round_coarsely() -> None:
    members = Members(dtype="float16")
    members.play(40)
    assert members.fed.current.control.total_d.any()
    members.check()


def test_new_sizes_of_known_clients_begin_the_memory_anew() -> None:
    members = Members()
    members.play(10)
    members.fed.admit({"client:1": ClientInfo(99)})
    assert members.fed.warnings == ["the weights of known clients changed: the memories of all clients are reset"]
    assert (members.fed.current.control.taken_m == -1).all()
    members.play(10)
    assert len(members.fed.warnings) == 1
    members.check()


def test_a_client_that_lost_its_memory_makes_all_begin_anew() -> None:
    members = Members()
    members.play(10)
    before_m = members.fed.current.control.taken_m
    lost = int(np.flatnonzero(before_m != -1)[0])
    members.memories[lost] = ClientMemory(D)
    while not members.fed.warnings:
        members.play(1)
    assert members.fed.warnings == [
        f"client:{lost} lost the memory that the server counts on: the memories of all clients are reset"
    ]
    members.play(10)
    assert len(members.fed.warnings) == 1
    members.check()


def test_a_server_goes_back_one_round_and_the_clients_with_it(tmp_path: Path) -> None:
    """The state of the last round but one is restored; clients have answered in the round that nobody remembers."""
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


def test_replies_that_do_not_say_what_they_subtract_are_not_used() -> None:
    members = Members()
    cohort, ones = members.fed.open(set(members.fed.clients.keys)), {"x": np.ones(D, np.float32)}
    info = members.fed.close(cohort, {client: ClientReply(ones) for client in cohort.client_n.tolist()})
    assert info.num_responded == 0
    assert all("add delta_mod to the ClientApp's mods" in reason for _, reason in info.rejected)
    assert not members.fed.params_d.any()
    assert members.fed.warnings == []


def test_differences_that_nobody_asked_for_are_not_used() -> None:
    members = Members("innovation")
    cohort, ones = members.fed.open(set(members.fed.clients.keys)), {"x": np.ones(D, np.float32)}
    info = members.fed.close(cohort, {client: ClientReply(ones, since=-1) for client in cohort.client_n.tolist()})
    assert info.num_responded == 0
    assert all("did not ask for" in reason for _, reason in info.rejected)


def test_clipping_on_the_server_is_refused() -> None:
    with pytest.raises(DeltaflError, match="clients remember what they sent, and clipping"):
        Rules(make_sampler("uniform"), 3, "innovation-remote", clipping=WeightedClipping(1.0))


# Over messages.


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafl.flower.registration.time.sleep", lambda seconds: None)


def start(strategy: DeltaStrategy, grid: FakeGrid, rounds: int, **settings: Any) -> Federation:
    arrays = ArrayRecord(
        {"x": Array(np.zeros(D, np.float32)), "steps": Array(np.array(7)), "w_running_mean": Array(np.ones(2))}
    )
    with running():
        strategy.start(grid, arrays, num_rounds=rounds, timeout=30, **settings)
    assert strategy.federation is not None
    return strategy.federation


def rejected(strategy: DeltaStrategy) -> list[list[str]]:
    return [[reason for _, reason in info.rejected] for info in strategy.history]


def test_the_strategy_and_the_mod_give_the_models_of_the_servers_memory() -> None:
    params = [
        start(DeltaStrategy(label, n=3, seed=4), FakeGrid(linear_app(), configs(7)), 12).params_d
        for label in ("innovation@systematic@innovation", REMOTE)
    ]
    assert params[0].any()
    np.testing.assert_allclose(params[0], params[1], rtol=1e-5, atol=1e-6)


def test_the_mod_measures_what_it_sends() -> None:
    told: list[Any] = []

    def spy(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            sent, received = (next(iter(m.content.array_records.values()))["x"].numpy() for m in (message, reply))
            told.append((reply.content.metric_records["metrics"], received - sent))
        return reply

    strategy = DeltaStrategy("md-fixed@systematic@difference-own-remote", n=3, sketch=16)
    start(strategy, FakeGrid(linear_app(mods=[spy, delta_mod]), configs(3)), 2)
    assert len(told) == 6
    for metrics, sent_d in told:
        assert metrics["sketch"] == pytest.approx(count_sketch(sent_d[None], 16, sketch_seed(0))[0])
    assert [metrics[MEMORY_SINCE] == -1 for metrics, _ in told] == [True] * 3 + [False] * 3


def test_clients_without_the_mod_are_told_so_in_the_log() -> None:
    strategy = DeltaStrategy(REMOTE, n=3)
    federation = start(strategy, FakeGrid(linear_app(mods=[]), configs(3)), 2)
    assert all("add delta_mod" in reason for reasons in rejected(strategy) for reason in reasons)
    assert not federation.params_d.any()


def test_a_new_run_finds_no_memory_in_flowers_contexts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One round is lost; nobody trains in it; then all begin anew."""
    strategy = DeltaStrategy(REMOTE, 3, state_path=tmp_path)
    start(strategy, FakeGrid(linear_app(), configs(3)), 3)
    again = DeltaStrategy(REMOTE, 3, state_path=tmp_path)
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        federation = start(again, FakeGrid(linear_app(), configs(3)), 6)
    assert rejected(again)[0] == ["the client does not have the memory that the server counts on"] * 3
    assert rejected(again)[1:] == [[], []]
    assert "lost the memory that the server counts on: the memories of all clients are reset" in caplog.text
    assert (federation.current.control.taken_m != -1).all()


def test_a_memory_in_a_file_outlives_the_run_but_not_its_own_damage(tmp_path: Path) -> None:
    nodes = configs(3)
    for node_id, config in nodes.items():
        config["memory-file"] = str(tmp_path / "nodes" / f"{node_id}.npz")
    params = []
    for folder, stops in (("through", (6,)), ("stopped", (3, 6))):
        shutil.rmtree(tmp_path / "nodes", ignore_errors=True)
        for stop in stops:
            strategy = DeltaStrategy(REMOTE, 3, state_path=tmp_path / folder)
            federation = start(strategy, FakeGrid(linear_app(), nodes), stop)
            assert not any(rejected(strategy))
        params.append(federation.params_d)
    assert np.array_equal(params[0], params[1])
    (tmp_path / "nodes" / "999.npz").write_bytes(b"damaged")
    strategy = DeltaStrategy(REMOTE, 3, state_path=tmp_path / "stopped")
    start(strategy, FakeGrid(linear_app(), nodes), 8)
    assert [len(reasons) for reasons in rejected(strategy)] == [1, 0]


def test_a_mod_that_changes_what_was_remembered_is_noticed() -> None:
    """In the wrong order: noise is added after the client has remembered what it sends."""

    def noise(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        for name, record in reply.content.array_records.items():
            arrays = dict(record.items()) | {"x": Array(record["x"].numpy() + np.float32(0.5))}
            reply.content[name] = ArrayRecord(arrays)
        return reply

    wrong, right = DeltaStrategy(REMOTE, n=3), DeltaStrategy(REMOTE, n=3)
    start(wrong, FakeGrid(linear_app(mods=[noise, delta_mod]), configs(3)), 4)
    start(right, FakeGrid(linear_app(mods=[delta_mod, noise]), configs(3)), 4)
    assert [len(reasons) for reasons in rejected(wrong)] == [0, 3, 0, 3]
    assert not any(rejected(right))


def test_the_clients_context_holds_one_record() -> None:
    grid = FakeGrid(linear_app(), configs(3))
    start(DeltaStrategy(REMOTE, n=3), grid, 4)
    assert all(list(state) == ["deltafl-memory"] for state in grid.states.values())
    sizes = [
        sum(a.numpy().nbytes for a in state.array_records["deltafl-memory"].values()) for state in grid.states.values()
    ]
    assert sizes == [20 * D + 16] * 3
    start(DeltaStrategy("innovation@systematic@innovation", n=3), plain := FakeGrid(linear_app(), configs(3)), 1)
    assert not any(plain.states.values())
