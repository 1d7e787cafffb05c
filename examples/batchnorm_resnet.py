"""Rounds average a ResNet's batch normalisation: ``python examples/batchnorm_resnet.py``."""

from torch import Tensor, nn, relu

import deltafl
from deltafl.tasks import Task, make_task


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return relu(x + super().forward(x))  # type: ignore[no-untyped-call]


def resnet() -> nn.Module:
    block = Residual(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    return nn.Sequential(nn.Conv2d(1, 8, 3), block, head)


def digits(seed: int) -> Task:
    return make_task("digits", seed=seed, num_clients=20, make_model=resnet)


print(deltafl.compare(digits, ["full", "uniform"], sample=5, local_lr=0.3, rounds=20, seeds=1))
