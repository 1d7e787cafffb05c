"""What clients measure, in Flower: who evaluates, and how metrics become one."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from deltafl import DeltaflError
from deltafl.flower import DeltaStrategy

from .grid import FakeGrid, configs, linear_app, model, start


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


#: (client, its size) -> what it reports, in training and in evaluation.
REPORTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "numbers": lambda i, size: {"acc": i / 7, "tp": i, "num-examples": size},
    "lists": lambda i, size: {"rec": [i / 7, 1.0], "tp": [i, 2 * i], "num-examples": size},
    "claims": lambda i, size: {"acc": i / 7, "num-examples": 5 * (6 - i)},
    "nothing of one": lambda i, size: {"acc": i / 7, "num-examples": i},
    "another key": lambda i, size: {"acc": i / 7, "positives": i * i + 1, "num-examples": size},
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("own_function", [False, True])
def test_metrics_are_those_of_flowers_fedavg(name: str, own_function: bool) -> None:
    """Beside FedAvg itself, with the weights of the replies."""
    by = {"another key": "positives", "numbers": None, "lists": None}.get(name, "num-examples")
    settings: dict[str, Any] = {"weighted_by_key": by or "num-examples"}
    if own_function:
        settings["train_metrics_aggr_fn"] = settings["evaluate_metrics_aggr_fn"] = largest
    every = FedAvg(min_train_nodes=6, min_evaluate_nodes=6, min_available_nodes=6, **settings)
    settings["weighted_by_key"] = by
    ours = DeltaStrategy("uniform", n=6, fraction_evaluate=1.0, **settings)
    expected, found = (
        cast(Strategy, strategy).start(cast(Grid, reporting(REPORTS[name])), model(), num_rounds=1)
        for strategy in (every, ours)
    )
    if by is None:  # of replies that weigh as registered, the model is the same, too
        x = expected.arrays["x"].numpy()
        np.testing.assert_allclose(found.arrays["x"].numpy(), x, rtol=1e-6)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        there, here = getattr(expected, kind)[1], getattr(found, kind)[1]
        assert there.keys() <= here.keys()
        for metric, value in there.items():
            assert here[metric] == pytest.approx(value, rel=1e-12, abs=1e-12)


def largest(contents: list[RecordDict], by: str) -> MetricRecord:
    """The metrics of the reply with the largest weight."""
    records = [record for content in contents for record in content.metric_records.values()]
    return max(records, key=lambda record: cast(float, record[by]))


def reporting(report: Callable[[int, int], dict[str, Any]]) -> FakeGrid:
    """Six clients with these reports."""
    app = linear_app()
    train = app._registered_funcs["train.default"]

    def metrics(context: Context) -> MetricRecord:
        config = context.node_config
        return MetricRecord(report(int(config["target"]), int(config["examples"])))

    def trained(message: Message, context: Context) -> Message:
        content = RecordDict(
            {"arrays": train(message, context).content["arrays"], "metrics": metrics(context)}
        )
        return Message(content, reply_to=message)

    def evaluated(message: Message, context: Context) -> Message:
        return Message(RecordDict({"stats": metrics(context)}), reply_to=message)

    app._registered_funcs["train.default"] = trained
    app._registered_funcs["evaluate.default"] = evaluated
    return FakeGrid(app, configs(6))


def test_a_function_may_have_no_metrics() -> None:
    """As in FedAvg; the numbers of the round stay."""
    nothing: Any = lambda contents, by: None  # noqa: E731
    strategy = DeltaStrategy(
        "uniform",
        n=2,
        evaluate=True,
        train_metrics_aggr_fn=nothing,
        evaluate_metrics_aggr_fn=nothing,
    )
    result = start(strategy, measuring(), rounds=1)
    assert result.train_metrics_clientapp[1]["responded"] == 2
    assert result.evaluate_metrics_clientapp == {}


def test_functions_that_make_no_metrics_are_refused() -> None:
    number: Any = 5
    with pytest.raises(DeltaflError, match="a function for metrics is 5; write one that takes"):
        DeltaStrategy("uniform", n=2, train_metrics_aggr_fn=number)
    five: Any = lambda contents, by: 5  # noqa: E731
    strategy = DeltaStrategy("uniform", n=2, train_metrics_aggr_fn=five)
    with pytest.raises(DeltaflError, match="returned 5; return a MetricRecord, or None"):
        start(strategy, measuring(), rounds=1)


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

    def highest(contents: list[RecordDict], by: str) -> MetricRecord:
        seen.append((len(contents), by))
        assert all(len(content.metric_records) == 1 for content in contents)
        values = [record["acc"] for c in contents for record in c.metric_records.values()]
        return MetricRecord({"largest": max(values), "loss": 7.0})

    grid = measuring()
    grid.fail[1000] = lambda message, context: None
    functions: Any = {"train_metrics_aggr_fn": highest, "evaluate_metrics_aggr_fn": highest}
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


def levels_of(log: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The levels of the lines of a log that have this text."""
    return [record.levelname for record in log.records if text in record.getMessage()]


