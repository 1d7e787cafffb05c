"""Check a sampler of your own: the protocol and, by Monte Carlo, the promise that its
expectations are exact.
"""

from copy import deepcopy
from typing import Any

import numpy as np

from ..designs.inclusion import check_cohort_size
from ..errors import DeltaflError
from ..samplers.base import Sampler, State
from ..scale.persistent_array import PersistentArray
from ..streams import stream
from ..types import BoolArray, Cohort, Oracle, Population, Reports, Rng, is_whole, locked, read_only

#: A mean may lie this many of its standard errors from 1 before it is called wrong.
_STANDARD_ERRORS = 5.0
#: Numbers that are kept: one of each client in each draw, and one of each pair of clients.
_MOST_NUMBERS = 10**8


def check_sampler(
    sampler: Sampler,
    *,
    num_clients: int = 12,
    n: int = 4,
    oracle: Oracle | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> None:
    """Check that a sampler keeps the protocol and, if it claims to be unbiased, its expectations.

    The population has very unequal weights, and of each client the shares of three labels are
    known. Three rounds with replies and failures are played first, so that a learning sampler is
    tested in a state that it reached itself. Then: the same state and generator give the same
    cohort, now and after later rounds; clients are distinct, sorted and available; nothing is
    changed in place; replies of clients that did not respond are ignored; and over many draws from
    one state no more than n clients are drawn in the mean, and the mean of count / expected is 1
    for every client. Every sampler of this library passes.

    A sampler that needs an oracle needs one here: ``KnownUpdates`` of ``num_clients`` clients, none
    of them zero.

    Raises:
        AssertionError: With one sentence on what is wrong.
        DeltaflError: If a number is not in its range: draws times clients is at most 10^8.

    Example:
        >>> from deltafl import make_sampler
        >>> check_sampler(make_sampler("pracdelta@pivotal"))
    """
    require(
        isinstance(sampler, Sampler),
        "a sampler is a subclass of deltafl.Sampler",
    )
    require(
        not sampler.needs_oracle or isinstance(oracle, Oracle),
        "this sampler needs an oracle: pass KnownUpdates(...)",
    )
    if not sampler.needs_oracle:
        oracle = None
    check_work(num_clients, draws)
    check_cohort_size(n, num_clients)
    # What is written in place raises at its own line, but torch's tensors write through.
    population = locked(unequal_clients(num_clients, 50, seed))
    known = deepcopy(population)
    state = sampler.init(population)
    require(same(known, population), "init changes the population in place")
    require(same(state, sampler.init(known)), "init gives another state for the same population")
    _check_state(state)

    def opened(available_m: BoolArray, round: int) -> Cohort:
        """Open twice: a round must be repeatable, and opening must not change the state."""
        before = deepcopy(state)
        first, again = (
            sampler.open(state, read_only(available_m), n, stream(seed, "audit", round), oracle)
            for _ in range(2)
        )
        require(
            isinstance(first, Cohort),
            f"open returns a {type(first).__name__}, not a Cohort",
        )
        require(
            same(first, again),
            "open gives another cohort for the same state and generator",
        )
        require(same(before, state), "open changes the state in place")
        _check_cohort(first, available_m)
        return first

    everyone_m = np.ones(num_clients, bool)
    # A state that the sampler has reached itself, not the first one.
    earlier = list[tuple[State, Cohort]]()
    for round in range(3):
        cohort = opened(everyone_m, round)
        earlier.append((state, cohort))
        state = _check_update(sampler, state, cohort, stream(seed, "audit", round, 1))
    for round, (begun, cohort) in enumerate(earlier):
        rng = stream(seed, "audit", round)
        require(
            same(cohort, sampler.open(begun, everyone_m, n, rng, oracle)),
            "after later rounds open gives another cohort for the same state and generator: what "
            "it remembers must be in the state alone",
        )
    some_m = np.arange(num_clients) % 3 != 1
    # Fewer than n are there: all of them must be selected, and no more.
    few_m = np.arange(num_clients) < max(n - 1, 1)
    for available_m in (some_m, few_m):
        opened(available_m, 3)
    if sampler.accepts_no_mask:
        masks: Any = (everyone_m, None)
        cohorts = [
            sampler.open(
                state,
                mask,
                n,
                stream(seed, "audit", 4),
                oracle,
            )
            for mask in masks
        ]
        require(
            same(*cohorts), "accepts_no_mask: open gives another cohort for None than for everyone"
        )
    for available_m in (everyone_m, some_m):
        rng = stream(seed, "audit", 4)
        cohorts = [sampler.open(state, available_m, n, rng, oracle) for _ in range(draws)]
        if not sampler.asks_all:
            _check_size(cohorts, n)
        if sampler.unbiased:
            _check_means(cohorts, available_m, n)


def unequal_clients(count: int, largest: int, seed: int, **known: Any) -> Population:
    """Clients with 10 to ``largest`` examples, of each the shares of three labels, and what else is
    ``known``.
    """
    aux_mc = stream(seed, "audit", 5).dirichlet(np.ones(3), size=count)
    return Population.from_sizes(
        np.linspace(10, largest, count).astype(int),
        aux=aux_mc,
        **known,
    )


def check_work(num_clients: Any, draws: Any) -> None:
    """Refuse clients and draws that are no counts, or more than fit in memory."""
    most = int(_MOST_NUMBERS**0.5)
    for name, value in (("num_clients", num_clients), ("draws", draws)):
        if not is_whole(value) or not 1 <= value <= most:
            raise DeltaflError(f"{name} is {value!r:.60}; it must be a whole number, 1 to {most:,}")
        most = _MOST_NUMBERS // value


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise an ``AssertionError`` with this message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def _check_state(state: State, name: str = "the state") -> None:
    """An array, or a NamedTuple or a dict of them, nested at will, can be printed, compared and
    saved.
    """
    if isinstance(state, np.ndarray | PersistentArray):
        return
    kind = type(state).__name__
    named = isinstance(state, dict) or (isinstance(state, tuple) and hasattr(state, "_fields"))
    require(named, f"{name} is a {kind}, not an array, nor a NamedTuple or a dict of arrays")
    parts: Any = state if isinstance(state, dict) else state._asdict()
    for field, value in parts.items():
        _check_state(value, f"{field} in the state")


def _check_cohort(cohort: Cohort, available_m: BoolArray) -> None:
    client_n, count_n, expected_n = cohort[:3]
    require(
        client_n.shape == count_n.shape == expected_n.shape,
        "the columns of the cohort differ in length",
    )
    require(
        np.issubdtype(client_n.dtype, np.integer),
        f"client_n has type {client_n.dtype}, not whole numbers",
    )
    require(
        np.all(np.diff(client_n) > 0),
        f"client_n is {client_n}; it must be sorted, without repetition",
    )
    require(
        np.all(available_m[client_n]),
        "a client was selected that is not available",
    )
    require(np.all(count_n >= 1), "a client of the cohort has a count below 1")
    require(
        # Negated: NaN stands for an unknown expectation, which is allowed.
        np.all(~(expected_n <= 0)),
        "a client was drawn with expectation 0 or less",
    )


def _check_update(sampler: Sampler, state: State, cohort: Cohort, rng: Rng) -> State:
    """Update with some replies missing; what stands in their rows must not matter."""
    n = len(cohort.client_n)
    responded_n = rng.random(n) < 0.7
    loss_n = rng.exponential(size=n)
    numbers = Reports._make(rng.exponential(size=n) for _ in Reports._fields)
    reports = numbers._replace(
        responded_n=responded_n,
        has_loss_n=np.ones(n, bool),
        loss_n=loss_n,
        square_loss_n=np.where(
            np.arange(n) % 3 > 0,
            2 * loss_n**2,
            np.nan,
        ),  # some have none
        num_steps_n=rng.integers(1, 9, size=n),
        sketch_nq=rng.standard_normal((n, sampler.sketch_size)),
        output_bias_nk=rng.standard_normal((n, sampler.output_bias_size)),
    )
    before = deepcopy(state)
    after = sampler.update(state, locked(cohort), locked(reports))
    _check_state(after)
    require(type(after) is type(state), "update returns a state of another type")
    require(same(before, state), "update changes the state in place")
    require(
        same(after, sampler.update(state, locked(cohort), locked(reports))),
        "update gives another state for the same state and reports",
    )
    # Rows of the silent hold nonsense now; a sampler that reads them ends elsewhere.
    other = deepcopy(reports)
    for column in other:
        if column is not other.responded_n:
            column[~responded_n] = 10**6
    require(
        same(after, sampler.update(state, locked(cohort), locked(other))),
        "update uses rows of clients that did not respond",
    )
    return after


def _check_size(cohorts: list[Cohort], n: int) -> None:
    """No more than n draws in the mean over cohorts, for a design may draw as many at random."""
    draws_c = np.array([cohort.count_n.sum() for cohort in cohorts])
    error = draws_c.std() / len(draws_c) ** 0.5
    require(
        draws_c.mean() <= n + _STANDARD_ERRORS * error,
        f"open draws {draws_c.mean():.3g} clients in the mean where n = {n} are asked for",
    )


def _check_means(cohorts: list[Cohort], available_m: BoolArray, n: int) -> None:
    """The mean of count / expected over many draws is 1, within the standard errors that the
    expectations imply.
    """
    sum_m = np.zeros(len(available_m))
    least_m = np.full(len(available_m), np.inf)
    for cohort in cohorts:
        sum_m[cohort.client_n] += cohort.count_n / cohort.expected_n
        least_m[cohort.client_n] = np.minimum(
            least_m[cohort.client_n],
            cohort.expected_n,
        )
    # Var(count / pi) is 1 / pi - 1 where a client is drawn once at most, and 1 / pi - 1 / n in n
    # draws.
    once = 1.0
    if cohorts[-1].kind == "replacement":
        once = 1 / n
    mean_m = sum_m / len(cohorts)
    error_m = np.sqrt(np.maximum(1 / least_m - once, 0) / len(cohorts))
    # 1e-9, as who is always selected has a standard error of 0, and a mean of 1 but for rounding.
    for i in np.flatnonzero(
        available_m & ~(np.abs(mean_m - 1) <= _STANDARD_ERRORS * error_m + 1e-9)
    ):
        fault = (
            f"count / expected of client {i} has mean {mean_m[i]:.3f} +- {error_m[i]:.3f}, not 1"
        )
        # Its expectation is in no cohort: it may be 0, or small.
        if np.isinf(least_m[i]):
            fault = (
                f"client {i} was in none of {len(cohorts)} draws; raise its score "
                "(deltafl.with_floor), or give more draws if so rare a client is meant"
            )
        raise AssertionError(f"the sampler claims to be unbiased, but {fault}")


def same(a: Any, b: Any) -> bool:
    """Whether two states, or cohorts, have the same numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"))
