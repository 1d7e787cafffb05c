"""Every backbone with every sampler on ``digits``: three rounds, the estimate's expectation, and
an exact resume.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Problem, Recorder, estimate, mean_estimate, same_tree
from deltafl import SAMPLERS, DeltaflError, KnownUpdates, Plan, RoundState, make_sampler
from deltafl.estimators.table import find_estimator
from deltafl.round import close_round, init_round, open_round
from deltafl.server.optimizers import FedExP
from deltafl.server.part import Step
from deltafl.simulation.engine import Engine
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.oracle import SimulatedOracle
from deltafl.simulation.run import run_experiment
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of
from tools.simulation import StopError, quiet, stop_after

#: Few clients, so that all cohorts can be enumerated.
TINY: dict[str, object] = {
    "clients": 5,
    "sample": 2,
    "rounds": 3,
    "local_steps": 3,
    "batch_size": 8,
}
TINY |= {
    "partition": "yurochkin2019",
    "alpha": 0.3,
    "checkpoint_every": 2,
}  # sizes between 146 and 525

#: What is put around a sampler: settings, and the estimator ("" for unbiased weights, and for the
#: sampler's own).
BACKBONES: dict[str, tuple[dict[str, object], str]] = {
    "plain": ({}, ""),
    "proximal": ({"proximal": 0.1}, ""),
    "local momentum": ({"local_momentum": 0.9}, ""),
    "server momentum": ({"server_optimizer": "momentum", "server_momentum": 0.8}, ""),
    "mime": ({"mime": 0.9}, ""),
    "ghbm": ({"ghbm": 0.9, "ghbm_tau": 2}, ""),
    "scaffold": ({"scaffold": True}, "difference-own"),
    "fixed order": ({"fixed_order": True}, ""),
    "fedvarp, own form": ({}, "difference-own"),
    "fedvarp, the paper's": ({}, "fedvarp"),
    "fedexp": (
        {"server_optimizer": "fedexp", "local_lr": 1.0},
        "",
    ),  # shorter updates are below epsilon
    "adagrad": ({"server_optimizer": "adagrad"}, ""),
    "adam": ({"server_optimizer": "adam"}, ""),
    "yogi": ({"server_optimizer": "yogi"}, ""),
    "everything": (
        {
            "proximal": 0.1,
            "local_momentum": 0.5,
            "mime": 0.5,
            "scaffold": True,
            "fixed_order": True,
            "server_optimizer": "momentum",
        },
        "difference-own",
    ),
}
#: Draws without known probabilities can be given no unbiased weight; and the paper's FedVARP uses
#: none.
BIASED = {
    "fedvarp, the paper's",
    *(name for name, entry in SAMPLERS.items() if entry.scores == "unknown"),
}
#: Biased, though the probabilities are known; it is the default of ``fedavg``.
BIASED |= {"hajek"}
BIASED |= {name for name in SAMPLERS if make_sampler(name).expects_absence}


def estimators_of(backbone: str, sampler: str) -> list[str]:
    """The backbone's own, or else unbiased weights and what the sampler has by default."""
    entry = SAMPLERS[sampler]
    own = BACKBONES[backbone][1]
    if entry.scores == "unknown":
        return [] if own and find_estimator(own).needs_expected else [own or entry.estimator]
    return [own] if own else list(dict.fromkeys(["horvitz-thompson", entry.estimator]))


def settings_of(backbone: str, sampler: str, estimator: str | None = None) -> RunSettings:
    given, own = BACKBONES[backbone]
    entry = SAMPLERS[sampler]
    unbiased = entry.estimator if entry.scores == "unknown" else "horvitz-thompson"
    label = f"{sampler}@{entry.design or ''}@{estimator or own or unbiased}"
    return make_settings(RunSettings, {**TINY, **given, "sampler": label})


@cache
def _engine(**local: float) -> Engine:
    return engine_of(make_settings(RunSettings, {**TINY, **local}))


def engine_for(settings: RunSettings) -> Engine:
    """Runs that agree in their local work share an engine, as in a comparison."""
    names = ("proximal", "local_momentum", "mime", "fixed_order", "local_lr")
    return _engine(**{name: getattr(settings, name) for name in names})


def started(folder: Path, settings: RunSettings) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.start(settings)
    return directory


def known_round(plan: Plan, state: RoundState, engine: Engine) -> Problem:
    """Every client's update of the round that comes next, and an oracle that knows them."""
    oracle = SimulatedOracle(engine, plan, state)
    reports = oracle.reports()
    training = oracle.train(np.arange(plan.population.num_clients))
    drifts = oracle.drifts(np.arange(plan.population.num_clients))
    residual_md = training.update_nd if drifts is None else training.update_nd - drifts
    columns = (reports.step_variance_n, reports.loss_n, reports.num_steps_n)
    known = KnownUpdates(residual_md, plan.population.weight_m, *columns)
    np.testing.assert_array_equal(known.reports().squared_norm_n, reports.squared_norm_n)
    return Problem(plan.population, training.update_nd, known)


