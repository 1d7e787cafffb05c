"""What a task must have: arrays, clients, a model and a loss that take a step, metrics that judge.

Every mistake is one sentence, before an experiment starts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import DeltaflError, is_in
from ...model.arrays import copied
from ...streams import stream
from ..base import Task, first_examples
from ..dataset import Dataset
from ..ignored import ignore_index
from ..losses import Module, Tensor
from ..metrics import counts
from ..models import without_one_output
from ..partitions import are_rows
from .judges import check_ends, check_loss, check_metrics
from .models import check_state, check_step, made_model
from .trying import OTHER_TARGETS, loss_or_nan, require_that, tried


def check_task(task: Task, name: str, seed: int, try_out: bool = True) -> None:
    """Check arrays, clients, model and loss of a task; the last two, if they are tried out, by one
    step on two examples.

    Torch's generator is seeded by the experiment's seed for the smoke test, and restored.

    Raises:
        DeltaflError: For the first mistake; it starts with ``name``.
    """
    try:
        _check_data(task.dataset, task)
        _check_clients(task)
        if try_out:
            _smoke_test(task, seed)
    except DeltaflError as error:
        found = without_one_output(str(error), task.make_model)
        raise DeltaflError(f"{name}: {found}") from error


def _smoke_test(task: Task, seed: int) -> None:
    """Make the model as the engine will, and take the gradient of a step on two examples."""
    from ..draws import seeded
    from ..modules import nn, spare_single_values, torch

    loss: Any = task.loss
    good = callable(loss) and not isinstance(loss, type)
    require_that(good, "the loss", loss, "a function of (output, y), such as nn.CrossEntropyLoss()")
    if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
        raise DeltaflError(
            "the loss has parameters of its own, which nobody would train; make them part of the "
            "model"
        )
    x, y = first_examples(task)
    if task.augment is not None:
        _check_augment(task, x, seed)
    # The seed that the run will use: what fails with it fails now.
    with seeded(stream(seed, "model")):
        original = made_model(task, x)
        model: Module = tried(
            "the model cannot be copied, as local training does",
            lambda: copied(original),
        )
        if tried("eval() of the model failed", model.eval) is not model:
            raise DeltaflError(
                f"train() or eval() of {type(model).__name__} does not return the model, as "
                "PyTorch's do; write return self at its end"
            )
        for entry in task.parts_of(original).entries:
            tensor = original.state_dict()[entry.name]
            if entry.kind == "trained" and tensor.dtype != torch.float32:
                raise DeltaflError(
                    f"the array {entry.name!r} of the model is {tensor.dtype}, and the simulator "
                    "trains float32: write model.float(), or leave the array out of trainable"
                )
        check_step(task, original, x, y)
        check_state(task, original, x, y)
        # What a step leaves in a model may keep it from being copied again.
        model = copied(original).eval()
        check_ends(task, model)
        check_metrics(task, model, stream(seed, "model"))
        check_loss(task, (2, *model(x).shape[1:]))
    found = []
    for _ in range(2):
        losses = []
        with seeded(stream(seed, "model")):
            again = tried("make_model failed a second time", lambda: copied(task.make_model()))
            spare_single_values(again)
            # In training first: the outputs of an evaluation are used below.
            for training in (True, False):
                again.train(training)
                with torch.set_grad_enabled(training):
                    output = tried("the model failed a second time", partial(again, x.clone()))
                    # A copy, as a loss may change it in place; in training it may be no tensor.
                    given = output if training else output.clone()
                    loss = partial(task.loss, given, y.clone())
                    losses.append(tried("the loss failed a second time", loss).item())
        found.append(losses)
    for first, then in zip(*found, strict=True):
        if not np.isclose(first, then, rtol=1e-6, atol=0, equal_nan=True):
            raise DeltaflError(
                f"one seed gives the losses {first:g} and {then:g} on the same two examples; let "
                "make_model, the model and the loss draw from torch, numpy.random or random, which "
                "are seeded, and remember nothing outside of the model"
            )
    # Of one example, which some losses do not take, and of the same example twice.
    sums = []
    for rows in ([0], [0, 0]):
        with seeded(stream(seed, "model")), torch.no_grad():
            sums.append(loss_or_nan(task.loss, output[rows], y[rows]))
    if sums[0] != 0 and np.isclose(sums[1], 2 * sums[0], rtol=1e-5, atol=0):
        raise DeltaflError(
            "the loss is a sum over the minibatch, so that steps and test losses would grow with "
            "it; let it be the mean, as reduction='mean' does, and local_lr so much larger"
        )


def _check_augment(task: Task, x: Tensor, seed: int) -> None:
    """Vary the same inputs twice, each time from the start."""
    from ..draws import seeded
    from ..modules import torch

    augment: Any = task.augment
    found = []
    for _ in range(2):
        rng = stream(seed, "augment")
        with seeded(stream(seed, "augment")):
            # It may draw in some calls alone.
            for _ in range(_AUGMENTED):
                found.append(tried("augment failed", lambda: augment(x.clone(), rng)))  # noqa: B023
    for varied in found:
        same = isinstance(varied, torch.Tensor) and varied.shape == x.shape
        require_that(
            same and varied.dtype == x.dtype,
            "the result of augment",
            varied,
            f"of shape {tuple(x.shape)} and type {x.dtype}, as its inputs",
        )
    again = found[_AUGMENTED:]
    if not all(torch.equal(one, two) for one, two in zip(found[:_AUGMENTED], again, strict=True)):
        raise DeltaflError(
            "augment varies the same inputs in two ways with the same rng, so that no run could be "
            "repeated; let it draw from rng, its second argument, and from no generator of its own"
        )


#: Calls of ``augment`` that are tried.
_AUGMENTED = 4

#: The types of inputs, of tokens and of labels; the first one is named as the cure.
_INPUTS = ("float32", "uint8")
_TOKENS = ("int64", "uint8")
_LABELS: tuple[str, ...] = ("int64",)
_TARGETS: tuple[str, ...] = ("float32", "int64")
#: What makes an array of something, by its method.
_TO_ARRAY = ("toarray", "to_numpy", "numpy")


def _check_data(data: Dataset, task: Task) -> None:
    require_that(isinstance(data, Dataset), "dataset", data, "a deltafl.tasks.Dataset")
    require_that(isinstance(data.name, str), "the name of the dataset", data.name, "a text")
    scale: Any = task.input_scale
    require_that(
        is_in(scale, "(0, inf)"), "input_scale", scale, "a number above 0, such as 1 / 255"
    )
    classes: Any = data.num_classes
    metrics = {metric.name for metric in task.metrics}
    if "accuracy" in metrics and type(classes) is int and classes == 0:
        raise DeltaflError(
            "the metric is accuracy, the usual one, and num_classes is 0: write Task(..., "
            "metric='loss') or --metric loss to predict numbers, or how many classes there are"
        )
    target: Any = data.train_y
    has_labels = isinstance(target, np.ndarray) and target.ndim == 2 and target.dtype == "f4"
    are_codes = isinstance(target, np.ndarray) and target.ndim == 1 and target.dtype.kind != "f"
    is_count = isinstance(classes, int | np.integer) and classes >= 0
    # Of one class every answer is right; of one label, yes or no may be wrong.
    if "accuracy" in metrics:
        is_count = is_count and classes >= (1 if has_labels else 2)
    needed = "a whole number: 2 or more for accuracy, 0 for regression"
    require_that(is_count, "num_classes", classes, needed)
    inputs = _TOKENS if task.tokens else _INPUTS
    labels = _TARGETS
    if classes > 2 and not has_labels:
        labels = _LABELS
    elif classes == 2 and are_codes:
        labels = (*_LABELS, "float32")
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        _check_array(f"{part}_x", x, inputs, data.train_x)
        _check_array(f"{part}_y", y, labels, data.train_y)
        if len(x) != len(y):
            raise DeltaflError(f"{part}_x has {len(x)} rows and {part}_y {len(y)}; make them equal")
        # Of whole numbers any shape is right: in two dimensions they are sequences of classes.
        if metrics != {"loss"} and classes > 0 and y.dtype.kind == "f" and y.ndim > 1:
            require_that(
                y.shape == (len(y), classes),
                f"the shape of {part}_y",
                y.shape,
                f"({len(y)}, {classes}), a column for each label, or ({len(y)},) for one logit",
            )
        # Whatever the metric, for the clients' shares of labels are counted.
        if classes > 0 and y.dtype.kind == "f":
            require_that(
                np.isin(y, (0, 1)).all(),
                f"{part}_y",
                y,
                f"0 or 1 where it is float32, or int64; {OTHER_TARGETS}",
            )
    if classes > 0 and data.train_y.dtype.kind != "f":
        _check_labels(task)


def _check_labels(task: Task) -> None:
    """Refuse labels that are no class, unless the loss ignores them."""
    data = task.dataset
    most = data.num_classes - 1
    named = ignore_index(task.loss)
    # Labels of tables and data sets were numbered 0, 1, ..., and nothing would be ignored.
    is_old = named is not None and not 0 <= named <= most
    if is_old and str(named) in data.class_names:
        number = [*data.class_names].index(str(named))
        raise DeltaflError(
            f"the loss ignores the label {named}, which is class {number} of the task, as labels "
            f"are numbered 0, 1, ... in their order: write ignore_index={number}, or leave these "
            "examples out"
        )
    for part, y in (("train", data.train_y), ("test", data.test_y)):
        label_n = y[counts(y, task.ignored)]
        require_that(
            len(label_n), f"the number of labels of {part}_y that the loss counts", 0, "above 0"
        )
        ends = (int(label_n.min()), int(label_n.max()))
        require_that(
            ends[0] >= 0 and ends[1] <= most,
            f"the range of {part}_y",
            ends,
            f"from 0 to num_classes - 1 = {most}, but for labels that the loss ignores, as "
            f"CrossEntropyLoss(ignore_index=-100) does; {OTHER_TARGETS}",
        )


def _check_array(name: str, array: Any, dtypes: tuple[str, ...], train: Any) -> None:
    needed = f"a NumPy array of {' or '.join(dtypes)} with one row or more"
    # What a mask hides would be taken for data.
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        cures = [f"; write {name}.{method}()" for method in _TO_ARRAY if hasattr(array, method)]
        cure = "".join(cures[:1])
        raise DeltaflError(f"{name} is of type {type(array).__name__}; it must be {needed}{cure}")
    held = f"{name} is {array.dtype} of shape {array.shape}"
    # Pixels come as bytes; other whole numbers are most often tokens.
    if dtypes is _INPUTS and array.dtype.kind in "iu" and array.dtype not in dtypes:
        raise DeltaflError(
            f"{held}; if these are tokens, for a model that begins with an Embedding, write "
            f"Task(..., tokens=True) and make them int64; else make them {name}.astype(np.float32)"
        )
    if array.dtype not in dtypes or array.ndim == 0 or len(array) == 0:
        raise DeltaflError(f"{held}; make it {needed}, such as {name}.astype(np.{dtypes[0]})")
    if array.size == 0:
        raise DeltaflError(f"{held}; give each row a number at least")
    if (array.shape[1:], array.dtype) != (train.shape[1:], train.dtype):
        raise DeltaflError(
            f"{held}; give it rows of shape {train.shape[1:]} and {train.dtype}, as those of the "
            "training set"
        )
    if not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise DeltaflError(f"{name}[{row}] holds a value that is not a finite number")


def _check_clients(task: Task) -> None:
    clients: Any = task.client_rows
    some = isinstance(clients, Sequence | np.ndarray) and len(clients) > 0
    require_that(some, "client_rows", clients, "a list with the rows of each client")
    needed = f"a list of row numbers from 0 to {len(task.dataset.train_x) - 1}, one at least"
    for client, rows in enumerate(clients):
        good = are_rows(rows, len(task.dataset.train_x))
        require_that(good, f"client_rows[{client}]", rows, needed)
        if not task.learnt_e[np.asarray(rows)].any():
            raise DeltaflError(
                f"client_rows[{client}] has no label that counts, for the loss ignores "
                f"{', '.join(map(str, task.ignored))}: leave this client out"
            )
    for what, texts in (("names", task.client_names), ("strata", task.client_strata)):
        good = hasattr(texts, "__len__")
        require_that(good, f"client_{what}", texts, "a list of texts, or () where there are none")
    names = [*task.client_names]
    good = len({*names}) == len(names) == len(clients) and all(isinstance(x, str) for x in names)
    require_that(
        good or not names, "client_names", names, f"{len(clients)} different texts, or empty"
    )
    noise_m: Any = task.gradient_noise_m
    if noise_m is not None:
        good = isinstance(noise_m, np.ndarray) and noise_m.dtype.kind in "iuf"
        good = good and noise_m.shape == (len(clients),)
        good = good and bool(np.isfinite(noise_m).all()) and noise_m.min() >= 0
        needed = f"a NumPy array ({len(clients)},) of numbers >= 0, one for each client"
        require_that(good, "gradient_noise_m", noise_m, needed)
    start_d: Any = task.initial_params
    good = isinstance(start_d, np.ndarray) and start_d.dtype.kind in "iuf" and start_d.ndim == 1
    good = start_d is None or (good and np.isfinite(start_d).all())
    needed = "a flat NumPy array, such as parameters_to_vector(model.parameters()).detach().numpy()"
    require_that(good, "initial_params", start_d, needed)
    owner_e: Any = task.test_clients
    if owner_e is not None:
        num_tests = len(task.dataset.test_x)
        good = isinstance(owner_e, np.ndarray) and owner_e.dtype.kind in "iu"
        good = good and owner_e.shape == (num_tests,)
        good = good and owner_e.min() >= -1 and owner_e.max() < len(clients)
        needed = f"({num_tests},) of clients from 0 to {len(clients) - 1}, or -1 for nobody"
        require_that(good, "test_clients", owner_e, f"a NumPy array {needed}")
