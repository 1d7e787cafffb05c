"""DeltaFedAvg and DeltaClient without NVFlare's processes; ``test_same_answer.py`` starts them."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.job_config.api import FedJob

from deltafl import (
    DeltaflError,
    DifferentialPrivacy,
    Population,
    Reports,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.arrays import Arrays, split, update_of
from deltafl.federation.exchange import Correction, census_question
from deltafl.nvflare import DeltaClient, DeltaFedAvg
from deltafl.nvflare import client as client_module
from deltafl.samplers.census import Census, output_layer
from deltafl.types import Params

#: What a site does with a model instead of training: a reply, or None to fall silent.
Script = Callable[[FLModel], FLModel | None]
SHAPES = {"hidden": (2, 3), "weight": (3, 2), "bias": (2,)}
MODEL = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
AWAY = np.linspace(-1, 1, 14, dtype=np.float32)


def moved(site: int, sent: Arrays, correction: Correction | None = None) -> Arrays:
    """Half the way to the site's own target, so many times, and the drift."""
    correction = Correction() if correction is None else correction
    target_d = (site + 1) * np.roll(AWAY, site)
    parts = {
        "hidden": target_d[:6].reshape(2, 3),
        "weight": target_d[6:12].reshape(3, 2),
        "bias": target_d[12:],
    }
    half = np.float32(0.5 * correction.step_factor)
    return {
        name: array + half * (parts[name] - array) + correction.get(name, 0)
        for name, array in sent.items()
    }


class Site:
    """A site's script around ``DeltaClient``, one loop a message."""

    def __init__(self, number: int, aux: list[float]) -> None:
        self.number = number
        self.client = DeltaClient(num_examples=10 + 5 * number, aux=aux)
        self.inbox: list[FLModel] = []
        self.sent: list[FLModel] = []
        self.script: Script = self.train

    def train(self, model: FLModel) -> FLModel | None:
        return FLModel(
            params=moved(self.number, model.params, self.client.take_correction()),
            metrics={"loss": 1.0},
        )

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


class Played(DeltaFedAvg):
    """The controller with sites in this process; messages go through NVFlare's own form of them."""

    sites: dict[str, Site]

    def join(
        self, monkeypatch: pytest.MonkeyPatch, m: int, model: Arrays | None = None
    ) -> "Played":
        self.sites = {
            f"site-{i + 1}": Site(i, [float(i == label) for label in range(3)]) for i in range(m)
        }
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=name) for name in self.sites]
        )
        self.fl_ctx = FLContext()
        self.abort_signal = Signal()
        self.log_of = list[tuple[str, list[str]]]()
        self.saved = list[FLModel]()
        self.initial = MODEL if model is None else model
        self.at = self.sites["site-1"]
        monkeypatch.setattr(client_module, "flare", self)
        return self

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


def played(
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    m: int = 7,
    rounds: int = 5,
    prepare: Any = None,
    **settings: Any,
) -> Played:
    controller = Played(label, **{"n": 3, "seed": 4, **settings}, num_rounds=rounds).join(
        monkeypatch, m
    )
    if prepare is not None:
        prepare(controller.sites)
    controller.run()
    return controller


def params_of(controller: Played) -> Params:
    assert controller.federation is not None
    return controller.federation.params_d


