"""A user's own data and model: a function in a Python file that returns a ``Task``, or a table.

``FILE.py:FUNCTION`` is imported as any module is, under the file's own name, with its folder at the end of
``sys.path``. So it can import what lies beside it, and worker processes, which inherit ``sys.path``, find its model and
loss again.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from ..errors import DeltaflError, unknown_name
from .base import Task
from .fitting import require_fitting
from .registry import TaskSpec
from .table import TABLE_SUFFIXES, table_task
from .trial import OWN_ERRORS, told

DEFAULT_FUNCTION = "make_task"


def is_own(name: str) -> bool:
    """Whether a task's name is that of a user's file: ``FILE.py``, ``FILE.py:FUNCTION`` or a table."""
    return _split(name)[0].suffix == ".py" or is_table(name)


def is_table(name: str) -> bool:
    """Whether a task's name is that of a table: ``.csv``, ``.npz`` or ``.parquet``."""
    return Path(name).suffix.lower() in TABLE_SUFFIXES


def unknown_task(name: str, known: Iterable[str]) -> DeltaflError:
    """The error for a name that is no task's; one that looks like a file's is told which files can be one."""
    if Path(name).suffix:
        tables = ", ".join(sorted(TABLE_SUFFIXES))
        return DeltaflError(f"unknown task {name!r}: tables end in {tables}, a task of your own is FILE.py:FUNCTION")
    return unknown_name("task", name, known)


def short_name(name: str) -> str:
    """A task's name for folders: ``my_task`` for ``models/my_task.py:make_task``."""
    return _split(name)[0].stem if is_own(name) else name


def load_own(name: str, seed: int, *, label: str | None = None, client: str | None = None) -> Task:
    """Make the task of a user's file, and try it out on two examples.

    Load it before ``Workers`` are started, for they learn then where modules are. A file is imported once a process.

    Args:
        name: ``FILE.py:FUNCTION``, ``FILE.py`` for its function ``make_task``, or a table. The function takes ``seed``,
            or nothing.
        seed: The experiment's seed, >= 0.
        label: Column of the label, for tables; ``"label"`` if None.
        client: Column of the client, for tables; ``"client"`` if None.

    Raises:
        DeltaflError: If there is no such file or function, it fails, or what it returns is no task that fits together.
    """
    task: object
    if is_table(name):
        task = table_task(name, label or "label", client or "client", seed=seed)
    else:
        path, function = _split(name)
        task = _call(_function_of(_import(path), function, path), seed, path, function)
    if not isinstance(task, Task):
        raise DeltaflError(f"{name} returned {type(task).__name__}; it must return a deltafl.tasks.base.Task")
    require_fitting(task, name, seed)
    return task


def own_failure(name: str, said: str, places: Iterable[tuple[str, int | None]]) -> DeltaflError | None:
    """The sentence for an error while clients train or a model is evaluated; None if no line of the user's is in it.

    Args:
        name: The task.
        said: The error in one line.
        places: Files and lines that it came through; what lies beside the task's file is the user's, too.
    """
    folder = _split(name)[0].resolve().parent
    own = dict.fromkeys(f"{Path(file).name} line {line}" for file, line in places if Path(file).parent == folder)
    if not own or not is_own(name) or is_table(name):
        return None
    return DeltaflError(f"the task's own code failed in training or evaluation: {said} ({', '.join(own)})")


def own_spec(name: str, task: Task) -> TaskSpec:
    """The settings that an experiment with an own task has unless it says otherwise."""
    return TaskSpec(
        name=name,
        summary="a task of your own",
        needs=("torch",),
        num_clients=task.num_clients,
        sample_size=max(1, task.num_clients // 10),
        rounds=100,
        local_epochs=1,
        batch_size=32,
        local_lr=0.1,
        make_model=task.make_model,
        metric=task.metric,
        threshold=0.8 if task.metric == "accuracy" else None,
    )


def _split(name: str) -> tuple[Path, str]:
    """File and function."""
    file, suffix, function = name.partition(".py:")
    return (Path(f"{file}.py"), function or DEFAULT_FUNCTION) if suffix else (Path(name), DEFAULT_FUNCTION)


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise DeltaflError(f"there is no file {path}; write --task FILE.py:FUNCTION")
    path = path.resolve()
    if not path.stem.isidentifier() or path.stem.startswith("__"):
        raise DeltaflError(f"{path.name} cannot be imported under this name; rename it, for instance to my_task.py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        raise DeltaflError(
            f"another module is called {path.stem!r} too; rename {path.name}, for instance to my_task.py"
        )
    try:
        return importlib.import_module(path.stem)
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{path.name} cannot be imported: {told(error, path)}") from error


def _function_of(module: ModuleType, name: str, path: Path) -> Callable[..., object]:
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if not functions:
        raise DeltaflError(f"{path} has no function; write there: def {name}(seed: int) -> Task")
    raise unknown_name(f"function of {path}", name, functions)


def _call(function: Callable[..., object], seed: int, path: Path, name: str) -> object:
    parameters = inspect.signature(function).parameters
    others = [key for key, one in parameters.items() if one.default is one.empty and key != "seed"]
    if others:
        raise DeltaflError(f"{path}:{name} needs {', '.join(others)}; it may take seed, or nothing")
    try:
        return function(seed=seed) if "seed" in parameters else function()
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{path}:{name} failed: {told(error, path.resolve())}") from error
