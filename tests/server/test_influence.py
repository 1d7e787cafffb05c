"""How often clients that lie are asked: the worst lie of a search, and not of examples."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from deltafl import Plan, close_round, init_round, make_plan, open_round
from deltafl.types import Reports

M = 40
N = 4
D = 16
ROUNDS = 40
#: What docs/how-to/flower-security.md says, in times as often as by equal chances.
WITH_CLIP = 3.0

_rng = np.random.default_rng(0)
#: Five kinds of clients, and the differences between clients of one kind.
UPDATE_MD = _rng.normal(size=(5, D))[np.arange(M) % 5] + 0.5 * _rng.normal(size=(M, D))


class Lie(NamedTuple):
    """What liars send and report."""

    length: float = 1.0
    turn: int = 1  # rounds after which the sign turns
    away: float = 0.0  # how much of the update is a direction of the round
    reported: float = 1.0  # times the loss and the step variance
    claimed: float = 1.0  # times the norm in the answer to a census
    silent: float = 0.0  # the share of rounds without a reply
    honest: int = 0  # rounds before the first lie


def lies(number: int) -> Iterator[Lie]:
    """Three named ones, and so many random ones."""
    yield Lie(100, reported=1e6)
    yield Lie(1e6, away=1.0, reported=1e9, claimed=1e50)
    yield Lie(claimed=1e100, silent=1.0)
    rng = np.random.default_rng(1)
    for _ in range(number):
        yield Lie(
            length=float(rng.choice([0.1, 1, 2, 100])),
            turn=int(rng.choice([1, 2, 5, 100])),
            away=float(rng.choice([0, 0.5, 5])),
            reported=float(rng.choice([0.01, 1, 1e4])),
            claimed=float(rng.choice([0.01, 1, 1e6])),
            silent=float(rng.choice([0, 0, 0.3, 0.8])),
            honest=int(rng.choice([0, 0, 20])),
        )


def plan_of(label: str, liars: list[int], lie: Lie, clip: str | None) -> Plan:
    plan = make_plan(label, [10] * M, N, seed=1, clip=clip)
    if plan.census is None:
        return plan
    answers = [plan.census.answer(update_d) for update_d in UPDATE_MD]
    for liar in liars:
        answers[liar][plan.census.size] *= lie.claimed
    return plan.with_census(answers)


def asked(label: str, liars: list[int], lie: Lie, clip: str | None) -> float:
    """Times as often as by equal chances that the liars are asked, in their mean."""
    plan = plan_of(label, liars, lie, clip)
    state = init_round(plan, np.zeros(D))
    rng = np.random.default_rng(2)
    count_m = np.zeros(M)
    for number in range(ROUNDS):
        cohort = open_round(plan, state)
        count_m[cohort.client_n] += 1
        size = len(cohort.client_n)
        updates: list[Any] = [*(UPDATE_MD[cohort.client_n] + 0.2 * rng.normal(size=(size, D)))]
        factor_n = np.ones(size)
        away_d = rng.normal(size=D)
        for place in np.flatnonzero(np.isin(cohort.client_n, liars)):
            if number < lie.honest:
                continue
            factor_n[place] = lie.reported
            sign = (-1) ** (number // lie.turn)
            updates[place] = sign * lie.length * (updates[place] + lie.away * away_d)
            if rng.random() < lie.silent:
                updates[place] = None
        reports = Reports.make(
            size, loss=factor_n, step_variance=factor_n, square_loss=1.2 * factor_n**2
        )
        state, _ = close_round(plan, state, cohort, updates, reports)
    return float(count_m[liars].mean() / (ROUNDS * N / M))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "label",
    [
        "pracdelta",
        "fedpracis",
        "innovation@local-pivotal",
        "delta-centred",
        "osmd",
        "k-vib",
        "census",
        "clustered-sampling-2",
        "hics-fl",
    ],
)
@pytest.mark.parametrize("liars", [[3], [3, 11, 22, 34]])
def test_no_lie_gets_clients_asked_more_than_the_pages_say(label: str, liars: list[int]) -> None:
    most = max(asked(label, liars, lie, "median") for lie in lies(4))
    assert most <= WITH_CLIP
