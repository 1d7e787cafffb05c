"""``deltafl samplers``, ``deltafl tasks``, ``deltafl data``: what there is, and getting the data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

data = typer.Typer(help="Get and check data sets.", no_args_is_help=True, rich_markup_mode=None)

#: From this many columns on there is room for everything.
WIDE = 100

Where = Annotated[Path | None, typer.Option("--data-dir", help="folder for data sets", metavar="DIR")]


def samplers() -> None:
    """List the samplers, designs and estimators: what they need, whether they are unbiased, where they come from.

    Example: deltafl samplers
    """
    from rich.console import Console

    from ..designs.table import DESIGNS
    from ..estimators.table import ESTIMATORS, REMOTE_ESTIMATORS
    from ..samplers import NEEDS, SAMPLERS

    console = Console()
    headings = ("sampler", "design", "estimator", "unbiased", "needs")
    wide = console.width >= WIDE
    table, sources = _table(*headings, "source") if wide else _table(*headings), _table("sampler", "source")
    for entry in SAMPLERS.values():
        verdict = "yes" if entry.unbiased else "no"
        row = (entry.name, entry.design or "its own", entry.estimator, verdict, entry.needs)
        table.add_row(*row, entry.source) if wide else table.add_row(*row)
        sources.add_row(entry.name, entry.source)
    console.print(table)
    if not wide:
        console.print()
        console.print(sources)
    legend = _table("needs", "what the server must know")
    for word, meaning in NEEDS.items():
        legend.add_row(word, meaning)
    console.print("", legend)
    console.print("\nAnother design or estimator: name@design@estimator, such as fedis@multinomial\n", highlight=False)
    designs = _table("design", "exact", "cohort", "source")
    for design in DESIGNS.values():
        designs.add_row(design.name, "yes" if design.exact else "no", design.kind, design.source or "-")
    console.print(designs, "")
    estimators = _table("estimator", "unbiased", "source")
    for estimator in [*ESTIMATORS.values(), *REMOTE_ESTIMATORS.values()]:
        estimators.add_row(estimator.name, "yes" if estimator.unbiased else "no", estimator.source or "-")
    console.print(estimators, "")
    console.print(
        "With the setting norm_guard none of them is unbiased: it shortens steps that are too long. "
        "The ...-remote estimators are for hosts whose clients keep a memory.",
        highlight=False,
    )


def tasks() -> None:
    """List the tasks and the ways to split their examples over clients.

    Example: deltafl tasks
    """
    from rich.console import Console

    from ..tasks import PARTITIONS, known_tasks

    console = Console()
    table = _table("task", "clients", "asked", "rounds", "partition", "needs")
    for spec in known_tasks().values():
        clients = "all" if spec.all_owners else str(spec.num_clients)
        numbers = (clients, str(spec.sample_size), str(spec.rounds))
        table.add_row(spec.name, *numbers, spec.partition or "its own", ", ".join(spec.needs))
    console.print(table)
    console.print()
    meanings = _table("task", "what is learnt")
    for spec in known_tasks().values():
        meanings.add_row(spec.name, spec.summary)
    console.print(meanings)
    console.print()
    splits = _table("partition", "who holds what")
    for name, partition in PARTITIONS.items():
        splits.add_row(name, partition.summary)
    console.print(splits)
    console.print(
        "\nYour own: --task my_task.py:make_task, or --task table.csv --set label=L --set column=CLIENT",
        highlight=False,
    )


def _table(*headings: str) -> "Table":
    """A plain table whose last column alone may be folded."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1])
    return table


@data.command("fetch")
def fetch_data(name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: Where = None) -> None:
    """Download a data set and compare it with its checksums; what is there already is kept.

    Example: deltafl data fetch fashion-mnist
    """
    from ..tasks import fetch

    files = fetch(name, data_dir)
    typer.echo(f"{name} is in {files[0].parent}")


@data.command("check")
def check_data(name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: Where = None) -> None:
    """Say where a data set's files are and whether they are the right ones; exit code 1 if not.

    Example: deltafl data check mnist --data-dir ~/data
    """
    from ..tasks import check

    statuses = check(name, data_dir)
    for status in statuses:
        typer.echo(f"{status.state:<8} {status.file}  {status.path or ''}".rstrip())
    if any(status.state != "ok" for status in statuses):
        raise typer.Exit(1)
