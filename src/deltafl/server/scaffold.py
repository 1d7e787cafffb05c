"""SCAFFOLD (Karimireddy et al. 2020): local steps are corrected by what is known of each client.

With c_i the control variate of client i, such as its last update, c = sum_j w_j c_j, and K_i its
number of local steps::

    server   sends the model and c - c_i
    client   x <- x - lr g_k + (c - c_i) / K_i    in each step: u_i = c - c_i - lr sum_k g_k
    server  D = c + sum_S coef_i (u_i - (c - c_i) - c_i);  the control variate learns from u_i - (c - c_i)

The corrections are known before the draw and cancel, sum_i w_i (c - c_i) = 0: with the coefficients
of Horvitz and Thompson D is unbiased for sum_i w_i u_i. With ``difference-own``, equal weights,
uniform draws and K steps for all, this is the paper's algorithm 1, option II, with a global step
size of 1; its c_i is ours over -K lr. If the K_i differ, corrections have their length over a round
and not in a step. Other memories, such as ``innovation``, do as well, and ``two-phase``, which
knows something of every client from the first round on.

With the momentum of ``mime.py`` a client moves by (1 - beta) (c - c_i) and beta S, and u_i - (c -
c_i) becomes u_i without both. The factor was found with CNNs, whose late rounds lose by whole
corrections (docs/lab-notes.md).

Clients drift less: they take their steps in the direction of all. Each downloads two models and
sends one.
"""

from typing import Any

import numpy as np

from ..estimators.control_variates import ControlVariate
from ..types import IntArray, Params


def corrections(
    control: ControlVariate, state: Any, client_n: IntArray | None, share: float = 1.0
) -> Params:
    """``share`` times c - c_i of some clients, float32 (n, d); times c, (d,), if they are None."""
    value = control.value(state, np.zeros(0, dtype=np.int64) if client_n is None else client_n)
    if client_n is None:
        return np.asarray(share * value.total_d, dtype=np.float32)
    control_nd = np.broadcast_to(value.control_nd, (len(client_n), len(value.total_d)))
    return np.asarray(share * (value.total_d - control_nd), dtype=np.float32)
