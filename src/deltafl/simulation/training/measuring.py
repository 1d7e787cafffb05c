"""How fast each way to train is for a task, on this machine, now: a short training by each."""

import time
from dataclasses import replace

import numpy as np
import torch

from ...round import Broadcast
from ...tasks.base import Task
from ...types import Params
from ..runner import ClientRunner
from ..workers import one_thread
from .local import LocalWork
from .routes import Route

#: Local steps of a trial, and timed trials; the first one, in which libraries choose and graphs are captured, is not.
_STEPS = 6
_REPEATS = 3


def measure_routes(
    routes: list[Route],
    task: Task,
    work: LocalWork,
    seed: int,
    model: torch.nn.Module,
    params_d: Params,
    cohort: int,
) -> list[float]:
    """Seconds of a few local steps of a cohort by each route, the least of three trials, in turns.

    Args:
        routes: The ways to train, all of which can train the model.
        task: Data, clients and loss.
        work: What each client does; the number of its steps is cut.
        seed: The experiment's seed.
        model: The task's model.
        params_d: float32 (d,), the global model.
        cohort: Clients that are asked a round; so many are trained, evenly spaced among all.
    """
    short = replace(work, epochs=None, steps=min(work.steps or _STEPS, _STEPS))
    m = task.num_clients
    clients = np.unique(np.linspace(0, m - 1, min(cohort, m)).astype(int)).tolist()
    runners = [ClientRunner(task, short, seed, model, route) for route in routes]
    seconds = [[float("inf")] for _ in runners]
    with one_thread():
        for trial in range(1 + _REPEATS):
            for runner, own in zip(runners, seconds, strict=True):
                began = time.perf_counter()
                for first in range(0, len(clients), runner.group_size):
                    runner.train(Broadcast(params_d, None), 0, *clients[first : first + runner.group_size])
                if trial > 0:
                    own.append(time.perf_counter() - began)
    return [min(own) for own in seconds]
