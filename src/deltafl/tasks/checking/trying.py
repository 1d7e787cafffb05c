"""What is tried before an experiment: what the user's functions raise is one sentence."""

from collections.abc import Callable
from math import nan
from reprlib import repr as shown
from typing import Any

from ...errors import OWN_ERRORS, DeltaflError, in_one_line
from ..losses import Loss, Tensor

#: What to write where targets, or outputs, are none that the library's metrics of classes know.
OTHER_TARGETS = (
    "where only the loss knows how to read them, as shares of classes, write num_classes=0, and "
    "metric='loss' or a metric of your own"
)


def tried(what: str, call: Callable[[], Any]) -> Any:
    """The result of a user's function; its errors become ``what`` and the error in one line."""
    try:
        return call()
    except OWN_ERRORS as error:
        raise DeltaflError(f"{what}: {in_one_line(error)}") from error


def require_that(good: object, what: str, value: object, needed: str) -> None:
    """Refuse a value that is not good."""
    if not good:
        raise DeltaflError(f"{what} is {shown(value)}; it must be {needed}")


def loss_or_nan(loss: Loss, output: Tensor, y: Tensor) -> float:
    """The loss; NaN where it raises an error."""
    try:
        return float(loss(output, y))
    except OWN_ERRORS:
        return nan
