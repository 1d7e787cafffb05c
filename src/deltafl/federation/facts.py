"""What clients say of themselves when they register, where the server wants to know: a row each.

A fact has one name in messages, in a node's config, in the arguments of ``register`` and
``DeltaClient``, and in ``ClientInfo``. A setting of ``Rules`` says what the server wants; what
clients said is in the header of a saved state, under the name of that setting.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..errors import DeltaflError, is_in, printable


class Fact(ABC):
    """One of them. What a client says is its own word: ``fault`` judges whatever that is."""

    name: ClassVar[str]
    setting: ClassVar[str]
    #: Of ``Population.from_sizes``.
    column: ClassVar[str]

    @abstractmethod
    def plain(self, said: Any) -> Any:
        """What a client says, as every message can hold it."""

    @abstractmethod
    def fault(self, said: object, wanted: Any) -> str | None:
        """What is wanted, as a clause, if a client has said something else."""

    @abstractmethod
    def example(self, wanted: Any, client: int) -> Any:
        """What the client of this number might say, before anybody has registered."""

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


class Stratum(Fact):
    """The client's region or the like, one of those that the server names."""

    name = "stratum"
    setting = "strata"
    column = "strata"

    def plain(self, said: Any) -> str:
        return str(said)

    def fault(self, said: object, wanted: Any) -> str | None:
        if isinstance(said, str) and said in wanted:
            return None
        return f"knows the strata {', '.join(map(printable, wanted))}"

    def example(self, wanted: Any, client: int) -> str:
        return str([*wanted][client % len(wanted)])


class Cost(Fact):
    """What a round of the client costs, in the unit of the federation."""

    name = "cost"
    setting = "costs"
    column = "cost"
    #: Beyond it sums would lose the other clients' costs.
    least = 1e-9
    allowed: ClassVar = f"[{least:g}, 1e9]"

    def plain(self, said: Any) -> Any:
        # A text that is no number goes on to the server, whose sentence the log has.
        return said if isinstance(said, str) else float(said)

    def fault(self, said: object, wanted: Any) -> str | None:
        if type(said) in (int, float) and is_in(said, self.allowed):
            return None
        return f"wants what a round of each client costs, a number in {self.allowed}"

    def example(self, wanted: Any, client: int) -> float:
        # What a budget pays for is known only with the clients: nothing is refused before.
        return self.least


FACTS: dict[str, Fact] = {fact.name: fact for fact in (Stratum(), Cost())}


def told(asked: Mapping[str, Any], known: Callable[[Fact], Any]) -> dict[str, Any]:
    """What a client reports that was asked this; ``known`` has what it knows, None for nothing."""
    found = {name: known(fact) for name, fact in FACTS.items() if asked.get(name)}
    return {name: FACTS[name].plain(said) for name, said in found.items() if said is not None}
