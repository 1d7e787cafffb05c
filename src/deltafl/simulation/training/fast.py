"""Local training of one client, fast: the steps of ``serial.train_serial``, equal within float32 rounding.

What makes it faster on one core (``benchmarks/local_training.py`` measures it):

1. Feature maps have the layout that suits the CPU (see ``choose_layout``): a third of the time of a small CNN.
2. All parameters are views into one flat vector: loading the global model is one copy, a step one subtraction, and
   norms and the minibatch variance are running sums over one vector. This is most of the gain of small models.
3. Examples are gathered once a pass, and minibatches are views; there is no data loader.
4. glibc keeps the blocks that each step frees, instead of returning them to the system and requesting them again.

``choose_trainer`` leaves what this path cannot train to ``train_serial``.
"""

import copy
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ...types import IntArray, Params
from .compatibility import has_hooks, log_incompatibility
from .serial import (
    Augmented,
    LocalResult,
    LocalWork,
    losses_with,
    mean_square,
    minibatches,
    result_of,
    squared_norm,
    train_serial,
)

if TYPE_CHECKING:
    from ...tasks.base import Loss

CPU = torch.device("cpu")

#: ``train_serial`` bound to its model and loss, or an equal of it.
Trainer = Callable[..., LocalResult]


class Layout(NamedTuple):
    """How images are stored, and how a model runs on them.

    Attributes:
        arrange: Puts inputs into the layout, once a pass.
        forward: The model on a minibatch in the layout.
    """

    arrange: Callable[[torch.Tensor], torch.Tensor]
    forward: Callable[[torch.Tensor], torch.Tensor]


class FastTrainer:
    """Trains one client after another with one copy of the model.

    Args:
        model: A module for which ``compatibility.incompatibility`` is None; a copy of it is trained.
        loss: ``loss(output, y)``, the mean loss of a minibatch.
        device: Where to train; the examples are there already.
    """

    def __init__(self, model: torch.nn.Module, loss: "Loss", device: torch.device = CPU) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._loss, self._device = loss, device
        self._params = list(self._model.parameters())
        sizes = [param.numel() for param in self._params]
        self._current_d = torch.zeros(sum(sizes), device=device)
        for param, piece in zip(self._params, torch.split(self._current_d, sizes), strict=True):
            param.data = piece.view(param.shape)
        self._start_d, self._gradient_d, self._gradient_sum_d, self._velocity_d = (
            torch.zeros_like(self._current_d) for _ in range(4)
        )
        self._layout: Layout | None = None

    def train(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        params_d: Params,
        work: LocalWork,
        rng: np.random.Generator,
        noise: float = 0.0,
        drift_d: Params | None = None,
        augment: Augmented | None = None,
        squares: bool = False,
    ) -> LocalResult:
        """Train one client; arguments and result are those of ``serial.train_serial``."""
        self._start_d.copy_(torch.tensor(params_d))
        self._current_d.copy_(self._start_d)
        self._gradient_sum_d.zero_()
        self._velocity_d.zero_()
        loss_sum, square_loss_sum, square_sum = 0.0, 0.0, 0.0
        losses = losses_with(self._loss, y) if squares else None
        if self._layout is None:
            self._layout = choose_layout(self._model, x)
        batches = minibatches(len(x), work, rng)
        drift_step_d = None if drift_d is None else torch.tensor(drift_d, device=self._device) / len(batches)
        for x_batch, y_batch in _examples(self._layout, x, y, batches, augment):
            output = self._layout.forward(x_batch)
            loss_sum += self._differentiate(output, y_batch)
            if losses is not None:
                square_loss_sum += mean_square(losses, output, y_batch)
            if noise > 0:
                normal_d = torch.from_numpy(rng.standard_normal(len(self._gradient_d)))
                self._gradient_d += (noise * normal_d.float()).to(self._device)
            square_sum += self._measure()
            take_step(self._current_d, self._gradient_d, self._start_d, self._velocity_d, work, drift_step_d)
        update_d, norm_of_sum = self._current_d - self._start_d, squared_norm(self._gradient_sum_d).item()
        square_loss = None if losses is None else square_loss_sum
        return result_of(update_d, loss_sum, square_loss, square_sum, norm_of_sum, len(batches), work.rate)

    def _differentiate(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """Write the minibatch's gradient into the flat vector; returns the minibatch's loss."""
        batch_loss = self._loss(output, y)
        gradients = torch.autograd.grad(batch_loss, self._params, materialize_grads=True)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self._gradient_d)
        return batch_loss.item()

    def _measure(self) -> float:
        """The squared norm of a step's gradient, which is also added to the sum of all: for the minibatch variance."""
        self._gradient_sum_d += self._gradient_d
        return squared_norm(self._gradient_d).item()


def take_step(
    current: torch.Tensor,
    gradient: torch.Tensor,
    start: torch.Tensor,
    velocity: torch.Tensor,
    work: LocalWork,
    drift_step: torch.Tensor | None,
) -> None:
    """Take one step in place; all tensors have one shape, and the gradient's memory is reused."""
    direction = gradient
    if work.proximal > 0:
        direction.add_(current, alpha=work.proximal).sub_(start, alpha=work.proximal)
    if work.momentum > 0:
        direction = velocity.mul_(work.momentum).add_(direction)
    current.sub_(direction, alpha=work.rate)
    if drift_step is not None:
        current.add_(drift_step)


