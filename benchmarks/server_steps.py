"""What single steps of the server take, beside plain NumPy for the same job: closing a round,
balanced draws, a census.

    python benchmarks/server_steps.py [--repeats 5] [--out FILE]
    python benchmarks/server_steps.py --models 3e5 11e6 --clients 50 1000 --out FILE [--plot PNG]

- close: ``close_round`` of ``innovation``, 10 of 100 clients, models of 300,000 numbers; plain: the
  same estimate and memory with float64 rows, and nothing else: no screening, no variance, no
  coefficient that is learnt, no scores.
- cube: 20 of 1000 and 10^5 clients balanced on 10 numbers; plain: the flight phase as in the paper,
  a null vector of the next 11 clients by ``numpy.linalg.svd`` a step (1000 clients alone, as it
  takes ten seconds for 10^5). The same draws with the design ``anticluster``.
- census: the answers of 10^5 and 10^6 clients, 64 numbers and a norm each, become auxiliary
  variables; plain: principal components of all rows at once. Peak memory is in the file: that of
  the process, PyTorch's import included.

- models, with ``--models``: ``close_round`` of every recommended method, 10 clients, beside a plain
  loop over the replies in the same process: ``total += 0.1 * update`` with a float64 total;
  ``open_round`` and, for ``census``, a client's answer to it with an output layer of 5,130 numbers.
  Updates of more than 11 million parameters are mapped from a file. What would take more than 8 GB
  of memory is left out. The picture has a line of the seconds that reading the replies once takes.

Exponents are slopes between two sizes, by the median CPU time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import log10
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deltafl import (
    Census,
    Plan,
    Population,
    RoundState,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.designs.table import draw_cohort
from deltafl.estimators.two_bits import encode
from deltafl.scale.stretches import threads
from deltafl.streams import stream
from timing import Round, Variant, machine, plain_ticks, report, take_turns, versions, write_record

PARAMETERS = 300_000
CLIENTS = 100
COHORT = 10
COLUMNS = 10
DRAWN = 20
NUMBERS = 64
RECOMMENDED = (
    "uniform",
    "innovation@local-pivotal",
    "fedvarp",
    "balanced",
    "census",
    "census+average=0.5+scaffold",
    "census+average=0.5+mime=0.7",
)
#: Parameters of which updates are in memory; bytes of memory that are too many.
MAPPED = 11_000_000
LARGEST = 8e9
#: The output layer of a ResNet-18 for ten classes.
OUTPUT_LAYER = (5120, 10)


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


def first_state(label: str, m: int, d: int) -> tuple[Plan, RoundState]:
    """A plan and its state after a census, whose codes say the same of every client."""
    rng = stream(0, "noise", d, m)
    population = Population.from_sizes([3] * m, aux=rng.normal(size=(m, COLUMNS)))
    if label.startswith("census"):
        code_c = encode(rng.standard_normal(d, np.float32))
        population = population._replace(
            norm_m=rng.uniform(1, 2, size=m), code_mc=np.broadcast_to(code_c, (m, len(code_c)))
        )
    plan = make_plan(label, population, COHORT)
    return plan, init_round(plan, np.zeros(d, np.float32))


def bytes_of(label: str, d: int) -> int:
    """About what three rounds of a method hold in memory, but for mapped updates."""
    rows = 3 * COHORT * 4 * (label.startswith(("innovation", "fedvarp")))
    slopes = 3 * 4 * (COLUMNS + 1) * label.startswith(("census", "balanced"))
    return d * (rows + slopes + 60 + 4 * COHORT * (d <= MAPPED))


def replies(d: int, folder: str) -> np.ndarray:
    update_nd: np.ndarray = np.empty((COHORT, d), np.float32)
    if d > MAPPED:
        update_nd = np.memmap(Path(folder) / "updates", np.float32, "w+", shape=(COHORT, d))
    for place, update_d in enumerate(update_nd):
        for first in range(0, d, 10**6):
            part = update_d[first : first + 10**6]
            part[:] = 0.01 * stream(place, "noise", first).standard_normal(len(part), np.float32)
    return update_nd


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of one thread, as on a busy machine the clock says more of what else it does;
    seconds of the clock with several.
    """
    now = time.process_time if threads() == 1 else time.perf_counter
    start = now()
    work()
    return now() - start


