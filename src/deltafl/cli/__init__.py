"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``."""

from .main import main

__all__ = ["main"]
