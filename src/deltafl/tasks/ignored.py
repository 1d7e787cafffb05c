"""Which labels a loss ignores, such as those of padding: it is tried, for it may be anybody's."""

import warnings
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import OWN_ERRORS
from ..types import Array, BoolArray, FloatArray, Rng
from .losses import Loss, binary_cross_entropy, cross_entropy, squared_error

Shape = tuple[int, ...]

#: Of the outputs on which a loss is tried: 16 MiB.
_TRIED_NUMBERS = 2**22
#: Places of each axis of a sequence or picture; two are too few where a loss compares neighbours.
_PLACES = 4
#: Examples of a label that a loss seems to ignore: some losses take only the hardest, or draw.
_EXAMPLES = 8
#: Outputs between 0 and 1 are multiplied and moved: probabilities, logarithms of them, and logits
#: of a model that is sure.
_KINDS = ((1, 0), (1, -1), (20, -10))


def ignored_labels(loss: Loss, y: Array, num_classes: int) -> tuple[int, ...]:
    """The labels in ``y`` that a loss of classes ignores: whatever the output is there, the loss
    is the same. Of padding the label is -100 by PyTorch's custom, or another ``ignore_index``.

    Of tens of thousands of classes only the commonest are tried, and the one that the loss names.
    """
    label_e = y.reshape(-1)
    is_class_e = (label_e >= 0) & (label_e < num_classes)
    others = np.unique(label_e[~is_class_e]).tolist()
    if loss in (cross_entropy, binary_cross_entropy, squared_error):
        return tuple({-100} & {*others})
    count_c = np.bincount(label_e[is_class_e], minlength=num_classes)
    classes = np.argsort(-count_c, kind="stable")
    named = ignore_index(loss)
    for trial in _trials(loss, y, num_classes):
        tried = classes[: trial.most].tolist()
        if named is not None and 0 <= named < num_classes:
            tried.append(named)
        found = trial.ignored([*dict.fromkeys([*tried, *others])])
        # A loss that nothing moves ignores no label: what is wrong with it is said elsewhere.
        if found is not None:
            return found
    return ()


def ignore_index(loss: Loss) -> int | None:
    """The label that a loss ignores by its own words, also as an option of a ``partial``."""
    options = getattr(loss, "keywords", {})
    named: Any = getattr(loss, "ignore_index", options.get("ignore_index"))
    return named if isinstance(named, int) else None


def _trials(loss: Loss, y: Array, num_classes: int) -> "Iterator[_Trial]":
    """The shapes of outputs on which a loss may be tried, the likeliest first."""
    places = y.shape[1:]
    few = tuple(min(size, _PLACES) for size in places)
    # Few places are quick, and a loss seldom asks how many there are.
    yield _Trial(loss, (num_classes,), few)
    if few != places:
        yield _Trial(loss, (num_classes,), places)
    # One logit: a loss of two fails on it, or is moved by it.
    if num_classes == 2 and not places:
        yield _Trial(loss, (), ())
        yield _Trial(loss, (1,), ())


class _Trial(NamedTuple):
    """A loss, and the shape of the outputs on which it is tried."""

    loss: Loss
    shape: Shape  #: of the output at a place: (classes,), or that of one logit
    places: Shape  #: of the label of an example

    @property
    def most(self) -> int:
        """The number of examples at once."""
        return max(2, _TRIED_NUMBERS // (prod(self.shape) * prod(self.places)))

    def ignored(self, labels: list[int]) -> tuple[int, ...] | None:
        """Which of these labels never move the loss; None if none of them does."""
        from .draws import seeded

        rng = np.random.default_rng(0)
        with seeded(rng), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in _KINDS:
                # So far from right that no margin is kept, where a loss asks for one.
                moves = self._moves(labels, np.full(len(labels), 0.1), kind, rng)
                if moves.any():
                    counted = labels[int(moves.argmax())]
                    still = (label for label, does in zip(labels, moves, strict=True) if not does)
                    return tuple(one for one in still if not self._ever_moves(one, counted, rng))
        return None

    def _ever_moves(self, label: int, counted: int, rng: Rng) -> bool:
        """Whether examples of a label move the loss alone, or beside some of a label that counts: a
        loss may take only the hardest of a minibatch, or only the easiest, or drop some.
        """
        size = min(_EXAMPLES, max(2, self.most // 2))
        low_n = np.linspace(0, 0.1, size)
        high_n = np.linspace(0.9, 1, size)
        both = [label] * size + [counted] * size
        for kind in _KINDS:
            for labels, right_n in (
                (both[:size], np.linspace(0, 1, size)),
                (both, np.concatenate([low_n, high_n])),
                (both, np.concatenate([high_n, low_n])),
            ):
                if self._moves(labels, right_n, kind, rng)[:size].any():
                    return True
        return False

    def _moves(
        self,
        labels: list[int],
        right_n: FloatArray,
        kind: tuple[int, int],
        rng: Rng,
    ) -> BoolArray:
        """Whether the loss depends on the output of each example; no where it fails. An example has
        its label at all places, and there ``right_n`` is the output, before it is made one of the
        kind.
        """
        from .modules import torch

        factor, shift = kind
        output_nc = rng.uniform(0.2, 0.7, (len(labels), prod(self.shape)))
        for output_c, label, right in zip(output_nc, labels, right_n, strict=True):
            if len(output_c) == 1:
                output_c[0] = right
            elif 0 <= label < len(output_c):
                output_c[label] = right
        shape = (len(labels), *self.shape)
        one = [1] * len(self.places)
        numbers = torch.tensor(factor * output_nc + shift, dtype=torch.float32)
        output = numbers.reshape(*shape, *one).repeat(*[1] * len(shape), *self.places)
        y = torch.tensor(labels).reshape(-1, *one).repeat(1, *self.places)
        with torch.enable_grad():
            output.requires_grad_()
            try:
                # A copy, for a loss may change in place what it gets.
                loss = self.loss(output.clone(), y)
                (gradient,) = torch.autograd.grad(loss, output)
            except OWN_ERRORS:
                return np.zeros(len(labels), bool)
        moved = (gradient != 0) & gradient.isfinite()
        return np.asarray(moved.reshape(len(labels), -1).any(dim=1).numpy())
