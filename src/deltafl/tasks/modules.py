"""The models of ``toy``, ``synthetic`` and text, a block of ResNets, and what is done to any module
before clients train it. This file imports PyTorch: import it late.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ..errors import MissingExtraError

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("torch", "sim") from error

__all__ = [
    "LogSquare",
    "NextToken",
    "Quadratic",
    "ResidualBlock",
    "Tensor",
    "keep_frozen_statistics",
    "nn",
    "numbers_in",
    "spare_single_values",
    "take_step",
    "torch",
]


class Quadratic(nn.Module):
    """F(x, y) = a (x - p)^2 + b (y - q)^2 with parameters x and y, for rows (B, 4) of a, p, b,
    q; output (B,).
    """

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start[0]))
        self.y = nn.Parameter(torch.tensor(start[1]))

    def forward(self, row: Tensor) -> Tensor:
        """F of each row."""
        a, p, b, q = row.unbind(-1)
        return a * (self.x - p).square() + b * (self.y - q).square()


class LogSquare(nn.Module):
    """log(max(|A x - b|, band)^2 / 2) with parameters A and b, for x (B, 1); output (B,)."""

    def __init__(self, start: tuple[float, float], band: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(start[0]))
        self.b = nn.Parameter(torch.tensor(start[1]))
        self.band = band

    def forward(self, x: Tensor) -> Tensor:
        """The prediction for each x."""
        return self._predict(self.a, self.b, x)

    def forward_vectorized(
        self,
        params: Sequence[Tensor],
        x: Tensor,
    ) -> Tensor:
        """The predictions (n, B) of n models with parameters A and b, each (n,), for x (n, B,
        1).
        """
        a, b = params
        return self._predict(a[:, None], b[:, None], x)

    def _predict(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
    ) -> Tensor:
        # At 0 the logarithm is singular. Inside the band the output is flat, and has no gradient.
        distance = (a * x.squeeze(-1) - b).abs().clamp(min=self.band)
        return 2 * distance.log() - math.log(2)


class NextToken(nn.Module):
    """Which token follows: embedding, one layer of LSTM, a linear layer on its last state.

    Maps tokens int64 (B, length) to logits (B, tokens). On CPUs torch runs an LSTM in half the time
    of a GRU as wide.
    """

    def __init__(self, tokens: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, token: Tensor) -> Tensor:
        """The logits of the token after each row."""
        _, (last, _) = self.lstm(self.embedding(token))
        return self.head(last[0])  # type: ignore[no-any-return]

    def forward_vectorized(
        self,
        params: Sequence[Tensor],
        x: Tensor,
    ) -> Tensor:
        """The logits (n, tokens, B) of n models with parameters (n, ...), for tokens (n, B,
        length).

        Gates and states are written out, for ``torch.vmap`` does not know LSTMs; biases are added
        together as torch's.
        """
        # In the order in which torch lists them.
        table, weight_in, weight_on, bias_in, bias_on, head, head_bias = params
        clients, size, length = x.shape
        tokens = torch.arange(table.shape[1], device=x.device)
        is_token = x.reshape(clients, -1, 1) == tokens
        # A product, for the gradient of a look-up adds up in any order on a GPU.
        embedded = torch.bmm(is_token.to(table.dtype), table)
        bias = (bias_in + bias_on)[:, None]
        # What the tokens add to the gates, for all places at once: no state is needed for it.
        gates_in = torch.baddbmm(bias, embedded, weight_in.transpose(1, 2))
        gates_in = gates_in.view(clients, size, length, -1)
        weight_on = weight_on.transpose(1, 2).contiguous()
        state = cell = gates_in.new_zeros(clients, size, weight_on.shape[1])
        for gate in gates_in.unbind(2):
            gates = torch.baddbmm(gate, state, weight_on)
            # In this order torch keeps them in one matrix.
            enter, forget, new, leave = gates.chunk(4, dim=2)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
        return torch.baddbmm(head_bias[:, :, None], head, state.transpose(1, 2))


class ResidualBlock(nn.Module):
    """ReLU(shortcut(x) + two convolutions 3 x 3 of x), each with GroupNorm (He et al. 2016, Wu and
    He 2018).

    The shortcut is x itself, or a convolution 1 x 1 with GroupNorm where the shape changes. Maps
    (B, before, H, W) to (B, after, H / stride, W / stride).
    """

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        # Without biases, which the normalization after them takes away.
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(groups, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False),
                nn.GroupNorm(groups, after),
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's feature maps."""
        return torch.relu(self.inner(x) + self.shortcut(x))


def spare_single_values(model: nn.Module) -> None:
    """Let batch normalisation use its running statistics where a minibatch has one value of a
    channel, which has no variance: torch would raise an error.
    """
    spared = set[int]()

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # As many values as channels: the batch has one example, and that one place.
        if layer.training and inputs and inputs[0].numel() == inputs[0].shape[1]:
            spared.add(id(layer))
            layer.eval()

    def after(layer: nn.Module, *_: object) -> None:
        if id(layer) in spared:
            spared.remove(id(layer))
            layer.train()

    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.register_forward_pre_hook(before)
            part.register_forward_hook(after)


def numbers_in(output: Any) -> Tensor:
    """The numbers of what a model returns, as one vector: in training these may be several tensors,
    for a loss of the user's.
    """
    if isinstance(output, Tensor):
        return output.float().reshape(-1)
    parts: list[Any] = []
    if isinstance(output, Mapping):
        parts = [*output.values()]
    elif isinstance(output, list | tuple):
        parts = [*output]
    found = [part for part in map(numbers_in, parts) if part.numel() > 0]
    return torch.cat(found) if found else torch.zeros(1)


def take_step(model: nn.Module) -> None:
    """A step of a trial along the gradients, which it takes away."""
    for param in model.parameters():
        if param.grad is not None:
            param.data.sub_(param.grad.to_dense(), alpha=0.1)
            param.grad = None


def keep_frozen_statistics(model: nn.Module, frozen: Container[int]) -> None:
    """Let normalisation whose running statistics are frozen, by their ids, use them as they are:
    nobody collects what training would make of them.
    """
    for part in model.modules():
        is_norm = isinstance(part, nn.modules.batchnorm._NormBase)
        if is_norm and id(part.running_mean) in frozen:
            part.eval()
