"""``deltafl compare`` and ``deltafl run``: the long work, with progress, interruption and
resumption.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from .. import simulation
from ..analysis.narrow import show
from ..analysis.numbers import Summary
from ..analysis.summary import read_summary
from ..analysis.table import comparison_table
from ..analysis.verdict import bias_remark
from ..errors import DeltaflError, counted, log, printable
from ..server.table import sized_by
from ..simulation.callbacks.callback import OnRound, RoundDone
from ..simulation.callbacks.tracking import TRACKERS, tracker
from ..simulation.comparisons.comparing import require_no_others, run_comparison
from ..simulation.comparisons.comparison import joined
from ..simulation.comparisons.pilot import PlanSettings, play_pilot
from ..simulation.comparisons.tune import (
    NothingLearntError,
    TuneSettings,
    last_comparison,
    tune_rates,
)
from ..simulation.distributed import ProcessGroup, joined_processes, refuse_processes
from ..simulation.folder.directory import (
    COMPARED,
    DivergedError,
    RunDirectory,
    new_folder,
    recorded_settings,
    refusals,
)
from ..simulation.folder.record import judges_of
from ..simulation.parallel.executors import EXECUTORS, named_executor
from ..simulation.parallel.sweep import count_processes
from ..simulation.settings import CompareSettings, RunSettings, Settings
from ..simulation.view.progress import OnProgress, Progress, sweep_progress
from ..store.files import below
from ..store.own_python import files_named
from ..types import ACCURACY, LOSS, Judge
from . import catalogue
from . import options as o
from .common import Out, interruptible, path_name, say
from .own_code import own_code_explained

Processes = Annotated[
    int | None,
    typer.Option(
        help="runs side by side; as many as cores, 1 on a GPU",
        metavar="P",
        min=1,
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        help=f"write each round to a tracker, too: {' or '.join(TRACKERS)}",
        metavar="NAME",
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        help=f"play the runs on other machines: {' or '.join(EXECUTORS)}, such as "
        "dask:HOST:8786 or slurm:partition=cpu (docs/how-to/cluster.md)",
        metavar="NAME[:WHERE]",
    ),
]
app = typer.Typer(rich_markup_mode=None)
NoReport = Annotated[bool, typer.Option("--no-report", help="leave out report.html")]
#: A run that diverged: not 1 (a check that failed) and not 2 (bad input).
EXIT_DIVERGED = 3


@app.command(cls=o.settings_command(CompareSettings))
def compare(
    ctx: typer.Context,
    processes: Processes = None,
    executor: ExecutorName = None,
    track: Track = None,
    no_report: NoReport = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare samplers on one task, seed by seed.

    It prints a table, and writes numbers, pictures and report.html into --out. The same --out with
    more samplers, seeds or rounds runs what is missing. Exit code 3 if a run diverges.

    Example: deltafl compare --task digits --samplers full,census,uniform --seeds 3
    """
    # Before anything is read: torchrun would play several comparisons in one folder.
    refuse_processes("compare")
    settings, folder = o.begun(CompareSettings, ctx)
    count = count_processes(processes, settings.device)
    playing = nullcontext() if executor is None else named_executor(executor, folder)
    with _explained("compare", folder, settings):
        with (
            playing as workers,
            _tracked(track, folder) as on_round,
            _progress(quiet) as on_progress,
        ):
            found = run_comparison(
                settings,
                folder,
                on_progress,
                count,
                on_round,
                not no_report,
                ctx.obj.trust_code,
                workers,
            )
        _print_summary(found.numbers, [folder], folder, quiet)


