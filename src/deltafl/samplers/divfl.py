"""DivFL (Balakrishnan et al., ICLR 2022): a cohort whose updates represent all clients'. Biased."""

from dataclasses import dataclass
from typing import ClassVar

from ..types import IntArray, Rng
from .base import NewFirst, NewFirstState
from .representatives import distances, greedy


@dataclass(frozen=True)
class DivFL(NewFirst):
    """Greedily selects a cohort S with a small sum over clients k of min over i in S of norm(u_k -
    u_i).

    This is the paper's form without overheads, on distances of last updates. Starting from the
    empty set, it adds the client that makes the sum smallest until there are n. Ours: all clients
    are first selected once, in random order, and enter the sum once they reply; distances are those
    of sketches of u_i - c_i. Costs O(m^2 (q + n)) time a round: at most 5,000 clients.

    Source: Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, ICLR 2022.

    Attributes:
        sketch_size: q, length of a sketch; distances have a relative error of about 1 / sqrt(q).
    """

    sketch_size: int = 64

    # The matrix of distances has 8 m^2 bytes, and takes O(m^2) time a round.
    most_clients = 5000
    ranges: ClassVar = {"sketch_size": "[1, 128]"}

    def again(
        self,
        state: NewFirstState,
        present_k: IntArray,
        size: int,
        wanted: int,
        rng: Rng,
    ) -> IntArray:
        seen_k = present_k[state.seen_m[present_k]]
        distance_ck = distances(state.last_mq[seen_k], state.last_mq[state.seen_m])
        return seen_k[greedy(distance_ck, min(wanted, len(seen_k)))]
