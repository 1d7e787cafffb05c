"""Learning rates of every sampler, found on seeds and examples that the comparison does not judge
by.

All samplers search one grid. The best rate has the fewest rounds to the threshold, averaged over
the tuning seeds (``Score``). Where that of any sampler is at an edge, the grid grows there, for
all.

::

    DIR/config.toml, environment.json
    DIR/runs/local_lr-0.1/SAMPLER-seed1000.json    the record of a tuning run
    DIR/rates.toml                          the rates found: deltafl compare --config DIR/rates.toml
    DIR/comparison/                                the comparison with them
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field

from ...analysis.methods import rounds_until
from ...analysis.runs import Run
from ...analysis.statistics import area_under, reach
from ...errors import DeltaflError
from ...store import checked, write_atomically
from ...store.files import below
from ...tasks.registry import TaskSpec
from ..folder.continuing import continued, note_settings
from ..folder.directory import COMPARED, locked, recorded_settings, write_settings
from ..folder.record import UNFINISHED, Job, RunStore
from ..parallel.player import require_simulator
from ..parallel.sweep import run_jobs
from ..setting_types import CommaSeparated, Positive, Rates, Seed, Share, listed
from ..settings import CompareSettings, refuse_twice
from ..view.progress import OnProgress
from .comparing import check

NEVER = 2  # a tuning run that never reaches the threshold counts as so many times its rounds


def _in_order(rates: tuple[float, ...]) -> tuple[float, ...]:
    # The records of a rate are found by its first six digits.
    for low, high in pairwise(sorted(rates)):
        if f"{low:g}" == f"{high:g}":
            raise ValueError(f"the rates {low} and {high} count as one; write it once")
    return tuple(sorted(rates))


def _from_1000(seeds: Any) -> Any:
    found = listed(seeds)
    return [1000 + seed for seed in found] if isinstance(found, range) else found


#: A first grid of rates, which is put in order; on the command line "0.1,0.2,0.4".
FirstGrid = Annotated[
    tuple[Positive, ...], CommaSeparated, AfterValidator(_in_order), Field(min_length=1)
]


class Score(NamedTuple):
    """How good a rate is; less is better.

    Attributes:
        rounds: To the threshold, ``NEVER`` times those of the run if it never got there, or
            diverged; 0 without one.
        area: The mean of the metric over the rounds, its negative where higher is better; it
            decides ties.
    """

    rounds: float
    area: float


class Search(NamedTuple):
    """How far the search for a rate is."""

    #: the grid as it is now, increasing
    rates: tuple[float, ...]
    #: what all tuning seeds play; empty while runs of the first seed are missing
    finalists: tuple[float, ...]
    #: the chosen rate; None while runs of the grid are missing
    best: float | None = None
    #: of the grid, where the chosen rate still is
    edge: Literal["", "low", "high"] = ""
    score: Score | None = None


class Trial(NamedTuple):
    """A tuning run."""

    label: str
    rate: float
    seed: int


class NothingLearntError(DeltaflError):
    """With the best rate of every sampler no tuning run moved its model."""


#: The score of a tuning run; None if it is not finished.
ScoreOf = Callable[[Trial], Score | None]


class Grid(NamedTuple):
    """What is searched. A finalist stays one when the grid grows.

    Attributes:
        rates: The first grid, increasing.
        extensions: How often it may grow on each side, by the factor between the two rates there,
            which is 2 for a single rate.
        finalists: How many rates of a sampler the seeds after the first play, the best on the
            first; None for all.
    """

    rates: tuple[float, ...]
    extensions: int
    seeds: tuple[int, ...]
    finalists: int | None = None

    def search(self, labels: Iterable[str], score_of: ScoreOf) -> dict[str, Search]:
        """The search with the finished runs."""
        rates = self.rates
        up = self.extensions
        down = self.extensions
        found = {label: Search((), ()) for label in labels}
        while True:
            for label, before in found.items():
                finalists = self._finalists(label, rates, before, score_of)
                scores = _scores(label, finalists, self.seeds, score_of)
                search = Search(rates, finalists)
                if scores:
                    chosen = min(finalists, key=scores.__getitem__)
                    search = search._replace(best=chosen, score=scores[chosen])
                    # The only rate of a grid counts as its upper edge.
                    if chosen == rates[0]:
                        search = search._replace(edge="low")
                    if chosen == rates[-1]:
                        search = search._replace(edge="high")
                found[label] = search
            # One grid for all samplers: one at its edge makes it grow for everybody.
            edges = {search.edge for search in found.values()}
            grows_up = "high" in edges and up > 0
            grows_down = "low" in edges and down > 0
            if not (grows_up or grows_down):
                return found
            rates = _grown(rates, grows_down, grows_up)
            up = up - grows_up
            down = down - grows_down

    def _finalists(
        self,
        label: str,
        rates: tuple[float, ...],
        before: Search,
        score_of: ScoreOf,
    ) -> tuple[float, ...]:
        if self.finalists is None:
            return rates
        scores = _scores(label, rates, self.seeds[:1], score_of)
        best = sorted(scores, key=scores.__getitem__)[: self.finalists]
        # While runs of a grown grid are missing, nobody is known to be good enough.
        return tuple(sorted({*before.finalists, *best})) if scores else ()

    def trials(self, found: Mapping[str, Search]) -> list[Trial]:
        """The tuning runs of the grid as it is now, finished ones included, seed by seed."""
        first, *others = self.seeds
        trials = [Trial(label, rate, first) for label, s in found.items() for rate in s.rates]
        for seed in others:
            trials += [
                Trial(label, rate, seed) for label, s in found.items() for rate in s.finalists
            ]
        return trials


def _grown(rates: tuple[float, ...], down: bool, up: bool) -> tuple[float, ...]:
    """A grid with one rate more at some of its ends."""
    # A factor such as 2.0000000000000004 is one that decimals cannot write.
    factors = [round(high / low, 9) for low, high in pairwise(rates)] or [2.0]
    return (rates[0] / factors[0],) * down + rates + (rates[-1] * factors[-1],) * up


def _scores(
    label: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    score_of: ScoreOf,
) -> dict[float, Score]:
    """The mean scores of rates; none while a run is missing."""
    found = dict[float, Score]()
    for rate in rates:
        scores = [score_of(Trial(label, rate, seed)) for seed in seeds]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            return {}
        found[rate] = mean_score(known)
    return found


def mean_score(scores: Sequence[Score]) -> Score:
    """The score of a rate on several seeds."""
    return Score(*(float(np.mean(column)) for column in zip(*scores, strict=True)))


class TuneSettings(CompareSettings):
    """A comparison whose learning rates are tuned first."""

    validation: Share = 0.2
    """share of training examples that tuning judges by"""
    local_rates: FirstGrid | None = None
    """first grid; if not set: task's rate / 4 to 4 times it"""
    server_rates: FirstGrid | None = None
    """first grid of server rates; not tuned if not set"""
    tuning_seeds: Annotated[tuple[Seed, ...], BeforeValidator(_from_1000)] = Field(
        3,
        min_length=1,
        validate_default=True,
    )
    """number of seeds, which are 1000, 1001, ..., or a list"""
    extensions: Annotated[int, Field(ge=0)] = 3
    """how often a grid may grow on each side"""

    def _check(self, spec: TaskSpec) -> None:
        super()._check(spec)
        if clash := set(self.tuning_seeds) & set(self.seeds):
            raise DeltaflError(
                f"tuning_seeds {sorted(clash)} are seeds of the comparison too; choose others"
            )
        if self.rates is not None:
            raise DeltaflError(
                "rates are what tuning finds; leave them out, or write: deltafl compare"
            )
        tuned = self.grids()
        for label in self.samplers:
            refuse_twice(label, tuned, "is what tuning is to find")

    def grids(self) -> dict[str, Grid]:
        """The grids by the setting that they are of; the second is searched with the rates of
        the first.
        """
        near = tuple((self.local_lr or 1) * 2.0**k for k in range(-2, 3))
        rates = {"local_lr": self.local_rates or near, "server_lr": self.server_rates}
        return {
            name: Grid(grid, self.extensions, self.tuning_seeds)
            for name, grid in rates.items()
            if grid
        }

    def trial(
        self,
        trial: Trial,
        name: str,
        rates: Mapping[str, Mapping[str, float]],
    ) -> Job:
        """A tuning run, with the rates of its sampler that are known, and its own."""
        own = {**rates[trial.label], name: trial.rate, "stop_at_threshold": False, "patience": None}
        return Job(
            f"{name}-{trial.rate:g}",
            self.run(trial.label, trial.seed).model_copy(update=own),
        )

    def score(self, run: Run) -> Score:
        """The score of a tuning run."""
        rounds = self.rounds or 1
        area = -run.judge.sign * area_under(run, rounds)
        # A missing share counts as 0 in the area already; another missing number is the worst.
        if not np.isfinite(area):
            area = np.inf
        needed = 0.0
        if self.threshold is not None:
            at = reach(run, self.threshold)
            needed = NEVER * rounds if at is None else float(rounds_until(run, at))
        if run.diverged is not None:
            needed = NEVER * rounds
        return Score(needed, area)

    def comparison(self, rates: Mapping[str, Mapping[str, float]]) -> CompareSettings:
        """The comparison with these rates, on the test set."""
        common = self.model_dump(include={*CompareSettings.model_fields})
        return CompareSettings(**{**common, "validation": None, "rates": rates})


