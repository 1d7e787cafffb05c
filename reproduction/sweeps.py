"""Experiments that are sweeps: playing what is missing, and their pages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltafl.analysis import DIVERGED, Part, Run, summarise, write_report
from deltafl.errors import DeltaflError
from deltafl.simulation import (
    CompareSettings,
    Job,
    OnProgress,
    RunRecord,
    RunSettings,
    run_jobs,
    task_of,
)

from .groups import Group, full_title, gather, replaced
from .page import REPORT, OwnPage, diverged, hardware, require_own, write
from .records import PackedRuns
from .running import Request, no_run, require_training
from .spec import TEXTS, Experiment, Sweep, load_experiment
from .tables import show
from .text import cut, folded, markdown
from .verdict import judge, others_table, pairs_table

#: Settings that the tables show, or that do not change the result; older records have ``engine``.
_SHOWN = {
    "sampler",
    "seed",
    "clients",
    "threshold",
    "data_dir",
    "workers",
    "checkpoint_every",
    "engine",
}


def reproduce_sweep(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    source = experiment
    folder = request.out
    if experiment.runs_of is not None:
        source = load_experiment(experiment.runs_of)
        folder = request.out.parent / experiment.runs_of
        require_own(folder, source.name)
    sweep = make_sweep(source, request.scale, request.parts, **request.own)
    if source is not experiment:
        view = experiment.view
        given = sweep.comparisons
        shown = [part for part in given if part in experiment.parts and view.shows(part)]
        sweep = replace(sweep, comparisons={part: given[part] for part in shown} or given)
    not_run = {} if request.only_page else run_sweep(sweep, folder, request.processes, on_progress)
    runs = [sweep.shown(record.run()) for record in records_of(sweep, folder)]
    if not runs:
        raise no_run(folder)
    with PackedRuns(request.out).lock():
        sweep = replace(sweep, experiment=experiment)
        return write_page(sweep, runs, request.out, not_run, request.command)


def make_sweep(
    experiment: Experiment, scale: str, parts: Sequence[str] | None = None, **own: Any
) -> Sweep:
    names = experiment.part_names(scale) if parts is None else parts
    return Sweep(
        experiment, scale, {part: experiment.comparison(part, scale, **own) for part in names}
    )


def records_of(sweep: Sweep, folder: Path) -> list[RunRecord]:
    store = PackedRuns(folder)
    return [record for job in sweep.jobs() if (record := store.get(job)) is not None]


def run_sweep(
    sweep: Sweep, folder: Path, processes: int, on_progress: OnProgress
) -> dict[str, str]:
    """Run what has no record in ``folder`` yet and pack the records; the parts left out for lack
    of data, and why.
    """
    store = PackedRuns(folder)
    jobs = list(sweep.jobs())
    waiting = [job for job in jobs if not store.get(job)]
    require_training(job.settings.device for job in waiting)
    not_run = _missing_data(waiting)
    if len(not_run) == len(sweep.comparisons):
        raise DeltaflError(
            next(iter(not_run.values()), "there is nothing to run: no part was chosen")
        )
    run_jobs([job for job in waiting if job.part not in not_run], folder, processes, on_progress)
    for part in sweep.comparisons:
        store.pack(part)
    return not_run


def _missing_data(waiting: Sequence[Job]) -> dict[str, str]:
    reasons = {}
    for part, settings in {job.part: job.settings for job in reversed(waiting)}.items():
        try:
            task_of(settings)
        except DeltaflError as error:
            reasons[part] = str(error)
    return reasons


def write_page(
    sweep: Sweep, runs: Sequence[Run], out: Path, not_run: Mapping[str, str], command: str
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
    shown = show(experiment.kind, groups, experiment.view, out)
    found = judge(groups, shown.measures, shown.verdict)
    number = shown.number or found.number
    counts, missing = _what_is_missing(sweep, groups, not_run)
    texts = TEXTS["pages"]
    blocks = [
        "## Verdict",
        f"**{found.sentence}** {number}".strip(),
        _not_tested(sweep, groups, *counts),
        f"![{experiment.title}]({shown.picture})",
    ]
    (heading, table), *more = shown.tables
    blocks += [f"## {heading}", cut(table), *(folded(heading, table) for heading, table in more)]
    rows = [(group, row) for group in groups for row in group.rows]
    named = [(f"{it.title}, {row.name}", run) for it, row in rows for run in row.runs.values()]
    blocks.append(diverged(texts["diverged"].format(mark=DIVERGED), named))
    if pairs := pairs_table(groups, shown.measures):
        text = "\n\n".join(filter(None, [found.reasons, pairs, texts["rule"]]))
        blocks.append(folded("How the verdict is made: the paper's ordering, pair by pair", text))
    if beside := pairs_table(groups, shown.beside):
        blocks.append(folded("The same by mean accuracy (area) and by the mean of five", beside))
    if others := others_table(groups, shown.measures):
        blocks.append(folded("Comparisons outside the paper's ordering", others))
    ran = [_what_was_run(sweep, groups), _smaller(sweep, groups), missing]
    blocks.append(folded("What was run", "\n\n".join(filter(None, ran))))
    blocks.append(folded("Hardware and versions", hardware([run for _, run in named])))
    write_report([part_of(group, command) for group in groups], out / REPORT, experiment.title)
    page = OwnPage(number, found.verdict, blocks, shown.cells)
    return write(experiment, page, sweep.scale, counts, command, out)


def part_of(group: Group, command: str) -> Part:
    """A group as a part of a report; its rows are named by their labels."""
    runs = [run._replace(sampler=row.label) for row in group.rows for run in row.runs.values()]
    return Part(group.title, runs, summarise(runs, group.threshold, group.baseline), command)


def _what_was_run(sweep: Sweep, groups: Sequence[Group]) -> str:
    lines = []
    for part in sweep.comparisons:
        runs = [run for group in groups for run in group.runs if run.part == part]
        if runs:
            settings = runs[0].settings
            unusual = [f"{key} {it}" for key, it in settings.items() if _is_unusual(key, settings)]
            data = sorted({run.data for run in runs})
            seeds = map(str, sorted({run.seed for run in runs}))
            clients = str(len(runs[0].draws_m))
            cells = [full_title(sweep, part), ", ".join(data), clients, ", ".join(seeds)]
            lines.append([*cells, ", ".join(unusual)])
    heads = ["part", "data", "clients", "seeds", "settings that are not the defaults"]
    return markdown(heads, lines, left=len(heads))


def _is_unusual(key: str, settings: Mapping[str, Any]) -> bool:
    if key in _SHOWN or (key == "alpha" and settings.get("partition") == "natural"):
        return False
    field = RunSettings.model_fields.get(key)
    default = field.default if field else None
    return bool(settings[key] != (list(default) if isinstance(default, tuple) else default))


def _smaller(sweep: Sweep, groups: Sequence[Group]) -> str:
    """What differs from the scale of the paper; nothing for runs that another experiment made."""
    experiment = sweep.experiment
    if sweep.scale == "paper" or experiment.runs_of is not None:
        return ""
    shown = {run.part for group in groups for run in group.runs}
    lines = []
    for part, settings in sweep.comparisons.items():
        if part not in shown:
            continue
        changed = ["beside the paper's parts"]
        if part in experiment.part_names("paper"):
            ours = _told(experiment, part, sweep.scale, settings)
            theirs = _told(experiment, part, "paper", experiment.comparison(part, "paper"))
            changed = [
                f"{key} {value} (paper {theirs[key]})"
                for key, value in ours.items()
                if value != theirs[key]
            ]
        if changed:
            lines.append(f"- {full_title(sweep, part)}: {', '.join(changed)}")
    return "\n".join(["Differences from the scale `paper`:", "", *lines]) if lines else ""


def _told(
    experiment: Experiment, part: str, scale: str, settings: CompareSettings
) -> dict[str, Any]:
    """The settings of a part at a scale, as the page names them."""
    given = settings.model_dump(exclude={"seeds"})
    given |= {"probe_every": experiment.probe_every(part, scale), "seeds": len(settings.seeds)}
    return {key: "unset" if value is None else value for key, value in given.items()}


def _what_is_missing(
    sweep: Sweep, groups: Sequence[Group], not_run: Mapping[str, str]
) -> tuple[tuple[int, int], str]:
    """Finished and planned runs, and a paragraph that names those without a record, and why,
    part by part.
    """
    there = {(run.part, run.sampler, run.seed) for group in groups for run in group.runs}
    begun = {part for part, _, _ in there}
    planned = list(sweep.planned())
    missing: dict[str, list[str]] = {}
    for part, sampler, seed in planned:
        if (part, sampler, seed) not in there:
            missing.setdefault(part, []).append(f"{sampler} seed {seed}")
    done = len(planned) - sum(map(len, missing.values()))
    lines = []
    for part, names in missing.items():
        what = f"missing {', '.join(names)}" if part in begun else "no run is done"
        why = f" ({not_run[part]})" if part in not_run else ""
        lines.append(f"- {full_title(sweep, part)}: {what}{why}")
    text = "\n".join([f"{done} of {len(planned)} runs are done.", "", *lines])
    return (done, len(planned)), text.rstrip()


def _not_tested(sweep: Sweep, groups: Sequence[Group], done: int, total: int) -> str:
    """What the verdict is not about: parts of other scales, data that others stand in for, runs
    that are missing.
    """
    experiment = sweep.experiment
    left = [full_title(sweep, part) for part in experiment.parts if part not in sweep.comparisons]
    lacks = []
    if left:
        gpu = ", a GPU" if "GPU" in experiment.needs else ""
        lacks.append(f"{', '.join(left)} (scale `paper`{gpu})")
    lacks += [f"{paper} itself, for which {ours} stands in" for paper, ours in replaced(groups)]
    if done < total:
        lacks.append(f"{total - done} of {total} planned runs")
    return f"**Not tested:** {'; '.join(lacks)}." if lacks else ""
