"""Oort (Lai et al., OSDI 2021): exploit fast clients with large loss, explore new ones. Biased."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import (
    Cohort,
    Counts,
    FloatArray,
    IntArray,
    KnownSizes,
    Population,
    Reports,
    Rng,
    Shares,
    Sizes,
)
from .base import ZERO, Unweighted, draw_successively, replied, with_rows

#: Utilities above this quantile count as it.
_CLIP = 0.95
#: Rounds of the pacer's window; the share of clients that are fast enough at first, and how much it
#: grows at once.
_WINDOW = 20
_FAST = 0.3
_RELAX = 0.05


class OortState(NamedTuple):
    """Utilities of the clients."""

    size_m: IntArray  # numbers of examples
    utility_m: KnownSizes  # U when last trained; NaN for clients that never replied
    last_m: Counts  # the round, from 1, in which a client replied last; 0 for never
    rounds: Counts  # (), rounds so far
    # expected seconds of each client's round, (m,); one number where they are unknown
    seconds: FloatArray
    gained_r: Sizes  # utility of the replies of the last 2 _WINDOW rounds, the oldest first
    fast: Shares  # (), the share of clients that are fast enough

    def is_consistent(self) -> bool:
        """Whether those have a utility who replied."""
        return np.array_equal(self.last_m > 0, ~np.isnan(self.utility_m))


@dataclass(frozen=True)
class Oort(Unweighted):
    """Selects a shrinking share of new clients, and otherwise clients near the top of utility plus
    staleness.

    The statistical utility of client i is U_i = n_i sqrt(mean over its examples of loss^2) when it
    was last trained, or n_i abs(mean loss), a lower bound, where no square is reported. In round t
    = 1, 2, ... the share of exploration is e_t = max(least_exploration, exploration decay^(t - 1)).
    With k = floor((1 - e_t) n):

        score_i = (min(U_i, q95) - low) / (high - low) + sqrt(0.1 ln t / L_i)
        with L_i the round it replied in last; all clients with a score of at least cut_off times
        the k-th largest are admitted; k of them are drawn one after the other without replacement,
        p proportional to the score; the other n - k places go to clients that were never trained.

    Where the population knows the clients' seconds T_i, as in a simulation with ``speeds``, the
    score is multiplied by the system utility min(1, T / T_i)^penalty, and new clients are drawn
    with p proportional to that. T is the quantile of the T_i below which 30 % of the clients are,
    and 5 % more each time the utility of 20 rounds has not grown.

    From the authors' code: the scaling of U (q95 the 95 % quantile of the utilities, low = 0.999 of
    the smallest, high the largest), and T by quantiles (the paper adds seconds). Ours: if one kind
    of client runs out, the other fills its places. Left out: their option to exclude clients
    selected very often.

    Source: Lai, Zhu, Madhyastha and Chowdhury, OSDI 2021, algorithm 1 and section 4; the defaults
    are its constants.

    Attributes:
        exploration: Share of new clients in the first cohort.
        decay: What it is multiplied by after each round.
        least_exploration: What it never falls below.
        cut_off: A score of at least this times the k-th largest is admitted to the draw.
        penalty: How much slow clients lose, where their seconds are known; 0 for nothing.
    """

    exploration: float = 0.9
    decay: float = 0.98
    least_exploration: float = 0.2
    cut_off: float = 0.95
    penalty: float = 2.0

    needs_loss = True
    uses_square_loss = True
    row_fields = ("utility_m", "last_m")
    kept_fields = ("rounds", "gained_r", "fast")
    fixed_fields = ("size_m", "seconds")
    ranges: ClassVar = {
        "exploration": "[0, 1]",
        "decay": "(0, 1]",
        "least_exploration": "[0, 1]",
        "cut_off": "[0, 1]",
        "penalty": "[0, inf)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_exploration > self.exploration:
            raise DeltaflError(
                f"least_exploration is {self.least_exploration}; it must be at most exploration, "
                f"{self.exploration}"
            )

    def init(self, population: Population) -> OortState:
        m = population.num_clients
        seconds = population.seconds_m
        if seconds is None:
            # All alike, so that nobody is too slow.
            seconds = np.ones(())
        return OortState(
            size_m=population.num_examples_m,
            utility_m=np.full(m, np.nan),
            last_m=np.zeros(m, np.int64),
            rounds=ZERO,
            seconds=seconds,
            gained_r=np.zeros(2 * _WINDOW),
            fast=np.array(_FAST),
        )

    def choose(
        self,
        state: OortState,
        present_k: IntArray,
        size: int,
        rng: Rng,
    ) -> IntArray:
        # Known are those who replied: only they have a utility.
        known_k = state.last_m[present_k] > 0
        old = present_k[known_k]
        new = present_k[~known_k]
        # If one kind of client runs out, the other fills its places.
        exploited = min(
            max(self.exploited(int(state.rounds) + 1, size), size - len(new)),
            len(old),
        )
        system = self.system(state)
        if (system < 1).any():
            explored = new[draw_successively(system[new], size - exploited, rng)]
        else:
            # They are in random order already.
            explored = new[: size - exploited]
        if exploited == 0:
            return explored
        score_k = (self.scores(state) * system)[old]
        score_k[score_k < self.cut_off * np.sort(score_k)[-exploited]] = 0.0  # not admitted
        return np.concatenate(
            [
                explored,
                old[draw_successively(score_k, exploited, rng)],
            ]
        )

    def exploited(self, round: int, size: int) -> int:
        """The k of round t >= 1, if enough clients of both kinds are available."""
        share = max(
            self.least_exploration,
            self.exploration * self.decay ** (round - 1),
        )
        return int((1 - share) * size + 1e-9)  # 1 - 0.9 is a little below 0.1

    def scores(self, state: OortState) -> FloatArray:
        """Scaled utility plus staleness, float64 (m,), NaN for clients that are unexplored."""
        known = np.sort(state.utility_m[state.last_m > 0])
        clip = known[min(int(_CLIP * len(known)), len(known) - 1)]
        low = 0.999 * known[0]
        high = known[-1]
        # ``max``: if all utilities are 0, nothing is divided by 0.
        scaled_m = (np.minimum(state.utility_m, clip) - low) / max(high - low, 1e-4)
        staleness_m = np.sqrt(0.1 * np.log(float(state.rounds) + 1) / np.maximum(state.last_m, 1))
        return np.asarray(scaled_m + staleness_m)

    def system(self, state: OortState) -> FloatArray:
        """min(1, T / T_i)^penalty, as ``seconds`` are: below 1 for clients that are too slow."""
        order = np.sort(state.seconds, axis=None)
        # Sums of ``_RELAX`` may fall a little short of a whole number of clients.
        enough = order[min(int(state.fast * len(order) + 1e-9), len(order) - 1)]
        return np.asarray(np.minimum(1.0, enough / state.seconds) ** self.penalty)

    def update(
        self,
        state: OortState,
        cohort: Cohort,
        reports: Reports,
    ) -> OortState:
        client_n, reports = replied(cohort, reports)
        square_n = reports.square_loss_n
        rounds = np.asarray(state.rounds + 1)
        root_n = np.where(
            np.isnan(square_n),
            np.abs(reports.loss_n),
            np.sqrt(square_n),
        )
        utility_m = with_rows(
            state.utility_m,
            client_n,
            root_n * state.size_m[client_n],
        )
        # A round without replies gained nothing, and counts.
        gained_r = np.append(state.gained_r[1:], utility_m[client_n].sum())
        flat = gained_r[_WINDOW:].sum() <= gained_r[:_WINDOW].sum()
        due = rounds >= 2 * _WINDOW and rounds % _WINDOW == 0
        if due and flat:  # the paper's pacer: be content with slower clients
            state = state._replace(fast=np.minimum(1.0, state.fast + _RELAX))
        return state._replace(
            utility_m=utility_m,
            last_m=with_rows(state.last_m, client_n, rounds),
            rounds=rounds,
            gained_r=gained_r,
        )
