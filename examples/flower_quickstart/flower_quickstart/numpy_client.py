"""The same client without PyTorch: any framework can hold the other end."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from deltafl.flower import LocalSteps, delta_mod, register, take_correction

from .data import batches, load_client, my_order


def my_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """The data of this node's partition."""
    node = context.node_config
    seed = int(context.run_config["seed"])
    return load_client(int(node["partition-id"]), int(node["num-partitions"]), seed)


app = ClientApp(mods=[delta_mod])
register(app, num_examples=lambda context: len(my_data(context)[1]))


@app.train()
def train(message: Message, context: Context) -> Message:
    """SGD on softmax regression, by hand."""
    settings = context.run_config
    x, y = my_data(context)
    arrays = message.content.array_records["arrays"]
    weight = arrays["weight"].numpy()
    bias = arrays["bias"].numpy()
    correction = take_correction(message)  # nothing, unless the strategy has scaffold or mime
    lr = np.float32(float(settings["lr"]) * correction.step_factor)
    rng = my_order(message, context)
    steps = LocalSteps(float(lr))
    rows_k = batches(len(y), int(settings["batch-size"]), int(settings["epochs"]), rng)
    for rows in rows_k:
        score = x[rows] @ weight.T + bias
        share = np.exp(score - score.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        right = np.arange(len(rows)), y[rows]
        loss = -float(np.log(share[right]).mean())
        share[right] -= 1
        gradients = [share.T @ x[rows] / len(rows), share.mean(axis=0)]
        steps.add(loss, gradients)
        weight = weight - lr * gradients[0]
        bias = bias - lr * gradients[1]
        if correction:
            weight = weight + correction["weight"] / len(rows_k)
            bias = bias + correction["bias"] / len(rows_k)
    metrics = MetricRecord({"num-examples": len(y), **steps.metrics()})
    trained = ArrayRecord({"weight": Array(weight), "bias": Array(bias)})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)
