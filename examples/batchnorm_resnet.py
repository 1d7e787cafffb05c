"""A ResNet whose batch normalisation trains on batches, and whose statistics the rounds average."""

from dataclasses import replace

from torch import Tensor, nn, relu

import deltafl
from deltafl.tasks import Task
from deltafl.tasks import make_task as known_task


class Block(nn.Sequential):
    """A residual block."""

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + super().forward(x))  # type: ignore[no-untyped-call]


def resnet() -> nn.Module:
    block = Block(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )


def make_task(seed: int) -> Task:
    return replace(known_task("digits", seed=seed, num_clients=20), make_model=resnet)


print(deltafl.compare(make_task, ["full", "uniform"], sample=5, rounds=10, seeds=1))
