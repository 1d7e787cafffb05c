"""``python -m reproduction``: the paper's tables and figures, one command each."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from deltafl.cli import Out, interruptible, run_app, sweep_progress
from deltafl.errors import DeltaflError
from deltafl.simulation import RunSettings, count_processes, make_settings

from .index import require_index, write_index
from .page import REPORT
from .reproduce import reproduce as run_reproduce
from .running import Request, default_folder
from .spec import experiment_names, load_experiment

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="a table or figure, such as table-2, or all; see --list")
    ] = None,
    scale: Annotated[
        Literal["smoke", "cpu", "paper"], typer.Option(help="minutes, hours, or a GPU")
    ] = "smoke",
    out: Out = None,
    part: Annotated[
        list[str] | None, typer.Option(help="only this part; may be repeated", metavar="NAME")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="number of seeds, instead of its own", min=1)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="runs side by side; all cores, 1 on a GPU", min=1)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="folder with data sets", metavar="DIR")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N, auto", metavar="NAME")
    ] = None,
    only_page: Annotated[
        bool, typer.Option("--only-page", help="run nothing, show what is finished")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="all experiments, what they need, how long they take")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(help="write the index of the pages below DIR", metavar="DIR")
    ] = None,
) -> None:
    """Run one of the paper's tables or figures, and write its page.

    Finished runs are kept and skipped: give the same command again to go on after an interruption.
    "all" runs every experiment, each in its own folder below --out, names those whose data are
    missing, and writes an index.

    Example: python -m reproduction figure-11 --scale smoke
    """
    if list_:
        table = Table(
            "name", "shows", "needs", "minutes on 2 cores", box=None, padding=(0, 2, 0, 0)
        )
        for experiment in map(load_experiment, experiment_names()):
            times = ", ".join(f"{at} {minutes:g}" for at, minutes in experiment.minutes.items())
            source = f" (the runs of {experiment.runs_of})" if experiment.runs_of else ""
            table.add_row(experiment.name, experiment.title, experiment.needs, times + source)
        Console().print(table)
    elif index is not None:
        write_index(index)
        typer.echo(f"Index: {index}/README.md")
    elif name is None:
        raise DeltaflError(
            "which experiment? write for instance: python -m reproduction toy; --list shows all"
        )
    else:
        if device is not None:
            make_settings(
                RunSettings, {"device": device}
            )  # refuses what is no device before anything is written
        count = count_processes(processes, device)
        folder = out or default_folder("" if name == "all" else name, scale)
        request = Request(
            name,
            scale,
            folder,
            tuple(part or ()) or None,
            seeds,
            count,
            data_dir,
            device,
            only_page,
        )
        (_reproduce_all if name == "all" else _reproduce_one)(request)


def _reproduce_one(request: Request) -> None:
    with (
        interruptible(lambda: f"the same command goes on from what is in {request.out}"),
        sweep_progress() as on_progress,
    ):
        page = run_reproduce(request, on_progress)
    # The verdict is what a person waits for; the tables are too wide for a terminal.
    Console().print(Markdown(page.partition("## Verdict\n\n")[2].partition("\n\n")[0]))
    typer.echo(f"Page: {request.out}/README.md, with its tables, pictures and records beside it")
    if (request.out / REPORT).exists():
        typer.echo(f"Open {request.out / REPORT} in a browser.")


def _reproduce_all(request: Request) -> None:
    require_index(request.out)
    for name in experiment_names():
        typer.echo(f"== {name}")
        try:
            _reproduce_one(replace(request, name=name, out=request.out / name))
        except DeltaflError as error:
            typer.echo(f"not run: {error}", err=True)
    write_index(request.out)
    typer.echo(f"Index: {request.out}/README.md")


def main(arguments: list[str] | None = None) -> None:
    run_app(app, arguments, "python -m reproduction")
