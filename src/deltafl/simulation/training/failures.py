"""What a user's model, loss or augment raises in the middle of a run, as one sentence."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import OWN_ERRORS, DeltaflError, in_one_line

_MARK = "raised_by_own_code"
#: Folders of files that no user wrote: this package, and Python's; a neighbour's name may begin as
#: theirs.
_OF_OTHERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], sysconfig.get_path("stdlib"))
)
#: Of what is installed, be it for all users, in an environment, or by ``pip install --user``.
_INSTALLED = {"site-packages", "dist-packages"}


@contextmanager
def own_code() -> Iterator[None]:
    """Mark what the user's code raises, and let it through: who tries a model out looks at its
    type.
    """
    try:
        yield
    except OWN_ERRORS as error:
        setattr(error, _MARK, True)
        raise


@contextmanager
def located(where: str) -> Iterator[None]:
    """Turn an error that ``own_code`` has marked into a sentence; a fault of this library keeps its
    traceback.
    """
    try:
        yield
    except DeltaflError as error:
        if not hasattr(error, _MARK):
            raise
        raise DeltaflError(f"{where}: {error}") from error
    except OWN_ERRORS as error:
        if not hasattr(error, _MARK):
            raise
        raise DeltaflError(f"{where}: {in_one_line(error)}{_line(error)}") from error


@contextmanager
def never_exits() -> Iterator[None]:
    """Turn a ``sys.exit`` of the user's code into a sentence: the exit code is ours."""
    try:
        yield
    except SystemExit as error:
        raise DeltaflError(
            f"the run was ended by sys.exit({error.code!r}){_line(error)}; to end a run early let "
            "a callback raise StopRun"
        ) from error


def _line(error: BaseException) -> str:
    """The innermost line of a file of the user's, in brackets; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not frame.filename.startswith(_OF_OTHERS) and _INSTALLED.isdisjoint(path.parts):
            return f" ({path.name} line {frame.lineno})"
    return ""
