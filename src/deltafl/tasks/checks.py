"""What a task must have: arrays, clients, a model and a loss that take a step, metrics that judge.

Every mistake is one sentence, before an experiment starts.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isnan, nan, prod, sqrt
from reprlib import repr as shown
from typing import Any

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError, in_one_line, is_in
from ..model_parts import (
    NamedArrays,
    as_array,
    copied,
    freeze,
    listed,
    require_apart,
    tensors_of,
)
from ..streams import stream
from ..types import Array, IntArray, Rng
from .base import Task
from .dataset import Dataset
from .losses import Loss, Module, Tensor
from .metrics import (
    CLASSES,
    METRICS,
    NUMBERS,
    Metric,
    Numbers,
    counts,
    is_of_library,
    targets_of,
)
from .models import one_output
from .partitions import are_rows


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
        raise DeltaflError(f"{name}: {error}") from error


def _require(good: object, what: str, value: object, needed: str) -> None:
    if not good:
        raise DeltaflError(f"{what} is {shown(value)}; it must be {needed}")


#: The types of inputs, of tokens and of labels; the first one is named as the cure.
_INPUTS = ("float32", "uint8")
_TOKENS = ("int64", "uint8")
_LABELS: tuple[str, ...] = ("int64",)
_TARGETS: tuple[str, ...] = ("float32", "int64")
#: Test examples on which metrics and a loss are tried before an experiment.
_TRIED_EXAMPLES = 64
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
#: Classes, or different numbers, of which a loss is tried on one each.
_TRIED_TARGETS = 256
#: Columns of a table of which the smallest and the largest number are tried.
_TRIED_COLUMNS = 256
#: What to write where targets, or outputs, are none that the library's metrics of classes know.
_OTHER_TARGETS = (
    "where only the loss knows how to read them, as shares of classes, write num_classes=0, and "
    "metric='loss' or a metric of your own"
)
#: What makes an array of something, by its method.
_TO_ARRAY = ("toarray", "to_numpy", "numpy")


def _check_data(data: Dataset, task: Task) -> None:
    _require(isinstance(data, Dataset), "dataset", data, "a deltafl.tasks.Dataset")
    _require(isinstance(data.name, str), "the name of the dataset", data.name, "a text")
    scale: Any = task.input_scale
    _require(is_in(scale, "(0, inf)"), "input_scale", scale, "a number above 0, such as 1 / 255")
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
    _require(is_count, "num_classes", classes, needed)
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
            _require(
                y.shape == (len(y), classes),
                f"the shape of {part}_y",
                y.shape,
                f"({len(y)}, {classes}), a column for each label, or ({len(y)},) for one logit",
            )
        # Whatever the metric, for the clients' shares of labels are counted.
        if classes > 0 and y.dtype.kind == "f":
            _require(
                np.isin(y, (0, 1)).all(),
                f"{part}_y",
                y,
                f"0 or 1 where it is float32, or int64; {_OTHER_TARGETS}",
            )
    if classes > 0 and data.train_y.dtype.kind != "f":
        _check_labels(task)


def _check_labels(task: Task) -> None:
    """Refuse labels that are no class, unless the loss ignores them."""
    data = task.dataset
    most = data.num_classes - 1
    for part, y in (("train", data.train_y), ("test", data.test_y)):
        label_n = y[counts(y, task.ignored)]
        _require(
            len(label_n), f"the number of labels of {part}_y that the loss counts", 0, "above 0"
        )
        ends = (int(label_n.min()), int(label_n.max()))
        _require(
            ends[0] >= 0 and ends[1] <= most,
            f"the range of {part}_y",
            ends,
            f"from 0 to num_classes - 1 = {most}, but for labels that the loss ignores, as "
            f"CrossEntropyLoss(ignore_index=-100) does; {_OTHER_TARGETS}",
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
    _require(some, "client_rows", clients, "a list with the rows of each client")
    needed = f"a list of row numbers from 0 to {len(task.dataset.train_x) - 1}, one at least"
    for client, rows in enumerate(clients):
        good = are_rows(rows, len(task.dataset.train_x))
        _require(good, f"client_rows[{client}]", rows, needed)
    for what, texts in (("names", task.client_names), ("strata", task.client_strata)):
        good = hasattr(texts, "__len__")
        _require(good, f"client_{what}", texts, "a list of texts, or () where there are none")
    names = [*task.client_names]
    good = len({*names}) == len(names) == len(clients) and all(isinstance(x, str) for x in names)
    _require(good or not names, "client_names", names, f"{len(clients)} different texts, or empty")
    noise_m: Any = task.gradient_noise_m
    if noise_m is not None:
        good = isinstance(noise_m, np.ndarray) and noise_m.dtype.kind in "iuf"
        good = good and noise_m.shape == (len(clients),)
        good = good and bool(np.isfinite(noise_m).all()) and noise_m.min() >= 0
        needed = f"a NumPy array ({len(clients)},) of numbers >= 0, one for each client"
        _require(good, "gradient_noise_m", noise_m, needed)
    start_d: Any = task.initial_params
    good = isinstance(start_d, np.ndarray) and start_d.dtype.kind in "iuf" and start_d.ndim == 1
    good = start_d is None or (good and np.isfinite(start_d).all())
    needed = "a flat NumPy array, such as parameters_to_vector(model.parameters()).detach().numpy()"
    _require(good, "initial_params", start_d, needed)
    owner_e: Any = task.test_clients
    if owner_e is not None:
        num_tests = len(task.dataset.test_x)
        good = isinstance(owner_e, np.ndarray) and owner_e.dtype.kind in "iu"
        good = good and owner_e.shape == (num_tests,)
        good = good and owner_e.min() >= -1 and owner_e.max() < len(clients)
        needed = f"({num_tests},) of clients from 0 to {len(clients) - 1}, or -1 for nobody"
        _require(good, "test_clients", owner_e, f"a NumPy array {needed}")


def first_examples(task: Task, count: int = 2) -> tuple[Tensor, Tensor]:
    """Training examples, as the model gets them."""
    from .modules import torch

    # Copies here and elsewhere, for torch refuses the negative strides of a picture's mirror image.
    x = model_inputs(task, torch.tensor(task.dataset.train_x[:count].copy()))
    return x, torch.tensor(task.dataset.train_y[:count].copy())


def spread_examples(task: Task) -> tuple[Tensor, Tensor]:
    """Test examples from all over the test set, which may be sorted, as the model gets them."""
    from .modules import torch

    data = task.dataset
    row_n = _spread(len(data.test_x), _TRIED_EXAMPLES)
    x = model_inputs(task, torch.tensor(data.test_x[row_n]))
    return x, torch.tensor(data.test_y[row_n])


def _spread(size: int, count: int) -> IntArray:
    """Up to ``count`` places of ``size``, from the first to the last."""
    return np.linspace(0, size - 1, min(count, size)).astype(np.int64)


def varied_targets(task: Task, limit: int) -> Tensor:
    """Targets from all over the test set, and those of a row for each class, or different number,
    of both parts: up to ``limit`` in all.
    """
    from .modules import torch

    data = task.dataset
    parts = [data.test_y[_spread(len(data.test_y), _TRIED_EXAMPLES)]]
    for y in (data.train_y, data.test_y):
        row_k = _rows_of_each(y, data.num_classes)
        parts.append(y[row_k[_spread(len(row_k), _TRIED_TARGETS)]])
    found = np.concatenate(parts)
    return torch.tensor(found[_spread(len(found), max(limit, 2))])


def _rows_of_each(y: Array, num_classes: int) -> IntArray:
    """For each class, or number, a row that has it; of several numbers a row the ends of each."""
    columns = y.reshape(len(y), -1)
    if num_classes > 0 and y.dtype.kind != "f":
        row_c = np.full(num_classes, -1)
        for label_e in columns.T:
            (row_e,) = np.nonzero((label_e >= 0) & (label_e < num_classes))
            row_c[label_e[row_e]] = row_e
        return row_c[row_c >= 0]
    if columns.shape[1] == 1:
        return np.asarray(np.unique(columns, return_index=True)[1])
    return np.unique(np.concatenate([columns.argmin(axis=0), columns.argmax(axis=0)]))


def model_inputs(task: Task, stored: Tensor) -> Tensor:
    """Stored inputs as a task's model takes them."""
    from .modules import torch

    if task.tokens:
        return stored.long()
    if stored.dtype == torch.uint8:
        return stored.float().mul_(task.input_scale)
    return stored


