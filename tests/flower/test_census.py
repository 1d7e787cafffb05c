"""The census over messages: what is asked and answered, by whom and when; what becomes of it in
the federation.
"""

import contextlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from conftest import same_tree
from deltafl import Census
from deltafl.federation.clients import ClientInfo
from deltafl.federation.exchange import Correction, census_question
from deltafl.federation.federation import Federation
from deltafl.flower import DeltaStrategy, delta_mod
from deltafl.flower.client import asked_in
from deltafl.flower.messages import to_record
from deltafl.model.vectors import update_of
from deltafl.samplers.census import output_layer
from deltafl.types import FloatArray
from federation.tools import admit, federation, sizes_of
from hosts.flower_nodes import app_with
from hosts.rounds import MODEL, SHAPES, moved

from .grid import FakeGrid, Handler

LAYER = output_layer(list(SHAPES.values()))
SMALL = "census(components=2,size=16)"


def nodes(m: int) -> dict[int, dict[str, Any]]:
    return {1000 - i: {"client-id": f"hospital-{i}", "number": i} for i in range(m)}


def grid_of(m: int) -> FakeGrid:
    return FakeGrid(app_with(), nodes(m))


def played(
    label: str, grid: FakeGrid, rounds: int, **settings: Any
) -> tuple[DeltaStrategy, Federation]:
    start = settings.pop("start", {})
    strategy = DeltaStrategy(label, n=3, seed=4, **settings)
    strategy.start(cast(Grid, grid), to_record(MODEL), num_rounds=rounds, timeout=30, **start)
    assert strategy.federation is not None
    return strategy, strategy.federation


def asked(grid: FakeGrid) -> list[tuple[int, int]]:
    """The rounds and nodes of the questions."""
    sent = [message.metadata for message in grid.sent if is_question(message)]
    return [(int(data.group_id), data.dst_node_id) for data in sent]


def is_question(message: Message) -> bool:
    return "census" in asked_in(message)


def answers_of(fed: Federation) -> list[tuple[float, ...]]:
    return [info.aux for info in fed.clients.values()]


def expected_answers(m: int, census: Census) -> list[FloatArray]:
    updates = [update_of(MODEL, moved(i, MODEL, Correction())) for i in range(m)]
    return [census.answer(update_d, LAYER) for update_d in updates]


# The mod


def ask(app: ClientApp, census: Census, config: dict[str, Any] | None = None) -> Message:
    asked = ConfigRecord(census_question(census, list(MODEL), 1.0))
    own = ConfigRecord(config or {})
    content = RecordDict({"arrays": to_record(MODEL), "config": own, "deltafl": asked})
    return app(Message(content, 1, "train"), Context(1, 1, {"number": 2}, RecordDict(), {}))


def answer_in(reply: Message) -> list[float]:
    """The only thing in a reply."""
    assert list(reply.content) == ["deltafl"]
    report = asked_in(reply)
    assert list(report) == ["census"]
    return cast(list[float], report["census"])


def test_the_answer_is_the_censuss_and_nothing_else_leaves_the_client() -> None:
    assert LAYER == (6, 2)
    for census in (Census(size=16), Census(size=16, first_update=True)):
        answer = answer_in(ask(app_with(), census))
        assert answer == expected_answers(3, census)[2].tolist()
        assert len(answer) == census.length(14)


def test_noise_is_added_by_the_client_and_nobody_can_reproduce_it() -> None:
    exact_k = expected_answers(3, Census())[2]
    answer_rk = np.array(
        [answer_in(ask(app_with(), Census(noise=0.5, first_update=True))) for _ in range(20)]
    )
    assert not answer_rk[:, -1].any()  # a norm would tell more
    noise_rk = answer_rk[:, :-1] - exact_k[:-1]
    assert 0.47 < noise_rk.std() < 0.53  # 2560 normal numbers: four standard errors
    assert abs(noise_rk.mean()) < 0.04
    assert len({float(number) for number in noise_rk.ravel()}) == noise_rk.size


