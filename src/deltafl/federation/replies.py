"""What a client sent after training, and the numbers of a round, as plain values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite, nan
from numbers import Real
from typing import NamedTuple

from ..arrays import Arrays
from ..types import Reports, RoundInfo
from .local_work import LOSS, NOT_CORRECTED, NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE

Metrics = dict[str, int | float | list[int] | list[float]]

#: Names under which clients report their loss: ours, Flower's usual one, and its spelling with a
#: hyphen.
LOSS_NAMES = (LOSS, "train_loss", "train-loss")


class ClientReply(NamedTuple):
    """A client's model after training, and what ``types.Reports`` holds; without arrays and
    fault, no reply came.
    """

    arrays: Arrays | None = None
    #: Why the reply cannot be used, if that is already known; it then counts as non-response.
    fault: str | None = None
    loss: float | None = None
    square_loss: float | None = None
    step_variance: float = 0.0
    num_steps: float = 1
    #: The factor of its own steps with which the client corrected its local steps; None if it did
    #: not.
    corrected: float | None = None


def reply_of(
    arrays: Arrays, metrics: Mapping[str, object], confirmed: object = None
) -> ClientReply:
    """A reply from a trained model and metrics that may hold anything; weights among them are
    ignored.

    ``confirmed`` is what the client sent as the step factor with which it corrected its local
    steps.
    """
    losses = (metrics.get(name) for name in LOSS_NAMES)
    return ClientReply(
        arrays,
        loss=next((_number(loss) for loss in losses if isinstance(loss, Real)), None),
        square_loss=_number(metrics.get(SQUARE_LOSS, nan)),
        step_variance=_number(metrics.get(STEP_VARIANCE, 0.0)),
        num_steps=_number(metrics.get(NUM_STEPS, 1)),
        corrected=_factor(confirmed),
    )


def census_answer(answer: object, confirmed: object, step_factor: float) -> object:
    """A client's answer to a census, or why it cannot be used: that its steps were not of this
    factor.
    """
    is_whole = answer is not None and step_factor < 1 and _factor(confirmed) != step_factor
    return NOT_CORRECTED if is_whole else answer


def reports_of(replies: Sequence[ClientReply], responded: Sequence[bool] | None = None) -> Reports:
    """What these clients reported of their work; all of them responded if ``responded`` is left
    out.
    """
    return Reports.make(
        len(replies),
        responded=responded,
        loss=[reply.loss for reply in replies],
        square_loss=[reply.square_loss for reply in replies],
        step_variance=[reply.step_variance for reply in replies],
        num_steps=[reply.num_steps for reply in replies],
    )


def round_metrics(info: RoundInfo) -> Metrics:
    """The metrics of a round; unknown numbers are left out."""
    names = [
        "loss",
        "estimate_norm",
        "variance",
        "effective_sample_size",
        "largest_weight",
        "sum_of_weights",
    ]
    numbers = {
        name.replace("_", "-"): float(getattr(info, name))
        for name in [*names, "mean_over_diversity"]
    }
    counts = {
        "selected": info.num_selected,
        "responded": info.num_responded,
        "rejected": len(info.rejected),
    }
    return {**{name: number for name, number in numbers.items() if isfinite(number)}, **counts}


def _factor(confirmed: object) -> float | None:
    return float(confirmed) if isinstance(confirmed, int | float) else None


def _number(value: object) -> float:
    """A metric as a number, NumPy's scalars too; NaN, which is checked later, for a list or an
    integer out of range.
    """
    with suppress(OverflowError):
        return float(value) if isinstance(value, Real) else nan
    return nan
