"""Ideas for samplers and controls, the losers too, on one task with the same seeds: what docs/lab-notes.md reports.

    python benchmarks/ideas.py [--task digits] [--set clients=100 ...] [--rounds 50] [--seeds 10] [--out result.json]
    python benchmarks/ideas.py --group known ...
    python benchmarks/ideas.py --show result.json
    python benchmarks/ideas.py --notes docs/lab-notes.md

Each idea is a plan: a sampler, an estimator, sometimes a control that exists only here. All run on the same clients,
initial models and minibatches. The group ``memory`` is told nothing of the clients but their sizes, ``known`` their
shares of labels as well. Reported are the mean accuracy over all rounds (which ranks methods with less noise than
the rounds to a threshold), paired with that of FedVARP and with that of the group's default, and the rounds to the
task's threshold; a run that never reaches it counts as all its rounds, and the mean is marked with ≥.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from deltafl import SAMPLERS, Centred, Plan, Sampler, close_round, init_round, make_sampler, open_round
from deltafl.cli.options import assignment
from deltafl.errors import DeltaflError, unknown_name
from deltafl.estimators.control_variates import ControlVariate, InnovationControl, RegressionControl
from deltafl.estimators.learned_coefficient import LearnedCoefficient
from deltafl.estimators.table import ESTIMATORS, Estimator, horvitz_thompson
from deltafl.samplers.balanced import Balanced
from deltafl.samplers.hics import HicsFL
from deltafl.simulation.engine import Engine, reports_of
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of
from deltafl.simulation.versions import environment
from idea_known import BalancedInnovation, ResidualControl
from idea_parts import DeviationControl, EndpointControl, NeighbourControl, OneKindOfVisit, TourFirst
from idea_tables import CHANCE, Accuracies, read_ideas, table, write_tables


class Idea(NamedTuple):
    """A sampler and an estimator or a control of its own."""

    sampler: Sampler
    estimator: str | ControlVariate


def ideas_with_labels() -> dict[str, Idea]:
    """The same where the server knows the clients' labels."""
    names = ["full", "uniform", "pracdelta", "fedvarp", "innovation", "fed-cbs", "md-fixed"]
    compared = {name: Idea(make_sampler(name), SAMPLERS[name].estimator) for name in names}
    return compared | {
        "balanced (the default)": Idea(Balanced(), "regression-damped"),
        "balanced, no control": Idea(Balanced(), "horvitz-thompson"),
        "spread over the labels: local pivotal": Idea(Balanced("local-pivotal"), "regression-damped"),
        "regression alone, drawn by weight": Idea(make_sampler("md-fixed"), "regression-damped"),
        "regression alone, drawn evenly": Idea(make_sampler("uniform"), "regression-damped"),
        "B follows faster: memory 0.2": Idea(Balanced(), LearnedCoefficient(RegressionControl(memory=0.2))),
        "B follows slower: memory 0.8": Idea(Balanced(), LearnedCoefficient(RegressionControl(memory=0.8))),
        "B without the coefficient beta": Idea(Balanced(), "regression"),
        "and the clients' own memory": Idea(Balanced(), LearnedCoefficient(ResidualControl())),
        "the same, with innovation's scores": Idea(BalancedInnovation(), LearnedCoefficient(ResidualControl())),
        "innovation's memory instead of B": Idea(Balanced(), "innovation-damped"),
    }


