"""The numbers of a comparison: by hand, against a bootstrap, and by Monte Carlo coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.analysis.methods import rounds_until
from deltafl.analysis.statistics import (
    area_under,
    fairness_of,
    fieller,
    first_reach,
    gap_closed,
    mean_and_sd,
    mean_interval,
    mean_of_best,
    ratio_of_means,
    reach,
)
from deltafl.streams import stream
from deltafl.types import FloatArray
from tools.runs import make_run


def test_mean_of_best_takes_five_of_the_last_four_percent() -> None:
    round_r = np.arange(1, 501)
    value_r = np.zeros(500)
    value_r[479] = 0.99  # round 480 = 500 - 20 is just outside
    value_r[480:486] = [0.5, 0.7, 0.6, 0.8, 0.9, 0.4]  # rounds 481 to 486 are inside
    assert mean_of_best(value_r, round_r, higher=True) == pytest.approx(
        (0.5 + 0.7 + 0.6 + 0.8 + 0.9) / 5
    )


@pytest.mark.parametrize(
    ("num_rounds", "num_late"),
    [(6, 5), (100, 5), (125, 5), (126, 6), (130, 6), (150, 6), (500, 20)],
)
def test_the_late_rounds_are_those_after_96_percent(num_rounds: int, num_late: int) -> None:
    # One round is marked; it counts exactly if round > T - max(0.04 T, 5). A run of 6 rounds has
    # one that does not.
    round_r = np.arange(1, num_rounds + 1)
    for marked, counts in ((num_rounds - num_late + 1, True), (num_rounds - num_late, False)):
        assert (mean_of_best(1.0 * (round_r == marked), round_r, higher=True) > 0) == counts


def test_mean_of_best_with_few_evaluations() -> None:
    # Of the last 20 rounds only 490 and 500 were evaluated.
    value_r = np.linspace(0.0, 0.9, 50)
    round_r = np.arange(10, 501, 10)
    assert mean_of_best(value_r, round_r, higher=True) == pytest.approx(
        (value_r[-1] + value_r[-2]) / 2
    )


def test_first_reach_counts_a_tie_and_skips_nan() -> None:
    assert first_reach(np.array([0.1, np.nan, 0.7, 0.8]), 0.7, higher=True) == 2
    assert first_reach(np.array([np.nan, 3.0, 0.5, 0.4]), 0.5, higher=False) == 2
    assert first_reach(np.array([0.1, 0.2]), 0.7, higher=True) is None
    assert first_reach(np.array([np.inf, np.nan]), 0.7, higher=False) is None


def test_mean_and_sd() -> None:
    assert mean_and_sd(np.array([1.0, 2.0, 6.0])) == pytest.approx(
        (3.0, math.sqrt((4 + 1 + 9) / 2))
    )
    mean, sd = mean_and_sd(np.array([2.0]))
    assert mean == 2.0
    assert math.isnan(sd)
    assert all(math.isnan(number) for number in mean_and_sd(np.array([1.0, np.inf])))


def test_fairness_is_the_mean_of_the_late_models_own_numbers() -> None:
    # Two models with the same 20 accuracies, given to the clients the other way round: the mean
    # model is fair to all.
    up_m = np.linspace(0.0, 1.9, 20) / 2
    found = fairness_of(np.array([[*up_m, np.nan], [*up_m[::-1], np.nan]]))
    assert found is not None
    assert found.model_dump() == pytest.approx(
        {"mean": 0.475, "worst_tenth": 0.025, "sd": np.std(up_m)}
    )
    assert fairness_of(np.full((2, 3), np.nan)) is None and fairness_of(np.zeros((0, 3))) is None


def test_ratio_of_means_by_hand() -> None:
    # a = (90, 110, 100), b = (50, 50, 60): means 100 and 160/3. r = a/100 - b/(160/3) = (-.0375,
    # .1625, -.125), sum 0, squares .00140625 + .02640625 + .015625 = .0434375; se = sqrt(.0434375 /
    # 2 / 3). With 2 degrees of freedom the quantile has a closed form: t = q sqrt(2 / (1 - q^2)) at
    # q = .95, about 4.3027.
    result = ratio_of_means(np.array([90.0, 110.0, 100.0]), np.array([50.0, 50.0, 60.0]))
    margin = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * math.sqrt(0.0434375 / 6)
    assert result.mean == pytest.approx(1.875)
    assert result.low == pytest.approx(1.875 * math.exp(-margin), rel=1e-12)
    assert result.high == pytest.approx(1.875 * math.exp(margin), rel=1e-12)


positive = st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=2, max_size=8)


@given(positive, st.floats(0.01, 100))
def test_swapping_inverts_and_units_cancel(pairs: list[tuple[float, float]], unit: float) -> None:
    base_s, other_s = np.array(pairs).T
    result = ratio_of_means(base_s, other_s)
    swapped = ratio_of_means(other_s, base_s)
    assert result.low is not None and result.high is not None and swapped.low is not None
    assert result.low <= result.mean <= result.high
    assert swapped.mean == pytest.approx(1 / result.mean)
    assert swapped.low == pytest.approx(1 / result.high)
    assert ratio_of_means(unit * base_s, unit * other_s) == pytest.approx(result)


def _pairs(num_pairs: int, replicate: int) -> tuple[FloatArray, FloatArray]:
    """Rounds with a shared difficulty: E base = 1.25 E other exactly."""
    rng = stream(7, "data", round=num_pairs, client=replicate)
    shared_s = np.exp(0.2 * rng.standard_normal(num_pairs))
    noise_sk = np.exp(0.1 * rng.standard_normal((num_pairs, 2)))
    return 250 * shared_s * noise_sk[:, 0], 200 * shared_s * noise_sk[:, 1]


@pytest.mark.parametrize("num_pairs", [3, 5, 20])
def test_the_interval_covers_the_true_ratio_in_95_percent(num_pairs: int) -> None:
    covered = 0
    replicates = 4000
    for replicate in range(replicates):
        result = ratio_of_means(*_pairs(num_pairs, replicate))
        assert result.low is not None and result.high is not None
        covered += result.low <= 1.25 <= result.high
    # Binomial standard error sqrt(.95 .05 / 4000) = .0034. Four of them, and .01 for the
    # linearisation.
    assert abs(covered / replicates - 0.95) < 4 * 0.0034 + 0.01


def test_the_interval_agrees_with_a_paired_bootstrap() -> None:
    base_s, other_s = _pairs(60, 0)
    rng = stream(0, "bootstrap")
    row_bs = rng.integers(60, size=(20_000, 60))
    low, high = np.quantile(
        base_s[row_bs].mean(axis=1) / other_s[row_bs].mean(axis=1), [0.025, 0.975]
    )
    result = ratio_of_means(base_s, other_s)
    assert result.low is not None and result.high is not None
    assert math.log(result.high / result.low) == pytest.approx(math.log(high / low), rel=0.06)
    assert result.low == pytest.approx(low, rel=0.005)
    assert result.high == pytest.approx(high, rel=0.005)


def test_gap_closed() -> None:
    uniform_s = np.array([400.0, 200.0])
    full_s = np.array([100.0, 100.0])
    for own_s, value in ((np.array([200.0, 200.0]), 0.5), (uniform_s, 0.0), (full_s, 1.0)):
        gap = gap_closed(uniform_s, own_s, full_s)
        assert gap is not None
        assert gap.mean == pytest.approx(value)
    assert gap_closed(full_s, uniform_s, full_s) is None
    assert gap_closed(full_s, full_s, uniform_s) is None


def test_fieller_interval_holds_what_a_paired_t_does_not_reject() -> None:
    own_s = np.array([5.0, 7.0, 9.0, 6.0])
    gap_s = np.array([10.0, 11.0, 15.0, 12.0])
    found = fieller(own_s, gap_s)
    assert found.mean == pytest.approx(27 / 48)
    for end in found[1:]:
        assert end is not None
        interval = mean_interval(own_s - end * gap_s)
        # At an end of the interval the paired t just rejects: 0 is an end of its interval.
        assert min(abs(interval.low or 0.0), abs(interval.high or 0.0)) == pytest.approx(
            0.0, abs=1e-9
        )


def test_fieller_interval_is_unbounded_where_the_gap_may_be_zero() -> None:
    assert fieller(np.array([1.0, 2.0]), np.array([10.0, -8.0])) == (1.5, None, None)
    assert fieller(np.array([1.0]), np.array([2.0])) == (0.5, None, None)


def test_the_area_under_a_curve_keeps_the_last_accuracy() -> None:
    run = make_run(
        "a", 0, 1, num_rounds=2, round_r=np.array([2, 4]), accuracy_r=np.array([0.2, 0.8])
    )
    assert area_under(run, 6) == pytest.approx((3 * 0.2 + 3 * 0.8) / 6)
    assert area_under(run._replace(accuracy_r=np.array([np.nan, 0.8])), 4) == pytest.approx(0.8 / 4)


def test_reach_of_a_run() -> None:
    run = make_run("a", 0, 1, accuracy_r=np.array([0.2, 0.9, 0.2, 0.2, 0.2, 0.8, 0.8]))
    assert reach(run, 0.7) == 1
    assert reach(run, 0.95) is None


@pytest.mark.parametrize(
    ("label", "before"),
    [
        ("uniform", 0),
        ("census", 0),
        ("census+some-part", 0),
        ("census@@regression-damped+some-part+average=0.5", 1),
    ],
)
def test_a_census_that_moves_no_model_is_a_round_before(label: str, before: int) -> None:
    """Rows of a page are labels with the name of a part."""
    run = make_run(label, 0, None)
    assert rounds_until(run, 0) == run.round_r[0] + before
