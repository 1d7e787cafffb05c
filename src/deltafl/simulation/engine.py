"""The engine: local training and evaluation of one task, in one process or several.

Every result is a pure function of (global model, round, client): the same bits with any number of
workers, in any cohort, and after a resume. On GPUs, and in bfloat16, last bits also depend on the
cohort.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..federation.replies import reports_of
from ..model.arrays import Arrays, NamedArrays
from ..model.parts import freeze
from ..plan import NO_REST
from ..scale.rows import together
from ..tasks.base import Task
from ..tasks.checking.models import check_single
from ..tasks.dataset import Dataset
from ..tasks.metrics import Look, outputs, right
from ..types import FloatArray, IntArray, Params, Reports
from .judged import Evaluation, Judged
from .parallel.workers import Recipe, Workers
from .rest import RestOfModel
from .runner import ClientRunner, new_model
from .training import torch
from .training.route import Computation, Route, choose_route, form_of
from .training.serial import LocalResult, LocalWork

BYTES_PER_PARAMETER = 4  # float32
_NONE = np.zeros(0)


class Training(NamedTuple):
    """What a cohort returns, as ``close_round`` takes it: a row for each client's result."""

    update_nd: Params
    reports: Reports
    #: each client's buffers, counters and local arrays; empty for models without any
    rest_n: Sequence[Arrays] = ()

    def part(self, which_k: IntArray) -> "Training":
        """The rows of some of the clients."""
        rest_k = [self.rest_n[place] for place in which_k] if self.rest_n else ()
        return Training(self.update_nd[which_k], self.reports.part(which_k), rest_k)


