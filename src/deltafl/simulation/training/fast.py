"""Local training of one client, fast: equal to ``serial.train_serial`` up to rounding.

What makes it faster on one core (``benchmarks/local_training.py`` measures it):

1. Feature maps have the layout that suits the CPU (``choose_forward``): a third of the time of a
   small CNN.
2. All parameters are views into one flat vector, so a step is one subtraction: most of the gain of
   small models.
3. Examples are gathered once a pass, and minibatches are views; there is no data loader.
4. glibc keeps the blocks that each step frees, instead of returning them to the system and
   requesting them again.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...errors import OWN_ERRORS
from ...model.arrays import copied
from ...tasks.losses import Loss
from ...types import IntArray, Params, Rng
from .failures import own_code
from .serial import (
    Augmented,
    LocalResult,
    LocalWork,
    Losses,
    MeanLoss,
    Noise,
    mean_square,
    minibatches,
    result_of,
    squared_norm,
)
from .tensors import has_hooks, is_close, take_back, take_gradient, trained_parameters

CPU = torch.device("cpu")


class Descent(NamedTuple):
    """Models on their way, (d,) or (n, d), and the sums of their gradients."""

    start: Tensor
    current: Tensor
    gradient: Tensor
    gradient_sum: Tensor
    velocity: Tensor
    drift_step: Tensor | None = None

    @classmethod
    def of(cls, start: Tensor, drift_step: Tensor | None = None) -> Self:
        """Before the first step."""
        current = start.clone(memory_format=torch.contiguous_format)
        gradient, gradient_sum, velocity = (torch.zeros_like(current) for _ in range(3))
        return cls(start, current, gradient, gradient_sum, velocity, drift_step)

    def first(self, number: int) -> "Descent":
        """Those of the first models, in the same memory."""
        return Descent(*(part[:number] for part in self if part is not None))

    def restart(self, start: Tensor, drift_step: Tensor | None = None) -> None:
        """Be as before the first step from another start, in the same memory."""
        self.current.copy_(start)
        if self.drift_step is not None and drift_step is not None:
            self.drift_step.copy_(drift_step)
        for part in (self.gradient, self.gradient_sum, self.velocity):
            part.zero_()

    def step(self, work: LocalWork, rate: Tensor | None = None) -> Tensor:
        """Take one step along the gradients and return their squared norms; reuses their memory.

        ``rate``, if given, stands for that of ``work``.
        """
        # Of the gradient alone: the variance of steps is without proximal term and momentum.
        square = squared_norm(self.gradient)
        self.gradient_sum.add_(self.gradient)
        direction = self.gradient
        if work.proximal > 0:
            direction.add_(self.current, alpha=work.proximal)
            direction.sub_(self.start, alpha=work.proximal)
        if work.momentum > 0:
            direction = self.velocity.mul_(work.momentum).add_(direction)
        if rate is None:
            self.current.sub_(direction, alpha=work.rate)
        else:
            self.current.addcmul_(direction, rate, value=-1)
        if self.drift_step is not None:
            self.current.add_(self.drift_step)
        return square


class FastTrainer:
    """Trains one client after another, models for which ``incompatibility`` is None
    (``compatibility.py``); frozen parameters stay as the model has them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        device: torch.device = CPU,
    ) -> None:
        self._model = copied(model).to(device)
        self._loss = loss
        self._device = device
        self._params = list(trained_parameters(self._model).values())
        sizes = [param.numel() for param in self._params]
        self._own = Descent.of(torch.zeros(sum(sizes), device=device))
        self._pieces = torch.split(self._own.current, sizes)
        for param, piece in zip(self._params, self._pieces, strict=True):
            param.data = piece.view(param.shape)  # a step moves all of them at once
        self._forward: Callable[[Tensor], Tensor] | None = None

    def train(
        self,
        x: Tensor,
        y: Tensor,
        params_d: Params,
        work: LocalWork,
        rng: Rng,
        noise: Noise | None = None,
        drift_d: Params | None = None,
        augment: Augmented | None = None,
        losses: Losses | None = None,
    ) -> LocalResult:
        """``serial.train_serial``, with this trainer's model and loss."""
        own = self._own
        # Into the same memory every time: the model's parameters are views of ``current``.
        own.start.copy_(torch.tensor(params_d))
        own.restart(own.start)
        mean_loss = MeanLoss()
        square_loss_sum = 0.0
        square_sum = 0.0
        # Only now, since the choice depends on the shape of the examples.
        if self._forward is None:
            self._forward = choose_forward(self._model, x)
        # Before any noise, which may come from the same generator.
        batches = minibatches(len(x), work, rng)
        if drift_d is not None:
            drift_step_d = torch.tensor(drift_d, device=self._device) / len(batches)
            own = own._replace(drift_step=drift_step_d)
        for x_batch, y_batch in _examples(x, y, batches):
            varied = x_batch
            with own_code():
                if augment is not None:
                    varied = augment(x_batch)
                output = self._forward(varied)
                batch_loss = self._loss(output, y_batch)
                batch_loss.backward()
            for param, piece in zip(self._params, self._pieces, strict=True):
                take_back(param, piece)  # as ``flatten_parameters()`` of an LSTM asks for on a GPU
            torch.cat([*map(take_gradient, self._params)], out=own.gradient)
            mean_loss.add(batch_loss.item())
            square_loss_sum += mean_square(losses, output, y_batch)
            if noise is not None:
                noise_d = torch.from_numpy(noise(len(own.gradient)))
                own.gradient.add_(noise_d.to(self._device))
            square_sum += own.step(work).item()
        update_d: Params = (own.current - own.start).cpu().numpy()
        sums = mean_loss.total, square_loss_sum, square_sum, squared_norm(own.gradient_sum).item()
        return result_of(update_d, sums, len(batches), work.rate)


