"""The parts of the benchmark, their settings and their runs; and the rule that chooses each method's learning rate.

::

    [settings]                       # of every part: settings of a run, and the fields of ``Part``
    [settings.tiers.core]            # of the parts with tier = "core"
    [parts.fashion-mnist]            # tier, title, and what is its own
    [cpu]  [cpu.change.fashion-mnist]

Later ones win: settings, tier, part, scale, the scale's change of the part. ``methods`` are labels, or ``"every"`` for
each sampler of ``deltafl samplers``; ``more`` are labels beside them. ``texts.toml`` states how a rate is chosen; a
finalist stays one when the grid grows.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafl.errors import DeltaflError, unknown_name
from deltafl.io import checked
from deltafl.samplers import SAMPLERS, parse_label
from deltafl.simulation import Job, RunSettings, make_settings

from ..spec import Experiment

FULL, BASELINE = "full", "uniform"
NEVER = 2  # a tuning run that never reaches the threshold counts as so many times its rounds
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(BaseModel):
    """A part of the benchmark at one scale; what is not named here is a setting of every run."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    title: str
    tier: str
    methods: tuple[str, ...]
    rates: tuple[Rate, ...] = Field(min_length=1)  # the first grid of local rates, each twice the one before
    extensions: Annotated[int, Field(ge=0)] = 3  # how often the grid may grow on each side
    tuning_rounds: Count | None = None  # the most of a tuning run; None for those of a test run
    tuning_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    finalists: Count | None = None  # how many rates of a method the tuning seeds after the first play; None for all
    seeds: Count  # test seeds are 0, 1, ..., seeds - 1
    rounds_of: dict[str, Count] = {}  # by label where they differ from the part's (full participation is expensive)
    probe_every: Count | None = None  # rounds between two probes of test seed 0; None for none

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if any(abs(high / low - 2) > 1e-9 for low, high in zip(self.rates, self.rates[1:], strict=False)):
            raise ValueError(f"rates are {self.rates}; write each twice the one before")
        clash = [seed for seed in self.tuning_seeds if seed < self.seeds]
        if clash:
            raise ValueError(f"tuning_seeds {clash} are test seeds too; choose others")
        return self

    @cached_property
    def common(self) -> RunSettings:
        """The settings of a run, resolved; its sampler, seed and rate mean nothing."""
        return self._run(BASELINE, self.rates[0], 0)

    @property
    def threshold(self) -> float:
        threshold = self.common.threshold
        if threshold is None:
            raise DeltaflError(f"part {self.name} has no threshold, so there are no rounds to count; set one")
        return threshold

    @property
    def horizon(self) -> int:
        """The rounds that all methods play: over these the mean accuracy is taken."""
        return min(map(self.rounds, self.methods), default=self.rounds(BASELINE))

    def rounds(self, label: str) -> int:
        return self.rounds_of.get(label, self.common.rounds or 1)

    def rounds_tuning(self, label: str) -> int:
        return min(self.rounds(label), self.tuning_rounds or self.rounds(label))

    @property
    def tuning_horizon(self) -> int:
        """The rounds over which the accuracy of tuning runs is averaged."""
        return min(self.horizon, self.tuning_rounds or self.horizon)

    def tuning_job(self, label: str, rate: float, seed: int) -> Job:
        return Job(f"{self.name}-tuning-{rate:g}", self._run(label, rate, seed, rounds=self.rounds_tuning(label)))

    def test_job(self, label: str, rate: float, seed: int) -> Job:
        """A run that is reported; that of seed 0 has probes, which change nothing else."""
        probe = self.probe_every if seed == 0 and label != FULL else None
        return Job(self.name, self._run(label, rate, seed, rounds=self.rounds_of.get(label), probe_every=probe))

    def _run(self, label: str, rate: float, seed: int, **own: int | None) -> RunSettings:
        given = {**(self.model_extra or {}), "sampler": label, "local_lr": rate, "seed": seed}
        given |= {key: value for key, value in own.items() if value is not None}
        return make_settings(RunSettings, {key: value for key, value in given.items() if value is not None})


def parts_of(experiment: Experiment, scale: str, **own: Any) -> list[Part]:
    """The parts of a scale; the user's ``own`` settings, such as ``data_dir``, or ``seeds`` (test seeds), win."""
    return [_part(experiment, scale, name, own) for name in experiment.part_names(scale)]


def _part(experiment: Experiment, scale: str, name: str, own: dict[str, Any]) -> Part:
    common, change = dict(experiment.settings), experiment.scales[scale]
    tiers, tier = common.pop("tiers", {}), experiment.parts[name].get("tier")
    if tier not in tiers:
        raise unknown_name("tier", str(tier), tiers)
    merged = {"title": name, **common, **tiers[tier], **experiment.parts[name], **change.settings}
    merged |= change.change.get(name, {}) | own
    listed = tuple(SAMPLERS) if merged["methods"] == "every" else merged["methods"]
    merged["methods"] = tuple(dict.fromkeys([*listed, *merged.pop("more", ())]))
    for label in merged["methods"]:
        parse_label(label)
    return checked(Part, {**merged, "name": name}, f"benchmark, part {name}", "correct its file")


class Score(NamedTuple):
    """How good a rate is on the tuning seeds; less is better."""

    rounds: float
    minus_accuracy: float


#: The score of a method at a rate; None if its runs are not finished.
ScoreOf = Callable[[str, float], Score | None]


class Search(NamedTuple):
    """How far the search for a rate is."""

    rates: tuple[float, ...]  # the grid as it is now, increasing
    finalists: tuple[float, ...]  # what all tuning seeds play; empty while runs of the first seed are missing
    best: float | None = None  # the chosen rate; None while runs of the grid are missing
    edge: Literal["", "low", "high"] = ""  # of the grid, where the chosen rate still is
    score: Score | None = None


def search(part: Part, labels: Sequence[str], score_of: ScoreOf, first_score_of: ScoreOf) -> dict[str, Search]:
    """The search with the finished runs: scores on all tuning seeds, and on the first, which chooses the finalists."""
    grid, up, down = part.rates, part.extensions, part.extensions
    found = {label: Search((), ()) for label in labels}
    while True:
        for label, before in found.items():
            finalists: tuple[float, ...] = grid
            if part.finalists is not None:
                known = _known(grid, partial(first_score_of, label))
                best = sorted(known, key=lambda rate: known[rate])[: part.finalists]
                finalists = tuple(sorted({*before.finalists, *best})) if known else ()
            found[label] = _best(grid, finalists, partial(score_of, label))
        edges = {search.edge for search in found.values()}
        grows_up, grows_down = "high" in edges and up > 0, "low" in edges and down > 0
        if not (grows_up or grows_down):
            return found
        grid = (grid[0] / 2,) * grows_down + grid + (2 * grid[-1],) * grows_up
        up, down = up - grows_up, down - grows_down


def _known(rates: Sequence[float], score_of: Callable[[float], Score | None]) -> dict[float, Score]:
    known = {rate: found for rate in rates if (found := score_of(rate)) is not None}
    return known if len(known) == len(rates) else {}


def _best(grid: tuple[float, ...], finalists: tuple[float, ...], score_of: Callable[[float], Score | None]) -> Search:
    known = _known(finalists, score_of)
    if not known:
        return Search(grid, finalists)
    best = min(finalists, key=lambda rate: known[rate])
    return Search(grid, finalists, best, "high" if best == grid[-1] else "low" if best == grid[0] else "", known[best])
