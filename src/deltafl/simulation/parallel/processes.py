"""Processes that call functions for this one.

They use one thread each, show their log here, and end with this one.
"""

import io
import logging.handlers
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from typing import IO, Any, NamedTuple

from ...calls import Named
from ...errors import OWN_ERRORS, DeltaflError, explained, in_one_line, log, require
from ...store.own_python import allow, allowed
from ...streams import ONE_AT_A_TIME
from ...tasks.registry import added_tasks, import_tasks, register, task_modules


class Failure(NamedTuple):
    """An error that is no ``DeltaflError``."""

    text: str  #: the traceback
    summary: str  #: the error in one line
    places: list[tuple[str, int | None]]  #: files and lines that it came through


class JobError(RuntimeError):
    """A call failed in another process; the traceback there is in the message."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)  # an error is sent as its class and these arguments
        self.failure = failure

    def __str__(self) -> str:
        return f"a run failed in another process:\n{self.failure.text}"


class LostRun(BrokenExecutor):
    """A worker of an executor went away with what it played, or never began; the text says why."""


def failure_of(error: BaseException) -> Failure:
    """The failure behind an error that is being handled, from another process or from this one."""
    if isinstance(error, JobError):
        return error.failure
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return Failure(traceback.format_exc(), in_one_line(error), places)


def as_sent(error: BaseException) -> DeltaflError | JobError:
    """An error that is being handled, as text: not every one can be sent, nor can tracebacks."""
    if isinstance(error, DeltaflError):
        return DeltaflError(str(error))
    return JobError(failure_of(error))


#: Of the 108 bytes of a socket's name Python's own part has 32.
_LONGEST_FOLDER = 70
_SHORT_FOLDERS = ("/tmp", "/var/tmp")

#: For processes side by side: more threads would only wait for cores.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}


class Processes(Executor):
    """An ``Executor`` of processes, which take calls when they are free, in a ``with`` statement.

    After an error or Ctrl-C, calls under way are ended at once. If a process dies, the calls that
    were submitted raise ``BrokenExecutor``; later ones go to new processes.

    Each process first calls ``start`` with the arguments; torch tensors in shared memory are passed
    without a copy.
    """

    def __init__(
        self,
        count: int,
        start: Callable[..., None] | None = None,
        *arguments: Any,
    ) -> None:
        with _started():
            context = _context()
            messages = context.Queue()
        self._listener = logging.handlers.QueueListener(messages, _Forward())
        self._listener.start()
        self._packer = Packer()
        tasks = packed([*added_tasks().values()])
        begin = messages, tasks, task_modules(), allowed(), start, arguments
        self._new_pool = partial(ProcessPoolExecutor, count, context, _begin, begin)
        self._pool = self._new_pool()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # An executor would wait for calls under way, which may be hours.
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=kind is not None)
        self._listener.stop()

    def submit(
        self,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        **named: Any,
    ) -> Future[Any]:
        """Call a function in a process; its errors become ``DeltaflError``s and ``JobError``s."""
        # By value where a script defines it: the processes do not import the script.
        call = self._packer.packed(partial(function, *arguments, **named))
        with _interrupts_wait(), _started(), _without_main(), variables(ONE_THREAD):
            try:
                return self._pool.submit(_attempt, call)
            except BrokenExecutor:  # a pool that has lost a process takes no calls
                log.warning("a process was killed; others take its place")
                self._pool = self._new_pool()
                return self._pool.submit(_attempt, call)


@contextmanager
def _started() -> Iterator[None]:
    """Start processes, one thread after the other, as their environment is this one's. An error of
    the system, such as a limit of their number, is a sentence that says how to do without.
    """
    try:
        with ONE_AT_A_TIME:
            yield
    # Python's own for a process of ``multiprocessing.Pool``, which may have none.
    except (AssertionError, OSError) as error:
        raise DeltaflError(
            f"other processes cannot be started here: {in_one_line(error)}; play everything in "
            "this one: processes=1 (--processes 1), and no workers"
        ) from error


def _with_short_names() -> None:
    """Have the sockets by which processes are started in a folder with a short name.

    Their names have at most 108 bytes, and ``TMPDIR`` is longer than that leaves on some clusters.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        tempfile.tempdir = next(filter(os.path.isdir, _SHORT_FOLDERS), before)
    try:
        util.get_temp_dir()  # type: ignore[attr-defined, unused-ignore]  # kept until this one ends
    finally:
        tempfile.tempdir = before