def _examples(
    layout: Layout, x: torch.Tensor, y: torch.Tensor, batches: list[IntArray], augment: Augmented | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The minibatches, cut from the examples of a whole pass."""
    size = len(batches[0])
    batches_a_pass = -(-len(x) // size)
    for first in range(0, len(batches), batches_a_pass):
        rows = torch.from_numpy(np.concatenate(batches[first : first + batches_a_pass]))
        x_pass = x[rows]
        if augment is not None:  # minibatch by minibatch, as train_serial does
            x_pass = torch.cat([augment(x_batch) for x_batch in torch.split(x_pass, size)])
        yield from zip(torch.split(layout.arrange(x_pass), size), torch.split(y[rows], size), strict=True)


def choose_layout(model: torch.nn.Module, x: torch.Tensor) -> Layout:
    """The fastest way to run a model on inputs like x; all layouts give the same up to rounding.

    - Chains of convolutions, max-pools and ReLUs up to a Flatten: the tiles of oneDNN, torch's library for convolutions
      on CPUs. In other layouts torch converts to tiles and back around each convolution.
    - Other models of images: channels last, which makes torch's pooling several times faster.
    - Everything else: the standard layout, as for a model that calls ``view`` on feature maps. Also on GPUs.
    """
    plain = Layout(lambda x: x, model)
    if x.dim() != 4 or x.device.type != "cpu":
        return plain
    length = _tiled_length(model)
    if isinstance(model, torch.nn.Sequential) and length > 0 and not has_hooks(model):
        features, head = model[:length], model[length:]
        tiled = Layout(lambda x: x, lambda x: torch.as_tensor(head(features(x.to_mkldnn()).to_dense())))
        if _runs(tiled, model, x):
            return tiled
    last = Layout(channels_last, model)
    return last if not _corrupts_memory(model) and _runs(last, model, x) else plain


def _corrupts_memory(model: torch.nn.Module) -> bool:
    """Whether a layer of the model is not safe with channels last.

    On CPUs without AVX-512, the gradient in the weights of ``Conv2d(4, 8, 1, stride=2)`` on images in channels last
    writes beyond its memory, and the process dies later without a message. Seen with torch 2.13.0 (oneDNN 3.12.0), for
    1 to 6 input channels and any stride above 1; not with 7 channels or more, larger kernels, padding, groups, tiles or
    the standard layout. A CPU with AVX-512 shows it with ONEDNN_MAX_CPU_ISA=AVX2 in the environment, surely so with
    glibc's libc_malloc_debug.so.0 in LD_PRELOAD and MALLOC_CHECK_=3. The rule takes in a little more than was seen.
    """
    return any(
        isinstance(part, torch.nn.Conv2d)
        and part.kernel_size == (1, 1)
        and max(part.stride) > 1
        and part.in_channels < 8 * part.groups
        for part in model.modules()
    )


def _tiled_length(model: torch.nn.Module) -> int:
    """The number of layers before the first Flatten if oneDNN can run all of them in tiles, else 0."""
    if type(model) is not torch.nn.Sequential:
        return 0
    for index, layer in enumerate(model):
        if type(layer) is torch.nn.Flatten:
            return index if (layer.start_dim, layer.end_dim) == (1, -1) else 0
        convolution = type(layer) is torch.nn.Conv2d and layer.padding_mode == "zeros" and layer.groups == 1
        pool = type(layer) is torch.nn.MaxPool2d and layer.dilation == 1 and not layer.return_indices
        relu = type(layer) is torch.nn.ReLU and not layer.inplace
        if not (convolution or pool or relu):
            return 0
    return 0


def _runs(layout: Layout, model: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether a forward and backward pass over two inputs of zeros raises no error."""
    try:
        output = layout.forward(layout.arrange(torch.zeros(2, *x.shape[1:])))
        torch.autograd.grad(output.sum(), list(model.parameters()), allow_unused=True)
    except RuntimeError:
        return False
    return True


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same images (n, channels, height, width), stored with the channels of one pixel side by side.

    Torch reads the layout from the strides, and neither ``contiguous`` nor ``to`` changes those of images with one
    channel, so that their feature maps would be in the slow layout. Hence the explicit copy.
    """
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def choose_trainer(model: torch.nn.Module, loss: "Loss", example: torch.Tensor) -> Trainer:
    """The trainer for a model; ``example``, inputs of at least one example, is on its device."""
    if log_incompatibility(model, example) is None:
        return FastTrainer(model, loss, example.device).train
    return functools.partial(train_serial, model, loss)


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks up to 32 MiB, at most 1 GiB in all, for the whole process; no effect elsewhere.

    Every step allocates and frees the same few megabytes of activations. By default glibc returns such blocks to the
    system, and the next step pays for new zeroed pages.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(mmap_threshold, 32 * 1024**2)
            mallopt(trim_threshold, 1024**3)