@app.command(cls=o.settings_command(TuneSettings))
def tune(
    ctx: typer.Context,
    processes: Processes = None,
    no_report: NoReport = False,
    quiet: o.Quiet = False,
) -> None:
    """Find each sampler's learning rates on seeds and examples kept for it, then compare with them.

    The comparison is in the folder 'comparison' of --out, the rates are in 'rates.toml', for
    --config. Exit code 3 if nothing was learnt with the best rates, or a run diverged.

    Example: deltafl tune --task digits --samplers full,census,uniform --local-rates 0.4,0.8,1.6
    --out tuned
    """
    refuse_processes("tune")
    settings, folder = o.begun(TuneSettings, ctx)
    count = count_processes(processes, settings.device)
    with _explained("tune", folder, settings):
        try:
            with _progress(quiet) as on_progress:
                tuned = tune_rates(settings, folder, on_progress, count, ctx.obj.trust_code)
        except NothingLearntError as error:
            say(f"deltafl: {error}", error=True)
            raise typer.Exit(EXIT_DIVERGED) from None
        # Between two bars, which would be drawn over it.
        for name, searches in tuned.searches.items():
            for label, search in searches.items():
                edge = f", at the {search.edge} edge of its grid" if search.edge else ""
                if not quiet:
                    say(f"{label}: {name} = {search.best:g}{edge}")
        with _progress(quiet) as on_progress:
            beside = below(folder, COMPARED)
            last = last_comparison(settings, tuned, beside)
            found = run_comparison(
                last,
                beside,
                on_progress,
                count,
                report=not no_report,
                trust_code=ctx.obj.trust_code,
            )
        _print_summary(found.numbers, [beside], beside, quiet)


_OF_PLANS = ("goal", "cost", "budget", "cohorts")
_PlanCommand: Any = o.settings_command(
    PlanSettings,
    # n is what a plan finds, and a threshold is its goal.
    [*dict.fromkeys((*_OF_PLANS, *PlanSettings.model_fields.keys() - {"sample", "threshold"}))],
)


class PlanCommand(_PlanCommand):  # type: ignore[misc]
    """With no options but those of ``deltafl recommend`` it is that: the first screen of a plan."""

    def make_context(
        self,
        info_name: str,
        args: list[str],
        parent: Any = None,
        **more: Any,
    ) -> Any:
        """The context of a plan, or of a recommendation."""
        first_screen: Any = typer.main.get_group(catalogue.app).commands["recommend"]
        known = {flag for one in first_screen.params for flag in (*one.opts, *one.secondary_opts)}
        given = {arg.partition("=")[0] for arg in args if arg.startswith("-")}
        if given <= known:
            return first_screen.make_context(info_name, args, parent, **more)
        return super().make_context(info_name, args, parent, **more)


@app.command(cls=PlanCommand)
def plan(
    ctx: typer.Context,
    processes: Processes = None,
    quiet: o.Quiet = False,
) -> None:
    """Plan a federation: which method, how many clients, how many rounds, at what cost; from a
    pilot of short runs on your task.

    With no options, or those of deltafl recommend alone, it is that. With --resume another --goal
    or --cost plays only what is missing in --out.

    Example: deltafl plan --task digits --goal 0.85 --cost training=1,round=5
    """
    refuse_processes("plan")
    settings, folder = o.begun(PlanSettings, ctx)
    count = count_processes(processes, settings.device)
    with _explained("plan", folder, settings):
        with _progress(quiet) as on_progress:
            advice = play_pilot(settings, folder, on_progress, count, ctx.obj.trust_code)
        if quiet:
            say(str(folder))
        else:
            say(*str(advice).splitlines(), "", f"Results: {folder}/forecasts.csv and errors.csv")


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="what deltafl compare or run wrote",
            metavar="DIR...",
            parser=path_name,
        ),
    ],
    out: Out = None,
    no_report: NoReport = False,
    quiet: o.Quiet = False,
) -> None:
    """Join finished folders of the same task and settings: their table, summary.json, pictures and
    report.html.

    Samplers and seeds may differ. Exit code 3 if a run diverged.

    Example: deltafl report my-results more-results --out both
    """
    if out is not None:
        _require_free(out)
    together = joined(folders)
    folder = out or new_folder("report", str(together.numbers.settings["task"]))
    _print_summary(together.write(folder, not no_report), folders, folder, quiet)


