"""On which machines the cells of an experiment that is no sweep were computed: ``environment.json``, a list.

A cell names its machine by the place in that list, 0 if it names none, so that an experiment can go on elsewhere. (The
runs of a sweep hold their environment in their own records.)
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from deltafl.io import checked, read_json, read_json_lines, write_atomically

FILE = "environment.json"
_SHOWN = ("processor", "cores", "python", "numpy", "torch", "scipy", "system")


def place_here(folder: Path) -> int:
    """The place of this machine and its versions in the folder's list, where they are added if they are new."""
    known, here = _known(folder), _here()
    if here not in known:
        _write(folder, [*known, here])
        return len(known)
    return known.index(here)


def only_here(folder: Path) -> None:
    """Write down that all is computed on this machine."""
    _write(folder, [_here()])


def told(folder: Path) -> list[str]:
    """Hardware and versions as paragraphs of a page, with the number of cells on each if there are several."""
    known = [", ".join(f"{name} {found[name]}" for name in _SHOWN if name in found) for found in _known(folder)]
    if len(known) < 2:
        return [f"Hardware and versions: {text}." for text in known]
    cells = [cell for path in folder.glob("runs/*/*.jsonl") for cell in read_json_lines(path)]
    count = Counter(cell.get("environment", 0) for cell in cells)
    lines = (f"- {text} ({count[i]} {'cell' if count[i] == 1 else 'cells'})" for i, text in enumerate(known))
    return ["Hardware and versions:", "\n".join(lines)]


def _here() -> dict[str, Any]:
    from deltafl.simulation.records import environment

    return {key: value for key, value in environment().items() if key != "command"}


def _known(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    if not path.exists():
        return []
    content = read_json(path)
    kind, cure = list[dict[str, Any]], "delete it, and the page will not name what it named"
    known = checked(kind, content if isinstance(content, list) else [content], str(path), cure)
    return [{key: value for key, value in found.items() if key != "command"} for found in known]


def _write(folder: Path, known: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, json.dumps(known, indent=1) + "\n")
