"""Simulated federations: local training, the experiment loop, its records and their resumption.

The names below are public; they are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import Callback, LiveRun, PlayedRound, RoundDone
    from .comparing import run_comparison
    from .comparison import joined
    from .directory import DivergedError, RunDirectory, environment, new_folder, refusals
    from .export import export_model
    from .progress import OnProgress, Progress
    from .record import (
        Job,
        RunRecord,
        RunStore,
        read_record,
        record_of,
        require_same,
        what_is_run,
        write_record,
    )
    from .run import run_experiment, run_single
    from .settings import CompareSettings, RunSettings, make_settings
    from .setup import engine_of, plan_of, task_of
    from .sweep import count_processes, require_devices, run_jobs
    from .tracking import tracker
    from .tune import (
        NEVER,
        Doubling,
        Grid,
        Score,
        Search,
        Trial,
        TuneSettings,
        mean_score,
        rounds_to_threshold,
        tune_rates,
    )

_MODULES = {
    name: module
    for module, names in {
        "callback": "Callback LiveRun PlayedRound RoundDone",
        "comparing": "run_comparison",
        "comparison": "joined",
        "directory": "DivergedError RunDirectory environment new_folder refusals",
        "export": "export_model",
        "record": (
            "Job RunRecord RunStore read_record record_of require_same what_is_run write_record"
        ),
        "run": "run_experiment run_single",
        "settings": "CompareSettings RunSettings make_settings",
        "setup": "engine_of plan_of task_of",
        "progress": "OnProgress Progress",
        "sweep": "count_processes require_devices run_jobs",
        "tracking": "tracker",
        "tune": (
            "NEVER Doubling Grid Score Search Trial TuneSettings mean_score "
            "rounds_to_threshold tune_rates"
        ),
    }.items()
    for name in names.split()
}

__all__ = [
    "NEVER",
    "Callback",
    "CompareSettings",
    "DivergedError",
    "Doubling",
    "Grid",
    "Job",
    "OnProgress",
    "PlayedRound",
    "Progress",
]
__all__ += [
    "LiveRun",
    "RoundDone",
    "RunDirectory",
    "RunRecord",
    "RunSettings",
    "RunStore",
    "Score",
    "Search",
    "Trial",
]
__all__ += [
    "TuneSettings",
    "count_processes",
    "engine_of",
    "environment",
    "export_model",
    "joined",
    "make_settings",
]
__all__ += [
    "mean_score",
    "new_folder",
    "plan_of",
    "read_record",
    "record_of",
    "refusals",
]
__all__ += [
    "require_devices",
    "require_same",
    "rounds_to_threshold",
    "run_comparison",
    "run_experiment",
    "run_jobs",
]
__all__ += [
    "run_single",
    "task_of",
    "tracker",
    "tune_rates",
    "what_is_run",
    "write_record",
]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562): settings and records need no PyTorch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
