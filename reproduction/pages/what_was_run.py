"""The part of a page that says what was run, on what, and what is missing."""

from collections.abc import Sequence
from typing import Any

from deltafl.analysis.table import DIVERGED
from deltafl.simulation.record import RunRecord
from deltafl.simulation.settings import CompareSettings, RunSettings
from deltafl.tasks.partition import PARTITIONS

from ..spec import Sweep
from .cells import markdown
from .groups import Group, full_title

#: Settings with a column of their own in "what was run".
_COLUMNS = {"task", "clients", "sample", "rounds", "local_epochs", "local_steps", "batch_size", "local_lr", "weights"}
#: Settings that say what a table's columns say already, or where and how often something is kept.
_SILENT = {"sampler", "seed", "threshold", "data_dir", "workers", "checkpoint_every"}


def what_was_run(sweep: Sweep, groups: Sequence[Group]) -> str:
    """A line for each part: data, clients, local work, weights, seeds, and what is not as usual."""
    heads = ["part", "data", "m", "n", "rounds", "local work", "target", "seeds", "also"]
    lines = []
    for part in sweep.comparisons:
        own = [record for group in groups for record in group.records if record.part == part]
        if own:
            lines.append([full_title(sweep, part), *_setting_cells(own)])
    return markdown(heads, lines, left=len(heads))


def _setting_cells(records: Sequence[RunRecord]) -> list[str]:
    settings = records[0].settings
    unit = "epoch" if "local_epochs" in settings else "step"
    number = settings.get(f"local_{unit}s")
    work = f"{number} {unit}" + ("" if number == 1 else "s")
    batch = [f"batch {settings['batch_size']}"] if "batch_size" in settings else []
    also = [f"{key} {value}" for key, value in settings.items() if _is_worth_saying(key, settings)]
    also = [f"{text} (biased)" if text.startswith("norm_guard ") else text for text in also]
    return [
        ", ".join(sorted({record.data for record in records})),
        str(len(records[0].draws)),
        str(settings.get("sample", "?")),
        str(settings.get("rounds", records[0].round[-1])),
        ", ".join([work, *batch, f"lr {settings.get('local_lr', '?')}"]),
        "w = n_i / N" if settings.get("weights", "data") == "data" else "w = 1 / m",
        _ranges(sorted({record.seed for record in records})),
        ", ".join(also) or "–",
    ]


def _is_worth_saying(key: str, settings: dict[str, Any]) -> bool:
    """Whether a setting has no column of its own, matters, and is not as usual."""
    if key in _COLUMNS | _SILENT:
        return False
    if key == "alpha":
        partition = PARTITIONS.get(settings.get("partition", ""))
        return partition is not None and partition.uses_alpha
    if key in ("noise", "truth"):
        return bool(settings["task"] == "synthetic")
    field = RunSettings.model_fields.get(key)
    return field is None or _listed(settings[key]) != _listed(field.default)


def _listed(value: Any) -> Any:
    """A tuple as a list: records hold lists where settings have tuples."""
    return list(value) if isinstance(value, tuple) else value


def smaller(sweep: Sweep, groups: Sequence[Group]) -> list[str]:
    """What of the paper's size was changed at this scale; nothing for runs that another experiment made."""
    experiment = sweep.experiment
    if sweep.scale == "paper" or experiment.runs_of is not None:
        return []
    paper_parts = experiment.part_names("paper")
    lines = []
    for part, settings in sweep.comparisons.items():
        if not any(record.part == part for group in groups for record in group.records):
            continue
        if part not in paper_parts:
            lines.append(f"{full_title(sweep, part)} is run beside the paper's")
            continue
        paper = experiment.comparison(part, "paper")
        pairs = [
            (name, _size(name, settings), _size(name, paper))
            for name in ("task", "clients", "sample", "rounds", "local work", "batch_size", "seeds")
        ]
        changed = [f"{name} {here} (paper {there})" for name, here, there in pairs if here != there]
        if changed:
            lines.append(f"{full_title(sweep, part)}: {', '.join(changed)}")
    return [f"Smaller than, or other than, the scale `paper`: {'; '.join(lines)}."] if lines else []


