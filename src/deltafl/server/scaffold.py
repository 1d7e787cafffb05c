"""SCAFFOLD (Karimireddy et al. 2020): local steps are corrected by what is known of each client.

With c_i the control variate of client i, such as its last update, c = sum_j w_j c_j, and K_i its
number of local steps::

    server  sends the model and c - c_i
    client  x <- x - lr g_k + (c - c_i) / K_i   in each step: u_i = c - c_i - lr sum_k g_k
    server  D = c + sum_S coef_i (u_i - (c - c_i) - c_i)
            and the control variate learns from u_i - (c - c_i)

The corrections are known before the draw and cancel, sum_i w_i (c - c_i) = 0: with the coefficients
of Horvitz and Thompson D is unbiased for sum_i w_i u_i. With ``difference-own``, equal weights,
uniform draws and K steps for all, this is the paper's algorithm 1, option II, with a global step
size of 1; its c_i is ours over -K lr. If the K_i differ, corrections have their length over a round
and not in a step. Other memories, such as ``innovation``, do as well, and ``two-phase``, which
knows something of every client from the first round on.

With the momentum of ``mime.py`` a client moves by (1 - beta) (c - c_i) and beta S, and
u_i - (c - c_i) becomes u_i without both. The factor was found with CNNs, whose late rounds lose by
whole corrections (docs/why/lab-notes.md).

Clients drift less: they take their steps in the direction of all. Each downloads two models and
sends one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..estimators.value import Reader
from ..types import Params
from .part import PlanOfParts, ServerPart


@dataclass(frozen=True)
class Scaffold(ServerPart):
    """Correct clients' local steps by what the estimator knows of each."""

    name = "scaffold"
    alters_updates = True
    fitting = "methods that know something of each client"

    @classmethod
    def fits(cls, sampler: Any, control: Any) -> bool:
        return bool(control.knows_clients)

    def check(self, plan: PlanOfParts) -> None:
        if not self.fits(plan.sampler, plan.rule.control):
            raise DeltaflError(
                "scaffold corrects local steps by what the estimator knows of each client; choose "
                "one that knows it, such as 'difference-own'"
            )

    def drift(
        self,
        plan: PlanOfParts,
        state: Any,
        part: slice,
        read: Reader,
    ) -> Params:
        total_b, control_nb = read(part)
        # Not in float64 for rows of float32.
        near_b = total_b.astype(np.result_type(control_nb, np.float32), copy=False)
        off_nb = near_b - control_nb
        return np.asarray(plan.step_factor * off_nb, np.float32)
