"""How wrong estimates are while ``census`` plays, by form of its estimator, and what no estimator
can know.

    python benchmarks/replay.py [PART ...] [--seeds 3] [--rounds 16] [--draws 12] [--out FILE]

A run of ``census`` at its tuned rate in results/benchmark, on seeds from 2000, gives models and the
updates of *all* clients in every round. The same rounds are then played again at these models, with
other cohorts. An error is that of the estimate, E norm(D - ubar)^2, over that of uniform draws of
the same size. The forms are those of ``first_updates.py``; the oracle has c_i = the update of
client i from the same model by other minibatches.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltafl import Plan, close_round, init_round, open_round
from deltafl.estimators.control_variates import ControlValue, ControlVariate
from deltafl.samplers import parse_label
from deltafl.types import FloatArray, IntArray, Params, Population
from first_updates import FORMS, chosen, prepared
from reproduction.benchmark.parts import Part
from timing import machine

#: Rounds over which errors are averaged; round 1 is the census.
SPANS = {"round 2": slice(0, 1), "rounds 3 to 5": slice(1, 4), "later": slice(4, None)}


class OracleState(NamedTuple):
    """How many rounds were closed."""

    rounds: int


@dataclass(frozen=True, eq=False)
class Oracle(ControlVariate):
    """c_i = ``known_tmd`` of the round."""

    known_tmd: Params
    weight_m: FloatArray

    def init(self, population: Population, num_params: int) -> OracleState:  # noqa: D102
        return OracleState(0)

    def value(self, state: OracleState, client_n: IntArray) -> ControlValue:  # noqa: D102
        known_md = self.known_tmd[state.rounds].astype(np.float64)
        return ControlValue(self.weight_m @ known_md, known_md[client_n])

    def update(self, state: OracleState, *_: object) -> OracleState:  # noqa: D102
        return OracleState(state.rounds + 1)


def trajectory(part: Part, rate: float, seed: int, rounds: int) -> tuple[Plan, Params, Params]:
    """The plan of a run after its census; all updates of its rounds, (t, m, d), and those by
    other minibatches.
    """
    engine, plan = prepared(part.test_job("census", rate, seed).settings)
    state = init_round(plan, engine.initial_params())
    everybody = np.arange(plan.population.num_clients)
    update_tmd = []
    other_tmd = []
    for round in range(rounds):
        update_tmd.append(engine.train(state.params_d, round, everybody).update_nd)
        other_tmd.append(engine.train(state.params_d, rounds + round, everybody).update_nd)
        cohort = open_round(plan, state)
        state, _ = close_round(plan, state, cohort, update_tmd[-1][cohort.client_n])
    return plan, np.array(update_tmd), np.array(other_tmd)


def errors(plan: Plan, update_tmd: Params, draws: int) -> FloatArray:
    """E norm(D - ubar)^2 of every round, over that of uniform draws without a prediction."""
    weight_m = plan.population.weight_m
    m = plan.population.num_clients
    n = plan.n
    error_rt = np.zeros((draws, len(update_tmd)))
    for draw, row_t in enumerate(error_rt):
        again = replace(plan, seed=draw)
        state = init_round(again, np.zeros(update_tmd.shape[2]))
        for t, update_md in enumerate(update_tmd):
            state = state._replace(params_d=np.zeros_like(state.params_d))
            cohort = open_round(again, state)
            state, _ = close_round(again, state, cohort, update_md[cohort.client_n])
            row_t[t] = np.sum((state.params_d - weight_m @ update_md) ** 2)
    uniform_t = [
        (m * weight_m[:, None] * update_md).var(axis=0, ddof=1).sum() for update_md in update_tmd
    ]
    return np.asarray(error_rt.mean(axis=0) / ((1 - n / m) / n * np.array(uniform_t)))


def main() -> None:
    parser = argparse.ArgumentParser(description="How wrong estimates are while census plays.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for part, rates in chosen(options.parts):
        rows: dict[str, list[FloatArray]] = {form: [] for form in [*FORMS, "oracle"]}
        for seed in range(2000, 2000 + options.seeds):
            plan, update_tmd, other_tmd = trajectory(part, rates["census"], seed, options.rounds)
            for form, label in FORMS.items():
                form_plan = replace(plan, estimator=parse_label(label).estimator)
                rows[form].append(errors(form_plan, update_tmd, options.draws))
            oracle = replace(plan, estimator=Oracle(other_tmd, plan.population.weight_m))
            rows["oracle"].append(errors(oracle, update_tmd, options.draws))
        for form, error_st in rows.items():
            means = {
                span: float(np.mean([error_t[which] for error_t in error_st]))
                for span, which in SPANS.items()
            }
            found[f"{part.name}, {form}"] = means
            print(
                f"{part.name:20} {form:34}",
                *(f"{span} {mean:.2f}" for span, mean in means.items()),
                flush=True,
            )
    if options.out:
        settings = {"seeds": options.seeds, "rounds": options.rounds, "draws": options.draws}
        content = {"settings": settings, "results": found, "machine": machine()}
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
