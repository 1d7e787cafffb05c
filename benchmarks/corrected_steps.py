"""When corrected local steps help: ``census`` with the average and ``scaffold``, and without, by
local steps a round.

    python benchmarks/corrected_steps.py [CASE ...] [--seeds 10] [--processes 2] [--out FILE]

A case is a linear model on digits or FashionMNIST. Each method has the local rate that
``deltafl.tune`` finds for it on seeds 1000 and 1001. Printed are both mean accuracies over the
rounds and their difference in points, with a paired 95 % interval. Test seeds begin at 3000: none
is a seed of results/benchmark.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import deltafl
from deltafl.analysis import mean_interval
from deltafl.simulation.training.serial import LocalWork
from deltafl.tasks import Task
from deltafl.tasks.models import mlp
from deltafl.tasks.registry import make_task
from timing import machine

WITHOUT = "census+average=0.5"
WITH = "census+average=0.5+scaffold"
FIRST_SEED = 3000
Settings = dict[str, Any]


def fashion(seed: int) -> Task:
    return make_task(
        "fashion-mnist", seed=seed, num_clients=100, alpha=0.1, make_model=partial(mlp, 784, (), 10)
    )


def digits(clients: int, sample: int, epochs: int) -> Settings:
    """100 clients have 15 examples each, in three minibatches; 300 have 5, in one."""
    of_task = {"task": "digits", "clients": clients, "sample": sample, "alpha": 0.1}
    return of_task | {"local_epochs": epochs, "batch_size": 5}


CASES: dict[str, Settings] = {
    **{
        f"digits, {m} clients, {e} epochs": digits(m, n, e)
        for m, n in ((100, 10), (300, 15))
        for e in (1, 2, 5, 10, 20)
    },
    "FashionMNIST": {"task": fashion, "sample": 10, "local_epochs": 1, "batch_size": 32},
}


def steps_of(settings: Settings) -> float:
    """The mean number of local steps a round."""
    given = settings["task"]
    task = (
        given(0)
        if callable(given)
        else make_task(given, seed=0, num_clients=settings["clients"], alpha=0.1)
    )
    work = LocalWork(lr=1.0, epochs=settings["local_epochs"], batch_size=settings["batch_size"])
    return float(
        mean(work.num_steps(size) for size in task.population("data").num_examples_m.tolist())
    )


def accuracies(
    settings: Settings, seeds: int, processes: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """The mean accuracy of each seed, in percent, and the rate of each method."""
    # No rate reaches the threshold, so rates are chosen by the mean accuracy.
    common = {**settings, "rounds": 60, "threshold": 1.0, "processes": processes, "progress": False}
    rates = [0.1, 0.2, 0.4] if callable(settings["task"]) else [0.4, 0.8, 1.6]
    with tempfile.TemporaryDirectory() as folder:
        tuned = deltafl.tune(
            samplers=[WITHOUT, WITH],
            out=f"{folder}/tuned",
            tuning_seeds=[1000, 1001],
            local_rates=rates,
            **common,
        )
        tested = range(FIRST_SEED, FIRST_SEED + seeds)
        out = f"{folder}/compared"
        runs = deltafl.compare(
            samplers=[*tuned], seeds=tested, out=out, report=False, rates=tuned, **common
        ).runs()
    found = runs[runs["round"] > 0].groupby(["sampler", "seed"])["accuracy"].mean() * 100
    return {label: found[label].to_numpy() for label in tuned}, {
        label: tuned[label]["local_lr"] for label in tuned
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="When corrected local steps help, by the local steps a round."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    found = {}
    for case in options.cases or CASES:
        accuracy, rates = accuracies(CASES[case], options.seeds, options.processes)
        gain = mean_interval(accuracy[WITH] - accuracy[WITHOUT])
        steps = steps_of(CASES[case])
        means = {label: float(value.mean()) for label, value in accuracy.items()}
        found[case] = {"steps": steps, **gain._asdict(), "mean_accuracy": means, "local_lr": rates}
        shown = f"{gain.mean:+.2f} [{gain.low:.2f}, {gain.high:.2f}]"
        print(
            (
                f"{case:28} {steps:5.1f} steps  {means[WITHOUT]:.2f}  {means[WITH]:.2f}  {shown}  "
                f"{rates}"
            ),
            flush=True,
        )
    if options.out:
        content = {
            "first_seed": FIRST_SEED,
            "seeds": options.seeds,
            "results": found,
            "machine": machine(),
        }
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
