"""A Hugging Face ``datasets`` object as a task.

The package ``datasets`` is not imported: whatever has ``column_names`` and ``features``, and gives
a column by its name, will do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from reprlib import repr as shown
from typing import Any, Unpack, get_args

import numpy as np

from ...errors import OWN_ERRORS, DeltaflError, explained, log, require, unknown_name
from ...model.arrays import as_array
from ...streams import stream
from ...types import Array
from ..base import Task
from ..losses import MakeModel, Module
from ..models import softmax_regression
from ..partitions import AnyPartition
from .columns import LARGEST, Column, Target, TaskType, by_name, require_all, target_of, targets_of
from .frames import Frame
from .tables import (
    OWNER,
    TEST_SHARE,
    Dealing,
    Examples,
    Sent,
    no_column,
    owners_of,
    random_share,
    require_different,
    require_names,
    require_text,
    task_of,
)

#: Of grey pictures, of those of red, green and blue, and how opaque they are.
_CHANNELS = (1, 3, 4)
_MOST_CHANNELS = 4
#: In masks of bytes: a pixel of no class.
_NO_CLASS = 255


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
        label: Column of the class or the target, as in ``table_task``, or of lists of targets, of
            labels of 0 and 1, or of classes, one at each place, as in a mask, or a picture to
            predict; a ``ClassLabel`` keeps the order of its classes, and parts are matched by
            their names.
        column: Column of the client that holds the row. Test rows of others belong to no client.
        inputs: Column of pictures of one size, which become uint8 (N, channels, height, width), of
            tensors of one shape, which keep their axes, of arrays, or of lists of numbers; the only
            other column if None. Whole numbers are tokens if ``make_model`` makes a model that
            takes no others, as one with an ``Embedding``. Of arrays of three axes the last is that
            of channels where it has up to 4 numbers and the first has not 1, 3 or 4, else the
            first.
        name: The name of the data in reports.
        make_model: Makes the model, which predicts targets of regression as they are; softmax or
            linear regression if None, for which targets are standardized.
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

    require_text(name)
    require_names(label=label, column=column, inputs=inputs, strata=strata)
    dealing = Dealing(partition, column, clients, alpha, seed, strata)
    trains, tests = _pieces(name, data)
    used = trains | tests
    if tests and test_share is not None:
        raise DeltaflError(
            f"test_share is {test_share!r}, and {name} has a test part, which is the test set: "
            "leave one of them out"
        )
    train = next(iter(used.values()))
    owner = dealing.owner(f"{name}'s train part", train.column_names)
    require_different([label], owner)
    others = [each for each in train.column_names if each not in {label, owner or OWNER, strata}]
    if inputs is None and len(others) != 1:
        raise DeltaflError(
            f"{name} has {', '.join(others) or 'no column'} beside label and client: name the "
            "inputs by from_huggingface(data, inputs='image', ...); for several columns of numbers "
            "make a task of its data frame: table_task(data.to_pandas(), ...)"
        )
    inputs = inputs or others[0]
    if inputs in {label, owner, strata}:
        raise DeltaflError(
            f"{name}: the inputs are {inputs!r}, and that is the label, the client or the strata: "
            "name another column for them"
        )
    keys = [key for key in dict.fromkeys([label, owner, strata]) if key is not None]
    named = {owner: "column", strata: "strata", label: "label", inputs: "inputs"}
    for where, part in used.items():
        for key in (*keys, inputs):
            if key not in part.column_names:
                raise no_column(where, key, part.column_names, named[key])
    frames = [
        pd.DataFrame({key: _cells(where, part, key, plain) for key in keys})
        for where, part in used.items()
    ]
    # Together, so that all parts number classes and owners alike.
    frame = pd.concat(frames, keys=used)
    values = [value for where, part in used.items() for value in _cells(where, part, inputs)]
    features = {where: part.features or {} for where, part in used.items()}
    kinds = {where: getattr(of.get(inputs), "dtype", None) for where, of in features.items()}
    x = _stacked(frame, inputs, values, kinds)
    trial = _Trial(make_model)
    tokens = x.dtype == np.int64 and make_model is not None and trial.takes_tokens(x[:2])
    if x.dtype == np.int64 and not tokens:
        x = x.astype(np.float32)
    for key in keys:
        # Of a ClassLabel.
        names_of = {
            where: unique_names(getattr(of.get(key), "names", ())) for where, of in features.items()
        }
        if key != label or task_type != "regression":
            frame[key] = by_name(frame[key], names_of)
    # The loss of an own model may be one of counts or of times, which have a zero.
    target = _target_of(frame[label], task_type, standardize=make_model is None)
    if target.y.ndim > 1 and target.y.dtype == np.int64 and make_model is not None:
        some = x[:2] if tokens else x[:2].astype(np.float32)
        known = trial.classes_at_places(some, target.y)
        target = target._replace(num_classes=max(target.num_classes, known))
    owners = owners_of(frame, owner)
    if tests:
        test_e = frame.index.get_level_values(0).isin(tests)
    else:
        share = TEST_SHARE if test_share is None else test_share
        test_e = random_share(owners.code, share, seed)
    examples = Examples(name, frame, x, target, label, owner, owners, test_e)
    task = task_of(name, examples, dealing, softmax_regression)
    return replace(task, make_model=make_model or task.make_model, tokens=tokens, **sent)


class _Trial:
    """A model of the user's, made once and tried on some examples."""

    def __init__(self, make_model: MakeModel | None) -> None:
        self._make_model: Any = make_model

    @cached_property
    def _model(self) -> Module:
        return self._make_model().eval()

    def _answers(self, x: Array) -> Any:
        from ..draws import seeded
        from ..modules import torch

        with seeded(stream(0, "data")), torch.no_grad():
            return self._model(torch.from_numpy(x))

    def takes_tokens(self, x: Array) -> bool:
        """Whether it takes whole numbers as they are alone, as one with an Embedding does."""
        from ..modules import nn

        with suppress(*OWN_ERRORS):
            self._answers(x.astype(np.float32))
            return False
        with suppress(*OWN_ERRORS):
            self._answers(x)
            return True
        # It may know fewer; of others, such as one of another width, both have failed.
        with suppress(*OWN_ERRORS):
            parts = self._model.modules()
            return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in parts)
        return False

    def classes_at_places(self, x: Array, y: Array) -> int:
        """The number of classes that it knows at each place of an example, 0 if it shows none: some
        rows, such as those of a few masks, do not have the last one.
        """
        shape: tuple[int, ...] = ()
        with suppress(*OWN_ERRORS):
            shape = tuple(self._answers(x).shape)
        return shape[1] if len(shape) > 2 and shape[2:] == y.shape[1:] else 0


