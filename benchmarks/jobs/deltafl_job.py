"""A job in deltafl: deltafl_job.py JOB.npz ROUNDS CORES [PRECISION]; prints a line after each
round, before them how it is computed.

Whole rounds, with the statistics for the samplers, the estimate and the server's step.
"""

import sys

import numpy as np
from work import TOKENS, mark, read

from deltafl import Plan, close_round, init_round, make_sampler, open_round
from deltafl.simulation.engine import Engine
from deltafl.simulation.parallel.workers import Workers
from deltafl.simulation.training.route import Computation
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset
from deltafl.tasks.losses import cross_entropy
from deltafl.tasks.models import next_token_lstm, two_layer_cnn


def main() -> None:
    job = read(sys.argv[1])
    clients, examples = job.y.shape
    x = job.x.cpu().numpy().reshape(-1, *job.kind.inputs)
    y = job.y.cpu().numpy().reshape(-1)
    rows = np.split(np.arange(clients * examples), clients)
    # In the forms that the library has of its own.
    own = {"cnn": two_layer_cnn, "lstm": lambda: next_token_lstm(TOKENS, 8, 256)}
    tokens = job.name == "lstm"
    task = Task(
        "job",
        Dataset("the job", x, y, x[:10], y[:10], TOKENS if tokens else 10),
        rows,
        own.get(job.name, job.kind.network),
        cross_entropy,
        tokens=tokens,
    )
    work = LocalWork(job.kind.lr, job.kind.epochs, batch_size=job.kind.batch_size)
    how = Computation(job.device, *sys.argv[4:5])
    with Workers(int(sys.argv[3])) as workers:
        engine = Engine(task, work, 0, workers, how)
        print("route", *engine.route, flush=True)
        plan = Plan(task.population("data"), make_sampler("pracdelta"), clients)
        state = init_round(plan, engine.initial_params())
        for _ in range(int(sys.argv[2])):
            cohort = open_round(plan, state)
            training = engine.train(state.params_d, state.round, cohort.client_n)
            state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
            mark(job.device)


if __name__ == "__main__":
    main()