def models(sizes: list[int], clients_of: list[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of closing a round, and of the plain loop between two of them."""
    rows = []
    for d, m in product(sizes, clients_of):
        with TemporaryDirectory() as folder:
            update_nd = replies(d, folder)

            def plain(update_nd: np.ndarray = update_nd) -> None:
                total_d = np.zeros(update_nd.shape[1])
                for update_d in update_nd:
                    total_d += 0.1 * update_d

            for label in RECOMMENDED:
                if bytes_of(label, d) > LARGEST or d * m * ("census" in label) > 2e10:
                    print(f"{label:28} {d:>11,} {m:>6,}  left out", flush=True)
                    continue
                plan, state = first_state(label, m, d)
                for _ in range(2):  # coefficients are learnt
                    state, _ = close_round(plan, state, open_round(plan, state), update_nd)
                cohort = open_round(plan, state)
                steps: dict[str, Callable[[], object]] = {
                    "plain_s": plain,
                    "open_s": partial(open_round, plan, state),
                    "close_s": partial(close_round, plan, state, cohort, update_nd),
                }
                if label == "census" and d >= sum(OUTPUT_LAYER):
                    assert plan.census is not None
                    steps["answer_s"] = partial(plan.census.answer, update_nd[0], OUTPUT_LAYER)
                turns = []
                for _ in range(repeats):
                    # The system may have handed the memory of the last turn's loop on.
                    plain()
                    turns.append({name: timed(step) for name, step in steps.items()})
                seconds = {name: [turn[name] for turn in turns] for name in steps}
                rows.append({"method": label, "parameters": d, "clients": m, **seconds})
                ratios = sorted(turn["close_s"] / turn["plain_s"] for turn in turns)
                plain_s, close_s = seconds["plain_s"], seconds["close_s"]
                best = min(close_s) / min(plain_s)
                others = [
                    f"  {name.removesuffix('_s')} {1e3 * median(seconds[name]):.1f} ms"
                    for name in steps
                    if name not in ("plain_s", "close_s")
                ]
                print(
                    f"{label:28} {d:>11,} {m:>6,}  plain {1e3 * min(plain_s):8.1f} ms  close "
                    f"{1e3 * min(close_s):8.1f} ms  best {best:6.2f}  "
                    f"median {median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    *others,
                    flush=True,
                )
                del state, steps
    return rows


def bandwidth() -> float:
    """Bytes a second that one thread reads of an array that no cache holds."""
    array = np.ones(2**26, np.float32)
    return float(array.nbytes / min(timed(array.max) for _ in range(5)))


def plot(rows: list[dict[str, Any]], rate: float, path: Path) -> None:
    """A PNG of the seconds over the size of the model, for the fewest clients."""
    from deltafl.analysis import small_png, styled

    with styled():
        figure = Figure(figsize=(5.4, 3.8), dpi=150, layout="constrained")
        axes = figure.subplots()
        clients = min(row["clients"] for row in rows)
        sizes = sorted({row["parameters"] for row in rows})
        for label in RECOMMENDED:
            own = [row for row in rows if row["method"] == label and row["clients"] == clients]
            x = [row["parameters"] for row in own]
            axes.loglog(x, [min(row["close_s"]) for row in own], marker="o", ms=3, label=label)
        plain = [min(min(row["plain_s"]) for row in rows if row["parameters"] == d) for d in sizes]
        axes.loglog(sizes, plain, "k--", label="plain loop")
        reading = [4 * COHORT * d / rate for d in sizes]
        axes.loglog(sizes, reading, "k:", label="memory's bandwidth")
        plain_ticks(axes)
        axes.set(xlabel="parameters", ylabel="seconds", title="Closing a round of ten replies")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        path.write_bytes(small_png(figure))


def main() -> None:
    """Time all steps, each beside its own plain form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns, >= 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--models", type=float, nargs="*", default=[], help="their parameters")
    parser.add_argument("--clients", type=int, nargs="*", default=[50])
    parser.add_argument("--plot", type=Path, help="PNG to write, of --models")
    options = parser.parse_args()
    if options.models:
        found = models([int(d) for d in options.models], options.clients, options.repeats)
        rate = bandwidth()
        about: dict[str, Any] = {"threads": threads(), "bytes_a_second": rate, "cohort": COHORT}
        if options.out:
            record = {"about": {**about, **machine()}, "versions": versions(), "rows": found}
            options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
        if options.plot:
            plot(found, rate, options.plot)
        return
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
