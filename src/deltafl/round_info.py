"""What a person wants to see of a round, from what its replies were worth."""

import numpy as np

from .estimators.heard import Heard
from .estimators.variance import effective_sample_size
from .types import FloatArray, Reports, RoundInfo


def describe(round: int, heard: Heard, reports: Reports, variance: float, delta_d: FloatArray) -> RoundInfo:
    """Describe a round in which nobody was rejected and nothing clip_factor.

    Args:
        round: Its index.
        heard: Who replied, and what each reply counts.
        reports: Of the whole cohort.
        variance: Estimated variance of the estimate.
        delta_d: float64 (d,), the estimate as it was used.
    """
    here, coef_n = reports.responded_n, heard.coef_n
    zeta_n = np.sqrt(reports.squared_deviation_n[here])
    norm, total = float(np.linalg.norm(delta_d)), float(coef_n.sum())
    left, whole = coef_n @ reports.squared_residual_n[here], coef_n @ reports.squared_norm_n[here]
    return RoundInfo(
        round=round,
        num_selected=len(here),
        num_responded=len(heard.client_n),
        rejected=(),
        estimate_norm=norm,
        variance=variance,
        effective_sample_size=effective_sample_size(coef_n),
        largest_weight=float(coef_n.max(initial=0.0)),
        sum_of_weights=total,
        mean_over_diversity=norm / float(zeta_n.mean()) if zeta_n.any() else float("nan"),
        loss=_mean_loss(coef_n, reports),
        residual=float(left / whole) if whole > 0 else float("nan"),
    )


def _mean_loss(coef_n: FloatArray, reports: Reports) -> float:
    """The losses of the replies that said one, weighted by what these replies count; NaN without any."""
    here = reports.responded_n
    said_n = reports.has_loss_n[here]
    coef_k = coef_n[said_n]
    total = float(coef_k.sum())
    return float(coef_k @ reports.loss_n[here][said_n]) / total if total > 0 else float("nan")
