"""Stand-ins of the clients, trained on public examples, for the estimator ``twin``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..estimators.learned_coefficient import LearnedCoefficient
from ..estimators.table import Estimator
from ..estimators.twin import Simulate, Twin
from ..streams import stream
from ..tasks.base import Task
from ..types import FloatArray, IntArray, Params, Population
from .training.serial import LocalWork

#: Makes an ``Engine`` of a task, what its clients do, and a seed.
MakeEngine = Callable[[Task, LocalWork, int], Any]

#: A twin takes this share of the client's steps, each on so many examples. Larger minibatches are
#: better than more steps, for a twin's noise is not its client's (on digits and FashionMNIST).
TWIN_STEPS = 0.5
TWIN_BATCH = 64


def with_twins(
    rule: Estimator,
    task: Task,
    seed: int,
    work: LocalWork,
    make_engine: MakeEngine,
) -> Estimator:
    """The estimator ``twin`` with the simulation of a task's clients; others as they are."""
    control = rule.control
    if not (isinstance(control, LearnedCoefficient) and isinstance(control.control, Twin)):
        return rule
    if not task.public_rows:
        raise DeltaflError(
            "twins are trained on public examples and this run has none; set 'public', such as 10"
        )
    twin = replace(control.control, simulate=twin_simulation(task, work, seed, make_engine))
    return rule._replace(control=replace(control, control=twin))


def twin_simulation(
    task: Task,
    work: LocalWork,
    seed: int,
    make_engine: MakeEngine,
) -> Simulate:
    """Trains a stand-in for each client of a task on public examples in the shares of the client's
    labels.

    They are the clients of a second task, trained by an engine of their own in one process, with
    the task's local work but for ``TWIN_STEPS`` and ``TWIN_BATCH``, augmentation and gradient
    noise.
    """

    @cache
    def engine() -> Any:
        rows = [
            stand_in_rows(
                share_c,
                TWIN_BATCH * max(1, round(TWIN_STEPS * work.num_steps(len(own)))),
                task.public_rows,
            )
            for share_c, own in zip(task.shares, task.client_rows, strict=True)
        ]
        stand_ins = replace(task, client_rows=rows, augment=None, gradient_noise_m=None)
        own_work = replace(work, epochs=1, steps=None, batch_size=TWIN_BATCH)
        # So minibatches are independent of the clients' own.
        own_seed = int(stream(seed, "public", 1).integers(2**31))
        return make_engine(stand_ins, own_work, own_seed)

    def simulate(params_d: Params, population: Population, round: int) -> Params:
        everyone = np.arange(population.num_clients)
        updates: Params = engine().train(params_d, round, everyone).update_nd
        return updates

    return simulate


def stand_in_rows(
    share_c: FloatArray,
    size: int,
    public_rows: Sequence[IntArray],
) -> IntArray:
    """``size`` public rows in the shares of the classes, up to one example of each; rows repeat
    if need be.
    """
    # At the middles of equal steps and without a draw: the same shares give the same rows.
    label_e = np.searchsorted(
        np.cumsum(share_c) / share_c.sum(),
        (np.arange(size) + 0.5) / size,
    )
    count_c = np.bincount(label_e, minlength=len(share_c))
    return np.concatenate(
        [np.resize(rows, count) for rows, count in zip(public_rows, count_c, strict=True)]
    )