def _examples(
    x: Tensor,
    y: Tensor,
    batches: list[IntArray],
) -> Iterator[tuple[Tensor, Tensor]]:
    """The minibatches, cut from the examples of a whole pass."""
    size = len(batches[0])
    batches_a_pass = -(-len(x) // size)
    for first in range(0, len(batches), batches_a_pass):
        rows = torch.from_numpy(np.concatenate(batches[first : first + batches_a_pass]))
        yield from zip(
            torch.split(x[rows], size),
            torch.split(y[rows], size),
            strict=True,
        )


def choose_forward(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The fastest way to run a model on inputs like x; all ways give the same up to rounding.

    - Chains of convolutions, max-pools and ReLUs up to a Flatten, with AVX-512: oneDNN's tiles, to
      and from which torch would convert around each convolution. With AVX2 tiles waste most of a
      first layer of few channels: there the step of a two-layer CNN takes 1.2 times as long as with
      channels last.
    - Other models of images on a CPU: channels last, which makes torch's pooling several times
      faster.
    - Everything else: the standard layout, as for a model that calls ``view`` on feature maps.
    """
    if x.dim() != 4 or x.device.type != "cpu":
        return model
    # From a generator of its own, so that those of the run stay where they are.
    some = torch.rand(2, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    norms = _GroupNorms()
    try:
        with norms:
            expected = torch.as_tensor(model(some.clone()))
    except OWN_ERRORS:  # some models do not take any numbers
        return model
    agrees = partial(_agrees, trained=[*trained_parameters(model).values()], expected=expected)
    length = _tiled_length(model)
    # Of the CPU: ONEDNN_MAX_CPU_ISA may hold oneDNN back, which costs time alone.
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if isinstance(model, nn.Sequential) and length > 0 and has_avx512:
        features = model[:length]
        head = model[length:]

        def tiled(x: Tensor) -> Tensor:
            return torch.as_tensor(head(features(x.to_mkldnn()).to_dense()))

        if agrees(tiled, some):
            return tiled

    def last(x: Tensor) -> Tensor:
        # Neither ``contiguous`` nor ``to`` changes the strides of images with one channel, by which
        # torch goes.
        stored = x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
        return torch.as_tensor(model(stored.permute(0, 3, 1, 2)))

    if _corrupts_memory(model) or norms.of_data or not agrees(last, some):
        return model
    return last


def _corrupts_memory(model: nn.Module) -> bool:
    """Whether a layer of the model is not safe with channels last.

    Without AVX-512 (or with ONEDNN_MAX_CPU_ISA=AVX2), torch 2.13.0 (oneDNN 3.12.0) writes beyond
    the memory of the gradient of ``Conv2d(4, 8, 1, stride=2)``, and the process dies later without
    a message. Seen for 1 to 6 input channels and any stride above 1, not with larger kernels or
    padding; the rule takes in a little more.
    """
    return any(
        isinstance(part, nn.Conv2d)
        and part.kernel_size == (1, 1)
        and max(part.stride) > 1
        and part.in_channels < 8 * part.groups
        for part in model.modules()
    )


class _GroupNorms(TorchFunctionMode):
    """Notes whether a group norm is trained on what has no gradient: the examples, or what frozen
    layers make of them.

    With channels last, torch 2.13.0 then writes to the gradient that nobody asked for, and the
    process dies.
    """

    of_data: bool = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function."""
        output = func(*args, **(kwargs or {}))
        if func in (functional.group_norm, torch.group_norm):
            data = args[0] if args else (kwargs or {})["input"]
            self.of_data |= bool(output.requires_grad and not data.requires_grad)
        return output


def _tiled_length(model: nn.Module) -> int:
    """The number of layers before the first Flatten if all have tiles, else 0.

    Options that oneDNN does not know it refuses, see ``_agrees``.
    """
    if type(model) is not nn.Sequential or has_hooks(model):
        return 0
    for index, layer in enumerate(model):
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            return index
        if type(layer) not in (nn.Conv2d, nn.MaxPool2d, nn.ReLU):
            return 0
    return 0


def _agrees(
    forward: Callable[[Tensor], Tensor],
    some: Tensor,
    trained: list[nn.Parameter],
    expected: Tensor,
) -> bool:
    """Whether a way to run a model gives what is expected, and gradients without an error."""
    try:
        output = forward(some)
        torch.autograd.grad(output.sum(), trained, allow_unused=True)
    except OWN_ERRORS:  # some look at the layout, and refuse it
        return False
    # For a model may look at the strides of what it gets.
    return is_close(output, expected)


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks up to 32 MiB, at most 1 GiB in all, for the next step."""
    # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    trim_threshold = -1
    mmap_threshold = -3
    with suppress(AttributeError, TypeError, OSError):  # other C libraries have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 * 1024**2)
        mallopt(trim_threshold, 1024**3)
