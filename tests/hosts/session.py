"""A program of a host, and the end of whatever it started."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil


def run_session(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a program in a folder; what it printed. Whatever it leaves running is stopped."""
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=550)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # those in sessions of their own
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = (folder / "output.log").read_text(errors="replace")
    assert code == 0, output[-3000:]
    return output
