"""The variance of an estimate, estimated from its own cohort.

D = sum_S z_i + a fixed part, z_i = coef_i l_i; l_i is the residual u_i - c_i, or u_i - D for
estimators whose coefficients sum to 1, as of any ratio (Taylor's linearisation). D depends on two
draws: which clients are selected, and which of them reply, each independently with rate q_i. q_i
z_i is the contribution of a reply if all replied:

- with replacement: V = n/(n-1) sum_draws norm(q_i z_i / count_i - B)^2        (Hansen-Hurwitz 1943)
- Poisson:          V = sum_S (1 - pi_i) norm(q_i z_i)^2
- fixed size:  V = n/(n-1) sum_S (1 - pi_i) norm(q_i z_i - B)^2, B the (1 - pi)-weighted mean of q_i
                    z_i (Deville 1999 after Hajek 1964). An approximation for many clients, and
                    exact for equal pi in random order. With six clients of unequal pi its mean is
                    0.1 to 1.5 times the truth for systematic and pivotal draws. It ignores that
                    draws are spread, balanced or ordered. For these it is mostly too large, up to
                    several times, but no bound: down to 0.4 times the truth with six clients.
- strata:           the sum over strata, each by the formula of its draw. Strata with a single reply
                    that was not certain count as one group (collapsed strata, Cochran 1977, section
                    5A.12), with 1 in place of 1 - pi_i: too large by how far they are apart.

- two stages: with y_h = sum of the z_i that stratum h brought, R strata drawn, and V_h the variance
                    within h by the formula of its draw, z_i over pi_h (Sarndal, Swensson and
                    Wretman 1992, 4.3): V = R/(R-1) sum_h (1 - pi_h) norm(y_h - B)^2 + sum_h pi_h
                    V_h, unbiased if the pi_h are equal and the V_h are. R counts the strata that
                    were not certain. A single reply of h has no V_h: then 1 is in place of
                    1 - pi_h, too large if the pi_h are equal, else no bound. If one stratum
                    alone was left to chance, all that were drawn count, with 1, too large as well.
                    With one drawn nobody knows V.

The first two are unbiased for independent draws; ``Design.variance`` says which of a design's is.
Sums over selected clients are estimated from those that replied by weights 1 / q_i; n is the number
selected. The second draw adds sum (1 - q_i) norm(z_i)^2 over those who replied.
"""

from typing import Any, NamedTuple

import numpy as np

from ..scale.numerics import inner, product, sum_of_rows
from ..types import ALWAYS, NOBODY, BoolArray, FloatArray, Floats, IntArray, Replies

#: Rows are alike if their squares about their mean are less than this share of them.
_ALIKE = 0.01


class Between(NamedTuple):
    """sum_h mass_h norm(y_h - B)^2 over drawn strata, y_h = sum of coef_i l_i over its rows.

    B is the mass-weighted mean of y_h. A stratum of which nobody replied has y_h = 0.
    """

    mass_h: FloatArray
    coef_hn: FloatArray  #: 0 outside the stratum

    def square(self, part_nb: Floats, common_b: Floats) -> float:
        """The sum over a stretch of the l_i = part_i + common."""
        y_hb = product(self.coef_hn, part_nb)
        if common_b.any():
            y_hb = y_hb + self.coef_hn.sum(axis=1)[:, None] * common_b
        off_hb = y_hb - sum_of_rows(self.mass_h / self.mass_h.sum(), y_hb)
        return float(self.mass_h @ inner(off_hb, off_hb))


