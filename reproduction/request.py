"""What a user asks ``deltafl reproduce`` for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        name: The experiment.
        scale: One of ``spec.SCALES``.
        out: The experiment's folder; those whose runs it shows in another way are looked for beside it.
        parts: Parts to run; None for all of the scale.
        seeds: Number of seeds, instead of the experiment's own.
        processes: Runs side by side.
        data_dir: Folder with data sets.
        device: Where clients train, as the setting ``device``; None for the experiment's own, the CPU.
        only_page: Run nothing, write the page from what is there.
    """

    name: str
    scale: str
    out: Path
    parts: tuple[str, ...] | None = None
    seeds: int | None = None
    processes: int = 1
    data_dir: str | None = None
    device: str | None = None
    only_page: bool = False

    @property
    def own(self) -> dict[str, Any]:
        """The user's settings of the runs, which win over the experiment's."""
        given = {"data_dir": self.data_dir, "seeds": self.seeds, "device": self.device}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def command(self) -> str:
        """The command for the page, without folders, processes and device, which differ from place to place."""
        parts = "".join(f" --part {part}" for part in self.parts or ())
        seeds = "" if self.seeds is None else f" --seeds {self.seeds}"
        return f"deltafl reproduce {self.name} --scale {self.scale}{parts}{seeds}"
