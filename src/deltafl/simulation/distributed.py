"""One run played by several processes, on one machine or many.

They are started by ``torchrun --nproc-per-node 2 -m deltafl run ...``.

All make the same seeded draw from the same state and train their share of the cohort; the updates
are gathered, and each process closes the same round (docs/how-to/distributed.md). Only the first
process reads and writes the run's folder: the others need none.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np

from ..errors import DeltaflError, FirstProcessError, require

T = TypeVar("T")
#: After waiting so long for another, a process gives up.
PATIENCE = timedelta(minutes=30)
_FAILURE = "failure"


class ProcessGroup:
    """The processes of a run; this class is one process alone, and loads no torch.

    Attributes:
        rank: Number of this process, from 0.
        count: Number of processes.
    """

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives, or raises, in the first process; it is not called in the others."""
        return make()

    def gathered(self, item: T) -> list[T]:
        """Everybody's items, in the order of ranks."""
        return [item]

    def use(self, device: str) -> None:
        """Take this process's GPU if the run is on GPUs: the one with its number on its machine."""


ALONE = ProcessGroup()


class _TorchProcessGroup(ProcessGroup):
    """Several processes: torch.distributed with gloo, for what they exchange are objects."""

    def __init__(self) -> None:
        require("torch", "sim")
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self._torch = torch
        self._dist = dist
        try:
            store, self.rank, self.count = next(rendezvous("env://", timeout=PATIENCE))
            self._notes = dist.distributed_c10d.PrefixStore("deltafl", store)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.count,
                timeout=PATIENCE,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise DeltaflError(
                f"the processes of this run did not find each other ({error}); use torchrun"
            ) from error

    def from_first(self, make: Callable[[], T]) -> T:
        message: list[Any] = [None, None]
        failure: DeltaflError | None = None
        if self.is_first:
            try:
                message[0] = make()
            except DeltaflError as error:
                failure = error
                message[1] = str(error)
        self._communicate(lambda: self._dist.broadcast_object_list(message, src=0))
        made, sentence = message
        if sentence is not None:
            raise failure or FirstProcessError(sentence)
        found: T = made
        return found

    def gathered(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.count
        self._communicate(lambda: self._dist.all_gather_object(items, item))
        return items

    def use(self, device: str) -> None:
        # Where "cuda" has no GPU, the engine says so.
        if device in ("cuda", "auto") and self._torch.cuda.is_available():
            number = int(os.environ.get("LOCAL_RANK", self.rank)) % self._torch.cuda.device_count()
            self._torch.cuda.set_device(number)

    def leave(self, error: BaseException | None) -> None:
        """End this process's part; an error is sent to the others as the reason why they stop."""
        if error is not None:
            reason = str(error)
            if not isinstance(error, DeltaflError):
                reason = f"{type(error).__name__} {reason}".strip()
            with suppress(RuntimeError):  # the process that keeps the store is gone
                self._notes.set(_FAILURE, f"process {self.rank} failed: {reason}")
        self._dist.destroy_process_group()

    def _communicate(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            with suppress(RuntimeError):  # it left no note
                # Who fails leaves a note before it goes; who was killed leaves none, for which
                # nobody waits.
                self._notes.set_timeout(timedelta(seconds=3))
                raise DeltaflError(self._notes.get(_FAILURE).decode()) from error
            raise DeltaflError(
                "another process of this run ended unexpectedly (killed, or its machine lost); "
                "go on from the last checkpoint with --resume"
            ) from error


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_processes(command: str) -> None:
    """Refuse a command that several processes cannot do together."""
    if _world_size() > 1:
        raise DeltaflError(
            f"several processes cannot do 'deltafl {command}' together; start it once, without "
            "torchrun"
        )


@contextmanager
def joined_processes() -> Iterator[ProcessGroup]:
    """The processes that torchrun started beside this one; alone if it was not started by it."""
    if _world_size() < 2:
        yield ALONE
        return
    group = _TorchProcessGroup()
    try:
        yield group
    # Ctrl-C as well: the others must not wait for this process.
    except BaseException as error:
        group.leave(error)
        raise
    group.leave(None)


def divided(costs: Sequence[float], count: int) -> list[list[int]]:
    """Places of jobs for each of ``count`` processes: the longest first, to who has least to do.

    At most 4/3 of the best longest share (Graham 1969). Ties go to the first.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    load = np.zeros(count)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = int(load.argmin())
        shares[least].append(place)
        load[least] += costs[place]
    return shares
