"""The client's side: two lines in a ClientApp.

::

    app = ClientApp(mods=[delta_mod])                          # statistics with every reply to a train message
    register(app, num_examples=lambda context: len(load(context)))   # who I am and how much data I hold
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ..errors import DeltaflError
from ..estimators.remote import NOTHING, ClientMemory
from ..estimators.sketch import count_sketch
from ..io import write_atomically
from .arrays import Arrays, update_of
from .local_steps import LOSS, LOSS_NAMES, NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE

#: The record that the mod adds, and the action of the registration query (``query.deltafl``).
RECORD = "deltafl"
#: Names in that record and in the train message's config.
SKETCH, TRAINED = "sketch", "deltafl-trained"
SKETCH_SEED, SKETCH_SIZE = "deltafl-sketch-seed", "deltafl-sketch-size"
KIND, CLIENT_ID, NUM_EXAMPLES, AUX = "kind", "client-id", "num-examples", "aux"
#: In the train message's config: the c_i that the server counts on. In a reply's metrics: the c_i subtracted.
MEMORY_EXPECTED, MEMORY_SINCE = "deltafl-taken", "memory-since"

_MEMORY_FILE = "memory-file"
_MEMORY_RECORD = "deltafl-memory"


def delta_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod that adds statistics to replies to train messages; other messages and errors pass unchanged.

    The statistics join the client's metrics if there is exactly one record of them, so that the client also works with
    strategies that expect one, such as FedAvg; otherwise they get a record of their own. Metrics that the client set
    itself are not overwritten. ``loss``, ``square-loss``, ``step-variance`` and ``num-steps`` come from the client's
    metrics (see ``LocalSteps``); ``sketch`` is computed here if the server asks for it.

    With a ``...-remote`` estimator, the mod also keeps this client's last update and sends the difference from it: in
    Flower's ``Context.state``, which lives as long as the run and the node's process, or in the file that
    ``memory-file`` in the node's config names, one per node and federation. It must then be the first mod: if one
    before it changes the arrays, the server remembers something else than the client, and the memory is lost.
    """
    if message.metadata.message_type.split(".")[0] != "train":
        return call_next(message, context)
    sent = _only_arrays(message)  # now, for the client may overwrite the arrays that it was given
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    expected, memory = config.get(MEMORY_EXPECTED), None
    if sent is not None and isinstance(expected, int):
        memory = _load_memory(context, sum(array.size for array in _numpy(sent, _trained_names(config, sent)).values()))
        if not memory.follows(expected):
            # Training would be in vain: the server cannot use an update whose c_i it does not know.
            return Message(RecordDict({RECORD: MetricRecord({MEMORY_SINCE: NOTHING})}), reply_to=message)
    reply = call_next(message, context)
    received = None if reply.has_error() else _only_arrays(reply)
    if sent is None or reply.has_error():
        return reply
    statistics = _statistics(reply)
    trained = None if received is None else _trained(config, sent, received)
    if trained is not None:
        old, new = trained
        if memory is not None and isinstance(expected, int):
            new = subtract_memory(memory, expected, old, new)
            _replace_arrays(reply, new)
            _save_memory(context, memory)
            statistics[MEMORY_SINCE] = expected
        size, seed = config.get(SKETCH_SIZE), config.get(SKETCH_SEED)
        if isinstance(size, int) and isinstance(seed, int) and size > 0:
            statistics[SKETCH] = count_sketch(update_of(old, new)[None], size, seed)[0].tolist()
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        reply.content[RECORD] = MetricRecord(statistics)
        return reply
    for name, value in statistics.items():
        if name not in records[0]:
            records[0][name] = value
    return reply


def register(
    app: ClientApp,
    num_examples: Callable[[Context], int],
    client_id: Callable[[Context], str] | None = None,
    aux: Callable[[Context], Sequence[float]] | None = None,
) -> None:
    """Let a ClientApp answer the server's registration query.

    Args:
        app: The app; it gets a query function for the action ``deltafl``.
        num_examples: Context -> the number of examples that the client trains on. The weights depend on the sizes of
            clients that are never selected, too.
        client_id: Context -> a text that survives restarts; None for ``client-id`` of the node's config
            (``flower-supernode --node-config 'client-id="hospital-a"'``), else its ``partition-id``.
        aux: Context -> auxiliary variables that describe the client, such as the share of each label in its data; sent
            only to servers that ask for them (``DeltaStrategy(aux=10)``).
    """

    @app.query(RECORD)
    def answer(message: Message, context: Context) -> Message:
        kind, own_id = ("client", client_id(context)) if client_id else _default_id(context)
        record = ConfigRecord({KIND: kind, CLIENT_ID: own_id, NUM_EXAMPLES: int(num_examples(context))})
        wanted = message.content.config_records.get(RECORD, ConfigRecord()).get(AUX)
        if aux is not None and wanted:
            record[AUX] = [float(value) for value in aux(context)]
        return Message(RecordDict({RECORD: record}), reply_to=message)


