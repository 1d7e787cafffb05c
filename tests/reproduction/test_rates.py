"""Rates: the problems' gradients, the local work against a slow twin, slopes with intervals, the
page.
"""

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.analysis import Interval
from deltafl.errors import DeltaflError
from deltafl.types import FloatArray
from reproduction import rates
from reproduction.problems import Problem, local_work, make_problem, make_quadratics
from reproduction.rates import Measured, counter_example, run_cell, slope, verdict

PROBLEMS = ("quadratics", "quadratics-from-optimum", "robust-regression")
SMALL: dict[str, Any] = {
    "problems": ["quadratics", "quadratics-from-optimum"],
    "methods": ["uniform", "fedis", "delta@multinomial", "power-of-choice"],
    "horizons": [8, 16],
    "seeds": 2,
    "clients": 5,
    "sample": 2,
    "local_steps": 2,
    "dimension": 3,
    "noise": 1.0,
    "counter_rounds": 20,
}


def rows_of() -> list[dict[str, Any]]:
    return [row for cell in rates.cells(SMALL) for row in rates.measure(SMALL, cell)]


def f(problem: Problem, x_d: FloatArray) -> float:
    return float(problem.losses(x_d).mean())


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_losses(name: str) -> None:
    problem = make_problem(name, 4, 3, 1.0)
    rng = np.random.default_rng(0)
    x_d = problem.start_d + 0.1 * rng.standard_normal(3)
    gradient_md = problem.gradients(np.tile(x_d, (4, 1)))
    for j in range(3):
        step_d = np.eye(3)[j] * 1e-5
        slope_m = (problem.losses(x_d + step_d) - problem.losses(x_d - step_d)) / 2e-5
        np.testing.assert_allclose(gradient_md[:, j], slope_m, atol=1e-7)


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_curvature_exceeds_the_smoothness(name: str) -> None:
    problem = make_problem(name, 6, 3, 1.0)
    rng = np.random.default_rng(1)
    for size in (0.01, 1.0, 10.0):
        x_md, y_md = problem.start_d + size * rng.standard_normal((2, 200, 6, 3))
        for x, y in zip(x_md, y_md, strict=True):
            steep_m = np.linalg.norm(problem.gradients(x) - problem.gradients(y), axis=1)
            assert np.all(
                steep_m <= problem.smoothness * np.linalg.norm(x - y, axis=1) * (1 + 1e-9)
            )


def test_noise_is_unbiased_and_of_the_size_that_was_asked_for() -> None:
    problem = make_quadratics(6, 4, noise=2.0, from_optimum=False)
    x_md = np.tile(problem.start_d, (6, 1))
    exact_md = problem.gradients(x_md)
    draws = problem.randomness(0, 0, 4000)
    away = np.array([problem.noisy_gradients(x_md, drawn) - exact_md for drawn in draws])
    assert np.all(np.abs(away.mean(axis=0)) < 5 * away.std(axis=0) / sqrt(4000))
    assert np.mean((away**2).sum(axis=2)) == pytest.approx(4.0, rel=0.05)


def test_minibatches_are_unbiased_and_the_problem_is_not_convex() -> None:
    problem = make_problem("robust-regression", 4, 3, 0.0)
    x_md = np.tile(problem.start_d, (4, 1))
    sample = np.array(
        [problem.noisy_gradients(x_md, drawn) for drawn in problem.randomness(0, 0, 4000)]
    )
    error_md = np.abs(sample.mean(axis=0) - problem.gradients(x_md))
    assert np.all(error_md < 5 * sample.std(axis=0) / sqrt(4000))
    line = [
        f(problem, problem.start_d + step * np.array([1.0, 0, 0]))
        for step in np.linspace(-20, 20, 41)
    ]
    assert min(np.diff(line, 2)) < 0 < max(np.diff(line, 2))


def test_local_work_is_plain_sgd() -> None:
    problem = make_problem("quadratics", 3, 2, 1.0)
    draws = problem.randomness(3, 7, 4)
    lr = 0.1
    update_md, variance_m = local_work(problem, problem.start_d, lr, draws)
    for i in range(3):
        x_d = problem.start_d.copy()
        steps = []
        for k in range(4):
            x_md = np.tile(x_d, (3, 1))
            step_d = -lr * problem.noisy_gradients(x_md, draws[k])[i]
            steps.append(step_d)
            x_d = x_d + step_d
        np.testing.assert_allclose(update_md[i], x_d - problem.start_d, rtol=1e-5)
        assert variance_m[i] == pytest.approx(np.var(steps, axis=0).sum())


def test_a_run_of_everybody_without_noise_is_gradient_descent() -> None:
    """K = 1, all clients: x <- x - eta eta_L grad f(x), by a loop of its own."""
    settings = {**SMALL, "local_steps": 1}
    problem = make_problem("quadratics", 5, 3, 0.0)
    least, mean = run_cell(settings, problem, "full", seed=0, horizon=16)
    x_d = problem.start_d.copy()
    rate = sqrt(2) / (sqrt(16) * problem.smoothness)
    squares = []
    for _ in range(16):
        gradient_d = problem.gradients(np.tile(x_d, (5, 1))).mean(axis=0)
        squares.append(gradient_d @ gradient_d)
        x_d -= rate * gradient_d
    assert least == pytest.approx(min(squares), rel=1e-4)
    assert mean == pytest.approx(np.mean(squares), rel=1e-4)


def test_slope_of_a_power_law() -> None:
    horizons = [100, 400, 1600]
    rng = np.random.default_rng(0)
    exact_ts = np.array([[3.0 * t**-0.5] * 8 for t in horizons])
    assert slope(exact_ts, horizons) == pytest.approx((-0.5, -0.5, -0.5))
    inside = 0
    for _ in range(300):
        noisy_ts = exact_ts * rng.gamma(20.0, 1 / 20.0, size=(3, 8))
        found = slope(noisy_ts, horizons)
        assert found is not None and found.low is not None and found.high is not None
        inside += found.low <= -0.5 <= found.high
    assert 0.90 <= inside / 300 <= 0.99
    assert slope(np.zeros((3, 8)), horizons) is None
    alone = slope(exact_ts[:, :1], horizons)
    assert alone is not None
    assert alone.low is None


@pytest.mark.parametrize(
    ("measured", "claimed", "said"),
    [
        ((-0.5, -0.55, -0.45), -0.5, "as claimed"),
        ((-0.5, -0.55, -0.45), -1.0, "slower than claimed"),
        ((-0.9, -0.95, -0.85), -0.5, "faster than claimed"),
        ((-0.7, -1.2, -0.2), -1.0, "undecided"),
        ((-0.1, -0.2, 0.0), 0.0, "as claimed, slower than T^-1/2"),
        ((-0.5, -0.6, -0.4), 0.0, "not clearly different from T^-1/2"),
    ],
)
def test_verdicts(measured: tuple[float, float, float], claimed: float, said: str) -> None:
    row = Measured("p", "m", 10, 1.0, 1.0, claimed, None, Interval(*measured), None)
    assert verdict(row) == said


def test_the_counter_example_does_not_depend_on_the_seed() -> None:
    assert {counter_example("delta", 60, seed)[1] for seed in range(5)} == {1.0}


def test_a_page_needs_every_cell(tmp_path: Path) -> None:
    rows = rows_of()
    assert len(rates.show(SMALL, rows, tmp_path).cells) == 2 * 4
    with pytest.raises(DeltaflError, match="missing"):
        rates.show({**SMALL, "seeds": 3}, rows, tmp_path)
