"""Pages: ``README.md``, ``table.csv``, a picture and ``verdict.json`` of an experiment, and the
index of all pages.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltafl.analysis import DIVERGED, Part, Run, summarise, write_report
from deltafl.errors import DeltaflError
from deltafl.io import checked, read_json, read_text, write_atomically
from deltafl.simulation import RunSettings

from .groups import Group, full_title, gather, replaced
from .spec import TEXTS, Experiment, Frozen, Sweep, experiment_names
from .tables import SHOW
from .text import Cells, counted, csv_text, cut, folded, markdown
from .verdict import judge, others_table, pairs_table, tally

VERDICT = "verdict.json"
#: The page to look at: it is made from the records in seconds, and 0.5 to 1.2 MB, so it is not
#: committed.
REPORT = "report.html"
#: How an index begins; another page is never overwritten by one.
INDEX = "# Results\n"
#: The paper's main claim and this project's, the first rows of an index's two tables.
MAIN = ("table-2", "benchmark")
#: Settings that the tables show, or that do not change the result.
_SHOWN = {"sampler", "seed", "clients", "threshold", "data_dir", "workers", "checkpoint_every"}
_SHOWN |= {"engine"}  # older records have it
#: What an experiment that is no sweep measured, a line each of ``runs.jsonl.gz``.
Row = dict[str, Any]
Rows = list[Row]


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


def write_page(
    sweep: Sweep, runs: Sequence[Run], out: Path, not_run: dict[str, str], command: str
) -> str:
    """Write the page of a sweep from its finished runs, and return it; ``not_run`` has parts
    that could not be run.
    """
    experiment = sweep.experiment
    groups = gather(sweep, runs)
    if not groups:
        raise DeltaflError(
            f"experiment {experiment.name}: no run is finished, so there is nothing to show"
        )
    out.mkdir(parents=True, exist_ok=True)
    shown = SHOW[experiment.kind](groups, experiment.view, out)
    counts, missing = _what_is_missing(sweep, groups, not_run)
    head = TEXTS["pages"]["diverged"].format(mark=DIVERGED)
    rows = [
        (f"{group.title}, {row.name}", run)
        for group in groups
        for row in group.rows
        for run in row.runs.values()
    ]
    found = judge(groups, shown.measures, shown.verdict)
    number = shown.number or found.number
    blocks = ["## Verdict", f"**{found.sentence}** {number}".strip()]
    blocks += [_not_tested(sweep, groups, *counts), f"![{experiment.title}]({shown.picture})"]
    (heading, table), *more = shown.tables
    blocks += [f"## {heading}", cut(table), *(folded(heading, table) for heading, table in more)]
    blocks += diverged(head, rows)
    if pairs := pairs_table(groups, shown.measures):
        text = "\n\n".join(filter(None, [found.reasons, pairs, TEXTS["pages"]["rule"]]))
        blocks.append(folded("How the verdict is made: the paper's ordering, pair by pair", text))
    if beside := pairs_table(groups, shown.beside or {}):
        blocks.append(folded("The same by mean accuracy (area) and by the mean of five", beside))
    if others := others_table(groups, shown.measures):
        blocks.append(folded("Comparisons outside the paper's ordering", others))
    ran = "\n\n".join([_what_was_run(sweep, groups), *_smaller(sweep, groups), missing])
    blocks.append(folded("What was run", ran))
    blocks.append(
        folded("Hardware and versions", hardware([run for group in groups for run in group.runs]))
    )
    write_report([part_of(group, command) for group in groups], out / REPORT, experiment.title)
    return write(
        experiment,
        OwnPage(number, found.verdict, blocks, shown.cells),
        sweep.scale,
        counts,
        command,
        out,
    )


def part_of(group: Group, command: str) -> Part:
    """A group as a part of a report; its rows are named by their labels."""
    runs = [run._replace(sampler=row.label) for row in group.rows for run in row.runs.values()]
    return Part(group.title, runs, summarise(runs, group.threshold, group.baseline), command)


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
    about = experiment.model_dump(include={"name", "title", "claim", "own"})
    about |= {"short": experiment.short or experiment.claim, "number": shown.number}
    about |= {"verdict": shown.verdict, "scale": scale, "command": command}
    finding = Finding(**about, done=counts[0], total=counts[1])
    whose = "target" if experiment.kind == "benchmark" else "paper"
    blocks = [f"# {experiment.title}", f"**The {whose}:** {experiment.claim}", *shown.blocks]
    blocks += [f"Command (scale {scale}):", f"```\n{command}\n```"]
    if experiment.runs_of is not None:
        blocks.append(f"The runs are those of `{experiment.runs_of}`.")
    if experiment.notes:
        blocks.append(folded("Decisions", "\n".join(f"- {note}" for note in experiment.notes)))
    page = "\n\n".join(block for block in blocks if block) + "\n"
    write_verdict(out, finding)  # first: a page with no verdict beside it counts as somebody else's
    write_atomically(out / "table.csv", csv_text(shown.cells))
    write_atomically(out / "README.md", page)
    return page


def diverged(head: str, runs: Iterable[tuple[str, Run]]) -> list[str]:
    ended = [(who, run) for who, run in runs if run.diverged is not None]
    lines = [
        f"- {who}, seed {run.seed}, in round {run.diverged}: {run.diverged_why}"
        for who, run in ended
    ]
    return ["\n".join([head, "", *lines])] if lines else []


def _what_was_run(sweep: Sweep, groups: Sequence[Group]) -> str:
    lines = []
    for part in sweep.comparisons:
        runs = [run for group in groups for run in group.runs if run.part == part]
        if runs:
            settings = runs[0].settings
            unusual = ", ".join(
                f"{key} {value}" for key, value in settings.items() if _is_unusual(key, settings)
            )
            data = ", ".join(sorted({run.data for run in runs}))
            seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
            lines.append([full_title(sweep, part), data, str(len(runs[0].draws_m)), seeds, unusual])
    heads = ["part", "data", "clients", "seeds", "settings that are not the defaults"]
    return markdown(heads, lines, left=len(heads))


def _is_unusual(key: str, settings: Mapping[str, Any]) -> bool:
    if key in _SHOWN or (key == "alpha" and settings.get("partition") == "natural"):
        return False
    field = RunSettings.model_fields.get(key)
    default = (
        None
        if field is None
        else list(field.default)
        if isinstance(field.default, tuple)
        else field.default
    )
    return bool(settings[key] != default)


def _smaller(sweep: Sweep, groups: Sequence[Group]) -> list[str]:
    """What differs from the scale of the paper; nothing for runs that another experiment made."""
    experiment = sweep.experiment
    if sweep.scale == "paper" or experiment.runs_of is not None:
        return []
    parts = {run.part for group in groups for run in group.runs}
    lines = []
    for part, settings in sweep.comparisons.items():
        if part in parts and part in experiment.part_names("paper"):
            pair = {sweep.scale: settings, "paper": experiment.comparison(part, "paper")}
            dumps = [
                {
                    **each.model_dump(exclude={"seeds"}),
                    "probe_every": experiment.probe_every(part, scale),
                    "seeds": len(each.seeds),
                }
                for scale, each in pair.items()
            ]
            ours, theirs = (
                {key: "unset" if value is None else value for key, value in d.items()}
                for d in dumps
            )
            changed = [
                f"{key} {ours[key]} (paper {theirs[key]})"
                for key in ours
                if ours[key] != theirs[key]
            ]
            lines += [f"- {full_title(sweep, part)}: {', '.join(changed)}"] if changed else []
        elif part in parts:
            lines.append(f"- {full_title(sweep, part)}: beside the paper's parts")
    return ["Differences from the scale `paper`:\n\n" + "\n".join(lines)] if lines else []


def hardware(runs: Sequence[Run]) -> str:
    counts: Counter[str] = Counter()
    for run in runs:
        known = {
            key: value for key, value in run.environment.items() if key not in ("command", "data")
        }
        places = [
            str(place) for key in ("device", "gpu", "processor") if (place := known.pop(key, None))
        ]
        places += [f"{cores} cores"] if (cores := known.pop("cores", None)) else []
        counts[
            f"{', '.join(places)}; {', '.join(f'{key} {value}' for key, value in known.items())}"
        ] += 1
    return "\n".join(f"- {text} ({counted(number, 'run')})" for text, number in counts.items())


def _what_is_missing(
    sweep: Sweep, groups: Sequence[Group], not_run: dict[str, str]
) -> tuple[tuple[int, int], str]:
    """Finished and planned runs, and a paragraph that names those without a record, and why,
    part by part.
    """
    there = {(run.part, run.sampler, run.seed) for group in groups for run in group.runs}
    planned = list(sweep.planned())
    missing = dict[str, list[str]]()
    for part, sampler, seed in planned:
        if (part, sampler, seed) not in there:
            missing.setdefault(part, []).append(f"{sampler} seed {seed}")
    done = len(planned) - sum(map(len, missing.values()))
    lines = []
    for part, names in missing.items():
        what = (
            f"missing {', '.join(names)}" if part in {key[0] for key in there} else "no run is done"
        )
        lines.append(
            f"- {full_title(sweep, part)}: {what}{f' ({not_run[part]})' if part in not_run else ''}"
        )
    return (done, len(planned)), "\n".join(
        [f"{done} of {len(planned)} runs are done.", "", *lines]
    ).rstrip()


def _not_tested(sweep: Sweep, groups: Sequence[Group], done: int, total: int) -> str:
    """What the verdict is not about: parts of other scales, data that others stand in for, runs
    that are missing.
    """
    experiment = sweep.experiment
    parts = ", ".join(
        full_title(sweep, part) for part in experiment.parts if part not in sweep.comparisons
    )
    lacks = [f"{parts} (scale `paper`{', a GPU' * ('GPU' in experiment.needs)})"] if parts else []
    lacks += [f"{paper} itself, for which {ours} stands in" for paper, ours in replaced(groups)]
    lacks += [f"{total - done} of {total} planned runs"] if done < total else []
    return f"**Not tested:** {'; '.join(lacks)}." if lacks else ""


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
    order = {name: place for place, name in enumerate(experiment_names())}
    found = sorted(
        findings.items(),
        key=lambda item: (item[1].name not in MAIN, order.get(item[1].name, len(order)), item[0]),
    )
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for folder, f in found:
        verdict = f"**{f.verdict}**" + f" ({f.done} of {f.total} runs)" * (f.done < f.total)
        rows[f.own].append([f"[{f.title}]({folder}/README.md)", f.short, verdict, f.number])
    commands = "\n".join(f"{f.command}  # {f.done} of {f.total} runs" for _, f in found)
    heads = ["experiment", "claim", "verdict", "one number, 95 %"]
    blocks = [
        INDEX.strip(),
        f"**{tally([f.verdict for _, f in found if not f.own])}** {TEXTS['index']['head']}",
    ]
    blocks += [markdown(heads, rows[False], left=4)]
    if rows[True]:
        blocks += ["## This project's own studies", markdown(heads, rows[True], left=4)]
    blocks += [folded("Commands", f"```\n{commands}\n```")]
    left = [
        f"`{name}`"
        for name in experiment_names()
        if name not in {f.name for f in findings.values()}
    ]
    if left:
        blocks.append(
            f"Without a page: {', '.join(left)}. `python -m reproduction --list` shows what each "
            "needs."
        )
    others = {
        page.parent.name: page
        for page in sorted(root.glob("*/README.md"))
        if page.parent.name not in findings
    }
    titles = {
        folder: read_text(page).partition("\n")[0].removeprefix("# ")
        for folder, page in others.items()
    }
    if others:
        links = ", ".join(
            f"[{title or folder}]({folder}/README.md)" for folder, title in titles.items()
        )
        blocks.append(f"Also measured: {links}.")
    text = "\n\n".join(blocks) + "\n"
    write_atomically(root / "README.md", text)
    return text


def require_index(root: Path) -> None:
    """Refuse a folder whose page is no index, which would be overwritten."""
    page = root / "README.md"
    if page.exists() and not read_text(page).startswith(INDEX):
        raise DeltaflError(
            f"{page} is there already and is no index of results: move it away first"
        )
