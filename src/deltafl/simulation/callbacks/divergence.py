"""The likely cause of a divergence, which ``server/watch.py`` notices."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...estimators.learned_coefficient import LearnedCoefficient
from ...plan import Plan
from ...types import RoundInfo
from ..settings import RunSettings

#: A reply that counts so many times an equal share is a large weight.
LARGE_WEIGHT = 5.0
#: Residuals above so many times the updates (squared norms) do harm; an empty memory leaves 1.
HARMFUL = 1.2


def likely_cause(infos: Sequence[RoundInfo], settings: RunSettings, plan: Plan) -> str:
    """The likely cause of a divergence, and what to change, from the rounds before it."""
    cure = f"lower local_lr, now {settings.local_lr:g}"
    server_lr = settings.part_settings()["server_lr"]
    if server_lr is not None and server_lr > 1:
        cure = f"lower server_lr, now {server_lr:g}"
    refused = sum(len(info.rejected) for info in infos)
    if refused:
        selected = sum(info.num_selected for info in infos)
        return (
            f"{refused} of the last {selected} replies were refused, so local training itself "
            f"overflows: {cure}"
        )
    worst = _longest_leap(infos)
    # Beside the equal share of a reply.
    shares = worst.largest_weight * max(worst.num_responded, 1)
    if shares >= LARGE_WEIGHT:
        return (
            f"one reply counted {worst.largest_weight:.2g}, {shares:.2g} times an equal share, in "
            f"round {worst.round + 1}: raise floor, draw by size (md-fixed), or {cure}"
        )
    age = plan.population.num_clients / max(worst.num_selected, 1)
    # NaN where nobody replied.
    residuals = [info.residual for info in infos if np.isfinite(info.residual)] or [0.0]
    left = float(np.median(residuals))
    # A memory says something of a client once it has been selected.
    if plan.rule.control.remembers and left > HARMFUL and infos[-1].round >= age:
        if not isinstance(plan.rule.control, LearnedCoefficient):
            cure = f"use a damped estimator, select more clients, or {cure}"
        else:
            cure = f"select more clients, or {cure}"
        return (
            f"the memory is stale: a client is selected every {age:.3g} rounds on average, and "
            f"residuals are {left:.2g} times the updates (squared norms): {cure}"
        )
    return f"local training goes too far in one round: {cure}, or take fewer local steps"


def _longest_leap(infos: Sequence[RoundInfo]) -> RoundInfo:
    """The round whose estimate is longest beside that of the round before; else the last."""
    pairs = [pair for pair in pairwise(infos) if pair[0].estimate_norm > 0]
    if not pairs:
        return infos[-1]
    return max(
        pairs,
        key=lambda pair: pair[1].estimate_norm / pair[0].estimate_norm,
    )[1]
