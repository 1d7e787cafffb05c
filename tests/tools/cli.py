"""The command line as a program of its own."""

import os
import subprocess
import sys
from pathlib import Path


def deltafl(*arguments: str, cwd: Path, columns: int = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``deltafl`` with these arguments in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "deltafl", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(columns), "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
