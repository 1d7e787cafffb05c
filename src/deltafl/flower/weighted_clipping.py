"""Clipping and noise for weighted replies: the Gaussian mechanism, given the cohort."""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import check_ranges
from ..server.optimizers import ServerOptimizer
from ..streams import stream
from ..types import FloatArray, Params


@dataclass(frozen=True)
class WeightedClipping:
    """Clip each update, and add noise scaled to the largest weight of the round.

    A reply counts coef_i, which may be far above the 1 / n that Flower's own wrappers assume::

        u_i <- u_i min(1, C / norm(u_i))        hence norm(coef_i u_i) <= coef_max C
        D   <- sum_i coef_i u_i + N(0, (z coef_max C)^2)    in each coordinate

    coef_max is the largest coefficient of all selected clients, fixed before any reply is seen. Given the cohort, this
    is the Gaussian mechanism with noise multiplier z for adding or removing one reply. It does not cover what the draws
    of a sampler that learns from the replies reveal.

    Attributes:
        norm: C > 0, the largest norm of an update, in update units (learning rate included).
        noise_multiplier: z >= 0, standard deviation of the noise over coef_max C; 0 only clips.
    """

    norm: float
    noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, {"norm": "(0, inf)", "noise_multiplier": "[0, inf)"})

    def clip(self, update_d: Params) -> Params:
        """u_i, scaled to norm C if it is longer; updates that are not finite pass, to be rejected later."""
        norm = float(np.linalg.norm(update_d.astype(np.float64)))
        if not self.norm < norm < np.inf:
            return update_d
        return (update_d.astype(np.float64) * (self.norm / norm)).astype(np.float32)

    def noise(self, largest_coef: float, num_params: int) -> FloatArray:
        """Noise for D, float64 (d,), given coef_max; it cannot be seeded, for reproducible noise hides nothing."""
        scale = self.noise_multiplier * largest_coef * self.norm
        return stream(secrets.randbits(63), "noise").normal(scale=scale, size=num_params)


@dataclass(frozen=True)
class NoisyOptimizer:
    """One round's server optimizer, which sees D with noise added."""

    inner: ServerOptimizer
    noise_d: FloatArray

    def init(self, num_params: int) -> Any:
        """The inner one's memory."""
        return self.inner.init(num_params)

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        """The inner one's step."""
        return self.inner.step(params_d, delta_d + self.noise_d, state)
