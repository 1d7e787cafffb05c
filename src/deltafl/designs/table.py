"""Sampling designs: how a cohort with given expectations is drawn.

Every design is a function ``(expected_m, rng) -> client ids``. ``expected_m`` is how often each
client is to be drawn on average; an *exact* design keeps that promise to the letter, which is what
unbiased estimates rest on.

=============== ========================================================================= ======
name            cohort                                                                    exact
=============== ========================================================================= ======
systematic      n distinct (the default); clients in random order                         yes
pivotal         n distinct; clients in random order                                       yes
local-pivotal   n distinct, spread over values x_i; without any the same as pivotal       yes
cube            n distinct, sum x_i / pi_i kept; without values the same as pivotal       yes
anticluster     one of several groups whose sums x_i / pi_i are alike; else as pivotal    yes
ordered-pivotal n distinct, spread over the fixed order of the clients; for millions      yes
simple-random   n distinct, equal expectations only                                       yes
poisson         a random number, each client alone                                        yes
multinomial     n draws with replacement                                                  yes
successive      n distinct; what ``numpy.random.choice(replace=False, p=p)`` and          **no**
                ``torch.multinomial`` do
=============== ========================================================================= ======
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError, entry
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, IntArray, Rng
from .anticluster import anticluster
from .balanced import RandomSource, cube, local_pivotal
from .inclusion import check_anyone, draw_probabilities, inclusion_probabilities, with_floor
from .ordered import draw, expectations, ordered_pivotal

Draw = Callable[[FloatArray, Rng], IntArray]
BalancedDraw = Callable[[FloatArray, FloatArray, RandomSource], IntArray]


class Design(NamedTuple):
    """A way to draw."""

    name: str
    draw: Draw  #: client ids, with repetition; for a design with values, the draw without any
    exact: bool  #: whether the mean count of each client is its expectation
    kind: str  #: "fixed-size", "poisson" or "replacement": what a variance estimate has to know
    draw_balanced: BalancedDraw | None = None  #: the draw by values, see ``balanced.py``
    source: str = ""  #: the paper, as in ``docs/reference/references.md``; empty for a textbook's

    @property
    def uses_values(self) -> bool:
        """Whether the draw depends on the values that ``draw_cohort`` may be given."""
        return self.draw_balanced is not None

    @property
    def variance(self) -> str:
        """What ``info.variance`` is: "unbiased", "close" for many clients, or "rough"."""
        if self.kind != "fixed-size" or self.name == "simple-random":
            return "unbiased"
        if self.uses_values or not self.exact or self.name == ORDERED:
            return "rough"
        return "close"

    def expectation(self, score_m: FloatArray, n: int) -> FloatArray:
        """Expected counts proportional to the scores, capped at 1 unless draws may repeat."""
        # An inexact design gets n p even above 1: that is what papers assume of successive draws.
        if self.kind == "replacement" or not self.exact:
            return n * draw_probabilities(score_m)
        return inclusion_probabilities(score_m, n)


class Chooser:
    """Stands in for a generator where every possible cohort is to be visited in turn (see
    ``exact.every_cohort``).
    """

    def choose(
        self,
        design: str,
        expected_m: FloatArray,
        value_mq: FloatArray | None = None,
    ) -> IntArray:
        """Client ids of the cohort to visit, with repetition."""
        raise NotImplementedError


def cohort_size(expected_m: FloatArray) -> int:
    """The whole number n that the expectations sum to; a ``DeltaflError`` if it is none."""
    total = float(expected_m.sum())
    n = round(total)
    # Far more than sums of m rounded expectations are off, far less than a client.
    if abs(total - n) > 1e-6 or n < 1:
        raise DeltaflError(
            f"the expectations sum to {total:.6g}; a design of fixed size needs a whole number >= 1"
        )
    return n


def systematic(expected_m: FloatArray, rng: Rng) -> IntArray:
    """Lay the clients end to end in random order, as long as expected; pick every unit step."""
    certain = np.flatnonzero(expected_m >= 1)
    # In random order: in a fixed one some pairs would never be drawn together.
    order = rng.permutation(np.flatnonzero((expected_m > 0) & (expected_m < 1)))
    start = rng.random()
    if len(order) == 0:
        return certain
    ends = np.cumsum(expected_m[order])
    size = cohort_size(expected_m) - len(certain)
    ends[-1] = size  # cumsum rounds; the last client must not lose its draw to that
    # start + size - 1 may round up to size, beyond the last client.
    place_k = np.searchsorted(ends, start + np.arange(size), side="right")
    return np.concatenate([certain, order[np.minimum(place_k, len(order) - 1)]])


def pivotal(expected_m: FloatArray, rng: Rng) -> IntArray:
    """Let clients duel in random order: of a pair, one is decided, the other fights on."""
    certain = np.flatnonzero(expected_m >= 1).tolist()
    order = rng.permutation(np.flatnonzero((expected_m > 0) & (expected_m < 1))).tolist()
    coin = rng.random(len(order))
    drawn: list[int] = certain
    champion = -1
    strength = 0.0
    for rival, uniform in zip(order, coin, strict=True):
        both = strength + expected_m[rival]
        if both < 1:  # one of them is out
            if uniform * both < expected_m[rival]:
                champion = rival
            strength = both
        else:  # one of them is drawn, the other keeps the excess
            # Deville and Tille 1998: the champion is drawn with probability (1 - b) / (2 - a - b),
            # the rival with (1 - a) / (2 - a - b).
            if uniform * (2 - both) < 1 - expected_m[rival]:
                drawn.append(champion)
                champion = rival
            else:
                drawn.append(rival)
            strength = both - 1
    if strength > 0.5:  # the expectations sum to a whole number, so this is 0 or 1 up to rounding
        drawn.append(champion)
    return np.array(drawn, np.int64)


def simple_random(expected_m: FloatArray, rng: Rng) -> IntArray:
    """Every set of n clients is equally likely; expectations must be equal, or 0 if absent."""
    candidates = np.flatnonzero(expected_m > 0)
    if np.ptp(expected_m[candidates]) > 1e-9:
        raise DeltaflError(
            "simple-random needs equal expectations; write 'systematic' or 'pivotal' for unequal "
            "ones"
        )
    return rng.choice(candidates, size=cohort_size(expected_m), replace=False)


def poisson(expected_m: FloatArray, rng: Rng) -> IntArray:
    """Select each client independently with its own probability; the cohort may be empty."""
    return np.flatnonzero(rng.random(len(expected_m)) < expected_m)


def multinomial(expected_m: FloatArray, rng: Rng) -> IntArray:
    """N independent draws with replacement, each with p = expected / n."""
    n = cohort_size(expected_m)
    # NumPy gives the last client what rounding leaves of 1: the sum must be it.
    count_m = rng.multinomial(n, expected_m / expected_m.sum())
    return np.repeat(np.arange(len(expected_m)), count_m)


def successive(expected_m: FloatArray, rng: Rng) -> IntArray:
    """One client after another, p renormalised each time: inclusion probabilities are NOT n p.

    Exponential clocks with rate p_i ring in exactly this order, so the first n of them are the
    cohort.
    """
    n = cohort_size(expected_m)
    # A client of score 0 never rings. Several of them would be tied, and drawn in no random order.
    if np.count_nonzero(expected_m) < n:
        raise DeltaflError(
            f"successive draws need {n} clients with a positive score; set a floor above 0"
        )
    with np.errstate(divide="ignore"):
        ring_m = rng.exponential(size=len(expected_m)) / expected_m
    return np.argpartition(ring_m, n - 1)[:n]


#: The design that can draw from a ``SumTree``.
ORDERED = "ordered-pivotal"
_FIXED = "fixed-size"
DESIGNS: dict[str, Design] = {
    design.name: design
    for design in (
        Design("systematic", systematic, True, _FIXED, None, "Madow 1949"),
        Design("pivotal", pivotal, True, _FIXED, None, "Deville, Tille 1998"),
        Design(
            "local-pivotal",
            pivotal,
            True,
            _FIXED,
            local_pivotal,
            "Grafstrom, Lundstrom, Schelin 2012",
        ),
        Design("cube", pivotal, True, _FIXED, cube, "Deville, Tille 2004"),
        Design("anticluster", pivotal, True, _FIXED, anticluster, "Papenberg 2024"),
        Design(
            ORDERED,
            ordered_pivotal,
            True,
            _FIXED,
            None,
            "Deville, Tille 1998; Chauvet 2012",
        ),
        Design("simple-random", simple_random, True, _FIXED),
        Design("poisson", poisson, True, "poisson", None, "Hajek 1964"),
        Design(
            "multinomial",
            multinomial,
            True,
            "replacement",
            None,
            "Hansen, Hurwitz 1943",
        ),
        Design("successive", successive, False, _FIXED, None, "Yates, Grundy 1953"),
    )
}


def find_design(name: str) -> Design:
    """Look a design up by name; an unknown one is a ``DeltaflError`` that suggests the nearest."""
    return entry("design", name, DESIGNS)


def draw_by(
    design: str,
    expected_m: FloatArray,
    rng: Rng | Chooser,
    value_mq: FloatArray | None = None,
) -> IntArray:
    """Draw client ids, or let a ``Chooser`` name them; every draw of a sampler passes here."""
    if isinstance(rng, Chooser):
        return rng.choose(design, expected_m, value_mq)
    how = find_design(design)
    if value_mq is None or how.draw_balanced is None:
        return how.draw(expected_m, rng)
    return how.draw_balanced(expected_m, value_mq, RandomSource(rng))


def drawn_once(client_n: IntArray, expected_n: FloatArray, kind: str) -> Cohort:
    """A cohort of distinct clients."""
    return Cohort(client_n, np.ones(len(client_n), np.int64), expected_n, kind)


def draw_cohort(
    score_m: FloatArray,
    n: int,
    design: str,
    rng: Rng | Chooser,
    available_m: BoolArray | None = None,
    value_mq: FloatArray | None = None,
) -> Cohort:
    """Draw n clients with expectations proportional to their scores.

    Args:
        score_m: (m,) scores >= 0.
        n: Cohort size (its mean for ``poisson``); of fewer available clients all are selected,
            except by ``multinomial``, which draws with replacement.
        design: A name in ``DESIGNS``.
        rng: The round's generator.
        available_m: bool (m,), the available clients; None for all. The others have expectation 0.
        value_mq: (m, q) values x_i, such as w_i times a sketch of client i's update, for designs
            that use them (``Design.uses_values``): the cohort is spread over the places x_i / pi_i,
            or balanced such that sum_S x_i / pi_i is near sum_i x_i. None, no column, or zeros
            alone: nothing to spread.

    Raises:
        DeltaflError: For an unknown design, impossible n, scores or values, or when nobody is
            available.

    Example:
        >>> cohort = draw_cohort(np.array([1.0, 2.0, 2.0]), 2, "pivotal", np.random.default_rng(0))
        >>> int(cohort.count_n.sum())
        2
    """
    how = find_design(design)
    score_m = np.asarray(score_m, float)
    m = len(score_m)
    present = np.arange(m)
    if available_m is not None:
        if len(available_m) != m:
            raise DeltaflError(
                f"available_m has {len(available_m)} entries for {m} scores; give one for each"
            )
        present = np.flatnonzero(available_m)
        check_anyone(len(present))
        # Whoever is there is selected where fewer are than wanted.
        n = min(n, len(present))
    expected_m = how.expectation(score_m[present], n)
    if value_mq is not None:
        value_mq = _usable_values(how, value_mq, m, present)
    drawn = draw_by(design, expected_m, rng, value_mq)
    # Designs name clients in any order and repeatedly; a cohort has each once, in increasing order.
    row_n, count_n = np.unique(drawn, return_counts=True)
    return Cohort(present[row_n], count_n, expected_m[row_n], how.kind)


def draw_from_tree(
    tree: SumTree,
    n: int,
    floor: float,
    rng: Rng | Chooser,
    available_m: BoolArray | None = None,
) -> Cohort:
    """Draw n clients by ``ordered-pivotal`` with scores that are in a sum tree, in O(n log m).

    As ``draw_cohort``, with the floor g of ``with_floor``. Unless all clients are available, the
    draw reads all scores.
    """
    # The sums in the tree are over all clients: those of fewer need the scores one by one.
    if available_m is not None and not available_m.all():
        score_m = with_floor(np.asarray(tree), floor, available_m)
        return draw_cohort(score_m, n, ORDERED, rng, available_m)
    expected = expectations(tree, n, floor)
    if isinstance(rng, Chooser):
        drawn = rng.choose(ORDERED, expected.everyone())
    else:
        drawn = draw(expected, rng)
    client_n = np.sort(drawn)
    return drawn_once(client_n, expected.of(client_n), _FIXED)


def _usable_values(
    how: Design,
    value_mq: FloatArray,
    m: int,
    present: IntArray,
) -> FloatArray | None:
    """The values of those present; None if the design ignores them or nothing is to spread."""
    if not how.uses_values:
        return None
    value_mq = np.asarray(value_mq, float)
    if value_mq.ndim != 2 or len(value_mq) != m:
        raise DeltaflError(
            f"value_mq has shape {value_mq.shape}; give one row of numbers for each of {m} clients"
        )
    # Before it is checked: of absent clients nothing need be known.
    value_mq = value_mq[present]
    bad = present[~np.isfinite(value_mq).all(axis=1)]
    if len(bad):
        raise DeltaflError(
            f"a value of client {bad[0]} is not a finite number; write 0 where nothing is known"
        )
    if not value_mq.any():
        return None
    return value_mq