def _size(name: str, settings: CompareSettings) -> str:
    if name == "local work":
        unit = "step" if settings.local_epochs is None else "epoch"
        number = settings.local_steps if settings.local_epochs is None else settings.local_epochs
        return f"{number} {unit}" + ("" if number == 1 else "s")
    value = getattr(settings, name)
    return "all that the data name" if name == "clients" and value is None else str(value)


def diverged_runs(groups: Sequence[Group]) -> list[str]:
    """A paragraph that names the runs that diverged and why; nothing if there is none."""
    lines = [
        f"- {group.title}, {row.name}, seed {seed}, in round {record.diverged}: {record.diverged_why}"
        for group in groups
        for row in group.rows
        for seed, record in row.records.items()
        if record.diverged is not None
    ]
    if not lines:
        return []
    return [
        f"{DIVERGED} Diverged. These runs were ended there; the accuracy of such a run is the one that it was last "
        "evaluated with, its loss counts as none, and a curve ends where the first of its seeds did:\n\n"
        + "\n".join(lines)
    ]


def hardware(records: Sequence[RunRecord]) -> list[str]:
    """Hardware and versions, all distinct ones with the number of runs on each."""
    counts: dict[str, int] = {}
    for record in records:
        environment = {key: value for key, value in record.environment.items() if key not in ("command", "data")}
        places = [environment.pop(key, None) for key in ("device", "gpu", "processor")]
        cores = environment.pop("cores", None)
        first = [str(place) for place in places if place] + ([f"{cores} cores"] if cores else [])
        text = "; ".join([", ".join(first), ", ".join(f"{key} {value}" for key, value in environment.items())])
        counts[text] = counts.get(text, 0) + 1
    lines = [f"- {text} ({number} {'run' if number == 1 else 'runs'})" for text, number in counts.items()]
    return ["Hardware and versions:", "\n".join(lines)]


def missing_runs(sweep: Sweep, groups: Sequence[Group]) -> tuple[int, dict[str, list[str]]]:
    """The number of runs of the sweep, and by part those without a record."""
    there = {(record.part, record.sampler, record.seed) for group in groups for record in group.records}
    total, missing = 0, dict[str, list[str]]()
    for job in sweep.jobs():
        total += 1
        if (job.part, job.settings.sampler, job.settings.seed) not in there:
            missing.setdefault(job.part, []).append(f"{job.settings.sampler} seed {job.settings.seed}")
    return total, missing


def what_is_missing(
    sweep: Sweep, counts: tuple[int, int], missing: dict[str, list[str]], not_run: dict[str, str]
) -> str:
    """How many runs are done, which are not, and why, part by part."""
    done, total = counts
    lines = [f"{done} of {total} runs are done" + ("; nothing is missing." if done == total else ".")]
    planned = dict[str, int]()
    for job in sweep.jobs():
        planned[job.part] = planned.get(job.part, 0) + 1
    for part, runs in missing.items():
        reason = f" ({not_run[part]})" if part in not_run else ""
        what = "no run is done" if len(runs) == planned[part] else _few(runs)
        lines.append(f"- {full_title(sweep, part)}: {what}{reason}")
    for part, reason in not_run.items():
        if part not in missing and part not in planned:
            lines.append(f"- {full_title(sweep, part)}: not run ({reason})")
    left_out = [part for part in sweep.experiment.parts if part not in planned and part not in not_run]
    if left_out:
        names = ", ".join(full_title(sweep, part) for part in left_out)
        lines.append(f"- Not part of this page at the scale {sweep.scale}: {names}")
    return "\n".join([lines[0], "", *lines[1:]]).rstrip()


def _few(runs: Sequence[str], most: int = 12) -> str:
    return "missing " + ", ".join(runs[:most]) + (f" and {len(runs) - most} more" if len(runs) > most else "")


def _ranges(seeds: Sequence[int]) -> str:
    """Seeds in short: 0–2 for 0, 1, 2; 0, 2 otherwise."""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))
