"""Who holds which digits: scikit-learn's 1,797 images, few of the ten digits at each client;
nothing is downloaded.
"""

from functools import lru_cache

import numpy as np
from flwr.app import Context, Message

import deltafl
from deltafl.tasks import make_task
from deltafl.tasks.base import Task


@lru_cache(maxsize=2)
def load_task(num_clients: int, seed: int) -> Task:
    """The task of ``deltafl run --task digits``: the same clients for the same seed."""
    return make_task("digits", seed=seed, num_clients=num_clients)


def load_client(client: int, num_clients: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The images (n_i, 64), scaled to [0, 1], and labels (n_i,) of one client."""
    task = load_task(num_clients, seed)
    rows = task.client_rows[client]
    return scaled(task.dataset.train_x[rows], task), task.dataset.train_y[rows]


def load_test(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The 297 images that nobody trains on."""
    task = load_task(1, seed)
    return scaled(task.dataset.test_x, task), task.dataset.test_y


def scaled(x: np.ndarray, task: Task) -> np.ndarray:
    """Images as float32 rows."""
    return (x.astype(np.float32) * np.float32(task.input_scale)).reshape(len(x), -1)


def my_order(message: Message, context: Context) -> np.random.Generator:
    """The generator of this client's minibatches in this round, as the simulator of deltafl has
    it.
    """
    server_round = message.content.config_records["config"]["server-round"]
    assert isinstance(server_round, int)
    client = int(context.node_config["partition-id"])
    return deltafl.stream(int(context.run_config["seed"]), "batches", server_round - 1, client)


def batches(count: int, size: int, epochs: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each local step: every epoch in a new order."""
    orders = [rng.permutation(count) for _ in range(epochs)]
    return [order[start : start + size] for order in orders for start in range(0, count, size)]
