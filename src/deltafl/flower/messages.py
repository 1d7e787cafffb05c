"""Flower's messages as plain values: what came from a client is untrusted and may be anything."""

from collections.abc import Iterable, Mapping
from math import isfinite, isnan

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..estimators.remote import RemoteControlState
from ..types import RoundInfo
from .answers import Answer
from .arrays import Arrays
from .client import RECORD, SKETCH, SKETCH_NUMBERS, SKETCH_SEED, TRAINED
from .federation import Federation
from .local_steps import LOSS, LOSS_NAMES, NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE
from .remembering import SINCE, TAKEN
from .sketched import sketch_seed


def by_request(messages: Iterable[Message], replies: Iterable[Message]) -> dict[str, Message]:
    """The first reply to each message, by the message's id.

    The sender says nothing: the error for a dead node comes from the SuperLink. Replies to other messages are dropped.
    """
    asked = {message.metadata.message_id for message in messages}
    found: dict[str, Message] = {}
    for reply in replies:
        request = reply.metadata.reply_to_message_id
        if request in asked:
            found.setdefault(request, reply)
    return found


def fault_of(reply: Message) -> str | None:
    """The error that a reply carries, in one line, or None. Of a traceback the last line says what happened."""
    if not reply.has_error():
        return None
    lines = [line.strip(" \t'>") for line in (reply.error.reason or "").splitlines()]
    return f"error {reply.error.code}: {next((line for line in reversed(lines) if line), 'no reason given')[:200]}"


def answer_of(reply: Message) -> Answer:
    """A client's answer to a train message. Weights that it may have sent are not looked at."""
    fault = fault_of(reply)
    if fault is not None:
        return Answer(None, fault)
    said = _statistics(reply)
    since = said.get(SINCE)
    since = since if isinstance(since, int) else None
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        return Answer(None, f"the reply has {len(records)} array records, expected one", since=since)
    try:
        arrays = _arrays(records[0])
    except Exception as error:  # whatever a client's bytes can make NumPy raise
        return Answer(None, f"the reply's arrays cannot be read ({type(error).__name__})")
    steps = said.get(NUM_STEPS, 1)
    if not isinstance(steps, int | float) or not isfinite(steps):
        return Answer(None, f"number of local steps is {str(steps)[:40]}, expected a whole number >= 1")
    sketch = said.get(SKETCH)
    variance, square = said.get(STEP_VARIANCE, 0.0), said.get(SQUARE_LOSS)
    if isinstance(said.get(LOSS), list) or isinstance(square, list) or isinstance(variance, list):
        return Answer(None, "loss, square loss and step variance must be one number each")
    if square is not None and isnan(square):  # reports have NaN for one that was not said
        return Answer(None, "mean squared loss is nan")
    return Answer(
        arrays,
        loss=_loss(said),
        square_loss=None if square is None else float(square),
        step_variance=float(variance),
        num_steps=int(steps),
        sketch=sketch if isinstance(sketch, list) else None,
        since=since,
    )


def _loss(said: Mapping[str, float | int | list[int] | list[float]]) -> float | None:
    """The loss under the first of its names that holds one number; None if none does."""
    values = (said.get(name) for name in LOSS_NAMES)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def content_of(federation: Federation, config: ConfigRecord) -> RecordDict:
    """What all clients are sent: the model, the user's settings, the round."""
    # A copy: Flower hands the same config to every round.
    sent = ConfigRecord(dict(config.items()))
    sent["server-round"] = federation.current.round + 1
    if federation.rest or isinstance(federation.current.control, RemoteControlState):
        sent[TRAINED] = [entry.name for entry in federation.layout.trained]
    rules = federation.rules
    if rules.sketch:
        sent[SKETCH_NUMBERS], sent[SKETCH_SEED] = rules.sketch, sketch_seed(rules.seed)
    return RecordDict({"arrays": to_record(federation.arrays()), "config": sent})


def for_client(content: RecordDict, expected: int | None) -> RecordDict:
    """What one client is sent: the same for all, and the memory of its own that it is to subtract, if there is any."""
    if expected is None:
        return content
    config = ConfigRecord({**content.config_records["config"], TAKEN: expected})
    return RecordDict({**content, "config": config})


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _arrays(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def _statistics(reply: Message) -> dict[str, float | int | list[int] | list[float]]:
    """The mod's record if it made one, else whatever metrics there are."""
    if RECORD in reply.content.metric_records:
        return dict(reply.content.metric_records[RECORD].items())
    return _first_of_each(reply)


def _first_of_each(reply: Message) -> dict[str, float | int | list[int] | list[float]]:
    """All metrics of a reply; of a name that comes several times the first, so that none counts twice."""
    said: dict[str, float | int | list[int] | list[float]] = {}
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            said.setdefault(name, value)
    return said


def metrics_of(info: RoundInfo) -> dict[str, int | float | list[int] | list[float]]:
    """What Flower logs of a round; numbers that are not known are left out."""
    numbers = {
        "loss": info.loss,
        "estimate-norm": info.estimate_norm,
        "variance": info.variance,
        "effective-sample-size": info.effective_sample_size,
        "largest-weight": info.largest_weight,
        "sum-of-weights": info.sum_of_weights,
        "mean-over-diversity": info.mean_over_diversity,
    }
    metrics: dict[str, int | float | list[int] | list[float]] = {
        name: float(number) for name, number in numbers.items() if isfinite(number)
    }
    counts = {"asked": info.num_selected, "responded": info.num_responded, "refused": len(info.rejected)}
    return {**metrics, **counts}


def mean_metrics(said: list[tuple[float, Message]]) -> dict[str, int | float | list[int] | list[float]]:
    """Weighted means of the numbers that clients sent, each over those that sent a finite one."""
    sums: dict[str, tuple[float, float]] = {}
    for weight, reply in said:
        if reply.has_error():
            continue
        for name, value in _first_of_each(reply).items():
            if isinstance(value, int | float) and isfinite(value) and name != "num-examples":
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + weight * value, weights + weight)
    return {name: total / weights for name, (total, weights) in sums.items() if weights > 0}
