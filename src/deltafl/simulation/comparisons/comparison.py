"""What a comparison has found: a table, curves and a report, from one folder or several that are
joined.
"""

import io
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from ...analysis import paper
from ...analysis.bands import clients_of
from ...analysis.narrow import console
from ...analysis.numbers import Summary
from ...analysis.plots import draw_curves, draw_plots, small_png
from ...analysis.report import Part, write_report
from ...analysis.runs import Run
from ...analysis.summary import summarise, write_summary
from ...analysis.table import comparison_table
from ...errors import DeltaflError, MissingExtraError, log, printable, unknown_name
from ...samplers.label import parse_label, spelled_among
from ...store import checked
from ...store.files import below, make_folder, with_home, write_with_folder
from ...store.own_python import OwnCodeError, only
from ...tasks.metrics import metric_of
from ...tasks.own import OWN_DEFAULTS, is_own, is_table, short_name
from ...types import AnyPath, Json
from ..folder.continuing import grown
from ..folder.directory import COMPARED, RunDirectory, began_by, recorded_settings
from ..folder.own_code import require_one_code, require_same_model
from ..folder.provenance import environment
from ..folder.record import OF_RUNS, OF_SUMMARY, Job, read_run
from ..settings import (
    FREE_ON_RESUME,
    OF_TABLES,
    UNION,
    CompareSettings,
    RunSettings,
    differing,
)

#: Columns that are left out together where no run has the last of them.
_WHERE_MEASURED = (
    ["client_sd", "worst_tenth", "worst_tenth_sd", "client_mean"],
    ["clock_to_threshold", "clock"],
)
_WHOLE = ("reached", "diverged")

