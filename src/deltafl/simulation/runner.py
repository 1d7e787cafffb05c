"""What a process that trains holds of a task, its jobs, and the processes that do them side by
side.

The jobs train clients and evaluate models. They are pure functions, so it does not matter which
process runs which.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..streams import stream
from ..tasks.base import Task
from ..types import BoolArray, Broadcast, Params
from .distributed import ALONE, ProcessGroup, divided
from .processes import Processes, result
from .training import torch
from .training.batched import BatchedTrainer, LocalJob
from .training.fast import FastTrainer, choose_forward, keep_freed_memory
from .training.route import Route, exact_products, form_of
from .training.serial import LocalResult, LocalWork, losses_of, train_serial


class ClientRunner:
    """Trains clients and evaluates models; ``model`` is the task's with any parameters, and is not
    kept.

    Attributes:
        group_size: Clients that one call of ``train`` trains best.
        evaluation_batch: Test examples that one call of ``test`` evaluates.
    """

    def __init__(
        self, task: Task, work: LocalWork, seed: int, model: torch.nn.Module, route: Route
    ) -> None:
        data = task.dataset
        # Copied only where they are read-only or not contiguous.
        self._stored = [
            torch.from_numpy(np.require(part, requirements=["C", "W"]))
            for part in (data.train_x, data.train_y, data.test_x, data.test_y)
        ]
        self._client_rows = task.client_rows
        self._noise_m = task.gradient_noise_m
        self._make_model = task.make_model
        self._loss = task.loss
        self._augment = task.augment
        # All clients report mean squared losses or none does: a sampler compares them.
        self._knows_squares = losses_of(task.loss, self._stored[1]) is not None
        self._counts_hits = task.metric == "accuracy"
        self._input_scale = task.input_scale
        self._tokens = task.tokens
        self._work = work
        self._seed = seed
        self._model: torch.nn.Module | None = None
        self._device = torch.device(route.device)
        self._precision = route.precision
        self._form = form_of(model, task, work, route)
        self.group_size = self._form.group_size
        self.evaluation_batch = self._form.evaluation_batch

    def share(self) -> None:
        """Move the examples into memory that worker processes see without a copy."""
        for tensor in self._stored:
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def train(
        self,
        sent: Broadcast,
        round: int,
        clients: Sequence[int],
        squares: bool,
        drift_nd: Params | None,
    ) -> list[LocalResult]:
        """The local training of some clients in one round; with ``drift_nd``, each has a drift
        of its own.
        """
        self._build()
        jobs = [self._job(round, client) for client in clients]
        squares = squares and self._knows_squares
        drift = sent.drift_d if drift_nd is None else drift_nd
        with exact_products(self._device):
            if self._batched is not None:
                return self._batched.train(jobs, sent.params_d, drift, squares)
            drifts = [drift] * len(jobs) if drift_nd is None else drift_nd
            results = []
            for client, job, drift_d in zip(clients, jobs, drifts, strict=True):
                x, y = self._examples(job.rows)
                how = job.rng, job.noise, drift_d, job.augment, squares
                with seeded(stream(self._seed, "dropout", round, client), self._device):
                    results.append(self._train_one(x, y, sent.params_d, self._work, *how))
            return results

    def _job(self, round: int, client: int) -> LocalJob:
        if self._work.fixed_order:
            batches = stream(self._seed, "batches", 0, client)
            noise_rng = stream(self._seed, "noise", round, client)
        else:
            batches = stream(self._seed, "batches", round, client)
            # Noise goes on where the minibatches ended: recorded runs have these bits.
            noise_rng = batches
        job = LocalJob(self._rows(client), batches)
        if self._noise_m is not None and self._noise_m[client] > 0:
            deviation = np.float32(self._noise_m[client])
            job = job._replace(
                noise=lambda size: deviation * noise_rng.standard_normal(size).astype(np.float32)
            )
        if self._augment is not None:
            augment = self._augment
            augment_rng = stream(self._seed, "augment", round, client)
            # Inputs are varied on the CPU.
            job = job._replace(augment=lambda x: augment(x.cpu(), augment_rng).to(self._device))
        return job

    def loss(self, sent: Broadcast, client: int) -> float:
        """Mean loss of the model on the client's data."""
        self._build()
        x, y = self._examples(self._rows(client))
        total = 0.0
        size = self.evaluation_batch
        for x_batch, y_batch in zip(torch.split(x, size), torch.split(y, size), strict=True):
            total += self._score(sent.params_d, x_batch, y_batch)[0]
        return total / len(x)

    def test(self, sent: Broadcast, start: int) -> tuple[float, BoolArray]:
        """Sum of the losses, and which predictions are right, of ``evaluation_batch`` test
        examples.
        """
        self._build()
        x, y = (part[start : start + self.evaluation_batch] for part in self._data[2:])
        return self._score(sent.params_d, self._inputs(x), y)

    def _score(self, params_d: Params, x: torch.Tensor, y: torch.Tensor) -> tuple[float, BoolArray]:
        model = self._build()
        torch.nn.utils.vector_to_parameters(
            torch.tensor(params_d, device=self._device), model.parameters()
        )
        with torch.no_grad(), exact_products(self._device):
            output = self._forward(x)
            loss = self._loss(output, y).item() * len(x)
            hits = torch.zeros(len(x), dtype=torch.bool)
            if self._counts_hits:
                hits = output.argmax(dim=1) == y
        return loss, hits.cpu().numpy()

    def _rows(self, client: int) -> npt.NDArray[np.int64]:
        return np.asarray(self._client_rows[client], dtype=np.int64)

    def _examples(
        self, rows: npt.NDArray[np.int64] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (
            part.index_select(0, torch.as_tensor(rows).to(self._device)) for part in self._data[:2]
        )
        return self._inputs(x), y

    def _inputs(self, stored: torch.Tensor) -> torch.Tensor:
        if self._tokens:
            return stored.long()
        if stored.dtype == torch.uint8:
            return stored.float().mul_(self._input_scale)
        return stored

    def _build(self) -> torch.nn.Module:
        """Make the model and its trainer, in the process that uses them."""
        if self._model is None:
            keep_freed_memory()
            device = self._device
            model = new_model(self._make_model, self._seed).to(device)
            self._data = [part.to(device) for part in self._stored]
            self._batched: BatchedTrainer | None = None
            self._train_one: Callable[..., LocalResult] = partial(train_serial, model, self._loss)
            if self._form.path == "fast":
                self._train_one = FastTrainer(model, self._loss, device).train
            elif self._form.path == "batched":
                trained = model, self._loss, self._work, self._form.width, self._examples, device
                self._batched = BatchedTrainer(*trained, self._precision)
            self._model = model.eval()
            self._forward = choose_forward(model, self._data[2])
        return self._model


def new_model(make: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """A model in training mode, with the random parameters of the seed."""
    with seeded(stream(seed, "model")):
        return make().train()


@contextmanager
def seeded(rng: np.random.Generator, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generator and the device's, and restore them afterwards.

    ``torch.manual_seed`` would take half of the time of a small model.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    seed = int(rng.integers(2**63))
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


Job = tuple[Any, ...]


class Workers(AbstractContextManager["Workers"]):
    """Processes for local training; ``Workers(1)`` is this process itself. Use it in a ``with``
    statement.

    Each process of ``group`` (``distributed.py``) does its share of the jobs, and all get all
    results.
    """

    def __init__(self, count: int, group: ProcessGroup = ALONE) -> None:
        self.count = count
        self._group = group
        self._pool: Processes | None = None
        self._runner: object = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind)
        self._pool = self._runner = None

    @property
    def width(self) -> int:
        """How many jobs run at the same time."""
        return self.count * self._group.count

    def map(
        self,
        runner: object,
        method: str,
        sent: Broadcast,
        jobs: Sequence[Job],
        costs: Sequence[float],
    ) -> list[Any]:
        """``[runner.method(sent, *job) for job in jobs]``, side by side, the jobs of the highest
        costs first.

        The runner goes to the processes when it is a new one; its torch tensors should be in shared
        memory then.
        """
        shares = divided(costs, self._group.count)
        mine = shares[self._group.rank]
        if self.count == 1:
            with one_thread():
                found = [getattr(runner, method)(sent, *jobs[place]) for place in mine]
        else:
            pool = self._loaded_pool(runner, sent)
            drifts = sent.drift_d is not None
            order = sorted(mine, key=lambda place: -costs[place])
            futures = {place: pool.submit(_do, method, drifts, jobs[place]) for place in order}
            found = [result(futures[place]) for place in mine]
        of_all = dict(chain(*self._group.gathered([*zip(mine, found, strict=True)])))
        return [of_all[place] for place in range(len(jobs))]

    def _loaded_pool(self, runner: object, sent: Broadcast) -> Processes:
        """Processes that have the runner, and what is sent in shared memory, which none reads
        between two maps.
        """
        if self._pool is None or runner is not self._runner:
            self.__exit__(None)
            self._shared_2d = torch.empty(
                2, len(sent.params_d), dtype=torch.float32
            ).share_memory_()  # type: ignore[no-untyped-call]
            self._pool = Processes(self.count, _load, runner, self._shared_2d)
            self._runner = runner
        for shared_d, vector_d in zip(self._shared_2d, sent, strict=True):
            if vector_d is not None:
                shared_d.copy_(torch.from_numpy(vector_d))
        return self._pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as the workers do: sums of several threads would differ in
    their last bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: In a worker process: its runner, and the vectors of what the server sends.
_loaded: list[Any] = []


def _load(runner: Any, shared_2d: torch.Tensor) -> None:
    torch.set_num_threads(1)
    _loaded[:] = runner, shared_2d


def _do(method: str, drifts: bool, job: Job) -> Any:
    runner, shared_2d = _loaded
    params_d, drift_d = shared_2d.numpy()
    return getattr(runner, method)(Broadcast(params_d, drift_d if drifts else None), *job)
