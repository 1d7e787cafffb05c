"""Rounds over clients who come and go, without Flower's messages: arrays, joining, failures, saving, clipping."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from conftest import Recorder, same_tree
from deltafl import (
    ESTIMATORS,
    SAMPLERS,
    DeltaflError,
    Fixed,
    Plan,
    Population,
    PracDelta,
    init_round,
    make_sampler,
    stream,
)
from deltafl.estimators.sketch import count_sketch
from deltafl.estimators.table import find_estimator
from deltafl.flower import WeightedClipping
from deltafl.flower.arrays import Arrays, Layout, mean_rest
from deltafl.flower.clients import ClientInfo, resize_state
from deltafl.flower.federation import Federation, sketch_seed
from deltafl.flower.replies import ClientReply
from deltafl.flower.rules import Rules
from deltafl.flower.saved import load, save
from deltafl.io import flatten
from deltafl.samplers import parse_label, uses_aux
from deltafl.types import FloatArray

MODEL: Arrays = {
    "dense.weight": np.array([[1, 2], [3, 4]], dtype=np.float32),
    "norm.running_var": np.array([1.0, 4.0], dtype=np.float32),
    "norm.num_batches_tracked": np.array(2**60 + 1, dtype=np.int64),
    "mask": np.array([True, False]),
    "dense.bias": np.array([0.5], dtype=np.float16),
}


def federation(label: str = "pracdelta", model: Arrays | None = None, **settings: Any) -> Federation:
    model = {"x": np.zeros(3, dtype=np.float32)} if model is None else model
    estimator = settings.pop("estimator", parse_label(label).estimator)
    known = 3 if uses_aux(make_sampler(label), estimator) else 0
    rules = Rules(make_sampler(label), settings.pop("n", 3), estimator, aux=known, **settings)
    return Federation(rules, model, Layout.of(model))


def sizes_of(m: int, start: int = 0) -> dict[str, int]:
    return {f"client:{i}": 10 + 5 * i for i in range(start, m)}


def admit(fed: Federation, sizes: dict[str, int]) -> None:
    """With the clients' shares of three labels, where they matter."""
    shares = {key: tuple(stream(0, "data", client=size).dirichlet([1, 1, 1])) for key, size in sizes.items()}
    fed.admit({key: ClientInfo(size, shares[key] if fed.rules.aux else ()) for key, size in sizes.items()})


def play(fed: Federation, rounds: int, present: set[str] | None = None) -> None:
    """Rounds in which client i moves every entry by a number of its own."""
    for _ in range(rounds):
        cohort = fed.open(set(fed.clients.keys) if present is None else present)
        sent = fed.arrays()
        fed.close(
            cohort, {int(i): ClientReply({"x": sent["x"] + np.float32(1 + i % 5)}, loss=1.0) for i in cohort.client_n}
        )


def test_flat_vector_and_arrays_are_each_others_inverse() -> None:
    layout = Layout.of(MODEL)
    assert [entry.kind for entry in layout.entries] == ["trained", "buffer", "counter", "counter", "trained"]
    flat_d = layout.flatten(MODEL)
    assert flat_d.tolist() == [1, 2, 3, 4, 0.5]
    rebuilt = layout.rebuild(flat_d, layout.rest(MODEL))
    assert list(rebuilt) == list(MODEL)
    for name, array in MODEL.items():
        assert rebuilt[name].dtype == array.dtype
        assert np.array_equal(rebuilt[name], array)


def test_a_narrow_type_takes_its_largest_number_instead_of_infinity() -> None:
    layout = Layout.of(MODEL)
    rebuilt = layout.rebuild(np.array([1e30, -1e30, 3, 4, -1e6], np.float32), layout.rest(MODEL))
    assert rebuilt["dense.bias"].tolist() == [-65504]
    assert rebuilt["dense.weight"].ravel().tolist() == [np.float32(1e30), np.float32(-1e30), 3, 4]