def ideas() -> dict[str, Idea]:
    """What was tried; the first ones are what the others are compared with."""
    ours = Centred(own_memory=True)
    variants: dict[str, tuple[dict[str, object], str | ControlVariate]] = {
        "innovation (the default)": ({}, "innovation-damped"),
        "without the coefficient beta": ({}, "innovation"),
        "no ageing, first visits not told from others": ({"own_memory": False}, "innovation-damped"),
        "no ageing": ({"ageing": 0.0}, "innovation-damped"),
        "ageing 4": ({"ageing": 4.0}, "innovation-damped"),
        "explore 2": ({"explore": 2.0}, "innovation-damped"),
        "explore 4": ({"explore": 4.0}, "innovation-damped"),
        "explore 16, floor 0.1": ({"explore": 16.0, "floor": 0.1}, "innovation-damped"),
        "shrink 0": ({"shrink": 0.0}, "innovation-damped"),
        "shrink 0.5": ({"shrink": 0.5}, "innovation-damped"),
        "shrink 1 (no own scores)": ({"shrink": 1.0}, "innovation-damped"),
        "floor 0.05": ({"floor": 0.05}, "innovation-damped"),
        "floor 0.1": ({"floor": 0.1}, "innovation-damped"),
        "floor 0.4": ({"floor": 0.4}, "innovation-damped"),
        "forgetting 1 (the last visit alone)": ({"forgetting": 1.0}, "innovation-damped"),
        "forgetting 0.2": ({"forgetting": 0.2}, "innovation-damped"),
        "unseen clients guessed as zero": ({}, "difference-own-damped"),
        "common c: memory 0.9": ({}, LearnedCoefficient(InnovationControl(memory=0.9))),
        "common c: memory 0.3": ({}, LearnedCoefficient(InnovationControl(memory=0.3))),
        "memory of deviations from c": ({}, DeviationControl()),
        "memory of deviations, 2 % lost a round": ({}, DeviationControl(decay=0.98)),
        "memory of where clients ended": ({}, EndpointControl()),
        "memories that move with their neighbours": ({}, LearnedCoefficient(NeighbourControl(power=8.0))),
        "the same, with farther neighbours": ({}, LearnedCoefficient(NeighbourControl(power=2.0))),
        "spread: local pivotal": ({"design": "local-pivotal"}, "innovation-damped"),
        "balanced: cube": ({"design": "cube"}, "innovation-damped"),
        "local pivotal, sketch of 32": ({"design": "local-pivotal", "sketch": 32}, "innovation-damped"),
    }
    rivals = {
        "full": Idea(make_sampler("full"), "horvitz-thompson"),
        "uniform": Idea(make_sampler("uniform"), "horvitz-thompson"),
        "fedvarp": Idea(make_sampler("fedvarp"), "difference-own"),
        "pracdelta": Idea(make_sampler("pracdelta"), "horvitz-thompson"),
        "delta-centred": Idea(make_sampler("delta-centred"), "difference"),
        "spread": Idea(make_sampler("spread"), "difference"),
        "delta-centred, local pivotal": Idea(make_sampler("delta-centred@local-pivotal"), "difference"),
        "delta-centred, cube": Idea(make_sampler("delta-centred@cube"), "difference"),
    }
    fewer = {
        "delta-centred, beta learnt": Idea(make_sampler("delta-centred"), "difference-damped"),
        "spread, beta learnt": Idea(make_sampler("spread"), "difference-damped"),
        "delta-centred, floor 0.05": Idea(Centred(floor=0.05), "difference"),
        "delta-centred, shrink 0": Idea(Centred(shrink=0.0), "difference"),
        "delta-centred, forgetting 1": Idea(Centred(forgetting=1.0), "difference"),
        "spread, forgetting 1": Idea(Centred(by_norm=False, design="local-pivotal", forgetting=1.0), "difference"),
        "spread, sketch of 32": Idea(Centred(by_norm=False, design="local-pivotal", sketch=32), "difference"),
    }
    labels = {
        f"hics-fl (biased), T = {t:g}": Idea(HicsFL(temperature=t, rounds=150), "plain-mean") for t in (2.0, 0.2, 0.05)
    }
    tours = {
        "a tour of everybody first (biased)": Idea(TourFirst(ours), "innovation-damped"),
        "the same, then local pivotal": Idea(TourFirst(replace(ours, design="local-pivotal")), "innovation-damped"),
    }
    rivals["divfl (biased)"] = Idea(make_sampler("divfl"), "plain-mean")
    ways = {name: Idea(replace(ours, **changes), est) for name, (changes, est) in variants.items()}  # type: ignore[arg-type]
    ways["first visits not told from others"] = Idea(OneKindOfVisit(own_memory=True), "innovation-damped")
    return rivals | labels | fewer | tours | ways


