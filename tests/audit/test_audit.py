"""The audit finds what is there: exact biases, wrong weights, the toy's errors; and its bounds
are bounds.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deltafl import (
    SAMPLERS,
    Cohort,
    Delta,
    DeltaflError,
    KnownUpdates,
    Population,
    inclusion_probabilities,
)
from deltafl.audit import AuditRow, Subject, audit, least_mse, least_over_designs, lower_bound
from deltafl.cli.main import app
from deltafl.estimators.table import ALL_ESTIMATORS, ESTIMATORS, horvitz_thompson
from deltafl.types import FloatArray, IntArray


def subject_of(update_md: FloatArray, sizes: list[int], n: int, loss_m: FloatArray) -> Subject:
    population = Population.from_sizes(sizes)
    return Subject(population, KnownUpdates(update_md, population.weight_m, loss_m=loss_m), n)


TOY = subject_of(np.array([[2.0, 2], [4, 1], [6, -3]]), [1, 1, 1], 2, np.array([2.0, 1.5, 4.5]))


def random_subject(m: int, n: int, d: int, seed: int) -> Subject:
    rng = np.random.default_rng(seed)
    update_md = rng.normal(size=(m, d)) * rng.lognormal(0, 0.7, size=(m, 1)) + 0.3
    return subject_of(update_md, rng.integers(5, 30, size=m).tolist(), n, rng.exponential(size=m))


def bound_parts(subject: Subject) -> tuple[FloatArray, FloatArray]:
    """u_i . u_j, float64 (m, m), and the weights."""
    wide_md = subject.known.update_md.astype(np.float64)
    return wide_md @ wide_md.T, subject.population.weight_m


def one_row(subject: Subject, sampler: str, design: str, draws: int = 4000) -> AuditRow:
    (row,) = audit(
        subject, [sampler], designs=[design], estimators=["horvitz-thompson"], draws=draws
    )
    return row


@pytest.fixture(scope="module")
def toy_rows(request: pytest.FixtureRequest) -> dict[tuple[str, str, str], AuditRow]:
    """All designs with one estimator, all estimators with a design of each kind."""
    with_all = {"delta", "fedis", *SAMPLERS}
    if not request.config.getoption("--thorough"):
        # tests/estimators enumerates the others.
        with_all = {"delta", "fedis", *[*SAMPLERS][::3]}
    rows = [
        *audit(TOY, SAMPLERS, estimators=["horvitz-thompson"], draws=300),
        *audit(TOY, sorted(with_all), designs=["multinomial", "successive"], draws=300),
    ]
    return {(row.sampler, row.design, row.estimator): row for row in rows}


def test_a_label_is_audited_with_its_own_design_and_estimator() -> None:
    rows = [(row.design, row.estimator) for row in audit(TOY, ["uniform@pivotal@difference"])]
    assert rows == [("pivotal", "difference")]
    estimators = {row.estimator for row in audit(TOY, ["uniform@pivotal"])}
    assert estimators == {*ESTIMATORS}
    assert {row.design for row in audit(TOY, ["uniform@@hajek"])} > {"systematic", "pivotal"}


@pytest.mark.parametrize("option", ["--samplers=uniform@@{}:Fails", "--estimators={}:Fails"])
def test_an_own_control_that_fails_in_the_audit_is_reported_with_its_line(
    tmp_path: Path, option: str
) -> None:
    file = tmp_path / "failing_control.py"
    begin = (
        "from deltafl.estimators.control_variates import NoControl\n\n\nclass Fails(NoControl):\n"
    )
    file.write_text(begin + "    def value(self, *_):\n        return {}['c']\n")
    arguments = ["audit", "--samplers=uniform", "--designs=pivotal", option.format(file)]
    with pytest.raises(
        DeltaflError, match=r"own code failed in a run: KeyError: 'c' \(failing_control.py line 6\)"
    ):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_where_all_are_asked_a_design_that_cannot_leave_one_out_is_audited() -> None:
    row = one_row(TOY._replace(n=3), "delta", "successive")
    assert row.exact
    # Successive draws take all three, each with the coefficient 1 / (3 n p) of a random cohort.
    update_md = TOY.known.update_md.astype(np.float64)
    score_m = np.linalg.norm(update_md - update_md.mean(axis=0), axis=1)
    estimate_d = (update_md / (9 * score_m / score_m.sum())[:, None]).sum(axis=0)
    bias = np.linalg.norm(estimate_d - [4, 0]) / 4
    assert row.bias == pytest.approx(bias, rel=1e-5)


def test_every_claim_holds_on_the_toy(toy_rows: dict[tuple[str, str, str], AuditRow]) -> None:
    assert len(toy_rows) > 200
    assert [row for row in toy_rows.values() if not row.passes] == []
    plain = [
        row for row in toy_rows.values() if row.estimator == "horvitz-thompson" and row.needs_scores
    ]
    assert {row.sampler for row in plain} == {"delta"}
    for (
        row
    ) in toy_rows.values():  # the audit finds the rounds that a claim is not for, and no others
        if row.claims_unbiased and SAMPLERS[row.sampler].needs == "oracle":
            assert (row.bias_at_zero > 0) <= row.needs_scores, row
    assert toy_rows["delta", "systematic", "horvitz-thompson"].bias_at_zero == pytest.approx(1 / 3)
    assert toy_rows["fedis", "multinomial", "difference"].bias_at_zero > 0
    assert all(row.exact for row in toy_rows.values() if SAMPLERS[row.sampler].scores != "unknown")


def test_a_client_that_is_left_out_without_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delta, "skips_zero_scores", False)
    row = one_row(TOY, "delta", "pivotal")
    assert (row.is_unbiased, row.passes) == (True, False)


@pytest.mark.parametrize(
    ("sampler", "design", "estimator", "mse"),
    [
        ("fedis", "multinomial", "horvitz-thompson", 2.366),
        ("fedis", "pivotal", "horvitz-thompson", 0.435),
        ("fedis", "successive", "horvitz-thompson", 1.088),
        ("fedis", "successive", "plain-mean", 1.636),
        ("delta", "successive", "hajek", 0.370),
    ],
)
def test_the_toys_errors_are_the_known_ones(
    toy_rows: dict[tuple[str, str, str], AuditRow],
    sampler: str,
    design: str,
    estimator: str,
    mse: float,
) -> None:
    row = toy_rows[sampler, design, estimator]
    assert row.mse * 16 == pytest.approx(mse, abs=6e-4)
    assert row.claims_unbiased == (design != "successive")


def break_weights(
    monkeypatch: pytest.MonkeyPatch, factor_of: Callable[[IntArray], FloatArray]
) -> None:
    def broken(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
        return factor_of(cohort.client_n) * horvitz_thompson(cohort, weight_n, response_n)

    row = ESTIMATORS["horvitz-thompson"]._replace(coefficients=broken)
    monkeypatch.setitem(ALL_ESTIMATORS, "horvitz-thompson", row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", [1.02, 0.95])
def test_a_broken_weight_is_found_exactly(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    break_weights(monkeypatch, lambda client_n: np.where(client_n == 1, wrong, 1.0))
    assert not one_row(TOY, "uniform", "pivotal").passes
    result = CliRunner().invoke(app, ["audit", "--samplers", "uniform"])
    assert result.exit_code == 1
    assert "CLAIM FAILS" in result.stdout


@pytest.mark.thorough
def test_a_weight_broken_for_all_clients_is_found_by_drawing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = random_subject(30, 15, 50, seed=1)
    assert one_row(subject, "fedis", "systematic", 2000).passes
    break_weights(monkeypatch, lambda client_n: np.full(len(client_n), 0.85))
    row = one_row(subject, "fedis", "systematic", 2000)
    assert (row.passes, row.exact) == (False, False)


def test_the_command_names_what_it_could_not_audit() -> None:
    """hics-fl looks at the labels of an output layer, which the toy has not."""
    result = CliRunner().invoke(app, ["audit", "--samplers", "uniform,hics-fl", "--draws", "100"])
    assert result.exit_code == 0, result.stdout
    assert "0 claims fail" in result.stdout
    assert "cannot be drawn on these updates or with these designs" in " ".join(
        result.output.split()
    )


def test_enumerated_and_drawn_errors_agree_with_the_textbook() -> None:
    """The MSE of simple random sampling: (1/n - 1/m) S^2 with y_i = m w_i u_i."""
    for m, exact, tolerance in ((6, True, 1e-6), (12, False, 0.05)):
        subject = random_subject(m, 3, 4, seed=2)
        row = one_row(subject, "uniform", "simple-random", 8000)
        weight_m = subject.population.weight_m
        update_md = subject.known.update_md.astype(np.float64)
        y_md = m * weight_m[:, None] * update_md
        variance = np.sum((y_md - y_md.mean(axis=0)) ** 2) / (m - 1) * (1 / 3 - 1 / m)
        assert row.mse == pytest.approx(
            variance / np.sum((weight_m @ update_md) ** 2), rel=tolerance
        )
        assert row.exact == exact


def test_options_reach_the_samplers_and_unknown_names_are_refused_before_work() -> None:
    mse = [one_row(TOY, f"fedis(floor={g})", "pivotal").mse * 16 for g in (0.0, 1.0)]
    assert mse == pytest.approx([0.435, 1.833], abs=6e-4)
    with pytest.raises(DeltaflError, match="pivotal"):
        one_row(TOY, "uniform", "pivotl")
    with pytest.raises(DeltaflError, match=r"write uniform$"):
        one_row(TOY, "uniform+clip=median", "pivotal")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_no_design_is_below_the_lower_bound(seed: int) -> None:
    """A search that may leave clients out finds less, and is biased."""
    gram_mm, weight_m = bound_parts(random_subject(6, 2, 20, seed))
    assert least_over_designs(gram_mm, weight_m, 2) >= lower_bound(gram_mm, weight_m, 2) > 0


def test_the_least_mse_on_the_toy_is_a_minimum_over_designs() -> None:
    """Against a grid over the probabilities of the three pairs."""
    gram, weight = bound_parts(TOY)
    least = least_over_designs(gram, weight, 2)
    pairs = [(0, 1), (0, 2), (1, 2)]
    tried = []
    for a, b in np.random.default_rng(0).dirichlet(np.ones(3), size=5000)[:, :2]:
        q = np.array([a, b, 1 - a - b])
        pi = np.array([a + b, 1 - b, 1 - a])
        errors = [
            sum(weight[i] / pi[i] * TOY.known.update_md[i] for i in pair) - [4.0, 0.0]
            for pair in pairs
        ]
        tried.append(float(q @ [np.sum(e**2) for e in errors]))
    assert least <= min(tried) + 1e-9
    assert least == pytest.approx(min(tried), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_the_lower_bound_is_below_every_unbiased_method(seed: int) -> None:
    subject = random_subject(6, 3, 40, seed)
    gram, weight = bound_parts(subject)
    rows = [one_row(subject, name, "pivotal") for name in ("fedis", "delta", "uniform")]
    assert all(row.exact for row in rows)
    assert (
        0
        < lower_bound(gram, weight, 3)
        < min(row.mse for row in rows) * float(weight @ gram @ weight)
    )


def test_the_lower_bound_is_reached_by_orthogonal_updates() -> None:
    """Then MSE = sum w^2 norm^2 (1 / pi - 1), least at pi ~ w norm: importance sampling is the
    best there is.
    """
    length = np.array([1.0, 2.0, 0.5, 1.5, 3.0])
    weight = np.full(5, 0.2)
    pi = inclusion_probabilities(weight * length, 2)
    best = float(np.sum(weight**2 * length**2 * (1 / pi - 1)))
    bound = lower_bound(np.diag(length**2), weight, 2)
    assert bound == pytest.approx(best, rel=0.02)
    assert bound <= best * (1 + 1e-9)


def test_dependent_updates_have_no_positive_bound() -> None:
    assert lower_bound(*bound_parts(TOY), 2) == 0
    assert least_mse(*bound_parts(TOY), 3) == (0.0, True)


def test_a_client_without_weight_adds_nothing_to_the_least_error() -> None:
    update_md = np.random.default_rng(0).normal(size=(8, 20))
    gram_mm = update_md @ update_md.T
    weight_m = np.full(8, 1 / 7)
    weight_m[0] = 0.0
    others = lower_bound(gram_mm[1:, 1:], weight_m[1:], 3)
    assert others > 1
    assert lower_bound(gram_mm, weight_m, 3) == pytest.approx(others)
    assert lower_bound(gram_mm, weight_m, 7) == 0.0
    still_md = (
        update_md * (np.arange(8) > 0)[:, None]
    )  # an update of zero has nothing to add either
    assert lower_bound(still_md @ still_md.T, np.full(8, 1 / 7), 3) == pytest.approx(others)


@pytest.mark.parametrize("option", ["--samplers=", "--samplers=,", "--designs=,,", "--estimators="])
def test_an_empty_list_is_not_all(option: str) -> None:
    with pytest.raises(DeltaflError, match="names no sampler, design or estimator"):
        CliRunner().invoke(app, ["audit", "--samplers=uniform", option], catch_exceptions=False)


def test_more_clients_or_draws_than_fit_in_memory_are_refused() -> None:
    with pytest.raises(DeltaflError, match="draws is 100000000; it must be"):
        next(audit(TOY, ["uniform"], draws=10**8))
    many = TOY._replace(population=Population.from_sizes(np.ones(10**5, int)))
    with pytest.raises(DeltaflError, match="num_clients is 100000; it must be"):
        next(audit(many, ["uniform"]))
