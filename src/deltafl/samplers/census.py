"""Census: every client answers once, before the first draw, with a few numbers about its update.

Two-phase sampling (Neyman 1938): phase one asks everyone for something cheap, phase two samples
with it. Every client does its usual local work on the initial model and answers with a sketch of
the *direction* of its update, and with the update's norm. The principal components of the sketches
become auxiliary variables, so that cohorts can be balanced on what the clients' data are like
without asking for labels; the norms decide whom to select more often at first. With first updates
in the answers, the census is the first round: the model moves by their mean (``init_round``).
Estimates stay unbiased whatever clients answer: answers change cohorts, not weights
(theory, section 11, docs/why/theory/census.md).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import erfc, exp, prod, sqrt
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import OWN_ERRORS, DeltaflError, WithRanges
from ..estimators.sketch import count_sketch
from ..estimators.two_bits import BLOCK, code_length, encode, norms, scaled, tame
from ..model.arrays import LARGEST_ENTRY, as_array, as_reals
from ..scale.numerics import RANK_TOLERANCE, inner, largest_entry, lower_median
from ..scale.stretches import over_stretches
from ..types import TINY, Array, FloatArray, IntArray, Population, Rng

#: One answer a client; None, or what is no answer, where there is none.
Answers = Sequence[npt.ArrayLike | None] | npt.NDArray[np.floating]
#: Norms are squared and summed.
LARGEST_NORM = 1e100
#: Longest first update, in medians of all: a few of a CNN are 20 long and would drown the others,
#: and so would a lie.
LONGEST = 5.0
#: Variance of sketches of length 1 that is rounding, of updates in float32.
_ROUNDING = 1e-12
#: Answers processed at a time: copies of all of them would not fit into memory.
_BLOCK = 2**15
#: Answers in one matrix product: OpenBLAS splits longer sums in another way for each number of
#: threads.
_PRODUCT = 256


class UsesFirstUpdates(Protocol):
    """What a census asks of a control variate."""

    @property
    def uses_first_updates(self) -> bool:
        """Whether it starts from the clients' first updates."""


