"""A small Flower app with PyTorch: 20 clients of unequal size, each with one of four classes, 10
selected per round.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()
server_app = ServerApp()


def my_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: here noisy points around the corner of the client's class."""
    client = int(context.node_config["partition-id"])
    y = torch.full((20 + 4 * client,), client % 4)
    noise = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(client))
    return torch.nn.functional.one_hot(y, 4) + 0.3 * noise, y


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Your local training."""
    model = torch.nn.Linear(4, 4)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = my_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Your rounds."""
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(torch.nn.Linear(4, 4).state_dict()), num_rounds=20)
    torch.save(result.arrays.to_torch_state_dict(), "model.pt")
