"""Local training of a cohort at once: each step is one vectorized pass of all its clients' models.

A step of one small model is too little work: on a CPU torch's calls cost more than their arithmetic, on a GPU kernels
take longer to start than to run. Here parameters are (n, D) and minibatches (n, B, ...). The steps are those of
``serial.train_serial``, equal within float32 rounding.

- Clients with many steps come first; those that have finished leave the active prefix.
- On a CPU, dense models have the same bits in any cohort: minibatches are padded with examples of weight 0 to one width
  for all clients of the task (``vectorized.padded_width``), and parameters start at multiples of 64 bytes, so that
  vector instructions divide every client's numbers alike. Torch must run with one thread.
- Elsewhere last bits depend on the cohort, because libraries choose algorithms by shape; a cohort repeats its bits.
  On a GPU examples, parameters and sums stay on the device, and results are fetched once a round.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from ...types import IntArray, Params
from .fast import CPU, take_step
from .serial import (
    Augmented,
    LocalResult,
    LocalWork,
    is_cross_entropy,
    losses_of,
    minibatches,
    result_of,
    squared_norm,
)
from .vectorized import ALIGNMENT, DenseChain, vectorized_forward

if TYPE_CHECKING:
    from ...tasks.base import Loss

#: The examples of the given rows: inputs and targets.
Fetch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LocalJob(NamedTuple):
    """The local training of one client in a round.

    Attributes:
        rows: int64 (n_i,), its examples among those of the task.
        rng: Draws the minibatches of all steps, then d normal numbers for each step if there is noise.
        noise: Standard deviation of the noise added to each entry of each minibatch gradient, >= 0.
        augment: Varies the inputs of each minibatch, in the order of the steps; None for none.
    """

    rows: IntArray
    rng: np.random.Generator
    noise: float = 0.0
    augment: Augmented | None = None


class Schedule(NamedTuple):
    """The minibatches of a cohort. Clients with many steps come first, so that the active ones are a prefix.

    Attributes:
        jobs: The clients in this order.
        order: Their places in the given order.
        steps_n: int64 (n,), local steps K_i, not increasing.
        rows_knb: int64 (K, n, B), rows of the task's examples; padding repeats a client's first row.
        weight_knb: float32 (K, n, B), weights in a step's mean: 1 / size of the minibatch, 0 for padding.
    """

    jobs: list[LocalJob]
    order: list[int]
    steps_n: npt.NDArray[np.int64]
    rows_knb: torch.Tensor
    weight_knb: torch.Tensor

    def active(self, step: int) -> int:
        """How many clients take this step."""
        return len(self.jobs) if step < self.steps_n[-1] else int(np.searchsorted(-self.steps_n, -step))


def schedule_of(jobs: Sequence[LocalJob], work: LocalWork, width: int) -> Schedule:
    """Draw the minibatches of at least one client, and pad each to ``width`` examples."""
    drawn = [minibatches(len(job.rows), work, job.rng) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: -len(drawn[i]))
    jobs, drawn = [jobs[i] for i in order], [drawn[i] for i in order]
    shape = (len(drawn[0]), len(jobs), width)
    rows_knb = np.full(shape, jobs[0].rows[0], dtype=np.int64)
    weight_knb = np.zeros(shape, dtype=np.float32)
    for i, (job, own) in enumerate(zip(jobs, drawn, strict=True)):
        rows_knb[:, i] = job.rows[0]
        size_k = np.array([len(batch) for batch in own])
        used_kb = np.arange(width) < size_k[:, None]
        rows_knb[: len(own), i][used_kb] = job.rows[np.concatenate(own)]
        weight_knb[: len(own), i][used_kb] = np.repeat((1 / size_k).astype(np.float32), size_k)
    steps_n = np.array([len(own) for own in drawn])
    return Schedule(list(jobs), order, steps_n, torch.from_numpy(rows_knb), torch.from_numpy(weight_knb))


class BatchedTrainer:
    """Trains cohorts on one device.

    Args:
        model: A module for which ``vectorized.vectorized_incompatibility`` is None.
        loss: The task's loss.
        work: Steps, learning rate, momentum and proximal term.
        width: Examples that minibatches are padded to, at least the largest minibatch of any client.
        fetch: Gives the examples of rows, both on the device.
        device: Where to train.
        precision: ``"float32"``, or ``"bfloat16"`` for forward and backward passes; parameters, losses and sums stay
            float32.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: "Loss",
        work: LocalWork,
        width: int,
        fetch: Fetch,
        device: torch.device = CPU,
        precision: str = "float32",
    ) -> None:
        losses = losses_of(loss)
        assert losses is not None  # vectorized_incompatibility has checked
        self._forward, self._losses = vectorized_forward(model), losses
        self._work, self._width, self._fetch, self._device = work, width, fetch, device
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._chain: DenseChain | None = None
        if isinstance(self._forward, DenseChain) and is_cross_entropy(loss) and device.type == "cpu":
            self._chain = self._forward if precision == "float32" else None
        self._shapes = [param.shape for param in model.parameters()]

    def train(
        self, jobs: Sequence[LocalJob], params_d: Params, drift_d: Params | None = None, squares: bool = False
    ) -> list[LocalResult]:
        """Train at least one client, each from the global model.

        Args:
            jobs: The clients.
            params_d: float32 (d,), the global model.
            drift_d: As in ``serial.train_serial``.
            squares: As in ``serial.train_serial``.

        Returns:
            The results of ``serial.train_serial``, in the order of the jobs.
        """
        schedule = schedule_of(jobs, self._work, self._width)
        rows_knb, weight_knb = schedule.rows_knb.to(self._device), schedule.weight_knb.to(self._device)
        state = _State(len(jobs), self._shapes, params_d, self._work, squares, self._device)
        drift_nd = None
        if drift_d is not None:
            drift_nd = state.padded(torch.tensor(drift_d) / torch.from_numpy(schedule.steps_n)[:, None])
        noisy = any(job.noise > 0 for job in jobs)
        for step in range(len(rows_knb)):
            active = schedule.active(step)
            x, y = self._examples(schedule.jobs[:active], rows_knb[step, :active], weight_knb[step, :active])
            weighted_nb = self._differentiate(state, active, x, y, weight_knb[step, :active])
            state.add_losses(weighted_nb.detach().double(), weight_knb[step, :active])
            if noisy:
                noise_nd = _noise(schedule.jobs[:active], len(params_d))
                state.gradient_nd[:active, : len(params_d)].add_(noise_nd.to(self._device))
            state.step(active, self._work, drift_nd)
        return state.results(schedule, self._work.rate)

    def _examples(
        self, jobs: Sequence[LocalJob], rows_nb: torch.Tensor, weight_nb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded minibatches (n, B, ...)."""
        x, y = self._fetch(rows_nb.reshape(-1))
        x, y = x.view(*rows_nb.shape, *x.shape[1:]), y.view(*rows_nb.shape, *y.shape[1:])
        for i, job in enumerate(jobs):
            if job.augment is not None:
                size = int((weight_nb[i] > 0).sum())
                x[i, :size] = job.augment(x[i, :size])
        return x, y

    def _differentiate(
        self, state: "_State", active: int, x: torch.Tensor, y: torch.Tensor, weight_nb: torch.Tensor
    ) -> torch.Tensor:
        """Write the gradients of the first clients' minibatch losses; returns weight_b loss_b, (n, B)."""
        params, gradients = state.parts(active)
        if self._chain is not None:
            return self._chain.differentiate(params, x, y, weight_nb, gradients)
        # The parameters are cast here, not by autocast, which does not reach into torch.vmap.
        params = [part.detach().to(self._dtype).requires_grad_() for part in params]
        output = self._forward(params, x.to(self._dtype) if x.is_floating_point() else x)
        weighted_nb = self._losses(output.float(), y) * weight_nb
        found = torch.autograd.grad(weighted_nb.sum(), params, materialize_grads=True)
        for own, gradient in zip(gradients, found, strict=True):
            own.copy_(gradient)
        return weighted_nb


class _State:
    """The models of a cohort and the sums of their statistics.

    Rows are padded to a multiple of 64 bytes, so that all are aligned alike; the padding stays 0.
    """

    def __init__(
        self,
        n: int,
        shapes: Sequence[torch.Size],
        params_d: Params,
        work: LocalWork,
        squares: bool,
        device: torch.device,
    ) -> None:
        self._shapes, self._squares, self._device = shapes, squares, device
        self._num_params, self._width = len(params_d), -(-len(params_d) // ALIGNMENT) * ALIGNMENT
        self._start_nd = self.padded(torch.tensor(params_d)).expand(n, self._width)
        self._current_nd = self._start_nd.clone(memory_format=torch.contiguous_format)
        self.gradient_nd, self._gradient_sum_nd = torch.zeros_like(self._current_nd), torch.zeros_like(self._current_nd)
        self._velocity_nd = torch.zeros(n, self._width if work.momentum > 0 else 0, device=device)
        self._sum_3n = torch.zeros(3, n, dtype=torch.float64, device=device)
        self._parts: tuple[int, list[torch.Tensor], list[torch.Tensor]] = (0, [], [])

    def padded(self, vector_nd: torch.Tensor) -> torch.Tensor:
        """A copy on the device, padded with zeros."""
        return functional.pad(vector_nd.float(), (0, self._width - self._num_params)).to(self._device)

    def parts(self, active: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the first clients' parameters and gradients in the shapes of the model."""
        if self._parts[0] != active:
            self._parts = active, self._views(self._current_nd[:active]), self._views(self.gradient_nd[:active])
        return self._parts[1:]

    def _views(self, vector_nd: torch.Tensor) -> list[torch.Tensor]:
        sizes = [shape.numel() for shape in self._shapes]
        pieces = torch.split(vector_nd[:, : self._num_params], sizes, dim=1)
        return [piece.view(-1, *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def add_losses(self, weighted_nb: torch.Tensor, weight_nb: torch.Tensor) -> None:
        """Add up the first clients' minibatch losses from weight_b loss_b, float64."""
        active = len(weighted_nb)
        self._sum_3n[0, :active].add_(_row_sums(weighted_nb))
        if self._squares:  # w l^2 = (w l)^2 / w, and all examples of a minibatch have the weight of its first
            self._sum_3n[1, :active].add_(_row_sums(weighted_nb.square()) / weight_nb[:, 0].double())

    def step(self, active: int, work: LocalWork, drift_nd: torch.Tensor | None) -> None:
        """Move the first clients along their gradients; reuses the memory of these."""
        gradient_nd = self.gradient_nd[:active]
        self._sum_3n[2, :active].add_(squared_norm(gradient_nd, dim=1))
        self._gradient_sum_nd[:active].add_(gradient_nd)
        moved = (self._current_nd[:active], gradient_nd, self._start_nd[:active], self._velocity_nd[:active])
        take_step(*moved, work, None if drift_nd is None else drift_nd[:active])

    def results(self, schedule: Schedule, rate: float) -> list[LocalResult]:
        """The results of all clients in the order in which they were given."""
        update_nd = (self._current_nd - self._start_nd)[:, : self._num_params].cpu()
        sum_n3, norm_n = self._sum_3n.T.tolist(), squared_norm(self._gradient_sum_nd, dim=1).tolist()
        results = []
        for place in np.argsort(schedule.order):
            loss_sum, square_loss_sum, square_sum = sum_n3[place]
            square_loss, steps = square_loss_sum if self._squares else None, int(schedule.steps_n[place])
            results.append(result_of(update_nd[place], loss_sum, square_loss, square_sum, norm_n[place], steps, rate))
        return results


def _noise(jobs: Sequence[LocalJob], num_params: int) -> torch.Tensor:
    """Draw the gradient noise of one step."""
    noise_nd = np.zeros((len(jobs), num_params), dtype=np.float32)
    for noise_d, job in zip(noise_nd, jobs, strict=True):
        if job.noise > 0:
            np.multiply(job.rng.standard_normal(num_params).astype(np.float32), np.float32(job.noise), out=noise_d)
    return torch.from_numpy(noise_nd)


def _row_sums(wide_nb: torch.Tensor) -> torch.Tensor:
    """Sums over examples; on a CPU by NumPy, whose order of addition recorded runs have."""
    return torch.from_numpy(wide_nb.numpy().sum(axis=1)) if wide_nb.device.type == "cpu" else wide_nb.sum(dim=1)