def _require_free(folder: Path) -> None:
    """Refuse a folder in which a report would replace what is none."""
    # Their own summary would be replaced.
    if recorded_settings(folder) is not None:
        raise DeltaflError(f"{folder} holds runs of its own; choose another --out for the report")
    for place in Path(os.path.realpath(folder)).parents:
        # A folder there would count as a run. Your own ``config.toml`` may be beside your ``runs``.
        beside = ("config.toml", "environment.json")
        if place.name == "runs" and all((place.parent / name).exists() for name in beside):
            raise DeltaflError(
                f"{folder} is among the runs of {place.parent}; choose another --out for the report"
            )
    with suppress(DeltaflError):
        read_summary(folder / "summary.json")
        return  # a report may be made again
    require_no_others(folder)


def _progress(quiet: bool) -> AbstractContextManager[OnProgress]:
    """How far the work is; nothing, and no notes of the library either, if ``quiet``."""
    if quiet:
        log.setLevel("WARNING")
    return sweep_progress(not quiet)


def _print_summary(
    summary: Summary,
    folders: list[Path],
    written: Path,
    quiet: bool,
) -> None:
    """Print the table, and how runs in the folders ended; exit code 3 if one diverged."""
    if quiet:
        say(str(written))
    else:
        _print_table(summary, folders, written)
    if any(entry.num_diverged for entry in summary.samplers):
        raise typer.Exit(EXIT_DIVERGED)


def _print_table(summary: Summary, folders: list[Path], written: Path) -> None:
    show(comparison_table(summary))
    for folder in folders:
        # The folder of one run, and those of a comparison's.
        for record in [
            *folder.glob("rounds.jsonl"),
            *sorted(folder.glob("runs/*/rounds.jsonl")),
        ]:
            _print_ending(record.parent, f"{record.parent.name} ")
    setting = summary.settings
    clients = f"{counted(setting['clients'], 'client')}, " if "clients" in setting else ""
    selected = f"{setting['sample']} selected per round"
    if (sizing := sized_by(setting)) is not None:
        selected = f"{setting['sample']} selected at first, then by {sizing}"
    about = f"{clients}{selected}, {counted(setting['rounds'], 'round')}"
    say("")
    say(f"Data: {summary.environment['data']}; {about}")
    beside = " and the pictures beside it" if any(written.glob("*.png")) else ""
    say(f"Results: {written}/summary.json{beside}")
    if (written / "report.html").exists():
        say(f"Open {written}/report.html in a browser.")


@app.command(cls=o.settings_command(RunSettings))
def run(
    ctx: typer.Context,
    track: Track = None,
    quiet: o.Quiet = False,
) -> None:
    """Run one sampler with one seed; --resume continues it, perhaps with more --rounds.

    It prints the accuracy, and writes rounds.jsonl, a line for each round, and checkpoints into
    --out. Exit code 3 if the run diverges: its last checkpoint before that stays.

    Example: deltafl run --task digits --sampler pracdelta --rounds 100 --out my-run
    """
    # In every process, as each of them reads the run's files.
    ctx.obj = o.placed(ctx)
    # One process names the folder: its name has the time, which differs between them.
    with joined_processes() as group:
        settings, folder = group.from_first(lambda: o.begun(RunSettings, ctx))
        # Each round is written once, whoever plays it.
        with (
            _explained("run", folder, settings),
            _tracked(track if group.is_first else None, folder) as on_round,
        ):
            _play(settings, folder, group, on_round, quiet)


def _play(
    settings: RunSettings,
    folder: Path,
    group: ProcessGroup,
    track: OnRound,
    quiet: bool,
) -> None:
    """``deltafl run`` in one of the processes that play it; only the first of them prints."""
    with _progress(quiet or not group.is_first) as on_progress:
        judges = list[Judge]()

        def on_round(done: RoundDone) -> None:
            track(done)
            if not judges:
                judges.extend(judges_of(RunDirectory(folder)))
            value = next(iter(_metric_texts(done.test, judges)), "")
            on_progress(Progress(done.round, done.rounds, 0, 1, (value,)))

        diverged = False
        try:
            simulation.run_single(settings, folder, on_round, group)
        except DivergedError:
            diverged = True
    if group.is_first and quiet:
        say(str(folder))
    elif group.is_first:
        _print_run(settings, RunDirectory(folder))
    # Last, when the bar is gone and the result is printed.
    if diverged:
        raise typer.Exit(EXIT_DIVERGED)


