"""Learning-rate schedules: what the clients' local rate is multiplied with in each round.

A factor is a function of the round alone, so that a run goes on after a resume as it began.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..calls import Named, made
from ..errors import DeltaflError, WithRanges, explained, is_in
from ..store.own_python import load_function, split_name
from ..types import FloatArray


@dataclass(frozen=True)
class Schedule(WithRanges, ABC):
    """A schedule of the library; its fields are its options.

    Of T rounds t = 0, ..., T - 1 the first ``warmup`` have the factors (t + 1) / warmup. The others
    have f(t'), t' = t - warmup, of T' = T - warmup rounds.
    """

    warmup: int = 0

    ranges: ClassVar = {"warmup": "[0, inf)"}

    def factors(self, rounds: int) -> FloatArray:
        """The factors of the rounds, float64 (rounds,)."""
        round_t = np.arange(rounds)
        # t + 1, for with a factor of 0 the first round of all clients would train nothing.
        warm_t = np.minimum((round_t + 1) / max(self.warmup, 1), 1.0)
        # The schedule's own time begins after the warm-up, so that it ends with the run.
        later_t = np.maximum(round_t - self.warmup, 0)
        return warm_t * self.later(later_t, max(rounds - self.warmup, 1))

    @abstractmethod
    def later(self, round_t: FloatArray, rounds: int) -> FloatArray:
        """f(t'), float64 (t,)."""


@dataclass(frozen=True)
class Constant(Schedule):
    """f = 1: a warm-up alone."""

    def later(self, round_t: FloatArray, rounds: int) -> FloatArray:
        return np.ones(len(round_t))


@dataclass(frozen=True)
class Cosine(Schedule):
    """f = floor + (1 - floor) (1 + cos(pi t' / T')) / 2."""

    floor: float = 0.0

    ranges: ClassVar = Schedule.ranges | {"floor": "[0, 1]"}

    def later(self, round_t: FloatArray, rounds: int) -> FloatArray:
        # Over T', not T' - 1: with floor = 0 the last round would train nothing.
        half_t = (1 + np.cos(np.pi * round_t / rounds)) / 2
        return np.asarray(self.floor + (1 - self.floor) * half_t)


@dataclass(frozen=True)
class Linear(Schedule):
    """f = 1 - (1 - floor) t' / T'."""

    floor: float = 0.0

    ranges: ClassVar = Schedule.ranges | {"floor": "[0, 1]"}

    def later(self, round_t: FloatArray, rounds: int) -> FloatArray:
        return 1 - (1 - self.floor) * round_t / rounds


@dataclass(frozen=True)
class Step(Schedule):
    """f = factor^floor(t' / every)."""

    every: int = 10
    factor: float = 0.5

    ranges: ClassVar = Schedule.ranges | {"every": "[1, inf)", "factor": "(0, inf)"}

    def later(self, round_t: FloatArray, rounds: int) -> FloatArray:
        return np.asarray(self.factor ** (round_t // self.every))


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
}


def as_text(schedule: Any) -> Any:
    """A function as text that carries it; anything else as it is."""
    if callable(schedule):
        # An object that can be called has no name of its own.
        name = getattr(schedule, "__name__", type(schedule).__name__)
        return Named(name.strip("<>"), schedule)
    return schedule


def factors_of(text: str | None, rounds: int) -> tuple[float, ...]:
    """The factors of the rounds by ``cosine``, ``step(every=10,factor=0.5)`` and the like, or by
    ``FILE.py:FUNCTION`` or a function (``as_text``), which take the round from 0; none for None.

    Raises:
        DeltaflError: If there is no such schedule, or a factor is not a finite number >= 0.
    """
    if text is None:
        return ()
    if isinstance(text, Named):
        return _own_factors(text, text.of, rounds)
    if ".py:" in text:
        own = load_function(text, "FILE.py:FUNCTION", "(round): ...")
        return _own_factors(text, own, rounds, split_name(text)[0].resolve())
    schedule = made("lr_schedule", text, SCHEDULES, "FILE.py:FUNCTION")
    return tuple(schedule.factors(rounds).tolist())


def _own_factors(
    name: str,
    function: Callable[[int], Any],
    rounds: int,
    path: Path | None = None,
) -> tuple[float, ...]:
    """What a user's function returns, checked in every round."""
    factors: list[float] = []
    # All rounds, before the first is played: a bad factor would else be noticed after hours.
    for round in range(rounds):
        with explained(f"lr_schedule {name} failed in round {round}", path):
            factor = function(round)
            again = function(round)
        if not is_in(factor, "[0, inf)"):
            raise DeltaflError(
                f"lr_schedule {name} returned {factor!r:.60} in round {round}; it must "
                "return a finite number of at least 0, by which local_lr is multiplied"
            )
        # Each process asks anew, and a run that goes on.
        if again != factor:
            raise DeltaflError(
                f"lr_schedule {name} returned {factor} and then {again} in round {round}; it must "
                "depend on the round alone, as numpy.random.default_rng(round) does"
            )
        factors.append(float(factor))
    return tuple(factors)
