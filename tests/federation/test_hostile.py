"""A federation that anyone may join: what clients tell and send is bounded."""

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, make_sampler
from deltafl.estimators.two_bits import encode
from deltafl.federation.clients import ClientInfo
from deltafl.federation.registration import read_info
from deltafl.federation.replies import ClientReply, read_reply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save
from deltafl.federation.service import Service
from deltafl.samplers.representatives import DivFL
from deltafl.samplers.table import SAMPLERS

from .tools import admit, federation, play, play_once, sizes_of

host_log = logging.getLogger("host").log


def test_one_client_neither_moves_the_model_nor_its_buffers(tmp_path: Path) -> None:
    model = {"x": np.zeros(3, np.float32), "running_mean": np.ones(1, np.float32)}
    settings: dict[str, Any] = {"n": 4, "clip": "median", "weights": "uniform"}
    fed = federation("innovation", model, m=6, **settings)

    def answer(client: int) -> ClientReply:
        step = 90 if client == 2 else 0.1  # updates that are 1000 times as long are refused
        return ClientReply({name: array + np.float32(step) for name, array in fed.arrays().items()})

    for _ in range(12):
        info = play_once(fed, answer)
        assert info.num_responded == 4
    admit(fed, {"client:9": 10})  # a newcomer's norm is not known
    assert np.isnan(np.asarray(fed.current.parts["clip"].norm_m)).tolist() == [False] * 6 + [True]
    play_once(fed, answer)
    assert 0 < fed.arrays()["x"].max() < 3
    assert fed.arrays()["running_mean"].max() < 3
    save(tmp_path, fed)
    assert load(tmp_path, federation("innovation", model, **settings))
    with pytest.raises(DeltaflError, match="saved with clip = median, now it is None"):
        load(tmp_path, federation("innovation", model, n=4, weights="uniform"))


def test_told_sizes_count_the_median_at_most() -> None:
    for fed in (federation("uniform", clip="median"), federation("uniform+clip=median")):
        assert fed.rules.max_ratio == 1
    admit(fed, {"client:0": 10, "client:1": 10, "client:2": 10, "client:3": 10_000})
    assert fed.plan.population.weight_m.tolist() == [1 / 4] * 4
    fed = federation("uniform", max_ratio=100.0)
    admit(fed, {"client:0": 10, "client:1": 10, "client:2": 10, "client:3": 10_000})
    assert fed.plan.population.num_examples_m.tolist() == [10, 10, 10, 1000]
    play(fed, 2)


def test_a_warning_names_who_told_more(caplog: pytest.LogCaptureFixture) -> None:
    rules = make_rules("uniform", clip="median")
    fed = Service(rules, {"x": np.zeros(3, np.float32)}, host_log)
    fed.let_in({f"client:{i}": ClientInfo(500 if i > 3 else 10 + i) for i in range(6)})
    assert "client:4, client:5 reported more than 3 times the 12 examples" in caplog.text


