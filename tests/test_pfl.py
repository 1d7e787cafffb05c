"""pfl as a host: its rounds are the simulator's, whatever pfl's own weights, workers and
interruptions.
"""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pfl", reason="pfl has an environment of its own: make pfl")

import torch
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.restore_training import RestoreTrainingCallback
from pfl.common_types import Population as UsersOf
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import MetricName, Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly

from deltafl import (
    DeltaflError,
    DifferentialPrivacy,
    Plan,
    Reports,
    Sgd,
    close_round,
    flatten,
    init_round,
    make_plan,
    open_round,
    unflatten,
)
from deltafl.pfl import DeltaBackend
from deltafl.samplers.census import output_layer
from deltafl.server.table import make_parts
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task
from deltafl.tasks.registry import make_task
from deltafl.types import Params

# pfl's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parent.parent
N = 5
ROUNDS = 5
EPOCHS = 4
LR = 0.5
WORK = LocalWork(LR, epochs=EPOCHS, batch_size=None)


@cache
def digits() -> Task:
    return make_task("digits", seed=0, num_clients=20)


def plan_of(label: str, n: int = N, **more: Any) -> Plan:
    return make_plan(label, digits().population("data"), n, **more)


def user(client: int) -> Dataset:
    task = digits()
    rows = digits().client_rows[client]
    x = task.dataset.train_x[rows].astype(np.float32).reshape(len(rows), -1) * np.float32(
        task.input_scale
    )
    return Dataset(
        [torch.from_numpy(x), torch.from_numpy(task.dataset.train_y[rows].astype(np.int64))]
    )


class Net(torch.nn.Linear):
    def loss(self, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        return {}


class Measured(FederatedAveraging):  # type: ignore[misc]
    """Local training that measures what pracdelta wants to know, from its definition."""

    def train_one_user(
        self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any
    ) -> Any:
        gradients = []
        losses = []

        def step(net: Any, optimizer: Any, batch: Any, *others: Any) -> None:
            optimizer.zero_grad()
            loss = net.loss(*batch)
            loss.backward()
            gradients.append(
                np.float64(flatten([p.grad for p in net.parameters() if p.grad is not None]))
            )
            losses.append(loss.item())
            optimizer.step()

        model.do_multiple_epochs_of(user_dataset, central_context.model_train_params, step)
        variance = LR**2 * float(np.var(gradients, axis=0).sum())
        numbers = {"loss": np.mean(losses), "step-variance": variance, "num-steps": len(losses)}
        return model.get_model_difference(initial_model_state), Metrics(list(numbers.items()))


class Keep(TrainingProcessCallback):  # type: ignore[misc]
    """Keeps model and metrics after each round."""

    def __init__(self) -> None:
        self.models: list[Params] = []
        self.logged: list[Metrics] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> Any:
        self.models.append(flatten(model.pytorch_model))
        self.logged.append(aggregate_metrics)
        return False, Metrics()


def run(
    plan: Plan,
    make_dataset_fn: Callable[[int], Dataset] = user,
    central_lr: float = 1.0,
    proximal: float = 0.0,
    folder: Path | None = None,
    cohort_size: int = 0,
    net: Any = None,
    **more: Any,
) -> tuple[DeltaBackend, Keep]:
    """Five rounds in pfl, of a linear model from 0 or of ``net``."""
    keep = Keep()
    backend = DeltaBackend(plan, make_dataset_fn, **more)
    if net is None:
        net = Net(64, 10)
        for part in net.parameters():
            torch.nn.init.zeros_(part)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=central_lr))
    algorithm = FedProx() if proximal else Measured()
    saving = []
    if folder is not None:
        saving = [RestoreTrainingCallback([algorithm, model, backend], str(folder))]
    params = partial(FedProxParams, mu=proximal) if proximal else NNAlgorithmParams
    algorithm.run(
        params(
            ROUNDS,
            evaluation_frequency=1000,
            train_cohort_size=cohort_size or plan.n,
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=None),
        callbacks=[keep, *saving],
    )
    return backend, keep