def play(idea: Idea, settings: RunSettings, engine: Engine) -> list[float]:
    """The accuracy after each round."""
    name = idea.estimator if isinstance(idea.estimator, str) else "an idea"
    if not isinstance(idea.estimator, str):
        ESTIMATORS[name] = Estimator(name, horvitz_thompson, idea.estimator, unbiased=True)
    population = engine.task.population(settings.weights)
    plan = Plan(population, idea.sampler, settings.sample or 1, estimator=name, seed=settings.seed)
    state, accuracy = init_round(plan, engine.initial_params()), []
    for _ in range(settings.rounds or 1):
        cohort = open_round(plan, state)
        done = engine.train(state.params_d, state.round, cohort.client_n)
        state, _ = close_round(plan, state, cohort, done.update_nd, reports_of(done))
        accuracy.append(engine.evaluate(state.params_d).accuracy)
    return accuracy


def main() -> None:
    """Run all ideas for all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--group", choices=["memory", "known"], default="memory")
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="IDEA",
        help="these ideas, and fedvarp to compare with; the others keep their rows in --out",
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of deltafl run")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for all accuracies, JSON")
    parser.add_argument("--show", type=Path, metavar="FILE", help="run nothing, print the table of such a file")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="run nothing, make the tables of the notes anew")
    given = parser.parse_args()
    try:
        if given.notes:
            write_tables(given.notes)
        elif given.show:
            file = read_ideas(given.show)
            print(f"{table(file.accuracy, file.threshold)}\n\n{CHANCE}")
        else:
            run(given)
    except DeltaflError as error:
        parser.exit(2, f"ideas.py: {error}\n")


def run(given: argparse.Namespace) -> None:
    """Play the ideas, print their table and write their file."""
    if given.seeds < 1:
        raise DeltaflError(f"--seeds is {given.seeds}; write 1 or more")
    own = {"task": given.task, "rounds": given.rounds, **dict(map(assignment, given.set))}
    chosen = _group(given.group)
    for name in given.only or ():
        if name not in chosen:
            raise unknown_name("idea", name, chosen)
    if given.only:
        chosen = {name: chosen[name] for name in dict.fromkeys(["fedvarp", *given.only])}
    found: dict[str, list[list[float]]] = {}
    began = time.perf_counter()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        settings = make_settings(RunSettings, {**own, "sampler": "uniform", "seed": seed})
        engine = engine_of(settings)
        for name, idea in chosen.items():
            found.setdefault(name, []).append(play(idea, settings, engine))
        print(f"seed {seed} done after {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{table(found, settings.threshold)}\n\n{CHANCE}")
    if given.out:
        write(given, own, found)


def _group(name: str) -> dict[str, Idea]:
    return ideas() if name == "memory" else ideas_with_labels()


def _made(own: dict[str, Any]) -> RunSettings:
    """Settings as they are used: 0.8 is "0.8"."""
    return make_settings(RunSettings, {**own, "sampler": "uniform"})


def write(given: argparse.Namespace, own: dict[str, Any], found: Accuracies) -> None:
    """Write the file of ``--out``; with ``--only``, ideas that were not played keep their rows, if they still exist."""
    seeds, made = (given.first_seed, given.first_seed + given.seeds), environment()
    accuracy = {name: [[round(value, 5) for value in run] for run in runs] for name, runs in found.items()}
    if given.only and given.out.exists():
        before = read_ideas(given.out)
        if before.seeds != seeds or _made(before.settings) != _made(own):
            raise DeltaflError(f"{given.out} was made with other settings or seeds; choose another --out")
        every = before.accuracy | accuracy
        accuracy = {name: every[name] for name in _group(given.group) if name in every}
        made["command"] = f"{before.environment.get('command')}; {made['command']}"
    content = {"settings": own, "seeds": seeds, "environment": made, "accuracy": accuracy}
    given.out.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
