"""The records of a sweep, put together as they are shown: groups (tables, panels) of rows (methods) of seeds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from deltafl.analysis.table import DIVERGED
from deltafl.samplers import parse_label
from deltafl.simulation.record import RunRecord

from ..spec import Reported, Sweep
from .views import View

#: Names of the samplers as the literature writes them.
NAMES = {
    "full": "Full participation",
    "fedavg": "FedAvg",
    "uniform": "Uniform",
    "md": "MD",
    "md-fixed": "MD of fixed size",
    "fedis": "FedIS",
    "fedpracis": "FedPracIS",
    "delta": "FedDELTA",
    "pracdelta": "FedPracDELTA",
    "cluster-is": "Cluster-based IS",
    "cluster-is-oracle": "Cluster-based IS (theoretical)",
    "power-of-choice": "Power-of-Choice",
    "delta-centred": "DELTA, centred",
    "innovation": "Innovation",
    "spread": "Spread",
    "balanced": "Balanced",
    "ocs": "OCS",
    "aocs": "AOCS",
    "clustered-sampling-1": "Clustered sampling 1",
    "clustered-sampling-2": "Clustered sampling 2",
    "osmd": "OSMD",
    "k-vib": "K-Vib",
    "vrb": "Vrb",
    "fedvarp": "FedVARP",
    "fedstale": "FedStale",
    "mifa": "MIFA",
    "active-fl": "Active FL",
    "divfl": "DivFL",
    "oort": "Oort",
    "hics-fl": "HiCS-FL",
    "fed-cbs": "Fed-CBS",
}

#: Tasks whose data stand in for those of the paper: what a title calls the paper's, and what is really read.
STAND_INS = {
    "unipen62": ("FEMNIST", "UNIPEN-62"),
    "cifar10-jpeg": ("CIFAR-10", "CIFAR-10 as JPEG"),
    "celeba-subset": ("CelebA", "a subset of CelebA"),
}


class Row(NamedTuple):
    """One method: its label (``SAMPLER`` or ``SAMPLER+PART``), its name, its finished runs by seed."""

    label: str
    name: str
    records: dict[int, RunRecord]


class Group(NamedTuple):
    """What stands in one table or panel.

    Attributes:
        part: The part of the experiment.
        title: Its name.
        rows: The methods that have a finished run.
        baseline: The label that speed-ups compare with.
        order: The paper's ordering among the rows' labels, best first.
        threshold: What counts as reached; None if nothing does.
        reported: The paper's numbers by label.
        tied: Labels of the order that the paper does not order among themselves.
    """

    part: str
    title: str
    rows: tuple[Row, ...]
    baseline: str
    order: tuple[str, ...]
    threshold: float | None
    reported: dict[str, Reported]
    tied: tuple[tuple[str, ...], ...] = ()

    @property
    def labels(self) -> list[str]:
        """The labels of the rows."""
        return [row.label for row in self.rows]

    @property
    def records(self) -> list[RunRecord]:
        """All runs."""
        return [record for row in self.rows for record in row.records.values()]

    @property
    def metric(self) -> str:
        """Accuracy or loss."""
        return self.records[0].metric

    def row(self, label: str) -> Row:
        """The row of a label that is among ``labels``."""
        return next(row for row in self.rows if row.label == label)

    def name(self, label: str) -> str:
        """The readable name of a label."""
        return self.row(label).name


def readable(label: str, *more: str) -> str:
    """A sampler's label for people: ``fedis@successive@plain-mean`` is ``FedIS (successive draws, plain mean)``."""
    name, *rest = label.split("@")
    parts = [f"{rest[0]} draws"] if rest and rest[0] else []
    parts += [part.replace("-", " ") for part in rest[1:]]
    suffix = ", ".join([*parts, *more])
    return NAMES.get(name, name) + (f" ({suffix})" if suffix else "")


