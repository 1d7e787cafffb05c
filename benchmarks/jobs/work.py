"""What the jobs train: networks, data and local work; imported in the peers' environments, hence
torch alone.

The device is that of the environment variable DEVICE.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
TOKENS = 80


class TextbookNet(nn.Module):
    """The two-layer CNN in the order of the textbooks, 18,378 parameters; the pool comes after the
    ReLU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.linear = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (B, 10) of images (B, 1, 28, 28)."""
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return torch.as_tensor(self.linear(x.flatten(1)))


def pfl_net(dropout: bool) -> nn.Module:
    """The CNN of pfl's CIFAR-10 benchmark: 3 x 32 x 32 to 10, 1,626,442 parameters."""
    middle = [nn.Dropout(0.25)] if dropout else []
    last = [nn.Dropout(0.5)] if dropout else []
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), *last, nn.Linear(128, CLASSES)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), *middle, *head)


class Block(nn.Module):
    """Two convolutions and a shortcut, with GroupNorm."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(2, after) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(2, after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (B, after, H / stride, W / stride)."""
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64)]
    layers.append(nn.ReLU())
    for before, after, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(before, after, stride), Block(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class NextToken(nn.Module):
    """An LSTM that guesses the next token, as LEAF's for Shakespeare with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.lstm = nn.LSTM(8, 256, batch_first=True)
        self.head = nn.Linear(256, TOKENS)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Logits (B, tokens) of tokens (B, length)."""
        _, (last, _) = self.lstm(self.embedding(token))
        return torch.as_tensor(self.head(last[0]))


class Kind(NamedTuple):
    """A job: network, shape of an input, clients, examples of each, and their local work."""

    network: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    clients: int
    examples: int
    epochs: int
    batch_size: int
    lr: float


KINDS = {
    "cnn": Kind(TextbookNet, (1, 28, 28), 20, 200, 5, 32, 0.01),
    "pfl-cifar10": Kind(partial(pfl_net, True), (3, 32, 32), 50, 50, 1, 10, 0.1),
    "pfl-cifar10-no-dropout": Kind(partial(pfl_net, False), (3, 32, 32), 50, 50, 1, 10, 0.1),
    "resnet18": Kind(resnet18, (3, 32, 32), 20, 320, 1, 32, 0.01),
    "lstm": Kind(NextToken, (TOKENS,), 10, 320, 1, 32, 0.1),
}


class Given(NamedTuple):
    """A job with its data, (m, examples, ...) on the device."""

    name: str
    kind: Kind
    x: torch.Tensor
    y: torch.Tensor
    device: str

    def network(self) -> nn.Module:
        """A new one on the device."""
        return self.kind.network().to(self.device)

    def minibatches(self, client: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of one pass: a DataLoader's on a CPU, cut from the data on a GPU, which is faster
        there.
        """
        x = self.x[client]
        y = self.y[client]
        if self.device == "cpu":
            yield from DataLoader(TensorDataset(x, y), self.kind.batch_size, shuffle=True)
        else:
            order = torch.randperm(len(x), device=self.device)
            for rows in torch.split(order, self.kind.batch_size):
                yield x[rows], y[rows]

    def train(self, model: nn.Module, client: int) -> None:
        """The local work of a client as a plain loop."""
        optimizer = torch.optim.SGD(model.parameters(), lr=self.kind.lr)
        for _ in range(self.kind.epochs):
            for x, y in self.minibatches(client):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def read(path: str) -> Given:
    """The job in a file that ``peers.py`` wrote."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = np.load(path)
    device = os.environ.get("DEVICE", "cpu")
    x, y = (torch.from_numpy(job[part]).to(device) for part in ("x", "y"))
    name = str(job["name"])
    return Given(name, KINDS[name], x, y, device)


def mark(device: str) -> None:
    """Tell the parent that a round is over."""
    if device != "cpu":
        torch.cuda.synchronize()
    print("round", flush=True)
