"""What a client reports about its local steps: loss, number, and variance. Works with any framework, without Flower."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray

#: Names of the statistics in a client's metrics.
LOSS, SQUARE_LOSS, STEP_VARIANCE, NUM_STEPS = "loss", "square-loss", "step-variance", "num-steps"
#: Names under which clients report their loss: ours, Flower's usual one, and its spelling with a hyphen.
LOSS_NAMES = (LOSS, "train_loss", "train-loss")


class LocalSteps:
    """Collects one round's local steps.

    ``step-variance`` = lr^2 ((1/K) sum_k norm(g_k)^2 - norm((1/K) sum_k g_k)^2) >= 0 over the K minibatch gradients g_k
    along the path (DELTA paper, section 4: sigma_i^2 from the steps that are taken anyway). ``square-loss``, which
    ``oort`` uses, is the mean of loss^2 over the examples of a minibatch, and over the steps; it is reported if every
    step has the losses of its examples.

    Args:
        lr: Local learning rate > 0. With an optimizer other than SGD, pass 1 and add the steps instead of gradients.

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
        self._count, self._loss, self._square = 0, 0.0, 0.0
        self._sums: list[FloatArray | None] | None = None
        self._square_loss: float | None = 0.0

    def add(
        self, loss: float, gradients: Iterable[Any | None] | None = None, example_losses: Any | None = None
    ) -> None:
        """Count one step.

        Args:
            loss: The minibatch's mean loss, before the step.
            gradients: One array (NumPy, or a tensor of PyTorch or TensorFlow) per parameter, the same parameters in
                every step (in PyTorch ``[p.grad for p in model.parameters()]``), None for one without a gradient. None
                for the list leaves the variance 0, "not measured".
            example_losses: The losses whose mean ``loss`` is, one per example of the minibatch (in PyTorch
                ``cross_entropy(output, y, reduction="none")``); None to report no ``square-loss``.

        Raises:
            DeltaflError: If the number of gradients differs from the first step's.
        """
        square = None if example_losses is None else float(np.mean(_numpy(example_losses) ** 2))
        self._square_loss = None if square is None or self._square_loss is None else self._square_loss + square
        self._count += 1
        self._loss += float(loss)
        if gradients is None:
            return
        arrays = [None if gradient is None else _numpy(gradient) for gradient in gradients]
        if self._sums is None:
            self._sums = [None] * len(arrays)
        if len(arrays) != len(self._sums):
            raise DeltaflError(f"this step has {len(arrays)} gradients, the first had {len(self._sums)}")
        for i, array in enumerate(arrays):
            if array is None:  # frozen, or not used in this step: a gradient of zero
                continue
            self._square += float(np.sum(array**2))
            total = self._sums[i]
            self._sums[i] = array if total is None else total + array

    def metrics(self) -> dict[str, float | int]:
        """The statistics under the names that the server reads; put them into the reply's ``MetricRecord``.

        Raises:
            DeltaflError: If no step was counted.
        """
        if self._count == 0:
            raise DeltaflError("no local step was counted; call add() once per minibatch")
        count = self._count
        of_sum = sum(float(np.sum(total**2)) for total in self._sums or [] if total is not None)
        variance = self.lr**2 * (self._square / count - of_sum / count**2)
        # Not max(0, .): the NaN of a training that diverged must reach the server, which rejects the reply.
        variance = 0.0 if variance < 0 or count == 1 else variance
        squares = {} if self._square_loss is None else {SQUARE_LOSS: self._square_loss / count}
        return {LOSS: self._loss / count, **squares, STEP_VARIANCE: variance, NUM_STEPS: count}


def _numpy(numbers: Any) -> FloatArray:
    """Numbers as float64, from any device; PyTorch is recognised by its methods, not imported."""
    if hasattr(numbers, "detach"):
        # To the CPU before float64, which not every device has; NumPy knows no bfloat16.
        numbers = numbers.detach().to_dense().cpu().double()
    return np.asarray(numbers, dtype=np.float64)
