"""Whatever a client sends in place of its model and its numbers, no round ends in an error, the
client is as one that is silent, and the log has one visible line of why.
"""

import copy
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import DeltaflError, Reports, close_round, init_round, make_plan, open_round
from deltafl.errors import printable
from deltafl.estimators.two_bits import encode
from deltafl.federation.clients import ClientInfo
from deltafl.federation.registration import read_info
from deltafl.federation.replies import (
    ClientReply,
    mean_metrics,
    read_answer,
    read_metrics,
    read_reply,
)
from deltafl.federation.rules import make_rules
from deltafl.federation.service import Service
from deltafl.types import RoundInfo
from federation.tools import federation, play_once

from .hostile import ARRAYS, BYTES, ESCAPES, LONG, NAMES, NUMBERS, UNUSUAL

WITH_AUX = make_rules(aux=1)

M = 4
LIAR = 2


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Nothing makes room for what a client only says that it has sent."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def visible(texts: list[str]) -> bool:
    """Whether each is one line of bounded length without anything that cannot be seen."""
    return all(text.lstrip("\t").isprintable() and len(text) < 2000 for text in texts)


def reasons_of(history: list[RoundInfo]) -> list[str]:
    """Why the liar was refused, in every round."""
    assert all(
        [client for client, _ in info.rejected] == [LIAR] and info.num_responded == M - 1
        for info in history
    )
    return [info.rejected[0].reason for info in history]


# Arrays, in a federation without messages and in a loop of one's own.


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", ARRAYS)
def test_what_is_no_array_of_the_model_is_non_response(kind: str) -> None:
    models: list[Any] = []
    for lies in (True, False):
        fed = federation("pracdelta", {"x": np.zeros(3, np.float32)}, M, n=M)

        def answer(client: int, lies: bool = lies, fed: Any = fed) -> ClientReply | None:
            arrays = {"x": fed.arrays()["x"] + np.float32(client + 1)}
            if client != LIAR:
                return read_reply({"x": lambda: arrays["x"]}, {"loss": 1.0}, {})
            spoilt = {"x": ARRAYS[kind](arrays["x"])}
            return ClientReply(spoilt, loss=1.0) if lies else None

        history = [play_once(fed, answer) for _ in range(2)]
        models.append(fed.params_d)
        assert not lies or visible(reasons_of(history))
    assert np.array_equal(*models)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", ARRAYS)
def test_what_is_no_update_is_non_response_in_a_loop_of_ones_own(kind: str) -> None:
    plan = make_plan("uniform", [1] * M, n=M)
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    updates: list[Any] = [np.ones(3, np.float32)] * M
    # Integers and truths are numbers, and a copy of a view of one is as good.
    counts = kind in ("integers", "truths", "recarray")
    updates[LIAR] = ARRAYS[kind](updates[LIAR])
    lied, info = close_round(plan, state, cohort, updates)
    assert [client for client, _ in info.rejected] == ([] if counts else [LIAR])
    updates[LIAR] = np.ones(3) if counts else None
    silent, _ = close_round(plan, state, cohort, updates)
    assert np.array_equal(lied.params_d, silent.params_d)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_arrays_of_honest_clients_count(kind: str) -> None:
    fed = federation("uniform", {"x": np.zeros((3, 2), np.float32)}, M, n=M)
    info = play_once(fed, lambda _: ClientReply({"x": UNUSUAL[kind](fed.arrays()["x"] + 0.5)}))
    assert info.num_responded == M
    assert fed.params_d == pytest.approx(np.full(6, 0.5))


# Numbers.


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("column", ["loss", "square_loss", "step_variance", "num_steps"])
def test_what_is_no_number_in_a_report_never_ends_a_round(column: str, kind: str) -> None:
    plan = make_plan("oort", [1] * M, n=M)
    state = init_round(plan, np.zeros(3))
    cohort = open_round(plan, state)
    given: dict[str, Any] = {"loss": [1.0] * M, column: [1.0] * M}
    given[column][LIAR] = NUMBERS[kind]
    for _ in range(2):
        cohort = open_round(plan, state)
        reports = Reports.make(M, **given)
        state, info = close_round(plan, state, cohort, [np.ones(3)] * M, reports)
        assert {client for client, _ in info.rejected} <= {LIAR}
        assert visible([reason for _, reason in info.rejected])
        assert np.isfinite(state.params_d).all()