def _default_id(context: Context) -> tuple[str, str]:
    for name, kind in (("client-id", "client"), ("partition-id", "partition")):
        if name in context.node_config:
            return kind, str(context.node_config[name])
    raise DeltaflError(
        "the node's config has neither 'client-id' nor 'partition-id'; start it with "
        "--node-config 'client-id=\"NAME\"' or give client_id to register()"
    )


def subtract_memory(memory: ClientMemory, expected: int, sent: Arrays, received: Arrays) -> Arrays:
    """The arrays to send instead of a client's own, so that received - sent is u_i - c_i.

    Args:
        memory: The client's memory; it records what the server will see, including rounding.
        expected: The c_i that the server counts on.
        sent: The trained arrays that the client was sent, in the server's order.
        received: The same after training.
    """
    difference_d, arrays, start = memory.reply(update_of(sent, received), expected).difference_d, {}, 0
    for name, old in sent.items():
        part = difference_d[start : start + old.size].reshape(old.shape)
        start += old.size
        with np.errstate(over="ignore", invalid="ignore"):
            arrays[name] = (old.astype(np.float64) + part).astype(received[name].dtype)
    memory.sent_as(update_of(sent, arrays))
    return arrays


def _load_memory(context: Context, num_params: int) -> ClientMemory:
    """The client's memory; an empty one if it is lost, damaged or of another model."""
    memory = ClientMemory(num_params)
    path = context.node_config.get(_MEMORY_FILE)
    try:
        if path is not None:
            with np.load(Path(str(path)), allow_pickle=False) as file:
                memory.restore({name: file[name] for name in file.files})
        elif _MEMORY_RECORD in context.state.array_records:
            record = context.state.array_records[_MEMORY_RECORD]
            memory.restore(_numpy(record, list(record)))
    except (FileNotFoundError, EOFError, KeyError, ValueError, BadZipFile):
        return ClientMemory(num_params)
    return memory


def _save_memory(context: Context, memory: ClientMemory) -> None:
    """Save it before the reply is sent: a reply that was used must never be forgotten."""
    path = context.node_config.get(_MEMORY_FILE)
    if path is None:
        context.state[_MEMORY_RECORD] = ArrayRecord({name: Array(array) for name, array in memory.arrays().items()})
        return
    target, content = Path(str(path)), BytesIO()
    np.savez(content, allow_pickle=False, **memory.arrays())
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content.getvalue())


def _statistics(reply: Message) -> dict[str, int | float | list[int] | list[float]]:
    """Statistics that the client put into its own metrics."""
    statistics: dict[str, int | float | list[int] | list[float]] = {}
    for record in reply.content.metric_records.values():
        for name in (*LOSS_NAMES, SQUARE_LOSS, STEP_VARIANCE, NUM_STEPS):
            value = record.get(name)
            if value is not None and not isinstance(value, list):
                statistics.setdefault(LOSS if name in LOSS_NAMES else name, value)
    return statistics


def _only_arrays(message: Message) -> ArrayRecord | None:
    """A copy of the array record of a message, if there is exactly one."""
    records = list(message.content.array_records.values())
    return ArrayRecord(dict(records[0].items())) if len(records) == 1 else None


def _trained_names(config: ConfigRecord, sent: ArrayRecord) -> list[str]:
    trained = config.get(TRAINED)
    return [str(name) for name in trained] if isinstance(trained, list) else list(sent)


def _trained(config: ConfigRecord, sent: ArrayRecord, received: ArrayRecord) -> tuple[Arrays, Arrays] | None:
    """The trained arrays, sent and received; None if they do not match, which the server will report."""
    names = _trained_names(config, sent)
    if not set(names) <= set(received) or not names:
        return None
    old, new = _numpy(sent, names), _numpy(received, names)
    if any(old[name].shape != new[name].shape or old[name].dtype.kind != "f" for name in names):
        return None
    return old, new


def _replace_arrays(reply: Message, arrays: Arrays) -> None:
    ((name, record),) = reply.content.array_records.items()
    changed = {key: Array(array) for key, array in arrays.items()}
    reply.content[name] = ArrayRecord({key: changed.get(key, array) for key, array in record.items()})


def _numpy(record: ArrayRecord, names: list[str]) -> Arrays:
    return {name: record[name].numpy() for name in names}
