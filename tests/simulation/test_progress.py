"""The bar in a notebook: drawn seldom, always at the end, and right about the time left."""

from typing import Any

import pytest

from deltafl.simulation.view import progress
from deltafl.simulation.view.progress import Progress, sweep_progress


class Cell:
    """The output of a cell, and the clock."""

    is_jupyter = True

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.now = 1000.0

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.shown.append(data)


def test_a_notebook_shows_a_bar_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display = pytest.importorskip("IPython.display")
    cell = Cell()

    def shown_in_the_cell(data: Any, **_: Any) -> Cell:
        return cell

    monkeypatch.setattr(display, "display", shown_in_the_cell)
    monkeypatch.setattr("rich.console.Console", Cell)
    monkeypatch.setattr(progress, "perf_counter", lambda: cell.now)
    with sweep_progress() as on_progress:
        for done in range(40, 101):  # 40 rounds were there, the others take a sixteenth of a second
            finished = done == 100
            running = () if finished else ("<uniform>, seed 0",)
            on_progress(Progress(done, 100, int(finished), 2, running))
            cell.now += 1 / 16
    assert len(cell.shown) == 16
    first, second, *_, last = cell.shown
    assert "left" not in first["text/plain"]
    begin = "44 of 100 rounds, 0 of 2 runs; now <uniform>, seed 0; 0:04 left"
    assert second["text/plain"] == begin
    assert (
        "&lt;uniform&gt;" in second["text/html"] and 'value="44" max="100"' in second["text/html"]
    )
    assert last["text/plain"] == "100 of 100 rounds, 1 of 2 runs"
