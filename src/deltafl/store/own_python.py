"""Python files of users: ``FILE.py:NAME``, and modules."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ..errors import DeltaflError, explained

T = TypeVar("T")


#: What a task's file has where no function is named.
DEFAULT_FUNCTION = "make_task"


def split_name(name: str) -> tuple[Path, str]:
    """File and function, or class, of ``FILE.py:NAME``."""
    # Not at the colon alone: on Windows a path may begin with C:
    file, suffix, function = name.partition(".py:")
    if not suffix:
        return Path(name), DEFAULT_FUNCTION
    return Path(f"{file}.py"), function or DEFAULT_FUNCTION


def load_named(spec: str, form: str) -> Any:
    """What ``FILE.py:NAME`` names; None if the file has no such name. ``form`` is as in
    ``import_file``.
    """
    path, name = split_name(spec)
    return vars(import_file(path, form)).get(name)


def load_function(spec: str, form: str, signature: str) -> Any:
    """The function that ``FILE.py:FUNCTION`` names; the error for none shows its ``signature``."""
    path, name = split_name(spec)
    found = load_named(spec, form)
    if not callable(found):
        raise DeltaflError(f"{path} has no function {name!r}; write there: def {name}{signature}")
    return found


def load_class(spec: str, base: type[T]) -> type[T]:
    """The class that ``FILE.py:Class`` names, a subclass of ``base``; a ``DeltaflError`` if
    there is none.
    """
    path, name = split_name(spec)
    found = load_named(spec, "FILE.py:Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise DeltaflError(
            f"{path} has no class {name!r} that is a subclass of deltafl.{base.__name__}"
        )
    missing = sorted(vars(found).get("__abstractmethods__", ()))
    if missing:
        raise DeltaflError(
            f"{spec} lacks {', '.join(missing)}; define what deltafl.{base.__name__} leaves open"
        )
    return found


def import_file(path: Path, form: str) -> ModuleType:
    """Import a file as any module is, under its own name, with its folder at the end of
    ``sys.path``; once a process.

    So it can import the files beside it, and other processes find its classes again. A file that
    was edited since is imported again by ``forget_edited``.

    Raises:
        DeltaflError: If there is no such file (write one as ``form``), another module has its name,
            or it fails.
    """
    if not path.is_file():
        raise DeltaflError(f"there is no file {path}; write {form}")
    path = path.resolve()
    # At the end: a file of the user's must not hide an installed package.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # The file may be newer than the list of its folder that Python remembers.
    importlib.invalidate_caches()
    # A name with a dot would be looked for in a package, which would be imported.
    usable = path.stem.isidentifier() and not path.stem.startswith("__")
    spec = importlib.util.find_spec(path.stem) if usable else None
    if spec is None or Path(str(spec.origin)).resolve() != path:
        why = "another module has this name" if spec else "this is no name of a module"
        raise DeltaflError(
            f"{path.name} cannot be imported: {why}; rename it, for instance to my_task.py"
        )
    with explained(f"{path.name} cannot be imported", path):
        module = importlib.import_module(path.stem)
        if module.__spec__ is not None and module.__spec__.loader_state is None:
            module.__spec__.loader_state = path.read_bytes()
        return module


def forget_edited() -> None:
    """Let the next ``import_file`` read files again that were edited since they were imported."""
    for name, module in [*sys.modules.items()]:
        spec = vars(module).get("__spec__")
        if spec is None or not isinstance(spec.loader_state, bytes) or spec.origin is None:
            continue
        path = Path(spec.origin)
        if path.is_file() and path.read_bytes() != spec.loader_state:
            del sys.modules[name]
