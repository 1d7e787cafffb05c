"""What an experiment is: a TOML file that holds every setting of a table or figure, at three scales.

::

    title = "Table 2: ..."          claim = "what the paper claims"   order = ["pracdelta", ..., "fedavg"]
    kind = "table"                  notes = ["what was decided"]      minutes = {smoke = 1, cpu = 400}

    [settings]                      # of every part: those of `deltafl compare`, task and samplers included
    options = {floor = 0.1}         # among them: options of the samplers that have them
    [parts.fashion-mnist]           # what one column or panel changes; its own `title`
    [reported.fashion-mnist]        # the paper's numbers: fedavg = {accuracy = 70.35, sd = 0.51, rounds = 426}
    [view]                          # how it is shown (`View`)
    [smoke]  [cpu]  [paper]         # what a scale changes: `parts` (which of them), then settings
    [cpu.change.fashion-mnist]      # what a scale changes in one part

Later ones win: settings, part, scale, the scale's change of the part. A run is (part, sampler, seed).

``kind`` is a way to show a sweep, one of ``tables.SHOW``, or a module of this package for what is no sweep: ``toy``,
``rates``, ``limits``, ``benchmark``.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deltafl.analysis import Run
from deltafl.errors import DeltaflError, unknown_name
from deltafl.samplers import find_sampler, parse_label
from deltafl.simulation import CompareSettings, Job, make_settings

SCALES = ("smoke", "cpu", "paper")
#: Figures of the paper that another experiment shows.
SHOWN_BY = {"figure-3": "toy", "figure-5": "toy"}
Scale = Literal["smoke", "cpu", "paper"]
Kind = Literal["table", "curves", "best-accuracies", "probes", "toy", "rates", "limits", "benchmark"]
Y = Literal["accuracy", "loss", "log10-loss"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class View(_Model):
    """How an experiment is shown.

    Attributes:
        baseline: Label that speed-ups compare with; by default fedavg, else uniform, else the last of the order.
        names: Readable names by label, instead of the built-in ones.
        rows_of: Parts whose runs are rows of another part: variants of a setting. There a run's label is
            ``SAMPLER+PART``; orders, baselines, names and reported numbers may use it.
        order_by_part: The paper's ordering where it differs from the experiment's, by part.
        thresholds: Thresholds by part, instead of those of the settings; parts without one are left out.
        best: k of "mean of the k best accuracies within the last 4 % of the rounds", for all parts or by part.
        y: What curves show, a row of panels each; the first decides what the verdict compares.
        rounds: For best accuracies: up to which rounds.
        columns: Probe columns by their name for people.
        ratio: Two probe columns whose ratio is tabulated.
        bounds: By probe column, the two numbers between which the paper claims that it stays.
        core: Labels in the benchmark's pictures.
    """

    baseline: str | None = None
    names: dict[str, str] = {}
    rows_of: dict[str, str] = {}
    order_by_part: dict[str, tuple[str, ...]] = {}
    thresholds: dict[str, float] = {}
    best: int | dict[str, int] = 5
    y: tuple[Y, ...] = ()
    rounds: tuple[int, ...] = (100, 300, 500)
    columns: dict[str, str] = {}
    ratio: tuple[str, str] | None = None
    bounds: dict[str, tuple[float, float]] = {}
    core: tuple[str, ...] = ()

    def best_of(self, part: str) -> int:
        """The k of a part's accuracy."""
        return self.best if isinstance(self.best, int) else self.best.get(part, 5)


class Reported(_Model):
    """What the paper reports of one method: accuracy and its sd in %, rounds to the threshold, seconds."""

    accuracy: float | None = None
    sd: float | None = None
    rounds: float | None = None
    seconds: float | None = None


class Change(_Model):
    """What one scale changes: which parts are run (None for all), settings by part, settings of every part."""

    parts: tuple[str, ...] | None = None
    change: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}


