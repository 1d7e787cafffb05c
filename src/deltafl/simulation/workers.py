"""Processes that train clients side by side; ``Workers(1)`` is this process itself.

A runner is an object whose methods are pure functions of ``(model, *numbers)``, so that it does not matter which
process runs a job, or when; ``model`` is what all jobs of one ``map`` share. Each worker has a pipe and gets its next
job when it has finished one. Torch tensors in shared memory are passed without a copy, in memory without a name, so
that nothing is left behind. A worker ends when its pipe is closed, hence also when the parent is killed.
"""

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Self

from ..errors import DeltaflError, MissingExtraError, in_one_line
from ..tasks.own import error_places

try:
    import torch
    import torch.multiprocessing as torch_multiprocessing
except ImportError as error:
    raise MissingExtraError("torch", "sim") from error

Job = tuple[int, ...]


class Failure(NamedTuple):
    """An error that is no ``DeltaflError``: traceback, error in one line, and the files and lines it came through."""

    text: str
    said: str
    places: list[tuple[str, int | None]]


class JobError(RuntimeError):
    """A job failed in a worker process; the traceback there is in the message."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"local training failed in a worker process:\n{failure.text}")
        self.failure = failure


def failure_of(error: Exception) -> Failure:
    """The failure behind an error that is being handled, from a worker or from this process."""
    if isinstance(error, JobError):
        return error.failure
    return Failure(traceback.format_exc(), in_one_line(error), error_places(error))


class Workers:
    """A pool of processes for local training. Use it in a ``with`` statement.

    Args:
        count: Number of processes, >= 1; 1 runs everything in this process. As many as there are cores is best:
            each uses one thread.

    Raises:
        DeltaflError: If count is below 1.

    Example:
        >>> with Workers(1) as workers:
        ...     workers.count
        1
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise DeltaflError(f"workers is {count}; write a whole number >= 1, best the number of cores")
        self.count = count
        self._runner: Any = None
        self._closed = False
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        if count > 1:
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def width(self) -> int:
        """How many jobs run at the same time."""
        return self.count

    def close(self) -> None:
        """End the processes; a closed pool cannot be used again."""
        self._closed = True
        self._runner = None
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def load(self, runner: object) -> None:
        """Send the runner of the next calls of ``map`` to the processes, unless they have it.

        Args:
            runner: Picklable if there is more than one worker; its torch tensors should be in shared memory.

        Raises:
            DeltaflError: If it cannot be pickled, or the pool is closed or broken.
        """
        if self._closed:
            raise DeltaflError("these workers are closed; make new ones with Workers(count)")
        if runner is self._runner:
            return
        if self.count > 1:
            with self._closed_on_failure():
                for index in range(self.count):
                    self._send(index, ("load", runner))
        self._runner = runner

    def map(self, method: str, model: Any, jobs: Sequence[Job], costs: Sequence[float]) -> list[Any]:
        """``[runner.method(model, *job) for job in jobs]``, side by side, the most costly jobs first.

        Args:
            method: Name of a method of the loaded runner.
            model: What all jobs share, such as the parameters of the global model; picklable.
            jobs: The other arguments of each call.
            costs: How long each job is, in any unit.

        Returns:
            The results in the order of ``jobs``.

        Raises:
            DeltaflError: If a worker died, or the job itself raised one.
            JobError: If a job raised another error in a worker.
        """
        if self._closed or self._runner is None:
            raise DeltaflError("these workers are closed or have no task; make new ones with Workers(count)")
        if self.count == 1:
            with one_thread():
                return [getattr(self._runner, method)(model, *job) for job in jobs]
        with self._closed_on_failure():
            return self._map_in_processes(method, model, jobs, costs)

    def _map_in_processes(self, method: str, model: Any, jobs: Sequence[Job], costs: Sequence[float]) -> list[Any]:
        results: list[Any] = [None] * len(jobs)
        waiting = sorted(range(len(jobs)), key=lambda index: costs[index])
        busy: dict[Connection[Any, Any], tuple[int, int]] = {}

        def hand_out(worker: int) -> None:
            if waiting:
                job = waiting.pop()
                busy[self._pipes[worker]] = worker, job
                self._send(worker, ("job", jobs[job]))

        for worker in range(min(self.count, len(jobs))):
            self._send(worker, ("model", method, model))
            hand_out(worker)
        while busy:
            for pipe in wait(list(busy)):
                worker, job = busy.pop(pipe)  # type: ignore[call-overload]
                results[job] = self._receive(worker)
                hand_out(worker)
        return results

    def _start(self) -> None:
        # Shared memory without a name: nothing stays in /dev/shm after a kill.
        if "file_descriptor" in torch_multiprocessing.get_all_sharing_strategies():  # type: ignore[no-untyped-call]
            torch_multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
        context = multiprocessing.get_context("spawn")
        with _interrupts_ignored():
            for index in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), name=f"deltafl-worker-{index}", daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def _send(self, worker: int, message: tuple[Any, ...]) -> None:
        try:
            self._pipes[worker].send(message)
        except OSError:
            raise self._died(worker) from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DeltaflError(
                f"the task cannot be sent to worker processes ({error}); "
                "define its model and loss at the top of a module, or use Workers(1)"
            ) from error

    def _receive(self, worker: int) -> Any:
        try:
            failure, result = self._pipes[worker].recv()
        except (EOFError, OSError):
            raise self._died(worker) from None
        if isinstance(failure, DeltaflError):
            raise failure
        if failure is not None:
            raise JobError(failure)
        return result

    def _died(self, worker: int) -> DeltaflError:
        self._processes[worker].join(timeout=5)
        code = self._processes[worker].exitcode
        return DeltaflError(
            f"worker process {worker} died (exit code {code}); if it was killed, memory may have run out: "
            "use fewer workers. In a script of your own, start them below: if __name__ == '__main__':"
        )

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the pool after an error or Ctrl-C: jobs may be under way whose results nobody will read."""
        try:
            yield
        except BaseException:
            self.close()
            raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread, as the workers do: sums of several threads would differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started here ignore Ctrl-C from the start: the parent handles it and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: "Connection[Any, Any]") -> None:
    """The life of a worker: answer jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    runner: Any = None
    method, model = "", None
    while True:
        try:
            kind, *content = pipe.recv()
            if kind == "load":
                (runner,) = content
            elif kind == "model":
                method, model = content
            else:
                (job,) = content
                pipe.send(_attempt(runner, method, model, job))
        except (EOFError, OSError):  # the parent closed the pipe or is gone
            return


def _attempt(runner: Any, method: str, model: Any, job: Job) -> tuple[DeltaflError | Failure | None, Any]:
    try:
        return None, getattr(runner, method)(model, *job)
    except DeltaflError as error:
        return DeltaflError(str(error)), None
    except Exception as error:
        return failure_of(error), None
