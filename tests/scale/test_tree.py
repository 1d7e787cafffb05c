"""The sum tree and the ordered pivotal design: against arrays, against the enumeration, and
against theory.
"""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltafl import inclusion_probabilities, with_floor
from deltafl.designs.ordered import draw, expectations
from deltafl.designs.table import draw_from_tree
from deltafl.scale.tree import WIDTH, Mass, SumTree
from deltafl.streams import stream
from deltafl.types import FloatArray
from tools.samplers import joint_expectations

#: Sizes around whole blocks and whole levels.
SIZES = [1, 2, WIDTH - 1, WIDTH, WIDTH + 1, WIDTH**2, WIDTH**2 + 1, 3 * WIDTH**2 - 5]


def wide_scores(m: int, seed: int = 0) -> FloatArray:
    """Scores over ten orders of magnitude, some of them zero."""
    rng = stream(seed, "audit", m)
    return np.where(rng.random(m) < 0.1, 0.0, rng.lognormal(sigma=3, size=m))


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_changed_tree_is_the_tree_of_the_changed_scores(m: int, dtype: str) -> None:
    """Bit for bit after many changes: nothing drifts."""
    rng = stream(1, "audit", m)
    score_m = wide_scores(m).astype(dtype)
    tree = SumTree(score_m.copy())
    for _ in range(30):
        index_k = rng.choice(m, size=int(rng.integers(0, min(m, 20) + 1)), replace=False)
        score_m[index_k] = rng.lognormal(sigma=3, size=len(index_k)) * (
            rng.random(len(index_k)) < 0.8
        )
        tree = tree.replaced(index_k, score_m[index_k])
    assert np.array_equal(np.asarray(tree), score_m)
    assert np.array_equal(tree.current().inner, SumTree(score_m.copy()).current().inner)
    assert tree.total == pytest.approx(score_m.astype(np.float64).sum(), rel=1e-12)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize(("slope", "base"), [(1.0, 0.0), (0.0, 2.0), (0.7, 0.4)])
@pytest.mark.parametrize("leave_out", [0.0, 0.3])
def test_search_finds_who_a_running_sum_finds(
    m: int, slope: float, base: float, leave_out: float
) -> None:
    rng = stream(2, "audit", m)
    score_m = wide_scores(m)
    out_m = rng.random(m) < leave_out
    score_m[out_m] = 0
    mass_m = np.where(out_m, 0.0, slope * score_m + base)
    if mass_m.sum() == 0:
        return
    end_m = np.cumsum(mass_m)
    position_k = rng.random(500) * end_m[-1]
    client_k, offset_k = SumTree(score_m).find(position_k, Mass(slope, base, np.flatnonzero(out_m)))
    expected_k = np.searchsorted(end_m, position_k, side="right")
    away_k = (
        np.abs(position_k[:, None] - end_m).min(axis=1) > 1e-9 * end_m[-1]
    )  # rounding decides on a border
    assert away_k.sum() > 200 or slope == 1.0
    assert np.array_equal(client_k[away_k], expected_k[away_k])
    np.testing.assert_allclose(
        offset_k, position_k - (end_m - mass_m)[client_k], atol=1e-9 * end_m[-1]
    )
    assert np.all(mass_m[client_k] > 0)


def test_positions_at_and_beyond_the_end_find_the_last_client_with_mass() -> None:
    tree = SumTree(np.array([1.0, 0.0, 2.0, 0.0]))
    client_k, offset_k = tree.find(np.array([0.0, 1.0, 3.0, 9.0]), Mass(1.0, 0.0))
    assert client_k.tolist() == [0, 2, 2, 2]
    np.testing.assert_allclose(offset_k, [0, 0, 2, 2])


@pytest.mark.parametrize("m", SIZES)
def test_all_large_scores_are_found(m: int) -> None:
    score_m = wide_scores(m)
    for least in (1e-3, 1.0, 50.0, 1e9):
        assert (
            SumTree(score_m.copy()).at_least(least).tolist()
            == np.flatnonzero(score_m >= least).tolist()
        )


SCORES = arrays(
    np.float64, st.integers(1, 100), elements=st.floats(0, 1) | st.sampled_from([0.0, 1e-30, 1e6])
)


