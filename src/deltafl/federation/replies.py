"""What clients send, read: it may be anything. And the numbers of a round, as plain values."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import inf, isfinite, isnan, nan, prod
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..errors import OWN_ERRORS, DeltaflError, printable
from ..model.arrays import Arrays, as_array
from ..model.vectors import update_of
from ..samplers.census import LARGEST_NORM
from ..types import FloatArray, Params, Reports, RoundInfo, as_number
from .exchange import CENSUS, CODE, CORRECTED, NUM_EXAMPLES
from .local_work import LOSS, NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE

Metrics = dict[str, int | float | list[int] | list[float]]

#: Names under which clients report their loss: ours, Flower's usual one, and its spelling with a
#: hyphen.
LOSS_NAMES = (LOSS, "train_loss", "train-loss")
NOT_CORRECTED = (
    "the client did not correct its local steps; train inside "
    "corrected_steps(take_correction(...), ...), in Flower "
    "with delta_mod among the ClientApp's mods"
)
#: Metrics of a reply that count, and how many numbers they may have in all: they are logged, and
#: kept for each round.
MOST_METRICS = 1000
MOST_NUMBERS = 10_000
#: What is said of a round where it is known.
_NUMBERS = (
    "loss",
    "estimate_norm",
    "variance",
    "effective_sample_size",
    "largest_weight",
    "sum_of_weights",
    "mean_over_diversity",
)


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
    #: How many times its own steps the client says that it took, beside the drift; NaN for no word.
    corrected: float = nan
    #: What stands for the trained arrays, where the client was asked for a code.
    code: Any = None

    def update(self, trained: Arrays) -> Params | None:
        """What training has added to the arrays that were sent; None if it cannot be used."""
        if self.arrays is None or self.fault is not None:
            return None
        return update_of(trained, self.arrays)


def named(sent: object) -> Mapping[str, Any]:
    """What a client has sent as entries by name; nothing where it is something else."""
    if isinstance(sent, Mapping):
        return {name: value for name, value in sent.items() if type(name) is str}
    return {}


def read_reply(
    arrays: Mapping[Any, Callable[[], Any]],
    metrics: object,
    report: object,
) -> ClientReply:
    """A reply from what reads each array of a trained model, and metrics; weights are ignored.

    What else than plain arrays the readers return, ``ModelParts.fault`` finds.
    """
    received: Arrays = {}
    for name, read in arrays.items():
        try:
            received[name] = read()
        except DeltaflError as error:
            return ClientReply(fault=str(error))
        except OWN_ERRORS as error:  # whatever a client's bytes can make NumPy raise
            fault = (
                f"array '{printable(name, 60)}' of the reply cannot be read "
                f"({type(error).__name__})"
            )
            return ClientReply(fault=fault)
    known = named(metrics)
    reported = named(report)
    # Apps call their loss by one of several names; the first that is there counts.
    found = [(known[name], as_number(known[name])) for name in LOSS_NAMES if name in known]
    # One of torch or of NumPy's arrays is a number, too; NaN is none but where it was sent.
    losses = [loss for sent, loss in found if isinstance(sent, Real) or not isnan(loss)]
    return ClientReply(
        received,
        loss=losses[0] if losses else None,
        square_loss=as_number(known.get(SQUARE_LOSS, nan)),
        step_variance=as_number(known.get(STEP_VARIANCE, 0.0)),
        num_steps=as_number(known.get(NUM_STEPS, 1)),
        corrected=as_number(reported.get(CORRECTED)),
        code=reported.get(CODE),
    )


def read_answer(
    report: object,
    length: int,
    step_factor: float | None = None,
) -> tuple[float, ...]:
    """A client's answer to a census, or a ``DeltaflError`` that says why there is none.

    Args:
        report: What the client reported; a text says why it failed.
        length: The length of an answer.
        step_factor: How many times their own steps clients were asked to take, if at all.
    """
    given = named(report)
    # Usual steps in place of shorter ones would make the first step of the model too long.
    if CENSUS in given and step_factor not in (None, as_number(given.get(CORRECTED))):
        report = NOT_CORRECTED
    if isinstance(report, str):
        raise DeltaflError(printable(report))
    if CENSUS not in given:
        raise DeltaflError(
            "the reply holds no answer; add delta_mod to the ClientApp's mods, or use DeltaClient"
        )
    return read_numbers(given[CENSUS], length, "the answer")


def read_numbers(sent: object, length: int, what: str) -> tuple[float, ...]:
    """So many numbers that a client has sent, or a ``DeltaflError`` that says what they are not."""
    # Length first, as a list may be long; of NaN the comparison is false.
    if (
        isinstance(sent, list)
        and len(sent) == length
        and {*map(type, sent)} <= {int, float}
        and all(abs(x) <= LARGEST_NORM for x in sent)
    ):
        return tuple(map(float, sent))
    if isinstance(sent, str):  # the client has seen what is wrong
        raise DeltaflError(printable(sent))
    raise DeltaflError(f"{what} is not {length} finite numbers of at most {LARGEST_NORM:.0e}")


def reports_of(replies: Sequence[Any], responded: Sequence[bool] | None = None) -> Reports:
    """What these clients reported of their work, and which of them did; all if it is left out."""
    names = ("loss", "square_loss", "step_variance", "num_steps")
    columns = {name: [getattr(reply, name) for reply in replies] for name in names}
    return Reports.make(len(replies), responded=responded, **columns)


def round_metrics(info: RoundInfo) -> Metrics:
    """The metrics of a round; unknown numbers are left out."""
    metrics: Metrics = {
        "selected": info.num_selected,
        "responded": info.num_responded,
        "rejected": len(info.rejected),
    }
    for name, number in info._asdict().items():
        if name in _NUMBERS and isfinite(number):
            metrics[name.replace("_", "-")] = float(number)
    return metrics


def mean_metrics(
    weighted: Iterable[tuple[float, object]],
    by: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Weighted means of clients' metrics, each over the replies that have numbers for it.

    Lists and arrays become lists, entry by entry; of several shapes the most frequent one counts.

    Args:
        weighted: Clients' weights and metrics.
        by: The metric that is a client's weight instead; without one the size that a client
            claims counts for nothing.
        warn: Is told what does not count.
    """
    replies = [(weight, read_metrics(metrics)) for weight, metrics in weighted]
    if by is not None:
        claims = [(as_number(metrics.get(by)), metrics) for _, metrics in replies]
        replies = [(claim, metrics) for claim, metrics in claims if 0 <= claim < inf]
        if len(replies) < len(claims):
            warn(
                f"{len(claims) - len(replies)} of {len(claims)} replies have no number >= 0 as "
                f"their {by!r}, and do not count in the means of metrics"
            )
    names = dict.fromkeys(name for _, metrics in replies for name in metrics)
    means = dict[str, Any]()
    left_out = []
    for name in names:
        if name == (by or NUM_EXAMPLES):
            continue
        # One entry may be no number: a client without a class has no recall of it.
        known = [
            (weight, metrics[name])
            for weight, metrics in replies
            if name in metrics and np.isfinite(metrics[name]).any()
        ]
        shapes = Counter(numbers.shape for _, numbers in known)
        # The commonest: one client's longer list decides nothing.
        usual = max(shapes, key=shapes.__getitem__, default=())
        counted = [(weight, numbers) for weight, numbers in known if numbers.shape == usual]
        if not any(weight for weight, _ in counted):
            counted = []
        if len(counted) < len(replies):
            left_out.append(f"{name[:60]!r} {len(replies) - len(counted)} of {len(replies)}")
        if not counted:
            continue
        value_lk = np.stack([numbers for _, numbers in counted], axis=-1)
        weight_k = np.array([weight for weight, _ in counted])
        # Over a power of two, which rounds nothing: the sum of what clients claim may overflow.
        weight_k = np.ldexp(weight_k, -np.frexp(weight_k.max())[1])
        weight_lk = np.isfinite(value_lk) * weight_k
        with np.errstate(invalid="ignore", over="ignore"):  # of an entry that nobody has, NaN
            share_lk = weight_lk / weight_lk.sum(axis=-1)[..., None]
            means[name] = (share_lk * np.nan_to_num(value_lk)).sum(axis=-1).tolist()
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        warn(
            "replies that do not count in the mean of a metric, for they have no number, another "
            f"length or the weight 0: {', '.join(left_out[:3])}{more}"
        )
    return means


def read_metrics(sent: object) -> dict[str, FloatArray]:
    """The metrics of one reply, no more than ``MOST_METRICS`` with ``MOST_NUMBERS`` in all: ()
    of a number, (l,) of a list of numbers; NaN for all else.
    """
    found = dict[str, FloatArray]()
    room = MOST_NUMBERS
    for name, value in islice(named(sent).items(), MOST_METRICS):
        numbers = _numbers(value, room)
        room -= numbers.size
        # Names stand in logs and records.
        found.setdefault(printable(name), numbers)
    return found


def _numbers(value: Any, room: int) -> FloatArray:
    with suppress(*OWN_ERRORS):  # whatever lists of several lengths, say, make NumPy raise
        # Before it is read: a sparse tensor, or a view of one number, may have any size.
        if prod(np.shape(value)) <= room and not np.ma.isMaskedArray(value):
            numbers = as_array(value)
            if numbers.dtype.kind in "biuf":
                with np.errstate(over="ignore"):
                    return numbers.astype(np.float64)
    return np.array(as_number(value))