def test_one_reply_in_a_wider_type_does_not_stop_a_half_precision_federation() -> None:
    """It is refused; and where the model is beyond float16 anyway, honest replies are used and bring it back."""
    fed = federation("uniform", {"b": np.zeros(2, np.float16)}, n=2)
    fed.admit({key: ClientInfo(1) for key in "abcd"})
    cohort = fed.open(fed.clients.keys)
    wide = {int(i): ClientReply({"b": np.array([1e6, 0.0])}) for i in cohort.client_n[:1]}
    info = fed.close(cohort, wide | {int(i): ClientReply(fed.arrays()) for i in cohort.client_n[1:]})
    assert [reply.reason for reply in info.rejected] == ["trained 'b' has entries that float16 cannot hold"]
    assert fed.state is not None
    fed.state = fed.state._replace(params_d=np.array([2e5, 0], np.float32))
    for _ in range(20):
        cohort = fed.open(fed.clients.keys)
        info = fed.close(cohort, {int(i): ClientReply({"b": np.ones(2, np.float16)}) for i in cohort.client_n})
        assert info.num_responded == 2
    np.testing.assert_allclose(fed.arrays()["b"], 1, atol=1e-2)


def test_buffers_take_a_convex_mean_and_integers_stay_integers() -> None:
    layout = Layout.of(MODEL)
    first = {
        **MODEL,
        "norm.running_var": np.array([3, 4], np.float32),
        "norm.num_batches_tracked": np.array(2**60 + 11),
    }
    second = {**MODEL, "norm.running_var": np.array([1, 0], np.float32), "mask": np.array([False, False])}
    rest = mean_rest(layout, MODEL, [first, second], np.array([30.0, 10.0]))
    assert rest["norm.running_var"].tolist() == [2.5, 3.0]
    assert rest["norm.running_var"].dtype == np.float32
    # 3/4 of 10, rounded to even, added to a number that float64 cannot hold.
    assert rest["norm.num_batches_tracked"] == 2**60 + 1 + 8
    assert rest["norm.num_batches_tracked"].dtype == np.int64
    assert rest["mask"].tolist() == [True, False]
    untouched = mean_rest(layout, MODEL, [], np.zeros(0))
    assert all(np.array_equal(untouched[name], MODEL[name]) for name in untouched)


@given(
    old=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=4),
    change=st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=5),
    coef=st.lists(st.floats(0.0078125, 128, width=32), min_size=5, max_size=5),
)
def test_a_mean_of_buffers_lies_between_what_clients_have(
    old: list[float], change: list[float], coef: list[float]
) -> None:
    model: Arrays = {"x": np.zeros(1, np.float32), "running_var": np.array(old, np.float32)}
    replies = [{**model, "running_var": np.array([abs(v + c) for v in old], np.float32)} for c in change]
    mean = mean_rest(Layout.of(model), model, replies, np.array(coef[: len(replies)]))["running_var"]
    stack = np.stack([reply["running_var"] for reply in replies])
    slack = 1e-6 * (1 + np.abs(stack).max())
    assert np.all(mean >= stack.min(axis=0) - slack)
    assert np.all(mean <= stack.max(axis=0) + slack)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_counters_at_the_ends_of_their_type_take_a_convex_mean(dtype: str, shape: tuple[int, ...]) -> None:
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    layout = Layout.of({"x": np.zeros(1, np.float32), "count": np.zeros(shape, dtype)})
    for old, *new in ((least, most, most), (most, least, least), (0, least, most), (most, most, most - 1), (7, 9, 9)):
        arrays = [{"count": np.full(shape, value, dtype)} for value in (old, *new)]
        (kept,) = mean_rest(layout, arrays[0], arrays[1:], np.array([0.5, 0.5])).values()
        exact = sum(new) // 2
        assert kept.dtype == dtype
        assert kept.shape == shape
        assert min(new) <= int(kept.item()) <= max(new)
        assert abs(int(kept.item()) - exact) <= max(1, 2.0**-50 * (most - least))


@pytest.mark.parametrize(
    ("dtype", "value", "bad"),
    [
        ("int32", np.array([2**40, 1], np.int64), True),
        ("int32", np.array([5, -(2**31) - 1], np.int64), True),
        ("int32", np.array([2**31 - 1, 1], np.int64), False),
        ("uint8", np.array([0, 256], np.uint16), True),
        ("int64", np.array([1, 2], np.int8), False),
    ],
)
def test_a_counter_that_its_type_cannot_hold_is_refused(dtype: str, value: np.ndarray, bad: bool) -> None:
    layout = Layout.of({"x": np.zeros(1, np.float32), "count": np.zeros(2, dtype), "no": np.zeros(0, dtype)})
    fault = layout.fault({"x": np.zeros(1, np.float32), "count": value, "no": np.zeros(0, value.dtype)})
    assert (fault is not None) == bad
    assert fault is None or f"counter 'count' has entries outside {np.iinfo(dtype).min} to" in fault


