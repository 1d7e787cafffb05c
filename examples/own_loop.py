"""Client sampling in a training loop of your own: least squares on ten clients, plain NumPy."""

import numpy as np

import deltafl

rng = deltafl.stream(seed=0, purpose="data")
truth_d = np.array([1.0, -2.0, 0.5])
sizes = [20, 30, 40, 60, 80, 120, 160, 240, 320, 480]
inputs = [rng.normal(size=(size, 3)) for size in sizes]
targets = [x @ truth_d + rng.normal(scale=0.1, size=len(x)) for x in inputs]


def train(client: int, params_d: np.ndarray) -> tuple[np.ndarray, float]:
    """Your local work: five gradient steps from the global model; the update and first loss."""
    x, y = inputs[client], targets[client]
    local_d = params_d.astype(np.float64)
    loss = float(np.mean((x @ local_d - y) ** 2))
    for _ in range(5):
        local_d = local_d - 0.1 * x.T @ (x @ local_d - y) / len(y)
    return local_d - params_d, loss


plan = deltafl.make_plan("pracdelta@@difference", sizes, n=3)
state = deltafl.init_round(plan, np.zeros(3))

for _ in range(30):
    cohort = deltafl.open_round(plan, state)  # who is selected
    updates, losses = zip(*[train(i, state.params_d) for i in cohort.client_n], strict=True)
    reports = deltafl.Reports.make(len(losses), loss=losses)
    state, info = deltafl.close_round(plan, state, cohort, updates, reports)
    print(f"round {info.round:2}  selected {cohort.client_n}  loss {info.loss:.4f}")

print("model", state.params_d.round(2), "truth", truth_d)