#: These change what every client knows or sends; the others are played with a sampler of each kind.
WITH_ALL = ("plain", "scaffold")
ONE_OF_A_KIND = [
    *(
        "uniform",
        "md",
        "fedis",
        "pracdelta",
        "delta",
        "cluster-is-oracle",
        "innovation",
        "census",
        "k-vib",
    ),
    *("fedavg", "power-of-choice", "fed-cbs"),
]
CASES = [
    (backbone, sampler, estimator)
    for backbone in BACKBONES
    for sampler in (SAMPLERS if backbone in WITH_ALL else ONE_OF_A_KIND)
    for estimator in estimators_of(backbone, sampler)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("backbone", "sampler", "estimator"), CASES)
def test_every_backbone_with_every_sampler(
    tmp_path: Path, backbone: str, sampler: str, estimator: str
) -> None:
    settings = settings_of(backbone, sampler, estimator)
    engine = engine_for(settings)
    whole = started(tmp_path / "whole", settings)
    broken = started(tmp_path / "broken", settings)
    final = run_experiment(settings, engine, whole, quiet)
    with pytest.raises(StopError):
        run_experiment(settings, engine, broken, stop_after(2))

    plan = plan_of(settings, engine.task.population(settings.weights))
    if plan.census is not None:
        answers = broken.census()
        assert answers is not None
        plan = plan.with_census(answers)
    state = broken.load(plan.sampler, init_round(plan, engine.initial_params()))
    assert state.round == 2
    claimed = not {backbone, sampler, estimator} & BIASED
    assert_claim_holds(plan, state, known_round(plan, state, engine), claimed)

    again = run_experiment(settings, engine, RunDirectory(broken.path), quiet)
    assert same_tree(again, final)
    assert (broken.path / "rounds.jsonl").read_bytes() == (whole.path / "rounds.jsonl").read_bytes()
    assert np.isfinite(final.params_d).all()
    assert not np.array_equal(final.params_d, engine.initial_params())


def assert_claim_holds(plan: Plan, state: RoundState, problem: Problem, claimed: bool) -> None:
    """Where it is claimed, E[D] = sum_i w_i u_i over all cohorts; and the server optimizer gets
    D.
    """
    assert claimed == (plan.sampler.unbiased and find_estimator(plan.estimator).unbiased)
    others = (part for part in plan.parts if part.name != Recorder.name)
    recording = replace(plan, parts=(*others, Recorder()))
    if claimed:
        error_d = mean_estimate(recording, state, problem) - problem.ubar_d
        tolerance = (
            1e-6 if plan.drifting else 1e-12
        )  # residuals from the drift are rounded to float32
        assert np.abs(error_d).max() < tolerance * np.abs(problem.update_md).max()
    cohort = open_round(plan, state, oracle=problem.oracle)
    updates: list[Any] = list(problem.update_md[cohort.client_n])
    delta_d = estimate(recording, state, cohort, updates)
    following, _ = close_round(plan, state, cohort, updates)
    rule = plan.optimizer
    if isinstance(rule, FedExP):
        squared_n = np.sum(problem.update_md[cohort.client_n].astype(np.float64) ** 2, axis=1)
        mean_square = float(plan.collect_replies(state, cohort).coef_n @ squared_n)
        step = Step(state.round, state.params_d, delta_d, mean_square)
        moved_d, _ = rule.move(state.parts[rule.name], step)
        np.testing.assert_allclose(following.params_d, moved_d, rtol=1e-6, atol=1e-9)
        return
    moved_d, _ = rule.move(state.parts[rule.name], Step(state.round, state.params_d, delta_d))
    np.testing.assert_array_equal(following.params_d, moved_d)


def test_backbones_differ(tmp_path: Path) -> None:
    """Each setting reaches the training."""
    ends = {}
    for backbone in BACKBONES:
        settings = settings_of(backbone, "pracdelta")
        engine = engine_for(settings)
        state = run_experiment(settings, engine, started(tmp_path / backbone, settings), quiet)
        ends[state.params_d.tobytes()] = backbone
    assert list(ends.values()) == list(BACKBONES)


@pytest.mark.parametrize("backbone", ["fedvarp, own form", "everything"])
def test_draws_without_probabilities_are_refused_unbiased_weights(backbone: str) -> None:
    with pytest.raises(DeltaflError, match=r"only these can follow it: 'plain-mean', .*'fedvarp'"):
        settings_of(backbone, "power-of-choice")
