"""What an experiment is: a TOML file that holds every setting of a table or figure, at three
scales.

::

    title = "Table 2: ..."    claim = "what the paper claims"   order = ["pracdelta", ..., "fedavg"]
    kind = "table"                notes = ["what was decided"]      minutes = {smoke = 1, cpu = 400}

    [settings]               # of every part: those of `deltafl compare`, task and samplers included
    options = {floor = 0.1}         # among them: options of the samplers that have them
    [parts.fashion-mnist]           # what one column or panel changes; its own `title`
    [reported.fashion-mnist]  # the paper's numbers:
    fedavg = {accuracy = 70.35, sd = 0.51, rounds = 426}
    [view]                          # how it is shown (`View`)
    [smoke]  [cpu]  [paper]         # what a scale changes: `parts` (which of them), then settings
    [cpu.change.fashion-mnist]      # what a scale changes in one part

Later ones win: settings, part, scale, the scale's change of the part. A run is (part, sampler,
seed).

``kind`` is a way to show a sweep, one of ``tables.KINDS``, or a module of this package for what is
no sweep: ``toy``, ``rates``, ``limits``, ``benchmark``, ``costs``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from deltafl.analysis import Run
from deltafl.errors import DeltaflError, unknown_name
from deltafl.samplers import find_sampler, parse_label
from deltafl.simulation import CompareSettings, Job, make_settings
from deltafl.store import checked, read_toml

from .probe import Probe

#: Figures of the paper that another experiment shows.
SHOWN_BY = {"figure-3": "toy", "figure-5": "toy"}
_FILES = Path(__file__).parent / "files"
#: Whole sentences of the pages, by page.
TEXTS: dict[str, dict[str, str]] = read_toml(Path(__file__).parent / "texts.toml", users=True)
Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Kind = Literal[
    "table", "curves", "best-accuracies", "probes", "toy", "rates", "limits", "benchmark", "costs"
]


class Frozen(BaseModel):
    """A checked record without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class View(Frozen):
    """How an experiment is shown."""

    baseline: str | None = (
        None  # of speed-ups, a label; by default fedavg, else uniform, else the last of the order
    )
    names: dict[str, str] = {}  # readable names by label, instead of the built-in ones
    rows_of: dict[
        str, str
    ] = {}  # parts that are rows of another part, there with the label ``SAMPLER+PART``
    order_by_part: dict[
        str, tuple[str, ...]
    ] = {}  # the paper's ordering, where it differs from the experiment's
    thresholds: dict[
        str, float
    ] = {}  # by part, instead of those of the settings; parts without one are left out
    #: k of "mean of the k best accuracies within the last 4 % of the rounds", for all parts or by
    #: part.
    best: int | dict[str, int] = 5
    #: What curves show, a row of panels each; the first decides what the verdict compares.
    y: tuple[Literal["accuracy", "loss", "log10-loss"], ...] = ()
    rounds: tuple[int, ...] = (100, 300, 500)  # for best accuracies: up to which rounds
    columns: dict[str, str] = {}  # probe columns by their name for people
    ratio: tuple[str, str] | None = None  # two probe columns whose ratio is tabulated
    bounds: dict[
        str, tuple[float, float]
    ] = {}  # by probe column: the paper claims that it stays between the two
    core: tuple[str, ...] = ()  # labels in the benchmark's pictures, and in any case in its tables
    recommended: str | None = None  # the label that the benchmark's target is about
    remark: str = ""  # what a reader of the benchmark's verdict must know

    def host_of(self, part: str) -> str:
        """The part in whose table the rows of a part stand."""
        return self.rows_of.get(part, part)

    def shows(self, part: str) -> bool:
        return not self.thresholds or self.host_of(part) in self.thresholds

    def best_of(self, part: str) -> int:
        return self.best if isinstance(self.best, int) else self.best.get(part, 5)


class Reported(Frozen):
    """What the paper reports of one method: accuracy and its sd in %, rounds to the threshold,
    seconds.
    """

    accuracy: float | None = None
    sd: float | None = None
    rounds: float | None = None
    seconds: float | None = None


class Change(Frozen):
    """What one scale changes: which parts are run (None for all), settings by part, settings of
    every part.
    """

    parts: tuple[str, ...] | None = None
    change: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}