def simulated(plan: Plan, proximal: float = 0.0) -> list[Params]:
    """The same in the project's own simulator."""
    engine = Engine(digits(), replace(WORK, proximal=proximal), seed=0)
    models = []
    zero_d = np.zeros(engine.num_params, dtype=np.float32)
    if plan.census is not None:
        first = engine.train(zero_d, 0, np.arange(20)).update_nd
        plan = plan.with_census([plan.census.answer(update_d, (640, 10)) for update_d in first])
    state = init_round(plan, zero_d)
    models += [state.params_d] * state.round  # that of a census, which is the first round
    for round in range(state.round, ROUNDS):
        cohort = open_round(plan, state)
        training = engine.train(state.params_d, round, cohort.client_n)
        sent_nd = plan.as_sent(cohort, training.update_nd)
        state, _ = close_round(plan, state, cohort, sent_nd, training.reports)
        models.append(state.params_d)
    return models


def assert_same(found: list[Params], expected: list[Params]) -> None:
    for round, (found_d, expected_d) in enumerate(zip(found, expected, strict=True)):
        assert found_d == pytest.approx(expected_d, rel=1e-4, abs=1e-6), round


@pytest.mark.parametrize(
    "label",
    [
        "pracdelta",
        "innovation",
        "census",
        "oort",
        "fedvarp+first_round=exact",
        "fedvarp+first_round=code",
        "uniform@poisson@difference",
        "md@multinomial",
        "full",
    ],
)
def test_the_models_are_those_of_the_simulator(label: str) -> None:
    plan = plan_of(label, 20 if label == "full" else N)
    backend, keep = run(plan)
    assert_same(keep.models, simulated(plan))
    assert np.linalg.norm(keep.models[-1] - keep.models[-2]) > 0.01
    drawn = keep.logged[label == "census" :]
    assert len(backend.history) == len(drawn) == ROUNDS - (label == "census")
    sizes = [metrics["deltafl | selected"] for metrics in drawn]
    assert sizes == [info.num_selected for info in backend.history]
    assert keep.logged[-1]["deltafl | sum-of-weights"] == pytest.approx(
        backend.history[-1].sum_of_weights
    )