def _metric_texts(test: Mapping[str, float | None], judges: Sequence[Judge]) -> list[str]:
    """The metrics of a line of ``rounds.jsonl``, the one that counts first."""
    known = {judge.name: judge for judge in (*judges, ACCURACY, LOSS)}
    shown = [judge for name, judge in known.items() if name in test]
    if test.get("accuracy") is None:
        shown = [judge for judge in shown if judge != ACCURACY]
    return [f"{judge.heading} {judge.text(test[judge.name])}" for judge in shown]


def _print_run(settings: RunSettings, directory: RunDirectory) -> None:
    """Print the result of a run, and how it ended."""
    folder = directory.path
    last = directory.last_line()
    _print_refusals(folder)
    if "diverged" not in last:
        metrics = _metric_texts(last["test"], judges_of(directory))
        after = f"after {counted(last['round'], 'round')}"
        say(f"{after}: {', '.join(metrics)}; records: {folder}/rounds.jsonl")
        if "stopped" in last:
            why = printable(last["stopped"])
            say(f"stopped in round {last['round']} of {settings.rounds}: {why}; it does not go on")
        for remark in bias_remark([settings.sampler], settings.model_dump()):
            say(remark)
    say(f"Data: {directory.environment()['data']}")
    _print_ending(folder, "deltafl: ")


@app.command(
    epilog="Load it: model.load_state_dict(safetensors.torch.load_file('model.safetensors')), or "
    "of a .pt file: model.load_state_dict(torch.load('model.pt'))"
)
def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="folder of a run, or DIR/runs/RUN of a comparison",
            parser=path_name,
        ),
    ],
    to: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="model.safetensors or model.pt",
            parser=path_name,
        ),
    ],
    trust_code: o.TrustCode = False,
) -> None:
    """Write the model of a run's last checkpoint as a state dict for PyTorch.

    Example: deltafl export my-run --to model.safetensors
    """
    round = simulation.export_model(folder, to, trust_code)
    say(f"the model after round {round} of {folder} is in {to}")
    _print_ending(folder, "deltafl: the run ")


def _print_ending(folder: Path, name: str) -> None:
    """Print how a run ended, if it diverged or looked wrong when it was over."""
    ending = RunDirectory(folder).ending()
    if ending is not None:
        say(f"{name}{ending} in {folder}", error=True)


def _print_refusals(folder: Path) -> None:
    """Print if replies were refused: a client that diverges should not go unnoticed."""
    refused = refusals(folder)
    if refused:
        round, client, reason, _ = refused[0]
        lost = len({round for round, *_, all_refused in refused if all_refused})
        first = f"the first in {folder.name}, round {round}, client {client}: {reason}"
        rounds = f"; in {counted(lost, 'round')} all were, and nothing was learnt" if lost else ""
        count = counted(len(refused), "reply was", "replies were")
        say(f"{count} refused and treated as missing, {first}{rounds}", error=True)


def _tracked(name: str | None, folder: Path) -> AbstractContextManager[OnRound]:
    """The tracker that was asked for, or an ``on_round`` that does nothing."""
    if name is None:
        return nullcontext(lambda _: None)
    return tracker(name, folder)


@contextmanager
def _explained(command: str, folder: Path, settings: Settings) -> Iterator[None]:
    """Explain Ctrl-C, and errors of the user's own code, in one sentence each."""
    task = settings.task
    labels = settings.labels()

    # Asked when it happens: until then nothing may be recorded.
    def how_to_go_on() -> str:
        recorded = recorded_settings(folder)
        if recorded is None:
            return "nothing was recorded yet: give the same command again"
        # More rounds, for instance, that are asked for and not noted yet.
        if recorded != settings.model_dump(mode="json", exclude_none=True):
            return "give the same command again"
        trust = " --trust-code" if files_named([task, *labels]) else ""
        return f"go on with: deltafl {command} --resume --out {quote(str(folder))}{trust}"

    with own_code_explained(task, labels), interruptible(how_to_go_on):
        yield
