"""Census: a few numbers of every client, asked for once, before the first round.

Two-phase sampling (Neyman 1938): phase one asks everyone for something cheap, phase two samples with it. Every client
does its usual local work on the initial model and answers with a sketch of the *direction* of its update, and with the
update's norm. The principal components of the sketches become auxiliary variables, so that cohorts can be balanced on
what the clients' data are like without asking for labels; the norms say whom to ask first. Whatever a client answers,
estimates stay unbiased: an answer moves cohorts, no weight. docs/theory.md, section 11, has the argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, exp, prod, sqrt
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, check_ranges
from ..estimators.sketch import count_sketch
from ..types import FloatArray, Population

#: One answer a client; None, or what is no answer, where there is none.
Answers = Sequence[npt.ArrayLike | None] | npt.NDArray[np.floating]
#: Norms are squared and summed.
LARGEST_NORM = 1e100
#: Answers that are looked at together: copies of all of them are larger.
_BLOCK = 2**15


@dataclass(frozen=True)
class Census:
    """What clients are asked, and what the server makes of their answers.

    Attributes:
        components: q >= 1, auxiliary variables that are made of the answers.
        size: k, numbers of a sketch, 1 to 128; an answer has one more, the norm.
        noise: sigma >= 0, standard deviation of the normal noise that a client adds to each number of its sketch, which
            has length 1 without it; then the norm is not sent. ``epsilon`` says what that hides.
    """

    components: int = 10
    size: int = 128
    noise: float = 0.0
    ranges: ClassVar = {"components": "[1, 128]", "size": "[1, 128]", "noise": "[0, inf)"}

    def __post_init__(self) -> None:
        check_ranges(self, self.ranges)

    @property
    def length(self) -> int:
        """How many numbers an answer has."""
        return self.size + 1

    def answer(
        self,
        update: npt.ArrayLike,
        tensors: Sequence[int] = (),
        seed: int = 0,
        rng: np.random.Generator | None = None,
    ) -> FloatArray:
        """A client's answer, float64 (size + 1,): the sketch of v, scaled to length 1, and norm(u), 0 if unsent.

        v is made of the last ``tensors`` of the update u, each divided by its own norm. That way an output layer's bias
        says as much as its weights, and no layer drowns the others.

        Args:
            update: u = x_K - x_0, (d,), the client's usual local work on the initial model.
            tensors: How many numbers each of the last tensors of the model has, such as (5120, 10) for weights and
                bias of an output layer; the whole update as one tensor if left out.
            seed: Fixes the projection; the same for all clients.
            rng: Where the noise comes from; needed if there is any.
        """
        update_d = np.asarray(update, dtype=np.float64).ravel()
        ends = np.cumsum(tensors or (len(update_d),))
        if ends[-1] > len(update_d):
            raise DeltaflError(f"the census looks at the last {ends[-1]} parameters of an update of {len(update_d)}")
        with np.errstate(over="ignore", invalid="ignore"):
            parts = np.split(update_d[len(update_d) - ends[-1] :], ends[:-1])
            direction_d = np.concatenate([_unit(part) for part in parts])
            sketch_k = _unit(count_sketch(direction_d[None], self.size, seed)[0])
            norm = float(np.linalg.norm(update_d))
        if self.noise == 0:
            return np.append(sketch_k, norm)
        if rng is None:
            raise DeltaflError("an answer with noise needs a generator: write rng=np.random.default_rng()")
        return np.append(sketch_k + rng.normal(scale=self.noise, size=self.size), 0.0)

    def population(self, population: Population, answers: Answers) -> Population:
        """The population with auxiliary variables and norms from every client's answer; an unsent norm is NaN."""
        answer_mk = self._read(answers, population.num_clients)
        norm_m = np.where(np.isfinite(answer_mk).all(axis=1), answer_mk[:, -1], np.nan)
        norm_m = np.where(norm_m > 0, np.minimum(norm_m, LARGEST_NORM), np.nan)
        return population._replace(aux_mq=self.auxiliary(answer_mk, population.weight_m), norm_m=norm_m)

    def auxiliary(self, answers: Answers, weight_m: FloatArray) -> FloatArray:
        """The auxiliary variables, float64 (m, components), of mean 0 and mean squared norm 1 under the weights w_i.

        They are the first principal components of the sketches in the order of their variance, then zeros. Every sketch
        counts with length 1, whatever was sent, and as the mean client where there is no answer: None, numbers that are
        not finite, or a list of another length.
        """
        answer_mk = self._read(answers, len(weight_m))
        here_k = np.flatnonzero(np.isfinite(answer_mk).all(axis=1) & (weight_m > 0))
        aux_mq = np.zeros((len(weight_m), self.components))
        if len(here_k) == 0:
            return aux_mq
        share_k = weight_m[here_k] / weight_m[here_k].sum()
        blocks = [slice(first, first + _BLOCK) for first in range(0, len(here_k), _BLOCK)]

        def sketch_of(block: slice) -> FloatArray:  # made anew for each sum: all of them are as large as the answers
            return _units(answer_mk[here_k[block], :-1].astype(np.float64))

        mean_s = sum(share_k[block] @ sketch_of(block) for block in blocks)
        spread_ss: Any = 0.0
        for block in blocks:
            centred_ks = sketch_of(block) - mean_s
            spread_ss = spread_ss + (share_k[block, None] * centred_ks).T @ centred_ks
        _, axes = np.linalg.eigh(spread_ss)
        axes = axes[:, ::-1][:, : self.components]
        axes *= np.sign(axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])])  # a newcomer turns no axis round
        for block in blocks:
            aux_mq[here_k[block], : axes.shape[1]] = (sketch_of(block) - mean_s) @ axes
        aux_mq /= max(sqrt(float(weight_m @ (aux_mq**2).sum(axis=1))), np.finfo(np.float64).tiny)
        return aux_mq

    def _read(self, answers: Answers, num_clients: int) -> npt.NDArray[np.floating]:
        """The answers as numbers, (m, length): an array of them as it is, else with NaN where there is none."""
        if len(answers) != num_clients:
            raise DeltaflError(f"the census has {len(answers)} answers, not one for each of {num_clients} clients")
        if type(answers) is np.ndarray and answers.dtype.kind == "f" and answers.shape == (num_clients, self.length):
            return answers
        answer_mk = np.empty((num_clients, self.length))
        for row_k, answer in zip(answer_mk, answers, strict=True):
            row_k[:] = _numbers(answer, self.length)
        return answer_mk

    def epsilon(self, delta: float) -> float:
        """Epsilon of one answer: local differential privacy of the update, and so of all of the client's data.

        Sketches without noise have length 1, so that no two are further apart than 2: the Gaussian mechanism with that
        sensitivity, exactly (Balle and Wang 2018, theorem 8). Infinite without noise, and instead of more than 512.

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
            return _normal(ratio / 2 - epsilon / ratio) - exp(epsilon) * _normal(-ratio / 2 - epsilon / ratio) - delta

        low, high = 0.0, 512.0
        if excess(high) > 0:
            return float("inf")
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return high


def _unit(part: FloatArray) -> FloatArray:
    """A vector of length 1 in the same direction; 0 stays 0."""
    largest = float(np.abs(part).max(initial=0.0))
    if largest == 0:
        return part
    part = part / largest
    return np.asarray(part / np.linalg.norm(part))


def _units(part_kd: FloatArray) -> FloatArray:
    """``_unit`` of every row, in place and with the same bits."""
    largest_k = np.abs(part_kd).max(axis=1, initial=0.0)
    part_kd /= np.where(largest_k > 0, largest_k, 1.0)[:, None]
    norm_k = np.sqrt((part_kd[:, None, :] @ part_kd[:, :, None])[:, 0, 0])
    part_kd /= np.where(largest_k > 0, norm_k, 1.0)[:, None]
    return part_kd


def _numbers(answer: npt.ArrayLike | None, size: int) -> FloatArray:
    """An answer as numbers; NaN if it is none."""
    try:
        answer_k = np.asarray(np.nan if answer is None else answer, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        answer_k = np.zeros(())
    if answer_k.shape != (size,) or not np.isfinite(answer_k).all():
        return np.full(size, np.nan)
    return answer_k


def _normal(x: float) -> float:
    """The standard normal distribution function."""
    return erfc(-x / sqrt(2)) / 2


def output_layer(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """How many numbers each tensor of a model's output layer has: the last one, and weights that fit it if a bias.

    Weights may have the outputs in rows, as in PyTorch, or in columns, as in Keras and JAX.
    """
    ends = [tuple(shape) for shape in (shapes[-2][:1], shapes[-2][-1:])] if len(shapes) > 1 else []
    with_bias = len(shapes[-1]) == 1 and tuple(shapes[-1]) in ends
    return tuple(prod(shape) for shape in shapes[-2 if with_bias else -1 :])
