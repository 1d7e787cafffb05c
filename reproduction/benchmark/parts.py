"""What the benchmark's file says: parts (a task with its settings), tiers of parts, and the runs that follow from them.

::

    [settings]                       # of every part: settings of a run, and those below
    [settings.tiers.core]            # of the parts with tier = "core"
    [parts.fashion-mnist]            # tier, title, and what is its own
    [cpu]  [cpu.change.fashion-mnist]

Later ones win: settings, tier, part, scale, the scale's change of the part. Settings beside those of a run:

- ``methods``: labels, or ``"every"`` for each sampler of ``deltafl samplers``; ``more``: labels beside them;
- ``rates``: the grid of local learning rates, each twice the one before; ``extensions``: how often it may grow a side;
- ``tuning_rounds``: rounds of a run that helps to choose the rate, all of them if left out;
- ``tuning_seeds``: seeds that choose the rate; ``seeds``: how many others, 0, 1, ..., measure;
- ``finalists``: how many rates of a method, the best on the first tuning seed, the other tuning seeds play, too; all of
  them if left out;
- ``rounds_of``: rounds by label, where one needs fewer (full participation is dear);
- ``probe_every``: rounds between two probes of seed 0.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltafl.errors import DeltaflError, unknown_name
from deltafl.samplers import SAMPLERS, parse_label
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.sweep import Job

from ..spec import Experiment

FULL, BASELINE = "full", "uniform"
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    """The merged settings of a part; what is not named here is a setting of the runs."""

    model_config = ConfigDict(extra="allow", frozen=True)

    tier: str
    title: str
    methods: tuple[str, ...] | Literal["every"]
    more: tuple[str, ...] = ()
    rates: tuple[Rate, ...] = Field(min_length=1)
    extensions: Annotated[int, Field(ge=0)] = 3
    tuning_rounds: Count | None = None
    tuning_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    finalists: Count | None = None
    seeds: Count
    rounds_of: dict[str, Count] = {}
    probe_every: Count | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for low, high in zip(self.rates, self.rates[1:], strict=False):
            if abs(high / low - 2) > 1e-9:
                raise ValueError(f"rates are {self.rates}; write each twice the one before")
        clash = [seed for seed in self.tuning_seeds if seed < self.seeds]
        if clash:
            raise ValueError(f"tuning_seeds {clash} are test seeds too; choose others")
        for name in ("sampler", "samplers", "seed", "local_lr"):
            if name in (self.model_extra or {}):
                raise ValueError(f"{name} is no setting of the benchmark; write methods, seeds and rates")
        return self


@dataclass(frozen=True)
class Part:
    """A part of the benchmark at one scale.

    Attributes:
        name: Its name in the file.
        title: Its name for people.
        tier: The tier it belongs to.
        methods: Labels.
        rates: The grid of local learning rates, increasing.
        extensions: How often the grid may grow on each side.
        tuning_rounds: The most rounds of a tuning run; None for those of a test run.
        tuning_seeds: Seeds that choose the rate.
        finalists: How many rates of a method the tuning seeds after the first play; None for all.
        seeds: Test seeds are 0, 1, ..., seeds - 1.
        rounds_of: Rounds by label where they differ from the part's.
        probe_every: Rounds between two probes of test seed 0; None for none.
        settings: The settings of every run.
    """

    name: str
    title: str
    tier: str
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    extensions: int
    tuning_rounds: int | None
    tuning_seeds: tuple[int, ...]
    finalists: int | None
    seeds: int
    rounds_of: dict[str, int]
    probe_every: int | None
    settings: dict[str, Any]

    @cached_property
    def common(self) -> RunSettings:
        """The settings of a run, resolved; its sampler, seed and rate mean nothing."""
        return self._run(BASELINE, self.rates[0], 0)

    @property
    def threshold(self) -> float:
        """What counts as reached."""
        threshold = self.common.threshold
        if threshold is None:
            raise DeltaflError(f"part {self.name} has no threshold, so there are no rounds to count; set one")
        return threshold

    @property
    def horizon(self) -> int:
        """The rounds that all methods play: over these the mean accuracy is taken."""
        return min(
            [self.common.rounds or 1, *(self.rounds_of[name] for name in self.methods if name in self.rounds_of)]
        )

    def rounds(self, label: str) -> int:
        """The rounds that a method plays."""
        return self.rounds_of.get(label, self.common.rounds or 1)

    @property
    def tuning_horizon(self) -> int:
        """The rounds over which tuning runs are averaged."""
        return min(self.horizon, self.tuning_rounds or self.horizon)

    def rounds_tuning(self, label: str) -> int:
        """The rounds that a method plays in a tuning run."""
        return min(self.rounds(label), self.tuning_rounds or self.rounds(label))

    def tuning_job(self, label: str, rate: float, seed: int) -> Job:
        """A run that helps to choose the rate."""
        return Job(f"{self.name}-tuning-{rate:g}", self._run(label, rate, seed, self.rounds_tuning(label)))

    def test_job(self, label: str, rate: float, seed: int) -> Job:
        """A run that is reported; that of seed 0 has probes, which change nothing else."""
        probe = self.probe_every if seed == 0 and label != FULL else None
        return Job(self.name, self._run(label, rate, seed, self.rounds_of.get(label), probe))

    def _run(
        self, label: str, rate: float, seed: int, rounds: int | None = None, probe: int | None = None
    ) -> RunSettings:
        given = {**self.settings, "sampler": label, "local_lr": rate, "seed": seed, "probe_every": probe}
        if rounds is not None:
            given["rounds"] = rounds
        return make_settings(RunSettings, given)


def parts_of(experiment: Experiment, scale: str, **own: Any) -> list[Part]:
    """The parts of a scale.

    Args:
        experiment: The benchmark.
        scale: One of ``spec.SCALES``.
        own: Settings of the user that win, such as ``data_dir``, or ``seeds``, the number of test seeds.

    Raises:
        DeltaflError: If a name is unknown or a setting impossible; one sentence.
    """
    return [_part(experiment, scale, name, own) for name in experiment.part_names(scale)]


def _part(experiment: Experiment, scale: str, name: str, own: dict[str, Any]) -> Part:
    tiers = experiment.settings.get("tiers", {})
    common = {key: value for key, value in experiment.settings.items() if key != "tiers"}
    change = experiment.scales[scale]
    tier = experiment.parts[name].get("tier")
    if tier not in tiers:
        raise unknown_name("tier", str(tier), tiers)
    merged = common | tiers[tier] | experiment.parts[name] | change.settings | change.change.get(name, {}) | own
    try:
        table = _Table.model_validate({"title": name, **merged})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DeltaflError(f"benchmark, part {name}: {where + ': ' if where else ''}{first['msg']}") from None
    listed = tuple(SAMPLERS) if table.methods == "every" else table.methods
    methods = tuple(dict.fromkeys([*listed, *table.more]))
    for label in methods:
        parse_label(label)
    return Part(
        name=name,
        title=table.title,
        tier=table.tier,
        methods=methods,
        rates=table.rates,
        extensions=table.extensions,
        tuning_rounds=table.tuning_rounds,
        tuning_seeds=table.tuning_seeds,
        finalists=table.finalists,
        seeds=table.seeds,
        rounds_of=table.rounds_of,
        probe_every=table.probe_every,
        settings={key: value for key, value in (table.model_extra or {}).items() if value is not None},
    )
