"""The client's side of any host: what its training loop may report, and steps that the server
corrects.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import numpy as np

from ..errors import DeltaflError, is_in
from ..model.arrays import Arrays, as_array, own_tensors, state_of
from ..model.parts import ModelParts, Patterns
from ..types import FloatArray, Params, is_whole
from .exchange import Correction

#: Names of the statistics in a client's metrics.
LOSS = "loss"
SQUARE_LOSS = "square-loss"
STEP_VARIANCE = "step-variance"
NUM_STEPS = "num-steps"


class LocalSteps:
    """Collects one round's local steps, with any framework.

    ``step-variance`` = lr^2 ((1/K) sum_k norm(g_k)^2 - norm((1/K) sum_k g_k)^2) >= 0 over the K
    minibatch gradients g_k along the path (DELTA paper, section 4: sigma_i^2 from the steps that
    are taken anyway). ``square-loss``, which ``oort`` uses, is the mean of loss^2 over the examples
    of a minibatch, and over the steps; it is reported if every step has the losses of its examples.

    Args:
        lr: Local learning rate > 0. With an optimizer other than SGD, pass 1 and add the steps
            instead of gradients.

    Example:
        >>> steps = LocalSteps(lr=0.5)
        >>> steps.add(1.0, [np.array([2.0, 0.0])])
        >>> steps.add(3.0, [np.array([0.0, 2.0])])
        >>> steps.metrics()
        {'loss': 2.0, 'step-variance': 0.5, 'num-steps': 2}
    """

    def __init__(self, lr: float) -> None:
        if not lr > 0:
            raise DeltaflError(f"lr is {lr}; the local learning rate must be above 0")
        self.lr = lr
        self._count = 0
        self._loss = 0.0
        self._square = 0.0
        self._sums: list[FloatArray | float] = []
        self._square_loss = 0.0
        self._num_squares = 0

    def add(
        self,
        loss: float,
        gradients: Iterable[Any | None] | None = None,
        example_losses: Any | None = None,
    ) -> None:
        """Count one step.

        Args:
            loss: The minibatch's mean loss, before the step.
            gradients: One array (NumPy, or a tensor of PyTorch or TensorFlow) per parameter, in
                PyTorch ``[p.grad for p in model.parameters()]``, the same in every step; None for
                one without a gradient. None for the list leaves the variance 0, "not measured".
            example_losses: The losses whose mean ``loss`` is, one per example of the minibatch;
                None to report no ``square-loss``.

        Raises:
            DeltaflError: If the number of gradients differs from the first step's.
        """
        self._count += 1
        self._loss += float(loss)
        if example_losses is not None:
            self._num_squares += 1
            self._square_loss += float(np.mean(np.float64(as_array(example_losses)) ** 2))
        if gradients is None:
            return
        given = list(gradients)
        sums = self._sums or [0.0] * len(given)
        if len(given) != len(sums):
            raise DeltaflError(f"this step has {len(given)} gradients, the first had {len(sums)}")
        for place, gradient in enumerate(given):
            if gradient is not None:  # frozen, or not used in this step: a gradient of zero
                # In float64: in half precision large squares overflow, and small ones vanish.
                array = np.float64(as_array(gradient))
                self._square += float(np.sum(array**2))
                sums[place] = sums[place] + array
        self._sums = sums

    def metrics(self) -> dict[str, float | int]:
        """The statistics under the names that the server reads, for the reply's metrics.

        Raises:
            DeltaflError: If no step was counted.
        """
        if self._count == 0:
            raise DeltaflError("no local step was counted; call add() once per minibatch")
        count = self._count
        of_sum = sum(float(np.sum(total**2)) for total in self._sums)
        variance = self.lr**2 * (self._square / count - of_sum / count**2)
        # Not max(0, .): the NaN of a training that diverged must reach the server, which rejects
        # the reply.
        if variance < 0 or count == 1:
            variance = 0.0
        metrics: dict[str, float | int] = {LOSS: self._loss / count}
        if self._num_squares == count:
            metrics[SQUARE_LOSS] = self._square_loss / count
        return metrics | {STEP_VARIANCE: variance, NUM_STEPS: count}


@contextmanager
def corrected_steps(
    correction: Arrays | Params | None,
    model: Any,
    optimizer: Any,
    num_steps: int,
    step_factor: float | None = None,
    local: Patterns = (),
    trainable: Patterns = (),
) -> Iterator[None]:
    """Inside ``with``, make each step dx of a PyTorch optimizer x <- x + step_factor dx + drift /
    K.

    The drift is that of ``Plan.drifts``: c - c_i with ``scaffold``, beta S with ``mime``, or parts
    of both::

        with corrected_steps(take_correction(message), model, optimizer, num_steps=epochs *
        len(loader)):
            train(model, loader, optimizer, epochs)

    A loop that takes fewer than K steps gets the rest at the end, and further steps get nothing:
    these parts always add up to the drift, which is what the server subtracts from the update.
    (Parameters in bfloat16 may be too coarse for 1 / K of it; train those in float32.) A second
    optimizer of the model needs a ``corrected_steps`` of its own, with ``{}`` as its correction and
    the same factor.

    Args:
        correction: The drift: in Flower ``take_correction(message)``, in NVFlare
            ``DeltaClient.take_correction()``, where no arrays mean none; in a loop of your own what
            ``Plan.drifts`` has for the client, (d,), or None.
        model: The module that is trained.
        optimizer: Its optimizer, of ``torch.optim``; with any momentum, schedule or state of its
            own.
        num_steps: K >= 1, how many steps the loop will take, such as ``epochs * len(loader)``.
        step_factor: In (0, 1]; None for that of the correction in Flower and NVFlare, and for 1. In
            a loop of your own write ``plan.step_factor``.
        local: As for ``flatten``. These arrays take whole steps, and without the drift.
        trainable: As for ``flatten``.

    Raises:
        DeltaflError: If the model lacks an array of the correction, an argument is of another kind,
            or the optimizer took no step though it should have taken shorter ones.
    """
    factor: Any = step_factor
    if step_factor is None:
        factor = correction.step_factor if isinstance(correction, Correction) else 1.0
    if not is_in(factor, "(0, 1]"):
        raise DeltaflError(f"step_factor is {factor!r}; it must be a number above 0 and at most 1")
    if not is_whole(num_steps) or num_steps < 1:
        raise DeltaflError(
            f"num_steps is {num_steps!r}; write how many steps the loop will take, at least 1"
        )
    if not hasattr(optimizer, "register_step_post_hook"):
        raise DeltaflError(
            f"the optimizer is a {type(optimizer).__name__}, not one of torch.optim; add drift / K "
            "in each step instead"
        )
    tensors = own_tensors(model, state_of(model))
    drift = {} if correction is None else correction
    if not isinstance(drift, dict):
        drift = ModelParts.of(model, local=local, trainable=trainable).named(drift)
    # By identity: a tensor that has two names moves once.
    parts = dict[int, tuple[Any, Any]]()
    for name, part in drift.items():
        if name not in tensors or tensors[name].shape != part.shape:
            raise DeltaflError(
                f"the model has no array {name!r} of shape {part.shape}; give the module whose "
                "state dict the client sends"
            )
        tensor = tensors[name]
        parts[id(tensor)] = (tensor, tensor.new_tensor(part))
    apart = set[int]()
    if local:
        names = ModelParts.of(model, local=local, trainable=trainable).names("local")
        apart = {id(tensors[name]) for name in names}
    left = num_steps
    taken = 0
    original = optimizer.step
    own = vars(optimizer).get("step")

    def add(share: float) -> None:
        for tensor, part in parts.values():
            tensor.data.add_(part, alpha=share)

    # Not the optimizer's hooks: they run twice where a subclass calls the step that it overrides.
    @wraps(original)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left, taken
        before = [
            (tensor, tensor.detach().clone())
            for group in optimizer.param_groups
            for tensor in group["params"]
            # Without shorter steps nothing needs to be remembered.
            if factor < 1 and id(tensor) not in apart
        ]
        result = original(*args, **kwargs)
        for tensor, old in before:
            # old + factor (new - old), whatever the optimizer made of the gradients.
            tensor.data.lerp_(old, 1 - factor)
        taken += 1
        if left > 0:
            left -= 1
            add(1 / num_steps)
        return result

    # A method, as schedulers of learning rates that begin inside ``with`` expect.
    optimizer.step = MethodType(step, optimizer)
    try:
        yield
    finally:
        del optimizer.step
        # A step that was set on this instance, as schedulers of learning rates do.
        if own is not None:
            optimizer.step = own
    if factor < 1 and taken == 0:
        raise DeltaflError(
            "the optimizer that corrected_steps was given took no step; give the one that trains"
        )
    add(left / num_steps)
