"""Metrics: by what the outputs of a model on test examples are judged.

A metric has a direction, and the name of the function in ``sklearn.metrics``, without ``_score``.
The outputs are logits or numbers, as the loss takes them; what they mean follows from the targets:

===========  ======================  =========================  ==================================
targets      y                       output                     probabilities
===========  ======================  =========================  ==================================
classes      (N,) 0, 1, ...          (N, classes) logits        softmax
binary       (N,) 0 or 1             (N,) or (N, 1) one logit   sigmoid
labels       (N, labels) 0 or 1      (N, labels) logits         sigmoid
numbers      any real                as y                       none
===========  ======================  =========================  ==================================
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_softmax, softmax
from sklearn import metrics as sk

from ..errors import DeltaflError, unknown_name

Numbers = npt.NDArray[Any]
Function = Callable[[Any, Any], Any]

CLASSES = "classes"
BINARY = "binary"
LABELS = "labels"
NUMBERS = "numbers"


@dataclass(frozen=True)
class Metric:
    """A metric of test outputs.

    Attributes:
        name: As in records and tables.
        function: ``function(output, y)`` of all test examples: a number. Your own gets torch
            tensors, or NumPy arrays if it cannot take those.
        higher: Whether higher is better.
        targets: For which targets it is known; all for your own.
        share: Whether its values are shares between 0 and 1, which are shown as percent.

    Example:
        >>> Metric("worst error", lambda output, y: abs(output - y).max(), higher=False).higher
        False
    """

    name: str
    function: Function
    higher: bool = True
    targets: tuple[str, ...] = (CLASSES, BINARY, LABELS, NUMBERS)
    share: bool = False

    def __call__(self, output: Numbers, y: Numbers) -> float:
        """The value; NaN where it is not defined, as an AUC of examples of one class."""
        if len(y) == 0:
            return float("nan")
        return float(self.function(output, y))


def targets_of(y: Numbers, output_shape: Sequence[int], num_classes: int) -> str:
    """What the targets of a task are; ``output_shape`` is that of one example."""
    if y.ndim == 2 and num_classes > 0:
        return LABELS
    if num_classes == 0:
        return NUMBERS
    if tuple(output_shape) in ((), (1,)):
        return BINARY
    return CLASSES


def predicted(output: Numbers, y: Numbers) -> Numbers:
    """The class (or 0 and 1 for each label) that a model predicts: of one logit whether it is
    above 0.
    """
    if y.ndim == 2:
        return (output > 0).astype(np.int64)
    if output.ndim == 1 or output.shape[1:] == (1,):
        return (output.reshape(len(y)) > 0).astype(np.int64)
    return np.asarray(output.argmax(axis=1))


def probabilities(output: Numbers, y: Numbers) -> Numbers:
    """(N, classes) of classes, also where they are two and the model has one logit; (N, labels) of
    labels.
    """
    wide = output.astype(np.float64)
    if y.ndim == 2:
        return np.asarray(expit(wide))
    if wide.ndim == 1 or wide.shape[1:] == (1,):
        logit = wide.reshape(len(y))
        return np.stack([expit(-logit), expit(logit)], axis=1)
    return np.asarray(softmax(wide, axis=1))


def accuracy(output: Numbers, y: Numbers) -> float:
    """The share of right classes; of labels the share of examples with all of them right."""
    right = predicted(output, y) == y
    return float(right.reshape(len(y), -1).all(axis=1).mean())


def balanced_accuracy(output: Numbers, y: Numbers) -> float:
    """The mean over the tested classes of the share that is right."""
    hit = predicted(output, y) == y
    return float(np.mean([hit[y == label].mean() for label in np.unique(y)]))


def log_loss(output: Numbers, y: Numbers) -> float:
    """The mean of -log p(y), over labels too."""
    wide = output.astype(np.float64)
    # Several logits an example: they are those of classes.
    if y.ndim == 1 and wide.size > len(y):
        log_p = log_softmax(wide, axis=1)
        return float(-log_p[np.arange(len(y)), y.astype(np.int64)].mean())
    # log(1 + exp(-z)) where y is 1: finite also where the probability rounds to 0.
    z = wide.reshape(y.shape)
    return float(np.logaddexp(0, np.where(y > 0, -z, z)).mean())


def _f1(average: str) -> Function:
    def f1(output: Numbers, y: Numbers) -> float:
        return float(
            sk.f1_score(y.astype(np.int64), predicted(output, y), average=average, zero_division=0)
        )

    return f1


def _mean_over_classes(score: Function) -> Function:
    """A score of one class against the rest: for two classes that of class 1, else the plain mean
    over classes, or labels, that the examples have and lack.
    """

    def mean(output: Numbers, y: Numbers) -> float:
        p = probabilities(output, y)
        one_hot = y > 0
        if y.ndim == 1:
            one_hot = y[:, None] == np.arange(p.shape[1])
            if p.shape[1] == 2:
                p = p[:, 1:]
                one_hot = one_hot[:, 1:]
        # A class that all examples have, or none, has no score.
        known = np.flatnonzero(one_hot.any(axis=0) & ~one_hot.all(axis=0))
        if len(known) == 0:
            return float("nan")
        return float(np.mean([score(one_hot[:, k], p[:, k]) for k in known]))

    return mean


def _top(count: int) -> Function:
    def top(output: Numbers, y: Numbers) -> float:
        # Of equal outputs those of lower classes count as higher, as ``argmax`` has it.
        own = output[np.arange(len(y)), y.astype(np.int64)][:, None]
        before = np.arange(output.shape[1]) < y[:, None]
        above = (output > own) | ((output == own) & before)
        return float((above.sum(axis=1) < count).mean())

    return top


def _of_numbers(score: Function) -> Function:
    return lambda output, y: score(y.reshape(len(y), -1), output.reshape(len(y), -1))


_SORTS = (CLASSES, BINARY)
_ALL = (CLASSES, BINARY, LABELS)

#: Every metric, by its name.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, targets=_ALL, share=True),
        Metric("balanced_accuracy", balanced_accuracy, targets=_SORTS, share=True),
        Metric("f1_macro", _f1("macro"), targets=_ALL, share=True),
        Metric("f1_micro", _f1("micro"), targets=_ALL, share=True),
        Metric("f1_weighted", _f1("weighted"), targets=_ALL, share=True),
        Metric("roc_auc", _mean_over_classes(sk.roc_auc_score), targets=_ALL, share=True),
        Metric(
            "average_precision",
            _mean_over_classes(sk.average_precision_score),
            targets=_ALL,
            share=True,
        ),
        Metric("log_loss", log_loss, higher=False, targets=_ALL),
        Metric(
            "root_mean_squared_error",
            _of_numbers(sk.root_mean_squared_error),
            higher=False,
            targets=(NUMBERS,),
        ),
        Metric(
            "mean_absolute_error",
            _of_numbers(sk.mean_absolute_error),
            higher=False,
            targets=(NUMBERS,),
        ),
        Metric("r2", _of_numbers(sk.r2_score), targets=(NUMBERS,)),
    )
}
#: Other names that people type.
_SAME = {
    "auc": "roc_auc",
    "auroc": "roc_auc",
    "f1": "f1_macro",
    "macro_f1": "f1_macro",
    "rmse": "root_mean_squared_error",
    "mae": "mean_absolute_error",
    "neg_log_loss": "log_loss",
    "neg_root_mean_squared_error": "root_mean_squared_error",
    "neg_mean_absolute_error": "mean_absolute_error",
    "roc_auc_ovr": "roc_auc",
    "top_k_accuracy": "top_2_accuracy",
}
_TOP = re.compile(r"top_?([1-9]\d?)(_accuracy)?")


def metric_of(given: "str | Metric | Function") -> Metric:
    """A metric by its name (any spelling of scikit-learn's), or your own function.

    A function of your own has the name it was defined by, and higher is better; write a ``Metric``
    for anything else.

    Raises:
        DeltaflError: If there is no such metric.
    """
    if isinstance(given, Metric):
        return given
    if callable(given):
        # The name of a lambda, or of an object's class, says nothing in a table.
        if given.__class__.__name__ == "function" and given.__name__ != "<lambda>":
            return Metric(given.__name__, given)
        raise DeltaflError(
            f"metric is {given!r}, which has no name; write Metric('name', it, higher=True)"
        )
    name = str(given).strip().lower().replace("-", "_").replace(" ", "_").removesuffix("_score")
    name = _SAME.get(name, name)
    top = _TOP.fullmatch(name)
    if top is not None:
        count = int(top[1])
        return Metric(f"top_{count}_accuracy", _top(count), targets=(CLASSES,), share=True)
    if name not in METRICS:
        raise unknown_name("metric", str(given), [*METRICS, "top_3_accuracy", "file.py:function"])
    return METRICS[name]
