"""Names of a package that are loaded when they are first used."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

#: In a stub, whose ``from . import name as name`` is a package within this one.
HERE = "."


def names_of(file: str) -> dict[str, str]:
    """The public names of a package and their modules, from the stub beside its ``__init__.py``.

    A line of the stub is ``from .module import name as name``: one table for type checkers and for
    the interpreter.
    """
    lines = Path(file).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in words}


def loader(package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562)."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == HERE:
            return import_module(f".{name}", package)
        return getattr(import_module(modules[name], package), name)

    return load
