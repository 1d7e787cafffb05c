"""A job in pfl, in pfl's own environment: pfl_job.py JOB.npz ROUNDS; prints a
line after each round.
"""

import os
import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import mark, read

GIVEN = read(sys.argv[1])


class Net(nn.Module):
    """A network with what pfl asks of a model."""

    def __init__(self):
        super().__init__()
        self.network = GIVEN.network()

    def forward(self, x):
        return self.network(x)

    def loss(self, x, y, eval=False):
        return torch.nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=False):
        return {"loss": Weighted(self.loss(x, y).item() * len(x), len(x))}


class Marks(TrainingProcessCallback):
    """Tells the parent when a round is over."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if os.environ.get("RANK", "0") == "0":
            mark(GIVEN.device)
        return False, Metrics()


def main() -> None:
    kind = GIVEN.kind
    users = range(len(GIVEN.x))
    data = FederatedDataset(
        lambda user: Dataset([GIVEN.x[user], GIVEN.y[user]], user_id=str(user)),
        get_user_sampler("minimize_reuse", list(users)),
    )
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    # pfl evaluates users in every evaluation round; the first is the warm-up, and there is no
    # other.
    params = NNAlgorithmParams(
        central_num_iterations=int(sys.argv[2]),
        evaluation_frequency=10_000,
        train_cohort_size=len(users),
        val_cohort_size=0,
    )
    FederatedAveraging().run(
        params,
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=kind.epochs,
            local_learning_rate=kind.lr,
            local_batch_size=kind.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Marks()],
    )


if __name__ == "__main__":
    main()
