"""A user's own task: a function in a Python file that returns a ``Task``, or a table; made, checked
and tried out.

Every mistake is one sentence, before an experiment starts.
"""

import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..calls import Named
from ..errors import DeltaflError, explained, in_one_line
from ..store.own_python import load_function, split_name
from ..streams import stream
from ..types import Json
from .base import Task
from .checking.whole import check_task
from .data.frames import TABLE_SUFFIXES, is_table_file, table_stem
from .data.huggingface import from_huggingface
from .data.tables import table_task
from .losses import squared_error
from .metrics import AnyMetric
from .registry import TaskSpec, find_task, known_tasks

#: Clients selected per round, of those of a task without a setting for it: a tenth, at least so
#: many, but no more than half of them, for all methods are one where everybody is asked.
LEAST_SAMPLE = 3
#: Settings of an experiment with a task of the user's own, whatever is in it.
OWN_DEFAULTS: Json = {
    "rounds": 100,
    "local_epochs": 1,
    "batch_size": 32,
    "local_lr": 0.1,
    "alpha": 0.5,
    "threshold": 0.8,
}


def is_own(name: str) -> bool:
    """Whether a task's name is that of a user's file, ``FILE.py``, ``FILE.py:FUNCTION`` or a
    table, or of an object.
    """
    return isinstance(name, Named) or split_name(name)[0].suffix == ".py" or is_table(name)


def is_table(name: str) -> bool:
    """Whether a task's name is that of a table, such as ``visits.csv``, or of one in memory."""
    if isinstance(name, Named):
        return not (isinstance(name.of, Task) or callable(name.of))
    return is_table_file(name)


def registered_spec(name: str) -> TaskSpec:
    """The registered task of this name; for a name like a file's or a folder's, the error says
    what can be a task.
    """
    if Path(name).suffix:
        tables = ", ".join(TABLE_SUFFIXES)
        raise DeltaflError(
            f"unknown task {name!r}: tables end in {tables}, a task of your own is FILE.py:FUNCTION"
        )
    if Path(name).is_dir() and name not in known_tasks():
        raise DeltaflError(
            f"the task {name!r} is a folder: join its tables to one with a column that names the "
            "client (docs/how-to/tables.md), or make its pictures a task "
            "(docs/how-to/pytorch-data.md)"
        )
    return find_task(name)


def short_name(name: str) -> str:
    """A task's name for folders: ``my_task`` for ``models/my_task.py:make_task``."""
    if isinstance(name, Named) or not is_own(name):
        return name
    if is_table_file(name):
        return table_stem(name)
    return split_name(name)[0].stem


def load_own(
    name: str,
    seed: int,
    metric: Sequence[AnyMetric] = (),
    try_out: bool = True,
    **of_table: Any,
) -> Task:
    """Make the task of a user's file, and try it out on two examples, which loads torch.

    Load it before ``Workers`` are started, which inherit ``sys.path`` then. A file is imported once
    a process.

    ``name`` is ``FILE.py:FUNCTION``, ``FILE.py`` for its function ``make_task(seed)`` or
    ``make_task()``, or a table. ``metric`` takes the place of the task's own. ``of_table`` are
    arguments of ``table_task``: ``label``, ``column``, ``partition``, ``clients``, ...

    Raises:
        DeltaflError: If there is no such file or function, it fails, or it returns no valid task.
    """
    named: Any = name
    if isinstance(name, Named):
        named = name.of
    if is_table(name):
        make: Callable[..., Task] = table_task
        given = {key: value for key, value in of_table.items() if value is not None}
        # A Hugging Face data set, told by what it has: the package is not imported. Arrow's tables
        # have both.
        if hasattr(named, "column_names") and not hasattr(named, "columns"):
            make = from_huggingface
            for setting in ("sep", "encoding"):
                if setting in given:
                    raise DeltaflError(f"{setting} is of tables of text: leave it out for {name}")
        task: Any = make(named, seed=seed, **given)
    elif isinstance(named, Task):
        task = named
    elif callable(named):
        task = _made(named, seed, name)
    else:
        task = _from_file(name, seed)
    if not isinstance(task, Task):
        raise DeltaflError(
            f"{name} returned {type(task).__name__}; it must return a deltafl.tasks.Task"
        )
    made: Task = task
    if metric:
        made = replace(made, metric=metric)
    check_task(made, name, seed, try_out)
    return made


def _from_file(name: str, seed: int) -> object:
    path, function = split_name(name)
    make = load_function(name, "--task FILE.py:FUNCTION", "(seed: int) -> Task")
    return _made(make, seed, f"{path}:{function}", path.resolve())


def _made(
    make: Callable[..., object],
    seed: int,
    name: str,
    path: Path | None = None,
) -> object:
    """What a user's function makes, the same in every process."""
    from .draws import seeded

    with explained(f"{name} failed", path), seeded(stream(seed, "data")):
        if "seed" in inspect.signature(make).parameters:
            return make(seed=seed)
        return make()


def own_code_error(
    names: Iterable[str],
    description: str,
    places: Iterable[tuple[str, int | None]],
) -> DeltaflError | None:
    """An error in a run as a sentence; None if it came through no file beside those that the
    settings name.

    ``names`` are those of tasks and samplers: ``FILE.py:NAME`` is one of a file.
    """
    files = [split_name(name)[0] for name in names]
    # Beside them, for a file may import others of the user's.
    folders = {file.resolve().parent for file in files if file.suffix == ".py"}
    own = dict.fromkeys(
        f"{Path(file).name} line {line}" for file, line in places if Path(file).parent in folders
    )
    if not own:
        return None
    return DeltaflError(f"your own code failed in a run: {description} ({', '.join(own)})")


def own_spec(name: str, task: Task) -> TaskSpec:
    """The settings that an experiment with a task of the user's own has unless they are set."""
    usual = dict(OWN_DEFAULTS)
    metric = task.metrics[0]
    if metric.name != "accuracy":
        usual["threshold"] = None  # nothing else is good for every task
    if task.loss is squared_error:
        # The gradient of the squared error grows with the number of features.
        usual["local_lr"] = float(f"{0.1 / task.dataset.train_x[0].size:.0e}")
    return TaskSpec(
        name,
        summary="a task of your own",
        num_clients=task.num_clients,
        sample_size=min(max(LEAST_SAMPLE, task.num_clients // 10), max(1, task.num_clients // 2)),
        make_model=task.make_model,
        metric=metric,
        has_classes=task.dataset.num_classes > 0,
        **usual,
    )


def check_picklable(task: Task, name: str) -> None:
    """Check that the model and the loss of a task can be sent to worker processes."""
    try:
        # Only what the user writes: arrays can always be sent.
        pickle.dumps((task.make_model, task.loss, task.augment))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DeltaflError(
            f"{name}: its model, loss or augment cannot be sent to worker processes "
            f"({in_one_line(error)}); define it at the top of the file, or use --workers 1"
        ) from None
