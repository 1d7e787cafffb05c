"""Processes that call functions for this one: they use one thread each, show their log here, and
end with this one.
"""

import logging
import logging.handlers
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, NamedTuple

from ..errors import DeltaflError, in_one_line, require
from ..tasks.registry import added_tasks, import_tasks, register, task_modules


class Failure(NamedTuple):
    """An error that is no ``DeltaflError``: traceback, error in one line, and the files and
    lines it came through.
    """

    text: str
    summary: str
    places: list[tuple[str, int | None]]


class _DiedError(DeltaflError):
    def __init__(self) -> None:
        super().__init__(
            "a process of this run died; if it was killed, memory may have run out: use fewer "
            "processes and give the same command again. In a script of your own, start below: "
            "if __name__ == '__main__':"
        )


class JobError(RuntimeError):
    """A call failed in another process; the traceback there is in the message."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"a run failed in another process:\n{failure.text}")
        self.failure = failure


def failure_of(error: Exception) -> Failure:
    """The failure behind an error that is being handled, from another process or from this one."""
    if isinstance(error, JobError):
        return error.failure
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return Failure(traceback.format_exc(), in_one_line(error), places)


class Processes(AbstractContextManager["Processes"]):
    """Processes that take calls, each when it is free. Use it in a ``with`` statement.

    After an error or Ctrl-C, calls under way are ended at once.

    Each first calls ``start`` with the arguments; torch tensors in shared memory are passed without
    a copy.
    """

    def __init__(
        self, count: int, start: Callable[..., None] | None = None, *arguments: Any
    ) -> None:
        # The processes inherit it: more threads would only wait for cores.
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
        context = _context()
        messages = context.Queue()
        self._sent = context.Queue()
        self.count = count
        self._listener = logging.handlers.QueueListener(messages, _Forward())
        self._listener.start()
        # A runner's functions may be those of a script, which its processes import; others receive
        # what they need.
        self._imports_main = start is not None
        specs = _packed([] if self._imports_main else [*added_tasks().values()])
        values = messages, self._sent, specs, task_modules(), start, arguments
        self._pool = ProcessPoolExecutor(count, context, _begin, values)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=kind is not None)
        self._listener.stop()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function of a module in one of the processes; ``result`` gives what it returned
        or raised.
        """
        try:
            with _interrupts_wait():
                if self._imports_main:
                    return self._pool.submit(_attempt, function, *arguments)
                with _without_main():
                    return self._pool.submit(_attempt_packed, function, _packed(arguments))
        except BrokenProcessPool:
            raise _DiedError from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DeltaflError(
                f"the task cannot be sent to worker processes ({error}); "
                "define its model and loss at the top of a module, or use one process"
            ) from error

    def received(self, is_all: Callable[[], bool] = lambda: True) -> Iterator[Any]:
        """What the calls have sent with ``send`` up to now; it waits for more until ``is_all``."""
        with suppress(queue.Empty):  # a process was killed
            while not (self._sent.empty() and is_all()):
                yield self._sent.get(timeout=10)


def _context() -> Any:
    """How processes are started here."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    # A server that has imported torch, but has not used it, forks processes that are ready at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deltafl.simulation.run"])
    resource_tracker.ensure_running()  # it lets Ctrl-C through again
    # Ctrl-C is this process's to handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _packed(value: object) -> bytes:
    """A value with what a script or a notebook defines for it, which pickle would only name."""
    require("cloudpickle", "sim")
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise DeltaflError(
            "a task or a sampler of yours cannot be sent to other processes "
            f"({in_one_line(error)}); write processes=1"
        ) from error
    return packed


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C counts once the block is left, so that a process which starts in it is known and
    can be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *interrupt: interrupts.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts and callable(before):
            before(*interrupts[0])


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start here do not import the script again, which so needs no
    ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def send(value: object) -> None:
    """In one of the processes: send a value to the process that has started it."""
    _to_parent[0].put(value)


def result(future: Future[Any]) -> Any:
    """What a call returned; a ``DeltaflError`` if it raised one or its process died, else a
    ``JobError``.
    """
    try:
        failure, found = future.result()
    except BrokenProcessPool:
        raise _DiedError from None
    if isinstance(failure, Failure):
        raise JobError(failure)
    if failure is not None:
        raise DeltaflError(failure)
    return found


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Failure | str | None, Any]:
    """Errors come back as values: tracebacks cannot be sent, nor can every exception."""
    try:
        return None, function(*arguments)
    except DeltaflError as error:
        return str(error), None
    except Exception as error:
        return failure_of(error), None


def _attempt_packed(
    function: Callable[..., Any], packed: bytes
) -> tuple[Failure | str | None, Any]:
    return _attempt(lambda: function(*pickle.loads(packed)))  # noqa: S301 - its parent has packed it


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)


#: In one of the processes: the queue of ``send``.
_to_parent: list[Any] = []


def _begin(
    messages: Any,
    sent: Any,
    specs: bytes,
    modules: Sequence[str],
    start: Callable[..., None] | None,
    arguments: tuple[Any, ...],
) -> None:
    """In a new process: send its log to the parent, end with it even if it is killed, and know
    its tasks.
    """
    _to_parent[:] = [sent]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = logging.getLogger("deltafl")
    log.setLevel(logging.INFO)
    log.addHandler(logging.handlers.QueueHandler(messages))
    log.propagate = False
    for module in modules:
        import_tasks(module)
    for spec in pickle.loads(specs):  # noqa: S301 - this process's parent has packed them
        register(spec)
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # else two sweeps would write the same run
