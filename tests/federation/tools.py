"""Federations without messages: clients that move a small model in known ways."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltafl import make_sampler, stream
from deltafl.federation.clients import ClientInfo
from deltafl.federation.federation import Federation
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import save
from deltafl.model.arrays import Arrays
from deltafl.samplers import parse_label, uses_aux
from deltafl.types import RoundInfo


def federation(
    label: str = "pracdelta", model: Arrays | None = None, m: int = 0, **settings: Any
) -> Federation:
    """A federation of m clients whose sizes are 10, 15, 20, ..."""
    model = {"x": np.zeros(3, dtype=np.float32)} if model is None else model
    sampler = make_sampler(label)
    estimator = settings.get("estimator", parse_label(label).estimator)
    aux = 3 if sampler.census is None and uses_aux(sampler, estimator) else 0
    settings = {"n": 3, "aux": aux, **settings}
    fed = Federation(make_rules(label, **settings), model)
    if m:
        admit(fed, sizes_of(m))
    return fed


def rates_of(fed: Federation) -> dict[str, float]:
    """Each client's response rate, as the next round will assume it."""
    return dict(zip(fed.keys, fed.plan.response_rates(fed.current).tolist(), strict=True))


def sizes_of(m: int, start: int = 0) -> dict[str, int]:
    return {f"client:{i}": 10 + 5 * i for i in range(start, m)}


def admit(fed: Federation, sizes: dict[str, int]) -> None:
    """With the clients' shares of labels, or their answers to a census, where they matter."""
    shares = {
        key: tuple(stream(0, "data", client=size).dirichlet([1] * fed.rules.aux))
        if fed.rules.aux
        else ()
        for key, size in sizes.items()
    }
    fed.admit({key: ClientInfo(size, shares[key]) for key, size in sizes.items()})
    census = fed.plan.census
    if census is not None:
        length = census.length(fed.layout.num_params)
        keys = fed.unanswered()
        numbers = {key: stream(0, "data", client=sizes[key]).normal(size=length) for key in keys}
        fed.answer({key: tuple(answer_k.tolist()) for key, answer_k in numbers.items()})


def play_once(fed: Federation, answer: Callable[[int], ClientReply | None]) -> RoundInfo:
    """A round in which everybody is present."""
    cohort = fed.open(fed.keys)
    replies = {client: answer(client) for client in cohort.client_n.tolist()}
    return fed.close(
        cohort,
        {fed.keys[client]: reply for client, reply in replies.items() if reply is not None},
    )


def play(
    fed: Federation,
    rounds: int,
    alive: bool = True,
    save_to: Path | None = None,
    targets: Mapping[int, float] | None = None,
) -> list[RoundInfo]:
    """Rounds in which client i moves every array by its own number, or half the way to its
    target.
    """
    infos = []
    for _ in range(rounds):

        def answer(client: int) -> ClientReply | None:
            number = int(fed.keys[client].removeprefix("client:"))
            sent = fed.arrays()
            if targets:
                moved = {
                    name: array + np.float32(0.5) * (targets[number] - array)
                    for name, array in sent.items()
                }
            else:
                moved = {
                    n: a if a.dtype == bool else a + a.dtype.type(1 + number % 5)
                    for n, a in sent.items()
                }
            return ClientReply(moved, loss=1.0) if alive else None

        infos.append(play_once(fed, answer))
        if save_to is not None:
            save(save_to, fed)
    return infos
