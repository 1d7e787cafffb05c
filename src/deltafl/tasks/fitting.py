"""Does a task that somebody made fit together? Every misfit is one sentence, before an experiment starts."""

import pickle
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeltaflError
from ..streams import stream
from .base import Dataset, Task
from .models import require_torch

if TYPE_CHECKING:
    import torch


def require_fitting(task: Task, name: str, seed: int) -> None:
    """Check arrays, clients, model and loss of a task; the last two by trying them on two examples.

    Args:
        task: What to check.
        name: How the user calls it; every message starts with it.
        seed: The experiment's seed: torch's generator is seeded for the trial, and put back.

    Raises:
        DeltaflError: For the first misfit, in one sentence.
    """
    problem = _problem_of_data(task.dataset, task.tokens) or _problem_of_clients(task) or _problem_of_labels(task)
    problem = problem or _problem_of_model(task, seed)
    if problem:
        raise DeltaflError(f"{name}: {problem}")


def require_sendable(task: Task, name: str) -> None:
    """Check that worker processes can be given the model and the loss of a task.

    Raises:
        DeltaflError: If one of them is a lambda or is defined inside a function.
    """
    try:
        pickle.dumps((task.make_model, task.loss, task.augment))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DeltaflError(
            f"{name}: its model, loss or augment cannot be sent to worker processes ({told(error)}); "
            "define it at the top of the file, or use --workers 1"
        ) from None


def _problem_of_data(data: Dataset, tokens: bool) -> str | None:
    parts = {"train": (data.train_x, data.train_y), "test": (data.test_x, data.test_y)}
    for part, (x, y) in parts.items():
        problem = _problem_of_array(f"{part}_x", x, ("int64" if tokens else "float32", "uint8"))
        problem = problem or _problem_of_array(f"{part}_y", y, ("int64", "float32"))
        if problem:
            return problem
        if len(x) != len(y):
            return f"{part}_x has {len(x)} rows but {part}_y has {len(y)}"
    for letter, (train, test) in {"x": (data.train_x, data.test_x), "y": (data.train_y, data.test_y)}.items():
        if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
            shapes = f"rows of shape {train.shape[1:]} ({train.dtype}), test_{letter} {test.shape[1:]} ({test.dtype})"
            return f"train_{letter} has {shapes}; they must be the same"
    return None


def _problem_of_array(name: str, array: object, dtypes: tuple[str, str]) -> str | None:
    if not isinstance(array, np.ndarray):
        return f"{name} is {type(array).__name__}; it must be a NumPy array"
    if array.ndim == 0 or len(array) == 0:
        return f"{name} is empty; it needs one row or more"
    if str(array.dtype) not in dtypes:
        return f"{name} is {array.dtype}; it must be {dtypes[0]} or {dtypes[1]}, write {name}.astype(np.{dtypes[0]})"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        return f"{name}[{row}] holds a value that is not a finite number"
    return None


def _problem_of_clients(task: Task) -> str | None:
    if len(task.client_rows) == 0:
        return "client_rows is empty; a task needs one client or more"
    num_rows = len(task.dataset.train_x)
    for client, rows in enumerate(task.client_rows):
        row_n = np.asarray(rows)
        if row_n.size == 0:
            return f"client {client} holds no examples; leave it out"
        if row_n.ndim != 1 or row_n.dtype.kind not in "iu":
            return f"client_rows[{client}] must be a list of row numbers, got shape {row_n.shape} ({row_n.dtype})"
        if row_n.min() < 0 or row_n.max() >= num_rows:
            wrong = row_n.min() if row_n.min() < 0 else row_n.max()
            return f"client {client} holds row {wrong}, but train_x has rows 0 to {num_rows - 1}"
    noise_m = task.gradient_noise_m
    if noise_m is not None and np.shape(noise_m) != (task.num_clients,):
        return f"gradient_noise_m has shape {np.shape(noise_m)}, {task.num_clients} clients need ({task.num_clients},)"
    return _problem_of_test_clients(task)


def _problem_of_test_clients(task: Task) -> str | None:
    if task.test_clients is None:
        return None
    client_e, num_rows = np.asarray(task.test_clients), len(task.dataset.test_y)
    if client_e.shape != (num_rows,) or client_e.dtype.kind not in "iu":
        return (
            f"test_clients has shape {client_e.shape} ({client_e.dtype}); it needs one client for {num_rows} test rows"
        )
    if client_e.min() < -1 or client_e.max() >= task.num_clients:
        wrong = client_e.min() if client_e.min() < -1 else client_e.max()
        return f"test_clients holds {wrong}; clients go from 0 to {task.num_clients - 1}, and -1 stands for nobody"
    return None


def _problem_of_labels(task: Task) -> str | None:
    if task.metric not in {"accuracy", "loss"}:
        return f"metric is {task.metric!r}; it must be 'accuracy' or 'loss'"
    data = task.dataset
    if task.metric == "loss":
        return None
    if data.num_classes < 2:
        return f"num_classes is {data.num_classes}; accuracy needs two or more, or write metric='loss'"
    for name, label in (("train_y", data.train_y), ("test_y", data.test_y)):
        if label.dtype != np.int64 or label.ndim != 1:
            return f"{name} is {label.dtype} of shape {label.shape}; accuracy needs int64 labels of shape (N,)"
        if label.min() < 0 or label.max() >= data.num_classes:
            wrong = label.min() if label.min() < 0 else label.max()
            return f"{name} holds the label {wrong}; labels go from 0 to num_classes - 1 = {data.num_classes - 1}"
    return None


def _problem_of_model(task: Task, seed: int) -> str | None:
    """Make the model as the engine will, and score two examples."""
    torch = require_torch()
    x = torch.tensor(task.dataset.train_x[:2])
    y = torch.tensor(task.dataset.train_y[:2])
    if task.tokens:
        x = x.long()
    elif x.dtype == torch.uint8:
        x = x * task.input_scale
    problem = _problem_of_augment(task, x, seed)
    if problem:
        return problem
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "model").integers(2**63)))
        try:
            model = task.make_model()
        except Exception as error:
            return f"make_model failed: {told(error)}"
        if not isinstance(model, torch.nn.Module) or not list(model.parameters()):
            return f"make_model made {type(model).__name__}; it must make a torch.nn.Module with parameters"
        try:
            output = model.eval()(x)
        except Exception as error:
            return f"the model does not take inputs of shape {tuple(x.shape)}: {told(error)}"
        if task.metric == "accuracy":
            shape, needed = tuple(output.shape), (len(x), task.dataset.num_classes)
            if shape != needed:
                return f"the model's output for {len(x)} examples has shape {shape}; accuracy needs {needed}"
        try:
            with warnings.catch_warnings():  # (B, 1) against (B,) becomes (B, B), and nothing is learnt
                warnings.filterwarnings("error", message="Using a target size")
                loss = task.loss(output, y)
        except Exception as error:
            return f"the loss failed on output {tuple(output.shape)} and y {tuple(y.shape)}: {told(error)}"
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        return f"the loss must be the minibatch's mean, a tensor of shape (), got {_shape(loss)}"
    return None


def _problem_of_augment(task: Task, x: "torch.Tensor", seed: int) -> str | None:
    if task.augment is None:
        return None
    try:
        varied = task.augment(x, stream(seed, "augment"))
    except Exception as error:
        return f"augment failed: {told(error)}"
    if not hasattr(varied, "dtype") or (varied.shape, varied.dtype) != (x.shape, x.dtype):
        return f"augment made {_shape(varied)} of inputs of shape {tuple(x.shape)}; it must keep shape and type"
    return None


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
