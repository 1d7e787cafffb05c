"""The toy: three quadratics of two variables, at the point where plain averages of two of three go astray.

F_1 = x^2 + y^2, F_2 = 4 (x - 1/2)^2 + y^2 / 2, F_3 = 3 x^2 + 3/2 (y - 2)^2 at (1, 1). The gradients there are
(2, 2), (4, 1) and (6, -3); their mean, the ideal, is (4, 0). Source: DELTA, NeurIPS 2023, figures 3 and 5.
"""

from typing import TYPE_CHECKING

import numpy as np

from .base import Dataset, Task
from .models import require_torch

if TYPE_CHECKING:
    import torch

#: One client a row: a, p, b, q of F_i(x, y) = a (x - p)^2 + b (y - q)^2.
QUADRATICS = ((1.0, 0.0, 1.0, 0.0), (4.0, 0.5, 0.5, 0.0), (3.0, 0.0, 1.5, 2.0))
START = (1.0, 1.0)


def make_quadratic_model() -> "torch.nn.Module":
    """The model of the toy: parameters x and y; its output for rows (B, 4) of coefficients is F_i(x, y),
    (B,).

    Raises:
        MissingExtraError: Without PyTorch.
    """
    require_torch()
    from .modules import Quadratic

    return Quadratic(START)


def mean_output(output: "torch.Tensor", y: "torch.Tensor") -> "torch.Tensor":
    """The mean of the model's output, which is the loss itself; ``y`` is not used."""
    return output.mean()


def make_toy_task() -> Task:
    """The toy as a task: three clients with one row of coefficients each; the metric is f, the mean of the F_i."""
    row = np.array(QUADRATICS, np.float32)
    none = np.zeros(len(row), np.float32)
    return Task(
        name="toy",
        dataset=Dataset("toy", train_x=row, train_y=none, test_x=row, test_y=none, num_classes=0),
        client_rows=[np.array([client]) for client in range(len(row))],
        make_model=make_quadratic_model,
        loss=mean_output,
        metric="loss",
        input_scale=1.0,
        initial_params=np.array(START, np.float32),
    )
