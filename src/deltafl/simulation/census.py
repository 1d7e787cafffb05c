"""The census of a simulated run: all clients do the first round's local work, and answer, before its cohort is drawn.

No round is lost by it: the cohort has done its work when it is asked for it. Bytes and seconds are those of round 0.
"""

import time
from typing import Any

import numpy as np

from ..round import Plan
from ..samplers.census import output_layer
from ..streams import stream
from ..types import FloatArray, Params
from .directory import RunDirectory
from .distributed import ProcessGroup
from .engine import Engine
from .oracle import BYTES_PER_PARAMETER


def with_census(
    plan: Plan, engine: Engine, params_d: Params, directory: RunDirectory, group: ProcessGroup
) -> tuple[Plan, tuple[dict[str, Any], dict[str, float]] | None]:
    """The plan with the answers of all clients, if its sampler asks for them.

    If they are asked now: also what the lines of round 0 in ``rounds.jsonl`` and ``timings.jsonl`` hold of it.
    """
    if plan.census is None:
        return plan, None
    kept = group.from_first(directory.census)
    if kept is not None:
        return plan.with_census(kept), None
    began, began_cpu = time.perf_counter(), time.process_time()
    answer_mk = take_census(plan, engine, params_d)
    client_seconds = time.perf_counter() - began
    if group.is_first:
        directory.save_census(answer_mk)
    plan = plan.with_census(answer_mk)
    m, answers = len(answer_mk), int(np.isfinite(answer_mk).all(axis=1).sum())
    line = {
        "answers": answers,
        "bytes_down": m * len(params_d) * BYTES_PER_PARAMETER,
        "bytes_up": answers * 8 * answer_mk.shape[1],
    }
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return plan, (line, {"seconds": seconds, "cpu_seconds": cpu_seconds, "client_seconds": client_seconds})


def take_census(plan: Plan, engine: Engine, params_d: Params) -> FloatArray:
    """Every client's answer after its usual local work on a model, float64 (m, size); NaN where there is none."""
    census, m = plan.census, plan.population.num_clients
    assert census is not None
    tensors = output_layer([param.shape for param in engine.task.make_model().parameters()])
    answers = []
    for first in range(0, m, plan.n):  # no more updates are in RAM than in any other round
        client_k = np.arange(first, min(first + plan.n, m))
        for client, update_d in zip(client_k.tolist(), engine.train(params_d, 0, client_k).update_nd, strict=True):
            answers.append(census.answer(update_d, tensors, plan.seed, stream(plan.seed, "census", 0, client)))
    return np.array(answers)
