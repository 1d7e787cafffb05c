"""After each round half of the clients judge the model; in this folder type
``flwr run . --stream --federation-config "num-supernodes=20"``.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from deltafl.flower import DeltaStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = DeltaStrategy("uniform", fraction_train=0.25, fraction_evaluate=0.5)
    initial = ArrayRecord({"weight": Array(np.zeros(4, np.float32))})
    result = strategy.start(grid, initial, num_rounds=10)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")
