"""Rounds in which clients reply with anything at all: does the model stay finite, does a round ever
end in an error?

    python benchmarks/lies.py [ROUNDS]

Every sampler takes turns, with a random estimator, design, optimizer, clip, norm guard and
momentum, 20 rounds each. Half of the replies are honest; the others are not finite, huge or tiny,
no list of numbers, or missing. Clients are away at random. A combination that deltafl refuses in a
sentence is not played.
"""

import logging
import random
import sys
from typing import Any

import numpy as np

import deltafl
from deltafl import (
    DESIGNS,
    ESTIMATORS,
    SAMPLERS,
    DeltaflError,
    KnownUpdates,
    Population,
    RemoteReply,
    Reports,
)

M = 8
D = 70
ENTRIES = [
    0.0,
    -0.0,
    1e-45,
    1e-320,
    1e-20,
    -3.0,
    1e6,
    9e17,
    -1e18,
    1.1e18,
    3e38,
    1e39,
    1e308,
    np.inf,
    -np.inf,
    np.nan,
]
ODD = [
    None,
    "x",
    [],
    7,
    [None] * D,
    ["1"] * D,
    [10**400] * D,
    np.ones(D + 1),
    np.ones((D, 1)),
    b"\xff" * D,
]
NUMBERS = [None, -1, 0, 1e-300, 1, 1e18, 1e19, 1e72, 1e308, 2**62, 2**70, np.inf, np.nan, "x"]
SETTINGS: dict[str, list[Any]] = {
    "norm_guard": [None, 3.0],
    "clip": [None, "median"],
    "mime": [0.0, 0.5],
    "response_floor": [0.1, 1.0],
}
OPTIMIZERS = ["sgd", "momentum", "adagrad", "adam", "yogi"]


def lie(rng: random.Random) -> Any:
    entry = rng.choice(ENTRIES)
    return rng.choice(
        [rng.choice(ODD), np.full(D, entry), np.array([rng.choice([entry, 1.0]) for _ in range(D)])]
    )


def play(name: str, rng: random.Random, numbers: np.random.Generator) -> int:
    """How many of 20 rounds one combination was played; 0 if it is refused."""
    design, estimator = (
        rng.choice(["", rng.choice(list(table))]) for table in (DESIGNS, ESTIMATORS)
    )
    more: dict[str, Any] = {name: rng.choice(values) for name, values in SETTINGS.items()}
    more["server_optimizer"] = deltafl.make_server_optimizer(rng.choice(OPTIMIZERS), 0.1, None)
    population = Population.from_sizes(numbers.integers(1, 100, M), aux=numbers.random((M, 2)))
    try:
        plan = deltafl.make_plan(f"{name}@{design}@{estimator}", population, 3, **more)
        state = deltafl.init_round(plan, np.zeros(D))
    except DeltaflError:
        return 0
    for _ in range(20):
        honest_md = numbers.normal(size=(M, D)).astype(np.float32)
        oracle = KnownUpdates(honest_md, population.weight_m, loss_m=np.ones(M))
        here_m = np.arange(M) % M == numbers.integers(M)
        cohort = deltafl.open_round(plan, state, here_m | (numbers.random(M) < 0.8), oracle)
        updates = [
            lie(rng) if rng.random() < 0.5 else honest_md[client] for client in cohort.client_n
        ]
        if estimator.endswith("-remote"):
            updates = [RemoteReply(update, rng.choice([-1, 0, 1, 5, 2**70])) for update in updates]
        claimed: Any = [
            [rng.choice(NUMBERS) if rng.random() < 0.3 else 1.0 for _ in updates] for _ in range(4)
        ]
        columns = dict(
            zip(("loss", "square_loss", "step_variance", "num_steps"), claimed, strict=True)
        )
        state, info = deltafl.close_round(
            plan, state, cohort, updates, Reports.make(len(updates), **columns)
        )
        assert np.isfinite([*state.params_d, info.estimate_norm]).all(), (
            name,
            design,
            estimator,
            more,
            state.round,
        )
    return 20


def main(rounds: int) -> None:
    logging.disable()
    rng = random.Random(0)
    numbers = np.random.default_rng(0)
    played = dict.fromkeys(SAMPLERS, 0)
    while sum(played.values()) < rounds:
        for name in SAMPLERS:
            played[name] += play(name, rng, numbers)
    print(
        f"{sum(played.values())} rounds, at least {min(played.values())} of every sampler: all "
        "models finite"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10000)
