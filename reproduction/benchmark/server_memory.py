"""What the server keeps between rounds with a method: models, and numbers a client beside them.

Counted from the state itself: a state has k d + r numbers for a model of d parameters, so two values of d give k, the
models (the global one, the optimizer's, the common control, one a client for own controls), and r, the rest.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from deltafl import make_plan
from deltafl.estimators.control_variates import NoControlState
from deltafl.round import init_round
from deltafl.samplers import parse_label
from deltafl.server.optimizers import make_server_optimizer
from deltafl.simulation.settings import RunSettings
from deltafl.tasks import find_task
from deltafl.types import Population

_FEW, _MORE = 5, 8  # any two numbers of parameters


class ServerMemory(NamedTuple):
    """What is kept.

    Attributes:
        models: Vectors of the model's length, the global model included.
        numbers: Other numbers, divided by the number of clients.
        megabytes: Both together, at 4 bytes a model's number and 8 bytes another.
    """

    models: int
    numbers: float
    megabytes: float


def server_memory(settings: RunSettings, num_clients: int, num_params: int) -> ServerMemory:
    """The memory of a run's method.

    Args:
        settings: Resolved settings of the run.
        num_clients: m.
        num_params: d of the task's model.
    """
    aux_mq = np.ones((num_clients, _num_classes(settings.task)))  # their number counts, not their values
    population = Population.from_sizes([1] * num_clients, known=aux_mq)
    few, more = (_numbers(settings, population, d) for d in (_FEW, _MORE))
    models = (more - few) // (_MORE - _FEW)
    rest = few - models * _FEW
    return ServerMemory(models, rest / num_clients, (4 * models * num_params + 8 * rest) / 1e6)


def model_size(task: str) -> int:
    """The number of parameters d of a task's model.

    Raises:
        MissingExtraError: If torch is not installed.
    """
    return sum(param.numel() for param in find_task(task).make_model().parameters())


def _num_classes(task: str) -> int:
    """As many as the last layer of the task's model has outputs."""
    *_, last = find_task(task).make_model().parameters()
    return len(last)


def _numbers(settings: RunSettings, population: Population, num_params: int) -> int:
    """Numbers in the state before the first round, which has its full size from the beginning."""
    label, m = parse_label(settings.sampler), population.num_clients
    optimizer = make_server_optimizer(settings.server_optimizer, settings.server_lr, settings.server_momentum)
    plan = make_plan(
        label,
        population,
        settings.sample or 1,
        settings.run_facts(m, 1.0),
        server_optimizer=optimizer,
        mime=settings.mime,
        norm_guard=settings.norm_guard,
    )
    return sum(_sizes(init_round(plan, np.zeros(num_params))))


def _sizes(state: Any) -> Iterator[int]:
    """The sizes of the arrays of nested NamedTuples and tuples; a control that remembers nothing has none."""
    if isinstance(state, NoControlState):
        return
    if isinstance(state, tuple):
        for part in state:
            yield from _sizes(part)
    else:
        yield prod(np.shape(state))