def test_a_client_whose_training_is_faulty_gives_away_no_array() -> None:
    app = ClientApp(mods=[delta_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if message.content.config_records["config"].get("raises"):
            return Message(Error(2, "no data"), reply_to=message)
        other = ArrayRecord({"other": Array(np.ones(3, np.float32))})
        return Message(
            RecordDict({"arrays": other, "metrics": MetricRecord({"loss": 1.0})}), reply_to=message
        )

    reply = ask(app, Census())
    said: object = answer_in(reply)
    assert said == "the client's model lacks 'hidden'"
    assert not reply.content.array_records
    assert ask(app, Census(), {"raises": True}).error.reason == "no data"


# Rounds


def test_newcomers_are_asked_when_they_come_and_nobody_twice() -> None:
    grid = grid_of(4)

    def join(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            grid.configs |= nodes(6)

    _, fed = played(SMALL, grid, 5, start={"evaluate_fn": join})
    assert asked(grid) == [*((1, 1000 - i) for i in range(4)), (3, 996), (3, 995)]
    assert fed.unanswered() == []
    census = cast(Census, fed.plan.census)
    aux_mq = cast(FloatArray, census.population(fed.plan.population, answers_of(fed)).aux_mq)
    assert np.array_equal(cast(FloatArray, fed.plan.population.aux_mq), aux_mq)
    assert np.array_equal(fed.current.control.regression.control.aux_mq[:, 1:], aux_mq)


def without_mod(message: Message, context: Context) -> Message | None:
    return app_with(mods=[])(message, context)


def failing(message: Message, context: Context) -> Message | None:
    return Message(Error(2, "no data"), reply_to=message)


def lying(answer: list[float]) -> Handler:
    def reply(message: Message, context: Context) -> Message | None:
        report = ConfigRecord({"census": answer})
        return Message(RecordDict({"deltafl": report}), reply_to=message)

    return reply


@pytest.mark.parametrize(
    ("handler", "times", "reason"),
    [
        (lambda message, context: None, 3, "no reply in time"),
        (failing, 3, "error 2: no data"),
        (without_mod, 1, "the reply holds no answer; add delta_mod to the ClientApp's mods"),
        (lying([1e130] * 28), 1, "the answer is not 28 finite numbers"),
    ],
)
def test_who_does_not_answer_counts_as_the_mean(
    handler: Handler, times: int, reason: str, flower_log: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(6)
    grid.fail[997] = lambda message, context: (handler if is_question(message) else grid.app)(
        message, context
    )
    strategy, fed = played(SMALL, grid, 5)
    assert [round for round, node in asked(grid) if node == 997] == list(range(1, times + 1))
    assert len(asked(grid)) == 5 + times
    assert fed.unanswered() == ["client:hospital-3"]
    aux_mq = cast(FloatArray, fed.plan.population.aux_mq)
    assert not aux_mq[3].any()
    assert np.delete(aux_mq, 3, axis=0).any(axis=1).all()
    assert "census: no answer from 1 clients: " + reason in flower_log.text
    assert "they count as the mean of all: client:hospital-3" in flower_log.text
    assert "Census: 5 of 6 clients answered" in flower_log.text
    assert len(strategy.history) == 4  # the census was the first round
    assert same_tree(
        fed.current.responded_m, fed.current.selected_m
    )  # silence in the census is no missed round


# Restarts


class Killed(BaseException):
    pass


def test_a_server_that_is_killed_in_its_first_round_does_not_ask_again(tmp_path: Path) -> None:
    def interrupted(folder: Path, deadly: int | None) -> tuple[FakeGrid, Federation]:
        grid = grid_of(6)

        def deadly_mod(message: Message, context: Context) -> Message | None:
            number = message.content.config_records["config"]["server-round"]
            if number == deadly and not is_question(message):
                raise Killed
            return grid.app(message, context)

        grid.fail = dict.fromkeys(grid.configs, deadly_mod)
        with contextlib.suppress(Killed):
            played(SMALL, grid, 5, state_path=folder)
        deadly = None
        return grid, played(SMALL, grid, 5, state_path=folder)[1]

    _, through = interrupted(tmp_path / "through", None)
    for deadly in (2, 3):
        grid, again = interrupted(tmp_path / str(deadly), deadly)
        assert len(asked(grid)) == 6
        assert again.clients == through.clients
        assert same_tree(again.current, through.current)


# The federation


def test_an_answer_is_kept_while_its_client_changes_and_dropped_with_it() -> None:
    fed = federation(SMALL, m=6)
    before = answers_of(fed)
    fed.admit({"client:1": ClientInfo(99), "client:2": ClientInfo(20)})
    assert answers_of(fed) == before
    assert fed.clients["client:1"].num_examples == 99
    fed.forget(["client:4"])
    assert answers_of(fed) == [*before[:4], before[5]]
    rest = federation(SMALL)
    admit(
        rest,
        {"client:1": 99, **{key: size for key, size in sizes_of(6).items() if key[-1] not in "14"}},
    )
    assert fed.current.sampler.about_mq.shape == (5, 2)


def test_a_liar_is_selected_as_often_as_the_honest() -> None:
    """1e30 x random, in 500 draws: what is expected of each draw, and how often it comes true,
    is n w_i.
    """
    fed = federation("census(size=16,by_norm=False)", m=6, weights="data")
    rng = np.random.default_rng(0)
    share_m = 3 * fed.plan.population.weight_m
    assert share_m.max() < 1
    for lie in (None, tuple((1e30 * rng.normal(size=17)).tolist())):
        if lie is not None:
            fed.answer({"client:4": lie})
        drawn_m = np.zeros(6)
        draws = 500
        for number in range(draws):
            fed.state = fed.current._replace(round=number)
            cohort = fed.open(fed.keys)
            np.testing.assert_allclose(cohort.expected_n, share_m[cohort.client_n], rtol=1e-9)
            drawn_m[cohort.client_n] += 1
        error_m = np.sqrt(share_m * (1 - share_m) / draws)
        assert np.all(np.abs(drawn_m / draws - share_m) < 4 * error_m)
