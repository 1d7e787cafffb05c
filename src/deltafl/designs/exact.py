"""Every possible cohort with its probability: the designs' exact distributions for small m.

Written from the definitions and independently of ``table.py``, which it checks. Only the balanced
designs have no definition shorter than their code: that code itself is run through all of its
random decisions (``every_path``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import combinations, pairwise, permutations, product
from math import comb, factorial, prod
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import BoolArray, Cohort, FloatArray, IntArray, Rng
from .anticluster import anticluster
from .balanced import RandomSource, cube, duel, places, shuffled, squared_distances
from .table import BalancedDraw, Chooser, find_design

#: Count of each client -> probability.
Support = dict[tuple[int, ...], float]

#: The probabilities of clients in the middle of a draw.
_Pi = tuple[float, ...]

#: Beyond this many clients an enumeration over orders takes too long.
MAX_CLIENTS = 7
#: Ends that should coincide differ by rounding; what seems to lie between them is no cohort.
SLIVER = 1e-14


def support(
    design: str,
    expected_m: FloatArray,
    value_mq: npt.ArrayLike | None = None,
) -> Support:
    """All cohorts a design can draw, as counts (m,), with their probabilities (sum 1); m <=
    ``MAX_CLIENTS``.
    """
    # An unknown name is refused with the nearest one.
    find_design(design)
    if len(expected_m) > MAX_CLIENTS:
        raise DeltaflError(
            f"cannot enumerate cohorts of {len(expected_m)} clients; at most {MAX_CLIENTS}"
        )
    # Without values a balanced design draws as ``pivotal`` does, and ``_ENUMERATE`` says so.
    if value_mq is not None and design in _ENUMERATE_BALANCED:
        return _ENUMERATE_BALANCED[design](expected_m, np.asarray(value_mq))
    return _ENUMERATE[design]([float(e) for e in expected_m])


@lru_cache(maxsize=16)
def _likely(
    design: str,
    expected: tuple[float, ...],
    values: tuple[tuple[float, ...], ...] | None,
) -> Support:
    """The possible cohorts; a sampler needs the same ones again at every visit."""
    cohorts = support(design, np.array(expected), values)
    possible = {count: probability for count, probability in cohorts.items() if probability > 0}
    # Successive draws need a positive score for each.
    if not possible:
        raise DeltaflError(f"{design} draws have no cohort of these scores; set a floor above 0")
    return possible


class _Path:
    """One path through random decisions: the k-th takes its ``path[k]``-th case."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.probability = 1.0
        self.widths = list[int]()

    def branch(self, probabilities: Sequence[float]) -> int:
        """Which case the next decision takes on this path."""
        # How many decisions a run takes is known only once it is over: the path grows as they are
        # met, each with its first case.
        self.path += [0] * (len(self.widths) + 1 - len(self.path))
        case = self.path[len(self.widths)]
        self.widths.append(len(probabilities))
        self.probability *= probabilities[case]
        return case


class _Visit(_Path, Chooser):
    """A path through the draws of a sampler: every draw takes a cohort of its support."""

    def choose(
        self,
        design: str,
        expected_m: FloatArray,
        value_mq: FloatArray | None = None,
    ) -> IntArray:
        values = None
        if value_mq is not None:
            values = tuple(map(tuple, value_mq.tolist()))
        cohorts = _likely(design, tuple(expected_m.tolist()), values)
        case = self.branch(list(cohorts.values()))
        count_m = list(cohorts)[case]
        return np.repeat(np.arange(len(count_m)), count_m)


class _Fate(_Path, RandomSource):
    """A path through the decisions of one draw of a balanced design."""

    def pick(self, count: int) -> int:
        return self.branch([1 / count] * count)

    def chance(self, probability: float) -> bool:
        # What is certain is no decision: as one it would double the paths, half of them impossible.
        if probability in (0.0, 1.0):
            return probability == 1.0
        return self.branch([1 - probability, probability]) == 1

    def chances(self, probability_k: FloatArray) -> BoolArray:
        return np.array([self.chance(probability) for probability in probability_k.tolist()])

    def order(self, count: int) -> IntArray:
        return shuffled(count, self)


