"""What the server's log says of a round."""

from collections.abc import Sequence
from logging import INFO, WARNING
from math import isfinite

from flwr.supercore import log

from ..types import RoundInfo
from .federation import Federation


def tell_round(info: RoundInfo, keys: Sequence[str], silent: Sequence[int]) -> None:
    """Who did not reply, the replies that were of no use, and what the others add up to."""
    if silent:
        log(WARNING, "\tno reply in time: %s", ", ".join(keys[client] for client in silent))
    for client, reason in info.rejected:
        log(WARNING, "\tno use of the reply of %s: %s", keys[client], reason)
    log(
        INFO,
        "\t%d of %d replies used; sum of weights %.3f, largest %.3f, effective sample size %.1f",
        info.num_responded,
        info.num_selected,
        info.sum_of_weights,
        info.largest_weight,
        info.effective_sample_size if isfinite(info.effective_sample_size) else 0.0,
    )
    if info.clip_factor < 1:
        said = (
            "\tthe norm guard clip_factor the step to %.3g of its length, so that the estimate of this round is biased"
        )
        log(WARNING, said, info.clip_factor)


def tell_memory(name: str, federation: Federation, told: int) -> int:
    """What the server's memory of one update a client takes, where there is one.

    Args:
        name: The sampler, for people.
        federation: Before a round.
        told: Clients at the last word; it is said again when they are twice as many, and at the first round of a start.

    Returns:
        Clients at the last word now.
    """
    m, rules = len(federation.roster.keys), federation.rules
    if not rules.remembers or (told > 0 and m < 2 * told):
        return told
    log(INFO, "%s %s", name, rules.memory.words(m, federation.layout.num_params, rules.n))
    return m


def tell_news(news: list[str]) -> None:
    """What the federation has to say, once: the list is emptied."""
    while news:
        log(WARNING, "\t%s", news.pop(0))