class Experiment(_Model):
    """A table or a figure; see the module's text for the file.

    Attributes:
        name: The file's name.
        title: What it is.
        claim: What the paper claims, in our words.
        kind: How it is run and shown.
        order: The paper's ordering of the samplers, best first; ``"a = b"`` for two that it does not order; empty if it
            claims none.
        notes: Decisions where the paper is silent.
        needs: What it needs beside this package, for people.
        minutes: Measured or estimated minutes on two cores, by scale.
        runs_of: Another experiment whose runs are shown here in another way.
        settings: Settings of every part; for kinds that are no sweep, their own settings.
        parts: Settings that differ, by part; ``title`` is its name for people.
        reported: The paper's numbers, by part and sampler.
        view: How it is shown.
        scales: What each scale changes.
    """

    name: str
    title: str
    claim: str
    kind: Kind
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    needs: str = "nothing"
    minutes: dict[Scale, float] = {}
    runs_of: str | None = None
    settings: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    reported: dict[str, dict[str, Reported]] = {}
    view: View = View()
    scales: dict[str, Change]

    def own_settings(self, scale: str) -> dict[str, Any]:
        """The settings of a kind that is no sweep, at one scale."""
        return {**self.settings, **self.scales[scale].settings}

    def part_names(self, scale: str) -> tuple[str, ...]:
        """The parts that a scale runs."""
        chosen = self.scales[scale].parts
        return tuple(self.parts) if chosen is None else chosen

    def part_title(self, part: str) -> str:
        """The part's name for people."""
        return str(self.parts.get(part, {}).get("title", part))

    def comparison(self, part: str, scale: str, **own: Any) -> CompareSettings:
        """The resolved settings of one part at one scale.

        Args:
            part: One of ``parts``.
            scale: One of ``SCALES``.
            own: Settings of the user that win, such as ``data_dir`` or ``seeds``.

        Raises:
            DeltaflError: If the part or the scale is unknown, or a setting is impossible.
        """
        for kind, name, known in (("part", part, self.parts), ("scale", scale, self.scales)):
            if name not in known:
                raise unknown_name(kind, name, known)
        merged: dict[str, Any] = {}
        for table in (*self._tables(part, scale), own):
            merged |= {key: value for key, value in table.items() if key not in ("title", "options")}
        return make_settings(CompareSettings, {key: value for key, value in merged.items() if value is not None})

    def options(self, part: str, scale: str) -> dict[str, Any]:
        """The options of one part's samplers at one scale; each sampler takes those that it has."""
        merged: dict[str, Any] = {}
        for table in self._tables(part, scale):
            merged |= table.get("options", {})
        return merged

    def _tables(self, part: str, scale: str) -> tuple[dict[str, Any], ...]:
        change = self.scales[scale]
        return self.settings, self.parts[part], change.settings, change.change.get(part, {})


@dataclass(frozen=True)
class Sweep:
    """The parts of an experiment at one scale, with their settings."""

    experiment: Experiment
    scale: str
    comparisons: dict[str, CompareSettings]

    def planned(self) -> Iterator[tuple[str, str, int]]:
        """Part, label and seed of all runs, seed by seed, so that an unfinished sweep compares samplers fairly."""
        for seed in range(max((settings.seeds for settings in self.comparisons.values()), default=0)):
            for part, settings in self.comparisons.items():
                if seed < settings.seeds:
                    yield from ((part, sampler, seed) for sampler in settings.samplers)

    def jobs(self) -> Iterator[Job]:
        """All runs, in the order of ``planned``; their labels have the options of their part."""
        for part, sampler, seed in self.planned():
            yield Job(part, self.comparisons[part].run(self._with_options(part, sampler), seed))

    def _with_options(self, part: str, sampler: str) -> str:
        label = parse_label(sampler)
        known = find_sampler(label.name).options
        shared = {key: value for key, value in self.experiment.options(part, self.scale).items() if key in known}
        return str(label._replace(options={**shared, **label.options})) if shared else sampler

    def shown(self, run: Run) -> Run:
        """A run under the label of the experiment's file; the options of its part are among its settings."""
        names = {self._with_options(run.part, name): name for name in self.comparisons[run.part].samplers}
        options = self.experiment.options(run.part, self.scale)
        return run._replace(sampler=names[run.sampler], settings={**run.settings, **options})


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
        raise DeltaflError(f"{name} is shown by {SHOWN_BY[name]}; write: python -m reproduction {SHOWN_BY[name]}")
    if name not in experiment_names():
        raise unknown_name("experiment", name, experiment_names())
    return parse_experiment(name, tomllib.loads((_files() / f"{name}.toml").read_text(encoding="utf-8")))


def parse_experiment(name: str, content: dict[str, Any]) -> Experiment:
    """An experiment from the content of its file; the scales' remaining keys are settings."""
    content, scales = dict(content), {}
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
