"""Clipped updates and a noisy estimate, for importance weights.

Flower's wrappers for differential privacy add noise for a plain mean, in which nobody counts more than 1 / n. Here a
reply counts coef_i, which may be much more, so noise must follow the largest coefficient of the round:

    u_i <- u_i min(1, C / norm(u_i))        hence norm(coef_i u_i) <= coef_max C
    D   <- sum_i coef_i u_i + N(0, (z coef_max C)^2)    in each coordinate

coef_max is taken over everybody who was asked, before any reply is seen. Given who was asked, this is the Gaussian
mechanism with noise multiplier z for adding or taking away one reply. Who is asked is another matter: a sampler that
learns from the replies shows something of them by its draws, and no noise here covers that.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeltaflError
from ..server.optimizers import ServerOptimizer
from ..streams import stream
from ..types import FloatArray, Params


@dataclass(frozen=True)
class WeightedClipping:
    """Clip each update and add noise that fits the largest weight.

    Attributes:
        norm: C > 0, the largest norm of an update, in update units (learning rate included).
        noise_multiplier: z >= 0, standard deviation of the noise over coef_max C; 0 clips alone.
    """

    norm: float
    noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a bound that is none."""
        if not (0 < self.norm < float("inf") and 0 <= self.noise_multiplier < float("inf")):
            raise DeltaflError(
                f"clipping to norm {self.norm} with noise multiplier {self.noise_multiplier}; the norm must be above 0 "
                "and the multiplier at least 0"
            )

    def clip(self, update_d: Params) -> Params:
        """U_i, clip_factor to norm C if it is longer; not finite entries stay, to be refused later."""
        norm = float(np.linalg.norm(update_d.astype(np.float64)))
        if not np.isfinite(norm) or norm <= self.norm:
            return update_d
        return (update_d.astype(np.float64) * (self.norm / norm)).astype(np.float32)

    def noise(self, largest_coef: float, num_params: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Noise for D, float64 (d,).

        Args:
            largest_coef: coef_max of everybody who was asked.
            num_params: d.
            rng: Where it comes from; None for a generator that nobody can seed, for noise that can be repeated hides
                nothing.
        """
        scale = self.noise_multiplier * largest_coef * self.norm
        generator = stream(secrets.randbits(63), "noise") if rng is None else rng
        return generator.normal(scale=scale, size=num_params) if scale > 0 else np.zeros(num_params)


@dataclass(frozen=True)
class WithNoise:
    """A server optimizer that sees D with noise added: of one round."""

    inner: ServerOptimizer
    noise_d: FloatArray

    def init(self, num_params: int) -> Any:
        """The inner memory."""
        return self.inner.init(num_params)

    def step(self, params_d: Params, delta_d: FloatArray, state: Any) -> tuple[Params, Any]:
        """The inner step along the noisy D."""
        return self.inner.step(params_d, delta_d + self.noise_d, state)
