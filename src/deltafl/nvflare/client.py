"""The client's side: ``receive`` and ``send`` of NVFlare's Client API, which also answer the
server's questions.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import nvflare.client as flare
from nvflare.client import FLModel, ParamsType

from ..federation.exchange import (
    AUX,
    CENSUS,
    CODE,
    NUM_EXAMPLES,
    RECORD,
    STEP_FACTOR,
    TRAINED,
    Correction,
    report_of,
)
from ..federation.facts import told
from ..model.arrays import Arrays, as_array
from ..types import Array

#: In what is asked: the round, which the reply repeats; the drift, by array.
ROUND = "round"
DRIFT = "drift"


class DeltaClient:
    """Takes the place of ``flare.receive`` and ``flare.send`` in a training script, after
    ``flare.init()``.

    The server's question for the size of the data is answered by ``receive``. Asked for a census,
    the client trains as usual, and ``send`` replies with ``Census.answer`` alone: no parameters, no
    metrics.

    Args:
        num_examples: The number of examples that the client trains on.
        aux: Auxiliary variables, such as the share of each label in its data, for
            ``DeltaFedAvg(aux=10)``; sent to a server that asks.
        stratum: The client's region or the like, for ``DeltaFedAvg(strata=["north", "south"])``;
            likewise.
        cost: What a round of the client costs, for ``DeltaFedAvg(costs=True)``; likewise.
    """

    def __init__(
        self,
        num_examples: int,
        aux: Sequence[float] = (),
        stratum: str | None = None,
        cost: float | None = None,
    ) -> None:
        self.num_examples = int(num_examples)
        self.aux = [float(value) for value in aux]
        self._facts = {"stratum": stratum, "cost": cost}
        self._asked: dict[str, Any] = {}
        self._names = frozenset[str]()
        self._sent: Arrays = {}
        self._corrected = False

    def receive(self, timeout: float | None = None) -> FLModel | None:
        """The next model to train, or None where the job ends; as ``flare.receive``."""
        while (model := flare.receive(timeout)) is not None:
            asked = model.meta.get(RECORD, {})
            if AUX not in asked:
                self._asked = asked
                self._names = frozenset(model.params or {})
                self._corrected = False
                self._sent = trained(model, asked.get(TRAINED, ()))
                return model
            report: dict[str, Any] = {NUM_EXAMPLES: self.num_examples, AUX: []}
            if asked[AUX]:  # auxiliary variables are sent only where they are used
                report[AUX] = self.aux
            report |= told(asked, lambda fact: self._facts[fact.name])
            # NVFlare wants parameters or metrics in a model; an empty mapping will do.
            flare.send(FLModel(metrics={}, meta={RECORD: report}))
        return None

    def take_correction(self) -> Correction:
        """What the server adds to the local steps from the last model; nothing without ``scaffold``
        and ``mime``.

        Give it to ``corrected_steps``. In any other framework take ``step_factor`` times the usual
        steps, and add 1 / K of each array in each of K steps. ``send`` confirms that it was taken:
        the server refuses a model without.
        """
        self._corrected = STEP_FACTOR in self._asked
        return Correction(self._asked.get(DRIFT), self._asked.get(STEP_FACTOR, 1.0))

    def send(self, model: FLModel) -> None:
        """Send what was trained from the last model received; as ``flare.send``.

        Of arrays that were not received, such as local and frozen ones, the server sees the name
        alone.
        """
        received = trained(model, self._sent, self._sent)
        report = report_of(self._asked, self._corrected, self._sent, received)
        if CENSUS in self._asked:
            model = FLModel(metrics={})
        elif model.params is not None:
            nothing = np.zeros(0, np.float32)
            kept = self._names - set(self._sent if CODE in self._asked else ())
            # The name stays, for the server's message where a client has renamed its arrays.
            model.params = {
                name: part if name in kept else nothing for name, part in model.params.items()
            }
        model.meta[RECORD] = {ROUND: self._asked.get(ROUND), **report}
        flare.send(model)


def trained(
    model: FLModel,
    names: Iterable[str],
    sent: Arrays | None = None,
) -> Arrays:
    """The arrays of a model by these names; differences are added to what was ``sent``."""
    params = model.params or {}
    return {name: trained_array(model, name, sent or {}) for name in names if name in params}


def trained_array(model: FLModel, name: str, sent: Arrays) -> Array:
    """One array of a model, see ``trained``."""
    array: Any = model.params[name]
    # A subclass, such as one with a mask, stays one, which the server refuses.
    if not isinstance(array, np.ndarray):
        array = as_array(array)
    old = sent.get(name)
    # So does a difference of another shape or kind: a sum might broadcast, or be no number.
    if (
        model.params_type == ParamsType.DIFF
        and type(array) is np.ndarray
        and old is not None
        and (array.shape, array.dtype.kind) == (old.shape, old.dtype.kind)
    ):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(old + array, old.dtype)
    # A copy, for the client may overwrite the arrays that it was given.
    copied: Array = array.copy()
    return copied
