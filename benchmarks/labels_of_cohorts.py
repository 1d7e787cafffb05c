"""Whom a method prefers: how many labels the clients that it selects hold, from the benchmark's
records.

    python benchmarks/labels_of_cohorts.py [PART ...] [--data-dir FOLDER]

For every method of a part (``mnist-dirichlet`` if none is named): the mean over draws of the
entropy of the selected client's labels, in nats, and the share of clients that were selected at
all; the mean over seeds and its 95 % interval. The row "all" is the mean over clients. Clients with
many labels drift less from one another, so that a method which prefers them can be faster than full
participation, whose model it does not learn.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from deltafl.analysis.statistics import mean_interval
from deltafl.samplers.fed_ent_opt import entropies
from deltafl.simulation.record import RunStore
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import task_of
from deltafl.tasks import import_tasks

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
import_tasks("reproduction.data")


def main() -> None:
    parser = argparse.ArgumentParser(description="How many labels the selected clients hold.")
    parser.add_argument("parts", nargs="*", default=["mnist-dirichlet"], metavar="PART")
    parser.add_argument("--data-dir", help="folder with data sets")
    options = parser.parse_args()
    for part in options.parts:
        entropy_m: dict[int, np.ndarray] = {}
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for record in RunStore(ROOT / "results" / "benchmark").records(part):
            settings = make_settings(
                RunSettings, record.settings | {"data_dir": options.data_dir, "public": None}
            )
            if settings.seed not in entropy_m:
                entropy_m[settings.seed] = entropies(task_of(settings).label_shares())
            draws_m = np.array(record.draws)
            of_m = entropy_m[settings.seed]
            found[record.sampler].append(
                (float(draws_m @ of_m / draws_m.sum()), float(np.mean(draws_m > 0)))
            )
        found["all"] = [(float(of_m.mean()), 1.0) for of_m in entropy_m.values()]
        print(f"{part}\n{'':42}{'entropy of labels, nats':>30}{'share selected':>16}")
        for name, pairs in sorted(
            found.items(), key=lambda item: -np.mean([entropy for entropy, _ in item[1]])
        ):
            entropy_s, share_s = np.array(pairs).T
            mean, low, high = mean_interval(entropy_s)
            print(f"{name:42}{mean:14.3f} [{low:.3f}, {high:.3f}]{share_s.mean():16.2f}")


if __name__ == "__main__":
    main()
