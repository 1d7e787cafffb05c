"""Names that others give are text in tables, pictures and pages, whatever is in them."""

import io
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from deltafl.analysis import Run, Summary, comparison_table, summarise, write_report
from deltafl.analysis.narrow import NarrowTable, console
from deltafl.analysis.plots import draw_plots
from deltafl.analysis.report import Part
from deltafl.types import Judge
from tools.names import NAMES, is_plain
from tools.runs import make_run


def runs_with(names: list[str], metric: str) -> list[Run]:
    """Runs of samplers that are called so, of clients that are called so, and a metric."""
    values = np.linspace(0, 1, 10)
    return [
        make_run(
            name,
            seed=0,
            reach=3,
            metric=metric,  # type: ignore[arg-type]
            others_r={metric: values},
            judges=[Judge(metric, written=metric)],
            client_names=names[:4],
            settings={"task": metric, "samplers": names, "sample": 2},
        )
        for name in names
    ]


def summary_of(runs: list[Run]) -> Summary:
    names = [run.sampler for run in runs]
    environment = {"data": names[-1], names[0]: names[1]}
    return summarise(runs, 0.5, settings={"samplers": names}, environment=environment)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_tables_show_every_name_as_text(width: int, terminal: bool) -> None:
    for metric in ("temp[/C]", "\x1b[2J[bold]", "a\nb"):
        place = console(file=io.StringIO(), width=width, force_terminal=terminal)
        place.print(comparison_table(summary_of(runs_with(NAMES, metric))))
        table = NarrowTable(NAMES[:3], [NAMES[:3], NAMES[3:6]], title=NAMES[0], box=None)
        place.print(table)
        shown = place.file.getvalue()  # type: ignore[attr-defined]
        assert is_plain(shown)
        for name in ("[bold]x", ":smile:", "{x!r}", "[", "temp[/C]"):
            assert name in shown
        assert "\\x1b[2J" in shown


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = Counter[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags[tag] += 1


def test_a_page_has_the_same_elements_whatever_names_say(tmp_path: Path) -> None:
    found = []
    hostile = NAMES[::4]
    harmless = [f"name{place}" for place in range(len(hostile))]
    for names, metric in ((harmless, "metric"), (hostile, "</script><b id=evil>\x1b\u202e")):
        runs = runs_with(names, metric)
        path = tmp_path / "report.html"
        write_report([Part(metric, runs, summary_of(runs), metric)], path, metric)
        page = path.read_text()
        # The script that draws is packed.
        assert is_plain(page)
        # A command has an element for each word, and may break after commas.
        tags = _Tags(page).tags
        found.append({tag: n for tag, n in tags.items() if tag not in ("span", "wbr")})
    assert found[0] == found[1]


def test_pictures_show_dollars_and_draw_without_a_word(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place, metric in enumerate(("$\\frac{", "\x00/../x", "_$x$")):
            runs = runs_with(NAMES[place::12], metric)
            folder = tmp_path / str(place)
            written = draw_plots(runs, summary_of(runs), folder)
            assert all(path.parent == folder and path.is_file() for path in written)
