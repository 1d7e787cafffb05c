"""A million clients: rounds that read what they need, states that are shared, saved and mapped
into memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from deltafl import (
    Cohort,
    DeltaflError,
    Plan,
    Population,
    Reports,
    RoundState,
    Sampler,
    Sgd,
    close_round,
    draw_cohort,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.estimators.own import OwnControl
from deltafl.scale.named_arrays import bytes_in_ram, from_named_arrays, named_arrays
from deltafl.scale.persistent_array import Buffer, PersistentArray
from deltafl.scale.rows import RowFormat
from deltafl.scale.tree import TreeBuffer
from deltafl.server.average import Average
from deltafl.server.first_round import FirstRound
from deltafl.server.part import ServerPart, Step
from deltafl.state_file import load_state, save_state
from deltafl.store.sealed import read_sealed, write_sealed
from deltafl.streams import stream
from deltafl.types import Array, BoolArray, FloatArray, IntArray

D = 6


def plan_of(m: int, label: str = "pracdelta@ordered-pivotal", n: int = 50, **options: Any) -> Plan:
    known = (
        np.eye(4)[np.arange(m) % 4] + 0.1 if label in {"balanced", "fed-cbs", "fedentopt"} else None
    )
    population = Population.from_sizes(1 + np.arange(m) % 7, aux=known)
    return make_plan(make_sampler(label), population, n, **options)


def play(plan: Plan, state: RoundState, rounds: int, d: int = D) -> RoundState:
    """Rounds in which a tenth of the clients does not reply; everything from the state's own
    round number.
    """
    for _ in range(rounds):
        rng = stream(1, "audit", state.round)
        cohort = open_round(plan, state)
        n = len(cohort.client_n)
        update_nd = (rng.normal(size=(n, d)) * (1 + cohort.client_n[:, None] % 5)).astype(
            np.float32
        )
        reports = Reports.make(
            n, responded=rng.random(n) < 0.9, step_variance=rng.exponential(size=n)
        )
        state, _ = close_round(plan, state, cohort, update_nd, reports)
    return state


def same(a: RoundState, b: RoundState) -> bool:
    pairs = zip(named_arrays(a), named_arrays(b), strict=True)
    return all(
        name == other and x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for (name, x), (other, y) in pairs
    )


def numbers_touched(monkeypatch: pytest.MonkeyPatch, m: int) -> int:
    """Numbers of arrays with one row a client that a round reads in trees, or writes, once the
    state is there.
    """
    plan = plan_of(m)
    state = play(plan, init_round(plan, np.zeros(D)), 2)
    count = [0]
    read = TreeBuffer.children
    write = Buffer.write
    copy = PersistentArray.__array__

    def children(buffer: TreeBuffer, level: int, node_k: IntArray) -> tuple[IntArray, Array]:
        child_kb, value_kb = read(buffer, level, node_k)
        count[0] += value_kb.size
        return child_kb, value_kb

    def written(buffer: Buffer, index_k: IntArray, value_k: Array) -> None:
        count[0] += len(index_k)
        write(buffer, index_k, value_k)

    def copied(version: PersistentArray, *rest: Any, **more: Any) -> Array:
        count[0] += len(version)
        return copy(version, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(TreeBuffer, "children", children)
        patch.setattr(Buffer, "write", written)
        patch.setattr(PersistentArray, "__array__", copied)
        play(plan, state, 1)
    return count[0]


def test_a_round_among_a_million_touches_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (numbers_touched(monkeypatch, m) for m in (10**4, 10**6))
    assert large < 2 * small
    assert large < 10**6 / 10


def test_sixteen_bytes_a_client_are_enough() -> None:
    m = 10**6
    state = init_round(plan_of(m), np.zeros(D))
    per_client = [
        state.sampler.p_m.current(),
        state.selected_m.current(),
        state.responded_m.current(),
    ]
    total = sum(buffer.array_m.nbytes for buffer in per_client) + per_client[0].inner.nbytes
    assert total <= 16 * m


def test_the_arrays_design_and_the_tree_learn_the_same() -> None:
    """From the same cohorts, the state of a tree and that of an array agree: two ways to keep
    one p.
    """
    tree_plan, array_plan = (
        plan_of(500, f"pracdelta{design}") for design in ("@ordered-pivotal", "")
    )
    tree, array = (init_round(plan, np.zeros(D)).sampler for plan in (tree_plan, array_plan))
    for round in range(20):
        rng = stream(3, "audit", round)
        cohort = tree_plan.sampler.open(tree, np.ones(500, dtype=bool), 50, rng)
        reports = Reports.make(
            50, step_variance=rng.exponential(size=50), responded=rng.random(50) < 0.8
        )
        norm_n, deviation_n = rng.exponential(size=(2, 50))
        reports = reports._replace(squared_norm_n=norm_n, squared_deviation_n=deviation_n)
        tree = tree_plan.sampler.update(tree, cohort, reports)
        array = array_plan.sampler.update(array, cohort, reports)
    np.testing.assert_allclose(np.asarray(tree.p_m), array.p_m, rtol=1e-11)


def test_clients_join_a_tree_with_the_mean_score() -> None:
    pytest.importorskip("flwr")
    from deltafl.federation.clients import resize_state

    small = plan_of(40, n=8)
    large = plan_of(60, n=8)
    state = play(small, init_round(small, np.zeros(D)), 5)
    grown = resize_state(large, state)
    assert type(grown.sampler.p_m) is type(state.sampler.p_m)
    before_m = np.asarray(state.sampler.p_m)
    after_m = np.asarray(grown.sampler.p_m)
    np.testing.assert_allclose(after_m, np.concatenate([before_m * 40 / 60, np.full(20, 1 / 60)]))
    assert grown.sampler.p_m.total == pytest.approx(1)
    assert play(large, grown, 3).selected_m.sum() == 8 * 8


# --- state files


@pytest.mark.parametrize(
    ("label", "estimator"),
    [
        ("pracdelta@ordered-pivotal", "horvitz-thompson"),
        ("innovation", "innovation-damped"),
        ("osmd", "horvitz-thompson"),
        ("clustered-sampling-2", "difference-own"),
        ("balanced", "regression-damped"),
        ("fed-cbs", "weighted-mean"),
        ("fedentopt", "weighted-mean"),
    ],
)
def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path, label: str, estimator: str) -> None:
    plan = plan_of(300, label, estimator=estimator, server_optimizer="adam")
    state = play(plan, init_round(plan, np.zeros(D)), 4)
    path = tmp_path / "state.safetensors"
    save_state(path, state, plan)
    assert oct(path.stat().st_mode)[-3:] == "600"
    content = path.read_bytes()
    back = load_state(path, plan)
    assert isinstance(back.round, int)
    assert same(back, state)
    further = play(plan, back, 4)
    assert same(further, play(plan, state, 4))
    assert same(
        further,
        play(plan, from_named_arrays(init_round(plan, np.zeros(D)), dict(named_arrays(state))), 4),
    )
    assert path.read_bytes() == content  # what changed stayed in memory
    save_state(path, further, plan)  # over the file that it is mapped from
    assert same(load_state(path, plan), further)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


class Last(NamedTuple):
    """What an own sampler has learned."""

    score_m: FloatArray


class OwnState(NamedTuple):
    """The state of an own sampler, with a default for a part of it."""

    visits: IntArray
    last: Last = Last(np.ones(1))


@dataclass(frozen=True)
class Own(Sampler):
    """A sampler that knows something of every client."""

    score_m: FloatArray
    power: Callable[[FloatArray], FloatArray] = field(default=np.sqrt)

    def init(self, population: Population) -> OwnState:
        return OwnState(np.zeros((), dtype=np.int64), Last(self.score_m * population.weight_m))

    def open(
        self, state: OwnState, available_m: BoolArray, n: int, rng: Any, oracle: Any = None
    ) -> Cohort:
        return draw_cohort(self.power(state.last.score_m), n, "pivotal", rng, available_m)

    def update(self, state: OwnState, cohort: Cohort, reports: Reports) -> OwnState:
        score_m = state.last.score_m.copy()
        score_m[cohort.client_n] *= 2
        return OwnState(np.asarray(state.visits + 1), Last(score_m))


@dataclass(frozen=True)
class Scaled(OwnControl):
    """A control variate with a function among its fields."""

    scale: Callable[[float], float] = float


def test_states_of_own_samplers_and_of_known_seconds_are_saved(tmp_path: Path) -> None:
    """Nothing is lost, no address in memory is compared, and a template of one client is not
    asked of them.
    """
    population = Population.from_sizes(1 + np.arange(30) % 7)._replace(
        seconds_m=np.arange(1.0, 31.0)
    )
    plans = [make_plan("uniform(per_second=True)", population, 5)] * 2
    plans += [
        Plan(
            population,
            Own(np.arange(1.0, 31.0), lambda score_m: score_m),
            5,
            Scaled(scale=lambda x: x),
        )
        for _ in range(2)
    ]
    for first, second in (plans[:2], plans[2:]):
        state = play(first, init_round(first, np.zeros(D)), 3)
        save_state(tmp_path / "state", state, first)
        back = load_state(tmp_path / "state", second)
        assert same(back, state)
        assert same(play(second, back, 2), play(first, state, 2))


def test_a_loaded_million_is_not_read_by_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a tree are made once, when it is loaded, and in no round after that."""
    plan = plan_of(10**6)
    state = play(plan, init_round(plan, np.zeros(D)), 1)
    save_state(tmp_path / "state.safetensors", state, plan)
    sums = [0]
    add_up = TreeBuffer._add_up

    def counted(buffer: TreeBuffer, level: int, node_k: IntArray) -> None:
        sums[0] += len(node_k)
        add_up(buffer, level, node_k)

    loaded = load_state(tmp_path / "state.safetensors", plan)
    monkeypatch.setattr(TreeBuffer, "_add_up", counted)
    following = play(plan, loaded, 1)
    assert sums[0] <= 50 * 5
    assert same(following, play(plan, state, 1))


