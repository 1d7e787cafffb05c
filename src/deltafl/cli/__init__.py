"""The command line: ``deltafl compare``, ``run``, ``audit``, ``samplers``, ``tasks``, ``data``."""

import sys

try:
    from ..simulation.view.progress import sweep_progress
    from .common import Out, interruptible
    from .main import main, run_app
except KeyboardInterrupt:  # programs alone import this, and loading takes half a second
    sys.stderr.write("interrupted; give the same command again\n")
    sys.exit(130)

__all__ = ["Out", "interruptible", "main", "run_app", "sweep_progress"]