def _smoke_test(task: Task, seed: int) -> None:
    """Make the model as the engine will, and take the gradient of a step on two examples."""
    from .draws import seeded
    from .modules import nn, spare_single_values, torch

    loss: Any = task.loss
    good = callable(loss) and not isinstance(loss, type)
    _require(good, "the loss", loss, "a function of (output, y), such as nn.CrossEntropyLoss()")
    if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
        raise DeltaflError(
            "the loss has parameters of its own, which nobody would train; make them part of the "
            "model"
        )
    x, y = first_examples(task)
    augment = task.augment
    if augment is not None:
        with seeded(stream(seed, "augment")):
            varied: Any = _tried("augment failed", lambda: augment(x, stream(seed, "augment")))
        same = isinstance(varied, torch.Tensor) and varied.shape == x.shape
        _require(
            same and varied.dtype == x.dtype,
            "the result of augment",
            varied,
            f"of shape {tuple(x.shape)} and type {x.dtype}, as its inputs",
        )
    # The seed that the run will use: what fails with it fails now.
    with seeded(stream(seed, "model")):
        original = _made_model(task, x)
        model: Module = _tried(
            "the model cannot be copied, as local training does",
            lambda: copied(original),
        )
        if _tried("eval() of the model failed", model.eval) is not model:
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
        spare_single_values(model)
        _check_step(task, model, x, y, original)
        _check_state(task, original, x, y)
        # What a step leaves in a model may keep it from being copied again.
        model = copied(original).eval()
        _check_ends(task, model)
        _check_metrics(task, model, stream(seed, "model"))
        _check_loss(task, (2, *model(x).shape[1:]))
    losses = []
    for _ in range(2):
        with seeded(stream(seed, "model")), torch.no_grad():
            again = _tried("make_model failed a second time", lambda: copied(task.make_model()))
            output = _tried("the model failed a second time", partial(again.eval(), x.clone()))
            loss = partial(task.loss, output.clone(), y.clone())
            losses.append(_tried("the loss failed a second time", loss).item())
    if not np.isclose(losses[0], losses[1], rtol=1e-6, atol=0, equal_nan=True):
        raise DeltaflError(
            f"one seed gives the losses {losses[0]:g} and {losses[1]:g} on the same two examples; "
            "let make_model, the model and the loss draw from torch, numpy.random or random, which "
            "are seeded, and remember nothing outside of the model"
        )
    # Of one example, which some losses do not take, and of the same example twice.
    sums = []
    for rows in ([0], [0, 0]):
        with seeded(stream(seed, "model")), torch.no_grad():
            sums.append(_loss_or_nan(task, output[rows], y[rows]))
    if sums[0] != 0 and np.isclose(sums[1], 2 * sums[0], rtol=1e-5, atol=0):
        raise DeltaflError(
            "the loss is a sum over the minibatch, so that steps and test losses would grow with "
            "it; let it be the mean, as reduction='mean' does, and local_lr so much larger"
        )


