"""Metrics and a loss judge some test examples, before an experiment starts.

Every mistake is one sentence.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import isclose, isnan, prod, sqrt
from reprlib import repr as shown

import numpy as np

from ...errors import OWN_ERRORS, DeltaflError, counted
from ...model.arrays import as_array, copied
from ...types import Array, IntArray, Rng
from ..base import Task, model_inputs, spread_examples
from ..losses import Module
from ..metrics import CLASSES, METRICS, NUMBERS, Metric, Numbers, is_of_library, targets_of
from .trying import loss_or_nan, tried

#: Metrics that are wrong for probabilities; others look at the order of examples alone.
_OF_LOGITS = (
    "accuracy",
    "balanced_accuracy",
    "f1_macro",
    "f1_micro",
    "f1_weighted",
    "log_loss",
)
#: Of three classes or more, what a softmax makes of probabilities has another order than they.
_OF_ORDER = ("roc_auc", "average_precision")
#: Columns of a table of which the smallest and the largest number are tried.
_TRIED_COLUMNS = 256
#: How often a metric of the user's own is tried: by chance two draws may agree.
_OWN_CALLS = 4


def check_metrics(task: Task, model: Module, rng: Rng) -> None:
    """Judge the outputs of a model in evaluation on some test examples; where these have no value,
    as many as there are test examples, then random ones.
    """
    from ..modules import torch

    if {metric.name for metric in task.metrics} == {"loss"}:
        return
    data = task.dataset
    x, some = spread_examples(task)
    y = as_array(some)
    with torch.no_grad():
        what = f"the model failed on {counted(len(x), 'test example')}"
        output = as_array(tried(what, lambda: model(x)))
    targets = targets_of(y, output.shape[1:], data.num_classes)
    if _are_shares(output):
        _check_logits(task, model, x, targets)
    shape = (len(data.test_y), *output.shape[1:])

    def tries() -> Iterator[tuple[Numbers, Numbers]]:
        yield output, y
        # Some examples may lack a class; all of them must not.
        yield np.resize(output, shape), data.test_y
        # A new model may answer the same to all, as one whose head begins at 0.
        yield np.asarray(rng.normal(size=shape), np.float32), data.test_y

    for metric in task.metrics:
        if targets not in metric.targets:
            known = [other.name for other in METRICS.values() if targets in other.targets]
            raise DeltaflError(
                f"metric is {metric.name}, which is not for {targets}; choose one of "
                f"{', '.join(known)}"
            )
        if np.isinf(output).any() and metric.name not in ("accuracy", "loss"):
            raise DeltaflError(
                "the model's outputs are infinite on some test examples, as where a mask rules "
                f"out a class, and {metric.heading} takes finite numbers: write -1e9 in place of "
                "-inf"
            )
        if metric.name != "loss" and np.isfinite(output).all():
            _require_value(metric, tries(), task.ignored)


def _require_value(
    metric: Metric,
    tries: Iterable[tuple[Numbers, Numbers]],
    ignored: Sequence[int],
) -> None:
    """Refuse a metric that has no value on any of the outputs and targets, or several."""
    faults = []
    calls = 1 if is_of_library(metric.name) else _OWN_CALLS
    for output, y in tries:
        try:
            value, *others = (metric(output, y, ignored) for _ in range(calls))
        except DeltaflError as fault:
            faults.append(fault)
            continue
        for other in others:
            if not isclose(other, value, rel_tol=1e-6) and not isnan(value):
                raise DeltaflError(
                    f"{metric.heading} is {value:g} and then {other:g} of the same outputs; let it "
                    "draw from torch, numpy.random or random, which are seeded, and remember "
                    "nothing"
                )
        if not isnan(value):
            return
    if faults:
        raise faults[0]
    raise DeltaflError(
        f"{metric.heading} has no value on these {len(y)} test examples, such as of a single "
        "class, with one target for all, or with a target of 0 by which it divides; choose another "
        "metric, or other test examples"
    )


def _check_logits(task: Task, model: Module, x: Numbers, targets: str) -> None:
    """Refuse probabilities where metrics take logits."""
    names = [metric.name for metric in task.metrics if metric.name in _OF_LOGITS]
    layer = "Sigmoid"
    right_loss = "BCEWithLogitsLoss"
    if targets == CLASSES:
        # The largest output is the same class, and of two classes the order is the same.
        wrong = ["log_loss"]
        if task.dataset.num_classes != 2:
            wrong += _OF_ORDER
        names = [metric.name for metric in task.metrics if metric.name in wrong]
        layer = "Softmax"
        right_loss = "CrossEntropyLoss"
    if names and targets != NUMBERS and _answers_probabilities(model, x):
        raise DeltaflError(
            "the model's outputs are probabilities, between 0 and 1 whatever it has learnt, and "
            f"{names[0]} takes logits: leave out the {layer} at its end and use {right_loss}, or "
            "give a metric of your own"
        )


def _answers_probabilities(model: Module, x: Numbers) -> bool:
    """Whether outputs stay between 0 and 1 whatever the parameters are, as after a Sigmoid."""
    from ..modules import torch

    tried = copied(model).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for _ in range(3):
            for parameter in tried.parameters():
                # So large that what is linear leaves the interval, and of a size that lasts.
                size = 3 / sqrt(max(1, prod(parameter.shape[1:])))
                drawn = rng.normal(size=tuple(parameter.shape), scale=size)
                parameter.copy_(torch.tensor(drawn, dtype=parameter.dtype))
            try:
                output = as_array(tried(x))
            except OWN_ERRORS:  # some models do not take any parameters
                return False
            if not _are_shares(output):
                return False
    return True


def _are_shares(output: Numbers) -> bool:
    return bool(((output >= 0) & (output <= 1)).all())


def check_ends(task: Task, model: Module) -> None:
    """Look at the examples with the smallest and the largest token or class, or number of a column,
    which a model, or a loss, may not know.
    """
    data = task.dataset
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        row_n = _end_rows(task, x, y)
        try:
            _judge_some(task, model, x[row_n], y[row_n])
        except DeltaflError:
            # One by one, to name it.
            for row in row_n.tolist():
                what = f"{part}_x[{row}], which has numbers from {x[row].min()} to {x[row].max()}"
                of_loss = f"{part}_y[{row}], {shown(y[row])}"
                _judge_some(task, model, x[[row]], y[[row]], what, of_loss)


def _end_rows(task: Task, x: Array, y: Array) -> IntArray:
    """The rows with the smallest and the largest numbers of tokens, of classes, and of each column
    of a table, for a column may be a category that an Embedding takes.
    """
    whole = [x] if task.tokens else []
    if y.dtype.kind in "iu":
        whole.append(y)
    row_k = [
        place // (values.size // len(values))
        for values in whole
        for place in (values.argmin(), values.argmax())
    ]
    if x.ndim == 2 and x.shape[1] <= _TRIED_COLUMNS:
        row_k += [*x.argmin(axis=0), *x.argmax(axis=0)]
    return np.unique(np.array(row_k, np.int64))


def _judge_some(
    task: Task,
    model: Module,
    x: Array,
    y: Array,
    what: str = "",
    of_loss: str = "",
) -> None:
    """Evaluate the model on some examples, which are named where it, or the loss, fails."""
    from ..modules import torch

    if len(x) == 0:
        return
    with torch.no_grad():
        some = model_inputs(task, torch.tensor(x))
        output = tried(f"the model failed on {what}", partial(model, some))
        loss = partial(task.loss, output, torch.tensor(y))
        tried(f"the loss failed on {of_loss}", loss)


def check_loss(task: Task, shape: tuple[int, ...]) -> None:
    """Refuse a loss whose values are right numbers of another thing, so that nothing is learnt, or
    judged: on outputs that are made up, of the ``shape`` of those of two examples.
    """
    from ..modules import torch

    y_e = task.dataset.train_y
    differs_e = (y_e != y_e[:1]).reshape(len(y_e), -1).any(axis=1)
    # Of equal targets any pairs are right.
    y = torch.tensor(y_e[[0, int(differs_e.argmax())]])
    size = int(np.prod(shape))
    # They may be probabilities, too.
    output = torch.linspace(0.2, 0.7, size).reshape(shape)
    # A loss may be small.
    is_close = partial(np.isclose, rtol=1e-4, atol=0)

    loss = partial(loss_or_nan, task.loss)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if shape != y.shape and size == y.numel():
            # Each output with each target, as PyTorch does with (B, 1) and (B,).
            whole = loss(output, y)
            # Of each output with each target.
            loss_jk = [[loss(output[j : j + 1], y[k : k + 1]) for k in range(2)] for j in range(2)]
            alone = np.trace(loss_jk) / 2
            crossed = np.mean(loss_jk)
            in_pairs = loss(output.reshape(y.shape), y)
            # A loss of pairs of examples is none of each alone, nor of all combinations.
            is_crossed = is_close(whole, crossed) and not is_close(alone, whole)
            if is_close(alone, in_pairs) and is_crossed:
                raise DeltaflError(
                    f"the loss compares each output {shape} with each y {tuple(y.shape)}, not "
                    "with its own; give both one shape, as output.squeeze(-1) does where the "
                    "output is a column, or output.reshape(y.shape)"
                )
        # Whole numbers in two dimensions are sequences of classes.
        are_labels = y_e.ndim == 2 and y_e.dtype.kind == "f" and task.dataset.num_classes > 0
        is_one_hot = are_labels and (y_e.sum(axis=1) == 1).all()
        # Others look at the order of outputs alone.
        is_cut = any(metric.name == "accuracy" or "f1" in metric.name for metric in task.metrics)
        # Labels have losses of their own; the cross-entropy only looks at differences.
        if is_one_hot and is_cut and is_close(loss(output, y), loss(output + 1, y)):
            raise DeltaflError(
                "each row of train_y has a single 1, and the loss compares classes, as the "
                "cross-entropy does, but several labels a row are judged one by one, by whether "
                "the output is above 0; give the classes: train_y.argmax(1), test_y.argmax(1)"
            )