def test_what_no_state_file_can_be_is_refused(tmp_path: Path) -> None:
    plan = plan_of(300)
    state = init_round(plan, np.zeros(D))
    path = tmp_path / "state"
    rows = RowFormat(folder=str(tmp_path / "rows"))
    with pytest.raises(DeltaflError, match="rows in a file of their own"):
        save_state(path, state, replace(plan, estimator="difference-own", memory=rows))
    with pytest.raises(DeltaflError, match="the state is of 300 clients and the plan of 299"):
        save_state(path, state, plan_of(299))
    with pytest.raises(
        DeltaflError, match="another sampler or estimator, of which the state knows"
    ):
        save_state(path, state, plan_of(300, "innovation"))
    averaged = replace(plan, parts=(Average(0.5),))
    for call in (lambda: open_round(averaged, state), lambda: save_state(path, state, averaged)):
        with pytest.raises(DeltaflError, match="the plan has average, of which the state knows"):
            call()
    remembers = init_round(averaged, np.zeros(D))
    for call in (lambda: open_round(plan, remembers), lambda: save_state(path, remembers, plan)):
        with pytest.raises(DeltaflError, match="the state has average, which the plan lacks"):
            call()
    # A part that remembers nothing may go.
    open_round(plan, init_round(replace(plan, parts=(FirstRound("exact"),)), np.zeros(D)))
    assert not path.exists()
    write_sealed(path, {"state.params_d": np.zeros(D)})
    with pytest.raises(DeltaflError, match="belongs to a plan with clients = None"):
        load_state(path, plan)
    path.write_bytes(b"damaged")
    with pytest.raises(DeltaflError, match=r"is not as it was written.*: put a copy back"):
        load_state(path, plan)


