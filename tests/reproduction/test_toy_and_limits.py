"""The toy and the limits: numbers known in advance."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation import Progress
from reproduction import limits
from reproduction import reproduce as reproduce_module
from reproduction.limits import Point
from reproduction.reproduce import reproduce
from reproduction.running import Request, read_rows, write_rows
from reproduction.spec import load_experiment
from reproduction.toy import SCORES, WAYS, enumerate_toy

#: hh, ht, successive, hajek, plain-mean.
MEAN_SQUARES = {
    "uniform": [3.667, 1.833, 1.833, 1.833, 1.833],
    "IS": [2.366, 0.435, 1.088, 1.399, 1.636],
    "DELTA": [5.344, 3.264, 3.715, 0.370, 1.029],
}
GRADIENT_MD = np.array([[2.0, 2.0], [4.0, 1.0], [6.0, -3.0]])
SMALL: dict[str, Any] = {
    "methods": ["uniform", "delta-centred", "fedvarp"],
    "dimensions": 30,
    "common": 1.0,
    "sample": 5,
    "ratios": [4],
    "drifts": [0.0],
    "spreads": [0.0, 2.0],
    "grouped": [0.0],
    "groups": 3,
    "clients": 20,
    "far": {"methods": ["uniform"], "sample": 1, "ratio": 2, "drifts": []},
    "rounds": 40,
    "seeds": 2,
}


@pytest.mark.parametrize("score", SCORES)
def test_the_fifteen_numbers_of_the_toy(score: str) -> None:
    found = [enumerate_toy(score, way).mse for way in list(WAYS)[:5]]
    assert found == pytest.approx(MEAN_SQUARES[score], abs=6e-4)


def test_the_centred_estimate_by_hand() -> None:
    """With replacement and c = ubar the least MSE is (mean zeta)^2 / n, which DELTA's p attains."""
    zeta_m = np.linalg.norm(GRADIENT_MD - GRADIENT_MD.mean(axis=0), axis=1)
    assert enumerate_toy("DELTA", "difference-hh").mse == pytest.approx(
        zeta_m.mean() ** 2 / 2, rel=1e-6
    )
    norm_m = np.linalg.norm(GRADIENT_MD, axis=1)
    by_norm = np.sum(zeta_m**2 * norm_m.sum() / norm_m) / 9 / 2
    assert enumerate_toy("IS", "difference-hh").mse == pytest.approx(by_norm, rel=1e-6)


def rows_of(**changes: Any) -> list[dict[str, Any]]:
    settings = {**SMALL, **changes}
    return [row for cell in limits.cells(settings) for row in limits.measure(settings, cell)]


def test_known_cases_of_the_limits() -> None:
    """Uniform is 1 by definition; of clients that stand still a memory misses only the unseen; with
    equal norms no score helps."""
    for row in rows_of():
        error_s = np.array(row["error"])
        if row["method"] == "uniform":
            np.testing.assert_array_equal(error_s, 1)
        elif row["method"] == "fedvarp":
            assert (error_s < 0.05).all()
        elif row["spread"] == 0:
            assert (np.abs(error_s - 1) < 0.25).all()
        else:
            assert error_s.mean() < 0.8


def test_fast_drift_makes_memories_worse_than_none() -> None:
    """Two independent vectors are further apart than one is from their mean: twice the residual,
    hence about twice.
    """
    (row,) = rows_of(drifts=[1.0], spreads=[], grouped=[], methods=["fedvarp"])
    assert Point(*(row[name] for name in Point._fields)) == Point("age", 20, 5, 1.0, 0, 0)
    assert 1.6 < np.mean(row["error"]) < 2.4


def test_what_counts_is_drift_squared_times_m_by_n() -> None:
    """A memory of age k explains (1 - drift^2)^k: four times the clients at half the drift is
    about the same.
    """
    methods = ["uniform", "innovation"]
    far = {"methods": methods, "sample": 2, "ratio": 40, "drifts": [0.1]}
    rows = rows_of(
        ratios=[10], drifts=[0.2], spreads=[], grouped=[], methods=methods, far=far, rounds=100
    )
    near, remote = (np.mean(row["error"]) for row in rows if row["method"] == "innovation")
    assert {(row["clients"], row["sample"]) for row in rows} == {(50, 5), (80, 2)}
    assert near == pytest.approx(remote, rel=0.15)
    assert 0.2 < near < 0.4


def test_what_is_known_is_not_run_again_and_a_page_needs_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "rounds": 5, "far": {**SMALL["far"], "drifts": [0.1]}}
    rows = rows_of(**settings)
    with pytest.raises(DeltaflError, match="does not have every point"):
        limits.show(settings, rows[:3], tmp_path)
    experiment = load_experiment("limits").model_copy(update={"settings": settings})
    monkeypatch.setattr(reproduce_module, "load_experiment", lambda _: experiment)
    write_rows(tmp_path / "runs.jsonl.gz", {"settings": settings}, rows[:-1])
    measured = []

    def measure(_: object, cell: dict[str, Any]) -> list[Any]:
        measured.append(cell["picture"])
        return rows[-1:]

    monkeypatch.setattr(limits, "measure", measure)
    seen = list[Progress]()
    reproduce(Request("limits", "cpu", tmp_path), seen.append)
    assert measured == ["far"]
    assert read_rows(tmp_path / "runs.jsonl.gz")[1] == rows
    assert seen[-1] == Progress(1, 1, 1, 1, ())