class Experiment(Frozen):
    """A table or a figure; the module's text describes the file."""

    name: str
    title: str
    claim: str
    short: str = ""  # the claim in at most 25 words, where it has more
    kind: Kind
    own: bool = False  # no claim of the paper but a study of this project
    order: tuple[
        str, ...
    ] = ()  # the paper's of the samplers, best first; ``"a = b"`` for two that it does not order
    notes: tuple[str, ...] = ()  # decisions where the paper is silent
    needs: str = "nothing"  # beside this package
    minutes: dict[Scale, float] = {}  # measured or estimated, on two cores
    runs_of: str | None = None  # another experiment whose runs are shown here in another way
    settings: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    reported: dict[str, dict[str, Reported]] = {}
    view: View = View()
    scales: dict[str, Change]

    def part_names(self, scale: str) -> tuple[str, ...]:
        chosen = self.scales[scale].parts
        return tuple(self.parts) if chosen is None else chosen

    def part_title(self, part: str) -> str:
        return str(self.parts.get(part, {}).get("title", part))

    def comparison(self, part: str, scale: str, **own: Any) -> CompareSettings:
        """The resolved settings of one part at one scale; the user's ``own``, such as ``seeds``,
        win.
        """
        for kind, name, known in (("part", part, self.parts), ("scale", scale, self.scales)):
            if name not in known:
                raise unknown_name(kind, name, known)
        merged = self._merged(part, scale) | own
        other = ("title", "options", "probe_every")
        given = {key: v for key, v in merged.items() if key not in other and v is not None}
        return make_settings(CompareSettings, given)

    def options(self, part: str, scale: str) -> dict[str, Any]:
        """The options of one part's samplers at one scale; each takes those that it has.
        ``options = {}``: none.
        """
        options: dict[str, Any] = self._merged(part, scale)["options"]
        return options

    def probe_every(self, part: str, scale: str) -> int | None:
        """The rounds between two probes of all clients; None for runs without."""
        every: int | None = self._merged(part, scale).get("probe_every")
        return every

    def _merged(self, part: str, scale: str) -> dict[str, Any]:
        change = self.scales[scale]
        merged: dict[str, Any] = {"options": {}}
        for table in (
            self.settings,
            self.parts[part],
            change.settings,
            change.change.get(part, {}),
        ):
            given = table.get("options", merged["options"])
            merged |= {**table, "options": merged["options"] | given if given else {}}
        return merged


@dataclass(frozen=True)
class Sweep:
    """The parts of an experiment at one scale, with their settings."""

    experiment: Experiment
    scale: str
    comparisons: dict[str, CompareSettings]

    def planned(self) -> Iterator[tuple[str, str, int]]:
        """Part, label and seed of all runs, seed by seed, so that an unfinished sweep compares
        samplers fairly.
        """
        for seed in sorted(
            {seed for settings in self.comparisons.values() for seed in settings.seeds}
        ):
            for part, settings in self.comparisons.items():
                if seed in settings.seeds:
                    yield from ((part, sampler, seed) for sampler in settings.samplers)

    def jobs(self) -> Iterator[Job]:
        """All runs, in the order of ``planned``; their labels have the options of their part."""
        for part, sampler, seed in self.planned():
            settings = self.comparisons[part].run(self._with_options(part, sampler), seed)
            every = self.experiment.probe_every(part, self.scale)
            probes = [Probe(every)] if every else []
            yield Job(part, settings, tuple(probes))

    def _with_options(self, part: str, sampler: str) -> str:
        label = parse_label(sampler)
        known = find_sampler(label.name).options
        shared = {
            key: value
            for key, value in self.experiment.options(part, self.scale).items()
            if key in known
        }
        return str(label._replace(options={**shared, **label.options})) if shared else sampler

    def shown(self, run: Run) -> Run:
        """A run under the label of the experiment's file; the options of its part are among its
        settings.
        """
        names = {
            self._with_options(run.part, name): name for name in self.comparisons[run.part].samplers
        }
        settings = {**run.settings, **self.experiment.options(run.part, self.scale)}
        every = self.experiment.probe_every(run.part, self.scale)
        if every is not None:
            settings.setdefault("probe_every", every)  # older records have it themselves
        return run._replace(sampler=names[run.sampler], settings=settings)


@cache
def experiment_names() -> tuple[str, ...]:
    """The names of all experiments: toy and figures first, tables then, by number; the benchmark
    last.
    """
    parts = sorted(path.stem.partition("-") for path in _FILES.glob("*.toml"))
    parts.sort(key=lambda part: (part[0] == "benchmark", part[0] == "table", int(part[2] or 0)))
    return tuple(map("".join, parts))


@cache
def load_experiment(name: str) -> Experiment:
    """Read an experiment's file; a ``DeltaflError`` if there is none, another one shows it, or
    it is wrong.
    """
    if name in SHOWN_BY:
        raise DeltaflError(
            f"{name} is shown by {SHOWN_BY[name]}; write: python -m reproduction {SHOWN_BY[name]}"
        )
    if name not in experiment_names():
        raise unknown_name("experiment", name, experiment_names())
    return parse_experiment(name, read_toml(_FILES / f"{name}.toml", users=True))


def parse_experiment(name: str, content: dict[str, Any]) -> Experiment:
    """An experiment from the content of its file; the scales' remaining keys are settings."""
    content = dict(content)
    scales = {}
    for scale in SCALES:
        table = dict(content.pop(scale, {}))
        own = {key: table.pop(key) for key in ("parts", "change") if key in table}
        scales[scale] = {**own, "settings": table}
    whole = {"name": name, **content, "scales": scales}
    return checked(Experiment, whole, f"experiment {name}", "correct its file")


def is_ours(label: str) -> bool:
    """Whether a method is this project's own."""
    return find_sampler(parse_label(label).name).source == "this project"