@dataclass(frozen=True)
class Census(WithRanges):
    """The question to the clients, and what the server computes from their answers.

    Attributes:
        components: q >= 1, number of auxiliary variables made from the answers.
        size: k, length of a sketch, 1 to 128; an answer has one more number, the norm.
        noise: sigma >= 0, standard deviation of the normal noise that a client adds to each number
            of its sketch (of length 1 before). With noise, neither norm nor update is sent.
            ``epsilon`` says what this hides.
        first_update: Whether the whole update follows, in two bits per parameter
            (``estimators/two_bits.py``). A plan sets it if its estimator uses first updates.
    """

    components: int = 10
    size: int = 128
    noise: float = 0.0
    first_update: bool = False
    ranges: ClassVar = {
        "components": "[1, 128]",
        "size": "[1, 128]",
        "noise": "[0, inf)",
    }

    def for_control(self, control: UsesFirstUpdates) -> "Census":
        """What a plan with this control variate asks: first updates where it uses them."""
        return replace(
            self,
            first_update=control.uses_first_updates and self.noise == 0,
        )

    @property
    def _sends_update(self) -> bool:
        return self.first_update and self.noise == 0  # an update would show what noise hides

    def length(self, num_params: int) -> int:
        """Length of an answer for a model of ``num_params`` parameters."""
        return self.size + 1 + self._sends_update * code_length(num_params)

    def answer(
        self,
        update: npt.ArrayLike,
        tensors: Sequence[int | Sequence[int]] = (),
        seed: int = 0,
        rng: Rng | None = None,
    ) -> FloatArray:
        """A client's answer, float64 (length,): the sketch of v, scaled to length 1, norm(u), and
        the code of u.

        v consists of the last ``tensors`` of the update u, each divided by its own norm, so that an
        output layer's bias counts as much as its weights.

        Args:
            update: u = x_K - x_0, (d,), the client's usual local work on the initial model.
            tensors: Sizes or shapes of the last tensors of the model, such as (5120, 10) for
                weights and bias of an output layer. By default the whole update is one tensor.
            seed: Fixes the projection; the same for all clients.
            rng: Source of the noise; required if there is any.
        """
        if update is None:
            raise DeltaflError(
                "the update is None; write None in place of the answer of a client that failed"
            )
        update_d = as_reals("the update", update, "what the client has trained").ravel()
        update_d = update_d.astype(float)
        d = len(update_d)
        # Without the shapes of its tensors an update is one of them.
        ends = np.cumsum([np.prod(tensor, dtype=int) for tensor in tensors] or [d])
        known = ends[-1]
        if known > d:
            raise DeltaflError(
                f"the census looks at the last {known} parameters of an update of {d}"
            )
        code_c = np.zeros(0)
        with np.errstate(over="ignore", invalid="ignore"):  # the server refuses what is infinite
            # A copy, as it is scaled in place.
            direction_d = update_d[d - known :].copy()
            for tensor_d in np.split(direction_d, ends[:-1]):
                _make_unit(tensor_d)

            def sketch(part: slice) -> FloatArray:
                sketched_1k = count_sketch(direction_d[None, part], self.size, seed, part.start)
                return np.asarray(sketched_1k[0])

            sketch_k = np.sum(over_stretches(sketch, len(direction_d)), axis=0)
            _make_unit(sketch_k)
            norm = sqrt(inner(update_d, update_d))
            if self._sends_update:
                code_c = encode(update_d)
        if self.noise == 0:
            return np.concatenate([sketch_k, [norm], code_c])
        if rng is None:
            raise DeltaflError(
                "an answer with noise needs a generator: write rng=np.random.default_rng()"
            )
        # no noise hides that an update was not finite: it counts as 0
        sketch_k = np.nan_to_num(sketch_k)
        return np.append(sketch_k + rng.normal(scale=self.noise, size=self.size), 0.0)

    def population(
        self,
        population: Population,
        answers: Answers,
        longest: float = LONGEST,
    ) -> Population:
        """The population with auxiliary variables, norms and first updates from every client's
        answer.

        An unsent norm is NaN, an unsent update is 0. Updates are clipped to ``longest`` times the
        median norm, and so are norms if it is less than ``LONGEST``.
        """
        answer_mk = self._read(answers, population.num_clients)
        # One number that is not finite spoils the whole answer: none of it can be believed.
        here_m = np.isfinite(answer_mk).all(axis=1)
        norm_m = np.where(here_m, answer_mk[:, self.size].astype(float), np.nan)
        # Who adds noise sends 0 in place of its norm, which stays unknown.
        norm_m = np.where(norm_m > 0, np.minimum(norm_m, LARGEST_NORM), np.nan)
        if longest < LONGEST:  # a norm is claimed, and decides who is asked
            norm_m = np.minimum(norm_m, longest * lower_median(norm_m))
        code_mc = np.where(here_m[:, None], answer_mk[:, self.size + 1 :], 0.0)
        # What a client made up must not end in a state that cannot be loaded.
        tame(code_mc)
        with np.errstate(over="ignore"):  # an infinite one is clipped
            length_m = norms(code_mc)
        if length_m.any():
            known_k = length_m[length_m > 0]
            # of two, the median is half of what one may have made up
            most = longest * min(
                float(np.median(known_k)),
                LONGEST * lower_median(known_k),
            )
            most = min(most, LARGEST_ENTRY)  # the model moves by them
            code_mc = scaled(code_mc, most / np.maximum(length_m, most))
        population = population._replace(
            aux_mq=self.auxiliary(answer_mk, population.weight_m),
            norm_m=norm_m,
            code_mc=None,
        )
        if code_mc.size == 0:
            return population
        return population._replace(code_mc=code_mc)

    def auxiliary(
        self,
        answer_mk: npt.NDArray[np.floating],
        weight_m: FloatArray,
    ) -> FloatArray:
        """The auxiliary variables, float64 (m, components), from the directions of updates.

        They are the first principal components of the sketches in the order of their variance, then
        zeros, of mean 0 and mean squared norm 1 under the weights w_i. Every sketch is scaled to
        length 1. A client without an answer, whose row is not finite, counts as the mean client.
        """
        here_k = np.flatnonzero(np.isfinite(answer_mk).all(axis=1) & (weight_m > 0))
        aux_mq = np.zeros((len(weight_m), self.components))
        if len(here_k) == 0:
            return aux_mq
        # Among those who answered: with all weights, absent clients would draw the mean to 0.
        share_m = weight_m / weight_m[here_k].sum()
        blocks = [here_k[first : first + _BLOCK] for first in range(0, len(here_k), _BLOCK)]

        def sketches(block: IntArray) -> FloatArray:
            # made anew for each sum: all of them are as large as the answers
            return _units(answer_mk[block, : self.size].astype(float))

        mean_s = sum(
            np.einsum(
                "k,ks->s",
                share_m[block],
                sketches(block),
            )
            for block in blocks
        )
        spread_ss: Any = 0.0
        for block in blocks:
            centred_ks = sketches(block) - mean_s
            weighed_ks = share_m[block, None] * centred_ks
            for first in range(0, len(block), _PRODUCT):
                part = slice(first, first + _PRODUCT)
                spread_ss = spread_ss + weighed_ks[part].T @ centred_ks[part]
        variance_s, axis_ss = np.linalg.eigh(spread_ss)
        # An axis of rounding alone has an arbitrary direction: its variable is 0 for all.
        axis_ss *= variance_s > max(RANK_TOLERANCE * variance_s[-1], _ROUNDING)
        axis_sq = axis_ss[:, ::-1][:, : self.components]
        # A newcomer turns no axis round: its largest entry is positive.
        largest_q = np.abs(axis_sq).argmax(axis=0)
        axis_sq *= np.sign(np.take_along_axis(axis_sq, largest_q[None], axis=0))
        for block in blocks:
            score_kq = np.einsum("ks,sq->kq", sketches(block) - mean_s, axis_sq)
            aux_mq[block, : axis_sq.shape[1]] = score_kq
        # One factor for all: later components stay smaller, as they explain less.
        size = sqrt(inner(weight_m, (aux_mq**2).sum(axis=1)))
        return aux_mq / max(size, TINY)

    def _read(self, answers: Any, num_clients: int) -> npt.NDArray[np.floating]:
        """The answers as numbers, (m, length), an array of them as it is; NaN where there is none.

        The length is the one that most of them have.
        """
        is_array = isinstance(answers, np.ndarray)
        if is_array and (answers.ndim != 2 or answers.dtype.kind == "c"):
            raise DeltaflError(
                "answers to a census are rows of real numbers, not an array of shape "
                f"{answers.shape} and type {answers.dtype}"
            )
        if len(answers) != num_clients:
            raise DeltaflError(
                f"the census has {len(answers)} answers, not one for each of {num_clients} clients"
            )
        if is_array and answers.dtype.kind == "f" and self._can_have(answers.shape[1]):
            self._check_precise(answers[0])
            return np.asarray(answers)  # as they are: a copy might not fit into memory
        rows = [_numbers(answer) for answer in answers]
        lengths = Counter(len(row) for row in rows if self._can_have(len(row)))
        if not lengths and any(map(len, rows)):
            raise DeltaflError(
                f"what clients sent has {max(map(len, rows))} numbers, which is the length of no "
                "answer; write plan.census.answer(update), or None for no answer"
            )
        # Of several the most frequent: one client that sends something else must not decide for
        # all.
        length = max(lengths, key=lengths.__getitem__, default=self.size + 1)
        answer_mk = np.full((num_clients, length), np.nan)
        for answer_k, row in zip(answer_mk, rows, strict=True):
            if len(row) == length:
                self._check_precise(row)
                answer_k[:] = row
        return answer_mk

    def _check_precise(self, answer_k: Array) -> None:
        if answer_k.dtype.itemsize < 8 and len(answer_k) > self.size + 1:
            raise DeltaflError(
                f"an answer to the census has type {answer_k.dtype}, and needs float64: its code "
                "has 52 bits"
            )

    def _can_have(self, length: int) -> bool:
        """Whether an answer of some model can have so many numbers."""
        # Codes have whole blocks, so that this stands for any number of parameters in the last one.
        parameters = (length - self.size - 1) // code_length(1) * BLOCK
        return length > self.size and length in (self.length(parameters), self.size + 1)

    def epsilon(self, delta: float) -> float:
        """Epsilon of one answer: local differential privacy of the update, and so of all of the
        client's data.

        Sketches without noise have length 1, so any two are at most 2 apart. This is the exact
        epsilon of the Gaussian mechanism with that sensitivity (Balle and Wang 2018, theorem 8);
        infinite without noise, and above 512.

        Args:
            delta: In (0, 1).

        Example:
            >>> round(Census(noise=2.0).epsilon(1e-5), 2)
            4.38
        """
        if not 0 < delta < 1:
            raise DeltaflError(f"delta is {delta}; write a number between 0 and 1, such as 1e-5")
        if self.noise == 0:
            return float("inf")
        ratio = 2 / self.noise

        def excess(epsilon: float) -> float:
            above = _normal(ratio / 2 - epsilon / ratio)
            return above - exp(epsilon) * _normal(-ratio / 2 - epsilon / ratio) - delta

        # ``exp`` fails above 709, and an epsilon of that size hides nothing.
        low = 0.0
        high = 512.0
        if excess(high) > 0:
            return float("inf")
        # To 512 / 2^60, less than 1e-15.
        for _ in range(60):
            middle = (low + high) / 2
            if excess(middle) > 0:
                low = middle
            else:
                high = middle
        # The upper end: privacy must not be promised better than it is.
        return high


