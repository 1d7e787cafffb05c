"""The client's side: a mod and the registration."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ..errors import DeltaflError
from ..federation.exchange import (
    AUX,
    CENSUS,
    CODE,
    NUM_EXAMPLES,
    RECORD,
    STEP_FACTOR,
    TRAINED,
    Correction,
    report_of,
)
from ..federation.facts import Fact, told
from ..model.arrays import Arrays

#: What a client reports of who it is.
KIND = "kind"
CLIENT_ID = "client-id"
#: The record of a message that is the model.
MODEL = "arrays"
#: The record of a train message that ``take_correction`` takes out.
CORRECTION = "deltafl-correction"


def delta_mod(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
) -> Message:
    """A mod for ``census``, ``scaffold``, ``mime``, ``local`` and ``trainable`` of
    ``DeltaStrategy``.

    Of a trained model the client sends the arrays that it was sent. Of others, such as local and
    frozen ones, the server sees the name alone.

    Asked for a census, the client trains as usual and replies with ``Census.answer`` alone: no
    arrays, no metrics. Its noise is secret, hence not reproducible.

    With ``scaffold`` or ``mime`` the reply says whether ``take_correction`` was called: the server
    refuses one without.

    Messages that are not for training pass unchanged.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    record = asked_in(message)
    # Copies, since the app takes entries out of the records.
    asked: dict[str, Any] = dict(record)
    # By name, as a correction, and what a user's strategy adds, are arrays as well.
    sent = _trained(message.content.array_records.get(MODEL, ArrayRecord()), asked)
    # Before the app runs, which may take arrays out of the message or rename them.
    names = {name for part in message.content.array_records.values() for name in part}
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    # ``take_correction`` has taken it out: so the server learns that it was called.
    corrected = STEP_FACTOR in asked and STEP_FACTOR not in record
    report = ConfigRecord(report_of(asked, corrected, sent, _trained(_model_in(reply), asked)))
    unsent = set(asked[TRAINED]) if CODE in asked else set()
    for part in reply.content.array_records.values():
        for name in part.keys() - (names - unsent):
            # The name stays, for the server's message where a client has renamed its arrays.
            part[name] = Array(np.zeros(0, np.float32))
    if not report:
        return reply
    if CENSUS in asked:
        return Message(RecordDict({RECORD: report}), reply_to=message)
    reply.content[RECORD] = report
    return reply


def take_correction(message: Message) -> Correction:
    """Take what the server adds to the local steps out of a train message; nothing without
    ``scaffold`` and ``mime``.

    Give it to ``corrected_steps``. In any other framework take ``step_factor`` times the usual
    steps, and add 1 / K of each array in each of K steps. ``delta_mod`` then confirms that it was
    taken.
    """
    drift = message.content.array_records.pop(CORRECTION, ArrayRecord())
    factor: Any = asked_in(message).pop(STEP_FACTOR, 1.0)
    return Correction({name: array.numpy() for name, array in drift.items()}, factor)


def register(
    app: ClientApp,
    num_examples: Callable[[Context], int],
    client_id: Callable[[Context], str | int] | None = None,
    aux: Callable[[Context], Sequence[float]] | None = None,
    stratum: Callable[[Context], str] | None = None,
    cost: Callable[[Context], float] | None = None,
) -> None:
    """Let a ClientApp answer the server's registration query.

    Args:
        app: The app; it gets a query function for the action ``deltafl``.
        num_examples: Context -> the number of examples that the client trains on.
        client_id: Context -> a text or a whole number that survives restarts; None for
            ``client-id`` of the node's config (``flower-supernode --node-config
            'client-id="hospital-a"'``), else its ``partition-id``.
        aux: Context -> auxiliary variables, such as the share of each label in its data, for
            ``DeltaStrategy(aux=10)``.
        stratum: Context -> the client's region or the like, for
            ``DeltaStrategy(strata=["north", "south"])``; None for ``stratum`` of the node's config.
        cost: Context -> what a round of the client costs, for ``DeltaStrategy(costs=True)``; None
            for ``cost`` of the node's config.
    """
    own = {"stratum": stratum, "cost": cost}

    @app.query(RECORD)
    def answer(message: Message, context: Context) -> Message:
        kind, own_id = _id_of(context, client_id)
        # A record refuses NumPy's whole numbers.
        size = int(num_examples(context))
        record = ConfigRecord({KIND: kind, CLIENT_ID: own_id, NUM_EXAMPLES: size})
        if aux is not None and asked_in(message).get(AUX):
            record[AUX] = [float(value) for value in aux(context)]

        def known(fact: Fact) -> Any:
            find = own[fact.name]
            return context.node_config.get(fact.name) if find is None else find(context)

        record.update(told(asked_in(message), known))
        return Message(RecordDict({RECORD: record}), reply_to=message)


def asked_in(message: Message) -> ConfigRecord:
    """What is asked or reported in a message."""
    return message.content.config_records.get(RECORD, ConfigRecord())


def _id_of(
    context: Context,
    client_id: Callable[[Context], Any] | None,
) -> tuple[str, Any]:
    """What kind of id a client has, and the id."""
    if client_id is not None:
        own_id = client_id(context)
        if isinstance(own_id, Integral):  # the number of its partition, say
            return "client", str(own_id)
        return "client", own_id  # what is no text the server refuses
    for name, kind in (("client-id", "client"), ("partition-id", "partition")):
        if name in context.node_config:
            return kind, str(context.node_config[name])
    raise DeltaflError(
        "the node's config has neither 'client-id' nor 'partition-id'; start it with --node-config "
        "'client-id=\"NAME\"' or give client_id to register()"
    )


def _model_in(reply: Message) -> ArrayRecord:
    """The model in a reply, whatever its app calls it: the one record of arrays, or nothing."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        return ArrayRecord()
    return records[0]


def _trained(model: ArrayRecord, asked: Mapping[str, Any]) -> Arrays:
    """The arrays that a census or a code is asked of, in the server's order."""
    names = [name for name in asked.get(TRAINED, ()) if name in model]
    return {name: model[name].numpy() for name in names}
