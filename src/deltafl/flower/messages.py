"""Flower's messages as plain values, and back; what comes from a client is untrusted and may be
anything.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from math import prod
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.lib import format as npy

from ..errors import DeltaflError, printable
from ..federation.replies import ClientReply, Metrics, read_reply
from ..model.arrays import Arrays, listed
from .client import asked_in

Key = TypeVar("Key")

#: What Flower raises where a client has sent something else than the parts of a message; not what
#: a network raises.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    DecodeError,
    UnexpectedObjectContentError,
)
#: Requests for replies at most, in one look.
_PULLS = 200

#: What reads the header of an array of NumPy's, by the version of its form.
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@contextmanager
def read_apart(grid: Grid, warn: Callable[[str], None]) -> Iterator[None]:
    """Let a reply of which Flower can make no message be one that has not come: it would end the
    program, and take with it those that were pulled at the same time.
    """
    pull = grid.pull_messages

    def pull_apart(message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        # One by one, but where so many requests would take long.
        size = 1 + len(ids) // _PULLS
        received: list[Message] = []
        for first in range(0, len(ids), size):
            try:
                received.extend(pull(ids[first : first + size]))
            except UNREADABLE as error:
                reason = printable(f"{type(error).__name__}: {error}")
                warn(f"a reply that is no message counts as silence ({reason})")
        return received

    grid.pull_messages = pull_apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        grid.pull_messages = pull  # type: ignore[method-assign]


def by_recipient(
    sent: Iterable[tuple[Key, Message]],
    received: Iterable[Message],
) -> dict[Key, Message]:
    """The first reply to each message, by whom it was for: for a dead node the SuperLink
    answers.
    """
    first: dict[str, Message] = {}
    for reply in received:
        first.setdefault(reply.metadata.reply_to_message_id, reply)
    ids = [(recipient, message.metadata.message_id) for recipient, message in sent]
    return {recipient: first[number] for recipient, number in ids if number in first}


def fault_of(reply: Message) -> str | None:
    """The error of a reply, in one line: the last of a traceback says what happened; or None."""
    if not reply.has_error():
        return None
    # Flower writes an exception of an app as <class '...'>:<'...'>.
    lines = [line.strip().removesuffix("'>") for line in (reply.error.reason or "").splitlines()]
    reason = ["no reason given", *filter(None, lines)][-1]
    return f"error {reply.error.code}: {printable(reason)}"


def report_in(reply: Message) -> Mapping[str, Any] | str:
    """What a client reported beside its model; or why it failed."""
    return fault_of(reply) or asked_in(reply)


def metrics_in(reply: Message) -> Metrics | str:
    """All metrics of a reply; of a name that occurs several times the first: none counts twice."""
    fault = fault_of(reply)
    if fault is not None:
        return fault
    metrics: Metrics = {}
    for record in reply.content.metric_records.values():
        for name, value in record.items():
            metrics.setdefault(name, value)
    return metrics


def reply_in(reply: Message) -> ClientReply:
    """A client's reply to a train message; weights that it may contain are ignored."""
    metrics = metrics_in(reply)
    if isinstance(metrics, str):
        return ClientReply(fault=metrics)
    records = reply.content.array_records
    # Which of several is the model nobody here can know.
    if len(records) != 1:
        names = f" ({listed(records)})" if records else ""
        return ClientReply(fault=f"the reply has {len(records)} array records{names}, expected one")
    record = next(iter(records.values()))
    # Not read yet: whatever a client's bytes make NumPy raise, ``read_reply`` is ready for it.
    readers = {name: partial(_read, name, array) for name, array in record.items()}
    return read_reply(readers, metrics, asked_in(reply))


def _read(name: str, array: Array) -> Any:
    # Looked at before NumPy makes room for what the bytes say, or reads an archive.
    file = BytesIO(array.data)
    header = _HEADERS[npy.read_magic(file)]
    shape, _, dtype = header(file)
    size = len(array.data) - file.tell()
    if shape != array.shape or size != prod(shape) * dtype.itemsize:
        raise DeltaflError(
            f"array '{printable(name, 60)}' is said to have shape {array.shape}, and comes as "
            f"{size} bytes of {shape}"
        )
    return array.numpy()


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def to_arrays(record: ArrayRecord) -> Arrays:
    """The named arrays of a record of Flower's."""
    return {name: array.numpy() for name, array in record.items()}
