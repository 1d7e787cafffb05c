"""The index of all results: one line an experiment, made from the ``verdict.json`` beside each page."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deltafl.errors import DeltaflError
from deltafl.io import checked, read_json, read_text, write_atomically

from ..spec import experiment_names

FILE = "verdict.json"
#: How an index begins; another page is never overwritten by one.
FIRST_LINES = """# Results

What the paper claims, what these runs measured, and whether the claim holds. The verdicts are made from the
"""


class Finding(BaseModel):
    """One line of the index.

    Attributes:
        name: The experiment.
        title: What it is.
        claim: What the paper says.
        measured: What was measured, in a line or two, with intervals.
        verdict: The sum, as in "holds in part".
        scale: The scale of the runs.
        done: Finished runs.
        total: Runs of the experiment at this scale.
        command: The command that makes the page.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    claim: str
    measured: str
    verdict: str
    scale: str
    done: int
    total: int
    command: str


def write_verdict(folder: Path, finding: Finding) -> None:
    """Leave the line of an experiment beside its page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, finding.model_dump_json(indent=1) + "\n")


def read_verdict(path: Path) -> Finding:
    """Read what ``write_verdict`` wrote.

    Raises:
        DeltaflError: If the file cannot be read or is something else.
    """
    return checked(Finding, read_json(path), str(path), "write the page again")


def write_index(root: Path) -> str:
    """Write ``root/README.md``, one line for each experiment with a page below ``root``.

    Experiments come in their own order; other folders with a page of their own are named at the end.

    Returns:
        The page, Markdown.

    Raises:
        DeltaflError: If no folder below ``root`` has a verdict, one cannot be read, or another page is in the way.
    """
    findings = {path.parent.name: read_verdict(path) for path in sorted(root.glob(f"*/{FILE}"))}
    if not findings:
        raise DeltaflError(f"{root} has no folder with a {FILE}; run `deltafl reproduce NAME` first")
    require_index(root)
    order = {name: place for place, name in enumerate(experiment_names())}
    folders = sorted(findings, key=lambda folder: (order.get(findings[folder].name, len(order)), folder))
    lines = [
        *FIRST_LINES.splitlines(),
        "intervals of each page, not by hand; the rules are on the pages. Intervals are 95 %, each by itself.",
        "",
        "| experiment | the paper's claim | measured | verdict | runs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for folder in folders:
        finding = findings[folder]
        by_part = finding.measured.replace(". ", ".<br>")  # a sentence a part of the experiment
        cells = [f"[{finding.title}]({folder}/README.md)", finding.claim, by_part]
        cells += [f"**{finding.verdict}**", f"{finding.done} of {finding.total}, scale {finding.scale}"]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    lines += ["", "Commands:", "", "```", *(findings[folder].command for folder in folders), "```"]
    lines += _not_run(root, {finding.name for finding in findings.values()})
    others = [path.parent for path in sorted(root.glob("*/README.md")) if path.parent.name not in findings]
    if others:
        links = ", ".join(f"[{_title(other / 'README.md')}]({other.name}/README.md)" for other in others)
        lines += ["", f"Beside the paper's experiments: {links}."]
    text = "\n".join(lines) + "\n"
    write_atomically(root / "README.md", text)
    return text


def require_index(root: Path) -> None:
    """Refuse a folder whose page is no index, which would be overwritten.

    Raises:
        DeltaflError: If there is such a page.
    """
    page = root / "README.md"
    if page.exists() and not read_text(page).startswith(FIRST_LINES):
        raise DeltaflError(f"{page} is there already and is no index of results: move it away first")


def _not_run(root: Path, shown: set[str]) -> list[str]:
    """The experiments without a page: those that have runs, and those that have none."""
    left = [name for name in experiment_names() if name not in shown]
    begun = [name for name in left if (root / name / "runs").is_dir()]
    groups = (("Begun, without a page yet", begun), ("Not run yet", [name for name in left if name not in begun]))
    hint = "`deltafl reproduce --list` says what each needs and how long it takes."
    lines = [f"{words}: {', '.join(f'`{name}`' for name in names)}." for words, names in groups if names]
    return ["", " ".join([*lines, hint])] if lines else []


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _title(page: Path) -> str:
    first = read_text(page).partition("\n")[0]
    return first.removeprefix("# ").strip() or page.parent.name
