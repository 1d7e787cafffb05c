"""The client's side: a mod, the registration, and what a training loop may report beside its loss."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ..arrays import Arrays, as_array, split, update_of
from ..errors import DeltaflError
from ..estimators.remote import NOTHING, ClientMemory
from ..io import private_folder, write_atomically
from ..samplers.census import Census, output_layer
from ..types import FloatArray

#: The record that the mod adds, and the action of the registration query (``query.deltafl``).
RECORD = "deltafl"
KIND, CLIENT_ID, NUM_EXAMPLES, AUX = "kind", "client-id", "num-examples", "aux"
#: In the train message's config: names, and the c_i that the server counts on. In a reply: the c_i subtracted.
TRAINED, MEMORY_EXPECTED, MEMORY_SINCE = "deltafl-trained", "deltafl-taken", "memory-since"
#: In a train message's config: [size, noise] of the answer that is wanted. In the reply: the answer.
CENSUS = "deltafl-census"
#: Names of the statistics in a client's metrics.
LOSS, SQUARE_LOSS, STEP_VARIANCE, NUM_STEPS = "loss", "square-loss", "step-variance", "num-steps"

_MEMORY_FILE = "memory-file"
_MEMORY_RECORD = "deltafl-memory"


def delta_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod for ``census`` and for the ``...-remote`` estimators of ``DeltaStrategy``.

    Asked for a census, the client trains as usual and replies with ``Census.answer`` alone: no arrays, no metrics. Its
    noise is secret, hence not reproducible.

    With a ``-remote`` estimator the client remembers its last update: instead of its update it sends the difference
    from that, and the metric record ``deltafl`` with its name. The memory
    is in Flower's ``Context.state``, which lives as long as the run and the node's process, or in the file that
    ``memory-file`` in the node's config names, one per node and federation. Make it the first mod: if one before it
    changes the arrays, the memory is lost. All other messages pass unchanged.
    """
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    expected, is_train = config.get(MEMORY_EXPECTED), message.metadata.message_type.split(".")[0] == "train"
    if is_train and CENSUS in config:
        return _census_reply(message, context, call_next, config)
    if not is_train or not isinstance(expected, int):
        return call_next(message, context)
    sent = _trained(message, config)  # now, for the client may overwrite the arrays that it was given
    memory = _load_memory(context, sum(array.size for array in sent.values()))
    if not memory.follows(expected):
        # Training would be in vain: the server cannot use an update whose c_i it does not know.
        return Message(RecordDict({RECORD: MetricRecord({MEMORY_SINCE: NOTHING})}), reply_to=message)
    reply = call_next(message, context)
    received = {} if reply.has_error() else _trained(reply, config)
    if not _fits(sent, received):
        return reply  # the server reports what is wrong
    ((name, record),) = reply.content.array_records.items()
    changed = subtract_memory(memory, expected, sent, received)
    reply.content[name] = ArrayRecord({**record, **{key: Array(array) for key, array in changed.items()}})
    _save_memory(context, memory)  # before the reply is sent: one that was used must never be forgotten
    reply.content[RECORD] = MetricRecord({MEMORY_SINCE: expected})
    return reply


def _census_reply(message: Message, context: Context, call_next: ClientAppCallable, config: ConfigRecord) -> Message:
    """The answer to a census, in the place of what was trained; an empty one if that is not the model."""
    sent = _trained(message, config)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    received, asked, answer = _trained(reply, config), config[CENSUS], list[float]()
    if _fits(sent, received) and isinstance(asked, list):
        census = Census(size=int(asked[0]), noise=float(asked[1]))
        tensors = output_layer([array.shape for array in sent.values()])
        answer = census.answer(update_of(sent, received), tensors, rng=np.random.default_rng()).tolist()
    return Message(RecordDict({RECORD: MetricRecord({CENSUS: answer})}), reply_to=message)


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
        client_id: Context -> a text that survives restarts; None for ``client-id`` of the node's config
            (``flower-supernode --node-config 'client-id="hospital-a"'``), else its ``partition-id``.
        aux: Context -> auxiliary variables, such as the share of each label in its data, for ``DeltaStrategy(aux=10)``.
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
    cure = "start it with --node-config 'client-id=\"NAME\"' or give client_id to register()"
    raise DeltaflError(f"the node's config has neither 'client-id' nor 'partition-id'; {cure}")


