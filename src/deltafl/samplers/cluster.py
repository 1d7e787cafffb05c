"""Cluster-based importance sampling, the DELTA paper's baseline (after Shen et al. 2022)."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.strata import allocate, draw_by_scores, draw_from_each
from ..designs.table import find_design
from ..errors import DeltaflError
from ..types import (
    BoolArray,
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    KnownSizes,
    Oracle,
    Population,
    Reports,
    Rng,
)
from .base import ZERO, Sampler, mean_for_unseen, present_clients, replied, with_rows
from .lloyd import lloyd


class ClusterState(NamedTuple):
    """What the server stores about each client."""

    weight_m: FloatArray
    norm_m: KnownSizes  # of its last update; NaN until seen
    rounds: Counts  # (), rounds with at least one reply


def cluster_by_value(value_m: FloatArray, k: int) -> IntArray:
    """Cut numbers into at most k clusters 0, 1, ...: Lloyd's algorithm from even quantiles."""
    return lloyd(
        value_m,
        # Equal quantiles would be empty clusters.
        np.unique(np.quantile(value_m, (np.arange(k) + 0.5) / k)),
        lambda centre_k: np.searchsorted((centre_k[1:] + centre_k[:-1]) / 2, value_m),
    )


@dataclass(frozen=True)
class ClusterIS(Sampler):
    """Clusters of clients by update norm, a share of the cohort for each by its size, scores w_i
    norm(u_i) inside.

    Attributes:
        clusters: Number of clusters k >= 1; fewer if the cohort or the number of distinct norms is
            smaller.
        design: A name in ``deltafl.DESIGNS``, used inside each cluster.
        floor: g in [0, 1], inside each cluster; with 0, a client whose last norm is 0 is never
            selected again.
        drop_small_after: Rounds, >= 1, after which the cluster of smallest norms is left out
            (**biased**), or None.
    """

    clusters: int = 5
    design: str = "systematic"
    floor: float = 0.1
    drop_small_after: int | None = None

    ranges: ClassVar = {
        "clusters": "[1, inf)",
        "floor": "[0, 1]",
        "drop_small_after": "[1, inf)",
    }
    row_fields = ("norm_m",)
    fixed_fields = ("weight_m",)
    kept_fields = ("rounds",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_small_after is not None and self.clusters < 2:
            raise DeltaflError(
                "drop_small_after needs clusters of at least 2, one of which is left out"
            )

    @property
    def unbiased(self) -> bool:
        # An oracle's norm of 0 is an update of 0 in this round, and nothing of it is missed.
        reaches_all = self.floor > 0 or self.needs_oracle
        return self.drop_small_after is None and find_design(self.design).exact and reaches_all

    def init(self, population: Population) -> ClusterState:
        norm_m = np.full(population.num_clients, np.nan)
        return ClusterState(population.weight_m, norm_m, ZERO)

    def open(
        self,
        state: ClusterState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        present, size = present_clients(available_m, n)
        norm_m = self.norms(state, oracle)
        label_k = cluster_by_value(norm_m[present], min(self.clusters, size))
        if self.drop_small_after is not None and state.rounds >= self.drop_small_after:
            kept_k = label_k > 0
            if np.count_nonzero(kept_k) >= size:  # the others are enough for the cohort
                present = present[kept_k]
                label_k = label_k[kept_k] - 1
        size_k = np.bincount(label_k)
        return draw_from_each(
            [present[label_k == cluster] for cluster in range(len(size_k))],
            allocate(size, size_k),
            draw_by_scores(state.weight_m * norm_m, self.floor, self.design, rng),
        )

    def norms(self, state: ClusterState, oracle: Oracle | None) -> FloatArray:
        """The norms last seen, float64 (m,), with their mean for clients never seen."""
        return mean_for_unseen(state.norm_m, 1.0)

    def update(
        self,
        state: ClusterState,
        cohort: Cohort,
        reports: Reports,
    ) -> ClusterState:
        client_n, reports = replied(cohort, reports)
        norm_m = with_rows(state.norm_m, client_n, np.sqrt(reports.squared_norm_n))
        # Rounds without replies teach nothing of norms, and do not count.
        rounds = np.asarray(state.rounds + (len(client_n) > 0))
        return state._replace(norm_m=norm_m, rounds=rounds)


@dataclass(frozen=True)
class ClusterISOracle(ClusterIS):
    """The theoretical form, with the norms of all clients in this round."""

    floor: float = 0.0

    needs_oracle = True

    @property
    def skips_zero_updates(self) -> bool:
        return self.floor == 0

    def norms(self, state: ClusterState, oracle: Oracle | None) -> FloatArray:
        return np.sqrt(self.require_oracle(oracle).reports().squared_norm_n)