class Pieces(dict[str, Any]):
    """Data sets that are one part together, by what errors call them."""


def _pieces(name: str, data: Any) -> tuple[Pieces, Pieces]:
    """The data sets of the training part and of the test part, which may be none."""
    parts = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in parts:
        raise unknown_name("part of the data set", "train", parts)
    found = []
    for part in ("train", "test"):
        pieces = Pieces()
        if part in parts:
            held = parts[part]
            pieces = held if isinstance(held, Pieces) else Pieces({f"{name}'s {part} part": held})
        for where, piece in pieces.items():
            if not hasattr(piece, "column_names"):
                raise DeltaflError(
                    f"{where} is of type {type(piece).__name__}; it must be a datasets.Dataset"
                )
        found.append(pieces)
    return found[0], found[1]


def unique_names(names: Iterable[Any]) -> list[str]:
    """Names of classes as texts, of which a repeated one gets its number: ImageNet has two kinds of
    crane.
    """
    found: dict[str, None] = {}
    for number, name in enumerate(names):
        text = str(name)
        while text in found:
            text = f"{text} ({number})"
        found[text] = None
    return list(found)


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
    """A label or an owner, which some data sets give as an array, also as one of a single entry; a
    label at each pixel stays an array.
    """
    if _is_picture(cell):
        cell = np.asarray(cell)
    # Lists of the numbers along several axes would take ten times the memory.
    if sum(size > 1 for size in getattr(cell, "shape", ())) > 1:
        return as_array(cell)
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    while isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    return cell


