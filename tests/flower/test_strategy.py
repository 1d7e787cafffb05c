"""DeltaStrategy over messages, in one process: rounds, replies, restarts, settings."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from filelock import FileLock
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from deltafl import (
    DeltaflError,
)
from deltafl.federation.federation import Federation
from deltafl.federation.replies import mean_metrics, round_metrics
from deltafl.flower import DeltaStrategy, DifferentialPrivacy
from deltafl.flower.messages import metrics_in
from federation.tools import rates_of

from .grid import FakeGrid, Handler, configs, linear_app, model, played, start

DP = DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)


def test_the_result_counts_rounds_keeps_types_and_weighs_evaluations_by_registered_sizes() -> None:
    seen: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"x": float(arrays["x"].numpy()[0])})

    strategy = DeltaStrategy("uniform", n=2, evaluate=True, average=0.5)
    result = start(strategy, FakeGrid(linear_app(), configs(4)), rounds=3, evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 3]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert (result.arrays["x"].dtype, result.arrays["steps"].dtype) == ("float32", "int64")
    assert result.arrays["steps"].numpy() == 7
    x = result.arrays["x"].numpy()
    # Sizes 10 to 40, whatever number of examples a reply claims.
    expected = sum(
        share * float(np.sum((x - i) ** 2)) for i, share in enumerate([0.1, 0.2, 0.3, 0.4])
    )
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(expected, rel=1e-6)


def test_clients_that_cannot_evaluate_are_counted_in_the_log(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    app = linear_app()
    del app._registered_funcs["evaluate.default"]
    result = start(
        DeltaStrategy("uniform", n=2, evaluate=True), FakeGrid(app, configs(4)), rounds=1
    )
    assert not result.evaluate_metrics_clientapp
    assert (
        "evaluation: no result from 4 of 4 clients; the first is client:hospital-"
        in flower_log.text
    )


def test_a_client_counts_once_in_a_mean_of_metrics() -> None:
    honest, loud = (
        Message(
            RecordDict(
                {str(i): MetricRecord({"loss": value, "num-examples": 3}) for i in range(copies)}
            ),
            1,
            "evaluate",
        )
        for value, copies in ((1.0, 1), (9.0, 50))
    )
    received = [(0.5, metrics_in(reply)) for reply in (honest, loud)]
    assert mean_metrics(cast(Any, received)) == {"loss": 5.0}


def test_train_messages_hold_the_users_config_and_live_about_as_long_as_the_round() -> None:
    config = ConfigRecord({"lr": 0.25})
    grid = FakeGrid(linear_app(), configs(3))
    start(DeltaStrategy("uniform", n=2, evaluate=True), grid, rounds=2, train_config=config)
    assert dict(config.items()) == {"lr": 0.25}
    sent = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert {message.metadata.ttl for message in sent} == {40.0}
    records = [message.content.config_records["config"] for message in sent]
    assert [record["server-round"] for record in records] == [1, 1, 2, 2]
    assert {record["lr"] for record in records} == {0.25}
    judged = [m.content for m in grid.sent if m.metadata.message_type == "evaluate"]
    rounds = [content.config_records["config"]["server-round"] for content in judged]
    assert rounds == [1] * 3 + [2] * 3


def dead(message: Message, context: Context) -> Message:
    """A node that is gone: the SuperLink answers in its place."""
    reply = Message(
        Error(5, "Traceback\n  File x\nNode \x1b[2KUnavailable\n'>\n"), reply_to=message
    )
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


def replying(
    metrics: dict[str, Any] | None = None, data: bytes | None = None, records: int = 1
) -> Handler:
    """Clients that return a model of ones, or these bytes, and report these metrics."""

    def reply(message: Message, context: Context) -> Message:
        x = (
            Array(np.ones(3, np.float32))
            if data is None
            else Array("float32", (3,), "numpy.ndarray", data)
        )
        arrays = ArrayRecord({**message.content.array_records["arrays"], "x": x})
        content = RecordDict({f"arrays-{number}": arrays for number in range(records)})
        content["metrics"] = MetricRecord(metrics or {})
        return Message(content, reply_to=message)

    return reply


FAILURES = {
    "dead": (dead, r"error 5: Node \x1b[2KUnavailable"),
    "nan loss": (replying(metrics={"loss": float("nan")}), "loss is nan"),
    "square below the loss": (
        replying(metrics={"train_loss": 2.0, "square-loss": 2.0}),
        "mean squared loss is 2.0",
    ),
    "nan steps": (replying(metrics={"num-steps": float("nan")}), "local steps"),
    "list of steps": (replying(metrics={"num-steps": [1] * 10**5}), "local steps"),
    "two records": (replying(records=2), "2 array records"),
    "pickle": (replying(data=b"cos\nsystem\n(S'exit'\ntR."), "cannot be read"),
    "empty": (replying(data=b""), "cannot be read"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_non_response_of_the_right_client(kind: str) -> None:
    handler, reason = FAILURES[kind]
    grid = FakeGrid(linear_app(), configs(4))
    grid.fail[998] = handler  # hospital-2
    strategy = DeltaStrategy("uniform", n=4)
    federation = played(strategy, grid, 1)
    assert [federation.keys[client] for client, _ in strategy.history[0].rejected] == [
        "client:hospital-2"
    ]
    assert reason in strategy.history[0].rejected[0].reason
    assert len(strategy.history[0].rejected[0].reason) < 120
    assert rates_of(federation)["client:hospital-2"] == 0.5
    assert [rate for key, rate in rates_of(federation).items() if key != "client:hospital-2"] == [
        1.0
    ] * 3


def reporting(strategy: DeltaStrategy, metrics: dict[int, dict[str, Any]]) -> Federation:
    """The federation after a round in which four clients report these metrics."""
    fail = {1000 - i: replying(metrics.get(i)) for i in range(4)}
    return played(strategy, FakeGrid(linear_app(), configs(4), fail), 1)


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({i: {"train_loss": 2.5} for i in range(4)}, 2.5),
        ({i: {"train-loss": 2.5, "loss": 1.0} for i in range(4)}, 1.0),
        ({i: {"train_loss": [2.5, 1.0]} for i in range(4)}, float("nan")),
        ({0: {"loss": 10.0}, 3: {"train_loss": 4.0}}, 7.0),
    ],
)
def test_the_loss_is_the_mean_over_the_replies_that_report_one(metrics: Any, loss: float) -> None:
    strategy = DeltaStrategy("uniform", n=4, weights="uniform")
    reporting(strategy, metrics)
    assert strategy.history[0].num_responded == 4
    assert round_metrics(strategy.history[0]).get("loss", np.nan) == pytest.approx(
        loss, nan_ok=True
    )


def test_oort_learns_square_losses_and_does_without() -> None:
    """U_i = n_i sqrt(mean square), or n_i |mean loss| of those who report no square; without
    any, no reply.
    """
    strategy = DeltaStrategy("oort", n=4)
    metrics = {
        0: {"loss": 1.0, "square-loss": 4.0},
        1: {"train_loss": 3.0},
        2: {"train_loss": 1.0, "square-loss": 1},
    }
    utility_m = reporting(strategy, metrics).current.sampler.utility_m
    assert [client for client, _ in strategy.history[0].rejected] == [3]
    assert utility_m.tolist() == pytest.approx([10 * 2, 20 * 3, 30 * 1, np.nan], nan_ok=True)


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


def test_a_state_belongs_to_one_server(tmp_path: Path) -> None:
    strategy = DeltaStrategy("uniform", 3, state_path=tmp_path)
    grid = FakeGrid(linear_app(), configs(8))
    with (
        FileLock(tmp_path / "federation.lock"),
        pytest.raises(DeltaflError, match="another process is using"),
    ):
        start(strategy, grid, 1)
    assert not (tmp_path / "federation.safetensors").exists()
    start(strategy, grid, 1)
    (tmp_path / "file").touch()
    with pytest.raises(DeltaflError, match="cannot write"):
        start(DeltaStrategy("uniform", 2, state_path=tmp_path / "file"), grid)


def test_foreign_differential_privacy_is_refused() -> None:
    """Flower's wrappers, and the clipping norm that Flower's client-side mod reads from the
    config.
    """
    strategy = DeltaStrategy("pracdelta", n=2)
    grid = FakeGrid(linear_app(), configs(3))
    wrapper: Any = DifferentialPrivacyServerSideFixedClipping(
        strategy, 1.0, 1.0, num_sampled_clients=2
    )
    with pytest.raises(DeltaflError, match="voids their guarantee"):
        wrapper.start(grid, model())
    with pytest.raises(DeltaflError, match="voids their guarantee"):
        start(strategy, grid, train_config=ConfigRecord({"clipping_norm": 1.0}))


def test_epsilon_is_logged_before_the_first_round(flower_log: pytest.LogCaptureFixture) -> None:
    strategy = DeltaStrategy("uniform@poisson", n=2, min_nodes=8, dp=DP, seed=2**40)
    arrays = model()
    grid = FakeGrid(linear_app(), configs(8))
    del arrays["steps"]
    strategy.start(cast(Any, grid), arrays, num_rounds=12)
    assert (
        f"After 12 rounds: epsilon = {DP.epsilon(12, 2 / 8):.3g} at most, with delta = 1e-05"
        in flower_log.text
    )
    assert len({info.num_selected for info in strategy.history}) > 2  # a random number


@pytest.mark.parametrize(
    ("argument", "message"), [("timeout", "number of seconds"), ("num_rounds", "whole number")]
)
def test_arguments_of_start_are_refused_before_anybody_trains(argument: str, message: str) -> None:
    wrong: Any = {argument: "3"}
    with pytest.raises(DeltaflError, match=f"{argument} is '3'; it must be a {message}"):
        DeltaStrategy("uniform", n=2).start(
            cast(Grid, FakeGrid(linear_app(), configs(2))), model(), **wrong
        )
