"""Who a client is, and who is there: keys, registrations that may hold anything, nodes that come
and go.
"""

import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.rules import make_rules
from deltafl.flower import DeltaStrategy, register
from deltafl.flower.registration import client_key, read_registration

from .grid import FakeGrid, configs, linear_app, played, start, trained


def registration(num_aux: int = 0, costs: bool = False, **values: Any) -> tuple[str, ClientInfo]:
    record = {"kind": "client", "client_id": "a", "num_examples": 5, **values}
    content = {name.replace("_", "-"): value for name, value in record.items() if value is not None}
    return read_registration(
        Message(RecordDict({"deltafl": ConfigRecord(content)}), 1, "query.deltafl"),
        make_rules(aux=num_aux, costs=costs),
    )


def test_a_client_cannot_choose_a_key_that_looks_verified() -> None:
    key, info = registration(client_id="key:abc")
    assert (key, info) == ("client:key:abc", ClientInfo(5))
    assert client_key("config", NodeInfo(node_id=1, public_key=b"k"), key, simulated=False) == key
    with pytest.raises(DeltaflError, match="kind"):
        registration(kind="key")


def test_keys_follow_the_identity_setting() -> None:
    anonymous = NodeInfo(node_id=1, public_key=b"k")
    named = NodeInfo(node_id=99, public_key=b"k", name="hospital-a")
    assert client_key("auto", named, "partition:3", simulated=True) == "partition:3"
    assert client_key("auto", anonymous, "partition:3", simulated=False) == "partition:3"
    signed = client_key("public-key", anonymous, "partition:3", simulated=False)
    assert signed.startswith("key:")
    assert client_key("auto", named, "partition:3", simulated=False) == signed
    assert client_key("name", named, "partition:3", simulated=False) == "name:hospital-a"
    for identity, node in (("name", anonymous), ("public-key", NodeInfo(node_id=1))):
        with pytest.raises(
            DeltaflError, match=r"SuperLink does not know the name or public key of node 1"
        ):
            client_key(identity, node, "partition:3", simulated=False)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("num_examples", size) for size in (0, -1, 2.0, True, "5", None, 2**50)),
        *(
            ("client_id", client_id)
            for client_id in ("", "a" * 201, "a\nb", "a\n", "a\u2028b", 5, None)
        ),
    ],
)
def test_faulty_registrations_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(DeltaflError, match=rf"{name}: .*; write deltafl.flower.register\(app"):
        registration(**{name: bad})


@pytest.mark.parametrize(
    "aux", [None, [], [0.5], [0.5, 0.5, 0.0], [0.5, float("nan")], "ab", [1e30, 0.0]]
)
def test_auxiliary_variables_are_checked_where_the_server_wants_them(aux: Any) -> None:
    assert registration(2, aux=[0.25, 1.0])[1].aux == (0.25, 1.0)
    assert registration(aux=aux)[1].aux == ()
    with pytest.raises(DeltaflError, match=r"the server wants 2 auxiliary|aux.[01]: "):
        registration(2, aux=aux)


# Over messages.


def test_auxiliary_variables_go_to_servers_that_ask_for_them() -> None:
    for aux, expected in ((0, [()] * 4), (2, [(float(i), 1.0) for i in range(4)])):
        federation = played(
            DeltaStrategy("uniform", n=2, aux=aux), FakeGrid(linear_app(), configs(4)), 1
        )
        assert [info.aux for info in federation.clients.values()] == expected
    with pytest.raises(
        DeltaflError, match="3 auxiliary variables of each client, and the client sent 2"
    ):
        start(
            DeltaStrategy("balanced", n=2, aux=3, wait_for_nodes=0),
            FakeGrid(linear_app(), configs(4)),
            rounds=1,
        )


@pytest.mark.parametrize("number", [int, np.int64])
def test_a_client_may_be_known_by_a_number(number: Any) -> None:
    app = ClientApp()
    register(
        app,
        num_examples=lambda context: 5,
        client_id=lambda context: number(context.node_config["target"]),
    )
    # Nobody trains, and all count as silent.
    federation = played(DeltaStrategy("uniform", n=2), FakeGrid(app, configs(3)), 1)
    assert federation.keys == ["client:0", "client:1", "client:2"]


def test_too_few_clients_are_an_error_with_the_reason() -> None:
    with pytest.raises(
        DeltaflError, match=r"2 clients are .* after 0 s, 3 are needed; .* raise wait_for_nodes$"
    ):
        start(DeltaStrategy("uniform", n=3, wait_for_nodes=0), FakeGrid(linear_app(), configs(2)))
    with pytest.raises(
        DeltaflError, match=r"2 more did not register .*deltafl.flower.register\(app"
    ):
        start(DeltaStrategy("uniform", n=2, wait_for_nodes=0), FakeGrid(ClientApp(), configs(2)))


