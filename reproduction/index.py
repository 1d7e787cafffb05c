"""The index of all pages below a folder."""

from pathlib import Path

from deltafl.errors import DeltaflError
from deltafl.store import read_text, write_atomically

from .page import VERDICT, Finding, read_verdict
from .spec import TEXTS, experiment_names
from .text import folded, markdown
from .verdict import tally

#: How an index begins; another page is never overwritten by one.
INDEX = "# Results\n"
#: The paper's main claim and this project's, the first rows of an index's two tables.
MAIN = ("table-2", "benchmark")


def write_index(root: Path) -> str:
    """Write ``root/README.md`` and return it: a line for each experiment's page below ``root``,
    and other pages.
    """
    findings = {path.parent.name: read_verdict(path) for path in sorted(root.glob(f"*/{VERDICT}"))}
    if not findings:
        raise DeltaflError(
            f"{root} has no folder with a {VERDICT}; run `python -m reproduction NAME` first"
        )
    require_index(root)
    names = experiment_names()
    order = [*MAIN, *names]

    def place(item: tuple[str, Finding]) -> int:
        """An experiment that has no file any more is the last."""
        name = item[1].name
        return order.index(name) if name in order else len(order)

    ordered = dict(sorted(findings.items(), key=place))
    claims = {folder: it for folder, it in ordered.items() if not it.own}
    studies = {folder: it for folder, it in ordered.items() if it.own}
    verdicts = tally([finding.verdict for finding in claims.values()])
    blocks = [INDEX.strip(), f"**{verdicts}** {TEXTS['index']['head']}", _table(claims)]
    if studies:
        blocks += ["## This project's own studies", _table(studies)]
    commands = [f"{it.command}  # {it.done} of {it.total} runs" for it in ordered.values()]
    blocks.append(folded("Commands", "```\n" + "\n".join(commands) + "\n```"))
    shown = {finding.name for finding in findings.values()}
    if left := [f"`{name}`" for name in names if name not in shown]:
        blocks.append(
            f"Without a page: {', '.join(left)}. `python -m reproduction --list` shows what each "
            "needs."
        )
    links = []
    for page in sorted(root.glob("*/README.md")):
        folder = page.parent.name
        if folder not in findings:
            title = read_text(page).partition("\n")[0].removeprefix("# ")
            links.append(f"[{title or folder}]({folder}/README.md)")
    if links:
        blocks.append(f"Also measured: {', '.join(links)}.")
    text = "\n\n".join(blocks) + "\n"
    write_atomically(root / "README.md", text)
    return text


def _table(findings: dict[str, Finding]) -> str:
    rows = []
    for folder, finding in findings.items():
        verdict = f"**{finding.verdict}**"
        if finding.done < finding.total:
            verdict += f" ({finding.done} of {finding.total} runs)"
        link = f"[{finding.title}]({folder}/README.md)"
        rows.append([link, finding.short, verdict, finding.number])
    return markdown(["experiment", "claim", "verdict", "one number, 95 %"], rows, left=4)


def require_index(root: Path) -> None:
    """Refuse a folder whose page is no index, which would be overwritten."""
    page = root / "README.md"
    if page.exists() and not read_text(page).startswith(INDEX):
        raise DeltaflError(
            f"{page} is there already and is no index of results: move it away first"
        )
