"""The two tasks without data: the toy and the synthetic regression of DELTA, NeurIPS 2023.

Toy (figures 3 and 5): F_1 = x^2 + y^2, F_2 = 4 (x - 1/2)^2 + y^2 / 2, F_3 = 3 x^2 + 3/2 (y - 2)^2
at (1, 1), where the gradients are (2, 2), (4, 1) and (6, -3): their mean is (4, 0), and plain
averages of two of three go astray.

Synthetic (figures 4, 11, 12, 13): y = log((A x - b)^2 / 2) with theta = (A, b). Client i holds 1000
samples x ~ N(0, 1) with the true y and adds nu s_i N(0, I) to each gradient; s_i is lognormal with
mean 1 and coefficient of variation 0.5. The loss is the squared error. What the paper leaves open
is decided here: the logarithm is singular at A x = b, so samples with |A x - b| < 0.1 are redrawn,
and in that band the model's output is held at its value on the band's edge; the start is
``SYNTHETIC_START``.
"""

import math

import numpy as np

from ..errors import DeltaflError
from ..store.room import free_ram, human
from ..streams import stream
from ..types import FloatArray
from .base import Task
from .dataset import Dataset
from .losses import Module, Tensor, squared_error

#: One client a row: a, p, b, q of F_i(x, y) = a (x - p)^2 + b (y - q)^2.
QUADRATICS = ((1.0, 0.0, 1.0, 0.0), (4.0, 0.5, 0.5, 0.0), (3.0, 0.0, 1.5, 2.0))
TOY_START = (1.0, 1.0)

SAMPLES_PER_CLIENT = 1000
#: The RAM of a sample: x twice in float64 as they are joined, x and y in float32, the row's number.
BYTES_PER_SAMPLE = 32
BAND = 0.1
NOISE_VARIATION = 0.5
SYNTHETIC_START = (1.0, 0.0)


def make_quadratic_model() -> Module:
    """The model of the toy: parameters x and y; maps rows (B, 4) of coefficients to F_i(x, y),
    (B,).
    """
    from .modules import Quadratic

    return Quadratic(TOY_START)


def mean_output(output: Tensor, y: Tensor) -> Tensor:
    """The mean of the model's output, which is the loss itself; ``y`` is not used."""
    return output.mean()


def make_toy_task(seed: int = 0, num_clients: int = len(QUADRATICS)) -> Task:
    """The toy: three clients with one row of coefficients each, whatever the seed; the metric is
    the mean F_i.
    """
    if num_clients != len(QUADRATICS):
        raise DeltaflError(
            f"the toy has {len(QUADRATICS)} clients, got num_clients = {num_clients}: leave it out"
        )
    row = np.array(QUADRATICS, np.float32)
    zeros = np.zeros(len(row), np.float32)  # no targets: the output is the loss
    return Task(
        name="toy",
        dataset=Dataset("toy", row, zeros, row, zeros, num_classes=0),
        client_rows=[np.array([client]) for client in range(len(row))],
        make_model=make_quadratic_model,
        loss=mean_output,
        metric="loss",
        input_scale=1.0,
        initial_params=np.array(TOY_START, np.float32),
    )


def make_log_model() -> Module:
    """The model of the synthetic task: parameters A and b; maps x (B, 1) to log((A x - b)^2 /
    2), (B,).
    """
    from .modules import LogSquare

    return LogSquare(SYNTHETIC_START, BAND)


def draw_client(
    seed: int,
    client: int,
    truth: tuple[float, float],
) -> tuple[float, FloatArray]:
    """The noise factor s_i and the samples x (1000,) of one client, whatever the number of
    clients.
    """
    rng = stream(seed, "data", client=client)
    # A lognormal with this variance of its logarithm has the coefficient of variation, and with
    # minus half of it as the mean of its logarithm, the mean 1.
    log_variance = math.log(1 + NOISE_VARIATION**2)
    factor = float(rng.lognormal(-log_variance / 2, math.sqrt(log_variance)))
    x = rng.standard_normal(SAMPLES_PER_CLIENT)
    # Redrawn, for the logarithm is singular there.
    a, b = truth
    while (singular := np.abs(a * x - b) < BAND).any():
        x[singular] = rng.standard_normal(int(singular.sum()))
    return factor, x


def make_synthetic_task(
    seed: int,
    num_clients: int = 20,
    truth: tuple[float, float] = (8.0, 2.0),
    nu: float = 20.0,
) -> Task:
    """The synthetic task; its metric is the global loss on all samples, whose log10 the reports
    show.

    ``truth`` is (A, b) that makes the targets, ``nu`` the mean standard deviation of the noise on a
    gradient entry.

    Raises:
        DeltaflError: If a number is out of range.
    """
    if not (num_clients >= 1 and nu >= 0 and truth[0] != 0 and np.isfinite(truth).all()):
        raise DeltaflError(
            f"synthetic got {num_clients} clients, nu = {nu} and truth (A, b) = {truth}; it needs "
            "1 client or more, nu >= 0, and A and b finite, A not 0"
        )
    a, b = truth
    # Samples inside the band are redrawn, which would take for ever.
    # The probability of both tails of A x - b outside the band.
    kept = sum(math.erfc((BAND + side * b) / abs(a) / math.sqrt(2)) / 2 for side in (-1, 1))
    if kept < 0.01:
        raise DeltaflError(
            f"truth is {truth}: A x - b is nearly always within {BAND} of 0; write a larger A"
        )
    held = num_clients * SAMPLES_PER_CLIENT * BYTES_PER_SAMPLE
    free = free_ram()
    if free is not None and held > free:
        raise DeltaflError(
            f"{num_clients:,} synthetic clients take about {human(held)} of RAM and {human(free)} "
            "are free: lower 'clients'"
        )
    drawn = [draw_client(seed, client, truth) for client in range(num_clients)]
    x = np.concatenate([x for _, x in drawn])
    y = np.log(np.maximum(np.abs(a * x - b), BAND) ** 2 / 2).astype(np.float32)
    x_e1 = x.astype(np.float32)[:, np.newaxis]
    return Task(
        name="synthetic",
        # The metric is the global loss, so all examples are for the test, too.
        dataset=Dataset("synthetic", x_e1, y, x_e1, y, num_classes=0),
        client_rows=np.split(np.arange(len(x)), num_clients),
        make_model=make_log_model,
        loss=squared_error,
        metric="loss",
        input_scale=1.0,
        gradient_noise_m=nu * np.array([factor for factor, _ in drawn]),
        initial_params=np.array(SYNTHETIC_START, np.float32),
    )
