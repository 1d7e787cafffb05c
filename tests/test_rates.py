"""Rates: the problems' gradients, the local work against a slow twin, resume, slopes with intervals, the page."""

import tomllib
from importlib import resources
from math import inf, isnan, sqrt
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from deltafl.errors import DeltaflError
from deltafl.types import FloatArray
from reproduction import environments
from reproduction.rates import runs as rates
from reproduction.rates.problems import PROBLEMS, Problem, local_work, make_problem, make_quadratics
from reproduction.rates.report import report_rates, summarise_rates
from reproduction.rates.runs import Cell, RatesSettings, cells_path, counter_example, read_cells, run_cell, run_rates
from reproduction.rates.slopes import Estimate, Row, ratio, slope, verdict

SMALL = RatesSettings(
    problems=("quadratics", "quadratics-from-optimum"),
    methods=("uniform", "fedis", "delta@multinomial", "power-of-choice"),
    horizons=(8, 16),
    seeds=2,
    clients=5,
    sample=2,
    local_steps=2,
    dimension=3,
    counter_rounds=20,
)


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
            assert np.all(steep_m <= problem.smoothness * np.linalg.norm(x - y, axis=1) * (1 + 1e-9))


def test_noise_is_unbiased_and_of_the_size_that_was_asked_for() -> None:
    problem = make_quadratics(6, 4, noise=2.0, from_optimum=False)
    x_md = np.tile(problem.start_d, (6, 1))
    exact_md = problem.gradients(x_md)
    draws = problem.randomness(0, 0, 4000)
    away = np.array([problem.noisy_gradients(x_md, drawn) - exact_md for drawn in draws])
    assert np.abs(away.mean(axis=0)).max() < 5 * problem.noise_m.max() / sqrt(4000)
    assert np.mean((away**2).sum(axis=2)) == pytest.approx(4.0, rel=0.05)


def test_minibatches_are_unbiased_and_the_problem_is_not_convex() -> None:
    problem = make_problem("robust-regression", 4, 3, 0.0)
    x_md = np.tile(problem.start_d, (4, 1))
    sample = np.array([problem.noisy_gradients(x_md, drawn) for drawn in problem.randomness(0, 0, 4000)])
    error_md = np.abs(sample.mean(axis=0) - problem.gradients(x_md))
    assert np.all(error_md < 5 * sample.std(axis=0) / sqrt(4000))
    line = [f(problem, problem.start_d + step * np.array([1.0, 0, 0])) for step in np.linspace(-20, 20, 41)]
    assert min(np.diff(line, 2)) < 0 < max(np.diff(line, 2))


def test_from_optimum_starts_where_the_gradient_is_zero() -> None:
    problem = make_problem("quadratics-from-optimum", 5, 3, 1.0)
    gradient_md = problem.gradients(np.tile(problem.start_d, (5, 1)))
    assert np.linalg.norm(gradient_md.mean(axis=0)) < 1e-13
    assert np.linalg.norm(gradient_md, axis=1).min() > 0.1
    assert f(problem, problem.start_d) < f(problem, problem.start_d + 0.1)


def test_local_work_is_plain_sgd() -> None:
    problem = make_problem("quadratics", 3, 2, 1.0)
    draws, lr = problem.randomness(3, 7, 4), 0.1
    work = local_work(problem, problem.start_d, lr, draws)
    for i in range(3):
        x_d, steps = problem.start_d.copy(), []
        for k in range(4):
            x_md = np.tile(x_d, (3, 1))
            step_d = -lr * problem.noisy_gradients(x_md, draws[k])[i]
            steps.append(step_d)
            x_d = x_d + step_d
        np.testing.assert_allclose(work.update_md[i], x_d - problem.start_d, rtol=1e-5)
        assert work.step_variance_m[i] == pytest.approx(np.var(steps, axis=0).sum())


def test_a_run_of_everybody_without_noise_is_gradient_descent() -> None:
    """K = 1, all clients: x <- x - eta eta_L grad f(x), by a loop of its own."""
    settings = SMALL.model_copy(update={"local_steps": 1, "noise": 0.0})
    problem = make_problem("quadratics", 5, 3, 0.0)
    cell = run_cell(settings, problem, "full", seed=0, horizon=16)
    x_d, rate, squares = problem.start_d.copy(), sqrt(2) / (sqrt(16) * problem.smoothness), []
    for _ in range(16):
        gradient_d = problem.gradients(np.tile(x_d, (5, 1))).mean(axis=0)
        squares.append(gradient_d @ gradient_d)
        x_d -= rate * gradient_d
    assert cell.least == pytest.approx(min(squares), rel=1e-4)
    assert cell.mean == pytest.approx(np.mean(squares), rel=1e-4)


