"""What clients report of their data when they register: it may be anything."""

from typing import Annotated

from pydantic import BaseModel, Field

from ..errors import DeltaflError, printable
from ..store import checked
from .clients import ClientInfo
from .exchange import AUX, NUM_EXAMPLES
from .facts import FACTS
from .replies import named
from .rules import Rules

#: What to write where the answer to a registration query is no answer.
CURE = (
    "write deltafl.flower.register(app, num_examples=...) in the client's app, or make a "
    "deltafl.nvflare.DeltaClient in its script"
)
NO_REGISTRATION = "no answer to the registration query in time"


class Registration(BaseModel):
    """What a client reports of its data."""

    num_examples: Annotated[int, Field(strict=True, ge=1, le=2**40)]
    aux: list[Annotated[float, Field(strict=True, ge=-1e9, le=1e9)]]


def read_info(report: object, rules: Rules) -> ClientInfo:
    """What a client reports of its data when it registers; a text says why it failed."""
    if isinstance(report, str):
        raise DeltaflError(printable(report))
    given = named(report)
    aux = given.get(AUX)
    # What the server has not asked for it does not keep.
    if not isinstance(aux, list) or rules.aux == 0:
        aux = []
    if len(aux) != rules.aux:
        raise DeltaflError(
            f"the server wants {rules.aux} auxiliary variables of each client, and the client sent "
            f"{len(aux) or 'none'}; give aux=... to register"
        )
    entries = {"num_examples": given.get(NUM_EXAMPLES), "aux": aux}
    known = checked(Registration, entries, "the answer to the registration query", CURE)
    if rules.plan.sampler.uses_labels and not (min(known.aux) >= 0 < sum(known.aux)):
        raise DeltaflError(
            "the server wants each client's share of each label as its auxiliary variables, all "
            ">= 0 and not all of them 0; give such aux=... to register"
        )
    facts = {name: FACTS[name].read(given, value) for name, value in rules.wanted.items()}
    return ClientInfo(known.num_examples, tuple(known.aux), **facts)
