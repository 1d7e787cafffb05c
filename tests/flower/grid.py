"""A Flower grid in this process: nodes are calls of a ClientApp, and any of them can be made to
fail.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from deltafl.federation.federation import Federation
from deltafl.flower import DeltaStrategy, LocalSteps, delta_mod, register

#: (message, context) -> a reply, or None to fall silent: takes the place of a node's ClientApp.
Handler = Callable[[Message, Context], Message | None]


@dataclass
class FakeGrid:
    """Nodes with their configs; ``fail[node_id]`` replaces a node's app for train messages."""

    app: ClientApp
    configs: dict[int, dict[str, Any]]
    fail: dict[int, Handler] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    #: Message id -> the reply, until it is pulled.
    replies: dict[str, Message] = field(default_factory=dict)
    #: What Flower keeps for each node between messages of a run, as it keeps it: sent to the app's
    #: process and back.
    states: dict[int, RecordDict] = field(default_factory=dict)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id) for node_id in self.configs]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        assert isinstance(messages, list)  # the deployment's grid iterates over its messages twice
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{len(self.sent)}"
            self.sent.append(message)
            reply = self.reply(message)
            if reply is not None:
                self.replies[message.metadata.message_id] = reply
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        received = [self.replies.pop(message_id, None) for message_id in message_ids]
        return [reply for reply in received[::-1] if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        context = Context(
            1, node_id, self.configs.get(node_id, {}), self.states.get(node_id, RecordDict()), {}
        )
        if message.metadata.message_type == "train" and node_id in self.fail:
            return self.fail[node_id](message, context)
        if node_id not in self.configs:
            return None
        try:
            reply = self.app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)
        self.states[node_id] = recorddict_from_proto(recorddict_to_proto(context.state))
        return reply


def linear_app(mods: list[Mod] | None = None) -> ClientApp:
    """Clients that take two SGD steps of ``x`` towards their own number, ``target``."""
    app = ClientApp(mods=[delta_mod] if mods is None else mods)
    register(
        app,
        num_examples=lambda context: int(context.node_config["examples"]),
        aux=lambda context: [float(context.node_config["target"]), 1.0],
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        x = arrays["x"].numpy()
        target = float(context.node_config["target"])
        steps = LocalSteps(lr=0.5)
        for _ in range(2):
            steps.add(float(np.sum((x - target) ** 2)), [x - target])
            x = x - np.float32(0.5) * (x - np.float32(target))
        reply = ArrayRecord({**arrays, "x": Array(x.astype(np.float32))})
        metrics = MetricRecord({"num-examples": 10**9, **steps.metrics()})
        return Message(RecordDict({"arrays": reply, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        x = message.content.array_records["arrays"]["x"].numpy()
        loss = float(np.sum((x - float(context.node_config["target"])) ** 2))
        return Message(
            RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 10**9})}),
            reply_to=message,
        )

    return app


def configs(m: int, first_node: int = 1000) -> dict[int, dict[str, Any]]:
    """Nodes of clients 0 to m - 1; ids in another order than the clients."""
    return {
        first_node - i: {"client-id": f"hospital-{i}", "examples": 10 + 10 * i, "target": float(i)}
        for i in range(m)
    }


def model() -> ArrayRecord:
    return ArrayRecord({"x": Array(np.zeros(3, np.float32)), "steps": Array(np.array(7, np.int64))})


def start(strategy: DeltaStrategy, grid: FakeGrid, rounds: int = 3, **settings: Any) -> Result:
    return strategy.start(cast(Grid, grid), model(), num_rounds=rounds, timeout=30, **settings)


def played(strategy: DeltaStrategy, grid: FakeGrid, rounds: int, **settings: Any) -> Federation:
    """The federation after its rounds."""
    start(strategy, grid, rounds, **settings)
    assert strategy.federation is not None
    return strategy.federation


def trained(grid: FakeGrid, *rounds: int) -> set[int]:
    """The nodes to which train messages were sent, in these rounds or in all."""
    sent = [message.metadata for message in grid.sent if message.metadata.message_type == "train"]
    return {data.dst_node_id for data in sent if not rounds or int(data.group_id) in rounds}