def test_resume_runs_what_is_missing_and_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps: list[tuple[int, int]] = []
    result = run_rates(SMALL, whole, lambda done, total: steps.append((done, total)))
    assert (result.cells, result.computed) == (32, 32)
    assert steps[-1] == (8 * 2 * 24, 8 * 2 * 24)

    real, calls = run_cell, 0

    def failing(settings: RatesSettings, problem: Problem, label: str, seed: int, horizon: int) -> Cell:
        nonlocal calls
        calls += 1
        if calls > 7:
            raise KeyboardInterrupt
        return real(settings, problem, label, seed, horizon)

    monkeypatch.setattr(rates, "run_cell", failing)
    with pytest.raises(KeyboardInterrupt):
        run_rates(SMALL, broken, lambda done, total: None)
    monkeypatch.setattr(rates, "run_cell", real)
    assert run_rates(SMALL, broken, lambda done, total: None).computed == 32 - 7
    assert run_rates(SMALL, broken, lambda done, total: None).computed == 0
    for path in whole.rglob("*.json*"):
        assert path.read_bytes() == (broken / path.relative_to(whole)).read_bytes()
    longer = SMALL.model_copy(update={"horizons": (8, 16, 32)})
    assert run_rates(longer, broken, lambda done, total: None).computed == 16


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    one = SMALL.model_copy(update={"problems": ("quadratics",), "methods": ("uniform",)})
    run_rates(one, tmp_path, lambda done, total: None)
    with pytest.raises(DeltaflError, match="another noise"):
        run_rates(one.model_copy(update={"noise": 2.0}), tmp_path, lambda done, total: None)
    for show in (report_rates, summarise_rates):
        with pytest.raises(DeltaflError, match="another clients, noise"):
            show(one.model_copy(update={"noise": 2.0, "clients": 6}), tmp_path)
    path = cells_path(tmp_path, "quadratics", "uniform")
    assert len(read_cells(path)) == 4
    path.write_text(path.read_text() + "half a li")
    with pytest.raises(DeltaflError, match="no cell"):
        read_cells(path)


def test_page_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_rates(SMALL, tmp_path, lambda done, total: None)
    page = report_rates(SMALL, tmp_path)
    assert "### quadratics-from-optimum" in page
    assert "| delta@multinomial | 20 | 9.77e-04 | 1 | 1.00e-01 (broken) |" in page
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4
    assert lines[0].split(",")[:3] == ["problem", "method", "horizon"]
    measured, said = summarise_rates(SMALL, tmp_path)
    assert "keeps norm(grad f)^2 at 1 where theorem 2 claims 0.1" in measured
    assert "contradicted" in said
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DeltaflError, match="missing"):
        report_rates(SMALL.model_copy(update={"seeds": 3}), tmp_path)


def test_two_methods_are_told_apart_by_their_paired_ratio(tmp_path: Path) -> None:
    """Seeds differ by a factor of ten and methods by 5 %: their intervals overlap, that of the ratio is away from 1."""
    settings = SMALL.model_copy(update={"problems": ("quadratics",), "methods": ("uniform", "fedpracis", "pracdelta")})
    settings = settings.model_copy(update={"seeds": 6})
    level_s = np.array([1.0, 1.4, 2.0, 4.0, 7.0, 10.0])
    run_rates(settings.model_copy(update={"methods": ("uniform",)}), tmp_path, lambda done, total: None)
    for label, factor_s in (("fedpracis", np.ones(6)), ("pracdelta", np.array([1.05, 1.06, 1.04, 1.05, 1.05, 1.06]))):
        cells = {
            (horizon, seed): Cell(horizon, seed, 0.1, float(level_s[seed] * factor_s[seed]) / horizon)
            for horizon in settings.horizons
            for seed in range(6)
        }
        rates._write_cells(cells_path(tmp_path, "quadratics", label), cells)
    page = report_rates(settings, tmp_path)
    assert "pracdelta is above fedpracis: ×1.05" in page
    (tmp_path / "counter-example.json").unlink()
    with pytest.raises(DeltaflError, match=r"counter-example\.json is missing; run the experiment first"):
        report_rates(settings, tmp_path)


