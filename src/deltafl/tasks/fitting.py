"""Does a task that somebody made fit together? Every misfit is one sentence, before an experiment starts."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from reprlib import repr as shown

import numpy as np

from ..errors import DeltaflError
from .base import Dataset, Task
from .trial import problem_of_model, told


def _is_real(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and isfinite(value)


def _is_list(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


#: What the fields of a task and of its data set must be, beside arrays: a check, and its words.
_TASK: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "dataset": (lambda value: isinstance(value, Dataset), "a deltafl.tasks.base.Dataset"),
    "make_model": (callable, "a function that makes the model"),
    "loss": (callable, "a function of output and y"),
    "metric": (lambda value: isinstance(value, str) and value in {"accuracy", "loss"}, "'accuracy' or 'loss'"),
    "input_scale": (_is_real, "a finite number, such as 1 / 255"),
    "augment": (lambda value: value is None or callable(value), "a function of x and rng, or None"),
    "tokens": (lambda value: isinstance(value, bool), "True or False"),
    "client_rows": (_is_list, "a list with the rows of each client"),
}
_DATASET: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "num_classes": (
        lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool),
        "a whole number",
    ),
}


def require_fitting(task: Task, name: str, seed: int) -> None:
    """Check arrays, clients, model and loss of a task; the last two by trying them on two examples.

    Args:
        task: What to check.
        name: How the user calls it; every message starts with it.
        seed: The experiment's seed: torch's generator is seeded for the trial, and put back.

    Raises:
        DeltaflError: For the first misfit, in one sentence.
    """
    problem = _problem_of_types(task, _TASK) or _problem_of_types(task.dataset, _DATASET)
    problem = problem or _problem_of_data(task.dataset, task.tokens)
    problem = problem or _problem_of_clients(task) or _problem_of_numbers(task) or _problem_of_labels(task)
    problem = problem or problem_of_model(task, seed)
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


def _problem_of_types(part: object, fields: Mapping[str, tuple[Callable[[object], bool], str]]) -> str | None:
    for name, (fits, needed) in fields.items():
        value = getattr(part, name)
        if not fits(value):
            return f"{name} is {' '.join(shown(value).split())}; it must be {needed}"
    return None


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
        try:
            row_n = np.asarray(rows)
        except ValueError:  # lists of different lengths
            return f"client_rows[{client}] must be a list of row numbers, got {shown(rows)}"
        if row_n.size == 0:
            return f"client {client} holds no examples; leave it out"
        if row_n.ndim != 1 or row_n.dtype.kind not in "iu":
            return f"client_rows[{client}] must be a list of row numbers, got shape {row_n.shape} ({row_n.dtype})"
        if row_n.min() < 0 or row_n.max() >= num_rows:
            wrong = row_n.min() if row_n.min() < 0 else row_n.max()
            return f"client {client} holds row {wrong}, but train_x has rows 0 to {num_rows - 1}"
    return _problem_of_test_clients(task)


def _problem_of_numbers(task: Task) -> str | None:
    """Misfits of the arrays of real numbers that a task may have."""
    noise_m = task.gradient_noise_m
    arrays: Mapping[str, object] = {"gradient_noise_m": noise_m, "initial_params": task.initial_params}
    for name, number_k in arrays.items():
        if number_k is None:
            continue
        if not isinstance(number_k, np.ndarray) or number_k.dtype.kind not in "fiu" or number_k.ndim != 1:
            return f"{name} is {' '.join(shown(number_k).split())}; it must be a NumPy array of numbers with one axis"
        bad = ~np.isfinite(number_k)
        if bad.any():
            return f"{name}[{bad.argmax()}] is {number_k[bad.argmax()]}; it must be a finite number"
    if noise_m is not None and noise_m.shape != (task.num_clients,):
        return f"gradient_noise_m has shape {noise_m.shape}, {task.num_clients} clients need ({task.num_clients},)"
    if noise_m is not None and noise_m.min() < 0:
        return f"gradient_noise_m[{noise_m.argmin()}] is {noise_m.min()}; a standard deviation is 0 or more"
    return None


def _problem_of_test_clients(task: Task) -> str | None:
    client_e: object = task.test_clients
    num_rows = len(task.dataset.test_y)
    if client_e is None:
        return None
    if not isinstance(client_e, np.ndarray):
        return f"test_clients is {shown(client_e)}; it must be a NumPy array"
    if client_e.shape != (num_rows,) or client_e.dtype.kind not in "iu":
        return (
            f"test_clients has shape {client_e.shape} ({client_e.dtype}); it needs one client for {num_rows} test rows"
        )
    if client_e.min() < -1 or client_e.max() >= task.num_clients:
        wrong = client_e.min() if client_e.min() < -1 else client_e.max()
        return f"test_clients holds {wrong}; clients go from 0 to {task.num_clients - 1}, and -1 stands for nobody"
    return None


def _problem_of_labels(task: Task) -> str | None:
    """Misfits of labels and ``num_classes``, from which shares of labels are counted whatever the metric."""
    data = task.dataset
    if task.metric == "accuracy" and data.num_classes < 2:
        return f"num_classes is {data.num_classes}; accuracy needs two or more, or write metric='loss'"
    if data.num_classes <= 0:
        return None
    for name, label in (("train_y", data.train_y), ("test_y", data.test_y)):
        if task.metric == "accuracy" and (label.dtype != np.int64 or label.ndim != 1):
            return f"{name} is {label.dtype} of shape {label.shape}; accuracy needs int64 labels of shape (N,)"
        if label.dtype != np.int64:
            return (
                f"{name} is {label.dtype} but num_classes is {data.num_classes}; classes need int64 labels, "
                "write num_classes=0 for regression"
            )
        if label.min() < 0 or label.max() >= data.num_classes:
            wrong = label.min() if label.min() < 0 else label.max()
            return f"{name} holds the label {wrong}; labels go from 0 to num_classes - 1 = {data.num_classes - 1}"
    return None