def check_single(task: Task, original: Module, seed: int) -> None:
    """Check that a copy of a task's model, and its loss, take a step on one example: where
    minibatches have so few, the last of a pass, or of a client that has no more.

    Raises:
        DeltaflError: If they do not, as with normalisation over the minibatch alone.
    """
    from .draws import seeded
    from .modules import spare_single_values

    x, y = first_examples(task, 1)
    with seeded(stream(seed, "model")):
        model = copied(original)
        spare_single_values(model)
        try:
            _check_step(task, model, x, y, original)
        except DeltaflError as error:
            raise DeltaflError(
                f"{task.name}: some minibatches have one example, by the clients' sizes and "
                f"batch_size, and {error}; write another batch_size, or None, or let the model "
                "take one example"
            ) from error


def _made_model(task: Task, x: Tensor) -> Module:
    """A new model, whose copies can be trained in its place."""
    from .modules import nn

    make: Any = task.make_model
    if isinstance(make, nn.Module):
        raise DeltaflError(
            f"make_model is a {type(make).__name__}; it must be a function that makes one"
        )
    model: Any = _tried("make_model failed", make)
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    if not params:
        raise DeltaflError(
            f"make_model made {type(model).__name__}; it must make a torch.nn.Module with "
            "parameters"
        )
    if any(nn.parameter.is_lazy(param) for param in params):
        raise _lazy("the model is lazy", x)
    for name, param in model.named_parameters():
        # PyTorch keeps hooks of modules where it copies them, those of parameters not.
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise DeltaflError(
                f"the parameter {name!r} has a hook, which copies of the model lack; change "
                "gradients in the loss or in forward"
            )
    require_apart(dict(model.named_parameters()))
    return model


