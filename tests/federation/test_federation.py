"""Rounds without messages: faulty replies, failures, outages, noise."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from conftest import Recorder
from deltafl import DeltaflError, DifferentialPrivacy
from deltafl.federation.replies import ClientReply, read_reply
from deltafl.model.arrays import Arrays
from deltafl.types import FloatArray

from .tools import federation, play, play_once, rates_of

FAULTS: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "other names": (lambda a: {"other": a["x"]}, "nobody sent"),
    "other shape": (lambda a: {**a, "x": np.zeros(4, np.float32)}, "shape"),
    "integers": (lambda a: {**a, "x": np.zeros(3, np.int64)}, "type int64"),
    "nan": (lambda a: {**a, "x": np.full(3, np.nan, np.float32)}, "size nan"),
    "bad buffer": (
        lambda a: {**a, "running_mean": np.array([np.inf], np.float32)},
        "buffer 'running_mean'",
    ),
    "beyond float32": (lambda a: {**a, "x": np.full(3, 1e300)}, "size inf, expected at most"),
    "the array": (lambda a: {**a, "x": np.array([0, np.inf, 0], np.float32)}, ", in 'x'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_arrays_are_non_response_with_a_reason(fault: str) -> None:
    spoil, reason = FAULTS[fault]
    fed = federation(
        "uniform",
        {"x": np.zeros(3, np.float32), "running_mean": np.array([1.0], np.float32)},
        n=4,
        m=4,
    )
    good = {"x": np.ones(3, np.float32), "running_mean": np.array([2.0], np.float32)}
    info = play_once(fed, lambda i: ClientReply(spoil(dict(good)) if i == 2 else dict(good)))
    assert info.num_responded == 3
    assert [client for client, _ in info.rejected] == [2]
    assert reason in info.rejected[0].reason
    assert fed.current.responded_m.tolist() == [1, 1, 0, 1]
    assert np.allclose(
        fed.arrays()["x"], 1 - fed.plan.population.weight_m[2]
    )  # everybody was certain to be selected
    assert fed.arrays()["running_mean"].tolist() == [2.0]  # a mean over those that responded


def test_numpys_numbers_are_read_and_integers_out_of_range_end_no_round() -> None:
    metrics = {
        "loss": np.float32(1.5),
        "num-steps": np.int64(4),
        "step-variance": np.float32(0.25),
    }
    reply = read_reply({}, metrics, {})
    assert (reply.loss, reply.num_steps, reply.step_variance) == (1.5, 4.0, 0.25)
    fed = federation("uniform", n=2, m=2)
    readers = {name: partial(np.copy, array) for name, array in fed.arrays().items()}
    info = play_once(fed, lambda i: read_reply(readers, {"loss": 10**400 if i else 1}, {}))
    assert [client for client, _ in info.rejected] == [1]


# Monte Carlo of the weighting, with failures of every kind.

CHAINS = 100
WARM_UP = 11
#: How often each client answers.
ANSWER_RATE = np.array([0.55, 1.0, 0.7, 0.9, 0.6, 0.8])
UPDATE_MD = np.array([[1, 2], [-2, 1], [4, 0], [0.5, -3], [1, 1], [-1, 5]], dtype=np.float32)
FAILURES: list[ClientReply | None] = [
    None,
    ClientReply(None, "error"),
    ClientReply({"x": np.array([np.nan, 0], np.float32)}),
    ClientReply({"x": UPDATE_MD[0]}, loss=float("inf")),
    ClientReply({"x": np.zeros(5, np.float32)}),
]


def one_chain(chain: int, response_floor: float) -> tuple[FloatArray, FloatArray]:
    """The estimate of the last round of a federation in which clients fail at their own rates,
    and the truth.
    """
    settings = {"server_optimizer": Recorder(), "seed": chain, "response_floor": response_floor}
    fed = federation("pracdelta(floor=0.3)", {"x": np.zeros(2, np.float32)}, 6, **settings)
    rng = np.random.default_rng([chain, 7])

    def answer(client: int) -> ClientReply | None:
        works = rng.random() < ANSWER_RATE[client]
        return (
            ClientReply({"x": UPDATE_MD[client]})
            if works
            else FAILURES[rng.integers(len(FAILURES))]
        )

    for _ in range(WARM_UP):
        play_once(fed, answer)
    return fed.current.parts["server_optimizer"].delta_d, fed.plan.population.weight_m @ UPDATE_MD


def z_scores(response_floor: float) -> FloatArray:
    runs = [one_chain(chain, response_floor) for chain in range(CHAINS)]
    estimate_cd = np.stack([d for d, _ in runs])
    truth_d = runs[0][1]
    error: FloatArray = (estimate_cd.mean(axis=0) - truth_d) / (
        estimate_cd.std(axis=0, ddof=1) / np.sqrt(CHAINS)
    )
    return error


def test_the_estimate_stays_unbiased_under_failures() -> None:
    assert np.all(np.abs(z_scores(response_floor=0.05)) < 4)


@pytest.mark.thorough  # it tests the test
def test_the_monte_carlo_would_notice_a_bias() -> None:
    """Without response rates (all taken for 1) the same failures bias the estimate, visibly."""
    assert np.max(np.abs(z_scores(response_floor=1.0))) > 4


# Failures that clients share.


@pytest.mark.parametrize(
    ("label", "n"),
    [("uniform", 3), ("pracdelta", 5), ("innovation", 3), ("md@systematic@difference", 3)],
)
def test_an_outage_changes_no_weight_afterwards(label: str, n: int) -> None:
    fed = federation(label, weights="uniform", n=n, m=10)
    play(fed, 12)
    before = fed.params_d
    play(fed, 10, alive=False)
    assert np.array_equal(fed.params_d, before)
    assert fed.current.round == 22
    assert list(rates_of(fed).values()) == [1.0] * 10
    assert sum("no reply could be used" in sentence for sentence in fed.warnings) == 10
    if label == "uniform":
        assert [info.sum_of_weights for info in play(fed, 5)] == pytest.approx([1.0] * 5)


@pytest.mark.parametrize("out", [{0}, {1}, {0, 3, 4}])
def test_parts_count_the_rounds_that_were_not_left_out(out: set[int]) -> None:
    """The mean of the last steps, and the weights of an average, are those of a run without."""
    label = "full+ghbm=0.5+ghbm_tau=2+average=0.9"
    models = []
    for left_out in (out, set[int]()):
        fed = federation(label, weights="uniform", m=10)
        for number in range(5 + len(left_out)):
            play(fed, 1, alive=number not in left_out)
        models.append(fed.model()["x"].tolist())
    assert models[0] == models[1]


@pytest.mark.parametrize("m", [4, 12])
@pytest.mark.parametrize("kind", ["exact", "code"])
def test_a_full_first_round_that_nobody_answered_is_played_again(kind: str, m: int) -> None:
    fed = federation("innovation", first_round=kind, m=m)
    infos = play(fed, 2, alive=False) + play(fed, 2)
    assert [info.num_selected for info in infos] == [m, m, m, 3]


def test_what_an_outage_has_cost_is_spent() -> None:
    fed = federation("uniform+budget=72+budget_rounds=6", m=40)
    infos = play(fed, 1) + play(fed, 2, alive=False) + play(fed, 3)
    assert [info.num_selected for info in infos] == [12] * 6


def test_clients_that_are_away_in_an_outage_do_not_count_as_connected() -> None:
    """Else their rates would rise towards 1 with every such round, and they would count too
    little ever after.
    """
    fed = federation("uniform", weights="uniform", n=3, m=8)
    for number in range(60):
        here = fed.keys if number % 2 else fed.keys[:5]
        cohort = fed.open(here)
        answers = {key: ClientReply(fed.arrays()) for key in fed.keys_of(cohort) if number < 20}
        fed.close(cohort, answers)
    assert sum("no reply could be used" in sentence for sentence in fed.warnings) == 40
    assert list(rates_of(fed).values()) == pytest.approx([1.0] * 5 + [31 / 61] * 3)


@pytest.mark.parametrize("reply", [None, ClientReply({"x": np.full(3, np.nan, np.float32)})])
def test_a_round_in_which_nobody_replied_has_its_noise(reply: ClientReply | None) -> None:
    """With dp, whether a client sends NaN or 0 must not show: neither may leave the model as it
    was.
    """
    fed = federation(
        "uniform@poisson", n=4, m=4, dp=DifferentialPrivacy(1.0, 1.0, 1e-5), seed=2**40
    )
    play(fed, 8)
    before = fed.params_d
    play_once(fed, lambda i: reply)
    assert (fed.params_d != before).all()


def test_silence_of_clients_that_often_fail_is_non_response() -> None:
    """Two clients that answer every second time: that neither does is no outage, and must count."""
    fed = federation("uniform", n=2, m=2)
    rng = np.random.default_rng(0)
    for _ in range(60):
        play_once(fed, lambda i: ClientReply(fed.arrays()) if rng.random() < 0.5 else None)
    assert fed.current.selected_m.sum() >= 116
    assert all(0.3 < rate < 0.7 for rate in rates_of(fed).values())


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="no wider type here")
def test_a_model_that_no_reply_may_have_is_refused() -> None:
    with pytest.raises(DeltaflError, match=r"'x' of the model has type .*; give it as float64"):
        federation(model={"x": np.zeros(3, np.longdouble)})


def test_buffers_without_noise_are_refused() -> None:
    model = {"x": np.zeros(3, np.float32), "norm.running_mean": np.zeros(2, np.float32)}
    with pytest.raises(
        DeltaflError, match=r"mean of 'norm.running_mean' would get no noise; use layers"
    ):
        federation("uniform@poisson", model, dp=DifferentialPrivacy(1.0, 1.0, 1e-5), seed=2**40)
