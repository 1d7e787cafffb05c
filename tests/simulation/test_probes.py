"""Probes: they see all clients, and they change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.audit import audit
from deltafl.round import init_round
from deltafl.simulation.oracle import SimulatedOracle
from deltafl.simulation.probes import EVERYONE, SELECTED, probe_columns, probe_everyone
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of, subject_of
from tools.simulation import TINY, lines_of
from tools.simulation import run as run_of

TOY = {
    "task": "toy",
    "clients": 3,
    "sample": 2,
    "local_epochs": None,
    "batch_size": None,
    "probe_every": 1,
}


def run(folder: Path, **given: object) -> list[dict[str, Any]]:
    run_of(folder, **{**TINY, "rounds": 7, **given})
    return lines_of(folder)


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "pracdelta"},
        {"sampler": "delta@multinomial"},
        {"sampler": "cluster-is(clusters=2)"},
        {"sampler": "power-of-choice"},
        {"sampler": "uniform@systematic@difference-own", "mime": 0.5, "server_optimizer": "adam"},
        {
            "sampler": "fedpracis",
            "task": "synthetic",
            "clients": 6,
            "local_epochs": None,
            "batch_size": None,
        },
    ],
    ids=lambda given: str(given["sampler"]),
)
def test_a_run_with_probes_is_the_same_run(tmp_path: Path, given: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", **given)
    probed = run(tmp_path / "probed", **given, probe_every=3)
    assert [{key: line[key] for key in line if key != "probe"} for line in probed] == plain
    assert [line["round"] for line in probed if "error" in line.get("probe", {})] == [1, 3, 6]
    assert all(set(line["probe"]) >= set(SELECTED) for line in probed[1:])


def test_norms_and_diversities_by_hand(tmp_path: Path) -> None:
    """The toy at (1, 1): gradients (2, 2), (4, 1), (6, -3), mean (4, 0); one step of plain SGD."""
    lines = run(tmp_path, **TOY, sampler="uniform")
    probe = lines[1]["probe"]
    norm = np.sqrt([8, 17, 45])
    zeta = np.sqrt([8, 1, 13])
    error = 1.8333 / 16  # Horvitz-Thompson, every pair with probability 1/3: enumerated
    expected = [
        norm.max(),
        norm.min(),
        norm.mean(),
        zeta.max(),
        zeta.min(),
        zeta.mean(),
        4.0,
        error,
        0.0,
    ]
    assert [probe[name] for name in EVERYONE[:-1]] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    chosen = norm[lines[1]["cohort"]]
    assert probe["selected_norm_mean"] == pytest.approx(chosen.mean(), rel=1e-4)
    assert probe["selected_norm_min"] == pytest.approx(chosen.min(), rel=1e-4)
    assert 0 < probe["least_error"] <= probe["error"]


def test_the_errors_of_three_methods_on_the_toy(tmp_path: Path) -> None:
    """MSE with exact probabilities, by enumeration: uniform 1.833, importance sampling .435,
    DELTA 3.264 (of 16).
    """
    found = {
        name: run(tmp_path / name, **TOY, sampler=name, rounds=1)[1]["probe"]
        for name in ("uniform", "fedis", "delta")
    }
    error = {name: 16 * probe["error"] for name, probe in found.items()}
    assert error == pytest.approx({"uniform": 1.833, "fedis": 0.435, "delta": 3.264}, abs=2e-3)


def test_a_biased_method_shows_its_bias(tmp_path: Path) -> None:
    lines = run(tmp_path, sampler="power-of-choice", probe_every=7)
    assert lines[7]["probe"]["bias"] > 0.05
    assert lines[7]["probe"]["error"] >= lines[7]["probe"]["bias"] ** 2


def test_the_error_is_the_audits(tmp_path: Path) -> None:
    """At the first round of a memoryless method, probe and audit look at the same round."""
    settings = make_settings(RunSettings, {**TINY, "sampler": "uniform", "probe_every": 1})
    engine = engine_of(settings)
    plan = plan_of(settings, engine.task.population(settings.weights))
    state = init_round(plan, engine.initial_params())
    oracle = SimulatedOracle(engine, plan, state)
    probe = probe_everyone(plan, state, oracle, settings.local_lr or 0.0)
    row = next(
        audit(
            subject_of(settings),
            ["uniform"],
            designs=["systematic"],
            estimators=["horvitz-thompson"],
        )
    )
    assert probe["error"] == pytest.approx(row.mse, rel=0.35)  # 200 draws against 4000
    assert probe["least_error"] <= row.mse


def test_a_diverging_run_is_probed_without_a_number(tmp_path: Path) -> None:
    lines = run(tmp_path, sampler="uniform", local_lr=1e30, rounds=2, probe_every=1)
    assert lines[2]["probe"]["norm_max"] is None
    columns = probe_columns(lines)
    assert columns["round"] == [1, 2]
    assert columns["error"][1] is None


def test_columns_average_the_selected_and_keep_the_probed_rounds() -> None:
    def line(round: int, mean: float | None, **more: float) -> dict[str, Any]:
        return {
            "round": round,
            "probe": {"selected_norm_mean": mean, "selected_norm_min": 1.0, **more},
        }

    full = dict.fromkeys(EVERYONE, 2.5)
    lines = [
        {"round": 0},
        line(1, 4.0, **full),
        line(2, 1.0),
        line(3, None),
        line(4, 3.0, **full),
        line(5, 9.0),
    ]
    columns = probe_columns(lines)
    assert set(columns) == {"round", *SELECTED, *EVERYONE}
    assert columns["round"] == [1, 4]
    assert columns["selected_norm_mean"] == [4.0, 2.0]
    assert columns["norm_min"] == [2.5, 2.5]
    assert probe_columns([{"round": 0}, {"round": 1}]) == {}


def test_a_round_that_selects_nobody_has_no_norms(tmp_path: Path) -> None:
    lines = run(tmp_path, sampler="uniform@poisson", sample=1, rounds=12, probe_every=20)
    empty = [line["probe"] for line in lines[1:] if not line["cohort"]]
    assert empty
    assert all(probe[name] is None for probe in empty for name in SELECTED)
    assert probe_columns(lines)["selected_norm_mean"]
