"""``deltafl compare`` and ``deltafl run``: the long work, with progress, interruption and resumption."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DeltaflError
from . import options as o

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..simulation.engine import Evaluation
    from ..simulation.experiment import OnRound
    from ..simulation.ranks import Ranks
    from ..simulation.settings import CompareSettings, RunSettings

EXIT_INTERRUPTED = 130
#: A run that diverged: not 1 (a check that failed) and not 2 (bad input).
EXIT_DIVERGED = 3


def compare(
    ctx: typer.Context,
    task: o.TaskOption = None,
    samplers: Annotated[str | None, typer.Option(help="labels: name[@design[@estimator]],...", metavar="A,B")] = None,
    clients: o.Clients = None,
    sample: o.Sample = None,
    rounds: o.Rounds = None,
    local_epochs: o.LocalEpochs = None,
    local_steps: o.LocalSteps = None,
    batch_size: o.BatchSize = None,
    local_lr: o.LocalLr = None,
    server_lr: o.ServerLr = None,
    server_optimizer: o.ServerOptimizerOption = None,
    partition: o.PartitionOption = None,
    alpha: o.Alpha = None,
    weights: o.Weights = None,
    floor: o.Floor = None,
    threshold: o.Threshold = None,
    seeds: Annotated[int | None, typer.Option(help="number of seeds", metavar="S")] = None,
    workers: o.WorkersOption = None,
    data_dir: o.DataDir = None,
    set_: o.SetOption = None,
    config: o.Config = None,
    out: o.Out = None,
    resume: o.Resume = False,
) -> None:
    """Compare samplers on one task, seed by seed.

    Example: deltafl compare --task digits --samplers full,uniform,pracdelta --seeds 3
    """
    from ..simulation.ranks import refuse_ranks
    from ..simulation.settings import CompareSettings

    refuse_ranks("compare")
    with o.opened(CompareSettings, ctx.params, "compare") as (settings, folder):
        _compare(settings, folder)


def _compare(settings: "CompareSettings", folder: Path) -> None:
    from rich.console import Console

    from ..analysis.table import comparison_table
    from ..simulation.comparison import run_comparison

    with _interruptible("compare", folder, settings.task), _progress() as progress:
        total = (settings.rounds or 0) * settings.seeds
        bars = {label: progress.add_task(label, total=total, shown="") for label in settings.samplers}

        def on_round(sampler: str, seed: int, done: int, rounds: int, test: "Evaluation") -> None:
            progress.start()
            progress.update(bars[sampler], completed=seed * rounds + done, shown=_shown(test, f"seed {seed}"))

        summary = run_comparison(settings, folder, on_round)
        for bar in bars.values():
            progress.update(bar, completed=total)
    console = Console()
    console.print(comparison_table(summary))
    _tell_refusals(folder)
    _tell_endings(folder)
    console.print(f"\nData: {summary.environment['data']}", highlight=False)
    console.print(f"Results: {folder}/summary.json and the pictures beside it", highlight=False, soft_wrap=True)


def run(
    ctx: typer.Context,
    task: o.TaskOption = None,
    sampler: Annotated[str | None, typer.Option(help="label: name[@design[@estimator]]", metavar="A")] = None,
    clients: o.Clients = None,
    sample: o.Sample = None,
    rounds: o.Rounds = None,
    local_epochs: o.LocalEpochs = None,
    local_steps: o.LocalSteps = None,
    batch_size: o.BatchSize = None,
    local_lr: o.LocalLr = None,
    server_lr: o.ServerLr = None,
    server_optimizer: o.ServerOptimizerOption = None,
    partition: o.PartitionOption = None,
    alpha: o.Alpha = None,
    weights: o.Weights = None,
    floor: o.Floor = None,
    threshold: o.Threshold = None,
    seed: Annotated[int | None, typer.Option(help="fixes everything random", metavar="S")] = None,
    workers: o.WorkersOption = None,
    data_dir: o.DataDir = None,
    set_: o.SetOption = None,
    config: o.Config = None,
    out: o.Out = None,
    resume: o.Resume = False,
) -> None:
    """Run one sampler with one seed; continue it with --resume.

    Exit code 3 if the run diverges: its last checkpoint before that stays in the folder.

    Example: deltafl run --task digits --sampler pracdelta --rounds 100 --out my-run
    """
    from ..simulation.ranks import joined_ranks
    from ..simulation.settings import RunSettings

    with joined_ranks() as ranks, ExitStack() as stack:
        _run(*ranks.from_first(lambda: stack.enter_context(o.opened(RunSettings, ctx.params, "run"))), ranks)


def _run(settings: "RunSettings", folder: Path, ranks: "Ranks") -> None:
    """``deltafl run`` in one of the processes that play it; the first of them does the talking."""
    with _interruptible("run", folder, settings.task), _progress() as progress:
        bar = progress.add_task(settings.sampler, total=settings.rounds, shown="")

        def on_round(done: int, rounds: int, test: "Evaluation") -> None:
            if ranks.first:
                progress.start()
                progress.update(bar, completed=done, shown=_shown(test))

        last = _run_or_diverge(settings, folder, on_round, ranks)
    if ranks.first:
        _tell_refusals(folder)
        accuracy = "" if isnan(last.accuracy) else f"accuracy {last.accuracy:.2%}, "
        typer.echo(f"after {settings.rounds} rounds: {accuracy}loss {last.loss:.4g}; records: {folder}/rounds.jsonl")
        _tell_doubt(folder)
        _tell_bias(settings)
        _tell_data(folder)


def _run_or_diverge(settings: "RunSettings", folder: Path, on_round: "OnRound", ranks: "Ranks") -> "Evaluation":
    """The last evaluation; a run that diverges ends with its sentence and an exit code of its own."""
    from ..simulation.divergence import DivergedError
    from ..simulation.experiment import run_single

    try:
        return run_single(settings, folder, on_round, ranks)
    except DivergedError as error:
        if ranks.first:
            _tell_refusals(folder)
            _tell_data(folder)
            typer.echo(f"deltafl: {error} in {folder}", err=True)
        raise typer.Exit(EXIT_DIVERGED) from None


def _tell_bias(settings: "RunSettings") -> None:
    """Say if the run's method is biased, as the table of a comparison does."""
    from ..analysis.table import bias_remark

    for sentence in bias_remark([settings.sampler], settings.model_dump()):
        typer.echo(sentence)


