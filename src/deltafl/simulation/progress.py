"""How far runs are: bars in a terminal, a line in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


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
def bars() -> Iterator[Any]:
    """Bars of Rich. They appear with the first round, so that after a mistake only its sentence is
    printed.
    """
    from rich import progress
    from rich.console import Console

    shown = progress.Progress(
        "{task.description:<18}",
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        "{task.fields[shown]}",
        progress.TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    try:
        yield shown
    finally:
        if shown.live.is_started:
            shown.stop()


@contextmanager
def sweep_progress(shown: bool = True) -> Iterator[OnProgress]:
    """A bar for the rounds of many runs, with the names of those that are being played; a line
    in a notebook, and nothing unless ``shown``.
    """
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console

    if Console().is_jupyter:
        yield _line_in_notebook()
        return
    with bars() as bars_:
        bar = bars_.add_task("rounds", total=None, shown="")

        def on_progress(progress: Progress) -> None:
            bars_.start()
            bars_.update(
                bar,
                completed=progress.rounds_done,
                total=progress.rounds_total,
                shown=_text(progress),
            )

        yield on_progress


def _text(progress: Progress) -> str:
    done = f"{progress.runs_done} of {progress.runs_total} runs"
    if not progress.running:
        return done
    return f"{done}; now {', '.join(progress.running)}"


def _line_in_notebook() -> OnProgress:
    from IPython.display import display  # a notebook has it

    line = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def on_progress(progress: Progress) -> None:
        done = f"{progress.rounds_done} of {progress.rounds_total} rounds, {_text(progress)}"
        line.update({"text/plain": done}, raw=True)

    return on_progress
