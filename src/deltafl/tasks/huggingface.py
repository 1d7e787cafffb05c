"""A Hugging Face ``datasets`` object as a task: one column says who holds each row.

Nothing of that package is imported: whatever has ``column_names`` and gives a column by its name will do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, unknown_name
from .base import Dataset, Task
from .images import cut_by_owner
from .models import cross_entropy, softmax_regression
from .skew import clients_of, natural
from .table import codes

if TYPE_CHECKING:
    import torch


def from_huggingface(
    data: Any,
    *,
    label: str,
    column: str,
    inputs: str,
    name: str = "dataset",
    make_model: "Callable[[], torch.nn.Module] | None" = None,
) -> Task:
    """Make a classification task of a ``Dataset`` or a ``DatasetDict``.

    Args:
        data: A ``DatasetDict`` with ``train`` and ``test``, or one with ``train`` alone, or a ``Dataset``. Without a
            test set the 5th, 15th, 25th, ... row of each client is for the test.
        label: Column of the class: whole numbers or words; sorted, they become 0, 1, ...
        column: Column that says who holds the row: whole numbers or words; sorted, they become client 0, 1, ...
        inputs: Column of pictures of one size, or of lists of numbers of one length.
        name: How reports call the data.
        make_model: Makes the model; such as a class at the top of a module. Softmax regression if None.

    Returns:
        A task with one client for each value of ``column``. Pictures become uint8 (N, channels, height, width), numbers
        float32. Test rows of somebody who has no training rows belong to nobody.

    Raises:
        DeltaflError: If a column is missing or cannot be used; the sentence names column and row (from 1).
    """
    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    used = [part for part in ("train", "test") if part in parts]
    where = [f"{name}'s {part} part" for part in used]
    for place, part in zip(where, used, strict=True):
        _require_columns(place, parts[part], (label, column, inputs))
    x = [_inputs(place, inputs, parts[part][inputs]) for place, part in zip(where, used, strict=True)]
    y, num_classes = _joint_codes(where, label, [parts[part][label] for part in used])
    owner, _ = _joint_codes(where, column, [parts[part][column] for part in used])
    if "test" in used:
        columns, test_columns = {column: owner[0]}, {column: owner[1]}
        dataset = Dataset(name, x[0], y[0], x[1], y[1], num_classes, columns=columns, test_columns=test_columns)
    else:
        dataset = cut_by_owner(Dataset(name, x[0], y[0], x[0][:0], y[0][:0], num_classes), column, owner[0])
    owner_e = dataset.columns[column]
    rows = natural(owner_e, len(np.unique(owner_e)), np.random.default_rng(0))  # all owners: nothing is drawn
    return Task(
        name=name,
        dataset=dataset,
        client_rows=rows,
        make_model=make_model or partial(softmax_regression, int(np.prod(x[0].shape[1:])), num_classes),
        loss=cross_entropy,
        test_clients=clients_of(owner_e, rows, dataset.test_columns[column]),
    )


def _require_columns(where: str, part: Any, needed: Sequence[str]) -> None:
    """Refuse what is no data set, or lacks a column."""
    names = getattr(part, "column_names", None)
    if not isinstance(names, list) or not hasattr(part, "__getitem__"):
        raise DeltaflError(
            f"{where} is {type(part).__name__}; it must be a datasets.Dataset, alone or in a DatasetDict with train"
        )
    for column in needed:
        if column not in names:
            raise unknown_name(f"column of {where}", column, names)


def _joint_codes(where: list[str], column: str, parts: list[Any]) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Both parts of a column as 0, 1, ..., and how many different values there are."""
    values = [np.array(list(part), dtype=object) for part in parts]
    for place, part in zip(where, values, strict=True):
        codes(place, column, part)  # alone, for a mistake is told by its part and the row there
    code, count = codes(where[0], column, np.concatenate(values))
    return np.split(code, np.cumsum([len(part) for part in values])[:-1]), count


def _inputs(where: str, column: str, values: Any) -> npt.NDArray[Any]:
    """A column of pictures or lists of numbers as one array."""
    rows = [_array(value) for value in values]
    if not rows:
        raise DeltaflError(f"{where} has no rows; a data set needs one example or more")
    for row, found in enumerate(rows, start=1):
        cell = f"{where}: row {row}, column {column!r}"
        if found.dtype.kind not in "iufb" or found.shape != rows[0].shape:
            kind = f"shape {found.shape} ({found.dtype})"
            raise DeltaflError(f"{cell} has {kind}; it needs numbers of shape {rows[0].shape}")
        if found.ndim > 3:
            raise DeltaflError(f"{cell} has shape {found.shape}; pictures have height, width and channels at most")
        if not np.isfinite(found).all():
            raise DeltaflError(f"{cell} holds a value that is not a finite number")
        if np.abs(found).max(initial=0) > np.finfo(np.float32).max:
            raise DeltaflError(f"{cell} holds a value that float32 cannot hold (3.4e38 at most)")
    x = np.stack(rows)
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    picture = x[:, np.newaxis] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(picture, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)


def _array(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths in one cell
        return np.array(None)
