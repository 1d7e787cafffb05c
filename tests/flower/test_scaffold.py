"""Corrected local steps over messages: who is sent which correction, and what becomes of those
who do not take it.
"""

from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid

from deltafl.federation.exchange import Correction
from deltafl.flower import DeltaStrategy, delta_mod, register, take_correction
from deltafl.flower.client import asked_in

from .grid import FakeGrid, configs, played, start

CENSUS = "census(components=1,size=4)"


def app_with(mods: list[Mod], takes: bool = True) -> ClientApp:
    app = ClientApp(mods=mods)
    register(app, num_examples=lambda context: int(context.node_config["examples"]))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        correction = take_correction(message) if takes else Correction()
        assert not takes or take_correction(message) == {}  # once
        half = np.float32(0.5 * correction.step_factor)
        x_d = arrays["x"].numpy()
        x_d = x_d + half * (np.float32(context.node_config["target"]) - x_d)
        reply = ArrayRecord({**arrays, "x": Array(x_d + correction.get("x", 0))})
        metrics = MetricRecord({"loss": 1.0})
        return Message(RecordDict({"arrays": reply, "metrics": metrics}), reply_to=message)

    return app


def test_only_train_messages_of_the_cohort_hold_a_correction() -> None:
    grid = FakeGrid(app_with([delta_mod]), configs(5))
    played(DeltaStrategy(CENSUS, n=2, seed=1, scaffold=True), grid, 3)
    trainings = [message for message in grid.sent if message.metadata.message_type == "train"]
    questions = [m for m in trainings if "census" in asked_in(m)]
    assert (len(trainings), len(questions)) == (5 + 2 * 2, 5)
    # The client took it out of its own message, which in this process is the server's.
    assert all("deltafl-correction" not in message.content for message in trainings)


@pytest.mark.parametrize(("part", "drifts"), [({"mime": 0.5}, 1), ({"scaffold": True}, 3)])
def test_model_and_momentum_are_serialized_once_for_the_whole_cohort(
    part: dict[str, Any], drifts: int
) -> None:
    """A large cohort's messages would otherwise hold a model or two each."""
    grid = FakeGrid(app_with([delta_mod]), configs(5))
    strategy = DeltaStrategy("fedvarp", n=3, seed=1, **part)
    model = start(strategy, grid, 1).arrays
    contents = [
        m.content for m in strategy.configure_train(2, model, ConfigRecord(), cast(Grid, grid))
    ]
    assert len({id(content) for content in contents}) == 3
    assert len({id(content["arrays"]) for content in contents}) == 1
    assert len({id(content["deltafl-correction"]) for content in contents}) == drifts


def test_a_client_without_the_mod_is_refused_with_the_cure(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    """Its update would be read as one without its correction."""
    grid = FakeGrid(app_with([delta_mod]), configs(5))
    grid.fail[997] = app_with([], takes=False)
    strategy = DeltaStrategy("fedvarp", n=5, seed=1, scaffold=True)
    start(strategy, grid, 2)
    assert [info.num_responded for info in strategy.history] == [4, 4]
    fault = "reply of client:hospital-3 rejected: the client did not correct its local steps"
    assert f"{fault}; train inside corrected_steps" in flower_log.text
