"""Import a user's Python file, such as ``my_sampler.py``, under its own name."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from .errors import DeltaflError

#: What a user's code can raise. ``sys.exit`` in it must not end the program with an exit code of its choice.
OWN_ERRORS = (Exception, SystemExit)


def import_file(path: Path, form: str) -> ModuleType:
    """Import a file as any module is, with its folder at the end of ``sys.path``; once a process.

    So it can import the files beside it, and other processes find its classes again.

    Args:
        path: The file.
        form: What to write instead of a file that does not exist, such as ``"FILE.py:CLASS"``.

    Raises:
        DeltaflError: If there is no such file, another module has its name, or it fails.
    """
    if not path.is_file():
        raise DeltaflError(f"there is no file {path}; write {form}")
    path = path.resolve()
    if not path.stem.isidentifier() or path.stem.startswith("__"):
        raise DeltaflError(f"{path.name} cannot be imported under this name; rename it, for instance to my_{path.name}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        raise DeltaflError(
            f"another module is called {path.stem!r} too; rename {path.name}, for instance to my_{path.name}"
        )
    try:
        return importlib.import_module(path.stem)
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{path.name} cannot be imported: {in_one_line(error, path)}") from error


def in_one_line(error: BaseException, path: Path | None = None) -> str:
    """An error in one line, with the line of a user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
