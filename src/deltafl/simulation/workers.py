"""Processes that train clients side by side; ``Workers(1)`` is this process itself.

The jobs are methods of a runner, pure functions of ``(sent, *numbers)``: it does not matter which process runs which.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

from ..errors import DeltaflError
from ..round import Broadcast
from .distributed import ALONE, ProcessGroup, divided
from .processes import Processes, result
from .training import torch

Job = tuple[int, ...]


class Workers:
    """Processes for local training. Use it in a ``with`` statement.

    Args:
        count: Number of processes, >= 1. As many as there are cores is best.
        group: The processes of the run (``distributed.py``): each does its share of the jobs, and all get all results.

    Raises:
        DeltaflError: If count is below 1.
    """

    def __init__(self, count: int, group: ProcessGroup = ALONE) -> None:
        if count < 1:
            raise DeltaflError(f"workers is {count}; write a whole number >= 1, best the number of cores")
        self.count, self._group = count, group
        self._pool: Processes | None = None
        self._runner: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind)
        self._pool = self._runner = None

    @property
    def width(self) -> int:
        """How many jobs run at the same time."""
        return self.count * (1 if self._group.is_apart else self._group.count)

    def map(
        self, runner: object, method: str, sent: Broadcast, jobs: Sequence[Job], costs: Sequence[float]
    ) -> list[Any]:
        """``[runner.method(sent, *job) for job in jobs]``, side by side, the jobs of the highest costs first.

        The runner goes to the processes when it is a new one; its torch tensors should be in shared memory then.

        Raises:
            DeltaflError: If a process died, the runner cannot be sent, or a job raised one.
            JobError: If a job raised another error in a process.
        """
        if self._group.is_apart or self._group.count == 1:
            return self._map(runner, method, sent, jobs, costs)
        mine = divided(costs, self._group.count)[self._group.rank]
        found = self._map(runner, method, sent, [jobs[place] for place in mine], [costs[place] for place in mine])
        results = dict(chain.from_iterable(self._group.gathered(list(zip(mine, found, strict=True)))))
        return [results[place] for place in range(len(jobs))]

    def _map(
        self, runner: object, method: str, sent: Broadcast, jobs: Sequence[Job], costs: Sequence[float]
    ) -> list[Any]:
        if self.count == 1:
            with one_thread():
                return [getattr(runner, method)(sent, *job) for job in jobs]
        if self._pool is None or runner is not self._runner:
            self.__exit__(None)
            self._shared_2d = torch.empty(2, len(sent.params_d), dtype=torch.float32).share_memory_()  # type: ignore[no-untyped-call]
            self._pool, self._runner = Processes(self.count, _load, runner, self._shared_2d), runner
        for shared_d, vector_d in zip(self._shared_2d, sent, strict=True):  # no process reads it between two calls
            if vector_d is not None:
                shared_d.copy_(torch.from_numpy(vector_d))
        order = sorted(range(len(jobs)), key=lambda place: -costs[place])
        futures = {place: self._pool.submit(_do, method, sent.drift_d is not None, jobs[place]) for place in order}
        return [result(futures[place]) for place in range(len(jobs))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as the workers do: sums of several threads would differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: In a worker process: its runner, and the vectors of what the server sends.
_loaded: list[Any] = []


def _load(runner: Any, shared_2d: torch.Tensor) -> None:
    torch.set_num_threads(1)
    _loaded[:] = runner, shared_2d


def _do(method: str, drifts: bool, job: Job) -> Any:
    runner, shared_2d = _loaded
    params_d, drift_d = shared_2d.numpy()
    return getattr(runner, method)(Broadcast(params_d, drift_d if drifts else None), *job)
