"""Which method, how many clients, at what cost: a pilot of short paired runs, and what it says.

``full`` is played first, and says whether the goal can be reached. Then every method plays with
several n, all with the same seeds: at first about as many rounds as ``full`` needs, and more with
fewer clients; then those that promise to be cheapest go on, to a larger share of their forecast
(``_STAGES``). Where the cheapest n of a method is the least or the largest one that was tried, half
or twice of it is tried, too. No round is played twice.

::

    DIR/config.toml, environment.json
    DIR/runs/METHOD+sample=N-seedS/    a run of the pilot
    DIR/errors.csv                     the relative error of a round's estimate by method and n
    DIR/forecasts.csv                  rounds, use and cost to the goal by method and n
    DIR/plan.txt                       what ``deltafl plan`` prints
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import AfterValidator, Field

from ...analysis.advice import Advice, ErrorRow
from ...analysis.forecast import Course, Curve, Trial, between_sizes, goodness
from ...analysis.prices import Prices
from ...audit.error_by_size import error_by_size
from ...calls import Named
from ...errors import DeltaflError, counted
from ...samplers.base import RunFacts
from ...samplers.label import base_name, make_sampler, spelled_among, split_settings
from ...samplers.table import SAMPLERS
from ...server.table import sized_by
from ...store import write_atomically
from ...tasks.metrics import metric_of
from ...tasks.own import is_own
from ...tasks.registry import TaskSpec
from ...types import Json, Judge
from ..callbacks.callback import Callback, LiveRun, PlayedRound
from ..folder.continuing import continued, note_settings
from ..folder.directory import RunDirectory, locked, recorded_settings
from ..folder.record import Job, read_run
from ..parallel.player import Player, require_simulator
from ..parallel.processes import result
from ..parallel.sweep import play_jobs, side_by_side
from ..schedules import factors_of
from ..setting_types import CommaSeparated, Count, Finite, Positive
from ..settings import CompareSettings, Labels, require_share
from ..view.progress import OnProgress
from .comparing import check

#: After the first runs: so many of each method, the cheapest, play this share of their forecast.
#: The last stages are for those whose forecast rose.
_STAGES = ((4, 0.5), (3, 1.0), (2, 1.2), (2, 1.2))
#: The rounds whose estimates are measured, with every client's update.
_MEASURED = (2, 5)
#: What all methods are compared with.
PLAIN = "uniform"
#: The reference: forecasts are multiples of its rounds.
_FULL = "full"


class PlanSettings(CompareSettings):
    """What a plan is made for."""

    samplers: Labels = (
        "census+average=0.5+scaffold",
        "census+average=0.5",
        "innovation@local-pivotal+average=0.5",
        PLAIN,
    )
    """methods under consideration; uniform always is"""
    goal: Finite | None = None
    """what the metric is to reach; the task's threshold if not set"""
    cost: Annotated[str, AfterValidator(lambda text: Prices.read(text).text)] = "training=1"
    """prices in your unit: training=1,mb_up=0.1,mb_down=0.1,round=5; of a clock second=2"""
    budget: Positive | None = None
    """the most that may be spent, in that unit"""
    cohorts: (
        Annotated[
            tuple[Count, ...],
            CommaSeparated,
            AfterValidator(lambda sizes: tuple(sorted(set(sizes)))),
            Field(min_length=1),
        ]
        | None
    ) = None
    """numbers of clients n to try; m / 50 to m / 3 if not set"""

    # Of the same name is a part of the server, which shares out trainings.
    not_of_runs: ClassVar = frozenset({"budget"})

    @property
    def prices(self) -> Prices:
        """What is paid."""
        return Prices.read(self.cost)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods under consideration."""
        labels = (*self.samplers, PLAIN)
        # However it is typed.
        return tuple(dict.fromkeys(map(spelled_among([PLAIN]), labels)))

    def _missing(self, spec: TaskSpec) -> Json:
        missing = super()._missing(spec)
        if self.goal is None:
            # A goal is what other commands call a threshold.
            missing["goal"] = spec.threshold if self.threshold is None else self.threshold
        return missing

    def finds_n(self) -> bool:
        """A plan is for that."""
        return True

    def _check(self, spec: TaskSpec) -> None:
        super()._check(spec)
        metric = metric_of(spec.metric)
        if self.goal is None:
            such = "0.85 for 85 %" if metric.share else "1.5"
            raise DeltaflError(
                f"the task has no threshold of its own; write what {metric.name} is to reach, such "
                f"as --goal {such}"
            )
        require_share("goal", self.goal, metric)
        for label in self.samplers:
            if "sample" in split_settings(label)[1]:
                raise DeltaflError(
                    f"{label} has an n of its own, which the plan is to find: leave +sample out"
                )
            sampler = make_sampler(label)
            facts = RunFacts(num_classes=2)
            more = facts._replace(rounds=1 + facts.rounds)
            # What a user's own makes of a run is seen when it is played.
            is_known = base_name(label) in SAMPLERS
            if is_known and sampler.for_run(facts) != sampler.for_run(more):
                raise DeltaflError(
                    f"the options of {label} depend on the number of rounds, which a plan is to "
                    "find: leave it out, or write numbers for them"
                )
            if sampler.asks_all:
                raise DeltaflError(
                    f"{label} asks everybody, whatever n is: the plan plays it as its reference, "
                    "leave it out"
                )
        for label in self.methods:
            sizing = sized_by(self.run(label, self.seeds[0]).part_settings())
            if sizing is not None:
                raise DeltaflError(
                    f"{label} sizes its cohorts by {sizing}, and a plan is to find n: leave "
                    f"{sizing} out"
                )
        factors = factors_of(self.lr_schedule, self.rounds or 1)
        # Runs of a pilot grow.
        if factors != factors_of(self.lr_schedule, 2 * (self.rounds or 1))[: len(factors)]:
            raise DeltaflError(
                f"lr_schedule {self.lr_schedule} depends on the number of rounds, which a plan is "
                "to find: leave it out, or write one such as 'step(every=10)'"
            )
        clients = spec.num_clients if is_own(self.task) else self.clients
        if self.cohorts and clients and max(self.cohorts) > clients:
            raise DeltaflError(
                f"cohorts has {max(self.cohorts)}, and there are {clients} clients; lower it"
            )
        prices = self.prices
        if prices.second and self.speeds is None:
            raise DeltaflError(
                "a second costs only where there is a clock: write --speeds lognormal, or a file"
            )
        least = prices.round
        # Else it is the cheapest client's, and clients are counted only later.
        if self.client_costs is None:
            least += prices.training
        if self.budget is not None and self.budget < least:
            raise DeltaflError(
                f"the budget of {self.budget:g} is below one round: with one client that costs "
                f"{least:g}"
            )

    def require_used(self, given: Json) -> None:
        """Refuse n, which is found, and a threshold beside the goal."""
        if "sample" in given:
            raise DeltaflError(
                "sample does nothing here: a plan finds n; write the numbers of clients to try as "
                "cohorts, or leave it out"
            )
        if given.get("goal") is not None and "threshold" in given:
            raise DeltaflError(
                "threshold does nothing beside goal, which a plan is for: leave it out"
            )

    def deciding(self, beside: Self) -> Json:
        """What decides the results of the pilot, which another goal or price does not."""
        free = {"goal", "cost", "budget"}
        return {key: value for key, value in super().deciding(beside).items() if key not in free}

    def trial(self, method: str, n: int | None, seed: int, rounds: int) -> Job:
        """A run of the pilot."""
        label = method
        if n is not None:
            text = f"{method}+sample={n}"
            # A class of the user's goes along.
            label = Named(text, method.of) if isinstance(method, Named) else text
        # By the method's own name, as rates have it.
        run = self.run(method, seed).model_copy(
            update={
                "sampler": label,
                "sample": n or self.sample,
                "rounds": rounds,
                "threshold": self.goal,
                # A forecast is read off the curve, and the curve needs every round.
                "evaluate_every": 1,
                "stop_at_threshold": False,
                "patience": None,
            }
        )
        return Job("", run)


@dataclass(frozen=True)
class Measuring(Callback):
    """Measures the error of the estimate of some rounds for many n, with every client's update.

    It is in the round's line under ``probe``: ``error_5`` for n = 5, and ``exact_5``, 1 where no
    cohorts were drawn for it.
    """

    sizes: tuple[int, ...]
    rounds: tuple[int, ...] = _MEASURED

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        """Measure, where that is due."""
        if round.number not in self.rounds or round.oracle is None or "diverged" in round.line:
            return
        everyone = np.arange(run.plan.population.num_clients)
        # Of all reports first: a table too large for RAM goes into a file.
        if not round.oracle.reports().responded_n.all():
            return
        update_md = round.oracle.train(everyone).update_nd
        drifts = round.oracle.drifts(everyone)
        if drifts is not None:
            update_md = update_md - drifts
        found = error_by_size(run.plan, round.opened, round.oracle, update_md, self.sizes)
        round.line["probe"] = {
            key: value
            for n, mse, exact in found
            for key, value in ((f"error_{n}", mse), (f"exact_{n}", float(exact)))
        }


def play_pilot(
    settings: PlanSettings,
    out: Path,
    on_progress: OnProgress,
    processes: int,
    trust_code: bool,
) -> Advice:
    """Play the pilot, as far as it is not recorded in ``out``, and say what it says.

    Args:
        settings: Resolved settings.
        out: The folder; runs that are recorded there go on.
        on_progress: Called about once a second.
        processes: Runs side by side, >= 1.
        trust_code: Whether Python files that only ``out`` names may be imported.

    Raises:
        DeltaflError: If the pilot says that the goal cannot be reached, another process is playing
            in the folder, or a run is impossible.
    """
    require_simulator()
    with locked(out):
        settings, before, code = continued(settings, out, trust_code)
        with side_by_side(processes) as pool:
            if pool is None:
                data = check(settings, out, before)
            else:
                data = result(pool.submit(check, settings, out, before))
            note_settings(out, settings, before, data, code)
            advice = _Pilot(
                settings,
                Player(out, keep_folders=True, code=code),
                on_progress,
                pool,
            ).play()
    write_atomically(out / "errors.csv", advice.errors_csv())
    write_atomically(out / "forecasts.csv", advice.forecasts_csv())
    write_atomically(out / "plan.txt", f"{advice}\n")
    return advice


class _Pilot:
    """The runs of a plan, and what is known from them."""

    def __init__(
        self,
        settings: PlanSettings,
        player: Player,
        on_progress: OnProgress,
        pool: Any,
    ) -> None:
        assert settings.goal is not None
        assert settings.rounds is not None
        self._settings = settings
        self._goal = settings.goal
        self._rounds = settings.rounds
        self._player = player
        self._on_progress = on_progress
        self._pool = pool
        self._sizes: tuple[int, ...] = ()
        self._measured: dict[str, int] = {}
        self._num_clients = 0
        self._judge: Judge | None = None

    def play(self) -> Advice:
        """Play what is missing, in stages, and say what it says."""
        full = self._play({(_FULL, 0): self._rounds})[_FULL, 0]
        reached_s = np.array([course.reach(self._good(self._goal)) for course in full])
        self._require_reached(full, reached_s)
        cohorts = self._cohorts()
        middle = cohorts[len(cohorts) // 2]
        methods = self._settings.methods
        self._measured = dict.fromkeys(methods, middle)
        self._sizes = _grid(self._num_clients, cohorts)
        # Rounds grow about as the root of 1 / n: so all come about as far.
        first = {
            n: max(math.ceil(reached_s.mean() * math.sqrt(self._num_clients / n) / 2), *_MEASURED)
            for n in cohorts
        }
        wanted = {(name, n): first[n] for name in methods for n in cohorts}
        courses = self._play_until_clear(wanted, full)
        errors = {method: self._errors(method) for method in methods}
        # Cheap runs first: only what may still be the cheapest goes on.
        for kept, share in _STAGES:
            more = dict[tuple[str, int], int]()
            for curve in self._curves(courses, full, errors):
                more |= self._longer(curve, kept, share, wanted)
            wanted |= more
            courses |= self._play_until_clear(wanted, full)
        curves = self._curves(courses, full, errors)
        assert self._judge is not None
        # Other prices need no other runs.
        return Advice.of(
            self._goal,
            self._settings.prices,
            self._settings.budget,
            curves,
            errors,
            self._judge,
        )

    def _play_until_clear(
        self,
        wanted: dict[tuple[str, int], int],
        full: Sequence[Course],
    ) -> dict[tuple[str, int], list[Course]]:
        """``_play``, and what shows no pace in so few rounds plays on: what is not known yet is not
        out of reach. ``wanted`` gets the rounds played.
        """
        courses = self._play(wanted)
        while more := self._unclear(courses, full):
            wanted |= more
            courses |= self._play(more)
        return courses

    def _unclear(
        self,
        courses: Mapping[tuple[str, int], Sequence[Course]],
        full: Sequence[Course],
    ) -> dict[tuple[str, int], int]:
        """The runs without a forecast that may still be the cheapest of their method, with twice
        their rounds; those of ``full`` at the most.
        """
        goal = self._good(self._goal)
        prices = self._settings.prices
        unclear = list[Trial]()
        cheapest = dict[str, float]()
        for (method, n), found in courses.items():
            trial = Trial(method, n, found)
            rounds = float(trial.rounds_to(goal, full).mean())
            if math.isinf(rounds):
                unclear.append(trial)
                continue
            known = cheapest.get(method, math.inf)
            cheapest[method] = min(known, trial.cost(rounds, prices))
        return {
            (trial.method, trial.n): min(2 * trial.longest, self._rounds)
            for trial in unclear
            if trial.longest < self._rounds
            and not trial.diverged(goal)
            and trial.cost(trial.played, prices) < cheapest.get(trial.method, math.inf)
        }

    def _play(self, wanted: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], list[Course]]:
        """The courses of some methods and n after so many rounds, with every seed."""
        jobs = {
            (method, n, seed): self._job(method, n, seed, rounds)
            for seed in self._settings.seeds
            for (method, n), rounds in wanted.items()
        }
        play_jobs([*jobs.values()], self._player, self._pool, self._on_progress)
        return {
            (method, n): [
                self._course(jobs[method, n, seed], rounds) for seed in self._settings.seeds
            ]
            for (method, n), rounds in wanted.items()
        }

    def _job(self, method: str, n: int, seed: int, rounds: int) -> Job:
        job = self._settings.trial(method, n or None, seed, rounds)
        if n and n == self._measured.get(method) and seed == self._settings.seeds[0]:
            return job._replace(callbacks=(Measuring(self._sizes),))
        return job

    def _course(self, job: Job, rounds: int) -> Course:
        directory = RunDirectory(self._player.place(job))
        self._num_clients = self._num_clients or directory.num_clients()
        # An earlier call may have played more of it.
        recorded = recorded_settings(directory.path) or {}
        played = {"rounds": recorded["rounds"], "threshold": recorded.get("threshold")}
        run = read_run(directory, job.settings.model_copy(update=played))
        self._judge = run.judge
        return Course.of(run, rounds)

    def _good(self, value: float) -> float:
        """``goodness``; whether more is better is known from a record."""
        assert self._judge is not None
        return float(goodness(self._judge, value))

    def _require_reached(self, full: Sequence[Course], reached_s: Any) -> None:
        """Refuse a goal that full participation does not reach."""
        if np.isfinite(reached_s).all():
            return
        assert self._judge is not None
        best = self._good(min(float(course.best_r[-1]) for course in full))
        raise DeltaflError(
            f"the pilot says that {self._goal:g} cannot be reached: with every client in each of "
            f"{counted(self._rounds, 'round')} the worst seed comes to {best:.4g} in "
            f"{self._judge.heading}; choose a goal that is easier, or more --rounds"
        )

    def _cohorts(self) -> tuple[int, ...]:
        """The n that are tried first: those that were asked for, or five in equal ratios."""
        m = self._num_clients
        given = self._settings.cohorts
        if given is None:
            return tuple(sorted({max(1, round(size)) for size in np.geomspace(m / 50, m / 3, 5)}))
        # Owners are counted only now.
        return tuple(sorted({min(size, m) for size in given}))

    def _curves(
        self,
        courses: Mapping[tuple[str, int], Sequence[Course]],
        full: Sequence[Course],
        errors: Mapping[str, Sequence[ErrorRow]],
    ) -> list[Curve]:
        """What is known of each method."""
        return [
            Curve(
                [Trial(name, n, found) for (name, n), found in courses.items() if name == method],
                full,
                self._good(self._goal),
                between_sizes({row.n: row.mse for row in errors[method]}),
                self._settings.prices,
            )
            for method in self._settings.methods
        ]

    def _longer(
        self,
        curve: Curve,
        kept: int,
        share: float,
        wanted: Mapping[tuple[str, int], int],
    ) -> dict[tuple[str, int], int]:
        """The runs of a method that go on, and those beyond the n that were tried, with rounds."""
        forecasts = sorted((curve.at(trial.n) for trial in curve.trials), key=lambda f: f.cost.mean)
        longer = {
            (found.method, found.n): math.ceil(share * found.rounds.mean)
            for found in forecasts[:kept]
        }
        sizes = [n for name, n in wanted if name == curve.method]
        if forecasts and (best := forecasts[0]).n in (min(sizes), max(sizes)):
            # Half the clients need less than twice the rounds.
            ends = ((min(sizes), best.n // 2, 2.0), (max(sizes), 2 * best.n, 1.0))
            for end, beyond, times in ends:
                n = min(max(beyond, 1), self._num_clients)
                if best.n == end != n:
                    longer[curve.method, n] = math.ceil(times * best.rounds.mean)
        return {key: max(rounds, wanted.get(key, 0)) for key, rounds in longer.items()}

    def _errors(self, method: str) -> list[ErrorRow]:
        """The relative errors of a method's estimate, in the mean over the rounds measured."""
        seed = self._settings.seeds[0]
        job = self._job(method, self._measured[method], seed, 1)
        lines = RunDirectory(self._player.place(job)).lines("rounds.jsonl")
        probes = [line["probe"] for line in lines if "probe" in line]
        if not probes:
            raise DeltaflError(
                f"no round of {method} could be measured: an update is not finite; lower --local-lr"
            )
        return [
            ErrorRow(
                method,
                n,
                float(np.mean([probe[f"error_{n}"] for probe in probes])),
                all(probe[f"exact_{n}"] for probe in probes),
            )
            for n in self._sizes
        ]


def _grid(m: int, cohorts: Sequence[int]) -> tuple[int, ...]:
    """The n whose errors are measured: 1 to m in equal ratios, and those that are tried."""
    even = {round(size) for size in np.geomspace(1, m, 8)}
    return tuple(sorted({*even, *cohorts}))
