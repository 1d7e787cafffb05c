"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``, ``reproduce``."""

from .experiments import interruptible, sweep_progress
from .main import main, run_app
from .options import Out

__all__ = ["Out", "interruptible", "main", "run_app", "sweep_progress"]
