"""The job: python job.py. An ordinary job of NVFlare with DeltaFedAvg in the place of FedAvg."""

import argparse

from digits import SoftmaxRegression
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import Recipe

from deltafl.nvflare import DeltaFedAvg


def main() -> None:
    """Run the job on NVFlare's simulator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sampler", default="innovation")
    parser.add_argument("--n", type=int, default=5, help="sites selected per round")
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state", help="an absolute folder: the job can be stopped and started again"
    )
    parser.add_argument("--workspace", default="/tmp/nvflare/simulation")
    given = parser.parse_args()
    job = FedJob("digits", min_clients=given.sites)
    job.to_server(PTModel(SoftmaxRegression()))
    job.to_server(
        DeltaFedAvg(given.sampler, given.n, given.rounds, state_path=given.state, seed=given.seed)
    )
    job.to_clients(ScriptRunner("client.py", f"--num_sites {given.sites} --seed {given.seed}"))
    Recipe(job).execute(SimEnv(num_clients=given.sites, workspace_root=given.workspace))


if __name__ == "__main__":
    main()
