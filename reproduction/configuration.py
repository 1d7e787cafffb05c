"""``config.toml`` of a results folder: every setting of every part that the folder has."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from deltafl.io import write_atomically
from deltafl.simulation import RunStore

from .spec import Experiment


def write_config(experiment: Experiment, scale: str, parts: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write the settings of these parts, beside those of the experiment's other parts that the file has already.

    A sweep of one part thus leaves what is said of the others. Parts of another scale, and those that the experiment
    has no more, are dropped.

    Args:
        experiment: The experiment; its parts give the order.
        scale: One of ``spec.SCALES``.
        parts: Settings by part, as TOML can hold them.
        folder: Where the file goes; it exists.
    """
    path = folder / "config.toml"
    head = {"experiment": experiment.name, "scale": scale}
    with RunStore(folder).lock():
        known = {**_parts_there(path, head), **parts}
        ordered = {part: known[part] for part in experiment.parts if part in known}
        write_atomically(path, tomli_w.dumps({**head, "parts": ordered}))


def _parts_there(path: Path, head: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """The parts of the file, if it can be read and is of this experiment and scale."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or no TOML: it is written anew
        return {}
    parts = content.pop("parts", None)
    return parts if content == head and isinstance(parts, dict) else {}
