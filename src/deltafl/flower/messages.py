"""Flower's messages as plain values, and back; what comes from a client is untrusted and may be anything."""

from collections.abc import Iterable
from math import isfinite, nan
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..arrays import Arrays
from ..errors import DeltaflError
from ..federation.federation import ClientReply, Federation
from ..samplers.census import LARGEST_NORM
from ..types import RoundInfo
from . import client

Key = TypeVar("Key")
Metrics = dict[str, int | float | list[int] | list[float]]

#: Names under which clients report their loss: ours, Flower's usual one, and its spelling with a hyphen.
LOSS_NAMES = (client.LOSS, "train_loss", "train-loss")


def by_recipient(sent: Iterable[tuple[Key, Message]], replies: Iterable[Message]) -> dict[Key, Message]:
    """The first reply to each message, by whom the message was for: for a dead node the SuperLink answers."""
    first: dict[str, Message] = {}
    for reply in replies:
        first.setdefault(reply.metadata.reply_to_message_id, reply)
    ids = [(recipient, message.metadata.message_id) for recipient, message in sent]
    return {recipient: first[number] for recipient, number in ids if number in first}


def fault_of(reply: Message) -> str | None:
    """The error that a reply carries, in one line, or None; the last line of a traceback says what happened."""
    if not reply.has_error():
        return None
    lines = [line.strip(" \t'>") for line in (reply.error.reason or "").splitlines()]
    reason = next((line for line in reversed(lines) if line), "no reason given")[:200]
    # Escape sequences of a terminal could hide or forge lines of the log.
    return f"error {reply.error.code}: {''.join(sign if sign.isprintable() else '?' for sign in reason)}"


def read_reply(reply: Message) -> ClientReply:
    """A client's reply to a train message; weights that it may contain are ignored."""
    fault = fault_of(reply)
    if fault is not None:
        return ClientReply(fault=fault)
    metrics = _all_metrics(reply)
    since = metrics.get(client.MEMORY_SINCE)
    since = since if isinstance(since, int) else None
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        return ClientReply(fault=f"the reply has {len(records)} array records, expected one", since=since)
    try:
        arrays = {name: array.numpy() for name, array in records[0].items()}
    except Exception as error:  # whatever a client's bytes can make NumPy raise
        return ClientReply(fault=f"the reply's arrays cannot be read ({type(error).__name__})")
    losses = (metrics.get(name) for name in LOSS_NAMES)
    return ClientReply(
        arrays,
        loss=next((float(loss) for loss in losses if isinstance(loss, int | float)), None),
        square_loss=_number(metrics.get(client.SQUARE_LOSS, nan)),
        step_variance=_number(metrics.get(client.STEP_VARIANCE, 0.0)),
        num_steps=_number(metrics.get(client.NUM_STEPS, 1)),
        since=since,
    )


def read_answer(reply: Message | None, length: int) -> tuple[float, ...]:
    """A client's answer to a census; a ``DeltaflError`` says why there is none."""
    fault = "no reply in time" if reply is None else fault_of(reply)
    if reply is None or fault is not None:
        raise DeltaflError(fault)
    answer = _all_metrics(reply).get(client.CENSUS)
    if answer is None:
        raise DeltaflError("the reply holds no answer; add delta_mod to the ClientApp's mods")
    numbers = answer if isinstance(answer, list) else []
    if len(numbers) != length or not all(abs(number) <= LARGEST_NORM for number in numbers):
        raise DeltaflError(f"the answer is not {length} finite numbers of at most {LARGEST_NORM:.0e}")
    return tuple(map(float, numbers))


def content_for_all(federation: Federation, config: ConfigRecord) -> RecordDict:
    """What every client is sent: the model, the user's config, the round."""
    sent = ConfigRecord(dict(config.items()))  # a copy: Flower passes the same config to every round
    sent["server-round"] = federation.current.round + 1
    sent[client.TRAINED] = list(federation.layout.trained)
    return RecordDict({"arrays": to_record(federation.arrays()), "config": sent})


def content_for(content: RecordDict, expected_memory: int | None) -> RecordDict:
    """What one client is sent: the common content, and the name of the memory it is to subtract, if it keeps one."""
    return content if expected_memory is None else content_with(content, client.MEMORY_EXPECTED, expected_memory)


def content_with(content: RecordDict, name: str, value: int | list[float]) -> RecordDict:
    """The content with one more entry of its config."""
    return RecordDict({**content, "config": ConfigRecord({**content.config_records["config"], name: value})})


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def round_metrics(info: RoundInfo) -> Metrics:
    """Flower's metrics of a round; unknown numbers are left out."""
    names = ["loss", "estimate_norm", "variance", "effective_sample_size", "largest_weight", "sum_of_weights"]
    numbers = {name.replace("_", "-"): float(getattr(info, name)) for name in [*names, "mean_over_diversity"]}
    counts = {"selected": info.num_selected, "responded": info.num_responded, "rejected": len(info.rejected)}
    return {**{name: number for name, number in numbers.items() if isfinite(number)}, **counts}


def mean_metrics(weighted: Iterable[tuple[float, Message]]) -> Metrics:
    """Weighted means of the clients' metrics, each over the replies that have a finite number for it."""
    sums: dict[str, tuple[float, float]] = {}
    for weight, reply in weighted:
        for name, value in {} if reply.has_error() else _all_metrics(reply).items():
            if isinstance(value, int | float) and isfinite(value) and name != client.NUM_EXAMPLES:
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + weight * value, weights + weight)
    return {name: total / weights for name, (total, weights) in sums.items() if weights > 0}


def _number(value: object) -> float:
    """A metric as a number; NaN, which is checked later, for a list."""
    return float(value) if isinstance(value, int | float) else nan


def _all_metrics(reply: Message) -> Metrics:
    """All metrics of a reply; of a name that occurs several times the first, so that none counts twice."""
    metrics: Metrics = {}
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            metrics.setdefault(name, value)
    return metrics