def _tell_data(folder: Path) -> None:
    """Say which data a run read; one that an older version started does not know it."""
    from ..simulation.records import RunDirectory

    data = RunDirectory(folder).environment().get("data")
    if data is not None:
        typer.echo(f"Data: {data}")


def _tell_endings(folder: Path) -> None:
    """Say which runs of a comparison diverged, or ended in doubt, and why."""
    from ..simulation.records import RunDirectory

    for record in sorted(folder.glob("runs/*/rounds.jsonl")):
        directory = RunDirectory(record.parent)
        said = directory.divergence() or directory.doubt()
        if said is not None:
            typer.echo(f"{record.parent.name} {said}", err=True)


def _tell_doubt(folder: Path) -> None:
    """Say what looked wrong when a run was over, if anything did."""
    from ..simulation.records import RunDirectory

    said = RunDirectory(folder).doubt()
    if said is not None:
        typer.echo(f"deltafl: {said} in {folder}", err=True)


def _tell_refusals(folder: Path) -> None:
    """Say if replies were refused: a client that diverges should not go unnoticed."""
    from ..simulation.experiment import refusals

    refused = refusals(folder)
    if refused:
        run, round, client, reason = refused[0]
        first = f"the first in {run}, round {round}, client {client}: {reason}"
        typer.echo(f"{len(refused)} replies were refused and count as missing, {first}", err=True)


def _shown(test: "Evaluation", prefix: str = "") -> str:
    """The state of a run beside its bar; empty between two evaluations."""
    if isnan(test.loss):
        return prefix
    value = f"loss {test.loss:.4g}" if isnan(test.accuracy) else f"accuracy {test.accuracy:.1%}"
    return f"{prefix} {value}".strip()


@contextmanager
def _progress() -> Iterator["Progress"]:
    """Bars that appear with the first round, so that a mistake is answered by its sentence alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def _interruptible(command: str, folder: Path, task: str) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says how to go on, and errors of a task's own code into one that says where."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: deltafl {command} --resume --out {folder}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (DeltaflError, OSError, typer.Exit):
        raise
    except Exception as error:
        from ..simulation.workers import failure_of
        from ..tasks.own import task_code_error

        failure = failure_of(error)
        sentence = task_code_error(task, failure.said, failure.places)
        if sentence is None:
            raise
        raise sentence from error
