"""Every possible cohort with its probability: the designs' exact distributions for small m.

Written from the definitions and independently of ``designs.py``, which it checks: ``designs.py`` draws, this module
enumerates. The audit and the tests use it to compute expectations without any simulation error.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, pairwise, permutations, product
from math import comb, factorial, prod
from typing import cast

import numpy as np

from .designs import Chooser, find_design
from .errors import DeltaflError
from .types import Cohort, FloatArray, IntArray

#: Count of each client -> probability.
Support = dict[tuple[int, ...], float]

#: Beyond this many clients an enumeration over orders takes too long.
MAX_CLIENTS = 7
#: Ends that should coincide differ by rounding; what seems to lie between them is no cohort.
SLIVER = 1e-14


def support(design: str, expected_m: FloatArray) -> Support:
    """All cohorts a design can draw, as counts (m,), with their probabilities (sum 1).

    Args:
        design: A name in ``designs.DESIGNS``.
        expected_m: (m,) expectations, m <= ``MAX_CLIENTS``.

    Raises:
        DeltaflError: If the design is unknown or there are too many clients.
    """
    find_design(design)
    if len(expected_m) > MAX_CLIENTS:
        raise DeltaflError(f"cannot enumerate cohorts of {len(expected_m)} clients; at most {MAX_CLIENTS}")
    return _ENUMERATE[design]([float(e) for e in expected_m])


@lru_cache(maxsize=16)
def _support_items(design: str, expected: tuple[float, ...]) -> tuple[tuple[tuple[int, ...], float], ...]:
    """The support as a tuple; a sampler asks for the same one again at every visit."""
    return tuple(support(design, np.array(expected)).items())


class _Visit(Chooser):
    """One path through the draws of a sampler: the k-th draw takes the ``path[k]``-th cohort of its support."""

    def __init__(self, path: list[int]) -> None:
        self.path, self.probability, self.widths = path, 1.0, list[int]()

    def choose(self, design: str, expected_m: FloatArray) -> IntArray:
        cohorts = _support_items(design, tuple(expected_m.tolist()))
        self.path += [0] * (len(self.widths) + 1 - len(self.path))
        count_m, probability = cohorts[self.path[len(self.widths)]]
        self.widths.append(len(cohorts))
        self.probability *= probability
        return np.repeat(np.arange(len(count_m)), count_m)


def every_cohort(open_with: Callable[[np.random.Generator], Cohort]) -> Iterator[tuple[float, Cohort]]:
    """All cohorts that a sampler can return in one state, with their probabilities, by running its own code.

    Works for every sampler whose only randomness is ``designs.draw_cohort``, called any number of times.

    Args:
        open_with: ``lambda rng: sampler.open(state, available_m, n, rng)``; it must draw through ``draw_cohort`` alone.

    Raises:
        AttributeError: If the sampler asks the generator for anything else.
        DeltaflError: If there are too many clients to enumerate.
    """
    path: list[int] = []
    while True:
        visit = _Visit(path)
        cohort = open_with(cast(np.random.Generator, visit))
        yield visit.probability, cohort
        while path and path[-1] + 1 == visit.widths[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def joint_expectations(design: str, expected_m: FloatArray) -> FloatArray:
    """E[count_i count_j], float64 (m, m), by enumeration; the diagonal is E[count_i^2]."""
    joint_mm = np.zeros((len(expected_m), len(expected_m)))
    for count_m, probability in support(design, expected_m).items():
        joint_mm += probability * np.outer(count_m, count_m)
    return joint_mm


def as_cohort(count_m: tuple[int, ...], expected_m: FloatArray, kind: str) -> Cohort:
    """One element of a support as a ``Cohort``."""
    client_n = np.flatnonzero(count_m)
    return Cohort(client_n, np.asarray(count_m, dtype=np.int64)[client_n], expected_m[client_n], kind)


def _counts(chosen: tuple[int, ...], m: int) -> tuple[int, ...]:
    return tuple(chosen.count(i) for i in range(m))


def _simple_random(expected: list[float]) -> Support:
    m, n = len(expected), round(sum(expected))
    able = [i for i in range(m) if expected[i] > 0]
    return {_counts(chosen, m): 1 / comb(len(able), n) for chosen in combinations(able, n)}


def _poisson(expected: list[float]) -> Support:
    choices = product((0, 1), repeat=len(expected))
    return {c: prod(e if k else 1 - e for k, e in zip(c, expected, strict=True)) for c in choices}


def _multinomial(expected: list[float]) -> Support:
    n = round(sum(expected))
    result: Support = {}
    for count in product(range(n + 1), repeat=len(expected)):
        if sum(count) == n:
            ways = factorial(n) / prod(factorial(k) for k in count)
            result[count] = ways * prod((e / n) ** k for k, e in zip(count, expected, strict=True))
    return result


def _successive(expected: list[float]) -> Support:
    m, n = len(expected), round(sum(expected))
    result: Support = defaultdict(float)
    for order in permutations(range(m), n):
        probability, left = 1.0, sum(expected)
        for i in order:
            probability *= expected[i] / left if left > 0 else 0.0
            left -= expected[i]
        result[_counts(order, m)] += probability
    return dict(result)


def _orders(expected: list[float]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The clients that are certain, and all orders of those that are not decided."""
    certain = tuple(i for i, e in enumerate(expected) if e >= 1)
    return certain, list(permutations(i for i, e in enumerate(expected) if 0 < e < 1))


def _systematic(expected: list[float]) -> Support:
    certain, orders = _orders(expected)
    result: Support = defaultdict(float)
    for order in orders:
        ends = np.cumsum([expected[i] for i in order])
        cuts = np.unique(np.concatenate([[0.0, 1.0], ends % 1.0]))
        for low, high in pairwise(cuts.tolist()):
            if high - low < SLIVER:
                continue
            middle = (low + high) / 2
            chosen = tuple(
                i for i, e in zip(order, ends, strict=True) if np.floor(e - middle) > np.floor(e - expected[i] - middle)
            )
            result[_counts(certain + chosen, len(expected))] += (high - low) / len(orders)
    return dict(result)


def _pivotal(expected: list[float]) -> Support:
    certain, orders = _orders(expected)
    result: Support = defaultdict(float)

    def duel(a: int, strength: float, rest: tuple[int, ...], drawn: tuple[int, ...], probability: float) -> None:
        if probability == 0:
            return
        if not rest:
            final = (*drawn, a) if strength > 0.5 else drawn
            result[_counts(certain + final, len(expected))] += probability / len(orders)
            return
        b, left = rest[0], rest[1:]
        both = strength + expected[b]
        if both < 1:
            duel(a, both, left, drawn, probability * strength / both)
            duel(b, both, left, drawn, probability * expected[b] / both)
        else:
            duel(b, both - 1, left, (*drawn, a), probability * (1 - expected[b]) / (2 - both))
            duel(a, both - 1, left, (*drawn, b), probability * (1 - strength) / (2 - both))

    for order in orders:
        if order:
            duel(order[0], expected[order[0]], order[1:], (), 1.0)
        else:
            result[_counts(certain, len(expected))] += 1.0
    return dict(result)


_ENUMERATE = {
    "systematic": _systematic,
    "pivotal": _pivotal,
    "simple-random": _simple_random,
    "poisson": _poisson,
    "multinomial": _multinomial,
    "successive": _successive,
}
