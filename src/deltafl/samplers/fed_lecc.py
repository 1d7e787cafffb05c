"""FedLECC (Jimenez-Gutierrez et al. 2026): clusters by labels, then clients by loss. Biased."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np

from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Rng
from .base import Sampler, label_counts, present_clients, unweighted_cohort
from .ward import MOST_CLIENTS, ward


class LeccState(NamedTuple):
    """The cluster of each client, int64 (m,), numbered from 0."""

    cluster_m: IntArray


@dataclass(frozen=True)
class FedLECC(Sampler):
    """Selects the clusters of largest mean loss, and in each the clients of largest loss.

    Before the first round, clients are clustered by the Hellinger distance of their label shares
    p_i,

        H(p, q)^2 = sum_c (sqrt(p_c) - sqrt(q_c))^2 / 2.

    In each round every available client reports its loss of the current model. Clusters are visited
    in the order of their mean loss, the largest first, and each gives its z = ceil(n / J) clients
    of largest loss, until there are n.

    Ours: the clustering, by Ward's method on the rows sqrt(p_i), whose distances are sqrt(2) H; if
    these clusters have too few clients, the next ones are visited, then the remaining clients in
    the same order; a loss of NaN counts as infinite; ties are broken at random; both defaults.
    Needs SciPy, and O(m^2) memory once: at most 20,000 clients.

    Source: Jimenez-Gutierrez, Giunta, Hassanzadeh, Anagnostopoulos, Chatzigiannakis and Vitaletti,
    arXiv 2603.08911.

    Attributes:
        clusters: The number of clusters, >= 1; None for the number of classes.
        visited: J >= 1, the number of clusters that a cohort comes from if they are large enough;
            None for all, which was better on digits than 2 or 5.
    """

    clusters: int | None = None
    visited: int | None = None

    uses_aux = uses_labels = True
    needs_oracle = True
    most_clients = MOST_CLIENTS
    ranges: ClassVar = {"clusters": "[1, inf)", "visited": "[1, inf)"}

    def init(self, population: Population) -> LeccState:
        count_mc = label_counts(population)
        root_mc = np.sqrt(count_mc / count_mc.sum(axis=1, keepdims=True))
        return LeccState(
            ward(
                root_mc,
                min(self.clusters or count_mc.shape[1], len(root_mc)),
            )
        )

    def open(
        self,
        state: LeccState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        present, size = present_clients(available_m, n)
        client_k = rng.permutation(present)  # breaks ties
        loss_k = np.nan_to_num(
            self.require_oracle(oracle).losses(client_k),
            nan=np.inf,
        )
        cluster_k = state.cluster_m[client_k]
        visited = self.visited or int(state.cluster_m.max()) + 1
        place_k = by_cluster(cluster_k, loss_k, first=ceil(size / visited))
        return unweighted_cohort(client_k[place_k[:size]])


def by_cluster(cluster_k: IntArray, loss_k: FloatArray, first: int) -> IntArray:
    """All places: the ``first`` largest losses of each cluster, by mean loss; then the others.

    Example:
        >>> loss_k = np.array([1.0, 3.0, 2.0, 4.0, 5.0])
        >>> by_cluster(np.array([0, 0, 0, 1, 1]), loss_k, first=1).tolist()
        [4, 1, 3, 2, 0]
    """
    # Of some clusters nobody may be available.
    members_g = np.maximum(np.bincount(cluster_k), 1)
    mean_g = np.bincount(cluster_k, loss_k) / members_g
    # The last key counts first: clusters by mean loss, then their clients by loss.
    place_k = np.lexsort((-loss_k, cluster_k, -mean_g[cluster_k]))
    begins_k = np.diff(cluster_k[place_k], prepend=-1) != 0
    rank_k = np.arange(len(place_k))
    # Its place within the cluster: places since the cluster began.
    rank_k -= np.maximum.accumulate(np.where(begins_k, rank_k, 0))
    # Stable: within both parts the order above stays.
    return place_k[np.argsort(rank_k >= first, kind="stable")]
