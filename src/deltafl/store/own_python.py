"""Python files of users: ``FILE.py:NAME``, and modules.

To import a file is to run it. Names that a user writes may be imported; those that are read from a
folder, which may come from anybody, are text, and are imported where the user has named the same
file too (``only``).
"""

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, TypeVar

from ..errors import DeltaflError, explained
from .files import read_bytes

T = TypeVar("T")

#: The files that may be imported; None for all.
_ALLOWED: ContextVar[frozenset[Path] | None] = ContextVar("allowed", default=None)


class OwnCodeError(DeltaflError):
    """A file of Python code is named by what is only read."""


@contextmanager
def only(files: frozenset[Path] | None) -> Iterator[None]:
    """Import these files of users' and no others, however they are named; None changes nothing.

    What this process has imported already stays known.
    """
    before = allowed()
    both = [each for each in (before, files) if each is not None]
    token = _ALLOWED.set(frozenset.intersection(*both) if both else None)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def allowed() -> frozenset[Path] | None:
    """What ``only`` allows here; None for all files."""
    return _ALLOWED.get()


def allow(files: frozenset[Path] | None) -> None:
    """Allow in a process that was started what is allowed where it was started."""
    _ALLOWED.set(files)


def files_named(given: Any) -> frozenset[Path]:
    """The Python files that texts of the user's name, in whatever lists and tables they are."""
    # Not ``resolve``, which fails where links lead in a circle.
    return frozenset(Path(os.path.realpath(name)) for name in names_in(given))


def names_in(given: Any) -> frozenset[str]:
    """The names of Python files in texts, lists and tables of the user's, as they are written."""
    match given:
        case str() | PurePath():
            text = str(given)
            # A label names several, and a folder's name may have such signs, too.
            starts = [0, *(found.end() for found in re.finditer(r"[@+(,=]", text))]
            ends = [found.end() for found in re.finditer(r"\.py", text)]
            names = (text[start:end].strip() for end in ends for start in starts if start < end)
            return frozenset(names)
        case Mapping():
            return names_in([*given.keys(), *given.values()])
        case list() | tuple() | set() | frozenset():
            return frozenset[str]().union(*map(names_in, given))
    return frozenset()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Find files from another folder; its modules are not found."""
    before = [*sys.path]
    # An empty entry stands for wherever the process is.
    sys.path[:] = [entry or str(Path.cwd()) for entry in before]
    try:
        with chdir(folder):
            yield
    finally:
        sys.path[:] = [*before, *sys.path[len(before) :]]


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
        OwnCodeError: If it may not be imported here (``only``).
        DeltaflError: If there is no such file (write one as ``form``), another module has its name,
            or it fails.
    """
    place = path.resolve() if path.is_file() else None
    files = allowed()
    if files is not None and place not in files:
        if any((name, file) == (path.stem, place) for name, file, _ in _imported()):
            return sys.modules[path.stem]
        raise OwnCodeError(
            f"{path} is Python code that a folder names, and it would run as you: if you trust "
            "it, name it in the command too, or add --trust-code (in Python trust_code=True)"
        )
    if place is None:
        raise DeltaflError(f"there is no file {path}; write {form}")
    path = place
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
            module.__spec__.loader_state = read_bytes(path, users=True)
        return module


def forget_edited() -> None:
    """Let the next ``import_file`` read files again that were edited since they were imported."""
    for name, path, content in _imported():
        if path.is_file() and read_bytes(path, users=True) != content:
            del sys.modules[name]


def imported() -> dict[Path, str]:
    """The files that ``import_file`` has imported here, with a digest of what they were then."""
    return {
        path: hashlib.blake2b(content, digest_size=8).hexdigest()
        for _, path, content in _imported()
    }


def _imported() -> Iterator[tuple[str, Path, bytes]]:
    """The names of the modules that ``import_file`` has imported, their files, and what was in
    them then.
    """
    # What is in it need not be a module.
    known: dict[str, Any] = {**sys.modules}
    for name, module in known.items():
        spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        if spec is None or not isinstance(spec.loader_state, bytes) or spec.origin is None:
            continue
        yield name, Path(spec.origin).resolve(), spec.loader_state
