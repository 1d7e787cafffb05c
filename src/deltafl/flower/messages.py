"""Flower's messages as plain values, and back; what comes from a client is untrusted and may be
anything.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import isfinite
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..arrays import Arrays
from ..federation.federation import Federation
from ..federation.replies import ClientReply, Metrics, census_answer, reply_of
from . import client

Key = TypeVar("Key")


def by_recipient(
    sent: Iterable[tuple[Key, Message]], replies: Iterable[Message]
) -> dict[Key, Message]:
    """The first reply to each message, by whom it was for: for a dead node the SuperLink
    answers.
    """
    first: dict[str, Message] = {}
    for reply in replies:
        first.setdefault(reply.metadata.reply_to_message_id, reply)
    ids = [(recipient, message.metadata.message_id) for recipient, message in sent]
    return {recipient: first[number] for recipient, number in ids if number in first}


def fault_of(reply: Message) -> str | None:
    """The error of a reply, in one line: the last of a traceback says what happened; or None."""
    if not reply.has_error():
        return None
    lines = [line.strip(" \t'>") for line in (reply.error.reason or "").splitlines()]
    reason = ["no reason given", *filter(None, lines)][-1][:200]
    # Escape sequences of a terminal could hide or forge lines of the log.
    shown = "".join(sign if sign.isprintable() else "?" for sign in reason)
    return f"error {reply.error.code}: {shown}"


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
    metrics = all_metrics(reply)
    answer = census_answer(metrics.get(client.CENSUS), metrics.get(client.CORRECTED), step_factor)
    return fault_of(reply) or answer


def content_for_all(
    federation: Federation, arrays: Arrays, config: ConfigRecord, number: int
) -> RecordDict:
    """What every client is sent: a model, the user's config, the number of the round, from 1."""
    sent = ConfigRecord(dict(config.items()))  # Flower passes the same one to every round
    sent["server-round"] = number
    sent[client.TRAINED] = list(federation.layout.trained)
    return RecordDict({"arrays": to_record(arrays), "config": sent})


def content_for(
    content: RecordDict, step_factor: float, correction: ArrayRecord | None = None
) -> RecordDict:
    """What one client is sent: the common content, and its correction."""
    # A client in this process takes entries out of its message, so only the arrays are shared.
    config = ConfigRecord(dict(content.config_records["config"]))
    sent = RecordDict({**content, "config": config})
    if step_factor < 1:
        config[client.STEP_FACTOR] = step_factor
    if correction:
        sent[client.CORRECTION] = correction
    return sent


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def mean_metrics(weighted: Iterable[tuple[float, Message]]) -> Metrics:
    """Weighted means of the clients' metrics, each over the replies that have a number for it."""
    totals = defaultdict[str, float](float)
    weights = defaultdict[str, float](float)
    for weight, reply in weighted:
        metrics = all_metrics(reply)
        metrics.pop(client.NUM_EXAMPLES, None)
        for name, value in metrics.items():
            if isinstance(value, int | float) and isfinite(value):
                totals[name] += weight * value
                weights[name] += weight
    return {name: total / weights[name] for name, total in totals.items() if weights[name] > 0}


def all_metrics(reply: Message) -> Metrics:
    """All metrics of a reply; of a name that occurs several times the first: none counts twice."""
    metrics: Metrics = {}
    if reply.has_error():
        return metrics
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            metrics.setdefault(name, value)
    return metrics