class LocalSteps:
    """Collects one round's local steps, with any framework.

    ``step-variance`` = lr^2 ((1/K) sum_k norm(g_k)^2 - norm((1/K) sum_k g_k)^2) >= 0 over the K minibatch gradients g_k
    along the path (DELTA paper, section 4: sigma_i^2 from the steps that are taken anyway). ``square-loss``, which
    ``oort`` uses, is the mean of loss^2 over the examples of a minibatch, and over the steps; it is reported if every
    step has the losses of its examples.

    Args:
        lr: Local learning rate > 0. With an optimizer other than SGD, pass 1 and add the steps instead of gradients.

    Example:
        >>> steps = LocalSteps(lr=0.5)
        >>> steps.add(1.0, [np.array([2.0, 0.0])])
        >>> steps.add(3.0, [np.array([0.0, 2.0])])
        >>> steps.metrics()
        {'loss': 2.0, 'step-variance': 0.5, 'num-steps': 2}
    """

    def __init__(self, lr: float) -> None:
        if not lr > 0:
            raise DeltaflError(f"lr is {lr}; the local learning rate must be above 0")
        self.lr = lr
        self._count, self._loss, self._square = 0, 0.0, 0.0
        self._sums: list[FloatArray | float] | None = None
        self._square_loss: float | None = 0.0

    def add(
        self, loss: float, gradients: Iterable[Any | None] | None = None, example_losses: Any | None = None
    ) -> None:
        """Count one step.

        Args:
            loss: The minibatch's mean loss, before the step.
            gradients: One array (NumPy, or a tensor of PyTorch or TensorFlow) per parameter, in PyTorch
                ``[p.grad for p in model.parameters()]``, the same in every step; None for one without a gradient. None
                for the list leaves the variance 0, "not measured".
            example_losses: The losses whose mean ``loss`` is, one per example of the minibatch; None to report no
                ``square-loss``.

        Raises:
            DeltaflError: If the number of gradients differs from the first step's.
        """
        losses = None if example_losses is None else np.float64(as_array(example_losses))
        square = None if losses is None else float(np.mean(losses**2))
        self._square_loss = None if square is None or self._square_loss is None else self._square_loss + square
        self._count += 1
        self._loss += float(loss)
        if gradients is None:
            return
        # Frozen, or not used in this step: a gradient of zero.
        arrays = [0.0 if gradient is None else np.float64(as_array(gradient)) for gradient in gradients]
        sums = self._sums or [0.0] * len(arrays)
        if len(arrays) != len(sums):
            raise DeltaflError(f"this step has {len(arrays)} gradients, the first had {len(sums)}")
        for array in arrays:
            self._square += float(np.sum(array**2))
        self._sums = [total + array for total, array in zip(sums, arrays, strict=True)]

    def metrics(self) -> dict[str, float | int]:
        """The statistics under the names that the server reads; put them into the reply's ``MetricRecord``.

        Raises:
            DeltaflError: If no step was counted.
        """
        if self._count == 0:
            raise DeltaflError("no local step was counted; call add() once per minibatch")
        count = self._count
        of_sum = sum(float(np.sum(total**2)) for total in self._sums or [])
        variance = self.lr**2 * (self._square / count - of_sum / count**2)
        # Not max(0, .): the NaN of a training that diverged must reach the server, which rejects the reply.
        variance = 0.0 if variance < 0 or count == 1 else variance
        squares = {} if self._square_loss is None else {SQUARE_LOSS: self._square_loss / count}
        return {LOSS: self._loss / count, **squares, STEP_VARIANCE: variance, NUM_STEPS: count}


def subtract_memory(memory: ClientMemory, expected: int, sent: Arrays, received: Arrays) -> Arrays:
    """The trained arrays to send instead of a client's own, so that received - sent is u_i - c_i.

    ``memory`` records what the server, which counts on the c_i ``expected``, will see: rounding included.
    """
    difference_d = memory.reply(update_of(sent, received), expected).difference_d
    parts = split(difference_d, {name: array.shape for name, array in sent.items()})
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = {
            name: (old.astype(np.float64) + parts[name]).astype(received[name].dtype) for name, old in sent.items()
        }
    memory.sent_as(update_of(sent, arrays))
    return arrays


def _load_memory(context: Context, num_params: int) -> ClientMemory:
    """The client's memory; an empty one if it is lost, damaged or of another model."""
    memory = ClientMemory(num_params)
    path = context.node_config.get(_MEMORY_FILE)
    content = BytesIO(b"" if path is None or not Path(str(path)).exists() else Path(str(path)).read_bytes())
    with suppress(Exception):  # whatever damaged bytes can make NumPy raise; the file's checksums show the damage
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
        context.state[_MEMORY_RECORD] = ArrayRecord({name: Array(array) for name, array in memory.arrays().items()})
        return
    target, content = Path(str(path)), BytesIO()
    np.savez(content, allow_pickle=False, **memory.arrays())
    private_folder(target.parent)
    write_atomically(target, content.getvalue(), private=True)


def _trained(message: Message, config: ConfigRecord) -> Arrays:
    """The trained arrays of a message, in the server's order; none if there is not exactly one array record."""
    records, names = list(message.content.array_records.values()), config[TRAINED]
    if len(records) != 1 or not isinstance(names, list):
        return {}
    return {str(name): records[0][str(name)].numpy() for name in names if name in records[0]}


def _fits(sent: Arrays, received: Arrays) -> bool:
    """Whether what came back is the model that was sent."""
    return all(name in received and received[name].shape == array.shape for name, array in sent.items())