def _lazy(what: str, x: Tensor) -> DeltaflError:
    shape = ", ".join(map(str, (2, *x.shape[1:])))
    return DeltaflError(f"{what}; run it once in make_model, such as model(torch.zeros({shape}))")


def _check_step(task: Task, model: Module, x: Tensor, y: Tensor, original: Module) -> None:
    """Evaluate the model, then train it, for some models differ there; it is a copy of the
    ``original``.
    """
    from .modules import torch

    # Of the original: NumPy's view of an array would keep a forward pass from resizing it.
    shapes = _shapes(original)
    params = dict(model.named_parameters())
    for mode, training in (("in evaluation", False), ("in training", True)):
        model.train(training)
        output = _tried(
            f"the model does not take inputs of shape {tuple(x.shape)}",
            lambda: _forward(task, model, x),
        )
        shape = _shape_of_output(task, output, y, mode)
        with warnings.catch_warnings():  # (B, 1) against (B,) becomes (B, B), and nothing is learnt
            warnings.filterwarnings("error", message="Using a target size")
            what = f"the loss failed on output {shape} and y {tuple(y.shape)}"
            loss: Any = _tried(what, partial(task.loss, output, y))
        is_scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0
        _require(
            is_scalar,
            "the loss",
            loss,
            "the minibatch's mean, a tensor of shape ()",
        )
    for name, param in model.named_parameters():
        if param.requires_grad and param is not params.get(name, param):
            raise DeltaflError(
                f"forward puts a new parameter in the place of {name!r}, and an optimizer would go "
                "on with the old one; write into that, under torch.no_grad(): "
                f"self.{name.rpartition('.')[2]}.copy_(...)"
            )
    # Without it ``backward`` would raise; what follows says better what is wrong.
    if loss.requires_grad:
        _tried("the gradient of the loss failed", loss.backward)
    lost = [name for name, param in original.named_parameters() if param.grad is not None]
    if lost:
        raise DeltaflError(
            f"forward reaches {lost[0]!r} past the model, by a lambda or a function that knows "
            "the module from outside, and a copy of the model would not train it; use it in a "
            "method of the model, or of a submodule that has it"
        )
    after = _shapes(model)
    for name in shapes:
        if after.get(name) != shapes[name]:
            raise DeltaflError(
                f"the array {name!r} of the model has shape {shapes[name]} before a step and "
                f"{after.get(name)} after it, and no mean of clients' models has both; give it its "
                "largest shape, run the model once in make_model, or register it with "
                "persistent=False"
            )
    for name in after:
        # Each client would begin with a new one, and nobody would keep it.
        if name not in shapes:
            raise _lazy(f"the model is lazy: it makes the array {name!r} in a step", x)
    if all(param.grad is None for param in model.parameters()):
        raise DeltaflError(
            "the loss has no gradient by the model's parameters; compute it from the model's "
            "output by torch alone, without detach, item or no_grad, and leave a parameter of the "
            "model trainable"
        )


def _forward(task: Task, model: Module, x: Tensor) -> Any:
    """What a model returns, or the user's own in a chain, where the rest takes a tensor alone."""
    from .modules import torch

    if getattr(task.make_model, "func", None) is not one_output:
        return model(x)
    own, *rest = model
    output = own(x)
    for part in rest:
        if isinstance(output, torch.Tensor):
            output = part(output)
    return output


