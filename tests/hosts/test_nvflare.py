"""What is NVFlare's own in DeltaFedAvg and DeltaClient; ``test_rounds.py`` has its rounds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.job_config.api import FedJob

from deltafl import DeltaflError, DifferentialPrivacy
from deltafl.federation.exchange import Correction, census_question
from deltafl.nvflare import DeltaFedAvg
from deltafl.nvflare import client as client_module
from deltafl.samplers.census import Census

from .nvflare_sites import Controller, Site, controlled
from .rounds import MODEL, moved


def test_clients_tell_their_size_once_and_only_the_cohort_is_sent_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = controlled(monkeypatch, "uniform", m=6, rounds=4)
    assert controller.log_of[:6] == [(f"site-{i}", ["aux", "round"]) for i in range(5, -1, -1)]
    assert [asked for _, asked in controller.log_of[6:]] == [["round"]] * 12
    assert controller.federation is not None
    assert [info.num_examples for info in controller.federation.clients.values()] == [
        10 + 5 * i for i in range(6)
    ]


def test_sites_tell_their_costs_to_a_server_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for costs, told in ((True, [1.0, 2.0, 3.0]), (False, [None] * 3)):
        controller = controlled(monkeypatch, "uniform", m=3, rounds=1, costs=costs)
        assert controller.federation is not None
        assert [info.cost for info in controller.federation.clients.values()] == told


def test_a_census_takes_no_parameters_from_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(2)
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
    assert answer.params is None
    assert answer.meta["deltafl"]["census"].startswith("the client's model lacks")


def test_the_momentum_is_sent_in_one_message_for_the_whole_cohort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cohort's messages would otherwise hold a second model each."""
    for label, expected in (("uniform+mime=0.5", 1), ("fedvarp+scaffold", 3), ("uniform", 1)):
        sizes: list[int] = []

        class Counting(Controller):
            def send_model(self, *args: Any, sizes: list[int] = sizes, **kwargs: Any) -> None:
                sizes.append(len(kwargs["targets"]))
                super().send_model(*args, **kwargs)

        Counting(label, 3, 2, seed=4).join(monkeypatch, 5).run()
        assert sizes == [5] + [3 // expected] * expected * 2


def test_memory_is_cleaned_after_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of 64 MB in each of 20 rounds made a server of NVFlare 400 MB larger."""
    assert controlled(monkeypatch, "uniform", m=4, rounds=5).num_cleaned == 5
    assert controlled(monkeypatch, "census", m=4, rounds=3).num_cleaned == 3


def test_a_reply_to_another_round_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that was too late in one round may send that model in the next."""

    def prepare(sites: dict[str, Site]) -> None:
        site = sites["site-0"]
        own = sites["site-0"].client

        def script(model: FLModel) -> FLModel | None:
            own._asked = {"round": own._asked["round"] - 1}
            return site.train(model)

        site.script = script

    controller = controlled(monkeypatch, "uniform", m=3, rounds=2, prepare=prepare)
    assert controller.federation is not None
    assert controller.federation.current.responded_m.tolist() == [0, 2, 2]
    assert "reply of site-0 rejected: the reply is to round 0" in caplog.text


def test_differences_give_the_models_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(sites: dict[str, Site]) -> None:
        for site in sites.values():

            def script(model: FLModel, site: Site = site) -> FLModel:
                params = {
                    name: array - model.params[name]
                    for name, array in moved(site.number, model.params, Correction()).items()
                }
                return FLModel(ParamsType.DIFF, params, metrics={"loss": 1.0})

            site.script = script

    for label in ("pracdelta", "census"):
        models = [controlled(monkeypatch, label, prepare=how).federation for how in (None, prepare)]
        assert models[0] is not None and models[1] is not None
        np.testing.assert_allclose(models[0].params_d, models[1].params_d, rtol=1e-5, atol=1e-6)


def test_a_client_that_does_not_register_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(sites: dict[str, Site]) -> None:
        sites["site-4"].client.aux = [1.0]

    controller = controlled(monkeypatch, "balanced", m=5, prepare=prepare)
    assert controller.log_of.count(("site-4", ["aux", "round"])) == 3
    assert controller.federation is not None
    assert controller.federation.keys == ["site-0", "site-1", "site-2", "site-3"]
    assert "site-4 did not register: the server wants 3 auxiliary variables" in caplog.text
    few = Controller("uniform", 3, min_clients=4).join(monkeypatch, 3)
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
        sites["site-2"] = Slow(1)

    controller = controlled(monkeypatch, "uniform", m=3, rounds=2, prepare=prepare)
    assert [info.num_responded for info in controller.history] == [3, 3]


def test_a_job_that_is_stopped_counts_nobody_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for label, what in (("uniform", "round"), ("census", "census"), ("uniform", "aux")):
        controller = Controller(label, 3, 5).join(monkeypatch, 5)

        class Stopping(Site):
            def answer(
                self, message: FLModel, what: str = what, signal: Signal = controller.abort_signal
            ) -> FLModel | None:
                if message.meta["deltafl"].get(what) is not None:
                    signal.trigger("stopped")
                    return None
                return super().answer(message)

        controller.sites = {name: Stopping(i) for i, name in enumerate(controller.sites)}
        controller.run()
        assert controller.history == []
        assert controller.federation is not None
        if what == "aux":
            assert controller.federation.state is None
        else:
            assert not np.asarray(controller.federation.current.selected_m).any()


def test_nobody_is_sent_anything_where_nobody_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = controlled(monkeypatch, "uniform@poisson", m=4, n=1, rounds=8)
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
        {
            "sampler": "uniform@poisson",
            "dp": dp,
            "seed": 2**62,
            "weights": "uniform",
            "min_clients": 9,
        },
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


def test_a_difference_of_another_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NumPy would add it to every row of what was sent."""

    def reply(number: int, params: Any) -> FLModel:
        change = {name: np.ones_like(array) for name, array in params.items()}
        if number == 1:
            change["weight"] = change["weight"][0]
        return FLModel(ParamsType.DIFF, change, metrics={"loss": 1.0})

    controller = replying(monkeypatch, reply)
    assert [info.num_responded for info in controller.history] == [2, 2]
    assert "site-1 rejected: array 'weight' has shape (2,), expected (3, 2)" in caplog.text


def test_an_identity_is_refused() -> None:
    with pytest.raises(DeltaflError, match="identity is always 'name' in NVFlare"):
        DeltaFedAvg(identity="config")
    with pytest.raises(DeltaflError, match="unknown setting 'min_nodes': did you mean"):
        DeltaFedAvg(min_nodes=3)


def test_what_the_host_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeltaflError, match="num_rounds is 0"):
        DeltaFedAvg(num_rounds=0)
    with pytest.raises(DeltaflError, match="timeout is 0; it must be a number of seconds"):
        DeltaFedAvg(timeout=0)
    with pytest.raises(
        DeltaflError, match=r"no initial model; add one, job.to_server\(PTModel\(model\)\)"
    ):
        Controller("uniform", 2).join(monkeypatch, 3, {}).run()


def replying(monkeypatch: pytest.MonkeyPatch, reply: Any, **settings: Any) -> Controller:
    """Two rounds in which each site sends what ``reply(number, params)`` makes."""

    def prepare(sites: dict[str, Site]) -> None:
        for site in sites.values():

            def script(model: FLModel, number: int = site.number) -> FLModel | None:
                answer: FLModel | None = reply(number, model.params)
                return answer

            site.script = script

    return controlled(monkeypatch, "uniform", 3, 2, prepare=prepare, **settings)


def test_metrics_of_sites_become_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes are 10, 15 and 20, and everybody replies."""
    caplog.set_level("INFO")

    def reply(number: int, params: Any) -> FLModel:
        metrics = {
            "loss": 1.0,
            "recall": np.array([number, 0.5]),
            "counts": [[number, 0], [0, 1]],
            "name": "x",
            "rejected": 99,
        }
        return FLModel(params=params, metrics=metrics)

    controller = replying(monkeypatch, reply)
    assert len(controller.metrics) == 2
    found = controller.metrics[-1]
    assert found["recall"] == pytest.approx([(15 + 2 * 20) / 45, 0.5])
    assert np.array(found["counts"]) == pytest.approx(np.array([[found["recall"][0], 0], [0, 1]]))
    assert "the weight 0: 'name' 3 of 3" in caplog.text
    assert (found["loss"], found["rejected"], found["responded"]) == (1.0, 0, 3)
    assert "name" not in found
    assert "metrics: {'" in caplog.text


def test_the_log_names_missing_and_extra_arrays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reply(number: int, params: Any) -> FLModel:
        if number == 1:
            del params["bias"]
            params["\x1b[2J" + 999 * "y"] = np.ones(2)
        return FLModel(params=params, metrics={"loss": 1.0})

    replying(monkeypatch, reply)
    lines = [message for message in caplog.messages if "rejected" in message]
    assert len(lines) == 2
    assert "reply of site-1 rejected: the reply lacks 'bias', and has '\\x1b[2Jyyy" in lines[0]
    assert "\x1b" not in lines[0]
    assert len(lines[0]) < 250


def test_differences_of_arrays_that_nobody_sent_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reply(number: int, params: Any) -> FLModel:
        assert params.keys() == MODEL.keys()
        change = {name: np.ones_like(array) for name, array in params.items()}
        change["base"] = np.ones(9, np.float32)
        return FLModel(ParamsType.DIFF, change, metrics={"loss": 1.0})

    base = {"base": np.full(9, 7, np.float32)}
    controller = replying(monkeypatch, reply, model={**MODEL, **base}, trainable=list(MODEL))
    assert [info.num_responded for info in controller.history] == [3, 3]
    model = controller.saved[-1].params
    assert model.keys() == {*MODEL, "base"}
    assert model["base"].tolist() == [7] * 9
    assert all(model[name] == pytest.approx(MODEL[name] + 2) for name in MODEL)
