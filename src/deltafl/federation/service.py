"""What a server does in its rounds, whatever brings the messages: begin or resume, admit,
select, close, log.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np

from ..arrays import Arrays, Layout
from ..errors import DeltaflError
from ..samplers.census import LARGEST_NORM, Census
from ..server.privacy import DifferentialPrivacy
from ..types import Cohort, RoundInfo
from .clients import ClientInfo
from .federation import Federation
from .replies import ClientReply
from .rules import Rules
from .saved import load, save

#: ``logging.Logger.log``.
Log = Callable[..., None]
#: (keys, what is asked) -> what came back from each: numbers, or anything else; a string says why a
#: client failed.
Ask = Callable[[list[str], Census], Mapping[str, Any]]
#: How often a client without an answer to the census is asked.
_MOST = 3


def begin(
    rules: Rules, arrays: Arrays, buffers: Sequence[str], forget: Collection[str], log: Log
) -> Federation:
    """A new federation, or the saved one without the clients to forget."""
    federation = Federation(rules, arrays, Layout.of(arrays, buffers))
    if rules.state_path is None or not load(rules.state_path, federation):
        return federation
    unknown = set(forget) - federation.clients.keys()
    if unknown:
        log(WARNING, "forget names %s, which no saved client has", ", ".join(sorted(unknown)))
    forgotten = set(forget) - unknown
    if forgotten:
        federation.forget(forgotten)
        save(rules.state_path, federation, anew=True)
    text = "Resuming after round %d with %d known clients"
    log(INFO, text, federation.current.round, len(federation.clients))
    return federation


def admit(
    federation: Federation, present: Mapping[str, ClientInfo], log: Log
) -> dict[str, ClientInfo]:
    """Let clients join or change what they report; those of them that take part."""
    before = federation.clients
    federation.admit(present)
    log_warnings(federation, log)
    if federation.clients is not before:
        _log_joined(federation, len(federation.clients) - len(before), log)
    return {key: info for key, info in present.items() if key in federation.clients}


def _log_joined(federation: Federation, num_joined: int, log: Log) -> None:
    keys = federation.keys
    population = federation.plan.population
    share_m = 100 * population.weight_m
    heaviest = keys[share_m.argmax()]
    text = "%d clients joined, %d are known; %s counts most, %.1f %% of all"
    log(INFO, text, num_joined, len(keys), heaviest, share_m.max())
    counted = dict(zip(keys, population.num_examples_m.tolist(), strict=True))
    over = [key for key, info in federation.clients.items() if info.num_examples > counted[key]]
    if over:
        text = (
            "%s reported more than %g times the median number of examples; that many is what each "
            "counts: %d"
        )
        max_ratio = federation.rules.max_ratio
        log(WARNING, text, ", ".join(over), max_ratio, max(counted.values()))


def log_privacy(rules: Rules, rounds: int, log: Log) -> None:
    """Log what so many rounds spend."""
    dp = rules.plan.part("dp")
    if isinstance(dp, DifferentialPrivacy):
        epsilon = dp.epsilon(rounds, rules.plan.n / rules.min_clients)
        text = "After %d rounds: epsilon = %.3g at most, with delta = %g"
        log(INFO, text, rounds, epsilon, dp.delta)


def select(federation: Federation, present: Collection[str], ask: Ask, log: Log) -> Cohort | None:
    """Take a census of those who have not answered it, and draw the cohort of the round.

    None if the census itself was the round: it has brought the clients' first updates, and the
    model has moved.
    """
    number = federation.current.round
    path = federation.rules.state_path
    if take_census(federation, present, ask, log) and number == 0 and path is not None:
        save(path, federation)  # everybody has worked for it
    if federation.current.round > number:
        log(
            INFO, "Round %d: the census, the model has moved by the mean of the answers", number + 1
        )
        return None
    cohort = federation.open(present)
    log(INFO, "Round %d: %d of %d clients selected", number + 1, len(cohort.client_n), len(present))
    return cohort


def take_census(federation: Federation, present: Collection[str], ask: Ask, log: Log) -> bool:
    """Ask the clients that are present and have not answered the census; whether anybody did.

    A client that is silent or fails is asked again in later rounds, three times in all; one that
    sends anything else is not.
    """
    census = federation.plan.census
    asked = [
        key for key in federation.unanswered() if key in present and federation.asked[key] < _MOST
    ]
    if census is None or not asked:
        return False
    began = time.monotonic()
    length = census.length(federation.num_params)
    log(INFO, "Census: %d clients are asked for their answer", len(asked))
    replies = ask(asked, census)
    answers = dict[str, tuple[float, ...]]()
    faults = dict[str, list[str]]()
    for key in asked:
        reply = replies.get(key, "no reply in time")
        try:
            answers[key] = read_answer(reply, length)
        except DeltaflError as error:
            faults.setdefault(str(error), []).append(key)
            federation.asked[key] += 1
            if not isinstance(reply, str):  # asked again, it would send the same
                federation.asked[key] = _MOST
    federation.answer(answers)
    missing = "\tcensus: no answer from %d clients: %s; they count as the mean of all: %s"
    for fault, keys in faults.items():
        log(WARNING, missing, len(keys), fault, ", ".join(keys))
    down = len(asked) * sum(array.nbytes for array in federation.arrays().values())
    up = len(answers) * 8 * length
    text = (
        "Census: %d of %d clients answered in %.3g s; %.3g MB were sent to them, %.3g MB came back"
    )
    log(INFO, text, len(answers), len(asked), time.monotonic() - began, down / 1e6, up / 1e6)
    return bool(answers)


def read_answer(reply: Any, length: int) -> tuple[float, ...]:
    """A client's answer to a census; a ``DeltaflError`` says why there is none."""
    if isinstance(reply, str):
        raise DeltaflError(reply)
    if reply is None:
        raise DeltaflError(
            "the reply holds no answer; add delta_mod to the ClientApp's mods, or use DeltaClient"
        )
    if not isinstance(reply, list) or len(reply) != length or not all(map(_is_answer, reply)):
        raise DeltaflError(
            f"the answer is not {length} finite numbers of at most {LARGEST_NORM:.0e}"
        )
    return tuple(map(float, reply))