@pytest.mark.parametrize(
    "name", [str, StringMetricName, partial(MetricName, population=UsersOf.TRAIN)]
)
@pytest.mark.parametrize("value", [float, Weighted.from_unweighted, np.float32])
def test_metrics_are_those_of_localsteps_by_whatever_name_and_type(
    name: Callable[[str], Any], value: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by a MetricName was left out without a word, so that others were drawn."""

    pfls = Metrics

    def named(given: Sequence[tuple[str, float]] = ()) -> Metrics:
        return pfls([(name(own), value(number)) for own, number in given])

    plan = plan_of("pracdelta")
    expected = simulated(plan)
    monkeypatch.setattr(sys.modules[__name__], "Metrics", named)
    assert_same(run(plan)[1].models, expected)


class Tied(Net):
    """Two layers of one tensor, one before them that is frozen, and a counter."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.again = torch.nn.Linear(64, 10, bias=False)
        self.again.weight = self.weight
        self.base = torch.nn.Linear(64, 64).requires_grad_(False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Any) -> Any:
        self.calls.add_(1)
        return super().forward(self.base(x)) + self.again(x)


def test_tied_and_frozen_parameters_are_those_of_ones_own_loop() -> None:
    torch.manual_seed(0)
    net = Tied()
    own = copy.deepcopy(net)
    assert len(flatten(own)) == 650
    plan = plan_of("census")
    _, keep = run(plan, net=net)

    def trained(params_d: Params, client: int) -> Params:
        model = unflatten(params_d, own)
        x, y = user(client).raw_data
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            model.loss(x, y).backward()
            optimizer.step()
        return flatten(model) - params_d

    start_d = flatten(own)
    census = plan.census
    assert census is not None
    answers = [census.answer(trained(start_d, client), (640, 10)) for client in range(20)]
    plan = plan.with_census(answers)
    state = init_round(plan, start_d)
    models = [state.params_d]
    while state.round < ROUNDS:
        cohort = open_round(plan, state)
        updates = [trained(state.params_d, client) for client in cohort.client_n.tolist()]
        state, _ = close_round(plan, state, cohort, updates)
        models.append(state.params_d)
    for found_d, expected_d in zip(keep.models, models, strict=True):
        assert found_d == pytest.approx(expected_d, rel=1e-4, abs=1e-5)
    assert np.abs(models[-1] - start_d).max() > 0.1
    assert all(
        torch.equal(a, b) for a, b in zip(net.base.parameters(), own.base.parameters(), strict=True)
    )


class Normed(Net):
    """Batch normalisation before the layer; what it has learned is asked for in evaluation."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.norm: Any = torch.nn.BatchNorm1d(64)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1  # another tensor in its place
        return super().forward(self.norm(x))


def statistics(net: Any) -> dict[str, Any]:
    return {name: buffer.double().numpy() for name, buffer in net.named_buffers()}


class Watched(Measured):
    """Keeps the statistics that each round begins with."""

    begun: list[dict[str, Any]]

    def train_one_user(self, initial: Any, model: Any, *given: Any) -> Any:
        self.begun.append(copy.deepcopy(statistics(model.pytorch_model)))
        return super().train_one_user(initial, model, *given)


@pytest.mark.parametrize("label", ["uniform", "pracdelta", "census"])
def test_statistics_of_batch_normalisation_are_those_of_ones_own_loop(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "begun", [], raising=False)
    monkeypatch.setattr(sys.modules[__name__], "Measured", Watched)
    torch.manual_seed(0)
    net = Normed()
    begun = copy.deepcopy(net)
    plan = plan_of(label)
    _, keep = run(plan, net=net)

    def trained(params_d: Params, rest: Any, client: int) -> tuple[Params, Any, float, float]:
        model = unflatten(params_d, begun)
        model.load_state_dict({n: torch.tensor(v) for n, v in rest.items()}, strict=False)
        x, y = user(client).raw_data
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        losses, gradients = [], []
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            losses.append(loss.item())
            gradients.append(np.float64(flatten([p.grad for p in model.parameters()])))
            optimizer.step()
        variance = LR**2 * float(np.var(gradients, axis=0).sum())
        return flatten(model) - params_d, statistics(model), float(np.mean(losses)), variance

    start_d = flatten(begun)
    rest = statistics(begun)
    rests = []
    if plan.census is not None:
        rests += [rest] * 20
        layer = output_layer([part.shape for part in begun.parameters()])
        every = [trained(start_d, rest, client)[0] for client in range(20)]
        plan = plan.with_census([plan.census.answer(update_d, layer) for update_d in every])
    state = init_round(plan, start_d)
    models = [state.params_d] * state.round
    while state.round < ROUNDS:
        cohort = open_round(plan, state)
        made = [trained(state.params_d, rest, client) for client in cohort.client_n.tolist()]
        rests += [rest] * len(made)
        reports = Reports.make(
            len(made),
            loss=[loss for _, _, loss, _ in made],
            step_variance=[variance for _, _, _, variance in made],
            num_steps=[EPOCHS] * len(made),
        )
        # Without a control variate each reply counts as often as it was drawn, by 1 / probability.
        weight_n = plan.collect_replies(state, cohort, np.ones(len(made), bool)).coef_n
        state, _ = close_round(plan, state, cohort, [update_d for update_d, *_ in made], reports)
        models.append(state.params_d)
        rest = {
            name: np.average([own[name] for _, own, _, _ in made], axis=0, weights=weight_n)
            for name in rest
        }
    for found_d, expected_d in zip(keep.models, models, strict=True):
        assert found_d == pytest.approx(expected_d, rel=1e-4, abs=1e-5)
    for found, expected in zip([*Watched.begun, statistics(net)], [*rests, rest], strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    assert (
        net.norm.num_batches_tracked.item() == EPOCHS * len(rests[20 * (label == "census") :]) / N
    )
    assert np.abs(rest["norm.running_mean"]).max() > 0.1


def test_statistics_are_refused_with_privacy_and_faulty_ones_rejected() -> None:
    private = plan_of("uniform@poisson", dp=DifferentialPrivacy(1.0, 1.0, 1e-3), seed=2**60)
    with pytest.raises(DeltaflError, match=r"the mean of .* would get no noise"):
        run(private, net=Normed())
    faulty = 3

    class Broken(Normed):
        def loss(self, x: Any, y: Any) -> Any:
            loss = super().loss(x, y)
            if torch.equal(x, user(faulty).raw_data[0]):
                self.norm.running_var.data.fill_(-1)
            return loss

    net = Broken()
    backend, _ = run(plan_of("uniform", n=20), net=net, cohort_size=20)
    assert [info.num_responded for info in backend.history] == [19] * ROUNDS
    assert net.norm.running_var.min() > 0


def test_weights_that_do_not_sum_to_one_survive() -> None:
    plan = plan_of("uniform@poisson")
    backend, keep = run(plan)
    sums = [info.sum_of_weights for info in backend.history]
    assert min(sums) < 0.7
    assert max(sums) > 1.1
    assert_same(keep.models, simulated(plan))


def test_the_plans_privacy_is_that_of_the_simulator() -> None:
    """Up to noise, other in every call, which is too small here to be seen."""
    plan = plan_of(
        "uniform@poisson",
        dp=DifferentialPrivacy(clip=0.2, noise_multiplier=1e-7, delta=1e-5),
        seed=2**62,
    )
    _, keep = run(plan)
    assert (
        np.abs(keep.models[0] - simulated(replace(plan, parts=make_parts({"dp": None})))[0]).max()
        > 0.01
    )
    assert_same(keep.models, simulated(plan))


def test_pfls_own_weights_change_nothing() -> None:
    plan = plan_of("innovation")
    _, plain = run(plan)
    _, weighted = run(plan, postprocessors=[WeightByDatapoints()])
    assert_same(weighted.models, plain.models)


def test_postprocessors_see_users_before_their_updates_are_weighted() -> None:
    """Each update is clipped to length 0.01, and none of the estimate."""
    plan = plan_of("uniform")
    backend, keep = run(plan, postprocessors=[NormClippingOnly(order=2, clipping_bound=0.01)])
    assert backend.state is not None
    engine = Engine(digits(), WORK, seed=0)
    cohort = open_round(plan, init_round(plan, np.zeros(650)))
    update_nd = engine.train(np.zeros(650, dtype=np.float32), 0, cohort.client_n).update_nd
    norm_n = np.linalg.norm(update_nd, axis=1)
    assert norm_n.min() > 0.02
    coef_n = plan.population.weight_m[cohort.client_n] * 20 / N
    assert keep.models[0] == pytest.approx(0.01 * (coef_n / norm_n) @ update_nd, rel=1e-4, abs=1e-7)


def test_an_empty_cohort_moves_the_model_by_the_control_variate() -> None:
    """With one client a round by Poisson draws, exp(-1) of the rounds have none."""
    plan = plan_of("uniform@poisson@difference", n=1, seed=4)
    backend, keep = run(plan)
    empty = [info.round for info in backend.history if info.num_selected == 0]
    assert empty and max(empty) > 0
    assert_same(keep.models, simulated(plan))
    after = max(empty)
    assert np.linalg.norm(keep.models[after] - keep.models[after - 1]) > 1e-3


def test_other_algorithms_send_their_updates() -> None:
    plan = plan_of("innovation")
    _, keep = run(plan, proximal=0.7)
    assert_same(keep.models, simulated(plan, proximal=0.7))
    assert np.abs(keep.models[-1] - simulated(plan)[-1]).max() > 0.01


def test_the_central_optimizer_moves_the_model() -> None:
    """Half a step in pfl is half a step of the plan."""
    plan = plan_of("innovation")
    _, halved = run(plan, central_lr=0.5)
    expected = simulated(replace(plan, parts=make_parts({"server_optimizer": Sgd(lr=0.5)})))
    assert_same(halved.models, expected)


@pytest.mark.parametrize("label", ["innovation", "census"])
def test_a_run_that_was_killed_goes_on_as_it_would_have(label: str, tmp_path: Path) -> None:
    asked: list[int] = []

    def dying(client: int) -> Dataset:
        asked.append(client)
        if len(asked) == last:
            raise ConnectionResetError
        return user(client)

    _, whole = run(plan_of(label))
    last = (20 if label == "census" else N) + 2 * N + 3  # in the fourth round
    with pytest.raises(ConnectionResetError):
        run(plan_of(label), dying, folder=tmp_path)
    asked = []
    last = -1
    again, rest = run(plan_of(label), dying, folder=tmp_path)
    assert again.state is not None and again.state.round == ROUNDS
    np.testing.assert_array_equal(rest.models, whole.models[3:])
    assert len(asked) == 2 * N  # nobody answers the census twice


TWO = """
import sys
import numpy as np, torch
sys.path.insert(0, "tests")
import test_pfl as tests

backend, keep = tests.run(tests.plan_of("census"))
rank = torch.distributed.get_rank()
np.save(f"{sys.argv[1]}/{rank}.npy", keep.models)
np.save(f"{sys.argv[1]}/asked-{rank}.npy", [keep.logged[-1]["deltafl | responded"]])
"""


def test_two_processes_make_the_models_of_one(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "two.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, alone = run(plan_of("census"))
    for rank in (0, 1):
        np.testing.assert_array_equal(np.load(tmp_path / f"{rank}.npy"), alone.models)
        assert np.load(tmp_path / f"asked-{rank}.npy") == [N]


def test_what_pfls_users_do_not_do_is_refused_before_they_work() -> None:
    def refuse(
        match: str,
        label: str = "uniform",
        data: Any = user,
        plan: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        with pytest.raises(DeltaflError, match=match):
            DeltaBackend(plan_of(label, **(plan or {})), data, **more)

    refuse("delta needs every client's update", "delta")
    refuse("takes no drift", plan={"mime": 0.5})
    noise = GaussianMechanism(clipping_bound=1.0, relative_noise_stddev=1.0)
    refuse(
        "central noise is scaled for users who count 1 at most",
        postprocessors=[CentrallyAppliedPrivacyMechanism(noise)],
    )
    ahead = FederatedDataset(user, get_user_sampler("random", list(range(20))))
    refuse("a FederatedDataset, which draws users itself", data=ahead)


def test_another_cohort_size_is_refused() -> None:
    cure = "train_cohort_size is 4 and the plan has n = 5; write the same"
    with pytest.raises(DeltaflError, match=cure):
        run(plan_of("uniform"), cohort_size=4)


class TwoThings(Measured):
    """Sends something beside the update, as pfl's SCAFFOLD does."""

    def train_one_user(
        self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any
    ) -> Any:
        stats, metrics = super().train_one_user(
            initial_model_state, model, user_dataset, central_context
        )
        stats["c/weight"] = stats["weight"]
        return stats, metrics


def test_statistics_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Measured", TwoThings)
    with pytest.raises(
        DeltaflError, match="statistics that are not one update of the model's parameters"
    ):
        run(plan_of("uniform"))


#: What is done to the statistics, or reported, by one user in place of what is right. What cannot be
#: added up ends in pfl's own sums.
FAULTS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "NaN": lambda stats, _: stats.apply_elementwise(lambda x: x * np.nan),
    "infinite": lambda stats, _: stats.apply_elementwise(lambda x: x + np.inf),
    "huge": lambda stats, _: stats.apply_elementwise(lambda x: x + 1e30),
    "weight 0": lambda stats, _: setattr(stats, "weight", 0.0),
    "weight NaN": lambda stats, _: setattr(stats, "weight", np.nan),
    "loss NaN": lambda _, told: told.update(loss=np.nan),
    "loss array": lambda _, told: told.update(loss=np.ones(3)),
    "steps 0": lambda _, told: told.update({"num-steps": 0}),
    "variance -1": lambda _, told: told.update({"step-variance": -1.0}),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_user_is_one_that_does_not_answer(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(Measured):
        def train_one_user(self, initial: Any, model: Any, dataset: Any, *more: Any) -> Any:
            stats, metrics = super().train_one_user(initial, model, dataset, *more)
            told = {str(name): value for name, value in metrics}
            if torch.equal(dataset.raw_data[0], user(3).raw_data[0]):
                stats = FAULTS[fault](stats, told) or stats
            return stats, Metrics(list(told.items()))

    monkeypatch.setitem(globals(), "Measured", Faulty)
    backend, keep = run(plan_of("pracdelta", n=20))
    for info in backend.history:
        assert [reply.client for reply in info.rejected] == [3]
    assert all(np.isfinite(params_d).all() for params_d in keep.models)


def test_the_example_learns() -> None:
    source = ROOT / "examples" / "pfl_quickstart.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(source)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = [float(found) for found in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracy) == 20
    assert accuracy[0] < 0.6
    assert accuracy[-1] > 0.8
