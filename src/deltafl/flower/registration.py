"""The server's side of registration: which nodes are connected, and which client each of them is.

A node id says nothing about a client, for it changes between runs. A client has a key instead: ``partition:`` in a
simulation, ``key:`` (fingerprint of the node's public key), ``name:`` (registered with the SuperLink) or ``client:``
(self-reported). docs/flower.md says who vouches for which.
"""

import hashlib
import time
from collections.abc import Callable, Collection
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.superlink.grid import InMemoryGrid

from ..errors import DeltaflError
from .client import AUX, CLIENT_ID, KIND, NUM_EXAMPLES, RECORD
from .clients import LARGEST_SIZE, ClientInfo
from .messages import by_recipient, fault_of

_LONGEST_KEY = 200
_LARGEST_AUX = 1e9
#: Seconds until a node whose registration failed is asked again.
_RETRY = 30.0


class Directory:
    """Clients by key, and the nodes through which they can be reached now.

    Args:
        identity: How clients are identified, see ``client_key``.
        timeout: Seconds that nodes have to answer the registration query.
        num_aux: Number of auxiliary variables that every client must send.
        forget: Keys of clients that are treated as absent.
    """

    def __init__(self, identity: str, timeout: float, num_aux: int = 0, forget: Collection[str] = ()) -> None:
        self.identity, self.timeout, self.num_aux, self.forget = identity, timeout, num_aux, frozenset(forget)
        #: Node id -> (key, what it reported), in the order of registration.
        self._registered: dict[int, tuple[str, ClientInfo]] = {}
        #: Node id -> (node, the query under way, when it counts as failed).
        self._queried: dict[int, tuple[NodeInfo, Message, float]] = {}
        #: Node id -> when it may be asked again.
        self._failed: dict[int, float] = {}
        self._last_fault = ""
        self._warned: set[str] = set()

    def refresh(self, grid: Grid) -> dict[str, ClientInfo]:
        """Look who is connected, read the answers that came, query new nodes; returns all registered clients by key.

        Never waits: a node that answers slowly, or not at all, holds nobody up.
        """
        nodes = {node.node_id: node for node in grid.get_nodes()}
        self._registered = {node_id: entry for node_id, entry in self._registered.items() if node_id in nodes}
        self._queried = {node_id: query for node_id, query in self._queried.items() if node_id in nodes}
        self._failed = {node_id: retry for node_id, retry in self._failed.items() if node_id in nodes}
        self._collect(grid)
        now = time.monotonic()
        busy = {*self._registered, *self._queried, *(node_id for node_id, retry in self._failed.items() if retry > now)}
        new = [nodes[node_id] for node_id in sorted(nodes.keys() - busy)]
        if new:
            wanted = RecordDict({RECORD: ConfigRecord({AUX: self.num_aux} if self.num_aux else {})})
            queries = [Message(wanted, node.node_id, f"query.{RECORD}", ttl=self.timeout) for node in new]
            grid.push_messages(queries)
            for node, query in zip(new, queries, strict=True):
                self._queried[node.node_id] = (node, query, time.monotonic() + self.timeout)
            self._collect(grid)
        return {key: info for key, info in self._registered.values() if key not in self.forget}

    def nodes(self) -> dict[str, int]:
        """Key -> node id; of two nodes with one key the later one, for the other may be its own past."""
        by_key: dict[str, int] = {}
        for node_id, (key, _) in self._registered.items():
            if key in by_key:
                self._warn(
                    f"twice {key}",
                    f"nodes {by_key[key]} and {node_id} are both connected as client {key!r}; only the latter is used. "
                    "If no node was just restarted, two clients share an id",
                )
            by_key[key] = node_id
        return by_key

    def wait(
        self,
        grid: Grid,
        min_nodes: int,
        seconds: float,
        settle: bool,
        admit: Callable[[dict[str, ClientInfo]], dict[str, ClientInfo]],
    ) -> dict[str, ClientInfo]:
        """Refresh until enough clients are there; returns those that can be selected.

        Args:
            grid: Flower's grid.
            min_nodes: How many clients are enough.
            seconds: How long to wait for them.
            settle: Also wait until no more clients come and all nodes have answered: at the start, when all connect.
            admit: Lets clients join, and returns those that can be selected; called once enough are connected.

        Raises:
            DeltaflError: If there are too few clients when the time is over.
        """
        end = time.monotonic() + seconds
        before = -1
        while True:
            present = self.refresh(grid)
            settled = len(present) == before and not self._queried
            over = time.monotonic() >= end
            able = present
            if len(present) >= min_nodes and (settled or not settle or over):
                able = admit(present)
                if len(able) >= min_nodes:
                    return able
            if over:
                raise DeltaflError(self._too_few(len(able), min_nodes, seconds, len(present) - len(able)))
            if len(able) < min_nodes and len(present) != before:
                log(INFO, "Waiting for clients: %d registered, %d needed", len(able), min_nodes)
            before = len(present)
            time.sleep(min(1.0, max(0.05, end - time.monotonic())))

    def _too_few(self, count: int, min_nodes: int, seconds: float, left_out: int) -> str:
        text = f"{count} clients are registered and connected after {seconds:g} s, {min_nodes} are needed; start more "
        text += "SuperNodes, lower min_nodes, or raise wait_for_nodes"
        if left_out:
            text += f". {left_out} more came after the first round and were left out, as the log says"
        if self._failed:
            text += (
                f". {len(self._failed)} connected nodes did not register (last reason: {self._last_fault}); does their "
                "ClientApp call deltafl.flower.register(app, ...)?"
            )
        if self._queried:
            text += f". {len(self._queried)} connected nodes have not answered yet"
        return text

    def _collect(self, grid: Grid) -> None:
        """Read the answers that have come; a node that did not answer in time has failed."""
        if not self._queried:
            return
        queries = [(node_id, query) for node_id, (_, query, _) in self._queried.items()]
        replies = by_recipient(queries, grid.pull_messages([query.metadata.message_id for _, query in queries]))
        simulated = isinstance(grid, InMemoryGrid)
        num_failed, now = 0, time.monotonic()
        for node_id, (node, _, end) in list(self._queried.items()):
            reply = replies.get(node_id)
            if reply is None and now < end:
                continue
            del self._queried[node_id]
            try:
                own_key, info = read_registration(reply, self.num_aux)
                key = client_key(self.identity, node, own_key, simulated)
            except DeltaflError as error:
                num_failed += 1
                self._failed[node_id], self._last_fault = now + _RETRY, str(error)
                continue
            self._failed.pop(node_id, None)
            self._registered[node_id] = (key, info)
            if key == own_key and not (simulated and key.startswith("partition:")):
                self._warn(
                    "self-reported",
                    "clients report their ids themselves: a client can take another's place, or count several times "
                    "under several ids. Enable node authentication and write identity='public-key'",
                )
        if num_failed:
            log(WARNING, "%d nodes did not register; the last: %s", num_failed, self._last_fault)

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log(WARNING, text)


