"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``."""

from ..simulation.progress import sweep_progress
from .common import Out, interruptible
from .main import main, run_app

__all__ = ["Out", "interruptible", "main", "run_app", "sweep_progress"]
