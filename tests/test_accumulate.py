"""Rounds closed reply by reply and by several processes, against ``close_round`` on the same
replies.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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
    make_plan,
    make_sampler,
    open_round,
    stream,
)
from deltafl.scale.named_arrays import named_arrays
from deltafl.types import FloatArray, Params

M = 30
N = 8
COUNT = 3


def plan_of(
    label: str = "pracdelta", estimator: str = "horvitz-thompson", n: int = N, **options: Any
) -> Plan:
    population = Population.from_sizes(np.arange(5, 5 + M))
    return make_plan(
        make_sampler(label), population, n, estimator=estimator, server_optimizer="adam", **options
    )


class ClientWork:
    """What the clients of a cohort send in a round."""

    def __init__(self, cohort: Cohort, round: int, d: int, drift_d: Params | None = None) -> None:
        rng = stream(5, "audit", round)
        n = len(cohort.client_n)
        update_nd = (rng.normal(size=(n, d)) + cohort.client_n[:, None] / M).astype(np.float32)
        self.updates: list[Params | None] = list(
            update_nd if drift_d is None else update_nd + drift_d
        )
        self.columns: dict[str, Any] = {
            "loss": rng.exponential(size=n),
            "step_variance": rng.exponential(size=n),
            "num_steps": rng.integers(1, 9, size=n),
        }
        square_n = (2.0 + cohort.client_n) * self.columns["loss"] ** 2
        self.columns["square_loss"] = np.where(cohort.client_n % 3 > 0, square_n, np.nan)

    def reports(self, rows: Any) -> Reports:
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Reports.make(len(columns["loss"]), **columns)


def assert_same(a: RoundState, b: RoundState, rtol: float = 0.0, but: str = " ") -> None:
    for (name, x), (_, y) in zip(named_arrays(a), named_arrays(b), strict=True):
        assert x.dtype == y.dtype, name
        if not name.startswith(but):
            np.testing.assert_allclose(
                x,
                y,
                rtol=rtol,
                atol=rtol * (np.nanmax(np.abs(x), initial=0.0) if rtol else 1.0),
                err_msg=name,
            )


def assert_same_info(
    a: RoundInfo, b: RoundInfo, rtol: float = 1e-9, but: Iterable[str] = ()
) -> None:
    assert [*a.rejected] == [*b.rejected]
    for field in set(RoundInfo._fields) - {"rejected", *but}:
        np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol=rtol, err_msg=field)


def test_mistakes_of_the_host_are_refused() -> None:
    plan = plan_of()
    state = init_round(plan, np.zeros(3))
    accumulator = Accumulator(plan, state, open_round(plan, state))
    for places in ([1, 1], [1, N], [-1]):
        with pytest.raises(
            DeltaflError, match=r"places is .*; give places in the cohort, 0 to 7, once each"
        ):
            accumulator.add_rows(np.zeros((len(places), 3)), None, np.array(places))
    accumulator.add_rows(np.zeros((2, 3)), None, np.array([3, 1]))
    with pytest.raises(DeltaflError, match="add them all at once"):
        accumulator.add_rows(np.zeros((N, 3)))
    accumulator.close()
    for late in (accumulator.close, lambda: accumulator.add_rows(np.zeros((N, 3)))):
        with pytest.raises(DeltaflError, match="this round is closed"):
            late()


# --- several processes, played by threads
# ------------------------------------------------------------------------------


class Thread:
    """A process that is a thread: the items of all, in the order of ranks, at a barrier."""

    def __init__(self, items: list[Any], barrier: threading.Barrier, rank: int) -> None:
        self.items = items
        self.barrier = barrier
        self.rank = rank
        self.sizes = list[int]()

    def add_up(self, vector: FloatArray) -> FloatArray:
        self.sizes.append(vector.size)
        total: FloatArray = np.sum(self.gathered(vector), axis=0)
        return total

    def gathered(self, item: Any) -> list[Any]:
        self.items[self.rank] = item
        self.barrier.wait()
        items = list(self.items)
        self.barrier.wait()
        return items


def group_of(count: int) -> list[Thread]:
    items = [None] * count
    barrier = threading.Barrier(count, timeout=20)
    return [Thread(items, barrier, rank) for rank in range(count)]


D = 40


def played(
    plan: Plan, rounds: int, lost: int | None, shares: bool
) -> tuple[list[RoundState], list[RoundInfo]]:
    """All threads' last states, and the first one's infos; ``lost`` is a client whose reply is
    broken.
    """
    group = group_of(COUNT)

    def play(rank: int) -> tuple[RoundState, list[RoundInfo]]:
        state = init_round(plan, np.ones(D))
        peer = group[rank]
        infos = []
        for round in range(rounds):
            cohort = open_round(plan, state)
            work = ClientWork(cohort, round, D)
            n = len(cohort.client_n)
            if lost is not None and n > 0:
                work.updates[lost % n] = np.full(D, np.nan, dtype=np.float32)
            if shares:
                mine = np.arange(n)[rank::COUNT][::-1]
                accumulator = Accumulator(plan, state, cohort)
                accumulator.add_rows([work.updates[i] for i in mine], work.reports(mine), mine)
                accumulator.merge(peer)
                state, info = accumulator.close()
                assert max(peer.sizes) < 3 * D + N * 80
            else:
                state, info = close_round(
                    plan, state, cohort, work.updates, work.reports(slice(None))
                )
            infos.append(info)
        return state, infos

    with ThreadPoolExecutor(COUNT) as pool:
        ended = list(pool.map(play, range(COUNT if shares else 1)))
    return [state for state, _ in ended], ended[0][1]


@pytest.mark.parametrize("lost", [None, 4])
@pytest.mark.parametrize(
    ("sampler", "estimator", "n", "options"),
    [
        *(
            ("pracdelta", name, N, {})
            for name in ("horvitz-thompson", "hajek", "plain-mean", "difference")
        ),
        ("uniform@poisson", "difference", N, {}),
        ("md", "horvitz-thompson", N, {}),
        ("hics-fl", "plain-mean", N, {}),
        ("oort", "plain-mean", N, {}),
        ("delta-centred", "difference", N, {}),
        ("pracdelta", "difference", N, {"mime": 0.5, "norm_guard": 1.01}),
        ("pracdelta", "difference", N, {"clip": "median"}),
        ("pracdelta", "difference", 1, {}),  # some processes have no client
        ("uniform@poisson", "difference", 1, {}),
    ],
)
def test_merged_rounds_are_those_of_one_process(
    sampler: str, estimator: str, n: int, options: dict[str, Any], lost: int | None
) -> None:
    plan = plan_of(sampler, estimator, n, **options)
    (alone,), infos = played(plan, 4, lost, shares=False)
    together, merged_infos = played(plan, 4, lost, shares=True)
    for state in together:
        assert state.params_d.tobytes() == together[0].params_d.tobytes()
        assert_same(state, alone, rtol=1e-5)
    for info, merged in zip(infos, merged_infos, strict=True):
        assert_same_info(info, merged, rtol=1e-5)


def test_what_cannot_be_merged_is_refused() -> None:
    plan = plan_of("uniform", "difference-own")
    state = init_round(plan, np.ones(D))
    with pytest.raises(DeltaflError, match="'difference-own' learns from rows"):
        Accumulator(plan, state, open_round(plan, state)).merge(group_of(1)[0])