def _is_answer(number: object) -> bool:
    return isinstance(number, int | float) and abs(number) <= LARGEST_NORM  # False for NaN


def close(
    federation: Federation, cohort: Cohort, received: Mapping[int, ClientReply], log: Log
) -> RoundInfo:
    """Close the round with the replies by client index, save the state, and log what happened."""
    keys = federation.keys
    path = federation.rules.state_path  # a state that is put back may have fewer keys
    info = federation.close(cohort, received)
    if path is not None:
        save(path, federation)
    silent = [client for client in cohort.client_n.tolist() if client not in received]
    _log_round(info, keys, silent, log)
    log_warnings(federation, log)
    return info


def _log_round(info: RoundInfo, keys: Sequence[str], silent: Sequence[int], log: Log) -> None:
    """Log who did not reply, which replies were rejected and why, and what the others add up to."""
    if silent:
        log(WARNING, "\tno reply in time: %s", ", ".join(keys[client] for client in silent))
    for client, reason in info.rejected:
        log(WARNING, "\treply of %s rejected: %s", keys[client], reason)
    if info.warning is not None:
        log(WARNING, "\tall replies were rejected and nothing was learnt")
    text = "\t%d of %d replies used; sum of weights %.3f, largest %.3f, effective sample size %.1f"
    size = np.nan_to_num(info.effective_sample_size)
    weights = (info.sum_of_weights, info.largest_weight, size)
    log(INFO, text, info.num_responded, info.num_selected, *weights)
    if info.clip_factor < 1:
        text = "\tclipped, by factors down to %.3g: the estimate of this round is biased"
        log(INFO, text, info.clip_factor)


def log_warnings(federation: Federation, log: Log) -> None:
    """Log what the federation has noted, once."""
    while federation.warnings:
        log(WARNING, "\t%s", federation.warnings.pop(0))
