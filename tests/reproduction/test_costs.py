"""The experiment on equal cost: what is spent to a level, who is ahead, and the trace of speeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_benchmark import record, tiny

from deltafl.simulation import Job, RunRecord, write_record
from reproduction.benchmark.costs import (
    COSTS,
    JUDGED,
    duels,
    factor,
    reproduce_costs,
    spent,
    verdict,
)
from reproduction.benchmark.parts import Part, parts_of
from reproduction.benchmark.runs import Method, Result, Store, gather
from reproduction.records import PackedRuns
from reproduction.running import Request
from reproduction.spec import SCALES, Experiment, load_experiment
from reproduction.speeds import CLIENTS, path_of, speeds_text

LABELS = ("census+average=0.5", "uniform", "uniform+sample=4", "full")
#: Trainings a round, and the evaluations at 0.6; before them it is 0.3.
MADE_UP = {
    LABELS[0]: (2, [10, 11, 12, 10]),
    LABELS[1]: (2, [20, 22, 21, 20]),
    LABELS[2]: (4, [8, 9, 9, 8]),
    LABELS[3]: (6, [2, 2, 2, 99]),
}
ROUNDS = 30


def experiment_of() -> Experiment:
    tier = {"methods": list(LABELS), "rates": [0.1], "extensions": 0, "levels": [0.5]}
    made = tiny(tiers={"all": tier}, horizon=ROUNDS, seeds=4)
    view = made.view.model_copy(update={"recommended": LABELS[0], "core": LABELS})
    return made.model_copy(update={"kind": "costs", "view": view})


def costly(job: Job, trainings: int, at: int) -> RunRecord:
    """A round takes ten seconds, and its clients receive three bytes for each that they send."""
    found = record(job, [0.6 if r + 1 >= at else 0.3 for r in range(ROUNDS)])
    round_r = np.arange(1, ROUNDS + 1)
    columns: dict[str, Any] = {
        "trainings": (trainings * round_r).tolist(),
        "bytes": (4e6 * trainings * round_r).tolist(),
        "bytes_up": (1e6 * trainings * round_r).tolist(),
        "clock": (10.0 * round_r).tolist(),
    }
    return found.model_copy(update=columns)


@pytest.fixture
def played(tmp_path: Path) -> Path:
    (part,) = parts_of(experiment_of(), "smoke")
    store = PackedRuns(tmp_path)
    for label, (trainings, at_s) in MADE_UP.items():
        tuning = part.tuning_job(label, 0.1, 1000)
        write_record(costly(tuning, trainings, 5), store.path(tuning))
        for seed, at in enumerate(at_s):
            job = part.test_job(label, 0.1, seed)
            write_record(costly(job, trainings, at), store.path(job))
    return tmp_path


def result_of(folder: Path) -> Result:
    (part,) = parts_of(experiment_of(), "smoke")
    result = gather(part, Store(folder))
    assert result is not None
    return result


def found(result: Result, label: str) -> Method:
    method = result.find(label)
    assert method is not None
    return method


def test_what_is_spent_to_a_level(played: Path) -> None:
    """The mean of five is 0.3 + 0.06 k with k of them at 0.6: at 0.5 with four, so that 0.5 is
    reached three rounds after the first crossing.
    """
    result = result_of(played)
    uniform = found(result, "uniform")
    by = {cost.name: spent(uniform, cost, 0.5).value for cost in COSTS}
    assert by["rounds"] == {0: 23, 1: 25, 2: 24, 3: 23}
    assert by["trainings"] == {seed: 2 * at for seed, at in by["rounds"].items()}
    assert by["MB up"] == by["trainings"]
    assert by["MB down"] == {seed: 3 * each for seed, each in by["MB up"].items()}
    assert by["MB"] == {seed: 4 * each for seed, each in by["MB up"].items()}
    assert by["seconds"] == {seed: 10 * at for seed, at in by["rounds"].items()}
    first = spent(uniform, COSTS[0], 0.5, smoothed=False)
    assert first.value == {0: 20, 1: 22, 2: 21, 3: 20} and first.never == 0
    full = spent(found(result, "full"), COSTS[1], 0.5)
    assert full.never == 1 and full.value[3] == 6 * ROUNDS and full.text(".0f").startswith("≥ ")
    assert spent(uniform, COSTS[0], 0.7).never == 4


def test_who_is_ahead_at_equal_cost(played: Path) -> None:
    """With twice the clients in two thirds of the rounds, uniform needs more trainings and fewer
    seconds.
    """
    result = result_of(played)
    base = found(result, LABELS[0])
    more = found(result, "uniform+sample=4")
    trainings, _, seconds = (factor(more, base, cost, 0.5) for cost in JUDGED)
    assert trainings is not None and seconds is not None
    # Rounds 11, 12, 12, 11 against 13, 14, 15, 13.
    assert seconds.ratio.mean == pytest.approx(46 / 55)
    assert trainings.ratio.mean == pytest.approx(2 * 46 / 55)
    assert seconds.ahead and not seconds.behind
    assert trainings.behind and not trainings.ahead
    full = factor(found(result, "full"), base, JUDGED[2], 0.5)
    assert full is not None and full.bound and not full.ahead
    assert factor(more, base, JUDGED[0], 0.7) is None
    rivals = list(duels(result, experiment_of().view))
    assert len(rivals) == 9
    assert verdict(rivals) == "is contradicted by 1 of 3 pairs of a level and a cost"
    assert verdict([duel for duel in rivals if duel.cost.name != "seconds"]) == "holds"
    assert verdict([]) == "is not decided"


@pytest.mark.drawn
def test_the_page_has_every_cost_of_every_method(played: Path) -> None:
    request = Request("costs", "smoke", played, only_page=True)
    page = reproduce_costs(experiment_of(), request, lambda _: None)
    assert "is contradicted by 1 of 3" in page
    assert "| digits, 50 % | seconds | `uniform+sample=4` 0.84 [" in page
    assert (played / "curves.png").stat().st_size > 1000
    table = (played / "table.csv").read_text().splitlines()
    assert len(table) == 1 + 2 * len(LABELS)
    assert page == reproduce_costs(experiment_of(), request, lambda _: None)


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_trace_is_that_of_its_command(clients: int) -> None:
    text = speeds_text(clients)
    assert path_of(clients).read_text() == text
    head, *rows = text.splitlines()
    assert head == "seconds,megabits" and len(rows) == clients


@pytest.mark.parametrize("scale", SCALES)
def test_all_methods_of_a_part_share_one_trace_with_a_row_for_each_client(scale: str) -> None:
    experiment = load_experiment("costs")
    parts: Sequence[Part] = parts_of(experiment, scale)
    for part in parts:
        assert part.levels and part.common.speeds is not None
        assert Path(part.common.speeds).name == path_of(part.common.clients or 0).name
        assert (part.recommended or experiment.view.recommended) in part.methods
