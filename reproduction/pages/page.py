"""The page of an experiment: what the paper says, what was run, tables, the verdict, pictures.

::

    DIR/README.md      the page          DIR/table.csv     its numbers
    DIR/*.png          the picture       DIR/verdict.json  one line of the index
"""

from collections.abc import Sequence
from pathlib import Path

from deltafl.errors import DeltaflError, require
from deltafl.io import write_atomically
from deltafl.simulation.record import RunRecord

from ..spec import Sweep
from .cells import csv_text
from .groups import Group, data_note, gather, shown_sweep
from .index import Finding, write_verdict
from .shows import SHOW, Shown
from .tables import pairs_table
from .verdict import headline, ordered_pairs, paragraph, sum_up
from .views import read_view
from .what_was_run import diverged_runs, hardware, missing_runs, smaller, what_is_missing, what_was_run


def write_page(sweep: Sweep, records: Sequence[RunRecord], folder: Path, not_run: dict[str, str], command: str) -> str:
    """Write the page of a sweep and what belongs to it.

    Args:
        sweep: The experiment at its scale.
        records: Its finished runs, perhaps not all of them.
        folder: Where ``README.md``, ``table.csv``, the picture and ``verdict.json`` go.
        not_run: Parts that could not be run, with the reason.
        command: The command as a reader would give it.

    Returns:
        The page, Markdown.

    Raises:
        DeltaflError: If no run is finished, or the experiment's view is wrong.
        MissingExtraError: If Matplotlib or SciPy is not installed.
    """
    require("matplotlib", "plot")
    require("scipy", "sim")
    view = read_view(sweep.experiment)
    sweep = shown_sweep(sweep, view)
    groups = gather(sweep, records, view)
    if not groups:
        raise DeltaflError(f"experiment {sweep.experiment.name}: no run is finished, so there is nothing to show")
    folder.mkdir(parents=True, exist_ok=True)
    shown = SHOW[sweep.experiment.kind](groups, view, folder)
    expected, missing = missing_runs(sweep, groups)
    done = expected - sum(map(len, missing.values()))
    page = _page(sweep, groups, shown, (done, expected), missing, not_run, command)
    finding = _finding(sweep, groups, shown, (done, expected), command)
    write_verdict(folder, finding)  # first: a page with no verdict beside it is taken for somebody else's
    write_atomically(folder / "table.csv", csv_text(shown.cells))
    write_atomically(folder / "README.md", page)
    return page


def _finding(sweep: Sweep, groups: Sequence[Group], shown: Shown, counts: tuple[int, int], command: str) -> Finding:
    experiment = sweep.experiment
    statements = [s for group in groups for s in ordered_pairs(group, shown.measures[group.part])]
    measured = headline(groups, shown.measures)
    measured = f"{measured}." if measured else " ".join(shown.remarks)
    return Finding(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        measured=" ".join(filter(None, [measured, data_note(groups)])),
        verdict=sum_up(statements) if statements else shown.verdict or sum_up(statements),
        scale=sweep.scale,
        done=counts[0],
        total=counts[1],
        command=command,
    )


def _page(
    sweep: Sweep,
    groups: Sequence[Group],
    shown: Shown,
    counts: tuple[int, int],
    missing: dict[str, list[str]],
    not_run: dict[str, str],
    command: str,
) -> str:
    experiment = sweep.experiment
    pairs = pairs_table(groups, shown.measures)
    blocks = [f"# {experiment.title}", f"**The paper:** {experiment.claim}"]
    blocks += [f"**Data:** {note}"] if (note := data_note(groups)) else []
    verdict = paragraph(groups, shown.measures, *counts, shown.verdict)
    blocks += ["## Verdict", verdict, *shown.remarks, *diverged_runs(groups)]
    for heading, table in shown.tables:
        blocks += [f"## {heading}", table]
    blocks += ["## Picture", f"![{experiment.title}]({shown.picture})"]
    if pairs:
        blocks += ["## The paper's ordering, pair by pair", pairs, _PAIRS_NOTE]
    blocks += ["## What was run", what_was_run(sweep, groups), *smaller(sweep, groups)]
    blocks += hardware([record for group in groups for record in group.records])
    blocks += [f"Command (scale {sweep.scale}):", f"```\n{command}\n```"]
    if experiment.runs_of is not None:
        blocks.append(f"The runs are those of `{experiment.runs_of}`.")
    if experiment.notes:
        blocks += ["## Decisions", "\n".join(f"- {note}" for note in experiment.notes)]
    blocks += ["## What is missing", what_is_missing(sweep, counts, missing, not_run)]
    return "\n\n".join(block for block in blocks if block) + "\n"


_PAIRS_NOTE = (
    "What the first of a pair has against the second, over paired seeds; a speed-up is mean rounds of the second / "
    "mean rounds of the first. Shown: the 95 % interval excludes no difference, in the paper's direction; "
    "contradicted: in the other; open: it contains no difference, has no width, or the better one failed in a seed in "
    "which the other did not. The whole ordering holds if every line is shown. Else it holds in part if more lines are "
    "shown than chance gives, and is contradicted (in part) if more are contradicted than chance gives: the least k "
    "that Binomial(lines with an interval, 0.025) does not exceed in 19 of 20 cases. If neither, it is not decided."
)
