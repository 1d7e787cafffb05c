"""Runs by executors of the user's: the same bits, lost workers, errors, names of executors."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltafl
from deltafl.calls import Named
from deltafl.cli.main import app, run_app
from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.simulation.parallel import elsewhere
from deltafl.simulation.parallel.executors import named_executor
from deltafl.simulation.parallel.processes import JobError, Packer, unpacked
from deltafl.tasks import registry

SETTINGS: dict[str, Any] = {"rounds": 2, "seeds": 1, "progress": False, "report": False}


OWN = """
from dataclasses import dataclass

import numpy as np
from beside import EVERY

from deltafl import Sampler, draw_cohort


@dataclass(frozen=True)
class Alternate(Sampler):
    def init(self, population):
        return ()

    def open(self, state, available_m, n, rng, oracle=None):
        score_m = 1.0 + np.arange(len(available_m)) % EVERY
        return draw_cohort(score_m, n, "pivotal", rng, available_m)

    def update(self, state, cohort, reports):
        return state
"""


class Threads(ThreadPoolExecutor):
    """Threads of this process, the smallest executor; the first calls may go wrong."""

    def __init__(self, *spoils: Callable[..., Any]) -> None:
        super().__init__(2)
        self.spoils = [*spoils]

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        if self.spoils:
            function = self.spoils.pop(0)
        return super().submit(function, *arguments, **named)


def played(out: Path, executor: Any, samplers: str = "uniform", **more: Any) -> dict[str, bytes]:
    deltafl.compare("digits", samplers, out=out, executor=executor, **{**SETTINGS, **more})
    return lines(out)


def lines(out: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in out.rglob("rounds.jsonl")}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What this process alone plays."""
    out = tmp_path_factory.mktemp("here") / "out"
    return played(out, None, "full,uniform", processes=1)


def lost(*_: Any) -> None:
    raise BrokenExecutor("the worker's machine went away")


def test_runs_are_those_of_this_process_and_lost_ones_are_played_again(
    here: dict[str, bytes], tmp_path: Path
) -> None:
    with Threads(lost, lost) as threads:
        assert played(tmp_path / "out", threads, "full,uniform") == here
    # Nothing is left but what a comparison has anyway.
    assert {file.name for file in (tmp_path / "out" / "runs").iterdir()} == {*here}
    assert len(deltafl.load(tmp_path / "out").summary()) == 2


def test_who_loses_every_run_is_told_so(tmp_path: Path) -> None:
    with (
        Threads(*[lost] * 9) as threads,
        pytest.raises(DeltaflError, match=r"the last time by .*machine went away.*look there"),
    ):
        played(tmp_path / "out", threads)