P = TypeVar("P", bound=_Path)
T = TypeVar("T")


def _follow(
    start: Callable[[list[int]], P],
    run: Callable[[P], T],
) -> Iterator[tuple[float, T]]:
    """Run something once on every path through its decisions; yield probabilities and results."""
    path: list[int] = []
    while True:
        here = start(path)
        result = run(here)
        yield here.probability, result
        # As an odometer: the last decision that has another case takes it, and those after it begin
        # anew.
        while path and path[-1] + 1 == here.widths[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def every_path(run: Callable[[RandomSource], T]) -> Iterator[tuple[float, T]]:
    """All results that code can have whose only randomness is ``balanced.RandomSource``, with
    their probabilities.
    """
    return _follow(_Fate, run)


def every_cohort(
    open_with: Callable[[Rng], Cohort],
) -> Iterator[tuple[float, Cohort]]:
    """All cohorts that a sampler can return in one state, with their probabilities, by running its
    own code.

    Works for every sampler whose only randomness is ``designs.draw_cohort``, called any number of
    times, as in ``every_cohort(lambda rng: sampler.open(state, available_m, n, rng))``.

    Raises:
        AttributeError: If the sampler uses the generator for anything else.
        DeltaflError: If there are too many clients to enumerate.
    """
    # A ``Chooser`` stands where samplers expect a generator; ``draw_by`` tells the two apart.
    return _follow(_Visit, lambda visit: open_with(cast(Rng, visit)))


def _counts(chosen: tuple[int, ...], m: int) -> tuple[int, ...]:
    return tuple(chosen.count(i) for i in range(m))


def _simple_random(expected: list[float]) -> Support:
    m = len(expected)
    n = round(sum(expected))
    # All sets of those who can be drawn at all are equally likely.
    able = [i for i in range(m) if expected[i] > 0]
    return {_counts(chosen, m): 1 / comb(len(able), n) for chosen in combinations(able, n)}


def _poisson(expected: list[float]) -> Support:
    chances = [(1 - e, e) for e in expected]
    result: Support = {}
    for count in product((0, 1), repeat=len(expected)):
        # Clients are drawn independently.
        result[count] = prod(p[k] for k, p in zip(count, chances, strict=True))
    return result


def _multinomial(expected: list[float]) -> Support:
    n = round(sum(expected))
    result: Support = {}
    for count in product(range(n + 1), repeat=len(expected)):
        if sum(count) == n:
            # In so many orders the draws give these counts.
            ways = factorial(n) / prod(factorial(k) for k in count)
            result[count] = ways * prod((e / n) ** k for k, e in zip(count, expected, strict=True))
    return result


def _successive(expected: list[float]) -> Support:
    m = len(expected)
    n = round(sum(expected))
    result: Support = defaultdict(float)
    for order in permutations(range(m), n):
        probability = 1.0
        left = sum(expected)
        for i in order:
            # Where nothing is left, what is drawn has no score either.
            probability *= expected[i] / (left or 1.0)
            left -= expected[i]
        result[_counts(order, m)] += probability
    return dict(result)


def _undecided(expected: list[float]) -> list[int]:
    return [i for i, e in enumerate(expected) if 0 < e < 1]


def _with_certain(drawn: tuple[int, ...], expected: list[float]) -> tuple[int, ...]:
    return tuple(int(e >= 1 or i in drawn) for i, e in enumerate(expected))


def _systematic(expected: list[float]) -> Support:
    # Clients that are certain take no part: the design selects them before it shuffles.
    orders = list(permutations(_undecided(expected)))
    result: Support = defaultdict(float)
    for order in orders:
        ends = np.cumsum([expected[i] for i in order])
        # For one order the cohort changes only where the start passes the end of a client. Between
        # two such places it is the same, with the distance as its probability.
        cuts = np.unique(np.concatenate([[0.0, 1.0], ends % 1.0]))
        for low, high in pairwise(cuts.tolist()):
            if high - low < SLIVER:
                continue
            middle = (low + high) / 2
            chosen: tuple[int, ...] = ()
            for i, end in zip(order, ends, strict=True):
                # A client is drawn if a whole number of steps from the start lies in its part.
                if np.floor(end - middle) > np.floor(end - expected[i] - middle):
                    chosen = (*chosen, i)
            result[_with_certain(chosen, expected)] += (high - low) / len(orders)
    return dict(result)


def _pivotal(expected: list[float], ordered: bool = False) -> Support:
    clients = tuple(_undecided(expected))
    orders = [clients]
    if not ordered:
        orders = list(permutations(clients))
    result: Support = defaultdict(float)

    def duel(
        a: int,
        strength: float,
        rest: tuple[int, ...],
        drawn: tuple[int, ...],
        probability: float,
    ) -> None:
        # A champion of strength 0 never wins.
        if probability == 0:
            return
        if not rest:
            if strength > 0.5:
                drawn = (*drawn, a)
            result[_with_certain(drawn, expected)] += probability / len(orders)
            return
        b = rest[0]
        left = rest[1:]
        both = strength + expected[b]
        if both < 1:
            duel(a, both, left, drawn, probability * strength / both)
            duel(b, both, left, drawn, probability * expected[b] / both)
        else:
            duel(
                # The champion is drawn, and the rival keeps the excess.
                b,
                both - 1,
                left,
                (*drawn, a),
                probability * (1 - expected[b]) / (2 - both),
            )
            duel(
                # The rival is drawn, and the champion keeps the excess.
                a,
                both - 1,
                left,
                (*drawn, b),
                probability * (1 - strength) / (2 - both),
            )

    for order in orders:
        duel(-1, 0.0, order, (), 1.0)
    return dict(result)


def _local_pivotal(expected_m: FloatArray, value_mq: FloatArray) -> Support:
    """Duel by duel over the states pi of the draw: different paths soon meet in the same state."""
    start_m = np.clip(expected_m, 0.0, 1.0)
    far_mm = squared_distances(places(start_m, value_mq))
    result: Support = defaultdict(float)

    def step(pi: _Pi, source: RandomSource) -> tuple[_Pi, bool]:
        pi_m = np.array(pi)
        goes_on = duel(pi_m, far_mm, source)
        return tuple(pi_m.tolist()), goes_on

    states = [(tuple(start_m.tolist()), 1.0)]
    while states:
        following: dict[_Pi, tuple[_Pi, float]] = {}
        for state, reached in states:
            for probability, (after, goes_on) in every_path(partial(step, state)):
                chance = reached * probability
                if goes_on:
                    # The same sums in another order differ by rounding.
                    near = tuple(round(e, 12) for e in after)
                    same, before = following.get(near, (after, 0.0))
                    following[near] = same, before + chance
                else:
                    # Decided clients are at 0 or 1, up to rounding.
                    result[tuple(int(e > 0.5) for e in after)] += chance
        states = list(following.values())
    return dict(result)


def _drawn(
    draw: BalancedDraw,
    expected_m: FloatArray,
    value_mq: FloatArray,
) -> Support:
    result: Support = defaultdict(float)
    for probability, drawn in every_path(lambda source: draw(expected_m, value_mq, source)):
        result[_counts(tuple(drawn.tolist()), len(expected_m))] += probability
    return dict(result)


_ENUMERATE: dict[str, Callable[[list[float]], Support]] = {
    "systematic": _systematic,
    "pivotal": _pivotal,
    "local-pivotal": _pivotal,  # without values
    "cube": _pivotal,
    "anticluster": _pivotal,
    "ordered-pivotal": partial(_pivotal, ordered=True),
    "simple-random": _simple_random,
    "poisson": _poisson,
    "multinomial": _multinomial,
    "successive": _successive,
}
_ENUMERATE_BALANCED: dict[str, Callable[[FloatArray, FloatArray], Support]] = {
    "local-pivotal": _local_pivotal,
    "cube": partial(_drawn, cube),
    "anticluster": partial(_drawn, anticluster),
}
