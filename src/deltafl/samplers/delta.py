"""DELTA: FedDELTA and FedPracDELTA (DELTA paper, sections 3.3 and 4, corollary 3.7, algorithm 1).

R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), zeta_i = norm(u_i - mean) and sigma_i^2 the variance of the local steps.
What was measured (``tests/test_known_numbers.py``): with the weights w_i / pi_i that the paper uses, the
one-round variance of DELTA is never below that of importance sampling, and it can exceed uniform sampling's.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, Reports
from .scored import Practical, Theoretical


def theory_constants(local_steps: int, rounds: int, n: int, m: int, with_replacement: bool) -> tuple[float, float]:
    """(a1, a2) of corollary 3.7 with the paper's rates, in which the unknown smoothness L cancels.

    With eta_L = 1 / (sqrt(T) K L) and eta = sqrt(K n): a1 = 20 K / sqrt(T), a2 = 5 / sqrt(T) + sqrt(K / n); without
    replacement the drift parts (all of a1, the first term of a2) are multiplied by m / n.

    Args:
        local_steps: K >= 1.
        rounds: T >= 1.
        n: Cohort size.
        m: Clients.
        with_replacement: Whether the design may draw a client repeatedly.
    """
    drift = 1.0 if with_replacement else m / n
    return drift * 20 * local_steps / sqrt(rounds), drift * 5 / sqrt(rounds) + sqrt(local_steps / n)


def diversity(reports: Reports, a1: float, a2: float, sigma_scale: str) -> FloatArray:
    """R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), sigma_i^2 counted once (``"step"``) or K_i times (``"update"``)."""
    steps_n = reports.num_steps_n if sigma_scale == "update" else 1
    return np.sqrt(a1 * reports.squared_deviation_n + a2 * steps_n * reports.step_variance_n)


@dataclass(frozen=True)
class _Constants:
    """The constants of the score, and the score.

    Attributes:
        a1: Weight of zeta^2, >= 0.
        a2: Weight of sigma^2, >= 0. The paper's default alpha = 0.5 sets both to 0.5.
        sigma_scale: ``"step"`` as printed, or ``"update"`` (K sigma^2, the unit of zeta^2).
    """

    a1: float = 0.5
    a2: float = 0.5
    sigma_scale: str = "step"

    def __post_init__(self) -> None:
        """Refuse impossible constants."""
        if min(self.a1, self.a2) < 0 or self.a1 + self.a2 <= 0:
            raise DeltaflError(f"a1 and a2 are {self.a1} and {self.a2}; both must be >= 0 and one above 0")
        if self.sigma_scale not in {"step", "update"}:
            raise DeltaflError(f"sigma_scale is {self.sigma_scale!r}; write 'step' or 'update'")

    def score(self, reports: Reports) -> FloatArray:
        """R_n of the reports."""
        return diversity(reports, self.a1, self.a2, self.sigma_scale)


@dataclass(frozen=True)
class Delta(_Constants, Theoretical):
    """FedDELTA: score w_i R_i, from all clients of this round, zeta_i about ubar.

    Settings: ``design`` and ``floor`` as in ``Theoretical``; ``a1``, ``a2``, ``sigma_scale``.
    """


@dataclass(frozen=True)
class PracDelta(_Constants, Practical):
    """FedPracDELTA: the paper's practical rule on R_i of the sampled clients, zeta_i about their plain mean.

    Settings: ``design`` and ``floor`` as in ``Practical``; ``a1``, ``a2``, ``sigma_scale``.
    """