def renamed(arrays: Arrays) -> Arrays:
    return {"other": arrays["x"]}


FAULTS: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "other names": (renamed, "other names"),
    "other shape": (lambda a: {**a, "x": np.zeros(4, np.float32)}, "shape"),
    "integers": (lambda a: {**a, "x": np.zeros(3, np.int64)}, "type int64"),
    "nan": (lambda a: {**a, "x": np.full(3, np.nan, np.float32)}, "NaN"),
    "bad buffer": (lambda a: {**a, "running_mean": np.array([np.inf], np.float32)}, "buffer 'running_mean'"),
    "beyond float32": (lambda a: {**a, "x": np.full(3, 1e300)}, "float32 cannot hold"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_arrays_are_non_response_and_named(fault: str) -> None:
    spoil, reason = FAULTS[fault]
    model: Arrays = {"x": np.zeros(3, np.float32), "running_mean": np.array([1.0], np.float32)}
    fed = federation("uniform", model, n=4)
    admit(fed, sizes_of(4))
    cohort = fed.open(set(fed.clients.keys))
    good = {"x": np.ones(3, np.float32), "running_mean": np.array([2.0], np.float32)}
    answers = {i: ClientReply(dict(good)) for i in range(4)} | {2: ClientReply(spoil(dict(good)))}
    info = fed.close(cohort, answers)
    assert info.num_responded == 3
    assert [client for client, _ in info.rejected] == [2]
    assert reason in info.rejected[0].reason
    assert fed.current.responded_m.tolist() == [1, 1, 0, 1]
    weight_m = fed.plan.population.weight_m
    assert np.allclose(fed.arrays()["x"], 1 - weight_m[2])  # everybody was certain to be asked
    assert fed.arrays()["running_mean"].tolist() == [2.0]  # a mean of those who answered


def test_weights_that_clients_send_do_not_count() -> None:
    """Sizes are those of the registration, whatever a reply says: there is no place to say it."""
    assert set(ClientReply._fields) == {
        *("arrays", "fault", "loss", "square_loss", "step_variance", "num_steps", "sketch", "since")
    }


def test_a_missing_reply_is_not_a_refused_one() -> None:
    fed = federation("uniform", n=3)
    admit(fed, sizes_of(3))
    cohort = fed.open(set(fed.clients.keys))
    info = fed.close(
        cohort, {0: ClientReply({"x": np.ones(3, np.float32)}), 1: ClientReply(None, "error 5: node is gone")}
    )
    assert info.num_responded == 1
    assert info.rejected == [(1, "error 5: node is gone")]
    assert fed.response_rates() == {"client:0": 1.0, "client:1": 0.5, "client:2": 0.5}


def test_clients_are_numbered_by_their_keys_and_keep_their_numbers() -> None:
    fed = federation()
    admit(fed, {f"partition:{i}": 7 for i in (10, 2, 11, 1)})
    assert fed.clients.keys == ("partition:1", "partition:2", "partition:10", "partition:11")
    admit(fed, {"partition:5": 7, "partition:2": 70})
    assert list(fed.clients.keys)[4:] == ["partition:5"]
    assert fed.clients.sizes == [7, 70, 7, 7, 7]
    assert fed.plan.population.weight_m[1] == pytest.approx(70 / 98)


def test_newcomers_get_the_mean_score_and_the_others_keep_theirs() -> None:
    fed = federation("pracdelta", n=3)
    admit(fed, sizes_of(6))
    play(fed, 4)
    before_m = fed.current.sampler.p_m
    assert np.ptp(before_m) > 0.01
    admit(fed, sizes_of(8, start=6))
    after_m = fed.current.sampler.p_m
    assert after_m.sum() == pytest.approx(1)
    assert after_m[6:] == pytest.approx([after_m.mean()] * 2)
    assert after_m[:6] / before_m == pytest.approx([6 / 8] * 6)
    assert fed.current.selected_m[6:].tolist() == [0, 0]
    play(fed, 2)


@pytest.mark.parametrize("label", ["k-vib", "vrb"])
def test_newcomers_get_the_mean_of_scores_that_only_grow(label: str) -> None:
    fed = federation(label, n=3)
    admit(fed, sizes_of(6))
    play(fed, 30)
    before_m = fed.current.sampler.total_m
    admit(fed, sizes_of(8, start=6))
    assert fed.current.sampler.total_m[6:] == pytest.approx([np.mean(before_m)] * 2)
    assert np.mean(before_m) > 0


@pytest.mark.parametrize("label", ["pracdelta@systematic@difference-own", "innovation", "cluster-is", "balanced"])
def test_growing_is_what_starting_with_everybody_would_be_at_the_first_round(label: str) -> None:
    """Before anything was learnt, joining later and being there from the start are the same."""
    late, early = federation(label, n=3), federation(label, n=3)
    admit(late, sizes_of(4))
    admit(late, sizes_of(9, start=4))
    admit(early, sizes_of(9))
    assert late.clients.keys == early.clients.keys
    for (name, grown), (_, begun) in zip(flatten(late.current), flatten(early.current), strict=True):
        assert np.allclose(grown, begun, rtol=1e-12, atol=0, equal_nan=grown.dtype.kind == "f"), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_control_stands_for_everybody_with_the_new_weights(estimator: str) -> None:
    """sum_j w_j c_j is what the difference estimators add: a wrong one after somebody joins would be a bias."""
    fed = federation("md-fixed", n=3, estimator=estimator)
    admit(fed, sizes_of(5))
    play(fed, 3)
    admit(fed, {"client:1": 99, **sizes_of(7, start=5)})
    control, weight_m = find_estimator(estimator).control, fed.plan.population.weight_m
    guess = control.value(fed.current.control, np.arange(7))
    everybody_md = np.broadcast_to(guess.control_nd, (7, 3))
    assert np.allclose(guess.total_d, weight_m @ everybody_md)
    assert everybody_md.any() == (estimator not in {"horvitz-thompson", "hajek", "plain-mean", "weighted-mean"})
    play(fed, 3)


#: Their memory is about all clients at once: a tree of them, and experts' probabilities of them.
CANNOT_GROW = {"clustered-sampling-2", "osmd"}
PRACTICAL = [name for name, entry in SAMPLERS.items() if entry.needs not in {"oracle", "losses"}]


@pytest.mark.parametrize("label", sorted(CANNOT_GROW))
def test_samplers_that_cannot_grow_go_on_without_newcomers_and_say_so(label: str) -> None:
    fed = federation(label, n=3)
    admit(fed, sizes_of(5))
    admit(fed, {"client:1": 60, **sizes_of(8, start=5)})
    assert fed.clients.sizes == [10, 60, 20, 25, 30]
    assert "client:5, client:6, client:7 cannot join" in fed.warnings[0]
    assert "set min_nodes to the number of all clients" in fed.warnings[0]
    admit(fed, sizes_of(8, start=5))
    assert len(fed.warnings) == 1  # said once
    play(fed, 2)


@pytest.mark.parametrize("label", [name for name in PRACTICAL if name not in CANNOT_GROW])
def test_every_practical_sampler_lets_clients_join(label: str) -> None:
    fed = federation(label, {"x": np.zeros(12, np.float32)}, n=3)
    admit(fed, sizes_of(5))
    play(fed, 3)
    admit(fed, {"client:1": 99, **sizes_of(8, start=5)})
    fresh = init_round(fed.plan, np.zeros(12))
    for (name, grown), (_, begun) in zip(flatten(fed.current), flatten(fresh), strict=True):
        assert grown.shape == begun.shape, name
        if name.endswith((".weight_m", ".size_m")):
            assert np.array_equal(grown, begun), name
    play(fed, 4)


class Tally(NamedTuple):
    counts: FloatArray


class Counting(Fixed):
    """A sampler whose memory has one number a client, under a name that does not say so."""

    def init(self, population: Population) -> Any:
        return Tally(np.zeros(population.num_clients))


def test_a_sampler_whose_memory_cannot_grow_is_refused() -> None:
    two, three = (Plan(Population.from_sizes([1] * m), Counting(), 1) for m in (2, 3))
    with pytest.raises(DeltaflError, match="'counts' with shape"):
        resize_state(three, init_round(two, np.zeros(2)), two.population.weight_m)


def test_absent_clients_keep_their_probabilities() -> None:
    fed = federation("pracdelta", n=2)
    admit(fed, sizes_of(6))
    play(fed, 3)
    kept_m = fed.current.sampler.p_m[3:]
    play(fed, 5, present={"client:0", "client:1", "client:2"})
    assert fed.current.sampler.p_m[3:] == pytest.approx(kept_m)
    assert fed.current.selected_m[:3].sum() >= 10


@pytest.mark.parametrize(
    "label", ["pracdelta", "innovation", "cluster-is", "balanced", "pracdelta@pivotal@difference-own"]
)
def test_a_restart_goes_on_to_the_same_bits(label: str, tmp_path: Path) -> None:
    def fresh() -> Federation:
        return federation(label, {**MODEL, "x": np.zeros(3, np.float32)}, n=3, seed=5)

    def play_all(fed: Federation, rounds: int) -> None:
        for _ in range(rounds):
            cohort = fed.open(set(fed.clients.keys))
            sent = fed.arrays()
            fed.close(
                cohort,
                {
                    int(i): ClientReply(
                        {n: a + a.dtype.type(1 + i % 3) if a.dtype != bool else a for n, a in sent.items()}
                    )
                    for i in cohort.client_n
                },
            )

    through, stopped = fresh(), fresh()
    for fed in (through, stopped):
        admit(fed, sizes_of(7))
        play_all(fed, 3)
    save(tmp_path, stopped)
    again = fresh()
    assert load(tmp_path, again)
    assert again.clients.keys == through.clients.keys
    for fed in (through, again):
        admit(fed, sizes_of(9, start=7))
        play_all(fed, 3)
    assert again.current.round == 6
    assert same_tree(again.current, through.current)
    assert all(
        np.array_equal(again.arrays()[n], a) and again.arrays()[n].dtype == a.dtype for n, a in through.arrays().items()
    )


def test_a_norm_guard_bounds_what_a_round_can_do_over_restarts_too(tmp_path: Path) -> None:
    fed = federation("uniform", norm_guard=2.0)
    admit(fed, sizes_of(6))
    for step in [1.0] * 6 + [100.0]:
        if step > 1:
            save(tmp_path, fed)
            fed = federation("uniform", norm_guard=2.0)
            assert load(tmp_path, fed)
        before_d = fed.params_d.copy()
        cohort, sent = fed.open(set(fed.clients.keys)), fed.arrays()["x"]
        info = fed.close(cohort, {int(i): ClientReply({"x": sent + np.float32(step)}) for i in cohort.client_n})
    assert info.clip_factor == pytest.approx(0.02, rel=0.2)  # 2 medians of about 1, where 100 was meant
    assert np.linalg.norm(fed.params_d - before_d) < 2 * np.sqrt(3) * 1.2
    with pytest.raises(DeltaflError, match=r"norm_guard = 2\.0, now it is None"):
        load(tmp_path, federation("uniform"))


def test_a_half_written_state_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(n=2)
    admit(fed, sizes_of(4))
    play(fed, 1)
    save(tmp_path, fed)
    kept = fed.current
    play(fed, 1)

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt if target.name == "federation.json" else OSError("tensors come first")

    original = Path.replace
    monkeypatch.setattr(
        Path,
        "replace",
        lambda self, target: killed(self, target) if target.suffix == ".json" else original(self, target),
    )
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, fed)
    monkeypatch.undo()
    again = federation(n=2)
    assert load(tmp_path, again)
    assert same_tree(again.current, kept)
    save(tmp_path, fed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["federation-2.safetensors", "federation.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed = 0, now it is 1"),
        ({"estimator": "hajek"}, "estimator"),
        ({"weights": "uniform"}, "weights"),
        ({"model": {"x": np.zeros(4, np.float32)}}, "other arrays"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    fed = federation(n=2)
    admit(fed, sizes_of(4))
    play(fed, 1)
    save(tmp_path, fed)
    with pytest.raises(DeltaflError, match=message):
        load(tmp_path, federation(**{"n": 2, **change}))
    assert load(tmp_path, federation(n=3))  # the cohort size may change
    mark = json.loads((tmp_path / "federation.json").read_text())
    assert [client["key"] for client in mark["clients"]] == list(fed.clients.keys)


# Monte Carlo of the weighting, with failures of every kind.

CHAINS, WARM_UP = 160, 11
#: How often each client answers, and how it fails if it does not.
ANSWER_RATE = np.array([0.55, 1.0, 0.7, 0.9, 0.6, 0.8])


def one_chain(chain: int, response_floor: float) -> tuple[FloatArray, FloatArray]:
    """The estimate of the last round of a federation in which clients fail at their own rates, and the truth."""
    rules = Rules(PracDelta(floor=0.3), 3, "horvitz-thompson", Recorder(), seed=chain, response_floor=response_floor)
    model: Arrays = {"x": np.zeros(2, np.float32)}
    fed = Federation(rules, model, Layout.of(model))
    admit(fed, sizes_of(6))
    rng = np.random.default_rng([chain, 7])
    update_md = np.array([[1, 2], [-2, 1], [4, 0], [0.5, -3], [1, 1], [-1, 5]], dtype=np.float32)
    failures: list[Callable[[], ClientReply | None]] = [
        lambda: None,
        lambda: ClientReply(None, "error"),
        lambda: ClientReply({"x": np.array([np.nan, 0], np.float32)}),
        lambda: ClientReply({"x": update_md[0]}, loss=float("inf")),
        lambda: ClientReply({"x": np.zeros(5, np.float32)}),
    ]
    for _ in range(WARM_UP):
        cohort = fed.open(set(fed.clients.keys))
        answers = {}
        for i in cohort.client_n.tolist():
            works = rng.random() < ANSWER_RATE[i]
            answers[i] = ClientReply({"x": update_md[i]}) if works else failures[rng.integers(len(failures))]()
        fed.close(cohort, {i: answer for i, answer in answers.items() if answer is not None})
    truth_d = fed.plan.population.weight_m @ update_md
    return fed.current.optimizer.delta_d, truth_d


def z_scores(response_floor: float, chains: int = CHAINS) -> FloatArray:
    runs = [one_chain(chain, response_floor) for chain in range(chains)]
    estimate_cd, truth_d = np.stack([d for d, _ in runs]), runs[0][1]
    error: FloatArray = (estimate_cd.mean(axis=0) - truth_d) / (estimate_cd.std(axis=0, ddof=1) / np.sqrt(chains))
    return error


def test_the_estimate_stays_unbiased_under_failures() -> None:
    assert np.all(np.abs(z_scores(response_floor=0.05)) < 4)


def test_the_monte_carlo_would_notice_a_bias() -> None:
    """Without response rates (all taken for 1) the same failures bias the estimate, visibly."""
    assert np.max(np.abs(z_scores(response_floor=1.0, chains=100))) > 4


# Clipping and noise.


def test_clipping_bounds_what_a_reply_can_do() -> None:
    fed = federation("uniform", n=2, clipping=WeightedClipping(norm=0.5))
    admit(fed, sizes_of(4))
    cohort = fed.open(set(fed.clients.keys))
    info = fed.close(cohort, {int(i): ClientReply({"x": np.array([3, 4, 0], np.float32)}) for i in cohort.client_n})
    assert fed.params_d == pytest.approx(info.sum_of_weights * np.array([0.3, 0.4, 0]), rel=1e-6)


def test_noise_follows_the_largest_weight_of_those_asked_not_of_those_who_replied() -> None:
    z, norm, trials = 2.0, 0.5, 400
    noisy, coefs = [], set()
    for trial in range(trials):
        fed = federation("uniform", n=2, clipping=WeightedClipping(norm, z))
        admit(fed, {"client:0": 10, "client:1": 90})
        cohort = fed.open(set(fed.clients.keys))
        fed.close(cohort, {0: ClientReply({"x": np.zeros(3, np.float32)})}, rng=np.random.default_rng(trial))
        coefs.add(0.9)
        noisy.append(fed.params_d)
    ratio = np.stack(noisy).std() / (z * norm * 0.9)
    assert 1 - 4 / np.sqrt(2 * 3 * trials) < ratio < 1 + 4 / np.sqrt(2 * 3 * trials)


def test_noise_cannot_be_repeated_unless_a_test_asks_for_it() -> None:
    clipping = WeightedClipping(1.0, 1.0)
    assert not np.array_equal(clipping.noise(1.0, 8), clipping.noise(1.0, 8))
    assert not clipping.noise(0.0, 8).any()


@pytest.mark.parametrize(("norm", "z"), [(0.0, 1.0), (float("nan"), 0.0), (1.0, -1.0), (float("inf"), 0.0)])
def test_bounds_that_are_none_are_refused(norm: float, z: float) -> None:
    with pytest.raises(DeltaflError, match="clipping to norm"):
        WeightedClipping(norm, z)


def test_noise_needs_weights_that_are_known_before_the_replies() -> None:
    with pytest.raises(DeltaflError, match="largest weight"):
        Rules(make_sampler("pracdelta"), 2, "hajek", clipping=WeightedClipping(1.0, 1.0))


def test_a_norm_guard_goes_with_clipping_that_adds_no_noise() -> None:
    """With noise its factor would be made of past norms without any."""
    settings: dict[str, Any] = {"norm_guard": 3.0}
    Rules(make_sampler("uniform"), 2, clipping=WeightedClipping(1.0), **settings)
    with pytest.raises(DeltaflError, match=r"norm_guard is 3\.0 and noise is added"):
        Rules(make_sampler("uniform"), 2, clipping=WeightedClipping(1.0, 0.5), **settings)


# Sketches.


def test_scores_from_sketches_are_near_those_from_norms() -> None:
    rng = stream(0, "data")
    d = 5000
    model: Arrays = {"x": np.zeros(d, np.float32)}
    exact, sketched = federation("pracdelta", model, n=6), federation("pracdelta", model, n=6, sketch=64)
    update_nd = (rng.normal(size=(6, d)) * np.arange(1, 7)[:, None]).astype(np.float32)
    sketch_nq = count_sketch(update_nd, 64, sketch_seed(0))
    for fed in (exact, sketched):
        admit(fed, sizes_of(6))
        cohort = fed.open(set(fed.clients.keys))
        fed.close(cohort, {i: ClientReply({"x": update_nd[i]}, sketch=sketch_nq[i].tolist()) for i in range(6)})
    ratio = sketched.current.sampler.p_m / exact.current.sampler.p_m
    assert np.all(np.abs(ratio - 1) < 0.35)  # 4 standard deviations of a norm from 64 numbers, sqrt(2 / 64) / 2 each
    assert not np.allclose(ratio, 1, atol=1e-3)
    assert np.array_equal(exact.params_d, sketched.params_d)


@pytest.mark.parametrize("sketch", [None, [1.0] * 63, [float("nan")] * 64])
def test_a_bad_sketch_is_a_bad_reply(sketch: list[float] | None) -> None:
    fed = federation("pracdelta", n=2, sketch=64)
    admit(fed, sizes_of(2))
    cohort = fed.open(set(fed.clients.keys))
    good = [0.0] * 64
    info = fed.close(
        cohort,
        {
            0: ClientReply({"x": np.ones(3, np.float32)}, sketch=sketch),
            1: ClientReply({"x": np.ones(3, np.float32)}, sketch=good),
        },
    )
    assert [client for client, _ in info.rejected] == [0]


def test_the_seed_of_sketches_is_not_the_seed_of_draws() -> None:
    assert sketch_seed(3) not in {0, 3}
    assert sketch_seed(3) != sketch_seed(4)


def test_a_state_that_knew_other_things_of_the_clients_is_refused(tmp_path: Path) -> None:
    fed = federation("balanced")
    admit(fed, sizes_of(5))
    play(fed, 1)
    save(tmp_path, fed)
    rules = Rules(make_sampler("balanced"), 3, "regression-damped", aux=4)
    with pytest.raises(DeltaflError, match="aux = 3, now it is 4"):
        load(tmp_path, Federation(rules, {"x": np.zeros(3, np.float32)}, Layout.of({"x": np.zeros(3, np.float32)})))


def test_samplers_that_need_everybodys_update_are_refused() -> None:
    with pytest.raises(DeltaflError, match="practical sampler"):
        Rules(make_sampler("delta"), 3)
