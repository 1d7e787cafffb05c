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

from deltafl import (
    Population,
    Reports,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.federation.exchange import Correction
from deltafl.flower import DeltaStrategy, delta_mod, register, take_correction
from deltafl.flower.client import asked_in
from deltafl.types import Params

from .grid import FakeGrid, configs, played, start, trained

LR = np.float32(0.25)
STEPS = 3
CENSUS = "census(components=1,size=4)"


def local_steps(
    x_d: Params, target: float, correction_d: Params | None, factor: float = 1.0
) -> Params:
    """Gradient steps towards the client's own number, each with a third of the correction."""
    lr = LR * np.float32(factor)
    for _ in range(STEPS):
        x_d = np.asarray(
            x_d - lr * (x_d - np.float32(target)) * np.arange(1, 4, dtype=np.float32), np.float32
        )
        if correction_d is not None:
            x_d = x_d + correction_d / np.float32(STEPS)
    return x_d


def app_with(mods: list[Mod], takes: bool = True) -> ClientApp:
    app = ClientApp(mods=mods)
    register(app, num_examples=lambda context: int(context.node_config["examples"]))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        correction = take_correction(message) if takes else Correction()
        assert not takes or take_correction(message) == {}  # once
        target = float(context.node_config["target"])
        factor = correction.step_factor
        x_d = local_steps(arrays["x"].numpy(), target, correction.get("x"), factor)
        reply = ArrayRecord({**arrays, "x": Array(x_d)})
        metrics = MetricRecord({"loss": 1.0})
        return Message(RecordDict({"arrays": reply, "metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize(
    ("label", "backbone"),
    [
        (CENSUS, {"scaffold": True}),
        ("fedvarp", {"scaffold": True}),
        ("innovation", {"scaffold": True}),
        (CENSUS, {"mime": 0.5}),
        ("uniform", {"mime": 0.5}),
        (CENSUS, {"mime": 0.5, "scaffold": True}),
    ],
)
def test_rounds_are_those_of_the_core_bit_for_bit(label: str, backbone: dict[str, Any]) -> None:
    """After a census the momentum starts from its answers, for which the clients took shorter
    steps as well.
    """
    grid = FakeGrid(app_with([delta_mod]), configs(6))
    strategy = DeltaStrategy(label, n=3, seed=4, **backbone)
    federation = played(strategy, grid, 6)

    plan = make_plan(
        label, Population.from_sizes([10 + 10 * i for i in range(6)]), 3, seed=4, **backbone
    )
    factor = plan.step_factor
    if plan.census is not None:
        first = [local_steps(np.zeros(3, np.float32), i, None, factor) for i in range(6)]
        plan = plan.with_census([plan.census.answer(update_d, (3,)) for update_d in first])
    state = init_round(plan, np.zeros(3))
    largest = 0.0
    for info in strategy.history:
        cohort = open_round(plan, state)
        x_d = state.params_d
        drift = plan.drifts(state, cohort.client_n)
        assert drift is not None
        drift_nd = np.broadcast_to(drift, (3, 3))
        pairs = zip(cohort.client_n.tolist(), drift_nd, strict=True)
        updates = [local_steps(x_d, client, drift_d, factor) - x_d for client, drift_d in pairs]
        state, expected = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0] * 3))
        assert (info.num_responded, info.estimate_norm) == (3, expected.estimate_norm)
        largest = max(largest, float(np.abs(drift_nd).max()))
    assert np.array_equal(federation.params_d, state.params_d)
    assert largest > 0.1


def test_a_census_with_momentum_refuses_who_takes_whole_steps(
    flower_log: pytest.LogCaptureFixture,
) -> None:
    """Such a first update is 1 / (1 - beta) times too long; the others' answers are used."""
    grid = FakeGrid(app_with([delta_mod]), configs(5))
    grid.fail[997] = app_with([delta_mod], takes=False)
    federation = played(DeltaStrategy(f"{CENSUS}+mime=0.5", n=5, seed=1), grid, 2)
    assert federation.unanswered() == ["client:hospital-3"]
    assert "census: no answer from 1 clients: the client did not correct its" in flower_log.text


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
    start(strategy, grid, 1)
    contents = [
        m.content
        for m in strategy.configure_train(2, ArrayRecord(), ConfigRecord(), cast(Grid, grid))
    ]
    assert len({id(content) for content in contents}) == 3
    assert len({id(content["arrays"]) for content in contents}) == 1
    assert len({id(content["deltafl-correction"]) for content in contents}) == drifts


@pytest.mark.parametrize("fault", ["no mod", "not taken"])
def test_who_does_not_correct_its_steps_is_refused_with_the_cure(
    fault: str, flower_log: pytest.LogCaptureFixture
) -> None:
    """Such a client's update would be read as one without its correction."""
    grid = FakeGrid(app_with([delta_mod]), configs(5))
    bad = app_with([] if fault == "no mod" else [delta_mod], takes=fault == "no mod")
    grid.fail[997] = bad
    strategy = DeltaStrategy("fedvarp", n=5, seed=1, scaffold=True)
    start(strategy, grid, 2)
    assert 997 in trained(grid, 1)
    assert [info.num_responded for info in strategy.history] == [4, 4]
    fault = "reply of client:hospital-3 rejected: the client did not correct its local steps"
    assert f"{fault}; train inside corrected_steps" in flower_log.text
