"""What single steps of the server take, beside plain NumPy for the same job: closing a round,
balanced draws, a census.

    python benchmarks/server_steps.py [--repeats 5] [--out FILE]

- close: ``close_round`` of ``innovation``, 10 of 100 clients, models of 300,000 numbers; plain: the
  same estimate and memory with float64 rows, and nothing else: no screening, no variance, no
  coefficient that is learnt, no scores.
- cube: 20 of 1000 and 10^5 clients balanced on 10 numbers; plain: the flight phase as in the paper,
  a null vector of the next 11 clients by ``numpy.linalg.svd`` a step (1000 clients alone, as it
  takes ten seconds for 10^5). The same draws with the design ``anticluster``.
- census: the answers of 10^5 and 10^6 clients, 64 numbers and a norm each, become auxiliary
  variables; plain: principal components of all rows at once. Peak memory is in the file: that of
  the process, PyTorch's import included.

Exponents are slopes between two sizes, by the median CPU time.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import log10
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from deltafl import Census, Population, close_round, init_round, make_plan, open_round
from deltafl.designs.table import draw_cohort
from deltafl.streams import stream
from timing import Round, Variant, report, take_turns, write_record

PARAMETERS = 300_000
CLIENTS = 100
COHORT = 10
COLUMNS = 10
DRAWN = 20
NUMBERS = 64


def updates(seed: int) -> np.ndarray:
    return stream(seed, "noise").normal(size=(COHORT, PARAMETERS)).astype(np.float32)


@contextmanager
def close() -> Iterator[Round]:
    plan = make_plan("innovation", np.arange(1, CLIENTS + 1), COHORT)
    state = init_round(plan, np.zeros(PARAMETERS))
    for seed in range(30):  # until most clients have a memory
        state, _ = close_round(plan, state, open_round(plan, state), updates(seed))
    cohort = open_round(plan, state)
    update_nd = updates(30)
    yield lambda: close_round(plan, state, cohort, update_nd)


@contextmanager
def plain_close() -> Iterator[Round]:
    params_d, total_d = np.zeros((2, PARAMETERS))
    memory_md = np.stack([updates(seed)[0] for seed in range(CLIENTS)])
    client_n = np.arange(COHORT)
    coef_n = np.ones(COHORT) / COHORT
    weight_n = np.ones(COHORT)
    update_nd = updates(30)

    def one_round() -> None:
        nonlocal total_d, params_d
        residual_nd = update_nd - memory_md[client_n].astype(np.float64)
        params_d = params_d + total_d + coef_n @ residual_nd
        total_d = total_d + (weight_n / CLIENTS) @ residual_nd
        memory_md[client_n] = update_nd

    yield one_round


def clients(m: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and values."""
    rng = stream(0, "audit", m)
    return rng.uniform(1, 3, size=m), rng.normal(size=(m, COLUMNS))


@contextmanager
def balanced(design: str, m: int) -> Iterator[Round]:
    score_m, value_mq = clients(m)
    yield lambda: draw_cohort(score_m, DRAWN, design, stream(0, "draw"), None, value_mq)


@contextmanager
def plain_cube(m: int) -> Iterator[Round]:
    score_m, value_mq = clients(m)

    def one_round() -> None:
        rng = stream(0, "draw")
        pi_m = DRAWN * score_m / score_m.sum()
        balance_mc = np.column_stack([pi_m, value_mq]) / pi_m[:, None]
        window = np.arange(COLUMNS + 2)
        entered = COLUMNS + 2
        while len(window) == COLUMNS + 2:
            way_w = np.linalg.svd(balance_mc[window].T)[2][-1]
            pi_w = pi_m[window]
            ends = np.where(way_w > 0, [1 - pi_w, pi_w], [pi_w, 1 - pi_w]) / np.maximum(
                np.abs(way_w), 1e-300
            )
            ahead, behind = ends.min(axis=1)
            step = ahead if rng.random() < behind / (ahead + behind) else -behind
            pi_w = pi_w + step * way_w
            pi_w[np.minimum(pi_w, 1 - pi_w) < 1e-9] = np.round(
                pi_w[np.minimum(pi_w, 1 - pi_w) < 1e-9]
            )
            pi_m[window] = pi_w
            window = window[(pi_w > 0) & (pi_w < 1)]
            more = COLUMNS + 2 - len(window)
            window = np.append(window, np.arange(entered, min(entered + more, m)))
            entered = entered + more

    yield one_round


def answers(m: int) -> np.ndarray:
    answer_mk = np.empty((m, NUMBERS + 1))
    for first in range(0, m, 10_000):
        part = answer_mk[first : first + 10_000]
        part[:] = stream(first, "noise").random(part.shape)
    return answer_mk


@contextmanager
def census(m: int) -> Iterator[Round]:
    population = Population.from_sizes(1 + np.arange(m) % 7)
    answer_mk = answers(m)
    asked = Census(COLUMNS, NUMBERS)
    yield lambda: asked.population(population, answer_mk)


@contextmanager
def plain_census(m: int) -> Iterator[Round]:
    answer_mk = answers(m)

    def one_round() -> None:
        sketch_mk = answer_mk[:, :-1] / np.linalg.norm(answer_mk[:, :-1], axis=1, keepdims=True)
        sketch_mk -= sketch_mk.mean(axis=0)
        sketch_mk @ np.linalg.eigh(sketch_mk.T @ sketch_mk)[1][:, -COLUMNS:]

    yield one_round


def main() -> None:
    """Time all steps, each beside its own plain form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    steps: list[dict[str, Variant]] = [
        {"close, plain": plain_close, "close innovation": close},
        {
            "cube 1000, plain": partial(plain_cube, 1000),
            "cube 1000": partial(balanced, "cube", 1000),
            "cube 10^5": partial(balanced, "cube", 10**5),
            "anticluster 1000": partial(balanced, "anticluster", 1000),
            "anticluster 10^5": partial(balanced, "anticluster", 10**5),
        },
        {
            "census 10^6, plain": partial(plain_census, 10**6),
            "census 10^6": partial(census, 10**6),
            "census 10^5": partial(census, 10**5),
        },
    ]
    rows: dict[str, dict[str, Any]] = {}
    for variants in steps:
        rows |= report(take_turns(variants, options.repeats), next(iter(variants)), 1)
    exponents = {
        "cube": log10(median(rows["cube 10^5"]["cpu_s"]) / median(rows["cube 1000"]["cpu_s"])) / 2,
        "census": log10(
            median(rows["census 10^6"]["cpu_s"]) / median(rows["census 10^5"]["cpu_s"])
        ),
    }
    print("exponents", {name: round(value, 2) for name, value in exponents.items()})
    print("peak GiB", {name: round(row["peak_gib"], 2) for name, row in rows.items()})
    about = {"parameters": PARAMETERS, "cohort": COHORT, "clients": CLIENTS, "exponents": exponents}
    write_record(options.out, about, rows)


if __name__ == "__main__":
    main()
