"""The callback ``on_round`` of runs and comparisons, for trackers, plots and early warnings of
your own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import OWN_ERRORS, DeltaflError, in_one_line


class RoundDone(NamedTuple):
    """What a callback ``on_round`` is given: a round that has been played and recorded."""

    sampler: str  #: the label of the run's sampler
    seed: int
    round: int  #: rounds played, from 1
    rounds: int  #: rounds in all
    accuracy: (
        float | None
    )  #: None if the model was not evaluated after this round, or the task has no accuracy
    loss: float | None  #: test loss; None likewise
    seconds: float  #: wall clock of this round, evaluation excluded
    bytes: float  #: bytes down + up of this round
    line: dict[str, Any]  #: the line of ``rounds.jsonl``


OnRound = Callable[[RoundDone], None]


def guarded(on_round: OnRound) -> OnRound:
    """The callback of a user: what it raises becomes a sentence."""

    def call(done: RoundDone) -> None:
        try:
            on_round(done)
        except OWN_ERRORS as error:
            name = getattr(on_round, "__name__", type(on_round).__name__)
            raise DeltaflError(
                f"the callback {name} failed in round {done.round} of {done.sampler}, seed "
                f"{done.seed}: "
                f"{in_one_line(error)}; mend it and give the same call again: the runs go on where "
                "they are"
            ) from error

    return call
