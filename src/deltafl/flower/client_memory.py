"""Where a client keeps its memory between two messages, and how it subtracts it from its reply.

In Flower's ``Context.state`` by default: it lives as long as the run does, and the node's process. With ``memory-file``
in the node's config (``flower-supernode --node-config 'memory-file="/var/lib/my-node/memory.npz"'``) in that file,
which outlives both; one file for one node and one federation. It takes up to 20 bytes a parameter (``ClientMemory``).
"""

from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from flwr.app import Array, ArrayRecord, Context

from ..estimators.remote import ClientMemory
from ..plain_files import write_atomically
from .arrays import Arrays, update_of

FILE = "memory-file"
_RECORD = "deltafl-memory"


def recall(context: Context, num_params: int) -> ClientMemory:
    """What this client remembers; nothing, if that is lost, damaged or of another model."""
    memory = ClientMemory(num_params)
    path = context.node_config.get(FILE)
    try:
        if path is not None:
            with np.load(Path(str(path)), allow_pickle=False) as file:
                memory.restore({name: file[name] for name in file.files})
        elif _RECORD in context.state.array_records:
            record = context.state.array_records[_RECORD]
            memory.restore({name: array.numpy() for name, array in record.items()})
    except (FileNotFoundError, EOFError, KeyError, ValueError, BadZipFile):
        return ClientMemory(num_params)
    return memory


def keep(context: Context, memory: ClientMemory) -> None:
    """Remember it, before the reply is sent: a reply that was taken must never be forgotten."""
    path = context.node_config.get(FILE)
    if path is None:
        context.state[_RECORD] = ArrayRecord({name: Array(array) for name, array in memory.arrays().items()})
        return
    target, content = Path(str(path)), BytesIO()
    np.savez(content, allow_pickle=False, **memory.arrays())
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content.getvalue())


def subtracted(memory: ClientMemory, taken: int, sent: Arrays, received: Arrays) -> Arrays:
    """The arrays to send instead of a client's own: received - sent is then u_i - c_i.

    Args:
        memory: What the client remembers; it learns what the server will see, which rounds received - sent.
        taken: The c_i that the server counts on.
        sent: The trained arrays that the client was sent, in the server's order.
        received: The same after its work.
    """
    difference_d, arrays, start = memory.reply(update_of(sent, received), taken).difference_d, {}, 0
    for name, old in sent.items():
        part = difference_d[start : start + old.size].reshape(old.shape)
        start += old.size
        with np.errstate(over="ignore", invalid="ignore"):
            arrays[name] = (old.astype(np.float64) + part).astype(received[name].dtype)
    memory.sent_as(update_of(sent, arrays))
    return arrays
