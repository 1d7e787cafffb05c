"""Check a control variate of your own: estimates with it are unbiased if it does not look at the
draw.
"""

from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np

from ..designs.inclusion import check_cohort_size
from ..estimators.control_variates import ControlVariate
from ..moves import CannotResizeError, Moves
from ..plan import Plan
from ..round import close_round, init_round, open_round
from ..samplers.fixed import Fixed
from ..streams import stream
from ..types import Population, Rng
from .conformance import check_work, require, same, unequal_clients


def check_control(
    control: ControlVariate,
    *,
    num_clients: int = 12,
    n: int = 4,
    num_params: int = 6,
    seed: int = 0,
) -> None:
    """Check a control variate of your own: an estimate with it is unbiased if what it knows of each
    client, and its total sum_j w_j c_j, do not depend on the draw.

    Rounds with clients of very unequal weights are played, some of whom do not reply. In each: the
    total is that of the rows of all clients, and it and the rows of any clients are the same
    whoever is asked for; nothing is changed in place, and the same replies give the same state. In
    the end a client leaves, two join and all weights change: if the state can follow, its total
    does. Of each client the shares of three labels are known, its stratum and what it costs.

    Raises:
        AssertionError: With one sentence on what is wrong.
        DeltaflError: If a number is not in its range.
    """
    check_work(num_clients, 1)
    check_cohort_size(n, num_clients)
    plan = Plan(_clients(num_clients, 500, seed), Fixed(), n, estimator=control)
    state = init_round(plan, np.zeros(num_params))
    for round in range(4):
        rng = stream(seed, "audit", round, 2)
        _check_value(control, state.control, plan.population, rng)
        cohort = open_round(plan, state)
        replies = [
            update_d if rng.random() < 0.7 else None
            for update_d in rng.standard_normal((len(cohort.client_n), num_params))
        ]
        before = deepcopy(state.control)
        following, _ = close_round(plan, state, cohort, replies)
        require(same(before, state.control), "update changes the state in place")
        again, _ = close_round(plan, state, cohort, replies)
        require(
            same(following.control, again.control),
            "update gives another state for the same state and replies",
        )
        state = following
    others = _clients(num_clients + 1, 90, seed)
    with suppress(CannotResizeError):
        moves = Moves(others, np.arange(1, num_clients), num_clients)
        moved = control.resized(state.control, moves)
        _check_value(control, moved, others, stream(seed, "audit", 9, 2))


def _clients(count: int, largest: int, seed: int) -> Population:
    """Clients of very unequal sizes, with all that may be known of them."""
    return unequal_clients(
        count,
        largest,
        seed,
        strata=["north", "south"] * (count // 2) + ["south"] * (count % 2),
        cost=np.linspace(1, 3, count),
    )


def _check_value(control: ControlVariate, state: Any, population: Population, rng: Rng) -> None:
    m = population.num_clients
    total_d, whole_md = control.value(state, np.arange(m))
    # One row may stand for clients that are all alike.
    control_md = np.broadcast_to(whole_md, (m, len(total_d)))
    require(
        np.allclose(total_d, population.weight_m @ control_md, rtol=1e-4, atol=1e-6),
        "total_d is not the sum of w_j c_j over all clients, so that estimates are biased",
    )
    for size in (1, m // 2):
        some_k = np.sort(rng.choice(m, max(size, 1), replace=False))
        total, some_kd = control.value(state, some_k)
        require(
            np.allclose(total, total_d, rtol=1e-4, atol=1e-6),
            "total_d depends on which clients were drawn, so that estimates are biased",
        )
        require(
            np.allclose(some_kd, control_md[some_k], rtol=1e-4, atol=1e-6),
            "the rows of clients depend on who else was drawn, so that estimates are biased",
        )
