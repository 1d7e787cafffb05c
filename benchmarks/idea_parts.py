"""Parts of ideas that did not win, kept so that ``ideas.py`` can show it: controls and samplers of its own."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltafl import Centred, Population, Sampler
from deltafl.estimators.control_variates import ControlValue, ControlVariate
from deltafl.samplers.centred import CentredState
from deltafl.types import BoolArray, Cohort, FloatArray, IntArray, Oracle, Params, Replies, Reports


class DeviationState(NamedTuple):
    """The clients' deviations from the common c at their last visits, their weighted sum, and c."""

    deviation_md: FloatArray
    total_d: FloatArray
    common_d: FloatArray


@dataclass(frozen=True)
class DeviationControl(ControlVariate):
    """c_i = c now + (u_i - c) when client i was last seen: the part that all have in common is kept fresh.

    Attributes:
        memory: How slowly c follows the rounds.
        decay: Factor a round of the deviations, 1 for none.
    """

    memory: float = 0.7
    decay: float = 1.0

    def init(self, population: Population, num_params: int) -> DeviationState:
        """All zero."""
        return DeviationState(
            np.zeros((population.num_clients, num_params)), np.zeros(num_params), np.zeros(num_params)
        )

    def value(self, state: DeviationState, client_n: IntArray) -> ControlValue:
        """The common part of today and the client's own of its last visit."""
        return ControlValue(state.total_d + state.common_d, state.common_d + state.deviation_md[client_n])

    def update(
        self, state: DeviationState, population: Population, replies: Replies, update_nd: Params
    ) -> DeviationState:
        """Follow the round's estimate; what the replies have beside it is their own."""
        client_n, coef_n = replies.client_n, replies.coef_n
        total_d, control_nd = self.value(state, client_n)
        estimate_d = total_d + coef_n @ (update_nd - control_nd)
        common_d = self.memory * state.common_d + (1 - self.memory) * estimate_d
        deviation_md = self.decay * state.deviation_md
        deviation_md[client_n] = update_nd - common_d
        return DeviationState(deviation_md, population.weight_m @ deviation_md, common_d)


class EndpointState(NamedTuple):
    """For each client, and for those never seen: the last update a, and where the model was then, b.

    ``moved_d`` is where the model is now, both counted from the first model. ``gram`` and ``cross`` are the sums of the
    regression of u_i on (a_i, b_i - moved_d).
    """

    weight_m: FloatArray
    update_md: FloatArray
    place_md: FloatArray
    unseen_m: BoolArray
    common_d: FloatArray
    common_place_d: FloatArray
    moved_d: FloatArray
    gram: FloatArray
    cross: FloatArray


@dataclass(frozen=True)
class EndpointControl(ControlVariate):
    """c_i = beta a_i + gamma (b_i - x): gamma = 0 remembers updates, gamma = beta = 1 where clients ended.

    A client that trains to the end arrives at the same place whatever model x it was sent, so that its update is that
    place minus x, and an old update is wrong by how far the model has moved. beta and gamma in [0, 1] are learnt from
    earlier rounds, as in ``damping.py``; the server's step must be x <- x + D.

    Attributes:
        memory: How slowly the guess for unseen clients follows the estimates.
        forgetting: How slowly beta and gamma follow the rounds.
    """

    memory: float = 0.7
    forgetting: float = 0.9

    def init(self, population: Population, num_params: int) -> EndpointState:
        """Nobody was seen, and the model is where it began."""
        m, zero_d = population.num_clients, np.zeros(num_params)
        rows = np.zeros((m, num_params))
        return EndpointState(
            population.weight_m,
            rows,
            rows,
            np.ones(m, dtype=np.bool_),
            zero_d,
            zero_d,
            zero_d,
            np.zeros((2, 2)),
            np.zeros(2),
        )

    def value(self, state: EndpointState, client_n: IntArray) -> ControlValue:
        """Update and place, each with its coefficient."""
        beta, gamma = _box_least_squares(state.gram, state.cross)
        everyone = np.arange(len(state.unseen_m))
        a_md, b_md = self._remembered(state, everyone)
        control_md = beta * a_md + gamma * b_md
        return ControlValue(state.weight_m @ control_md, control_md[client_n])

    def update(
        self, state: EndpointState, population: Population, replies: Replies, update_nd: Params
    ) -> EndpointState:
        """Regress the replies on what was remembered of these clients, then remember them."""
        client_n, coef_n = replies.client_n, replies.coef_n
        guess = self.value(state, client_n)
        estimate_d = guess.total_d + coef_n @ (update_nd - guess.control_nd)
        a_nd, b_nd = (_centred(part, coef_n) for part in self._remembered(state, client_n))
        u_nd = _centred(update_nd.astype(np.float64), coef_n)
        gram = np.array([[np.vdot(x, y) for y in (a_nd, b_nd)] for x in (a_nd, b_nd)])
        cross = np.array([np.vdot(x, u_nd) for x in (a_nd, b_nd)])
        update_md, place_md, unseen_m = state.update_md.copy(), state.place_md.copy(), state.unseen_m.copy()
        update_md[client_n], place_md[client_n], unseen_m[client_n] = update_nd, state.moved_d, False
        return EndpointState(
            state.weight_m,
            update_md,
            place_md,
            unseen_m,
            self.memory * state.common_d + (1 - self.memory) * estimate_d,
            self.memory * state.common_place_d + (1 - self.memory) * state.moved_d,
            state.moved_d + estimate_d,
            self.forgetting * state.gram + gram,
            self.forgetting * state.cross + cross,
        )

    def _remembered(self, state: EndpointState, client_n: IntArray) -> tuple[FloatArray, FloatArray]:
        """a_i and b_i - x of some clients."""
        unseen_n = state.unseen_m[client_n, None]
        a_nd = np.where(unseen_n, state.common_d, state.update_md[client_n])
        b_nd = np.where(unseen_n, state.common_place_d, state.place_md[client_n])
        return a_nd, b_nd - state.moved_d


