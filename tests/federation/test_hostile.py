"""A federation that anyone may join: what clients tell and send is bounded."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.estimators.two_bits import encode
from deltafl.federation.clients import ClientInfo
from deltafl.federation.replies import ClientReply
from deltafl.federation.rules import make_rules
from deltafl.federation.saved import load, save
from deltafl.federation.service import Service

from .tools import admit, federation, play, play_once

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
