"""The audit finds what is there: exact biases, wrong weights, the toy's errors; and its bounds are bounds."""

import numpy as np
import pytest
from typer.testing import CliRunner

from deltafl import SAMPLERS, Cohort, Population, inclusion_probabilities
from deltafl.audit import AuditRow, Subject, audit, least_mse, least_over_designs, lower_bound
from deltafl.cli.main import app
from deltafl.errors import DeltaflError
from deltafl.estimators.table import ESTIMATORS, horvitz_thompson
from deltafl.types import FloatArray

TOY = Subject(
    population=Population.from_sizes([1, 1, 1]),
    update_md=np.array([[2, 2], [4, 1], [6, -3]], dtype=np.float32),
    loss_m=np.array([2.0, 1.5, 4.5]),
    step_variance_m=np.zeros(3),
    num_steps_m=np.ones(3, dtype=np.int64),
    n=2,
)


def find(rows: list[AuditRow], sampler: str, design: str, estimator: str) -> AuditRow:
    return next(row for row in rows if (row.sampler, row.design, row.estimator) == (sampler, design, estimator))


def random_subject(m: int, n: int, d: int, seed: int) -> Subject:
    rng = np.random.default_rng(seed)
    update_md = (rng.normal(size=(m, d)) * rng.lognormal(0, 0.7, size=(m, 1)) + 0.3).astype(np.float32)
    sizes = rng.integers(5, 30, size=m)
    return Subject(
        Population.from_sizes(sizes), update_md, rng.exponential(size=m), np.zeros(m), np.ones(m, dtype=np.int64), n
    )


def gram_of(subject: Subject) -> FloatArray:
    """u_i . u_j, float64 (m, m)."""
    wide_md = subject.update_md.astype(np.float64)
    return wide_md @ wide_md.T


@pytest.fixture(scope="module")
def toy_rows() -> list[AuditRow]:
    return list(audit(TOY, SAMPLERS))


def test_every_claim_holds_on_the_toy(toy_rows: list[AuditRow]) -> None:
    assert len(toy_rows) > 200
    assert [row for row in toy_rows if not row.passes] == []
    assert all(row.exact for row in toy_rows if SAMPLERS[row.sampler].scores != "unknown")


def test_the_toys_errors_are_the_known_ones(toy_rows: list[AuditRow]) -> None:
    known = {
        ("uniform", "multinomial", "horvitz-thompson"): 3.667,
        ("uniform", "systematic", "horvitz-thompson"): 1.833,
        ("fedis", "multinomial", "horvitz-thompson"): 2.366,
        ("fedis", "pivotal", "horvitz-thompson"): 0.435,
        ("fedis", "successive", "horvitz-thompson"): 1.088,
        ("fedis", "successive", "hajek"): 1.399,
        ("fedis", "successive", "plain-mean"): 1.636,
        ("delta", "multinomial", "horvitz-thompson"): 5.344,
        ("delta", "systematic", "horvitz-thompson"): 3.264,
        ("delta", "successive", "hajek"): 0.370,
    }
    for names, mse in known.items():
        assert find(toy_rows, *names).mse * 16 == pytest.approx(mse, abs=6e-4), names


def test_biased_methods_are_found_out(toy_rows: list[AuditRow]) -> None:
    for names in (
        ("fedis", "successive", "horvitz-thompson"),
        ("fedis", "pivotal", "hajek"),
        ("delta", "pivotal", "plain-mean"),
    ):
        row = find(toy_rows, *names)
        assert not row.claims_unbiased
        assert row.bias > 0.01


