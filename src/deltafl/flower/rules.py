"""The settings of a federation, refused at once where no federation can have them. Knows no Flower."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..estimators.remote import RemoteControl
from ..round import Plan, make_plan
from ..samplers import Sampler
from ..scale.memory_budget import MemorySize, memory_size, require_room
from ..scale.rows import DTYPES, RowFormat
from ..streams import stream
from ..types import FloatArray, Params, Population
from .clients import ClientRegistry

#: The longest sketch that ``count_sketch`` makes.
LARGEST_SKETCH = 128
IDENTITIES = ("auto", "public-key", "name", "config")


@dataclass(frozen=True)
class WeightedClipping:
    """Clip each update, and add noise scaled to the largest weight of the round.

    Flower's wrappers for differential privacy add noise for a plain mean, in which nobody counts more than 1 / n. Here
    a reply counts coef_i, which may be much more::

        u_i <- u_i min(1, C / norm(u_i))        hence norm(coef_i u_i) <= coef_max C
        D   <- sum_i coef_i u_i + N(0, (z coef_max C)^2)    in each coordinate

    coef_max is the largest coefficient of all selected clients, fixed before any reply is seen. Given the cohort, this
    is the Gaussian mechanism with noise multiplier z for adding or removing one reply. It does not cover what the draws
    of a sampler that learns from the replies reveal.

    Attributes:
        norm: C > 0, the largest norm of an update, in update units (learning rate included).
        noise_multiplier: z >= 0, standard deviation of the noise over coef_max C; 0 only clips.
    """

    norm: float
    noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (0 < self.norm < float("inf") and 0 <= self.noise_multiplier < float("inf")):
            raise DeltaflError(
                f"clipping to norm {self.norm} with noise multiplier {self.noise_multiplier}; the norm must be above 0 "
                "and the multiplier at least 0"
            )

    def clip(self, update_d: Params) -> Params:
        """u_i, scaled to norm C if it is longer; updates that are not finite pass, to be refused later."""
        norm = float(np.linalg.norm(update_d.astype(np.float64)))
        if not np.isfinite(norm) or norm <= self.norm:
            return update_d
        return (update_d.astype(np.float64) * (self.norm / norm)).astype(np.float32)

    def noise(self, largest_coef: float, num_params: int) -> FloatArray:
        """Noise for D, float64 (d,); it cannot be seeded, for reproducible noise hides nothing.

        Args:
            largest_coef: coef_max over all selected clients.
            num_params: d.
        """
        scale = self.noise_multiplier * largest_coef * self.norm
        return stream(secrets.randbits(63), "noise").normal(scale=scale, size=num_params)


@dataclass(frozen=True)
class Rules:
    """What does not change over the rounds; see ``DeltaStrategy``.

    Attributes:
        plan: The plan, but for its population and with the largest cohort size. Where the memory of one update per
            client is kept in a file, its folder is this federation's own.
        weights: The weights of the clients, ``"data"`` or ``"uniform"``.
        clipping: Clip updates and add noise.
        sketch: Length of the clients' sketches; 0 for none.
        aux: Number of auxiliary variables of each client.
        state_path: Where the state is saved after every round; None if it is not.
        identity: How clients are identified, see ``registration.client_key``.
    """

    plan: Plan
    weights: str = "data"
    clipping: WeightedClipping | None = None
    sketch: int = 0
    aux: int = 0
    state_path: Path | None = None
    identity: str = "auto"

    @classmethod
    def of(
        cls,
        sampler: str | Sampler,
        n: int,
        *,
        weights: str = "data",
        aux: int = 0,
        settings: dict[str, Any],
        **more: Any,
    ) -> "Rules":
        """The rules of a label or a sampler; ``settings`` are other attributes of ``Plan``, ``more`` those of rules."""
        check_whole("n", n, "at least 1", 1)
        check_whole("aux", aux, "0 for none", 0)
        population = Population.from_sizes([1] * n, weights, [[0.0] * aux] * n if aux else None)
        if isinstance(sampler, str):
            plan = make_plan(sampler, population, n, **settings)
        else:
            plan = Plan(population, sampler, n, **settings)
        return cls(plan, weights, aux=aux, **more)

    def __post_init__(self) -> None:
        """Refuse what no federation can do: later it would cost a round of the clients' work."""
        sampler, estimator, memory = self.plan.sampler, self.plan.rule.name, self.plan.memory
        name = type(sampler).__name__
        if self.identity not in IDENTITIES:
            raise unknown_name("identity", self.identity, IDENTITIES)
        check_whole("seed", self.plan.seed, "at least 0", 0)
        check_whole("sketch", self.sketch, f"from 1 to {LARGEST_SKETCH}, or 0 for none", 0, LARGEST_SKETCH)
        if sampler.needs_oracle:
            raise DeltaflError(
                f"{name} needs every client's update or loss before the draw, which only a simulation has; choose a "
                "practical sampler such as 'pracdelta' or 'fedpracis'"
            )
        if self.sketch and (sampler.sketch_size or sampler.output_bias_size):
            raise DeltaflError(f"{name} measures the updates themselves on the server; sketches cannot replace them")
        if (sampler.uses_aux or self.plan.rule.control.uses_aux) and self.aux < 1:
            raise DeltaflError(
                f"{name} with {estimator!r} uses auxiliary variables of the clients: write aux=10 if each has 10, "
                "such as its shares of 10 labels, and give aux=... to deltafl.flower.register"
            )
        if self.clipping is not None:
            self._check_clipping(self.clipping)
        if memory.folder is not None and self.state_path is None:
            raise DeltaflError(
                "memory_path is set and there is no state_path: the file is part of the saved state; write "
                "state_path=..., too, or leave memory_path out"
            )
        if memory != RowFormat() and not self.remembers:
            given = "memory_dtype" if memory.folder is None else "memory_path"
            raise DeltaflError(
                f"{given} is set, but with {estimator!r} the server remembers no update of a client; leave it out or "
                "choose an estimator with which it does, such as 'innovation'"
            )

    def _check_clipping(self, clipping: WeightedClipping) -> None:
        if not isinstance(clipping, WeightedClipping):
            raise DeltaflError(f"clipping is {clipping!r}; write clipping=WeightedClipping(1.0) to clip to norm 1")
        estimator, noisy = self.plan.rule.name, clipping.noise_multiplier > 0
        if isinstance(self.plan.rule.control, RemoteControl):
            raise DeltaflError(
                f"with {estimator!r} clients remember what they sent, and clipping on the server would change it; "
                "write the estimator 'horvitz-thompson' or leave the clipping out"
            )
        if noisy and estimator not in {"horvitz-thompson", "hansen-hurwitz"}:
            raise DeltaflError(
                f"noise is scaled to the largest weight of a reply, which bounds the estimator 'horvitz-thompson' "
                f"alone, not {estimator!r}; write estimator='horvitz-thompson' or leave the noise out"
            )
        if noisy and self.plan.norm_guard is not None:
            raise DeltaflError(
                f"norm_guard is {self.plan.norm_guard} and noise is added: the guard would reveal the lengths of "
                "earlier estimates without their noise; write norm_guard=None or leave the noise out"
            )

    @property
    def remembers(self) -> bool:
        """Whether the server keeps one update per client."""
        return self.plan.rule.control.remembers

    def plan_for(self, clients: ClientRegistry) -> Plan:
        """The plan for these clients."""
        population = Population.from_sizes(clients.sizes, self.weights, clients.aux if self.aux else None)
        return replace(self.plan, population=population, n=min(self.plan.n, len(clients.sizes)))

    def memory_size(self, num_clients: int, num_params: int) -> MemorySize:
        """Bytes that one update per client takes at most; the state is saved after every round."""
        shape = (num_clients, num_params)
        return memory_size(self.plan.memory, shape, None if self.state_path is None else self.plan.n)

    def require_room(self, num_clients: int, num_params: int, num_seen: int = 0) -> None:
        """Raise a ``DeltaflError`` if the server remembers updates, and more RAM or disk is needed than is free.

        ``num_seen`` clients have an update already: in RAM their rows are part of what is needed.
        """
        if self.remembers:
            size, rows = self.memory_size(num_clients, num_params), self.plan.memory
            held = 0 if rows.folder is not None else num_seen * num_params * DTYPES[rows.dtype].itemsize
            require_room(size, rows, self.state_path, "a lower n", "state_path", held)


def check_whole(name: str, value: Any, allowed: str, least: int, most: int | None = None) -> None:
    """Raise a ``DeltaflError`` unless ``value`` is an int from ``least`` to ``most``; booleans and 10.0 are refused."""
    if type(value) is not int or value < least or (most is not None and value > most):
        raise DeltaflError(f"{name} is {value!r}; it must be a whole number, {allowed}")


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple; a single string, which would be read letter by letter, is refused."""
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(part, str) for part in value):
        raise DeltaflError(f"{name} is {value!r}; it must be a list of texts: write {name}=['...']")
    return tuple(value)
