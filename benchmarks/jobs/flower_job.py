"""The FashionMNIST job in Flower's simulation engine: flower_job.py JOB.npz ROUNDS CORES; a line
after each round.
"""

import sys

import numpy as np
import torch
from cnn import TextbookNet
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset

JOB = sys.argv[1]
ROUNDS = int(sys.argv[2])
CORES = int(sys.argv[3])
CLIENTS = 20


def make_client(path: str) -> ClientApp:
    """A client as Flower's quickstart writes it; ``path`` travels with it to the worker
    processes.
    """
    app = ClientApp()
    held = {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        if not held:
            held.update(np.load(path))
        own = int(context.node_config["partition-id"])
        examples = TensorDataset(torch.from_numpy(held["x"][own]), torch.from_numpy(held["y"][own]))
        model = TextbookNet()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(5):
            for x, y in DataLoader(examples, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        metrics = MetricRecord({"num-examples": len(examples)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=CLIENTS,
        min_available_nodes=CLIENTS,
    )
    strategy.start(
        grid,
        ArrayRecord(TextbookNet().state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=lambda server_round, arrays: (
            print("round", flush=True) if server_round else None
        ),
    )


if __name__ == "__main__":
    run_simulation(
        server,
        make_client(JOB),
        CLIENTS,
        backend_config={"init_args": {"num_cpus": CORES}, "client_resources": {"num_cpus": 1}},
    )