@pytest.mark.parametrize("name", ["loss", "train_loss"])
@pytest.mark.parametrize("kind", [float, np.float16, np.float64, np.array, "tensor"])
def test_a_loss_is_a_number_of_whatever_library(kind: Any, name: str) -> None:
    """One of torch was left out, as if there had been none."""
    if kind == "tensor":
        kind = pytest.importorskip("torch").tensor
    value = kind(0.5)
    for metrics in ({name: value}, {"loss": [9.0], name: value}, {name: value, "train-loss": 7}):
        assert read_reply({}, metrics, {}).loss == 0.5


@pytest.mark.parametrize("kind", NUMBERS)
def test_what_is_no_number_in_a_reply_is_read(kind: str) -> None:
    value = NUMBERS[kind]
    reply = read_reply({}, {"loss": value, "num-steps": value}, {"corrected": value, "code": value})
    assert reply.loss is None or isinstance(reply.loss, float)
    assert isinstance(reply.num_steps + reply.corrected, float)
    means = mean_metrics([(1.0, {"a": value, "b": 2.0}), (1.0, value), (1.0, {"b": 4.0})])
    assert means["b"] == 3.0
    for report in ({"census": value}, {"census": [value] * 3}, value):
        for factor in (None, 0.5):
            refused(read_answer, report, 4, factor)
    for report in ({"num-examples": value, "aux": [value]}, {"aux": value}, value):
        refused(read_info, report, WITH_AUX)


@pytest.mark.parametrize("kind", NUMBERS)
def test_what_is_no_code_and_no_answer_counts_as_silence(kind: str, caplog: Any) -> None:
    model = {"x": np.zeros(3, np.float32)}
    value = NUMBERS[kind]
    empty = {"x": lambda: np.zeros(0, np.float32)}
    honest = read_reply(empty, {}, {"code": encode(np.ones(3)).tolist()})
    for code in (value, [value] * 11):
        fed = federation("fedvarp", model, M, first_round="code", n=M)
        liar = read_reply(empty, {}, {"code": code})
        info = play_once(fed, lambda i, sent=liar: sent if i == LIAR else honest)  # type: ignore[misc]
        assert visible(reasons_of([info]))
    keys = [f"site-{i}" for i in range(M)]
    service = Service(make_rules("census(size=16)", n=2), model, logging.getLogger("x").log)
    service.let_in({key: ClientInfo(10) for key in keys})
    assert service.plan.census is not None
    length = service.plan.census.length(3)
    lies = [{"census": value}, {"census": [value] * length}, {"corrected": value}, value]
    for lie in lies:
        answers = {key: {"census": [1.0] * length} for key in keys} | {keys[LIAR]: lie}
        service.begin_round(keys, lambda _, said=answers: said)  # type: ignore[misc]
        assert service.unanswered() == [keys[LIAR]]
        service._asked.clear()
    assert visible(caplog.messages)


def refused(read: Callable[..., object], *sent: object) -> None:
    with pytest.raises(DeltaflError) as found:
        read(*sent)
    assert visible([str(found.value)])


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    # But for an integer that hypothesis itself cannot show.
    | st.sampled_from(
        [sent for sent in (*NUMBERS.values(), *NAMES) if not (type(sent) is int and sent > 10**500)]
    ),
    lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(st.sampled_from(["census", "aux", "num-examples", "loss", "a"]), some)
        | st.tuples(some, some)
    ),
    max_leaves=6,
)


@given(JUNK, st.sampled_from([None, 0.5]))
def test_whatever_is_sent_is_read_or_refused_in_one_sentence(
    sent: Any, step_factor: float | None
) -> None:
    read_reply({"x": lambda: sent}, sent, sent)
    mean_metrics([(1.0, sent), (2.0, {"a": 1.0})])
    for read in (lambda: read_answer(sent, 2, step_factor), lambda: read_info(sent, WITH_AUX)):
        try:
            read()
        except DeltaflError as error:
            assert visible([str(error)])


def test_a_reply_keeps_no_endless_metrics() -> None:
    names: dict[Any, Any] = {f"m{i}": [1.0] * 100 for i in range(5000)}
    found = read_metrics({**dict.fromkeys(NAMES, 1.0), **names})
    assert len(found) <= 1000
    assert sum(numbers.size for numbers in found.values() if numbers.ndim) <= 10_000
    assert visible([*found])


# Over Flower's messages.


