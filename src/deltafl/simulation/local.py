"""Local training, told plainly: what one client does in one round. ``train_serial`` is the readable twin of ``fast.py``.

The client starts from the global model x_0 and takes K steps x <- x - lr * direction(g_k), where g_k is the gradient of
the mean loss of minibatch k, plus mu (x - x_0) with a proximal term, filtered by momentum if there is any. It returns
u = x_K - x_0 with what one pass over the same steps can tell about it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import IntArray, Params


@dataclass(frozen=True)
class LocalWork:
    """What every client does in a round. Exactly one of ``epochs`` and ``steps`` is set.

    Attributes:
        lr: Local learning rate eta_L > 0.
        epochs: Passes over the client's data, each in a new order; the last minibatch of a pass may be short.
        steps: Number of minibatch steps K; passes are begun anew as often as needed.
        batch_size: Examples a minibatch, >= 1; None for the client's whole data.
        momentum: gamma in [0, 1): v <- gamma v + g, x <- x - lr v, with v = 0 at the start of every round.
        proximal: mu >= 0: adds mu (x - x_0) to the gradient (FedProx, Li et al. 2020).
    """

    lr: float
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = 32
    momentum: float = 0.0
    proximal: float = 0.0


class LocalResult(NamedTuple):
    """What a client returns.

    Attributes:
        update_d: float32 (d,), x_K - x_0, parameters in the order of ``model.parameters()``, each flattened in C order.
        loss: Mean of the minibatch losses over the steps, measured before each step.
        step_variance: lr^2 ((1/K) sum_k norm(g_k)^2 - norm((1/K) sum_k g_k)^2), >= 0; g_k without the proximal term.
        num_steps: K.
    """

    update_d: Params
    loss: float
    step_variance: float
    num_steps: int


def minibatches(num_examples: int, work: LocalWork, rng: np.random.Generator) -> list[IntArray]:
    """The rows of each local step: all passes are drawn from ``rng`` in order, so every trainer sees the same ones."""
    size = num_examples if work.batch_size is None else min(work.batch_size, num_examples)
    batches_a_pass = -(-num_examples // size)
    num_steps = work.steps if work.steps is not None else (work.epochs or 1) * batches_a_pass
    num_passes = -(-num_steps // batches_a_pass)
    batches: list[IntArray] = []
    for _ in range(num_passes):
        order = rng.permutation(num_examples)
        batches += [order[start : start + size] for start in range(0, num_examples, size)]
    return batches[:num_steps]
