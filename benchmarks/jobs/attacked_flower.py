"""The Flower app of ``attacked.py``: an ordinary server, and clients of whom one lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from attacked_clients import SHAPE, SIZES, be_late, die, loss, trained, turn
from deltafl.flower import DeltaStrategy, delta_mod, register
from hosts.hostile import ESCAPES, headed, npz

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    config: Any = context.run_config
    strategy = DeltaStrategy(
        config["sampler"],
        config["n"],
        seed=config["seed"],
        state_path=config["state-path"],
        min_nodes=config["min-nodes"],
        identity=config["identity"],
        wait_for_nodes=300,
        registration_timeout=30,
    )
    start = ArrayRecord({"x": Array(np.zeros(SHAPE, np.float32))})
    strategy.start(grid, start, num_rounds=config["rounds"], timeout=config["timeout"])


def lying(message: Message, context: Context, call_next: Any) -> Message:
    """A mod outside of deltafl's, so that nothing sets right what it sends."""
    reply: Message = call_next(message, context)
    said = context.node_config.get("lies")
    if said and message.metadata.message_type == "train":
        x = reply.content.array_records["arrays"]["x"].numpy()
        seconds: Any = context.run_config["timeout"]
        LIES[turn([*LIES], Path(str(said)))](reply.content, x, seconds)
    return reply


def of(make: Callable[[Any], bytes]) -> Callable[..., None]:
    """Bytes that are said to be the array."""

    def spoil(content: RecordDict, x: Any, seconds: float) -> None:
        array = Array("float32", x.shape, "numpy.ndarray", make(x))
        content["arrays"] = ArrayRecord({"x": array})

    return spoil


def live(make: Callable[[Any], Any]) -> Callable[..., None]:
    def spoil(content: RecordDict, x: Any, seconds: float) -> None:
        content["arrays"] = ArrayRecord({"x": Array(make(x))})

    return spoil


def many(content: RecordDict, x: Any, seconds: float) -> None:
    names = [f"{ESCAPES}{i}" for i in range(300)]
    content["arrays"] = ArrayRecord({name: Array(x[:1]) for name in names})
    content["metrics"] = MetricRecord({"loss": float("nan"), **{n: [1e300] * 99 for n in names}})


LIES: dict[str, Callable[..., None]] = {
    "64 MB": live(lambda x: np.zeros((4000, 4000), np.float32)),
    "npz": of(npz),
    "giant array": of(lambda x: headed(f"({10**12},)")),
    "silence": lambda content, x, seconds: die(),
    "wrong shape": live(lambda x: x[:-1]),
    "slow": lambda content, x, seconds: be_late(seconds),
    "NaN": live(lambda x: x * np.nan),
    "far": live(lambda x: x + np.float32(1e30)),
    "names": many,
}

client_app = ClientApp(mods=[lying, delta_mod])
register(client_app, lambda context: SIZES[int(context.node_config["partition-id"])])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    number = int(context.node_config["partition-id"])
    x = message.content.array_records["arrays"]["x"].numpy()
    arrays = ArrayRecord({"x": Array(trained(x, number))})
    metrics = MetricRecord({"loss": loss(x, number)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
