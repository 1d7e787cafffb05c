"""For which models corrected local steps help: ``census`` with ``scaffold`` and without, on FashionMNIST, by model.

    python benchmarks/corrected_steps.py [MODEL ...] [--seeds 5] [--processes 2] [--out FILE]

100 clients with labels by Dir(0.1), 10 selected a round, one epoch of 32, 60 rounds. Each method has the local rate
that ``deltafl.tune`` finds for it on seeds 1000 and 1001. Then the gap between uniform sampling and full participation
that is closed by area, with Fieller's interval. The models: softmax regression, and a hidden layer of 100 before it.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import deltafl
from deltafl.analysis import fieller
from deltafl.tasks import Task
from deltafl.tasks.models import mlp
from deltafl.tasks.registry import make_task
from timing import machine

HIDDEN = {"softmax regression": (), "hidden layer of 100": (100,)}


def fashion(hidden: tuple[int, ...], seed: int) -> Task:
    return make_task("fashion-mnist", seed=seed, num_clients=100, alpha=0.1, make_model=partial(mlp, 784, hidden, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description="For which models corrected local steps help.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(HIDDEN))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    found = {}
    for model in options.models or HIDDEN:
        common = {"rounds": 60, "sample": 10, "local_epochs": 1, "batch_size": 32, "processes": options.processes}
        area, rate = dict[str, np.ndarray](), dict[str, float]()
        for name, samplers, scaffold in (("", ["full", "uniform", "census"], False), ("+scaffold", ["census"], True)):
            with tempfile.TemporaryDirectory() as folder:
                given = common | ({"scaffold": True} if scaffold else {})
                task = partial(fashion, HIDDEN[model])
                rates = deltafl.tune(
                    task,
                    samplers,
                    out=f"{folder}/tuned",
                    tuning_seeds=[1000, 1001],
                    local_rates=[0.1, 0.2, 0.4],
                    extensions=2,
                    **given,
                )
                runs = deltafl.compare(
                    task, samplers, options.seeds, out=f"{folder}/compared", report=False, rates=rates, **given
                ).runs()
            for label, own in runs[runs["round"] > 0].groupby("sampler"):
                area[f"{label}{name}"] = own.groupby("seed")["accuracy"].mean().to_numpy()
                rate[f"{label}{name}"] = rates[str(label)]["local_lr"]
        for label in ("census", "census+scaffold"):
            gap = fieller(area[label] - area["uniform"], area["full"] - area["uniform"])
            found[f"{model}, {label}"] = gap._asdict() | {"local_lr": rate[label], "mean_accuracy": area[label].mean()}
            print(f"{model:20} {label:16} {gap.mean:.2f} [{gap.low:.2f}, {gap.high:.2f}] at {rate[label]}", flush=True)
        print(f"{'':20} full {area['full'].mean():.3f}, uniform {area['uniform'].mean():.3f}, {rate}", flush=True)
    if options.out:
        content = {"seeds": [*range(options.seeds)], "results": found, "machine": machine()}
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
