"""Why a method stays behind full participation: minibatch noise, the memory's age, or the first
tour.

    python benchmarks/noise_floor.py [--sampler innovation] [--rates 0.1 0.4 0.8 1.6] [--set
    task=mnist ...]
        [--seeds 3] [--out result.json]

The method is played, and before some of its rounds all clients are trained beside it, twice with
different minibatches: half of norm(u_i - u_i')^2 is the noise s_i^2 that no memory can know.
Everything is for even draws of fixed size, over norm(ubar)^2. With y_i = w_i (u_i - c_i) and ybar
their mean their error is, whatever the weights,

    (m/n - 1) m / (m - 1) sum norm(y_i - ybar)^2:

with c = 0 ("no memory"), and with the method's controls, over the clients that were seen ("seen")
and not ("unseen"). Of noise alone, which is independent from client to client, that is (m/n - 1)
sum w_i^2 s_i^2 on average, the floor of every memory ("noise").
"""

import argparse
import json
from pathlib import Path

import numpy as np

from deltafl import close_round, init_round, open_round
from deltafl.cli.options import assignment
from deltafl.errors import DeltaflError
from deltafl.estimators.table import find_estimator
from deltafl.simulation import RunSettings, environment, make_settings
from deltafl.types import BoolArray, FloatArray
from first_updates import prepared

ROUNDS = (3, 6, 10, 15, 20, 30)
COLUMNS = ("no memory", "noise", "seen", "unseen", "share seen", "accuracy")
#: The digits of the benchmark's first part; ``--set`` changes them.
DIGITS = {
    "task": "digits",
    "clients": 100,
    "sample": 10,
    "partition": "hsu2019",
    "alpha": 0.1,
    "local_epochs": 5,
    "batch_size": 5,
}
_OTHER_MINIBATCHES = 1_000_000  # added to a round's number: other streams


def play(settings: RunSettings) -> list[list[float]]:
    """One row of ``COLUMNS`` before each of ``ROUNDS``."""
    engine, plan = prepared(settings)
    state = init_round(plan, engine.initial_params())
    rows = []
    control = find_estimator(plan.estimator).control
    weight_m = plan.population.weight_m
    everyone = np.arange(len(weight_m))
    for done in range(max(ROUNDS)):
        if done + 1 in ROUNDS:
            update_md, other_md = (
                engine.train(state.params_d, label, everyone).update_nd.astype(np.float64)
                for label in (state.round, state.round + _OTHER_MINIBATCHES)
            )
            control_md = control.value(state.control, everyone).control_nd
            rows.append(
                _errors(weight_m, update_md, other_md, control_md, state.responded_m > 0, plan.n)
            )
            rows[-1].append(engine.evaluate(state.params_d).accuracy)
        cohort = open_round(plan, state)
        training = engine.train(state.params_d, state.round, cohort.client_n)
        state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
    return rows


def _errors(
    weight_m: FloatArray,
    update_md: FloatArray,
    other_md: FloatArray,
    control_md: FloatArray,
    seen_m: BoolArray,
    n: int,
) -> list[float]:
    """All of ``COLUMNS`` but the accuracy."""
    ubar_d = weight_m @ update_md
    value_md = weight_m[:, None] * update_md
    noise_m = weight_m**2 * np.sum((update_md - other_md) ** 2, axis=1) / 2
    left_m = error_of_even_draws(value_md - weight_m[:, None] * control_md, n)
    errors = [
        error_of_even_draws(value_md, n).sum(),
        (len(weight_m) / n - 1) * noise_m.sum(),
        left_m[seen_m].sum(),
        left_m[~seen_m].sum(),
    ]
    return [*(float(error / (ubar_d @ ubar_d)) for error in errors), float(seen_m.mean())]


def error_of_even_draws(value_md: FloatArray, n: int) -> FloatArray:
    """The parts, by client, of E norm((m / n) sum of n values, drawn evenly - sum of all)^2."""
    m = len(value_md)
    square_m = np.sum((value_md - value_md.mean(axis=0)) ** 2, axis=1)
    parts_m: FloatArray = (m / n - 1) * m / (m - 1) * square_m
    return parts_m


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sampler", default="innovation")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.4, 0.8, 1.6])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of deltafl run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    try:
        measure(given)
    except DeltaflError as error:
        parser.error(str(error))


def measure(given: argparse.Namespace) -> None:
    """Play the runs, print their tables, and write them."""
    if given.seeds < 1:
        raise DeltaflError(f"--seeds is {given.seeds}; write 1 or more")
    task = DIGITS | dict(map(assignment, given.set))
    tables: dict[str, list[list[float]]] = {}
    for rate in given.rates:
        runs = []
        for seed in range(given.seeds):
            own = {"rounds": max(ROUNDS), "local_lr": rate, "sampler": given.sampler, "seed": seed}
            runs.append(play(make_settings(RunSettings, task | own)))
        tables[f"{rate:g}"] = np.mean(runs, axis=0).round(4).tolist()
        print(
            f"local rate {rate:g}\n\n| round | "
            + " | ".join(COLUMNS)
            + " |\n|"
            + "---|" * (len(COLUMNS) + 1)
        )
        for label, row in zip(ROUNDS, tables[f"{rate:g}"], strict=True):
            print(f"| {label} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
        print(flush=True)
    if given.out:
        content = {
            "settings": task,
            "sampler": given.sampler,
            "seeds": given.seeds,
            "environment": environment(),
            "columns": COLUMNS,
            "rounds": ROUNDS,
            "rates": tables,
        }
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
