"""The parts of the benchmark, their settings and their runs.

::

    [settings]                       # of every part: settings of a run, and the fields of ``Part``
    [settings.tiers.core]            # of the parts with tier = "core"
    [parts.fashion-mnist]            # tier, title, and what is its own
    [cpu]  [cpu.change.fashion-mnist]

Later ones win: settings, tier, part, scale, the scale's change of the part. ``methods`` are labels,
or ``"every"`` for each sampler of ``deltafl samplers``; ``more`` are labels beside them, and so are
those of ``like``, in which every method is given what the others are given::

    [settings.like.linear]           # named by a part: like = "linear"
    methods = ["uniform", "fedvarp", "full"]
    groups = { bare = "", average = "+average=0.5" }
    instead.average = { full = "full" }  # what a method is in a group

Learning rates are tuned by the library's rule.
"""

from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafl.errors import DeltaflError, unknown_name
from deltafl.samplers import SAMPLERS, parse_label
from deltafl.simulation import FirstGrid, Grid, Job, RunSettings, make_settings
from deltafl.store import checked

from ..probe import Probe
from ..spec import Experiment

FULL = "full"
BASELINE = "uniform"
Count = Annotated[int, Field(ge=1)]


class Like(BaseModel):
    """The same settings for each of several methods."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: dict[str, str]  # name of a group -> the settings of its labels
    words: dict[str, str]  # name of a group -> what it is called on the page
    methods: tuple[str, ...]
    # group -> method -> what stands in its place from this group on, such as with the memory that
    # corrections need
    instead: dict[str, dict[str, str]] = {}
    # labels from uniform draws to full participation, each with one thing more
    ladder: dict[str, str] = {}

    def label(self, method: str, group: str) -> str:
        """The label of a method in a group."""
        given = method
        for name in self.groups:
            given = self.instead.get(name, {}).get(method, given)
            if name == group:
                break
        # A whole label has settings of its own.
        if "+" in given:
            return given
        return given + self.groups[group]

    @property
    def labels(self) -> tuple[str, ...]:
        rows = [self.label(method, group) for group in self.groups for method in self.methods]
        return (*rows, *self.ladder.values())


class Part(BaseModel):
    """A part of the benchmark at one scale; what is not named here is a setting of every run."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    title: str
    tier: str
    methods: tuple[str, ...]
    rates: FirstGrid  # the first grid of local rates
    extensions: Annotated[int, Field(ge=0)] = 3  # how often the grid may grow on each side
    horizon: Count  # the rounds of every run; over them the mean accuracy is taken
    tuning_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    finalists: Count | None = (
        None  # how many rates of a method the tuning seeds after the first play; None for all
    )
    seeds: Count  # test seeds are 0, 1, ..., seeds - 1
    probe_every: Count | None = None  # rounds between two probes of test seed 0; None for none
    tuning_validation: Annotated[float, Field(gt=0, lt=1)] = (
        0.2  # share of training examples that tuning judges by
    )
    needs: str = ""  # why a part is owed; it is played only if it is named
    recommended: str | None = (
        None  # the label that the target is about, where it is not the experiment's
    )
    remark: str = ""  # what a reader of its verdict must know
    like: Like | None = None  # rows in groups, like beside like
    # accuracies whose cost is tabulated; for the experiment ``costs`` alone
    levels: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    chance: Annotated[float, Field(ge=0, lt=1)] = (
        0.1  # accuracy of an untrained model: that of ten classes
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
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
            raise DeltaflError(
                f"part {self.name} has no threshold, so there are no rounds to it; set one"
            )
        return threshold

    @property
    def grid(self) -> Grid:
        return Grid(self.rates, self.extensions, self.tuning_seeds, self.finalists)

    @property
    def common_tuning(self) -> RunSettings:
        """``common`` of the tuning runs."""
        return self.common.model_copy(update={"validation": self.tuning_validation})

    def tuning_job(self, label: str, rate: float, seed: int) -> Job:
        settings = self._run(label, rate, seed, validation=self.tuning_validation)
        return Job(f"{self.name}-tuning-{rate:g}", settings)

    def test_job(self, label: str, rate: float, seed: int) -> Job:
        """A run that is reported; that of seed 0 has probes, which change nothing else."""
        settings = self._run(label, rate, seed)
        if self.probe_every is None or seed != 0 or label == FULL:
            return Job(self.name, settings)
        return Job(self.name, settings, (Probe(self.probe_every),))

    def _run(self, label: str, rate: float, seed: int, **own: float | None) -> RunSettings:
        given = {
            **(self.model_extra or {}),
            "sampler": label,
            "local_lr": rate,
            "seed": seed,
            "rounds": self.horizon,
        }
        given |= own
        return make_settings(
            RunSettings, {key: value for key, value in given.items() if value is not None}
        )


def parts_of(experiment: Experiment, scale: str, **own: Any) -> list[Part]:
    """The parts of a scale; the user's ``own`` settings, such as ``data_dir``, or ``seeds``
    (test seeds), win.
    """
    return [_part(experiment, scale, name, own) for name in experiment.part_names(scale)]


def _part(experiment: Experiment, scale: str, name: str, own: dict[str, Any]) -> Part:
    common = dict(experiment.settings)
    change = experiment.scales[scale]
    tiers = common.pop("tiers", {})
    likes = common.pop("like", {})
    tier = experiment.parts[name].get("tier")
    if tier not in tiers:
        raise unknown_name("tier", str(tier), tiers)
    merged = {"title": name, **common, **tiers[tier], **experiment.parts[name], **change.settings}
    merged |= change.change.get(name, {}) | own
    listed = merged["methods"]
    if listed == "every":
        listed = tuple(SAMPLERS)
    labels = [*listed, *merged.pop("more", ())]
    kind = merged.pop("like", None)
    if kind:
        if kind not in likes:
            raise unknown_name("like", str(kind), likes)
        merged["like"] = checked(Like, likes[kind], f"benchmark, like.{kind}", "correct its file")
        labels += merged["like"].labels
    merged["methods"] = tuple(dict.fromkeys(labels))
    for label in merged["methods"]:
        parse_label(label)
    return checked(Part, {**merged, "name": name}, f"benchmark, part {name}", "correct its file")
