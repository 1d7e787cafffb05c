"""Clients in groups, such as regions or clusters, each with its own share of a cohort.

How many are drawn of each group is decided before the draw, so that the expectations of the draws
inside the groups are those of the whole.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..types import Cohort, FloatArray, IntArray, Rng
from .inclusion import with_floor
from .table import draw_cohort

#: Clients of a group, and how many of them to draw -> those that were drawn.
DrawSome = Callable[[IntArray, int], Cohort]


def allocate(
    n: int,
    size_h: IntArray,
    mass_h: FloatArray | None = None,
    least: int = 1,
) -> IntArray:
    """Split n draws over groups by masses, or by their sizes if none is given or above 0: at least
    ``least``, at most all of each, sum n.
    """
    if mass_h is None or not mass_h.any():
        mass_h = size_h.astype(float)
    share_h = np.minimum(least, size_h)
    for _ in range(n - int(share_h.sum())):
        # The next draw goes where most of a share is lacking; a full group is out.
        wanted_h = n * mass_h / mass_h.sum()
        lack_h = np.where(share_h < size_h, wanted_h - share_h, -np.inf)
        share_h[np.argmax(lack_h)] += 1
    return share_h


def draw_from_each(
    member_h: Sequence[IntArray],
    quota_h: Sequence[int] | IntArray,
    draw: DrawSome,
) -> Cohort:
    """A cohort with a given number of clients of each group; ``stratum_n`` has their places in
    ``member_h``.
    """
    parts = [draw(member_k, int(quota)) for member_k, quota in zip(member_h, quota_h, strict=True)]
    columns = [*zip(*parts, strict=True)]
    client_n, count_n, expected_n = map(np.concatenate, columns[:3])
    size_h = [len(part.client_n) for part in parts]
    stratum_n = np.repeat(np.arange(len(parts)), size_h)
    # All groups are drawn in one way, so that the last part's kind is that of all.
    cohort = Cohort(client_n, count_n, expected_n, parts[-1].kind, stratum_n=stratum_n)
    return cohort.part(np.argsort(client_n))


def draw_by_scores(
    score_m: FloatArray,
    floor: float,
    design: str,
    rng: Rng,
) -> DrawSome:
    """Draws of clients of a cluster, by scores with a floor inside."""

    def draw(member_k: IntArray, quota: int) -> Cohort:
        score_k = with_floor(score_m[member_k], floor)
        part = draw_cohort(score_k, quota, design, rng)
        # A draw knows its members by their places alone.
        return part._replace(client_n=member_k[part.client_n])

    return draw
