"""The rules of a federation: which settings there are, what they mean together, and which no
federation can have.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from secrets import randbits
from typing import Any, Literal

from ..errors import DeltaflError, explained, is_in, unknown_name
from ..model.parts import Patterns
from ..plan import Plan, make_plan
from ..samplers.base import Sampler
from ..samplers.label import unknown_setting
from ..scale.rows import RowFormat
from ..server.size import AUTO
from ..server.table import SETTINGS
from ..store.folder import new_name
from ..types import Population, is_whole
from .clients import ClientInfo
from .exchange import AUX
from .facts import FACTS

IDENTITIES = ("auto", "public-key", "name", "config")


@dataclass(frozen=True)
class Rules:
    """What does not change over the rounds; ``make_rules`` makes them of settings.

    Attributes:
        plan: The plan, but for its population and with the largest cohort size; with this
            federation's own memory folder.
        own_seed: Whether the seed was drawn here: then that of a saved state takes its place.
        state_path: Folder where the state is saved after every round and from which a restart
            resumes; or None.
        min_clients: Clients without whom no round begins.
        weights: ``"data"`` for the target sum_i (n_i / N) F_i, ``"uniform"`` for the plain mean
            over clients.
        identity: How clients are identified across restarts, one of ``IDENTITIES``.
        max_ratio: No client counts more than so many times the median number of examples, nor as
            cheaper than the median cost over it; None for 1 with ``clip``, and for no limit
            without.
        aux: Number of auxiliary variables that every client must send when it registers, such as
            its shares of 10 labels, for ``balanced``.
        strata: The names of the strata, such as ``["north", "south"]``, one of which every client
            must send when it registers; for ``at_least``, ``allocation`` and ``stages``.
        costs: Whether every client must send what its round costs when it registers; for
            ``per_cost`` and ``budget``.
        buffers: Name patterns of floating-point arrays that are not trained, beside those of batch
            normalisation.
        local: Name patterns of arrays that never leave a client: a personal head, FedBN.
        trainable: Name patterns of the only arrays that are sent and trained, or ``"lora"``; empty
            for all.
        tied: Whether arrays with the same numbers are one tensor; None refuses a model with such.
        fraction_train: n is this share of the known clients, in (0, 1]; None for n as it is.
        weighted_by_key: The metric by which clients' metrics are weighted, such as Flower's
            ``"num-examples"``; None for the weights of the estimate, whatever a reply claims.
        forget: Keys of clients (as in the log) to drop from the saved state, with everything
            remembered about them; they are never selected again.
        absent_after: A client that was not there in so many rounds in a row, or more, leaves the
            target until it returns: its weight, its scores and what is remembered of it. None for
            never.
        registration_timeout: Seconds that clients have to register.
    """

    plan: Plan
    own_seed: bool
    state_path: Path | None
    min_clients: int
    weights: str = "data"
    identity: str = "auto"
    max_ratio: float | None = None
    aux: int = 0
    strata: Collection[str] = ()
    costs: bool = False
    buffers: Collection[str] = ()
    local: Collection[str] = ()
    trainable: Patterns = ()
    tied: bool | None = None
    fraction_train: float | None = None
    weighted_by_key: str | None = None
    forget: Collection[str] = ()
    absent_after: int | None = 50
    registration_timeout: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what no federation can do: later it would cost a round of the clients' work."""
        plan = self.plan
        sampler = plan.sampler
        if self.identity not in IDENTITIES:
            raise unknown_name("identity", self.identity, IDENTITIES)
        check_whole("seed", plan.seed, "at least 0", 0)
        if not isinstance(self.costs, bool):
            raise DeltaflError(f"costs is {self.costs!r}; write True, or False")
        check_texts("buffers", self.buffers)
        check_texts("local", self.local)
        if not isinstance(self.trainable, str):  # a single name or pattern
            check_texts("trainable", self.trainable)
        check_texts("forget", self.forget)
        if not (self.tied is None or isinstance(self.tied, bool)):
            raise DeltaflError(f"tied is {self.tied!r}; write True, False, or None")
        if not (self.weighted_by_key is None or isinstance(self.weighted_by_key, str)):
            raise DeltaflError(
                f"weighted_by_key is {self.weighted_by_key!r}; write the name of a metric, or None "
                "for the weights of the estimate"
            )
        fraction = self.fraction_train
        if fraction is not None and not is_in(fraction, "(0, 1]"):
            raise DeltaflError(
                f"fraction_train is {fraction!r}; it must be a number in (0, 1], or None for n"
            )
        if fraction is not None and plan.part("dp") is not None:
            raise DeltaflError(
                "dp counts on n / min_clients, which fraction_train leaves open; write n"
            )
        if self.absent_after is not None:
            check_whole("absent_after", self.absent_after, "at least 1, or None for never", 1)
        check_seconds("registration_timeout", self.registration_timeout)
        if sampler.needs_oracle:
            # It raises, with the sampler's own sentence.
            sampler.require_oracle(None, plan.method)
        if sampler.census is not None and self.aux:
            raise DeltaflError(
                f"{plan.method} asks for a census in place of auxiliary variables; leave out aux"
            )
        uses_aux = sampler.uses_aux or plan.rule.control.uses_aux
        if uses_aux and sampler.census is None and self.aux < 1:
            raise DeltaflError(
                f"{plan.method} with {plan.rule.name!r} uses auxiliary variables of the "
                "clients: write aux=10 if each has 10, such as shares of labels, and let each "
                "client report them"
            )
        if plan.memory.folder is not None and self.state_path is None:
            raise DeltaflError(
                "memory_path is part of the saved state, and there is no state_path: write both"
            )

    @property
    def wanted(self) -> dict[str, Any]:
        """What the server wants to know of each client beside its size, by the fact's name."""
        settings = {name: getattr(self, fact.setting) for name, fact in FACTS.items()}
        return {name: setting for name, setting in settings.items() if setting}

    @property
    def registration(self) -> dict[str, Any]:
        """What a client is asked once: how many auxiliary variables, and which facts."""
        return {AUX: self.aux, **dict.fromkeys(self.wanted, True)}

    def cohort_size(self, num_clients: int) -> int:
        """Clients selected per round, of so many known ones."""
        if self.fraction_train is None:
            return min(self.plan.n, num_clients)
        # Rounded down, as Flower's FedAvg does.
        return max(1, int(self.fraction_train * num_clients))

    def plan_for(self, clients: Mapping[str, ClientInfo]) -> Plan:
        """The plan for these clients."""
        infos = clients.values()
        sizes = [info.num_examples for info in infos]
        aux = [info.aux for info in infos]
        # Without ``aux`` there are none, or what clients answered to a census.
        known = aux if self.aux else None
        facts = {
            FACTS[name].column: [getattr(info, name) for info in infos] for name in self.wanted
        }
        population = Population.from_sizes(sizes, self.weights, known, self.max_ratio, **facts)
        plan = replace(
            self.plan,
            population=population,
            n=self.cohort_size(len(sizes)),
        )
        if plan.census is None:
            return plan
        return plan.with_census(aux)


