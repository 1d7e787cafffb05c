"""The application: its commands, and how mistakes reach a person (one sentence, exit code 2, no traceback)."""

import sys

import typer

from .. import __version__
from ..errors import DeltaflError, ToldElsewhere
from . import audit, catalogue, experiments, reproduce
from .log import show_log

app = typer.Typer(
    name="deltafl",
    help="Client sampling for federated learning: who to ask, and how to weigh the replies.",
    epilog="Start with: deltafl compare",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(experiments.compare)
app.command()(experiments.run)
app.command()(reproduce.reproduce)
app.command()(audit.audit)
app.command()(catalogue.samplers)
app.command()(catalogue.tasks)
app.add_typer(catalogue.data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltafl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="print the version"),
) -> None:
    """Client sampling for federated learning: who to ask, and how to weigh the replies."""


def main() -> None:
    """Entry point of the console script."""
    show_log()
    try:
        app()
    except ToldElsewhere:
        sys.exit(2)
    except DeltaflError as error:
        typer.echo(f"deltafl: {error}", err=True)
        sys.exit(2)
    except FileNotFoundError as error:
        typer.echo(f"deltafl: {error.filename or 'a file'} is missing; check the path, or make it anew", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder without permission
        typer.echo(
            f"deltafl: {error.filename or 'a file'}: {error.strerror}; choose another place or make room", err=True
        )
        sys.exit(2)
