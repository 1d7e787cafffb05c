"""What a round costs the server, from a thousand clients to ten million: every sampler that needs
no oracle.

    python benchmarks/server_scale.py [--largest 10000000] [--samplers pracdelta@ordered-pivotal
    ...] [--out FILE]

A round is ``open_round`` and ``close_round`` with a model of 10 parameters and 1000 clients asked
(a tenth of them all where they are fewer), a tenth of whom do not answer: what is measured is the
server, not models or their training. Every sampler and size has a process of its own, whose peak of
resident memory is that of its rounds. A sampler is not taken to ten times the clients once its
rounds take more than two seconds. The exponent is the slope of log seconds over log clients from
10^4 on, where always 1000 are asked. A file that is there already keeps its rows of other samplers.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from deltafl import (
    SAMPLERS,
    Cohort,
    Plan,
    Population,
    Reports,
    RoundState,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.state_file import load_state, save_state
from deltafl.streams import stream

PARAMETERS = 10
ASKED = 1000
ROUNDS = 25
FEWEST_ROUNDS = 3
SECONDS = 6.0
SLOWEST = 2.0
LONGEST = 90
TREES = [
    "pracdelta@ordered-pivotal",
    "fedpracis@ordered-pivotal",
    "uniform@ordered-pivotal",
    "md-fixed@ordered-pivotal",
]
OTHERS = [
    name
    for name, entry in SAMPLERS.items()
    if entry.needs not in {"oracle", "losses", "everyone"} and name not in {"fedvarp", "fedstale"}
]


def plan_for(label: str, m: int) -> Plan:
    population = Population.from_sizes((1 + np.arange(m) % 7).astype(np.int8))
    return make_plan(label, population, min(ASKED, m // 10))


def replies(state: RoundState, cohort: Cohort) -> tuple[Any, Reports]:
    rng = stream(1, "noise", state.round)
    n = len(cohort.client_n)
    update_nd = (rng.normal(size=(n, PARAMETERS)) * rng.lognormal(size=(n, 1))).astype(np.float32)
    responded = rng.random(n) < 0.9
    step_variance = rng.exponential(size=n)
    reports = Reports.make(
        n, responded=responded, step_variance=step_variance, loss=rng.exponential(size=n)
    )
    return update_nd, reports


def play(plan: Plan, state: RoundState) -> tuple[RoundState, float, float]:
    """One round; seconds of opening and of closing it."""
    begin = time.perf_counter()
    cohort = open_round(plan, state)
    opened = time.perf_counter()
    update_nd, reports = replies(state, cohort)
    closing = time.perf_counter()
    state, _ = close_round(plan, state, cohort, update_nd, reports)
    return state, opened - begin, time.perf_counter() - closing


def peak_memory() -> int:
    """Bytes: the peak of this process's resident memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(label: str, m: int) -> dict[str, Any]:
    """One sampler with m clients, in this process."""
    before = peak_memory()
    plan = plan_for(label, m)
    begin = time.perf_counter()
    state = init_round(plan, np.zeros(PARAMETERS))
    started = time.perf_counter() - begin
    state, *_ = play(plan, state)
    opens = list[float]()
    closes = list[float]()
    begin = time.perf_counter()
    while len(opens) < (ROUNDS if time.perf_counter() - begin < SECONDS else FEWEST_ROUNDS):
        state, opened, closed = play(plan, state)
        opens.append(opened)
        closes.append(closed)
    peak = peak_memory()
    seconds = [a + b for a, b in zip(opens, closes, strict=True)]
    return {
        "sampler": label,
        "clients": m,
        "asked": plan.n,
        "rounds": len(seconds),
        "load": os.getloadavg()[0],
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "open_seconds": statistics.median(opens),
        "close_seconds": statistics.median(closes),
        "start_seconds": started,
        "peak_bytes": peak,
        "peak_bytes_before": before,
        **files(plan, state),
    }


