"""Sketches keep inner products on average, are linear, and do not depend on how they were cut."""

import tracemalloc

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.estimators import sketch
from deltafl.estimators.common import CommonControlState
from deltafl.estimators.sketch import count_sketch
from deltafl.plan import Plan
from deltafl.round import close_round, init_round, open_round
from deltafl.samplers.fixed import Fixed
from deltafl.types import Cohort, Population, Reports


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


def test_a_round_measures_what_the_control_leaves() -> None:
    sampler = _Watching()
    plan = Plan(Population.from_sizes([1, 2, 3, 4]), sampler, 3, estimator="difference", seed=5)
    state = init_round(plan, np.zeros(20))._replace(control=CommonControlState(np.arange(20.0)))
    update_nd = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    close_round(plan, state, open_round(plan, state), [update_nd[0], None, update_nd[2]])
    residual_nd = (update_nd.astype(np.float64) - np.arange(20)) * np.array([1, 0, 1])[:, None]
    (reports,) = sampler.seen
    np.testing.assert_allclose(reports.squared_residual_n, (residual_nd**2).sum(axis=1))
    np.testing.assert_allclose(reports.sketch_nq, count_sketch(residual_nd, 4, 5))
