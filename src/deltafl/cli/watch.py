"""``deltafl watch``: look at what another process is doing."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from ..analysis.narrow import NarrowTable, console, plain, show
from ..errors import DeltaflError
from ..simulation.view.foreseen import Foreseen, read_plan
from ..simulation.view.live import Picture, page, picture
from ..store.files import write_with_folder
from .common import interruptible, path_name, say

app = typer.Typer(rich_markup_mode=None)
#: Seconds between two looks at most: a day.
MOST = 86_400
#: Seconds after which a file that is being replaced is looked at again.
_AGAIN = 0.5


@app.command()
def watch(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="the --out of run or compare, a federation's state_path, or a saved state",
            parser=path_name,
        ),
    ],
    every: Annotated[
        float, typer.Option(help="seconds between two looks", metavar="SECONDS", min=0.1)
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print it once and end")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="the --out of deltafl plan; shows the cost so far beside the one it foresaw",
            metavar="DIR",
            parser=path_name,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="write a page, too, which loads itself again",
            metavar="FILE.html",
            parser=path_name,
        ),
    ] = None,
) -> None:
    """Watch a run, a comparison or a federation while it goes on, from another terminal.

    It only reads, and ends when the run has ended.

    Example: deltafl watch my-results --once
    """
    if not every <= MOST:
        raise DeltaflError(f"--every is {every:g}; write seconds up to {MOST}, such as 2")
    foreseen = None if plan is None else read_plan(plan)
    # A slip must not replace a file of what is watched.
    if html is not None and html.suffix != ".html":
        raise DeltaflError(f"cannot write a page to {html}: the file must end in .html")
    look = partial(_look, place, foreseen, html, every, once)
    shown = look()
    if once:
        show(_drawn(shown))
        return
    with (
        interruptible(lambda: "what was watched goes on"),
        Live(_drawn(shown), console=console(), auto_refresh=False) as live,
    ):
        live.refresh()
        while not shown.is_over:
            time.sleep(every)
            shown = look()
            live.update(_drawn(shown), refresh=True)
    if html is not None:
        say(f"Open {html} in a browser.")


def _look(
    place: Path,
    foreseen: Foreseen | None,
    html: Path | None,
    every: float,
    once: bool,
) -> Picture:
    try:
        shown = picture(place, foreseen)
    except DeltaflError:
        # What is being replaced at this moment is whole a moment later.
        time.sleep(_AGAIN)
        shown = picture(place, foreseen)
    if html is not None:
        write_with_folder(html, page(shown._replace(is_over=shown.is_over or once), every))
    return shown


def _drawn(shown: Picture) -> RenderableType:
    several = len(shown.headings) > 2
    table = NarrowTable(
        shown.headings,
        shown.rows,
        folding=() if several else (1,),
        title=shown.title,
        show_header=several,
        box=None,
        pad_edge=False,
    )
    return Group(table, *(plain(remark, "yellow") for remark in shown.remarks))
