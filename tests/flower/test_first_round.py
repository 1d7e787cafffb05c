"""A full first round in Flower and NVFlare: everybody is asked once, for a code of the update where
the client can make it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from deltafl.estimators.two_bits import KEPT, decode, encode
from deltafl.federation.exchange import Correction
from deltafl.flower.client import asked_in
from deltafl.flower.messages import to_record
from deltafl.model.vectors import flatten, update_of
from deltafl.types import FloatArray
from hosts.flower_nodes import app_with
from hosts.rounds import MODEL, moved

from .test_census import grid_of, played

pytest.importorskip("nvflare")

from nvflare.app_common.abstract.fl_model import FLModel

import deltafl.nvflare.client as client_module
from hosts.nvflare_sites import Site


def read(client: int) -> FloatArray:
    update_d = update_of(MODEL, moved(client, MODEL, Correction()))
    return np.asarray(decode(encode(update_d)[None], len(update_d))[0] / KEPT)


@pytest.mark.parametrize("kind", ["exact", "code"])
def test_everybody_is_asked_in_the_first_round_alone(kind: str) -> None:
    grid = grid_of(6)
    strategy, fed = played(f"fedvarp+first_round={kind}", grid, rounds=1)
    assert [info.num_selected for info in strategy.history] == [6]
    updates: list[Any] = [update_of(MODEL, moved(i, MODEL, Correction())) for i in range(6)]
    if kind == "code":
        updates = [read(i) for i in range(6)]
    weight_m = fed.plan.population.weight_m
    np.testing.assert_allclose(
        fed.params_d, flatten(MODEL) + weight_m @ np.array(updates), rtol=1e-5
    )
    strategy, fed = played(f"fedvarp+first_round={kind}", grid_of(6), rounds=3)
    assert [info.num_selected for info in strategy.history] == [6, 3, 3]


def test_a_code_takes_the_place_of_the_arrays() -> None:
    asked = ConfigRecord({"code": True, "trained": list(MODEL)})
    content = RecordDict({"arrays": to_record(MODEL), "config": ConfigRecord({}), "deltafl": asked})
    message = Message(content, 1, "train")
    reply = app_with()(message, Context(1, 1, {"number": 2}, RecordDict(), {}))
    (record,) = reply.content.array_records.values()
    assert [array.numpy().size for array in record.values()] == [0] * len(MODEL)
    code = asked_in(reply)["code"]
    assert code == encode(update_of(MODEL, moved(2, MODEL, Correction()))).tolist()


def test_a_site_sends_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(2)
    monkeypatch.setattr(
        client_module,
        "flare",
        SimpleNamespace(receive=lambda timeout: site.inbox.pop(), send=site.sent.append),
    )
    asked = {"code": True, "trained": list(MODEL)}
    answer = site.answer(FLModel(params=MODEL, meta={"deltafl": asked}))
    assert answer is not None
    assert [np.size(part) for part in answer.params.values()] == [0] * len(MODEL)
    sent = encode(update_of(MODEL, moved(2, MODEL, Correction()))).tolist()
    assert answer.meta["deltafl"]["code"] == sent
