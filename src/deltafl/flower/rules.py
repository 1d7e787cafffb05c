"""The settings of a federation, refused at once where no federation can have them. Knows no Flower."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeltaflError, require_method
from ..estimators.remote import RemoteControl
from ..estimators.table import find_estimator
from ..round import Plan
from ..samplers import Sampler, uses_aux
from ..scale.memory_budget import Cures, MemorySize, memory_size, memory_words, require_room
from ..scale.rows import DTYPES, RowFormat
from ..server.optimizers import ServerOptimizer, Sgd
from ..streams import stream
from ..types import FloatArray, Params, Population

#: The longest sketch that ``count_sketch`` makes.
LARGEST_SKETCH = 128


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

    def noise(self, largest_coef: float, num_params: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Noise for D, float64 (d,).

        Args:
            largest_coef: coef_max over all selected clients.
            num_params: d.
            rng: A generator for tests. None for one that cannot be seeded: reproducible noise hides nothing.
        """
        scale = self.noise_multiplier * largest_coef * self.norm
        generator = stream(secrets.randbits(63), "noise") if rng is None else rng
        return generator.normal(scale=scale, size=num_params) if scale > 0 else np.zeros(num_params)


@dataclass(frozen=True)
class ServerMemory:
    """How and where the server keeps one update per client, for estimators that remember them.

    With ``memory_path`` the rows are in a file, in a folder that the saved state names. A file and a state that do not
    belong together (an old copy of one was put back) would make the estimate count updates that nobody sent, so both
    record their round::

        MEMORY_PATH/federation-XXXXXXXX/rows.bin     the rows
        MEMORY_PATH/federation-XXXXXXXX/round        the round of the state that they belong to, written last

    Attributes:
        dtype: ``"float32"`` or ``"bfloat16"``: ``memory_dtype``.
        path: ``memory_path``; None for RAM.
        state_path: Where the state is saved after every round; None if it is not. Required with ``path``.
        folder: This federation's folder below ``path``; None before there is one.
    """

    dtype: str = "float32"
    path: str | Path | None = None
    state_path: Path | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown types, and rows in a file without a saved state that they belong to."""
        RowFormat(self.dtype)
        if self.path is not None and self.state_path is None:
            raise DeltaflError(
                f"memory_path is {str(self.path)!r} and there is no state_path: the file is part of the saved state; "
                "write state_path=..., too, or leave memory_path out"
            )

    @property
    def rows(self) -> RowFormat:
        """How the core keeps the rows."""
        folder = self.folder or self.path
        return RowFormat(self.dtype, None if folder is None else str(folder))

    def with_new_folder(self) -> "ServerMemory":
        """With a folder of its own; it is created once there are rows to write."""
        if self.path is None:
            return self
        return replace(self, folder=str(Path(self.path).absolute() / f"federation-{secrets.token_hex(4)}"))

    def size(self, num_clients: int, num_params: int, n: int) -> MemorySize:
        """Bytes it takes at most; the state is saved after every round of n clients."""
        return memory_size(self.rows, (num_clients, num_params), None if self.state_path is None else n)

    def describe(self, num_clients: int, num_params: int, n: int) -> str:
        """The same as the end of a sentence."""
        size, place = self.size(num_clients, num_params, n), f"in {self.rows.folder or self.state_path}"
        return memory_words(self.rows, (num_clients, num_params), size, place)

    def require_room(self, num_clients: int, num_params: int, n: int, num_seen: int = 0) -> None:
        """Raise a ``DeltaflError`` if more RAM or disk is needed than is free.

        ``num_seen`` clients have an update already: in RAM their rows are part of what is needed.
        """
        size, rows = self.size(num_clients, num_params, n), self.rows
        held = 0 if rows.folder is not None else num_seen * num_params * DTYPES[rows.dtype].itemsize
        require_room(size, rows, self.state_path, Cures("a lower n", "state_path"), held)


@dataclass(frozen=True)
class Rules:
    """What does not change over the rounds; the fields are those of ``DeltaStrategy``."""

    sampler: Sampler
    n: int
    estimator: str = "horvitz-thompson"
    server_optimizer: ServerOptimizer = field(default_factory=Sgd)
    weights: str = "data"
    seed: int = 0
    response_floor: float = 0.1
    norm_guard: float | None = None
    clipping: WeightedClipping | None = None
    sketch: int = 0
    aux: int = 0
    memory: ServerMemory = field(default_factory=ServerMemory)

    def __post_init__(self) -> None:
        """Refuse what no federation can do: later it would cost a round of the clients' work."""
        self._check_types()
        name = type(self.sampler).__name__
        if self.sampler.needs_oracle:
            raise DeltaflError(
                f"{name} needs every client's update or loss before the draw, which only a simulation has; choose a "
                "practical sampler such as 'pracdelta' or 'fedpracis'"
            )
        if self.sketch and (self.sampler.sketch_size or self.sampler.output_bias_size):
            raise DeltaflError(f"{name} measures the updates themselves on the server; sketches cannot replace them")
        if uses_aux(self.sampler, self.estimator) and self.aux < 1:
            raise DeltaflError(
                f"{name} with {self.estimator!r} uses auxiliary variables of the clients: write aux=10 if each has 10, "
                "such as its shares of 10 labels, and give aux=... to deltafl.flower.register"
            )
        if self.clipping is not None:
            self._check_clipping(self.clipping)
        if (self.memory.dtype != "float32" or self.memory.path is not None) and not self.remembers:
            given = "memory_dtype" if self.memory.path is None else "memory_path"
            raise DeltaflError(
                f"{given} is set, but with {self.estimator!r} the server remembers no update of a client; leave it out "
                "or choose an estimator with which it does, such as 'innovation'"
            )

    def _check_types(self) -> None:
        if not isinstance(self.sampler, Sampler):
            raise DeltaflError(
                f"sampler is {self.sampler!r}; write a name such as 'pracdelta', or an object such as PracDelta()"
            )
        require_method(self.server_optimizer, "step", "server_optimizer", "write a name such as 'sgd'")
        check_whole("n", self.n, "at least 1", 1)
        check_whole("seed", self.seed, "at least 0", 0)
        check_whole("sketch", self.sketch, f"from 1 to {LARGEST_SKETCH}, or 0 for none", 0, LARGEST_SKETCH)
        check_whole("aux", self.aux, "0 for none", 0)
        if self.clipping is not None and not isinstance(self.clipping, WeightedClipping):
            raise DeltaflError(
                f"clipping is {self.clipping!r}; it must be a WeightedClipping, or None for none: write "
                "clipping=WeightedClipping(1.0) to clip updates to norm 1"
            )

    def _check_clipping(self, clipping: WeightedClipping) -> None:
        if isinstance(find_estimator(self.estimator).control, RemoteControl):
            raise DeltaflError(
                f"with {self.estimator!r} clients remember what they sent, and clipping on the server would change it; "
                "write the estimator 'horvitz-thompson' or leave the clipping out"
            )
        noisy = clipping.noise_multiplier > 0
        if noisy and self.estimator not in {"horvitz-thompson", "hansen-hurwitz"}:
            raise DeltaflError(
                f"noise is scaled to the largest weight of a reply, which bounds the estimator 'horvitz-thompson' "
                f"alone, not {self.estimator!r}; write estimator='horvitz-thompson' or leave the noise out"
            )
        if noisy and self.norm_guard is not None:
            raise DeltaflError(
                f"norm_guard is {self.norm_guard} and noise is added: the guard would reveal the lengths of earlier "
                "estimates without their noise; write norm_guard=None or leave the noise out"
            )

    @property
    def remembers(self) -> bool:
        """Whether the server keeps one update per client."""
        return find_estimator(self.estimator).control.remembers

    def plan(self, sizes: list[int], aux: Sequence[Sequence[float]] | None = None) -> Plan:
        """The plan for clients of these sizes, with these auxiliary variables."""
        return Plan(
            population=Population.from_sizes(sizes, self.weights, aux if self.aux else None),
            sampler=self.sampler,
            n=min(self.n, len(sizes)),
            estimator=self.estimator,
            server_optimizer=self.server_optimizer,
            seed=self.seed,
            response_floor=self.response_floor,
            norm_guard=self.norm_guard,
            memory=self.memory.rows,
        )


def check_whole(name: str, value: Any, allowed: str, least: int, most: int | None = None) -> None:
    """Raise a ``DeltaflError`` unless ``value`` is an int from ``least`` to ``most``; booleans and 10.0 are refused."""
    if type(value) is not int or value < least or (most is not None and value > most):
        raise DeltaflError(f"{name} is {value!r}; it must be a whole number, {allowed}")


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple; a single string, which would be read letter by letter, is refused."""
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(part, str) for part in value):
        raise DeltaflError(f"{name} is {value!r}; it must be a list of texts: write {name}=['...']")
    return tuple(value)
