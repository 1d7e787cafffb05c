"""Rounds over clients who come and go: what a federation needs beside ``open_round`` and ``close_round``.

No Flower here, so that all of it can be tested and reasoned about without messages. A client is a *key*, a string that
outlives connections and restarts; its index in the population is the order in which keys were admitted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import DeltaflError
from ..estimators.remote import RemoteControl, RemoteReply, begin_anew
from ..estimators.table import find_estimator
from ..round import Plan, RoundState, close_round, coefficients, init_round, open_round, response_rates
from ..samplers import uses_known
from ..server_optimizers import ServerOptimizer, Sgd
from ..types import Cohort, Params, Population, RejectedReply, RoundInfo, Sampler
from .answers import Answer, reports_of, screen
from .arrays import Arrays, Layout, mean_rest
from .clipping import WeightedClipping, WithNoise
from .growth import grow_state
from .remembering import expected_of, forgot, lost_memory
from .sketched import by_sketch

_LARGEST_SIZE = 2**40


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
        clipping: Clip updates and add noise, or None.
        sketch: Numbers of the sketches that clients send and the sampler learns from; 0 for norms measured here.
        known: Numbers that are known of every client beforehand, such as its shares of labels; 0 for none.
    """

    sampler: Sampler
    n: int
    estimator: str = "horvitz-thompson"
    server_optimizer: ServerOptimizer = field(default_factory=Sgd)
    weights: str = "data"
    seed: int = 0
    response_floor: float = 0.1
    clipping: WeightedClipping | None = None
    sketch: int = 0
    known: int = 0

    def __post_init__(self) -> None:
        """Refuse what no federation can do."""
        name = type(self.sampler).__name__
        if self.sampler.needs_oracle:
            raise DeltaflError(
                f"{name} needs every client's update or loss before the draw, which only a simulation has; choose a "
                "practical sampler such as 'pracdelta' or 'fedpracis'"
            )
        if self.sketch and getattr(self.sampler, "sketch_size", 0):
            raise DeltaflError(f"{name} looks at the directions of updates on the server; sketches cannot replace them")
        if uses_known(self.sampler, self.estimator) and self.known < 1:
            raise DeltaflError(
                f"{name} with {self.estimator!r} looks at what is known of the clients beforehand: write known=10 if "
                "each tells 10 numbers, such as its shares of 10 labels, and give known=... to deltafl.flower.register"
            )
        if self.n < 1:
            raise DeltaflError(f"n is {self.n}; at least one client must be asked")
        if self.clipping is not None and isinstance(find_estimator(self.estimator).control, RemoteControl):
            raise DeltaflError(
                f"with {self.estimator!r} clients remember what they sent, and clipping on the server would change it; "
                "write the estimator 'horvitz-thompson' or leave the clipping out"
            )
        noisy = self.clipping is not None and self.clipping.noise_multiplier > 0
        if noisy and self.estimator not in {"horvitz-thompson", "hansen-hurwitz"}:
            raise DeltaflError(
                f"noise is scaled to the largest weight of a reply, which bounds the estimator 'horvitz-thompson' "
                f"alone, not {self.estimator!r}; write estimator='horvitz-thompson' or leave the noise out"
            )

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
        )