@pytest.mark.parametrize(
    "label",
    [
        "pracdelta",
        "innovation@local-pivotal",
        "balanced",
        "census",
        "fedvarp+scaffold",
        "uniform+mime=0.5",
        "census+average=0.5+mime=0.7",
        "census+mime=0.5+scaffold",
    ],
)
def test_rounds_are_those_of_the_core_bit_for_bit(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = played(monkeypatch, label, aux=3 if label == "balanced" else 0)
    aux = np.eye(7, 3) if label == "balanced" else None
    plan = make_plan(
        label, Population.from_sizes([10 + 5 * i for i in range(7)], aux=aux), 3, seed=4
    )
    flat = {name: array.astype(np.float32) for name, array in MODEL.items()}
    if plan.census is not None:
        first = Correction(step_factor=plan.step_factor)
        tensors = output_layer([array.shape for array in flat.values()])
        all_moved = [moved(i, flat, first) for i in range(7)]
        plan = plan.with_census(
            [plan.census.answer(update_of(flat, arrays), tensors) for arrays in all_moved]
        )
    state = init_round(plan, np.zeros(14))
    largest = 0.0
    models = [
        np.concatenate([array.ravel() for array in saved.params.values()])
        for saved in controller.saved
    ]
    if plan.census is not None:  # the first round
        assert np.array_equal(models.pop(0), plan.model(state))
    for model_d, info in zip(models, controller.history, strict=True):
        cohort = open_round(plan, state)
        sent = split(state.params_d, SHAPES)
        drift = plan.drifts(state, cohort.client_n)
        updates = list[Params]()
        drift_nd = np.broadcast_to(np.float32(0) if drift is None else drift, (3, 14))
        for i, drift_d in zip(cohort.client_n.tolist(), drift_nd, strict=True):
            own = Correction(split(drift_d, SHAPES), plan.step_factor)
            updates.append(update_of(sent, moved(i, sent, own)))
        largest = max(largest, float(np.abs(drift_nd).max()))
        state, expected = close_round(plan, state, cohort, updates, Reports.make(3, loss=[1.0] * 3))
        assert info.sum_of_weights == expected.sum_of_weights
        assert np.array_equal(model_d, plan.model(state))
    assert params_of(controller).any()
    assert (largest > 0.05) == (plan.sends_drifts)


def test_clients_tell_their_size_once_and_only_the_cohort_is_sent_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = played(monkeypatch, "uniform", m=6, rounds=4)
    assert controller.log_of[:6] == [(f"site-{i}", ["aux", "round"]) for i in range(6, 0, -1)]
    assert [asked for _, asked in controller.log_of[6:]] == [["round"]] * 12
    assert controller.federation is not None
    assert [info.num_examples for info in controller.federation.clients.values()] == [
        10 + 5 * i for i in range(6)
    ]


def test_a_census_takes_no_parameters_from_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(2, [])
    asked = census_question(Census(size=16), list(MODEL), 1.0)
    monkeypatch.setattr(
        client_module,
        "flare",
        SimpleNamespace(receive=lambda timeout: site.inbox.pop(), send=site.sent.append),
    )
    answer = site.answer(FLModel(params=MODEL, meta={"deltafl": asked}))
    assert answer is not None
    assert (answer.params, answer.metrics) == (None, {})
    assert len(answer.meta["deltafl"]["census"]) == 17
    site.script = lambda model: FLModel(params={"other": np.ones(3)})
    answer = site.answer(FLModel(params=MODEL, meta={"deltafl": asked}))
    assert answer is not None
    assert answer.meta["deltafl"]["census"] == []


def uncorrected(model: FLModel) -> FLModel:
    return FLModel(params=moved(1, model.params), metrics={"loss": 1.0})


NOT_CORRECTED = "reply of site-2 rejected: the client did not correct its local steps"


@pytest.mark.parametrize(
    ("label", "script", "reason"),
    [
        ("uniform", lambda model: None, "no reply in time: site-2"),
        ("uniform", lambda model: FLModel(params={"weight": np.zeros((3, 2))}), "site-2 rejected"),
        (
            "uniform",
            lambda model: FLModel(params=dict.fromkeys(MODEL, object())),
            "site-2 rejected",
        ),
        ("uniform", lambda model: FLModel(metrics={}), "reply of site-2 rejected"),
        ("fedvarp+scaffold", uncorrected, NOT_CORRECTED),
        ("uniform+mime=0.5", uncorrected, NOT_CORRECTED),
    ],
)
def test_a_faulty_reply_is_non_response(
    label: str,
    script: Script,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def prepare(sites: dict[str, Site]) -> None:
        sites["site-2"].script = script

    controller = played(monkeypatch, label, m=4, n=4, rounds=3, prepare=prepare)
    assert controller.federation is not None
    assert controller.federation.current.responded_m.tolist() == [3, 0, 3, 3]
    assert reason in caplog.text


def test_a_census_with_momentum_refuses_who_takes_whole_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(sites: dict[str, Site]) -> None:
        sites["site-2"].script = uncorrected

    controller = played(monkeypatch, "census+mime=0.5", m=4, n=2, rounds=1, prepare=prepare)
    assert controller.federation is not None
    assert controller.federation.unanswered() == ["site-2"]
    assert "census: no answer from 1 clients: the client did not correct its" in caplog.text


def test_the_momentum_is_sent_in_one_message_for_the_whole_cohort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cohort's messages would otherwise hold a second model each."""
    for label, expected in (("uniform+mime=0.5", 1), ("fedvarp+scaffold", 3), ("uniform", 1)):
        sizes: list[int] = []

        class Counting(Played):
            def send_model(self, *args: Any, sizes: list[int] = sizes, **kwargs: Any) -> None:
                sizes.append(len(kwargs["targets"]))
                super().send_model(*args, **kwargs)

        Counting(label, 3, 2, seed=4).join(monkeypatch, 5).run()
        assert sizes == [5] + [3 // expected] * expected * 2


def test_a_reply_to_another_round_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that was too late in one round may send that model in the next."""

    def prepare(sites: dict[str, Site]) -> None:
        site = sites["site-1"]
        own = sites["site-1"].client

        def script(model: FLModel) -> FLModel | None:
            own._asked = {"round": own._asked["round"] - 1}
            return site.train(model)

        site.script = script

    controller = played(monkeypatch, "uniform", m=3, rounds=2, prepare=prepare)
    assert controller.federation is not None
    assert controller.federation.current.responded_m.tolist() == [0, 2, 2]
    assert "reply of site-1 rejected: the reply is to round 0" in caplog.text


def test_differences_give_the_models_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(sites: dict[str, Site]) -> None:
        for site in sites.values():

            def script(model: FLModel, site: Site = site) -> FLModel:
                params = {
                    name: array - model.params[name]
                    for name, array in moved(site.number, model.params).items()
                }
                return FLModel(ParamsType.DIFF, params, metrics={"loss": 1.0})

            site.script = script

    for label in ("pracdelta", "census"):
        models = [params_of(played(monkeypatch, label, prepare=how)) for how in (None, prepare)]
        np.testing.assert_allclose(models[0], models[1], rtol=1e-5, atol=1e-6)


def test_a_client_that_does_not_register_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(sites: dict[str, Site]) -> None:
        sites["site-4"].client.aux = [1.0]

    controller = played(monkeypatch, "balanced", m=5, aux=3, prepare=prepare)
    assert controller.log_of.count(("site-4", ["aux", "round"])) == 3
    assert controller.federation is not None
    assert controller.federation.keys == ["site-1", "site-2", "site-3", "site-5"]
    assert "site-4 did not register: the server wants 3 auxiliary variables" in caplog.text
    few = Played("uniform", 3, min_clients=4).join(monkeypatch, 3)
    with pytest.raises(DeltaflError, match="3 clients have registered, 4 are needed"):
        few.run()


def test_who_is_needed_and_slow_to_register_is_asked_again_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Site):
        def answer(self, message: FLModel) -> FLModel | None:
            self.asked = getattr(self, "asked", 0) + 1
            return super().answer(message) if self.asked > 2 else None

    def prepare(sites: dict[str, Site]) -> None:
        sites["site-2"] = Slow(1, [])

    controller = played(monkeypatch, "uniform", m=3, rounds=2, prepare=prepare)
    assert [info.num_responded for info in controller.history] == [3, 3]


@pytest.mark.parametrize("label", ["innovation", "census"])
def test_a_new_job_resumes_and_forgets(
    label: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    through_d = params_of(played(monkeypatch, label, rounds=5))
    played(monkeypatch, label, rounds=2, state_path=str(tmp_path))
    again = played(monkeypatch, label, rounds=5, state_path=str(tmp_path))
    assert len(again.history) == 3
    assert not [entry for entry in again.log_of if "census" in entry[1]]
    assert np.array_equal(params_of(again), through_d)
    done = played(monkeypatch, label, rounds=5, state_path=str(tmp_path))
    assert [model.current_round for model in done.saved] == [4]
    assert all(
        np.array_equal(part, again.saved[-1].params[name])
        for name, part in done.saved[0].params.items()
    )
    less = played(monkeypatch, label, rounds=6, state_path=str(tmp_path), forget=["site-1"])
    assert less.federation is not None
    assert "site-1" not in less.federation.keys


def test_a_job_that_is_stopped_counts_nobody_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for label, what in (("uniform", "round"), ("census", "census"), ("uniform", "aux")):
        controller = Played(label, 3, 5).join(monkeypatch, 5)

        class Stopping(Site):
            def answer(
                self, message: FLModel, what: str = what, signal: Signal = controller.abort_signal
            ) -> FLModel | None:
                if message.meta["deltafl"].get(what) is not None:
                    signal.trigger("stopped")
                    return None
                return super().answer(message)

        controller.sites = {name: Stopping(i, []) for i, name in enumerate(controller.sites)}
        controller.run()
        assert controller.history == []
        assert controller.federation is not None
        if what == "aux":
            assert controller.federation.state is None
        else:
            assert not np.asarray(controller.federation.current.selected_m).any()


def test_nobody_is_sent_anything_where_nobody_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = played(monkeypatch, "uniform@poisson", m=4, n=1, rounds=8)
    assert 0 in [info.num_selected for info in controller.history]
    assert len(controller.history) == 8


def settings_of(controller: DeltaFedAvg) -> list[Any]:
    rules = controller.rules
    plan = [rules.plan.sampler, rules.plan.n, rules.plan.parts]
    own = [controller.timeout, rules.forget, rules.buffers]
    return [
        *plan,
        *own,
        rules.min_clients,
        rules.weights,
        rules.aux,
        rules.max_ratio,
        rules.state_path,
    ]


def test_a_job_keeps_every_argument(tmp_path: Path) -> None:
    dp = DifferentialPrivacy(clip=1.0, noise_multiplier=1.5, delta=1e-5)
    changes: list[dict[str, Any]] = [
        {
            "server_optimizer": "adam",
            "clip": "median",
            "norm_guard": 3.0,
            "timeout": 2.5,
            "forget": ["site-9"],
            "aux": 4,
        },
        {"sampler": "uniform@poisson", "dp": dp, "weights": "uniform", "min_clients": 9},
    ]
    for change in changes:
        controller = DeltaFedAvg(**{"sampler": "uniform", "n": 4, "state_path": "/there", **change})
        job = FedJob("job", min_clients=4)
        job.to_server(controller)
        job.export_job(str(tmp_path))
        app = tmp_path / "job" / "app_server"
        assert not (app / "custom").exists()  # sites have deltafl; its source is no part of the job
        (workflow,) = json.loads((app / "config" / "config_fed_server.json").read_text())[
            "workflows"
        ]
        assert workflow["path"] == "deltafl.nvflare.controller.DeltaFedAvg"
        args = dict(workflow["args"])
        again = DeltaFedAvg(**args)
        assert settings_of(again) == settings_of(controller)


def test_what_the_host_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeltaflError, match="num_rounds is 0"):
        DeltaFedAvg(num_rounds=0)
    with pytest.raises(DeltaflError, match="timeout is 0; it must be a number of seconds"):
        DeltaFedAvg(timeout=0)
    with pytest.raises(
        DeltaflError, match=r"no initial model; add one, job.to_server\(PTModel\(model\)\)"
    ):
        Played("uniform", 2).join(monkeypatch, 3, {}).run()
