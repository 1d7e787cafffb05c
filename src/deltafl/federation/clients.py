"""The clients of a federation: who they are, and how a round's state follows when they join,
change or leave.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..designs.inclusion import are_clients
from ..errors import DeltaflError
from ..model.arrays import as_reals
from ..moves import Moves
from ..plan import Plan, RoundState, check_method

#: A newcomer begins as if it had been known for so many rounds, in which it was away as often as
#: the others.
PRIOR_ROUNDS = 10


class ClientInfo(NamedTuple):
    """What a client reports: its size, auxiliary variables or its answer to a census, and what
    ``FACTS`` have a row for, None where nobody asked.
    """

    num_examples: int
    aux: tuple[float, ...] = ()
    stratum: str | None = None
    cost: float | None = None


def resize_state(
    plan: Plan,
    state: RoundState,
    kept: Sequence[int] | None = None,
) -> RoundState:
    """The state with which the rounds go on when clients join, leave, or change their weights.

    What is remembered of clients who stay is kept, and all sums over clients are made anew for
    their present weights, so that the next estimate is unbiased for the present population. The
    model stays as it is.

    Args:
        plan: The plan with the clients who are here now: those who stay, in their order, then
            newcomers. Sampler, estimator and parts are those of before.
        state: The state of before; it is not changed.
        kept: Which of its clients stay, as indices, in the order of the plan; all by default.

    Raises:
        DeltaflError: If ``kept`` are no clients of before, or more than the plan has.
        CannotResizeError: If the sampler or the control variate describes all clients jointly.
    """
    check_method(plan, state)
    num_before = len(state.selected_m)
    num_now = plan.population.num_clients
    stay_k = np.arange(num_before)
    if kept is not None:
        stay_k = as_reals("kept", kept, "the indices of the clients that stay")
    # Nobody is an empty array of float64.
    if stay_k.size == 0:
        stay_k = stay_k.astype(np.int64)
    if not are_clients(stay_k, num_before) or len(np.unique(stay_k)) < len(stay_k):
        raise DeltaflError(
            f"kept is {kept!r:.60}; give each client that stays once, from 0 to {num_before - 1}"
        )
    if len(stay_k) > num_now:
        raise DeltaflError(
            f"{len(stay_k)} clients stay, and the plan has {num_now}; name in kept those who stay, "
            "in the plan's order"
        )
    reweighted = plan.weights_crc != state.weights_crc
    moves = Moves(plan.population, stay_k, num_before, reweighted)
    rule = plan.rule.control
    control = rule.resized(state.control, moves)
    parts = {part.name: part.resized(state.parts[part.name], moves) for part in plan.parts}
    return _joined(state, moves)._replace(
        parts=parts,
        sampler=plan.sampler.resized(state.sampler, moves),
        # Some rules compute it from the model, for the clients who are here now.
        control=rule.at_model(control, plan.population, state.params_d, state.round),
        selected_m=moves.rows(state.selected_m, 0),
        responded_m=moves.rows(state.responded_m, 0),
        weights_crc=plan.weights_crc,
    )


def _joined(state: RoundState, moves: Moves) -> RoundState:
    """The state with newcomers' rounds: ``PRIOR_ROUNDS``, of the others' mean availability."""
    known = len(state.joined_m) > 0
    if moves.num_newcomers == 0 and not known:
        return state._replace(missed_m=moves.rows(state.missed_m, 0))
    # Nobody is on record as a newcomer: all were there from the first round on.
    joined_k = np.zeros(len(moves.stay_k), np.int64)
    if known:
        joined_k = moves.stayed(state.joined_m)
    missed_k = moves.stayed(state.missed_m)
    # A young federation has no ten rounds to lend.
    prior = min(PRIOR_ROUNDS, state.round)
    # ``maximum``: who has joined just now has no rounds to divide by.
    share_k = missed_k / np.maximum(state.round - joined_k, 1)
    away = 0
    if len(share_k):
        away = round(prior * float(np.mean(share_k)))
    newcomers = np.full(moves.num_newcomers, state.round - prior)
    return state._replace(
        joined_m=np.append(joined_k, newcomers),
        missed_m=moves.rows(state.missed_m, away),
    )
