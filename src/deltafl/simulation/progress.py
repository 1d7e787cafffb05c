"""How far runs are: bars in a terminal, a line in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a sweep is: rounds played and rounds in all, runs done and in all, and the runs
    being played.
    """

    rounds_done: int
    rounds_total: int
    runs_done: int
    runs_total: int
    running: tuple[str, ...]


OnProgress = Callable[[Progress], None]


@contextmanager
def sweep_progress(shown: bool = True) -> Iterator[OnProgress]:
    """A bar for the rounds of many runs, with the names of those that are being played; a line
    in a notebook, and nothing unless ``shown``.
    """
    if not shown:
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    if Console().is_jupyter:
        yield _line_in_notebook()
        return
    bars = progress.Progress(
        "rounds",
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        "{task.description}",
        progress.TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    bar = bars.add_task("", total=None)

    def on_progress(now: Progress) -> None:
        bars.start()  # with the first round: after a mistake only its sentence is printed
        bars.update(
            bar,
            completed=now.rounds_done,
            total=now.rounds_total,
            description=_text(now),
        )

    try:
        yield on_progress
    finally:
        if bars.live.is_started:
            bars.stop()


def _text(progress: Progress) -> str:
    running = ", ".join(progress.running)
    if progress.runs_total == 1:
        return running
    done = f"{progress.runs_done} of {progress.runs_total} runs"
    return f"{done}; now {running}" if running else done


def _line_in_notebook() -> OnProgress:
    from IPython.display import display  # a notebook has it

    line = display(
        {"text/plain": ""},
        raw=True,
        display_id=True,
    )  # type: ignore[no-untyped-call]

    def on_progress(progress: Progress) -> None:
        done = f"{progress.rounds_done} of {progress.rounds_total} rounds, {_text(progress)}"
        line.update({"text/plain": done}, raw=True)

    return on_progress
