"""In which passes examples are judged, and what the loss of a pass counts in that of all."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import OWN_ERRORS
from ...model.arrays import copied
from ...tasks.base import Task, first_examples, spread, spread_examples, varied_targets
from ...tasks.draws import seeded
from ...tasks.losses import Loss
from .serial import losses_of
from .sizes import numbers_per_example, outputs_per_example

#: Examples in one pass: fixed, so that sums do not depend on the number of workers.
_EXAMPLES = 500
#: Numbers of all layers in one pass on a GPU, or of a loss that is no mean: 2 GiB.
_LAYER_NUMBERS = 2**29
#: Numbers that a model answers in any pass.
_OUTPUT_NUMBERS = 2**29
#: Numbers in the outputs on which a loss is tried.
_TRIED_NUMBERS = 2**22


class Passes(NamedTuple):
    """How the examples of a test set, or of a client, are judged in parts."""

    size: int  #: examples in one pass
    is_mean: bool = True  #: whether a loss is the mean of those of passes, or of all outputs
    ignored: tuple[int, ...] = ()  #: labels that take no part in that mean

    def weight(self, y: Tensor) -> int:
        """What the loss of a pass counts in the mean: its examples, or its labels that count."""
        if not self.ignored:
            return len(y)
        return int((~torch.isin(y, y.new_tensor(self.ignored))).sum())


def passes_of(model: nn.Module, task: Task, device: torch.device) -> Passes:
    """The passes in which a task's examples are judged on a device."""
    size = _EXAMPLES
    outputs = outputs_per_example(model, task)
    ignored = _left_out(model, task, _TRIED_NUMBERS // outputs)
    # A GPU idles between small passes; a loss of all outputs has them from one, while it is small.
    if device.type != "cpu" or ignored is None:
        size = max(size, _LAYER_NUMBERS // numbers_per_example(model, task))
    # Of a language model one text has an output for each word and place.
    size = max(1, min(size, _OUTPUT_NUMBERS // outputs))
    return Passes(_without_single(size, model, task), ignored is not None, ignored or ())


def _without_single(size: int, model: nn.Module, task: Task) -> int:
    """The number of examples in a pass, or the next lower one that leaves no last example alone,
    where the model does not take it: such as one that normalises by the batch.
    """
    counts = {len(task.dataset.test_x), *map(len, task.client_rows)}
    if all(count % size != 1 for count in counts):
        return size
    with torch.no_grad(), seeded(np.random.default_rng(0)):
        try:
            copied(model).eval()(first_examples(task, 1)[0])
        except OWN_ERRORS:
            for fewer in range(size, 1, -1):
                if all(count % fewer != 1 for count in counts - {1}):
                    return fewer
    return size


def _left_out(model: nn.Module, task: Task, most: int) -> tuple[int, ...] | None:
    """The labels without a part in the loss, where it is a mean over all others, or over examples:
    then parts of a test set may be judged apart. None if it is no such mean, as with weights of
    classes.

    It is tried on the model's outputs and on random ones, for a new model may answer the same to
    all, as one whose head begins at 0; on at most ``most`` examples.
    """
    # All of them: a single label that is ignored takes part in no mean.
    targets = (task.dataset.train_y, task.dataset.test_y)
    if all(losses_of(task.loss, torch.tensor(y.copy())) is not None for y in targets):
        return ()
    x, y = spread_examples(task)
    some = spread(len(x), max(2, most))
    x, y = x[some], y[some]
    tried = []
    try:
        with torch.no_grad(), seeded(np.random.default_rng(0)):
            output = copied(model).eval()(x)
            tried.append((output, y))
            varied = varied_targets(task, most)
            shape = (len(varied), *output.shape[1:])
            # They may be probabilities, and no numbers below 0.
            for made_up in (torch.empty(shape).uniform_(0.2, 0.7), torch.randn(shape)):
                tried.append((made_up.to(output.dtype), varied))
            # Some losses are means over texts, each of which is a mean over its words.
            for ignored in {(): None, task.ignored: None}:
                if all(_is_mean_of(task.loss, *one, ignored) for one in tried):
                    return ignored
    except OWN_ERRORS:  # a client's training will say what is wrong
        return ()
    return None


def _is_mean_of(loss: Loss, output: Tensor, y: Tensor, ignored: tuple[int, ...]) -> bool:
    """Whether the loss of these outputs is the mean of the loss of each, by the number of its
    labels that are not ignored; yes where it has no value.
    """

    def of(part: slice | Tensor) -> float:
        # Copies: a loss may change in place what it gets.
        return float(loss(output[part].clone(), y[part].clone()))

    whole = of(slice(None))
    counted_e = ~torch.isin(y, y.new_tensor(ignored)).reshape(len(y), -1)
    weight_e = counted_e.sum(dim=1).numpy()
    # One by one: in parts with equal shares of the classes their weights would not show.
    try:
        each = np.array([of(slice(row, row + 1)) for row in np.flatnonzero(weight_e)])
    except OWN_ERRORS:  # such as one of pairs
        return False
    if not np.isfinite(whole):
        return True
    if not np.isfinite(each).all():
        return False
    # Where gains and losses cancel each other, digits are lost.
    lost = 1e-6 * np.abs(each).mean()
    mean = np.average(each, weights=weight_e[weight_e > 0])
    return bool(np.isclose(mean, whole, rtol=1e-4, atol=lost))
