"""The server's side of registration: which nodes are connected, and which client each of them is.

Node ids change between runs, so a client has a key: ``partition:`` in a simulation, ``key:``
(fingerprint of the node's public key), ``name:`` (registered with the SuperLink) or ``client:``
(self-reported). See docs/how-to/flower-security.md.
"""

import hashlib
import time
from collections.abc import Callable
from logging import INFO, WARNING
from math import inf
from typing import Annotated, Literal

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.superlink.grid import InMemoryGrid
from pydantic import BaseModel, StringConstraints

from ..errors import DeltaflError, counted, printable
from ..federation.clients import ClientInfo
from ..federation.exchange import RECORD
from ..federation.registration import CURE, NO_REGISTRATION, read_info
from ..federation.replies import named
from ..federation.rules import Rules
from ..store import checked
from .client import CLIENT_ID, KIND
from .messages import by_recipient, report_in

#: Seconds until a node whose registration failed is asked again; twice as long after each failure,
#: for Flower logs a traceback for each.
_RETRY = 30.0
_MOST = 600.0
#: Seconds between two lines of the log about the same thing.
_PAUSE = 60.0
#: Texts of which is known when they were logged.
_LOGGED = 1000
#: Of an app that knows no query, and of one that does not answer.
_NOT_ASKED = ("No query function", NO_REGISTRATION)
_QUESTION = "does their ClientApp call deltafl.flower.register(app, num_examples=...)?"


class Identity(BaseModel):
    """The kind of a client's id, and the id (printable characters)."""

    kind: Literal["partition", "client"]
    # Printable alone, since logs have it.
    client_id: Annotated[
        str, StringConstraints(strict=True, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]{1,200}$")
    ]


