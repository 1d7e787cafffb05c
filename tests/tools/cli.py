"""The command line, as a program of its own or in this process."""

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from deltafl.cli.main import app, run_app
from tools.logs import log_as_before

Done = subprocess.CompletedProcess[str]


def deltafl(*arguments: str, cwd: Path, columns: int = 100, **environment: str) -> Done:
    """Run ``deltafl`` with these arguments in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "deltafl", *arguments],
        cwd=cwd,
        env={**os.environ, **_environment(columns, environment)},
        capture_output=True,
        text=True,
        check=False,
    )


def deltafl_here(*arguments: str, cwd: Path, columns: int = 100, **environment: str) -> Done:
    """The same without a new process, which spares a second of imports: for commands that start no
    process of theirs.

    What is no sentence for a person is raised here, instead of a traceback in ``stderr``.
    """
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    environ = mock.patch.dict(os.environ, _environment(columns, environment))
    with chdir(cwd), environ, redirect_stdout(out), redirect_stderr(err), log_as_before():
        try:
            run_app(app, list(arguments), "deltafl")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Done(arguments, code, out.getvalue(), err.getvalue())


def _environment(columns: int, own: dict[str, str]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "COLUMNS": str(columns), "NO_COLOR": "1", **own}