def _centred(part_nd: FloatArray, coef_n: FloatArray) -> FloatArray:
    weighted_nd = coef_n[:, None] * part_nd
    return np.asarray(weighted_nd - weighted_nd.mean(axis=0))


def _box_least_squares(gram: FloatArray, cross: FloatArray) -> tuple[float, float]:
    """The (beta, gamma) in [0, 1]^2 with the least squared error; (1, 0) before anything is known."""
    if gram[0, 0] <= 0:
        return 1.0, 0.0
    gram = gram + 1e-6 * np.trace(gram) * np.eye(2)
    inner = np.linalg.solve(gram, cross)
    if np.all((inner >= 0) & (inner <= 1)):
        return float(inner[0]), float(inner[1])
    edges = []
    for fixed, free in ((0, 1), (1, 0)):
        for value in (0.0, 1.0):
            point = np.zeros(2)
            point[fixed] = value
            point[free] = np.clip((cross[free] - gram[free, fixed] * value) / gram[free, free], 0, 1)
            edges.append((float(point @ gram @ point - 2 * cross @ point), point))
    best = min(edges, key=lambda edge: edge[0])[1]
    return float(best[0]), float(best[1])


class NeighbourState(NamedTuple):
    """The guess for each client, who was never seen, and the common guess for those."""

    weight_m: FloatArray
    control_md: FloatArray
    unseen_m: BoolArray
    common_d: FloatArray


@dataclass(frozen=True)
class NeighbourControl(ControlVariate):
    """Memories that follow what their neighbours' updates have done since: c_j moves with u_k - c_k of clients asked.

    Asked clients are remembered as they are, u_k. Each other memory moves by sum_k K_jk (u_k - c_k) / (ridge + sum_k
    K_jk) over the clients that were asked again, with K_jk = max(0, cos(c_j, c_k))^power: kernel regression of the
    drift. It needs all memories in every round, m d numbers.

    Attributes:
        power: How near a neighbour must be.
        ridge: The weight of "it did not move".
        memory: How slowly the guess for unseen clients follows the estimates.
    """

    power: float = 4.0
    ridge: float = 1.0
    memory: float = 0.7

    def init(self, population: Population, num_params: int) -> NeighbourState:
        """Nobody was seen."""
        m = population.num_clients
        return NeighbourState(
            population.weight_m, np.zeros((m, num_params)), np.ones(m, dtype=np.bool_), np.zeros(num_params)
        )

    def value(self, state: NeighbourState, client_n: IntArray) -> ControlValue:
        """Memories as they have moved, the common guess for the others."""
        every_md = np.where(state.unseen_m[:, None], state.common_d, state.control_md)
        return ControlValue(state.weight_m @ every_md, every_md[client_n])

    def update(
        self, state: NeighbourState, population: Population, replies: Replies, update_nd: Params
    ) -> NeighbourState:
        """Move the memories with their neighbours, remember the replies."""
        client_n, coef_n = replies.client_n, replies.coef_n
        guess = self.value(state, client_n)
        estimate_d = guess.total_d + coef_n @ (update_nd - guess.control_nd)
        again_n = ~state.unseen_m[client_n]
        drift_kd, before_kd = (update_nd - guess.control_nd)[again_n], guess.control_nd[again_n]
        kernel_mk = np.clip(_rows_of_length_1(state.control_md) @ _rows_of_length_1(before_kd).T, 0, 1) ** self.power
        control_md = state.control_md + kernel_mk @ drift_kd / (self.ridge + kernel_mk.sum(axis=1, keepdims=True))
        unseen_m = state.unseen_m.copy()
        control_md[client_n], unseen_m[client_n] = update_nd, False
        common_d = self.memory * state.common_d + (1 - self.memory) * estimate_d
        return NeighbourState(state.weight_m, control_md, unseen_m, common_d)


def _rows_of_length_1(row_nd: FloatArray) -> FloatArray:
    return np.asarray(row_nd / np.maximum(np.linalg.norm(row_nd, axis=1, keepdims=True), 1e-12))


class OneKindOfVisit(Centred):
    """``innovation`` whose memories age, but whose first visits count like later ones."""

    @property
    def _visits_differ(self) -> bool:
        return False


@dataclass(frozen=True)
class TourFirst(Sampler):
    """Everybody once, in random order, before the draws begin. **Biased** in the tour: who was asked cannot be again.

    Attributes:
        after: The sampler of the rounds after the tour; it learns from the tour as well.
    """

    after: Centred
    unbiased: bool = False
    needs_oracle: bool = False

    @property
    def sketch_size(self) -> int:
        """As the sampler after the tour."""
        return self.after.sketch_size

    def init(self, population: Population) -> CentredState:
        """The tour begins."""
        return self.after.init(population)

    def open(
        self,
        state: CentredState,
        available_m: BoolArray,
        n: int,
        rng: np.random.Generator,
        oracle: Oracle | None = None,
    ) -> Cohort:
        """N of those not asked yet, each as likely as the others, while there are n of them."""
        unseen = np.flatnonzero(state.seen_m < 0)
        if len(unseen) < n:
            return self.after.open(state, available_m, n, rng, oracle)
        client_n = np.sort(rng.choice(unseen, n, replace=False))
        return Cohort(client_n, np.ones(n, dtype=np.int64), np.full(n, n / len(unseen)), "fixed-size")

    def update(self, state: CentredState, cohort: Cohort, reports: Reports) -> CentredState:
        """The other sampler learns."""
        return self.after.update(state, cohort, reports)
