"""The probe sees all clients and changes nothing; its numbers come into the record of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.audit import audit
from deltafl.cli.audit import subject_of
from deltafl.round import init_round
from deltafl.simulation.folder.record import measured_columns
from deltafl.simulation.oracle import SimulatedOracle
from deltafl.simulation.parallel.sweep import run_jobs
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of
from reproduction.probe import EVERYONE, Probe, measure_everyone
from reproduction.records import PackedRuns
from reproduction.spec import load_experiment
from reproduction.sweeps import make_sweep
from tools.simulation import TINY, lines_of, quiet

TOY: dict[str, Any] = {
    "task": "toy",
    "clients": 3,
    "sample": 2,
    "local_epochs": None,
    "batch_size": None,
}
SELECTED = ("selected_norm_mean", "selected_norm_min")


def run(folder: Path, every: int | None = 1, **given: object) -> list[dict[str, Any]]:
    callbacks = () if every is None else (Probe(every),)
    settings = make_settings(RunSettings, {**TINY, "rounds": 7, **given})
    run_single(settings, folder, quiet, callbacks=callbacks)
    return lines_of(folder)


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "pracdelta"},
        {"sampler": "delta@multinomial"},
        {"sampler": "power-of-choice"},
        {"sampler": "uniform@systematic@difference-own", "mime": 0.5, "server_optimizer": "adam"},
    ],
    ids=lambda given: str(given["sampler"]),
)
def test_a_run_with_probes_is_the_same_run(tmp_path: Path, given: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", None, **given)
    probed = run(tmp_path / "probed", 3, **given)
    assert [{key: line[key] for key in line if key != "probe"} for line in probed] == plain
    assert [line["round"] for line in probed if "error" in line.get("probe", {})] == [1, 3, 6]
    assert all(set(line["probe"]) >= set(SELECTED) for line in probed[1:])


def test_norms_and_diversities_by_hand(tmp_path: Path) -> None:
    """The toy at (1, 1): gradients (2, 2), (4, 1), (6, -3), mean (4, 0); one step of plain SGD."""
    line = run(tmp_path, **TOY, sampler="uniform")[1]
    probe = line["probe"]
    norm = np.sqrt([8, 17, 45])
    zeta = np.sqrt([8, 1, 13])
    error = 1.8333 / 16  # Horvitz-Thompson, every pair with probability 1/3: enumerated
    sizes = [value(each) for each in (norm, zeta) for value in (np.max, np.min, np.mean)]
    found = [probe[name] for name in EVERYONE[:-1]]
    assert found == pytest.approx([*sizes, 4.0, error, 0.0], rel=1e-3, abs=1e-6)
    chosen = norm[line["cohort"]]
    assert probe["selected_norm_mean"] == pytest.approx(chosen.mean(), rel=1e-4)
    assert probe["selected_norm_min"] == pytest.approx(chosen.min(), rel=1e-4)
    assert 0 < probe["least_error"] <= probe["error"]


def test_the_errors_of_three_methods_on_the_toy(tmp_path: Path) -> None:
    """MSE with exact probabilities, by enumeration: uniform 1.833, importance sampling .435,
    DELTA 3.264 (of 16).
    """
    for name, mse in (("uniform", 1.833), ("fedis", 0.435), ("delta", 3.264)):
        probe = run(tmp_path / name, **TOY, sampler=name, rounds=1)[1]["probe"]
        assert 16 * probe["error"] == pytest.approx(mse, abs=2e-3)


def test_a_biased_method_shows_its_bias(tmp_path: Path) -> None:
    probe = run(tmp_path, 7, sampler="power-of-choice")[7]["probe"]
    assert probe["bias"] > 0.05
    assert probe["error"] >= probe["bias"] ** 2


def test_the_error_is_the_audits() -> None:
    """At the first round of a memoryless method, probe and audit look at the same round."""
    settings = make_settings(RunSettings, {**TINY, "sampler": "uniform"})
    engine = engine_of(settings)
    plan = plan_of(settings, engine.task.population(settings.weights))
    state = init_round(plan, engine.initial_params())
    probe = measure_everyone(plan, state, SimulatedOracle(engine, plan, state), settings.local_lr)
    designs, estimators = ["systematic"], ["horvitz-thompson"]
    row = next(audit(subject_of(settings), ["uniform"], designs=designs, estimators=estimators))
    assert probe["error"] == pytest.approx(row.mse, rel=0.35)  # 200 draws against 4000
    assert probe["least_error"] <= row.mse


def test_rounds_without_numbers(tmp_path: Path) -> None:
    """A diverging client has none, nor has a round that selects nobody."""
    lines = run(tmp_path / "lost", sampler="uniform", local_lr=1e30, rounds=2)
    assert lines[2]["probe"]["norm_max"] is None
    assert measured_columns(lines)["error"][1] is None
    lines = run(tmp_path / "empty", 20, sampler="uniform@poisson", sample=1, rounds=12)
    empty = [line["probe"] for line in lines[1:] if not line["cohort"]]
    assert empty
    assert all(probe[name] is None for probe in empty for name in SELECTED)


def test_columns_have_the_rounds_with_all_numbers_and_means_between_them() -> None:
    def line(round: int, mean: float | None, **more: float) -> dict[str, Any]:
        return {"round": round, "probe": {"mean": mean, "least": 1.0, **more}}

    rounds = [line(1, 4.0, norm=2.5), line(2, 1.0), line(3, None), line(4, 3.0, norm=7.0)]
    assert measured_columns([{"round": 0}, *rounds, line(5, 9.0)]) == {
        "round": [1, 4],
        "mean": [4.0, 2.0],
        "least": [1.0, 1.0],
        "norm": [2.5, 7.0],
    }
    assert measured_columns([{"round": 0}, {"round": 1}]) == {}


def test_the_jobs_of_a_figure_carry_their_probe_to_other_processes(tmp_path: Path) -> None:
    jobs = list(make_sweep(load_experiment("figure-10"), "smoke", ["mnist"], task="toy").jobs())
    assert [job.callbacks for job in jobs] == [(Probe(2),)]
    small = make_settings(RunSettings, {**TINY, "rounds": 4, "sampler": "pracdelta"})
    jobs = [
        job._replace(settings=small.model_copy(update={"seed": i}))
        for i, job in enumerate(jobs * 2)
    ]
    run_jobs(jobs, tmp_path, 2, quiet)
    for job in jobs:
        record = PackedRuns(tmp_path).get(job)
        assert record is not None
        assert record.probes["round"] == [1, 2, 4]
        assert [*record.probes][1:] == [*SELECTED, *EVERYONE]
