"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``, ``reproduce``."""

from .experiments import interruptible, sweep_progress
from .main import main, run_app

__all__ = ["interruptible", "main", "run_app", "sweep_progress"]
