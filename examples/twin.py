"""Your own public data as a control variate: the server trains a stand-in for each client before
it selects any.
"""

import numpy as np

import deltafl

rng = deltafl.stream(0, "data")
label_e = np.repeat(np.arange(5), 20)
centre_cx = 2 * rng.normal(size=(5, 10))
share_mc = rng.dirichlet(np.full(5, 0.2), size=50)
public_x = centre_cx[label_e] + rng.normal(
    size=(100, 10)
)  # 20 examples of each class, of no client
inputs = [
    centre_cx[label_e] + rng.normal(size=(100, 10)) for _ in share_mc
]  # of a client, weighted by its labels


def train(params_d: np.ndarray, x: np.ndarray, share_c: np.ndarray) -> np.ndarray:
    """Your local work: 20 gradient steps of softmax regression; each class has its share of the
    loss.
    """
    local = params_d.reshape(10, 5).astype(np.float64)
    weight_e1 = share_c[label_e, None] / 20
    for _ in range(20):
        score = np.exp(x @ local - (x @ local).max(axis=1, keepdims=True))
        local -= (
            0.1
            * x.T
            @ (weight_e1 * (score / score.sum(axis=1, keepdims=True) - np.eye(5)[label_e]))
        )
    update_d: np.ndarray = local.ravel() - params_d
    return update_d


twin = deltafl.Twin(
    lambda params_d, population, round: [train(params_d, public_x, share_c) for share_c in share_mc]
)
plan = deltafl.make_plan("uniform", [100] * 50, n=5, estimator=deltafl.LearnedCoefficient(twin))
state = deltafl.init_round(plan, np.zeros(50))
for _ in range(30):
    cohort = deltafl.open_round(plan, state)
    update_nd = [
        train(state.params_d, inputs[client], share_mc[client]) for client in cohort.client_n
    ]
    state, info = deltafl.close_round(plan, state, cohort, update_nd)
    print(f"round {info.round:2}: the twins leave {info.residual:.2f} of the updates' squares")
