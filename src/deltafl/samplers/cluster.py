"""Clients in clusters by what they have sent, each with its share of the cohort: importance
sampling by clusters, the DELTA paper's baseline (after Shen et al. 2022), and FedSTaS (Slessor et
al. 2024), strata of compressed gradients.
"""

from collections.abc import Callable
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


def lloyd(
    value: FloatArray,
    centre: FloatArray,
    nearest: Callable[[FloatArray], IntArray],
) -> IntArray:
    """Lloyd's algorithm: the clusters 0, 1, ... of values, (m,) or (m, q), from these centres.

    ``nearest`` has the index of each value's nearest centre. Clusters that become empty are left
    out.
    """
    # It ends after a few steps; rounding must not make it run for ever.
    for _ in range(100):
        label_m = nearest(centre)
        moved = np.array([value[label_m == c].mean(axis=0) for c in np.unique(label_m)])
        if np.array_equal(moved, centre):
            break
        centre = moved
    return np.unique(label_m, return_inverse=True)[1]


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


class StrataState(NamedTuple):
    """The clients' last updates, compressed, and their lengths."""

    weight_m: FloatArray
    sketch_mq: FloatArray  # 0 until seen
    norm_m: KnownSizes  # NaN until seen


def k_means(point_kq: FloatArray, groups: int) -> IntArray:
    """At most ``groups`` clusters 0, 1, ... of points, (k,): Lloyd's algorithm.

    It starts from the point farthest from the mean of all, then from the one farthest from those
    chosen: the same points have the same clusters.
    """
    first = np.argmax(_squares(point_kq, point_kq.mean(axis=0)))
    centre = [point_kq[first]]
    far_k = _squares(point_kq, centre[0])
    # A point that equals one that is chosen would be an empty cluster.
    while len(centre) < groups and far_k.any():
        centre.append(point_kq[np.argmax(far_k)])
        far_k = np.minimum(far_k, _squares(point_kq, centre[-1]))
    return lloyd(
        point_kq,
        np.array(centre),
        lambda centre_hq: np.argmin([_squares(point_kq, c_q) for c_q in centre_hq], axis=0),
    )


def _squares(point_kq: FloatArray, centre_q: FloatArray) -> FloatArray:
    return np.asarray(((point_kq - centre_q) ** 2).sum(axis=1))


def _spread(point_kq: FloatArray) -> float:
    """S, the root of the mean square distance of points from their mean; 0 of none."""
    if len(point_kq) == 0:
        return 0.0
    square_k = _squares(point_kq, point_kq.mean(axis=0))
    return float(np.sqrt(square_k.mean()))


@dataclass(frozen=True)
class FedSTaS(Sampler):
    """Clusters clients by compressed updates and draws from each, most from the large and diverse.

    With H strata, stratum h of N_h clients whose compressed updates g_i have the standard deviation
    S_h, the root of the mean of norm(g_i - mean of the stratum)^2, a round of FedSTaS is

        n_h = n N_h S_h / sum_h' N_h' S_h'                              (Neyman's allocation);
        p_i = norm(g_i) / sum of norm(g_j) over the stratum, in each of the n_h draws;
        D   = sum_h (N_h / m) mean of u_i over the n_h clients.

    That D is unbiased only if all norms of a stratum are equal. Here draws are without replacement
    with exact pi_i, proportional to w_i norm(u_i) inside a stratum, and weights are w_i / pi_i; N_h
    is the sum of the weights in the stratum times m. The authors' program has the square of S_h, a
    variance, in place of it.

    There all clients send a compressed gradient in each round, the mean of each of a few
    groups of its entries. Here the last update that a client has sent counts, as a random sketch
    (``sketch.py``), and nobody works for a round without being selected. Also ours: clients not
    yet seen are a stratum of their own, with the S of all others and their mean norm; every stratum
    has one draw at least, as no stratum may be left out; k-means starts from points far apart, not
    from random ones, and entries are not standardized, which a sketch's need not be; the floor.
    Left out: clients train on a random part of their examples, the same share for all.

    Attributes:
        strata: H >= 1, that of the unseen included; at most n. The authors' programs have 5 (MNIST)
            and 10 (CIFAR-10) with n = 10; with H = n, all strata have one draw.
        sketch_size: q from 1 to 128, length of the sketch kept of each client's last update.
        design: A name in ``deltafl.DESIGNS``, used inside each stratum.
        floor: g in [0, 1], inside each stratum; with 0, a client whose last update is 0 is never
            selected again.

    Source: Slessor, Kong, Tang, Than and Kong, arXiv 2412.14226. We had its abstract, a summary of
    its formulas and the authors' programs (github.com/JaSlesso/fedstas), not its text.
    """

    strata: int = 5
    sketch_size: int = 64
    design: str = "systematic"
    floor: float = 0.1

    ranges: ClassVar = {"strata": "[1, inf)", "sketch_size": "[1, 128]", "floor": "[0, 1]"}
    row_fields = ("sketch_mq", "norm_m")
    fixed_fields = ("weight_m",)

    @property
    def unbiased(self) -> bool:
        return find_design(self.design).exact and self.floor > 0

    def init(self, population: Population) -> StrataState:
        m = population.num_clients
        return StrataState(
            population.weight_m,
            np.zeros((m, self.sketch_size)),
            np.full(m, np.nan),
        )

    def open(
        self,
        state: StrataState,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        present, size = present_clients(available_m, n)
        member_h, spread_h = self.stratify(state, present, min(self.strata, size))
        mass_h = [state.weight_m[member_k].sum() for member_k in member_h]
        quota_h = allocate(
            size,
            np.array([len(member_k) for member_k in member_h]),
            np.multiply(mass_h, spread_h),
        )
        score_m = state.weight_m * mean_for_unseen(state.norm_m, 1.0)
        draw = draw_by_scores(score_m, self.floor, self.design, rng)
        return draw_from_each(member_h, quota_h, draw)

    def stratify(
        self,
        state: StrataState,
        present: IntArray,
        most: int,
    ) -> tuple[list[IntArray], list[float]]:
        """The clients of each of at most ``most`` strata, and the S of each."""
        seen_k = np.isfinite(state.norm_m[present])
        seen = present[seen_k]
        unseen = present[~seen_k]
        sketch_sq = state.sketch_mq[seen]
        if most == 1 or len(seen) == 0:
            return [present], [_spread(sketch_sq)]
        member_h = []
        spread_h = []
        # Of clients that nobody has seen nothing is known: they vary as all others do.
        if len(unseen):
            member_h.append(unseen)
            spread_h.append(_spread(sketch_sq))
        label_s = k_means(sketch_sq, most - len(member_h))
        for stratum in range(label_s.max() + 1):
            is_in_s = label_s == stratum
            member_h.append(seen[is_in_s])
            spread_h.append(_spread(sketch_sq[is_in_s]))
        return member_h, spread_h

    def update(
        self,
        state: StrataState,
        cohort: Cohort,
        reports: Reports,
    ) -> StrataState:
        client_n, reports = replied(cohort, reports)
        return state._replace(
            sketch_mq=with_rows(state.sketch_mq, client_n, reports.sketch_nq),
            norm_m=with_rows(state.norm_m, client_n, np.sqrt(reports.squared_residual_n)),
        )
