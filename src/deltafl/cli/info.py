"""``deltafl info``: what to paste into a report of a fault."""

import json
from typing import Annotated

import typer

from ..simulation.folder.provenance import report
from .common import say

app = typer.Typer(rich_markup_mode=None)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print versions, hardware and settings, to paste into a report of a fault; no names of
    persons, machines or home folders.

    Example: deltafl info --json
    """
    found = report()
    if as_json:
        say(*json.dumps(found, indent=1).splitlines())
        return
    found["packages"] = ", ".join(f"{name} {it}" for name, it in found["packages"].items())
    missing = found.pop("missing").items()
    found["not installed"] = ", ".join(f"{' '.join(names)} [{extra}]" for extra, names in missing)
    set_ones = found.pop("variables").items()
    found["variables"] = " ".join(f"{name}={it}" for name, it in set_ones)
    for name, text in found.items():
        say(f"{name + ':':<15} {text or 'none'}")
