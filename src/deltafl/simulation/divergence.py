"""Divergence: noticing that a run has lost its model, and why, so that it ends at its last good state.

A run has diverged when

- the model has entries that are not finite, or the evaluated loss is not finite,
- the evaluated loss is above 1000 times the reference,
- the evaluated loss is above 10 times the reference 20 times in a row, and the loss is no lower and the accuracy no
  higher than at the first of them; or once in a round whose estimate D is above 1000 times the median of the last 20,
- in three rounds in a row every reply was refused: local training overflows, and the model cannot move any more,
- it has lost its skill, 20 evaluations in a row. *Skill* is (accuracy - chance) / (1 - chance), where chance is the
  share of the commonest test label; it is lost if it is at most 0.02 after it had been at least 0.25 and the loss is at
  least -log(chance), which no constant answer undercuts. A network all of whose units are dead looks like that.

The *reference* is the loss of a model that has learnt nothing: for a log loss (metric accuracy) the loss at the start,
and at least 1 nat, since a run may start from a trained model. Other losses have no such unit, and a start may be the
optimum: there it is the larger of the loss at the start and the median of the first five evaluations, before which only
infinite values count. Noisy runs of the paper's experiments stay below 1.7 times the smallest loss so far. A linear
model with a far too high local rate reaches 170 times the loss at the start and recovers (digits, local_lr 100,
accuracy 0.85 after 60 rounds), so a high loss must stay high before it ends a run. The norm of D alone ends nothing: a
perfect memory makes all norms tiny until a new cohort does not.

A run that is over before a high loss or lost skill has lasted for 20 evaluations has not diverged, but its end is
*suspect*.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..types import RoundInfo

#: Times the reference: lost if it stays there, lost at once.
HIGH, LOST = 10.0, 1000.0
#: Evaluations in a row that a high loss may take to fall, or a lost skill to come back.
PATIENCE = 20
#: Skill of a model that has learnt something, and of one that has learnt nothing.
SKILLED, UNSKILLED = 0.25, 0.02
#: Times the median of the last norms.
LONG = 1000.0
#: Rounds of the window, and the fewest norms that make a median.
WINDOW, FEWEST = 20, 5
#: Evaluations that make the reference of a loss without a unit.
FIRST = 5
#: Rounds in a row with refused replies only.
REFUSED = 3
#: A reply that counts so many times an equal share is a large weight.
LARGE_WEIGHT = 5.0
#: Residuals above so many times the updates (squared norms) do harm; an empty memory leaves 1.
HARMFUL = 1.2


class DivergedError(DeltaflError):
    """A run has diverged and was ended.

    Attributes:
        round: The round in which it was noticed, counted from 1.
        kept: The round whose model is kept; 0 is the initial model.
        why: Symptom and likely cause, one sentence without its full stop.
    """

    def __init__(self, round: int, kept: int, why: str) -> None:
        super().__init__(f"diverged in round {round}: {why}; the state of round {kept} is kept")
        self.round, self.kept, self.why = round, kept, why


class Method(NamedTuple):
    """What the likely cause depends on beside the rounds: the settings in words.

    Attributes:
        num_clients: m.
        remembers: Whether the estimator keeps a memory of one update a client.
        damped: Whether it learns how far to trust that memory.
        cure: What to lower, and what it is now.
    """

    num_clients: int
    remembers: bool
    damped: bool = False
    cure: str = "lower the local learning rate"


class Watch:
    """Looks at one run, round by round.

    Args:
        first_loss: Evaluated loss of the initial model.
        log_loss: Whether it is a log loss (metric accuracy), whose unit is one nat.
        chance: Accuracy of the best constant answer; no skill is looked for where it is 1, or NaN for none.
        first_accuracy: Evaluated accuracy of the initial model; NaN if there is none.
    """

    def __init__(
        self, first_loss: float, log_loss: bool, chance: float = np.nan, first_accuracy: float = np.nan
    ) -> None:
        self._log_loss = log_loss
        self._chance, self._best = (chance if chance < 1 else np.nan), first_accuracy
        self._first = [max(first_loss, 1.0) if log_loss else first_loss]
        self._infos: deque[RoundInfo] = deque(maxlen=WINDOW)
        self._high: list[tuple[float, float]] = []  # evaluations in a row that are above the limit
        self._unskilled = 0  # evaluations in a row
        self._refused = 0

    @property
    def reference(self) -> float:
        """The loss of a model that knows nothing; infinite until it is known."""
        if self._log_loss:
            return self._first[0]
        if len(self._first) <= FIRST:
            return float("inf")
        return max(self._first[0], float(np.median(self._first[1:])))

    @property
    def calm(self) -> bool:
        """Whether a state may be kept as good: by the last evaluation the loss was not high and no skill was lost."""
        return not self._high and not self._unskilled

    @property
    def suspicion(self) -> str | None:
        """What looks wrong by the last evaluation, as a clause; None if that was calm."""
        if self._high:
            return self._describe_loss(self._high[-1][0])
        return self._describe_skill() if self._unskilled else None

    def suspects(self, info: RoundInfo) -> bool:
        """Whether the model should be evaluated now, due or not: a very long step, or a lost local loss."""
        return self._is_long(info) or bool(info.loss > HIGH * self.reference)

    def see(self, info: RoundInfo, finite: bool, loss: float | None, accuracy: float = np.nan) -> str | None:
        """Judge a round.

        Args:
            info: The round.
            finite: Whether all entries of the model after it are finite.
            loss: The evaluated loss after it; None if it was not evaluated.
            accuracy: The evaluated accuracy, if there is one.

        Returns:
            What is wrong, as a clause; None as long as the run goes on.
        """
        long = self._is_long(info)
        self._infos.append(info)
        self._refused = self._refused + 1 if info.num_selected and not info.num_responded and info.rejected else 0
        if not finite:
            return "the model has entries that are not finite"
        if self._refused >= REFUSED:
            return f"every reply of {REFUSED} rounds in a row was refused"
        return None if loss is None else self._judge(loss, accuracy, long)

    def _judge(self, loss: float, accuracy: float, long: bool) -> str | None:
        if not np.isfinite(loss):
            return "the test loss is not finite"
        self._high = [*self._high, (loss, accuracy)] if loss > HIGH * self.reference else []
        stays = len(self._high) >= PATIENCE and loss >= self._high[0][0] and not accuracy > self._high[0][1]
        lost = stays or (bool(self._high) and long) or loss > LOST * self.reference
        if not self._log_loss and len(self._first) <= FIRST:
            self._first.append(loss)
        self._unskilled = self._unskilled + 1 if self._knows_nothing(loss, accuracy) else 0
        self._best = float(np.fmax(self._best, accuracy))
        if lost:
            return self._describe_loss(loss)
        return self._describe_skill() if self._unskilled >= PATIENCE else None

    def _knows_nothing(self, loss: float, accuracy: float) -> bool:
        """Whether a model that had skill has none: no better than the best constant answer, in both measures."""
        way = 1 - self._chance
        lost = self._best >= self._chance + SKILLED * way and accuracy <= self._chance + UNSKILLED * way
        return bool(lost and loss >= -np.log(self._chance))

    def _describe_loss(self, loss: float) -> str:
        return f"the test loss is {loss:.3g}, it was {self._first[0]:.3g} at the start"

    def _describe_skill(self) -> str:
        many = "evaluation" if self._unskilled == 1 else f"{self._unskilled} evaluations"
        return (
            f"the test accuracy of the last {many} is no better than that of one answer for all, {self._chance:.1%}; "
            f"it had been {self._best:.1%}"
        )

    def _is_long(self, info: RoundInfo) -> bool:
        norms = [past.estimate_norm for past in self._infos if past.estimate_norm > 0]
        return len(norms) >= FEWEST and not info.estimate_norm <= LONG * float(np.median(norms))

    def likely_cause(self, method: Method) -> str:
        """Why a run like this diverges, and what to change, as a clause; from the last rounds that were seen."""
        return likely_cause(list(self._infos), method)


def likely_cause(infos: Sequence[RoundInfo], method: Method) -> str:
    """The likely cause of a divergence, from what is known of the rounds before it.

    In this order: replies were refused for numbers that are not finite or too large (local training overflows); in the
    round whose estimate grew most, one reply counted more than five equal shares; the memory is stale, with residuals
    clearly larger than the updates; else the local rate.
    """
    refused = sum(len(info.rejected) for info in infos)
    if refused:
        asked = sum(info.num_selected for info in infos)
        return f"{refused} of the last {asked} replies were refused, so local training itself overflows: {method.cure}"
    worst = _steepest(infos)
    shares = worst.largest_weight * max(worst.num_responded, 1)
    if shares >= LARGE_WEIGHT:
        return (
            f"one reply counted {worst.largest_weight:.2g}, {shares:.2g} times an equal share, in round "
            f"{worst.round + 1}: raise floor, draw by size (md-fixed), or {method.cure}"
        )
    residuals = [info.residual for info in infos if np.isfinite(info.residual)]  # NaN where nobody replied
    left = float(np.median(residuals)) if residuals else 0.0
    age = method.num_clients / max(worst.num_selected, 1)
    if method.remembers and left > HARMFUL and infos[-1].round >= age:
        damp = "" if method.damped else "use a damped estimator, "
        return (
            f"the memory is stale: a client is selected every {age:.3g} rounds on average, and residuals are "
            f"{left:.2g} times the updates (squared norms): {damp}select more clients, or {method.cure}"
        )
    return f"local training goes too far in one round: {method.cure}, or take fewer local steps"


def _steepest(infos: Sequence[RoundInfo]) -> RoundInfo:
    """The round whose norm grew most over the round before it."""
    growth = [
        after.estimate_norm / before.estimate_norm if before.estimate_norm > 0 else 0.0
        for before, after in pairwise(infos)
    ]
    return infos[1 + int(np.argmax(np.nan_to_num(growth, nan=np.inf)))] if growth else infos[-1]
