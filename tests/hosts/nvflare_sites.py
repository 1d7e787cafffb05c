"""The clients of ``rounds.py`` as sites of NVFlare, without its processes."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from deltafl.model.arrays import Arrays
from deltafl.nvflare import DeltaClient, DeltaFedAvg
from deltafl.nvflare import client as client_module
from deltafl.nvflare import controller as controller_module

from .rounds import MODEL, Played, Work, label_of, settings_of, work

#: What a site does with a model instead of training: a reply, or None to fall silent.
Script = Callable[[FLModel], FLModel | None]


class Site:
    """A site's script around ``DeltaClient``, one loop a message."""

    def __init__(self, number: int, fault: str = "", work: Work = work) -> None:
        self.number = number
        self.fault = fault
        self.client = DeltaClient(10 + 5 * number, aux=label_of(number), cost=1.0 + number)
        self.inbox: list[FLModel] = []
        self.sent: list[FLModel] = []
        self.script: Script = self.train
        self.work = work

    def train(self, model: FLModel) -> FLModel | None:
        arrays = self.work(self.number, self.fault, model.params, self.client.take_correction)
        return None if arrays is None else FLModel(params=arrays, metrics={"loss": 1.0})

    def answer(self, message: FLModel) -> FLModel | None:
        """What comes back from one message; None for silence."""
        self.inbox.append(message)
        self.sent.clear()
        model = self.client.receive()
        if model is not None:
            reply = self.script(model)
            if reply is not None:
                self.client.send(reply)
        return self.sent[0] if self.sent else None


class Controller(DeltaFedAvg):
    """The controller with sites in this process; messages go through NVFlare's own form of them."""

    sites: dict[str, Site]

    def join(
        self,
        monkeypatch: pytest.MonkeyPatch,
        m: int,
        model: Arrays | None = None,
        fault: str = "",
        work: Work = work,
    ) -> "Controller":
        self.sites = {f"site-{i}": Site(i, fault, work) for i in range(m)}
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=name) for name in self.sites]
        )
        self.fl_ctx = FLContext()
        self.abort_signal = Signal()
        self.log_of = list[tuple[str, list[str]]]()
        self.saved = list[FLModel]()
        self.initial = MODEL if model is None else model
        self.at = self.sites["site-0"]
        self.num_cleaned = 0
        monkeypatch.setattr(client_module, "flare", self)
        # It takes a while where all that tests have imported is looked through.
        monkeypatch.setattr(controller_module, "cleanup_memory", self.clean)
        return self

    def clean(self) -> None:
        self.num_cleaned += 1

    def receive(self, timeout: float | None = None) -> FLModel | None:
        return self.at.inbox.pop() if self.at.inbox else None

    def send(self, reply: FLModel) -> None:
        self.at.sent.append(reply)

    def load_model(self) -> FLModel:
        return FLModel(params=dict(self.initial))

    def save_model(self, model: FLModel) -> None:
        self.saved.append(model)

    def event(self, event_type: str) -> None:
        pass

    def get_num_standing_tasks(self) -> int:
        return 0

    def send_model(
        self,
        task_name: str = "train",
        data: Any = None,
        targets: Any = None,
        min_responses: Any = None,
        timeout: int = 0,
        callback: Any = None,
    ) -> None:
        assert isinstance(timeout, int)  # NVFlare refuses others
        assert targets  # none means everybody
        for name in reversed(targets):
            self.at = self.sites[name]
            self.log_of.append((name, sorted(data.meta["deltafl"])))
            reply = self.at.answer(copy.deepcopy(through(data)))
            if reply is not None:
                reply = through(reply)
                reply.meta["client_name"] = name
                callback(reply)


def through(message: FLModel) -> FLModel:
    copied = FLModel(
        params=None if message.params is None else dict(message.params),
        params_type=message.params_type,
        metrics=message.metrics,
        current_round=message.current_round,
        meta=message.meta,
    )
    back: FLModel = FLModelUtils.from_shareable(FLModelUtils.to_shareable(copied))
    return back


def controlled(
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    m: int = 7,
    rounds: int = 5,
    prepare: Any = None,
    fault: str = "",
    model: Arrays = MODEL,
    work: Work = work,
    **settings: Any,
) -> Controller:
    controller = Controller(label, num_rounds=rounds, **{**settings_of(label), **settings})
    controller.join(monkeypatch, m, model, fault, work)
    if prepare is not None:
        prepare(controller.sites)
    controller.run()
    return controller


def play(
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    fault: str = "",
    m: int = 7,
    rounds: int = 5,
    state_path: Path | None = None,
    model: Arrays = MODEL,
    work: Work = work,
    **settings: Any,
) -> Played:
    path = None if state_path is None else str(state_path)
    more = {"state_path": path, "model": model, "work": work, **settings}
    controller = controlled(monkeypatch, label, m, rounds, fault=fault, **more)
    assert controller.federation is not None
    models = [
        np.concatenate([saved.params[name].ravel() for name in model]) for saved in controller.saved
    ]
    return Played(controller.federation, controller.history, models)