#: Attributes of ``Rules`` that users set as they are.
# Without the plan and what ``make_rules`` works out from other settings.
_OWN = tuple(Rules.__dataclass_fields__)[4:]


def make_rules(
    sampler: str | Sampler = "innovation@local-pivotal",
    n: int | Literal["auto"] | None = None,
    state_path: str | Path | None = None,
    *,
    seed: int | None = None,
    min_clients: int | None = None,
    memory_dtype: str = "float32",
    memory_path: str | Path | None = None,
    host: Collection[str] = ("min_clients",),
    **settings: Any,
) -> Rules:
    """The rules from the settings that all hosts share.

    Args:
        sampler: A label, such as ``deltafl recommend`` prints, or a sampler of your own. The
            default keeps one update of each client at the server: as many models as there are
            clients.
        n: Clients selected per round; None for 10, or for what ``fraction_train`` says. With
            ``"auto"`` cohorts size themselves (``server/size.py``), the first is 10.
        state_path: See ``Rules``.
        seed: Seed of the draws, which says who is selected when; None draws one, which the state
            keeps and nothing else shows.
        min_clients: Clients without whom no round begins; None for n, and for 2 with
            ``fraction_train`` or ``n="auto"``.
        memory_dtype: ``"float32"`` or ``"bfloat16"``, for the updates that the server remembers,
            one per client.
        memory_path: Folder on a disk for them, with ``state_path``; None for RAM.
        host: The names of the host's own arguments, for the message about an unknown one.
        settings: ``weights`` and all that follows it in ``Rules``, ``estimator``,
            ``response_floor``, and the settings of the server's parts (``server/table.py``):
            ``average=0.5``, ``mime=0.7``, ``clip="median"``, ``dp=...``.

    Raises:
        DeltaflError: If a name is unknown, an argument is out of range, or no federation can do it.
    """
    shared = {*signature(make_rules).parameters} - {"min_clients", "host", "settings"}
    known = {*shared, *_OWN, "estimator", "response_floor", *SETTINGS}
    for name, value in settings.items():
        if name not in known:
            raise unknown_setting(name, value, known | {*host} - {"self", "settings"})
    own = {name: settings.pop(name) for name in _OWN if name in settings}
    fraction = own.get("fraction_train")
    if n is not None and fraction is not None:
        raise DeltaflError(
            f"n = {n!r} and fraction_train = {fraction!r} say the same; leave out one"
        )
    first: Any = 10 if n in (None, AUTO) else n
    first = check_whole("n", first, "at least 1, or 'auto'", 1)
    aux = own["aux"] = check_whole("aux", own.get("aux", 0), "0 for none", 0)
    if min_clients is None:
        has_number = fraction is None and n != AUTO
        min_clients = first if has_number else 2  # as Flower's FedAvg
    min_clients = check_whole(
        "min_clients",
        min_clients,
        "at least 1, or None for n (min_nodes in Flower)",
        1,
    )
    state_path = _folder("state_path", state_path)
    memory_path = _folder("memory_path", memory_path)
    memory = RowFormat(memory_dtype)
    if memory_path is not None:
        # Several federations may keep their updates on the same disk.
        rows = memory_path.absolute() / new_name("federation")
        memory = replace(memory, folder=str(rows))
    # None is the sampler's own, which ``make_plan`` takes where no other is given.
    if settings.get("estimator", "") is None:
        del settings["estimator"]
    # The clients are not known yet; every label is checked with as many as one cohort.
    strata = own.get("strata", ())
    check_texts("strata", strata)
    m = max(first, len(strata))
    own_aux = [[0.0] * aux] * m if aux else None
    facts: dict[str, Any] = {
        fact.column: [fact.example(wanted, client) for client in range(m)]
        for fact in FACTS.values()
        if (wanted := own.get(fact.setting))
    }
    somebody = Population.from_sizes(
        [1] * m,
        own.get("weights", "data"),
        own_aux,
        own.get("max_ratio"),
        **facts,
    )
    own_seed = seed is None
    if seed is None:
        seed = randbits(63)  # who can guess it knows who is selected when
    plan = make_plan(sampler, somebody, n or first, seed=seed, memory=memory, **settings)
    plan = replace(plan, n=first)
    plan.sampler.check(somebody)
    # Where clients may lie they may claim examples, too.
    if own.get("max_ratio") is None and plan.part("clip") is not None:
        own["max_ratio"] = 1.0
    return Rules(plan, own_seed, state_path, min_clients, **own)


