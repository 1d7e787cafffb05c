"""The census of a simulated run: every client is asked once, before any is drawn.

Clients whose answers hold their updates have trained: the model moves by the updates' mean, and the
census is the run's first round. Other answers belong to round 0, that of the initial model.
"""

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np

from ..estimators.variance import effective_sample_size
from ..plan import Plan, RoundState
from ..samplers.census import output_layer
from ..scale.numerics import inner
from ..streams import stream
from ..types import Cohort, FloatArray, Json, Params, RoundInfo
from .callbacks.callback import LiveRun, PlayedRound, Stopwatch
from .distributed import ProcessGroup
from .engine import BYTES_PER_PARAMETER, Engine
from .folder.directory import RunDirectory
from .oracle import BYTES_OF_CODE


@dataclass(frozen=True)
class Asked:
    """A census that has been taken: its plan, and what the lines of its round hold of it."""

    plan: Plan  #: with the answers
    line: Json
    timing: dict[str, float]

    def round(self, run: LiveRun, following: RoundState) -> PlayedRound:
        """The census as the first round, after which ``run`` is in the state ``following``."""
        opened = run.state
        weight_m = self.plan.population.weight_m
        has_code_m = np.asarray(self.plan.population.code_mc).any(axis=1)
        weight_k = weight_m[has_code_m]
        # The census has moved the model already: its estimate is the difference.
        step_d = (following.params_d - opened.params_d).astype(np.float64)
        m = len(weight_m)
        info = RoundInfo(
            round=0,
            num_selected=m,
            num_responded=len(weight_k),
            rejected=[],
            estimate_norm=sqrt(inner(step_d, step_d)),
            variance=nan,
            effective_sample_size=effective_sample_size(weight_k),
            largest_weight=float(weight_k.max(initial=0)),
            sum_of_weights=float(weight_k.sum()),
            mean_over_diversity=nan,
            loss=nan,
        )
        everyone = Cohort(
            np.arange(m),
            np.ones(m, np.int64),
            np.ones(m),
            "fixed-size",
        )
        run.state = following
        run.clock = self.line.get("clock", run.clock)
        return PlayedRound(opened, everyone, info, self.line, self.timing)


def ask_everyone(
    plan: Plan,
    engine: Engine,
    directory: RunDirectory,
    group: ProcessGroup,
    cost_m: FloatArray | None,
) -> Asked | None:
    """The census of a plan, from the run's folder if it is there; None if the plan has none.

    ``cost_m``, (m,), is what a round of each client costs then, if not what it does in the mean.
    """
    if plan.census is None:
        return None
    timer = Stopwatch()
    answer_mk = group.from_first(directory.census)
    if answer_mk is None:
        answer_mk = take_census(plan, engine, engine.initial_params())
        if group.is_first:
            directory.save_census(answer_mk)
    client_seconds = timer.read()["seconds"]
    # First: answers that come from a file may be anything.
    plan = plan.with_census(answer_mk)
    m, size = answer_mk.shape
    answers = int(np.isfinite(answer_mk).all(axis=1).sum())
    line = {
        "answers": answers,
        "bytes_down": m * engine.num_params * BYTES_PER_PARAMETER,
        "bytes_up": answers * BYTES_OF_CODE * size,
    }
    if plan.population.seconds_m is not None:
        line["clock"] = float(plan.population.seconds_m.max())  # it waits for everybody
    if cost_m is None:
        cost_m = plan.population.cost_m
    if cost_m is not None:
        line["cost"] = float(cost_m.sum())
    return Asked(plan, line, timer.read() | {"client_seconds": client_seconds})


def take_census(plan: Plan, engine: Engine, params_d: Params) -> FloatArray:
    """Every client's answer after its usual local work, float64 (m, size); NaN where none is."""
    census = plan.census
    assert census is not None
    m = plan.population.num_clients
    # The answers look at the output layer, whose tensors a model has last.
    tensors = output_layer([*engine.parts.trained.values()])
    answers = []
    for first in range(0, m, plan.n):  # no more updates are in RAM than in any other round
        client_k = np.arange(first, min(first + plan.n, m))
        update_kd = engine.train(params_d, 0, client_k).update_nd
        for client, update_d in zip(client_k.tolist(), update_kd, strict=True):
            rng = stream(plan.seed, "census", 0, client)
            answers.append(census.answer(update_d, tensors, plan.seed, rng))
    return np.array(answers)