class Tuned(NamedTuple):
    """The rates found by sampler, as a comparison takes them, and the searches by setting and
    sampler.
    """

    rates: dict[str, dict[str, float]]
    searches: dict[str, dict[str, Search]]


def _is_still(run: Run) -> bool:
    """Whether replies were refused and the model never moved, as where all of them were."""
    return run.refused > 0 and len(run.loss_r) > 1 and bool((run.loss_r == run.loss_r[0]).all())


def tune_rates(
    settings: TuneSettings,
    out: Path,
    on_progress: OnProgress,
    processes: int = 1,
    trust_code: bool = False,
) -> Tuned:
    """Search the rates; tuning runs that are recorded are not played again.

    Args:
        settings: Resolved settings.
        out: The folder of the records; ``rates.toml`` is written there.
        on_progress: Called about once a second.
        processes: Runs side by side, >= 1.
        trust_code: Whether Python files that only ``out`` names may be imported.

    Raises:
        NothingLearntError: If there is no rate to recommend.
        DeltaflError: If another process is playing in the folder, or a run is impossible.
    """
    require_simulator()
    settings, before, code = continued(settings, out, trust_code)
    if before is not None and before.rounds != settings.rounds:
        raise DeltaflError(
            f"the tuning runs in {out} have rounds = {before.rounds}, not {settings.rounds}: "
            "choose another --out"
        )
    data = check(settings, out, before)
    if before is not None and before.threshold != settings.threshold:
        # First, as another call would not see that it is new.
        _give_threshold(below(out, COMPARED), settings.threshold)
    note_settings(out, settings, before, data, code)
    tuned = Tuned({label: {} for label in settings.samplers}, {})
    store = RunStore(out)
    jobs = dict[str, Job]()
    for name, grid in settings.grids().items():
        known = dict[Trial, Score]()
        still = set[Trial]()
        while True:
            found = tuned.searches[name] = grid.search(settings.samplers, known.get)
            trials = {
                trial: settings.trial(trial, name, tuned.rates) for trial in grid.trials(found)
            }
            jobs |= {job.key: job for job in trials.values()}
            new = trials.keys() - known.keys()
            if not new:
                break
            # With the finished ones, which are skipped: progress is shown of all.
            is_left = (out / UNFINISHED).exists()
            if is_left or any(store.get(trials[trial]) is None for trial in new):
                run_jobs([*jobs.values()], out, processes, on_progress, code)
            records = {trial: store.get(trials[trial]) for trial in new}
            for trial, record in records.items():
                if record is None:
                    continue
                run = record.run()
                known[trial] = settings.score(run)
                if _is_still(run):
                    still.add(trial)
        for label, search in found.items():
            tuned.rates[label][name] = search.best or 0.0
        chosen = {
            Trial(label, tuned.rates[label][name], seed)
            for label in found
            for seed in settings.tuning_seeds
        }
        if chosen <= still:
            raise NothingLearntError(
                f"nothing was learnt with the best {name} of the grid: replies were refused and no "
                f"model moved; write lower {name.replace('lr', 'rates')}, and another --out"
            )
    write_atomically(out / "rates.toml", tomli_w.dumps({"rates": tuned.rates}))
    return tuned