def _folder(name: str, path: Any) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, str | Path) or str(path) == "" or "\0" in str(path):
        raise DeltaflError(f"{name} is {path!r}; write the name of a folder, or None for none")
    # Else there were a folder named ~, and who deletes that may delete another one.
    with explained(f"{name} is {str(path)!r}", cure="; write the whole path"):
        return Path(path).expanduser()


def check_whole(name: str, value: Any, allowed: str, least: int) -> int:
    """A whole number as an int, NumPy's too; refuse what is none of at least ``least``, such as a
    boolean or 10.0.
    """
    if not is_whole(value) or value < least:
        raise DeltaflError(f"{name} is {value!r}; it must be a whole number, {allowed}")
    return int(value)


def check_texts(name: str, value: Any) -> None:
    """Refuse what is no list of texts: a single one would be read letter by letter."""
    if (
        isinstance(value, str)
        or not isinstance(value, Iterable)
        or not all(isinstance(text, str) for text in value)
    ):
        raise DeltaflError(f"{name} is {value!r}; it must be a list of texts: write {name}=['...']")


def check_seconds(name: str, value: Any, interval: str = "(0, inf)") -> float:
    """A number of seconds as a float; refuse what is not in the interval."""
    if not is_in(value, interval):
        raise DeltaflError(f"{name} is {value!r}; it must be a number of seconds in {interval}")
    return float(value)
