"""A PyTorch client. What deltafl adds to an ordinary one is marked."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from deltafl.flower import LocalSteps, corrected_steps, delta_mod, register, take_correction

from .data import batches, load_client, my_order


def make_model() -> torch.nn.Module:
    """Softmax regression."""
    return torch.nn.Linear(64, 10)


def my_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of this node's partition."""
    node = context.node_config
    seed = int(context.run_config["seed"])
    x, y = load_client(int(node["partition-id"]), int(node["num-partitions"]), seed)
    return torch.from_numpy(x), torch.from_numpy(y)


app = ClientApp(mods=[delta_mod])  # deltafl: sketches and memories, if the server asks
register(
    app, num_examples=lambda context: len(my_data(context)[1])
)  # deltafl: who I am, how much data I hold


@app.train()
def train(message: Message, context: Context) -> Message:
    """SGD from the global model."""
    settings = context.run_config
    x, y = my_data(context)
    model = make_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    lr = float(settings["lr"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    rng = my_order(message, context)
    correction = take_correction(message)  # deltafl: optional, for scaffold and mime
    steps = LocalSteps(
        lr * correction.step_factor
    )  # deltafl: optional, how much the local steps vary
    rows_k = batches(len(y), int(settings["batch-size"]), int(settings["epochs"]), rng)
    with corrected_steps(correction, model, optimizer, len(rows_k)):  # deltafl: optional
        for rows in rows_k:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            steps.add(loss.item(), [p.grad for p in model.parameters()])  # deltafl
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), **steps.metrics()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
