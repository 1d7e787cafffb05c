"""The options that samplers share."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SamplerSettings:
    """The options that samplers share; each takes what concerns it.

    Attributes:
        floor: g in [0, 1] of every scored sampler; None for each sampler's own default (0 theoretical, 0.1 practical).
        constants: (a1, a2) of DELTA.
        sigma_scale: ``"step"`` or ``"update"``, see ``delta.diversity``.
        clusters: Clusters of cluster-based importance sampling.
        candidates: Candidates of Power-of-Choice; None for twice the sample.
        drop_small_after: Rounds after which cluster-based sampling leaves out its smallest norms; None for never.
        active_alphas: (alpha1, alpha2, alpha3) of active-fl.
        classes: Classes that hics-fl tells apart.
        hics_temperature: T of hics-fl, in units of updates.
        mixing: Even share of learning samplers: theta of Vrb and K-Vib, alpha of OSMD; None for each paper's choice.
        horizon: Rounds T that Vrb and K-Vib choose theta for, and over which hics-fl anneals.
        rescalings: j_max of approximate optimal client sampling.
        similarity: ``"arccos"`` or ``"l2"``, of clustered sampling 2.
    """

    floor: float | None = None
    constants: tuple[float, float] = (0.5, 0.5)
    sigma_scale: str = "step"
    clusters: int = 5
    candidates: int | None = None
    drop_small_after: int | None = None
    mixing: float | None = None
    horizon: int = 500
    rescalings: int = 4
    similarity: str = "arccos"
    active_alphas: tuple[float, float, float] = (0.75, 0.01, 0.1)
    classes: int = 10
    hics_temperature: float = 0.0025

    def floor_or(self, default: float) -> float:
        """The floor that was set, or a sampler's own default."""
        return default if self.floor is None else self.floor


class _Noting(SamplerSettings):
    """The defaults, which note the names of those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "noted", set())

    def __getattribute__(self, name: str) -> Any:
        if name in _NAMES:
            self.noted.add(name)
        return super().__getattribute__(name)


_NAMES = frozenset(field.name for field in fields(SamplerSettings))


def options_read(make: Callable[[SamplerSettings], object]) -> frozenset[str]:
    """The names of the options that a sampler's maker looks at."""
    noting = _Noting()
    make(noting)
    return frozenset(noting.noted)