@pytest.mark.parametrize("clip", ["median", None])
def test_a_warning_names_who_told_a_cost_unlike_the_others(
    clip: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    rules = make_rules("uniform(per_cost=True)", clip=clip, costs=True)
    fed = Service(rules, {"x": np.zeros(3, np.float32)}, logging.getLogger("host").log)
    costs = [1.0, 2.0, 3.0, 90.0, 1e-3, 1e9]
    fed.let_in({f"client:{i}": ClientInfo(5, cost=cost) for i, cost in enumerate(costs)})
    named = "client:4, client:5 reported more than 100 times the cost" in caplog.text
    assert named == (clip is not None)


def test_a_code_without_the_rest_of_the_model_is_no_reply() -> None:
    model = {"x": np.zeros(3, np.float32), "steps": np.array(7)}
    fed = federation("uniform+first_round=code", model, m=4)

    def answer(client: int) -> ClientReply:
        arrays = {name: array for name, array in fed.arrays().items() if name != "x"}
        if client == 2:
            arrays = {}
        return ClientReply(arrays, code=encode(np.ones(3, np.float32)).tolist())

    info = play_once(fed, answer)
    assert info.num_responded == 3
    assert [client for client, reason in info.rejected if "'steps'" in reason] == [2]


def test_no_key_writes_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Not even one that came with a saved state."""
    caplog.set_level(logging.INFO, "host")
    key = "client:\x1b[2J\nall is well"
    service = Service(make_rules("uniform", n=1), {"x": np.zeros(3, np.float32)}, host_log)
    service.let_in({key: ClientInfo(10)})
    service.begin_round({key}, lambda *_: {})
    service.end_round({key: ClientReply({"x": np.full(3, np.nan, np.float32)})})
    service.begin_round({key}, lambda *_: {})
    service.end_round({})
    service.judged([key], {key: "\x1b[31mred"})
    assert "rejected" in caplog.text and "no result" in caplog.text and "counts most" in caplog.text
    assert not re.search(r"\x1b|^all is well", caplog.text, re.MULTILINE)


@pytest.mark.parametrize("label", ["fed-cbs", "fedentopt", "fedgs"])
def test_who_sends_no_shares_of_labels_does_not_register(label: str) -> None:
    """It would end the server, and again whenever it starts: no plan can be made with such."""
    rules = make_rules(label, n=2, aux=2)
    for aux in ([-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(DeltaflError, match="share of each label"):
            read_info({"num-examples": 5, "aux": aux}, rules)
        assert read_info({"num-examples": 5, "aux": aux}, make_rules("balanced", aux=2)).aux
    assert read_info({"num-examples": 5, "aux": [0.0, 2.0]}, rules).aux == (0.0, 2.0)


def test_more_clients_than_a_sampler_can_do_end_no_federation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DivFL, "most_clients", 5)
    with pytest.raises(DeltaflError, match="can do 5, not 6"):
        federation("divfl", m=6)
    fed = federation("divfl", m=5)
    play(fed, 1)
    admit(fed, sizes_of(7, start=5))
    assert fed.keys == [*sizes_of(5)]
    assert "client:5, client:6 cannot join: divfl" in fed.warnings[-1]
    # Those who are there may change.
    admit(fed, {"client:0": 99, **sizes_of(6, start=5)})
    assert fed.clients["client:0"].num_examples == 99
    play(fed, 1)


#: What two of seven clients report and send: sizes, auxiliary variables, numbers, entries.
SIZES = [1, 10, 2**40]
AUX = [0.0, 1.0, 1e9, 1e-300]
NUMBERS = [0.0, 1e308, -1e308, 5e-324, 1e18, np.nan, np.inf, -np.inf]
ENTRIES = [0.0, 1e-45, 1e15, 9e17, 1e19, 3e38, np.inf, np.nan]
#: Samplers of which a federation can take each, and settings that keep more.
LABELS = [
    *(name for name in SAMPLERS if not make_sampler(name).needs_oracle),
    "innovation+scaffold",
    "innovation+clip=median",
    "census+mime=0.7",
    "uniform+server_optimizer=adam",
    "uniform+relative_error=0.5",
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("label", LABELS)
def test_whatever_clients_say_a_server_goes_on_from_what_it_saved(
    label: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(len(label))
    model = {"x": np.zeros(12, np.float32), "a.running_mean": np.zeros(2, np.float32)}
    settings: dict[str, Any] = {"state_path": tmp_path, "seed": 3}
    fed = federation(label, model, **settings)

    def numbers(values: list[float], length: int) -> tuple[float, ...]:
        return tuple(rng.choice(values, length).tolist())

    def join(clients: range) -> None:
        infos = {}
        for client in clients:
            aux = (1.0, *numbers(AUX, fed.rules.aux - 1)) if fed.rules.aux else ()
            infos[f"client:{client}"] = ClientInfo(int(rng.choice(SIZES)), aux)
        fed.admit(infos)
        census = fed.plan.census
        if census is not None:
            length = census.length(fed.layout.num_params)
            far = [0.0, 1e18, -1e30, 1e-300]
            fed.answer({key: numbers(far, length) for key in fed.unanswered()})

    def answer(client: int) -> ClientReply | None:
        factor = fed.plan.step_factor
        arrays = {name: array + np.float32(0.1) for name, array in fed.arrays().items()}
        if client < 5:
            return ClientReply(arrays, loss=1.0, corrected=factor)
        with np.errstate(all="ignore"):
            lies = {name: array + np.float32(rng.choice(ENTRIES)) for name, array in arrays.items()}
        names = ("loss", "square-loss", "step-variance", "num-steps")
        metrics = dict(zip(names, numbers(NUMBERS, 4), strict=True))
        readers = {name: partial(lies.get, name) for name in lies}
        return read_reply(readers, metrics, {"corrected": factor})

    join(range(7))
    for number in range(4):
        play_once(fed, answer)
        assert np.isfinite(fed.params_d).all()
        save(tmp_path, fed)
        fed = federation(label, model, **settings)
        assert load(tmp_path, fed)
        if number == 1:
            join(range(5, 9))
