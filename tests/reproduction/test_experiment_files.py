"""The experiment files: all load, every scale gives possible settings, and the paper's numbers
are the paper's.
"""

import itertools
import re
from collections.abc import Sequence

import pytest

from deltafl.samplers import parse_label
from reproduction.groups import STAND_INS
from reproduction.spec import SCALES, Experiment, View, experiment_names, load_experiment
from reproduction.tables import KINDS

NAMES = experiment_names()
SWEEPS = [name for name in NAMES if load_experiment(name).kind in KINDS]
CASES = [(name, scale) for name in SWEEPS for scale in SCALES]


def source_of(experiment: Experiment) -> Experiment:
    """The experiment whose runs are shown."""
    return experiment if experiment.runs_of is None else load_experiment(experiment.runs_of)


def rows_of(experiment: Experiment, view: View, host: str) -> set[str]:
    """The labels that stand in a part, at the scale of the paper or any other."""
    source = source_of(experiment)
    labels = set()
    for part, scale in itertools.product(source.parts, SCALES):
        if view.rows_of.get(part, part) == host:
            samplers = source.comparison(part, scale).samplers
            labels |= {label if part == host else f"{label}+{part}" for label in samplers}
    return labels


@pytest.mark.parametrize(("name", "scale"), CASES, ids=str)
def test_every_part_resolves(name: str, scale: str) -> None:
    experiment = load_experiment(name)
    source = source_of(experiment)
    assert source.part_names(scale)
    if experiment.runs_of is not None:
        assert set(experiment.parts) <= set(source.parts)
        return
    for part in experiment.part_names(scale):
        settings = experiment.comparison(part, scale)
        for label in settings.samplers:
            parse_label(label)
        if scale == "smoke":
            assert (settings.rounds or 0) <= 50
            assert len(settings.seeds) <= 2


@pytest.mark.parametrize("name", SWEEPS)
def test_order_reported_numbers_and_views_name_rows_that_exist(name: str) -> None:
    experiment = load_experiment(name)
    view = experiment.view
    source = source_of(experiment)
    hosts = {view.rows_of.get(part, part) for part in source.parts}
    labels = {host: rows_of(experiment, view, host) for host in hosts}
    everywhere = set().union(*labels.values())
    order = labels_of(experiment.order)
    assert set(order) <= everywhere
    assert len(set(order)) == len(order)
    assert set(view.rows_of) | set(view.rows_of.values()) <= set(source.parts)
    assert view.baseline is None or view.baseline in everywhere
    assert set(view.names) <= everywhere
    for host, reported in experiment.reported.items():
        assert set(reported) <= labels[host]
    for host, own_order in view.order_by_part.items():
        assert set(labels_of(own_order)) <= labels[host]
    assert set(view.thresholds) <= hosts


@pytest.mark.parametrize(
    ("name", "part", "label", "accuracy", "sd", "rounds", "seconds"),
    [
        ("table-2", "fashion-mnist", "fedavg", 70.35, 0.51, 426, 1795.12),
        ("table-2", "fashion-mnist", "pracdelta@multinomial", 72.10, 0.49, 322, 1372.33),
        ("table-2", "cifar10", "cluster-is", 54.83, 0.02, 323, 3188.54),
        ("table-2", "femnist", "cluster-is", 70.42, 0.66, 215, 453.56),
        ("table-2", "celeba", "fedpracis@multinomial", 88.12, 0.71, 327, 2746.82),
        ("table-3", "momentum", "fedpracis@multinomial", 81.80, 0.05, 246, None),
        ("table-3", "proximal", "cluster-is", 80.88, 0.38, 326, None),
        ("table-4", "momentum", "fedavg", 65.67, None, 390, None),
        ("table-4", "proximal", "pracdelta@multinomial", 66.77, None, 252, None),
        ("table-5", "fedvarp", "pracdelta@multinomial@fedvarp", 74.22, 0.14, 436, None),
        ("table-6", "adam", "cluster-is", 79.11, 0.18, None, None),
        ("table-6", "adagrad", "pracdelta@multinomial", 81.79, 0.09, 612, None),
        ("table-7", "adam", "fedpracis@multinomial", 89.92, 0.05, 140, None),
        ("table-8", "cifar10", "cluster-is", 54.83, 0.02, 187, None),
        ("table-8", "celeba", "pracdelta@multinomial", 89.67, 0.56, 257, None),
        ("table-9", "alpha-0-1", "fedpracis@multinomial", 42.7, None, 305, None),
        ("table-9", "alpha-1-0", "pracdelta@multinomial", 72.48, None, 221, None),
    ],
)
def test_the_papers_numbers(
    name: str,
    part: str,
    label: str,
    accuracy: float,
    sd: float | None,
    rounds: int | None,
    seconds: float | None,
) -> None:
    """Typed from the paper's tables a second time."""
    number = load_experiment(name).reported[part][label]
    assert (number.accuracy, number.sd, number.rounds, number.seconds) == (
        accuracy,
        sd,
        rounds,
        seconds,
    )


def labels_of(order: Sequence[str]) -> list[str]:
    return [label for entry in order for label in entry.split(" = ")]


@pytest.mark.parametrize("name", [name for name in SWEEPS if load_experiment(name).runs_of is None])
def test_no_title_names_data_that_stand_for_others_and_no_note_is_of_another_setting(
    name: str,
) -> None:
    """The data that are really read are named by the page, from the task; see
    ``groups.title_of``.
    """
    experiment = load_experiment(name)
    assert not any(
        ours in experiment.part_title(part)
        for part in experiment.parts
        for _, ours in STAND_INS.values()
    )
    settings = [
        experiment.comparison(part, scale)
        for scale in SCALES
        for part in experiment.part_names(scale)
    ]
    assert any(one.proximal for one in settings) == any(
        "Proximal" in note for note in experiment.notes
    )
    counts = {str(one.test_examples) for one in settings}
    for note in experiment.notes:
        found = re.search(r"(\d+) of the test images", note)
        assert found is None or found[1] in counts