OTHER_SIZES = Population.from_sizes(1 + np.arange(30) % 5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clients", {"population": plan_of(31, n=5).population}),
        ("weight_m", {"population": OTHER_SIZES}),
        ("aux_mq", {"population": plan_of(30, n=5).population._replace(aux_mq=np.ones((30, 2)))}),
        ("cost_m", {"population": plan_of(30, n=5).population.priced(np.arange(1, 31))}),
        ("sampler", {"sampler": make_sampler("fedpracis")}),
        ("server_optimizer", {"parts": (Sgd(lr=0.5),)}),
        ("memory", {"memory": RowFormat("bfloat16")}),
    ],
)
def test_a_state_of_other_clients_or_another_plan_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    """With other weights the saved sum of w_j c_j would bias every estimate to come, without a
    word.
    """
    plan = plan_of(30, "pracdelta", n=5, estimator="difference-own")
    path = tmp_path / "state"
    state = play(plan, init_round(plan, np.zeros(D)), 3)
    save_state(path, state, plan)
    with pytest.raises(
        DeltaflError,
        match=rf"belongs to a plan with {name} = .*; load it with the plan it was saved",
    ):
        load_state(path, replace(plan, **change))
    again = Population.from_sizes(
        (1 + np.arange(30) % 7).astype(np.int8)
    )  # the same clients, made anew
    assert same(load_state(path, replace(plan, population=again, n=7, response_floor=0.5)), state)


