"""The runs of a sweep as they are shown: groups (tables, panels) of rows (methods) of seeds."""

from collections.abc import Sequence
from typing import NamedTuple

from deltafl.analysis import DIVERGED, Run

from .spec import TEXTS, Reported, Sweep

#: Tasks whose data stand in for those of the paper: what a title calls the paper's, and what is
#: really read.
STAND_INS = {
    "unipen62": ("FEMNIST", "UNIPEN-62"),
    "cifar10-jpeg": ("CIFAR-10", "CIFAR-10 as JPEG"),
    "cifar10-jpeg-resnet8": ("CIFAR-10", "CIFAR-10 as JPEG, ResNet-8"),
    "celeba-subset": ("CelebA", "CelebA with 278 people"),
}


class Row(NamedTuple):
    """One method: its label (``SAMPLER`` or ``SAMPLER+PART``), its name, its finished runs by
    seed.
    """

    label: str
    name: str
    runs: dict[int, Run]


class Group(NamedTuple):
    """What stands in one table or panel: the methods of a part that have a finished run."""

    part: str
    title: str
    rows: tuple[Row, ...]
    baseline: str  # the label that speed-ups compare with
    ranks: tuple[
        tuple[str, ...], ...
    ]  # the paper's ordering, best first; it does not order the labels of one rank
    threshold: float | None
    reported: dict[str, Reported]  # the paper's numbers by label

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.rows]

    @property
    def order(self) -> list[str]:
        """The ordered labels that have a row, best first."""
        return [label for rank in self.ranks for label in rank if label in self.labels]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs.values()]

    @property
    def metric(self) -> str:
        return self.runs[0].metric

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)


def readable(label: str, *more: str) -> str:
    """A sampler's label for people: ``fedis@successive@plain-mean`` is
    ``FedIS (successive draws, plain mean)``.
    """
    name, *rest = label.split("@")
    parts = [part.replace("-", " ") for part in rest[1:]]
    if rest and rest[0]:
        parts = [f"{rest[0]} draws", *parts]
    suffix = ", ".join([*parts, *more])
    name = TEXTS["names"].get(name, name)
    return f"{name} ({suffix})" if suffix else name


def gather(sweep: Sweep, runs: Sequence[Run]) -> list[Group]:
    """The groups of a sweep that have a finished run, parts and samplers in the order of the
    experiment.
    """
    experiment = sweep.experiment
    view = sweep.experiment.view
    rows: dict[str, list[Row]] = {view.host_of(part): [] for part in sweep.comparisons}
    thresholds = dict[str, float | None]()
    for part, settings in sweep.comparisons.items():
        host = view.host_of(part)
        thresholds.setdefault(host, view.thresholds.get(host, settings.threshold))
        for sampler in settings.samplers:
            found = {run.seed: run for run in runs if (run.part, run.sampler) == (part, sampler)}
            if found and view.shows(part):
                label = sampler
                name = readable(sampler)
                if part != host:
                    label = f"{sampler}+{part}"
                    name = readable(sampler, title_of(sweep, part))
                name = view.names.get(label, name)
                if any(run.diverged is not None for run in found.values()):
                    name += f" {DIVERGED}"
                rows[host].append(Row(label, name, dict(sorted(found.items()))))
    groups = []
    for host, own in rows.items():
        if own:
            labels = [row.label for row in own]
            ranks = tuple(
                tuple(entry.split(" = "))
                for entry in view.order_by_part.get(host, experiment.order)
            )
            ordered = [label for rank in ranks for label in rank]
            baseline = next(
                b
                for b in (view.baseline, "fedavg", "uniform", *ordered[::-1], labels[0])
                if b in labels
            )
            reported = experiment.reported.get(host, {})
            groups.append(
                Group(
                    host,
                    title_of(sweep, host),
                    tuple(own),
                    baseline,
                    ranks,
                    thresholds[host],
                    reported,
                )
            )
    return groups


def title_of(sweep: Sweep, part: str) -> str:
    """A part's name for people, with the data that it really reads:
    ``UNIPEN-62 (for FEMNIST), momentum``.
    """
    title = sweep.experiment.part_title(part)
    task = sweep.comparisons[part].task if part in sweep.comparisons else ""
    paper, ours = STAND_INS.get(task, ("", ""))
    return title.replace(paper, f"{ours} (for {paper})", 1) if paper else title


def full_title(sweep: Sweep, part: str) -> str:
    parts = dict.fromkeys([sweep.experiment.view.host_of(part), part])
    return ", ".join(title_of(sweep, each) for each in parts)


def replaced(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The paper's data that are replaced in what is shown, and what stands in for them."""
    tasks = dict.fromkeys(str(run.settings["task"]) for group in groups for run in group.runs)
    return [STAND_INS[task] for task in tasks if task in STAND_INS]
