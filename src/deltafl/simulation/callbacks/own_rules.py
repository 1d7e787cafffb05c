"""Callbacks and rules of yours: what you give as ``callbacks=``.

A rule is a function of the lines of ``rounds.jsonl`` up to now, the first of round 0, that returns
why the run ends, or nothing::

    def plateau(lines):
        seen = [line["test"]["accuracy"] for line in lines if "test" in line]
        if len(seen) > 5 and max(seen[-5:]) <= max(seen[:-5]):
            return "no better accuracy in 5 evaluations"

It remembers nothing, so it decides alike after a resume and in any process. A ``Callback`` sees the
run itself, and may ``raise StopRun("why")``.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ...errors import OWN_ERRORS, DeltaflError, printable
from ...store import plain_json
from ...store.lines import line_of
from ...types import Json
from ..folder.directory import StopRun
from ..folder.lines import RoundLine
from .callback import Callback, LiveRun, PlayedRound, callback_error, name_of

#: From the lines of a run so far: why it ends; nothing if it goes on.
Rule = Callable[[Sequence[Json]], str | bool | None]
OwnCallback = Callback | Rule


class _Deciding(Callback):
    """A rule as a callback."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.__name__ = name_of(rule)  # by which errors call it

    def begin(self, run: LiveRun) -> None:
        self._lines = run.group.from_first(lambda: [*run.directory.lines("rounds.jsonl")])

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        # As the file has it, with null for NaN: after a resume it comes from there.
        self._lines.append(plain_json(round.line))
        why = self.rule(self._lines)
        if not why:
            return
        # A rule that only says yes, perhaps as NumPy does, has a name.
        if not isinstance(why, str):
            why = f"{self.__name__} ended it"
        raise StopRun(why)


def own_callbacks(given: Iterable[OwnCallback]) -> tuple[Callback, ...]:
    """The callbacks that a user gives, each in a copy of its own where it is a rule.

    Raises:
        DeltaflError: If one is neither a ``Callback`` nor a function.
    """
    if callable(given) or isinstance(given, Callback):
        given = [given]
    if not isinstance(given, Iterable):
        raise DeltaflError(f"callbacks is {printable(given, limit=80)}; write callbacks=[...]")
    found = list[Callback]()
    for each in given:
        if isinstance(each, type):
            raise DeltaflError(
                f"callbacks has the class {each.__name__}; write an object: {each.__name__}()"
            )
        if not isinstance(each, Callback) and not callable(each):
            raise DeltaflError(
                f"callbacks has {printable(each, limit=80)}; it takes functions of the lines so "
                "far and deltafl.simulation.Callback objects"
            )
        found.append(each if isinstance(each, Callback) else _Deciding(each))
    return tuple(found)


def copies(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Callbacks for one run of several: nothing that they note in one run reaches the next, as if
    each was played in a process of its own.
    """
    return copy.deepcopy(tuple(callbacks))


class Yours(Callback):
    """The user's callbacks, in their order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def begin(self, run: LiveRun) -> None:
        """Before the first round that is played now."""
        for callback in self._callbacks:
            with _explained(callback, "before the first round", run):
                callback.begin(run)

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        """After each round: all of them see it, and the first reason counts."""
        why: str | None = None
        for callback in self._callbacks:
            with _explained(callback, f"in round {round.number}", run):
                try:
                    callback.after_round(run, round)
                except StopRun as stop:
                    why = why or stop.line()["stopped"]
                # It may have added to the line what no file can hold, or nobody can read again.
                text = json.dumps(plain_json(round.line)).encode()
                line_of(text, RoundLine, "the line of the round", "add it under another name")
        # Those of one process may have looked at its clock: what one decides, all do.
        for reason in filter(None, run.group.gathered(why)):
            raise StopRun(reason)

    def end(self, run: LiveRun) -> None:
        """After the last round."""
        for callback in self._callbacks:
            with _explained(callback, "after the last round", run):
                callback.end(run)


@contextmanager
def _explained(callback: Callback, when: str, run: LiveRun) -> Iterator[None]:
    try:
        yield
    except OWN_ERRORS as error:
        settings = run.settings
        moment = f"{when} of {settings.sampler}, seed {settings.seed}"
        raise callback_error(callback, moment, error) from error
