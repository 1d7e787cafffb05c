"""Trackers: ``on_round`` functions that write every round to TensorBoard, MLflow, W&B or trackio,
one run a sampler and seed.
"""

import hashlib
import io
import os
import re
import time
from abc import abstractmethod
from contextlib import AbstractContextManager, redirect_stdout, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from ...errors import OWN_ERRORS, entry, explained, printable, require
from ...store.files import below, make_folder, with_home
from ...store.lines import append_line, last_line
from ...types import AnyPath, Json
from ..folder.checkpoint import CURE
from ..folder.directory import recorded_settings
from ..folder.record import run_key
from .callback import RoundDone

#: What MLflow takes in no tag, and W&B in no project; dots alone are a folder for it.
_NO_TAG = re.compile(r"[^-\w.]|^\.+$")


class Tracker(AbstractContextManager["Tracker"]):
    """An ``on_round`` that writes to a tracker; use it in a ``with`` block, whose end writes what
    is still buffered.

    Rounds that are played again after an interruption are written once.

    Args:
        folder: The folder of the comparison or run (its ``out``), where a tracker keeps its files,
            too.
    """

    package: str  #: what is imported, and the extra that installs it

    def __init__(self, folder: AnyPath) -> None:
        require(self.package, self.package)
        self.folder = with_home(folder)
        self._open: Json = {}

    def __call__(self, done: RoundDone) -> None:
        key = run_key("", done.sampler, done.seed)
        opened = self._open
        if key not in opened:
            opened[key] = self.begin(key, done)
        self.write(opened[key], done.round, numbers(done))
        if "diverged" in done.line:
            self.end(opened.pop(key), "FAILED")
        # A run that stops by itself has no last round that is known before.
        elif done.round == done.rounds or "stopped" in done.line:
            self.end(opened.pop(key), "FINISHED")

    def mark(self, key: str) -> str:
        """A name for a run that finds it again after an interruption."""
        # A path could hold any sign.
        return hashlib.sha256(str(self.folder.resolve() / key).encode()).hexdigest()

    def about(self, done: RoundDone) -> Json:
        """The settings of a run."""
        settings = recorded_settings(self.folder) or {}
        settings |= {"sampler": done.sampler, "seed": done.seed}
        # Those of the whole comparison say nothing of one run.
        names = settings.keys() - {"samplers", "seeds"}
        return {name: settings[name] for name in sorted(names)}

    @abstractmethod
    def begin(self, key: str, done: RoundDone) -> Any:
        """Open a run at the first of its rounds that is played now."""

    @abstractmethod
    def write(self, run: Any, round: int, value: dict[str, float]) -> None:
        """Write the numbers of a round."""

    @abstractmethod
    def end(self, run: Any, status: str) -> None:
        """Close a run: ``FINISHED`` after its last round, ``FAILED`` where the work was interrupted
        or the model diverged.
        """

    def __exit__(self, *_: object) -> None:
        while self._open:
            with suppress(*OWN_ERRORS):  # what ended the block says more
                self.end(self._open.popitem()[1], "FAILED")


def numbers(done: RoundDone) -> dict[str, float]:
    """What trackers show of a round: ``test/accuracy``, ``test/loss`` and other metrics, and what
    ``rounds.jsonl`` has, ``round/...``.
    """
    values = {("round", name): value for name, value in done.line.items() if name != "round"}
    values["round", "seconds"] = done.seconds
    values |= {("test", name): value for name, value in done.test.items()}
    # Users may call metrics, and what callbacks add, anything.
    shown = {
        f"{part}/{_NO_TAG.sub('_', str(name))}": value for (part, name), value in values.items()
    }
    return {key: float(value) for key, value in shown.items() if isinstance(value, int | float)}


class TensorBoard(Tracker):
    """Writes event files into ``FOLDER/tensorboard``; look at them with
    ``tensorboard --logdir FOLDER``.
    """

    package = "tensorboard"

    def begin(self, key: str, done: RoundDone) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard forgets what earlier files have of this round and later ones.
        return SummaryWriter(below(self.folder, "tensorboard", key), purge_step=done.round)

    def write(self, run: Any, round: int, value: dict[str, float]) -> None:
        for tag, number in value.items():
            run.add_scalar(tag, number, round)

    def end(self, run: Any, status: str) -> None:
        run.close()


