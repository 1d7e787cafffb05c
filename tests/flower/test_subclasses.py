"""What users of Flower's strategies override, or write from habit, in DeltaStrategy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from deltafl import DeltaflError
from deltafl.flower import DeltaStrategy

from .grid import FakeGrid, configs, linear_app, model, start


class Scheduled(DeltaStrategy):
    """A learning rate by the round, evaluation in every other round."""

    seen: list[tuple[str, int]]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.seen.append(("train", server_round))
        config["lr"] = 1 / server_round
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.seen.append(("evaluate", server_round))
        if server_round % 2 == 0:
            return []
        return super().configure_evaluate(server_round, arrays, config, grid)


def scheduled(rounds: int, folder: Path | None, judged: list[int]) -> tuple[Any, Any, FakeGrid]:
    def judge(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        judged.append(server_round)
        return MetricRecord({"x": float(arrays["x"].numpy().sum())})

    strategy = Scheduled("uniform", n=2, seed=1, state_path=folder, evaluate=True)
    strategy.seen = []
    grid = FakeGrid(linear_app(), configs(4))
    config = ConfigRecord({"lr": 9.0, "name": "a"})
    result = start(strategy, grid, rounds, train_config=config, evaluate_fn=judge)
    return strategy, result, grid


def test_overrides_count_all_rounds_after_a_restart(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    judged: list[int] = []
    scheduled(3, tmp_path, judged)
    strategy, result, grid = scheduled(5, tmp_path, judged)
    assert judged == [0, 1, 2, 3, 3, 4, 5]
    assert strategy.seen == [(kind, r) for r in (4, 5) for kind in ("train", "evaluate")]
    sent = [message.content for message in grid.sent if message.metadata.message_type == "train"]
    assert [dict(content["config"]) for content in sent] == [
        {"lr": 1 / r, "name": "a", "server-round": r} for r in (4, 4, 5, 5)
    ]
    assert list(result.train_metrics_clientapp) == [4, 5]
    assert list(result.evaluate_metrics_clientapp) == [5]
    assert list(result.evaluate_metrics_serverapp) == [3, 4, 5]
    assert "no result from" not in flower_log.text
    _, through, _ = scheduled(5, None, judged)
    assert np.array_equal(result.arrays["x"].numpy(), through.arrays["x"].numpy())


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: ArrayRecord({**arrays, "x": Array(np.zeros(3, np.float32))}),
        lambda arrays: None,
    ],
)
def test_a_model_that_an_override_changes_is_refused(change: Any) -> None:
    """It would be sent by FedAvg, and is not by a strategy that has the model itself."""

    class Changed(DeltaStrategy):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            return change(arrays), metrics

    grid = FakeGrid(linear_app(), configs(4))
    with pytest.raises(DeltaflError, match="aggregate_train returned other arrays"):
        start(Changed("uniform", n=2), grid, 2)


def test_a_model_that_an_override_copies_is_the_same() -> None:
    class Copied(DeltaStrategy):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            numbers = {name: Array(part.numpy().copy()) for name, part in arrays.items()}
            return ArrayRecord(numbers), metrics

    found = start(Copied("uniform", n=2, seed=1), FakeGrid(linear_app(), configs(4)), 2)
    plain = start(DeltaStrategy("uniform", n=2, seed=1), FakeGrid(linear_app(), configs(4)), 2)
    assert dict(found.arrays) == dict(plain.arrays)


@pytest.mark.parametrize("step", ["configure_train", "configure_evaluate"])
def test_messages_that_an_override_makes_anew_are_refused(step: str) -> None:
    """Replies to them would be taken for silence."""

    def copied(self: Any, *given: Any) -> list[Message]:
        messages = getattr(DeltaStrategy, step)(self, *given)
        return [
            Message(one.content, one.metadata.dst_node_id, one.metadata.message_type)
            for one in messages
        ]

    kind = type("Copied", (DeltaStrategy,), {step: copied})
    with pytest.raises(DeltaflError, match=f"let {step} return what super"):
        start(kind("uniform", n=2, evaluate=True), FakeGrid(linear_app(), configs(4)), 2)


def test_what_evaluate_fn_takes_out_of_the_arrays_is_in_the_result() -> None:
    strategy = DeltaStrategy("uniform", n=2, seed=1)
    rounds = []
    for _ in range(2):
        grid = FakeGrid(linear_app(), configs(4))
        result = start(strategy, grid, 2, evaluate_fn=lambda round, arrays: arrays.clear())
        assert list(result.arrays) == list(model())
        rounds.append([info.round for info in strategy.history])
    # A second start without a state is another run.
    assert rounds == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("argument", "cure"),
    [
        ({"min_available_nodes": 2}, "write min_nodes"),
        ({"min_train_nodes": 2}, "write n, "),
        ({"min_evaluate_nodes": 2}, "write fraction_evaluate, "),
        ({"arrayrecord_key": "model"}, r"message.content\['arrays'\]"),
        ({"configrecord_key": "settings"}, r"message.content\['config'\]"),
        ({"min_clients": 2}, "write min_nodes"),
        ({"evaluate_fn": print}, r"give it to start\("),
        ({"initial_parameters": None}, "give them to start, "),
        ({"min_node": 2}, "did you mean 'min_nodes'"),
        ({"fraction_evaluat": 0.5}, "did you mean 'fraction_evaluate'"),
    ],
)
def test_arguments_of_fedavg_are_named_as_they_are_here(argument: Any, cure: str) -> None:
    with pytest.raises(DeltaflError, match=cure):
        DeltaStrategy("uniform", **argument)


def test_what_is_no_record_of_arrays_is_refused() -> None:
    with pytest.raises(DeltaflError, match=r"initial_arrays is a list; write ArrayRecord\("):
        DeltaStrategy("uniform", n=2).start(cast(Grid, None), cast(Any, [np.zeros(3)]))


def test_rounds_that_nobody_has_begun_are_refused() -> None:
    with pytest.raises(DeltaflError, match="no rounds have begun"):
        DeltaStrategy("uniform", n=2).configure_train(1, model(), ConfigRecord(), cast(Grid, None))