#: The settings of a comparison, and the place and the settings of each of its runs.
_Runs = tuple[CompareSettings, list[tuple[RunDirectory, RunSettings]]]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Finished runs of several samplers; printed, or shown by a notebook, it is their table with
    remarks.

    Attributes:
        folders: Where the runs are recorded.
        numbers: The numbers of the table, as in ``summary.json``.
        curves: One ``analysis.Run`` for each sampler and seed.
    """

    folders: tuple[Path, ...]
    numbers: Summary
    curves: Sequence[Run]

    @property
    def folder(self) -> Path:
        """The folder of the comparison; the first, if several were joined."""
        return self.folders[0]

    def summary(self) -> Any:
        """A pandas table with one row a sampler; intervals are the columns ``_low`` and
        ``_high``.
        """
        import pandas as pd

        metric = self.numbers.metric
        shown = "top5" if self.numbers.judge.share else "final"
        columns = {
            metric: f"{shown}.mean",
            f"{metric}_sd": f"{shown}.sd",
            **OF_SUMMARY,
        }
        entries = pd.json_normalize([entry.model_dump() for entry in self.numbers.samplers])
        table = entries.reindex(columns=[*columns.values()]).set_axis(
            [*columns],
            axis=1,
        )
        for names in _WHERE_MEASURED:
            if table[names[-1]].isna().all():
                table = table.drop(columns=names)
        # Nulls make columns of objects; counts stay whole numbers.
        table = table.astype({column: float for column in table if column not in _WHOLE})
        table.insert(0, "seeds", entries["seeds"].map(len))
        return table.set_index(entries["sampler"])

    def runs(self) -> Any:
        """A pandas table with one row for each sampler, seed and evaluation.

        Seconds, bytes and clock are of all rounds up to there.
        """
        import pandas as pd

        columns = list(OF_RUNS)
        if self.curves[0].clock_r is None:
            columns.remove("clock")
        parts = [
            pd.DataFrame(
                {"sampler": run.sampler, "seed": run.seed}
                | {key: getattr(run, f"{key}_r") for key in columns}
                | dict(run.others_r)
            )
            for run in self.curves
        ]
        return pd.concat(parts, ignore_index=True)

    def clients(self) -> Any:
        """A pandas table with one row for each sampler, seed and client: its name, or number from
        0, its stratum if there are strata, its examples, how often it was drawn, and its value of
        the metric, a mean over the last evaluations (``analysis.Fairness``); NaN where that is
        unknown.
        """
        return clients_of(self.curves)

    def to_csv(self, path: AnyPath | None = None) -> str:
        """The table of a paper as CSV (``analysis/paper.py``): means with 95 % intervals; saved if
        there is a path.
        """
        return _saved(paper.to_csv(self.numbers), path)

    def to_latex(self, path: AnyPath | None = None) -> str:
        """The same as a LaTeX ``tabular``, the best of each column in bold."""
        return _saved(paper.to_latex(self.numbers), path)

    def plot(
        self,
        path: AnyPath | None = None,
        *,
        metric: str | None = None,
        x: str | None = None,
    ) -> Any:
        """A Matplotlib figure of a metric: mean over seeds, and a band from the lowest to the
        highest.

        Args:
            path: Where the figure is saved too: a name that ends in ``.png``, ``.pdf``, ``.svg`` or
                what else Matplotlib writes.
            metric: What is drawn; that of the comparison if left out.
            x: Over what: ``"rounds"``, ``"trainings"`` of clients, ``"bytes"`` sent and received,
                ``"seconds"`` of training, ``"clock"``, the virtual one, or ``"cost"``, by
                ``client_costs``; means over seeds. By default rounds, and the clock beside them
                where there is one.

        Raises:
            DeltaflError: If the metric, or what it is drawn over, was not recorded.
        """
        place = None if path is None else with_home(path)
        first = self.curves[0]
        known = ["accuracy", "loss", *first.others_r]
        drawn = metric or self.numbers.metric
        if drawn not in known:
            raise unknown_name("metric", drawn, known)
        figure = draw_curves(self.curves, self.numbers, drawn, place, x)
        if figure is None:
            raise DeltaflError(f"no run has a finite {drawn}; draw another metric")
        figure._repr_png_ = partial(small_png, figure)  # what a notebook shows
        return figure

    def report(self, path: AnyPath) -> None:
        """Write the page that shows the comparison, with the command that plays it again.

        It is one HTML file, which asks the network for nothing.
        """
        settings = CompareSettings.model_validate(self.numbers.settings)
        name = short_name(settings.task)
        parts = [Part(name, self.curves, self.numbers, command_of(settings))]
        write_report(parts, with_home(path), f"deltafl: {name}")

    def write(self, folder: Path, report: bool = True) -> Summary:
        """Write ``summary.json``, the pictures and ``report.html`` into a folder, and return the
        summary.
        """
        make_folder(folder)
        write_summary(self.numbers, folder / "summary.json")
        try:
            draw_plots(self.curves, self.numbers, folder)
            if report:
                self.report(folder / "report.html")
        # The numbers are worth having without the pictures.
        except MissingExtraError as error:
            log.info(f"no pictures: {error}")
        return self.numbers

    def _repr_html_(self) -> str:
        return self._printed().export_html(
            inline_styles=True,
            code_format="<pre>{code}</pre>",
        )

    def __repr__(self) -> str:
        return (
            f"{self._printed().export_text().rstrip()}\n\nResults: "
            f"{', '.join(map(printable, self.folders))}"
        )

    def _printed(self) -> Console:
        """A console that has printed the table."""
        # Else Rich would show the table in a notebook itself, beside the one that is returned.
        printed = console(
            record=True,
            file=io.StringIO(),
            width=100,
            force_jupyter=False,
        )
        printed.print(comparison_table(self.numbers))
        return printed


def _saved(text: str, path: AnyPath | None) -> str:
    if path is not None:
        write_with_folder(with_home(path), text)
    return text


@only(frozenset())
def command_of(settings: CompareSettings) -> str:
    """The command of a comparison, without the task's defaults, where these are known; empty if it
    needs objects of a Python process.

    Rates of single samplers are in ``config.toml``, beside the summary.
    """
    given = settings.model_dump(
        mode="json",
        exclude_none=True,
        exclude={"rates", *FREE_ON_RESUME},
    )
    of_task = {"task"}
    if is_table(settings.task):
        of_task |= {*OF_TABLES}
    named = of_task | UNION | {"metric"}
    try:
        # What a file defines that nobody has imported here is taken to be there.
        for label in settings.samplers:
            with suppress(OwnCodeError):
                parse_label(label)
        for metric in settings.own_metrics():
            with suppress(OwnCodeError):
                metric_of(metric)
        usual = CompareSettings.model_validate({key: given.get(key) for key in of_task})
        if is_own(settings.task):
            # Its data are not read again: they may be large, or elsewhere by now.
            usual = usual.model_copy(update=OWN_DEFAULTS)
        else:
            usual = usual.resolve()
    except DeltaflError:  # no command can name objects of a Python process
        return ""
    defaults = usual.model_dump(mode="json")
    # The task's threshold is of the task's metric.
    if settings.metric is not None:
        del defaults["threshold"]
    shown = {
        key: value for key, value in given.items() if key in named or value != defaults.get(key)
    }
    # A number of seeds says the same in fewer letters.
    if shown["seeds"] == [*range(len(shown["seeds"]))]:
        shown["seeds"] = len(shown["seeds"])
    words = ["deltafl", "compare"]
    if settings.rates is not None:
        words += ["--config", "config.toml"]
    for key, value in shown.items():
        words.append(f"--{key.replace('_', '-')}")
        if isinstance(value, list):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


@only(frozenset())
def joined(folders: Sequence[Path]) -> Comparison:
    """Join what finished comparisons, or single runs, have recorded; samplers and seeds may differ.

    No code that they name is run.

    Args:
        folders: What ``deltafl compare --out`` and ``deltafl run --out`` have written; a run in two
            counts once.

    Raises:
        DeltaflError: If a folder holds no run, or unfinished ones; if tasks, settings or data
            differ, or two runs of one sampler and seed.
    """
    return together(folders, [_opened(folder) for folder in folders])


def together(folders: Sequence[Path], opened: Sequence[_Runs]) -> Comparison:
    """One comparison of what was opened in several folders."""
    settings = opened[0][0]
    for folder, (other, _) in zip(folders, opened, strict=True):
        for key, first, now in differing(settings, other):
            raise DeltaflError(
                f"{folders[0]} has {key} = {first} and {folder} has {key} = {now}: only runs of "
                "the same task and settings can be joined; leave one of them out"
            )
        if other.threshold != settings.threshold:
            raise DeltaflError(
                f"{folders[0]} has threshold = {settings.threshold} and {folder} has threshold = "
                f"{other.threshold}: give one of them the other's with --resume --threshold, which "
                "plays nothing again"
            )
        settings = grown(settings, other)
    require_one_code(folders)
    # In another folder a method may be spelled otherwise.
    written = spelled_among(settings.samplers)
    found = dict[tuple[str, int], RunDirectory]()
    first_of = dict[int, tuple[Path, Json]]()
    first_with = dict[str, Path]()
    for directory, run in (place for _, places in opened for place in places):
        known = directory.environment()
        place, first_known = first_of.setdefault(run.seed, (directory.path, known))
        if known["data_crc32"] != first_known["data_crc32"]:
            raise DeltaflError(
                f"{directory.path} has other data than another run of seed {run.seed}; leave it "
                "out, and let your make_task(seed) make the same data whenever it is called"
            )
        # Of other seeds, whose split differs.
        if examples := known.get("examples_crc32"):
            first_with.setdefault(examples, directory.path)
        if len(first_with) > 1:
            raise DeltaflError(
                f"{directory.path} has other examples than {next(iter(first_with.values()))}, "
                "whatever the seed: only runs of the same table can be joined; leave it out"
            )
        before, now = (of.get("model", {}) for of in (first_known, known))
        require_same_model(place, before, now, directory.path)
        # Code, settings and data are the same: what one run has recorded, the other has.
        found.setdefault((written(run.sampler), run.seed), directory)
    keys = [
        (sampler, seed)
        for sampler in settings.samplers
        for seed in settings.seeds
        if (sampler, seed) in found
    ]
    names = dict.fromkeys(found[key].environment()["data"] for key in keys)
    runs = [read_run(found[key], settings.run(*key)) for key in keys]
    given = settings.model_dump(mode="json", exclude_none=True)
    recorded = found[keys[0]].environment()
    facts: Json = {**environment(), "data": "; ".join(names)}
    if "clients" in recorded:
        facts["clients"] = recorded["clients"]
    shares = [known["majority"] for _, known in first_of.values() if "majority" in known]
    if shares:
        # Test rows may differ from seed to seed, and accuracies are means over seeds, too.
        facts["majority"] = f"{fmean(map(float, shares)):.4g}"
    checksums = {known["data_crc32"] for _, known in first_of.values()}
    # Told by the data, for it is not only a ``Task``: a function of the user's may ignore its seed.
    if len(checksums) == 1 < len(first_of):
        facts["splits"] = "one for all seeds"
    return Comparison(
        tuple(folders),
        summarise(
            runs,
            settings.threshold,
            settings=given,
            environment=facts,
        ),
        runs,
    )


def _opened(folder: Path) -> _Runs:
    """The settings of a finished comparison, or of a run as a comparison of one, and where its
    runs are.
    """
    recorded = recorded_settings(folder) or {}
    cure = "put it right, or leave the folder out"
    where = f"{folder / 'config.toml'} has impossible settings"
    if "sampler" in recorded:
        command = "run"
        run = checked(RunSettings, recorded, where, cure)
        # ``workers`` is a setting of single runs and changes no result.
        common = run.model_dump(exclude={"sampler", "seed", "workers"})
        settings = CompareSettings(
            **common,
            samplers=(run.sampler,),
            seeds=(run.seed,),
        )
        places = [(RunDirectory(folder), run)]
    elif began_by(recorded) in ("tune", "plan"):
        raise DeltaflError(
            f"{folder} holds runs of deltafl tune or plan, which are no comparison; of deltafl "
            f"tune, name {folder / COMPARED}"
        )
    elif "samplers" in recorded:
        command = "compare"
        settings = checked(CompareSettings, recorded, where, cure)
        places = places_of(folder, jobs_of(settings))
    else:
        raise DeltaflError(
            f"{folder} holds neither a comparison nor a run; name what was --out of one of them"
        )
    for directory, run in places:
        if not directory.is_finished(run.rounds or 0):
            raise DeltaflError(
                f"{directory.path} is not finished; go on with: deltafl {command} --resume --out "
                f"{shlex.quote(str(folder))}"
            )
    return settings, places


def places_of(
    folder: Path,
    jobs: Sequence[Job],
) -> list[tuple[RunDirectory, RunSettings]]:
    """Where the runs of a comparison are, with their settings."""
    return [(RunDirectory(below(folder, "runs", job.key)), job.settings) for job in jobs]


def jobs_of(settings: CompareSettings) -> list[Job]:
    """The runs of a comparison, seed by seed."""
    return [
        Job("", settings.run(sampler, seed))
        for seed in settings.seeds
        for sampler in settings.samplers
    ]