def test_a_state_from_before_costs_were_noted_is_read(tmp_path: Path) -> None:
    plain = plan_of(30, n=5)
    plan = replace(plain, population=plain.population.priced(np.arange(1, 31)))
    path = tmp_path / "state"
    state = play(plan, init_round(plan, np.zeros(D)), 2)
    save_state(path, state, plan)
    arrays, header = read_sealed(path, "")
    del header["cost_m"]
    write_sealed(path, arrays, header)
    assert same(load_state(path, plan), state)
    other = replace(plain, population=plain.population.priced(np.full(30, 2)))
    for wrong in (plain, other):
        with pytest.raises(DeltaflError, match="weights_crc is that of another plan"):
            load_state(path, wrong)


class Halved(ServerPart):
    """A part of a user's own, which remembers nothing."""

    name = "halved"

    def direction(self, plan: Any, own: Any, step: Step) -> tuple[Step, Any]:
        return step._replace(delta_d=step.delta_d / 2), own


def test_a_state_saved_with_a_part_of_ones_own_is_not_gone_on_with_without_it(
    tmp_path: Path,
) -> None:
    plan = plan_of(30, n=5)
    halved = replace(plan, parts=(Halved(),))
    path = tmp_path / "state"
    for mine, other in ((halved, plan), (plan, halved)):
        save_state(path, init_round(mine, np.zeros(D)), mine)
        load_state(path, mine)
        with pytest.raises(DeltaflError, match="belongs to a plan with halved = "):
            load_state(path, other)


def test_bytes_of_a_state_count_what_clients_share_once() -> None:
    d = 1000
    m = 50
    n = 5
    plan = make_plan("uniform@@difference-own", np.ones(m, dtype=np.int64), n)
    state = init_round(plan, np.zeros(d))
    before = bytes_in_ram(state)
    assert (
        d * (4 + 8 + 4) <= before < d * (4 + 8 + 4) + 40 * m
    )  # the model, the sum, one row of zeros
    for _ in range(2):
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, np.ones((n, d), dtype=np.float32))
    # A number more: two that are 0 at the beginning are one object.
    assert n * d * 4 <= bytes_in_ram(state) - before <= 2 * n * d * 4 + 8


@pytest.mark.parametrize(
    "held", [[np.ones(2), 0], np.random.default_rng(0), "text", object(), None, {"a": {1, 2}}]
)
def test_what_no_file_can_hold_is_named(held: Any) -> None:
    with pytest.raises(DeltaflError, match=r"state.* is a \w+, which is not saved .* NamedTuple"):
        dict(named_arrays(held))


def test_lists_of_a_state_come_back_as_lists_and_a_dict_keeps_its_keys() -> None:
    held = {"a": [0.0, 1.0], "b": {"a.c": np.ones(2)}}
    back = from_named_arrays(held, dict(named_arrays(held)))
    assert back["a"] == [0, 1] and type(back["a"]) is list
    np.testing.assert_array_equal(back["b"]["a.c"], [1, 1])
    grown = dict(named_arrays({**held, "c": 1.0}))
    with pytest.raises(DeltaflError, match=r"the saved state has state\.c, .* the same keys"):
        from_named_arrays(held, grown)
