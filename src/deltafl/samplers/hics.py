"""HiCS-FL (Chen and Vikalo, NeurIPS 2024): clusters by how balanced labels seem. Biased."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, IntArray, Rng
from .base import NewFirst, NewFirstState, RunFacts, draw_successively
from .ward import angles, ward

#: The paper's temperature over its learning rate, 0.0025 / 0.001: updates grow with the rate.
_TEMPERATURE_PER_RATE = 2.5
_CLASSES = 10


@dataclass(frozen=True)
class HicsFL(NewFirst):
    """Selects all clients once, then draws clusters by mean entropy, and their clients by weight.

    With cross-entropy, db_i, the last update of the output layer's bias, is on average proportional
    to the share of each label less a constant. The paper's equations (7), (9) and (10), for t >
    ceil(m / n), are

        H_i = entropy of softmax(db_i / T), large for balanced clients;
        distance(i, j) = arccos(cosine of db_i and db_j) + lambda |H_i - H_j|;
        M = n groups by Ward's method, each drawn with p proportional to exp(gamma_t mean H of the
        group), gamma_t = gamma_0 (1 - t / rounds), and a client of the group with p proportional to
        w_i.

    From the authors' code: Ward's method takes the rows of the distance matrix as points, and a
    zero update has the angle 0 to all. Ours: places not taken by new clients are filled from the
    others; clients that never replied come last. Needs a model that ends in the bias of a linear
    output layer, SciPy, and O(m^3) time a round: at most 5,000 clients.

    Attributes:
        classes: Number of classes C >= 2, the last entries of an update; None for the task's, or 10
            outside a run.
        temperature: T > 0, in units of updates; None for 2.5 times the local learning rate, as in
            the paper.
        entropy_weight: lambda >= 0.
        gamma: gamma_0 >= 0.
        rounds: Rounds, >= 1, after which gamma_t is 0; None for the run's, or a constant gamma
            outside a run.

    Source: Chen and Vikalo, NeurIPS 2024 (arXiv 2310.00198), algorithm 1 and appendix A.1.
    """

    classes: int | None = None
    temperature: float | None = None
    entropy_weight: float = 10.0
    gamma: float = 4.0
    rounds: int | None = None

    # A round takes a minute, and half a gigabyte.
    most_clients = 5000
    ranges: ClassVar = {
        "temperature": "(0, inf)",
        "entropy_weight": "[0, inf)",
        "gamma": "[0, inf)",
        "rounds": "[1, inf)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_bias_size < 2:
            raise DeltaflError(
                f"hics-fl looks at labels, but classes is {self.classes}; it must be at least 2"
            )

    @property
    def output_bias_size(self) -> int:
        if self.classes is None:
            return _CLASSES
        return self.classes

    def for_run(self, facts: RunFacts) -> Self:
        classes = self.classes
        if classes is None:
            classes = facts.num_classes
        temperature = self.temperature or _TEMPERATURE_PER_RATE * facts.local_lr
        rounds = self.rounds or facts.rounds
        return replace(self, classes=classes, temperature=temperature, rounds=rounds)

    def again(
        self,
        state: NewFirstState,
        seen_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        # In their own order: clusters must not depend on the random one.
        seen_k = np.sort(seen_k)
        if len(seen_k) == 0:
            return seen_k
        return seen_k[
            draw_successively(
                self.probabilities(state, seen_k, size),
                wanted,
                rng,
            )
        ]

    def probabilities(
        self,
        state: NewFirstState,
        client_k: IntArray,
        size: int,
    ) -> FloatArray:
        """P of each of some clients in one draw of group and client, float64 (k,), sum 1."""
        bias_kc = state.last_mq[client_k]
        temperature = self.temperature or _TEMPERATURE_PER_RATE * RunFacts().local_lr
        entropy_k = entropies(bias_kc, temperature)
        angle_kk = angles(bias_kc)
        # A zero update has no direction: as in the authors' code, it is near to all.
        zero_k = np.all(bias_kc == 0, axis=1)
        angle_kk[zero_k[:, None] | zero_k] = 0.0
        np.fill_diagonal(angle_kk, 0.0)
        distance_kk = angle_kk + self.entropy_weight * np.abs(entropy_k[:, None] - entropy_k)
        group_k = ward(distance_kk, min(size, len(client_k)))
        left = 1.0
        if self.rounds is not None:
            left = max(1 - (float(state.rounds) + 1) / self.rounds, 0.0)
        members_g = np.bincount(group_k)
        power_g = self.gamma * left * np.bincount(group_k, entropy_k) / members_g
        # About the largest power, so that none overflows.
        p_g = np.exp(power_g - power_g.max())
        weight_k = state.weight_m[client_k]
        mass_k = np.bincount(group_k, weight_k)[group_k]
        share_k = 1 / members_g[group_k]  # in a group of weight 0
        np.divide(weight_k, mass_k, out=share_k, where=mass_k > 0)
        return np.asarray((p_g / p_g.sum())[group_k] * share_k)


def entropies(bias_kc: FloatArray, temperature: float) -> FloatArray:
    """Entropy of softmax(row / T) in nats, float64 (k,), from 0 to ln C."""
    exponent_kc = bias_kc / temperature
    exponent_kc -= exponent_kc.max(axis=1, keepdims=True)
    share_kc = np.exp(exponent_kc)
    total_k = share_kc.sum(axis=1)
    # ln sum e^x - sum x e^x / sum e^x: no logarithm of a share that is 0.
    return np.asarray(np.log(total_k) - (share_kc * exponent_kc).sum(axis=1) / total_k)
