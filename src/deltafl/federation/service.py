"""What a server does in its rounds, whatever brings the messages: begin or resume, admit, select, close, log."""

from collections.abc import Callable, Collection, Mapping, Sequence
from logging import INFO, WARNING
from math import isfinite

from ..arrays import Arrays, Layout
from ..types import Cohort, RoundInfo
from .census import Ask, take_census
from .clients import ClientInfo
from .federation import Federation
from .replies import ClientReply
from .rules import Rules
from .saved import load, save

#: ``logging.Logger.log``.
Log = Callable[..., None]


def begin(rules: Rules, arrays: Arrays, buffers: Sequence[str], forget: Collection[str], log: Log) -> Federation:
    """A new federation, or the saved one without the clients to forget."""
    federation = Federation(rules, arrays, Layout.of(arrays, buffers))
    if rules.state_path is None or not load(rules.state_path, federation):
        return federation
    unknown = set(forget) - federation.clients.keys()
    if unknown:
        log(WARNING, "forget names %s, which no saved client has", ", ".join(sorted(unknown)))
    forgotten = set(forget) & federation.clients.keys()
    if forgotten:
        federation.forget(forgotten)
        save(rules.state_path, federation, anew=True)
    log(INFO, "Resuming after round %d with %d known clients", federation.current.round, len(federation.clients))
    return federation


def admit(federation: Federation, present: Mapping[str, ClientInfo], log: Log) -> dict[str, ClientInfo]:
    """Let clients join or change what they report; those of them that take part."""
    before = federation.clients
    federation.admit(present)
    log_warnings(federation, log)
    if federation.clients is not before:
        clients, keys, weight_m = federation.clients, federation.keys, federation.plan.population.weight_m
        text, heaviest = "%d clients joined, %d are known; %s counts most, %.1f %% of all", keys[weight_m.argmax()]
        log(INFO, text, len(keys) - len(before), len(keys), heaviest, 100 * weight_m.max())
        counted_m = federation.plan.population.num_examples_m.tolist()
        over = [key for key, most in zip(keys, counted_m, strict=True) if clients[key].num_examples > most]
        if over:
            text = "%s reported more than %g times the median number of examples; that many is what each counts: %d"
            log(WARNING, text, ", ".join(over), federation.rules.max_ratio, max(counted_m))
    return {key: info for key, info in present.items() if key in federation.clients}


def log_privacy(rules: Rules, rounds: int, num_clients: int, log: Log) -> None:
    """Log what so many rounds spend where at least so many clients are present."""
    dp = rules.plan.dp
    if dp is not None:
        epsilon = dp.epsilon(rounds, rules.plan.n / num_clients)
        log(INFO, "After %d rounds: epsilon = %.3g at most, with delta = %g", rounds, epsilon, dp.delta)


def select(federation: Federation, present: Collection[str], ask: Ask, log: Log) -> Cohort:
    """Take a census of those who have not answered it, and draw the cohort of the round."""
    number, path = federation.current.round, federation.rules.state_path
    if take_census(federation, present, ask, log) and number == 0 and path is not None:
        save(path, federation)  # everybody has worked for it
    cohort = federation.open(present)
    log(INFO, "Round %d: %d of %d clients selected", number + 1, len(cohort.client_n), len(present))
    return cohort


def close(federation: Federation, cohort: Cohort, received: Mapping[int, ClientReply], log: Log) -> RoundInfo:
    """Close the round with the replies by client index, save the state, and log what happened."""
    keys, path = federation.keys, federation.rules.state_path  # a state that is put back may have fewer keys
    info = federation.close(cohort, received)
    if path is not None:
        save(path, federation)
    _log_round(info, keys, [client for client in cohort.client_n.tolist() if client not in received], log)
    log_warnings(federation, log)
    return info


def _log_round(info: RoundInfo, keys: Sequence[str], silent: Sequence[int], log: Log) -> None:
    """Log who did not reply, which replies were rejected and why, and what the others add up to."""
    if silent:
        log(WARNING, "\tno reply in time: %s", ", ".join(keys[client] for client in silent))
    for client, reason in info.rejected:
        log(WARNING, "\treply of %s rejected: %s", keys[client], reason)
    if info.warning is not None:
        log(WARNING, "\t%s", info.warning)
    size = info.effective_sample_size if isfinite(info.effective_sample_size) else 0.0
    text = "\t%d of %d replies used; sum of weights %.3f, largest %.3f, effective sample size %.1f"
    log(INFO, text, info.num_responded, info.num_selected, info.sum_of_weights, info.largest_weight, size)
    if info.clip_factor < 1:
        log(INFO, "\tclipped, the longest by a factor of %.3g: the estimate of this round is biased", info.clip_factor)


def log_warnings(federation: Federation, log: Log) -> None:
    """Log what the federation has noted, once."""
    while federation.warnings:
        log(WARNING, "\t%s", federation.warnings.pop(0))