def _shape_of_output(task: Task, output: Any, y: Tensor, mode: str) -> tuple[int, ...]:
    """The shape of an output, () of more than one tensor. In training a model may return more, as
    of auxiliary heads, in one tensor or in several: only the loss reads it.
    """
    from .modules import torch

    is_training = mode == "in training"
    if not isinstance(output, torch.Tensor):
        is_taken = _takes(task.loss, output, y)
        if is_training and is_taken:
            return ()
        raise _no_tensor(output, mode, is_taken)
    if task.knows_accuracy and not is_training:
        _require_classes(task, tuple(output.shape), y)
    return tuple(output.shape)


def _takes(loss: Loss, output: object, y: Tensor) -> bool:
    """Whether a loss takes an output that is no tensor, as one of the user's own may."""
    with suppress(Exception):
        loss(output, y)
        return True
    return False


def _no_tensor(output: object, mode: str, is_taken: bool) -> DeltaflError:
    """The error for an output that is no tensor, with the line that makes it one."""
    picked = _picked(output)
    if is_taken:
        picked = f"output if model.training else {picked}"
    # Such as a model that has outputs of auxiliary heads in training alone.
    elif mode == "in training":
        picked = f"output if isinstance(output, torch.Tensor) else {picked}"
    return DeltaflError(
        f"the model returned {type(output).__name__} {mode}; it must return one tensor, unless in "
        "training a loss of your own takes more: in make_model write model.register_forward_hook("
        f"lambda model, inputs, output: {picked})"
    )


def _picked(output: Any) -> str:
    """How a tensor is picked from an output, best its logits; ``out`` as torchvision has it."""
    from .modules import torch

    names = [*output] if isinstance(output, Mapping) else [*getattr(output, "__dict__", {})]
    for name in ("logits", "out", *names):
        if isinstance(output, Mapping) and isinstance(output.get(name), torch.Tensor):
            return f"output[{name!r}]"
        if isinstance(getattr(output, str(name), None), torch.Tensor):
            return f"output.{name}"
    return "output[0]"


def _require_classes(task: Task, shape: tuple[int, ...], y: Tensor) -> None:
    """Refuse outputs of a shape of which the accuracy is not known."""
    size = len(y)
    classes = task.dataset.num_classes
    needed: list[tuple[int, ...]] = [(size, classes)]
    cure = ""
    if y.ndim > 1 and not y.is_floating_point():
        needed = [(size, classes, *y.shape[1:])]
        cure = (
            ", as y of int64 has a class at each place of a sequence; write y.reshape(-1) for "
            "one class an example, y.astype(np.float32) for several labels"
        )
    elif classes == 2 and y.ndim == 1:
        needed += [(size, 1), (size,)]
    if shape in needed:
        return
    who = task.metrics[0].name
    if not is_of_library(who):
        who = "accuracy, which is taken wherever num_classes is above 0,"
        cure += f"; {_OTHER_TARGETS}"
    raise DeltaflError(
        f"the model's output for {size} examples has shape {shape} in evaluation; "
        f"{who} needs {' or '.join(map(str, needed))}{cure}"
    )


def _check_state(task: Task, original: Module, x: Tensor, y: Tensor) -> None:
    """Refuse a model that needs arrays which training changes and clients do not bring back, such
    as a moving average in frozen parameters: each round would begin with the first ones.
    """
    from .modules import torch

    params = dict(original.named_parameters())
    lost = [
        entry.name
        for entry in task.parts_of(original).entries
        # A frozen buffer is so by the user's choice.
        if entry.kind == "constant"
        or (entry.kind == "frozen" and entry.name in params)
        or (entry.kind == "counter" and entry.dtype == "bool")
    ]
    if not lost:
        return
    trained = copied(original)
    before = tensors_of(original)
    try:
        _train_twice(task, trained, x, y)
        # Looked up now, as a forward pass may put other tensors in their place.
        after = tensors_of(trained)
        moved = [name for name in lost if not torch.equal(before[name], after[name])]
        if not moved:
            return
        other = copied(original)
        tensors = tensors_of(other)
        with torch.no_grad():
            for name in moved:
                tensors[name].copy_(after[name])
        who = _who_needs(original, other, x)
    except OWN_ERRORS:  # a step has been tried, and what else may fail is no matter of state
        return
    if who is not None:
        raise DeltaflError(
            f"training changes {listed(moved)} of the model, which clients do not bring back, and "
            f"{who} need it: make it a buffer that begins with finite numbers, uint8 where it is "
            "bool, by register_buffer or a pass in make_model, and clients' values are averaged"
        )


