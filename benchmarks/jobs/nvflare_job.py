"""The FashionMNIST job in NVFlare's simulator: nvflare_job.py JOB.npz ROUNDS; a line after each
round.

Each site has a process of its own: with fewer, the simulator starts one anew for every site in
every round.
"""

import sys
import tempfile

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import Recipe
from work import TextbookNet

CLIENTS = 20


class MarkedFedAvg(FedAvg):
    """Tells the parent when a round is over."""

    def save_model(self, model):
        print("round", flush=True)


def main() -> None:
    from nvflare_job import MarkedFedAvg  # by the name of the file, which NVFlare looks for

    job = FedJob("fashion", min_clients=CLIENTS)
    job.to_server(PTModel(TextbookNet()))
    job.to_server(MarkedFedAvg(num_clients=CLIENTS, num_rounds=int(sys.argv[2])))
    job.to_clients(ScriptRunner("nvflare_site.py", sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        Recipe(job).execute(SimEnv(num_clients=CLIENTS, workspace_root=folder))


if __name__ == "__main__":
    main()
