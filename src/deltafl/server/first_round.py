"""A full first round: every client trains once, and from then on the server knows something of
everybody.

In round 0 all clients that are available are selected, whatever the sampler. With u_i their
updates, the model moves by their weighted mean,

    D = sum_i w_i u_i / sum_i w_i   over the clients that reply,

and the sampler, the control variate, momenta and averages learn from all u_i as from the replies
of any round. Nothing is left to chance, so that D has no variance where all reply. Later rounds are
the sampler's, with its own probabilities.

With ``first_round="code"`` a client sends its update in 2.75 bits per parameter
(``estimators/two_bits.py``), and u_i above is what the server decodes, over 0.88, the share of an
update's square that decoding keeps: D is then a deterministic reading of coded updates.

The census (``samplers/census.py``) is the same first round in a code, plus a sketch of each update
that cohorts are balanced on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..designs.table import drawn_once
from ..errors import DeltaflError
from ..types import EVERYONE, BoolArray, Cohort
from .part import PlanOfParts, ServerPart

CODE = "code"
EXACT = "exact"


@dataclass(frozen=True)
class FirstRound(ServerPart):
    """Ask all clients in the first round, for their updates (``"exact"``) or a ``"code"``."""

    first_round: str
    name = "first_round"
    fitting = "methods without a census"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_round not in (EXACT, CODE):
            raise DeltaflError(
                f"first_round is {self.first_round!r}; write 'exact' for whole updates, or 'code' "
                "for two bits per parameter"
            )

    @property
    def needs_single_updates(self) -> str | None:
        if self.first_round == CODE:
            return "first_round=code reads each update from its code"
        return None

    @classmethod
    def fits(cls, sampler: Any, control: Any) -> bool:
        return sampler.census is None

    def check(self, plan: PlanOfParts) -> None:
        if plan.part("dp"):
            raise DeltaflError(
                "with first_round every client trains in the first round, and dp counts on each "
                "being selected by chance: leave out one of them"
            )
        if not self.fits(plan.sampler, plan.rule.control):
            raise DeltaflError(
                "a census is a full first round itself, in a code: leave out first_round, or "
                "choose a sampler without a census"
            )

    def select(
        self,
        plan: PlanOfParts,
        round: int,
        mask_m: BoolArray | None,
    ) -> Cohort | None:
        if round > 0:
            return None
        client_n = np.arange(plan.population.num_clients)
        if mask_m is not None:
            client_n = np.flatnonzero(mask_m)
        return drawn_once(client_n, np.ones(len(client_n)), EVERYONE)

    def codes(self, cohort: Cohort) -> bool:
        return self.first_round == CODE and cohort.kind == EVERYONE
