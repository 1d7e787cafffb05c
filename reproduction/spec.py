"""What an experiment is: a TOML file that holds every setting of a table or figure, at three scales.

::

    title = "Table 2: ..."          claim = "what the paper says"     order = ["pracdelta", ..., "fedavg"]
    kind = "table"                  notes = ["what was decided"]      minutes = {smoke = 1, cpu = 400}

    [settings]                      # of every part: those of `deltafl compare`, task and samplers included
    [parts.fashion-mnist]           # what one column or panel changes; its own `title`
    [reported.fashion-mnist]        # the paper's numbers: fedavg = {accuracy = 70.35, sd = 0.51, rounds = 426}
    [smoke]  [cpu]  [paper]         # what a scale changes: `parts` (which of them), then settings
    [cpu.change.fashion-mnist]      # what a scale changes in one part

Later ones win: settings, part, scale, the scale's change of the part. A run is (part, sampler, seed).
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltafl.errors import DeltaflError, unknown_name
from deltafl.simulation.settings import CompareSettings, make_settings
from deltafl.simulation.sweep import Job

SCALES = ("smoke", "cpu", "paper")
#: Figures of the paper that another experiment shows.
SHOWN_BY = {"figure-3": "toy", "figure-5": "toy"}
Scale = Literal["smoke", "cpu", "paper"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reported(_Model):
    """What the paper reports of one method: accuracy and its sd in %, rounds to the threshold, seconds."""

    accuracy: float | None = None
    sd: float | None = None
    rounds: float | None = None
    seconds: float | None = None


class Change(_Model):
    """What one scale changes.

    Attributes:
        parts: The parts that are run; None for all.
        change: Settings by part.
        settings: Settings of every part (the remaining keys of the table).
    """

    parts: tuple[str, ...] | None = None
    change: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}


class Experiment(_Model):
    """A table or a figure; see the module's text for the file.

    Attributes:
        name: The file's name.
        title: What it is.
        claim: What the paper says that it shows, in our words.
        kind: How it is run and shown, see ``kinds.py``.
        order: The paper's ordering of the samplers, best first; ``"a = b"`` for two that it does not order; empty if it
            claims none.
        notes: Decisions where the paper is silent.
        needs: What it needs beside this package, for people.
        minutes: Measured or estimated minutes on two cores, by scale.
        runs_of: Another experiment whose runs are shown here in another way.
        settings: Settings of every part; for kinds that are no sweep, their own settings.
        parts: Settings that differ, by part; ``title`` is its name for people.
        reported: The paper's numbers, by part and sampler.
        view: Settings of the picture, by kind.
        scales: What each scale changes.
    """

    name: str
    title: str
    claim: str
    kind: str
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    needs: str = "nothing"
    minutes: dict[Scale, float] = {}
    runs_of: str | None = None
    settings: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    reported: dict[str, dict[str, Reported]] = {}
    view: dict[str, Any] = Field(default_factory=dict)
    scales: dict[Scale, Change]

    def own_settings(self, scale: str) -> dict[str, Any]:
        """The settings of a kind that is no sweep, at one scale."""
        return {**self.settings, **self.scales[_scale(scale)].settings}

    def part_names(self, scale: str) -> tuple[str, ...]:
        """The parts that a scale runs."""
        chosen = self.scales[_scale(scale)].parts
        for name in chosen or ():
            if name not in self.parts:
                raise unknown_name("part", name, self.parts)
        return tuple(self.parts) if chosen is None else chosen

    def part_title(self, part: str) -> str:
        """The part's name for people."""
        return str(self.parts[part].get("title", part))

    def comparison(self, part: str, scale: str, **own: Any) -> CompareSettings:
        """The resolved settings of one part at one scale.

        Args:
            part: One of ``parts``.
            scale: One of ``SCALES``.
            own: Settings of the user that win, such as ``data_dir`` or ``seeds``.

        Raises:
            DeltaflError: If the part or the scale is unknown, or a setting is impossible.
        """
        if part not in self.parts:
            raise unknown_name("part", part, self.parts)
        change = self.scales[_scale(scale)]
        merged = {**self.settings, **self.parts[part], **change.settings, **change.change.get(part, {}), **own}
        merged.pop("title", None)
        return make_settings(CompareSettings, {key: value for key, value in merged.items() if value is not None})


@dataclass(frozen=True)
class Sweep:
    """The parts of an experiment at one scale that can be run, with their settings, and why others cannot."""

    experiment: Experiment
    scale: str
    comparisons: dict[str, CompareSettings]

    def jobs(self) -> Iterator[Job]:
        """All runs, seed by seed, so that an unfinished sweep compares samplers fairly."""
        for seed in range(max((settings.seeds for settings in self.comparisons.values()), default=0)):
            for part, settings in self.comparisons.items():
                if seed < settings.seeds:
                    yield from (Job(part, settings.run(sampler, seed)) for sampler in settings.samplers)


@cache
def experiment_names() -> tuple[str, ...]:
    """The names of all experiments: toy and figures first, tables then, by number; the benchmark last."""
    names = [file.name.removesuffix(".toml") for file in _files().iterdir() if file.name.endswith(".toml")]

    def place(name: str) -> tuple[bool, bool, int, str]:
        kind, _, number = name.partition("-")
        return kind == "benchmark", kind == "table", int(number or 0), name

    return tuple(sorted(names, key=place))


@cache
def load_experiment(name: str) -> Experiment:
    """Read an experiment's file.

    Raises:
        DeltaflError: If there is none of this name, another one shows it, or its file is wrong.
    """
    if name in SHOWN_BY:
        raise DeltaflError(f"{name} is shown by {SHOWN_BY[name]}; write: deltafl reproduce {SHOWN_BY[name]}")
    if name not in experiment_names():
        raise unknown_name("experiment", name, experiment_names())
    content = tomllib.loads((_files() / f"{name}.toml").read_text(encoding="utf-8"))
    return parse_experiment(name, content)


def parse_experiment(name: str, content: dict[str, Any]) -> Experiment:
    """An experiment from the content of its file; the scales' remaining keys are settings."""
    content = dict(content)
    scales = {}
    for scale in SCALES:
        table = dict(content.pop(scale, {}))
        own = {key: table.pop(key) for key in ("parts", "change") if key in table}
        scales[scale] = {**own, "settings": table}
    try:
        return Experiment.model_validate({"name": name, **content, "scales": scales})
    except ValidationError as error:
        first = error.errors()[0]
        raise DeltaflError(f"experiment {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _files() -> Any:
    return resources.files(__package__) / "files"


def _scale(scale: str) -> Scale:
    for known in SCALES:
        if known == scale:
            return known  # type: ignore[return-value]
    raise unknown_name("scale", scale, SCALES)
