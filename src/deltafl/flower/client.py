"""The client's side: a mod and the registration."""

from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ..arrays import Arrays
from ..errors import DeltaflError
from ..federation.local_work import Correction, answer_census, fits

#: The record that the mod adds, and the action of the registration query (``query.deltafl``).
RECORD = "deltafl"
KIND = "kind"
CLIENT_ID = "client-id"
NUM_EXAMPLES = "num-examples"
AUX = "aux"
#: In the train message's config: the names of trained arrays.
TRAINED = "deltafl-trained"
#: In a train message's config: [size, noise] of the answer that is wanted. In the reply: the
#: answer.
CENSUS = "deltafl-census"
#: In a train message: what ``take_correction`` takes out. In a reply, if that was done: the step
#: factor.
CORRECTION = "deltafl-correction"
CORRECTED = "steps-corrected"
#: In a train message's config, with ``mime``: how many times its own steps the client takes.
STEP_FACTOR = "deltafl-step-factor"


def delta_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod for ``census``, ``scaffold`` and ``mime`` of ``DeltaStrategy``.

    Asked for a census, the client trains as usual and replies with ``Census.answer`` alone: no
    arrays, no metrics. Its noise is secret, hence not reproducible.

    With ``scaffold`` or ``mime`` the reply says whether ``take_correction`` was called: the server
    refuses one without.

    All other messages pass unchanged.
    """
    config = _config(message)
    is_train = message.metadata.message_type.split(".")[0] == "train"
    if is_train and CENSUS in config:
        return _census_reply(message, context, call_next, config)
    if is_train and CORRECTION in message.content:
        factor = _step_factor(config)
        reply = call_next(message, context)
        if CORRECTION not in message.content and not reply.has_error():
            reply.content[RECORD] = MetricRecord({CORRECTED: factor})
        return reply
    return call_next(message, context)


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
    if not isinstance(record, ArrayRecord):
        return Correction({}, factor)
    return Correction({name: array.numpy() for name, array in record.items()}, factor)


def _census_reply(
    message: Message, context: Context, call_next: ClientAppCallable, config: ConfigRecord
) -> Message:
    """The answer to a census in place of what was trained; an empty one if that is not the
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
        kind, own_id = _default_id(context) if client_id is None else ("client", client_id(context))
        size = int(num_examples(context))
        record = ConfigRecord({KIND: kind, CLIENT_ID: own_id, NUM_EXAMPLES: size})
        wanted = message.content.config_records.get(RECORD, ConfigRecord()).get(AUX)
        if aux is not None and wanted:
            record[AUX] = [float(value) for value in aux(context)]
        return Message(RecordDict({RECORD: record}), reply_to=message)


def _default_id(context: Context) -> tuple[str, str]:
    for name, kind in (("client-id", "client"), ("partition-id", "partition")):
        if name in context.node_config:
            return kind, str(context.node_config[name])
    raise DeltaflError(
        "the node's config has neither 'client-id' nor 'partition-id'; start it with --node-config "
        "'client-id=\"NAME\"' or give client_id to register()"
    )


def _config(message: Message) -> ConfigRecord:
    return next(iter(message.content.config_records.values()), ConfigRecord())


def _step_factor(config: ConfigRecord) -> float:
    factor = config.get(STEP_FACTOR)
    if isinstance(factor, float):
        return factor
    return 1.0


def _trained(message: Message, config: ConfigRecord) -> Arrays:
    """The trained arrays of a message, in the server's order; none unless it has one record."""
    records = list(message.content.array_records.values())
    names = config[TRAINED]
    if len(records) != 1 or not isinstance(names, list):
        return {}
    return {str(name): records[0][str(name)].numpy() for name in names if name in records[0]}
