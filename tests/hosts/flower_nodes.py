"""The clients of ``rounds.py`` as nodes of Flower."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid

from deltafl.flower import DeltaStrategy, delta_mod, register, take_correction
from deltafl.flower.messages import to_arrays, to_record
from deltafl.model.arrays import Arrays
from deltafl.types import Params
from flower.grid import FakeGrid

from .rounds import FAULTY, MODEL, Played, Work, label_of, settings_of, work


def app_with(fault: str = "", mods: Sequence[Mod] = (delta_mod,), work: Work = work) -> ClientApp:
    app = ClientApp(mods=list(mods))
    register(
        app,
        num_examples=lambda context: 10 + 5 * int(context.node_config["number"]),
        aux=lambda context: label_of(int(context.node_config["number"])),
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sent = to_arrays(message.content.array_records["arrays"])
        number = int(context.node_config["number"])
        arrays = work(number, fault, sent, lambda: take_correction(message))
        assert arrays is not None
        reply = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        metrics = MetricRecord({"loss": 1.0, "num-examples": 10**9})
        return Message(RecordDict({"arrays": reply, "metrics": metrics}), reply_to=message)

    return app


def play(
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    fault: str = "",
    m: int = 7,
    rounds: int = 5,
    state_path: Path | None = None,
    model: Arrays = MODEL,
    work: Work = work,
    **settings: Any,
) -> Played:
    first = 1000 * (rounds + 1)  # a client comes back through another node
    nodes = {first - i: {"client-id": f"site-{i}", "number": i} for i in range(m)}
    grid = FakeGrid(app_with(fault, work=work), nodes)
    if fault == "silent":
        grid.fail[first - FAULTY] = lambda message, context: None
    strategy = DeltaStrategy(label, state_path=state_path, **{**settings_of(label), **settings})
    models = list[Params]()

    def judge(server_round: int, arrays: ArrayRecord) -> None:
        named = to_arrays(arrays)
        models.append(np.concatenate([named[name].ravel() for name in model]))

    strategy.start(
        cast(Grid, grid), to_record(model), num_rounds=rounds, timeout=30, evaluate_fn=judge
    )
    assert strategy.federation is not None
    return Played(strategy.federation, strategy.history, models[1:])
