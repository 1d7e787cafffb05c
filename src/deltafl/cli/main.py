"""The commands, and how mistakes reach a person: one sentence, exit code 2, no traceback."""

import logging
import sys

import typer
import typer.core

from .. import __version__
from ..errors import DeltaflError, FirstProcessError
from . import audit, catalogue, experiments
from .options import settings_command

typer.core.HAS_RICH = False  # with it, plain help shows a backslash: \[required]
app = typer.Typer(
    name="deltafl",
    help="Client sampling for federated learning: who to ask, and how to weigh the replies.",
    epilog="Start with: deltafl compare",
    no_args_is_help=True,
    suggest_commands=hasattr(typer, "_click"),  # else its parser is click, which does it
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=settings_command("CompareSettings"))(experiments.compare)
app.command(cls=settings_command("TuneSettings"))(experiments.tune)
app.command(cls=settings_command("RunSettings"))(experiments.run)
app.command()(experiments.report)
app.command(cls=settings_command("RunSettings", ("clients", "sample", "weights", "data_dir")))(
    audit.audit
)
app.command(
    epilog="Load it: model.load_state_dict(safetensors.torch.load_file('model.safetensors')), or "
    "of a .pt file: "
    "model.load_state_dict(torch.load('model.pt'))"
)(experiments.export)
app.command()(catalogue.recommend)
app.command()(catalogue.samplers)
app.command()(catalogue.tasks)
app.command()(catalogue.settings)
app.add_typer(catalogue.data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltafl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version"
    ),
) -> None:
    """Client sampling for federated learning: who to ask, and how to weigh the replies."""


def main() -> None:
    """Entry point of the console script."""
    run_app(app)


def run_app(
    command: typer.Typer, arguments: list[str] | None = None, name: str | None = None
) -> None:
    """Run a command line; a ``DeltaflError`` or ``OSError`` becomes one sentence, exit code 2."""
    show_log()
    try:
        command(arguments, prog_name=name)
    except FirstProcessError:
        sys.exit(2)
    except DeltaflError as error:
        typer.echo(f"deltafl: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a missing file, a full disk, a folder without permission
        place = error.filename or "a file"
        typer.echo(
            f"deltafl: {place}: {error.strerror}; check the path, or choose another", err=True
        )
        sys.exit(2)


class _OnceHandler(logging.Handler):
    """Writes each text once; ``typer.echo`` moves a progress bar out of the way."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._shown:
            self._shown.add(text)
            typer.echo(f"deltafl: {text}", err=True)


def show_log() -> None:
    """Show what the library logs, from notes such as the choice of a slower path upwards."""
    logger = logging.getLogger("deltafl")
    logger.setLevel(logging.INFO)
    logger.addHandler(_OnceHandler())
    logger.propagate = False
