"""Which memory an average of the last models should have: one run, judged with several.

    python benchmarks/averages.py [PART ...] [--seeds 4] [--first-seed 2000] [--out FILE]

An average changes no round, so a run of a method at its tuned rate in results/benchmark is played
once and judged with each memory. Printed is the gap between uniform sampling and full
participation, both without an average, that is closed by area, with Fieller's interval.
"""

import argparse
from pathlib import Path

import numpy as np

from deltafl import close_round, init_round, open_round
from deltafl.analysis import fieller
from deltafl.server.average import average_in, init_average
from deltafl.types import FloatArray
from first_updates import chosen, prepared, write_gaps
from reproduction.benchmark.parts import BASELINE, FULL, Part

MEMORIES = (0.0, 0.3, 0.5, 0.7, 0.9)
METHODS = (FULL, BASELINE, "innovation@local-pivotal", "census")


def areas(part: Part, label: str, rate: float, seed: int) -> FloatArray:
    """Mean accuracy over the rounds with each memory; 0 is the last model."""
    engine, plan = prepared(part.test_job(label, rate, seed).settings)
    state = init_round(plan, engine.initial_params())
    averages = [init_average(beta > 0, state.params_d) for beta in MEMORIES]
    accuracy_tk = np.zeros((part.horizon, len(MEMORIES)))
    for round, accuracy_k in enumerate(accuracy_tk):
        cohort = open_round(plan, state)
        training = engine.train(
            state.params_d, round, cohort.client_n, plan.drifts(state, cohort.client_n)
        )
        before_d = state.params_d
        state, _ = close_round(plan, state, cohort, training.update_nd, training.reports)
        for place, beta in enumerate(MEMORIES):
            averages[place] = average_in(beta, averages[place], before_d, state.params_d, round + 1)
            model_d = getattr(averages[place], "model_d", state.params_d)
            accuracy_k[place] = engine.evaluate(model_d).accuracy
    return np.asarray(accuracy_tk.mean(axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Which memory an average of the last models should have."
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = {}
    for part, rates in chosen(options.parts or ["digits"]):
        area = {
            name: np.array([areas(part, name, rates[name], seed) for seed in seeds])
            for name in METHODS
        }
        base_s = area[BASELINE][:, 0]
        for name, area_sk in area.items():
            for beta, own_s in zip(MEMORIES, area_sk.T, strict=True):
                found[f"{part.name}, {name}, {beta:g}"] = gap = fieller(
                    own_s - base_s, area[FULL][:, 0] - base_s
                )
                print(
                    (
                        f"{part.name:16} {name:26} {beta:3g} {gap.mean:.2f} [{gap.low:.2f}, "
                        f"{gap.high:.2f}]"
                    ),
                    flush=True,
                )
    write_gaps(options.out, seeds, found)


if __name__ == "__main__":
    main()