class Unreachable(Executor):
    """Whose futures cannot be asked: ``done`` or ``result`` raises, or is of another kind."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], Any]) -> None:
        self.future = types.SimpleNamespace(done=done, result=result, cancel=lambda: True)

    def submit(self, *_: Any, **__: Any) -> Any:
        return self.future


def raises(error: BaseException) -> Any:
    raise error


def no_cancel() -> None:
    raise OSError("the scheduler is gone")


@pytest.mark.parametrize("more", [{}, {"cancel": no_cancel}])
def test_an_error_is_told_though_nothing_can_be_cancelled(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    ends = [DeltaflError("no such run")]

    class Plain(Executor):
        def submit(self, *_: Any, **__: Any) -> Any:
            end = ends.pop() if ends else None
            return types.SimpleNamespace(done=lambda: end is not None, result=lambda: end, **more)

    with pytest.raises(DeltaflError, match=r"^no such run$"):
        played(tmp_path / "out", Plain(), "full,uniform")


@pytest.mark.parametrize("returned", [None, {}, types.SimpleNamespace(done=lambda: True)])
def test_what_is_no_future_is_told_at_once(tmp_path: Path, returned: Any) -> None:
    class Wrong(Executor):
        def submit(self, *_: Any, **__: Any) -> Any:
            return returned

    with pytest.raises(DeltaflError, match="it must return a future"):
        played(tmp_path / "out", Wrong())


class Keeping(Executor):
    """Keeps what it is given; each run is lost."""

    def __init__(self, after: Callable[[], Any] = lambda: None) -> None:
        self.parcels: list[elsewhere.Parcel] = []
        self.shared: list[bytes] = []
        self.after = after

    def submit(self, _: Any, /, *arguments: Any, **__: Any) -> Future[Any]:
        self.shared.append(arguments[0][1])
        self.parcels.append(unpacked(arguments[0]))
        self.after()
        future = Future[Any]()
        future.set_exception(BrokenExecutor("lost"))
        return future


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("EVERY = 2\n")
    Path("mine.py").write_text(OWN)
    return tmp_path


def test_a_run_that_is_played_again_has_the_same_code(home: Path) -> None:
    executor = Keeping(lambda: Path("beside.py").write_text("EVERY = 3\n"))
    with pytest.raises(DeltaflError, match="was lost several times"):
        played(home / "out", executor, "mine.py:Alternate")
    sent = [{str(name): name.of for name in parcel.files} for parcel in executor.parcels]
    assert len(sent) == 4 and all(each == sent[0] for each in sent)
    assert sent[0][str(home / "beside.py")] == b"EVERY = 2\n"


class Away(Threads):
    """Its worker is a machine without a folder of this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        def play() -> Any:
            away = self.folder.rename(self.folder.with_name("away"))
            try:
                return function(*arguments, **named)
            finally:
                away.rename(self.folder)

        return super().submit(play)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("mine.py", {"samplers": "{}:Alternate"}),
        ("mine.py", {"lr_schedule": "{}:half"}),
        ("costs.csv", {"client_costs": "{}", "samplers": "uniform(per_cost=True)", "clients": 2}),
    ],
)
def test_a_worker_says_which_absolute_path_it_lacks(
    tmp_path: Path, file: str, given: dict[str, Any]
) -> None:
    (folder := tmp_path / "data").mkdir()
    (folder / "beside.py").write_text("EVERY = 2\n")
    (folder / "mine.py").write_text(f"{OWN}\ndef half(round):\n    return 0.5\n")
    (folder / "costs.csv").write_text("hour,client,value\n0,0,1\n0,1,2\n")
    named: dict[str, Any] = {
        name: text.format(folder / file) if isinstance(text, str) else text
        for name, text in given.items()
    }
    with pytest.raises(DeltaflError, match=rf"a worker has no .*{file}, .*by a relative path"):
        played(tmp_path / "out", Away(folder), **{**named, "sample": 1})


def test_links_and_what_no_python_file_is_beside_the_named_one(home: Path) -> None:
    Path("there").mkdir()
    for name in ("mine.py", "beside.py"):
        Path(name).rename(Path("there", name))
    Path("mine.py").symlink_to("there/mine.py")
    Path("there/.#mine.py").symlink_to("somebody@host.123:456")  # as Emacs locks what it edits
    Path("there/old.py").mkdir()
    executor = Keeping()
    with pytest.raises(DeltaflError, match="was lost several times"):
        played(home / "out", executor, "mine.py:Alternate")
    parcel = executor.parcels[0]
    assert {str(name) for name in parcel.files} == {
        str(home / "there" / "mine.py"),
        str(home / "there" / "beside.py"),
    }
    assert parcel.links == {home / "mine.py": home / "there" / "mine.py"}


@dataclass(frozen=True)
class Wide(deltafl.Sampler):
    """With an option, so that labels differ with one class."""

    power: float = 1.0

    def init(self, population: Any) -> Any:
        return ()

    def open(self, state: Any, available_m: Any, n: int, rng: Any, oracle: Any = None) -> Any:
        return deltafl.draw_cohort(np.ones(len(available_m)), n, "pivotal", rng, available_m)

    def update(self, state: Any, cohort: Any, reports: Any) -> Any:
        return state


def test_data_of_a_task_are_packed_once_for_all_runs(tmp_path: Path) -> None:
    task = registry.make_task("digits", seed=0)
    executor = Keeping()
    with pytest.raises(DeltaflError, match="was lost several times"):
        deltafl.compare(
            task,
            ["full", "uniform"],
            out=tmp_path / "out",
            executor=executor,
            **{**SETTINGS, "seeds": 3},
        )
    first = executor.shared[0]
    assert len(first) > task.dataset.train_x.nbytes
    assert all(each is first for each in executor.shared)
    of_first = executor.parcels[0].job.settings.task
    assert isinstance(of_first, Named) and of_first.of.data == task.data


def test_names_with_one_object_stay_apart() -> None:
    packer = Packer()
    names = [Named("Wide", Wide), Named("Wide(power=2)", Wide), Named("Wide", Wide)]
    found = unpacked(packer.packed(names))
    assert found == names and [name.of for name in found] == [Wide] * 3


def test_the_device_is_that_of_the_workers(tmp_path: Path) -> None:
    executor = Keeping()
    with pytest.raises(DeltaflError, match="was lost several times"):
        played(tmp_path / "out", executor, device="cuda:7", precision="tf32")
    assert executor.parcels[0].job.settings.device == "cuda:7"


