"""The commands, and how mistakes reach a person: one sentence, exit code 2, no traceback."""

import io
import logging
import os
import signal
import sys
from importlib import import_module
from typing import Any

import typer
import typer.core

from ..errors import DeltaflError, FirstProcessError, log, printable
from .common import EXIT_INTERRUPTED, interruptible, say

#: The commands: the module that has each, and its line in ``deltafl --help``.
COMMANDS = {
    "compare": ("experiments", "Compare samplers on one task, seed by seed."),
    "tune": ("experiments", "Find each sampler's learning rates, then compare with them."),
    "run": ("experiments", "Run one sampler with one seed, or continue a run."),
    "report": ("experiments", "Join finished folders of the same task and settings."),
    "audit": ("audit", "Check which methods are unbiased, and how good they are."),
    "watch": ("watch", "Watch a run or a federation while it goes on."),
    "export": ("experiments", "Write a run's model as a state dict for PyTorch."),
    "plan": ("experiments", "Which method, how many clients, at what cost: from a pilot."),
    "recommend": ("catalogue", "Recommend a sampler for your federation."),
    "samplers": ("catalogue", "List the samplers, designs and estimators."),
    "tasks": ("catalogue", "List the tasks and the ways to split their examples."),
    "settings": ("catalogue", "List the settings of run and compare."),
    "data": ("catalogue", "Get and check data sets."),
    "info": ("info", "Print versions, hardware and settings, for a report of a fault."),
}


_AGAIN = "give the same command again"


class LazyGroup(typer.core.TyperGroup):
    """Commands whose modules are imported when they are used: ``deltafl --help`` loads no NumPy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # the parser lists their names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        commands = typer.main.get_group(import_module(f"deltafl.cli.{module}").app).commands
        return commands[cmd_name]

    def invoke(self, ctx: Any) -> Any:
        """Run a command; those that keep nothing half done are given again after Ctrl-C."""
        with interruptible(lambda: _AGAIN):
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in the help, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


typer.core.HAS_RICH = False  # with it, plain help shows a backslash: \[required]
app = typer.Typer(
    name="deltafl",
    cls=LazyGroup,
    help="Client sampling for federated learning: who to ask, and how to weigh the replies.",
    invoke_without_command=True,
    suggest_commands=hasattr(typer, "_click"),  # else its parser is click, which does it
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"deltafl {import_module('deltafl').__version__}")
        raise typer.Exit


#: What the parser raises: of click, or of the parser that newer versions of Typer bring.
_UsageError: Any = typer.BadParameter.__mro__[1]

#: What ``deltafl`` alone prints.
_BEGIN = """Client sampling for federated learning: who to ask, and how to weigh the replies.

Begin with one of these:
  deltafl compare     seven samplers on an embedded data set, half a minute
  deltafl compare --task table.csv --label LABEL --column CLIENT
                      on your own table
  deltafl recommend   which sampler fits your federation; it asks
  deltafl plan --task table.csv --label LABEL --column CLIENT --goal 0.9
                      how many clients, which method, at what cost

All commands: deltafl --help"""


@app.callback()
def _options(
    ctx: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="print the version",
    ),
) -> None:
    """Client sampling for federated learning: who to ask, and how to weigh the replies."""
    if ctx.invoked_subcommand is None:
        say(*_BEGIN.splitlines())


def main() -> None:
    """Entry point of the console script."""
    try:
        run_app(app)
    except KeyboardInterrupt:  # before a command begins
        say(f"interrupted; {_AGAIN}", error=True)
        sys.exit(EXIT_INTERRUPTED)
    finally:
        # The work is over, and Python would show where in its own end it was; another thread may
        # still keep it from ending.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


def run_app(
    command: typer.Typer,
    arguments: list[str] | None = None,
    name: str | None = None,
) -> None:
    """Run a command line; a ``DeltaflError`` or ``OSError`` becomes one sentence, exit code 2."""
    show_log()
    # A terminal may not know the letters of a name.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(command(arguments, prog_name=name, standalone_mode=False))
    except typer.Abort:  # a question without an answer
        say("Aborted!", error=True)
        sys.exit(1)
    except _UsageError as error:
        error.message = printable(error.message)
        error.show()
        sys.exit(error.exit_code)
    # The first process prints the reason, once.
    except FirstProcessError:
        sys.exit(2)
    except DeltaflError as error:
        say(f"deltafl: {error}", error=True)
        sys.exit(2)
    except OSError as error:  # a missing file, a full disk, a folder without permission
        place = printable(error.filename, limit=4000)  # too long, perhaps
        text = f"{place}: {error.strerror}; check the path, or choose another"
        if error.filename is None:  # such as the output itself
            text = f"cannot write: {error.strerror or error}; what is recorded stays"
        say(f"deltafl: {text}", error=True)
        sys.exit(2)


class _OnceHandler(logging.Handler):
    """Writes each text once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._shown:
            self._shown.add(text)
            say(f"deltafl: {text}", error=True)


def show_log() -> None:
    """Show what the library logs, from notes such as the choice of a slower path upwards."""
    log.setLevel(logging.INFO)
    # That of an earlier command of this process would say each text twice.
    for handler in [each for each in log.handlers if isinstance(each, _OnceHandler)]:
        log.removeHandler(handler)
    log.addHandler(_OnceHandler())
    log.propagate = False
