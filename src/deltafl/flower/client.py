"""The client's side: a mod and the registration."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ..arrays import Arrays
from ..errors import DeltaflError
from ..estimators.remote import NOTHING, ClientMemory
from ..federation.local_work import Correction, answer_census, fits, subtract_memory
from ..io import private_folder, write_atomically

#: The record that the mod adds, and the action of the registration query (``query.deltafl``).
RECORD = "deltafl"
KIND = "kind"
CLIENT_ID = "client-id"
NUM_EXAMPLES = "num-examples"
AUX = "aux"
#: In the train message's config: names, and the c_i that the server counts on. In a reply: the c_i
#: subtracted.
TRAINED = "deltafl-trained"
MEMORY_EXPECTED = "deltafl-taken"
MEMORY_SINCE = "memory-since"
#: In a train message's config: [size, noise] of the answer that is wanted. In the reply: the
#: answer.
CENSUS = "deltafl-census"
#: In a train message: what ``take_correction`` takes out. In a reply, if that was done: the step
#: factor.
CORRECTION = "deltafl-correction"
CORRECTED = "steps-corrected"
#: In a train message's config, with ``mime``: how many times its own steps the client takes.
STEP_FACTOR = "deltafl-step-factor"

_MEMORY_FILE = "memory-file"
_MEMORY_RECORD = "deltafl-memory"


def delta_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod for ``census``, ``scaffold``, ``mime`` and the ``...-remote`` estimators of
    ``DeltaStrategy``.

    Asked for a census, the client trains as usual and replies with ``Census.answer`` alone: no
    arrays, no metrics. Its noise is secret, hence not reproducible.

    With ``scaffold`` or ``mime`` the reply says whether ``take_correction`` was called: the server
    refuses one without.

    With a ``-remote`` estimator the client remembers its last update: instead of its update it
    sends the difference from that, and the metric record ``deltafl`` with its name. The memory is
    in Flower's ``Context.state``, which lives as long as the run and the node's process, or in the
    file that ``memory-file`` in the node's config names, one per node and federation. Make it the
    first mod: if one before it changes the arrays, the memory is lost. All other messages pass
    unchanged.
    """
    config = _config(message)
    expected = config.get(MEMORY_EXPECTED)
    is_train = message.metadata.message_type.split(".")[0] == "train"
    if is_train and CENSUS in config:
        return _census_reply(message, context, call_next, config)
    if is_train and CORRECTION in message.content:
        factor = _step_factor(config)
        reply = call_next(message, context)
        if CORRECTION not in message.content and not reply.has_error():
            reply.content[RECORD] = MetricRecord({CORRECTED: factor})
        return reply
    if not is_train or not isinstance(expected, int):
        return call_next(message, context)
    sent = _trained(
        message, config
    )  # now, for the client may overwrite the arrays that it was given
    memory = _load_memory(context, sum(array.size for array in sent.values()))
    if not memory.follows(expected):
        # Training would be in vain: the server cannot use an update whose c_i it does not know.
        return Message(
            RecordDict({RECORD: MetricRecord({MEMORY_SINCE: NOTHING})}), reply_to=message
        )
    reply = call_next(message, context)
    received = {} if reply.has_error() else _trained(reply, config)
    if not fits(sent, received):
        return reply  # the server reports what is wrong
    ((name, record),) = reply.content.array_records.items()
    changed = subtract_memory(memory, expected, sent, received)
    reply.content[name] = ArrayRecord(
        {**record, **{key: Array(array) for key, array in changed.items()}}
    )
    _save_memory(
        context, memory
    )  # before the reply is sent: one that was used must never be forgotten
    reply.content[RECORD] = MetricRecord({MEMORY_SINCE: expected})
    return reply


def take_correction(message: Message) -> Correction:
    """Take what the server adds to the local steps out of a train message; nothing without
    ``scaffold`` and ``mime``.

    Give it to ``corrected_steps``. In any other framework take ``step_factor`` times the usual
    steps, and add 1 / K of each array in each of K steps. ``delta_mod`` then confirms that it was
    taken.
    """
    record = message.content.pop(CORRECTION, None)
    config = _config(message)
    factor = _step_factor(config)
    config.pop(STEP_FACTOR, None)
    arrays = (
        {name: array.numpy() for name, array in record.items()}
        if isinstance(record, ArrayRecord)
        else {}
    )
    return Correction(arrays, factor)


