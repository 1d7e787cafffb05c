"""One run by several processes, on one machine or many: ``torchrun --nproc-per-node 2 -m deltafl run ...``.

All processes make the same seeded draw from the same state. Each trains its share of the cohort, balanced by steps, and
they close the round together (``shared.py``): one sum of the estimate and the statistics over all processes. Where an
estimator learns from the updates themselves (it remembers one a client, or damps its memory), with probes, and for
the theoretical samplers, the updates are gathered in all processes instead, and the bits are those of one process.
Evaluation is divided, too. The first process alone writes the record, and reads it for all: the others need no folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DeltaflError
from ..io import flatten, settled, unflatten
from ..round import RoundState
from .divergence import DivergedError
from .ranks import Ranks, shared_out
from .records import RunDirectory
from .settings import RunSettings, Settings
from .workers import Job, Workers


def refuse_undividable(settings: RunSettings) -> None:
    """Refuse settings that are for one process alone.

    Raises:
        DeltaflError: If there is one.
    """
    if settings.memory_path is not None:
        raise DeltaflError(
            "memory_path is a file of one process and this run has several; leave it out, or start one process"
        )
    if settings.engine == "measured":
        raise DeltaflError(
            "engine = 'measured' goes by one process's clock and this run has several; write 'loop' or 'batched'"
        )


class SharedWorkers(Workers):
    """Workers of all processes of a run: each process does its share of the jobs, and all have all results.

    Args:
        count: Worker processes of each process of the run.
        ranks: The processes of the run.
    """

    def __init__(self, count: int, ranks: Ranks) -> None:
        super().__init__(count)
        self._ranks = ranks

    @property
    def width(self) -> int:
        """Jobs that run at the same time."""
        return self.count * (1 if self._ranks.is_apart else self._ranks.count)

    def map(self, method: str, model: Any, jobs: Sequence[Job], costs: Sequence[float]) -> list[Any]:
        """``Workers.map``, divided; all processes must call it with the same arguments, unless they are apart."""
        if self._ranks.is_apart:
            return super().map(method, model, jobs, costs)
        mine = shared_out(costs, self._ranks.count)[self._ranks.rank]
        found = super().map(method, model, [jobs[place] for place in mine], [costs[place] for place in mine])
        results: list[Any] = [None] * len(jobs)
        for share in self._ranks.gathered(list(zip(mine, found, strict=True))):
            for place, result in share:
                results[place] = result
        return results


class SharedDirectory(RunDirectory):
    """The record of a run by several processes: the first one writes, and tells the others what it reads.

    All processes must call the same methods in the same order.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        super().__init__(path)
        self._ranks = ranks

    def start(self, settings: Settings, data: Mapping[str, str] | None = None) -> None:
        """Make the folder."""
        self._ranks.from_first(lambda: RunDirectory.start(self, settings, data))

    def environment(self) -> dict[str, Any]:
        """Versions, hardware and data, as they were when the run was started."""
        return self._ranks.from_first(lambda: RunDirectory(self.path).environment())

    @property
    def started(self) -> bool:
        """Whether a run was started here."""
        return self._ranks.from_first(lambda: RunDirectory(self.path).started)

    def append(self, round_line: Mapping[str, Any], timing_line: Mapping[str, Any]) -> None:
        """Add one round."""
        if self._ranks.first:
            super().append(round_line, timing_line)

    def save(self, state: RoundState) -> RoundState:
        """Write a checkpoint."""
        if self._ranks.first:
            return super().save(state)
        following: RoundState = settled(state)
        return following

    def keep_doubtful(self, state: RoundState) -> None:
        """Write the model of a run that ends in doubt."""
        if self._ranks.first:
            super().keep_doubtful(state)

    def load(self, template: RoundState) -> RoundState:
        """The state of the last checkpoint, in all processes."""
        arrays = self._ranks.from_first(lambda: dict(flatten(RunDirectory.load(self, template))))
        state: RoundState = settled(unflatten(template, arrays))
        return state

    @property
    def scratch(self) -> Path | None:
        """The folder may be on another machine."""
        return self.path if self._ranks.first else None

    @property
    def kept(self) -> int:
        """The round of the last checkpoint."""
        return self._ranks.from_first(lambda: RunDirectory(self.path).kept)

    def divergence(self) -> DivergedError | None:
        """How the run ended before its last round, if it did."""
        ended = self._ranks.from_first(lambda: _parts_of(RunDirectory(self.path).divergence()))
        return None if ended is None else DivergedError(*ended)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the record."""
        return self._ranks.from_first(lambda: RunDirectory(self.path).lines(name))


def _parts_of(error: DivergedError | None) -> tuple[int, int, str] | None:
    return None if error is None else (error.round, error.kept, error.why)
