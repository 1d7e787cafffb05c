"""Models in stretches that stay in the cache: all passes over one, then those over the next.

A pass over whole rows of a large model waits for memory. Stretches are worked on in threads, but
what they give is put together in their order: no bit depends on the number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

Seen = TypeVar("Seen")

#: Parameters from which a model is large: while a round is closed its rows are of float32, as
#: updates come. That takes half the time and memory; of smaller models, Python's calls take most.
LARGE = 10**5
#: Parameters in the longest stretch where last bits hang on where it ends, as those of sums do;
#: in others, and what a thread takes at a time, a multiple of every stretch.
STRETCH = 2**13
TURN = 2**16
#: Parameters from which threads gain more than they lose by waiting for each other.
_FOR_THREADS = 2**22
#: Numbers in all rows of a stretch: fewer, and Python takes longer than what the cache saves.
_IN_CACHE = 2**17
#: The same of large models, whose calls shall be long, as a thread that is called waits for others.
_LONG_CALLS = 2**19
#: Shorter stretches take Python longer than NumPy.
_SHORTEST = 2**10
#: Bytes of blocks that malloc shall keep, less than the 32 MiB at which glibc stops to learn.
_KEPT = 2**24


def threads() -> int:
    """``OMP_NUM_THREADS``, which other libraries read as well; else the cores that this process
    may use.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return cores_allowed()


def cores_allowed() -> int:
    """Cores that this process may use: fewer than there are in some containers and queues."""
    with suppress(AttributeError):  # macOS and Windows do not say
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def float_type(num_params: int) -> type[np.floating[Any]]:
    """The type of rows of replies and predictions while a round is closed."""
    if num_params < LARGE:
        return np.float64
    return np.float32


def stretches(num_params: int, rows: float, alone: bool = False) -> list[slice]:
    """The parameters in turn, for work on so many rows, or less than one; starts are multiples of
    1024, as codes and folded sketches need. Where each number stands ``alone``, fewer and longer
    ones: Python's calls take as long.
    """
    is_large = num_params >= LARGE
    length = TURN if alone or is_large else STRETCH
    most = _LONG_CALLS if is_large else _IN_CACHE
    while length * rows > most and length > _SHORTEST:
        length //= 2
    parts = [slice(first, first + length) for first in range(0, max(num_params, 1), length)]
    # An open end: rows that are too long show.
    return [*parts[:-1], slice(parts[-1].start, None)]


def over_stretches(
    look: Callable[[slice], Seen],
    num_params: int,
    rows: int = 1,
    alone: bool = False,
) -> list[Seen]:
    """What a function gives for each stretch, in their order. It is called in several threads,
    and may write into its own stretch of arrays.
    """
    parts = stretches(num_params, rows, alone)
    # glibc keeps blocks for the next stretch that are shorter than one it was given back. Else
    # each would come from the system, page by page: that takes several times as long.
    np.empty(min(_KEPT, 64 * num_params), np.uint8)
    turn = TURN // (parts[0].stop or TURN)
    turns = [parts[first : first + turn] for first in range(0, len(parts), turn)]
    count = min(threads(), len(turns))
    if count < 2 or num_params < _FOR_THREADS:
        return [look(part) for part in parts]
    # Before NumPy 2.2 they belong to a thread.
    errors = np.geterr()

    def look_at(those: list[slice]) -> list[Seen]:
        with np.errstate(**errors):
            return [look(part) for part in those]

    with ThreadPoolExecutor(count) as pool:
        return [seen for found in pool.map(look_at, turns) for seen in found]
