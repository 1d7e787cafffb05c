"""Local training of one client as a plain loop: the reference for ``fast`` and ``batched``.

The client starts from the global model x_0 and takes K steps x <- x - lr * direction(g_k), where
g_k is the gradient of the mean loss of minibatch k. It returns u = x_K - x_0 with statistics of its
steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...model.arrays import Arrays
from ...model.parts import ModelParts
from ...tasks.losses import Loss, cross_entropy, squared_error
from ...types import IntArray, Params, Rng
from .failures import own_code
from .tensors import ModelTensors

#: ``losses(output, y)``: the loss of each example.
Losses = Callable[[Tensor, Tensor], Tensor]

#: Varies the inputs of a minibatch at random; bound to its generator.
Augmented = Callable[[Tensor], Tensor]

#: ``noise(d)`` is added to the gradient of a minibatch, float32 (d,); bound to its generator.
Noise = Callable[[int], Params]


@dataclass(frozen=True)
class LocalWork:
    """What every client does in a round. Exactly one of ``epochs`` and ``steps`` is set."""

    lr: float  #: local learning rate eta_L > 0
    #: passes over the client's data, each in a new order; the last minibatch may be short
    epochs: int | None = None
    steps: int | None = None  #: number of minibatch steps K, over as many passes as needed
    batch_size: int | None = 32  #: examples in a minibatch, >= 1; None for the client's whole data
    #: gamma in [0, 1): v <- gamma v + g, x <- x - lr v, with v = 0 at the start of every round
    momentum: float = 0.0
    proximal: float = 0.0  #: mu >= 0: adds mu (x - x_0) to the gradient (FedProx, Li et al. 2020)
    #: x <- x - step_factor lr v + drift / K, with the drift that the server sent; see ``mime.py``
    step_factor: float = 1.0
    #: Whether a client's minibatches are those of round 0 in every round. Augmentation, random
    #: layers and gradient noise stay new in each round; without them an update is a function of the
    #: model alone.
    fixed_order: bool = False
    #: what ``lr`` is multiplied with in each round; empty for 1 in all (``schedules.py``)
    factors: tuple[float, ...] = ()

    def at(self, round: int) -> "LocalWork":
        """The work of a round, 0, 1, ...: the same in all rounds but for its learning rate."""
        if not self.factors:
            return self
        return replace(self, lr=self.factors[round] * self.lr, factors=())

    @property
    def rate(self) -> float:
        """The learning rate beside the server's momentum."""
        return self.step_factor * self.lr

    def minibatch_size(self, num_examples: int) -> int:
        """Examples in a minibatch of a client with so many; a pass may end in a shorter one."""
        return min(self.batch_size or num_examples, num_examples)

    def batches_a_pass(self, num_examples: int) -> int:
        """Minibatches in one pass over so many examples."""
        return -(-num_examples // self.minibatch_size(num_examples))

    def num_steps(self, num_examples: int) -> int:
        """K of a client with so many examples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * self.batches_a_pass(num_examples)

    def sizes(self, num_examples: int) -> set[int]:
        """How many examples the minibatches of a client with so many have: the last of a pass,
        which may not come, has the rest.
        """
        size = self.minibatch_size(num_examples)
        rest = num_examples % size
        if rest > 0 and self.num_steps(num_examples) >= self.batches_a_pass(num_examples):
            return {size, rest}
        return {size}


class LocalJob(NamedTuple):
    """The local training of one client in a round; see ``train_serial``."""

    rows: IntArray
    rng: Rng
    noise: Noise | None = None
    augment: Augmented | None = None
    dropout: int = 0  #: seed of its dropout layers, where a cohort is trained at once


NOTHING: Arrays = {}


class LocalResult(NamedTuple):
    """What a client returns."""

    #: x_K - x_0, the trained arrays in order, each flattened in C order
    update_d: Params
    loss: float  #: mean of the minibatch losses over the steps, measured before each step
    #: mean squared loss of single examples over the steps; NaN where not measured or not known
    square_loss: float
    #: rate^2 ((1/K) sum_k norm(g_k)^2 - norm((1/K) sum_k g_k)^2), >= 0; g_k without the proximal
    #: term.
    step_variance: float
    num_steps: int  #: K
    #: buffers, counters and local arrays after the last step
    rest: Arrays = NOTHING


def result_of(
    update_d: Params,
    sums: tuple[float, float, float, float],
    num_steps: int,
    rate: float,
) -> LocalResult:
    """The result of sums of losses, squared losses and norm(g_k)^2, and of norm(sum_k g_k)^2."""
    loss, square_loss, square, squared_norm_of_sum = sums
    spread = square / num_steps - squared_norm_of_sum / (num_steps * num_steps)
    variance = rate * rate * spread
    if variance < 0 or num_steps == 1:  # it is NaN if the training diverged
        variance = 0.0
    return LocalResult(
        update_d,
        loss / num_steps,
        square_loss / num_steps,
        variance,
        num_steps,
    )


class MeanLoss:
    """The losses of a client's minibatches.

    One whose labels are all ignored has none, which PyTorch calls NaN, and a gradient of 0: the
    others stand for it. Where the training diverges the update is NaN as well, and says so.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._known = 0
        self._count = 0

    def add(self, loss: float) -> None:
        """Add a minibatch."""
        self._count += 1
        if not math.isnan(loss):
            self._known += 1
            self._sum += loss

    @property
    def total(self) -> float:
        """The sum over all minibatches; NaN if no loss is known."""
        if self._known == self._count:
            return self._sum
        if self._known == 0:
            return math.nan
        return self._sum * self._count / self._known


def passes(num_examples: int, work: LocalWork, rng: Rng) -> tuple[list[IntArray], int]:
    """The orders of a client's examples, one for each pass, and the size of its minibatches."""
    number = -(-work.num_steps(num_examples) // work.batches_a_pass(num_examples))
    orders = [rng.permutation(num_examples) for _ in range(number)]
    return orders, work.minibatch_size(num_examples)


def minibatches(
    num_examples: int,
    work: LocalWork,
    rng: Rng,
) -> list[IntArray]:
    """The rows of each local step; all passes are drawn in order, the same in every path."""
    orders, size = passes(num_examples, work, rng)
    batches = [
        order[start : start + size] for order in orders for start in range(0, num_examples, size)
    ]
    return batches[: work.num_steps(num_examples)]


def train_serial(
    model: torch.nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    params_d: Params,
    work: LocalWork,
    rng: Rng,
    noise: Noise | None = None,
    drift_d: Params | None = None,
    augment: Augmented | None = None,
    losses: Losses | None = None,
    parts: ModelParts | None = None,
    rest: Arrays | None = None,
    share: bool = True,
) -> LocalResult:
    """Train one client step by step, with any model.

    Local parameters take the same steps beside the flat vector, without proximal term, noise and
    drift.

    Args:
        model: Any module; a copy of it is trained.
        loss: The mean loss of a minibatch.
        x: The client's inputs, (n_i, ...), on the model's device.
        y: The client's labels or targets, (n_i,).
        params_d: float32 (d,), the global model x_0, as ``parts.flatten`` orders it.
        work: Steps, learning rate, momentum and proximal term.
        rng: Draws the minibatches of all steps, before any noise is drawn.
        noise: Draws the noise that is added to each minibatch gradient, in the order of the steps;
            None for none.
        drift_d: float32 (d,), moves the parameters by drift_d / K in each step, whatever the
            gradient; None for 0.
        augment: Varies the inputs of each minibatch, in the order of the steps; None for none.
        losses: Of single examples, to measure their mean squares; None not to.
        parts: What the model is made of; all of its parameters are trained if it is left out.
        rest: Buffers, counters and the client's local arrays; as the model has them if left out.
        share: Whether the copy shares frozen parameters with the model: no pass may change them.
    """
    tensors = ModelTensors(model, parts or ModelParts.of(model)).copied(share)
    model = tensors.model
    tensors.load_rest(rest or {})
    own_velocities = [torch.zeros_like(tensor) for tensor in tensors.own]
    start_d = torch.tensor(params_d, device=x.device)
    # In memory of its own: some models, as an Embedding with max_norm, change their parameters.
    current_d = start_d.clone()
    velocity_d = torch.zeros_like(start_d)
    mean_loss = MeanLoss()
    square_loss_sum = 0.0
    square_sum = 0.0
    # In float64: the variance of the steps can be a small difference of two large squares.
    gradient_sum_d = torch.zeros_like(start_d, dtype=torch.float64)
    batches = minibatches(len(x), work, rng)
    drift_step_d = torch.zeros_like(start_d)
    if drift_d is not None:
        drift_step_d = torch.tensor(drift_d, device=x.device) / len(batches)
    for rows in batches:
        tensors.load(current_d)
        x_batch = x[rows]
        y_batch = y[rows]
        with own_code():
            if augment is not None:
                x_batch = augment(x_batch)
            output = model(x_batch)
            batch_loss = loss(output, y_batch)
            model.zero_grad()
            batch_loss.backward()
        tensors.take_back()
        gradient_d = tensors.gradient()
        if noise is not None:
            gradient_d += torch.from_numpy(noise(len(start_d))).to(x.device)
        mean_loss.add(batch_loss.item())
        square_loss_sum += mean_square(losses, output, y_batch)
        square_sum += gradient_d.double().square().sum().item()
        gradient_sum_d += gradient_d
        velocity_d = work.momentum * velocity_d + gradient_d + work.proximal * (current_d - start_d)
        current_d = current_d - work.rate * velocity_d + drift_step_d
        for tensor, velocity in zip(tensors.own, own_velocities, strict=True):
            # Without momentum nothing is left of the last gradient where a step has none.
            velocity.mul_(work.momentum)
            if tensor.grad is not None:
                velocity.add_(tensor.grad)
            tensor.data.sub_(velocity, alpha=work.lr)
    norm_of_sum = gradient_sum_d.square().sum().item()
    update_d: Params = (current_d - start_d).cpu().numpy()
    sums = mean_loss.total, square_loss_sum, square_sum, norm_of_sum
    result = result_of(update_d, sums, len(batches), work.rate)
    return result._replace(rest=tensors.rest())


def losses_of(loss: Loss, y: Tensor | None = None) -> Losses | None:
    """The loss of each example, or of each place of a sequence; None if it is not known for this
    loss (and these targets).
    """
    if loss is squared_error and (y is None or y.dim() == 1):
        return lambda output, y: (output - y).square()
    if is_cross_entropy(loss) and (y is None or (y.dtype == torch.int64 and int(y.min()) >= 0)):
        return lambda output, y: functional.cross_entropy(output, y, reduction="none")
    return None


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is the plain cross-entropy, without weights or smoothing."""
    if type(loss) is torch.nn.CrossEntropyLoss:
        plain = torch.nn.CrossEntropyLoss()
        return loss.weight is None and all(
            loss.__dict__[name] == plain.__dict__[name] for name in plain.__constants__
        )
    return loss in (cross_entropy, functional.cross_entropy)


def mean_square(losses: Losses | None, output: Tensor, y: Tensor) -> float:
    """The mean squared loss of a minibatch's examples, in float64; NaN without ``losses``."""
    if losses is None:
        return math.nan
    loss_b = losses(output.detach(), y).view(len(y), -1).mean(dim=1)
    return float(squared_norm(loss_b).item() / len(y))


def squared_norm(x: Tensor) -> Tensor:
    """norm(x)^2 along the last axis, summed in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norm.square()