@settings(max_examples=200)
@example(np.array([1.0, 2e-311, 0.0]), 2, 0.0)
@example(np.array([2e-311, 4e-311]), 1, 0.0)
@example(np.array([2e-311, 4e-311, 0.0]), 1, 0.1)
@example(np.append(np.ones(99), 1e-11), 99, 0.0)
@given(SCORES, st.integers(1, 100), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_expectations_are_those_of_the_code_for_arrays(
    score_m: FloatArray, n: int, floor: float
) -> None:
    """To 1e-12 with capping, floors and zeros; who counts as certain may lack that much, which
    the others then miss.
    """
    assume(n <= len(score_m))
    assume(
        score_m.min(initial=1.0, where=score_m > 0) >= 1e-311 * score_m.max()
    )  # below, the arrays' code says 0
    expected = expectations(SumTree(score_m.copy()), n, floor)
    pi_m = inclusion_probabilities(with_floor(score_m, floor) if floor else score_m, n)
    near = max(1e-12, 64 * n * np.finfo(np.float64).eps)
    np.testing.assert_allclose(
        expected.everyone(), pi_m, rtol=0, atol=2e-12 + near * len(expected.certain_c)
    )
    np.testing.assert_allclose(expected.everyone().sum(), n, rtol=1e-12)
    drawn = draw(expected, stream(n, "draw"))
    assert len(drawn) == len(set(drawn.tolist())) == n
    assert np.all(pi_m[drawn] > 0)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("shape", ["even", "wide", "a few giants", "nearly certain"])
def test_cohorts_are_distinct_and_of_the_exact_size(shape: str, floor: float) -> None:
    """Also where rounding is worst: many clients within rounding of certainty, n near m."""
    rng = stream(3, "audit")
    m = 3000
    score_m = {
        "even": np.ones(m),
        "wide": rng.lognormal(sigma=4, size=m),
        "a few giants": np.where(np.arange(m) % 700 == 3, 1e12, rng.random(m)),
        "nearly certain": 1 + 1e-10 * rng.random(m),
    }[shape]
    for n in (1, 2, 1000, m // 2, m - 1, m):
        cohort = draw_from_tree(SumTree(score_m.copy()), n, floor, rng)
        assert np.all(np.diff(cohort.client_n) > 0)
        assert len(cohort.client_n) == n
        pi_m = inclusion_probabilities(with_floor(score_m, floor), n)
        np.testing.assert_allclose(cohort.expected_n, pi_m[cohort.client_n], rtol=0, atol=1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scores", [[1.0, 2, 3, 4, 5, 1], [9.0, 1, 2, 2, 0, 1], [1.0] * 6], ids=str)
def test_pairs_and_clients_at_the_enumerated_rates(scores: list[float]) -> None:
    """First and second order of the tree's own draw, floor included, within 4.5 standard errors."""
    tree = SumTree(np.array(scores))
    n = 3
    floor = 0.2
    draws = 8000
    expected = expectations(tree, n, floor)
    rng = stream(5, "draw")
    count_tm = np.zeros((draws, 6))
    for count_m in count_tm:
        count_m[draw(expected, rng)] = 1
    joint_mm = joint_expectations("ordered-pivotal", expected.everyone())
    error_mm = np.sqrt(joint_mm * (1 - joint_mm) / draws)
    assert np.all(np.abs(count_tm.T @ count_tm / draws - joint_mm) <= 4.5 * error_mm + 1e-12)


@settings(max_examples=40)
@given(arrays(np.float64, 6, elements=st.floats(0.01, 1)), st.integers(2, 5))
def test_no_order_makes_it_worse_than_draws_with_replacement(score_m: FloatArray, n: int) -> None:
    """Chauvet and Ruiz-Gazen 2017, for whatever the clients' updates are: a difference of
    matrices is semi-definite.
    """
    pi_m = inclusion_probabilities(score_m, n)
    assume(pi_m.max() < 1)
    with_mm, without_mm = (
        joint_expectations(design, pi_m) for design in ("multinomial", "ordered-pivotal")
    )
    assert np.linalg.eigvalsh((with_mm - without_mm) / np.outer(pi_m, pi_m)).min() > -1e-9
