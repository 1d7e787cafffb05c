"""Bars for the rounds of runs: in a terminal, and in a notebook that has ``ipywidgets``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from .sweep import OnProgress, Progress


@contextmanager
def bars() -> Iterator["Bars"]:
    """Bars that appear with the first round, so that after a mistake only its sentence is printed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=console.is_jupyter and find_spec("ipywidgets") is None,  # rich would warn each time
    )
    try:
        yield shown
    finally:
        if shown.live.is_started:
            shown.stop()


@contextmanager
def sweep_progress() -> Iterator["OnProgress"]:
    """A bar for the rounds of many runs, with the names of those that are being played."""
    with bars() as shown:
        bar = shown.add_task("rounds", total=None, shown="")

        def on_progress(progress: "Progress") -> None:
            shown.start()
            now = f"; now {', '.join(progress.running)}" if progress.running else ""
            text = f"{progress.runs_done} of {progress.runs_total} runs{now}"
            shown.update(bar, completed=progress.rounds_done, total=progress.rounds_total, shown=text)

        yield on_progress