class VarianceForm(NamedTuple):
    """V = sum_i mass_i norm(scale_i l_i - B)^2 + sum_i alone_i norm(l_i)^2.

    B is the mass-weighted mean of scale_i l_i over the group of i, 0 for who is in none. Of two
    stages it is the variance within strata, to which that between them is added.
    """

    mass_n: FloatArray
    scale_n: FloatArray
    alone_n: FloatArray
    groups: tuple[Any, ...] = ()  #: of rows: indices, or a slice
    between: Between | None = None

    def sums(
        self,
        part_nb: Floats,
        square_n: FloatArray,
        common_b: Floats,
    ) -> FloatArray:
        """norm(scale_i l_i - B)^2 and norm(l_i)^2 of a stretch of the l_i, (2, n); of two stages a
        third row repeats what varies between strata.

        l_i = part_i + common, with norm(part_i)^2 known. Of l_i that are alike it takes their
        common part away first: products of what is left keep their digits.
        """
        along_n = np.zeros(len(part_nb))
        common = 0.0
        if common_b.any():
            along_n = inner(part_nb, common_b)
            common = inner(common_b, common_b)
        alone_n = square_n + 2 * along_n + common
        spread_n = self.scale_n**2 * alone_n
        for rows in self.groups:
            mass_k = self.mass_n[rows]
            scale_k = self.scale_n[rows]
            part_kb = part_nb[rows]
            total = mass_k.sum()
            # Without mass nothing was left to chance: there is no mean, and V of the draw is 0.
            if total == 0:
                continue
            share_k = mass_k * scale_k / total
            mean_b = sum_of_rows(share_k, part_kb)
            # norm(scale part - mean)^2, multiplied out, as norm(part)^2 is known.
            cross_k = inner(part_kb, mean_b)
            spread_k = scale_k * (scale_k * square_n[rows] - 2 * cross_k)
            spread_k += inner(mean_b, mean_b)
            # Of rows that are alike this leaves what rounding does to products in float32.
            least_k = _ALIKE * scale_k**2 * square_n[rows]
            if mean_b.dtype == np.float32 and np.any(spread_k < least_k):
                off_kb = scale_k.astype(np.float32)[:, None] * part_kb - mean_b
                spread_k = inner(off_kb, off_kb)
            if common > 0:
                # The mean has the common part sum(share) times, a row has it scale times.
                shift_k = scale_k - share_k.sum()
                off_k = scale_k * along_n[rows] - inner(mean_b, common_b)
                spread_k += shift_k * (2 * off_k + shift_k * common)
            spread_n[rows] = spread_k
        if self.between is None:
            return np.array([spread_n, alone_n])
        across_n = np.full(len(part_nb), self.between.square(part_nb, common_b))
        return np.array([spread_n, alone_n, across_n])

    def total(self, sum_2n: FloatArray) -> float:
        """V, given the ``sums`` of all stretches."""
        whole = float(inner(self.mass_n, sum_2n[0]) + inner(self.alone_n, sum_2n[1]))
        # A round without replies has no row to read it from, and a variance of 0.
        if self.between is not None and len(self.mass_n):
            whole += float(sum_2n[2, 0])
        # What rounding leaves of a variance of 0 may be less than that.
        return max(whole, 0.0)


def variance_form(replies: Replies) -> VarianceForm | None:
    """The formula above that fits a cohort; None where one cohort is not enough: fewer than two
    replies of clients that were not certain, or unknown expectations.
    """
    if len(replies.selected.stage_n):
        return _two_stages(replies)
    cohort = replies.cohort
    rate_n = replies.response_n
    coef_n = replies.coef_n
    if not np.all(np.isfinite(cohort.expected_n)):
        return None
    alone_n = (1 - rate_n) * coef_n**2
    scale_n = rate_n * coef_n
    selected = replies.selected
    units_n = selected.count_n
    mass_n = _undecided(cohort.expected_n) / rate_n
    known_n = (mass_n > 0).astype(np.int64)
    if cohort.kind == "replacement":
        # The variance is that between draws: of a client drawn twice, each brought half.
        mass_n = cohort.count_n / rate_n
        scale_n = scale_n / cohort.count_n
        known_n = cohort.count_n
    elif cohort.kind == "poisson":
        return VarianceForm(mass_n, scale_n, alone_n)
    else:
        units_n = (_undecided(selected.expected_n) > 0).astype(np.int64)
    group_n = np.zeros(len(known_n), np.int64)
    group_s = np.zeros(len(units_n), np.int64)
    if len(selected.stratum_n):
        group_n = cohort.stratum_n
        group_s = selected.stratum_n
    count_g, known_g, single_g = _per_group(group_s, units_n, group_n, known_n)
    if single_g.any() and len(count_g) > 1:
        # Draws of one client each are independent: their variance is that between them.
        alone = single_g[group_n] & (mass_n > 0)
        mass_n = np.where(alone, cohort.count_n / rate_n, mass_n)
        # All of them are one group; if that is no better, the whole cohort is.
        of_g = np.where(single_g, 0, 1 + np.arange(len(count_g)))
        if known_g[single_g].sum() < 2:
            of_g[:] = 0
        group_n = of_g[group_n]
        group_s = of_g[group_s]
        count_g, _, single_g = _per_group(group_s, units_n, group_n, known_n)
    if single_g.any():
        return None
    # If all were certain all masses are 0, and so is V, whatever the ratio.
    factor_g = count_g / np.maximum(count_g - 1, 1)
    mass_n = factor_g[group_n] * mass_n
    groups: tuple[Any, ...] = (slice(None),)
    if len(count_g) > 1:
        groups = tuple(np.flatnonzero(group_n == g) for g in np.unique(group_n))
    return VarianceForm(mass_n, scale_n, alone_n, groups)


