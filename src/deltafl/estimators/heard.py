"""What was heard of a round: who replied, of whom, and what each reply counts."""

from typing import NamedTuple

from ..types import Cohort, FloatArray, IntArray


class Heard(NamedTuple):
    """The replies of a round that can be used.

    Attributes:
        cohort: Those who replied, (n,).
        asked: Everybody asked, them included.
        coef_n: float64 (n,), what each reply counts in the estimate.
        response_n: float64 (n,), their response rates q_i in (0, 1] as they were assumed before the round.
    """

    cohort: Cohort
    asked: Cohort
    coef_n: FloatArray
    response_n: FloatArray

    @property
    def client_n(self) -> IntArray:
        """Who replied."""
        return self.cohort.client_n
