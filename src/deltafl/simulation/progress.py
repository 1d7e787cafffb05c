"""How far runs are: bars in a terminal, a line in a notebook."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from .sweep import OnProgress, Progress


@contextmanager
def bars() -> Iterator["Bars"]:
    """Bars that appear with the first round, so that after a mistake only its sentence is
    printed.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    shown = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    try:
        yield shown
    finally:
        if shown.live.is_started:
            shown.stop()


@contextmanager
def sweep_progress() -> Iterator["OnProgress"]:
    """A bar for the rounds of many runs, with the names of those that are being played; a line
    in a notebook.
    """
    from rich.console import Console

    if Console().is_jupyter:
        yield _line_in_notebook()
        return
    with bars() as shown:
        bar = shown.add_task("rounds", total=None, shown="")

        def on_progress(progress: "Progress") -> None:
            shown.start()
            shown.update(
                bar,
                completed=progress.rounds_done,
                total=progress.rounds_total,
                shown=_text(progress),
            )

        yield on_progress


def _text(progress: "Progress") -> str:
    now = f"; now {', '.join(progress.running)}" if progress.running else ""
    return f"{progress.runs_done} of {progress.runs_total} runs{now}"


def _line_in_notebook() -> "OnProgress":
    from IPython.display import display  # a notebook has it

    line = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def on_progress(progress: "Progress") -> None:
        done = f"{progress.rounds_done} of {progress.rounds_total} rounds, {_text(progress)}"
        line.update({"text/plain": done}, raw=True)

    return on_progress
