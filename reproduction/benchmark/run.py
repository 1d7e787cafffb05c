"""``deltafl reproduce benchmark``: tune, measure, show; part by part, all runs kept, so that it can stop any time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deltafl.errors import DeltaflError, require, unknown_name
from deltafl.simulation.record import RunStore, what_is_run
from deltafl.simulation.sweep import Job, OnProgress, Progress, require_devices, run_jobs

from ..configuration import write_config
from ..spec import Experiment
from .parts import Part, parts_of
from .results import Reasons, Store, gather, tests, tuning

if TYPE_CHECKING:
    from ..request import Request


def reproduce_benchmark(experiment: Experiment, request: "Request", on_progress: OnProgress) -> str:
    """Run what is missing and write the page of everything that is finished.

    ``--part`` chooses what is run; the page shows all parts.

    Raises:
        DeltaflError: If a part is unknown, nothing is finished, or the folder holds runs of other settings.
    """
    from .page import write_page

    require("scipy", "sim")
    parts = parts_of(experiment, request.scale, **request.own)
    chosen = chosen_parts(parts, request.parts)
    reasons: Reasons = {}
    if not request.only_page:
        reasons = run_parts(experiment, parts, chosen, request, on_progress)
    store = Store(request.out)
    results = [result for part in parts if (result := gather(part, store)) is not None]
    if not results:
        why = "; ".join(reasons.values()) or "leave out --only-page to run some"
        raise DeltaflError(f"{request.out} has no finished run yet: {why}")
    command = replace(request, parts=None).command
    with RunStore(request.out).lock():
        return write_page(experiment, request.scale, parts, results, request.out, reasons, command)


def run_parts(
    experiment: Experiment, parts: Sequence[Part], chosen: Sequence[Part], request: "Request", on_progress: OnProgress
) -> Reasons:
    """Run the chosen parts, one after the other.

    Returns:
        What cannot be run here, and why.
    """
    for package, extra in (("torch", "sim"), ("safetensors", "sim")):
        require(package, extra)
    store, reasons = Store(request.out), Reasons()
    progress = _Whole(chosen, on_progress)
    for part in chosen:
        methods = runnable(part, store, reasons)
        if methods:
            request.out.mkdir(parents=True, exist_ok=True)
            write_config(experiment, request.scale, {part.name: _plain(part) for part in parts}, request.out)
            _run_part(part, methods, store, request.processes, progress)
    return reasons


def _run_part(part: Part, methods: tuple[str, ...], store: Store, processes: int, progress: "_Whole") -> None:
    """Tune until the grid grows no more, then measure."""
    done = [job for job in tuning(part, methods, store) if store.tried(part, job)]
    store.pack(part, done)  # what was interrupted left records
    progress.add(done)
    while jobs := [job for job in tuning(part, methods, store) if store.tried(part, job) is None]:
        run_jobs(jobs, store.folder, processes, progress.of(jobs))
        store.pack(part, jobs)  # now: when the grid has grown, others may be finalists
        progress.add(jobs)
    jobs = tests(part, methods, store)
    run_jobs(jobs, store.folder, processes, progress.of(jobs))
    RunStore(store.folder).pack(part.name)
    progress.add(jobs)


def runnable(part: Part, store: Store, reasons: Reasons) -> tuple[str, ...]:
    """The methods of a part that can run here; why others cannot is added to ``reasons``.

    The data are looked for only where something is left to do.
    """
    from deltafl.simulation.setup import plan_of, task_of

    if all(store.tried(part, job) for job in tuning(part, part.methods, store)) and all(
        store.get(job) for job in tests(part, part.methods, store)
    ):
        return part.methods
    require_devices([part.common.device])
    try:
        task = task_of(part.common)
    except DeltaflError as error:
        reasons[part.name, ""] = str(error)
        return ()
    population = task.population(part.common.weights)
    kept = []
    for label in part.methods:
        settings = part.tuning_job(label, part.rates[0], part.tuning_seeds[0]).settings
        try:
            plan_of(settings, population, task)
        except DeltaflError as error:
            reasons[part.name, label] = str(error)
        else:
            kept.append(label)
    return tuple(kept)


class _Whole:
    """Progress over all stages: what is planned now; grids that grow make it more."""

    def __init__(self, parts: Sequence[Part], on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._rounds = self._runs = 0
        self._total_rounds = self._total_runs = 0
        for part in parts:
            for label in part.methods:
                tuning_job = part.tuning_job(label, part.rates[0], part.tuning_seeds[0])
                tried = len(part.rates) + (part.finalists or len(part.rates)) * (len(part.tuning_seeds) - 1)
                self._total_rounds += tried * (tuning_job.settings.rounds or 0) + part.seeds * part.rounds(label)
                self._total_runs += tried + part.seeds

    def of(self, jobs: Sequence[Job]) -> OnProgress:
        """What one stage tells, as part of the whole."""

        def tell(progress: Progress) -> None:
            rounds, runs = self._rounds + progress.rounds_done, self._runs + progress.runs_done
            total = max(self._total_rounds, self._rounds + progress.rounds_total)
            total_runs = max(self._total_runs, self._runs + progress.runs_total)
            self._on_progress(Progress(rounds, total, runs, total_runs, progress.running))

        return tell

    def add(self, jobs: Sequence[Job]) -> None:
        """A stage is finished."""
        self._rounds += sum(job.settings.rounds or 0 for job in jobs)
        self._runs += len(jobs)


def chosen_parts(parts: Sequence[Part], names: tuple[str, ...] | None) -> list[Part]:
    """The parts with these names, all for None.

    Raises:
        DeltaflError: If there is no such part.
    """
    known = {part.name: part for part in parts}
    for name in names or ():
        if name not in known:
            raise unknown_name("part", name, known)
    return [part for part in parts if names is None or part.name in names]


def _plain(part: Part) -> dict[str, object]:
    """Every setting of a part, as TOML can hold it."""
    run = what_is_run(part.common)
    for name in ("sampler", "local_lr", "seed"):
        run.pop(name)
    grid = {"methods": part.methods, "rates": part.rates, "extensions": part.extensions, "seeds": part.seeds}
    grid |= {"tuning_seeds": part.tuning_seeds, "rounds_of": part.rounds_of}
    perhaps = {name: getattr(part, name) for name in ("finalists", "tuning_rounds", "probe_every")}
    return grid | {name: value for name, value in perhaps.items() if value is not None} | run
