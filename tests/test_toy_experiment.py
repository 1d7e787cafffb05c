"""The toy of figures 3 and 5: the numbers known in advance, and the files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from reproduction.toy.enumeration import SCORES, WAYS, enumerate_toy, hand_picked
from reproduction.toy.page import report_toy, run_toy, summarise_toy

#: hh, ht, successive, hajek, plain-mean.
MEAN_SQUARES = {
    "uniform": [3.667, 1.833, 1.833, 1.833, 1.833],
    "IS": [2.366, 0.435, 1.088, 1.399, 1.636],
    "DELTA": [5.344, 3.264, 3.715, 0.370, 1.029],
}
GRADIENT_MD = np.array([[2.0, 2.0], [4.0, 1.0], [6.0, -3.0]])


@pytest.mark.parametrize("score", SCORES)
def test_the_fifteen_numbers(score: str) -> None:
    found = [enumerate_toy(score, way).mse for way in list(WAYS)[:5]]
    assert found == pytest.approx(MEAN_SQUARES[score], abs=6e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("score", SCORES)
def test_outcomes_are_a_distribution(score: str, way: str) -> None:
    row = enumerate_toy(score, way)
    assert sum(outcome.probability for outcome in row.outcomes) == pytest.approx(1)
    assert all(len(outcome.clients) == 2 for outcome in row.outcomes)
    assert len(row.outcomes) == (6 if WAYS[way].design == "multinomial" else 3)
    unbiased = WAYS[way].design != "successive" or score == "uniform"
    assert (row.bias < 1e-6) == unbiased


def test_the_centred_estimate_by_hand() -> None:
    """With replacement and c = ubar the least MSE is (mean zeta)^2 / n, which DELTA's p attains."""
    zeta_m = np.linalg.norm(GRADIENT_MD - GRADIENT_MD.mean(axis=0), axis=1)
    assert enumerate_toy("DELTA", "difference-hh").mse == pytest.approx(zeta_m.mean() ** 2 / 2, rel=1e-6)
    norm_m = np.linalg.norm(GRADIENT_MD, axis=1)
    by_norm = np.sum(zeta_m**2 * norm_m.sum() / norm_m) / 9 / 2
    assert enumerate_toy("IS", "difference-hh").mse == pytest.approx(by_norm, rel=1e-6)


def test_the_pairs_picked_by_hand() -> None:
    assert hand_picked() == {(1, 2): (3, 1.5), (2, 3): (5, -1), (1, 3): (4, -0.5)}
    plain = {o.clients: o.aggregate for o in enumerate_toy("DELTA", "plain-mean").outcomes}
    for pair, mean in hand_picked().items():
        assert plain[pair] == pytest.approx(mean)


def test_files_and_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps: list[tuple[int, int]] = []
    run_toy(tmp_path, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (21, 21)
    page = report_toy(tmp_path)
    assert "| DELTA | 5.344 | 3.264 | 3.715 (0.296) |" in page
    assert "| 1, 3 | DELTA | (4, -0.5) | 0.25 |" in page
    with (tmp_path / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 21
    assert float(table[0]["mse"]) == pytest.approx(11 / 3, rel=1e-5)
    measured, verdict = summarise_toy(tmp_path)
    assert "IS below DELTA under HH, with replacement (5.344 / 2.366 / 3.667)" in measured
    assert verdict == "holds in part and is contradicted in part"
    first = (tmp_path / "toy.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    report_toy(tmp_path)
    assert (tmp_path / "toy.png").read_bytes() == first
    assert len(json.loads((tmp_path / "cohorts.json").read_text())) == 21


def test_a_page_needs_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(DeltaflError, match="run the experiment first"):
        report_toy(tmp_path)
