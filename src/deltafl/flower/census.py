"""The server's side of the census: before a round's draw, whoever has not answered is asked.

The question is an ordinary train message with ``deltafl-census`` in its config, which ``delta_mod`` answers. Nobody is
asked in vain for long: who is silent or fails, three times in a run, and who sends anything else, once.
"""

import time
from collections import Counter
from collections.abc import Mapping
from logging import INFO, WARNING

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from ..errors import DeltaflError
from ..federation.federation import Federation
from .client import CENSUS
from .messages import by_recipient, content_with, read_answer

#: Seconds that a message outlives its round's timeout, for replies that are under way.
TTL_GRACE = 10.0
#: How often a client without an answer is asked.
_MOST = 3


class CensusTaker:
    """Asks clients for their answers, and counts how often in this run."""

    def __init__(self) -> None:
        self._asked = Counter[str]()

    def take(
        self, federation: Federation, grid: Grid, nodes: Mapping[str, int], content: RecordDict, timeout: float
    ) -> bool:
        """Ask those of the clients at these nodes who have not answered; whether anybody did."""
        census = federation.plan.sampler.census
        asked = [key for key in federation.unanswered() if key in nodes and self._asked[key] < _MOST]
        if census is None or not asked:
            return False
        began, length = time.monotonic(), census.length
        question = content_with(content, CENSUS, [float(census.size), census.noise])
        log(INFO, "Census: %d clients are asked for their answer", len(asked))
        ttl, group = timeout + TTL_GRACE, str(federation.current.round + 1)
        sent = [(key, Message(question, nodes[key], MessageType.TRAIN, ttl=ttl, group_id=group)) for key in asked]
        replies = by_recipient(sent, grid.send_and_receive([message for _, message in sent], timeout=timeout))
        answers, faults = dict[str, tuple[float, ...]](), dict[str, list[str]]()
        for key in asked:
            reply = replies.get(key)
            try:
                answers[key] = read_answer(reply, length)
            except DeltaflError as error:
                faults.setdefault(str(error), []).append(key)
                self._asked[key] += 1 if reply is None or reply.has_error() else _MOST
        federation.answer(answers)
        for fault, keys in faults.items():
            log(WARNING, "\tcensus: %s counts as the mean of all: %s", ", ".join(keys), fault)
        down, up = len(asked) * content.array_records["arrays"].count_bytes(), len(answers) * 8 * length
        text = "Census: %d of %d clients answered in %.3g s; %.3g MB were sent to them, %.3g MB came back"
        log(INFO, text, len(answers), len(asked), time.monotonic() - began, down / 1e6, up / 1e6)
        return bool(answers)