def _context() -> Any:
    """How processes are started here."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    _with_short_names()
    # A server that has imported torch, but has not used it, forks processes that are ready at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["deltafl.simulation.run"])
    # What is started here looks for no module, such as NumPy, in the folder that the command is
    # given in; programs that the user starts later do.
    with variables({"PYTHONSAFEPATH": "1", **ONE_THREAD}):
        resource_tracker.ensure_running()  # it lets Ctrl-C through again
        # Ctrl-C is this process's to handle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for as long as the block runs, but for those that the user has set.

    What starts in it inherits them; what this process loads later does not see them.
    """
    new = {name: value for name, value in given.items() if not os.environ.get(name)}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def packed(value: object) -> bytes:
    """A value with what a script or a notebook defines for it, which pickle would only name."""
    return _dumped(value, lambda _: None)


def _dumped(value: object, place_of: Callable[[object], int | None]) -> bytes:
    """A value without the parts that have a place elsewhere."""
    require("cloudpickle", "sim")
    content = io.BytesIO()
    # Whatever the object's own code raises as it is packed.
    with explained(
        "a task or a sampler of yours cannot be sent to other processes",
        cure="; use one process, and no executor",
    ):
        _pickler()(content, place_of).dump(value)
    return content.getvalue()


@cache
def _pickler() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        def __init__(self, file: IO[bytes], place_of: Callable[[object], int | None]) -> None:
            super().__init__(file)
            self._place_of = place_of

        def persistent_id(self, part: object) -> int | None:
            return self._place_of(part)

    return Pickler


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], parts: Sequence[object]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, place: int) -> object:
        return self._parts[place]


#: What several values may share.
_SHARED = (Named, types.FunctionType, type)
#: A packed value, and the parts that it shares with others.
Packed = tuple[bytes, bytes]
#: A part by its name, if it is a ``Named``, and its number in this process.
_Part = tuple[str, int]


class Packer:
    """Packs values of which many have the same parts; each set of parts is packed once.

    They are functions, classes and what settings name, for instance a task with all its data, of
    which every run would have a copy. What is no such part is copied with the value.
    """

    def __init__(self) -> None:
        #: With the parts themselves: while they are here no others get their numbers.
        self._known: dict[tuple[_Part, ...], tuple[list[object], bytes]] = {}

    def packed(self, value: object) -> Packed:
        """A value for ``unpacked``."""
        parts: list[object] = []
        place_of: dict[_Part, int] = {}

        def shared(part: object) -> int | None:
            if not isinstance(part, _SHARED):
                return None
            # Settings have copies of a name with one object.
            known = (str(part), id(part.of)) if isinstance(part, Named) else ("", id(part))
            if known not in place_of:
                place_of[known] = len(parts)
                parts.append(part)
            return place_of[known]

        content = _dumped(value, shared)
        # In one piece: functions of one script share its variables.
        key = tuple(place_of)
        if key not in self._known:
            self._known[key] = parts, packed(parts)
        return content, self._known[key][1]


def unpacked(packed: Packed) -> Any:
    """What a ``Packer`` has packed."""
    content, shared = packed
    parts = pickle.loads(shared)  # noqa: S301 - this process's parent has packed it
    return _Unpickler(io.BytesIO(content), parts).load()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C counts once the block is left: a process that starts in it can then be ended."""
    # Only the main thread gets interrupts, and may say what they do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[Any] = []
    before = signal.signal(
        signal.SIGINT,
        lambda *interrupt: interrupts.append(interrupt),
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts and callable(before):
            before(*interrupts[0])


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start here do not import the script again.

    It so needs no ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def result(future: Future[Any]) -> Any:
    """What a call returned or raised."""
    try:
        return future.result()
    except LostRun as lost:
        raise DeltaflError(
            f"a run was lost several times on the executor's workers, the last time by {lost}: "
            "look there, for instance whether deltafl is installed and memory is enough, and give "
            "the same command again"
        ) from None
    except BrokenExecutor:
        raise DeltaflError(
            "a process of this run died; if it was killed, memory may have run out: use fewer "
            "processes and give the same command again"
        ) from None


def _attempt(call: Packed) -> Any:
    cure = (
        "; put the folder of its file on PYTHONPATH, name it as FILE.py:NAME, or write processes=1"
    )
    try:
        with explained("another process cannot import what you gave", cure=cure):
            function = unpacked(call)
        return function()
    except OWN_ERRORS as error:
        raise as_sent(error) from None


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.handle(record)


def _begin(
    messages: Any,
    tasks: bytes,
    modules: Sequence[str],
    files: frozenset[Path] | None,
    start: Callable[..., None] | None,
    arguments: tuple[Any, ...],
) -> None:
    """In a new process: send its log to the parent, end with it, and know its tasks."""
    # Ctrl-C reaches all processes of a terminal; the parent ends these itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.setLevel(logging.INFO)
    log.addHandler(logging.handlers.QueueHandler(messages))
    # Else each message would be shown twice, here and by the parent.
    log.propagate = False
    allow(files)
    for module in modules:
        import_tasks(module)
    for spec in pickle.loads(tasks):  # noqa: S301 - this process's parent has packed them
        register(spec)
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # else two sweeps would write the same run
