"""``python -m reproduction NAME``: run what is missing of an experiment and write its page."""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from deltafl.errors import DeltaflError, require
from deltafl.io import write_atomically
from deltafl.simulation import (
    Job,
    OnProgress,
    Progress,
    RunRecord,
    RunStore,
    require_devices,
    run_jobs,
    task_of,
)

from .page import OwnPage, Rows, require_own, write, write_page
from .spec import Experiment, Sweep, load_experiment
from .text import sentence_case


@dataclass(frozen=True)
class Request:
    """What a user wants."""

    name: str
    scale: str
    # the experiment's folder; those whose runs it shows in another way are looked for beside it
    out: Path
    parts: tuple[str, ...] | None = None  # None for all of the scale
    seeds: int | None = None  # how many, instead of the experiment's own
    processes: int = 1
    data_dir: str | None = None
    device: str | None = None
    only_page: bool = False  # run nothing, write the page from what is there

    @property
    def own(self) -> dict[str, Any]:
        given = {"data_dir": self.data_dir, "seeds": self.seeds, "device": self.device}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def command(self) -> str:
        """The command for the page, without folders, processes and device, which differ from
        place to place.
        """
        parts = "".join(f" --part {part}" for part in self.parts or ())
        seeds = "" if self.seeds is None else f" --seeds {self.seeds}"
        return f"python -m reproduction {self.name} --scale {self.scale}{parts}{seeds}"


def reproduce(request: Request, on_progress: OnProgress) -> str:
    """Run what is missing, write the page, ``README.md`` beside table, picture and records, and
    return it.
    """
    experiment = load_experiment(request.name)
    require("matplotlib", "plot")
    require("scipy", "sim")
    require_own(request.out, experiment.name)
    if experiment.kind == "benchmark":
        from .benchmark.page import reproduce_benchmark

        return reproduce_benchmark(experiment, request, on_progress)
    return (_sweep if experiment.parts else _own_way)(experiment, request, on_progress)


def make_sweep(
    experiment: Experiment, scale: str, parts: Sequence[str] | None = None, **own: Any
) -> Sweep:
    names = experiment.part_names(scale) if parts is None else tuple(parts)
    return Sweep(
        experiment, scale, {part: experiment.comparison(part, scale, **own) for part in names}
    )


def _sweep(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    source = experiment
    folder = request.out
    if experiment.runs_of is not None:
        source = load_experiment(experiment.runs_of)
        folder = request.out.parent / experiment.runs_of
        require_own(folder, source.name)
    sweep = make_sweep(source, request.scale, request.parts, **request.own)
    if source is not experiment:
        view = experiment.view
        given = sweep.comparisons
        shown = [part for part in given if part in experiment.parts and view.shows(part)]
        sweep = replace(sweep, comparisons={part: given[part] for part in shown} or given)
    not_run = {} if request.only_page else run_sweep(sweep, folder, request.processes, on_progress)
    runs = [sweep.shown(record.run()) for record in records_of(sweep, folder)]
    if not runs:
        raise _no_run(folder)
    with RunStore(request.out).lock():
        return write_page(
            replace(sweep, experiment=experiment), runs, request.out, not_run, request.command
        )


def _no_run(folder: Path) -> DeltaflError:
    return DeltaflError(f"{folder} has no finished run yet; leave out --only-page to run some")


def records_of(sweep: Sweep, folder: Path) -> list[RunRecord]:
    store = RunStore(folder)
    return [record for job in sweep.jobs() if (record := store.get(job)) is not None]


def run_sweep(
    sweep: Sweep, folder: Path, processes: int, on_progress: OnProgress
) -> dict[str, str]:
    """Run what has no record in ``folder`` yet and pack the records; the parts left out for lack
    of data, and why.
    """
    store = RunStore(folder)
    jobs = list(sweep.jobs())
    waiting = [job for job in jobs if not store.get(job)]
    require_training(job.settings.device for job in waiting)
    not_run = _missing_data(waiting)
    if len(not_run) == len(sweep.comparisons):
        raise DeltaflError(
            next(iter(not_run.values()), "there is nothing to run: no part was chosen")
        )
    run_jobs([job for job in jobs if job.part not in not_run], folder, processes, on_progress)
    for part in sweep.comparisons:
        store.pack(part)
    return not_run


def require_training(devices: Iterable[str]) -> None:
    for package in ("torch", "safetensors"):
        require(package, "sim")
    require_devices(devices)


def _missing_data(waiting: Sequence[Job]) -> dict[str, str]:
    reasons = {}
    for part, settings in {job.part: job.settings for job in reversed(waiting)}.items():
        try:
            task_of(settings)
        except DeltaflError as error:
            reasons[part] = str(error)
    return reasons


def _own_way(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run an experiment that is no sweep, a module named like its kind; its rows are kept as they
    come.

    Its ``run`` yields steps done, steps in all, and a new row or None; its ``show`` draws and
    returns an ``OwnPage``.
    """
    if request.parts is not None or request.seeds is not None:
        raise DeltaflError(
            f"{experiment.name} has no parts and no seeds to choose; leave out --part and --seeds"
        )
    if request.only_page and not request.out.is_dir():
        raise _no_run(request.out)
    module = import_module(f".{experiment.kind}", __package__)
    path = request.out / "runs.jsonl.gz"
    settings = {**experiment.settings, **experiment.scales[request.scale].settings}
    request.out.mkdir(parents=True, exist_ok=True)
    with RunStore(request.out).lock():
        head, rows = read_rows(path)
        # Files of earlier versions hold some of the settings.
        if head and any(settings.get(key) != value for key, value in head["settings"].items()):
            raise DeltaflError(
                f"{path} holds rows of other settings; give its --scale or choose another --out"
            )
        if not request.only_page:
            for done, total, row in module.run(settings, rows):
                if row is not None:
                    rows.append(row)
                    write_rows(path, {"settings": settings}, rows)
                over = done == total
                on_progress(Progress(done, total, int(over), 1, () if over else (experiment.name,)))
        shown: OwnPage = module.show(settings, rows, request.out)
        blocks = [
            "## Verdict",
            f"**{sentence_case(shown.verdict)}.** {shown.number}",
            *shown.blocks,
        ]
        return write(
            experiment,
            shown._replace(blocks=blocks),
            request.scale,
            (1, 1),
            request.command,
            request.out,
        )


def read_rows(path: Path) -> tuple[dict[str, Any], Rows]:
    """The first line of a ``.jsonl.gz`` file, which holds what all rows share, and its rows;
    nothing without a file.
    """
    if not path.exists():
        return {}, []
    try:
        head, *rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise DeltaflError(
            f"{path} cannot be read: {error}; restore it, or delete it to run again"
        ) from None
    return head, rows


def write_rows(path: Path, head: dict[str, Any], rows: Rows) -> None:
    """Write what ``read_rows`` reads; the same rows give the same bytes."""
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in [head, *rows])
    write_atomically(path, gzip.compress(text.encode(), mtime=0))


def default_folder(name: str, scale: str) -> Path:
    """Where results go by default: the committed folder for the scale that it holds, ``runs``
    for the others.
    """
    return Path("results") / name if scale == "cpu" else Path("runs") / scale / name
