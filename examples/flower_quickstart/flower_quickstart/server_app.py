"""The server: an ordinary ServerApp with DeltaStrategy in the place of FedAvg."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from deltafl.flower import DeltaStrategy

from .data import load_test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and print how well the model reads digits."""
    config = context.run_config
    x, y = load_test(int(config["seed"]))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        guess = (x @ arrays["weight"].numpy().T + arrays["bias"].numpy()).argmax(axis=1)
        return MetricRecord({"accuracy": float((guess == y).mean())})

    strategy = DeltaStrategy(
        sampler=str(config["sampler"]),
        n=int(config["n"]),
        seed=int(config["seed"]),
        state_path=str(config["state-path"]) or None,
    )
    initial = {
        "weight": Array(np.zeros((10, 64), np.float32)),
        "bias": Array(np.zeros(10, np.float32)),
    }
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord(initial),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
    last = max(result.evaluate_metrics_serverapp)
    print(
        f"after {last} rounds: accuracy {result.evaluate_metrics_serverapp[last]['accuracy']:.3f}"
    )
