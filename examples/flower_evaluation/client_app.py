"""Clients with three classes in shares of their own, which report accuracy, and recall by class."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from deltafl.flower import register

app = ClientApp()


def my_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: here noisy points around the corner of their class."""
    client = int(context.node_config["partition-id"])
    rng = torch.Generator().manual_seed(client)
    shares = torch.rand(3, generator=rng) ** 2
    y = torch.multinomial(shares, 20 + 4 * client, replacement=True, generator=rng)
    return nn.functional.one_hot(y, 4) + 0.4 * torch.randn(len(y), 4, generator=rng), y


register(app, num_examples=lambda context: len(my_data(context)[1]))


def received(message: Message) -> nn.Linear:
    model = nn.Linear(4, 3)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(message: Message, context: Context) -> Message:
    """Your local training."""
    model = received(message)
    x, y = my_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Accuracy and recall; where a client has no row of a class, its recall there is NaN."""
    x, y = my_data(context)
    hits = (received(message)(x).argmax(dim=1) == y).float()
    recall = [hits[y == label].mean().item() for label in range(3)]
    metrics = {"accuracy": hits.mean().item(), "recall": recall, "num-examples": len(y)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
