"""A Hugging Face ``datasets`` object as a task.

The package ``datasets`` is not imported: whatever has ``column_names`` and ``features``, and gives
a column by its name, will do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any, Unpack

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError, explained, require, unknown_name
from ..model_parts import as_array
from ..types import Array
from .base import Task
from .columns import LARGEST, Column, Target, TaskType, require_all, target_of, targets_of
from .frames import Frame
from .losses import MakeModel
from .models import softmax_regression
from .partitions import AnyPartition
from .tables import (
    OWNER,
    TEST_SHARE,
    Dealing,
    Examples,
    Sent,
    no_column,
    owners_of,
    random_share,
    require_names,
    task_of,
)

#: Of pictures: red, green, blue and how opaque they are.
_MOST_CHANNELS = 4


def from_huggingface(
    data: Any,
    *,
    label: str = "label",
    column: str | None = None,
    inputs: str | None = None,
    name: str = "dataset",
    make_model: MakeModel | None = None,
    seed: int = 0,
    task_type: TaskType | None = None,
    partition: AnyPartition | None = None,
    clients: int | None = None,
    alpha: float = 0.5,
    test_share: float | None = None,
    strata: str | None = None,
    **sent: Unpack[Sent],
) -> Task:
    """Make a task of a Hugging Face ``Dataset`` or ``DatasetDict``.

    Args:
        data: A ``DatasetDict`` with ``train`` and ``test``, or one with ``train`` alone, or a
            ``Dataset``. Without a test set it is drawn as in ``table_task``.
        label: Column of the class or the target, as in ``table_task``, or of lists of targets; a
            ``ClassLabel`` keeps the order of its classes.
        column: Column of the client that holds the row. Test rows of others belong to no client.
        inputs: Column of pictures of one size, which become uint8 (N, channels, height, width), of
            tensors of one shape, which keep their axes, or of lists of numbers; the only other
            column if None.
        name: The name of the data in reports.
        make_model: Makes the model; softmax or linear regression if None.
        seed: Fixes the partition.
        task_type: As in ``table_task``.
        partition: As in ``table_task``.
        clients: As in ``table_task``.
        alpha: As in ``table_task``.
        test_share: As in ``table_task``, a tenth if None; for data without a test set alone.
        strata: As in ``table_task``.
        sent: As in ``table_task``.

    Raises:
        DeltaflError: If a column is missing or cannot be used.

    Example: ``from_huggingface(data, label="label", inputs="image", partition="iid", clients=100)``
    """
    require("pandas", "sim")
    import pandas as pd

    require_names(label=label, column=column, inputs=inputs, strata=strata)
    dealing = Dealing(partition, column, clients, alpha, seed, strata)
    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    used = {f"{name}'s {part} part": parts[part] for part in ("train", "test") if part in parts}
    for where, part in used.items():
        if not hasattr(part, "column_names"):
            raise DeltaflError(
                f"{where} is of type {type(part).__name__}; it must be a datasets.Dataset"
            )
    if "test" in parts and test_share is not None:
        raise DeltaflError(
            f"test_share is {test_share!r}, and {name} has a test part, which is the test set: "
            "leave one of them out"
        )
    train = parts["train"]
    owner = dealing.owner(f"{name}'s train part", train.column_names)
    others = [each for each in train.column_names if each not in {label, owner or OWNER, strata}]
    if inputs is None and len(others) != 1:
        raise DeltaflError(
            f"{name} has {', '.join(others) or 'no column'} beside label and client: name the "
            "inputs by from_huggingface(data, inputs='image', ...); for several columns of numbers "
            "make a task of its data frame: table_task(data.to_pandas(), ...)"
        )
    inputs = inputs or others[0]
    keys = [key for key in (label, owner, strata) if key is not None]
    for where, part in used.items():
        for key in (*keys, inputs):
            if key not in part.column_names:
                raise no_column(where, key, part.column_names)
    # Together, so that both parts number classes and owners alike.
    frame = pd.concat(
        [
            pd.DataFrame({key: _cells(where, part, key, plain) for key in keys})
            for where, part in used.items()
        ],
        keys=used,
    )
    values = [value for where, part in used.items() for value in _cells(where, part, inputs)]
    x = _stacked(frame, inputs, values, (train.features or {}).get(inputs))
    for key in keys:
        feature: Any = (train.features or {}).get(key)
        if hasattr(feature, "names"):  # a ClassLabel
            require_all(
                frame[key],
                (frame[key] != -1).to_numpy(),
                "a class",
                "-1 is an example without one: drop the row",
            )
            frame[key] = pd.Categorical.from_codes(frame[key].astype(int), feature.names)
    target = _target_of(frame[label], task_type)
    owners = owners_of(frame, owner)
    if "test" in parts:
        # The frame has the training part first.
        test_e = frame.index.get_level_values(0) != next(iter(used))
    else:
        share = TEST_SHARE if test_share is None else test_share
        test_e = random_share(owners.code, share, seed)
    examples = Examples(name, frame, x, target, label, owner, owners, test_e)
    task = task_of(name, examples, dealing, softmax_regression)
    return replace(task, make_model=make_model or task.make_model, **sent)


def _cells(
    where: str,
    part: Any,
    column: str,
    read: Callable[[Any], Any] = lambda cell: cell,
) -> Sequence[Any]:
    """A column of a data set, whose cells are decoded, and transformed, as they are read."""
    with explained(f"{where}: the column {column!r} cannot be read"):
        cells = [read(cell) for cell in part[column]]
    if not cells:
        raise DeltaflError(f"{where} has no rows; give it one at least")
    return cells


def plain(cell: Any) -> Any:
    """A label or an owner, which some data sets give as an array, also as one of a single entry."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    while isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    return cell


