"""DeltaStrategy over messages, in one process: rounds, replies, restarts, settings."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from conftest import same_tree
from deltafl import DeltaflError, Population, Reports, close_round, init_round, make_plan, open_round
from deltafl.flower import DeltaStrategy, WeightedClipping, delta_mod, register
from deltafl.flower.messages import mean_metrics

from .grid import FakeGrid, configs, linear_app, model, played, start
from .hosts import rates_of


def local_update(x_d: np.ndarray, target: float) -> tuple[np.ndarray, float, float]:
    """What a client of ``linear_app`` does, with its mean loss and step variance."""
    x, losses, gradients = x_d.astype(np.float32), [], []
    for _ in range(2):
        losses.append(float(np.sum((x - target) ** 2)))
        gradients.append((x - target).astype(np.float64))
        x = x - np.float32(0.5) * (x - np.float32(target))
    variance = 0.25 * np.var(np.stack(gradients), axis=0).sum()
    return x - x_d, float(np.mean(losses)), float(variance)


@pytest.mark.parametrize(
    "label", ["pracdelta", "fedpracis@pivotal@difference", "md", "cluster-is", "fedavg", "innovation", "balanced"]
)
def test_rounds_are_those_of_the_core(label: str) -> None:
    """The same draws, weights, steps and scores as a loop over open_round and close_round, round by round."""
    known = [[float(i), 1.0] for i in range(7)] if label == "balanced" else None
    strategy = DeltaStrategy(label, n=3, server_optimizer="momentum", seed=4, aux=2 if known else 0)
    federation = played(strategy, FakeGrid(linear_app(), configs(7)), 5)

    population = Population.from_sizes([10 + 10 * i for i in range(7)], aux=known)
    plan = make_plan(label, population, 3, server_optimizer=strategy.rules.plan.server_optimizer, seed=4)
    state = init_round(plan, np.zeros(3))
    for info in strategy.history:
        cohort = open_round(plan, state)
        replies = [local_update(state.params_d, float(i)) for i in cohort.client_n]
        reports = Reports.make(
            len(replies),
            loss=[loss for _, loss, _ in replies],
            step_variance=[variance for _, _, variance in replies],
            num_steps=[2] * len(replies),
        )
        state, expected = close_round(plan, state, cohort, [u for u, _, _ in replies], reports)
        assert info.sum_of_weights == pytest.approx(expected.sum_of_weights, rel=1e-12)
        assert info.loss == pytest.approx(expected.loss, rel=1e-6)
    assert federation.params_d == pytest.approx(state.params_d, rel=1e-5, abs=1e-6)


def test_the_result_counts_rounds_keeps_types_and_weighs_evaluations_by_registered_sizes() -> None:
    seen: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"x": float(arrays["x"].numpy()[0])})

    strategy = DeltaStrategy("uniform", n=2, evaluate=True)
    result = start(strategy, FakeGrid(linear_app(), configs(4)), rounds=3, evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 3]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert (result.arrays["x"].dtype, result.arrays["steps"].dtype) == ("float32", "int64")
    assert result.arrays["steps"].numpy() == 7
    x = result.arrays["x"].numpy()
    # Sizes 10 to 40, whatever number of examples a reply claims.
    expected = sum(share * float(np.sum((x - i) ** 2)) for i, share in enumerate([0.1, 0.2, 0.3, 0.4]))
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_client_counts_once_in_a_mean_of_metrics() -> None:
    honest, loud = (
        Message(RecordDict({str(i): MetricRecord({"loss": value}) for i in range(copies)}), 1, "evaluate")
        for value, copies in ((1.0, 1), (9.0, 50))
    )
    assert mean_metrics([(0.5, honest), (0.5, loud)]) == {"loss": 5.0}


def test_train_messages_hold_the_users_config_and_live_about_as_long_as_the_round() -> None:
    config, grid = ConfigRecord({"lr": 0.25}), FakeGrid(linear_app(), configs(3))
    start(DeltaStrategy("uniform", n=2), grid, rounds=2, train_config=config)
    assert dict(config.items()) == {"lr": 0.25}
    sent = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert {message.metadata.ttl for message in sent} == {40.0}
    records = [message.content.config_records["config"] for message in sent]
    assert [record["server-round"] for record in records] == [1, 1, 2, 2]
    assert {record["lr"] for record in records} == {0.25}


def dead(message: Message, context: Context) -> Message:
    """A node that is gone: the SuperLink answers in its place."""
    reply = Message(Error(5, "Traceback\n  File x\nNode Unavailable\n'>\n"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


def lying(**change: Any) -> Any:
    """A reply with some of its parts replaced."""

    def reply(message: Message, context: Context) -> Message:
        arrays = dict(message.content.array_records["arrays"].items())
        arrays["x"] = Array(np.asarray(change.get("x", np.ones(3, np.float32))))
        content = RecordDict({"arrays": ArrayRecord(arrays)})
        if "metrics" in change:
            content["deltafl"] = MetricRecord(change["metrics"])
        if "second" in change:
            content["second"] = ArrayRecord(arrays)
        if "data" in change:
            content["arrays"] = ArrayRecord(arrays | {"x": Array("float32", (3,), "numpy.ndarray", change["data"])})
        return Message(content, reply_to=message)

    return reply


FAILURES = {
    "dead": (dead, "error 5: Node Unavailable"),
    "nan loss": (lying(metrics={"loss": float("nan")}), "loss is nan"),
    "square loss below the loss": (lying(metrics={"train_loss": 2.0, "square-loss": 2.0}), "mean squared loss is 2.0"),
    "nan steps": (lying(metrics={"num-steps": float("nan")}), "local steps"),
    "list of steps": (lying(metrics={"num-steps": [1] * 10**5}), "local steps"),
    "two records": (lying(second=True), "2 array records"),
    "pickle": (lying(data=b"cos\nsystem\n(S'exit'\ntR."), "cannot be read"),
    "empty": (lying(data=b""), "cannot be read"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_non_response_of_the_right_client(kind: str) -> None:
    handler, reason = FAILURES[kind]
    grid = FakeGrid(linear_app(), configs(4))
    grid.fail[998] = handler  # hospital-2
    strategy = DeltaStrategy("uniform", n=4)
    federation = played(strategy, grid, 1)
    assert [federation.keys[client] for client, _ in strategy.history[0].rejected] == ["client:hospital-2"]
    assert reason in strategy.history[0].rejected[0].reason
    assert len(strategy.history[0].rejected[0].reason) < 120
    assert rates_of(federation)["client:hospital-2"] == 0.5
    assert [rate for key, rate in rates_of(federation).items() if key != "client:hospital-2"] == [1.0] * 3


def plain_app(reported: dict[int, dict[str, Any]], mods: list[Any]) -> ClientApp:
    """Clients that return the model plus one, and report what ``reported`` has for their target."""
    app = ClientApp(mods=mods)
    register(app, num_examples=lambda context: 10)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        moved = {"x": Array(arrays["x"].numpy() + np.float32(1)), "steps": arrays["steps"]}
        metrics = MetricRecord({"num-examples": 10, **reported.get(int(context.node_config["target"]), {})})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize(
    ("reported", "loss"),
    [
        ({key: {"train_loss": 2.5} for key in range(4)}, 2.5),
        ({key: {"train-loss": 2.5, "loss": 1.0} for key in range(4)}, 1.0),
        ({key: {"train_loss": [2.5, 1.0]} for key in range(4)}, None),
        ({0: {"loss": 10.0}, 3: {"train_loss": 4.0}}, 7.0),
    ],
)
def test_the_loss_is_the_mean_over_the_replies_that_report_one(reported: Any, loss: float | None) -> None:
    strategy = DeltaStrategy("uniform", n=4)
    result = start(strategy, FakeGrid(plain_app(reported, []), configs(4)), rounds=1)
    assert strategy.history[0].num_responded == 4
    assert result.train_metrics_clientapp[1].get("loss") == (None if loss is None else pytest.approx(loss))


@pytest.mark.parametrize("mods", [[], [delta_mod]], ids=["register alone", "delta_mod"])
def test_oort_learns_square_losses_and_does_without(mods: list[Any]) -> None:
    """U_i = 10 sqrt(mean square), or 10 |mean loss| of those who report no square; without any, no reply."""
    reported = {0: {"loss": 1.0, "square-loss": 4.0}, 1: {"train_loss": 3.0}, 2: {"train_loss": 1.0, "square-loss": 1}}
    strategy = DeltaStrategy("oort", n=4)
    federation = played(strategy, FakeGrid(plain_app(reported, mods), configs(4)), 1)
    assert [client for client, _ in strategy.history[0].rejected] == [3]
    assert federation.current.sampler.utility_m.tolist() == pytest.approx([20.0, 30.0, 10.0, np.nan], nan_ok=True)


def test_silence_and_foreign_replies_are_non_response(flower_log: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(linear_app(), configs(3))

    def foreign(message: Message, context: Context) -> Message:
        reply = grid.app(message, context)
        reply.metadata.__dict__["_reply_to_message_id"] = "another"
        return reply

    grid.fail = {1000: lambda message, context: None, 999: foreign}
    strategy = DeltaStrategy("uniform", n=3)
    federation = played(strategy, grid, 2)
    assert list(rates_of(federation).values()) == pytest.approx([1 / 3, 1 / 3, 1.0])
    assert [info.num_responded for info in strategy.history] == [1, 1]
    assert strategy.history[0].rejected == []
    assert "no reply in time: client:hospital-0, client:hospital-1" in flower_log.text


def test_a_killed_server_resumes(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def run(folder: Path, rounds: int, kill_after: int | None = None, first_node: int = 1000) -> DeltaStrategy:
        strategy = DeltaStrategy("pracdelta@pivotal@difference-own", 3, "adam", folder, seed=2)

        def evaluate(server_round: int, arrays: ArrayRecord) -> None:
            if server_round == kill_after:
                raise Killed

        with contextlib.suppress(Killed):
            result = start(strategy, FakeGrid(linear_app(), configs(8, first_node)), rounds, evaluate_fn=evaluate)
            assert max(result.train_metrics_clientapp, default=rounds) == rounds
        return strategy

    through = run(tmp_path / "through", 6).federation
    run(tmp_path / "killed", 6, kill_after=3)
    again = run(tmp_path / "killed", 6, first_node=7000)
    assert [info.round for info in again.history] == [3, 4, 5]
    assert through is not None
    assert again.federation is not None
    assert same_tree(again.federation.current, through.current)
    assert again.federation.clients == through.clients
    assert run(tmp_path / "killed", 6).history == []


def test_a_state_belongs_to_one_server(tmp_path: Path) -> None:
    strategy, grid = DeltaStrategy("uniform", 3, state_path=tmp_path), FakeGrid(linear_app(), configs(8))
    with FileLock(tmp_path / "federation.lock"), pytest.raises(DeltaflError, match="another server is using it"):
        start(strategy, grid, 1)
    assert not (tmp_path / "federation.safetensors").exists()
    start(strategy, grid, 1)
    (tmp_path / "file").touch()
    with pytest.raises(DeltaflError, match=r"cannot keep the state .*; choose another state_path"):
        start(DeltaStrategy("uniform", 2, state_path=tmp_path / "file"), grid)


def test_foreign_differential_privacy_is_refused() -> None:
    """Flower's wrappers, and the clipping norm that Flower's client-side mod reads from the config."""
    strategy, grid = DeltaStrategy("pracdelta", n=2), FakeGrid(linear_app(), configs(3))
    wrapper: Any = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 1.0, num_sampled_clients=2)
    with pytest.raises(DeltaflError, match="voids their guarantee"):
        wrapper.start(grid, model())
    with pytest.raises(DeltaflError, match="voids their guarantee"):
        start(strategy, grid, train_config=ConfigRecord({"clipping_norm": 1.0}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "balanced"}, "write aux=10 if each has 10"),
        ({"sampler": "pracdeltta"}, "did you mean 'pracdelta'"),
        ({"n": 0}, "whole number, at least 1"),
        ({"n": True}, "n is True; it must be a whole number"),
        ({"seed": -1}, "seed is -1; .* at least 0"),
        ({"min_nodes": 0}, "min_nodes is 0; .* at least 1, or None for n"),
        ({"clipping": 3.0}, r"clipping is 3.0; .*write clipping=WeightedClipping\(1.0\)"),
        ({"forget": "client:a"}, r"forget is 'client:a'; it must be a list of texts"),
        ({"sampler": None}, "sampler is None; write"),
        ({"server_optimizer": 0.1}, "server_optimizer is 0.1; write"),
        ({"aux": -1}, "0 for none"),
        ({"sampler": "delta"}, "practical sampler"),
        ({"estimator": "hajek", "clipping": WeightedClipping(1.0, 1.0)}, "largest weight"),
        ({"norm_guard": 3.0, "clipping": WeightedClipping(1.0, 0.5)}, r"norm_guard is 3\.0 and noise is added"),
        ({"estimator": "innovation-remote", "clipping": WeightedClipping(1.0)}, "clients remember what they sent"),
        ({"identity": "node"}, "identity"),
        ({"sampler": "innovation", "memory_path": "rows"}, "there is no state_path: write both"),
    ],
)
def test_impossible_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeltaflError, match=message):
        DeltaStrategy(**settings)