class MLflow(Tracker):
    """Writes to the store that ``MLFLOW_TRACKING_URI`` names, or else into the folder
    ``FOLDER/mlruns``.

    The experiment is ``MLFLOW_EXPERIMENT_NAME``, or else the folder's name; the settings are
    parameters of the runs.
    """

    package = "mlflow"

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(folder)
        # Nothing leaves this machine unasked.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._store = os.environ.get("MLFLOW_TRACKING_URI")
        if self._store:
            _ = self._client  # a store that is not there ends no run that has begun

    @cached_property
    def _client(self) -> Any:
        # At the first round: MLflow makes the folder, and what cannot be played leaves none.
        if not self._store:
            # A folder is the only store that needs no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._store = below(self.folder, "mlruns").resolve().as_uri()
        from mlflow import MlflowClient

        with explained(f"MLflow cannot use {self._store}", cure="; set MLFLOW_TRACKING_URI"):
            return MlflowClient(self._store)

    def begin(self, key: str, done: RoundDone) -> Any:
        client = self._client
        experiment = self._experiment()
        mark = self.mark(key)
        for run in client.search_runs([experiment], f"tags.deltafl_run = '{mark}'"):
            run_id = run.info.run_id
            client.update_run(run_id, "RUNNING")
            # A number that every round has: up to its last step all is written.
            history = client.get_metric_history(run_id, "round/seconds")
            return run_id, max((point.step for point in history), default=0)
        run = client.create_run(experiment, run_name=_title(done), tags={"deltafl_run": mark})
        run_id = run.info.run_id
        for setting, value in self.about(done).items():
            # Some of MLflow's stores refuse longer ones.
            client.log_param(run_id, setting, printable(value, limit=500))
        return run_id, 0

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or printable(self.folder.resolve().name)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name))
        return str(found.experiment_id)

    def write(self, run: Any, round: int, value: dict[str, float]) -> None:
        from mlflow.entities import Metric

        run_id, written = run
        # Rounds that are played again are in the store already.
        if round > written:
            now = int(1000 * time.time())
            points = [Metric(tag, number, now, round) for tag, number in value.items()]
            self._client.log_batch(run_id, points)

    def end(self, run: Any, status: str) -> None:
        self._client.set_terminated(run[0], status)


def _title(done: RoundDone) -> str:
    return printable(f"{done.sampler}, seed {done.seed}")


class Written(TypedDict):
    """A line of the log of what a tracker has, which cannot be asked itself."""

    round: int


class _Stream(NamedTuple):
    """A run of a tracker that only takes numbers."""

    run: Any
    log: Path
    written: int  #: the last round that it has from before an interruption


class _Streaming(Tracker):
    """Trackers that cannot be asked what they have: a log beside the runs says it."""

    def begin(self, key: str, done: RoundDone) -> _Stream:
        log = below(self.folder, self.package, f"{key}.jsonl")
        make_folder(log.parent)
        written = 0
        if log.exists():
            written = last_line(log, Written, CURE).get("round", 0)
        return _Stream(self.started(key, done), log, written)

    def write(self, run: _Stream, round: int, value: dict[str, float]) -> None:
        if round > run.written:
            run.run.log(value, step=round)
            append_line(run.log, {"round": round})

    @property
    def project(self) -> str:
        """A name that both take: that of the folder."""
        return _NO_TAG.sub("_", printable(self.folder.resolve().name))[:100] or "deltafl"

    @abstractmethod
    def started(self, key: str, done: RoundDone) -> Any:
        """The tracker's own run."""


class WandB(_Streaming):
    """Writes to Weights & Biases: offline into ``FOLDER/wandb`` unless ``WANDB_MODE`` says
    otherwise; ``wandb sync`` sends it.

    The project is ``WANDB_PROJECT``, or else the folder's name.
    """

    package = "wandb"

    def started(self, key: str, done: RoundDone) -> Any:
        import wandb

        # Nothing leaves this machine unasked.
        mode = os.environ.get("WANDB_MODE", "offline")
        with explained("W&B cannot begin a run", cure="; set WANDB_MODE=offline"):
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", self.project),
                dir=self.folder,
                id=self.mark(key)[:32],
                name=_title(done),
                config=self.about(done),
                mode=mode,
                resume="allow",
                reinit="create_new",  # runs are played side by side
                settings=wandb.Settings(console="off", silent=True),
            )

    def end(self, run: _Stream, status: str) -> None:
        run.run.finish(exit_code=int(status == "FAILED"))


class Trackio(_Streaming):
    """Writes to trackio's own store on this machine, which ``TRACKIO_DIR`` names; look at it with
    ``trackio show``. The project is the folder's name.
    """

    package = "trackio"
    _last: Any = None

    def started(self, key: str, done: RoundDone) -> Any:
        return self.mark(key)[:8], done, self.about(done)

    def write(self, run: _Stream, round: int, value: dict[str, float]) -> None:
        import trackio

        mark, done, about = run.run
        # A program has one run of trackio at a time: another one is continued by its name.
        if self._last is None or self._last[0] != mark:
            with redirect_stdout(io.StringIO()), explained("trackio cannot begin a run"):
                opened = trackio.init(
                    project=self.project,
                    name=f"{_title(done)} {mark}",
                    config={name: printable(about[name], limit=500) for name in about},
                    resume="allow",
                    embed=False,
                    auto_log_cpu=False,
                    auto_log_gpu=False,
                )
                self._last = (mark, opened)
        super().write(run._replace(run=self._last[1]), round, value)

    def end(self, run: _Stream, status: str) -> None:
        if self._last is not None and self._last[0] == run.run[0]:
            with redirect_stdout(io.StringIO()):
                self._last[1].finish()
            self._last = None


#: By the name of the package.
TRACKERS: dict[str, type[Tracker]] = {
    kind.package: kind for kind in (TensorBoard, MLflow, WandB, Trackio)
}


def tracker(name: str, folder: AnyPath) -> Tracker:
    """The tracker ``"tensorboard"``, ``"mlflow"``, ``"wandb"`` or ``"trackio"`` for a folder of
    results, an ``on_round``.

    Raises:
        DeltaflError: If there is no such tracker, or its package is not installed.

    Example:
        >>> with tracker("tensorboard", "my-results") as on_round:  # doctest: +SKIP
        ...     deltafl.compare("digits", seeds=3, out="my-results", on_round=on_round)
    """
    return entry("tracker", name, TRACKERS)(folder)
