"""Randomness: the only place where random generators are made.

Client 17 sees the same minibatches in round 5 whichever sampler selected it, in whichever order or
process it was trained, and after a resume.
"""

from operator import index
from threading import RLock

import numpy as np
from numpy.random import Generator

from .errors import DeltaflError, entry

#: What randomness is used for. The number is part of the stream's identity: never reuse or renumber
#: one.
PURPOSES: dict[str, int] = {
    "draw": 1,  # the cohort of a round
    "batches": 2,  # the order of a client's examples in a round
    "noise": 3,  # gradient noise of the synthetic task
    "model": 4,  # the initial model
    "partition": 5,  # who holds which example
    "data": 6,  # generated data sets
    "audit": 7,  # Monte Carlo in `deltafl audit`
    "bootstrap": 8,  # resampling of intervals
    "dropout": 9,  # random layers inside a user's model
    "augment": 10,  # what local training changes at random in a client's inputs
    "sketch": 11,  # buckets and signs of the sketches of updates
    "validation": 12,  # which of a client's examples are held out
    "public": 13,  # which examples the server may use
    "census": 14,  # noise of the answers to a census
    "world": 15,  # who is available, how long clients take, who drops out
    "code": 16,  # signs of the two-bit code of first updates
    "evaluation": 17,  # who evaluates a model
}

#: Held while a thread uses what a process has one of: the global generators of PyTorch, NumPy and
#: Python, the number of PyTorch's threads, the model that it trains. Other threads wait.
ONE_AT_A_TIME = RLock()


def stream(
    seed: int,
    purpose: str,
    round: int = 0,
    client: int = 0,
) -> Generator:
    """An independent generator (PCG64) for every combination of seed, purpose (in ``PURPOSES``),
    round and client.

    An unknown purpose, or what is no whole number of at least 0, is a ``DeltaflError``.
    """
    number = entry("purpose of randomness", purpose, PURPOSES)
    # As a spawn key and not added to the seed: two seeds have no stream in common.
    key = (number, round, client)
    try:
        # ``index``, for without a seed NumPy would take one from the system.
        entropy = np.random.SeedSequence(index(seed), spawn_key=key)
        return np.random.Generator(np.random.PCG64(entropy))
    except (TypeError, ValueError):
        raise DeltaflError(
            f"seed, round and client must be whole numbers >= 0, got {seed!r}, {round}, {client}"
        ) from None
