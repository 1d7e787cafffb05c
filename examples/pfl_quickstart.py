"""pfl with client sampling of deltafl: the digits on 50 users who have few labels each. Needs
deltafl[pfl,sim].
"""

import numpy as np
import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from sklearn.datasets import load_digits

from deltafl import make_plan
from deltafl.pfl import DeltaBackend

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 16, dtype=torch.float32)
y = torch.tensor(labels)
order = np.argsort(labels[:1500], kind="stable")  # sorted by label: a user has one or two
users = np.array_split(
    order, np.sort(np.random.default_rng(0).choice(np.arange(1, 1500), 49, replace=False))
)


class Net(torch.nn.Linear):
    """A model as pfl wants it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}


class Test(TrainingProcessCallback):  # type: ignore[misc]
    """Prints the accuracy on the examples that no user has."""

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        hits = model.pytorch_model(x[1500:]).argmax(dim=1) == y[1500:]
        print(f"round {central_iteration:2}  accuracy {hits.float().mean():.3f}")
        return False, Metrics()


net = Net(64, 10)
plan = make_plan("innovation@local-pivotal", [len(rows) for rows in users], n=10)
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=20,
        evaluation_frequency=1000,
        train_cohort_size=10,
        val_cohort_size=0,
    ),
    DeltaBackend(
        plan, lambda client: Dataset([x[users[client]], y[users[client]]])
    ),  # for SimulatedBackend
    PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
    NNTrainHyperParams(local_num_epochs=5, local_learning_rate=0.5, local_batch_size=None),
    callbacks=[Test()],
    send_metrics_to_platform=False,
)
