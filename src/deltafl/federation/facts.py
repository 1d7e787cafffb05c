"""What clients say of themselves when they register, where the server wants to know: a row each.

A fact has one name in messages, in a node's config, in the arguments of ``register`` and
``DeltaClient``, and in ``ClientInfo``. A setting of ``Rules`` says what the server wants; what
clients said is in the header of a saved state, under the name of that setting.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import DeltaflError, is_in, printable

#: Beyond it sums would lose the other clients' costs.
LEAST_COST = 1e-9
_COSTS = f"[{LEAST_COST:g}, 1e9]"


class Fact(NamedTuple):
    """One of them. What a client says is its own word: ``fault`` judges whatever that is."""

    name: str
    setting: str
    #: Of ``Population.from_sizes``.
    column: str
    #: What a client says, as every message can hold it.
    plain: Callable[[Any], Any]
    #: (what a client has said, what the server wants) -> what that is, as a clause, if it is
    #: something else.
    fault: Callable[[object, Any], str | None]
    #: (what the server wants, a number) -> what that client might say, before anybody has
    #: registered.
    example: Callable[[Any, int], Any]

    def read(self, given: Mapping[str, Any], wanted: Any) -> Any:
        """What a client reported; a ``DeltaflError`` says what it is to report."""
        said = given.get(self.name)
        fault = self.fault(said, wanted)
        if fault is None:
            return self.plain(said)
        raise DeltaflError(
            f"the server {fault}, and the client's is {printable(repr(said), limit=60)}; give it "
            f"to register, as '{self.name}' of the node's config or {self.name}=..."
        )


def _stratum_fault(said: object, wanted: Any) -> str | None:
    if isinstance(said, str) and said in wanted:
        return None
    return f"knows the strata {', '.join(map(printable, wanted))}"


def _cost_fault(said: object, wanted: Any) -> str | None:
    if type(said) in (int, float) and is_in(said, _COSTS):
        return None
    return f"wants what a round of each client costs, a number in {_COSTS}"


def _plain_cost(said: Any) -> Any:
    # A text that is no number goes on to the server, whose sentence the log has.
    return said if isinstance(said, str) else float(said)


_ROWS = (
    # The client's region or the like, one of those that the server names.
    Fact(
        "stratum",
        "strata",
        "strata",
        plain=str,
        fault=_stratum_fault,
        example=lambda wanted, client: str([*wanted][client % len(wanted)]),
    ),
    # What a round of the client costs, in the unit of the federation.
    Fact(
        "cost",
        "costs",
        "cost",
        plain=_plain_cost,
        fault=_cost_fault,
        # What a budget pays for is known only with the clients: nothing is refused before.
        example=lambda wanted, client: LEAST_COST,
    ),
)
FACTS = {fact.name: fact for fact in _ROWS}


def told(asked: Mapping[str, Any], known: Callable[[Fact], Any]) -> dict[str, Any]:
    """What a client reports that was asked this; ``known`` has what it knows, None for nothing."""
    found = {name: known(fact) for name, fact in FACTS.items() if asked.get(name)}
    return {name: FACTS[name].plain(said) for name, said in found.items() if said is not None}
