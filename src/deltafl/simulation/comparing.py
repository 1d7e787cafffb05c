"""Playing a comparison: samplers on one task, seed by seed, under the same split, initial model and
minibatches.

The folder has settings and environment, a run directory for each run, ``summary.json``
(docs/summary-schema.md), three pictures and ``report.html``. It grows: with more samplers, seeds or
rounds, what is missing is played.
"""

import logging
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ..analysis.numbers import Summary
from ..analysis.plots import PICTURES
from ..errors import DeltaflError
from .callback import OnRound, guarded
from .checking import check_comparison, note_settings, recorded_before
from .comparison import Comparison, jobs_of, places_of, together
from .directory import locked
from .own_code import require_same_code
from .processes import result
from .progress import OnProgress
from .settings import CompareSettings, grown
from .sweep import Player, play_jobs, require_simulator, side_by_side

#: What stands beside the runs in the end.
WRITTEN = ("summary.json", *PICTURES, "report.html")
#: What summary, pictures and report import: a second and a half, in which processes start.
_FOR_THE_END = ("scipy.special", "matplotlib.backends.backend_agg", "bokeh.plotting")


def run_comparison(
    settings: CompareSettings,
    out: Path,
    on_progress: OnProgress,
    processes: int = 1,
    on_round: OnRound = lambda _: None,
    report: bool = True,
) -> Summary:
    """``play_comparison``, then write the summary, the pictures and perhaps the report."""
    return play_comparison(settings, out, on_progress, processes, on_round).write(out, report)


def play_comparison(
    settings: CompareSettings, out: Path, on_progress: OnProgress, processes: int, on_round: OnRound
) -> Comparison:
    """Play the runs that are not finished yet; returns all that the folder has.

    Args:
        settings: Resolved settings. Samplers, seeds and rounds may be more than are recorded in
            ``out``, which stay: what is missing is played, and summary and pictures have all of it.
        out: The comparison's directory; runs that are recorded there continue from their
            checkpoints.
        on_progress: Called about once a second.
        processes: Runs side by side, >= 1; with more than 1, this process does not load torch.
        on_round: Called here for each round of each run; with more processes up to a second later.

    Raises:
        DeltaflError: If another process is playing in the directory, or a run is impossible.
    """
    require_simulator()
    with locked(out):
        before = recorded_before(settings, out)
        for name in WRITTEN:
            if before is None and (out / name).exists():
                raise DeltaflError(
                    f"{out / name} would be replaced and is of no comparison there; choose another "
                    "--out"
                )
        if before is not None:
            settings = grown(before, settings)
        require_same_code(out, settings)
        others = [label for label in settings.samplers if label not in (settings.rates or {})]
        if settings.rates and others:
            logging.getLogger("deltafl").warning(
                "rates has none for %s: the settings' rates are used", ", ".join(others)
            )
        jobs = jobs_of(settings)
        with side_by_side(min(processes, len(jobs))) as pool:
            if pool is None:
                data = check_comparison(settings, out, before)
            else:
                checking = pool.submit(check_comparison, settings, out, before)
                with suppress(ImportError):  # for the end, while the processes start
                    for name in _FOR_THE_END:
                        import_module(name)
                data = result(checking)
            note_settings(out, settings, before, data)
            play_jobs(jobs, Player(out, keep_folders=True), pool, on_progress, guarded(on_round))
        return together([out], [(settings, places_of(out, jobs))])