def shown_sweep(sweep: Sweep, view: View) -> Sweep:
    """The sweep without the parts that the kind does not show."""
    if sweep.experiment.kind != "thresholds":
        return sweep
    kept = {p: s for p, s in sweep.comparisons.items() if view.rows_of.get(p, p) in view.thresholds}
    return replace(sweep, comparisons=kept)


def gather(sweep: Sweep, records: Sequence[RunRecord], view: View) -> list[Group]:
    """The groups of a sweep that have a finished run, parts and samplers in the order of the experiment."""
    hosts = list(dict.fromkeys(view.rows_of.get(part, part) for part in sweep.comparisons))
    groups = [_group(sweep, records, view, host) for host in hosts]
    return [group for group in groups if group is not None]


def _group(sweep: Sweep, records: Sequence[RunRecord], view: View, host: str) -> Group | None:
    rows = []
    for part, settings in sweep.comparisons.items():
        if view.rows_of.get(part, part) != host:
            continue
        for sampler in settings.samplers:
            found = {record.seed: record for record in records if (record.part, record.sampler) == (part, sampler)}
            if found:
                label = sampler if part == host else f"{sampler}+{part}"
                name = view.names.get(label, _name(sweep, sampler, part, host))
                name += f" {DIVERGED}" if any(record.diverged is not None for record in found.values()) else ""
                rows.append(Row(label, name, dict(sorted(found.items()))))
    if not rows:
        return None
    labels = [row.label for row in rows]
    ranks = split_ties(view.order_by_part.get(host, sweep.experiment.order))
    order = tuple(label for rank in ranks for label in rank if label in labels)
    first = next(iter(rows[0].records.values()))
    threshold = view.thresholds.get(host, first.settings.get("threshold"))
    reported = sweep.experiment.reported.get(host, {})
    baseline = _baseline(view.baseline, labels, order)
    return Group(host, title_of(sweep, host), tuple(rows), baseline, order, threshold, reported, tuple(ranks))


def split_ties(order: Sequence[str]) -> list[tuple[str, ...]]:
    """The ranks of an ordering: ``["a", "b = c"]`` says that a is before b and c, and nothing of b and c."""
    return [tuple(label.strip() for label in entry.split(" = ")) for entry in order]


def title_of(sweep: Sweep, part: str) -> str:
    """A part's name for people, with the data that it really reads: ``UNIPEN-62 (for FEMNIST), momentum``."""
    title = sweep.experiment.part_title(part) if part in sweep.experiment.parts else part
    paper, ours = STAND_INS.get(_task(sweep, part), ("", ""))
    return title.replace(paper, f"{ours} (for {paper})", 1) if paper else title


def _task(sweep: Sweep, part: str) -> str:
    return sweep.comparisons[part].task if part in sweep.comparisons else ""


def data_note(groups: Sequence[Group]) -> str:
    """Which data stand in for the paper's in what is shown, a sentence; empty if none do."""
    tasks = dict.fromkeys(str(record.settings["task"]) for group in groups for record in group.records)
    pairs = [STAND_INS[task] for task in tasks if task in STAND_INS]
    return " ".join(f"{ours[:1].upper()}{ours[1:]} stands in for {paper}." for paper, ours in pairs)


def full_title(sweep: Sweep, part: str) -> str:
    """A part's name for people; that of rows in another part's table names the other one first."""
    host = sweep.experiment.view.get("rows_of", {}).get(part)
    return title_of(sweep, part) if host is None else f"{title_of(sweep, host)}, {title_of(sweep, part)}"


def _name(sweep: Sweep, sampler: str, part: str, host: str) -> str:
    return readable(sampler) if part == host else readable(sampler, title_of(sweep, part))


def _baseline(given: str | None, labels: Sequence[str], order: Sequence[str]) -> str:
    wanted = [given or "fedavg", "fedavg", "uniform", *reversed(order), labels[0]]
    return next(label for label in wanted if label in labels)


def base_name(label: str) -> str:
    """The sampler's bare name: of ``pracdelta@pivotal+part`` it is ``pracdelta``."""
    return parse_label(label.partition("+")[0]).name