def test_an_empty_executor_is_not_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may come from a variable that nobody has set."""
    out = tmp_path / "out"
    words = ["compare", "--task", "digits", "--samplers", "uniform", "--seeds", "1"]
    with pytest.raises(SystemExit) as end:
        run_app(app, [*words, "--rounds", "1", "--out", str(out), "--executor", ""])
    assert end.value.code == 2 and "unknown executor ''" in capsys.readouterr().err
    assert not out.exists()


def test_a_worker_without_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("torch", "sim")

    monkeypatch.setattr(elsewhere, "require_simulator", missing)
    with pytest.raises(DeltaflError, match="on a worker this needs the package 'torch'"):
        elsewhere._play(tmp_path)


def test_what_a_user_has_put_into_a_folder_of_a_run_stays_as_it_is_now(tmp_path: Path) -> None:
    for name in ("old/notes.txt", "old/kept/model.pt", "new/notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    elsewhere._move_rest(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "old").exists()
    for name in ("notes.txt", "kept/model.pt"):
        assert (tmp_path / "new" / name).read_text() == f"old/{name}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mine.py", "folder/../mine.py", "link.py"])
def test_an_error_of_own_code_names_the_file_that_is_here(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where temporary folders are behind a link, as on macOS."""
    for folder in ("folder", "temporary"):
        Path(folder).mkdir()
    Path("linked").symlink_to("temporary")
    Path("link.py").symlink_to("mine.py")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "linked"))
    Path("mine.py").write_text(OWN.replace("return state", "raise KeyError('oops')"))
    with Threads() as threads, pytest.raises(JobError, match="oops") as caught:
        played(home / "out", threads, f"{name}:Alternate")
    places = {Path(file).resolve() for file, _ in caught.value.failure.places}
    assert home / "mine.py" in places


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (Unreachable(lambda: raises(OSError("unreachable")), dict), "last time by OSError: unr"),
        (Unreachable(lambda: True, lambda: raises(SystemExit(3))), "the last time by SystemExit"),
        (Unreachable(lambda: True, lambda: "done"), "returned a str in place of a run's files"),
    ],
)
def test_futures_that_raise_anything_anywhere_end_a_comparison(
    tmp_path: Path, executor: Executor, words: str
) -> None:
    with pytest.raises(DeltaflError, match=words):
        played(tmp_path / "out", executor)


