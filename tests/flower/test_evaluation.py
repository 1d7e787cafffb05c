"""What clients measure, in Flower: who evaluates, and how metrics become one."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from deltafl import DeltaflError
from deltafl.flower import DeltaStrategy

from .grid import FakeGrid, configs, linear_app, start


def measuring() -> FakeGrid:
    """Six clients that report lists and numbers, in training and in evaluation."""
    app = linear_app()
    train = app._registered_funcs["train.default"]

    def measure(message: Message, context: Context) -> MetricRecord:
        i = float(context.node_config["target"])
        size = int(context.node_config["examples"])
        return MetricRecord({"acc": i / 10, "recall": [i, 2 * i], "num-examples": size})

    def trained(message: Message, context: Context) -> Message:
        reply = train(message, context)
        reply.content["metrics"] = measure(message, context)
        return reply

    def evaluated(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": measure(message, context)}), reply_to=message)

    app._registered_funcs["train.default"] = trained
    app._registered_funcs["evaluate.default"] = evaluated
    return FakeGrid(app, configs(6))


def asked(grid: FakeGrid) -> list[set[int]]:
    """The nodes that evaluated, by round."""
    sent = [m.metadata for m in grid.sent if m.metadata.message_type == "evaluate"]
    rounds = sorted({int(data.group_id) for data in sent})
    return [{data.dst_node_id for data in sent if int(data.group_id) == r} for r in rounds]


def test_metrics_are_those_of_fedavg_where_clients_tell_the_truth() -> None:
    strategy = DeltaStrategy("uniform", n=6, fraction_evaluate=1.0)
    result = start(strategy, measuring(), rounds=1)
    contents = [
        RecordDict(
            {
                "metrics": MetricRecord(
                    {"acc": i / 10, "recall": [1.0 * i, 2.0 * i], "num-examples": size}
                )
            }
        )
        for i, size in enumerate(range(10, 70, 10))
    ]
    expected = aggregate_metricrecords(contents, "num-examples")
    for found in (result.evaluate_metrics_clientapp[1], result.train_metrics_clientapp[1]):
        assert found["acc"] == pytest.approx(expected["acc"])
        assert found["recall"] == pytest.approx(expected["recall"])
    assert result.train_metrics_clientapp[1]["responded"] == 6


def test_train_metrics_are_weighted_as_the_estimate() -> None:
    """Half of the clients, drawn with unequal probabilities; the loss is one of the metrics."""
    strategy = DeltaStrategy("fedavg", n=3, seed=3)
    grid = FakeGrid(linear_app(), configs(6))
    result = start(strategy, grid, rounds=3)
    for number, info in enumerate(strategy.history, 1):
        metrics = result.train_metrics_clientapp[number]
        assert metrics["loss"] == pytest.approx(info.loss, rel=1e-12)
        assert metrics["num-steps"] == 2.0


def test_the_users_functions_are_called_as_by_fedavg() -> None:
    seen: list[tuple[int, str]] = []

    def largest(contents: list[RecordDict], by: str) -> MetricRecord:
        seen.append((len(contents), by))
        assert all(len(content.metric_records) == 1 for content in contents)
        values = [record["acc"] for c in contents for record in c.metric_records.values()]
        return MetricRecord({"largest": max(values), "loss": 7.0})

    grid = measuring()
    grid.fail[1000] = lambda message, context: None
    functions: Any = {"train_metrics_aggr_fn": largest, "evaluate_metrics_aggr_fn": largest}
    strategy = DeltaStrategy("uniform", n=6, evaluate=True, weighted_by_key="acc", **functions)
    result = start(strategy, grid, rounds=1)
    assert seen == [(5, "acc"), (6, "acc")]  # no reply that was not used
    assert dict(result.evaluate_metrics_clientapp[1]) == {"largest": 0.5, "loss": 7.0}
    assert result.train_metrics_clientapp[1]["largest"] == 0.5
    assert result.train_metrics_clientapp[1]["loss"] == 7.0
    assert result.train_metrics_clientapp[1]["responded"] == 5


def test_a_metric_of_the_clients_weighs_them() -> None:
    strategy = DeltaStrategy("uniform", n=6, evaluate=True, weighted_by_key="acc")
    result = start(strategy, measuring(), rounds=1)
    squares = sum(i * i for i in range(6)) / sum(range(6))
    assert result.evaluate_metrics_clientapp[1]["recall"] == pytest.approx([squares, 2 * squares])


def test_a_client_cannot_pose_as_the_round() -> None:
    grid = measuring()
    train = grid.app._registered_funcs["train.default"]

    def loud(message: Message, context: Context) -> Message:
        reply = train(message, context)
        reply.content["metrics"] = MetricRecord({"responded": 10**9, "x\x1b[2J": 1.0})
        return reply

    grid.app._registered_funcs["train.default"] = loud
    result = start(DeltaStrategy("uniform", n=2), grid, rounds=1)
    assert result.train_metrics_clientapp[1]["responded"] == 2


def test_a_share_of_the_clients_evaluates_drawn_anew_in_each_round() -> None:
    grid = measuring()
    start(DeltaStrategy("uniform", n=2, fraction_evaluate=0.5, seed=1), grid, rounds=8)
    drawn = asked(grid)
    assert [len(nodes) for nodes in drawn] == [3] * 8
    assert len({frozenset(nodes) for nodes in drawn}) > 3
    assert set.union(*drawn) == set(configs(6))
    again = measuring()
    start(DeltaStrategy("uniform", n=4, fraction_evaluate=0.5, seed=1), again, rounds=8)
    assert asked(again) == drawn  # whoever trains
    few = measuring()
    start(DeltaStrategy("uniform", n=2, fraction_evaluate=0.01), few, rounds=1)
    assert [len(nodes) for nodes in asked(few)] == [1]


def test_nobody_evaluates_by_default_and_the_log_says_so(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    grid = measuring()
    start(DeltaStrategy("uniform", n=2), grid, rounds=1)
    assert asked(grid) == []
    assert "clients do not evaluate; FedAvg's default is fraction_evaluate=1.0" in flower_log.text
    flower_log.clear()
    start(DeltaStrategy("uniform", n=2, evaluate=True), grid, rounds=1)
    assert [len(nodes) for nodes in asked(grid)] == [6]
    assert "do not evaluate" not in flower_log.text
    with pytest.raises(DeltaflError, match=r"fraction_evaluate is 2; it must be a number in"):
        DeltaStrategy("uniform", n=2, fraction_evaluate=2)


def test_a_share_of_the_clients_trains() -> None:
    grid = measuring()
    strategy = DeltaStrategy("uniform", fraction_train=0.5)
    assert strategy.rules.min_clients == 2
    start(strategy, grid, rounds=2, train_config=ConfigRecord({"lr": 1.0}))
    assert [info.num_selected for info in strategy.history] == [3, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"x": None, "\x1b[2J" + "y" * 999: np.ones(3, np.float32)},
            "the reply lacks 'x', and has",
        ),
        ({"x": None}, "the reply lacks 'x'"),
        ({"head": np.ones(3, np.float32)}, "the reply has 'head', which nobody sent"),
    ],
)
def test_the_log_names_missing_and_extra_arrays(
    change: dict[str, Any], reason: str, flower_log: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(linear_app(), configs(3))

    def faulty(message: Message, context: Context) -> Message:
        arrays: dict[str, Any] = dict(message.content.array_records["arrays"])
        for name, array in change.items():
            arrays.pop(name, None)
            if array is not None:
                arrays[name] = Array(array)
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({})})
        return Message(content, reply_to=message)

    grid.fail[999] = faulty
    start(DeltaStrategy("uniform", n=3), grid, rounds=1)
    line = next(line for line in flower_log.messages if "rejected" in line)
    assert f"reply of client:hospital-1 rejected: {reason}" in line
    assert "\x1b" not in line
    assert len(line) < 250
