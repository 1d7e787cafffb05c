"""Client sampling in a training loop of your own: least squares on ten clients of very different
size, plain NumPy.
"""

import numpy as np

import deltafl

rng = deltafl.stream(seed=0, purpose="data")
truth_d = np.array([1.0, -2.0, 0.5])
sizes = [20, 30, 40, 60, 80, 120, 160, 240, 320, 480]
inputs = [rng.normal(size=(size, 3)) for size in sizes]
targets = [x @ truth_d + rng.normal(scale=0.1, size=len(x)) for x in inputs]


def train(
    client: int, params_d: np.ndarray, steps: int = 5, lr: float = 0.1
) -> tuple[np.ndarray, float]:
    """Your local work: a few gradient steps from the global model; returns the update and the
    first loss.
    """
    x = inputs[client]
    y = targets[client]
    local_d = params_d.astype(np.float64)
    loss = float(np.mean((x @ local_d - y) ** 2))
    for _ in range(steps):
        local_d = local_d - lr * x.T @ (x @ local_d - y) / len(y)
    return local_d - params_d, loss


population = deltafl.Population.from_sizes(sizes)
plan = deltafl.Plan(population, deltafl.make_sampler("pracdelta"), n=3, estimator="difference")
state = deltafl.init_round(plan, np.zeros(3))

for _ in range(30):
    cohort = deltafl.open_round(plan, state)  # who is selected
    replies = [train(client, state.params_d) for client in cohort.client_n]
    reports = deltafl.Reports.make(len(replies), loss=[loss for _, loss in replies])
    state, info = deltafl.close_round(
        plan, state, cohort, [update_d for update_d, _ in replies], reports
    )
    print(
        f"round {info.round:2}  selected {cohort.client_n}  loss {info.loss:.4f}  norm "
        f"{info.estimate_norm:.4f}"
    )

print("model", state.params_d.round(2), "truth", truth_d)
