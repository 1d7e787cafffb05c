"""The four samplers of the DELTA paper (Wang et al. 2023): importance sampling and DELTA,
theoretical and practical.

zeta_i = norm(u_i - ubar), and sigma_i^2 is the variance of the local steps. docs/why/theory says
which results of the paper hold. With the paper's weights 1 / pi, importance sampling has the
smallest variance of one round for draws with replacement and for independent draws, so DELTA is
never better there. For distinct draws of fixed size neither is optimal: with gradients 1, 1, -1 and
n = 2, ``fedis`` has variance 0.2222 and ``delta`` 0.

The theoretical forms draw by w_i R_i, the practical ones by R_i alone, as in the paper.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Annotated, ClassVar, NamedTuple, Self

import numpy as np

from ..designs.inclusion import with_floor
from ..designs.table import find_design
from ..errors import DeltaflError, is_in
from ..moves import Moves
from ..scale.tree import SumTree
from ..types import BoolArray, Cohort, FloatArray, Oracle, Population, Reports, Within
from .base import RunFacts, Scored, Scores, WeightState, for_design, replied, with_rows


class PracticalState(NamedTuple):
    """What the server stores about each client."""

    p_m: Annotated[Scores, Within("[0, 2]")]  # the draw probabilities, sum 1 but for rounding
    weight_m: FloatArray  # the factors w_i of the scores; none, (0,), if these are R_i alone

    def is_consistent(self) -> bool:
        """Whether the probabilities sum to 1."""
        return abs(float(np.asarray(self.p_m).sum()) - 1) < 1e-3


@dataclass(frozen=True)
class _ByReports(Scored):
    """Scores R_i >= 0 from reports, mixed with a uniform share.

    Attributes:
        floor: Share of the cohort that is drawn uniformly.
    """

    floor: float = 0.0

    ranges: ClassVar = {"floor": "[0, 1]"}

    def score(self, reports: Reports) -> FloatArray:
        """R_i = norm(u_i), which times w_i is the optimal score with the weights 1 / pi."""
        return np.sqrt(reports.squared_norm_n)


@dataclass(frozen=True)
class FedIS(_ByReports):
    """Draws with the scores w_i R_i of all clients in this round, from an oracle; R_i = norm(u_i).

    The paper's design is ``"multinomial"``.

    Attributes:
        floor: Share of the cohort that is drawn uniformly. With 0, as in the paper, clients with
            R_i = 0 are never drawn.
    """

    needs_oracle = True

    @property
    def skips_zero_updates(self) -> bool:
        return self.floor == 0

    def scores(
        self,
        state: WeightState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> FloatArray:
        reports = self.require_oracle(oracle).reports()
        score_m = np.where(
            reports.responded_n,
            state.weight_m * self.score(reports),
            0.0,
        )
        if self.floor == 0:
            return score_m
        return with_floor(score_m, self.floor, available_m)


@dataclass(frozen=True)
class FedPracIS(_ByReports):
    """Draws with stored probabilities, which the clients that replied share anew in proportion to
    R_i = norm(u_i).

    p_i <- R_i / sum_S R_j * (1 - sum_{not S} p_j) for i in S, from p_i = 1 / m. R = 0 is absorbing,
    and one noisy R can starve a client, hence the floor.

    Attributes:
        floor: Share of the cohort that is drawn uniformly. With 0, exactly as in the paper, the
            sampler does not claim to be unbiased.
        weighted: Whether w_i R_i replaces R_i, starting from p_i = w_i, which is better where
            weights differ.
    """

    floor: float = 0.1
    weighted: bool = False

    fixed_fields = ("weight_m",)

    @property
    def unbiased(self) -> bool:
        return find_design(self.design).exact and self.floor > 0

    def init(self, population: Population) -> PracticalState:
        if self.weighted:
            # A copy, as a tree owns its array.
            weight_m = population.weight_m
            return PracticalState(for_design(weight_m.copy(), self.design), weight_m)
        m = population.num_clients
        return PracticalState(for_design(np.full(m, 1 / m), self.design), np.zeros(0))

    def scores(
        self,
        state: PracticalState,
        available_m: BoolArray | None,
        n: int,
        oracle: Oracle | None,
    ) -> Scores:
        # ``open`` mixes the floor in: the tree knows how many clients are below each node.
        if isinstance(state.p_m, SumTree):
            return state.p_m
        return with_floor(state.p_m, self.floor, available_m)

    def update(
        self,
        state: PracticalState,
        cohort: Cohort,
        reports: Reports,
    ) -> PracticalState:
        client_n, reports = replied(cohort, reports)
        # Scores say how the clients of a cohort share its mass, not how much that is.
        score_n = self.score(reports)
        if self.weighted:
            score_n = score_n * state.weight_m[client_n]
        # Nobody replied, or all R_i are 0: the rule would be 0 / 0, and p stays.
        if score_n.sum() <= 0:
            return state
        # In a tree the sum is kept up to rounding only; it is divided by when clients are drawn.
        share_n = score_n / score_n.sum()
        p_n = share_n * state.p_m[client_n].sum()
        if isinstance(state.p_m, SumTree):
            return state._replace(p_m=state.p_m.replaced(client_n, p_n))
        p_m = with_rows(state.p_m, client_n, p_n)
        # The rule keeps the sum at 1 but for rounding, which would add up over the rounds.
        return state._replace(p_m=p_m / p_m.sum())

    def resized(self, state: PracticalState, moves: Moves) -> PracticalState:
        """Newcomers have the probability with which they would begin; the others share the rest."""
        fresh = self.init(moves.population)
        p_k = moves.stayed(state.p_m)
        stay = len(p_k)
        # What those who left had goes to the others in proportion.
        if stay < moves.num_before:
            total = p_k.sum()
            # Those who left had it all.
            p_k = np.full(stay, 1 / stay) if total == 0 else p_k / total
        share = stay / moves.population.num_clients
        p_m = np.append(p_k * share, np.asarray(fresh.p_m)[stay:])
        return fresh._replace(p_m=for_design(p_m, self.design))


@dataclass(frozen=True)
class _Diversity(Scored):
    """The score of DELTA, R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), and its options.

    Attributes:
        alpha: a1 = a2 >= 0, or the pair (a1, a2), not both 0; ``"theory"`` for corollary 3.7. The
            paper's is 0.5.
        sigma_scale: ``"step"`` as printed, or ``"update"`` (K sigma^2, the unit of zeta^2).
    """

    alpha: float | tuple[float, float] | str = 0.5
    sigma_scale: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_scale not in ("step", "update"):
            raise DeltaflError(f"sigma_scale is {self.sigma_scale!r}; write 'step' or 'update'")
        if self.alpha == "theory":
            return
        pair: object = self.alpha
        if not isinstance(pair, tuple):
            pair = (pair, pair)
        usable = len(pair) == 2 and all(is_in(a, "[0, inf)") for a in pair)
        # With both at 0 all scores would be 0.
        if not (usable and is_in(sum(pair), "(0, inf)")):
            raise DeltaflError(
                f"alpha is {self.alpha!r}; write a number above 0, a pair (a1, a2), or 'theory'"
            )

    @property
    def constants(self) -> tuple[float, float]:
        """(a1, a2); raises a ``DeltaflError`` if they still depend on the run."""
        if isinstance(self.alpha, str):
            raise DeltaflError(
                "alpha is 'theory', which needs the run's rounds and local steps: write "
                "sampler.for_run(RunFacts(...)), or a number"
            )
        if isinstance(self.alpha, tuple):
            return self.alpha
        return self.alpha, self.alpha

    def for_run(self, facts: RunFacts) -> Self:
        """For ``"theory"``: corollary 3.7 with eta_L = 1 / (sqrt(T) K L) and eta = sqrt(K n), where
        L cancels.

        It has a1 = 20 K / sqrt(T), a2 = 5 / sqrt(T) + sqrt(K / n); without replacement a1 and the
        first term of a2 are m / n times that. Its zeta is for gradients, ours for updates of K
        steps, so a1 is divided by K^2.
        """
        if self.alpha != "theory":
            return self
        steps = facts.local_steps
        root = sqrt(facts.rounds)
        drift = 1.0
        if self.design != "multinomial":
            drift = facts.m / facts.n
        a1 = drift * 20 / (steps * root)
        return replace(self, alpha=(a1, drift * 5 / root + sqrt(steps / facts.n)))

    def score(self, reports: Reports) -> FloatArray:
        a1, a2 = self.constants
        variance_n = reports.step_variance_n
        if self.sigma_scale == "update":
            variance_n = reports.num_steps_n * variance_n
        return np.sqrt(a1 * reports.squared_deviation_n + a2 * variance_n)


@dataclass(frozen=True)
class Delta(_Diversity, FedIS):
    """FedDELTA: draws with the scores w_i R_i of all clients in this round, from an oracle; R_i =
    sqrt(a1 zeta_i^2 + a2 sigma_i^2), with zeta_i how far client i's update is from the mean of
    all, and sigma_i^2 the variance of its local steps.

    Attributes:
        alpha: a1 = a2 >= 0, or the pair (a1, a2), not both 0; ``"theory"`` for corollary 3.7. The
            paper's is 0.5.
        sigma_scale: ``"step"`` as printed, or ``"update"`` (K sigma^2, the unit of zeta^2).
        floor: With 0, a client with zeta_i = sigma_i = 0 is never drawn and so missing from the
            estimate: for updates 1, 2, 3 of equal weight without noise its mean is 1.3333, not 2.
    """

    @property
    def skips_zero_scores(self) -> bool:
        return self.floor == 0


@dataclass(frozen=True)
class PracDelta(_Diversity, FedPracIS):
    """FedPracDELTA: draws with stored probabilities, which the clients that replied share anew in
    proportion to R_i = sqrt(a1 zeta_i^2 + a2 sigma_i^2), with zeta_i how far client i's update is
    from the plain mean of the selected clients, and sigma_i^2 the variance of its local steps.

    Attributes:
        counts_draws: Whether a client drawn k times counts k times in that mean, as in the paper's
            sum over draws with replacement, and not once.
    """

    counts_draws: bool = False
