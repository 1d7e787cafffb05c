"""What a client sent after training, and the numbers of a round, as plain values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite, nan
from numbers import Real
from typing import NamedTuple

from ..arrays import Arrays, update_of
from ..types import Params, Reports, RoundInfo
from .local_work import LOSS, NOT_CORRECTED, NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE

Metrics = dict[str, int | float | list[int] | list[float]]

#: Names under which clients report their loss: ours, Flower's usual one, and its spelling with a
#: hyphen.
LOSS_NAMES = (LOSS, "train_loss", "train-loss")


class ClientReply(NamedTuple):
    """A client's model after training, and what it reported; without arrays and fault, no reply
    came.
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

    def update(self, trained: Arrays) -> Params | None:
        """What training has added to the arrays that were sent; None if it cannot be used."""
        if self.arrays is None or self.fault is not None:
            return None
        return update_of(trained, self.arrays)


def reply_of(
    arrays: Arrays, metrics: Mapping[str, object], confirmed: object = None
) -> ClientReply:
    """A reply from a trained model and metrics, which may hold anything; weights are ignored.

    ``confirmed`` is the step factor with which the client says it corrected its local steps.
    """
    losses = [metrics[name] for name in LOSS_NAMES if isinstance(metrics.get(name), Real)]
    return ClientReply(
        arrays,
        loss=_number(losses[0]) if losses else None,
        square_loss=_number(metrics.get(SQUARE_LOSS, nan)),
        step_variance=_number(metrics.get(STEP_VARIANCE, 0.0)),
        num_steps=_number(metrics.get(NUM_STEPS, 1)),
        corrected=_factor(confirmed),
    )


def census_answer(answer: object, confirmed: object, step_factor: float) -> object:
    """A client's answer to a census, or why it cannot be used: its steps had another factor."""
    if answer is not None and step_factor < 1 and _factor(confirmed) != step_factor:
        return NOT_CORRECTED
    return answer


def reports_of(replies: Sequence[ClientReply], responded: Sequence[bool] | None = None) -> Reports:
    """What these clients reported of their work; ``responded`` None if all of them did."""
    columns = ("loss", "square_loss", "step_variance", "num_steps")
    reported = {name: [reply._asdict()[name] for reply in replies] for name in columns}
    return Reports.make(len(replies), responded=responded, **reported)


def round_metrics(info: RoundInfo) -> Metrics:
    """The metrics of a round; unknown numbers are left out."""
    numbers = {
        "loss": info.loss,
        "estimate-norm": info.estimate_norm,
        "variance": info.variance,
        "effective-sample-size": info.effective_sample_size,
        "largest-weight": info.largest_weight,
        "sum-of-weights": info.sum_of_weights,
        "mean-over-diversity": info.mean_over_diversity,
    }
    metrics: Metrics = {
        "selected": info.num_selected,
        "responded": info.num_responded,
        "rejected": len(info.rejected),
    }
    for name, number in numbers.items():
        if isfinite(number):
            metrics[name] = float(number)
    return metrics


def _factor(confirmed: object) -> float | None:
    if not isinstance(confirmed, int | float):
        return None
    return float(confirmed)


def _number(value: object) -> float:
    """A metric as a number, NumPy's scalars too; NaN, which is checked later, for all else."""
    with suppress(OverflowError):  # an integer out of range
        if isinstance(value, Real):
            return float(value)
    return nan
