"""Clients that train a linear classifier, and report how often it is right on their data."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from deltafl.flower import register

app = ClientApp()


def my_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    x = rng.normal(size=(rng.integers(20, 100), 4))
    return x, x @ [1, -2, 3, 0.5] > rng.normal(size=len(x))


register(app, num_examples=lambda context: len(my_data(context)[1]))


@app.train()
def train(message: Message, context: Context) -> Message:
    weight = message.content.array_records["arrays"]["weight"].numpy()
    x, y = my_data(context)
    weight = weight - x.T @ (1 / (1 + np.exp(-x @ weight)) - y) / len(y)
    arrays = ArrayRecord({"weight": Array(weight.astype(np.float32))})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    weight = message.content.array_records["arrays"]["weight"].numpy()
    x, y = my_data(context)
    metrics = MetricRecord({"accuracy": float(np.mean((x @ weight > 0) == y))})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
