"""Clustered sampling (Fraboni, Vidal, Kameni and Lorenzi, ICML 2021): n urns of clients, and one
draw from each.

Urn k holds client i with probability r_ki: sum_i r_ki = 1, and sum_k r_ki = n w_i, so client i is
drawn n w_i times on average, as in ``md``, with a variance that is never larger; the coefficient
w_i count_i / expected_i is count_i / n. The cohort's kind is ``"replacement"``, whose estimate of
the variance is conservative here: its mean is too large by sum_k norm(mean of urn k - mean of
all)^2 / (n (n - 1)).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..designs.table import draw_cohort
from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Population, Reports, Rng
from .base import Sampler, State, present_clients, replied, with_rows
from .ward import MOST_CLIENTS, ward_tree

#: Probabilities that are 0 but for rounding.
_SLIVER = 1e-12


class TreeState(NamedTuple):
    """The clients' last updates, and their tree."""

    weight_m: FloatArray
    sketch_mq: FloatArray  # 0 until seen
    merge_k2: IntArray  # Ward's merges, (m - 1, 2)

    def is_consistent(self) -> bool:
        """Whether each client and each merge is merged once, and after it was made."""
        made_k1 = len(self.weight_m) + np.arange(len(self.merge_k2))[:, None]
        if np.any(self.merge_k2 >= made_k1):
            return False
        merged = np.sort(self.merge_k2, axis=None)
        return np.array_equal(merged, np.arange(len(merged)))


class Urn(NamedTuple):
    """Whom an urn holds, in increasing order, and each one's probability; the sum is 1."""

    client_k: IntArray
    share_k: FloatArray


def _lay(mass_k: FloatArray, begin_n: FloatArray, end_n: FloatArray) -> list[Urn]:
    """Lay the clients end to end: who lies between ``begin`` and ``end`` of each gap, and how much
    of each.
    """
    edge_k = np.concatenate([[0.0], np.cumsum(mass_k)])
    if len(end_n) and edge_k[-1] > 0:
        edge_k *= end_n[-1] / edge_k[-1]  # cumsum rounds
    gaps = []
    for begin, end in zip(begin_n, end_n, strict=True):
        # They follow on one another: a row of all clients for each gap would fill the memory.
        first = int(np.searchsorted(edge_k[1:], begin, side="right"))
        last = int(np.searchsorted(edge_k[:-1], end, side="left"))
        shared_k = np.minimum(edge_k[first + 1 : last + 1], end)
        shared_k -= np.maximum(edge_k[first:last], begin)
        there_k = np.flatnonzero(shared_k > _SLIVER)
        gaps.append(Urn(first + there_k, shared_k[there_k]))
    return gaps


def urns_by_size(weight_k: FloatArray, n: int) -> list[Urn]:
    """The urns of algorithm 1: shares r_ki sum to 1 in each, and to n w_i / sum w for each client.

    Example:
        >>> [urn.share_k.tolist() for urn in urns_by_size(np.array([0.75, 0.25]), 2)]
        [[1.0], [0.5, 0.5]]
    """
    order = np.argsort(-weight_k, kind="stable")
    mass_k = n * weight_k[order] / weight_k.sum()
    # Urn k is the gap from k to k + 1.
    begin_n = np.arange(n, dtype=np.float64)
    urns = []
    for place_k, share_k in _lay(mass_k, begin_n, begin_n + 1):
        client_k = order[place_k]
        rising_k = np.argsort(client_k)
        urns.append(Urn(client_k[rising_k], share_k[rising_k]))
    return urns


def urns_by_cluster(
    weight_m: FloatArray,
    n: int,
    merge_k2: IntArray,
) -> FloatArray:
    """The urns of algorithm 2, r, float64 (n, m): rows sum to 1, columns to n w_i / sum w.

    ``merge_k2``, (m - 1, 2), are the nodes that are merged one after the other into node m, m + 1,
    ...
    """
    m = len(weight_m)
    mass_m = n * weight_m / weight_m.sum()
    # n w_i that has rounded to just below a whole number is that number.
    whole_m = np.floor(mass_m + _SLIVER)
    rest_m = mass_m - whole_m
    rest_m[rest_m <= _SLIVER] = 0.0
    # Who is drawn at least once on average has urns of its own; the others share what is left.
    own_nm = np.repeat(np.eye(m), whole_m.astype(np.int64), axis=0)
    left = n - len(own_nm)
    cluster_m = cut_by_mass(rest_m, merge_k2)
    mass_c = np.bincount(cluster_m, weights=rest_m)
    order = np.argsort(mass_c, kind="stable")
    num_loose = len(order) - left
    loose = order[:num_loose]
    kept = order[num_loose:]
    # The heaviest clusters are urns, each filled as far as its mass goes.
    urn_nm = np.where(cluster_m == kept[:, None], rest_m, 0.0)
    # The clients of loose clusters, lightest cluster first, fill the gaps, lightest urn first.
    is_loose_m = np.isin(cluster_m, loose) & (rest_m > 0)
    filler = np.flatnonzero(is_loose_m)
    rank_c = np.argsort(order)
    rank_k = rank_c[cluster_m[filler]]
    filler = filler[np.argsort(rank_k, kind="stable")]
    gap_n = np.maximum(1 - urn_nm.sum(axis=1), 0.0)
    end_n = np.cumsum(gap_n)
    for urn_m, (place_k, share_k) in zip(
        urn_nm,
        _lay(rest_m[filler], end_n - gap_n, end_n),
        strict=True,
    ):
        urn_m[filler[place_k]] += share_k
    return np.concatenate([own_nm, urn_nm])