def _target_of(values: Column, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted; several numbers an example are as many targets, or labels."""
    import pandas as pd

    is_several = isinstance(values.iloc[0], list | np.ndarray)
    if not is_several or task_type not in (None, *get_args(TaskType)):
        return target_of(values, task_type, standardize)
    parts = [_numbers_of(cell)[0] for cell in values]
    shape = parts[0].shape
    good_e = np.array([part.shape == shape and part.dtype.kind in "biuf" for part in parts])
    needed = f"numbers of shape {shape}, as in the first row"
    require_all(values, good_e, needed, "fill it up (a class: -100), or drop the row")
    y = np.stack(parts)
    if task_type != "regression":
        return _labels_of(values, y)
    good_e = (np.abs(y) <= LARGEST).reshape(len(y), -1).all(axis=1)
    require_all(values, good_e, f"numbers up to {LARGEST:g}", "correct it, or drop the row")
    if y.ndim > 2:
        return Target(y.astype(np.float32), 0)
    # Of a picture to predict some pixels never change: they are 0, and nothing to learn.
    moves_k = (y != y[0]).any(axis=0)
    if not moves_k.any():
        moves_k[:] = True  # to be refused
    wide = pd.DataFrame(y[:, moves_k], values.index, np.flatnonzero(moves_k))
    target = targets_of(wide.add_prefix(f"{values.name} "), task_type, standardize)
    target_nk = np.zeros(y.shape, np.float32)
    if not standardize:
        target_nk[:] = y[0]
    target_nk[:, moves_k] = target.y
    return target._replace(y=target_nk)


def _labels_of(values: Column, y: Array) -> Target:
    """Several labels an example: 0 or 1 each, or classes at its places."""
    is_yes_or_no = y.ndim == 2 and y.size > 0 and bool(np.isin(y, (0, 1)).all())
    if is_yes_or_no and (y.sum(axis=1) != 1).any():
        return Target(y.astype(np.float32), y.shape[1])
    good_e = np.full(len(y), y.dtype.kind in "biu" and not is_yes_or_no)
    needed = "a class, labels of 0 and 1, or whole numbers, a class at each place"
    cure = (
        "of one-hot labels take the place of the 1, of a mask of floating-point numbers write "
        "mask.long(); for others write a Task of your own"
    )
    require_all(values, good_e, needed, cure)
    # Of masks with an axis of channels: losses want (N, height, width).
    y = np.squeeze(y, axis=tuple(axis for axis in range(1, y.ndim) if y.shape[axis] == 1))
    y = y.astype(np.int64)
    different = np.unique(y[y >= 0])
    # Masks of VOC or Cityscapes have it where no class is meant.
    if _NO_CLASS in different[-1:] and _NO_CLASS - 1 not in different:
        different = different[:-1]
    if len(different) < 2:
        raise DeltaflError(
            f"{values.index[0][0]}: labels are of a single class; two are needed, and 255 is none: "
            "of masks of 0 and 255 give mask > 0"
        )
    return Target(y, int(different[-1]) + 1)


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


def _cure(value: Any, column: str, is_uneven: bool) -> str:
    """What to do with an input that is none; ``is_uneven``: it is a list of another length."""
    if isinstance(value, str) or is_uneven:
        return "text becomes numbers by a tokenizer that pads and cuts to one length"
    if not _is_picture(value):
        return "change it, or leave the row out"
    return (
        "picture.convert('RGB'), or in a Hugging Face data set "
        f"data.cast_column({column!r}, datasets.Image(mode='RGB')), makes pictures of one mode"
    )


def _stacked(
    frame: Frame,
    column: str,
    values: Sequence[Any],
    kinds: Mapping[str, Any],
) -> Array:
    """Pictures as uint8 (N, channels, height, width), or lists of numbers as float32 (N, k), whole
    ones as int64; tensors keep their axes. ``kinds`` has the type that the column of each part
    declares, or None.
    """
    parts: list[Array] = []
    are_bytes = False
    for (source, row), value in zip(frame.index, values, strict=True):
        part, held = _numbers_of(value)
        # Pixels of an Array2D or Array3D come as lists, and only their column knows that they are.
        declared = kinds[source] == "uint8" and part.dtype.kind in "iu"
        is_bytes = part.dtype == np.uint8 or declared
        if not parts:
            are_bytes = is_bytes
        is_uneven = bool(parts) and not held and part.shape != parts[0].shape
        if is_uneven:
            held = f"numbers of shape {part.shape}, and the first row has shape {parts[0].shape}"
        elif not held and is_bytes != are_bytes:
            # Bytes go from 0 to 255, and others often from 0 to 1.
            whose = "the first row" if are_bytes else "this row"
            held = f"numbers of another type than the first row: {whose} alone has bytes (uint8)"
        if held:
            raise DeltaflError(
                f"{source}: row {row + 1}, column {column!r} holds {held}; it must be pictures of "
                f"one size and mode, or numbers up to {LARGEST:g}, as many in each row and of one "
                f"type; {_cure(value, column, is_uneven and part.ndim == 1)}"
            )
        parts.append(part)
    x = np.stack(parts)
    is_whole = x.dtype.kind in "iu" and not are_bytes
    if is_whole and (x.ndim == 2 or (x.ndim > 2 and _is_tensor(values[0]))):
        return x.astype(np.int64)
    if x.ndim < 3:
        return x.reshape(len(x), -1).astype(np.float32)
    x = x.astype(np.uint8 if are_bytes else np.float32)
    # What has made a tensor has put its axes in the order of PyTorch; they may be no picture's.
    if _is_tensor(values[0]):
        return x
    if x.ndim == 3:
        # Grey pictures come without an axis of channels.
        return x[:, np.newaxis]
    _, first, _, last = x.shape
    are_last = last <= _MOST_CHANNELS and first not in _CHANNELS
    if _is_picture(values[0]) or are_last:
        x = x.transpose(0, 3, 1, 2)
    else:
        log.info("the arrays in column %r have %d channels, their first axis", column, first)
    return np.ascontiguousarray(x)
