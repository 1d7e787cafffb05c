"""States in files: ``save_state`` writes one, ``load_state`` maps it into memory.

What rounds write stays in memory. A file is read once when it is loaded, to compare its checksum.
"""

import re
import zlib
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..accumulate import clients_of
from ..errors import DeltaflError
from ..plan import Plan, RoundState
from ..round import blank_state
from ..store.sealed import read_sealed, write_sealed
from ..types import AnyPath, Array, Population
from .named_arrays import from_named_arrays, named_arrays


def save_state(path: AnyPath, state: RoundState, plan: Plan) -> None:
    """Write a state into one file, which is never seen half written and may be the one it was
    loaded from.

    It names the clients and the plan that the state belongs to, for with others it would be wrong
    without a sign. Plans of other clients, or with updates in a file of their own
    (``Plan.memory``), are refused by a ``DeltaflError``.
    """
    if not isinstance(state, RoundState):
        raise DeltaflError(
            f"state is of type {type(state).__name__}; write save_state(path, state, plan)"
        )
    clients_of(plan, state)
    if plan.memory.folder is not None:
        raise DeltaflError(
            "this plan keeps rows in a file of their own, which a state file cannot hold"
        )
    arrays = dict(named_arrays(state, shared=True))
    write_sealed(Path(path), arrays, owner(plan))


def load_state(path: AnyPath, plan: Plan) -> RoundState:
    """Map a saved state into memory; rounds that follow are bit for bit those that would have
    followed the saved one.

    ``plan`` is the one it was saved with, but for the cohort's size and ``response_floor``, on
    which no state depends. To go on with another plan, load with the old one and go on with the
    new. Files of other clients or another plan, or that are no such files, are refused by a
    ``DeltaflError``.
    """
    cure = "put a copy back, or write it anew with save_state"
    arrays, saved = read_sealed(Path(path), cure, mapped=True)
    for name, value in owner(plan).items():
        if saved.get(name) != value:
            raise DeltaflError(
                f"the state in {path} belongs to a plan with {name} = {saved.get(name)}, and this "
                f"plan has {value}; load it with the plan it was saved with"
            )
    template_plan = plan
    # Only of the library's own classes it is known that the form of a state does not depend on the
    # number of clients.
    if all(
        type(part).__module__.startswith("deltafl.") for part in (plan.sampler, plan.rule.control)
    ):
        # The form of the state is that of one client: m numbers need not be made.
        aux_mq = plan.population.aux_mq
        one = Population.from_sizes([1], aux=None if aux_mq is None else aux_mq[:1])
        # With seconds, which some samplers ask for; the saved arrays take the place of all of
        # these.
        template_plan = replace(
            plan,
            population=one._replace(seconds_m=np.ones(1)),
            n=1,
        )
    params_d = arrays.get("state.params_d", np.zeros(0))
    template = blank_state(template_plan, np.zeros(params_d.shape, dtype=np.float32))
    state: RoundState = from_named_arrays(template, arrays, any_shape=True)
    return state


def owner(plan: Plan) -> dict[str, str]:
    """What a state belongs to, as texts: checksums of the clients, and the settings that it
    depends on.
    """
    population = plan.population
    aux = "None"
    if population.aux_mq is not None:
        aux = _checksum(population.aux_mq, np.float64)
    return {
        "clients": str(population.num_clients),
        "weight_m": _checksum(population.weight_m, np.float64),
        "num_examples_m": _checksum(population.num_examples_m, np.int64),
        "aux_mq": aux,
        "sampler": written(plan.sampler),
        "estimator": _without_addresses(plan.rule.name),
        **plan.part_texts,
        "seed": str(plan.seed),
        # Not its folder, which is no part of the state.
        "memory": plan.memory.dtype,
    }


def written(part: object) -> str:
    """How a sampler or an optimizer is written; only its type where the text would hold an
    address in memory.
    """
    if not is_dataclass(part):
        return type(part).__name__
    return _without_addresses(repr(part))


def _without_addresses(text: str) -> str:
    """A text without the addresses of functions and objects, which differ from process to
    process.
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _checksum(array: Array, dtype: Any) -> str:
    """Shape and CRC-32: against mistakes, not against forgers, and several times as fast as
    BLAKE2.
    """
    plain = np.ascontiguousarray(array, dtype=dtype)
    return f"{'x'.join(map(str, plain.shape))}:{zlib.crc32(plain.data):08x}"