def test_clients_join_and_leave_between_rounds() -> None:
    grid = FakeGrid(linear_app(), configs(4))

    def change(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            del grid.configs[1000], grid.configs[999]
        if server_round == 4:
            grid.configs |= configs(6, first_node=2000)

    federation = played(DeltaStrategy("pracdelta", n=2, min_nodes=2), grid, 7, evaluate_fn=change)
    assert federation.keys == [f"client:hospital-{i}" for i in range(6)]
    assert trained(grid, 3, 4) == {998, 997}
    assert trained(grid, 5, 6, 7) <= {
        998,
        997,
        *configs(6, first_node=2000),
    }  # under new ids they are who they were
    assert federation.current.selected_m.sum() == 14


def test_of_two_nodes_with_one_key_the_later_is_used(flower_log: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(linear_app(), configs(2))

    def restarted(server_round: int, arrays: ArrayRecord) -> None:
        grid.configs[5000] = dict(grid.configs[1000])

    start(DeltaStrategy("uniform", n=2), grid, rounds=2, evaluate_fn=restarted)
    assert trained(grid, 1) == {5000, 999}
    assert "both connected as client 'client:hospital-0'" in flower_log.text
    assert sum("report their ids themselves" in message for message in flower_log.messages) == 1


def test_a_silent_newcomer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = FakeGrid(linear_app(), configs(3))
    original = grid.reply
    monkeypatch.setattr(
        grid, "reply", lambda sent: None if sent.metadata.dst_node_id == 50 else original(sent)
    )

    def change(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 1:
            grid.configs |= {
                50: configs(1)[1000],
                60: {"client-id": "late", "examples": 5, "target": 1.0},
            }

    federation = played(
        DeltaStrategy("uniform", n=3, registration_timeout=3600), grid, 4, evaluate_fn=change
    )
    assert federation.current.round == 4
    assert "client:late" in federation.keys
    assert sum(message.metadata.dst_node_id == 50 for message in grid.sent) == 1


def test_newcomers_that_are_left_out_do_not_count_for_min_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = FakeGrid(linear_app(), configs(3))
    newcomers = {
        2000 - i: {"client-id": f"new-{i}", "examples": 10, "target": 1.0} for i in range(3)
    }

    def leave(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            grid.configs = dict(newcomers)

    def come_back(seconds: float) -> None:
        if newcomers.keys() <= grid.configs.keys():
            grid.configs |= configs(3, first_node=3000)

    monkeypatch.setattr("deltafl.flower.registration.time.sleep", come_back)
    strategy = DeltaStrategy("osmd", n=2, min_nodes=3, wait_for_nodes=30)
    assert played(strategy, grid, 4, evaluate_fn=leave).current.round == 4
    assert trained(grid, 3, 4) <= configs(3, first_node=3000).keys()


def test_forgotten_clients_are_not_selected_and_unknown_keys_are_named(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    start(DeltaStrategy("pracdelta", 3, state_path=tmp_path), FakeGrid(linear_app(), configs(6)), 3)
    forget = ["client:hospital-4", "client:hopsital-5", "xyz"]
    for connected, rounds in ((4, 6), (6, 8)):
        grid = FakeGrid(linear_app(), configs(connected))
        federation = played(
            DeltaStrategy("pracdelta", 3, state_path=tmp_path, forget=forget), grid, rounds
        )
        assert "client:hospital-4" not in federation.keys
        assert 996 not in trained(grid)
        assert not any(
            b"hospital-4" in path.read_bytes() for path in tmp_path.glob("federation*.safetensors")
        )
    assert "forget names client:hopsital-5, xyz, which no saved client has" in flower_log.messages


class Clock:
    """A clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        #: What happens at a second, once.
        self.events: dict[float, Callable[[], object]] = {}
        monkeypatch.setattr("deltafl.flower.registration.time.monotonic", lambda: self.now)
        monkeypatch.setattr("deltafl.flower.registration.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.events if when <= self.now]:
            self.events.pop(when)()


def queries(grid: FakeGrid) -> list[int]:
    return [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type != "train"]


def test_an_app_without_register_is_named_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, flower_log: pytest.LogCaptureFixture
) -> None:
    """Flower logs a traceback for each question, so there are few."""
    clock = Clock(monkeypatch)
    grid = FakeGrid(ClientApp(), configs(20))
    with pytest.raises(DeltaflError, match=r"does .* call deltafl.flower.register\(app, num_ex"):
        start(DeltaStrategy("uniform", n=2), grid, rounds=1)
    assert clock.now == pytest.approx(600, abs=1)
    named = [line for line in flower_log.messages if "register(app, num_examples=...)" in line]
    assert 8 <= len(named) <= 11
    assert "20 nodes did not register" in named[0]
    assert sum("Waiting for clients" in line for line in flower_log.messages) == 1
    assert 20 < len(queries(grid)) <= 20 + 5


def test_a_node_that_failed_is_asked_again_after_30_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    grid = FakeGrid(ClientApp(), configs(2))
    asked: list[int] = []
    clock.events = {
        29.0: lambda: asked.append(len(queries(grid))),
        29.5: lambda: setattr(grid, "app", linear_app()),
    }
    strategy = DeltaStrategy("uniform", n=2, wait_for_nodes=60)
    start(strategy, grid, rounds=1)
    assert asked == [2]
    assert len(queries(grid)) == 4
    assert 30 <= clock.now < 33
    assert strategy.history[0].num_selected == 2


class CountedId(int):
    """A node's id that counts how often two were compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_nodes_that_failed_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 of them would keep the server busy for minutes."""
    clock = Clock(monkeypatch)
    grid: Any = FakeGrid(ClientApp(), {})
    ids = [CountedId(node_id) for node_id in range(1000)]
    monkeypatch.setattr(grid, "get_nodes", lambda: [SimpleNamespace(node_id=i) for i in ids])
    directory = DeltaStrategy("uniform", n=2).directory
    directory.refresh(grid)
    clock.now = 121.0  # nobody has answered
    directory.refresh(grid)
    clock.now = 152.0
    asked: list[Message] = []
    monkeypatch.setattr(grid, "push_messages", asked.extend)
    CountedId.compared = 0
    directory.refresh(grid)
    assert len(asked) == 1
    assert CountedId.compared < 10 * len(ids)


def test_the_first_round_waits_until_nodes_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that connect first would be all that it selects from."""
    clock = Clock(monkeypatch)
    nodes = configs(8)
    grid = FakeGrid(linear_app(), dict(list(nodes.items())[:2]))

    def connect(number: int) -> Callable[[], object]:
        return lambda: grid.configs.update(list(nodes.items())[:number])

    clock.events = {1.0: connect(4), 2.0: connect(7), 3.0: connect(8)}
    strategy = DeltaStrategy("uniform", n=2)
    federation = played(strategy, grid, 1)
    assert len(federation.clients) == 8
    assert 4 <= clock.now < 6
    # A node whose answer is still to come keeps it, but not beyond wait_for_nodes.
    silent = FakeGrid(linear_app(), configs(3))
    original = silent.reply
    monkeypatch.setattr(
        silent, "reply", lambda sent: None if sent.metadata.dst_node_id == 1000 else original(sent)
    )
    began = clock.now
    strategy = DeltaStrategy("uniform", n=2, wait_for_nodes=20, registration_timeout=100)
    assert len(played(strategy, silent, 1).clients) == 2
    assert clock.now - began == pytest.approx(20, abs=1)


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a year, forward and back, whenever it is read, also while the server waits for clients."""
    still = played(DeltaStrategy("innovation", n=2, seed=1), FakeGrid(linear_app(), configs(4)), 4)
    read = time.time
    years = cycle([0, 365 * 86400, -365 * 86400])
    monkeypatch.setattr(time, "time", lambda: read() + next(years))
    clock = Clock(monkeypatch)
    grid = FakeGrid(linear_app(), configs(1))
    clock.events[5.0] = lambda: grid.configs.update(configs(4))
    jumped = played(DeltaStrategy("innovation", n=2, seed=1, min_nodes=4), grid, 4)
    assert 5 <= clock.now < 60
    assert np.array_equal(jumped.current.params_d, still.current.params_d)


def test_a_nodes_config_has_its_cost() -> None:
    nodes = configs(4)
    for number, config in enumerate(nodes.values()):
        config["cost"] = "cheap" if number == 3 else number + 1
    strategy = DeltaStrategy("uniform(per_cost=True)", n=2, costs=True, min_nodes=3)
    federation = played(strategy, FakeGrid(linear_app(), nodes), 1)
    assert [info.cost for info in federation.clients.values()] == [1.0, 2.0, 3.0]
    with pytest.raises(DeltaflError, match=r"a number in .*, and the client's is 'cheap'; give"):
        registration(costs=True, cost="cheap")


def test_a_nodes_config_names_its_stratum() -> None:
    """Of every region somebody trains in each round; who names none is not registered."""
    nodes = configs(6)
    for config in nodes.values():
        if config["target"] > 0:
            config["stratum"] = "north" if config["target"] < 4 else "south"
    grid = FakeGrid(linear_app(), nodes)
    strategy = DeltaStrategy("uniform", n=2, at_least=1, strata=["north", "south"], min_nodes=5)
    start(strategy, grid)
    trained_by = [
        int(nodes[message.metadata.dst_node_id]["target"])
        for message in grid.sent
        if message.metadata.message_type == "train"
    ]
    assert len(trained_by) == 6
    pairs = zip(trained_by[::2], trained_by[1::2], strict=True)
    assert all(min(pair) < 4 <= max(pair) for pair in pairs)
    assert 0 not in trained_by
