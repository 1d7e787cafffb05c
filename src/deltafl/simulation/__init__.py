"""Simulated federations: local training, the experiment loop, its records and their resumption.

The names below are public; they are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import RunRecord, RunStore, read_record, record_of, require_same, what_is_run, write_record
    from .settings import CompareSettings, RunSettings, make_settings
    from .setup import plan_of, task_of
    from .sweep import Job, OnProgress, Progress, require_devices, run_job, run_jobs

__all__ = [
    "CompareSettings",
    "Job",
    "OnProgress",
    "Progress",
    "RunRecord",
    "RunSettings",
    "RunStore",
    "make_settings",
    "plan_of",
    "read_record",
    "record_of",
    "require_devices",
    "require_same",
    "run_job",
    "run_jobs",
    "task_of",
    "what_is_run",
    "write_record",
]

_MODULES = {
    "settings": {"CompareSettings", "RunSettings", "make_settings"},
    "setup": {"plan_of", "task_of"},
    "sweep": {"Job", "OnProgress", "Progress", "require_devices", "run_job", "run_jobs"},
}


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562): settings and records need no PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "record")
    value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
    return value
