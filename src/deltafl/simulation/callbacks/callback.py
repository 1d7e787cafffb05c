"""Callbacks: what follows every round of a run, one concern each.

``run.py`` plays a round: it opens it, trains the cohort and closes it. Everything else follows, in
this order, which is that of the entries in a line of ``rounds.jsonl``::

    Evaluation   followers.py   the model on the test set, where that is due
    Threshold    followers.py   ends the run at a goal
    Patience     followers.py   ends a run that no longer gets better
    Yours        own_rules.py   what you add to the line, and your reasons to end the run
    Watching     followers.py   ends a run that has lost its model
    Recording    followers.py   the line is written
    Checkpoints  followers.py   the state is kept
    Report       callback.py    ``on_round`` hears of it

A callback sees everything and decides one thing: ``raise StopRun("why")`` makes this round the
run's last. Up to there a run has the same bits with and without it. ``on_round`` and trackers get a
``RoundDone``, which other processes can be sent, up to a second later: they only hear.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import OWN_ERRORS, DeltaflError, in_one_line
from ...plan import Plan, RoundState
from ...server.watch import Watch
from ...store import plain_json
from ...types import Cohort, Json, RoundInfo
from ..distributed import ProcessGroup
from ..folder.directory import RunDirectory, StopRun
from ..settings import RunSettings
from ..world import World


@dataclass
class LiveRun:
    """A run that is being played."""

    settings: RunSettings  #: resolved
    engine: Any  #: an ``Engine``, whose module needs torch; this one is imported without
    directory: RunDirectory
    group: ProcessGroup
    plan: Plan
    world: World
    state: RoundState  #: after the rounds played so far
    watch: Watch
    kept: int  #: the round of the last checkpoint
    clock: float  #: virtual seconds so far
    is_over: bool

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        assert self.settings.rounds is not None
        return self.settings.rounds

    def keeps(self, round: "PlayedRound") -> bool:
        """Whether a checkpoint is due after a round."""
        return round.is_last or round.number % self.settings.checkpoint_every == 0

    def evaluate(self, round: "PlayedRound") -> None:
        """Evaluate the model of a round, and note that in its line."""
        round.judged = self.engine.judge(self.plan.model(self.state), self.state.rest)
        round.line["test"] = round.judged.evaluation().line()

    def end(self, round: "PlayedRound", stop: StopRun) -> None:
        """Make a round the last, for a reason that its line has; the first reason counts."""
        if "test" not in round.line:
            self.evaluate(round)  # a record of how it ended
        for entry, why in stop.line().items():
            round.line.setdefault(entry, why)
        # What follows treats it as the last: a checkpoint is due.
        round.is_last = True


class Stopwatch:
    """Wall clock and processor time since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._began_cpu = time.process_time()

    def read(self) -> dict[str, float]:
        """Both, as in ``timings.jsonl``."""
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": time.process_time() - self._began_cpu,
        }


@dataclass
class PlayedRound:
    """A round that has been played, with what is written of it."""

    opened: RoundState  #: the state before it
    cohort: Cohort
    info: RoundInfo
    line: Json  #: of ``rounds.jsonl``
    timing: dict[str, float]  #: of ``timings.jsonl``
    #: the cohort's ``Training``, of which several processes have a part each
    training: Any = None
    oracle: Any = None  #: a ``SimulatedOracle``; both are None for a census
    judged: Any = None  #: a ``Judged``, where the model was evaluated
    is_last: bool = False
    closed: Stopwatch = field(default_factory=Stopwatch)

    @property
    def number(self) -> int:
        """Its number, from 1."""
        return int(self.line["round"])


class Callback:
    """One concern of a run; a subclass has those of the three methods that it needs."""

    def begin(self, run: LiveRun) -> None:
        """Before the first round that is played now, which may follow a checkpoint."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        """After each round; ``run.state`` is the state that it left. ``StopRun`` ends the run."""

    def end(self, run: LiveRun) -> None:
        """After the last round, but not after an error."""


class RoundDone(NamedTuple):
    """What ``on_round`` is given: a round that has been played and recorded."""

    sampler: str  #: the label of the run's sampler
    seed: int
    round: int  #: rounds played, from 1
    rounds: int  #: rounds in all
    accuracy: float | None  #: None if the model was not evaluated, or the task has no accuracy
    loss: float | None  #: test loss; None likewise
    seconds: float  #: wall clock of this round, evaluation excluded
    bytes: float  #: bytes down + up of this round
    line: Json  #: the line of ``rounds.jsonl``

    @property
    def test(self) -> Mapping[str, float | None]:
        """All metrics by name; empty if the model was not evaluated."""
        return dict(self.line.get("test", {}))


OnRound = Callable[[RoundDone], None]


def round_done(
    settings: RunSettings,
    line: Json,
    seconds: float,
) -> RoundDone:
    """The round of a line of ``rounds.jsonl``."""
    assert settings.rounds is not None
    test = line.get("test", {})
    return RoundDone(
        sampler=str(settings.sampler),  # the text alone goes to other processes
        seed=settings.seed,
        round=line["round"],
        rounds=settings.rounds,
        accuracy=test.get("accuracy"),
        loss=test.get("loss"),
        seconds=seconds,
        bytes=float(line.get("bytes_down", 0) + line.get("bytes_up", 0)),
        line=line,
    )


class Report(Callback):
    """Tells ``on_round`` of each round."""

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        # As the file has it, with null for NaN: other processes read their rounds from there.
        line = plain_json(round.line)
        self._on_round(round_done(run.settings, line, round.timing["seconds"]))


def guarded(on_round: OnRound) -> OnRound:
    """The ``on_round`` of a user: what it raises becomes a sentence."""

    def call(done: RoundDone) -> None:
        try:
            on_round(done)
        except StopRun as stop:
            raise DeltaflError(
                f"on_round hears of rounds that are on record and cannot end a run ({stop}): give "
                "the rule as callbacks=[...] (docs/how-to/stop-early.md)"
            ) from stop
        except OWN_ERRORS as error:
            when = f"in round {done.round} of {done.sampler}, seed {done.seed}"
            raise callback_error(on_round, when, error) from error

    return call


def name_of(callback: Any) -> str:
    """What a user calls a callback."""
    return str(getattr(callback, "__name__", type(callback).__name__))


def callback_error(callback: Any, when: str, error: BaseException) -> DeltaflError:
    """What a user's callback raised, as a sentence."""
    return DeltaflError(
        f"the callback {name_of(callback)} failed {when}: {in_one_line(error)}; mend it and give "
        "the same call again: the runs go on where they are"
    )