class Waiting(Executor):
    """Nobody plays what it is given."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


def test_ctrl_c_cancels_what_has_not_begun(tmp_path: Path) -> None:
    executor = Waiting()

    def press() -> None:
        while len(executor.futures) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "out", executor, "full,uniform")
    assert len(executor.futures) == 2 and all(each.cancelled() for each in executor.futures)


def test_errors_of_a_run_and_other_versions_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fails(*_: Any) -> DeltaflError:
        calls.append(1)
        return DeltaflError("no such run")

    with Threads(fails) as threads, pytest.raises(DeltaflError, match=r"^no such run$"):
        played(tmp_path / "out", threads)
    assert len(calls) == 1
    monkeypatch.setattr(elsewhere, "__version__", "0.0.1")
    found = elsewhere.played((b"", b""), "9.9", "")
    assert "a worker has deltafl 0.0.1, and this machine 9.9" in str(found)


@pytest.mark.thorough
def test_a_run_goes_on_from_the_checkpoint_that_is_here(
    here: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    played(out, None, processes=1, rounds=1)
    with Threads() as threads:
        assert played(out, threads) == {"uniform-seed0": here["uniform-seed0"]}


@pytest.mark.thorough
def test_files_of_the_users_go_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("EVERY = 2\n")
    Path("mine.py").write_text(OWN)
    rows = "\n".join(f"{x},{x % 3},{'ab'[x % 2]}" for x in range(120))
    Path("table.csv").write_text(f"size,who,kind\n{rows}\n")
    Path("speeds.csv").write_text("seconds,megabits\n1,1\n2,1\n3,1\n")
    Path("costs.csv").write_text("hour,client,value\n0,0,1\n0,1,2\n0,2,3\n")
    folders: list[Path] = []
    for executor in (None, Threads()):
        out = Path(f"out{len(folders)}")
        deltafl.compare(
            "table.csv",
            "mine.py:Alternate",
            label="kind",
            column="who",
            sample=1,
            speeds="speeds.csv",
            client_costs="costs.csv",
            out=out,
            processes=1,
            executor=executor,
            **SETTINGS,
        )
        folders.append(out)
    assert lines(folders[0]) == lines(folders[1])


@pytest.mark.thorough
def test_tasks_that_a_job_does_not_name_stay_here(
    here: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_on_this_machine")
    exec("def make(**settings): ...", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    make = vars(module)["make"]
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    registry.register(replace(registry.find_task("synthetic"), name="theirs", make=make))
    with Threads() as threads:
        assert played(tmp_path / "out", threads) == {"uniform-seed0": here["uniform-seed0"]}


def test_workers_of_different_data_are_refused(tmp_path: Path) -> None:
    player = elsewhere.Elsewhere(Threads())
    out = tmp_path / "out"
    played(out, None, processes=1)
    place = out / "runs" / "uniform-seed0"
    files = {file.relative_to(place): file.read_bytes() for file in place.iterdir()}
    (place / "of-mine").mkdir()
    (place / "of-mine" / "notes.txt").write_text("mine")
    player.expect({0: "another"})
    with player, pytest.raises(DeltaflError, match="other data for seed 0"):
        player._take(files, place, 0)
    # What was there stays.
    assert (place / "rounds.jsonl").exists() and len([*place.parent.iterdir()]) == 1
    player._data.clear()
    player._take(files, place, 0)
    assert {file: (place / file).read_bytes() for file in files} == files
    assert (place / "of-mine" / "notes.txt").read_text() == "mine"
    assert len([*place.parent.iterdir()]) == 1


def test_what_is_no_executor_or_names_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match=r"executor is str; it must be a concurrent.futures"):
        played(tmp_path / "out", "dask")
    with pytest.raises(DeltaflError, match="executor is type"):
        played(tmp_path / "class", Threads)
    closed = Threads()
    closed.shutdown()
    with pytest.raises(DeltaflError, match=r"takes no runs: .*after shutdown"):
        played(tmp_path / "closed", closed)
    for text, why in {
        "dusk:1": "executor.*dask",
        "dask": "needs its scheduler's address",
        "local:partition": "write options of sbatch such as",
        "slurm:partition=cpu": "slurm takes no runs like this.*slurm",
        "local:x=1": "local takes no runs like this.*'x'",
        "local:timeout_min=soon": "local takes no runs like this.*timeout_min",
    }.items():
        pytest.importorskip("submitit")
        with (
            pytest.raises(DeltaflError, match=why) as caught,
            named_executor(text, tmp_path / "results"),
        ):
            pass
        assert len(str(caught.value)) < 300
        assert not (tmp_path / "results").exists()
    with Threads() as threads, pytest.raises(DeltaflError, match="leave it out with an executor"):
        played(tmp_path / "out", threads, "fedvarp", memory_path=str(tmp_path / "memory"))


@pytest.fixture
def client() -> Iterator[Any]:
    """A Dask cluster of two processes."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(  # type: ignore[no-untyped-call, unused-ignore]
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_plays_a_comparison_though_a_worker_is_killed(
    client: Any, here: dict[str, bytes], tmp_path: Path
) -> None:
    killed: list[str] = []

    def kill_one_that_plays() -> None:
        pids = client.run(os.getpid)
        while not killed:
            busy = [worker for worker, keys in client.processing().items() if keys]
            for worker in busy[:1]:
                os.kill(pids[worker], signal.SIGKILL)
                killed.append(worker)
            time.sleep(0.05)

    killer = threading.Thread(target=kill_one_that_plays)
    killer.start()
    assert played(tmp_path / "out", client.get_executor(), "full,uniform") == here
    killer.join()
    assert killed
    # As the command line names it.
    out = tmp_path / "named"
    with named_executor(f"dask:{client.scheduler.address}", out) as executor:
        assert played(out, executor) == {"uniform-seed0": here["uniform-seed0"]}


@pytest.mark.filterwarnings("ignore")
def test_submitit_leaves_the_logging_of_a_program_alone(tmp_path: Path) -> None:
    """In a program of its own: submitit configures logging when it is imported first."""
    pytest.importorskip("submitit")
    program = tmp_path / "program.py"
    program.write_text(
        """
import logging, os, sys
from pathlib import Path
from deltafl.simulation.parallel.executors import named_executor

handler = logging.FileHandler("log")
logging.basicConfig(handlers=[handler], level="INFO")
with named_executor("local", Path("results")):
    assert "submitit" in sys.modules
assert handler.stream is not None
assert "SUBMITIT_LOG_LEVEL" not in os.environ
"""
    )
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_submitit_plays_a_comparison(here: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    out = tmp_path / "out"
    with named_executor("local:timeout_min=5", out) as executor:
        assert not isinstance(executor, Executor)
        assert played(out, executor) == {"uniform-seed0": here["uniform-seed0"]}