def test_cells_name_the_machine_that_computed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL.model_copy(update={"problems": ("quadratics",), "methods": ("uniform",)})
    for processor, seeds in (("A", 1), ("B", 3), ("C", 3), ("A", 4)):
        machine = {"processor": processor, "cores": 2}
        monkeypatch.setattr(environments, "_here", lambda machine=machine: machine)
        run_rates(settings.model_copy(update={"seeds": seeds}), tmp_path, lambda done, total: None)
    assert environments.told(tmp_path)[1] == "- processor A, cores 2 (4 cells)\n- processor B, cores 2 (4 cells)"


def test_cells_from_before_there_was_a_list_are_of_the_machine_that_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL.model_copy(update={"problems": ("quadratics",), "methods": ("uniform",), "seeds": 1})
    run_rates(settings, tmp_path, lambda done, total: None)
    (tmp_path / "environment.json").write_text('{"processor": "old", "command": "deltafl"}')
    assert environments.told(tmp_path) == ["Hardware and versions: processor old."]
    monkeypatch.setattr(environments, "_here", lambda: {"processor": "new"})
    run_rates(settings.model_copy(update={"seeds": 2}), tmp_path, lambda done, total: None)
    assert environments.told(tmp_path)[1] == "- processor old (2 cells)\n- processor new (2 cells)"


def test_slope_of_a_power_law() -> None:
    horizons = [100, 400, 1600]
    rng = np.random.default_rng(0)
    exact_ts = np.array([[3.0 * t**-0.5] * 8 for t in horizons])
    assert slope(exact_ts, horizons) == pytest.approx((-0.5, -0.5, -0.5))
    inside = 0
    for _ in range(300):
        noisy_ts = exact_ts * rng.gamma(20.0, 1 / 20.0, size=(3, 8))
        found = slope(noisy_ts, horizons)
        inside += found.low <= -0.5 <= found.high
    assert 0.90 <= inside / 300 <= 0.99
    assert isnan(slope(np.zeros((3, 8)), horizons).value)
    assert slope(exact_ts[:, :1], horizons) == pytest.approx((-0.5, -inf, inf))


def test_ratio_of_pairs() -> None:
    base_s = np.array([1.0, 2.0, 3.0])
    assert ratio(2 * base_s, base_s) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio(base_s[:1], base_s[:1]) == (1.0, 0.0, inf)


@pytest.mark.parametrize(
    ("measured", "claimed", "said"),
    [
        ((-0.5, -0.55, -0.45), -0.5, "as claimed"),
        ((-0.5, -0.55, -0.45), -1.0, "slower than claimed"),
        ((-0.9, -0.95, -0.85), -0.5, "faster than claimed"),
        ((-0.7, -1.2, -0.2), -1.0, "undecided"),
        ((-0.1, -0.2, 0.0), 0.0, "as claimed, slower than T^-1/2"),
        ((-0.5, -0.6, -0.4), 0.0, "not told from T^-1/2"),
    ],
)
def test_verdicts(measured: tuple[float, float, float], claimed: float, said: str) -> None:
    nothing = Estimate(1.0, 1.0, 1.0)
    row = Row("p", "m", 10, 1.0, 1.0, nothing, Estimate(*measured), nothing, claimed)
    assert verdict(row) == said


def test_heterogeneity_alone_costs_more_than_the_theorem_says() -> None:
    """No noise, from the minimum of f: full participation decays as 1 / T, DELTA clearly slower."""
    settings = RatesSettings(clients=8, sample=2, local_steps=2, dimension=3)
    problem = make_problem("quadratics-from-optimum", 8, 3, 1.0)
    horizons = [25, 200]
    orders = {}
    for label in ("full", "delta@multinomial"):
        mean_ts = np.array([[run_cell(settings, problem, label, s, t).mean for s in range(3)] for t in horizons])
        orders[label] = slope(mean_ts, horizons)
    assert orders["full"].high < -0.85
    assert orders["delta@multinomial"].low > -0.85


def test_the_counter_example_does_not_depend_on_the_seed() -> None:
    assert {counter_example("delta", 60, seed).least for seed in range(5)} == {1.0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"problems": ("quadratic",)}, "did you mean"),
        ({"methods": ("fedit",)}, "did you mean"),
        ({"horizons": (400, 100)}, "increasing"),
        ({"horizons": (10, 100)}, "T >= K n = 20"),
        ({"sample": 21}, "at most the 20 clients"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_wrong_settings(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RatesSettings.model_validate(wrong)


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_the_file_is_valid_at_every_scale(scale: str) -> None:
    text = (resources.files("reproduction") / "files" / "table-1.toml").read_text()
    table = tomllib.loads(text)
    settings = RatesSettings.model_validate({**table["settings"], **table[scale]})
    assert settings.problems == tuple(PROBLEMS)