def _two_stages(replies: Replies) -> VarianceForm | None:
    """The forms of the drawn strata, one by one, and what varies between them."""
    selected = replies.selected
    drawn, first_row = np.unique(selected.stratum_n, return_index=True)
    count = len(drawn)
    if not np.all(np.isfinite(selected.expected_n)):
        return None
    pi_h = selected.stage_n[first_row]
    mass_h = np.clip(1 - pi_h, 0.0, 1.0)
    n = len(replies.client_n)
    mass_n, scale_n, alone_n = np.zeros((3, n))
    groups = list[IntArray]()
    for h, stratum in enumerate(drawn):
        rows = np.flatnonzero(replies.cohort.stratum_n == stratum)
        here_s = selected.stratum_n == stratum
        within = variance_form(_given_stratum(replies, rows, here_s, pi_h[h]))
        if within is None:
            # What varies between draws that are independent has it all.
            mass_h[h] = 1.0
            continue
        mass_n[rows] = pi_h[h] * within.mass_n
        scale_n[rows] = within.scale_n
        alone_n[rows] = pi_h[h] * within.alone_n
        groups += [rows[group] for group in within.groups]
    undecided = int(np.count_nonzero(mass_h))
    if undecided == 0:
        return VarianceForm(mass_n, scale_n, alone_n, tuple(groups))
    if count < 2:
        return None
    if undecided == 1:
        # Alone it is its own mean B: only from strata that were certain has it a distance.
        mass_h[:] = 1.0
        undecided = count
    is_of_hn = replies.cohort.stratum_n == drawn[:, None]
    between = Between(
        mass_h=undecided / (undecided - 1) * mass_h,
        coef_hn=is_of_hn * replies.coef_n,
    )
    return VarianceForm(mass_n, scale_n, alone_n, tuple(groups), between)


def _given_stratum(
    replies: Replies,
    rows: IntArray,
    here_s: BoolArray,
    pi: float,
) -> Replies:
    """The replies of a stratum, as if it had been certain to be drawn."""
    cohort = replies.cohort.part(rows)
    selected = replies.selected.part(here_s)
    return Replies(
        cohort._replace(expected_n=cohort.expected_n / pi, stratum_n=NOBODY, stage_n=ALWAYS),
        selected._replace(expected_n=selected.expected_n / pi, stratum_n=NOBODY, stage_n=ALWAYS),
        replies.coef_n[rows],
        replies.response_n[rows],
    )


def _per_group(
    group_s: IntArray,
    units_s: IntArray,
    group_n: IntArray,
    known_n: IntArray,
) -> tuple[IntArray, IntArray, BoolArray]:
    """How much of each group was selected, how much of it replied, and whether that is too
    little.
    """
    size = int(group_s.max(initial=0)) + 1
    count_g = np.bincount(group_s, units_s, size).astype(np.int64)
    known_g = np.bincount(group_n, known_n, size).astype(np.int64)
    # A single reply has no distance from the mean of its own.
    return count_g, known_g, (count_g > 0) & (known_g < 2)


def _undecided(expected_n: FloatArray) -> FloatArray:
    """1 - pi_i; a client that is always selected adds no variance."""
    return np.clip(1 - expected_n, 0.0, 1.0)


def effective_sample_size(coef_n: FloatArray) -> float:
    """(sum c)^2 / sum c^2: how many replies of equal weight these are worth (Kish 1965)."""
    squares = float(np.sum(coef_n**2))
    if squares == 0:
        return 0.0
    return float(coef_n.sum()) ** 2 / squares