def test_nobody_evaluates_by_default_and_the_log_says_so(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    grid = measuring()
    start(DeltaStrategy("uniform", n=2), grid, rounds=1)
    assert asked(grid) == []
    assert "clients do not evaluate; FedAvg's default is fraction_evaluate=1.0" in flower_log.text
    assert levels_of(flower_log, "do not evaluate") == ["WARNING"]
    flower_log.clear()
    start(DeltaStrategy("uniform", n=2, fraction_evaluate=0), grid, rounds=1)
    assert levels_of(flower_log, "do not evaluate") == ["INFO"]
    flower_log.clear()
    # A function for metrics that nobody will send is no choice of nobody.
    own = DeltaStrategy("uniform", n=2, fraction_evaluate=0, evaluate_metrics_aggr_fn=largest)
    start(own, grid, rounds=1)
    assert levels_of(flower_log, "do not evaluate") == ["WARNING"]
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


#: What a client sends back of what it got, and what the log says of it.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (lambda a: {"x": a["x"]}, "the reply lacks 'steps'"),
    "extra": (lambda a: {**a, "head": a["x"]}, "the reply has 'head', which nobody sent"),
    "renamed": (
        lambda a: {f"module.{name}": array for name, array in a.items()},
        "the reply lacks 'x', 'steps', and has 'module.x', 'module.steps', which nobody sent",
    ),
    "hostile name": (
        lambda a: {"steps": a["steps"], "\x1b[2J" + "y" * 999: a["x"]},
        "the reply lacks 'x', and has",
    ),
    "another shape": (
        lambda a: {**a, "x": Array(np.zeros((3, 1), np.float32))},
        "array 'x' has shape (3, 1), expected (3,)",
    ),
    "another type": (
        lambda a: {**a, "x": Array(np.zeros(3, int))},
        "array 'x' has type int64, expected float32",
    ),
    "a float for an integer": (
        lambda a: {**a, "steps": Array(np.array(7.0))},
        "array 'steps' has type float64, expected int64",
    ),
    "NaN": (
        lambda a: {**a, "x": Array(np.array([0, np.nan, 0], np.float32))},
        "update has an entry of size nan, expected at most 1e+18, in 'x'",
    ),
    "infinite": (
        lambda a: {**a, "x": Array(np.array([0, -np.inf, 0], np.float32))},
        "update has an entry of size inf",
    ),
    "bytes": (
        lambda a: {**a, "x": Array("float32", (3,), "numpy.ndarray", b"PK")},
        "array 'x' of the reply cannot be read (ValueError)",
    ),
    "two records": (
        lambda a: {"arrays": ArrayRecord(a), "head": ArrayRecord({})},
        "the reply has 2 array records ('arrays', 'head'), expected one",
    ),
    "no record": (lambda a: {"config": ConfigRecord()}, "the reply has 0 array records, expected"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_log_names_what_is_wrong_with_a_reply(
    name: str, flower_log: pytest.LogCaptureFixture
) -> None:
    change, reason = CHANGES[name]
    grid = FakeGrid(linear_app(), configs(3))

    def faulty(message: Message, context: Context) -> Message:
        changed = change(dict(message.content.array_records["arrays"]))
        if not any(isinstance(part, ArrayRecord | ConfigRecord) for part in changed.values()):
            changed = {"arrays": ArrayRecord(changed)}
        return Message(RecordDict(changed), reply_to=message)

    grid.fail[999] = faulty
    result = start(DeltaStrategy("uniform", n=3), grid, rounds=1)
    assert result.train_metrics_clientapp[1]["responded"] == 2
    line = next(line for line in flower_log.messages if "rejected: " in line)
    assert f"reply of client:hospital-1 rejected: {reason}" in line
    assert "\x1b" not in line
    assert len(line) < 250


@pytest.mark.parametrize(
    "change",
    [
        lambda a: dict(reversed(a.items())),
        lambda a: {**a, "x": Array(a["x"].numpy().astype(np.float16))},
        lambda a: {**a, "x": Array(a["x"].numpy().astype(np.float64))},
        lambda a: {**a, "steps": Array(np.array(9, np.int32))},
    ],
)
def test_order_and_width_of_a_reply_do_not_matter(change: Any) -> None:
    grid = FakeGrid(linear_app(), configs(3))

    def other(message: Message, context: Context) -> Message:
        arrays = change(dict(message.content.array_records["arrays"]))
        return Message(RecordDict({"weights": ArrayRecord(arrays)}), reply_to=message)

    grid.fail[999] = other
    result = start(DeltaStrategy("uniform", n=3), grid, rounds=1)
    assert result.train_metrics_clientapp[1]["responded"] == 3
    assert (result.arrays["x"].dtype, result.arrays["steps"].dtype) == ("float32", "int64")
