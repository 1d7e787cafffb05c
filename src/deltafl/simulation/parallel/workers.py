"""Local training side by side: a runner in each of several processes, and their jobs."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ...errors import DeltaflError, in_one_line
from ...streams import ONE_AT_A_TIME
from ...types import Params
from ..distributed import ALONE, ProcessGroup, divided
from ..training import torch
from .processes import Processes, packed, result

Job = tuple[Any, ...]


class Recipe(NamedTuple):
    """How a process makes its runner: ``make(*tensors)``; tensors are shared, not copied."""

    make: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]


class Workers(AbstractContextManager["Workers"]):
    """Processes for local training, in a ``with`` statement; ``Workers(1)`` is this process.

    Each process of ``group`` (``distributed.py``) does its share of the jobs, and all get all
    results.
    """

    def __init__(self, count: int, group: ProcessGroup = ALONE) -> None:
        self.count = count
        self._group = group
        self._recipe: Recipe | None = None
        self._runner: Any = None
        self._pool: Processes | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind)
        self._recipe = self._runner = self._pool = None

    @property
    def width(self) -> int:
        """How many jobs run at the same time."""
        return self.count * self._group.count

    def map(
        self,
        recipe: Recipe,
        method: str,
        params_d: Params,
        jobs: Sequence[Job],
        costs: Sequence[float],
    ) -> list[Any]:
        """``[runner.method(params_d, *job) for job in jobs]``, side by side, the longest first."""
        if recipe is not self._recipe:
            self._load(recipe, len(params_d))
        shares = divided(costs, self._group.count)
        mine = shares[self._group.rank]
        if self._pool is None:
            with one_thread():
                found = [
                    getattr(self._runner, method)(
                        params_d,
                        *jobs[place],
                    )
                    for place in mine
                ]
        else:
            self._shared_d.numpy()[:] = params_d  # no process reads it between two maps
            futures = {
                place: self._pool.submit(_do, method, jobs[place])
                # The longest first: what begins last decides when all are done.
                for place in sorted(mine, key=lambda place: -costs[place])
            }
            found = [result(futures[place]) for place in mine]
        of_all = dict(chain(*self._group.gathered([*zip(mine, found, strict=True)])))
        return [of_all[place] for place in range(len(jobs))]

    def _load(self, recipe: Recipe, num_params: int) -> None:
        """Make a runner here; or start processes, which share memory for tensors and the model."""
        self.__exit__(None)
        if self.count == 1:
            self._runner = recipe.make(*recipe.tensors)
        else:
            self._shared_d = torch.empty(num_params)
            # Once for all processes: jobs need not carry the model.
            _share(self._shared_d, *recipe.tensors)
            make = packed(recipe.make)
            self._pool = Processes(
                self.count,
                _begin,
                make,
                recipe.tensors,
                self._shared_d,
            )
        self._recipe = recipe


def _share(*tensors: torch.Tensor) -> None:
    """Move tensors into memory that processes share."""
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    # A container's share of it is 64 MB unless somebody asks for more.
    except RuntimeError as error:
        size = sum(tensor.nbytes for tensor in tensors) / 1e6
        raise DeltaflError(
            f"workers share {size:.0f} MB of memory, and there is not enough ({in_one_line(error)})"
            "; leave workers out, or make /dev/shm larger, as docker run --shm-size=2g does"
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as the workers do: with more, last bits of sums would differ."""
    with ONE_AT_A_TIME:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


#: In a worker process: what makes its runner, its tensors, and the global model.
_given: list[Any] = []


def _begin(*given: Any) -> None:
    torch.set_num_threads(1)
    _given[:] = given


@cache
def _made_runner() -> Any:
    make, tensors, _ = _given
    # In the first job and not in ``_begin``, where an error of the model would be lost.
    return pickle.loads(make)(*tensors)  # noqa: S301 - this process's parent has packed it


def _do(method: str, job: Job) -> Any:
    return getattr(_made_runner(), method)(_given[2].numpy(), *job)
