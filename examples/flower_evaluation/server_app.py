"""A federation that evaluates: after each round half of the clients judge the model."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from deltafl.flower import DeltaStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print what the clients have measured."""
    strategy = DeltaStrategy("uniform", fraction_train=0.25, fraction_evaluate=0.5)
    initial = ArrayRecord(nn.Linear(4, 3).state_dict())
    result = strategy.start(grid, initial, num_rounds=10)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        recall = [f"{share:.2f}" for share in metrics["recall"]]  # type: ignore[union-attr]
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}, recall {' '.join(recall)}")