def cut_by_mass(mass_m: FloatArray, merge_k2: IntArray) -> IntArray:
    """The clients' clusters 0, 1, ..., int64 (m,): the largest of a tree of mass at most 1."""
    m = len(mass_m)
    mass = np.concatenate([mass_m, np.zeros(len(merge_k2))])
    for k, (left, right) in enumerate(merge_k2):
        mass[m + k] = mass[left] + mass[right]
    label = np.arange(len(mass))
    # From the root down: a node that fits is the cluster of all clients below it.
    for k in reversed(range(len(merge_k2))):
        if mass[m + k] <= 1 + _SLIVER:
            label[merge_k2[k]] = label[m + k]
    return np.unique(label[:m], return_inverse=True)[1]


@dataclass(frozen=True)
class ClusteredBySize(Sampler):
    """Algorithm 1: fill urn after urn with clients by decreasing weight, excess into the next."""

    unbiased = True

    def open(
        self,
        state: State,
        available_m: BoolArray,
        n: int,
        rng: Rng,
        oracle: Oracle | None = None,
    ) -> Cohort:
        _, size = present_clients(available_m, n)
        weight_m = np.where(available_m, state.weight_m, 0.0)
        if weight_m.sum() <= 0:
            raise DeltaflError(
                "clustered sampling draws by weight, and those available have weight 0; use "
                "'uniform'"
            )
        expected_m = np.zeros(len(weight_m))
        drawn = []
        for client_k, share_k in self.urns(state, weight_m, available_m, size):
            # Only members: what rounding leaves of 1 goes to the last client of a multinomial draw,
            # who might not be one. By ``draw_cohort``, so that ``exact.every_cohort`` can enumerate
            # the draws.
            draw = draw_cohort(share_k, 1, "multinomial", rng)
            drawn.append(client_k[draw.client_n])
            expected_m[client_k] += share_k
        client_n, count_n = np.unique(np.concatenate(drawn), return_counts=True)
        return Cohort(client_n, count_n, expected_m[client_n], "replacement")

    def urns(
        self,
        state: State,
        weight_m: FloatArray,
        available_m: BoolArray,
        n: int,
    ) -> list[Urn]:
        """The n urns; unavailable clients have weight 0."""
        present = np.flatnonzero(available_m)
        urns = urns_by_size(weight_m[present], n)
        return [urn._replace(client_k=present[urn.client_k]) for urn in urns]


@dataclass(frozen=True)
class ClusteredBySimilarity(ClusteredBySize):
    """Algorithm 2: similar clients share an urn; similar is a small angle between two updates.

    Ward's tree of the last updates seen is cut into the largest clusters of mass sum n w_i <= 1.
    The n heaviest become urns, and the clients of the others fill them up, starting with the
    lightest cluster and the lightest urn. Ours: the update of a client never seen is zero, at an
    angle of 0 to other zeros and at a right angle to the rest; updates are sketches (``sketch.py``)
    of u_i - c_i; Ward's criterion is applied to the angles; a client with n w_i >= 1 first gets
    floor(n w_i) urns of its own; clients that fill urns come in the order of their indices. Left
    out: distances in place of angles.

    A round takes 8 m^2 bytes and O(m^2 q) time: at most 20,000 clients.

    Attributes:
        sketch_size: q from 1 to 128, length of the sketch kept of each client's last update.
    """

    sketch_size: int = 64

    most_clients = MOST_CLIENTS
    ranges: ClassVar = {"sketch_size": "[1, 128]"}
    kept_fields = ("sketch_mq", "merge_k2")
    fixed_fields = ("weight_m",)

    def init(self, population: Population) -> TreeState:
        """No client has been seen: all updates are zero. Needs SciPy."""
        sketch_mq = np.zeros((population.num_clients, self.sketch_size))
        return TreeState(population.weight_m, sketch_mq, ward_tree(sketch_mq))

    def urns(
        self,
        state: TreeState,
        weight_m: FloatArray,
        available_m: BoolArray,
        n: int,
    ) -> list[Urn]:
        urn_nm = urns_by_cluster(weight_m, n, state.merge_k2)
        members = [np.flatnonzero(urn_m) for urn_m in urn_nm]
        return [Urn(member, urn_m[member]) for member, urn_m in zip(members, urn_nm, strict=True)]

    def update(
        self,
        state: TreeState,
        cohort: Cohort,
        reports: Reports,
    ) -> TreeState:
        client_n, reports = replied(cohort, reports)
        # The tree takes O(m^2) time: not for nothing.
        if len(client_n) == 0:
            return state
        sketch_mq = with_rows(state.sketch_mq, client_n, reports.sketch_nq)
        return state._replace(sketch_mq=sketch_mq, merge_k2=ward_tree(sketch_mq))