def flower_lies() -> dict[str, Callable[[Any], Any]]:
    """By a word for each, what makes the liar's reply of its honest one."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    def arrays(reply: Any) -> Any:
        return reply.content.array_records["arrays"]

    def of(data: bytes, shape: tuple[int, ...] = (3,), stype: str = "numpy.ndarray") -> Any:
        def spoil(reply: Any) -> None:
            arrays(reply)["x"] = Array("float32", shape, stype, data)

        return spoil

    def live(make: Callable[[Any], Any]) -> Any:
        def spoil(reply: Any) -> None:
            made = make(arrays(reply)["x"].numpy())
            if type(made) is not np.ndarray or made.dtype.hasobject or made.nbytes > 10**6:
                made = np.zeros(0)  # such a thing has no bytes
            arrays(reply)["x"] = Array(made)

        return spoil

    def named(name: str) -> Any:
        def spoil(reply: Any) -> None:
            arrays(reply)[name] = Array(np.ones(3))

        return spoil

    def put(name: str, record: Any) -> Any:
        def spoil(reply: Any) -> None:
            if name in reply.content:
                del reply.content[name]
            reply.content[name] = record

        return spoil

    three = BYTES["cut off"] + b"\0"
    return {
        **{f"bytes: {kind}": of(data) for kind, data in BYTES.items()},
        **{f"array: {kind}": live(make) for kind, make in ARRAYS.items()},
        "another shape said": of(three, (5,)),
        "a long shape said": of(three, tuple(range(10**4))),
        "unknown form": of(three, stype=ESCAPES + LONG),
        "array of names": named(ESCAPES + LONG),
        "empty name": named(""),
        "no arrays": put("arrays", ArrayRecord()),
        "arrays as config": put("arrays", ConfigRecord({ESCAPES: LONG})),
        "two models": put(ESCAPES, ArrayRecord({"x": Array(np.ones(3))})),
        "loss beyond any": put("metrics", MetricRecord({"loss": 10**400})),
        "loss nan": put("metrics", MetricRecord({"loss": np.nan})),
        "steps as a list": put("metrics", MetricRecord({"num-steps": [1] * 10**5})),
        "variance beyond any": put("metrics", MetricRecord({"step-variance": 1e300})),
        "silence": lambda reply: "silence",
    }


def flower(
    rounds: list[Callable[[Any], Any]] | None, state_path: Path | None = None, restarts: int = 1
) -> Any:
    """A federation in which the liar sends what these make of its reply, one a round; None: it is
    silent. The server is restarted so often.
    """
    from deltafl.flower import DeltaStrategy
    from flower.grid import FakeGrid, configs, linear_app, start

    app = linear_app()
    total = len(flower_lies())
    grid = FakeGrid(app, configs(M))
    node = 1000 - LIAR

    def lie(message: Any, context: Any) -> Any:
        if rounds is None:
            return None
        reply = app(copy.deepcopy(message), context)
        spoil = rounds[int(message.metadata.group_id) - 1]
        return None if spoil(reply) == "silence" else reply

    grid.fail[node] = lie
    history: list[RoundInfo] = []
    for part in range(1, restarts + 1):
        strategy = DeltaStrategy("uniform", n=M, seed=3, state_path=state_path)
        start(strategy, grid, rounds=total * part // restarts)
        history += strategy.history
    assert strategy.federation is not None
    return strategy.federation, history


def test_flower_counts_a_liar_as_silent(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Also after each of some restarts, which open the same round again."""
    pytest.importorskip("flwr")
    lies = flower_lies()
    liar, history = flower([*lies.values()], tmp_path / "state", restarts=7)
    assert len(history) == len(lies)
    for kind, info in zip(lies, history, strict=True):
        expected = [] if kind == "silence" else [LIAR]
        assert [client for client, _ in info.rejected] == expected, kind
        assert info.num_responded == M - 1
        assert visible([reason for _, reason in info.rejected])
    rejected = [line for line in log.messages if "rejected: " in line]
    assert len(rejected) == len(lies) - 1
    assert visible(log.messages)
    silent, _ = flower(None)
    assert np.array_equal(liar.params_d, silent.params_d)


