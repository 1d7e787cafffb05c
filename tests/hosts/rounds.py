"""The same clients in Flower and in NVFlare, in this process, and their rounds without any host.

Client i has 10 + 5 i examples and the label i mod 3. It moves half the way to its own target, so
many times its own steps, and the drift.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deltafl import Population, Reports, close_round, init_round, make_plan, open_round
from deltafl.federation.exchange import Correction
from deltafl.federation.service import Service
from deltafl.model.arrays import Arrays
from deltafl.model.parts import split
from deltafl.model.vectors import update_of
from deltafl.samplers.census import output_layer
from deltafl.types import Params, RoundInfo

SHAPES = {"hidden": (2, 3), "weight": (3, 2), "bias": (2,)}
MODEL = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
AWAY = np.linspace(-1, 1, 14, dtype=np.float32)
SEED = 4
N = 3
#: The client that is faulty, if any is.
FAULTY = 1

Take = Callable[[], Correction]
#: (client, fault, what it was sent, its correction) -> what it sends, None for silence.
Work = Callable[[int, str, Arrays, Take], Arrays | None]


class Played(NamedTuple):
    """What a host has done."""

    federation: Service
    history: list[RoundInfo]
    #: The models that it handed on, one a round: all arrays of the initial one.
    models: list[Params]

    @property
    def used(self) -> list[int]:
        """How often each client responded."""
        return [int(count) for count in np.asarray(self.federation.current.responded_m)]


def label_of(client: int) -> list[float]:
    return [float(client % 3 == label) for label in range(3)]


def settings_of(label: str) -> dict[str, Any]:
    """What every host is told beside the label."""
    return {"n": N, "seed": SEED, "aux": 3 if label == "balanced" else 0}


def moved(client: int, sent: Arrays, correction: Correction) -> Arrays:
    target = split((client + 1) * np.roll(AWAY, client), SHAPES)
    half = np.float32(0.5 * correction.step_factor)
    return {
        name: array + half * (target[name] - array) + correction.get(name, 0)
        for name, array in sent.items()
    }


def work(client: int, fault: str, sent: Arrays, take: Take) -> Arrays | None:
    """What a client sends after training; None for silence."""
    if client != FAULTY or fault == "":
        return moved(client, sent, take())
    if fault == "silent":
        return None
    if fault == "another shape":
        return {**moved(client, sent, take()), "bias": np.zeros(5, np.float32)}
    assert fault == "no correction"
    return moved(client, sent, Correction())


def core(
    label: str, fault: str = "", m: int = 7, rounds: int = 5
) -> tuple[list[Params], list[RoundInfo], float]:
    """The models after each round, by ``open_round`` and ``close_round``; the largest drift."""
    aux = [label_of(i) for i in range(m)]
    population = Population.from_sizes(
        [10 + 5 * i for i in range(m)], aux=aux if settings_of(label)["aux"] else None
    )
    plan = make_plan(label, population, N, seed=SEED)

    def update_of_client(client: int, sent: Arrays, own: Correction, census: bool) -> Any:
        if client == FAULTY and fault and not (census and fault == "no correction"):
            return None
        return update_of(sent, moved(client, sent, own))

    if plan.census is not None:
        layer = output_layer(list(SHAPES.values()))
        own = Correction({}, plan.step_factor)
        first = [update_of_client(i, MODEL, own, plan.step_factor == 1) for i in range(m)]
        answers = [None if u is None else plan.census.answer(u, layer) for u in first]
        plan = plan.with_census(answers)
    state = init_round(plan, np.zeros(14))
    models = [plan.model(state)] * state.round  # a census may be the first round
    infos = []
    largest = 0.0
    while state.round < rounds:
        cohort = open_round(plan, state)
        sent = split(state.params_d, SHAPES)
        drift = plan.drifts(state, cohort.client_n)
        n = len(cohort.client_n)
        drift_nd = np.broadcast_to(np.float32(0) if drift is None else drift, (n, 14))
        updates = [
            update_of_client(i, sent, Correction(split(drift_d, SHAPES), plan.step_factor), False)
            for i, drift_d in zip(cohort.client_n.tolist(), drift_nd, strict=True)
        ]
        if plan.codes(cohort):
            updates = [*plan.as_sent(cohort, np.array(updates))]
        here = [update is not None for update in updates]
        reports = Reports.make(n, responded=here, loss=[1.0] * n)
        largest = max(largest, float(np.abs(drift_nd).max()))
        state, info = close_round(plan, state, cohort, updates, reports)
        models.append(plan.model(state))
        infos.append(info)
    return models, infos, largest
