"""One job, everywhere the same models: a plain loop in PyTorch, our simulator, Flower, NVFlare and
pfl. Slow.

The job: softmax regression on the digits at 20 clients from zeros, 5 of them a round, 5 rounds,
four steps on all of a client's examples. Each host draws, trains and steps by itself; nothing but
the seed is shared.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from deltafl import Reports, close_round, init_round, make_plan, open_round
from deltafl.federation.local_work import LocalSteps
from deltafl.samplers.census import output_layer
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks.base import Task
from deltafl.tasks.registry import make_task
from deltafl.types import IntArray, Params
from flower.processes import Processes

from .session import run_session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLIENTS = 20
N = 5
ROUNDS = 5
LR = 0.5
EPOCHS = 4
EVERYTHING = 2000
ZERO = np.zeros(650, dtype=np.float32)
#: Folder, label -> the models after each round.
Host = Callable[[Path, str], list[Params]]
#: Local training: the model, the round, clients, drifts (n, d), step factor -> updates (n, d), and
#: what is reported.
Train = Callable[[Params, int, IntArray, Params, float], tuple[Params, Reports]]


@cache
def digits() -> Task:
    return make_task("digits", seed=0, num_clients=CLIENTS)


def loop(label: str, train: Train) -> list[Params]:
    """The loop of docs/how-to/your-loop.md, with a census if the sampler takes one."""
    plan = make_plan(label, digits().population("data"), N)
    census = plan.census
    factor = plan.step_factor
    if census is not None:
        first_md, _ = train(
            ZERO, 0, np.arange(CLIENTS), np.zeros((CLIENTS, 650), np.float32), factor
        )
        plan = plan.with_census(
            [census.answer(update_d, output_layer([(10, 64), (10,)])) for update_d in first_md]
        )
    state = init_round(plan, ZERO)
    models = [state.params_d] * state.round  # that of a census, which is the first round
    for round in range(state.round, ROUNDS):
        cohort = open_round(plan, state)
        drift = plan.drifts(state, cohort.client_n)
        shape = (len(cohort.client_n), 650)
        drift_nd = np.broadcast_to(ZERO if drift is None else drift, shape)
        update_nd, reports = train(state.params_d, round, cohort.client_n, drift_nd, factor)
        state, _ = close_round(plan, state, cohort, update_nd, reports)
        models.append(state.params_d)
    return models


def by_hand(
    params_d: Params, round: int, client_n: IntArray, drift_nd: Params, factor: float
) -> tuple[Params, Reports]:
    updates = []
    metrics = []
    for client, drift_d in zip(client_n, drift_nd, strict=True):
        task = digits()
        rows = digits().client_rows[client]
        x = torch.from_numpy(
            task.dataset.train_x[rows].reshape(len(rows), -1).astype(np.float32) * task.input_scale
        )
        y = torch.from_numpy(task.dataset.train_y[rows])
        model = torch.nn.Linear(64, 10)
        steps = LocalSteps(LR * factor)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(params_d.copy()), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR * factor)
        part_d = torch.from_numpy(drift_d / EPOCHS)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.float()), y)
            loss.backward()  # type: ignore[no-untyped-call]
            steps.add(loss.item(), [part.grad for part in model.parameters()])
            optimizer.step()
            here_d = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            torch.nn.utils.vector_to_parameters(here_d + part_d, model.parameters())
        updates.append(
            torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy() - params_d
        )
        metrics.append(steps.metrics())
    reports = Reports.make(
        len(metrics),
        loss=[each["loss"] for each in metrics],
        step_variance=[each["step-variance"] for each in metrics],
        num_steps=[each["num-steps"] for each in metrics],
    )
    return np.array(updates), reports


def simulator(folder: Path, label: str) -> list[Params]:
    factor = make_plan(label, digits().population("data"), N).step_factor
    engine = Engine(
        digits(),
        LocalWork(lr=LR, epochs=EPOCHS, batch_size=EVERYTHING, step_factor=factor),
        seed=0,
    )

    def train(
        params_d: Params, round: int, client_n: IntArray, drift_nd: Params, factor: float
    ) -> tuple[Params, Reports]:
        training = engine.train(params_d, round, client_n, drift_nd)
        return training.update_nd, training.reports

    return loop(label, train)


def flower(folder: Path, label: str) -> list[Params]:
    """Flower's simulation engine with ``examples/flower_quickstart``."""
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    processes = Processes(folder)
    try:
        processes.superlink("--simulation")
        resources = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=1"
        job = {"lr": LR, "epochs": EPOCHS, "batch_size": EVERYTHING, "min_nodes": CLIENTS}
        processes.run("--federation-config", resources, sampler=label, n=N, rounds=ROUNDS, **job)
        processes.wait_for("done", 240)
    finally:
        for name in reversed(list(processes.running)):
            processes.stop(name)
    return [processes.model(round + 1) for round in range(ROUNDS)]


