"""What commands share, the reproduction's too: where results go, and how they are interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DeltaflError, printable

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def path_name(text: str) -> Path:
    """The name of a file or a folder, which is printed as it is; shells leave ``--out=~/x`` so."""
    if not text.strip():
        raise typer.BadParameter("it is empty; write a name")
    if not text.isprintable():
        raise typer.BadParameter(
            f"{printable(text)} has characters that cannot be seen; write a name without them"
        )
    from ..store.files import with_home  # loads NumPy, which help does without

    return with_home(text)


Out = Annotated[
    Path | None,
    typer.Option(
        help="where results go; if not set, the last lines say where",
        metavar="DIR",
        parser=path_name,
    ),
]


@contextmanager
def interruptible(sentence: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C, and the system's request to end, into a sentence that states how to continue."""
    # Signals come to that thread alone, and Python lets nobody else handle them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt(number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    # A job in the background does without Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        # Libraries that load make other errors of it, and a question an ``Abort``; one with a
        # sentence of its own came of something else.
        has_sentence = isinstance(error, DeltaflError | OSError)
        if not isinstance(error, KeyboardInterrupt) and (not came or has_sentence):
            raise
        say(f"interrupted; {sentence()}", error=True)
        is_request = came[:1] == [signal.SIGTERM]
        raise typer.Exit(EXIT_TERMINATED if is_request else EXIT_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(*lines: str, error: bool = False) -> None:
    """Print lines: text is text, and whatever cannot be seen in it is made visible.

    Long lines are left to the terminal, so that a path in them can be copied as a whole.
    """
    for line in lines:
        # It moves a progress bar out of the way.
        typer.echo(printable(line, limit=None), err=error)