class Engine:
    """Trains and evaluates one task.

    ``seed`` fixes initial model, minibatches, noise and random layers. Engines may share
    ``workers``, which are not closed here; ``kept`` is the route of the run so far; by ``weights``,
    see ``Task.population``, clients' local arrays are averaged.

    Where models have more than a flat vector, ``rest`` is ``RoundState.rest``; without it they have
    the arrays that they begin with.
    """

    def __init__(
        self,
        task: Task,
        work: LocalWork,
        seed: int,
        workers: Workers | None = None,
        how: Computation | None = None,
        kept: Route | None = None,
        weights: str = "data",
    ) -> None:
        self.task = task
        self.work = work
        self.workers = workers or Workers(1)
        if torch.get_default_dtype() is not torch.float32:
            raise DeltaflError(
                f"torch's default dtype is {torch.get_default_dtype()}, and clients train in "
                "float32: leave torch.set_default_dtype out"
            )
        model = new_model(task.make_model, seed)
        if any(1 in work.sizes(len(rows)) for rows in task.client_rows):
            check_single(task, model, seed)
        self.parts = task.parts_of(model)
        freeze(model, self.parts)  # the route goes by what has a gradient
        arrays = NamedArrays.of(model).arrays
        self.beside = RestOfModel(self.parts, arrays)
        self._weights = weights
        random_d = self.parts.flatten(arrays)
        self.num_params: int = len(random_d)
        self._initial_d: Params = random_d
        if task.initial_params is not None:
            self._initial_d = task.initial_params.astype(np.float32)
        if self._initial_d.shape != random_d.shape:
            raise DeltaflError(
                f"task {task.name!r}: initial_params has shape {self._initial_d.shape}, its model "
                f"needs {random_d.shape}"
            )
        self.route = kept or choose_route(model, task, work, how or Computation())
        self._form = form_of(model, task, work, self.route)
        data = task.dataset
        # Copied only where they are read-only or not contiguous.
        stored = tuple(
            torch.from_numpy(np.require(part, requirements=["C", "W"]))
            for part in (data.train_x, data.train_y, data.test_x, data.test_y)
        )
        # Without the examples, which processes share as tensors.
        # Metrics are computed here: a function of the user's need not be sent.
        nothing = Dataset("", _NONE, _NONE, _NONE, _NONE, 0)
        rest = replace(task, dataset=nothing, metric="loss")
        make = partial(ClientRunner, rest, work, seed, self.route, self._form)
        self._recipe = Recipe(make, stored)

    def initial_params(self) -> Params:
        """The global model before the first round: the task's own, or random by the seed."""
        return self._initial_d.copy()

    def train(
        self,
        params_d: Params,
        round: int,
        client_n: IntArray,
        drifts: Params | None = None,
        squares: bool = False,
        rest: Any = NO_REST,
    ) -> Training:
        """Train the given clients from the global model; round and client determine all randomness.

        ``drifts`` is (d,), the same for all clients, or (n, d), see ``Plan.drifts``; ``squares``:
        measure mean squared losses, too.
        """
        clients = client_n.tolist()
        cost_n = self.costs(client_n)
        # Groups no larger than that every process has one.
        share = -(-len(clients) // self.workers.width)
        size = max(1, min(self._form.group_size, share))
        # Clients of similar costs are trained at once.
        order = sorted(range(len(clients)), key=lambda place: -cost_n[place])
        groups = [sorted(order[first : first + size]) for first in range(0, len(order), size)]
        own_g: list[Params | None] = [None] * len(groups)
        if drifts is not None:
            # Nothing is copied: with ``mime`` alone all clients have the same one.
            drift_nd = np.broadcast_to(drifts, (len(clients), self.num_params))
            own_g = [drift_nd[group] for group in groups]

        def rests(group: list[int]) -> list[Arrays]:
            return [self.beside.of_client(rest, clients[place]) for place in group]

        jobs = [
            (round, [clients[place] for place in group], squares, own_nd, rests(group))
            for group, own_nd in zip(groups, own_g, strict=True)
        ]
        costs = [sum(cost_n[place] for place in group) for group in groups]
        trained = self.workers.map(self._recipe, "train", params_d, jobs, costs)
        in_order: list[LocalResult] = [*chain(*trained)]
        # The inverse of the order in which they were trained.
        results = [in_order[place] for place in np.argsort([*chain(*groups)])]
        return Training(
            # Large models are not copied. A cohort without clients has rows of d numbers, too.
            np.asarray(together([r.update_d for r in results]), np.float32).reshape(
                -1,
                self.num_params,
            ),
            reports_of(results),
            [r.rest for r in results] if results and results[0].rest else (),
        )

    def losses(
        self,
        params_d: Params,
        client_k: IntArray,
        rest: Any = NO_REST,
    ) -> FloatArray:
        """Mean loss of the global model on each client's own training data, float64 (k,)."""
        jobs = [(client, self.beside.of_client(rest, client)) for client in client_k.tolist()]
        found = self.workers.map(
            self._recipe,
            "loss",
            params_d,
            jobs,
            self.costs(client_k),
        )
        return np.array(found, np.float64)

    def evaluate(self, params_d: Params, rest: Any = NO_REST) -> Evaluation:
        """The metrics of the global model on the pooled test set."""
        return self.judge(params_d, rest).evaluation()

    def judge(self, params_d: Params, rest: Any = NO_REST) -> Judged:
        """Let the global model see the test examples.

        Where models have local arrays, an example is judged with those of its owner; one without
        an owner with their weighted mean over all clients.
        """
        num_examples = len(self.task.dataset.test_x)
        names = {metric.name for metric in self.task.metrics}
        look: Look | None = None
        if names - {"accuracy", "loss"}:
            look = outputs
        elif self.task.knows_accuracy:
            # A number an example, where outputs have one a class.
            look = partial(right, ignored=self.task.ignored)
        tests = self._tests(num_examples, rest)
        jobs = [([test], look) for test in tests]
        # Such a loss is taken once over all outputs, whatever arrays they were made with.
        if not self._form.passes.is_mean:
            jobs = [(tests, look)]
        found = self.workers.map(
            self._recipe,
            "test",
            params_d,
            jobs,
            # Batches of equal length, but for the last.
            [1.0] * len(jobs),
        )
        weight = self._form.passes.weight(self._recipe.tensors[-1])
        loss = float(np.array([loss for loss, _ in found]).sum()) / weight
        if look is None:
            return Judged(self.task, loss)
        place_e = np.concatenate([np.arange(num_examples)[places] for places, _ in tests])
        # Where clients have arrays of their own the examples come owner by owner.
        seen_e = np.concatenate([seen for _, seen in found])[np.argsort(place_e)]
        if look is not outputs:
            return Judged(self.task, loss, hit_e=seen_e)
        hit_e = None
        if self.task.knows_accuracy:
            hit_e = right(seen_e, self.task.dataset.test_y, self.task.ignored)
        return Judged(self.task, loss, hit_e, seen_e)

    def _tests(self, num_examples: int, rest: Any) -> list[tuple[slice | IntArray, Arrays]]:
        """The batches of test examples, and with which arrays beside the vector each is judged."""
        size = self._form.passes.size
        common = self.beside.of_everyone(rest, self._weight_m)
        owner_e = self.task.test_clients
        if owner_e is None or not self.beside.has_local:
            return [(slice(start, start + size), common) for start in range(0, num_examples, size)]
        tests: list[tuple[slice | IntArray, Arrays]] = []
        for owner in np.unique(owner_e).tolist():
            arrays = common
            if owner >= 0:
                arrays = self.beside.of_client(rest, owner)
            place_e = np.flatnonzero(owner_e == owner)
            starts = range(0, len(place_e), size)
            tests += [(place_e[start : start + size], arrays) for start in starts]
        return tests

    @cached_property
    def _weight_m(self) -> FloatArray:
        return self.task.population(self._weights).weight_m

    def costs(self, client_n: IntArray) -> list[float]:
        """Examples that each client's local work visits, by which work is balanced."""
        sizes = [len(self.task.client_rows[client]) for client in client_n.tolist()]
        if self.work.steps is None:
            return [float(size) for size in sizes]
        return [float(self.work.steps * self.work.minibatch_size(size)) for size in sizes]
