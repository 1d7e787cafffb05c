"""The page of an experiment: ``README.md``, ``table.csv`` and ``verdict.json``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltafl.analysis import Run
from deltafl.errors import DeltaflError
from deltafl.store import checked, read_json, write_atomically

from .spec import Experiment, Frozen
from .text import Cells, counted, csv_text, folded

VERDICT = "verdict.json"
#: The page to look at: it is made from the records in seconds, and 0.5 to 1.2 MB, so it is not
#: committed.
REPORT = "report.html"
#: Where a run was played, of its environment; the rest are versions.
_PLACES = ("device", "gpu", "processor")
#: Whose claim a page begins with, by the kind of its experiment; else the paper's.
_WHOSE = {"benchmark": "The target", "costs": "The claim"}
_NO_VERSIONS = {*_PLACES, "vectors", "cores", "command", "data"}


class Finding(Frozen):
    """The line of an experiment in the index, ``verdict.json`` beside its page."""

    name: str
    title: str
    claim: str  # of the paper
    short: str  # the claim in at most 25 words
    number: str  # the first of what was measured, with its interval
    verdict: str  # as in "holds in part"
    scale: str
    own: bool = False  # no claim of the paper but a study of this project
    done: int  # finished runs
    total: int  # runs of the experiment at this scale
    command: str  # that makes the page


class OwnPage(NamedTuple):
    """What an experiment shows: one number with its interval, the verdict, the page's blocks,
    rows of ``table.csv``.
    """

    number: str
    verdict: str
    blocks: list[str]
    cells: Cells


def write_verdict(folder: Path, finding: Finding) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / VERDICT, finding.model_dump_json(indent=1) + "\n")


def read_verdict(path: Path) -> Finding:
    """Read what ``write_verdict`` wrote; a ``DeltaflError`` if the file is something else."""
    return checked(Finding, read_json(path), str(path), "write the page again")


def require_own(folder: Path, name: str) -> None:
    """Refuse, before anything is written, a file, or a folder with a page that is not one of the
    experiment.
    """
    if folder.exists() and not folder.is_dir():
        raise DeltaflError(f"{folder} is a file; choose another --out, a folder")
    if (folder / VERDICT).exists():
        found = read_verdict(folder / VERDICT).name
        if found != name:
            raise DeltaflError(
                f"{folder} holds results of {found}, not of {name}; choose another --out"
            )
    elif (folder / "README.md").exists():
        raise DeltaflError(
            f"{folder / 'README.md'} has no {VERDICT} beside it; move it away or choose another "
            "--out"
        )


def write(
    experiment: Experiment,
    shown: OwnPage,
    scale: str,
    counts: tuple[int, int],
    command: str,
    out: Path,
) -> str:
    """Write an experiment's page, its table and its verdict; ``counts`` are its finished and its
    planned runs.
    """
    done, total = counts
    finding = Finding(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        short=experiment.short or experiment.claim,
        number=shown.number,
        verdict=shown.verdict,
        scale=scale,
        own=experiment.own,
        done=done,
        total=total,
        command=command,
    )
    whose = _WHOSE.get(experiment.kind, "The paper")
    blocks = [f"# {experiment.title}", f"**{whose}:** {experiment.claim}", *shown.blocks]
    blocks.append(f"Command (scale {scale}):\n\n```\n{command}\n```")
    if experiment.runs_of is not None:
        blocks.append(f"The runs are those of `{experiment.runs_of}`.")
    if experiment.notes:
        blocks.append(folded("Decisions", "\n".join(f"- {note}" for note in experiment.notes)))
    page = "\n\n".join(filter(None, blocks)) + "\n"
    write_verdict(out, finding)  # first: a page with no verdict beside it counts as somebody else's
    write_atomically(out / "table.csv", csv_text(shown.cells))
    write_atomically(out / "README.md", page)
    return page


def diverged(head: str, runs: Iterable[tuple[str, Run]]) -> str:
    """A list of the runs that diverged, each with who it is; empty without one."""
    lines = [
        f"- {who}, seed {run.seed}, in round {run.diverged}: {run.diverged_why}"
        for who, run in runs
        if run.diverged is not None
    ]
    return "\n".join([head, "", *lines]) if lines else ""


def hardware(runs: Sequence[Run]) -> str:
    counts = Counter(_machine(run.environment) for run in runs)
    return "\n".join(f"- {text} ({counted(number, 'run')})" for text, number in counts.items())


def _machine(environment: Mapping[str, Any]) -> str:
    places = [str(environment[key]) for key in _PLACES if environment.get(key)]
    if environment.get("cores"):
        places.append(f"{environment['cores']} cores")
    versions = [f"{key} {it}" for key, it in environment.items() if key not in _NO_VERSIONS]
    return f"{', '.join(places)}; {', '.join(versions)}"
