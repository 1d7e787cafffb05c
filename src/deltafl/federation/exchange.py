"""What a server asks of clients beside training, and what they report: plain values by name, the
same in every host.

A host carries both in the place ``RECORD`` of its messages. What comes back is read in
``replies.py``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..estimators.two_bits import encode
from ..model.arrays import Arrays
from ..model.vectors import update_of
from ..samplers.census import Census, output_layer
from ..types import Array, Json

RECORD = "deltafl"
#: Asked and reported when a client registers: how many auxiliary variables; they, and its size.
AUX = "aux"
NUM_EXAMPLES = "num-examples"
#: Asked: [size, noise, first_update] of the answer to a census. Reported: the answer.
CENSUS = "census"
#: Asked: whether the update shall be sent as a code, of two bits per parameter. Reported: the code.
CODE = "code"
#: Asked with both: the names of the trained arrays.
TRAINED = "trained"
#: Asked of clients that are to correct their local steps: how many times their own steps they take.
STEP_FACTOR = "step-factor"
#: Reported by those that did: that factor.
CORRECTED = "corrected"


class Question(NamedTuple):
    """What some clients are asked, and the drift that moves them during their local steps."""

    keys: list[str]
    asked: Json
    drift: Arrays


class Correction(Arrays):
    """What the server adds to a client's local steps, by array name; no arrays for nothing."""

    #: The client takes so many times its own steps, 0 < step_factor <= 1: 1 - beta with ``mime``.
    step_factor: float = 1.0

    def __init__(
        self,
        arrays: Mapping[str, Array] | None = None,
        step_factor: float = 1.0,
    ) -> None:
        super().__init__(arrays or {})
        self.step_factor = step_factor


def census_question(
    census: Census,
    trained: list[str],
    step_factor: float,
) -> Json:
    """What clients are asked for a census; with ``mime`` they take shorter steps in it as well."""
    asked: Json = {
        CENSUS: [float(census.size), census.noise, float(census.first_update)],
        TRAINED: trained,
    }
    if step_factor < 1:
        asked[STEP_FACTOR] = step_factor
    return asked


def _fault_of(sent: Arrays, received: Arrays) -> str:
    """Why there is no update from one to the other, as a sentence; empty if there is one."""
    for name, array in sent.items():
        if name not in received:
            return f"the client's model lacks {name!r}"
        other = received[name]
        # Of any width: a client may compute in another one.
        if (other.shape, other.dtype.kind) != (array.shape, array.dtype.kind):
            return (
                f"array {name!r} has type {other.dtype} and shape {other.shape}, expected "
                f"{array.dtype} and {array.shape}"
            )
    return ""


def report_of(
    asked: Json,
    corrected: bool,
    sent: Arrays,
    received: Arrays,
) -> Json:
    """What a client reports that was asked this, of the arrays that it was sent and has trained.

    Both are needed for a census or a code alone. Where they are not the same model, a sentence
    stands in the place of the numbers: the server sees no arrays by which it could tell.
    """
    report = dict[str, Any]()
    if corrected:
        report[CORRECTED] = asked[STEP_FACTOR]
    fault = _fault_of(sent, received)
    if CODE in asked:
        report[CODE] = fault or encode(update_of(sent, received)).tolist()
    if CENSUS in asked:
        if fault:
            report[CENSUS] = fault
            return report
        size, noise, first_update = asked[CENSUS]
        census = Census(size=int(size), noise=noise, first_update=bool(first_update))
        # Not a seeded generator: nobody shall be able to take the noise away.
        answer_k = census.answer(
            update_of(sent, received),
            output_layer([array.shape for array in sent.values()]),
            rng=np.random.default_rng(),
        )
        report[CENSUS] = answer_k.tolist()
    return report