class Federation:
    """Clients, the model and the state of the rounds.

    Attributes:
        rules: What does not change.
        keys: The clients' keys; a client's index is its place here.
        sizes: Their numbers of examples.
        known: What else is known of them beforehand, ``rules.known`` numbers each.
        layout: The model's arrays.
        rest: Its buffers and counters.
        state: The state of the rounds; None before anybody was admitted.
        news: Sentences for the log; who writes them there empties the list.
    """

    def __init__(self, rules: Rules, arrays: Arrays, layout: Layout) -> None:
        self.rules, self.layout = rules, layout
        self.keys: list[str] = []
        self.sizes: list[int] = []
        self.known: list[tuple[float, ...]] = []
        self.rest: Arrays = layout.rest(arrays)
        self.state: RoundState | None = None
        self.news: list[str] = []
        self._plan: Plan | None = None
        self._initial_d = layout.flatten(arrays)

    @property
    def plan(self) -> Plan:
        """The plan for the clients known now."""
        if self._plan is None:
            raise DeltaflError("no client has been admitted yet")
        return self._plan

    @property
    def current(self) -> RoundState:
        """The state of the rounds."""
        if self.state is None:
            raise DeltaflError("no client has been admitted yet")
        return self.state

    @property
    def params_d(self) -> Params:
        """The global model as a flat vector."""
        return self._initial_d if self.state is None else self.state.params_d

    def arrays(self) -> Arrays:
        """The global model: what is sent."""
        return self.layout.rebuild(self.params_d, self.rest)

    def admit(self, num_examples: Mapping[str, int], known: Mapping[str, tuple[float, ...]] | None = None) -> None:
        """Let clients join, or change what they say of themselves; the weights follow.

        Args:
            num_examples: Key -> number of examples, from 1 to 2^40.
            known: Key -> what else is known of the client, ``rules.known`` numbers; None if that is 0.

        Raises:
            DeltaflError: If a size is not such a number.
        """
        for key, size in num_examples.items():
            if not 1 <= size <= _LARGEST_SIZE:
                raise DeltaflError(f"client {key!r} has {size!r} examples; it must be a whole number from 1 to 2^40")
        told = {key: (size, (known or {}).get(key, ())) for key, size in num_examples.items()}
        before = dict(zip(self.keys, zip(self.sizes, self.known, strict=True), strict=True))
        if all(before.get(key) == said for key, said in told.items()):
            return
        # Sorted, for nodes connect in any order: partition 10 comes after partition 9.
        for key in sorted(told, key=lambda key: (len(key), key)):
            if key not in self.keys:
                self.keys.append(key)
                self.sizes.append(0)
                self.known.append(())
            place = self.keys.index(key)
            self.sizes[place], self.known[place] = told[key]
        old_plan, self._plan = self._plan, self.rules.plan(self.sizes, self.known)
        if self.state is None or old_plan is None:
            self.state = init_round(self._plan, self._initial_d)
            return
        old, self.state = self.state, grow_state(self._plan, self.state, old_plan.population.weight_m)
        if forgot(old.control, self.state.control):
            self.news.append("the sizes of known clients changed: the memories that all clients keep begin anew")

    def restore(
        self, keys: list[str], sizes: list[int], known: list[tuple[float, ...]], state: RoundState, rest: Arrays
    ) -> None:
        """Go on from a saved state."""
        self.keys, self.sizes, self.known, self.state, self.rest = keys, sizes, known, state, rest
        self._plan = self.rules.plan(sizes, known)

    def expected(self, client: int) -> int | None:
        """The memory of its own that a client is asked to subtract; None if the estimator needs none."""
        return expected_of(self.current.control, client)

    def open(self, present: Collection[str]) -> Cohort:
        """Decide who of the clients that are present is asked; the same answer until the round is closed."""
        available_m = np.array([key in present for key in self.keys], dtype=np.bool_)
        return open_round(self.plan, self.current, available_m)

    def close(self, cohort: Cohort, answers: Mapping[int, Answer], rng: np.random.Generator | None = None) -> RoundInfo:
        """Take the replies in.

        Args:
            cohort: What ``open`` returned.
            answers: Client index -> its answer; who is missing did not reply.
            rng: Source of the noise, for tests.

        Returns:
            What a person wants to see; refused replies are named in ``rejected``.
        """
        plan, state, sent = self.plan, self.current, self.arrays()
        screened = [
            screen(answers.get(client), self.layout, self.rules.sketch, self.expected(client))
            for client in cohort.client_n.tolist()
        ]
        update_n = [self._update(answer, sent) for answer in screened]
        largest = float(coefficients(plan, state, cohort).max(initial=0.0)) if self.rules.clipping else 0.0
        closing = self._sketched(self._noisy(plan, largest, rng), state, cohort, screened)
        following, info = close_round(closing, state, cohort, update_n, reports_of(screened, update_n))
        used = set(np.flatnonzero(following.answered_m - state.answered_m).tolist())
        self.rest = self._mean_rest(plan, state, cohort, used, answers, sent)
        self.state = self._agreed(following, cohort, screened)
        faults = [
            RejectedReply(client, answer.fault)
            for client, answer in zip(cohort.client_n.tolist(), screened, strict=True)
            if answer is not None and answer.fault is not None
        ]
        return info._replace(rejected=sorted([*info.rejected, *faults]))

    def response_rates(self) -> dict[str, float]:
        """Each client's share of answers, as the next round will assume it."""
        return dict(zip(self.keys, response_rates(self.plan, self.current).tolist(), strict=True))

    def _agreed(self, state: RoundState, cohort: Cohort, answers: list[Answer | None]) -> RoundState:
        """The state, with everybody's memory begun anew if a client does not have its part of it."""
        lost = [
            self.keys[client]
            for client, answer in zip(cohort.client_n.tolist(), answers, strict=True)
            if answer is not None and lost_memory(answer.since, self.expected(client))
        ]
        if not lost:
            return state
        self.news.append(
            f"{', '.join(lost)} lost the memory that the server counts on: those of all clients begin anew"
        )
        return state._replace(control=begin_anew(state.control))

    def _update(self, answer: Answer | None, sent: Arrays) -> Params | RemoteReply | None:
        if answer is None or answer.fault is not None or answer.arrays is None:
            return None
        update_d = self.layout.update(answer.arrays, sent)
        if answer.since is not None:
            return RemoteReply(update_d, answer.since)
        return self.rules.clipping.clip(update_d) if self.rules.clipping else update_d

    def _noisy(self, plan: Plan, largest_coef: float, rng: np.random.Generator | None) -> Plan:
        """The plan of this round, with noise if there is to be any."""
        if self.rules.clipping is None:
            return plan
        noise_d = self.rules.clipping.noise(largest_coef, self.layout.num_params, rng)
        return replace(plan, server_optimizer=WithNoise(plan.server_optimizer, noise_d))

    def _sketched(self, plan: Plan, state: RoundState, cohort: Cohort, answers: list[Answer | None]) -> Plan:
        """The plan of this round, with a sampler that learns from the clients' sketches if there are to be any."""
        if self.rules.sketch == 0:
            return plan
        sketch_nq = np.zeros((len(answers), self.rules.sketch))
        for row_q, answer in zip(sketch_nq, answers, strict=True):
            if answer is not None and answer.fault is None and answer.sketch is not None:
                row_q[:] = answer.sketch
        return replace(plan, sampler=by_sketch(plan, state, cohort, sketch_nq))

    def _mean_rest(
        self,
        plan: Plan,
        state: RoundState,
        cohort: Cohort,
        used: set[int],
        answers: Mapping[int, Answer],
        sent: Arrays,
    ) -> Arrays:
        """Buffers and counters after the round."""
        if not self.rest:
            return self.rest
        here = np.array([client in used for client in cohort.client_n.tolist()], dtype=np.bool_)
        heard = Cohort(cohort.client_n[here], cohort.count_n[here], cohort.expected_n[here], cohort.kind)
        received = [answers[client].arrays or {} for client in heard.client_n.tolist()]
        return mean_rest(self.layout, sent, received, coefficients(plan, state, heard))
