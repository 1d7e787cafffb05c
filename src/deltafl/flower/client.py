"""The client's side: two lines in a ClientApp.

::

    app = ClientApp(mods=[delta_mod])                          # sketches and memories, where the server asks for them
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
    """A mod that sends what ``DeltaStrategy`` asks for beside a client's own reply, in a metric record ``deltafl``.

    That is a sketch of the update (``sketch=64``) and, with a ``...-remote`` estimator, the difference from this
    client's last update, which the mod keeps: in Flower's ``Context.state``, which lives as long as the run and the
    node's process, or in the file that ``memory-file`` in the node's config names, one per node and federation. It must
    then be the first mod: if one before it changes the arrays, the server remembers something else than the client, and
    the memory is lost. All other messages pass unchanged.
    """
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    expected, size, seed = config.get(MEMORY_EXPECTED), config.get(SKETCH_SIZE), config.get(SKETCH_SEED)
    is_train = message.metadata.message_type.split(".")[0] == "train"
    if not is_train or (expected is None and size is None):
        return call_next(message, context)
    sent = _trained(message, config)  # now, for the client may overwrite the arrays that it was given
    if isinstance(expected, int):
        memory = _load_memory(context, sum(array.size for array in sent.values()))
        if not memory.follows(expected):
            # Training would be in vain: the server cannot use an update whose c_i it does not know.
            return Message(RecordDict({RECORD: MetricRecord({MEMORY_SINCE: NOTHING})}), reply_to=message)
    reply = call_next(message, context)
    received = {} if reply.has_error() else _trained(reply, config)
    if any(name not in received or received[name].shape != array.shape for name, array in sent.items()):
        return reply  # the server reports what is wrong
    asked = MetricRecord()
    if isinstance(expected, int):
        received = subtract_memory(memory, expected, sent, received)
        _replace_arrays(reply, received)
        _save_memory(context, memory)
        asked[MEMORY_SINCE] = expected
    if isinstance(size, int) and isinstance(seed, int):
        asked[SKETCH] = count_sketch(update_of(sent, received)[None], size, seed)[0].tolist()
    reply.content[RECORD] = asked
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


def _trained(message: Message, config: ConfigRecord) -> Arrays:
    """The trained arrays of a message, in the server's order; none if there is not exactly one array record."""
    records, names = list(message.content.array_records.values()), config[TRAINED]
    if len(records) != 1 or not isinstance(names, list):
        return {}
    return _numpy(records[0], [str(name) for name in names if name in records[0]])


def _replace_arrays(reply: Message, arrays: Arrays) -> None:
    ((name, record),) = reply.content.array_records.items()
    changed = {key: Array(array) for key, array in arrays.items()}
    reply.content[name] = ArrayRecord({key: changed.get(key, array) for key, array in record.items()})


def _numpy(record: ArrayRecord, names: list[str]) -> Arrays:
    return {name: record[name].numpy() for name in names}
