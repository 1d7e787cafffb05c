"""Metrics: by what the outputs of a model on test examples are judged.

A metric has a direction, and the name of the function in ``sklearn.metrics``, without ``_score``.
The outputs are logits or numbers, as the loss takes them; what they mean follows from the targets:

===========  ======================  =========================  ==================================
targets      y                       output                     probabilities
===========  ======================  =========================  ==================================
classes      (N,) 0, 1, ...          (N, classes) logits        softmax
binary       (N,) 0 or 1             (N,) or (N, 1) one logit   sigmoid
labels       (N, labels) 0.0 or 1.0  (N, labels) logits         sigmoid
numbers      any real                as y                       none
===========  ======================  =========================  ==================================

Of sequences of classes, y (N, ..., L) and outputs (N, classes, ..., L), each place counts as an
example. Places whose label the task's loss ignores, such as padding, do not count
(``Task.ignored``); a function of your own gets them, too.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getsourcefile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import OWN_ERRORS, DeltaflError, explained, in_one_line, printable, unknown_name
from ..model.arrays import as_array
from ..store.own_python import load_named, split_name
from ..streams import stream
from ..types import BoolArray, FloatArray, IntArray, Judge

Numbers = npt.NDArray[Any]
Function = Callable[[Any, Any], Any]
#: What is kept of the outputs of a batch: ``outputs``, or ``right``.
Look = Callable[[Numbers, Numbers], Numbers]

#: A perplexity, say, may be larger; records have no such numbers.
LARGEST_METRIC = 1e100

CLASSES = "classes"
BINARY = "binary"
LABELS = "labels"
NUMBERS = "numbers"


@dataclass(frozen=True)
class Metric(Judge):
    """A metric of test outputs.

    Attributes:
        name: As in records and tables.
        function: ``function(output, y)`` of all test examples: a number. Your own gets torch
            tensors, or NumPy arrays if it cannot take those.
        higher: Whether higher is better.
        share: Whether its values are shares between 0 and 1, which are shown as percent.
        written: The name in headings and sentences; ``name`` if empty.
        targets: For which targets it is known; all for your own.

    Example:
        >>> Metric("worst error", lambda output, y: abs(output - y).max(), higher=False).higher
        False
    """

    function: Function
    targets: tuple[str, ...] = field(default=(CLASSES, BINARY, LABELS, NUMBERS), kw_only=True)

    def __call__(self, output: Numbers, y: Numbers, ignored: Sequence[int] = ()) -> float:
        """The value; NaN where it is not defined, as an AUC of examples of one class, where an
        output is not finite, or where no record has room for it. A metric with a name leaves out
        the labels that are ``ignored``.

        Raises:
            DeltaflError: If the function fails, or returns no number.
        """
        # Of outputs that are not finite many functions return a number, and scikit-learn raises.
        if len(y) == 0 or not np.isfinite(output).all():
            return float("nan")
        with warnings.catch_warnings():  # of values that are not defined
            warnings.simplefilter("ignore")
            value = self._value(output, y, ignored)
        return value if abs(value) <= LARGEST_METRIC else float("nan")

    def _value(self, output: Numbers, y: Numbers, ignored: Sequence[int]) -> float:
        from .draws import seeded

        # A function may draw, as a bootstrap does: the same examples in every evaluation.
        with seeded(stream(0, "bootstrap")):
            return self._of_own(output, y)

    def _of_own(self, output: Numbers, y: Numbers) -> float:
        from .modules import torch

        faults = list[BaseException]()
        # Tensors first: functions for arrays often take these, too; seldom the other way round.
        # Copies, for the next metric gets them, too.
        for copy_of in (torch.tensor, np.array):
            try:
                return self._number(self.function(copy_of(output), copy_of(y)))
            except DeltaflError:
                raise
            except OWN_ERRORS as error:
                faults.append(error)
        why = " and of arrays ".join(dict.fromkeys(map(self._described, faults)))
        raise DeltaflError(
            f"the metric {self.name} failed on output {output.shape} and y {y.shape}: {why}"
        ) from faults[-1]

    def _number(self, value: Any) -> float:
        # What a mask hides, as of a mean over nothing, is no value.
        if np.ma.is_masked(value):
            return float("nan")
        found = as_array(value)
        if found.size != 1 or found.dtype.kind not in "biuf":
            raise DeltaflError(
                f"the metric {self.name} returned {value!r:.60}; it must return one number"
            )
        return float(found.item())

    def _described(self, error: BaseException) -> str:
        path = None
        with suppress(TypeError):  # an object that has no source
            path = getsourcefile(self.function)
        if path is None:
            return in_one_line(error)
        return in_one_line(error, Path(path)).replace("(line ", f"({Path(path).name} line ")


class _OfArrays(Metric):
    """A metric whose function takes arrays and returns floats."""

    def _value(self, output: Numbers, y: Numbers, ignored: Sequence[int]) -> float:
        output, y = _places(output, y, ignored)
        if len(y) == 0:
            return float("nan")
        with explained(f"the metric {self.name} failed on output {output.shape} and y {y.shape}"):
            return float(self.function(output, y))


#: A metric as people give it.
AnyMetric: TypeAlias = str | Metric | Function


def targets_of(y: Numbers, output_shape: Sequence[int], num_classes: int) -> str:
    """What the targets of a task are; ``output_shape`` is that of one example."""
    # Whole numbers in two dimensions are sequences of classes.
    if y.ndim == 2 and num_classes > 0 and y.dtype.kind == "f":
        return LABELS
    if num_classes == 0:
        return NUMBERS
    if tuple(output_shape) in ((), (1,)):
        return BINARY
    return CLASSES


def _places(
    output: Numbers,
    y: Numbers,
    ignored: Sequence[int] = (),
) -> tuple[Numbers, Numbers]:
    """Sequences of classes as single examples, (N L, classes) and (N L,), others as they are, but
    for those that are ignored.
    """
    if y.ndim > 1 and y.dtype.kind != "f" and output.ndim == y.ndim + 1:
        output = np.moveaxis(output, 1, -1).reshape(-1, output.shape[1])
        y = y.reshape(-1)
    if len(ignored) == 0:
        return output, y
    kept = counts(y, ignored)
    return output[kept], y[kept]


def counts(y: Numbers, ignored: Sequence[int]) -> BoolArray:
    """Which labels count: those that the loss does not ignore."""
    return ~np.isin(y, ignored)


def predicted(output: Numbers, y: Numbers) -> Numbers:
    """The class (or 0 and 1 for each label) that a model predicts: of one logit whether it is
    above 0.
    """
    if y.ndim == 2:
        return (output > 0).astype(np.int64)
    if output.ndim == 1 or output.shape[1:] == (1,):
        return (output.reshape(len(y)) > 0).astype(np.int64)
    return np.asarray(output.argmax(axis=1))


def log_odds(output: Numbers, y: Numbers) -> Numbers:
    """log(p / (1 - p)) of each class, (N, classes), also where they are two and the model has one
    logit; of each label (N, labels).

    They order examples as the probabilities p do, also those whose p rounds to 1.
    """
    from scipy.special import log_softmax, logsumexp

    wide = output.astype(np.float64)
    if y.ndim == 2:
        return wide
    if wide.ndim == 1 or wide.shape[1:] == (1,):
        logit = wide.reshape(len(y))
        return np.stack([-logit, logit], axis=1)
    first = np.arange(len(y)), wide.argmax(axis=1)
    others = wide.copy()
    others[first] = -np.inf
    log_p = log_softmax(wide, axis=1)
    # Of the most probable class 1 - p would lose its digits; it is the sum of the others.
    p = np.where(others > -np.inf, np.exp(log_p), 0)
    odds: Numbers = log_p - np.log1p(-p)
    odds[first] = wide[first] - logsumexp(others, axis=1)
    return odds


def right(output: Numbers, y: Numbers, ignored: Sequence[int] = ()) -> FloatArray:
    """Of each example whether it has the right class, or all labels right, 0 or 1; of a sequence
    the share of its places that is right. Places that are ignored count as wrong: see ``counts``.
    """
    if y.ndim > 1 and y.dtype.kind == "f":
        return np.asarray((predicted(output, y) == y).all(axis=1).astype(np.float64))
    single, label = _places(output, y)
    is_right = predicted(single, label) == label
    if len(ignored) > 0:
        is_right &= counts(label, ignored)
    return np.asarray(is_right.reshape(len(y), -1).mean(axis=1))


def outputs(output: Numbers, y: Numbers) -> Numbers:
    """The outputs as they are, for metrics that look at them."""
    return output


def accuracy(output: Numbers, y: Numbers) -> float:
    """The share of right classes; of labels the share of examples with all of them right."""
    return float(right(output, y).mean())


def balanced_accuracy(output: Numbers, y: Numbers) -> float:
    """The mean over the tested classes of the share that is right."""
    hit = predicted(output, y) == y
    return float(np.mean([hit[y == label].mean() for label in np.unique(y)]))


def log_loss(output: Numbers, y: Numbers) -> float:
    """The mean of -log p(y), over labels too."""
    from scipy.special import log_softmax

    wide = output.astype(np.float64)
    # Several logits an example: they are those of classes.
    if y.ndim == 1 and wide.size > len(y):
        log_p = log_softmax(wide, axis=1)
        return float(-log_p[np.arange(len(y)), y.astype(np.int64)].mean())
    # log(1 + exp(-z)) where y is 1: finite also where the probability rounds to 0.
    z = wide.reshape(y.shape)
    return float(np.logaddexp(0, np.where(y > 0, -z, z)).mean())


def _scikit_learn(name: str) -> Callable[..., Any]:
    """A function of ``sklearn.metrics``, which is optional and slow to import."""

    def score(y: Numbers, output: Numbers) -> Any:
        from sklearn import metrics

        return getattr(metrics, name)(y, output)

    return score


def _counts(found: Numbers, y: Numbers) -> tuple[IntArray, IntArray, IntArray]:
    """How often each class, or label, is there and predicted, there, and predicted."""
    if y.ndim == 2:
        is_there = y > 0
        is_found = found > 0
        marks = is_there & is_found, is_there, is_found
        hit_k, there_k, found_k = (np.count_nonzero(mark, axis=0) for mark in marks)
        return hit_k, there_k, found_k
    # By their places among those there are: of words a model knows more than occur.
    both = np.concatenate([y.astype(np.int64), found])
    classes, place = np.unique(both, return_inverse=True)
    there = place[: len(y)]
    hit_k, there_k, found_k = (
        np.bincount(places, minlength=len(classes))
        for places in (there[both[: len(y)] == found], there, place[len(y) :])
    )
    return hit_k, there_k, found_k


def _f1(average: str) -> Function:
    """F1 of each class or label, 2 hits / (predicted + there): of all together (``micro``), or the
    mean over those that are there or predicted, each as it is (``macro``) or by how often it is
    there (``weighted``). As ``f1_score`` has it, in a fiftieth of its time.
    """

    def f1(output: Numbers, y: Numbers) -> float:
        hit_k, there_k, found_k = _counts(predicted(output, y), y)
        both_k = there_k + found_k
        if average == "micro":
            return float(2 * hit_k.sum() / max(both_k.sum(), 1))
        # A label that is neither there nor predicted has 0.
        f1_k = 2 * hit_k / np.maximum(both_k, 1)
        if average == "macro":
            return float(f1_k.mean())
        return float(f1_k @ there_k / max(there_k.sum(), 1))

    return f1


def _in_order(is_one: Numbers, odds: Numbers) -> float:
    """The share of pairs, of an example with a class and one without, that are in the right order,
    ties by half (Mann and Whitney 1947): the area under the ROC curve.

    As ``roc_auc_score`` has it, in a fiftieth of its time: each client is asked for its own.
    """
    ones = np.count_nonzero(is_one)
    least = ones * (ones + 1) / 2
    return float((mean_ranks(odds)[is_one].sum() - least) / (ones * (len(odds) - ones)))


def mean_ranks(value_n: Numbers) -> FloatArray:
    """Ranks from 1 on; equal values share the mean of theirs."""
    _, place_n, count_k = np.unique(value_n, return_inverse=True, return_counts=True)
    rank_k: FloatArray = np.cumsum(count_k) - (count_k - 1) / 2
    return rank_k[place_n]


def _mean_over_classes(score: Function) -> Function:
    """A score of one class against the rest: for two classes that of class 1, else the plain mean
    over classes, or labels, that the examples have and lack.
    """

    def mean(output: Numbers, y: Numbers) -> float:
        odds = log_odds(output, y)
        one_hot = y > 0
        if y.ndim == 1:
            one_hot = y[:, None] == np.arange(odds.shape[1])
            if odds.shape[1] == 2:
                odds = odds[:, 1:]
                one_hot = one_hot[:, 1:]
        # A class that all examples have, or none, has no score.
        known = np.flatnonzero(one_hot.any(axis=0) & ~one_hot.all(axis=0))
        if len(known) == 0:
            return float("nan")
        return float(np.mean([score(one_hot[:, k], odds[:, k]) for k in known]))

    return mean


def _top(count: int) -> Function:
    def top(output: Numbers, y: Numbers) -> float:
        classes = output.shape[1]
        if count >= classes:
            raise DeltaflError(
                f"top_{count}_accuracy of {classes} classes is always 1; write a number below "
                "that of the classes"
            )
        # Of equal outputs those of lower classes count as higher, as ``argmax`` has it.
        own = output[np.arange(len(y)), y.astype(np.int64)][:, None]
        before = np.arange(classes) < y[:, None]
        above = (output > own) | ((output == own) & before)
        return float((above.sum(axis=1) < count).mean())

    return top


def _of_numbers(name: str, of_varying: bool = False) -> Function:
    """A score of numbers; with ``of_varying`` only of those whose targets are not all equal."""
    score = _scikit_learn(name)

    def of_numbers(output: Numbers, y: Numbers) -> float:
        if output.size != y.size:
            raise DeltaflError(
                f"{name} compares as many outputs as targets, and the output has shape "
                f"{output.shape}, y {y.shape}; name loss as the metric, or a function of (output, "
                "y) that knows which outputs are predictions"
            )
        # Columns are told apart, as scikit-learn does; places of a series or pixels are not.
        rows = len(y) if y.ndim <= 2 else y.size
        y_nk = y.reshape(rows, -1)
        output_nk = output.reshape(rows, -1)
        varies_k = (y_nk != y_nk[:1]).any(axis=0)
        # A part of no variance is rounding noise.
        if of_varying and not varies_k.all():
            y_nk = y_nk[:, varies_k]
            output_nk = output_nk[:, varies_k]
        if y_nk.size == 0:
            return float("nan")
        return float(score(y_nk, output_nk))

    return of_numbers


_SORTS = (CLASSES, BINARY)
_ALL = (CLASSES, BINARY, LABELS)


def _share(
    name: str,
    written: str,
    function: Function,
    targets: tuple[str, ...] = _ALL,
) -> Metric:
    return _OfArrays(name, function, share=True, targets=targets, written=written)


def _error(name: str, written: str) -> Metric:
    return _OfArrays(name, _of_numbers(name), higher=False, targets=(NUMBERS,), written=written)


def _mean_loss(output: Numbers, y: Numbers) -> float:
    raise DeltaflError("the loss is the task's own")


#: Every metric, by its name.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _OfArrays("accuracy", accuracy, targets=_ALL, share=True),
        _OfArrays("loss", _mean_loss, higher=False),
        _share("balanced_accuracy", "balanced accuracy", balanced_accuracy, _SORTS),
        _share("f1_macro", "macro F1", _f1("macro")),
        _share("f1_micro", "micro F1", _f1("micro")),
        _share("f1_weighted", "weighted F1", _f1("weighted")),
        _share("roc_auc", "ROC AUC", _mean_over_classes(_in_order)),
        _share(
            "average_precision",
            "average precision",
            _mean_over_classes(_scikit_learn("average_precision_score")),
        ),
        _OfArrays("log_loss", log_loss, higher=False, targets=_ALL, written="log loss"),
        _error("root_mean_squared_error", "RMSE"),
        _error("mean_absolute_error", "MAE"),
        _OfArrays("r2", _of_numbers("r2_score", of_varying=True), targets=(NUMBERS,), written="R2"),
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


def metrics_of(given: "AnyMetric | Iterable[AnyMetric]") -> tuple[Metric, ...]:
    """One metric or several, also as ``"roc_auc,accuracy"``; the first is *the* metric.

    Raises:
        DeltaflError: If there is no such metric, or one is there twice.
    """
    if callable(given):
        parts: list[Any] = [given]
    elif isinstance(given, str):
        parts = given.split(",")
    elif isinstance(given, Sequence):
        parts = [*given]
    else:
        parts = []
    if not parts or "" in parts:
        raise DeltaflError(
            f"metric is {given!r:.60}; it must be a name, a deltafl.Metric, a function of (output, "
            "y), or a list of them"
        )
    metrics = tuple(map(metric_of, parts))
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise DeltaflError(f"the metric {name} is named twice; name each once")
    return metrics


def metric_of(given: AnyMetric) -> Metric:
    """A metric by its name (any spelling of scikit-learn's), as ``FILE.py:FUNCTION``, or your own
    function.

    A function of your own has the name it was defined by, and higher is better; write a ``Metric``
    for anything else.

    Raises:
        DeltaflError: If there is no such metric.
    """
    if isinstance(given, Metric):
        return _with_own_name(given)
    if callable(given):
        known = getattr(given, "__name__", "").removesuffix("_score")
        if _is_of_scikit_learn(given) and known in METRICS:
            return METRICS[known]
        # The name of a lambda, or of an object's class, says nothing in a table.
        if given.__class__.__name__ == "function" and given.__name__ != "<lambda>":
            return _with_own_name(Metric(given.__name__, given))
        raise DeltaflError(
            f"metric is {given!r}, which has no name; write Metric('name', it, higher=True)"
        )
    text = str(given).strip()
    if ".py:" in text:
        return _from_file(text)
    name = text.lower().replace("-", "_").replace(" ", "_").removesuffix("_score")
    name = _SAME.get(name, name)
    top = _TOP.fullmatch(name)
    if top is not None:
        count = int(top[1])
        name = f"top_{count}_accuracy"
        return _share(name, f"top-{count} accuracy", _top(count), (CLASSES,))
    if name not in METRICS:
        raise unknown_name("metric", str(given), [*METRICS, "top_3_accuracy", "FILE.py:FUNCTION"])
    return METRICS[name]


def is_of_library(name: str) -> bool:
    """Whether records mean a metric of the library by this name; other spellings of it are a
    user's.
    """
    if ".py:" in name:
        return False
    with suppress(DeltaflError):
        return metric_of(name).name == name
    return False


def _is_of_scikit_learn(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("sklearn.metrics")


def _from_file(text: str) -> Metric:
    file, name = split_name(text)
    found = load_named(text, "--metric FILE.py:FUNCTION")
    if isinstance(found, Metric):
        return _with_own_name(found)
    if not callable(found):
        raise DeltaflError(f"{file} has no function {name!r}, nor a deltafl.Metric of this name")
    return _with_own_name(Metric(name, found))


def _with_own_name(metric: Metric) -> Metric:
    """The metric, whose name must not be taken, and stands in tables, pictures and files."""
    # Settings leave out blanks at the ends.
    if not metric.name or printable(metric.name, limit=60).strip() != metric.name:
        raise DeltaflError(
            f"your metric is called {printable(repr(metric.name))}; write a name of 1 to 60 "
            "letters that can be seen, without blanks at its ends"
        )
    if _is_of_scikit_learn(metric.function):
        name = getattr(metric.function, "__name__", "it")
        raise DeltaflError(
            f"sklearn.metrics.{name} takes (y, output), and a metric (output, y); write "
            f"Metric({metric.name!r}, lambda output, y: {name}(y, output), higher=True), or False"
        )
    for option in ("higher", "share"):
        given = getattr(metric, option)
        if not isinstance(given, bool):
            raise DeltaflError(
                f"{option} of your metric {metric.name} is {given!r}; write True or False"
            )
    if not isinstance(metric, _OfArrays) and is_of_library(metric.name):
        raise DeltaflError(
            f"your metric is called {metric.name!r}, which means something else in records; give "
            "it another name"
        )
    return metric
