"""A job in Flower's simulation engine: flower_job.py JOB.npz ROUNDS CORES; a line after each
round.

On a GPU so many clients share it at once.
"""

import sys

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import mark, read

JOB = sys.argv[1]
ROUNDS = int(sys.argv[2])
CORES = int(sys.argv[3])
GIVEN = read(JOB)
CLIENTS = len(GIVEN.x)


def make_client(path: str) -> ClientApp:
    """A client as Flower's quickstart writes it; ``path`` travels with it to the worker
    processes.
    """
    app = ClientApp()
    held = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not held:
            held.append(read(path))
        job = held[0]
        own = int(context.node_config["partition-id"])
        model = job.network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        job.train(model, own)
        metrics = MetricRecord({"num-examples": len(job.x[own])})
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
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
        ArrayRecord(GIVEN.kind.network().state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=lambda server_round, arrays: mark("cpu") if server_round else None,
    )


if __name__ == "__main__":
    resources = {"num_cpus": 1.0}
    if GIVEN.device != "cpu":
        resources["num_gpus"] = 1 / CORES
    run_simulation(
        server,
        make_client(JOB),
        CLIENTS,
        backend_config={"init_args": {"num_cpus": CORES}, "client_resources": resources},
    )
