"""The callback ``on_round`` of runs and comparisons, for trackers, plots and early warnings of your own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import OWN_ERRORS, DeltaflError, in_one_line


class RoundDone(NamedTuple):
    """What a callback ``on_round`` is given: a round that has been played and recorded.

    Attributes:
        sampler: The label of the run's sampler.
        seed: The run's seed.
        round: Rounds played, from 1.
        rounds: Rounds in all.
        accuracy: Test accuracy; None if the model was not evaluated after this round, or the task has none.
        loss: Test loss; None likewise.
        seconds: Wall clock of this round, evaluation excluded.
        bytes: Bytes down + up of this round.
        line: The line of ``rounds.jsonl``.
    """

    sampler: str
    seed: int
    round: int
    rounds: int
    accuracy: float | None
    loss: float | None
    seconds: float
    bytes: float
    line: dict[str, Any]


OnRound = Callable[[RoundDone], None]


def guarded(on_round: OnRound) -> OnRound:
    """The callback of a user: what it raises becomes a sentence."""

    def call(done: RoundDone) -> None:
        try:
            on_round(done)
        except OWN_ERRORS as error:
            name = getattr(on_round, "__name__", type(on_round).__name__)
            raise DeltaflError(
                f"the callback {name} failed in round {done.round} of {done.sampler}, seed {done.seed}: "
                f"{in_one_line(error)}; mend it and give the same call again: the runs go on where they are"
            ) from error

    return call
