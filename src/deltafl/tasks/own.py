"""A user's own task: a function in a Python file that returns a ``Task``, or a table."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from ..errors import OWN_ERRORS, DeltaflError, in_one_line, unknown_name
from ..io import import_file
from .base import Task
from .registry import TaskSpec, find_task
from .tables import TABLE_SUFFIXES, table_task
from .validation import check_task

DEFAULT_FUNCTION = "make_task"


def is_own(name: str) -> bool:
    """Whether a task's name is that of a user's file: ``FILE.py``, ``FILE.py:FUNCTION`` or a table."""
    return _split(name)[0].suffix == ".py" or is_table(name)


def is_table(name: str) -> bool:
    """Whether a task's name is that of a table: ``.csv``, ``.npz`` or ``.parquet``."""
    return Path(name).suffix.lower() in TABLE_SUFFIXES


def registered_spec(name: str) -> TaskSpec:
    """The registered task of this name; for a name like a file's, the error lists the files that can be a task."""
    if Path(name).suffix:
        tables = ", ".join(sorted(TABLE_SUFFIXES))
        raise DeltaflError(f"unknown task {name!r}: tables end in {tables}, a task of your own is FILE.py:FUNCTION")
    return find_task(name)


def short_name(name: str) -> str:
    """A task's name for folders: ``my_task`` for ``models/my_task.py:make_task``."""
    return _split(name)[0].stem if is_own(name) else name


def load_own(name: str, seed: int, *, label: str | None = None, client: str | None = None) -> Task:
    """Make the task of a user's file, and try it out on two examples.

    Load it before ``Workers`` are started, which inherit ``sys.path`` then. A file is imported once a process.

    Args:
        name: ``FILE.py:FUNCTION``, ``FILE.py`` for its function ``make_task``, or a table. The function takes ``seed``,
            or nothing.
        seed: The experiment's seed, >= 0.
        label: Column of the label, for tables; ``"label"`` if None.
        client: Column of the client, for tables; ``"client"`` if None.

    Raises:
        DeltaflError: If there is no such file or function, it fails, or it returns no valid task.
    """
    task: object
    if is_table(name):
        task = table_task(name, label or "label", client or "client", seed=seed)
    else:
        path, function = _split(name)
        task = _call(_function_of(import_file(path, "--task FILE.py:FUNCTION"), function, path), seed, path, function)
    if not isinstance(task, Task):
        raise DeltaflError(f"{name} returned {type(task).__name__}; it must return a deltafl.tasks.Task")
    check_task(task, name, seed)
    return task


def task_code_error(name: str, description: str, places: Iterable[tuple[str, int | None]]) -> DeltaflError | None:
    """The sentence for an error while clients train or a model is evaluated; None if no line of the user's is in it.

    Args:
        name: The task.
        description: The error in one line.
        places: Files and lines of its traceback; what lies beside the task's file is the user's, too.
    """
    folder = _split(name)[0].resolve().parent
    own = dict.fromkeys(f"{Path(file).name} line {line}" for file, line in places if Path(file).parent == folder)
    if not own or not is_own(name) or is_table(name):
        return None
    return DeltaflError(f"the task's own code failed in training or evaluation: {description} ({', '.join(own)})")


def own_spec(name: str, task: Task) -> TaskSpec:
    """The settings that an experiment with an own task has unless they are set."""
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


def _function_of(module: ModuleType, name: str, path: Path) -> Callable[..., object]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
    if not functions:
        raise DeltaflError(f"{path} has no function; write there: def {name}(seed: int) -> Task")
    raise unknown_name(f"function of {path}", name, functions)


def _call(function: Callable[..., object], seed: int, path: Path, name: str) -> object:
    try:
        return function(seed=seed) if "seed" in inspect.signature(function).parameters else function()
    except DeltaflError:
        raise
    except OWN_ERRORS as error:
        raise DeltaflError(f"{path}:{name} failed: {in_one_line(error, path.resolve())}") from error