class Directory:
    """Clients by key, and the nodes through which they can be reached now; those to forget count
    as absent.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        #: Node id -> (key, what it reported), in the order of registration.
        self._registered: dict[int, tuple[str, ClientInfo]] = {}
        #: Node id -> the query under way, and when it counts as failed.
        self._queries: dict[int, tuple[Message, float]] = {}
        #: Node id -> when to ask it again, and for how long not if it fails then.
        self._failed: dict[int, tuple[float, float]] = {}
        self._last_fault = f"no answer yet; {_QUESTION}"
        #: What was logged -> when it may be logged again.
        self._logged: dict[str, float] = {}

    def refresh(self, grid: Grid) -> dict[str, ClientInfo]:
        """Query new nodes and read the answers that came, without waiting; all clients by key."""
        nodes = {node.node_id: node for node in grid.get_nodes()}
        # A node that is gone and comes back is asked again.
        for known in (self._registered, self._queries, self._failed):
            for gone in known.keys() - nodes.keys():
                known.pop(gone)
        # A wall clock may be set back, and then nobody would be asked again.
        now = time.monotonic()
        new = sorted(
            node_id
            for node_id in nodes.keys() - self._registered.keys() - self._queries.keys()
            if node_id not in self._failed or self._failed[node_id][0] <= now
        )
        if not self._registered:
            # Their app fails them all: one that is asked again speaks for the others.
            again = [node_id for node_id in new if node_id in self._failed]
            new = sorted(set(new).difference(again[1:]))
        if new:
            asked = ConfigRecord(self.rules.registration)
            wanted = RecordDict({RECORD: asked})
            seconds = self.rules.registration_timeout
            kind = f"query.{RECORD}"
            messages = [Message(wanted, node_id, kind, ttl=seconds) for node_id in new]
            grid.push_messages(messages)
            for node_id, message in zip(new, messages, strict=True):
                self._queries[node_id] = (message, now + seconds)
        if self._queries:
            self._collect(grid, nodes)
        forget = self.rules.forget
        return {key: info for key, info in self._registered.values() if key not in forget}

    def nodes(self) -> dict[str, int]:
        """Key -> node id; of two nodes with one key the later one: the other may be its own
        past.
        """
        by_key: dict[str, int] = {}
        for node_id, (key, _) in self._registered.items():
            if key in by_key:
                text = (
                    f"nodes {by_key[key]} and {node_id} are both connected as client {key!r}; only "
                    "the latter is used. "
                    "If no node was just restarted, two clients share an id"
                )
                self._log_at_times(WARNING, text, pause=inf)
            by_key[key] = node_id
        return by_key

    def wait(
        self,
        grid: Grid,
        seconds: float,
        admit: Callable[[dict[str, ClientInfo]], dict[str, ClientInfo]],
        settle: bool,
    ) -> dict[str, ClientInfo]:
        """Refresh until ``admit`` lets enough clients in; with ``settle`` also until all
        answered.
        """
        needed = self.rules.min_clients
        end = time.monotonic() + seconds
        before = -1
        while True:
            present = able = self.refresh(grid)
            # Nobody new since the last look, and no query under way: else the first round would
            # belong to those who connect first.
            settled = len(present) == before and not self._queries
            over = time.monotonic() >= end
            if len(present) >= needed and (settled or not settle or over):
                able = admit(present)
                if len(able) >= needed:
                    return able
            if over:
                silent = len(self._queries.keys() | self._failed.keys())
                others = ""
                if silent:
                    others = f". {silent} more did not register (the last: {self._last_fault})"
                raise DeltaflError(
                    f"{counted(len(able), 'client is', 'clients are')} registered and connected "
                    f"after {seconds:g} s, {needed} are needed; start more SuperNodes, lower "
                    f"min_nodes, or raise wait_for_nodes{others}"
                )
            if len(able) < needed:
                self._log_failures()
            if len(able) < needed and len(present) != before:
                text = "Waiting for clients: %d registered, %d needed"
                self._log_at_times(INFO, text, len(able), needed)
            before = len(present)
            time.sleep(min(1.0, max(0.05, end - time.monotonic())))

    def _collect(self, grid: Grid, nodes: dict[int, NodeInfo]) -> None:
        """Read the answers to the queries that are under way."""
        pending = [(node_id, message) for node_id, (message, _) in self._queries.items()]
        ids = [message.metadata.message_id for _, message in pending]
        replies = by_recipient(pending, grid.pull_messages(ids))
        # Flower's simulation engine alone has its grid in this process.
        simulated = isinstance(grid, InMemoryGrid)
        now = time.monotonic()
        failed = False
        for node_id, _ in pending:
            reply = replies.get(node_id)
            if reply is None and now < self._queries[node_id][1]:
                continue
            del self._queries[node_id]
            try:
                own_key, info = read_registration(reply, self.rules)
                key = client_key(
                    self.rules.identity,
                    nodes[node_id],
                    own_key,
                    simulated,
                )
            except DeltaflError as error:
                _, seconds = self._failed.get(node_id, (now, _RETRY))
                self._failed[node_id] = (now + seconds, min(2 * seconds, _MOST))
                self._last_fault = str(error)
                if any(sign in self._last_fault for sign in _NOT_ASKED):
                    self._last_fault += f"; {_QUESTION}"
                failed = True
                continue
            self._failed.pop(node_id, None)
            self._registered[node_id] = (key, info)
            # Nothing but its own word says who it is. In a simulation the engine gives the
            # partition.
            if key == own_key and not (simulated and key.startswith("partition:")):
                text = (
                    "clients report their ids themselves: a client can take another's place, or "
                    "count several times "
                    "under several ids. Enable node authentication and write identity='public-key'"
                )
                self._log_at_times(WARNING, text, pause=inf)
        if failed:
            self._log_failures()
        if failed and not self._registered:
            # One app, one fault: all wait as long as the last, as Flower logs a traceback for each.
            self._failed = dict.fromkeys(self._failed, max(self._failed.values()))

    def _log_failures(self) -> None:
        if self._failed:
            text = "%d nodes did not register. The last: %s"
            self._log_at_times(WARNING, text, len(self._failed), self._last_fault)

    def _log_at_times(
        self,
        level: int,
        text: str,
        *numbers: object,
        pause: float = _PAUSE,
    ) -> None:
        """Log this, unless it was logged less than ``pause`` seconds ago, with any numbers."""
        now = time.monotonic()
        if len(self._logged) > _LOGGED:  # nodes may come under any number of names
            self._logged.clear()
        if self._logged.get(text, now) <= now:
            self._logged[text] = now + pause
            log(level, text, *numbers)


def client_key(identity: str, node: NodeInfo, own_key: str, simulated: bool) -> str:
    """The durable key of a client that reported ``own_key``; simulated partitions are certain."""
    if identity == "config" or (identity == "auto" and (simulated or not node.name)):
        return own_key
    if identity == "name" and node.name:
        # Keys stand in logs and in saved states, and a name may be anything.
        return "name:" + printable(node.name)
    if identity != "name" and node.public_key:
        return "key:" + hashlib.sha256(node.public_key).hexdigest()[:40]
    raise DeltaflError(
        f"the SuperLink does not know the name or public key of node {node.node_id}; enable "
        "authentication and 'flwr supernode register --name', or write identity='config'"
    )


def read_registration(reply: Message | None, rules: Rules) -> tuple[str, ClientInfo]:
    """A client's own key and what it reports, from a reply that may hold anything."""
    report = NO_REGISTRATION if reply is None else report_in(reply)
    info = read_info(report, rules)
    given = named(report)
    own = {"kind": given.get(KIND), "client_id": given.get(CLIENT_ID)}
    client = checked(Identity, own, "the answer to the registration query", CURE)
    return f"{client.kind}:{client.client_id}", info
