"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``, ``reproduce``."""

from .main import main, run_app

__all__ = ["main", "run_app"]
