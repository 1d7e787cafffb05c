"""HiCS-FL (Chen and Vikalo, NeurIPS 2024): clusters by how balanced the clients' labels seem to be. Biased.

The update of the output layer's bias reflects a client's labels: with cross-entropy it is, on average, proportional
to the share of each label less a constant. The entropy of its softmax is large for balanced clients.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ..errors import DeltaflError, require
from ..types import FloatArray, IntArray, Reports
from .base import RunFacts
from .mifa import NewFirst
from .unweighted import History, draw_successively
from .urns import angles

#: The paper's temperature, which goes with a learning rate of 0.001; updates grow with the rate.
_TEMPERATURE, _TEMPERATURE_PER_RATE = 0.0025, 2.5
_CLASSES = 10


@dataclass(frozen=True)
class HicsFL(NewFirst):
    """Selects everyone once, then draws clusters by their mean entropy, and clients of a cluster by their weight.

    With db_i the last update of the output layer's bias, the paper's equations (7), (9) and (10) are

        H_i = entropy of softmax(db_i / T);
        distance(i, j) = arccos(cosine of db_i and db_j) + lambda |H_i - H_j|;
        M = n groups by Ward's method, each drawn with p proportional to exp(gamma_t mean H of the group),
        gamma_t = gamma_0 (1 - t / rounds), and a client of the group with p proportional to w_i,

    until there are n distinct clients. The replies are averaged evenly (``plain-mean``). In rounds t <= ceil(m / n)
    those never selected are drawn evenly. T is in units of updates: the paper has 0.0025 with a learning rate of 0.001.

    From the authors' code, where the paper is silent: Ward's method takes the rows of the matrix of distances as
    points, and a zero update has the angle 0 to all. Choices of ours: places that new clients leave free are drawn from
    the others; clients that never replied are in no group and are selected last. Not taken from the code, as the paper
    does not have it: clustered sampling where the entropies vary by more than 0.1, entropies and angles of the output
    layer's weights, even draws inside a group, and updates of the first visit with several alphas.

    Where the output layer saturates, db / T is small and all H_i are near ln C, so that the angles alone decide. On
    digits a smaller T does not help (docs/lab-notes.md).

    Needs a model whose last parameters are the bias of a linear output layer, and labels with cross-entropy; clustering
    costs O(m^3) time and O(m^2) memory a round.

    Attributes:
        classes: Number of classes C >= 2: how many of the last entries of an update are looked at; None for the task's.
        temperature: T > 0; None for 2.5 times the local learning rate.
        entropy_weight: lambda >= 0.
        gamma: gamma_0 >= 0.
        rounds: Rounds, >= 1, after which gamma_t is 0; None for the run's.

    Outside a run, None stands for 10 classes, the paper's temperature and a constant gamma.

    Raises:
        MissingExtraError: When it first clusters, without SciPy.

    Source: Chen and Vikalo, NeurIPS 2024 (arXiv 2310.00198), algorithm 1 and appendix A.1 (constants for FashionMNIST).
    """

    classes: int | None = None
    temperature: float | None = None
    entropy_weight: float = 10.0
    gamma: float = 4.0
    rounds: int | None = None

    ranges: ClassVar = {
        "temperature": "(0, inf)",
        "entropy_weight": "[0, inf)",
        "gamma": "[0, inf)",
        "rounds": "[1, inf)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_bias_size < 2:
            raise DeltaflError(f"hics-fl looks at labels, but classes is {self.classes}; it must be at least 2")

    @property
    def output_bias_size(self) -> int:
        """The number of classes."""
        return _CLASSES if self.classes is None else self.classes

    @property
    def value_size(self) -> int:
        """The last updates of the output layer's bias are remembered."""
        return self.output_bias_size

    def for_run(self, facts: RunFacts) -> Self:
        """Fill in the task's classes, a temperature that grows with the learning rate, and the run's rounds."""
        classes = self.classes if self.classes is not None else facts.num_classes
        temperature = self.temperature if self.temperature is not None else _TEMPERATURE_PER_RATE * facts.local_lr
        rounds = self.rounds if self.rounds is not None else facts.rounds
        return replace(self, classes=classes, temperature=temperature, rounds=rounds)

    def again(self, state: History, seen_k: IntArray, wanted: int, size: int, rng: np.random.Generator) -> IntArray:
        """Draw from the clusters."""
        seen_k = np.sort(seen_k)
        with np.errstate(divide="ignore"):
            log_p_k = np.log(self.probabilities(state, seen_k, size))
        return seen_k[draw_successively(log_p_k, wanted, rng)]

    def probabilities(self, state: History, client_k: IntArray, size: int) -> FloatArray:
        """P of each of some clients in one draw of group and client, float64 (k,), sum 1."""
        bias_kc = state.value_mq[client_k]
        entropy_k = entropies(bias_kc, _TEMPERATURE if self.temperature is None else self.temperature)
        angle_kk, zero_k = angles(bias_kc), np.all(bias_kc == 0, axis=1)
        angle_kk[zero_k[:, None] | zero_k | np.eye(len(bias_kc), dtype=np.bool_)] = 0.0
        distance_kk = angle_kk + self.entropy_weight * np.abs(entropy_k[:, None] - entropy_k)
        group_k = ward(distance_kk, min(size, len(client_k)))
        left = 1.0 if self.rounds is None else max(1 - (float(state.rounds) + 1) / self.rounds, 0.0)
        members_g = np.bincount(group_k)
        power_g = self.gamma * left * np.bincount(group_k, entropy_k) / members_g
        p_g = np.exp(power_g - power_g.max())
        weight_k = state.weight_m[client_k]
        mass_g = np.bincount(group_k, weight_k)
        share_k = np.where(mass_g[group_k] > 0, weight_k / np.where(mass_g > 0, mass_g, 1.0)[group_k], 0.0)
        share_k = np.where(mass_g[group_k] > 0, share_k, 1 / members_g[group_k])  # a group of weight 0: evenly
        p_k: FloatArray = (p_g / p_g.sum())[group_k] * share_k
        return p_k

    def values(self, state: History, client_n: IntArray, reports: Reports) -> FloatArray:
        """The updates of the bias."""
        return reports.output_bias_nk


def entropies(bias_kc: FloatArray, temperature: float) -> FloatArray:
    """Entropy of softmax(row / T) in nats, float64 (k,), from 0 to ln C."""
    exponent_kc = bias_kc / temperature
    exponent_kc -= exponent_kc.max(axis=1, keepdims=True)
    share_kc = np.exp(exponent_kc)
    total_k = share_kc.sum(axis=1)
    entropy_k: FloatArray = np.log(total_k) - (share_kc * exponent_kc).sum(axis=1) / total_k
    return entropy_k


def ward(row_kk: FloatArray, groups: int) -> IntArray:
    """At most ``groups`` groups of the rows, as points, by Ward's method; int64 (k,), numbered from 0."""
    if len(row_kk) == 1:
        return np.zeros(1, dtype=np.int64)
    require("scipy", "sim")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    label_k = fcluster(linkage(pdist(row_kk), "ward"), groups, criterion="maxclust")
    return np.unique(label_k, return_inverse=True)[1].astype(np.int64)