def _who_needs(model: Module, other: Module, x: Tensor) -> str | None:
    """Which use shows that two models differ; None if none does, or if one already differs from
    itself.
    """
    from .draws import seeded
    from .modules import spare_single_values, torch

    for use, training in (("evaluations", False), ("later rounds", True)):
        found = []
        for each in (model, model, other):
            tried = copied(each).train(training)
            spare_single_values(tried)
            with seeded(stream(0, "dropout")), torch.no_grad():
                found.append(tried(x.clone()).float())
        first, again, then = found
        rounding = 1e-7 * float(first.abs().max())
        is_same = torch.allclose(then, first, rtol=0, atol=rounding)
        if torch.equal(first, again) and torch.isfinite(then).all() and not is_same:
            return use
    return None


def _train_twice(task: Task, model: Module, x: Tensor, y: Tensor) -> None:
    """Two steps, as a client takes them: what follows the parameters moves in the second."""
    from .modules import keep_frozen_statistics, spare_single_values, take_step

    frozen = freeze(model, task.parts_of(model))
    spare_single_values(model.train())
    keep_frozen_statistics(model, frozen)
    for _ in range(2):
        task.loss(model(x.clone()), y.clone()).backward()
        take_step(model)


def _shapes(model: Module) -> dict[str, tuple[int, ...]]:
    named = NamedArrays.of(model)
    return {name: array.shape for name, array in named.arrays.items()}


def _check_metrics(task: Task, model: Module, rng: Rng) -> None:
    """Judge the outputs of a model in evaluation on some test examples; where these have no value,
    as many as there are test examples, then random ones.
    """
    from .modules import torch

    if {metric.name for metric in task.metrics} == {"loss"}:
        return
    data = task.dataset
    x, some = spread_examples(task)
    y = as_array(some)
    with torch.no_grad():
        what = f"the model failed on {len(x)} test examples"
        output = as_array(_tried(what, lambda: model(x)))
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
    """Refuse a metric that has no value on any of the outputs and targets."""
    faults = []
    for output, y in tries:
        try:
            if not isnan(metric(output, y, ignored)):
                return
        except DeltaflError as fault:
            faults.append(fault)
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
    from .modules import torch

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


def _check_ends(task: Task, model: Module) -> None:
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
    from .modules import torch

    if len(x) == 0:
        return
    with torch.no_grad():
        some = model_inputs(task, torch.tensor(x))
        output = _tried(f"the model failed on {what}", partial(model, some))
        loss = partial(task.loss, output, torch.tensor(y))
        _tried(f"the loss failed on {of_loss}", loss)


def _check_loss(task: Task, shape: tuple[int, ...]) -> None:
    """Refuse a loss whose values are right numbers of another thing, so that nothing is learnt, or
    judged: on outputs that are made up, of the ``shape`` of those of two examples.
    """
    from .modules import torch

    y_e = task.dataset.train_y
    differs_e = (y_e != y_e[:1]).reshape(len(y_e), -1).any(axis=1)
    # Of equal targets any pairs are right.
    y = torch.tensor(y_e[[0, int(differs_e.argmax())]])
    size = int(np.prod(shape))
    # They may be probabilities, too.
    output = torch.linspace(0.2, 0.7, size).reshape(shape)
    # A loss may be small.
    is_close = partial(np.isclose, rtol=1e-4, atol=0)

    loss = partial(_loss_or_nan, task)
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


def _loss_or_nan(task: Task, output: Tensor, y: Tensor) -> float:
    """The loss; NaN where it raises an error."""
    try:
        return float(task.loss(output, y))
    except OWN_ERRORS:
        return nan


def _tried(what: str, call: Callable[[], Any]) -> Any:
    """The result of a user's function; its errors become ``what`` and the error in one line."""
    try:
        return call()
    except OWN_ERRORS as error:
        raise DeltaflError(f"{what}: {in_one_line(error)}") from error
