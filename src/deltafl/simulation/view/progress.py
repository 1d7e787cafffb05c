"""How far runs are: a bar in a terminal and in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from time import perf_counter
from typing import NamedTuple

from ...errors import printable

#: Seconds between two pictures of the bar in a notebook, whose browser may be far away.
SECONDS = 0.2


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
    """A bar for the rounds of many runs, with the names of those that are being played; nothing
    unless ``shown``.
    """
    if not shown:
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    if Console().is_jupyter:  # where Rich's own bar needs ipywidgets
        yield _bar_in_notebook()
        return
    bars = progress.Progress(
        "rounds",
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}", markup=False),
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
    running = printable(", ".join(progress.running))
    if progress.runs_total == 1:
        return running
    done = f"{progress.runs_done} of {progress.runs_total} runs"
    return f"{done}; now {running}" if running else done


def _bar_in_notebook() -> OnProgress:
    """A bar and a line in the output of a cell, with the time left; the line alone where HTML is
    not shown.
    """
    from IPython.display import display  # a notebook has it

    place = display(
        {"text/plain": ""},
        raw=True,
        display_id=True,
    )  # type: ignore[no-untyped-call]
    began: tuple[float, int] | None = None
    shown = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal began, shown
        now = perf_counter()
        done = progress.rounds_done
        left = progress.rounds_total - done
        if left and now < shown + SECONDS:
            return
        shown = now
        line = f"{done} of {progress.rounds_total} rounds, {_text(progress)}"
        began = began or (now, done)  # rounds of an earlier call took no time
        start, before = began
        if left and done > before:
            seconds = round((now - start) * left / (done - before))
            line += f"; {seconds // 60}:{seconds % 60:02} left"
        bar = f'<progress value="{done}" max="{progress.rounds_total}"></progress>'
        place.update({"text/plain": line, "text/html": f"{bar} {escape(line)}"}, raw=True)

    return on_progress