@pytest.mark.parametrize("error", [ValueError(ESCAPES + LONG), KeyError("Array"), MemoryError()])
def test_what_flower_cannot_read_ends_nothing(
    error: Exception, log: pytest.LogCaptureFixture
) -> None:
    """Flower makes messages of what a node has uploaded, and confirms each before it reads it."""
    pytest.importorskip("flwr")
    from deltafl.flower import DeltaStrategy
    from flower.grid import FakeGrid, configs, linear_app, played

    class Uploads(FakeGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            received = list(super().pull_messages(message_ids))
            for reply in received:
                of_liar = reply.metadata.src_node_id == 1000 - LIAR
                if of_liar and reply.metadata.message_type == "train":
                    raise error
            return received

    models = []
    for grid in (
        Uploads(linear_app(), configs(M)),
        FakeGrid(linear_app(), configs(M), fail={1000 - LIAR: lambda message, context: None}),
    ):
        pulled = grid.pull_messages
        fed = played(DeltaStrategy("uniform", n=M, seed=3), grid, 3)
        assert grid.pull_messages == pulled
        assert np.asarray(fed.current.responded_m).tolist() == [3, 3, 0, 3]
        models.append(fed.params_d)
    assert np.array_equal(models[0], models[1])
    assert "a reply that is no message counts as silence (" in log.text
    assert visible(log.messages)


def test_metrics_of_a_liar_reach_logs_and_records_visibly(log: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Message, MetricRecord, RecordDict

    from deltafl.flower import DeltaStrategy
    from flower.grid import FakeGrid, configs, linear_app, start

    app = linear_app()
    many = {f"m{i}": [1.0] * 100 for i in range(3000)}
    lies = MetricRecord({ESCAPES: 1.0, LONG: 2.0, "big": 10**400, **many})

    def lie(message: Any, context: Any) -> Any:
        reply = app(message, context)
        reply.content["lies"] = lies
        return reply

    @app.evaluate("lie")
    def evaluate(message: Message, context: Any) -> Message:
        return Message(RecordDict({"m": lies}), reply_to=message)

    grid = FakeGrid(app, configs(M), fail={1000 - LIAR: lie})
    result = start(DeltaStrategy("uniform", n=M, seed=3, evaluate=True), grid, rounds=2)
    for record in result.train_metrics_clientapp.values():
        assert visible([*record])
        assert len(record) < 1100
    # Flower logs a record over many lines, and our own lines are one each.
    assert all(line.replace("\n", "").replace("\t", "").isprintable() for line in log.messages)


@pytest.mark.parametrize("kind", NUMBERS)
def test_registrations_in_flower_are_read_or_refused(kind: str) -> None:
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    from deltafl.flower.registration import read_registration

    for name in ("kind", "client-id", "num-examples", "aux"):
        for value in (NUMBERS[kind], [NUMBERS[kind]], [NUMBERS[kind]] * 3):
            good: dict[str, Any] = {
                "kind": "client",
                "client-id": "a",
                "num-examples": 5,
                "aux": [1.0],
            }
            try:
                record: Any = ConfigRecord({**good, name: value})
            except TypeError:
                continue  # no message of Flower's holds it
            message = Message(RecordDict({"deltafl": record}), 1, "query.deltafl")
            try:
                read_registration(message, WITH_AUX)
            except DeltaflError as error:
                assert visible([str(error)])
    other = Message(RecordDict({"deltafl": MetricRecord({"a": 1.0})}), 1, "query.deltafl")
    refused(read_registration, other, WITH_AUX)


# In NVFlare.


def nvflare_lies() -> dict[str, Callable[[Any], Any]]:
    """By a word for each, what makes the liar's reply of its honest one."""
    from nvflare.app_common.abstract.fl_model import ParamsType

    def param(make: Callable[[Any], Any], kind: Any = ParamsType.FULL) -> Any:
        def spoil(reply: Any) -> None:
            reply.params["weight"] = make(reply.params["weight"])
            reply.params_type = kind

        return spoil

    def put(attribute: str, value: Any) -> Any:
        return lambda reply: setattr(reply, attribute, value)

    def meta(value: Any) -> Any:
        return lambda reply: reply.meta.update(deltafl=value)

    def report(name: str, value: Any) -> Any:
        return lambda reply: reply.meta["deltafl"].update({name: value})

    def named(name: Any) -> Any:
        return lambda reply: reply.params.update({name: np.ones(3)})

    losses = ("beyond any float", "beyond any text", "nan", "infinite")
    return {
        **{f"array: {kind}": param(make) for kind, make in ARRAYS.items()},
        **{f"difference: {kind}": param(make, ParamsType.DIFF) for kind, make in ARRAYS.items()},
        **{f"params: {kind}": put("params", value) for kind, value in NUMBERS.items()},
        **{f"round: {kind}": report("round", value) for kind, value in NUMBERS.items()},
        **{f"meta: {kind}": meta(value) for kind, value in NUMBERS.items()},
        **{f"name {place}": named(name) for place, name in enumerate(NAMES)},
        **{f"loss: {kind}": put("metrics", {"loss": NUMBERS[kind]}) for kind in losses},
    }


def nvflare(
    monkeypatch: pytest.MonkeyPatch, rounds: list[Callable[[Any], Any]] | None, number: int
) -> Any:
    from .nvflare_sites import Controller

    class Raw(Controller):
        """Hands over what the liar has made, as no form of NVFlare's could hold it all."""

        def send_model(self, *, callback: Any = None, **given: Any) -> None:  # type: ignore[override]
            def spoilt(reply: Any) -> None:
                record = reply.meta["deltafl"]
                if reply.meta["client_name"] == f"site-{LIAR}" and "round" in record:
                    if rounds is None:
                        return
                    rounds[record["round"]](reply)
                callback(reply)

            super().send_model(callback=spoilt, **given)

    controller = Raw("uniform", n=M, num_rounds=number, seed=3)
    controller.join(monkeypatch, M).run()
    return controller


def test_nvflare_counts_a_liar_as_silent(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("nvflare")
    lies = nvflare_lies()
    liar = nvflare(monkeypatch, [*lies.values()], len(lies))
    for kind, info in zip(lies, liar.history, strict=True):
        assert [client for client, _ in info.rejected] == [LIAR], kind
        assert info.num_responded == M - 1
        assert visible([reason for _, reason in info.rejected]), kind
    assert visible([line for line in log.messages if line.startswith("\t")])
    silent = nvflare(monkeypatch, None, len(lies))
    assert np.array_equal(liar.federation.params_d, silent.federation.params_d)


@pytest.mark.parametrize("data", [b"junk", b"", b"\x81\xa1x" + bytes(9), *BYTES.values()])
def test_what_nvflare_cannot_read_ends_nothing(
    data: bytes, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """NVFlare's server reads what a site has uploaded, and where it cannot it ends the program."""
    pytest.importorskip("nvflare")
    from nvflare.apis.fl_constant import ServerCommandNames
    from nvflare.fuel.f3.cellnet.cell import Adapter
    from nvflare.fuel.f3.cellnet.defs import CellChannel
    from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey

    from deltafl.nvflare.controller import UnreadError

    from .nvflare_sites import Controller

    headers = {
        StreamHeaderKey.CHANNEL: CellChannel.SERVER_COMMAND,
        StreamHeaderKey.TOPIC: ServerCommandNames.SUBMIT_UPDATE,
        StreamHeaderKey.PAYLOAD_ENCODING: "fobs",
    }
    upload = SimpleNamespace(headers=headers, result=lambda: data)
    cell = SimpleNamespace(
        decode_pass_through_channels=(),
        decode_pass_through_topics=(),
        get_fobs_context=lambda props: props,
    )
    reader = Adapter(print, SimpleNamespace(fqcn="server.job"), cell)
    reader.logger.propagate = False
    ended = list[int]()
    monkeypatch.setattr("os._exit", ended.append)
    with ThreadPoolExecutor(1) as pool, suppress(Exception):
        pool.submit(reader.call, upload).result()
    assert ended == [1]  # as it is without the controller

    class Uploads(Controller):
        def send_model(self, **given: Any) -> None:  # type: ignore[override]
            with ThreadPoolExecutor(1) as uploads:
                assert isinstance(uploads.submit(reader.call, upload).exception(), UnreadError)
            super().send_model(**given)

    Uploads("uniform", n=M, num_rounds=2, seed=3).join(monkeypatch, M).run()
    assert ended == [1]
    assert "a reply that is no message counts as silence (" in log.text
    assert visible([line for line in log.messages if "no message" in line])


def test_numbers_of_a_site_never_end_a_round(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("nvflare")
    lies: list[Callable[[Any], Any]] = [
        *(
            lambda reply, value=value: setattr(reply, "metrics", value)
            for value in NUMBERS.values()
        ),
        *(
            lambda reply, value=value: setattr(
                reply, "metrics", {"loss": value, "a": value, ESCAPES: 1.0, 5: 2.0}
            )
            for value in NUMBERS.values()
        ),
        *(
            lambda reply, value=value: reply.meta["deltafl"].update(corrected=value, code=value)
            for value in NUMBERS.values()
        ),
    ]
    controller = nvflare(monkeypatch, lies, len(lies))
    assert len(controller.history) == len(lies)
    assert min(info.num_responded for info in controller.history) >= M - 1
    assert np.isfinite(controller.federation.params_d).all()
    assert visible([line for line in log.messages if line.startswith("\t")])


def test_printable_is_what_the_reasons_are() -> None:
    assert all(visible([printable(name)]) for name in [*NAMES, *NUMBERS.values()])