#: A controller that writes the model of every round.
TRACED = """
import os
from pathlib import Path

import numpy as np

import deltafl.nvflare


class DeltaFedAvg(deltafl.nvflare.DeltaFedAvg):
    def save_model(self, model):
        super().save_model(model)
        flat = np.concatenate([model.params[name].ravel() for name in ("weight", "bias")])
        np.save(Path(os.environ["TRACE"], f"round-{model.current_round}.npy"), flat)
"""


def nvflare(folder: Path, label: str) -> list[Params]:
    """NVFlare's simulator with ``examples/nvflare_quickstart``."""
    pytest.importorskip("nvflare")
    app = folder / "app"
    shutil.copytree(
        ROOT / "examples" / "nvflare_quickstart", app, ignore=shutil.ignore_patterns("__pycache__")
    )
    (app / "traced.py").write_text(TRACED)
    for name, line, other in (
        ("job.py", "from deltafl.nvflare import DeltaFedAvg", "from traced import DeltaFedAvg"),
        # On a busy machine twenty sites may not start in the two minutes that they have to
        # register.
        ("job.py", "seed=given.seed)\n", "seed=given.seed, registration_timeout=500)\n"),
        ("client.py", "LR = 0.05\n", f"LR = {LR}\n"),
        ("client.py", "EPOCHS = 2\n", f"EPOCHS = {EPOCHS}\n"),
        ("client.py", "BATCH_SIZE = 10\n", f"BATCH_SIZE = {EVERYTHING}\n"),
    ):
        text = (app / name).read_text()
        assert line in text
        (app / name).write_text(text.replace(line, other))
    options = (
        f"--sampler {label} --n {N} --rounds {ROUNDS} --sites {CLIENTS} --workspace "
        f"{folder / 'workspace'}"
    )
    run_session([sys.executable, "job.py", *options.split()], app, {"TRACE": str(folder)})
    return [np.load(folder / f"round-{round}.npy") for round in range(ROUNDS)]


def pfl(folder: Path, label: str) -> list[Params]:
    """pfl, in the environment of its own that ``make pfl`` makes."""
    python = ROOT / ".peers" / "pfl" / "bin" / "python"
    if not python.exists():
        pytest.skip("pfl has an environment of its own: make pfl")
    code = (
        "import numpy, sys, test_pfl as t; numpy.save(sys.argv[2], "
        "t.run(t.plan_of(sys.argv[1]))[1].models)"
    )
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    run_session(
        [str(python), "-c", code, label, str(folder / "models.npy")], folder, {"PYTHONPATH": path}
    )
    return list(np.load(folder / "models.npy"))


LABELS = (
    "pracdelta",
    "census",
    "census+mime=0.7",
    "census+scaffold",
    "fedvarp+scaffold+first_round=exact",
    "fedvarp+first_round=exact",
)
#: In pfl clients take no corrections.
CORRECTED = ("mime", "scaffold")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("host", [simulator, flower, nvflare, pfl], ids=lambda host: host.__name__)
def test_the_models_are_those_of_a_plain_loop(
    host: Host, label: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if host is pfl and any(name in label for name in CORRECTED):
        pytest.skip("no corrected steps in pfl")
    expected = loop(label, by_hand)
    found = host(tmp_path, label)
    for round, (found_d, expected_d) in enumerate(zip(found, expected, strict=True)):
        assert found_d == pytest.approx(expected_d, rel=1e-4, abs=1e-6), round
    record_property("largest difference", float(np.abs(np.array(found) - expected).max()))
    assert np.linalg.norm(expected[-1] - expected[-2]) > 0.01
