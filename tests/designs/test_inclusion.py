import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltafl import DeltaflError, inclusion_probabilities, with_floor
from deltafl.designs.inclusion import draw_probabilities
from deltafl.types import FloatArray

TINY = 1e-12
any_scores = st.integers(1, 9).flatmap(
    lambda m: arrays(np.float64, m, elements=st.floats(0, 1e300))
)
tame_scores = st.integers(1, 9).flatmap(
    lambda m: arrays(np.float64, m, elements=st.floats(1e-4, 1e4))
)


def by_bisection(score_m: FloatArray, n: int) -> FloatArray:
    """pi = min(1, c s) with sum n, c found by halving an interval: slow, and nothing like
    repeated capping.
    """
    low = 0.0
    high = n / float(score_m.min())
    for _ in range(200):
        middle = (low + high) / 2
        if np.minimum(1, middle * score_m).sum() < n:
            low = middle
        else:
            high = middle
    capped_m: FloatArray = np.minimum(1, high * score_m)
    return capped_m


@pytest.mark.parametrize(
    ("scores", "n", "expected"),
    [
        ([1, 1, 2], 1, [0.25, 0.25, 0.5]),
        ([8, 1, 1], 2, [1, 0.5, 0.5]),
        ([100, 10, 1, 1], 3, [1, 1, 0.5, 0.5]),  # client 1 exceeds 1 only once client 0 is capped
        ([6, 4, 1, 1], 2, [1, 2 / 3, 1 / 6, 1 / 6]),
        ([0, 0, 0, 0], 2, [0.5] * 4),
        ([5, 0, 0, 0], 2, [1, 1 / 3, 1 / 3, 1 / 3]),
        ([5, 3, 0, 0], 2, [1, 1, 0, 0]),
        ([3, 1, 0], 1, [0.75, 0.25, 0]),
        ([7, 3, 1], 3, [1, 1, 1]),
        ([0], 1, [1]),
    ],
)
def test_hand_computed(scores: list[float], n: int, expected: list[float]) -> None:
    np.testing.assert_allclose(
        inclusion_probabilities(np.array(scores, dtype=float), n), expected, atol=1e-15
    )


@given(any_scores, st.data())
def test_invariants_for_any_scores(score_m: FloatArray, data: st.DataObject) -> None:
    m = len(score_m)
    n = data.draw(st.integers(1, m))
    pi_m = inclusion_probabilities(score_m, n)
    assert np.all((pi_m >= 0) & (pi_m <= 1))
    assert pi_m.sum() == pytest.approx(n, rel=TINY)
    order = np.argsort(score_m, kind="stable")
    assert np.all(np.diff(pi_m[order]) >= -TINY), (
        "a client with a larger score is selected at least as often"
    )
    assert n < m or np.array_equal(pi_m, np.ones(m))
    order_m = data.draw(st.permutations(range(m)))
    np.testing.assert_allclose(
        inclusion_probabilities(score_m[order_m], n), pi_m[order_m], rtol=1e-9, atol=TINY
    )


@given(tame_scores, st.data())
def test_equals_bisection_and_ignores_scale(score_m: FloatArray, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(score_m)))
    pi_m = inclusion_probabilities(score_m, n)
    np.testing.assert_allclose(pi_m, by_bisection(score_m, n), rtol=1e-9)
    for scale in (1e-200, 3.0, 1e200):
        np.testing.assert_allclose(inclusion_probabilities(scale * score_m, n), pi_m, rtol=1e-9)


@given(any_scores)
def test_draw_probabilities(score_m: FloatArray) -> None:
    p_m = draw_probabilities(score_m)
    assert p_m.sum() == pytest.approx(1, rel=TINY)
    assert score_m.any() or np.ptp(p_m) == 0
    if score_m.any():
        assert np.all(p_m[score_m == 0] == 0)
        assert np.all(p_m[score_m > 1e-200 * score_m.max()] > 0)


@given(any_scores, st.floats(0, 1))
def test_floor_is_a_mixture(score_m: FloatArray, floor: float) -> None:
    mixed_m = with_floor(score_m, floor)
    assert mixed_m.sum() == pytest.approx(1, rel=TINY)
    assert np.all(mixed_m >= floor / len(score_m) * (1 - TINY))
    np.testing.assert_allclose(with_floor(score_m, 0), draw_probabilities(score_m))
    np.testing.assert_allclose(with_floor(score_m, 1), 1 / len(score_m))


@given(any_scores, st.floats(0.05, 1), st.data())
def test_floor_bounds_every_weight(score_m: FloatArray, floor: float, data: st.DataObject) -> None:
    m = len(score_m)
    n = data.draw(st.integers(1, m))
    pi_m = inclusion_probabilities(with_floor(score_m, floor), n)
    assert np.all(1 / pi_m <= max(1, m / (floor * n)) * (1 + 1e-9))


def test_a_floor_among_those_present() -> None:
    """Who is absent gets 0 and counts for nothing; with everybody present the bits are those
    without a mask.
    """
    score_m = np.array([90.0, 1.0, 3.0])
    everyone_m = np.ones(3, dtype=np.bool_)
    mixed_m = with_floor(score_m, 0.2, np.array([False, True, True]))
    np.testing.assert_allclose(mixed_m, [0, 0.8 / 4 + 0.1, 0.8 * 3 / 4 + 0.1])
    assert np.array_equal(with_floor(score_m, 0.2, everyone_m), with_floor(score_m, 0.2))
    with pytest.raises(DeltaflError, match="no client is available"):
        with_floor(score_m, 0.2, ~everyone_m)


@pytest.mark.parametrize(
    ("scores", "n", "part"),
    [
        ([1, 1], 3, "3 of 2"),
        ([1, -1], 1, "client 1 is -1.0"),
        ([1, float("nan")], 1, "client 1 is nan"),
        ([], 1, "shape"),
    ],
)
def test_impossible_requests(scores: list[float], n: int, part: str) -> None:
    with pytest.raises(DeltaflError, match=part):
        inclusion_probabilities(np.array(scores, dtype=float), n)


@pytest.mark.parametrize("floor", [-0.1, 1.1, float("nan")])
def test_impossible_floor(floor: float) -> None:
    with pytest.raises(DeltaflError, match="floor"):
        with_floor(np.ones(2), floor)
