"""The FashionMNIST job in deltafl: deltafl_job.py JOB.npz ROUNDS CORES; prints a line after each
round.

Whole rounds, with the statistics for the samplers, the estimate and the server's step.
"""

import sys

import numpy as np

from deltafl import Plan, close_round, init_round, make_sampler, open_round
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.simulation.workers import Workers
from deltafl.tasks.base import Dataset, Task
from deltafl.tasks.losses import cross_entropy
from deltafl.tasks.models import two_layer_cnn


def main() -> None:
    job = np.load(sys.argv[1])
    clients, examples = job["y"].shape
    x = job["x"].reshape(-1, *job["x"].shape[2:])
    y = job["y"].reshape(-1)
    rows = np.split(np.arange(clients * examples), clients)
    task = Task(
        "job", Dataset("the job", x, y, x[:10], y[:10], 10), rows, two_layer_cnn, cross_entropy
    )
    with Workers(int(sys.argv[3])) as workers:
        engine = Engine(task, LocalWork(lr=0.01, epochs=5), 0, workers)
        plan = Plan(task.population("data"), make_sampler("pracdelta"), clients)
        state = init_round(plan, engine.initial_params())
        for _ in range(int(sys.argv[2])):
            cohort = open_round(plan, state)
            training = engine.train(state.params_d, state.round, cohort.client_n)
            state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
            print("round", flush=True)


if __name__ == "__main__":
    main()
