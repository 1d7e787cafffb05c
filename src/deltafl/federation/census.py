"""The server's side of the census: before a round's draw, whoever has not answered is asked.

Nobody is asked in vain for long: who is silent or fails, three times in a run, and who sends anything else, once.
"""

import time
from collections.abc import Callable, Collection, Mapping
from logging import INFO, WARNING
from typing import Any

from ..errors import DeltaflError
from ..samplers.census import LARGEST_NORM, Census
from .federation import Federation

#: (keys, what is asked) -> what came back from each: numbers, or anything else; a string says why a client failed.
Ask = Callable[[list[str], Census], Mapping[str, Any]]
#: How often a client without an answer is asked.
_MOST = 3


def take_census(federation: Federation, present: Collection[str], ask: Ask, log: Callable[..., None]) -> bool:
    """Ask those of the clients that are present who have not answered; whether anybody did."""
    census = federation.plan.census
    asked = [key for key in federation.unanswered() if key in present and federation.asked[key] < _MOST]
    if census is None or not asked:
        return False
    began, length = time.monotonic(), census.length(federation.num_params)
    log(INFO, "Census: %d clients are asked for their answer", len(asked))
    replies = ask(asked, census)
    answers, faults = dict[str, tuple[float, ...]](), dict[str, list[str]]()
    for key in asked:
        reply = replies.get(key, "no reply in time")
        try:
            answers[key] = read_answer(reply, length)
        except DeltaflError as error:
            faults.setdefault(str(error), []).append(key)
            federation.asked[key] += 1 if isinstance(reply, str) else _MOST
    federation.answer(answers)
    for fault, keys in faults.items():
        log(WARNING, "\tcensus: %s counts as the mean of all: %s", ", ".join(keys), fault)
    down, up = len(asked) * sum(array.nbytes for array in federation.arrays().values()), len(answers) * 8 * length
    text = "Census: %d of %d clients answered in %.3g s; %.3g MB were sent to them, %.3g MB came back"
    log(INFO, text, len(answers), len(asked), time.monotonic() - began, down / 1e6, up / 1e6)
    return bool(answers)


def read_answer(reply: Any, length: int) -> tuple[float, ...]:
    """A client's answer to a census; a ``DeltaflError`` says why there is none."""
    if isinstance(reply, str):
        raise DeltaflError(reply)
    if reply is None:
        raise DeltaflError("the reply holds no answer; add delta_mod to the ClientApp's mods, or use DeltaClient")
    numbers = reply if isinstance(reply, list) and all(isinstance(number, int | float) for number in reply) else []
    if len(numbers) != length or not all(abs(number) <= LARGEST_NORM for number in numbers):
        raise DeltaflError(f"the answer is not {length} finite numbers of at most {LARGEST_NORM:.0e}")
    return tuple(map(float, numbers))
