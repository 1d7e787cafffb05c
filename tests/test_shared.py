"""Rounds closed by several processes, played by threads: ``close_round``'s result up to the rounding of sums."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deltafl.accumulate import Accumulator
from deltafl.errors import DeltaflError
from deltafl.round import Plan, RoundState, close_round, init_round, open_round
from deltafl.samplers import make_sampler
from deltafl.streams import stream
from deltafl.types import FloatArray, Population, RejectedReply, Reports, RoundInfo

M, N, D, COUNT = 30, 9, 40, 3
LISTED = list[RejectedReply]


class Threads:
    """Processes that are threads: everybody's items, in the order of ranks, at a barrier."""

    def __init__(self, count: int) -> None:
        self.items: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)


class Thread:
    """One of them."""

    def __init__(self, shared: Threads, rank: int) -> None:
        self.shared, self.rank, self.talks = shared, rank, list[int]()

    def add_up(self, vector: FloatArray) -> FloatArray:
        self.talks.append(vector.size)
        total: FloatArray = np.sum(self._everybody(vector), axis=0)
        return total

    def gathered(self, item: LISTED) -> list[LISTED]:
        return self._everybody(item)

    def _everybody(self, item: object) -> list[Any]:
        self.shared.items[self.rank] = item
        self.shared.barrier.wait()
        items = list(self.shared.items)
        self.shared.barrier.wait()
        return items


def plan_of(sampler: str, estimator: str, n: int = N, **given: float) -> Plan:
    sizes = np.random.default_rng(1).integers(5, 50, M)
    return Plan(Population.from_sizes(sizes), make_sampler(sampler), n, estimator, seed=3, **given)  # type: ignore[arg-type]


def played(plan: Plan, rounds: int, lost: int | None, shares: bool) -> tuple[list[RoundState], list[RoundInfo]]:
    """Rounds of updates that depend on client and round; all three threads' last states, and the first one's infos."""
    everyone = Threads(COUNT)

    def play(rank: int) -> tuple[RoundState, list[RoundInfo]]:
        state, peer, infos = init_round(plan, np.ones(D)), Thread(everyone, rank), []
        for _ in range(rounds):
            cohort = open_round(plan, state)
            update_nd = np.array(
                [stream(0, "noise", state.round, i).normal(i / M, 1.0, D) for i in cohort.client_n.tolist()]
            ).astype(np.float32)
            update_nd = update_nd.reshape(-1, D)
            n = len(update_nd)
            if lost is not None and n > 0:
                update_nd[lost % n] = np.nan
            loss_n = 1.0 + cohort.client_n
            square_n = np.where(cohort.client_n % 3 > 0, 7.0 * loss_n**2, np.nan)
            reports = Reports.make(
                n, loss=loss_n, square_loss=square_n, step_variance=np.full(n, 0.5), num_steps=[7] * n
            )
            if shares:
                mine = np.arange(n)[rank::COUNT][::-1]
                own = Reports._make(column[mine] for column in reports)
                accumulator = Accumulator(plan, state, cohort)
                accumulator.add_rows(update_nd[mine], own, mine)
                accumulator.merge(peer)
                state, info = accumulator.close()
                assert max(peer.talks) < 3 * D + N * 80
            else:
                state, info = close_round(plan, state, cohort, update_nd, reports)
            infos.append(info)
        return state, infos

    with ThreadPoolExecutor(COUNT) as pool:
        ended = list(pool.map(play, range(COUNT if shares else 1)))
    return [state for state, _ in ended], ended[0][1]


@pytest.mark.parametrize("lost", [None, 4])
@pytest.mark.parametrize(
    ("sampler", "estimator"),
    [
        *(("pracdelta", name) for name in ("horvitz-thompson", "hajek", "plain-mean", "difference")),
        ("uniform@poisson", "difference"),
        ("md", "horvitz-thompson"),
        ("full", "horvitz-thompson"),
        ("hics-fl", "plain-mean"),
        ("oort", "plain-mean"),
        ("delta-centred", "difference"),
    ],
)
def test_shared_rounds_are_those_of_one_process(sampler: str, estimator: str, lost: int | None) -> None:
    plan = plan_of(sampler, estimator)
    (alone,), infos = played(plan, 4, lost, shares=False)
    together, shared_infos = played(plan, 4, lost, shares=True)
    for state in together:
        assert state.params_d.tobytes() == together[0].params_d.tobytes()
        np.testing.assert_allclose(state.params_d, alone.params_d, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(np.asarray(state.responded_m), np.asarray(alone.responded_m))
        if sampler == "oort":
            np.testing.assert_array_equal(state.sampler.utility_m, alone.sampler.utility_m)
    for info, shared in zip(infos, shared_infos, strict=True):
        assert shared.rejected == info.rejected
        for field in set(RoundInfo._fields) - {"rejected"}:
            np.testing.assert_allclose(getattr(shared, field), getattr(info, field), rtol=1e-5, err_msg=field)


@pytest.mark.parametrize("sampler", ["pracdelta", "uniform@poisson"])
def test_processes_without_a_client_take_part(sampler: str) -> None:
    plan = plan_of(sampler, "difference", n=1)
    (alone,), infos = played(plan, 8, None, shares=False)
    together, shared = played(plan, 8, None, shares=True)
    np.testing.assert_allclose(together[0].params_d, alone.params_d, rtol=1e-6, atol=1e-7)
    assert [info.num_selected for info in shared] == [info.num_selected for info in infos]
    assert min(info.num_selected for info in infos) == (1 if sampler == "pracdelta" else 0)


def test_drift_and_guard_come_through() -> None:
    plan = plan_of("pracdelta", "difference", mime=0.5, norm_guard=1.01)
    (alone,), infos = played(plan, 5, None, shares=False)
    together, shared = played(plan, 5, None, shares=True)
    np.testing.assert_allclose(together[0].params_d, alone.params_d, rtol=1e-6, atol=1e-7)
    assert [info.clip_factor < 1 for info in shared] == [info.clip_factor < 1 for info in infos]


def test_estimators_that_learn_from_rows_are_refused() -> None:
    plan = plan_of("uniform", "difference-own")
    state = init_round(plan, np.ones(D))
    with pytest.raises(DeltaflError, match="'difference-own' learns from rows"):
        Accumulator(plan, state, open_round(plan, state)).merge(Thread(Threads(1), 0))


def test_processes_that_have_drifted_apart_are_told() -> None:
    plan, everyone = plan_of("uniform", "horvitz-thompson"), Threads(2)

    def play(rank: int) -> None:
        state = init_round(plan, np.full(D, 1.0 + rank))
        cohort = open_round(plan, state)
        mine, peer = np.arange(len(cohort.client_n))[rank::2], Thread(everyone, rank)
        accumulator = Accumulator(plan, state, cohort)
        accumulator.add_rows(np.ones((len(mine), D)), Reports.make(len(mine)), mine)
        with pytest.raises(DeltaflError, match="do not have the same model and cohort in round 0"):
            accumulator.merge(peer)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, range(2)))
