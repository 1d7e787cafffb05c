"""The models of ``toy`` and ``synthetic``. Importing this file imports PyTorch, so those tasks import it late."""

import math

import torch


class Quadratic(torch.nn.Module):
    """F(x, y) = a (x - p)^2 + b (y - q)^2 with parameters x and y, for rows (B, 4) of a, p, b, q; output (B,)."""

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(start[0]))
        self.y = torch.nn.Parameter(torch.tensor(start[1]))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """F of each row."""
        a, p, b, q = row.unbind(-1)
        return a * (self.x - p).square() + b * (self.y - q).square()


class LogSquare(torch.nn.Module):
    """log(max(|A x - b|, band)^2 / 2) with parameters A and b, for x (B, 1); output (B,)."""

    def __init__(self, start: tuple[float, float], band: float) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(start[0]))
        self.b = torch.nn.Parameter(torch.tensor(start[1]))
        self.band = band

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction for each x."""
        distance = (self.a * x.squeeze(-1) - self.b).abs().clamp(min=self.band)
        return 2 * distance.log() - math.log(2)
