"""What a user asks for, and the files in which an experiment's rows are kept."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltafl.errors import DeltaflError, require
from deltafl.simulation import require_devices
from deltafl.store import write_atomically

#: What an experiment that is no sweep measured, a line each of ``runs.jsonl.gz``.
Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Request:
    """What a user wants."""

    name: str
    scale: str
    # the experiment's folder; those whose runs it shows in another way are looked for beside it
    out: Path
    parts: tuple[str, ...] | None = None  # None for all of the scale
    seeds: int | None = None  # how many, instead of the experiment's own
    processes: int = 1
    data_dir: str | None = None
    device: str | None = None
    only_page: bool = False  # run nothing, write the page from what is there

    @property
    def own(self) -> dict[str, Any]:
        given = {"data_dir": self.data_dir, "seeds": self.seeds, "device": self.device}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def command(self) -> str:
        """The command for the page, without folders, processes and device, which differ from
        place to place.
        """
        words = ["python -m reproduction", self.name, "--scale", self.scale]
        words += [f"--part {part}" for part in self.parts or ()]
        if self.seeds is not None:
            words.append(f"--seeds {self.seeds}")
        return " ".join(words)


def default_folder(name: str, scale: str) -> Path:
    """Where results go by default: the committed folder for the scale that it holds, ``runs``
    for the others.
    """
    return Path("results", name) if scale == "cpu" else Path("runs", scale, name)


def require_training(devices: Iterable[str]) -> None:
    for package in ("torch", "safetensors"):
        require(package, "sim")
    require_devices(devices)


def no_run(folder: Path, why: str = "") -> DeltaflError:
    cure = why or "leave out --only-page to run some"
    return DeltaflError(f"{folder} has no finished run yet: {cure}")


def read_rows(path: Path) -> tuple[dict[str, Any], Rows]:
    """The first line of a ``.jsonl.gz`` file, which holds what all rows share, and its rows;
    nothing without a file.
    """
    if not path.exists():
        return {}, []
    try:
        head, *rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise DeltaflError(
            f"{path} cannot be read: {error}; restore it, or delete it to run again"
        ) from None
    return head, rows


def write_rows(path: Path, head: dict[str, Any], rows: Rows) -> None:
    """Write what ``read_rows`` reads; the same rows give the same bytes."""
    text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in [head, *rows])
    write_atomically(path, gzip.compress(text.encode(), mtime=0))