@pytest.mark.parametrize("wrong", [0.95, 1.02])
def test_a_broken_weight_is_found_exactly_and_by_drawing(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
        return horvitz_thompson(cohort, weight_n, response_n) * np.where(cohort.client_n == 1, wrong, 1.0)

    estimator = ESTIMATORS["horvitz-thompson"]._replace(coefficients=broken)
    monkeypatch.setitem(ESTIMATORS, "horvitz-thompson", estimator)
    exact = list(audit(TOY, ["uniform"], designs=["pivotal"], estimators=["horvitz-thompson"]))
    assert [row.passes for row in exact] == [False]
    result = CliRunner().invoke(app, ["audit", "--samplers", "uniform"])
    assert result.exit_code == 1
    assert "CLAIM FAILS" in result.stdout


def test_a_weight_broken_for_everyone_is_found_by_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = random_subject(30, 15, 50, seed=1)

    def rows() -> list[AuditRow]:
        return list(audit(subject, ["fedis"], designs=["systematic"], estimators=["horvitz-thompson"]))

    assert [row.passes for row in rows()] == [True]
    estimator = ESTIMATORS["horvitz-thompson"]
    monkeypatch.setitem(
        ESTIMATORS,
        "horvitz-thompson",
        estimator._replace(coefficients=lambda c, w, q: 0.85 * horvitz_thompson(c, w, q)),
    )
    assert [(row.passes, row.exact) for row in rows()] == [(False, False)]


def test_the_command_passes_on_everything() -> None:
    result = CliRunner().invoke(app, ["audit", "--samplers", "all"])
    assert result.exit_code == 0, result.stdout
    assert "0 claims fail" in result.stdout


def test_enumerated_and_drawn_errors_agree_with_the_textbook() -> None:
    small = random_subject(6, 3, 4, seed=2)
    wide = random_subject(12, 3, 4, seed=2)

    def row_of(subject: Subject) -> AuditRow:
        rows = audit(subject, ["uniform"], designs=["simple-random"], estimators=["horvitz-thompson"], draws=20000)
        return next(rows)

    exact, drawn = row_of(small), row_of(wide)
    for row, subject in ((exact, small), (drawn, wide)):
        m, n = subject.population.num_clients, subject.n
        # The MSE of simple random sampling: (1/n - 1/m) S^2 with y_i = m w_i u_i
        y_md = m * subject.population.weight_m[:, None] * subject.update_md
        variance = np.sum((y_md - y_md.mean(axis=0)) ** 2) / (m - 1) * (1 / n - 1 / m)
        scale = np.sum((subject.population.weight_m @ subject.update_md) ** 2)
        assert row.mse == pytest.approx(variance / scale, rel=1e-6 if row.exact else 0.03)
    assert exact.exact
    assert not drawn.exact


def test_unknown_names_are_refused_before_work() -> None:
    with pytest.raises(DeltaflError, match="pivotal"):
        list(audit(TOY, ["uniform"], designs=["pivotl"]))


@pytest.mark.parametrize(("m", "n", "seed"), [(7, 2, 0), *((6, 2, seed) for seed in range(6))])
def test_no_design_is_below_the_lower_bound(m: int, n: int, seed: int) -> None:
    """A search that may leave clients out finds less, and is biased."""
    update_md = np.random.default_rng(seed).normal(size=(m, 20))
    gram_mm, weight_m = update_md @ update_md.T, np.full(m, 1 / m)
    assert least_over_designs(gram_mm, weight_m, n) >= lower_bound(gram_mm, weight_m, n) > 0


def test_the_least_mse_on_the_toy_is_a_minimum_over_designs() -> None:
    gram, weight = gram_of(TOY), TOY.population.weight_m
    least = least_over_designs(gram, weight, 2)
    grid = np.linspace(0, 1, 101)
    pairs = [(0, 1), (0, 2), (1, 2)]
    tried = []
    for a in grid:
        for b in grid[(grid + a <= 1) & (grid < 1)]:
            q = np.array([a, b, 1 - a - b])
            pi = np.array([a + b, 1 - b, 1 - a])
            if pi.min() < 1e-9:
                continue
            errors = [sum(weight[i] / pi[i] * TOY.update_md[i] for i in pair) - [4.0, 0.0] for pair in pairs]
            tried.append(float(q @ [np.sum(e**2) for e in errors]))
    assert least <= min(tried) + 1e-9
    assert least == pytest.approx(min(tried), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_the_lower_bound_is_below_every_unbiased_method(seed: int) -> None:
    subject = random_subject(9, 3, 40, seed)
    gram, weight = gram_of(subject), subject.population.weight_m
    bound = lower_bound(gram, weight, 3)
    scale = float(weight @ gram @ weight)
    rows = audit(
        subject, ["fedis", "delta", "uniform"], designs=["pivotal"], estimators=["horvitz-thompson"], draws=3000
    )
    assert 0 < bound < min(row.mse for row in rows) * scale * 1.1


def test_the_lower_bound_is_reached_by_orthogonal_updates() -> None:
    """Then MSE = sum w^2 norm^2 (1 / pi - 1), least at pi ~ w norm: importance sampling is the best there is."""
    length, weight = np.array([1.0, 2.0, 0.5, 1.5, 3.0]), np.full(5, 0.2)
    pi = inclusion_probabilities(weight * length, 2)
    best = float(np.sum(weight**2 * length**2 * (1 / pi - 1)))
    assert lower_bound(np.diag(length**2), weight, 2) == pytest.approx(best, rel=0.02)
    assert lower_bound(np.diag(length**2), weight, 2) <= best * (1 + 1e-9)


def test_dependent_updates_have_no_positive_bound() -> None:
    assert lower_bound(gram_of(TOY), TOY.population.weight_m, 2) == 0
    assert least_mse(gram_of(TOY), TOY.population.weight_m, 3) == (0.0, True)


def test_settings_reach_the_samplers() -> None:
    rows = [
        next(
            iter(
                audit(
                    TOY,
                    [f"fedis(floor={g})"],
                    designs=["pivotal"],
                    estimators=["horvitz-thompson"],
                )
            )
        )
        for g in (0.0, 1.0)
    ]
    assert [row.mse * 16 for row in rows] == pytest.approx([0.435, 1.833], abs=6e-4)


def test_the_command_names_samplers_that_it_could_not_audit() -> None:
    """hics-fl looks at the labels of an output layer, which the toy has not."""
    result = CliRunner().invoke(app, ["audit", "--samplers", "uniform,hics-fl", "--draws", "100"])
    assert result.exit_code == 0
    assert "cannot be drawn on these updates or with these designs and estimators: hics-fl." in " ".join(
        result.output.split()
    )


def test_a_client_without_weight_adds_nothing_to_the_least_error() -> None:
    update_md = np.random.default_rng(0).normal(size=(8, 20))
    gram_mm, weight_m = update_md @ update_md.T, np.full(8, 1 / 7)
    weight_m[0] = 0.0
    others = lower_bound(gram_mm[1:, 1:], weight_m[1:], 3)
    assert others > 1
    assert lower_bound(gram_mm, weight_m, 3) == pytest.approx(others)
    assert lower_bound(gram_mm, weight_m, 7) == 0.0
    still_md = update_md * (np.arange(8) > 0)[:, None]  # an update of zero has nothing to add either
    assert lower_bound(still_md @ still_md.T, np.full(8, 1 / 7), 3) == pytest.approx(others)
