"""What a process that trains holds of a task, and its jobs: to train clients, to evaluate models.

The jobs are pure functions, so it does not matter which process does which.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import counted
from ..model.arrays import Arrays, as_array, copied, listed
from ..streams import stream
from ..tasks.base import Task, model_inputs
from ..tasks.draws import places, seeded
from ..tasks.metrics import Look
from ..types import Array, IntArray, Params, Rng
from .training import Tensor, torch
from .training.batched import BatchedTrainer
from .training.devices import product_precision
from .training.dropout import with_masks
from .training.failures import located, own_code
from .training.fast import FastTrainer, choose_forward, keep_freed_memory
from .training.route import Form, Route
from .training.serial import LocalJob, LocalResult, LocalWork, losses_of, train_serial
from .training.tensors import ModelTensors, remembers


class ClientRunner:
    """Trains clients and evaluates models.

    Args:
        task: The examples of its data set are not looked at.
        work: What every client does.
        seed: Of the run.
        route: Device and precision.
        form: How the task is trained.
        stored: Its examples: inputs and labels, those of the test set last.
    """

    def __init__(
        self,
        task: Task,
        work: LocalWork,
        seed: int,
        route: Route,
        form: Form,
        *stored: Tensor,
    ) -> None:
        keep_freed_memory()  # in the process that trains, which may be another one
        self._device = device = torch.device(route.device)
        # What a loss holds, such as weights of classes, goes where the outputs are.
        if device.type != "cpu" and isinstance(task.loss, torch.nn.Module):
            task = replace(task, loss=copied(task.loss).to(device))
        self._task = task
        self._work = work
        self._seed = seed
        self._form = form
        # All clients report mean squared losses or none does: a sampler compares them.
        self._losses = losses_of(task.loss, stored[1])
        self._precision = route.precision
        self._data = [part.to(device) for part in stored]
        model = new_model(task.make_model, seed).to(device)
        self._batched: BatchedTrainer | None = None
        parts = task.parts_of(model)
        self._tensors = ModelTensors(model, parts)
        train_one: Callable[..., LocalResult] = partial(train_serial, model, task.loss, parts=parts)
        # A teacher beside its student is frozen, and yet it moves.
        if form.path == "serial" and parts.names("frozen"):
            some = model_inputs(self._task, self._data[0][:2])
            with seeded(stream(seed, "dropout"), device):
                share = not remembers(model, some, training=True)
            train_one = partial(train_one, share=share)
        self._train_one = train_one
        if form.path == "fast":
            self._train_one = FastTrainer(model, task.loss, device).train
        elif form.path == "batched":
            self._batched = BatchedTrainer(
                # A copy that stays in training mode: the model itself evaluates.
                with_masks(copied(model), model_inputs(self._task, self._data[0][:1])),
                task.loss,
                form.width,
                self._examples,
                device,
                route.precision,
                graphs=route.steps == "graph",
            )
        self._seeds_augment = False
        if self._batched is not None and task.augment is not None:
            some, _ = self._examples(self._rows(0)[:2])
            rng = np.random.default_rng(0)
            with seeded(rng):
                before = places()
                for _ in range(8):  # it may draw in some calls alone
                    self._varied(some, rng)
                self._seeds_augment = places() != before
        self._model = model.eval()
        # All else has been tried: it draws nothing.
        self._may_draw = (
            form.path == "serial" or task.augment is not None or losses_of(task.loss) is None
        )
        # For evaluations; trainers choose their own. Two, for some models do not take one alone.
        examples = model_inputs(self._task, self._data[2][:2])
        self._forward: Callable[[Tensor], Tensor] = self._forgetful
        with product_precision(device), seeded(stream(seed, "dropout"), device):
            # Of forms other than serial this is known for training alone.
            forgets = not remembers(model, examples, training=False)
        if forgets:
            self._forward = choose_forward(model, self._data[2])

    def train(
        self,
        params_d: Params,
        round: int,
        clients: Sequence[int],
        squares: bool,
        drift_nd: Params | None,
        rests: Sequence[Arrays],
    ) -> list[LocalResult]:
        """The local training of some clients in one round; ``rests`` are their arrays beside the
        vector.
        """
        jobs = [self._job(round, client) for client in clients]
        work = self._work.at(round)
        losses = None
        if squares:
            losses = self._losses
        when = f"local training failed in round {round + 1}"
        with product_precision(self._device, self._precision):
            if self._batched is not None:
                squares = losses is not None
                with located(f"{when}, with clients {listed(map(str, clients))} at once"):
                    return self._batched.train(jobs, params_d, work, drift_nd, squares)
            results = []
            for place, job in enumerate(jobs):
                drift_d = None
                if drift_nd is not None:
                    drift_d = drift_nd[place]
                x, y = self._examples(job.rows)
                how = job.rng, job.noise, drift_d, job.augment, losses
                train_one = self._train_one
                if rests[place]:  # of models that only the serial path trains
                    train_one = partial(train_one, rest=rests[place])
                # What draws does so whatever client was trained before.
                rng = stream(self._seed, "dropout", round, clients[place])
                with (
                    located(f"{when}, with client {clients[place]}"),
                    seeded(rng, self._device, self._may_draw),
                ):
                    results.append(train_one(x, y, params_d, work, *how))
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
        if self._batched is not None and self._batched.draws:
            rng = stream(self._seed, "dropout", round, client)
            job = job._replace(dropout=int(rng.integers(2**63)))
        noise_m = self._task.gradient_noise_m
        if noise_m is not None and noise_m[client] > 0:
            deviation = np.float32(noise_m[client])
            job = job._replace(
                noise=lambda size: deviation * noise_rng.standard_normal(size).astype(np.float32)
            )
        if self._task.augment is not None:
            rng = stream(self._seed, "augment", round, client)
            job = job._replace(augment=lambda x: self._varied(x, rng))
        return job

    def _varied(self, x: Tensor, rng: Rng) -> Tensor:
        augment: Any = self._task.augment
        # Clients take turns in a cohort, which is not seeded for one of them.
        with seeded(rng) if self._seeds_augment else nullcontext():
            varied: Tensor = augment(x.cpu(), rng)  # on the CPU
        return varied.to(self._device)

    def loss(self, params_d: Params, client: int, rest: Arrays) -> float:
        """Mean loss of the model on the client's data."""
        x, y = self._examples(self._rows(client))
        size = self._form.passes.size
        parts = [(part, rest) for part in torch.split(x, size)]
        with located(f"the loss of the model on the data of client {client} failed"):
            if not self._form.passes.is_mean:
                return self._score(params_d, parts, y)[0] / self._form.passes.weight(y)
            total = 0.0
            for part, y_batch in zip(parts, torch.split(y, size), strict=True):
                total += self._score(params_d, [part], y_batch)[0]
        return total / self._form.passes.weight(y)

    def test(
        self,
        params_d: Params,
        tests: Sequence[tuple[slice | IntArray, Arrays]],
        look: Look | None,
    ) -> tuple[float, Array | None]:
        """Sum of the losses of a batch of test examples, by ``Passes.weight``, and what ``look``
        makes of its outputs and targets. The batch comes in parts, each with the arrays beside the
        vector.
        """
        batch = []
        targets = []
        for rows, arrays in tests:
            # Copies: a model may change in place what it gets.
            x, y = (part[rows].clone() for part in self._data[2:])
            batch.append((model_inputs(self._task, x), arrays))
            targets.append(y)
        y = together(targets)
        with located(f"the evaluation of the model failed on {counted(len(y), 'test example')}"):
            loss, output = self._score(params_d, batch, y)
        if look is None:
            return loss, None
        return loss, look(as_array(output), y.cpu().numpy())

    def _score(
        self,
        params_d: Params,
        batch: Sequence[tuple[Tensor, Arrays]],
        y: Tensor,
    ) -> tuple[float, Tensor]:
        """The loss times ``Passes.weight``, and the outputs."""
        # A copy, of which the model's parameters become views.
        self._tensors.load(torch.tensor(params_d, device=self._device))
        rng = stream(self._seed, "dropout")
        with (
            torch.no_grad(),
            product_precision(self._device),
            seeded(rng, self._device, self._may_draw),
        ):
            found = []
            for x, arrays in batch:
                self._tensors.load_rest(arrays)
                with own_code():
                    found.append(self._forward(x))
            output = together(found)
            # A mean over the batch; batches may differ in length, so that sums are added.
            weight = self._form.passes.weight(y)
            with own_code():
                # Copies: it may write into them, and metrics would be of what it leaves.
                loss = self._task.loss(output.clone(), y.clone()).item() * weight
        # Of padding alone it is NaN, which would stay in the sum.
        if weight == 0:
            loss = 0.0
        return loss, output

    def _forgetful(self, x: Tensor) -> Tensor:
        """The outputs of a copy: the next evaluation finds the model as it was."""
        return torch.as_tensor(copied(self._model)(x))

    def _rows(self, client: int) -> IntArray:
        # A copy: torch warns of an array that nobody may write to, as pandas has them.
        return np.array(self._task.client_rows[client], np.int64)

    def _examples(self, rows: IntArray | Tensor) -> tuple[Tensor, Tensor]:
        places = torch.as_tensor(rows).to(self._device)
        x, y = (part.index_select(0, places) for part in self._data[:2])
        return model_inputs(self._task, x), y


def together(parts: Sequence[Tensor]) -> Tensor:
    """Rows as one tensor; a single part stays as it is, in its own memory."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([*parts])


def new_model(make: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """A model in training mode, with the random parameters of the seed."""
    with seeded(stream(seed, "model")):
        # A function may give the same module every time, and training must leave that as it was.
        return copied(make()).train()  # type: ignore[no-any-return]