def _target_of(values: Column, task_type: TaskType | None) -> Target:
    """What is to be predicted; several numbers an example are as many targets."""
    import pandas as pd

    size_e = np.array([len(cell) if isinstance(cell, list) else 1 for cell in values])
    if task_type != "regression" or size_e[0] < 2:
        return target_of(values, task_type, standardize=True)
    needed = f"{size_e[0]} numbers, as in the first row"
    require_all(values, size_e == size_e[0], needed, "fill it up, or drop the row")
    wide = pd.DataFrame(values.tolist(), index=values.index)
    return targets_of(wide.add_prefix(f"{values.name} "), task_type, standardize=True)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _is_picture(value: Any) -> bool:
    """Whether it is a picture of PIL, which is not imported."""
    return hasattr(value, "getbands")


def _numbers_of(value: Any) -> tuple[Array, str]:
    """The numbers of an input, and in words what it is where they are of no use."""
    held = shown(value)
    if _is_tensor(value):
        held = f"a tensor of {value.dtype} on {value.device}"
    is_palette = False
    if _is_picture(value):
        held = f"a picture of mode {value.mode}"
        # Numbers of a palette's colours are no brightness.
        is_palette = value.mode == "P"
    try:
        numbers = as_array(value)
    except OWN_ERRORS:  # lists of different lengths, or tensors that NumPy cannot hold
        return np.array(None), held
    # Of a picture three axes have a meaning; a tensor may have any number.
    is_known = numbers.dtype.kind in "iufb" and (numbers.ndim <= 3 or _is_tensor(value))
    if is_palette or not is_known:
        return numbers, held
    # In this type, for half precision has no number as large as the limit.
    good = np.abs(numbers) <= np.float64(LARGEST)
    if good.all():
        return numbers, ""
    return numbers, f"the number {numbers[~good][0]:g}"


def _stacked(frame: Frame, column: str, values: Sequence[Any], feature: Any) -> Array:
    """Pictures as uint8 (N, channels, height, width), or lists of numbers as float32 (N, k);
    tensors keep their axes.
    """
    parts: list[Array] = []
    for (source, row), value in zip(frame.index, values, strict=True):
        part, held = _numbers_of(value)
        if not held and parts and part.shape != parts[0].shape:
            held = f"numbers of shape {part.shape}, and the first row has shape {parts[0].shape}"
        if held:
            cure = "change it, or leave the row out"
            if _is_picture(value):
                cure = (
                    f"in a Hugging Face data set data.cast_column({column!r}, "
                    "datasets.Image(mode='RGB')) makes pictures of one mode"
                )
            raise DeltaflError(
                f"{source}: row {row + 1}, column {column!r} holds {held}; it must be pictures of "
                f"one size and mode, or numbers up to {LARGEST:g}, as many in each row; {cure}"
            )
        parts.append(part)
    x = np.stack(parts)
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    # Pixels of an Array2D or Array3D come as lists, and only their column knows that they are.
    is_pixel = x.dtype == np.uint8 or (hasattr(feature, "dtype") and feature.dtype == "uint8")
    x = x.astype(np.uint8 if is_pixel else np.float32)
    # What has made a tensor has put its axes in the order of PyTorch; they may be no picture's.
    if _is_tensor(values[0]):
        return x
    if x.ndim == 3:
        # Grey pictures come without an axis of channels.
        x = x[..., np.newaxis]
    _, first, _, last = x.shape
    # Pictures have their channels last, other arrays perhaps first: the shorter axis, if that is
    # clear.
    if last <= _MOST_CHANNELS or last <= first:
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)