def files(plan: Plan, state: RoundState) -> dict[str, float]:
    """The state as a file, mapped into memory again: its bytes a client, seconds, and a round
    after loading.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        begin = time.perf_counter()
        save_state(path, state, plan)
        saved = time.perf_counter()
        loaded = load_state(path, plan)
        mapped = time.perf_counter()
        _, opened, closed = play(plan, loaded)
        return {
            "state_bytes_per_client": path.stat().st_size / plan.population.num_clients,
            "save_seconds": saved - begin,
            "load_seconds": mapped - saved,
            "round_after_load_seconds": opened + closed,
        }


def in_own_process(label: str, m: int) -> dict[str, Any] | None:
    """None if it fails, for want of memory or of time."""
    command = [sys.executable, __file__, "--one", label, str(m)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        print(f"{label} with {m} clients: more than {LONGEST} seconds")
        return None
    if done.returncode != 0:
        print(f"{label} with {m} clients: {done.stderr.strip().splitlines()[-1:]}")
        return None
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Slope of log seconds over log clients, where 1000 are asked and there are two sizes at
    least.
    """
    result = {}
    for label in dict.fromkeys(row["sampler"] for row in rows):
        points = [
            (row["clients"], row["seconds"]["median"]) for row in rows if row["sampler"] == label
        ]
        large = np.log([point for point in points if point[0] >= 10 * ASKED]).reshape(-1, 2)
        if len(large) >= 2:
            result[label] = round(float(np.polyfit(large[:, 0], large[:, 1], 1)[0]), 3)
    return result


def kept(out: Path | None, samplers: list[str]) -> list[dict[str, Any]]:
    """The rows of other samplers in the file that is there."""
    if out is None or not out.exists():
        return []
    return [
        row
        for row in json.loads(out.read_text(encoding="utf-8"))["rows"]
        if row["sampler"] not in samplers
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds of a round over clients; the trees in colour, the others in grey."""
    from matplotlib.figure import Figure

    from deltafl.analysis import GREY, looks, small_png, styled
    from timing import plain_ticks  # here, as it imports PyTorch

    look_of = looks(["pracdelta@ordered-pivotal", "pracdelta", "uniform", "innovation"])
    with styled():
        figure = Figure(figsize=(5.4, 3.8), dpi=150, layout="constrained")
        axes = figure.subplots()
        for label in dict.fromkeys(row["sampler"] for row in rows):
            points = [
                (row["clients"], 1e3 * row["seconds"]["median"])
                for row in rows
                if row["sampler"] == label
            ]
            x, y = zip(*points, strict=True)
            if label in look_of:
                colour, dash, marker, order = look_of[label]
                axes.loglog(
                    x,
                    y,
                    color=colour,
                    linestyle=dash,
                    zorder=order,
                    marker=marker,
                    markersize=3,
                    label=label,
                )
            elif "@" not in label:
                axes.loglog(x, y, color=GREY, alpha=0.35, linewidth=0.8, zorder=1)
        axes.plot([], [], color=GREY, alpha=0.35, linewidth=0.8, label="other samplers")
        plain_ticks(axes)
        axes.set(
            xlabel="clients",
            ylabel="milliseconds a round",
            title="A round at the server, 1000 clients asked (100 of 1000)",
        )
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        path.write_bytes(small_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2, metavar=("SAMPLER", "CLIENTS"))
    parser.add_argument("--largest", type=int, default=10**7)
    parser.add_argument("--samplers", nargs="*", default=[*TREES, *OTHERS])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--plot",
        type=Path,
        help="a PNG of all rows of --out; with --samplers and no names, nothing is measured",
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    from deltafl.simulation import environment

    rows = kept(options.out, options.samplers)
    for label in options.samplers:
        m = 1000
        while m <= options.largest and (row := in_own_process(label, m)) is not None:
            rows.append(row)
            print(
                f"{label:28} {m:>9} clients  {1e3 * row['seconds']['median']:9.2f} ms "
                f"({1e3 * row['seconds']['min']:.2f} to {1e3 * row['seconds']['max']:.2f})  "
                f"{row['state_bytes_per_client']:7.2f} B a client  {row['peak_bytes'] / 1e6:6.0f} "
                "MB",
                flush=True,
            )
            if row["seconds"]["median"] > SLOWEST:
                break
            m *= 10
    result = {
        "about": {
            "cpu": environment()["processor"],
            "cores": os.cpu_count(),
            "parameters": PARAMETERS,
        },
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
        "exponents": exponents(rows),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["exponents"], indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
