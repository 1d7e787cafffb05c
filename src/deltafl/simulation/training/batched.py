"""Local training of a cohort at once: each step is one vectorized pass of all its clients' models.

One small model is too little work for torch's calls. Here parameters are (n, D), minibatches (n, B,
...).

- On a CPU, dense models have the same bits in any cohort: minibatches are padded with examples of
  weight 0 to one width for all clients of the task (``sizes.padded_width``), and parameters start
  at multiples of 64 bytes, so that vector instructions divide every client's numbers alike. Torch
  must run with one thread.
- Elsewhere last bits depend on the cohort, because libraries choose algorithms by shape; a cohort
  repeats its bits. On a GPU examples, parameters and sums stay on the device, results are fetched
  once a round, and steps are replayed as graphs (``graphs.py``).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...tasks.losses import Loss
from ...types import Params
from .dense import ALIGNMENT, DenseChain, Stretch
from .dropout import Masks, masked_layers
from .failures import own_code
from .fast import CPU, Descent
from .graphs import CapturedStep, CudaCapture
from .schedule import Schedule, schedule_of
from .serial import (
    LocalJob,
    LocalResult,
    LocalWork,
    is_cross_entropy,
    losses_of,
    result_of,
    squared_norm,
)
from .tensors import trained_parameters
from .vectorized import vectorized_forward

#: The examples of the given rows: inputs and targets.
Fetch = Callable[[Tensor], tuple[Tensor, Tensor]]

#: Takes the steps of a stretch and returns what ``BatchedTrainer._take`` does.
Take = Callable[[Stretch], Tensor]

#: Numbers of the inputs that are gathered at once: 8 MiB.
_STRETCH_NUMBERS = 2**21
#: Of each precision: the type of parameters in a pass, and whether a GPU's convolutions are
#: products.
PASSES = {
    "float32": (torch.float32, True),
    "tf32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}


class _Captured(NamedTuple):
    """What graphs work in, as long as cohorts need no other."""

    fits: tuple[bool, bool, LocalWork]  # drift, squares, and the work without its rate
    cohort: Descent
    rate: Tensor
    step: CapturedStep


class BatchedTrainer:
    """Trains cohorts of models for which ``vectorized_incompatibility`` is None.

    With ``precision = "bfloat16"``, forward and backward passes are in it; parameters, losses and
    sums stay float32. With ``graphs``, steps are captured, which noise on gradients rules out.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        width: int,
        fetch: Fetch,
        device: torch.device = CPU,
        precision: str = "float32",
        graphs: bool = False,
    ) -> None:
        losses = losses_of(loss)
        assert losses is not None  # vectorized_incompatibility has checked
        self._dtype, products = PASSES[precision]
        on_cpu = device.type == "cpu"
        self._forward = vectorized_forward(
            model,
            products=products and not on_cpu,
            dtype=self._dtype,
        )
        self._layers = masked_layers(model)
        self._losses = losses
        self._width = width
        self._fetch = fetch
        self._device = device
        self._graphs = graphs
        self._captured: _Captured | None = None
        self._chain: DenseChain | None = None
        # The chain's own gradients are written out for this loss alone.
        plain = self._dtype is torch.float32 and on_cpu and is_cross_entropy(loss)
        if plain and isinstance(self._forward, DenseChain):
            self._chain = self._forward
        self._shapes = [param.shape for param in trained_parameters(model).values()]
        self._num_params = sum(shape.numel() for shape in self._shapes)

    @property
    def draws(self) -> bool:
        """Whether clients need a seed for their dropout layers."""
        return len(self._layers) > 0

    @property
    def captured(self) -> bool:
        """Whether steps are replayed so far."""
        return self._captured is not None and self._captured.step.captured

    def train(
        self,
        jobs: Sequence[LocalJob],
        params_d: Params,
        work: LocalWork,
        drifts: Params | None = None,
        squares: bool = False,
    ) -> list[LocalResult]:
        """``serial.train_serial`` for each of at least one client; ``drifts`` are (n, d)."""
        with torch.inference_mode(self._chain is not None):  # no bookkeeping for autograd
            schedule = schedule_of(jobs, work, self._width)
            num_steps, n, _ = schedule.rows_knb.shape
            start_nd = self._padded(torch.tensor(params_d)).expand(n, -1)
            step_nd = None
            if drifts is not None:
                steps_n = torch.from_numpy(schedule.steps_n)
                step_nd = self._padded(torch.tensor(drifts[schedule.order]) / steps_n[:, None])
            begin = self._begin_captured if self._graphs else self._begin
            cohort, take = begin(start_nd, step_nd, schedule, work, squares)
            # Each step's losses, squared losses and squared gradient norms; 0 once a client's have
            # ended.
            # float64, and fetched once: on a GPU each fetch would wait for the device.
            value_3kn = torch.zeros(3, num_steps, n, dtype=torch.float64, device=self._device)
            for first, some in self._stretches(schedule):
                num_taken, active, _ = some.weight_knb.shape
                value_3kn[:, first : first + num_taken, :active] = take(some)
            # Added one after the other, however many steps were taken at once.
            sums_3n = np.add.accumulate(value_3kn.cpu().numpy(), axis=1)[:, -1]
            norm_n = squared_norm(cohort.gradient_sum).tolist()
            sums = [*zip(*sums_3n.tolist(), norm_n, strict=True)]
            places = np.argsort(schedule.order)
            # In the order of the jobs, so that the rows are those of one array.
            update_nd = fetched((cohort.current - start_nd)[:, : self._num_params][places])
            return [
                result_of(update_d, sums[place], int(schedule.steps_n[place]), work.rate)
                for update_d, place in zip(update_nd, places.tolist(), strict=True)
            ]

    def _begin(
        self,
        start_nd: Tensor,
        step_nd: Tensor | None,
        schedule: Schedule,
        work: LocalWork,
        squares: bool,
    ) -> tuple[Descent, Take]:
        """The models before their first step, and what takes the steps of a stretch."""
        cohort = Descent.of(start_nd, step_nd)
        rate = None
        if self._device.type != "cpu":
            rate = self._rate_of(work)  # as graphs have it, so that bits are the same
        return cohort, partial(self._take, cohort, rate, schedule.jobs, work, squares)

    def _begin_captured(
        self,
        start_nd: Tensor,
        step_nd: Tensor | None,
        schedule: Schedule,
        work: LocalWork,
        squares: bool,
    ) -> tuple[Descent, Take]:
        """``_begin`` in memory that stays, for steps that are captured."""
        n = len(start_nd)
        fits = step_nd is not None, squares, replace(work, lr=1.0)
        known = self._captured
        if known is None or known.fits != fits or len(known.cohort.current) < n:
            self._captured = None  # first, as both might not fit into memory
            cohort = Descent.of(start_nd[:1].clone().expand(n, -1), step_nd)
            rate = self._rate_of(work)

            def step(*some: Tensor) -> Tensor:
                x, y, weight_knb, *masks = (part[None] for part in some)
                stretch = Stretch(x, y, weight_knb, tuple(masks))
                return self._take(cohort, rate, (), work, squares, stretch)

            x, y = self._fetch(schedule.rows_knb[0].reshape(-1))
            weight_nb = schedule.weight_knb[0].to(self._device)
            masks = self._masks(schedule.jobs).draw(n)
            inputs = (x.view(n, -1, *x.shape[1:]), y.view(n, -1, *y.shape[1:]), weight_nb, *masks)
            captured = CapturedStep(step, inputs, CudaCapture(self._device))
            known = _Captured(fits, cohort, rate, captured)
            self._captured = known
        # A row: all models start from the same memory.
        known.cohort.start[0].copy_(start_nd[0])
        known.rate.fill_(work.rate)
        cohort = known.cohort.first(n)
        cohort.restart(start_nd, step_nd)
        replayed = known.step
        # Stretches are of one step, but for chains on a CPU.
        return cohort, lambda some: replayed(*(part[0] for part in (*some[:3], *some.masks)))

    def _take(
        self,
        cohort: Descent,
        rate: Tensor | None,
        jobs: Sequence[LocalJob],
        work: LocalWork,
        squares: bool,
        some: Stretch,
    ) -> Tensor:
        """Take the steps of a stretch: each one's losses, squared losses and squared gradient
        norms, float64 (3, k, a) for the first a models.
        """
        own = cohort.first(some.x.shape[1])
        differentiate = self._differentiation(own, some)
        losses = []
        norms = []
        for step in range(len(some.x)):
            losses.append(differentiate(step))
            self._add_noise(own.gradient, jobs)
            norms.append(own.step(work, rate))
        # The losses of a dense chain are (n, 1, B), those of other models (n, B).
        loss_kab = torch.stack(losses).view(some.weight_knb.shape)
        weighted_kab = (loss_kab * some.weight_knb).double()
        loss_ka = _sums(weighted_kab)
        square_ka = torch.full_like(loss_ka, math.nan)
        if squares:
            # w l^2 = (w l)^2 / w, and all of a minibatch have the weight of its first.
            weight_ka = some.weight_knb[:, :, 0].double()
            square_ka = _sums(weighted_kab.square_()) / weight_ka
        return torch.stack([loss_ka, square_ka, torch.stack(norms)])

    def _rate_of(self, work: LocalWork) -> Tensor:
        return torch.tensor(work.rate, dtype=torch.float32, device=self._device)

    def _masks(self, jobs: Sequence[LocalJob]) -> Masks:
        """What draws for the dropout layers of some clients, from their first step on."""
        seeds = [job.dropout for job in jobs]
        return Masks(self._layers, seeds, self._width, self._device)

    def _padded(self, vector_nd: Tensor) -> Tensor:
        """A copy on the device, with zeros up to a multiple of 64 bytes."""
        padding = -self._num_params % ALIGNMENT
        return functional.pad(vector_nd.float(), (0, padding)).to(self._device)

    def _views(self, vector_nd: Tensor) -> list[Tensor]:
        """Its parts in the shapes of the model's parameters."""
        sizes = [shape.numel() for shape in self._shapes]
        pieces = torch.split(vector_nd[:, : self._num_params], sizes, dim=1)
        n = len(vector_nd)
        return [piece.view(n, *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _add_noise(self, gradient_nd: Tensor, jobs: Sequence[LocalJob]) -> None:
        """Draw the gradient noise of one step of the first clients."""
        if all(job.noise is None for job in jobs):
            return
        noise_nd = np.zeros((len(gradient_nd), self._num_params), np.float32)
        for noise_d, job in zip(noise_nd, jobs, strict=False):
            if job.noise is not None:
                noise_d[:] = job.noise(self._num_params)
        gradient_nd[:, : self._num_params].add_(torch.from_numpy(noise_nd).to(self._device))

    def _stretches(self, schedule: Schedule) -> Iterator[tuple[int, Stretch]]:
        """The first step and the examples of steps of the same clients, a few MiB at a time."""
        all_rows_knb = schedule.rows_knb.to(self._device)
        all_weight_knb = schedule.weight_knb.to(self._device)
        # How many clients have more than k steps. Both are negated because ``steps_n`` falls.
        active_k = np.searchsorted(-schedule.steps_n, -np.arange(len(all_rows_knb)))
        first = 0
        masks = self._masks(schedule.jobs)
        # Others are slow enough for one gather a step, and their inputs may be large.
        most = 1
        if self._chain is not None:
            numbers = all_rows_knb[0].numel() * self._chain.num_inputs
            most = max(1, _STRETCH_NUMBERS // numbers)
        while first < len(active_k):
            active = int(active_k[first])
            last = min(first + most, int(schedule.steps_n[active - 1]))
            rows_knb = all_rows_knb[first:last, :active]
            weight_knb = all_weight_knb[first:last, :active]
            x, y = self._fetch(rows_knb.reshape(-1))
            x = x.view(*rows_knb.shape, *x.shape[1:])
            y = y.view(*rows_knb.shape, *y.shape[1:])
            for i, job in enumerate(schedule.jobs[:active]):
                if job.augment is not None:
                    # Without the padding, for which the client's generator has drawn nothing.
                    for step, size in enumerate((weight_knb[:, i] > 0).sum(dim=1).tolist()):
                        with own_code():
                            x[step, i, :size] = job.augment(x[step, i, :size])
            # A chain, which takes several steps at once, has no such layers.
            drawn = tuple(mask[None] for mask in masks.draw(active))
            yield first, Stretch(x, y, weight_knb, drawn)
            first = last

    def _differentiation(
        self,
        own: Descent,
        some: Stretch,
    ) -> Callable[[int], Tensor]:
        """A function of a step: writes gradients of sum_b weight_b loss_b, and returns loss_b."""
        params = self._views(own.current)
        gradients = self._views(own.gradient)
        if self._chain is not None:
            return self._chain.differentiation(params, gradients, some)

        def differentiate(step: int) -> Tensor:
            x, y, weight_nb = (part[step] for part in some[:3])
            masks = [mask[step] for mask in some.masks]
            # The parameters are cast here, not by autocast, which does not reach into torch.vmap.
            cast = [part.detach().to(self._dtype).requires_grad_() for part in params]
            if x.is_floating_point():
                x = x.to(self._dtype)
            with own_code():
                output = self._forward(cast, x, *masks)
                # Places of sequences before examples, as in the output.
                loss_nb = self._losses(output.float(), y.movedim(1, -1))
                loss_nb = loss_nb.reshape(len(y), -1, y.shape[1]).mean(dim=1)
                found = torch.autograd.grad(
                    (loss_nb * weight_nb).sum(),
                    cast,
                    materialize_grads=True,
                )
            # Torch 2.6 refuses to write to such views where gradients are recorded.
            with torch.no_grad():
                for gradient, value in zip(gradients, found, strict=True):
                    gradient.copy_(value)
            return loss_nb.detach()

        return differentiate


def fetched(row_nd: Tensor) -> Params:
    """A copy in the memory of the CPU, float32 (n, d)."""
    if row_nd.device.type == "cpu":
        return row_nd.numpy()
    # Pages that the GPU may write to itself, which torch uses again once the last round's are free:
    # others are copied twice, and given by the system one by one.
    host_nd = torch.empty(row_nd.shape, dtype=row_nd.dtype, pin_memory=True)
    host_nd.copy_(row_nd)
    return host_nd.numpy()


def _sums(wide_knb: Tensor) -> Tensor:
    """Sums over examples; on a CPU by NumPy, whose order of addition recorded runs have."""
    if wide_knb.device.type == "cpu":
        return torch.from_numpy(wide_knb.numpy().sum(axis=2))
    return wide_knb.sum(dim=2)