def _census_reply(
    message: Message, context: Context, call_next: ClientAppCallable, config: ConfigRecord
) -> Message:
    """The answer to a census, in the place of what was trained; an empty one if that is not the
    model.
    """
    sent = _trained(message, config)
    factor = _step_factor(config)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    received = _trained(reply, config)
    asked = config[CENSUS]
    answered = MetricRecord({CENSUS: []})
    if fits(sent, received) and isinstance(asked, list):
        answered[CENSUS] = answer_census(sent, received, asked)
    if factor < 1 and STEP_FACTOR not in config:
        answered[CORRECTED] = factor
    return Message(RecordDict({RECORD: answered}), reply_to=message)


def register(
    app: ClientApp,
    num_examples: Callable[[Context], int],
    client_id: Callable[[Context], str] | None = None,
    aux: Callable[[Context], Sequence[float]] | None = None,
) -> None:
    """Let a ClientApp answer the server's registration query.

    Args:
        app: The app; it gets a query function for the action ``deltafl``.
        num_examples: Context -> the number of examples that the client trains on.
        client_id: Context -> a text that survives restarts; None for ``client-id`` of the node's
            config (``flower-supernode --node-config 'client-id="hospital-a"'``), else its
            ``partition-id``.
        aux: Context -> auxiliary variables, such as the share of each label in its data, for
            ``DeltaStrategy(aux=10)``.
    """

    @app.query(RECORD)
    def answer(message: Message, context: Context) -> Message:
        kind, own_id = ("client", client_id(context)) if client_id else _default_id(context)
        record = ConfigRecord(
            {KIND: kind, CLIENT_ID: own_id, NUM_EXAMPLES: int(num_examples(context))}
        )
        wanted = message.content.config_records.get(RECORD, ConfigRecord()).get(AUX)
        if aux is not None and wanted:
            record[AUX] = [float(value) for value in aux(context)]
        return Message(RecordDict({RECORD: record}), reply_to=message)


def _default_id(context: Context) -> tuple[str, str]:
    for name, kind in (("client-id", "client"), ("partition-id", "partition")):
        if name in context.node_config:
            return kind, str(context.node_config[name])
    cure = "start it with --node-config 'client-id=\"NAME\"' or give client_id to register()"
    raise DeltaflError(f"the node's config has neither 'client-id' nor 'partition-id'; {cure}")


def _load_memory(context: Context, num_params: int) -> ClientMemory:
    """The client's memory; an empty one if it is lost, damaged or of another model."""
    memory = ClientMemory(num_params)
    path = context.node_config.get(_MEMORY_FILE)
    content = BytesIO(
        b"" if path is None or not Path(str(path)).exists() else Path(str(path)).read_bytes()
    )
    with suppress(
        Exception
    ):  # whatever damaged bytes can make NumPy raise; the file's checksums show the damage
        if path is not None:
            with np.load(content, allow_pickle=False) as file:
                memory.restore(dict(file))
        else:
            record = context.state.array_records[_MEMORY_RECORD]
            memory.restore({name: array.numpy() for name, array in record.items()})
    return memory


def _save_memory(context: Context, memory: ClientMemory) -> None:
    path = context.node_config.get(_MEMORY_FILE)
    if path is None:
        context.state[_MEMORY_RECORD] = ArrayRecord(
            {name: Array(array) for name, array in memory.arrays().items()}
        )
        return
    target = Path(str(path))
    content = BytesIO()
    np.savez(content, allow_pickle=False, **memory.arrays())
    private_folder(target.parent)
    write_atomically(target, content.getvalue(), private=True)


def _config(message: Message) -> ConfigRecord:
    return next(iter(message.content.config_records.values()), ConfigRecord())


def _step_factor(config: ConfigRecord) -> float:
    factor = config.get(STEP_FACTOR, 1.0)
    return factor if isinstance(factor, float) else 1.0


def _trained(message: Message, config: ConfigRecord) -> Arrays:
    """The trained arrays of a message, in the server's order; none if there is not exactly one
    array record.
    """
    records = list(message.content.array_records.values())
    names = config[TRAINED]
    if len(records) != 1 or not isinstance(names, list):
        return {}
    return {str(name): records[0][str(name)].numpy() for name in names if name in records[0]}
