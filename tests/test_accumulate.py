"""Rounds closed reply by reply and by several processes, against ``close_round`` on the same
replies.
"""

import threading
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deltafl import (
    ESTIMATORS,
    Accumulator,
    Cohort,
    DeltaflError,
    Plan,
    Population,
    Reports,
    RoundInfo,
    RoundState,
    broadcast,
    close_round,
    init_round,
    make_sampler,
    make_server_optimizer,
    open_round,
    stream,
)
from deltafl.estimators.sketch import SKETCH_SIZE
from deltafl.scale.named_arrays import named_arrays
from deltafl.types import FloatArray, Params

M = 30
N = 8
COUNT = 3
LARGE = 5 * SKETCH_SIZE


def plan_of(
    label: str = "pracdelta", estimator: str = "horvitz-thompson", n: int = N, **options: Any
) -> Plan:
    population = Population.from_sizes(np.arange(5, 5 + M))
    return Plan(
        population, make_sampler(label), n, estimator, make_server_optimizer("adam"), **options
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


def close_by_stream(
    plan: Plan, state: RoundState, cohort: Cohort, work: ClientWork, order: Iterable[int]
) -> tuple[RoundState, RoundInfo]:
    accumulator = Accumulator(plan, state, cohort)
    for i in order:
        if work.updates[i] is not None:
            columns = {name: column[i] for name, column in work.columns.items()}
            columns["square_loss"] = (
                None if np.isnan(columns["square_loss"]) else columns["square_loss"]
            )
            accumulator.add(int(cohort.client_n[i]), work.updates[i], **columns)
    return accumulator.close()


def both(
    plan: Plan, d: int, *, reverse: bool = False, spoil: bool = False, rounds: int = 4
) -> tuple[Any, Any]:
    """The last of some rounds closed by ``close_round``, and by a stream."""
    after = init_round(plan, np.zeros(d))
    for round in range(rounds):
        state = after
        cohort = open_round(plan, after)
        work = ClientWork(cohort, round, d, broadcast(plan, state).drift_d)
        if spoil:
            work.updates[1] = None
            work.updates[3] = np.full(d, np.nan, dtype=np.float32)
        after, info = close_round(plan, state, cohort, work.updates, work.reports(slice(None)))
    order = range(len(cohort.client_n))
    return (after, info), close_by_stream(
        plan, state, cohort, work, reversed(order) if reverse else order
    )


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


# --- one reply at a time
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kept_updates_give_the_bits_of_close_round_in_any_order(
    estimator: str, spoil: bool
) -> None:
    """Models of at most 64 parameters are kept, whatever the estimator."""
    (state, info), (streamed, streamed_info) = both(
        plan_of(estimator=estimator), 5, spoil=spoil, reverse=True
    )
    assert_same(state, streamed)
    assert_same_info(info, streamed_info, rtol=0.0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("estimator", ["horvitz-thompson", "hajek", "plain-mean", "difference"])
def test_large_models_move_alike(estimator: str, spoil: bool, reverse: bool) -> None:
    """To the last bit in the cohort's order, if no coefficient depends on which other clients
    reply.
    """
    plan = plan_of("uniform", estimator)
    (state, info), (streamed, streamed_info) = both(plan, LARGE, spoil=spoil, reverse=reverse)
    exact = not reverse and not (spoil and estimator in {"hajek", "plain-mean"})
    assert_same(state, streamed, rtol=0.0 if exact else 1e-6, but="state.control" if exact else " ")
    assert_same(state, streamed, rtol=1e-6)
    assert_same_info(info, streamed_info, but={"variance", "mean_over_diversity"})


@pytest.mark.parametrize(
    "label", ["pracdelta", "pracdelta@ordered-pivotal", "uniform", "oort", "delta-centred"]
)
def test_scores_of_large_models_are_near(label: str) -> None:
    """Only norm(u_i - mean)^2 and the variance are estimates; what is sketched anyway is exact."""
    estimator = "plain-mean" if label == "oort" else "horvitz-thompson"
    (state, info), (streamed, streamed_info) = both(plan_of(label, estimator), LARGE)
    by_deviation = label.startswith("pracdelta")
    assert_same(state, streamed, but="state.sampler" if by_deviation else " ")
    assert streamed_info.variance == pytest.approx(info.variance, rel=0.3, nan_ok=label == "oort")
    assert streamed_info.mean_over_diversity == pytest.approx(info.mean_over_diversity, rel=0.3)
    if by_deviation:
        ratio = np.asarray(streamed.sampler.p_m) / np.asarray(state.sampler.p_m)
        assert np.all(np.abs(ratio - 1) < 0.4)  # zeta within 18 % / 2 each
        assert ratio.std() > 1e-6


@pytest.mark.parametrize("options", [{"mime": 0.5, "norm_guard": 1.5}, {"clip": "median"}])
@pytest.mark.parametrize("d", [5, LARGE])
def test_momentum_guard_and_clipping_are_those_of_close_round(
    d: int, options: dict[str, Any]
) -> None:
    (state, info), (streamed, streamed_info) = both(plan_of("uniform", **options), d, rounds=8)
    assert_same(state, streamed)
    assert_same_info(info, streamed_info, but={"variance", "mean_over_diversity"} if d > 5 else ())


def test_nobody_replies_and_the_state_before_is_not_changed() -> None:
    plan = plan_of("pracdelta@ordered-pivotal", "difference-own")
    state = init_round(plan, np.ones(3))
    cohort = open_round(plan, state)
    before = [array.copy() for _, array in named_arrays(state)]
    whole, info = close_round(plan, state, cohort, [None] * N)
    streamed, _ = Accumulator(plan, state, cohort).close()
    assert_same(whole, streamed)
    assert len(info.rejected) == N
    close_by_stream(plan, state, cohort, ClientWork(cohort, 0, 3), range(N))
    assert all(np.array_equal(x, y) for x, (_, y) in zip(before, named_arrays(state), strict=True))


def test_memory_is_that_of_a_few_models() -> None:
    """NumPy reports its arrays to tracemalloc: 8 replies of a model of 400 kB, one at a time."""
    plan = plan_of("uniform")
    d = 100_000
    state = init_round(plan, np.zeros(d))
    cohort = open_round(plan, state)
    accumulator = Accumulator(plan, state, cohort)
    update_d = np.ones(d, dtype=np.float32)
    accumulator.add(int(cohort.client_n[0]), update_d)
    tracemalloc.start()
    for client in cohort.client_n[1:].tolist():
        accumulator.add(client, update_d)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < d  # bytes: nothing of the size of an update was kept


def test_coefficients_that_depend_on_other_replies_cannot_be_streamed() -> None:
    def odd(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
        coef_n: FloatArray = weight_n**2 / (weight_n.sum() + np.arange(len(weight_n)))
        return coef_n

    plan = plan_of(estimator=ESTIMATORS["hajek"]._replace(coefficients=odd))  # type: ignore[arg-type]
    state = init_round(plan, np.zeros(LARGE))
    cohort = open_round(plan, state)
    with pytest.raises(DeltaflError, match="close this round with close_round"):
        close_by_stream(plan, state, cohort, ClientWork(cohort, 0, LARGE), range(1, N))


@pytest.mark.parametrize("d", [5, LARGE])
@pytest.mark.parametrize("estimator", ["horvitz-thompson", "difference", "difference-own"])
def test_replies_may_come_in_parts_of_any_kind_and_order(estimator: str, d: int) -> None:
    """Rows after rows, rows after single replies and the other way round, and places in any
    order.
    """
    plan = plan_of("uniform", estimator)
    state = init_round(plan, np.zeros(d))
    for round in range(2):
        before = state
        cohort = open_round(plan, state)
        work = ClientWork(cohort, round, d)
        work.updates[6] = None
        state, info = close_round(plan, before, cohort, work.updates, work.reports(slice(None)))
    orders: list[list[Any]] = [
        [[3, 0, 6, 1], [7, 2, 5, 4]],
        [4, [3, 0, 6, 1], [7, 2, 5]],
        [[3, 0, 6, 1], 4, 7, [2, 5]],
        [[*range(8)][::-1]],
    ]
    for parts in orders:
        accumulator = Accumulator(plan, before, cohort)
        for part in parts:
            if isinstance(part, int):
                columns = {name: float(column[part]) for name, column in work.columns.items()}
                square = None if np.isnan(columns["square_loss"]) else columns["square_loss"]
                accumulator.add(
                    int(cohort.client_n[part]),
                    work.updates[part],
                    **{**columns, "square_loss": square},
                )
            else:
                accumulator.add_rows(
                    [work.updates[i] for i in part], work.reports(part), np.array(part)
                )
        parted, parted_info = accumulator.close()
        sketched = d > SKETCH_SIZE and isinstance(parts[0], int) and estimator != "difference-own"
        assert_same(state, parted, rtol=1e-6)
        assert_same_info(
            info, parted_info, but=["variance", "mean_over_diversity"] if sketched else []
        )


def test_mistakes_of_the_host_are_refused() -> None:
    plan = plan_of()
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    accumulator = Accumulator(plan, state, cohort)
    client = int(cohort.client_n[0])
    stranger = next(i for i in range(M) if i not in cohort.client_n)
    assert accumulator.add(client, [1.0, 2.0]) == (client, "update has shape (2,), expected (3,)")
    with pytest.raises(DeltaflError, match="has replied already"):
        accumulator.add(client, np.zeros(3))
    with pytest.raises(DeltaflError, match="has replied already"):
        accumulator.add_rows(np.zeros((N, 3)))
    with pytest.raises(DeltaflError, match=f"client {stranger} is not of this round's cohort"):
        accumulator.add(stranger, np.zeros(3))
    for places in ([1, 1], [1, N], [-1]):
        with pytest.raises(
            DeltaflError, match=r"places is .*; give places in the cohort, 0 to 7, once each"
        ):
            accumulator.add_rows(np.zeros((len(places), 3)), None, np.array(places))
    accumulator.close()
    for late in (accumulator.close, lambda: accumulator.add(int(cohort.client_n[1]), np.zeros(3))):
        with pytest.raises(DeltaflError, match="this round is closed"):
            late()


# --- several processes, played by threads
# -----------------------------------------------------------------------------


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
    plan = plan_of("uniform")
    state = init_round(plan, np.zeros(LARGE))
    cohort = open_round(plan, state)
    accumulator = Accumulator(plan, state, cohort)
    accumulator.add(int(cohort.client_n[0]), np.ones(LARGE))
    with pytest.raises(
        DeltaflError,
        match="merge needs the updates, which add does not keep; give them to add_rows",
    ):
        accumulator.merge(group_of(1)[0])
    plan = plan_of("uniform")
    group = group_of(2)

    def play(rank: int) -> None:
        state = init_round(plan, np.full(D, 1.0 + rank))
        cohort = open_round(plan, state)
        mine = np.arange(len(cohort.client_n))[rank::2]
        accumulator = Accumulator(plan, state, cohort)
        accumulator.add_rows(np.ones((len(mine), D)), None, mine)
        with pytest.raises(DeltaflError, match="do not have the same model and cohort in round 0"):
            accumulator.merge(group[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, range(2)))
