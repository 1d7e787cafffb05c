"""A round closed update by update, against ``close_round`` on the same replies."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from deltafl import (
    Accumulator,
    Cohort,
    DeltaflError,
    Plan,
    Population,
    Reports,
    RoundInfo,
    RoundState,
    close_round,
    init_round,
    make_sampler,
    make_server_optimizer,
    open_round,
)
from deltafl.estimators.sketch import SKETCH_SIZE
from deltafl.io import flatten
from deltafl.round import broadcast
from deltafl.streams import stream
from deltafl.types import Params

M, N = 30, 8
STREAMED = ["horvitz-thompson", "hajek", "plain-mean", "difference", "difference-own", "innovation", "fedstale"]
STREAMED += ["fedvarp", "innovation-damped"]


def plan_of(label: str = "pracdelta", estimator: str = "horvitz-thompson", **options: Any) -> Plan:
    population = Population.from_sizes(np.arange(5, 5 + M))
    return Plan(population, make_sampler(label), N, estimator, make_server_optimizer("adam"), **options)


class Replies:
    """What the clients of a cohort answer in a round."""

    def __init__(self, cohort: Cohort, round: int, d: int, drift_d: Params | None = None) -> None:
        rng = stream(5, "audit", round)
        n = len(cohort.client_n)
        update_nd = (rng.normal(size=(n, d)) + cohort.client_n[:, None] / M).astype(np.float32)
        if drift_d is not None:
            update_nd += drift_d
        self.updates: list[Params | None] = list(update_nd)
        self.loss_n, self.variance_n = rng.exponential(size=n), rng.exponential(size=n)
        self.steps_n = rng.integers(1, 9, size=n)
        self.square_n = (2.0 + cohort.client_n) * self.loss_n**2

    def close(self, plan: Plan, state: RoundState, cohort: Cohort) -> tuple[RoundState, RoundInfo]:
        said = Reports.make(
            len(self.updates),
            loss=self.loss_n,
            square_loss=self.square_n,
            step_variance=self.variance_n,
            num_steps=self.steps_n,
        )
        return close_round(plan, state, cohort, self.updates, said)

    def stream(self, plan: Plan, state: RoundState, cohort: Cohort, order: Any) -> tuple[RoundState, RoundInfo]:
        aggregation = Accumulator(plan, state, cohort)
        for i in order:
            if self.updates[i] is not None:
                aggregation.add(
                    int(cohort.client_n[i]),
                    self.updates[i],
                    loss=self.loss_n[i],
                    square_loss=self.square_n[i],
                    step_variance=self.variance_n[i],
                    num_steps=int(self.steps_n[i]),
                )
        return aggregation.close()


def both(plan: Plan, d: int, *, reverse: bool = False, spoil: bool = False, rounds: int = 4) -> tuple[Any, Any]:
    """The last of some rounds closed by ``close_round``: once more so, and in a stream."""
    state = init_round(plan, np.zeros(d))
    for round in range(rounds):
        cohort = open_round(plan, state)
        replies = Replies(cohort, round, d, broadcast(plan, state).drift_d)
        if spoil:
            replies.updates[1], replies.updates[3] = None, np.full(d, np.nan, dtype=np.float32)
        whole = replies.close(plan, state, cohort)
        if round == rounds - 1:
            order = range(len(cohort.client_n))
            return whole, replies.stream(plan, state, cohort, reversed(order) if reverse else order)
        state, _ = whole
    raise AssertionError


def assert_same(a: RoundState, b: RoundState, rtol: float = 0.0, but: str = " ") -> None:
    for (name, x), (_, y) in zip(flatten(a), flatten(b), strict=True):
        assert x.dtype == y.dtype, name
        if not name.startswith(but):
            np.testing.assert_allclose(
                x, y, rtol=rtol, atol=rtol * (np.abs(x).max(initial=0.0) if rtol else 1.0), err_msg=name
            )


def assert_told_the_same(a: RoundInfo, b: RoundInfo, rtol: float = 1e-9) -> None:
    assert [*a.rejected] == [*b.rejected]
    numbers = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, float | int) and isinstance(y, float | int)]
    for x, y in numbers:
        np.testing.assert_allclose(x, y, rtol=rtol)


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("estimator", STREAMED)
def test_in_the_cohorts_order_the_bits_are_those_of_close_round(estimator: str, spoil: bool) -> None:
    (state, info), (streamed, told) = both(plan_of(estimator=estimator), 5, spoil=spoil)
    exact = estimator != "difference" and not (spoil and estimator in {"hajek", "plain-mean"})
    assert_same(state, streamed, rtol=0.0 if exact else 1e-6)
    assert_told_the_same(info, told)


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("estimator", STREAMED)
def test_in_another_order_it_is_the_same_up_to_rounding(estimator: str, spoil: bool) -> None:
    (state, info), (streamed, told) = both(plan_of(estimator=estimator), 5, spoil=spoil, reverse=True)
    assert_same(state, streamed, rtol=1e-6)
    assert_told_the_same(info, told)


@pytest.mark.parametrize(
    "label", ["pracdelta", "pracdelta@ordered-pivotal", "uniform", "hics-fl", "oort", "delta-centred"]
)
def test_large_models_move_alike_and_their_scores_are_near(label: str) -> None:
    """Beyond 64 parameters only norm(u_i - mean)^2 and the variance are estimates; what is sketched anyway is exact."""
    unweighted = label in {"hics-fl", "oort"}
    estimator = "plain-mean" if unweighted else "horvitz-thompson"
    (state, info), (streamed, told) = both(plan_of(label, estimator), 5 * SKETCH_SIZE)
    by_deviation = label.startswith("pracdelta")
    assert_same(state, streamed, but="state.sampler" if by_deviation else " ")
    estimates = {"variance", "mean_over_diversity"}
    assert_told_the_same(*(told._replace(**dict.fromkeys(estimates, 0.0)) for told in (info, told)))
    assert told.variance == pytest.approx(info.variance, rel=0.3, nan_ok=unweighted)
    assert told.mean_over_diversity == pytest.approx(info.mean_over_diversity, rel=0.3)
    if by_deviation:
        ratio = np.asarray(streamed.sampler.p_m) / np.asarray(state.sampler.p_m)
        assert np.all(np.abs(ratio - 1) < 0.4)  # zeta within 18 % / 2 each
        assert ratio.std() > 1e-6


def test_momentum_guard_and_drift_are_those_of_close_round() -> None:
    (state, info), (streamed, told) = both(plan_of(mime=0.5, norm_guard=1.5), 5, rounds=8)
    assert_same(state, streamed)
    assert_told_the_same(info, told)


def test_nobody_replies() -> None:
    plan = plan_of()
    state = init_round(plan, np.ones(3))
    cohort = open_round(plan, state)
    whole, streamed = close_round(plan, state, cohort, [None] * N), Accumulator(plan, state, cohort).close()
    assert_same(whole[0], streamed[0])
    assert [*whole[1].rejected] == [*streamed[1].rejected]
    assert len(streamed[1].rejected) == N


def test_the_state_before_is_not_changed() -> None:
    plan = plan_of("pracdelta@ordered-pivotal", "difference-own")
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    before = [array.copy() for _, array in flatten(state)]
    Replies(cohort, 0, 3).stream(plan, state, cohort, range(N))
    assert all(np.array_equal(x, y) for x, (_, y) in zip(before, flatten(state), strict=True))


def test_memory_is_that_of_a_few_models() -> None:
    """NumPy reports its arrays to tracemalloc: 8 replies of a model of 400 kB, one at a time."""
    plan, d = plan_of("uniform"), 100_000
    state = init_round(plan, np.zeros(d))
    cohort = open_round(plan, state)
    aggregation = Accumulator(plan, state, cohort)
    update_d = np.ones(d, dtype=np.float32)
    aggregation.add(int(cohort.client_n[0]), update_d)
    tracemalloc.start()
    for client in cohort.client_n[1:].tolist():
        aggregation.add(client, update_d)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < d  # bytes: nothing of the size of an update was kept


def test_refusals() -> None:
    plan = plan_of()
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    aggregation = Accumulator(plan, state, cohort)
    client, stranger = int(cohort.client_n[0]), next(i for i in range(M) if i not in cohort.client_n)
    refused = aggregation.add(client, [1.0, 2.0])
    assert refused is not None
    assert refused.client == client
    assert "shape" in refused.reason
    with pytest.raises(DeltaflError, match="has replied already"):
        aggregation.add(client, np.zeros(3))
    with pytest.raises(DeltaflError, match=f"client {stranger} is not of this round's cohort"):
        aggregation.add(stranger, np.zeros(3))
    aggregation.close()
    for late in (aggregation.close, lambda: aggregation.add(int(cohort.client_n[1]), np.zeros(3))):
        with pytest.raises(DeltaflError, match="this round is closed"):
            late()
