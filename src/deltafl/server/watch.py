"""Divergence: detects that a model is lost, so that a run ends at, or a federation returns to, its
last good state.

A run has diverged when

- the model or the evaluated loss is not finite,
- the evaluated log loss is above 1000 times the reference, the larger of the loss at the start and
  1 nat,
- it is above 10 times the reference 20 times in a row, and neither loss nor accuracy is better than
  at the first of them; or once in a round whose estimate D is above 1000 times the median of the
  last 20,
- in three rounds in a row every reply was refused: local training overflows, and the model cannot
  move any more,
- it has lost its skill, 20 evaluations in a row. *Skill* is (accuracy - chance) / (1 - chance),
  where chance is the share of the commonest test label; it is lost if it is at most 0.02 after it
  had been at least 0.25 and the loss is at least -log(chance), which no constant answer undercuts.
  A network all of whose units are dead looks like that.

A linear model with a far too high local rate reaches 170 times the loss at the start and recovers
(digits, local_lr 100), so a high loss must stay high. Losses other than log losses have no unit to
compare with. A run that is over before a high loss or lost skill has lasted for 20 evaluations has
not diverged, but its end is *suspect*.
"""

from collections import deque

import numpy as np

from ..types import RoundInfo

#: Times the reference: lost if it stays there, lost at once.
HIGH = 10.0
LOST = 1000.0
#: Evaluations in a row that a high loss may take to fall, or a lost skill to come back.
PATIENCE = 20
#: Skill of a model that has learnt something, and of one that has learnt nothing.
SKILLED = 0.25
UNSKILLED = 0.02
#: Times the median of the last norms; the rounds of that window, and the fewest norms that make a
#: median.
LONG = 1000.0
WINDOW = 20
FEWEST = 5
#: Rounds in a row with refused replies only.
REFUSED = 3


class Watch:
    """Looks at one run, round by round; ``log_loss``: the loss is that of classes; no skill
    where ``chance`` is 1 or NaN.
    """

    def __init__(
        self,
        first_loss: float,
        log_loss: bool,
        chance: float = np.nan,
        first_accuracy: float = np.nan,
        metric: str = "the test loss",
    ) -> None:
        self._metric = metric
        self._first = first_loss
        self._reference = np.inf
        if log_loss:
            self._reference = max(first_loss, 1.0)
        self._chance = np.nan
        if chance < 1:
            self._chance = chance
        self._best = first_accuracy
        self.infos: deque[RoundInfo] = deque(maxlen=WINDOW)
        self._high: list[tuple[float, float]] = []  # evaluations in a row that are above the limit
        self._unskilled = 0  # evaluations in a row
        self._refused = 0

    @property
    def suspect(self) -> str | None:
        """What looks wrong by the last evaluation, as a clause; None if its state may be kept as
        good.
        """
        if self._high:
            return self._describe_loss(self._high[-1][0])
        if self._unskilled:
            return self._describe_skill()
        return None

    def wants_evaluation(self, info: RoundInfo) -> bool:
        """Whether the model should be evaluated now, due or not: a very long step, or a lost
        local loss.
        """
        return self._is_long(info) or bool(info.loss > HIGH * self._reference)

    def see(
        self,
        info: RoundInfo,
        finite: bool,
        loss: float | None,
        accuracy: float = np.nan,
    ) -> str | None:
        """What is wrong after a round, as a clause; None as long as the run goes on. Loss None:
        not evaluated.
        """
        long = self._is_long(info)
        self.infos.append(info)
        self._refused += 1
        if not info.num_selected or info.num_responded or not info.rejected:
            self._refused = 0
        if not finite:
            return "the model has entries that are not finite"
        if self._refused >= REFUSED:
            return f"every reply of {REFUSED} rounds in a row was refused"
        if loss is None:
            return None
        if not np.isfinite(loss):
            return f"{self._metric} is not finite"
        self._high.append((loss, accuracy))
        if not loss > HIGH * self._reference:
            self._high = []
        stays = False
        if len(self._high) >= PATIENCE:
            first_loss, first_accuracy = self._high[0]
            # Negated, as an accuracy that is unknown, NaN, has not risen either.
            stays = loss >= first_loss and not accuracy > first_accuracy
        # Counted first and forgotten below: both counts are of evaluations in a row.
        self._unskilled += 1
        if not self._knows_nothing(loss, accuracy):
            self._unskilled = 0
        # ``fmax`` leaves NaN out: not every evaluation has an accuracy.
        self._best = float(np.fmax(self._best, accuracy))
        if stays or (self._high and long) or loss > LOST * self._reference:
            return self._describe_loss(loss)
        if self._unskilled >= PATIENCE:
            return self._describe_skill()
        return None

    def _knows_nothing(self, loss: float, accuracy: float) -> bool:
        """Whether a model that had skill has none: no better than the best constant answer, in
        both measures.
        """
        way = 1 - self._chance
        lost = (
            self._best >= self._chance + SKILLED * way
            and accuracy <= self._chance + UNSKILLED * way
        )
        return bool(lost and loss >= -np.log(self._chance))

    def _describe_loss(self, loss: float) -> str:
        return f"{self._metric} is {loss:.3g}, it was {self._first:.3g} at the start"

    def _describe_skill(self) -> str:
        known = (
            f"no better than that of one answer for all, {self._chance:.1%}; it had been "
            f"{self._best:.1%}"
        )
        return f"the test accuracy of the last {self._unskilled} evaluations is {known}"

    def _is_long(self, info: RoundInfo) -> bool:
        norms = [past.estimate_norm for past in self.infos if past.estimate_norm > 0]
        # Negated, so that a norm of NaN counts as long.
        return len(norms) >= FEWEST and not info.estimate_norm <= LONG * float(np.median(norms))