def client_key(identity: str, node: NodeInfo, own_key: str, simulated: bool) -> str:
    """The durable key of a client.

    Args:
        identity: ``"public-key"``, ``"name"``, ``"config"``, or ``"auto"``: the partition in a simulation, the public
            key of a node that was registered under a name, else the id that the node reports.
        node: What the SuperLink knows about the node.
        own_key: ``"partition:..."`` or ``"client:..."``, from what the client reports.
        simulated: Whether Flower's simulation made the node, so that its partition is certain.

    Raises:
        DeltaflError: If the SuperLink does not know what the key is to be made of.
    """
    if identity == "public-key" or (identity == "auto" and not simulated and node.name):
        if not node.public_key:
            raise DeltaflError(
                f"node {node.node_id} has no public key; write identity='config' or enable authentication"
            )
        return "key:" + hashlib.sha256(node.public_key).hexdigest()[:40]
    if identity == "name":
        if not node.name:
            raise DeltaflError(
                f"node {node.node_id} has no registered name; register it with 'flwr supernode register --name', or "
                "write identity='public-key'"
            )
        return "name:" + node.name[:_LONGEST_KEY]
    return own_key


def read_registration(reply: Message | None, num_aux: int = 0) -> tuple[str, ClientInfo]:
    """A client's own key and what it reports, from a reply that may hold anything.

    Raises:
        DeltaflError: If there is no reply, or a value in it is not what it should be.
    """
    if reply is None:
        raise DeltaflError("no answer to the registration query in time")
    fault = fault_of(reply)
    if fault is not None:
        raise DeltaflError(fault)
    record = reply.content.config_records.get(RECORD)
    if record is None:
        raise DeltaflError("the answer to the registration query is another client's; call deltafl.flower.register")
    kind, client_id, size, aux = (record.get(name) for name in (KIND, CLIENT_ID, NUM_EXAMPLES, AUX))
    if kind not in ("partition", "client"):
        raise DeltaflError(f"the kind of id is {str(kind)[:40]!r}; it must be 'partition' or 'client'")
    if not isinstance(client_id, str) or not 1 <= len(client_id) <= _LONGEST_KEY or not client_id.isprintable():
        raise DeltaflError(f"the client's id must be a text of 1 to {_LONGEST_KEY} printable characters")
    if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
        raise DeltaflError(f"the number of examples is {str(size)[:40]}; it must be from 1 to 2^40")
    if num_aux == 0:
        return f"{kind}:{client_id}", ClientInfo(size)
    if not isinstance(aux, list) or len(aux) != num_aux:
        raise DeltaflError(
            f"the server wants {num_aux} auxiliary variables of each client, and the client sent "
            f"{len(aux) if isinstance(aux, list) else 'none'}; give aux=... to deltafl.flower.register"
        )
    if not all(isinstance(value, int | float) and abs(value) <= _LARGEST_AUX for value in aux):
        raise DeltaflError(f"an auxiliary variable of the client is not finite, or above {_LARGEST_AUX:g}")
    return f"{kind}:{client_id}", ClientInfo(size, tuple(float(value) for value in aux))
