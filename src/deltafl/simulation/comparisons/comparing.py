"""Playing a comparison: samplers on one task, seed by seed, under the same split, initial model and
minibatches.

The folder has settings and environment, a run directory for each run, ``summary.json``
(docs/reference/summary-schema.md), three pictures and ``report.html``. It grows: with more
samplers, seeds or rounds, what is missing is played.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ... import simulation
from ...analysis.runs import PICTURES
from ...analysis.verdict import says_little
from ...errors import DeltaflError, log
from ...types import Json
from ..callbacks.callback import OnRound, guarded
from ..callbacks.own_rules import OwnCallback, own_callbacks
from ..folder.continuing import continued, note_settings
from ..folder.directory import locked, recorded_settings
from ..parallel.elsewhere import Elsewhere
from ..parallel.player import Player, require_simulator
from ..parallel.processes import result
from ..parallel.sweep import play_jobs, side_by_side
from ..settings import CompareSettings
from ..view.progress import OnProgress
from .comparison import Comparison, jobs_of, places_of, together

#: What stands beside the runs in the end.
WRITTEN = ("summary.json", *PICTURES, "report.html")
#: What summary, pictures and report import: a second and a half, in which processes start.
_FOR_THE_END = ("scipy.special", "matplotlib.backends.backend_agg", "bokeh.plotting")


def require_no_others(folder: Path) -> None:
    """Refuse a folder that holds files which summary, pictures and report would replace."""
    for name in WRITTEN:
        if (folder / name).exists():
            raise DeltaflError(
                f"{folder / name} would be replaced and is of no comparison there; choose another "
                "--out"
            )


def run_comparison(
    settings: CompareSettings,
    out: Path,
    on_progress: OnProgress,
    processes: int = 1,
    on_round: OnRound = lambda _: None,
    report: bool = True,
    trust_code: bool = False,
    executor: Any = None,
    callbacks: Iterable[OwnCallback] = (),
) -> Comparison:
    """Play the runs that are not finished yet, and write summary, pictures and report; returns all
    that the folder has.

    Args:
        settings: Resolved settings. Samplers, seeds and rounds may be more than are recorded in
            ``out``, which stay: what is missing is played, and summary and pictures have all of it.
        out: The comparison's directory; runs that are recorded there continue from their
            checkpoints.
        on_progress: Called about once a second.
        processes: Runs side by side, >= 1; with more than 1, this process does not load torch.
        on_round: Called here for each round of each run; with more processes up to a second later.
        report: Whether ``report.html`` is written.
        trust_code: Whether Python files that only ``out`` names may be imported.
        executor: A ``concurrent.futures.Executor``, or one of submitit, that plays the runs in
            place of processes; it need not see ``out``.
        callbacks: Callbacks and rules of the user's, which end single runs (``own_rules.py``); each
            run has copies of its own.

    Raises:
        DeltaflError: If another process is playing in the directory, or a run is impossible.
    """
    require_simulator()
    yours = own_callbacks(callbacks)
    # Rates that were tuned for more samplers serve a comparison of some of them.
    unused = [label for label in settings.rates or {} if label not in settings.samplers]
    if unused:
        log.warning(
            "rates has some for %s, which samplers does not name: they are not used",
            ", ".join(unused),
        )
    with locked(out):
        if recorded_settings(out) is None:
            require_no_others(out)
        settings, before, code = continued(settings, out, trust_code)
        others = [label for label in settings.samplers if label not in (settings.rates or {})]
        if settings.rates and others:
            log.warning("rates has none for %s: the settings' rates are used", ", ".join(others))
        jobs = [job._replace(callbacks=yours) for job in jobs_of(settings)]
        workers: AbstractContextManager[Any] = side_by_side(min(processes, len(jobs)))
        if executor is not None:
            workers = Elsewhere(executor)
        with workers as pool:
            if executor is not None:
                # Checked here on the CPU, whatever device those elsewhere have.
                anywhere = {"device": "cpu", "precision": "float32"}
                with side_by_side(1):
                    data = check(
                        settings.model_copy(update=anywhere),
                        out,
                        before and before.model_copy(update=anywhere),
                    )
                known = {
                    job.settings.seed: place.environment()["data_crc32"]
                    for job, (place, run) in zip(jobs, places_of(out, jobs), strict=True)
                    if place.is_finished(run.rounds or 0)
                }
                pool.expect({**known, settings.seeds[0]: data["data_crc32"]})
            elif pool is None:
                data = check(settings, out, before)
            else:
                checking = pool.submit(check, settings, out, before)
                with suppress(ImportError):  # for the end, while the processes start
                    for name in _FOR_THE_END:
                        import_module(name)
                data = result(checking)
            note_settings(out, settings, before, data, code)
            for warning in says_little(settings.model_dump(), data):
                log.warning(warning)
            play_jobs(
                jobs,
                Player(out, keep_folders=True, code=code),
                pool,
                on_progress,
                guarded(on_round),
            )
        found = together([out], [(settings, places_of(out, jobs))])
    found.write(out, report)
    return found


def check(
    settings: CompareSettings,
    out: Path,
    before: CompareSettings | None,
) -> Json:
    """``check_comparison``; in a process of its own it is that process which loads torch."""
    return simulation.check_comparison(settings, out, before)
