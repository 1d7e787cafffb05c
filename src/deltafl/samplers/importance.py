"""Importance sampling: FedIS and FedPracIS (DELTA paper, sections 3.1 and 4, algorithm 2)."""

from dataclasses import dataclass

import numpy as np

from ..types import FloatArray, Reports
from .scored import Practical, Theoretical


def update_norm(reports: Reports) -> FloatArray:
    """R_i = norm(u_i), the optimal score (times w_i) of the Horvitz-Thompson and Hansen-Hurwitz estimators."""
    return np.sqrt(reports.squared_norm_n)


@dataclass(frozen=True)
class FedIS(Theoretical):
    """Score w_i norm(u_i), from all clients of this round; settings as in ``Theoretical``."""

    def score(self, reports: Reports) -> FloatArray:
        """norm(u_i)."""
        return update_norm(reports)


@dataclass(frozen=True)
class FedPracIS(Practical):
    """The paper's practical rule on norm(u_i) of the sampled clients; settings as in ``Practical``."""

    def score(self, reports: Reports) -> FloatArray:
        """norm(u_i)."""
        return update_norm(reports)
