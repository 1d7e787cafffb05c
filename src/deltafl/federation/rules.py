"""The rules of a federation: which settings there are, what they mean together, and which no
federation can have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits, token_hex
from typing import Any

from ..errors import DeltaflError, is_in, unknown_name
from ..estimators.control_variates import ControlVariate
from ..plan import Plan, make_plan
from ..samplers import Sampler
from ..scale.rows import RowFormat
from ..server.optimizers import ServerOptimizer
from ..types import Population
from .clients import ClientInfo


@dataclass(frozen=True)
class Rules:
    """What does not change over the rounds; ``make_rules`` makes them."""

    #: The plan, but for its population and with the largest cohort size; with this federation's own
    #: memory folder.
    plan: Plan
    weights: str = "data"
    aux: int = 0
    state_path: Path | None = None
    identity: str = "auto"
    max_ratio: float | None = None
    #: Whether the seed was drawn here: then that of a saved state takes its place.
    own_seed: bool = False
    #: Clients without whom no round begins.
    min_clients: int = 1

    def __post_init__(self) -> None:
        """Refuse what no federation can do: later it would cost a round of the clients' work."""
        plan = self.plan
        sampler = self.plan.sampler
        memory = self.plan.memory
        name = type(sampler).__name__
        estimator = plan.rule.name
        control = plan.rule.control
        if self.identity not in (identities := ("auto", "public-key", "name", "config")):
            raise unknown_name("identity", self.identity, identities)
        check_whole("seed", plan.seed, "at least 0", 0)
        if sampler.needs_oracle:
            sampler.require_oracle(None)
        if sampler.census is not None and self.aux:
            raise DeltaflError(
                f"{name} asks for a census in place of auxiliary variables; leave out aux"
            )
        if sampler.census is None and (sampler.uses_aux or control.uses_aux) and self.aux < 1:
            cure = (
                "write aux=10 if each has 10, such as shares of labels, and let each client "
                "report them"
            )
            raise DeltaflError(
                f"{name} with {estimator!r} uses auxiliary variables of the clients: {cure}"
            )
        if memory.folder is not None and self.state_path is None:
            raise DeltaflError(
                "memory_path is part of the saved state, and there is no state_path: write both"
            )

    def plan_for(self, clients: Mapping[str, ClientInfo]) -> Plan:
        """The plan for these clients."""
        sizes, aux = zip(*clients.values(), strict=True)
        population = Population.from_sizes(
            sizes, self.weights, aux if self.aux else None, self.max_ratio
        )
        plan = replace(self.plan, population=population, n=min(self.plan.n, len(sizes)))
        return plan if plan.census is None else plan.with_census(aux)


def make_rules(
    sampler: str | Sampler = "innovation@local-pivotal",
    n: int = 10,
    server_optimizer: str | ServerOptimizer = "sgd",
    state_path: str | Path | None = None,
    estimator: str | ControlVariate | None = None,
    *,
    weights: str = "data",
    seed: int | None = None,
    identity: str = "auto",
    clip: str | None = None,
    max_ratio: float | None = None,
    min_clients: int | None = None,
    aux: int = 0,
    memory_dtype: str = "float32",
    memory_path: str | Path | None = None,
    **more: Any,
) -> Rules:
    """The rules from the settings of a host; ``deltafl.flower.DeltaStrategy`` says what each means.

    ``more`` are other attributes of the plan.
    """
    check_whole("n", n, "at least 1", 1)
    check_whole("aux", aux, "0 for none", 0)
    min_clients = n if min_clients is None else min_clients
    check_whole("min_clients", min_clients, "at least 1, or None for n", 1)
    for name, given in (("state_path", state_path), ("memory_path", memory_path)):
        if given == "" or not isinstance(given, str | Path | None):
            raise DeltaflError(f"{name} is {given!r}; write the name of a folder, or None for none")
    folder = (
        None
        if memory_path is None
        else str(Path(memory_path).absolute() / f"federation-{token_hex(4)}")
    )
    settings: dict[str, Any] = {
        "server_optimizer": server_optimizer,
        "seed": randbits(63) if seed is None else seed,
        "clip": clip,
        "memory": RowFormat(memory_dtype, folder),
        **({} if estimator is None else {"estimator": estimator}),
        **more,
    }
    somebody = Population.from_sizes(
        [1] * n, weights, [[0.0] * aux] * n if aux else None, max_ratio
    )
    plan = make_plan(sampler, somebody, n, **settings)
    max_ratio = 3.0 if max_ratio is None and plan.part("clip") is not None else max_ratio
    path = None if state_path is None else Path(state_path)
    return Rules(plan, weights, aux, path, identity, max_ratio, seed is None, min_clients)


def check_whole(name: str, value: Any, allowed: str, least: int) -> None:
    """Raise a ``DeltaflError`` unless ``value`` is an int of at least ``least``; booleans and
    10.0 are refused.
    """
    if type(value) is not int or value < least:
        raise DeltaflError(f"{name} is {value!r}; it must be a whole number, {allowed}")


def check_texts(name: str, value: Iterable[str]) -> tuple[str, ...]:
    """Return a list of strings as a tuple; a single string, which would be read letter by
    letter, is refused.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise DeltaflError(f"{name} is {value!r}; it must be a list of texts: write {name}=['...']")
    return tuple(value)


def check_seconds(name: str, value: Any, interval: str = "(0, inf)") -> float:
    """Return a number of seconds as a float; a ``DeltaflError`` unless it is a number in the
    interval.
    """
    if not is_in(value, interval):
        raise DeltaflError(f"{name} is {value!r}; it must be a number of seconds in {interval}")
    return float(value)
