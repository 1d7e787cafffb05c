"""Checks of a task that a user made: its arrays and settings, then a smoke test of its model, loss and augmentation.

Every mistake is one sentence, before an experiment starts.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError, in_one_line
from ..streams import stream
from .base import Dataset, Task
from .models import require_torch

if TYPE_CHECKING:
    import torch


def check_task(task: Task, name: str, seed: int) -> None:
    """Check arrays, clients, model and loss of a task; the last two by one step on two examples and one on one.

    Args:
        task: What to check.
        name: How the user calls it; every message starts with it.
        seed: The experiment's seed; torch's generator is seeded for the smoke test, and restored.

    Raises:
        DeltaflError: For the first mistake.
    """
    try:
        _check_fields(task)
        _check_data(task.dataset, task.tokens)
        _check_labels(task)
        _check_clients(task)
        _check_test_clients(task)
        _check_numbers(task)
        _smoke_test(task, seed)
    except DeltaflError as error:
        raise DeltaflError(f"{name}: {error}") from error


def check_picklable(task: Task, name: str) -> None:
    """Check that the model and the loss of a task can be sent to worker processes.

    Raises:
        DeltaflError: If one of them is a lambda or is defined inside a function.
    """
    try:
        pickle.dumps((task.make_model, task.loss, task.augment))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DeltaflError(
            f"{name}: its model, loss or augment cannot be sent to worker processes ({in_one_line(error)}); "
            "define it at the top of the file, or use --workers 1"
        ) from None


def _check_fields(task: Task) -> None:
    if not isinstance(task.dataset, Dataset):
        raise DeltaflError(f"dataset is {shown(task.dataset)}; it must be a deltafl.tasks.Dataset")
    if task.metric not in ("accuracy", "loss"):
        raise DeltaflError(f"metric is {task.metric!r}; it must be 'accuracy' or 'loss'")
    if not isinstance(task.dataset.num_classes, int | np.integer):
        raise DeltaflError(f"num_classes is {task.dataset.num_classes!r}; it must be a whole number")
    if not isinstance(task.client_rows, Sequence | np.ndarray):
        raise DeltaflError(f"client_rows is {shown(task.client_rows)}; it must be a list with the rows of each client")


def _check_data(data: Dataset, tokens: bool) -> None:
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        _check_array(f"{part}_x", x, ("int64" if tokens else "float32", "uint8"))
        _check_array(f"{part}_y", y, ("int64", "float32"))
        if len(x) != len(y):
            raise DeltaflError(f"{part}_x has {len(x)} rows but {part}_y has {len(y)}")
    for letter, train, test in (("x", data.train_x, data.test_x), ("y", data.train_y, data.test_y)):
        if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
            raise DeltaflError(
                f"train_{letter} has rows of shape {train.shape[1:]} ({train.dtype}), test_{letter} {test.shape[1:]} "
                f"({test.dtype}); they must be the same"
            )


def _check_array(name: str, array: object, dtypes: tuple[str, str]) -> None:
    if not isinstance(array, np.ndarray):
        raise DeltaflError(f"{name} is {type(array).__name__}; it must be a NumPy array")
    if array.ndim == 0 or len(array) == 0:
        raise DeltaflError(f"{name} is empty; it needs one row or more")
    if str(array.dtype) not in dtypes:
        raise DeltaflError(
            f"{name} is {array.dtype}; it must be {dtypes[0]} or {dtypes[1]}, write {name}.astype(np.{dtypes[0]})"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise DeltaflError(f"{name}[{row}] holds a value that is not a finite number")


def _check_labels(task: Task) -> None:
    """Labels must fit ``num_classes`` whatever the metric, for the shares of labels are counted with both."""
    data = task.dataset
    if task.metric == "accuracy" and data.num_classes < 2:
        raise DeltaflError(f"num_classes is {data.num_classes}; accuracy needs two or more, or write metric='loss'")
    if data.num_classes <= 0:
        return
    for name, label in (("train_y", data.train_y), ("test_y", data.test_y)):
        if task.metric == "accuracy" and (label.dtype != np.int64 or label.ndim != 1):
            raise DeltaflError(f"{name} is {label.dtype} of shape {label.shape}; accuracy needs int64 of shape (N,)")
        if label.dtype != np.int64:
            raise DeltaflError(
                f"{name} is {label.dtype} but num_classes is {data.num_classes}; classes need int64 labels, "
                "write num_classes=0 for regression"
            )
        if label.min() < 0 or label.max() >= data.num_classes:
            wrong = label.min() if label.min() < 0 else label.max()
            raise DeltaflError(
                f"{name} holds the label {wrong}; labels go from 0 to num_classes - 1 = {data.num_classes - 1}"
            )


def _check_clients(task: Task) -> None:
    if len(task.client_rows) == 0:
        raise DeltaflError("client_rows is empty; a task needs one client or more")
    num_rows = len(task.dataset.train_x)
    for client, rows in enumerate(task.client_rows):
        try:
            row_n = np.asarray(rows)
        except ValueError:  # lists of different lengths
            row_n = np.array(None)
        if row_n.size == 0:
            raise DeltaflError(f"client {client} holds no examples; leave it out")
        if row_n.ndim != 1 or row_n.dtype.kind not in "iu":
            raise DeltaflError(f"client_rows[{client}] must be a list of row numbers, got {shown(rows)}")
        if row_n.min() < 0 or row_n.max() >= num_rows:
            wrong = row_n.min() if row_n.min() < 0 else row_n.max()
            raise DeltaflError(f"client {client} holds row {wrong}, but train_x has rows 0 to {num_rows - 1}")


def _check_test_clients(task: Task) -> None:
    client_e: object = task.test_clients
    num_rows = len(task.dataset.test_y)
    if client_e is None:
        return
    if not isinstance(client_e, np.ndarray) or client_e.shape != (num_rows,) or client_e.dtype.kind not in "iu":
        raise DeltaflError(
            f"test_clients is {shown(client_e)}; it must be a NumPy array with one client for {num_rows} test rows"
        )
    if client_e.min() < -1 or client_e.max() >= task.num_clients:
        wrong = client_e.min() if client_e.min() < -1 else client_e.max()
        raise DeltaflError(
            f"test_clients holds {wrong}; clients go from 0 to {task.num_clients - 1}, and -1 stands for nobody"
        )


def _check_numbers(task: Task) -> None:
    for name, value in (("gradient_noise_m", task.gradient_noise_m), ("initial_params", task.initial_params)):
        is_vector = isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.ndim == 1
        if value is not None and not (is_vector and np.isfinite(value).all()):
            raise DeltaflError(f"{name} is {shown(value)}; it must be a NumPy array (k,) of finite numbers")
    noise_m = task.gradient_noise_m
    if noise_m is not None and (noise_m.shape != (task.num_clients,) or noise_m.min() < 0):
        raise DeltaflError(
            f"gradient_noise_m is {shown(noise_m)}; it must hold a standard deviation >= 0 for each of "
            f"{task.num_clients} clients"
        )


def _smoke_test(task: Task, seed: int) -> None:
    """Make the model as the engine will, and take the gradient of a step on two examples, then on one.

    Minibatches of one example occur: the last of a pass, or of a client that has no more.
    """
    torch = require_torch()
    x, y = torch.tensor(task.dataset.train_x[:2]), torch.tensor(task.dataset.train_y[:2])
    if task.tokens:
        x = x.long()
    elif x.dtype == torch.uint8:
        x = x * task.input_scale
    _check_augment(task, x, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "model").integers(2**63)))
        model: Any = _tried("make_model failed", task.make_model)
        if not isinstance(model, torch.nn.Module) or not list(model.parameters()):
            raise DeltaflError(
                f"make_model made {type(model).__name__}; it must make a torch.nn.Module with parameters"
            )
        if any(torch.nn.parameter.is_lazy(param) for param in model.parameters()):
            raise DeltaflError(
                "the model has lazy modules, whose parameters have no shape yet; write their input sizes"
            )
        _tried("the model cannot be copied, as local training does", lambda: copy.deepcopy(model))
        shape = _check_step(task, model, x, y)
        output = _tried(f"the model does not take inputs of shape {tuple(x[:1].shape)}", lambda: model(x[:1]))
        single = tuple(output.shape)
        if len(single) != len(shape):
            raise DeltaflError(
                f"the model's output for one example has shape {single}, for {len(x)} it has {shape}; keep the first "
                "axis, which is that of the examples: write squeeze(-1) for squeeze()"
            )
        _check_step(task, model, x[:1], y[:1])


def _check_step(task: Task, model: "torch.nn.Module", x: "torch.Tensor", y: "torch.Tensor") -> tuple[int, ...]:
    """The shape of the model's output; evaluate the model, then train it, for some models differ there."""
    torch = require_torch()
    for training in (False, True):
        model.train(training)
        for part in model.modules():
            if isinstance(part, torch.nn.modules.batchnorm._NormBase):
                part.eval()  # as in local training
        mode = "in training" if training else "in evaluation"
        output: Any = _tried(f"the model does not take inputs of shape {tuple(x.shape)}", lambda: model(x))
        if not isinstance(output, torch.Tensor):
            raise DeltaflError(f"the model returned {type(output).__name__} {mode}; it must return one tensor")
        shape, needed = tuple(output.shape), (len(x), task.dataset.num_classes)
        if task.metric == "accuracy" and shape != needed:
            raise DeltaflError(
                f"the model's output for {len(x)} examples has shape {shape} {mode}; accuracy needs {needed}"
            )
        with warnings.catch_warnings():  # (B, 1) against (B,) becomes (B, B), and nothing is learnt
            warnings.filterwarnings("error", message="Using a target size")
            what = f"the loss failed on output {shape} and y {tuple(y.shape)}"
            loss: Any = _tried(what, lambda output=output: task.loss(output, y))  # type: ignore[misc]
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            raise DeltaflError(f"the loss must be the minibatch's mean, a tensor of shape (), got {_shape(loss)}")
    cure = "compute it from the model's output by torch alone, without detach, item or no_grad"
    if not loss.requires_grad:
        raise DeltaflError(f"the loss has no gradient; {cure}, and leave a parameter of the model trainable")
    _tried("the gradient of the loss failed", loss.backward)
    if all(param.grad is None for param in model.parameters()):
        raise DeltaflError(f"the loss does not depend on the model's parameters; {cure}")
    return shape


def _check_augment(task: Task, x: "torch.Tensor", seed: int) -> None:
    augment = task.augment
    if augment is None:
        return
    varied = _tried("augment failed", lambda: augment(x, stream(seed, "augment")))
    if not hasattr(varied, "dtype") or (varied.shape, varied.dtype) != (x.shape, x.dtype):
        raise DeltaflError(
            f"augment made {_shape(varied)} of inputs of shape {tuple(x.shape)}; it must keep shape and type"
        )


def _tried(what: str, call: Callable[[], Any]) -> Any:
    """The result of a user's function; its errors become ``what`` and the error in one line."""
    try:
        return call()
    except OWN_ERRORS as error:
        raise DeltaflError(f"{what}: {in_one_line(error)}") from error


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
