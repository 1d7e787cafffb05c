"""What goes wrong in real federations: outages, liars, clients that leave, damaged states."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from deltafl import DeltaflError, make_sampler
from deltafl.flower import DeltaStrategy
from deltafl.flower.arrays import Layout
from deltafl.flower.clients import ClientInfo
from deltafl.flower.federation import Federation
from deltafl.flower.messages import mean_metrics
from deltafl.flower.replies import ClientReply
from deltafl.flower.rules import Rules
from deltafl.flower.saved import load, save
from deltafl.flower.strategy import log_round
from deltafl.types import RoundInfo

from .grid import FakeGrid, configs, linear_app, running


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafl.flower.registration.time.sleep", lambda seconds: None)


def federation(label: str = "uniform", estimator: str = "horvitz-thompson", n: int = 3, m: int = 10) -> Federation:
    model = {"x": np.zeros(2, np.float32)}
    fed = Federation(Rules(make_sampler(label), n, estimator), model, Layout.of(model))
    fed.admit({f"client:{i}": ClientInfo(10) for i in range(m)})
    return fed


def play(fed: Federation, rounds: int, alive: bool = True, **special: float) -> list[float]:
    """Rounds in which client i pulls x towards i, or to what ``special`` says of ``c{i}``; the sums of weights."""
    sums = []
    for _ in range(rounds):
        cohort, sent = fed.open(set(fed.clients.keys)), fed.arrays()["x"]
        answers = {}
        for client in cohort.client_n.tolist() if alive else []:
            number = int(fed.clients.keys[client].removeprefix("client:"))
            target = np.float32(special.get(f"c{number}", number))
            answers[client] = ClientReply({"x": sent + np.float32(0.5) * (target - sent)})
        sums.append(fed.close(cohort, answers).sum_of_weights)
    return sums


def start(strategy: DeltaStrategy, grid: FakeGrid, rounds: int = 3, **settings: Any) -> Any:
    model = ArrayRecord({"x": Array(np.zeros(3, np.float32)), "steps": Array(np.array(7, np.int64))})
    with running():
        return strategy.start(grid, model, num_rounds=rounds, timeout=30, **settings)


# Outages.


@pytest.mark.parametrize(("label", "n"), [("uniform", 3), ("pracdelta", 5)])
def test_an_outage_changes_no_weight_afterwards(label: str, n: int) -> None:
    fed = federation(label, n=n)
    play(fed, 12)
    before = fed.params_d
    play(fed, 10, alive=False)
    assert np.array_equal(fed.params_d, before)
    assert fed.current.round == 22
    assert list(fed.response_rates().values()) == [1.0] * 10
    assert sum("nobody answered" in sentence for sentence in fed.warnings) == 10
    if label == "uniform":
        assert play(fed, 5) == pytest.approx([1.0] * 5)


def test_silence_of_clients_that_often_fail_is_still_non_response() -> None:
    """Two clients that answer every second time: that neither does is no outage, and must count."""
    fed = federation(n=2, m=2)
    rng = np.random.default_rng(0)
    for _ in range(60):
        cohort, sent = fed.open(set(fed.clients.keys)), fed.arrays()["x"]
        fed.close(cohort, {i: ClientReply({"x": sent}) for i in cohort.client_n.tolist() if rng.random() < 0.5})
    assert fed.current.selected_m.sum() >= 116
    assert all(0.3 < rate < 0.7 for rate in fed.response_rates().values())


def test_a_single_client_that_stays_silent_loses_its_rate() -> None:
    fed = federation(n=1, m=1)
    play(fed, 9)
    play(fed, 10, alive=False)
    assert fed.response_rates()["client:0"] == 0.5


@pytest.mark.parametrize("estimator", ["innovation", "difference-own", "difference"])
def test_without_a_single_reply_no_control_moves_the_model(estimator: str) -> None:
    fed = federation("uniform", estimator)
    play(fed, 8)
    before = fed.params_d
    play(fed, 20, alive=False)
    assert np.array_equal(fed.params_d, before)


def test_a_memory_that_clients_lost_is_not_held_against_them() -> None:
    fed = federation("uniform", "difference-own-remote")
    for round in range(3):
        cohort, sent = fed.open(set(fed.clients.keys)), fed.arrays()["x"]
        since = {i: fed.expected_memory(i) if round < 2 else -1 for i in cohort.client_n.tolist()}
        counting = {i for i in since if fed.expected_memory(i) != -1}
        fed.close(cohort, {i: ClientReply({"x": sent + 1}, since=name) for i, name in since.items()})
        if round == 2 and counting:
            assert any("lost the memory" in sentence for sentence in fed.warnings)
    assert set(fed.response_rates().values()) == {1.0}


# Liars.


@pytest.mark.parametrize("steps", [-1e300, -1e19, 1e300, [1] * 10**5])
def test_no_number_of_steps_stops_the_server(steps: Any) -> None:
    grid = FakeGrid(linear_app(), configs(4))

    def lie(message: Message, context: Context) -> Message:
        reply = grid.app(message, context)
        reply.content.metric_records["metrics"]["num-steps"] = steps
        return reply

    grid.fail[998] = lie
    strategy = DeltaStrategy("uniform", n=4)
    start(strategy, grid, rounds=1)
    assert strategy.history[0].num_responded in (3, 4)
    assert all(len(reply.reason) < 120 for reply in strategy.history[0].rejected)


@pytest.mark.parametrize(
    ("name", "dtype", "value", "reason"),
    [
        ("running_var", np.float32, 1e300, "infinite"),
        ("running_var", np.float32, 1e19, "above"),
        ("running_var", np.float32, -1.0, "negative"),
        ("running_mean", np.float16, 1e6, "infinite"),
        ("running_mean", np.float32, -1.0, None),
    ],
)
def test_buffers_are_judged_as_the_server_would_keep_them(
    name: str, dtype: Any, value: float, reason: str | None
) -> None:
    layout = Layout.of({"x": np.zeros(1, np.float32), name: np.ones(2, dtype)})
    fault = layout.fault({"x": np.zeros(1, np.float32), name: np.array([1.0, value])})
    assert (fault is None) if reason is None else (fault is not None and reason in fault)


def test_a_client_counts_once_in_a_mean_of_metrics() -> None:
    with running():
        honest, loud = (
            Message(RecordDict({str(i): MetricRecord({"loss": value}) for i in range(copies)}), 1, "evaluate")
            for value, copies in ((1.0, 1), (9.0, 50))
        )
    assert mean_metrics([(0.5, honest), (0.5, loud)]) == {"loss": 5.0}


def test_a_client_that_claims_most_of_the_weight_is_named_once() -> None:
    fed = federation()
    fed.admit({"client:99": ClientInfo(2**40)})
    fed.admit({"client:98": ClientInfo(10)})
    assert [sentence[:9] for sentence in fed.warnings] == ["client:99"]
    assert "100% of the weight" in fed.warnings[0]


# Clients who go.


@pytest.mark.parametrize("label", ["pracdelta", "innovation@systematic@innovation", "fedavg", "cluster-is", "k-vib"])
def test_a_forgotten_client_leaves_nothing_behind(label: str, tmp_path: Path) -> None:
    name, _, estimator = label.partition("@systematic@")
    fed = federation(name, estimator or "horvitz-thompson", m=6)
    play(fed, 20, c5=1e6)
    kept = fed.current.selected_m[:5]
    fed.forget(["client:5", "client:77"])
    assert fed.clients.keys == tuple(f"client:{i}" for i in range(5))
    assert np.array_equal(fed.current.selected_m, kept)
    assert fed.plan.population.weight_m.tolist() == [0.2] * 5
    save(tmp_path, fed)
    again = Federation(fed.rules, {"x": np.zeros(2, np.float32)}, fed.layout)
    load(tmp_path, again)
    play(again, 60)
    assert np.all(np.abs(again.params_d) < 10)


def test_forgetting_begins_the_memories_of_clients_anew_and_leaves_somebody() -> None:
    fed = federation("uniform", "difference-own-remote", m=3)
    fed.forget(["client:1"])
    assert fed.current.control.taken_m.tolist() == [-1, -1]
    with pytest.raises(DeltaflError, match="every known client"):
        fed.forget(["client:0", "client:2"])
    assert len(fed.clients.keys) == 2


def test_the_strategy_does_without_those_it_is_to_forget(tmp_path: Path) -> None:
    start(DeltaStrategy("pracdelta", 3, state_path=tmp_path), FakeGrid(linear_app(), configs(6)), 3)
    grid = FakeGrid(linear_app(), configs(6))
    strategy = DeltaStrategy("pracdelta", 3, state_path=tmp_path, forget=["client:hospital-2"])
    start(strategy, grid, 8)
    assert strategy.federation is not None
    assert "client:hospital-2" not in strategy.federation.clients.keys
    assert len(strategy.history) == 5
    assert 998 not in {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}


@pytest.mark.parametrize("connected", [4, 6])
def test_a_key_to_forget_that_nobody_has_is_named_with_the_nearest(
    connected: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(DeltaStrategy("pracdelta", 3, state_path=tmp_path), FakeGrid(linear_app(), configs(6)), 2)
    forget = ["client:hopsital-5", "client:hospital-4", "xyz"]
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        start(
            DeltaStrategy("pracdelta", 3, state_path=tmp_path, forget=forget),
            FakeGrid(linear_app(), configs(connected)),
            4,
        )
    said = [record.getMessage() for record in caplog.records if "forget names" in record.getMessage()]
    assert len(said) == 2
    assert "'client:hopsital-5', which no saved or connected client has: did you mean 'client:hospital-5'?" in said[0]
    assert said[1].startswith("forget names 'xyz', which no saved or connected client has: the keys are")


def test_a_key_to_forget_is_looked_for_among_the_connected_too(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        start(DeltaStrategy("uniform", 2, forget=["client:hospital-1"]), FakeGrid(linear_app(), configs(4)), 1)
    assert "forget names" not in caplog.text


@pytest.mark.parametrize("label", ["osmd", "clustered-sampling-2"])
def test_a_sampler_that_can_forget_nobody_says_so(label: str) -> None:
    fed = federation(label, m=6)
    play(fed, 3)
    with pytest.raises(DeltaflError, match=r"^client:2, client:4 cannot be forgotten: .* choose a new state_path"):
        fed.forget(["client:4", "client:2", "client:77"])
    assert len(fed.clients.keys) == 6
    fed.forget(["client:77"])


# Nodes that do not say who they are, and damaged files.


def test_a_silent_newcomer_holds_nobody_up() -> None:
    grid = FakeGrid(linear_app(), configs(3))
    original = grid._reply
    grid._reply = lambda message: None if message.metadata.dst_node_id == 50 else original(message)  # type: ignore[method-assign]
    strategy = DeltaStrategy("uniform", n=3, registration_timeout=3600)

    def change(server_round: int, arrays: ArrayRecord) -> None:
        grid.configs |= {50: configs(1)[1000], 60: {"client-id": "late", "examples": 5, "target": 1.0}}

    start(strategy, grid, rounds=4, evaluate_fn=lambda r, a: change(r, a) if r == 1 else None)
    assert len(strategy.history) == 4
    assert strategy.federation is not None
    assert "client:late" in strategy.federation.clients.keys
    assert sum(m.metadata.dst_node_id == 50 for m in grid.sent) == 1


@pytest.mark.parametrize("come_back", [True, False])
def test_newcomers_who_are_left_out_are_not_waited_for_but_the_others_are(
    come_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = FakeGrid(linear_app(), configs(3))
    newcomers = {2000 - i: {"client-id": f"new-{i}", "examples": 10, "target": 1.0} for i in range(3)}

    def leave(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            grid.configs.clear()
            grid.configs.update(newcomers)

    def wait(seconds: float) -> None:
        if come_back and newcomers.keys() <= grid.configs.keys():
            grid.configs |= configs(3, first_node=3000)

    monkeypatch.setattr("deltafl.flower.registration.time.sleep", wait)
    strategy = DeltaStrategy("osmd", n=2, min_nodes=3, wait_for_nodes=30 if come_back else 0.1)
    if come_back:
        start(strategy, grid, 4, evaluate_fn=leave)
        asked = [(m.metadata.group_id, m.metadata.dst_node_id) for m in grid.sent if m.metadata.message_type == "train"]
        assert len(strategy.history) == 4
        assert all(node > 2900 for round, node in asked if round in "34")
        return
    with pytest.raises(
        DeltaflError, match=r"0 clients are registered .* 3 more came after the first round and were left"
    ):
        start(strategy, grid, 4, evaluate_fn=leave)
    assert len(strategy.history) == 2


def test_who_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(linear_app(), configs(3))
    grid.fail[999] = lambda message, context: None
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        start(DeltaStrategy("uniform", n=3), grid, rounds=1)
    assert "no reply in time: client:hospital-1" in caplog.text


def test_the_log_says_that_a_shortened_step_is_biased(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, logger="flwr"):
        for clip_factor in (1.0, 0.25):
            log_round(RoundInfo(0, 3, 3, [], 1.0, 0.1, 3.0, 0.1, 1.0, 0.5, 1.0, clip_factor=clip_factor), [], [])
    said = "the norm guard scaled the step by 0.25: the estimate of this round is biased"
    assert [message.strip() for message in caplog.messages] == [said]


@pytest.mark.parametrize("damage", ["cut", "empty", "{}", "no tensors", "cut tensors"])
def test_a_damaged_state_is_said_in_one_sentence(damage: str, tmp_path: Path) -> None:
    fed = federation()
    play(fed, 2)
    save(tmp_path, fed)
    mark, tensors = tmp_path / "federation.json", tmp_path / "federation-2.safetensors"
    if damage == "no tensors":
        tensors.unlink()
    elif damage == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:40])
    else:
        mark.write_text({"cut": mark.read_text()[:50], "empty": "", "{}": json.dumps({})}[damage])
    with pytest.raises(DeltaflError, match=r"is damaged .*; put a copy"):
        load(tmp_path, federation())


def test_a_state_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DeltaflError, match="cannot keep the state"):
        start(DeltaStrategy("uniform", 2, state_path=tmp_path / "file"), FakeGrid(linear_app(), configs(3)))
    shutil.rmtree(tmp_path)
