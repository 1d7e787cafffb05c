"""The real draws against what was asked for and against the enumeration of ``exact.py``."""

import numpy as np
import pytest

from deltafl import DESIGNS, DeltaflError, draw_cohort, inclusion_probabilities, stream
from deltafl.designs.exact import support
from deltafl.designs.table import cohort_size, find_design, systematic
from deltafl.types import FloatArray

EXACT = [name for name, design in DESIGNS.items() if design.exact and not design.uses_values]
FIXED_SIZE = [name for name, design in DESIGNS.items() if design.kind == "fixed-size"]


def draw_counts(
    design: str, score_m: FloatArray, n: int, draws: int, seed: int = 0
) -> tuple[FloatArray, FloatArray]:
    """Counts (draws, m) of the real draw code, and the expectations it stated (0 where a client
    was never drawn).
    """
    rng = stream(seed, "draw")
    count_tm = np.zeros((draws, len(score_m)))
    expected_m = np.zeros(len(score_m))
    for count_m in count_tm:
        cohort = draw_cohort(score_m, n, design, rng)
        count_m[cohort.client_n] = cohort.count_n
        expected_m[cohort.client_n] = cohort.expected_n
    return count_tm, expected_m


def scores_for(design: str, score_m: FloatArray) -> FloatArray:
    return np.ones(len(score_m)) if design == "simple-random" else score_m


@pytest.mark.sampled(6)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "scores", [[1.0, 1, 1, 1, 1], [1.0, 2, 3, 4, 5], [9.0, 1, 2, 2, 0]], ids=str
)
@pytest.mark.parametrize("design", DESIGNS)
def test_cohorts_are_drawn_as_enumerated(design: str, scores: list[float], n: int) -> None:
    """Chi-square of the drawn cohorts against their probabilities; no impossible cohort is ever
    drawn.
    """
    score_m = scores_for(design, np.array(scores))
    draws = 2000
    count_tm, _ = draw_counts(design, score_m, n, draws, seed=n)
    probability = support(design, DESIGNS[design].expectation(score_m, n))
    cohorts, times = np.unique(count_tm, axis=0, return_counts=True)
    observed = {tuple(int(c) for c in row): int(t) for row, t in zip(cohorts, times, strict=True)}
    assert {count for count in observed if probability.get(count, 0.0) < 1e-12} == set()
    cells = [
        (observed.get(count, 0), draws * p) for count, p in probability.items() if draws * p >= 5
    ]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    assert statistic <= len(cells) + 5 * np.sqrt(2 * len(cells))


def deviations(design: str, wrong: float = 0.0, draws: int = 20000) -> tuple[float, float]:
    """(largest, root mean square) deviation of mean counts at m = 40, n = 8, in standard errors of
    exact draws.

    ``wrong``: relative error put into the expectations, up and down in turn, so that it cancels in
    the sum.
    """
    score_m = scores_for(design, np.linspace(1, 12, 40) ** 1.5)
    count_tm, expected_m = draw_counts(design, score_m, 8, draws)
    selected_m = DESIGNS[design].expectation(score_m, 8)
    np.testing.assert_allclose(expected_m, selected_m)
    p_m = selected_m / 8
    spread_m = selected_m * (1 - p_m if DESIGNS[design].kind == "replacement" else 1 - selected_m)
    undecided = spread_m > 1e-12
    assert np.array_equal(count_tm[:, ~undecided], np.ones_like(count_tm[:, ~undecided]))
    stated_m = selected_m * (1 + wrong * np.where(np.arange(40) % 2 == 0, 1, -1))
    z_m = (count_tm.mean(axis=0) - stated_m)[undecided] / np.sqrt(spread_m[undecided] / draws)
    return float(np.abs(z_m).max()), float(np.sqrt(np.mean(z_m**2)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("design", EXACT)
def test_exact_designs_keep_their_promise(design: str) -> None:
    largest, typical = deviations(design, draws=6000)
    assert largest < 4
    assert typical < 1.5


@pytest.mark.thorough  # it tests the test
def test_the_same_statistics_find_successive_draws_and_an_error_of_two_and_a_half_per_cent() -> (
    None
):
    assert deviations("systematic", wrong=0.025)[1] > 1.8
    largest, typical = deviations(
        "successive"
    )  # numpy's ``choice(replace=False, p=p)``: a few per cent
    assert largest > 8
    assert typical > 4


@pytest.mark.parametrize("design", FIXED_SIZE)
def test_large_cohorts_have_the_exact_size(design: str) -> None:
    """Rounding in sums over thousands of clients must not lose or double a draw."""
    rng = stream(0, "draw")
    score_m = scores_for(design, rng.lognormal(sigma=2, size=5000))
    for n in (1, 499, 2500, 4999, 5000):
        cohort = draw_cohort(score_m, n, design, rng)
        assert len(cohort.client_n) == n
        assert np.all(cohort.count_n == 1)


@pytest.mark.parametrize("design", DESIGNS)
def test_only_available_clients_are_selected(design: str) -> None:
    """With a mask the draw is that of a smaller population, client numbers kept."""
    available_m = np.array([True, False, True, True, False, True])
    score_m = scores_for(design, np.array([1.0, 100, 2, 3, 100, 4]))
    for seed in range(20):
        masked = draw_cohort(score_m, 2, design, stream(seed, "draw"), available_m)
        alone = draw_cohort(score_m[available_m], 2, design, stream(seed, "draw"))
        assert np.array_equal(masked.client_n, np.array([0, 2, 3, 5])[alone.client_n])
        assert np.array_equal(masked.expected_n, alone.expected_n)


def test_fewer_available_than_wanted() -> None:
    with pytest.raises(DeltaflError, match="no client is available"):
        draw_cohort(np.ones(2), 1, "systematic", stream(0, "draw"), np.zeros(2, dtype=bool))
    cohort = draw_cohort(
        np.ones(5), 4, "systematic", stream(0, "draw"), np.array([1, 0, 0, 1, 0], dtype=bool)
    )
    assert cohort.client_n.tolist() == [0, 3]
    assert cohort.expected_n.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("score", "n", "design", "part"),
    [
        ([1.0, 1], 3, "systematic", "3 of 2"),
        ([1.0, 2], 1, "simple-random", "equal expectations"),
        ([1.0, 0, 0], 2, "successive", "floor"),
        ([1.0, float("nan")], 1, "multinomial", "client 1"),
        ([1.0, 1], 1, "sistematic", "did you mean 'systematic'"),
        ([1.0, 1], 1, "qqq", "choose one of"),
    ],
)
def test_impossible_draws(score: list[float], n: int, design: str, part: str) -> None:
    with pytest.raises(DeltaflError, match=part):
        draw_cohort(np.array(score), n, design, stream(0, "draw"))


def test_fixed_size_needs_a_whole_sum() -> None:
    for name in ("systematic", "simple-random", "multinomial", "successive"):
        with pytest.raises(DeltaflError, match="whole number"):
            find_design(name).draw(np.full(3, 0.5), stream(0, "draw"))
    assert cohort_size(inclusion_probabilities(np.arange(1.0, 10.0), 4)) == 4


def test_a_systematic_draw_cannot_run_beyond_the_last_client() -> None:
    class Late(np.random.Generator):
        def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 1 - 2**-53

    drawn = systematic(np.full(20, 0.5), Late(np.random.PCG64(0)))
    assert len(set(drawn.tolist())) == 10