def _make_unit(vector_d: FloatArray) -> None:
    """``_units`` of one long vector."""
    d = len(vector_d)
    size = largest_entry(vector_d)
    if size == 0:
        return

    # By the largest entry first, as squares of large ones would overflow.
    def square(part: slice) -> float:
        part_b = vector_d[part]
        part_b /= size
        return float(inner(part_b, part_b))

    norm = sqrt(sum(over_stretches(square, d)))
    over_stretches(lambda part: np.divide(vector_d[part], norm, out=vector_d[part]), d, alone=True)


def _units(part_kd: FloatArray) -> FloatArray:
    """``_unit`` of every row, in place."""
    # By the largest first: squares of large numbers overflow, and those of small ones vanish.
    largest_k = np.abs(part_kd).max(axis=1, initial=0.0)
    zero_k = largest_k == 0
    part_kd /= np.where(zero_k, 1.0, largest_k)[:, None]
    norm_k = np.sqrt(inner(part_kd, part_kd))
    part_kd /= np.where(zero_k, 1.0, norm_k)[:, None]
    return part_kd


def _numbers(answer: npt.ArrayLike | None) -> Array:
    """An answer as numbers, empty if it is none."""
    try:
        answer_k = as_array(answer)
        # Texts and objects may still be numbers.
        if answer_k.dtype.kind not in "biufc":
            answer_k = answer_k.astype(float)
    except OWN_ERRORS:
        return np.zeros(0)
    # Of complex ones a part would be lost.
    if answer_k.dtype.kind == "c":
        return np.zeros(0)
    if answer_k.ndim != 1 or not np.isfinite(answer_k).all():
        return np.zeros(0)
    return answer_k


def _normal(x: float) -> float:
    """The standard normal distribution function."""
    return erfc(-x / sqrt(2)) / 2


def output_layer(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """How many numbers each tensor of a model's output layer has: weights, then a bias if any.

    Weights may have the outputs in rows, as in PyTorch, or in columns, as in Keras and JAX.
    """
    last = shapes[-1]
    if len(shapes) > 1 and len(last) == 1:
        weights = shapes[-2]
        # A vector as long as the layer is wide, on either side, is its bias.
        if last[0] in (*weights[:1], *weights[-1:]):
            return prod(weights), prod(last)
    return (prod(last),)
