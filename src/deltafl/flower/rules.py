"""What does not change over a federation's rounds, and what of it no federation can do. No Flower here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import DeltaflError
from ..estimators.controls import remembers
from ..estimators.remote import RemoteControl
from ..estimators.table import find_estimator
from ..round import Plan
from ..samplers import uses_known
from ..server.optimizers import ServerOptimizer, Sgd
from ..types import Population, Sampler
from .checks import check_part, check_whole
from .clipping import WeightedClipping
from .server_memory import ServerMemory

#: The most numbers that ``count_sketch`` makes.
LARGEST_SKETCH = 128


@dataclass(frozen=True)
class Rules:
    """What does not change over the rounds; see ``round.Plan`` for the fields that it has too.

    Attributes:
        sampler: Who is asked.
        n: Cohort size; fewer are asked while fewer clients are known.
        estimator: What each reply counts.
        server_optimizer: How the model moves.
        weights: ``"data"`` for w_i = n_i / N, ``"uniform"`` for w_i = 1 / m.
        seed: Seed of the draws.
        response_floor: Least response rate assumed of a client.
        norm_guard: Shorten estimates that are longer than so many times the median of those before; None for no guard.
        clipping: Clip updates and add noise, or None.
        sketch: Numbers of the sketches that clients send and the sampler learns from; 0 for norms measured here.
        known: Numbers that are known of every client beforehand, such as its shares of labels; 0 for none.
        memory: How and where the server keeps one update a client, if the estimator remembers them.
    """

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
    known: int = 0
    memory: ServerMemory = field(default_factory=ServerMemory)

    def __post_init__(self) -> None:
        """Refuse what no federation can do."""
        self._check_types()
        name = type(self.sampler).__name__
        if self.sampler.needs_oracle:
            raise DeltaflError(
                f"{name} needs every client's update or loss before the draw, which only a simulation has; choose a "
                "practical sampler such as 'pracdelta' or 'fedpracis'"
            )
        if self.sketch and (getattr(self.sampler, "sketch_size", 0) or getattr(self.sampler, "output_bias_size", 0)):
            raise DeltaflError(f"{name} looks at the updates themselves on the server; sketches cannot replace them")
        if uses_known(self.sampler, self.estimator) and self.known < 1:
            raise DeltaflError(
                f"{name} with {self.estimator!r} looks at what is known of the clients beforehand: write known=10 if "
                "each tells 10 numbers, such as its shares of 10 labels, and give known=... to deltafl.flower.register"
            )
        if self.clipping is not None:
            self._check_clipping(self.clipping)
        if not self.memory.is_default and not self.remembers:
            given = "memory_dtype" if self.memory.path is None else "memory_path"
            raise DeltaflError(
                f"{given} is set, but with {self.estimator!r} the server remembers no update of a client; leave it out "
                "or write an estimator with which it does, such as 'innovation'"
            )

    def _check_types(self) -> None:
        """Refuse settings of another type, or out of range: later a client's round would be lost to them."""
        check_part("sampler", self.sampler, ("unbiased", "needs_oracle", "init", "open", "update"), "pracdelta")
        check_part("server_optimizer", self.server_optimizer, ("init", "step"), "sgd")
        check_whole("n", self.n, "at least 1", 1)
        check_whole("seed", self.seed, "at least 0", 0)
        check_whole("sketch", self.sketch, f"from 1 to {LARGEST_SKETCH}, or 0 for none", 0, LARGEST_SKETCH)
        check_whole("known", self.known, "0 for none", 0)
        if self.clipping is not None and not isinstance(self.clipping, WeightedClipping):
            raise DeltaflError(
                f"clipping is {self.clipping!r}; it must be a WeightedClipping, or None for none: write "
                "clipping=WeightedClipping(1.0) to clip updates to norm 1"
            )

    def _check_clipping(self, clipping: WeightedClipping) -> None:
        """Refuse clipping, or noise, with what it does not go with."""
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
                f"norm_guard is {self.norm_guard} and noise is added: the guard goes by the lengths of earlier rounds "
                "without their noise, and would show them; write norm_guard=None or leave the noise out"
            )

    @property
    def remembers(self) -> bool:
        """Whether the server keeps one update a client."""
        return remembers(find_estimator(self.estimator).control)

    @property
    def loss_of(self) -> str | None:
        """The sampler's name if it learns from the clients' losses, so that a reply without one is of no use."""
        return type(self.sampler).__name__ if getattr(self.sampler, "needs_loss", False) else None

    def plan(self, sizes: list[int], known: Sequence[Sequence[float]] | None = None) -> Plan:
        """The plan for clients of these sizes, of whom this is known."""
        return Plan(
            population=Population.from_sizes(sizes, self.weights, known if self.known else None),
            sampler=self.sampler,
            n=min(self.n, len(sizes)),
            estimator=self.estimator,
            server_optimizer=self.server_optimizer,
            seed=self.seed,
            response_floor=self.response_floor,
            norm_guard=self.norm_guard,
            memory=self.memory.rows,
        )
