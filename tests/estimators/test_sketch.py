"""Sketches keep inner products on average, are linear, and do not depend on how they were cut."""

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.estimators import sketch
from deltafl.estimators.own import CommonControlState
from deltafl.estimators.sketch import FOLDED, count_sketch, folded
from deltafl.plan import Plan
from deltafl.round import close_round, init_round, open_round
from deltafl.samplers.fixed import Fixed
from deltafl.scale.stretches import LARGE
from deltafl.types import Cohort, FloatArray, Population, Reports


def test_inner_products_are_right_on_average_with_the_stated_spread() -> None:
    rng = np.random.default_rng(0)
    u_nd = rng.standard_normal((2, 400))
    u_nd[1] += 0.5 * u_nd[0]
    seeds = 4000
    size = 8
    products = np.array(
        [s[0] @ s[1] for s in (count_sketch(u_nd, size, seed) for seed in range(seeds))]
    )
    spread = np.sqrt(2 / size) * np.linalg.norm(u_nd[0]) * np.linalg.norm(u_nd[1])
    assert abs(products.mean() - u_nd[0] @ u_nd[1]) < 4 * products.std() / np.sqrt(seeds)
    assert 0.4 * spread < products.std() < spread


@pytest.mark.parametrize("groups", [1, 12])
def test_folds_keep_inner_products_with_the_stated_spread(groups: int) -> None:
    """All the content is in a few groups of eight coordinates, 128 apart."""
    rng = np.random.default_rng(3)
    content_nsb = np.zeros((2, 8, 128))
    content_nsb[:, :, :groups] = rng.standard_normal((2, 8, groups)) + 0.5
    u_nd = content_nsb.reshape(2, 1024)
    seeds = 4000
    products = np.array([f[0] @ f[1] for f in (folded(u_nd, seed) for seed in range(seeds))])
    spread = np.sqrt(2 / groups) * np.linalg.norm(u_nd[0]) * np.linalg.norm(u_nd[1])
    assert abs(products.mean() - u_nd[0] @ u_nd[1]) < 4 * products.std() / np.sqrt(seeds)
    assert 0.3 * spread < products.std() < 1.1 * spread


def test_folds_are_sums_of_eight_coordinates_with_signs_of_their_own() -> None:
    fold_dk = folded(np.eye(2048), 7)
    assert fold_dk.shape == (2048, 2048 // FOLDED)
    assert (np.abs(fold_dk).sum(axis=1) == 1).all()
    assert (np.abs(fold_dk).sum(axis=0) == FOLDED).all()
    sign_d = fold_dk.sum(axis=1)
    assert abs(sign_d.mean()) < 0.1
    assert not np.array_equal(sign_d[:1024], sign_d[1024:])
    assert not np.array_equal(fold_dk, folded(np.eye(2048), 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stretches_are_folded_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    dtype: type[np.floating[Any]],
) -> None:
    monkeypatch.setattr(sketch, "_BLOCK", 4096)
    u_nd = np.random.default_rng(4).standard_normal((3, 9000)).astype(dtype)
    whole_nk = folded(u_nd, 17)
    assert whole_nk.dtype == dtype
    for cuts in ([1024, 5120, 8192], [3072], [4096, 8192]):
        ends = [0, *cuts, 9000]
        parts = [folded(u_nd[:, a:b], 17, a) for a, b in pairwise(ends)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole_nk)


def test_sketches_are_linear_and_each_coordinate_has_one_bucket_and_a_sign() -> None:
    rng = np.random.default_rng(1)
    u_nd = rng.standard_normal((3, 50))
    together = count_sketch(u_nd, 5, 7)
    np.testing.assert_allclose(
        count_sketch(2 * u_nd[:1] - u_nd[1:2], 5, 7)[0], 2 * together[0] - together[1]
    )
    basis = count_sketch(np.eye(50), 5, 7)
    assert (np.abs(basis).sum(axis=1) == 1).all()
    np.testing.assert_allclose(u_nd @ basis, together)
    assert not np.array_equal(basis, count_sketch(np.eye(50), 5, 8))


def test_blocks_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter vector has the sketch of a longer one that ends in zeros."""
    monkeypatch.setattr(sketch, "_BLOCK", 16)
    u_nd = np.random.default_rng(2).standard_normal((1, 40))
    longer = np.concatenate([u_nd, np.zeros((1, 30))], axis=1)
    np.testing.assert_array_equal(count_sketch(u_nd, 8, 3), count_sketch(longer, 8, 3))


def test_a_sketch_takes_less_memory_than_the_model() -> None:
    """NumPy reports its arrays to tracemalloc: buckets, or a copy in float64, of all coordinates
    would be a model.
    """
    n = 2
    d = 2_000_000
    size = 8
    u_nd = np.ones((n, d), dtype=np.float32)
    tracemalloc.start()
    sketch_nq = count_sketch(u_nd, size, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sketch_nq.any()
    assert peak < 8 * d + sketch_nq.nbytes


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(DeltaflError, match="cannot have 129 numbers"):
        count_sketch(np.zeros((1, 4)), 129, 0)


class _Watching(Fixed):
    """Asks for sketches and keeps the reports it is given."""

    sketch_size = 4
    seen: list[Reports] = []  # noqa: RUF012

    def update(self, state: object, cohort: Cohort, reports: Reports) -> object:
        self.seen.append(reports)
        return state


@pytest.mark.parametrize(
    ("d", "sketched"),
    [
        (20, lambda u_nd: count_sketch(u_nd, 4, 5)),
        (LARGE + 20, lambda u_nd: count_sketch(folded(u_nd, 5), 4, 5)),
    ],
)
def test_a_round_measures_what_the_control_leaves(
    d: int,
    sketched: Callable[[FloatArray], FloatArray],
) -> None:
    sampler = _Watching()
    plan = Plan(Population.from_sizes([1, 2, 3, 4]), sampler, 3, estimator="difference", seed=5)
    control_d = np.arange(float(d)) % 20
    state = init_round(plan, np.zeros(d))._replace(control=CommonControlState(control_d))
    update_nd = np.random.default_rng(0).standard_normal((3, d)).astype(np.float32)
    sampler.seen.clear()
    close_round(plan, state, open_round(plan, state), [update_nd[0], None, update_nd[2]])
    residual_nd = (update_nd.astype(np.float64) - control_d) * np.array([1, 0, 1])[:, None]
    (reports,) = sampler.seen
    np.testing.assert_allclose(reports.squared_residual_n, (residual_nd**2).sum(axis=1), rtol=1e-6)
    norm = float(np.linalg.norm(residual_nd))
    np.testing.assert_allclose(
        reports.sketch_nq, sketched(residual_nd), rtol=1e-6, atol=1e-7 * norm
    )
