"""Clients of large loss: active federated learning (Goetz et al. 2019), Power-of-Choice (Cho, Wang
and Joshi 2022), and FedLECC (Jimenez-Gutierrez et al. 2026), in clusters by labels. Biased.
"""

from dataclasses import dataclass
from math import ceil
from typing import Annotated, ClassVar, NamedTuple, Self

import numpy as np

from ..errors import DeltaflError
from ..types import (
    BoolArray,
    Cohort,
    FloatArray,
    IntArray,
    Oracle,
    Population,
    Reports,
    Rng,
    Within,
)
from .base import (
    RunFacts,
    Sampler,
    Unweighted,
    WeightState,
    draw_by_logs,
    label_counts,
    mean_for_unseen,
    present_clients,
    replied,
    unweighted_cohort,
    with_rows,
)
from .ward import MOST_CLIENTS, ward


class ActiveState(NamedTuple):
    """What the server stores about each client."""

    size_m: IntArray  # number of examples
    # v_i; NaN if it never replied
    value_m: Annotated[FloatArray, Within("[-1e100, 1e100]", unknown=True)]


@dataclass(frozen=True)
class ActiveFL(Unweighted):
    """Drops clients of small value, draws most of a cohort by a softmax of values, the rest evenly.

    The value is v_i = sqrt(n_i) (mean loss of client i when last trained), with n_i its number of
    examples; a client never trained gets the mean of the others. Of the K available clients, the
    alpha1 K with the smallest values are dropped; (1 - alpha3) n are drawn one after the other
    without replacement, p_i proportional to exp(alpha2 v_i); the rest of the cohort is drawn
    uniformly from all that are left. alpha1 K is rounded down and alpha3 n to the nearest.

    Source: Goetz, Malik, Bui, Moon, Liu and Kumar 2019 (arXiv 1909.12641), algorithm 1; the
    defaults are its constants.

    Attributes:
        alpha1: Share of the available clients that is dropped, those with the smallest values.
        alpha2: How strongly larger values are preferred among the others; 0 for not at all.
        alpha3: Share of the cohort that is drawn uniformly.
    """

    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1

    needs_loss = True
    row_fields = ("value_m",)
    fixed_fields = ("size_m",)
    ranges: ClassVar = {"alpha1": "[0, 1]", "alpha2": "[0, inf)", "alpha3": "[0, 1]"}

    def init(self, population: Population) -> ActiveState:
        return ActiveState(
            population.num_examples_m,
            np.full(population.num_clients, np.nan),
        )

    def choose(
        self,
        state: ActiveState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        value_k = mean_for_unseen(state.value_m, 0.0)[present_k]
        dropped = int(self.alpha1 * len(present_k) + 1e-9)  # 0.29 * 100 is a little below 29
        log_weight_k = self.alpha2 * value_k
        # Stable: clients come in random order, which breaks ties.
        log_weight_k[np.argsort(value_k, kind="stable")[:dropped]] = -np.inf
        even = int(self.alpha3 * size + 0.5)
        by_value = min(size - even, len(present_k) - dropped)
        first = present_k[draw_by_logs(log_weight_k, by_value, rng)]
        rest = rng.permutation(present_k[~np.isin(present_k, first)])[: size - by_value]
        return np.concatenate([first, rest])

    def update(
        self,
        state: ActiveState,
        cohort: Cohort,
        reports: Reports,
    ) -> ActiveState:
        client_n, reports = replied(cohort, reports)
        value_n = np.sqrt(state.size_m[client_n]) * reports.loss_n
        return state._replace(value_m=with_rows(state.value_m, client_n, value_n))


@dataclass(frozen=True)
class PowerOfChoice(Sampler):
    """Selects, from d random candidates, the n with the largest loss of the current global model.

    Candidates are drawn one after the other without replacement, in proportion to their weights
    (their section 3).

    Attributes:
        candidates: d, at least n; 2 n if not given, the DELTA paper's choice.
    """

    candidates: int | None = None

    needs_oracle = True

    def for_run(self, facts: RunFacts) -> Self:
        self._wanted(facts.n)
        return self

    def _wanted(self, n: int) -> int:
        wanted = self.candidates
        if wanted is None:
            return 2 * n
        if wanted < n:
            raise DeltaflError(f"candidates is {wanted}; it must be at least the sample size {n}")
        return wanted

    def open(
        self,
        state: WeightState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        # In increasing order, so that equal losses are ordered alike whatever the draw's order was.
        candidate_k = np.sort(
            _candidates(
                state.weight_m,
                available_m,
                self._wanted(n),
                n,
                rng,
            )
        )
        # An unknown loss counts as infinite: the client is looked at.
        loss_k = np.nan_to_num(
            self.require_oracle(oracle).losses(candidate_k),
            nan=np.inf,
        )
        return unweighted_cohort(candidate_k[np.argsort(-loss_k, kind="stable")[:n]])


def _candidates(
    weight_m: FloatArray,
    available_m: BoolArray,
    wanted: int,
    least: int,
    rng: Rng,
) -> IntArray:
    """Successive draws by weight among those present; plain random ones if all weigh the same.

    Clients of weight 0 are candidates only if there would otherwise be fewer than ``least``.
    """
    present = np.flatnonzero(available_m & (weight_m > 0))
    weight_k = weight_m[present]
    chance_k = None
    # Plain draws take other random numbers than draws with equal chances.
    if len(np.unique(weight_k)) > 1:
        chance_k = weight_k / weight_k.sum()
    drawn_k = rng.choice(
        present,
        size=min(wanted, len(present)),
        replace=False,
        p=chance_k,
    )
    if len(drawn_k) >= least:
        return drawn_k
    weightless = np.flatnonzero(available_m & (weight_m <= 0))
    return np.concatenate(
        [
            drawn_k,
            rng.permutation(weightless)[: least - len(drawn_k)],
        ]
    )


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
