"""What commands share, the reproduction's too: where results go, and how they are interrupted."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def _folder(text: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("it is empty; write the name of a folder")
    return Path(text)


Out = Annotated[
    Path | None,
    typer.Option(
        help="where results go",
        metavar="DIR",
        parser=_folder,
    ),
]


@contextmanager
def interruptible(sentence: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C, and the system's request to end, into a sentence that states how to continue."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        typer.echo(f"interrupted; {sentence()}", err=True)
        # ``_terminate`` gives the number of the signal; Ctrl-C comes without any.
        raise typer.Exit(EXIT_TERMINATED if interrupt.args else EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def say(text: str, *, error: bool = False) -> None:
    """Print a text as it is; a terminal breaks its lines between words."""
    console = Console(stderr=error)
    # As Text: the names that users choose may look like markup.
    console.print(Text(text), soft_wrap=not console.is_terminal)
