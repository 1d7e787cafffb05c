"""Flower's messages as plain values, and back; what comes from a client is untrusted and may be
anything.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..arrays import Arrays
from ..federation.federation import Federation
from ..federation.local_work import Correction
from ..federation.replies import ClientReply, Metrics, census_answer, reply_of
from . import client

Key = TypeVar("Key")
Entries = Mapping[str, int | list[float] | None]


def by_recipient(
    sent: Iterable[tuple[Key, Message]], replies: Iterable[Message]
) -> dict[Key, Message]:
    """The first reply to each message, by whom the message was for: for a dead node the
    SuperLink answers.
    """
    first: dict[str, Message] = {}
    for reply in replies:
        first.setdefault(reply.metadata.reply_to_message_id, reply)
    ids = [(recipient, message.metadata.message_id) for recipient, message in sent]
    return {recipient: first[number] for recipient, number in ids if number in first}


def fault_of(reply: Message) -> str | None:
    """The error that a reply carries, in one line, or None; the last line of a traceback says
    what happened.
    """
    if not reply.has_error():
        return None
    lines = [line.strip(" \t'>") for line in (reply.error.reason or "").splitlines()]
    reason = next((line for line in reversed(lines) if line), "no reason given")[:200]
    # Escape sequences of a terminal could hide or forge lines of the log.
    return (
        f"error {reply.error.code}: "
        f"{''.join(sign if sign.isprintable() else '?' for sign in reason)}"
    )


def read_reply(reply: Message) -> ClientReply:
    """A client's reply to a train message; weights that it may contain are ignored."""
    fault = fault_of(reply)
    if fault is not None:
        return ClientReply(fault=fault)
    metrics = all_metrics(reply)
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        return ClientReply(fault=f"the reply has {len(records)} array records, expected one")
    try:
        arrays = {name: array.numpy() for name, array in records[0].items()}
    except Exception as error:  # whatever a client's bytes can make NumPy raise
        return ClientReply(fault=f"the reply's arrays cannot be read ({type(error).__name__})")
    return reply_of(arrays, metrics, metrics.get(client.CORRECTED))


def read_census(reply: Message, step_factor: float) -> object:
    """A client's answer to a census, or a sentence that says why it cannot be used."""
    metrics = {} if reply.has_error() else all_metrics(reply)
    answer = census_answer(metrics.get(client.CENSUS), metrics.get(client.CORRECTED), step_factor)
    return fault_of(reply) or answer


def content_for_all(
    federation: Federation, arrays: Arrays, config: ConfigRecord, number: int
) -> RecordDict:
    """What every client is sent: a model, the user's config, the number of the round, from 1."""
    sent = ConfigRecord(
        dict(config.items())
    )  # a copy: Flower passes the same config to every round
    sent["server-round"] = number
    sent[client.TRAINED] = list(federation.layout.trained)
    return RecordDict({"arrays": to_record(arrays), "config": sent})


def content_for(
    content: RecordDict, correction: Correction, record: ArrayRecord, config: Entries
) -> RecordDict:
    """What one client is sent: the common content, its correction with its record, and entries
    of its config.
    """
    factor = correction.step_factor if correction.step_factor < 1 else None
    own = {
        name: value
        for name, value in {**config, client.STEP_FACTOR: factor}.items()
        if value is not None
    }
    # A client in this process takes these out of its message: they are not shared, but for the
    # arrays.
    sent = {**content, "config": ConfigRecord({**content.config_records["config"], **own})}
    return RecordDict({**sent, client.CORRECTION: record} if record else sent)


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def mean_metrics(weighted: Iterable[tuple[float, Message]]) -> Metrics:
    """Weighted means of the clients' metrics, each over the replies that have a finite number
    for it.
    """
    sums: dict[str, tuple[float, float]] = {}
    for weight, reply in weighted:
        for name, value in {} if reply.has_error() else all_metrics(reply).items():
            if isinstance(value, int | float) and isfinite(value) and name != client.NUM_EXAMPLES:
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + weight * value, weights + weight)
    return {name: total / weights for name, (total, weights) in sums.items() if weights > 0}


def all_metrics(reply: Message) -> Metrics:
    """All metrics of a reply; of a name that occurs several times the first, so that none counts
    twice.
    """
    metrics: Metrics = {}
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            metrics.setdefault(name, value)
    return metrics