def last_comparison(settings: TuneSettings, tuned: Tuned, folder: Path) -> CompareSettings:
    """The comparison with the rates found, as it goes on in its folder: more rounds, and another
    threshold, that it was given there, stay.

    Raises:
        DeltaflError: If it was played with other rates.
    """
    wanted = settings.comparison(tuned.rates)
    before = _compared(folder)
    if before is None:
        return wanted
    for label, now in wanted.rates_of(before.samplers).items():
        old = before.rates_of([label]).get(label, {})
        if old != now:
            raise DeltaflError(
                f"{folder} compared {label} with {_text_of(old)}, and tuning now finds "
                f"{_text_of(now)}: {_cure(folder)}"
            )
    return wanted.model_copy(update={"rounds": before.rounds, "threshold": before.threshold})


def _give_threshold(folder: Path, threshold: float | None) -> None:
    """Note another threshold in a comparison, as ``deltafl compare --resume`` does."""
    if not folder.exists():
        return
    with locked(folder):
        before = _compared(folder)
        if before is not None:
            write_settings(folder, before.model_copy(update={"threshold": threshold}))


def _compared(folder: Path) -> CompareSettings | None:
    """What a comparison was last brought to; None if there is none."""
    recorded = recorded_settings(folder)
    if recorded is None:
        return None
    return checked(CompareSettings, recorded, str(folder / "config.toml"), _cure(folder))


def _cure(folder: Path) -> str:
    return f"rename the folder {folder}, and tune again with --resume, which compares anew"


def _text_of(rates: Rates) -> str:
    return ", ".join(f"{name} = {rate}" for name, rate in rates.items()) or "no rate of its own"
