"""The Flower app as it is, through NVFlare's Flower integration: three sites on NVFlare's
simulator. Slow.

NVFlare 2.9 starts Flower's programs with options that Flower has dropped in 1.35, and speaks to
them by the gRPC adapter, which Flower has dropped in 1.40: hence an environment of its own with
Flower 1.39 and those options.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from deltafl import close_round, init_round, make_plan, open_round
from deltafl.simulation.engine import Engine
from deltafl.simulation.training.serial import LocalWork
from deltafl.store.sealed import read_sealed
from deltafl.tasks.registry import make_task

from .session import run_session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "nvflare" / "bin" / "python"
JOB = """
import sys
from nvflare.app_opt.flower.recipe import FlowerRecipe
from nvflare.recipe import SimEnv

# Busy machines lose no reply.
run_config = {"sampler": "innovation", "n": 2, "rounds": 5, "timeout": 600, "state-path": sys.argv[1]}
recipe = FlowerRecipe("app", min_clients=3, superlink_ready_timeout=60.0, run_config=run_config)
recipe.execute(SimEnv(num_clients=3, workspace_root=sys.argv[2]))
"""


@pytest.mark.skipif(
    not PYTHON.exists(), reason="Flower in NVFlare has an environment of its own: make nvflare"
)
def test_its_models_are_those_of_the_simulator(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples" / "flower_quickstart", tmp_path / "app", ignore=ignored)
    (tmp_path / "job.py").write_text(JOB)
    environment = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    state_path = tmp_path / "state"
    run_session(
        [str(PYTHON), "job.py", str(state_path), str(tmp_path / "workspace")], tmp_path, environment
    )
    tensors, header = read_sealed(state_path / "federation.safetensors", "")
    assert header["round"] == 5
    assert list(header["clients"]) == ["partition:0", "partition:1", "partition:2"]

    task = make_task("digits", seed=0, num_clients=3)
    engine = Engine(task, LocalWork(lr=0.05, epochs=2, batch_size=10), seed=0)
    plan = make_plan("innovation", task.population("data"), 2)
    state = init_round(plan, np.zeros(engine.num_params))
    for round in range(5):
        cohort = open_round(plan, state)
        training = engine.train(state.params_d, round, cohort.client_n)
        state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
    assert tensors["state.params_d"] == pytest.approx(state.params_d, rel=1e-4, abs=1e-6)
    assert np.linalg.norm(state.params_d) > 0.1
