"""Executors by name, for ``deltafl compare --executor NAME:WHERE``.

From Python any ``concurrent.futures.Executor`` will do, under whatever name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import DeltaflError, entry, explained, in_one_line, require
from .processes import variables

#: What submitit calls the same on every cluster.
_SHARED = ("cpus_per_task", "gpus_per_node", "mem_gb", "nodes", "tasks_per_node", "timeout_min")


@contextmanager
def _dask(address: str, folder: Path) -> Iterator[Any]:
    require("distributed", "cluster")
    from distributed import Client

    if not address:
        raise DeltaflError("dask needs its scheduler's address; write --executor dask:HOST:8786")
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError, ImportError) as error:
        raise DeltaflError(
            f"there is no Dask scheduler at {address} ({in_one_line(error)}); start one with "
            "'dask scheduler', and write --executor dask:HOST:8786"
        ) from None
    with client:
        yield client.get_executor()


@contextmanager
def _submitit(cluster: str, options: str, folder: Path) -> Iterator[Any]:
    require("submitit", "cluster")
    # Else it would close the handlers of this program's logging, and with them files such as a
    # stream that absl logs to. Its workers keep their logs.
    with variables({"SUBMITIT_LOG_LEVEL": "NOCONFIG"}):
        import submitit

    given = dict[str, Any]()
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if not (name.isidentifier() and equals and value):
            raise DeltaflError(
                f"--executor {cluster}:{options} has {option!r}; write options of sbatch such as "
                f"{cluster}:partition=cpu,timeout_min=60"
            )
        key = name if name in _SHARED else f"slurm_{name}"
        given[key] = int(value) if value.isdecimal() else value

    def made(place: Path) -> Any:
        executor = submitit.AutoExecutor(place, cluster=cluster)
        executor.update_parameters(**given)
        return executor

    refused = f"{cluster} takes no runs like this"
    with explained(refused), TemporaryDirectory() as trial:
        try:
            made(Path(trial))  # which makes a folder before it looks at them
        except NameError as error:
            # What follows are all names that there are.
            first = str(error).partition(". ")[0]
            such = f"{cluster}:partition=cpu,timeout_min=60"
            raise DeltaflError(
                f"{refused}: {first}; write options of sbatch such as {such}"
            ) from None
    with explained(refused):
        # Beside the runs: its workers and this process have to see it.
        executor = made(folder / "submitit")
    yield executor


#: Name -> a context that gives an executor, from what follows the colon and the results' folder.
EXECUTORS: dict[str, Callable[[str, Path], AbstractContextManager[Any]]] = {
    "dask": _dask,
    "slurm": partial(_submitit, "slurm"),
    "local": partial(_submitit, "local"),
}


def named_executor(text: str, folder: Path) -> AbstractContextManager[Any]:
    """The executor that ``dask:ADDRESS``, ``slurm:partition=NAME`` or ``local`` names; ``local``
    does on this machine what ``slurm`` does, to try it.
    """
    name, _, rest = text.partition(":")
    return entry("executor", name, EXECUTORS)(rest, folder)
